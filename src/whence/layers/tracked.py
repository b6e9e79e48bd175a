"""Which layers are tracked: selected by kind, then checked against autograd on real examples.

A layer is tracked only if its captured gradient Σ_t s_t a_tᵀ equals autograd's. So shared weights,
unusual subclasses, weights that are also used outside their module, and in-place changes are either
handled exactly or excluded by name. No gradient is silently wrong.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from whence.data import batch_length
from whence.errors import InvalidInput
from whence.layers.capture import ParameterBlock, Tape, TrackedLayer, gradients_of
from whence.layers.choose import Chooser
from whence.layers.kind import kind_of
from whence.table import listed
from whence.task import Task

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


def find(
    model: nn.Module,
    task: Task,
    batch: Any,
    choose: Chooser | None = None,
    trained: Callable[[str], bool] | None = None,
    untrained: Sequence[str] = (),
) -> Tracked:
    """Find the layers of a model (in eval mode, on its device) that can be tracked exactly.

    Args:
        batch: a few examples, on the model's device, to check captured gradients on.
        choose: which of the trackable layers to track; None is all.
        trained: whether training moved the parameter of this name. Layers that it did not move do
            not respond to the data, so they are not tracked. If it moved none, all are tracked, and
            the method reports the problem.
        untrained: parameters that changed although no recorded optimizer trained them.
    """
    reasons: dict[str, str] = {}
    frozen: set[str] = set()
    layers = _candidates(model, choose, reasons)
    if trained is not None:
        moved = [s for s in layers if any(map(trained, s.parameter_names()))]
        if moved:
            layers = moved
            names = [name for name, _ in model.named_parameters()]
            frozen = {name for name in names if not trained(name)}
    with torch.enable_grad(), Tape(model, layers) as tape:
        outputs = task.outputs(model, batch)
        losses = task.losses(outputs, batch)
    n = batch_length(batch)
    for what, values in (("losses", losses), ("measurements", task.measurements(outputs, batch))):
        if values.shape != (n,):
            raise InvalidInput(
                f"{type(task).__name__}.{what} must return one number per example, shape ({n},); "
                f"for {n} examples it returned shape {tuple(values.shape)}"
            )
    usable = []
    for layer in layers:
        problem = tape.problem(layer, n)
        if problem:
            reasons.update(dict.fromkeys(layer.parameter_names(), problem))
        else:
            usable.append(layer)
    usable.sort(key=tape.first_call)
    verified, positions = _verified(model, task, batch, usable, reasons)
    reasons.update(dict.fromkeys(frozen, FROZEN))
    reasons.update({name: UNRECORDED for name in untrained if name in frozen})
    if not verified:
        raise InvalidInput(
            "no layer of the model can be tracked: "
            + "; ".join(f"{k}: {v}" for k, v in reasons.items())
        )
    total = sum(p.numel() for p in model.parameters())
    excluded, updated = _excluded(model, verified, reasons)
    return Tracked(tuple(verified), excluded, total, updated, positions, outputs[0].numel())


def _candidates(
    model: nn.Module, choose: Chooser | None, reasons: dict[str, str]
) -> list[TrackedLayer]:
    names = {id(p): name for name, p in model.named_parameters()}
    owners: dict[int, list[tuple[str, nn.Module]]] = {}  # every module that holds a parameter
    for path, module in model.named_modules(remove_duplicate=False):
        for parameter in module._parameters.values():
            if parameter is not None and all(
                m is not module for _, m in owners.get(id(parameter), [])
            ):
                owners.setdefault(id(parameter), []).append((path, module))
    trackable = {path: m for path, m in model.named_modules() if kind_of(m)}
    chosen = trackable if choose is None else choose(trackable)
    layers: dict[tuple[int, int | None], TrackedLayer] = {}
    for path, module in trackable.items():
        kind = kind_of(module)
        assert kind is not None
        weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
        parameters = [names[id(p)] for p in (weight, bias) if p is not None and id(p) in names]
        if path not in chosen:
            reasons.update(dict.fromkeys(parameters, "not chosen"))
            continue
        reason = kind.refusal(module)
        if weight is None:
            reason = "its weight is computed from other parameters (a parametrization)"
        elif reason is None:
            sharers = [m for p in (weight, bias) if p is not None for m in owners[id(p)]]
            if any(kind_of(m) is not kind for _, m in sharers):
                others = sorted({q for q, m in sharers if kind_of(m) is not kind})
                reason = f"{path} is tied to {', '.join(others)}"
            elif any(
                m._parameters.get("weight") is not weight or m._parameters.get("bias") is not bias
                for _, m in sharers
            ):
                reason = "shares its weight or its bias, but not both, with another layer"
        if reason:
            reasons.update(dict.fromkeys(parameters, reason))
            continue
        assert weight is not None
        key = (id(weight), None if bias is None else id(bias))
        layer = layers.setdefault(
            key,
            TrackedLayer(
                path or "(model)",
                kind,
                names[id(weight)],
                names[id(bias)] if bias is not None else None,
            ),
        )
        layer.modules.append(module)
    return list(layers.values())


def _verified(
    model: nn.Module, task: Task, batch: Any, layers: list[TrackedLayer], reasons: dict[str, str]
) -> tuple[list[TrackedLayer], dict[str, int]]:
    """Layers whose captured gradients equal autograd's, per example; and each block's positions.

    The check differentiates a random combination of the outputs, because losses that are nearly
    zero would prove nothing.
    """
    if not layers:
        return [], {}
    weights = [p for layer in layers for p in _parameters(layer)]
    with torch.enable_grad(), Tape(model, layers) as tape:
        for parameter in weights:
            parameter.requires_grad_(True)
        outputs = task.outputs(model, batch)
        mixture = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(0))
        totals = (outputs * mixture.to(outputs)).reshape(len(outputs), -1).sum(1)
        singles = totals.unbind()
    truths = []
    for total in singles:
        gradients = torch.autograd.grad(total, weights, retain_graph=True, allow_unused=True)
        truths.append(dict(zip(map(id, weights), gradients, strict=True)))
    tolerance = 3e-2 if totals.dtype in (torch.bfloat16, torch.float16) else 1e-3
    verified, positions = [], {}
    for layer, blocks in tape.backward(totals, torch.ones_like(totals)):
        captured = gradients_of(blocks)
        wrong = any(
            bool((g[k] - w).norm() > tolerance * w.norm())
            for k, truth in enumerate(truths)
            for g, w in zip(captured, _expected_matrices(layer, truth), strict=True)
        )
        if wrong:
            reason = (
                "its gradient is not that of its calls (is its weight used outside the module?)"
            )
            reasons.update(dict.fromkeys(layer.parameter_names(), reason))
        else:
            verified.append(layer)
            positions.update({factors.block.name: factors.a.shape[1] for factors in blocks})
    return verified, positions


def _parameters(layer: TrackedLayer) -> list[nn.Parameter]:
    module: Any = layer.modules[0]
    return [module.weight] + ([module.bias] if layer.bias else [])


def _expected_matrices(layer: TrackedLayer, gradients: Mapping[int, Tensor | None]) -> list[Tensor]:
    """Autograd's gradient of a layer as its blocks' matrices."""
    module: Any = layer.modules[0]

    def of(parameter: nn.Parameter) -> Tensor:
        gradient = gradients[id(parameter)]
        return torch.zeros_like(parameter) if gradient is None else gradient

    matrices = layer.kind.matrices(module, of(module.weight))
    if not layer.bias:
        return matrices
    columns = layer.kind.vectors(module, of(module.bias))
    return [torch.cat([m, c.unsqueeze(1)], 1) for m, c in zip(matrices, columns, strict=True)]


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
            reason = next((reasons[k] for k in moved if k in reasons), type(module).__name__)
            reason = reason if moved else FROZEN
            share = sum(sizes[name] for name in moved) / total
            excluded.append(Excluded(path or "(model)", count, share, reason))
    return tuple(excluded), total


def report(tracked: Tracked) -> None:
    """Warn about excluded parameters, unless training never moved them."""
    if tracked.unseen:
        warnings.warn(tracked.summary(), stacklevel=3)
