"""`Best`: one equation for all layers, against dense solves in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_adam as adaptive
import torch
from support import dense_stages as ds
from support.comparing import close
from support.flat import Flat
from test_coupling import EXACT, small
from test_influence_solvers import flat, gauss_newton

import whence

CONVERGED = 500  # iterations: as many as it takes in float64


def brute_force(
    study: whence.Study, train: Any, query: Any, segments: int, δ: float = 3.0
) -> np.ndarray:
    """Dense matrices; through later segments by the coupled diagonal, number by number."""
    it, run, n = Flat(study), study.runs[0], len(train)
    sizes = [block.size for block in it.blocks.values()]
    v = torch.stack([it.gradients(c, "measurements", query) for c in run.checkpoints]).mean(0)
    total = torch.zeros(len(v), n, dtype=torch.float64)
    for segment in reversed(run.segments(segments)):
        ηK = 0.1 * segment.steps
        J = [it.columns(c, train) for c in segment.checkpoints]
        H = torch.stack([j.T @ j / n for j in J]).mean(0)
        g = torch.stack([it.gradients(c, "losses", train) for c in segment.checkpoints]).mean(0)
        matrix = H / δ + torch.eye(len(H), dtype=H.dtype) / ηK
        total -= torch.linalg.solve(matrix, v.T).T @ g.T / n
        σ = H.diagonal()
        traces = torch.stack([part.sum() for part in torch.split(σ, sizes)])
        c = (traces.sum() / traces).repeat_interleave(torch.tensor(sizes))
        v = v * torch.exp(-ηK * c * σ)
    return total.numpy()


@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("name", ["mlp", "conv"])
def test_brute_force(name: str, segments: int) -> None:
    study, train, query = small(name)
    method = whence.Best(CONVERGED, segments=segments, curvature="diagonal", fisher="exact")
    scores = method.attribute(study, query, **EXACT)
    close(scores.values, brute_force(study, train, query, segments))
    assert all(s["residual"] <= 1e-9 for s in [scores.diagnostics["solver"]])


@pytest.mark.parametrize("curvature", ["auto", "ekfac", "kfac", "identity"])
def test_the_answer_does_not_depend_on_the_preconditioner(curvature: str) -> None:
    study, train, query = small("conv")
    scores = whence.Best(CONVERGED, curvature=curvature).attribute(study, query, **EXACT)
    close(scores.values, brute_force(study, train, query, 1))


def test_relative_damping() -> None:
    study, train, query = small()
    scores = whence.Best(CONVERGED, relative_damping=0.2).attribute(study, query, **EXACT)
    close(scores.values, brute_force(study, train, query, 1, 0.2))


@pytest.mark.parametrize("kind", [*adaptive.OPTIMIZERS])
def test_preconditioned_optimizers(kind: str) -> None:
    """D = η̄K P̄ has one number for each parameter."""
    it = adaptive.pair("mlp", kind)
    (segment,) = it.leg.segments(1)
    oracle, stage = it.dense, it.dense.stages[segment.stage]
    query = oracle._queries(oracle.last)
    names = list(query)
    P = ds.preconditioner(stage.model, segment.moments, segment.epsilon, 0.0)
    D = torch.cat([oracle._time(segment, n) * P[n] for n in names])
    points = segment.checkpoints
    each = [gauss_newton(stage.model, w, stage.task, stage.data, names) for w in points]
    H = torch.stack(each).mean(0) / len(stage.data) / 3 + torch.diag(1 / D)
    g = [
        flat(oracle.gradients(oracle._key(w), segment.stage, "losses", False), names)
        for w in points
    ]
    expected = -torch.linalg.solve(H, flat(query, names).T).T @ torch.stack(g).mean(0).T
    method = whence.Best(CONVERGED, query_at="final", floor=0.0)
    actual = method.attribute(it.study, it.query, **EXACT).values
    close(actual, (expected / oracle.sizes[segment.stage]).detach().numpy())


def test_few_iterations_come_close() -> None:
    study, train, query = small("conv")
    exact = brute_force(study, train, query, 1)
    errors = []
    for iterations in (1, 4, 16):
        scores = whence.Best(iterations).attribute(study, query, **EXACT)
        errors.append(abs(scores.values - exact).max() / abs(exact).max())
    assert errors[0] > 2 * errors[1] > 4 * errors[2]


def test_few_iterations_come_close_after_adam() -> None:
    """The preconditioner knows D within a layer: its curvature is of D^½ H D^½, not of H."""
    it = adaptive.pair("mlp", "adam")
    exact = whence.Best(CONVERGED).attribute(it.study, it.query, **EXACT).values
    errors = []
    for curvature in ("ekfac", "identity"):
        scores = whence.Best(3, curvature=curvature).attribute(it.study, it.query, **EXACT)
        errors.append(abs(scores.values - exact).max() / abs(exact).max())
    assert errors[0] < 0.1 * errors[1]


@pytest.mark.parametrize("options", [{"batch_size": 1}, {"batch_size": 5}, {"memory": 2**20}])
def test_batches_and_memory_change_nothing(options: dict[str, Any]) -> None:
    study, _, query = small("conv")
    expected = whence.Best(4).attribute(study, query, **EXACT).values
    close(whence.Best(4).attribute(study, query, **EXACT, **options).values, expected, 1e-9)


def test_self_influence_is_the_diagonal() -> None:
    study, train, _ = small()
    alone = whence.Best(CONVERGED).attribute(study, **EXACT).values
    close(alone, np.diag(whence.Best(CONVERGED).attribute(study, train, **EXACT).values))


def test_a_finished_folder_is_opened(tmp_path: Path) -> None:
    study, _, query = small()
    first = whence.Best(4).attribute(study, query, out=tmp_path / "scores", **EXACT)
    again = whence.Best(4).attribute(study, query, out=tmp_path / "scores", **EXACT)
    assert (first.values == again.values).all()
    with pytest.raises(whence.WhenceError):
        whence.Best(5).attribute(study, query, out=tmp_path / "scores", **EXACT)


def test_an_equation_that_is_far_from_solved_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    study, _, query = small("mlp")
    monkeypatch.setattr("whence.methods.best.MOST_RESIDUAL", 1e-3)
    with pytest.warns(UserWarning, match="conjugate gradients have not converged"):
        whence.Best(1, curvature="identity").attribute(study, query, **EXACT)


def test_estimate_counts_the_products() -> None:
    study, _, query = small()
    passes = whence.Best(8).estimate(study, query)["passes"]
    assert passes["products"] == 9 * 4  # four checkpoints; the residual takes one more


def test_settings() -> None:
    with pytest.raises(ValueError, match="iterations=0 must be a whole number, at least 1"):
        whence.Best(0)
    with pytest.raises(ValueError, match="relative_damping=0 must be a positive number"):
        whence.Best(relative_damping=0)
    with pytest.raises(ValueError, match="curvature='gauss-newton' is not known"):
        whence.Best(curvature="gauss-newton")
    assert "coupling" not in repr(whence.Best())
