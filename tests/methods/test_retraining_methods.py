"""Downsampling and LeaveOneOut: what retraining itself says about single examples."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from support import judged, recipes
from support.comparing import close

import whence
from whence.evaluate import ground_truth, lds
from whence.methods.downsampling import Downsampling
from whence.methods.leaveoneout import LeaveOneOut
from whence.retrain import Truth
from whence.retrain.measure import measure
from whence.retrain.pool import TrainingPool

QUIET: Any = {"progress": False, "device": "cpu"}
QUERY = recipes.dataset(5, seed=9)


def masks(subsets: int, n: int, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    return np.stack([random.permutation(n) < n // 2 for _ in range(subsets)])


def noisy(subsets: int = 30, n: int = 8, q: int = 3, seeds: int = 2, **more: Any) -> Truth:
    random = np.random.default_rng(1)
    return Truth(masks(subsets, n), random.normal(size=(subsets, seeds, q)) * 1e3 + 5e3, **more)


# --- Downsampling ---------------------------------------------------------------------------------


def test_subsets_of_one_size_see_an_example_beside_the_mean_of_the_others() -> None:
    """f(S) = c + Σ v over all 5-subsets of 9: with m there is one of the others less."""
    v = np.random.default_rng(0).normal(size=(4, 9))
    every = np.array([[k in chosen for k in range(9)] for chosen in combinations(range(9), 5)])
    truth = Truth(every, 7.0 + (every @ v.T)[:, None, :])
    others = (v.sum(1, keepdims=True) - v) / 8
    close(Downsampling(truth).attribute().values, v - others, 1e-9)


def test_a_difference_of_means_and_its_standard_error() -> None:
    truth = noisy()
    scores = Downsampling(truth).attribute()
    assert scores.values.shape == (3, 8) and scores.spread is not None
    for q in range(3):
        for m in range(8):
            inside = truth.masks[:, m]
            groups = truth.means[inside, q], truth.means[~inside, q]
            close(scores.values[q, m], groups[0].mean() - groups[1].mean(), 1e-9)
            close(
                scores.values[q, m] / scores.spread[q, m], stats.ttest_ind(*groups).statistic, 1e-9
            )
    assert scores.diagnostics["spread"].startswith("standard error")


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Downsampling(noisy()).attribute()
    monkeypatch.setattr("whence.retrain.contrast.NUMBERS_PER_BLOCK", 90)
    blocks = Downsampling(noisy()).attribute()
    close(blocks.values, whole.values, 1e-9)
    close(blocks.spread, whole.spread, 1e-9)


def test_the_truths_description_goes_with_the_scores(tmp_path: Path) -> None:
    about: Any = {"measurement": "loss", "unit": "nats", "higher_is_better": False, "alpha": 0.5}
    noisy(stage="finetune", recipe="abc", **about).save(tmp_path / "truth")
    scores = Downsampling(tmp_path / "truth").attribute(out=tmp_path / "scores")
    assert (scores.measurement, scores.unit, scores.higher_is_better) == ("loss", "nats", False)
    assert scores.stage == ["finetune"] * 8 and scores.provenance["recipe"] == "abc"
    loaded = whence.Scores.load(tmp_path / "scores")
    np.testing.assert_array_equal(loaded.values, scores.values)
    np.testing.assert_array_equal(loaded.spread, scores.spread)
    assert loaded.diagnostics["seeds"] == [0, 1] and loaded.method == "Downsampling"


def test_examples_that_are_always_or_never_there_are_named() -> None:
    truth = noisy()
    truth.masks[:, 2], truth.masks[:, [4, 6]] = True, False
    with pytest.warns(UserWarning) as said:
        scores = Downsampling(truth).attribute()
    text = " ".join(str(one.message) for one in said)
    assert "1 of 8 examples are in every subset (of 30)" in text and ": 2. They score 0" in text
    assert "2 of 8 examples are in no subset (of 30)" in text and ": 4, 6. They" in text
    assert scores.diagnostics["in_every_subset"] == [2]
    assert scores.diagnostics["in_no_subset"] == [4, 6]
    assert scores.spread is not None
    unknown = [2, 4, 6]
    assert not scores.values[:, unknown].any() and np.isinf(scores.spread[:, unknown]).all()
    known = [0, 1, 3, 5, 7]
    assert np.isfinite(scores.spread[:, known]).all() and scores.values[:, known].all()
    close(scores.values[:, known], Downsampling(noisy()).attribute().values[:, known], 1e-9)


def test_nothing_is_known_of_one_subset() -> None:
    with pytest.raises(ValueError, match=r"each of the 8 examples .* more subsets"):
        Downsampling(noisy(subsets=1)).attribute()
    few = Downsampling(Truth(np.eye(2, dtype=bool), np.ones((2, 1, 1)))).attribute()
    assert few.spread is not None and np.isinf(few.spread).all()  # two subsets: no variance


def test_diverged_trainings() -> None:
    truth, whole = noisy(), noisy()
    truth.measurements[3, 0] = truth.measurements[5] = np.nan
    with pytest.raises(ValueError, match=r"3 of the truth's 60 trainings diverged: .*exclude"):
        Downsampling(truth).attribute()
    scores = Downsampling(truth, exclude_diverged=True).attribute()
    remaining = np.arange(30) != 5
    measured = whole.means[remaining]
    measured[3] = whole.measurements[3, 1]
    expected = Truth(whole.masks[remaining], measured[:, None])
    close(scores.values, Downsampling(expected).attribute().values, 1e-9)
    assert scores.diagnostics["diverged"] == 3 and scores.diagnostics["subsets"] == 29


def test_another_study_and_other_queries() -> None:
    recipe = recipes.recipe(epochs=1)
    truth = ground_truth(recipe, QUERY, 0.5, subsets=4, seeds=1, **QUIET)
    run = recipe.run(0, checkpoints=1, device="cpu")
    study = whence.Study(recipe.build(0), recipe.task, train=recipes.dataset(), runs=run)
    with pytest.warns(UserWarning, match="nothing is known"):
        scores = Downsampling(truth).attribute(study, QUERY)
        alone = Downsampling(truth).attribute()
    np.testing.assert_array_equal(scores.values, alone.values)
    for other in (recipes.dataset(5, seed=8), recipes.dataset(6, seed=9)):
        with pytest.raises(ValueError, match=r"has measured 5 other queries than these"):
            Downsampling(truth).attribute(query=other)
    fewer = whence.Study(recipe.build(0), recipe.task, train=recipes.dataset(40), runs=one(recipe))
    with pytest.raises(ValueError, match=r"of 48 training examples, and the study has 40"):
        Downsampling(truth).attribute(fewer)
    truth.stage = "finetune"
    with pytest.raises(ValueError, match=r"of stage 'finetune', and the study has \['train'\]"):
        Downsampling(truth).attribute(study)


def one(recipe: whence.Recipe) -> whence.Run:
    return whence.Run.from_checkpoints([recipe.build(0).state_dict()], [1], 0.1)


def test_digits() -> None:
    """Hundreds of trainings for a little: the paper's .11 on FashionMNIST has company."""
    resampled = ground_truth(
        judged.recipe(), judged.data()[1], 0.5, subsets=150, seeds=[77], seed=1, progress=False
    )
    scores = Downsampling(resampled).attribute()
    assert 0.05 < lds(scores, judged.truth()).value < 0.5
    assert lds(scores, resampled).value > 0.8  # its own subsets, by heart


# --- LeaveOneOut ----------------------------------------------------------------------------------


def trained(recipe: whence.Recipe, query: Any, seed: int, **left: Any) -> np.ndarray:
    model = recipe.train(seed, device="cpu", **left)
    batch = list(query.tensors)
    with torch.no_grad():
        return recipe.task.measurements(recipe.task.outputs(model, batch), batch).numpy()


def by_hand(recipe: whence.Recipe, query: Any, seeds: list[int], examples: Any) -> np.ndarray:
    """(seeds, q, examples)"""
    n = len(recipe.stages[0].data)
    actual = []
    for seed in seeds:
        whole = trained(recipe, query, seed)
        without = [
            trained(recipe, query, seed, subset=np.delete(np.arange(n), m)) for m in examples
        ]
        actual.append(whole[:, None] - np.stack(without, 1))
    return np.stack(actual)


def test_single() -> None:
    recipe = recipes.recipe(epochs=2)
    scores = LeaveOneOut(recipe, [3, 0, 47]).attribute(query=QUERY, **QUIET)
    close(scores.values, by_hand(recipe, QUERY, [0], [3, 0, 47])[0], 1e-8)
    assert list(scores.train_ids) == [3, 0, 47] and scores.spread is None
    assert scores.diagnostics["trainings"] == 4 and scores.stage is None
    assert scores.settings["seeds"] == [0] and scores.unit == "logits"
    assert abs(scores.values).min() > 0


def test_expected_over_seeds() -> None:
    recipe = recipes.recipe(epochs=2)
    scores = LeaveOneOut(recipe, [1, 2], seeds=[5, 6, 9]).attribute(query=QUERY, **QUIET)
    each = by_hand(recipe, QUERY, [5, 6, 9], [1, 2])
    close(scores.values, each.mean(0), 1e-8)
    close(scores.spread, each.std(0, ddof=1) / 3**0.5, 1e-7)
    assert scores.diagnostics["spread"].startswith("standard error")


def test_everyone_and_itself() -> None:
    recipe = recipes.recipe(train=recipes.dataset(9), batch_size=4, epochs=2)
    selves = LeaveOneOut(recipe, seeds=2).attribute(**QUIET)
    every = LeaveOneOut(recipe, seeds=2).attribute(query=recipes.dataset(9), **QUIET)
    assert selves.values.shape == (9,) and selves.is_self_influence
    close(selves.values, every.values.diagonal(), 1e-8)
    close(selves.spread, every.spread.diagonal(), 1e-7)
    close(every.values, by_hand(recipe, recipes.dataset(9), [0, 1], range(9)).mean(0), 1e-8)
    some = LeaveOneOut(recipe, [4, 2], seeds=2).attribute(**QUIET)
    close(some.values, selves.values[[4, 2]], 1e-8)


def test_of_one_stage() -> None:
    recipe = recipes.two_stages()
    scores = LeaveOneOut(recipe, [2], stage="finetune").attribute(query=QUERY, **QUIET)
    rest = np.delete(np.arange(24), 2)
    whole, without = (
        trained(recipe, QUERY, 0, **left) for left in ({}, {"subset": rest, "stage": "finetune"})
    )
    close(scores.values[:, 0], whole - without, 1e-8)
    assert scores.stage == ["finetune"]
    with pytest.raises(ValueError, match=r"stage 'pretrain' are not measured .* give query="):
        LeaveOneOut(recipe).attribute(**QUIET)


def test_it_resumes_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipes.recipe(epochs=1)
    method = LeaveOneOut(recipe, range(6))
    expected = method.attribute(query=QUERY, out=tmp_path / "whole", **QUIET)
    make, made = TrainingPool.make, []

    def mortal(self: Any, trainings: Any, *rest: Any) -> Any:
        if made:
            raise KeyboardInterrupt
        made.append(len(trainings))
        return make(self, trainings, *rest)

    monkeypatch.setattr(TrainingPool, "make", mortal)
    with pytest.raises(KeyboardInterrupt):
        method.attribute(query=QUERY, out=tmp_path / "killed", **QUIET)
    assert 0 < made[0] < 7

    def counting(self: Any, trainings: Any, *rest: Any) -> Any:
        made.append(len(trainings))
        return make(self, trainings, *rest)

    monkeypatch.setattr(TrainingPool, "make", counting)
    again = method.attribute(query=QUERY, out=tmp_path / "killed", **QUIET)
    assert sum(made) == 7
    np.testing.assert_array_equal(again.values, expected.values)
    method.attribute(query=QUERY, out=tmp_path / "killed", **QUIET)
    assert sum(made) == 7
    loaded = whence.Scores.load(tmp_path / "killed")
    np.testing.assert_array_equal(loaded.values, expected.values)


def diverging(monkeypatch: pytest.MonkeyPatch, lost: set[tuple[int, int]]) -> None:
    """Trainings of (seed, example left out) end in NaN."""

    def broken(recipe: Any, query: Any, trainings: Any, **options: Any) -> Any:
        rows = measure(recipe, query, trainings, **options)
        for row, training in zip(rows, trainings, strict=True):
            if training.subset is not None:
                (without,) = np.flatnonzero(~np.asarray(training.subset))
                if (training.seed, int(without)) in lost:
                    row[:] = np.nan
        return rows

    monkeypatch.setattr("whence.methods.leaveoneout.measure", broken)


def test_diverged_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, examples = recipes.recipe(epochs=1), [1, 2, 3]
    each = by_hand(recipe, QUERY, [0, 1, 2], examples)
    diverging(monkeypatch, {(1, 2), (0, 3), (2, 3)})
    with pytest.raises(ValueError, match=r"3 of 9 pairs of trainings .*exclude_diverged=True"):
        LeaveOneOut(recipe, examples, 3).attribute(query=QUERY, **QUIET)
    method = LeaveOneOut(recipe, examples, 3, exclude_diverged=True)
    scores = method.attribute(query=QUERY, **QUIET)
    close(scores.values[:, 0], each[:, :, 0].mean(0), 1e-8)
    close(scores.values[:, 1], each[[0, 2], :, 1].mean(0), 1e-8)
    close(scores.values[:, 2], each[1, :, 2], 1e-8)
    assert scores.spread is not None and np.isinf(scores.spread[:, 2]).all()
    close(scores.spread[:, 1], each[[0, 2], :, 1].std(0, ddof=1) / 2**0.5, 1e-7)
    assert scores.diagnostics["diverged"] == 3
    diverging(monkeypatch, {(0, 2)})
    with pytest.raises(ValueError, match=r"all pairs of trainings for 1 examples \(2\) diverged"):
        LeaveOneOut(recipe, examples, exclude_diverged=True).attribute(query=QUERY, **QUIET)


def test_what_is_refused() -> None:
    recipe = recipes.recipe(epochs=1)
    with pytest.raises(
        IndexError, match=r"examples=\[48\] are not in the training data: it has 48"
    ):
        LeaveOneOut(recipe, [48])
    for examples in ([], [1, 1]):
        with pytest.raises(ValueError, match="empty, or name one twice"):
            LeaveOneOut(recipe, examples)
    for seeds in (0, [], [1, 1]):
        with pytest.raises(ValueError, match="at least one, and none twice"):
            LeaveOneOut(recipe, seeds=seeds)
    with pytest.raises(ValueError, match=r"stage='fine' is not in the recipe"):
        LeaveOneOut(recipe, stage="fine")
    with pytest.raises(TypeError, match=r"recipe is a Sequential: give a whence.Recipe"):
        LeaveOneOut(recipes.mlp())  # type: ignore[arg-type]
    other = whence.Study(
        recipe.build(0), recipe.task, train=recipes.dataset(seed=3), runs=one(recipe)
    )
    with pytest.raises(ValueError, match=r"study's training data is not that of the recipe"):
        LeaveOneOut(recipe).attribute(other, QUERY, **QUIET)
