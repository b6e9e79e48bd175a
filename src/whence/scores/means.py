"""Means of scores over queries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whence.scores.result import Scores


def mean_scores(scores: Scores, rows: Sequence[int] | None = None) -> NDArray[np.floating[Any]]:
    """(n,) the mean over the queries of their finite scores; the scores of self-influence.

    If only the strongest were kept, the others count as zero.

    Args:
        rows: which queries (default: all).
    """
    total, counted = np.zeros((2, scores.shape[-1]))
    chosen: Sequence[int | None] = range(scores.shape[0]) if rows is None else rows
    if scores.is_self_influence:
        chosen = [None]
    for row in chosen:
        values, columns = scores.row_scores(row)
        finite = np.isfinite(values)
        total[columns[finite]] += values[finite]
        counted[columns[finite]] += 1
    if scores.strongest is not None:
        counted[:] = len(chosen)
    with np.errstate(invalid="ignore"):
        return np.asarray(total / counted)
