"""The mean of several checkpoints, usable as one checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from whence.errors import InvalidInput
from whence.persist.identity import sha256_of
from whence.run.checkpoint import Checkpoint


@dataclass(frozen=True)
class MeanCheckpoint:
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
        return dict(self.opened())

    def opened(self) -> Mapping[str, Tensor]:
        return _Mean(self.checkpoints)


class _Mean(Mapping[str, Tensor]):
    """The means of tensors, each computed when it is asked for."""

    def __init__(self, checkpoints: Sequence[Checkpoint]) -> None:
        self._checkpoints = checkpoints
        self._opened = [c.opened() for c in checkpoints]
        for checkpoint, weights in zip(checkpoints, self._opened, strict=True):
            different = sorted(set(weights) ^ set(self._opened[0]))
            if different:
                raise self._refusal(checkpoint, different)

    def __getitem__(self, name: str) -> Tensor:
        values = [weights[name] for weights in self._opened]
        for checkpoint, value in zip(self._checkpoints, values, strict=True):
            if value.shape != values[0].shape:
                raise self._refusal(checkpoint, [name])
        if not values[-1].is_floating_point():
            return values[-1]
        mean = values[0].double() / len(values)
        for value in values[1:]:
            mean = mean + value.double() / len(values)
        return mean  # in float64: loading it casts to the model's precision

    def __contains__(self, name: object) -> bool:
        return name in self._opened[-1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._opened[-1])

    def __len__(self) -> int:
        return len(self._opened[-1])

    def _refusal(self, checkpoint: Checkpoint, names: Sequence[str]) -> InvalidInput:
        return InvalidInput(
            f"the checkpoints at steps {self._checkpoints[0].step} and {checkpoint.step} have "
            f"different architectures ({', '.join(names[:3])}): they cannot be averaged"
        )
