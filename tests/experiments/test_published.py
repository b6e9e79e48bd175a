"""The benchmarks that the repository publishes are those of the leaderboard."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments.tasks import RESULTS
from experiments.tasks.board import read_board
from whence.evaluate import Benchmark

ROOT = Path(__file__).parents[2]
FOLDERS = sorted(file.parent for file in ROOT.glob("published/*/*/benchmark.json"))
NAMES = [f"{folder.parent.name}/{folder.name}" for folder in FOLDERS]


def test_there_are_benchmarks_of_both_protocols() -> None:
    assert {name.split("-")[0] for name in NAMES} == {"expected", "single"}


@pytest.mark.parametrize("folder", FOLDERS, ids=NAMES)
def test_a_published_benchmark_has_the_leaderboards_numbers(folder: Path) -> None:
    benchmark = Benchmark.open(folder)
    board = read_board(RESULTS / "leaderboard.json")["protocols"][folder.parent.name]
    rows = board[folder.name]["methods"]
    assert set(benchmark.published) == set(rows)
    some = {name: benchmark.published[name] for name in list(rows)[::8]}
    benchmark, truth = replace(benchmark, published=some), benchmark.truth
    random = np.random.default_rng(0).normal(
        size=(truth.measurements.shape[2], truth.masks.shape[1])
    )
    standing = benchmark.score(random, bootstrap=100)
    for name, one in standing.published.items():
        assert one.value == pytest.approx(rows[name]["lds"][0], abs=1e-5)
    assert abs(standing.result.value) < 0.1  # random scores predict nothing
