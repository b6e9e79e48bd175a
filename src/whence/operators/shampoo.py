"""Eigenbases of whole gradients (Shampoo; Gupta et al., 2018), eigenvalues measured in them.

Where a layer acts on many positions, the gradient of an example is a sum over them, and the
covariances of single positions are the wrong eigenbasis for it. Here

    L = Σ_n G_n G_nᵀ / N          R = Σ_n G_nᵀ G_n / N          G_n: the whole gradient of example n

take the place of K-FAC's S and A. The eigenvalues are EK-FAC's in these bases.
"""

from __future__ import annotations

from collections.abc import Mapping

from whence.operators.ekfac import EKFAC


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
