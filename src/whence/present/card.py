"""One query's story as a picture to share: an SVG file, for slides, posts and papers.

Datasets are not trusted: all text is escaped, and the picture contains no script and no link.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

from whence.errors import InvalidInput
from whence.persist.files import as_path, write_bytes
from whence.present.examples import Rendered
from whence.present.notebook import COLOURS, show
from whence.present.views import View, fold_query
from whence.scores import Scores
from whence.table import UNSAFE

WIDTH, HEIGHT = 1200, 630  # what sites show of a shared link
LEFT, RIGHT, TILE, GAP = 330, 1152, 138, 24
INK, MUTED, LINE, PAPER = "#1b1f23", "#5c666f", "#dfe3e7", "#ffffff"
PER_EM = 0.54  # the mean width of a letter, relative to the font's size
TEXTS, PICTURES = 3, 5  # examples at each end
UNPRINTABLE = re.compile(f"{UNSAFE.pattern}|[\n\t\ufffe\uffff]")


class Card(str):
    """An SVG picture as text, which a notebook shows."""

    def _repr_html_(self) -> str:
        return str(self)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the picture to a file that ends in `.svg`."""
        path = as_path(path)
        if path.suffix != ".svg":
            raise InvalidInput(f"{path}: a card is an SVG picture, give a file such as card.svg")
        write_bytes(path, self.encode())
        return path


def card(scores: Scores, query: int, *, title: str | None = None, **options: Any) -> Card:
    """Draw one query with the training examples that helped and harmed it most.

    Args:
        query: its row.
        title: the line at the top (default: names the prediction).
        options: those of `show`, except `k`.
    """
    if "k" in options:
        raise InvalidInput(f"k={options['k']} does not apply to a card, whose layout is fixed")
    shown = show(scores, query, k=2 * PICTURES, **options)
    view = fold_query(shown.view, shown.examples.leaders)
    return draw(view, shown.examples.render, f"{scores.call}, {scores.measurement}", title)


def draw(
    view: View, render: Callable[[int], Rendered], about: str, title: str | None = None
) -> Card:
    """A card from a `query_view`.

    Args:
        view: with `query`, `label` and `prediction` if they are known (`describe_query`).
        render: the training example of an entry's column.
        about: the method and the measurement, in the last line.
        title: the first line.
    """
    parts = [
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{PAPER}"/>',
        f'<rect width="{WIDTH}" height="10" fill="{COLOURS["helpful"]}"/>',
        *_lines(title or _title(view), 48, 74, 34, 1, WIDTH - 96, weight=650),
        *_query(view),
    ]
    for top, end, word in ((112, "helpful", "▲ Helped most"), (352, "harmful", "▼ Harmed most")):
        parts += _lines(word, LEFT, top + 18, 20, 1, 400, COLOURS[end], 650)
        parts += _examples(view[end], render, top + 34, COLOURS[end])
    foot = f"Training examples by {about}, traced with whence"
    parts += _lines(foot, 48, HEIGHT - 22, 16, 1, WIDTH - 96, MUTED)
    font = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
    label = escape(_clean(title or _title(view)))
    return Card(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}" '
        f'font-family="{font}">{"".join(parts)}</svg>\n'
    )


def _title(view: View) -> str:
    if view.get("prediction") is None:
        return f"Which training examples mattered to query {view['id']}?"
    label, prediction = view.get("label"), view["prediction"]
    if not view.get("comparable") or label in (None, prediction):
        return f"Why does the model say “{prediction}”?"
    return f"Why does the model say “{prediction}”, not “{label}”?"


def _query(view: View) -> list[str]:
    """The query, large, on the left."""
    rendered = view.get("query") or {"kind": "missing", "id": view["id"], "label": None}
    parts = _content(rendered, 48, 130, 234, 234, 17, 11)
    facts = [("label", rendered["label"]), ("prediction", view.get("prediction"))]
    y = 400
    for name, value in facts:
        if value is not None:
            parts += _lines(name, 48, y, 15, 1, 234, MUTED)
            parts += _lines(value, 48, y + 26, 22, 1, 234, weight=650)
            y += 62
    return parts


def _examples(
    entries: list[View], render: Callable[[int], Rendered], top: int, colour: str
) -> list[str]:
    """Pictures side by side, texts and rows one below the other."""
    if not entries:
        return _lines("none", LEFT, top + 24, 18, 1, 400, MUTED)
    drawn = [render(entry["column"]) for entry in entries[:PICTURES]]
    if all(rendered["kind"] in ("image", "missing") for rendered in drawn):
        parts = []
        for k, rendered in enumerate(drawn):
            x = LEFT + k * (TILE + GAP)
            parts += _content(rendered, x, top, TILE, TILE, 16, 3)
            label = rendered["label"] or f"#{rendered['id']}"
            parts += _lines(label, x, top + TILE + 22, 17, 1, TILE, colour, 650)
        return parts
    parts, step = [], 66
    for k, rendered in enumerate(drawn[:TEXTS]):
        y, width = top + k * step, RIGHT - LEFT
        parts.append(f'<rect x="{LEFT}" y="{y}" width="4" height="{step - 12}" fill="{colour}"/>')
        parts += _content(rendered, LEFT + 16, y - 2, width - 176, step - 12, 16, 2)
        label = rendered["label"] or f"#{rendered['id']}"
        parts += _lines(label, RIGHT - 144, y + 18, 17, 1, 144, colour, 650)
    return parts


def _content(
    rendered: Rendered, x: float, y: float, width: float, height: float, size: int, lines: int
) -> list[str]:
    if rendered["kind"] == "image":
        frame = f'x="{x}" y="{y}" width="{width}" height="{height}"'
        return [
            f'<rect {frame} fill="none" stroke="{LINE}"/>',
            f'<image {frame} href="{escape(rendered["image"])}" image-rendering="pixelated"/>',
        ]
    text = rendered.get("text")
    if rendered["kind"] == "row":
        text = ", ".join(f"{name} {value}" for name, value in rendered["row"])
    return _lines(text or f"#{rendered['id']}", x, y + size, size, lines, width)


def _lines(
    text: str,
    x: float,
    y: float,
    size: int,
    lines: int,
    width: float,
    colour: str = INK,
    weight: int = 400,
) -> list[str]:
    """A text in at most this many lines, the first at y."""
    letters = max(4, int(width / (size * PER_EM)))
    wrapped = textwrap.wrap(_clean(text), letters, max_lines=lines, placeholder=" …")
    style = f'font-size="{size}" font-weight="{weight}" fill="{colour}"'
    return [
        f'<text x="{x}" y="{y + k * size * 1.35:g}" {style}>{escape(line)}</text>'
        for k, line in enumerate(wrapped)
    ]


def _clean(text: str) -> str:
    """The text without what XML cannot hold, and without marks that reorder it."""
    printable = UNPRINTABLE.sub(" ", text).encode("utf-8", "replace").decode()
    return " ".join(printable.split())
