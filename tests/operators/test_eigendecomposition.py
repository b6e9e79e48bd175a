"""Eigendecompositions of all matrices of a model, against NumPy's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from whence.errors import NotFinite
from whence.operators.eigendecomposition import eigendecompositions

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_all_matrices_are_decomposed(device: str) -> None:
    """On a GPU, by several threads."""
    torch.manual_seed(0)
    roots = {
        f"{side}.{k}/A": torch.randn(side, 4 * side) for side in (3, 40, 130) for k in range(9)
    }
    covariances = {name: root @ root.T for name, root in roots.items()}
    covariances["rows/S"] = torch.rand(7)
    matrices = {name: matrix.to(device) for name, matrix in covariances.items()}
    decomposed = {n: (Λ, Q) for n, Λ, Q in eigendecompositions(matrices, torch.device(device))}
    assert not matrices and decomposed.keys() == covariances.keys()
    Λ, Q = decomposed.pop("rows/S")
    assert Q is None and torch.equal(Λ.cpu(), covariances["rows/S"].double())
    for name, (Λ, Q) in decomposed.items():
        assert Q is not None and Q.is_contiguous() and Q.dtype == torch.float64
        values = np.linalg.eigvalsh(covariances[name].double().numpy())
        np.testing.assert_allclose(Λ.cpu().numpy(), values, rtol=1e-10, atol=1e-10 * values[-1])
        product = (Q * Λ @ Q.mT).cpu()
        scale = float(covariances[name].abs().max())
        torch.testing.assert_close(product, covariances[name].double(), rtol=0, atol=1e-12 * scale)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("key", ["A", "S"])
def test_a_matrix_that_is_not_finite_is_named(device: str, key: str) -> None:
    matrices = {"a.b/A": torch.eye(3), "a.b/S": torch.ones(2)}
    matrices[f"a.b/{key}"][0] = torch.inf
    matrices = {name: matrix.to(device) for name, matrix in matrices.items()}
    with pytest.raises(NotFinite, match=r"block a\.b overflow"):
        list(eigendecompositions(matrices, torch.device(device)))
