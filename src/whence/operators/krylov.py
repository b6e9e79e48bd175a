"""Conjugate gradients and Lanczos iterations for a matrix that is only known by its products.

Pure functions of tensors: `product` maps vectors (q, p) to the matrix times each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]
CHECK_EVERY = 2  # steps between two tests of whether a matrix function has converged
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-10}  # of answers, by precision


@dataclass(frozen=True)
class Solution:
    """x (q, p); and for each vector (q,) the steps taken and the relative residual they left."""

    x: Tensor
    steps: Tensor
    residuals: Tensor


def conjugate_gradients(
    product: Product, precondition: Product, right: Tensor, steps: int, tolerance: float
) -> Solution:
    """A⁻¹ right for each row of right (q, p), A symmetric and positive definite.

    Residuals r are measured as √(rᵀM⁻¹r), relative to the right side's. Each row has its own step
    sizes and stops on its own, so that no answer depends on which rows are solved together; rows
    that have converged cost nothing more.

    Args:
        precondition: M⁻¹, about A⁻¹; symmetric and positive definite.
        steps: the maximum.
        tolerance: the relative residual at which a row has converged. The residual that is returned
            is computed from x.
    """
    x = torch.zeros_like(right)
    taken = torch.zeros(len(right), dtype=torch.int64, device=right.device)
    active = torch.arange(len(right), device=right.device)
    residual, direction = right, precondition(right)
    size = scale = _inner(right, direction)
    for _ in range(steps):
        unconverged = (size > tolerance**2 * scale[active]).squeeze(1)
        if not bool(unconverged.any()):
            break
        if not bool(unconverged.all()):
            active, residual, direction, size = (
                z[unconverged] for z in (active, residual, direction, size)
            )
        image = product(direction)
        curvature = _inner(direction, image)
        # not positive: lost to rounding (or A is not what it should be), and nothing more to gain
        rate = torch.where(curvature > 0, size / curvature, 0.0)
        x[active] += rate * direction
        taken[active] += (rate > 0).squeeze(1)
        residual = residual - rate * image
        conditioned = precondition(residual)
        previous, size = size, _inner(residual, conditioned)
        direction = conditioned + (size / previous) * direction
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
    stored: int = 0,
) -> Solution:
    """f(A) right for each function f and each row of right (q, p): (F, q, p). By Lanczos.

    A is symmetric and positive semidefinite. With A Q = Q T on the Krylov space of a row b, T
    tridiagonal with α on the diagonal and β next to it, f(A) b is about ‖b‖ Q f(T) e₁. One Krylov
    space serves all functions. As in `conjugate_gradients`, each row stops on its own, so no answer
    depends on which rows are solved together.

    Args:
        functions: elementwise on eigenvalues.
        steps: the maximum.
        tolerance: a row has converged when the next term of each series, β e_kᵀ g(T) e₁ with
            g(x) = (f(x) - f(0)) / x, is at most this share of the largest f(T) e₁ (Saad 1992). For
            f(x) = 1 / (1 + x) it is the residual. The share is returned, or the rounding error of
            products if that is larger.
        stored: how many Krylov vectors of each row to keep. The others are computed a second time
            when the answer is added up.
    """
    norms = right.norm(dim=1, keepdim=True)
    start = right / norms.clamp_min(torch.finfo(right.dtype).tiny)
    expansion = _Expansion(start, functions, steps)
    expansion.grow(product, norms[:, 0].nonzero()[:, 0], tolerance, stored)
    x = expansion.combined(product)
    rounding = torch.finfo(right.dtype).eps / 2 * expansion.largest
    return Solution(x.mul_(norms), expansion.taken, torch.maximum(expansion.residuals, rounding))


class _Expansion:
    """Q f(T) e₁ of each function and row: the rows' Krylov spaces, each with its own T.

    Attributes:
        start: the first vector of each space, (q, p), of norm 1 or 0.
        alpha, beta: the diagonal of T and the entries next to it, (q, steps), float64.
        weights: f(T) e₁, (F, q, steps).
        taken, residuals: (q,), the steps and the share that the next term would add.
        largest: the largest eigenvalue of each T, (q,).
        vectors: the first Krylov vectors, each (q, p).
    """

    def __init__(
        self, start: Tensor, functions: Sequence[Callable[[Tensor], Tensor]], steps: int
    ) -> None:
        self.start, self.functions, self.steps = start, functions, steps
        self.alpha, self.beta = (
            start.new_zeros(len(start), steps, dtype=torch.float64) for _ in range(2)
        )
        self.weights = self.alpha.new_zeros(len(functions), *self.alpha.shape)
        self.residuals, self.largest = (self.alpha.new_zeros(len(start)) for _ in range(2))
        self.taken = torch.zeros(len(start), dtype=torch.int64, device=start.device)
        self.vectors: list[Tensor] = []

    def grow(self, product: Product, active: Tensor, tolerance: float, stored: int) -> None:
        """Take steps in these rows, in each until its weights have converged."""
        previous, current = torch.zeros_like(self.start[active]), self.start[active]
        for k in range(self.steps if len(active) else 0):
            if k < stored:
                whole = len(active) == len(self.start)
                self.vectors.append(current if whole else _spread(self.start, active, current))
            image = product(current)
            self.alpha[active, k] = _inner(image, current)[:, 0].double()
            new = self._orthogonalised(image, current, previous, active, k)
            self.beta[active, k] = new.norm(dim=1).double()
            previous, current = current, self._normalised(new, active, k)
            if (k + 1) % CHECK_EVERY == 0 or k + 1 == self.steps:
                self._weigh(active, k + 1)
                unconverged = self.residuals[active] > tolerance
                if not bool(unconverged.any()):
                    break
                if not bool(unconverged.all()):
                    active, previous, current = (
                        z[unconverged] for z in (active, previous, current)
                    )

    def _weigh(self, active: Tensor, k: int) -> None:
        """The weights in these rows after k steps, and the terms that would come next."""
        T = _tridiagonal(self.alpha[active, :k], self.beta[active, : k - 1])
        values, vectors = torch.linalg.eigh(T)
        values = values.clamp_min(0)  # negative ones are rounding errors of 0
        first, last = vectors[:, 0], vectors[:, -1]
        columns = [(vectors * (f(values) * first).unsqueeze(1)).sum(2) for f in self.functions]
        terms = [(last * _slope(f, values) * first).sum(1).abs() for f in self.functions]
        for weights, column in zip(self.weights, columns, strict=True):
            weights[active, :k] = column
        largest = torch.stack([column.norm(dim=1) for column in columns]).amax(0)
        next_terms = self.beta[active, k - 1] * torch.stack(terms).amax(0)
        self.residuals[active] = next_terms / largest.clamp_min(1e-300)
        self.largest[active], self.taken[active] = values[:, -1], k

    def combined(self, product: Product) -> Tensor:
        """Σ_k (f(T) e₁)_k q_k, (F, q, p). Vectors that were not kept are computed again."""
        x = self.start.new_zeros(len(self.functions), *self.start.shape)
        previous, current = torch.zeros_like(self.start), self.start
        for k in range(int(self.taken.max()) if len(self.start) else 0):
            if k < len(self.vectors):
                previous, current = current, self.vectors[k]
            elif k:
                active = (self.taken > k).nonzero()[:, 0]
                image = product(current[active])
                new = self._orthogonalised(image, current[active], previous[active], active, k - 1)
                new = self._normalised(new, active, k - 1)
                previous, current = current, _spread(self.start, active, new)
            for answer, weight in zip(x, self.weights, strict=True):
                answer.addcmul_(weight[:, k : k + 1].to(x), current)
        return x

    def _orthogonalised(
        self, image: Tensor, current: Tensor, previous: Tensor, active: Tensor, k: int
    ) -> Tensor:
        """What a product adds to the space: A v less its parts in v and in the one before."""
        new = torch.addcmul(image, self.alpha[active, k : k + 1].to(current), current, value=-1)
        if not k:
            return new
        return new.addcmul_(self.beta[active, k - 1 : k].to(current), previous, value=-1)

    def _normalised(self, new: Tensor, active: Tensor, k: int) -> Tensor:
        """Rows scaled to norm 1; 0 where the space is exhausted."""
        least = torch.finfo(new.dtype).tiny
        return new / self.beta[active, k : k + 1].to(new).clamp_min(least)


def _spread(like: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    """Values in these rows, zeros in the others."""
    return torch.zeros_like(like).index_copy_(0, rows, values)


def _tridiagonal(alpha: Tensor, beta: Tensor) -> Tensor:
    """(q, k, k)"""
    return torch.diag_embed(alpha) + torch.diag_embed(beta, 1) + torch.diag_embed(beta, -1)


def _slope(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """(f(x) - f(0)) / x."""
    x = x.clamp_min(1e-6)
    return (f(x) - f(torch.zeros_like(x))) / x


def _inner(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(1, keepdim=True)


class Lanczos:
    """An orthonormal basis of the Krylov space of one start vector, and the matrix in it.

    A Q = Q T + the next vector's share, with T tridiagonal; every new vector is made orthogonal to
    all before it, so that rounding errors bring back no direction twice.

    Attributes:
        basis: (most + 1, p), the first `done` + 1 rows in use.
        alpha, beta: the diagonal of T and the entries next to it, float64; beta[k] ties vectors k
            and k + 1.
    """

    def __init__(self, start: Tensor, most: int) -> None:
        self.basis = start.new_zeros(most + 1, len(start))
        self.basis[0] = start / start.norm()
        self.alpha = torch.zeros(most, dtype=torch.float64)
        self.beta = torch.zeros(most, dtype=torch.float64)
        self.done = 0

    @property
    def finished(self) -> bool:
        """No steps left, or the space is closed: the matrix leads nowhere new."""
        if self.done == 0:
            return False
        largest = float((self.alpha.abs() + self.beta).max())
        closed = 100 * torch.finfo(self.basis.dtype).eps * largest
        return self.done == len(self.alpha) or float(self.beta[self.done - 1]) <= closed

    def step(self, product: Product) -> None:
        """One product, one more vector."""
        k = self.done
        known = self.basis[: k + 1]
        new = product(known[k:])[0]
        self.alpha[k] = float(known[k] @ new)
        for _ in range(2):  # twice is enough (Kahan)
            new = new - (known @ new) @ known
        length = new.norm()
        self.beta[k] = float(length)
        if length > 0:
            self.basis[k + 1] = new / length
        self.done += 1

    def state(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """What `restore` needs to resume from here."""
        used = {"basis": self.basis[: self.done + 1]}
        return used | {"alpha": self.alpha, "beta": self.beta}, {"done": self.done}

    def restore(self, tensors: Mapping[str, Tensor], position: Mapping[str, int]) -> None:
        """Resume from an earlier `state` of the same iteration."""
        self.done = position["done"]
        self.basis[: self.done + 1] = tensors["basis"].to(self.basis)
        self.alpha, self.beta = tensors["alpha"], tensors["beta"]

    def leading(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """The largest eigenvalues (r,), vectors (r, p) and residuals ‖A u - σ u‖ (r,).

        At most `rank`, and only those that are more than the rounding error of a zero.
        """
        values, rotations, residuals = self.in_basis()
        noise = self.done * torch.finfo(self.basis.dtype).eps * float(values.abs().max())
        rank = min(rank, int((values > noise).sum()))
        vectors = rotations[:, :rank].T.to(self.basis) @ self.basis[: self.done]
        return values[:rank], vectors, residuals[:rank]

    def in_basis(self) -> tuple[Tensor, Tensor, Tensor]:
        """Eigenvalues (k,) of T, the largest first, eigenvectors as columns (k, k), and the
        residuals (k,) that these leave with A."""
        k = self.done
        off_diagonal = torch.diag(self.beta[: k - 1], 1)
        T = torch.diag(self.alpha[:k]) + off_diagonal + off_diagonal.T
        values, rotations = (x.flip(-1) for x in torch.linalg.eigh(T))
        return values, rotations, self.beta[k - 1] * rotations[-1].abs()


def leading_directions(
    product: Product, start: Tensor, steps: int, enough: float, tolerance: float
) -> tuple[Tensor, Tensor]:
    """The leading eigenvalues (r,), largest first, and eigenvectors (r, p).

    Args:
        start: (p,), what the Krylov space begins with.
        steps: at most this many products.
        enough: all eigenvalues above this number are wanted, and these products may find fewer.
        tolerance: the residual with which an eigenvector counts as found, a share of its
            eigenvalue.
    """
    lanczos, converged = Lanczos(start, steps), 0
    while not lanczos.finished:
        lanczos.step(product)
        if lanczos.done % CHECK_EVERY == 0 or lanczos.finished:
            values, _, residuals = lanczos.in_basis()
            missing = residuals > tolerance * values
            converged = int((missing.cumsum(0) == 0).sum())
            if converged < len(values) and float(values[converged]) <= enough:
                break
    values, vectors, _ = lanczos.leading(converged)
    return values, vectors
