"""The same scores on a GPU: run by hand where there is one, with pytest -m gpu."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import forms, models

import whence
from whence.data import place

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
]
METHODS = [
    whence.Source.published(2),
    whence.Source.published(1, fisher="exact", curvature="kfac"),
    whence.FastSource.published(2),
    whence.Influence.published(1e-3),
    whence.Influence.published("source"),
    whence.Influence.published("source", solver="cg"),
    whence.Influence.published("source", solver="arnoldi", rank=5, iterations=30),
    whence.Influence.published(solver="datainf"),
    whence.TracIn(),
    forms.exact(2),
    forms.exact(2, curvature="gauss-newton"),
]


def adam_run(model: Any, task: Any, data: Any, folder: Path, rate: float = 1e-2) -> whence.Run:
    """A few Adam updates on the GPU through the Recorder, and back."""
    device = torch.device("cuda")
    model = model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    with whence.Recorder(folder / "run", model, optimizer, checkpoints=3, total_steps=9):
        for _ in range(9):
            batch = place(
                torch.utils.data.default_collate([data[k] for k in range(len(data))]),
                device,
                torch.float64,
            )
            optimizer.zero_grad()
            task.losses(task.outputs(model, batch), batch).mean().backward()
            optimizer.step()
    model.to("cpu")
    return whence.Run.open(folder / "run")


@pytest.mark.parametrize("name", models.CASES)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_the_device_changes_nothing(name: str, optimizer: str, method: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, task, train, query = models.CASES[name]()
    model = model.double()
    if optimizer == "adam":
        run = adam_run(model, task, train, tmp_path)
    else:
        run = models.train_run(model, task, train, [2, 5, 9], 0.1).run
    warnings.simplefilter("ignore")
    actual = {}
    for device in ("cpu", "cuda"):
        # a cache of its own, or the second device would read what the first has fitted
        cache = tmp_path / device
        study = whence.Study(model, task, train=train, runs=run, cache=cache)
        options: dict[str, Any] = {"device": device, "dtype": torch.float64, "progress": False}
        actual[device] = (
            method.attribute(study, query, **options).values,
            method.attribute(study, **options).values,
            method.attribute(study, query, **(options | {"dtype": torch.float32})).values,
        )
    single = 2e-2 if optimizer == "sgd" else 1e-1  # the mixed form at 1e-8 is sensitive
    for cpu, gpu, close in zip(actual["cpu"], actual["cuda"], (1e-8, 1e-8, single), strict=True):
        np.testing.assert_allclose(gpu, cpu, rtol=0, atol=close * abs(cpu).max())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize(
    "method", [whence.Influence.published(1e-3), whence.Source.published(2)], ids=repr
)
def test_low_precision_ranks_as_float64_does(method: Any, precision: str) -> None:
    torch.manual_seed(0)
    model, task, train, query = models.CASES["gpt"]()
    run = models.train_run(model, task, train, [2, 5, 9], 0.1).run
    dtype, multiplied = torch.float32, torch.get_float32_matmul_precision()
    if precision == "bf16":
        dtype = torch.bfloat16

    def scores(**options: Any) -> np.ndarray:
        study = whence.Study(model, task, train=train, runs=run, layers="matrices")
        return method.attribute(study, query, progress=False, **options).values

    wanted = scores(device="cpu", dtype=torch.float64)
    torch.set_float32_matmul_precision("high" if precision == "tf32" else multiplied)
    try:
        actual = scores(device="cuda", dtype=dtype)
        again = scores(device="cuda", dtype=dtype)
    finally:
        torch.set_float32_matmul_precision(multiplied)
    assert np.corrcoef(actual.ravel(), wanted.ravel())[0, 1] > (
        0.999 if precision == "tf32" else 0.99
    )
    np.testing.assert_allclose(again, actual, rtol=0, atol=1e-3 * abs(actual).max())


def test_classes_are_drawn_as_on_the_cpu() -> None:
    from whence.task import sample

    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(4, 64, 50257, generator=generator, dtype=torch.float64)
    draws = torch.rand(4, 64, generator=generator, dtype=torch.float64)
    assert torch.equal(sample(logits.cuda(), draws).cpu(), sample(logits, draws))


def test_eigenvalues_resume_after_some_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the first checkpoint are on disk, those of the others on the device."""
    from whence.operators.statistics import SecondMoments

    torch.manual_seed(0)
    model, task, train, query = models.CASES["mlp"]()
    run = models.train_run(model.double(), task, train, [2, 5, 9], 0.1).run
    plain, calls = SecondMoments.finish, []

    def stopped(self: Any, totals: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return plain(self, totals)

    def scores(cache: Path) -> np.ndarray:
        study = whence.Study(model, task, train=train, runs=run, cache=cache)
        options: dict[str, Any] = {"device": "cuda", "dtype": torch.float64, "progress": False}
        return whence.Source.published(1).attribute(study, query, **options).values

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(SecondMoments, "finish", stopped)
        scores(tmp_path / "resumed")
    wanted = scores(tmp_path / "whole")
    np.testing.assert_allclose(scores(tmp_path / "resumed"), wanted, rtol=1e-10, atol=0)


def test_factors_in_memory_stay_on_the_gpu_while_they_take_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And serve both devices: the second call fits nothing."""
    from whence.persist import cache

    torch.manual_seed(0)
    model, task, train, query = models.CASES["mlp"]()
    run = models.train_run(model.double(), task, train, [2, 5, 9], 0.1).run
    method, actual = whence.Source.published(2), {}
    for share, kind in ((16, "cuda"), (10**9, "cpu")):
        monkeypatch.setattr(cache, "GPU_SHARE", share)
        study = whence.Study(model, task, train=train, runs=run)
        for device in ("cuda", "cpu"):
            options: dict[str, Any] = {"device": device, "dtype": torch.float64}
            scores = method.attribute(study, query, progress=False, **options)
            assert ("covariances" in scores.diagnostics["seconds"]) == (device == "cuda")
            actual[share, device] = scores.values
        entries = study.store(run)._memory.values()
        assert kind in {t.device.type for entry in entries for t in entry.values()}
    for values in actual.values():
        wanted = actual[16, "cuda"]
        np.testing.assert_allclose(values, wanted, rtol=0, atol=1e-8 * abs(wanted).max())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.filterwarnings("error:the dynamics of layer")  # whose digits are not all known
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_factors_that_do_not_fit_on_the_gpu(optimizer: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, task = models.mlp((4, 1024, 1024, 1024, 3)).double(), whence.Classification()
    train, query = models.vectors(20), models.vectors(3, seed=1)
    if optimizer == "adam":
        run = adam_run(model, task, train, tmp_path, rate=1e-4)
    else:
        run = models.train_run(model, task, train, [2, 5, 9], 0.1).run
    actual, peak = {}, {}
    for memory in ("4GB", "96MB"):
        study = whence.Study(model, task, train=train, runs=run, cache=tmp_path / memory)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        options: dict[str, Any] = {"device": "cuda", "memory": memory, "dtype": torch.float64}
        method = forms.exact(2) if optimizer == "adam" else whence.Source.published(2)
        actual[memory] = method.attribute(study, query, progress=False, batch_size=4, **options)
        peak[memory] = torch.cuda.max_memory_allocated()
    assert actual["96MB"].diagnostics["factor_groups"] > 1
    assert "factor_groups" not in actual["4GB"].diagnostics
    assert peak["96MB"] < 0.8 * peak["4GB"], peak
    together = actual["4GB"].values
    np.testing.assert_allclose(
        actual["96MB"].values, together, rtol=0, atol=1e-7 * abs(together).max()
    )


# --- retraining --------------------------------------------------------------------------------


def recipes_on_gpu() -> dict[str, Any]:
    from support import recipes

    cases = {f"optimizer {name}": {"optimizer": o} for name, o in recipes.OPTIMIZERS.items()}
    cases |= {f"model {name}": {"model": m} for name, m in recipes.MODELS.items()}
    cases["cosine"] = {"scheduler": recipes.cosine, "clip_norm": 0.3}
    cases["one cycle"] = {"scheduler": recipes.one_cycle}
    cases["transform"] = {"transform": recipes.jitter}
    return cases


# every engine that can train a recipe: a parameter of the model's own has no stacked form
ENGINES = [
    (name, engine)
    for name in recipes_on_gpu()
    for engine in ("products", "vmap")
    if (name, engine) != ("model own", "products")
]


@pytest.mark.parametrize(("name", "engine"), ENGINES)
def test_trainings_at_once_on_the_gpu_are_those_of_the_cpu(name: str, engine: str) -> None:
    """Most updates are replayed from a CUDA graph."""
    from support import recipes

    from whence.retrain import Training, measure

    recipe = recipes.recipe(epochs=10, **recipes_on_gpu()[name])
    query = recipes.dataset(5, seed=9)
    trainings = [Training(s % 2, np.arange(s, 40, 2)) for s in range(3)]
    trainings += [Training(3, np.arange(25))]
    wanted = measure(recipe, query, trainings, device="cpu", engine="single", progress=False)
    actual = measure(recipe, query, trainings, device="cuda", engine=engine, progress=False)
    np.testing.assert_allclose(actual, wanted, rtol=1e-7, atol=1e-9)  # float64 is not graphed
    again = measure(recipe, query, trainings, device="cuda", engine=engine, progress=False)
    assert np.array_equal(actual, again)


@pytest.mark.parametrize(("name", "engine"), ENGINES)
def test_a_cuda_graph_makes_the_updates_that_it_stands_for(
    name: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, where most updates are replayed, beside the same without graphs."""
    from support import recipes

    from whence.retrain import Training, measure

    settings = {"model": recipes.mlp} | recipes_on_gpu()[name]
    make = settings.pop("model")
    recipe = recipes.recipe(epochs=10, model=lambda: make().float(), **settings)
    query = recipes.dataset(5, seed=9)
    trainings = [Training(s % 2, np.arange(s, 40, 2)) for s in range(3)]
    replayed = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(
        torch.cuda.CUDAGraph, "replay", lambda graph: (replayed.append(1), replay(graph))[1]
    )
    actual = measure(recipe, query, trainings, device="cuda", engine=engine, progress=False)
    assert bool(replayed) == (name not in ("one cycle", "optimizer adagrad"))
    monkeypatch.setattr("whence.engine.graphs.WARM_UP", 10**9)
    wanted = measure(recipe, query, trainings, device="cuda", engine=engine, progress=False)
    np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["optimizer nesterov", "optimizer adamw", "optimizer rmsprop"])
def test_long_trainings_on_the_gpu_resume_from_their_middle(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, from a graph to a graph."""
    import sys

    from support import recipes

    from whence.retrain import Training, measure
    from whence.retrain.stack import _StageTraining

    recipe = recipes.recipe(
        epochs=10, model=lambda: recipes.mlp().float(), **recipes_on_gpu()[name]
    )
    query = recipes.dataset(5, seed=9)
    trainings = [Training(s, np.arange(s, s + 30)) for s in range(4)]
    options: dict[str, Any] = {"device": "cuda", "engine": "products", "progress": False}
    wanted = measure(recipe, query, trainings, **options)
    monkeypatch.setattr(sys.modules["whence.retrain.pool"], "CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr("whence.persist.files.Throttle.due", lambda _: True)
    made, plain = [0], _StageTraining.update

    def failing(self: Any, *arguments: Any) -> None:
        made[0] += len(self.seeds) == len(trainings)
        if made[0] == 31:  # of 50
            raise KeyboardInterrupt
        plain(self, *arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(_StageTraining, "update", failing)
        measure(recipe, query, trainings, out=tmp_path, **options)
    assert list((tmp_path / "unfinished").iterdir())
    actual = measure(recipe, query, trainings, out=tmp_path, **options)
    np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=1e-5)


def test_stages_and_runs_on_the_gpu(tmp_path: Path) -> None:
    from support import recipes

    from whence.retrain import Training, measure

    recipe = recipes.two_stages()
    query = recipes.dataset(5, seed=9)
    trainings = [Training(s, np.arange(20), "finetune") for s in range(3)]
    wanted = measure(recipe, query, trainings, device="cpu", engine="single", progress=False)
    actual = measure(recipe, query, trainings, device="cuda", progress=False)
    np.testing.assert_allclose(actual, wanted, rtol=1e-7)
    here, there = (recipe.run(1, device=device) for device in ("cpu", "cuda"))
    for name, weight in here.final.weights().items():
        torch.testing.assert_close(weight, there.final.weights()[name], rtol=1e-8, atol=1e-10)


def test_one_at_a_time_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the data there, and with the data elsewhere."""
    import sys

    from support import recipes

    from whence.retrain import Training, measure

    recipe = recipes.recipe(model=recipes.dropout, transform=recipes.jitter)
    query = recipes.dataset(5, seed=9)
    with pytest.warns(UserWarning, match="one at a time"):
        actual = measure(recipe, query, [Training(0), Training(1)], device="cuda", progress=False)
    monkeypatch.setattr(sys.modules["whence.retrain.pool"], "DATA_MEMORY_SHARE", 0.0)
    again = measure(recipe, query, [Training(1)], device="cuda", engine="single", progress=False)
    assert np.array_equal(actual[1], again[0])


@pytest.mark.parametrize("name", ["nesterov", "adamw", "two stages", "batch norm"])
def test_runs_recorded_at_once_on_the_gpu(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, where most updates are replayed from a CUDA graph; in float64 to rounding."""
    from support import recipes

    from whence.retrain import record

    replayed = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(
        torch.cuda.CUDAGraph, "replay", lambda graph: (replayed.append(1), replay(graph))[1]
    )
    make = recipes.batch_norm if name == "batch norm" else recipes.mlp
    optimizer = recipes.OPTIMIZERS["adamw" if name == "adamw" else "nesterov"]
    for dtype, close in ((torch.float64, 1e-8), (torch.float32, 1e-3)):
        changes: Any = {"model": lambda kind=dtype: make().to(kind), "scheduler": recipes.cosine}
        recipe = (
            recipes.two_stages(**changes)
            if name == "two stages"
            else recipes.recipe(optimizer=optimizer, **changes)
        )
        subsets = [np.arange(s, s + 20) for s in range(3)]
        runs = record(
            recipe, range(3), tmp_path / str(dtype), 4, subsets, device="cuda", progress=False
        )
        assert bool(replayed) == (dtype == torch.float32)  # float64 is not graphed
        for seed, run in enumerate(runs):
            wanted = recipe.run(seed, None, 4, subsets[seed], device="cuda")
            assert run.origin == wanted.origin and run.hyperparameters == wanted.hyperparameters
            assert np.array_equal(run.learning_rates, wanted.learning_rates)
            assert all(map(np.array_equal, run.batches, wanted.batches))
            for one, other in zip(run.checkpoints, wanted.checkpoints, strict=True):
                assert one.step == other.step
                for what in ("weights", "second_moments", "optimizer_state"):
                    actual, sought = getattr(one, what)() or {}, getattr(other, what)() or {}
                    assert actual.keys() == sought.keys()
                    for key, tensor in sought.items():
                        scale = max(0.01, float(tensor.abs().max()))
                        torch.testing.assert_close(actual[key], tensor, rtol=0, atol=close * scale)


@pytest.mark.parametrize("apart", [0, 2**60], ids=["apart", "together"])
@pytest.mark.parametrize("norm", ["default", "cumulative", "bare"])
def test_batch_norm_on_the_gpu(norm: str, apart: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64 as on the CPU; in float32 most updates are replayed from a CUDA graph."""
    from support import recipes
    from test_batch_norm import NORMS, Residual

    from whence.retrain import Training, measure, stacked

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # as the CPU rounds
    monkeypatch.setitem(stacked.PRODUCTS_APART, "cuda", apart)
    monkeypatch.setitem(stacked.NUMBERS_APART, "cuda", apart)
    query = recipes.dataset(5, seed=9)
    trainings = [Training(s, np.arange(s, s + 31)) for s in range(3)] + [Training(3, range(24))]
    replayed = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(
        torch.cuda.CUDAGraph, "replay", lambda graph: (replayed.append(1), replay(graph))[1]
    )
    for dtype, close in ((torch.float64, 1e-7), (torch.float32, 1e-3)):
        recipe = recipes.recipe(
            model=lambda kind=dtype: Residual(**NORMS[norm]).to(kind),
            optimizer=lambda p: torch.optim.SGD(p, lr=5e-3, momentum=0.9),  # rounding grows slowly
        )
        wanted = measure(recipe, query, trainings, device="cpu", engine="single", progress=False)
        actual = measure(recipe, query, trainings, device="cuda", engine="products", progress=False)
        np.testing.assert_allclose(actual, wanted, rtol=close, atol=close)
        assert bool(replayed) == (dtype == torch.float32)  # float64 is not graphed


def test_batch_norm_under_vmap_on_the_gpu() -> None:
    from support import recipes
    from test_batch_norm import Started

    from whence.retrain import Training, measure

    recipe = recipes.recipe(model=lambda: Started(own=True).double())
    query, trainings = recipes.dataset(5, seed=9), [Training(s, range(31)) for s in range(3)]
    wanted = measure(recipe, query, trainings, device="cpu", engine="single", progress=False)
    actual = measure(recipe, query, trainings, device="cuda", engine="vmap", progress=False)
    np.testing.assert_allclose(actual, wanted, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("filling", [0, 2**60], ids=["one", "three"])
def test_resnet9_with_autocast_on_the_gpu(filling: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, channels last, as the experiments train it: one model, or three, in a graph."""
    import sys

    from support import recipes

    from experiments.tasks.models import ResNet9
    from whence.data import Batches
    from whence.retrain import Training, measure
    from whence.retrain.pool import TrainingPool

    monkeypatch.setitem(sys.modules["whence.retrain.capacity"].SATURATING_BYTES, "cuda", filling)
    random = torch.Generator().manual_seed(0)
    images = torch.randn(100, 3, 32, 32, generator=random)
    labels = torch.randint(0, 10, (100,), generator=random)
    train = torch.utils.data.TensorDataset(images[:96], labels[:96])
    query = torch.utils.data.TensorDataset(images[96:], labels[96:])
    recipe = recipes.recipe(
        model=lambda: ResNet9(width=8),
        train=train,
        optimizer=lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
        batch_size=32,
        epochs=4,
    )
    pool = TrainingPool.open(recipe, Batches("query", query), "cuda")
    assert (pool.engine, pool.why) == ("products", None)
    assert pool.at_once(Training(0), None, 3) == (1 if filling == 0 else 3)
    trainings = [Training(s, range(s, s + 80)) for s in range(3)]
    actual = measure(recipe, query, trainings, device="cuda", progress=False)
    wanted = measure(recipe, query, trainings, device="cuda", engine="single", progress=False)
    np.testing.assert_allclose(actual, wanted, atol=0.1 * wanted.std())


def test_too_many_models_for_the_memory_are_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from support import recipes

    from whence.retrain import Training, measure

    room = sys.modules["whence.retrain.pool"]
    real, asked = room.train_stack, []

    def crowded(recipe: Any, trainings: Any, *rest: Any, **options: Any) -> Any:
        if "updates" not in options:
            asked.append(len(trainings))
            if len(trainings) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
        return real(recipe, trainings, *rest, **options)

    monkeypatch.setattr(room, "train_stack", crowded)
    trainings = [Training(s, np.arange(20)) for s in range(7)]
    query = recipes.dataset(5, seed=9)
    with pytest.warns(UserWarning, match="do not fit into memory"):
        actual = measure(recipes.recipe(), query, trainings, device="cuda", progress=False)
    assert asked[0] == 7 and np.isfinite(actual).all() and actual.shape == (7, 5)


@pytest.mark.parametrize("optimizer", ["nesterov", "adamw"])
@pytest.mark.parametrize(
    "method",
    [
        whence.Unrolled(),
        whence.Unrolled("gauss-newton", expected=True, curvature_batch=20, credit_every=8),
        whence.Hydra(),
    ],
    ids=repr,
)
def test_unrolling_on_the_gpu_is_that_of_the_cpu(method: Any, optimizer: str) -> None:
    """The products of most updates are replayed from CUDA graphs."""
    from support import recipes

    recipe = recipes.recipe(optimizer=recipes.OPTIMIZERS[optimizer])
    run, data = recipe.run(0, device="cpu"), recipe.stages[0].data.dataset
    study, query = whence.Study(recipe.build(0), recipe.task, data, run), recipes.dataset(5, 9)
    options: Any = {"dtype": torch.float64, "progress": False}
    wanted = method.attribute(study, query, device="cpu", **options).values
    actual = method.attribute(study, query, device="cuda", **options).values
    np.testing.assert_allclose(actual, wanted, rtol=1e-8, atol=1e-10 * np.abs(wanted).max())
    again = method.attribute(study, query, device="cuda", **options).values
    assert np.array_equal(actual, again)
