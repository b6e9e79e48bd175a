"""The linear datamodeling score: do the scores order retrained subsets as retraining does?

    g[q, j] = Σ_{m ∈ S_j} values[q, m]          what the scores predict for subset j
    LDS     = mean over q of ρ(T[:, q], g[q])   T the mean measurement over R seeds, ρ Spearman's,
                                                over the M subsets (appendix B.2)

Axes: ``n`` training examples, ``q`` queries, ``M`` subsets, ``R`` seeds, ``K`` runs' scores,
``B`` resamples of the subsets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from whence.errors import InvalidInput, MissingKey, optional, whole
from whence.evaluate.groups import Floats, Given, group
from whence.evaluate.plots import StrPath, plot_lds
from whence.retrain.contrast import mean_of_sound
from whence.table import Table, Tabled, estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from whence.retrain import Truth

SPLITS = 10  # random halvings of the seeds for the noise ceiling


@dataclass(frozen=True)
class Difference:
    """One result minus another on the same subsets, or of the same queries.

    Attributes:
        value: the difference.
        interval: 95 %. It is narrower than the intervals of the two results suggest: both share
            their subsets (or queries), so the effect of that choice cancels.
    """

    value: float
    interval: tuple[float, float]

    def __str__(self) -> str:
        return estimate(self.value, self.interval)


@dataclass(frozen=True, eq=False, repr=False)
class LDS(Tabled):
    """A linear datamodeling score.

    Attributes:
        value: mean over the queries of Spearman's rank correlation.
        interval: 95 % bootstrap interval over the subsets: percentiles of the resamples' scores,
            moved by the value minus the resamples' mean.
        per_query: (q,) the correlations; NaN where the measurement is the same for all subsets.
        ceiling: the highest LDS that is possible, because the mean over R seeds is noisy:
            √(2r/(1+r)), with r its split-half correlation over seeds. None with one seed.
        method: the name of the method.
        queries: the number of queries in the mean.
        undefined: queries left out, because their measurement is the same for all subsets.
        unranked: queries whose *predictions* are the same for all subsets: they count as 0.
        subsets, seeds, alpha: M, R and the sampling ratio of the truth.
        diverged: trainings left out because they diverged or are unfinished.
        lost: subsets left out because all of their trainings were.
        runs: the number of runs whose scores were averaged.
        single: for a list of runs, the mean LDS of the runs one by one.
        resampled: (B,) the scores of the resamples, moved as the interval is.
        in_place: whether the truth is of single models, as in `ground_truth(in_place=True)`. Then
            nothing is averaged over seeds, and the ceiling is 1.
    """

    value: float
    interval: tuple[float, float]
    per_query: Floats
    ceiling: float | None
    method: str
    queries: int
    undefined: int
    unranked: int
    subsets: int
    seeds: int
    alpha: float
    diverged: int
    lost: int
    runs: int = 1
    single: LDS | None = None
    resampled: Floats | None = None
    in_place: bool = False

    def minus(self, other: LDS) -> Difference:
        """This score minus another one on the same truth, made with the same `bootstrap` and
        `seed`."""
        mine, theirs = self.resampled, other.resampled
        alike = self._truth() == other._truth()
        if mine is None or theirs is None or len(mine) != len(theirs) or not alike:
            raise InvalidInput(
                f"the LDS of {self.method} and that of {other.method} do not share their "
                "resamples: compute both with the same truth, bootstrap and seed"
            )
        return Difference(self.value - other.value, middle(mine - theirs))

    def _truth(self) -> tuple[object, ...]:
        """What two scores on the same truth have in common."""
        return self.subsets, self.seeds, self.alpha, self.in_place

    def plot(self, *, title: str | None = None, path: StrPath | None = None) -> Figure:
        """A bar with its interval: `plot_lds`."""
        return plot_lds({self.method: self}, title=title, path=path)

    def table(self) -> Table:
        """The score with its interval, and what it is based on."""
        runs = "" if self.runs == 1 else f", mean of {self.runs} runs"
        facts = [("LDS", f"{estimate(self.value, self.interval)}  (95 % over subsets)")]
        if self.single is not None:
            single = estimate(self.single.value, self.single.interval)
            facts.append(("single run", f"{single}  (mean over the runs)"))
        ceiling = "not known: needs two seeds" if self.ceiling is None else f"{self.ceiling:.3f}"
        facts.append(("ceiling", ceiling))
        left = f"; {self.undefined} of constant measurement left out" if self.undefined else ""
        left += f"; {self.unranked} with constant predictions count as 0" if self.unranked else ""
        facts.append(("queries", f"{self.queries}{left}"))
        facts += [("truth", described(self)), *left_out(self)]
        return Table(None, facts, title=f"LDS of {self.method}{runs}")


class Comparison(Tabled, dict[str, LDS]):
    """The LDS of several methods on one truth: a dict that prints as a table, best first."""

    def difference(self, one: str, other: str) -> Difference:
        """How far one method's LDS is above another's, on the same resamples."""
        for name in (one, other):
            if name not in self:
                raise MissingKey(f"no method is called {name!r}: there are {', '.join(self)}")
        return self[one].minus(self[other])

    def plot(self, *, title: str | None = None, path: StrPath | None = None) -> Figure:
        """A bar with its interval for each method: `plot_lds`."""
        return plot_lds(self, title=title, path=path)

    def table(self) -> Table:
        """One row per method; *behind* is the best one's score minus the row's."""
        singles = any(result.single is not None for result in self.values())
        heads = ["method", "LDS [95 %]", "behind [95 %]", *(["single run"] if singles else [])]
        heads += ["ceiling", "queries"]
        rows: list[list[object]] = []
        best = max(self, key=lambda name: self[name].value, default="")
        for name, result in sorted(self.items(), key=lambda item: -item[1].value):
            single = result.single
            cells: list[object] = [name, estimate(result.value, result.interval)]
            cells.append(None if name == best else self.difference(best, name))
            if singles:
                cells.append(None if single is None else estimate(single.value, single.interval))
            cells += [None if result.ceiling is None else f"{result.ceiling:.3f}", result.queries]
            rows.append(cells)
        return Table(heads, rows)


def described(result: Any) -> str:
    """The truth behind a result, in words."""
    size = f"{result.subsets} subsets × {result.seeds} seeds, α = {result.alpha:.4g}"
    return f"{size}; single model: dropped in place" if result.in_place else size


def left_out(result: Any) -> list[tuple[str, str]]:
    """The row of a table about trainings that diverged, if there are any."""
    lost = f" and with them {result.lost} subsets" if result.lost else ""
    return [("left out", f"{result.diverged} diverged trainings{lost}")] if result.diverged else []


def lds(
    scores: Given | Sequence[Given],
    truth: Truth,
    *,
    bootstrap: int = 1000,
    seed: int = 0,
    exclude_diverged: bool = False,
) -> LDS:
    """The linear datamodeling score of ``scores`` (q, n) against really retrained models.

    If the truth is of several single models (`ground_truth(in_place=True, seeds=[...])`), give a
    list of scores, one of each seed's run in the order of ``truth.seeds``. Each is judged by its
    own model, and the LDS is the mean.

    Args:
        scores: a method's Scores, or a plain array (q, n); or a list of them, one for each run:
            then the LDS is that of their mean, and ``.single`` the mean of the runs' LDS.
        truth: measurements on known subsets. If the scores are of several stages, the columns of
            the truth's stage count.
        bootstrap: number of resamples of the subsets, for the interval.
        seed: seed of the resamples, and of the halvings for the ceiling.
        exclude_diverged: leave out trainings that diverged (and subsets whose trainings all did)
            instead of raising an error.
    """
    check_bootstrap(bootstrap)
    if truth.in_place and len(truth.seeds) > 1:
        by_model = {"bootstrap": bootstrap, "seed": seed, "exclude_diverged": exclude_diverged}
        return _of_models(scores, truth, **by_model)
    groups = group(scores, truth, exclude_diverged)
    random = np.random.default_rng(seed)
    several = len(groups.predicted) > 1
    # rows: the ensemble, whose prediction is the mean of the runs', then the runs
    ensemble = [groups.predicted.mean(0)] if several else []
    predicted = np.stack([*ensemble, *groups.predicted])
    per_query, resampled = correlations(groups.measured, predicted, bootstrap, random)
    ceiling = 1.0 if truth.in_place else noise_ceiling(truth, groups.valid, random)
    defined = ~np.isnan(per_query[0])
    flat = np.ptp(predicted, axis=2) == 0

    def result(rows: slice, **more: Any) -> LDS:
        values = per_query[rows].mean(0)
        value = float(values[defined].mean())
        around = recentred(resampled[rows].mean(0), value)
        return LDS(
            value=value,
            interval=middle(around),
            per_query=values,
            ceiling=ceiling,
            method=groups.method,
            queries=int(defined.sum()),
            undefined=int((~defined).sum()),
            unranked=int((flat[rows].all(0) & defined).sum()),
            subsets=groups.subsets,
            seeds=truth.measurements.shape[1],
            alpha=float(truth.alpha),
            diverged=groups.diverged,
            lost=groups.lost,
            resampled=around,
            in_place=truth.in_place,
            **more,
        )

    single = result(slice(1, None)) if several else None
    return result(slice(0, 1), runs=groups.runs, single=single)


def _of_models(scores: Given | Sequence[Given], truth: Truth, **options: Any) -> LDS:
    """The mean LDS of single models, each judged by its own measurements."""
    runs = list(scores) if isinstance(scores, Sequence) else [scores]
    if len(runs) != len(truth.seeds):
        raise InvalidInput(
            f"the truth is of the single models of the seeds {truth.seeds}: give a list of "
            f"{len(truth.seeds)} scores, one of each model's run, not {len(runs)}; or judge one "
            "model by truth.of_seed(seed)"
        )
    results = [
        lds(of_run, truth.of_seed(s), **options)
        for of_run, s in zip(runs, truth.seeds, strict=True)
    ]
    around = [result.resampled for result in results if result.resampled is not None]
    if any(result.lost for result in results) or len(set(map(len, around))) > 1:
        raise InvalidInput(
            "trainings of some of the single models diverged: judge each model by itself, by "
            "truth.of_seed(seed)"
        )
    value = float(np.mean([result.value for result in results]))
    resampled = np.asarray(np.mean(around, axis=0))
    return replace(
        results[0],
        value=value,
        interval=middle(resampled),
        per_query=np.nanmean([result.per_query for result in results], axis=0),
        queries=min(result.queries for result in results),
        undefined=max(result.undefined for result in results),
        unranked=max(result.unranked for result in results),
        seeds=len(results),
        runs=len(results),
        resampled=resampled,
    )


def compare(
    scores_by_method: Mapping[str, Given | Sequence[Given]],
    truth: Truth,
    *,
    bootstrap: int = 1000,
    seed: int = 0,
    exclude_diverged: bool = False,
) -> Comparison:
    """``lds`` of each method, on the same resamples of the subsets."""
    return Comparison(
        {
            name: lds(
                scores, truth, bootstrap=bootstrap, seed=seed, exclude_diverged=exclude_diverged
            )
            for name, scores in scores_by_method.items()
        }
    )


def middle(resampled: Floats) -> tuple[float, float]:
    """The ends of the middle 95 % of resampled values (B,)."""
    low, high = np.percentile(resampled, [2.5, 97.5])
    return float(low), float(high)


def recentred(resampled: Floats, value: float) -> Floats:
    """Resampled scores (B,), moved so that their mean is the score itself.

    Repeated subsets are ties, which lower a resample's correlations by about 1/M.
    """
    return np.asarray(resampled - resampled.mean() + value)


def correlations(
    measured: Floats, predicted: Floats, bootstrap: int, random: np.random.Generator
) -> tuple[Floats, Floats]:
    """Correlations (K, q) of measurements (q, M) with predictions (K, q, M); and their means over
    the queries (K, B) in each resample of the subsets."""
    queries, subsets = measured.shape
    weights = resamples(subsets, bootstrap, random)
    # the first column takes every subset once: the correlation itself
    weights = np.concatenate([np.ones_like(weights[:, :1]), weights], axis=1)
    per_query = np.empty((len(predicted), queries))
    totals, counts = np.zeros((len(predicted), bootstrap)), np.zeros(bootstrap)
    for k in range(queries):
        rank_correlations = spearman(measured[k], predicted[:, k], weights)
        per_query[:, k] = rank_correlations[:, 0]
        totals += np.nan_to_num(rank_correlations[:, 1:])
        counts += ~np.isnan(rank_correlations[0, 1:])  # undefined where the measurement is constant
    if np.isnan(per_query[0]).all():
        raise InvalidInput(
            f"the measurement of each of the {queries} queries is the same for all {subsets} "
            "subsets: nothing can be ranked; see truth.means"
        )
    # with few subsets, a resample may contain only one of them, and has no correlation
    return per_query, totals[:, counts > 0] / counts[counts > 0]


def check_bootstrap(count: int) -> None:
    """The ends of a 95 % interval are the 2.5th and 97.5th percentile of the resamples."""
    if whole("bootstrap", count) < 100:
        raise InvalidInput(f"bootstrap={count}: a 95 % interval needs at least 100 resamples")


def resamples(subsets: int, count: int, random: np.random.Generator) -> NDArray[np.float32]:
    """How often each of the M subsets is drawn in each of B resamples with replacement, (M, B)."""
    drawn = random.multinomial(subsets, np.full(subsets, 1 / subsets), size=count)
    return np.ascontiguousarray(drawn.T, dtype=np.float32)


def spearman(measured: Floats, predicted: Floats, weights: NDArray[np.float32]) -> Floats:
    """Rank correlations (K, B) of one query's measurements (M,) with K predictions (K, M).

    Column b of ``weights`` (M, B) says how often resample b contains each subset. Resamples are
    not sorted: their ranks follow from these counts. NaN where the measurement is constant, 0 where
    only the prediction is.
    """
    u = _ranks(measured, weights)
    wu = weights * u
    uu = np.einsum("mb,mb->b", wu, u).astype(np.float64)
    result = np.empty((len(predicted), weights.shape[1]))
    for row, prediction in zip(result, predicted, strict=True):
        v = _ranks(prediction, weights)
        vv = np.einsum("mb,mb,mb->b", weights, v, v).astype(np.float64)
        uv = np.einsum("mb,mb->b", wu, v).astype(np.float64)
        row[:] = uv / np.sqrt(np.where(vv > 0, uu * vv, 1.0) + (uu == 0))
        row[uu == 0] = np.nan
    return result


def _ranks(x: Floats, weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """Twice the centred mid-ranks (M, B) of ``x`` (M,) where subset j is there weights[j] times.

    With `below` and `upto` the weights of smaller, and of smaller or equal values, the mid-rank is
    (below + upto + 1) / 2 and the mean rank (M + 1) / 2. All are small integers: float32 is exact.
    """
    order = np.argsort(x, kind="stable")
    cumulated = np.zeros((len(x) + 1, weights.shape[1]), np.float32)
    for place, j in enumerate(order):  # row by row: np.cumsum over axis 0 is three times slower
        np.add(cumulated[place], weights[j], out=cumulated[place + 1])
    below, upto = (np.searchsorted(x[order], x, side) for side in ("left", "right"))
    ranks: NDArray[np.float32] = cumulated[below] + cumulated[upto] - np.float32(len(x))
    return ranks


def noise_ceiling(
    truth: Truth, valid: NDArray[np.bool_], random: np.random.Generator
) -> float | None:
    """The highest correlation that anything can have with the mean over seeds: the root of its
    `reliability`, with r the rank correlation of two halves of the seeds. ``valid`` (M, R) are the
    trainings that count."""
    with optional("lds needs SciPy", "eval"):
        from scipy.stats import rankdata
    halves_agree = []
    for halves in split(truth, valid, random):
        u, v = (rankdata(half, axis=0) - (len(half) + 1) / 2 for half in halves)
        lengths = np.linalg.norm(u, axis=0) * np.linalg.norm(v, axis=0)
        varies = lengths > 0
        halves_agree.append((u * v).sum(0)[varies] / lengths[varies])
    together = np.concatenate(halves_agree) if halves_agree else np.empty(0)
    if together.size == 0:
        return None
    return math.sqrt(reliability(float(together.mean()), valid.shape[1]))


def split(
    truth: Truth, valid: NDArray[np.bool_], random: np.random.Generator
) -> Iterator[tuple[Floats, Floats]]:
    """The mean measurements (M, q) of two halves of the seeds, for several random halvings.

    Subsets that have no training in one of the halves are left out. An odd seed is left out too.
    """
    seeds = valid.shape[1]
    half = seeds // 2
    for _ in range(1 if seeds == 2 else SPLITS if half else 0):
        order = random.permutation(seeds)
        first, second = order[:half], order[half : 2 * half]
        both = valid[:, first].any(1) & valid[:, second].any(1)
        if both.sum() < 3:
            continue
        a, b = (np.ix_(both, seeds) for seeds in (first, second))
        yield (
            mean_of_sound(truth.measurements[a], valid[a]),
            mean_of_sound(truth.measurements[b], valid[b]),
        )


def reliability(r: float, seeds: int) -> float:
    """The reliability of the mean over R seeds, if halves of them correlate by r (Spearman and
    Brown): 2r/(1+r), and a little more for an odd R, whose halves are smaller."""
    r, times = max(0.0, r), seeds / (seeds // 2)
    return times * r / (1 + (times - 1) * r)
