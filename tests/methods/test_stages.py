"""Training in several stages, and several trainings: brute force, and real training."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import dense, models
from support import dense_stages as ds
from support.comparing import agree, close
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import whence
import whence.run

EXACT = {"dtype": torch.float64, "progress": False}
EPSILON = 1e-3


# --- a body with two heads ------------------------------------------------------------------------


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 4)
        self.old, self.new = nn.Linear(4, 2), nn.Linear(4, 3)

    def forward(self, x: Tensor, head: str) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.get_submodule(head)(x)


class Values(whence.Regression):
    """Pre-training: two numbers to be told, with the old head."""

    def __init__(self) -> None:
        super().__init__("half_mse", "loss")

    def outputs(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0], "old")


class Kinds(whence.Classification):
    """Fine-tuning: one of three classes, with the new head."""

    def outputs(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0], "new")


BEFORE, AFTER = models.regression(10, outputs=2, seed=2), models.vectors(7, seed=3)
QUERY = models.vectors(3, seed=1)
DATA, TASKS = {"before": BEFORE, "after": AFTER}, {"before": Values(), "after": Kinds()}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


class Trained:
    """SGD on everything, the new head idle; then AdamW on all but the first layer."""

    def __init__(self, place: Path, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.place = place
        self.model = model = TwoHeads().double()
        sgd = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5, weight_decay=0.02)
        groups = [
            {"params": [*model.second.parameters()], "lr": 0.01},
            {"params": [*model.new.parameters(), *model.old.parameters()], "lr": 0.03},
        ]
        adam = torch.optim.AdamW(groups, eps=EPSILON, weight_decay=0.1)
        settings: Any = {"checkpoints": [2, 4, 6, 8], "stage": "before", "size": 10}
        with whence.Recorder(place, model, sgd, **settings) as recorder:
            first = ds.train(
                model, TASKS["before"], BEFORE, sgd, [2, 4, 6, 8], stage="before", batch_size=5
            )
            recorder.stage("after", size=7, checkpoints=[11, 14, 17], optimizer=adam)
            second = ds.train(
                model, TASKS["after"], AFTER, adam, [3, 6, 9], stage="after", start=8, batch_size=4
            )
        self.legs = [first, second]
        self.final = second.checkpoints[-1]
        self.study = whence.Study(model, TASKS, train=DATA, runs=place)
        stages = {name: ds.Stage(model, TASKS[name], DATA[name]) for name in DATA}
        self.dense = ds.Staged(stages, QUERY, self.final)
        self.dense_self = ds.Staged(stages, None, self.final)

    def segments(self, *counts: int) -> list[ds.Segment]:
        dealt = zip(self.legs, counts, strict=True)
        return [segment for leg, count in dealt for segment in leg.segments(count)]


@pytest.fixture(scope="module")
def trained(places: Path) -> Trained:
    return Trained(places / "two-heads")


# --- SOURCE ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "counts"),
    [("stages", (1, 1)), (2, (1, 1)), (4, (2, 2)), ([2, 4, 8, 14, 17], (None, None)), (7, (4, 3))],
    ids=str,
)
def test_other_data_task_head_and_optimizer(trained: Trained, spec: Any, counts: Any) -> None:
    """-(1/N₁) ∇fᵀ S̄₂ r̄₁ and -(1/N₂) ∇fᵀ r̄₂, for one or more segments a stage."""
    if counts == (None, None):
        before = trained.legs[0].segments([[0], [1], [2, 3]])
        segments = before + trained.legs[1].segments([[0, 1], [2]])
    else:
        segments = trained.segments(*counts)
    method = whence.Source.published(spec, fisher="exact")
    scores = method.attribute(trained.study, QUERY, by_segment=True, **EXACT)
    agree(scores, trained.dense.source(segments))
    assert list(scores.stage) == ["before"] * 10 + ["after"] * 7
    assert list(scores.train_ids) == [*range(10), *range(7)]


@pytest.mark.parametrize("curvature", ["kfac", "diagonal"])
def test_curvature(trained: Trained, curvature: str) -> None:
    method = whence.Source.published(4, curvature, "exact")
    scores = method.attribute(trained.study, QUERY, by_segment=True, **EXACT)
    agree(scores, trained.dense.source(trained.segments(2, 2), curvature))


def test_weight_decay_as_curvature(trained: Trained) -> None:
    """L2 in the first stage, decoupled in the second."""
    method = whence.Source.published(4, fisher="exact", weight_decay="curvature")
    scores = method.attribute(trained.study, QUERY, by_segment=True, **EXACT)
    agree(scores, trained.dense.source(trained.segments(2, 2), weight_decay="curvature"))


@pytest.mark.parametrize("stage", ["before", "after"])
def test_one_stage(trained: Trained, stage: str) -> None:
    method = whence.Source.published(4, fisher="exact", stage=stage)
    scores = method.attribute(trained.study, QUERY, **EXACT)
    expected = trained.dense.source(trained.segments(2, 2)).sum(0)
    close(scores.values, expected[:, trained.dense.columns[stage]])
    assert len(scores.train_ids) == len(DATA[stage])
    assert scores.stage is None or set(scores.stage) == {stage}
    # what came before it has no part in it, and is not fitted
    about, fitted = scores.diagnostics["segments"], 7 if stage == "before" else 3
    assert [a["stage"] for a in about] == ["before", "before", "after", "after"]
    assert [a["stage"] for a in about if "duration" in a] == ["before"] * (fitted == 7) * 2 + [
        "after"
    ] * 2
    assert method.estimate(trained.study, QUERY)["passes"]["covariances"] == fitted


def test_self_influence(trained: Trained) -> None:
    """Each example's effect on its own measurement: of the old head too, for the old task."""
    method = whence.Source.published(4, fisher="exact")
    scores = method.attribute(trained.study, by_segment=True, **EXACT)
    agree(scores, trained.dense_self.source(trained.segments(2, 2)))


def test_a_layer_frozen_after_all_matters(trained: Trained) -> None:
    """The first layer keeps what the first stage taught it, and learns nothing in the second."""
    only = whence.Study(trained.model, TASKS, train=DATA, runs=trained.place, layers="first")
    method = whence.Source.published("stages", fisher="exact")
    scores = method.attribute(only, QUERY, by_segment=True, **EXACT)
    assert (scores.by_segment[0][:, :10] != 0).all()
    assert (scores.by_segment[1] == 0).all()
    (before, _) = trained.segments(1, 1)
    alone = ds.Staged(trained.dense.stages, QUERY, trained.final)
    query = alone._queries("after")
    alone._queries = lambda stage: {"first": query["first"]}  # type: ignore[method-assign]
    close(scores.by_segment[0], alone.source([before])[0])


def test_three_stages() -> None:
    torch.manual_seed(0)
    model, task = models.mlp().double(), whence.Classification()
    data = {name: models.vectors(n, seed=n) for name, n in (("a", 6), ("b", 9), ("c", 5))}
    legs, start = [], 0
    for name, rate in (("a", 0.2), ("b", 0.1), ("c", 0.05)):
        optimizer = torch.optim.SGD(model.parameters(), rate)
        legs.append(ds.train(model, task, data[name], optimizer, [2, 4], stage=name, start=start))
        start += 4
    run = whence.Run.from_checkpoints(
        [c for leg in legs for c in leg.checkpoints],
        [step for leg in legs for step in leg.steps],
        [0.2] * 4 + [0.1] * 4 + [0.05] * 4,
        stages={"a": 4, "b": 8, "c": 12},
        sizes={"a": 6, "b": 9, "c": 5},
    )
    study = whence.Study(model, task, train=data, runs=run)
    stages = {name: ds.Stage(model, task, data[name]) for name in data}
    oracle = ds.Staged(stages, QUERY, legs[-1].checkpoints[-1])
    for segments, count in ((3, 1), (6, 2)):
        method = whence.Source.published(segments, fisher="exact")
        scores = method.attribute(study, QUERY, by_segment=True, **EXACT)
        agree(scores, oracle.source([s for leg in legs for s in leg.segments(count)]))
    middle = whence.Source.published(3, fisher="exact", stage="b").attribute(study, QUERY, **EXACT)
    close(middle.values, oracle.source([s for leg in legs for s in leg.segments()]).sum(0)[:, 6:15])


# --- another head, another model ------------------------------------------------------------------


class NewHead:
    """The head goes, and one of another shape takes its place under the same name."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        old, new = (
            nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs)).double()
            for outputs in (2, 3)
        )
        self.tasks = {"before": whence.Regression(), "after": whence.Classification()}
        make: Callable[..., Any] = {
            "sgd": lambda model: torch.optim.SGD(model.parameters(), 0.1),
            "adam": lambda model: torch.optim.Adam(model.parameters(), 0.1, eps=EPSILON),
        }[kind]
        self.first = first = ds.train(
            old, self.tasks["before"], BEFORE, make(old), [3, 6], stage="before", batch_size=4
        )
        new[0].load_state_dict(old[0].state_dict())
        self.second = second = ds.train(
            new, self.tasks["after"], AFTER, make(new), [2, 4], stage="after", start=6
        )
        run = whence.Run.from_checkpoints(
            first.checkpoints + second.checkpoints,
            first.steps + second.steps,
            0.1,
            optimizer=kind,
            second_moments=first.moments + second.moments if kind == "adam" else None,
            epsilon=EPSILON,
            stages={"before": 6, "after": 10},
            sizes={"before": 10, "after": 7},
        )
        both = {"before": old, "after": new}
        self.study = whence.Study(both, self.tasks, train=DATA, runs=run)
        stages = {name: ds.Stage(both[name], self.tasks[name], DATA[name]) for name in both}
        self.dense = ds.Staged(stages, QUERY, second.checkpoints[-1])


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_a_head_of_another_shape(kind: str) -> None:
    """Another layer, whatever its name: what the first one learned went with it."""
    it = NewHead(kind)
    for counts in ((1, 1), (2, 2)):
        method = whence.Source.published(sum(counts), fisher="exact")
        scores = method.attribute(it.study, QUERY, by_segment=True, **EXACT)
        segments = it.first.segments(counts[0]) + it.second.segments(counts[1])
        agree(scores, it.dense.source(segments))


def test_tracin_of_the_stage_that_has_the_queries_head() -> None:
    it = NewHead("sgd")
    scores = whence.TracIn(stage="after").attribute(it.study, QUERY, **EXACT)
    keys = [it.dense._key(weights) for weights in it.second.checkpoints]
    queries = [it.dense.gradients(key, "after", "measurements", True) for key in keys]
    train = [it.dense.gradients(key, "after", "losses", False) for key in keys]
    close(scores.values, dense.tracin(queries, train, [0.1, 0.1]))


# --- influence functions --------------------------------------------------------------------------


@pytest.mark.parametrize("curvature", ["ekfac", "kfac", "diagonal"])
def test_influence_pools_the_stages(trained: Trained, curvature: str) -> None:
    """One optimum of both datasets together: (N₁H₁ + N₂H₂)/(N₁ + N₂), and 1/(N₁ + N₂)."""
    method = whence.Influence.published(1e-3, curvature, "exact")
    scores = method.attribute(trained.study, QUERY, **EXACT)
    close(scores.values, trained.dense.influence(1e-3, curvature))
    assert list(scores.stage) == ["before"] * 10 + ["after"] * 7


@pytest.mark.parametrize("stage", ["before", "after"])
def test_influence_of_one_stage(trained: Trained, stage: str) -> None:
    method = whence.Influence.published(1e-3, fisher="exact", stage=stage)
    scores = method.attribute(trained.study, QUERY, **EXACT)
    close(scores.values, trained.dense.influence(1e-3)[:, trained.dense.columns[stage]])


def test_pooling_is_what_one_dataset_would_be() -> None:
    """The oracle, on a dataset cut in two."""
    torch.manual_seed(0)
    model, task = models.mlp().double(), whence.Classification()
    weights, both = copy.deepcopy(model.state_dict()), models.vectors(17)
    halves = [TensorDataset(*(t[part] for t in both.tensors)) for part in (slice(6), slice(6, 17))]
    fisher = dense.exact(task)
    parts = [dense.moments(model, weights, task, fisher, half) for half in halves]
    together = ds.pooled(parts, [6, 11])
    for name, whole in dense.moments(model, weights, task, fisher, both).items():
        torch.testing.assert_close(together[name].A, whole.A)
        torch.testing.assert_close(together[name].S, whole.S)
        actual, expected = (m.gradients.T @ m.gradients for m in (together[name], whole))
        torch.testing.assert_close(actual, expected)


# --- against real training ------------------------------------------------------------------------


class Linear:
    """Linear regression in two stages with one optimum, and the exact derivative of training.

    EK-FAC is exact for it (test_exactness.py), and the Gauss-Newton matrix is the Hessian.
    """

    sizes = 10, 8
    scales = 1.0, 0.5  # mse, then half_mse
    tasks = {  # noqa: RUF012
        "one": whence.Regression("mse", "output"),
        "two": whence.Regression("half_mse", "output"),
    }

    def __init__(self, common_optimum: bool) -> None:
        g = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, dtype=torch.float64)

        def with_ones(n: int) -> Tensor:
            return torch.cat([normal(n, 3), torch.ones(n, 1, dtype=torch.float64)], 1)

        self.inputs = [with_ones(n) for n in self.sizes]
        self.targets = [normal(n) for n in self.sizes]
        self.query = with_ones(3)
        self.start = torch.linalg.lstsq(self.inputs[0], self.targets[0][:, None]).solution[:, 0]
        if common_optimum:
            x = self.inputs[1]
            noise = self.targets[1] - x @ torch.linalg.lstsq(x, self.targets[1]).solution
            self.targets[1] = x @ self.start + noise
        else:
            self.start = normal(4)

    def unrolled(self, rates: tuple[float, float], counts: tuple[int, int]) -> Any:
        legs = [
            ds.Descent(x, y, lambda k, t, g, η=η: t - η * g, count, scale)
            for x, y, η, count, scale in zip(
                self.inputs, self.targets, rates, counts, self.scales, strict=True
            )
        ]
        return ds.unrolled(self.start, legs, self.query)

    def study(self, thetas: list[Tensor], steps: list[int], rates: Any, end: int) -> whence.Study:
        states = [{"weight": t[None, :3].clone(), "bias": t[3:].clone()} for t in thetas]
        run = whence.Run.from_checkpoints(
            states,
            steps,
            rates,
            stages={"one": end, "two": steps[-1]},
            sizes=dict(zip(self.tasks, self.sizes, strict=True)),
        )
        data = {
            name: TensorDataset(x[:, :3], y[:, None])
            for name, x, y in zip(self.tasks, self.inputs, self.targets, strict=True)
        }
        return whence.Study(nn.Linear(3, 1).double(), self.tasks, train=data, runs=run)

    @property
    def queries(self) -> TensorDataset:
        return TensorDataset(self.query[:, :3], torch.zeros(3, 1, dtype=torch.float64))


def test_two_stages_at_rest_are_exact() -> None:
    """Both stages share their optimum and start there: nothing moves, gradients of single examples
    are constant, and all that SOURCE approximates is that updates are small."""
    it = Linear(common_optimum=True)
    rates, counts = (0.02, 0.01), (20, 24)

    def truth(more: int) -> list[Tensor]:
        smaller = rates[0] / more, rates[1] / more
        return it.unrolled(smaller, (counts[0] * more, counts[1] * more))[0]

    expected = torch.cat(ds.extrapolated(truth), 1)
    study = it.study([it.start] * 4, [10, 20, 30, 44], [rates[0]] * 20 + [rates[1]] * 24, counts[0])
    for segments in (2, 4):
        scores = whence.Source.published(segments, fisher="exact").attribute(
            study, it.queries, **EXACT
        )
        close(scores.values, expected, 1e-4)
    assert list(scores.stage) == ["one"] * 10 + ["two"] * 8
    # and the second stage has indeed forgotten some of the first, unevenly
    alone = it.unrolled((rates[0], 0.0), counts)[0][0]
    ratio = (expected[:, :10] / alone).abs()
    assert ratio.min() < 0.8 < ratio.max()


def test_two_stages_that_really_train() -> None:
    """From anywhere, to one optimum and then to another. With more and shorter segments, what
    remains is that the gradient is taken after an update and not before it, and that updates are
    not infinitely small: both of the order of rate × curvature, a few per cent here."""
    it = Linear(common_optimum=False)
    rates, counts = (0.01, 0.01), (60, 60)
    truth, thetas = it.unrolled(rates, counts)
    errors = []
    for every in (30, 6, 2):
        steps = list(range(every, 121, every))
        study = it.study([thetas[s - 1] for s in steps], steps, 0.01, 60)
        scores = whence.Source.published(len(steps), fisher="exact").attribute(
            study, it.queries, **EXACT
        )
        expected = torch.cat(truth, 1).numpy()
        error = abs(scores.values - expected)
        errors.append(error[:, :10].max() / abs(expected[:, :10]).max())
        last = error[:, 10:].max() / abs(expected[:, 10:]).max()
    assert all(later < earlier / 2 for earlier, later in pairwise(errors))
    assert errors[-1] < 0.04
    assert last < 0.04


# --- what is computed, and where ------------------------------------------------------------------


class Counting:
    """Examples whose training loss was differentiated, by stage and weights."""

    def __init__(self) -> None:
        self.seen: Counter[tuple[str, float]] = Counter()
        self.marker = 0.0

    def task(self, stage: str) -> whence.Task:
        counts = self

        class Counted(whence.Classification):
            def outputs(self, model: nn.Module, batch: Any) -> Tensor:
                counts.marker = mark(model.state_dict())
                return super().outputs(model, batch)

            def losses(self, outputs: Tensor, batch: Any) -> Tensor:
                if torch.is_grad_enabled():  # else only compared
                    counts.seen[stage, counts.marker] += len(outputs)
                return super().losses(outputs, batch)

            pseudo_losses = whence.Classification.pseudo_losses  # the loss is as it was

        return Counted()


def mark(weights: dict[str, Tensor]) -> float:
    return round(float(weights["0.weight"].detach().double().sum()), 9)


SIZE = 40  # large enough that what is probed on a few examples does not make a pass


@cache
def counted() -> tuple[nn.Module, dict[str, Any], list[ds.Leg], whence.Run]:
    torch.manual_seed(0)
    model, task = models.mlp().double(), whence.Classification()
    data = {"a": models.vectors(SIZE, seed=5), "b": models.vectors(SIZE + 1, seed=6)}
    legs = [
        ds.train(
            model,
            task,
            data[name],
            torch.optim.SGD(model.parameters(), 0.1),
            [2, 4],
            stage=name,
            start=start,
        )
        for name, start in (("a", 0), ("b", 4))
    ]
    run = whence.Run.from_checkpoints(
        legs[0].checkpoints + legs[1].checkpoints,
        [2, 4, 6, 8],
        0.1,
        stages={"a": 4, "b": 8},
        sizes={"a": SIZE, "b": SIZE + 1},
    )
    return model, data, legs, run


@pytest.mark.parametrize("asked", [None, "a", "b"])
@pytest.mark.parametrize("method", ["Source", "FastSource"])
def test_training_gradients_only_where_they_are_asked_for(method: str, asked: str | None) -> None:
    model, data, legs, run = counted()
    counts = Counting()
    tasks = {name: counts.task(name) for name in data}
    study = whence.Study(model, tasks, train=data, runs=run)
    form = getattr(whence, method)(2, stage=asked)
    form.attribute(study, QUERY, **EXACT)
    for leg in legs:
        wanted = asked in (None, leg.stage)
        segment = leg.segments(1)[0]
        points = segment.averaged() if method == "FastSource" else segment
        used = [counts.seen.pop((leg.stage, mark(weights)), 0) for weights in points.checkpoints]
        size = len(data[leg.stage])
        for count in used:
            assert size <= count < 2 * size if wanted else count < size
    assert all(count < SIZE for count in counts.seen.values())  # nowhere else


# --- bad input ------------------------------------------------------------------------------------


def test_swapped_datasets(trained: Trained) -> None:
    swapped = {"before": AFTER, "after": BEFORE}
    with pytest.raises(ValueError, match=r"'before'.*10.*7.*swapped"):
        whence.Study(trained.model, TASKS, train=swapped, runs=trained.place)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"train": BEFORE}, "before"),
        ({"train": {"before": BEFORE}}, "after"),
        ({"train": DATA | {"later": AFTER}}, "later"),
        ({"task": {"before": Values()}}, "after"),
        ({"task": TASKS | {"later": Kinds()}}, "later"),
        ({"model": {"before": TwoHeads()}}, "after"),
    ],
    ids=["no stages", "fewer", "more", "fewer tasks", "more tasks", "fewer models"],
)
def test_stages_that_are_not_the_runs(trained: Trained, changes: Any, says: str) -> None:
    given = {"model": trained.model, "task": TASKS, "train": DATA, "runs": trained.place}
    with pytest.raises(ValueError, match=says):
        whence.Study(**(given | changes))


@pytest.mark.parametrize("method", [whence.Source, whence.Influence, whence.TracIn])
def test_a_stage_that_does_not_exist(trained: Trained, method: Any) -> None:
    with pytest.raises(ValueError, match=r"'middle'.*before.*after"):
        method(stage="middle").attribute(trained.study, QUERY, **EXACT)


def test_segments_across_a_boundary(trained: Trained) -> None:
    with pytest.raises(ValueError, match=r"crosses the end of stage 'before' at 8"):
        whence.Source.published([4, 17]).attribute(trained.study, QUERY, **EXACT)
    with pytest.raises(ValueError, match="2 stages"):
        whence.Source.published(1).attribute(trained.study, QUERY, **EXACT)


# --- several runs ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ensemble(places: Path) -> list[Trained]:
    return [Trained(places / f"seed-{seed}", seed) for seed in (1, 2, 3)]


@pytest.mark.parametrize("method", ["Source", "Influence"])
def test_mean_and_spread(ensemble: list[Trained], method: str) -> None:
    """The mean over runs, and their standard deviation as an estimate from a sample."""
    model = ensemble[0].model
    study = whence.Study(model, TASKS, train=DATA, runs=[it.place for it in ensemble])
    if method == "Source":
        form: Any = whence.Source.published(4, fisher="exact")
        by_segment = np.stack([it.dense.source(it.segments(2, 2)) for it in ensemble])
        each = by_segment.sum(1)
    else:
        form = whence.Influence.published(1e-3, fisher="exact")
        each = np.stack([it.dense.influence(1e-3) for it in ensemble])
    scores = form.attribute(study, QUERY, by_segment=method == "Source", **EXACT)
    close(scores.values, each.mean(0))
    close(scores.spread, each.std(0, ddof=1))
    if method == "Source":
        close(scores.by_segment, by_segment.mean(0))
    assert list(scores.stage) == ["before"] * 10 + ["after"] * 7


def test_one_run_has_no_spread(ensemble: list[Trained]) -> None:
    scores = whence.Source.published(2, fisher="exact").attribute(ensemble[0].study, QUERY, **EXACT)
    assert scores.spread is None


def damaged(path: Path, place: Path) -> Path:
    """A copy of a run with a byte of a checkpoint changed."""
    copied = whence.Run.open(path).save(place).path
    assert copied is not None
    file = sorted(copied.glob("checkpoints/step-*4.safetensors"))[0]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return copied


@pytest.mark.parametrize("at", [0, 2])
def test_a_damaged_run_among_them(ensemble: list[Trained], tmp_path: Path, at: int) -> None:
    runs: list[Any] = [it.place for it in ensemble]
    runs[at] = damaged(runs[at], tmp_path / "broken")
    with pytest.raises(whence.run.RunError, match="broken"):
        study = whence.Study(ensemble[0].model, TASKS, train=DATA, runs=runs)
        whence.Source.published(4).attribute(study, QUERY, out=tmp_path / "scores", **EXACT)
    assert not (tmp_path / "scores" / "scores.json").exists()


def test_a_diverged_run_among_them() -> None:
    model, data, _, good = counted()
    weights = [copy.deepcopy(c.weights()) for c in good.checkpoints]
    for state in weights:
        state["2.weight"][0, 0] = float("nan")
    stages = {"stages": {"a": 4, "b": 8}, "sizes": {"a": SIZE, "b": SIZE + 1}}
    bad = whence.Run.from_checkpoints(weights, [2, 4, 6, 8], 0.1, **stages)
    task = whence.Classification()
    with pytest.raises((FloatingPointError, ValueError), match=r"NaN|nan|finite"):
        study = whence.Study(model, task, train=data, runs=[good, bad])
        whence.Source.published(2).attribute(study, QUERY, **EXACT)


def test_a_run_without_second_moments_among_them() -> None:
    torch.manual_seed(0)
    model, task, train = models.mlp().double(), whence.Classification(), models.vectors()
    leg = ds.train(model, task, train, torch.optim.Adam(model.parameters()), [2, 4])
    good, bad = (
        whence.Run.from_checkpoints(
            leg.checkpoints, leg.steps, 0.001, optimizer="adam", second_moments=moments
        )
        for moments in (leg.moments, None)
    )
    study = whence.Study(model, task, train=train, runs=[good, bad])
    with pytest.raises(ValueError, match=r"second.moments"):
        whence.Source.published(2).attribute(study, QUERY, **EXACT)


def test_runs_of_other_stages_or_sizes_among_them() -> None:
    model, data, _, good = counted()
    weights, steps = [c.weights() for c in good.checkpoints], [2, 4, 6, 8]
    task = whence.Classification()
    other = whence.Run.from_checkpoints(weights, steps, 0.1, stages={"a": 4, "c": 8})
    with pytest.raises(ValueError, match="stages"):
        whence.Study(model, task, train=data, runs=[good, other])
    sizes = {"stages": {"a": 4, "b": 8}, "sizes": {"a": SIZE + 1, "b": SIZE}}
    other = whence.Run.from_checkpoints(weights, steps, 0.1, **sizes)
    with pytest.raises(ValueError, match=r"'a'.*examples"):
        whence.Study(model, task, train=data, runs=[good, other])
