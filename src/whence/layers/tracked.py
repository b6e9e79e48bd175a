"""Which layers are tracked: selected by kind, then checked against autograd on real examples.

A layer is tracked only if its captured gradient Σ_t s_t a_tᵀ equals autograd's. So shared weights,
unusual subclasses, weights that are also used outside their module, and in-place changes are either
handled exactly or excluded by name. No gradient is silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

from whence.data import batch_length
from whence.errors import InvalidInput
from whence.layers.capture import Tape, whole_gradients
from whence.layers.choose import Chooser
from whence.layers.copied import Copied
from whence.layers.embedding import Embedding
from whence.layers.kind import Kind, ParameterBlock, Part, TrackedLayer, kind_of, own_forward
from whence.layers.linear import Linear
from whence.layers.parameter import Bias, Direct, one_for_all
from whence.table import listed
from whence.task import Task

TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 3e-2}  # relative, of gradients and outputs
LISTED = 3  # excluded layers that a warning names
FROZEN = "frozen: no update of the run moved it"
UNRECORDED = "changed between checkpoints, but no recorded optimizer updates it"


@dataclass(frozen=True)
class Excluded:
    """Parameters that no score includes, and why."""

    name: str
    parameters: int
    share: float  # of the parameters that training moved: 0 where all are frozen
    reason: str


@dataclass(frozen=True)
class Tracked:
    """The tracked layers of one model, in the order of the forward pass."""

    layers: tuple[TrackedLayer, ...]
    excluded: tuple[Excluded, ...]
    parameters: int
    trained: int  # of these, those that training moved
    positions: dict[str, int]  # t of each block, on the examples that the check used
    outputs: int  # numbers in the model's output for one example
    operations: float  # of one example's forward and backward pass through the whole model
    computed: float  # numbers in the results of its products, likewise

    @property
    def blocks(self) -> list[ParameterBlock]:
        return [block for layer in self.layers for block in layer.blocks]

    def shared_with(self, other: Tracked) -> Tracked:
        """The layers of the same name and shape in another model (or stage)."""
        others = {(b.name, b.shape) for b in other.blocks}
        shared = [s for s in self.layers if {(b.name, b.shape) for b in s.blocks} <= others]
        return replace(self, layers=tuple(shared))

    @property
    def unseen(self) -> list[Excluded]:
        """The excluded parameters that training moved."""
        return [e for e in self.excluded if e.reason != FROZEN]

    @property
    def share(self) -> float:
        """Share of the trained parameters that is tracked."""
        return 1.0 - sum(e.share for e in self.excluded)

    def summary(self, most: int = LISTED) -> str:
        """One line: the tracked share of the trained parameters, the largest excluded layers,
        and what is frozen."""
        frozen = [e for e in self.excluded if e.reason == FROZEN]
        total = f"{self.trained:,} {'trained ' if frozen else ''}parameters"
        text = f"all {total} are tracked"
        if self.unseen:
            largest = sorted(self.unseen, key=lambda e: -e.share)
            parts = [f"{e.name} ({e.share:.1%}: {e.reason})" for e in largest]
            text = f"{self.share:.1%} of {total} are tracked; left out: {listed(parts, most)}"
        if frozen:
            what = frozen[0].name if len(frozen) == 1 else f"{len(frozen)} layers"
            count = sum(e.parameters for e in frozen)
            text += f"; frozen: {what} ({count:,} parameters that no update of the run moved)"
        return text


@dataclass(frozen=True)
class Updates:
    """What the updates of a run did to parameters, by name.

    Attributes:
        moved: whether they moved this one. Layers that they did not move do not respond to the
            data, so they are not tracked. If they moved none, all are tracked, and the method
            reports the problem.
        same_rates: whether every update had one rate for these two. A bias with other rates than
            its weight is a separate layer.
        unrecorded: those that changed although no recorded optimizer updates them.
    """

    moved: Callable[[str], bool] = lambda _: True
    same_rates: Callable[[str, str], bool] = lambda *_: True
    unrecorded: Sequence[str] = ()


def find(
    model: nn.Module,
    task: Task,
    batch: Any,
    choose: Chooser | None,
    updates: Updates,
    single: Any = None,
) -> Tracked:
    """Find the layers of a model (in eval mode, on its device) that can be tracked exactly.

    Args:
        batch: a few examples, on the model's device, to check captured gradients on.
        choose: which of the trackable layers to track (None: all).
        single: one of the examples: what only works for batches of some size is not tracked.
    """
    reasons: dict[str, str] = {}
    layers = _candidates(model, choose, updates, reasons)
    moved = [layer for layer in layers if any(map(updates.moved, layer.parameter_names()))]
    batches = [batch] if single is None else [batch, single]
    usable, outputs = _usable(model, task, batches, moved or layers, reasons)
    verified, positions, count = _verified(model, task, batch, usable, reasons)
    for name in [k for k, _ in model.named_parameters() if moved and not updates.moved(k)]:
        reasons[name] = UNRECORDED if name in updates.unrecorded else FROZEN
    if not verified:
        raise InvalidInput(
            "no layer of the model can be tracked: "
            + ("; ".join(f"{k}: {v}" for k, v in reasons.items()) or "it has no parameters")
        )
    total, n = sum(p.numel() for p in model.parameters()), batch_length(batch)
    excluded, updated = _excluded(model, verified, reasons)
    return Tracked(
        tuple(verified),
        excluded,
        total,
        updated,
        positions,
        outputs,
        count.operations / n,
        count.numbers / n,
    )


Owners = Mapping[int, Sequence[tuple[str, nn.Module]]]  # by the parameter's id


def _owners(model: nn.Module) -> Owners:
    """Every module that holds a parameter, and its path."""
    owners: dict[int, list[tuple[str, nn.Module]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for parameter in module._parameters.values():
            if parameter is not None and all(
                m is not module for _, m in owners.get(id(parameter), [])
            ):
                owners.setdefault(id(parameter), []).append((path, module))
    return owners


def _candidates(
    model: nn.Module, choose: Chooser | None, updates: Updates, reasons: dict[str, str]
) -> list[TrackedLayer]:
    """The chosen layers that no kind refuses."""
    names, owners = {id(p): name for name, p in model.named_parameters()}, _owners(model)

    def one_block(weight: Tensor | None, bias: Tensor | None) -> bool:
        """Whether a bias can be a column of the matrix: not of a table, nor at another rate."""
        if any(isinstance(m, nn.Embedding) for _, m in owners.get(id(weight), ())):
            return False
        if weight is None or bias is None:
            return True
        return updates.same_rates(names[id(weight)], names[id(bias)])

    lists = [m for m in model.modules() if isinstance(m, parametrize.ParametrizationList)]
    inside = {id(m) for each in lists for m in each.modules()}  # computed with their module
    modules = [(path, m) for path, m in model.named_modules() if id(m) not in inside]
    uses = [use for path, m in modules for use in _uses(path, m, one_block)]
    trackable = {
        path: nn.ParameterList() if isinstance(parts[0][0], Copied) else module
        for path, module, parts in uses
    }
    chosen = trackable if choose is None else choose(trackable)
    layers: dict[tuple[int, ...], TrackedLayer] = {}
    for path, module, parts in uses:
        tensors = [module._parameters.get(k) for _, *keys in parts for k in keys]
        parameters = [names[id(p)] for p in tensors if p is not None]
        if path not in chosen:
            earlier = {name: f"{reasons[name]}; " for name in parameters if name in reasons}
            reasons.update({name: earlier.get(name, "") + "not chosen" for name in parameters})
            continue
        reason = _refusal(path, module, parts, owners, chosen)
        if reason:
            reasons.update(dict.fromkeys(parameters, reason))
            continue
        for kind, *keys in parts:
            pair = [p for k in keys if (p := module._parameters.get(k)) is not None]
            bias = names[id(pair[1])] if len(pair) > 1 else None
            alone = len(parts) == 1 or ((kind, *keys) == parts[0] and kind.seen == "call")
            name = path if alone else f"{path}.{keys[0]}"
            layer = TrackedLayer(name or "(model)", names[id(pair[0])], bias)
            layers.setdefault(tuple(map(id, pair)), layer).uses.append((module, kind))
    return list(layers.values())


def _uses(
    path: str, module: nn.Module, one_block: Callable[[Tensor | None, Tensor | None], bool]
) -> Iterator[tuple[str, nn.Module, list[Part]]]:
    """(name, module, parts) of what can be chosen: a module, or single parameters of one."""
    kind, prefix = kind_of(module), f"{path}." if path else ""
    if _copyable(module, kind):
        for name, _ in module.named_parameters():
            inside, _, attribute = name.rpartition(".")
            copied = Copied(attribute, module)
            yield prefix + name, module.get_submodule(inside), [(copied, attribute)]
    elif kind is None:
        for name, p in module._parameters.items():
            if p is not None:
                yield prefix + name, module, [(Direct(name), name)]
    if kind is None:
        return
    if parts := kind.parts(module):
        yield path, module, list(parts)
        return
    weight, bias = (module._parameters.get(name) for name in kind.attributes)
    if kind.bias_column and (kind.seen != "call" or one_block(weight, bias)):
        yield path, module, [(kind, *kind.attributes)]
    elif bias is None:
        yield path, module, [(kind, "weight")]
    else:
        yield path, module, [(kind, "weight"), (Bias(kind), "bias")]


def _copyable(module: nn.Module, kind: Kind | None) -> bool:
    """Whether a module of this kind, if any, can be computed with copies, and has no other way."""
    if isinstance(module, (nn.ParameterList, nn.ParameterDict)):
        return False
    if parametrize.is_parametrized(module):
        return True
    if any(True for child in module.children() for _ in child.parameters()):
        return False
    if kind is None:
        return not all(one_for_all(p) for p in module.parameters())
    reason = own_forward(module, kind.module)
    return reason is not None and kind.refusal(module) == reason  # and for no other reason


def _refusal(
    path: str,
    module: nn.Module,
    parts: list[Part],
    owners: Owners,
    chosen: Collection[str],
) -> str | None:
    """Why the use of a weight cannot be captured."""
    kind, *attributes = parts[0]
    several = parts if kind.seen == "forward" else parts[:1]
    names = [name for _, *keys in several for name in keys]
    parameters = [p for name in names if (p := module._parameters.get(name)) is not None]
    if reason := kind.refusal(module):
        return reason
    if any(module._parameters.get(keys[0]) is None for _, *keys in several):
        return "its weight is computed from other parameters (a parametrization)"
    sharers = [m for p in parameters for m in owners[id(p)] if m[1] is not module]
    others = sorted(q for q, m in sharers if kind.seen == "copies" or not _one_weight(kind, m))
    others = others or sorted(q for q, _ in sharers if q not in chosen)
    if others:
        return _tied(path, others)
    if any(
        m._parameters.get(k) is not module._parameters.get(k)
        for _, m in sharers
        for k in attributes
    ):
        return "shares its weight or its bias, but not both, with another layer"
    return None


def _tied(path: str, others: Sequence[str]) -> str:
    names = [name or "(model)" for name in (path, *others)]
    return f"{names[0]} is tied to {', '.join(names[1:])}"


def _one_weight(kind: Kind, module: nn.Module) -> bool:
    """Whether a module can be captured, and uses a weight as the same matrix as this kind does."""
    other = kind_of(module)
    if other is None or other.refusal(module):
        return False
    return kind is other or {type(kind), type(other)} == {Embedding, Linear}


def _usable(
    model: nn.Module,
    task: Task,
    batches: Sequence[Any],
    layers: Sequence[TrackedLayer],
    reasons: dict[str, str],
) -> tuple[list[TrackedLayer], int]:
    """Layers that a forward pass calls as their kinds expect, in the order of their calls; and the
    numbers in the model's output for one example."""
    batch = batches[0]
    n, called = batch_length(batch), [layer for layer in layers if not layer.individual]
    with torch.enable_grad(), Tape(model, called, n, task.rows(batch)) as tape:
        outputs = task.outputs(model, batch)
        losses = task.losses(outputs, batch)
    for what, values in (("losses", losses), ("measurements", task.measurements(outputs, batch))):
        if values.shape != (n,):
            raise InvalidInput(
                f"{type(task).__name__}.{what} must return one number per example, shape ({n},); "
                f"for {n} examples it returned shape {tuple(values.shape)}"
            )
    repeated = [layer for layer in called if len(tape.calls[layer.name]) > 1]
    idle = tape.idle(outputs, repeated) if repeated else set()
    for layer in layers:
        layer.shared = tape.shared(layer) if layer in called else None
        layer.idle = layer in idle
    several = [k for k in called if any(call.windows > 1 for call in tape.calls[k.name])]
    cut = [layer for layer in several if tape.windows(layer) > 1]
    for batch in batches[1:] if cut else []:
        with torch.enable_grad(), Tape(model, cut, batch_length(batch), task.rows(batch)) as again:
            task.outputs(model, batch)
        cut = [layer for layer in cut if again.windows(layer) == tape.windows(layer)]
    for layer in cut:
        layer.windows = tape.windows(layer)
    called = [layer for layer in called if not layer.individual]
    rejected = _rejected(model, task, batches, [x for x in layers if x.individual], called)
    usable = []
    for layer in layers:
        problem = rejected[layer.name] if layer.individual else tape.problem(layer)
        if problem:  # why its kind refused it comes first
            reasons.update({k: reasons.get(k, problem) for k in layer.parameter_names()})
        else:
            usable.append(layer)
    return sorted(usable, key=tape.first_call), outputs[0].numel()


def _rejected(
    model: nn.Module,
    task: Task,
    batches: Sequence[Any],
    layers: Sequence[TrackedLayer],
    called: Sequence[TrackedLayer],
) -> dict[str, str | None]:
    """Why the model cannot compute with one value of each of these layers for each example, or its
    module's forward in steps: outputs and gradients must be those of the plain model, in batches of
    several sizes.

    Args:
        called: the other layers, which none of these may call.
    """
    hosts: dict[int, list[TrackedLayer]] = {}  # layers of one module are tried together
    for layer in layers:
        module, kind = layer.uses[0]
        host = kind.host(module) if kind.seen == "forward" else layer
        hosts.setdefault(id(host), []).append(layer)
    problems: dict[str, str | None] = {}
    for number, batch in enumerate(batches):
        left = [group for group in hosts.values() if not problems.get(group[0].name)]
        together = [layer for group in left for layer in group]
        if not together:
            break
        plain = _Plain(model, task, batch, together, called)
        if number and not any(plain.problems(together).values()):
            continue  # all together
        for group in left:
            problems.update(plain.problems(group))
    return problems


class _Plain:
    """What a model computes without copies, to compare with."""

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        batch: Any,
        layers: Sequence[TrackedLayer],
        called: Sequence[TrackedLayer],
    ) -> None:
        self.model, self.task, self.batch, self.called = model, task, batch, called
        self.n, self.rows = batch_length(batch), task.rows(batch)
        with torch.enable_grad(), Tape(model, [], self.n, self.rows):
            for layer in layers:
                layer.parameters()[layer.weight].requires_grad_(True)
            self.outputs = task.outputs(model, batch)
        self.tolerance = TOLERANCE.get(self.outputs.dtype, 1e-3)
        self.slopes = _slopes(self.outputs, layers)

    def problems(self, layers: Sequence[TrackedLayer]) -> dict[str, str | None]:
        """Why these layers cannot be used, by name, when they are tried together."""
        tape = Tape(self.model, [*layers, *self.called], self.n, self.rows)
        reason = None
        try:
            with torch.enable_grad(), tape:
                outputs = self.task.outputs(self.model, self.batch)
            if tape.nested:
                reason = f"its forward calls {min(tape.nested)}, which is a layer of its own"
            elif _differ(outputs, self.outputs, self.tolerance):
                reason = "its outputs differ if its forward is computed step by step"
            elif any(
                _differ(slope, self.slopes[layer], self.tolerance)
                for layer, slope in _slopes(outputs, layers).items()
            ):
                reason = "its gradients differ if its forward is computed step by step"
        except Exception as error:  # of the user's code
            why = str(error).partition("\n")[0]
            reason = f"all examples share it, and the model fails with one for each ({why})"
        return {layer.name: reason or tape.problem(layer) for layer in layers}


def _slopes(outputs: Tensor, layers: Sequence[TrackedLayer]) -> dict[TrackedLayer, Tensor]:
    """The gradient of a mixture of the outputs in the weight of each layer."""
    weights = [layer.parameters()[layer.weight] for layer in layers]
    if not outputs.requires_grad:  # they depend on none
        return dict(zip(layers, map(torch.zeros_like, weights), strict=True))
    gradients = torch.autograd.grad(
        outputs, weights, _mixture(outputs), allow_unused=True, materialize_grads=True
    )
    return dict(zip(layers, gradients, strict=True))


def _mixture(outputs: Tensor) -> Tensor:
    """Random weights of the outputs: losses that are nearly zero would prove nothing."""
    generator = torch.Generator(outputs.device if outputs.is_cuda else "cpu").manual_seed(0)
    return torch.randn(outputs.shape, generator=generator, device=generator.device).to(outputs)


def _differ(actual: Tensor, expected: Tensor, tolerance: float) -> bool:
    if actual.is_meta:  # nothing has a value
        return False
    return bool((actual - expected).norm() > tolerance * expected.norm())


def _verified(
    model: nn.Module, task: Task, batch: Any, layers: list[TrackedLayer], reasons: dict[str, str]
) -> tuple[list[TrackedLayer], dict[str, int], OperationCount]:
    """Layers whose captured gradients equal autograd's, per example; each block's positions; the
    operations of the batch's forward and backward pass.

    The check differentiates a mixture of the outputs. On the meta device, where nothing has a
    value, it is left out.
    """
    count = OperationCount()
    if not layers:
        return [], {}, count
    weights = [p for layer in layers for p in layer.parameters().values()]
    tape = Tape(model, layers, batch_length(batch), task.rows(batch))
    with torch.enable_grad(), tape:
        for parameter in weights:
            parameter.requires_grad_(True)
        with count:
            outputs = task.outputs(model, batch)
        totals = (outputs * _mixture(outputs)).reshape(len(outputs), -1).sum(1)
        singles = totals.unbind()
    captures = tape.backward(totals, torch.ones_like(totals))
    with count:
        first = next(captures)  # the backward pass
    captured = dict([first, *captures])
    tolerance = TOLERANCE.get(totals.dtype, 1e-3)
    wrong: set[TrackedLayer] = set()

    def compare(k: int, layer: TrackedLayer, truth: Mapping[str, Tensor]) -> None:
        for factors, w in zip(captured[layer], layer.matrices(truth), strict=True):
            example = slice(k, k + 1)
            (g,) = whole_gradients(factors.a[example], factors.s[example], factors.block.bias)
            if _differ(g, w, tolerance):
                wrong.add(layer)

    for k, total in enumerate(singles if not totals.is_meta else ()):
        _each_gradient(total, layers, partial(compare, k))
    reason = "its gradient is not that of its calls (is its weight used outside the module?)"
    reasons.update({name: reason for layer in wrong for name in layer.parameter_names()})
    verified = [layer for layer in layers if layer not in wrong]
    blocks = [factors for layer in verified for factors in captured[layer]]
    return verified, {factors.block.name: factors.a.shape[1] for factors in blocks}, count


def _each_gradient(
    total: Tensor,
    layers: Sequence[TrackedLayer],
    use: Callable[[TrackedLayer, Mapping[str, Tensor]], None],
) -> None:
    """Call `use` with the gradients of one layer after another, by the names of its parameters.
    The backward pass forgets them, so that those of all layers are never there together."""
    parameters = {layer: layer.parameters() for layer in layers}
    gradients: dict[TrackedLayer, dict[str, Tensor]] = {layer: {} for layer in layers}
    places = {p: (layer, name) for layer, named in parameters.items() for name, p in named.items()}

    def arrived(parameter: nn.Parameter) -> None:
        layer, name = places[parameter]
        assert parameter.grad is not None
        gradients[layer][name], parameter.grad = parameter.grad, None
        if len(gradients[layer]) == len(parameters[layer]):
            use(layer, gradients.pop(layer))

    handles = [
        p.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]
        for p in places
    ]
    try:
        torch.autograd.backward(total, inputs=list(places), retain_graph=True)
    finally:
        for handle in handles:
            handle.remove()
    for layer, gradients_of_layer in gradients.items():  # the output does not depend on the others
        zeros = {name: torch.zeros_like(p) for name, p in parameters[layer].items()}
        use(layer, zeros | gradients_of_layer)


def _excluded(
    model: nn.Module, layers: list[TrackedLayer], reasons: dict[str, str]
) -> tuple[tuple[Excluded, ...], int]:
    """The parameters that are not tracked, by module; and how many of all training moved."""
    tracked = {name for layer in layers for name in layer.parameter_names()}
    parameters = dict(model.named_parameters())
    sizes = {name: p.numel() for name, p in parameters.items()}
    trained = {k for k in parameters if k in tracked or reasons.get(k) != FROZEN}
    total = sum(sizes[name] for name in trained)
    excluded = []
    for path, module in model.named_modules():
        prefix = path + "." if path else ""
        names = [prefix + k for k in module._parameters if prefix + k in parameters]
        names = [name for name in names if name not in tracked]
        if names:
            count = sum(sizes[name] for name in names)
            moved = [name for name in names if name in trained]
            given = [reasons[k] for k in moved if k in reasons]
            unknown = f"{type(module).__name__} uses {listed(moved, LISTED)} in an unknown way"
            reason = next(iter(given), unknown) if moved else FROZEN
            share = sum(sizes[name] for name in moved) / total
            excluded.append(Excluded(path or "(model)", count, share, reason))
    return tuple(excluded), total


@cache
def _counter(packet: Any) -> Any:
    """What counts the operations of a function of PyTorch, or None.

    It is imported when it is needed, because with a CUDA build of PyTorch it imports Triton.
    """
    from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

    # which PyTorch does not count: attention as CPUs compute it, and on the meta device
    attention = {
        "aten._scaled_dot_product_flash_attention_for_cpu": sdpa_flop,
        "aten._scaled_dot_product_flash_attention_for_cpu_backward": sdpa_backward_flop,
        "aten._scaled_dot_product_fused_attention_overrideable": sdpa_flop,
        "aten._scaled_dot_product_fused_attention_overrideable_backward": sdpa_backward_flop,
    }
    return flop_registry.get(packet) or attention.get(str(packet))


class OperationCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside the `with`, adds up the operations of products, convolutions and attention, and the
    numbers in their results.

    Works without weights, on the meta device. A product of n terms is 2n operations; elementwise
    work is not counted.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations, self.numbers = 0, 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # of PyTorch: skipping imports a compiler, for a second
        return False

    def __torch_dispatch__(
        self,
        function: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        packet = function._overloadpacket
        count = _counter(packet)
        if count is not None:
            self.operations += int(count(*args, **(kwargs or {}), out_val=result))
            results = result if isinstance(result, tuple) else (result,)
            self.numbers += sum(x.numel() for x in results if isinstance(x, Tensor))
        return result
