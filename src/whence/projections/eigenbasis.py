"""The leading coordinates in the eigenbasis of each layer's curvature (as LoGra, Choe et al. 2024).

Q_Sᵀ G Q_A is a gradient in the eigenbasis of A and S. The projection keeps the d entries, of all
layers together, in which the gradients' second moment (EK-FAC's eigenvalue) is largest. It has
orthonormal rows, so these entries are exact. Only the eigenvectors that they need are stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from whence.layers.capture import Outputs, whole_gradients
from whence.layers.kind import ParameterBlock
from whence.layers.rows import Rows
from whence.operators.factored import EigenFactors
from whence.operators.fit import accumulator
from whence.operators.operator import Basis
from whence.projections.gradients import Gradients


@dataclass(frozen=True)
class LeadingEntries:
    """The leading entries of one block: its eigenvectors as columns, and pairs of their indices."""

    basis: Basis  # outputs (o, R), or None: they are not mixed, and R = o; inputs (width, C)
    rows: Tensor  # (k,) in 0..R-1
    columns: Tensor  # (k,) in 0..C-1

    def of(self, gradients: Gradients) -> Tensor:
        """(n, k)"""
        return torch.cat([self._piece(a, s) for a, s in gradients.pieces])

    def _piece(self, a: Tensor, s: Outputs | None) -> Tensor:
        if self.basis.outputs is None:
            return self._of_rows(a, s)
        assert not isinstance(s, Rows)
        flat = self.rows * self.basis.inputs.shape[1] + self.columns
        if s is None:
            whole = self.basis.outputs.mT @ (a @ self.basis.inputs)
            return whole.flatten(1)[:, flat]
        a, s = self.basis.rotate_inputs(a), s @ self.basis.outputs
        if a.shape[1] == 1:
            return s[:, 0, self.rows] * a[:, 0, self.columns]
        return (s.mT @ a).flatten(1)[:, flat]

    def _of_rows(self, a: Tensor, s: Outputs | None) -> Tensor:
        """Where outputs are not mixed: from the rows that have entries."""
        chosen, rows = torch.unique(self.rows, return_inverse=True)
        if s is None:
            whole = a[:, chosen] @ self.basis.inputs
        else:
            a = self.basis.rotate_inputs(a)
            part = s.picked(chosen) if isinstance(s, Rows) else s[..., chosen]
            whole = whole_gradients(a, part, bias=False)
        return whole[:, rows, self.columns]


class Eigenbasis:
    """The projection onto the leading entries of some blocks' gradients."""

    preferred_batch = 1

    def __init__(self, entries: Mapping[str, LeadingEntries]) -> None:
        self.entries = dict(entries)

    @property
    def names(self) -> list[str]:
        """Of the blocks."""
        return list(self.entries)

    @property
    def dimension(self) -> int:
        return sum(len(block.rows) for block in self.entries.values())

    def project(self, gradients: Mapping[str, Gradients]) -> Tensor:
        """(n, d)"""
        n = max(map(len, gradients.values()))
        parts = [
            block.of(gradients[name])
            if name in gradients
            else block.basis.inputs.new_zeros(n, len(block.rows))
            for name, block in self.entries.items()
        ]
        coordinates = torch.cat(parts, 1)
        return coordinates.to(accumulator(coordinates.dtype))

    def per_coordinate(self, by_block: Mapping[str, float]) -> Tensor:
        """One number per coordinate, (d,), from one number per block."""
        counts = torch.tensor([len(block.rows) for block in self.entries.values()])
        values = torch.tensor([by_block[name] for name in self.entries], dtype=torch.float64)
        device = next(iter(self.entries.values())).rows.device
        return values.repeat_interleave(counts).to(device)


def leading(
    curvature: Mapping[str, EigenFactors], blocks: Sequence[ParameterBlock], dimension: int
) -> dict[str, LeadingEntries]:
    """The `dimension` entries with the largest eigenvalues over all blocks."""
    values = [curvature[block.name].eigenvalues.flatten() for block in blocks]
    order = torch.cat(values).sort(descending=True, stable=True).indices[:dimension]
    order = order.sort().values
    entries, start = {}, 0
    for block in blocks:
        inside = order[(order >= start) & (order < start + block.size)] - start
        start += block.size
        if not len(inside):
            continue
        factors, rows = curvature[block.name], inside // block.width
        basis = factors.basis or Basis(None, factors.eigenvalues.new_ones(1, 1))
        inputs, columns = torch.unique(inside % block.width, return_inverse=True)
        few = Basis(None, basis.inputs[:, inputs].contiguous())
        if basis.outputs is not None:
            outputs, rows = torch.unique(rows, return_inverse=True)
            few = Basis(basis.outputs[:, outputs].contiguous(), few.inputs)
        entries[block.name] = LeadingEntries(few, rows, columns)
    return entries
