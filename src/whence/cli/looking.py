"""Commands that show scores: report, explore."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from whence.cli.options import (
    Check,
    ManyScores,
    ScoresPath,
    ToShow,
    numbers,
    open_many,
    open_scores,
)
from whence.cli.screen import Answer, CommandError, command, guarded


@command()
def report(
    scores: ScoresPath,
    study: ToShow = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="The page to write.")
    ] = Path("report.html"),
    k: Annotated[
        int, typer.Option("-k", min=1, metavar="INT", help="Examples at either end.")
    ] = 10,
    queries: Annotated[
        str | None,
        typer.Option(metavar="INT,...", help="Which queries. Default: the first 1,000."),
    ] = None,
    title: Annotated[str | None, typer.Option(metavar="TEXT", help="Of the page.")] = None,
    check: Check = True,
) -> Answer:
    """Write scores as one HTML file that opens from disk: queries, who helped, who harmed, when.

    Examples:

    - `whence report scores/source --study study.py -o report.html`
    """
    rows = None if queries is None else numbers("--queries", queries)
    found = open_scores(scores)
    if out.is_dir():
        raise CommandError(f"--out {out} is a folder: give a file, such as {out / 'report.html'}")
    more: dict[str, Any] = {} if study is None else _study(study)
    more.pop("recipe", None)
    if found.is_self_influence:
        more.pop("query", None)
    found.report(out, k=k, queries=rows, title=title, check=check, **more)
    return Answer({"path": out, "bytes": out.stat().st_size}, f"{out}: open it in a browser")


@guarded
def explore(
    scores: ManyScores,
    study: ToShow = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="INT", help="0 is one that is free.")
    ] = 0,
    browser: Annotated[bool, typer.Option(help="Open a browser, or only say the address.")] = True,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FOLDER",
            help="Where retrainings are kept. Default: `explore`, in the first scores' folder.",
        ),
    ] = None,
    check: Check = True,
) -> None:
    """Look at scores in a browser: search, compare methods, try what if. Ctrl-C ends it.

    The page is served to this machine alone, at an address that nobody can guess.

    Examples:

    - `whence explore scores/source scores/tracin --study study.py`
    """
    open_many(scores)  # what is wrong with the folders is said before anything else
    from whence.explore import serve

    more: dict[str, Any] = {} if study is None else _study(study)
    serve(scores, port=port, open_browser=browser, out=out, check=check, **more)


def _study(path: Path) -> dict[str, Any]:
    """What a study file has to show."""
    from whence.cli.studyfile import load_study

    file = load_study(path)
    parts = {"study": file.study, "train": file.train, "query": file.query, "recipe": file.recipe}
    return parts | file.looks()
