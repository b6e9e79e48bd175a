"""docs/leaderboard.md is made of results/leaderboard.json, with any number of results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from experiments.pages import leaderboard_advice as advice
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
    stored = results(tmp_path)
    text = page.text(tmp_path)
    assert "| Unrolled (MAGIC) | **0.91** |" in text
    assert "| HYDRA | **0.88** |" in text  # its interval contains 0
    assert "| Source() | 0.61 |" in text
    assert "| *metasmoothness* | 0.97 |" in text and "| *ceiling* | 1.00 |" in text
    assert text.index("Unrolled (MAGIC) | **") < text.index("Source() | 0.61")
    assert page.tables_part(stored).count("*Not run yet.*") == len(PROTOCOLS) - 1
    assert ": HYDRA on 1 of 1, Unrolled (MAGIC) on 1 of 1." in text and "†" not in text
    assert "| *seconds of* | GPU |" in text and "‡" not in text


def test_rows_of_other_retrainings_are_marked(tmp_path: Path) -> None:
    stored = results(tmp_path)
    entry = stored["protocols"][PROTOCOLS[0].name]["concrete"]
    later = row(0.95, None, sizes={"subsets": 40, "seeds": 2, "queries": 50}, device="CPU")
    del later["behind"]
    entry["methods"]["SOURCE"] = later
    assert "| SOURCE | 0.95 |" in page.tables_part(stored)  # not bold: nothing is known of it
    text = page.details("concrete", entry)
    assert "| SOURCE‡ | 0.95 [0.85, 1.05] | – | 0.9 | 1.5 (CPU) |" in text
    assert "‡ by other retrainings (40 subsets × 2 seeds, 50 queries)" in text
    tasks = {PROTOCOLS[0].name: page.tasks_of(stored, PROTOCOLS[0])}
    assert "SOURCE" not in advice.failures(tasks)


def test_methods_without_a_row_on_all_tasks_come_last(tmp_path: Path) -> None:
    stored = results(tmp_path)
    tasks = stored["protocols"][PROTOCOLS[0].name]
    tasks["mnist"] = json.loads(json.dumps(tasks["concrete"]))
    tasks["concrete"]["methods"]["a library"] = row(0.99, None)
    lines = page.overview(tasks).splitlines()
    assert lines[4].startswith("| Source()") and lines[5].startswith("| a library | **0.99** | – |")


def test_quick_versions_are_left_out(tmp_path: Path) -> None:
    stored = results(tmp_path, quick=True)
    assert page.tables_part(stored).count("*Not run yet.*") == len(PROTOCOLS)
    assert "| Source() | 0.61" not in page.text(tmp_path)


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


def test_advice_is_made_of_the_results(tmp_path: Path) -> None:
    stored = results(tmp_path)
    tasks = {p.name: page.tasks_of(stored, p) for p in PROTOCOLS}
    (line,) = [x for x in advice.picks(tasks).splitlines() if "smooth" in x]
    assert (
        "| single | 1 | Unrolled (MAGIC) 0.91 ± 0.10, HYDRA 0.88 ± 0.10, Source() 0.61 ± 0.10 |"
        in line
    )
    assert "rough" not in advice.picks(tasks) and "SGD" not in advice.picks(tasks)
    assert "| Source() | 0.9 (0.9 to 0.9); 1 of 1 |" in advice.calibrations(tasks)
    assert "| HYDRA | – | – | – |" in advice.calibrations(tasks)
    failed = advice.failures(tasks)
    assert "| Source() | all tasks | – | – |" in failed and "HYDRA" not in failed
    assert advice.agreements(tasks) == "*Not run yet.*"
    entry = stored["protocols"][PROTOCOLS[0].name]["concrete"]["methods"]
    over = {"Source()": [-0.66, -0.7, -0.6]}
    entry["a peer"] = row(-0.05, 0.96, agreement=0.987, remake="Ours(1)", over=over)
    assert "| a peer | x | Concrete | `Ours(1)` | 0.987 | – |" in advice.agreements(tasks)
    entry["a peer"] |= {"mended": 0.9999, "faults": "adds where it should subtract"}
    assert "| 0.987 | 1.000 |" in advice.agreements(tasks)
    assert "**a peer** (x) adds where it should subtract." in advice.agreements(tasks)
    assert "| -0.05 [-0.15, 0.05] | -0.66 [-0.70, -0.60] | – | 1.5 |" in advice.libraries(tasks)
    assert "| a peer | all tasks | all tasks | – |" in advice.failures(tasks)
    assert advice.refusals(tasks) == ""
    stored["protocols"][PROTOCOLS[0].name]["concrete"]["refused"] = {"b": "b 1.0: no such layer"}
    assert "| b | Concrete | b 1.0: no such layer |" in advice.refusals(tasks)


def test_libraries_are_hollow_points_with_one_label_each(tmp_path: Path) -> None:
    stored = results(tmp_path)
    entry = stored["protocols"][PROTOCOLS[0].name]["concrete"]
    entry["methods"] = {f"lib{k}, method {m}": row(0.1, 0.5) for k in range(3) for m in range(12)}
    entry["methods"]["Source()"] = row(0.6, None, device="CPU")
    figure = page.scatter(page.tasks_of(stored, PROTOCOLS[0]), "light")
    assert len(figure.axes[0].containers) == 37
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["Source()", "lib0 (library)", "lib1 (library)", "lib2 (library)"]
    assert "| 1.5 (CPU) |" in page.details("concrete", entry)


def test_only_methods_of_the_final_checkpoint(tmp_path: Path) -> None:
    stored = results(tmp_path)
    entry = stored["protocols"].pop(PROTOCOLS[0].name)["concrete"]
    entry["methods"] = {"EK-FAC": row(0.3, 0.3), "Source()": row(0.6, None)}
    stored["protocols"][PROTOCOLS[2].name] = {"concrete": entry}
    text = advice.picks({PROTOCOLS[2].name: page.tasks_of(stored, PROTOCOLS[2])})
    (line,) = [x for x in text.splitlines() if "final checkpoint" in x]
    assert "EK-FAC 0.30" in line and "Source()" not in line
