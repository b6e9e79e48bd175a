"""What `Best` costs, next to `Source`: seconds and their ratio, alternating, on one machine.

    python -m experiments.studies.best [TASK...] [--device cuda] [--rounds 3]

Writes results/best.json. Both are computed from scratch, fitting included, for 200 queries; the
fastest round counts. On a GPU once with float32 products, once with products rounded to TF32.
"""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path
from typing import Any

import torch

import whence
from experiments.engine.trainings import Trainings, products
from experiments.tasks import RESULTS, TASKS, Scale
from experiments.tasks.machine import machine
from whence.persist.files import write_json

SCALE = Scale(subsets=2, seeds=1, queries=200, runs=1)
METHODS = {"Source": whence.Source, "Best": whence.Best}


def seconds(work: Trainings, method: Any, device: str) -> float:
    """From scratch to scores."""
    study = work.study(0)
    start = time.perf_counter()
    method.attribute(study, work.query, device=device, progress=False)
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(task: str, options: argparse.Namespace) -> dict[str, Any]:
    """{products: {method: least seconds}} of one task."""
    work = Trainings(TASKS[task], scale=SCALE, work=options.work, device=options.device)
    rounded = [False] if options.device == "cpu" else [False, True]
    times: dict[str, dict[str, float]] = {}
    for tf32 in rounded:
        least = dict.fromkeys(METHODS, float("inf"))
        for _ in range(options.rounds):
            for name, method in METHODS.items():
                with products(tf32):
                    least[name] = min(least[name], seconds(work, method(), options.device))
        times["tf32" if tf32 else "float32"] = least
        print(task, "tf32" if tf32 else "float32", least, flush=True)
    return {
        "seconds": times,
        "queries": len(work.query),  # type: ignore[arg-type]
        "examples": work.examples,
    }


def name_of(device: str) -> str:
    return torch.cuda.get_device_name() if device != "cpu" else "CPU"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tasks", nargs="*", default=["digits"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path("runs/best"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = {task: measure(task, options) for task in options.tasks}
    options.results.mkdir(parents=True, exist_ok=True)
    about = {"rounds": options.rounds, "device": name_of(options.device), "machine": machine()}
    write_json(options.results / "best.json", {"tasks": rows, **about}, checksum=False)


if __name__ == "__main__":
    main()
