"""Vectors over the tracked parameters, and the bases they are written in.

A vector of the space is one matrix (o, width) for each block of parameters; `BlockVectors` holds q
of them, (q, o, width). A block's matrices are written in its eigenbasis while that is cheaper, and
in the parameters' own coordinates (basis None) otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from whence.layers.capture import ParameterBlock


@dataclass(frozen=True)
class Basis:
    """Orthogonal bases of a block's outputs (o, o) and inputs (width, width), as columns.

    Outputs that are `None` are not mixed: an embedding's rows.
    """

    outputs: Tensor | None
    inputs: Tensor

    def to(self, device: torch.device, dtype: torch.dtype) -> Basis:
        outputs = None if self.outputs is None else self.outputs.to(device, dtype)
        return Basis(outputs, self.inputs.to(device, dtype))

    def rotate_inputs(self, a: Tensor) -> Tensor:
        """[a, 1] Q_A: (n, t, i) -> (n, t, width)."""
        n, t, i = a.shape
        flat, q = a.reshape(n * t, i), self.inputs
        rotated = flat @ q if len(q) == i else torch.addmm(q[-1], flat, q[:-1])
        return rotated.view(n, t, -1)

    def rotate_outputs(self, s: Tensor) -> Tensor:
        """s Q_S: (n, t, o) -> (n, t, o)."""
        if self.outputs is None:
            return s
        n, t, o = s.shape
        return (s.reshape(n * t, o) @ self.outputs).view(n, t, o)


def rotate(values: Tensor, source: Basis | None, target: Basis | None) -> Tensor:
    """Matrices (q, o, width) from one basis to another; None is the parameters' own."""
    if source is target:
        return values
    left: Tensor | None = None
    if source is None:
        assert target is not None
        left = None if target.outputs is None else target.outputs.mT
        right = target.inputs
    elif target is None:
        left, right = source.outputs, source.inputs.mT
    else:
        if target.outputs is not None and source.outputs is not None:
            left = target.outputs.mT @ source.outputs
        right = source.inputs.mT @ target.inputs
    q, o, width = values.shape
    rotated = (values.reshape(q * o, width) @ right).view(q, o, width)
    return rotated if left is None else torch.matmul(left, rotated)


class BlockDiagonal(dict[str, float | Tensor]):
    """A diagonal matrix over some blocks: a number for each, or a tensor (o, width) of numbers in
    the parameters' own coordinates."""

    def sqrt(self) -> BlockDiagonal:
        return BlockDiagonal({name: value**0.5 for name, value in self.items()})

    @property
    def scalar(self) -> bool:
        """Whether it is one number for each block, and so the same in every basis."""
        return not any(isinstance(value, Tensor) for value in self.values())

    def __mul__(self, v: BlockVectors) -> BlockVectors:
        """The product with each vector; blocks that the diagonal does not have are left out."""
        return v.times(self)


@dataclass(frozen=True)
class BlockVectors:
    """q vectors: block → matrices (q, o, width), each in some basis.

    Attributes:
        values: the matrices.
        bases: what each is written in.
        scales: a number that a block's matrices are still to be multiplied by (default 1), so that
            a multiplication by a number costs nothing.
    """

    values: dict[str, Tensor]
    bases: dict[str, Basis | None]
    scales: dict[str, float] = field(default_factory=dict)

    def mapped(self, function: Callable[[Tensor], Tensor]) -> BlockVectors:
        """With a function of every block's matrices in their place; their memory is freed."""
        names = list(self.values)
        return replace(self, values={name: function(self.values.pop(name)) for name in names})

    def scale(self, name: str) -> float:
        return self.scales.get(name, 1.0)

    def times(self, factors: Mapping[str, float | Tensor]) -> BlockVectors:
        """Multiplied by a diagonal, restricted to its blocks."""
        values: dict[str, Tensor] = {}
        bases: dict[str, Basis | None] = {}
        scales: dict[str, float] = {}
        for name, value in self.values.items():
            if name not in factors:
                continue
            factor = factors[name]
            if isinstance(factor, Tensor):  # in the parameters' own coordinates
                values[name] = rotate(value, self.bases[name], None) * (factor * self.scale(name))
                bases[name], scales[name] = None, 1.0
            else:
                values[name], bases[name] = value, self.bases[name]
                scales[name] = self.scale(name) * factor
        return BlockVectors(values, bases, scales)

    def __truediv__(self, divisor: Mapping[str, float | Tensor]) -> BlockVectors:
        return self.times({name: 1 / value for name, value in divisor.items()})

    def updated(self, other: BlockVectors) -> BlockVectors:
        """With the blocks of `other` instead of these."""
        return BlockVectors(
            self.values | other.values, self.bases | other.bases, self.scales | other.scales
        )

    def written_in(self, bases: Mapping[str, Basis | None]) -> BlockVectors:
        """The same vectors, each block in its basis; the parameters' own where there is none."""
        target = {name: bases.get(name) for name in self.values}
        values = {
            name: rotate(value, self.bases[name], target[name])
            for name, value in self.values.items()
        }
        return BlockVectors(values, target, self.scales)

    def squared_norm(self) -> Tensor:
        """‖v‖² of each vector, (q,)."""
        squares = [
            v.flatten(1).square().sum(1) * self.scale(name) ** 2 for name, v in self.values.items()
        ]
        return torch.stack(squares).sum(0)

    def matrix(self, name: str) -> Tensor:
        """A block's matrices (q, o, width) in the parameters' own coordinates."""
        value, scale = rotate(self.values[name], self.bases[name], None), self.scale(name)
        return value if scale == 1.0 else value * scale


class BlockSpace:
    """The parameters of some blocks as one vector of p numbers."""

    def __init__(self, blocks: Iterable[ParameterBlock]) -> None:
        self.blocks = {block.name: block for block in blocks}
        self.size = sum(block.size for block in self.blocks.values())

    def flatten(self, values: Mapping[str, Tensor]) -> Tensor:
        """Matrices (q, o, width) as vectors (q, p); absent blocks are 0."""
        like = next(iter(values.values()))
        flat = like.new_zeros(len(like), self.size)
        for name, part in self.unflatten(flat).items():
            if name in values:
                part.copy_(values[name])
        return flat

    def unflatten(self, flat: Tensor) -> dict[str, Tensor]:
        """The matrices (q, o, width) that vectors (q, p) consist of, as views."""
        parts = torch.split(flat, [block.size for block in self.blocks.values()], dim=1)
        named = zip(self.blocks.items(), parts, strict=True)
        return {name: part.reshape(-1, *block.shape) for (name, block), part in named}

    def vectors(self, flat: Tensor) -> BlockVectors:
        """Vectors (q, p) as vectors of the space."""
        values = self.unflatten(flat)
        return BlockVectors(values, dict.fromkeys(values))

    def diagonal(self, given: Mapping[str, float | Tensor], like: Tensor) -> Tensor:
        """A diagonal as a vector (p,), with the dtype and on the device of `like`."""
        parts = []
        for name, block in self.blocks.items():
            value = torch.as_tensor(given[name], dtype=like.dtype, device=like.device)
            parts.append(value.expand(block.shape).flatten())
        return torch.cat(parts) if parts else like.new_zeros(0)
