"""Gradient cosine: the angle between a query's and an example's gradient (Hanawa et al., 2021).

    values[q, m] = -cos(∇f(q, θ_T), ∇L(m, θ_T))

over all tracked parameters together. It is TracIn at the final model without the lengths, which let
a few examples with large gradients dominate every query. The sign is that of f(with m) - f(without
m); the scale means nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from whence.engine.costs import Workload
from whence.engine.queries import Queries
from whence.engine.workspace import LOSS, Term, Workspace
from whence.layers.passes import Signal
from whence.methods.gradient import GradientMethod, Vectors
from whence.methods.similarity import gradient_norms
from whence.operators import BlockVectors


class GradientCosine(GradientMethod):
    """The cosine of the two gradients at the final model.

    Args:
        stage: attribute to this stage's examples only (default: all stages).
    """

    accepts = GradientMethod.accepts - {"query_weights"}
    _shared = _joint = True

    def prepare(self, workspace: Workspace, terms: list[Term]) -> dict[str, Tensor]:
        """1/‖∇L‖ of the examples that are scored, (n,) per stage; 0 where the gradient is 0."""
        weights = {}
        for stage in workspace.stages:
            scored = Queries(workspace.scored_data(stage), stage, workspace.scored(stage))
            norms = gradient_norms(workspace, scored, workspace.run.final)
            weights[stage] = norms.new_zeros(len(scored.data))
            weights[stage][torch.from_numpy(scored.indices)] = _inverse(norms)
        return weights

    def vectors(
        self, workspace: Workspace, prepared: dict[str, Tensor], queries: Queries
    ) -> Vectors:
        v = workspace.query_gradients(queries, [workspace.run.final], {})
        lengths = _inverse(v.squared_norm().sqrt()).view(-1, 1, 1)
        w = BlockVectors({k: x.mul_(lengths) for k, x in v.values.items()}, v.bases, v.scales)
        yield range(len(workspace.study.stages)), w, -1.0

    def training(
        self, workspace: Workspace, prepared: dict[str, Tensor]
    ) -> tuple[Signal, Mapping[str, Tensor] | None]:
        return LOSS, prepared

    def passes_needed(self, work: Workload) -> dict[str, int]:
        return {"norms": 1, "scores": 1}


def _inverse(lengths: Tensor) -> Tensor:
    return torch.where(lengths > 0, 1 / lengths, 0.0)
