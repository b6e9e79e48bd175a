"""`whence doctor`: check the installation, the devices, and a study file."""

from __future__ import annotations

import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whence.cli import settings
from whence.cli.options import compute_options
from whence.cli.screen import FAILED, FINE, Answer, command
from whence.errors import WhenceError
from whence.table import byte_size, duration

if TYPE_CHECKING:
    from whence.cli.studyfile import StudyFile

NEEDED = ("torch", "numpy", "safetensors", "tqdm")
FOR_DEVELOPERS = ("test", "docs")
TRIAL = 8  # examples in the batch that is tried
SOUND, NOTE, BAD = "sound", "note", "bad"
MARKS = {SOUND: ("✓", "green"), NOTE: ("!", "yellow"), BAD: ("✗", "bold red")}

Finding = tuple[str, str]  # verdict, message


@command(options=compute_options, only=("device",))
def doctor(
    study: Annotated[
        Path | None, typer.Argument(metavar="[STUDY]", help="A study file to check.")
    ] = None,
    method: str = "source",
    *,
    options: dict[str, Any],
) -> Answer:
    """Check the installation, the devices and their memory, and a study file.

    For a study file, this tries a batch, compares every checkpoint with the model, and estimates
    the time of attribution. The exit code is 1 if something is wrong.

    Examples:

    - `whence doctor`
    - `whence doctor study.py --method influence --device cuda`

    Args:
        method (METHOD): Method whose time and memory to estimate.
    """
    method = settings.find(method)
    machine = {"versions": _versions(), "extras": _extras(), "devices": _devices()}
    if study is None:
        return Answer(machine, _lines(_machine_lines(machine)))
    from whence.cli.studyfile import load_study

    file = load_study(study)
    checks = [
        {"check": name, "verdict": verdict, "message": message}
        for name, verdict, message in run_checks(file, method, options.get("device"))
    ]
    bad = sum(check["verdict"] == BAD for check in checks)
    problems = "1 problem" if bad == 1 else f"{bad or 'no'} problems"
    lines = [*_machine_lines(machine), ("", "")]
    lines += [(check["verdict"], f"{check['check']}: {check['message']}") for check in checks]
    lines.append(("", f"{study}: {problems} found"))
    data = machine | {"study": {"path": study, "sound": not bad, "checks": checks}}
    return Answer(data, _lines(lines), FAILED if bad else FINE)


def run_checks(file: StudyFile, method: str, device: Any = None) -> Iterator[tuple[str, str, str]]:
    """(check, verdict, message) of each check; one that raises is bad, and the others still run.

    A fault that several checks meet is reported once.
    """
    study = file.study
    checks: list[tuple[str, Callable[[], Finding]]] = [("study", lambda: (SOUND, repr(study)))]
    for k, run in enumerate(study.runs):
        name = f"run {k}" if len(study.runs) > 1 else "run"
        checks.append((name, partial(_run, run)))
        checks.append((f"{name}, weights", partial(_weights, study, run)))
    for stage in study.stages:
        name = "data" if len(study.stages) == 1 else f"data of {stage}"
        checks.append((name, partial(_data, study, stage)))
    checks += [
        ("query", partial(_query, file)),
        ("layers", partial(_layers, study)),
        ("batch", partial(_batch, study)),
        ("cost", partial(_cost, file, method, device)),
        ("recipe", partial(_recipe, file)),
        *((name, lambda why=why: (NOTE, why)) for name, why in file.other.items()),
    ]
    faults: dict[str, str] = {}  # the check that reported each first
    said: set[str] = set()
    for name, check in checks:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                verdict, message = check()
            except Exception as error:
                known = isinstance(error, (WhenceError, OSError))
                kind = "" if known else type(error).__name__ + ": "
                verdict, message = BAD, kind + " ".join(str(error).split())
        fault = re.sub(r"at step \d+", "at a step", message)  # one fault of all checkpoints
        if verdict == BAD and faults.setdefault(fault, name) != name:
            verdict, message = NOTE, f"not checked, because of the problem of: {faults[fault]}"
        yield name, verdict, message
        for text in (" ".join(str(warning.message).split()) for warning in caught):
            # the check of the layers says what is tracked
            if text not in said and (name != "cost" or "tracked" not in text):
                said.add(text)
                yield name, NOTE, text


def _run(run: Any) -> Finding:
    adaptive = {s: o for s, o in run.optimizers.items() if o in ("adam", "adamw", "rmsprop")}
    lacking = [c.step for c in run.checkpoints if c.stage in adaptive and c.moments is None]
    if lacking:
        return BAD, (
            f"{run!r}: the checkpoints at {lacking} have no second moments, which SOURCE needs for "
            f"{', '.join(adaptive.values())}; TracIn and Influence(damping=1e-8) do not"
        )
    return (SOUND if run.finished else NOTE), repr(run)


def _weights(study: Any, run: Any) -> Finding:
    from whence.layers.passes import load_weights
    from whence.study import copied

    models = {stage: copied(model) for stage, model in study.models.items()}
    for checkpoint in run.checkpoints:
        weights = checkpoint.weights()
        load_weights(models[checkpoint.stage], weights, checkpoint.step)
        wrong = [n for n, w in weights.items() if w.is_floating_point() and not w.isfinite().all()]
        if wrong:
            return (
                BAD,
                f"at step {checkpoint.step}, {wrong[0]} is NaN or infinite: the run diverged",
            )
    return SOUND, f"all {len(run.checkpoints)} checkpoints are complete and fit the model"


def _data(study: Any, stage: str) -> Finding:
    from whence.data import structure

    data = study.data[stage]
    built = structure(data.take(range(min(TRIAL, len(data)))))
    if data.moving:
        return BAD, data.moving
    return SOUND, f"{len(data):,} examples; the fields of a batch: {built}"


def _query(file: StudyFile) -> Finding:
    if file.query is None:
        return NOTE, "not defined: attribute with --query NAME or --query self"
    return SOUND, f"{len(file.study.query(file.query)):,} queries, built like the training data"


def _layers(study: Any) -> Finding:
    from whence.cli.attributing import tracked_layers

    tracked = tracked_layers(study)
    return (SOUND if tracked.share > 0.5 else NOTE), tracked.summary()


def _batch(study: Any) -> Finding:
    import torch

    from whence.data import place
    from whence.study import loader

    stage, place_of = study.stages[-1], (torch.device("cpu"), torch.float32)
    loaded, task, data = loader(study.model, *place_of), study.tasks[stage], study.data[stage]
    loaded.load(study.runs[0].final)
    batch = place(data.take(range(min(TRIAL, len(data)))), *place_of)
    with torch.no_grad():
        outputs = task.outputs(loaded.model, batch)
        losses, measured = task.losses(outputs, batch), task.measurements(outputs, batch)
    text = (
        f"the final model's loss on {len(losses)} training examples is {float(losses.mean()):.4g}, "
        f"their {task.measurement} {float(measured.mean()):.4g} {task.unit}"
    )
    return (SOUND if bool(losses.isfinite().all()) else BAD), text


def _cost(file: StudyFile, method: str, device: Any) -> Finding:
    study = file.study
    if not hasattr(settings.method_class(method), "estimate"):
        return NOTE, f"{method} has no estimate"
    checkpoints = min(len(run.checkpoints) for run in study.runs)
    segments = settings.OPTIONS[method].get("segments")
    arguments = {}
    if segments is not None and isinstance(segments.default, int):  # not more than checkpoints
        arguments["segments"] = min(segments.default, checkpoints)
    chosen = settings.constructor(method)(**arguments)
    estimate = chosen.estimate(study, file.query, device=device)
    seconds = len(study.runs) * estimate["seconds"]
    queries = 0 if file.query is None else len(file.query)
    examples = sum(len(data) for data in study.data.values())
    size = max(1, queries) * examples * 4
    free = shutil.disk_usage(Path.cwd()).free
    passes = ", ".join(f"{count} × {kind}" for kind, count in estimate["passes"].items() if count)
    text = (
        f"{chosen!r}: about {duration(seconds)}, {byte_size(estimate['bytes'])} of memory, "
        f"{byte_size(size)} of scores; passes over the data: {passes}"
    )
    return (SOUND if size < free else BAD), text + (
        "" if size < free else f". Only {byte_size(free)} are free on this disk: use --top"
    )


def _recipe(file: StudyFile) -> Finding:
    from whence.retrain.compare import differences, other_initial_weights, other_losses, unknown

    recipe, study = file.recipe, file.study
    if recipe is None:
        return NOTE, "not defined: truth, removal and leave-one-out need one"
    for stage in recipe.stages:
        data = study.data.get(stage.name if len(recipe.stages) > 1 else study.stages[0])
        if data is None or data.fingerprint() != stage.data.fingerprint():
            return BAD, f"its training data of stage {stage.name!r} is not the study's"
    run = study.runs[0]
    if run.origin and run.origin.get("recipe") == recipe.fingerprint:
        return SOUND, f"it trained the run, with seed {run.origin['seed']}"
    unequal = [*differences(recipe, run), *other_losses(recipe, study, run)]
    if unequal:
        return BAD, f"it is not the training that the run recorded: {'; '.join(unequal)}"
    if run.initial is None:
        return NOTE, "the run has no initial weights to compare with the recipe's"
    seed = int(run.origin.get("seed", 0)) if run.origin else 0
    other = other_initial_weights(recipe, run, seed)
    if other is not None:
        return NOTE, (
            f"with seed {seed} it does not start from the run's initial weights ({other} "
            "differs). Commands that retrain follow the recipe: use runs=recipe.run(seed, out) in "
            "the study to be sure that both are the same training"
        )
    known = "updates, rates and settings are the run's" + (
        "" if run.batches is None else ", and so are the batch sizes"
    )
    known += f"; with seed {seed} it starts from the run's initial weights"
    doubts = unknown(recipe, run)
    return (NOTE, "; ".join([known, *doubts])) if doubts else (SOUND, known)


def _versions() -> dict[str, str | None]:
    from whence import __version__

    python = ".".join(map(str, sys.version_info[:3]))
    return {"whence": __version__, "python": python, **{name: _version(name) for name in NEEDED}}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _extras() -> dict[str, dict[str, str | None]]:
    """{extra: {package: its version, or None}}, from the metadata of whence."""
    extras: dict[str, dict[str, str | None]] = {}
    try:
        required = metadata.requires("whence-tda") or []
    except metadata.PackageNotFoundError:  # not installed: run from the sources
        return {}
    for line in required:
        match = re.match(r"([\w.-]+)(?:\[[^\]]*\])?.*;.*extra == ['\"]([\w-]+)['\"]", line)
        if match and match[2] not in FOR_DEVELOPERS and match[1] != "whence-tda":
            extras.setdefault(match[2], {})[match[1]] = _version(match[1])
    return extras


def _devices() -> list[dict[str, Any]]:
    import torch

    from whence.engine.workspace import free_and_total

    names = {"cpu": f"{torch.get_num_threads()} threads"}
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        names |= {f"cuda:{k}": torch.cuda.get_device_name(k) for k in range(count)}
    devices: list[dict[str, Any]] = []
    for name, about in names.items():
        free, total = free_and_total(torch.device(name))
        devices.append({"device": name, "about": about, "free": free, "total": total})
    if torch.backends.mps.is_available():
        devices.append({"device": "mps", "about": "Apple GPU", "free": None, "total": None})
    return devices


def _machine_lines(machine: dict[str, Any]) -> list[tuple[str, str]]:
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines = [("", versions)]
    for device in machine["devices"]:
        memory = ""
        if device["total"]:
            memory = f", {byte_size(device['free'])} free of {byte_size(device['total'])}"
        lines.append((SOUND, f"{device['device']}: {device['about']}{memory}"))
    if len(machine["devices"]) == 1:
        lines.append((NOTE, "no GPU found: everything runs on the CPU"))
    for extra, packages in machine["extras"].items():
        missing = [name for name, version in packages.items() if version is None]
        if missing:
            how = f"pip install 'whence-tda[{extra}]'"
            lines.append((NOTE, f"{extra}: {', '.join(missing)} missing: {how}"))
        else:
            versions = ", ".join(f"{name} {version}" for name, version in packages.items())
            lines.append((SOUND, f"{extra}: {versions}"))
    if not machine["extras"]:
        lines.append((NOTE, "whence is not installed as a package, so its extras are unknown"))
    return lines


def _lines(lines: list[tuple[str, str]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 1))
    for verdict, text in lines:
        mark, style = MARKS.get(verdict, ("", ""))
        table.add_row(Text(mark, style=style), Text(text))
    return table
