"""ASTRA (Wang et al., 2025, arXiv 2507.14740): EK-FAC-preconditioned stochastic Neumann iterations.

    w ← w + α_k P⁻¹ (v - (H_k + λ) w)          P = EK-FAC + λ,   λ = 1/(η̄K)

H_k is the Gauss-Newton matrix of all layers on a random minibatch, at one of the checkpoints. From
w = 0, the first step is EK-FAC's answer times α₀, and the limit is (H̄ + λ)⁻¹ v.

*ASTRA-IF* puts w into influence functions. *ASTRA-SOURCE* puts it into every segment of SOURCE,
with F_r(H̄) ≈ (H̄ + λ)⁻¹. SOURCE has exp(-x/λ) = 1 - x F_r(x), so that its survival becomes
1 - H̄ (H̄ + λ)⁻¹ = λ (H̄ + λ)⁻¹: one solve serves both.

The paper chooses α by hand for each task. Here α = 1/ρ, with ρ the largest eigenvalue of P⁻¹(H + λ)
on a minibatch, by power iterations. It falls to zero in the second half, which averages the noise
of the minibatches away.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whence.engine.costs import Workload
from whence.engine.dynamics import Rates
from whence.engine.queries import Queries
from whence.engine.workspace import Term, Workspace
from whence.errors import check_count
from whence.layers.passes import Weights
from whence.methods.gradient import SegmentedMethod, Stretch, Vectors
from whence.operators import KINDS, BlockDiagonal
from whence.operators.gauss_newton import GaussNewton
from whence.run import Segment

POWER_ITERATIONS = 10


@dataclass(frozen=True)
class Neumann:
    """(H̄ + λ)⁻¹ by stochastic iterations.

    Attributes:
        H: the matrix over all data and checkpoints, whose minibatches are drawn.
        λ: the damping, by block.
        iterations, batch, seed: of the method.
    """

    H: GaussNewton
    λ: BlockDiagonal
    iterations: int
    batch: int
    seed: int

    def eigenvalues(self) -> Mapping[str, Tensor]:
        return {} if self.H.preconditioner is None else self.H.preconditioner.eigenvalues()

    def solve(self, v: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """w of each row of v (q, p), and how well it solves the equation."""
        shift = self.H.space.diagonal(self.λ, v)
        precondition = self.H.preconditioning(self.λ)
        matrices = self._minibatches()
        rate = 1 / largest(_damped(next(matrices), shift), precondition, v)
        w, half = torch.zeros_like(v), self.iterations / 2
        for k in range(self.iterations):
            residual = v - _damped(next(matrices), shift)(w)
            share = min(1.0, (self.iterations - k) / half)
            w = w + rate * share * precondition(residual)
        residual = v - _damped(self.H, shift)(w)
        sizes = (residual * precondition(residual)).sum(1) / (v * precondition(v)).sum(1)
        left = sizes.clamp_min(0).sqrt()
        return w, {
            "queries": len(v),
            "iterations": self.iterations,
            "residual": float(left.max()),
            "unconverged": 0,  # a fixed number of iterations, however far they come
        }

    def _minibatches(self) -> Iterator[GaussNewton]:
        """The matrix on one minibatch after another, each of one checkpoint and one shuffle."""
        random, (part,) = np.random.default_rng(self.seed), self.H.data
        size, points = min(self.batch, len(part.indices)), len(self.H.checkpoints)
        while True:
            order = random.permutation(part.indices)
            for start in range(0, len(order) - size + 1, size):
                one = copy.copy(self.H)
                one.data = [replace(part, indices=np.sort(order[start : start + size]))]
                one.checkpoints = [self.H.checkpoints[int(random.integers(points))]]
                yield one


def _damped(H: GaussNewton, shift: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: H.flat_product(x).addcmul_(shift, x)


def largest(
    product: Callable[[Tensor], Tensor], precondition: Callable[[Tensor], Tensor], like: Tensor
) -> float:
    """The largest eigenvalue of P⁻¹A, by power iterations from a fixed start."""
    generator, value = torch.Generator().manual_seed(0), 1.0
    x = torch.randn(1, like.shape[1], generator=generator, dtype=torch.float64).to(like)
    for _ in range(POWER_ITERATIONS):
        x = precondition(product(x / x.norm()))
        value = float(x.norm())
    return value


class AstraSource(SegmentedMethod):
    """SOURCE with the Gauss-Newton matrix of all layers, by stochastic iterations.

    Args:
        iterations: of each segment.
        batch: examples in a minibatch.
        segments, stage, query_at, seed: as in `Source`.
    """

    _joint = True

    def __init__(
        self,
        iterations: int = 200,
        batch: int = 512,
        segments: int | str | Sequence[int] = 3,
        stage: str | None = None,
        query_at: str = "final",
        seed: int = 0,
    ) -> None:
        check_count("iterations", iterations)
        check_count("batch", batch)
        self.iterations, self.batch = iterations, batch
        super().__init__(segments, "ekfac", stage=stage, query_at=query_at, seed=seed)

    def settings(self) -> dict[str, Any]:
        of = ("iterations", "batch", "segments", "stage", "query_at", "seed")
        return {name: getattr(self, name) for name in of}

    def operator(
        self, workspace: Workspace, term: Term, rates: Rates, resident: int
    ) -> tuple[Any, Any, dict[str, float]]:
        """The solver of a segment, and λ."""
        λ = BlockDiagonal({name: 1 / x for name, x in rates.applied.items()})
        how: Any = {"stages": [term.stage], "seed": self.seed, "resident": resident}
        H = workspace.gauss_newton(
            workspace.fit_data([term.stage]),
            term.checkpoints,
            λ,
            1 if workspace.query is None else len(workspace.query),
            preconditioner=KINDS["ekfac"].fit(workspace, term.checkpoints, **how),
        )
        return Neumann(H, λ, self.iterations, self.batch, self.seed), λ, {}

    def vectors(
        self, workspace: Workspace, prepared: dict[int, Stretch], queries: Queries
    ) -> Vectors:
        v = self.query_gradient(workspace, queries, {})
        for k in reversed(prepared):
            segment = prepared[k]
            solver: Any = segment.M  # a `Neumann`
            space = solver.H.space
            flat = space.flatten(
                {name: v.matrix(name) for name in v.values if name in segment.root}
            )
            w, statistics = solver.solve(flat)
            label = f"{queries.label}, segment {k + 1}"
            workspace.ledger.note_solve(label, statistics, math.inf)
            if segment.scored:
                yield [k], space.vectors(w.clone()), -1.0 / segment.count
            v = v.updated(segment.root * space.vectors(w))

    def passes_needed(self, work: Workload) -> dict[str, int]:
        share = self.batch / max(self.batch, work.trained)
        products = work.terms * (1 + (self.iterations + POWER_ITERATIONS) * share)
        return super().passes_needed(work) | {"products": max(1, round(products))}


class AstraInfluence(AstraSource):
    """Influence functions at the final model, by the same iterations.

    Args:
        iterations, batch, stage, seed: as in `AstraSource`.
    """

    def __init__(
        self,
        iterations: int = 200,
        batch: int = 512,
        stage: str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(iterations, batch, "stages", stage, seed=seed)

    def settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("iterations", "batch", "stage", "seed")}

    def points(self, segment: Segment) -> Sequence[Weights]:
        return segment.checkpoints[-1:]
