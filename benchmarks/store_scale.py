"""The strongest of many stored rows, against reading the same file: store_scale.json.

    python -m benchmarks.store_scale [--rows 1000000] [--dimension 256] [--folder /tmp]

The path of `store.source(query, top=100)` after the query's vectors are known: rows are mapped,
their checksums compared, multiplied block by block, and the strongest are kept. Next to it, the
same file is read from its beginning to its end. Before each, the kernel forgets its pages, so both
come from the disk; "warm" is the second time. Wall seconds, one thread, the least of the rounds.
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
from whence.store.rows import FORMS, Rows, StoredRows, columns
from whence.store.workspace import CHUNK

BLOCK = 16 * 2**20  # bytes per read
TOP = 100


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


def strongest(path: Path, entry: dict[str, Any], form: str, vectors: torch.Tensor) -> Strongest:
    """The strongest rows of each query, block by block."""
    stored, rows = StoredRows(path, entry, form), entry["shape"][0]
    best = Strongest(TOP, len(vectors), rows, np.dtype(np.float32))
    for start in range(0, rows, CHUNK):
        here = slice(start, min(start + CHUNK, rows))
        best.add(slice(0, len(vectors)), start, stored.inner(here, vectors).numpy())
    return best


def timed(action: Callable[..., object], *arguments: object) -> float:
    start = time.perf_counter()
    action(*arguments)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dimension", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {"rows": chosen.rows, "dimension": chosen.dimension, "forms": {}}
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        for form in FORMS:
            path = Path(folder) / f"{form}.npy"
            entry = write(path, chosen.rows, chosen.dimension, form)
            measured: dict[str, Any] = {"bytes": path.stat().st_size, "queries": {}}
            for queries in (1, 16):
                vectors = torch.randn(queries, chosen.dimension)
                times: dict[str, list[float]] = {"read": [], "top": [], "warm": []}
                for _ in range(chosen.rounds):
                    forget(path)
                    times["read"].append(timed(read, path))
                    forget(path)
                    times["top"].append(timed(strongest, path, entry, form, vectors))
                    times["warm"].append(timed(strongest, path, entry, form, vectors))
                measured["queries"][queries] = {name: min(each) for name, each in times.items()}
            results["forms"][form] = measured
            print(form, measured, flush=True)
            path.unlink()
    results["machine"] = machine()
    (RESULTS / "store_scale.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
