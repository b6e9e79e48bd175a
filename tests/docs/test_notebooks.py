"""The notebooks of the tutorials: up to date, and running.

Their code is that of the tutorials, which the suite runs (`test_examples_in_docs.py`).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tools.notebooks import NOTEBOOKS, tutorials, written
from tools.run import blocks, missing_data

os.environ.setdefault("MPLBACKEND", "Agg")


@pytest.mark.parametrize("name", tutorials())
def test_a_notebook_is_its_tutorial(name: str) -> None:
    path = NOTEBOOKS / f"{name}.ipynb"
    assert path.read_text() == written(tutorials()[name]), "run: python -m tools.notebooks"
    cells = json.loads(path.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert code == [block.rstrip() for marked, block in blocks(tutorials()[name]) if marked]
    prose = "".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    assert "<!--" not in prose and prose.startswith("# ")
    assert len({cell["id"] for cell in cells}) == len(cells)


def test_every_notebook_has_a_tutorial() -> None:
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == set(tutorials())


@pytest.mark.slow
@pytest.mark.parametrize("name", tutorials())
def test_a_notebook_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if missing := missing_data(tutorials()[name]):
        pytest.skip(f"{missing[0]} is not in $WHENCE_DATA")
    monkeypatch.chdir(tmp_path)
    cells = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())["cells"]
    names: dict[str, Any] = {"__name__": name}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
