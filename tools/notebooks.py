"""Write a notebook for each tutorial: python -m tools.notebooks

A tutorial's text becomes Markdown cells, and its Python blocks become code cells. Blocks that the
documentation runs (`<!-- test -->`) are the notebook's code; others stay text. Comments for the
documentation's tools, and outputs, are left out. `tests/docs/test_notebooks.py` checks that the
notebooks are up to date.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tools.run import DATA, DOCS, PIECE, pages

NOTEBOOKS = DOCS / "notebooks"
SITE_LINK = re.compile(r"\]\((?!https?:)([^)#]+)\.md(#[^)]*)?\)")


def tutorials() -> dict[str, str]:
    """{name: text} of the tutorials."""
    every = pages()
    return {Path(name).name: text for name, text in every.items() if name.startswith("tutorials/")}


def notebook(text: str) -> dict[str, Any]:
    """A tutorial as a notebook, in the format 4.5."""
    cells: list[dict[str, Any]] = []
    end = 0
    for piece in PIECE.finditer(text):
        if piece["code"] is not None and not piece["test"]:
            continue
        _add(cells, "markdown", _prose(text[end : piece.start()]))
        if piece["code"] is not None:
            _add(cells, "code", piece["code"].rstrip())
        end = piece.end()
    _add(cells, "markdown", _prose(text[end:]))
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    about = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": about, "nbformat": 4, "nbformat_minor": 5}


def _add(cells: list[dict[str, Any]], kind: str, source: str) -> None:
    if not source:
        return
    cell: dict[str, Any] = {"cell_type": kind, "id": f"cell-{len(cells)}", "metadata": {}}
    if kind == "code":
        cell |= {"execution_count": None, "outputs": []}
    cells.append(cell | {"source": source.splitlines(keepends=True)})


def _prose(text: str) -> str:
    """Text without the page's figures, which the notebook draws, and with links to the pages."""
    text = re.sub(r"^\[As a notebook\]\(.*\)\n+", "", text, flags=re.M)
    text = re.sub(r"^!\[[^]]*\]\(figures/[^)]*\)\n+(\*[^*]+\*\n)?", "", text, flags=re.M)
    text = DATA.sub("", text)
    return SITE_LINK.sub(r"](../tutorials/\1.md\2)", text).strip()


def written(text: str) -> str:
    """The notebook as a file."""
    return json.dumps(notebook(text), indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    NOTEBOOKS.mkdir(exist_ok=True)
    for name, text in tutorials().items():
        (NOTEBOOKS / f"{name}.ipynb").write_text(written(text))


if __name__ == "__main__":
    main()
