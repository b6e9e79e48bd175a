"""Runs on disk and in memory, and damaged runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.files import edit_json
from torch import Tensor, nn

from whence.run import Recorder, Run, RunError


def states(steps: list[int]) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "weight": torch.randn(2, 3, generator=generator),
            "bias": torch.randn(2, generator=generator),
            "count": torch.tensor(step),
        }
        for step in steps
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small recorded run."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with Recorder(tmp_path / "run", model, optimizer, checkpoints=3, total_steps=6):
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(5, 3)).square().mean().backward()
            optimizer.step()
    return tmp_path / "run"


def same(a: dict[str, Tensor] | None, b: dict[str, Tensor] | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.keys() == b.keys() and all(
        torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype and a[k].shape == b[k].shape for k in a
    )


# --- from checkpoints ---------------------------------------------------------------------------


def test_from_state_dicts() -> None:
    given = states([2, 4])
    run = Run.from_checkpoints(given, [2, 4], 0.5, momentum=0.9, sizes={"train": 10})
    given[0]["weight"].zero_()  # as further training would: the run has a copy
    assert same(run.checkpoints[0].weights(), states([2, 4])[0])
    assert run.final is run.checkpoints[1] and run.final.path is None
    assert run.steps == 4 and run.learning_rates.shape == run.momentums.shape == (4, 1)
    assert run.groups == [["weight", "bias"]]  # an integer buffer is not trained
    assert [(s.name, s.start, s.end, s.size) for s in run.stages] == [("train", 0, 4, 10)]
    assert run.optimizer == "sgd" and run.initial is None and run.finished
    assert run.final.second_moments() is None and run.final.optimizer_state() is None


def test_from_files(tmp_path: Path) -> None:
    first, second, third = states([1, 2, 3])
    save_file(first, tmp_path / "a.safetensors")
    torch.save({f"module._orig_mod.{k}": v for k, v in second.items()}, tmp_path / "b.pt")
    torch.save(third, tmp_path / "c.bin")
    paths = [tmp_path / name for name in ("a.safetensors", "b.pt", "c.bin")]
    run = Run.from_checkpoints([str(paths[0]), *paths[1:]], [1, 2, 3], [0.1, 0.2, 0.3])
    for checkpoint, given in zip(run.checkpoints, (first, second, third), strict=True):
        assert same(checkpoint.weights(), given)
    assert run.checkpoints[1].path == tmp_path / "b.pt"
    paths[1].write_bytes(b"something else")
    with pytest.raises(RunError, match=r"b\.pt is damaged \(truncated or altered"):
        run.checkpoints[1].weights()


def test_a_training_state_is_not_a_state_dict(tmp_path: Path) -> None:
    torch.save({"model": states([1])[0], "epoch": 3}, tmp_path / "a.pt")
    with pytest.raises(RunError, match=r"holds \['epoch', 'model'\], not a state dict"):
        Run.from_checkpoints([tmp_path / "a.pt"], [1], 0.1)
    with pytest.raises(ValueError, match="not tensors"):
        Run.from_checkpoints([{"epoch": 3}], [1], 0.1)  # type: ignore[dict-item]


def test_pickles_are_not_opened(tmp_path: Path) -> None:
    torch.save(nn.Linear(1, 1), tmp_path / "model.pt")
    with pytest.raises(RunError, match="is damaged"):
        Run.from_checkpoints([tmp_path / "model.pt"], [1], 0.1)


def test_step_zero_is_the_initial_model() -> None:
    run = Run.from_checkpoints(states([0, 2]), [0, 2], 0.1)
    assert [c.step for c in run.checkpoints] == [2]
    assert run.initial is not None and same(run.initial.weights(), states([0])[0])
    assert run.steps == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": [2]}, "2 checkpoints and 1 steps"),
        ({"steps": [4, 2]}, "must increase"),
        ({"checkpoints": [], "steps": []}, "0 checkpoints"),
        ({"learning_rates": [0.1] * 3}, r"shape \(3,\), but the last checkpoint is after 4"),
        ({"learning_rates": float("nan")}, "finite"),
        ({"learning_rates": np.ones((4, 2))}, r"2 groups: name the parameters of each in groups="),
        ({"learning_rates": np.ones((4, 2)), "groups": [["weight"]]}, "2 groups"),
        ({"groups": [["wieght"]]}, "wieght"),
        ({"groups": [["weight"], ["weight"]]}, "twice"),
        ({"momentum": [0.9]}, "momentum has shape"),
        ({"stages": {"a": 3, "b": 4}}, "each must end at a checkpoint"),
        ({"stages": {"a": 2}}, "the last at the last"),
        ({"stages": {"a": 4, "b": 4}}, "in order"),
        ({"sizes": {"tuning": 3}}, "tuning"),
        ({"second_moments": [{}]}, "1 second_moments for 2 checkpoints"),
        ({"batches": [[0, 1]]}, "1 batches for 4 updates"),
    ],
)
def test_bad_arguments(change: dict[str, object], message: str) -> None:
    arguments = {"checkpoints": states([2, 4]), "steps": [2, 4], "learning_rates": 0.1} | change
    with pytest.raises(ValueError, match=message):
        Run.from_checkpoints(**arguments)  # type: ignore[arg-type]


def test_saved_and_opened_it_is_the_same_run(tmp_path: Path) -> None:
    first, *rest = states([0, 2, 4])
    tied = [{**state, "head": state["weight"]} for state in rest]
    run = Run.from_checkpoints(
        tied,
        [2, 4],
        np.arange(8).reshape(4, 2),
        optimizer="adam",
        momentum=0.9,
        weight_decay=0.01,
        epsilon=1e-6,
        second_moments=[{"weight": state["weight"] ** 2} for state in rest],
        batches=[[0, 1], [2], [], [3, 4, 5]],
        stages={"pre": 2, "fine": 4},
        sizes={"pre": 6, "fine": 3},
        initial=first,
        subset=[0, 1, 2, 3, 4, 5],
        groups=[["weight", "head"], ["bias"]],
    )
    saved = run.save(tmp_path / "saved")
    assert saved.path == tmp_path / "saved"
    for a, b in zip(run.checkpoints, saved.checkpoints, strict=True):
        assert (a.step, a.stage, a.sha256) == (b.step, b.stage, b.sha256)
        assert same(a.weights(), b.weights()) and same(a.second_moments(), b.second_moments())
    assert same(saved.final.weights(), tied[1])
    assert len(list((tmp_path / "saved/checkpoints").iterdir())) == 5
    assert run.initial and saved.initial and same(run.initial.weights(), saved.initial.weights())
    assert saved.stages == run.stages and saved.optimizers == {"pre": "adam", "fine": "adam"}
    assert saved.hyperparameters == run.hyperparameters
    assert saved.hyperparameters[0]["eps"] == 1e-6
    assert saved.groups == run.groups and saved.fingerprint == run.fingerprint
    np.testing.assert_array_equal(saved.learning_rates, run.learning_rates)
    np.testing.assert_array_equal(saved.subset, run.subset)
    assert [b.tolist() for b in saved.batches or []] == [[0, 1], [2], [], [3, 4, 5]]
    assert saved.save(tmp_path / "again").fingerprint == run.fingerprint
    with pytest.raises(RunError, match="already holds a run"):
        run.save(tmp_path / "saved")


def test_fingerprint_tells_runs_apart() -> None:
    base = {"checkpoints": states([2, 4]), "steps": [2, 4], "learning_rates": 0.1}
    changes: list[dict[str, object]] = [
        {},
        {"learning_rates": 0.2},
        {"momentum": 0.9},
        {"optimizer": "adam"},
        {"stages": {"a": 2, "b": 4}},
        {"sizes": {"train": 5}},
        {"subset": [1, 2]},
        {"groups": [["weight"]]},
        {"checkpoints": states([4, 2])},
    ]
    prints = [Run.from_checkpoints(**(base | c)).fingerprint for c in changes]  # type: ignore[arg-type]
    assert len(set(prints)) == len(prints)
    assert Run.from_checkpoints(**base).fingerprint == prints[0]  # type: ignore[arg-type]


def test_repr_says_what_it_is() -> None:
    run = Run.from_checkpoints(states([2, 4]), [2, 4], 0.1, sizes={"train": 10})
    assert repr(run) == "Run(in memory: 4 updates, checkpoints at [2, 4], sgd, train (n=10))"


def test_trajectory_needs_every_update() -> None:
    whole = Run.from_checkpoints(states([0, 1, 2]), [0, 1, 2], 0.1)
    assert [c.step for c in whole.trajectory] == [0, 1, 2]
    assert Run.from_checkpoints(states([0, 2]), [0, 2], 0.1).trajectory == []
    with pytest.raises(ValueError, match="no update of this run led to step 0"):
        whole.rate_at(whole.trajectory[0], "weight")


# --- what is on disk ----------------------------------------------------------------------------


def test_everything_in_a_state_dict_survives(folder: Path) -> None:
    weights = Run.open(folder).final.weights()
    assert weights["1.num_batches_tracked"].dtype == torch.int64
    assert weights["1.num_batches_tracked"].shape == () and weights["1.num_batches_tracked"] == 6
    assert {"0.weight", "1.running_mean", "2.bias"} <= weights.keys()


def damage(file: str, how: Callable[[bytes], bytes] | None) -> Callable[[Path], None]:
    def do(folder: Path) -> None:
        path = folder / file
        path.unlink() if how is None else path.write_bytes(how(path.read_bytes()))

    return do


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize("kind", ["", ".moments", ".optimizer"])
@pytest.mark.parametrize(
    ("how", "message"),
    [(None, "missing"), (lambda d: d[: len(d) // 2], "truncated or altered"), (flipped, "altered")],
)
def test_a_damaged_checkpoint_is_named(
    folder: Path, kind: str, how: Callable[[bytes], bytes] | None, message: str
) -> None:
    name = f"step-00000004{kind}.safetensors"
    damage(f"checkpoints/{name}", how)(folder)
    run = Run.open(folder)  # the others may still be read
    assert run.final.weights()
    middle = run.checkpoints[1]
    read = {"": middle.weights, ".moments": middle.second_moments}.get(kind, middle.optimizer_state)
    with pytest.raises(RunError, match=f"{name}.*{message}"):
        read()


@pytest.mark.parametrize(
    ("damaging", "message"),
    [
        (damage("run.json", None), "no run.json"),
        (damage("run.json", lambda d: d[:100]), "run.json is damaged"),
        (damage("run.json", lambda d: d.replace(b'"schema": 1', b'"schema": 99')), "has schema 99"),
        (
            damage("run.json", lambda d: d.replace(b'"stages"', b'"phases"')),
            "its checksum",
        ),
        (lambda folder: edit_json(folder / "run.json", stages=[{}]), "'name' is missing"),
        (damage("learning_rates.npy", None), r"learning_rates\.npy is missing"),
        (damage("learning_rates.npy", lambda d: d[:130]), r"learning_rates\.npy is damaged"),
        (damage("momentums.npy", lambda d: b""), r"momentums\.npy is damaged"),
    ],
)
def test_a_damaged_folder_is_refused(
    folder: Path, damaging: Callable[[Path], None], message: str
) -> None:
    damaging(folder)
    with pytest.raises(RunError, match=message):
        Run.open(folder)


@pytest.mark.parametrize("shape", [(5, 1), (7, 1), (6, 2), (6,)])
def test_rates_of_the_wrong_length_are_refused(folder: Path, shape: tuple[int, ...]) -> None:
    np.save(folder / "learning_rates.npy", np.ones(shape))
    with pytest.raises(RunError, match=r"learning_rates\.npy is float64 of shape"):
        Run.open(folder)


def test_arrays_are_never_unpickled(folder: Path) -> None:
    np.save(folder / "momentums.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(RunError, match="damaged"):
        Run.open(folder)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no such folder"):
        Run.open(tmp_path / "nowhere")


def test_a_file_outside_the_folder_is_not_read(folder: Path, tmp_path: Path) -> None:
    content = json.loads((folder / "run.json").read_text())
    save_file(states([1])[0], tmp_path / "other.safetensors")
    content["checkpoints"][0]["file"] = "../../other.safetensors"
    edit_json(folder / "run.json", checkpoints=content["checkpoints"])
    with pytest.raises(RunError, match=r"checkpoints/other\.safetensors is missing"):
        Run.open(folder).checkpoints[0].weights()


def test_the_architecture_is_what_no_version_of_torch_changes() -> None:
    """Names and kinds of modules, rates of dropout, momenta of batch norms; nothing of the repr."""
    from whence.run.checkpoint import architecture_sha256

    def net(p: float = 0.1, momentum: float | None = 0.1, last: type = nn.ReLU) -> nn.Module:
        return nn.Sequential(
            nn.Linear(2, 3), nn.BatchNorm1d(3, momentum=momentum), nn.Dropout(p), last()
        )

    class Wordy(nn.BatchNorm1d):
        def extra_repr(self) -> str:
            return super().extra_repr() + ", more=than before"

    wordy, same = net(), architecture_sha256(net())
    Wordy.__qualname__ = "BatchNorm1d"
    wordy[1].__class__ = Wordy
    assert repr(wordy) != repr(net()) and architecture_sha256(wordy) == same
    others = [net(p=0.2), net(momentum=0.2), net(momentum=None), net(last=nn.Tanh)]
    assert len({same, *map(architecture_sha256, others)}) == 1 + len(others)
