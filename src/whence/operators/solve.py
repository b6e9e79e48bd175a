"""(H + Δ)⁻¹ and f(S H S + Δ) for an EK-FAC H and diagonal S, Δ in the parameters' own coordinates.

They share no basis, so there is no closed form; conjugate gradients and Lanczos iterations need a
few dozen products with H, each two rotations. The diagonal of the whole matrix preconditions the
former.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from whence.layers.passes import products_as
from whence.operators.fit import BlockCurvature
from whence.operators.krylov import conjugate_gradients, matrix_functions
from whence.operators.products import turn


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
    scale = diagonal_of(curvature) + shift

    def product(x: Tensor) -> Tensor:
        return _times(curvature, x).add_(x * shift)

    with products_as("highest"):  # rounded to TF32 they never give five digits
        found = conjugate_gradients(
            lambda x: product(x.reshape(-1, *shift.shape)).flatten(1),
            lambda x: x / scale.flatten(),
            right.flatten(1),
            most,
            1e-10 if right.dtype == torch.float64 else 1e-5,
        )
    if bool((found.steps == most).any()):
        warnings.warn(
            f"the inverse of layer {name} is only known to {float(found.residuals.max()):.0e} "
            f"after {most} steps of conjugate gradients: raise the damping, or use float64",
            stacklevel=2,
        )
    return found.x.view_as(right)


def apply(
    curvature: BlockCurvature,
    scale: Tensor,
    shift: Tensor,
    functions: Sequence[Callable[[Tensor], Tensor]],
    right: Tensor,
    name: str,
    most: int = 300,
) -> list[Tensor]:
    """f(S H S + diag(shift)) right for each function f, to ten (float32: four) digits.

    Args:
        scale, shift: S and its like (o, width), not negative.
        functions: elementwise on eigenvalues.
        right, name: as in `solve`.
    """
    if curvature.basis is None:
        σ = scale.square() * curvature.eigenvalues + shift
        return [right * f(σ) for f in functions]

    def product(x: Tensor) -> Tensor:
        x = x.reshape(-1, *scale.shape)
        return _times(curvature, x * scale).mul_(scale).add_(x * shift).flatten(1)

    tolerance = 1e-10 if right.dtype == torch.float64 else 1e-4
    with products_as("highest"):
        found = matrix_functions(product, functions, right.flatten(1), most, tolerance)
    if bool((found.residuals > tolerance).any()):
        warnings.warn(
            f"the dynamics of layer {name} are only known to {float(found.residuals.max()):.0e} "
            f"after {most} Lanczos steps: use float64, or another form than exact=True",
            stacklevel=2,
        )
    return [x.view_as(right) for x in found.x]


def _times(curvature: BlockCurvature, x: Tensor) -> Tensor:
    """H x, in the parameters' own coordinates."""
    turned = turn(x, None, curvature.basis).mul_(curvature.eigenvalues)
    return turn(turned, curvature.basis, None)
