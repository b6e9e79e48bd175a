"""The report: one HTML file that opens from disk and asks nothing of the network.

Scores and examples are in it as JSON, styles and scripts inline and allowed by their hashes, and
nothing else may load or run (Content-Security-Policy).
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

import whence
from whence.data import Collate
from whence.engine.scoring import Tokens
from whence.persist.files import write_bytes
from whence.present.check import by_stage, check_data
from whence.present.examples import Examples, Renderer
from whence.present.predict import predictions
from whence.present.views import (
    Pool,
    View,
    described,
    harmful_overall,
    number,
    overview,
    query_view,
    said,
)
from whence.scores import Scores
from whence.study import Study

QUERIES = 1000  # shown unless others are asked for
WORST = 50  # entries of the list over all queries
AUDITED = 200  # entries of the audit list
BUDGET = 16 * 2**20  # characters of training examples in one file
QUERY_SIZE = 128  # pixels


def write_report(
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
    title: str | None = None,
    collate: Collate | None = None,
    check: bool = True,
) -> Path:
    """Write the report of scores; see `Scores.report`."""
    path = Path(path)
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else f"cannot be written: {path.parent} is no folder"
        raise FileNotFoundError(f"{path} {what}: give the name of a file in a folder that exists")
    train = study.train if train is None and study is not None else train
    collate = study.collate if collate is None and study is not None else collate
    notes = check_data(scores, train, query, collate=collate, contents=check)
    _check_study(scores, study)
    how = {"renderer": renderer, "classes": classes, "columns": columns, "tokenizer": tokenizer}
    pool = Pool(scores, train, labels=labels, **how)
    asked = Examples(query, size=QUERY_SIZE, **how)
    payload: View = {"title": title or "Where it comes from", "queries": [], "harmful": None}
    if scores.is_self_influence:
        if queries is not None:
            raise ValueError(
                f"queries={list(queries)!r}, but self-influence has none: leave it out"
            )
        payload["audit"] = query_view(scores, None, max(k, AUDITED), pool.label)
        lists = [payload["audit"]["helpful"]]
    else:
        rows = _rows(scores, queries, notes)
        found = _predictions(scores, study, query, rows, notes)
        payload["queries"] = [
            described(view, asked, found.get(view["id"]))
            for view in (query_view(scores, row, k, pool.label) for row in rows)
        ]
        payload["harmful"] = harmful_overall(scores, WORST, k)
        lists = [payload["harmful"]["entries"]]
        lists += [view[end] for view in payload["queries"] for end in ("helpful", "harmful")]
    positions = _positions(scores, tokens, payload["queries"])
    shown, ids = _embedded(pool, lists, positions, scores, notes)
    if study is not None:
        _predict_shown(scores, study, pool, lists[0], shown)
    if train is None:
        notes.append("No training data was given: examples are shown by their numbers.")
    payload["overview"] = overview(scores, notes)
    page = render(payload, {"examples": shown, "ids": ids})
    write_bytes(path, page.encode("utf-8", "replace"))  # lone surrogates
    return path


def render(payload: View, examples: View) -> str:
    """The page as text."""
    static = files("whence.report") / "static"
    style = (static / "whence.css").read_text("utf-8")
    scripts = [(static / name).read_text("utf-8") for name in ("views.js", "report.js")]
    custom = any(shown["kind"] == "custom" for shown in examples["examples"].values()) or any(
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
            "<noscript>This report needs JavaScript; none of it comes from elsewhere.</noscript>",
            f'<script type="application/json" id="whence-scores">{_json(payload)}</script>',
            f'<script type="application/json" id="whence-examples">{_json(examples)}</script>',
            *(f"<script>{script}</script>" for script in scripts),
            "</body>",
            "</html>",
        ]
    )


def _json(content: object) -> str:
    """JSON that cannot end the script element it stands in, nor open a comment there."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _rows(scores: Scores, queries: Sequence[int] | None, notes: list[str]) -> list[int]:
    if queries is not None:
        return [scores._row(row) for row in dict.fromkeys(queries)]
    count = scores.shape[0]
    if count > QUERIES:
        notes.append(
            f"The first {QUERIES:,} of {count:,} queries are shown (choose others with queries=); "
            "the list of the most harmful is over all."
        )
    return list(range(min(count, QUERIES)))


def _check_study(scores: Scores, study: Study | None) -> None:
    """Refuse a study of other runs: its predictions would stand beside another model's scores."""
    made = scores.provenance.get("run")
    if study is not None and made and made not in {run.fingerprint for run in study.runs}:
        raise ValueError(
            "the study has other runs than the one the scores were made with: give the study that "
            "was attributed, or none"
        )


def _predictions(
    scores: Scores, study: Study | None, query: Any, rows: list[int], notes: list[str]
) -> dict[int, dict[str, Any]]:
    """What the model says of the queries, where it can be known."""
    if study is None or query is None:
        notes.append(
            "Predictions and measurements are not shown: give study= and query= to have them."
        )
        return {}
    study.query(query)  # refuses what is not built like the training data
    return predictions(study, query, [int(scores.query_ids[row]) for row in rows])


def _predict_shown(
    scores: Scores, study: Study, pool: Pool, entries: list[View], shown: View
) -> None:
    """Add the prediction to the training examples of a list: a label that differs stands out."""
    for stage, dataset in by_stage(scores, study.train).items():
        columns = [
            entry["column"]
            for entry in entries
            if entry["column"] in shown
            and (scores.stage is None or scores.stage[entry["column"]] == stage)
        ]
        if not columns:
            continue
        own = stage if stage in study.stages else study.stages[-1]
        ids = [int(scores.train_ids[c]) for c in columns]
        found = predictions(study, dataset, ids, stage=own)
        for column, index in zip(columns, ids, strict=True):
            view = said(found[index], pool.of(column)[0])
            shown[column] |= {name: view[name] for name in ("prediction", "comparable")}


def _positions(
    scores: Scores, tokens: Iterable[Tokens] | None, views: list[View]
) -> dict[int, int]:
    """Put per-token scores on the entries they belong to; how many each column has."""
    # of the method's stage or else of the last, which `tokens` takes its examples from
    last = scores.stage[-1] if scores.stage else None
    columns = {
        int(index): c
        for c, index in enumerate(scores.train_ids)
        if scores.stage is None or scores.stage[c] == last
    }
    given = {}
    for one in tokens or ():
        if one.example not in columns or len(one.values) != scores.shape[0]:
            raise ValueError(
                f"tokens of example {one.example} for {len(one.values)} queries do not belong to "
                f"these scores ({scores.shape[0]} queries): give what method.tokens(study, query, "
                "examples) returned for the same queries"
            )
        given[columns[one.example]] = one.values
    used: dict[int, int] = {}
    for view in views:
        for entry in [*view["helpful"], *view["harmful"]]:
            if entry["column"] in given:
                values = given[entry["column"]][view["row"]]
                entry["tokens"] = [number(value) for value in values]
                used[entry["column"]] = len(values)
    return used


def _embedded(
    pool: Pool,
    lists: list[list[View]],
    positions: Mapping[int, int],
    scores: Scores,
    notes: list[str],
) -> tuple[View, View]:
    """The training examples that go into the file, each once, by column; and the ids of the rest.

    The first list comes first, then all others rank by rank, until the budget is spent.
    """
    order = [entry["column"] for entry in lists[0]]
    deepest = max((len(entries) for entries in lists[1:]), default=0)
    for rank in range(deepest):
        order += [entries[rank]["column"] for entries in lists[1:] if rank < len(entries)]
    shown: View = {}
    ids: View = {}
    spent = unlike = 0
    for column in dict.fromkeys(order):
        if spent > BUDGET:
            stage = None if scores.stage is None else scores.stage[column]
            ids[column] = [int(scores.train_ids[column]), stage]
            continue
        shown[column] = pool.render(column)
        if column in positions:
            examples, index = pool.of(column)
            pieces = examples.pieces(index)
            if pieces is not None and len(pieces) == positions[column]:
                shown[column]["pieces"] = pieces
            else:
                unlike += 1
        spent += len(json.dumps(shown[column]))
    if unlike:
        notes.append(
            f"The per-token scores of {unlike} examples are not shown: there are not as many of "
            "them as the examples have token ids."
        )
    if ids:
        notes.append(
            f"{len(ids):,} of {len(ids) + len(shown):,} training examples are shown only by their "
            f"numbers, to keep the file below about {BUDGET / 2**20:.0f} MB: ask for fewer queries "
            "(queries=) or examples (k=)."
        )
    return shown, ids
