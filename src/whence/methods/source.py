"""SOURCE: segmented stationary unrolling for counterfactual estimation (Bae et al., 2024).

Training is cut into L segments in which the curvature H̄, the gradients ḡ and D = η̄K P̄ are taken as
constant (P̄ = 1 for SGD, 1/(√v̂ + ε) for Adam: appendix C). With M = D^½ H̄ D^½ in each of them,

    values[q, m] = -(1/N) ∇f(q)ᵀ Σ_ℓ S̄_L ⋯ S̄_{ℓ+1} r̄_ℓ(m)                              (Eq. 20-22)
    S̄ = D^½ exp(-M) D^-½          r̄ = D^½ F_r(M) D^½ ḡ          F_r(x) = (1 - exp(-x)) / x

The products are taken from the left, on the few query gradients; training gradients are never
transformed. Two things differ from the paper (`Source.published` is the paper to the letter): the
layers' curvatures are coupled, M_ℓ ← c_ℓ M_ℓ (see `operators.coupling`), and ∇f(q) is the mean over
the last stage's checkpoints. The sign is that of f(with m) - f(without m).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from whence.engine.dynamics import Rates
from whence.engine.queries import Queries
from whence.engine.workspace import Term, Workspace
from whence.methods.gradient import SegmentedMethod, Stretch, Vectors
from whence.operators import coupling
from whence.operators.operator import response as F_r
from whence.operators.operator import survival as F_S


class Source(SegmentedMethod):
    """SOURCE for SGD (with or without momentum), Adam, AdamW and RMSprop, under any schedule.

    Args:
        segments: "auto" (three if a single stage trained mostly weights that are shared over
            positions, as in convolutions and transformers; one for each stage otherwise), "stages",
            their number, or a list of the updates at which they end.
        curvature: "auto" (EK-FAC, with bases of whole gradients in layers that share weights over
            positions), "ekfac", "shampoo", "kfac", "diagonal" or "identity", layer by layer; or
            "gauss-newton", the true matrix of all layers together, at the price of dozens of passes
            over the data for each checkpoint.
        fisher: "sampled" (seeded pseudo-targets), "exact" (one backward pass per output) or
            "empirical" (true targets).
        stage: attribute to this stage's examples only (default: all stages).
        damping: added to the eigenvalues of the curvature.
        weight_decay: "ignore" it, as the paper does, or count it as "curvature".
        coupling: take into account that all layers correct the same error together.
        query_at: take the query gradient along the "run" (the mean over the last stage's
            checkpoints), or at the "final" model.
        floor: for Adam-type optimizers, the smallest value that a root √v̂ counts as, a share of the
            root mean v̂ of its parameter; it keeps P̄ from values that no update ever saw.
        seed: seed of the pseudo-targets.
    """

    def operator(
        self, workspace: Workspace, term: Term, rates: Rates, resident: int
    ) -> tuple[Any, Any, dict[str, float]]:
        """M = c D^½ H̄ D^½ + Δ of a segment, D^½, and c."""
        D = workspace.diagonal(rates.applied)
        M = self.curvature_of(workspace, term, rates, resident).whitened(D)
        c = coupling(M) if self.coupling else {}
        return M.scaled(c) + rates.shift, D.sqrt(), c

    def vectors(
        self, workspace: Workspace, prepared: dict[int, Stretch], queries: Queries
    ) -> Vectors:
        first, last = min(prepared), max(prepared)
        v = self.query_gradient(workspace, queries, prepared[last].M.bases)
        for k in reversed(prepared):
            segment = prepared[k]
            before: Any = v.squared_norm() if k > first else None
            needed = (F_r if segment.scored else None, F_S if k > first else None)
            response, survival = segment.M.apply(needed, segment.root * v, overwrite=True)
            if response is not None:
                yield [k], segment.root * response, -1.0 / segment.count
            if survival is not None:
                v = v.updated(survival / segment.root)
                workspace.ledger.note_survival(k, v.squared_norm(), before, queries.more)

    @classmethod
    def published(
        cls,
        segments: int | str | Sequence[int] = 3,
        curvature: str = "ekfac",
        fisher: str = "sampled",
        damping: float | None = None,
        weight_decay: str = "ignore",
        stage: str | None = None,
        seed: int = 0,
    ) -> Source:
        """The paper to the letter: final query gradient, no coupling, no floor, and for Adam-type
        optimizers the mixed form of appendix D.2.

        Args:
            segments, curvature, fisher, weight_decay, stage, seed: as in `Source`; 3 segments and
                "ekfac" by default.
            damping: default: none for SGD, 1e-8 in the inverse of Adam's form.
        """
        from whence.methods.published import PublishedSource

        return PublishedSource(segments, curvature, fisher, damping, weight_decay, stage, seed)
