"""What autograd says about single examples, to compare TracIn with.

With one checkpoint and rate 1, TracIn is minus the product of gradients, whatever coordinates the
library keeps them in.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import whence
from support import dense

EXACT = {"dtype": torch.float64, "progress": False}


class Waves(whence.Task):
    """Something smooth of outputs of any shape; batches are (x,)."""

    def losses(self, outputs: Tensor, batch: Any) -> Tensor:
        return outputs.flatten(1).sin().sum(1)

    def measurements(self, outputs: Tensor, batch: Any) -> Tensor:
        return outputs.flatten(1).square().sum(1)


def normal(*shape: int, seed: int = 0) -> TensorDataset:
    g = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(*shape, generator=g, dtype=torch.float64))


def once(model: nn.Module, count: int = 1) -> whence.Run:
    return whence.Run.from_checkpoints([model.state_dict()] * count, range(1, count + 1), 1.0)


def rows(
    model: nn.Module, names: Sequence[str], dataset: Any, value: Callable[..., Tensor], task: Any
) -> Tensor:
    """Gradients of these parameters, example by example."""
    parameters = dict(model.named_parameters())
    wanted = [parameters[name] for name in names]
    actual = []
    for k in range(len(dataset)):
        batch = dense.batch_of([dataset[k]])
        (number,) = value(task.outputs(model, batch), batch)
        parts = torch.autograd.grad(number, wanted, allow_unused=True, materialize_grads=True)
        actual.append(torch.cat([part.detach().flatten() for part in parts]))
    return torch.stack(actual)


def products(
    model: nn.Module, names: Sequence[str], train: Any, query: Any, task: Any
) -> np.ndarray:
    model = copy.deepcopy(model).double().eval().requires_grad_(True)
    left = rows(model, names, query, task.measurements, task)
    return -(left @ rows(model, names, train, task.losses, task).T).numpy()


def of_module(name: str) -> str:
    return name.rpartition(".")[0] or "(model)"


def check(
    model: nn.Module,
    train: Any,
    query: Any,
    left_out: Sequence[str] = (),
    *,
    task: Any = None,
    twin: nn.Module | None = None,
    layers: Any = None,
    batch_size: int = 3,
) -> whence.Scores:
    """TracIn is autograd's on every parameter but those of the modules that are left out."""
    task = task or Waves()
    study = whence.Study(model, task, train=train, runs=once(model), layers=layers)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scores = whence.TracIn().attribute(study, query, batch_size=batch_size, **EXACT)
    assert sorted(part["name"] for part in scores.excluded) == sorted(left_out)
    messages = [str(w.message) for w in caught if "left out" in str(w.message)]
    assert len(messages) == bool(left_out)
    assert sum(name in message for message in messages for name in left_out) >= min(
        3, len(left_out)
    )
    names = [n for n, _ in model.named_parameters() if of_module(n) not in left_out]
    expected = products(twin or model, names, train, query, task)
    error = abs(scores.values - expected).max() / abs(expected).max()
    assert error <= 1e-9, f"relative error {error:.2e}"
    return scores


def reasons(scores: whence.Scores) -> dict[str, str]:
    return {part["name"]: part["reason"] for part in scores.excluded}
