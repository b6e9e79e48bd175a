"""Arnoldi iteration (Schioppa et al., 2022): the inverse on the leading eigenvectors only.

    (H + λ)⁻¹ v  ≈  Uᵀ (Σ + U λ Uᵀ)⁻¹ U v          U (r, p): the r leading eigenvectors of H

H is the true Gauss-Newton matrix of all tracked layers together. What v has outside of their span
counts as 0, as published. H is symmetric, so the iteration is that of Lanczos.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from tqdm.auto import tqdm

from whence.engine.workspace import Vectors, Workspace
from whence.methods.solvers.solver import Damping, Solver, check_count, gauss_newton
from whence.operators import FitData, key_of
from whence.operators.gauss_newton import GaussNewton, Layout
from whence.operators.krylov import Lanczos

ROUGH = 0.1  # ‖H u - σ u‖ / σ above which an eigenvector is only roughly known


@dataclass(frozen=True)
class Arnoldi(Solver):
    """Eigenvectors (r, p), and the damped matrix in their span (r, r)."""

    defaults: ClassVar = {
        "damping": 1e-8,
        "seed": 0,
        "rank": 100,
        "iterations": 200,
        "examples": None,
    }

    layout: Layout
    vectors: Tensor
    damped: Tensor

    @classmethod
    def check(cls, **settings: Any) -> None:
        for name in ("rank", "iterations", "examples"):
            if settings[name] is not None:
                check_count(name, settings[name])
        if settings["rank"] > settings["iterations"]:
            raise ValueError(
                f"rank={settings['rank']} is more than iterations={settings['iterations']}: each "
                "iteration finds one more eigenvector. Use two iterations for each that is kept"
            )

    @classmethod
    def passes(cls, total: int, **settings: Any) -> dict[str, int]:
        share = (settings["examples"] or total) / total
        return {"steps": max(1, round(settings["iterations"] * share))}

    @classmethod
    def prepare(
        cls, workspace: Workspace, parts: Sequence[FitData], λ: Damping, **settings: Any
    ) -> Self:
        H = gauss_newton(workspace, parts, λ, 1, settings["examples"], settings["seed"])
        found = _eigenpairs(workspace, H, **settings)
        values, U = found["values"], found["vectors"].to(workspace.zero)
        residuals = found["residuals"] / values
        workspace.diagnostics["solver"] = {
            "iterations": int(found["steps"]),
            "eigenvalues": values.tolist(),
            "residuals": residuals.tolist(),
        }
        rough = int((residuals > ROUGH).sum())
        if rough:
            warnings.warn(
                f"{rough} of the {len(values)} leading eigenvectors are only roughly known after "
                f"{int(found['steps'])} iterations: raise iterations, or lower rank to "
                f"{len(values) - rough}",
                stacklevel=2,
            )
        damped = torch.diag(values.to(U)) + (U * λ.vector(H.layout, U)) @ U.mT
        return cls(H.layout, U, damped)

    def solve(self, v: Vectors) -> tuple[Vectors, dict[str, Any]]:
        inside = self.layout.join(v.values) @ self.vectors.mT  # U v, (q, r)
        w = torch.linalg.solve(self.damped, inside.mT).mT @ self.vectors
        values = self.layout.split(w)
        return Vectors(values, dict.fromkeys(values)), {}


def _eigenpairs(
    workspace: Workspace, H: GaussNewton, rank: int, iterations: int, seed: int, **_: Any
) -> dict[str, Tensor]:
    """The leading "values" (r,) and "vectors" (r, p) of H, their "residuals" (r,), and "steps".

    Kept with the run's factors; a killed iteration goes on from its last snapshot.
    """
    p, store, one = H.layout.size, workspace.study.store(workspace.run), workspace.zero
    iterations = min(iterations, p)
    settings = {
        "what": "leading eigenpairs",
        "identity": [dict(part.identity) for part in H.parts],
        "chosen": [key_of({"indices": part.indices.tolist()}) for part in H.parts],
        "weights": H.checkpoints[0].sha256,
        "layers": list(H.layout.blocks),
        "dtype": workspace.final_passes.arithmetic,
        "seed": seed,
        "rank": rank,
        "iterations": iterations,
    }
    key = key_of(settings)
    found = store.get(key)
    if found is not None:
        return found
    needed = (iterations + 1) * p * one.element_size()
    if needed > workspace.memory // 2:
        raise ValueError(
            f"iterations={iterations}: so many vectors of {p:,} parameters take "
            f"{needed / 2**20:,.0f} MiB, and {workspace.memory / 2**21:,.0f} are allowed (half of "
            "memory=): lower iterations, raise memory, or track fewer layers"
        )
    start = torch.randn(p, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    lanczos = Lanczos(start.to(one), iterations)
    left = store.snapshot(key)
    if left is not None:
        lanczos.restore(*left)
    bar = tqdm(
        total=iterations,
        initial=lanczos.done,
        desc="Arnoldi iterations",
        disable=not workspace.final_passes.progress,
        leave=False,
    )
    with workspace.final_passes.clock("iterations"), bar:
        while not lanczos.finished:
            lanczos.step(H.__matmul__)
            store.offer_snapshot(key, *lanczos.state())
            bar.update()
    values, vectors, residuals = lanczos.leading(rank)
    found = {"values": values, "vectors": vectors, "residuals": residuals}
    found["steps"] = torch.tensor(lanczos.done)
    store.put(key, found, settings)
    return found
