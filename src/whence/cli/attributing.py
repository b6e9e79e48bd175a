"""Commands about attribution: layers, fit, attribute, top."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whence.cli import settings
from whence.cli.options import (
    BatchSize,
    Check,
    Device,
    Dtype,
    Engine,
    Executor,
    Memory,
    Progress,
    Query,
    ScoresPath,
    StudyPath,
    ToShow,
    Workers,
    device_of,
    dtype_of,
    open_scores,
    progress_wanted,
)
from whence.cli.screen import Answer, CommandError, command, say

if TYPE_CHECKING:
    from whence.cli.studyfile import StudyFile
    from whence.scores import Scores

OWN = "Settings of the method"
TASKS = {
    "classification": "Classification",
    "regression": "Regression",
    "language": "LanguageModeling",
}
SHOWN = 60  # characters of an example

Method = Annotated[
    str,
    typer.Option(metavar="METHOD", help=f"One of {', '.join(settings.methods())}."),
]


def commands(shown: str) -> list[Callable[..., int]]:
    """The commands, with the settings of one method in their help."""
    made = [command(resumes=True)(with_settings(function, shown)) for function in (fit, attribute)]
    return [layers, *made, top]


def with_settings(function: Callable[..., Answer], shown: str) -> Callable[..., Answer]:
    """Give a command the settings of all methods as options; those that are given arrive as
    `given`. Help shows those of one method."""
    own = settings.methods()[shown]
    extra = []
    everything = settings.options()
    for name in sorted(everything, key=lambda name: list(own).index(name) if name in own else 99):
        setting = own.get(name, everything[name])
        option = typer.Option(
            setting.option,
            help=setting.help,
            metavar=None if setting.flag else setting.metavar,
            rich_help_panel=f"Settings of {shown} (for another method: --method NAME --help)",
            show_default=False,
            hidden=name not in own,
        )
        extra.append(
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[bool | None if setting.flag else str | None, option],
            )
        )

    def run(**arguments: Any) -> Answer:
        given = {p.name: arguments.pop(p.name) for p in extra}
        asked = {name: value for name, value in given.items() if value is not None}
        return function(given=asked, **arguments)

    signature = inspect.signature(function, eval_str=True)
    plain = [
        p.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for p in signature.parameters.values()
        if p.name != "given"
    ]
    run.__doc__, run.__name__ = function.__doc__, function.__name__
    run.__signature__ = inspect.Signature([*plain, *extra])  # type: ignore[attr-defined]
    return run


def made(method: str, given: dict[str, str | bool], study: StudyFile) -> Any:
    """The method, out of the options that were given and what the study file has."""
    arguments = settings.chosen(method, given)
    if "recipe" in settings.methods()[method]:
        arguments["recipe"] = study.needs_recipe()
    return settings.kind(method)(**arguments)


def accepted(call: Callable[..., Any], method: str, asked: dict[str, Any]) -> dict[str, Any]:
    """The options that were given; refused where the method's `attribute` or `fit` has no use for
    them."""
    known = inspect.signature(call).parameters
    given = {name: value for name, value in asked.items() if value not in (None, False)}
    for name in given:
        if name not in known:
            has = ", ".join(f"--{n.replace('_', '-')}" for n in asked if n in known)
            raise CommandError(
                f"--{name.replace('_', '-')} means nothing to {method}, which takes {has or 'none'}"
            )
    return given


@command()
def layers(
    place: Annotated[
        Path, typer.Argument(metavar="STUDY", help="A study file; or the folder of a run.")
    ],
    more: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:NAME",
            help="With a run: the model, or a function that makes it; modules are found from here.",
        ),
    ] = None,
    train: Annotated[
        str | None,
        typer.Option(metavar="MODULE:NAME", help="With a run: the training data, likewise."),
    ] = None,
    task: Annotated[
        str | None, typer.Option(metavar="TASK", help=f"With a run: {', '.join(sorted(TASKS))}.")
    ] = None,
    layers: Annotated[
        list[str] | None,
        typer.Option("--layers", metavar="PATTERN", help="With a run: only layers named so."),
    ] = None,
) -> Answer:
    """Which layers are tracked, what is left out and why, and what a pass over the data costs.

    Examples:

    - `whence layers study.py`
    - `whence layers runs/mnist --model train:make_model --train train:train_set`
    """
    patterns = [*(layers or []), *(more or [])]
    if more and not layers:
        raise CommandError(f"{more[0]!r} is one argument too many: give one study, or one run")
    import warnings

    import whence
    from whence.cli.studyfile import load_study

    if place.suffix in (".py", ".yaml", ".yml") and not place.is_dir():
        options = {"--model": model, "--train": train, "--task": task, "--layers": patterns}
        strange = [name for name, value in options.items() if value]
        if strange:
            raise CommandError(f"{strange[0]} is for a run's folder: {place} is a study file")
        study = load_study(place).study
    else:
        if model is None or train is None:
            raise CommandError(
                f"{place} is no study file: give one, or --model and --train to go with a run"
            )
        if task is not None and task not in TASKS:
            raise CommandError(f"--task {task}: use one of {', '.join(sorted(TASKS))}")
        study = whence.Study(
            _found("--model", model),
            getattr(whence, TASKS[task or "classification"])(),
            train=_found("--train", train),
            runs=place,
            layers=patterns or None,
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is left out is part of the description
        tracked = tracked_layers(study)
        return Answer(
            {
                "layers": [
                    {"name": b.name, "outputs": b.o, "inputs": b.i, "bias": b.bias}
                    | {"parameters": b.size, "positions": tracked.positions[b.name]}
                    for b in tracked.blocks
                ],
                "parameters": tracked.parameters,
                "share": tracked.share,
                "left_out": [vars(e) for e in tracked.excluded],
                "examples": {name: len(data) for name, data in study.data.items()},
            },
            study.describe(),
        )


def fit(
    study: StudyPath,
    given: dict[str, str | bool],
    method: Method = "source",
    device: Device = None,
    dtype: Dtype = None,
    batch_size: BatchSize = None,
    memory: Memory = None,
    workers: Workers = None,
    progress: Progress = None,
) -> Answer:
    """Fit curvature now, without queries; `attribute` with the same settings finds it.

    Examples:

    - `whence fit study.py --method source --segments 3`
    - `whence fit study.py --method influence --damping source --device cuda`
    """
    method = settings.find(method)
    settings.chosen(method, given)
    from whence.cli.studyfile import load_study

    asked = {
        "device": device_of(device),
        "dtype": dtype_of(dtype),
        "batch_size": batch_size,
        "memory": memory,
        "workers": workers,
    }
    file = load_study(study)
    chosen = made(method, given, file)
    if not hasattr(chosen, "fit"):
        raise CommandError(f"{method} fits nothing: go on with `whence attribute`")
    folders = [file.study.store(run).folder for run in file.study.runs]
    if None in folders:
        raise CommandError(
            f"the study of {study} keeps its factors in memory, so that fitting is lost: give "
            "Study(cache=folder), or a run on disk"
        )
    before = {path: _files(path) for path in folders if path is not None}
    chosen.fit(
        file.study, progress=progress_wanted(progress), **accepted(chosen.fit, method, asked)
    )
    report: list[dict[str, Any]] = [
        {"folder": path, "new": sorted(_files(path) - had), "found": sorted(had)}
        for path, had in before.items()
    ]
    lines = [f"{r['folder']}: {len(r['new'])} files of factors are new" for r in report]
    if not any(r["new"] for r in report):
        lines.append(f"{chosen!r} had nothing to fit, or found it fitted")
    return Answer({"method": repr(chosen), "cache": report}, "\n".join(lines))


def attribute(
    study: StudyPath,
    given: dict[str, str | bool],
    method: Method = "source",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FOLDER",
            help="Where the scores go. Default: scores/STUDY-METHOD.",
        ),
    ] = None,
    query: Query = None,
    top: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="INT", help="Keep only each query's so many most helpful and harmful."
        ),
    ] = None,
    by_segment: Annotated[
        bool, typer.Option("--by-segment", help="Keep what each segment contributed.")
    ] = False,
    device: Device = None,
    dtype: Dtype = None,
    batch_size: BatchSize = None,
    memory: Memory = None,
    workers: Workers = None,
    executor: Executor = None,
    engine: Engine = None,
    progress: Progress = None,
) -> Answer:
    """Score every training example for every query.

    Interrupted (Ctrl-C, a killed job), the same command goes on where it stopped.

    Examples:

    - `whence attribute study.py --method source --segments 3 --out scores/source`
    - `whence attribute study.py --method influence --damping source --device cuda`
    - `whence attribute study.py --query self --out scores/self-influence`
    - `whence attribute --method trak --help`
    """
    method = settings.find(method)
    settings.chosen(method, given)
    place = out or Path("scores") / f"{study.stem}-{method}"
    from whence.cli.studyfile import load_study

    asked = {
        "top": top,
        "by_segment": by_segment,
        "device": device_of(device),
        "dtype": dtype_of(dtype),
        "batch_size": batch_size,
        "memory": memory,
        "workers": workers,
        "executor": executor,
        "engine": engine,
    }
    file = load_study(study)
    chosen = made(method, given, file)
    call = accepted(chosen.attribute, method, asked)
    if "progress" in inspect.signature(chosen.attribute).parameters:
        call["progress"] = progress_wanted(progress)
    queries = file.asked(query)
    try:
        scores = chosen.attribute(file.study, queries, out=place, **call)
    except ValueError as error:
        if "another calculation" not in str(error):
            raise
        raise CommandError(f"{error}. {_held(place)}") from error
    which = [] if scores.is_self_influence else ["--query", "0"]
    look = shlex.join(["whence", "top", str(place), *which, "--study", str(study)])
    return Answer(about(scores) | {"path": place}, f"{scores!r}\nin {place}. Look at it: {look}")


@command()
def top(
    scores: ScoresPath,
    query: Annotated[
        int | None, typer.Option("--query", "-q", metavar="INT", help="Which query, by its number.")
    ] = None,
    k: Annotated[
        int, typer.Option("-k", min=1, metavar="INT", help="How many at either end.")
    ] = 10,
    study: ToShow = None,
    check: Check = True,
) -> Answer:
    """The training examples that helped a query most, and those that harmed it.

    Examples:

    - `whence top scores/source --query 3 -k 10`
    - `whence top scores/source --query 3 --study study.py`
    """
    found = open_scores(scores)
    ends = {"helpful": found.helpful(query, k), "harmful": found.harmful(query, k)}
    shown = None if study is None else _Shown(found, study, check)
    data = about(found) | {
        "query": query,
        **{
            end: [
                e._asdict() | ({} if shown is None else shown.train(e.example, e.stage))
                for e in ranking
            ]
            for end, ranking in ends.items()
        },
    }
    asked = "" if query is None else f" of query {query}"
    if shown is not None and query is not None:
        data["shown"] = shown.query(int(found.query_ids[query]))
        asked += f": {_line(data['shown'])}"
    return Answer(data, _tables(found, data, asked))


def about(scores: Scores) -> dict[str, Any]:
    """What scores are, for machines."""
    names = ("method", "settings", "measurement", "unit", "higher_is_better", "shape", "excluded")
    return {name: getattr(scores, name) for name in names} | {
        "self_influence": scores.is_self_influence,
        "diagnostics": scores.diagnostics,
        "provenance": scores.provenance,
    }


class _Shown:
    """The examples of a study file, as text."""

    def __init__(self, scores: Scores, path: Path, check: bool) -> None:
        from whence.cli.studyfile import load_study
        from whence.present.check import by_stage, check_data
        from whence.present.examples import Examples

        file = load_study(path)
        query = None if scores.is_self_influence else file.query
        own = file.study
        for note in check_data(scores, own.train, query, collate=own.collate, contents=check):
            say(f"warning: {note}")
        stages = by_stage(scores, own.train)
        looks = file.looks()
        self._train = {name: Examples(data, **looks) for name, data in stages.items()}
        self._query = Examples(query, **looks)

    def train(self, example: int, stage: str | None) -> dict[str, Any]:
        found = self._train.get(stage) or next(iter(self._train.values()))
        return _short(found.render(example))

    def query(self, row: int) -> dict[str, Any]:
        return _short(self._query.render(row))


def _short(rendered: dict[str, Any]) -> dict[str, Any]:
    """What a terminal can show of an example: its label, and its text or row."""
    found = {name: rendered[name] for name in ("label", "text", "row") if rendered.get(name)}
    return {"kind": rendered["kind"], **found}


def _line(shown: dict[str, Any]) -> str:
    text = shown.get("text") or ", ".join(f"{n}={v}" for n, v in shown.get("row", []))
    text = " ".join(text.split())
    text = text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
    parts = [shown.get("label"), text or (shown["kind"] if shown["kind"] == "image" else "")]
    return "  ".join(part for part in parts if part)


def _tables(scores: Scores, data: dict[str, Any], asked: str) -> Any:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    head = f"{scores.method}, {scores.measurement} in {scores.unit}"
    parts: list[Any] = [Text(head + (f"; {scores.measurement}{asked}" if asked else ""))]
    words = {"helpful": ("most helpful", "green"), "harmful": ("most harmful", "red")}
    for end, (word, colour) in words.items():
        table = Table(title=Text(word, style=f"bold {colour}"), title_justify="left", box=None)
        table.add_column("example", justify="right")
        table.add_column("value", justify="right", style=colour)
        stages = any(entry["stage"] for entry in data[end])
        if stages:
            table.add_column("stage")
        if any("kind" in entry for entry in data[end]):
            table.add_column("label, content")
        for e in data[end]:
            cells = [str(e["example"]), f"{e['value']:+.4g}"]
            cells += [e["stage"] or ""] if stages else []
            table.add_row(*cells, *([Text(_line(e))] if "kind" in e else []))
        parts += ["", table]
    return Group(*parts)


def _held(place: Path) -> str:
    """Whose scores lie in a folder."""
    from whence.scores import Scores

    if not (place / "scores.json").exists():
        return "It holds the beginning of others"
    held = Scores.load(place)
    own = ", ".join(f"{name}={value!r}" for name, value in held.settings.items())
    return f"It holds {held.shape} scores by {held.method}({own}), of {held.measurement}"


def tracked_layers(study: Any) -> Any:
    """The layers that a study tracks at its first run."""
    import torch

    from whence.layers.passes import precision_as_asked

    with precision_as_asked():
        cpu = torch.device("cpu")
        passes = study.passes(study.runs[0], device=cpu, dtype=torch.float32, quiet=True)
    return passes[study.stages[-1]].tracked


def _files(folder: Path) -> set[str]:
    return {file.name for file in folder.glob("*.safetensors")}


def _found(option: str, place: str) -> Any:
    """What `MODULE:NAME` names; called, if it is a function or a class."""
    import importlib
    import os
    import sys

    module, _, name = place.partition(":")
    if not module or not name:
        raise CommandError(f"{option} {place!r}: write MODULE:NAME, such as train:make_model")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise CommandError(f"{option} {place!r} cannot be found ({error})") from error
    finally:
        sys.path.remove(os.getcwd())
    plain = hasattr(found, "parameters") or hasattr(found, "__getitem__")
    return found() if callable(found) and (isinstance(found, type) or not plain) else found
