"""Pieces of Markdown: tables, lists of names, text from datasets, templates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

TEMPLATES = Path(__file__).parent
DOCS = Path(__file__).parents[2] / "docs"


def escaped(text: str, most: int | None = None) -> str:
    """Text that stays plain text in Markdown, tables and HTML; cut after `most` characters."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    if most is not None and len(line) > most:
        line = line[:most].rstrip() + " …"
    return "".join(c if c.isalnum() or c in " ,;…" else f"&#{ord(c)};" for c in line)


def table(heads: Sequence[str], rows: Iterable[Sequence[object]], align: str = "") -> str:
    """A table of finished cells; `align` has an "r" for each column of numbers."""
    rules = ["---:" if k < len(align) and align[k] == "r" else "---" for k in range(len(heads))]
    lines = [heads, rules, *(["–" if c is None else str(c) for c in row] for row in rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


def listed(names: Iterable[str]) -> str:
    """'a, b and c'."""
    *front, last = names
    return f"{', '.join(front)} and {last}" if front else last


def filled(template: str, parts: Mapping[str, Callable[[], str]]) -> str:
    """A template with each `<!-- name -->` replaced by its part."""
    page = (TEMPLATES / template).read_text()
    for name, make in parts.items():
        mark = f"<!-- {name} -->"
        if page.count(mark) != 1:
            raise ValueError(f"{template} has {mark} {page.count(mark)} times, not once")
        page = page.replace(mark, make())
    return page
