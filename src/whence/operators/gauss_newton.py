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

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from whence.data import cut
from whence.layers.capture import ParameterBlock, Tape, TrackedLayer
from whence.layers.passes import Passes, Signal, Weights
from whence.layers.tracked import Tracked
from whence.operators import cost
from whence.operators.fit import FitData
from whence.operators.products import Readout
from whence.operators.sums import add_weighted

INSTEAD = "solver='ekfac' or 'datainf' of Influence, or curvature='ekfac' of Source"


class Layout:
    """Where each block's matrix (o, width) lies in one vector of p numbers over all of them."""

    def __init__(self, blocks: Iterable[ParameterBlock]) -> None:
        self.blocks = {block.name: block for block in blocks}
        self.size = sum(block.size for block in self.blocks.values())

    def join(self, values: Mapping[str, Tensor]) -> Tensor:
        """Matrices (q, o, width) as vectors (q, p); absent blocks are 0."""
        queries, *_ = values.values()
        joined = queries.new_zeros(len(queries), self.size)
        for name, part in self.split(joined).items():
            if name in values:
                part.copy_(values[name])
        return joined

    def split(self, vectors: Tensor) -> dict[str, Tensor]:
        """The matrices (q, o, width) that vectors (q, p) are made of, as views."""
        parts = torch.split(vectors, [block.size for block in self.blocks.values()], dim=1)
        named = zip(self.blocks.items(), parts, strict=True)
        return {name: part.reshape(-1, *block.shape) for (name, block), part in named}


def fewer_by_columns(tracked: Tracked, queries: int) -> bool:
    """Whether columns take fewer operations than going along each of so many vectors."""
    along = columns = 0.0
    for block in tracked.blocks:
        t = tracked.positions[block.name]
        along += cost.products_along(block, t, queries)
        columns += cost.products_by_columns(block, t, queries, tracked.outputs)
    return columns < along


@dataclass(frozen=True)
class GaussNewton:
    """H of the mean loss over the data of some parts, mean over some checkpoints.

    Args:
        layout: the parameters it is over; other tracked layers count as constants.
        numbers: how many may be held on the way.
        queries: for about so many vectors at a time; the cheaper of the two ways is gone.
    """

    parts: Sequence[FitData]
    checkpoints: Sequence[Weights]
    layout: Layout
    batch_size: int
    numbers: int
    queries: int

    @property
    def examples(self) -> int:
        """N."""
        return sum(len(part.indices) for part in self.parts)

    def __matmul__(self, vectors: Tensor) -> Tensor:
        """H v of each row: (q, p) -> (q, p)."""
        total = torch.zeros_like(vectors)
        v, totals = self.layout.split(vectors), self.layout.split(total)
        for part, checkpoint in product(self.parts, self.checkpoints):
            part.passes.load(checkpoint)
            if fewer_by_columns(part.passes.tracked, self.queries):
                self._add_by_columns(part, v, totals)
            else:
                self._add_along(part, v, totals)
        if not bool(total.isfinite().all()):
            self._blame()
        return total.div_(self.examples * len(self.checkpoints))

    def _blocks(self, part: FitData) -> list[NDArray[np.int64]]:
        return [part.indices[b] for b in cut(len(part.indices), self.batch_size)]

    def _add_by_columns(
        self, part: FitData, v: dict[str, Tensor], totals: dict[str, Tensor]
    ) -> None:
        bias = {name: block.bias for name, block in self.layout.blocks.items()}
        readouts = {
            name: Readout.of(value, None, bias[name], part.passes.dtype)
            for name, value in v.items()
        }
        queries, *_ = v.values()
        for sweep in part.passes.backward_passes(part.data, self._blocks(part), Signal("exact")):
            pairs = [p for _, found in sweep.pairs for p in found if p.block.name in v]
            inner = queries.new_zeros(len(queries), len(sweep.indices))
            for pair in pairs:
                readouts[pair.block.name].add_inner(inner, pair.a, pair.s)  # gᵀv
            for pair in pairs:
                name = pair.block.name
                add_weighted(totals[name], inner, pair.a, pair.s, bias[name])  # g (gᵀv)

    def _add_along(self, part: FitData, v: dict[str, Tensor], totals: dict[str, Tensor]) -> None:
        queries, *_ = map(len, v.values())
        for model in self._linearised(part, self._blocks(part)):
            held = len(model.outputs) * cost.per_example_numbers(part.passes.tracked)
            for rows in cut(queries, max(1, self.numbers // held)):  # as many as fit
                here = slice(int(rows[0]), int(rows[-1]) + 1)
                along = model.forward({name: value[here] for name, value in v.items()})
                for name, a, s in model.backward(model.bend(along)):
                    _add_summed(totals[name][here], a, s)

    def _linearised(self, part: FitData, blocks: list[NDArray[np.int64]]) -> Iterator[Linearised]:
        passes, known = part.passes, self.layout.blocks
        sites = [site for site in passes.tracked.layers if site.blocks[0].name in known]
        if not sites:  # a stage of layers that were not trained
            return
        for _, batch in part.data.stream(blocks, passes.device, passes.dtype, passes.workers):
            yield Linearised(passes, sites, batch)

    def check(self) -> None:
        """Refuse a model whose backward pass cannot be differentiated: yᵀ(J v) must be (Jᵀy)ᵀv.

        Autograd is silent where an operation hides its second derivative.
        """
        generator = torch.Generator().manual_seed(0)
        for part in self.parts:
            if fewer_by_columns(part.passes.tracked, self.queries):  # asks for none
                continue
            part.passes.load(self.checkpoints[0])
            for model in self._linearised(part, self._blocks(part)[:1]):
                v = torch.randn(1, self.layout.size, generator=generator).to(model.outputs)
                y = torch.randn(1, *model.outputs.shape, generator=generator).to(model.outputs)
                matrices = self.layout.split(v)
                there = (model.forward(matrices) * y).flatten()
                back = torch.stack(
                    [
                        _applied(matrices[name], a).flatten() @ s.flatten()
                        for name, a, s in model.backward(y)
                    ]
                )
                scale = there.abs().sum() + back.abs().sum()
                if bool((there.sum() - back.sum()).abs() > 1e-3 * scale):
                    raise ValueError(_NO_SECOND.format("a custom autograd function?"))

    def _blame(self) -> NoReturn:
        """Look for the example at fault."""
        for part, checkpoint in product(self.parts, self.checkpoints):
            part.passes.load(checkpoint)
            for sweep in part.passes.backward_passes(part.data, self._blocks(part), Signal("loss")):
                for _ in sweep.pairs:  # raises where a gradient is not finite
                    pass
        raise FloatingPointError(
            "a product with the Gauss-Newton matrix is not finite, though all gradients are: "
            f"use dtype=torch.float64, or {INSTEAD}"
        )


class Linearised:
    """A batch's outputs as a linear function J of the layers' parameters, and the loss's Hessian.

    The backward pass u ↦ s = ∂(u · outputs)/∂(layer outputs) is linear in u, and a layer is linear
    in its parameters: J v is the derivative of Σ ⟨s, v a⟩ in u.
    """

    def __init__(self, passes: Passes, sites: Sequence[TrackedLayer], batch: Any) -> None:
        # fused attention has no second derivatives, the plain form has
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), Tape(passes.model, sites) as tape:
            self.outputs = passes.task.outputs(passes.model, batch)
            self._u = torch.zeros_like(self.outputs, requires_grad=True)
            calls = [(site, call) for site in sites for call in tape.calls[site.name]]
            edges = [call.edge for _, call in calls]
            slopes = torch.autograd.grad(
                self.outputs, edges, self._u, create_graph=True, allow_unused=True
            )
            reached = [k for k, slope in enumerate(slopes) if slope is not None]
            self._calls = [calls[k] for k in reached]
            self._edges = [edges[k] for k in reached]
            self._names = [block.name for site, _ in self._calls for block in site.blocks]
            self._a = [x for site, c in self._calls for x in site.kind.inputs(c.module, c.x)]
            self._s = self._positions([slopes[k] for k in reached])
            self._point = self.outputs.detach().requires_grad_()
            loss = passes.task.losses(self._point, batch).sum()
            (self._slope,) = torch.autograd.grad(loss, self._point, create_graph=True)

    def _positions(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of the calls' outputs, of any number of batches, as s (n, t, o) per block."""
        return [
            s
            for (site, call), g in zip(self._calls, gradients, strict=True)
            for s in site.kind.gradients(call.module, g.reshape(-1, *call.shape[1:]))
        ]

    def forward(self, v: Mapping[str, Tensor]) -> Tensor:
        """J v for matrices (q, o, width): (q, n, ...)."""
        tangents = [_applied(v[name], a) for name, a in zip(self._names, self._a, strict=True)]
        moved: Tensor = _each(
            lambda *g: torch.autograd.grad(self._s, self._u, g, **_KEEP)[0], *tangents
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

    def backward(self, y: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Jᵀy as factors: (block, a (n, t, i), s (q n, t, o))."""
        found = _each(lambda g: torch.autograd.grad(self.outputs, self._edges, g, **_KEEP), y)
        yield from zip(self._names, self._a, self._positions(found), strict=True)


_KEEP: Any = {"retain_graph": True, "materialize_grads": True}
_NO_SECOND = (
    "a product with the Gauss-Newton matrix needs second derivatives, and the model has an "
    f"operation without ({{}}): use {INSTEAD}, which need none"
)


def _each(derivative: Callable[..., Any], *vectors: Tensor) -> Any:
    """A derivative along many vectors at once."""
    try:
        return torch.vmap(derivative)(*vectors)
    except RuntimeError as error:
        if "derivative" in str(error) or "differentiate" in str(error):
            raise ValueError(_NO_SECOND.format(error)) from error
        raise


def _applied(v: Tensor, a: Tensor) -> Tensor:
    """v (q, o, width) on inputs a (n, t, i): (q, n, t, o)."""
    (n, t, i), v = a.shape, v.to(a.dtype)
    found = a.reshape(n * t, i) @ v[..., :i].mT
    if v.shape[2] > i:
        found += v[:, None, :, i]
    return found.reshape(len(found), n, t, -1)


def _add_summed(total: Tensor, a: Tensor, s: Tensor) -> None:
    """total (q, o, width) += Σ_{n,t} s aᵀ for a (n, t, i) and s (q n, t, o)."""
    i, s = a.shape[2], s.reshape(len(total), -1, s.shape[2])
    total[..., :i] += s.mT @ a.reshape(-1, i)
    if total.shape[2] > i:
        total[..., i] += s.sum(1)
