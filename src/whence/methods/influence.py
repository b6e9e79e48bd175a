"""Influence functions (Koh & Liang, 2017) with the EK-FAC curvature of Grosse et al. (2023).

    values[q, m] = -(1/N) ∇f(q, θ_T)ᵀ (H + λ)⁻¹ ∇L(m, θ_T)                                   (Eq. 6)

The sign is that of f(with m) - f(without m).
"""

from __future__ import annotations

from numbers import Real
from typing import Any

import numpy as np

from whence.curvature import Curvature, check_choices, inverse
from whence.data import Batches
from whence.methods.bench import Bench, Readouts, Term
from whence.methods.gradient import GradientMethod
from whence.methods.source import _fitting_passes, block_durations


class Influence(GradientMethod):
    """The response of the optimum to the weight of an example, at the final model.

    Args:
        damping: λ (default 1e-8, as in the paper), or "source" for λ = 1/(η̄K): then it is close to
            SOURCE with one segment.
        curvature, fisher, stage, seed: as in `Source`.
    """

    def __init__(
        self,
        damping: float | str = 1e-8,
        curvature: str = "ekfac",
        fisher: str = "sampled",
        stage: str | None = None,
        seed: int = 0,
    ) -> None:
        check_choices(curvature, fisher)
        if damping != "source" and not (isinstance(damping, Real) and damping >= 0):
            raise ValueError(
                f"damping={damping!r} must be zero or positive, or 'source' for λ = 1/(η̄K)"
            )
        self.damping, self.curvature, self.fisher, self.stage, self.seed = (
            damping,
            curvature,
            fisher,
            stage,
            seed,
        )

    def terms(self, bench: Bench) -> list[Term]:
        return [Term(bench.run.final.stage, [bench.run.final])]

    def prepare(self, bench: Bench, terms: list[Term]) -> tuple[Curvature, dict[str, float], int]:
        stage = terms[0].stage
        fitter = bench.fitter(stage, kind=self.curvature, fisher=self.fisher, seed=self.seed)
        if isinstance(self.damping, str):
            (whole,) = bench.run.segments(1)
            durations = block_durations(bench, whole)
            damping = {name: 1 / d if d else float("inf") for name, d in durations.items()}
        else:
            damping = dict.fromkeys(bench.blocks, float(self.damping))
        trained = bench.rates(bench.run.peak_rate)
        if not any(trained.values()):
            raise ValueError(
                "the run's learning rates are 0 for every tracked layer: nothing was trained, so "
                "nothing can be attributed. Give the rates that were really applied"
            )
        # a frozen layer does not respond to the data: infinitely damped
        damping = {name: λ if trained[name] else float("inf") for name, λ in damping.items()}
        bench.diagnostics["damping"] = {
            "least": min(damping.values()),
            "most": max(damping.values()),
        }
        return fitter.fit(terms[0].checkpoints), damping, len(bench.study.used(bench.run, stage))

    def passes_needed(self, bench: Bench) -> dict[str, int]:
        return {"scores": 1} | _fitting_passes(self.curvature, 1)

    def vectors(
        self,
        bench: Bench,
        prepared: Any,
        data: Batches,
        stage: str,
        indices: np.ndarray,
        examples: int,
    ) -> list[Readouts]:
        H, λ, N = prepared
        bases = {name: block.basis for name, block in H.items()}
        v = bench.gradients(data, stage, indices, bench.run.final, bases)
        w = v.apply(H, lambda name, σ: inverse(σ, λ[name]), last=True)
        return [bench.readouts(w, -1.0 / N, examples)]
