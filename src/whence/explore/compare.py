"""Two scores side by side: do they order the training examples alike?

Both are taken as help (what is better for the query is positive), so that a loss and a margin can
be compared. Axes as in `whence.explore.state`.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whence.explore.reading import Floats, Ints
from whence.explore.state import Explored, Refused
from whence.present.views import number, strongest

DOTS = 1500  # of a scatter plot, at most
CURVE = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)  # k of the overlap curve


def mid_ranks(values: Floats) -> Floats:
    """0, 1, ... by size; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts + 1) / 2)[inverse])


def correlation(u: Floats, v: Floats) -> float | None:
    """Pearson's; None where one of them is constant, or fewer than three are left."""
    if len(u) < 3:
        return None
    u, v = u - u.mean(), v - v.mean()
    # scaled first: the squares of tiny scores underflow
    a, b = np.abs(u).max(), np.abs(v).max()
    if a == 0 or b == 0:
        return None
    u, v = u / a, v / b
    return float((u * v).sum() / np.sqrt((u * u).sum() * (v * v).sum()))


def rank_correlation(u: Floats, v: Floats) -> float | None:
    """Spearman's, over the entries that both have."""
    both = np.isfinite(u) & np.isfinite(v)
    return correlation(mid_ranks(u[both]), mid_ranks(v[both])) if both.sum() > 2 else None


def tops(help_: Floats, k: int) -> Ints:
    """Places of the k most helpful, of those that have a score."""
    known = np.flatnonzero(np.isfinite(help_))
    return np.asarray(known[strongest(help_[known], k)])


def overlap(a: Ints, b: Ints, k: int) -> float | None:
    """The share of the first k that two rankings have in common; None if one is shorter."""
    if min(len(a), len(b)) < k:
        return None
    return len(np.intersect1d(a[:k], b[:k], assume_unique=True)) / k


def kept(explored: Explored, name: str) -> int:
    """How many entries there are at either end of a query's ranking."""
    scores = explored.of_queries(name)
    return int(scores.shape[-1]) if scores.top is None else scores.top.kept


def check_pair(explored: Explored, a: str, b: str) -> None:
    for name in (a, b):
        explored.of_queries(name)
    if not np.any((explored.columns(a) >= 0) & (explored.columns(b) >= 0)):
        raise Refused(f"{a} and {b} have no training example in common")


def compare_query(explored: Explored, a: str, b: str, row: int, k: int = 10) -> dict[str, Any]:
    """One query's scores by two methods or runs.

    Returns:
        `spearman`, `pearson` over the `common` training examples (None, with `why`, where only the
        top was kept); `overlap` of the first k most helpful and harmful; `curve`, the same by k;
        `dots` for a scatter plot; `lists`: each one's helpful and harmful entries, with the rank
        that the other gives them.
    """
    check_pair(explored, a, b)
    helps = {name: explored.help(name, explored.row(name, row)) for name in (a, b)}
    u, v = helps[a], helps[b]
    both = np.isfinite(u) & np.isfinite(v)
    cut = [name for name in (a, b) if explored.scores(name).top is not None]
    k = max(1, min(k, kept(explored, a), kept(explored, b)))
    longest = min(kept(explored, a), kept(explored, b), CURVE[-1])
    ends = {
        name: {
            "helpful": tops(h, max(longest, k)),
            "harmful": tops(-h, max(longest, k)),
        }
        for name, h in helps.items()
    }
    return {
        "row": row,
        "query": explored.query_item(row),
        "k": k,
        "common": int(both.sum()),
        "spearman": None if cut else _shown(rank_correlation(u, v)),
        "pearson": None if cut else _shown(correlation(u[both], v[both])),
        "why": f"{' and '.join(cut)} kept only the top: there is no rank for the rest"
        if cut
        else None,
        "overlap": {end: overlap(ends[a][end], ends[b][end], k) for end in ("helpful", "harmful")},
        "curve": [
            [c, *(overlap(ends[a][end], ends[b][end], c) for end in ("helpful", "harmful"))]
            for c in CURVE
            if c <= longest
        ],
        "dots": _dots(
            u, v, both, np.concatenate([e[:k] for own in ends.values() for e in own.values()])
        ),
        "lists": {
            name: {
                end: _list(explored, name, row, ends[name][end][:k], ends[other][end], other)
                for end in ("helpful", "harmful")
            }
            for name, other in ((a, b), (b, a))
        },
    }


def _list(
    explored: Explored, name: str, row: int, places: Ints, others: Ints, other: str
) -> list[dict[str, Any]]:
    values = explored.values(name, row)
    ranks = {int(p): r + 1 for r, p in enumerate(others)}
    return [
        {
            "column": int(p),
            "value": number(values[p]),
            "other": ranks.get(int(p)),  # None: further down, or not there
        }
        for p in places
    ]


def _dots(u: Floats, v: Floats, both: NDArray[np.bool_], always: Ints) -> list[list[float]]:
    """[place, a, b] of the top entries and, evenly, of the rest."""
    places = np.flatnonzero(both)
    always = np.unique(always[both[always]])
    step = max(1, -(-len(places) // DOTS))
    chosen = np.union1d(always, places[::step])
    return [[int(p), float(u[p]), float(v[p])] for p in chosen]


class Overall:
    """Rank correlation and overlap of two scores over all queries, worked out bit by bit: each
    ``go_on`` does what it can in the time it is given."""

    def __init__(self, explored: Explored, a: str, b: str, k: int) -> None:
        check_pair(explored, a, b)
        self.explored, self.a, self.b = explored, a, b
        self.k = max(1, min(k, kept(explored, a), kept(explored, b)))
        count = explored.of_queries(a).shape[0]
        self.found = np.full((3, count), np.nan)  # correlation, overlap helpful, overlap harmful
        self.done = 0
        self._ranked = all(explored.scores(name).top is None for name in (a, b))
        self._guard = threading.Lock()

    def go_on(self, seconds: float) -> dict[str, Any]:
        end = time.monotonic() + seconds
        with self._guard:
            while self.done < self.found.shape[1]:
                self._one(self.done)
                self.done += 1
                if time.monotonic() > end:
                    break
            return self._told()

    def _one(self, row: int) -> None:
        u, v = (self.explored.help(name, row) for name in (self.a, self.b))
        shared = [
            rank_correlation(u, v) if self._ranked else None,
            overlap(tops(u, self.k), tops(v, self.k), self.k),
            overlap(tops(-u, self.k), tops(-v, self.k), self.k),
        ]
        self.found[:, row] = [np.nan if x is None else x for x in shared]

    def _told(self) -> dict[str, Any]:
        found = self.found[:, : self.done]
        means = [
            number(row[~np.isnan(row)].mean()) if (~np.isnan(row)).any() else None for row in found
        ]
        spearman = found[0]
        order = np.argsort(spearman, kind="stable") if self._ranked else np.argsort(found[1])
        return {
            "k": self.k,
            "done": self.done,
            "of": self.found.shape[1],
            "spearman": means[0],
            "overlap": {"helpful": means[1], "harmful": means[2]},
            "per_query": [_shown(x) for x in (spearman if self._ranked else found[1])],
            "what": "rank correlation" if self._ranked else f"overlap of the top {self.k}",
            "least": [int(r) for r in order[:5]],  # where the two agree least
        }


def _shown(value: float | None) -> float | None:
    return None if value is None or not np.isfinite(value) else round(float(value), 4)
