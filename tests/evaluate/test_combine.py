"""combine: against plain loops, on simulated truths, and on real digits."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import lsq_linear
from scipy.stats import spearmanr
from support import judged
from support.made import ABOUT, scores_of

import whence
from whence.evaluate import calibrate, calibration, combine, compare, ground_truth, lds
from whence.retrain import Truth
from whence.scores import Scores

Q, N = 6, 40
Array = NDArray[np.float64]
RIDGES = sys.modules["whence.evaluate.combine"].RIDGES
RESAMPLES = sys.modules["whence.evaluate.combine"].RESAMPLES


def world(inputs: int, seed: int = 0, right: float = 1.0) -> tuple[Array, list[Array]]:
    """What examples really do (q, n), and inputs with independent errors, in other units."""
    random = np.random.default_rng(seed)
    real = random.normal(size=(Q, N)) * random.uniform(0.5, 2, size=(Q, 1))
    errors = random.normal(size=(inputs, Q, N)) * np.abs(real).mean(1)[:, None] * 1.5
    return real, [4.0**k * (right * real + error) for k, error in enumerate(errors)]


def truth_of(real: Array, subsets: int, seed: int = 0, noise: float = 1.0, seeds: int = 1) -> Truth:
    random = np.random.default_rng(seed)
    masks = np.stack([random.permutation(N) < N // 2 for _ in range(subsets)])
    error = noise * random.normal(size=(subsets, seeds, len(real)))
    return Truth(masks, (masks @ real.T)[:, None] + error, alpha=0.5, **ABOUT)


def about(scores: Scores) -> dict[str, Any]:
    actual: dict[str, Any] = scores.diagnostics["combination"]
    return actual


# --- the fit, by plain loops and another solver --------------------------------------------------


def standardized(values: list[Array], truth: Truth) -> Array:
    """(K, subsets, q): sums of each query's scores over their deviation, to unit mean square."""
    x = np.array([truth.masks @ (one / one.std(1, keepdims=True)).T for one in values])
    x -= x.mean(1, keepdims=True)
    return np.asarray(x / np.sqrt((x**2).mean((1, 2)))[:, None, None])


def shares(x: Array, y: Array) -> Array:
    """How often each input alone explains most of Y, resample by resample."""
    random, wins = np.random.default_rng(0), np.zeros(len(x))
    subsets = y.shape[0]
    for drawn in random.multinomial(subsets, np.full(subsets, 1 / subsets), size=RESAMPLES):
        rows = np.repeat(np.arange(subsets), drawn)
        wins[np.argmax([(one[rows] * y[rows]).sum() / np.linalg.norm(one[rows]) for one in x])] += 1
    return np.asarray(wins / RESAMPLES)


def ridge(x: Array, t: Array, strength: float) -> Array:
    """Weights by bounded least squares, of the data and of one more row for each weight."""
    x, t = x - x.mean(1, keepdims=True), t - t.mean(0)
    y, p = t / t.std(0), shares(x, t / t.std(0))
    flat, prior = x.reshape(len(x), -1).T, np.tensordot(p, x, 1)
    slope = max((prior * y).sum(), 0) / (prior**2).sum()
    root = np.sqrt(strength * (flat**2).sum() / len(x))
    rows = np.concatenate([flat, root * np.eye(len(x))])
    right = np.concatenate([y.ravel(), root * slope * p])
    return np.asarray(lsq_linear(rows, right, (0, np.inf), method="bvls").x)


def chosen(x: Array, t: Array) -> float:
    """The ridge with the least error on subsets that are held out one by one."""
    errors = []
    for strength in RIDGES:
        error = 0.0
        for j in range(len(t)):
            rest = np.arange(len(t)) != j
            weights = ridge(x[:, rest], t[rest], strength)
            predicted = weights @ (x[:, j] - x[:, rest].mean(1))
            error += (((t[j] - t[rest].mean(0)) / t[rest].std(0) - predicted) ** 2).sum()
        errors.append(error)
    return float(RIDGES[int(np.argmin(errors))])


def test_weights_ridge_and_lds_by_another_solver() -> None:
    real, values = world(3)
    truth = truth_of(real, 8, noise=2.0)
    result = about(combine([scores_of(v, method=f"m{k}") for k, v in enumerate(values)], truth))
    x, t = standardized(values, truth), truth.means
    assert result["returned"] == "combination" and result["ridge"] == chosen(x, t)
    expected = ridge(x, t, result["ridge"])
    assert list(result["weights"]) == ["m0", "m1", "m2"]
    np.testing.assert_allclose(list(result["weights"].values()), expected, atol=1e-9)
    predicted = np.empty_like(t)  # without the held-out subset: ridge, weights and means
    for j in range(len(t)):
        rest = np.arange(len(t)) != j
        weights = ridge(x[:, rest], t[rest], chosen(x[:, rest], t[rest]))
        predicted[j] = weights @ (x[:, j] - x[:, rest].mean(1))
    held_out = [spearmanr(*pair).statistic for pair in zip(predicted.T, t.T, strict=True)]
    assert result["combined"]["lds"] == pytest.approx(np.mean(held_out))
    single = lds(values[1], truth)
    assert result["inputs"]["m1"]["lds"] == pytest.approx(single.value)
    assert result["inputs"]["m1"]["interval"] == pytest.approx(single.interval)
    equal = lds(sum(v / v.std(1, keepdims=True) for v in values), truth)
    assert result["equal"]["lds"] == pytest.approx(equal.value, abs=0.05)


def test_the_values_are_the_weighted_sum() -> None:
    real, values = world(2)
    truth = truth_of(real, 12)
    result = combine({"a": scores_of(values[0]), "b": scores_of(values[1])}, truth)
    x = [truth.masks @ (one / one.std(1, keepdims=True)).T for one in values]
    size = [np.sqrt(((one - one.mean(0)) ** 2).mean()) for one in x]
    weights = [about(result)["weights"][name] for name in "ab"]
    shape = sum(
        w / s * one / one.std(1, keepdims=True)
        for w, s, one in zip(weights, size, values, strict=True)
    )
    for row, expected in zip(result.values, shape, strict=True):
        ratio = row / expected
        np.testing.assert_allclose(ratio, ratio[0], rtol=1e-9)
        assert ratio[0] > 0


# --- what it is good for -------------------------------------------------------------------------


@pytest.mark.parametrize("subsets", [10, 30])
def test_independent_errors_average_out(subsets: int) -> None:
    real, values = world(4, seed=3)
    inputs = [scores_of(one) for one in values]
    result = combine(inputs, truth_of(real, subsets, noise=2.0))
    judge = truth_of(real, 300, seed=99, noise=2.0)
    best = max(lds(one, judge).value for one in inputs)
    assert lds(result, judge).value > best + 0.05
    assert 0.8 < calibration(result, judge).slope < 1.25
    actual = about(result)
    assert actual["returned"] == "combination"
    assert actual["combined"]["lds"] > max(one["lds"] for one in actual["inputs"].values())
    assert result.method == "Combination" and result.unit == "logits"
    low, high = result.removal_interval(0, [1, 2])
    assert low < result.removal_effect(0, [1, 2]) < high


def test_an_input_of_the_wrong_sign_is_left_out() -> None:
    real, values = world(2, seed=1)
    inputs = {"right": scores_of(values[0]), "wrong": scores_of(-values[1])}
    weights = about(combine(inputs, truth_of(real, 40)))["weights"]
    assert weights["right"] > 0 == weights["wrong"]


def test_one_right_input_among_sixty_of_noise() -> None:
    real, _ = world(1)
    random = np.random.default_rng(1)
    inputs = {"right": scores_of(real)}
    inputs |= {f"noise {k}": scores_of(random.normal(size=real.shape)) for k in range(60)}
    result, judge = combine(inputs, truth_of(real, 12, noise=0.1)), truth_of(real, 100, seed=9)
    assert lds(result, judge).value > lds(inputs["right"], judge).value - 0.02


def test_the_equal_weight_sum_where_the_combination_is_worse() -> None:
    """Eight equally good inputs, and a truth too noisy to tell them apart."""
    real, values = world(8, seed=1)
    truth = truth_of(real, 20, noise=4.0, seed=1)
    result = combine({f"m{k}": scores_of(one) for k, one in enumerate(values)}, truth)
    actual = about(result)
    assert actual["returned"] == actual["best"] == "equal-weight sum" and actual["ridge"] is None
    assert actual["ahead"]["lds"] < 0 and actual["ahead"]["interval"][1] < 0
    assert len(set(actual["weights"].values())) == 1
    judge = truth_of(real, 100, seed=9)
    equal = sum(one / one.std(1, keepdims=True) for one in values)
    assert lds(result, judge).value == pytest.approx(lds(equal, judge).value, abs=0.01)


def test_one_input_is_calibrated() -> None:
    real, values = world(1)
    truth = truth_of(real, 10)
    result, expected = (
        combine([scores_of(values[0])], truth),
        calibrate(scores_of(values[0]), truth),
    )
    np.testing.assert_allclose(result.values, expected.values)
    assert about(result)["returned"] == "Source"
    assert result.diagnostics["calibration"] == expected.diagnostics["calibration"]


def test_parts_of_one_method(tmp_path: Path) -> None:
    real, values = world(2, seed=2)
    noise = 3 * np.random.default_rng(0).normal(size=real.shape)
    segments = np.stack([noise, values[0], values[1] / 4])
    scores = scores_of(segments.sum(0), by_segment=segments)
    truth, judge = truth_of(real, 30), truth_of(real, 200, seed=9)
    result = combine(scores, truth)
    names = ["Source", "Source, segment 1", "Source, segment 2", "Source, segment 3"]
    assert list(about(result)["weights"]) == names
    assert lds(result, judge).value > lds(scores, judge).value + 0.05
    every = zip(names, [scores.values, *segments], strict=True)
    separate = combine({name: scores_of(part) for name, part in every}, truth)
    np.testing.assert_allclose(result.values, separate.values)
    layers = scores_of(segments.sum(0), by_layer=segments, diagnostics={"layers": ["a", "b", "c"]})
    by_layer = combine(layers, truth)
    np.testing.assert_allclose(by_layer.values, result.values)
    assert list(about(by_layer)["weights"]) == ["Source", "Source, a", "Source, b", "Source, c"]
    result.save(tmp_path / "scores")
    again = Scores.load(tmp_path / "scores")
    assert about(again) == about(result)
    both = combine({"parts": scores, "whole": scores_of(values[0])}, truth, parts=True)
    assert list(about(both)["weights"])[:2] == ["parts", "whole"]
    for without in (scores_of(values[0]), scores_of(values[0], by_segment=values[0][None])):
        with pytest.raises(ValueError, match="no input has parts: attribute with by_layer=True"):
            combine([without], truth, parts=True)


@pytest.mark.parametrize("dtype", [np.float16, np.int64])
def test_narrow_scores_neither_overflow_nor_are_rounded(dtype: Any) -> None:
    real, values = world(2)
    narrow = [
        scores_of((1e-3 * one if dtype == np.float16 else 1e2 * one).astype(dtype))
        for one in values
    ]
    truth = truth_of(1e6 * real, 12)
    wide = [scores_of(one.values.astype(np.float64)) for one in narrow]
    for actual, expected in (
        (combine(narrow, truth), combine(wide, truth)),
        (calibrate(narrow[0], truth), calibrate(wide[0], truth)),
    ):
        assert actual.values.dtype in (np.float32, np.float64)
        np.testing.assert_allclose(actual.values, expected.values, rtol=1e-6)


def test_a_query_that_an_input_says_nothing_about() -> None:
    real, values = world(2)
    values[0][2] = 0.0
    values[1][4] = values[0][4] = 0.0
    result = combine([scores_of(one) for one in values], truth_of(real, 12))
    assert np.isfinite(result.values).all()
    assert result.values[2].any() and not result.values[4].any()


# --- bad input -----------------------------------------------------------------------------------


def test_what_cannot_be_combined() -> None:
    real, (values, _) = world(2)
    truth = truth_of(real, 10)
    truth.recipe, truth.query = "a" * 64, "these"
    known = {"recipe": "a" * 64, "query": "these", "train": {"train": "data"}}
    one = scores_of(values, provenance=known)
    bad = np.where(np.eye(Q, N), np.nan, values)
    cases: list[tuple[Any, type[Exception], str]] = [
        ([], ValueError, "scores is empty: give the Scores of at least one method"),
        (one, ValueError, "no input has parts: attribute with by_layer=True"),
        ("scores/a", TypeError, "scores is a str: give a list of Scores"),
        ({1: one, 2: one}, TypeError, r"the names of scores must be texts, not \[1, 2\]"),
        ([one, scores_of(values * 1e150)], ValueError, r"scores are not finite .* than 1e\+100"),
        ([one, values], TypeError, r"scores\[1\] is a ndarray"),
        ([one, scores_of(bad)], ValueError, "6 scores are not finite numbers"),
        ([one, scores_of(values[:, 1:])], ValueError, "about 39 training examples"),
        ([one, scores_of(values, measurement="loss")], ValueError, "measurement='loss'"),
        (
            [one, scores_of(values, provenance=known | {"train": {"train": "other"}})],
            ValueError,
            "scores of different studies: their training data differ",
        ),
        (
            [one, scores_of(values, provenance=known | {"query": "those"})],
            ValueError,
            "scores of different studies: their queries differ",
        ),
        (
            [one, scores_of(values, provenance=known | {"recipe": "b" * 64})],
            ValueError,
            r"another recipe \(aaaaaaaaaaaa…\) than the run that scores\[1\]",
        ),
    ]
    for scores, error, message in cases:
        with pytest.raises(error, match=message):
            combine(scores, truth)
    with pytest.raises(ValueError, match=r"the truth has 4 subsets: .* at least 5"):
        combine([one], truth_of(real, 4))
    with pytest.raises(ValueError, match="bootstrap=10"):
        combine([one], truth, bootstrap=10)
    with pytest.raises(TypeError, match="bootstrap='many' must be a whole number"):
        combine([one], truth, bootstrap="many")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seed=-1 must be a whole number"):
        combine([one], truth, seed=-1)
    with pytest.raises(TypeError, match="parts='layers' must be True or False"):
        combine([one], truth, parts="layers")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="truth is a str: give the Truth that ground_truth"):
        combine([one], "truth/digits")  # type: ignore[arg-type]
    parted = scores_of(values, by_segment=np.stack([values, 0 * values]))
    with pytest.raises(ValueError, match="two inputs are called 'a, segment 1'"):
        combine({"a": parted, "a, segment 1": one}, truth, parts=True)


def test_nothing_can_be_learned() -> None:
    real, values = world(2)
    inputs = [scores_of(one) for one in values]
    constant = truth_of(0 * real, 10, noise=0.0)
    unrelated = truth_of(-real, 10, noise=0.1)
    zero = [scores_of(0 * one) for one in values]
    cases = [
        (inputs, constant, "the measurements are the same for all subsets"),
        (zero, truth_of(real, 10), "the scores predict the same for all subsets"),
        (inputs[:1], unrelated, "real changes do not follow the predicted ones"),
        (inputs, unrelated, "real changes do not follow the predicted ones of any input"),
    ]
    for scores, truth, why in cases:
        with pytest.warns(UserWarning, match=f"nothing can be learned from this truth: {why}"):
            assert combine(scores, truth) is scores[0]


# --- digits, really retrained --------------------------------------------------------------------


def test_digits_are_not_worse_than_the_best_input() -> None:
    """Weights from one truth, judged by another one, of other subsets and seeds: the combination is
    not below its best input beyond the interval of their difference."""
    query = judged.data()[1]
    inputs = {
        "run 100": whence.Source(segments=1).attribute(judged.study(100), query),
        "run 101": whence.Source(segments=1).attribute(judged.study(101), query),
        "TracIn": whence.TracIn().attribute(judged.study(100), query),
    }
    small = ground_truth(
        judged.recipe(), query, 0.5, 60, seeds=range(50, 54), seed=9, progress=False
    )
    result = combine(inputs, small)
    actual = compare({**inputs, "combined": result}, judged.truth())
    best = max(inputs, key=lambda name: actual[name].value)
    assert actual.difference("combined", best).interval[1] > 0
    assert actual["combined"].value > np.mean([actual[name].value for name in inputs])
    assert 0.8 < calibration(result, judged.truth()).slope < 1.25
