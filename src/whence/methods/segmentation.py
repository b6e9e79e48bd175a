"""Cutting a run into segments by looking at it (the paper leaves this to future work).

SOURCE takes the curvature as constant within a segment. So a new one begins where it has visibly
changed: where, averaged over layers, tr(A)·tr(S) is off by more than a factor of two from its
(geometric) mean in the segment so far, or where a stage ends. The covariances are the ones that
SOURCE needs anyway, so looking costs nothing more.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from whence.engine.workspace import Workspace
from whence.operators import Fitter
from whence.run import Segment

FACTOR = 2.0


def automatic(workspace: Workspace, fitters: dict[str, Fitter]) -> list[Segment]:
    """Segments within which curvature stays within `FACTOR` of its mean; one fitter per stage."""
    ends: list[int] = []
    held: list[Tensor] = []
    stage = None
    for checkpoint in workspace.run.checkpoints:
        now = _log_curvature(fitters[checkpoint.stage].covariances(checkpoint))
        fresh = checkpoint.stage != stage
        if not fresh:
            mean = torch.stack(held).mean(0)
            fresh = bool((now - mean).abs().mean() > math.log(FACTOR))
        if fresh:
            held = []
            ends.append(checkpoint.step)
        held.append(now)
        ends[-1] = checkpoint.step
        stage = checkpoint.stage
    workspace.diagnostics["segmentation"] = {
        "rule": f"curvature within a factor {FACTOR}",
        "ends": ends,
    }
    return workspace.run.segments(ends)


def _log_curvature(covariances: dict[str, Tensor]) -> Tensor:
    """log tr(A)·tr(S) of every layer."""
    names = sorted(name[:-2] for name in covariances if name.endswith("/A"))
    traces = [
        float(covariances[f"{n}/A"].diagonal().sum())
        * float(covariances[f"{n}/S"].diagonal().sum())
        for n in names
    ]
    return torch.tensor([math.log(max(trace, 1e-300)) for trace in traces])
