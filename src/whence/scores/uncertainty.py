"""The uncertainty of a predicted change, from the calibration stored with the scores.

Without k examples, the measurement of query q is predicted to change by Δ = −Σ values[q, m]. One
retraining measures Δ + error, where

    var(error) = (Δ · se / slope)²                 the slope's standard error
               + noise[q]²                         one training's own noise
               + unknown[q]² · k / (n α (1 − α))   errors of the scores, independent per example

The truth compares random subsets of α n examples. Each example is in such a subset with variance
α (1 − α), so n α (1 − α) is the number of removals that one subset is worth. With one seed in the
truth, noise and unknown cannot be separated: the last two terms become
residual[q]² · max(1, k / (n α (1 − α))), which is too wide for few examples.

The expected change, which is the mean over many retrainings, has no noise[q]². With one seed in the
truth, residual[q] stands for unknown[q], which is smaller.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


def half_widths(
    calibration: Mapping[str, Any], changes: ArrayLike, removed: int, *, expected: bool = False
) -> NDArray[np.float64]:
    """Half of the 95 % intervals (q,) around predicted ``changes`` (q,) without ``removed``
    examples.

    Args:
        calibration: ``diagnostics["calibration"]`` of the scores (q, n).
        changes: predicted changes of all queries.
        removed: k, the number of training examples that are left out.
        expected: of the expected change, rather than of what one retraining measures.
    """
    share = removed / calibration["removals"]
    residual = np.square(calibration["residual"])
    if calibration["noise"] is None:
        rest = residual * (share if expected else max(1.0, share))
    else:
        noise = np.square(calibration["noise"])
        rest = noise * (not expected) + np.maximum(residual - noise, 0.0) * share
    relative = calibration["standard_error"] / calibration["slope"]
    deviation = np.sqrt(np.square(np.asarray(changes, np.float64) * relative) + rest)
    return np.asarray(calibration["quantile"] * deviation)


def half_widths_of_scores(
    calibration: Mapping[str, Any] | None, row: int, values: ArrayLike
) -> NDArray[np.float64] | None:
    """Half of the 95 % intervals around scores of one query, as expected changes; None if the
    scores are not calibrated: their sizes mean nothing then, only their order.

    Args:
        row: of the query.
        values: scores of single examples.
    """
    if calibration is None:
        return None
    names = [name for name in ("residual", "noise") if calibration[name] is not None]
    of_query = {**calibration, **{name: calibration[name][row] for name in names}}
    return half_widths(of_query, values, 1, expected=True)


def calibrated(calibration: Mapping[str, Any]) -> str:
    """'on 20 subsets: real changes were 0.31 [0.25, 0.37] times the predicted ones, …'"""
    low, high = calibration["interval"]
    return (
        f"on {calibration['subsets']} subsets: real changes were {calibration['fitted']:.3g} "
        f"[{low:.3g}, {high:.3g}] times the predicted ones, and the scores are multiplied by "
        f"{calibration['slope']:.3g}"
    )
