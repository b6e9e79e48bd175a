"""Calibration: is the predicted change as large as the real one?

    P[q, j] = Σ_{m ∈ S_j} values[q, m]        T[q, j] = mean measurement over the seeds
    slope   = Σ P T / Σ P²                    both centred per query over the M subsets

Scores predict f(S) up to a constant of the query, so each query's mean over the subsets is taken
off both sides, and the line goes through zero. Axes as in `lds`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from whence.errors import InvalidInput
from whence.evaluate.groups import NUMBERS_PER_BLOCK, ROUNDING, Floats, Given, centred, group
from whence.evaluate.lds import (
    check_bootstrap,
    described,
    left_out,
    middle,
    reliability,
    resamples,
    split,
)
from whence.evaluate.plots import StrPath, plot_calibration
from whence.table import Table, Tabled, estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from whence.retrain import Truth

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True, eq=False, repr=False)
class Calibration(Tabled):
    """Predicted and real differences between subsets.

    The slope is that of the real on the predicted change: 1 is perfect, less than 1 means that
    the scores exaggerate, more that they understate. That is so for methods that predict in the
    measurement's unit (SOURCE, influence functions, unrolling); for scores without such a scale
    (TracIn, TRAK, representation similarity) its size means nothing, only its sign.

    Attributes:
        slope: of all queries and subsets together.
        interval: 95 % percentile bootstrap interval of the slope, over the subsets.
        r2: share of the real variance that the predictions explain, without rescaling; below 0 if
            predicting no change would be closer.
        r2_line: the same after multiplying the predictions by ``slope``.
        ceiling: the share of the real variance that is not noise of the seeds, from their split
            halves: what r2 could reach at most. None with one seed.
        slopes: (q,) each query's own slope; NaN where its predictions are constant.
        predicted, real: (q, M), centred per query.
        method, measurement, unit: whose scores, and what they are about.
        subsets, seeds, alpha, diverged, lost, runs, in_place: as in `LDS`.
    """

    slope: float
    interval: tuple[float, float]
    r2: float
    r2_line: float
    ceiling: float | None
    slopes: Floats
    predicted: Floats
    real: Floats
    method: str
    measurement: str
    unit: str
    subsets: int
    seeds: int
    alpha: float
    diverged: int
    lost: int
    runs: int
    in_place: bool = False

    @property
    def quantiles(self) -> dict[float, float]:
        """Quantiles of the queries' own slopes."""
        levels = np.nanquantile(self.slopes, QUANTILES)
        return {q: float(value) for q, value in zip(QUANTILES, levels, strict=True)}

    def plot(self, *, title: str | None = None, path: StrPath | None = None) -> Figure:
        """Real over predicted changes: `whence.report.plot_calibration`."""
        return plot_calibration(self, title=title, path=path)

    def table(self) -> Table:
        """Slope and R², and what they are based on."""
        runs = "" if self.runs == 1 else f", mean of {self.runs} runs"
        spread = ", ".join(f"{value:.2f} ({q:.0%})" for q, value in self.quantiles.items())
        most = "" if self.ceiling is None else f"; at most {self.ceiling:.3f}, the rest is noise"
        facts = [
            ("slope", f"{estimate(self.slope, self.interval)}  (95 % over subsets; 1 is perfect)"),
            ("by query", spread),
            ("R²", f"{self.r2:.3f} as predicted, {self.r2_line:.3f} along the line{most}"),
            ("measured", f"{self.measurement}, in {self.unit or 'its own unit'}"),
            ("truth", f"{described(self)}, {len(self.real)} queries"),
            *left_out(self),
        ]
        return Table(None, facts, title=f"Calibration of {self.method}{runs}")


def calibration(
    scores: Given | Sequence[Given],
    truth: Truth,
    *,
    bootstrap: int = 1000,
    seed: int = 0,
    exclude_diverged: bool = False,
) -> Calibration:
    """Predicted against real change over the truth's subsets: slope and R².

    Args:
        scores: Scores, a plain array (q, n), or a list of several runs', which are averaged.
        truth: measurements on known subsets.
        bootstrap: number of resamples of the subsets, for the interval of the slope.
        seed: seed of the resamples.
        exclude_diverged: leave out trainings that diverged, instead of raising an error.
    """
    check_bootstrap(bootstrap)
    groups = group(scores, truth, exclude_diverged)
    p, t = centred(groups.predicted.mean(0)), centred(groups.measured)
    pp, pt, tt = (float((x * y).sum()) for x, y in ((p, p), (p, t), (t, t)))
    if pp == 0:
        raise InvalidInput("the scores predict the same for all subsets: there is no slope")
    if tt == 0:
        raise InvalidInput(
            "the truth measures the same for all subsets: there is nothing to predict"
        )
    slope = pt / pp
    squares = (p * p).sum(1)
    random = np.random.default_rng(seed)
    return Calibration(
        slope=slope,
        interval=_interval(p, t, resamples(p.shape[1], bootstrap, random)),
        r2=1 - float(((t - p) ** 2).sum()) / tt,
        r2_line=pt * pt / (pp * tt),
        ceiling=_ceiling(truth, groups.valid, random),
        slopes=np.where(squares > 0, (p * t).sum(1) / np.where(squares > 0, squares, 1.0), np.nan),
        predicted=p,
        real=t,
        method=groups.method,
        measurement=truth.measurement,
        unit=truth.unit,
        subsets=groups.subsets,
        seeds=truth.measurements.shape[1],
        alpha=float(truth.alpha),
        diverged=groups.diverged,
        lost=groups.lost,
        runs=groups.runs,
        in_place=truth.in_place,
    )


def _interval(p: Floats, t: Floats, drawn: NDArray[np.float32]) -> tuple[float, float]:
    """95 % of the slopes of resamples (M, B), each centred by itself: Σ w P T − Σ w P Σ w T / M."""
    queries, subsets = p.shape
    weights = drawn.astype(np.float64)
    pt, pp = (p * t).sum(0) @ weights, (p * p).sum(0) @ weights
    step = max(1, NUMBERS_PER_BLOCK // weights.shape[1])
    for start in range(0, queries, step):
        a, b = p[start : start + step] @ weights, t[start : start + step] @ weights
        pt -= (a * b).sum(0) / subsets
        pp -= (a * a).sum(0) / subsets
    usable = pp > ROUNDING * (p * p).sum()  # a resample of few subsets may contain only one of them
    return middle(pt[usable] / pp[usable])


def _ceiling(truth: Truth, valid: NDArray[np.bool_], random: np.random.Generator) -> float | None:
    """The reliability of the mean over seeds, from halves of them, all queries together."""
    sums = np.zeros(3)
    for halves in split(truth, valid, random):
        a, b = (half - half.mean(0) for half in halves)
        sums += [(a * b).sum(), (a * a).sum(), (b * b).sum()]
    ab, aa, bb = sums
    return reliability(float(ab / np.sqrt(aa * bb)), valid.shape[1]) if aa * bb > 0 else None
