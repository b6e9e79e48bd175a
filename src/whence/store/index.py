"""Approximate search among stored rows, by FAISS: an extra, `pip install 'whence-tda[faiss]'`.

A score is one inner product of the query's vectors w_c with an example's rows g_c, laid side by
side: Σ_c ⟨w_c, g_c⟩. An index finds the examples where it is probably largest and smallest, without
reading all rows. Their scores are then computed from the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whence.data import cut
from whence.errors import optional
from whence.store.rows import StoredRows

EXHAUSTIVE_ROWS = 10_000  # rows, below which all are compared
CELLS_PER_ROOT = 4.0  # times √n: cells of the others
PROBED_SHARE = 1 / 8  # of the cells are searched
SAMPLES_PER_CELL = 64  # rows for each cell, to place the cells
CHUNK_ROWS = 1 << 14  # rows that are added at once
OVERSAMPLING = 2  # times as many candidates as are asked for


def built(rows: Sequence[StoredRows]) -> NDArray[np.uint8]:
    """An index of matrices of rows side by side, as bytes."""
    faiss, n = _faiss(), len(rows[0].array)
    dimension = _some(rows, np.arange(1)).shape[1]
    lists = int(CELLS_PER_ROOT * n**0.5)
    form = "Flat" if n <= EXHAUSTIVE_ROWS else f"IVF{lists},SQfp16"
    index = faiss.index_factory(dimension, form, faiss.METRIC_INNER_PRODUCT)
    if n > EXHAUSTIVE_ROWS:
        index.nprobe = max(1, int(PROBED_SHARE * lists))
        sample = np.linspace(0, n - 1, min(n, SAMPLES_PER_CELL * lists)).astype(np.int64)
        index.train(_some(rows, np.unique(sample)))
    for block in cut(n, CHUNK_ROWS):
        index.add(_some(rows, block))
    return np.asarray(faiss.serialize_index(index))


def opened(content: NDArray[np.uint8]) -> Any:
    """The index that these bytes are."""
    return _faiss().deserialize_index(content)


def candidates(index: Any, vectors: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """Examples that are probably among the k highest or lowest of some vector (q, d)."""
    count = min(OVERSAMPLING * k, index.ntotal)
    both = [index.search(sign * vectors, count)[1] for sign in (1, -1)]
    examples: NDArray[np.int64] = np.unique(np.concatenate(both))
    return examples[examples >= 0]


def _some(rows: Sequence[StoredRows], indices: NDArray[np.int64]) -> NDArray[np.float32]:
    parts = [matrix[indices].float().numpy() for matrix in rows]
    return np.ascontiguousarray(np.concatenate(parts, 1), dtype=np.float32)


def _faiss() -> Any:
    with optional("index='faiss' needs FAISS", "faiss"):
        import faiss
    return faiss
