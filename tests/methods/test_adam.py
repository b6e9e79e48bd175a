"""SOURCE and influence on runs of Adam, AdamW and RMSprop: brute force, and real training."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import dense, forms, models
from support import dense_stages as ds
from support.comparing import agree, close
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import whence
import whence.task

STEPS = [2, 5, 9, 12, 16, 18]
SEED = 3
EXACT = {"dtype": torch.float64, "progress": False}
EPSILON = 1e-3  # large enough for a wrong place of ε to show


# --- cases ----------------------------------------------------------------------------------------


def mlp() -> Any:
    data = models.vectors(), models.vectors(3, seed=1)
    return models.mlp(inplace=True), whence.Classification(), *data


def conv() -> Any:
    return models.ConvNet(), whence.Classification(), models.images(), models.images(3, seed=1)


def gpt() -> Any:
    data = models.documents(), models.documents(3, seed=1)
    return models.Transformer(tied=False), whence.LanguageModeling(), *data


MODELS = {"mlp": mlp, "conv": conv, "gpt": gpt}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, 0.02, (0.8, 0.9), EPSILON, 0.05),
    "adamw": lambda p: torch.optim.AdamW(p, 0.02, (0.8, 0.9), EPSILON, 0.2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, 0.9, EPSILON, 0.05),
    "rmsprop-momentum": lambda p: torch.optim.RMSprop(p, 0.01, 0.9, EPSILON, 0.05, 0.5),
}


def run_of(leg: ds.Leg, **changes: Any) -> whence.Run:
    """The run of somebody who has kept checkpoints, rates and second moments."""
    names = list(leg.checkpoints[0])
    trained = [name for name in names if name in leg.rates[0]]
    rates = np.array([[row[name] for name in trained] for row in leg.rates])
    assert (rates == rates[:, :1]).all(), "one group here"
    given: dict[str, Any] = {
        "optimizer": leg.kind,
        "momentum": leg.settings.get("momentum", leg.settings.get("betas", (0.0,))[0]),
        "weight_decay": leg.settings["weight_decay"],
        "second_moments": leg.moments,
        "epsilon": leg.settings["eps"],
    }
    given |= changes
    return whence.Run.from_checkpoints(leg.checkpoints, leg.steps, rates[:, 0], **given)


def uniform(example: int, step: int) -> Any:
    return whence.task.Uniform(SEED, step, [example])


class Pair:
    """The library's study of a small training, and the brute force on the same."""

    def __init__(self, model: nn.Module, task: Any, train: Any, query: Any, kind: str) -> None:
        model.double()
        self.leg = ds.train(
            model,
            task,
            train,
            OPTIMIZERS[kind](model.parameters()),
            STEPS,
            factor=lambda step: 1 / (1 + step / 5),
            batch_size=4,
        )
        self.query, self.task, self.train, self.model = query, task, train, model
        self.study = whence.Study(
            model, task, train=train, runs=run_of(self.leg), layers="matrices"
        )
        stages = {"train": ds.Stage(model, task, train)}
        final = self.leg.checkpoints[-1]
        self.dense = ds.Staged(stages, query, final, uniform)
        self.dense_self = ds.Staged(stages, None, final, uniform)
        self.dense_self.moments = self.dense.moments
        self.dense_self._weights = self.dense._weights

    def source(self, *args: Any, exact: bool = False, **settings: Any) -> whence.Scores:
        form = forms.exact if exact else whence.Source.published
        method = form(*args, **({"fisher": "exact"} | settings))
        return method.attribute(self.study, self.query, by_segment=True, **EXACT)

    def influence(self, *args: Any, **settings: Any) -> whence.Scores:
        method = whence.Influence.published(*args, **({"fisher": "exact"} | settings))
        return method.attribute(self.study, self.query, **EXACT)


@cache
def pair(name: str, kind: str) -> Pair:
    torch.manual_seed(0)
    return Pair(*MODELS[name](), kind)


# --- the oracle itself ----------------------------------------------------------------------------


def test_oracle_is_appendix_c_where_everything_is_diagonal() -> None:
    torch.manual_seed(0)
    D, P = torch.rand(5, dtype=torch.float64) + 0.1, torch.rand(5, dtype=torch.float64) + 0.1
    H, time = torch.diag(D), 3.0
    S, R = ds.preconditioned_exactly(H, time, P)
    for settings in ({"diagonal": True}, {"damping": 0.0}):
        for actual, expected in zip(ds.dynamics(H, D, time, P, **settings), (S, R), strict=True):
            torch.testing.assert_close(actual, expected)


def test_oracle_exponentials_are_the_limit_of_small_updates() -> None:
    """The product of (I - ηPH), and the sum of what each update adds; H is no diagonal matrix."""
    torch.manual_seed(0)
    J = torch.randn(8, 4, dtype=torch.float64)
    H, P = J.T @ J / 8, torch.rand(4, dtype=torch.float64) + 0.5
    time, eye = 1.5, torch.eye(4, dtype=torch.float64)

    def truth(more: int) -> list[Tensor]:
        count = 50 * more
        step = eye - time / count * torch.diag(P) @ H
        S, R = eye, torch.zeros_like(eye)
        for _ in range(count):
            S, R = step @ S, step @ R + time / count * torch.diag(P)
        return [S.T, R.T]

    expected = ds.extrapolated(truth)
    for actual, limit in zip(ds.preconditioned_exactly(H, time, P), expected, strict=True):
        torch.testing.assert_close(actual, limit, rtol=1e-4, atol=1e-5)
    root = torch.diag(P.sqrt())  # the two forms of the same thing in appendix C
    S = root @ dense.F_S(root @ H @ root, time) @ torch.linalg.inv(root)
    R = root @ dense.F_r(root @ H @ root, time) @ root
    for actual, exact in zip((S.T, R), ds.preconditioned_exactly(H, time, P), strict=True):
        torch.testing.assert_close(actual, exact)


# --- SOURCE ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("segments", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_source(kind: str, segments: int) -> None:
    it = pair("mlp", kind)
    agree(it.source(segments), it.dense.source(it.leg.segments(segments)))


@pytest.mark.parametrize("curvature", ["ekfac", "diagonal"])
@pytest.mark.parametrize(("name", "kind"), [("conv", "adam"), ("gpt", "adamw")])
def test_source_other_layers(name: str, kind: str, curvature: str) -> None:
    """The preconditioner follows the layout of kernels, groups and transposed weights."""
    it = pair(name, kind)
    expected = it.dense.source(it.leg.segments(3), curvature)
    agree(it.source(3, curvature), expected)


@pytest.mark.parametrize("curvature", ["ekfac", "kfac", "diagonal", "identity"])
@pytest.mark.parametrize("fisher", ["exact", "empirical", "sampled"])
@pytest.mark.parametrize("kind", ["adam", "rmsprop"])
def test_source_curvature(kind: str, fisher: str, curvature: str) -> None:
    it = pair("mlp", kind)
    expected = it.dense.source(it.leg.segments(2), curvature, fisher)
    agree(it.source(2, curvature, fisher=fisher, seed=SEED), expected)


@pytest.mark.parametrize("damping", [1e-6, 1e-3, 1.0])
@pytest.mark.parametrize("name", ["mlp", "conv"])
def test_source_damping(name: str, damping: float | str) -> None:
    it = pair(name, "adam")
    expected = it.dense.source(it.leg.segments(2), damping=damping)
    agree(it.source(2, damping=damping), expected)


@pytest.mark.parametrize("curvature", ["ekfac", "diagonal"])
@pytest.mark.parametrize("kind", ["adam", "adamw", "rmsprop-momentum"])
def test_source_weight_decay_as_curvature(kind: str, curvature: str) -> None:
    """L2 is part of the loss, and preconditioned; decoupled weight decay is neither."""
    it = pair("mlp", kind)
    settings: Any = {"weight_decay": "curvature"}
    expected = it.dense.source(it.leg.segments(2), curvature, **settings)
    agree(it.source(2, curvature, **settings), expected)


@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name in MODELS for kind in OPTIMIZERS if name == "mlp" or kind == "adamw"],
)
def test_source_exactly(name: str, kind: str, segments: int) -> None:
    """Appendix C without diagonal curvature and without an inverse, against matrix_exp."""
    it = pair(name, kind)
    expected = it.dense.source(it.leg.segments(segments), exact=True)
    agree(it.source(segments, exact=True), expected)


@pytest.mark.parametrize("curvature", ["kfac", "diagonal", "identity"])
def test_source_exactly_with_other_curvature(curvature: str) -> None:
    it = pair("mlp", "adam")
    agree(
        it.source(2, curvature, exact=True),
        it.dense.source(it.leg.segments(2), curvature, exact=True),
    )


@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_source_exactly_with_damping_and_weight_decay(kind: str) -> None:
    it, settings = pair("mlp", kind), {"damping": 0.1, "weight_decay": "curvature", "exact": True}
    agree(it.source(2, **settings), it.dense.source(it.leg.segments(2), **settings))


@pytest.mark.parametrize(("name", "kind"), [("mlp", "adam"), ("conv", "adamw")])
def test_a_floor_under_the_second_moments(name: str, kind: str) -> None:
    form: Any = {"exact": True}
    it, settings = pair(name, kind), form | {"floor": 0.5}
    expected = it.dense.source(it.leg.segments(2), **settings)
    agree(it.source(2, **settings), expected)
    assert not np.allclose(expected, it.dense.source(it.leg.segments(2), **form), rtol=0.01)


def test_a_floor_is_a_share() -> None:
    for wrong in (-0.1, 1.5, "low"):
        with pytest.raises(ValueError, match=r"floor=.* must be a share, from 0 to 1"):
            whence.Source(floor=wrong)  # type: ignore[arg-type]


def test_source_exactly_in_single_precision_and_in_blocks() -> None:
    it = pair("conv", "adamw")
    method = forms.exact(2, fisher="exact")
    expected = it.dense.source(it.leg.segments(2), exact=True).sum(0)
    actual = method.attribute(it.study, it.query, progress=False).values
    close(actual, expected, 1e-3)
    for row in range(3):  # a query's answer does not depend on its neighbours
        one = TensorDataset(*(t[row : row + 1] for t in it.query.tensors))
        close(method.attribute(it.study, one, **EXACT).values, expected[row : row + 1])


def test_source_self_influence() -> None:
    it = pair("mlp", "adam")
    scores = whence.Source.published(3, fisher="exact").attribute(
        it.study, by_segment=True, **EXACT
    )
    agree(scores, it.dense_self.source(it.leg.segments(3)))


def test_source_in_blocks_of_queries() -> None:
    """What is done to the vectors of one block leaves the next one's alone."""
    it = pair("mlp", "adam")
    expected = it.dense.source(it.leg.segments(3)).sum(0)
    for row in range(3):
        one = TensorDataset(*(t[row : row + 1] for t in it.query.tensors))
        method = whence.Source.published(3, fisher="exact")
        close(
            method.attribute(it.study, one, batch_size=2, **EXACT).values, expected[row : row + 1]
        )


@pytest.mark.parametrize("curvature", ["ekfac", "diagonal"])
def test_source_groups(curvature: str) -> None:
    """A rate of its own for each layer; one that no optimizer has neither learns nor forgets."""
    torch.manual_seed(0)
    model, task, train, query = mlp()
    model.double()
    named = dict(model.named_parameters())
    groups = [["0.weight", "0.bias"], ["4.weight", "4.bias"]]
    settings = [
        {"params": [named[name] for name in names], "lr": rate}
        for names, rate in zip(groups, (0.01, 0.03), strict=True)
    ]
    leg = ds.train(model, task, train, torch.optim.Adam(settings, eps=EPSILON), [4, 8, 12])
    run = whence.Run.from_checkpoints(
        leg.checkpoints,
        leg.steps,
        np.tile([0.01, 0.03], (12, 1)),
        optimizer="adam",
        second_moments=leg.moments,
        epsilon=EPSILON,
        groups=groups,
    )
    study = whence.Study(model, task, train=train, runs=run, layers="matrices")
    oracle = ds.Staged({"train": ds.Stage(model, task, train)}, query, leg.checkpoints[-1])
    method = whence.Source.published(2, curvature, fisher="exact")
    scores = method.attribute(study, query, by_segment=True, **EXACT)
    agree(scores, oracle.source(leg.segments(2), curvature))


@pytest.mark.parametrize(
    "make",
    [
        *OPTIMIZERS.values(),
        lambda p: torch.optim.Adam(p, 0.02, eps=EPSILON, amsgrad=True),
        lambda p: torch.optim.RMSprop(p, 0.02, 0.9, EPSILON, centered=True),
    ],
    ids=[*OPTIMIZERS, "amsgrad", "centered"],
)
def test_source_of_a_recorded_run(tmp_path: Path, make: Any) -> None:
    """The Recorder keeps what the formula needs, bias-corrected; checked on v̂ corrected by hand."""
    torch.manual_seed(0)
    model, task, train, query = mlp()
    optimizer = make(model.double().parameters())
    with whence.Recorder(tmp_path, model, optimizer, checkpoints=[3, 6, 9], total_steps=9):
        leg = ds.train(model, task, train, optimizer, [3, 6, 9], batch_size=6)
    if optimizer.defaults.get("amsgrad"):
        largest = {n: optimizer.state[p]["max_exp_avg_sq"] for n, p in model.named_parameters()}
        leg.moments[-1] = {n: v / (1 - 0.999**9) for n, v in largest.items()}
        segments = [s for s in leg.segments(3) if s.steps == [9]]
    else:
        segments = leg.segments(3)
    study = whence.Study(model, task, train=train, runs=tmp_path, layers="matrices")
    oracle = ds.Staged({"train": ds.Stage(model, task, train)}, query, leg.checkpoints[-1])
    method = whence.Source.published(3, fisher="exact")
    scores = method.attribute(study, query, by_segment=True, **EXACT)
    close(scores.by_segment[-len(segments) :], oracle.source(segments))


# --- limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight_decay", ["ignore", "curvature"])
@pytest.mark.parametrize("damping", [None, 0.1])
@pytest.mark.parametrize("name", ["mlp", "conv"])
def test_sgd_written_as_a_preconditioner_of_one(name: str, damping: Any, weight_decay: str) -> None:
    it = pair(name, "adam")
    ones = {n: torch.full_like(v, (1 - 1e-8) ** 2) for n, v in it.leg.moments[0].items()}
    changes = {"momentum": 0.0, "weight_decay": 0.03}
    actual = []
    for kind in ({"optimizer": "sgd", "second_moments": None}, {"optimizer": "rmsprop"}):
        given = {"second_moments": [ones] * len(STEPS), "epsilon": 1e-8} | kind | changes
        study = whence.Study(
            it.model, it.task, train=it.train, runs=run_of(it.leg, **given), layers="matrices"
        )
        settings = {"damping": damping, "weight_decay": weight_decay}
        method = whence.Source.published(3, "diagonal", "exact", **settings)
        actual.append(method.attribute(study, it.query, by_segment=True, **EXACT))
    close(actual[1].values, actual[0].values, 1e-12)
    close(actual[1].by_segment, actual[0].by_segment, 1e-12)


@pytest.mark.parametrize("damping", [None, 1e-5, 1e-2])
@pytest.mark.parametrize("kind", ["adam", "adamw", "rmsprop"])
def test_long_training_is_influence(kind: str, damping: float | None) -> None:
    """Everything is forgotten but the optimum: (H + λ)⁻¹, with nothing of P left."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    task, train, query = mlp()[1:]
    leg = ds.train(model, task, train, OPTIMIZERS[kind](model.parameters()), [5, 10])
    run = whence.Run.from_checkpoints(
        leg.checkpoints[1:],
        [10],
        1e9,
        optimizer=kind,
        second_moments=leg.moments[1:],
        epsilon=EPSILON,
    )
    study = whence.Study(model, task, train=train, runs=run, layers="matrices")
    source = whence.Source.published(1, damping=damping, fisher="exact")
    influence = whence.Influence.published(1e-8 if damping is None else damping, fisher="exact")
    close(
        source.attribute(study, query, **EXACT).values,
        influence.attribute(study, query, **EXACT).values,
        1e-10,
    )


def test_short_training_is_one_preconditioned_step() -> None:
    """η̄K → 0 of the diagonal form: -(1/N) η̄K ∇fᵀ P̄ ∇L, whatever the curvature."""
    it = pair("mlp", "adam")
    tiny = 1e-9
    run = whence.Run.from_checkpoints(
        it.leg.checkpoints[-1:],
        [18],
        tiny,
        optimizer="adam",
        second_moments=it.leg.moments[-1:],
        epsilon=EPSILON,
    )
    study = whence.Study(it.model, it.task, train=it.train, runs=run, layers="matrices")
    scores = whence.Source.published(1, "diagonal").attribute(study, it.query, **EXACT)
    P = ds.preconditioner(it.model, it.leg.moments[-1:], EPSILON)
    key = it.dense._key(it.leg.checkpoints[-1])
    query = it.dense.gradients(key, "train", "measurements", True)
    train = it.dense.gradients(key, "train", "losses", False)
    expected = -sum(query[n] * P[n] @ train[n].T for n in query) * 18 * tiny / len(it.train)
    close(scores.values, expected)


# --- infinite and zero ----------------------------------------------------------------------------


def dead() -> tuple[Any, ds.Leg]:
    """A unit that never fires, an input that is zero in training but not in the queries, and v̂ = 0
    there, and at some parameters that do have gradients."""
    torch.manual_seed(0)
    model, task, train, query = mlp()
    model.double()
    with torch.no_grad():
        model[0].bias[1] = -100.0
        train.tensors[0][:, 2] = 0.0
    leg = ds.train(model, task, train, OPTIMIZERS["adam"](model.parameters()), [4, 8])
    for moments in leg.moments:
        assert (moments["0.weight"][:, 2] < 1e-2).all()
        moments["0.weight"][:, 2] = 0.0
        moments["0.weight"][1], moments["0.bias"][1] = 0.0, 0.0
        moments["2.weight"][:, 1] = 0.0
        moments["4.weight"][0, 0], moments["4.bias"][1] = 0.0, 1e-40
    leg.settings["weight_decay"] = 0.0
    return (model, task, train, query), leg


@pytest.mark.parametrize("epsilon", [1e-8, 1e-15])
@pytest.mark.parametrize("curvature", ["ekfac", "diagonal"])
@pytest.mark.parametrize("damping", [None, 1e-3])
def test_dead_units_and_empty_second_moments(curvature: str, damping: Any, epsilon: float) -> None:
    (model, task, train, query), leg = dead()
    leg.settings["eps"] = epsilon
    study = whence.Study(model, task, train=train, runs=run_of(leg), layers="matrices")
    method = whence.Source.published(2, curvature, "exact", damping=damping)
    scores = method.attribute(study, query, by_segment=True, **EXACT)
    assert np.isfinite(scores.values).all()
    if damping is None:
        oracle = ds.Staged({"train": ds.Stage(model, task, train)}, query, leg.checkpoints[-1])
        close(scores.by_segment, oracle.source(leg.segments(2), curvature))
    single = method.attribute(study, query, progress=False)
    assert single.values.dtype == np.float32
    assert np.isfinite(single.values).all()
    close(single.values, scores.values, 1e-3 if epsilon == 1e-8 else 0.02)


@pytest.mark.parametrize("damping", [None, 1e-3])
@pytest.mark.parametrize("name", ["mlp", "conv"])
def test_float32(name: str, damping: Any) -> None:
    """(I - E) v has parts in the null space of H, where λ = 1e-8 is all there is to divide by; no
    training gradient has any, and they must not come in as rounding errors."""
    it = pair(name, "adam")
    method = whence.Source.published(2, fisher="exact", damping=damping)
    scores = method.attribute(it.study, it.query, progress=False)
    assert scores.values.dtype == np.float32
    close(scores.values, it.dense.source(it.leg.segments(2), damping=damping).sum(0), 1e-3)


@pytest.mark.parametrize("curvature", ["ekfac", "diagonal"])
def test_infinite_preconditioners_are_finite_or_refused(curvature: str) -> None:
    (model, task, train, query), leg = dead()
    leg.settings["eps"] = 0.0
    study = whence.Study(model, task, train=train, runs=run_of(leg), layers="matrices")
    try:
        scores = whence.Source.published(2, curvature, "exact").attribute(study, query, **EXACT)
    except ValueError as error:
        assert "eps" in str(error)
        return
    assert np.isfinite(scores.values).all()


def test_no_curvature_at_all() -> None:
    """A loss that is linear in the outputs: H = 0, E = 1, and the diagonal form is η̄K P̄."""

    class Linear(whence.Task):
        def losses(self, outputs: Tensor, batch: Any) -> Tensor:
            return outputs[:, 0] * batch[1]

        def measurements(self, outputs: Tensor, batch: Any) -> Tensor:
            return outputs[:, 1]

    torch.manual_seed(0)
    model, train, query = models.mlp((4, 3, 2)).double(), models.vectors(), models.vectors(3)
    leg = ds.train(model, Linear(), train, OPTIMIZERS["rmsprop"](model.parameters()), [4])
    study = whence.Study(model, Linear(), train=train, runs=run_of(leg), layers="matrices")
    for curvature in ("diagonal", "ekfac"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scores = whence.Source.published(1, curvature, "exact").attribute(study, query, **EXACT)
        assert np.isfinite(scores.values).all()
        if curvature == "diagonal":
            oracle = ds.Staged(
                {"train": ds.Stage(model, Linear(), train)}, query, leg.checkpoints[-1]
            )
            key = oracle._key(leg.checkpoints[-1])
            v = oracle.gradients(key, "train", "measurements", True)
            g = oracle.gradients(key, "train", "losses", False)
            P = ds.preconditioner(model, leg.moments, EPSILON)
            expected = -sum(v[n] * P[n] @ g[n].T for n in v) * 4 * 0.01 / len(train)
            close(scores.values, expected)


# --- influence functions --------------------------------------------------------------------------


@pytest.mark.parametrize("curvature", ["ekfac", "diagonal"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_influence_damped_by_the_preconditioner(kind: str, curvature: str) -> None:
    """(H + λ P̄⁻¹)⁻¹ with λ = 1/(η̄K), the last equation of appendix C."""
    it = pair("mlp", kind)
    expected = it.dense.influence("source", curvature, segments=it.leg.segments(1))
    close(it.influence("source", curvature).values, expected)


def test_influence_damped_by_the_preconditioner_of_a_convolution() -> None:
    it = pair("conv", "adam")
    expected = it.dense.influence("source", segments=it.leg.segments(1))
    close(it.influence("source").values, expected)


@pytest.mark.parametrize("kind", ["adam", "rmsprop"])
def test_influence_with_a_number_knows_nothing_of_the_optimizer(kind: str) -> None:
    it = pair("mlp", kind)
    close(it.influence(1e-3).values, it.dense.influence(1e-3))


# --- against real training ------------------------------------------------------------------------


class Orthogonal:
    """Linear regression whose columns are orthogonal, with the ones of the bias too: H is diagonal,
    EK-FAC is exact, and so must the mixed formula be, but for its damping."""

    size, queries = 8, 3
    D = (0.7, 1.3, 0.4, 2.0)  # the last is the bias: the loss is (f - y)²
    task = whence.Regression("mse", "output")

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(0)
        ones = torch.ones(self.size, 1, dtype=torch.float64)
        columns = torch.randn(self.size, 3, generator=g, dtype=torch.float64)
        basis = torch.linalg.qr(torch.cat([ones, columns], 1))[0]
        basis = basis * basis[0, 0].sign()
        scales = (torch.tensor(self.D[:3], dtype=torch.float64) * self.size / 2).sqrt()
        self.inputs = torch.cat([basis[:, 1:] * scales, ones], 1)
        self.targets = torch.randn(self.size, generator=g, dtype=torch.float64)
        self.query = torch.randn(self.queries, 4, generator=g, dtype=torch.float64)
        self.query[:, 3] = 1
        self.hessian = 2 * self.inputs.T @ self.inputs / self.size
        self.optimum = torch.linalg.lstsq(self.inputs, self.targets[:, None]).solution[:, 0]

    def state(self, theta: Tensor) -> dict[str, Tensor]:
        return {"weight": theta[None, :3].clone(), "bias": theta[3:].clone()}

    def scores(self, thetas: list[Tensor], steps: list[int], rates: Any, **run: Any) -> Any:
        method = run.pop("method")
        run["second_moments"] = [self.state(v) for v in run["second_moments"]]
        run = whence.Run.from_checkpoints([self.state(t) for t in thetas], steps, rates, **run)
        model = nn.Linear(3, 1).double()
        data = TensorDataset(self.inputs[:, :3], self.targets[:, None])
        query = TensorDataset(self.query[:, :3], torch.zeros(self.queries, 1, dtype=torch.float64))
        study = whence.Study(model, self.task, train=data, runs=run, layers="matrices")
        return method.attribute(study, query, **EXACT).values

    def truth(self, update: Any, count: int, start: Tensor) -> Tensor:
        def after(more: int) -> list[Tensor]:
            leg = ds.Descent(
                self.inputs, self.targets, lambda k, t, g: update(k, t, g, more), count * more
            )
            return ds.unrolled(start, [leg], self.query)[0]

        return ds.extrapolated(after)[0]


def moments_of(P: Tensor, epsilon: float) -> Tensor:
    return (1 / P - epsilon).square()


METHODS = {
    "mixed": lambda **s: whence.Source.published(2, fisher="exact", **s),
    "diagonal": lambda **s: whence.Source.published(2, "diagonal", "exact", **s),
}


@pytest.mark.parametrize("form", METHODS)
def test_exact_for_a_diagonal_hessian(form: str) -> None:
    """A preconditioner that changes from one half to the other. At the optimum every example's
    gradient is constant, so that segments are truly stationary."""
    it = Orthogonal()
    torch.testing.assert_close(it.hessian, torch.diag(torch.tensor(it.D, dtype=torch.float64)))
    P = torch.tensor([[2.0, 0.3, 1.0, 0.5], [0.5, 1.5, 0.1, 3.0]], dtype=torch.float64)
    count, rate = 20, 0.05

    def update(k: int, theta: Tensor, gradient: Tensor, more: int) -> Tensor:
        return theta - rate / more * P[k // (count // 2 * more)] * gradient

    truth = it.truth(update, count, it.optimum)
    scores = it.scores(
        [it.optimum] * 2,
        [count // 2, count],
        rate,
        optimizer="rmsprop",
        second_moments=[moments_of(p, EPSILON) for p in P],
        epsilon=EPSILON,
        method=METHODS[form](),
    )
    close(scores, truth, 1e-4)


@pytest.mark.parametrize("form", METHODS)
def test_the_mean_preconditioner_is_the_mean_of_preconditioners(form: str) -> None:
    """Training with two of them by turns is training with their mean, not with 1/√(mean v̂)."""
    it = Orthogonal()
    P = torch.tensor([[4.0, 0.1, 1.0, 0.2], [0.5, 1.5, 0.1, 3.0]], dtype=torch.float64)
    count, rate = 20, 0.05

    def update(k: int, theta: Tensor, gradient: Tensor, more: int) -> Tensor:
        return theta - rate / more * P[k % 2] * gradient

    truth = it.truth(update, count, it.optimum)
    scores = it.scores(
        [it.optimum] * 4,
        [5, 10, 15, 20],
        rate,
        optimizer="adam",
        second_moments=[moments_of(p, EPSILON) for p in P] * 2,
        epsilon=EPSILON,
        method=METHODS[form](),
    )
    close(scores, truth, 1e-3)


@pytest.mark.parametrize("form", METHODS)
@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_exact_with_weight_decay_in_the_dynamics(kind: str, form: str) -> None:
    it = Orthogonal()
    P = torch.tensor([2.0, 0.3, 1.0, 0.5], dtype=torch.float64)
    H, count, rate, decay = it.hessian, 20, 0.05, 0.4
    # where the update comes to rest: P H (θ - θ*) + decay θ = 0, decay preconditioned if it is L2
    pull = decay * (torch.eye(4, dtype=torch.float64) if kind == "adam" else torch.diag(1 / P))
    start = torch.linalg.solve(H + pull, H @ it.optimum)

    def update(k: int, theta: Tensor, gradient: Tensor, more: int) -> Tensor:
        return theta - rate / more * P * (gradient + pull @ theta)

    truth = it.truth(update, count, start)
    common = {"second_moments": [moments_of(P, EPSILON)] * 2, "epsilon": EPSILON}
    common |= {"optimizer": kind, "weight_decay": decay}
    given = [start] * 2, [count // 2, count], rate
    method = METHODS[form](weight_decay="curvature")
    close(it.scores(*given, **common, method=method), truth, 1e-4)
    without = it.scores(*given, **common, method=METHODS[form]())
    assert abs(without - truth.numpy()).max() > 0.05 * abs(truth).max()


def test_the_recorder_and_real_adam_on_a_small_problem(tmp_path: Path) -> None:
    """Adam as torch does it, differentiated by removing examples: signs, scales and 1/N."""
    it = Orthogonal()
    data = TensorDataset(it.inputs[:, :3], it.targets[:, None])
    query = TensorDataset(it.query[:, :3], torch.zeros(it.queries, 1, dtype=torch.float64))

    def final(weights: Tensor, path: Path | None = None) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(3, 1).double()
        optimizer = torch.optim.Adam(model.parameters(), 2e-3, (0.9, 0.9999), 10.0)

        def loop() -> None:
            for _ in range(300):
                optimizer.zero_grad()
                losses = it.task.losses(model(data.tensors[0]), data.tensors)
                (weights * losses).mean().backward()
                optimizer.step()

        if path:
            with whence.Recorder(path, model, optimizer, checkpoints=20, total_steps=300):
                loop()
        else:
            loop()
        return model(query.tensors[0]).detach()[:, 0]

    ones, small = torch.ones(it.size, dtype=torch.float64), 1e-4
    final(ones, tmp_path)
    truth = torch.stack(
        [
            (final(ones + small * unit) - final(ones - small * unit)) / (2 * small)
            for unit in torch.eye(it.size, dtype=torch.float64)
        ],
        1,
    )
    study = whence.Study(
        nn.Linear(3, 1).double(), it.task, train=data, runs=tmp_path, layers="matrices"
    )
    for form in METHODS.values():
        scores = form().attribute(study, query, **EXACT)
        # ε = 10 keeps P nearly constant; what is left is momentum's start and two segments
        close(scores.values, truth, 0.1)


# --- bad input ------------------------------------------------------------------------------------


def refused(run: whence.Run, method: Any = None) -> str:
    it = pair("mlp", "adam")
    study = whence.Study(it.model, it.task, train=it.train, runs=run, layers="matrices")
    with pytest.raises(ValueError) as caught:
        (method or whence.Source.published(2)).attribute(study, it.query, **EXACT)
    return str(caught.value)


METHODS_OF_P = [
    lambda: whence.Source.published(2),
    lambda: whence.Source.published(2, "diagonal"),
    lambda: whence.FastSource.published(2),
    lambda: whence.Influence.published("source"),
]


@pytest.mark.parametrize("kind", ["adam", "adamw", "rmsprop"])
@pytest.mark.parametrize("method", METHODS_OF_P, ids=["source", "diagonal", "fast", "influence"])
def test_preconditioned_without_second_moments(kind: str, method: Any) -> None:
    leg = pair("mlp", "adam").leg
    said = refused(run_of(leg, optimizer=kind, second_moments=None), method())
    assert kind in said.lower()
    assert "second_moments" in said or "second moments" in said


def test_second_moments_missing_at_one_checkpoint() -> None:
    leg = pair("mlp", "adam").leg
    moments = [*leg.moments[:3], None, *leg.moments[4:]]
    said = refused(run_of(leg, second_moments=moments))
    assert str(STEPS[3]) in said
    assert "second_moments" in said or "second moments" in said


def test_second_moments_missing_for_one_parameter() -> None:
    leg = pair("mlp", "adam").leg
    held = copy.deepcopy(leg.moments)
    for moments in held:
        del moments["2.weight"]
    assert "2.weight" in refused(run_of(leg, second_moments=held))


def test_second_moments_of_another_shape() -> None:
    leg = pair("mlp", "adam").leg
    moments = copy.deepcopy(leg.moments)
    moments[1]["2.weight"] = moments[1]["2.weight"].T[:, :2].clone()
    assert "2.weight" in refused(run_of(leg, second_moments=moments))


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_second_moments_that_are_no_second_moments(value: float) -> None:
    leg = pair("mlp", "adam").leg
    moments = copy.deepcopy(leg.moments)
    moments[1]["2.weight"][0, 0] = value
    assert "2.weight" in refused(run_of(leg, second_moments=moments))


@pytest.mark.parametrize("name", ["Adafactor", "Muon", "AdamW8bit", "Adam8bit", "Lion", "SOAP"])
@pytest.mark.parametrize("method", METHODS_OF_P, ids=["source", "diagonal", "fast", "influence"])
def test_optimizers_that_are_not_understood(name: str, method: Any) -> None:
    """By name, with what is missing, and what would work."""
    leg = pair("mlp", "adam").leg
    said = refused(run_of(leg, optimizer=name, second_moments=None), method())
    assert name in said
    assert any(word in said for word in ("second_moments", "second moments", "preconditioner"))
    assert "TracIn" in said or "Influence" in said


def test_influence_and_tracin_still_work_there() -> None:
    it = pair("mlp", "adam")
    run = run_of(it.leg, optimizer="Adafactor", second_moments=None)
    study = whence.Study(it.model, it.task, train=it.train, runs=run, layers="matrices")
    scores = whence.Influence.published(1e-3, fisher="exact").attribute(study, it.query, **EXACT)
    close(scores.values, it.dense.influence(1e-3))
    assert np.isfinite(whence.TracIn().attribute(study, it.query, **EXACT).values).all()


@pytest.mark.parametrize("damping", ["source", "P", -1.0, float("nan")])
def test_damping_that_is_not_understood(damping: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="damping"):
        whence.Source.published(2, damping=damping)
