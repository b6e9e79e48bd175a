"""DataInf (Kwon et al., 2024): the mean of the inverses instead of the inverse of the mean.

    (H_l + λ_l)⁻¹ ≈ (1/N) Σ_i (g_i g_iᵀ + λ_l)⁻¹ = (I - (1/N) Σ_i g_i g_iᵀ / (λ_l + |g_i|²)) / λ_l

layer by layer, with the training losses' gradients g_i: one pass over the data for all queries, and
no factors at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from whence.layers.capture import LayerFactors
from whence.layers.passes import Signal, Weights
from whence.operators.operator import BlockVectors, Inverse
from whence.operators.products import Readout, add_weighted, squared_norms
from whence.operators.statistics import FitData

DAMPING_SHARE = 0.1  # λ_l as published, of the mean square of a gradient's entries


@dataclass(frozen=True)
class DataInf:
    """The gradients of some data at a checkpoint, taken again for every batch of queries."""

    data: Sequence[FitData]
    checkpoint: Weights
    batch_size: int

    @property
    def examples(self) -> int:
        """N."""
        return sum(len(part.indices) for part in self.data)

    def inverse(self, damping: Mapping[str, Any]) -> Inverse[BlockVectors]:
        # where all gradients are 0, so is the published λ; and so are the scores
        positive = {name: float(x) for name, x in damping.items() if x > 0}

        def solve(v: BlockVectors) -> BlockVectors:
            values = {name: v.matrix(name) for name in v.values if name in positive}
            sums = {name: torch.zeros_like(value) for name, value in values.items()}
            readouts: dict[str, Readout] = {}
            for factors in self._gradients():
                name, bias, a, s = factors.block.name, factors.block.bias, factors.a, factors.s
                if name not in values:
                    continue
                if name not in readouts:
                    readouts[name] = Readout.of(values[name], None, bias, a.dtype)
                inner = values[name].new_zeros(len(values[name]), len(a))
                readouts[name].add_inner(inner, a, s)  # g_iᵀ v
                weights = inner / (positive[name] + squared_norms(a, s, bias))
                add_weighted(sums[name], weights, a, s, bias)
            sums = self.data[0].world.total(sums)
            for name, value in values.items():
                value.sub_(sums[name], alpha=1 / self.examples).div_(positive[name])
            return BlockVectors(values, dict.fromkeys(values))

        return Inverse(solve)

    def published_damping(self) -> dict[str, float]:
        """λ_l = 0.1 (1/N) Σ_i |g_i|² / d_l of every block of d_l parameters."""
        blocks = [b for part in self.data for b in part.passes.tracked.blocks]
        sums = {b.name: torch.zeros((), dtype=torch.float64) for b in blocks}
        with self.data[0].passes.clock("norms"):
            for factors in self._gradients("gradient norms"):
                norms = squared_norms(factors.a, factors.s, factors.block.bias)
                mean = float(norms.sum(dtype=torch.float64)) / self.examples
                sums[factors.block.name] += DAMPING_SHARE * mean / factors.block.size
        return {name: float(x) for name, x in self.data[0].world.total(sums).items()}

    def _gradients(self, label: str | None = None) -> Iterator[LayerFactors]:
        """Every layer's training gradients, batch by batch."""
        for part in self.data:
            part.passes.load(self.checkpoint)
            for backward in part.backward_passes(Signal("loss"), self.batch_size, label):
                yield from backward.factors()
