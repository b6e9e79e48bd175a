"""Warnings are stored with scores, and shown wherever scores are."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import models

import whence
from whence.cli import main
from whence.errors import collect_warnings, warn
from whence.explore import start
from whence.present.views import overview

MESSAGE = "weights <b>changed</b> outside the optimizer"
TRAIN = models.vectors()


def made(values: Any = None, messages: tuple[str, ...] = (MESSAGE,)) -> whence.Scores:
    values = np.random.default_rng(0).normal(size=(3, 8)) if values is None else values
    return whence.Scores(
        values,
        method="Source",
        measurement="margin",
        unit="logits",
        higher_is_better=True,
        diagnostics={"warnings": list(messages)} if messages else {},
    )


def run(seed: int = 0, message: str | None = None) -> whence.Run:
    torch.manual_seed(seed)
    run = models.train_run(models.mlp(), whence.Classification(), TRAIN, [2, 4], 0.2).run
    run.warnings += [] if message is None else [message]
    return run


def test_they_are_the_first_lines_of_a_description() -> None:
    lines = repr(made()).splitlines()
    assert "warning" in lines[1] and MESSAGE in lines[1]
    assert "warning" not in repr(made(messages=()))
    page = made()._repr_html_()
    assert "&lt;b&gt;changed" in page and "<b>changed" not in page


def test_they_are_saved(tmp_path: Path) -> None:
    made().save(tmp_path)
    assert whence.Scores.load(tmp_path).warnings == [MESSAGE]


def test_pages_have_them(tmp_path: Path) -> None:
    assert overview(made())["warnings"] == [MESSAGE]
    assert overview(made(messages=()))["warnings"] == []
    page = made().report(tmp_path / "r.html").read_text("utf-8")
    assert "changed" in page and "<b>changed" not in page
    assert "V.warnings(overview)" in page
    with start({"some": made()}, out=tmp_path) as explorer:
        assert explorer.explorer.overview()["about"]["some"]["warnings"] == [MESSAGE]


def test_the_command_line_says_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made().save(tmp_path / "scores")
    assert main(["top", str(tmp_path / "scores"), "--query", "0"]) == 0
    said = capsys.readouterr()
    assert f"warning: scores: {MESSAGE}" in said.err and MESSAGE not in said.out


def test_an_ensemble_has_those_of_all_its_runs() -> None:
    runs = [run(0, "the first"), run(1), run(2, "the last")]
    study = whence.Study(models.mlp(), whence.Classification(), TRAIN, runs)
    with pytest.warns(UserWarning, match="the first"):
        scores = whence.TracIn().attribute(study, TRAIN, progress=False)
    assert scores.warnings == ["the first", "the last"]


def test_every_result_has_its_own_although_python_shows_a_warning_once() -> None:
    study = whence.Study(models.mlp(), whence.Classification(), TRAIN, run(0, "doubtful"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for method in (whence.TracIn(), whence.TracIn(), whence.RepSim(), whence.Influence(0.1)):
            assert "doubtful" in method.attribute(study, TRAIN, progress=False).warnings
        assert "doubtful" in whence.TracIn().attribute(study, progress=False).warnings


def test_a_store_answers_with_them(tmp_path: Path) -> None:
    study = whence.Study(models.mlp(), whence.Classification(), TRAIN, run(0, "doubtful"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store = whence.GradientStore.build(
            study, tmp_path, dimension=8, methods=["tracin"], progress=False
        )
        for _ in range(2):
            assert store.tracin(TRAIN, progress=False).warnings == ["doubtful"]


def test_what_calculations_warn_of_is_stored() -> None:
    """A saturated segment, found while scores are computed."""
    torch.manual_seed(0)
    steep = models.train_run(models.mlp(), whence.Classification(), TRAIN, [2, 4], 0.2).run
    steep.learning_rates[:] = 1e6
    study = whence.Study(models.mlp(), whence.Classification(), TRAIN, steep)
    with pytest.warns(UserWarning, match="saturated"):
        scores = whence.Source(2, coupling=False).attribute(study, TRAIN, progress=False)
    assert any("saturated" in message for message in scores.warnings)


def test_collecting() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warn("before")
        with collect_warnings() as outer:
            warn("one")
            with collect_warnings() as inner:
                warn("two")
            warn("one")
            warn("three")
    assert (outer, inner) == (["one", "three"], ["two"])
