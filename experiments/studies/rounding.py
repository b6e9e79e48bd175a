"""The effect of TF32 on scores: one run on a GPU, attributed in float32 and in TF32.

    python -m experiments.studies.rounding fashion_mnist [sst2 ...] [--queries 100]

Writes the rank correlation over training examples, by query, to results/rounding.json.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from torch.utils.data import Subset

import whence
from experiments.engine.trainings import FIRST_RUN, products
from experiments.tasks import RESULTS, TASKS, Experiment
from experiments.tasks.machine import machine
from whence.persist.files import write_json
from whence.retrain import record

COMPARED = ("TracIn", "TRAK", "influence", "FastSource", "SOURCE", "SOURCE, exact")


def agreement(experiment: Experiment, queries: int, folder: Path) -> dict[str, Any]:
    """{method: median and lowest rank correlation over the queries}, for the task's first run."""
    recipe, held_out = experiment.recipe()
    (run,) = record(
        recipe,
        [FIRST_RUN],
        [folder / experiment.name],
        experiment.checkpoints,
        device="cuda",
        progress=False,
    )
    stages = {stage.name: stage.data.dataset for stage in recipe.stages}
    train = stages if len(stages) > 1 else next(iter(stages.values()))
    examples = len(recipe.stage(experiment.stage).data)
    query, correlations = Subset(held_out, range(queries)), {}
    for name in COMPARED:
        if name not in experiment.methods:
            continue
        both = []
        for rounded in (False, True):
            study = whence.Study(recipe.build(0), recipe.task, train, run.in_memory())
            with products(rounded):
                scores = experiment.method(name, examples).attribute(
                    study, query, device="cuda", progress=False
                )
            both.append(scores.values)
        ranked = [float(spearmanr(a, b).statistic) for a, b in zip(*both, strict=True)]
        correlations[name] = {
            "median": float(np.median(ranked)),
            "least": float(np.min(ranked)),
        }
        print(experiment.name, name, correlations[name], flush=True)
    return correlations


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("task", choices=sorted(TASKS), nargs="+")
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no GPU found: TF32 is a rounding mode of GPUs")
    with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tasks = {
            name: agreement(TASKS[name], options.queries, Path(scratch)) for name in options.task
        }
    about = {"device": torch.cuda.get_device_name(), "machine": machine()}
    content = {"tasks": tasks, "queries": options.queries} | about
    write_json(options.results / "rounding.json", content, checksum=False)


if __name__ == "__main__":
    main()
