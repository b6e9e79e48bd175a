"""Lines for W&B and MLflow: in the real trackers where they are installed, and in doubles.

The doubles have the signatures of wandb 0.2x and mlflow 3; where the trackers are installed, a test
compares them.
"""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import whence
from whence.errors import InvalidInput, InvalidType, MissingDependency
from whence.integrations.loggers import log


class MLflow:
    """Records what is logged."""

    def __init__(self, active: bool = True) -> None:
        self.params: dict[str, Any] = {}
        self.metrics: dict[str, float] = {}
        self.dicts: dict[str, Any] = {}
        self._active = active

    def active_run(self) -> Any:
        return SimpleNamespace(info=SimpleNamespace(run_id="1")) if self._active else None

    def get_run(self, run_id: str) -> Any:
        return SimpleNamespace(data=SimpleNamespace(params=dict(self.params)))

    def log_params(
        self, params: dict[str, Any], synchronous: bool | None = None, run_id: str | None = None
    ) -> None:
        assert all(len(str(value)) <= 500 for value in params.values())
        changed = {key for key in params if self.params.get(key, params[key]) != params[key]}
        assert not changed  # MLflow refuses
        self.params |= params

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert all(isinstance(value, float) for value in metrics.values())
        self.metrics |= metrics

    def log_dict(
        self, dictionary: dict[str, Any], artifact_file: str, run_id: str | None = None
    ) -> None:
        self.dicts[artifact_file] = json.loads(json.dumps(dictionary))


class Table:
    def __init__(self, columns: Any = None, data: Any = None) -> None:
        self.columns, self.data = columns, data


class Wandb:
    """A module with an active run that records what is logged."""

    Table = Table

    def __init__(self, active: bool = True) -> None:
        self.config: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self.logged: dict[str, Any] = {}
        run = SimpleNamespace(
            config=SimpleNamespace(update=self.config.update, get=self.config.get),
            summary=self.summary,
            log=self.logged.update,
        )
        self.run = run if active else None


def made(higher: bool = True) -> whence.Scores:
    values = np.array([[1.0, 2.0, -3.0, np.nan, 0.5], [1.0, 0.0, -5.0, np.nan, -0.5]])
    about = {"method": "Source", "measurement": "margin", "unit": "logits"}
    return whence.Scores(values, higher_is_better=higher, **about)


def run() -> whence.Run:
    weights = torch.nn.Linear(2, 2).state_dict()
    return whence.Run.from_checkpoints([weights, weights], [3, 8], 0.5)


def test_scores_in_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = MLflow()
    monkeypatch.setitem(sys.modules, "mlflow", tracker)  # type: ignore[arg-type]
    log(made(), "mlflow", k=1)
    assert tracker.params["whence.scores.measurement"] == "margin"
    assert tracker.metrics["whence.scores.examples_that_harm"] == 1
    table = tracker.dicts["whence.scores.examples.json"]
    assert table == {"example": [0, 2], "mean_score": [1.0, -4.0]}
    log(made(higher=False), "mlflow", k=9)
    assert tracker.dicts["whence.scores.examples.json"]["example"] == [2, 4, 0, 1]


def test_a_run_in_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", tracker)  # type: ignore[arg-type]
    log(run(), "wandb")
    assert tracker.config["whence/run"]["checkpoints"] == [3, 8]
    assert tracker.summary["whence/run/updates"] == 8
    assert tracker.summary["whence/run/sum_of_rates"] == pytest.approx(4.0)
    log(made(), "wandb", k=1)
    table = tracker.logged["whence/scores/examples"]
    assert table.columns == ["example", "mean_score"]
    assert table.data == [[0, 1.0], [2, -4.0]]
    assert tracker.config["whence/run"]["checkpoints"] == [3, 8], "scores do not replace the run"


@pytest.mark.parametrize(("to", "double"), [("wandb", Wandb), ("mlflow", MLflow)])
def test_several_scores_need_names(to: str, double: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, to, double())
    log(made(), to)
    log(made(), to)  # the same again is no error
    with pytest.raises(InvalidInput, match="name=, such as"):
        log(other(), to)
    log(other(), to, name="other")


def other() -> whence.Scores:
    about = {"method": "TracIn", "measurement": "margin", "unit": "logits"}
    return whence.Scores(np.ones((2, 3)), higher_is_better=True, **about)


def test_what_is_wrong_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", Wandb(active=False))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "mlflow", MLflow(active=False))  # type: ignore[arg-type]
    for to, words in (("wandb", r"wandb\.init"), ("mlflow", r"start_run"), ("csv", '"wandb"')):
        with pytest.raises(InvalidInput, match=words):
            log(made(), to)
    with pytest.raises(InvalidType, match="int cannot be logged"):
        log(3, "wandb")  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "wandb", None)  # type: ignore[arg-type]
    with pytest.raises(MissingDependency, match="pip install wandb"):
        log(made(), "wandb")


def test_the_doubles_are_like_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for name in ("log_params", "log_metrics", "log_dict"):
        real = list(inspect.signature(getattr(mlflow, name)).parameters)
        double = list(inspect.signature(getattr(MLflow, name)).parameters)[1:]
        assert real[: len(double)] == double, name
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    with mlflow.start_run() as active:
        log(run(), "mlflow")
        log(made(), "mlflow")
        with pytest.raises(InvalidInput, match="name=, such as"):
            log(other(), "mlflow")
        log(other(), "mlflow", name="other")
    data = mlflow.get_run(active.info.run_id).data
    assert data.metrics["whence.run.updates"] == 8 and data.params["whence.run.optimizer"] == "sgd"
    assert data.params["whence.other.method"] != data.params["whence.scores.method"]


def test_the_doubles_are_like_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    assert list(inspect.signature(wandb.Table.__init__).parameters)[1:3] == ["columns", "data"]
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(mode="offline", dir=tmp_path) as active:
        recorded = run()
        log(recorded, "wandb")
        log(recorded, "wandb")
        log(made(), "wandb")
        with pytest.raises(InvalidInput, match="name=, such as"):
            log(other(), "wandb")
        log(other(), "wandb", name="other")
        assert active.config["whence/scores"]["measurement"] == "margin"
        assert active.config["whence/run"]["checkpoints"] == [3, 8]
        assert active.summary["whence/run/updates"] == 8
