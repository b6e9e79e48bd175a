"""docs/leaderboard.md: one table per protocol, all tasks, and LDS against cost.

python -m experiments.leaderboard
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from experiments.engine.rivals import RIVALS
from experiments.pages.leaderboard_advice import (
    agreements,
    calibrations,
    failures,
    is_peer,
    libraries,
    measured,
    picks,
    refusals,
)
from experiments.pages.markdown import DOCS, filled, table
from experiments.pages.tables import counted
from experiments.tasks import RESULTS
from experiments.tasks.board import BOARD, ENTRIES, PROTOCOLS, Protocol, read_board
from whence.evaluate.plots import COLOURS, GREY, STYLE
from whence.table import estimate

Tasks = Mapping[str, Mapping[str, Any]]  # entries of one protocol
FIGURES = "assets/leaderboard"  # below docs/; those in figures/ are drawn on white
INK = {"light": "#1a1a1a", "dark": "#e6e6e6"}
EARLIER = "† metasmoothness by an earlier definition: weighted by the first half of the way only."
ANOTHER = "‡"  # a row that other retrainings judged
ELSEWHERE = (
    "Hollow points are other libraries. If the tables below name a device next to the seconds of a "
    "row, that device computed it: do not compare its cost with that of other rows."
)
OURS = ("Source()", "Influence()", "Best()", "Unrolled (MAGIC)", "Unrolled, expected")
MARKERS = "osD^vP*X<>dph8"
PEER = "#8e6bd1"  # other libraries


def tasks_of(stored: Mapping[str, Any], protocol: Protocol) -> Tasks:
    """The entries of a protocol in the leaderboard's order, without quick versions."""
    entries = stored["protocols"].get(protocol.name, {})
    return {t: entries[t] for t in BOARD if t in entries and not entries[t]["sizes"]["quick"]}


def level_with_best(row: Mapping[str, Any]) -> bool:
    """Whether a method is not worse than the best, as far as the subsets can tell. Nothing is known
    of a row of other retrainings, which has no paired difference."""
    return "behind" in row and (row["behind"] is None or row["behind"][1] <= 0)


def names_of(tasks: Tasks) -> list[str]:
    """The methods of some tasks in the leaderboard's order, then those of other libraries."""
    shown = dict.fromkeys(name for entry in tasks.values() for name in entry["methods"])
    return [*(n for n in ENTRIES if n in shown), *(n for n in shown if n not in ENTRIES)]


def overview(tasks: Tasks) -> str:
    """Methods by tasks: LDS, bold where no other is certainly better."""
    names, most = names_of(tasks), measured(tasks) or tasks

    def place(name: str) -> tuple[bool, float]:
        """Those that have a row on all tasks that most have come first: means are of the same."""
        values = [e["methods"][name]["lds"][0] for e in most.values() if name in e["methods"]]
        return len(values) == len(most), float(sum(values) / max(1, len(values)))

    def cell(entry: Mapping[str, Any], name: str) -> str | None:
        row = entry["methods"].get(name)
        if row is None:
            return None
        value = f"{row['lds'][0]:.2f}"
        return f"**{value}**" if level_with_best(row) else value

    rows: list[list[object]] = [
        [name, *(cell(entry, name) for entry in tasks.values())]
        for name in sorted(names, key=place, reverse=True)
    ]
    for label, key in (("*ceiling*", None), ("*metasmoothness*", "metasmoothness")):
        cells = [_ceiling(e) if key is None else e[key] for e in tasks.values()]
        marks = ["" if key is None or "definition" in e else "†" for e in tasks.values()]
        numbers = [None if c is None else f"{c:.2f}{m}" for c, m in zip(cells, marks, strict=True)]
        rows.append([label, *numbers])
    rows.append(["*seconds of*", *(short(e["device"]) for e in tasks.values())])
    heads = ["method", *(BOARD[task].title for task in tasks)]
    return table(heads, rows, " " + "r" * len(tasks))


def standing(tasks: Tasks) -> str:
    """On how many tasks each method is level with the best, most first."""
    level = dict.fromkeys(names_of(tasks), 0)
    rows = dict.fromkeys(level, 0)
    for entry in tasks.values():
        for name, row in entry["methods"].items():
            level[name] += level_with_best(row)
            rows[name] += 1
    ahead = sorted((n for n in level if level[n]), key=lambda name: -level[name])
    counts = ", ".join(f"{name} on {level[name]} of {rows[name]}" for name in ahead)
    return f"Tasks on which each method is the best, or not certainly worse: {counts}."


def _ceiling(entry: Mapping[str, Any]) -> float | None:
    rows = [row for row in entry["methods"].values() if "behind" in row]
    return next((row["ceiling"] for row in rows if row["ceiling"] is not None), None)


def details(task: str, entry: Mapping[str, Any]) -> str:
    """One task: interval, paired difference, size and cost of every method, best first."""
    rows = []
    for name, row in sorted(entry["methods"].items(), key=lambda item: -item[1]["lds"][0]):
        behind, slope = row.get("behind"), row["slope"]
        rows.append(
            [
                name + (ANOTHER if "behind" not in row else ""),
                estimate(row["lds"][0], row["lds"][1:], 2),
                None if behind is None else estimate(behind[0], behind[1:], 2),
                None if slope is None else f"{slope:.2g}",
                f"{row['seconds']:.1f}" + (f" ({row['device']})" if "device" in row else ""),
            ]
        )
    ceiling = _ceiling(entry)
    noise = "" if ceiling is None else f", ceiling {ceiling:.2f}"
    about = (
        f"{size_of(entry['sizes'])}{noise}; "
        f"{where(entry)}, torch {entry['machine']['torch']}, {entry['machine']['date']}."
    )
    others = [row["sizes"] for row in entry["methods"].values() if "behind" not in row]
    if others:
        which = "; ".join(dict.fromkeys(map(size_of, others)))
        about += f" {ANOTHER} by other retrainings ({which}), so there is no paired difference."
    heads = ["method", "LDS [95 %]", "behind [95 %]", "slope", "seconds"]
    return (
        f'<details markdown="1"><summary>{BOARD[task].title}</summary>\n\n'
        f"{table(heads, rows, ' rrrr')}\n\n{about}\n\n</details>"
    )


def size_of(sizes: Mapping[str, Any]) -> str:
    seeds = counted(sizes["seeds"], "seed")
    return f"{sizes['subsets']} subsets × {seeds}, {sizes['queries']} queries"


def where(entry: Mapping[str, Any]) -> str:
    """What the seconds of a task are of."""
    return "processor seconds of a CPU" if entry["device"] == "CPU" else str(entry["device"])


def short(device: str) -> str:
    """A device's name for the head of a column."""
    return device.removeprefix("NVIDIA ")


def tables_part(stored: Mapping[str, Any]) -> str:
    parts = []
    for protocol in PROTOCOLS:
        tasks = tasks_of(stored, protocol)
        parts.append(f"## {protocol.title}")
        if not tasks:
            parts.append("*Not run yet.*")
            continue
        parts += [standing(tasks), overview(tasks)]
        if not all("definition" in entry for entry in tasks.values()):
            parts.append(EARLIER)
        for mode in INK:
            picture = f"{FIGURES}/{protocol.name}-{mode}.svg#only-{mode}"
            parts.append(f"![LDS against seconds, {protocol.title.lower()}]({picture})")
        if any("device" in row for e in tasks.values() for row in e["methods"].values()):
            parts.append(ELSEWHERE)
        parts += [details(task, entry) for task, entry in tasks.items()]
    return "\n\n".join(parts)


def tasks_part(stored: Mapping[str, Any]) -> str:
    return table(["task", "training"], [[one.title, one.setting] for one in BOARD.values()])


def methods_part(stored: Mapping[str, Any]) -> str:
    rows = [[name, one.of, one.needs] for name, one in ENTRIES.items()]
    rows += [[name, of, "retrainings"] for name, (_, of) in RIVALS.items()]
    return table(["method", "what it is", "needs"], rows)


def text(folder: Path = RESULTS) -> str:
    """The page."""
    stored = read_board(folder / "leaderboard.json")
    parts = {"tables": tables_part, "tasks": tasks_part, "methods": methods_part}
    makers = {name: partial(make, stored) for name, make in parts.items()}
    tasks = {protocol.name: tasks_of(stored, protocol) for protocol in PROTOCOLS}
    advice = {"picks": picks, "calibration": calibrations, "failures": failures}
    advice |= {"libraries": libraries, "agreement": agreements, "refusals": refusals}
    makers |= {name: partial(make, tasks) for name, make in advice.items()}
    return filled("leaderboard.template.md", makers)


def scatter(tasks: Tasks, mode: str) -> Figure:
    """LDS against seconds, one panel for each task; one marker for each method."""
    ink, columns = INK[mode], min(3, len(tasks))
    grid = -(-len(tasks) // columns)
    style = STYLE | dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), ink
    )
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(3.0 * columns, 2.4 * grid + 0.8), layout="constrained")
        figure.patch.set_alpha(0)
        panels = figure.subplots(grid, columns, squeeze=False).ravel()
        for axis in panels[len(tasks) :]:
            axis.remove()
        handles = {}
        for axis, (task, entry) in zip(panels, tasks.items(), strict=False):
            axis.patch.set_alpha(0)
            title = f"{BOARD[task].title} ({short(entry['device'])})"
            axis.set(title=title, xscale="log", ylim=(-0.15, 1.05))
            axis.xaxis.set_minor_formatter(NullFormatter())  # they would overlap
            for name, label, look in _looks(names_of(tasks)):
                row = entry["methods"].get(name)
                if row is None:
                    continue
                value, low, high = row["lds"]
                handles[label] = axis.errorbar(
                    max(row["seconds"], 1e-2),
                    value,
                    [[max(0.0, value - low)], [max(0.0, high - value)]],
                    linestyle="none",
                    elinewidth=0.7,
                    **look,
                )
            ceiling = _ceiling(entry)
            if ceiling is not None:
                axis.axhline(ceiling, color=GREY, linewidth=0.7, linestyle=":")
        figure.supxlabel("seconds of one run, all queries", fontsize=9, color=ink)
        figure.supylabel("LDS", fontsize=9, color=ink)
        figure.legend(
            list(handles.values()), list(handles), loc="outside upper center", ncols=4, fontsize=8
        )
    return figure


def _looks(names: list[str]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The label and the look of each method: ours in colours, re-made ones in grey, those of other
    libraries hollow, with one label for a library."""
    markers, libraries = iter(MARKERS * 2), dict[str, str]()
    colours = cycle(COLOURS)
    for name in names:
        if is_peer(name):
            library = name.split(",")[0]
            if library not in libraries:
                libraries[library] = MARKERS[len(libraries) % len(MARKERS)]
            look = {"marker": libraries[library], "markerfacecolor": "none"}
            yield name, f"{library} (library)", {"color": PEER, **look}
        else:
            colour = next(colours) if name in OURS else GREY
            yield name, name, {"color": colour, "marker": next(markers)}


def main() -> None:
    stored = read_board(RESULTS / "leaderboard.json")
    (DOCS / "leaderboard.md").write_text(text())
    for protocol in PROTOCOLS:
        tasks = tasks_of(stored, protocol)
        for mode in INK if tasks else ():
            path = DOCS / FIGURES / f"{protocol.name}-{mode}.svg"
            path.parent.mkdir(parents=True, exist_ok=True)
            with matplotlib.rc_context({"svg.hashsalt": "whence", "svg.fonttype": "none"}):
                scatter(tasks, mode).savefig(path, metadata={"Date": None})
    print(DOCS / "leaderboard.md")
