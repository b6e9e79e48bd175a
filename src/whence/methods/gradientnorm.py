"""The gradient norm alone (Paul et al., 2021): a control that does not look at the query.

    values[q, m] = ± ‖∇L(m, θ_T)‖

the same for every query. Examples with large gradients have large scores in every method of
gradients. What a method adds to this control is what it knows about the query. The sign is that of
`RepSim`: larger counts as more helpful.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whence.engine.queries import Queries
from whence.engine.workspace import Workspace
from whence.layers.passes import Weights
from whence.methods.similarity import Similarity, dot, gradient_norms


class GradientNorm(Similarity):
    """The length of an example's gradient at the final model.

    Args:
        stage: attribute to this stage's examples only (default: all stages').
    """

    def features(
        self,
        workspace: Workspace,
        prepared: None,
        examples: Queries,
        checkpoint: Weights,
        as_query: bool,
    ) -> Tensor:
        if as_query:
            return torch.ones(
                len(examples), 1, device=workspace.device, dtype=workspace.accumulator
            )
        return gradient_norms(workspace, examples, checkpoint).unsqueeze(1)

    def compare(self, queries: Tensor, examples: Tensor) -> Tensor:
        return dot(queries, examples)
