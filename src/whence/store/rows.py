"""A large matrix on disk, one row per training example: written once, block by block; then mapped.

NAME.npy is a finished matrix. While it is written or extended, NAME.npy.partial holds the new one.
The store's own file records how many of its rows are complete, and the checksums of all.

Rows of float16 and int8 are divided by their largest entry, which follows them in the same matrix
as four bytes of float32 (`encoded`).
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whence.errors import DamagedFile, InvalidInput, MissingFile
from whence.persist.arrays import Checksums, Entry, create_array, load_array, map_array
from whence.persist.files import move_into_place

CACHE_BYTES = 2**20  # of rows per product, so that they stay in the processor's cache
READ_AHEAD_BLOCKS = 2  # blocks of rows that one thread reads ahead: it never waits for the products
PAGE = 4096  # bytes; the least that a system maps
REMEDY = "delete it, and build the store again"


#: what rows are stored in; None is the precision of the passes, float32 or float64
FORMS = {"full": None, "float16": np.dtype(np.float16), "int8": np.dtype(np.int8)}
LARGEST_ENTRY = {"float16": 1.0, "int8": 127.0}  # the largest stored entry
MAX_ERROR = {"full": 0.0, "float16": 1e-3, "int8": 0.1}  # relative, of a row, at most


def columns(form: str, dimension: int) -> int:
    """Columns of the stored matrix, those of the scale included."""
    dtype = FORMS[form]
    return dimension if dtype is None else dimension + 4 // dtype.itemsize


def encoded(values: NDArray[Any], form: str) -> NDArray[Any]:
    """Rows (n, d) as they are stored."""
    dtype = FORMS[form]
    if dtype is None:
        return values
    values = values.astype(np.float32, copy=False)
    scales = np.abs(values).max(1, keepdims=True) / np.float32(LARGEST_ENTRY[form])
    quotients = np.divide(values, scales, out=np.zeros_like(values), where=scales > 0)
    entries = np.rint(quotients) if form == "int8" else quotients
    return np.concatenate([entries.astype(dtype), scales.astype(np.float32).view(dtype)], 1)


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
        form: of `FORMS`.
    """

    def __init__(self, path: Path, entry: Mapping[str, Any], form: str = "full") -> None:
        self.form = form
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
        self._start = 0  # of the last rows
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="rows")
        self._reads: dict[int, Future[None]] = {}  # of the next rows, by the first of them

    def __getitem__(self, rows: slice | NDArray[np.int64]) -> Tensor:
        entries, scales = self._parts(rows)
        return entries if scales is None else entries.float() * scales[:, None]

    def inner(self, rows: slice, vectors: Tensor) -> Tensor:
        """Inner products (q, n) of vectors (q, d) with these rows. While they are computed, the
        rows that probably come next are read."""
        self._read_ahead(rows)
        entries, scales = (x if x is None else x.to(vectors.device) for x in self._parts(rows))
        assert entries is not None
        products = inner(entries, vectors)
        return products if scales is None else products * scales

    def _read_ahead(self, rows: slice) -> None:
        """Wait for these rows if they are being read. Have the next ones read, which are as far
        behind these as these are behind the last ones."""
        step, self._start = rows.start - self._start, rows.start
        reading = self._reads.pop(rows.start, None)
        ahead = [
            slice(rows.start + k * step, rows.stop + k * step)
            for k in range(1, READ_AHEAD_BLOCKS + 1)
        ]
        for block in ahead if step > 0 else ():
            if block.start < len(self.array) and block.start not in self._reads:
                self._reads[block.start] = self._reader.submit(self._touch, block)
        if reading is not None:
            reading.result()

    def _touch(self, rows: slice) -> None:
        with suppress(DamagedFile):  # which is raised where they are used
            data = self.array[rows].reshape(-1).view(np.uint8)
            data[::PAGE].max()

    def _parts(self, rows: slice | NDArray[np.int64]) -> tuple[Tensor, Tensor | None]:
        """Stored entries (n, d), and the scale of each row."""
        stored = self.array[rows]
        if self.form == "full":
            return torch.from_numpy(stored), None
        d = stored.shape[1] - 4 // stored.itemsize
        scales = stored[:, d:].copy().view(np.float32)[:, 0]  # a single row may start anywhere
        return torch.from_numpy(stored[:, :d]), torch.from_numpy(scales)


class Rows:
    """A matrix (n, d) while it is written.

    Args:
        path: of the finished matrix. An existing one with fewer rows is extended.
        form: shape and dtype that it will have.
        encoding: of its rows, of `FORMS`.
        partial: how many rows of a partial matrix are complete, and their checksums.
        entry: of the existing matrix.
    """

    def __init__(
        self,
        path: Path,
        form: Entry,
        partial: Mapping[str, Any] | None,
        entry: Entry | None,
        encoding: str = "full",
    ) -> None:
        self.encoding = encoding
        self.path, self.partial, self.form = path, path.with_name(path.name + ".partial"), form
        shape, dtype = (int(form["shape"][0]), int(form["shape"][1])), np.dtype(form["dtype"])
        rows_before = finished(path, shape[1], dtype)
        self.start, self.checksums = 0, Checksums()
        self.array = self._resumed(partial, rows_before)
        if self.array is None:
            self.array = create_array(self.partial, shape, dtype)
            if rows_before:
                about = entry if entry is not None and entry["shape"][0] == rows_before else {}
                stored = StoredRows(path, {**form, **about, "shape": [rows_before, shape[1]]})
                self.array[:rows_before] = stored.array
                self.checksums.add(self.array[:rows_before])
            self.start = rows_before

    def _resumed(self, partial: Mapping[str, Any] | None, rows_before: int) -> NDArray[Any] | None:
        """The partial matrix, if its complete rows are as they were written."""
        if partial is None or partial["rows"] <= rows_before:
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
        rows = encoded(values.cpu().numpy(), self.encoding).astype(self.array.dtype, copy=False)
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
    """Inner products (q, n) of vectors (q, d) with rows (n, d) of any dtype."""
    if rows.dtype == vectors.dtype and (rows.device.type != "cpu" or len(vectors) == 1):
        return vectors @ rows.T
    products = vectors.new_empty(len(vectors), len(rows))
    step = max(1, CACHE_BYTES // (rows.shape[1] * vectors.element_size()))
    converted = None if rows.dtype == vectors.dtype else vectors.new_empty(step, rows.shape[1])
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        if converted is not None:
            part = converted[: len(part)].copy_(part)
        products[:, start : start + step] = vectors @ part.T
    return products
