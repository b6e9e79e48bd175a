"""Unrolled: against autograd through the whole training, and against training again."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support import dense_unrolled as dense
from support import models
from support.comparing import close
from support.interrupting import interrupt
from torch import nn
from torch.utils.checkpoint import checkpoint as recomputed
from torch.utils.data import Subset, TensorDataset

import whence
from whence.methods.unrolled import Unrolled
from whence.replay import sweep as unrolling
from whence.replay.growth import note_growth
from whence.replay.objective import Objective
from whence.replay.training import Replay
from whence.replay.updates import WEIGHT, Rule
from whence.retrain.recipe import Recipe
from whence.run import RunError

DOUBLE: dict[str, Any] = {"dtype": torch.float64, "progress": False}
TASK = whence.Classification()
SGD, Adam, AdamW, RMSprop = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.RMSprop,
)
OPTIMIZERS: dict[str, dense.Optimizer] = {
    "sgd": lambda p: SGD(p, lr=0.2),
    "decay": lambda p: SGD(p, lr=0.2, weight_decay=0.05),
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.05),
    "nesterov": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "dampening": lambda p: SGD(p, lr=0.2, momentum=0.8, dampening=0.4),
    "adam": lambda p: Adam(p, lr=0.05, betas=(0.8, 0.95), weight_decay=0.05),
    "amsgrad": lambda p: Adam(p, lr=0.05, amsgrad=True),
    "adamw": lambda p: AdamW(p, lr=0.05, weight_decay=0.1),
    "rmsprop": lambda p: RMSprop(p, lr=0.02, alpha=0.9, weight_decay=0.05),
    "centered": lambda p: RMSprop(p, lr=0.01, alpha=0.9, centered=True, momentum=0.5),
}


def smooth() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def one_stage(optimizer: str = "momentum", count: int = 10, **more: Any) -> dict[str, Any]:
    data = models.vectors(10)
    return {
        "data": data,
        "task": TASK,
        "optimizer": OPTIMIZERS[optimizer],
        "batches": dense.batches(10, 4, count),
        **more,
    }


def studied(
    folder: Path, model: nn.Module, stages: list[dict[str, Any]], **options: Any
) -> whence.Study:
    """The stages trained in order and recorded; the model given is left as it was."""
    trained = copy.deepcopy(model)
    run = dense.record(folder / "run", trained, stages, **options)
    if len(stages) == 1:
        return whence.Study(trained, stages[0]["task"], train=stages[0]["data"], runs=run)
    by_name = {stage["name"]: stage for stage in stages}
    tasks = {name: stage["task"] for name, stage in by_name.items()}
    data = {name: stage["data"] for name, stage in by_name.items()}
    return whence.Study(trained, tasks, train=data, runs=run)


# --- updates ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_is_torchs(name: str) -> None:
    g = torch.Generator().manual_seed(0)
    start = torch.randn(7, generator=g, dtype=torch.float64)
    parameter = start.clone().requires_grad_()
    optimizer = OPTIMIZERS[name]([parameter])
    (group,) = optimizer.param_groups
    state = {WEIGHT: start}
    for count in range(1, 41):
        gradient = torch.randn(7, generator=g, dtype=torch.float64)
        gradient[0] = 0.0  # a coordinate that is never used
        group["lr"] = 0.1 / count
        parameter.grad = gradient.clone()
        optimizer.step()
        momentum = group.get("momentum", group.get("betas", (0.0,))[0])
        kind = whence.run.optimizers.kind(optimizer)
        state = Rule(kind, group["lr"], momentum, group, count)(state, gradient)
    torch.testing.assert_close(state[WEIGHT], parameter.detach(), rtol=1e-12, atol=1e-12)
    kept = {k: v for k, v in optimizer.state[parameter].items() if k != "step" and v is not None}
    assert kept.keys() == state.keys() - {WEIGHT}
    for key, value in kept.items():
        torch.testing.assert_close(state[key], value, rtol=1e-12, atol=1e-12)


# --- the exact derivative -----------------------------------------------------------------------


def finite_differences(model: nn.Module, stage: dict[str, Any], query: Any) -> np.ndarray:
    """In the data weights, by an ordinary loop and torch's own optimizer, (q, n)."""
    task, data, ε = stage["task"], stage["data"], 1e-5

    def measured(w: torch.Tensor) -> np.ndarray:
        copied = copy.deepcopy(model).double()
        optimizer = stage["optimizer"](copied.parameters())
        for t, indices in enumerate(stage["batches"]):
            optimizer.param_groups[0]["lr"] = stage["rates"][t]
            batch = dense.batch_of(data, indices)
            optimizer.zero_grad()
            (w[indices] * task.losses(task.outputs(copied, batch), batch)).mean().backward()
            optimizer.step()
        batch = dense.batch_of(query, range(len(query)))
        actual: np.ndarray = task.measurements(task.outputs(copied, batch), batch).detach().numpy()
        return actual

    ones = torch.ones(len(data), dtype=torch.float64)
    units = torch.eye(len(data), dtype=torch.float64)
    columns = [(measured(ones + ε * u) - measured(ones - ε * u)) / (2 * ε) for u in units]
    return np.stack(columns, 1)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_again_with_another_weight(name: str, tmp_path: Path) -> None:
    rate = OPTIMIZERS[name]([torch.zeros(1)]).defaults["lr"]
    stage = one_stage(name, rates=[rate * (1 - t / 20) for t in range(10)])
    query, study = models.vectors(3, seed=4), studied(tmp_path, smooth(), [stage])
    actual = Unrolled().attribute(study, query, **DOUBLE).values
    close(actual, finite_differences(smooth(), stage, query), 1e-7)


class Checkpointed(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *between, last = self
        part = nn.Sequential(*between)
        return last(recomputed(part, first(x), use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant: bool, tmp_path: Path) -> None:
    """It changes no number; function transforms cannot compute activations again."""
    plain = smooth()
    model = Checkpointed(*copy.deepcopy(plain))
    model.reentrant = reentrant
    stages, query, found = [one_stage("adamw")], models.vectors(3, seed=1), []
    for name, each in (("plain", plain), ("again", model)):
        study = studied(tmp_path / name, each, stages)
        found.append(Unrolled().attribute(study, query, **DOUBLE).values)
    np.testing.assert_allclose(found[1], found[0], rtol=1e-12)


def test_coordinates_without_a_gradient(tmp_path: Path) -> None:
    """Adam divides by ε alone where a token has not been seen yet."""
    torch.manual_seed(0)
    model, data = models.Transformer(vocabulary=9, tied=False).double(), models.documents(6)
    stage = {
        "data": data,
        "task": whence.LanguageModeling(),
        "optimizer": OPTIMIZERS["adamw"],
        "batches": dense.batches(6, 2, 6),
        "rates": [0.02] * 6,
    }
    query = models.documents(2, seed=4)
    actual = Unrolled().attribute(studied(tmp_path, model, [stage]), query, **DOUBLE).values
    close(actual, finite_differences(model, stage, query), 1e-6)


MODELS: dict[str, Any] = {
    "mlp": lambda: (models.mlp(), TASK, models.vectors(10), models.vectors(3, seed=4)),
    "conv": lambda: (models.ConvNet(), TASK, models.images(), models.images(2, seed=4)),
    "gpt": lambda: (
        models.Transformer(),
        whence.LanguageModeling(),
        models.documents(),
        models.documents(2, seed=4),
    ),
    "used twice": lambda: (models.UsedTwice(), TASK, models.vectors(10), models.vectors(3, seed=4)),
    "tied": lambda: (models.Tied(), TASK, models.vectors(10), models.vectors(3, seed=4)),
    "attention": lambda: (models.Attentive(), TASK, models.vectors(10), models.vectors(3, seed=4)),
    "regression": lambda: (
        models.mlp((4, 5, 1)),
        whence.Regression(measurement="output"),
        models.regression(10),
        models.regression(3, seed=4),
    ),
}


@pytest.mark.parametrize("curvature", ["hessian", "gauss-newton"])
@pytest.mark.parametrize("name", MODELS)
def test_autograd_through_the_whole_training(name: str, curvature: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, task, data, query = MODELS[name]()
    stage = {
        "data": data,
        "task": task,
        "optimizer": OPTIMIZERS["momentum"],
        "batches": dense.batches(len(data), 4, 7),
    }
    model = model.double()
    study = studied(tmp_path, model, [stage])
    actual = Unrolled(curvature).attribute(study, query, **DOUBLE).values
    close(actual, dense.effects(model, [stage], query, curvature)[0], 1e-9)


@pytest.mark.parametrize("name", ["momentum", "adamw", "centered"])
def test_gauss_newton_by_optimizer(name: str, tmp_path: Path) -> None:
    model, stage, query = smooth(), one_stage(name), models.vectors(3, seed=4)
    study = studied(tmp_path, model, [stage])
    actual = Unrolled("gauss-newton").attribute(study, query, **DOUBLE).values
    close(actual, dense.effects(model, [stage], query, "gauss-newton")[0], 1e-9)


def test_gauss_newton_is_the_hessian_of_a_linear_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, data = nn.Linear(4, 2).double(), models.regression(10, outputs=2)
    stage = one_stage() | {"data": data, "task": whence.Regression(measurement="output")}
    study = studied(tmp_path, model, [stage])
    query = models.regression(3, outputs=2, seed=4)
    exact, other = (
        Unrolled(kind).attribute(study, query, **DOUBLE).values
        for kind in ("hessian", "gauss-newton")
    )
    close(other, exact, 1e-12)


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_clipped_gradients(name: str, tmp_path: Path) -> None:
    model, stage, query = smooth(), one_stage(name), models.vectors(3, seed=4)
    with pytest.warns(UserWarning, match="clip_norm"):
        study = studied(tmp_path, model, [stage], clip_norm=0.5)
    scores = Unrolled().attribute(study, query, **DOUBLE)
    close(scores.values, dense.effects(model, [stage], query, clip_norm=0.5)[0], 1e-9)
    assert scores.diagnostics["replay"]["deviation"] < 1e-12
    free = dense.effects(model, [stage], query)[0]
    assert np.abs(scores.values - free).max() > 1e-3 * np.abs(free).max()  # it did clip


def test_batches_drawn_with_replacement(tmp_path: Path) -> None:
    g, stage, query = np.random.default_rng(0), one_stage(), models.vectors(3, seed=4)
    stage["batches"] = [g.integers(0, 10, size) for size in (4, 3, 5, 4, 6, 2, 4)]
    study = studied(tmp_path, smooth(), [stage])
    actual = Unrolled().attribute(study, query, **DOUBLE).values
    close(actual, dense.effects(smooth(), [stage], query)[0], 1e-9)


# --- stages, subsets, frozen parameters ---------------------------------------------------------


def two_stages() -> list[dict[str, Any]]:
    return [
        one_stage("momentum", 8, name="pretrain"),
        {
            "name": "finetune",
            "data": models.vectors(7, seed=9),
            "task": TASK,
            "optimizer": OPTIMIZERS["adam"],
            "batches": dense.batches(7, 3, 9),
            "rates": [0.05 - 0.004 * t for t in range(9)],
        },
    ]


def test_two_stages_with_their_own_optimizers(tmp_path: Path) -> None:
    model, stages, query = smooth(), two_stages(), models.vectors(3, seed=4)
    study = studied(tmp_path, model, stages)
    expected = dense.effects(model, stages, query)
    scores = Unrolled().attribute(study, query, **DOUBLE)
    close(scores.values, np.concatenate(expected, 1), 1e-9)
    assert list(scores.stage) == ["pretrain"] * 10 + ["finetune"] * 7
    for name, of_stage in zip(("pretrain", "finetune"), expected, strict=True):
        close(Unrolled(stage=name).attribute(study, query, **DOUBLE).values, of_stage, 1e-9)
    parts = Unrolled().attribute(study, query, by_segment=True, **DOUBLE).by_segment
    assert (parts[:3, :, 10:] == 0).all() and (parts[3:, :, :10] == 0).all()


def test_an_optimizer_used_in_two_stages_keeps_its_state(tmp_path: Path) -> None:
    """Another dataset, the same momentum buffer: as one stage on both."""
    model, data, query = smooth(), models.vectors(10), models.vectors(3, seed=4)
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    blocks = [*dense.batches(6, 3, 5), *(6 + b for b in dense.batches(4, 3, 5))]
    recorder = whence.Recorder(tmp_path, model, optimizer, checkpoints=2, total_steps=5, stage="a")
    with recorder:
        for t, indices in enumerate(blocks):
            if t == 5:
                recorder.stage("b", total_steps=5)
            batch = dense.batch_of(data, indices)
            optimizer.zero_grad()
            TASK.losses(model(batch[0]), batch).mean().backward()
            recorder.step(indices - (6 if t >= 5 else 0))
            optimizer.step()
    train = {"a": Subset(data, range(6)), "b": Subset(data, range(6, 10))}
    study = whence.Study(model, TASK, train=train, runs=tmp_path)
    actual = Unrolled().attribute(study, query, **DOUBLE)
    expected = dense.effects(smooth(), [one_stage() | {"batches": blocks}], query)[0]
    close(actual.values, expected, 1e-9)
    assert actual.diagnostics["replay"]["deviation"] < 1e-12


class Branches(nn.Module):
    """One layer is frozen and thawed by the loop; another is never used: torch leaves it alone."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.unused = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x)))


def test_frozen_thawed_and_unused_parameters(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, data, query = Branches().double(), models.vectors(10), models.vectors(3, seed=4)
    first = copy.deepcopy(model)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.05)
    blocks = dense.batches(10, 4, 9)
    with whence.Recorder(tmp_path, model, optimizer, checkpoints=[9]) as recorder:
        for t, indices in enumerate(blocks):
            model.body.requires_grad_(t >= 4)
            batch = dense.batch_of(data, indices)
            optimizer.zero_grad()
            TASK.losses(model(batch[0]), batch).mean().backward()
            recorder.step(indices)
            optimizer.step()
    scores = Unrolled().attribute(
        whence.Study(model, TASK, train=data, runs=tmp_path), query, **DOUBLE
    )
    assert scores.diagnostics["replay"]["deviation"] < 1e-12
    names = {n: p.clone() for n, p in first.named_parameters() if not n.startswith("unused")}
    w = torch.ones(10, dtype=torch.float64, requires_grad=True)
    θ = {name: p.requires_grad_() for name, p in names.items()}
    buffers: dict[str, torch.Tensor] = {}
    for t, indices in enumerate(blocks):
        batch = dense.batch_of(data, indices)
        θ = {name: p.clone() for name, p in θ.items()}  # or a slope would go through older updates
        losses = TASK.losses(torch.func.functional_call(first, θ, (batch[0],)), batch)
        objective = (w[indices] * losses).mean()
        slopes = torch.autograd.grad(objective, list(θ.values()), create_graph=True)
        for name, g in zip(list(θ), slopes, strict=True):
            if t >= 4 or name.startswith("head"):
                g = g + 0.05 * θ[name]
                buffers[name] = 0.9 * buffers[name] + g if name in buffers else g
                θ = θ | {name: θ[name] - 0.1 * buffers[name]}
    batch = dense.batch_of(query, range(3))
    f = TASK.measurements(torch.func.functional_call(first, θ, (batch[0],)), batch)
    expected = torch.stack([torch.autograd.grad(x, w, retain_graph=True)[0] for x in f])
    close(scores.values, expected.numpy(), 1e-9)


def test_a_subset_and_a_recipe(tmp_path: Path) -> None:
    data, query = models.vectors(16), models.vectors(3, seed=4)
    recipe = Recipe(
        smooth, TASK, data, optimizer=OPTIMIZERS["momentum"], batch_size=4, epochs=3, clip_norm=5.0
    )
    subset = [0, 2, 3, 5, 7, 8, 11, 12, 14]
    with pytest.warns(UserWarning, match="clip_norm"):
        run = recipe.run(seed=1, out=tmp_path / "run", checkpoints=3, subset=subset)
    study = whence.Study(smooth(), TASK, train=data, runs=run)
    scores = Unrolled().attribute(study, query, **DOUBLE)
    stage = one_stage() | {"data": data, "batches": run.batches}
    close(scores.values, dense.effects(recipe.build(1), [stage], query, clip_norm=5.0)[0], 1e-9)
    left_out = np.setdiff1d(np.arange(16), subset)
    assert (scores.values[:, left_out] == 0).all() and scores.values[:, subset].any()


def test_a_run_made_of_checkpoints(tmp_path: Path) -> None:
    """No optimizer state, and only what from_checkpoints takes: the momentum is replayed."""
    stage, query = one_stage("momentum"), models.vectors(3, seed=4)
    study = studied(tmp_path, smooth(), [stage])
    (run,) = study.runs
    incomplete = whence.Run.from_checkpoints(
        [c.weights() for c in run.checkpoints],
        [c.step for c in run.checkpoints],
        0.1,
        momentum=0.9,
        weight_decay=0.05,
        batches=run.batches,
        initial=run.initial.weights(),
    )
    again = whence.Study(smooth(), TASK, train=stage["data"], runs=incomplete)
    exact = Unrolled().attribute(study, query, **DOUBLE).values
    close(Unrolled().attribute(again, query, **DOUBLE).values, exact, 1e-9)


# --- expected -----------------------------------------------------------------------------------


@pytest.mark.parametrize("curvature", ["hessian", "gauss-newton"])
@pytest.mark.parametrize("every", [1, 4])
def test_expected_against_a_dense_recursion(every: int, curvature: str, tmp_path: Path) -> None:
    model, query, stages = smooth(), models.vectors(3, seed=4), two_stages()
    study = studied(tmp_path, model, stages)
    for stage in stages:
        length = len(stage["batches"])
        ends = np.linspace(0, length, -(-length // every) + 1).astype(int)
        stage["expected"] = list(pairwise(ends))
    method = Unrolled(curvature, expected=True, curvature_batch=100, credit_every=every)
    actual = method.attribute(study, query, **DOUBLE).values
    close(actual, np.concatenate(dense.effects(model, stages, query, curvature), 1), 1e-9)


def test_damping_against_a_dense_recursion(tmp_path: Path) -> None:
    """v ← v - η (H_t + λ) v for plain SGD."""
    query, stage, λ = models.vectors(3, seed=4), one_stage("sgd", 9), 0.3
    study = studied(tmp_path, smooth(), [stage])
    actual = Unrolled(damping=λ).attribute(study, query, **DOUBLE).values
    model, (x, y), (a, b) = smooth().double(), stage["data"].tensors, query.tensors
    shapes = {name: p.shape for name, p in model.named_parameters()}
    θ = torch.cat([p.detach().flatten() for p in model.parameters()])

    def each(flat: torch.Tensor, of: Any, inputs: torch.Tensor, labels: torch.Tensor) -> Any:
        parts = torch.split(flat, [shape.numel() for shape in shapes.values()])
        named = {n: part.reshape(shapes[n]) for n, part in zip(shapes, parts, strict=True)}
        outputs = torch.func.functional_call(model, named, (inputs.double(),))
        return of(outputs, (inputs, labels))

    rate, path = 0.2, []
    for batch in stage["batches"]:
        i = torch.as_tensor(batch)
        path.append((i, θ, partial(each, of=TASK.losses, inputs=x[i], labels=y[i])))
        θ = θ - rate * torch.func.jacrev(path[-1][2])(θ).mean(0)
    v = torch.func.jacrev(partial(each, of=TASK.measurements, inputs=a, labels=b))(θ)
    expected = torch.zeros(len(a), len(x), dtype=torch.float64)
    for i, point, losses in reversed(path):
        expected[:, i] -= rate * v @ torch.func.jacrev(losses)(point).T / len(i)
        H = torch.func.hessian(lambda w, losses=losses: losses(w).mean())(point)
        v = v - rate * (v @ H + λ * v)
    close(actual, expected.detach().numpy(), 1e-9)


@pytest.mark.parametrize("expected", [False, True])
def test_query_along_the_run_is_the_mean_over_checkpoints(expected: bool, tmp_path: Path) -> None:
    """Scores are linear in the query gradient."""
    study = studied(tmp_path, smooth(), [one_stage("momentum", 9)])
    query, run = models.vectors(3, seed=4), study.runs[0]
    along = Unrolled("gauss-newton", expected, query_at="run")
    each = []
    for checkpoint in run.checkpoints:

        class At(Unrolled):
            def _gradients(self, workspace: Any, block: Any, step: int = checkpoint.step) -> Any:
                return self._gradients_at(workspace, block, workspace.replay.recorded(step))

        each.append(At("gauss-newton", expected).attribute(study, query, **DOUBLE).values)
    close(along.attribute(study, query, **DOUBLE).values, np.mean(each, 0), 1e-9)
    assert not np.allclose(each[0], each[-1])


def test_expected_draws(tmp_path: Path) -> None:
    data, query = models.vectors(30), models.vectors(2, seed=4)
    subset = np.arange(3, 27)
    recipe = Recipe(smooth, TASK, data, OPTIMIZERS["momentum"], batch_size=6, epochs=3)
    run = recipe.run(0, tmp_path / "run", 3, subset=subset)
    study = whence.Study(smooth(), TASK, train=data, runs=run)
    seen: list[np.ndarray] = []
    original = Replay.backward

    def watched(self: Replay, last: int, first: int, draw: Any, size: int) -> Any:
        seen.extend(draw(t) for t in range(3))
        seen.append(draw(0))
        return original(self, last, first, draw, size)

    method = Unrolled(expected=True, curvature_batch=9, seed=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Replay, "backward", watched)
        first = method.attribute(study, query, **DOUBLE).values
    assert all(len(np.unique(d)) == 9 and np.isin(d, subset).all() for d in seen)
    assert (seen[0] == seen[3]).all() and not (seen[0] == seen[1]).all()
    assert (method.attribute(study, query, **DOUBLE).values == first).all()
    other = Unrolled(expected=True, curvature_batch=9, seed=4).attribute(study, query, **DOUBLE)
    assert not np.allclose(other.values, first)
    whole = (
        Unrolled(expected=True).attribute(study, query, **DOUBLE).values
    )  # 512: all 24 there are
    assert np.corrcoef(whole.ravel(), first.ravel())[0, 1] > 0.9


# --- one answer, however it is computed ---------------------------------------------------------


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> tuple[whence.Study, TensorDataset]:
    study = studied(tmp_path_factory.mktemp("case"), smooth(), [one_stage("adam", 9)])
    return study, models.vectors(5, seed=4)


METHODS = [Unrolled(), Unrolled("gauss-newton", expected=True, curvature_batch=6, credit_every=3)]


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_self_influence_is_the_diagonal(method: Unrolled, tmp_path: Path) -> None:
    stages = two_stages()
    study = studied(tmp_path, smooth(), stages)
    actual = method.attribute(study, **DOUBLE).values
    for name, place in (("pretrain", slice(0, 10)), ("finetune", slice(10, 17))):
        twin = copy.copy(method)
        twin.stage = name
        whole = twin.attribute(study, study.train[name], **DOUBLE).values
        close(actual[place], np.diag(whole), 1e-10)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_batches_and_blocks_change_nothing(
    method: Unrolled, case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    study, query = case
    whole = method.attribute(study, query, by_segment=True, **DOUBLE)
    selves = method.attribute(study, **DOUBLE).values
    close(method.attribute(study, query, batch_size=3, **DOUBLE).values, whole.values, 1e-10)
    assert whole.by_segment is not None and whole.by_segment.shape == (3, 5, 10)
    close(whole.by_segment.sum(0), whole.values, 1e-12)
    shares = [segment["share_of_score"] for segment in whole.diagnostics["segments"]]
    assert sum(shares) == pytest.approx(1) and min(shares) > 0
    top = method.attribute(study, query, top=2, **DOUBLE)
    assert top.helpful(1, 2).examples == whole.helpful(1, 2).examples
    monkeypatch.setattr(unrolling, "MAX_PENDING", 2)
    # so much for an example that a mebibyte is enough for two queries
    monkeypatch.setattr(unrolling.cost, "per_example_numbers", lambda tracked: 30_000)
    cuts: list[int] = []
    original = Unrolled._gradients

    def watched(self: Unrolled, bench: Any, block: Any) -> Any:
        cuts.append(len(block.indices))
        return original(self, bench, block)

    monkeypatch.setattr(Unrolled, "_gradients", watched)
    close(method.attribute(study, query, memory=2**20, **DOUBLE).values, whole.values, 1e-10)
    close(method.attribute(study, memory=2**20, **DOUBLE).values, selves, 1e-10)
    assert cuts == [2, 2, 1] + [2] * 5


def test_worker_processes(tmp_path: Path) -> None:
    rows = [(x, y) for x, y in zip(*models.vectors(10).tensors, strict=True)]
    study = studied(tmp_path, smooth(), [one_stage(count=4) | {"data": rows}], checkpoints=1)
    query = models.vectors(2, seed=4)
    alone, helped = (Unrolled().attribute(study, query, workers=k, **DOUBLE).values for k in (0, 1))
    assert (alone == helped).all()


@pytest.mark.parametrize(("width", "levels"), [(100, 1), (4, 2), (2, 4)])
def test_passes_of_one_aggregated_query(
    width: int, levels: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training is a gradient per update, 3 forward passes' worth; a product with the Hessian is
    6. So one query takes (3 + 6) / 3 trainings, and one more for each further level of points."""
    updates = 16
    study = studied(tmp_path, smooth(), [one_stage(count=updates)])
    counts = dict.fromkeys(("losses", "measurements", "hessian"), 0)
    gradient, hessian = Objective.gradient, Objective.hessian

    def counted_gradient(self: Any, w: Any, names: Any, batch: Any, of: str, count: int) -> Any:
        counts[of] += 1
        return gradient(self, w, names, batch, of, count)

    def counted_hessian(self: Any, *given: Any) -> Any:
        counts["hessian"] += 1
        return hessian(self, *given)

    monkeypatch.setattr(Objective, "gradient", counted_gradient)
    monkeypatch.setattr(Objective, "hessian", counted_hessian)
    monkeypatch.setattr(Replay, "_width", lambda self, memory: width)
    query = models.vectors(6, seed=1)
    weights = np.full((1, 6), 1 / 6)
    scores = Unrolled().attribute(study, query, query_weights=weights, **DOUBLE)
    assert counts["hessian"] == updates and counts["measurements"] == 6
    assert counts["losses"] <= levels * updates
    trainings = (3 * counts["losses"] + 6 * counts["hessian"]) / (3 * updates)
    assert trainings <= 2 + levels  # 3 where all points fit, 4 with √T of them
    each = Unrolled().attribute(study, query, **DOUBLE).values
    close(scores.values, each.mean(0, keepdims=True))


@pytest.mark.parametrize("width", [2, 5, 100])
def test_however_many_points_are_held(
    width: int, case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    study, query = case
    whole = Unrolled().attribute(study, query, **DOUBLE).values
    monkeypatch.setattr(Replay, "_width", lambda self, memory: width)
    assert (Unrolled().attribute(study, query, **DOUBLE).values == whole).all()


def test_float32_is_close(case: Any) -> None:
    study, query = case
    exact = Unrolled().attribute(study, query, **DOUBLE).values
    actual = Unrolled().attribute(study, query, progress=False)
    assert actual.values.dtype == np.float32
    close(actual.values, exact, 1e-3)
    assert actual.diagnostics["replay"]["deviation"] < 1e-2


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_an_interrupted_sweep_resumes(
    method: Unrolled, case: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study, query = case
    whole = method.attribute(study, query, by_segment=True, **DOUBLE)
    monkeypatch.setattr("whence.persist.files.Throttle.due", lambda _: True)
    options = DOUBLE | {"out": tmp_path, "by_segment": True}
    product = "hessian" if method.curvature == "hessian" else "gauss_newton"
    calls = interrupt(monkeypatch, Objective, product, 6)
    with pytest.raises(KeyboardInterrupt):
        method.attribute(study, query, **options)
    assert (tmp_path / "sweep.safetensors").exists()
    scores = method.attribute(study, query, **options)
    assert len(calls) < 6 + 8  # of 9, not all again
    assert (scores.values == whole.values).all() and (scores.by_segment == whole.by_segment).all()
    for name in ("adjoint_growth", "segments", "replay"):
        assert scores.diagnostics[name] == whole.diagnostics[name]
    assert not (tmp_path / "sweep.safetensors").exists()
    calls.clear()
    assert (method.attribute(study, query, **options).values == whole.values).all()
    assert not calls


def test_a_sweep_of_another_calculation_is_not_taken_up(
    case: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study, query = case
    monkeypatch.setattr("whence.persist.files.Throttle.due", lambda _: True)
    wrong = unrolling.QueryBlock(
        slice(0, 5), slice(0, 10), query, "train", np.arange(5), {"train": np.arange(10)}
    )
    saved = unrolling.SweepSnapshot(tmp_path / "sweep.safetensors")
    total = unrolling.CreditSum(wrong, [3, 6, 9], apart=False)
    saved.save("another", total, 3, {"x": {WEIGHT: torch.zeros(1)}}, {})
    actual = Unrolled().attribute(study, query, out=tmp_path, **DOUBLE).values
    assert (actual == Unrolled().attribute(study, query, **DOUBLE).values).all()
    other = tmp_path / "other"
    other.mkdir()
    (other / "sweep.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match=r"sweep\.safetensors is damaged .* delete it"):
        Unrolled().attribute(study, query, out=other, **DOUBLE)


def test_an_ensemble(tmp_path: Path) -> None:
    query, data = models.vectors(3, seed=4), models.vectors(12)
    recipe = Recipe(smooth, TASK, data, OPTIMIZERS["momentum"], batch_size=4, epochs=2)
    runs = [recipe.run(seed, tmp_path / str(seed), 2) for seed in range(2)]
    scores = Unrolled().attribute(
        whence.Study(smooth(), TASK, train=data, runs=runs), query, **DOUBLE
    )
    singles = [
        Unrolled().attribute(whence.Study(smooth(), TASK, train=data, runs=run), query, **DOUBLE)
        for run in runs
    ]
    close(scores.values, np.mean([single.values for single in singles], 0), 1e-12)


def test_nothing_of_the_users_is_changed(case: Any) -> None:
    study, query = case
    model = study.model.train()
    model.zero_grad()
    before = copy.deepcopy(model.state_dict())
    flags = torch.backends.mha.get_fastpath_enabled()
    generator = torch.get_rng_state()
    rows = study.train["train"].tensors[0].clone()
    Unrolled().attribute(study, query, **DOUBLE)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert model.training and all(p.requires_grad and p.grad is None for p in model.parameters())
    assert torch.backends.mha.get_fastpath_enabled() == flags
    assert torch.equal(torch.get_rng_state(), generator)
    assert torch.equal(study.train["train"].tensors[0], rows)


class WorksInPlace(nn.Module):
    """Scales its own input: a batch that is used twice must not be scaled twice."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(0.5)
        return self.fc(x)


@pytest.mark.parametrize("curvature", ["hessian", "gauss-newton"])
def test_a_model_that_works_on_its_input(curvature: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, stage, query = WorksInPlace().double(), one_stage(), models.vectors(3, seed=4)
    study = studied(tmp_path, model, [stage])
    actual = Unrolled(curvature).attribute(study, query, **DOUBLE).values
    close(actual, dense.effects(model, [stage], query, curvature)[0], 1e-9)


# --- what is said -------------------------------------------------------------------------------


def test_a_replay_that_strays_is_reported(tmp_path: Path) -> None:
    """The loop summed the losses of a batch, and the task says their mean."""
    model, data = smooth(), models.vectors(10)
    optimizer = SGD(model.parameters(), lr=0.05)
    with whence.Recorder(tmp_path, model, optimizer, checkpoints=2, total_steps=6) as recorder:
        for indices in dense.batches(10, 4, 6):
            batch = dense.batch_of(data, indices)
            optimizer.zero_grad()
            TASK.losses(model(batch[0]), batch).sum().backward()
            recorder.step(indices)
            optimizer.step()
    study = whence.Study(model, TASK, train=data, runs=tmp_path)
    with pytest.warns(UserWarning, match=r"misses the recorded weights at update \d by \d\d"):
        scores = Unrolled().attribute(study, models.vectors(2), **DOUBLE)
    assert scores.diagnostics["replay"]["deviation"] > 0.5


def test_chaos_is_reported(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    stage = one_stage(count=40) | {"optimizer": lambda p: SGD(p, lr=6.0)}
    study = studied(tmp_path, model, [stage])
    with pytest.warns(UserWarning, match="chaotic"):
        scores = Unrolled().attribute(study, models.vectors(2), **DOUBLE)
    assert max(scores.diagnostics["adjoint_growth"].values()) > 1e3
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        Unrolled().attribute(
            studied(tmp_path / "calm", smooth(), [one_stage()]), models.vectors(2), **DOUBLE
        )


def test_a_derivative_beyond_the_precision_is_reported() -> None:
    replay = SimpleNamespace(steps=9, dtype=torch.float32)
    workspace: Any = SimpleNamespace(replay=replay)
    adjoint = {"0.weight": {WEIGHT: torch.full((2, 3), float("inf"))}}
    with pytest.raises(FloatingPointError, match=r"9 to 4, .* beyond torch\.float32: it is"):
        note_growth(workspace, 4, adjoint, torch.ones(2))


def test_no_layers_are_said_to_be_left_out(tmp_path: Path) -> None:
    torch.manual_seed(0)
    stage = {
        "data": models.documents(),
        "task": whence.LanguageModeling(),
        "optimizer": OPTIMIZERS["momentum"],
        "batches": [np.arange(3), np.arange(3, 6)] * 2,
    }
    study = studied(tmp_path, models.Transformer(), [stage])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        scores = Unrolled().attribute(study, models.documents(2), **DOUBLE)
    assert scores.excluded == []
    numbers = sum(p.numel() for p in study.model.parameters())
    assert scores.diagnostics["tracked"] == f"all {numbers:,} trained parameters"


# --- digits -------------------------------------------------------------------------------------


def digits(folder: Path, *methods: Any) -> list[float]:
    """LDS of one run on scikit-learn's digits, in float32, on 20 halves of the data."""
    from scipy.stats import spearmanr
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    train, query = TensorDataset(x[:200], y[:200]), TensorDataset(x[1000:1020], y[1000:1020])
    recipe = Recipe(
        lambda: nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)),
        TASK,
        train,
        optimizer=lambda p: SGD(p, lr=0.03, momentum=0.9),
        batch_size=20,
        epochs=4,
    )
    run = recipe.run(0, folder / "run", device="cpu")
    study = whence.Study(recipe.model(), TASK, train=train, runs=run)
    g, batch = np.random.default_rng(0), list(query.tensors)
    masks = np.stack([g.permutation(200) < 100 for _ in range(20)])
    trained = [recipe.train(0, subset=mask, device="cpu") for mask in masks]
    truth = [TASK.measurements(model(batch[0]), batch).detach().numpy() for model in trained]
    actual = []
    for method in methods:
        predicted = masks @ method.attribute(study, query, progress=False).values.T
        each = [spearmanr(predicted[:, q], np.array(truth)[:, q])[0] for q in range(20)]
        actual.append(float(np.mean(each)))
    return actual


def test_digits(tmp_path: Path) -> None:
    method = Unrolled("gauss-newton", expected=True, curvature_batch=64)
    exact, expected = digits(tmp_path, Unrolled(), method)
    assert 0.4 < exact < 0.9 and 0.4 < expected < 0.9, (exact, expected)


# --- bad input ----------------------------------------------------------------------------------


def refused(study: whence.Study, message: str, error: type = ValueError, **options: Any) -> None:
    with pytest.raises(error, match=message):
        Unrolled().attribute(study, models.vectors(2), **(DOUBLE | options))


def test_settings() -> None:
    with pytest.raises(ValueError, match=r"curvature='fisher' is not known: use one of 'hessian'"):
        Unrolled("fisher")
    with pytest.raises(ValueError, match="curvature_batch=8 is for expected=True"):
        Unrolled(curvature_batch=8)
    with pytest.raises(ValueError, match="damping=-1 must be zero or positive"):
        Unrolled(damping=-1)
    with pytest.raises(ValueError, match="query_at='start' is not known"):
        Unrolled(query_at="start")
    with pytest.raises(ValueError, match="credit_every=0 must be at least 1"):
        Unrolled(expected=True, credit_every=0)


def test_a_run_without_batches(tmp_path: Path) -> None:
    model = smooth()
    history = models.train_run(model, TASK, models.vectors(10), [2, 5])
    study = whence.Study(model, TASK, train=models.vectors(10), runs=history.run)
    refused(
        study,
        r"has not recorded which examples each update used: call recorder\.step\(indices\)"
        r".*every_step=True.*1\.92e-06 GiB for this run's 5 updates",
        RunError,
    )


def test_a_run_without_its_start(case: Any) -> None:
    (run,) = case[0].runs
    made = whence.Run.from_checkpoints([run.final.weights()], [9], 0.1, batches=run.batches)
    study = whence.Study(smooth(), TASK, train=models.vectors(10), runs=made)
    refused(study, "no weights from before its first update", RunError)


def changed(case: Any, **fields: Any) -> whence.Study:
    (run,) = case[0].runs
    incomplete = copy.copy(run)
    for name, value in fields.items():
        setattr(incomplete, name, value)
    return whence.Study(smooth(), TASK, train=models.vectors(10), runs=incomplete)


def test_runs_that_cannot_be_replayed(case: Any) -> None:
    (run,) = case[0].runs
    refused(changed(case, optimizers={"train": "Lion"}), "trained with Lion: only .* sgd, adam")
    more = [settings | {"maximize": True} for settings in run.hyperparameters]
    refused(changed(case, hyperparameters=more), "maximize=True")
    refused(changed(case, notes={"clip_value": 0.1}), r"clipped gradients by value \(0\.1\)")
    wrong = [*run.batches[:3], np.array([4, 10]), *run.batches[4:]]
    with pytest.raises(ValueError, match="used example 10, but the data has 10"):
        changed(case, batches=wrong)
    refused(changed(case, batches=[np.array([], int), *run.batches[1:]]), "empty batch", RunError)
    refused(changed(case, subset=np.arange(9)), "is not in the run's subset", RunError)
    refused(case[0], "dtype=torch.bfloat16", dtype=torch.bfloat16)
    refused(case[0], "batch_size=0 must be a whole number, at least 1", batch_size=0)
    with pytest.raises(ValueError, match="stage='x' is not in the run"):
        Unrolled(stage="x").attribute(case[0], case[1])


class Noisy(nn.Module):
    """Dropout without a module of that name."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(nn.functional.dropout(x, 0.5, self.training))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.1)), r"1 is Dropout\(p=0.1\)"),
        (Noisy(), r"Noisy has other outputs in training mode \(dropout\?\)"),
    ],
    ids=["dropout", "functional"],
)
def test_draws_of_an_unknown_seed_are_refused(
    model: nn.Module, message: str, tmp_path: Path
) -> None:
    recipe = Recipe(
        lambda: copy.deepcopy(model).double(),
        TASK,
        models.vectors(10),
        OPTIMIZERS["sgd"],
        batch_size=5,
        epochs=2,
    )
    run = recipe.run(0, tmp_path / "run", 2)
    run.origin.clear()  # as a Recorder in one's own loop leaves it
    study = whence.Study(model.double(), TASK, train=models.vectors(10), runs=run)
    refused(study, message + ".*cannot be replayed")


def test_a_head_that_came_later(tmp_path: Path) -> None:
    first, second = smooth(), smooth()
    second[2] = nn.Linear(5, 4).double()
    stages = two_stages()
    run = dense.record(tmp_path, first, stages)
    train = {stage["name"]: stage["data"] for stage in stages}
    weights = second.state_dict()
    for k, c in enumerate(run.checkpoints):
        if c.stage == "finetune":
            final = whence.Run.from_checkpoints([weights], [1], 0.1).final
            run.checkpoints[k] = type(c)(c.step, c.stage, final.files)
    study = whence.Study({"pretrain": first, "finetune": second}, TASK, train=train, runs=run)
    refused(study, r"stage 'finetune' has parameters .*2\.weight.*initial values are not recorded")


def test_a_query_that_is_not_a_number(case: Any) -> None:
    study, _ = case
    query = models.vectors(3)
    query.tensors[0][1, 2] = float("nan")
    with pytest.raises(FloatingPointError, match="query example 1"):
        Unrolled().attribute(study, query, **DOUBLE)


def test_training_data_that_is_not_a_number(tmp_path: Path) -> None:
    stage = one_stage()
    stage["data"].tensors[0][stage["batches"][3][0], 1] = float("nan")
    study = studied(tmp_path, smooth(), [stage])
    with pytest.raises(FloatingPointError, match="NaN or infinite"):
        Unrolled().attribute(study, models.vectors(2), **DOUBLE)
