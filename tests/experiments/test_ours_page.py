"""Our forms beside the paper's, and what did not help: what the pages make of any results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.pages import figures, negative_page, numbers_page, ours
from experiments.pages import reproduce_page as page
from experiments.tasks import RESULTS
from experiments.tasks.forms import DEFAULT, DEFAULT_BY_STAGE, INFLUENCE, PUBLISHED, SCHEMA

ROOT = Path(__file__).parents[2]


def row(single: float, ensemble: float | None = None, **more: Any) -> dict[str, Any]:
    """LDS with intervals of ± 0.01."""
    values = [None if v is None else [v, v - 0.01, v + 0.01] for v in (single, ensemble)]
    sizes = {"slope": 0.5, "spread": 0.8, "seconds": 1.0, "ceiling": 0.9, "runs": 3, "over": {}}
    return {"single": values[0], "ensemble": values[1], **sizes, **more}


def entry(forms: dict[str, Any], chosen: bool = False, **of: Any) -> dict[str, Any]:
    sizes = {"alpha": 0.5, "subsets": 100, "seeds": 5, "runs": 3, "queries": 200}
    start = {"first_query": 0, "first_run": 0, "first_seed": 0, "quick": False}
    machine = {"torch": "2", "date": "today"}
    protocol = sizes | start | of
    about = {"machine": machine, "device": "cpu", "chosen_on": chosen}
    return {"protocol": protocol, "forms": forms, **about}


def usual(default: float, name: str = DEFAULT, **more: Any) -> dict[str, Any]:
    return {INFLUENCE: row(0.3), PUBLISHED: row(0.4, 0.45), name: row(default, 0.6, **more)}


def write(folder: Path, **tasks: list[dict[str, Any]]) -> Path:
    (folder / "forms.json").write_text(json.dumps({"schema": SCHEMA, "tasks": tasks}))
    return folder


def sentences(folder: Path, **tasks: list[dict[str, Any]]) -> str:
    return ours.sentences(ours.read(write(folder, **tasks)))


def test_first_counts_only_tasks_whose_ceiling_allows_a_difference(tmp_path: Path) -> None:
    noisy, unknown = usual(0.1, DEFAULT_BY_STAGE), usual(0.2, DEFAULT_BY_STAGE)
    for forms, ceiling in ((noisy, 0.05), (unknown, None)):
        for one in forms.values():
            one["ceiling"] = ceiling
    text = sentences(
        tmp_path,
        mnist=[entry(usual(0.5))],
        concrete=[entry(usual(0.35))],
        cifar10=[entry(noisy)],
        rte=[entry(unknown)],
        rotated_mnist=[entry(usual(0.5, DEFAULT_BY_STAGE))],
    )
    assert "first on 2 of 3 tasks** whose ceiling allows a difference (not on Concrete)" in text
    assert "first on 0 of 1 task** whose ceiling is not known (one seed) (not on RTE)" in text
    assert "Compared with SOURCE, published; influence, published." in text


def test_another_published_method_may_be_first(tmp_path: Path) -> None:
    text = sentences(tmp_path, mnist=[entry(usual(0.5) | {"TracIn": row(0.55)})])
    assert "first on 0 of 1 task" in text
    assert "influence, published; TracIn." in text


def test_below_by_the_paired_interval_where_there_is_one(tmp_path: Path) -> None:
    gaps = {PUBLISHED: {"single": [-0.002, -0.003, -0.001], "ensemble": [0.1, 0.0, 0.2]}}
    text = sentences(tmp_path, mnist=[entry(usual(0.398, over=gaps), alpha=0.7)])
    assert "beyond the interval: **yes**: MNIST, SOURCE, published, one model, α = 0.7." in text
    gaps[PUBLISHED]["single"] = [-0.002, -0.005, 0.001]
    text = sentences(tmp_path, mnist=[entry(usual(0.398, over=gaps))])
    assert "never, in 3 comparisons" in text  # influence has no ensemble
    text = sentences(tmp_path, mnist=[entry(usual(0.27))])
    assert "MNIST, SOURCE, published, one model" in text  # the two intervals are disjoint
    assert "influence, published, one model, α" in text


def test_sizes_outside_are_named(tmp_path: Path) -> None:
    tasks = {"mnist": [entry(usual(0.5))], "concrete": [entry(usual(0.5, spread=3.49))]}
    text = sentences(tmp_path, **tasks)
    assert "between 0.5 and 2 on 1 of 2 tasks; outside: Concrete 3.5." in text


def test_a_confirmation_is_shown_instead_of_what_chose(tmp_path: Path) -> None:
    new = {"first_query": 200, "first_run": 3, "first_seed": 10}
    entries = [
        entry(usual(0.9), chosen=True),
        entry(usual(0.5), **new),
        entry(usual(0.7), alpha=0.7, **new),
        entry(usual(0.8), quick=True),
    ]
    results = ours.read(write(tmp_path, digits=entries, mnist=[entry(usual(0.6))]))
    table = ours.main_table(results)
    assert "| Digits | 0.90 | 0.30 / – | 0.40 / 0.45 | 0.50 / 0.60 |" in table and "†" not in table
    text = ours.sentences(results)
    assert "chosen on Digits, and tested with new queries, runs and retrainings on D" in text
    assert "1 other task tests them" in text
    numbers = ours.numbers(results)
    assert numbers.count("### Digits, forms") == 1 and "0.800" not in numbers
    assert "queries 200 to 399" in numbers and "at α = 0.7" in numbers
    assert numbers.count("chose the defaults") == 1 and numbers.count("; not used to choose.") == 3


def test_tasks_without_results_say_so(tmp_path: Path) -> None:
    results = ours.read(write(tmp_path, mnist=[entry(usual(0.6))]))
    assert len(ours.main_table(results).splitlines()) == 3  # heads, line, and the task that was run
    assert "Run with the paper's forms only: Concrete; Parkinsons;" in ours.sentences(results)
    assert ours.sentences({}) == ours.numbers({}) == "*Not run yet.*"


def test_combined_is_a_column_once_a_task_has_it(tmp_path: Path) -> None:
    name = "combined, 20 retrainings"
    results = ours.read(
        write(tmp_path, mnist=[entry(usual(0.6) | {name: row(0.65)})], rte=[entry(usual(0.5))])
    )
    assert name in ours.main_table(results)
    assert "above `Source()` on 1 of 1 task (MNIST +0.05)." in ours.sentences(results)
    assert set(ours.SHOWN) == set(figures.FORM_LOOKS)


def test_the_figure_has_every_task_and_form(tmp_path: Path) -> None:
    results = ours.read(
        write(tmp_path, mnist=[entry(usual(0.6))], digits=[entry(usual(0.5), True)])
    )
    figure = figures.beside(results, list(results))
    one, several = figure.axes
    assert [text.get_text() for text in one.get_yticklabels()] == ["MNIST", "Digits †"]
    points = [line for line in one.lines if line.get_marker() in ("o", "v")]
    assert len(points) == 6
    hollow = [line for line in points if line.get_markerfacecolor() == "white"]
    assert sorted(float(np.asarray(p.get_xdata())[0]) for p in hollow) == [0.3, 0.3, 0.4, 0.4]
    labels = {text.get_text() for text in figure.legends[0].get_texts()}
    assert labels == {"influence, published", "SOURCE, published", "Source()", "noise ceiling"}
    assert several.get_xlabel() == "LDS, ensemble"


# --- what did not help --------------------------------------------------------------------------


def test_the_page_is_made_of_the_results() -> None:
    text = negative_page.text()
    again = "python -m experiments.pages.reproduce_page"
    assert text == (ROOT / "docs/negative.md").read_text(), again
    assert "<!--" not in text and "None" not in text and negative_page.NOT_RUN not in text


def test_without_results(tmp_path: Path) -> None:
    text = negative_page.text(tmp_path)
    assert text.count(negative_page.NOT_RUN) == 20 and "<!--" not in text


def test_ideas_are_counted(tmp_path: Path) -> None:
    def with_three(default: float, three: float) -> list[dict[str, Any]]:
        return [entry(usual(default) | {DEFAULT_BY_STAGE: row(three)})]

    write(
        tmp_path,
        mnist=with_three(0.5, 0.45),
        rte=with_three(0.5, 0.55),
        concrete=with_three(0.5, 0.5),
        rotated_mnist=[entry(usual(0.5, DEFAULT_BY_STAGE))],
    )
    text = negative_page.text(tmp_path)
    assert "Lower on 1 of 2, equal on 1." in text
    assert "| RTE | 0.500 [0.490, 0.510] | 0.550 [0.540, 0.560] | -0.050 |" in text
    assert "| MNIST | 0.450 [0.440, 0.460] | 0.500 [0.490, 0.510] | -0.050 |" in text


@pytest.mark.parametrize("name", ["reproduce", "reproduce-numbers"])
def test_the_committed_pages_have_the_forms(name: str) -> None:
    results = ours.read(RESULTS)
    text = {"reproduce": page.text, "reproduce-numbers": numbers_page.text}[name]()
    part = ours.main_table(results) if name == "reproduce" else ours.numbers(results)
    assert part in text
