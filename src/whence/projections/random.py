"""Random signs: P = R/√d with independent R_kj = ±1, so that E[PᵀP] = I (Achlioptas, 2003).

R is never stored as a whole. Each hash of (key, layer, parameter, word) gives sixty-four of its
entries, so any block of it can be generated at any time and is the same on every device. The R of a
smaller d is the left part of the R of a larger one.

Projecting n gradients of p parameters costs 2npd operations, plus generating pd signs, each of
which costs a CPU about as much as 16 multiplications.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from whence.draws import keys
from whence.errors import InvalidInput
from whence.layers.kind import ParameterBlock
from whence.operators.fit import accumulator
from whence.operators.products import LARGE, buffer
from whence.persist.identity import sha256_of
from whence.projections.gradients import Gradients

WORD = 64  # signs in one hash
#: examples for which generating the signs costs a few percent of projecting
PREFERRED_BATCH = {"cpu": 512, "cuda": 4096}


class Random:
    """A random projection of some blocks' gradients, taken as one long vector, to d numbers.

    Args:
        blocks: whose gradients to project. A block without gradients counts as zero.
        dimension: d.
        key: seeds the signs.
        dtype: of the products; sums are in float32 or wider.
    """

    def __init__(
        self,
        blocks: Sequence[ParameterBlock],
        dimension: int,
        key: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.blocks, self.dimension, self.key = list(blocks), dimension, key
        self.device, self.dtype = device, dtype

    def __repr__(self) -> str:
        return f"Random({[block.name for block in self.blocks]}, {self.dimension}, {self.key})"

    @property
    def names(self) -> list[str]:
        """Of the blocks."""
        return [block.name for block in self.blocks]

    @property
    def preferred_batch(self) -> int:
        return PREFERRED_BATCH.get(self.device.type, PREFERRED_BATCH["cuda"])

    def project(self, gradients: Mapping[str, Gradients]) -> Tensor:
        """P g of every example, (n, d)."""
        n = max(map(len, gradients.values()))
        wide = accumulator(self.dtype)
        total = torch.zeros(n, self.dimension, device=self.device, dtype=wide)
        for block in self.blocks:
            if block.name not in gradients:  # another stage may not have the layer
                continue
            step = max(1, self._limit // (n * block.width))
            for first in range(0, block.o, step):
                last = min(first + step, block.o)
                part = gradients[block.name].rows(first, last).flatten(1).to(self.dtype)
                numbers = range(first * block.width, last * block.width)
                for columns, signs in self._signs(block, numbers):
                    chosen = part[:, columns.start - numbers.start : columns.stop - numbers.start]
                    if wide == self.dtype:
                        total.addmm_(chosen, signs)
                    else:
                        total += chosen @ signs
        return total.div_(self.dimension**0.5)

    def lift(self, values: Tensor, blocks: Collection[str] | None = None) -> dict[str, Tensor]:
        """Pᵀ v of every row of values (q, d), as matrices (q, o, width) of these blocks (None:
        all)."""
        matrices = {}
        values = values.to(self.dtype) / self.dimension**0.5
        for block in self.blocks:
            if blocks is not None and block.name not in blocks:
                continue
            flat = values.new_empty(len(values), block.size, dtype=accumulator(self.dtype))
            for columns, signs in self._signs(block, range(block.size)):
                flat[:, columns.start : columns.stop] = values @ signs.mT
            matrices[block.name] = flat.view(-1, *block.shape)
        return matrices

    def per_coordinate(self, by_block: Mapping[str, float]) -> Tensor:
        """One number per coordinate, (d,). P mixes blocks, so theirs must all be equal."""
        rates = {by_block[block.name] for block in self.blocks}
        if len(rates) > 1:
            raise InvalidInput(
                f"the layers' learning rates differ (η̄K from {min(rates):.3g} to {max(rates):.3g})"
                ", and a joint random projection mixes layers: use joint=False, or the projection "
                "'eigenbasis'"
            )
        return torch.full((self.dimension,), rates.pop(), dtype=torch.float64, device=self.device)

    @property
    def _limit(self) -> int:
        return LARGE.get(self.device.type, LARGE["cuda"])

    def _signs(self, block: ParameterBlock, parameters: range) -> Iterator[tuple[range, Tensor]]:
        """√d Pᵀ for these parameters of a block, (parameters, d), a few at a time."""
        name = int.from_bytes(bytes.fromhex(sha256_of(block.name))[:8], "little")
        words = torch.arange(-(-self.dimension // WORD), device=self.device)
        step = max(1, self._limit // (len(words) * WORD))
        for start in range(parameters.start, parameters.stop, step):
            drawn = range(start, min(start + step, parameters.stop))
            rows = torch.arange(drawn.start, drawn.stop, device=self.device).unsqueeze(1)
            hashes = keys(self.key, name, rows, words, device=self.device)
            signs = signs_of(hashes.view(torch.uint8).view(-1), self.dtype)
            yield drawn, signs.view(len(drawn), -1)[:, : self.dimension]


def signs_of(octets: Tensor, dtype: torch.dtype) -> Tensor:
    """The eight signs of every byte, (n, 8), lowest bit first; the next call overwrites them."""
    return (looked_up if octets.device.type == "cpu" else compared)(octets, dtype)


def looked_up(octets: Tensor, dtype: torch.dtype) -> Tensor:
    table = byte_signs(octets.device, dtype)
    signs = buffer(table, len(octets), 8)
    return torch.index_select(table, 0, octets.to(torch.int32), out=signs)


def compared(octets: Tensor, dtype: torch.dtype) -> Tensor:
    """For GPUs: a lookup of rows this short would take a block of threads for each."""
    plus, minus = byte_signs(octets.device, dtype)[-1, 0], byte_signs(octets.device, dtype)[0, 0]
    bits = (2 ** torch.arange(8, device=octets.device)).to(torch.uint8)
    signs = buffer(plus, len(octets), 8)
    return torch.where((octets.unsqueeze(1) & bits) != 0, plus, minus, out=signs)


@cache
def byte_signs(device: torch.device, dtype: torch.dtype) -> Tensor:
    """The signs of all 256 byte values, (256, 8)."""
    bits = torch.arange(256, device=device).unsqueeze(1) >> torch.arange(8, device=device)
    return (2 * (bits & 1) - 1).to(dtype)


def shares(blocks: Sequence[ParameterBlock], dimension: int) -> list[int]:
    """Divide `dimension` equally, with at most half its number of parameters for each block.

    With more, a block's projected gradients would soon be linearly dependent.
    """
    most = [max(1, block.size // 2) for block in blocks]
    if not len(blocks) <= dimension <= sum(most):
        raise InvalidInput(
            f"dimension={dimension} cannot be shared out among {len(blocks)} layers: with "
            "joint=False each gets at least 1 and at most half the number of its parameters, so "
            f"use {len(blocks)} to {sum(most)}"
        )
    left, dimensions = dimension, [0] * len(blocks)
    smallest_first = sorted(range(len(blocks)), key=lambda k: most[k])
    for place, k in enumerate(smallest_first):
        dimensions[k] = min(left // (len(blocks) - place), most[k])
        left -= dimensions[k]
    return dimensions
