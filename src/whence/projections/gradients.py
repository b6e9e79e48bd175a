"""Per-example gradients on their way into few dimensions: gathered, kept small, projected.

A random projection is made anew, block by block, whenever it is used; so examples are gathered
until making it costs little beside using it. What is held of a layer is (a, s), or the gradients
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
from whence.layers.capture import LayerFactors, ParameterBlock
from whence.layers.passes import Passes, Signal
from whence.operators.products import build

Piece = tuple[Tensor, Tensor | None]  # (a, s), or (whole gradients, None)


@dataclass
class Gradients:
    """One block's gradients of n examples: (a, s) of some, whole (n, o, width) of others."""

    block: ParameterBlock
    pieces: list[Piece] = field(default_factory=list)

    def add(self, pair: LayerFactors) -> int:
        """Take a batch's gradients; returns how many numbers that holds."""
        n, t = pair.s.shape[:2]
        if t * (self.block.i + self.block.o) <= self.block.size:
            self.pieces.append((pair.a, pair.s))
            return n * t * (self.block.i + self.block.o)
        self.pieces.append((build(pair.a, pair.s, None, self.block.bias), None))
        return n * self.block.size

    def __len__(self) -> int:
        return sum(len(a) for a, _ in self.pieces)

    def rows(self, first: int, last: int) -> Tensor:
        """Rows first..last-1 of every gradient, (n, last - first, width)."""
        like, i = self.pieces[0][0], self.block.i
        made = like.new_empty(len(self), last - first, self.block.width)
        start = 0
        for a, s in self.pieces:
            out = made[start : start + len(a)]
            start += len(a)
            if s is None:
                out.copy_(a[:, first:last])
                continue
            part = s[:, :, first:last]
            if s.shape[1] == 1:
                torch.mul(part.mT, a, out=out[..., :i])
            else:
                out[..., :i] = torch.bmm(part.mT, a)
            if self.block.bias:
                out[..., i] = part.sum(1)
        return made

    def squared_norms(self) -> Tensor:
        """‖G_n‖², (n,)."""
        return self.rows(0, self.block.o).flatten(1).double().square().sum(1)


def gather(
    passes: Passes, data: Batches, indices: NDArray[np.int64], signal: Signal
) -> dict[str, Gradients]:
    """The gradients of a few examples, as they are."""
    held: dict[str, Gradients] = {}
    for sweep in passes.backward_passes(data, [indices], signal):
        for pair in sweep.factors():
            held.setdefault(pair.block.name, Gradients(pair.block)).add(pair)
    return held


class Projects(Protocol):
    """What a projection must do here."""

    @property
    def gathers(self) -> int:
        """How many examples it wants at once, at least."""
        ...

    def project(self, gradients: Mapping[str, Gradients]) -> Tensor:
        """(n, d)"""
        ...


@dataclass(frozen=True)
class Projected:
    """Some examples' projected gradients.

    `done` is how many batches are finished with these; None when a batch is only begun.
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
        memory: bytes that gathered gradients may take.
    """
    held: dict[str, Gradients] = {}
    indices: list[NDArray[np.int64]] = []
    examples = numbers = done = 0
    for sweep in passes.backward_passes(data, batches, signal, label):
        for pair in sweep.factors():
            numbers += held.setdefault(pair.block.name, Gradients(pair.block)).add(pair)
        indices.append(sweep.indices)
        examples += len(sweep.indices)
        done += sweep.last
        full = examples >= projection.gathers or numbers * passes.dtype.itemsize >= memory
        if full or (sweep.last and done == len(batches)):
            rows = projection.project(held)
            yield Projected(np.concatenate(indices), rows, done if sweep.last else None)
            held, indices, examples, numbers = {}, [], 0, 0
