"""Many trainings at once are the trainings one makes one by one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import recipes
from support.recipes import plainly_trained
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import whence
from whence.data import Batches
from whence.persist.identity import digest
from whence.retrain import Training, Truth, ground_truth, measure
from whence.retrain.engine_choice import choose_engine
from whence.retrain.stack import Data, train_stack
from whence.retrain.truth import draw_subsets

CPU = torch.device("cpu")
QUERY = recipes.dataset(5, seed=9)


def subsets(count: int, size: int, n: int, seed: int = 0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [np.sort(random.choice(n, size, replace=False)) for _ in range(count)]


def assert_same_models(
    recipe: whence.Recipe, trainings: list[Training], engine: str, tolerance: float = 1e-9
) -> None:
    data = {s.name: Data(s.data, CPU, torch.float64) for s in recipe.stages}
    stack = train_stack(recipe, trainings, engine, CPU, data)
    for k, training in enumerate(trainings):
        alone = dict(plainly_trained(recipe, training).named_parameters())
        together = stack.state(k)
        for name, parameter in alone.items():
            off = (parameter - together[name]).norm() / (1 + parameter.norm())
            assert off.item() < tolerance, (training.seed, name)


# --- equal to plain training -------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["products", "vmap"])
@pytest.mark.parametrize("optimizer", recipes.OPTIMIZERS)
def test_every_optimizer(optimizer: str, engine: str) -> None:
    """Over fifty-odd updates in float64."""
    recipe = recipes.recipe(optimizer=recipes.OPTIMIZERS[optimizer], epochs=13)
    chosen = subsets(3, 24, recipes.N)
    assert recipe.stages[0].total_steps(24) == 52
    trainings = [Training(seed, s) for seed, s in zip((3, 11, 3), chosen, strict=True)]
    assert_same_models(recipe, trainings, engine)


@pytest.mark.parametrize("model", recipes.MODELS)
def test_every_model(model: str) -> None:
    recipe = recipes.recipe(model=recipes.MODELS[model], clip_norm=0.5)
    engine, _ = choose_engine(recipe, Batches("query", QUERY), CPU)
    assert engine == ("vmap" if model == "own" else "products")
    trainings = [Training(seed, s) for seed, s in enumerate(subsets(3, 30, recipes.N))]
    assert_same_models(recipe, trainings, engine)


@pytest.mark.parametrize("engine", ["products", "vmap"])
@pytest.mark.parametrize("schedule", [recipes.cosine, recipes.one_cycle])
def test_schedules_clipping_and_transforms(schedule: Any, engine: str) -> None:
    recipe = recipes.recipe(scheduler=schedule, clip_norm=0.3, transform=recipes.jitter)
    trainings = [Training(seed, s) for seed, s in enumerate(subsets(2, 30, recipes.N))]
    assert_same_models(recipe, trainings, engine)


def test_a_schedule_by_epoch() -> None:
    def halving(optimizer: Any, total: int) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    recipe = recipes.recipe(scheduler=halving, scheduler_every="epoch")
    run = recipe.run(0)
    per_epoch = -(-recipes.N // 7)
    wanted = np.repeat(0.05 * 0.5 ** np.arange(5), per_epoch)
    np.testing.assert_allclose(run.learning_rates[:, 0], wanted)
    table = recipe.stages[0].schedule(recipe.build(0), recipes.N)
    np.testing.assert_allclose([groups[0]["lr"] for groups in table], wanted)


@pytest.mark.parametrize("engine", ["products", "vmap"])
@pytest.mark.parametrize("stage", ["pretrain", "finetune"])
def test_stages(stage: str, engine: str) -> None:
    recipe = recipes.two_stages()
    n = len(recipe.stage(stage).data)
    trainings = [Training(seed, s, stage) for seed, s in enumerate(subsets(3, n // 2, n))]
    assert_same_models(recipe, trainings, engine)


def test_the_recorded_run_is_the_same_training() -> None:
    for recipe in (recipes.recipe(scheduler=recipes.cosine), recipes.two_stages()):
        first = recipe.stages[0]
        subset = subsets(1, 20, len(first.data))[0]
        run = recipe.run(4, subset=subset)
        alone = plainly_trained(recipe, Training(4, subset))
        for name, weight in run.final.weights().items():
            torch.testing.assert_close(weight, alone.state_dict()[name], rtol=1e-12, atol=1e-14)
        assert run.subset_stage == first.name
        assert run.subset.tolist() == subset.tolist()
        assert run.batches is not None and len(run.batches) == run.steps
        epoch = first.batches_per_epoch(20)
        seen = np.sort(np.concatenate(run.batches[:epoch]))
        assert seen.tolist() == subset.tolist()  # every example once an epoch


def test_measurements_are_those_of_the_trained_models() -> None:
    recipe = recipes.recipe()
    trainings = [Training(s, sub) for s, sub in enumerate(subsets(5, 24, recipes.N))]
    trainings += [Training(7), Training(8, np.arange(10, 40))]  # other sizes beside them
    actual = measure(recipe, QUERY, trainings, progress=False)
    for row, training in zip(actual, trainings, strict=True):
        training = training if training.subset is not None else Training(7, np.arange(recipes.N))
        model = plainly_trained(recipe, training).eval()
        batch = QUERY.tensors
        wanted = recipe.task.measurements(model(batch[0]), batch)
        np.testing.assert_allclose(row, wanted.detach().numpy(), rtol=1e-9)


def test_language_models_train_together() -> None:
    from support import models

    recipe = recipes.recipe(
        model=lambda: models.Transformer(tied=False).double(),
        task=whence.LanguageModeling(),
        train=models.documents(12),
        batch_size=4,
        epochs=3,
        optimizer=recipes.OPTIMIZERS["adamw"],
    )
    query, trainings = models.documents(3, seed=5), [Training(s, np.arange(8)) for s in range(3)]
    together = measure(recipe, query, trainings, progress=False, engine="vmap")
    alone = measure(recipe, query, trainings, progress=False, engine="single")
    np.testing.assert_allclose(together, alone, rtol=1e-8)


# --- one at a time -----------------------------------------------------------------------------


def test_what_cannot_be_stacked_is_trained_alone_and_said() -> None:
    recipe = recipes.recipe(model=recipes.dropout)
    trainings = [Training(s, sub) for s, sub in enumerate(subsets(2, 24, recipes.N))]
    with pytest.warns(UserWarning, match="one at a time: .*Dropout"):
        actual = measure(recipe, QUERY, trainings, progress=False)
    again = np.concatenate(  # dropout's draws depend on seed and update, not on earlier draws
        [measure(recipe, QUERY, [t], progress=False, engine="single") for t in reversed(trainings)]
    )[::-1]
    assert np.array_equal(actual, again)


def test_a_model_that_looks_at_the_whole_batch_is_found_out() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(recipes.INPUTS, recipes.CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x - x.mean(0))

    recipe = recipes.recipe(model=lambda: Centred().double())
    engine, why = choose_engine(recipe, Batches("query", QUERY), CPU)
    assert engine == "vmap"  # which keeps the models' batches apart
    assert why is not None and "is different when" in why
    assert_same_models(recipe, [Training(0, np.arange(20)), Training(1, np.arange(20))], "vmap")


def test_an_unknown_optimizer_is_not_stacked() -> None:
    class Whitened(torch.optim.SGD):
        """Looks at a whole tensor."""

    recipe = recipes.recipe(optimizer=lambda p: Whitened(p, lr=0.1))
    assert choose_engine(recipe, Batches("query", QUERY), CPU)[0] is None


# --- invariants --------------------------------------------------------------------------------


def test_neither_chunks_nor_threads_change_a_training() -> None:
    recipe = recipes.recipe()
    trainings = [Training(s % 3, sub) for s, sub in enumerate(subsets(9, 24, recipes.N))]
    whole = measure(recipe, QUERY, trainings, progress=False)
    apart = np.stack([measure(recipe, QUERY, [t], progress=False)[0] for t in reversed(trainings)])[
        ::-1
    ]
    np.testing.assert_allclose(whole, apart, rtol=1e-10)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert np.array_equal(whole, measure(recipe, QUERY, trainings, progress=False)) or (
            np.allclose(whole, measure(recipe, QUERY, trainings, progress=False), rtol=1e-10)
        )
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_the_users_generators_and_models_stay_as_they_are() -> None:
    recipe = recipes.recipe(model=recipes.dropout)
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    recipe.run(0)
    recipe.train(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        measure(recipe, QUERY, [Training(0)], progress=False)
    assert torch.equal(torch.rand(3), wanted)


def test_subsets_are_drawn_one_by_one() -> None:
    many = draw_subsets(200, 0.3, 50)
    assert (many.sum(1) == 60).all()
    assert np.array_equal(many[:7], draw_subsets(200, 0.3, 7))
    assert not np.array_equal(many, draw_subsets(200, 0.3, 50, seed=1))
    assert (np.abs(many.mean(0) - 0.3) < 0.35).all() and many.mean() == pytest.approx(0.3)
    assert (draw_subsets(200, 1 - 1 / 200, 10).sum(1) == 199).all()
    assert len({row.tobytes() for row in many}) == 50


# --- Truth -------------------------------------------------------------------------------------


def small_truth(out: Path | None = None, **changes: Any) -> Truth:
    settings: dict[str, Any] = {"alpha": 0.5, "subsets": 4, "seeds": 2, "progress": False}
    return ground_truth(recipes.recipe(), QUERY, out=out, **(settings | changes))


def test_truth_holds_masks_and_measurements(tmp_path: Path) -> None:
    truth = small_truth(tmp_path / "truth")
    assert truth.masks.shape == (4, recipes.N) and truth.measurements.shape == (4, 2, 5)
    model = plainly_trained(recipes.recipe(), Training(1, np.flatnonzero(truth.masks[2])))
    batch = QUERY.tensors
    wanted = whence.Classification().measurements(model.eval()(batch[0]), batch)
    np.testing.assert_allclose(truth.measurements[2, 1], wanted.detach().numpy(), rtol=1e-9)
    np.testing.assert_allclose(truth.means, truth.measurements.mean(1))
    assert truth.recipe == recipes.recipe().fingerprint
    assert truth.notes["engine"] == "products"
    again = Truth.load(tmp_path / "truth")
    assert np.array_equal(again.masks, truth.masks)
    assert np.array_equal(again.measurements, truth.measurements)
    assert (again.alpha, again.seeds, again.unit) == (0.5, [0, 1], "logits")
    assert "4 subsets of 0.5 of 48 examples x 2 seeds, 5 queries, margin" in repr(again)


def test_truth_grows_in_its_folder(tmp_path: Path) -> None:
    small_truth(tmp_path, subsets=2)
    written = {f: f.stat().st_mtime_ns for f in (tmp_path / "parts").glob("*.safetensors")}
    grown = small_truth(tmp_path, subsets=4, seeds=3)
    assert all(f.stat().st_mtime_ns == when for f, when in written.items())
    np.testing.assert_allclose(grown.measurements, small_truth(subsets=4, seeds=3).measurements)


def test_resampling_one_stage_only() -> None:
    recipe = recipes.two_stages()
    truth = ground_truth(recipe, QUERY, 0.5, 3, 1, stage="finetune", progress=False)
    assert truth.stage == "finetune" and truth.masks.shape == (3, 24)
    training = Training(0, np.flatnonzero(truth.masks[1]), "finetune")
    model = plainly_trained(recipe, training).eval()
    wanted = recipe.task.measurements(model(QUERY.tensors[0]), QUERY.tensors)
    np.testing.assert_allclose(truth.measurements[1, 0], wanted.detach().numpy(), rtol=1e-9)


def test_a_diverged_training_is_counted() -> None:
    recipe = recipes.recipe(optimizer=lambda p: torch.optim.SGD(p, lr=1e300), epochs=20)
    with pytest.warns(UserWarning, match="8 of 8 trainings diverged"):
        truth = ground_truth(recipe, QUERY, 0.5, 4, 2, progress=False)
    assert truth.diverged.all()
    assert "8 trainings diverged" in repr(truth)


SCRIPT = """
import sys, torch, time
sys.path.insert(0, {tests!r})
torch.set_num_threads({threads})
import whence
from support import recipes
from whence.retrain import ground_truth, measure
from whence.retrain.pool import TrainingPool
made = TrainingPool.make
def slowly(self, trainings, *rest):
    print(len(trainings), flush=True)
    time.sleep({pause})
    return made(self, trainings, *rest)
TrainingPool.make = slowly
ground_truth(recipes.recipe(model=recipes.{model}), recipes.dataset(5, seed=9), 0.5, 6, 2,
             out={out!r}, progress=False)
"""


def started(
    out: Path, pause: float = 0.0, threads: int = 1, model: str = "dropout", **environment: str
) -> subprocess.Popen[str]:
    script = SCRIPT.format(
        tests=str(Path(__file__).parents[1]),
        pause=pause,
        out=str(out),
        threads=threads,
        model=model,
    )
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_killed_process_resumes_where_it_was(tmp_path: Path, how: signal.Signals) -> None:
    process = started(tmp_path / "truth", pause=0.2)
    assert process.stdout is not None
    for _ in range(4):
        process.stdout.readline()  # at the fourth of twelve trainings
    process.send_signal(how)
    process.wait()
    parts = len(list((tmp_path / "truth/parts").glob("*.safetensors")))
    assert 3 <= parts < 12
    with pytest.raises(FileNotFoundError, match="not finished"):
        Truth.load(tmp_path / "truth")
    process = started(tmp_path / "truth")
    output, _ = process.communicate()
    assert process.returncode == 0
    assert len(output.split()) == 12 - parts  # only the missing ones
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recipe = recipes.recipe(model=recipes.dropout)
        whole = ground_truth(recipe, QUERY, 0.5, 6, 2, progress=False)
    assert np.array_equal(Truth.load(tmp_path / "truth").measurements, whole.measurements)


def test_processes_share_a_folder_and_make_each_training_once(tmp_path: Path) -> None:
    """As under torchrun: three processes, one of which is killed on the way."""
    processes = [
        started(tmp_path / "t", pause=0.1, RANK=str(k), WORLD_SIZE="3", LOCAL_RANK=str(k))
        for k in range(3)
    ]
    assert processes[0].stdout is not None
    processes[0].stdout.readline()
    processes[0].kill()
    made = 0
    for process in processes[1:]:
        output, _ = process.communicate()
        assert process.returncode == 0
        made += len(output.split())
    processes[0].wait()
    assert made in (11, 12)  # the killed one may have finished its first
    assert not list((tmp_path / "t/parts").glob("*.lock")) or made == 12
    truth = Truth.load(tmp_path / "t")
    assert np.isfinite(truth.measurements).all()


@pytest.mark.slow
def test_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    out = tmp_path / "truth"
    script.write_text(
        SCRIPT.format(
            tests=str(Path(__file__).parents[1]), pause=0.0, out=str(out), threads=1, model="mlp"
        )
    )
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(script)],
        check=True,
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    wanted = ground_truth(recipes.recipe(), QUERY, 0.5, 6, 2, progress=False)
    np.testing.assert_allclose(Truth.load(out).measurements, wanted.measurements, rtol=1e-10)


def test_a_long_training_resumes_from_its_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from whence.retrain import measure as module
    from whence.retrain.stage import StageRecipe

    recipe = recipes.recipe(model=recipes.dropout)
    wanted = measure(recipe, QUERY, [Training(0), Training(1)], engine="single", progress=False)
    monkeypatch.setattr(sys.modules["whence.retrain.pool"], "CHECKPOINT_SECONDS", 0.0)
    del module
    made: list[int] = []
    plain = StageRecipe.updates

    def failing(self: StageRecipe, *arguments: Any) -> Any:
        for block in plain(self, *arguments):
            made.append(len(block))
            if len(made) == 35 + 20:  # in the middle of the second training
                raise KeyboardInterrupt
            yield block

    monkeypatch.setattr(StageRecipe, "updates", failing)
    trainings = [Training(0), Training(1)]
    with pytest.raises(KeyboardInterrupt):
        measure(recipe, QUERY, trainings, out=tmp_path, engine="single", progress=False)
    assert list((tmp_path / "unfinished").iterdir())
    before = len(made)
    actual = measure(recipe, QUERY, trainings, out=tmp_path, engine="single", progress=False)
    assert np.array_equal(actual, wanted)
    assert len(made) - before < 20  # not from the start: it has 35 updates
    assert not list((tmp_path / "unfinished").iterdir())


LONG_TRAININGS: dict[str, Any] = {
    **{name: lambda o=o: recipes.recipe(optimizer=o) for name, o in recipes.OPTIMIZERS.items()},
    "one cycle": lambda: recipes.recipe(scheduler=recipes.one_cycle, transform=recipes.jitter),
    "stages": recipes.two_stages,
    "batch norm": lambda: recipes.recipe(model=recipes.batch_norm),
    "frozen": lambda: recipes.recipe(model=recipes.frozen),
}


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        *((name, "products") for name in LONG_TRAININGS),
        *((name, "vmap") for name in LONG_TRAININGS if name != "batch norm"),
    ],
)
def test_long_trainings_at_once_resume_from_their_middle(
    name: str, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from whence.retrain.stack import _StageTraining

    recipe = LONG_TRAININGS[name]()
    stage = recipe.stages[0].name
    half = subsets(2, 20, len(recipe.stages[0].data))
    trainings = [Training(k, subset, stage) for k in (0, 1) for subset in half]
    wanted = measure(recipe, QUERY, trainings, engine=engine, progress=False)
    monkeypatch.setattr(sys.modules["whence.retrain.pool"], "CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr("whence.persist.files.Throttle.due", lambda _: True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # one stack
    made, plain = [0], _StageTraining.update
    total = sum(s.total_steps(len(recipe.examples(half[0], stage)[s.name])) for s in recipe.stages)

    def failing(self: Any, *arguments: Any) -> None:
        if len(self.seeds) != len(trainings):  # the engine is being tried
            return plain(self, *arguments)
        if made[0] in stops:
            stops.remove(made[0])
            raise KeyboardInterrupt
        made[0] += 1
        return plain(self, *arguments)

    monkeypatch.setattr(_StageTraining, "update", failing)
    stops = [1, total // 2, total - 1]
    for _ in list(stops):
        with pytest.raises(KeyboardInterrupt):
            measure(recipe, QUERY, trainings, out=tmp_path, engine=engine, progress=False)
        assert len(list((tmp_path / "unfinished").iterdir())) == 1
    actual = measure(recipe, QUERY, trainings, out=tmp_path, engine=engine, progress=False)
    assert np.array_equal(actual, wanted)
    assert made[0] == total  # none was made twice
    assert not list((tmp_path / "unfinished").iterdir())


def test_a_damaged_unfinished_training_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from whence.retrain.unfinished import Unfinished

    recipe, trainings = recipes.recipe(), [Training(0), Training(1)]
    monkeypatch.setattr(sys.modules["whence.retrain.pool"], "CHECKPOINT_SECONDS", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(Unfinished, "drop", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            measure(recipe, QUERY, trainings, out=tmp_path, progress=False)
    files = list((tmp_path / "unfinished").iterdir())
    for file in files:
        file.write_bytes(b"\0" * 20)
    with pytest.raises(ValueError, match=r"unfinished.* is damaged .*: delete it"):
        measure(recipe, QUERY, trainings, out=tmp_path, progress=False)
    for file in files:
        file.unlink()
    actual = measure(recipe, QUERY, trainings, out=tmp_path, progress=False)
    assert np.array_equal(actual, measure(recipe, QUERY, trainings, progress=False))


# --- Recipe.run --------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [recipes.dropout, recipes.batch_norm])
@pytest.mark.parametrize("stop", [1, 9, 24, 30, 36])
def test_an_interrupted_run_resumes_with_the_same_bits(
    tmp_path: Path, stop: int, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from whence.retrain.stage import StageRecipe

    recipe = recipes.two_stages(model=model, scheduler=recipes.cosine, transform=recipes.jitter)
    whole = recipe.run(3)
    plain, seen = StageRecipe.updates, []

    def failing(self: StageRecipe, *arguments: Any) -> Any:
        for block in plain(self, *arguments):
            seen.append(1)
            if len(seen) == stop:
                raise RuntimeError("power cut")
            yield block

    with monkeypatch.context() as patch:
        patch.setattr(StageRecipe, "updates", failing)
        with pytest.raises(RuntimeError, match="power cut"):
            recipe.run(3, tmp_path / "run")
    resumed = recipe.run(3, tmp_path / "run")
    assert resumed.fingerprint == whole.fingerprint
    assert [b.tolist() for b in resumed.batches] == [b.tolist() for b in whole.batches]
    before = (tmp_path / "run/run.json").stat().st_mtime_ns
    assert recipe.run(3, tmp_path / "run").fingerprint == whole.fingerprint  # opened, not trained
    assert (tmp_path / "run/run.json").stat().st_mtime_ns == before
    with pytest.raises(whence.run.RunError, match=r"another training .*\(differs in: seed\)"):
        recipe.run(4, tmp_path / "run")


def test_a_run_can_be_attributed(tmp_path: Path) -> None:
    recipe = recipes.recipe(model=lambda: recipes.mlp().float(), train=recipes.dataset())
    half = np.arange(0, recipes.N, 2)
    runs = [recipe.run(0, tmp_path / "half", subset=half), recipe.run(0)]
    assert [c.step for c in runs[1].checkpoints] == [6, 12, 18, 23, 29, 35]
    for run in runs:
        study = whence.Study(recipe.build(0), recipe.task, recipe.stages[0].data.dataset, run)
        scores = whence.Source.published(2).attribute(study, QUERY, progress=False)
        assert scores.shape == (5, recipes.N) and np.isfinite(scores.values).all()


def test_checkpoints_are_dealt_out_to_stages() -> None:
    recipe = recipes.two_stages()
    ends = [24, 36]
    for asked, wanted in ((6, [3, 3]), (3, [2, 1]), ({"pretrain": 1, "finetune": 4}, [1, 4])):
        run = recipe.run(0, checkpoints=asked)
        steps = [c.step for c in run.checkpoints]
        assert [sum(c <= ends[0] for c in steps), sum(c > ends[0] for c in steps)] == wanted
        assert set(ends) <= set(steps)


def test_the_fingerprint_is_of_what_is_done() -> None:
    same = recipes.recipe().fingerprint
    assert recipes.recipe(optimizer=lambda p: recipes.OPTIMIZERS["nesterov"](p)).fingerprint == same
    assert recipes.recipe(model=lambda: recipes.mlp()).fingerprint == same
    others = [
        recipes.recipe(epochs=6),
        recipes.recipe(batch_size=8),
        recipes.recipe(train=recipes.dataset(seed=1)),
        recipes.recipe(optimizer=lambda p: torch.optim.SGD(p, lr=0.05)),
        recipes.recipe(model=recipes.conv),
        recipes.recipe(scheduler=recipes.cosine),
        recipes.recipe(transform=recipes.jitter),
        recipes.recipe(clip_norm=1.0),
        recipes.recipe(task=whence.Classification("loss")),
    ]
    assert len({same, *(r.fingerprint for r in others)}) == 1 + len(others)


# --- bad input ---------------------------------------------------------------------------------


def test_bad_recipes() -> None:
    model = recipes.mlp()
    with pytest.raises(TypeError, match="model is Sequential: give a function"):
        recipes.recipe(model=model)
    with pytest.raises(ValueError, match="same module every time"):
        recipes.recipe(model=lambda: model).run(0)
    numpy = np.random.default_rng()

    def drawn_elsewhere() -> nn.Module:
        made = recipes.mlp()
        made[0].weight.data += torch.from_numpy(numpy.normal(size=(12, 8)))
        return made

    with pytest.raises(ValueError, match="another generator"):
        recipes.recipe(model=drawn_elsewhere).run(0)
    with pytest.raises(TypeError, match="optimizer is SGD"):
        recipes.recipe(optimizer=torch.optim.SGD(model.parameters(), lr=1))
    with pytest.raises(TypeError, match=r"returned int: it must return a torch\.optim"):
        recipes.recipe(optimizer=lambda p: 3).run(0)
    with pytest.raises(ValueError, match="batch_size=49, but train has 48 examples"):
        recipes.recipe(batch_size=49)
    with pytest.raises(ValueError, match="epochs=0 must be at least 1"):
        recipes.recipe(epochs=0)
    with pytest.raises(ValueError, match="scheduler_every='step'"):
        recipes.recipe(scheduler_every="step")
    with pytest.raises(ValueError, match="clip_norm=-1 must be positive"):
        recipes.recipe(clip_norm=-1)
    with pytest.raises(ValueError, match=r"epochs has the stages \['a'\]"):
        recipes.recipe(epochs={"a": 1})
    with pytest.raises(ValueError, match=r"sets \['epoch'\]"):
        recipes.recipe(stages={"train": {"epoch": 3}})
    with pytest.raises(ValueError, match="ReduceLROnPlateau"):
        recipes.recipe(scheduler=lambda o, t: torch.optim.lr_scheduler.ReduceLROnPlateau(o)).run(0)
    with pytest.raises(ValueError, match="seed=-1"):
        recipes.recipe().run(-1)

    class Augmented(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 20

        def __getitem__(self, k: int) -> Any:
            return torch.rand(recipes.INPUTS, dtype=torch.float64), 0

    with pytest.raises(ValueError, match="augmentation as transform="):
        recipes.recipe(train=Augmented()).run(0)


@pytest.mark.parametrize(
    ("subset", "message"),
    [
        (np.arange(49), "subset has 49 examples, but the data has only 48"),
        ([0, 1, 2, 3, 4, 5, 48], "names example 48, but the data has 0..47"),
        ([1] * 10, "names an example twice"),
        (np.ones(30, bool), r"mask of shape \(30,\) for 48"),
        (np.arange(6), "6 examples are fewer than batch_size=7"),
        ([0.5, 1.5], "must be training indices"),
    ],
)
def test_bad_subsets(subset: Any, message: str) -> None:
    for call in (
        lambda: recipes.recipe().run(0, subset=subset),
        lambda: measure(recipes.recipe(), QUERY, [Training(0, subset)], progress=False),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            call()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"alpha": 0.0}, "alpha=0.0 must be above 0"),
        ({"alpha": 1.0}, "alpha=1.0 must be above 0 and at most"),
        ({"alpha": 0.99}, "are all of them"),
        ({"alpha": 0.1}, "alpha=0.1 of 48 examples are 5, fewer than batch_size=7"),
        ({"subsets": 0}, "subsets=0"),
        ({"seeds": 0}, "train each subset at least once"),
        ({"seeds": [1, 1]}, "name one twice"),
        ({"stage": "pretrain"}, r"stage='pretrain' is not in the recipe: it has \['train'\]"),
        ({"engine": "magic"}, "engine='magic'"),
        ({"executor": "slurm"}, "executor='slurm'"),
    ],
)
def test_bad_questions(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small_truth(**changes)


def test_a_folder_of_another_recipe_is_refused(tmp_path: Path) -> None:
    small_truth(tmp_path)
    with pytest.raises(ValueError, match=r"differ in: recipe\.stages\.train\.epochs"):
        ground_truth(recipes.recipe(epochs=6), QUERY, 0.5, 4, 2, out=tmp_path, progress=False)
    with pytest.raises(ValueError, match=r"differ in: .*alpha"):
        small_truth(tmp_path, alpha=0.6)
    with pytest.raises(ValueError, match=r"differ in: .*query"):
        other = recipes.dataset(5, seed=8)
        ground_truth(recipes.recipe(), other, 0.5, 4, 2, out=tmp_path, progress=False)


def test_damaged_folders(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist: give a folder"):
        Truth.load(tmp_path / "nowhere")
    small_truth(tmp_path / "t")
    part = next((tmp_path / "t/parts").glob("*.safetensors"))
    part.write_bytes(part.read_bytes()[:40])
    with pytest.raises(ValueError, match="delete it, and rerun to repeat its trainings"):
        small_truth(tmp_path / "t")
    (tmp_path / "t/truth.json").write_text(json.dumps({"schema": 1}))
    with pytest.raises(ValueError, match="is damaged"):
        Truth.load(tmp_path / "t")
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        small_truth(tmp_path / "file")


def test_bad_truths() -> None:
    masks, measured = np.ones((3, 4), bool), np.zeros((3, 2, 5))
    with pytest.raises(ValueError, match=r"give booleans \(M, n\)"):
        Truth(masks.astype(int), measured)
    with pytest.raises(ValueError, match=r"give \(M, R, q\)"):
        Truth(masks, measured[:2])
    with pytest.raises(ValueError, match="3 seeds for 2 repeats"):
        Truth(masks, measured, seeds=[1, 2, 3])


def test_processes_without_a_folder() -> None:
    os.environ["WORLD_SIZE"] = "2"
    try:
        with pytest.raises(ValueError, match="2 processes need a folder to share"):
            small_truth()
    finally:
        del os.environ["WORLD_SIZE"]


def test_texts_are_trained_one_at_a_time() -> None:
    """A dataset of which there is no one batch: padded to the longest of each batch."""
    rows = [(torch.ones(k % 3 + 1, recipes.INPUTS, dtype=torch.float64), k % 3) for k in range(20)]

    def pad(batch: list[Any]) -> Any:
        xs = nn.utils.rnn.pad_sequence([x for x, _ in batch], batch_first=True)
        return xs.mean(1), torch.tensor([y for _, y in batch])

    recipe = recipes.recipe(train=rows, collate=pad)
    with pytest.warns(UserWarning, match="one at a time: .*cannot be collated into one batch"):
        measure(recipe, rows[:4], [Training(0), Training(1)], progress=False)


def test_the_time_of_a_lock_is_short(tmp_path: Path) -> None:
    """Nobody waits for a part that is being made: others take the next."""
    slow, quick = started(tmp_path, pause=1.5), started(tmp_path, pause=0.0)
    begun = time.monotonic()
    output, _ = quick.communicate()
    slow.communicate()
    assert len(output.split()) >= 8, (output, time.monotonic() - begun)


def test_tensor_rows() -> None:
    data = TensorDataset(torch.arange(6.0).view(3, 2), torch.arange(3))
    on_device = Data(Batches("train", data), CPU, torch.float64)
    x, y = on_device.rows(torch.tensor([2, 0]))
    assert x.tolist() == [[4, 5], [0, 1]] and y.tolist() == [2, 0] and x.dtype == torch.float64


def test_data_cut_out_of_a_strided_table_has_the_digest_of_its_copy() -> None:
    table = torch.arange(14)[::7]
    for rows in (table, table[:1], table[:1].reshape(1, 1)):
        assert digest(rows) == digest(rows.clone(memory_format=torch.contiguous_format))
