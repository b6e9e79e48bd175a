"""The command line, as a user types it."""

from __future__ import annotations

from pathlib import Path

import pytest

from whence.cli import main

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
import whence

train_set = TensorDataset(torch.randn(12, 4), torch.arange(12) % 3)

def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import torch

    import whence

    (tmp_path / "my_training.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "my_training", raising=False)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
    whence.Run.from_checkpoints([model.state_dict()], [3], 0.1).save(tmp_path / "run")
    return tmp_path


def command(*more: str, run: str = "run", model: str = "my_training:make_model") -> int:
    return main(["layers", run, "--model", model, "--train", "my_training:train_set", *more])


def test_layers_shows_what_is_tracked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command() == 0
    said = capsys.readouterr().out
    assert "5 × 4+1" in said and "3 × 5+1" in said and "all 43 parameters are tracked" in said
    assert command("--layers", "2") == 0
    assert "0 (58.1%: not chosen)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"run": "nowhere"}, "no run at nowhere"),
        ({"model": "my_training"}, "write MODULE:NAME"),
        ({"model": "my_training:mistake"}, "--model 'my_training:mistake' cannot be found"),
        ({"model": "no_such_module:x"}, "cannot be found"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], given: dict[str, str], message: str
) -> None:
    assert command(**given) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_help_and_typos(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, code in ((["--help"], 0), (["layer"], 2), (["layers", "--help"], 0)):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == code
    assert "invalid choice" in capsys.readouterr().err
