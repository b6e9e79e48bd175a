"""What if some training examples were missing: predictions of scores, results of retraining.

predicted[q] = −Σ_{m removed} values[q, m]      real[q] = mean over seeds of after − before

Whether a prediction becomes wrong is decided by its lead (`present.predict`), not by the margin: a
margin below 0 means p < 1/2, and with several classes such a prediction may be right. A change of
the margin changes the lead by as much, as long as the other classes keep their shares of 1 - p.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from whence.evaluate.agreement import agreement
from whence.explore.jobs import Job, Outcome
from whence.explore.reading import Floats, Ints
from whence.explore.scored_data import ScoredData, in_columns
from whence.present.views import number
from whence.scores.uncertainty import half_widths

MARGIN = "margin"  # the measurement whose changes are changes of the lead


def predicted(data: ScoredData, name: str, places: Sequence[int] | Ints) -> tuple[Floats, Ints]:
    """The predicted change of every query's measurement without these examples.

    Returns:
        The change (q,), and how many of the scores are unknown (q,): not computed, not kept, or not
        a number. The change is NaN where a score is unknown.
    """
    scores = data.of_queries(name)
    columns = data.columns[name][data.chosen(places)]
    scored = columns[columns >= 0]
    values = in_columns(scores, scored)
    unknown = (len(columns) - len(scored)) + (~np.isfinite(values)).sum(1)
    change = -values.sum(1) + 0.0  # never "-0.0"
    change[unknown > 0] = np.nan
    return change, unknown


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
        top = data.scores(name).strongest
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
        "becomes": _becomes(data, data.measured, change),
        "unknown": unknown.tolist(),
        "note": note,
    }


def judged(data: ScoredData, job: Job, outcome: Outcome, places: Ints) -> dict[str, Any]:
    """Predicted and real change, by all scores of queries."""
    measured, error = outcome.change, outcome.error
    sound = int(outcome.sound.sum())
    sets = {}
    for name in data.sets:
        change, unknown = predicted(data, name, places)
        sets[name] = {
            "change": _list(change),
            "unknown": unknown.tolist(),
            **agreement(change, measured),
        }
    return {
        "real": _list(measured),
        "error": _list(error),
        "baseline": _list(outcome.baseline),
        "seeds": len(job.seeds),
        "sound": sound,
        "becomes": _becomes(data, outcome.baseline, measured),
        "sets": sets,
    }


def _becomes(data: ScoredData, margins: Floats | None, change: Floats) -> list[str | None] | None:
    """ "right" or "wrong" for each query whose prediction turns; None if predictions are unknown.

    Args:
        margins: (q,) of the model whose measurements change.
        change: (q,) of these margins.
    """
    measurement = next(iter(data.sets.values())).measurement
    if measurement != MARGIN or margins is None or data.lead is None or data.measured is None:
        return None
    with np.errstate(invalid="ignore"):
        before = data.lead + margins - data.measured
        after = before + change
        right, wrong = (before < 0) & (after > 0), (before > 0) & (after < 0)
    return ["right" if r else "wrong" if w else None for r, w in zip(right, wrong, strict=True)]


def _list(values: Floats | None) -> list[float | None] | None:
    return None if values is None else [number(x) for x in values]
