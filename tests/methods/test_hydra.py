"""HYDRA: against the paper's formula, and against autograd through the optimizer alone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import dense_unrolled as dense
from support import models
from support.interrupting import interrupt
from test_unrolled import (
    DOUBLE,
    OPTIMIZERS,
    TASK,
    close,
    digits,
    one_stage,
    smooth,
    studied,
    two_stages,
)
from torch import nn

import whence
from whence.methods.hydra import Hydra
from whence.replay.objective import Objective
from whence.retrain.recipe import Recipe
from whence.run import RunError


def gradients(model: nn.Module, weights: Any, data: Any, what: str) -> torch.Tensor:
    """One row for each example, (n, p)."""
    copied = copy.deepcopy(model).double()
    copied.load_state_dict(weights)
    rows = []
    for k in range(len(data)):
        batch = dense.batch_of(data, [k])
        value = getattr(TASK, what)(copied(batch[0]), batch).sum()
        actual = torch.autograd.grad(value, list(copied.parameters()))
        rows.append(torch.cat([g.reshape(-1) for g in actual]))
    return torch.stack(rows)


def test_the_papers_formula(tmp_path: Path) -> None:
    """Appendix B.4, last equation: plain SGD, every step's batch and parameters; the sign and the
    1/B of a prediction."""
    query = models.vectors(3, seed=4)
    stage = one_stage("sgd", rates=[0.3 - 0.02 * t for t in range(10)])
    study = studied(tmp_path, smooth(), [stage], every_step=True)
    (run,) = study.runs
    f = gradients(smooth(), run.final.weights(), query, "measurements")
    expected = np.zeros((3, 10))
    for t, (indices, point) in enumerate(zip(stage["batches"], run.trajectory, strict=False)):
        g = gradients(smooth(), point.weights(), stage["data"], "losses")
        expected[:, indices] -= stage["rates"][t] / 4 * (f @ g.T).numpy()[:, indices]
    close(Hydra().attribute(study, query, **DOUBLE).values, expected)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_hessian_dropped(name: str, tmp_path: Path) -> None:
    """The derivative of the training when each gradient is taken at constant weights."""
    query, stage = models.vectors(3, seed=4), one_stage(name)
    study = studied(tmp_path, smooth(), [stage])
    actual = Hydra().attribute(study, query, **DOUBLE).values
    close(actual, dense.effects(smooth(), [stage], query, "none")[0])


def test_clipped_gradients(tmp_path: Path) -> None:
    query, stage = models.vectors(3, seed=4), one_stage("momentum")
    with pytest.warns(UserWarning, match="clip_norm"):
        study = studied(tmp_path, smooth(), [stage], clip_norm=0.5)
    actual = Hydra().attribute(study, query, **DOUBLE).values
    close(actual, dense.effects(smooth(), [stage], query, "none", clip_norm=0.5)[0])


def test_two_stages(tmp_path: Path) -> None:
    query, stages = models.vectors(3, seed=4), two_stages()
    study = studied(tmp_path, smooth(), stages)
    expected = dense.effects(smooth(), stages, query, "none")
    close(Hydra().attribute(study, query, **DOUBLE).values, np.concatenate(expected, 1))
    close(Hydra(stage="pretrain").attribute(study, query, **DOUBLE).values, expected[0])


def test_recorded_weights_are_those_replayed(tmp_path: Path) -> None:
    query, stage = models.vectors(3, seed=4), one_stage("adam")
    recorded = studied(tmp_path / "a", smooth(), [stage], every_step=True)
    replayed = studied(tmp_path / "b", smooth(), [stage])
    assert recorded.runs[0].trajectory and not replayed.runs[0].trajectory
    actual = [Hydra().attribute(study, query, **DOUBLE) for study in (recorded, replayed)]
    close(actual[0].values, actual[1].values, 1e-10)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> whence.Study:
    return studied(tmp_path_factory.mktemp("hydra"), smooth(), [one_stage("adamw")])


def test_one_answer_however_it_is_computed(study: whence.Study) -> None:
    query = study.train["train"]
    whole = Hydra().attribute(study, query, by_segment=True, **DOUBLE)
    close(Hydra().attribute(study, **DOUBLE).values, np.diag(whole.values), 1e-10)
    close(Hydra().attribute(study, query, batch_size=3, **DOUBLE).values, whole.values, 1e-10)
    close(whole.by_segment.sum(0), whole.values, 1e-12)
    close(Hydra().attribute(study, query, progress=False).values, whole.values, 1e-4)
    assert "adjoint_growth" not in whole.diagnostics


def test_an_interrupted_sweep_resumes(
    study: whence.Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = models.vectors(3, seed=4)
    whole = Hydra().attribute(study, query, **DOUBLE)
    monkeypatch.setattr("whence.persist.files.Throttle.due", lambda _: True)
    calls = interrupt(monkeypatch, Objective, "slopes", 6)
    with pytest.raises(KeyboardInterrupt):
        Hydra().attribute(study, query, out=tmp_path, **DOUBLE)
    scores = Hydra().attribute(study, query, out=tmp_path, **DOUBLE)
    assert len(calls) == 6 + 5 and (scores.values == whole.values).all()


def with_dropout() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Dropout(0.3), nn.Linear(5, 3)).double()


def test_dropout_needs_the_weights(tmp_path: Path) -> None:
    """Kept weights need no replaying; the gradients at them are those without dropout."""
    data, query = models.vectors(10), models.vectors(2, seed=4)
    recipe = Recipe(with_dropout, TASK, data, OPTIMIZERS["sgd"], batch_size=5, epochs=2)
    runs = [
        recipe.run(0, tmp_path / str(every_step), 2, every_step=every_step)
        for every_step in (False, True)
    ]
    studies = [whence.Study(with_dropout(), TASK, train=data, runs=run) for run in runs]
    with pytest.raises(ValueError, match=r"2 is Dropout\(p=0.3\).*cannot be replayed"):
        Hydra().attribute(studies[0], query, **DOUBLE)
    with pytest.warns(UserWarning, match=r"2 is Dropout\(p=0.3\): gradients are taken without"):
        scores = Hydra().attribute(studies[1], query, **DOUBLE)
    run, model = runs[1], with_dropout().eval()
    f = gradients(model, run.final.weights(), query, "measurements")
    expected = np.zeros((2, 10))
    for indices, point in zip(run.batches, run.trajectory, strict=False):
        g = gradients(model, point.weights(), data, "losses")
        expected[:, indices] -= 0.2 / 5 * (f @ g.T).numpy()[:, indices]
    close(scores.values, expected)
    assert "Dropout" in scores.diagnostics["unmodelled"]


def test_a_run_without_batches(tmp_path: Path) -> None:
    model = smooth()
    history = models.train_run(model, TASK, models.vectors(10), [2, 5])
    study = whence.Study(model, TASK, train=models.vectors(10), runs=history.run)
    with pytest.raises(RunError, match=r"call recorder\.step\(indices\).*GiB for this run's 5"):
        Hydra().attribute(study, models.vectors(2), **DOUBLE)


def test_digits(tmp_path: Path) -> None:
    (lds,) = digits(tmp_path, Hydra())
    assert 0.5 < lds < 0.95, lds
