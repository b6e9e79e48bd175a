"""The lengths of training gradients, example by example."""

from __future__ import annotations

import torch
from torch import Tensor

from whence.engine.queries import Queries
from whence.engine.workspace import LOSS, Workspace
from whence.layers.passes import Weights
from whence.operators.products import squared_norms


def gradient_norms(workspace: Workspace, examples: Queries, checkpoint: Weights) -> Tensor:
    """‖∇L(m, θ_c)‖ over the tracked parameters, (n,)."""
    passes = workspace.passes[examples.stage]
    passes.load(checkpoint)
    squares = torch.zeros(len(examples), dtype=workspace.accumulator, device=workspace.device)
    start = 0
    with passes.clock("norms"):
        for one in passes.backward_passes(
            examples.data, examples.batches(workspace.batch_size), LOSS, "gradient norms"
        ):
            rows = slice(start, start + len(one.indices))
            for factors in one.factors():
                squares[rows] += squared_norms(factors.a, factors.s, factors.block.bias)
            start = rows.stop
    return squares.sqrt()
