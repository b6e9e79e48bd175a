"""docs/negative.md: what was tried and did not help, from the results.

Written together with docs/reproduce.md: python -m experiments.pages.reproduce_page
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.pages import ours, tables
from experiments.pages.markdown import filled, table
from experiments.pages.tables import counted, title, with_interval
from experiments.tasks import RESULTS, TASKS
from experiments.tasks.forms import (
    BEST,
    DEFAULT,
    DEFAULT_BY_STAGE,
    LONGER,
    NOISE_AWARE,
    PUBLISHED,
    REDRAWN,
)
from experiments.tasks.methods import GAUSS_NEWTON

NOT_RUN = "*Not run yet.*"
Values = Mapping[str, Sequence[float] | None]  # LDS with interval, by name


def pairs(values: Mapping[str, Values], idea: str, instead: str, heads: tuple[str, str]) -> str:
    """A table of the LDS of an idea and of what is done instead, and in how many rows it is lower.

    Args:
        values: by row of the table.
        idea, instead: names in each row.
        heads: their names in the table.
    """
    rows: list[list[object]] = []
    higher: list[str] = []
    lower = same = 0
    for where, by_name in values.items():
        one, other = by_name.get(idea), by_name.get(instead)
        if one is None or other is None:
            continue
        difference = round(one[0] - other[0], 3) + 0.0
        lower, same = lower + (difference < 0), same + (difference == 0)
        higher += [where] if difference > 0 else []
        cells = (with_interval(list(value), 3) for value in (one, other))
        rows.append([where, *cells, f"{difference:+.3f}"])
    if not rows:
        return NOT_RUN
    summary = f"Lower on {lower} of {len(rows)}"
    summary += f", equal on {same}" if same else ""
    summary += f"; higher on {'; '.join(higher)}." if higher else "."
    return table(["", *heads, "difference"], rows, " rrr") + f"\n\n{summary}"


def compared(
    folder: Path, names: Sequence[str], among: Callable[[str], bool] = bool
) -> dict[str, Any]:
    """The rows of these forms, of the same runs and retrainings, by task."""
    rows = {}
    for task, entries in ours.read(folder).items():
        complete = [e for e in entries if e["forms"].keys() >= set(names)]
        if complete and among(task):
            rows[title(task)] = ours.shown(complete)["forms"]
    return rows


def by_form(folder: Path, *names: str, among: Callable[[str], bool] = bool) -> dict[str, Values]:
    """LDS of these forms, of the same runs and retrainings, by task."""
    rows = compared(folder, names, among)
    return {task: {name: forms[name]["single"] for name in names} for task, forms in rows.items()}


def spreads(folder: Path, idea: str, instead: str, heads: tuple[str, str]) -> str:
    """A table of the spread of predicted over that of real changes, and what the idea costs."""
    names = idea, instead
    rows = [
        [
            task,
            *(f"{forms[name]['spread']:.2f}" for name in names),
            f"{forms[idea]['seconds'] / forms[instead]['seconds']:.1f}×",
        ]
        for task, forms in compared(folder, names).items()
    ]
    return table(["spread", *heads, "cost"], rows, " rrr") if rows else NOT_RUN


def by_method(folder: Path, names: Sequence[str]) -> dict[str, Values]:
    """LDS of the reproduction's methods, by task, where they are of the same runs."""
    values: dict[str, Values] = {}
    for task, result in tables.read(folder).items():
        entries = {name: result["lds"].get(name) for name in names}
        if all(entries.values()):
            runs = {entry["of"]["runs"] for entry in entries.values() if entry}
            mark = "" if len(runs) == 1 else f" ({counted(min(runs), 'model')} / {max(runs)})"
            values[title(task, result) + mark] = {
                name: entry["single"] for name, entry in entries.items() if entry
            }
    return values


def by_setting(folder: Path) -> dict[str, Values]:
    """LDS of the forms for Adam, by rate and length of training."""
    file = folder / "adam.json"
    study: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {"rows": []}
    return {
        f"Digits, AdamW, rate {row['rate']:g}{', to 0' if row['falls'] else ''}, "
        f"{counted(row['epochs'], 'epoch')}": row["lds"]
        for row in study["rows"]
    }


def mixture_settings(folder: Path) -> str:
    """How often the mixture is the lower one over settings of training, in a sentence."""
    rows = by_setting(folder).values()
    both = [(row["SOURCE"], row["SOURCE, exact"]) for row in rows if "SOURCE, exact" in row]
    lower = sum(one[0] < other[0] for one, other in both if one and other)
    if not both:
        return NOT_RUN
    return (
        f"Over {len(both)} rates and lengths of training on digits, the mixture is lower in "
        f"{lower} ([table](source.md#the-papers-form-sourcepublished))."
    )


def text(folder: Path = RESULTS) -> str:
    """The page, from the results in a folder."""
    exact, expected = "Unrolled", "Unrolled, expected, Gauss-Newton"

    def forms(
        idea: str, instead: str, heads: tuple[str, str], among: Callable[[str], bool] = one_stage
    ) -> str:
        return pairs(by_form(folder, idea, instead, among=among), idea, instead, heads)

    kfac_bases = "coupled, query along the run, K-FAC bases, L = 1"
    parts: dict[str, Callable[[], str]] = {
        "three segments": lambda: forms(
            DEFAULT_BY_STAGE, DEFAULT, ("three segments", "`Source()`"), one_position
        ),
        "one segment": lambda: forms(
            DEFAULT, DEFAULT_BY_STAGE, ("one segment", "`Source()`"), shares_weights
        ),
        "auto segments": lambda: forms("auto segments", DEFAULT, ("by curvature", "`Source(1)`")),
        "kfac bases": lambda: forms(
            kfac_bases, DEFAULT, ("K-FAC's bases", "`Source(1)`"), shares_weights
        ),
        "probed coupling": lambda: forms(
            "coupled by probes, query along the run, L = 1", DEFAULT, ("probed", "by traces")
        ),
        "longer response": lambda: forms(
            f"{DEFAULT}, {LONGER[2.0]}", DEFAULT, ("twice as long", "`Source()`")
        ),
        "size of a longer response": lambda: spreads(
            folder, f"{DEFAULT}, {LONGER[2.0]}", DEFAULT, ("twice as long", "`Source()`")
        ),
        "noise-aware response": lambda: forms(
            f"{DEFAULT}, {NOISE_AWARE}", DEFAULT, ("response of `Best`", "`Source()`")
        ),
        "redrawn runs": lambda: forms(
            f"{DEFAULT}, {REDRAWN}", DEFAULT, ("eight runs", "`Source()`")
        ),
        "size of redrawn runs": lambda: spreads(
            folder, f"{DEFAULT}, {REDRAWN}", DEFAULT, ("eight runs", "`Source()`")
        ),
        "best segments": lambda: forms("best, L = 3", BEST, ("three segments", "`Best()`")),
        "expected": lambda: forms("expected Gauss-Newton", BEST, ("expected", "`Best()`")),
        "gauss newton": lambda: pairs(
            by_method(folder, (GAUSS_NEWTON, "SOURCE")),
            GAUSS_NEWTON,
            "SOURCE",
            ("full matrix", "EK-FAC"),
        ),
        "coupling": lambda: forms(
            "coupled, L = 1", "appendix C, L = 1", ("coupled", "not coupled")
        ),
        "mixture": lambda: forms(
            PUBLISHED, "appendix C", ("mixture", "appendix C"), trained_with_adam
        ),
        "closed form": lambda: forms(
            f"{DEFAULT_BY_STAGE}, closed form",
            DEFAULT_BY_STAGE,
            ("closed form", "Lanczos iterations"),
        ),
        "measured": lambda: forms(
            f"{DEFAULT_BY_STAGE}, measured",
            DEFAULT_BY_STAGE,
            ("measured", "Lanczos iterations"),
        ),
        "mixture settings": lambda: mixture_settings(folder),
        "damping": lambda: pairs(
            by_setting(folder),
            "SOURCE, λP⁻¹, floor",
            "SOURCE, exact, floor",
            ("λP⁻¹", "no damping"),
        ),
        "unrolled": lambda: pairs(
            by_method(folder, (exact, expected)), exact, expected, ("exact", "expected")
        ),
    }
    return filled("negative.template.md", parts)


def one_stage(task: str) -> bool:
    return TASKS[task].stage is None


def shares_weights(task: str) -> bool:
    """Whether layers act on many positions."""
    return one_stage(task) and TASKS[task].keep_factors


def one_position(task: str) -> bool:
    """Whether an example is one position in every layer."""
    return one_stage(task) and not TASKS[task].keep_factors


def trained_with_adam(task: str) -> bool:
    return "SOURCE, exact" in TASKS[task].methods
