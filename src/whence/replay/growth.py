"""Growth of the derivative of a training, from its end to its start: a sign of chaos."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from whence.errors import NotFinite, warn
from whence.replay.objective import Tensors
from whence.replay.sweep import ReplayWorkspace
from whence.replay.training import Adjoint
from whence.replay.updates import WEIGHT

CHAOS = 1e3  # growth of the adjoint beyond which one trajectory says little about another


def norms(vectors: Tensors) -> Tensor:
    """Norms (q,), summed in a fixed order, so that the bits are always the same."""
    parts = [torch.linalg.vector_norm(vectors[k].flatten(1), dim=1) for k in sorted(vectors)]
    total: Tensor = torch.linalg.vector_norm(torch.stack(parts).double(), dim=0)
    return total


def note_growth(workspace: ReplayWorkspace, step: int, adjoint: Adjoint, before: Tensor) -> None:
    """Record the growth of the adjoint between the end of training and a checkpoint."""
    now = norms({name: state[WEIGHT] for name, state in adjoint.items()})
    if not bool(now.isfinite().all()):
        raise NotFinite(
            f"going back from update {workspace.replay.steps} to {step}, the derivative of the "
            f"training has grown beyond {workspace.replay.dtype}: it is chaotic. Use "
            "curvature='gauss-newton', or dtype=torch.float64"
        )
    logs = (now / before)[before > 0].log()
    tally = workspace.ledger.tallies.setdefault("growth", {}).setdefault(str(step), [0.0, 0])
    tally[0] += float(logs.sum())
    tally[1] += len(logs)


def growth_summary(tallies: dict[str, Any]) -> dict[str, float]:
    """The geometric mean growth at each step; warns of chaos."""
    growth = {
        int(step): math.exp(logs / count) if count else 1.0
        for step, (logs, count) in tallies.get("growth", {}).items()
    }
    worst = max(growth, key=lambda step: growth[step], default=None)
    if worst is not None and growth[worst] > CHAOS:
        warn(
            f"going back to update {worst}, the derivative of this training has grown "
            f"{growth[worst]:.2g} times: it is chaotic, and the exact derivative of one "
            "trajectory says little about retraining. Use Unrolled(curvature='gauss-newton', "
            "expected=True)",
            stacklevel=2,
        )
    return {str(step): growth[step] for step in sorted(growth)}
