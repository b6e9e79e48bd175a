"""docs/reproduce-numbers.md, the appendix of docs/reproduce.md: settings and every number.

Written together with it: python -m experiments.pages.reproduce_page
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from experiments.pages import claims, ours, tables
from experiments.pages.claims import CLAIMS, FAILS, OPEN
from experiments.pages.markdown import filled, listed, table
from experiments.pages.panels import text_panels
from experiments.pages.tables import Result, title
from experiments.tasks import RESULTS, TASKS, Experiment

Results = Mapping[str, Result]


def evidence(results: Results) -> str:
    """The numbers of the claims that do not hold or are undecided."""
    verdicts, parts = claims.verdicts_by_task(results), []
    for word, heading in ((FAILS, "Claims that do not hold"), (OPEN, "Undecided claims")):
        lines = [
            f"- {title(task, results.get(task))}, claim {k}: {verdict.why}"
            for k in range(1, len(CLAIMS) + 1)
            for task, by_claim in verdicts.items()
            if (verdict := by_claim[k - 1]) is not None and verdict.word == word
        ]
        if lines:
            parts.append(f"{heading}:\n\n" + "\n".join(lines))
    return "\n\n".join(parts) or "*Not run yet.*"


def sizes(result: Result) -> Mapping[str, int]:
    """M, R, queries and models of the methods with the most models."""
    largest: Mapping[str, int] = max(
        (entry["of"] for entry in result["lds"].values()), key=lambda of: of["runs"]
    )
    return largest


def differences(result: Result, experiment: Experiment) -> list[str]:
    """Everything that differs from the paper: the task's setting, and the sizes of the result."""
    parts = list(experiment.differs)
    if result["quick"]:
        parts.insert(0, "**quick: a smaller model, less data, a smaller evaluation**")
    if result.get("tracked"):
        parts.append(f"only {result['tracked']} attributed")
    if experiment.grid is not None and not any("grid search" in part for part in parts):
        parts.append("rate and weight decay chosen by grid search")
    of, paper = sizes(result), experiment.paper_seeds
    if of["subsets"] != 100:
        parts.append(f"M = {of['subsets']} (the paper: 100)")
    if paper is not None and of["seeds"] != paper:
        parts.append(f"R = {of['seeds']} (the paper: {paper})")
    if of["runs"] == 1:
        parts.append("one model only (the paper: also ensembles of 10)")
    elif of["runs"] != 10:
        without = [n for n in experiment.methods if claims.lds_value(result, n, "ensemble") is None]
        but = f", of all but {listed(without)}" if without else ""
        parts.append(f"ensembles of {of['runs']} (the paper: 10){but}")
    if result["tf32"]:
        parts.append("trained in TF32")
    rounded = {name: entry.get("tf32", False) for name, entry in result["lds"].items()}
    if any(rounded.values()):
        float32 = [name for name, yes in rounded.items() if not yes]
        parts.append(f"attributed in TF32{f' (not {listed(float32)})' if float32 else ''}")
    return parts


def settings(results: Results) -> str:
    """A row for each task: its sizes, and what differs from the paper."""
    rows: list[list[object]] = []
    for task, experiment in TASKS.items():
        result = results.get(task)
        paper = experiment.paper_seeds or "–"
        if result is None:
            differs = "; ".join(experiment.differs) or None
            rows.append([title(task), "*not\u00a0run\u00a0yet*", paper, None, None, None, differs])
            continue
        of = sizes(result)
        ceiling = next(iter(result["lds"].values()))["ceiling"]
        rows.append(
            [
                title(task, result),
                f"{of['subsets']}\u00a0×\u00a0{of['seeds']}",
                paper,
                of["queries"],
                of["runs"],
                None if ceiling is None else f"{ceiling:.2f}",
                "not in the paper"
                if experiment.group == "not in the paper"
                else "; ".join(differences(result, experiment)) or "nothing that we know of",
            ]
        )
    heads = ["task", "M × R", "paper's R", "queries", "models", "ceiling"]
    return table([*heads, "differences from the paper's setting"], rows, " rrrrr")


def rounding(file: Path) -> str:
    """The effect of TF32 on scores, from `experiments.studies.rounding`."""
    if not file.is_file():
        return "*Not measured yet.*"
    study = json.loads(file.read_text())
    rows = [
        [title(task), name, f"{agreement['median']:.3f}", f"{agreement['least']:.3f}"]
        for task, by_method in study["tasks"].items()
        for name, agreement in by_method.items()
    ]
    machine = study["machine"]
    return (
        table(["task", "method", "median query", "lowest"], rows, "  rr")
        + f"\n\n{study['queries']} queries. {study['device']}, torch {machine['torch']}, "
        f"{machine['date']}."
    )


def numbers(results: Results) -> str:
    """Every task's setting, tables, machine and command."""
    parts = []
    for task, experiment in TASKS.items():
        result = results.get(task)
        parts.append(f"### {title(task, result)}")
        setting = f"{experiment.setting[0].upper()}{experiment.setting[1:]}."
        if result is None:
            device = " (needs a GPU)" if experiment.gpu else ""
            parts.append(f"{setting} *Not run yet:* `whence reproduce {task}`{device}.")
            continue
        parts.append(f"A smaller version of: {setting}" if result["quick"] else setting)
        parts.append(tables.lds_table(result, experiment).markdown())
        for part, heading in tables.PARTS.items():
            over = tables.over(result, part)
            if over is not None:
                parts += [f"{heading}, one model:", over.markdown()]
        flipped = tables.removal_table(result)
        if flipped is not None:
            removal = result["removal"]
            heading = f"Share of {removal['queries']} queries flipped by removal"
            parts += [f"{heading} ({removal['trainings']:,} trainings):", flipped.markdown()]
        parts.append(tables.about(result))
    return "\n\n".join(parts)


def searches(folder: Path) -> str:
    """The grid searches: what was tried, and what was chosen."""
    files = [folder / f"{task}.json" for task in TASKS]
    rows = []
    for search in (json.loads(file.read_text()) for file in files if file.is_file()):
        best, lines = search["best"], []
        for decay in sorted({pair["weight_decay"] for pair in search["tried"]}):
            by_rate = sorted(
                (pair["rate"], pair["validation"])
                for pair in search["tried"]
                if pair["weight_decay"] == decay
            )
            values = ", ".join(
                f"{rate:g}: " + ("diverged" if value is None else f"{value:.3f}")
                for rate, value in by_rate
            )
            lines.append(f"*{decay:g}*: {values}")
        machine = search["machine"]
        rows.append(
            [
                title(search["task"]),
                f"{best['rate']:g}",
                f"{best['weight_decay']:g}",
                f"{search['by']} {best['validation']:.3f}",
                search["settings"]["seeds"],
                "<br>".join(lines),
                f"{search['device']}, torch {machine['torch']}, {machine['date']}",
            ]
        )
    heads = ["task", "rate", "weight decay", "held-out", "seeds", "all values", "run on"]
    return table(heads, rows, " rrrr") if rows else "*Not run yet.*"


def text(folder: Path = RESULTS) -> str:
    """The page, from the results in a folder."""
    results, examples = tables.read(folder), tables.read(folder, "panels")
    parts: dict[str, Callable[[], str]] = {
        "evidence": lambda: evidence(results),
        "settings": lambda: settings(results),
        "rounding": lambda: rounding(folder / "rounding.json"),
        "numbers": lambda: numbers(results),
        "forms": lambda: ours.numbers(ours.read(folder)),
        "searches": lambda: searches(folder / "search"),
        "texts": lambda: text_panels(examples, folder),
    }
    return filled("reproduce-numbers.template.md", parts)
