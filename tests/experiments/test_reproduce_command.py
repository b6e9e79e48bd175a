"""`whence reproduce` in a clone, and without one."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from whence.cli import reproduce
from whence.cli.screen import CommandError

ROOT = Path(__file__).parents[2]


def test_it_works_from_any_folder(tmp_path: Path) -> None:
    (tmp_path / "experiments").mkdir()  # somebody else's
    (tmp_path / "experiments/__init__.py").write_text("raise RuntimeError")
    done = subprocess.run(
        [sys.executable, "-m", "whence", "reproduce", "--list"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "fashion_mnist" in done.stdout and str(ROOT / "experiments/results") in done.stdout


def test_without_a_clone_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reproduce, "__file__", str(tmp_path / "a/b/c/reproduce.py"))
    monkeypatch.delitem(sys.modules, "experiments", raising=False)
    with pytest.raises(CommandError, match=r"needs a clone.*pip install --editable"):
        reproduce.experiments("tasks")
    assert "experiments" not in sys.modules


def test_experiments_are_not_installed() -> None:
    targets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert targets["targets"]["wheel"] == {"packages": ["src/whence"]}
