"""Curvature as an operator on vectors over the tracked parameters.

A vector is one matrix (o, width) for each block of parameters. `BlockVectors` holds q of them,
(q, o, width). A block's matrices are written in its eigenbasis while that is cheaper, and in the
parameters' own coordinates (basis None) otherwise. A curvature is a symmetric positive semidefinite
matrix H that is never written out:

    H = EKFAC.fit(workspace, checkpoints)
    H @ v                       products
    H.apply(f, v)               a function of its eigenvalues, f(H) v; several: H.apply([f, g], v)
    H.inverse(damping) @ v      (H + λ)⁻¹ v
    H.trace()  H.diagonal()     by block
    H.scaled(c)  H + shift  H.whitened(D)      each again an operator

Damping, shift and D are diagonal matrices (`BlockDiagonal`), or one number for all parameters.

`Factored` operators (EK-FAC, K-FAC, the diagonal, the identity) answer in closed form. All others
answer by Krylov iterations (`whitened.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Self, TypeVar, overload

import torch
from torch import Tensor
from torch.nn import functional as F

from whence.layers.kind import ParameterBlock

ALIGNED = {"cuda": 8}  # numbers: 16 bytes of bfloat16
V = TypeVar("V")  # vectors: BlockVectors or ProjectedVectors
Function = Callable[[Tensor], Tensor]  # elementwise on eigenvalues


# --- vectors ------------------------------------------------------------------------------------


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

    def aligned(self) -> Basis:
        """With columns of zeros for the inputs, where they make products faster."""
        missing = padding(self.inputs)
        if missing == 0 or self.outputs is None:
            return self
        return Basis(self.outputs, F.pad(self.inputs, (0, missing)))

    def diagonal(self, values: Tensor) -> Tensor:
        """The diagonal (o, width) of Q Λ Qᵀ in the parameters' own coordinates."""
        if self.outputs is not None:
            values = self.outputs.square() @ values
        return values @ self.inputs.square().mT

    def rotate_inputs(self, a: Tensor) -> Tensor:
        """[a, 1] Q_A: (n, t, i) -> (n, t, width), and what the basis is padded by."""
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


def named(bases: Mapping[str, Basis | None]) -> dict[str, Tensor]:
    """The matrices of these blocks' bases, by the names they are stored under."""
    tensors: dict[str, Tensor] = {}
    for name, basis in bases.items():
        if basis is not None:
            tensors[f"{name}/inputs"] = basis.inputs
        if basis is not None and basis.outputs is not None:
            tensors[f"{name}/outputs"] = basis.outputs
    return tensors


def padding(rows: Tensor) -> int:
    """How many columns of zeros align the rows: a GPU multiplies much more slowly where they are
    not aligned, and a bias makes their length odd."""
    return -rows.shape[-1] % ALIGNED.get(rows.device.type, 1)


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
    missing = padding(values)
    if missing:
        values, right = F.pad(values, (0, missing)), F.pad(right, (0, missing, 0, missing))
    rotated = (values.reshape(q * o, -1) @ right).view(q, o, -1)
    rotated = rotated if left is None else torch.matmul(left, rotated)
    return rotated[..., :width].contiguous() if missing else rotated


class BlockDiagonal(dict[str, float | Tensor]):
    """A diagonal matrix over some blocks: a number for each, or a tensor (o, width) of numbers in
    the parameters' own coordinates."""

    def sqrt(self) -> BlockDiagonal:
        return BlockDiagonal({name: value**0.5 for name, value in self.items()})

    @property
    def scalar(self) -> bool:
        """Whether it is one number for each block, and so the same in every basis."""
        return not any(isinstance(value, Tensor) for value in self.values())

    @classmethod
    def over(cls, names: Iterable[str], given: float | Mapping[str, float | Tensor]) -> Self:
        """A number as the diagonal with that number in all of these blocks."""
        return cls(given if isinstance(given, Mapping) else dict.fromkeys(names, float(given)))

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


class ByBlock(Mapping[str, Tensor]):
    """A tensor for each block, computed when it is asked for: those of all blocks together may not
    fit into memory."""

    def __init__(self, names: Sequence[str], of: Callable[[str], Tensor]) -> None:
        self._names, self._of = names, of

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._of(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


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


# --- operators ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inverse(Generic[V]):
    """(H + λ)⁻¹. `@` may reuse the memory of the vectors it is given.

    Attributes:
        bases: where the vectors are best built; the parameters' own coordinates by default.
        statistics: how the last solve went, if it was iterative.
    """

    solve: Callable[[V], V]
    bases: Mapping[str, Basis | None] = field(default_factory=dict)
    statistics: dict[str, Any] = field(default_factory=dict)

    def __matmul__(self, v: V) -> V:
        return self.solve(v)


class Operator(ABC, Generic[V]):
    """A symmetric positive semidefinite matrix over a space of vectors."""

    @property
    def block_diagonal(self) -> bool:
        """Whether layers are independent of each other, so that a layer's response does not depend
        on the others' (see `coupling`)."""
        return True

    @property
    def bases(self) -> Mapping[str, Basis | None]:
        """The bases in which to build vectors; the parameters' own coordinates by default."""
        return {}

    @overload
    def apply(self, functions: Function, v: V, *, overwrite: bool = ...) -> V: ...
    @overload
    def apply(
        self, functions: Sequence[Function | None], v: V, *, overwrite: bool = ...
    ) -> list[V | None]: ...
    def apply(
        self,
        functions: Function | Sequence[Function | None],
        v: V,
        *,
        overwrite: bool = False,
    ) -> V | list[V | None]:
        """f(H) v for a function f of the eigenvalues, restricted to the blocks of H.

        Args:
            functions: one, or several that share the work, whose results are a list. None is a
                function that is not needed; its result is None.
            overwrite: v is not needed any more, so its memory may be reused.
        """
        if not callable(functions):
            return self._apply(functions, v, overwrite)
        (result,) = self._apply([functions], v, overwrite)
        assert result is not None
        return result

    @abstractmethod
    def _apply(self, functions: Sequence[Function | None], v: V, overwrite: bool) -> list[V | None]:
        """`apply` of several functions."""

    def __matmul__(self, v: V) -> V:
        return self.apply(lambda sigma: sigma, v)

    @abstractmethod
    def inverse(self, damping: Any) -> Inverse[V]:
        """(H + λ)⁻¹, λ a diagonal with a number, or a tensor of numbers, for each block."""

    def trace(self) -> dict[str, float]:
        """The trace of every block."""
        diagonal = self.diagonal()
        return {name: float(diagonal[name].sum()) for name in diagonal}

    @abstractmethod
    def diagonal(self) -> Mapping[str, Tensor]:
        """The diagonal of every block, (o, width), in the parameters' own coordinates."""

    @abstractmethod
    def eigenvalues(self) -> Mapping[str, Tensor]:
        """Eigenvalues of every block; its diagonal if they are unknown; empty if that would take
        passes over the data."""

    @abstractmethod
    def scaled(self, factors: Mapping[str, float]) -> Operator[V]:
        """Each block times a number."""

    @abstractmethod
    def __add__(self, shift: Any) -> Operator[V]:
        """H + a diagonal."""

    @abstractmethod
    def whitened(self, diagonal: Any) -> Operator[V]:
        """D^½ H D^½, restricted to the blocks of the diagonal D."""


def coupling(operator: Operator[Any]) -> dict[str, float]:
    """How much more strongly each block's curvature acts because all layers correct the same error.

    Layers share the outputs. With J = [J₁ … J_L] the Jacobian of all outputs and Θ_ℓ = J_ℓ J_ℓᵀ,
    F(JᵀJ) Jᵀu has the block J_ℓᵀ F(Θ₁ + … + Θ_L) u. Where the layers' kernels Θ_ℓ are proportional
    to each other, this is F(c_ℓ H_ℓ) J_ℓᵀu with

        c_ℓ = Σ_k tr H_k / tr H_ℓ

    A matrix of all layers together needs no such factor: all its blocks get 1.
    """
    if not operator.block_diagonal:
        return {}
    traces = operator.trace()
    total = sum(traces.values())
    return {name: total / trace if trace > 0 else 1.0 for name, trace in traces.items()}


# --- functions of eigenvalues, as in the paper; `duration` is η̄K, rate times updates --------------


def survival(sigma: Tensor, duration: float | Tensor = 1.0) -> Tensor:
    """F_S(σ) = exp(-η̄Kσ): the share of a perturbation that survives a segment (Eq. 13)."""
    return torch.exp(-duration * sigma)


def response(sigma: Tensor, duration: float | Tensor = 1.0) -> Tensor:
    """F_r(σ) = (1 - exp(-η̄Kσ)) / σ: the effect of a constant gradient (Eq. 18); η̄K as σ → 0."""
    x = duration * sigma
    ratio = torch.where(x > 0, -torch.expm1(-x) / torch.where(x > 0, x, 1.0), 1.0)
    return duration * ratio


def decayed(sigma: Tensor) -> Tensor:
    """1 - exp(-σ): the share of a perturbation that does not survive a segment."""
    return -torch.expm1(-sigma)


def inverse(sigma: Tensor, damping: float | Tensor) -> Tensor:
    """F_inv(σ) = 1 / (σ + λ): the counterpart of F_r in influence functions."""
    return 1.0 / (sigma + damping)


def significant(sigma: Tensor, squared: bool) -> Tensor:
    """1 where an eigenvalue is more than the rounding error of a zero, else 0.

    Args:
        squared: eigenvalues are sums of squares (EK-FAC's), whose rounding error is squared too.
    """
    rounding = 8 * torch.finfo(sigma.dtype).eps
    noise = rounding**2 * sigma.sum() if squared else rounding * sigma.max()
    return (sigma > noise).to(sigma.dtype)
