"""What RepSim and the baselines share: features of queries and of examples, compared in blocks.

    values[q, m] = ± Σ_c w_c similarity(features(q, θ_c), features(m, θ_c))

A method says which checkpoints and weights these are, what the features of some examples are, and
how they are compared. Where a similarity does not depend on the measurement, more similar counts as
more helpful: the sign is + for a measurement where higher is better and - where lower is better (a
loss, an error).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from whence.engine.costs import Cost, announce, passes_cost
from whence.engine.queries import Queries
from whence.engine.workspace import LOSS, Workspace
from whence.layers.passes import LOSSES, Weights
from whence.methods.base import Folder, Method
from whence.operators.products import squared_norms
from whence.progress import progress_bar
from whence.scores import Scores

SCORES_PER_BLOCK = 2**22
SELF_BLOCK = 256  # examples compared with each other to find each one's similarity to itself


def cosine(left: Tensor, right: Tensor) -> Tensor:
    """(q, r), (n, r) -> (q, n); 0 for a vector of zeros."""
    return F.normalize(left, dim=1) @ F.normalize(right, dim=1).T


def dot(left: Tensor, right: Tensor) -> Tensor:
    return left @ right.T


def gradient_norms(workspace: Workspace, examples: Queries, checkpoint: Weights) -> Tensor:
    """‖∇L(m, θ_c)‖ over the tracked parameters, (n,)."""
    passes = workspace.passes[examples.stage]
    passes.load(checkpoint)
    squares = torch.zeros(len(examples), dtype=workspace.accumulator, device=workspace.device)
    start = 0
    with passes.clock("norms"):
        for backward in passes.backward_passes(
            examples.data, examples.batches(workspace.batch_size), LOSS, "gradient norms"
        ):
            rows = slice(start, start + len(backward.indices))
            for factors in backward.factors():
                squares[rows] += squared_norms(factors.a, factors.s, factors.block.bias)
            start = rows.stop
    return squares.sqrt()


class Similarity(Method):
    """Scores that compare features of queries with features of examples."""

    accepts = frozenset({"examples"})
    _depends_on = LOSSES  # or OUTPUTS: of examples, at the checkpoints
    _symmetric = False  # whether an example has the same features as a query

    def points(self, workspace: Workspace, stage: str) -> Sequence[tuple[Weights, float]]:
        """The checkpoints at which a stage's examples are compared, and the weight of each."""
        return [(workspace.run.final, 1.0)]

    def prepare(self, workspace: Workspace) -> Any:
        """What the features need, by default the workspace; called once per run."""
        return workspace

    @abstractmethod
    def features(
        self, prepared: Any, examples: Queries, checkpoint: Weights, as_query: bool
    ) -> Tensor:
        """Features of some examples, (n, r), as queries or as training examples."""

    def compare(self, queries: Tensor, examples: Tensor) -> Tensor:
        """(q, r), (n, r) -> (q, n)."""
        return cosine(queries, examples)

    def sign(self, workspace: Workspace) -> float:
        """The sign of a similarity, which does not depend on the measurement."""
        return 1.0 if workspace.final_passes.task.higher_is_better else -1.0

    def passes_needed(self, workspace: Workspace) -> tuple[dict[str, float], dict[str, int]]:
        """Operations per example of a pass of each kind, and how many, for the estimate."""
        return {"gradients": workspace.tracked.operations}, {"gradients": 1}

    def _cost(self, workspace: Workspace) -> Cost:
        """The counts of all its work."""
        passes = self.passes_needed(workspace)
        return passes_cost(workspace.tracked, workspace.examples, *passes)

    def width(self, workspace: Workspace) -> int:
        """About how many numbers the features of an example have."""
        return 1

    def score(
        self, workspace: Workspace, out: Folder, top: int | None, by: str | None = None
    ) -> Scores:
        at = {stage: self.points(workspace, stage) for stage in workspace.stages}
        places = [(stage, checkpoint) for stage in at for checkpoint, _ in at[stage]]
        writer = self.writer(workspace, out, top, 1 if by else None, places, self._depends_on)
        if writer.already is not None:
            return writer.already
        if workspace.progress:
            announce(self, workspace, self._cost(workspace))
        prepared, queries = self.prepare(workspace), {}
        with workspace.clock("scores"):
            rows, step = None, SELF_BLOCK
            if workspace.query is not None:
                count, last = len(workspace.query), workspace.study.stages[-1]
                all_queries, rows = workspace.query.some(last, np.arange(count)), slice(0, count)
                for _, c in places:
                    if c.sha256 not in queries:
                        queries[c.sha256] = self.features(prepared, all_queries, c, True)
                step = max(workspace.batch_size, SCORES_PER_BLOCK // count)
            step = min(step, max(1, workspace.memory // 32 // self.width(workspace)))
            chunks = workspace.world.mine(workspace.columns(step))
            for chunk in progress_bar(chunks, shown=workspace.progress):
                if writer.done(rows, chunk.place):
                    continue
                stage, points = chunk.stage, at[chunk.stage]
                examples = Queries(workspace.scored_data(stage), stage, chunk.indices)
                values = self._compared(prepared, examples, points, queries)
                scores = (self.sign(workspace) * values).cpu().numpy()
                writer.write(rows, chunk.place, scores, scores[None] if by else None)
        return writer.finish(**self.metadata(workspace))

    def _compared(
        self,
        prepared: Any,
        examples: Queries,
        points: Sequence[tuple[Weights, float]],
        queries: Mapping[str, Tensor],
    ) -> Tensor:
        """Σ_c w_c similarity of these examples with all queries, (q, n), or with themselves."""
        total: Tensor | None = None
        for c, weight in points:
            trained = self.features(prepared, examples, c, False)
            if queries:
                values = self.compare(queries[c.sha256], trained)
            else:
                as_query = trained
                if not self._symmetric:
                    as_query = self.features(prepared, examples, c, True)
                values = self.compare(as_query, trained).diagonal()
            total = weight * values if total is None else total + weight * values
        assert total is not None
        return total
