"""A large matrix on disk, one row per training example: written once, block by block; then mapped.

NAME.npy is a finished matrix. While it is written or extended, NAME.npy.partial holds the new one.
The store's own file records how many of its rows are complete.
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

CACHE_BYTES = 8 * 2**20  # of rows per product, so that they stay in the processor's cache


def finished(path: Path, dimension: int, dtype: np.dtype[np.floating]) -> int:
    """The number of rows of a finished matrix; 0 if there is none."""
    if not path.exists():
        return 0
    return len(_mapped(path, "r", dimension, dtype))


def mapped(path: Path, examples: int, dimension: int, dtype: np.dtype[np.floating]) -> Tensor:
    """A finished matrix (n, d), memory-mapped. Its pages are private: nothing changes the file."""
    if not path.exists():
        raise MissingFile(f"{path} is missing, so the store is incomplete: build it again")
    array = _mapped(path, "c", dimension, dtype)
    if len(array) != examples:
        raise InvalidInput(
            f"{path} has {len(array)} rows, but the store has {examples} examples: the file was "
            "truncated or replaced. Delete it, and build the store again"
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
    """A matrix (n, d) while it is written.

    Args:
        path: of the finished matrix. An existing one with fewer rows is extended.
        complete: rows of a partial matrix that are complete.
    """

    def __init__(
        self, path: Path, examples: int, dimension: int, dtype: np.dtype[np.floating], complete: int
    ) -> None:
        self.path, self.partial = path, path.with_name(path.name + ".partial")
        old = finished(path, dimension, dtype)
        self.array: np.memmap | None = None
        if self.partial.exists() and complete > old:
            try:
                partial = np.lib.format.open_memmap(self.partial, mode="r+")
                if partial.shape == (examples, dimension) and partial.dtype == dtype:
                    self.array, self.start = partial, complete
            except ValueError:  # not an array: start over
                pass
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
    """Inner products (q, n) of vectors (q, d) with rows (n, d)."""
    if rows.device.type != "cpu" or len(vectors) == 1:
        return vectors @ rows.T
    products = vectors.new_empty(len(vectors), len(rows))
    step = max(1, CACHE_BYTES // (rows.shape[1] * rows.element_size()))
    for start in range(0, len(rows), step):
        products[:, start : start + step] = vectors @ rows[start : start + step].T
    return products
