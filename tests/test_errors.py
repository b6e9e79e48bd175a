"""Errors: typed, and still the built-in errors that a user catches."""

from __future__ import annotations

import ast
import inspect
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import whence
from whence import errors

SOURCES = sorted(Path(whence.__file__).parent.rglob("*.py"))
KINDS = {name: getattr(errors, name) for name in errors.__all__}
# raised on purpose by whence, these would look like somebody else's; use whence.errors
UNTYPED = ("Exception", "FileNotFoundError", "FloatingPointError", "ImportError", "IndexError")
UNTYPED += ("ModuleNotFoundError", "NotADirectoryError", "TypeError", "ValueError")


@pytest.mark.parametrize("name", KINDS)
def test_an_error_is_whences_and_python_s(name: str) -> None:
    kind = KINDS[name]
    assert issubclass(kind, whence.WhenceError)
    assert name == "WhenceError" or any(
        base.__module__ == "builtins" and base not in (Exception, BaseException, object)
        for base in inspect.getmro(kind)
    )
    again = pickle.loads(pickle.dumps(kind("what is wrong: what to do")))  # from a worker process
    assert type(again) is kind and str(again) == "what is wrong: what to do"


def test_a_damaged_file_is_both_that_was_raised_before() -> None:
    assert issubclass(errors.DamagedFile, OSError) and issubclass(errors.DamagedFile, ValueError)
    assert issubclass(errors.FolderConflict, ValueError)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_every_room_raises_typed_errors(path: Path) -> None:
    raised = [
        f"line {node.lineno}: raise {node.exc.func.id}"
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Raise)
        and isinstance(node.exc, ast.Call)
        and isinstance(node.exc.func, ast.Name)
        and node.exc.func.id in UNTYPED
    ]
    assert not raised, f"{path}: {raised}"


def test_errors_need_nothing_but_the_standard_library() -> None:
    code = "import sys, whence; whence.WhenceError; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


#: why these files use Python's own function: what they warn of is stored in another way
NOT_COLLECTED = {
    "errors.py": "it collects",
    "study.py": "excluded layers are in Scores.excluded, and shown as 'left out'",
}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_every_warning_can_be_stored_with_a_result(path: Path) -> None:
    """Only those of `whence.errors.warn` (or of a run's and a recorder's `warn`) are collected."""
    name = path.relative_to(Path(whence.__file__).parent).as_posix()
    lost = [
        f"line {node.lineno}"
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if (
            isinstance(node, ast.Attribute)
            and node.attr in ("warn", "warn_explicit")
            and isinstance(node.value, ast.Name)
            and node.value.id == "warnings"
        )
        or (isinstance(node, ast.ImportFrom) and node.module == "warnings")
    ]
    assert bool(lost) == (name in NOT_COLLECTED), f"{name}: {lost}: use whence.errors.warn"
