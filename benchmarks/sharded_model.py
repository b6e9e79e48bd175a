"""A model that two processes divide with FSDP2 against the whole one: memory, time, scores.

    python -m benchmarks.sharded_model

Two processes, one thread each, gloo, TracIn on a residual network of wide blocks, whose weights are
nearly all there is. "peak" is the largest anonymous memory of a rank during the call, above that
at its start, sampled every 5 ms: the pages of a mapped file are not among it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import whence
from benchmarks.report import RESULTS
from experiments.tasks.machine import machine

WIDTH, INNER, DEPTH, CLASSES = 768, 3072, 16, 10
TRAIN, QUERY = 256, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.second(torch.relu(self.first(x)))
        return y


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(DEPTH)), nn.Linear(WIDTH, CLASSES))


def data(count: int, seed: int) -> torch.utils.data.TensorDataset:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(count, WIDTH, generator=random)
    return torch.utils.data.TensorDataset(x, torch.arange(count) % CLASSES)


class Peak(threading.Thread):
    """The largest anonymous memory of this process while it runs."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.start_bytes = self.most = anonymous()
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.005):
            self.most = max(self.most, anonymous())


def anonymous() -> int:
    """Bytes of this process's memory that no file backs, from Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def work(folder: Path, sharded: bool) -> None:
    """One rank: attributes, and writes what it measured."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    model: Any = network()
    if sharded:
        mesh = init_device_mesh("cpu", (2,))
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    study = whence.Study(model, whence.Classification(), data(TRAIN, 1), folder / "run")
    dist.barrier()
    peak, start = Peak(), time.perf_counter()
    peak.start()
    how: Any = {"batch_size": 64, "progress": False}
    scores = whence.TracIn().attribute(study, data(QUERY, 2), **how)
    seconds = time.perf_counter() - start
    peak.ended.set()
    peak.join()
    measured = {"seconds": seconds, "peak": peak.most - peak.start_bytes}
    (folder / f"rank-{rank}.json").write_text(json.dumps(measured))
    np.save(folder / f"rank-{rank}.npy", scores.values)


def run(sharded: bool) -> tuple[list[dict[str, float]], Any]:
    """What each rank measured, and the scores of rank 0."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, model = Path(temporary), network()
        weights = model.state_dict()
        whence.Run.from_checkpoints([weights], steps=[10], learning_rates=0.01).save(folder / "run")
        command = [sys.executable, "-m", "benchmarks.sharded_model", "--worker", temporary]
        command += ["--sharded"] if sharded else []
        known = {**os.environ, "WORLD_SIZE": "2"}
        each = [subprocess.Popen(command, env={**known, "RANK": str(r)}) for r in range(2)]
        codes = [process.wait() for process in each]
        if any(codes):
            raise SystemExit("a process failed")
        measured = [json.loads((folder / f"rank-{r}.json").read_text()) for r in range(2)]
        return measured, np.load(folder / "rank-0.npy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", type=Path)
    parser.add_argument("--sharded", action="store_true")
    chosen = parser.parse_args()
    if chosen.worker is not None:
        work(chosen.worker, chosen.sharded)
        return
    whole, scores = run(False)
    divided, others = run(True)
    result = {
        "weights": sum(p.numel() * 4 for p in network().parameters()),
        "train": TRAIN,
        "query": QUERY,
        "difference": float(np.abs(scores - others).max() / np.abs(scores).max()),
        "whole": whole,
        "sharded": divided,
        "machine": machine(),
    }
    (RESULTS / "sharded_model.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
