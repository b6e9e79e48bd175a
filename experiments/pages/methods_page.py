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
DRAWN = ("digits", "fashion_mnist")  # with seconds


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


def scatter(folder: Path, path: Path) -> None:
    """Draw the LDS of one model against seconds, a panel for each task that was run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    read = tables.read(folder)
    results = {task: read[task] for task in DRAWN if task in read}
    drawn: list[tuple[Any, list[tuple[str, float, float, str]]]] = []
    figure, axes = plt.subplots(1, len(results), figsize=(5.6 * len(results), 4.4), squeeze=False)
    for axis, (task, result) in zip(axes[0], results.items(), strict=True):
        labels: list[tuple[str, float, float, str]] = []
        for name, entry in result["lds"].items():
            if entry["single"] is None:
                continue
            value, low, high = _numbers(entry["single"])
            colour = "#0072B2" if name.startswith(("SOURCE", "FastSource")) else "#777777"
            seconds = max(entry["seconds"], 0.05)
            error = [[value - low], [high - value]]
            axis.errorbar(seconds, value, error, fmt="o", color=colour, elinewidth=1, capsize=2)
            labels.append((name, seconds, value, colour))
        axis.set(xscale="log", xlabel="seconds", ylabel="LDS", title=TASKS[task].title)
        axis.set_xlim(0.02, 40_000)  # room for the names
        axis.axhline(0, color="black", linewidth=0.8)
        axis.spines[["top", "right"]].set_visible(False)
        drawn.append((axis, labels))
    figure.tight_layout()
    for axis, labels in drawn:
        _label(axis, labels)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _label(axis: Any, labels: list[tuple[str, float, float, str]]) -> None:
    """Write the names next to their points, where they cover neither each other nor a point."""
    from matplotlib.transforms import Bbox

    renderer, frame = axis.figure.canvas.get_renderer(), axis.get_window_extent()
    points = [axis.transData.transform(place) for _, *place, _ in labels]
    taken = [Bbox.from_extents(x - 5, y - 5, x + 5, y + 5) for x, y in points]
    sides = [("left", 6), ("right", -6)]
    shifts = [
        (side, across, up) for up in (-3, 5, -11, 12, -18, 19, 26, -25) for side, across in sides
    ]
    for name, seconds, value, colour in sorted(labels, key=lambda label: -label[2]):
        for side, across, up in shifts:
            text = axis.annotate(
                name,
                (seconds, value),
                xytext=(across, up),
                ha=side,
                textcoords="offset points",
                fontsize=8,
                color=colour,
            )
            box = text.get_window_extent(renderer)
            inside = frame.x0 < box.x0 and box.x1 < frame.x1
            if inside and not any(box.overlaps(other) for other in taken):
                break
            text.remove()
        taken.append(box)


def _numbers(single: Any) -> tuple[float, float, float]:
    """The value and its interval, as a result stores them."""
    value, *interval = single
    low, high = interval[0] if len(interval) == 1 else interval
    return float(value), float(low), float(high)


def store_table(study: dict[str, Any]) -> str:
    """LDS in projected space by dimension, and by how rows are stored."""
    rows = [
        [
            row["projection"],
            f"{row['dimension']:,}",
            row["rows"],
            f"{row['bytes']:,}",
            estimate(row["lds"][0], row["lds"][1:], 2),
            estimate(row["ensemble"][0], row["ensemble"][1:], 2),
            f"{row['seconds']:.2f}",
        ]
        for row in study["rows"]
    ]
    runs = study["settings"]["runs"]
    heads = ["projection", "dimension", "rows", "bytes of a row", "LDS, one model"]
    heads += [f"LDS, {runs} models", "seconds, warm"]
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
    scatter(RESULTS, DOCS / "figures/methods.png")
