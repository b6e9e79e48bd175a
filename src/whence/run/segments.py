"""Stages, and how a run is cut into segments."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whence.run.checkpoint import Checkpoint


@dataclass(frozen=True)
class Stage:
    """A part of training with its own dataset: updates start+1 … end on `size` examples."""

    name: str
    start: int
    end: int
    size: int | None = None


@dataclass(frozen=True)
class Segment:
    """A stretch of one stage whose gradients and curvature are treated as stationary."""

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
        """η̄, the parameter's effective mean learning rate here; 0 when no optimizer had it."""
        return self.rates.get(parameter, 0.0)

    def weight_decay(self, parameter: str) -> float:
        """The parameter's weight decay here, as its optimizer was given it."""
        return self.decays.get(parameter, 0.0)


Dealt = list[tuple[Stage, tuple[Checkpoint, ...]]]


def deal(
    checkpoints: Sequence[Checkpoint],
    stages: Sequence[Stage],
    spec: int | Sequence[int] | str,
) -> Dealt:
    """Deal a run's checkpoints out into segments, none of which crosses a stage boundary.

    - an int L: equal parts in order (as `np.array_split`). Where these would cross a boundary, each
      stage gets one segment and the others go, one by one, to the stage furthest below its share
      L · (its checkpoints) / (all checkpoints), the earlier one on a tie; its checkpoints are then
      split equally.
    - a sequence of update counts: segments end there; the last is the run's end.
    - "stages": one segment per stage.
    """
    if not checkpoints:
        raise ValueError("the run has no checkpoint yet, so it cannot be cut into segments")
    parts = [(s, [c for c in checkpoints if c.stage == s.name]) for s in stages]
    parts = [(stage, held) for stage, held in parts if held]
    if isinstance(spec, str):
        if spec != "stages":
            raise ValueError(
                f"segments={spec!r}: use a number, a list of update counts, or 'stages'"
            )
        return [(stage, tuple(held)) for stage, held in parts]
    if isinstance(spec, bool) or (np.ndim(spec) == 0 and not hasattr(spec, "__index__")):
        raise ValueError(f"segments={spec!r}: use a number, a list of update counts, or 'stages'")
    if np.ndim(spec) == 0:
        counts = _share([len(held) for _, held in parts], index(spec))  # type: ignore[arg-type]
        return [
            (stage, tuple(held[i] for i in chunk))
            for (stage, held), count in zip(parts, counts, strict=True)
            for chunk in np.array_split(np.arange(len(held)), count)
        ]
    return _ending_at(checkpoints, parts, [index(end) for end in spec])  # type: ignore[union-attr]


def _share(held: list[int], segments: int) -> list[int]:
    """How many of the segments each stage gets, `held` being its number of checkpoints."""
    total, stages = sum(held), len(held)
    if segments < 1:
        raise ValueError(f"segments={segments}: use at least 1")
    if segments > total:
        raise ValueError(
            f"segments={segments}, but the run has only {total} checkpoint{'s' * (total > 1)}: "
            f"use segments<={total}, or record more checkpoints"
        )
    if segments < stages:
        raise ValueError(
            f"segments={segments}, but the run has {stages} stages and a segment never crosses a "
            f"stage boundary: use segments>={stages}, or 'stages'"
        )
    ends = np.cumsum([len(chunk) for chunk in np.array_split(np.arange(total), segments)])
    boundaries = np.cumsum(held)
    if np.isin(boundaries, ends).all():
        return np.diff(np.searchsorted(ends, boundaries) + 1, prepend=0).tolist()  # type: ignore[no-any-return]
    counts = [1] * stages
    for _ in range(segments - stages):
        # exact integers: L · held / total − count, times total
        short = [
            segments * h - total * c if c < h else -np.inf
            for h, c in zip(held, counts, strict=True)
        ]
        counts[int(np.argmax(short))] += 1
    return counts


def _ending_at(
    checkpoints: Sequence[Checkpoint],
    parts: Sequence[tuple[Stage, list[Checkpoint]]],
    ends: list[int],
) -> Dealt:
    steps = [c.step for c in checkpoints]
    missing = [end for end in ends if end not in steps]
    if missing:
        raise ValueError(
            f"segments end at {missing}, where the run has no checkpoint: it has {steps}"
        )
    if any(b <= a for a, b in itertools.pairwise(ends)):
        raise ValueError(f"segments={ends}: update counts must increase")
    if not ends or ends[-1] != steps[-1]:
        raise ValueError(f"segments={ends}: the last must end with the run, at {steps[-1]}")
    crossed = [stage for stage, held in parts if held[-1].step not in ends]
    if crossed:
        stage = crossed[0]
        raise ValueError(
            f"segments={ends}: one crosses the end of stage {stage.name!r} at {stage.end}: "
            f"add {stage.end} to the list"
        )
    starts = [0, *ends[:-1]]
    return [
        (stage, chosen)
        for start, end in zip(starts, ends, strict=True)
        for stage, held in parts
        if (chosen := tuple(c for c in held if start < c.step <= end))
    ]


def effective_rates(
    optimizer: str,
    learning_rates: NDArray[np.float64],
    momentums: NDArray[np.float64],
    groups: Sequence[Sequence[str]],
    hyperparameters: Sequence[Mapping[str, Any]],
) -> dict[str, float]:
    """{parameter: η̄} over some updates: learning_rates and momentums (K, G).

    Where a momentum buffer sums gradients (SGD, nesterov or not, and RMSprop) each gradient is
    applied 1/(1−β) times over, less SGD's dampening; Adam's buffers are averages, and add nothing.
    """
    rates: dict[str, float] = {}
    for column, names in enumerate(groups):
        lr, momentum = learning_rates[:, column], momentums[:, column]
        rate = float(lr.mean()) if len(lr) else 0.0
        # A group that was not stepping has zeros for both; they say nothing about its momentum.
        stepping = (lr != 0) | (momentum != 0)
        beta = float(momentum[stepping].mean()) if stepping.any() else 0.0
        if optimizer in ("sgd", "rmsprop") and beta != 0:
            if beta >= 1:
                raise ValueError(f"momentum {beta} of {names[:1]} is not below 1: no mean rate")
            dampening = float(hyperparameters[column].get("dampening") or 0.0)
            rate *= (1 - dampening) / (1 - beta)
        for name in names:
            rates[name] = rates.get(name, 0.0) + rate
    return rates
