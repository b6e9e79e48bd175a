"""D^½ H D^½ of one block in closed form: EK-FAC's two steps, repeated.

H = Q Λ Qᵀ with Q = Q_S ⊗ Q_A has the sides S = Q_S diag(Λ1) Q_Sᵀ and A = Q_A diag(1ᵀΛ) Q_Aᵀ, its
partial traces. With R = D^½ as a matrix (o, width),

    S̃ = S ∘ (R diag(A) Rᵀ)      Ã = A ∘ (Rᵀ diag(S) R)
    Λ̃ = diag(Q̃ᵀ D^½ H D^½ Q̃)

Q̃_S and Q̃_A are the eigenbases of S̃ and Ã, up to a factor the sides of D^½ (S ⊗ A) D^½. Λ̃ is
computed with R ≈ Σ_k u_k w_kᵀ, and then scaled to the true trace, Σ D ∘ diag(H):

    Λ̃ = Σ_{k,j} (U_k ∘ U_j)ᵀ Λ (W_k ∘ W_j)      U_k = Q_Sᵀ diag(u_k) Q̃_S    W_k = Q_Aᵀ diag(w_k) Q̃_A

Few terms are enough: Adam's second moments are close to one number per output times one per input.
Q̃ Λ̃ Q̃ᵀ leaves out what D^½ H D^½ has off the diagonal in these bases. `Whitened` keeps that, by
Krylov iterations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whence.operators.operator import Basis
from whence.operators.products import leading

ROOT_TERMS = 4  # of R ...
EXACT_TERMS = 16  # ... but all of them, if these are no more


def whitened_block(Λ: Tensor, basis: Basis | None, R: Tensor) -> tuple[Tensor, Basis | None]:
    """Λ̃ and Q̃, from Λ and R (o, width)."""
    if basis is None:
        return Λ * R.square(), None
    Q_S, Q_A = basis.outputs, basis.inputs
    S, A = _diagonal(Q_S, Λ.sum(1)), _diagonal(Q_A, Λ.sum(0))
    whitened = Basis(
        None if Q_S is None else _eigenvectors(Q_S, Λ.sum(1), (R * A) @ R.mT),
        _eigenvectors(Q_A, Λ.sum(0), (R.mT * S) @ R),
    )
    u, w = terms(R)
    U = None if Q_S is None else [Q_S.mT @ (x[:, None] * whitened.outputs) for x in u]
    W = [Q_A.mT @ (x[:, None] * whitened.inputs) for x in w]
    values = torch.zeros_like(Λ)
    for k in range(len(u)):
        for j in range(k + 1):
            left = (u[k] * u[j])[:, None] * Λ if U is None else (U[k] * U[j]).mT @ Λ
            values.addmm_(left, W[k] * W[j], alpha=1 if k == j else 2)
    values.clamp_min_(0.0)  # rounding errors can be below
    trace = (basis.diagonal(Λ) * R.square()).sum()
    return values * (trace / values.sum().clamp_min(torch.finfo(Λ.dtype).tiny)), whitened


def terms(R: Tensor) -> tuple[Tensor, Tensor]:
    """u (k, o) and w (k, width) with R ≈ Σ_k u_k w_kᵀ."""
    most = min(R.shape)
    (left,), (right,) = leading(R[None], most if most <= EXACT_TERMS else ROOT_TERMS)
    return left, right


def _diagonal(Q: Tensor | None, values: Tensor) -> Tensor:
    """diag(Q diag(values) Qᵀ); Q None is the identity."""
    return values if Q is None else Q.square() @ values


def _eigenvectors(Q: Tensor, values: Tensor, weights: Tensor) -> Tensor:
    """Those of (Q diag(values) Qᵀ) ∘ weights, computed in float64."""
    Q = Q.double()
    matrix = (Q * values.double()) @ Q.mT * weights.double()
    vectors: Tensor = torch.linalg.eigh(matrix)[1]
    return vectors.contiguous().to(values)
