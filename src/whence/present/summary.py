"""The overview of scores: what to look at first, as plain data for a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from whence.present.views import Floats, Ints, View, direction, number, strongest
from whence.scores import Scores
from whence.scores.means import mean_scores

if TYPE_CHECKING:
    from whence.retrain import Truth

MOST_CLASSES = 20  # rows and columns of the table of classes
Classes = Callable[[int], str | None]


def summary(
    scores: Scores,
    class_of: Classes,
    query_class: Classes,
    predicted: Sequence[View] = (),
    judgement: Sequence[tuple[str, str]] = (),
    k: int = 12,
) -> View:
    """What to look at first.

    Args:
        class_of: the class of a column's training example, if it has one.
        query_class: the class of a row's query, if it has one.
        predicted: views of queries with their predictions (`describe_query`).
        judgement: by a truth, from `judged`.
        k: number of entries in each list.

    Returns:
        `helpful` and `harmful`: entries with the best and worst mean score over the queries;
        `right`: how many of how many queries are predicted correctly, None if that is not known;
        `measured`: the mean measurement of the queries; `classes`: their `names`, and `means`, the
        mean score of each training class (columns) for each class of queries (rows); `judged`:
        the judgement.
    """
    columns, names = _numbered(class_of, scores.shape[-1])
    rows, _ = _numbered(query_class, scores.shape[0], names)
    means = mean_scores(scores)
    table = _class_means(scores, columns, rows, len(names))
    better = direction(scores)
    view: View = {"queries": scores.shape[0], "examples": scores.shape[-1], "classes": None}
    for end, sign in (("helpful", better), ("harmful", -better)):
        order = strongest(np.nan_to_num(sign * means), k)
        order = order[sign * means[order] > 0]
        view[end] = [{"column": int(c), "value": number(means[c])} for c in order]
    if len(names) > 1 and np.isfinite(table).any():
        view["classes"] = {"names": names, "means": [[number(x) for x in row] for row in table]}
    known = [p for p in predicted if p.get("comparable") and p["label"] is not None]
    view["right"] = (
        [sum(p["prediction"] == p["label"] for p in known), len(known)] if known else None
    )
    measured = [p["measurement"] for p in predicted if p.get("measurement") is not None]
    view["measured"] = number(np.mean(measured)) if measured else None
    view["judged"] = list(judgement)
    return view


def judged(scores: Scores, truth: Truth) -> tuple[Scores, list[tuple[str, str]]]:
    """Judge scores by retraining.

    Returns:
        The scores at the size of real changes (unchanged if they already are, or if the truth
        cannot tell), and (name, text) pairs: how well `scores` predict what retraining does.
    """
    from whence.evaluate import calibrate, calibration, lds
    from whence.table import estimate

    rank, size = lds(scores, truth), calibration(scores, truth)
    ceiling = "" if rank.ceiling is None else f", of at most {rank.ceiling:.2f}"
    sized = scores if "calibration" in scores.diagnostics else calibrate(scores, truth)
    return sized, [
        (
            "rank correlation with retraining (LDS)",
            f"{estimate(rank.value, rank.interval, 2)}{ceiling}",
        ),
        ("real change per predicted change", f"{estimate(size.slope, size.interval, 2)}"),
        ("judged by", f"{rank.subsets} subsets × {rank.seeds} seeds"),
    ]


def _numbered(
    class_of: Classes, count: int, names: list[str] | None = None
) -> tuple[Ints, list[str]]:
    """The number of each class (-1 if it has none), and the names: sorted, numbers by size."""
    given = [class_of(place) for place in range(count)]
    if names is None:
        distinct = {name for name in given if name is not None}
        names = sorted(distinct, key=lambda name: (len(name) if name.isdigit() else 0, name))
        names = names if len(names) <= MOST_CLASSES else []
    numbers = {name: k for k, name in enumerate(names)}
    return np.array([numbers.get(name or "", -1) for name in given], np.int64), names


def _class_means(scores: Scores, columns: Ints, rows: Ints, classes: int) -> Floats:
    """(classes, classes): the mean finite score over the queries of one class and the training
    examples of another."""
    sums, numbers = np.zeros((2, classes, classes))
    for row in np.flatnonzero(rows >= 0):
        values, where = scores.row_scores(int(row))
        known = np.isfinite(values) & (columns[where] >= 0)
        of, values = columns[where[known]], values[known].astype(np.float64)
        sums[rows[row]] += np.bincount(of, values, classes)
        numbers[rows[row]] += np.bincount(of, minlength=classes)
    with np.errstate(invalid="ignore"):
        return np.asarray(sums / numbers)
