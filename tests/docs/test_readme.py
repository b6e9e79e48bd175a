"""README: its example runs as printed, and its links lead somewhere."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import whence

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_example_runs_as_printed_in_an_empty_folder(tmp_path: Path) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S)
    (tmp_path / "example.py").write_text(code)
    source = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    helpful, harmful, effect = re.fullmatch(
        r"( +example.*?)( +example.*?)([-\d.e]+)\n", done.stdout, re.S
    ).groups()  # type: ignore[union-attr]
    values = [[float(row.split()[1]) for row in t.splitlines()[1:]] for t in (helpful, harmful)]
    assert [len(column) for column in values] == [10, 10]
    assert min(values[0]) > 0 > max(values[1])
    scores = whence.Scores.load(tmp_path / "scores/source")
    assert f"{scores.removal_effect(0, [3, 14, 159])}" == effect


def test_links_lead_to_files_and_headings() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", README):
        path, _, heading = target.partition("#")
        assert (ROOT / path).exists(), target
        if heading:
            headings = re.findall(r"^#+ (.*)$", (ROOT / path).read_text(), re.M)
            assert heading in [h.lower().replace(" ", "-") for h in headings], target


def test_every_public_name_is_documented() -> None:
    page = (ROOT / "docs/api.md").read_text()
    documented = re.findall(r"^::: whence\.(\w+)$", page, re.M)
    rooms = {name for name in whence.__all__ if inspect.ismodule(getattr(whence, name))}
    assert sorted(documented) == sorted(set(whence.__all__) - rooms)
    for room in rooms:  # by what they hold
        assert re.search(rf"^::: whence\.{room}\.\w+$", page, re.M), room
