"""The paper's tasks (appendix B.1): a recipe and the queries it is asked about."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import whence
from experiments import data


def mlp(*sizes: int) -> nn.Module:
    """Linear layers with ReLUs between them."""
    layers: list[nn.Module] = []
    for entering, leaving in pairwise(sizes):
        layers += [nn.Linear(entering, leaving), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def momentum(rate: float, weight_decay: float) -> Callable[[Any], torch.optim.Optimizer]:
    return partial(torch.optim.SGD, lr=rate, momentum=0.9, weight_decay=weight_decay)


def digits() -> tuple[whence.Recipe, TensorDataset]:
    """scikit-learn's digits; not in the paper, but on every machine."""
    train, query = data.digits()
    recipe = whence.Recipe(
        partial(mlp, 64, 128, 128, 128, 10),
        whence.Classification(),
        train,
        momentum(3e-2, 1e-3),
        batch_size=64,
        epochs=20,
    )
    return recipe, query


def fashion_mnist() -> tuple[whence.Recipe, TensorDataset]:
    train, query = data.fashion_mnist()
    recipe = whence.Recipe(
        partial(mlp, 784, 512, 256, 128, 10),
        whence.Classification(),
        train,
        momentum(3e-2, 1e-3),
        batch_size=64,
        epochs=20,
    )
    return recipe, query


def concrete() -> tuple[whence.Recipe, TensorDataset]:
    train, query = data.concrete()
    recipe = whence.Recipe(
        partial(mlp, 8, 128, 128, 128, 1),
        whence.Regression(),
        train,
        momentum(3e-2, 1e-5),
        batch_size=32,
        epochs=20,
    )
    return recipe, query


TASKS = {"digits": digits, "fashion_mnist": fashion_mnist, "concrete": concrete}
