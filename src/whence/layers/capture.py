"""One forward pass, any number of backward passes, and every tracked layer's (a, s).

Hooks record each call's input and the *gradient edge* of its output, before an in-place activation
can change it. The backward pass asks autograd for the gradients at those edges only, so no
parameter gradient is ever computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.nn import functional as F
from torch.utils import checkpoint as checkpointing
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from whence.errors import InvalidInput
from whence.layers.kind import Kind, ParameterBlock, Places, TrackedLayer
from whence.layers.parameter import OnePerExample
from whence.layers.rows import Rows

Outputs = Tensor | Rows  # s (n, t, o)


class LayerFactors:
    """Inputs `a` (n, t, i) and output gradients `s` (n, t, o) of one block; mask (n, t) or None.

    `a` is computed on first access, because a convolution's patches are large and not every use
    needs them. The positions of several calls follow one another: `calls` is their number, or 0 if
    they differ in positions; `places` says which of the example's they are, where that is known.
    """

    def __init__(
        self,
        block: ParameterBlock,
        inputs: Callable[[], Tensor],
        s: Outputs,
        mask: Tensor | None = None,
        add_gram: Callable[[Tensor], Tensor | None] | None = None,
        calls: int = 1,
        places: Places | None = None,
    ) -> None:
        self.calls, self.places = calls, places
        self.block, self.s, self.mask = block, s, mask
        self._inputs, self._add_gram = inputs, add_gram

    @cached_property
    def a(self) -> Tensor:
        return self._inputs()

    @property
    def slopes(self) -> Tensor:
        """The side that the backward pass computed: `s`, or `a` of a lookup."""
        return self.a if isinstance(self.s, Rows) else self.s

    def add_gram(self, total: Tensor) -> Tensor | None:
        """Add Σ a aᵀ by the shortcut of the layer's kind; None if it has none (see `Kind`)."""
        return None if self._add_gram is None else self._add_gram(total)


def sides(kind: Kind, inputs: Tensor | Rows, gradient: Tensor, o: int) -> tuple[Tensor, Outputs]:
    """(a, s) of one block of a call, such that G = Σ_t s_t a_tᵀ.

    Args:
        inputs, gradient: as the kind gives them. There may be several gradients of the same
            inputs, one after another.
        o: rows of the block.
    """
    if kind.form == "matrix":
        assert isinstance(inputs, Tensor)
        return inputs, gradient
    gradients = gradient.reshape(-1, len(inputs), *gradient.shape[1:])
    if isinstance(inputs, Rows):
        return inputs.weighted(gradients).flatten(0, 1), inputs
    s = (gradients * inputs).flatten(0, 1)
    s = s if s.shape[2] == o else torch.cat([s, gradient], 2)
    return s.new_ones(len(inputs), s.shape[1], 1), s


@dataclass
class _Call:
    module: nn.Module
    kind: Kind
    x: Tensor
    version: int
    edge: GradientEdge
    shape: Sequence[int]  # of the output
    order: int
    windows: int  # rows of its input that each example has, or 0 if that is not known
    places: Places | None = None


class _Notes:
    """Records x and y of the weights of a module whose forward a kind computes."""

    def __init__(self, tape: Tape, host: nn.Module) -> None:
        self.tape, self.n, self.forward = tape, tape.n, host.forward
        self.uses: dict[str, tuple[TrackedLayer, Kind, nn.Module]] = {}

    @property
    def names(self) -> list[str]:
        return list(self.uses)

    def __call__(self, weight: str, x: Tensor, y: Tensor, places: Places | None = None) -> None:
        if weight in self.uses:
            self.tape._note(*self.uses[weight], x.detach(), y, places)


class Tape:
    """Records a forward pass inside the `with`; call `backward` as often as needed afterwards.

    Inside the `with`, only the tracked weights require gradients, so that autograd builds the
    graph. The model is the library's own copy.

    Args:
        examples: in the batch.
        rows: of the model's batch that each example has; they become positions.
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[TrackedLayer], examples: int, rows: int = 1
    ) -> None:
        self.model, self.layers, self.examples, self.n = model, layers, examples, examples * rows
        self.calls: dict[str, list[_Call]] = {layer.name: [] for layer in layers}
        self._failures: dict[str, str] = {}
        self.nested: set[str] = set()  # layers called by a module that is computed with copies
        self._lengths: set[int] = set()  # second axes of what the model is given
        self._count = 0

    def __enter__(self) -> Self:
        self._handles: list[RemovableHandle] = []
        self._replaced: list[tuple[nn.Module, str, Any]] = []
        self._functional: dict[int, tuple[TrackedLayer, Kind, nn.Module]] = {}
        notes: dict[nn.Module, _Notes] = {}
        self._linear, self._direct = F.linear, without_checkpoints()
        self._direct.__enter__()
        self._handles.append(
            self.model.register_forward_pre_hook(self._see_lengths, with_kwargs=True)
        )
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)
        for layer in self.layers:
            weight = layer.parameters()[layer.weight].requires_grad_(True)
            for module, kind in layer.uses:
                if kind.seen == "product":
                    self._functional[id(weight)] = layer, kind, module
                elif kind.seen == "call":
                    hook = self._hook(layer, kind)
                    self._handles.append(module.register_forward_hook(hook, with_kwargs=True))
                elif kind.seen == "copies":
                    expanded = weight.expand(self.n, *weight.shape)
                    self._note(layer, kind, module, weight.new_ones(self.n, 1), expanded)
                    copies = OnePerExample.of(expanded)
                    self._replace(module, layer.weight.rpartition(".")[2], copies)
                else:
                    host = kind.host(module)
                    if host not in notes:
                        notes[host] = _Notes(self, host)
                        self._replace(host, "forward", partial(kind.forward, host, notes[host]))
                    parameters = dict(host.named_parameters()).items()
                    name = next(name for name, p in parameters if p is weight)
                    notes[host].uses[name] = layer, kind, module
        if self._functional:
            F.linear = self._product  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        self._direct.__exit__(None, None, None)
        if self._functional:
            F.linear = self._linear
        for handle in self._handles:
            handle.remove()
        for module, attribute, before in self._replaced:
            if before is None:
                del vars(module)[attribute]
            else:
                vars(module)[attribute] = before

    def _replace(self, module: nn.Module, attribute: str, value: Any) -> None:
        """Set an attribute of an instance, which Python finds before a parameter or a method."""
        self._replaced.append((module, attribute, vars(module).get(attribute)))
        vars(module)[attribute] = value

    def _hook(self, layer: TrackedLayer, kind: Kind) -> Any:
        def note(
            module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any
        ) -> Any:
            x = next(iter([*inputs, *named.values()]), None)
            if not isinstance(x, Tensor) or not isinstance(output, Tensor):
                self._failures[layer.name] = "it is not called with one tensor, or returns none"
                return None
            if is_batchedtensor(x):
                self.nested.add(layer.name)
                return None
            if not output.requires_grad:
                self._failures[layer.name] = (
                    "it is called without gradients (torch.no_grad in the model?)"
                )
                return None
            x = x.detach()
            if layer.shared:  # from here on, each example has its own output
                whole = layer.shared == "free" or x.dim() == 1
                x, output = (_repeated(y, self.n, whole) for y in (x, output))
            self._note(layer, kind, module, self._unfolded(kind, x), output)
            if layer.shared == "free":
                return OnePerExample.of(output)
            return output if layer.shared else None

        return note

    def _see_lengths(self, module: nn.Module, *inputs: Any) -> None:
        tensors = [x for x in tree_leaves(inputs) if isinstance(x, Tensor)]
        self._lengths |= {x.shape[1] for x in tensors if x.dim() > 1 and len(x) == self.n}

    def _unfolded(self, kind: Kind, x: Tensor) -> Tensor:
        """An input (n t, i) as (n, t, i). Only if t is a length of what the model is given: a list
        of tokens that happens to have a multiple of n of them is not in the order of examples."""
        if x.dim() != 2 or kind.form == "lookup" or kind.channels_first:
            return x
        t, rest = divmod(len(x), self.n)
        return x if rest or t < 2 or t not in self._lengths else x.view(self.n, t, x.shape[1])

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`F.linear`; products with tracked weights, or with rows of them, are noted."""
        y = self._linear(x, weight, bias)
        whole = weight if id(weight) in self._functional else weight._base
        if whole is None or id(whole) not in self._functional:
            return y
        layer, kind, module = self._functional[id(whole)]
        if whole is not weight:  # some rows, where attention is to another sequence
            first = (weight.storage_offset() - whole.storage_offset()) // whole.stride(0)
            if weight.dim() != 2 or weight.stride() != whole.stride():
                self._failures[layer.name] = "its weight is used in parts that are no rows"
                return y
            padded = F.pad(y, (first, len(whole) - first - len(weight)))
            noted = self._noted(layer, kind, module, x, padded)
            return noted.narrow(-1, first, len(weight)).contiguous()
        return self._noted(layer, kind, module, x, y)

    def _noted(
        self, layer: TrackedLayer, kind: Kind, module: nn.Module, x: Tensor, y: Tensor
    ) -> Tensor:
        """Note a product (t, n, o) as (n, t, o); returns what takes its place."""
        if y.numel() % (self.n * y.shape[-1]) or not y.requires_grad:
            self._failures[layer.name] = "its positions do not come before the examples"
            return y
        if kind.examples_first:
            first, output = (z.reshape(self.n, -1, z.shape[-1]) for z in (x, y))
            self._note(layer, kind, module, first.detach(), output)
            return y
        first, output = (z.reshape(-1, self.n, z.shape[-1]).transpose(0, 1) for z in (x, y))
        output = output.contiguous()
        self._note(layer, kind, module, first.detach(), output)
        return output.transpose(0, 1).reshape(y.shape)

    def _note(
        self,
        layer: TrackedLayer,
        kind: Kind,
        module: nn.Module,
        x: Tensor,
        output: Tensor,
        places: Places | None = None,
    ) -> None:
        x = x.in_batch() if isinstance(x, OnePerExample) else x
        # an in-place operation on a view rewires the view, but never the node of its base
        base = output._base if output._is_view() else None
        whole = base is not None and base.requires_grad and base.numel() == output.numel()
        edge = get_gradient_edge(base if base is not None and whole else output)
        shape = output.shape if len(output) == len(x) else (*x.shape[:2], *output.shape[1:])
        # examples, and channels; a convolution also takes one image, without the first
        axes = 1 if kind.form == "lookup" else 2
        if kind.channels_first:
            axes = max(axes, layer.parameters()[layer.weight].dim())
        windows = int(x.dim() >= axes and len(x) in (self.n, self.examples))
        if not windows and x.dim() > 2 and not kind.channels_first and len(x) % self.n == 0:
            windows = len(x) // self.n
        call = _Call(module, kind, x, x._version, edge, shape, self._count, windows, places)
        self._count += 1
        self.calls[layer.name].append(call)

    def problem(self, layer: TrackedLayer) -> str | None:
        """Why this layer's calls cannot be used; None if they can."""
        if layer.name in self._failures:
            return self._failures[layer.name]
        calls = self.calls[layer.name]
        if not calls:
            return (
                "its forward is never called for the examples that are tried (unused, or its "
                "weight is used directly)"
            )
        misshapen = [call for call in calls if call.windows not in (1, layer.windows)]
        if misshapen and not (layer.idle and len(misshapen) < len(calls)):
            return self._misshapen(misshapen[0])
        if any(call.x._version != call.version for call in calls):
            return "its input is changed in place after it is read"
        return None

    def _misshapen(self, call: _Call) -> str:
        return (
            f"its input {tuple(call.x.shape)} does not have the {self.n} examples of the batch in "
            "front"
        )

    def idle(self, outputs: Tensor, layers: Sequence[TrackedLayer]) -> set[TrackedLayer]:
        """Layers of which the outputs depend on some calls, and not on others."""
        nodes = set() if outputs.grad_fn is None else _nodes_under(outputs.grad_fn)
        reached = {k: {call.edge.node in nodes for call in self.calls[k.name]} for k in layers}
        return {layer for layer, values in reached.items() if len(values) == 2}

    def windows(self, layer: TrackedLayer) -> int:
        """Rows that each example has in all inputs of a layer; 1 if they are not alike."""
        numbers = {call.windows for call in self.calls[layer.name]}
        return max(1, *numbers) if len(numbers) == 1 else 1

    def check(self) -> None:
        """Refuse a layer whose calls cannot be used."""
        for layer in self.layers:
            problem = self.problem(layer)
            if problem:
                raise InvalidInput(
                    f"layer {layer.name}: {problem}. Leave it out with Study(layers=...)"
                )

    def shared(self, layer: TrackedLayer) -> Literal["row", "free"] | None:
        """Whether all calls look up the same rows for every example of the batch (see
        `TrackedLayer`)."""
        inputs = [call.x for call in self.calls[layer.name]]
        lookups = all(kind.form == "lookup" for _, kind in layer.uses)
        if not inputs or not lookups or any(len(x) == self.n for x in inputs):
            return None
        return "row" if all(x.dim() == 1 or len(x) == 1 for x in inputs) else "free"

    def first_call(self, layer: TrackedLayer) -> int:
        """The place of a layer in the forward pass; parameters without a module are first."""
        calls = self.calls.get(layer.name)
        return calls[0].order if calls else -1

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
        at_edges: Sequence[Tensor | None] = [None] * len(calls)
        if output.requires_grad:  # it depends on some of these layers
            edges = [call.edge for call in calls]
            at_edges = torch.autograd.grad(
                output, edges, gradient, retain_graph=keep, allow_unused=True
            )
        gradients = dict(zip(map(id, calls), at_edges, strict=True))
        mask = None if mask is None or bool(mask.all()) else mask
        for layer in self.layers:
            its_calls = [(call, gradients.pop(id(call))) for call in self.calls[layer.name]]
            reached = self._reached(layer, its_calls) if layer.idle else its_calls
            yield layer, self._factors(layer, reached, mask)

    def _reached(
        self, layer: TrackedLayer, calls: Sequence[tuple[_Call, Tensor | None]]
    ) -> Sequence[tuple[_Call, Tensor | None]]:
        """The calls that the output depends on; if there are none, those of the examples."""
        reached = [pair for pair in calls if pair[1] is not None]
        fitting = 1, layer.windows
        reached = reached or [pair for pair in calls if pair[0].windows in fitting]
        misshapen = [call for call, _ in reached if call.windows not in fitting]
        if misshapen:
            raise InvalidInput(f"layer {layer.name}: {self._misshapen(misshapen[0])}")
        return reached

    def _factors(
        self, layer: TrackedLayer, calls: Sequence[tuple[_Call, Tensor | None]], mask: Tensor | None
    ) -> list[LayerFactors]:
        calls = sorted(calls, key=lambda pair: pair[0].kind.form != "lookup")  # these first
        inputs = cache(lambda: [call.kind.inputs(call.module, call.x) for call, _ in calls])
        slopes: list[list[Tensor]] = []
        for call, gradient in calls:
            if gradient is None:  # the loss does not depend on this call
                gradient = layer.parameters()[layer.weight].new_zeros(call.shape)
            slopes.append(call.kind.gradients(call.module, gradient.reshape(call.shape)))
        shortcut = None
        if len(calls) == 1 and len(layer.blocks) == 1:
            call = calls[0][0]
            shortcut = partial(call.kind.add_gram, call.module, call.x)
        its_calls = [call for call, _ in calls]
        everywhere = mask is None and all(call.places is None for call in its_calls)
        factors = []
        for block in layer.blocks:
            k, like = block.group, slopes[0][block.group]
            outputs: list[Outputs] = [block.slopes_in(slope) for slope in slopes]
            a = partial(_inputs_of, inputs, block, self.examples)
            if block.rows:
                passes = zip(calls, inputs(), slopes, strict=True)
                pairs = [sides(c.kind, x[k], g[k], block.o) for (c, _), x, g in passes]
                a = partial(joined, [_folded(pair[0], self.examples) for pair in pairs])
                outputs = [pair[1] for pair in pairs]
            its_mask = places = None
            if not everywhere:
                its_mask = _mask_for(its_calls, outputs, mask, like, k, self.examples)
                places = _places(its_calls, k) if self.n == self.examples else None
            s = joined([_folded(part, self.examples) for part in outputs])
            alike = len({part.shape[1] for part in outputs}) == 1
            count = len(calls) if alike else 0
            factors.append(LayerFactors(block, a, s, its_mask, shortcut, count, places))
        return factors


class _Called:
    """What checkpoints with `use_reentrant=True` use, without recomputation."""

    @staticmethod
    def apply(function: Callable[..., Any], _: bool, *args: Any) -> Any:
        return function(*args)


def _once(*_: Any, **__: Any) -> Iterator[None]:
    """What other checkpoints do before and after a call, without recomputation."""
    yield


CHECKPOINTS = {"CheckpointFunction": _Called, "_checkpoint_without_reentrant_generator": _once}


@contextmanager
def without_checkpoints() -> Iterator[None]:
    """Call what `torch.utils.checkpoint` would compute again in the backward pass. By then, what is
    put into the model for a forward pass is gone. Layer inputs are kept anyway."""
    before = {name: getattr(checkpointing, name) for name in CHECKPOINTS}
    try:
        for name, plain in CHECKPOINTS.items():
            setattr(checkpointing, name, plain)
        yield
    finally:
        for name, value in before.items():
            setattr(checkpointing, name, value)


def _nodes_under(node: Node) -> set[Node]:
    """The graph that a backward pass from this node goes through."""
    nodes, ahead = {node}, [node]
    while ahead:
        further = {below for below, _ in ahead.pop().next_functions if below is not None} - nodes
        nodes |= further
        ahead += further
    return nodes


def _inputs_of(
    parts: Callable[[], Sequence[Sequence[Any]]], block: ParameterBlock, examples: int
) -> Any:
    """`a` of a block over all calls."""
    return joined([_folded(block.inputs_in(part), examples) for part in parts()])


def _folded(x: Any, examples: int) -> Any:
    """The positions of all rows of an example together: (n k, t, ...) -> (n, k t, ...)."""
    if len(x) == examples:
        return x
    return x.folded(examples) if isinstance(x, Rows) else x.reshape(examples, -1, *x.shape[2:])


def _repeated(y: Tensor, n: int, whole: bool) -> Tensor:
    """One value for all examples as n of them. It is (1, ...), or all of it one (`whole`)."""
    return y.expand(n, *(y.shape if whole else y.shape[1:]))


def _mask_for(
    calls: Sequence[_Call],
    outputs: Sequence[Outputs],
    mask: Tensor | None,
    like: Tensor,
    block: int,
    examples: int,
) -> Tensor:
    """The task's mask for the calls whose positions it describes; ones for the others."""
    pairs = zip(calls, outputs, strict=True)
    call_masks = [_of_call(call, s, mask, block).to(like) for call, s in pairs]
    masks: Tensor = joined([_folded(part, examples) for part in call_masks])
    return masks


def _of_call(call: _Call, s: Outputs, mask: Tensor | None, block: int) -> Tensor:
    """The positions (n, t) of one call that exist."""
    if call.places is not None:
        return call.places.mask(block, mask)
    described = call.x.dim() == (2 if call.kind.form == "lookup" else 3)
    if mask is not None and described and call.x.shape[:2] == mask.shape == s.shape[:2]:
        return mask
    return call.x.new_ones(s.shape[:2])


def _places(calls: Sequence[_Call], block: int) -> Places | None:
    """The places of all calls, if all of them have some in the same number of positions."""
    known = [call.places for call in calls if call.places is not None]
    if len(known) < len(calls) or len({places.length for places in known}) != 1:
        return None
    return Places(torch.cat([places.of(block) for places in known], 1), known[0].length)


def whole_gradients(a: Tensor, s: Outputs, bias: bool) -> Tensor:
    """G = Σ_t s_t a_tᵀ of each example, with a last column Σ_t s_t for a bias: (n, o, width)."""
    if isinstance(s, Rows):
        return s.outer(a)
    gradient = s.mT @ a
    return torch.cat([gradient, s.sum(1).unsqueeze(2)], 2) if bias else gradient


def joined(parts: Sequence[Tensor | Rows]) -> Any:
    """The positions of all calls, one after another; lookups come first."""
    if len(parts) == 1:
        return parts[0]
    lookups = [part for part in parts if isinstance(part, Rows)]
    plain = [part for part in parts if isinstance(part, Tensor)]
    if not lookups:
        return torch.cat(plain, 1)
    ids = torch.cat([part.ids for part in lookups], 1)
    plain = [part.dense for part in lookups if part.dense is not None] + plain
    return Rows(ids, lookups[0].o, None, torch.cat(plain, 1) if plain else None)
