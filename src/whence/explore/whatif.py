"""What if some training examples were missing: predictions of scores, results of retraining.

predicted[q] = −Σ_{m removed} values[q, m]      real[q] = mean over seeds of after − before
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whence.evaluate.agreement import agreement
from whence.explore.jobs import Job, Outcome
from whence.explore.reading import Floats, Ints
from whence.explore.scored_data import ScoredData
from whence.present.views import number
from whence.scores import Scores
from whence.scores.uncertainty import half_widths

MARGIN = "margin"  # a measurement that is positive if the prediction is right


def predicted(data: ScoredData, name: str, places: Sequence[int] | Ints) -> tuple[Floats, Ints]:
    """The predicted change of every query's measurement without these examples.

    Returns:
        The change (q,), and how many of the scores are unknown (q,): not computed, not kept, or not
        a number. The change is NaN where a score is unknown.
    """
    scores = data.of_queries(name)
    columns = data.columns(name)[data.chosen(places)]
    scored = columns[columns >= 0]
    values = _in_columns(scores, scored)
    unknown = (len(columns) - len(scored)) + (~np.isfinite(values)).sum(1)
    change = -values.sum(1) + 0.0  # never "-0.0"
    change[unknown > 0] = np.nan
    return change, unknown


def _in_columns(scores: Scores, columns: Ints) -> Floats:
    """(q, m) the scores in these columns; NaN where they were not kept."""
    if scores.top is None:
        return np.asarray(scores.values[:, columns], np.float64)
    result = np.full((scores.shape[0], len(columns)), np.nan)
    for row in range(len(result)):
        values, top_columns = scores.row_scores(row)  # by column
        where = np.searchsorted(top_columns, columns)
        in_top = np.append(top_columns, -1)[where] == columns
        result[row, in_top] = values[where[in_top]]
    return result


def what_if(data: ScoredData, places: Sequence[int]) -> dict[str, Any]:
    """The predicted change of every query, by all scores."""
    chosen = data.chosen(places)
    return {
        "examples": len(chosen),
        "sets": {
            name: {**_prediction(data, name, chosen), "unit": scores.unit}
            for name, scores in data.sets.items()
        },
        "measured": _list(data.measured),
        "measurement": next((s.measurement for s in data.sets.values()), ""),
    }


def _prediction(data: ScoredData, name: str, places: Ints) -> dict[str, Any]:
    change, unknown = predicted(data, name, places)
    lost = int((unknown > 0).sum())
    note = None
    if lost:
        top = data.scores(name).top
        why = (
            "are missing or not numbers"
            if top is None
            else f"are not among the top {top.kept} that were kept per query"
        )
        note = (
            f"{lost} of {len(change)} queries have no prediction: scores of ticked examples {why}"
        )
    calibration = data.scores(name).diagnostics.get("calibration")
    within = None if calibration is None else half_widths(calibration, change, len(places))
    return {
        "change": _list(change),
        "within": _list(within),  # half of the 95 % interval, of calibrated scores
        "unknown": unknown.tolist(),
        "note": note,
    }


def judged(data: ScoredData, job: Job, outcome: Outcome, places: Ints) -> dict[str, Any]:
    """Predicted and real change, by all scores of queries."""
    real, error = outcome.change, outcome.error
    sound = int(outcome.sound.sum())
    sets = {}
    for name in data.sets:
        change, unknown = predicted(data, name, places)
        sets[name] = {
            "change": _list(change),
            "unknown": unknown.tolist(),
            **agreement(change, real),
        }
    return {
        "real": _list(real),
        "error": _list(error),
        "baseline": _list(outcome.baseline),
        "seeds": len(job.seeds),
        "sound": sound,
        "flipped": _flipped(data, outcome),
        "sets": sets,
    }


def _flipped(data: ScoredData, outcome: Outcome) -> list[int] | None:
    """Rows whose mean margin turned from right to wrong; None for other measurements."""
    scores = next(iter(data.sets.values()))
    if scores.measurement != MARGIN:
        return None
    before = outcome.baseline
    with np.errstate(invalid="ignore"):
        below: NDArray[np.bool_] = (before > 0) & (before + outcome.change < 0)
    return [int(row) for row in np.flatnonzero(below)]


def _list(values: Floats | None) -> list[float | None] | None:
    return None if values is None else [number(x) for x in values]
