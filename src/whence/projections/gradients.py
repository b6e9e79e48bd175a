"""Per-example gradients, gathered over several batches and then projected.

Every use of a random projection generates its signs again, block by block. Gathering enough
examples first makes that cost small. Gathered are the factors (a, s) of a layer, or the gradients
Σ_t s_t a_tᵀ themselves where these are smaller.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whence.data import Batches
from whence.layers.capture import LayerFactors, Outputs
from whence.layers.kind import ParameterBlock
from whence.layers.passes import Passes, Signal
from whence.layers.rows import Rows
from whence.operators.products import build

Piece = tuple[Tensor, Outputs | None]  # (a, s), or (whole gradients, None)


@dataclass
class Gradients:
    """One block's gradients of n examples: (a, s) of some, whole (n, o, width) of others.

    They are multiplied by `diagonal` (o, width), entry by entry.
    """

    block: ParameterBlock
    pieces: list[Piece] = field(default_factory=list)
    diagonal: Tensor | None = None

    def add(self, factors: LayerFactors) -> int:
        """Add a batch's gradients; returns the count of numbers that they take in memory."""
        n, t = factors.s.shape[:2]
        numbers = t * (self.block.i + (1 if self.block.lookup else self.block.o))
        if numbers <= self.block.size:
            self.pieces.append((factors.a, factors.s))
            return n * numbers
        self.pieces.append((build(factors.a, factors.s, None, self.block.bias), None))
        return n * self.block.size

    def __len__(self) -> int:
        return sum(len(a) for a, _ in self.pieces)

    def rows(self, first: int, last: int) -> Tensor:
        """Rows first..last-1 of every gradient, (n, last - first, width)."""
        like, i = self.pieces[0][0], self.block.i
        rows = like.new_empty(len(self), last - first, self.block.width)
        start = 0
        for a, s in self.pieces:
            out = rows[start : start + len(a)]
            start += len(a)
            if s is None:
                out.copy_(a[:, first:last])
                continue
            if isinstance(s, Rows):
                chosen = torch.arange(first, last, device=a.device)
                out.copy_(s.picked(chosen).outer(a)[:, :-1])
                continue
            part = s[:, :, first:last]
            if s.shape[1] == 1:
                torch.mul(part.mT, a, out=out[..., :i])
            else:
                out[..., :i] = torch.bmm(part.mT, a)
            if self.block.bias:
                out[..., i] = part.sum(1)
        return rows if self.diagonal is None else rows * self.diagonal[first:last].to(rows)

    def squared_norms(self) -> Tensor:
        """‖G_n‖², (n,)."""
        return self.rows(0, self.block.o).flatten(1).double().square().sum(1)


def gather(
    passes: Passes, data: Batches, indices: NDArray[np.int64], signal: Signal
) -> dict[str, Gradients]:
    """The gradients of a few examples, not projected."""
    gradients: dict[str, Gradients] = {}
    for backward_pass in passes.backward_passes(data, [indices], signal):
        for factors in backward_pass.factors():
            gradients.setdefault(factors.block.name, Gradients(factors.block)).add(factors)
    return gradients


class Projects(Protocol):
    """A projection of gathered gradients."""

    @property
    def preferred_batch(self) -> int:
        """The number of examples from which projecting them together is efficient."""
        ...

    def project(self, gradients: Mapping[str, Gradients]) -> Tensor:
        """(n, d)"""
        ...


@dataclass(frozen=True)
class Projected:
    """Some examples' projected gradients.

    `done` counts the batches finished so far; None inside a batch.
    """

    indices: NDArray[np.int64]
    rows: Tensor
    done: int | None


def projected(
    passes: Passes,
    data: Batches,
    batches: Sequence[NDArray[np.int64]],
    signal: Signal,
    projection: Projects,
    memory: int,
    label: str | None = None,
) -> Iterator[Projected]:
    """The gradients of these batches of examples, projected, in order.

    Args:
        signal: what is differentiated; the "exact" one gives several rows per example.
        memory: bytes for the gathered gradients.
    """
    gathered: dict[str, Gradients] = {}
    indices: list[NDArray[np.int64]] = []
    examples = numbers = done = 0
    for backward_pass in passes.backward_passes(data, batches, signal, label):
        for factors in backward_pass.factors():
            block = factors.block
            numbers += gathered.setdefault(block.name, Gradients(block)).add(factors)
        indices.append(backward_pass.indices)
        examples += len(backward_pass.indices)
        done += backward_pass.last
        full = examples >= projection.preferred_batch or numbers * passes.dtype.itemsize >= memory
        if full or (backward_pass.last and done == len(batches)):
            rows = projection.project(gathered)
            yield Projected(np.concatenate(indices), rows, done if backward_pass.last else None)
            gathered, indices, examples, numbers = {}, [], 0, 0
