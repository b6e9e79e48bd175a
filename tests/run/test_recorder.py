"""Recording real training loops, and resuming them after an interruption."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

import whence.run
from whence.run import Recorder, Run, RunError

T = 12


@pytest.fixture(autouse=True)
def loud() -> Iterator[None]:
    """A warning nobody expects is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        # torch warns if the scheduler steps first, or repeats steps of updates made earlier
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        yield


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def sgd(model: nn.Module, **options: Any) -> Optimizer:
    return SGD(model.parameters(), **({"lr": 0.1, "momentum": 0.9} | options))


def batch(step: int) -> Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(step))


def update(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    optimizer.zero_grad()
    model(batch(step)).square().mean().backward()
    optimizer.step()


def train(model: nn.Module, optimizer: Optimizer, start: int = 0, end: int = T) -> None:
    for step in range(start, end):
        update(model, optimizer, step)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def content(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


# --- a plain loop -------------------------------------------------------------------------------


def test_a_plain_loop(tmp_path: Path) -> None:
    model, alone = mlp(), mlp()
    optimizer = sgd(model, dampening=0.1, weight_decay=0.01)
    initial = copy.deepcopy(model.state_dict())
    with Recorder(tmp_path / "run", model, optimizer, checkpoints=4, total_steps=T, size=60):
        train(model, optimizer)
    run = Run.open(tmp_path / "run")
    assert [c.step for c in run.checkpoints] == [3, 6, 9, 12]
    assert run.initial is not None and same(run.initial.weights(), initial)
    assert same(run.final.weights(), model.state_dict())
    assert run.finished and run.optimizer == "sgd" and run.steps == T
    assert run.groups == [[name for name, _ in model.named_parameters()]]
    assert (run.learning_rates == 0.1).all() and run.learning_rates.shape == (T, 1)
    assert (run.momentums == 0.9).all()
    settings = run.hyperparameters[0]
    assert settings["dampening"] == 0.1 and settings["weight_decay"] == 0.01
    assert settings["nesterov"] is False and "lr" not in settings
    assert [(s.name, s.start, s.end, s.size) for s in run.stages] == [("train", 0, T, 60)]
    assert run.segments(1)[0].rate("0.weight") == pytest.approx(0.1 * 0.9 / 0.1)
    # Recording changes nothing in the training, and leaves no hook behind.
    other = sgd(alone, dampening=0.1, weight_decay=0.01)
    train(alone, other)
    assert same(alone.state_dict(), model.state_dict())
    assert not optimizer._optimizer_step_post_hooks and not optimizer._optimizer_step_pre_hooks  # type: ignore[attr-defined]
    # Each checkpoint is the model of its moment.
    again = mlp()
    train(again, sgd(again, dampening=0.1, weight_decay=0.01), end=6)
    assert same(run.checkpoints[1].weights(), again.state_dict())


def test_chosen_checkpoints_and_the_final_model(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    with Recorder(tmp_path / "run", model, optimizer, checkpoints=[1, 5]):
        train(model, optimizer)
    run = Run.open(tmp_path / "run")
    assert [c.step for c in run.checkpoints] == [1, 5, T]
    assert same(run.final.weights(), model.state_dict())


@pytest.mark.parametrize("end", [T - 2, T + 2])
def test_a_training_of_another_length_warns(tmp_path: Path, end: int) -> None:
    model = mlp()
    optimizer = sgd(model)
    with (
        pytest.warns(UserWarning, match=rf"reach update 12 \(total_steps\), but reached {end}"),
        Recorder(tmp_path / "run", model, optimizer, checkpoints=2, total_steps=T),
    ):
        train(model, optimizer, end=end)
    run = Run.open(tmp_path / "run")
    assert run.finished and run.final.step == end
    assert same(run.final.weights(), model.state_dict())


def test_missed_checkpoints_warn(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    with (
        pytest.warns(UserWarning, match=r"no checkpoints at \[50\]"),
        Recorder(tmp_path / "run", model, optimizer, checkpoints=[5, 50]),
    ):
        train(model, optimizer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "pass total_steps="),
        ({"checkpoints": 6, "total_steps": 3}, "use checkpoints<=3"),
        ({"checkpoints": 0, "total_steps": 3}, "at least 1"),
        ({"checkpoints": [3, 2]}, "increasing"),
        ({"checkpoints": [0, 2]}, "increasing"),
        ({"checkpoints": []}, "increasing"),
        ({"total_steps": 0}, "at least one update"),
        ({"total_steps": 9, "size": 0}, "at least one example"),
    ],
)
def test_impossible_plans(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    model = mlp()
    with pytest.raises(ValueError, match=message):
        Recorder(tmp_path, model, sgd(model), **options)


def test_the_optimizer_of_another_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="trains no parameter of the model"):
        Recorder(tmp_path, mlp(), sgd(mlp()), total_steps=T)
    model, temperature = mlp(), nn.Parameter(torch.ones(()))
    optimizer = SGD([*model.parameters(), temperature], lr=0.1)
    with pytest.warns(UserWarning, match="1 of the optimizer's 5 parameters"):
        Recorder(tmp_path, model, optimizer, total_steps=T)


def test_no_update_leaves_nothing(tmp_path: Path) -> None:
    model = mlp()
    with (
        pytest.warns(UserWarning, match="no update"),
        Recorder(tmp_path / "run", model, sgd(model), total_steps=T),
    ):
        pass
    assert not (tmp_path / "run").exists()


# --- rates as they were applied -----------------------------------------------------------------


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_schedulers_before_and_after(tmp_path: Path, first: bool) -> None:
    model = mlp()
    optimizer = sgd(model, momentum=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    with Recorder(tmp_path / "run", model, optimizer, checkpoints=[4, T]):
        for step in range(T):
            if first:
                scheduler.step()
            update(model, optimizer, step)
            if not first:
                scheduler.step()
    run = Run.open(tmp_path / "run")
    applied = 0.1 / (1 + np.arange(T) + first)
    np.testing.assert_allclose(run.learning_rates[:, 0], applied)
    assert run.rate_at(run.checkpoints[0], "0.bias") == pytest.approx(applied[3])
    assert run.segments(2)[1].rate("0.bias") == pytest.approx(applied[4:].mean())


def test_cycled_momentum(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=T + 1)
    lr, momentum = [], []
    with Recorder(tmp_path / "run", model, optimizer, checkpoints=1, total_steps=T):
        for step in range(T):
            lr.append(optimizer.param_groups[0]["lr"])
            momentum.append(optimizer.param_groups[0]["momentum"])
            update(model, optimizer, step)
            scheduler.step()
    run = Run.open(tmp_path / "run")
    np.testing.assert_array_equal(run.learning_rates[:, 0], lr)
    np.testing.assert_array_equal(run.momentums[:, 0], momentum)
    assert len(set(momentum)) > 3
    (segment,) = run.segments(1)
    assert segment.rate("0.weight") == pytest.approx(np.mean(lr) / (1 - np.mean(momentum)))


def test_gradient_accumulation_counts_updates(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    with Recorder(tmp_path / "run", model, optimizer, checkpoints=3, total_steps=T // 4):
        for step in range(T):
            model(batch(step)).square().mean().backward()
            if step % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
    run = Run.open(tmp_path / "run")
    assert run.steps == 3 and [c.step for c in run.checkpoints] == [1, 2, 3]


@pytest.mark.parametrize("fused", [False, True])
def test_updates_skipped_by_amp_are_not_counted(tmp_path: Path, fused: bool) -> None:
    """A fused optimizer is called by the scaler even then, and leaves the weights alone itself."""
    model = mlp()
    optimizer = Adam(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu")
    with Recorder(tmp_path / "run", model, optimizer, checkpoints=[1, 2, 3]):
        for scale in (float("inf"), 1.0, 1.0, float("inf"), 1.0):
            before = copy.deepcopy(model.state_dict())
            optimizer.zero_grad()
            scaler.scale(model(batch(0)).square().mean() * scale).backward()
            scaler.step(optimizer)
            scaler.update()
            assert same(before, model.state_dict()) == (scale != 1.0)
    run = Run.open(tmp_path / "run")
    assert run.steps == 3 and len({c.sha256 for c in run.checkpoints}) == 3
    assert run.initial and run.initial.sha256 != run.checkpoints[0].sha256


def test_parameter_groups_and_frozen_parameters(tmp_path: Path) -> None:
    model = mlp()
    model[0].weight.requires_grad_(False)  # in the optimizer, but never updated
    groups = [
        {"params": [model[0].weight, model[2].weight]},
        {"params": [model[2].bias], "lr": 1.0},
    ]
    optimizer = SGD(groups, lr=0.1)
    with Recorder(tmp_path / "run", model, optimizer, checkpoints=2, total_steps=T):
        train(model, optimizer)
    run = Run.open(tmp_path / "run")
    assert run.groups == [["2.weight"], ["2.bias"]]
    np.testing.assert_array_equal(run.learning_rates, np.tile([0.1, 1.0], (T, 1)))
    rates = {name: run.segments(1)[0].rate(name) for name, _ in model.named_parameters()}
    assert rates == pytest.approx({"0.weight": 0, "0.bias": 0, "2.weight": 0.1, "2.bias": 1.0})
    assert run.initial and torch.equal(
        run.initial.weights()["0.weight"], run.final.weights()["0.weight"]
    )


def test_parameters_unfrozen_on_the_way(tmp_path: Path) -> None:
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = sgd(model)
    with Recorder(tmp_path / "run", model, optimizer, checkpoints=2, total_steps=T):
        train(model, optimizer, end=6)
        model[0].requires_grad_(True)
        train(model, optimizer, start=6)
    run = Run.open(tmp_path / "run")
    first, second = run.segments(2)
    assert first.rate("0.weight") == 0 and first.rate("2.weight") == pytest.approx(1.0)
    assert second.rate("0.weight") == second.rate("2.weight") == pytest.approx(1.0)
    # half of one segment: half the mean rate, the momentum as it was
    (whole,) = run.segments(1)
    assert whole.rate("0.weight") == pytest.approx(0.5)
    assert whole.rate("2.weight") == pytest.approx(1.0)
    assert run.rate_at(run.checkpoints[0], "0.weight") == 0
    assert run.rate_at(run.final, "0.weight") == 0.1


def test_an_unknown_optimizer(tmp_path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    with Recorder(tmp_path / "run", model, optimizer, checkpoints=2, total_steps=T):
        train(model, optimizer)
    run = Run.open(tmp_path / "run")
    assert run.optimizer == "Adagrad" and run.final.second_moments() is None


def test_wrapped_models_have_plain_names(tmp_path: Path) -> None:
    model = mlp()
    wrapped = nn.DataParallel(torch.compile(model))  # type: ignore[arg-type]
    optimizer = sgd(wrapped)
    with Recorder(tmp_path / "run", wrapped, optimizer, checkpoints=2, total_steps=T):
        train(model, optimizer)
    run = Run.open(tmp_path / "run")
    assert run.final.weights().keys() == model.state_dict().keys()
    assert run.groups == [[name for name, _ in model.named_parameters()]]
    fresh = nn.DataParallel(mlp())
    assert Recorder(tmp_path / "run", fresh, sgd(fresh), total_steps=T).restore() == T
    assert same(fresh.module.state_dict(), model.state_dict())


def test_optimizers_wrapped_by_a_trainer(tmp_path: Path) -> None:
    class Wrapper(Optimizer):
        def __init__(self, optimizer: Optimizer) -> None:
            self.optimizer = optimizer

        def step(self, closure: Any = None) -> None:
            self.optimizer.step(closure)

    model = mlp()
    inner = sgd(model)
    with Recorder(tmp_path / "run", model, Wrapper(inner), checkpoints=1, total_steps=T):
        train(model, inner)
    assert Run.open(tmp_path / "run").optimizer == "sgd"


def test_notes_are_stored_and_warned_about(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    notes = {"clip_norm": 1.0, "ema": 0.999}
    with (
        pytest.warns(UserWarning, match=r"not modelled by SOURCE: clip_norm=1\.0, ema=0\.999"),
        Recorder(tmp_path / "run", model, optimizer, total_steps=T, notes=notes, subset=[3, 1]),
    ):
        train(model, optimizer)
    run = Run.open(tmp_path / "run")
    assert run.notes == notes
    assert run.subset is not None and run.subset.tolist() == [3, 1]


# --- weights and moments ------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.embedding(tokens)))
        return out


def test_tied_weights_are_kept_once(tmp_path: Path) -> None:
    model = Tied()
    optimizer = Adam(model.parameters(), lr=0.01)
    with Recorder(tmp_path / "run", model, optimizer, checkpoints=2, total_steps=4):
        for _ in range(4):
            optimizer.zero_grad()
            F.cross_entropy(model(torch.arange(7)), torch.arange(7)).backward()
            optimizer.step()
    run = Run.open(tmp_path / "run")
    weights = run.final.weights()
    assert same(weights, model.state_dict())
    assert weights["norm.num_batches_tracked"].shape == ()
    assert weights["head.weight"] is weights["embedding.weight"]
    assert run.final.path is not None
    assert run.final.path.stat().st_size < 2 * model.head.weight.nbytes + 1000
    moments = run.final.second_moments()
    assert moments is not None and "head.weight" in moments
    assert run.segments(1)[0].rate("head.weight") == pytest.approx(0.01)
    fresh = Tied()
    assert Recorder(tmp_path / "run", fresh, Adam(fresh.parameters()), total_steps=9).restore() == 4
    assert fresh.head.weight is fresh.embedding.weight
    assert same(fresh.state_dict(), model.state_dict())


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_adam_moments_by_hand(tmp_path: Path, kind: type[Adam], amsgrad: bool) -> None:
    model = mlp().double()
    optimizer = kind(model.parameters(), lr=0.05, betas=(0.8, 0.9), amsgrad=amsgrad)
    moment = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    largest = copy.deepcopy(moment)
    expected = {}
    with Recorder(tmp_path / "run", model, optimizer, checkpoints=[2, 5]):
        for step in range(1, 6):
            optimizer.zero_grad()
            (model(batch(step).double()).square().mean() / step).backward()
            for name, p in model.named_parameters():
                assert p.grad is not None
                moment[name] = 0.9 * moment[name] + 0.1 * p.grad**2
                largest[name] = torch.maximum(largest[name], moment[name])
            optimizer.step()
            uncorrected = largest if amsgrad else moment
            expected[step] = {name: v / (1 - 0.9**step) for name, v in uncorrected.items()}
    run = Run.open(tmp_path / "run")
    assert run.optimizer == kind.__name__.lower()
    assert run.momentums[0, 0] == 0.8 and run.hyperparameters[0]["betas"] == [0.8, 0.9]
    for checkpoint in run.checkpoints:
        moments = checkpoint.second_moments()
        assert moments is not None and moments.keys() == expected[checkpoint.step].keys()
        for name, v in expected[checkpoint.step].items():
            torch.testing.assert_close(moments[name], v, rtol=1e-12, atol=0)


def test_moments_of_rmsprop_and_sgd(tmp_path: Path) -> None:
    model = mlp()
    optimizer = RMSprop(model.parameters(), lr=0.01)
    with Recorder(tmp_path / "a", model, optimizer, checkpoints=1, total_steps=T):
        train(model, optimizer)
    moments = Run.open(tmp_path / "a").final.second_moments()
    assert moments and torch.equal(moments["0.bias"], optimizer.state[model[0].bias]["square_avg"])
    model = mlp()
    with Recorder(tmp_path / "b", model, momentum := sgd(model), checkpoints=1, total_steps=T):
        train(model, momentum)
    assert Run.open(tmp_path / "b").final.second_moments() is None


# --- stages -------------------------------------------------------------------------------------


def test_stages(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    with Recorder(tmp_path / "run", model, optimizer, checkpoints=2, total_steps=8) as recorder:
        recorder.stage("pre", size=100)  # before the first update: its name and size
        train(model, optimizer, end=8)
        boundary = copy.deepcopy(model.state_dict())
        recorder.stage("fine", size=10, total_steps=4, checkpoints=2)
        train(model, optimizer, start=8)
    run = Run.open(tmp_path / "run")
    assert [(s.name, s.start, s.end, s.size) for s in run.stages] == [
        ("pre", 0, 8, 100),
        ("fine", 8, 12, 10),
    ]
    assert [(c.step, c.stage) for c in run.checkpoints] == [
        (4, "pre"),
        (8, "pre"),
        (10, "fine"),
        (12, "fine"),
    ]
    assert same(run.checkpoints[1].weights(), boundary)
    assert [s.stage.name for s in run.segments("stages")] == ["pre", "fine"]
    assert run.learning_rates.shape == (T, 1)  # the same optimizer: the same column


def test_a_stage_ends_with_a_checkpoint(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    with Recorder(tmp_path / "run", model, optimizer, checkpoints=3, total_steps=T) as recorder:
        train(model, optimizer, end=5)
        recorder.stage("fine")
        train(model, optimizer, start=5)
        with pytest.raises(RunError, match="stage 'train' is over"):
            recorder.stage("train")
    run = Run.open(tmp_path / "run")
    assert [(c.step, c.stage) for c in run.checkpoints] == [
        (4, "train"),
        (5, "train"),
        (8, "fine"),
        (12, "fine"),
    ]


def two_optimizers(path: Path, stop: int | None = None, restore: bool = False) -> nn.Module:
    """Pre-training of everything by Adam, fine-tuning of the head by SGD, perhaps interrupted."""
    model = mlp()
    adam, tuning = Adam(model.parameters(), lr=0.01), SGD(model[2].parameters(), 0.5, momentum=0.5)
    recorder = Recorder(path, model, adam, checkpoints=2, total_steps=6, stage="pre")
    start = recorder.restore() if restore else 0
    with recorder:
        for step in range(T):
            if step == 6:
                recorder.stage("fine", optimizer=tuning, total_steps=6, checkpoints=2, size=3)
            if step == stop:
                raise KeyboardInterrupt
            if step >= start:
                update(model, adam if step < 6 else tuning, step)
    return model


def test_a_stage_with_its_own_optimizer(tmp_path: Path) -> None:
    model = two_optimizers(tmp_path / "run")
    run = Run.open(tmp_path / "run")
    assert run.optimizers == {"pre": "adam", "fine": "sgd"} and run.optimizer == "sgd"
    assert run.groups == [[n for n, _ in model.named_parameters()], ["2.weight", "2.bias"]]
    np.testing.assert_array_equal(run.learning_rates, [[0.01, 0]] * 6 + [[0, 0.5]] * 6)
    np.testing.assert_array_equal(run.momentums, [[0.9, 0]] * 6 + [[0, 0.5]] * 6)
    pre, fine = run.segments("stages")
    assert (pre.rate("0.bias"), pre.rate("2.bias")) == pytest.approx((0.01, 0.01))
    assert (fine.rate("0.bias"), fine.rate("2.bias")) == pytest.approx((0.0, 1.0))
    assert run.checkpoints[1].second_moments() and not run.checkpoints[2].second_moments()
    assert run.rate_at(run.final, "2.bias") == 0.5 and run.rate_at(run.final, "0.bias") == 0


@pytest.mark.parametrize("stop", [2, 5, 6, 8, 10])
def test_stages_with_their_own_optimizers_resume_exactly(tmp_path: Path, stop: int) -> None:
    two_optimizers(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        two_optimizers(tmp_path / "run", stop)
    two_optimizers(tmp_path / "run", restore=True)
    assert content(tmp_path / "run") == content(tmp_path / "whole")


def test_a_stage_added_to_a_finished_run(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    with Recorder(tmp_path / "run", model, optimizer, checkpoints=2, total_steps=6):
        train(model, optimizer, end=6)
    model = mlp()
    optimizer = Adam(model.parameters(), lr=0.01)
    recorder = Recorder(
        tmp_path / "run", model, optimizer, checkpoints=2, total_steps=6, stage="fine", size=9
    )
    assert recorder.restore() == 6
    with recorder:
        train(model, optimizer, start=6)
    run = Run.open(tmp_path / "run")
    assert [(c.step, c.stage) for c in run.checkpoints] == [
        (3, "train"),
        (6, "train"),
        (9, "fine"),
        (12, "fine"),
    ]
    assert run.optimizers == {"train": "sgd", "fine": "adam"} and run.finished
    assert run.learning_rates.shape == (T, 2)


def test_a_stage_needs_the_recorder_to_be_running(tmp_path: Path) -> None:
    model = mlp()
    with pytest.raises(RunError, match=r"stage\(.* is not possible before the recorder's `with`"):
        Recorder(tmp_path, model, sgd(model), total_steps=T).stage("fine")


# --- states -------------------------------------------------------------------------------------


def test_calls_in_the_wrong_state_are_refused(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    recorder = Recorder(tmp_path / "run", model, optimizer, checkpoints=2, total_steps=T)
    with recorder:
        with (
            pytest.raises(RunError, match="is not possible inside the recorder's `with`"),
            recorder,
        ):
            pass
        train(model, optimizer, end=6)
        with pytest.raises(RunError, match=r"restore\(\) is not possible after the first update"):
            recorder.restore()
        with pytest.raises(RunError, match="`with recorder` is not possible after"), recorder:
            pass
        train(model, optimizer, start=6)
    assert recorder.updates == 0
    with pytest.raises(RunError, match=r"stage\(.* is not possible after the recorder's `with`"):
        recorder.stage("fine")
    run = Run.open(tmp_path / "run")
    assert run.finished and run.steps == T
    assert not optimizer._optimizer_step_post_hooks and not optimizer._optimizer_step_pre_hooks


def test_a_recorder_may_be_entered_again(tmp_path: Path) -> None:
    """After its end it appends to the run; after restore() it resumes from the last checkpoint."""
    model = mlp()
    optimizer = sgd(model)
    recorder = Recorder(tmp_path / "run", model, optimizer, checkpoints=[3, 6, 9, T])
    with pytest.warns(UserWarning, match=r"no checkpoints at \[9, 12\]"), recorder:
        train(model, optimizer, end=6)
    with pytest.raises(KeyboardInterrupt), recorder:
        train(model, optimizer, start=6, end=10)
        raise KeyboardInterrupt
    assert recorder.restore() == 9
    with recorder:
        train(model, optimizer, start=9)
    plain(tmp_path / "whole")
    assert content(tmp_path / "run") == content(tmp_path / "whole")


def test_only_a_recipe_sets_the_origin(tmp_path: Path) -> None:
    model = mlp()
    with pytest.raises(TypeError, match="origin"):
        Recorder(tmp_path, model, sgd(model), total_steps=T, origin={})  # type: ignore[call-arg]


# --- batches and every step ---------------------------------------------------------------------


def test_batches_and_every_step(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    path = tmp_path / "run"
    seen = [copy.deepcopy(model.state_dict())]
    with Recorder(path, model, optimizer, checkpoints=[2], every_step=True) as recorder:
        for step in range(5):
            recorder.step(torch.tensor([99]))  # a batch whose update was skipped
            recorder.step(torch.arange(step))
            update(model, optimizer, step)
            seen.append(copy.deepcopy(model.state_dict()))
    run = Run.open(path)
    assert [c.step for c in run.checkpoints] == [2, 5]
    assert [c.step for c in run.trajectory] == [0, 1, 2, 3, 4, 5]
    assert all(same(c.weights(), w) for c, w in zip(run.trajectory, seen, strict=True))
    assert [b.tolist() for b in run.batches or []] == [list(range(step)) for step in range(5)]
    copied = run.save(tmp_path / "copy")
    assert len(copied.trajectory) == 6 and copied.fingerprint == run.fingerprint


def test_batches_of_only_some_updates_are_refused(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    with Recorder(tmp_path / "a", model, optimizer, total_steps=T) as recorder:
        update(model, optimizer, 0)
        with pytest.raises(RunError, match=r"before every optimizer\.step"):
            recorder.step([0])
        train(model, optimizer, start=1)
    with (
        pytest.raises(RunError, match=r"update 2 was made without recorder\.step"),
        Recorder(tmp_path / "b", model, optimizer, total_steps=T) as recorder,
    ):
        recorder.step([0])
        update(model, optimizer, 0)
        update(model, optimizer, 1)
    assert not Run.open(tmp_path / "b").finished


# --- interruptions ------------------------------------------------------------------------------

KINDS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "momentum": sgd,
    "adam": lambda model: Adam(model.parameters(), lr=0.02, amsgrad=True),
    "rmsprop": lambda model: RMSprop(model.parameters(), lr=0.01, momentum=0.5),
}


def interrupted(
    path: Path,
    kind: str,
    stop: int | None = None,
    inside: bool = False,
    error: type[BaseException] = KeyboardInterrupt,
    **options: Any,
) -> nn.Module:
    """A loop that can resume, with a scheduler and batches."""
    model = mlp()
    optimizer = KINDS[kind](model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    recorder = Recorder(path, model, optimizer, checkpoints=4, total_steps=T, size=60, **options)
    start = 0 if inside else recorder.restore()
    with recorder:
        if inside:
            start = recorder.restore()
        for step in range(T):
            if step == stop:
                raise error
            if step >= start:
                recorder.step([step, step + 1])
                update(model, optimizer, step)
            scheduler.step()
    return model


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_restored_training_ends_with_the_same_bits(
    tmp_path: Path, kind: str, inside: bool
) -> None:
    whole = interrupted(tmp_path / "whole", kind, every_step=True)
    with pytest.raises(KeyboardInterrupt):
        interrupted(tmp_path / "run", kind, stop=2, every_step=True)
    with pytest.raises(ZeroDivisionError):
        interrupted(tmp_path / "run", kind, 8, inside, ZeroDivisionError, every_step=True)
    run = Run.open(tmp_path / "run")
    assert not run.finished and "unfinished" in repr(run)
    assert run.steps == 8 and [c.step for c in run.checkpoints] == [3, 6]
    assert [s.end for s in run.segments(2)] == [3, 6]
    model = interrupted(tmp_path / "run", kind, inside=inside, every_step=True)
    assert same(model.state_dict(), whole.state_dict())
    assert content(tmp_path / "run") == content(tmp_path / "whole")
    # Once more changes nothing.
    again = interrupted(tmp_path / "run", kind, every_step=True)
    assert same(again.state_dict(), whole.state_dict())
    assert content(tmp_path / "run") == content(tmp_path / "whole")


def plain(path: Path, end: int = T, model: nn.Module | None = None, **options: Any) -> nn.Module:
    model = model or mlp()
    optimizer = sgd(model)
    with Recorder(path, model, optimizer, **({"checkpoints": [3, 6, 9, T]} | options)):
        train(model, optimizer, end=end)
        if end < T:
            raise KeyboardInterrupt
    return model


def test_the_same_program_again_after_an_interruption(tmp_path: Path) -> None:
    plain(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        plain(tmp_path / "run", end=7)
    plain(tmp_path / "run")
    assert content(tmp_path / "run") == content(tmp_path / "whole")


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    for name in ("step-100.pt", "step-best.safetensors"):
        (tmp_path / "checkpoints" / name).write_text("mine")
    plain(tmp_path)
    assert (tmp_path / "checkpoints/step-100.pt").read_text() == "mine"
    assert (tmp_path / "checkpoints/step-best.safetensors").read_text() == "mine"


def test_a_finished_run_is_not_overwritten(tmp_path: Path) -> None:
    plain(tmp_path / "run")
    before = content(tmp_path / "run")
    with pytest.raises(RunError, match=r"finished run of 12 updates.*overwrite=True"):
        plain(tmp_path / "run")
    with pytest.raises(RunError, match=r"none of its checkpoints.*recorder\.restore\(\)"):
        plain(tmp_path / "run", model=nn.Sequential(nn.Linear(3, 3)))
    earlier = mlp()
    earlier.load_state_dict(Run.open(tmp_path / "run").checkpoints[0].weights())
    with pytest.raises(RunError, match="weights from after update 3"):
        plain(tmp_path / "run", model=earlier)
    assert content(tmp_path / "run") == before
    plain(tmp_path / "run", overwrite=True)
    assert content(tmp_path / "run") == before
    plain(tmp_path / "run", overwrite=True, checkpoints=[T])
    assert len(list((tmp_path / "run/checkpoints").glob("*"))) == 3  # nothing stale is left


def test_resuming_from_an_earlier_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        plain(tmp_path / "run", end=7)
    model = mlp()
    model.load_state_dict(Run.open(tmp_path / "run").checkpoints[0].weights())
    optimizer = sgd(model, lr=0.3)
    with Recorder(tmp_path / "run", model, optimizer, checkpoints=[3, 8]) as recorder:
        assert recorder.updates == 3
        train(model, optimizer, end=5)
    run = Run.open(tmp_path / "run")
    assert run.learning_rates[:, 0].tolist() == [0.1] * 3 + [0.3] * 5
    assert [c.step for c in run.checkpoints] == [3, 8]
    assert len(list((tmp_path / "run/checkpoints").glob("step-00000006*"))) == 0


def test_weights_loaded_inside_the_with_do_not_wipe_a_run(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        plain(tmp_path / "run", end=7)
    before = content(tmp_path / "run")
    model = mlp()
    optimizer = sgd(model)
    with (
        pytest.raises(RunError, match="changed inside the `with`"),
        Recorder(tmp_path / "run", model, optimizer, total_steps=T),
    ):
        model.load_state_dict(Run.open(tmp_path / "run").final.weights())
        train(model, optimizer)
    assert content(tmp_path / "run") == before


def test_a_run_that_cannot_be_resumed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        plain(tmp_path / "run", end=7, size=60, subset=[1, 2])
    recorder = Recorder(tmp_path / "run", wide := nn.Linear(9, 9), sgd(wide), total_steps=T)
    with pytest.raises(RunError, match="of another model"):
        recorder.restore()
    for options, message in [({"size": 61}, "size=60, not 61"), ({"subset": [5]}, "subset")]:
        model = mlp()
        recorder = Recorder(tmp_path / "run", model, sgd(model), total_steps=T, **options)
        recorder.restore()
        with pytest.raises(RunError, match=message), recorder:
            pass
    model = mlp()
    optimizer = Adam(model.parameters())
    recorder = Recorder(tmp_path / "run", model, optimizer, total_steps=T)
    assert recorder.restore() == 6 and not optimizer.state
    with pytest.warns(UserWarning, match="not the sgd that was recorded"), recorder:
        train(model, optimizer, start=6)


def test_without_optimizer_state_restoring_says_so(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        plain(tmp_path / "run", end=7, resumable=False)
    assert Run.open(tmp_path / "run").final.optimizer_state() is None
    model = mlp()
    with pytest.warns(UserWarning, match="does not hold the optimizer's state"):
        assert Recorder(tmp_path / "run", model, sgd(model), total_steps=T).restore() == 6


def test_restoring_nothing(tmp_path: Path) -> None:
    model = mlp()
    assert Recorder(tmp_path / "run", model, sgd(model), total_steps=T).restore() == 0
    plain(tmp_path / "run")
    recorder = Recorder(tmp_path / "run", model, sgd(model), total_steps=T, overwrite=True)
    assert recorder.restore() == 0 and same(model.state_dict(), mlp().state_dict())


KILLED = """
    import os, signal, sys, torch
    from pathlib import Path
    sys.path.insert(0, sys.argv[1])
    torch.set_num_threads(1)
    import test_recorder as t

    def forked(do):
        pid = os.fork()
        if pid == 0:
            try:
                do()
            finally:
                os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    folder, loop = Path(sys.argv[2]), {"again": t.plain, "restored": t.interrupted}[sys.argv[3]]
    arguments = () if loop is t.plain else ("adam",)
    loop(folder / "whole", *arguments)  # torch imports much at the first update
    kills = 0
    while True:
        def killed():
            replace, left = os.replace, [kills]
            def replacing(a, b):
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1
                replace(a, b)
            os.replace = replacing
            loop(folder / str(kills), *arguments)
        code = forked(killed)
        if code == 0:
            break
        assert code == -signal.SIGKILL, code
        if (folder / str(kills) / "run.json").exists():
            run = t.Run.open(folder / str(kills))
            assert not run.finished and all(c.weights() for c in run.checkpoints)
        assert forked(lambda: loop(folder / str(kills), *arguments)) == 0
        kills += 1
    print(kills)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("way", [pytest.param("again", marks=pytest.mark.slow), "restored"])
def test_killed_at_any_moment_it_ends_with_the_same_bits(tmp_path: Path, way: str) -> None:
    """SIGKILL just before each file is put in its place, one training for each; then run again."""
    source = Path(whence.run.__file__).parents[2]
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            textwrap.dedent(KILLED),
            str(Path(__file__).parent),
            tmp_path,
            way,
        ],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(source)},
    )
    assert done.returncode == 0, done.stderr
    kills = int(done.stdout)
    assert kills > 20
    whole = content(tmp_path / "whole")
    for number in range(kills):
        assert content(tmp_path / str(number)) == whole


def test_a_killed_process_leaves_what_it_had(tmp_path: Path) -> None:
    """SIGKILL between two updates, from outside the library."""
    script = f"""
        import os, signal, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import test_recorder as t
        from pathlib import Path
        model = t.mlp()
        optimizer = t.sgd(model)
        with t.Recorder(Path(sys.argv[1]), model, optimizer, checkpoints=4, total_steps=12):
            t.train(model, optimizer, end=8)
            os.kill(os.getpid(), signal.SIGKILL)
    """
    source = Path(whence.run.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), tmp_path / "run"],
        env=os.environ | {"PYTHONPATH": str(source)},
    )
    assert done.returncode == -signal.SIGKILL
    run = Run.open(tmp_path / "run")
    assert not run.finished and run.steps == 6 and [c.step for c in run.checkpoints] == [3, 6]


# --- distributed --------------------------------------------------------------------------------


def test_only_rank_zero_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt):
        plain(tmp_path / "run", end=7)
    before = content(tmp_path / "run")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    model = mlp()
    optimizer = sgd(model)
    recorder = Recorder(tmp_path / "run", model, optimizer, total_steps=T)
    assert recorder.restore() == 6  # every rank takes the weights
    with recorder:
        recorder.step([0])
        train(model, optimizer, start=6, end=8)
        recorder.stage("fine")
        train(model, optimizer, start=8)
    assert content(tmp_path / "run") == before
    assert same(model.state_dict(), plain(tmp_path / "other").state_dict())


def test_batch_norm_resumes_with_the_same_bits(tmp_path: Path) -> None:
    """Its statistics change in the forward pass before the first update that is seen."""
    torch.manual_seed(0)
    x, y = torch.randn(12, 20, 4), torch.randn(12, 20, 1)
    start = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 1))

    def train(folder: Path, stop: int | None = None) -> None:
        model = copy.deepcopy(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        recorder = whence.Recorder(folder, model, optimizer, checkpoints=4, total_steps=12)
        first = recorder.restore()
        with recorder:
            for k in range(first, 12):
                if k == stop:
                    raise KeyboardInterrupt
                optimizer.zero_grad()
                F.mse_loss(model(x[k]), y[k]).backward()
                optimizer.step()

    train(tmp_path / "whole")
    for stop in (2, 7, 11):
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "parts", stop)
    train(tmp_path / "parts")
    whole, parts = (Run.open(tmp_path / name).checkpoints for name in ("whole", "parts"))
    assert [c.sha256 for c in parts] == [c.sha256 for c in whole] and len(parts) == 4
