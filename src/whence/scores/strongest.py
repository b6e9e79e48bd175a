"""The strongest scores of each query, while the scores arrive block by block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whence.scores.result import Floats, Ints, Top

SIGNS = (1, -1)  # of the two ends: the highest, and the lowest


class Strongest:
    """The k highest and the k lowest entries of each row of a matrix (q, n).

    The order of the blocks does not matter, and a block may come twice. Ties go to the lower
    column. A place that has no entry yet has the column n.

    Attributes:
        values, columns: (2, q, k); [0] has the highest first, [1] the lowest first.
    """

    def __init__(self, k: int, queries: int, examples: int, dtype: np.dtype[Any]) -> None:
        ends = np.array([-np.inf, np.inf], dtype)[:, None, None]
        self.values: NDArray[np.floating] = np.tile(ends, (1, queries, k))
        self.columns: Ints = np.full(self.values.shape, examples, np.int64)

    @property
    def k(self) -> int:
        return int(self.values.shape[2])

    def add(self, rows: slice, where: int | Ints, scores: Floats) -> None:
        """Take the scores (rows, columns) of a block: of the columns `where`, or of those from
        there on."""
        for end, sign in enumerate(SIGNS):
            weakest = self.values[end, rows, -1:]
            enters = scores >= weakest if sign > 0 else scores <= weakest
            chosen = np.flatnonzero(enters.any(0))
            if len(chosen):
                block = scores[:, chosen]
                columns = _strongest_columns(sign * block, min(self.k, len(chosen)))
                values = np.take_along_axis(block, columns, 1)
                places = chosen[columns]
                self._keep(
                    end, rows, values, places + where if isinstance(where, int) else where[places]
                )

    def merge(self, arrays: Mapping[str, NDArray[np.generic]]) -> None:
        """Take the entries of another `Strongest` of the same matrix, given as its `arrays`."""
        for end in range(len(SIGNS)):
            self._keep(end, slice(None), arrays["values"][end], arrays["columns"][end])

    @property
    def arrays(self) -> dict[str, NDArray[np.generic]]:
        return {"values": self.values, "columns": self.columns}

    def top(self, shape: tuple[int, ...]) -> Top:
        """The strongest entries of scores of this shape: (q, n), or (n,) for self-influence."""
        ends = (2, *shape[:-1], self.k)
        return Top(self.values.reshape(ends), self.columns.reshape(ends))

    def _keep(self, end: int, rows: slice, values: Floats, columns: Ints) -> None:
        """The strongest of these entries and of those here, of which some may be the same."""
        sign, place = SIGNS[end], np.s_[end, rows]
        both = np.concatenate([self.columns[place], columns], 1)
        strength = sign * np.concatenate([self.values[place], values], 1)
        order = np.argsort(both, 1, kind="stable")
        again = np.diff(np.take_along_axis(both, order, 1), axis=1, prepend=-1) == 0
        once = np.where(again, -np.inf, np.take_along_axis(strength, order, 1))
        np.put_along_axis(strength, order, once, 1)
        order = np.lexsort((both, -strength), axis=1)[:, : self.k]
        self.values[place] = sign * np.take_along_axis(strength, order, 1)
        self.columns[place] = np.take_along_axis(both, order, 1)


def _strongest_columns(strength: Floats, k: int) -> Ints:
    """Columns (r, k) of the k largest entries of each row of (r, m), ties to the lower column."""
    place = strength.shape[1] - k
    kth = np.partition(strength, place, axis=1)[:, place, None]
    above, ties = strength > kth, strength == kth
    room = k - above.sum(1, keepdims=True)
    keep = above | (ties & (np.cumsum(ties, 1, dtype=np.int32) <= room))
    return np.nonzero(keep)[1].reshape(-1, k)
