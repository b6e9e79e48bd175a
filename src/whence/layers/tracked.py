"""Which layers are tracked: found by kind, then checked against autograd on real examples.

A layer is tracked only if its captured gradient Σ_t s_t a_tᵀ equals what autograd says. So weight
sharing, odd subclasses, weights that are also used outside their module and in-place surprises are
either handled exactly or left out by name; nothing is captured wrongly in silence.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from whence.data import batch_length
from whence.errors import InvalidInput
from whence.layers.capture import ParameterBlock, Tape, TrackedLayer, gradients_of
from whence.layers.choose import Chooser
from whence.layers.kind import kind_of
from whence.task import Task

FROZEN = "frozen: no update of the run moved it"


@dataclass(frozen=True)
class Excluded:
    """Parameters that no score sees, and why."""

    name: str
    parameters: int
    share: float
    reason: str


@dataclass(frozen=True)
class Tracked:
    """The tracked layers of one model, in the order in which the forward pass met them."""

    layers: tuple[TrackedLayer, ...]
    excluded: tuple[Excluded, ...]
    parameters: int
    positions: dict[str, int]  # t of each block, on the examples the layers were checked on
    outputs: int  # numbers the model puts out for one of them

    @property
    def blocks(self) -> list[ParameterBlock]:
        return [block for site in self.layers for block in site.blocks]

    def shared_with(self, other: Tracked) -> Tracked:
        """The layers of the same name and shape in another model (or stage)."""
        theirs = {(b.name, b.shape) for b in other.blocks}
        kept = [s for s in self.layers if {(b.name, b.shape) for b in s.blocks} <= theirs]
        return replace(self, layers=tuple(kept))

    @property
    def unseen(self) -> list[Excluded]:
        """What is left out although training moved it."""
        return [e for e in self.excluded if e.reason != FROZEN]

    @property
    def share(self) -> float:
        """Share of the model's parameters that is tracked."""
        return 1.0 - sum(e.share for e in self.excluded)

    def summary(self) -> str:
        """One line on what is left out: names, and share of the total."""
        if not self.excluded:
            return f"all {self.parameters:,} parameters are tracked"
        told = [f"{e.name} ({e.share:.1%}: {e.reason})" for e in self.unseen]
        still = [e for e in self.excluded if e.reason == FROZEN]
        if still:
            what = still[0].name if len(still) == 1 else f"{len(still)} layers"
            told.append(f"{what} ({sum(e.share for e in still):.1%}: {FROZEN})")
        left = ", ".join(told)
        return f"{self.share:.1%} of {self.parameters:,} parameters are tracked; left out: {left}"


def find(
    model: nn.Module,
    task: Task,
    batch: Any,
    single: Any,
    choose: Chooser | None = None,
    trained: Callable[[str], bool] | None = None,
) -> Tracked:
    """Find the layers of a model (in eval mode, on its device) that can be tracked exactly.

    Args:
        batch: a few examples, on the model's device, to check captured gradients on.
        single: the first of them alone, to check that examples do not mix.
        choose: which of the trackable layers to track; None is all.
        trained: whether training moved a parameter, by its name. Layers that it did not move do not
            respond to the data, so their gradients are not taken; unless it moved none at all,
            which a method can say more about.
    """
    reasons: dict[str, str] = {}
    frozen: set[str] = set()
    sites = _candidates(model, choose, reasons)
    if trained is not None:
        moved = [s for s in sites if any(map(trained, s.parameter_names()))]
        if moved:
            sites = moved
            names = [name for name, _ in model.named_parameters()]
            frozen = {name for name in names if not trained(name)}
    with torch.enable_grad(), Tape(model, sites) as tape:
        outputs = task.outputs(model, batch)
        losses = task.losses(outputs, batch)
    n = batch_length(batch)
    for what, values in (("losses", losses), ("measurements", task.measurements(outputs, batch))):
        if values.shape != (n,):
            raise InvalidInput(
                f"{type(task).__name__}.{what} must return one number per example, shape ({n},); "
                f"for {n} examples it returned shape {tuple(values.shape)}"
            )
    kept = []
    for site in sites:
        problem = tape.problem(site, n)
        if problem:
            reasons.update(dict.fromkeys(site.parameter_names(), problem))
        else:
            kept.append(site)
    kept.sort(key=tape.first_call)
    _check_separate(model, task, losses, single)
    kept, positions = _verified(model, task, batch, kept, reasons)
    reasons.update(dict.fromkeys(frozen, FROZEN))
    if not kept:
        raise InvalidInput(
            "no layer of the model can be tracked: "
            + "; ".join(f"{k}: {v}" for k, v in reasons.items())
        )
    return Tracked(tuple(kept), *_left_out(model, kept, reasons), positions, outputs[0].numel())


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
    sites: dict[tuple[int, int | None], TrackedLayer] = {}
    for path, module in trackable.items():
        kind = kind_of(module)
        assert kind is not None
        weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
        own = [names[id(p)] for p in (weight, bias) if p is not None and id(p) in names]
        if path not in chosen:
            reasons.update(dict.fromkeys(own, "not chosen"))
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
            reasons.update(dict.fromkeys(own, reason))
            continue
        assert weight is not None
        key = (id(weight), None if bias is None else id(bias))
        site = sites.setdefault(
            key,
            TrackedLayer(
                path or "(model)",
                kind,
                names[id(weight)],
                names[id(bias)] if bias is not None else None,
            ),
        )
        site.modules.append(module)
    return list(sites.values())


def _check_separate(model: nn.Module, task: Task, losses: Tensor, single: Any) -> None:
    """An example alone must have the loss that it has among others."""
    mixed = (
        "attribution needs examples that do not mix (batch norm without running statistics? a "
        "collate function that changes examples? random augmentation?)"
    )
    try:
        with torch.no_grad():
            (alone,) = task.losses(task.outputs(model, single), single)
    except ValueError as error:
        raise InvalidInput(f"the model cannot take one example alone ({error}): {mixed}") from error
    together = losses[0].detach()
    if bool((alone - together).abs() > 1e-3 * (1 + together.abs())):
        raise InvalidInput(
            f"the loss of an example depends on the rest of its batch ({float(alone):.6g} alone, "
            f"{float(together):.6g} in it): {mixed}"
        )


def _verified(
    model: nn.Module, task: Task, batch: Any, sites: list[TrackedLayer], reasons: dict[str, str]
) -> tuple[list[TrackedLayer], dict[str, int]]:
    """Sites whose captured gradients equal autograd's, example by example; each block's positions.

    What is differentiated is a random combination of the outputs: losses that are nearly zero
    would prove nothing.
    """
    if not sites:
        return [], {}
    weights = [p for site in sites for p in _parameters(site)]
    with torch.enable_grad(), Tape(model, sites) as tape:
        for parameter in weights:
            parameter.requires_grad_(True)
        outputs = task.outputs(model, batch)
        mixture = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(0))
        totals = (outputs * mixture.to(outputs)).reshape(len(outputs), -1).sum(1)
        singles = totals.unbind()
    truths = []
    for total in singles:
        found = torch.autograd.grad(total, weights, retain_graph=True, allow_unused=True)
        truths.append(dict(zip(map(id, weights), found, strict=True)))
    tolerance = 3e-2 if totals.dtype in (torch.bfloat16, torch.float16) else 1e-3
    kept, positions = [], {}
    for site, pairs in tape.backward(totals, torch.ones_like(totals)):
        captured = gradients_of(pairs)
        wrong = any(
            bool((g[k] - w).norm() > tolerance * w.norm())
            for k, truth in enumerate(truths)
            for g, w in zip(captured, _expected_matrices(site, truth), strict=True)
        )
        if wrong:
            reason = (
                "its gradient is not that of its calls (is its weight used outside the module?)"
            )
            reasons.update(dict.fromkeys(site.parameter_names(), reason))
        else:
            kept.append(site)
            positions.update({pair.block.name: pair.a.shape[1] for pair in pairs})
    return kept, positions


def _parameters(site: TrackedLayer) -> list[nn.Parameter]:
    module: Any = site.modules[0]
    return [module.weight] + ([module.bias] if site.bias else [])


def _expected_matrices(site: TrackedLayer, gradients: Mapping[int, Tensor | None]) -> list[Tensor]:
    """Autograd's gradient of a site as its blocks' matrices."""
    module: Any = site.modules[0]

    def of(parameter: nn.Parameter) -> Tensor:
        found = gradients[id(parameter)]
        return torch.zeros_like(parameter) if found is None else found

    matrices = site.kind.matrices(module, of(module.weight))
    if not site.bias:
        return matrices
    columns = site.kind.vectors(module, of(module.bias))
    return [torch.cat([m, c.unsqueeze(1)], 1) for m, c in zip(matrices, columns, strict=True)]


def _left_out(
    model: nn.Module, sites: list[TrackedLayer], reasons: dict[str, str]
) -> tuple[tuple[Excluded, ...], int]:
    tracked = {name for site in sites for name in site.parameter_names()}
    parameters = dict(model.named_parameters())
    total = sum(p.numel() for p in parameters.values())
    excluded = []
    for path, module in model.named_modules():
        prefix = path + "." if path else ""
        own = [prefix + k for k in module._parameters if prefix + k in parameters]
        own = [name for name in own if name not in tracked]
        if own:
            count = sum(parameters[name].numel() for name in own)
            moved = [k for k in own if reasons.get(k) != FROZEN]  # the others lack nothing
            reason = next((reasons[k] for k in moved if k in reasons), type(module).__name__)
            reason = reason if moved else FROZEN
            excluded.append(Excluded(path or "(model)", count, count / total, reason))
    return tuple(excluded), total


def report(tracked: Tracked) -> None:
    """Say once, as a warning, what is left out; not if training left it alone."""
    if tracked.unseen:
        warnings.warn(tracked.summary(), stacklevel=3)
