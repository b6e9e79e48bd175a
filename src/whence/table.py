"""Tables as plain text, Markdown and HTML; lists shortened for messages; text for a terminal.

This module knows nothing else of whence, so every room may use it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

from whence.errors import InvalidInput, InvalidType

# What a terminal would obey, or not show: control characters, changes of the direction and the form
# of writing, and halves of surrogate pairs. They may come from a dataset, or a folder of scores.
# Joiners (200c, 200d) stay: Persian words and emoji are made with them.
UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)


def escaped(text: str) -> str:
    """Text for a terminal: what it would obey becomes visible, as in "\\u001b[31m"."""
    return UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def one_line(text: str) -> str:
    """Escaped text for a cell or a line: line breaks and tabs are visible too."""
    return escaped(text).replace("\n", "\\n").replace("\t", "\\t")


class Table:
    """Rows of cells: text columns first, aligned left, then number columns, aligned right.

    Args:
        heads: names of the columns; None for (name, text) rows without a header.
        rows: one cell per column; None prints as a dash.
        title: lines above the table.
        note: a line below it.
        texts: the number of text columns.
    """

    def __init__(
        self,
        heads: Sequence[str] | None,
        rows: Iterable[Sequence[object]],
        *,
        title: str = "",
        note: str = "",
        texts: int = 1,
    ) -> None:
        self.title, self.note, self.texts = escaped(title), escaped(note), texts
        self.heads = None if heads is None else [one_line(head) for head in heads]
        self.rows = [["–" if cell is None else one_line(str(cell)) for cell in row] for row in rows]
        columns = 2 if self.heads is None else len(self.heads)
        for row in self.rows:
            if len(row) != columns:
                raise InvalidInput(f"a row has {len(row)} cells; the table has {columns} columns")

    def __str__(self) -> str:
        lines = self.rows if self.heads is None else [self.heads, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        drawn = [
            "  ".join(
                self._padded(k, *cell) for k, cell in enumerate(zip(row, widths, strict=True))
            )
            for row in lines
        ]
        if self.heads is not None:
            drawn.insert(1, "  ".join("-" * width for width in widths))
        if self.title:
            drawn = [self.title, *("  " + line for line in drawn)]
        if self.note:
            drawn.append(self.note)
        return "\n".join(line.rstrip() for line in drawn)

    def markdown(self) -> str:
        """The table in Markdown, without the title."""
        heads = ["", ""] if self.heads is None else self.heads
        rules = ["---" if self._left(k) else "---:" for k in range(len(heads))]
        lines = [heads, rules, *self.rows]
        return "\n".join(
            f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in lines
        )

    def _repr_html_(self) -> str:
        def line(tag: str, cells: Sequence[str]) -> str:
            tagged = (
                f'<{tag} style="text-align:{"left" if self._left(k) else "right"}">'
                f"{escape(cell)}</{tag}>"
                for k, cell in enumerate(cells)
            )
            return f"<tr>{''.join(tagged)}</tr>"

        caption = f"<caption>{escape(self.title)}</caption>" if self.title else ""
        head = "" if self.heads is None else f"<thead>{line('th', self.heads)}</thead>"
        body = "".join(line("td", row) for row in self.rows)
        note = f"<p>{escape(self.note)}</p>" if self.note else ""
        return f"<table>{caption}{head}<tbody>{body}</tbody></table>{note}"

    def _left(self, column: int) -> bool:
        return column < self.texts or self.heads is None

    def _padded(self, column: int, cell: str, width: int) -> str:
        return cell.ljust(width) if self._left(column) else cell.rjust(width)


class Tabled:
    """A result that prints as its table, in a terminal and in a notebook."""

    def table(self) -> Table:
        """The result as a table."""
        raise InvalidType(f"{type(self).__name__} must define table()")

    def __repr__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def estimate(value: float, interval: Sequence[float], digits: int = 3) -> str:
    """'0.412 [0.381, 0.441]'"""
    low, high = interval
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def listed(values: Iterable[object], most: int = 5) -> str:
    """The first `most` values and a count of the rest: '3, 14, 15 and 2 more'."""
    names = [str(value) for value in values]
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def byte_size(count: float) -> str:
    """A number of bytes for people to read: '1.5 MiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"


def duration(seconds: float) -> str:
    """Seconds for people to read: '40 min'."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 360_000 else f"{seconds / 86400:,.0f} days"
