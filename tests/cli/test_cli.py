"""The command line, as a user types it."""

from __future__ import annotations

import ast
import errno
import inspect
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

import whence
from whence import errors
from whence.cli import main, settings
from whence.cli.methods import METHODS, REQUIRED, Option
from whence.cli.screen import explain
from whence.cli.studyfile import load_study

ROOT = Path(__file__).parents[2]

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

# `tick` interrupts this very process at a chosen moment, and counts how much was done.
STUDY = """
import atexit, os, signal, sys
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset
import whence

print("a study file may print what it likes")
ticks = 0

def tick(what):
    global ticks
    if os.environ.get("TICKS") == what:
        ticks += 1
        if ticks == int(os.environ.get("STOP_AT", "-1")):
            os.kill(os.getpid(), signal.SIGINT)

if "TICKS" in os.environ:
    atexit.register(lambda: print(f"ticks {ticks}", file=sys.stderr))

class Watched(Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y
    def __len__(self):
        return len(self.x)
    def __getitem__(self, k):
        tick("reads")
        return self.x[k], self.y[k]

generator = torch.Generator().manual_seed(0)
x = torch.randn(2100, 4, generator=generator)
y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
train, query, others = Watched(x, y), TensorDataset(x[:6], y[:6]), TensorDataset(x[:3], y[:3])
few = TensorDataset(x[:60], y[:60])
classes = ["none", "one", "both"]

def make_model():
    tick("models")
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))

def make_recipe(data, epochs):
    return whence.Recipe(
        make_model, whence.Classification(), data,
        optimizer=lambda p: torch.optim.SGD(p, lr=1.0), batch_size=20, epochs=epochs,
    )

recipe = make_recipe(few, 8)
if os.environ.get("FEW"):
    study = whence.Study(make_model(), whence.Classification(), few, recipe.run(0, "runs/few"))
else:
    run = make_recipe(TensorDataset(x, y), 1).run(0, "runs/all", checkpoints=2)
    study = whence.Study(make_model(), whence.Classification(), train, run)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_training.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_training", raising=False)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
    whence.Run.from_checkpoints([model.state_dict()], [3], 0.1).save(tmp_path / "run")
    return tmp_path


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study file with its runs."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "study.py").write_text(STUDY)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", list(sys.path))
        for few in ("", "1"):
            patch.setenv("FEW", few)
            load_study("study.py")
    return folder


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a study of 60 examples and a recipe."""
    (tmp_path / "study.py").write_text(STUDY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEW", "1")
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def command(*more: str, run: str = "run", model: str = "my_training:make_model") -> int:
    return main(["layers", run, "--model", model, "--train", "my_training:train_set", *more])


def typed(line: str) -> int:
    return main(shlex.split(line))


def answered(line: str, capsys: pytest.CaptureFixture[str], code: int = 0) -> Any:
    """What a command answers to a machine."""
    capsys.readouterr()
    assert typed(f"{line} --json") == code
    return json.loads(capsys.readouterr().out)


def process(folder: Path, line: str, **environment: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a real `whence`."""
    done = subprocess.run(
        [sys.executable, "-m", "whence.cli", *shlex.split(line)],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr


# -- layers ----------------------------------------------------------------------------------------


def test_layers_shows_what_is_tracked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command() == 0
    said = capsys.readouterr().out
    assert "5 × 4+1" in said and "3 × 5+1" in said and "all 43 parameters are tracked" in said
    assert command("--layers", "2") == 0
    assert "0 (58.1%: not chosen)" in capsys.readouterr().out
    assert command("--layers", "0", "2") == 0  # several after one option
    assert "all 43 parameters are tracked" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"run": "nowhere"}, "nowhere: no such folder"),
        ({"model": "my_training"}, "write MODULE:NAME"),
        ({"model": "my_training:mistake"}, "--model 'my_training:mistake' cannot be imported"),
        ({"model": "no_such_module:x"}, "cannot be imported"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], given: dict[str, str], message: str
) -> None:
    assert command(**given) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


# -- help, typos -----------------------------------------------------------------------------------


def test_help_and_typos(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, code in ((["--help"], 0), (["layer"], 2), (["layers", "--help"], 0)):
        assert main(arguments) == code
    assert "No such command 'layer'. Did you mean 'layers'?" in capsys.readouterr().err
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"whence {whence.__version__}\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("attribute study.py --segmants 3", "No such option: --segmants"),
        ("attribute study.py --segmants 3", "--segments"),
        ("attribute study.py --method sorce", "Did you mean source? There are source, "),
        ("attribute study.py --dimension 9", "a setting of less, trackstar, trak, not of source"),
        ("attribute study.py --method trak --dimension x", "--dimension x: use a whole number"),
        ("attribute study.py --method downsampling", "needs --truth"),
        ("attribute", "Missing argument"),
        ("attribute study.py --device cuda:99", "--device cuda:99: "),
        ("attribute study.py --device toaster", "--device toaster: use auto, cpu, cuda"),
        ("attribute study.py --dtype int8", "--dtype int8: use one of float32"),
        (
            "attribute study.py --method random --batch-size 3",
            "--batch-size does not apply to random",
        ),
        ("attribute study.py --curvature x", "--curvature x: use auto, ekfac"),
        ("attribute study.py --query nobody", "defines no 'nobody' for --query"),
        ("attribute study.py --segments 70", "70"),
        ("attribute nowhere.py", "nowhere.py does not exist"),
        ("attribute runs", "runs is a folder: give a study file"),
        ("attribute runs/few", "runs/few is a run's folder"),
        ("fit study.py --method random", "random has nothing to fit"),
        (
            "top nowhere --query 0",
            "nowhere does not exist: give a folder written by `whence",
        ),
        ("top runs --query 0", "runs holds no scores"),
        ("top study.py --query 0", "study.py is a file"),
        ("top scores --query 6", "query=6 is out of range: these scores have queries 0..5"),
        ("top scores", "--query 0..5, or --overall"),
        ("top scores --query 0 -k 0", "Invalid value for '-k'"),
        (
            "attribute study.py --out scores --segments 2",
            "It holds (6, 60) scores by Source(), of margin",
        ),
        ("lds scores scores --truth runs", "given twice"),
        ("lds scores --truth runs", "runs has no truth.json"),
        ("truth study.py --seeds many", "--seeds many: give whole numbers"),
        ("truth study.py --query self", "--query self: retraining measures queries"),
        ("removal study.py scores -k 3,1", "ascending"),
        ("report scores -o runs", "--out runs is a folder"),
        ("layers study.py --model a:b", "--model is for a run's folder"),
        ("doctor nowhere.py", "nowhere.py does not exist"),
    ],
)
def test_bad_input_is_one_line_and_2(
    small_with_scores: Path, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    capsys.readouterr()
    assert typed(line) == 2
    said = capsys.readouterr()
    told = [one for one in said.err.splitlines() if "may print" not in one]
    assert len(told) == 1 and message in told[0], said.err
    assert said.out == ""


@pytest.fixture(scope="module")
def made(recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """And with scores."""
    folder = tmp_path_factory.mktemp("made") / "here"
    shutil.copytree(recorded, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", list(sys.path))
        patch.setenv("FEW", "1")
        assert typed("attribute study.py --out scores") == 0
    return folder


@pytest.fixture
def small_with_scores(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(made)
    monkeypatch.setenv("FEW", "1")
    monkeypatch.setattr(sys, "path", list(sys.path))
    return made


def test_a_usage_error_and_help_do_not_wait_for_torch() -> None:
    code = (
        "import sys; from whence.cli import main; "
        "codes = main(['attribute', '--help']), main(['attribute', 'x.py', '--dimension', '3']); "
        "assert codes == (0, 2), codes; assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_without_the_extra_only_demo_and_version_work() -> None:
    """What a plain install is: typer and rich cannot be imported."""
    code = """
import sys
sys.modules["typer"] = sys.modules["rich"] = None
from whence.cli import main
assert main(["attribute", "study.py"]) == 2
assert main(["--version"]) == 0
try:
    main(["demo", "--help"])
except SystemExit as end:
    assert end.code == 0
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n") == 1 and "pip install 'whence-tda[cli]'" in done.stderr
    assert done.stdout.startswith(f"whence {whence.__version__}\nusage: whence demo")


@pytest.mark.slow
def test_the_demo_answers_machines(tmp_path: Path) -> None:
    code, answer, said = process(tmp_path, "demo --out tour --quiet --json")
    assert code == 0 and "Query" in said and "whence explore tour/scores/source" in said
    found = json.loads(answer)
    worst, accuracy = found["flipped_among_the_worst"], found["accuracy"]
    damped = "influence, damped like SOURCE"
    assert worst["SOURCE"] > 200 and worst[damped] > 200
    assert 200 > worst["influence, as published"] > worst["at random"]
    assert accuracy["SOURCE"] > accuracy["all"] + 0.04  # proved by retraining
    lds = found["lds"]  # SOURCE is ahead, and comes first
    assert list(lds) == sorted(lds, key=lds.__getitem__, reverse=True)
    assert lds["SOURCE"] > lds[damped] + 0.04 > lds["influence, as published"] + 0.2
    assert (tmp_path / "tour/report.html").stat().st_size > 10**5
    code, shown, said = process(tmp_path, "doctor tour/study.py --json")
    checks = {c["check"]: c for c in json.loads(shown)["study"]["checks"]}
    assert code == 0 and checks["recipe"]["message"] == "it trained the run, with seed 0"
    assert "trains" not in said
    code, shown, _ = process(tmp_path, "top tour/scores/source -q 0 --study tour/study.py")
    assert code == 0 and "image" not in shown and "label" in shown
    assert (tmp_path / found["figure"]).exists()


# -- the table of settings is that of the constructors ---------------------------------------------


def alternatives(owner: type) -> list[str]:
    """The alternative constructors of a method: its public class methods."""
    methods = inspect.getmembers(owner, inspect.ismethod)
    return [name for name, method in methods if method.__self__ is owner and name[0] != "_"]


def test_every_method_and_alternative_constructor_is_in_the_table() -> None:
    exported = {name: getattr(whence.methods, name) for name in whence.methods.__all__}
    paths = [f"{name}.{other}" for name, owner in exported.items() for other in alternatives(owner)]
    assert sorted(METHODS) == sorted([*exported, *paths])


@pytest.mark.parametrize("path", METHODS)
def test_the_table_has_the_constructors_arguments(path: str) -> None:
    """Names in order, types and defaults; change src/whence/cli/methods.py where it differs."""
    make = settings.constructor(path.lower())
    # this alternative only passes its arguments on
    kind = type(make()) if path == "Influence.published" else make
    parameters = inspect.signature(kind).parameters.values()
    real = {
        p.name: (p.annotation, REQUIRED if p.default is p.empty else p.default) for p in parameters
    }
    table = {name: (option.type, option.default) for name, option in METHODS[path].items()}
    assert list(table.items()) == list(real.items())
    assert all(option.help.endswith(".") for option in METHODS[path].values())


CHOICES = [
    pytest.param(path, name, option, id=f"{path}-{name}")
    for path, options in METHODS.items()
    for name, option in options.items()
    if option.choices
]


@pytest.mark.parametrize(("path", "name", "option"), CHOICES)
def test_the_choices_are_those_of_the_constructor(path: str, name: str, option: Option) -> None:
    make = settings.constructor(path.lower())
    for choice in option.choices:
        make(**{name: choice})
        assert settings.arguments(path.lower(), {name: choice}) == {name: choice}
    if name != "segments":  # checked when a run is cut into them
        with pytest.raises(ValueError, match=f"{name}=|{option.choices[0]}"):
            make(**{name: "no such choice"})


@pytest.mark.parametrize(
    ("method", "text", "value"),
    [
        ("source", {"segments": "2"}, {"segments": 2}),
        ("source", {"segments": "stages"}, {"segments": "stages"}),
        ("source", {"segments": "30,60"}, {"segments": [30, 60]}),
        ("source", {"damping": "1e-3"}, {"damping": 1e-3}),
        ("source.published", {"damping": "none"}, {"damping": None}),
        ("influence", {"coupling": True}, {"coupling": False}),  # --no-coupling
        ("influence", {"damping": "source"}, {"damping": "source"}),
        ("trak", {"joint": True}, {"joint": False}),  # --no-joint
        ("unrolled", {"expected": True}, {"expected": True}),
        ("leaveoneout", {"examples": "3", "seeds": "2"}, {"examples": [3], "seeds": 2}),
    ],
)
def test_texts_become_values(method: str, text: dict[str, Any], value: dict[str, Any]) -> None:
    assert settings.arguments(method, text) == value
    assert settings.find("Leave-One-Out") == "leaveoneout"
    assert settings.find("Source.published") == "source.published"


# -- the whole way ---------------------------------------------------------------------------------


def test_from_a_study_to_a_judgement(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fitted = answered("fit study.py --segments 2", capsys)
    assert len(fitted["cache"][0]["new"]) > 0
    assert answered("fit study.py --segments 2", capsys)["cache"][0]["new"] == []
    factors = sorted(path.name for path in (small / "runs/few/factors").iterdir())

    found = answered("attribute study.py --segments 2 --by-segment --out scores/source", capsys)
    assert found["shape"] == [6, 60] and found["settings"]["segments"] == 2
    # nothing was fitted again
    assert sorted(path.name for path in (small / "runs/few/factors").iterdir()) == factors
    scores = whence.Scores.load("scores/source")
    assert scores.by_segment is not None and len(scores.by_segment) == 2
    assert answered("attribute study.py --method tracin --query others -o scores/t", capsys)[
        "shape"
    ] == [3, 60]
    paper = answered("attribute study.py --method source.published -o scores/paper", capsys)
    assert paper["method"] == "Source.published" and "floor" not in paper["settings"]
    answered("attribute study.py --method tracin --by-head -o scores/heads", capsys)
    heads = whence.Scores.load("scores/heads")
    assert heads.by_layer is not None and len(heads.by_layer) == len(heads.layers) > 1
    alone = answered("attribute study.py --query self --top 5 --out scores/self", capsys)
    assert alone["self_influence"] and whence.Scores.load("scores/self").strongest is not None
    left = "attribute study.py --method leaveoneout --examples 3,5 --engine single -o scores/loo"
    assert answered(left, capsys)["shape"] == [6, 2]

    best = answered("top scores/source --query 3 -k 2 --study study.py", capsys)
    assert [e["example"] for e in best["helpful"]] == scores.helpful(3, 2).examples
    assert [e["value"] for e in best["harmful"]] == [e.value for e in scores.harmful(3, 2)]
    assert best["helpful"][0]["label"] in ("none", "one", "both") and best["shown"]["label"]
    assert typed("top scores/source --query 3 -k 2 --study study.py") == 0
    shown = capsys.readouterr().out
    first = shown.splitlines()[0]  # one does not read the label as a margin
    assert "Source, margin in logits; query 3: label " + best["shown"]["label"] in first
    assert "relative" in shown and "██████████" in shown and "±" not in shown
    assert "most helpful" in shown and str(best["harmful"][0]["example"]) in shown

    truth = answered("truth study.py --subsets 4 --seeds 2 --alpha 0.6 --out truth/x", capsys)
    assert (truth["subsets"], truth["seeds"], truth["alpha"]) == (4, [0, 1], 0.6)
    judged = answered("lds scores/source --truth truth/x --bootstrap 100", capsys)
    real = whence.evaluate.lds(scores, whence.retrain.Truth.load("truth/x"), bootstrap=100)
    assert judged["source"]["value"] == real.value
    assert typed("lds scores/source --truth truth/x --bootstrap 100") == 0
    assert "LDS of Source" in capsys.readouterr().out
    fit = {"slope": 0.5, "standard_error": 0.1, "quantile": 2.0, "removals": 9.0, "subsets": 5}
    fit |= {"fitted": 0.6, "interval": [0.4, 0.8], "residual": [0.3] * 6, "noise": None}
    sized = scores.with_values(scores.to_numpy(), diagnostics={"calibration": fit})
    sized.save("scores/sized")
    best = answered("top scores/sized --query 3 -k 1", capsys)["helpful"][0]
    expected = 2 * ((best["value"] / 5) ** 2 + 0.09 / 9) ** 0.5
    assert best["within"] == pytest.approx(expected)
    assert typed("top scores/sized --query 3 -k 1") == 0
    assert f"{best['value']:+.4g} ± {expected:.2g}" in capsys.readouterr().out

    line = "removal study.py scores/source -k 2,4 --queries 2 --seeds 1 --select-seeds 1"
    removed = answered(f"{line} --out removal/x", capsys)
    assert removed["k"] == [2, 4] and set(removed["flipped"]) == {"source", "Random"}
    page = answered("report scores/source --study study.py -o page.html", capsys)
    assert (small / "page.html").stat().st_size == page["bytes"] > 1000

    layers = answered("layers study.py", capsys)
    assert [layer["parameters"] for layer in layers["layers"]] == [25, 18]
    assert typed("top scores/source --query 3 --study my.py") == 2


def test_progress_tells_the_time_left_and_leaves_stdout_alone(
    small_with_scores: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = "attribute study.py --method tracin --json"
    assert typed(f"{line} --out log") == 0
    assert "scores:" not in capsys.readouterr().err  # a bar would fill a log file
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert typed(f"{line} --out quiet --no-progress") == 0
    assert "scores:" not in capsys.readouterr().err
    assert typed(f"{line} --out again") == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["method"] == "TracIn"
    assert re.search(r"scores: .* left", said.err)
    assert "a study file may print what it likes" in said.err


def test_the_doctor(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = answered("doctor", capsys)
    assert machine["versions"]["torch"] == metadata.version("torch")
    assert machine["devices"][0]["device"] == "cpu" and machine["devices"][0]["total"] > 0
    sound = answered("doctor study.py", capsys)["study"]
    verdicts = {check["check"]: check["verdict"] for check in sound["checks"]}
    assert sound["sound"] and verdicts == dict.fromkeys(verdicts, "sound")
    cost = next(check["message"] for check in sound["checks"] if check["check"] == "cost")
    assert "6 × covariances" in cost and "of memory" in cost
    recipe = next(check for check in sound["checks"] if check["check"] == "recipe")
    assert recipe["message"] == "it trained the run, with seed 0"
    assert typed("doctor study.py") == 0
    assert "✓ recipe" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "check", "verdict", "message"),
    [
        ("nn.Linear(4, 5)", "run, weights", "bad", "of another architecture than the model"),
        ("Watched(x, y)", "data", "bad", "differs between two reads"),
        ("TensorDataset(x[:6], y[:6])", "query", "bad", "query batches are built like"),
        ("recipe = make_recipe(few, 8)", "recipe", "bad", "is not the study's"),
        ("seed", "recipe", "note", "does not start from the run's initial weights"),
        ("rate", "recipe", "bad", "24 updates, the recipe makes 6; the learning rate at update 1"),
        ("weights", "run, weights", "bad", "truncated or altered"),
        ("", "recipe", "note", "not defined"),
    ],
)
def test_the_doctor_finds(
    small: Path,
    capsys: pytest.CaptureFixture[str],
    change: str,
    check: str,
    verdict: str,
    message: str,
) -> None:
    assert typed("layers study.py") == 0  # makes the run
    tail = {
        "nn.Linear(4, 5)": "study = whence.Study(nn.Linear(4, 3), whence.Classification(), few, "
        "'runs/few')",
        "Watched(x, y)": "class Noisy(Watched):\n"
        "    def __getitem__(self, k):\n        return self.x[k] + torch.rand(4), self.y[k]\n"
        "study = whence.Study(make_model(), whence.Classification(), Noisy(x[:60], y[:60]), "
        "'runs/few')",
        "TensorDataset(x[:6], y[:6])": "query = TensorDataset(x[:6])",
        "recipe = make_recipe(few, 8)": "recipe = make_recipe(TensorDataset(x[:70], y[:70]), 8)",
        "seed": "recipe = whence.Recipe(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), "
        "nn.Linear(5, 3)).apply(lambda m: [p.data.mul_(2) for p in m.parameters()] and None), "
        "whence.Classification(), few, optimizer=lambda p: torch.optim.SGD(p, lr=1.0), "
        "batch_size=20, epochs=8)",
        "rate": "recipe = whence.Recipe(make_model, whence.Classification(), few, "
        "optimizer=lambda p: torch.optim.SGD(p, lr=10.0), batch_size=20, epochs=2)",
        "weights": "",
        "": "del recipe",
    }[change]
    (small / "study.py").write_text(STUDY + "\n" + tail + "\n")
    if change == "weights":
        checkpoint = sorted((small / "runs/few/checkpoints").glob("*.safetensors"))[1]
        checkpoint.write_bytes(checkpoint.read_bytes()[:-1] + b"\x01")
    found = answered("doctor study.py", capsys, code=1 if verdict == "bad" else 0)["study"]
    assert found["sound"] == (verdict != "bad")
    messages = [
        c["message"] for c in found["checks"] if (c["check"], c["verdict"]) == (check, verdict)
    ]
    assert any(message in one for one in messages), found["checks"]
    every = [c["message"] for c in found["checks"] if c["verdict"] == "bad"]
    assert len(every) == len(set(every))  # a fault is reported once


def test_a_fault_that_many_checks_meet_is_one(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed("layers study.py") == 0  # makes the run
    last = sorted((small / "runs/few/checkpoints").glob("*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-1] + b"\x01")
    capsys.readouterr()
    assert typed("doctor study.py") == 1
    shown = capsys.readouterr().out
    assert shown.count("truncated or altered") == 1 and "1 problem found" in shown
    assert "batch: not checked, because of the problem of: run, weights" in shown


def test_a_model_of_another_architecture_is_one_problem(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed("layers study.py") == 0  # makes the run
    text = (small / "study.py").read_text()
    lines = (
        "import torch, whence\nstudy = whence.Study(torch.nn.Sequential(torch.nn.Linear(2, 3)), "
    )
    lines += "whence.Classification(), study.train, study.runs)\n"
    (small / "other.py").write_text(text + lines)
    capsys.readouterr()
    assert typed("doctor other.py") == 1
    shown = capsys.readouterr().out
    assert shown.count("another architecture") == 1 and "1 problem found" in shown


def test_a_study_file_does_not_train_in_silence(
    small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert typed("layers study.py") == 0
    assert "study.py trains a run first: runs/few" in capsys.readouterr().err
    assert typed("layers study.py") == 0
    assert "trains" not in capsys.readouterr().err
    elsewhere = small / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    for line in ("doctor ../study.py", "attribute ../study.py --out scores"):
        assert typed(line) == 0  # the run beside the file, not one in the current folder
        assert "trains" not in capsys.readouterr().err
    assert [path.name for path in elsewhere.iterdir()] == ["scores"]


@pytest.mark.parametrize("kind", ["RuntimeError", "ValueError", "FileNotFoundError"])
def test_what_fails_in_the_users_code_is_1(
    small: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    (small / "study.py").write_text(
        STUDY + "\nclass Bad(whence.Classification):\n    def measurements(self, outputs, batch):\n"
        f"        raise {kind}('no such luck')\n"
        "study = whence.Study(make_model(), Bad(), few, study.runs)\n"
    )
    assert typed("attribute study.py") == 1
    said = capsys.readouterr().err.splitlines()
    assert re.search(rf"failed at .*study\.py, line \d+: {kind}: no such luck", said[-1])


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidInput("k=0"), 2),
        (errors.MissingKey("k=0"), 2),
        (errors.DamagedFile("k=0"), 2),
        (errors.MissingDependency("k=0"), 2),
        (errors.NotFinite("k=0"), 1),
        (ValueError("k=0"), 1),  # not whence's: a bug, or somebody else's
    ],
)
def test_the_type_of_an_error_decides_its_code(error: Exception, code: int) -> None:
    message, found = explain(error)
    assert (
        found == code
        and "k=0" in message
        and ("WHENCE_DEBUG" in message) == (not isinstance(error, whence.WhenceError))
    )


@pytest.mark.parametrize(
    ("error", "said", "code"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), r"the disk is full \(No space", 1),
        (OSError("problem writing element 5 to file"), "the disk is full .* free some space", 1),
        (PermissionError(errno.EACCES, "Permission denied", "x"), "denied: 'x': choose another", 2),
    ],
)
def test_disks_that_are_full_or_locked(error: OSError, said: str, code: int) -> None:
    with pytest.raises(OSError) as raised:
        raise error
    message, found = explain(raised.value)
    assert re.search(said, message) and found == code


# -- real processes --------------------------------------------------------------------------------


def bits(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.npy"))}


@pytest.mark.parametrize(
    ("line", "ticks", "share", "out", "environment"),
    [
        ("attribute study.py --segments 1 --batch-size 256", "reads", 0.9, "scores", {}),
        pytest.param(
            "truth study.py --subsets 6 --seeds 2 --engine single",
            "models",
            0.8,
            "truth",
            {"FEW": "1"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["attribute", "truth"],
)
def test_the_same_command_resumes_to_the_same_bits(
    recorded: Path,
    tmp_path: Path,
    line: str,
    ticks: str,
    share: float,
    out: str,
    environment: dict[str, str],
) -> None:
    line += f" --out {out} --json"
    environment = environment | {"TICKS": ticks}
    folders = {name: tmp_path / name for name in ("whole", "cut")}
    for folder in folders.values():
        shutil.copytree(recorded, folder)
    code, answer, said = process(folders["whole"], line, **environment)
    assert code == 0 and json.loads(answer)["path"] == out, said
    total = int(re.findall(r"ticks (\d+)", said)[-1])
    stop = {"STOP_AT": str(int(share * total))}
    code, answer, said = process(folders["cut"], line, **environment, **stop)
    assert code == 130 and answer == "", said
    assert "interrupted. Finished work is kept; to resume, run the same command:" in said
    again = next(one.strip() for one in said.splitlines() if one.startswith("  whence "))
    assert again == f"whence {line}"
    assert not list((folders["cut"] / out).glob("scores.json"))
    code, answer, said = process(folders["cut"], again.removeprefix("whence "), **environment)
    assert code == 0, said
    assert int(re.findall(r"ticks (\d+)", said)[-1]) < 0.9 * total  # not all was done again
    whole, cut = (bits(folder / out) for folder in folders.values())
    assert whole and whole == cut


def test_whatever_a_study_file_prints_is_not_in_the_answer(recorded: Path) -> None:
    """Nor what C code or another process prints."""
    (recorded / "loud.py").write_text(
        "import os\nprint('a')\nos.write(1, b'b\\n')\nos.system('echo c')\nfrom study import *\n"
    )
    code, answer, said = process(recorded, "layers loud.py --json", FEW="1")
    assert code == 0 and json.loads(answer)["share"] == 1, said
    assert {"a", "b", "c"} <= set(said.split())


def test_ctrl_c_from_outside(made: Path) -> None:
    """A real SIGINT while the study file still loads."""
    (made / "slow.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(60)\n")
    running = subprocess.Popen(
        [sys.executable, "-m", "whence.cli", "attribute", "slow.py"],
        cwd=made,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stderr is not None and running.stderr.readline() == "here\n"
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=30)
    assert running.returncode == 130 and "whence attribute slow.py" in said


# -- the page --------------------------------------------------------------------------------------


def test_the_page_is_what_help_says(tmp_path: Path) -> None:
    from tools import make_cli

    assert make_cli.page() == (ROOT / "docs/cli.md").read_text(), "python -m tools.make_cli"


def test_the_pages_study_file_can_be_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every command does: with other data each time, the second would be refused."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    found = re.search(r"```python\n(# study.py\n.*?)```", (ROOT / "docs/cli.md").read_text(), re.S)
    assert found is not None
    (tmp_path / "study.py").write_text(found[1])
    first, second = load_study("study.py"), load_study("study.py")
    assert first.study.data["train"].fingerprint() == second.study.data["train"].fingerprint()
    assert first.needs_recipe().fingerprint == second.needs_recipe().fingerprint


def test_nothing_of_the_command_line_imports_torch_at_the_top() -> None:
    for file in sorted((ROOT / "src/whence/cli").glob("*.py")):
        for node in ast.parse(file.read_text()).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            light = ("whence.cli", "whence.errors", "whence.table")
            ours = [name for name in names if name.startswith("whence")]
            heavy = [name for name in names if name.startswith(("torch", "numpy"))]
            heavy += [name for name in ours if not name.startswith(light)]
            assert not heavy, (file, heavy)


# -- small things ----------------------------------------------------------------------------------


def test_without_arguments_it_helps(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert "Usage: whence" in shown and "whatif" in shown
    assert "bool" not in shown  # --version takes no value


def test_no_color_means_no_bold(small_with_scores: Path) -> None:
    loud = {"FORCE_COLOR": "1", "TERM": "xterm-256color"}
    for line in ("top scores --query 0", "--help"):
        code, shown, _ = process(small_with_scores, line, **loud)
        assert code == 0 and "\x1b[" in shown
        code, shown, _ = process(small_with_scores, line, NO_COLOR="1", **loud)
        assert code == 0 and "\x1b[" not in shown


def test_fit_says_whether_there_was_anything_to_fit(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for line, said in (
        ("fit study.py", "new files of factors"),
        ("fit study.py", "Source() was fitted before: "),
        ("fit study.py --method tracin", "TracIn() has nothing to fit"),
    ):
        assert typed(line) == 0
        assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("whence att", ["attribute"]),
        ("whence attribute study.py --method tra", ["tracin", "trackstar", "trak"]),
        ("whence attribute study.py --method trak --dim", ["--dimension"]),
        ("whence fit study.py --curvature sh", ["shampoo"]),
    ],
)
def test_tab_completes(tmp_path: Path, words: str, offered: list[str]) -> None:
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    code, shown, _ = process(tmp_path, "", _WHENCE_COMPLETE="complete_bash", **asked)
    assert code == 0 and shown.split() == offered


def test_the_ranking_over_all_queries(
    small_with_scores: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scores = whence.Scores.load("scores")
    means = scores.values.astype("float64").mean(0)
    shown = answered("top scores --overall -k 2", capsys)
    best, worst = means.argsort()[[-1, 0]]
    assert shown["helpful"][0]["example"] == best and shown["harmful"][0]["example"] == worst
    assert shown["helpful"][0]["value"] == pytest.approx(means[best])
    assert typed("top scores --overall --csv --study study.py") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "example,score,label,content" and len(lines) == 61
    assert lines[1].startswith(f"{best},") and lines[-1].startswith(f"{worst},")
    assert typed("top scores --query 1 --csv") == 0
    first = capsys.readouterr().out.splitlines()[1].split(",")
    assert int(first[0]) == scores.helpful(1, 1)[0].example
    assert typed("top scores --overall --query 1") == 2
    assert typed("top scores --overall --csv --duplicates --study study.py") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "example,score,label,content,duplicate_of" and len(lines) == 61
    assert typed("top scores --overall --csv --duplicates") == 2
    assert "--study" in capsys.readouterr().err


def test_the_card_of_a_query(small_with_scores: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert typed("card scores --query 1 --study study.py --title <Why>") == 0
    text = Path("card.svg").read_text()
    assert text.startswith("<svg") and "&lt;Why&gt;" in text and "c0" not in text
    assert any(f">{name}</text>" in text for name in ("none", "one", "both"))
    assert typed("card scores --query 1 -o card.png") == 2
    assert "--out card.png" in capsys.readouterr().err


def test_a_ranking_is_a_data_frame(small_with_scores: Path) -> None:
    pandas = pytest.importorskip("pandas")
    scores, file = whence.Scores.load("scores"), load_study("study.py")
    table = scores.ranking(file.study, **file.shown)
    assert isinstance(table, pandas.DataFrame) and len(table) == 60
    assert list(table.columns) == ["example", "score", "label", "content"]
    assert set(table.label) == {"none", "one", "both"}
    assert table.score.is_monotonic_decreasing
    own = scores.ranking(query=2)
    assert own.example[0] == scores.helpful(2, 1)[0].example


def test_text_in_a_csv_file_is_not_a_formula() -> None:
    from whence.present.ranking import csv_lines

    assert csv_lines([["=1+1", -1.5, "a,b"]]) == '\'=1+1,-1.5,"a,b"\n'
    for text in ("+1+1", "-2+3|cmd", "@SUM(A1)", "\t=1", "\n=1", " =1", "＝1+1"):
        assert csv_lines([[text]]).strip('"\n').startswith("'"), text
    for label in ("-0.3999", "+1", "-1e-3", "a=b", "x -1"):  # numbers, and no formulas
        assert csv_lines([[label]]) == f"{label}\n"


def test_what_if(small_with_scores: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scores = whence.Scores.load("scores")
    predicted = answered("whatif scores -e 3,14,15", capsys)
    assert len(predicted["queries"]) == 6 and predicted["examples"] == [3, 14, 15]
    for change in predicted["queries"]:
        assert change["predicted"] == pytest.approx(
            scores.removal_effect(change["query"], [3, 14, 15])
        )
    line = "whatif scores -e 3,14,15 --study study.py --retrain 2"
    real = answered(line, capsys)
    file = load_study("study.py")
    mask = torch.ones(60, dtype=torch.bool)
    mask[[3, 14, 15]] = False
    trainings = [whence.retrain.Training(s) for s in (0, 1)]
    trainings += [whence.retrain.Training(s, mask.numpy()) for s in (0, 1)]
    measured = whence.retrain.measure(file.recipe, file.query, trainings, progress=False)
    expected = (measured[2:] - measured[:2]).mean(0)
    for change in real["queries"]:
        assert change["real"] == pytest.approx(expected[change["query"]])
    assert typed(line) == 0
    shown = capsys.readouterr().out
    assert "retrained" in shown and "rank correlation" in shown and "label, content" in shown
    assert typed("whatif scores -e 3 --retrain 1") == 2
    assert "--study" in capsys.readouterr().err


def test_device_auto() -> None:
    from whence.cli.options import device_of

    device = device_of("auto")
    assert device is not None
    assert device.type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_labels_are_audited_in_a_file(
    small_with_scores: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import csv

    scores, file = whence.Scores.load("scores"), load_study("study.py")
    answer = answered("audit study.py scores --duplicates", capsys)
    with open("audit.csv", newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert answer["examples"] == len(rows) == 60
    harm = -scores.values.astype("float64").mean(0)
    assert [int(row["example"]) for row in rows] == (-harm).argsort(kind="stable").tolist()
    assert [float(row["suspicion"]) for row in rows] == pytest.approx(sorted(harm, reverse=True))
    (data,), (model,) = file.study.train.values(), file.study.models.values()
    inputs, _ = data[:]
    model.load_state_dict(file.study.runs[0].final.weights())
    expected = [file.shown["classes"][k] for k in model(inputs).argmax(1)]
    assert [row["prediction"] for row in rows] == [expected[int(r["example"])] for r in rows]
    differ = [row["differs"] == "True" for row in rows]
    assert differ == [row["label"] != row["prediction"] for row in rows]
    assert sum(differ) == answer["differ"]


def test_data_is_selected_and_compared_with_chance(
    small_with_scores: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "select study.py scores --drop 10% --seeds 2 --duplicates --no-progress"
    answer = answered(line, capsys)
    lines = Path("select/study/selection.csv").read_text().splitlines()
    assert lines[0] == "example,kept,help,duplicate_of" and len(lines) == 61
    assert sum(answer["kept"]) == 54 and sum(int(one.split(",")[1]) for one in lines[1:]) == 54
    assert typed(line) == 0  # again, from the same trainings
    shown = capsys.readouterr().out
    assert "as many at random" in shown and "not used for the choice" in shown
    assert answered(line, capsys)["measured"] == answer["measured"]
    for wrong, message in (
        ("", "--drop or --keep"),
        ("--drop many", "--drop many"),
        ("--drop 100%", "between 0 % and 100 %"),
        ("--keep 0%", "between 0 % and 100 %"),
    ):
        assert typed(f"select study.py scores {wrong}") == 2
        assert message in capsys.readouterr().err
