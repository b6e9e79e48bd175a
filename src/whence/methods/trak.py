"""TRAK (Park et al., 2023): influence functions in a random projection, over several models.

    φ(m) = P ∇f(m, θ_T)        Φ = [φ(1); …; φ(N)]        Q = diag(-∂L/∂f)
    values[q, ·] = φ(q)ᵀ (ΦᵀΦ)⁻¹ Φᵀ Q                                            (appendix B.4)

f is the measurement (for classification the margin, whose -∂L/∂f is 1 - p), P random signs. Since
Q φ(m) = -P ∇L(m) wherever the loss is a function of the measurement, one run's scores are

    values[q, m] = -⟨w_q, ∇L(m, θ_T)⟩        w_q = Pᵀ (ΦᵀΦ)⁻¹ φ(q)

which needs no Q and is also defined where the loss is not such a function. So the projected
gradients are never stored: one pass adds up ΦᵀΦ, another takes inner products with the w_q.

Over several runs the two factors are averaged separately, as published: (mean of φᵀ(ΦᵀΦ)⁻¹Φᵀ) times
(mean of Q). Each run, and so each P, includes all examples, also those it was not trained on.
Stages are pooled, as in the paper. The sign is that of f(with m) - f(without m).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from whence.engine.costs import Workload
from whence.engine.loss_weights import ensemble_weights
from whence.engine.projected_space import Space, projecting
from whence.engine.queries import Queries
from whence.engine.workspace import LOSS, MEASUREMENT, Term, Workspace
from whence.errors import InvalidInput, check_count, check_damping, whole
from whence.layers.passes import Signal
from whence.methods.gradient import GradientMethod, Vectors
from whence.operators.projected import ProjectedVectors
from whence.persist.identity import key_of


@dataclass(frozen=True)
class Prepared:
    """The projected space, Cholesky factors of ΦᵀΦ per part of P, and Q (None for one run)."""

    space: Space
    factors: list[Tensor]
    weights: Mapping[str, Tensor] | None


class Trak(GradientMethod):
    """TRAK with any number of runs; the paper's ensembles are of runs on half the data.

    Args:
        dimension: number of coordinates of the projection. More are closer to the gradients
            themselves, until ΦᵀΦ becomes ill-conditioned; at most the number of training examples.
        seed: seed of the projection; every run has its own.
        stage: attribute to this stage's examples only (default: all stages).
        joint: whether to use one projection for all layers. False uses one per layer: ΦᵀΦ is then
            block-diagonal, and layers share the dimension equally.
        damping: λ in (ΦᵀΦ + NλI)⁻¹. 0 as published.
    """

    _shared = True

    def __init__(
        self,
        dimension: int = 4096,
        seed: int = 0,
        stage: str | None = None,
        joint: bool = True,
        damping: float = 0.0,
    ) -> None:
        check_count("dimension", dimension)
        check_damping(damping)
        self.dimension, self.seed, self.stage = dimension, whole("seed", seed), stage
        self.joint, self.damping = bool(joint), float(damping)

    def prepare(self, workspace: Workspace, terms: list[Term]) -> Prepared:
        examples = sum(len(workspace.study.data[stage]) for stage in workspace.study.stages)
        if len(workspace.study.runs) > 1:  # Q is of what was trained on
            workspace.study.refuse_candidates("Trak over several runs")
        if self.damping == 0 and self.dimension > examples:
            raise InvalidInput(
                f"dimension={self.dimension}, but there are only {examples} training examples, so "
                f"that ΦᵀΦ has no inverse: use dimension<={examples} (well below it is better), or "
                "a damping"
            )
        space = self.space(workspace)
        grams = space.measurement_moments()
        with workspace.clock("factorisation"):
            factors = [cholesky(gram, self.damping, examples, workspace.dtype) for gram in grams]
        return Prepared(space, factors, ensemble_weights(workspace))

    def space(self, workspace: Workspace) -> Space:
        """The space that gradients are projected into."""
        return workspace.projected_space(self.dimension, self.joint, self.seed)

    def vectors(self, workspace: Workspace, prepared: Prepared, queries: Queries) -> Vectors:
        space = prepared.space
        φ = space.gradients(queries, workspace.run.final).values.double()
        parts = zip(space.columns, prepared.factors, strict=True)
        solved = [torch.cholesky_solve(φ[:, columns].T, L).T for columns, L in parts]  # (ΦᵀΦ)⁻¹ φ
        w = space.lift(ProjectedVectors(torch.cat(solved, 1)), queries.blocks)
        sign = -1.0 if prepared.weights is None else 1.0
        yield range(len(workspace.study.stages)), w, sign

    def training(
        self, workspace: Workspace, prepared: Prepared
    ) -> tuple[Signal, Mapping[str, Tensor] | None]:
        return (LOSS, None) if prepared.weights is None else (MEASUREMENT, prepared.weights)

    def passes_needed(self, work: Workload) -> dict[str, int]:
        return {"projection": 1, "scores": 1}

    def operations(self, work: Workload) -> dict[str, float]:
        projection = {"projection": projecting(work.tracked, self.dimension)}
        return super().operations(work) | projection

    def fitted_numbers(self, work: Workload, passes: Mapping[str, int]) -> int:
        return 3 * self.dimension**2

    def key(self, workspace: Workspace) -> str:
        """With several runs, each one's scores depend on all of them, through Q."""
        key, runs = super().key(workspace), [run.fingerprint for run in workspace.study.runs]
        return key if len(runs) == 1 else key_of({"own": key, "runs": runs})


def cholesky(gram: Tensor, damping: float, examples: int, dtype: torch.dtype) -> Tensor:
    """The Cholesky factor of ΦᵀΦ + NλI; refused where Φ's columns are linearly dependent."""
    d = len(gram)
    damped = gram.clone()
    damped.diagonal().add_(damping * examples)
    factor: Tensor
    factor, failed = torch.linalg.cholesky_ex(damped)
    pivots = factor.diagonal().square()
    # the size of a zero pivot after rounding φ in its own precision and ΦᵀΦ in float64
    noise = max((8 * torch.finfo(dtype).eps) ** 2, 8 * d * torch.finfo(torch.float64).eps)
    if bool(failed) or not bool(pivots.min() > noise * pivots.max()):
        raise InvalidInput(
            f"ΦᵀΦ ({d} × {d}) is singular: the projected gradients of the {examples} training "
            "examples are linearly dependent. Use a smaller dimension, or a damping; the mean "
            f"diagonal entry of ΦᵀΦ/N is {float(gram.diagonal().mean()) / examples:.1e}"
        )
    return factor
