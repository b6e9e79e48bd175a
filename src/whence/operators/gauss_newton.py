"""Products with the true Gauss-Newton matrix of the tracked layers: nothing factored or sampled.

    H v = (1/N) Σ_n J_nᵀ ∇²ℓ_n J_n v

J_n (c, p) is the derivative of an example's c outputs in all tracked parameters together, so layers
are not taken for independent; ∇²ℓ_n is the Hessian of its loss in its outputs. There are two ways
to the same sum for q vectors:

- *along* each vector: J v, a derivative of the backward pass; times ∇²ℓ; and back through the
  model. About 8 t q operations per parameter and example.
- by *columns* of a factor, ∇²ℓ = B Bᵀ: the c gradients g = Jᵀb, kept as (a, s), then Σ g (gᵀv).
  About 4 c (t + q), which is less with many positions (a convolution), few outputs, many vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map_only

from whence.data import batch_length, cut
from whence.errors import InvalidInput, NotFinite
from whence.layers.capture import Outputs, Tape, sides
from whence.layers.kind import TrackedLayer
from whence.layers.passes import Passes, Signal, Weights
from whence.layers.rows import Rows, add_rows
from whence.layers.tracked import Tracked
from whence.operators import cost
from whence.operators.factored import Factored, Fits
from whence.operators.fit import accumulator
from whence.operators.krylov import conjugate_gradients
from whence.operators.operator import (
    BlockDiagonal,
    BlockSpace,
    BlockVectors,
    Function,
    Inverse,
    Operator,
)
from whence.operators.products import Readout, add_squares, add_weighted
from whence.operators.statistics import FitData
from whence.operators.whitened import Blockwise, Whitened
from whence.progress import progress_bar

ALTERNATIVE = "a curvature layer by layer, such as 'ekfac'"


def fewer_by_columns(tracked: Tracked, queries: int) -> bool:
    """Whether columns take fewer operations than one pass along each of these vectors."""
    along = columns = 0.0
    for block in tracked.blocks:
        t = tracked.positions[block.name]
        along += cost.products_along(block, t, queries)
        columns += cost.products_by_columns(block, t, queries, tracked.outputs)
    return columns < along


class GaussNewton(Operator[BlockVectors]):
    """H of the mean loss over some data, mean over some checkpoints.

    Args:
        space: the parameters it is over; other tracked layers count as constants.
        queries: expected number of vectors, which selects the cheaper of the two product
            algorithms; conjugate gradients solve as many at a time.
        memory: bytes that a product, and Krylov iterations, may use.
        tallies: where their number is noted.
        iterations, relative_residual: of conjugate gradients: the maximum, and where to stop.
        preconditioner: of conjugate gradients: an approximation H' of H in closed form.
        flat: of the largest eigenvalue of λ^-½ H' λ^-½: the share that is added to all of them.
    """

    def __init__(
        self,
        data: Sequence[FitData],
        checkpoints: Sequence[Weights],
        space: BlockSpace,
        batch_size: int,
        queries: int,
        memory: int = 2**30,
        tallies: dict[str, Any] | None = None,
        iterations: int = 100,
        relative_residual: float = 0.01,
        preconditioner: Factored | None = None,
        flat: float = 0.0,
    ) -> None:
        self.data, self.checkpoints, self.space = data, checkpoints, space
        self.batch_size, self.queries = batch_size, queries
        self.memory, self.tallies = memory, {} if tallies is None else tallies
        self.iterations, self.relative_residual = iterations, relative_residual
        self.preconditioner, self.flat = preconditioner, flat
        self._products = 0
        self._check()

    @classmethod
    def fit(
        cls,
        workspace: Fits,
        checkpoints: Sequence[Weights],
        *,
        stages: Sequence[str] | None = None,
        **settings: Any,
    ) -> GaussNewton:
        """The matrix over all tracked layers. Nothing is computed before the first product.

        Args:
            stages: whose data it is of, pooled (default: all).
            settings: iterations, relative_residual, preconditioner, flat.
        """
        data = workspace.fit_data(stages)
        return workspace.gauss_newton(data, checkpoints, workspace.blocks, **settings)

    @property
    def block_diagonal(self) -> bool:
        return False

    @property
    def examples(self) -> int:
        """N."""
        return sum(len(part.indices) for part in self.data)

    # -- products --------------------------------------------------------------------------------

    def flat_product(self, vectors: Tensor) -> Tensor:
        """H v of each row: (q, p) -> (q, p)."""
        total = torch.zeros_like(vectors)
        v, totals = self.space.unflatten(vectors), self.space.unflatten(total)
        self._products += 1
        pairs = list(product(self.data, self.checkpoints))
        bar = progress_bar(
            total=sum(len(part.batches(self.batch_size)) for part, _ in pairs),
            desc=f"Gauss-Newton product {self._products}",
            shown=self.data[0].passes.progress,
        )
        with bar:
            for part, checkpoint in pairs:
                part.passes.load(checkpoint)
                if fewer_by_columns(part.passes.tracked, self.queries):
                    self._add_by_columns(part, v, totals, bar)
                else:
                    self._add_along(part, v, totals, bar)
        total = self.data[0].world.total({"product": total})["product"]
        if not bool(total.isfinite().all()):
            self._blame()
        return total.div_(self.examples * len(self.checkpoints))

    def components(self, names: Sequence[str]) -> list[list[str]]:
        """All blocks act on each other."""
        return [list(self.space.blocks)] if names else []

    def is_diagonal(self, name: str) -> bool:
        return False

    def rows_of(self, name: str) -> None:
        """No block has rows that do not mix."""

    def trimmed(self, errors: Mapping[str, float], share: float) -> Blockwise:
        """`product`: nothing is known that could be left out."""
        return self.product

    def product(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """H v in the parameters' own coordinates: (q, o, width) by block."""
        return self.space.unflatten(self.flat_product(self.space.flatten(values)))

    def _add_by_columns(
        self, part: FitData, v: dict[str, Tensor], totals: dict[str, Tensor], bar: Any
    ) -> None:
        bias = {name: block.bias for name, block in self.space.blocks.items()}
        readouts = {
            name: Readout.of(value, None, bias[name], part.passes.dtype)
            for name, value in v.items()
        }
        like = next(iter(v.values()))
        for backward in part.backward_passes(Signal("exact"), self.batch_size):
            layers = [factors for factors in backward.factors() if factors.block.name in v]
            inner = like.new_zeros(len(like), len(backward.indices))
            for factors in layers:
                readouts[factors.block.name].add_inner(inner, factors.a, factors.s)  # gᵀv
            for factors in layers:
                name = factors.block.name
                add_weighted(totals[name], inner, factors.a, factors.s, bias[name])  # g (gᵀv)
            bar.update(backward.last)

    def _add_along(
        self, part: FitData, v: dict[str, Tensor], totals: dict[str, Tensor], bar: Any
    ) -> None:
        queries, passes = len(next(iter(v.values()))), part.passes
        room = min(2**28, self.memory) if passes.device.type == "cpu" else self.memory
        for model in self._linearised(part, part.batches(self.batch_size)):
            numbers = len(model.outputs) * cost.per_example_numbers(passes.tracked)
            for rows in cut(queries, max(1, room // passes.dtype.itemsize // numbers)):  # that fit
                block = slice(int(rows[0]), int(rows[-1]) + 1)
                tangent = model.forward({name: value[block] for name, value in v.items()})
                for name, a, s in model.backward(model.bend(tangent)):
                    _add_summed(totals[name][block], a, s)
            bar.update()

    def _linearised(self, part: FitData, batches: list[NDArray[np.int64]]) -> Iterator[Linearised]:
        passes, known = part.passes, self.space.blocks
        layers = [layer for layer in passes.tracked.layers if layer.blocks[0].name in known]
        if not layers:  # a stage of layers that were not trained
            return
        for _, batch in part.data.stream(batches, passes.device, passes.dtype, passes.workers):
            # max pooling of channels-last images would need `_one_by_one`
            yield Linearised(passes, layers, tree_map_only(Tensor, Tensor.contiguous, batch))

    # -- functions and inverses ------------------------------------------------------------------

    def _apply(
        self, functions: Sequence[Function | None], v: BlockVectors, overwrite: bool
    ) -> list[BlockVectors | None]:
        return (self + {}).apply(functions, v)

    def inverse(self, damping: float | Mapping[str, Any]) -> Inverse[BlockVectors]:
        """By conjugate gradients, `queries` at a time, each until it has converged.

        Preconditioned by λ^-½ (M' + 1)⁻¹ λ^-½ with M' ≈ λ^-½ H' λ^-½, in closed form, of the
        `preconditioner` H'; by λ⁻¹ without one.
        """
        statistics: dict[str, Any] = {}
        damping = BlockDiagonal.over(self.space.blocks, damping)
        precondition = self.preconditioning(damping)

        def solve(v: BlockVectors) -> BlockVectors:
            w = self.space.flatten({name: v.matrix(name) for name in v.values})
            shift = self.space.diagonal(damping, w)
            steps, residuals = [], []
            for rows in cut(len(w), self.queries):
                block = slice(int(rows[0]), int(rows[-1]) + 1)
                solution = conjugate_gradients(
                    lambda x: self.flat_product(x).addcmul_(shift, x),
                    precondition,
                    w[block],
                    self.iterations,
                    self.relative_residual,
                )
                w[block] = solution.x
                steps.append(solution.steps)
                residuals.append(solution.residuals)
            left = torch.cat(residuals)
            statistics.update(
                queries=len(left),
                iterations=int(torch.cat(steps).max()),
                residual=float(left.max()),
                # twice: the one that is followed on the way differs by rounding errors
                unconverged=int((left > 2 * self.relative_residual).sum()),
            )
            return self.space.vectors(w)

        return Inverse(solve, statistics=statistics)

    def preconditioning(self, damping: Mapping[str, Any]) -> Callable[[Tensor], Tensor]:
        """An approximation of (H + λ)⁻¹, from rows (q, p) to rows."""
        D = BlockDiagonal({name: 1 / damping[name] for name in self.space.blocks})
        passes = self.data[0].passes
        zero = torch.zeros((), device=passes.device, dtype=accumulator(passes.dtype))
        applied = self.space.diagonal(D, zero)
        if self.preconditioner is None:
            return applied.mul
        M, root = self.preconditioner.whitened_in_closed_form(D), applied.sqrt_()
        most = max(float(x.max()) for x in M.eigenvalues().values()) if self.flat else 0.0
        damped = M + (1.0 + self.flat * most)

        def precondition(x: Tensor) -> Tensor:
            solved = damped.apply(torch.reciprocal, self.space.vectors(x * root), overwrite=True)
            whole = {name: solved.matrix(name) for name in solved.values}
            return self.space.flatten(whole).mul_(root)

        return precondition

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self.space.blocks[name].shape

    def diagonal_of(self, name: str) -> Tensor | None:
        """Not known without further passes over the data."""
        return None

    def diagonal(self) -> dict[str, Tensor]:
        """The mean square of the columns' gradients: a pass for every output and checkpoint."""
        like = self.data[0].passes
        totals = {
            name: torch.zeros(block.shape, device=like.device, dtype=accumulator(like.dtype))
            for name, block in self.space.blocks.items()
        }
        for part, checkpoint in product(self.data, self.checkpoints):
            part.passes.load(checkpoint)
            for backward in part.backward_passes(Signal("exact"), self.batch_size):
                for factors in backward.factors():
                    block, a, s = factors.block, factors.a, factors.s
                    if block.name in totals:
                        add_squares(totals[block.name], a, s, None, block.bias)
        count = self.examples * len(self.checkpoints)
        return {name: x / count for name, x in self.data[0].world.total(totals).items()}

    def eigenvalues(self) -> dict[str, Tensor]:
        return {}

    def scaled(self, factors: Mapping[str, float]) -> Whitened:
        return (self + {}).scaled(factors)

    def __add__(self, shift: float | Mapping[str, Any]) -> Whitened:
        return Whitened(self, BlockDiagonal.over(self.space.blocks, 1.0), {}) + shift

    def whitened(self, diagonal: float | BlockDiagonal) -> Whitened:
        return (self + {}).whitened(diagonal)

    # -- refusals --------------------------------------------------------------------------------

    def _check(self) -> None:
        """Refuse a model whose backward pass cannot be differentiated: yᵀ(J v) must be (Jᵀy)ᵀv.

        Autograd is silent where an operation hides its second derivative.
        """
        dtype = self.data[0].passes.dtype
        if dtype.itemsize < 4:
            raise InvalidInput(
                f"{dtype} cannot resolve products with the Gauss-Newton matrix: use "
                f"dtype=float32 or float64, or {ALTERNATIVE}"
            )
        generator = torch.Generator().manual_seed(0)
        for part in self.data:
            if fewer_by_columns(part.passes.tracked, self.queries):  # asks for none
                continue
            part.passes.load(self.checkpoints[0])
            for model in self._linearised(part, part.batches(self.batch_size)[:1]):
                v = torch.randn(1, self.space.size, generator=generator).to(model.outputs)
                y = torch.randn(1, *model.outputs.shape, generator=generator).to(model.outputs)
                matrices = self.space.unflatten(v)
                there = (model.forward(matrices) * y).flatten()
                back = torch.stack(
                    [
                        _applied(matrices[name], a, s).flatten() @ _slopes(a, s).flatten()
                        for name, a, s in model.backward(y)
                    ]
                )
                scale = there.abs().sum() + back.abs().sum()
                if bool((there.sum() - back.sum()).abs() > 1e-3 * scale):
                    raise InvalidInput(_NO_SECOND.format("a custom autograd function?"))

    def _blame(self) -> NoReturn:
        """Look for the example at fault."""
        for part, checkpoint in product(self.data, self.checkpoints):
            part.passes.load(checkpoint)
            for backward in part.backward_passes(Signal("loss"), self.batch_size):
                for _ in backward.layers:  # raises where a gradient is not finite
                    pass
        self.data[0].world.wait()  # another rank may have the example
        raise NotFinite(
            "a product with the Gauss-Newton matrix is not finite, though all gradients are: "
            f"use dtype=torch.float64, or {ALTERNATIVE}"
        )


class Linearised:
    """A batch's outputs as a linear function J of the layers' parameters, and the loss's Hessian.

    The backward pass u ↦ s = ∂(u · outputs)/∂(layer outputs) is linear in u, and a layer is linear
    in its parameters: J v is the derivative of Σ ⟨s, v a⟩ in u.

    `replay.objective` has the same product by forward mode, which takes as long. It cannot serve
    here, because vectors are matrices of blocks and not parameters, and recurrent layers have no
    forward mode; nor can this one there, where every parameter of a model in training mode moves,
    also those of no kind of layer, and one captured graph serves the weights of all updates.
    """

    def __init__(self, passes: Passes, layers: Sequence[TrackedLayer], batch: Any) -> None:
        # fused attention has no second derivatives, the plain form has
        tape = Tape(passes.model, layers, batch_length(batch), passes.task.rows(batch))
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), tape:
            self.outputs = passes.task.outputs(passes.model, batch)
            self._u = torch.zeros_like(self.outputs, requires_grad=True)
            calls = [(layer, call) for layer in layers for call in tape.calls[layer.name]]
            edges = [call.edge for _, call in calls]
            slopes = torch.autograd.grad(
                self.outputs, edges, self._u, create_graph=True, allow_unused=True
            )
            reached = [k for k, slope in enumerate(slopes) if slope is not None]
            self._calls = [calls[k] for k in reached]
            self._edges = [edges[k] for k in reached]
            self._blocks = [block for layer, _ in self._calls for block in layer.blocks]
            self._inputs = []
            for layer, call in self._calls:
                parts = call.kind.inputs(call.module, call.x)
                self._inputs += [block.inputs_in(parts) for block in layer.blocks]
            self._factors = self._positions([slopes[k] for k in reached])
            self._point = self.outputs.detach().requires_grad_()
            loss = passes.task.losses(self._point, batch).sum()
            (self._slope,) = torch.autograd.grad(loss, self._point, create_graph=True)

    def _positions(self, gradients: Sequence[Tensor]) -> list[tuple[Tensor, Outputs]]:
        """Gradients of the calls' outputs, of any number of batches, as (a, s) of each block."""
        slopes = []
        for (layer, call), g in zip(self._calls, gradients, strict=True):
            parts = call.kind.gradients(call.module, g.reshape(-1, *call.shape[1:]))
            slopes += [(call.kind, block.slopes_in(parts)) for block in layer.blocks]
        calls = zip(self._blocks, self._inputs, slopes, strict=True)
        return [sides(kind, x, s, block.o) for block, x, (kind, s) in calls]

    def forward(self, v: Mapping[str, Tensor]) -> Tensor:
        """J v for matrices (q, o, width): (q, n, ...)."""
        pairs = zip(self._blocks, self._factors, strict=True)
        tangents = [_applied(v[block.name], a, s) for block, (a, s) in pairs]
        slopes = [_slopes(a, s) for a, s in self._factors]
        moved: Tensor = _each(
            lambda *g: torch.autograd.grad(slopes, self._u, g, **_KEEP)[0], *tangents
        )
        return moved

    def bend(self, y: Tensor) -> Tensor:
        """∇²ℓ y, (q, n, ...)."""
        if not self._slope.requires_grad:  # a loss that is linear in the outputs
            return torch.zeros_like(y)
        bent: Tensor = _each(
            lambda g: torch.autograd.grad(self._slope, self._point, g, **_KEEP)[0], y
        )
        return bent

    def backward(self, y: Tensor) -> Iterator[tuple[str, Tensor, Outputs]]:
        """Jᵀy as factors: (block, a (n, t, i), s (q n, t, o)); of a lookup, a (q n, t, i)."""
        gradients = _each(lambda g: torch.autograd.grad(self.outputs, self._edges, g, **_KEEP), y)
        for block, (a, s) in zip(self._blocks, self._positions(gradients), strict=True):
            yield block.name, a, s


_KEEP: Any = {"retain_graph": True, "materialize_grads": True}
_NO_SECOND = (
    "a product with the Gauss-Newton matrix needs second derivatives, and the model has an "
    f"operation without ({{}}): use {ALTERNATIVE}, which needs none"
)


def _each(derivative: Callable[..., Any], *vectors: Tensor) -> Any:
    """A derivative along many vectors at once."""
    try:
        return torch.vmap(derivative)(*vectors)
    except RuntimeError as error:
        if "vmap" in str(error):  # no batched form: max pooling of channels-last tensors, for one
            return _one_by_one(derivative, *vectors)
        if "derivative" in str(error) or "differentiate" in str(error):
            raise InvalidInput(_NO_SECOND.format(error)) from error
        raise


def _one_by_one(derivative: Callable[..., Any], *vectors: Tensor) -> Any:
    answers = [derivative(*vector) for vector in zip(*vectors, strict=True)]
    if isinstance(answers[0], Tensor):
        return torch.stack(answers)
    return [torch.stack(parts) for parts in zip(*answers, strict=True)]


def _slopes(a: Tensor, s: Outputs) -> Tensor:
    """The side that depends on the backward pass."""
    return a if isinstance(s, Rows) else s


def _applied(v: Tensor, a: Tensor, s: Outputs) -> Tensor:
    """v (q, o, width) on inputs a (n, t, i): (q, n, t, o). Of a lookup, rows (q, n, t, i)."""
    (n, t, i), v = a.shape, v.to(a.dtype)
    if isinstance(s, Rows):
        return v[:, s.ids]
    applied = a.reshape(n * t, i) @ v[..., :i].mT
    if v.shape[2] > i:
        applied += v[:, None, :, i]
    return applied.reshape(len(applied), n, t, -1)


def _add_summed(total: Tensor, a: Tensor, s: Outputs) -> None:
    """total (q, o, width) += Σ_{n,t} s aᵀ for a (n, t, i) and s (q n, t, o)."""
    if isinstance(s, Rows):
        for matrix, rows in zip(total, a.reshape(len(total), -1, a.shape[2]), strict=True):
            add_rows(matrix, s.ids.flatten(), rows)
        return
    i, s = a.shape[2], s.reshape(len(total), -1, s.shape[2])
    total[..., :i] += s.mT @ a.reshape(-1, i)
    if total.shape[2] > i:
        total[..., i] += s.sum(1)
