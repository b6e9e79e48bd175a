"""Eigenbases of whole gradients (Shampoo; Gupta et al., 2018), eigenvalues measured in them.

Where a layer acts on many positions, the gradient of an example is a sum over them, and the
covariances of single positions are the wrong eigenbasis for it. Here

    L = Σ_n G_n G_nᵀ / N          R = Σ_n G_nᵀ G_n / N          G_n: the whole gradient of example n

take the place of K-FAC's S and A. The eigenvalues are EK-FAC's in these bases.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from whence.layers.passes import Weights
from whence.operators.ekfac import EKFAC
from whence.operators.factored import Factored
from whence.operators.fit import Fitter


class Shampoo(Factored):
    """Eigenbases of whole gradients in every layer."""

    kind = "shampoo"
    passes = EKFAC.passes

    @classmethod
    def compute(
        cls, fitter: Fitter, checkpoints: Sequence[Weights], diagonal: bool
    ) -> dict[str, Tensor]:
        bases = fitter.eigenbases(checkpoints, whole=cls.whole_blocks(fitter))
        moments = fitter.second_moments(cls, checkpoints, bases, diagonal)
        return moments | fitter.as_tensors(bases)

    @classmethod
    def whole_blocks(cls, fitter: Fitter) -> list[str]:
        return [block.name for block in fitter.blocks]


class Automatic(Shampoo):
    """EK-FAC's bases where an example has one position in a layer, whole gradients' where it has
    more."""

    kind = "auto"

    @classmethod
    def whole_blocks(cls, fitter: Fitter) -> list[str]:
        return [block.name for block in fitter.blocks if fitter.positions[block.name] > 1]
