"""Products with aligned rows are the plain ones, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from whence.layers import aligned

PRODUCTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "x @ W.T": lambda x, weight, bias: x @ weight.T,
    "torch.matmul": lambda x, weight, bias: torch.matmul(x, weight.mT),
    "Tensor.matmul": lambda x, weight, bias: x.matmul(weight.t()),
    "F.linear": lambda x, weight, bias: F.linear(x, weight),
    "F.linear with a bias": F.linear,
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("shape", [(3, 5, 6), (7, 6)])
def test_products_and_gradients(
    name: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(aligned.ALIGNMENT_BYTES, "cpu", 16)
    monkeypatch.setattr(aligned, "MIN_COLUMNS", 9)
    padded = []
    linear = aligned.linear
    monkeypatch.setattr(aligned, "linear", lambda *args: (padded.append(1), linear(*args))[1])
    torch.manual_seed(0)
    for rows, times in ((13, 1), (16, 0), (7, 0)):  # long; aligned; short
        x, weight, bias = torch.randn(shape), torch.randn(rows, 6), torch.randn(rows)
        inputs = [each.bfloat16().requires_grad_() for each in (x, weight, bias)]
        plain = PRODUCTS[name](*inputs)
        with aligned.AlignedProducts():
            product = PRODUCTS[name](*inputs)
        assert len(padded) == times and product.is_contiguous()
        padded.clear()
        slope = torch.randn_like(plain)
        pairs = [
            torch.autograd.grad(each, inputs, slope, allow_unused=True) for each in (plain, product)
        ]
        for wanted, actual in zip((plain, *pairs[0]), (product, *pairs[1]), strict=True):
            assert (wanted is None) == (actual is None)
            if wanted is not None:
                torch.testing.assert_close(actual, wanted)
    with aligned.AlignedProducts():  # float32 in full precision, and vectors
        assert PRODUCTS[name](torch.randn(2, 6), torch.randn(13, 6), torch.zeros(13)).shape == (
            2,
            13,
        )
        assert torch.equal(torch.ones(3) @ torch.ones(3), torch.tensor(3.0))
    assert not padded
