"""Weights that no optimizer trains are stored once, in the run's first checkpoint."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from support import models
from support.comparing import close
from torch import nn

import whence
from whence.run import RunError
from whence.run.checkpoint import weights_sha256

TRAIN, QUERY = models.vectors(12), models.vectors(3, seed=1)


class Adapted(nn.Module):
    """A large frozen layer with a small trained one beside it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base, self.adapter, self.head = nn.Linear(4, 400), nn.Linear(4, 3), nn.Linear(400, 3)
        for layer in (self.base, self.head):
            layer.requires_grad_(False)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.base(x))) + self.adapter(x)


def record(
    folder: Path, change: int | None = None
) -> tuple[Adapted, list[dict[str, torch.Tensor]]]:
    """A recorded training, and the weights after each update.

    Args:
        change: the update after which a frozen weight is set to another value.
    """
    model = Adapted()
    optimizer = torch.optim.Adam(model.adapter.parameters(), lr=0.1)
    states = []
    with whence.Recorder(folder, model, optimizer, checkpoints=[1, 2, 3, 4], total_steps=4):
        for step in range(1, 5):
            if step == change:
                with torch.no_grad():
                    model.base.weight[0] += 1.0
            optimizer.zero_grad()
            x, y = TRAIN[:]
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            states.append(copy.deepcopy(model.state_dict()))
    return model, states


def test_checkpoints_hold_what_was_trained(tmp_path: Path) -> None:
    model, states = record(tmp_path / "run")
    run = whence.Run.open(tmp_path / "run")
    for checkpoint, state in zip(run.checkpoints, states, strict=True):
        weights = checkpoint.weights()
        assert weights.keys() == state.keys()
        assert all(torch.equal(weights[name], state[name]) for name in state)
        assert checkpoint.path is not None
        assert set(whence.run.checkpoint.read_tensors(checkpoint.path)) == {
            "adapter.weight",
            "adapter.bias",
        }
    assert run.final.sha256 == weights_sha256(model)
    sizes = [c.path.stat().st_size for c in run.checkpoints if c.path is not None]
    whole = (tmp_path / "run/checkpoints/step-00000000.safetensors").stat().st_size
    assert max(sizes) < whole / 20
    assert json.loads((tmp_path / "run/run.json").read_text())["schema"] == 2


def test_scores_are_those_of_whole_checkpoints(tmp_path: Path) -> None:
    record(tmp_path / "run")
    run = whence.Run.open(tmp_path / "run")
    whole = run.save(tmp_path / "whole")
    assert whole.fingerprint == run.fingerprint
    assert json.loads((tmp_path / "whole/run.json").read_text())["schema"] == 1
    values = [
        whence.Source()
        .attribute(
            whence.Study(Adapted(), whence.Classification(), TRAIN, each), QUERY, progress=False
        )
        .values
        for each in (run, whole, run.in_memory())
    ]
    close(values[0], values[1], 0)
    close(values[0], values[2], 0)


@pytest.mark.filterwarnings("ignore")
def test_a_frozen_weight_that_changes_is_stored_again(tmp_path: Path) -> None:
    _, states = record(tmp_path / "run", change=3)
    run = whence.Run.open(tmp_path / "run")
    for checkpoint, state in zip(run.checkpoints, states, strict=True):
        weights = checkpoint.weights()
        assert all(torch.equal(weights[name], state[name]) for name in state)
    stored = [whence.run.checkpoint.read_tensors(c.path) for c in run.checkpoints]
    assert ["base.weight" in tensors for tensors in stored] == [False, False, True, True]


def test_a_damaged_first_checkpoint_is_noticed(tmp_path: Path) -> None:
    record(tmp_path / "run")
    first = tmp_path / "run/checkpoints/step-00000000.safetensors"
    data = bytearray(first.read_bytes())
    data[-1] ^= 1
    first.write_bytes(data)
    with pytest.raises(RunError, match=r"step-00000000.safetensors.*truncated or altered"):
        whence.Run.open(tmp_path / "run").final.weights()


def test_a_trained_model_is_stored_whole(tmp_path: Path) -> None:
    model = models.mlp().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with whence.Recorder(tmp_path / "run", model, optimizer, checkpoints=[1], total_steps=1):
        x, y = TRAIN[:]
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    content = json.loads((tmp_path / "run/run.json").read_text())
    assert content["schema"] == 1 and "unchanged" not in content["checkpoints"][0]
