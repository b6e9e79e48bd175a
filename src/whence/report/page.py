"""The report: one HTML file that opens from disk and needs no network.

It contains scores and examples as JSON, and inline styles and scripts that are allowed by their
hashes. The Content-Security-Policy forbids anything else to load or run.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

import whence
from whence.data import Collate
from whence.engine.tokens import Tokens
from whence.errors import InvalidInput, MissingFile
from whence.persist.files import as_path, write_bytes
from whence.present.check import by_stage, check_data
from whence.present.examples import QUERY_SIZE, Examples, Renderer
from whence.present.predict import curves, predictions
from whence.present.summary import judged, summary
from whence.present.views import (
    TrainingExamples,
    View,
    describe_query,
    fold_query,
    folded,
    harmful_overall,
    number,
    overview,
    query_view,
)
from whence.retrain import Truth
from whence.scores import Scores
from whence.study import Study

QUERIES = 1000  # shown by default
WORST = 50  # entries of the list over all queries
AUDITED = 200  # entries of the audit list
FRAME = 760  # pixels, the height in a notebook
BUDGET = 16 * 2**20  # characters of training examples in one file


class ReportPath(type(Path())):  # type: ignore[misc]
    """The path of a report, which a notebook shows as the page."""

    def _repr_html_(self) -> str:
        address = html.escape(quote(os.path.relpath(self)))
        return (
            f'<iframe src="{address}" width="100%" height="{FRAME}" style="border:1px solid #ccc" '
            f'title="report"></iframe><p><a href="{address}" target="_blank">{address}</a></p>'
        )


def write(
    scores: Scores,
    path: str | os.PathLike[str],
    *,
    train: Any = None,
    query: Any = None,
    study: Study | None = None,
    queries: Sequence[int] | None = None,
    k: int = 10,
    labels: Any = None,
    classes: Sequence[str] | Mapping[int, str] | None = None,
    columns: Sequence[str] | None = None,
    tokenizer: Any = None,
    renderer: Renderer | None = None,
    tokens: Iterable[Tokens] | None = None,
    truth: Truth | None = None,
    title: str | None = None,
    collate: Collate | None = None,
    check: bool = True,
) -> Path:
    """Write one HTML file that shows who helped and who harmed each query.

    The file opens from disk and needs no network. Images, texts and rows of tables are recognised;
    anything else needs a `renderer`.

    Args:
        scores: what to show.
        path: the file.
        train: the training data, or `{stage: dataset}` (default: the study's). Without it, examples
            are shown by their index.
        query: the queries.
        study: predicts and measures the queries with its final checkpoint.
        queries: rows to show (default: the first 1,000).
        k: number of examples at each end.
        labels: of the training examples, instead of those in `train`; or `{stage: labels}`.
        classes: names of the classes, by number.
        columns: names of the features of tabular data.
        tokenizer: decodes token ids.
        renderer: turns an example into what to show: text, an array, a mapping, or
            `whence.report.HTML`.
        tokens: what `method.tokens(study, query, examples)` returned; colours the tokens of these
            examples.
        truth: judges the scores on the first page, and gives them the size of real changes
            (`whence.evaluate.calibrate`).
        title: of the page.
        collate: the study's collate function, if `study` is not given: the data is checked as
            batches.
        check: whether to compare `train` and `query` with the data that the scores were computed
            from, in content and order. False compares only lengths, and the page says so.

    Returns:
        The path.
    """
    path = as_path(path)
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else f"cannot be written: no folder {path.parent}"
        raise MissingFile(f"{path} {what}: give a file in a folder that exists")
    train = study.train if train is None and study is not None else train
    collate = study.collate if collate is None and study is not None else collate
    notes = check_data(scores, train, query, collate=collate, contents=check)
    _check_study(scores, study)
    judgement: list[tuple[str, str]] = []
    if truth is not None:
        scores, judgement = judged(scores, truth)
    display: dict[str, Any] = {"renderer": renderer, "classes": classes}
    display |= {"columns": columns, "tokenizer": tokenizer}
    examples = TrainingExamples.of_scores(scores, train, study, labels=labels, **display)
    task = None if study is None else study.tasks[study.stages[-1]]
    query_examples = Examples(query, size=QUERY_SIZE, task=task, **display)
    payload: View = {"title": title or "Where it comes from", "queries": [], "harmful": None}
    if scores.is_self_influence:
        if queries is not None:
            raise InvalidInput(
                f"queries={list(queries)!r}, but self-influence has none: leave it out"
            )
        payload["audit"] = query_view(scores, None, max(k, AUDITED), examples.class_of)
        lists = [payload["audit"]["helpful"]]
    else:
        rows = _rows(scores, queries, notes)
        predicted = _predictions(scores, study, query, rows, notes)
        views = (query_view(scores, row, k, examples.class_of) for row in rows)
        payload["queries"] = [
            describe_query(
                fold_query(view, examples.leaders), query_examples, predicted.get(view["id"])
            )
            for view in views
        ]
        if study is not None and predicted and scores.by_segment is not None:
            steps, measured = curves(study, query, [view["id"] for view in payload["queries"]])
            for view, values in zip(payload["queries"], measured.T, strict=True):
                view["curve"] = [[step, number(x)] for step, x in zip(steps, values, strict=True)]
        payload["harmful"] = harmful_overall(scores, WORST, k)
        classed = query_examples.names_classes
        payload["summary"] = summary(
            scores,
            examples.class_of,
            lambda row: query_examples.label(int(scores.query_ids[row])) if classed else None,
            payload["queries"],
            judgement,
        )
        for end in ("helpful", "harmful"):
            payload["summary"][end] = folded(payload["summary"][end], examples.leaders)
        lists = [payload["harmful"]["entries"]]
        lists += [payload["summary"][end] for end in ("helpful", "harmful")]
        lists += [view[end] for view in payload["queries"] for end in ("helpful", "harmful")]
    positions = _positions(scores, tokens, payload["queries"])
    embedded, ids = _embed(examples, lists, positions, scores, notes)
    if study is not None:
        shown = [e["column"] for e in lists[0] if e["column"] in embedded]
        read = by_stage(scores, study.train)
        for column, predicted_view in examples.predictions(study, shown, read).items():
            embedded[column] |= predicted_view  # so that wrong labels stand out
    if train is None:
        notes.append("No training data was given: examples are shown by their index.")
    payload["overview"] = overview(scores, notes)
    page = render(payload, {"examples": embedded, "ids": ids})
    write_bytes(path, page.encode("utf-8", "replace"))  # lone surrogates
    return ReportPath(path)


def render(payload: View, examples: View) -> str:
    """The page as text."""
    shared, static = files("whence.present") / "static", files("whence.report") / "static"
    style = (shared / "whence.css").read_text("utf-8")
    scripts = [path.read_text("utf-8") for path in (shared / "views.js", static / "report.js")]
    custom = any(example["kind"] == "custom" for example in examples["examples"].values()) or any(
        view["query"]["kind"] == "custom" for view in payload["queries"]
    )
    policy = [
        "default-src 'none'",
        f"script-src {' '.join(map(_hash, scripts))}",
        f"style-src {_hash(style)}",
        # a renderer's HTML may carry style attributes; nothing else may
        *(["style-src-attr 'unsafe-inline'"] if custom else []),
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{"; ".join(policy)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta name="generator" content="whence {whence.__version__}">',
            f"<title>{html.escape(payload['title'])}</title>",
            '<link rel="icon" href="data:,">',
            f"<style>{style}</style>",
            "</head>",
            "<body>",
            "<noscript>This report needs JavaScript. It loads nothing from the network.</noscript>",
            f'<script type="application/json" id="whence-scores">{_json(payload)}</script>',
            f'<script type="application/json" id="whence-examples">{_json(examples)}</script>',
            *(f"<script>{script}</script>" for script in scripts),
            "</body>",
            "</html>",
        ]
    )


def _json(content: object) -> str:
    """JSON that can neither end the script element around it nor open a comment in it."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _rows(scores: Scores, queries: Sequence[int] | None, notes: list[str]) -> list[int]:
    if queries is not None:
        return [scores.row_index(row) for row in dict.fromkeys(queries)]
    count = scores.shape[0]
    if count > QUERIES:
        notes.append(
            f"The first {QUERIES:,} of {count:,} queries are shown (choose others with queries=). "
            "The list of the most harmful examples covers all queries."
        )
    return list(range(min(count, QUERIES)))


def _check_study(scores: Scores, study: Study | None) -> None:
    """Raise if the study has other runs: its predictions would be those of another model."""
    run = scores.provenance.get("run")
    if study is not None and run and run not in {run.fingerprint for run in study.runs}:
        raise InvalidInput(
            "the study does not have the run that the scores were computed from: give the study "
            "that you attributed, or none"
        )


def _predictions(
    scores: Scores, study: Study | None, query: Any, rows: list[int], notes: list[str]
) -> dict[int, dict[str, Any]]:
    """Predictions of the queries by id; empty without a study or queries."""
    if study is None or query is None:
        notes.append(
            "Predictions and measurements are not shown: give study= and query= to see them."
        )
        return {}
    study.query(query)  # raises if it is not built like the training data
    return predictions(study, query, [int(scores.query_ids[row]) for row in rows])


def _positions(
    scores: Scores, tokens: Iterable[Tokens] | None, views: list[View]
) -> dict[int, int]:
    """Add per-token scores to their entries; returns the number of tokens of each column."""
    # `tokens` takes its examples from the method's stage, or else from the last
    last = scores.stage[-1] if scores.stage else None
    columns = {
        int(index): c
        for c, index in enumerate(scores.train_ids)
        if scores.stage is None or scores.stage[c] == last
    }
    by_column = {}
    for split in tokens or ():
        if split.example not in columns or len(split.values) != scores.shape[0]:
            raise InvalidInput(
                f"tokens of example {split.example} for {len(split.values)} queries do not belong "
                f"to these scores ({scores.shape[0]} queries): give what method.tokens(study, "
                "query, examples) returned for the same queries"
            )
        by_column[columns[split.example]] = split.values
    counts: dict[int, int] = {}
    for view in views:
        for entry in [*view["helpful"], *view["harmful"]]:
            if entry["column"] in by_column:
                values = by_column[entry["column"]][view["row"]]
                entry["tokens"] = [number(value) for value in values]
                counts[entry["column"]] = len(values)
    return counts


def _embed(
    examples: TrainingExamples,
    lists: list[list[View]],
    positions: Mapping[int, int],
    scores: Scores,
    notes: list[str],
) -> tuple[dict[int, View], dict[int, list[Any]]]:
    """The training examples that go into the file, by column; and the ids of the others.

    The first list comes first, then all others rank by rank, until the budget is spent.
    """
    order = [entry["column"] for entry in lists[0]]
    deepest = max((len(entries) for entries in lists[1:]), default=0)
    for rank in range(deepest):
        order += [entries[rank]["column"] for entries in lists[1:] if rank < len(entries)]
    order += [column for entries in lists for e in entries for column in e.get("also", [])]
    embedded: dict[int, View] = {}
    ids: dict[int, list[Any]] = {}
    spent = mismatched = 0
    for column in dict.fromkeys(order):
        if spent > BUDGET:
            stage = None if scores.stage is None else scores.stage[column]
            ids[column] = [int(scores.train_ids[column]), stage]
            continue
        embedded[column] = examples.render(column)
        if column in positions:
            dataset, index = examples.of(column)
            pieces = dataset.pieces(index)
            if pieces is not None and len(pieces) == positions[column]:
                embedded[column]["pieces"] = pieces
            else:
                mismatched += 1
        spent += len(json.dumps(embedded[column]))
    if mismatched:
        notes.append(
            f"The per-token scores of {mismatched} examples are not shown: their number differs "
            "from the number of token ids."
        )
    if ids:
        notes.append(
            f"{len(ids):,} of {len(ids) + len(embedded):,} training examples are shown only by "
            f"their index, to keep the file below about {BUDGET / 2**20:.0f} MB: ask for fewer "
            "queries (queries=) or examples (k=)."
        )
    return embedded, ids
