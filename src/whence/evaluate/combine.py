"""Combined scores: a weighted sum of several scores, with weights from a few retrainings.

Axes: ``n`` training examples, ``q`` queries, ``M`` subsets, ``K`` inputs.

    Z_k[q, m] = values_k[q, m] / sd_k[q]       sd_k[q] over the training examples
    X_k[q, j] = Σ_{m ∈ S_j} Z_k[q, m]          (K, q, M), each input scaled to unit mean square
    Y[q, j]   = T[q, j] / sd of T[q]           both centred per query over the subsets

    w(λ) = argmin ‖Y − Σ_k w_k X_k‖² + λ ‖X‖² ‖w − s p‖²,  w ≥ 0     weights shared by all queries

p_k is how often input k alone explains most of Y, over resamples of the subsets, and s the slope of
Y on Σ_k p_k X_k. An input that is clearly the best is the sum that the ridge shrinks towards;
inputs that the truth cannot tell apart share it. λ says how far the truth may move away from it,
and is chosen by cross-validation over subsets. All reported numbers of the combination come from an
outer cross-validation that repeats this choice without the held-out subsets, so that no subset
judges weights, a λ or a slope that it helped to fit.

The weights fix the shape of each query's scores. Their size is that of the inputs,

    size[q]      = Π_k (sd_k[q] / mean_q sd_k)^(|w_k| / Σ|w|)
    values[q, m] = slope · size[q] · Σ_k w_k Z_k[q, m]

with one slope, fitted as in `calibrate` to the held-out predictions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from whence.errors import InvalidInput, InvalidType, flag, optional, whole
from whence.evaluate.calibrate import (
    check_scores,
    check_subsets,
    fit_slope,
    precise,
    scaled,
    warn_unchanged,
)
from whence.evaluate.groups import Floats, centred, group, locate, training_data
from whence.evaluate.lds import check_bootstrap, correlations, middle, recentred, resamples
from whence.scores import Scores

if TYPE_CHECKING:
    from whence.retrain import Truth

RIDGES = (1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0)  # λ, relative to ‖X_k‖²
FOLDS = 10  # of the cross-validation; with fewer subsets, one subset each
RESAMPLES = 200  # of the subsets, for p
EQUAL, RIDGE = "equal-weight sum", "combination"


@dataclass(frozen=True)
class Candidate:
    """One way to predict the truth's subsets, and how well it does.

    Attributes:
        name: an input's name, "equal-weight sum" or "combination".
        weights: (K,) of the standardized inputs.
        predicted: (q, M), held out where anything was fitted.
        lds: cross-validated.
        resampled: (B,) the LDS of resampled subsets.
    """

    name: str
    weights: Floats
    predicted: Floats
    lds: float
    resampled: Floats

    def report(self) -> dict[str, Any]:
        return {"lds": self.lds, "interval": list(middle(self.resampled))}


def combine(
    scores: Scores | Sequence[Scores] | Mapping[str, Scores],
    truth: Truth,
    *,
    parts: bool = False,
    bootstrap: int = 1000,
    seed: int = 0,
    exclude_diverged: bool = False,
) -> Scores:
    """A weighted sum of several scores that predicts the truth better than each of them.

    Weights are not negative, shared by all queries, and fitted by ridge regression, cross-validated
    over the subsets; ten retrainings are enough to start with. The function returns the
    combination, unless its cross-validated LDS is below that of the best input, or of the
    equal-weight sum, beyond the 95 % interval of the difference: then it returns that one. The
    result is calibrated: it is in the measurement's unit, and has ``diagnostics["calibration"]`` as
    `calibrate` stores it.

    ``diagnostics["combination"]`` says which one was ``returned``, with the ``weights`` of the
    standardized inputs and the ``ridge``. It has the LDS with a 95 % interval of all ``inputs``,
    of the ``equal``-weight sum, and (cross-validated) of the ``combined`` scores. ``ahead`` is by
    how much the combination is better than the ``best`` of the others, on the same resamples.

    If the truth cannot determine a slope, this function warns and returns the first input as it is.

    Args:
        scores: Scores (q, n) of several methods, settings or runs, all of the same training data,
            queries and measurement; or a dict of them by name. A single Scores stands for its
            parts.
        truth: measurements on at least 5 subsets, of the recipe that trained the attributed runs.
            Judge the result by another truth.
        parts: also give the segments or layers of each input that has them (``by_segment``,
            ``by_layer``) a weight of their own.
        bootstrap: the number of resamples of the subsets for the intervals.
        seed: seed of all resamples.
        exclude_diverged: leave out trainings that diverged, instead of raising an error.
    """
    check_bootstrap(bootstrap)
    whole("seed", seed, 0)
    inputs = _inputs(scores, truth, flag("parts", parts))
    first = next(iter(inputs.values()))
    groups = [group(entry, truth, exclude_diverged) for entry in inputs.values()]
    measured, subsets = groups[0].measured, groups[0].subsets
    check_subsets(groups[0])
    deviations = np.stack([_deviations(entry, truth) for entry in inputs.values()])  # (K, q)
    scales = np.where(deviations > 0, deviations, 1.0)
    x = centred(np.stack([entry.predicted[0] for entry in groups]) / scales[:, :, None])
    squares = np.sqrt((x**2).mean((1, 2)))  # (K,) to unit mean square
    if not squares.any() or not np.ptp(measured, axis=1).any():
        same = "measurements are" if squares.any() else "scores predict"
        warn_unchanged(f"the {same} the same for all subsets", first)
        return first
    squares[squares == 0] = 1.0
    x /= squares[:, None, None]
    ridge, weights, held_out = _cross_validated(x, measured, seed)
    if not weights.any():
        warn_unchanged("real changes do not follow the predicted ones of any input", first)
        return first
    candidates = _candidates(list(inputs), x, weights, held_out, measured, bootstrap, seed)
    *singles, equal, combined = candidates
    best = max((*singles, equal), key=lambda entry: entry.lds)
    # Picking the best of several is optimistic, held-out predictions are not: the combination is
    # replaced only where it is worse beyond the interval.
    behind = middle(combined.resampled - best.resampled)
    chosen = best if behind[1] < 0 or len(inputs) == 1 else combined
    about = {
        "returned": chosen.name,
        "weights": dict(zip(inputs, chosen.weights.tolist(), strict=True)),
        "ridge": ridge if chosen is combined else None,
        "inputs": {entry.name: entry.report() for entry in singles},
        "equal": equal.report(),
        "combined": combined.report(),
        "best": best.name,
        "ahead": {"lds": combined.lds - best.lds, "interval": list(behind)},
        "subsets": subsets,
    }
    if chosen in singles:
        place = singles.index(chosen)
        source, predicted = list(inputs.values())[place], groups[place].predicted[0]
    else:
        sizes = _sizes(deviations, chosen.weights)
        per_input = chosen.weights[:, None] * sizes / (scales * squares[:, None])  # (K, q)
        source = _sum(inputs.values(), per_input, truth)
        predicted = chosen.predicted * sizes[:, None]
    fit = fit_slope(predicted, groups[0], truth)
    if isinstance(fit, str):
        warn_unchanged(fit, first)
        return first
    result = scaled(source, truth, fit)
    result.diagnostics["combination"] = about
    return result


def _candidates(
    names: list[str],
    x: Floats,
    weights: Floats,
    held_out: Floats,
    measured: Floats,
    bootstrap: int,
    seed: int,
) -> list[Candidate]:
    """Each input, their equal-weight sum, and the combination, judged on the same resamples.

    Args:
        x: (K, q, M) standardized predictions of the inputs.
        weights, held_out: of the combination, (K,), and its held-out predictions, (q, M).
    """
    count = len(names)
    shapes = [*np.eye(count), np.ones(count) / count, weights]
    predictions = [*x, x.mean(0), held_out]
    random = np.random.default_rng(seed)
    per_query, resampled = correlations(measured, np.stack(predictions), bootstrap, random)
    values = per_query[:, ~np.isnan(per_query[0])].mean(1).tolist()
    return [
        Candidate(name, shape, predicted, value, recentred(around, value))
        for name, shape, predicted, value, around in zip(
            [*names, EQUAL, RIDGE], shapes, predictions, values, resampled, strict=True
        )
    ]


def _inputs(
    scores: Scores | Sequence[Scores] | Mapping[str, Scores], truth: Truth, parts: bool
) -> dict[str, Scores]:
    """The inputs by name, after a check that they can be added up."""
    if isinstance(scores, Scores):
        scores, parts = [scores], True
    if isinstance(scores, str) or not isinstance(scores, Sequence | Mapping):
        raise InvalidType(
            f"scores is a {type(scores).__name__}: give a list of Scores, or a dict of them by name"
        )
    given = list(scores.values() if isinstance(scores, Mapping) else scores)
    if not given:
        raise InvalidInput("scores is empty: give the Scores of at least one method")
    for place, item in enumerate(given):
        check_scores(item, truth, f"scores[{place}]")
    names = list(scores) if isinstance(scores, Mapping) else [item.method for item in given]
    if not all(isinstance(name, str) for name in names):
        raise InvalidType(f"the names of scores must be texts, not {names[:3]}")
    if len(set(names)) < len(names):
        names = [f"{name} {place}" for place, name in enumerate(names)]
    _check_same_study(names, given, truth)
    if not parts:
        return dict(zip(names, given, strict=True))
    split = dict(zip(names, given, strict=True))
    for name, item in zip(names, given, strict=True):
        about = {k: v for k, v in item.diagnostics.items() if k in ("runs", "warnings")}
        for part, values in _parts(item):
            label = f"{name}, {part}"
            if label in split:
                raise InvalidInput(f"two inputs are called {label!r}: give other names")
            split[label] = item.with_values(values, diagnostics=about)
    if len(split) == len(given):
        raise InvalidInput(
            "no input has parts: attribute with by_layer=True, or by_segment=True and several "
            "segments; or give a list of several scores and parts=False"
        )
    return split


def _parts(scores: Scores) -> Iterator[tuple[str, NDArray[Any]]]:
    """The segments or layers that they are the sum of, if there are several."""
    if scores.by_segment is not None and len(scores.by_segment) > 1:
        yield from ((f"segment {k}", values) for k, values in enumerate(scores.by_segment, 1))
    if scores.by_layer is not None and len(scores.by_layer) > 1:
        yield from zip(scores.layers, scores.by_layer, strict=True)


def _check_same_study(names: Sequence[str], given: Sequence[Scores], truth: Truth) -> None:
    """Refuse scores of different data. Where a fingerprint is missing, nothing is compared."""
    known: dict[str, tuple[str, Any]] = {}
    for name, item in zip(names, given, strict=True):
        data = training_data(item, truth.stage)
        facts = {"training data": data, "queries": item.provenance.get("query")}
        for what, value in facts.items():
            if not value:
                continue
            other, theirs = known.setdefault(what, (name, value))
            if theirs != value:
                raise InvalidInput(
                    f"{name} and {other} are scores of different studies: their {what} differ; "
                    "combine scores of the same training data and queries"
                )


def _deviations(scores: Scores, truth: Truth) -> Floats:
    """(q,) standard deviation of each query's scores over the training examples."""
    down, across = locate(scores, truth)
    return np.array([np.std(scores.values[row][across], dtype=np.float64) for row in down])


def _sizes(deviations: Floats, weights: Floats) -> Floats:
    """(q,) the geometric mean of the inputs' deviations (K, q), each relative to its mean over the
    queries, weighted by |w|. Inputs that are constant for a query do not count there."""
    present = deviations > 0
    shares = np.abs(weights)[:, None] * present
    totals = shares.sum(0)
    relative = deviations / np.maximum(deviations.mean(1, keepdims=True), np.finfo(float).tiny)
    logs = np.log(np.where(present, relative, 1.0))
    sizes = np.exp((shares * logs).sum(0) / np.where(totals > 0, totals, 1.0))
    return np.where(totals > 0, sizes, 0.0)


def _sum(inputs: Iterable[Scores], weights: Floats, truth: Truth) -> Scores:
    """Σ_k weights[k, q] values_k[q, m], in the truth's order of queries and examples."""
    total: Floats | None = None
    all_scores = list(inputs)
    for scores, per_query in zip(all_scores, weights, strict=True):
        down, across = locate(scores, truth)
        part = per_query[:, None] * scores.values[np.ix_(down, across)]
        total = part if total is None else total + part
    assert total is not None
    first = all_scores[0]
    excluded = {str(part.get("name")): part for scores in all_scores for part in scores.excluded}
    messages = dict.fromkeys(message for scores in all_scores for message in scores.warnings)
    return Scores(
        total.astype(precise(*(scores.values.dtype for scores in all_scores))),
        method="Combination",
        settings={"inputs": list(dict.fromkeys(scores.method for scores in all_scores))},
        measurement=first.measurement,
        unit=truth.unit,
        higher_is_better=first.higher_is_better,
        stage=None if first.stage is None else [truth.stage or first.stage[0]] * total.shape[1],
        diagnostics={"warnings": list(messages)} if messages else None,
        provenance=first.provenance,
        excluded=list(excluded.values()),
    )


def _cross_validated(x: Floats, measured: Floats, seed: int) -> tuple[float, Floats, Floats]:
    """The ridge, the weights (K,) on all subsets, and held-out predictions (q, M)."""
    ridge, weights = _fit(x, measured, seed)
    predicted = np.empty_like(measured)
    for fold in _folds(x.shape[2]):
        _, without = _fit(x[:, :, ~fold], measured[:, ~fold], seed)
        held_out = x[:, :, fold] - x[:, :, ~fold].mean(2, keepdims=True)
        predicted[:, fold] = np.tensordot(without, held_out, 1)
    return ridge, weights, predicted


def _fit(x: Floats, measured: Floats, seed: int) -> tuple[float, Floats]:
    """The ridge with the least held-out error on these subsets, and its weights (K,)."""
    gains = np.zeros(len(RIDGES))  # how much of ‖Y‖² held-out predictions explain
    for fold in _folds(x.shape[2]):
        mean, middle_of = x[:, :, ~fold].mean(2, keepdims=True), measured[:, ~fold].mean(1)
        y = measured[:, ~fold] - middle_of[:, None]
        scale = _per_deviation(y)
        weights = _ridge(x[:, :, ~fold] - mean, scale * y, seed)  # (Λ, K)
        there, along = _moments(
            x[:, :, fold] - mean, scale * (measured[:, fold] - middle_of[:, None])
        )
        gains += 2 * weights @ along - np.einsum("lk,kj,lj->l", weights, there, weights)
    y = centred(measured)
    best = len(RIDGES) - 1 - int(np.argmax(gains[::-1]))  # of equals, the strongest
    return RIDGES[best], _ridge(centred(x), _per_deviation(y) * y, seed)[best]


def _per_deviation(y: Floats) -> Floats:
    """(q, 1) one over the standard deviation of each query; 0 where that is 0."""
    deviation = y.std(1, keepdims=True)
    return np.where(deviation > 0, 1 / np.where(deviation > 0, deviation, 1.0), 0.0)


def _moments(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Σ X Xᵀ (K, K) and Σ X Y (K,) over queries and subsets."""
    flat = x.reshape(len(x), -1)
    return flat @ flat.T, flat @ y.ravel()


def _ridge(x: Floats, y: Floats, seed: int) -> Floats:
    """Weights (Λ, K) ≥ 0 for each of `RIDGES`, shrunk towards s p."""
    with optional("combine needs SciPy", "eval"):
        from scipy.optimize import nnls
    gram, moment = _moments(x, y)
    p, tiny, weights = _shares(x, y, seed), np.finfo(float).tiny, []
    target = max(float(p @ moment), 0.0) / max(float(p @ gram @ p), tiny) * p
    for ridge in RIDGES:
        strength = max(ridge * float(np.trace(gram)) / len(p), tiny)
        root = np.linalg.cholesky(gram + strength * np.eye(len(p)))
        right = np.linalg.solve(root, moment + strength * target)
        weights.append(nnls(root.T, right)[0])  # ‖rootᵀ w − right‖² is the objective
    return np.array(weights)


def _shares(x: Floats, y: Floats, seed: int) -> Floats:
    """p (K,): in which share of resamples of the subsets each input alone explains most of Y."""
    drawn = resamples(x.shape[2], RESAMPLES, np.random.default_rng(seed)).astype(np.float64)
    along, squares = (x * y).sum(1) @ drawn, (x * x).sum(1) @ drawn  # (K, B)
    explained = along / np.sqrt(np.maximum(squares, np.finfo(float).tiny))
    return np.bincount(explained.argmax(0), minlength=len(x)) / RESAMPLES


def _folds(subsets: int) -> Iterator[NDArray[np.bool_]]:
    """Masks (M,) of the subsets that are held out together."""
    number = np.arange(subsets) % min(FOLDS, subsets)
    for fold in range(number.max() + 1):
        yield number == fold
