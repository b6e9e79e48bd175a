"""TracIn (Pruthi et al., 2020), the checkpoint estimator TracInCP.

    values[q, m] = -Σ_c η_c ∇f(q, θ_c) · ∇L(m, θ_c)                                     (Eq. 30)

η_c is the rate of the last update before checkpoint c. The sign is that of f(with m) - f(without
m).
"""

from __future__ import annotations

from functools import partial

from whence.engine.costs import Workload
from whence.engine.queries import Queries
from whence.engine.workspace import Outline, Term, Workspace
from whence.methods.gradient import GradientMethod, Vectors


class TracIn(GradientMethod):
    """What descending on an example did to the measurement, summed over the checkpoints.

    Args:
        stage: attribute to this stage's examples only (default: all stages).
    """

    _factored = True

    def terms(self, workspace: Outline) -> list[Term]:
        return [Term(c.stage, [c]) for c in workspace.run.checkpoints]

    def query_passes(self, work: Workload) -> int:
        return work.scored

    def prepare(self, workspace: Workspace, terms: list[Term]) -> None:
        """Nothing is fitted."""

    def vectors(self, workspace: Workspace, prepared: None, queries: Queries) -> Vectors:
        for k, checkpoint in enumerate(workspace.run.checkpoints):
            if checkpoint.stage in workspace.stages:
                η = workspace.rates(partial(workspace.run.rate_at, checkpoint))
                v = workspace.plain_gradients(queries, checkpoint)
                yield [k], workspace.diagonal(η) * v, -1.0
