"""The documentation's examples: those marked <!-- test --> run, all others are at least Python.

A page goes on from the example in README, which is the one on the front page: its names are there,
and so is the run that it recorded.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from whence.layers import KINDS

ROOT = Path(__file__).parent.parent
PAGES = {path.stem: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
BLOCK = re.compile(r"(<!-- test -->\n+)?^( *)```python\n(.*?)^\2```$", re.M | re.S)


def blocks(text: str) -> list[tuple[bool, str]]:
    """(whether it is to be run, code) of every Python block."""
    return [(bool(m[1]), textwrap.dedent(m[3])) for m in BLOCK.finditer(text)]


@pytest.fixture
def no_new_kinds() -> Iterator[None]:
    """Kinds of layers that a page registers are forgotten again."""
    before = list(KINDS)
    yield
    KINDS[:] = before


def run(code: str, names: dict[str, Any], page: str) -> None:
    exec(compile(code, f"{page}.md", "exec"), names)


@pytest.mark.filterwarnings("ignore:.*left out")
@pytest.mark.parametrize(
    "page", [page for page, text in PAGES.items() if any(marked for marked, _ in blocks(text))]
)
def test_examples_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_new_kinds: None
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for _, code in blocks((ROOT / "README.md").read_text()):
        run(code, names, "README")
    for marked, code in blocks(PAGES[page]):
        if marked:
            run(code, names, page)
    if page == "tasks":
        assert names["predicted"] == pytest.approx(names["real"], rel=0.25)


@pytest.mark.parametrize("page", PAGES)
def test_other_examples_are_python(page: str) -> None:
    for marked, code in blocks(PAGES[page]):
        if not marked:
            ast.parse(code)
