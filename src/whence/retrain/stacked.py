"""One module for S models: layers whose parameters are stacks (S, ...).

Activations stay an ordinary batch: first the rows of model 0, then those of model 1, and so on.
Code that acts on each example (activations, pooling, losses, the user's forward) then needs no
change; only layers with parameters must know which rows belong to which model. Their batched
products are as fast as plain ones. `torch.vmap`, which handles every other layer, spends more time
around the products than in them when models are small.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from whence.errors import InvalidInput

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
    each = [[None] * models if s is None else s.unbind() for s in stacks]
    rows = _by_model(x, models).unbind()
    return torch.cat([layer(*arguments) for arguments in zip(rows, *each, strict=True)])


def _autocast(x: Tensor | None) -> Tensor | None:
    """Cast as `torch.autocast` casts the inputs of a product, where it is enabled."""
    if x is None or x.dtype is torch.float64 or not torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


class StackedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        rows = _by_model(x, len(self.weight)).reshape(len(self.weight), -1, x.shape[-1])
        # here, because autocast does not reach the backward pass of a custom function
        factors = map(_autocast, (rows, self.weight, self.bias))
        product: Tensor = _Product.apply(*factors)  # type: ignore[no-untyped-call]
        return product.reshape(*x.shape[:-1], product.shape[-1])


class StackedConv1D(nn.Module):
    """Hugging Face's Conv1D: a Linear whose weight is stored as (S, i, o)."""

    weight: Tensor
    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        rows = _by_model(x, len(self.weight)).reshape(len(self.weight), -1, x.shape[-1])
        product = torch.baddbmm(self.bias.unsqueeze(1), rows, self.weight)
        return product.reshape(*x.shape[:-1], product.shape[-1])


class StackedConv2d(nn.Conv2d):
    """The convolutions of all models as the groups of one convolution, if they are small."""

    def forward(self, x: Tensor) -> Tensor:
        models = len(self.weight)
        rows = _by_model(x, models)
        places = rows[0, :, 0].numel() // (self.stride[0] * self.stride[1])
        if places * self.weight[0].numel() >= PRODUCTS_APART.get(x.device.type, 0):
            return _apart(self._conv_forward, x, models, self.weight, self.bias)
        joint = _side_by_side(rows)
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
        return _among_rows(y, models)


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


class StackedLayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        y = F.layer_norm(x, self.normalized_shape, eps=self.eps)
        return _affine(y, self.weight, self.bias, len(self.normalized_shape))


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
        models, rows = self.weight.shape[:2]
        if self.max_norm is not None or self.scale_grad_by_freq or self.sparse:
            raise InvalidInput("an Embedding has max_norm, scale_grad_by_freq or sparse gradients")
        first_rows = torch.arange(models, device=ids.device) * rows
        shifted = _by_model(ids, models) + first_rows.reshape(models, *[1] * ids.dim())
        embedded = F.embedding(shifted.reshape(ids.shape), self.weight.flatten(0, 1))
        return _without_padding_gradient(embedded, ids, self.padding_idx)


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


STACKED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: StackedLinear,
    nn.Conv2d: StackedConv2d,
    nn.BatchNorm1d: StackedBatchNorm1d,
    nn.BatchNorm2d: StackedBatchNorm2d,
    nn.LayerNorm: StackedLayerNorm,
    nn.GroupNorm: StackedGroupNorm,
    nn.Embedding: StackedEmbedding,
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
        if (
            isinstance(module, (nn.Embedding, nn.EmbeddingBag))
            and module.padding_idx is not None
            and not isinstance(module, VmappedEmbedding)
        ):
            if type(module) is not nn.Embedding:
                raise InvalidInput(f"{name} ({type(module).__name__}) has a padding_idx")
            module.__class__ = VmappedEmbedding
