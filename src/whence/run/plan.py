"""Where in a training checkpoints are due."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index

import numpy as np


@dataclass(frozen=True)
class Plan:
    """A number of checkpoints, evenly spaced over `total_steps`, or their update counts."""

    checkpoints: int | tuple[int, ...]
    total_steps: int | None

    @classmethod
    def of(cls, checkpoints: int | Sequence[int], total_steps: int | None) -> Plan:
        if total_steps is not None and index(total_steps) < 1:
            raise ValueError(f"total_steps={total_steps}: training makes at least one update")
        if np.ndim(checkpoints):
            steps = tuple(index(step) for step in np.asarray(checkpoints))
            if not steps or steps[0] < 1 or list(steps) != sorted(set(steps)):
                raise ValueError(f"checkpoints={list(steps)}: give increasing update counts")
            return cls(steps, total_steps)
        count = index(checkpoints)  # type: ignore[arg-type]
        if count < 1:
            raise ValueError(f"checkpoints={count}: keep at least 1")
        if total_steps is None:
            raise ValueError(
                f"checkpoints={count} are spaced over the training, whose length is unknown: pass "
                "total_steps=len(loader) * epochs, or the update counts as checkpoints=[...]"
            )
        if count > total_steps:
            raise ValueError(
                f"checkpoints={count}, but total_steps={total_steps}: "
                f"use checkpoints<={total_steps}"
            )
        return cls(count, total_steps)

    def starting(self, start: int) -> Due:
        """The plan for a stage that starts after `start` updates."""
        end = start + self.total_steps if self.total_steps is not None else None
        if isinstance(self.checkpoints, tuple):
            return Due(frozenset(self.checkpoints), end)
        assert self.total_steps is not None
        count, total = self.checkpoints, self.total_steps
        return Due(frozenset(start + round(total * (c + 1) / count) for c in range(count)), end)


@dataclass(frozen=True)
class Due:
    """Update counts, from the start of the run, of checkpoints to come and of the planned end."""

    steps: frozenset[int] = frozenset()
    end: int | None = None

    def check(self, updates: int) -> None:
        """Warn when training ended elsewhere than planned."""
        missed = sorted(step for step in self.steps if step > updates)
        if self.end not in (None, updates):
            warnings.warn(
                f"training was planned to reach update {self.end} (total_steps) and reached "
                f"{updates}: the checkpoints are not spread as they were meant to be",
                stacklevel=3,
            )
        elif missed:
            warnings.warn(
                f"training ended after {updates} updates: no checkpoints at {missed}", stacklevel=3
            )
