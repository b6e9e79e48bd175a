"""Warnings are stored with scores, and shown wherever scores are."""

from __future__ import annotations

import dataclasses
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import models, recipes

import whence
from whence.cli import main
from whence.errors import collect_warnings, warn
from whence.explore import start
from whence.present.views import overview
from whence.run.evidence import clipped_at_most

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
    assert (outer, inner) == (["one", "two", "three"], ["two"])


class Talking(list[Any]):
    """Examples whose reading warns, as anything that runs while scores are computed may."""

    def __getitem__(self, index: Any) -> Any:
        warn(f"reading {len(self)} examples")
        return super().__getitem__(index)


def recipe() -> whence.Recipe:
    return recipes.recipe(train=recipes.dataset(24), epochs=1)


def downsampling() -> whence.Downsampling:
    queries, quiet = recipes.dataset(5, 9), {"device": "cpu", "progress": False}
    return whence.Downsampling(whence.evaluate.ground_truth(recipe(), queries, 0.5, 6, 1, **quiet))


RETRAINING = {
    "Downsampling": downsampling,
    "LeaveOneOut": lambda: whence.LeaveOneOut(recipe(), [0]),
}
EVERY = [name for name in whence.__all__ if hasattr(getattr(whence, name), "attribute")]
EVERY.remove("BM25")  # needs texts; it is a `Method`, as others are
SMALL: dict[str, Any] = {name: {"dimension": 4} for name in ("LESS", "TrackStar", "Trak")}


@pytest.mark.parametrize("name", EVERY)
def test_no_method_loses_a_warning(name: str, tmp_path: Path) -> None:
    """Whatever calls `warn` while scores are computed: it is with the scores, on disk too."""
    queries = recipes.dataset(5, 9) if name in RETRAINING else models.vectors(5, seed=1)
    talking = Talking([queries[k] for k in range(len(queries))])
    given = run()
    given.initial = dataclasses.replace(given.checkpoints[0], step=0)
    given.batches = [np.arange(k % 2, len(TRAIN), 2) for k in range(given.steps)]
    study = whence.Study(models.mlp(), whence.Classification(), TRAIN, given)
    options: dict[str, Any] = {} if name == "Downsampling" else {"progress": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make = RETRAINING.get(name, partial(getattr(whence, name), **SMALL.get(name, {})))
        method = make()
        of = None if name in RETRAINING else study
        scores = method.attribute(of, talking, out=tmp_path / "out", **options)
    assert "reading 5 examples" in scores.warnings
    assert whence.Scores.load(tmp_path / "out").warnings == scores.warnings


def test_a_store_answers_with_what_its_building_warned_of(tmp_path: Path) -> None:
    train = Talking([TRAIN[k] for k in range(len(TRAIN))])
    study = whence.Study(models.mlp(), whence.Classification(), train, run())
    message = f"reading {len(TRAIN)} examples"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store = whence.GradientStore.build(study, tmp_path, 8, methods=["tracin"], progress=False)
        other = whence.GradientStore.open(tmp_path, study)
        for _ in range(2):  # the second answer reads no training data
            assert message in store.tracin(TRAIN, progress=False).warnings
            assert message in other.tracin(TRAIN, progress=False).warnings


def test_warnings_of_recording_are_stored_with_the_run(tmp_path: Path) -> None:
    model, stranger = models.mlp().double(), torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([*model.parameters(), stranger], lr=0.1)
    with pytest.warns(UserWarning, match="1 of the optimizer's"):
        recorder = whence.Recorder(
            tmp_path, model, optimizer, checkpoints=[1], notes={"clip_norm": 1.0}
        )
    with pytest.warns(UserWarning, match="not modelled"), recorder:
        x, y = TRAIN.tensors
        torch.nn.functional.cross_entropy(model(x.double()), y).backward()
        optimizer.step()
    study = whence.Study(model, whence.Classification(), TRAIN, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scores = whence.TracIn().attribute(study, TRAIN, progress=False)
    for message in ("1 of the optimizer's", "clip_norm=1.0"):
        assert any(message in text for text in scores.warnings), message


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
@pytest.mark.parametrize("clipped", [False, True])
def test_clipping_that_did_nothing_needs_no_warning(
    tmp_path: Path, optimizer: str, clipped: bool
) -> None:
    model, norm = models.mlp().double(), 1e-3 if clipped else 1e3
    stepper = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-3)
    recorder = whence.Recorder(
        tmp_path, model, stepper, checkpoints=[5, 10], notes={"clip_norm": norm}
    )
    norms, (x, y) = [], TRAIN.tensors
    with pytest.warns(UserWarning, match="not modelled"), recorder:
        for _ in range(10):
            stepper.zero_grad()
            torch.nn.functional.cross_entropy(model(x.double()), y).backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), norm)))
            stepper.step()
    assert all((each > norm) == clipped for each in norms)
    study = whence.Study(model, whence.Classification(), TRAIN, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scores = whence.TracIn().attribute(study, TRAIN, progress=False)
    warned = any("clip_norm" in text for text in scores.warnings)
    assert warned == (clipped or optimizer == "SGD")  # SGD stores nothing that would show it


def test_the_bound_on_clipped_updates_is_one(tmp_path: Path) -> None:
    model, clipped = models.mlp().double(), []
    stepper = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = TRAIN.tensors
    with whence.Recorder(tmp_path, model, stepper, checkpoints=[12]):
        for step in range(12):
            stepper.zero_grad()
            scale = 100.0 if step % 4 == 0 else 1e-3  # every fourth is clipped
            (scale * torch.nn.functional.cross_entropy(model(x.double()), y)).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            clipped.append(float(norm) > 1)
            stepper.step()
    assert clipped == [step % 4 == 0 for step in range(12)]
    weights = 0.999 ** np.arange(11, -1, -1)
    share = float(weights @ np.array(clipped) / weights.sum())
    assert clipped_at_most(whence.Run.open(tmp_path), 1.0) == pytest.approx(share, rel=1e-3)
