"""FastSource: SOURCE with the parameters averaged within each segment, against brute force."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import dense_stages as ds
from support import models
from support.comparing import agree, close
from torch import Tensor, nn

import whence

STEPS = [2, 5, 9, 12, 16, 18]
EPSILON = 1e-3
EXACT = {"dtype": torch.float64, "progress": False}


def mlp() -> Any:
    data = models.vectors(), models.vectors(3, seed=1)
    return models.mlp(), whence.Classification(), *data


def conv() -> Any:
    return models.ConvNet(), whence.Classification(), models.images(), models.images(3, seed=1)


def gpt() -> Any:
    data = models.documents(), models.documents(3, seed=1)
    return models.Transformer(), whence.LanguageModeling(), *data


MODELS = {"mlp": mlp, "conv": conv, "gpt": gpt}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, 0.5, weight_decay=0.05),
    "adam": lambda p: torch.optim.Adam(p, 0.05, (0.8, 0.9), EPSILON, 0.05),
    "adamw": lambda p: torch.optim.AdamW(p, 0.05, (0.8, 0.9), EPSILON, 0.2),
}


class Pair:
    """The library's study of a small training, and the brute force on the same. Batch norms keep
    their running statistics up to date, so that buffers differ between checkpoints."""

    def __init__(self, name: str, kind: str) -> None:
        torch.manual_seed(0)
        self.model, self.task, self.train, self.query = MODELS[name]()
        optimizer = OPTIMIZERS[kind](self.model.double().parameters())
        self.leg = leg = ds.train(
            self.model, self.task, self.train, optimizer, STEPS, batch_size=4, norms=True
        )
        self.run = whence.Run.from_checkpoints(
            leg.checkpoints,
            leg.steps,
            leg.settings["lr"],
            optimizer=kind,
            momentum=leg.settings.get("momentum", 0.0),
            weight_decay=leg.settings["weight_decay"],
            second_moments=leg.moments if kind != "sgd" else None,
            epsilon=leg.settings.get("eps", 1e-8),
        )
        self.study = whence.Study(
            self.model, self.task, train=self.train, runs=self.run, layers="matrices"
        )
        stages = {"train": ds.Stage(self.model, self.task, self.train)}
        self.dense = ds.Staged(stages, self.query, leg.checkpoints[-1])
        self.dense_self = ds.Staged(stages, None, leg.checkpoints[-1])
        self._averaged: dict[int, list[ds.Segment]] = {}

    def averaged(self, segments: int) -> list[ds.Segment]:
        if segments not in self._averaged:
            self._averaged[segments] = [s.averaged() for s in self.leg.segments(segments)]
        return self._averaged[segments]

    def attribute(self, *args: Any, method: Any = whence.FastSource, **settings: Any) -> Any:
        form = method.published(*args, **({"fisher": "exact"} | settings))
        return form.attribute(self.study, self.query, by_segment=True, **EXACT)


@cache
def pair(name: str, kind: str) -> Pair:
    return Pair(name, kind)


@pytest.mark.parametrize("segments", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_fastsource(name: str, segments: int) -> None:
    it = pair(name, "sgd")
    agree(it.attribute(segments), it.dense.source(it.averaged(segments)))


@pytest.mark.parametrize("curvature", ["ekfac", "kfac", "diagonal"])
@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_preconditioned(kind: str, curvature: str) -> None:
    """One set of weights per segment, but P̄ is still the mean over its checkpoints."""
    it = pair("mlp", kind)
    agree(it.attribute(2, curvature), it.dense.source(it.averaged(2), curvature))


@pytest.mark.parametrize("name", ["mlp", "conv"])
@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_weight_decay_and_damping(name: str, kind: str) -> None:
    it = pair(name, kind)
    settings = {"damping": 1e-2, "weight_decay": "curvature"}
    agree(it.attribute(2, **settings), it.dense.source(it.averaged(2), **settings))


def test_averaging_is_worth_a_test() -> None:
    """Weights and buffers move enough for FastSource to differ from Source."""
    it = pair("conv", "sgd")
    first, last = (it.leg.checkpoints[k]["norm.running_var"] for k in (0, -1))
    assert ((first - last).abs() > 0.05 * last).any()
    fast, slow = it.dense.source(it.averaged(1)), it.dense.source(it.leg.segments(1))
    assert abs(fast - slow).max() > 0.05 * abs(slow).max()


def test_self_influence() -> None:
    it = pair("mlp", "adam")
    method = whence.FastSource.published(3, fisher="exact")
    agree(
        method.attribute(it.study, by_segment=True, **EXACT), it.dense_self.source(it.averaged(3))
    )


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_one_checkpoint_a_segment_is_source(kind: str) -> None:
    it = pair("mlp", kind)
    fast, slow = (it.attribute(6, method=m) for m in (whence.FastSource, whence.Source))
    close(fast.by_segment, slow.by_segment, 1e-12)


def test_given_segments() -> None:
    it = pair("mlp", "sgd")
    segments = [s.averaged() for s in it.leg.segments([[0, 1], [2, 3, 4, 5]])]
    agree(it.attribute([5, 18]), it.dense.source(segments))


def test_a_checkpoint_at_the_start_is_not_averaged() -> None:
    it = pair("mlp", "sgd")
    torch.manual_seed(5)
    run = whence.Run.from_checkpoints(
        [models.mlp().double().state_dict(), *it.leg.checkpoints],
        [0, *STEPS],
        0.1,
        momentum=0.5,
    )
    study = whence.Study(it.model, it.task, train=it.train, runs=run, layers="matrices")
    scores = whence.FastSource.published(2, fisher="exact").attribute(study, it.query, **EXACT)
    close(scores.values, it.dense.source(it.averaged(2)).sum(0))


def test_source_and_fastsource_do_not_share_factors(tmp_path: Path) -> None:
    """In one study and on disk, one after the other and back, by turns of segments too."""
    it = pair("mlp", "adam")
    study = whence.Study(
        it.model, it.task, train=it.train, runs=it.run, cache=tmp_path, layers="matrices"
    )
    for _ in range(2):
        for segments in (1, 2):
            for method, held in (
                (whence.Source, it.leg.segments(segments)),
                (whence.FastSource, it.averaged(segments)),
            ):
                form = method.published(segments, fisher="exact")
                scores = form.attribute(study, it.query, **EXACT)
                close(scores.values, it.dense.source(held).sum(0))


def test_sampled_draws_are_repeatable() -> None:
    it = pair("mlp", "sgd")
    fresh = whence.Study(it.model, it.task, train=it.train, runs=it.run, layers="matrices")
    one = it.attribute(2, fisher="sampled", seed=4)
    two = whence.FastSource.published(2, fisher="sampled", seed=4).attribute(
        fresh, it.query, by_segment=True, batch_size=5, **EXACT
    )
    close(one.by_segment, two.by_segment, 1e-10)
    other = it.attribute(2, fisher="sampled", seed=5)
    assert abs(other.values - one.values).max() > 1e-3 * abs(one.values).max()


def test_a_pass_a_segment() -> None:
    """L passes over the training data, not C."""

    class Counted(whence.Classification):
        def losses(self, outputs: Tensor, batch: Any) -> Tensor:
            seen["loss"] += len(outputs) * torch.is_grad_enabled()  # else only compared
            return super().losses(outputs, batch)

        def pseudo_losses(self, outputs: Tensor, batch: Any, uniform: Any) -> Tensor:
            seen["pseudo"] += len(outputs)
            return super().pseudo_losses(outputs, batch, uniform)

    it, size = pair("mlp", "sgd"), 60
    train = models.vectors(size, seed=8)
    for method, passes in ((whence.FastSource.published, 2), (whence.Source.published, 6)):
        seen = {"loss": 0, "pseudo": 0}
        study = whence.Study(it.model, Counted(), train=train, runs=it.run, layers="matrices")
        method(2).attribute(study, it.query, **EXACT)
        assert passes * size <= seen["loss"] < (passes + 1) * size
        assert 2 * passes * size <= seen["pseudo"] < (2 * passes + 1) * size


def test_stages() -> None:
    """Each stage's segments with its own data; SGD throughout, the second stage without a layer."""
    torch.manual_seed(0)
    model, task = models.mlp().double(), whence.Classification()
    data = {"a": models.vectors(8, seed=2), "b": models.vectors(6, seed=3)}
    query = models.vectors(3, seed=1)
    named = dict(model.named_parameters())
    groups = [["0.weight", "0.bias"], ["2.weight", "2.bias", "4.weight", "4.bias"]]
    first = ds.train(
        model, task, data["a"], torch.optim.SGD(named.values(), 0.2), [2, 4, 6, 8], stage="a"
    )
    some = torch.optim.SGD([named[name] for name in groups[1]], 0.1)
    second = ds.train(model, task, data["b"], some, [3, 6], stage="b", start=8)
    rates = np.array([[0.2, 0.2]] * 8 + [[0.0, 0.1]] * 6)
    run = whence.Run.from_checkpoints(
        first.checkpoints + second.checkpoints,
        first.steps + second.steps,
        rates,
        groups=groups,
        stages={"a": 8, "b": 14},
        sizes={"a": 8, "b": 6},
    )
    study = whence.Study(model, task, train=data, runs=run, layers="matrices")
    stages = {name: ds.Stage(model, task, data[name]) for name in data}
    oracle = ds.Staged(stages, query, second.checkpoints[-1])
    segments = [s.averaged() for s in first.segments(2) + second.segments(1)]
    method = whence.FastSource.published(3, fisher="exact")
    scores = method.attribute(study, query, by_segment=True, **EXACT)
    agree(scores, oracle.source(segments))
    assert list(scores.stage) == ["a"] * 8 + ["b"] * 6
    one = whence.FastSource.published(3, fisher="exact", stage="a").attribute(study, query, **EXACT)
    close(one.values, oracle.source(segments).sum(0)[:, :8])


def test_ensemble() -> None:
    it, runs, each = pair("mlp", "sgd"), [], []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = models.mlp().double()
        leg = ds.train(model, it.task, it.train, torch.optim.SGD(model.parameters(), 0.1), [3, 6])
        runs.append(whence.Run.from_checkpoints(leg.checkpoints, leg.steps, 0.1))
        stages = {"train": ds.Stage(model, it.task, it.train)}
        oracle = ds.Staged(stages, it.query, leg.checkpoints[-1])
        each.append(oracle.source([s.averaged() for s in leg.segments(1)]).sum(0))
    study = whence.Study(it.model, it.task, train=it.train, runs=runs, layers="matrices")
    scores = whence.FastSource.published(1, fisher="exact").attribute(study, it.query, **EXACT)
    close(scores.values, np.mean(each, 0))
    close(scores.spread, np.std(each, 0, ddof=1))


def test_the_model_and_the_run_stay_as_they_were() -> None:
    it = pair("conv", "sgd")
    model, weights = copy.deepcopy(it.model), [copy.deepcopy(c) for c in it.leg.checkpoints]
    it.attribute(2)
    for before, after in zip(weights, it.leg.checkpoints, strict=True):
        assert all(torch.equal(before[name], after[name]) for name in before)
    ours, theirs = model.state_dict(), it.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_half_precision_checkpoints_are_averaged_in_full() -> None:
    """A mean taken in bfloat16 would have three digits."""
    it = pair("mlp", "sgd")
    halves = [{k: v.bfloat16() for k, v in c.items()} for c in it.leg.checkpoints]
    run = whence.Run.from_checkpoints(halves, STEPS, 0.1, momentum=0.5)
    study = whence.Study(it.model, it.task, train=it.train, runs=run, layers="matrices")
    wide = [{k: v.double() for k, v in c.items()} for c in halves]
    leg = copy.copy(it.leg)
    leg.checkpoints = wide
    oracle = ds.Staged({"train": ds.Stage(it.model, it.task, it.train)}, it.query, wide[-1])
    scores = whence.FastSource.published(2, fisher="exact").attribute(study, it.query, **EXACT)
    close(scores.values, oracle.source([s.averaged() for s in leg.segments(2)]).sum(0))


def test_arguments_are_those_of_source() -> None:
    fast = whence.FastSource.published(
        segments=2,
        curvature="kfac",
        fisher="empirical",
        stage=None,
        damping=1e-3,
        weight_decay="ignore",
        seed=1,
    )
    assert repr(fast).startswith("FastSource.published(segments=2")
    it = pair("mlp", "sgd")
    scores = fast.attribute(it.study, it.query, **EXACT)
    assert scores.method == "FastSource.published"
    for wrong in ({"curvature": "full"}, {"fisher": "none"}, {"weight_decay": "all"}):
        with pytest.raises(ValueError):
            whence.FastSource.published(2, **wrong)


def test_weights_of_another_architecture_cannot_be_averaged() -> None:
    it = pair("mlp", "sgd")
    strange = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double().state_dict()
    run = whence.Run.from_checkpoints([strange, it.leg.checkpoints[-1]], [9, 18], 0.1)
    study = whence.Study(it.model, it.task, train=it.train, runs=run, layers="matrices")
    with pytest.raises(ValueError, match=r"different architectures"):
        whence.FastSource.published(1).attribute(study, it.query, **EXACT)
