"""TracIn (Pruthi et al., 2020), the checkpoint estimator TracInCP.

    values[q, m] = -Σ_c η_c ∇f(q, θ_c) · ∇L(m, θ_c)                                     (Eq. 30)

η_c is the rate of the last update before checkpoint c. The sign is that of f(with m) - f(without
m).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from whence.data import Batches
from whence.engine.workspace import Readouts, Term, Workspace
from whence.methods.gradient import GradientMethod


class TracIn(GradientMethod):
    """What descending on an example did to the measurement, summed over the checkpoints.

    Args:
        stage: attribute to this stage's examples only (default: all stages').
    """

    _factored = True

    def __init__(self, stage: str | None = None) -> None:
        self.stage = stage

    def terms(self, workspace: Workspace) -> list[Term]:
        return [Term(c.stage, [c]) for c in workspace.run.checkpoints]

    def prepare(self, workspace: Workspace, terms: list[Term]) -> list[Term]:
        return terms

    def vectors(
        self,
        workspace: Workspace,
        prepared: Any,
        data: Batches,
        stage: str,
        indices: np.ndarray,
        examples: int,
    ) -> Iterator[tuple[int, Readouts]]:
        for k, term in enumerate(prepared):
            if term.stage in workspace.stages:
                (checkpoint,) = term.checkpoints
                v = workspace.own_gradients(data, stage, indices, checkpoint)
                η = workspace.rates(partial(workspace.run.rate_at, checkpoint))
                yield k, {name: v.pop(name).scaled(-η[name]) for name in list(v)}
