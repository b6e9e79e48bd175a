"""Digits, and what really happens when half of them are left out: for LDS in a sane range."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import whence
from whence.evaluate import ground_truth, lds


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 10)
    )


@cache
def data() -> tuple[TensorDataset, TensorDataset]:
    """300 training images, 20 queries."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    return TensorDataset(x[:300], y[:300]), TensorDataset(x[1500:1520], y[1500:1520])


@cache
def recipe() -> whence.Recipe:
    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    return whence.Recipe(network, whence.Classification(), data()[0], sgd, 32, 10)


@cache
def truth() -> Any:
    return ground_truth(recipe(), data()[1], 0.5, subsets=60, seeds=3, progress=False)


@cache
def study(*seeds: int, half: bool = False) -> whence.Study:
    """Runs whose seeds the truth does not have, on all of the data or each on another half."""
    runs = []
    for seed in seeds:
        subset = np.sort(np.random.default_rng(seed).permutation(300)[:150]) if half else None
        runs.append(recipe().run(seed, checkpoints=6, subset=subset))
    return whence.Study(network(), whence.Classification(), train=data()[0], runs=runs)


def judge(scores: whence.Scores) -> float:
    return float(lds(scores, truth()).value)
