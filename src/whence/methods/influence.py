"""Influence functions (Koh & Liang, 2017) with the EK-FAC curvature of Grosse et al. (2023).

    values[q, m] = -(1/N) ∇f(q, θ_T)ᵀ (H + λ)⁻¹ ∇L(m, θ_T)                                   (Eq. 6)

On a run of several stages their data is pooled, as in the paper: influence functions cannot tell
stages apart. The sign is that of f(with m) - f(without m).
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

import numpy as np
from torch import Tensor

from whence.curvature import Curvature, check_choices, inverse
from whence.curvature.solve import solve
from whence.data import Batches
from whence.methods.bench import Bench, Readouts, Term, Vectors
from whence.methods.gradient import GradientMethod
from whence.methods.source import (
    PRECONDITIONED,
    block_durations,
    fitting_passes,
    known_optimizer,
    preconditioner,
)


@dataclass(frozen=True)
class Prepared:
    """H, its damping per block (λ, or λP̄⁻¹ as a matrix), and N."""

    curvature: Curvature
    damping: dict[str, float]
    shifts: dict[str, Tensor] | None
    examples: int


class Influence(GradientMethod):
    """The response of the optimum to the weight of an example, at the final model.

    Args:
        damping: λ (default 1e-8, as in the paper), or "source" for λ = 1/(η̄K), and λP̄⁻¹ for a
            preconditioned optimizer (appendix C): then it is close to SOURCE with one segment.
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
        return [Term(stage, [bench.run.final]) for stage in bench.study.stages]

    def prepare(self, bench: Bench, terms: list[Term]) -> Prepared:
        fitter = bench.fitter(
            bench.study.stages, kind=self.curvature, fisher=self.fisher, seed=self.seed
        )
        trained = bench.rates(bench.run.peak_rate)
        if not any(trained.values()):
            raise ValueError(
                "the run's learning rates are 0 for every tracked layer: nothing was trained, so "
                "nothing can be attributed. Give the rates that were really applied"
            )
        if isinstance(self.damping, str):
            damping, shifts = self._from_source(bench)
        else:
            damping, shifts = dict.fromkeys(bench.blocks, float(self.damping)), None
        # a frozen layer does not respond to the data: infinitely damped
        λ = {name: x if trained[name] else float("inf") for name, x in damping.items()}
        bench.diagnostics["damping"] = {"least": min(λ.values()), "most": max(λ.values())}
        return Prepared(fitter.fit(terms[0].checkpoints), λ, shifts, fitter.examples)

    @staticmethod
    def _from_source(bench: Bench) -> tuple[dict[str, float], dict[str, Tensor] | None]:
        """λ = 1/(η̄K) over the whole run; and λP̄⁻¹ when the optimizer was preconditioned."""
        segments = bench.run.segments("stages")
        total = dict.fromkeys(bench.blocks, 0.0)
        for segment in segments:
            for name, duration in block_durations(bench, segment).items():
                total[name] += duration
        λ = {name: 1 / x if x else float("inf") for name, x in total.items()}
        adaptive = {known_optimizer(bench, s) in PRECONDITIONED for s in segments}
        if adaptive == {True, False}:
            raise ValueError(
                "damping='source' needs one kind of optimizer: this run had a preconditioned one "
                "in some stages and SGD in others. Give a number"
            )
        if adaptive == {False}:
            return λ, None
        return λ, {name: λ[name] / P for name, P in preconditioner(bench, *segments).items()}

    def passes_needed(self, bench: Bench) -> dict[str, int]:
        return {"scores": 1} | fitting_passes(self.curvature, 1)

    def vectors(
        self,
        bench: Bench,
        prepared: Prepared,
        data: Batches,
        stage: str,
        indices: np.ndarray,
        examples: int,
    ) -> list[Readouts]:
        H, λ, Δ = prepared.curvature, prepared.damping, prepared.shifts
        bases = {name: None if Δ else block.basis for name, block in H.items()}
        v = bench.gradients(data, stage, indices, bench.run.final, bases)
        if Δ:
            solved = {
                name: solve(H[name], Δ[name], value, name)
                if np.isfinite(λ[name])
                else value.zero_()
                for name, value in v.values.items()
            }
            w = Vectors(solved, v.bases)
        else:
            w = v.apply(H, lambda name, σ: inverse(σ, λ[name]), last=True)
        ready = bench.readouts(w, -1.0 / prepared.examples, examples)
        return [ready for _ in bench.study.stages]
