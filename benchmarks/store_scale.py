"""The strongest of many stored rows, against reading the same file: store_scale.json.

    python -m benchmarks.store_scale [--rows 10000000] [--dimension 256] [--folder /tmp]

The path of `store.source(query, top=100)` after the query's vectors are known: rows are mapped,
their checksums compared, multiplied block by block, and the strongest are kept. Next to it, the
same file is read from its beginning to its end. Before each, the kernel forgets its pages, so both
come from the disk. "again" is a second query of the same store: rows come from memory, and their
checksums are not compared again. One thread for the products. Rounds alternate, and the least wall
seconds of each are kept, with their processor seconds, which other work on the machine does not
change.

A row costs 2qd operations for q queries, and b bytes from the disk. So the disk is the limit up to
q* = b rate / (2d × disk's bytes per second), with the processor's rate in operations per second.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.report import RESULTS
from experiments.tasks.machine import machine
from whence.scores.strongest import Strongest
from whence.store.rows import FORMS, Rows, StoredRows, columns, inner
from whence.store.workspace import CHUNK

BLOCK = 16 * 2**20  # bytes per read
TOP = 100
QUERIES = (1, 4, 16)
Times = tuple[float, float]  # wall and processor seconds


def write(path: Path, rows: int, dimension: int, form: str) -> dict[str, Any]:
    """A matrix of random rows; its entry."""
    dtype = FORMS[form] or np.dtype(np.float32)
    about = {"shape": [rows, columns(form, dimension)], "dtype": str(dtype)}
    matrix, generator = Rows(path, about, None, None, form), torch.Generator().manual_seed(0)
    for start in range(0, rows, CHUNK):
        count = min(CHUNK, rows - start)
        matrix.write(torch.randn(count, dimension, generator=generator))
    matrix.flush()
    entry = matrix.entry
    matrix.finish()
    return dict(entry)


def forget(path: Path) -> None:
    """Drop the file's pages from memory."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(BLOCK)
        while file.readinto(buffer):
            pass


def strongest(stored: StoredRows, vectors: torch.Tensor) -> Strongest:
    """The strongest rows of each query, block by block."""
    rows = len(stored.array)
    best = Strongest(TOP, len(vectors), rows, np.dtype(np.float32))
    for start in range(0, rows, CHUNK):
        here = slice(start, min(start + CHUNK, rows))
        best.add(slice(0, len(vectors)), start, stored.inner(here, vectors).numpy())
    return best


def timed(action: Callable[..., object], *arguments: object) -> Times:
    wall, processor = time.perf_counter(), time.process_time()
    action(*arguments)
    return time.perf_counter() - wall, time.process_time() - processor


def rate(dimension: int) -> float:
    """Operations per processor second of the products, with rows that are in memory."""
    vectors, rows = torch.randn(64, dimension), torch.randn(CHUNK, dimension)
    best = min(timed(inner, rows, vectors)[1] for _ in range(5))
    return 2.0 * vectors.numel() * len(rows) / best


def measure(path: Path, entry: dict[str, Any], form: str, rounds: int) -> dict[str, Any]:
    times: dict[str, list[Times]] = {}
    dimension = entry["shape"][1] - columns(form, 0)
    for _ in range(rounds):
        for queries in QUERIES:
            vectors = torch.randn(queries, dimension)
            forget(path)
            times.setdefault("read", []).append(timed(read, path))
            forget(path)
            stored = StoredRows(path, entry, form)
            times.setdefault(f"top, {queries}", []).append(timed(strongest, stored, vectors))
            times.setdefault(f"again, {queries}", []).append(timed(strongest, stored, vectors))
            del stored  # pages that are mapped cannot be dropped
    return {"bytes": path.stat().st_size, "seconds": {k: min(v) for k, v in times.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--dimension", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {"rows": chosen.rows, "dimension": chosen.dimension, "forms": {}}
    results["rate"] = rate(chosen.dimension)
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        for form in FORMS:
            path = Path(folder) / f"{form}.npy"
            entry = write(path, chosen.rows, chosen.dimension, form)
            results["forms"][form] = measure(path, entry, form, chosen.rounds)
            print(form, results["forms"][form], flush=True)
            path.unlink()
    results |= {"machine": machine(), "rounds": chosen.rounds, "load": os.getloadavg()[2]}
    (RESULTS / "store_scale.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
