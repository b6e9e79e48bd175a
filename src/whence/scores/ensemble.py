"""Several runs' scores as one."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from whence.errors import InvalidInput
from whence.scores.result import Scores


def ensemble(runs: Iterable[Scores]) -> Scores:
    """The mean over runs, with their standard deviation as `spread`; reads one run at a time."""
    last: Scores | None = None
    mean = squares = segments = np.zeros(())
    count = 0
    messages: dict[str, None] = {}
    for count, scores in enumerate(runs, 1):
        values = np.asarray(scores.values[...], dtype=np.float64)
        deviation = values - mean
        mean = mean + deviation / count
        squares = squares + deviation * (values - mean)
        if scores.by_segment is not None:
            share = np.asarray(scores.by_segment, dtype=np.float64)
            segments = segments + (share - segments) / count
        messages |= dict.fromkeys(scores.warnings)
        last = scores
    if last is None:
        raise InvalidInput("an ensemble needs the scores of at least one run")
    dtype = last.values.dtype
    return last.with_values(
        mean.astype(dtype),
        by_segment=segments.astype(dtype) if segments.ndim else None,
        spread=np.sqrt(squares / max(1, count - 1)).astype(dtype),
        diagnostics=last.diagnostics
        | {"runs": count}
        | ({"warnings": list(messages)} if messages else {}),
    )
