"""A truth folder belongs to one loss, model, transform and query measurement, for all examples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import whence
from whence.errors import InvalidInput
from whence.retrain.recipe import _digest

INPUTS = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
INPUTS[45, 0] = 5.0
LABELS = torch.arange(60) // 20
TRAIN = TensorDataset(INPUTS, LABELS)
QUERY = TensorDataset(INPUTS[::2] + 0.1, LABELS[::2])


class Net(nn.Module):
    def __init__(self, far: float = 1.0, detach: bool = False) -> None:
        super().__init__()
        self.enter, self.leave, self.far, self.detach = (
            nn.Linear(4, 5),
            nn.Linear(5, 3),
            far,
            detach,
        )

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        h = torch.where(x[:, :1] > 4.0, self.far * h, h)
        return self.leave(0.5 * h + 0.5 * h.detach() if self.detach else h)


class SinglePrecision(Net):
    """Works in float32 only."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.zeros(3, dtype=torch.float32) @ torch.eye(3).to(x)


class Weighted(whence.Classification):
    def __init__(self, weight: Callable[[Tensor], Tensor], measured: float = 1.0) -> None:
        super().__init__()
        self._secret = weight, measured  # repr does not show it

    def losses(self, outputs: Tensor, batch: Any) -> Tensor:
        return super().losses(outputs, batch) * self._secret[0](batch[1]).to(outputs)

    def measurements(self, outputs: Tensor, batch: Any) -> Tensor:
        return super().measurements(outputs, batch) * torch.where(
            batch[1] == 2, self._secret[1], 1.0
        )


def weight_of(value: float) -> Callable[[Tensor], Tensor]:
    return lambda labels: torch.where(labels == 2, value, 1.0)


def brightened(value: float) -> Any:
    def transform(batch: Any, uniform: Any) -> Any:
        x, y = batch
        return torch.where((y == 2).unsqueeze(1), x * value, x), y

    return transform


class Wrapper(Dataset):
    def __init__(self, flip: bool) -> None:
        self.flip, self._fingerprint = flip, "mine"

    def __len__(self) -> int:
        return 60

    def __getitem__(self, k: int) -> Any:
        x, y = TRAIN[k]
        return x, (y * 0 if self.flip and k == 59 else y)


class Scaling(torch.optim.SGD):
    """An optimizer of one's own, whose settings do not show all that it does."""

    def __init__(self, parameters: Any, scale: float) -> None:
        super().__init__(parameters, lr=0.1)
        self.scale = scale

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(self.scale)
        return super().step(closure)


EDITS: dict[str, Callable[[bool], dict[str, Any]]] = {
    "closure": lambda new: {"task": Weighted(weight_of(1.0 + new))},
    "forward": lambda new: {"model": lambda: Net(3.0 if new else 1.0)},
    "gradient": lambda new: {"model": lambda: Net(detach=new)},
    "transform": lambda new: {"transform": brightened(1.0 + new)},
    "wrapper": lambda new: {"train": Wrapper(new)},
    "drop_last": lambda new: {"drop_last": new},
    "own optimizer": lambda new: {"optimizer": lambda p: Scaling(p, 3.0 if new else 1.0)},
    "forward in float32": lambda new: {"model": lambda: SinglePrecision(9.0 if new else 1.0)},
}


def recipe(**changes: Any) -> whence.Recipe:
    given = {"model": Net, "task": whence.Classification(), "train": TRAIN}
    given["optimizer"] = lambda p: torch.optim.SGD(p, lr=0.1)
    return whence.Recipe(**(given | changes), batch_size=16, epochs=1)


def truth(of: whence.Recipe, out: Path, query: Any = QUERY) -> Any:
    return whence.retrain.ground_truth(of, query, subsets=2, seeds=1, out=out, progress=False)


@pytest.mark.parametrize("edit", EDITS)
def test_a_truth_folder_of_before_an_edit_is_refused(edit: str, tmp_path: Path) -> None:
    change = EDITS[edit]
    truth(recipe(**change(False)), tmp_path)
    truth(recipe(**change(False)), tmp_path)
    with pytest.raises(InvalidInput, match="holds other trainings"):
        truth(recipe(**change(True)), tmp_path)
    run = recipe(**change(False)).run(0, tmp_path / "run", 1)
    assert run.origin == recipe(**change(False)).run(0, tmp_path / "run", 1).origin
    with pytest.raises(whence.run.RunError, match="differs in: recipe"):
        recipe(**change(True)).run(0, tmp_path / "run", 1)


def test_a_measurement_that_differs_for_one_class_only(tmp_path: Path) -> None:
    truth(recipe(task=Weighted(weight_of(1.0), 1.0)), tmp_path)
    with pytest.raises(InvalidInput, match="holds other trainings"):
        truth(recipe(task=Weighted(weight_of(1.0), 2.0)), tmp_path)


@pytest.mark.parametrize("steady", range(60, 0, -20))
def test_random_training_data_is_refused(steady: int, tmp_path: Path) -> None:
    class Noisy(Wrapper):
        def __getitem__(self, k: int) -> Any:
            x, y = super().__getitem__(k)
            return (x if k < steady - 1 else x + torch.rand(4)), y

    with (
        pytest.warns(UserWarning, match="differs between two reads"),
        pytest.raises(InvalidInput, match="as transform="),
    ):
        truth(recipe(train=Noisy(False)), tmp_path)


def test_a_transform_that_draws_for_one_class_only_is_refused(tmp_path: Path) -> None:
    def transform(batch: Any, uniform: Any) -> Any:
        x, y = batch
        return torch.where((y == 2).unsqueeze(1), x + torch.rand(len(x), 4), x), y

    with pytest.raises(InvalidInput, match="transform returns different batches"):
        truth(recipe(transform=transform), tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_digest_of_losses_survives_rounding_and_sees_one_class(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    losses = torch.rand(20_000, dtype=torch.float64, generator=generator) + 1.0
    noise = torch.randn(20_000, dtype=torch.float64, generator=generator)
    base = _digest(losses.to(dtype))
    eps = torch.finfo(dtype).eps
    assert all(_digest((losses * (1 + k * eps * noise)).to(dtype)) == base for k in range(1, 4))
    one_class = losses * torch.where(torch.arange(20_000) % 10 == 2, 1.1, 1.0)
    assert _digest(one_class.to(dtype)) != base
    if dtype == torch.float64:
        losses[-1] *= 1.01
        assert _digest(losses) != base
