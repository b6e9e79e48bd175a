"""AdamW with an epsilon under its root."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from support import recipes
from torch import nn

import whence
from whence.errors import InvalidInput
from whence.retrain import SmoothAdamW


def test_without_eps_root_it_is_torchs() -> None:
    torch.manual_seed(0)
    one, other = (nn.Linear(4, 3).double() for _ in range(2))
    other.load_state_dict(one.state_dict())
    settings = {"lr": 0.1, "betas": (0.8, 0.95), "weight_decay": 0.2, "eps": 1e-3}
    ours = SmoothAdamW(one.parameters(), eps_root=0.0, **settings)
    torchs = torch.optim.AdamW(other.parameters(), **settings)
    for _ in range(5):
        x = torch.randn(7, 4, dtype=torch.float64)
        for model, optimizer in ((one, ours), (other, torchs)):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_eps_root_is_under_the_root() -> None:
    weight = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))
    optimizer = SmoothAdamW([weight], lr=0.1, eps=1e-2, weight_decay=0.0, eps_root=0.5)
    weight.grad = torch.tensor([3.0, 0.0], dtype=torch.float64)
    optimizer.step()
    expected = 1.0 - 0.1 * 3.0 / ((9.0 + 0.5) ** 0.5 + 1e-2)
    assert weight[0].item() == pytest.approx(expected) and weight[1].item() == 2.0


def test_a_run_knows_its_denominator(tmp_path: Path) -> None:
    """Source divides by what the optimizer divided by."""
    optimizer = partial(SmoothAdamW, lr=1e-2, eps_root=1e-2)
    recipe = whence.Recipe(
        recipes.mlp, whence.Classification(), recipes.dataset(), optimizer, 12, 3
    )
    run = recipe.run(0, tmp_path)
    assert run.optimizers == {"train": "adamw"}
    assert run.hyperparameters[0]["eps_root"] == 1e-2
    moments = run.final.second_moments()
    assert moments is not None and all(float(v.min()) >= 1e-2 for v in moments.values())
    study = whence.Study(recipe.build(0), recipe.task, recipes.dataset(), run)
    scores = whence.Source().attribute(study, recipes.dataset(3, seed=9), progress=False)
    assert np.isfinite(scores.values).all()


def test_negative_settings_are_refused() -> None:
    with pytest.raises(InvalidInput, match="eps_root=-1"):
        SmoothAdamW([nn.Parameter(torch.ones(1))], eps_root=-1.0)
