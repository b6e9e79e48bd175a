"""The truth of a single model: the same training again, with some losses weighted to zero."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import recipes
from support.recipes import cosine
from torch import nn
from torch.utils.data import TensorDataset

import whence
from whence.errors import InvalidInput
from whence.evaluate import calibrate, compare, lds
from whence.retrain import SmoothAdamW, Training, Truth, ground_truth, measure
from whence.retrain.truth import draw_subsets

QUERY = recipes.dataset(5, seed=9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)


def smooth_adamw(parameters: Any) -> torch.optim.Optimizer:
    return SmoothAdamW(parameters, lr=1e-2, weight_decay=0.1, eps_root=1e-4)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


def recipe_of(optimizer: Any = momentum, model: Any = recipes.mlp, **settings: Any) -> Any:
    return whence.Recipe(
        model,
        whence.Classification(),
        recipes.dataset(recipes.N),
        optimizer,
        batch_size=10,
        epochs=3,
        **settings,
    )


def by_hand(recipe: Any, seed: int, mask: np.ndarray | None, dropped_of: str) -> np.ndarray:
    """The training written out: the loss is Σ over the remaining examples / the batch's size."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = recipe.model()
    for stage in recipe.stages:
        inputs, labels = stage.data.dataset.tensors
        count = len(inputs)
        weight = torch.ones(count, dtype=torch.float64)
        if mask is not None and stage.name == dropped_of:
            weight = torch.from_numpy(mask).double()
        per_epoch = count // 10 if stage.drop_last else -(-count // 10)
        optimizer = stage.optimizer(model.parameters())
        scheduler = cosine(optimizer, 3 * per_epoch) if stage.scheduler else None
        for epoch in range(3):
            order = stage.order(seed, epoch, torch.arange(count))
            for k in range(per_epoch):
                rows = order[10 * k : 10 * k + 10]
                each = nn.functional.cross_entropy(
                    model(inputs[rows].double()), labels[rows], reduction="none"
                )
                optimizer.zero_grad()
                ((each * weight[rows]).sum() / len(rows)).backward()
                if stage.clip_norm:
                    nn.utils.clip_grad_norm_(model.parameters(), stage.clip_norm)
                optimizer.step()
                if scheduler is not None:
                    scheduler.step()
    model.eval()
    batch = tuple(t.double() if t.is_floating_point() else t for t in QUERY.tensors)
    with torch.no_grad():
        return recipe.task.measurements(recipe.task.outputs(model, batch), batch).numpy()


CASES: dict[str, dict[str, Any]] = {
    "momentum": {"optimizer": momentum},
    "adam": {"optimizer": adam, "scheduler": cosine},
    "adamw, clipped": {"optimizer": adamw, "clip_norm": 0.5},
    "smooth adamw": {"optimizer": smooth_adamw, "scheduler": cosine},
    "drop_last": {"optimizer": momentum, "drop_last": True, "scheduler": cosine},
    "batch norm": {"optimizer": momentum, "model": recipes.batch_norm},
    "stages": {"optimizer": adamw, "stages": ["first", "second"]},
}


@pytest.mark.parametrize("engine", ["single", "products", "vmap"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("alpha", [0.9, 0.5])
def test_against_a_loop_by_hand(case: str, engine: str, alpha: float) -> None:
    settings = dict(CASES[case])
    if "stages" in settings:
        settings["stages"] = {
            "first": {},
            "second": {"train": recipes.dataset(23, seed=5)},
        }
    recipe = recipe_of(**settings)
    stage = recipe.stages[-1].name
    truth = ground_truth(
        recipe, QUERY, alpha, 3, stage=stage, in_place=True, engine=engine, progress=False
    )
    assert truth.in_place and truth.protocol == "single model" and truth.seeds == [0]
    assert truth.measurements.shape[1] == 1
    for mask, measured in zip(truth.masks, truth.measurements[:, 0], strict=True):
        np.testing.assert_allclose(measured, by_hand(recipe, 0, mask, stage), atol=1e-9)


def test_nothing_dropped_is_the_recorded_training_bit_for_bit() -> None:
    recipe = recipe_of(adamw, clip_norm=1.0)
    ones = Training(3, weights=np.ones(recipes.N))
    both = measure(recipe, QUERY, [Training(3), ones], engine="single", progress=False)
    np.testing.assert_array_equal(both[0], both[1])
    together = measure(recipe, QUERY, [Training(3), ones], engine="products", progress=False)
    np.testing.assert_array_equal(together[0], together[1])
    np.testing.assert_allclose(together[1], both[0], atol=1e-9)
    run = recipe.run(3)
    model = recipe.build(3)
    model.load_state_dict(run.final.weights())
    with torch.no_grad():
        batch = tuple(t.double() if t.is_floating_point() else t for t in QUERY.tensors)
        measured = recipe.task.measurements(recipe.task.outputs(model.eval(), batch), batch)
    np.testing.assert_allclose(both[1], measured.numpy(), atol=1e-12)


def test_dropout_draws_stay_where_they_were() -> None:
    recipe = recipe_of(momentum, model=recipes.dropout)
    ones, fewer = np.ones(recipes.N), np.ones(recipes.N)
    fewer[7] = 0.0
    with pytest.warns(UserWarning, match="one at a time"):
        measured = measure(
            recipe, QUERY, [Training(0), Training(0, weights=ones), Training(0, weights=fewer)]
        )
    np.testing.assert_array_equal(measured[0], measured[1])
    assert 0 < np.abs(measured[2] - measured[0]).max() < 0.5


def test_a_long_training_resumes_with_its_weights(tmp_path: Path, monkeypatch: Any) -> None:
    recipe = recipe_of()
    mask = draw_subsets(recipes.N, 0.8, 1)[0]
    plain = measure(recipe, QUERY, [Training(0, weights=mask)], engine="single", progress=False)
    # every training counts as long
    monkeypatch.setattr("whence.retrain.pool.CHECKPOINT_SECONDS", -1.0)
    long = measure(
        recipe, QUERY, [Training(0, weights=mask)], out=tmp_path, engine="single", progress=False
    )
    np.testing.assert_array_equal(plain, long)


def test_it_is_saved_shown_and_kept_apart(tmp_path: Path) -> None:
    recipe = recipe_of()
    options = {"subsets": 6, "progress": False, "out": tmp_path}
    truth = ground_truth(recipe, QUERY, 0.9, in_place=True, **options)
    again = Truth.load(tmp_path)
    assert again.in_place and "single model" in repr(again)
    np.testing.assert_array_equal(again.measurements, truth.measurements)
    with pytest.raises(InvalidInput, match="in_place"):
        ground_truth(recipe, QUERY, 0.9, seeds=1, **options)


def test_scores_are_judged_by_their_own_model() -> None:
    recipe = recipe_of()
    data = recipe.stages[0].data.dataset
    truth = ground_truth(recipe, QUERY, 0.9, 8, [0, 1], in_place=True, progress=False)
    scores = []
    for seed in (0, 1):
        study = whence.Study(recipe.build(0), recipe.task, data, recipe.run(seed))
        scores.append(whence.Unrolled().attribute(study, QUERY, progress=False))
    each = [lds(one, truth.of_seed(seed)) for seed, one in enumerate(scores)]
    both = lds(scores, truth)
    assert both.value == pytest.approx(np.mean([one.value for one in each]))
    assert both.in_place and both.ceiling == 1.0 and "single model" in str(both)
    assert both.interval[0] <= both.value <= both.interval[1]
    with pytest.raises(InvalidInput, match="of seed 1, but the scores are of a run of seed"):
        lds(scores[0], truth.of_seed(1))
    with pytest.raises(InvalidInput, match="one of each model's run"):
        lds(scores[0], truth)
    with pytest.raises(InvalidInput, match="have no mean"):
        calibrate(scores[0], truth)
    expected = ground_truth(recipe, QUERY, 0.9, 8, 1, progress=False)
    with pytest.raises(InvalidInput, match="do not share"):
        each[0].minus(lds(scores[0], expected))
    table = compare({"a": scores, "b": [-one.values for one in scores]}, truth)
    assert table.difference("a", "b").value == pytest.approx(2 * both.value)


def test_weights_must_fit_the_data() -> None:
    recipe = recipe_of()
    with pytest.raises(InvalidInput, match="for 48 examples"):
        measure(recipe, QUERY, [Training(0, weights=np.ones(3))], engine="single")
    with pytest.raises(InvalidInput, match="seed=5 is not in this truth"):
        Truth(np.ones((1, 2), bool), np.zeros((1, 1, 1)), in_place=True).of_seed(5)


def test_alpha_below_a_batch_is_fine_in_place() -> None:
    few = TensorDataset(*(t[:12] for t in recipes.dataset(recipes.N).tensors))
    recipe = whence.Recipe(recipes.mlp, whence.Classification(), few, momentum, 10, 2)
    truth = ground_truth(recipe, QUERY, 0.25, 2, in_place=True, progress=False)
    assert np.isfinite(truth.measurements).all()
