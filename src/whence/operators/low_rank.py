"""Arnoldi iteration (Schioppa et al., 2022): the inverse on the leading eigenvectors only.

    (H + λ)⁻¹ v  ≈  Uᵀ (Σ + U λ Uᵀ)⁻¹ U v          U (r, p): the r leading eigenvectors of H

H is the true Gauss-Newton matrix of all tracked layers together. What v has outside of their span
counts as 0, as published. H is symmetric, so the iteration is that of Lanczos.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from whence.errors import InvalidInput, warn
from whence.operators.gauss_newton import GaussNewton
from whence.operators.krylov import Lanczos
from whence.operators.operator import BlockSpace, BlockVectors, Inverse
from whence.persist.cache import FactorCache
from whence.persist.identity import key_of
from whence.progress import progress_bar

ROUGH_RESIDUAL = 0.1  # ‖H u - σ u‖ / σ above which an eigenvector is only roughly known


@dataclass(frozen=True)
class LowRank:
    """The leading eigenvalues (r,) and eigenvectors (r, p) of the Gauss-Newton matrix."""

    space: BlockSpace
    values: Tensor
    vectors: Tensor
    statistics: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def fit(
        cls,
        H: GaussNewton,
        cache: FactorCache,
        like: Tensor,
        memory: int,
        rank: int,
        iterations: int,
        seed: int,
    ) -> LowRank:
        """The eigenpairs that this many iterations find, cached; a killed iteration resumes.

        Args:
            like: a tensor on the device and with the dtype to compute in.
            memory: bytes that the Krylov vectors may take.
        """
        iterations = min(iterations, H.space.size)
        settings = {
            "what": "leading eigenpairs of the Gauss-Newton matrix",
            "identity": [dict(part.identity) for part in H.data],
            "chosen": [key_of({"indices": part.indices.tolist()}) for part in H.data],
            "weights": H.checkpoints[0].sha256,
            "losses": [part.losses(H.checkpoints[0]) for part in H.data],
            "layers": list(H.space.blocks),
            "dtype": H.data[0].passes.arithmetic,
            "seed": seed,
            "rank": rank,
            "iterations": iterations,
        }
        key = key_of(settings)
        pairs = cache.get(key)
        if pairs is None:
            lanczos = _iterated(H, cache, key, _start(H, like, memory, iterations, seed))
            values, vectors, residuals = lanczos.leading(rank)
            pairs = {"values": values, "vectors": vectors, "residuals": residuals}
            pairs["steps"] = torch.tensor(lanczos.done)
            cache.put(key, pairs, settings)
        values, steps = pairs["values"], int(pairs["steps"])
        residuals = pairs["residuals"] / values
        rough = int((residuals > ROUGH_RESIDUAL).sum())
        if rough:
            warn(
                f"{rough} of the {len(values)} leading eigenvectors are only roughly known after "
                f"{steps} iterations: raise iterations, or lower rank to {len(values) - rough}",
                stacklevel=2,
            )
        statistics = {
            "iterations": steps,
            "eigenvalues": values.tolist(),
            "residuals": residuals.tolist(),
        }
        vectors = pairs["vectors"].to(like)
        return cls(H.space, values.to(like), vectors, statistics)

    def inverse(self, damping: Mapping[str, Any]) -> Inverse[BlockVectors]:
        U = self.vectors
        damped = torch.diag(self.values) + (U * self.space.diagonal(damping, U)) @ U.mT

        def solve(v: BlockVectors) -> BlockVectors:
            inside = self.space.flatten({n: v.matrix(n) for n in v.values}) @ U.mT  # (q, r)
            return self.space.vectors(torch.linalg.solve(damped, inside.mT).mT @ U)

        return Inverse(solve)


def _start(H: GaussNewton, like: Tensor, memory: int, iterations: int, seed: int) -> Lanczos:
    """An iteration from a random vector; refused if its vectors do not fit."""
    p = H.space.size
    needed = (iterations + 1) * p * like.element_size()
    if needed > memory:
        raise InvalidInput(
            f"iterations={iterations}: that many vectors of {p:,} parameters take "
            f"{needed / 2**20:,.0f} MiB, and {memory / 2**20:,.0f} are allowed (half of memory=): "
            "lower iterations, raise memory, or track fewer layers"
        )
    start = torch.randn(p, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return Lanczos(start.to(like), iterations)


def _iterated(H: GaussNewton, cache: FactorCache, key: str, lanczos: Lanczos) -> Lanczos:
    """The iteration to its end, from a snapshot if there is one."""
    passes, snapshot = H.data[0].passes, cache.snapshot(key)
    if snapshot is not None:
        lanczos.restore(*snapshot)
    bar = progress_bar(
        total=len(lanczos.alpha),
        initial=lanczos.done,
        desc="Arnoldi iterations",
        shown=passes.progress,
    )
    with passes.clock("iterations"), bar:
        while not lanczos.finished:
            lanczos.step(H.flat_product)
            cache.offer_snapshot(key, *lanczos.state())
            bar.update()
    return lanczos
