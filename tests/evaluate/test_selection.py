"""Selecting training data: against retraining by hand, SciPy's paired test and plain sorting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from support import recipes
from torch.utils.data import Subset

import whence
from whence.errors import InvalidInput
from whence.evaluate import select
from whence.evaluate.selection import ALL, RANDOM, SELECTED
from whence.retrain import Training, measure

N = len(recipes.dataset())
QUERY = Subset(recipes.dataset(), range(8))
TEST = Subset(recipes.dataset(), range(8, 13))


def made(values: Any, higher: bool = True) -> whence.Scores:
    about = {"method": "M", "measurement": "margin", "unit": "logits"}
    return whence.Scores(np.asarray(values), higher_is_better=higher, **about)


def drawn(q: int = 8) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(q, N))


@pytest.mark.parametrize("higher", [True, False])
def test_the_worst_are_dropped_and_the_rest_is_retrained_on(higher: bool) -> None:
    recipe, values = recipes.recipe(epochs=2), drawn()
    options: dict[str, Any] = {"device": "cpu", "progress": False}
    result = select(recipe, made(values, higher), QUERY, drop=5, test=TEST, seeds=2, **options)
    help_ = values.mean(0) if higher else -values.mean(0)
    worst = sorted(range(N), key=lambda m: help_[m])[:5]
    assert result.dropped == worst and not result.kept[worst].any() and result.kept.sum() == N - 5
    by_hand = measure(recipe, TEST, [Training(s, result.kept) for s in (0, 1)], **options)
    np.testing.assert_allclose(result.measured[SELECTED], by_hand.mean(1), rtol=1e-6)
    by_hand = measure(recipe, TEST, [Training(s) for s in (0, 1)], **options)
    np.testing.assert_allclose(result.measured[ALL], by_hand.mean(1), rtol=1e-6)
    assert result.judging == len(TEST) and result.measured[RANDOM].shape == (2,)
    assert "as many at random" in repr(result) and f"{N - 5}" in repr(result)


@pytest.mark.parametrize("engine", ["auto", "single"])
def test_the_accuracy_is_that_of_the_same_models(engine: str, tmp_path: Path) -> None:
    recipe = recipes.recipe(epochs=2)
    options: dict[str, Any] = {"device": "cpu", "progress": False, "engine": engine}
    options |= {"drop": 5, "test": TEST, "seeds": 2, "out": tmp_path}
    result = select(recipe, made(drawn()), QUERY, **options)
    assert result.accuracy is not None
    x, y = (torch.stack(column) for column in zip(*TEST, strict=True))
    for name, subset in ((ALL, None), (SELECTED, result.kept)):
        for seed in (0, 1):
            said = recipe.train(seed, subset, device="cpu").eval()(x).argmax(1)
            assert result.accuracy[name][seed] == pytest.approx(float((said == y).float().mean()))
    again = select(recipe, made(drawn()), QUERY, **options)  # from the folder
    np.testing.assert_array_equal(again.accuracy[RANDOM], result.accuracy[RANDOM])  # type: ignore[index]
    assert "accuracy" in repr(result) and "%" in repr(result)


def test_queries_that_choose_do_not_judge() -> None:
    values = np.zeros((8, N))
    values[:, 3] = -1.0
    judged: list[int] = []

    class Watched(recipes.dataset().__class__):
        def __getitem__(self, index: Any) -> Any:
            judged.append(index)
            return super().__getitem__(index)

    data = Watched(*recipes.dataset().tensors)
    for seed in range(3):
        rows = np.random.default_rng(seed).permutation(8)
        values[:, 7] = 0.0
        values[rows[4:], 7] = -1e6
        judged.clear()
        recipe = recipes.recipe(epochs=1)
        result = select(
            recipe, made(values), data, drop=1, seeds=1, seed=seed, device="cpu", progress=False
        )
        assert result.dropped == [3] and result.judging == 4
        assert set(judged) <= set(rows[4:].tolist()) | {0}


def test_the_interval_is_that_of_a_paired_test() -> None:
    random = np.random.default_rng(1)
    a, b = random.normal(size=(2, 6))
    measured = {ALL: b, SELECTED: a, RANDOM: b - 1}
    about = ("M", "loss", "nats", False)
    result = whence.evaluate.Selection(np.ones(3, bool), np.ones(3), measured, 4, *about)
    value, (low, high) = result.difference()
    test = stats.ttest_rel(b - 1, a)
    expected = test.confidence_interval(0.95)
    assert value == pytest.approx((b - 1 - a).mean())
    assert (low, high) == pytest.approx((expected.low, expected.high))
    one = whence.evaluate.Selection(
        np.ones(3, bool), np.ones(3), {k: v[:1] for k, v in measured.items()}, 4, *about
    )
    assert np.isnan(one.difference()[1]).all()


def test_duplicates_go_first() -> None:
    values = np.arange(N, dtype=float)[None].repeat(2, 0)
    alike = np.arange(N)
    alike[N - 1] = 0  # the best duplicates the first: the first, which is worse, goes
    recipe = recipes.recipe(epochs=1)
    options: dict[str, Any] = {"seeds": 1, "device": "cpu", "progress": False, "test": TEST}
    result = select(recipe, made(values), QUERY, drop=1, duplicate_of=alike, **options)
    assert result.dropped == [0]
    alike[2] = N - 3
    result = select(recipe, made(values), QUERY, keep=N - 2, duplicate_of=alike, **options)
    assert result.dropped == [0, 2]


def test_self_influence_drops_the_most_memorised() -> None:
    values = np.zeros(N)
    values[11] = 5.0
    result = select(
        recipes.recipe(epochs=1), made(values), QUERY, drop=1, seeds=1, device="cpu", progress=False
    )
    assert result.dropped == [11] and result.judging == len(QUERY)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either drop= or keep="),
        ({"drop": 1, "keep": 2}, "either drop= or keep="),
        ({"drop": 0}, "drop=0"),
        ({"keep": 1.5}, "keep=1.5"),
        ({"drop": 10**6}, "drop=1000000"),
        ({"drop": 1, "duplicate_of": [0]}, r"duplicate_of has shape \(1,\)"),
        ({"drop": 1, "stage": "other"}, "other"),
    ],
)
def test_input_that_is_wrong(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        select(recipes.recipe(), made(drawn()), QUERY, progress=False, **options)
    if not options:
        with pytest.raises(InvalidInput, match="both choose and judge"):
            select(recipes.recipe(), made(drawn(1)), QUERY, drop=1)


def test_scores_of_other_queries_are_refused_and_of_other_data_announced() -> None:
    recipe = recipes.recipe(epochs=1)
    options: dict[str, Any] = {"drop": 5, "seeds": 1, "device": "cpu", "progress": False}
    for about, message in (
        ({"query": "others"}, "other queries than the query set"),
        ({"candidates": True}, "about candidates"),
    ):
        scores = made(drawn())
        scores.provenance.update(about)
        with pytest.raises(InvalidInput, match=message):
            select(recipe, scores, QUERY, **options)
    scores = made(drawn())
    scores.provenance.update({"train": {"train": "others"}})
    with pytest.warns(UserWarning, match="other training data than the recipe"):
        select(recipe, scores, QUERY, **options)


@pytest.mark.parametrize(
    "wrong", [{"drop": float("nan")}, {"drop": "3"}, {"seeds": 0}, {"seeds": []}]
)
def test_numbers_that_are_none(wrong: dict[str, Any]) -> None:
    with pytest.raises(whence.WhenceError, match=f"^{next(iter(wrong))}="):
        select(recipes.recipe(epochs=1), made(drawn()), QUERY, **({"drop": 5} | wrong))


def test_arguments_in_the_wrong_order() -> None:
    with pytest.raises(TypeError, match=r"select\(Scores and Recipe\)"):
        select(made(drawn()), recipes.recipe(epochs=1), QUERY, drop=5)  # type: ignore[arg-type]
