"""SOURCE's averages, and one matrix for all layers: most accurate for models trained from scratch.

    values[q, m] = -(1/N) ∇f(q)ᵀ (D⁻¹ + H̄/δ)⁻¹ ḡ(m)                D = η̄K P̄

H̄ is the whole Gauss-Newton matrix, ḡ(m) an example's gradient and ∇f(q) the query's; all are means
over the checkpoints of a stage. With SOURCE's M = D^½ H̄ D^½, the response to a gradient is
δ/(M + δ). Like SOURCE's, it is 1 where training hardly moved, but it falls more slowly. A product
with H̄ costs a pass over the data at every checkpoint, so only a few are taken: conjugate gradients
solve with H̄ + λ, λ = δ D⁻¹. Coupled EK-FAC is the preconditioner, so their first direction is its
answer. SOURCE's survival exp(-M), with coupled EK-FAC, carries the query gradient back through
later stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whence.engine.costs import Workload
from whence.engine.dynamics import Rates
from whence.engine.queries import Queries
from whence.engine.solvers import solved_at_once
from whence.engine.workspace import Term, Workspace
from whence.errors import check_choice, check_count, check_positive
from whence.methods.gradient import SegmentedMethod, Stretch, Vectors
from whence.operators import KINDS, BlockDiagonal, Inverse, coupling
from whence.operators.krylov import TOLERANCE
from whence.operators.operator import survival as F_S

MOST_RESIDUAL = 0.5  # of conjugate gradients, without a warning: eight iterations leave about 0.1


@dataclass(frozen=True)
class WithInverse:
    """A segment's curvature layer by layer, M, and (H̄ + λ)⁻¹ of all layers together."""

    by_layer: Any
    inverse: Inverse[Any]

    def eigenvalues(self) -> Mapping[str, Any]:
        values: Mapping[str, Any] = self.by_layer.eigenvalues()
        return values


class Best(SegmentedMethod):
    """One equation for all layers together, along the run.

    Costs several times as much as `Source`: each iteration is a pass over the training data at
    every checkpoint, for all queries together.

    Args:
        iterations: maximum number of conjugate gradient steps; a converged query takes no more.
        relative_damping: δ. The response to a gradient is halved where η̄K P̄ times the curvature
            is δ.
        stage: attribute to this stage's examples only (default: all stages).
        segments, curvature, fisher, query_at, floor, seed: as in `Source`; the curvature is the
            preconditioner's, layer by layer.
    """

    _fixed = ("damping", "coupling", "weight_decay")
    _joint = True

    def __init__(
        self,
        iterations: int = 8,
        relative_damping: float = 3.0,
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
        check_positive("relative_damping", relative_damping)
        check_choice("curvature", curvature, KINDS)
        self.iterations, self.relative_damping = iterations, relative_damping
        along: Any = {"query_at": query_at, "floor": floor, "seed": seed}
        super().__init__(segments, curvature, fisher, stage, **along)

    def operator(
        self, workspace: Workspace, term: Term, rates: Rates, resident: int
    ) -> tuple[Any, Any, dict[str, float]]:
        """Coupled EK-FAC and the solver of the whole matrix, D^½, and c."""
        D = rates.applied
        # the preconditioner has its own factors, because D may differ within a layer
        H = self.curvature_of(workspace, term, rates, resident if D.scalar else 2 * resident)
        M = H.whitened(workspace.diagonal(D))
        c = coupling(M)
        λ = BlockDiagonal({name: self.relative_damping / x for name, x in D.items()})
        whole = workspace.gauss_newton(
            workspace.fit_data([term.stage]),
            term.checkpoints,
            D,
            solved_at_once(workspace),
            iterations=self.iterations,
            relative_residual=TOLERANCE[workspace.accumulator],
            preconditioner=H.scaled(c),
        )
        return WithInverse(M.scaled(c), whole.inverse(λ)), workspace.diagonal(D).sqrt(), c

    def vectors(
        self, workspace: Workspace, prepared: dict[int, Stretch], queries: Queries
    ) -> Vectors:
        first = min(prepared)
        v = self.query_gradient(workspace, queries, {})
        for k in reversed(prepared):
            segment = prepared[k]
            before: Any = v.squared_norm() if k > first else None
            matrix: Any = segment.M  # a `WithInverse`
            if segment.scored:
                w = matrix.inverse @ v
                label = f"{queries.label}, segment {k + 1}"
                workspace.ledger.note_solve(label, matrix.inverse.statistics, MOST_RESIDUAL)
                yield [k], w, -self.relative_damping / segment.count
            if k > first:
                survival = matrix.by_layer.apply(F_S, segment.root * v)
                v = v.updated(survival / segment.root)
                workspace.ledger.note_survival(k, v.squared_norm(), before, queries.more)

    def passes_needed(self, work: Workload) -> dict[str, int]:
        return super().passes_needed(work) | {"products": (self.iterations + 1) * work.scored}
