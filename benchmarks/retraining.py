"""Trainings per second, compared with a plain PyTorch loop over the same recipe.

    python -m benchmarks.retraining [--device cuda] [--task digits ...] [--trainings 256]

Half-data trainings with ten seeds, all measured on the same queries. The plain loop is what one
writes: a DataLoader over the subset, zero_grad, backward, step; and, so that nobody has to guess
what the loader costs, the same on tensors that are indexed by hand. Alternately, wall seconds, the
best of the rounds; the plain loops train a few models only.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Subset

import whence
from benchmarks.report import RESULTS, write_readme
from experiments.tasks import TASKS
from experiments.tasks.machine import machine
from whence.retrain import Training, ground_truth, measure
from whence.retrain.truth import draw_subsets

SEEDS = 10
PLAIN = 3  # models of a plain loop


def loader_loop(recipe: whence.Recipe, training: Training, device: str) -> None:
    stage, model = recipe.stages[0], recipe.build(training.seed).to(device)
    optimizer = stage.optimizer(model.parameters())
    data = Subset(stage.data.dataset, np.asarray(training.subset).tolist())
    loader = DataLoader(data, stage.batch_size, shuffle=True)
    for _ in range(stage.epochs):
        for batch in loader:
            batch = [part.to(device) for part in batch]
            optimizer.zero_grad()
            loss = stage.task.losses(stage.task.outputs(model, batch), batch).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()


def tensor_loop(recipe: whence.Recipe, training: Training, device: str) -> None:
    stage, model = recipe.stages[0], recipe.build(training.seed).to(device)
    optimizer = stage.optimizer(model.parameters())
    subset = torch.from_numpy(training.subset)
    columns = [column[subset].to(device) for column in stage.data.dataset.tensors]
    for _ in range(stage.epochs):
        order = torch.randperm(len(subset)).to(device)
        for rows in torch.split(order, stage.batch_size):
            batch = [column[rows] for column in columns]
            optimizer.zero_grad()
            loss = stage.task.losses(stage.task.outputs(model, batch), batch).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()


def settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def compare(name: str, count: int, rounds: int, device: str) -> dict[str, Any]:
    recipe, query = TASKS[name].recipe()
    subsets = -(-count // SEEDS)
    masks = draw_subsets(len(recipe.stages[0].data), 0.5, subsets)
    trainings = [Training(seed, np.flatnonzero(masks[seed])) for seed in range(PLAIN)]
    notes: dict[str, Any] = {}

    def ours() -> None:
        truth = ground_truth(recipe, query, 0.5, subsets, SEEDS, device=device, progress=False)
        notes.update(truth.notes)

    def train_all(loop: Callable[[whence.Recipe, Training, str], None]) -> None:
        for training in trainings:
            loop(recipe, training, device)

    work: dict[str, tuple[int, Callable[[], Any]]] = {
        "DataLoader": (PLAIN, partial(train_all, loader_loop)),
        "tensors": (PLAIN, partial(train_all, tensor_loop)),
        "whence": (subsets * SEEDS, ours),
    }
    measure(recipe, query, trainings, device=device, progress=False)  # libraries load once
    seconds: dict[str, list[float]] = {way: [] for way in work}
    for _ in range(rounds):
        for way, (models, call) in work.items():
            settle(device)
            start = time.perf_counter()
            call()
            settle(device)
            seconds[way].append((time.perf_counter() - start) / models)
    stage = recipe.stages[0]
    return {
        "trainings": subsets * SEEDS,
        "updates": stage.total_steps(int(masks[0].sum())),
        "batch": stage.batch_size,
        "at_once": notes["at_once"],
        "engine": notes["engine"],
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "seconds_each": {way: min(times) for way, times in seconds.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--task", nargs="+", default=["digits"], choices=sorted(TASKS))
    parser.add_argument("--trainings", type=int, default=250)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", default=None, help="result file (default: in benchmarks/results)")
    parser.add_argument("--tf32", action="store_true", help="products in TF32 (GPU)")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    precision = "TF32" if chosen.tf32 else "float32"
    torch.set_float32_matmul_precision("high" if chosen.tf32 else "highest")
    file = RESULTS / f"retraining_{chosen.device}.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    results["machine"] = machine()
    if chosen.device == "cuda":
        results["machine"]["processor"] = torch.cuda.get_device_name()
    for name in chosen.task:
        row = compare(name, chosen.trainings, chosen.rounds, chosen.device)
        results[f"{name}, {precision}"] = row
        each = row["seconds_each"]
        print(
            f"{name}, {precision}: {row['trainings']} trainings in "
            f"{each['whence'] * row['trainings']:.2f} s ({row['at_once']} at once); "
            f"{each['DataLoader'] / each['whence']:.1f}x a DataLoader loop, "
            f"{each['tensors'] / each['whence']:.1f}x a loop on tensors",
            flush=True,
        )
    target = RESULTS / file.name if chosen.out is None else chosen.out
    with open(target, "w") as out:
        out.write(json.dumps(results, indent=1) + "\n")
    if chosen.out is None:
        write_readme()


if __name__ == "__main__":
    main()
