"""Pages that scripts make are what the scripts make of the committed results; experiments' data."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def found_from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


def test_the_benchmarks_page_is_made_of_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import report

    (tmp_path / "README.template.md").write_text((report.FOLDER / "README.template.md").read_text())
    monkeypatch.setattr(report, "FOLDER", tmp_path)
    report.write_readme()
    made = (tmp_path / "README.md").read_text()
    assert made == (ROOT / "benchmarks/README.md").read_text(), "python -m benchmarks.report"
    assert "<!--" not in made and "not measured yet" not in made


def test_the_methods_page_is_made_of_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from experiments import methods_page

    monkeypatch.setattr(methods_page, "DOCS", tmp_path)
    methods_page.write()
    made = (tmp_path / "methods.md").read_text()
    assert made == (ROOT / "docs/methods.md").read_text(), "python -m experiments.methods_page"
    assert "<!--" not in made


def test_results_say_where_they_come_from() -> None:
    files = sorted((ROOT / "experiments/results").glob("*.json"))
    assert files
    for file in files:
        found = json.loads(file.read_text())
        assert {"machine", "settings", "device", "task"} <= set(found), file
        assert found["machine"]["torch"] and found["machine"]["date"]


def test_missing_data_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from experiments import data

    monkeypatch.setenv("WHENCE_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"concrete\.csv is not there: put UCI Concrete"):
        data.concrete()
    monkeypatch.delenv("WHENCE_DATA")
    with pytest.raises(FileNotFoundError, match="let WHENCE_DATA point to"):
        data.fashion_mnist()


def test_tasks_train() -> None:
    """The recipes of the experiments, each for one epoch, on the data that there is."""
    from experiments.tasks import TASKS

    here = os.environ.get("WHENCE_DATA") is not None
    for name, make in TASKS.items():
        if name != "digits" and not here:
            continue
        recipe, query = make()
        x, y = query.tensors
        assert len(x) == len(y) > 50
        assert abs(float(recipe.stages[0].data.dataset.tensors[0].mean())) < 0.5
        subset = np.arange(recipe.stages[0].batch_size)
        run = recipe.run(0, subset=subset, checkpoints=1)
        assert run.steps == recipe.stages[0].epochs


def test_the_scripts_explain_themselves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import retraining
    from experiments import compare_methods

    for module in (retraining, compare_methods):
        monkeypatch.setattr(sys, "argv", [module.__name__, "--help"])
        with pytest.raises(SystemExit) as end:
            module.main()
        assert end.value.code == 0
        assert "--task" in capsys.readouterr().out
