"""Products without negligible eigenvalues, and the leading eigenvectors, against dense matrices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from whence.operators import whitened
from whence.operators.ekfac import EKFAC
from whence.operators.factored import EigenFactors
from whence.operators.krylov import leading_directions
from whence.operators.operator import Basis, BlockDiagonal, BlockVectors, response, survival
from whence.operators.trimmed import Trimmed
from whence.operators.whitened import Whitened


def orthogonal(d: int, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    basis: Tensor = torch.linalg.qr(torch.randn(d, d, generator=g, dtype=torch.float64))[0]
    return basis


def decaying(o: int, i: int, largest: float) -> Tensor:
    """Products of falling eigenvalues of both sides."""
    one, other = (torch.logspace(0, -6, d, dtype=torch.float64) for d in (o, i))
    return largest * one.unsqueeze(1) * other


@pytest.mark.parametrize(("o", "i"), [(40, 7), (7, 40), (12, 12)])
@pytest.mark.parametrize("negligible", [0.0, 1e-6, 1e-3, 10.0])
def test_no_more_is_left_out_than_is_negligible(o: int, i: int, negligible: float) -> None:
    left, right, values = orthogonal(o, 0), orthogonal(i, 1), decaying(o, i, 3.0)
    values = values[torch.randperm(o)][:, torch.randperm(i)]
    x = torch.randn(5, o, i, dtype=torch.float64)
    exact = left @ ((left.mT @ x @ right) * values) @ right.mT
    trimmed = Trimmed.of(left, right, values, negligible)
    off = (trimmed.product(x) - exact).flatten(1).norm(dim=1) / x.flatten(1).norm(dim=1)
    assert float(off.max()) <= negligible + 1e-12
    if 0 < negligible < 1:
        assert trimmed.operations < o * i * (o + i)


def test_leading_directions() -> None:
    Q = orthogonal(200, 0)
    values = torch.cat([torch.tensor([900.0, 300, 50, 20]), torch.linspace(0, 1, 196)]).double()
    A = Q * values @ Q.T
    found, vectors = leading_directions(lambda x: x @ A, torch.ones(200).double(), 60, 4.0, 1e-9)
    torch.testing.assert_close(found[:4], values[:4])
    torch.testing.assert_close(vectors[:4] @ A, found[:4, None] * vectors[:4])
    assert len(found) < 20  # it stops where all that are left are small


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-4), (torch.float64, 1e-8)])
def test_functions_of_a_large_block_against_a_dense_matrix(
    dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With leading eigenvectors, and without negligible eigenvalues."""
    monkeypatch.setattr(whitened, "SMALL_SPACE", 100)
    o, i, g = 20, 30, torch.Generator().manual_seed(0)
    left, right, values = orthogonal(o, 0), orthogonal(i, 1), decaying(o, i, 300.0)
    root = torch.rand(o, i, generator=g, dtype=torch.float64) + 0.5
    v = torch.randn(3, o, i, generator=g, dtype=torch.float64)
    Q = torch.kron(left, right) * root.flatten().unsqueeze(1)
    sigma, U = torch.linalg.eigh(Q * values.flatten() @ Q.T)
    factors = EigenFactors(values.to(dtype), Basis(left, right).to(v.device, dtype))
    M = Whitened(EKFAC({"fc": factors}), BlockDiagonal({"fc": root.to(dtype)}), {})
    found = M.apply([response, survival], BlockVectors({"fc": v.to(dtype)}, {"fc": None}))
    alone = M.apply([response, survival], BlockVectors({"fc": v[1:2].to(dtype)}, {"fc": None}))
    for f, answer, one in zip((response, survival), found, alone, strict=True):
        assert answer is not None and one is not None
        expected = (v.flatten(1) @ U * f(sigma.clamp_min(0))) @ U.T
        off = (answer.values["fc"].flatten(1).double() - expected).norm() / expected.norm()
        assert float(off) <= tolerance
        # a query does not depend on its neighbours
        apart = (one.values["fc"] - answer.values["fc"][1:2]).norm() / one.values["fc"].norm()
        assert float(apart) <= tolerance / 10
