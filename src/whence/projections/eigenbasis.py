"""The leading coordinates in the eigenbasis of each layer's curvature (as LoGra, Choe et al. 2024).

Q_Sᵀ G Q_A holds a gradient in the eigenbasis of A and S; kept are the d entries, of all layers
together, in which the gradients' second moment (EK-FAC's eigenvalue) is largest. The map has
orthonormal rows: what it keeps it keeps exactly. Only the few eigenvectors that occur are held.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from whence.layers.capture import ParameterBlock
from whence.operators.factored import EigenFactors
from whence.operators.fit import accumulator
from whence.operators.space import Basis
from whence.projections.gradients import Gradients


@dataclass(frozen=True)
class Kept:
    """The kept entries of one block: eigenvectors as columns, and which pairs of them."""

    basis: Basis  # outputs (o, R), inputs (width, C)
    rows: Tensor  # (k,) in 0..R-1
    columns: Tensor  # (k,) in 0..C-1

    def of(self, gradients: Gradients) -> Tensor:
        """(n, k)"""
        return torch.cat([self._piece(a, s) for a, s in gradients.pieces])

    def _piece(self, a: Tensor, s: Tensor | None) -> Tensor:
        flat = self.rows * self.basis.inputs.shape[1] + self.columns
        if s is None:
            whole = self.basis.outputs.mT @ (a @ self.basis.inputs)
            return whole.flatten(1)[:, flat]
        a, s = self.basis.rotate_inputs(a), s @ self.basis.outputs
        if a.shape[1] == 1:
            return s[:, 0, self.rows] * a[:, 0, self.columns]
        return (s.mT @ a).flatten(1)[:, flat]


class Eigenbasis:
    """The projection onto kept entries of some blocks' gradients."""

    gathers = 1

    def __init__(self, kept: Mapping[str, Kept]) -> None:
        self.kept = dict(kept)

    @property
    def dimension(self) -> int:
        return sum(len(kept.rows) for kept in self.kept.values())

    def project(self, gradients: Mapping[str, Gradients]) -> Tensor:
        """(n, d)"""
        n = max(map(len, gradients.values()))
        parts = [
            kept.of(gradients[name])
            if name in gradients
            else kept.basis.outputs.new_zeros(n, len(kept.rows))
            for name, kept in self.kept.items()
        ]
        found = torch.cat(parts, 1)
        return found.to(accumulator(found.dtype))

    def per_coordinate(self, by_block: Mapping[str, float]) -> Tensor:
        """A number per block as one per coordinate, (d,)."""
        counts = torch.tensor([len(kept.rows) for kept in self.kept.values()])
        values = torch.tensor([by_block[name] for name in self.kept], dtype=torch.float64)
        device = next(iter(self.kept.values())).rows.device
        return values.repeat_interleave(counts).to(device)


def leading(
    curvature: Mapping[str, EigenFactors], blocks: Sequence[ParameterBlock], dimension: int
) -> dict[str, Kept]:
    """The `dimension` entries with the largest eigenvalues over all blocks."""
    values = [curvature[block.name].eigenvalues.flatten() for block in blocks]
    order = torch.cat(values).sort(descending=True, stable=True).indices[:dimension]
    order = order.sort().values
    kept, start = {}, 0
    for block in blocks:
        mine = order[(order >= start) & (order < start + block.size)] - start
        start += block.size
        basis = curvature[block.name].basis
        if len(mine) and basis is not None:
            outputs, rows = torch.unique(mine // block.width, return_inverse=True)
            inputs, columns = torch.unique(mine % block.width, return_inverse=True)
            few = Basis(
                basis.outputs[:, outputs].contiguous(), basis.inputs[:, inputs].contiguous()
            )
            kept[block.name] = Kept(few, rows, columns)
    return kept
