"""Retraining of what real code looks like: each of these once came out wrong, or not at all."""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections import UserDict
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support import recipes
from torch import Tensor, nn
from torch.utils.data import TensorDataset, default_collate

import whence
from whence.data import Batches
from whence.draws import keys
from whence.retrain import Training, ground_truth, measure
from whence.retrain.grid import Grid
from whence.retrain.pool import TrainingPool
from whence.retrain.work_queue import work

CPU = torch.device("cpu")
INPUTS, CLASSES = recipes.INPUTS, recipes.CLASSES
QUERY = recipes.dataset(5, seed=9)
SGD = torch.optim.SGD


def tokens(n: int, seed: int = 0) -> TensorDataset:
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 11, (n, 6), generator=random)
    return TensorDataset(ids, torch.randint(0, CLASSES, (n,), generator=random))


def plainly_measured(recipe: whence.Recipe, training: Training, query: Any) -> np.ndarray:
    """An ordinary loop, written out once more; only the draws of batch orders are the recipe's."""
    (stage,), task = recipe.stages, recipe.task
    with torch.random.fork_rng():
        torch.manual_seed(training.seed)
        model = recipe.model().train()
        optimizer = stage.optimizer(model.parameters())
        examples = np.arange(len(stage.data))
        if training.subset is not None:
            examples = np.sort(np.asarray(training.subset))
        updates = stage.epochs * -(-len(examples) // stage.batch_size)
        scheduler = stage.scheduler(optimizer, updates) if stage.scheduler else None
        dtype, step = next(model.parameters()).dtype, 0
        for epoch in range(stage.epochs):
            drawn = keys(training.seed, 0, epoch, torch.from_numpy(examples)).numpy()
            order = examples[np.argsort(drawn, kind="stable")]
            for start in range(0, len(order), stage.batch_size):
                rows = order[start : start + stage.batch_size]
                torch.manual_seed(int(keys(training.seed, 0, step)) % 2**63)
                batch = _cast(stage.data.take(rows), dtype)
                if stage.transform:
                    draws = stage.draws(training.seed, step, rows, CPU)
                    batch = _cast(stage.transform(batch, draws), dtype)
                recipes.update(model, stage, batch, optimizer, scheduler)
                step += 1
    model.eval()
    batch = _cast(Batches("query", query, recipe.collate).take(np.arange(len(query))), dtype)
    with torch.no_grad():
        return task.measurements(task.outputs(model, batch), batch).double().numpy()


def _cast(batch: Any, dtype: torch.dtype) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(dtype) if batch.is_floating_point() else batch
    if hasattr(batch, "items"):
        return {name: _cast(value, dtype) for name, value in batch.items()}
    return tuple(_cast(value, dtype) for value in batch)


def assert_right(
    recipe: whence.Recipe, query: Any = QUERY, engine: str | None = None, rtol: float = 1e-9
) -> None:
    """Measured as by plain loops, by the engine expected ("single": one at a time, and said)."""
    n = len(recipe.stages[0].data)
    random = np.random.default_rng(0)
    subsets = [np.sort(random.choice(n, n // 2 + 1, replace=False)) for _ in range(4)]
    trainings = [Training(s, subset) for s, subset in zip((0, 3, 3, 7), subsets, strict=True)]
    torch.manual_seed(1)
    before = torch.get_rng_state()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if engine is not None:
            pool = TrainingPool.open(recipe, Batches("query", query, recipe.collate), None)
            assert (pool.engine or "single") == engine, pool.why
        actual = measure(recipe, query, trainings, progress=False)
    assert torch.equal(torch.get_rng_state(), before)
    if engine == "single":
        assert any("one at a time" in str(w.message) for w in caught)
    wanted = np.stack([plainly_measured(recipe, t, query) for t in trainings])
    np.testing.assert_allclose(actual, wanted, rtol=rtol, atol=rtol)


# --- threads -----------------------------------------------------------------------------------


def test_threads_build_the_models_of_their_seeds() -> None:
    """Seeding is of the whole process: models that two threads made at once had neither's weights,
    and the user's generator was left somewhere else."""

    def wide() -> nn.Module:
        return nn.Sequential(nn.Linear(INPUTS, 600), nn.ReLU(), nn.Linear(600, 600), nn.Flatten())

    recipe = recipes.recipe(
        model=wide, optimizer=lambda p: SGD(p, lr=1e-9), scheduler=recipes.cosine, epochs=1
    )
    trainings = [Training(seed, range(7)) for seed in range(40)]
    threads, filters = torch.get_num_threads(), list(warnings.filters)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    torch.set_num_threads(2)
    try:
        actual = measure(recipe, QUERY, trainings, progress=False)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.get_rng_state(), before)
    assert not [f for f in warnings.filters if f not in filters and "lr_scheduler" in str(f)]
    wanted = measure(recipe, QUERY, trainings, engine="single", progress=False)
    np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=1e-5)


def test_a_task_that_keeps_something_is_each_threads_own() -> None:
    class Keeping(whence.Classification):
        def outputs(self, model: nn.Module, batch: Any) -> Tensor:
            actual = super().outputs(model, batch)
            self.kept = actual.square().mean(1)
            return actual

        def losses(self, outputs: Tensor, batch: Any) -> Tensor:
            return super().losses(outputs, batch) + 0.1 * self.kept

    recipe = recipes.recipe(task=Keeping())
    same = recipe.fingerprint
    trainings = [Training(seed, range(24)) for seed in range(16)]
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        actual = measure(recipe, QUERY, trainings, progress=False)
    finally:
        torch.set_num_threads(threads)
    assert recipe.fingerprint == same
    wanted = [plainly_measured(recipe, t, QUERY) for t in trainings]
    np.testing.assert_allclose(actual, wanted, rtol=1e-9)


def test_an_error_ends_the_wait_for_another_process(tmp_path: Path) -> None:
    theirs, ours = [Training(0)], [Training(1)]
    grid, go = Grid(tmp_path, {}, 5), threading.Event()

    class Pool:
        device, engine = torch.device("cpu"), "products"

        def data(self) -> None: ...

        def make(self, todo: Any, *_: Any) -> Any:
            assert [t.seed for t in todo] == [1], "another process is at it"
            go.wait(30)
            raise ValueError("broken")

    errors = []

    def make_all() -> None:
        try:
            work(cast(TrainingPool, Pool()), [theirs, ours], grid, type("Bar", (), {"n": 0})())
        except ValueError as error:
            errors.append(str(error))

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with grid.claim([t.key for t in theirs]) as mine:
            assert mine
            waiting = threading.Thread(target=make_all, daemon=True)
            waiting.start()
            time.sleep(0.3)
            assert waiting.is_alive()
            go.set()
            waiting.join(30)
            assert not waiting.is_alive() and errors == ["broken"]
    finally:
        torch.set_num_threads(threads)


# --- models ------------------------------------------------------------------------------------


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(11, 8, padding_idx=0), nn.Linear(8, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.words(ids).mean(1))


@pytest.mark.parametrize("engine", ["products", "vmap"])
def test_padding_has_no_gradient_in_any_model(engine: str) -> None:
    """torch.vmap spares the first model's alone. Engines are compared where there is no padding."""
    data = tokens(60)
    data.tensors[0][[1, 2, 3, 5, 6, 7, 8, 19, 20, 21], 3:] = 0
    recipe = recipes.recipe(model=lambda: Padded().double(), train=data)
    trainings = [Training(seed) for seed in range(3)]
    actual = measure(recipe, tokens(4, 1), trainings, engine=engine, progress=False)
    wanted = [plainly_measured(recipe, t, tokens(4, 1)) for t in trainings]
    np.testing.assert_allclose(actual, wanted, rtol=1e-9)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(INPUTS, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x + 1e-3 * torch.randn_like(x) if self.training else x)


class BehindZeros(nn.Module):
    """Looks at the whole batch in a branch that neither counts nor learns at first."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(INPUTS, INPUTS), nn.Linear(INPUTS, INPUTS)
        self.head = nn.Linear(INPUTS, CLASSES)
        for parameter in (*self.b.parameters(), *self.head.parameters()):
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.b(torch.tanh(self.a(x - x.mean(0)))))


class Attention(nn.Module):
    """The gradient of the keys' bias is zero, but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 16)
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.words(ids)
        weights = (self.q(h) @ self.k(h).mT / 4).softmax(-1)
        return self.head((weights @ self.v(h)).mean(1))


class Penalised(whence.Classification):
    """A little weight decay of one's own: a sum over all models' weights, if they are stacked."""

    def outputs(self, model: nn.Module, batch: Any) -> Tensor:
        self.penalty = 1e-4 * sum(p.square().sum() for p in model.parameters())
        return super().outputs(model, batch)

    def losses(self, outputs: Tensor, batch: Any) -> Tensor:
        return super().losses(outputs, batch) + self.penalty


def test_small_noise_is_noise() -> None:
    assert_right(recipes.recipe(model=lambda: Noisy().double()), engine="single")


def test_what_mixes_models_a_little_is_found_out() -> None:
    assert_right(recipes.recipe(task=Penalised()), engine="vmap")
    assert_right(recipes.recipe(model=lambda: BehindZeros().double()), engine="vmap")


def test_attention_in_float32_is_stacked() -> None:
    recipe = recipes.recipe(model=Attention, train=tokens(40))
    assert_right(recipe, tokens(4, 1), engine="products", rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_trained(dtype: torch.dtype) -> None:
    """torch's fused update leaves such weights as they are, on a CPU."""
    recipe = recipes.recipe(model=lambda: recipes.mlp().to(dtype), epochs=8)
    assert_right(recipe, engine="products", rtol=0.1)


def descent(parameters: Any) -> torch.optim.Optimizer:
    return SGD(parameters, lr=0.05)


def test_a_model_that_works_on_its_input_in_place() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(INPUTS, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x.mul_(2.0))

    before = [t.clone() for t in (*recipes.dataset().tensors, *QUERY.tensors)]
    data = recipes.dataset()
    assert_right(recipes.recipe(model=lambda: InPlace().double(), train=data), engine="products")
    assert all(map(torch.equal, before, (*data.tensors, *QUERY.tensors)))


def test_a_forced_engine_must_do() -> None:
    with pytest.raises(ValueError, match=r"engine='products' cannot train this recipe: .*mixes"):
        measure(recipes.recipe(model=recipes.dropout), QUERY, [Training(0)], engine="products")


def test_numbers_that_are_none_hide_nothing() -> None:
    x, y = recipes.dataset().tensors
    x = x.clone()
    x[[0, 20], 3] = torch.nan
    recipe = recipes.recipe(train=TensorDataset(x, y))
    trainings = [Training(0, range(1, 15)), Training(0, range(10, 30)), Training(1, range(30, 48))]
    with pytest.warns(UserWarning, match="1 of 3 trainings diverged"):
        actual = measure(recipe, QUERY, trainings, progress=False)
    assert TrainingPool.open(recipe, Batches("query", QUERY), None).engine == "products"
    assert np.isnan(actual).all(1).tolist() == [False, True, False]
    np.testing.assert_allclose(actual[2], plainly_measured(recipe, trainings[2], QUERY), rtol=1e-9)


# --- optimizers --------------------------------------------------------------------------------


def clamped(parameters: Any) -> torch.optim.Optimizer:
    optimizer = SGD(parameters, lr=0.5)

    def clamp(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.data.clamp_(-0.1, 0.1)

    optimizer.register_step_post_hook(clamp)
    return optimizer


def freezing(parameters: Any) -> torch.optim.Optimizer:
    every = list(parameters)
    for p in every[:2]:
        p.requires_grad_(False)
    return SGD([p for p in every if p.requires_grad], lr=0.5)


class OfDecay:
    def __init__(self, optimizer: Any, total: int) -> None:
        self.groups, self.step_count = optimizer.param_groups, 0

    def step(self) -> None:
        self.step_count += 1
        for group in self.groups:
            group["weight_decay"] = 0.02 * self.step_count


def in_a_tensor(parameters: Any) -> torch.optim.Optimizer:
    return SGD(parameters, lr=torch.tensor(0.05, dtype=torch.float64))


def primed(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.05, initial_accumulator_value=0.5)


@pytest.mark.parametrize(
    ("settings", "engine"),
    [
        ({"optimizer": primed}, "products"),
        ({"optimizer": clamped}, "single"),
        ({"optimizer": freezing, "clip_norm": 0.1}, "products"),
        ({"optimizer": lambda p: SGD(list(p)[2:], lr=0.5), "clip_norm": 0.1}, "products"),
        ({"optimizer": in_a_tensor, "scheduler": recipes.cosine}, "products"),
        ({"scheduler": OfDecay}, "products"),
    ],
    ids=["primed", "hooked", "freezing", "partial", "tensor", "decay"],
)
def test_optimizers(settings: dict[str, Any], engine: str) -> None:
    recipe = recipes.recipe(**settings)
    assert_right(recipe, engine=engine)
    training = Training(2, range(20))
    alone = measure(recipe, QUERY, [training], engine="single", progress=False)[0]
    np.testing.assert_allclose(alone, plainly_measured(recipe, training, QUERY), rtol=1e-9)


def test_optimizers_that_are_refused() -> None:
    with pytest.raises(ValueError, match="LBFGS computes the loss several times"):
        recipes.recipe(optimizer=torch.optim.LBFGS).run(0)
    temperature = nn.Parameter(torch.ones(()))
    with pytest.raises(ValueError, match="none of the model's parameters"):
        recipes.recipe(optimizer=lambda p: SGD([*p, temperature], lr=0.1)).run(0)


# --- data --------------------------------------------------------------------------------------


def pad(rows: list[Any]) -> Any:
    ids = nn.utils.rnn.pad_sequence([ids for ids, _ in rows], batch_first=True)
    return ids, torch.tensor([label for _, label in rows])


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(11, 8), nn.Linear(8, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.words(ids).mean(1))


def test_a_few_short_texts_among_long_ones() -> None:
    """Nor does a query set of one length hide that the training data has none."""
    rows: list[Any] = [(ids, int(label)) for ids, label in tokens(100)]
    rows[31] = (torch.tensor([1, 2]), 0)
    recipe = recipes.recipe(
        model=lambda: Words().double(), train=rows, collate=pad, batch_size=1, epochs=1
    )
    assert_right(recipe, rows[:3], engine="single")


def test_batches_that_hold_more_than_examples() -> None:
    def collate(rows: list[Any]) -> Any:
        ids, labels = default_collate(rows)
        return {"ids": ids, "scale": torch.tensor(1.0), "labels": labels}

    class Scaled(Words):
        def forward(self, ids: Tensor, scale: Tensor) -> Tensor:
            return super().forward(ids) * scale

    recipe = recipes.recipe(
        model=lambda: Scaled().double(), train=list(tokens(40)), collate=collate
    )
    assert_right(recipe, list(tokens(4, 1)), engine="single")


def test_mappings_of_any_kind_are_stacked() -> None:
    """As transformers' collators give them."""

    def collate(rows: list[Any]) -> Any:
        ids, labels = default_collate(rows)
        return UserDict(ids=ids, labels=labels)

    recipe = recipes.recipe(model=lambda: Words().double(), train=list(tokens(40)), collate=collate)
    assert_right(recipe, list(tokens(4, 1)), engine="products")


def test_transforms_draw_by_what_they_are_given() -> None:
    numpy = np.random.default_rng(0)
    own: list[Any] = [
        lambda batch, uniform: (batch[0] + 1e-3 * torch.rand_like(batch[0]), batch[1]),
        lambda batch, uniform: (batch[0] + numpy.normal(), batch[1]),
    ]
    for transform in own:
        with pytest.raises(ValueError, match=r"Draw them with the uniform\(k\)"):
            measure(recipes.recipe(transform=transform), QUERY, [Training(0)], progress=False)


def test_a_transform_may_answer_in_float64() -> None:
    recipe = recipes.recipe(
        model=lambda: recipes.mlp().float(),
        transform=lambda batch, uniform: (batch[0] + uniform(INPUTS), batch[1]),
    )
    assert_right(recipe, engine="products", rtol=1e-4)


def test_queries_are_looked_at_before_anything_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("trained")

    monkeypatch.setattr(TrainingPool, "make", never)
    with pytest.raises(TypeError, match="cannot find labels"):
        measure(recipes.recipe(), TensorDataset(QUERY.tensors[0]), [Training(0)], progress=False)

    class Column(whence.Classification):
        def measurements(self, outputs: Tensor, batch: Any) -> Tensor:
            return super().measurements(outputs, batch)[:, None]

    with pytest.raises(ValueError, match=r"measurements of shape \(5, 1\) for 5 examples of query"):
        measure(recipes.recipe(task=Column()), QUERY, [Training(0)], progress=False)


def test_numbers_of_numpy(tmp_path: Path) -> None:
    truth = ground_truth(
        recipes.recipe(),
        QUERY,
        np.float32(0.5),
        np.int64(3),
        np.int64(2),  # type: ignore[arg-type]
        out=tmp_path,
        progress=False,
    )
    assert truth.measurements.shape == (3, 2, 5)
    assert measure(recipes.recipe(), QUERY, [], progress=False).shape == (0, 5)


def test_the_memory_of_activations_counts() -> None:
    def convolution() -> nn.Module:
        return nn.Sequential(
            nn.Unflatten(1, (2, 2, 2)),
            nn.Upsample(scale_factor=16),
            nn.Conv2d(2, 8, 3),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, CLASSES),
        ).double()

    pool = TrainingPool.open(recipes.recipe(model=convolution), Batches("query", QUERY), None)
    assert pool.engine == "products"
    each = 7 * 8 * 30 * 30 * 8  # bytes of one activation of a batch
    threads = torch.get_num_threads()
    assert pool.at_once(Training(0), None, 256) > 10
    assert pool.at_once(Training(0), 10 * each * threads, 256) < 10
    assert pool.at_once(Training(0), "1MB", 256) == 1
    for memory in (1, "much"):
        with pytest.raises(ValueError, match="use bytes, or a text like '8GB'"):
            pool.at_once(Training(0), memory, 256)


def test_a_long_training_of_few_updates_is_kept_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipes.recipe(model=recipes.dropout, epochs=1)
    trainings = [Training(0), Training(1)]
    wanted = measure(recipe, QUERY, trainings, engine="single", progress=False)
    monkeypatch.setattr(sys.modules["whence.retrain.pool"], "CHECKPOINT_SECONDS", -1.0)
    stored = measure(recipe, QUERY, trainings, engine="single", out=tmp_path, progress=False)
    assert np.array_equal(stored, wanted)


# --- recipes -----------------------------------------------------------------------------------


def test_factories_that_share_weights_are_refused() -> None:
    backbone, vectors = nn.Linear(INPUTS, 4).double(), torch.randn(11, 8)
    norm = nn.BatchNorm1d(INPUTS).double().requires_grad_(False)
    head = lambda i: nn.Linear(i, CLASSES).double()  # noqa: E731
    for model, name in (
        (lambda: nn.Sequential(backbone, nn.Tanh(), head(4)), "0.weight"),
        (lambda: nn.Embedding.from_pretrained(vectors, freeze=False), "weight"),
        (lambda: nn.Sequential(norm, head(INPUTS)), "0.running_mean"),
    ):
        with pytest.raises(ValueError, match=f"gives {name} the same memory every time"):
            recipes.recipe(model=model).run(0)
    frozen = nn.Linear(INPUTS, 4).double().requires_grad_(False)
    assert_right(recipes.recipe(model=lambda: nn.Sequential(frozen, nn.Tanh(), head(4))))


class Bent(nn.Module):
    """Looks the same, whatever its activation is."""

    def __init__(self, bend: Any) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(INPUTS, 6), nn.Linear(6, CLASSES)
        self.bend = bend

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.bend(self.fc(x)))


def test_the_fingerprint_knows_code_by_what_it_does(tmp_path: Path) -> None:
    def bent(bend: Any, **changes: Any) -> whence.Recipe:
        return recipes.recipe(model=lambda: Bent(bend).double(), **changes)

    class Doubled(whence.Classification):
        def losses(self, outputs: Tensor, batch: Any) -> Tensor:
            return 2 * super().losses(outputs, batch)

    class Measured(whence.Classification):
        def measurements(self, outputs: Tensor, batch: Any) -> Tensor:
            return outputs[:, 0]

    class Holding(whence.Classification):
        def __init__(self) -> None:
            super().__init__()
            self.function = lambda x: x

    same = bent(F.relu).fingerprint
    assert bent(lambda x: F.relu(x)).fingerprint == same
    others = [bent(F.gelu), bent(F.relu, task=Doubled()), bent(F.relu, scheduler=OfDecay)]
    assert len({same, *(r.fingerprint for r in others)}) == 4
    fingerprints = [recipes.recipe(task=Holding()).fingerprint for _ in range(2)]
    assert fingerprints[0] == fingerprints[1]  # whose function lies elsewhere each time
    sizes = {"alpha": 0.5, "subsets": 2, "seeds": 1, "out": tmp_path, "progress": False}
    ground_truth(bent(F.relu), QUERY, **sizes)
    with pytest.raises(ValueError, match=r"differ in: .*recipe\.losses\.train"):
        ground_truth(bent(F.gelu), QUERY, **sizes)
    type(Measured()).__name__ = "Classification"
    with pytest.raises(ValueError, match=r"differ in: measurements"):
        ground_truth(bent(F.relu, task=Measured()), QUERY, **sizes)


# --- CUDA graphs -------------------------------------------------------------------------------

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


class Looking(nn.Module):
    """Looks at its own numbers, which no CUDA graph can."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(INPUTS, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x / 2 if x.abs().max().item() > 1e9 else x)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.calls = nn.Linear(INPUTS, CLASSES), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return self.fc(x) * (1 + self.calls / 10)


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize(
    "settings",
    [
        {"model": Looking},
        {"model": Counting},
        {"scheduler": OfDecay},
        {"scheduler": recipes.cosine, "optimizer": lambda p: SGD(p, lr=torch.tensor(0.05))},
        {"optimizer": primed},
        {"optimizer": freezing, "clip_norm": 0.1},
        {"transform": lambda b, u: (b[0] + u(INPUTS), b[1])},
        {"model": lambda: Bent(F.relu).bfloat16(), "optimizer": descent},
    ],
    ids=["looking", "counting", "decay", "tensor", "primed", "freezing", "wide", "bfloat16"],
)
def test_updates_that_are_replayed(settings: dict[str, Any]) -> None:
    recipe = recipes.recipe(**({"model": lambda: recipes.mlp().float(), "epochs": 6} | settings))
    trainings = [Training(s, range(s, 30 + s)) for s in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        actual = measure(recipe, QUERY, trainings, device="cuda", progress=False)
        again = measure(recipe, QUERY, trainings, device="cuda", progress=False)
        wanted = measure(recipe, QUERY, trainings, device="cuda", engine="single", progress=False)
    assert np.array_equal(actual, again)
    half = next(recipe.build(0).parameters()).dtype == torch.bfloat16
    np.testing.assert_allclose(
        actual, wanted, rtol=0.1 if half else 1e-4, atol=0.1 if half else 1e-4
    )
