"""Calibrated scores: as large as the real changes, with the uncertainty of that size.

Axes: ``n`` training examples, ``q`` queries, ``M`` subsets, ``R`` seeds.

    P[q, j] = Σ_{m ∈ S_j} values[q, m]     T[q, j] = mean measurement over the seeds
                                           both (q, M), centred per query over the subsets
    a_j = Σ_q P[q, j] T[q, j]              b_j = Σ_q P[q, j]²                          (M,)

    fitted     β   = Σ a / Σ b             real change per predicted change, one for all queries
    held out   β₋ⱼ = (Σ a − c a_j) / (Σ b − c b_j),   c = M / (M − 1)
                                           fitted, and centred, without subset j
    shrinkage  s   = Σ_j β₋ⱼ a_j / Σ_j β₋ⱼ² b_j,      limited to [0, 1]
    slope          = s β                   what the scores are multiplied by

s minimizes the held-out error Σ_j ‖T_j − s β₋ⱼ P_j‖²: no subset judges a slope that it helped to
fit. To first order s = 1 − v / β², with v the variance of β over the subsets. That is the
positive-part James-Stein estimator, an empirical-Bayes posterior mean under the prior β ~ N(0, τ²).
The slope shrinks towards 0, not 1: without evidence no change is the prediction with the least
error, and the result does not depend on the unit of the scores (calibrate(3 · scores) equals
calibrate(scores)), so methods without a unit can be calibrated too.

    se²        = (M − 1) / M · Σ_j (β₋ⱼ − mean β₋)²   jackknife over subsets
    interval   = β ± t_{M−1, 0.975} · se
    noise²     = interaction² + seed²      variance of one training over seeds: what a seed does to
                                           one subset, and what it does to all of them alike    (q,)
    unknown²   = Σ_j (T − s β₋ⱼ P)² / (M − 1) − interaction² / R,   at least 0                  (q,)
    residual²  = unknown² + noise²         of one training around its prediction                (q,)
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from whence.errors import InvalidInput, InvalidType, optional, warn
from whence.evaluate.groups import (
    ROUNDING,
    Floats,
    Groups,
    centred,
    check_truth,
    group,
    locate,
)
from whence.persist.identity import sha256_of
from whence.scores import Scores

if TYPE_CHECKING:
    from whence.retrain import Truth

LEAST_SUBSETS = 5  # subsets; a slope from fewer has an interval that says nothing


@dataclass(frozen=True)
class Fit:
    """A slope and its uncertainty, as ``diagnostics["calibration"]`` stores it.

    Attributes:
        slope: what the scores were multiplied by: ``shrinkage`` times ``fitted``.
        fitted: real change per predicted change.
        shrinkage: between 0 (nothing is known) and 1.
        interval: 95 %, of ``fitted``.
        standard_error: of ``fitted``.
        quantile: of Student's t with M − 1 degrees of freedom, for a 95 % interval.
        spread_ratio: standard deviation of the real changes over that of the predicted ones, before
            calibration. 1 is the right size; ``fitted`` is this times the correlation.
        r2: share of the real variance that held-out, calibrated predictions explain.
        residual: (q,) standard deviation of one training around its prediction.
        noise: (q,) standard deviation of one training over seeds; None with one seed.
        removals: n α (1 − α), the number of removed examples that a subset is worth.
        subsets, trainings, alpha: the size of the truth.
        in_place: whether the truth is of a single model; then there is no noise of seeds.
        truth: fingerprint of the truth.
    """

    slope: float
    fitted: float
    shrinkage: float
    interval: tuple[float, float]
    standard_error: float
    quantile: float
    spread_ratio: float
    r2: float
    residual: list[float]
    noise: list[float] | None
    removals: float
    subsets: int
    trainings: int
    alpha: float
    in_place: bool
    truth: str


def calibrate(scores: Scores, truth: Truth, *, exclude_diverged: bool = False) -> Scores:
    """Scores multiplied by one slope, so that predicted changes are as large as real ones.

    The slope is the real change per predicted change on the truth's subsets. It is shared by all
    queries, cross-validated over the subsets and shrunk towards 0 by as much as it is uncertain.
    ``diagnostics["calibration"]`` of the result has the slope with its interval, and each query's
    residual standard deviation. `Scores.removal_interval`, the report and the explorer use them.

    Ten subsets with one seed each are enough for a useful slope. If the truth cannot determine a
    slope (its changes are constant, or the scores do not predict them), this function warns and
    returns ``scores`` unchanged.

    Args:
        scores: a method's Scores (q, n). With several stages, the result has the columns of the
            stage that the truth resampled: the truth says nothing about the others.
        truth: measurements on at least 5 subsets, of the recipe that trained the attributed run.
            Judge the result by another truth.
        exclude_diverged: leave out trainings that diverged, instead of raising an error.
    """
    check_scores(scores, truth)
    groups = group(scores, truth, exclude_diverged)
    check_subsets(groups)
    fit = fit_slope(groups.predicted[0], groups, truth)
    if isinstance(fit, str):
        warn_unchanged(fit, scores)
        return scores
    return scaled(scores, truth, fit)


def check_scores(scores: Any, truth: Truth, name: str = "scores") -> None:
    """Raise unless they are Scores of a run of the truth's recipe."""
    check_truth(truth)
    if not isinstance(scores, Scores):
        raise InvalidType(
            f"{name} is a {type(scores).__name__}: give the Scores that a method's attribute() "
            "returned (for several runs, whence.scores.ensemble of them)"
        )
    recipe = scores.provenance.get("recipe")
    if recipe and truth.recipe and recipe != truth.recipe:
        raise InvalidInput(
            f"the truth is of another recipe ({truth.recipe[:12]}…) than the run that {name} "
            f"attributed ({recipe[:12]}…): sizes differ between recipes; make a truth with the "
            "recipe of the run"
        )


def check_subsets(groups: Groups) -> None:
    """Raise if the truth is too small."""
    if groups.subsets < LEAST_SUBSETS:
        lost = f" ({groups.lost} more were left out)" if groups.lost else ""
        raise InvalidInput(
            f"the truth has {groups.subsets} subsets{lost}: a cross-validated slope needs at least "
            f"{LEAST_SUBSETS}; 10 to 20 are a good start"
        )


def warn_unchanged(reason: str, scores: Scores) -> None:
    """Warn that the scores are returned unchanged."""
    warn(
        f"nothing can be learned from this truth: {reason}. The scores of {scores.method} are "
        "returned unchanged; use more subsets or seeds",
        stacklevel=3,
    )


def fit_slope(predicted: Floats, groups: Groups, truth: Truth) -> Fit | str:
    """The slope of the measured on the predicted changes (q, M); or why there is none."""
    with optional("calibrate needs SciPy", "eval"):
        from scipy.special import stdtrit
    p, t = centred(predicted), centred(groups.measured)
    m = groups.subsets
    a, b, tt = (p * t).sum(0), (p * p).sum(0), float((t * t).sum())
    if b.sum() == 0:
        return "the scores predict the same change for all subsets"
    if tt == 0:
        return "the measurements are the same for all subsets"
    fitted = float(a.sum() / b.sum())
    c = m / (m - 1)
    left = b.sum() - c * b
    known = left > ROUNDING * b.sum()  # without the only subset that differs, there is no slope
    without = np.where(known, (a.sum() - c * a) / np.where(known, left, 1.0), 0.0)  # (M,)
    most = float((without**2 * b).sum())
    shrinkage = float(np.clip((without * a).sum() / most, 0.0, 1.0)) if most > 0 else 0.0
    deviation = float(np.sqrt((m - 1) / m * ((without - without.mean()) ** 2).sum()))
    quantile = float(stdtrit(m - 1, 0.975))
    interval = (fitted - quantile * deviation, fitted + quantile * deviation)
    if fitted <= 0:
        return (
            f"real changes do not follow the predicted ones (slope {fitted:.3g} ± {deviation:.2g})"
        )
    if shrinkage == 0:
        return (
            "on held-out subsets, predicting no change is closer than any scale of the scores "
            f"(slope {fitted:.3g} ± {deviation:.2g})"
        )
    held_out = t - shrinkage * without * p
    variance = (held_out**2).sum(1) / (m - 1)
    noise, interaction = _noise(truth, groups)
    if noise is not None and interaction is not None:
        # a subset's mean is over the trainings that did not diverge
        per_mean = (1 / groups.valid[groups.valid.any(1)].sum(1)).mean()
        variance = np.maximum(variance - interaction * per_mean, 0.0) + noise
    return Fit(
        slope=shrinkage * fitted,
        fitted=fitted,
        shrinkage=shrinkage,
        interval=interval,
        standard_error=deviation,
        quantile=quantile,
        spread_ratio=float(np.sqrt(tt / b.sum())),
        r2=1 - float((held_out**2).sum()) / tt,
        residual=np.sqrt(variance).tolist(),
        noise=None if noise is None else np.sqrt(noise).tolist(),
        removals=truth.masks.shape[1] * float(truth.alpha) * (1 - float(truth.alpha)),
        subsets=m,
        trainings=int(groups.valid.sum()),
        alpha=float(truth.alpha),
        in_place=truth.in_place,
        truth=fingerprint(truth),
    )


def scaled(scores: Scores, truth: Truth, fit: Fit) -> Scores:
    """``scores`` times the slope, with the fit in their diagnostics."""
    down, across = locate(scores, truth)
    place = np.ix_(down, across)

    def times(values: Any) -> Any:
        if values is None:
            return None
        dtype = precise(values.dtype)
        return (fit.slope * values[..., *place].astype(dtype)).astype(dtype)

    return scores.with_values(
        times(scores.values),
        unit=truth.unit,
        query_ids=None,
        train_ids=None,
        stage=None if scores.stage is None else [scores.stage[column] for column in across],
        by_segment=times(scores.by_segment),
        by_layer=times(scores.by_layer),
        spread=times(scores.spread),
        diagnostics=scores.diagnostics | {"calibration": asdict(fit)},
    )


def precise(*dtypes: Any) -> np.dtype[Any]:
    """The dtype of scores that are made of scores of these: float32 or float64, so that another
    size neither overflows nor is rounded to whole numbers."""
    return np.result_type(np.float32, *dtypes)


def fingerprint(truth: Truth) -> str:
    """SHA-256 of a truth's subsets and measurements."""
    arrays = truth.masks, truth.measurements
    about = f"{truth.recipe} {truth.query} {truth.stage}"
    return sha256_of(about, *(part for array in arrays for part in (repr(array.shape), array)))


def _noise(truth: Truth, groups: Groups) -> tuple[Floats | None, Floats | None]:
    """(q,) the variance of one training within its subset, and (q,) the part of it that is not the
    same for all subsets of a seed; None where the seeds are too few."""
    valid = groups.valid[:, :, None]
    repeats, trainings = groups.valid.shape[1], int(groups.valid.sum())
    freedom = trainings - groups.subsets - repeats + 1
    if repeats < 2 or freedom < 1:
        return None, None
    within = np.where(valid, truth.measurements, 0.0)
    means = within.sum(1, keepdims=True) / np.maximum(valid.sum(1, keepdims=True), 1)
    within = np.where(valid, within - means, 0.0)
    shared = within.sum(0, keepdims=True) / np.maximum(valid.sum(0, keepdims=True), 1)
    rest = np.where(valid, within - shared, 0.0)
    interaction = (rest**2).sum((0, 1)) / freedom
    seeds = np.maximum((shared[0] ** 2).sum(0) / (repeats - 1) - interaction / groups.subsets, 0.0)
    return interaction + seeds, interaction
