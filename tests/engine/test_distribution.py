"""Several processes: the scores of one, in a share of the time and memory each."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from support import ranks
from support.comparing import close

import whence


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    ranks.record(folder)
    return folder


@pytest.fixture(scope="module")
def pair(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case, by two processes."""
    folder, copy = tmp_path_factory.mktemp("pair"), tmp_path_factory.mktemp("copy") / "runs"
    shutil.copytree(runs, copy)
    body = f"ranks.every_case(Path({str(copy)!r}), folder, rank, ranks.CASES)"
    ranks.together(folder, body)
    return folder


@pytest.mark.parametrize("name", ranks.CASES)
def test_two_processes_give_the_scores_of_one(
    name: str, runs: Path, pair: Path, tmp_path: Path
) -> None:
    folder = pair / name.replace(" ", "-")
    failed = [file.read_text() for file in sorted(folder.glob("rank-*.txt"))]
    assert not failed, failed[0]
    first, second = (np.load(folder / f"rank-{rank}.npy") for rank in (0, 1))
    np.testing.assert_array_equal(first, second)
    close(first, ranks.values(ranks.CASES[name](runs, tmp_path)), 1e-7)
