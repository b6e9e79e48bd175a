"""Pages that scripts make are what the scripts make of the committed results."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import report, retraining
from experiments.engine import reproduce
from experiments.pages import methods_page, reproduce_page
from experiments.studies import stores
from experiments.tasks import TASKS, Scale

ROOT = Path(__file__).parents[2]


def test_the_benchmarks_page_is_made_of_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "README.template.md").write_text((report.FOLDER / "README.template.md").read_text())
    monkeypatch.setattr(report, "FOLDER", tmp_path)
    report.write_readme()
    made = (tmp_path / "README.md").read_text()
    assert made == (ROOT / "benchmarks/README.md").read_text(), "python -m benchmarks.report"
    assert "<!--" not in made and "not measured yet" not in made


def test_the_methods_page_is_made_of_the_results() -> None:
    made = methods_page.text()
    assert made == (ROOT / "docs/methods.md").read_text(), (
        "python -m experiments.pages.methods_page"
    )
    assert "<!--" not in made


def test_the_methods_page_without_results(tmp_path: Path) -> None:
    made = methods_page.text(tmp_path)
    assert made.count("*Not run yet:*") == len(methods_page.SHOWN) and "<!--" not in made


def test_results_say_where_they_come_from() -> None:
    files = sorted((ROOT / "experiments/results").glob("*.json"))
    assert files
    for file in files:
        found = json.loads(file.read_text())
        if file.name == "reference.json":
            assert all(ref["source"] for task in found.values() for ref in task.values())
            continue
        assert found["machine"]["torch"] and found["machine"]["date"] and found["device"], file
        if file.stem.removesuffix("-quick") in TASKS:
            assert found["schema"] == reproduce.SCHEMA and found["task"] in TASKS, file
            assert found["commands"] and found["recipe"], file
            assert all(c.startswith("whence reproduce") for c in found["commands"]), file
            assert found["quick"] == file.stem.endswith("-quick"), file
        else:
            rows = {"rows", "of"}
            told = {"rounding": {"tasks", "queries"}, "adam": rows, "depth": rows}
            assert told.get(file.stem, {"task", "settings"}) <= set(found), file


@pytest.mark.filterwarnings("ignore")
def test_stores_of_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script behind the table of gradient stores, made small; it writes what the page reads."""
    monkeypatch.setattr(stores, "DIMENSIONS", (16,))
    work = reproduce.Reproduction(
        TASKS["digits"],
        scale=Scale(subsets=4, seeds=1, queries=5, runs=1),
        work=tmp_path,
        results=tmp_path,
        log=lambda line: None,
    )
    found = stores.stores(work)
    (tmp_path / "store_digits.json").write_text(json.dumps(found))
    assert [row["projection"] for row in found["rows"]] == ["eigenbasis", "random"]
    assert all(-1 <= row["lds"][0] <= 1 for row in found["rows"])
    made = methods_page.text(tmp_path)
    assert "4 subsets of half the data × 1 seeds, 5 queries" in made
    assert made.count("| 16 |") == 2


def test_the_scripts_explain_themselves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module, option in (
        (retraining, "--task"),
        (stores, "--task"),
        (reproduce_page, "--no-figures"),
    ):
        monkeypatch.setattr(sys, "argv", [module.__name__, "--help"])
        with pytest.raises(SystemExit) as end:
            module.main()
        assert end.value.code == 0
        assert option in capsys.readouterr().out
