"""docs/leaderboard.md is made of results/leaderboard.json, with any number of results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from experiments.pages import leaderboard_page as page
from experiments.tasks import RESULTS
from experiments.tasks.board import PROTOCOLS, read_board


def row(value: float, behind: float | None, **more: Any) -> dict[str, Any]:
    gap = None if behind is None else [behind, behind - 0.1, behind + 0.1]
    about = {"method": "x", "seconds": 1.5, "ceiling": 1.0, "slope": 0.9, "runs": 1, "diverged": 0}
    return {"lds": [value, value - 0.1, value + 0.1], "behind": gap} | about | more


def results(folder: Path, quick: bool = False) -> dict[str, Any]:
    entry = {
        "machine": {"torch": "2.11", "date": "2026-01-01"},
        "device": "GPU",
        "metasmoothness": 0.97,
        "correlation": 0.9,
        "definition": 2,
        "seconds": {},
        "sizes": {"subsets": 100, "seeds": 1, "queries": 50, "quick": quick},
        "methods": {
            "Source()": row(0.61, 0.3),
            "Unrolled (MAGIC)": row(0.91, None),
            "HYDRA": row(0.88, 0.03, slope=None),
        },
    }
    stored = {"schema": 1, "protocols": {PROTOCOLS[0].name: {"concrete": entry}}}
    (folder / "leaderboard.json").write_text(json.dumps(stored))
    return stored


def test_the_page_is_made_of_the_results() -> None:
    assert (page.DOCS / "leaderboard.md").read_text() == page.text(), (
        "python -m experiments.leaderboard"
    )


def test_bold_is_what_no_other_is_certainly_better_than(tmp_path: Path) -> None:
    results(tmp_path)
    text = page.text(tmp_path)
    assert "| Unrolled (MAGIC) | **0.91** |" in text
    assert "| HYDRA | **0.88** |" in text  # its interval contains 0
    assert "| Source() | 0.61 |" in text
    assert "| *metasmoothness* | 0.97 |" in text and "| *ceiling* | 1.00 |" in text
    assert text.index("Unrolled (MAGIC) | **") < text.index("Source() | 0.61")
    assert text.count("*Not run yet.*") == len(PROTOCOLS) - 1
    assert "of 1 tasks: HYDRA 1, Unrolled (MAGIC) 1." in text and "†" not in text


def test_quick_versions_are_left_out(tmp_path: Path) -> None:
    results(tmp_path, quick=True)
    assert page.text(tmp_path).count("*Not run yet.*") == len(PROTOCOLS)


def test_the_figure_has_a_point_for_each_method(tmp_path: Path) -> None:
    results(tmp_path)
    tasks = page.tasks_of(read_board(tmp_path / "leaderboard.json"), PROTOCOLS[0])
    for mode in ("light", "dark"):
        figure = page.scatter(tasks, mode)
        (axis,) = figure.axes
        assert len(axis.containers) == 3
        assert [t.get_text() for t in figure.legends[0].get_texts()] == [
            "Source()",
            "HYDRA",
            "Unrolled (MAGIC)",
        ]
        figure.savefig(tmp_path / f"{mode}.svg")


def test_figures_of_shown_protocols_exist() -> None:
    stored = read_board(RESULTS / "leaderboard.json")
    for protocol in PROTOCOLS:
        if page.tasks_of(stored, protocol):
            for mode in page.INK:
                assert (page.DOCS / page.FIGURES / f"{protocol.name}-{mode}.svg").exists()
