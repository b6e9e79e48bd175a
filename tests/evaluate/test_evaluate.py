"""LDS, calibration and mislabelled examples, against SciPy, scikit-learn and plain loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import linregress, spearmanr
from sklearn.metrics import average_precision_score, r2_score, roc_auc_score
from support.made import masks_of, scores_of

from whence.evaluate import calibration, compare, lds, mislabeled
from whence.retrain import Truth
from whence.scores import Scores, Top, ensemble

M, R, Q, N = 12, 4, 5, 20
Array = NDArray[np.float64]


def truth_of(measurements: Array, masks: NDArray[np.bool_] | None = None, **more: Any) -> Truth:
    masks = masks_of(len(measurements), N) if masks is None else masks
    about = {"alpha": 0.5, "measurement": "margin", "unit": "logits"} | more
    return Truth(masks, measurements, seeds=np.arange(measurements.shape[1]), **about)


@pytest.fixture
def values() -> Array:
    return np.random.default_rng(1).normal(size=(Q, N))


@pytest.fixture
def truth(values: Array) -> Truth:
    """The scores are half right; rounded, so that there are ties."""
    random = np.random.default_rng(2)
    signal = masks_of(M, N) @ (values + random.normal(size=values.shape)).T
    return truth_of(np.round(signal[:, None] + random.normal(size=(M, R, Q))))


def predictions(values: Array, truth: Truth) -> Array:
    """(M, q), by plain loops."""
    return np.array([[row[mask].sum() for row in values] for mask in truth.masks])


# --- LDS ---------------------------------------------------------------------------------------


def test_lds_is_the_mean_of_scipys_spearman(values: Array, truth: Truth) -> None:
    values = np.round(values)  # ties among the predictions too
    expected = [
        spearmanr(t, p).statistic
        for t, p in zip(truth.means.T, predictions(values, truth).T, strict=True)
    ]
    actual = lds(scores_of(values), truth)
    np.testing.assert_allclose(actual.per_query, expected, rtol=1e-6)
    assert actual.value == pytest.approx(np.mean(expected), rel=1e-6)
    assert lds(values, truth).value == actual.value
    assert (actual.method, actual.queries, actual.subsets, actual.seeds) == ("Source", Q, M, R)
    assert (actual.alpha, actual.runs, actual.single) == (0.5, 1, None)


def resampled(measured: Array, predicted: Array, weights: NDArray[Any]) -> float:
    """Mean over queries of scipy's correlation on a really drawn-out resample."""
    drawn = np.repeat(np.arange(len(weights)), weights.astype(int))
    actual = []
    for t, p in zip(measured[drawn].T, predicted[drawn].T, strict=True):
        if np.ptp(t) > 0:
            actual.append(spearmanr(t, p).statistic if np.ptp(p) > 0 else 0.0)
    return float(np.mean(actual)) if actual else np.nan


@pytest.mark.parametrize("subsets", [M, 3])  # of 3, a resample often holds one subset alone
def test_the_interval_is_that_of_drawn_out_resamples(values: Array, subsets: int) -> None:
    random = np.random.default_rng(3)
    truth = truth_of(np.round(random.normal(size=(subsets, R, Q))))
    values = np.round(values)
    actual = lds(values, truth, bootstrap=150, seed=7)
    drawn = np.random.default_rng(7).multinomial(subsets, [1 / subsets] * subsets, size=150)
    predicted = predictions(values, truth)
    means = np.array([resampled(truth.means, predicted, weights) for weights in drawn])
    means = means[~np.isnan(means)]
    expected = np.percentile(means, [2.5, 97.5]) - means.mean() + actual.value
    np.testing.assert_allclose(actual.interval, expected, atol=1e-6)
    assert actual.interval[0] <= actual.value <= actual.interval[1]


def test_perfect_scores_and_their_opposite(values: Array) -> None:
    truth = truth_of(np.repeat((masks_of(M, N) @ values.T)[:, None], 2, 1))
    best, worst = lds(values, truth), lds(-values, truth)
    assert (best.value, worst.value) == (pytest.approx(1), pytest.approx(-1))
    assert best.ceiling == pytest.approx(1)
    # a constant of the query moves nothing: subsets are of equal size
    assert lds(values + 3.0, truth).value == pytest.approx(1)


def test_a_list_of_runs(values: Array, truth: Truth) -> None:
    random = np.random.default_rng(4)
    runs = [scores_of(values + random.normal(size=values.shape)) for _ in range(3)]
    actual = lds(runs, truth, bootstrap=200, seed=5)
    together = lds(ensemble(runs), truth, bootstrap=200, seed=5)
    assert (actual.runs, together.runs) == (3, 3)
    assert actual.value == pytest.approx(together.value)
    assert actual.interval == pytest.approx(together.interval)
    assert together.single is None and actual.single is not None
    alone = [lds(run, truth, bootstrap=200, seed=5) for run in runs]
    assert actual.single.value == pytest.approx(np.mean([one.value for one in alone]))
    np.testing.assert_allclose(
        actual.single.per_query, np.mean([one.per_query for one in alone], axis=0)
    )
    # each resample's mean over the runs, so the interval is narrower than the widest run's
    assert actual.single.interval[0] < actual.single.value < actual.single.interval[1]
    assert "single run" in repr(actual) and "mean of 3 runs" in repr(actual)


def test_columns_are_found_by_stage_and_id(values: Array, truth: Truth) -> None:
    expected = lds(values, truth).per_query
    random = np.random.default_rng(6)
    order, other = random.permutation(N), random.normal(size=(Q, 7))
    staged = scores_of(
        np.concatenate([other, values[:, order]], 1),
        train_ids=[*range(7), *order],
        stage=["pretrain"] * 7 + ["finetune"] * N,
    )
    of_stage = truth_of(truth.measurements, stage="finetune")
    np.testing.assert_allclose(lds(staged, of_stage).per_query, expected)
    rows = random.permutation(Q)
    shuffled = scores_of(values[rows], query_ids=rows)
    np.testing.assert_allclose(lds(shuffled, truth).per_query, expected)
    one = scores_of(values, stage=["train"] * N)  # one stage needs no name in the truth
    np.testing.assert_allclose(lds(one, truth).per_query, expected)
    with pytest.raises(ValueError, match="about the stages pretrain, finetune, but the truth does"):
        lds(staged, truth)
    with pytest.raises(ValueError, match="the truth is about stage 'other', but the scores about"):
        lds(staged, truth_of(truth.measurements, stage="other"))


def test_blocks_of_rows_change_nothing(
    values: Array, truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    before = lds(values, truth)
    monkeypatch.setattr(sys.modules["whence.evaluate.groups"], "NUMBERS_PER_BLOCK", 1)
    after = lds(values, truth)
    np.testing.assert_allclose(after.per_query, before.per_query)
    assert after.interval == pytest.approx(before.interval)


def test_the_same_seed_gives_the_same_interval(values: Array, truth: Truth) -> None:
    assert lds(values, truth).interval == lds(values, truth).interval
    assert lds(values, truth).interval != lds(values, truth, seed=1).interval


def test_the_ceiling_by_its_formula(values: Array) -> None:
    measurements = np.random.default_rng(8).normal(size=(M, 2, Q)) + np.arange(M)[:, None, None] / 3
    truth = truth_of(measurements)
    r = np.mean([spearmanr(*measurements[:, :, k].T).statistic for k in range(Q)])
    assert lds(values, truth).ceiling == pytest.approx(np.sqrt(2 * r / (1 + r)))
    assert lds(values, truth_of(measurements[:, :1])).ceiling is None
    opposite = np.stack([measurements[:, 0], -2 * measurements[:, 0]], 1)
    assert lds(values, truth_of(opposite)).ceiling == 0.0


@pytest.mark.parametrize("seeds", [3, 8])
def test_the_ceiling_is_what_the_signal_itself_reaches(seeds: int) -> None:
    random = np.random.default_rng(9)
    values = random.normal(size=(60, 40))
    masks = masks_of(100, 40)
    signal = masks @ values.T
    shared = 50 * random.normal(size=(1, seeds, 60))  # what a seed does to all subsets alike
    noise = 4 * random.normal(size=(100, seeds, 60))
    actual = lds(values, truth_of(signal[:, None] + shared + noise, masks))
    assert actual.ceiling == pytest.approx(actual.value, abs=0.03)
    assert 0.4 < actual.value < 0.9


def test_diverged_trainings(values: Array, truth: Truth) -> None:
    measurements = truth.measurements.copy()
    measurements[3, 1] = np.nan
    measurements[5, 2, 0] = np.inf  # one query alone: the training is still not to be trusted
    measurements[7] = np.nan
    broken = truth_of(measurements)
    with pytest.raises(ValueError, match=f"{2 + R} of the truth's {M * R} trainings diverged"):
        lds(values, broken)
    actual = lds(values, broken, exclude_diverged=True)
    assert (actual.diverged, actual.lost, actual.subsets) == (2 + R, 1, M - 1)
    whole = [j for j in range(M) if j != 7]
    means = [
        measurements[j][np.isfinite(measurements[j]).all(1)].mean(0)  # by hand
        for j in whole
    ]
    again = truth_of(np.array(means)[:, None], truth.masks[whole])
    np.testing.assert_allclose(actual.per_query, lds(values, again).per_query)
    assert f"{2 + R} diverged trainings and with them 1 subsets" in repr(actual)
    assert actual.ceiling is not None
    slope = calibration(values, broken, exclude_diverged=True)
    assert (slope.diverged, slope.lost) == (2 + R, 1)
    assert slope.slope == pytest.approx(calibration(values, again).slope)
    measurements[: M - 2] = np.nan
    with pytest.raises(ValueError, match=r"the truth has 2 subsets \(10 more were left out\)"):
        lds(values, truth_of(measurements), exclude_diverged=True)


def test_what_cannot_be_ranked_is_said(values: Array, truth: Truth) -> None:
    measurements = truth.measurements.copy()
    measurements[:, :, 1] = 4.0
    values = values.copy()
    values[2] = 0.1  # the same for every example: any subset of that size sums up to the same
    actual = lds(values, truth_of(measurements))
    assert (actual.undefined, actual.unranked, actual.queries) == (1, 1, Q - 1)
    assert np.isnan(actual.per_query[1]) and actual.per_query[2] == 0
    assert actual.value == pytest.approx(np.nanmean(actual.per_query))
    assert "1 of constant measurement left out" in repr(actual)
    assert "1 with constant predictions count as 0" in repr(actual)
    with pytest.raises(ValueError, match="same for all 12 subsets: nothing can be ranked"):
        lds(values, truth_of(np.ones_like(measurements)))


def test_rounding_is_no_ranking() -> None:
    masks = masks_of(100, 2000)
    truth = truth_of(np.random.default_rng(13).normal(size=(100, 1, 50)), masks)
    same = np.full((50, 2000), 0.1)  # summed up in blocks, subsets differ in the last digit
    actual = lds(same, truth, bootstrap=100)
    assert (actual.unranked, actual.value) == (50, 0.0)


def test_compare(values: Array, truth: Truth) -> None:
    actual = compare({"worse": -values, "better": values, "<runs>": [values, values]}, truth)
    assert actual["better"].interval == lds(values, truth).interval
    text = str(actual)
    assert text.index("better") < text.index("worse")
    assert "| better |" in actual.table().markdown()
    assert "&lt;runs&gt;" in actual._repr_html_() and "<runs>" not in actual._repr_html_()


def test_differences_are_of_the_same_resamples(values: Array, truth: Truth) -> None:
    noise = values + np.random.default_rng(5).normal(size=values.shape) * values.std()
    actual = compare({"better": values, "same": values, "noisy": noise}, truth)
    ahead = actual.difference("better", "noisy")
    assert ahead.value == pytest.approx(actual["better"].value - actual["noisy"].value)
    apart = actual["better"].resampled - actual["noisy"].resampled
    assert ahead.interval == pytest.approx(np.percentile(apart, [2.5, 97.5]))
    back = actual["noisy"].minus(actual["better"])
    assert back.interval == pytest.approx((-ahead.interval[1], -ahead.interval[0]))
    # what a resample does to both alike cancels: narrower than as if they were unrelated
    widths = [np.subtract(*actual[name].interval) ** 2 for name in ("better", "noisy")]
    assert abs(np.subtract(*ahead.interval)) < np.sqrt(sum(widths))
    assert actual.difference("better", "same").interval == (0, 0)
    assert str(ahead) in str(actual)  # in the table, beside the noisy method
    with pytest.raises(KeyError, match="no method is called 'best': there are better, same, noisy"):
        actual.difference("best", "noisy")
    for other in (lds(noise, truth, bootstrap=200), lds(noise, truth_of(truth.measurements[:9]))):
        with pytest.raises(ValueError, match="do not share their resamples"):
            actual["better"].minus(other)


def test_a_method_name_is_escaped_in_html(values: Array, truth: Truth) -> None:
    actual = lds(scores_of(values, method="<script>"), truth)
    assert "<script>" not in actual._repr_html_() and "&lt;script&gt;" in actual._repr_html_()


def top_only() -> Scores:
    kept = np.ones((2, Q, 3))
    about = {"measurement": "margin", "unit": "logits", "higher_is_better": True}
    top = Top(kept, kept.astype(np.int64))
    return Scores(None, method="Source", top=top, train_ids=np.arange(N), **about)


V = np.ones((Q, N))


@pytest.mark.parametrize("judge", [lds, calibration])
@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (top_only(), "keep only each query's top 3 entries"),
        (scores_of(V[0]), "self-influence scores .* attribute with query="),
        (scores_of(V[:, 1:]), "about 19 training examples, but the truth about 20"),
        (V[:, 1:], "about 19 training examples, but the truth about 20"),
        (scores_of(V[1:]), "of 4 queries, but the truth of 5"),
        (V[0], r"must be \(q, n\), not of shape \(20,\)"),
        (
            np.where(np.eye(Q, N), np.nan, V),
            "5 scores are not finite numbers, the first of query 0",
        ),
        (scores_of(V, measurement="loss"), "measurement='loss', the truth measurement='margin'"),
        (scores_of(V, higher_is_better=False), "higher_is_better=False, the truth"),
        (scores_of(V, train_ids=np.arange(N) + 1), "train_ids are not 0..19"),
        (scores_of(V, query_ids=np.arange(Q) + 1), "query_ids are not 0..4"),
        ([], "empty list"),
        ([scores_of(V), scores_of(V, method="TracIn")], "of several methods .Source, TracIn."),
    ],
)
def test_scores_that_do_not_fit_the_truth(
    judge: Any, scores: Any, message: str, truth: Truth
) -> None:
    with pytest.raises(ValueError, match=message):
        judge(scores, truth)


@pytest.mark.parametrize("judge", [lds, calibration])
def test_too_few_subsets_or_resamples(judge: Any, values: Array, truth: Truth) -> None:
    with pytest.raises(ValueError, match=r"the truth has 2 subsets: .* at least 3"):
        judge(values, truth_of(truth.measurements[:2]))
    with pytest.raises(ValueError, match="bootstrap=99: a 95 % interval needs at least 100"):
        judge(values, truth, bootstrap=99)


# --- calibration -------------------------------------------------------------------------------


def test_calibration_against_scipy_and_sklearn(values: Array, truth: Truth) -> None:
    actual = calibration(scores_of(values), truth)
    predicted = predictions(values, truth)
    p, t = predicted - predicted.mean(0), truth.means - truth.means.mean(0)
    line = linregress(p.ravel(), t.ravel())
    assert actual.slope == pytest.approx(line.slope)
    assert line.intercept == pytest.approx(0, abs=1e-12)
    assert actual.r2_line == pytest.approx(line.rvalue**2)
    assert actual.r2 == pytest.approx(r2_score(t.ravel(), p.ravel()))
    expected = [linregress(p[:, k], t[:, k]).slope for k in range(Q)]
    np.testing.assert_allclose(actual.slopes, expected)
    assert actual.quantiles[0.5] == pytest.approx(np.median(expected))
    np.testing.assert_allclose(actual.predicted, p.T)
    np.testing.assert_allclose(actual.real, t.T)


def test_the_interval_of_the_slope(values: Array, truth: Truth) -> None:
    actual = calibration(values, truth, bootstrap=120, seed=3)
    drawn = np.random.default_rng(3).multinomial(M, [1 / M] * M, size=120)
    predicted, slopes = predictions(values, truth), []
    for weights in drawn:
        rows = np.repeat(np.arange(M), weights)
        p, t = (x[rows] - x[rows].mean(0) for x in (predicted, truth.means))
        slopes.append(linregress(p.ravel(), t.ravel()).slope)
    np.testing.assert_allclose(actual.interval, np.percentile(slopes, [2.5, 97.5]))


def test_calibrated_and_exaggerated_scores(values: Array) -> None:
    truth = truth_of(np.repeat((masks_of(M, N) @ values.T)[:, None], 2, 1))
    right, double = calibration(values, truth), calibration([values, 3 * values], truth)
    assert (right.slope, right.r2, right.ceiling) == (pytest.approx(1),) * 3
    assert (double.slope, double.r2_line) == (pytest.approx(0.5), pytest.approx(1))
    assert double.r2 == pytest.approx(0)
    assert "mean of 2 runs" in repr(double) and "1 is perfect" in right._repr_html_()


def test_the_noise_that_limits_r2() -> None:
    """R² of the signal itself is the ceiling; what a seed does to all subsets is no noise."""
    random = np.random.default_rng(10)
    values, masks = random.normal(size=(40, 30)), masks_of(100, 30)
    shared, noise = 9 * random.normal(size=(1, 5, 40)), 5 * random.normal(size=(100, 5, 40))
    measurements = (masks @ values.T)[:, None] + shared + noise
    actual = calibration(values, truth_of(measurements, masks))
    assert actual.ceiling == pytest.approx(actual.r2, abs=0.02)
    assert 0.3 < actual.r2 < 0.8
    assert calibration(values, truth_of(measurements[:, :1], masks)).ceiling is None
    measurements[random.random((100, 5)) < 0.2] = np.nan  # unequal numbers of seeds
    some = calibration(values, truth_of(measurements, masks), exclude_diverged=True)
    assert some.ceiling == pytest.approx(some.r2, abs=0.05)  # what the seeds do is noise now
    assert some.r2 < actual.r2


def test_nothing_to_calibrate(values: Array, truth: Truth) -> None:
    with pytest.raises(ValueError, match="predict the same for all subsets: there is no slope"):
        calibration(np.zeros_like(values), truth)
    with pytest.raises(ValueError, match="measures the same for all subsets"):
        calibration(values, truth_of(np.ones((M, R, Q))))


# --- mislabelled examples ----------------------------------------------------------------------


@pytest.mark.parametrize("digits", [6, 0])  # without ties, and with many
def test_mislabeled_against_sklearn(digits: int) -> None:
    random = np.random.default_rng(11)
    flipped = random.random(200) < 0.2
    suspicion = np.round(random.normal(size=200) + flipped, digits)
    actual = mislabeled(suspicion, flipped)
    assert actual.roc_auc == pytest.approx(roc_auc_score(flipped, suspicion))
    assert actual.average_precision == pytest.approx(average_precision_score(flipped, suspicion))
    # the curve is the mean over all orders of equal suspicion
    curves = []
    for _ in range(1 if digits else 4000):
        order = np.lexsort((random.random(200), -suspicion))
        curves.append(np.append(0, np.cumsum(flipped[order])) / flipped.sum())
    np.testing.assert_allclose(actual.found, np.mean(curves, 0), atol=1e-12 if digits else 0.01)
    assert actual.found_after(0.5) == pytest.approx(actual.found[100])
    assert mislabeled(suspicion, np.flatnonzero(flipped)).roc_auc == actual.roc_auc


@pytest.mark.parametrize("better_high", [True, False])
def test_what_is_suspicious(better_high: bool) -> None:
    flipped = np.arange(20) < 4
    sign = 1.0 if better_high else -1.0
    about: Any = {"higher_is_better": better_high}
    selves = sign * (np.linspace(0, 1, 20) + 5 * flipped)  # it did much for its own measurement
    assert mislabeled(scores_of(selves, **about), flipped).roc_auc == 1
    harm = np.random.default_rng(12).normal(size=(3, 20)) - sign * 20 * flipped
    actual = mislabeled(scores_of(harm, **about), flipped)
    assert actual.roc_auc == actual.average_precision == 1
    assert actual.found_after(0.2) == 1 and "mean harm" in repr(actual)
    assert "Source, self-influence" in mislabeled(scores_of(selves, **about), flipped)._repr_html_()


def test_mislabeled_of_one_stage() -> None:
    values = np.array([9.0, 9, 1, 2, 3])
    staged = scores_of(values, train_ids=[0, 1, 0, 1, 2], stage=["a"] * 2 + ["b"] * 3)
    assert mislabeled(staged, [2], stage="b").roc_auc == 1
    with pytest.raises(ValueError, match="the stages a, b: say which with stage="):
        mislabeled(staged, [2])
    with pytest.raises(ValueError, match="about stage 'c', but the scores about a, b"):
        mislabeled(staged, [2], stage="c")


@pytest.mark.parametrize(
    ("suspicion", "flipped", "message"),
    [
        (np.arange(4.0), [True, False], r"mask of shape \(2,\), but there are 4 examples"),
        (np.arange(4.0), [4], "examples from 4 to 4, but there are 4"),
        (np.arange(4.0), [-1, 2], "examples from -1 to 2"),
        (np.arange(4.0), [0, 1, 0, 1], r"more than once.*a mask of 0 and 1 must be of booleans"),
        (np.arange(4.0), [0.5], "flipped is float64"),
        (np.arange(4.0), [False] * 4, "no example is flipped"),
        (np.arange(4.0), [], "no example is flipped"),
        (np.arange(4.0), [True] * 4, "all examples are flipped"),
        (np.array([0, np.nan, 1, 2]), [0], "1 examples have a suspicion that is not a finite"),
        (np.ones((2, 4)), [0], r"must be \(n,\), not of shape \(2, 4\)"),
    ],
)
def test_mislabeled_bad_input(suspicion: Any, flipped: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mislabeled(suspicion, flipped)
    with pytest.raises(ValueError, match="keep only each query's top"):
        mislabeled(top_only(), [0])


def test_a_share_outside_the_data() -> None:
    with pytest.raises(ValueError, match="share=2: it must be between 0 and 1"):
        mislabeled(np.arange(4.0), [0]).found_after(2)


def test_scores_of_other_queries_are_refused(values: Array, truth: Truth) -> None:
    """By what the queries hold, where scores and truth know it."""
    scores = scores_of(values)
    scores.provenance["query"] = "these"
    truth.query = "those"
    with pytest.raises(ValueError, match="other queries than the truth"):
        lds(scores, truth)
    truth.query = "these"
    lds(scores, truth)
