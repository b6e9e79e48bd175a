"""What a layer is given for each example, as one vector: its hidden representation there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from whence.errors import InvalidInput
from whence.layers.passes import Passes


def representations(passes: Passes, batch: Any, layer: str | None) -> tuple[Tensor, str]:
    """(n, r), and where it was taken; over the positions of an example, their mean.

    The task's own representations, if it has any and no layer is named; else the input of the named
    module; else that of the tracked linear layer that the forward pass meets last.
    """
    task, model = passes.task, passes.model
    mask = task.mask(batch)
    if layer is None:
        own = task.representations(model, batch)
        if own is not None:
            return pooled(own, mask), f"{type(task).__name__}.representations"
    seen: list[tuple[str, Tensor]] = []

    def hook(name: str) -> Any:
        def note(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            if inputs and isinstance(inputs[0], Tensor):
                # at once: the input may be changed in place later
                seen[:] = [(name, pooled(inputs[0], mask, _channels_first(module, inputs[0])))]

        return note

    handles = [m.register_forward_pre_hook(hook(name)) for name, m in _where(passes, layer)]
    try:
        outputs = task.outputs(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    if not seen:
        raise InvalidInput(
            f"layer={layer!r} is not called with a tensor in the forward pass: name a module that "
            "is, or override representations(model, batch) in your Task"
        )
    name, found = seen[0]
    if len(found) != len(outputs):
        raise InvalidInput(
            f"the input of layer {name} has {len(found)} rows for {len(outputs)} examples: name "
            "another layer, or override representations(model, batch) in your Task"
        )
    return found, name


def _where(passes: Passes, layer: str | None) -> Sequence[tuple[str, nn.Module]]:
    if layer is not None:
        modules = dict(passes.model.named_modules())
        if layer not in modules:
            known = ", ".join(name for name in modules if name)
            raise InvalidInput(f"layer={layer!r} is not in the model: it has {known}")
        return [(layer, modules[layer])]
    sites = passes.tracked.layers
    found = [(s.name, m) for s in sites for m in s.modules if not isinstance(m, nn.Conv2d)]
    if not found:
        raise InvalidInput(
            "no linear layer is tracked: name the layer whose input to compare, RepSim(layer=...), "
            "or override representations(model, batch) in your Task"
        )
    return found


def _channels_first(module: nn.Module, x: Tensor) -> bool:
    """Whether x is images (n, r, h, w), as everything but a linear layer takes them."""
    return x.dim() == 4 and not isinstance(module, nn.Linear)


def pooled(x: Tensor, mask: Tensor | None, channels_first: bool = False) -> Tensor:
    """(n, ..., r), or (n, r, h, w), as (n, r): the mean over the positions that exist."""
    if x.dim() < 2:
        raise InvalidInput(f"representations of shape {tuple(x.shape)}: they must be (n, r)")
    wide = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    if channels_first:
        return wide.mean((2, 3))
    if wide.dim() == 2:
        return wide.clone()
    if mask is not None and mask.shape == x.shape[:2] and x.dim() == 3:
        weights = mask.to(wide).unsqueeze(2)
        return (wide * weights).sum(1) / weights.sum(1).clamp_min(1)
    return wide.flatten(1, -2).mean(1)
