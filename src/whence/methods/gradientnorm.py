"""The gradient norm alone (Paul et al., 2021): a control that does not look at the query.

    values[q, m] = ± ‖∇L(m, θ_T)‖

the same for every query. Examples with large gradients have large scores in every method of
gradients. What a method adds to this control is what it knows about the query. The sign is that of
`RepSim`: larger counts as more helpful.
"""

from __future__ import annotations

from torch import Tensor

from whence.engine.queries import Queries
from whence.engine.workspace import Workspace
from whence.layers.passes import Weights
from whence.methods.similarity import Similarity, dot, gradient_norms


class GradientNorm(Similarity):
    """The length of an example's gradient at the final model.

    Args:
        stage: attribute to this stage's examples only (default: all stages).
    """

    def features(
        self, prepared: Workspace, examples: Queries, checkpoint: Weights, as_query: bool
    ) -> Tensor:
        if as_query:
            return prepared.zero.new_ones(len(examples), 1)
        return gradient_norms(prepared, examples, checkpoint).unsqueeze(1)

    def compare(self, queries: Tensor, examples: Tensor) -> Tensor:
        return dot(queries, examples)
