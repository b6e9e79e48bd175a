"""What recorded batches show about a training, and how far a model is from its final weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whence.errors import InvalidInput
from whence.run.checkpoint import Checkpoint
from whence.run.format import RunData, Stage

CERTAIN_DEVIATIONS = 6.0  # standard deviations beyond which chance is no explanation
EPOCH_VARIANCE = 0.05  # variance of draws, relative to chance, below which they are of epochs
UNDRAWN_SHARE = 0.1  # share of examples never drawn that is worth a warning
RARE_CLIPPING = 0.1  # share of updates below which clipping needs no warning
MAX_DISTANCE = 0.5  # of the way from the initial to the final weights: trained with the run
MIN_COSINE = 0.9  # cosine of weights above which one model was made from the other


@dataclass(frozen=True)
class Draws:
    """How often a stage's recorded batches used each of the examples it may have used.

    Attributes:
        examples: (n,) indices.
        counts: (n,) how often each was drawn.
        halves: (2, n) the same of the first and of the second half of the updates.
        batch_size: the usual number of examples in a batch.
        shuffled: whether no example was drawn twice in the first epoch.
    """

    examples: NDArray[np.int64]
    counts: NDArray[np.int64]
    halves: NDArray[np.int64]
    batch_size: int
    shuffled: bool

    @classmethod
    def of(
        cls, run: RunData, stage: Stage, examples: NDArray[np.int64], total: int
    ) -> Draws | None:
        """The draws of a stage from a dataset of `total` examples; None if none are recorded."""
        batches = run.batches[stage.start : stage.end] if run.batches is not None else []
        if not any(map(len, batches)):
            return None
        drawn = np.concatenate(batches)
        if drawn.min() < 0 or drawn.max() >= total:
            worst = int(drawn.min() if drawn.min() < 0 else drawn.max())
            raise InvalidInput(
                f"the run's batches of stage {stage.name!r} used example {worst}, but the data has "
                f"{total}: give the whole dataset that was trained on, in the same order"
            )
        size = int(np.bincount([len(batch) for batch in batches]).argmax())
        epoch = len(np.unique(drawn))  # examples; drop_last leaves out less than a batch
        epoch = epoch // size * size or epoch
        shuffled = len(np.unique(drawn[:epoch])) == len(drawn[:epoch])
        middle = sum(map(len, batches[: len(batches) // 2]))
        parts = [np.bincount(part, minlength=total) for part in (drawn[:middle], drawn[middle:])]
        halves = np.stack(parts)[:, examples]
        return cls(examples, halves.sum(0), halves, size, shuffled)

    @property
    def never(self) -> NDArray[np.int64]:
        """The examples that were never drawn."""
        never: NDArray[np.int64] = self.examples[self.counts == 0]
        return never

    @property
    def left_out(self) -> bool:
        """Whether the examples that were never drawn cannot have been in the training set: chance
        would have drawn more of them."""
        n, epochs = len(self.counts), self.counts.sum() / len(self.counts)
        if epochs == 0:
            return False
        if self.shuffled:  # drop_last leaves out n mod B examples of every epoch
            dropped = n % self.batch_size
            missed = max(n - self.counts.sum(), n * (dropped / n) ** max(1, int(epochs)))
        else:  # drawn with replacement
            missed = n * math.exp(-epochs)
        return bool(len(self.never) > missed + CERTAIN_DEVIATIONS * math.sqrt(missed))

    @property
    def unequal(self) -> bool:
        """Whether the examples that were drawn were drawn more unequally than by chance."""
        return self._unequal(self.counts)

    @property
    def moved(self) -> bool:
        """Whether examples were drawn equally often, but not at the same time of training."""
        return not self.unequal and any(map(self._unequal, self.halves))

    def _unequal(self, counts: NDArray[np.int64]) -> bool:
        drawn = counts[self.counts > 0] if self.left_out else counts
        free, mean = len(drawn) - 1, max(float(drawn.mean()), 1e-12)
        squares = float(((drawn - mean) ** 2).sum() / mean)
        if squares > free + CERTAIN_DEVIATIONS * math.sqrt(2 * free):
            return True
        # Most examples may be drawn too equally for chance: in epochs, of which drop_last leaves
        # out n mod B examples. Then a few that are drawn more often stand out.
        trimmed = np.sort(drawn)[len(drawn) // 10 : len(drawn) - len(drawn) // 10]
        if float(trimmed.var()) > EPOCH_VARIANCE * mean:
            return False
        variance = max(float(trimmed.var()), mean * (len(drawn) % self.batch_size) / len(drawn))
        furthest = float(np.abs(drawn - np.median(drawn)).max())
        return furthest > 2 + CERTAIN_DEVIATIONS * math.sqrt(variance)

    def warnings(self, stage: str) -> list[str]:
        """Warnings of what scores do not take into account."""
        messages, n, never = [], len(self.counts), len(self.never)
        if self.left_out:
            messages.append(
                f"stage {stage!r}: {never:,} of {n:,} examples are in none of the recorded batches"
                f". Scores treat the other {n - never:,} as the training set, and estimate what "
                "adding these would have done. To confirm this, pass Recorder(subset=...)"
            )
        elif never > UNDRAWN_SHARE * n and self.shuffled:
            messages.append(
                f"stage {stage!r}: {never:,} of {n:,} examples are in none of the recorded batches"
                ", which end before the first epoch does. Scores treat them as training examples; "
                "if they were not, pass Recorder(subset=...)"
            )
        if self.unequal:
            drawn = self.counts[self.counts > 0] if self.left_out else self.counts
            messages.append(
                f"stage {stage!r}: examples were drawn {drawn.min():,} to {drawn.max():,} times "
                f"(mean {drawn.mean():.1f}), more unequally than by chance: a weighted sampler? "
                "Scores and curvature weigh every example by 1/N, as if all were drawn equally "
                "often. Write the weights into the losses of a Task, or expect scores to be off "
                "by the ratio of an example's draws to the mean"
            )
        if self.moved:
            messages.append(
                f"stage {stage!r}: the first and the second half of the updates drew different "
                "examples, more so than by chance: a curriculum? Scores assume that the data is "
                "the same throughout a stage. Call recorder.stage(...) where it changes"
            )
        return messages


def clipped_at_most(run: RunData, norm: float) -> float:
    """An upper bound on the share of updates whose gradient was clipped to a norm; 1 if unknown.

    AdamW's v̂ is a mean of squared gradients over about 1 / (1 - β₂) updates before a checkpoint.
    Each update that was clipped adds norm² to the sum of v̂, times its weight in the mean. Updates
    long before the next checkpoint are not seen.
    """
    moments = [c.moments for c in run.checkpoints if c.moments is not None]
    if set(run.optimizers.values()) != {"adamw"} or len(moments) < len(run.checkpoints):
        return 1.0
    squares = (sum(float(v.double().sum()) for v in file.open().values()) for file in moments)
    return min(1.0, max(squares) / norm**2)


def distance_from_final(
    parameters: Mapping[str, Tensor], final: Checkpoint, initial: Checkpoint | None
) -> tuple[float, float] | None:
    """How far a model is from the run's final weights, and how far the initial weights are.

    None if it has these weights, or is so far from them that it was neither trained with the run
    nor made from its final weights: then it is only an architecture.
    """
    weights = final.weights()
    names = [n for n, p in parameters.items() if n in weights and p.shape == weights[n].shape]
    if all(_equal(parameters[n], weights[n]) for n in names):
        return None
    if initial is None:
        sums = torch.zeros(2, dtype=torch.float64)
        for n in names:
            at, end = _numbers(parameters[n], weights[n])
            sums += _squares(at - end, end)
        away, moved = float(sums[0].sqrt()), float(sums[1].sqrt()) / 2
        return (away, moved) if away < MAX_DISTANCE * moved else None
    start = initial.weights()
    names = [n for n in names if n in start and start[n].shape == weights[n].shape]
    sums = torch.zeros(6, dtype=torch.float64)
    for n in names:
        at, end, begin = _numbers(parameters[n], weights[n], start[n])
        differences = at - end, begin - end, at - begin
        sums += torch.cat([_squares(*differences, at, end), (at @ end).cpu().view(1)])
    away, moved, from_start, norm, end_norm = sums[:5].sqrt().tolist()
    derived = away < from_start and float(sums[5]) > MIN_COSINE * norm * end_norm
    # some layers have the weights that training led to, to the bit, and only others do not
    derived |= any(
        _equal(parameters[n], weights[n]) and not _equal(start[n], weights[n]) for n in names
    )
    return (away, moved) if away < MAX_DISTANCE * moved or derived else None


def _numbers(*tensors: Tensor) -> list[Tensor]:
    """Flat and in float64, once, where the first is, if that is a GPU that can."""
    place = tensors[0].device if tensors[0].is_cuda else "cpu"
    return [tensor.detach().to(place).double().flatten() for tensor in tensors]


def _squares(*vectors: Tensor) -> Tensor:
    """‖x‖² of each."""
    return torch.stack([x @ x for x in vectors]).cpu()


def _equal(parameter: Tensor, weight: Tensor) -> bool:
    at, weight = parameter.detach(), weight.to(parameter.dtype)
    return torch.equal(at, weight.to(at.device))
