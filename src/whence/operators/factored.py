"""Operators in closed form: Q Λ Qᵀ for each block, with Q = Q_S ⊗ Q_A.

EK-FAC, K-FAC, Shampoo, the diagonal and the identity differ only in how Q and Λ are fitted; each is
one short file with a `compute`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import torch
from torch import Tensor

from whence.layers.passes import Weights
from whence.operators.closed_form import whitened_block
from whence.operators.operator import (
    Basis,
    BlockDiagonal,
    BlockVectors,
    ByBlock,
    Function,
    Inverse,
    Operator,
    inverse,
    named,
    rotate,
)
from whence.operators.trimmed import Trimmed
from whence.operators.whitened import Blockwise, Whitened

if TYPE_CHECKING:
    from whence.layers.kind import ParameterBlock
    from whence.operators.fit import Fitter
    from whence.operators.gauss_newton import GaussNewton
    from whence.operators.statistics import FitData


@dataclass(frozen=True)
class EigenFactors:
    """Curvature of one block: eigenvalues (o, width) in a basis (None: the parameters' own).

    `diagonal` (o, width), where it was asked for, is the Gauss-Newton matrix's own diagonal.
    """

    eigenvalues: Tensor
    basis: Basis | None
    diagonal: Tensor | None = None

    def named(self, block: str) -> dict[str, Tensor]:
        """Its tensors, by the names they are stored under."""
        return named({block: self.basis}) | {f"{block}/eigenvalues": self.eigenvalues}

    def parameter_diagonal(self) -> Tensor:
        """The diagonal (o, width) of Q Λ Qᵀ in the parameters' own coordinates."""
        return self.eigenvalues if self.basis is None else self.basis.diagonal(self.eigenvalues)


class OffloadedFactors(Mapping[str, EigenFactors]):
    """Factors that stay elsewhere: a block is brought to the device when it is asked for, and
    leaves it with the next one.

    Args:
        parts: each block's tensors, by name: on the CPU, or at the rank that owns the block, where
            all other ranks have no tensors.
        bring: a block on the device, from its name and tensors. All ranks do it together.
    """

    def __init__(
        self,
        parts: Mapping[str, dict[str, Tensor]],
        bring: Callable[[str, dict[str, Tensor]], EigenFactors],
    ) -> None:
        self._parts, self._bring = parts, bring
        self._last: tuple[str, EigenFactors] | None = None

    def __getitem__(self, name: str) -> EigenFactors:
        if self._last is None or self._last[0] != name:
            tensors = self._parts[name]
            self._last = None  # so that there are never two
            self._last = (name, self._bring(name, tensors))
        return self._last[1]

    def __contains__(self, name: object) -> bool:
        return name in self._parts

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def mapped(
        self, names: Sequence[str], function: Callable[[str, EigenFactors], EigenFactors]
    ) -> OffloadedFactors:
        """With a function of these blocks in their place, computed where a block is kept."""
        parts: dict[str, dict[str, Tensor]] = {}
        for name in names:
            block, tensors = self[name], self._parts[name]
            new = function(name, block).named(name) if tensors else {}
            parts[name] = {key: x.to(next(iter(tensors.values())).device) for key, x in new.items()}
        return OffloadedFactors(parts, self._bring)


class Fits(Protocol):
    """What `fit` needs: a `Workspace`, on whose data curvature is fitted."""

    blocks: dict[str, ParameterBlock]

    def fit_data(self, stages: Sequence[str] | None) -> list[FitData]: ...
    def fitter(
        self, stages: Sequence[str] | None, fisher: str, seed: int, resident: int
    ) -> Fitter: ...
    def gauss_newton(
        self,
        data: Sequence[FitData],
        checkpoints: Sequence[Weights],
        blocks: Mapping[str, Any],
        **settings: Any,
    ) -> GaussNewton: ...


class Factored(Operator[BlockVectors]):
    """c Q Λ Qᵀ + Δ for each block, c and Δ numbers.

    Args:
        factors: Q and Λ by block.
        scale, shift: c (default 1) and Δ (default 0) by block.
        names: the blocks it is over (default: all that have factors).
        memory: bytes that Krylov iterations may use.
        tallies: where their number is noted.
    """

    kind: ClassVar[str]
    #: whether eigenvalues are sums of squares, whose rounding error is squared too
    squared: ClassVar[bool] = True
    #: passes over the data at each checkpoint, by kind of work
    passes: ClassVar[Sequence[str]] = ()

    def __init__(
        self,
        factors: Mapping[str, EigenFactors],
        scale: Mapping[str, float] | None = None,
        shift: Mapping[str, float] | None = None,
        names: Sequence[str] | None = None,
        memory: int = 2**30,
        tallies: dict[str, Any] | None = None,
    ) -> None:
        self.factors, self.memory = factors, memory
        self.tallies = {} if tallies is None else tallies
        self.scale, self.shift = dict(scale or {}), dict(shift or {})
        self.names = list(factors) if names is None else list(names)

    @classmethod
    def fit(
        cls,
        workspace: Fits,
        checkpoints: Sequence[Weights],
        *,
        stages: Sequence[str] | None = None,
        fisher: str = "sampled",
        seed: int = 0,
        resident: int = 1,
        diagonal: bool = False,
    ) -> Self:
        """The curvature averaged over these checkpoints.

        Args:
            stages: whose data it is of, pooled (default: all).
            fisher, seed: of the pseudo-targets, as in `whence.Source`.
            resident: how many such operators are needed at the same time.
            diagonal: keep the Gauss-Newton matrix's own diagonal with the factors.
        """
        fitter = workspace.fitter(stages, fisher, seed, resident)
        factors = fitter.fit(cls, checkpoints, diagonal)
        return cls(factors, memory=fitter.memory, tallies=fitter.tallies)

    @classmethod
    @abstractmethod
    def compute(
        cls, fitter: Fitter, checkpoints: Sequence[Weights], diagonal: bool
    ) -> dict[str, Tensor]:
        """The factors: "<block>/eigenvalues", "/outputs" and "/inputs" where there are bases, and
        "/diagonal" where that is asked for."""

    @classmethod
    def passes_over(cls, checkpoints: int) -> dict[str, int]:
        """How many passes of each kind fitting takes."""
        work = ("covariances", "eigenvalues")
        return {kind: checkpoints * (kind in cls.passes) for kind in work}

    @classmethod
    def whole_blocks(cls, positions: Mapping[str, int]) -> list[str]:
        """Of the blocks with these positions, those whose bases come from whole gradients."""
        return []

    @property
    def bases(self) -> Mapping[str, Basis | None]:
        """The eigenbases, if they are on the device."""
        if isinstance(self.factors, OffloadedFactors):
            return dict.fromkeys(self.names)
        return {name: self.factors[name].basis for name in self.names}

    def block_eigenvalues(self, name: str) -> Tensor:
        """c Λ + Δ of one block, (o, width)."""
        values = self.factors[name].eigenvalues
        scale, shift = self.scale.get(name, 1.0), self.shift.get(name, 0.0)
        values = values if scale == 1.0 else values * scale
        return values if shift == 0.0 else values + shift

    def _apply(
        self, functions: Sequence[Function | None], v: BlockVectors, overwrite: bool
    ) -> list[BlockVectors | None]:
        results = [None if f is None else BlockVectors({}, {}) for f in functions]
        last = max((k for k, f in enumerate(functions) if f is not None), default=-1)
        for name in [name for name in self.names if name in v.values]:
            block, value = self.factors[name], v.values[name]
            rotated, sigma = rotate(value, v.bases[name], block.basis), self.block_eigenvalues(name)
            for k, (f, result) in enumerate(zip(functions, results, strict=True)):
                if f is None or result is None:
                    continue
                factor, basis = f(sigma), block.basis
                if v.scale(name) != 1.0:
                    factor = factor * v.scale(name)
                in_place = k == last and (overwrite or rotated is not value)
                product = rotated.mul_(factor) if in_place else rotated * factor
                if isinstance(self.factors, OffloadedFactors):  # whose basis leaves the device
                    product, basis = rotate(product, basis, None), None
                result.values[name], result.bases[name] = product, basis
        return results

    def inverse(self, damping: float | Mapping[str, float | Tensor]) -> Inverse[BlockVectors]:
        """(H + λ)⁻¹ in closed form; where λ differs within a block, by conjugate gradients."""
        damping = BlockDiagonal.over(self.names, damping)
        names = [name for name in self.names if name in damping]
        if damping.scalar or all(self.factors[name].basis is None for name in names):
            shifted = self.restricted(names) + damping
            solve = partial(shifted.apply, partial(inverse, damping=0.0), overwrite=True)
            return Inverse(solve, self.bases if damping.scalar else {})
        ones = BlockDiagonal(dict.fromkeys(names, 1.0))
        return Whitened(self, ones, {}).inverse(damping)

    def restricted(self, names: Sequence[str]) -> Self:
        """The same, over these blocks only."""
        return self._like(self.factors, self.scale, self.shift, names)

    def trace(self) -> dict[str, float]:
        return {name: float(self.block_eigenvalues(name).sum()) for name in self.names}

    def diagonal(self) -> Mapping[str, Tensor]:
        return ByBlock(self.names, self.diagonal_of)

    def eigenvalues(self) -> Mapping[str, Tensor]:
        return ByBlock(self.names, self.block_eigenvalues)

    def shape_of(self, name: str) -> tuple[int, ...]:
        return tuple(self.factors[name].eigenvalues.shape)

    def diagonal_of(self, name: str) -> Tensor:
        """The diagonal of one block in the parameters' own coordinates, (o, width)."""
        values = self.factors[name].parameter_diagonal()
        return values * self.scale.get(name, 1.0) + self.shift.get(name, 0.0)

    def scaled(self, factors: Mapping[str, float]) -> Self:
        scale = {n: self.scale.get(n, 1.0) * factors.get(n, 1.0) for n in self.names}
        shift = {n: self.shift.get(n, 0.0) * factors.get(n, 1.0) for n in self.names}
        return self._like(self.factors, scale, shift, self.names)

    def __add__(self, shift: float | Mapping[str, float | Tensor]) -> Operator[BlockVectors]:
        shift = BlockDiagonal.over(self.names, shift)
        moved = BlockDiagonal({name: shift.get(name, 0.0) for name in self.names})
        if moved.scalar:
            total = {name: self.shift.get(name, 0.0) + float(x) for name, x in moved.items()}
            return self._like(self.factors, self.scale, total, self.names)
        if all(self.factors[name].basis is None for name in self.names):
            return self._elementwise({n: self.block_eigenvalues(n) + x for n, x in moved.items()})
        return Whitened(self, BlockDiagonal(dict.fromkeys(self.names, 1.0)), moved)

    def whitened(self, diagonal: float | BlockDiagonal) -> Operator[BlockVectors]:
        diagonal = BlockDiagonal.over(self.names, diagonal)
        names = [name for name in self.names if name in diagonal]
        if diagonal.scalar:
            return self.restricted(names).scaled({n: float(diagonal[n]) for n in names})
        if all(self.factors[name].basis is None for name in names):
            return self._elementwise({n: self.block_eigenvalues(n) * diagonal[n] for n in names})
        root = BlockDiagonal({name: diagonal[name] for name in names}).sqrt()
        return Whitened(self, root, {})

    def whitened_in_closed_form(self, diagonal: BlockDiagonal) -> Self:
        """D^½ H D^½ approximately: in its own eigenbases, with its own eigenvalues."""
        names = [name for name in self.names if name in diagonal]
        if diagonal.scalar:  # exactly
            return self.restricted(names).scaled({n: float(diagonal[n]) for n in names})

        def whitened(name: str, block: EigenFactors) -> EigenFactors:
            values = self.block_eigenvalues(name)
            root = torch.as_tensor(diagonal[name]).to(values).sqrt().expand_as(values)
            return EigenFactors(*whitened_block(values, block.basis, root))

        if isinstance(self.factors, OffloadedFactors):
            return self._like(self.factors.mapped(names, whitened))
        return self._like({name: whitened(name, self.factors[name]) for name in names})

    def _like(
        self,
        factors: Mapping[str, EigenFactors],
        scale: Mapping[str, float] | None = None,
        shift: Mapping[str, float] | None = None,
        names: Sequence[str] | None = None,
    ) -> Self:
        return type(self)(factors, scale, shift, names, self.memory, self.tallies)

    def _elementwise(self, values: Mapping[str, Tensor]) -> Self:
        """A diagonal operator with these entries."""
        factors = {n: replace(self.factors[n], eigenvalues=x) for n, x in values.items()}
        return self._like(factors)

    # -- what Krylov iterations ask for ----------------------------------------------------------

    def components(self, names: Sequence[str]) -> list[list[str]]:
        """Blocks that act on each other: here each one alone."""
        return [[name] for name in names]

    def is_diagonal(self, name: str) -> bool:
        """Whether a block has no eigenbasis."""
        return self.factors[name].basis is None

    def rows_of(self, name: str) -> tuple[Tensor, Tensor] | None:
        """Q (width, width) and eigenvalues (o, width), if a block's rows do not mix."""
        basis = self.factors[name].basis
        if basis is None or basis.outputs is not None:
            return None
        return basis.inputs, self.block_eigenvalues(name)

    def product(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """H v of a component, in the parameters' own coordinates: (q, o, width) by block."""
        products = {}
        for name, value in values.items():
            basis = self.factors[name].basis
            rotated = rotate(value, None, basis) * self.block_eigenvalues(name)
            products[name] = rotate(rotated, basis, None)
        return products

    def trimmed(self, errors: Mapping[str, float], share: float) -> Blockwise:
        """`product` with these blocks, each off by at most this error, and by no more than this
        share of its largest eigenvalue."""
        short = {}
        for name, error in errors.items():
            basis, values = self.factors[name].basis, self.block_eigenvalues(name)
            if basis is not None and basis.outputs is not None:
                negligible = min(error, share * float(values.max()))
                short[name] = Trimmed.of(basis.outputs, basis.inputs, values, negligible)

        def product(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
            others = self.product({n: v for n, v in values.items() if n not in short})
            return others | {n: short[n].product(v) for n, v in values.items() if n in short}

        return product
