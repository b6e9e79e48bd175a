"""Operators of a gradient store's space against the dense matrices they stand for, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from whence.operators import Projected
from whence.operators.projected import ProjectedVectors

COLUMNS = {"joint": [slice(0, 5)], "by layer": [slice(0, 2), slice(2, 5)]}


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).double()


def projected(columns: list[slice]) -> tuple[Projected, Tensor]:
    """The operator, and its matrix."""
    root = random(5, 5)
    parts = [(root @ root.T)[where, where] for where in columns]

    names = [str(k) for k in range(len(columns))]

    def remember(key: Any, fit: Any) -> list[Tensor]:
        return list(fit())

    return Projected(lambda: parts, columns, names, torch.float64, remember), torch.block_diag(
        *parts
    )


@pytest.mark.parametrize("columns", COLUMNS.values(), ids=COLUMNS)
def test_an_operator_is_its_matrix(columns: list[slice]) -> None:
    H, matrix = projected(columns)
    x = random(3, 5, 1)[..., 0]
    v, eye, numbers = ProjectedVectors(x), torch.eye(5).double(), random(5).abs() + 0.1
    changed: dict[str, tuple[Any, Tensor]] = {"itself": (H, matrix)}
    for label, d in {"number": 0.7, "vector": numbers}.items():
        root = torch.as_tensor(d, dtype=torch.float64).sqrt().expand(5)
        changed[f"whitened by a {label}"] = (H.whitened(d), root[:, None] * matrix * root)
        changed[f"plus a {label}"] = (H + d, matrix + root.square() * eye)
        twice = H.whitened(d)
        changed[f"whitened by a {label}, again"] = (
            twice.whitened(d) + d,
            root.square()[:, None] * matrix * root.square() + root.square() * eye,
        )
    c = torch.cat(
        [torch.full((where.stop - where.start,), 2.0 + k) for k, where in enumerate(columns)]
    )
    changed["scaled"] = (H.scaled({str(k): 2.0 + k for k in range(len(columns))}), c * matrix)
    for label, (operator, expected) in changed.items():
        values, vectors = torch.linalg.eigh(expected)
        near: dict[str, Any] = {
            "atol": 1e-9,
            "rtol": 1e-9,
            "msg": lambda m, label=label: f"{label}: {m}",
        }
        answer = operator.apply(torch.exp, v).values
        torch.testing.assert_close(answer, x @ (vectors * values.exp()) @ vectors.T, **near)
        torch.testing.assert_close((operator @ v).values, x @ expected, **near)
        diagonal = torch.cat(list(operator.diagonal().values()))
        torch.testing.assert_close(diagonal, expected.diagonal(), **near)
        assert sum(operator.trace().values()) == pytest.approx(float(expected.trace()))
        for damping in (0.3, numbers):
            solved = (operator.inverse(damping) @ v).values
            damped = expected + torch.as_tensor(damping, dtype=torch.float64).expand(5) * eye
            torch.testing.assert_close(solved, torch.linalg.solve(damped, x.T).T, **near)
