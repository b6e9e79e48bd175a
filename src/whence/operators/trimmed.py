"""Products with Q Λ Qᵀ of one block, Q = Q_S ⊗ Q_A, without eigenvalues that are negligible.

An eigenvalue is about the product of one of each side, so that those that count lie below a
staircase: the leading vectors of one side meet nearly all of the other, the last ones only a few.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

STAIRS = 8


@dataclass(frozen=True)
class Stair:
    """Some vectors of the one side, with those of the other that they meet.

    Attributes:
        rows: which vectors, in the order of `Trimmed.first`.
        basis: the other side's, as columns, (i, k).
        eigenvalues: (rows, k).
    """

    rows: slice
    basis: Tensor
    eigenvalues: Tensor


@dataclass(frozen=True)
class Trimmed:
    """The block by its one side, as columns (o, r), and stairs of the other.

    `turned`: the one side are the inputs.
    """

    first: Tensor
    stairs: list[Stair]
    turned: bool

    @classmethod
    def of(cls, outputs: Tensor, inputs: Tensor, eigenvalues: Tensor, negligible: float) -> Trimmed:
        """By the side with which a product takes fewer operations."""
        ways = (
            cls._by(outputs, inputs, eigenvalues, negligible, False),
            cls._by(inputs, outputs, eigenvalues.mT, negligible, True),
        )
        return min(ways, key=lambda way: way.operations)

    @classmethod
    def _by(
        cls, first: Tensor, other: Tensor, eigenvalues: Tensor, negligible: float, turned: bool
    ) -> Trimmed:
        columns = eigenvalues.amax(0).argsort(descending=True, stable=True)
        places = torch.arange(1, len(columns) + 1, device=columns.device)
        reach = ((eigenvalues[:, columns] > negligible) * places).amax(1)  # the last that counts
        rows = reach.argsort(descending=True, stable=True)[: int((reach > 0).sum())]
        sizes, stairs, start = reach[rows].tolist(), [], 0
        for indices in rows.tensor_split(STAIRS):
            if len(indices):
                met = columns[: sizes[start]]
                stair = slice(start, start + len(indices))
                stairs.append(Stair(stair, other[:, met], eigenvalues[indices][:, met]))
                start = stair.stop
        return cls(first[:, rows], stairs, turned)

    @property
    def operations(self) -> int:
        """Of a product, up to a factor."""
        other = sum(stair.eigenvalues.numel() * len(stair.basis) for stair in self.stairs)
        width = len(self.stairs[0].basis) if self.stairs else 0
        return self.first.numel() * width + other

    def product(self, values: Tensor) -> Tensor:
        """(q, o, width), in the parameters' own coordinates."""
        rotated = self.first.mT @ (values.mT if self.turned else values)
        for stair in self.stairs:
            part = (rotated[:, stair.rows] @ stair.basis).mul_(stair.eigenvalues)
            rotated[:, stair.rows] = part @ stair.basis.mT
        product = self.first @ rotated
        return product.mT if self.turned else product
