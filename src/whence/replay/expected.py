"""Expected unrolling: every example counts at every update with its share 1/N.

This is what trainings with different random batches have in common. Each update has the curvature
of a fresh batch. All examples receive credit, over stretches of updates within which the weights
are taken as constant.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from whence.data import cut
from whence.draws import keys
from whence.replay.objective import Tensors
from whence.replay.sweep import Credit, QueryBlock, ReplayWorkspace
from whence.replay.training import Adjoint, Indices, Update
from whence.run import Stage

CURVATURE_BATCH = 512
STRETCHES = 32  # per stage; each takes a pass over its data


class ExpectedCredits:
    """Draws curvature batches, and credits every example once per stretch.

    Args:
        curvature_batch: number of examples for each update's curvature (default 512, or all).
        credit_every: number of updates in a stretch (default: a 32nd of the stage).
        seed: seed of the draws.
    """

    def __init__(
        self,
        workspace: ReplayWorkspace,
        curvature_batch: int | None,
        credit_every: int | None,
        seed: int,
    ) -> None:
        self.workspace, self.credit_every, self.seed = workspace, credit_every, seed
        self.batch = CURVATURE_BATCH if curvature_batch is None else curvature_batch
        self._pulled: Tensors = {}  # ḡ, added up over a stretch ...
        self._middle: Tensors = {}  # ... and the weights in its middle

    def draw(self, t: int) -> Indices:
        """A fresh batch for an update's curvature, without replacement; it depends on the seed."""
        used = self.workspace.used(self.workspace.replay.stage(t).name)
        count = min(self.batch, len(used))
        order = keys(self.seed, t, torch.from_numpy(used)).numpy()
        return np.sort(used[np.argpartition(order, count - 1)[:count]])

    def stretch(self, stage: Stage, t: int) -> tuple[int, int]:
        """The first update of the stretch around update t, and the first after it."""
        length = min(stage.end, self.workspace.replay.steps) - stage.start
        count = math.ceil(length / (self.credit_every or math.ceil(length / STRETCHES)))
        ends = [stage.start + length * k // count for k in range(count + 1)]
        k = int(np.searchsorted(ends, t, side="right"))
        return ends[k - 1], ends[k]

    def credits(
        self, block: QueryBlock, update: Update, pulls: Tensors, adjoint: Adjoint
    ) -> Iterator[Credit]:
        """Add an update to its stretch; yield the stretch's credits at its first update."""
        start, end = self.stretch(update.stage, update.step)
        for name, pull in pulls.items():
            known = self._pulled.get(name)
            self._pulled[name] = pull.clone() if known is None else known.add_(pull)
        if update.step == (start + end) // 2:
            self._middle = update.point.weights
        if update.step == start:
            yield from self._everyone(block, update, adjoint)
            self._pulled = {}

    def _everyone(self, block: QueryBlock, update: Update, adjoint: Adjoint) -> Iterator[Credit]:
        """(1/N) ⟨Σ_t ḡ_t, ∇L(m, θ)⟩ of every example m of the block."""
        replay, stage = self.workspace.replay, update.stage.name
        wanted, share = block.wanted.get(stage), 1 / len(self.workspace.used(stage))
        if wanted is None or not self._pulled:
            return
        size = self.workspace.at_once(len(block.indices))
        parts = [wanted[part] for part in cut(len(wanted), size)]
        data = self.workspace.study.data[stage]
        stream = data.stream(parts, replay.device, replay.dtype, replay.workers)
        for k, (indices, batch) in enumerate(stream, 1):
            slopes = replay.objectives[stage].slopes(self._middle, self._pulled, batch)
            ready = adjoint if k == len(parts) else None
            yield Credit(stage, indices, share * slopes, update.step, ready, update.step)

    def counts(self) -> tuple[int, int]:
        """The total numbers of curvature examples and of credited examples."""
        curved = credited = 0
        for stage in self.workspace.run.stages:
            steps = range(stage.start, min(stage.end, self.workspace.replay.steps))
            curved += len(steps) * len(self.draw(stage.start))
            stretches = {self.stretch(stage, t) for t in steps}
            credited += len(stretches) * len(self.workspace.study.data[stage.name])
        return curved, credited
