"""The mean of several checkpoints, as one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from whence.persist.identity import sha256_of
from whence.run.checkpoint import Checkpoint


@dataclass(frozen=True)
class Averaged:
    """Checkpoints whose floating tensors are averaged, batch norm's running statistics too.

    What cannot be averaged (counters and other integers) is the last checkpoint's. The statistics
    are means of statistics, not those of the mean network; they are close where the checkpoints
    are, which is what averaging supposes.
    """

    checkpoints: tuple[Checkpoint, ...]

    @property
    def step(self) -> int:
        return self.checkpoints[-1].step

    @property
    def stage(self) -> str:
        return self.checkpoints[-1].stage

    @cached_property
    def sha256(self) -> str:
        names = "mean of " + " ".join(c.sha256 for c in self.checkpoints)
        return sha256_of(names)

    def weights(self) -> dict[str, Tensor]:
        totals: dict[str, Tensor] = {}
        first: dict[str, Tensor] | None = None
        for checkpoint in self.checkpoints:
            last = checkpoint.weights()
            first = last if first is None else first
            names = first.keys() | last.keys()
            other = sorted(name for name in names if _shape(first, name) != _shape(last, name))
            if other:
                steps = f"{self.checkpoints[0].step} and {checkpoint.step}"
                raise ValueError(
                    f"the checkpoints at steps {steps} are of another architecture than each other "
                    f"({', '.join(other[:3])}): they cannot be averaged"
                )
            for name, value in last.items():
                if value.is_floating_point():
                    share = value.double() / len(self.checkpoints)
                    totals[name] = totals[name] + share if name in totals else share
        return last | totals  # in float64: the model's own precision is kept when they are loaded


def _shape(weights: Mapping[str, Tensor], name: str) -> tuple[int, ...] | None:
    return tuple(weights[name].shape) if name in weights else None
