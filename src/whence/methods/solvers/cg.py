"""Conjugate gradients on the true Gauss-Newton matrix, preconditioned by EK-FAC.

    (H + λ) w = v          H = (1/N) Σ_n J_nᵀ ∇²ℓ_n J_n, of all tracked layers together

Nothing of H is approximated. What is left of the error is the residual r = v - (H + λ) w, and that
is reported, in the norm of the preconditioner M: √(rᵀM⁻¹r / vᵀM⁻¹v), about the error of w as scores
see it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from tqdm.auto import tqdm

from whence.data import cut
from whence.engine.workspace import Vectors, Workspace
from whence.methods.solvers.ekfac import EKFAC, fitted
from whence.methods.solvers.solver import Damping, Solver, check_count, gauss_newton
from whence.operators import Curvature, FitData, inverse
from whence.operators.gauss_newton import GaussNewton, Layout
from whence.operators.krylov import Product, conjugate_gradients

# Below this share of EK-FAC's largest eigenvalue the preconditioner is flat. EK-FAC finds the few
# large eigenvalues of H, but many of its small ones are not H's, and dividing by them costs
# iterations (to 1 % error on digits, three models: 25 to 37 instead of 50 to 80).
FLAT = 0.1
HELD = 8  # vectors of a query: right side, solution, residual, direction, and products on the way


@dataclass(frozen=True)
class ConjugateGradients(Solver):
    """Many queries at once, each with its own steps, until its residual is small enough."""

    defaults: ClassVar = {
        "damping": "source",
        "curvature": None,
        "fisher": None,
        "seed": 0,
        "iterations": 100,
        "tolerance": 1e-2,
        "examples": None,
    }

    H: GaussNewton
    λ: Tensor  # (p,)
    precondition: Product
    iterations: int
    tolerance: float
    at_once: int  # queries whose vectors fit into memory
    progress: bool

    @classmethod
    def check(cls, **settings: Any) -> None:
        EKFAC.check(**_of_ekfac(settings))
        check_count("iterations", settings["iterations"])
        if settings["examples"] is not None:
            check_count("examples", settings["examples"])
        tolerance = settings["tolerance"]
        if not isinstance(tolerance, (int, float)) or not 0 < tolerance < 1:
            raise ValueError(f"tolerance={tolerance!r} must be between 0 and 1")
        if settings["damping"] == 0:
            raise ValueError(
                "damping=0 leaves directions in which the Gauss-Newton matrix is 0, and conjugate "
                "gradients do not end: give a positive number, or 'source'"
            )

    @classmethod
    def passes(cls, total: int, **settings: Any) -> dict[str, int]:
        share = (settings["examples"] or total) / total
        products = max(1, round((settings["iterations"] + 1) * share))
        return EKFAC.passes(total, **_of_ekfac(settings)) | {"products": products}

    @classmethod
    def prepare(
        cls, workspace: Workspace, parts: Sequence[FitData], λ: Damping, **settings: Any
    ) -> Self:
        asked = (
            sum(len(p.indices) for p in parts) if workspace.query is None else len(workspace.query)
        )
        size = HELD * workspace.zero.element_size() * sum(b.size for b in workspace.blocks.values())
        at_once = max(1, min(asked, workspace.memory // 4 // size))
        H = gauss_newton(workspace, parts, λ, at_once, settings["examples"], settings["seed"])
        shift = λ.vector(H.layout, workspace.zero)
        if λ.matrices is None:
            precondition = _ekfac(H.layout, fitted(workspace, **_of_ekfac(settings)), λ)
        else:  # the optimizer's own preconditioner, which serves here too
            precondition = shift.reciprocal().mul
            for name in ("curvature", "fisher"):
                if settings[name] is not None:
                    raise ValueError(
                        f"{name}={settings[name]!r} is of the EK-FAC preconditioner, but with "
                        "damping='source' on a preconditioned optimizer λP̄⁻¹ is taken for that: "
                        f"leave {name} out, or give a number as damping"
                    )
        limits = settings["iterations"], settings["tolerance"]
        return cls(H, shift, precondition, *limits, at_once, workspace.final_passes.progress)

    def solve(self, v: Vectors) -> tuple[Vectors, dict[str, Any]]:
        w = self.H.layout.join(v.values)
        steps, residuals = [], []
        for rows in cut(len(w), self.at_once):
            here = slice(int(rows[0]), int(rows[-1]) + 1)
            bar = tqdm(
                total=self.iterations,
                desc="conjugate gradients",
                disable=not self.progress,
                leave=False,
            )

            def product(x: Tensor, bar: Any = bar) -> Tensor:
                bar.update()
                return (self.H @ x).addcmul_(self.λ, x)

            with bar:
                found = conjugate_gradients(
                    product, self.precondition, w[here], self.iterations, self.tolerance
                )
            w[here] = found.x
            steps.append(found.steps)
            residuals.append(found.residuals)
        left = torch.cat(residuals)
        values = self.H.layout.split(w)
        return Vectors(values, dict.fromkeys(values)), {
            "queries": len(left),
            "iterations": int(torch.cat(steps).max()),
            "residual": float(left.max()),
            # twice: the one that is followed on the way differs by rounding
            "unconverged": int((left > 2 * self.tolerance).sum()),
        }


def _of_ekfac(settings: dict[str, Any]) -> dict[str, Any]:
    """EK-FAC's own settings, where nothing else is said."""
    given = {name: settings[name] for name in ("curvature", "fisher", "seed")}
    return EKFAC.defaults | {name: value for name, value in given.items() if value is not None}


def _ekfac(layout: Layout, curvature: Curvature, λ: Damping) -> Product:
    """(H_EKFAC + λ)⁻¹, flattened."""
    flat = FLAT * max(float(curvature[name].eigenvalues.max()) for name in layout.blocks)

    def precondition(x: Tensor) -> Tensor:
        parts = layout.split(x)
        own = Vectors(parts, dict.fromkeys(parts))
        solved = own.apply(curvature, lambda name, σ: inverse(σ, flat + λ.numbers[name]))
        return layout.join(solved.own().values)

    return precondition
