"""Models with batch normalisation, Hugging Face's Conv1D or autocast, trained many at once."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import partial
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
from whence.retrain import Training, measure, stacked
from whence.retrain.engine_choice import choose_engine
from whence.retrain.pool import TrainingPool
from whence.retrain.stack import Data, Stack, train_stack

CPU = torch.device("cpu")
INPUTS, CLASSES = recipes.INPUTS, recipes.CLASSES
QUERY = recipes.dataset(5, seed=9)
TRAININGS = [Training(s, np.arange(s, s + 31)) for s in (0, 3, 7)]  # last batches of three


class Residual(nn.Module):
    """Batch norms of images, sequences and vectors; one is used twice. No bias lies before one: its
    gradient would be rounding, which Adam makes large."""

    def __init__(self, **norm: Any) -> None:
        super().__init__()
        norm2d, norm1d = partial(nn.BatchNorm2d, **norm), partial(nn.BatchNorm1d, **norm)
        image = nn.Linear(INPUTS, 48), nn.Unflatten(1, (3, 4, 4))
        self.image = nn.Sequential(*image, nn.Conv2d(3, 3, 3, padding=1, padding_mode="circular"))
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, 1, 1, bias=False), norm2d(4), nn.ReLU(True))
        between = nn.Conv2d(4, 4, 3, padding=1, groups=2, bias=False)
        self.twice = nn.Sequential(norm2d(4), nn.ReLU(), between)
        self.sequence, self.vector = norm1d(4), norm1d(4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(self.image(x))
        h = h + self.twice(h)
        h = h + self.twice(h)
        h = self.sequence(h.flatten(2)).tanh().amax(2)
        logits: Tensor = self.head(self.vector(h))
        return logits


def residual(**norm: Any) -> Callable[[], nn.Module]:
    return lambda: Residual(**norm).double()


NORMS: dict[str, dict[str, Any]] = {
    "default": {},
    "momentum": {"momentum": 0.4, "eps": 1e-3},
    "cumulative": {"momentum": None},
    "not affine": {"affine": False},
    "untracked": {"track_running_stats": False},
    "bare": {"affine": False, "track_running_stats": False},
}


def assert_same_models(
    recipe: whence.Recipe, trainings: list[Training], engine: str = "products"
) -> None:
    """Parameters, buffers and measurements, of both kinds of calls."""
    data = {s.name: Data(s.data, CPU, torch.float64) for s in recipe.stages}
    stack = train_stack(recipe, trainings, engine, CPU, data)
    query = Data(Batches("query", QUERY), CPU, torch.float64)
    measured = stack.measurements(recipe.task, query, len(QUERY), 3)
    for k, training in enumerate(trainings):
        alone, together = plainly_trained(recipe, training), stack.state(k)
        assert together.keys() == {n for n, _ in alone.named_parameters()} | {
            n for n, _ in alone.named_buffers()
        }
        for name, wanted in {**alone.state_dict()}.items():
            assert together[name].dtype == wanted.dtype
            torch.testing.assert_close(together[name], wanted, rtol=1e-10, atol=1e-11)
        alone.eval()
        for rows in (slice(0, 3), slice(3, 5)):  # without running statistics a batch counts
            batch = tuple(t[rows] for t in QUERY.tensors)
            wanted = recipe.task.measurements(alone(batch[0]), batch).detach()
            np.testing.assert_allclose(measured[k, rows], wanted, rtol=1e-9, atol=1e-10)


@pytest.fixture(params=["together", "apart"])
def sized(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether a layer takes all models in one call, or one after another."""
    size = 0 if request.param == "apart" else 2**60
    monkeypatch.setattr(stacked, "PRODUCTS_APART", {"cpu": size})
    monkeypatch.setattr(stacked, "NUMBERS_APART", {"cpu": size})
    return str(request.param)


# --- equal to plain training -------------------------------------------------------------------


@pytest.mark.usefixtures("sized")
@pytest.mark.parametrize("norm", NORMS)
def test_every_batch_norm(norm: str) -> None:
    recipe = recipes.recipe(model=residual(**NORMS[norm]))
    assert choose_engine(recipe, Batches("query", QUERY), CPU) == ("products", None)
    assert_same_models(recipe, TRAININGS)
    assert_same_models(recipe, TRAININGS[1:2])


def test_a_norm_that_needs_two_examples_is_measured_together() -> None:
    recipe = recipes.recipe(model=residual(**NORMS["bare"]))
    measure(recipe, QUERY, TRAININGS, device="cpu", engine="products", progress=False)


@pytest.mark.parametrize(
    "settings",
    [
        {"scheduler": recipes.cosine, "transform": recipes.jitter},
        {"scheduler": recipes.one_cycle, "clip_norm": 0.3},
        {"optimizer": recipes.OPTIMIZERS["adamw"]},
        {"optimizer": recipes.by_shape, "model": recipes.batch_norm},
    ],
    ids=["cosine", "one cycle", "adamw", "groups"],
)
def test_every_setting(settings: dict[str, Any]) -> None:
    assert_same_models(recipes.recipe(**({"model": residual()} | settings)), TRAININGS)


@pytest.mark.parametrize("stage", ["pretrain", "finetune"])
def test_stages_continue_with_the_statistics(stage: str) -> None:
    recipe = recipes.two_stages(model=residual(momentum=None))
    trainings = [Training(s, np.arange(s, s + 17), stage) for s in range(3)]
    assert_same_models(recipe, trainings)


class Started(nn.Module):
    """Statistics that depend on the seed, and a parameter that no layer of torch holds."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(INPUTS, 6), nn.BatchNorm1d(6)
        self.norm.running_mean.normal_()  # type: ignore[union-attr]
        self.head = nn.Linear(6, CLASSES)
        self.scale = nn.Parameter(torch.randn(CLASSES)) if own else 1.0

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.fc(x)).relu())
        return logits * self.scale


@pytest.mark.parametrize("engine", ["products", "vmap"])
def test_statistics_may_begin_anywhere(engine: str) -> None:
    recipe = recipes.recipe(model=lambda: Started(engine == "vmap").double())
    assert choose_engine(recipe, Batches("query", QUERY), CPU)[0] == engine
    assert_same_models(recipe, TRAININGS, engine)


def test_a_frozen_batch_norm_stays_as_it_is() -> None:
    class Frozen(Residual):
        def train(self, mode: bool = True) -> Any:
            super().train(mode)
            self.stem.eval()
            return self

    def make() -> nn.Module:
        model = Frozen().double()
        model.stem.requires_grad_(False)
        return model

    assert_same_models(recipes.recipe(model=make), TRAININGS)


def test_what_measure_gives() -> None:
    recipe = recipes.recipe(model=residual())
    trainings = [*TRAININGS, Training(1), Training(2, range(5, 21))]
    actual = measure(recipe, QUERY, trainings, progress=False)
    alone = measure(recipe, QUERY, trainings, engine="single", progress=False)
    np.testing.assert_allclose(actual, alone, rtol=1e-9)
    apart = [measure(recipe, QUERY, [t], progress=False)[0] for t in trainings]
    np.testing.assert_allclose(actual, apart, rtol=1e-9)


def test_statistics_change_where_they_lie() -> None:
    """A CUDA graph writes to no other place."""
    recipe, makes = recipes.recipe(model=residual(momentum=None), epochs=1), []
    real = Stack.of.__func__  # type: ignore[attr-defined]

    def of(cls: Any, *given: Any) -> Stack:
        stack: Stack = real(cls, *given)
        makes.append({name: s.data_ptr() for name, s in stack.template.named_buffers()})
        return stack

    data = {s.name: Data(s.data, CPU, torch.float64) for s in recipe.stages}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stack, "of", classmethod(of))
        stack = train_stack(recipe, TRAININGS, "products", CPU, data, updates=4)
    for buffers in (dict(stack.template.named_buffers()), stack.statistics):
        assert {name: s.data_ptr() for name, s in buffers.items()} == makes[0]
    assert stack.statistics["sequence.num_batches_tracked"].tolist() == [4, 4, 4]
    assert stack.statistics["twice.0.num_batches_tracked"].tolist() == [8, 8, 8]


# --- what is refused ---------------------------------------------------------------------------


@pytest.mark.usefixtures("sized")
@pytest.mark.parametrize("engine", ["products", "single"])
def test_a_last_batch_of_one_example_fails_as_in_torch(engine: str) -> None:
    recipe = recipes.recipe(model=recipes.batch_norm)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        measure(recipe, QUERY, [Training(0, range(15))], engine=engine, progress=False)


class Following(nn.Module):
    """A buffer of its own that follows the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(INPUTS))
        self.fc = recipes.batch_norm()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.lerp_(x.mean(0), 0.1)
        logits: Tensor = self.fc(x)
        return logits


class Whitened(nn.BatchNorm1d):
    """Not what its base does."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_other_buffers_are_still_refused() -> None:
    recipe = recipes.recipe(model=lambda: Following().double())
    engine, why = choose_engine(recipe, Batches("query", QUERY), CPU)
    assert engine is None and why is not None
    assert "products: the model changes its buffers during training" in why


def test_a_batch_norm_of_ones_own_is_not_stacked() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(INPUTS, 6), Whitened(6), nn.Linear(6, CLASSES)).double()

    recipe = recipes.recipe(model=make)
    engine, why = choose_engine(recipe, Batches("query", QUERY), CPU)
    assert (engine, why) == ("vmap", "1 (Whitened) has no stacked form")
    assert_same_models(recipe, TRAININGS, "vmap")


def test_statistics_that_come_out_differently_are_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = stacked._StackedBatchNorm._normalise

    def off(self: Any, x: Tensor, mean: Any, variance: Any, momentum: float) -> Tensor:
        return real(self, x, mean, variance, 1.01 * momentum)

    monkeypatch.setattr(stacked._StackedBatchNorm, "_normalise", off)
    recipe = recipes.recipe(model=recipes.batch_norm)
    engine, why = choose_engine(recipe, Batches("query", QUERY), CPU, ["products"])
    assert engine is None
    assert why == "products: 1.running_mean is different when several models train together"


def test_dropout_is_still_trained_alone() -> None:
    with pytest.warns(UserWarning, match=r"one at a time: 1 \(Dropout\) mixes examples or draws"):
        measure(recipes.recipe(model=recipes.dropout), QUERY, [Training(0)], progress=False)


# --- how many at once --------------------------------------------------------------------------


def test_a_model_that_fills_the_machine_is_trained_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.modules["whence.retrain.capacity"], "SATURATING_BYTES", {"cpu": 2**14})
    for model, alone in ((residual(), True), (recipes.mlp, False)):
        pool = TrainingPool.open(recipes.recipe(model=model), Batches("query", QUERY), CPU)
        assert pool.engine == "products"
        assert (pool.at_once(Training(0), None, 256) == 1) == alone


# --- autocast ----------------------------------------------------------------------------------


class Cast(nn.Module):
    """In training, convolutions and products are made in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.kinds = Residual(), set[torch.dtype]()

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            plain: Tensor = self.inner(x)
            return plain
        with torch.autocast("cpu", torch.bfloat16):
            fast: Tensor = self.inner(x)
        self.kinds.add(fast.dtype)
        return fast.to(x.dtype)


@pytest.mark.usefixtures("sized")
def test_autocast_in_the_models_forward() -> None:
    recipe = recipes.recipe(model=Cast, optimizer=partial(torch.optim.SGD, lr=1.0))
    assert choose_engine(recipe, Batches("query", QUERY), CPU) == ("products", None)
    data = {s.name: Data(s.data, CPU, torch.float32) for s in recipe.stages}
    stack = train_stack(recipe, TRAININGS, "products", CPU, data, updates=1)
    assert stack.template.kinds == {torch.bfloat16}
    (stage,) = recipe.stages
    for k, training in enumerate(TRAININGS):
        model, together = recipe.build(training.seed), stack.state(k)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer, subset = stage.make_optimizer(model), np.asarray(training.subset)
        updates = stage.updates(model, optimizer, training.seed, subset)
        next(updates), next(updates)  # the second is not made, but moves the statistics
        moved = [(together[n] - p, model.get_parameter(n) - p) for n, p in before.items()]
        ours, wanted = (torch.cat([m[i].flatten() for m in moved]) for i in (0, 1))
        assert (ours - wanted).norm() < 0.02 * wanted.norm()
        assert all(together[n].dtype == t.dtype for n, t in model.state_dict().items())


def test_autocast_gives_weights_their_own_gradients() -> None:
    """As of torch's own Linear: cast in the graph, bfloat16 in the product, float32 at the end."""
    torch.manual_seed(0)
    plain, x = nn.Linear(5, 4), torch.randn(6, 5, requires_grad=True)
    layer = stacked.stack_modules(
        plain, {n: nn.Parameter(p.unsqueeze(0)) for n, p in plain.named_parameters()}, {}, 1
    )
    actual = []
    for module in (layer, plain):
        with torch.autocast("cpu", torch.bfloat16):
            y = module(x)
        assert y.dtype == torch.bfloat16
        y.float().square().sum().backward()
        actual.append(
            [
                x.grad,
                *(
                    p.grad.reshape(q.shape)
                    for p, q in zip(module.parameters(), plain.parameters(), strict=True)
                ),
            ]
        )
        x.grad = None
    for ours, wanted in zip(*actual, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, wanted, rtol=0.02, atol=0.02)


# --- Hugging Face's Conv1D ---------------------------------------------------------------------


class Positioned(nn.Module):
    """GPT-2, with a row of positions for every example."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=13, n_positions=6, n_embd=8, n_layer=2, n_head=2, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="eager",
        )  # fmt: skip
        self.model = GPT2LMHeadModel(config)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        later = torch.full((ids.shape[1],) * 2, -1e9, dtype=torch.float64).triu(1)
        logits: Tensor = self.model(
            ids, attention_mask=later[None, None], position_ids=positions, use_cache=False
        ).logits
        return logits


def test_gpt2_is_stacked_as_it_is() -> None:
    pytest.importorskip("transformers")
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 13, (20, 6), generator=random)
    recipe = recipes.recipe(
        model=lambda: Positioned().double(),
        task=whence.LanguageModeling(),
        train=TensorDataset(ids[:16]),
        optimizer=recipes.OPTIMIZERS["adamw"],
        batch_size=4,
        epochs=3,
    )
    query, trainings = TensorDataset(ids[16:]), [Training(s, range(s, s + 10)) for s in range(3)]
    assert choose_engine(recipe, Batches("query", query), CPU) == ("products", None)
    actual = measure(recipe, query, trainings, engine="products", progress=False)
    wanted = measure(recipe, query, trainings, engine="single", progress=False)
    np.testing.assert_allclose(actual, wanted, rtol=1e-9)


# --- data that lies on the device --------------------------------------------------------------


def rows_of(dataset: TensorDataset) -> list[Any]:
    return [(x.float().numpy(), int(y)) for x, y in dataset]


@pytest.mark.parametrize("kind", [lambda data: data, rows_of], ids=["tensors", "rows"])
def test_one_at_a_time_from_data_on_the_device(kind: Any) -> None:
    """The same bits; float64 data for a float32 model, and a fingerprint that does not know."""
    recipe = recipes.recipe(
        model=lambda: recipes.dropout().float(),
        train=kind(recipes.dataset()),
        transform=recipes.jitter,
        epochs=2,
    )
    pool = TrainingPool.open(recipe, Batches("query", QUERY), CPU, "single")
    near = recipes.recipe(model=recipe.model)
    near.stages = tuple(pool._stage_on_device(stage) for stage in recipe.stages)
    assert all(stage.on_device is not None for stage in near.stages)
    assert near.fingerprint == recipe.fingerprint
    wanted, actual = (r.train(3, range(5, 40), device=CPU).state_dict() for r in (recipe, near))
    assert all(torch.equal(actual[name], wanted[name]) for name in wanted)


def test_data_that_does_not_fit_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def pad(rows: list[Any]) -> Any:
        x = nn.utils.rnn.pad_sequence([x for x, _ in rows], batch_first=True)
        return x, torch.tensor([y for _, y in rows])

    ragged = [(torch.ones(1 + k % 3, dtype=torch.long), 0) for k in range(20)]
    recipe = recipes.recipe(
        model=lambda: nn.EmbeddingBag(3, CLASSES), train=ragged, collate=pad, epochs=1
    )
    pool = TrainingPool.open(recipe, Batches("query", ragged[:3], pad), CPU, "single")
    assert pool._stage_on_device(recipe.stages[0]) is recipe.stages[0]
    whole = recipes.recipe()
    pool = TrainingPool.open(whole, Batches("query", QUERY), CPU, "single")
    assert pool.recipe_on_device is whole  # on a CPU it lies there already
    monkeypatch.setattr(sys.modules["whence.retrain.pool"], "DATA_MEMORY_SHARE", 0.0)
    assert pool._stage_on_device(whole.stages[0]) is whole.stages[0]


def test_a_recorded_run_that_was_killed_before_its_first_checkpoint_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = TensorDataset(torch.randn(40, 4), torch.randint(0, 2, (40,)))

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))

    recipe = whence.Recipe(
        make, whence.Classification(), data, lambda p: torch.optim.SGD(p, lr=0.1), 8, 4
    )
    whole = recipe.run(0, tmp_path / "whole", device="cpu")
    plain, seen = whence.Recorder.step, []

    def dies(self: whence.Recorder, indices: Any) -> None:
        plain(self, indices)
        seen.append(indices)
        if len(seen) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(whence.Recorder, "step", dies)
    with pytest.raises(KeyboardInterrupt):
        recipe.run(0, tmp_path / "killed", device="cpu")
    monkeypatch.setattr(whence.Recorder, "step", plain)
    again = recipe.run(0, tmp_path / "killed", device="cpu")
    assert [c.sha256 for c in again.checkpoints] == [c.sha256 for c in whole.checkpoints]


def test_checkpoints_given_over_two_stages_are_no_surprise(tmp_path: Path) -> None:
    data = TensorDataset(torch.randn(16, 4), torch.randint(0, 2, (16,)))
    recipe = whence.Recipe(
        lambda: nn.Linear(4, 2),
        whence.Classification(),
        {"a": data, "b": data},
        lambda p: torch.optim.SGD(p, lr=0.1),
        8,
        2,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = recipe.run(0, tmp_path, [2, 4, 8], device="cpu")
    assert [c.step for c in run.checkpoints] == [2, 4, 8]
