"""A model that FSDP2 divides among processes: recorded, attributed, and left as it was."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support import ranks, sharded
from support.comparing import close

import whence


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    ranks.together(folder, "from support import sharded; sharded.everything(folder, rank)")
    return folder


@pytest.fixture(scope="module")
def whole(pair: Path) -> dict[str, torch.Tensor]:
    """The weights of the sharded model at the end of training."""
    weights: dict[str, torch.Tensor] = torch.load(pair / "whole.pt", weights_only=True)
    return weights


def test_a_recorded_run_has_whole_weights(pair: Path, whole: dict[str, torch.Tensor]) -> None:
    """Opened in a process without a group; and they are those of a training in one process."""
    run = whence.Run.open(pair / "run")
    final = run.final.weights()
    assert final.keys() == whole.keys()
    assert all(torch.equal(final[name], tensor) for name, tensor in whole.items())
    sharded.alone(pair)
    same = whence.Run.open(pair / "alone")
    assert [c.step for c in run.checkpoints] == [c.step for c in same.checkpoints] == [2, 3, 4]
    assert [c.step for c in run.trajectory] == list(range(5))
    assert run.final.files.aliases == same.final.files.aliases != {}
    for ours, theirs in zip(run.checkpoints, same.checkpoints, strict=True):
        for mine, other in (
            (ours.weights(), theirs.weights()),
            (ours.second_moments(), theirs.second_moments()),
            (ours.optimizer_state(), theirs.optimizer_state()),
        ):
            assert mine is not None and other is not None and mine.keys() == other.keys()
            for name in mine:
                close(mine[name].numpy(), other[name].numpy(), 1e-6)


@pytest.mark.parametrize("name", sharded.METHODS)
def test_a_sharded_model_has_the_scores_of_the_whole_one(
    name: str, pair: Path, tmp_path: Path
) -> None:
    first, second = (np.load(pair / f"{name}-{rank}.npy") for rank in (0, 1))
    np.testing.assert_array_equal(first, second)
    study = sharded.study(sharded.net(), pair / "run", tmp_path)
    scores = sharded.METHODS[name]().attribute(study, sharded.QUERY, **sharded.EXACT)
    close(first, scores.values, 1e-7)


def known(pair: Path, what: str) -> list[object]:
    return [json.loads((pair / f"{rank}.json").read_text())[what] for rank in (0, 1)]


def test_model_and_shards_are_left_as_they_were(pair: Path) -> None:
    assert known(pair, "unchanged") == [True, True]


def test_a_sharded_training_resumes_with_the_same_bits(pair: Path) -> None:
    assert known(pair, "resumed") == [True, True]


def test_a_write_that_fails_ends_all_ranks(pair: Path) -> None:
    first, second = known(pair, "failure")
    assert first == "DiskFull: the disk is full"
    assert second == "RankFailed: rank 0 could not record the run: the disk is full"
