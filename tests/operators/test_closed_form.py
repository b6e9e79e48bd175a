"""D^½ H D^½ in closed form, against the same steps on written-out matrices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from whence.operators import Basis, EigenFactors
from whence.operators.closed_form import whitened_block

OUTPUTS, WIDTH = 5, 7


def orthogonal(n: int, generator: torch.Generator) -> Tensor:
    return torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))[0]


def whitened(block: EigenFactors, R: Tensor) -> EigenFactors:
    return EigenFactors(*whitened_block(block.eigenvalues, block.basis, R))


def matrix_of(block: EigenFactors) -> Tensor:
    """Q Λ Qᵀ, (o width, o width)."""
    if block.basis is None:
        return torch.diag(block.eigenvalues.flatten())
    outputs = block.basis.outputs
    Q_S = torch.eye(OUTPUTS, dtype=torch.float64) if outputs is None else outputs
    Q = torch.kron(Q_S.contiguous(), block.basis.inputs.contiguous())
    return Q @ torch.diag(block.eigenvalues.flatten()) @ Q.T


def written_out(block: EigenFactors, R: Tensor) -> Tensor:
    """Bases of partial traces, and the diagonal in them."""
    H = matrix_of(block)
    M = R.flatten()[:, None] * H * R.flatten()
    if block.basis is None:
        return M
    index = H.view(OUTPUTS, WIDTH, OUTPUTS, WIDTH)
    S, A = torch.einsum("oipi->op", index), torch.einsum("oioj->ij", index)
    left = torch.einsum("op,oi,ii,pi->op", S, R, A, R)
    right = torch.einsum("ij,oi,oo,oj->ij", A, R, S, R)
    by_row = block.basis.outputs is None
    Q_S = torch.eye(OUTPUTS, dtype=torch.float64) if by_row else torch.linalg.eigh(left)[1]
    Q = torch.kron(Q_S.contiguous(), torch.linalg.eigh(right)[1].contiguous())
    return Q @ torch.diag((Q.T @ M @ Q).diagonal()) @ Q.T


@pytest.mark.parametrize("kind", ["matrix", "rows", "diagonal"])
def test_the_written_out_matrix(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    eigenvalues, R = (
        torch.rand(OUTPUTS, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    outputs = orthogonal(OUTPUTS, generator) if kind == "matrix" else None
    basis = None if kind == "diagonal" else Basis(outputs, orthogonal(WIDTH, generator))
    block = EigenFactors(eigenvalues, basis)
    torch.testing.assert_close(matrix_of(whitened(block, R)), written_out(block, R))


def test_it_is_exact_for_a_product_of_two_sides() -> None:
    """H = S ⊗ A and D^½ = u wᵀ: D^½ H D^½ is a Kronecker product again."""
    generator = torch.Generator().manual_seed(1)
    sides = [torch.rand(n, generator=generator, dtype=torch.float64) for n in (OUTPUTS, WIDTH)]
    basis = Basis(orthogonal(OUTPUTS, generator), orthogonal(WIDTH, generator))
    block = EigenFactors(torch.outer(*sides), basis)
    R = torch.outer(torch.rand(OUTPUTS).double() + 0.1, torch.rand(WIDTH).double() + 0.1)
    expected = R.flatten()[:, None] * matrix_of(block) * R.flatten()
    torch.testing.assert_close(matrix_of(whitened(block, R)), expected)


def test_few_terms_keep_the_trace() -> None:
    generator = torch.Generator().manual_seed(2)
    eigenvalues, R = (torch.rand(40, 30, generator=generator) for _ in range(2))
    basis = Basis(*(orthogonal(n, generator).float() for n in (40, 30)))
    block = EigenFactors(eigenvalues, basis)
    trace = (block.parameter_diagonal() * R.square()).sum()
    torch.testing.assert_close(whitened(block, R).eigenvalues.sum(), trace)
