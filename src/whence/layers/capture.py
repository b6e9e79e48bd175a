"""One forward pass, any number of backward passes, and every tracked layer's (a, s).

Hooks record each call's input and the *gradient edge* of its output, before an in-place activation
can change it. The backward pass asks autograd for the gradients at those edges only, so no
parameter gradient is ever computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from whence.layers.kind import Kind


@dataclass(frozen=True)
class ParameterBlock:
    """One (o, i) matrix of parameters, its bias as a last column."""

    name: str
    o: int
    i: int  # without the bias coordinate
    bias: bool
    parameter: str  # the weight's name in the model

    @property
    def width(self) -> int:
        """Columns, the bias included."""
        return self.i + self.bias

    @property
    def shape(self) -> tuple[int, int]:
        return self.o, self.width

    @property
    def size(self) -> int:
        return self.o * self.width


class LayerFactors:
    """Inputs `a` (n, t, i) and output gradients `s` (n, t, o) of one block; mask (n, t) or None.

    `a` is computed on first access, because a convolution's patches are large and not every use
    needs them. The positions of several calls (`calls`) follow one another.
    """

    def __init__(
        self,
        block: ParameterBlock,
        inputs: Callable[[], Tensor],
        s: Tensor,
        mask: Tensor | None = None,
        add_gram: Callable[[Tensor], Tensor | None] | None = None,
        calls: int = 1,
    ) -> None:
        self.calls = calls
        self.block, self.s, self.mask = block, s, mask
        self._inputs, self._add_gram = inputs, add_gram

    @cached_property
    def a(self) -> Tensor:
        return self._inputs()

    def add_gram(self, total: Tensor) -> Tensor | None:
        """Add Σ a aᵀ by the shortcut of the layer's kind; None if it has none (see `Kind`)."""
        return None if self._add_gram is None else self._add_gram(total)


@dataclass(eq=False)
class TrackedLayer:
    """A tracked layer: the module (or the modules that share its parameters) and its blocks."""

    name: str
    kind: Kind
    weight: str
    bias: str | None
    modules: list[nn.Module] = field(default_factory=list)

    @property
    def blocks(self) -> list[ParameterBlock]:
        groups, o, i = self.kind.shape(self.modules[0])
        names = [self.name] if groups == 1 else [f"{self.name}[{g}]" for g in range(groups)]
        return [ParameterBlock(name, o, i, self.bias is not None, self.weight) for name in names]

    def parameter_names(self) -> list[str]:
        return [self.weight] + ([self.bias] if self.bias else [])


@dataclass
class _Call:
    module: nn.Module
    x: Tensor
    version: int
    edge: GradientEdge
    shape: torch.Size  # of the output
    order: int


class Tape:
    """Records a forward pass inside the `with`; call `backward` as often as needed afterwards.

    Inside the `with`, only the tracked weights require gradients, so that autograd builds the
    graph. The model is the library's own copy.
    """

    def __init__(self, model: nn.Module, layers: Sequence[TrackedLayer]) -> None:
        self.model, self.layers = model, layers
        self.calls: dict[str, list[_Call]] = {layer.name: [] for layer in layers}
        self._failures: dict[str, str] = {}
        self._count = 0

    def __enter__(self) -> Self:
        self._handles: list[RemovableHandle] = []
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)
        for layer in self.layers:
            for module in layer.modules:
                module._parameters["weight"].requires_grad_(True)  # type: ignore[union-attr]
                self._handles.append(module.register_forward_hook(self._hook(layer)))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, layer: TrackedLayer) -> Any:
        def note(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            if not inputs or not isinstance(inputs[0], Tensor) or not isinstance(output, Tensor):
                self._failures[layer.name] = "it is not called with one tensor, or returns none"
                return
            if not output.requires_grad:
                self._failures[layer.name] = (
                    "it is called without gradients (torch.no_grad in the model?)"
                )
                return
            # an in-place operation on a view rewires the view, but never the node of its base
            base = output._base if output._is_view() else None
            whole = base is not None and base.requires_grad and base.numel() == output.numel()
            edge = get_gradient_edge(base if base is not None and whole else output)
            x = inputs[0].detach()
            call = _Call(module, x, x._version, edge, output.shape, self._count)
            self._count += 1
            self.calls[layer.name].append(call)

        return note

    def problem(self, layer: TrackedLayer, n: int) -> str | None:
        """Why this layer's calls cannot be used for n examples; None if they can."""
        if layer.name in self._failures:
            return self._failures[layer.name]
        calls = self.calls[layer.name]
        if not calls:
            return "its forward is never called (unused, or its weight is used directly)"
        shapes = [tuple(call.x.shape) for call in calls if len(call.x) != n or call.x.dim() < 2]
        if shapes:
            return f"its input {shapes[0]} does not have the {n} examples of the batch in front"
        if any(call.x._version != call.version for call in calls):
            return "its input is changed in place after it is read"
        return None

    def first_call(self, layer: TrackedLayer) -> int:
        return self.calls[layer.name][0].order

    def backward(
        self,
        output: Tensor,
        gradient: Tensor | None = None,
        mask: Tensor | None = None,
        keep: bool = True,
    ) -> Iterator[tuple[TrackedLayer, list[LayerFactors]]]:
        """Each layer's factors for d(output)/d(...), in forward order.

        Args:
            output: a scalar (summed losses), or the outputs when `gradient` is given.
            mask: positions that exist, (n, t).
            keep: whether to keep the graph for another backward pass.
        """
        calls = [call for layer in self.layers for call in self.calls[layer.name]]
        at_edges = torch.autograd.grad(
            output, [call.edge for call in calls], gradient, retain_graph=keep, allow_unused=True
        )
        gradients = dict(zip(map(id, calls), at_edges, strict=True))
        mask = None if mask is None or bool(mask.all()) else mask
        for layer in self.layers:
            its_calls = [(call, gradients.pop(id(call))) for call in self.calls[layer.name]]
            yield layer, self._factors(layer, its_calls, mask)

    def _factors(
        self, layer: TrackedLayer, calls: Sequence[tuple[_Call, Tensor | None]], mask: Tensor | None
    ) -> list[LayerFactors]:
        parts = cache(lambda: [layer.kind.inputs(call.module, call.x) for call, _ in calls])
        slopes: list[list[Tensor]] = []
        for (call, gradient), k in zip(calls, range(len(calls)), strict=True):
            if gradient is None:  # the loss does not depend on this call
                o = layer.blocks[0].o
                slopes.append([a.new_zeros(*a.shape[:2], o) for a in parts()[k]])
            else:
                slopes.append(layer.kind.gradients(call.module, gradient.reshape(call.shape)))
        shortcut = None
        if len(calls) == 1 and len(layer.blocks) == 1:
            shortcut = partial(layer.kind.add_gram, calls[0][0].module, calls[0][0].x)
        factors = []
        for k, block in enumerate(layer.blocks):
            s = [slope[k] for slope in slopes]
            inputs = partial(lambda k: _joined([part[k] for part in parts()]), k)
            factors.append(
                LayerFactors(
                    block, inputs, _joined(s), _mask_for(calls, s, mask), shortcut, len(calls)
                )
            )
        return factors


def _joined(parts: list[Tensor]) -> Tensor:
    """The positions of all calls, one after another."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _mask_for(
    calls: Sequence[tuple[_Call, Tensor | None]], parts: list[Tensor], mask: Tensor | None
) -> Tensor | None:
    """The task's mask for the calls whose positions it describes; ones for the others."""
    if mask is None:
        return None
    columns = [
        mask.to(a.dtype)
        if call.x.dim() == 3 and call.x.shape[:2] == mask.shape
        else a.new_ones(a.shape[:2])
        for (call, _), a in zip(calls, parts, strict=True)
    ]
    return _joined(columns)


def gradients_of(blocks: list[LayerFactors]) -> list[Tensor]:
    """Whole per-example gradients (n, o, width) of each block of a layer."""
    gradients = []
    for factors in blocks:
        gradient = factors.s.mT @ factors.a
        if factors.block.bias:
            gradient = torch.cat([gradient, factors.s.sum(1).unsqueeze(2)], 2)
        gradients.append(gradient)
    return gradients
