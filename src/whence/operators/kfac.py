"""K-FAC (Martens & Grosse, 2015): A ⊗ S, the covariances of inputs and of output gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from whence.layers.passes import Weights
from whence.operators.factored import Factored
from whence.operators.fit import Fitter
from whence.operators.operator import named


class KFAC(Factored):
    """Eigenvalues are products λ_S λ_A of the covariances' eigenvalues."""

    kind = "kfac"
    squared = False
    passes = ("covariances",)

    @classmethod
    def compute(
        cls, fitter: Fitter, checkpoints: Sequence[Weights], diagonal: bool
    ) -> dict[str, Tensor]:
        bases, eigenvalues = fitter.eigenbases(checkpoints)
        factors = named(bases)
        for name, (Λ_S, Λ_A) in eigenvalues.items():
            factors[f"{name}/eigenvalues"] = torch.outer(Λ_S.clamp_min(0), Λ_A.clamp_min(0))
        if diagonal:
            factors |= fitter.second_moments(cls.kind, checkpoints, None, diagonal)
        return factors
