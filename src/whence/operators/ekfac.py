"""EK-FAC (George et al., 2018): K-FAC's eigenbases, eigenvalues measured in them.

Λ = mean of (Q_Sᵀ G_n Q_A)²          G_n: the whole gradient of example n       (Eq. 36)
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from whence.layers.passes import Weights
from whence.operators.factored import Factored
from whence.operators.fit import Fitter


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
        return moments | fitter.as_tensors(bases)
