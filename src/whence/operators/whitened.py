"""D^½ H D^½ + Δ for diagonals D and Δ in the parameters' own coordinates.

H and the diagonals share no eigenbasis, so there is no closed form: functions are computed by
Lanczos iterations, inverses by conjugate gradients, each with a few dozen products with H. Blocks
that H does not tie together are solved one after another; rows of a table, that it does not tie
together either, by one Chebyshev series each (`chebyshev.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from whence.data import cut
from whence.errors import warn
from whence.layers.passes import products_as
from whence.operators.chebyshev import RowMatrices
from whence.operators.krylov import (
    TOLERANCE,
    Product,
    Solution,
    conjugate_gradients,
    leading_directions,
    matrix_functions,
)
from whence.operators.operator import (
    BlockDiagonal,
    BlockVectors,
    ByBlock,
    Function,
    Inverse,
    Operator,
)

STEPS, CG_STEPS = 500, 2000  # at most
CG_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
LANCZOS_VECTORS = 10  # per query: right side, answers, and products on the way
KRYLOV_VECTORS = 150  # for each query where products are cheap; half of them are stored
LEADING_STEPS, ENOUGH = 48, 4.0  # products that look for eigenvalues above this number ...
NEGLIGIBLE = 0.3  # share of the tolerance by which M may be off
SMALL_SPACE = 4096  # dimensions; in smaller spaces neither is worth its while
#: numbers in the queries' vectors of a block that are solved at a time: they stay in a CPU's cache
NUMBERS = {"cpu": 1 << 20, "cuda": 1 << 28}

Shape = tuple[int, ...]  # (o, width) of a block
Blockwise = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]  # of (q, o, width) by block


class Matrix(Protocol):
    """What Krylov iterations need to know about H."""

    memory: int  # bytes that the iterations may use
    tallies: dict[str, Any]  # where the number of iterations is noted

    @property
    def block_diagonal(self) -> bool: ...
    def components(self, names: Sequence[str]) -> list[list[str]]: ...
    def is_diagonal(self, name: str) -> bool: ...
    def rows_of(self, name: str) -> tuple[Tensor, Tensor] | None: ...
    def product(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]: ...
    def trimmed(self, errors: Mapping[str, float], share: float) -> Blockwise: ...
    def shape_of(self, name: str) -> Shape: ...
    def diagonal_of(self, name: str) -> Tensor | None: ...
    def diagonal(self) -> Mapping[str, Tensor]: ...


class Whitened(Operator[BlockVectors]):
    """D^½ H D^½ + Δ.

    Args:
        H: the matrix inside.
        root: D^½, of the blocks that this operator is over.
        shift: Δ; 0 for blocks that are not in it.
    """

    def __init__(self, H: Matrix, root: BlockDiagonal, shift: Mapping[str, Any]) -> None:
        self.H, self.root, self.shift = H, root, BlockDiagonal(shift)

    @property
    def block_diagonal(self) -> bool:
        return self.H.block_diagonal

    def _apply(
        self, functions: Sequence[Function | None], v: BlockVectors, overwrite: bool
    ) -> list[BlockVectors | None]:
        results = [None if f is None else BlockVectors({}, {}) for f in functions]
        wanted = [f for f in functions if f is not None]
        for names in self.H.components([name for name in self.root if name in v.values]):
            shapes = {name: self.H.shape_of(name) for name in names}
            right = _right(v, shapes)
            answers = self._functions(names, shapes, wanted, right)
            for result, answer in zip([r for r in results if r is not None], answers, strict=True):
                for name, part in _split(answer, shapes).items():
                    result.values[name], result.bases[name] = part, None
        return results

    def _functions(
        self,
        names: Sequence[str],
        shapes: Mapping[str, Shape],
        functions: Sequence[Function],
        right: Tensor,
    ) -> Sequence[Tensor]:
        """f(M) right of each function over the blocks of one component, (q, p)."""
        if self.H.is_diagonal(names[0]):
            sigma = self._diagonal(names[0], shapes[names[0]], right).flatten(1)
            return [f(sigma) * right for f in functions]
        by_row = self._by_row(names[0], shapes[names[0]], functions, right)
        if by_row is not None:
            return by_row
        tolerance = TOLERANCE[right.dtype]
        product = self._product(shapes, right, self._trimmed(names, right, tolerance))
        answers = right.new_empty(len(functions), *right.shape)
        with products_as("highest"):  # rounded to TF32, products do not converge
            leading = self._leading(product, right, tolerance)
            along = right @ leading.vectors.mT  # (q, r)
            for rows in cut(len(right), self._rows(right)):
                block = slice(int(rows[0]), int(rows[-1]) + 1)
                solution = self._lanczos(leading, product, functions, right[block], tolerance)
                self._note(names, solution, tolerance)
                answers[:, block] = solution.x
                leading.add(answers[:, block], functions, along[block])
        return list(answers)

    def _trimmed(self, names: Sequence[str], right: Tensor, tolerance: float) -> Blockwise:
        """x ↦ H x, without what changes M by less than NEGLIGIBLE of the tolerance.

        exp(-x) and F_r vary no faster than x, so that their errors are not larger.
        """
        share = 0.0 if right.shape[1] < SMALL_SPACE else NEGLIGIBLE * tolerance
        errors = {
            name: share / max(float(torch.as_tensor(self.root[name]).square().max()), 1e-300)
            for name in names
        }
        return self.H.trimmed(errors, share)

    def _leading(self, product: Product, right: Tensor, tolerance: float) -> _Leading:
        """The eigenvectors of M that all queries are first freed from.

        Lanczos iterations take about √σ steps, σ the largest eigenvalue. A few eigenvalues are much
        larger than all others, and their eigenvectors are the same for every query.
        """
        p = right.shape[1]
        if not self.block_diagonal or p < SMALL_SPACE:
            return _Leading(right.new_zeros(0, dtype=torch.float64), right.new_zeros(0, p))
        generator = torch.Generator().manual_seed(p)
        start = torch.randn(p, generator=generator, dtype=torch.float64).to(right)
        return _Leading(*leading_directions(product, start, LEADING_STEPS, ENOUGH, tolerance / 10))

    def _lanczos(
        self,
        leading: _Leading,
        product: Product,
        functions: Sequence[Function],
        right: Tensor,
        tolerance: float,
    ) -> Solution:
        """f(M) of the part of `right` outside the leading eigenvectors."""
        return matrix_functions(
            lambda x: leading.outside(product(x)),
            functions,
            leading.outside(right),
            STEPS,
            tolerance,
            stored=self.H.memory // 2 // (len(right) * _row_bytes(right)),
        )

    def _by_row(
        self, name: str, shape: Shape, functions: Sequence[Function], right: Tensor
    ) -> list[Tensor] | None:
        """The same for a block whose rows have a matrix each; None for all others, and where a
        series would have too many terms."""
        row_factors = self.H.rows_of(name)
        if row_factors is None:
            return None
        root, shift = (_full(x.get(name, 0.0), shape, right)[0] for x in (self.root, self.shift))
        with products_as("highest"):
            matrices = RowMatrices(row_factors[0], row_factors[1], root, shift)
            answers = matrices.functions(functions, right.view(-1, *shape))
        return None if answers is None else [answer.flatten(1) for answer in answers]

    def inverse(self, damping: float | Mapping[str, Any]) -> Inverse[BlockVectors]:
        """A function of Δ^-½ D^½ H D^½ Δ^-½. For a matrix of all layers, and where a Δ is 0, by
        conjugate gradients, preconditioned by the diagonal."""
        damping = BlockDiagonal.over(self.root, damping)
        shift = {n: self.shift.get(n, 0.0) + damping[n] for n in self.root if n in damping}
        shifted = Whitened(self.H, BlockDiagonal({n: self.root[n] for n in shift}), shift)
        return Inverse(shifted._solve)

    def _solve(self, v: BlockVectors) -> BlockVectors:
        result = BlockVectors({}, {})
        for names in self.H.components([name for name in self.root if name in v.values]):
            shapes = {name: self.H.shape_of(name) for name in names}
            result.values.update(_split(self._solved(names, shapes, _right(v, shapes)), shapes))
            result.bases.update(dict.fromkeys(names))
        return result

    def _solved(self, names: Sequence[str], shapes: Mapping[str, Shape], right: Tensor) -> Tensor:
        """M⁻¹ right over the blocks of one component, (q, p)."""
        if self.H.is_diagonal(names[0]):
            return right / self._diagonal(names[0], shapes[names[0]], right).flatten(1)
        shifts = [torch.as_tensor(self.shift.get(name, 0.0)) for name in names]
        if self.block_diagonal and all(bool(shift.all()) for shift in shifts):
            return self._as_function(names, shapes, right)
        diagonal = _join([self._diagonal(n, shapes[n], right) for n in names])
        with products_as("highest"):  # rounded to TF32, products never give five digits
            solution = conjugate_gradients(
                self._product(shapes, right, self.H.product),
                diagonal.reciprocal().mul,
                right,
                CG_STEPS,
                CG_TOLERANCE[right.dtype],
            )
        if bool((solution.steps == CG_STEPS).any()):
            warn(
                f"the inverse of {_named(names)} is only known to "
                f"{float(solution.residuals.max()):.0e} after {CG_STEPS} steps of conjugate "
                "gradients: raise the damping, or use dtype=torch.float64",
                stacklevel=2,
            )
        return solution.x

    def _as_function(
        self, names: Sequence[str], shapes: Mapping[str, Shape], right: Tensor
    ) -> Tensor:
        """Δ^-½ (1 + Δ^-½ D^½ H D^½ Δ^-½)⁻¹ Δ^-½ right."""
        scale = {n: _full(self.shift[n], shapes[n], right)[0] ** -0.5 for n in names}
        root = {n: _full(self.root[n], shapes[n], right)[0] * scale[n] for n in names}
        flat = torch.cat([scale[n].flatten() for n in names])
        scaled = Whitened(self.H, BlockDiagonal(root), {})
        (solved,) = scaled._functions(names, shapes, [lambda x: 1 / (1 + x)], right * flat)
        return solved * flat

    def _product(self, shapes: Mapping[str, Shape], right: Tensor, inner: Blockwise) -> Product:
        """x ↦ (D^½ H D^½ + Δ) x over the blocks of one component, flattened.

        Args:
            inner: x ↦ H x.
        """
        root, shift = (
            _join([_full(diagonal.get(name, 0.0), shape, right) for name, shape in shapes.items()])
            for diagonal in (self.root, self.shift)
        )

        def product(x: Tensor) -> Tensor:
            image = inner(_split(x * root, shapes))
            return _join([image[name] for name in shapes]).mul(root).addcmul_(shift, x)

        return product

    def _rows(self, right: Tensor) -> int:
        """How many queries to solve at a time.

        A product with a matrix of all layers is a pass over the data, so as many queries as fit
        share one. Products with a block are cheap, so that room for their Krylov vectors is better.
        """
        if not self.block_diagonal:
            return max(1, self.H.memory // (LANCZOS_VECTORS * 2 * _row_bytes(right)))
        fit = self.H.memory // ((LANCZOS_VECTORS + KRYLOV_VECTORS) * _row_bytes(right))
        numbers = NUMBERS.get(right.device.type, NUMBERS["cuda"])
        return max(1, min(fit, numbers // max(1, right.shape[1])))

    def _note(self, names: Sequence[str], solution: Solution, tolerance: float) -> None:
        residual, steps = float(solution.residuals.max()), int(solution.steps.max())
        noted = self.H.tallies.setdefault("lanczos", {"iterations": 0, "residual": 0.0})
        if residual > tolerance >= noted["residual"]:
            warn(
                f"the dynamics of {_named(names)} are only known to {residual:.0e} after {steps} "
                "Lanczos steps: use dtype=torch.float64, or a larger floor (for Adam)",
                stacklevel=2,
            )
        noted["iterations"] = max(noted["iterations"], steps)
        noted["residual"] = max(noted["residual"], residual)

    def _diagonal(self, name: str, shape: Shape, like: Tensor) -> Tensor:
        """The diagonal of one block, (1, o, width)."""
        root, shift = (
            _full(diagonal.get(name, 0.0), shape, like) for diagonal in (self.root, self.shift)
        )
        curvature = self.H.diagonal_of(name)
        return shift if curvature is None else root.square() * curvature + shift

    def diagonal(self) -> Mapping[str, Tensor]:
        diagonals = self.H.diagonal()

        def of(name: str) -> Tensor:
            return self.root[name] ** 2 * diagonals[name] + self.shift.get(name, 0.0)

        return ByBlock(list(self.root), of)

    def eigenvalues(self) -> Mapping[str, Tensor]:
        """The diagonal, unless it is of all layers together."""
        return self.diagonal() if self.block_diagonal else {}

    def scaled(self, factors: Mapping[str, float]) -> Whitened:
        root = {name: value * factors.get(name, 1.0) ** 0.5 for name, value in self.root.items()}
        shift = {name: value * factors.get(name, 1.0) for name, value in self.shift.items()}
        return Whitened(self.H, BlockDiagonal(root), shift)

    def __add__(self, shift: float | Mapping[str, Any]) -> Whitened:
        shift = BlockDiagonal.over(self.root, shift)
        total = {name: self.shift.get(name, 0.0) + shift.get(name, 0.0) for name in self.root}
        return Whitened(self.H, self.root, total)

    def whitened(self, diagonal: float | BlockDiagonal) -> Whitened:
        diagonal = BlockDiagonal.over(self.root, diagonal)
        root = {n: value * diagonal[n] ** 0.5 for n, value in self.root.items() if n in diagonal}
        shift = {n: x * diagonal[n] for n, x in self.shift.items() if n in diagonal}
        return Whitened(self.H, BlockDiagonal(root), shift)


@dataclass(frozen=True)
class _Leading:
    """Eigenvalues (r,) and orthonormal eigenvectors (r, p) that are treated apart."""

    values: Tensor
    vectors: Tensor

    def outside(self, x: Tensor) -> Tensor:
        """x (q, p) without its parts along the eigenvectors."""
        if not len(self.values):
            return x
        return torch.addmm(x, x @ self.vectors.mT, self.vectors, alpha=-1)

    def add(self, answers: Tensor, functions: Sequence[Function], along: Tensor) -> None:
        """answers (F, q, p) += each function of the parts `along` (q, r) the eigenvectors."""
        for f, answer in zip(functions, answers, strict=True):
            answer.addmm_(along * f(self.values).to(along), self.vectors)


def _right(v: BlockVectors, shapes: Mapping[str, Shape]) -> Tensor:
    """The vectors over these blocks, (q, p); 0 where they have none."""
    like = next(iter(v.values.values()))
    zeros = {n: like.new_zeros(len(like), *s) for n, s in shapes.items() if n not in v.values}
    return _join([zeros[n] if n in zeros else v.matrix(n) for n in shapes])


def _join(parts: Sequence[Tensor]) -> Tensor:
    """Matrices (q, o, width) of several blocks as vectors (q, p)."""
    return parts[0].flatten(1) if len(parts) == 1 else torch.cat([x.flatten(1) for x in parts], 1)


def _split(flat: Tensor, shapes: Mapping[str, Shape]) -> dict[str, Tensor]:
    """The blocks of vectors (q, p), as views."""
    parts = torch.split(flat, [o * width for o, width in shapes.values()], 1)
    named = zip(shapes.items(), parts, strict=True)
    return {name: part.reshape(-1, *shape) for (name, shape), part in named}


def _full(value: float | Tensor, shape: Shape, like: Tensor) -> Tensor:
    """A number or (o, width) numbers as (1, o, width)."""
    return torch.as_tensor(value, dtype=like.dtype, device=like.device).expand(1, *shape)


def _row_bytes(right: Tensor) -> int:
    return right.element_size() * max(1, right.shape[1])


def _named(names: Sequence[str]) -> str:
    return f"layer {names[0]}" if len(names) == 1 else f"all {len(names)} layers together"
