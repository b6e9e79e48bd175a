"""Compare two scores: do they rank the training examples alike?

Both are converted to help (positive if it is better for the query), so that a loss and a margin can
be compared. Axes as in `whence.explore.scored_data`.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whence.evaluate.agreement import correlation, rank_correlation
from whence.explore.reading import Floats, Ints
from whence.explore.scored_data import Refused, ScoredData
from whence.present.views import number, strongest
from whence.scores.uncertainty import half_widths_of_scores

DOTS = 1500  # of a scatter plot, at most
OVERLAP_SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)  # k of the overlap curve


def tops(help_: Floats, k: int) -> Ints:
    """The places of the k most helpful examples that have a score."""
    known = np.flatnonzero(np.isfinite(help_))
    return np.asarray(known[strongest(help_[known], k)])


def overlap(a: Ints, b: Ints, k: int) -> float | None:
    """The share of the first k that two rankings have in common. None if one is shorter."""
    if min(len(a), len(b)) < k:
        return None
    return len(np.intersect1d(a[:k], b[:k], assume_unique=True)) / k


def ranked_entries(data: ScoredData, name: str) -> int:
    """The number of entries at either end of a query's ranking."""
    scores = data.of_queries(name)
    return int(scores.shape[-1]) if scores.strongest is None else scores.strongest.kept


def check_pair(data: ScoredData, a: str, b: str) -> None:
    for name in (a, b):
        data.of_queries(name)
    if not np.any((data.columns[a] >= 0) & (data.columns[b] >= 0)):
        raise Refused(f"{a} and {b} have no training example in common")


def compare_query(data: ScoredData, a: str, b: str, row: int, k: int = 10) -> dict[str, Any]:
    """One query's scores by two methods or runs.

    Returns:
        `spearman` and `pearson` over the `common` training examples (None, with `why`, where only
        the top was kept); `overlap` of the k most helpful and harmful; `curve`, the same by k;
        `dots` for a scatter plot; `lists`: the helpful and harmful entries of each, with the rank
        that the other one gives them.
    """
    check_pair(data, a, b)
    helps = {name: data.help(name, data.row(name, row)) for name in (a, b)}
    u, v = helps[a], helps[b]
    both = np.isfinite(u) & np.isfinite(v)
    cut = [name for name in (a, b) if data.scores(name).strongest is not None]
    k = max(1, min(k, ranked_entries(data, a), ranked_entries(data, b)))
    longest = min(ranked_entries(data, a), ranked_entries(data, b), OVERLAP_SIZES[-1])
    ends = {
        name: {
            "helpful": tops(h, max(longest, k)),
            "harmful": tops(-h, max(longest, k)),
        }
        for name, h in helps.items()
    }
    return {
        "row": row,
        "query": data.query_item(row),
        "k": k,
        "common": int(both.sum()),
        "spearman": None if cut else _rounded(rank_correlation(u, v)),
        "pearson": None if cut else _rounded(correlation(u[both], v[both])),
        "why": f"{' and '.join(cut)} kept only the top: the rest has no rank" if cut else None,
        "overlap": {end: overlap(ends[a][end], ends[b][end], k) for end in ("helpful", "harmful")},
        "curve": [
            [c, *(overlap(ends[a][end], ends[b][end], c) for end in ("helpful", "harmful"))]
            for c in OVERLAP_SIZES
            if c <= longest
        ],
        "dots": _dots(
            u, v, both, np.concatenate([end[:k] for pair in ends.values() for end in pair.values()])
        ),
        "lists": {
            name: {
                end: _list(data, name, row, ends[name][end][:k], ends[other][end], other)
                for end in ("helpful", "harmful")
            }
            for name, other in ((a, b), (b, a))
        },
    }


def _list(
    data: ScoredData, name: str, row: int, places: Ints, others: Ints, other: str
) -> list[dict[str, Any]]:
    values = data.values(name, row)
    calibration = data.scores(name).diagnostics.get("calibration")
    within = half_widths_of_scores(calibration, row, values[places])
    ranks = {int(p): r + 1 for r, p in enumerate(others)}
    return [
        {
            "column": int(p),
            "value": number(values[p]),
            "other": ranks.get(int(p)),  # None if it is further down, or missing
        }
        | ({} if within is None else {"within": number(within[k])})
        for k, p in enumerate(places)
    ]


def _dots(u: Floats, v: Floats, both: NDArray[np.bool_], always: Ints) -> list[list[float]]:
    """[place, a, b] of the top entries, and of every few of the rest."""
    places = np.flatnonzero(both)
    always = np.unique(always[both[always]])
    step = max(1, -(-len(places) // DOTS))
    chosen = np.union1d(always, places[::step])
    return [[int(p), float(u[p]), float(v[p])] for p in chosen]


class Overall:
    """Rank correlation and overlap of two scores over all queries, computed in steps: each
    ``advance`` does what it can in the given time."""

    def __init__(self, data: ScoredData, a: str, b: str, k: int) -> None:
        check_pair(data, a, b)
        self.data, self.a, self.b = data, a, b
        self.k = max(1, min(k, ranked_entries(data, a), ranked_entries(data, b)))
        count = data.of_queries(a).shape[0]
        self.results = np.full((3, count), np.nan)  # correlation, overlap helpful, overlap harmful
        self.done = 0
        self._ranked = all(data.scores(name).strongest is None for name in (a, b))
        self._guard = threading.Lock()

    def advance(self, seconds: float) -> dict[str, Any]:
        end = time.monotonic() + seconds
        with self._guard:
            while self.done < self.results.shape[1]:
                self._compare(self.done)
                self.done += 1
                if time.monotonic() > end:
                    break
            return self._summary()

    def _compare(self, row: int) -> None:
        u, v = (self.data.help(name, row) for name in (self.a, self.b))
        results = [
            rank_correlation(u, v) if self._ranked else None,
            overlap(tops(u, self.k), tops(v, self.k), self.k),
            overlap(tops(-u, self.k), tops(-v, self.k), self.k),
        ]
        self.results[:, row] = [np.nan if x is None else x for x in results]

    def _summary(self) -> dict[str, Any]:
        results = self.results[:, : self.done]
        means = [
            number(row[~np.isnan(row)].mean()) if (~np.isnan(row)).any() else None
            for row in results
        ]
        per_query = results[0] if self._ranked else results[1]
        order = np.argsort(results[0], kind="stable") if self._ranked else np.argsort(results[1])
        return {
            "k": self.k,
            "done": self.done,
            "of": self.results.shape[1],
            "spearman": means[0],
            "overlap": {"helpful": means[1], "harmful": means[2]},
            "per_query": [_rounded(x) for x in per_query],
            "what": "rank correlation" if self._ranked else f"overlap of the top {self.k}",
            "least": [int(r) for r in order[:5]],  # the queries with the least agreement
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None or not np.isfinite(value) else round(float(value), 4)
