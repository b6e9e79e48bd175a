"""One module for S models: layers whose parameters are stacks (S, ...).

Activations stay an ordinary batch: first the rows of model 0, then those of model 1, and so on.
Code that acts on each example (activations, pooling, losses, the user's forward) then needs no
change; only layers with parameters must know which rows belong to which model. Their batched
products are as fast as plain ones. `torch.vmap`, which handles every other layer, spends more time
around the products than in them when models are small.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from whence.errors import InvalidInput
from whence.layers.recurrent import FAMILIES, Linear, stepwise

# From this much work per model on, convolutions and batch norms process one model after another:
# one model saturates the device, and its rows are already a batch in the user's memory format. With
# less work they process all models in one call. Measured on a CPU; on a GPU, the capacity of its
# multiprocessors.
PRODUCTS_APART = {"cpu": 2**24, "cuda": 2**28}  # multiplications of a convolution
NUMBERS_APART = {"cpu": 2**14, "cuda": 2**20}  # numbers to normalise


class _Product(torch.autograd.Function):
    """x Wᵀ + b for each model: x (S, rows, i), W (S, o, i), b (S, o) or None.

    Written by hand, because autograd computes a transposed gradient of W, and then copies it.
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
        raise InvalidInput(f"{len(x)} rows cannot be divided among {models} models")
    return x.reshape(models, len(x) // models, *x.shape[1:])


def _side_by_side(rows: Tensor) -> Tensor:
    """(S, n, C, ...) -> (n, S·C, ...): the channels of all models side by side."""
    return rows.transpose(0, 1).flatten(1, 2)


def _among_rows(y: Tensor, models: int) -> Tensor:
    """(n, S·C, ...) -> (S·n, C, ...)."""
    return y.reshape(len(y), models, -1, *y.shape[2:]).transpose(0, 1).flatten(0, 1)


def _apart(layer: Callable[..., Tensor], x: Tensor, models: int, *stacks: Tensor | None) -> Tensor:
    """Apply the layer to one model after another, with its rows of x and of each stack."""
    if models == 1:  # avoids copying the rows
        return layer(x, *(None if s is None else s.squeeze(0) for s in stacks))
    by_stack = [[None] * models if s is None else s.unbind() for s in stacks]
    rows = _by_model(x, models).unbind()
    return torch.cat([layer(*arguments) for arguments in zip(rows, *by_stack, strict=True)])


def _autocast(x: Tensor | None) -> Tensor | None:
    """Cast as `torch.autocast` casts the inputs of a product, where it is enabled."""
    if x is None or x.dtype is torch.float64 or not torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` of each model's rows."""
    rows = _by_model(x, len(weight)).reshape(len(weight), -1, x.shape[-1])
    # here, because autocast does not reach the backward pass of a custom function
    factors = map(_autocast, (rows, weight, bias))
    product: Tensor = _Product.apply(*factors)  # type: ignore[no-untyped-call]
    return product.reshape(*x.shape[:-1], product.shape[-1])


class StackedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return _linear(x, self.weight, self.bias)


class StackedConv1D(nn.Module):
    """Hugging Face's Conv1D: a Linear whose weight is stored as (S, i, o)."""

    weight: Tensor
    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        rows = _by_model(x, len(self.weight)).reshape(len(self.weight), -1, x.shape[-1])
        product = torch.baddbmm(self.bias.unsqueeze(1), rows, self.weight)
        return product.reshape(*x.shape[:-1], product.shape[-1])


class _StackedConvolution(_ConvNd):
    """The convolutions of all models as the groups of one convolution, if they are small."""

    _conv_forward: Callable[..., Tensor]
    _convolved: Callable[..., Tensor]

    def forward(self, x: Tensor) -> Tensor:
        models = len(self.weight)
        rows = _by_model(x, models)
        places = rows[0, :, 0].numel() // math.prod(self.stride)
        if places * self.weight[0].numel() >= PRODUCTS_APART.get(x.device.type, 0):
            return _apart(self._conv_forward, x, models, self.weight, self.bias)
        joint = _side_by_side(rows)
        if self.padding_mode != "zeros":
            joint = F.pad(joint, self._reversed_padding_repeated_twice, mode=self.padding_mode)
        y = self._convolved(
            joint,
            self.weight.flatten(0, 1),
            None if self.bias is None else self.bias.flatten(),
            self.stride,
            self.padding if self.padding_mode == "zeros" else 0,
            self.dilation,
            self.groups * models,
        )
        return _among_rows(y, models)


class StackedConv1d(_StackedConvolution, nn.Conv1d):
    _convolved = staticmethod(F.conv1d)


class StackedConv2d(_StackedConvolution, nn.Conv2d):
    _convolved = staticmethod(F.conv2d)


class StackedConv3d(_StackedConvolution, nn.Conv3d):
    _convolved = staticmethod(F.conv3d)


class _StackedBatchNorm(_BatchNorm):
    """Statistics over the rows of each model.

    Running statistics are stacks (S, C), updated in place: a CUDA graph holds their addresses.
    """

    models: int

    def forward(self, x: Tensor) -> Tensor:
        self._check_input_dim(x)  # type: ignore[no-untyped-call]
        mean, variance = self.running_mean, self.running_var
        if mean is None or variance is None or (self.training and not self.track_running_stats):
            return self._normalise(x, None, None, 0.0)
        if not self.training:
            return self._normalise(x, mean, variance, 0.0)
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        if self.momentum is not None:
            return self._normalise(x, mean, variance, self.momentum)
        batch = torch.zeros_like(mean), torch.zeros_like(variance)  # filled by the next line
        y = self._normalise(x, *batch, 1.0)
        share = self.num_batches_tracked.unsqueeze(1).to(mean).reciprocal()
        mean.lerp_(batch[0], share)
        variance.lerp_(batch[1], share)
        return y

    def _normalise(
        self, x: Tensor, mean: Tensor | None, variance: Tensor | None, momentum: float
    ) -> Tensor:
        """`momentum` is the weight of this batch in the running statistics."""
        by_batch = self.training or mean is None

        def normalised(x: Tensor, *stacks: Tensor | None) -> Tensor:
            return F.batch_norm(x, *stacks, by_batch, momentum, self.eps)  # type: ignore[call-arg, arg-type]

        rows, stacks = _by_model(x, self.models), (mean, variance, self.weight, self.bias)
        if rows[0].numel() >= NUMBERS_APART.get(x.device.type, 0):
            return _apart(normalised, x, self.models, *stacks)
        flat = [None if s is None else s.view(-1) for s in stacks]
        return _among_rows(normalised(_side_by_side(rows), *flat), self.models)


class StackedBatchNorm1d(_StackedBatchNorm, nn.BatchNorm1d): ...


class StackedBatchNorm2d(_StackedBatchNorm, nn.BatchNorm2d): ...


class StackedBatchNorm3d(_StackedBatchNorm, nn.BatchNorm3d): ...


class StackedLayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        y = F.layer_norm(x, self.normalized_shape, eps=self.eps)
        return _affine(y, self.weight, self.bias, len(self.normalized_shape))


class StackedRMSNorm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        y = F.rms_norm(x, self.normalized_shape, eps=self.eps)
        return _affine(y, self.weight, None, len(self.normalized_shape))


class StackedGroupNorm(nn.GroupNorm):
    def forward(self, x: Tensor) -> Tensor:
        y = F.group_norm(x, self.num_groups, eps=self.eps)
        return _affine(y.movedim(1, -1), self.weight, self.bias, 1).movedim(-1, 1)


def _affine(y: Tensor, weight: Tensor | None, bias: Tensor | None, axes: int) -> Tensor:
    """Scale and shift the last axes by the parameters (S, ...) of each model."""
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
        return _looked_up(self, ids)


class StackedEmbeddingBag(nn.EmbeddingBag):
    """Bags (n, size), of which each has a sum or a mean of rows."""

    def forward(self, ids: Tensor, *others: Any, **named: Any) -> Tensor:  # type: ignore[override]
        if others or named or ids.dim() != 2 or self.mode == "max":
            raise InvalidInput("an EmbeddingBag has offsets, weights of its rows, or a maximum")
        there = torch.ones_like(ids) if self.padding_idx is None else ids != self.padding_idx
        total = (_looked_up(self, ids) * there.unsqueeze(2)).sum(1)
        return total if self.mode == "sum" else total / there.sum(1, keepdim=True).clamp_min(1)


def _looked_up(table: nn.Embedding | nn.EmbeddingBag, ids: Tensor) -> Tensor:
    """The row of each number, from the table of its model."""
    models, rows = table.weight.shape[:2]
    if table.max_norm is not None or table.scale_grad_by_freq or table.sparse:
        name = type(table).__name__.removeprefix("Stacked")
        raise InvalidInput(f"an {name} has max_norm, scale_grad_by_freq or sparse gradients")
    first_rows = torch.arange(models, device=ids.device) * rows
    shifted = _by_model(ids, models) + first_rows.reshape(models, *[1] * ids.dim())
    embedded = F.embedding(shifted.reshape(ids.shape), table.weight.flatten(0, 1))
    return _without_padding_gradient(embedded, ids, table.padding_idx)


class VmappedEmbedding(nn.Embedding):
    """An Embedding with padding, whose gradient `torch.vmap` masks for the first model only."""

    def forward(self, ids: Tensor) -> Tensor:
        embedded = F.embedding(
            ids,
            self.weight,
            None,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.sparse,
        )
        return _without_padding_gradient(embedded, ids, self.padding_idx)


def _without_padding_gradient(embedded: Tensor, ids: Tensor, padding: int | None) -> Tensor:
    """The embeddings, without a gradient for those of the padding."""
    if padding is None:
        return embedded
    return torch.where((ids == padding).unsqueeze(-1), embedded.detach(), embedded)


class StackedMultiheadAttention(nn.MultiheadAttention):
    _qkv_same_embed_dim = property(lambda _: False)  # keeps encoders from their fused kernel

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if self.bias_k is not None or self.add_zero_attn or query.dim() != 3:
            raise InvalidInput("attention has a separate key, or no batch")
        weights: Sequence[Tensor] = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3, 1)
        biases = [None] * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3, 1)
        given = [x if self.batch_first else x.transpose(0, 1) for x in (query, key, value)]
        q, k, v = (
            _linear(x, w, b).view(*x.shape[:2], self.num_heads, -1).transpose(1, 2)
            for x, w, b in zip(given, weights, biases, strict=True)
        )
        mask = _as_added(attn_mask, q)
        if mask is not None and mask.dim() == 3:  # one for each example and head
            mask = mask.reshape(len(q), -1, *mask.shape[1:])
        padding = _as_added(key_padding_mask, q)
        if padding is not None:
            padding = padding[:, None, None, :]
            mask = padding if mask is None else mask + padding
        attention = None
        if need_weights:
            products = q @ k.mT / math.sqrt(q.shape[3])
            attention = (products if mask is None else products + mask).softmax(3)
            y = F.dropout(attention, self.dropout, self.training) @ v
            attention = attention.mean(1) if average_attn_weights else attention
        else:
            share = self.dropout if self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, mask, share)
        y = self.out_proj(y.transpose(1, 2).flatten(2))
        return y if self.batch_first else y.transpose(0, 1), attention


def _as_added(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """A mask as numbers that are added before the softmax; True stands for -∞."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, -math.inf)


def _stepwise(kind: type[nn.Module], linear: Linear) -> type[nn.Module]:
    """A recurrent module that is computed step by step: its kernel knows one model only."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return stepwise(self, linear, *args, **kwargs)

    return type(f"Stepwise{kind.__name__}", (kind,), {"forward": forward})


VMAPPED = {kind: _stepwise(kind, F.linear) for kind in FAMILIES}
STACKED: dict[type[nn.Module], type[nn.Module]] = {
    **{kind: _stepwise(kind, _linear) for kind in FAMILIES},
    nn.Linear: StackedLinear,
    nn.Conv1d: StackedConv1d,
    nn.Conv2d: StackedConv2d,
    nn.Conv3d: StackedConv3d,
    nn.BatchNorm1d: StackedBatchNorm1d,
    nn.BatchNorm2d: StackedBatchNorm2d,
    nn.BatchNorm3d: StackedBatchNorm3d,
    nn.LayerNorm: StackedLayerNorm,
    nn.RMSNorm: StackedRMSNorm,
    nn.GroupNorm: StackedGroupNorm,
    nn.Embedding: StackedEmbedding,
    nn.EmbeddingBag: StackedEmbeddingBag,
    nn.MultiheadAttention: StackedMultiheadAttention,
    nn.modules.linear.NonDynamicallyQuantizableLinear: StackedLinear,  # its projection
}


def _stacked_form(module: nn.Module) -> type[nn.Module] | None:
    kind = type(module)
    if kind.__name__ == "Conv1D" and hasattr(module, "nf"):  # transformers may not be installed
        return StackedConv1D
    return STACKED.get(kind)


def unstackable(model: nn.Module) -> str | None:
    """The first layer that needs a stacked form but has none; or None."""
    for name, module in model.named_modules():
        learns = next(module.parameters(recurse=False), None) is not None
        if (learns or isinstance(module, _BatchNorm)) and _stacked_form(module) is None:
            return f"{name or 'the model'} ({type(module).__name__})"
    return None


def running_statistics(model: nn.Module, norms: type[nn.Module] = _BatchNorm) -> dict[str, Tensor]:
    """The buffers of batch norms, or other norms, which change during training."""
    buffers: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        if isinstance(module, norms):
            buffers |= module.named_buffers(path, recurse=False)
    return buffers


def stack_parameters(
    template: nn.Module, states: Sequence[Mapping[str, Tensor]], device: torch.device
) -> dict[str, nn.Parameter]:
    """{name: (S, ...)} of the template's parameters, tied ones once. States may repeat."""
    stacks: dict[str, nn.Parameter] = {}
    for name, parameter in template.named_parameters():
        rows = [state[name].to(device) for state in states]
        stacks[name] = nn.Parameter(torch.stack(rows), requires_grad=parameter.requires_grad)
    return stacks


def stack_modules(
    template: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    statistics: Mapping[str, Tensor],
    models: int,
) -> nn.Module:
    """A copy of the template whose layers are stacks with these parameters and statistics."""
    twins = {id(p): parameters[name] for name, p in template.named_parameters()}
    places: dict[str, Tensor] = {
        name: twins[id(p)] for name, p in template.named_parameters(remove_duplicate=False)
    }
    stacked = copy.deepcopy(template)
    for module in stacked.modules():
        module.__class__ = _stacked_form(module) or type(module)
        if isinstance(module, _StackedBatchNorm):
            module.models = models
    for name, stack in (places | dict(statistics)).items():
        path, _, attribute = name.rpartition(".")
        setattr(stacked.get_submodule(path), attribute, stack)
    return stacked


def make_vmappable(template: nn.Module) -> None:
    """Replace the layers that `torch.vmap` gets wrong."""
    for name, module in template.named_modules():
        module.__class__ = VMAPPED.get(type(module), type(module))
        if (
            isinstance(module, (nn.Embedding, nn.EmbeddingBag))
            and module.padding_idx is not None
            and not isinstance(module, VmappedEmbedding)
        ):
            if type(module) is not nn.Embedding:
                raise InvalidInput(f"{name} ({type(module).__name__}) has a padding_idx")
            module.__class__ = VmappedEmbedding
