"""The mean of several checkpoints, usable as one checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from whence.errors import InvalidInput
from whence.persist.identity import sha256_of
from whence.run.checkpoint import Checkpoint


@dataclass(frozen=True)
class Averaged:
    """Checkpoints whose floating-point tensors are averaged, including batch norm's statistics.

    Integers, such as counters, are those of the last checkpoint. The batch norm statistics are the
    mean of the checkpoints' statistics, not the statistics of the mean network. The two are close
    if the checkpoints are close, which averaging assumes anyway.
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
            different = sorted(n for n in names if _shape(first, n) != _shape(last, n))
            if different:
                steps = f"{self.checkpoints[0].step} and {checkpoint.step}"
                raise InvalidInput(
                    f"the checkpoints at steps {steps} have different architectures "
                    f"({', '.join(different[:3])}): they cannot be averaged"
                )
            for name, value in last.items():
                if value.is_floating_point():
                    share = value.double() / len(self.checkpoints)
                    totals[name] = totals[name] + share if name in totals else share
        return last | totals  # in float64: loading them casts to the model's precision


def _shape(weights: Mapping[str, Tensor], name: str) -> tuple[int, ...] | None:
    return tuple(weights[name].shape) if name in weights else None
