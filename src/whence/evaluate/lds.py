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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from whence.errors import InvalidInput, MissingDependency, MissingKey
from whence.scores import Scores
from whence.table import Table, Tabled, estimate

if TYPE_CHECKING:
    from whence.retrain import Truth

Floats = NDArray[np.float64]
Given = Scores | NDArray[Any]  # scores, or a plain array (q, n)

AT_ONCE = 2**23  # numbers of a score matrix that are held in float64 at a time
SPLITS = 10  # random halvings of the seeds for the noise ceiling
SAME = 1e-13  # group predictions closer than this, relative to Σ|values|, differ by rounding alone


@dataclass(frozen=True)
class Difference:
    """One result minus another on the same subsets, or of the same queries.

    Attributes:
        value: the difference.
        interval: 95 %. Narrower than the two results' own suggest: what the choice of subsets (or
            of queries) does to both alike cancels.
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
        ceiling: what the mean over R seeds could reach at most, itself being noisy: √(2r/(1+r)), r
            its split-half correlation over seeds. None with one seed.
        method: whose scores.
        queries: how many queries the mean is over.
        undefined: queries left out, because their measurement is the same for all subsets.
        unranked: queries whose *predictions* are the same for all subsets: they count as 0.
        subsets, seeds, alpha: M, R and the sampling ratio of the truth.
        diverged: trainings left out because they diverged or are not done.
        lost: subsets left out because all of their trainings were.
        runs: how many runs' scores were averaged.
        single: for a list of runs, the mean LDS of the runs one by one.
        resampled: (B,) the scores of the resamples, moved as the interval is.
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

    def minus(self, other: LDS) -> Difference:
        """This score minus another one on the same truth, made with the same `bootstrap` and
        `seed`."""
        mine, its = self.resampled, other.resampled
        alike = (self.subsets, self.seeds, self.alpha) == (other.subsets, other.seeds, other.alpha)
        if mine is None or its is None or len(mine) != len(its) or not alike:
            raise InvalidInput(
                f"the LDS of {self.method} and that of {other.method} do not share their "
                "resamples: make both with the same truth, bootstrap and seed"
            )
        return Difference(self.value - other.value, _ends(mine - its))

    def table(self) -> Table:
        """The score with its interval, and all that it stands on."""
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
        truth = f"{self.subsets} subsets × {self.seeds} seeds, α = {self.alpha:.4g}"
        facts.append(("truth", truth))
        if self.diverged:
            lost = f" and with them {self.lost} subsets" if self.lost else ""
            facts.append(("left out", f"{self.diverged} diverged trainings{lost}"))
        return Table(None, facts, title=f"LDS of {self.method}{runs}")


class Comparison(dict[str, LDS]):
    """The LDS of several methods on one truth: a dict that prints as a table, best first."""

    def difference(self, one: str, other: str) -> Difference:
        """How far one method's LDS is above another's, on the same resamples."""
        for name in (one, other):
            if name not in self:
                raise MissingKey(f"no method is called {name!r}: there are {', '.join(self)}")
        return self[one].minus(self[other])

    def table(self) -> Table:
        """One row per method; *behind* is the best one's score minus the row's."""
        singles = any(found.single is not None for found in self.values())
        heads = ["method", "LDS [95 %]", "behind [95 %]", *(["single run"] if singles else [])]
        heads += ["ceiling", "queries"]
        rows: list[list[object]] = []
        best = max(self, key=lambda name: self[name].value, default="")
        for name, found in sorted(self.items(), key=lambda item: -item[1].value):
            single = found.single
            cells: list[object] = [name, estimate(found.value, found.interval)]
            cells.append(None if name == best else self.difference(best, name))
            if singles:
                cells.append(None if single is None else estimate(single.value, single.interval))
            cells += [None if found.ceiling is None else f"{found.ceiling:.3f}", found.queries]
            rows.append(cells)
        return Table(heads, rows)

    def __repr__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def lds(
    scores: Given | Sequence[Given],
    truth: Truth,
    *,
    bootstrap: int = 1000,
    seed: int = 0,
    exclude_diverged: bool = False,
) -> LDS:
    """The linear datamodeling score of ``scores`` (q, n) against really retrained models.

    Args:
        scores: a method's Scores, or a plain array (q, n); or a list of them, one of each run: then
            the LDS is that of their mean, and ``.single`` the mean of their own.
        truth: measurements on known subsets; of scores over several stages, the columns of the
            truth's stage are taken.
        bootstrap: how many resamples of the subsets the interval is made of.
        seed: of the resamples and of the halvings for the ceiling.
        exclude_diverged: leave out trainings that diverged (and subsets of which all did), rather
            than refuse.
    """
    check_bootstrap(bootstrap)
    found = judged(scores, truth, exclude_diverged)
    random = np.random.default_rng(seed)
    several = len(found.predicted) > 1
    # rows: the ensemble, whose prediction is the mean of the runs', then the runs
    ensemble = [found.predicted.mean(0)] if several else []
    predicted = np.stack([*ensemble, *found.predicted])
    per_query, resampled = _correlated(found.measured, predicted, bootstrap, random)
    ceiling = noise_ceiling(truth, found.kept, random)
    defined = ~np.isnan(per_query[0])
    flat = np.ptp(predicted, axis=2) == 0

    def result(rows: slice, **more: Any) -> LDS:
        values, around = per_query[rows].mean(0), resampled[rows].mean(0)
        value = float(values[defined].mean())
        # Repeated subsets are ties, which lower a resample's correlations by about 1/M. The
        # resamples are moved by that much, to be about the value.
        around = around - around.mean() + value
        return LDS(
            value=value,
            interval=_ends(around),
            per_query=values,
            ceiling=ceiling,
            method=found.method,
            queries=int(defined.sum()),
            undefined=int((~defined).sum()),
            unranked=int((flat[rows].all(0) & defined).sum()),
            subsets=found.subsets,
            seeds=truth.measurements.shape[1],
            alpha=float(truth.alpha),
            diverged=found.diverged,
            lost=found.lost,
            resampled=around,
            **more,
        )

    single = result(slice(1, None)) if several else None
    return result(slice(0, 1), runs=found.runs, single=single)


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


def _ends(resampled: Floats) -> tuple[float, float]:
    """Of the middle 95 %."""
    low, high = np.percentile(resampled, [2.5, 97.5])
    return float(low), float(high)


def _correlated(
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
        found = spearman(measured[k], predicted[:, k], weights)
        per_query[:, k] = found[:, 0]
        totals += np.nan_to_num(found[:, 1:])
        counts += ~np.isnan(found[0, 1:])  # undefined where the measurement is constant
    if np.isnan(per_query[0]).all():
        raise InvalidInput(
            f"the measurement of each of the {queries} queries is the same for all {subsets} "
            "subsets: nothing can be ranked; see truth.means"
        )
    # of few subsets, a resample may hold one alone, and then has no correlation
    return per_query, totals[:, counts > 0] / counts[counts > 0]


def check_bootstrap(count: int) -> None:
    """The ends of a 95 % interval are the 2.5th and 97.5th percentile of so many resamples."""
    if count < 100:
        raise InvalidInput(f"bootstrap={count}: a 95 % interval needs at least 100 resamples")


def resamples(subsets: int, count: int, random: np.random.Generator) -> NDArray[np.float32]:
    """How often each of the M subsets is drawn in each of B resamples with replacement, (M, B)."""
    drawn = random.multinomial(subsets, np.full(subsets, 1 / subsets), size=count)
    return np.ascontiguousarray(drawn.T, dtype=np.float32)


def spearman(measured: Floats, predicted: Floats, weights: NDArray[np.float32]) -> Floats:
    """Rank correlations (K, B) of one query's measurements (M,) with K predictions (K, M).

    Column b of ``weights`` (M, B) says how often resample b holds each subset. Nothing is sorted
    anew for a resample: its ranks follow from the multiplicities. NaN where the measurement is
    constant, 0 where only the prediction is.
    """
    u = _ranks(measured, weights)
    wu = weights * u
    uu = np.einsum("mb,mb->b", wu, u).astype(np.float64)
    found = np.empty((len(predicted), weights.shape[1]))
    for row, one in zip(found, predicted, strict=True):
        v = _ranks(one, weights)
        vv = np.einsum("mb,mb,mb->b", weights, v, v).astype(np.float64)
        uv = np.einsum("mb,mb->b", wu, v).astype(np.float64)
        row[:] = uv / np.sqrt(np.where(vv > 0, uu * vv, 1.0) + (uu == 0))
        row[uu == 0] = np.nan
    return found


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
    found: NDArray[np.float32] = cumulated[below] + cumulated[upto] - np.float32(len(x))
    return found


@dataclass(frozen=True)
class Judged:
    """Predictions beside measurements of the same subsets and queries."""

    predicted: Floats  # (K, q, M)
    measured: Floats  # (q, M): mean over the seeds
    kept: NDArray[np.bool_]  # (M of the truth, R): trainings that count
    method: str
    runs: int
    diverged: int
    lost: int

    @property
    def subsets(self) -> int:
        return int(self.measured.shape[1])


def judged(scores: Given | Sequence[Given], truth: Truth, exclude_diverged: bool) -> Judged:
    """Check that scores and truth are about the same, and lay them side by side."""
    runs = list(scores) if isinstance(scores, Sequence) else [scores]
    if not runs:
        raise InvalidInput("scores is an empty list: give the scores of at least one run")
    methods = list(dict.fromkeys(run.method for run in runs if isinstance(run, Scores)))
    if len(methods) > 1:
        raise InvalidInput(
            f"scores is a list of runs, but of several methods ({', '.join(methods)}): give one "
            "method's runs at a time, or a dict of them to compare()"
        )
    kept = np.asarray(np.isfinite(truth.measurements).all(2))
    diverged = int((~kept).sum())
    if diverged and not exclude_diverged:
        raise InvalidInput(
            f"{diverged} of the truth's {kept.size} trainings diverged or are not done: finish "
            "them, or leave them out with exclude_diverged=True"
        )
    whole = kept.any(1)
    if whole.sum() < 3:
        lost = f" ({int((~whole).sum())} more were left out)" if diverged else ""
        raise InvalidInput(
            f"the truth has {int(whole.sum())} subsets{lost}: a correlation over subsets needs at "
            "least 3, and 100 to be worth something"
        )
    measured = truth.means
    if diverged:
        counted = np.where(kept[:, :, None], truth.measurements, 0.0).sum(1)
        measured = counted[whole] / kept[whole].sum(1)[:, None]
    masks = np.asarray(truth.masks[whole].T, dtype=np.float64)  # (n, M)
    return Judged(
        predicted=np.stack([_group_predictions(run, truth, masks) for run in runs]),
        measured=np.ascontiguousarray(measured.T, dtype=np.float64),
        kept=kept,
        method=methods[0] if methods else "an array of scores",
        runs=sum(_runs(run) for run in runs),
        diverged=diverged,
        lost=int((~whole).sum()),
    )


def noise_ceiling(
    truth: Truth, kept: NDArray[np.bool_], random: np.random.Generator
) -> float | None:
    """How well the mean over seeds correlates with the mean over endlessly many, at most: the root
    of its `reliability`, with r the rank correlation of two halves. ``kept`` (M, R) are the
    trainings that count."""
    try:
        from scipy.stats import rankdata
    except ImportError as error:
        raise MissingDependency("lds needs SciPy: pip install 'whence-tda[eval]'") from error
    found = []
    for halves in split(truth, kept, random):
        u, v = (rankdata(half, axis=0) - (len(half) + 1) / 2 for half in halves)
        lengths = np.linalg.norm(u, axis=0) * np.linalg.norm(v, axis=0)
        varies = lengths > 0
        found.append((u * v).sum(0)[varies] / lengths[varies])
    together = np.concatenate(found) if found else np.empty(0)
    if together.size == 0:
        return None
    return math.sqrt(reliability(float(together.mean()), kept.shape[1]))


def split(
    truth: Truth, kept: NDArray[np.bool_], random: np.random.Generator
) -> Iterator[tuple[Floats, Floats]]:
    """The mean measurements (M, q) of two halves of the seeds, for several random halvings.

    Subsets that have no training in one of the halves are left out. An odd seed is left out too.
    """
    seeds = kept.shape[1]
    half = seeds // 2
    for _ in range(1 if seeds == 2 else SPLITS if half else 0):
        order = random.permutation(seeds)
        first, second = order[:half], order[half : 2 * half]
        both = kept[:, first].any(1) & kept[:, second].any(1)
        if both.sum() < 3:
            continue
        means = []
        for one in (first, second):
            place = np.ix_(both, one)
            here = kept[place][:, :, None]
            means.append(np.where(here, truth.measurements[place], 0.0).sum(1) / here.sum(1))
        yield means[0], means[1]


def reliability(r: float, seeds: int) -> float:
    """Of the mean over R seeds, when halves of them correlate by r (Spearman and Brown): 2r/(1+r),
    and a little more for an odd R, whose halves are smaller."""
    r, times = max(0.0, r), seeds / (seeds // 2)
    return times * r / (1 + (times - 1) * r)


def columns(scores: Scores, stage: str | None, examples: int, whose: str) -> NDArray[np.int64]:
    """Where the scores of examples 0 .. n-1 of a stage stand, (n,)."""
    stages = [] if scores.stage is None else list(dict.fromkeys(scores.stage))
    if stage is None and len(stages) > 1:
        raise InvalidInput(
            f"the scores are about the stages {', '.join(stages)}, but {whose} does not say which "
            "of them it is about"
        )
    if stage is not None and stages and stage not in stages:
        raise InvalidInput(
            f"{whose} is about stage {stage!r}, but the scores about {', '.join(stages)}: "
            f"attribute with stage={stage!r}, or without stage="
        )
    found = np.arange(scores.shape[-1])
    if stage is not None and len(stages) > 1:
        found = np.flatnonzero(np.array(scores.stage) == stage)
    if len(found) != examples:
        raise InvalidInput(
            f"the scores are about {len(found)} training examples, but {whose} about {examples}: "
            "they must be of the same training data"
        )
    return found[by_number("train_ids", scores.train_ids[found], whose)]


def by_number(name: str, ids: NDArray[np.int64], whose: str) -> NDArray[np.int64]:
    """Where the ids 0, 1, 2, ... stand."""
    order = np.argsort(ids, kind="stable")
    if not np.array_equal(ids[order], np.arange(len(ids))):
        raise InvalidInput(
            f"the scores' {name} are not 0..{len(ids) - 1}, the numbers that {whose} counts by: "
            "give an array of scores, with rows and columns in that order"
        )
    return order


def _group_predictions(scores: Given, truth: Truth, masks: Floats) -> Floats:
    """g (q, M): sums of scores over the subsets whose ``masks`` are (n, M)."""
    n, queries = masks.shape[0], truth.measurements.shape[2]
    if isinstance(scores, Scores):
        if scores.is_self_influence:
            raise InvalidInput(
                "these are self-influence scores (n,): they say nothing of queries; attribute with "
                "query="
            )
        for name in ("measurement", "higher_is_better"):
            ours, theirs = getattr(scores, name), getattr(truth, name)
            if ours != theirs:
                raise InvalidInput(
                    f"the scores have {name}={ours!r}, the truth {name}={theirs!r}: attribute with "
                    "the task that the truth was measured with"
                )
        asked = scores.provenance.get("query")
        if asked and truth.query and asked != truth.query:
            raise InvalidInput(
                "the scores were made for other queries than the truth (their contents differ, or "
                "their order): attribute the queries that the truth was measured on"
            )
        values: NDArray[Any] = scores.values
        across = columns(scores, truth.stage, n, "the truth")
        down = by_number("query_ids", scores.query_ids, "the truth")
    else:
        values = np.asarray(scores)
        if values.ndim != 2:
            raise InvalidInput(f"an array of scores must be (q, n), not of shape {values.shape}")
        if values.shape[1] != n:
            raise InvalidInput(
                f"the scores are about {values.shape[1]} training examples, but the truth about "
                f"{n}: they must be of the same training data"
            )
        across, down = np.arange(n), np.arange(len(values))
    if len(values) != queries:
        raise InvalidInput(
            f"the scores are of {len(values)} queries, but the truth of {queries}: attribute the "
            "queries that the truth was measured on"
        )
    everything = values.shape[1] == n and np.array_equal(across, np.arange(n))
    predicted = np.empty((queries, masks.shape[1]))
    step = max(1, AT_ONCE // n)
    for start in range(0, queries, step):
        rows = down[start : start + step]
        block = values[rows] if everything else values[rows][:, across]
        block = block.astype(np.float64)
        bad = ~np.isfinite(block)
        if bad.any():
            row = int(bad.any(1).argmax())
            raise InvalidInput(
                f"{int(bad.sum())} scores are not finite numbers, the first of query "
                f"{start + row} and example {int(bad[row].argmax())}: they cannot be judged"
            )
        sums = block @ masks
        flat = np.ptp(sums, axis=1) <= SAME * np.abs(block).sum(1)
        sums[flat] = 0.0
        predicted[start : start + step] = sums
    return predicted


def _runs(scores: Given) -> int:
    """How many runs' scores these are the mean of."""
    return int(scores.diagnostics.get("runs", 1)) if isinstance(scores, Scores) else 1
