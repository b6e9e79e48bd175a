"""One module that is S models: layers whose parameters are stacks (S, ...).

Activations stay an ordinary batch, the rows of model 0 first, then those of model 1, and so on: all
that acts example by example (activations, pooling, losses, the user's own forward) then needs no
change, and only layers with parameters must know whose rows are whose. Batched products do them at
the rate of plain ones; `torch.vmap`, which serves every other layer, costs more time around the
products than in them when models are small.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _Product(torch.autograd.Function):
    """x Wᵀ + b for each model: x (S, rows, i), W (S, o, i), b (S, o) or None.

    By hand, because autograd gives W a transposed gradient, which it then copies.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        if bias is None:
            return torch.bmm(x, weight.mT)
        return torch.baddbmm(bias.unsqueeze(1), x, weight.mT)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        (slope,), (x, weight) = slopes, ctx.saved_tensors
        into_x, into_weight, into_bias = ctx.needs_input_grad
        return (
            torch.bmm(slope, weight) if into_x else None,
            torch.bmm(slope.mT, x) if into_weight else None,
            slope.sum(1) if into_bias else None,
        )


def _by_model(x: Tensor, models: int) -> Tensor:
    """(S·n, ...) -> (S, n, ...)."""
    if len(x) % models:
        raise ValueError(f"{len(x)} rows do not come from {models} models alike")
    return x.reshape(models, len(x) // models, *x.shape[1:])


class StackedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        rows = _by_model(x, len(self.weight)).reshape(len(self.weight), -1, x.shape[-1])
        product: Tensor = _Product.apply(rows, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return product.reshape(*x.shape[:-1], product.shape[-1])


class StackedConv2d(nn.Conv2d):
    """All models' convolutions as the groups of one."""

    def forward(self, x: Tensor) -> Tensor:
        models, n = len(self.weight), len(x) // len(self.weight)
        joint = _by_model(x, models).transpose(0, 1).flatten(1, 2)
        if self.padding_mode != "zeros":
            joint = F.pad(joint, self._reversed_padding_repeated_twice, mode=self.padding_mode)
        y = F.conv2d(
            joint,
            self.weight.flatten(0, 1),
            None if self.bias is None else self.bias.flatten(),
            self.stride,
            self.padding if self.padding_mode == "zeros" else 0,
            self.dilation,
            self.groups * models,
        )
        return y.reshape(n, models, -1, *y.shape[2:]).transpose(0, 1).flatten(0, 1)


class StackedLayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        y = F.layer_norm(x, self.normalized_shape, eps=self.eps)
        return _affine(y, self.weight, self.bias, len(self.normalized_shape))


class StackedGroupNorm(nn.GroupNorm):
    def forward(self, x: Tensor) -> Tensor:
        y = F.group_norm(x, self.num_groups, eps=self.eps)
        return _affine(y.movedim(1, -1), self.weight, self.bias, 1).movedim(-1, 1)


def _affine(y: Tensor, weight: Tensor | None, bias: Tensor | None, axes: int) -> Tensor:
    """Each model's own scale and shift (S, ...) of the last axes."""
    for parameter, into in ((weight, torch.mul), (bias, torch.add)):
        if parameter is not None:
            rows = _by_model(y, len(parameter))
            ones = [1] * (rows.dim() - 1 - axes)
            y = into(rows, parameter.reshape(len(parameter), *ones, *parameter.shape[1:])).reshape(
                y.shape
            )
    return y


class StackedEmbedding(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        models, rows = self.weight.shape[:2]
        if self.max_norm is not None or self.scale_grad_by_freq or self.sparse:
            raise ValueError("an Embedding with max_norm, scale_grad_by_freq or sparse gradients")
        own = torch.arange(models, device=ids.device) * rows
        shifted = _by_model(ids, models) + own.reshape(models, *[1] * ids.dim())
        found = F.embedding(shifted.reshape(ids.shape), self.weight.flatten(0, 1))
        return _padded(found, ids, self.padding_idx)


class VmappedEmbedding(nn.Embedding):
    """One with padding, of which `torch.vmap` spares the first model's alone a gradient."""

    def forward(self, ids: Tensor) -> Tensor:
        found = F.embedding(
            ids,
            self.weight,
            None,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.sparse,
        )
        return _padded(found, ids, self.padding_idx)


def _padded(found: Tensor, ids: Tensor, padding: int | None) -> Tensor:
    """Embeddings, of which the padding's has no gradient."""
    if padding is None:
        return found
    return torch.where((ids == padding).unsqueeze(-1), found.detach(), found)


STACKED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: StackedLinear,
    nn.Conv2d: StackedConv2d,
    nn.LayerNorm: StackedLayerNorm,
    nn.GroupNorm: StackedGroupNorm,
    nn.Embedding: StackedEmbedding,
}


def unstackable(model: nn.Module) -> str | None:
    """The first layer with parameters that has no stacked form, or None."""
    for name, module in model.named_modules():
        own = next(module.parameters(recurse=False), None)
        if own is not None and type(module) not in STACKED:
            return f"{name or 'the model'} ({type(module).__name__})"
    return None


def stack_parameters(
    template: nn.Module, states: Sequence[Mapping[str, Tensor]], device: torch.device
) -> dict[str, nn.Parameter]:
    """{name: (S, ...)} of the template's parameters, tied ones once. A state may come twice."""
    kept: dict[str, nn.Parameter] = {}
    for name, parameter in template.named_parameters():
        rows = [state[name].to(device) for state in states]
        kept[name] = nn.Parameter(torch.stack(rows), requires_grad=parameter.requires_grad)
    return kept


def stack_modules(template: nn.Module, parameters: Mapping[str, nn.Parameter]) -> nn.Module:
    """A copy of the template whose layers are stacks with these parameters."""
    twins = {id(p): parameters[name] for name, p in template.named_parameters()}
    places = [
        (path, name, twins[id(p)])
        for path, module in template.named_modules()
        for name, p in module.named_parameters(recurse=False, remove_duplicate=False)
    ]
    stacked = copy.deepcopy(template)
    for path, name, parameter in places:
        module = stacked.get_submodule(path)
        module.__class__ = STACKED.get(type(module), type(module))
        setattr(module, name, parameter)
    return stacked


def make_vmappable(template: nn.Module) -> None:
    """Swap the layers that `torch.vmap` gets wrong."""
    for name, module in template.named_modules():
        if (
            isinstance(module, (nn.Embedding, nn.EmbeddingBag))
            and module.padding_idx is not None
            and not isinstance(module, VmappedEmbedding)
        ):
            if type(module) is not nn.Embedding:
                raise ValueError(f"{name} ({type(module).__name__}) has a padding_idx")
            module.__class__ = VmappedEmbedding
