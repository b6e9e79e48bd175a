"""calibrate: against closed forms, on simulated truths of known slope, and on real digits."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from scipy.stats import t as student
from sklearn.linear_model import LinearRegression
from support import judged
from support.made import ABOUT, masks_of, scores_of

from whence.evaluate import calibrate, calibration, ground_truth, lds
from whence.retrain import Truth
from whence.scores import Scores, Top, ensemble

M, Q, N = 12, 5, 40
Array = NDArray[np.float64]


def truth_of(measurements: Array, seed: int = 0, **more: Any) -> Truth:
    masks = more.pop("masks", masks_of(len(measurements), N, seed))
    return Truth(masks, measurements, alpha=0.5, **(ABOUT | more))


def simulated(
    values: Array, slope: float, subsets: int, seeds: int, seed: int, noise: float = 3.0
) -> Truth:
    """Real changes are ``slope`` times what ``values`` predict, plus noise of every training that
    the queries share in part."""
    random = np.random.default_rng(seed)
    masks = masks_of(subsets, values.shape[1], seed)
    shape = (subsets, seeds, len(values))
    shared = random.normal(size=(*shape[:2], 1))
    error = noise * (0.6 * shared + 0.8 * random.normal(size=shape))
    return truth_of(slope * (masks @ values.T)[:, None] + error, masks=masks)


@pytest.fixture
def values() -> Array:
    return np.random.default_rng(1).normal(size=(Q, N))


@pytest.fixture
def truth(values: Array) -> Truth:
    return simulated(values, 0.3, M, 2, seed=3, noise=1.0)


def fit(scores: Scores) -> dict[str, Any]:
    actual: dict[str, Any] = scores.diagnostics["calibration"]
    return actual


def changes(values: Array, truth: Truth, rows: Any = slice(None)) -> tuple[Array, Array]:
    """Predicted and real changes (subsets, q) of some of the subsets, centred among them."""
    predicted = np.array([[one[mask].sum() for one in values] for mask in truth.masks[rows]])
    means = truth.means[rows]
    return predicted - predicted.mean(0), means - means.mean(0)


def test_slope_shrinkage_and_interval_by_plain_refits(values: Array, truth: Truth) -> None:
    actual = fit(calibrate(scores_of(values), truth))

    def line(rows: Any) -> float:
        p, t = changes(values, truth, rows)
        model = LinearRegression(fit_intercept=False).fit(p.reshape(-1, 1), t.ravel())
        return float(model.coef_[0])

    without = np.array([line(np.arange(M) != j) for j in range(M)])
    p, t = changes(values, truth)

    def held_out_error(shrinkage: float) -> float:
        return float(((t - shrinkage * without[:, None] * p) ** 2).sum())

    best = minimize_scalar(held_out_error, bounds=(0, 1), method="bounded")
    assert actual["fitted"] == pytest.approx(line(np.arange(M)))
    assert actual["shrinkage"] == pytest.approx(best.x, abs=1e-5)
    assert actual["slope"] == pytest.approx(actual["shrinkage"] * actual["fitted"])
    error = np.sqrt((M - 1) / M * ((without - without.mean()) ** 2).sum())
    assert actual["standard_error"] == pytest.approx(error)
    half = student.ppf(0.975, M - 1) * error
    assert actual["interval"] == pytest.approx([actual["fitted"] - half, actual["fitted"] + half])
    assert actual["spread_ratio"] == pytest.approx(t.std() / p.std())
    assert actual["r2"] == pytest.approx(1 - held_out_error(actual["shrinkage"]) / (t**2).sum())
    assert (actual["subsets"], actual["trainings"], actual["alpha"]) == (M, 2 * M, 0.5)
    assert actual["removals"] == N / 4 and len(actual["truth"]) == 64


def test_everything_that_adds_up_is_scaled(values: Array, truth: Truth) -> None:
    parts = np.stack([0.25 * values, 0.75 * values]).astype(np.float32)
    scores = scores_of(values.astype(np.float32), by_segment=parts, spread=np.abs(values))
    result = calibrate(scores, truth)
    slope = fit(result)["slope"]
    np.testing.assert_allclose(result.values, slope * values, rtol=1e-6)
    np.testing.assert_allclose(result.by_segment, slope * parts, rtol=1e-6)
    np.testing.assert_allclose(result.spread, slope * np.abs(values), rtol=1e-6)
    assert result.values.dtype == np.float32 and result.method == "Source"
    assert "calibration" not in scores.diagnostics  # the input is as it was


def test_the_unit_of_the_scores_does_not_matter(values: Array, truth: Truth) -> None:
    one = calibrate(scores_of(values), truth)
    other = calibrate(scores_of(1000 * values, unit="none: a dot product"), truth)
    np.testing.assert_allclose(other.values, one.values)
    assert (one.unit, other.unit) == ("logits", "logits")
    assert fit(other)["shrinkage"] == pytest.approx(fit(one)["shrinkage"])


@pytest.mark.parametrize(("subsets", "seeds"), [(6, 1), (12, 1), (30, 2)])
def test_the_interval_covers_the_slope(subsets: int, seeds: int) -> None:
    random, covered, errors = np.random.default_rng(0), [], []
    for simulation in range(300):
        values = random.normal(size=(8, N)) * random.uniform(0.5, 2, size=(8, 1))
        truth = simulated(values, 1.0, subsets, seeds, seed=1000 + simulation)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # nothing can be learned from some of them
            result = calibrate(scores_of(values), truth)
        if "calibration" not in result.diagnostics:
            continue
        low, high = fit(result)["interval"]
        covered.append(low <= 1 <= high)
        errors.append(fit(result)["slope"] - 1)
    assert len(covered) > 285
    assert 0.92 <= np.mean(covered) <= 0.985
    assert abs(np.mean(errors)) < 0.25  # shrunken, and little


def test_shrinking_pays_where_little_is_known() -> None:
    """Smaller error of the predicted changes than with the fitted slope."""
    shrunken, fitted = [], []
    for simulation in range(200):
        values = np.random.default_rng(simulation).normal(size=(2, N))
        truth = simulated(values, 0.4, 6, 1, seed=simulation, noise=4.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            actual = calibrate(scores_of(values), truth).diagnostics.get("calibration")
        if actual is not None:
            shrunken.append((actual["slope"] - 0.4) ** 2)
            fitted.append((actual["fitted"] - 0.4) ** 2)
    assert np.mean(shrunken) < 0.8 * np.mean(fitted)


def test_residual_and_noise_of_one_training() -> None:
    random = np.random.default_rng(5)
    values, error = random.normal(size=(3, N)), random.normal(size=(3, N))
    scale = np.array([0.5, 1.0, 2.0])  # of the noise, by query
    masks = masks_of(400, N)
    shared = 0.5 * scale * random.normal(size=(1, 6, 3))  # of a seed, the same for all subsets
    noise = scale * random.normal(size=(400, 6, 3))
    truth = truth_of((masks @ (values + error).T)[:, None] + shared + noise, masks=masks)
    actual = fit(calibrate(scores_of(values), truth))
    spread = ((noise + shared).var(1, ddof=1).mean(0)) ** 0.5
    np.testing.assert_allclose(actual["noise"], spread, rtol=0.03)
    line = actual["slope"]
    unknown = (masks @ ((1 - line) * values + error).T).var(0, ddof=1)
    np.testing.assert_allclose(actual["residual"], np.sqrt(unknown + spread**2), rtol=0.05)
    one = truth_of(truth.measurements[:, :1], masks=masks)
    alone = fit(calibrate(scores_of(values), one))
    assert alone["noise"] is None
    np.testing.assert_allclose(alone["residual"], np.sqrt(unknown + scale**2), rtol=0.1)


# --- what is known of a predicted change ---------------------------------------------------------


def test_the_removal_interval_by_hand(values: Array, truth: Truth, tmp_path: Path) -> None:
    result = calibrate(scores_of(values), truth)
    result.save(tmp_path / "scores")
    result = Scores.load(tmp_path / "scores")
    actual, gone = fit(result), [3, 14, 15, 9]
    effect = result.removal_effect(2, gone)
    assert isinstance(effect, float) and effect == pytest.approx(-result.values[2, gone].sum())
    noise, residual = actual["noise"][2] ** 2, actual["residual"][2] ** 2
    slope = (effect * actual["standard_error"] / actual["slope"]) ** 2
    half = student.ppf(0.975, M - 1) * np.sqrt(slope + noise + (residual - noise) * 4 / (N / 4))
    low, high = result.removal_interval(2, gone)
    assert (low, high) == pytest.approx((effect - half, effect + half))
    one = calibrate(scores_of(values), truth_of(truth.measurements[:, :1], masks=truth.masks))
    low, high = one.removal_interval(0, 7)  # with one seed, noise is all of the residual
    assert high - low >= 2 * fit(one)["quantile"] * fit(one)["residual"][0]


def test_uncalibrated_scores_have_no_removal_interval(values: Array) -> None:
    with pytest.raises(ValueError, match=r"not calibrated.*use whence.evaluate.calibrate"):
        scores_of(values).removal_interval(0, [1])


def test_the_interval_contains_what_retraining_measures() -> None:
    """Groups of several sizes, trained once each, in a world where scores are half right."""
    random = np.random.default_rng(8)
    real = random.normal(size=(20, N))
    values = 5 * (real + random.normal(size=real.shape))
    masks = masks_of(30, N, 4)
    truth = truth_of((masks @ real.T)[:, None] + random.normal(size=(30, 2, 20)), masks=masks)
    result = calibrate(scores_of(values), truth)
    inside = []
    for k in (1, 5, 20):
        for _ in range(40):
            gone = random.permutation(N)[:k]
            change = -real[:, gone].sum(1) + random.normal(size=20)
            limits = [result.removal_interval(q, gone) for q in range(20)]
            inside += [low <= x <= high for x, (low, high) in zip(change, limits, strict=True)]
    assert 0.9 < np.mean(inside) < 0.99


def test_tables_views_and_what_if_show_it(values: Array, truth: Truth) -> None:
    from whence.explore.scored_data import ScoredData
    from whence.explore.whatif import what_if
    from whence.present.views import overview, query_view

    scores = scores_of(values)
    result = calibrate(scores, truth)
    assert f"calibrated   on {M} subsets: real changes were 0.3" in repr(result)
    about = overview(result)
    assert about["calibrated"].startswith(f"calibrated on {M} subsets: real changes were 0.3")
    assert about["notes"] == []  # a fact, not a warning
    assert overview(scores)["calibrated"] is None
    facts = dict(about["diagnostics"])
    assert "calibration · slope" in facts and "calibration · residual" not in facts
    assert query_view(result, 1)["residual"] == pytest.approx(fit(result)["residual"][1], rel=1e-4)
    assert query_view(scores, 1)["residual"] is None
    sets = what_if(ScoredData({"raw": scores, "calibrated": result}), [3, 14])["sets"]
    low, high = result.removal_interval(4, [3, 14])
    assert sets["calibrated"]["within"][4] == pytest.approx((high - low) / 2, rel=1e-4)
    assert sets["raw"]["within"] is None


# --- which queries and examples ------------------------------------------------------------------


def test_columns_of_the_truths_stage(values: Array, truth: Truth) -> None:
    expected = calibrate(scores_of(values), truth)
    random = np.random.default_rng(6)
    order, rows = random.permutation(N), random.permutation(Q)
    staged = scores_of(
        np.concatenate([random.normal(size=(Q, 7)), values[rows][:, order]], 1),
        train_ids=[*range(7), *order],
        query_ids=rows,
        stage=["pretrain"] * 7 + ["finetune"] * N,
    )
    result = calibrate(staged, truth_of(truth.measurements, masks=truth.masks, stage="finetune"))
    np.testing.assert_allclose(result.values, expected.values)
    assert result.stage == ["finetune"] * N
    effect = result.removal_effect(1, [2], stage="finetune")
    assert effect == pytest.approx(expected.removal_effect(1, [2]))
    other = truth_of(truth.measurements, masks=truth.masks, stage="other")
    with pytest.raises(ValueError, match="the truth is about stage 'other', but the scores about"):
        calibrate(staged, other)


def test_diverged_trainings(values: Array, truth: Truth) -> None:
    measurements = truth.measurements.copy()
    measurements[3, 1] = np.nan
    measurements[7] = np.inf
    broken = truth_of(measurements, masks=truth.masks)
    with pytest.raises(ValueError, match="3 of the truth's 24 trainings diverged"):
        calibrate(scores_of(values), broken)
    actual = fit(calibrate(scores_of(values), broken, exclude_diverged=True))
    assert (actual["subsets"], actual["trainings"]) == (M - 1, 2 * M - 3)
    whole = np.arange(M) != 7
    means = np.where(np.isfinite(measurements), measurements, np.nan)[whole]
    again = truth_of(np.nanmean(means, 1)[:, None], masks=truth.masks[whole])
    assert actual["slope"] == pytest.approx(fit(calibrate(scores_of(values), again))["slope"])
    assert np.isfinite(actual["residual"]).all() and np.isfinite(actual["noise"]).all()


# --- bad input -----------------------------------------------------------------------------------


def test_a_truth_of_another_recipe_or_other_queries(values: Array, truth: Truth) -> None:
    scores = scores_of(values, provenance={"recipe": "a" * 64, "query": "these"})
    truth.recipe, truth.query = "b" * 64, "these"
    with pytest.raises(ValueError, match=r"of another recipe \(bbbbbbbbbbbb…\) .* \(aaaaaaaaaaaa…"):
        calibrate(scores, truth)
    truth.recipe, truth.query = "a" * 64, "those"
    with pytest.raises(ValueError, match=r"other queries than the truth .* or their order"):
        calibrate(scores, truth)
    truth.query = "these"
    calibrate(scores, truth)


def top_only() -> Scores:
    entries = np.ones((2, Q, 3))
    top = Top(entries, entries.astype(np.int64))
    return Scores(None, method="Source", top=top, train_ids=np.arange(N), **ABOUT)


V = np.ones((Q, N))


@pytest.mark.parametrize(
    ("scores", "error", "message"),
    [
        (top_only(), ValueError, "keep only each query's top 3 entries"),
        (scores_of(V[0]), ValueError, "self-influence scores .* attribute with query="),
        (scores_of(np.where(np.eye(Q, N), np.nan, V)), ValueError, "5 scores are not finite"),
        (scores_of(V[:, 1:]), ValueError, "about 39 training examples, but the truth about 40"),
        (scores_of(V[1:]), ValueError, "of 4 queries, but the truth of 5"),
        (scores_of(V, measurement="loss"), ValueError, "measurement='loss', the truth"),
        (V, TypeError, "scores is a ndarray: give the Scores"),
        ([scores_of(V)], TypeError, "scores is a list: .* whence.scores.ensemble"),
    ],
)
def test_scores_that_do_not_fit(
    scores: Any, error: type[Exception], message: str, truth: Truth
) -> None:
    with pytest.raises(error, match=message):
        calibrate(scores, truth)


def test_too_few_subsets(values: Array, truth: Truth) -> None:
    few = truth_of(truth.measurements[:4], masks=truth.masks[:4])
    with pytest.raises(ValueError, match=r"the truth has 4 subsets: .* at least 5"):
        calibrate(scores_of(values), few)
    measurements = truth.measurements.copy()
    measurements[:8] = np.nan
    broken = truth_of(measurements, masks=truth.masks)
    with pytest.raises(ValueError, match=r"has 4 subsets \(8 more were left out\)"):
        calibrate(scores_of(values), broken, exclude_diverged=True)


def test_nothing_can_be_learned(values: Array, truth: Truth) -> None:
    """It is said, and the scores come back as they were."""
    constant = truth_of(np.ones((M, 2, Q)), masks=truth.masks)
    single = np.zeros((M, 1, Q))
    noise = np.random.default_rng(4).normal(size=(M, 1, Q))
    cases = [
        (scores_of(values), constant, "the measurements are the same for all subsets"),
        (scores_of(0 * values), truth, "the scores predict the same change for all subsets"),
        (scores_of(-values), truth, r"real changes do not follow the predicted ones \(slope -0.3"),
        (scores_of(values), truth_of(single + noise, masks=truth.masks), "slope"),
    ]
    for scores, nothing, why in cases:
        with pytest.warns(UserWarning, match=f"nothing can be learned from this truth: .*{why}"):
            assert calibrate(scores, nothing) is scores


def test_only_one_subset_differs(truth: Truth) -> None:
    masks = np.repeat(truth.masks[:1], 6, 0)
    masks[2] = ~masks[2]
    values = np.random.default_rng(2).normal(size=(Q, N))
    odd = truth_of(np.repeat((masks @ values.T)[:, None], 2, 1), masks=masks)
    actual = fit(calibrate(scores_of(values), odd))
    assert actual["interval"][0] < 0 < 1 < actual["interval"][1]  # it all depends on that one


# --- digits, really retrained --------------------------------------------------------------------


def test_digits_come_out_at_the_right_size() -> None:
    """A slope from one truth, judged by another one: other subsets, other seeds."""
    import whence

    runs = [
        whence.Source.published(segments=1).attribute(judged.study(seed), judged.data()[1])
        for seed in (100, 101)
    ]
    scores = ensemble(runs)
    small = ground_truth(
        judged.recipe(), judged.data()[1], 0.5, 60, seeds=range(50, 54), seed=9, progress=False
    )
    result, judge = calibrate(scores, small), judged.truth()
    before, after = calibration(scores, judge), calibration(result, judge)
    assert before.slope < 0.5  # exaggerated
    assert 0.8 < after.slope < 1.25
    assert after.r2 > 0 > before.r2
    assert lds(result, judge).value == pytest.approx(lds(scores, judge).value, abs=1e-3)
    actual = fit(result)
    low, high = actual["interval"]
    assert low < before.interval[1] and before.interval[0] < high
    assert actual["truth"] != fit(calibrate(scores, judge))["truth"]
    other = whence.Recipe(
        judged.network,
        whence.Classification(),
        judged.data()[0],
        judged.recipe().stages[0].optimizer,
        32,
        5,
    )
    foreign = ground_truth(other, judged.data()[1], 0.5, 5, seeds=1, progress=False)
    with pytest.raises(ValueError, match="the truth is of another recipe"):
        calibrate(scores, foreign)
