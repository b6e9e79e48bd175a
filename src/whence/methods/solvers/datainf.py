"""DataInf (Kwon et al., 2024): the mean of the inverses in place of the inverse of the mean.

    (H_l + λ_l)⁻¹ ≈ (1/N) Σ_i (g_i g_iᵀ + λ_l)⁻¹ = (I - (1/N) Σ_i g_i g_iᵀ / (λ_l + |g_i|²)) / λ_l

layer by layer, with the training losses' gradients g_i: one pass over the data for all queries, and
no factors at all. Unless a damping is given, λ_l is 0.1 × the mean of |g_i|² / d_l, as published;
d_l is the number of the layer's parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from whence.data import cut
from whence.engine.workspace import LOSS, Vectors, Workspace
from whence.layers.capture import LayerFactors
from whence.layers.passes import Weights
from whence.methods.solvers.solver import Damping, Solver
from whence.operators import FitData, Readout
from whence.operators.sums import add_weighted, squared_norms

SHARE = 0.1  # λ_l, of the mean square of a gradient's entries


@dataclass(frozen=True)
class DataInf(Solver):
    """The data and weights of the g_i, and λ of each block that responds."""

    defaults: ClassVar[dict[str, Any]] = {"damping": None}

    parts: Sequence[FitData]
    checkpoint: Weights
    batch_size: int
    λ: dict[str, float]

    @classmethod
    def check(cls, **settings: Any) -> None:
        if settings["damping"] == 0:
            raise ValueError("damping=0: DataInf divides by it; give a positive number, or none")

    @classmethod
    def passes(cls, total: int, **settings: Any) -> dict[str, int]:
        return {"norms": int(settings["damping"] is None), "sums": 1}

    @classmethod
    def prepare(
        cls, workspace: Workspace, parts: Sequence[FitData], λ: Damping, **settings: Any
    ) -> Self:
        if λ.matrices is not None:
            raise ValueError(
                "damping='source' is λP̄⁻¹ for a preconditioned optimizer, one number for each "
                "parameter, and DataInf takes one for each layer: give a number, or none"
            )
        # where all gradients are 0, so is the published λ; and so are the scores
        used = {name: x for name, x in λ.numbers.items() if λ.responds(name) and x > 0}
        return cls(parts, workspace.run.final, workspace.batch_size, used)

    def solve(self, v: Vectors) -> tuple[Vectors, dict[str, Any]]:
        values = {name: value for name, value in v.values.items() if name in self.λ}
        sums = {name: torch.zeros_like(value) for name, value in values.items()}
        readouts: dict[str, Readout] = {}
        for pair in _gradients(self.parts, self.checkpoint, self.batch_size):
            name, bias, a, s = pair.block.name, pair.block.bias, pair.a, pair.s
            if name not in values:
                continue
            if name not in readouts:
                readouts[name] = Readout.of(values[name], None, bias, a.dtype)
            inner = values[name].new_zeros(len(values[name]), len(a))
            readouts[name].add_inner(inner, a, s)  # g_iᵀ v
            weights = inner / (self.λ[name] + squared_norms(a, s, bias))
            add_weighted(sums[name], weights, a, s, bias)
        examples = sum(len(part.indices) for part in self.parts)
        for name, value in values.items():
            value.sub_(sums[name], alpha=1 / examples).div_(self.λ[name])
        return Vectors(values, dict.fromkeys(values)), {}


def published_damping(workspace: Workspace, parts: Sequence[FitData]) -> dict[str, float]:
    """λ_l = 0.1 (1/N) Σ_i |g_i|² / d_l of every block."""
    examples = sum(len(part.indices) for part in parts)
    found = dict.fromkeys(workspace.blocks, 0.0)
    with workspace.final_passes.clock("norms"):
        for pair in _gradients(parts, workspace.run.final, workspace.batch_size, "gradient norms"):
            norms = squared_norms(pair.a, pair.s, pair.block.bias)
            mean = float(norms.sum(dtype=torch.float64)) / examples
            found[pair.block.name] += SHARE * mean / pair.block.size
    return found


def _gradients(
    parts: Sequence[FitData], checkpoint: Weights, batch_size: int, label: str | None = None
) -> Iterator[LayerFactors]:
    """Every layer's training gradients, batch by batch."""
    for part in parts:
        part.passes.load(checkpoint)
        blocks = [part.indices[b] for b in cut(len(part.indices), batch_size)]
        for sweep in part.passes.backward_passes(part.data, blocks, LOSS, label):
            for _, pairs in sweep.pairs:
                yield from pairs
