"""Batch norm in training mode, with the statistics of its batch and a cheap second derivative.

With x̂ = (x - μ) r and means ⟨·⟩ over a channel's N numbers, the backward pass of y = γ x̂ + β is

    dx = γ r (dy - ⟨dy⟩ - x̂ ⟨dy x̂⟩)            dγ = N ⟨dy x̂⟩            dβ = N ⟨dy⟩

PyTorch differentiates it in about thirty passes over the batch. In closed form, the derivative of
Σ a dx + b dγ + c dβ in dy and in x is a sum of a, dy and x with one coefficient per channel; with
p = b - γ r ⟨a x̂⟩ and Q = ⟨a dy⟩ - ⟨a⟩⟨dy⟩ - ⟨a x̂⟩⟨dy x̂⟩,

    in dy:    γ r (a - ⟨a⟩) + p x̂ + c                                        in γ:    r N Q
    in x:     r p (dy - ⟨dy⟩ - x̂ ⟨dy x̂⟩) - γ r² (⟨dy x̂⟩ (a - ⟨a⟩ - x̂ ⟨a x̂⟩) + Q x̂)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm

from whence.errors import InvalidInput


def normalise(norm: _BatchNorm, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A batch norm's output in training mode; the mean of the batch, and its variance (n - 1)."""
    if type(norm).forward not in (_BatchNorm.forward, SyncBatchNorm.forward):
        raise InvalidInput(
            f"{type(norm).__name__} overrides forward, which the replay of a training does not "
            "support: use torch's batch norm, or Source"
        )
    norm._check_input_dim(x)  # type: ignore[no-untyped-call]
    apply: Any = _Normalise.apply
    outputs: tuple[Tensor, Tensor, Tensor] = apply(x, norm.weight, norm.bias, norm.eps)
    return outputs


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        like = x if weight is None else weight
        mean, variance = like.new_zeros(x.shape[1]), like.new_zeros(x.shape[1])
        # a momentum of 1 leaves the statistics of the batch
        y, mu, r = torch.native_batch_norm(x, weight, bias, mean, variance, True, 1.0, eps)
        ctx.save_for_backward(x, weight, mu, r)
        ctx.set_materialize_grads(False)
        return y, mean, variance

    @staticmethod
    def backward(
        ctx: Any, dy: Tensor | None, dmean: Tensor | None, dvariance: Tensor | None
    ) -> Any:
        x, weight, mu, r = ctx.saved_tensors
        dx, dweight, dbias = None, None, None
        if dy is not None:
            apply: Any = _Backward.apply
            dx, dweight, dbias = apply(dy, x, weight, mu, r)
        count = x.numel() // x.shape[1]
        if dvariance is not None:
            slope = 2 / (count - 1) * dvariance
            moved = -slope * mu if dmean is None else dmean / count - slope * mu
            part = _wide(slope, x) * x + _wide(moved, x)
            dx = part if dx is None else dx + part
        elif dmean is not None:
            part = _wide(dmean / count, x).expand_as(x)
            dx = part if dx is None else dx + part
        if weight is None:
            return dx, None, None, None
        return dx, dweight, dbias, None


class _Backward(torch.autograd.Function):
    """dx, dγ and dβ; and their derivative, in closed form."""

    @staticmethod
    def forward(
        ctx: Any, dy: Tensor, x: Tensor, weight: Tensor | None, mu: Tensor, r: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        dx, dweight, dbias = torch.ops.aten.native_batch_norm_backward(
            dy, x, weight, None, None, mu, r, True, 0.0, [True, True, True]
        )
        ctx.save_for_backward(dy, x, weight, mu, r, dweight, dbias)
        ctx.set_materialize_grads(False)
        return dx, dweight, dbias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, a: Tensor | None, b: Tensor | None, c: Tensor | None) -> Any:
        dy, x, weight, mu, r, dweight, dbias = ctx.saved_tensors
        dims = [k for k in range(x.dim()) if k != 1]
        count = x.numel() // x.shape[1]
        γ = torch.ones_like(r) if weight is None else weight
        mean_dy, mean_dy_x = dbias / count, dweight / count  # ⟨dy⟩, ⟨dy x̂⟩
        mean_a = mean_a_x = rest = torch.zeros_like(r)  # ⟨a⟩, ⟨a x̂⟩, Q
        if a is not None:
            mean_a = a.sum(dims) / count
            mean_a_x = r * ((a * x).sum(dims) / count - mu * mean_a)
            rest = (a * dy).sum(dims) / count - mean_dy * mean_a - mean_dy_x * mean_a_x
        # the coefficient of x̂ in the derivative in dy, times r; also that of dy in the one in x
        shared = -γ * r * r * mean_a_x if b is None else r * (b - γ * r * mean_a_x)
        constant = -γ * r * mean_a - shared * mu
        constant = constant if c is None else constant + c
        in_dy = torch.addcmul(_wide(constant, x), _wide(shared, x), x)
        of_a = -γ * r * r * mean_dy_x
        of_x = r * (-γ * r * r * rest - mean_dy_x * shared - mean_a_x * of_a)
        constant = -mean_dy * shared - mean_a * of_a - of_x * mu
        in_x = torch.addcmul(_wide(constant, x), _wide(of_x, x), x)
        in_x = in_x.addcmul_(_wide(shared, x), dy)
        if a is not None:
            in_dy = in_dy.addcmul_(_wide(γ * r, x), a)
            in_x = in_x.addcmul_(_wide(of_a, x), a)
        return in_dy, in_x, None if weight is None else r * count * rest, None, None


def _wide(channel: Tensor, x: Tensor) -> Tensor:
    """(c,) as (1, c, 1, ...)."""
    return channel.view(1, -1, *[1] * (x.dim() - 2))
