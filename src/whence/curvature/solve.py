"""(H + Δ)⁻¹ for an EK-FAC H and a diagonal Δ in the parameters' own coordinates.

The two share no basis, so there is no closed form; conjugate gradients need a few dozen products
with H, each two rotations. The diagonal of the whole matrix is the preconditioner.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from whence.curvature.fit import BlockCurvature
from whence.curvature.krylov import conjugate_gradients
from whence.curvature.products import turn
from whence.layers.passes import products_as


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

    with products_as("highest"):  # rounded to TF32 they never give five digits
        found = conjugate_gradients(
            lambda x: product(x.reshape(-1, *shift.shape)).flatten(1),
            lambda x: x / scale.flatten(),
            right.flatten(1),
            most,
            tolerance,
        )
    if bool((found.steps == most).any()):
        warnings.warn(
            f"the inverse of layer {name} is only known to {float(found.residuals.max()):.0e} "
            f"after {most} steps of conjugate gradients: raise the damping, or use float64",
            stacklevel=2,
        )
    return found.x.view_as(right)
