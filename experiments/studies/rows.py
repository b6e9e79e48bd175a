"""The numbers of a comparison of forms: how well each one predicts retraining, and how large.

A row has, of one model and of the mean of several: LDS with its interval, the slope of the real on
the predicted changes, and their *spread*, the standard deviation of the predicted over that of the
real changes (1 is the right size). `over` has the paired differences from the published forms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from experiments.studies.sums import Sums
from experiments.tasks import ALL
from experiments.tasks.forms import BASELINES, FORMS, RULE, default_of
from whence.evaluate import LDS, Truth, calibrate, calibration, combine, lds
from whence.evaluate.calibrate import LEAST_SUBSETS
from whence.scores import Scores

RETRAININGS = (10, 20)
Row = dict[str, Any]
Make = Callable[[dict[str, Scores], Truth], Scores]
Baseline = Callable[[str, int], tuple[LDS, LDS | None]]


def rows_of(saved: Sums) -> dict[str, Row]:
    """All rows: the forms, and what a few retrainings make of them."""
    truth = saved.judge()

    @cache
    def judged(name: str, runs: int) -> tuple[LDS, LDS | None]:
        return _judged(saved.scores(name)[:runs], truth)

    rows = {}
    for name, about in saved.forms.items():
        scores = saved.scores(name)
        results = judged(name, len(scores))
        mean = saved.mean(name) if len(scores) > 1 else None
        rows[name] = about | _row(name, scores, mean, results, truth, judged, saved)
    for count in RETRAININGS:
        if LEAST_SUBSETS <= count <= len(saved.small):
            rows |= _after(saved, count, truth, judged)
    return rows


def _after(saved: Sums, count: int, truth: Truth, judged: Baseline) -> dict[str, Row]:
    """The rows of `calibrate` and `combine` from a few retrainings.

    What they make depends on which retrainings they get: a row is the mean over disjoint groups of
    them, and `by_group` has the LDS of each.
    """
    default = default_of(ALL[saved.protocol.task])
    inputs = [
        name
        for name in saved.forms
        if FORMS[name].combined and len(saved.sums[name]) == saved.protocol.runs
    ]
    makers: dict[str, tuple[list[str], Make]] = {}
    if default in saved.forms:
        makers[f"calibrated, {count} retrainings"] = (
            [default],
            lambda given, few: calibrate(given[default], few, exclude_diverged=True),
        )
    if len(inputs) > 1:
        makers[f"combined, {count} retrainings"] = (
            inputs,
            lambda given, few: combine(given, few, exclude_diverged=True),
        )
    rows, groups = {}, saved.retrainings(count)
    for name, (names, make) in makers.items():
        each = {one: saved.scores(one) for one in names}
        runs = len(each[names[0]])
        singles = [
            [make({one: each[one][k] for one in names}, few) for k in range(runs)] for few in groups
        ]
        mean = {one: saved.mean(one) for one in names}
        means = [make(mean, few) for few in groups] if runs > 1 else []
        by_group = [_mean_lds(group, truth) for group in singles]
        results = (
            _mean_lds([one for group in singles for one in group], truth),
            _mean_lds(means, truth) if means else None,
        )
        rows[name] = {
            "inputs": names,
            "rule": RULE,
            "by_group": [result.value for result in by_group],
            "seconds": sum(saved.forms[one]["seconds"] for one in names),
            **_row(name, singles[0], means[0] if means else None, results, truth, judged, saved),
        }
    return rows


def _judged(scores: Sequence[Scores], truth: Truth) -> tuple[LDS, LDS | None]:
    """LDS of one model, and of the scores' mean if there are several."""
    result = _lds(scores, truth)
    return result.single or result, None if result.single is None else result


def _mean_lds(scores: Sequence[Scores], truth: Truth) -> LDS:
    """The mean of their LDS."""
    result = _lds(scores, truth)
    return result.single or result


def _lds(scores: Sequence[Scores], truth: Truth) -> LDS:
    # as arrays, because `combine` may return another input for every run
    return lds([one.values for one in scores], truth, exclude_diverged=True)


def _row(
    name: str,
    scores: Sequence[Scores],
    mean: Scores | None,
    results: tuple[LDS, LDS | None],
    truth: Truth,
    judged: Baseline,
    saved: Sums,
) -> Row:
    row: Row = {"runs": len(scores), "ceiling": results[0].ceiling}
    row["diverged"] = results[0].diverged
    for kind, result, one in zip(("single", "ensemble"), results, (scores[0], mean), strict=True):
        row[kind] = None if result is None else [result.value, *result.interval]
        slope, spread = (None, None) if one is None else _size(one, truth)
        suffix = "" if kind == "single" else ", ensemble"
        row |= {f"slope{suffix}": slope, f"spread{suffix}": spread}
    row["over"] = {}
    paired = FORMS[name].over if name in FORMS else None
    for baseline in BASELINES if paired is None else (*BASELINES, paired):
        if baseline == name or baseline not in saved.forms:
            continue
        theirs = judged(baseline, len(scores))
        gaps = {}
        for kind, mine, other in zip(("single", "ensemble"), results, theirs, strict=True):
            if mine is not None and other is not None:
                gap = mine.minus(other)
                gaps[kind] = [gap.value, *gap.interval]
        row["over"][baseline] = gaps
    return row


def _size(scores: Scores, truth: Truth) -> tuple[float, float]:
    """The slope of the real on the predicted changes, and the spread predicted / real."""
    judged = calibration(scores, truth, exclude_diverged=True, bootstrap=100)
    return judged.slope, float(np.std(judged.predicted) / max(float(np.std(judged.real)), 1e-30))
