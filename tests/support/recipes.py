"""Small recipes of many kinds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import whence
from support import models
from whence.retrain import Training
from whence.retrain.stage import StageRecipe

N, INPUTS, CLASSES = 48, 8, 3


def mlp() -> nn.Module:
    return models.mlp((INPUTS, 12, 10, CLASSES)).double()


def conv() -> nn.Module:
    """Groups, strides, circular padding, norms; no batch norm."""
    return nn.Sequential(
        nn.Unflatten(1, (2, 2, 2)),
        nn.Conv2d(2, 4, 2, padding=1, groups=2),
        nn.GroupNorm(2, 4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 6, 2, stride=2, padding=1, padding_mode="circular", bias=False),
        nn.Flatten(),
        nn.LayerNorm(24),
        nn.Linear(24, CLASSES),
    ).double()


class Own(nn.Module):
    """A parameter that no layer of torch holds, and one layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(INPUTS))
        self.twice, self.head = nn.Linear(INPUTS, INPUTS), nn.Linear(INPUTS, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.twice(torch.tanh(self.twice(x * self.scale)))))


def own() -> nn.Module:
    return Own().double()


def frozen() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)
    return model


def dropout() -> nn.Module:
    return nn.Sequential(mlp(), nn.Dropout(0.5), nn.Linear(CLASSES, CLASSES)).double()


def batch_norm() -> nn.Module:
    return nn.Sequential(
        nn.Linear(INPUTS, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, CLASSES)
    ).double()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "conv": conv,
    "own": own,
    "frozen": frozen,
}

SGD, ADAM = torch.optim.SGD, torch.optim.Adam


def by_shape(parameters: Any) -> torch.optim.Optimizer:
    """Matrices decay, vectors do not: told apart by their shape."""
    every = list(parameters)
    return SGD(
        [
            {"params": [p for p in every if p.ndim > 1], "weight_decay": 1e-2},
            {"params": [p for p in every if p.ndim <= 1], "lr": 0.02},
        ],
        lr=0.05,
        momentum=0.9,
    )


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": partial(SGD, lr=0.05),
    "nesterov": partial(SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "dampening": partial(SGD, lr=0.05, momentum=0.8, dampening=0.3),
    "groups": by_shape,
    "adam": partial(ADAM, lr=1e-2, weight_decay=1e-3),
    "amsgrad": partial(ADAM, lr=1e-2, amsgrad=True),
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-3, momentum=0.5, centered=True),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2),
}


def cosine(optimizer: Any, total: int) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)


def one_cycle(optimizer: Any, total: int) -> Any:
    """Cycles momentum too."""
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total)


def jitter(batch: Any, uniform: Any) -> Any:
    """Noise on the inputs, and every other one turned round."""
    x, y = batch
    draws = uniform(1 + x.shape[1]).to(x)
    return x.where(draws[:, :1] < 0.5, x.flip(1)) + 0.1 * (draws[:, 1:] - 0.5), y


def dataset(n: int = N, seed: int = 0) -> TensorDataset:
    return models.vectors(n, INPUTS, CLASSES, seed)


def recipe(**changes: Any) -> whence.Recipe:
    settings: dict[str, Any] = {
        "model": mlp,
        "task": whence.Classification(),
        "train": dataset(),
        "optimizer": OPTIMIZERS["nesterov"],
        "batch_size": 7,
        "epochs": 5,
    }
    return whence.Recipe(**(settings | changes))


def two_stages(**changes: Any) -> whence.Recipe:
    """Other data, another optimizer and another length in the second stage."""
    return recipe(
        train={"pretrain": dataset(40, 1), "finetune": dataset(24, 2)},
        optimizer={"pretrain": OPTIMIZERS["nesterov"], "finetune": OPTIMIZERS["adamw"]},
        epochs={"pretrain": 4, "finetune": 3},
        **changes,
    )


def plainly_trained(recipe: whence.Recipe, training: Training) -> nn.Module:
    """The training as an ordinary loop, written out once more: orders come from the recipe."""
    cpu = torch.device("cpu")
    with torch.random.fork_rng():
        torch.manual_seed(training.seed)
        model = recipe.model().train()
    for stage in recipe.stages:
        subset = training.subset if stage.name == recipe.stage(training.stage).name else None
        examples = np.arange(len(stage.data)) if subset is None else np.asarray(subset)
        optimizer, step = stage.optimizer(model.parameters()), 0
        total = stage.epochs * -(-len(examples) // stage.batch_size)
        scheduler = stage.scheduler(optimizer, total) if stage.scheduler else None
        for epoch in range(stage.epochs):
            order = stage.order(training.seed, epoch, torch.from_numpy(examples))
            for rows in order.split(stage.batch_size):
                batch: Any = tuple(t[rows] for t in stage.data.dataset.tensors)
                if stage.transform:
                    batch = stage.transform(batch, stage.draws(training.seed, step, rows, cpu))
                update(model, stage, batch, optimizer, scheduler)
                step += 1
    return model


def update(
    model: nn.Module, stage: StageRecipe, batch: Any, optimizer: Any, scheduler: Any
) -> None:
    """One update of an ordinary loop."""
    for parameter in model.parameters():
        parameter.grad = None
    stage.task.losses(stage.task.outputs(model, batch), batch).mean().backward()
    if stage.clip_norm:
        nn.utils.clip_grad_norm_(model.parameters(), stage.clip_norm)
    optimizer.step()
    if scheduler:
        scheduler.step()
