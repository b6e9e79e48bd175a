"""A callback sees every update of a training, and can stop it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import recipes

from whence.data import Batches
from whence.retrain import Training, Update
from whence.retrain.grid import Grid
from whence.retrain.measure import identity, run_grid
from whence.retrain.stack import Data, train_stack
from whence.run import Run

CPU = torch.device("cpu")
QUERY = recipes.dataset(5, seed=9)


class Stopped(Exception):
    pass


def stages_and_steps(recipe: Any, examples: dict[str, Any]) -> list[tuple[str, int]]:
    return [
        (stage.name, step + 1)
        for stage in recipe.stages
        for step in range(stage.total_steps(len(examples[stage.name])))
    ]


def test_a_callback_follows_a_recorded_run(tmp_path: Path) -> None:
    recipe, seen, weights = recipes.two_stages(), [], {}

    def follow(update: Update) -> None:
        assert isinstance(update.model, torch.nn.Module)
        seen.append((update.stage.name, update.step, np.asarray(update.indices).tolist()))
        weights[len(seen)] = update.model.state_dict()["0.weight"].clone()

    run = recipe.run(3, tmp_path, device="cpu", callback=follow)
    assert [s[:2] for s in seen] == stages_and_steps(recipe, recipe.examples())
    assert run.batches is not None
    assert [s[2] for s in seen] == [batch.tolist() for batch in run.batches]
    for checkpoint in run.checkpoints:
        assert torch.equal(checkpoint.weights()["0.weight"], weights[checkpoint.step])


def test_a_callback_follows_models_that_train_together() -> None:
    recipe = recipes.recipe()
    trainings = [Training(4, range(30)), Training(5, range(10, 40))]
    data = {s.name: Data(s.data, CPU, torch.float64) for s in recipe.stages}
    together: list[Any] = []
    alone: dict[int, list[Any]] = {4: [], 5: []}
    train_stack(recipe, trainings, "products", CPU, data, callback=together.append)
    for training in trainings:
        recipe.train(
            training.seed, training.subset, device=CPU, callback=alone[training.seed].append
        )
    assert [u.step for u in together] == [u.step for u in alone[4]]
    for position, seed in enumerate((4, 5)):
        for many, one in zip(together, alone[seed], strict=True):
            assert many.indices[position].tolist() == one.indices.tolist()


@pytest.mark.parametrize("engine", ["products", "single"])
def test_an_exception_of_a_callback_stops_all_trainings(engine: str, tmp_path: Path) -> None:
    recipe, query = recipes.recipe(), Batches("query", QUERY)
    trainings, seen = [Training(0), Training(1)], []

    def stop(under_way: Any, update: Update) -> None:
        seen.append((tuple(under_way), update.step))
        if len(seen) == 3:
            raise Stopped

    def measured(callback: Any) -> Any:
        grid = Grid(tmp_path, identity(recipe, query), len(query))
        return run_grid(
            recipe,
            query,
            trainings,
            grid,
            device="cpu",
            memory=None,
            executor=None,
            engine=engine,
            progress=False,
            callback=callback,
        )

    with pytest.raises(Stopped):
        measured(stop)
    assert {t for unit, _ in seen for t in unit} <= set(trainings)
    finished = measured(None)
    fresh = [recipe.train(t.seed, device="cpu") for t in trainings]
    x, y = QUERY.tensors
    with torch.no_grad():
        expected = [recipe.task.measurements(model(x), (x, y)).numpy() for model in fresh]
    np.testing.assert_allclose(finished, expected, rtol=1e-9)


def test_a_stopped_run_resumes_with_the_same_bits(tmp_path: Path) -> None:
    recipe = recipes.recipe(model=recipes.dropout)

    def stop(update: Update) -> None:
        if update.step == 20:
            raise Stopped

    with pytest.raises(Stopped):
        recipe.run(1, tmp_path, device="cpu", callback=stop)
    assert not Run.open(tmp_path).finished
    again = recipe.run(1, tmp_path, device="cpu")
    assert again.fingerprint == recipe.run(1, device="cpu").fingerprint
