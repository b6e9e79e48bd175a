"""What SOURCE costs beside influence functions, and both beside plain forward and backward passes.

    python -m benchmarks.source_cost

SOURCE with six checkpoints in three segments, FastSource with three segments, and influence
functions at the final model, each from scratch on the same data, alternately; processor seconds,
the least of the rounds. The unit is one plain pass: loss.backward() over the same batches.
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
from benchmarks.models import WORKLOADS, Workload
from benchmarks.report import RESULTS, machine, write_readme

METHODS = {
    "influence": whence.Influence(1e-3),
    "SOURCE, C = 6, L = 3": whence.Source(3),
    "FastSource, L = 3": whence.FastSource(3),
}


def run_of(model: nn.Module) -> whence.Run:
    """Six checkpoints a little apart, as a training would leave them."""
    kept = []
    for _ in range(6):
        kept.append({k: v.clone() for k, v in model.state_dict().items()})
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=1e-3)
    return whence.Run.from_checkpoints(kept, [100 * k for k in range(1, 7)], 0.01)


def plain_pass(work: Workload, model: nn.Module, data: Any) -> float:
    start = time.process_time()
    for batch in DataLoader(data, work.batch):
        work.task.losses(work.task.outputs(model, batch), batch).mean().backward()
        model.zero_grad()
    return time.process_time() - start


def measure(work: Workload, rounds: int) -> dict[str, Any]:
    train, query = work.reduced
    torch.manual_seed(0)
    model, data, queries = work.model().eval(), work.data(train, 1), work.data(query, 2)
    run = run_of(model)
    seconds: dict[str, list[float]] = {name: [] for name in ("plain pass", *METHODS)}
    for _ in range(rounds):
        seconds["plain pass"].append(plain_pass(work, model, data))
        for name, method in METHODS.items():
            study = whence.Study(model, work.task, train=data, runs=run)
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
    found: dict[str, Any] = {"machine": machine()}
    for name in ("mlp", "gpt"):
        found[name] = measure(WORKLOADS[name], chosen.rounds)
        print(name, {k: round(v, 2) for k, v in found[name]["seconds"].items()}, flush=True)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "source_cost.json").write_text(json.dumps(found, indent=1) + "\n")
    write_readme()


if __name__ == "__main__":
    main()
