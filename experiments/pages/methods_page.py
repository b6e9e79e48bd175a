"""docs/methods.md, from experiments/results/. Nothing on that page is typed by hand.

python -m experiments.pages.methods_page
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from experiments.pages import tables
from experiments.tasks import RESULTS, TASKS
from whence.table import Table, estimate

FOLDER = Path(__file__).parent
DOCS = FOLDER.parents[1] / "docs"
SHOWN = ("digits", "concrete", "fashion_mnist")


def methods_part(folder: Path) -> str:
    """For each task: LDS of one model and of several, calibration, seconds; best first."""
    results, parts = tables.read(folder), []
    for task in SHOWN:
        found = results.get(task)
        if found is None:
            parts.append(f"### {TASKS[task].title}\n\n*Not run yet:* `whence reproduce {task}`.")
            continue
        title = TASKS[task].title + (" (quick)" if found["quick"] else "")
        table = tables.lds_table(found, TASKS[task], best_first=True).markdown()
        parts.append(f"### {title}\n\n{TASKS[task].setting}.\n\n{table}\n\n{tables.about(found)}")
    return "\n\n".join(parts)


def store_table(found: dict[str, Any]) -> str:
    """LDS in projected space by dimension."""
    rows = [
        [
            r["projection"],
            f"{r['dimension']:,}",
            estimate(r["lds"][0], r["lds"][1:], 2),
            estimate(r["ensemble"][0], r["ensemble"][1:], 2),
            f"{r['seconds']:.2f}",
        ]
        for r in found["rows"]
    ]
    runs = found["settings"]["runs"]
    heads = ["projection", "dimension", "LDS, one model", f"LDS, {runs} models", "seconds, warm"]
    return Table(heads, rows).markdown()


def store_part(folder: Path) -> str:
    parts = []
    for task in TASKS:
        file = folder / f"store_{task}.json"
        if file.is_file():
            found = json.loads(file.read_text())
            s, m, ceiling = found["settings"], found["machine"], found["ceiling"]
            ceiling = "" if ceiling is None else f", noise ceiling {ceiling:.2f}"
            parts.append(
                f"### {TASKS[task].title}, by dimension\n\n{store_table(found)}\n\n"
                f"{s['subsets']} subsets of half the data × {s['seeds']} seeds, {s['queries']} "
                f"queries{ceiling}. {found['device']}, "
                f"torch {m['torch']}, {m['date']}: "
                f"`python -m experiments.studies.stores --task {task}`"
            )
    return "\n\n".join(parts)


def text(folder: Path = RESULTS) -> str:
    page = (FOLDER / "methods.template.md").read_text()
    page = page.replace("<!-- methods -->", methods_part(folder))
    return page.replace("<!-- store -->", store_part(folder))


if __name__ == "__main__":
    (DOCS / "methods.md").write_text(text())
