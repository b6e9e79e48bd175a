"""Batch norm's derivatives in closed form, against PyTorch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.comparing import close
from torch import Tensor, nn

from whence.errors import InvalidInput
from whence.replay.norms import normalise


def data(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def layer(shape: tuple[int, ...], affine: bool) -> Any:
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)]
    norm = kind(shape[1], affine=affine, dtype=torch.float64)
    if affine:
        norm.weight.data.copy_(data(shape[1], seed=1))
        norm.bias.data.copy_(data(shape[1], seed=2))
    return norm


def by_torch(norm: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dims = [k for k in range(x.dim()) if k != 1]
    y = nn.functional.batch_norm(x, None, None, norm.weight, norm.bias, True, 0.0, norm.eps)
    return y, x.mean(dims), x.var(dims)


def twice(outputs: tuple[Tensor, Tensor, Tensor], leaves: list[Tensor], queries: int) -> Any:
    """Derivatives of a loss's gradient and of the statistics, along several directions at once."""
    y, *statistics = outputs
    loss = (y**3 * data(*y.shape, seed=3)).sum()
    slopes = torch.autograd.grad(loss, leaves, create_graph=True)
    moved = [*slopes, *statistics]
    directions = [data(queries, *one.shape, seed=k) for k, one in enumerate(moved)]
    if queries == 1:
        return torch.autograd.grad(moved, leaves, [v[0] for v in directions])
    return torch.autograd.grad(moved, leaves, directions, is_grads_batched=True)


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(7, 4), (5, 3, 6), (5, 3, 4, 2)])
def test_derivatives_are_those_of_torch(shape: tuple[int, ...], affine: bool, queries: int) -> None:
    norm, x = layer(shape, affine), data(*shape, seed=4).requires_grad_()
    leaves = [x, *norm.parameters()]
    ours, theirs = normalise(norm, x), by_torch(norm, x)
    for one, other in zip(ours, theirs, strict=True):
        close(one.detach(), other.detach(), 1e-12)
    for one, other in zip(
        twice(ours, leaves, queries), twice(theirs, leaves, queries), strict=True
    ):
        close(one, other, 1e-10)


def test_running_statistics_are_left_alone() -> None:
    norm = nn.BatchNorm1d(4)
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    normalise(norm, torch.randn(6, 4))
    assert all(torch.equal(before[name], value) for name, value in norm.state_dict().items())


def test_a_forward_pass_of_its_own_is_refused() -> None:
    class Shifted(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    with pytest.raises(InvalidInput, match="Shifted overrides forward"):
        normalise(Shifted(4), torch.randn(6, 4))
