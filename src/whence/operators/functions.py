"""The paper's matrix functions, of eigenvalues. `duration` is η̄K, rate times updates."""

from __future__ import annotations

import torch
from torch import Tensor


def survival(sigma: Tensor, duration: float | Tensor = 1.0) -> Tensor:
    """F_S(σ) = exp(-η̄Kσ): how much of a perturbation outlives a segment (Eq. 13)."""
    return torch.exp(-duration * sigma)


def response(sigma: Tensor, duration: float | Tensor = 1.0) -> Tensor:
    """F_r(σ) = (1 - exp(-η̄Kσ)) / σ: what a constant pull adds up to (Eq. 18); η̄K as σ → 0."""
    x = duration * sigma
    ratio = torch.where(x > 0, -torch.expm1(-x) / torch.where(x > 0, x, 1.0), 1.0)
    return duration * ratio


def decayed(sigma: Tensor) -> Tensor:
    """1 - exp(-σ): how much of a perturbation does not outlive a segment."""
    return -torch.expm1(-sigma)


def inverse(sigma: Tensor, damping: float | Tensor) -> Tensor:
    """F_inv(σ) = 1 / (σ + λ): the influence function's answer to the same question."""
    return 1.0 / (sigma + damping)


def significant(sigma: Tensor, squared: bool) -> Tensor:
    """1 where an eigenvalue is more than the rounding error of a zero, else 0.

    Args:
        squared: eigenvalues are sums of squares (EK-FAC's), whose rounding error is squared too.
    """
    rounding = 8 * torch.finfo(sigma.dtype).eps
    noise = rounding**2 * sigma.sum() if squared else rounding * sigma.max()
    return (sigma > noise).to(sigma.dtype)
