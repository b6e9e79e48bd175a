"""Operators against the dense matrices they stand for, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import models
from support.comparing import close
from support.flat import Flat
from torch import Tensor

import whence
from whence.engine.workspace import ComputeOptions, Workspace
from whence.layers.rows import Rows
from whence.operators import (
    KINDS,
    BlockDiagonal,
    BlockSpace,
    BlockVectors,
    GaussNewton,
    cost,
    coupling,
)
from whence.operators.products import add_whole_grams

SHIFT, DAMPING = 0.3, 0.05


def workspace_of(name: str, layers: str = "matrices") -> tuple[Workspace, whence.Study]:
    torch.manual_seed(0)
    model, task, train, query = models.CASES[name]()
    run = models.train_run(model.double(), task, train, [2, 5, 9], 0.1).run
    study = whence.Study(model, task, train=train, runs=run, layers=layers)
    options = ComputeOptions(dtype=torch.float64, progress=False)
    return whence.Source().lay_out(study, run, query, options), study


def operator_of(workspace: Workspace, kind: str) -> Any:
    blocks = dict.fromkeys(workspace.blocks, 1.0)
    stages = workspace.study.stages
    return workspace.curvature(kind, stages, workspace.run.checkpoints[:2], blocks, fisher="exact")


def diagonals(space: BlockSpace) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    return {
        "single number": 0.7,
        "number": BlockDiagonal({name: 0.5 + k for k, name in enumerate(space.blocks)}),
        "tensor": BlockDiagonal(
            {
                name: 0.1 + torch.rand(block.shape, generator=generator, dtype=torch.float64)
                for name, block in space.blocks.items()
            }
        ),
    }


def written_out(H: Any, space: BlockSpace) -> Tensor:
    """The matrix (p, p), column by column."""
    return flat(H @ space.vectors(torch.eye(space.size, dtype=torch.float64)), space)


def flat(v: BlockVectors, space: BlockSpace) -> Tensor:
    return space.flatten({name: v.matrix(name) for name in v.values})


def dense_function(matrix: Tensor, f: Any) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * f(values.clamp_min(0))) @ vectors.T


@pytest.mark.parametrize("kind", [*KINDS, "gauss-newton"])
@pytest.mark.parametrize(("name", "layers"), [("mlp", "all"), ("conv", "matrices"), ("gpt", "all")])
def test_an_operator_is_its_matrix(name: str, layers: str, kind: str) -> None:
    workspace, _ = workspace_of(name, layers)
    H, space = operator_of(workspace, kind), BlockSpace(workspace.blocks.values())
    matrix = written_out(H, space)
    torch.testing.assert_close(matrix, matrix.T, atol=1e-10, rtol=1e-8)
    x = torch.randn(3, space.size, generator=torch.Generator().manual_seed(1)).double()
    v, f = space.vectors(x), lambda s: torch.exp(-s)
    changed = {"itself": (H, matrix)}
    for label, D in diagonals(space).items():
        d = space.diagonal(BlockDiagonal.over(space.blocks, D), x)
        changed[f"whitened by a {label}"] = (H.whitened(D), d.sqrt()[:, None] * matrix * d.sqrt())
        changed[f"plus a {label}"] = (H + D, matrix + torch.diag(d))
    factors = {block: 2.0 + k for k, block in enumerate(space.blocks)}
    c = space.diagonal(factors, x)
    changed["scaled"] = (H.scaled(factors), c.sqrt()[:, None] * matrix * c.sqrt())
    for label, (operator, expected) in changed.items():
        near = {"atol": 1e-7, "rtol": 1e-6, "msg": lambda m, label=label: f"{label}: {m}"}
        answer = x @ dense_function(expected, f)
        torch.testing.assert_close(flat(operator.apply(f, v), space), answer, **near)
        torch.testing.assert_close(flat(operator @ v, space), x @ expected, **near)
        parts, diagonal = blocks_of(expected, space), operator.diagonal()
        for block, part in zip(space.blocks, parts, strict=True):
            torch.testing.assert_close(diagonal[block].flatten(), part.diagonal(), **near)
            assert operator.trace()[block] == pytest.approx(float(part.trace()), rel=1e-6)
    for label, D in diagonals(space).items():
        solved = flat(H.inverse(D) @ space.vectors(x.clone()), space)
        d = space.diagonal(BlockDiagonal.over(space.blocks, D), x)
        expected = torch.linalg.solve(matrix + torch.diag(d), x.T).T
        if not H.block_diagonal:  # by conjugate gradients, to this relative residual
            left = solved @ (matrix + torch.diag(d)) - x
            assert float((left.norm(dim=1) / x.norm(dim=1)).max()) < 3 * H.relative_residual
            continue
        torch.testing.assert_close(solved, expected, atol=1e-7, rtol=1e-6, msg=label)


@pytest.mark.parametrize("kind", [*KINDS, "gauss-newton"])
def test_an_operator_is_fitted_on_a_workspace(kind: str) -> None:
    """On all stages' data by default, as methods fit it."""
    workspace, _ = workspace_of("mlp")
    exact = {} if kind == "gauss-newton" else {"fisher": "exact"}
    operator = GaussNewton if kind == "gauss-newton" else KINDS[kind]
    H = operator.fit(workspace, workspace.run.checkpoints[:2], **exact)
    space = BlockSpace(workspace.blocks.values())
    torch.testing.assert_close(
        written_out(H, space), written_out(operator_of(workspace, kind), space)
    )


def blocks_of(matrix: Tensor, space: BlockSpace) -> list[Tensor]:
    parts, start = [], 0
    for block in space.blocks.values():
        parts.append(matrix[start : start + block.size, start : start + block.size])
        start += block.size
    return parts


def test_functions_that_are_not_needed_cost_nothing() -> None:
    workspace, _ = workspace_of("mlp")
    H, space = operator_of(workspace, "ekfac"), BlockSpace(workspace.blocks.values())
    x = torch.ones(2, space.size, dtype=torch.float64)
    first, second = H.apply([None, torch.sqrt], space.vectors(x))
    assert first is None and second is not None
    assert torch.equal(flat(second, space), flat(H.apply(torch.sqrt, space.vectors(x)), space))
    assert bool((x == 1).all())  # nothing is overwritten unless that is asked for


@pytest.mark.parametrize("kind", ["shampoo", "auto"])
def test_bases_of_whole_gradients(kind: str) -> None:
    """Where an example has several positions, the eigenvectors of Σ G Gᵀ and Σ Gᵀ G."""
    workspace, study = workspace_of("conv")
    checkpoint = workspace.run.final
    factors = KINDS[kind].fit(workspace, [checkpoint], fisher="empirical").factors
    plain = KINDS["ekfac"].fit(workspace, [checkpoint], fisher="empirical").factors
    flat = Flat(study)
    gradients = flat.gradients(checkpoint, "losses", study.train["train"])
    space = BlockSpace(flat.blocks.values())
    for name, G in space.unflatten(gradients).items():
        basis = factors[name].basis
        assert basis is not None
        if kind == "auto" and workspace.positions[name] == 1:
            assert torch.equal(basis.outputs, plain[name].basis.outputs)  # type: ignore[union-attr]
            continue
        left = basis.outputs.T @ (G @ G.mT).sum(0) @ basis.outputs
        right = basis.inputs.T @ (G.mT @ G).sum(0) @ basis.inputs
        for rotated in (left, right):
            off = rotated - torch.diag(rotated.diagonal())
            assert off.abs().max() < 1e-9 * rotated.diagonal().max()
        rotated = basis.outputs.T @ G @ basis.inputs
        torch.testing.assert_close(factors[name].eigenvalues, rotated.square().mean(0))


def test_coupling_is_the_share_of_the_trace() -> None:
    workspace, _ = workspace_of("mlp")
    H = operator_of(workspace, "ekfac")
    traces = H.trace()
    c = coupling(H)
    assert set(c) == set(traces)
    for name, value in c.items():
        assert value == pytest.approx(sum(traces.values()) / traces[name])
    assert coupling(operator_of(workspace, "gauss-newton")) == {}


@pytest.mark.parametrize("t", [3, 9])
def test_grams_of_a_tied_head_are_those_of_its_whole_gradients(t: int) -> None:
    """Both ways: by pairs of positions where these are few, else by the gradients."""
    torch.manual_seed(0)
    n, o, d = 4, 7, 5
    ids, dense = torch.randint(0, 3, (n, t)), torch.randn(n, t, o, dtype=torch.float64)
    a, rows = torch.randn(n, 2 * t, d, dtype=torch.float64), Rows(ids, o, None, dense)
    lookup = torch.nn.functional.one_hot(ids, o).double()
    G = torch.cat([lookup, dense], 1).mT @ a
    left, right = torch.zeros(o, dtype=torch.float64), torch.zeros(d, d, dtype=torch.float64)
    add_whole_grams(left, right, a, rows, False)
    close(left, G.square().sum((0, 2)), 1e-12)
    close(right.triu(), (G.mT @ G).sum(0).triu(), 1e-12)
    assert cost.pairs_are_fewer(t, d) == (t == 3)
