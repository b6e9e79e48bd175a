"""Methods of other papers, against dense solves in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.comparing import close
from support.flat import Flat
from test_coupling import EXACT, STEPS, small
from test_trak import BLOCKS, CPU, held, matrix
from torch import Tensor
from torch.utils.data import TensorDataset

import whence
from experiments.rivals.astra import AstraInfluence, AstraSource
from experiments.rivals.projections import LOGRA_DAMPING, LoGra, Sparse, SparseTrak
from experiments.tasks.board import ENTRIES
from experiments.tasks.forms import FORMS
from experiments.tasks.models import ResNet9
from whence.engine.workspace import ComputeOptions, Workspace
from whence.operators import gauss_newton

RATE = 0.1  # of `small`


def astra(study: whence.Study, train: Any, query: Any, segments: int, final: bool) -> np.ndarray:
    """Dense inverses of all layers together, for SGD."""
    it, run, n = Flat(study), study.runs[0], len(train)
    v = it.gradients(run.final, "measurements", query)
    total = torch.zeros(len(v), n, dtype=torch.float64)
    for segment in reversed(run.segments(segments)):
        points = segment.checkpoints[-1:] if final else segment.checkpoints
        λ = 1 / (RATE * segment.steps)
        J = [it.columns(c, train) for c in points]
        H = torch.stack([j.T @ j / n for j in J]).mean(0)
        g = torch.stack([it.gradients(c, "losses", train) for c in points]).mean(0)
        w = torch.linalg.solve(H + λ * torch.eye(len(H), dtype=H.dtype), v.T).T
        total -= w @ g.T / n
        v = v - w @ H  # 1 - H (H + λ)⁻¹
    return total.numpy()


@pytest.mark.parametrize("name", ["mlp", "conv"])
def test_astra_influence_with_whole_batches(name: str) -> None:
    study, train, query = small(name)
    scores = AstraInfluence(iterations=300, batch=len(train)).attribute(study, query, **EXACT)
    close(scores.values, astra(study, train, query, 1, final=True))
    assert scores.diagnostics["solver"]["residual"] < 1e-6


def test_astra_source_with_whole_batches() -> None:
    study, train, query = small()
    method = AstraSource(iterations=300, batch=len(train), segments=len(STEPS))
    scores = method.attribute(study, query, **EXACT)
    close(scores.values, astra(study, train, query, len(STEPS), final=False))


@pytest.mark.parametrize("segments", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_minibatches_and_checkpoints_average_out(segments: int) -> None:
    study, train, query = small()
    expected = astra(study, train, query, segments, final=False)
    errors = []
    for iterations in (30, 800):
        method = AstraSource(iterations=iterations, batch=4, segments=segments)
        values = method.attribute(study, query, **EXACT).values
        errors.append(np.linalg.norm(values - expected) / np.linalg.norm(expected))
    assert errors[1] < 0.1 and errors[1] < errors[0]


def test_the_seed_decides() -> None:
    study, _, query = small()
    settings: Any = {"iterations": 5, "batch": 4}
    one, two = (AstraInfluence(**settings).attribute(study, query, **EXACT) for _ in range(2))
    np.testing.assert_array_equal(one.values, two.values)
    other = AstraInfluence(**settings, seed=1).attribute(study, query, **EXACT)
    assert np.abs(other.values - one.values).max() > 0


@pytest.mark.parametrize("images", [True, False])
def test_products_with_channels_last(
    images: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of the images, or in the model, where max pooling has no batched second derivative."""
    random = torch.Generator().manual_seed(0)
    x, y = torch.randn(24, 3, 32, 32, generator=random), torch.arange(24) % 10
    if images:
        x = x.contiguous(memory_format=torch.channels_last)
    train, task = TensorDataset(x, y), whence.Classification()
    build = ResNet if images else ChannelsLast
    recipe = whence.Recipe(build, task, train, descent, batch_size=12, epochs=1)
    study = whence.Study(build(), task, train, recipe.run(0, tmp_path / "run", 2))
    both = []
    for columns in (False, True):
        monkeypatch.setattr(gauss_newton, "fewer_by_columns", lambda *_, by=columns: by)
        if images:  # all vectors at once
            monkeypatch.setattr(gauss_newton, "_one_by_one", None)
        method = whence.Influence(1e-2, solver="cg", tolerance=1e-5)
        both.append(method.attribute(study, TensorDataset(x[:6], y[:6]), progress=False).values)
    close(*both, 1e-3)


class ResNet(ResNet9):
    def __init__(self) -> None:
        super().__init__(width=4, autocast=False)


class ChannelsLast(ResNet):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.contiguous(memory_format=torch.channels_last))


def descent(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


# --- projections ----------------------------------------------------------------------------------


@pytest.mark.parametrize("t", [1, 3])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_sparse_projection(t: int, share: float) -> None:
    part = Sparse(BLOCKS, 70, 1, CPU, torch.float64, share=share)
    gradients, whole = held(6, t)
    P = matrix(part)
    close(part.project(gradients), whole @ P.T)
    entries = (P != 0).sum(0)
    assert entries.max() == 1 and (entries.min() == 1) == (share == 1.0)
    many = [matrix(Sparse(BLOCKS, 20, k, CPU, torch.float64, share=share)) for k in range(800)]
    mean = torch.stack([one.T @ one for one in many]).mean(0)
    assert float((mean - torch.eye(len(mean))).abs().max()) < 0.2  # E[PᵀP] = I


@pytest.mark.parametrize("share", [1.0, 0.6])
def test_sparse_trak_is_trak_with_another_projection(share: float) -> None:
    study, train, query = small()
    method = SparseTrak(5, damping=1e-3, share=share)
    it, final = Flat(study), study.runs[0].final
    rows = projection(method, study).projection.parts[0].lift(torch.eye(5, dtype=torch.float64))
    P = torch.cat([rows[name].flatten(1) for name in it.blocks], 1)
    φ, f = (it.gradients(final, "measurements", data) @ P.T for data in (train, query))
    g = it.gradients(final, "losses", train) @ P.T
    gram = φ.T @ φ + len(φ) * 1e-3 * torch.eye(5, dtype=torch.float64)
    close(method.attribute(study, query, **EXACT).values, -f @ torch.linalg.solve(gram, g.T))


def projection(method: Any, study: whence.Study) -> Any:
    options = ComputeOptions(**EXACT)
    return method.space(Workspace.lay_out(study, study.runs[0], options))


@pytest.mark.parametrize("initialisation", ["pca", "random"])
@pytest.mark.parametrize("name", ["mlp", "conv"])
def test_logra(name: str, initialisation: str) -> None:
    study, train, query = small(name)
    method = LoGra(18, initialisation)
    it, final = Flat(study), study.runs[0].final
    f = it.gradients(final, "measurements", query)
    g = it.gradients(final, "losses", train)
    expected, start = torch.zeros(len(f), len(g), dtype=torch.float64), 0
    parts = {part.blocks[0].name: part for part in projection(method, study).projection.parts}
    for block, part in ((block, parts[name]) for name, block in it.blocks.items()):
        here = slice(start, start + block.size)
        start = here.stop
        expected -= one_layer(matrix(part), f[:, here], g[:, here])
    close(method.attribute(study, query, **EXACT).values, expected)


def one_layer(P: Tensor, f: Tensor, g: Tensor) -> Tensor:
    φ, projected = g @ P.T, f @ P.T
    C = φ.T @ φ / len(φ)
    λ = LOGRA_DAMPING * torch.linalg.eigvalsh(C).mean()
    inverse = torch.linalg.inv(C + λ * torch.eye(len(C), dtype=C.dtype))
    return projected @ inverse @ φ.T / len(φ)


def test_leading_directions_have_the_most_variance() -> None:
    """PCA's first direction, against the covariance of a layer's inputs."""
    study, train, _ = small()
    parts = projection(LoGra(3), study).projection.parts
    (first,) = (part for part in parts if part.blocks[0].name == "0")
    assert all(part.dimension == 1 for part in parts)
    x = torch.stack([x for x, _ in train]).double()
    a = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
    leading = torch.linalg.eigh(a.T @ a).eigenvectors[:, -1]
    assert float((first.sides[0][1] @ leading).abs()) == pytest.approx(1.0)


def test_they_are_in_both_tables() -> None:
    names = {"ASTRA-IF", "ASTRA-SOURCE", "LoGra", "SJLT TRAK", "GraSS TRAK", "TrackStar"}
    assert names <= set(ENTRIES) and names <= set(FORMS)
