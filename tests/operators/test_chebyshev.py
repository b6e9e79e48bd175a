"""Functions of the matrices of a table's rows, against their eigendecompositions in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.comparing import close
from torch import Tensor

from whence.operators.chebyshev import RowMatrices, series
from whence.operators.operator import response, survival

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "survival": survival,
    "response": response,
    "inverse": lambda x: 1 / (1 + x),
    "itself": lambda x: x,
}


def matrices(dtype: torch.dtype, largest: float, rows: int = 12, width: int = 5) -> RowMatrices:
    """Rows from no curvature at all to the largest."""
    torch.manual_seed(0)
    basis = torch.linalg.qr(torch.randn(width, width, dtype=torch.float64))[0]
    sizes = torch.logspace(-9, 0, rows, dtype=torch.float64).unsqueeze(1) * largest
    sizes[0] = 0
    eigenvalues = torch.rand(rows, width, dtype=torch.float64) * sizes
    root, shift = (torch.rand(rows, width, dtype=torch.float64) for _ in range(2))
    return RowMatrices(*(x.to(dtype) for x in (basis, eigenvalues, root, 0.1 * shift)))


def by_eigenvectors(
    given: RowMatrices, f: Callable[[Tensor], Tensor], right: Tensor
) -> tuple[Tensor, Tensor]:
    """f(M) right; and the largest eigenvalues."""
    Q, *diagonals = (x.double() for x in vars(given).values())
    answers, largest = [], []
    for eigenvalues, root, shift, b in zip(*diagonals, right.double().unbind(1), strict=True):
        M = torch.diag(root) @ Q @ torch.diag(eigenvalues) @ Q.T @ torch.diag(root)
        values, vectors = torch.linalg.eigh(M + torch.diag(shift))
        answers.append(b @ vectors @ torch.diag(f(values)) @ vectors.T)
        largest.append(values[-1])
    return torch.stack(answers, 1), torch.stack(largest)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("largest", [0.1, 30.0, 1e4])
def test_functions_are_those_of_the_eigenvalues(name: str, largest: float) -> None:
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 2e-5)):
        given = matrices(dtype, largest)
        right = torch.randn(3, 12, 5, dtype=dtype)
        answers = given.functions([FUNCTIONS[name], survival], right)
        assert answers is not None
        for answer, f in zip(answers, (FUNCTIONS[name], survival), strict=True):
            expected, values = by_eigenvectors(given, f, right)
            scale = f(values).abs().max().clamp_min(1) if name == "itself" else 1.0
            assert answer.dtype == dtype
            close(answer.double() / scale, expected / scale, tolerance)


def test_bounds_are_bounds() -> None:
    given = matrices(torch.float64, 30.0)
    _, largest = by_eigenvectors(given, torch.exp, torch.ones(1, 12, 5))
    assert bool((given.bounds() >= largest).all())
    assert bool((given.bounds() <= 6 * largest).all())  # width, and the factor of the shift


def test_a_row_depends_on_no_other_row_or_query() -> None:
    given, right = matrices(torch.float64, 30.0), torch.randn(3, 12, 5, dtype=torch.float64)
    alone = RowMatrices(given.basis, *(x[7:8] for x in list(vars(given).values())[1:]))
    whole, one = given.functions([response], right), alone.functions([response], right[:1, 7:8])
    assert whole is not None and one is not None
    close(one[0], whole[0][:1, 7:8], 1e-14)


def test_functions_with_steps_have_no_series() -> None:
    def step(x: Tensor) -> Tensor:
        return (x > 0.3).double()

    assert series(step, 1.0, 1e-6) is None
    given = matrices(torch.float64, 30.0)
    assert given.functions([step], torch.ones(1, 12, 5, dtype=torch.float64)) is None


@pytest.mark.parametrize("bound", [1e-7, 1.0, 1e3, 1e6])
def test_no_series_misses_a_fast_decay(bound: float) -> None:
    """Of exp(-x) over a long interval, few points see nothing."""
    coefficients = series(survival, bound, 1e-6)
    assert coefficients is not None
    x = torch.cat([torch.linspace(0, bound, 999), torch.linspace(0, min(bound, 9.0), 999)]).double()
    angles = (2 * x / bound - 1).clamp(-1, 1).arccos()
    terms = [c * (j * angles).cos() for j, c in enumerate(coefficients)]
    close(torch.stack(terms).sum(0), survival(x), 3e-6)
