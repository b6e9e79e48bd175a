"""The cost of SOURCE, of influence functions and of plain forward and backward passes.

    python -m benchmarks.source_cost

SOURCE with six checkpoints in three segments, FastSource with three segments, and influence
functions at the final model, each from scratch on the same data, alternately; processor seconds,
of the fastest round. The unit is one plain pass: loss.backward() over the same batches.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import whence
from benchmarks.models import WORKLOADS, Workload, run_of
from benchmarks.report import RESULTS, write_readme
from experiments.tasks.machine import machine
from whence.data import place

METHODS = {
    "influence": whence.Influence.published(1e-3),
    "SOURCE, C = 6, L = 3": whence.Source.published(3),
    "FastSource, L = 3": whence.FastSource.published(3),
}


def plain_pass(work: Workload, model: nn.Module, data: Any, batch_size: int) -> None:
    """Forward and backward over the data, as in training."""
    parameter = next(model.parameters())
    for batch in DataLoader(data, batch_size):
        batch = place(batch, parameter.device, parameter.dtype)
        loss = work.task.losses(work.task.outputs(model, batch), batch).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        model.zero_grad()


def measure(work: Workload, rounds: int) -> dict[str, Any]:
    train, query = work.reduced
    torch.manual_seed(0)
    model, data, queries = work.model().eval(), work.data(train, 1), work.data(query, 2)
    run = run_of(model)
    seconds: dict[str, list[float]] = {name: [] for name in ("plain pass", *METHODS)}
    for _ in range(rounds):
        start = time.process_time()
        plain_pass(work, model, data, work.batch)
        seconds["plain pass"].append(time.process_time() - start)
        for name, method in METHODS.items():
            study = whence.Study(model, work.task, train=data, runs=run, layers="matrices")
            start = time.process_time()
            method.attribute(study, queries, batch_size=work.batch, progress=False)
            seconds[name].append(time.process_time() - start)
    best = {name: min(times) for name, times in seconds.items()}
    return {"train": train, "query": query, "batch": work.batch, "rounds": rounds, "seconds": best}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    results: dict[str, Any] = {"machine": machine()}
    for name in ("mlp", "gpt"):
        results[name] = measure(WORKLOADS[name], chosen.rounds)
        print(name, {k: round(v, 2) for k, v in results[name]["seconds"].items()}, flush=True)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "source_cost.json").write_text(json.dumps(results, indent=1) + "\n")
    write_readme()


if __name__ == "__main__":
    main()
