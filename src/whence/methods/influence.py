"""Influence functions (Koh & Liang, 2017), by default with the EK-FAC of Grosse et al. (2023).

    values[q, m] = -(1/N) ∇f(q, θ_T)ᵀ (H + λ)⁻¹ ∇L(m, θ_T)                                   (Eq. 6)

How (H + λ)⁻¹ is made is a solver's business (`methods/solvers`). On a run of several stages their
data is pooled, as in the paper: influence functions cannot tell stages apart. The sign is that of
f(with m) - f(without m).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor

from whence.data import Batches
from whence.engine.workspace import Readouts, Term, Workspace
from whence.methods.gradient import GradientMethod
from whence.methods.solvers import SOLVERS, Damping, Solver
from whence.methods.solvers.datainf import published_damping
from whence.methods.source import PRECONDITIONED, block_durations, known_optimizer, preconditioner
from whence.operators import FitData


@dataclass(frozen=True)
class Prepared:
    """(H + λ)⁻¹, and N."""

    inverse: Solver
    examples: int


class Influence(GradientMethod):
    """The response of the optimum to the weight of an example, at the final model.

    A setting that the chosen solver does not have is refused.

    Args:
        damping: λ, or "source" for λ = 1/(η̄K), and λP̄⁻¹ for a preconditioned optimizer (appendix
            C): then it is close to SOURCE with one segment. Default: 1e-8, as in the paper;
            "source" for "cg", which cannot reach λ far below the eigenvalues; for "datainf" 0.1 ×
            the mean square of the entries of a layer's gradients, as published.
        curvature, fisher: as in `Source`; of "ekfac", and of the preconditioner of "cg".
        stage: attribute to this stage's examples only (default: all stages').
        seed: of the pseudo-targets, of Arnoldi's start vector, of the choice of `examples`.
        solver: "ekfac": H approximated layer by layer, inverted in closed form. "cg": the true
            Gauss-Newton matrix of all tracked layers together, by conjugate gradients. "arnoldi":
            the same matrix, on its leading eigenvectors only (Schioppa et al., 2022). "datainf": a
            mean over the examples of inverses in closed form (Kwon et al., 2024).
        rank: of "arnoldi": how many eigenvectors are kept (default 100).
        iterations: of "arnoldi" (default 200), and at most for each query of "cg" (default 100).
        tolerance: of "cg": the relative residual at which a query is solved (default 0.01).
        examples: of "cg" and "arnoldi": H is taken on so many examples, chosen by the seed
            (default: on all that the run trained on).
    """

    damping: float | str | None

    _shared = True

    def __init__(
        self,
        damping: float | str | None = None,
        curvature: str | None = None,
        fisher: str | None = None,
        stage: str | None = None,
        seed: int | None = None,
        *,
        solver: str = "ekfac",
        rank: int | None = None,
        iterations: int | None = None,
        tolerance: float | None = None,
        examples: int | None = None,
    ) -> None:
        if solver not in SOLVERS:
            known = ", ".join(map(repr, SOLVERS))
            raise ValueError(f"solver={solver!r} is not known: use one of {known}")
        asked = {
            "damping": damping,
            "curvature": curvature,
            "fisher": fisher,
            "seed": seed,
            "rank": rank,
            "iterations": iterations,
            "tolerance": tolerance,
            "examples": examples,
        }
        given = {name: value for name, value in asked.items() if value is not None}
        for name in given.keys() - SOLVERS[solver].defaults.keys():
            owners = [f"solver={k!r}" for k, kind in SOLVERS.items() if name in kind.defaults]
            raise ValueError(
                f"{name}={given[name]!r} means nothing to solver={solver!r}: leave it out, or use "
                + " or ".join(owners)
            )
        λ = given.get("damping")
        if λ not in (None, "source") and not (isinstance(λ, Real) and λ >= 0):
            raise ValueError(f"damping={λ!r} must be zero or positive, or 'source' for λ = 1/(η̄K)")
        settings = SOLVERS[solver].defaults | given
        SOLVERS[solver].check(**settings)
        self.solver = solver
        vars(self).update(settings, stage=stage)

    def terms(self, workspace: Workspace) -> list[Term]:
        return [Term(stage, [workspace.run.final]) for stage in workspace.study.stages]

    def prepare(self, workspace: Workspace, terms: list[Term]) -> Prepared:
        parts = workspace.parts(workspace.study.stages)
        λ = self._damping(workspace, parts)
        numbers = λ.numbers.values()
        workspace.diagnostics["damping"] = {"least": min(numbers), "most": max(numbers)}
        inverse = SOLVERS[self.solver].prepare(workspace, parts, λ, **self._solver_settings)
        return Prepared(inverse, sum(len(part.indices) for part in parts))

    @property
    def _solver_settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in SOLVERS[self.solver].defaults}

    def _damping(self, workspace: Workspace, parts: Sequence[FitData]) -> Damping:
        trained = workspace.rates(workspace.run.peak_rate)
        if not any(trained.values()):
            raise ValueError(
                "the run's learning rates are 0 for every tracked layer: nothing was trained, so "
                "nothing can be attributed. Give the rates that were really applied"
            )
        matrices = None
        if self.damping is None:
            numbers = published_damping(workspace, parts)
        elif isinstance(self.damping, str):
            numbers, matrices = self._from_source(workspace)
        else:
            numbers = dict.fromkeys(workspace.blocks, float(self.damping))
        # a frozen layer does not respond to the data: infinitely damped
        frozen = {name: float("inf") for name, rate in trained.items() if not rate}
        return Damping(numbers | frozen, matrices)

    @staticmethod
    def _from_source(workspace: Workspace) -> tuple[dict[str, float], dict[str, Tensor] | None]:
        """λ = 1/(η̄K) over the whole run; and λP̄⁻¹ when the optimizer was preconditioned."""
        segments = workspace.run.segments("stages")
        total = dict.fromkeys(workspace.blocks, 0.0)
        for segment in segments:
            for name, duration in block_durations(workspace, segment).items():
                total[name] += duration
        λ = {name: 1 / x if x else float("inf") for name, x in total.items()}
        adaptive = {known_optimizer(workspace, s) in PRECONDITIONED for s in segments}
        if adaptive == {True, False}:
            raise ValueError(
                "damping='source' needs one kind of optimizer: this run had a preconditioned one "
                "in some stages and SGD in others. Give a number"
            )
        if adaptive == {False}:
            return λ, None
        return λ, {name: λ[name] / P for name, P in preconditioner(workspace, *segments).items()}

    def _metadata(self, workspace: Workspace) -> dict[str, Any]:
        if "solver" in workspace.account:
            workspace.diagnostics["solver"] = _summed(workspace.account["solver"])
        return super()._metadata(workspace)

    def passes_needed(self, workspace: Workspace) -> dict[str, int]:
        stages = workspace.study.stages
        examples = sum(len(workspace.study.used(workspace.run, stage)) for stage in stages)
        return SOLVERS[self.solver].passes(examples, **self._solver_settings) | {"scores": 1}

    def operations(self, workspace: Workspace, queries: int) -> dict[str, float]:
        work = super().operations(workspace, queries)
        if workspace.query is None:  # every example is a query that has to be solved
            everyone = sum(len(workspace.study.data[stage]) for stage in workspace.stages)
            solved = super().operations(workspace, everyone)
            work |= {kind: solved[kind] for kind in ("sums", "products")}
        return work

    def vectors(
        self,
        workspace: Workspace,
        prepared: Prepared,
        data: Batches,
        stage: str,
        indices: np.ndarray,
        examples: int,
    ) -> Iterator[tuple[int, Readouts]]:
        bases = dict(prepared.inverse.bases)
        v = workspace.gradients(data, stage, indices, workspace.run.final, bases)  # ∇f(q, θ_T)
        w, went = prepared.inverse.solve(v)  # (H + λ)⁻¹ v
        if went:
            _note(workspace, f"{stage} {indices[0]}", went)
        ready = workspace.readouts(w, -1.0 / prepared.examples, examples)
        yield from ((k, ready) for k in range(len(workspace.study.stages)))


def _note(workspace: Workspace, queries: str, went: dict[str, Any]) -> None:
    """Keep how the queries from here on were solved; warn where it first went wrong."""
    noted = workspace.account.setdefault("solver", {})
    if went["unconverged"] and not any(other["unconverged"] for other in noted.values()):
        warnings.warn(
            f"conjugate gradients have not converged for {went['unconverged']} of "
            f"{went['queries']} queries (relative residual up to {went['residual']:.1e} after "
            f"{went['iterations']} iterations): raise damping, iterations or tolerance, or use "
            "dtype=torch.float64",
            stacklevel=2,
        )
    noted[queries] = went


def _summed(noted: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """How all queries were solved, from how each block of them was."""
    return {
        "queries": sum(went["queries"] for went in noted.values()),
        "unconverged": sum(went["unconverged"] for went in noted.values()),
        "iterations": max(went["iterations"] for went in noted.values()),
        "residual": max(went["residual"] for went in noted.values()),
    }
