"""`whence estimate`, as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from whence.cli import main

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 500,
}
MODELS = """
import torch
from torch import nn

MEAN = torch.ones(8)
LARGEST = MEAN.max().item()

class Centred(nn.Linear):
    def __init__(self):
        super().__init__(8, 3)
        self.register_buffer("mean", MEAN)

    def forward(self, x):
        return super().forward(x - self.mean)

def small():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

def number():
    return 3

def broken():
    raise RuntimeError("no such file")

built = small()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama.json").write_text(json.dumps(LLAMA))
    (tmp_path / "bert.json").write_text('{"model_type": "bert"}')
    (tmp_path / "estimated_models.py").write_text(MODELS)


def _run(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(["estimate", *line.split()])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    line = "--model llama.json --examples 1e6 --tokens 32 --gpus 8 --gpu h100 --json"
    code, out, _ = _run(line, capsys)
    answer = json.loads(out)
    assert code == 0 and answer["fits"] and answer["network"] > 0
    assert answer["passes"] == {"covariances": 6, "eigenvalues": 6, "scores": 6}
    code, out, _ = _run("--model bert.json --examples 1,000 --tokens 16 --method tracin", capsys)
    assert code == 0 and "limited by" in out


def test_a_function(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--model estimated_models:small --input 8 --examples 1e3 --method influence --json"
    code, out, _ = _run(line, capsys)
    assert code == 0
    assert json.loads(out)["passes"] == {"covariances": 1, "eigenvalues": 1, "scores": 1}
    sheet = " --gpu mine --flops 1e14 --bandwidth 1e12 --memory 24GB"
    assert _run(line + sheet, capsys)[0] == 0


def test_a_module_that_makes_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    """Real ones, as a study file does that trains when it is imported."""
    code, _, err = _run("--model estimated_models:Centred --input 8 --examples 5", capsys)
    assert code == 0, err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--model estimated_models:small --input 8 --examples 0", "at least 1"),
        ("--model estimated_models:small --input 8 --examples 1.5", "1e6"),
        ("--model estimated_models:small --input 8 --examples many", "many"),
        ("--model estimated_models:small --input 8y8 --examples 5", "3x32x32"),
        ("--model estimated_models:small --input 8 --tokens 8 --examples 5", "one of them"),
        ("--model estimated_models:small --input 8 --examples 5 --gpu h900", "h100"),
        ("--model estimated_models:small --input 8 --examples 5 --dtype int4", "bfloat16"),
        ("--model estimated_models:small --input 8 --examples 5 --method repsim", "no estimate"),
        ("--model estimated_models:nothing --input 8 --examples 5", "nothing"),
        ("--model estimated_models:number --input 8 --examples 5", "int, not a torch.nn.Module"),
        ("--model estimated_models:broken --input 8 --examples 5", "RuntimeError: no such file"),
        ("--model estimated_models:built --input 8 --examples 5", "it is a model already"),
        ("--model estimated_models:small --input 9 --examples 5", "failed on batch example 0, 1"),
        ("--model no_such_module:make --input 8 --examples 5", "no_such_module"),
    ],
)
def test_bad_input(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = _run(line, capsys)
    assert code == 2 and not out and message in err
    assert len(err.strip().splitlines()) == 1


def test_an_unknown_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    Path("odd.json").write_text('{"model_type": "no such model"}')
    code, _, err = _run("--model odd.json --examples 5", capsys)
    assert code == 2 and "module:function" in err
