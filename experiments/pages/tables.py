"""Results as tables: what `whence reproduce` prints, and what the results page is made of."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from experiments.engine.reproduce import SCHEMA
from experiments.tasks import TASKS, Experiment
from whence.table import Table, estimate

Found = Mapping[str, Any]
PARTS = {
    "alpha": "LDS over α",
    "epochs": "LDS over epochs, α = 0.9",
    "optimum": "LDS at the optimum, over α",
}
NOISY = 0.1  # a noise ceiling below which methods cannot be told apart
BASELINES = ("RepSim", "TracIn", "TRAK", "influence")  # of the paper's figures


def read(folder: Path, part: str = "lds") -> dict[str, Found]:
    """The result of every task that has one; the quick one where the whole has none of a part."""
    found = {}
    for task in TASKS:
        for name in (task, f"{task}-quick"):
            file = Path(folder) / f"{name}.json"
            known = json.loads(file.read_text()) if file.is_file() else {}
            if known and known["schema"] != SCHEMA:
                raise ValueError(
                    f"{file} is of version {known['schema']}, not {SCHEMA}: make it again"
                )
            if known.get("lds") and known.get(part):
                found[task] = known
                break
    return found


def title(task: str, found: Found | None = None) -> str:
    """A task's name at the head of something; says when the result is of the small version."""
    name = TASKS[task].title
    return name[0].upper() + name[1:] + (" (quick)" if found and found["quick"] else "")


def so_many(number: int, what: str) -> str:
    """'1 model', '2 models'."""
    return f"{number} {what}" + ("" if number == 1 else "s")


def baselines(experiment: Experiment) -> tuple[str, ...]:
    """What SOURCE is compared with on a task."""
    return tuple(name for name in BASELINES if name in experiment.methods)


def shown(value: list[float] | None, digits: int = 2) -> str | None:
    """'0.46 [0.44, 0.48]'"""
    return None if value is None else estimate(value[0], value[1:], digits)


def lds_table(found: Found, experiment: Experiment, best_first: bool = False) -> Table:
    """One row per method: in the experiment's order, or by the ensemble's LDS."""
    order = (*experiment.methods, "Downsampling", *experiment.expensive)
    places = {name: k for k, name in enumerate(order)}
    entries = sorted(found["lds"].items(), key=lambda item: places.get(item[0], len(places)))
    if best_first:
        entries.sort(key=lambda item: -(item[1]["ensemble"] or item[1]["single"])[0])
    rows = [
        [
            label(name, experiment),
            shown(entry["single"]),
            shown(entry["ensemble"]),
            entry["of"]["runs"] or f"{entry['of']['models']} half-data",
            f"{entry['slope']:.2g}",
            f"{entry['seconds']:.1f}",
        ]
        for name, entry in entries
    ]
    heads = ["method", "LDS, one model", "LDS, ensemble", "models", "slope", "seconds"]
    return Table(heads, rows)


def label(name: str, experiment: Experiment) -> str:
    """A method's name with what is special to the task."""
    segmented = ("SOURCE", "FastSource", "SOURCE, λP⁻¹", "SOURCE, exact")
    many = name in segmented and experiment.segments > 1
    return f"{name}, L = {experiment.segments}" if many else name


def over(found: Found, part: str) -> Table | None:
    """LDS over α or over the number of epochs, one column each; of one model."""
    by_column = over_values(found, part)
    if not by_column:
        return None
    columns = sorted(by_column)
    names = list(dict.fromkeys(name for k in columns if k != 0.5 for name in by_column[k]))
    names = names or list(found["lds"])
    rows = []
    for name in names:
        cells = [by_column[k].get(name) for k in columns]
        rows.append([name, *(c and shown(c["single"] or c["ensemble"]) for c in cells)])
    heads = ["1 − 1/N" if k == 1 and part != "epochs" else format(k, "g") for k in columns]
    return Table(["epochs" if part == "epochs" else "α", *heads], rows)


def over_values(found: Found, part: str) -> dict[float, Any]:
    """{α or epochs: {method: entry}}; α = ½ is what was judged first."""
    by_column: dict[float, Any] = {float(k): v for k, v in found.get(part, {}).items()}
    if by_column and part == "alpha":
        by_column[0.5] = found["lds"]
    return by_column


def removal_table(found: Found) -> Table | None:
    """Share of the queries that flipped, by method and k."""
    if "removal" not in found:
        return None
    r = found["removal"]
    rows = [
        [
            name,
            *(shown([p, *around]) for p, around in zip(shares, r["interval"][name], strict=True)),
        ]
        for name, shares in r["flipped"].items()
    ]
    return Table(["removed, at most", *map(str, r["k"])], rows)


def about(found: Found) -> str:
    """On what the numbers stand."""
    m, parts = found["machine"], [f"{found['examples']:,} training examples"]
    if found["lds"]:
        first = next(iter(found["lds"].values()))
        of, ceiling = first["of"], first["ceiling"]
        parts.append(
            f", {of['queries']} queries; truth: {of['subsets']} subsets × "
            f"{so_many(of['seeds'], 'seed')}"
        )
        parts.append("" if ceiling is None else f", noise ceiling {ceiling:.2f}")
        if ceiling is not None and ceiling < NOISY:
            parts.append(" (so few seeds tell the subsets' models no better apart than chance)")
        parts.append(f"; {first['diverged']} trainings diverged" if first["diverged"] else "")
    on = f"CPU ({m['processor']})" if found["device"] == "CPU" else found["device"]
    return (
        f"{''.join(parts)}. Rate {found['rate']:g}, weight decay {found['weight_decay']:g}. "
        f"{on}, Python {m['python']}, torch {m['torch']}, whence {m['whence']}, {m['date']}: "
        + ", then ".join(f"`{command}`" for command in found.get("commands", []))
    )


def result(found: Found, experiment: Experiment) -> str:
    """All of a result, as text."""
    parts = [f"{experiment.title}{' (quick)' if found['quick'] else ''}", about(found)]
    if found["lds"]:
        parts.append(str(lds_table(found, experiment)))
    for part, title in PARTS.items():
        table = over(found, part)
        if table is not None:
            parts.append(f"{title}\n{table}")
    table = removal_table(found)
    if table is not None:
        r = found["removal"]
        parts.append(f"Share of {r['queries']} queries flipped by removal\n{table}")
    return "\n\n".join(parts)


def overview(tasks: Mapping[str, Experiment], folders: Iterable[Path]) -> Table:
    """Every experiment, where it can run, and what is known of it."""
    rows = []
    for name, experiment in tasks.items():
        known = []
        for folder in folders:
            for quick in (False, True):
                file = Path(folder) / f"{name}{'-quick' if quick else ''}.json"
                if file.is_file():
                    found = json.loads(file.read_text())
                    count = len(found.get("lds", {}))
                    known.append(f"{count} methods{', quick' if quick else ''} ({folder})")
        rows.append(
            [
                name,
                experiment.title,
                experiment.group,
                "GPU" if experiment.gpu else "CPU",
                "; ".join(known) or None,
            ]
        )
    heads = ["task", "in the paper", "kind", "whole on", "found"]
    return Table(heads, rows, texts=len(heads))
