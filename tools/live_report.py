"""A hook of mkdocs: builds the report that the front page of the documentation embeds.

The demo's training and SOURCE take a few seconds, so that the page always shows what the code of
this commit writes. `mkdocs serve` builds it once.
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import whence
from whence.demo import CLASSES, network, pictures, recipe_for, trained_on_halves

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

SHOWN = 60  # queries of the live report
WORST = 222  # a shirt that is read as a bag


def demo_scores(folder: Path) -> tuple[whence.Scores, dict[str, Any]]:
    """The demo's training, SOURCE by segment, and a truth; and what a report of it shows.

    Args:
        folder: for the run.
    """
    data = pictures(0)
    recipe = recipe_for(data.train)
    study = whence.Study(network(), recipe.task, data.train, recipe.run(0, folder / "run"))
    method = whence.Source(segments=3)
    scores = method.attribute(study, data.query, by_segment=True, progress=False)
    truth = trained_on_halves(recipe, data.query, seed=0, out=None, progress=False)
    title = "Clothes, a fifth mislabelled"
    shown = {"query": data.query, "study": study, "classes": CLASSES, "title": title}
    return scores, shown | {"truth": truth}


@cache
def live_report() -> str:
    """The page: the worst query first, then those with the most harmful examples."""
    with tempfile.TemporaryDirectory() as folder:
        scores, shown = demo_scores(Path(folder))
        hardest = np.argsort([min(row.min(), 0.0) for row in np.asarray(scores.values)])
        queries = [WORST, *hardest[: SHOWN - 1].tolist()]
        page = scores.report(Path(folder) / "report.html", queries=queries, k=6, **shown)
        return page.read_text(encoding="utf-8")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the report to the site."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "live/report.html", content=live_report()))
    return files
