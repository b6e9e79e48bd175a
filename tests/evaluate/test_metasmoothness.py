"""Metasmoothness: near one for a smooth training, low for a rough one."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from support import recipes
from torch import nn

import whence
from whence.errors import InvalidInput
from whence.evaluate import metasmoothness
from whence.retrain import Training, measure

QUERY = recipes.dataset(6, seed=9)


def make(activation: Any) -> Any:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), activation(), nn.Linear(16, 3)).double()

    return model


def recipe(activation: Any, rate: float, epochs: int, batch: int) -> whence.Recipe:
    def optimizer(parameters: Any) -> Any:
        return torch.optim.SGD(parameters, lr=rate, momentum=0.9)

    data = recipes.dataset(96)
    return whence.Recipe(make(activation), whence.Classification(), data, optimizer, batch, epochs)


SMOOTH = recipe(nn.Tanh, 0.02, 3, 32)


def test_a_smooth_training_has_one_and_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = metasmoothness(SMOOTH, QUERY, 0.95, 6, progress=False)
    assert result.value > 0.99 and result.correlation > 0.99 and result.smooth
    assert result.first.shape == (6, 6) and "metasmoothness" in str(result)


def test_a_rough_training_is_low_and_warns() -> None:
    with pytest.warns(UserWarning, match="rough.*Unrolled"):
        result = metasmoothness(recipe(nn.ReLU, 1.0, 30, 4), QUERY, 0.95, 6, progress=False)
    assert result.value < 0.7 and not result.smooth


def test_against_the_definition() -> None:
    result = metasmoothness(SMOOTH, QUERY, 0.9, 3, step=0.25, training_seed=4, progress=False)
    dropped = ~whence.retrain.truth.draw_subsets(96, 0.9, 3, 0)
    signs, one = [], np.ones(96)
    for d in dropped:
        f0, f1, f2 = measure(
            SMOOTH,
            QUERY,
            [Training(4, weights=w) for w in (one, one - 0.25 * d, one - 0.5 * d)],
            engine="single",
            progress=False,
        )
        first, second = f1 - f0, f2 - f1
        weights = np.abs(f2 - f0) / np.abs(f2 - f0).sum()
        signs.append(float(np.sign(first) @ np.diag(weights) @ np.sign(second)))
    assert result.value == pytest.approx(np.mean(signs), abs=1e-9)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"step": 0.6}, "step=0.6"), ({"step": 0.0}, "step=0"), ({"directions": 2}, "directions=2")],
)
def test_refusals(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        metasmoothness(SMOOTH, QUERY, 0.95, **settings)
