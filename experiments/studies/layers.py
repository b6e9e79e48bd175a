"""Does it matter which layers are tracked? LDS with and without embeddings, norms and tied heads.

    python -m experiments.studies.layers TASK... [--quick] [--device cuda] [--method Source TracIn]
    python -m experiments.studies.layers TASK --against published/single-0.99/TASK

Every choice of layers is judged on the same runs and the same retrainings, so differences are
paired. With --against, the task is one of the leaderboard, and a published benchmark has the
retrainings. Trainings and scores stay in --work: rerun the same command to resume. The rows go to
results/layers.json, under the task and the protocol.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import whence
from experiments.engine.trainings import Trainings
from experiments.studies.options import SIZES
from experiments.tasks import ALL, RESULTS
from experiments.tasks.board import BOARD
from experiments.tasks.forms import of_form
from experiments.tasks.machine import machine
from whence import evaluate
from whence.layers.choose import everything, matrices
from whence.persist.files import write_json

METHODS = {
    "Source": whence.Source,
    "FastSource": whence.FastSource,
    "Influence": whence.Influence,
    "TracIn": whence.TracIn,
}

CHOICES: dict[str, Any] = {
    "matrices": matrices,
    "matrices and embeddings": of_form("lookup"),
    "matrices and norms": of_form("elementwise"),
    "all": everything,
}


def compare(task: str, options: argparse.Namespace, file: Path) -> None:
    """Judge every choice on one task; the rows go to the file one by one."""
    experiment = ALL[task] if options.against is None else BOARD[task]
    sizes = {name: getattr(options, name) for name in SIZES if getattr(options, name) is not None}
    scale = replace(experiment.quick if options.quick else experiment.full, measured=0, **sizes)
    work = Trainings(
        experiment,
        quick=options.quick,
        scale=scale,
        work=options.work,
        device=options.device,
        tf32=options.device != "cpu",
        progress=options.progress,
    )
    key = {name: getattr(scale, name) for name in SIZES} | {"alpha": options.alpha}
    if options.against is None:
        truth = work.reference(options.alpha)
    else:
        truth = evaluate.Benchmark.open(options.against).truth
        subsets, seeds, _ = truth.measurements.shape
        key |= {"alpha": truth.alpha, "subsets": subsets, "seeds": seeds}
        key |= {"protocol": truth.protocol}
    for method in options.method:
        judged: dict[str, Any] = {}
        for name in options.layers:
            work.layers = CHOICES[name]
            scores, seconds = attributed(work, METHODS[method](), name, options)
            judged[name] = evaluate.lds(scores, truth)
            single = evaluate.lds(scores[:1], truth).value if len(scores) > 1 else None
            against = judged[name].minus(judged["matrices"])
            row = {
                "lds": judged[name].value,
                "interval": list(judged[name].interval),
                "first run alone": single,
                "ceiling": judged[name].ceiling,
                "minus matrices": [against.value, *against.interval],
                "tracked": 1 - scores[0].left_out[0],
                "seconds": seconds,
            }
            store(file, work.name, key | {"device": options.device}, method, name, row)
            print(f"{work.name} {method} {name}: {judged[name].value:.3f}, {against}", flush=True)


def attributed(
    work: Trainings, method: Any, name: str, options: argparse.Namespace
) -> tuple[list[whence.Scores], float | None]:
    """The scores of every run, from --work if they are there, and the seconds of each."""
    scores, start, fresh = [], time.perf_counter(), 0
    for k in range(work.scale.runs):
        folder = f"{type(method).__name__}-{name}-{work.run_seed(k)}".replace(" ", "-")
        place = work.work / "layer-scores" / folder
        if not (place / "scores.json").exists():
            fresh += 1
            study = work.study(k)
            method.attribute(
                study, work.query, device=options.device, out=place, progress=options.progress
            )
        scores.append(whence.Scores.load(place))
    seconds = (time.perf_counter() - start) / fresh if fresh else None
    return scores, seconds


def store(
    file: Path, task: str, protocol: dict[str, Any], method: str, name: str, row: dict[str, Any]
) -> None:
    """Put one row into the file; other rows stay, and so does a measured time."""
    stored = json.loads(file.read_text()) if file.exists() else {"tasks": {}}
    entries = stored["tasks"].setdefault(task, [])
    entry = next((e for e in entries if e["protocol"] == protocol), None)
    if entry is None:
        entry = {"protocol": protocol, "machine": machine(), "methods": {}}
        entries.append(entry)
    stored |= {"machine": machine(), "device": protocol["device"]}
    rows = entry["methods"].setdefault(method, {})
    if row["seconds"] is None:
        row["seconds"] = rows.get(name, {}).get("seconds")
    rows[name] = row
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, stored, checksum=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tasks", nargs="+", metavar="TASK", help=f"of {', '.join(sorted(ALL))}")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="the small version of the tasks")
    parser.add_argument("--alpha", type=float, default=0.5)
    parser.add_argument("--method", nargs="+", choices=METHODS, default=["Source"])
    parser.add_argument("--layers", nargs="+", choices=CHOICES, default=list(CHOICES))
    parser.add_argument("--against", type=Path, help="a published benchmark of the task")
    for name in SIZES:
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--work", type=Path, default=Path("runs/layers"), help="for trainings")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--progress", action="store_true")
    options = parser.parse_args()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for task in options.tasks:
            compare(task, options, options.results / "layers.json")


if __name__ == "__main__":
    main()
