"""What models trained with an example have over models trained without it."""

from __future__ import annotations

import warnings

import numpy as np
from numpy.typing import NDArray

from whence.errors import InvalidInput

Floats = NDArray[np.float64]


def differences(masks: NDArray[np.bool_], measured: Floats) -> tuple[Floats, Floats]:
    """Mean of `measured` (M, q) with, less without, each example of `masks` (M, n): (q, n).

    And its standard error s √(1/M_m + 1/(M - M_m)), s² the variance within both groups together.
    """
    inside = masks.astype(np.float64)
    subsets = len(masks)
    centred = measured - measured.mean(0)
    k = inside.sum(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        there, missing = centred.T @ inside / k, centred.T @ (1 - inside) / (subsets - k)
        total = np.square(centred).sum(0)[:, None]
        within = total - k * there**2 - (subsets - k) * missing**2
        variance = np.maximum(within, 0.0) / (subsets - 2) if subsets > 2 else np.inf
        return there - missing, np.sqrt(variance * (1 / k + 1 / (subsets - k)))


def without(example: int, count: int) -> NDArray[np.bool_]:
    """The mask (n,) of all examples but one."""
    mask = np.ones(count, dtype=bool)
    mask[example] = False
    return mask


def standard_errors(effects: Floats, counted: NDArray[np.int64]) -> Floats:
    """Of the mean over seeds, from effects (seeds, ..., examples); infinite for a single pair."""
    with warnings.catch_warnings():  # nothing is known from the one pair that is left
        warnings.simplefilter("ignore", RuntimeWarning)
        deviation = np.nanstd(effects, 0, ddof=1)
    return np.asarray(np.nan_to_num(deviation, nan=np.inf) / np.sqrt(counted))


def sound_pairs(
    sound: NDArray[np.bool_], examples: NDArray[np.int64], exclude_diverged: bool
) -> NDArray[np.int64]:
    """How many seeds count for each example: those whose measurements (seeds, q, examples) are."""
    sound = np.asarray(sound.all(1))
    lost = int((~sound).sum())
    if lost and not exclude_diverged:
        raise InvalidInput(
            f"{lost} of {sound.size} pairs of trainings have one that diverged: leave them out "
            "with exclude_diverged=True"
        )
    counted = sound.sum(0)
    if not counted.all():
        none = examples[counted == 0]
        listed = ", ".join(map(str, none[:5])) + (", ..." if len(none) > 5 else "")
        raise InvalidInput(
            f"no pair of trainings is left of {len(none)} examples ({listed}), all diverged: use "
            "more seeds, or leave them out of examples="
        )
    return np.asarray(counted)
