"""Hidden representations: a layer's input, as one vector per example."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from whence.errors import InvalidInput
from whence.layers.conv1d import Conv1D
from whence.layers.linear import Linear
from whence.layers.passes import Passes


def representations(passes: Passes, batch: Any, layer: str | None) -> tuple[Tensor, str]:
    """Representations (n, r), averaged over positions, and the name of their source.

    Without `layer`, they are `Task.representations` if the task defines them, else the input of the
    last tracked linear layer in the forward pass. With `layer`, they are that module's input.
    """
    task, model = passes.task, passes.model
    mask = task.mask(batch)
    if layer is None:
        defined = task.representations(model, batch)
        if defined is not None:
            return pooled(defined, mask), f"{type(task).__name__}.representations"
    seen: list[tuple[str, Tensor]] = []

    def hook(name: str) -> Any:
        def note(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            if inputs and isinstance(inputs[0], Tensor):
                # pool now, because the model may change the input in place later
                seen[:] = [(name, pooled(inputs[0], mask, _channels_first(module, inputs[0])))]

        return note

    handles = [m.register_forward_pre_hook(hook(name)) for name, m in _modules(passes, layer)]
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
    name, inputs = seen[0]
    rows = task.rows(batch)
    if rows > 1 and len(inputs) == rows * len(outputs):  # the mean over an example's rows
        inputs = inputs.view(len(outputs), rows, -1).mean(1)
    if len(inputs) != len(outputs):
        raise InvalidInput(
            f"the input of layer {name} has {len(inputs)} rows for {len(outputs)} examples: name "
            "another layer, or override representations(model, batch) in your Task"
        )
    return inputs, name


def _modules(passes: Passes, layer: str | None) -> Sequence[tuple[str, nn.Module]]:
    if layer is not None:
        modules = dict(passes.model.named_modules())
        if layer not in modules:
            known = ", ".join(name for name in modules if name)
            raise InvalidInput(f"layer={layer!r} is not in the model: it has {known}")
        return [(layer, modules[layer])]
    linear = [
        (tracked.name, module)
        for tracked in passes.tracked.layers
        for module, kind in tracked.uses
        if isinstance(kind, (Linear, Conv1D))
    ]
    if not linear:
        raise InvalidInput(
            "no linear layer is tracked: name the layer whose input to compare, RepSim(layer=...), "
            "or override representations(model, batch) in your Task"
        )
    return linear


def _channels_first(module: nn.Module, x: Tensor) -> bool:
    """Whether x holds images (n, r, h, w); a linear layer has its channels last."""
    return x.dim() == 4 and not isinstance(module, nn.Linear)


def pooled(x: Tensor, mask: Tensor | None, channels_first: bool = False) -> Tensor:
    """The mean of (n, ..., r), or (n, r, h, w), over the positions that exist: (n, r)."""
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
