"""Run the code in the pages of the documentation, and update the outputs and figures they show.

    python -m tools.run                           # every page with an output or a figure
    python -m tools.run tutorials/clothes meaning

A page controls this by comments, which readers do not see:

    <!-- test -->                before a Python block: run it
    <!-- output -->              before a text block: what was printed since the last one
    <!-- check: expression -->   must be true at this point
    <!-- data: folder/file -->   what the page reads from $WHENCE_DATA

A page continues from the example of the front page; a tutorial starts with no names. Figures that
a page shows and its code writes, `figures/*.png`, are copied next to the page.
`tests/docs/test_examples_in_docs.py` runs all pages too.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shutil
import tempfile
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

os.environ.setdefault("MPLBACKEND", "Agg")  # pages draw into files: no display needed
DOCS = Path(__file__).parents[1] / "docs"
FRONT = DOCS / "index.md"
PIECE = re.compile(
    r"(?P<test><!-- test -->\n+)?^(?P<indent> *)```python\n(?P<code>.*?)^(?P=indent)```$"
    r"|<!-- output -->\n+```text\n(?P<output>.*?)^```$"
    r"|<!-- check: (?P<check>.*?) -->",
    re.M | re.S,
)
DATA = re.compile(r"<!-- data: (.*?) -->")
FIGURE = re.compile(r"!\[[^]]*\]\((figures/[^)]+\.png)\)")


def pages() -> dict[str, str]:
    """{name: text} of all pages, such as "source" and "tutorials/clothes"."""
    paths = sorted(DOCS.rglob("*.md"))
    return {str(path.relative_to(DOCS).with_suffix("")): path.read_text() for path in paths}


def blocks(text: str) -> list[tuple[bool, str]]:
    """(whether to run it, code) of every Python block."""
    return [
        (bool(m["test"]), textwrap.dedent(m["code"]))
        for m in PIECE.finditer(text)
        if m["code"] is not None
    ]


@dataclass
class PageRun:
    """The outcome of running a page."""

    names: dict[str, Any] = field(default_factory=dict)
    outputs: list[tuple[re.Match[str], str]] = field(default_factory=list)  # shown, printed
    failed: list[str] = field(default_factory=list)  # checks


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def play(page: str, text: str, folder: Path) -> PageRun:
    """Run a page's code in a folder."""
    outcome, printed = PageRun({"__name__": page}), io.StringIO()
    torch.manual_seed(0)

    def run(code: str, where: str) -> None:
        exec(compile(code, f"{where}.md", "exec"), outcome.names)

    with _inside(folder), contextlib.redirect_stdout(printed):
        if not page.startswith("tutorials/"):
            for _, code in blocks(FRONT.read_text()):
                run(code, "index")
            printed.truncate(printed.seek(0))
        for piece in PIECE.finditer(text):
            if piece["check"] is not None:
                if not eval(piece["check"], outcome.names):
                    outcome.failed.append(piece["check"])
            elif piece["output"] is not None:
                outcome.outputs.append((piece, printed.getvalue()))
                printed.truncate(printed.seek(0))
            elif piece["test"]:
                run(textwrap.dedent(piece["code"]), page)
    return outcome


def shape(text: str) -> str:
    """A text without its numbers and their widths, which differ between machines."""
    return " ".join(re.sub(r"[-+−]?\b\d+(,\d{3})*(\.\d+)?(e[-+]?\d+)?", "#", text).split())


def missing_data(text: str) -> list[str]:
    """The files that a page reads from $WHENCE_DATA and that are not there."""
    folder = Path(os.environ.get("WHENCE_DATA", "data"))
    return [file for file in DATA.findall(text) if not (folder / file).is_file()]


def figures(text: str) -> list[str]:
    """The figures that a page shows from its own folder."""
    return FIGURE.findall(text)


def rewrite(page: str) -> None:
    """Run a page, and update the outputs and figures that it shows."""
    path = (DOCS / page).with_suffix(".md")
    text = path.read_text()
    with tempfile.TemporaryDirectory() as name:
        folder, start = Path(name), time.process_time()
        outcome = play(page, text, folder)
        seconds = time.process_time() - start
        for figure in figures(text):
            if (folder / figure).exists():
                (path.parent / figure).parent.mkdir(exist_ok=True)
                shutil.copyfile(folder / figure, path.parent / figure)
    for piece, printed in reversed(outcome.outputs):
        first, end = piece.span("output")
        text = text[:first] + printed.rstrip() + "\n" + text[end:]
    path.write_text(text)
    print(f"{page}: {seconds:.1f} s", *(f"\n  NOT TRUE: {check}" for check in outcome.failed))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("pages", nargs="*")
    chosen = parser.parse_args().pages
    torch.set_num_threads(1)
    for page, text in pages().items():
        has_output = "<!-- output -->" in text or (figures(text) and page.startswith("tutorials/"))
        if page in chosen or (not chosen and has_output):
            if missing := missing_data(text):
                print(f"{page}: left out, because {missing[0]} is not in $WHENCE_DATA")
            else:
                rewrite(page)


if __name__ == "__main__":
    main()
