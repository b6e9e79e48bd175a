"""A large matrix on disk, one row per training example: written once, block by block; then mapped.

NAME.npy is a finished matrix. While it is written or extended, NAME.npy.partial holds the new one.
The store's own file records how many of its rows are complete, and the checksums of all.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whence.errors import DamagedFile, InvalidInput, MissingFile
from whence.persist.arrays import Checksums, Entry, create_array, load_array, map_array
from whence.persist.files import move_into_place

CACHE_BYTES = 8 * 2**20  # of rows per product, so that they stay in the processor's cache
REMEDY = "delete it, and build the store again"


def finished(path: Path, dimension: int, dtype: np.dtype[np.floating]) -> int:
    """The number of rows of a finished matrix; 0 if there is none."""
    if not path.exists():
        return 0
    array = map_array(path, remedy=REMEDY)
    if array.ndim != 2 or array.shape[1] != dimension or array.dtype != dtype:
        raise InvalidInput(
            f"{path} holds {array.dtype} of shape {array.shape}, not {dtype} of dimension "
            f"{dimension}: it belongs to another store. Delete it, and build the store again"
        )
    return len(array)


class StoredRows:
    """A finished matrix (n, d), memory-mapped. What is read of it is checked first.

    Its pages are private: nothing changes the file.

    Args:
        entry: shape, dtype and checksums of the matrix.
    """

    def __init__(self, path: Path, entry: Mapping[str, Any]) -> None:
        examples, dimension = entry["shape"]
        if not path.exists():
            raise MissingFile(f"{path} is missing, so the store is incomplete: build it again")
        rows = finished(path, dimension, np.dtype(entry["dtype"]))
        if rows != examples:
            raise InvalidInput(
                f"{path} has {rows} rows, but the store has {examples} examples: the file was "
                "truncated or replaced. Delete it, and build the store again"
            )
        self.array = load_array(path, entry, mode="c", remedy=REMEDY)

    def __getitem__(self, rows: slice | NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(self.array[rows])


class Rows:
    """A matrix (n, d) while it is written.

    Args:
        path: of the finished matrix. An existing one with fewer rows is extended.
        form: shape and dtype that it will have.
        partial: how many rows of a partial matrix are complete, and their checksums.
        entry: of the existing matrix.
    """

    def __init__(
        self, path: Path, form: Entry, partial: Mapping[str, Any] | None, entry: Entry | None
    ) -> None:
        self.path, self.partial, self.form = path, path.with_name(path.name + ".partial"), form
        shape, dtype = (int(form["shape"][0]), int(form["shape"][1])), np.dtype(form["dtype"])
        old = finished(path, shape[1], dtype)
        self.start, self.checksums = 0, Checksums()
        self.array = self._resumed(partial, old)
        if self.array is None:
            self.array = create_array(self.partial, shape, dtype)
            if old:
                about = entry if entry is not None and entry["shape"][0] == old else {}
                stored = StoredRows(path, {**form, **about, "shape": [old, shape[1]]})
                self.array[:old] = stored.array
                self.checksums.add(self.array[:old])
            self.start = old

    def _resumed(self, partial: Mapping[str, Any] | None, old: int) -> NDArray[Any] | None:
        """The partial matrix, if its complete rows are as they were written."""
        if partial is None or partial["rows"] <= old:
            return None
        try:
            array = map_array(self.partial, "r+")
        except (DamagedFile, MissingFile):
            return None
        if list(array.shape) != self.form["shape"] or str(array.dtype) != self.form["dtype"]:
            return None
        checksums = Checksums().add(array[: partial["rows"]])
        if partial.get("crc32", checksums.crc32) != checksums.crc32:
            return None
        self.start, self.checksums = partial["rows"], checksums
        return array

    def write(self, values: Tensor) -> None:
        """Write the next rows."""
        assert self.array is not None
        rows = values.cpu().numpy().astype(self.array.dtype, copy=False)
        self.array[self.start : self.start + len(rows)] = rows
        self.checksums.add(rows)
        self.start += len(rows)

    def flush(self) -> dict[str, Any]:
        """How many rows are on disk, and their checksums."""
        assert isinstance(self.array, np.memmap)
        self.array.flush()
        return {"rows": self.start, "crc32": self.checksums.crc32}

    @property
    def entry(self) -> Entry:
        return {**self.form, "crc32": self.checksums.crc32}

    def finish(self) -> None:
        """Put the matrix in its place. The store must know its entry before."""
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
