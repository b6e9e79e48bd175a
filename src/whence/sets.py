"""Examples that are sets of rows: what a model sees in several rows of its batch belongs to one
example, and its loss is a weighted sum of theirs.

Draws of an augmentation, completions of a prompt with their advantages, the parts of a document in
packed rows, and the items of a list are such sets.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from whence.draws import Uniform, keys
from whence.errors import InvalidInput, InvalidType
from whence.task import Classification, Draws, Task


class RowSet(NamedTuple):
    """One example of several rows, or a batch of such examples.

    Attributes:
        rows: as the task's batches, with tensors (k, ...) of an example and (n, k, ...) of a batch.
        weights: of each row, (k,) or (n, k). A row with the weight 0 fills up a set.
    """

    rows: Any
    weights: Tensor


class Averaged(Task):
    """Another task, with examples that are sets of rows (`RowSet`).

    Losses and measurements are weighted sums of the rows' losses and measurements. With weights of
    1/k they are means. The curvature of a row with a negative weight is left out, so that it stays
    positive.

    Args:
        task: of single rows.
    """

    def __init__(self, task: Task) -> None:
        if not isinstance(task, Task):
            raise InvalidType(f"Averaged({task!r}): give a task, such as Classification()")
        self.task = task
        self.measurement, self.unit = task.measurement, task.unit
        self.higher_is_better = task.higher_is_better

    def rows(self, batch: Any) -> int:
        if not isinstance(batch, RowSet):
            raise InvalidType(
                f"Averaged needs examples that are sets of rows, not {type(batch).__name__}: make "
                "them with whence.RowSet, Augmented, group or unpacked"
            )
        return batch.weights.shape[1]

    def _flat(self, batch: RowSet) -> Any:
        """The rows of all examples, as a batch of the task."""
        count = self.rows(batch)
        return _flattened(batch.rows, count)

    def outputs(self, model: nn.Module, batch: Any) -> Tensor:
        """(n, k, ...)."""
        outputs = self.task.outputs(model, self._flat(batch))
        return outputs.reshape(-1, self.rows(batch), *outputs.shape[1:])

    def targets(self, batch: Any) -> Tensor:
        return self.task.targets(self._flat(batch))

    def mask(self, batch: Any) -> Tensor | None:
        return self.task.mask(self._flat(batch))

    def losses(self, outputs: Tensor, batch: Any) -> Tensor:
        return _summed(self.task.losses(outputs.flatten(0, 1), self._flat(batch)), batch.weights)

    def measurements(self, outputs: Tensor, batch: Any) -> Tensor:
        values = self.task.measurements(outputs.flatten(0, 1), self._flat(batch))
        return _summed(values, batch.weights)

    def pseudo_losses(self, outputs: Tensor, batch: Any, uniform: Draws) -> Tensor:
        rows = self.rows(batch)
        if isinstance(uniform, Uniform):
            uniform = uniform.rows(rows)
        elif isinstance(uniform, Tensor):
            uniform = uniform.reshape(len(outputs) * rows, -1)
        drawn = self.task.pseudo_losses(outputs.flatten(0, 1), self._flat(batch), uniform)
        return _summed(drawn, _roots(batch.weights))  # independent draws add their variances

    def output_factor(self, outputs: Tensor, batch: Any) -> Tensor:
        factor = self.task.output_factor(outputs.flatten(0, 1), self._flat(batch))
        (n, k), (_, c, r) = batch.weights.shape, factor.shape
        by_row = factor.view(n, k, c, r) * _roots(batch.weights)[..., None, None].to(factor)
        whole, rows = factor.new_zeros(n, k, c, k, r), torch.arange(k)
        whole[:, rows, :, rows] = by_row.transpose(0, 1)  # rows have no curvature between them
        return whole.view(n, k * c, k * r)


def _flattened(rows: Any, count: int) -> Any:
    """Tensors (n, k, ...) of a batch as (n k, ...)."""
    if isinstance(rows, Tensor):
        if rows.dim() < 2 or rows.shape[1] != count:
            raise InvalidInput(
                f"rows of shape {tuple(rows.shape)} for {count} weights: every tensor of a set "
                "must have its rows in front"
            )
        return rows.flatten(0, 1)
    if isinstance(rows, Mapping):
        return {name: _flattened(value, count) for name, value in rows.items()}
    parts = [_flattened(value, count) for value in rows]
    return type(rows)(*parts) if hasattr(rows, "_fields") else tuple(parts)


def _summed(values: Tensor, weights: Tensor) -> Tensor:
    """Numbers (n k,) of the rows as weighted sums (n,). A row of weight 0 may be anything."""
    by_row = values.view(weights.shape)
    return torch.where(weights == 0, 0.0, by_row * weights.to(values)).sum(1)


def _roots(weights: Tensor) -> Tensor:
    return weights.clamp_min(0).sqrt()


class Ranking(Classification):
    """The softmax loss of a list: which of its items is the relevant one.

    An example is k items, each a row of the model's batch, and the number of the relevant one. The
    model gives every item a score. The loss is the cross-entropy over the items of the list
    (ListNet); of two items, it is the logistic loss of their difference (RankNet, reward models).

    Batches are (items, target) or mappings, with items (n, k, ...) and targets (n,) or, for graded
    relevance, a probability for every item (n, k).

    Args:
        measurement: as in `Classification`: "margin" is the relevant score minus the log-sum-exp of
            the others.
    """

    def rows(self, batch: Any) -> int:
        return int(self._items(batch)[1])

    def outputs(self, model: nn.Module, batch: Any) -> Tensor:
        """A score for every item, (n, k)."""
        items, k = self._items(batch)
        flat = _flattened(items, k)
        scores = super().outputs(model, flat if isinstance(flat, Mapping) else (*flat, None))
        if scores.numel() != len(scores):
            raise InvalidInput(
                f"outputs of shape {tuple(scores.shape)}: Ranking needs one score for every item. "
                "Override outputs(model, batch)"
            )
        return scores.reshape(-1, k)

    def mask(self, batch: Any) -> Tensor | None:
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        return mask.flatten(0, 1) if isinstance(mask, Tensor) and mask.dim() == 3 else None

    def _items(self, batch: Any) -> tuple[Any, int]:
        """The batch without its targets, and the length of its lists."""
        if isinstance(batch, Mapping):
            targets = self.targets(batch)
            items: Any = {name: x for name, x in batch.items() if x is not targets}
            first = next(iter(items.values()))
        else:
            items, first = tuple(batch[:-1]), batch[0]
        if not isinstance(first, Tensor) or first.dim() < 2:
            raise InvalidInput("Ranking needs lists of items: tensors (n, k, ...)")
        return items, first.shape[1]


class Augmented:
    """A dataset of sets: each example in several draws of a random transform.

    With `Averaged`, losses are means over the draws: what training with that transform minimises.
    A draw depends on the seed and on the numbers of the example and of the draw only.

    Args:
        dataset: map-style.
        transform: example -> example. It may draw from torch, NumPy and `random`. None changes
            nothing.
        draws: rows of a set.
        seed: seed of the draws.
    """

    def __init__(
        self,
        dataset: Any,
        transform: Callable[[Any], Any] | None = None,
        draws: int = 8,
        seed: int = 0,
    ) -> None:
        if not isinstance(draws, int) or draws < 1:
            raise InvalidInput(f"draws={draws!r} must be a whole number of at least 1")
        self.dataset, self.transform, self.draws, self.seed = dataset, transform, draws, seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> RowSet:
        seeds = keys(self.seed, int(index), torch.arange(self.draws)).tolist()
        rows = []
        with _generators_restored():
            for seed in seeds:
                _seed(seed)
                example = self.dataset[index]
                rows.append(example if self.transform is None else self.transform(example))
        return RowSet(default_collate(rows), torch.ones(self.draws).double() / self.draws)


def _seed(seed: int) -> None:
    """Seed the generators of torch (on the CPU), NumPy and Python."""
    torch.default_generator.manual_seed(seed % 2**63)
    np.random.seed(seed % 2**32)
    random.seed(seed)


@contextmanager
def _generators_restored() -> Iterator[None]:
    before = torch.default_generator.get_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.default_generator.set_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])
