"""Influence functions (Koh & Liang, 2017), by default with the EK-FAC of Grosse et al. (2023).

    values[q, m] = -(1/N) ∇f(q, θ_T)ᵀ (H + λ)⁻¹ ∇L(m, θ_T)                                   (Eq. 6)

The solver decides what H and its inverse are. The data of several stages is pooled, as in the
paper. The sign is that of f(with m) - f(without m).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from whence.engine.costs import Workload
from whence.engine.dynamics import source_damping
from whence.engine.queries import Queries
from whence.engine.solvers import SOLVERS, check_settings
from whence.engine.workspace import Term, Workspace
from whence.errors import check_choice
from whence.methods.gradient import GradientMethod, Vectors
from whence.operators import BlockDiagonal, Inverse
from whence.operators.datainf import DataInf


@dataclass(frozen=True)
class Prepared:
    """(H + λ)⁻¹, and N."""

    inverse: Inverse[Any]
    examples: int


class Influence(GradientMethod):
    """The response of the optimum to the weight of an example, at the final model.

    A setting that the chosen solver does not have is refused.

    Args:
        damping: λ, or "source" for λ = 1/(η̄K), and λP̄⁻¹ for a preconditioned optimizer (appendix
            C): then it is close to SOURCE with one segment. Default: "source"; for "arnoldi" 1e-8;
            for "datainf" 0.1 × the mean square of the entries of a layer's gradients, as published.
        curvature, fisher: as in `Source`; of "ekfac", and of the preconditioner of "cg".
        stage: attribute to this stage's examples only (default: all stages).
        seed: seed of the pseudo-targets, of Arnoldi's start vector, of the choice of `examples`.
        solver: "ekfac": H approximated layer by layer, inverted in closed form. "cg": the true
            Gauss-Newton matrix of all tracked layers together, by conjugate gradients. "arnoldi":
            the same matrix, on its leading eigenvectors only (Schioppa et al., 2022). "datainf": a
            mean over the examples of inverses in closed form (Kwon et al., 2024).
        coupling: of "ekfac": take into account that all layers correct the same error together, as
            in `Source`. The other solvers' matrices are of all layers together anyway.
        rank: of "arnoldi": how many eigenvectors to keep (default 100).
        iterations: of "arnoldi" (default 200), and at most for each query of "cg" (default 100).
        tolerance: of "cg": the relative residual at which a query has converged (default 0.01).
        examples: of "cg" and "arnoldi": H is taken on this many examples, chosen by the seed
            (default: all that the run trained on).
    """

    damping: float | str | None

    _shared = True
    _floor = 0.1  # with damping="source", as in `Source`

    def __init__(
        self,
        damping: float | str | None = None,
        curvature: str | None = None,
        fisher: str | None = None,
        stage: str | None = None,
        seed: int | None = None,
        *,
        solver: str = "ekfac",
        coupling: bool | None = None,
        rank: int | None = None,
        iterations: int | None = None,
        tolerance: float | None = None,
        examples: int | None = None,
    ) -> None:
        check_choice("solver", solver, SOLVERS)
        asked = {
            "damping": damping,
            "curvature": curvature,
            "fisher": fisher,
            "seed": seed,
            "coupling": coupling,
            "rank": rank,
            "iterations": iterations,
            "tolerance": tolerance,
            "examples": examples,
        }
        given = {name: value for name, value in asked.items() if value is not None}
        settings = self.defaults(solver) | given
        check_settings(solver, given, settings)
        self.solver, self._joint = solver, SOLVERS[solver].joint
        vars(self).update(settings, stage=stage)

    @classmethod
    def published(cls, *arguments: Any, **settings: Any) -> Influence:
        """The paper to the letter: plain EK-FAC influence functions, layers not coupled.

        Args:
            damping, curvature, fisher, stage, seed, ...: as in `Influence`; a damping of 1e-8 and
                "ekfac" by default.
        """
        from whence.methods.published import PublishedInfluence

        return PublishedInfluence(*arguments, **settings)

    @staticmethod
    def defaults(solver: str) -> dict[str, Any]:
        """The settings of a solver."""
        return dict(SOLVERS[solver].defaults)

    def defaults_shown(self) -> dict[str, Any]:
        return super().defaults_shown() | self.defaults(self.solver)

    def prepare(self, workspace: Workspace, terms: list[Term]) -> Prepared:
        λ, solve = self._damping(workspace), SOLVERS[self.solver].inverse
        examples = sum(len(workspace.used(stage)) for stage in workspace.study.stages)
        return Prepared(solve(workspace, λ, self.settings()), examples)

    def vectors(self, workspace: Workspace, prepared: Prepared, queries: Queries) -> Vectors:
        inverse = prepared.inverse
        at = [workspace.run.final]
        w = inverse @ workspace.query_gradients(queries, at, inverse.bases)  # ∇f(q, θ_T)
        if inverse.statistics:
            workspace.ledger.note_solve(queries.label, inverse.statistics)
        yield range(len(workspace.study.stages)), w, -1.0 / prepared.examples

    def _damping(self, workspace: Workspace) -> BlockDiagonal:
        """λ of every block that training moved; a frozen layer does not respond to the data."""
        trained = [block.name for block in workspace.trained_blocks()]
        if self.damping == "source":
            λ, P = source_damping(workspace, self._floor)
        elif self.damping is None:
            data = workspace.fit_data(workspace.study.stages)
            published = DataInf(data, workspace.run.final, workspace.batch_size)
            λ, P = published.published_damping(), {}
        else:
            λ, P = dict.fromkeys(trained, float(self.damping)), {}
        λ = {name: λ[name] for name in trained if λ[name] != float("inf")}
        summary = {"least": min(λ.values()), "most": max(λ.values())}
        workspace.ledger.diagnostics["damping"] = summary
        return BlockDiagonal({name: x / P[name] if P else x for name, x in λ.items()})

    def whitens(self, work: Workload) -> bool:
        return work.preconditioned and self.damping == "source" and self.solver == "ekfac"

    def passes_needed(self, work: Workload) -> dict[str, int]:
        share = (self.settings().get("examples") or work.trained) / work.trained
        return SOLVERS[self.solver].passes(self.settings(), share) | {"scores": 1}
