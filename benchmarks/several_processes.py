"""One process against two: time, memory for factors, bytes sent, and whether scores are the same.

    python -m benchmarks.several_processes

Everything from scratch, one thread for each process, gloo. One and two processes take turns; times
are wall seconds between two barriers, of the fastest round, with the largest processor seconds
of a rank. "factors" are the bytes of eigenbases and eigenvalues that a rank holds while
scores are computed, "peak" the process's largest resident memory above that at the start.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import whence
import whence.world
from benchmarks.models import WORKLOADS, run_of
from benchmarks.report import RESULTS
from experiments.tasks.machine import machine
from whence.operators.fit import Fitter

SOURCE = "SOURCE, C = 6, L = 3"
METHODS: dict[str, whence.Source | whence.Influence] = {
    "influence": whence.Influence(),
    SOURCE: whence.Source(segments=3),
}
#: training examples × queries; those of SOURCE take three minutes
SIZES = {
    "gpt": {"influence": (192, 16), SOURCE: (24, 4)},
    "mlp": {"influence": (24000, 100), SOURCE: (2000, 20)},
}


def resident(field: str) -> int:
    """Bytes of this process's resident memory, from Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(field))
    return int(line.split()[1]) * 1024


def work(folder: Path, workload: str, method: str) -> None:
    """One rank: attributes, and writes what it measured."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sizes, sent = _factor_bytes(), _sent_bytes()
    if size > 1:
        meeting = f"file://{folder}/meeting"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    chosen, (train, query) = WORKLOADS[workload], SIZES[workload][method]
    torch.manual_seed(0)
    model = chosen.model().eval()
    data, queries, run = chosen.data(train, 1), chosen.data(query, 2), run_of(model)
    study = whence.Study(model, chosen.task, train=data, runs=run, layers="matrices")
    torch.randn(1000, 1000) @ torch.randn(1000, 1000)  # loads the libraries
    if size > 1:
        dist.barrier()
    before, wall, cpu = resident("VmRSS"), time.perf_counter(), time.process_time()
    how: Any = {"batch_size": chosen.batch, "progress": False, "out": folder / "scores"}
    scores = METHODS[method].attribute(study, queries, **how)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    measured = {
        "seconds": wall,
        "cpu_seconds": cpu,
        "factors": sum(sizes),
        "peak": resident("VmHWM") - before,
        "sent": sum(sent),
        "stages": scores.diagnostics["cpu_seconds"],
    }
    (folder / f"rank-{rank}.json").write_text(json.dumps(measured))
    np.save(folder / f"rank-{rank}.npy", scores.values)


def _factor_bytes() -> list[int]:
    """Filled with the bytes of what a rank holds of each fitted curvature."""
    sizes: list[int] = []
    placed = Fitter._placed

    def noting(self: Any, kind: Any, factors: Any) -> Any:
        sizes.append(sum(x.nbytes for x in factors.values()))
        return placed(self, kind, factors)

    Fitter._placed = noting  # type: ignore[method-assign]
    return sizes


def _sent_bytes() -> list[int]:
    """Filled with the bytes of every tensor that this rank gives to an exchange."""
    sent: list[int] = []
    place = whence.world.World._sent

    def noting(self: Any, tensor: Any) -> Any:
        sent.append(tensor.nbytes)
        return place(self, tensor)

    whence.world.World._sent = noting  # type: ignore[method-assign]
    return sent


def run(workload: str, method: str, size: int) -> tuple[list[dict[str, Any]], Any]:
    """What each rank measured, and the scores of rank 0."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        command = [sys.executable, "-m", "benchmarks.several_processes", "--worker", temporary]
        command += ["--workload", workload, "--method", method]
        each = [
            subprocess.Popen(command, env={**os.environ, "RANK": str(r), "WORLD_SIZE": str(size)})
            for r in range(size)
        ]
        codes = [process.wait() for process in each]
        if any(codes):
            raise SystemExit(f"{workload}, {method}: a process failed")
        measured = [json.loads((folder / f"rank-{r}.json").read_text()) for r in range(size)]
        return measured, np.load(folder / "rank-0.npy")


def measure(workload: str, method: str, rounds: int) -> dict[str, Any]:
    best: dict[int, list[dict[str, Any]]] = {}
    scores: dict[int, list[Any]] = {1: [], 2: []}
    for _ in range(rounds):
        for size in (1, 2):
            measured, values = run(workload, method, size)
            scores[size].append(values)
            if size not in best or measured[0]["seconds"] < best[size][0]["seconds"]:
                best[size] = measured
    largest = np.abs(scores[1][0]).max()
    return {
        "train": SIZES[workload][method][0],
        "query": SIZES[workload][method][1],
        "rounds": rounds,
        "agreement": float(np.abs(scores[2][0] - scores[1][0]).max() / largest),
        "same_bits": all(bool((x == scores[2][0]).all()) for x in scores[2]),
        "one": best[1],
        "two": best[2],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--workload", choices=SIZES)
    parser.add_argument("--method", choices=METHODS)
    parser.add_argument("--worker", type=Path)
    chosen = parser.parse_args()
    if chosen.worker is not None:
        work(chosen.worker, chosen.workload, chosen.method)
        return
    path = RESULTS / "several_processes.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    for workload in [chosen.workload] if chosen.workload else SIZES:
        for method in [chosen.method] if chosen.method else METHODS:
            result = measure(workload, method, chosen.rounds)
            result |= {"machine": machine(), "load": os.getloadavg()[0]}
            results[f"{workload}, {method}"] = result
            one, two = result["one"][0], result["two"]
            slowest = max(r["seconds"] for r in two)
            print(
                f"{workload}, {method}: {one['seconds']:.1f} s, {slowest:.1f} s "
                f"({slowest / one['seconds']:.2f}); factors "
                f"{[round(r['factors'] / one['factors'], 2) for r in two]}, peak "
                f"{[round(r['peak'] / one['peak'], 2) for r in two]}, agreement "
                f"{result['agreement']:.1e}, same bits {result['same_bits']}",
                flush=True,
            )
            path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
