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

import torch
from torch import Tensor

from whence.engine.queries import Queries
from whence.engine.workspace import Workspace
from whence.errors import InvalidInput, NotFinite, check_choice
from whence.layers.passes import OUTPUTS, Weights
from whence.layers.representation import representations
from whence.methods.similarity import Similarity, cosine, dot
from whence.table import listed


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


class RepSim(Similarity):
    """The similarity of a query and a training example in the final model.

    Args:
        metric: "cosine" (as in the paper), "dot", or "l2", the negative squared distance.
        layer: the name of the module whose input to compare. Default: `Task.representations` if
            the task defines it, else the input of the last tracked linear layer.
        stage: attribute to this stage's examples only (default: all stages).
    """

    _scope = "model"  # each stage has its own last layer
    _depends_on, _symmetric = OUTPUTS, True

    def __init__(
        self, metric: str = "cosine", layer: str | None = None, stage: str | None = None
    ) -> None:
        check_choice("metric", metric, METRICS)
        self.metric, self.layer, self.stage = metric, layer, stage

    def passes_needed(self, workspace: Workspace) -> tuple[dict[str, float], dict[str, int]]:
        work, _ = super().passes_needed(workspace)
        return {"forward": work["gradients"] / 2}, {"forward": 1}

    def compare(self, queries: Tensor, examples: Tensor) -> Tensor:
        return METRICS[self.metric](queries, examples)

    def features(
        self, prepared: Workspace, examples: Queries, checkpoint: Weights, as_query: bool
    ) -> Tensor:
        """h at the final model, (n, r)."""
        data, stage, workspace = examples.data, examples.stage, prepared
        passes, parts = workspace.passes[stage], []
        passes.load(checkpoint)
        blocks = examples.batches(workspace.batch_size)
        for block, batch in data.stream(blocks, passes.device, passes.dtype, passes.workers):
            h, place = representations(passes, batch, self.layer)
            bad = block[(~h.isfinite().all(1)).cpu().numpy()]
            if len(bad):
                raise NotFinite(
                    f"the representation at {place} is NaN or infinite for {data.name} example "
                    f"{listed(bad)}: correct or leave out the example"
                )
            parts.append(h)
            workspace.ledger.diagnostics.setdefault("representation", {})[stage] = place
        self._check_widths(workspace, stage, parts[0].shape[1])
        return torch.cat(parts)

    @staticmethod
    def _check_widths(workspace: Workspace, stage: str, width: int) -> None:
        """Refuse a stage whose representations do not compare with those of the queries."""
        places, last = workspace.ledger.diagnostics["representation"], workspace.study.stages[-1]
        widths = workspace.ledger.diagnostics.setdefault("representation_width", {})
        widths[stage] = width
        if workspace.query is not None and widths[last] != width:
            raise InvalidInput(
                f"the queries' representations ({places[last]}) have {widths[last]} numbers, those "
                f"of stage {stage!r} ({places[stage]}) {width}: name a layer that both have, "
                "RepSim(layer=...)"
            )
