"""Results as tables: what `whence reproduce` prints, and what the results pages show."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from experiments.engine.reproduce import SCHEMA
from experiments.tasks import TASKS, Experiment
from whence.table import Table, estimate

Result = Mapping[str, Any]  # the content of a task's result file
PARTS = {
    "alpha": "LDS over α",
    "epochs": "LDS over epochs, α = 0.9",
    "optimum": "LDS at the optimum, over α",
}
NOISY = 0.1  # a noise ceiling below which methods cannot be distinguished
BASELINES = ("RepSim", "TracIn", "TRAK", "influence")  # of the paper's figures
SEGMENTED = ("SOURCE", "FastSource", "SOURCE, exact")


def read(folder: Path, part: str = "lds") -> dict[str, Result]:
    """{task: result}; the quick version's where the full one does not have this part."""
    results = {}
    for task in TASKS:
        for name in (task, f"{task}-quick"):
            file = Path(folder) / f"{name}.json"
            result = json.loads(file.read_text()) if file.is_file() else {}
            if result and result["schema"] != SCHEMA:
                raise ValueError(
                    f"{file} has schema version {result['schema']}, not {SCHEMA}: "
                    f"run `whence reproduce {task}` again"
                )
            if result.get("lds") and result.get(part):
                results[task] = result
                break
    return results


def title(task: str, result: Result | None = None) -> str:
    """A task's name as a heading, marked if the result is of the quick version."""
    name = TASKS[task].title
    return name[0].upper() + name[1:] + (" (quick)" if result and result["quick"] else "")


def counted(number: int, noun: str) -> str:
    """'1 model', '2 models'."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def baselines(experiment: Experiment) -> tuple[str, ...]:
    """The methods that SOURCE is compared with on a task."""
    return tuple(name for name in BASELINES if name in experiment.methods)


def with_interval(value: list[float] | None, digits: int = 2) -> str | None:
    """'0.46 [0.44, 0.48]'"""
    return None if value is None else estimate(value[0], value[1:], digits)


def lds_table(result: Result, experiment: Experiment, best_first: bool = False) -> Table:
    """One row per method: in the experiment's order, or by the ensemble's LDS."""
    order = (*experiment.methods, "Downsampling", *experiment.expensive)
    places = {name: k for k, name in enumerate(order)}
    entries = sorted(result["lds"].items(), key=lambda item: places.get(item[0], len(places)))
    if best_first:
        entries.sort(key=lambda item: -(item[1]["ensemble"] or item[1]["single"])[0])
    rows = [
        [
            label(name, experiment),
            with_interval(entry["single"]),
            with_interval(entry["ensemble"]),
            entry["of"]["runs"] or f"{entry['of']['models']} half-data",
            f"{entry['slope']:.2g}",
            f"{entry['seconds']:.1f}",
        ]
        for name, entry in entries
    ]
    heads = ["method", "LDS, one model", "LDS, ensemble", "models", "slope", "seconds"]
    return Table(heads, rows)


def label(name: str, experiment: Experiment) -> str:
    """A method's name, with the task's number of segments."""
    show_segments = name in SEGMENTED and experiment.segments > 1
    return f"{name}, L = {experiment.segments}" if show_segments else name


def over(result: Result, part: str) -> Table | None:
    """One model's LDS over α or over the number of epochs, one column each."""
    by_column = over_values(result, part)
    if not by_column:
        return None
    columns = sorted(by_column)
    names = list(dict.fromkeys(name for k in columns if k != 0.5 for name in by_column[k]))
    names = names or list(result["lds"])
    rows = []
    for name in names:
        cells = [by_column[k].get(name) for k in columns]
        rows.append([name, *(c and with_interval(c["single"] or c["ensemble"]) for c in cells)])
    heads = ["1 − 1/N" if k == 1 and part != "epochs" else format(k, "g") for k in columns]
    return Table(["epochs" if part == "epochs" else "α", *heads], rows)


def over_values(result: Result, part: str) -> dict[float, Any]:
    """{α or epochs: {method: entry}}; the entries of α = ½ are those of the LDS table."""
    by_column: dict[float, Any] = {float(k): v for k, v in result.get(part, {}).items()}
    if by_column and part == "alpha":
        by_column[0.5] = result["lds"]
    return by_column


def removal_table(result: Result) -> Table | None:
    """Share of the queries that flipped, by method and k."""
    if "removal" not in result:
        return None
    removal = result["removal"]
    rows = []
    for name, shares in removal["flipped"].items():
        intervals = removal["interval"][name]
        cells = (with_interval([p, *ends]) for p, ends in zip(shares, intervals, strict=True))
        rows.append([name, *cells])
    return Table(["removed, at most", *map(str, removal["k"])], rows)


def about(result: Result) -> str:
    """Sizes, rates, machine, versions and commands behind the numbers."""
    machine, parts = result["machine"], [f"{result['examples']:,} training examples"]
    if result["lds"]:
        first = next(iter(result["lds"].values()))
        sizes, ceiling = first["of"], first["ceiling"]
        parts.append(
            f", {sizes['queries']} queries; truth: {sizes['subsets']} subsets × "
            f"{counted(sizes['seeds'], 'seed')}"
        )
        parts.append("" if ceiling is None else f", noise ceiling {ceiling:.2f}")
        if ceiling is not None and ceiling < NOISY:
            parts.append(" (with this few seeds, differences between subsets are mostly noise)")
        parts.append(f"; {first['diverged']} trainings diverged" if first["diverged"] else "")
    on = f"CPU ({machine['processor']})" if result["device"] == "CPU" else result["device"]
    return (
        f"{''.join(parts)}. Rate {result['rate']:g}, weight decay {result['weight_decay']:g}. "
        f"{on}, Python {machine['python']}, torch {machine['torch']}, whence {machine['whence']}, "
        f"{machine['date']}: "
        + ", then ".join(f"`{command}`" for command in result.get("commands", []))
    )


def as_text(result: Result, experiment: Experiment) -> str:
    """All tables of a result."""
    parts = [f"{experiment.title}{' (quick)' if result['quick'] else ''}", about(result)]
    if result["lds"]:
        parts.append(str(lds_table(result, experiment)))
    for part, heading in PARTS.items():
        table = over(result, part)
        if table is not None:
            parts.append(f"{heading}\n{table}")
    table = removal_table(result)
    if table is not None:
        queries = result["removal"]["queries"]
        parts.append(f"Share of {queries} queries flipped by removal\n{table}")
    return "\n\n".join(parts)


def overview(tasks: Mapping[str, Experiment], folders: Iterable[Path]) -> Table:
    """Every experiment, the device that its full version needs, and its results so far."""
    rows = []
    for name, experiment in tasks.items():
        results = []
        for folder in folders:
            for quick in (False, True):
                file = Path(folder) / f"{name}{'-quick' if quick else ''}.json"
                if file.is_file():
                    count = len(json.loads(file.read_text()).get("lds", {}))
                    results.append(f"{count} methods{', quick' if quick else ''} ({folder})")
        device = "GPU" if experiment.gpu else "CPU"
        rows.append([name, experiment.title, experiment.group, device, "; ".join(results) or None])
    heads = ["task", "in the paper", "kind", "full version on", "results"]
    return Table(heads, rows, texts=len(heads))
