"""Unrolled through batch norm and dropout: finite differences of the training itself."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support import recipes
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import whence
from whence.errors import InvalidInput
from whence.evaluate import ground_truth, lds
from whence.replay.active import TrainingObjective
from whence.retrain import SmoothAdamW, Training, measure

QUERY = recipes.dataset(4, seed=9)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double()


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (2, 2, 2)),
        nn.Conv2d(2, 4, 2, padding=1, bias=False),
        nn.BatchNorm2d(4, momentum=0.3),
        nn.GELU(),
        nn.Conv2d(4, 4, 2),
        nn.BatchNorm2d(4, affine=False),
        nn.Flatten(),
        nn.Linear(16, 3),
    ).double()


def dropped() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(),
        nn.Dropout(0.2), nn.Linear(6, 3),
    ).double()  # fmt: skip


class Functional(nn.Module):
    """Dropout without a module of that name."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(nn.functional.dropout(torch.tanh(self.one(x)), 0.3, self.training))


def functional() -> nn.Module:
    return Functional().double()


OPTIMIZERS = {
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-2),
    # a bias before a batch norm has no gradient but rounding, which a small eps would enlarge
    "adamw": partial(torch.optim.AdamW, lr=1e-2, eps=1e-4),
    "smooth": partial(SmoothAdamW, lr=1e-2, eps_root=1e-6),
    "slow": partial(torch.optim.SGD, lr=0.01, momentum=0.9),
}


def recipe_of(model: Any, optimizer: str = "momentum", **settings: Any) -> whence.Recipe:
    data = recipes.dataset(24)
    return whence.Recipe(
        model, whence.Classification(), data, OPTIMIZERS[optimizer], 8, 3, **settings
    )


def attributed(recipe: whence.Recipe, seed: int = 0, **options: Any) -> Any:
    data = recipe.stages[0].data.dataset
    study = whence.Study(recipe.build(0), recipe.task, data, recipe.run(seed))
    options = {"progress": False, "dtype": torch.float64} | options
    return whence.Unrolled().attribute(study, QUERY, **options)


def differences(recipe: whence.Recipe, examples: list[int], step: float = 1e-4) -> np.ndarray:
    """∂f/∂w of some examples, (q, e): central differences of whole trainings."""
    trainings = []
    for m in examples:
        for sign in (1, -1):
            weights = np.ones(24)
            weights[m] += sign * step
            trainings.append(Training(0, weights=weights))
    measured = measure(recipe, QUERY, trainings, engine="single", progress=False)
    return ((measured[::2] - measured[1::2]) / (2 * step)).T


@pytest.mark.parametrize("optimizer", ["momentum", "adamw", "smooth"])
@pytest.mark.parametrize("model", [normed, convolutional, dropped, functional])
def test_scores_are_finite_differences_of_the_training(model: Any, optimizer: str) -> None:
    recipe = recipe_of(model, optimizer)
    scores = attributed(recipe)
    assert scores.diagnostics["replay"]["deviation"] < 1e-9
    some = [0, 5, 11, 23]
    np.testing.assert_allclose(
        scores.values[:, some], differences(recipe, some), rtol=2e-4, atol=1e-7
    )


def test_clipping_leaves_statistics_alone() -> None:
    recipe = recipe_of(normed, clip_norm=0.2)
    np.testing.assert_allclose(
        attributed(recipe).values[:, [3, 8]], differences(recipe, [3, 8]), rtol=2e-4, atol=1e-7
    )


def test_queries_one_by_one_are_the_same(monkeypatch: Any) -> None:
    recipe = recipe_of(dropped)
    together = attributed(recipe)
    sizes: list[int] = []

    def one_by_one(self: TrainingObjective, outputs: Any, vectors: Any, inputs: Any) -> Any:
        self.at_once = lambda examples: sizes.append(examples) or 1  # type: ignore[func-returns-value]
        return pulled(self, outputs, vectors, inputs)

    pulled = TrainingObjective._pulled
    monkeypatch.setattr(TrainingObjective, "_pulled", one_by_one)
    np.testing.assert_allclose(together.values, attributed(recipe).values, rtol=1e-9)
    assert set(sizes) == {8}  # whole batches


def test_batch_norm_needs_no_seed() -> None:
    recipe = recipe_of(convolutional)
    run = recipe.run(0)
    run.origin.clear()  # as a Recorder in one's own loop leaves it
    study = whence.Study(recipe.build(0), recipe.task, recipe.stages[0].data.dataset, run)
    scores = whence.Unrolled().attribute(study, QUERY, progress=False, dtype=torch.float64)
    np.testing.assert_array_equal(scores.values, attributed(recipe).values)


def test_pooling_without_a_batched_form() -> None:
    def pooled() -> nn.Module:
        return nn.Sequential(
            nn.Unflatten(1, (2, 2, 2)),
            nn.Conv2d(2, 4, 2, padding=1, bias=False),
            nn.BatchNorm2d(4),
            nn.MaxPool2d(2),
            nn.AdaptiveMaxPool2d((1, 1)),
            nn.Flatten(),
            nn.Linear(4, 3),
        ).double()

    recipe = recipe_of(pooled)
    np.testing.assert_allclose(
        attributed(recipe).values[:, [1, 9]], differences(recipe, [1, 9]), rtol=2e-4, atol=1e-6
    )


def test_two_stages() -> None:
    data = {"first": recipes.dataset(16), "second": recipes.dataset(24, seed=3)}
    recipe = whence.Recipe(dropped, whence.Classification(), data, OPTIMIZERS["momentum"], 8, 2)
    study = whence.Study(recipe.build(0), recipe.task, data, recipe.run(0))
    scores = whence.Unrolled(stage="first").attribute(
        study, QUERY, progress=False, dtype=torch.float64
    )
    weights = np.ones(16)
    weights[2] += 1e-4
    moved = measure(
        recipe,
        QUERY,
        [Training(0), Training(0, None, "first", weights=weights)],
        engine="single",
        progress=False,
    )
    np.testing.assert_allclose(
        scores.values[:, 2], (moved[1] - moved[0]) / 1e-4, rtol=1e-2, atol=1e-5
    )


def test_the_single_model_is_predicted() -> None:
    recipe = recipe_of(convolutional, "slow")
    truth = ground_truth(recipe, QUERY, 0.95, 30, in_place=True, progress=False)
    assert lds(attributed(recipe), truth).value > 0.95


def test_what_cannot_be_followed_is_refused() -> None:
    recipe = recipe_of(normed)
    data = recipe.stages[0].data.dataset
    study = whence.Study(recipe.build(0), recipe.task, data, recipe.run(0))
    for settings in ({"curvature": "gauss-newton"}, {"expected": True}):
        with pytest.raises(InvalidInput, match="training mode"):
            whence.Unrolled(**settings).attribute(study, QUERY, progress=False)

    def cumulative() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 3), nn.BatchNorm1d(3, momentum=None)).double()

    with pytest.raises(InvalidInput, match="cumulative average"):
        attributed(recipe_of(cumulative))

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.norm = nn.Linear(8, 3), nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(torch.tanh(self.norm(self.fc(x))))

    with pytest.raises(InvalidInput, match="used twice"):
        attributed(recipe_of(lambda: Twice().double()))


def test_it_leaves_the_model_as_it_was() -> None:
    recipe = recipe_of(dropped)
    data = TensorDataset(*recipe.stages[0].data.dataset.tensors)
    model = recipe.build(0).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    study = whence.Study(model, recipe.task, data, recipe.run(0))
    state = torch.get_rng_state()
    whence.Unrolled().attribute(study, QUERY, progress=False)
    assert torch.equal(torch.get_rng_state(), state) and not model.training
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
