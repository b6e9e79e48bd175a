"""The paper's matrix functions on eigenvalues. `duration` is η̄K, rate times updates."""

from __future__ import annotations

import torch
from torch import Tensor


def survival(sigma: Tensor, duration: float | Tensor) -> Tensor:
    """F_S(σ) = exp(-η̄Kσ): how much of a perturbation outlives a segment (Eq. 13)."""
    return torch.exp(-duration * sigma)


def response(sigma: Tensor, duration: float | Tensor) -> Tensor:
    """F_r(σ) = (1 - exp(-η̄Kσ)) / σ: what a steady pull adds up to (Eq. 18); η̄K as σ → 0."""
    x = duration * sigma
    ratio = torch.where(x > 0, -torch.expm1(-x) / torch.where(x > 0, x, 1.0), 1.0)
    return duration * ratio


def inverse(sigma: Tensor, damping: float | Tensor) -> Tensor:
    """F_inv(σ) = 1 / (σ + λ): the influence function's answer to the same question."""
    return 1.0 / (sigma + damping)
