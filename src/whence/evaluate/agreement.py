"""How well two lists of numbers agree: correlation, rank correlation, slope.

Unlike `whence.evaluate.lds.spearman`, which ranks many bootstrap resamples of a few subsets at
once, these functions compare two vectors of any length, in float64.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def mid_ranks(values: Floats) -> Floats:
    """0, 1, ... by size. Equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts + 1) / 2)[inverse])


def correlation(u: Floats, v: Floats) -> float | None:
    """Pearson's. None if one of the vectors is constant, or both have fewer than three entries."""
    if len(u) < 3:
        return None
    u, v = u - u.mean(), v - v.mean()
    # scaled first, because the squares of tiny scores underflow
    a, b = np.abs(u).max(), np.abs(v).max()
    if a == 0 or b == 0:
        return None
    u, v = u / a, v / b
    return float((u * v).sum() / np.sqrt((u * u).sum() * (v * v).sum()))


def rank_correlation(u: Floats, v: Floats) -> float | None:
    """Spearman's, over the entries that are finite in both."""
    both = np.isfinite(u) & np.isfinite(v)
    return correlation(mid_ranks(u[both]), mid_ranks(v[both])) if both.sum() > 2 else None


def agreement(predicted: Floats, actual: Floats) -> dict[str, float | None]:
    """How well predicted changes match actual ones, over the entries that are finite in both.

    Returns:
        `spearman`, `pearson`, and `slope`, the slope of the actual on the predicted change through
        zero, Σ P T / Σ P² as in `whence.evaluate.calibration`: 1 is perfect, a larger slope means
        that the scores understate the change.
    """
    both = np.isfinite(predicted) & np.isfinite(actual)
    p, t = predicted[both], actual[both]
    pp = float((p * p).sum())
    return {
        "spearman": rank_correlation(p, t),
        "pearson": correlation(p, t),
        "slope": float((p * t).sum()) / pp if pp > 0 else None,
    }
