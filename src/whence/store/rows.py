"""A large matrix on disk, one row per training example: written once, block by block; then mapped.

NAME.npy is a finished one. While it is made, or made longer, NAME.npy.partial holds the new one,
and a note how many of its rows are good is kept elsewhere (the store's own file).
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whence.errors import InvalidInput, MissingFile
from whence.persist.files import load_array, move_into_place

CACHED = 8 * 2**20  # bytes of rows that meet the vectors at a time, out of the processor's cache


def finished(path: Path, dimension: int, dtype: np.dtype[np.floating]) -> int:
    """How many rows a finished matrix has; 0 if there is none."""
    if not path.exists():
        return 0
    return len(_mapped(path, "r", dimension, dtype))


def mapped(path: Path, examples: int, dimension: int, dtype: np.dtype[np.floating]) -> Tensor:
    """A finished matrix (n, d), not in memory. Its pages are private: nothing changes the file."""
    if not path.exists():
        raise MissingFile(f"{path} is missing: the store is not whole. Build it again")
    array = _mapped(path, "c", dimension, dtype)
    if len(array) != examples:
        raise InvalidInput(
            f"{path} has {len(array)} rows, but the store is of {examples} examples: it was cut "
            "off or exchanged. Delete it, and build the store again"
        )
    return torch.from_numpy(array)


def _mapped(
    path: Path, mode: Literal["r", "c"], dimension: int, dtype: np.dtype[np.floating]
) -> NDArray[np.floating]:
    array = load_array(path, mode=mode, remedy="delete it, and build the store again")
    if array.ndim != 2 or array.shape[1] != dimension or array.dtype != dtype:
        raise InvalidInput(
            f"{path} holds {array.dtype} of shape {array.shape}, not {dtype} of dimension "
            f"{dimension}: it belongs to another store. Delete it, and build the store again"
        )
    return array


class Rows:
    """A matrix (n, d) that is being made.

    Args:
        path: of the finished matrix. If there is one with fewer rows, it is made longer.
        good: rows of a partial matrix that are known to be good.
    """

    def __init__(
        self, path: Path, examples: int, dimension: int, dtype: np.dtype[np.floating], good: int
    ) -> None:
        self.path, self.partial = path, path.with_name(path.name + ".partial")
        old = finished(path, dimension, dtype)
        self.array: np.memmap | None = None
        if self.partial.exists() and good > old:
            try:
                found = np.lib.format.open_memmap(self.partial, mode="r+")
            except ValueError:
                found = None
            if found is not None and found.shape == (examples, dimension) and found.dtype == dtype:
                self.array, self.start = found, good
        if self.array is None:
            self.array = np.lib.format.open_memmap(
                self.partial, mode="w+", dtype=dtype, shape=(examples, dimension)
            )
            if old:
                self.array[:old] = _mapped(path, "r", dimension, dtype)
            self.start = old

    def write(self, first: int, values: Tensor) -> None:
        assert self.array is not None
        self.array[first : first + len(values)] = values.cpu().numpy()

    def flush(self) -> None:
        assert self.array is not None
        self.array.flush()

    def finish(self) -> None:
        self.flush()
        self.array = None
        move_into_place(self.partial, self.path)


def inner(rows: Tensor, vectors: Tensor) -> Tensor:
    """vectors (q, d) times rows (n, d): (q, n), at the speed of memory for a few vectors."""
    if rows.device.type != "cpu" or len(vectors) == 1:
        return vectors @ rows.T
    found = vectors.new_empty(len(vectors), len(rows))
    step = max(1, CACHED // (rows.shape[1] * rows.element_size()))
    for start in range(0, len(rows), step):
        found[:, start : start + step] = vectors @ rows[start : start + step].T
    return found
