"""Affine parameters of normalisations: y = w ∘ x̂ + b, with x̂ the normalised input.

Batch norm is in eval mode, like the whole model: x̂ uses the running statistics.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from whence.layers.kind import Kind, register


class Norm(Kind):
    form = "elementwise"

    def shape(self, module: Any) -> tuple[int, int, int]:
        return 1, module.weight.numel(), 1

    @abstractmethod
    def normalised(self, module: Any, x: Tensor) -> Tensor:
        """x̂, shaped like x."""

    def inputs(self, module: Any, x: Tensor) -> list[Tensor]:
        with torch.no_grad():
            return self.gradients(module, self.normalised(module, x))

    def gradients(self, module: Any, gradient: Tensor) -> list[Tensor]:
        y = gradient.movedim(1, -1) if self.channels_first else gradient
        return [y.reshape(len(y), -1, module.weight.numel())]


class LayerNorm(Norm):
    module = nn.LayerNorm

    def normalised(self, module: nn.LayerNorm, x: Tensor) -> Tensor:
        return F.layer_norm(x, module.normalized_shape, None, None, module.eps)


class RMSNorm(Norm):
    module = nn.RMSNorm

    def normalised(self, module: nn.RMSNorm, x: Tensor) -> Tensor:
        return F.rms_norm(x, module.normalized_shape, None, module.eps)


class GroupNorm(Norm):
    module = nn.GroupNorm
    channels_first = True

    def normalised(self, module: nn.GroupNorm, x: Tensor) -> Tensor:
        return F.group_norm(x, module.num_groups, None, None, module.eps)


class BatchNorm(Norm):
    module = _BatchNorm
    channels_first = True

    def refusal(self, module: nn.Module) -> str | None:
        if getattr(module, "running_mean", None) is None:
            return "without running statistics, its output depends on the rest of the batch"
        return super().refusal(module)

    def normalised(self, module: _BatchNorm, x: Tensor) -> Tensor:
        mean, variance = module.running_mean, module.running_var
        return F.batch_norm(x, mean, variance, None, None, False, 0.0, module.eps)


class NamedNorm(Norm):
    """Any other module that is called a norm (the RMS norms of transformers) and whose only
    parameters are a weight, and perhaps a bias, of the size of its last dimension.

    Its output is affine in them, so x̂ is the difference of its outputs with a weight of 1 and of 0.
    Like every layer, it is tracked only if the result is autograd's gradient.
    """

    module = ("*Norm",)

    def claims(self, module: nn.Module) -> bool:
        parameters = {name: p for name, p in module._parameters.items() if p is not None}
        return (
            type(module).__name__.endswith(("RMSNorm", "LayerNorm"))
            and not module._modules
            and "weight" in parameters
            and parameters.keys() <= {"weight", "bias"}
            and all(p.dim() == 1 for p in parameters.values())
        )

    def normalised(self, module: Any, x: Tensor) -> Tensor:
        outputs = []
        for weight in (torch.ones_like(module.weight), torch.zeros_like(module.weight)):
            twin = copy.copy(module)
            twin._parameters = module._parameters | {"weight": nn.Parameter(weight)}
            outputs.append(twin.forward(x))  # without the hooks
        difference: Tensor = outputs[0] - outputs[1]
        return difference


for kind in (NamedNorm, LayerNorm, RMSNorm, GroupNorm, BatchNorm):
    register(kind())
