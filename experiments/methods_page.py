"""docs/methods.md and its figure, from experiments/results/. Nothing on that page is typed by hand.

python -m experiments.methods_page
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from whence.table import Table, estimate

FOLDER = Path(__file__).parent
DOCS = FOLDER.parent / "docs"
TITLES = {"digits": "Digits", "concrete": "Concrete", "fashion_mnist": "FashionMNIST"}


def results(pattern: str) -> dict[str, Any]:
    """Result files by task, in the order of TITLES."""
    found = {}
    for task in TITLES:
        file = FOLDER / "results" / pattern.format(task)
        if file.exists():
            found[task] = json.loads(file.read_text())
    return found


def method_table(found: dict[str, Any]) -> str:
    """One task: LDS of one model and of several, calibration, seconds; best first."""
    rows = []
    ordered = sorted(found["methods"].items(), key=lambda item: -item[1]["ensemble"][0])
    for name, r in ordered:
        single = None if r["single"] is None else estimate(r["single"][0], r["single"][1:], 2)
        together = estimate(r["ensemble"][0], r["ensemble"][1:], 2)
        rows.append([name, single, together, f"{r['slope']:.2g}", f"{r['seconds']:.1f}"])
    runs = found["settings"]["runs"]
    heads = ["method", "LDS, one model", f"LDS, {runs} models", "slope", "seconds"]
    return Table(heads, rows).markdown()


def about(found: dict[str, Any]) -> str:
    s, m = found["settings"], found["machine"]
    return (
        f"{s['subsets']} subsets of half the data × {s['seeds']} seeds, {s['queries']} queries, "
        f"noise ceiling {found['ceiling']:.2f}. {found['device']}, torch {m['torch']}, {m['date']}."
    )


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


def write() -> None:
    text = (FOLDER / "methods.template.md").read_text()
    parts = []
    for task, found in results("methods_{}.json").items():
        parts.append(f"### {TITLES[task]}\n\n{method_table(found)}\n\n{about(found)}")
    text = text.replace("<!-- methods -->", "\n\n".join(parts))
    parts = [
        f"### {TITLES[task]}, by dimension\n\n{store_table(found)}\n\n{about(found)}"
        for task, found in results("store_{}.json").items()
    ]
    text = text.replace("<!-- store -->", "\n\n".join(parts))
    (DOCS / "methods.md").write_text(text)


if __name__ == "__main__":
    write()
