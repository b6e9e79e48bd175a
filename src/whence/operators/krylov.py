"""Conjugate gradients and Lanczos iterations for a matrix that is only known by its products.

Pure functions of tensors: `product` maps vectors (q, p) to the matrix times each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]
LOOKED_AT = 4  # steps between two looks at whether a matrix function has converged


@dataclass(frozen=True)
class Solution:
    """x (q, p); and of each vector (q,) the steps taken and the relative residual they left."""

    x: Tensor
    steps: Tensor
    residuals: Tensor


def conjugate_gradients(
    product: Product, precondition: Product, right: Tensor, steps: int, tolerance: float
) -> Solution:
    """A⁻¹ right for each row of right (q, p), A symmetric and positive definite.

    Residuals r are measured as √(rᵀM⁻¹r), relative to the right side's. Each row has its own step
    sizes and stops on its own, so that no answer depends on which rows are solved together; those
    that are done cost nothing more.

    Args:
        precondition: M⁻¹, about A⁻¹; symmetric and positive definite.
        steps: the most that are taken.
        tolerance: the relative residual at which a row is done. The one that is returned is
            computed anew from x.
    """
    x = torch.zeros_like(right)
    taken = torch.zeros(len(right), dtype=torch.int64, device=right.device)
    rows = torch.arange(len(right), device=right.device)  # those under way
    residual, direction = right, precondition(right)
    size = scale = _inner(right, direction)
    for _ in range(steps):
        going = (size > tolerance**2 * scale[rows]).squeeze(1)
        if not bool(going.any()):
            break
        if not bool(going.all()):
            rows, residual, direction, size = (z[going] for z in (rows, residual, direction, size))
        along = product(direction)
        curvature = _inner(direction, along)
        # not positive: lost to rounding (or A is not what it should be), and nothing more to gain
        rate = torch.where(curvature > 0, size / curvature, 0.0)
        x[rows] += rate * direction
        taken[rows] += (rate > 0).squeeze(1)
        residual = residual - rate * along
        conditioned = precondition(residual)
        before, size = size, _inner(residual, conditioned)
        direction = conditioned + (size / before) * direction
        size = torch.where(curvature > 0, size, 0.0)
    residual = right - product(x)
    left = _inner(residual, precondition(residual)) / scale
    return Solution(x, taken, torch.where(scale > 0, left, 0.0).clamp_min(0).sqrt().squeeze(1))


def matrix_functions(
    product: Product,
    functions: Sequence[Callable[[Tensor], Tensor]],
    right: Tensor,
    steps: int,
    tolerance: float,
    held: int = 0,
) -> Solution:
    """f(A) right for each function f and each row of right (q, p): (F, q, p). By Lanczos.

    A is symmetric and positive semidefinite. With A Q = Q T on the Krylov space of a row b, f(A) b
    is about ‖b‖ Q f(T) e₁. The vectors of Q are made twice: first to find T, then to add them up.
    As in `conjugate_gradients`, each row stops on its own, so no answer depends on which rows are
    solved together; those that are done cost nothing more.

    Args:
        functions: elementwise on eigenvalues.
        steps: the most that are taken.
        tolerance: a row is done when no f(T) e₁ has changed by more than this share of itself in
            the last few steps. What it changed by is returned as the residual.
        held: so many of each row's vectors are kept, and not made again.
    """
    norms = right.norm(dim=1, keepdim=True)
    start = right / norms.clamp_min(torch.finfo(right.dtype).tiny)
    diagonal, beside = (right.new_zeros(len(right), steps, dtype=torch.float64) for _ in range(2))
    weights = diagonal.new_zeros(len(functions), *diagonal.shape)  # f(T) e₁
    left = torch.zeros_like(diagonal[:, 0])
    taken = torch.zeros(len(right), dtype=torch.int64, device=right.device)
    rows = norms[:, 0].nonzero()[:, 0]  # those under way
    kept: list[Tensor] = []
    before, now = torch.zeros_like(start[rows]), start[rows]
    for k in range(steps if len(rows) else 0):
        if k < held:
            kept.append(torch.zeros_like(start).index_copy_(0, rows, now))
        along = product(now)
        diagonal[rows, k] = _inner(along, now)[:, 0].double()
        made = _next(along, now, before, diagonal[rows], beside[rows], k)
        beside[rows, k] = made.norm(dim=1).double()
        before, now = now, _scaled(made, beside[rows], k)
        if (k + 1) % LOOKED_AT == 0 or k + 1 == steps:
            found = _first_columns(diagonal[rows, : k + 1], beside[rows, :k], functions)
            found = torch.nn.functional.pad(found, (0, steps - k - 1))
            moved = (found - weights[:, rows]).norm(dim=2) / found.norm(dim=2).clamp_min(1e-300)
            weights[:, rows], taken[rows], left[rows] = found, k + 1, moved.max(0).values
            going = left[rows] > tolerance
            if not bool(going.any()):
                break
            if not bool(going.all()):
                rows, before, now = (z[going] for z in (rows, before, now))
    x = right.new_zeros(len(functions), *right.shape)
    before, now = torch.zeros_like(start), start
    for k in range(int(taken.max()) if len(right) else 0):
        if k < len(kept):
            before, now = now, kept[k]
        elif k:
            rows = (taken > k).nonzero()[:, 0]
            along, there = product(now[rows]), diagonal[rows]
            made = _next(along, now[rows], before[rows], there, beside[rows], k - 1)
            made = _scaled(made, beside[rows], k - 1)
            before, now = now, torch.zeros_like(start).index_copy_(0, rows, made)
        for own, weight in zip(x, weights, strict=True):
            own.addcmul_(weight[:, k : k + 1].to(x), now)
    return Solution(x.mul_(norms), taken, left)


def _next(
    along: Tensor, now: Tensor, before: Tensor, diagonal: Tensor, beside: Tensor, k: int
) -> Tensor:
    """What a product adds to the Krylov space: A v less its parts in v and in the one before."""
    made = along - diagonal[:, k : k + 1].to(now) * now
    return made - beside[:, k - 1 : k].to(now) * before if k else made


def _scaled(made: Tensor, beside: Tensor, k: int) -> Tensor:
    """Of norm 1; 0 where the space is exhausted."""
    return made / beside[:, k : k + 1].to(made).clamp_min(torch.finfo(made.dtype).tiny)


def _first_columns(
    diagonal: Tensor, beside: Tensor, functions: Sequence[Callable[[Tensor], Tensor]]
) -> Tensor:
    """f(T) e₁ (F, q, k) of tridiagonal T; what is negative of their eigenvalues is rounding."""
    T = torch.diag_embed(diagonal) + torch.diag_embed(beside, 1) + torch.diag_embed(beside, -1)
    values, vectors = torch.linalg.eigh(T)
    each = [f(values.clamp_min(0)) * vectors[:, 0] for f in functions]
    return torch.stack([(vectors * one.unsqueeze(1)).sum(2) for one in each])


def _inner(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(1, keepdim=True)


class Lanczos:
    """An orthonormal basis of the Krylov space of one start vector, and the matrix in it.

    A Q = Q T + the next vector's share, with T tridiagonal; every new vector is made orthogonal to
    all before it, so that rounding brings back no direction twice.

    Attributes:
        basis: (most + 1, p), the first `done` + 1 rows in use.
        diagonal, beside: of T, float64; beside[k] ties vectors k and k + 1.
    """

    def __init__(self, start: Tensor, most: int) -> None:
        self.basis = start.new_zeros(most + 1, len(start))
        self.basis[0] = start / start.norm()
        self.diagonal = torch.zeros(most, dtype=torch.float64)
        self.beside = torch.zeros(most, dtype=torch.float64)
        self.done = 0

    @property
    def finished(self) -> bool:
        """No steps left, or the space is closed: the matrix leads nowhere new."""
        if self.done == 0:
            return False
        largest = float((self.diagonal.abs() + self.beside).max())
        closed = 100 * torch.finfo(self.basis.dtype).eps * largest
        return self.done == len(self.diagonal) or float(self.beside[self.done - 1]) <= closed

    def step(self, product: Product) -> None:
        """One product, one more vector."""
        k = self.done
        known = self.basis[: k + 1]
        new = product(known[k:])[0]
        self.diagonal[k] = float(known[k] @ new)
        for _ in range(2):  # twice is enough (Kahan)
            new = new - (known @ new) @ known
        length = new.norm()
        self.beside[k] = float(length)
        if length > 0:
            self.basis[k + 1] = new / length
        self.done += 1

    def state(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """What `restore` needs to go on from here."""
        used = {"basis": self.basis[: self.done + 1]}
        return used | {"diagonal": self.diagonal, "beside": self.beside}, {"done": self.done}

    def restore(self, tensors: Mapping[str, Tensor], position: Mapping[str, int]) -> None:
        """Go on from an earlier `state` of the same iteration."""
        self.done = position["done"]
        self.basis[: self.done + 1] = tensors["basis"].to(self.basis)
        self.diagonal, self.beside = tensors["diagonal"], tensors["beside"]

    def leading(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """The largest eigenvalues (r,), vectors (r, p) and residuals ‖A u - σ u‖ (r,).

        At most `rank`, and only those that are more than the rounding of a zero.
        """
        k = self.done
        off = torch.diag(self.beside[: k - 1], 1)
        values, turns = torch.linalg.eigh(torch.diag(self.diagonal[:k]) + off + off.T)
        noise = k * torch.finfo(self.basis.dtype).eps * float(values.abs().max())
        kept = [j for j in reversed(range(k)) if float(values[j]) > noise][:rank]
        residuals = self.beside[k - 1] * turns[-1, kept].abs()
        vectors = turns[:, kept].T.to(self.basis) @ self.basis[:k]
        return values[kept], vectors, residuals
