"""One query in a notebook: itself, and the training examples that helped and harmed it most."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Any

from whence.present.check import check_data
from whence.present.examples import QUERY_SIZE, Examples, Rendered
from whence.present.predict import predictions
from whence.present.views import TrainingExamples, View, describe_query, query_view, task_of
from whence.scores import Scores
from whence.study import Study

COLOURS = {"helpful": "#0072B2", "harmful": "#D55E00"}
CARD = "display:inline-block;vertical-align:top;margin:3px;padding:6px;max-width:240px;"
TEXT = 300  # characters of an example
ROW = 6  # cells of one


@dataclass(frozen=True)
class Shown:
    """What `Scores.show` returns: text in a terminal, pictures and texts in a notebook."""

    scores: Scores
    view: View
    examples: TrainingExamples

    def __repr__(self) -> str:
        row, k = self.view["row"], max(1, len(self.view["helpful"]), len(self.view["harmful"]))
        parts = []
        for end in ("helpful", "harmful"):
            ranking = getattr(self.scores, end)(row, k)
            parts.append(f"most {end}\n{ranking!r}")
        return "\n".join([self._heading(), *parts])

    def _repr_html_(self) -> str:
        parts = [f"<h4>{escape(self._heading())}</h4>"]
        if self.view.get("query"):
            parts.append(f'<div style="{CARD}">{_content(self.view["query"])}</div>')
        for end, word in (("helpful", "▲ Most helpful"), ("harmful", "▼ Most harmful")):
            entries = enumerate(self.view[end], 1)
            cards = "".join(self._card(entry, rank, COLOURS[end]) for rank, entry in entries)
            parts.append(f'<p style="color:{COLOURS[end]}"><b>{word}</b></p><div>{cards}</div>')
        return f"<div>{''.join(parts)}</div>"

    def _heading(self) -> str:
        view = self.view
        heading = f"Query {view['id']}"
        if view.get("label") is not None:
            heading += f", label {view['label']}"
        if view.get("prediction") is not None:
            heading += f", prediction {view['prediction']}"
        return f"{heading}: {self.scores.call}, {self.scores.measurement}"

    def _card(self, entry: View, rank: int, colour: str) -> str:
        rendered = self.examples.render(entry["column"])
        size = f"rank {rank}"
        if "within" in entry:
            size = f"{entry['value']:+.3g} ± {entry['within']:.2g}"
        stage = f" of {rendered['stage']}" if rendered["stage"] else ""
        label = "" if rendered["label"] is None else f"<b>{escape(rendered['label'])}</b><br>"
        about = f"{label}{escape(size)}<br><small>#{rendered['id']}{escape(stage)}</small>"
        return f'<div style="{CARD}border:1px solid {colour}">{_content(rendered)}{about}</div>'


def show(
    scores: Scores,
    query: int,
    *,
    k: int = 5,
    study: Study | None = None,
    data: Any = None,
    check: bool = True,
    **display: Any,
) -> Shown:
    """Show one query with the training examples that helped and harmed it most.

    Args:
        query: its row.
        k: number of examples at each end.
        study: whose training data to show; it also predicts the query.
        data: the dataset of queries that was attributed.
        check: whether to compare the data with that of the scores.
        display: `classes`, `columns`, `tokenizer`, `renderer`: as in `whence.report.write`.
    """
    train = None if study is None else study.train
    collate = None if study is None else study.collate
    check_data(scores, train, data, collate=collate, contents=check)
    examples = TrainingExamples.of_scores(scores, train, study, **display)
    view = query_view(scores, scores.row_index(query), k, examples.class_of)
    if data is not None:
        queries = Examples(data, size=QUERY_SIZE, task=task_of(study, None), **display)
        known = {} if study is None else predictions(study, data, [view["id"]])
        view = describe_query(view, queries, known.get(view["id"]))
    return Shown(scores, view, examples)


def _content(rendered: Rendered) -> str:
    """An example as HTML. All text is escaped, except what the user's renderer returned as HTML."""
    if rendered["kind"] == "image":
        style = "width:84px;height:84px;object-fit:contain;image-rendering:pixelated"
        alt = escape(f"example {rendered['id']}")
        return f'<img src="{escape(rendered["image"])}" style="{style}" alt="{alt}"><br>'
    if rendered["kind"] == "text":
        text = rendered["text"]
        return f"<div>{escape(text[:TEXT])}{'…' if len(text) > TEXT else ''}</div>"
    if rendered["kind"] == "row":
        rows = "".join(
            f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>"
            for name, value in rendered["row"][:ROW]
        )
        return f"<table>{rows}</table>"
    if rendered["kind"] == "custom":
        return str(rendered["html"])
    return ""
