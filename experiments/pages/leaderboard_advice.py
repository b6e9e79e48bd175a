"""What the leaderboard's results say to a user: what to pick, how large predictions are, failures.

Every sentence and number is made of the results. A situation without results is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.engine.rivals import RIVALS
from experiments.pages.markdown import table
from experiments.tasks.board import BOARD, ENTRIES, EXPECTED, FINAL, PROTOCOLS, SINGLE, Protocol
from whence.evaluate.metasmoothness import ROUGH
from whence.table import estimate

Entry = Mapping[str, Any]  # of a task under a protocol
Tasks = Mapping[str, Entry]
SMALL = 0.1  # a gap in LDS that matters
TIMES = 2.0  # a slope within 1/2 and 2 is about the right size
QUICK_SECONDS = 5.0
AGAINST = ("Source()", "Best()")  # that other libraries are compared with
NEARLY = 0.9  # of the methods: one that does not apply to a task does not take the task away


@dataclass(frozen=True)
class Situation:
    """A question of a user.

    Attributes:
        of: the question.
        protocol: that measures it.
        tasks: which tasks are like it, by name and entry.
        methods: which methods apply, by name and row.
    """

    of: str
    protocol: Protocol
    tasks: Callable[[str, Entry], bool] = lambda name, entry: True
    methods: Callable[[str, Mapping[str, Any]], bool] = lambda name, row: True


def is_smooth(name: str, entry: Entry) -> bool:
    return bool(entry["metasmoothness"] >= ROUGH)


def is_language(name: str, entry: Entry) -> bool:
    return name.startswith("gpt")


def needs_only_the_end(name: str, row: Mapping[str, Any]) -> bool:
    """Whether a method needs no more than the final checkpoint; as other libraries' do."""
    return name not in RIVALS and (name not in ENTRIES or ENTRIES[name].needs == FINAL)


def situations() -> list[Situation]:
    single, _, expected = PROTOCOLS
    return [
        Situation("this model, and its training is smooth", single, is_smooth),
        Situation(
            "this model, and its training is rough", single, lambda n, e: not is_smooth(n, e)
        ),
        Situation("a model trained like this: SGD", expected, lambda n, e: not is_language(n, e)),
        Situation("a model trained like this: a GPT, AdamW", expected, is_language),
        Situation(
            "the same, from the final checkpoint alone", expected, methods=needs_only_the_end
        ),
        Situation(
            f"the same, in less than {QUICK_SECONDS:.0f} seconds of each task's machine",
            expected,
            methods=lambda n, row: row["seconds"] < QUICK_SECONDS,
        ),
    ]


def picks(by_protocol: Mapping[str, Tasks]) -> str:
    """For each situation the methods with the highest mean LDS."""
    rows = []
    for one in situations():
        tasks = measured(by_protocol.get(one.protocol.name, {}))
        chosen = {name: entry for name, entry in tasks.items() if one.tasks(name, entry)}
        ranked = ranking(chosen, one.methods)
        if ranked:
            kind = SINGLE if one.protocol.in_place else EXPECTED
            best = ", ".join(f"{name} {value:.2f} ± {half:.2f}" for name, value, half in ranked[:3])
            rows.append([one.of, kind, len(chosen), best])
    heads = ["you ask about", "protocol", "tasks", "highest mean LDS ± 95 %"]
    return table(heads, rows, "  r ") if rows else "*Not run yet.*"


def measured(tasks: Tasks) -> Tasks:
    """The tasks with a row of nearly every method that most tasks have: on others, the best methods
    may still be missing."""
    count = Counter(name for entry in tasks.values() for name in entry["methods"])
    usual = {name for name, times in count.items() if 2 * times > len(tasks)}
    return {
        task: entry
        for task, entry in tasks.items()
        if len(usual & set(entry["methods"])) >= NEARLY * len(usual)
    }


def ranking(
    tasks: Tasks, applies: Callable[[str, Mapping[str, Any]], bool]
) -> list[tuple[str, float, float]]:
    """The methods that have a row on each of these tasks, and their mean LDS, best first, with half
    of its 95 % interval: the tasks have subsets of their own, so their errors are independent."""
    rows = [entry["methods"] for entry in tasks.values()]
    if not rows:
        return []
    everywhere = [name for name in rows[0] if all(name in row for row in rows)]
    able = [name for name in everywhere if all(applies(name, row[name]) for row in rows)]
    lds = {name: np.array([row[name]["lds"] for row in rows]) for name in able}
    halves = {name: np.linalg.norm(x[:, 2] - x[:, 1]) / 2 / len(x) for name, x in lds.items()}
    means = [(name, float(x[:, 0].mean()), float(halves[name])) for name, x in lds.items()]
    return sorted(means, key=lambda item: -item[1])


def calibrations(by_protocol: Mapping[str, Tasks]) -> str:
    """How large each method's predictions are: the slope's median and range over the tasks."""
    names = dict.fromkeys(
        name for t in by_protocol.values() for entry in t.values() for name in entry["methods"]
    )
    rows = []
    for name in names:
        cells: list[object] = [name]
        for protocol in PROTOCOLS:
            entries = by_protocol.get(protocol.name, {}).values()
            every = [e["methods"][name]["slope"] for e in entries if name in e["methods"]]
            slopes = [slope for slope in every if slope is not None]
            cells.append(_slopes(slopes) if slopes else None)
        rows.append(cells)
    heads = ["method", *(protocol.title for protocol in PROTOCOLS)]
    return table(heads, rows, " " + "r" * len(PROTOCOLS)) if rows else "*Not run yet.*"


def _slopes(slopes: list[float]) -> str:
    right = sum(1 / TIMES <= slope <= TIMES for slope in slopes)
    low, middle, high = np.percentile(slopes, [0, 50, 100])
    return f"{middle:.2g} ({low:.2g} to {high:.2g}); {right} of {len(slopes)}"


def failures(by_protocol: Mapping[str, Tasks]) -> str:
    """Where each method is certainly behind the best, and where it predicts nothing."""
    parts = []
    heads = ["method", f"behind by more than {SMALL:g}", "predicts nothing", "no row"]
    for protocol in PROTOCOLS:
        tasks, rows = by_protocol.get(protocol.name, {}), []
        for name in dict.fromkeys(n for entry in tasks.values() for n in entry["methods"]):
            here = {t: e["methods"][name] for t, e in tasks.items() if name in e["methods"]}
            behind = [t for t, r in here.items() if r.get("behind") and r["behind"][1] > SMALL]
            nothing = [t for t, r in here.items() if r["lds"][1] <= 0]
            absent = [t for t in tasks if t not in here and not is_peer(name)]
            if behind or nothing or absent:
                rows.append([name, *(_titles(each, tasks) for each in (behind, nothing, absent))])
        if rows:
            parts.append(
                f'<details markdown="1"><summary>{protocol.title}</summary>\n\n'
                f"{table(heads, rows)}\n\n</details>"
            )
    return "\n\n".join(parts) or "*Not run yet.*"


def _titles(names: list[str], tasks: Tasks) -> str | None:
    if names and len(names) == len(tasks):
        return "all tasks"
    return "; ".join(BOARD[name].title for name in names) or None


def is_peer(name: str) -> bool:
    """Whether a row is of another library's own code."""
    return name not in ENTRIES and name not in RIVALS


def libraries(by_protocol: Mapping[str, Tasks]) -> str:
    """How well other libraries' own code predicts, next to ours."""
    rows: list[list[object]] = []
    for protocol in PROTOCOLS:
        for task, entry in by_protocol.get(protocol.name, {}).items():
            peers = {n: row for n, row in entry["methods"].items() if is_peer(n)}
            for name, row in sorted(peers.items(), key=lambda item: -item[1]["lds"][0]):
                gaps = [row.get("over", {}).get(other) for other in AGAINST]
                rows.append(
                    [
                        name,
                        BOARD[task].title,
                        protocol.name,
                        estimate(row["lds"][0], row["lds"][1:], 2),
                        *(gap and estimate(gap[0], gap[1:], 2) for gap in gaps),
                        f"{row['seconds']:.1f}",
                    ]
                )
    gaps = [f"minus {name} [95 %]" for name in AGAINST]
    heads = ["library, method", "task", "protocol", "LDS [95 %]", *gaps, "seconds"]
    return table(heads, rows, "   rrrr") if rows else "*Not run yet.*"


def agreements(by_protocol: Mapping[str, Tasks]) -> str:
    """How the scores of other libraries agree with our re-makes on the same run."""
    rows: dict[tuple[str, str], list[object]] = {}
    faults: dict[str, str] = {}
    for tasks in by_protocol.values():
        for task, entry in tasks.items():
            for name, row in entry["methods"].items():
                if "agreement" in row:
                    cells = [name, row["method"], BOARD[task].title, f"`{row['remake']}`"]
                    mended = f"{row['mended']:.3f}" if "mended" in row else None
                    rows[name, task] = [*cells, f"{row['agreement']:.3f}", mended]
                    if "faults" in row:
                        faults[name] = f"**{name}** ({row['method']}) {row['faults']}."
    if not rows:
        return "*Not run yet.*"
    heads = ["library, method", "version", "task", "ours", "rank correlation", "mended"]
    ordered = [rows[key] for key in sorted(rows)]
    return "\n\n".join([table(heads, ordered, "    rr"), *faults.values()])


def refusals(by_protocol: Mapping[str, Tasks]) -> str:
    """Why a library's method has no row on a task."""
    rows: dict[tuple[str, str], list[object]] = {}
    for tasks in by_protocol.values():
        for task, entry in tasks.items():
            for name, reason in entry.get("refused", {}).items():
                rows[name, task] = [name, BOARD[task].title, reason.replace("|", "\\|")]
    if not rows:
        return ""
    ordered = [rows[key] for key in sorted(rows)]
    return table(["no row", "task", "because"], ordered)
