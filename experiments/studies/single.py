"""The leaderboard's measurements: every method under two protocols, on the same tasks.

    python -m experiments.studies.single TASK... [--device cuda] [--jobs 3]
    python -m experiments.studies.single --from FOLDER     # rows from saved sums, without training
    python -m experiments.studies.single TASK... --published published    # to published truths

*Single model* repeats the training of one run with some examples weighted to zero in place;
*expected* retrains on subsets, with several seeds. For each task and protocol, one small file of
sums (`experiments.studies.sums`) goes to --out, method by method: a method that is there is not
computed again. Trainings stay in --work, and the metasmoothness of the task goes there too. The
rows go to results/leaderboard.json, which `experiments.leaderboard` turns into a page.

With --published, truths and earlier rows are those of published benchmarks, and only runs are
trained. A single model must be smooth then: another machine repeats a rough training with another
result.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from experiments.engine.rivals import RIVALS, rival_scores
from experiments.engine.trainings import Trainings
from experiments.studies.options import SIZES, parsed_or_saved, parser, saved_sums
from experiments.studies.publish import reopened
from experiments.studies.sums import TRUTH, Sums
from experiments.studies.sums import Protocol as Sizes
from experiments.tasks import RESULTS
from experiments.tasks.board import BOARD, ENTRIES, PROTOCOLS, Protocol, build_entry, read_board
from experiments.tasks.machine import machine, seconds
from whence.evaluate import LDS, Benchmark, calibration, lds, metasmoothness
from whence.evaluate.metasmoothness import ROUGH
from whence.layers.choose import Chooser, matrices
from whence.persist.files import write_json

DIRECTIONS = 16
DEFINITION = 2  # of Engstrom et al.; results without this number weighted by the first half alone
SMOOTHNESS = ("metasmoothness", "correlation", "definition")
OURS = ("Source()", "Best()")  # whose paired difference every row has
Row = dict[str, Any]


def measure(task: str, options: argparse.Namespace) -> list[Path]:
    """Train, attribute, and save the sums of all methods on one task; a file per protocol."""
    experiment, work = BOARD[task], trainings(task, options)
    truths, files = given(task, options) if options.published else retrained(work, options)
    for name in ENTRIES:
        if options.only and not any(word in name for word in options.only):
            continue
        method = build_entry(name, experiment, work.examples)
        missing = [p for p, saved in files.items() if not has(saved, name, repr(method))]
        if not missing:
            continue
        several, layers = any(not protocol.in_place for protocol in missing), ENTRIES[name].layers
        if layers is not None and not has_more_than_matrices(work.recipe.build(0)):
            say(task, f"{name} does not apply: all layers are matrices")
            continue
        most = min(ENTRIES[name].most_runs or work.scale.runs, work.scale.runs)
        scores, cost = attributed(work, method, most if several else 1, layers)
        if not scores:
            say(task, f"{name} does not apply: {cost}")
            continue
        for protocol in missing:
            runs = scores[:1] if protocol.in_place else scores
            files[protocol].add(name, runs, [truths[protocol]], repr(method), float(cost))
            note_device(files[protocol], name, work.device)
            files[protocol].save(options.out / protocol.name)
        say(task, f"{name}: {len(scores)} runs, {float(cost):.1f} s each")
    for name in RIVALS:
        described = f"{name}, {options.models} models"
        if options.only and not any(word in name for word in options.only):
            continue
        missing = [p for p, saved in files.items() if not has(saved, name, described)]
        if not missing:
            continue
        start = seconds(work.device)
        one = rival_scores(name, work, options.models)
        cost = seconds(work.device) - start
        for protocol in missing:
            files[protocol].add(name, [one], [truths[protocol]], described, cost)
            note_device(files[protocol], name, work.device)
            files[protocol].save(options.out / protocol.name)
        say(task, f"{name}: {cost:.1f} s")
    return [saved.save(options.out / protocol.name) for protocol, saved in files.items()]


def retrained(
    work: Trainings, options: argparse.Namespace
) -> tuple[dict[Protocol, Any], dict[Protocol, Sums]]:
    """Truths by retraining, and the sums saved so far."""
    task, truths, files = work.experiment.name, {}, {}
    about = {"seconds": work.seconds, **smoothness(work)}
    say(task, f"metasmoothness {about['metasmoothness']:.3f}")
    for protocol in PROTOCOLS:
        if options.protocols and protocol.name not in options.protocols:
            continue
        truth = work.single_truth(protocol.alpha) if protocol.in_place else work.truth()
        truths[protocol], files[protocol] = truth, opened(work, protocol, truth, about, options.out)
        say(task, f"truth {protocol.name}")
    return truths, files


def given(
    task: str, options: argparse.Namespace
) -> tuple[dict[Protocol, Any], dict[Protocol, Sums]]:
    """Truths of published benchmarks, and their sums with what was saved since."""
    truths, files, board = {}, {}, read_board(RESULTS / "leaderboard.json")["protocols"]
    for protocol in PROTOCOLS:
        folder = options.published / protocol.name / task
        if not folder.exists() or (options.protocols and protocol.name not in options.protocols):
            continue
        entry, benchmark = board[protocol.name][task], Benchmark.open(folder)
        if protocol.in_place and entry["metasmoothness"] < ROUGH:
            say(task, f"{protocol.name} is left out: the training is rough")
            continue
        saved = reopened(benchmark, task, entry)
        file = options.out / protocol.name / saved.protocol.file_name
        truths[protocol], files[protocol] = benchmark.truth, saved
        if file.exists():
            files[protocol] = Sums.load(file)
    if not files:
        raise ValueError(f"{options.published} has no benchmark of {task} that can be used")
    return truths, files


def note_device(saved: Sums, name: str, device: str) -> None:
    """Store where a row was computed, if it is not where the others were."""
    if device_name(device) != saved.about["device"]:
        saved.forms[name]["device"] = device_name(device)


def trainings(task: str, options: argparse.Namespace) -> Trainings:
    """The runs and truths of a task, at the sizes that were asked for."""
    experiment = BOARD[task]
    sizes = {name: getattr(options, name) for name in SIZES if getattr(options, name) is not None}
    return Trainings(
        experiment,
        quick=options.quick,
        scale=replace(experiment.quick if options.quick else experiment.full, **sizes),
        work=options.work,
        device=options.device,
        memory=options.memory,
    )


def has_more_than_matrices(model: nn.Module) -> bool:
    """Whether a model has parameters outside linear layers and convolutions."""
    owners = {
        name: module
        for name, module in model.named_modules()
        if next(module.parameters(recurse=False), None) is not None
    }
    return matrices(owners) != set(owners)


def attributed(
    work: Trainings, method: Any, runs: int, layers: Chooser | None
) -> tuple[list[Any], Any]:
    """The scores of each run, and the seconds of one; or none, and why."""
    studies = [work.study(k, layers=layers) for k in range(runs)]
    scores, start = [], seconds(work.device)
    options: dict[str, Any] = {"progress": False}
    if type(method).__name__ != "Random":
        options |= {"device": work.device, "memory": work.memory}
    try:
        for study in studies:
            scores.append(method.attribute(study, work.query, **options))
    except (ValueError, RuntimeError) as error:  # out of memory; not for this task
        if work.device != "cpu":
            torch.cuda.empty_cache()
        return [], f"{type(error).__name__}: {str(error)[:200]}"
    return scores, (seconds(work.device) - start) / runs


def smoothness(work: Trainings) -> dict[str, Any]:
    """The metasmoothness of the first run's training, computed once."""
    file = work.work / "metasmoothness.json"
    if not file.exists() or "definition" not in json.loads(file.read_text()):
        with work.training("metasmoothness"):
            result = metasmoothness(
                work.recipe,
                work.query,
                directions=4 if work.quick else DIRECTIONS,
                stage=work.experiment.stage,
                training_seed=work.run_seed(0),
                out=work.work / "metasmoothness",
                device=work.device,
                progress=False,
            )
        numbers = {"metasmoothness": result.value, "correlation": result.correlation}
        numbers["definition"] = DEFINITION
        write_json(file, numbers, checksum=False)
    stored: dict[str, Any] = json.loads(file.read_text())
    return {name: stored[name] for name in SMOOTHNESS if name in stored}


def opened(
    work: Trainings, protocol: Protocol, truth: Any, about: dict[str, Any], out: Path
) -> Sums:
    """The sums saved so far under this protocol, or none yet."""
    subsets, seeds, queries = truth.measurements.shape
    runs = 1 if protocol.in_place else work.scale.runs
    sizes = Sizes(
        work.experiment.name, float(truth.alpha), subsets, seeds, runs, queries, quick=work.quick
    )
    described = {name: getattr(truth, name) for name in (*TRUTH, "in_place")}
    fresh = Sums(
        sizes,
        described,
        {"machine": machine(), "device": device_name(work.device), **about},
        truth.measurements,
        np.empty((0, 1, queries)),
    )
    file = out / protocol.name / sizes.file_name
    if not file.exists():
        return fresh
    saved = Sums.load(file)
    if saved.truth != fresh.truth:
        raise ValueError(f"{file} is of another truth: remove it, or choose another --out")
    saved.about |= {name: about[name] for name in SMOOTHNESS}
    saved.about["seconds"] = fresh.about["seconds"] | saved.about["seconds"]  # the first time's
    return saved


def has(saved: Sums, name: str, method: str) -> bool:
    return bool(saved.forms.get(name, {}).get("method") == method)


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device.startswith("cuda") else "CPU"


def say(task: str, text: str) -> None:
    print(f"{task:22s} {text}", flush=True)


# --- rows -----------------------------------------------------------------------------------------


def rows_of(saved: Sums) -> dict[str, Row]:
    """Each method's LDS, slope and cost, and its paired difference from the best."""
    truth, results = saved.judge(), {}
    for name in saved.forms:
        every = lds([one.values for one in saved.scores(name)], truth, exclude_diverged=True)
        results[name] = every.single or every  # of one model, as in the other protocol
    best = max(results, key=lambda name: results[name].value)
    return {name: _row(saved, name, results, best, truth) for name in results}


def _row(saved: Sums, name: str, results: dict[str, LDS], best: str, truth: Any) -> Row:
    result = results[name]
    behind = None if name == best else results[best].minus(result)
    try:
        slope = calibration(
            saved.scores(name)[0].values, truth, exclude_diverged=True, bootstrap=100
        ).slope
    except ValueError:  # constant predictions
        slope = None
    over = {}
    for other in OURS:
        if other in results and other != name:
            gap = result.minus(results[other])
            over[other] = [gap.value, *gap.interval]
    return saved.forms[name] | {
        "lds": [result.value, *result.interval],
        "behind": None if behind is None else [behind.value, *behind.interval],
        "over": over,
        "ceiling": result.ceiling,
        "slope": slope,
        "runs": len(saved.sums[name]),
        "diverged": result.diverged,
    }


def judge(paths: Sequence[Path], file: Path) -> None:
    """Compute, store and print the rows of one task under one protocol, from its files of sums.

    Rows that the files do not have stay as they are. They were judged by other retrainings, so
    they have no paired difference, and say of how many they are.
    """
    saved = joined([Sums.load(path) for path in paths])
    if not saved.forms:
        return
    rows, stored, name = rows_of(saved), read_board(file), protocol_of(saved)
    known = ("machine", "device", "refused", *SMOOTHNESS)
    about = {k: saved.about[k] for k in known if k in saved.about}
    about |= {"seconds": saved.about["seconds"], "sizes": asdict(saved.protocol)}
    about["recipe"] = saved.truth["recipe"]
    entries = stored["protocols"].setdefault(name, {})
    earlier = entries.get(saved.protocol.task)
    if earlier is not None and saved.protocol.quick and not earlier["sizes"]["quick"]:
        raise ValueError(f"{paths[0]} is of the small version of a task whose rows are in {file}")
    entries[saved.protocol.task] = about | {"methods": rows | remaining(earlier, about, rows)}
    stored |= {"machine": about["machine"], "device": about["device"]}  # of the latest rows
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, stored, checksum=False)
    for method, row in sorted(rows.items(), key=lambda item: -item[1]["lds"][0]):
        value, low, high = row["lds"]
        print(
            f"{name:14s} {saved.protocol.task:20s} {method:22s} {value:6.3f} "
            f"[{low:.3f}, {high:.3f}] {row['seconds']:.1f} s",
            flush=True,
        )


def joined(each: Sequence[Sums]) -> Sums:
    """The sums of all, judged by the truth with the most seeds.

    Sums over subsets do not depend on seeds: it is enough that the subsets, the queries and the
    recipe are the same. A single model must also be the same model.
    """
    first, *others = sorted(each, key=lambda one: -one.protocol.seeds)
    near = 1e-3 * float(first.measured.std())
    for one in others:
        fits = _same_subsets(one) == _same_subsets(first)
        if fits and first.truth["in_place"]:
            fits = np.allclose(one.measured, first.measured, rtol=0, atol=near)
        if not fits:
            raise ValueError(
                f"{first.protocol.file_name} and {one.protocol.file_name} are of other subsets, "
                "queries, recipes or models: give them one after the other, the better ones last"
            )
        for name in one.forms.keys() - first.forms.keys():
            first.sums[name] = one.sums[name]
            first.deviations[name] = one.deviations[name]
            first.forms[name] = one.forms[name]
            if one.about["device"] != first.about["device"]:
                first.forms[name] = {"device": one.about["device"]} | first.forms[name]
    return first


def _same_subsets(saved: Sums) -> object:
    """What sums over subsets depend on, apart from the scores."""
    sizes, truth = saved.protocol, saved.truth
    of = sizes.task, sizes.quick, sizes.alpha, sizes.subsets, sizes.queries, truth["seeds"][0]
    return *of, *(truth[key] for key in ("in_place", "measurement", "recipe", "query"))


def remaining(
    earlier: Mapping[str, Any] | None, about: Mapping[str, Any], rows: Mapping[str, Row]
) -> dict[str, Row]:
    """The rows of an earlier entry that the new ones do not replace."""
    if earlier is None or earlier.get("recipe", about["recipe"]) != about["recipe"]:
        return {}
    result = {}
    for name in earlier["methods"].keys() - rows.keys():
        row = {k: v for k, v in earlier["methods"][name].items() if k not in ("behind", "over")}
        if earlier["device"] != about["device"]:
            row = {"device": earlier["device"]} | row
        result[name] = {"sizes": earlier["sizes"]} | row
    return {name: result[name] for name in earlier["methods"] if name in result}


def protocol_of(saved: Sums) -> str:
    """The name of the protocol of the table with this α, up to whole examples."""
    same = [one for one in PROTOCOLS if one.in_place == saved.truth["in_place"]]
    return min(same, key=lambda one: abs(one.alpha - saved.protocol.alpha)).name


def by_entry(paths: Iterable[Path]) -> list[list[Path]]:
    """Files of sums, those of one task under one protocol together."""
    groups: dict[tuple[str, str, bool], list[Path]] = {}
    for path in paths:
        saved = Sums.load(path)
        key = protocol_of(saved), saved.protocol.task, saved.protocol.quick
        groups.setdefault(key, []).append(path)
    return list(groups.values())


def in_parallel(tasks: list[str], jobs: int, command: list[str]) -> None:
    """One process per task, at most `jobs` at a time. A failed task is reported at the end."""
    waiting, running, failed = list(tasks), dict[str, Any](), []
    while waiting or running:
        while waiting and len(running) < jobs:
            task = waiting.pop(0)
            running[task] = subprocess.Popen([*command, task])
        for task, process in list(running.items()):
            if process.poll() is not None:
                del running[task]
                failed += [task] if process.returncode else []
        time.sleep(0.2)
    if failed:
        print(f"failed: {', '.join(failed)}. Run the same command to resume", flush=True)


def of_methods(description: str | None) -> argparse.ArgumentParser:
    """What this study and `experiments.studies.peers` have in common."""
    of = parser(description, BOARD, "runs/single")
    of.add_argument("--only", nargs="*", help="methods whose names have one of these words")
    names = [protocol.name for protocol in PROTOCOLS]
    of.add_argument("--protocols", nargs="*", choices=names, help="default: all")
    of.add_argument("--published", type=Path, help="use the truths of the benchmarks there")
    return of


def arguments() -> argparse.Namespace:
    of = of_methods(__doc__)
    of.add_argument("--models", type=int, default=256, help="of rivals that train many")
    of.add_argument("--jobs", type=int, default=1, help="tasks at the same time")
    return parsed_or_saved(of, BOARD)


def main() -> None:
    options = arguments()
    file = options.results / "leaderboard.json"
    read_board(file)  # refuses another version before hours of work
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if options.saved is None and options.jobs > 1 and len(options.tasks) > 1:
            given = [word for word in sys.argv[1:] if word not in (*options.tasks, "all")]
            command = [sys.executable, "-m", "experiments.studies.single", *given, "--no-rows"]
            in_parallel(options.tasks, options.jobs, command)
            options.saved = options.out
        elif options.saved is None:
            for task in options.tasks:
                for path in measure(task, options):
                    if not options.no_rows:
                        judge([path], file)
            return
        if not options.no_rows:
            for paths in by_entry(saved_sums(options)):
                judge(paths, file)


if __name__ == "__main__":
    main()
