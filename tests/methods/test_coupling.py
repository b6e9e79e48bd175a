"""Coupled layers and query gradients along the run: brute force, and where coupling is exact."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support import models
from support.comparing import close
from support.flat import Flat
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import whence
from whence.engine.workspace import Queries, Workspace

EXACT: Any = {"dtype": torch.float64, "progress": False}
STEPS = [2, 5, 9, 14]


def small(name: str = "mlp", **settings: Any) -> tuple[whence.Study, Any, Any]:
    torch.manual_seed(0)
    model, task, train, query = models.CASES[name]()
    run = models.train_run(model.double(), task, train, STEPS, 0.1).run
    return whence.Study(model, task, train=train, runs=run), train, query


def brute_force(
    study: whence.Study, train: Any, query: Any, segments: int, coupled: bool, along_run: bool
) -> np.ndarray:
    """SOURCE with the diagonal Gauss-Newton matrix, number by number."""
    it, run = Flat(study), study.runs[0]
    sizes = [block.size for block in it.blocks.values()]
    n, checkpoints = len(train), run.checkpoints
    points = checkpoints if along_run else [run.final]
    v = torch.stack([it.gradients(c, "measurements", query) for c in points]).mean(0)
    total = torch.zeros(len(v), n, dtype=torch.float64)
    for segment in reversed(run.segments(segments)):
        own = segment.checkpoints
        σ = torch.stack([it.columns(c, train).square().sum(0) / n for c in own]).mean(0)
        g = torch.stack([it.gradients(c, "losses", train) for c in own]).mean(0)
        if coupled:
            traces = torch.stack([part.sum() for part in torch.split(σ, sizes)])
            σ = σ * (traces.sum() / traces).repeat_interleave(torch.tensor(sizes))
        ηK = 0.1 * segment.steps
        response = torch.where(σ > 0, (1 - torch.exp(-ηK * σ)) / σ.clamp_min(1e-300), ηK)
        total -= (v * response) @ g.T / n
        v = v * torch.exp(-ηK * σ)
    return total.numpy()


@pytest.mark.parametrize("coupled", [True, False])
@pytest.mark.parametrize("query_at", ["run", "final"])
@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("name", ["mlp", "conv"])
def test_brute_force(name: str, segments: int, query_at: str, coupled: bool) -> None:
    study, train, query = small(name)
    method = whence.Source(segments, "diagonal", "exact", coupling=coupled, query_at=query_at)
    scores = method.attribute(study, query, **EXACT)
    close(scores.values, brute_force(study, train, query, segments, coupled, query_at == "run"))


class Twins(nn.Module):
    """Layers in parallel: their output kernels are the same."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.twins = nn.ModuleList(nn.Linear(4, 1, bias=False) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([twin(x) for twin in self.twins]).sum(0)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_where_kernels_are_proportional_coupling_is_the_whole_matrix(count: int) -> None:
    torch.manual_seed(0)
    model = Twins(count).double()
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(20, 4, generator=g).double(), torch.randn(20, 1, generator=g).double()
    train, query = TensorDataset(x[:16], y[:16]), TensorDataset(x[16:], y[16:])
    task = whence.Regression()
    run = models.train_run(model, task, train, STEPS, 0.05).run
    study = whence.Study(model, task, train=train, runs=run)
    settings: Any = {"segments": 2, "query_at": "final"}
    whole = whence.Source(curvature="gauss-newton", **settings).attribute(study, query, **EXACT)
    ekfac: Any = {"curvature": "ekfac", "fisher": "exact", **settings}
    coupled = whence.Source(**ekfac).attribute(study, query, **EXACT)
    close(coupled.values, whole.values)
    segment = coupled.diagnostics["segments"][0]
    assert [*segment["coupling"].values()] == pytest.approx([count] * count)
    alone = whence.Source(coupling=False, **ekfac).attribute(study, query, **EXACT).values
    if count > 1:
        assert abs(alone).sum() > 1.1 * abs(whole.values).sum()  # every layer repairs it all
    influence = whence.Influence(0.1, "ekfac", "exact").attribute(study, query, **EXACT)
    joint = whence.Influence(0.1, solver="cg", tolerance=1e-12).attribute(study, query, **EXACT)
    close(influence.values, joint.values)


def test_along_the_run_is_the_mean_over_checkpoints() -> None:
    study, _, query = small("gpt")

    class At(whence.Source):
        _k = 0

        def query_gradient(self, workspace: Workspace, queries: Queries, bases: Any) -> Any:
            return workspace.query_gradients(queries, [workspace.run.checkpoints[self._k]], bases)

    each = []
    for k in range(len(STEPS)):
        method = At(2)
        method._k = k
        each.append(method.attribute(study, query, **EXACT).values)
    close(whence.Source(2).attribute(study, query, **EXACT).values, np.mean(each, 0))


@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_adam_with_one_layer_needs_no_coupling(kind: str) -> None:
    torch.manual_seed(0)
    model, train = nn.Linear(4, 3).double(), models.vectors(12)
    moments = [{n: torch.rand_like(p) for n, p in model.named_parameters()}]
    weights = [{n: p.detach().clone() for n, p in model.state_dict().items()}]
    run = whence.Run.from_checkpoints(
        weights, [5], 1e-2, optimizer=kind, second_moments=moments, epsilon=1e-8
    )
    study = whence.Study(model, whence.Classification(), train=train, runs=run)
    values = [
        whence.Source(coupling=coupled, fisher="exact").attribute(study, train, **EXACT).values
        for coupled in (True, False)
    ]
    close(values[0], values[1])


def test_a_query_at_nowhere() -> None:
    with pytest.raises(ValueError, match=r"query_at='start' is not known: .*'run', 'final'"):
        whence.Source(query_at="start")


def test_the_published_form_is_neither() -> None:
    study, train, query = small()
    published = whence.Source.published(2, "diagonal", "exact").attribute(study, query, **EXACT)
    close(published.values, brute_force(study, train, query, 2, False, False))
    assert published.method == "Source.published"
    assert "coupling" not in published.settings and "coupling" not in str(
        published.diagnostics["segments"]
    )


@pytest.mark.parametrize(("name", "segments"), [("mlp", 1), ("conv", 3), ("gpt", 3)])
def test_auto_takes_three_segments_where_weights_are_shared(name: str, segments: int) -> None:
    study, _, query = small(name)
    scores = whence.Source().attribute(study, query, **EXACT)
    assert len(scores.diagnostics["segments"]) == segments
    close(scores.values, whence.Source(segments).attribute(study, query, **EXACT).values, 0)
    short = whence.Study(
        study.model,
        study.tasks["train"],
        train=study.data["train"].dataset,
        runs=whence.Run.from_checkpoints(
            [c.weights() for c in study.runs[0].checkpoints[:2]], STEPS[:2], 0.1
        ),
    )
    few = whence.FastSource().attribute(short, query, **EXACT)
    assert len(few.diagnostics["segments"]) == 1  # two checkpoints are too few for three
