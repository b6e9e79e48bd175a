"""RepSim: similarity of hidden representations (Caruana et al., 1999; Hanawa et al., 2021).

    values[q, m] = ± similarity(h(q, θ_T), h(m, θ_T))

with h the input of the last linear layer at the final model, averaged over positions. A similarity
does not depend on the measurement: more similar counts as more helpful. So the sign is + for a
measurement where higher is better and - where lower is better (a loss, an error). As for every
other method, `helpful` ranks the most similar first, and f(S) ≈ const + Σ values has the right
sign.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm.auto import tqdm

from whence.data import Batches, cut
from whence.engine.ledger import announce
from whence.engine.trials import OUTPUTS
from whence.engine.workspace import Workspace
from whence.errors import InvalidInput, NotFinite
from whence.layers.representation import representations
from whence.methods.base import Folder, Method
from whence.operators import cost
from whence.scores import Scores
from whence.table import listed

SCORES_PER_BLOCK = 2**22
SELF_BLOCK = 256  # examples compared with each other to find each one's similarity to itself


def cosine(left: Tensor, right: Tensor) -> Tensor:
    """(q, r), (n, r) -> (q, n); 0 for a vector of zeros."""
    return F.normalize(left, dim=1) @ F.normalize(right, dim=1).T


def dot(left: Tensor, right: Tensor) -> Tensor:
    return left @ right.T


def negative_squared_distance(left: Tensor, right: Tensor) -> Tensor:
    """Computed in float64, because the distance of near duplicates is a small difference."""
    a, b = left.double(), right.double()
    squares = a.square().sum(1, keepdim=True) + b.square().sum(1)
    return torch.addmm(-squares, a, b.T, alpha=2).clamp_max(0).to(left.dtype)


METRICS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cosine": cosine,
    "dot": dot,
    "l2": negative_squared_distance,
}


class RepSim(Method):
    """The similarity of a query and a training example in the final model.

    Args:
        metric: "cosine" (as in the paper), "dot", or "l2", the negative squared distance.
        layer: the name of the module whose input to compare. Default: `Task.representations` if
            the task defines it, else the input of the last tracked linear layer.
        stage: attribute to this stage's examples only (default: all stages').
    """

    _own_layers = True  # each stage has its own last layer

    def __init__(
        self, metric: str = "cosine", layer: str | None = None, stage: str | None = None
    ) -> None:
        if metric not in METRICS:
            known = ", ".join(map(repr, METRICS))
            raise InvalidInput(f"metric={metric!r} is not known: use one of {known}")
        self.metric, self.layer, self.stage = metric, layer, stage

    def score(self, workspace: Workspace, out: Folder, top: int | None, by_segment: bool) -> Scores:
        places = [(stage, workspace.run.final) for stage in workspace.stages]
        writer = self.writer(workspace, out, top, 1 if by_segment else None, places, OUTPUTS)
        if writer.already is not None:
            return writer.already
        tracked = workspace.tracked
        forward = sum(
            cost.forward_backward(b, tracked.positions[b.name]) / 2 for b in tracked.blocks
        )
        announce(self, workspace, {"forward": forward}, {"forward": 1}, 0)
        sign = 1.0 if workspace.final_passes.task.higher_is_better else -1.0
        similarity, last = METRICS[self.metric], workspace.study.stages[-1]
        with workspace.clock("scores"):
            queries, rows, step = None, None, SELF_BLOCK
            if workspace.query is not None:
                queries = self._representations(
                    workspace, last, workspace.query, np.arange(len(workspace.query))
                )
                rows = slice(0, len(queries))
                step = max(workspace.batch_size, SCORES_PER_BLOCK // len(queries))
            chunks = workspace.world.mine(workspace.columns(step))
            for chunk in tqdm(chunks, disable=not workspace.progress, leave=False):
                if writer.done(rows, chunk.place):
                    continue
                data = workspace.study.data[chunk.stage]
                examples = self._representations(workspace, chunk.stage, data, chunk.indices)
                if queries is None:
                    values = similarity(examples, examples).diagonal()
                else:
                    self._check_widths(workspace, queries, examples, chunk.stage)
                    values = similarity(queries, examples)
                scores = (sign * values).cpu().numpy()
                writer.write(rows, chunk.place, scores, scores[None] if by_segment else None)
        return writer.finish(**self.metadata(workspace))

    def _representations(
        self, workspace: Workspace, stage: str, data: Batches, indices: np.ndarray
    ) -> Tensor:
        """h at the final model, (n, r)."""
        passes, parts = workspace.passes[stage], []
        passes.load(workspace.run.final)
        blocks = [indices[b] for b in cut(len(indices), workspace.batch_size)]
        for block, batch in data.stream(blocks, passes.device, passes.dtype, passes.workers):
            h, place = representations(passes, batch, self.layer)
            bad = block[(~h.isfinite().all(1)).cpu().numpy()]
            if len(bad):
                raise NotFinite(
                    f"the representation at {place} is NaN or infinite for {data.name} example "
                    f"{listed(bad)}: mend or leave out the example"
                )
            parts.append(h)
            workspace.ledger.diagnostics.setdefault("representation", {})[stage] = place
        return torch.cat(parts)

    @staticmethod
    def _check_widths(workspace: Workspace, queries: Tensor, examples: Tensor, stage: str) -> None:
        if queries.shape[1] != examples.shape[1]:
            places = workspace.ledger.diagnostics["representation"]
            raise InvalidInput(
                f"the queries' representations ({places[workspace.study.stages[-1]]}) have "
                f"{queries.shape[1]} numbers, those of stage {stage!r} ({places[stage]}) "
                f"{examples.shape[1]}: name a layer that both have, RepSim(layer=...)"
            )
