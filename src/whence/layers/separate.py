"""Whether examples affect each other: a loss or a gradient that depends on the rest of the batch.

Attribution needs examples that do not mix. Pooling over padding, a division by the batch's maximum,
in-batch negatives, and batch norm without running statistics mix them. Examples spread over the
data are compared alone and in pairs, among them the longest, shortest, largest and smallest; and
some examples of the first batch of every size alone and in that batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from whence.data import Batches, place, tensors_in
from whence.errors import InvalidInput, WhenceError, examples_of
from whence.layers.capture import LayerFactors, Tape
from whence.layers.kind import TrackedLayer
from whence.layers.rows import Rows
from whence.task import Task

CANDIDATES = 256  # examples among which the extreme ones are chosen
REDRAWS = 8  # of a pseudo-loss, where rounding may have changed which label was drawn
SKETCH_DIRECTIONS = 4  # random directions in which a layer's output gradients are compared
LOSS_TOLERANCE = {torch.float64: 1e-8, torch.float32: 2e-4}  # relative; else:
GRADIENT_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2}
ROUNDED_TOLERANCES = 3e-2, 0.3  # loss and gradient in bfloat16, or with TF32 products
REASONS = (
    "attribution needs examples that do not mix (batch norm without running statistics? pooling "
    "over padding? division by the batch's maximum? in-batch negatives? a collate function that "
    "changes examples? random augmentation?)"
)

Pair = tuple[int, int]
Indices = Sequence[int] | NDArray[np.int64]
Values = Callable[[Tensor, Any], Tensor]  # of a model's outputs (n, ...) and a batch


def pairs(data: Batches) -> list[Pair]:
    """Examples to compare alone and together: spread over the data, and extreme in size."""
    n, spread = len(data), candidates(data)
    size = len(spread) if data.sliceable else 1
    extents = [_extents(batch, size) for batch in looked_at(data, spread)]
    numbers, sizes = (np.concatenate(part).tolist() for part in zip(*extents, strict=True))
    order = sorted(range(len(spread)), key=lambda k: (numbers[k], sizes[k]))
    by_size = sorted(range(len(spread)), key=lambda k: sizes[k])
    short, long = spread[order[0]], spread[order[-1]]
    small, large = spread[by_size[0]], spread[by_size[-1]]
    middle = spread[len(spread) // 2]
    chosen = [(short, long), (small, large), (0, min(1, n - 1)), (0, long), (middle, large)]
    chosen.append((n - 1, short))
    distinct = {frozenset(pair): pair for pair in reversed(chosen) if pair[0] != pair[1]}
    return list(reversed(distinct.values()))


def candidates(data: Batches) -> list[int]:
    """Some examples, spread over the data; all if there are few."""
    n = len(data)
    spread: list[int] = np.linspace(0, n - 1, min(CANDIDATES, n)).round().astype(int).tolist()
    return spread


def looked_at(data: Batches, examples: Sequence[int]) -> Iterator[Any]:
    """Batches of these examples: one where that is faster, else one for each example."""
    for indices in [examples] if data.sliceable else [[k] for k in examples]:
        yield data.take(indices)


def _extents(batch: Any, count: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """How many numbers each of `count` examples has, and how large they are (integers: how many
    are not 0)."""
    numbers, sizes = np.zeros(count, np.int64), np.zeros(count)
    for tensor in tensors_in(batch):
        rows = tensor.detach().reshape(count, tensor.numel() // count)
        magnitude = rows.abs() if rows.is_floating_point() else rows != 0
        numbers += rows.shape[1]
        sizes += magnitude.sum(1, dtype=torch.float64).cpu().numpy()
    return numbers, sizes


@dataclass(frozen=True)
class Separation:
    """Compares examples of a dataset alone and in a batch."""

    model: nn.Module
    task: Task
    data: Batches
    device: torch.device
    dtype: torch.dtype
    rounded: bool = False  # whether products are less exact than the dtype

    def check_losses(self, chosen: Sequence[Pair]) -> None:
        """Refuse losses that depend on the rest of the batch."""
        alone = cache(lambda example: self._losses([example])[0])
        for pair in chosen:
            together = self._losses(pair)
            if together.shape == (len(pair),):  # else the task is refused when layers are found
                self.compare(pair, together, range(2), alone)

    def compare(
        self,
        indices: Indices,
        together: Tensor,
        places: Sequence[int],
        value: Callable[[int], Tensor],
        what: str = "loss",
        redrawn: Callable[[int], tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        """Compare values (n,) of a batch with those of some of its examples alone.

        Args:
            redrawn: of values that are drawn, the ones of an example in other draws: alone, and in
                the batch. Rounding may change a draw of one label among many, and so the value.
                Then the difference is still small beside that of two draws.
        """
        for k in places:
            a, b = self._alone(int(indices[k]), value), together[k]
            if bool(self.differ(a, b)):
                if redrawn is not None:
                    alone, beside = redrawn(k)
                    if (alone - beside).abs().median() < alone.std() / 2:
                        continue
                raise InvalidInput(
                    f"the {what} of {self.data.name} example {int(indices[k])} depends on the "
                    f"rest of its batch ({float(a):.6g} alone, {float(b):.6g} beside "
                    f"{_others(indices, k)}): {REASONS}"
                )

    def differ(self, a: Tensor, b: Tensor) -> Tensor:
        """Which values differ by more than rounding."""
        tolerance = (
            ROUNDED_TOLERANCES[0]
            if self.rounded
            else LOSS_TOLERANCE.get(self.dtype, ROUNDED_TOLERANCES[0])
        )
        return (a - b).abs() > tolerance * (1 + torch.maximum(a.abs(), b.abs()))

    def check_gradients(self, layers: Sequence[TrackedLayer], chosen: Sequence[Pair]) -> None:
        """Refuse gradients that depend on the rest of the batch, though losses do not."""
        for pair in chosen:
            _, together = self.gradients(layers, pair, self.task.losses)
            for k, example in enumerate(pair):
                _, alone = self.gradients(layers, [example], self.task.losses)
                self.compare_gradients(layers, pair, k, together[k], alone[0])

    def compare_gradients(
        self,
        layers: Sequence[TrackedLayer],
        indices: Indices,
        k: int,
        together: Tensor,
        alone: Tensor,
    ) -> None:
        """Compare the sketch (d,) of one example's gradient in a batch with that of it alone."""
        tolerance = GRADIENT_TOLERANCE.get(self.dtype, ROUNDED_TOLERANCES[1])
        tolerance = ROUNDED_TOLERANCES[1] if self.rounded else tolerance
        difference, size = float((together - alone).norm()), float(alone.norm())
        if difference <= tolerance * size:
            return
        # The gradient of a loss that is almost 0 is all rounding, of what this one is made of.
        _, scale = self.gradients(layers, [int(indices[k])], _mixed)
        if difference > tolerance * size + 256 * torch.finfo(self.dtype).eps * float(scale.norm()):
            raise InvalidInput(
                f"the gradient of {self.data.name} example {int(indices[k])} depends on the rest "
                f"of its batch (it changes by {difference / max(size, 1e-30):.1%} beside "
                f"{_others(indices, k)}): {REASONS}"
            )

    def _batch(self, indices: Sequence[int]) -> Any:
        return place(self.data.take(list(indices)), self.device, self.dtype)

    def _losses(self, indices: Sequence[int]) -> Tensor:
        batch = self._batch(indices)
        with torch.no_grad(), examples_of(self.data.name, indices):
            return self.task.losses(self.task.outputs(self.model, batch), batch)

    def _alone(self, index: int, value: Callable[[int], Tensor]) -> Tensor:
        try:
            with examples_of(self.data.name, [index]):
                return value(index)
        except InvalidInput as error:
            cause = error.__cause__  # of the user's code
            if cause is None or isinstance(cause, WhenceError):
                raise
            raise InvalidInput(
                f"the model cannot take one example alone ({cause}): {REASONS}"
            ) from cause

    def gradients(
        self, layers: Sequence[TrackedLayer], indices: Sequence[int], values: Values
    ) -> tuple[Tensor, Tensor]:
        """Values (n,) of examples, and the sketches (n, d) of their gradients."""
        batch = self._batch(indices)
        tape = Tape(self.model, layers, len(indices), self.task.rows(batch))
        with torch.enable_grad(), tape:
            of_examples = values(self.task.outputs(self.model, batch), batch)
            total = of_examples.sum()
        tape.check()
        factors = tape.backward(total, None, self.task.mask(batch), keep=False)
        parts = [sketch(part, seed) for seed, (_, blocks) in enumerate(factors) for part in blocks]
        return of_examples.detach(), torch.cat(parts, 1)


def sketch(factors: LayerFactors, seed: int, rows: Tensor | None = None) -> Tensor:
    """A sketch that shows a change of a layer's output gradients: of some rows (all if None), in a
    few random directions, their sum and their norm over positions, (rows, 2 SKETCH_DIRECTIONS).
    Padding, which has no gradient, does not count, nor does the order of positions."""
    sides, s = [factors.slopes], factors.s
    if isinstance(s, Rows) and s.dense is not None:  # a table that is a matrix too
        sides = [s.split(factors.a)[0], s.dense]
    parts = []
    for side in sides:
        slopes = side if rows is None else side[rows]
        wide, width = torch.promote_types(slopes.dtype, torch.float32), slopes.shape[-1]
        seen = slopes.to(wide) @ _directions(width, seed, slopes.device, wide) / width**0.5
        parts += [seen.sum(1), torch.linalg.vector_norm(seen, dim=1)]
    return torch.cat(parts, 1).double()


@lru_cache(1024)  # most layers are compared several times; every copy makes a GPU wait
def _directions(width: int, seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    random = torch.randn(width, SKETCH_DIRECTIONS, generator=torch.Generator().manual_seed(seed))
    return random.to(device, dtype)


def _mixed(outputs: Tensor, _: Any) -> Tensor:
    """A random combination of each example's outputs, (n,)."""
    mixture = torch.randn(outputs.shape[1:], generator=torch.Generator().manual_seed(0))
    mixed: Tensor = (outputs * mixture.to(outputs)).reshape(len(outputs), -1).sum(1)
    return mixed


def _others(indices: Indices, k: int) -> str:
    others = [int(index) for i, index in enumerate(indices) if i != k]
    return f"example {others[0]}" if len(others) == 1 else f"{len(others)} others"
