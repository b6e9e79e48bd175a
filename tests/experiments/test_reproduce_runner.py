"""The runner of the paper's experiments: resumed, extended, refused; and the tasks' own pieces."""

from __future__ import annotations

import json
import os
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
from experiments.engine import optimum, reproduce, search, trainings
from experiments.pages import tables
from experiments.studies import adam, depth
from experiments.tasks import experiment as experiment_module
from experiments.tasks import methods, models, recipes

SMALL = tasks.Scale(subsets=4, seeds=2, queries=6, runs=2, runs_by_method={"HYDRA": 1})


def blobs(count: int = 80, seed: int = 0) -> tuple[TensorDataset, TensorDataset]:
    random = np.random.default_rng(seed)
    y = random.integers(0, 3, count + 20)
    x = torch.from_numpy(random.normal(size=(count + 20, 5)) + 2 * np.eye(5)[y]).float()
    labels = torch.from_numpy(y)
    return TensorDataset(x[:count], labels[:count]), TensorDataset(x[count:], labels[count:])


def make(quick: bool, rate: float, weight_decay: float) -> tasks.RecipeAndHeldOut:
    train, held_out = blobs()
    model = partial(models.mlp, 5, 8, 3)
    optimizer = recipes.sgd(rate, weight_decay)
    return whence.Recipe(model, whence.Classification(), train, optimizer, 16, 4), held_out


TASK = tasks.Experiment(
    "blobs",
    "Blobs",
    make,
    "an MLP",
    SMALL,
    SMALL,
    rates=(0.05, 1e-4),
    trak_dimension=16,
    methods=("RepSim", "TRAK", "SOURCE"),
    expensive=("HYDRA",),
)


def reproduction(folder: Path, experiment: Any = TASK, **given: Any) -> reproduce.Reproduction:
    given = {"log": lambda line: None, "work": folder, "results": folder / "results"} | given
    return reproduce.Reproduction(experiment, **given)


def numbers(result: dict[str, Any]) -> dict[str, Any]:
    return {
        name: (entry["single"], entry["ensemble"], entry["ceiling"], entry["of"])
        for name, entry in result["lds"].items()
    }


def test_a_killed_run_resumes_to_the_same_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = reproduction(tmp_path / "whole").run()
    assert list(whole["lds"]) == ["RepSim", "TRAK", "SOURCE", "HYDRA"]
    assert whole["lds"]["HYDRA"]["ensemble"] is None and whole["lds"]["SOURCE"]["of"]["runs"] == 2

    folders, plain = [], reproduce.Reproduction.attribute

    def dies(self: Any, name: str, study: Any, folder: str) -> Any:
        if len(folders) == 4:
            raise KeyboardInterrupt
        folders.append(folder)
        return plain(self, name, study, folder)

    monkeypatch.setattr(reproduce.Reproduction, "attribute", dies)
    with pytest.raises(KeyboardInterrupt):
        reproduction(tmp_path / "killed").run()
    monkeypatch.setattr(reproduce.Reproduction, "attribute", plain)
    half = json.loads((tmp_path / "killed/results/blobs.json").read_text())
    assert list(half["lds"]) == ["RepSim"]
    again = reproduction(tmp_path / "killed").run()
    assert numbers(again) == numbers(whole)
    assert again["differences"] == whole["differences"]  # of RepSim too, judged before the kill


def test_differences_are_taken_where_scores_are_at_hand(tmp_path: Path) -> None:
    work = reproduction(tmp_path)
    differences = work.run()["differences"]["SOURCE"]
    assert list(differences) == ["RepSim", "TRAK"]
    for name, entry in differences.items():
        one, other = work.judgement("SOURCE", 2), work.judgement(name, 2)
        assert entry["of"] == work.result["lds"][name]["of"]
        assert entry["single"][0] == pytest.approx(one.single.value - other.single.value)
        assert tuple(entry["ensemble"][1:]) == one.ensemble.minus(other.ensemble).interval
        crossed = one.single.value - other.ensemble.value
        assert entry["single, ensemble"][0] == pytest.approx(crossed)
    # results from elsewhere, whose scores are not here: nothing is recomputed for them
    file = tmp_path / "results/blobs.json"
    result = json.loads(file.read_text())
    del result["differences"]
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/blobs.json").write_text(json.dumps(result))
    other = reproduction(tmp_path / "new", results=tmp_path / "elsewhere").run()
    assert other["differences"] == {} and not (tmp_path / "new/blobs").exists()


def test_what_is_there_is_not_done_again_and_more_can_be_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = reproduction(tmp_path).run()
    plain = reproduce.Reproduction.attribute
    monkeypatch.setattr(reproduce.Reproduction, "attribute", None)  # must not be called
    assert numbers(reproduction(tmp_path).run()) == numbers(first)
    monkeypatch.setattr(reproduce.Reproduction, "attribute", plain)
    more = reproduction(tmp_path, scale=replace(SMALL, subsets=5, seeds=3, runs=1)).run()
    assert more["lds"]["SOURCE"]["of"] == {"subsets": 5, "seeds": 3, "queries": 6, "runs": 1}
    grid = json.loads((tmp_path / "blobs/truth-0.5/truth.json").read_text())
    assert grid["arrays"]["measurements"]["shape"] == [5, 3, 6]
    less = reproduction(tmp_path, scale=replace(SMALL, subsets=4, seeds=2, runs=1)).run()
    assert numbers(less) == numbers(more)  # larger results stay


def test_trainings_may_measure_more_queries_than_are_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = replace(TASK, expensive=(), methods=("RepSim",))
    plain = reproduction(tmp_path / "plain", few).run()
    scale = replace(SMALL, measured=9)
    ahead = reproduction(tmp_path / "ahead", few, scale=scale).run()
    assert numbers(ahead) == numbers(plain)
    pool = sys.modules["whence.retrain.pool"].TrainingPool
    monkeypatch.setattr(pool, "make", None)  # no training is needed
    more = reproduction(tmp_path / "ahead", few, scale=replace(scale, queries=9)).run()
    assert more["lds"]["RepSim"]["of"]["queries"] == 9


def test_all_runs_of_a_kind_are_trained_in_one_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, plain = [], trainings.record

    def counted(recipe: Any, seeds: Any, *rest: Any, **given: Any) -> Any:
        calls.append(list(seeds))
        return plain(recipe, seeds, *rest, **given)

    monkeypatch.setattr(trainings, "record", counted)
    work = reproduction(tmp_path, only=("RepSim", "TRAK", "HYDRA"))
    work.run()
    assert calls == [[1000, 1001], [2000, 2001]]
    run = whence.Run.open(tmp_path / "blobs/run-2001")
    alone = work.recipe.run(2001, checkpoints=TASK.checkpoints, subset=run.subset, device="cpu")
    assert run.origin == alone.origin and len(run.subset) == 40
    for name, weight in alone.final.weights().items():
        torch.testing.assert_close(run.final.weights()[name], weight, rtol=1e-4, atol=1e-5)
    again = reproduction(tmp_path, scale=replace(SMALL, runs=3), only=("RepSim",))
    again.run()
    assert calls[2:] == [[1000, 1001, 1002]]


def test_forms_for_adam_over_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adam, "SCALE", tasks.Scale(subsets=3, seeds=2, queries=4, runs=1))
    monkeypatch.setattr(adam, "METHODS", ("TracIn", "SOURCE, exact, floor"))
    monkeypatch.setattr(adam, "SETTINGS", ((1e-3, 1, False), (3e-4, 2, True)))
    monkeypatch.setattr(
        sys, "argv", ["adam", "--out", f"{tmp_path}/work", "--results", f"{tmp_path}"]
    )
    adam.main()
    study = json.loads((tmp_path / "adam.json").read_text())
    assert [(r["rate"], r["epochs"], r["falls"]) for r in study["rows"]] == list(adam.SETTINGS)
    assert all(set(r["lds"]) == set(r["seconds"]) == set(adam.METHODS) for r in study["rows"])
    assert study["rows"][0]["lds"] != study["rows"][1]["lds"]
    monkeypatch.setattr(reproduce.Reproduction, "attribute", None)  # must not be called
    adam.main()
    assert json.loads((tmp_path / "adam.json").read_text()) == study
    one, other = (adam.variant(*setting).recipe()[0] for setting in adam.SETTINGS)
    assert one.fingerprint != other.fingerprint


@pytest.mark.slow
def test_slopes_by_depth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depth, "SCALE", tasks.Scale(subsets=3, seeds=2, queries=3, runs=1))
    monkeypatch.setattr(depth, "DEPTHS", (1, 2))
    monkeypatch.setattr(depth, "WIDTH", 4)
    monkeypatch.setattr(
        sys, "argv", ["depth", "--out", f"{tmp_path}/work", "--results", f"{tmp_path}"]
    )
    depth.main()
    study = json.loads((tmp_path / "depth.json").read_text())
    settings = [(row["optimizer"], row["depth"]) for row in study["rows"]]
    assert settings == [("SGD", 1), ("SGD", 2), ("AdamW", 1), ("AdamW", 2)]
    for row in study["rows"]:
        assert set(row["slope"]) == set(row["lds"]) == set(row["methods"].values())
    monkeypatch.setattr(reproduce.Reproduction, "attribute", None)  # must not be called
    depth.main()
    assert json.loads((tmp_path / "depth.json").read_text()) == study


LARGE = ("cifar10", "pacs", "rte", "sst2", "qnli", "wikitext2")  # minutes each


@pytest.mark.parametrize(
    "task",
    [pytest.param(name, marks=pytest.mark.slow if name in LARGE else ()) for name in tasks.TASKS],
)
def test_committed_results_can_be_resumed(task: str, tmp_path: Path) -> None:
    """Results of other machines, with the same data and models as here.

    If this fails for all tasks, `Recipe.identity` changed: see tools/carry_results.py.
    """
    if not task.startswith("digits") and "WHENCE_DATA" not in os.environ:
        pytest.skip("WHENCE_DATA is not set")
    for quick in (False, True):
        name = f"{task}-quick.json" if quick else f"{task}.json"
        if (tasks.RESULTS / name).is_file():
            given = {"quick": quick, "work": tmp_path, "results": tasks.RESULTS}
            assert reproduction(tmp_path, tasks.TASKS[task], **given).result["lds"]


def test_results_of_another_recipe_or_version_are_refused(tmp_path: Path) -> None:
    work = reproduction(tmp_path, only=("RepSim",))
    work.run()
    other = replace(TASK, rates=(0.01, 1e-4))
    with pytest.raises(
        reproduce.OtherResult, match=r"blobs.json is of another .*its recipe is"
    ) as e:
        reproduction(tmp_path, other)
    assert "its recipe differs in stages.train.rates)" in str(e.value)
    result = json.loads(work.file.read_text())
    older = json.loads(work.file.read_text()) | {"recipe": "of an older whence"}
    del older["identity"]["gradients"]
    work.file.write_text(json.dumps(older))
    with pytest.raises(reproduce.OtherResult, match=r"gradients \(not recorded by .*carry_results"):
        reproduction(tmp_path)
    work.file.write_text(json.dumps(result | {"schema": 1}))
    with pytest.raises(reproduce.OtherResult, match=r"its schema is 1, not \d.*move it"):
        reproduction(tmp_path)
    work.file.write_text("{")
    with pytest.raises(reproduce.OtherResult, match="is damaged"):
        reproduction(tmp_path)


def test_short_of_memory_it_takes_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, plain = [], whence.RepSim.attribute

    def hungry(self: Any, *args: Any, **settings: Any) -> Any:
        given.append(settings.get("memory"))
        if len(given) < 3:
            raise torch.OutOfMemoryError("no room")
        return plain(self, *args, **settings)

    monkeypatch.setattr(whence.RepSim, "attribute", hungry)
    lines: list[str] = []
    scale = replace(SMALL, runs=1)
    reproduction(tmp_path, scale=scale, only=("RepSim",), log=lines.append).run()
    assert given[0] is None and given[1] > given[2] > 0
    assert sum("out of memory; trying with" in line for line in lines) == 2


def test_all_parts_of_an_evaluation(tmp_path: Path) -> None:
    scale = replace(
        SMALL,
        runs=1,
        alphas=(0.7, 1.0),
        downsampled=12,
        removal=tasks.Removal(3, (4, 8), 1, 1, ("SOURCE",)),
        panels=2,
    )
    result = reproduction(tmp_path, scale=scale).run()
    assert set(result["alpha"]) == {"0.7", "1"} and set(result["alpha"]["1"]) == set(TASK.methods)
    assert result["lds"]["Downsampling"]["of"]["models"] == 12
    assert result["removal"]["k"] == [4, 8] and set(result["removal"]["flipped"]) == {
        "SOURCE",
        "Random",
    }
    for rows in result["panels"]["methods"].values():
        assert [len(row["helpful"]) for row in rows] == [5, 5]
    assert {"torch", "date", "whence"} <= set(result["machine"]) and result["device"] == "CPU"
    text = tables.as_text(result, TASK)
    for part in ("SOURCE, L = 3", "LDS over α", "1 − 1/N", "flipped by removal", "Downsampling"):
        assert part in text, part


def test_linear_models_over_epochs_and_at_the_optimum(tmp_path: Path) -> None:
    sklearn = pytest.importorskip("sklearn.linear_model")
    random = np.random.default_rng(0)
    x = random.normal(size=(100, 3))
    y = (x[:, 0] + random.normal(size=100) > 0).astype(np.int64)
    sets = [
        TensorDataset(torch.from_numpy(x[k]).float(), torch.from_numpy(y[k]))
        for k in (slice(80), slice(80, 100))
    ]
    experiment = replace(
        TASK,
        name="line",
        make=partial(recipes.linear, lambda: sets, whence.Classification()),
        full=replace(SMALL, alphas=(0.9,), epochs=(1, 5), subsets=6),
        methods=methods.LINEAR,
        expensive=(),
        segments=1,
        checkpoints=3,
    )
    result = reproduction(tmp_path, experiment).run()
    assert set(result["epochs"]) == {"1", "5"} and set(result["optimum"]) == {"0.5", "0.9"}
    recipe, held_out = experiment.recipe()
    truth, scores = optimum.at_the_optimum(recipe, held_out, 0.9, 6)
    for mask, row in zip(truth.masks, truth.measurements[:, 0], strict=True):
        fitted = sklearn.LogisticRegression(C=np.inf, tol=1e-10, max_iter=1000)
        fitted.fit(x[:80][mask], y[:80][mask])
        z = fitted.decision_function(x[80:])
        np.testing.assert_allclose(row, np.where(y[80:] > 0, z, -z), rtol=1e-3, atol=1e-3)
    exact = scores["influence, conjugate gradients"]
    left = np.flatnonzero(~truth.masks[0])
    whole = sklearn.LogisticRegression(C=np.inf, tol=1e-10, max_iter=1000).fit(x[:80], y[:80])
    z = whole.decision_function(x[80:])
    real = truth.measurements[0, 0] - np.where(y[80:] > 0, z, -z)
    predicted = [exact.removal_effect(row, left) for row in range(20)]
    assert np.corrcoef(real, predicted)[0, 1] > 0.95


def test_least_squares_is_the_optimum() -> None:
    random = np.random.default_rng(1)
    x, noise = random.normal(size=(40, 3)), random.normal(size=40)
    y = x @ [1.0, -2.0, 0.5] + 0.3 + 0.1 * noise
    solution = optimum._least_squares(x, y)
    gradient = optimum._with_bias(x).T @ (optimum._with_bias(x) @ solution - y)
    np.testing.assert_allclose(gradient, 0, atol=1e-10)


def test_crops_are_parts_of_the_padded_image() -> None:
    images = torch.arange(4 * 3 * 32 * 32, dtype=torch.float32).reshape(4, 3, 32, 32) + 1
    labels = torch.arange(4)
    drawn = torch.tensor([[0.0, 0.999, 0.9], [0.5, 0.5, 0.1], [0.45, 0.45, 0.9], [0.99, 0.0, 0.2]])
    cropped, same = recipes.crop_and_flip((images, labels), lambda k: drawn[:, :k])
    assert torch.equal(same, labels) and cropped.shape == images.shape
    padded = torch.nn.functional.pad(images, (4, 4, 4, 4))
    for image, row, got in zip(padded, drawn, cropped, strict=True):
        down, right = int(row[0] * 9), int(row[1] * 9)
        wanted = image[:, down : down + 32, right : right + 32]
        assert torch.equal(got, wanted.flip(-1) if row[2] < 0.5 else wanted)
    assert torch.equal(cropped[2], images[2])  # the middle, not flipped


def test_rates_rise_and_fall() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=2.0)
    schedule = recipes.rise_and_fall(optimizer, 100)
    rates = []
    for _ in range(100):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert max(rates) == pytest.approx(2.0, rel=0.02) and np.argmax(rates) in (19, 20)
    assert 0 < rates[-1] < 0.05 and min(rates) > 0


def test_the_search_finds_a_rate_that_trains(tmp_path: Path) -> None:
    experiment = replace(TASK, rates=None, grid=((1e-6, 0.1), (1e-4,)))
    result = search.search(experiment, 2, "cpu", tmp_path)
    assert result["best"]["rate"] == 0.1 and result["by"] == "accuracy"
    stored = json.loads((tmp_path / "blobs.json").read_text())
    assert [t["rate"] for t in stored["tried"]] == [1e-6, 0.1]
    recipe, held_out = make(False, 0.1, 1e-4)
    model = recipe.train(0, device="cpu")
    asked = search.validation(experiment, held_out)
    rows = torch.stack([asked[k][0] for k in range(len(asked))])
    right = (model(rows).argmax(1) == torch.stack([asked[k][1] for k in range(len(asked))])).float()
    assert result["best"]["over_seeds"][0] == pytest.approx(float(right.mean()))
    queries = range(experiment.full.queries)
    assert not set(asked.indices) & set(queries)


def test_every_task_is_whole() -> None:
    for name, experiment in tasks.TASKS.items():
        assert experiment.name == name and experiment.setting and experiment.title
        assert (experiment.rates is None) == (experiment.grid is not None), name
        for one in (*experiment.methods, *experiment.expensive):
            assert experiment.method(one, 10_000) is not None
        asked = experiment.full.removal
        if asked is not None:
            assert set(asked.methods) <= set(experiment.methods)
        if experiment.group != "not in the paper":
            assert experiment.paper_seeds, name
    with pytest.raises(ValueError, match="no method is called 'Sauce'"):
        TASK.method("Sauce", 10)


def test_rates_that_were_searched_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment_module, "RESULTS", tmp_path)
    unknown = replace(TASK, rates=None, grid=((0.1,), (0.0,)))
    with pytest.raises(FileNotFoundError, match=r"python -m experiments\.engine\.search blobs"):
        unknown.chosen_rates()
    (tmp_path / "search").mkdir()
    best = {"best": {"rate": 0.5, "weight_decay": 0.25}}
    (tmp_path / "search/blobs.json").write_text(json.dumps(best))
    assert unknown.chosen_rates() == (0.5, 0.25)
