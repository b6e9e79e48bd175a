"""HYDRA (Chen et al., 2021), the fast version: unrolled differentiation with the Hessian dropped.

For plain SGD (the last equation of appendix B.4, with the sign and scale of a prediction)

    values[q, m] = - Σ_t (η_t/B_t) [m in batch t] ∇f(q, θ_T) · ∇L(m, θ_t)

For other optimizers, one vector c_t for all queries replaces -η_t. It carries, per coordinate, the
optimizer's response to a gradient after update t (momentum, weight decay, Adam's averages).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from whence.methods.unrolling import Unrolling
from whence.replay.objective import Tensors
from whence.replay.sweep import (
    Credit,
    QueryBlock,
    ReplayWorkspace,
    forward_operations,
    update_credits,
)
from whence.replay.training import Adjoint
from whence.replay.updates import WEIGHT


class Hydra(Unrolling):
    """The effect of each update on the final measurement, without the Hessian of later updates.

    The run must have recorded its batches (`recorder.step(indices)`). HYDRA uses recorded weights
    (`every_step=True`), and replays the others.

    Args:
        stage: attribute to this stage's examples only (default: all stages).
    """

    _follows = False

    def sweep(
        self,
        workspace: ReplayWorkspace,
        block: QueryBlock,
        gradients: Tensors,
        adjoint: Adjoint | None,
        last: int,
    ) -> Iterator[Credit]:
        if adjoint is None:
            adjoint = {name: {WEIGHT: torch.ones_like(g[:1])} for name, g in gradients.items()}
        first, size = block.first(workspace.run), workspace.at_once(len(block.indices))
        for update in workspace.replay.backward(last, first, size=size):
            adjoint, pulls = update.pull_back(adjoint)
            if update.stage.name in block.wanted and pulls:
                directions = update.unclip({n: c * gradients[n] for n, c in pulls.items()})
                objective, weights = (
                    workspace.replay.objectives[update.stage.name],
                    update.point.weights,
                )
                slopes = [objective.slopes(weights, directions, batch) for _, batch in update.parts]
                yield from update_credits(update, slopes, adjoint)

    def operations(self, workspace: ReplayWorkspace, queries: int) -> float:
        replay = workspace.replay
        drawn = sum(map(len, replay.batches[: replay.steps]))
        return forward_operations(workspace) * drawn * (6 + 2 * queries)
