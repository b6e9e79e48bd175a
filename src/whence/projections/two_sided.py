"""Each layer's gradient from both sides: G ↦ P_o G P_iᵀ (LoGra, Choe et al., 2024).

This is P_o ⊗ P_i on the gradient as a vector. It is computed from a layer's inputs and output
gradients, projected one by one, so it costs a fraction of a projection of all parameters, and no
gradient is ever built.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from whence.errors import InvalidInput
from whence.layers.kind import ParameterBlock
from whence.operators.fit import accumulator
from whence.persist.identity import sha256_of
from whence.projections.gradients import Gradients
from whence.projections.random import Random

Sides = tuple[Tensor, Tensor]  # P_o (k, o), P_i (l, width)


class TwoSided(Random):
    """P_o ⊗ P_i of some blocks, one after another.

    Args:
        blocks: whose gradients to project. A block without gradients counts as zero.
        sides: P_o and P_i of each.
        about: what makes them what they are, for the cache.
    """

    preferred_batch = 1

    def __init__(
        self, blocks: Sequence[ParameterBlock], sides: Sequence[Sides], about: str
    ) -> None:
        like = sides[0][0]
        self.counts = [len(outputs) * len(inputs) for outputs, inputs in sides]
        super().__init__(blocks, sum(self.counts), 0, like.device, like.dtype)
        self.sides, self.about = list(sides), about

    @classmethod
    def random(
        cls,
        blocks: Sequence[ParameterBlock],
        ranks: Sequence[tuple[int, int]],
        key: int,
        like: Tensor,
    ) -> TwoSided:
        """Normal numbers, scaled so that E[PᵀP] = I.

        Args:
            ranks: k and l of each block.
            like: has their device and dtype.
        """
        sides = []
        for block, its_ranks in zip(blocks, ranks, strict=True):
            name = int.from_bytes(bytes.fromhex(sha256_of(block.name))[:8], "little")
            generator = torch.Generator().manual_seed((key ^ name) % 2**63)
            outputs, inputs = (
                torch.randn(few, size, generator=generator, dtype=torch.float64) / few**0.5
                for few, size in zip(its_ranks, block.shape, strict=True)
            )
            sides.append((outputs.to(like), inputs.to(like)))
        return cls(blocks, sides, f"random {key}")

    def __repr__(self) -> str:
        names = [block.name for block in self.blocks]
        shapes = [(tuple(outputs.shape), tuple(inputs.shape)) for outputs, inputs in self.sides]
        return f"TwoSided({names}, {shapes}, {self.about})"

    def project(self, gradients: Mapping[str, Gradients]) -> Tensor:
        n, wide = max(map(len, gradients.values())), accumulator(self.dtype)
        parts = []
        for block, sides, count in zip(self.blocks, self.sides, self.counts, strict=True):
            if block.name in gradients:
                parts.append(self._of(gradients[block.name], *sides).flatten(1).to(wide))
            else:  # another stage may not have the layer
                parts.append(torch.zeros(n, count, device=self.device, dtype=wide))
        return torch.cat(parts, 1)

    def _of(self, gradients: Gradients, outputs: Tensor, inputs: Tensor) -> Tensor:
        """(n, k, l)"""
        if gradients.diagonal is not None:
            return self._whole(gradients.rows(0, gradients.block.o), outputs, inputs)
        pieces = [self._piece(gradients.block, *p, outputs, inputs) for p in gradients.pieces]
        return torch.cat(pieces)

    def _whole(self, gradients: Tensor, outputs: Tensor, inputs: Tensor) -> Tensor:
        return outputs @ (gradients.to(self.dtype) @ inputs.mT)

    def _piece(
        self, block: ParameterBlock, a: Tensor, s: Any, outputs: Tensor, inputs: Tensor
    ) -> Tensor:
        if s is None:
            return self._whole(a, outputs, inputs)
        if not isinstance(s, Tensor):  # rows of an embedding
            return self._whole(Gradients(block, [(a, s)]).rows(0, block.o), outputs, inputs)
        small = a.to(self.dtype) @ inputs[:, : block.i].mT
        if block.bias:
            small = small + inputs[:, block.i]
        return (s.to(self.dtype) @ outputs.mT).mT @ small

    def lift(self, values: Tensor, blocks: Collection[str] | None = None) -> dict[str, Tensor]:
        matrices = {}
        parts = torch.split(values.to(self.dtype), self.counts, 1)
        for block, (outputs, inputs), part in zip(self.blocks, self.sides, parts, strict=True):
            if blocks is not None and block.name not in blocks:
                continue
            small = part.reshape(len(values), len(outputs), len(inputs))
            matrices[block.name] = (outputs.mT @ small @ inputs).to(accumulator(self.dtype))
        return matrices

    def per_coordinate(self, by_block: Mapping[str, float]) -> Tensor:
        """One number per coordinate, (d,), from one number per block."""
        values = torch.tensor([by_block[b.name] for b in self.blocks], dtype=torch.float64)
        return values.repeat_interleave(torch.tensor(self.counts)).to(self.device)


def square_ranks(blocks: Sequence[ParameterBlock], dimension: int) -> list[tuple[int, int]]:
    """k × k for each block, or less where it is smaller, with the largest k for which all blocks
    together have at most `dimension`."""
    if dimension < len(blocks):
        raise InvalidInput(
            f"dimension={dimension} cannot be shared out among {len(blocks)} layers: each gets at "
            "least 1"
        )

    def ranks(k: int) -> list[tuple[int, int]]:
        return [(min(k, block.o), min(k, block.width)) for block in blocks]

    k, most = 1, max(max(block.shape) for block in blocks)
    while k < most and sum(math.prod(pair) for pair in ranks(k + 1)) <= dimension:
        k += 1
    return ranks(k)
