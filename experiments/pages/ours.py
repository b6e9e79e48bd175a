"""Our defaults beside the paper's forms, from results/forms.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.pages.markdown import listed, table
from experiments.pages.tables import NOISY, counted, title, with_interval
from experiments.tasks import TASKS
from experiments.tasks.forms import (
    BASELINES,
    BEST,
    INFLUENCE,
    PUBLISHED,
    RULE,
    default_of,
    read_results,
)

Entry = Mapping[str, Any]  # one task under one protocol
Row = Mapping[str, Any]

OURS = "`Source()`"
SHOWN = {  # forms in the table and the figure; Source() is `default_of` a task
    INFLUENCE: "influence, published",
    PUBLISHED: "SOURCE, published",
    "influence, coupled": "`Influence()`",
    None: OURS,
    BEST: "`Best()`",
    "combined, 20 retrainings": "combined, 20 retrainings",
}
PUBLISHED_METHODS = (*BASELINES, "RepSim", "TracIn", "TRAK")
RIGHT_SIZE = (0.5, 2.0)  # of the spread
KINDS = {"single": "one model", "ensemble": "ensemble"}


def read(folder: Path) -> dict[str, list[Entry]]:
    """{task: its entries}, in the catalogue's order, without quick versions.

    An entry's `source` is the name of the form that Source() is.
    """
    stored = read_results(folder / "forms.json")["tasks"]
    full = {
        task: [
            entry | {"source": default_of(TASKS[task])}
            for entry in stored.get(task, [])
            if not entry["protocol"]["quick"]
        ]
        for task in TASKS
    }
    return {task: entries for task, entries in full.items() if entries}


def shown(entries: Sequence[Entry]) -> Entry:
    """The entry on the first page: one with Source() that did not choose, at α = ½, with most of
    `SHOWN`, and with most trainings."""

    def order(entry: Entry) -> tuple[int, ...]:
        of, forms = entry["protocol"], entry["forms"]
        there = entry["source"] in forms, not entry["chosen_on"], bool(of["alpha"] == 0.5)
        return *there, len(SHOWN.keys() & forms.keys()), int(of["subsets"] * of["seeds"])

    return max(entries, key=order)


def ours(task: str, entry: Entry) -> Row | None:
    """The row of Source()."""
    row: Row | None = entry["forms"].get(default_of(TASKS[task]))
    return row


def columns(results: Mapping[str, Sequence[Entry]]) -> dict[str | None, str]:
    """The forms of `SHOWN` that some task has."""
    names = {name for entries in results.values() for name in shown(entries)["forms"]}
    return {name: head for name, head in SHOWN.items() if name is None or name in names}


def form(task: str, name: str | None) -> str:
    return default_of(TASKS[task]) if name is None else name


def gap(entry: Entry, row: Row, baseline: str, kind: str) -> tuple[float, float] | None:
    """An interval that contains a form's LDS minus a published form's: the paired one, or, where
    there is none, that of the two intervals' ends."""
    paired = row["over"].get(baseline, {}).get(kind)
    if paired is not None:
        return paired[1], paired[2]
    mine, theirs = row[kind], entry["forms"].get(baseline, {}).get(kind)
    return (mine[1] - theirs[2], mine[2] - theirs[1]) if mine and theirs else None


# --- the first page -----------------------------------------------------------------------------


def main_table(results: Mapping[str, Sequence[Entry]]) -> str:
    """A row for each task: LDS of one model and of the ensemble, Source()'s lead and its spread."""
    heads = columns(results)
    rows: list[list[object]] = []
    for task in TASKS:
        if task not in results:
            continue
        entry = shown(results[task])
        cells = [_both(entry["forms"].get(form(task, name))) for name in heads]
        row = ours(task, entry)
        lead = None if row is None else row["over"].get(PUBLISHED, {}).get("single")
        spread = None if row is None else f"{row['spread']:.2f}"
        mark = " †" if entry["chosen_on"] else ""
        rows.append([title(task) + mark, _ceiling(entry), *cells, _signed(lead), spread])
    first = ["task", "ceiling"]
    last = [f"{OURS} − SOURCE, published", "spread"]
    return table([*first, *heads.values(), *last], rows, " " + "r" * (len(heads) + 3))


def _both(row: Row | None) -> str | None:
    """'0.46 / 0.53': one model, ensemble."""
    if row is None:
        return None
    values = [row[kind] for kind in KINDS]
    return " / ".join("–" if v is None else f"{v[0]:.2f}" for v in values)


def _signed(value: Sequence[float] | None) -> str | None:
    return None if value is None else f"{value[0]:+.2f} [{value[1]:+.2f}, {value[2]:+.2f}]"


def ceiling(entry: Entry) -> float | None:
    """The noise ceiling of an entry's truth; None with one seed."""
    known = (row["ceiling"] for row in entry["forms"].values())
    return next((value for value in known if value is not None), None)


def _ceiling(entry: Entry) -> str | None:
    value = ceiling(entry)
    return None if value is None else f"{value:.2f}"


def sentences(results: Mapping[str, Sequence[Entry]]) -> str:
    """What the data says about the aims: first, never below, of the right size."""
    if not results:
        return "*Not run yet.*"
    parts = [_where(results), _first(results), _never_below(results), _size(results)]
    parts += [text for text in (_best(results), _combined(results)) if text]
    return "\n".join(f"- {text}" for text in parts)


def _where(results: Mapping[str, Sequence[Entry]]) -> str:
    chosen = [t for t, entries in results.items() if any(e["chosen_on"] for e in entries)]
    again = [
        t
        for t in chosen
        if any(e["source"] in e["forms"] and not e["chosen_on"] for e in results[t])
    ]
    others = [t for t in results if t not in chosen]
    text = f"The defaults were chosen on {_titles(chosen)}" if chosen else "No task chose"
    if again:
        text += f", and tested with new queries, runs and retrainings on {_titles(again)}"
    if others:
        verb = "tests" if len(others) == 1 else "test"
        text += f". {counted(len(others), 'other task')} {verb} them"
    absent = [task for task in TASKS if task not in results]
    text += f". Run with the paper's forms only: {_titles(absent)}." if absent else "."
    return text + " † marks numbers of a task that chose."


def _titles(tasks: Sequence[str]) -> str:
    return _joined([title(task) for task in tasks])


def _joined(names: Sequence[str]) -> str:
    return "; ".join(names) if any("," in name for name in names) else listed(names)


def _first(results: Mapping[str, Sequence[Entry]]) -> str:
    """On how many tasks Source() is above all published methods."""
    known: list[tuple[str, bool]] = []
    unknown: list[tuple[str, bool]] = []
    everywhere = set(PUBLISHED_METHODS)
    for task, entries in results.items():
        entry = shown(entries)
        row, limit = ours(task, entry), ceiling(entry)
        if row is None or (limit is not None and limit < NOISY):
            continue
        rivals = [name for name in PUBLISHED_METHODS if name in entry["forms"]]
        everywhere &= set(rivals)
        first = all(row["single"][0] >= entry["forms"][name]["single"][0] for name in rivals)
        (unknown if limit is None else known).append((task, first))
    texts = [
        f"**first on {sum(first for _, first in pairs)} of {counted(len(pairs), 'task')}** whose "
        f"ceiling {where}" + _not_on([task for task, first in pairs if not first])
        for pairs, where in (
            (known, "allows a difference"),
            (unknown, "is not known (one seed)"),
        )
        if pairs
    ]
    if not texts:
        return "No task can say which method is first yet."
    rivals = [SHOWN.get(name, name) for name in PUBLISHED_METHODS if name in everywhere]
    return f"With one model, {OURS} is {'; '.join(texts)}. Compared with {_joined(rivals)}."


def _best(results: Mapping[str, Sequence[Entry]]) -> str | None:
    """By how much Best() is above Source(), with one model."""
    gains = {}
    for task, entries in results.items():
        entry = shown(entries)
        row, best = ours(task, entry), entry["forms"].get(BEST)
        if row is not None and best is not None:
            gains[task] = best["single"][0] - row["single"][0]
    if not gains:
        return None
    above = sum(gain > 0 for gain in gains.values())
    each = [f"{title(task)} {gain:+.2f}" for task, gain in gains.items()]
    return (
        f"[`Best()`](best.md), one model: above {OURS} on {above} of "
        f"{counted(len(gains), 'task')} ({_joined(each)})."
    )


def _not_on(tasks: Sequence[str]) -> str:
    return f" (not on {_titles(tasks)})" if tasks else ""


def _never_below(results: Mapping[str, Sequence[Entry]]) -> str:
    """Whether Source() is anywhere below a published form beyond the interval."""
    below, compared = [], 0
    for task, entry, row in _all(results):
        for baseline in BASELINES:
            for kind, word in KINDS.items():
                interval = gap(entry, row, baseline, kind)
                compared += interval is not None
                if interval is not None and interval[1] < 0:
                    alpha = entry["protocol"]["alpha"]
                    below.append(f"{title(task)}, {SHOWN[baseline]}, {word}, α = {alpha:g}")
    return f"{OURS} below a published form beyond the interval: " + (
        f"**yes**: {'; '.join(below)}." if below else f"never, in {compared} comparisons."
    )


def _all(results: Mapping[str, Sequence[Entry]]) -> Iterator[tuple[str, Entry, Row]]:
    """Task, entry and row of Source(), of all protocols."""
    for task, entries in results.items():
        for entry in entries:
            row = ours(task, entry)
            if row is not None:
                yield task, entry, row


def _size(results: Mapping[str, Sequence[Entry]]) -> str:
    low, high = RIGHT_SIZE
    rows = {task: ours(task, shown(entries)) for task, entries in results.items()}
    sizes = {task: row["spread"] for task, row in rows.items() if row is not None}
    outside = {task: size for task, size in sizes.items() if not low <= size <= high}
    text = (
        f"The spread of {OURS} (predicted / real, one model) is between {low:g} and {high:g} on "
        f"{len(sizes) - len(outside)} of {counted(len(sizes), 'task')}"
    )
    if not outside:
        return f"{text}."
    named = []
    for task, size in outside.items():
        limit = ceiling(shown(results[task]))
        noise = limit is not None and limit < NOISY
        why = f" (ceiling {limit:.2f}: the real changes are noise)" if noise else ""
        named.append(f"{title(task)} {size:.2g}{why}")
    return f"{text}; outside: {listed(named)}."


def _combined(results: Mapping[str, Sequence[Entry]]) -> str:
    """What 20 retrainings add."""
    name = "combined, 20 retrainings"
    better: list[str] = []
    worse: list[str] = []
    former: list[str] = []
    for task, entries in results.items():
        entry = shown(entries)
        row, combined = ours(task, entry), entry["forms"].get(name)
        if row is not None and combined is not None:
            if combined.get("rule") != RULE:
                former.append(task)
            gain = combined["single"][0] - row["single"][0]
            (better if gain > 0 else worse).append(f"{title(task)} {gain:+.2f}")
    if not better and not worse:
        return ""
    text = f"Combining with 20 retrainings, one model: above {OURS} on {len(better)} of "
    text += counted(len(better) + len(worse), "task")
    text += f" ({', '.join([*better, *worse])})."
    if former:
        text += f" The weights of {_titles(former)} were fitted by an earlier rule of `combine`."
    return text


# --- the appendix -------------------------------------------------------------------------------


def numbers(results: Mapping[str, Sequence[Entry]]) -> str:
    """Every form of every task and protocol."""
    parts = []
    for task, entries in results.items():
        parts.append(f"### {title(task)}, forms")
        for entry in entries:
            parts += [_all_forms(entry), about(entry)]
    return "\n\n".join(parts) if parts else "*Not run yet.*"


def _all_forms(entry: Entry) -> str:
    rows = [
        [
            name,
            with_interval(row["single"], 3),
            with_interval(row["ensemble"], 3),
            f"{row['slope']:.2g}",
            f"{row['spread']:.2g}",
            *(_signed(row["over"].get(b, {}).get("single")) for b in BASELINES),
            f"{row['seconds']:.1f}",
        ]
        for name, row in entry["forms"].items()
    ]
    heads = ["form", "LDS, one model", "LDS, ensemble", "slope", "spread"]
    heads += ["− SOURCE, published", "− influence, published", "seconds"]
    return table(heads, rows, " rrrrrrr")


def about(entry: Entry) -> str:
    """The protocol, machine and versions behind the numbers."""
    of, machine, known = entry["protocol"], entry["machine"], ceiling(entry)
    last = of["first_query"] + of["queries"] - 1
    parts = [
        f"{of['subsets']} subsets × {counted(of['seeds'], 'seed')} at α = {of['alpha']:g}",
        "noise ceiling not known" if known is None else f"noise ceiling {known:.2f}",
        f"queries {of['first_query']} to {last}",
        f"{counted(of['runs'], 'run')} from number {of['first_run']}",
        f"retrainings from seed {of['first_seed']}",
        "chose the defaults" if entry["chosen_on"] else "not used to choose",
    ]
    return (
        f"{'; '.join(parts)}. {entry['device']}, torch {machine['torch']}, {machine['date']}: "
        "`python -m experiments.studies.forms`."
    )
