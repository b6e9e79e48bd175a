"""EK-FAC (George et al., 2018): eigenvalues measured in eigenbases that are given.

    Λ = mean of (Q_Sᵀ G_n Q_A)²          G_n: the whole gradient of example n       (Eq. 36)

The bases are K-FAC's. Where a layer acts on many positions, the gradient of an example is a sum
over them, and the covariances of single positions are the wrong eigenbasis for it. There, Shampoo
(Gupta et al., 2018) takes the eigenbases of

    L = Σ_n G_n G_nᵀ / N          R = Σ_n G_nᵀ G_n / N

instead of K-FAC's S and A.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from whence.layers.passes import Weights
from whence.operators.factored import Factored
from whence.operators.fit import Fitter
from whence.operators.operator import named


class EKFAC(Factored):
    """Eigenbases of the inputs' and the output gradients' covariances."""

    kind = "ekfac"
    passes = ("covariances", "eigenvalues")

    @classmethod
    def compute(
        cls, fitter: Fitter, checkpoints: Sequence[Weights], diagonal: bool
    ) -> dict[str, Tensor]:
        positions = {block.name: fitter.positions[block.name] for block in fitter.blocks}
        bases, _ = fitter.eigenbases(checkpoints, cls.whole_blocks(positions))
        moments = fitter.second_moments(cls.kind, checkpoints, bases, diagonal)
        return moments | named(bases)


class Shampoo(EKFAC):
    """Eigenbases of whole gradients in every layer."""

    kind = "shampoo"

    @classmethod
    def whole_blocks(cls, positions: Mapping[str, int]) -> list[str]:
        return list(positions)


class Automatic(Shampoo):
    """EK-FAC's bases where an example has one position in a layer, whole gradients' where it has
    more."""

    kind = "auto"

    @classmethod
    def whole_blocks(cls, positions: Mapping[str, int]) -> list[str]:
        return [name for name, t in positions.items() if t > 1]
