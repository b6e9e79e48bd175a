"""Stages and segments, and how checkpoints are divided into segments."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whence.errors import InvalidInput, whole
from whence.run.checkpoint import Checkpoint


@dataclass(frozen=True)
class Stage:
    """A part of training with its own dataset: updates start+1 … end, on `size` examples."""

    name: str
    start: int
    end: int
    size: int | None = None


@dataclass(frozen=True)
class Segment:
    """A part of one stage whose gradients and curvature are treated as stationary."""

    start: int
    end: int
    stage: Stage
    checkpoints: tuple[Checkpoint, ...]
    rates: Mapping[str, float] = field(default_factory=dict, repr=False)
    decays: Mapping[str, float] = field(default_factory=dict, repr=False)

    @property
    def steps(self) -> int:
        """K, the number of updates."""
        return self.end - self.start

    def rate(self, parameter: str) -> float:
        """η̄, the parameter's effective mean learning rate; 0 if no optimizer trained it."""
        return self.rates.get(parameter, 0.0)

    def weight_decay(self, parameter: str) -> float:
        """The parameter's weight decay, as given to its optimizer."""
        return self.decays.get(parameter, 0.0)


Assignment = list[tuple[Stage, tuple[Checkpoint, ...]]]  # the stage and checkpoints of each segment


def assign_checkpoints(
    checkpoints: Sequence[Checkpoint],
    stages: Sequence[Stage],
    spec: int | Sequence[int] | str,
) -> Assignment:
    """Divide a run's checkpoints into segments, none of which crosses a stage boundary.

    `spec` is one of:

    - an int L: equal parts in order (as `np.array_split`). If these would cross a boundary, each
      stage gets one segment. Each further segment goes to the stage furthest below its share
      L · (its checkpoints) / (all checkpoints), the earlier one on a tie. The checkpoints of a
      stage are then split equally.
    - a sequence of update counts at which segments end. The last is the run's end.
    - "stages": one segment per stage.
    """
    if not checkpoints:
        raise InvalidInput("the run has no checkpoint yet, so it cannot be divided into segments")
    by_stage = [(s, [c for c in checkpoints if c.stage == s.name]) for s in stages]
    by_stage = [(stage, points) for stage, points in by_stage if points]
    if isinstance(spec, str):
        if spec != "stages":
            raise InvalidInput(
                f"segments={spec!r}: use a number, a list of update counts, or 'stages'"
            )
        return [(stage, tuple(points)) for stage, points in by_stage]
    if isinstance(spec, bool) or (np.ndim(spec) == 0 and not hasattr(spec, "__index__")):
        raise InvalidInput(f"segments={spec!r}: use a number, a list of update counts, or 'stages'")
    if np.ndim(spec) == 0:
        counts = _segments_per_stage(
            [len(points) for _, points in by_stage], whole("segments", spec)
        )
        return [
            (stage, tuple(points[i] for i in chunk))
            for (stage, points), count in zip(by_stage, counts, strict=True)
            for chunk in np.array_split(np.arange(len(points)), count)
        ]
    return _ending_at(checkpoints, by_stage, [whole("segments", end) for end in spec])  # type: ignore[union-attr]


def _segments_per_stage(checkpoints: list[int], segments: int) -> list[int]:
    """The number of segments of each stage, given its number of checkpoints."""
    total, stages = sum(checkpoints), len(checkpoints)
    if segments < 1:
        raise InvalidInput(f"segments={segments}: use at least 1")
    if segments > total:
        raise InvalidInput(
            f"segments={segments}, but the run has only {total} checkpoint{'s' * (total > 1)}: "
            f"use segments<={total}, or record more checkpoints"
        )
    if segments < stages:
        raise InvalidInput(
            f"segments={segments}, but the run has {stages} stages and a segment never crosses a "
            f"stage boundary: use segments>={stages}, or 'stages'"
        )
    ends = np.cumsum([len(chunk) for chunk in np.array_split(np.arange(total), segments)])
    boundaries = np.cumsum(checkpoints)
    if np.isin(boundaries, ends).all():
        return np.diff(np.searchsorted(ends, boundaries) + 1, prepend=0).tolist()  # type: ignore[no-any-return]
    counts = [1] * stages
    for _ in range(segments - stages):
        # In exact integers: (L · checkpoints / total − count) · total.
        shortfall = [
            segments * n - total * count if count < n else -np.inf
            for n, count in zip(checkpoints, counts, strict=True)
        ]
        counts[int(np.argmax(shortfall))] += 1
    return counts


def _ending_at(
    checkpoints: Sequence[Checkpoint],
    by_stage: Sequence[tuple[Stage, list[Checkpoint]]],
    ends: list[int],
) -> Assignment:
    steps = [c.step for c in checkpoints]
    missing = [end for end in ends if end not in steps]
    if missing:
        raise InvalidInput(
            f"segments end at {missing}, where the run has no checkpoint: it has them at {steps}"
        )
    if any(b <= a for a, b in itertools.pairwise(ends)):
        raise InvalidInput(f"segments={ends}: update counts must increase")
    if not ends or ends[-1] != steps[-1]:
        raise InvalidInput(f"segments={ends}: the last must end with the run, at {steps[-1]}")
    crossed = [stage for stage, points in by_stage if points[-1].step not in ends]
    if crossed:
        stage = crossed[0]
        raise InvalidInput(
            f"segments={ends}: one crosses the end of stage {stage.name!r} at {stage.end}: "
            f"add {stage.end} to the list"
        )
    starts = [0, *ends[:-1]]
    return [
        (stage, inside)
        for start, end in zip(starts, ends, strict=True)
        for stage, points in by_stage
        if (inside := tuple(c for c in points if start < c.step <= end))
    ]


def effective_rates(
    optimizer: str,
    learning_rates: NDArray[np.float64],
    momentums: NDArray[np.float64],
    groups: Sequence[Sequence[str]],
    hyperparameters: Sequence[Mapping[str, Any]],
) -> dict[str, float]:
    """{parameter: η̄} over K updates, from learning_rates and momentums (K, G).

    SGD (with or without Nesterov) and RMSprop sum gradients in the momentum buffer, so each
    gradient is applied 1/(1−β) times, reduced by SGD's dampening. Adam's buffers are averages and
    do not change the rate.
    """
    rates: dict[str, float] = {}
    for column, names in enumerate(groups):
        lr, momentum = learning_rates[:, column], momentums[:, column]
        rate = float(lr.mean()) if len(lr) else 0.0
        # A group that made no step has zeros for both: leave those out of its mean momentum.
        stepping = (lr != 0) | (momentum != 0)
        beta = float(momentum[stepping].mean()) if stepping.any() else 0.0
        if optimizer in ("sgd", "rmsprop") and beta != 0:
            if beta >= 1:
                raise InvalidInput(
                    f"momentum {beta} of {names[:1]} is not below 1: the mean rate is undefined"
                )
            dampening = float(hyperparameters[column].get("dampening") or 0.0)
            rate *= (1 - dampening) / (1 - beta)
        for name in names:
            rates[name] = rates.get(name, 0.0) + rate
    return rates
