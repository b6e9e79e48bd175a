"""Runs recorded many at a time are the runs that `Recipe.run` records one by one."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import models, recipes
from support.interrupting import interrupt
from torch import nn

import whence
from whence.retrain import record
from whence.retrain.stage import StageRecipe
from whence.run import Run, RunError

ROOM = sys.modules["whence.retrain.recording_many"]


def tied() -> nn.Module:
    return nn.Sequential(nn.Linear(recipes.INPUTS, 4), models.Tied()).double()


CASES: dict[str, Any] = {
    "schedule": lambda: recipes.recipe(scheduler=recipes.cosine),
    "momentum is scheduled too": lambda: recipes.recipe(scheduler=recipes.one_cycle),
    "groups": lambda: recipes.recipe(optimizer=recipes.by_shape, scheduler=recipes.cosine),
    "each epoch": lambda: recipes.recipe(scheduler=recipes.cosine, scheduler_every="epoch"),
    "plain sgd": lambda: recipes.recipe(optimizer=recipes.OPTIMIZERS["sgd"]),
    "adamw": lambda: recipes.recipe(optimizer=recipes.OPTIMIZERS["adamw"]),
    "amsgrad": lambda: recipes.recipe(optimizer=recipes.OPTIMIZERS["amsgrad"]),
    "rmsprop": lambda: recipes.recipe(optimizer=recipes.OPTIMIZERS["rmsprop"]),
    "adagrad": lambda: recipes.recipe(optimizer=recipes.OPTIMIZERS["adagrad"]),
    "transform": lambda: recipes.recipe(transform=recipes.jitter),
    "batch norm": lambda: recipes.recipe(model=recipes.batch_norm, clip_norm=0.3),
    "by vmap": lambda: recipes.recipe(model=recipes.own),
    "frozen": lambda: recipes.recipe(model=recipes.frozen),
    "tied": lambda: recipes.recipe(model=tied),
    "two stages": recipes.two_stages,
}


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`record`, in which no training may be made by itself."""

    def alone(*_: Any) -> Any:
        raise AssertionError("one was trained by itself")

    def call(*args: Any, **given: Any) -> list[Run]:
        with monkeypatch.context() as patched:
            patched.setattr(StageRecipe, "updates", alone)
            return record(*args, progress=False, device="cpu", **given)

    return call


def told(run: Run) -> Any:
    """run.json without the hashes, which rounding changes."""

    def plain(held: Any) -> Any:
        if isinstance(held, list):
            return [plain(value) for value in held]
        if not isinstance(held, dict):
            return held
        hashes = ("sha256", "checksum")
        return {key: plain(value) for key, value in held.items() if key not in hashes}

    assert run.path is not None
    return plain(json.loads((run.path / "run.json").read_text()))


def close(found: Any, wanted: Any) -> None:
    if wanted is None:
        assert found is None
        return
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-10, msg=name)


def assert_same(recipe: whence.Recipe, found: Run, wanted: Run) -> None:
    assert told(found) == told(wanted)
    # the Recorder's own has batch norm's statistics after the first forward pass
    assert found.initial is not None and wanted.initial is not None
    start, other = found.initial.weights(), wanted.initial.weights()
    built = recipe.build(found.origin["seed"])
    assert start.keys() == built.state_dict().keys() == other.keys()
    assert all(torch.equal(start[name], tensor) for name, tensor in built.state_dict().items())
    assert all(torch.equal(other[name], start[name]) for name, _ in built.named_parameters())
    assert np.array_equal(found.learning_rates, wanted.learning_rates)
    assert np.array_equal(found.momentums, wanted.momentums)
    assert all(map(np.array_equal, found.batches or (), wanted.batches or ()))
    assert len(found.batches or ()) == wanted.steps == found.steps
    for one, other in zip(found.checkpoints, wanted.checkpoints, strict=True):
        close(one.weights(), other.weights())
        close(one.second_moments(), other.second_moments())
        close(one.optimizer_state(), other.optimizer_state())


# --- the same runs -----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*not modelled by SOURCE")
@pytest.mark.parametrize("name", CASES)
def test_runs_are_those_of_one_by_one(name: str, together: Any, tmp_path: Path) -> None:
    recipe, before = CASES[name](), torch.get_rng_state()
    runs = together(recipe, [3, 8], tmp_path / "together", 4)
    assert torch.equal(torch.get_rng_state(), before)
    assert [run.path for run in runs] == [tmp_path / "together/3", tmp_path / "together/8"]
    wanted = recipe.run(8, tmp_path / "alone", 4, device="cpu")
    assert_same(recipe, runs[1], wanted)
    first, last = (run.checkpoints[-1].weights() for run in runs)
    assert any(not torch.equal(first[key], last[key]) for key in first)
    # what Recipe.run finds there, it takes for its own
    assert recipe.run(8, tmp_path / "together/8", 4).fingerprint == runs[1].fingerprint


@pytest.mark.filterwarnings("ignore:training was planned")
@pytest.mark.parametrize("checkpoints", [[1, 9, 30], {"pretrain": 3, "finetune": 1}])
def test_subsets_of_several_sizes_in_a_later_stage(
    checkpoints: Any, together: Any, tmp_path: Path
) -> None:
    recipe = recipes.two_stages()
    mask = np.arange(24) % 2 == 0
    subsets = [np.arange(3, 20), None, mask, np.arange(17)[::-1]]
    folders = [tmp_path / name for name in "abcd"]
    given = {"checkpoints": checkpoints, "stage": "finetune"}
    runs = together(recipe, [5, 5, 6, 7], folders, subsets=subsets, **given)
    for seed, subset, run in zip([5, 5, 6, 7], subsets, runs, strict=True):
        out = tmp_path / "alone" / run.path.name
        wanted = recipe.run(seed, out, subset=subset, device="cpu", **given)
        assert_same(recipe, run, wanted)
    assert runs[2].subset_stage == "finetune" and runs[1].subset is None
    assert runs[2].subset.tolist() == list(range(0, 24, 2))


@pytest.mark.parametrize("optimizer", ["nesterov", "adamw"])
def test_scores_are_those_of_one_by_one(optimizer: str, together: Any, tmp_path: Path) -> None:
    recipe = recipes.recipe(optimizer=recipes.OPTIMIZERS[optimizer], epochs=3)
    (run,) = together(recipe, [4], tmp_path, 3)
    alone, query = recipe.run(4, checkpoints=3, device="cpu"), recipes.dataset(3, seed=9)
    for method in (whence.Source.published(2), whence.Hydra(), whence.Unrolled()):
        actual, wanted = (
            method.attribute(
                whence.Study(recipe.build(0), recipe.task, recipes.dataset(), one),
                query,
                device="cpu",
                dtype=torch.float64,
                progress=False,
            ).values
            for one in (run, alone)
        )
        np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-8 * np.abs(wanted).max())


# --- resumed, and refused ----------------------------------------------------------------------


def test_what_is_there_is_opened_and_the_others_are_made(
    together: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, made, plain = recipes.recipe(epochs=2), [], ROOM.train_stack

    def counted(recipe: Any, trainings: Any, *rest: Any, **given: Any) -> Any:
        made.append([t.seed for t in trainings])
        return plain(recipe, trainings, *rest, **given)

    monkeypatch.setattr(ROOM, "train_stack", counted)
    first = together(recipe, [1, 2], tmp_path)
    more = together(recipe, [3, 2, 1], tmp_path)
    assert made == [[1, 2], [3]]
    assert [run.fingerprint for run in more[1:]] == [run.fingerprint for run in reversed(first)]
    assert [run.origin["seed"] for run in more] == [3, 2, 1]
    assert together(recipe, [], tmp_path) == [] and len(made) == 2


def test_interrupted_between_two_checkpoints_it_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipes.recipe(optimizer=recipes.OPTIMIZERS["adamw"])
    options: Any = {"progress": False, "device": "cpu"}
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        # the third checkpoint of the second run
        interrupt(patched, ROOM.StackCheckpoint, "load", 9)
        record(recipe, range(3), tmp_path / "runs", **options)
    first = Run.open(tmp_path / "runs/0")
    assert first.finished and not Run.open(tmp_path / "runs/1").finished
    assert not (tmp_path / "runs/2").exists()
    runs = record(recipe, range(3), tmp_path / "runs", **options)
    assert runs[0].fingerprint == first.fingerprint
    for seed, run in enumerate(runs):
        assert_same(recipe, run, recipe.run(seed, tmp_path / f"alone-{seed}", device="cpu"))


@pytest.mark.parametrize("name", ["nesterov", "adamw", "stages", "batch norm"])
def test_long_runs_resume_from_their_last_checkpoint(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from whence.retrain.stack import _StageTraining

    recipe = {
        "nesterov": recipes.recipe,
        "adamw": lambda: recipes.recipe(optimizer=recipes.OPTIMIZERS["adamw"]),
        "stages": recipes.two_stages,
        "batch norm": lambda: recipes.recipe(model=recipes.batch_norm),
    }[name]()
    options: Any = {"progress": False, "device": "cpu"}
    wanted = record(recipe, range(3), tmp_path / "wanted", **options)
    total = wanted[0].checkpoints[-1].step
    monkeypatch.setattr(ROOM, "CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    made, update = [0], _StageTraining.update

    def failing(self: Any, *arguments: Any) -> None:
        if len(self.seeds) == 3:
            if made[0] == stop:
                raise KeyboardInterrupt
            made[0] += 1
        update(self, *arguments)

    monkeypatch.setattr(_StageTraining, "update", failing)
    out = tmp_path / "runs"
    for stop in (3, total // 2, total - 1):  # before the first checkpoint, and later
        with pytest.raises(KeyboardInterrupt):
            record(recipe, range(3), out, **options)
        made[0] = stop
    interrupt(monkeypatch, ROOM.StackCheckpoint, "load", 9)  # in the second run
    stop = 10**9
    with pytest.raises(KeyboardInterrupt):
        record(recipe, range(3), out, **options)
    assert list(out.glob(".unfinished-*"))
    made[0] = 0
    runs = record(recipe, range(3), out, **options)
    assert made[0] == 0  # all was trained
    assert not list(out.glob(".unfinished-*"))
    for run, other in zip(runs, wanted, strict=True):
        for one, two in zip(run.checkpoints, other.checkpoints, strict=True):
            assert one.step == two.step
            assert one.sha256 == two.sha256


def test_another_training_is_refused_before_anything_is_trained(
    together: Any, tmp_path: Path
) -> None:
    together(recipes.recipe(epochs=2), [1], tmp_path)
    again = recipes.recipe(epochs=2)
    with pytest.raises(RunError, match=r"1 holds another training .*\(differs in: checkpoints\)"):
        together(again, [0, 1], tmp_path, 4)
    with pytest.raises(RunError, match=r"another training .*\(differs in: stage, subset\)"):
        together(again, [0, 1], tmp_path, subsets=[range(30), range(30)])
    with pytest.raises(RunError, match=r"another training .*\(differs in: recipe\): give another"):
        together(recipes.recipe(epochs=3), [0, 1], tmp_path)
    assert not (tmp_path / "0").exists()


# --- one by one, and in less memory ------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model": recipes.dropout}, r"1 \(Dropout\) mixes examples or draws random numbers"),
        ({"optimizer": torch.optim.Rprop}, "Rprop is not known to be elementwise"),
    ],
)
def test_what_cannot_be_stacked_is_trained_one_at_a_time(
    changes: Any, why: str, tmp_path: Path
) -> None:
    recipe, options = recipes.recipe(epochs=1, **changes), {"progress": False, "device": "cpu"}
    with pytest.warns(UserWarning, match=f"one at a time: {why}") as warned:
        runs = record(recipe, range(2), tmp_path, **options)
    assert len(warned) == 1 and warned[0].filename == __file__
    for seed, run in enumerate(runs):
        assert run.fingerprint == recipe.run(seed, device="cpu").fingerprint
    with pytest.raises(ValueError, match="engine='vmap' cannot train this recipe"):
        record(recipe, [5], tmp_path, engine="vmap", **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (run,) = record(recipe, [5], tmp_path, engine="single", **options)
    assert run.fingerprint == recipe.run(5, device="cpu").fingerprint


def test_short_of_memory_fewer_are_trained_at_once(
    together: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, made, plain = recipes.recipe(epochs=2), [], ROOM.train_stack

    def crowded(recipe: Any, trainings: Any, *rest: Any, **given: Any) -> Any:
        made.append(len(trainings))
        if len(trainings) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(recipe, trainings, *rest, **given)

    monkeypatch.setattr(ROOM, "train_stack", crowded)
    with pytest.warns(UserWarning, match="5 models together do not fit into memory: trying 2"):
        runs = together(recipe, range(5), tmp_path / "short")
    assert made == [5, 2, 3, 1, 2]
    for seed, run in enumerate(runs):
        assert_same(recipe, run, recipe.run(seed, tmp_path / f"alone-{seed}", device="cpu"))
    made.clear()
    size = sum(p.nbytes for p in recipe.build(0).parameters())
    # half of which holds six checkpoints of two runs
    room = 2 * 2 * ROOM.COPIES_PER_CHECKPOINT * 6 * size
    monkeypatch.setattr(ROOM, "free_and_total", lambda device: (room, room))
    runs = together(recipe, range(3), tmp_path / "held")
    assert made == [2, 1]


# --- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seeds", "given", "message"),
    [
        ([0, 0], {}, r"two runs would have the folder .*0: use each seed once"),
        ([0, 1], {"out": ["a"]}, "out has 1 folders for 2 runs"),
        ([0, 1], {"subsets": [None]}, "1 subsets for 2 seeds: give one per run"),
        ([0], {"subsets": [[1, 2, 99]]}, "subset names example 99"),
        ([0], {"subsets": [[1, 2]]}, "2 examples are fewer than batch_size=7"),
        ([0], {"stage": "tune"}, "stage='tune' is not in the recipe"),
        ([0], {"checkpoints": 100}, "checkpoints=100, but total_steps=14"),
        ([0], {"checkpoints": [5, 3]}, r"checkpoints=\[5, 3\]: give increasing update counts"),
        ([0], {"engine": "fast"}, "engine='fast' is not known: use one of"),
        ([-1], {}, "seed=-1: use a number from 0"),
    ],
)
def test_bad_input(seeds: Any, given: Any, message: str, together: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        together(recipes.recipe(epochs=2), seeds, **({"out": tmp_path} | given))
    assert not list(tmp_path.iterdir())


def test_seeds_are_several(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"seeds=3: give one per run, such as range\(10\)"):
        record(recipes.recipe(), 3, tmp_path)  # type: ignore[arg-type]
