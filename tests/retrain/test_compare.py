"""A recipe and the run it claims to be: every difference is named, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.recipes import cosine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import whence
from whence.retrain.compare import differences, other_initial_weights, other_losses, unknown

INPUTS = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
TRAIN = TensorDataset(INPUTS, torch.arange(50) % 3)
Make = Callable[..., Any]


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


def sgd(p: Any, **changes: Any) -> Any:
    return torch.optim.SGD(p, **({"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01} | changes))


def adam(p: Any, **changes: Any) -> Any:
    return torch.optim.AdamW(p, **({"lr": 1e-2, "betas": (0.9, 0.99)} | changes))


def recorded(
    folder: Path, make_model: Make = plain, optimizer: Make = sgd, drop_last: bool = False
) -> whence.Run:
    """An ordinary loop of four epochs in batches of 16, recorded."""
    torch.manual_seed(0)
    model = make_model()
    rule = optimizer(model.parameters())
    order = torch.Generator().manual_seed(1)
    batches = [
        b
        for _ in range(4)
        for b in DataLoader(range(50), 16, shuffle=True, drop_last=drop_last, generator=order)
    ]
    schedule = cosine(rule, len(batches))
    with whence.Recorder(folder, model, rule, total_steps=len(batches), size=50) as recorder:
        for indices in batches:
            rule.zero_grad()
            x, y = TRAIN[indices]
            nn.functional.cross_entropy(model(x), y).backward()
            recorder.step(indices)
            rule.step()
            schedule.step()
    return whence.Run.open(folder)


def recipe(make_model: Make = plain, optimizer: Make = sgd, **changes: Any) -> whence.Recipe:
    settings = {"batch_size": 16, "epochs": 4, "scheduler": cosine}
    return whence.Recipe(
        make_model, whence.Classification(), TRAIN, optimizer, **(settings | changes)
    )


@pytest.mark.parametrize("make_model", [plain, with_batch_norm])
@pytest.mark.parametrize("optimizer", [sgd, adam])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_right_recipe_passes(
    make_model: Make, optimizer: Make, drop_last: bool, tmp_path: Path
) -> None:
    run = recorded(tmp_path, make_model, optimizer, drop_last)
    right = recipe(make_model, optimizer, drop_last=drop_last)
    assert differences(right, run) == []
    assert other_initial_weights(right, run, 0) is None
    assert other_initial_weights(right, run, 1) is not None


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> whence.Run:
    return recorded(tmp_path_factory.mktemp("run"))


def changed(**changes: Any) -> Make:
    return lambda p: sgd(p, **changes)


def two_groups(p: Any) -> Any:
    first, *rest = list(p)
    return sgd([{"params": [first], "weight_decay": 0.0}, {"params": rest}])


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "ten times the rate": ({"optimizer": changed(lr=1.0)}, "learning rate at update 1 was 0.1"),
    "a quarter of the epochs": ({"epochs": 1}, "made 16 updates, the recipe makes 4"),
    "another schedule": ({"scheduler": None}, "learning rate at update 2"),
    "stepped by epoch": ({"scheduler_every": "epoch"}, "learning rate at update 2"),
    "another optimizer": ({"optimizer": adam}, "optimizer is sgd, the recipe's adamw"),
    "momentum": ({"optimizer": changed(momentum=0.5)}, "momentum"),
    "nesterov": ({"optimizer": changed(nesterov=True)}, "nesterov is False in the run"),
    "decay": ({"optimizer": changed(weight_decay=0.1)}, "weight_decay is 0.01 in the run"),
    "decay of one layer": ({"optimizer": two_groups}, "weight_decay is 0.01 in the run, 0.0"),
    "batch size": ({"batch_size": 17}, "used 16 examples in the run, and 17"),
    "drop_last": ({"drop_last": True}, "with drop_last=False as many"),
    "a layer that is frozen": (
        {"optimizer": lambda p: sgd(list(p)[:2])},
        "only one of recipe and run trains 2.bias, 2.weight",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_recipe_is_found_out(wrong: str, run: whence.Run) -> None:
    changes, message = WRONG[wrong]
    assert message in "; ".join(differences(recipe(**changes), run))


def half_frozen() -> nn.Module:
    model = plain()
    model[0].requires_grad_(False)
    return model


def test_layers_that_both_freeze_are_no_difference(tmp_path: Path) -> None:
    run = recorded(tmp_path, half_frozen)
    assert differences(recipe(half_frozen), run) == []
    assert "only one of recipe and run trains" in "; ".join(differences(recipe(), run))
    fast = recipe(half_frozen, changed(lr=1.0))
    assert "learning rate at update 1 was 0.1" in "; ".join(differences(fast, run))


def test_clipping_and_transforms(run: whence.Run, tmp_path: Path) -> None:
    clipped = recipe(clip_norm=0.5)
    assert differences(clipped, run) == []
    assert ["clips gradients" in text for text in unknown(clipped, run)] == [True]
    assert unknown(recipe(), run) == []
    noted = clipped.run(0, tmp_path)
    assert differences(clipped, noted) == [] and unknown(clipped, noted) == []
    assert "clip_norm is 0.5 in the notes of the run, None" in differences(recipe(), noted)[0]
    moved = recipe(transform=lambda batch, uniform: batch)
    assert ["transforms examples" in text for text in unknown(moved, run)] == [True]


def test_betas_of_adam(tmp_path: Path) -> None:
    run = recorded(tmp_path, optimizer=adam)
    other = recipe(optimizer=lambda p: adam(p, betas=(0.8, 0.999)))
    (text,) = ["; ".join(differences(other, run))]
    assert "betas is [0.9, 0.99] in the run" in text and "momentum at update 1 was 0.9" in text


def test_another_initialisation(run: whence.Run) -> None:
    def zeros() -> nn.Module:
        model = plain()
        nn.init.zeros_(model[2].bias)
        return model

    assert differences(recipe(zeros), run) == []
    assert other_initial_weights(recipe(zeros), run, 0) == "2.bias"


def test_a_stage_too_few(run: whence.Run) -> None:
    two = whence.Recipe(plain, whence.Classification(), {"a": TRAIN, "b": TRAIN}, sgd, 16, 2)
    assert "the run has the stages ['train'], the recipe ['a', 'b']" in differences(two, run)


def test_a_run_of_a_recipe_passes(tmp_path: Path) -> None:
    other = recipe(with_batch_norm, adam, drop_last=True)
    run = other.run(3, tmp_path, checkpoints=2)
    assert run.steps == 12 and {len(b) for b in run.batches or []} == {16}
    assert differences(other, run) == [] and other_initial_weights(other, run, 3) is None


def test_drop_last_trains_the_same_alone_and_together() -> None:
    made = recipe(drop_last=True)
    subsets = [range(50), range(40)]
    trainings = [whence.retrain.Training(0, torch.tensor(s).numpy()) for s in map(list, subsets)]
    alone, together = (
        whence.retrain.measure(made, TRAIN, trainings, engine=engine, progress=False)
        for engine in ("single", "auto")
    )
    torch.testing.assert_close(torch.tensor(alone), torch.tensor(together), rtol=1e-4, atol=1e-4)
    whole = whence.retrain.measure(recipe(), TRAIN, trainings, engine="single", progress=False)
    assert abs(alone - whole).max() > 1e-3


def test_drop_last_is_true_or_false() -> None:
    with pytest.raises(whence.errors.InvalidType, match="drop_last=1"):
        recipe(drop_last=1)


def test_batches_that_were_not_recorded(run: whence.Run) -> None:
    (doubt,) = unknown(recipe(), replace(run, batches=None))
    assert "does not show the size of its batches" in doubt


def test_rates_of_every_layer_count(tmp_path: Path) -> None:
    """The run has a smaller rate for its head; in the recipe all layers are one group."""

    def slow_head(p: Any) -> Any:
        first, second, *head = list(p)
        return sgd([{"params": [first, second]}, {"params": head, "lr": 0.01}])

    run = recorded(tmp_path, optimizer=slow_head)
    (text,) = differences(recipe(), run)
    assert "the learning rate at update 1 was 0.01 in the run for 2." in text
    assert differences(recipe(optimizer=slow_head), run) == []


class Halved(whence.Classification):
    def losses(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return super().losses(outputs, batch) * torch.where(batch[1] == 2, 0.5, 1.0)


def test_another_loss_is_found_out(run: whence.Run) -> None:
    study = whence.Study(plain(), whence.Classification(), TRAIN, run)
    assert other_losses(recipe(), study, run) == []
    other = whence.Recipe(plain, Halved(), TRAIN, sgd, batch_size=16, epochs=4)
    (text,) = other_losses(other, study, run)
    assert "in the study and" in text and "at the same weights" in text
