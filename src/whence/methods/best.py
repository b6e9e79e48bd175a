"""The truest scores we know from a run's checkpoints: SOURCE's averages, one matrix for all layers.

    values[q, m] = -(1/N) ∇f(q)ᵀ (H̄ + λ)⁻¹ ḡ(m)                λ = 3 D⁻¹,  D = η̄K P̄

H̄ is the whole Gauss-Newton matrix, ḡ(m) an example's gradient, ∇f(q) the query's: all are means
over the checkpoints of a stage. In the coordinates of SOURCE, M = D^½ H̄ D^½, it is the response
(M + 3)⁻¹, which F_r(M + 3) equals to 5 %. Products with H̄ cost a pass over the data at every
checkpoint, so few are taken: conjugate gradients start from the answer of coupled EK-FAC, which is
their preconditioner. Through later stages the query gradient is carried by SOURCE's survival,
exp(-M) with coupled EK-FAC.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from whence.engine.dynamics import Rates
from whence.engine.options import check_choice, check_count, check_damping
from whence.engine.solvers import solved_at_once
from whence.engine.workspace import Queries, Term, Workspace
from whence.methods.gradient import SegmentedMethod, Stretch, Vectors, first_scored
from whence.operators import KINDS, BlockDiagonal, Inverse, coupling
from whence.operators.functions import survival as F_S
from whence.operators.gauss_newton import GaussNewton
from whence.run import Segment

DAMPING = 3.0  # λD, chosen on digits and FashionMNIST: docs/best.md
MOST_RESIDUAL = 0.5  # of conjugate gradients, without a warning: eight iterations leave about 0.1


@dataclass(frozen=True)
class Solvable:
    """Coupled EK-FAC of a segment, and (H̄ + λ)⁻¹ of the whole matrix."""

    M: Any
    inverse: Inverse[Any]

    def eigenvalues(self) -> dict[str, Any]:
        values: dict[str, Any] = self.M.eigenvalues()
        return values


class Best(SegmentedMethod):
    """One equation for all layers together, along the run.

    Costs several times as much as `Source`: each iteration is a pass over the training data at
    every checkpoint, for all queries together.

    Args:
        iterations: of conjugate gradients, at most; a query that has converged takes no more.
        damping: λ, or "auto" for 3/(η̄K P̄): no update has less, so nothing needs to be known of the
            curvature.
        stage: attribute to this stage's examples only (default: all stages').
        segments, curvature, fisher, query_at, floor, seed: as in `Source`; the curvature is the
            preconditioner's, layer by layer.
    """

    def __init__(
        self,
        iterations: int = 8,
        damping: float | str = "auto",
        stage: str | None = None,
        *,
        segments: int | str | Sequence[int] = "stages",
        curvature: str = "auto",
        fisher: str = "sampled",
        query_at: str = "run",
        floor: float = 0.1,
        seed: int = 0,
    ) -> None:
        check_count("iterations", iterations)
        if damping != "auto":
            check_damping(damping, positive=True)
        check_choice("curvature", curvature, KINDS)
        along: Any = {"query_at": query_at, "floor": floor, "seed": seed}
        super().__init__(segments, curvature, fisher, stage, **along)
        self.iterations, self.damping = iterations, damping  # type: ignore[assignment]

    def settings(self) -> dict[str, Any]:
        fixed = ("coupling", "weight_decay")
        return {k: v for k, v in super().settings().items() if k not in fixed}

    def rates(self, workspace: Workspace, segment: Segment) -> Rates:
        return Rates.of(workspace, segment, floor=self.floor)

    def operator(
        self, workspace: Workspace, term: Term, rates: Rates, resident: int
    ) -> tuple[Any, Any, dict[str, float]]:
        """Coupled EK-FAC and the solver of the whole matrix, D^½, and c."""
        how: Any = {"fisher": self.fisher, "seed": self.seed, "resident": resident}
        stages, points, D = [term.stage], term.checkpoints, rates.applied
        H = workspace.curvature(self.curvature, stages, points, D, **how)
        M = H.whitened(workspace.diagonal(D))
        c = coupling(M)
        given: Any = self.damping
        λ = BlockDiagonal({n: DAMPING / x if given == "auto" else given for n, x in D.items()})
        whole = workspace.gauss_newton(
            workspace.fit_data(stages),
            points,
            D,
            solved_at_once(workspace),
            iterations=self.iterations,
            relative_residual=GaussNewton.tolerance[workspace.accumulator],
            preconditioner=H.scaled(c),
        )
        return Solvable(M.scaled(c), whole.inverse(λ)), workspace.diagonal(D).sqrt(), c

    def vectors(
        self, workspace: Workspace, prepared: dict[int, Stretch], queries: Queries
    ) -> Vectors:
        first = min(prepared)
        v = self.query_gradient(workspace, queries, {})
        for k in reversed(prepared):
            segment, size = prepared[k], v.squared_norm() if k > first else None
            matrix: Any = segment.M
            if segment.scored:
                w = matrix.inverse @ v
                label = f"{queries.label}, segment {k + 1}"
                workspace.ledger.note_solve(label, matrix.inverse.statistics, MOST_RESIDUAL)
                yield [k], w, -1.0 / segment.count
            if k > first:
                (survival,) = matrix.M.apply([F_S], segment.root * v)
                v = v.updated(survival / segment.root)
                workspace.ledger.note_survival(k, v.squared_norm() / size)

    def passes_needed(self, workspace: Workspace, terms: list[Term]) -> dict[str, int]:
        scored = [t for t in terms[first_scored(workspace, terms) :] if t.stage in workspace.stages]
        products = (self.iterations + 1) * sum(len(term.checkpoints) for term in scored)
        return super().passes_needed(workspace, terms) | {"products": products}
