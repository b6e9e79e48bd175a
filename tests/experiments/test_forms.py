"""The comparison of forms: what it saves is enough to judge, scale and combine scores."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import whence
from experiments import tasks
from experiments.engine.trainings import First, Trainings
from experiments.studies import forms, rows, sums
from experiments.tasks import ALL, TASKS, models, recipes
from experiments.tasks import forms as table
from whence.evaluate import Truth, calibrate, calibration, combine, lds
from whence.retrain.truth import draw_subsets
from whence.scores import Scores, ensemble

QUERIES, EXAMPLES, RUNS = 6, 40, 3


def scores(seed: int, scale: float) -> list[Scores]:
    """Runs that agree in part; every query has its own size."""
    random = np.random.default_rng(seed)
    common = random.normal(size=(QUERIES, EXAMPLES))
    size = scale * np.arange(1, QUERIES + 1)[:, None] ** seed
    return [
        Scores(
            (size * (common + random.normal(size=common.shape) + seed)).astype(np.float32),
            method="method",
            measurement="margin",
            unit="",
            higher_is_better=True,
            provenance={"recipe": "a", "query": "b"},
        )
        for _ in range(RUNS)
    ]


def truth(effects: Any, subsets: int, seeds: int, seed: int) -> Truth:
    random = np.random.default_rng(seed)
    masks = draw_subsets(EXAMPLES, 0.5, subsets, seed)
    noise = random.normal(size=(subsets, seeds, QUERIES))
    measurements = (masks @ effects.T)[:, None] + noise
    about = {"alpha": 0.5, "measurement": "margin", "recipe": "a", "query": "b"}
    return Truth(masks, measurements, seeds=list(range(seeds)), **about)


def plain(truth: Truth) -> Truth:
    truth.measurement = "margin"
    return truth


@pytest.fixture
def by_form() -> dict[str, list[Scores]]:
    names = (table.INFLUENCE, table.PUBLISHED, "influence, coupled", table.DEFAULT)
    return {name: scores(k, 10.0**k) for k, name in enumerate(names)}


@pytest.fixture
def truths(by_form: dict[str, list[Scores]]) -> tuple[Truth, Truth]:
    effects = sum(one[0].values / one[0].values.std(1, keepdims=True) for one in by_form.values())
    return truth(effects, 30, 4, 0), truth(effects, 20, 1, 1)


@pytest.fixture
def saved(
    by_form: dict[str, list[Scores]], truths: tuple[Truth, Truth], tmp_path: Path
) -> sums.Sums:
    described = {name: getattr(truths[0], name) for name in sums.TRUTH}
    about = {"machine": {"torch": "2", "date": "today"}, "device": "cpu", "seconds": {}}
    protocol = sums.Protocol("digits", 0.5, 30, 4, RUNS, QUERIES)
    measured = (one.measurements for one in truths)
    result = sums.Sums(protocol, described, about, *measured)
    for name, one in by_form.items():
        result.add(name, one, truths, f"{name}()", 1.0)
    return sums.Sums.load(result.save(tmp_path))


def test_sums_judge_scale_and_combine_as_the_scores_do(
    saved: sums.Sums, by_form: dict[str, list[Scores]], truths: tuple[Truth, Truth]
) -> None:
    judge, (small,) = saved.judge(), saved.retrainings(20)
    for name, given in by_form.items():
        ours, theirs = lds(saved.scores(name), judge), lds(given, truths[0])
        assert ours.value == pytest.approx(theirs.value, abs=1e-6)
        assert ours.interval == pytest.approx(theirs.interval, abs=1e-6)
        assert ours.ceiling == theirs.ceiling
        assert ours.single is not None and theirs.single is not None
        assert ours.single.value == pytest.approx(theirs.single.value, abs=1e-6)
        one, other = (
            calibrate(s, t) for s, t in ((saved.scores(name)[1], small), (given[1], truths[1]))
        )
        ours, theirs = (c.diagnostics["calibration"]["slope"] for c in (one, other))
        assert ours == pytest.approx(theirs, rel=1e-4)
        assert calibration(one, judge).slope == pytest.approx(
            calibration(other, truths[0]).slope, rel=1e-4
        )
    for ours, theirs in (
        ([saved.scores(n)[0] for n in by_form], [by_form[n][0] for n in by_form]),
        ([saved.mean(n) for n in by_form], [ensemble(by_form[n]) for n in by_form]),
    ):
        one = combine(dict(zip(by_form, ours, strict=True)), small)
        other = combine(dict(zip(by_form, theirs, strict=True)), truths[1])
        weights = [list(c.diagnostics["combination"]["weights"].values()) for c in (one, other)]
        assert weights[0] == pytest.approx(weights[1], rel=1e-3)
        assert lds(one, judge).value == pytest.approx(lds(other, truths[0]).value, abs=1e-6)
        assert calibration(one, judge).slope == pytest.approx(
            calibration(other, truths[0]).slope, rel=1e-3
        )


@pytest.mark.filterwarnings("ignore:nothing can be learned")
def test_rows(saved: sums.Sums, by_form: dict[str, list[Scores]], truths: Any) -> None:
    result = rows.rows_of(saved)
    after = [f"{what}, {n} retrainings" for n in (10, 20) for what in ("calibrated", "combined")]
    assert list(result) == [*by_form, *after]
    default, published = (lds(by_form[n], truths[0]) for n in (table.DEFAULT, table.PUBLISHED))
    row = result[table.DEFAULT]
    gap = default.minus(published)
    assert row["over"][table.PUBLISHED]["ensemble"] == pytest.approx([gap.value, *gap.interval])
    assert set(row["over"]) == {table.PUBLISHED, table.INFLUENCE}
    assert set(result[table.PUBLISHED]["over"]) == {table.INFLUENCE}
    sizes = calibration(by_form[table.DEFAULT][0], truths[0])
    assert row["spread"] == pytest.approx(sizes.predicted.std() / sizes.real.std(), rel=1e-5)
    assert row["spread"] > 1  # the scores were made too large
    calibrated = result["calibrated, 20 retrainings"]
    assert calibrated["single"] == pytest.approx(row["single"], abs=1e-6)
    assert calibrated["spread"] < row["spread"] and calibrated["inputs"] == [table.DEFAULT]
    assert len(calibrated["by_group"]) == 1
    combined = result["combined, 10 retrainings"]
    assert len(combined["by_group"]) == 2
    halves = [
        Truth(truths[1].masks[a : a + 10], truths[1].measurements[a : a + 10]) for a in (0, 10)
    ]
    each = [
        lds(combine({n: by_form[n][k] for n in by_form}, plain(half)).values, truths[0]).value
        for half in halves
        for k in range(RUNS)
    ]
    assert combined["single"][0] == pytest.approx(np.mean(each), abs=1e-4)
    assert np.mean(combined["by_group"]) == pytest.approx(combined["single"][0])
    combined = result["combined, 20 retrainings"]
    assert combined["ensemble"][0] > max(result[name]["ensemble"][0] for name in by_form)


def test_one_run_has_no_ensemble_and_few_retrainings_no_rows(
    by_form: dict[str, list[Scores]], truths: tuple[Truth, Truth], saved: sums.Sums
) -> None:
    fewer = replace(saved, sums={}, deviations={}, forms={}, small=saved.small[:7])
    fewer.protocol = replace(saved.protocol, runs=1)
    short = Truth(truths[1].masks[:7], truths[1].measurements[:7], alpha=0.5, measurement="margin")
    fewer.add(table.PUBLISHED, by_form[table.PUBLISHED][:1], (truths[0], short), "", 1.0)
    (row,) = rows.rows_of(fewer).values()
    assert row["ensemble"] is None and row["spread, ensemble"] is None and row["runs"] == 1


def test_scores_of_another_recipe_are_refused(saved: sums.Sums, truths: tuple[Truth, ...]) -> None:
    truths[1].recipe = "another"
    with pytest.raises(ValueError, match="another recipe"):
        saved.add("coupled", scores(0, 1.0), truths, "", 1.0)


# --- the command --------------------------------------------------------------------------------


def make(quick: bool, rate: float, weight_decay: float) -> tasks.RecipeAndHeldOut:
    random = np.random.default_rng(0)
    x = torch.from_numpy(random.normal(size=(90, 5))).float()
    y = (x[:, :2].sum(1) > 0).long()
    recipe = whence.Recipe(
        partial(models.mlp, 5, 8, 2),
        whence.Classification(),
        TensorDataset(x[:60], y[:60]),
        recipes.sgd(rate, weight_decay),
        16,
        3,
    )
    return recipe, TensorDataset(x[60:], y[60:])


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    task = replace(TASKS["digits"], make=make, checkpoints=3, trak_dimension=8)
    monkeypatch.setitem(ALL, "digits", task)

    def call(*given: str) -> dict[str, Any]:
        folders = {"--work": "work", "--out": "out", "--results": "results"}
        places = [text for k, v in folders.items() for text in (k, str(tmp_path / v))]
        monkeypatch.setattr(sys, "argv", ["forms", *given, *places])
        forms.main()
        result: dict[str, Any] = json.loads((tmp_path / "results/forms.json").read_text())
        return result

    return call


SMALL = [
    *("--subsets", "5", "--seeds", "2", "--queries", "4", "--runs", "2", "--retrainings", "10"),
    *("--only", "influence, published", "published", "RepSim", table.DEFAULT),
]


def test_protocols_coexist_and_rows_are_computed_again_from_the_sums(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command("digits", "--alpha", "0.5", "0.7", *SMALL)
    first = ["--first-query", "4", "--first-run", "2", "--first-seed", "2"]
    stored = command("digits", *first, *SMALL)
    entries = stored["tasks"]["digits"]
    assert [e["protocol"]["alpha"] for e in entries] == [0.5, 0.7, 0.5]
    assert [e["chosen_on"] for e in entries] == [True, True, False]
    assert entries[2]["protocol"]["first_run"] == 2
    assert all("combined, 10 retrainings" in e["forms"] for e in entries)
    assert entries[0]["forms"]["RepSim"]["single"] != entries[2]["forms"]["RepSim"]["single"]
    monkeypatch.setattr(forms, "compare", None)  # must not be called
    (tmp_path / "results/forms.json").rename(tmp_path / "before.json")
    again = command("--from", str(tmp_path / "out"))["tasks"]["digits"]
    assert sorted(again, key=str) == sorted(entries, key=str)


def test_a_form_is_computed_once(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = command("digits", *SMALL, "--scores", str(tmp_path / "scores"))
    whole = Scores.load(tmp_path / "scores/digits/RepSim/1001-q0")
    assert whole.values.shape == (4, 60) and whole.values.dtype == np.float32
    monkeypatch.setattr(whence.RepSim, "attribute", None)  # must not be called
    after = command("digits", *SMALL[:-3], "RepSim", "coupled")
    (one,), (two,) = before["tasks"]["digits"], after["tasks"]["digits"]
    assert set(one["forms"]) < set(two["forms"]) and "coupled" in two["forms"]


def test_results_of_the_first_version_are_refused(command: Any, tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results/forms.json").write_text('{"tasks": {}}')
    with pytest.raises(ValueError, match="schema None"):
        command("digits", *SMALL)


def test_new_queries_runs_and_retrainings(tmp_path: Path) -> None:
    task = replace(TASKS["digits"], make=make)
    scale = tasks.Scale(subsets=3, seeds=2, queries=4, runs=1)
    one, two = (
        Trainings(task, scale=scale, work=tmp_path, first=f) for f in (First(), First(4, 1, 2))
    )
    assert one.run_seed(0) != two.run_seed(0)
    first, second = one.truth(), two.truth()
    assert first.query != second.query and not set(first.seeds) & set(second.seeds)
    assert not np.array_equal(first.masks, second.masks)
    small = one.small_truth(3)
    assert not set(small.seeds) & {*first.seeds, *second.seeds, one.run_seed(0)}
    assert not any((mask == other).all() for mask in small.masks for other in first.masks)
    with pytest.raises(ValueError, match="30 held-out examples"):
        Trainings(task, scale=scale, work=tmp_path, first=First(query=30))
    with pytest.raises(ValueError, match="first run 1000"):
        First(run=1000)


# --- the table ----------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_every_task_has_the_default_and_what_it_is_compared_with(task: str) -> None:
    experiment = TASKS[task]
    named = table.forms_of(experiment)
    default = table.default_of(experiment)
    assert {default, *table.BASELINES} <= set(named)
    methods = {name: table.build_form(form, experiment, 100) for name, form in named.items()}
    plain = whence.Source(stage=experiment.stage)
    settings = [{**vars(m), "segments": None} for m in (methods[default], plain)]
    assert settings[0] == settings[1]
    assert plain.segments == "auto"
    assert methods[default].segments in ([1, 3] if experiment.stage is None else ["stages"])
    assert (experiment.stage is None) == (table.DEFAULT in named)
