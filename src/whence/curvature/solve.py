"""(H + Δ)⁻¹ for an EK-FAC H and a diagonal Δ in the parameters' own coordinates.

The two share no basis, so there is no closed form; conjugate gradients need a few dozen products
with H, each two rotations. The diagonal of the whole matrix is the preconditioner.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from whence.curvature.fit import BlockCurvature
from whence.curvature.products import turn


def diagonal_of(curvature: BlockCurvature) -> Tensor:
    """The diagonal (o, width) of Q Λ Qᵀ in the parameters' own coordinates."""
    if curvature.basis is None:
        return curvature.eigenvalues
    return (
        curvature.basis.outputs.square()
        @ curvature.eigenvalues
        @ curvature.basis.inputs.square().mT
    )


def solve(
    curvature: BlockCurvature, shift: Tensor, right: Tensor, name: str, most: int = 2000
) -> Tensor:
    """x (q, o, width) with (H + diag(shift)) x = right, to ten (float32: five) digits.

    Args:
        shift: Δ (o, width), positive.
        right: (q, o, width), in the parameters' own coordinates, as is the result.
        name: of the block, for messages.
    """
    if curvature.basis is None:
        return right / (curvature.eigenvalues + shift)
    tolerance = 1e-10 if right.dtype == torch.float64 else 1e-5
    scale = diagonal_of(curvature) + shift

    def product(x: Tensor) -> Tensor:
        turned = turn(x, None, curvature.basis).mul_(curvature.eigenvalues)
        return turn(turned, curvature.basis, None).add_(x * shift)

    def inner(x: Tensor, y: Tensor) -> Tensor:
        return (x * y).sum((1, 2), keepdim=True)

    x = torch.zeros_like(right)
    residual = right.clone()
    conditioned = residual / scale
    direction = conditioned.clone()
    size = inner(residual, conditioned)
    goal = tolerance**2 * size
    for _ in range(most):
        if bool((size <= goal).all()):
            return x
        along = product(direction)
        step = (size / inner(direction, along)).nan_to_num(0.0)  # 0/0: already solved
        x += step * direction
        residual -= step * along
        conditioned = residual / scale
        before, size = size, inner(residual, conditioned)
        direction = conditioned + (size / before).nan_to_num(0.0) * direction
    left = float((size / goal.clamp_min(torch.finfo(goal.dtype).tiny)).sqrt().max()) * tolerance
    warnings.warn(
        f"the inverse of layer {name} is only known to {left:.0e} after {most} steps of conjugate "
        "gradients: raise the damping, or use float64",
        stacklevel=2,
    )
    return x
