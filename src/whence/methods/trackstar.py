"""TrackStar (Chang et al., 2024): unit gradients in a projection, whitened for task and corpus.

    φ(z) = R^-½ P ∇(z, θ_T) / (√v̂ + ε)              values[q, m] = -cos(φ(q), φ(m))
    R = λ R_query + (1 - λ) R_train                  R_train = (1/N) Σ_m P∇ (P∇)ᵀ / v̂

∇ is the gradient of the loss for examples and of the measurement for queries, P random signs, v̂ the
optimizer's second moments. Unit norms keep examples with large gradients from dominating; mixing in
the queries' own R discounts what all of them share, such as their template. With everything off it
is TracIn at the final model, in a projection. The sign is that of f(with m) - f(without m); the
scale means nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whence.engine.dynamics import preconditioner_at
from whence.engine.projected_space import ProjectedSpace, projecting
from whence.engine.queries import Queries
from whence.engine.workspace import LOSS, MEASUREMENT, Workspace
from whence.errors import InvalidInput, check_count, check_positive, check_share
from whence.layers.passes import Weights
from whence.methods.similarity import Similarity, cosine, dot


@dataclass(frozen=True)
class Prepared:
    """P, 1/(√v̂ + ε), and R^-½ (d, d) once it is known."""

    space: ProjectedSpace
    diagonal: dict[str, Tensor] | None
    root: Tensor | None = None

    def rows(self, examples: Queries, checkpoint: Weights, as_query: bool) -> Any:
        signal = MEASUREMENT if as_query else LOSS
        return self.space.rows(examples, checkpoint, signal, self.diagonal)


class TrackStar(Similarity):
    """The angle between whitened, projected gradients at the final model.

    Args:
        dimension: number of coordinates of the projection.
        mixing: λ, the share of the queries' curvature; 0 takes the training data's only. The paper
            chooses it for each task.
        damping: added to R, in units of its mean eigenvalue.
        unit_norm: compare directions only. False takes inner products.
        second_moments: divide gradients by the roots of Adam's second moments (1 for SGD).
        whiten: multiply by R^-½. False leaves R out.
        seed: seed of the projection.
        stage: attribute to this stage's examples only (default: all stages).
    """

    def __init__(
        self,
        dimension: int = 4096,
        mixing: float = 0.5,
        damping: float = 1e-2,
        unit_norm: bool = True,
        second_moments: bool = True,
        whiten: bool = True,
        seed: int = 0,
        stage: str | None = None,
    ) -> None:
        check_count("dimension", dimension)
        check_share("mixing", mixing)
        check_positive("damping", damping)
        self.dimension, self.mixing, self.damping = dimension, float(mixing), float(damping)
        self.unit_norm, self.second_moments, self.whiten = unit_norm, second_moments, whiten
        self.seed, self.stage = seed, stage

    def prepare(self, workspace: Workspace) -> Prepared:
        final = workspace.run.final
        diagonal = preconditioner_at(workspace, final) if self.second_moments else None
        space = ProjectedSpace.random(workspace, self.dimension, True, self.seed)
        plain = Prepared(space, diagonal)
        if not self.whiten:
            return plain
        parts = {
            False: [
                Queries(workspace.study.data[stage], stage, workspace.used(stage))
                for stage in workspace.study.stages
            ]
        }
        if self.mixing and workspace.query is None:
            raise InvalidInput(
                f"mixing={self.mixing} takes the queries' curvature, and self-influence has no "
                "queries: use mixing=0"
            )
        if self.mixing and workspace.query is not None:
            all_rows = np.arange(len(workspace.query))
            parts[True] = [workspace.query.some(workspace.study.stages[-1], all_rows)]
        R = torch.zeros(self.dimension, self.dimension, dtype=torch.float64)
        R = R.to(workspace.device)
        with workspace.clock("curvature"):
            for as_query, share in ((False, 1 - self.mixing), (True, self.mixing)):
                count = sum(len(part) for part in parts.get(as_query, []))
                for part in parts.get(as_query, []) if share else []:
                    for rows in plain.rows(part, final, as_query):
                        R.addmm_(rows.double().T, rows.double(), alpha=share / count)
            values, vectors = torch.linalg.eigh(R)
            least = self.damping * float(values.clamp_min(0).mean()) or 1.0
            root = (vectors * (values.clamp_min(0) + least).rsqrt()) @ vectors.T
        return Prepared(space, diagonal, root.to(workspace.zero))

    def features(
        self, prepared: Prepared, examples: Queries, checkpoint: Weights, as_query: bool
    ) -> Tensor:
        rows = torch.cat(list(prepared.rows(examples, checkpoint, as_query)))
        return rows if prepared.root is None else rows.to(prepared.root) @ prepared.root

    def compare(self, queries: Tensor, examples: Tensor) -> Tensor:
        return (cosine if self.unit_norm else dot)(queries, examples)

    def sign(self, workspace: Workspace) -> float:
        return -1.0

    def width(self, workspace: Workspace) -> int:
        return self.dimension

    def passes_needed(self, workspace: Workspace) -> tuple[dict[str, float], dict[str, int]]:
        return {"projection": projecting(workspace.tracked, self.dimension)}, {
            "projection": 1 + self.whiten
        }
