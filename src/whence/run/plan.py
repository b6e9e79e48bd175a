"""Where in a training checkpoints are due."""

from __future__ import annotations

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
        if isinstance(checkpoints, Sequence) or np.ndim(checkpoints):
            steps = tuple(index(step) for step in checkpoints)
            if not steps or steps[0] < 1 or list(steps) != sorted(set(steps)):
                raise ValueError(
                    f"checkpoints={list(steps)}: give increasing update counts, from 1"
                )
            return cls(steps, total_steps)
        count = index(checkpoints)
        if count < 1:
            raise ValueError(f"checkpoints={count}: keep at least 1")
        if total_steps is None:
            raise ValueError(
                f"checkpoints={count} are spaced over the training, whose length is not known: pass "
                "total_steps=len(loader) * epochs, or the update counts as checkpoints=[...]"
            )
        if count > total_steps:
            raise ValueError(
                f"checkpoints={count}, but total_steps={total_steps}: "
                f"use checkpoints<={total_steps}"
            )
        return cls(count, total_steps)

    def due(self, start: int) -> set[int]:
        """Update counts of the checkpoints, for a stage that starts after `start` updates."""
        if isinstance(self.checkpoints, tuple):
            return set(self.checkpoints)
        assert self.total_steps is not None
        count, total = self.checkpoints, self.total_steps
        return {start + round(total * (c + 1) / count) for c in range(count)}

    def end(self, start: int) -> int | None:
        """The update count at which training is meant to end."""
        return start + self.total_steps if self.total_steps is not None else None
