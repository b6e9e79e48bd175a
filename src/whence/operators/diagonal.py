"""The diagonal of the Gauss-Newton matrix, and the identity."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from whence.layers.passes import Weights
from whence.operators.factored import Factored
from whence.operators.fit import Fitter


class Diagonal(Factored):
    """Second moments of each parameter's gradient."""

    kind = "diagonal"
    passes = ("eigenvalues",)

    @classmethod
    def compute(
        cls, fitter: Fitter, checkpoints: Sequence[Weights], diagonal: bool
    ) -> dict[str, Tensor]:
        moments = fitter.second_moments(cls.kind, checkpoints, None, True)
        return {name.replace("/diagonal", "/eigenvalues"): x for name, x in moments.items()}


class Identity(Factored):
    """No curvature measured at all: every eigenvalue is 1."""

    kind = "identity"
    squared = False

    @classmethod
    def compute(
        cls, fitter: Fitter, checkpoints: Sequence[Weights], diagonal: bool
    ) -> dict[str, Tensor]:
        return {f"{b.name}/eigenvalues": torch.ones(b.shape) for b in fitter.blocks}
