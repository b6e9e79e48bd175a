"""What a run's files show about its training: examples it never drew, weights it did not record."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whence.errors import InvalidInput
from whence.run.checkpoint import Checkpoint
from whence.run.format import RunData
from whence.run.segments import Stage

SURE = 6.0  # standard deviations beyond which chance is no explanation
MANY = 0.1  # share of examples never drawn that is worth a warning
NEARER = 0.5  # of the way from the initial to the final weights: trained with the run


@dataclass(frozen=True)
class Draws:
    """How often a stage's recorded batches used each of the examples it may have used.

    Attributes:
        examples: (n,) indices.
        counts: (n,) how often each was drawn.
        batch_size: the usual number of examples in a batch.
        shuffled: whether no example was drawn twice in the first epoch.
    """

    examples: NDArray[np.int64]
    counts: NDArray[np.int64]
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
        return cls(examples, np.bincount(drawn, minlength=total)[examples], size, shuffled)

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
        return bool(len(self.never) > missed + SURE * math.sqrt(missed))

    @property
    def unequal(self) -> bool:
        """Whether the examples that were drawn were drawn more unequally than by chance."""
        drawn = self.counts[self.counts > 0] if self.left_out else self.counts
        free = len(drawn) - 1
        squares = float(((drawn - drawn.mean()) ** 2).sum() / drawn.mean())
        return squares > free + SURE * math.sqrt(2 * free)

    def warnings(self, stage: str) -> list[str]:
        """What scores do not take into account."""
        messages, n, never = [], len(self.counts), len(self.never)
        if self.left_out:
            messages.append(
                f"stage {stage!r}: {never:,} of {n:,} examples are in none of the recorded batches"
                f". Scores take the other {n - never:,} for the training set. Pass "
                "Recorder(subset=...) to say so"
            )
        elif never > MANY * n and self.shuffled:
            messages.append(
                f"stage {stage!r}: {never:,} of {n:,} examples are in none of the recorded batches"
                ", which end before the first epoch does. Scores take them for training examples; "
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
        return messages


def changed_untrained(run: RunData, stage: Stage, parameters: Iterable[str]) -> list[str]:
    """Parameters that differ between a stage's checkpoints, though its optimizer has none of them
    or gave them the rate 0."""
    rates = run.learning_rates[stage.start : stage.end]
    trained = {
        name
        for column in run.columns[stage.name]
        if rates[:, column].any()
        for name in run.groups[column]
    }
    others = [name for name in parameters if name not in trained]
    checkpoints = [c for c in run.checkpoints if c.stage == stage.name]
    if stage.start == 0 and run.initial is not None:
        checkpoints.insert(0, run.initial)
    if not others or len(checkpoints) < 2:
        return []
    first, last = checkpoints[0].weights(), checkpoints[-1].weights()
    return [
        name
        for name in others
        if name in first and name in last and not torch.equal(first[name], last[name])
    ]


def distance_from_final(
    parameters: Mapping[str, Tensor], final: Checkpoint, initial: Checkpoint | None
) -> tuple[float, float] | None:
    """How far a model is from the run's final weights, and how far the initial weights are.

    None if it has these weights, or is so far from them that it was not trained with the run: then
    it is only an architecture.
    """
    weights = final.weights()
    names = [n for n, p in parameters.items() if n in weights and p.shape == weights[n].shape]
    if all(_equal(parameters[n], weights[n]) for n in names):
        return None
    start = initial.weights() if initial is not None else {}

    def distance(others: Mapping[str, Tensor]) -> float:
        squares = [
            float((others[n].detach().double().cpu() - weights[n].double()).square().sum())
            for n in names
            if n in others and others[n].shape == weights[n].shape
        ]
        return math.sqrt(sum(squares))

    away, moved = distance(parameters), distance(start)
    if not start:
        moved = math.sqrt(sum(float(weights[n].double().square().sum()) for n in names)) / 2
    return (away, moved) if away < NEARER * moved else None


def _equal(parameter: Tensor, weight: Tensor) -> bool:
    return torch.equal(parameter.detach().cpu(), weight.to(parameter.dtype))
