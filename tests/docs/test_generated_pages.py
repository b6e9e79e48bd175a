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
    text = (tmp_path / "README.md").read_text()
    assert text == (ROOT / "benchmarks/README.md").read_text(), "python -m benchmarks.report"
    assert "<!--" not in text and "not measured yet" not in text


def test_the_methods_page_is_made_of_the_results() -> None:
    text = methods_page.text()
    assert text == (ROOT / "docs/methods.md").read_text(), (
        "python -m experiments.pages.methods_page"
    )
    assert "<!--" not in text


def test_the_methods_page_without_results(tmp_path: Path) -> None:
    text = methods_page.text(tmp_path)
    assert text.count("*Not run yet:*") == len(methods_page.SHOWN) and "<!--" not in text


def test_results_say_where_they_come_from() -> None:
    files = sorted((ROOT / "experiments/results").glob("*.json"))
    assert files
    for file in files:
        result = json.loads(file.read_text())
        if file.name == "reference.json":
            assert all(ref["source"] for task in result.values() for ref in task.values())
            continue
        assert result["machine"]["torch"] and result["machine"]["date"] and result["device"], file
        if file.stem.removesuffix("-quick") in TASKS:
            assert result["schema"] == reproduce.SCHEMA and result["task"] in TASKS, file
            assert result["commands"] and result["recipe"], file
            assert all(c.startswith("whence reproduce") for c in result["commands"]), file
            assert result["quick"] == file.stem.endswith("-quick"), file
        else:
            rows = {"rows", "of"}
            keys = {"rounding": {"tasks", "queries"}, "adam": rows, "depth": rows}
            keys |= {"forms": {"tasks"}, "faults": {"rows", "seed"}, "best": {"tasks", "rounds"}}
            keys |= {"leaderboard": {"protocols"}, "layers": {"tasks"}}
            assert keys.get(file.stem, {"task", "settings"}) <= set(result), file


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
    result = stores.stores(work)
    (tmp_path / "store_digits.json").write_text(json.dumps(result))
    forms = [(row["projection"], row["rows"]) for row in result["rows"]]
    expected = [
        (projection, form) for projection in stores.STORED for form in stores.STORED[projection]
    ]
    assert forms == expected and ("eigenbasis", "int8") in forms
    assert all(-1 <= row["lds"][0] <= 1 for row in result["rows"])
    text = methods_page.text(tmp_path)
    assert "4 subsets of half the data × 1 seeds, 5 queries" in text
    assert text.count("| 16 |") == len(forms)


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
