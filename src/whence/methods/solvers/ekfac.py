"""An approximation of H block by block, inverted in its own eigenbasis.

(H + λ)⁻¹ v  ≈  Q (Λ + λ)⁻¹ Qᵀ v
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from whence.engine.workspace import Vectors, Workspace
from whence.methods.solvers.solver import Damping, Solver
from whence.methods.source import fitting_passes
from whence.operators import Basis, Curvature, FitData, bases_of, check_choices, inverse
from whence.operators.solve import solve


@dataclass(frozen=True)
class EKFAC(Solver):
    """EK-FAC, K-FAC or the diagonal."""

    defaults: ClassVar = {"damping": 1e-8, "curvature": "ekfac", "fisher": "sampled", "seed": 0}

    curvature: Curvature
    λ: Damping

    @classmethod
    def check(cls, **settings: Any) -> None:
        check_choices(settings["curvature"], settings["fisher"])

    @classmethod
    def passes(cls, total: int, **settings: Any) -> dict[str, int]:
        return fitting_passes(settings["curvature"], 1)

    @classmethod
    def prepare(
        cls, workspace: Workspace, parts: Sequence[FitData], λ: Damping, **settings: Any
    ) -> Self:
        return cls(fitted(workspace, **settings), λ)

    @property
    def bases(self) -> Mapping[str, Basis | None]:
        own = self.λ.matrices is not None
        return dict.fromkeys(self.curvature) if own else bases_of(self.curvature)

    def solve(self, v: Vectors) -> tuple[Vectors, dict[str, Any]]:
        H, λ, Δ = self.curvature, self.λ.numbers, self.λ.matrices
        if Δ is None:
            return v.apply(H, lambda name, σ: inverse(σ, λ[name]), last=True), {}
        # λP̄⁻¹ is diagonal in the parameters' own coordinates, and H is not
        solved = {
            name: solve(H[name], Δ[name], x, name) if self.λ.responds(name) else x.zero_()
            for name, x in v.values.items()
        }
        return Vectors(solved, v.bases), {}


def fitted(workspace: Workspace, curvature: str, fisher: str, seed: int, **_: Any) -> Curvature:
    """The curvature of all stages' data, pooled, at the final model."""
    fitter = workspace.fitter(workspace.study.stages, kind=curvature, fisher=fisher, seed=seed)
    return fitter.fit([workspace.run.final])
