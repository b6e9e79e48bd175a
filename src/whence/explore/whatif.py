"""What if some training examples had not been there: what scores predict, and what retraining says.

predicted[q] = −Σ_{m removed} values[q, m]      real[q] = mean over seeds of after − before
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whence.explore.compare import correlation, mid_ranks
from whence.explore.jobs import Job, Outcome
from whence.explore.reading import Floats, Ints
from whence.explore.state import Explored
from whence.present.views import number, row_of
from whence.scores import Scores

MARGIN = "margin"  # a measurement whose sign says whether the prediction is right


def predicted(explored: Explored, name: str, places: Sequence[int] | Ints) -> tuple[Floats, Ints]:
    """Predicted change (q,) of every query's measurement without these examples, and how many of
    their scores are not known (q,): of another set of examples, not kept, or not a number. Where
    one is not known, neither is the sum: NaN."""
    scores = explored.of_queries(name)
    columns = explored.columns(name)[explored.chosen(places)]
    there = columns[columns >= 0]
    values = _taken(scores, there)
    unknown = (len(columns) - len(there)) + (~np.isfinite(values)).sum(1)
    change = -values.sum(1) + 0.0  # never "-0.0"
    change[unknown > 0] = np.nan
    return change, unknown


def _taken(scores: Scores, columns: Ints) -> Floats:
    """(q, m) the scores in these columns; NaN where they were not kept."""
    if scores.top is None:
        return np.asarray(scores.values[:, columns], np.float64)
    found = np.full((scores.shape[0], len(columns)), np.nan)
    for row in range(len(found)):
        values, kept = row_of(scores, row)  # by column
        where = np.searchsorted(kept, columns)
        here = np.append(kept, -1)[where] == columns
        found[row, here] = values[where[here]]
    return found


def what_if(explored: Explored, places: Sequence[int]) -> dict[str, Any]:
    """The predicted change for every query, by every scores."""
    chosen = explored.chosen(places)
    return {
        "examples": len(chosen),
        "sets": {
            name: {**_prediction(explored, name, chosen), "unit": scores.unit}
            for name, scores in explored.sets.items()
        },
        "measured": _list(explored.measured),
        "measurement": next((s.measurement for s in explored.sets.values()), ""),
    }


def _prediction(explored: Explored, name: str, places: Ints) -> dict[str, Any]:
    change, unknown = predicted(explored, name, places)
    lost = int((unknown > 0).sum())
    note = None
    if lost:
        kept = explored.scores(name).top
        why = (
            "were not scored or are not numbers"
            if kept is None
            else f"are not among the top {kept.kept} that were kept of the query"
        )
        note = (
            f"{lost} of {len(change)} queries have no prediction: scores of ticked examples {why}"
        )
    return {"change": _list(change), "unknown": unknown.tolist(), "note": note}


def judged(explored: Explored, job: Job, outcome: Outcome, places: Ints) -> dict[str, Any]:
    """Predicted beside real change, by every scores of what was measured."""
    real, error = outcome.change, outcome.error
    sound = int(outcome.sound.sum())
    sets = {}
    for name in explored.sets:
        change, unknown = predicted(explored, name, places)
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
        "flipped": _flipped(explored, outcome),
        "sets": sets,
    }


def agreement(change: Floats, real: Floats) -> dict[str, float | None]:
    """How well the predicted change (q,) tells the real one: rank correlation, correlation, and the
    slope through zero, Σ P T / Σ P² (1 is perfect: more means that scores understate)."""
    both = np.isfinite(change) & np.isfinite(real)
    p, t = change[both], real[both]
    pp = float((p * p).sum())
    ranks = correlation(mid_ranks(p), mid_ranks(t)) if len(p) > 2 else None
    return {
        "spearman": ranks,
        "pearson": correlation(p, t),
        "slope": float((p * t).sum()) / pp if pp > 0 else None,
    }


def _flipped(explored: Explored, outcome: Outcome) -> list[int] | None:
    """Rows whose mean margin went from right to wrong; None for other measurements."""
    scores = next(iter(explored.sets.values()))
    if scores.measurement != MARGIN:
        return None
    before = outcome.baseline
    with np.errstate(invalid="ignore"):
        below: NDArray[np.bool_] = (before > 0) & (before + outcome.change < 0)
    return [int(row) for row in np.flatnonzero(below)]


def _list(values: Floats | None) -> list[float | None] | None:
    return None if values is None else [number(x) for x in values]
