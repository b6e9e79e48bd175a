"""The three workloads, and GPT-2's own shape, on a GPU: float32, TF32 and bfloat16 products.

    python -m benchmarks.on_gpu [--out FOLDER] [--small]

For each stage: seconds, images or tokens per second, and the share of the device's own
matrix-product rate in the same precision (measured in the same run) that the counted operations
come to. Before that, scores on the device are compared with the CPU's in float64, and two runs in
deterministic mode bit by bit. Results: on_gpu.json, for benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import whence
from benchmarks.against_kronfluence import DAMPING, STAGES, floors
from benchmarks.models import GPT, WORKLOADS, Workload, documents, final_run, run_of
from benchmarks.report import RESULTS, write_readme
from benchmarks.source_cost import METHODS, plain_pass
from experiments.tasks.machine import machine

GPT2 = replace(
    WORKLOADS["gpt"],
    name="gpt2-small",
    model=partial(GPT, depth=12, width=768, vocabulary=50257, length=512, heads=12),
    data=partial(documents, vocabulary=50257, length=512),
)
SIZES: dict[str, tuple[Workload, int, int]] = {
    "mlp": (WORKLOADS["mlp"], 60_000, 1000),
    "resnet9": (WORKLOADS["resnet9"], 10_000, 100),
    "gpt": (WORKLOADS["gpt"], 8192, 64),
    "gpt2-small": (GPT2, 512, 16),
}
TOKENS = {"gpt": 128, "gpt2-small": 512}


def influence(work: Workload, model: nn.Module, train: Any, query: Any, **options: Any) -> Any:
    study = whence.Study(model, work.task, train=train, runs=final_run(model), layers="matrices")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return whence.Influence.published(DAMPING).attribute(
            study, query, progress=False, **options
        )


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a large product of random matrices: the peak we measure against."""
    x = torch.randn(
        8192 if device.type == "cuda" else 1024, 8192 if device.type == "cuda" else 1024
    )
    x = x.to(device, dtype)
    best = 1e9
    for _ in range(6):
        settle(device)
        start = time.perf_counter()
        x @ x
        settle(device)
        best = min(best, time.perf_counter() - start)
    return 2.0 * len(x) ** 3 / best


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def check(device: torch.device) -> dict[str, Any]:
    """Device against CPU in float64, float32 against float64, and the same bits twice."""
    checks: dict[str, Any] = {}
    for name in ("mlp", "resnet9", "gpt"):
        work = WORKLOADS[name]
        torch.manual_seed(0)
        model, train, query = work.model().eval(), work.data(16, 1), work.data(3, 2)
        wide = {"dtype": torch.float64, "batch_size": 5}
        cpu = influence(work, model, train, query, **wide).values
        gpu = influence(work, model, train, query, device=device, **wide).values
        single = influence(work, model, train, query, device=device).values
        torch.use_deterministic_algorithms(True, warn_only=True)
        again = [influence(work, model, train, query, device=device).values for _ in range(2)]
        torch.use_deterministic_algorithms(False)
        scale = abs(cpu).max()
        checks[name] = {
            "float64, device against CPU": float(abs(gpu - cpu).max() / scale),
            "float32 against float64": float(abs(single - cpu).max() / scale),
            "same bits twice": bool((again[0] == again[1]).all()),
        }
        print(name, checks[name], flush=True)
    return checks


def measure(
    work: Workload, train: int, query: int, precision: str, device: torch.device
) -> dict[str, Any]:
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    torch.manual_seed(0)
    model = work.model().eval()
    data, queries = work.data(train, 1), work.data(query, 2)
    influence(
        work, model, work.data(256, 3), work.data(4, 4), device=device, dtype=dtype
    )  # warm up
    peak = product_rate(device, dtype)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    scores = influence(work, model, data, queries, device=device, dtype=dtype)
    seconds = scores.diagnostics["seconds"]
    needed = floors(work, model, train, query)
    positions = TOKENS.get(work.name, 1)
    return {
        "train": train,
        "query": query,
        "precision": precision,
        "peak_tflops": peak / 1e12,
        "batch": scores.diagnostics["batch_size"],
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0,
        "unit": "tokens" if positions > 1 else "examples",
        "stages": {
            s: {
                "seconds": seconds[s],
                "per_second": train * positions / seconds[s],
                "share_of_peak": needed[s] / seconds[s] / peak,
            }
            for s in STAGES
        },
    }


def source(train: int, query: int, precision: str, device: torch.device) -> dict[str, Any]:
    """GPT-2's shape: a plain pass, influence and SOURCE from scratch; seconds, tokens, memory."""
    torch.set_float32_matmul_precision("highest")
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    torch.manual_seed(0)
    model = GPT2.model().eval()
    data, queries = GPT2.data(train, 1), GPT2.data(query, 2)
    run = run_of(model)
    model = model.to(device, dtype)
    work_by_method: dict[str, Any] = {}

    def timed(name: str, call: Any) -> None:
        settle(device)
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        call()
        settle(device)
        seconds = time.perf_counter() - start
        peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
        work_by_method[name] = {"seconds": seconds, "memory_gib": peak}
        print(f"{name:<12} {precision:<8} {seconds:.1f}s {peak:.1f} GiB", flush=True)

    plain_pass(GPT2, model, GPT2.data(8, 3), 8)  # warm up
    timed("plain pass", lambda: plain_pass(GPT2, model, data, 16))
    options: dict[str, Any] = {"device": device, "dtype": dtype, "progress": False}
    for name, method in METHODS.items():
        study = whence.Study(model, GPT2.task, train=data, runs=run, layers="matrices")
        timed(name, partial(method.attribute, study, queries, **options))
    return {
        "train": train,
        "query": query,
        "tokens": train * TOKENS["gpt2-small"],
        "work": work_by_method,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument(
        "--small", action="store_true", help="a hundredth of the size, to try it out"
    )
    parser.add_argument("--only", nargs="*", default=list(SIZES))
    chosen = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    results: dict[str, Any] = {
        "device": name,
        "machine": machine(),
        "checks": check(device),
        "runs": {},
    }
    chosen.out.mkdir(parents=True, exist_ok=True)
    for key in chosen.only:
        work, train, query = SIZES[key]
        if chosen.small:
            train, query = max(8, train // 200), max(2, query // 50)
        for precision in ("float32", "tf32", "bf16"):
            result = measure(work, train, query, precision, device)
            results["runs"][f"{key} {precision}"] = result
            (chosen.out / "on_gpu.json").write_text(json.dumps(results, indent=1) + "\n")
            stages = "  ".join(
                f"{s[:8]} {v['seconds']:.2f}s {v['share_of_peak']:.0%}"
                for s, v in result["stages"].items()
            )
            size = f"batch {result['batch']}, {result['memory_gib']:.1f} GiB"
            print(f"{key:<10} {precision:<8} {size} {stages}", flush=True)
    for precision in ("float32", "bf16") if "gpt2-small" in chosen.only else ():
        train, query = (8, 2) if chosen.small else (256, 16)
        results.setdefault("source", {})[precision] = source(train, query, precision, device)
        (chosen.out / "on_gpu.json").write_text(json.dumps(results, indent=1) + "\n")
    if chosen.out == RESULTS:
        write_readme()


if __name__ == "__main__":
    main()
