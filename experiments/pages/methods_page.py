"""docs/methods.md, from its template and the results.

python -m experiments.pages.methods_page
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from experiments.pages import tables
from experiments.pages.markdown import DOCS, filled
from experiments.tasks import RESULTS, TASKS
from whence.table import Table, estimate

SHOWN = ("digits", "concrete", "fashion_mnist")


def methods_part(folder: Path) -> str:
    """For each task: LDS of one model and of several, calibration, seconds; best first."""
    results, parts = tables.read(folder), []
    for task in SHOWN:
        result = results.get(task)
        if result is None:
            parts.append(f"### {TASKS[task].title}\n\n*Not run yet:* `whence reproduce {task}`.")
            continue
        heading = TASKS[task].title + (" (quick)" if result["quick"] else "")
        lds = tables.lds_table(result, TASKS[task], best_first=True).markdown()
        parts.append(f"### {heading}\n\n{TASKS[task].setting}.\n\n{lds}\n\n{tables.about(result)}")
    return "\n\n".join(parts)


def store_table(study: dict[str, Any]) -> str:
    """LDS in projected space by dimension."""
    rows = [
        [
            row["projection"],
            f"{row['dimension']:,}",
            estimate(row["lds"][0], row["lds"][1:], 2),
            estimate(row["ensemble"][0], row["ensemble"][1:], 2),
            f"{row['seconds']:.2f}",
        ]
        for row in study["rows"]
    ]
    runs = study["settings"]["runs"]
    heads = ["projection", "dimension", "LDS, one model", f"LDS, {runs} models", "seconds, warm"]
    return Table(heads, rows).markdown()


def store_part(folder: Path) -> str:
    """The table of each task whose gradient stores were judged."""
    parts = []
    for task in TASKS:
        file = folder / f"store_{task}.json"
        if file.is_file():
            study = json.loads(file.read_text())
            sizes, machine = study["settings"], study["machine"]
            ceiling = study["ceiling"]
            noise = "" if ceiling is None else f", noise ceiling {ceiling:.2f}"
            parts.append(
                f"### {TASKS[task].title}, by dimension\n\n{store_table(study)}\n\n"
                f"{sizes['subsets']} subsets of half the data × {sizes['seeds']} seeds, "
                f"{sizes['queries']} queries{noise}. {study['device']}, "
                f"torch {machine['torch']}, {machine['date']}: "
                f"`python -m experiments.studies.stores --task {task}`"
            )
    return "\n\n".join(parts)


def text(folder: Path = RESULTS) -> str:
    """The page, from the results in a folder."""
    parts = {"methods": lambda: methods_part(folder), "store": lambda: store_part(folder)}
    return filled("methods.template.md", parts)


if __name__ == "__main__":
    (DOCS / "methods.md").write_text(text())
