"""Who imports whom: rivals ← tasks ← engine ← peers, pages, studies; benchmarks ← tools."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALLOWED = {  # folder: what it may import besides itself and whence
    "experiments/rivals": (),
    "experiments/tasks": ("experiments.rivals",),
    "experiments/engine": ("experiments.tasks",),
    "experiments/peers": ("experiments.engine",),
    "experiments/pages": ("experiments.tasks", "experiments.engine"),
    "experiments/studies": ("experiments.tasks", "experiments.engine", "experiments.peers"),
    "benchmarks": ("experiments.tasks",),
    "tools": ("experiments", "benchmarks"),
}
PACKAGES = {folder.split("/")[0] for folder in ALLOWED}


def imported(file: Path) -> Iterator[str]:
    """The full names of what a file imports, wherever in it."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("folder", ALLOWED)
def test_imports_go_one_way(folder: str) -> None:
    package = folder.replace("/", ".")
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    for file in files:
        for name in imported(file):
            if name.split(".")[0] in PACKAGES:
                allowed = any(f"{name}.".startswith(f"{a}.") for a in (package, *ALLOWED[folder]))
                assert allowed, f"{file.relative_to(ROOT)} imports {name}"


def test_the_library_imports_none_of_them() -> None:
    for file in sorted((ROOT / "src").rglob("*.py")):
        assert not {name.split(".")[0] for name in imported(file)} & PACKAGES, file
