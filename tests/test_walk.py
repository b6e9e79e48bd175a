"""The files between `Source().attribute` and scores: CONTRIBUTING.md shows the way through them."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

from tools.walk import Walk, follow, walks

ROOT = Path(__file__).parents[1]
# Measured alone: after other tests, functions whose answers are cached do not run again. Lower them
# when a change lets you.
MOST, MOST_FUNCTIONS = 34, 507


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Walk:
    """With factors that are fitted and with cached ones, together."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitted, cached = walks(tmp_path_factory.mktemp("walk"))
    assert "Fitter.covariances" in fitted["operators/fit.py"]
    assert "Fitter.covariances" not in cached["operators/fit.py"]
    files = sorted({*fitted, *cached})
    return {file: fitted.get(file, {}) | cached.get(file, {}) for file in files}


def test_a_reader_has_no_more_files_to_open(walk: Walk) -> None:
    assert len(walk) <= MOST, "\n".join(walk)
    assert sum(map(len, walk.values())) <= MOST_FUNCTIONS


def test_the_ten_boxes_are_on_the_way(walk: Walk) -> None:
    """Each box names a file, and a function in it that runs."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    section = page.partition("### From `attribute` to scores")[2].partition("\n#")[0]
    boxes = [line for line in section.splitlines() if re.match(r" ?\d+  ", line)]
    assert len(boxes) == 10
    for line in boxes:
        _, function, file, *_ = line.split()
        assert function in walk[file], line


def test_what_an_import_runs_is_no_part_of_the_way() -> None:
    def call() -> None:
        import importlib

        from whence.layers import linear

        importlib.reload(linear)  # which registers the kind

    from whence.layers import kind

    kinds = list(kind.KINDS)
    try:
        assert not follow(call)
    finally:
        kind.KINDS[:] = kinds
