"""LESS (Xia et al., 2024): projected gradients, as Adam would step, compared by their angle.

    values[q, m] = -Σ_c η_c cos(P ∇f(q, θ_c), P Γ(m, θ_c))            Γ = ∇L / (√v̂_c + ε)

P is random signs, and v̂_c the optimizer's second moments at checkpoint c (Γ = ∇L for SGD). Runs do
not record Adam's first moments, so that Γ is the step of an optimizer without momentum; in the
paper they are added to every example's gradient alike. The sign is that of f(with m) - f(without
m); the scale means nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from whence.engine.dynamics import preconditioner_at
from whence.engine.projected_space import ProjectedSpace, projecting
from whence.engine.queries import Queries
from whence.engine.workspace import LOSS, Workspace
from whence.errors import check_count
from whence.layers.passes import Weights
from whence.methods.similarity import Similarity


class LESS(Similarity):
    """Where an example's update points, next to what the query needs, over the checkpoints.

    Args:
        dimension: number of coordinates of the projection.
        seed: seed of the projection.
        stage: attribute to this stage's examples only (default: all stages).
    """

    def __init__(self, dimension: int = 4096, seed: int = 0, stage: str | None = None) -> None:
        check_count("dimension", dimension)
        self.dimension, self.seed, self.stage = dimension, seed, stage

    def points(self, workspace: Workspace, stage: str) -> Sequence[tuple[Weights, float]]:
        run = workspace.run
        rates = {
            c: workspace.rates(partial(run.rate_at, c)).values()
            for c in run.checkpoints
            if c.stage == stage
        }
        return [(c, sum(by_layer) / len(by_layer)) for c, by_layer in rates.items()]

    def prepare(self, workspace: Workspace) -> ProjectedSpace:
        return ProjectedSpace.random(workspace, self.dimension, True, self.seed)

    def features(
        self, prepared: ProjectedSpace, examples: Queries, checkpoint: Weights, as_query: bool
    ) -> Tensor:
        if as_query:
            return prepared.gradients(examples, checkpoint).values
        P = preconditioner_at(prepared.workspace, checkpoint)
        return torch.cat(list(prepared.rows(examples, checkpoint, LOSS, P)))

    def sign(self, workspace: Workspace) -> float:
        return -1.0

    def width(self, workspace: Workspace) -> int:
        return self.dimension

    def passes_needed(self, workspace: Workspace) -> tuple[dict[str, float], dict[str, int]]:
        points = sum(len(self.points(workspace, stage)) for stage in workspace.stages)
        return {"projection": projecting(workspace.tracked, self.dimension)}, {"projection": points}
