"""Training examples in the order of their scores: for pandas, CSV files and the terminal."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from whence.errors import InvalidInput, optional
from whence.present.views import Floats, TrainingExamples, direction
from whence.scores import Scores
from whence.scores.means import mean_scores
from whence.study import Study

FORMULA = tuple("=+-@＝＋－＠")  # how a spreadsheet's formula begins, after spaces


def score_column(scores: Scores, query: int | None) -> Floats:
    """(n,) the scores of a query, NaN where they were not kept; without one, `mean_scores`."""
    if query is None:
        return mean_scores(scores)
    values, columns = scores.row_scores(query)
    column = np.full(scores.shape[-1], np.nan)
    column[columns] = values
    return column


def ranked_columns(
    scores: Scores,
    query: int | None = None,
    study: Study | None = None,
    *,
    duplicates: bool = False,
    predicted: bool = False,
    harmful_first: bool = False,
    **display: Any,
) -> dict[str, list[Any]]:
    """The training examples as columns of a table, the most helpful first.

    Args:
        query: whose scores to rank by (default: the mean over all queries).
        study: whose training data has the labels and texts.
        duplicates: whether to find near-duplicates (`whence.present.duplicates`), in time quadratic
            in the number of examples. Needs a study.
        predicted: whether the model predicts the examples. Needs a study.
        harmful_first: whether to begin with the most harmful.
        display: `classes`, `columns`, `tokenizer`: as in `whence.report.write`.

    Returns:
        `example` (training id), `stage` if there are several, `score`; with a study `label`, and
        `content` if the examples have text; `duplicate_of`: the `example` before this one that
        it nearly equals, or None; `prediction` of a classification.
    """
    if (duplicates or predicted) and study is None:
        raise InvalidInput("duplicates and predictions need the training examples: give study=")
    values = score_column(scores, query)
    strength = values if scores.higher_is_better != harmful_first else -values
    order = np.argsort(np.where(np.isnan(strength), np.inf, -strength), kind="stable")
    table: dict[str, list[Any]] = {"example": scores.train_ids[order].tolist()}
    if scores.stage is not None:
        table["stage"] = [scores.stage[c] for c in order]
    table["score"] = values[order].tolist()
    if study is None:
        return table
    examples = TrainingExamples.of_scores(scores, study.train, study, **display)
    cells = [dataset.in_words(index) for dataset, index in map(examples.of, order)]
    table["label"] = [label for label, _ in cells]
    if any(content for _, content in cells):
        table["content"] = [content for _, content in cells]
    if predicted:
        known = examples.predictions(study, order)
        table["prediction"] = [
            known[c]["prediction"] if known[c]["comparable"] else None for c in order.tolist()
        ]
    if duplicates:
        leading = examples.leaders(order.tolist()).tolist()
        table["duplicate_of"] = [
            None if leader == place else table["example"][leader]
            for place, leader in enumerate(leading)
        ]
    return table


def audit_columns(
    scores: Scores, study: Study, duplicates: bool = False, **display: Any
) -> dict[str, list[Any]]:
    """The training examples as columns of a table, the most suspicious first.

    Suspicion is the mean harm to the queries, or self-influence: as in `evaluate.mislabeled`.

    Returns:
        `rank`, then the columns of `ranked_columns` with `suspicion` instead of `score`, and
        `differs`: whether the prediction differs from the label.
    """
    worst = not scores.is_self_influence
    table = ranked_columns(
        scores, None, study, duplicates=duplicates, predicted=True, harmful_first=worst, **display
    )
    sign = direction(scores) * (-1.0 if worst else 1.0)
    table = {
        "rank": list(range(1, scores.shape[-1] + 1)),
        **{("suspicion" if name == "score" else name): cells for name, cells in table.items()},
    }
    table["suspicion"] = [sign * value for value in table["suspicion"]]
    pairs = zip(table["label"], table["prediction"], strict=True)
    table["differs"] = [
        None if prediction is None or not label else label != prediction
        for label, prediction in pairs
    ]
    return table


def ranking(
    scores: Scores, study: Study | None = None, query: int | None = None, **options: Any
) -> Any:
    """`ranked_columns` as a pandas DataFrame."""
    with optional("ranking needs pandas", "pandas"):
        import pandas as pd
    return pd.DataFrame(ranked_columns(scores, query, study, **options))


def csv_lines(rows: Iterable[Sequence[Any]], end: str = "\n") -> str:
    """Rows of a CSV file. A spreadsheet reads no text as a formula; numbers stay numbers."""
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator=end)
    for row in rows:
        writer.writerow([f"'{cell}" if _is_formula(cell) else cell for cell in row])
    return lines.getvalue()


def _is_formula(cell: Any) -> bool:
    if not isinstance(cell, str) or not cell.strip().startswith(FORMULA):
        return False
    try:
        float(cell)  # such as a negative label
    except ValueError:
        return True
    return False
