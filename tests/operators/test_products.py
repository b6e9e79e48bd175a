"""The heavy products against sums that are written out."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from whence.operators import products
from whence.operators.operator import ALIGNED, Basis, rotate


def orthogonal(side: int) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(side, side, dtype=torch.float64))[0]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("t", "i", "o"), [(1, 4, 3), (2, 4, 3), (9, 4, 3), (4, 3, 9)])
def test_products_in_padded_bases(
    t: int, i: int, o: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's bases have columns of zeros, so that rows are aligned."""
    torch.manual_seed(0)
    a, s = (torch.randn(5, t, side, dtype=torch.float64) for side in (i, o))
    basis = Basis(orthogonal(o), orthogonal(i + bias))
    ones = torch.ones(5, t, int(bias), dtype=torch.float64)
    gradients = torch.einsum("nto,nti->noi", s, torch.cat([a, ones], 2))
    rotated = torch.einsum("po,npi,iq->noq", basis.outputs, gradients, basis.inputs)
    close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
    for multiple in (1, 8):
        monkeypatch.setitem(ALIGNED, "cpu", multiple)
        total = torch.zeros(o, i + bias, dtype=torch.float64)
        products.add_squares(total, a, s, basis.aligned(), bias)
        close(total, rotated.square().sum(0))
        close(products.build(a, s, basis, bias), rotated)
        close(rotate(gradients, None, basis), rotated)
        close(rotate(rotated, basis, None), gradients)
        other = Basis(orthogonal(o), orthogonal(i + bias))
        close(rotate(rotated, basis, other), rotate(gradients, None, other))
