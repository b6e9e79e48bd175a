"""Grid search for learning rate and weight decay (appendix B.1), where the paper's do not fit.

    python -m experiments.engine.search cifar10 [--device cuda] [--seeds 2]

Each pair of the task's grid trains models on all data with several seeds. The pair with the best
mean on held-out examples (accuracy for classification, loss otherwise) goes to results/search/,
which `experiments.tasks` reads. These examples are not queries, except for the linear models, where
all held-out examples are.
"""

from __future__ import annotations

import argparse
import copy
import time
import warnings
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

import whence
from experiments.tasks import RESULTS, TASKS, Experiment
from experiments.tasks.machine import machine
from whence.persist.files import write_json
from whence.retrain import Training, measure


class Validated(whence.Task):
    """A task that measures the criterion of B.1: accuracy, or the loss."""

    def __init__(self, task: whence.Task) -> None:
        self.task, self.accuracy = task, isinstance(task, whence.Classification)
        self.measurement = "accuracy" if self.accuracy else "loss"
        self.unit, self.higher_is_better = "", self.accuracy

    def outputs(self, model: Any, batch: Any) -> Tensor:
        return self.task.outputs(model, batch)

    def losses(self, outputs: Tensor, batch: Any) -> Tensor:
        return self.task.losses(outputs, batch)

    def measurements(self, outputs: Tensor, batch: Any) -> Tensor:
        if not self.accuracy:
            return self.task.losses(outputs, batch)
        return (outputs.argmax(-1) == self.task.targets(batch)).to(outputs.dtype)

    def pseudo_losses(self, outputs: Tensor, batch: Any, uniform: Any) -> Tensor:
        return self.task.pseudo_losses(outputs, batch, uniform)


def validation(experiment: Experiment, held_out: Any) -> Subset[Any]:
    """The held-out examples after the queries; the last third where the queries leave less."""
    total = len(held_out)
    count = min(1000, max(total // 3, total - experiment.full.queries))
    return Subset(held_out, range(total - count, total))


def search(
    experiment: Experiment, seeds: int, device: str, folder: Path, quick: bool = False
) -> dict[str, Any]:
    """Try every pair of the grid; returns the best one, and all."""
    assert experiment.grid is not None, f"{experiment.name} has the paper's rates"
    tried: list[dict[str, Any]] = []
    for rate, weight_decay in product(*experiment.grid):
        recipe, held_out = experiment.make(quick, rate, weight_decay)
        validated = copy.copy(recipe)
        validated.stages = tuple(replace(s, task=Validated(s.task)) for s in recipe.stages)
        validated._precise = None
        start = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            measurements = measure(
                validated,
                validation(experiment, held_out),
                [Training(seed) for seed in range(seeds)],
                device=device,
                progress=False,
            )
        values = np.where(np.isfinite(measurements).all(1), measurements.mean(1), np.nan)
        tried.append(
            {
                "rate": rate,
                "weight_decay": weight_decay,
                "validation": None if np.isnan(values).any() else float(values.mean()),
                "over_seeds": [None if np.isnan(v) else float(v) for v in values],
                "seconds": time.perf_counter() - start,
            }
        )
        print(experiment.name, tried[-1], flush=True)
    accuracy = isinstance(recipe.task, whence.Classification)
    converged = [t for t in tried if t["validation"] is not None]
    if not converged:
        raise RuntimeError(f"{experiment.name}: all pairs of the grid diverged")
    best = (max if accuracy else min)(converged, key=lambda t: t["validation"])
    result = {
        "task": experiment.name,
        "by": "accuracy" if accuracy else "loss",
        "best": best,
        "tried": tried,
        "settings": {"seeds": seeds, "quick": quick},
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "machine": machine(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"{experiment.name}.json", result, checksum=False)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("task", choices=sorted(n for n, e in TASKS.items() if e.grid), nargs="+")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="search for the task's quick version")
    parser.add_argument("--tf32", action="store_true", help="round products to TF32 on a GPU")
    parser.add_argument("--results", type=Path, default=RESULTS / "search")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high" if options.tf32 else "highest")
    for name in options.task:
        search(TASKS[name], options.seeds, options.device, options.results, options.quick)


if __name__ == "__main__":
    main()
