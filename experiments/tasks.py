"""The paper's tasks (appendix B.1): a recipe and the queries it is asked about."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch
from torch import nn
from torch.utils.data import TensorDataset

import whence
from experiments import data

Task = tuple[whence.Recipe, TensorDataset]  # a recipe and its queries


def mlp(*sizes: int) -> nn.Module:
    """Linear layers with ReLUs between them."""
    layers: list[nn.Module] = []
    for entering, leaving in pairwise(sizes):
        layers += [nn.Linear(entering, leaving), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def with_momentum(
    sets: tuple[TensorDataset, TensorDataset],
    task: whence.Task,
    sizes: tuple[int, ...],
    rate: float,
    weight_decay: float,
    batch_size: int,
) -> Task:
    """An MLP, trained with momentum for 20 epochs."""
    train, query = sets
    optimizer = partial(torch.optim.SGD, lr=rate, momentum=0.9, weight_decay=weight_decay)
    model = partial(mlp, *sizes)
    return whence.Recipe(model, task, train, optimizer, batch_size, epochs=20), query


def digits() -> Task:
    """scikit-learn's digits; not in the paper, but on every machine."""
    sizes = (64, 128, 128, 128, 10)
    return with_momentum(data.digits(), whence.Classification(), sizes, 3e-2, 1e-3, 64)


def fashion_mnist() -> Task:
    sizes = (784, 512, 256, 128, 10)
    return with_momentum(data.fashion_mnist(), whence.Classification(), sizes, 3e-2, 1e-3, 64)


def concrete() -> Task:
    sizes = (8, 128, 128, 128, 1)
    return with_momentum(data.concrete(), whence.Regression(), sizes, 3e-2, 1e-5, 32)


TASKS = {"digits": digits, "fashion_mnist": fashion_mnist, "concrete": concrete}
