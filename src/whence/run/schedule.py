"""When a training writes its checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from whence.errors import InvalidInput, warn, whole


@dataclass(frozen=True)
class CheckpointSchedule:
    """A number of checkpoints evenly spaced over `total_steps`, or their update counts."""

    checkpoints: int | tuple[int, ...]
    total_steps: int | None

    @classmethod
    def of(cls, checkpoints: int | Sequence[int], total_steps: int | None) -> CheckpointSchedule:
        if total_steps is not None and whole("total_steps", total_steps) < 1:
            raise InvalidInput(f"total_steps={total_steps}: use at least one update")
        if np.ndim(checkpoints):
            steps = tuple(whole("checkpoints", step) for step in np.asarray(checkpoints))
            if not steps or steps[0] < 1 or list(steps) != sorted(set(steps)):
                raise InvalidInput(f"checkpoints={list(steps)}: give increasing update counts")
            return cls(steps, total_steps)
        count = whole("checkpoints", checkpoints)
        if count < 1:
            raise InvalidInput(f"checkpoints={count}: use at least 1")
        if total_steps is None:
            raise InvalidInput(
                f"checkpoints={count} cannot be spaced evenly, because the number of updates is "
                "unknown: pass total_steps=len(loader) * epochs, or give the update counts as "
                "checkpoints=[...]"
            )
        if count > total_steps:
            raise InvalidInput(
                f"checkpoints={count}, but total_steps={total_steps}: "
                f"use checkpoints<={total_steps}"
            )
        return cls(count, total_steps)

    def starting_at(self, start: int) -> DueCheckpoints:
        """The checkpoints of a stage that starts after `start` updates."""
        end = start + self.total_steps if self.total_steps is not None else None
        if isinstance(self.checkpoints, tuple):
            return DueCheckpoints(frozenset(self.checkpoints), end)
        assert self.total_steps is not None
        count, total = self.checkpoints, self.total_steps
        steps = frozenset(start + round(total * (c + 1) / count) for c in range(count))
        return DueCheckpoints(steps, end)


@dataclass(frozen=True)
class DueCheckpoints:
    """Update counts of the scheduled checkpoints and of the planned end, over the whole run."""

    steps: frozenset[int] = frozenset()
    end: int | None = None

    def warn_if_missed(self, updates: int) -> None:
        """Warn when training ended at another update than planned."""
        missed = sorted(step for step in self.steps if step > updates)
        if self.end not in (None, updates):
            warn(
                f"training was planned to reach update {self.end} (total_steps), but reached "
                f"{updates}: the checkpoints are not spaced as planned",
                stacklevel=3,
            )
        elif missed:
            warn(
                f"training ended after {updates} updates: no checkpoints at {missed}", stacklevel=3
            )
