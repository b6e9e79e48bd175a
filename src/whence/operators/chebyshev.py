"""Functions of many small matrices at once, by Chebyshev series.

The rows of a table (an embedding, a tied head) have a matrix each, M_k = R_k Q Λ_k Qᵀ R_k + Δ_k,
with R, Λ and Δ diagonal and one Q for all. On 0 ≤ x ≤ b, with M's eigenvalues below b,

    f(x) = Σ_j c_j T_j(2x/b - 1)          T_{j+1}(y) = 2y T_j(y) - T_{j-1}(y)

takes about √b terms. Rows are grouped by their own b, so that the few rows of frequent words, whose
curvature is large, do not make all others as expensive.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-11}  # of f, relative to its largest value
MAX_TERMS = 2**12  # terms; functions that take more are not computed here
GROUP_NUMBERS = {"cpu": 1 << 20, "cuda": 1 << 26}  # in a group's vectors

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class RowMatrices:
    """M_k = R_k Q Λ_k Qᵀ R_k + Δ_k of each row k.

    Attributes:
        basis: Q, (width, width).
        eigenvalues, root, shift: the diagonals Λ, R and Δ, (o, width), none of them negative.
    """

    basis: Tensor
    eigenvalues: Tensor
    root: Tensor
    shift: Tensor

    def bounds(self) -> Tensor:
        """(o,), at least the largest eigenvalue of each M."""
        squares = self.root.square()
        trace = (squares * (self.eigenvalues @ self.basis.square().mT)).sum(1)
        norms = squares.amax(1) * self.eigenvalues.amax(1)
        return 1.001 * (torch.minimum(trace, norms) + self.shift.amax(1))  # rounding errors

    def polynomials(self, rows: Tensor, bound: float, x: Tensor) -> Iterator[Tensor]:
        """T_0 x, T_1 x, … of 2M/b - 1, for x (q, rows, width)."""
        scaled = self.eigenvalues[rows] * (4 / bound), self.shift[rows] * (4 / bound) - 2
        (eigenvalues, shift), root = scaled, self.root[rows]

        def twice(y: Tensor) -> Tensor:
            rotated = ((y * root) @ self.basis).mul_(eigenvalues)
            return (rotated @ self.basis.mT).mul_(root).addcmul_(shift, y)

        yield x
        previous, current = x, twice(x) / 2
        while True:
            yield current
            previous, current = current, twice(current).sub_(previous)

    def functions(self, functions: Sequence[Function], right: Tensor) -> list[Tensor] | None:
        """f(M) right of each function, for right (q, o, width); None if one takes too many terms.

        What is computed of a row depends on the row only.
        """
        tolerance = TOLERANCE[right.dtype]
        bounds = self.bounds().double().cpu()
        least = torch.full_like(bounds, math.floor(math.log2(tolerance)))
        powers = torch.where(bounds > 0, bounds.log2().ceil(), least).maximum(least)
        answers = [torch.empty_like(right) for _ in functions]
        for power in sorted(set(powers.tolist())):
            coefficients = [series(f, 2.0**power, tolerance) for f in functions]
            if any(c is None for c in coefficients):
                return None
            rows = (powers == power).nonzero()[:, 0].to(right.device)
            numbers = GROUP_NUMBERS.get(right.device.type, GROUP_NUMBERS["cuda"])
            for group in rows.split(max(1, numbers // (len(right) * right.shape[2]))):
                terms = self.polynomials(group, 2.0**power, right[:, group])
                for answer, total in zip(answers, _sums(coefficients, terms), strict=True):
                    answer[:, group] = total
        return answers


def _sums(
    series_of_functions: Sequence[list[float] | None], terms: Iterator[Tensor]
) -> list[Tensor]:
    """Σ_j c_j T_j of each series."""
    coefficients = [c for c in series_of_functions if c is not None]
    first = next(terms)
    totals = [first * c[0] for c in coefficients]
    for j in range(1, max(map(len, coefficients))):
        term = next(terms)
        for total, c in zip(totals, coefficients, strict=True):
            if j < len(c):
                total.add_(term, alpha=c[j])
    return totals


def series(function: Function, bound: float, tolerance: float) -> list[float] | None:
    """Chebyshev coefficients of f on [0, bound], as many as the tolerance needs; None if these are
    more than `MAX_TERMS`. f must not vary faster than exp(-x)."""
    count = 16 * 2 ** max(0, math.ceil(math.log2(bound) / 2) - 2)  # points closer than 1 near 0
    while count <= 2 * MAX_TERMS:
        angles = torch.arange(count, dtype=torch.float64).add(0.5) * (math.pi / count)
        values = function(bound * (angles.cos() + 1) / 2)
        spectrum = torch.fft.rfft(torch.cat([values, values.flip(0)]))[:count]
        turned = torch.polar(torch.ones_like(angles), (angles[0] - angles) / 2)
        coefficients = (spectrum * turned).real / count
        coefficients[0] /= 2
        tail = coefficients.abs().flip(0).cumsum(0).flip(0)  # what is lost without these terms
        needed = int((tail > tolerance * values.abs().max()).sum())
        if needed <= count // 2:
            return [float(c) for c in coefficients[: max(1, needed)]]
        count *= 2
    return None
