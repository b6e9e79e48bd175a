"""Differences between models trained with an example and models trained without it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from whence.data import cut
from whence.errors import InvalidInput, warn
from whence.retrain.training import Training
from whence.table import listed

Floats = NDArray[np.float64]
NUMBERS_PER_BLOCK = 2**22  # in memory at a time


def differences(masks: NDArray[np.bool_], measured: Floats) -> tuple[Floats, Floats]:
    """Mean of `measured` (M, q) with, less without, each example of `masks` (M, n): (q, n).

    And its standard error s √(1/M_m + 1/(M - M_m)), s² the variance within both groups together.
    """
    subsets, examples = masks.shape
    shape = measured.shape[1], examples
    values, errors = np.empty(shape), np.empty(shape)
    centred = measured - measured.mean(0)
    total = np.square(centred).sum(0)[:, None]
    for columns in cut(examples, max(1, NUMBERS_PER_BLOCK // max(shape[0], subsets))):
        inside = masks[:, columns].astype(np.float64)
        k = inside.sum(0)
        with np.errstate(divide="ignore", invalid="ignore"):
            there, missing = centred.T @ inside / k, centred.T @ (1 - inside) / (subsets - k)
            within = total - k * there**2 - (subsets - k) * missing**2
            variance = np.maximum(within, 0.0) / (subsets - 2) if subsets > 2 else np.inf
            values[:, columns] = there - missing
            errors[:, columns] = np.sqrt(variance * (1 / k + 1 / (subsets - k)))
    return values, errors


def unknown_examples(masks: NDArray[np.bool_]) -> dict[str, list[int]]:
    """The examples that subsets (M, n) say nothing about, each with a warning."""
    counts, (subsets, examples) = masks.sum(0), masks.shape
    unknown = {
        "in_every_subset": np.flatnonzero(counts == subsets).tolist(),
        "in_no_subset": np.flatnonzero(counts == 0).tolist(),
    }
    if sum(map(len, unknown.values())) == examples:
        raise InvalidInput(
            f"each of the {examples} examples is in all of the {subsets} subsets, or in none: "
            "give a truth with more subsets"
        )
    for where, indices in unknown.items():
        if indices:
            warn(
                f"{len(indices)} of {examples} examples are {where.replace('_', ' ')} (of "
                f"{subsets}), so nothing is known about them: {listed(indices)}. They score 0; "
                "use a truth with more subsets",
                stacklevel=3,
            )
    return unknown


def without(example: int, count: int) -> NDArray[np.bool_]:
    """The mask (n,) of all examples but one."""
    mask = np.ones(count, dtype=bool)
    mask[example] = False
    return mask


def leave_one_out_trainings(
    seeds: Sequence[int], examples: NDArray[np.int64], count: int, stage: str
) -> list[Training]:
    """One training per seed on all `count` examples, then one per seed and example without it."""
    whole = [Training(seed) for seed in seeds]
    removed = examples.tolist()
    return whole + [Training(s, without(m, count), stage) for s in seeds for m in removed]


def leave_one_out_effects(measured: Floats, seeds: int, examples: int) -> Floats:
    """f(all data) - f(all but m), (seeds, q, examples), from `leave_one_out_trainings`."""
    whole, parts = measured[:seeds, None], measured[seeds:].reshape(seeds, examples, -1)
    return (whole - parts).swapaxes(1, 2)


def mean_of_sound(measurements: Floats, sound: NDArray[np.bool_]) -> Floats:
    """The mean (M, q) of measurements (M, seeds, q) over the seeds where `sound` (M, seeds)."""
    sums = np.where(sound[:, :, None], measurements, 0.0).sum(1)
    return np.asarray(sums / sound.sum(1)[:, None])


def standard_errors(effects: Floats, counted: NDArray[np.int64]) -> Floats:
    """Standard errors of the mean over seeds of effects (seeds, ..., examples); ∞ for one pair."""
    with warnings.catch_warnings():  # a single pair has no deviation
        warnings.simplefilter("ignore", RuntimeWarning)
        deviation = np.nanstd(effects, 0, ddof=1)
    return np.asarray(np.nan_to_num(deviation, nan=np.inf) / np.sqrt(counted))


def sound_pairs(
    sound: NDArray[np.bool_], examples: NDArray[np.int64], exclude_diverged: bool
) -> NDArray[np.int64]:
    """The number of seeds per example for which all of `sound` (seeds, q, examples) holds."""
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
        raise InvalidInput(
            f"all pairs of trainings for {len(none)} examples ({listed(none)}) diverged: use more "
            "seeds, or leave them out of examples="
        )
    return np.asarray(counted)
