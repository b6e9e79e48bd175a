"""Means of scores: over runs, and over queries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whence.errors import InvalidInput
from whence.scores.result import BY_LAYER, BY_SEGMENT, Scores


def ensemble(runs: Iterable[Scores]) -> Scores:
    """The mean over runs, with their standard deviation as `spread`; reads one run at a time."""
    last: Scores | None = None
    mean = squares = np.zeros(())
    parts: dict[str, NDArray[np.float64]] = {}
    count = 0
    messages: dict[str, None] = {}
    for count, scores in enumerate(runs, 1):
        values = np.asarray(scores.values[...], dtype=np.float64)
        deviation = values - mean
        mean = mean + deviation / count
        squares = squares + deviation * (values - mean)
        for name in (BY_SEGMENT, BY_LAYER):
            if (part := getattr(scores, name)) is not None:
                before = parts.get(name, np.zeros(()))
                parts[name] = before + (np.asarray(part, dtype=np.float64) - before) / count
        messages |= dict.fromkeys(scores.warnings)
        last = scores
    if last is None:
        raise InvalidInput("an ensemble needs the scores of at least one run")
    dtype = last.values.dtype
    return last.with_values(
        mean.astype(dtype),
        by_segment=parts[BY_SEGMENT].astype(dtype) if BY_SEGMENT in parts else None,
        by_layer=parts[BY_LAYER].astype(dtype) if BY_LAYER in parts else None,
        spread=np.sqrt(squares / max(1, count - 1)).astype(dtype),
        diagnostics=last.diagnostics
        | {"runs": count}
        | ({"warnings": list(messages)} if messages else {}),
    )


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
