"""What Unrolled and HYDRA cost on the paper's MLP: every update of a training, gone back through.

    python -m benchmarks.unrolled_cost [--out FOLDER] [--small] [--only NAME ...]

The MLP 784-512-256-128-10 on 6,000 images in 10 classes, SGD with momentum, batch 64, 20 epochs:
1,880 updates; 200 queries. The images are noise around class means, since no time depends on them.
Full on a GPU; small by default where there is none. For each method: seconds, milliseconds per
update, the share of the device's own matrix-product rate that the counted operations come to, and
peak memory. Results: unrolled_cost.json.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

import whence
from benchmarks.on_gpu import product_rate, settle
from benchmarks.report import RESULTS
from experiments.tasks.machine import machine
from experiments.tasks.models import mlp
from whence.methods.hydra import Hydra
from whence.methods.unrolled import Unrolled
from whence.replay.expected import CURVATURE_BATCH, STRETCHES
from whence.retrain.recipe import Recipe

METHODS: dict[str, Any] = {
    "Unrolled": Unrolled(),
    "Unrolled, Gauss-Newton": Unrolled("gauss-newton"),
    "Unrolled, Gauss-Newton, expected": Unrolled("gauss-newton", expected=True),
    "HYDRA": Hydra(),
}
SIZES = (784, 512, 256, 128, 10)


def operations(method: Any, examples: int, queries: int, drawn: int, updates: int) -> float:
    """Of the products that grow with the queries. A layer's inputs and output slopes move with a
    direction, except the first layer's inputs: 6 products for a Hessian (2 there), 4 for a
    Gauss-Newton matrix (2), 2 for a loss (1)."""
    sizes = [entering * leaving for entering, leaving in pairwise(SIZES)]

    def products(first: int, other: int) -> float:
        return 2.0 * queries * (first * sizes[0] + other * sum(sizes[1:]))

    if isinstance(method, Hydra):
        return drawn * products(1, 2)
    curved = products(2, 6 if method.curvature == "hessian" else 4)
    if not method.expected:
        return drawn * curved
    passes = min(STRETCHES, updates) * examples
    return updates * min(CURVATURE_BATCH, examples) * curved + passes * products(1, 2)


def images(count: int, seed: int) -> TensorDataset:
    means = torch.randn(10, 784, generator=torch.Generator().manual_seed(0)) / 4
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=g)
    return TensorDataset(means[labels] + torch.randn(count, 784, generator=g) / 2, labels)


def trained(data: TensorDataset, epochs: int, device: torch.device) -> whence.Run:
    recipe = Recipe(
        partial(mlp, *SIZES),
        whence.Classification(),
        data,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.03, momentum=0.9),
        batch_size=64,
        epochs=epochs,
    )
    return recipe.run(seed=0, checkpoints=min(6, 2 * epochs), device=device)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--small", action="store_true", help="10 updates, 8 queries")
    parser.add_argument("--only", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--memory", default=None, help='such as "60GB"')
    chosen = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    small = chosen.small or device.type == "cpu"
    examples, queries, epochs = (320, 8, 2) if small else (6000, 200, 20)
    train, query = images(examples, 1), images(queries, 2)
    warmed = images(128, 3)
    model, task, short = mlp(*SIZES), whence.Classification(), trained(warmed, 1, device)
    for name in chosen.only:  # what is imported and compiled at the first call
        study = whence.Study(model, task, train=warmed, runs=short)
        METHODS[name].attribute(study, images(2, 2), device=device, progress=False)
    start = time.perf_counter()
    run = trained(train, epochs, device)
    settle(device)
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "machine": machine(),
        "train": examples,
        "query": queries,
        "updates": run.steps,
        "training_seconds": time.perf_counter() - start,
        "peak_tflops": product_rate(device, torch.float32) / 1e12,
        "methods": {},
    }
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{results['device']}: {examples:,} examples, {run.steps:,} updates, {queries} queries, "
        f"{parameters:,} parameters; trained in {results['training_seconds']:.1f} s; "
        f"{results['peak_tflops']:.1f} TFLOP/s"
    )
    print(f"{'':<34} {'seconds':>8} {'ms/update':>10} {'of peak':>8} {'GiB':>6} {'strayed':>9}")
    for name in chosen.only:
        method = METHODS[name]
        study = whence.Study(model, task, train=train, runs=run)
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            scores = method.attribute(
                study, query, device=device, memory=chosen.memory, progress=False
            )
        seconds = scores.diagnostics["seconds"]["scores"]
        drawn = sum(map(len, run.batches or ()))
        counted = operations(method, examples, queries, drawn, run.steps)
        row = {
            "seconds": seconds,
            "share_of_peak": counted / seconds / results["peak_tflops"] / 1e12,
            "memory_gib": torch.cuda.max_memory_allocated() / 2**30 if not small else 0.0,
            "replay": scores.diagnostics["replay"],
            "growth": scores.diagnostics.get("adjoint_growth"),
            "warnings": sorted({str(w.message) for w in caught}),
        }
        results["methods"][name] = row
        print(
            f"{name:<34} {seconds:>8.2f} {1e3 * seconds / run.steps:>10.2f} "
            f"{row['share_of_peak']:>8.0%} {row['memory_gib']:>6.1f} "
            f"{row['replay']['deviation']:>9.1e}",
            flush=True,
        )
        chosen.out.mkdir(parents=True, exist_ok=True)
        (chosen.out / "unrolled_cost.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
