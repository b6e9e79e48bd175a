"""Cutting a run into segments by looking at it (the paper leaves this to future work).

SOURCE takes the curvature as constant within a segment. So a new one begins where it has visibly
changed: where, averaged over layers, tr(A)·tr(S) is off by more than a factor of two from its
(geometric) mean in the segment so far, or where a stage ends. The covariances are the ones that
SOURCE needs anyway, so looking costs nothing more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from whence.engine.workspace import Workspace
from whence.operators import KINDS
from whence.run import Segment

FACTOR = 2.0


def segments_of(
    workspace: Workspace,
    segments: int | str | Sequence[int],
    curvature: str,
    fisher: str,
    seed: int,
) -> list[Segment]:
    """The segments of the run: as many as asked for, or those found by looking ("auto")."""
    if segments != "auto":
        return workspace.run.segments(segments)
    ends: list[int] = []
    so_far: list[Tensor] = []
    stage = None
    for checkpoint in workspace.run.checkpoints:
        fitter = workspace.fitter([checkpoint.stage], fisher, seed)
        whole = KINDS[curvature].whole_blocks(fitter)
        current = _log_curvature(fitter.covariances(checkpoint, whole), whole)
        new = checkpoint.stage != stage
        if not new:
            mean = torch.stack(so_far).mean(0)
            new = bool((current - mean).abs().mean() > math.log(FACTOR))
        if new:
            so_far = []
            ends.append(checkpoint.step)
        so_far.append(current)
        ends[-1] = checkpoint.step
        stage = checkpoint.stage
    workspace.ledger.diagnostics["segmentation"] = {
        "rule": f"curvature within a factor {FACTOR}",
        "ends": ends,
    }
    return workspace.run.segments(ends)


def _log_curvature(covariances: dict[str, Tensor], whole: Sequence[str]) -> Tensor:
    """log tr(A)·tr(S) of every layer; of whole gradients, each trace alone is the curvature."""
    logs = []
    for name in sorted(key[:-2] for key in covariances if key.endswith("/A")):
        a, s = (float(covariances[f"{name}/{k}"].diagonal().sum()) for k in "AS")
        logs.append(math.log(max(a if name in whole else a * s, 1e-300)))
    return torch.tensor(logs)
