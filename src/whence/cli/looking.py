"""Commands that show scores: report, explore."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from whence.cli.options import (
    AtEachEnd,
    Check,
    ManyScores,
    ScoresPath,
    ToShow,
    numbers,
    open_many,
    open_scores,
)
from whence.cli.screen import Answer, CommandError, command, guarded
from whence.cli.signature import OUT, QUERY

TruthPath = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="A folder written by `whence truth`: judges the scores, and gives them the size of "
        "real changes.",
    ),
]


@command()
def report(
    scores: ScoresPath,
    study: ToShow = None,
    out: Annotated[Path, OUT] = Path("report.html"),
    k: AtEachEnd = 10,
    queries: str | None = None,
    truth: TruthPath = None,
    title: str | None = None,
    check: Check = True,
) -> Answer:
    """Write the scores as one HTML file that opens from disk, without a server.

    Examples:

    - `whence report scores/source --study study.py -o report.html`

    Args:
        out (FILE): The page to write.
        queries (INT,...): Queries to show. Default: the first 1,000.
        title (TEXT): Title of the page.
    """
    rows = None if queries is None else numbers("--queries", queries)
    opened = open_scores(scores)
    if out.is_dir():
        raise CommandError(f"--out {out} is a folder: give a file, such as {out / 'report.html'}")
    parts: dict[str, Any] = {} if study is None else _study(study)
    parts.pop("recipe", None)
    if opened.is_self_influence:
        parts.pop("query", None)
    opened.report(out, k=k, queries=rows, title=title, check=check, **parts, **_truth(truth))
    return Answer({"path": out, "bytes": out.stat().st_size}, f"Saved {out}: open it in a browser")


@command()
def card(
    scores: ScoresPath,
    query: Annotated[int, QUERY],
    study: ToShow = None,
    out: Annotated[Path, OUT] = Path("card.svg"),
    title: str | None = None,
    check: Check = True,
) -> Answer:
    """Draw one query and the examples that mattered to it, as a picture to share.

    Examples:

    - `whence card scores/source --query 3 --study study.py -o card.svg`

    Args:
        query: Index of the query.
        out (FILE): The SVG file to write.
        title (TEXT): First line.
    """
    opened = open_scores(scores)
    if out.suffix != ".svg":
        raise CommandError(f"--out {out}: the card is an SVG picture, such as card.svg")
    parts: dict[str, Any] = {} if study is None else _study(study)
    data = parts.pop("query", None)
    options = {name: part for name, part in parts.items() if name not in ("train", "recipe")}
    drawn = opened.card(query, title=title, check=check, data=data, **options)
    drawn.save(out)
    return Answer({"path": out, "bytes": len(drawn.encode())}, f"Saved {out}: open it in a browser")


@guarded
def explore(
    scores: ManyScores,
    study: ToShow = None,
    truth: TruthPath = None,
    port: Annotated[int, typer.Option(min=0, max=65535)] = 0,
    browser: bool = True,
    out: Annotated[Path | None, OUT] = None,
    check: Check = True,
) -> None:
    """Explore scores in a browser: search, compare methods, ask what if. Ctrl-C stops it.

    The page is served to this machine only, at an address that cannot be guessed.

    Examples:

    - `whence explore scores/source scores/tracin --study study.py`

    Args:
        port: Port; 0 picks a free one.
        browser: Open a browser, or only print the address.
        out (FOLDER): Folder for retrainings. Default: `explore`, in the folder of the first scores.
    """
    open_many(scores)  # report wrong folders first
    from whence.explore import serve

    parts: dict[str, Any] = {} if study is None else _study(study)
    serve(scores, port=port, open_browser=browser, out=out, check=check, **parts, **_truth(truth))


def _truth(path: Path | None) -> dict[str, Any]:
    """The truth in a folder, as an argument."""
    if path is None:
        return {}
    from whence.retrain import Truth

    return {"truth": Truth.load(path)}


def _study(path: Path) -> dict[str, Any]:
    """The data of a study file, and how to show it."""
    from whence.cli.studyfile import load_study

    file = load_study(path)
    parts = {"study": file.study, "train": file.train, "query": file.query, "recipe": file.recipe}
    return parts | file.display_options()
