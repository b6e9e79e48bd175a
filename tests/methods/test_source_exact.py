"""Scores against the dense float64 brute force of dense.py, through the public names only."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from support import dense, models
from support.comparing import close
from torch import nn

import whence
import whence.task

STEPS = [2, 5, 9, 12, 16, 18]
SEED = 3
EXACT = {"dtype": torch.float64, "progress": False}


def rate(step: int) -> float:
    return 0.2 / (1 + step / 5)


def text_case(task: Any, **kind: Any) -> Callable[[], Any]:
    return lambda: (
        models.Transformer(**kind),
        task,
        models.documents(),
        models.documents(3, seed=1),
    )


def vector_case(model: Callable[[], nn.Module], task: Any = None) -> Callable[[], Any]:
    task = task or whence.Classification()
    return lambda: (model(), task, models.vectors(), models.vectors(3, seed=1))


def regression_case(outputs: int, task: Any) -> Callable[[], Any]:
    data = (models.regression(12, outputs=outputs), models.regression(3, outputs=outputs, seed=1))
    return lambda: (models.mlp((4, 5, outputs)), task, *data)


def image_case(bias: bool) -> Callable[[], Any]:
    data = models.images(), models.images(3, seed=1)
    return lambda: (models.ConvNet(bias), whence.Classification(), *data)


def binary() -> Any:
    data = models.vectors(classes=2), models.vectors(3, classes=2, seed=1)
    return models.mlp((4, 5, 1)), whence.Classification(), *data


CASES: dict[str, Callable[[], Any]] = {
    "mlp": vector_case(models.mlp),
    "mlp-no-bias": vector_case(lambda: models.mlp(bias=False)),
    "conv": image_case(True),
    "conv-no-bias": image_case(False),
    "gpt-tied": text_case(whence.LanguageModeling()),
    "gpt-sum": text_case(whence.LanguageModeling("sum", "log_prob"), tied=False, depth=2),
}
TASKS: dict[str, Callable[[], Any]] = {
    "loss": vector_case(models.mlp, whence.Classification("loss")),
    "log_prob": vector_case(models.mlp, whence.Classification("log_prob")),
    "binary": binary,
    "mse": regression_case(1, whence.Regression()),
    "mse-3": regression_case(3, whence.Regression(measurement="loss")),
    "half_mse-2": regression_case(2, whence.Regression("half_mse", "output")),
}
SHARED = {"twice": vector_case(models.UsedTwice), "tied": vector_case(models.Tied)}
MAIN = ["mlp", "conv", "gpt-tied"]


def uniform(example: int, step: int) -> Any:
    return whence.task.Uniform(SEED, step, [example])


class Pair:
    """The library's study of a small training, and the brute force on the same."""

    def __init__(self, model: nn.Module, task: Any, train: Any, query: Any) -> None:
        kind = {"momentum": 0.5, "dampening": 0.25, "weight_decay": 0.05, "batch_size": 4}
        history = models.train_run(model, task, train, STEPS, rate, **kind)
        self.query = query
        self.study = whence.Study(model, task, train=train, runs=history.run, layers="matrices")
        self.dense = dense.Dense(model, task, train, history, query, uniform)
        self.dense_self = dense.Dense(model, task, train, history, None, uniform)
        # the moments are those of the training data, whoever asks
        self.dense_self.moments = self.dense.moments


@cache
def pair(name: str) -> Pair:
    torch.manual_seed(0)
    return Pair(*(CASES | TASKS | SHARED)[name]())


# --- the oracle itself --------------------------------------------------------------------------

ALL = [*CASES, *TASKS, *SHARED]


@pytest.mark.parametrize("name", ALL)
def test_oracle_gradients_are_autograds(name: str) -> None:
    oracle = pair(name).dense
    model, task, weights = oracle.model, oracle.task, oracle.history.checkpoints[-1]
    actual = dense.per_example_gradients(model, weights, task, "losses", oracle.train)
    parameters = dict(model.named_parameters())
    for index, batch in enumerate(dense.examples(oracle.train)):
        loss = task.losses(task.outputs(model, batch), batch).sum()
        plain = torch.autograd.grad(loss, list(parameters.values()))
        for key, block in dense.matrices(model, dict(zip(parameters, plain, strict=True))).items():
            torch.testing.assert_close(actual[key][index], block, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ALL)
def test_oracle_curvature_is_consistent(name: str) -> None:
    """Outer products of a and s are autograd's gradients; columns make up the Gauss-Newton."""
    oracle = pair(name).dense
    model, task, weights = oracle.model, oracle.task, oracle.history.checkpoints[-1]
    parameters, outputs = dense.functional(model, weights, task)
    batch = next(dense.examples(oracle.train))
    out, pull_back = torch.func.vjp(lambda p: outputs(p, batch), parameters)
    column = torch.randn_like(out)
    gradients = dense.matrices(model, pull_back(column)[0])
    pairs = dense.inputs_and_gradients(model, task, batch, column[None])
    for key, (a, s) in pairs.items():
        torch.testing.assert_close(s[0].T @ a, gradients[key], rtol=1e-10, atol=1e-12)
    gauss_newton = dense.exact_gauss_newton(model, weights, task, oracle.train)
    summed = dense.dense_curvature("gauss-newton", [oracle.moments(len(STEPS) - 1, "exact")])
    for key, expected in gauss_newton.items():
        torch.testing.assert_close(summed[key], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("outputs", [1, 3])
def test_oracle_ekfac_is_exact_for_linear_regression(outputs: int) -> None:
    """Inputs and output gradients are independent there, and H is the true Hessian."""
    model, task = models.mlp((4, outputs)).double(), whence.Regression()
    data, weights = models.regression(outputs=outputs), model.state_dict()
    moments = dense.moments(model, weights, task, dense.exact(task), data)
    parameters, out = dense.functional(model, weights, task)
    batch = dense.batch_of(data)

    def cost(flat: torch.Tensor) -> torch.Tensor:
        matrix = flat.view(outputs, 5)
        values = {"0.weight": matrix[:, :4], "0.bias": matrix[:, 4]}
        return task.losses(out(values, batch), batch).mean()

    matrix = torch.cat([parameters["0.weight"], parameters["0.bias"][:, None]], 1)
    hessian = torch.func.hessian(cost)(matrix.flatten())
    for kind in ("gauss-newton", "ekfac", "kfac"):
        torch.testing.assert_close(dense.dense_curvature(kind, [moments])["0"], hessian)


def test_oracle_matrix_functions() -> None:
    basis = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64))[0]
    values = torch.tensor([0, 1e-9, 1e-3, 1.0, 30, 1e3], dtype=torch.float64)
    H, time = basis @ torch.diag(values) @ basis.T, 7.0
    integral = (-torch.expm1(-time * values) / values).nan_to_num(nan=time)
    for actual, expected in ((dense.F_r, integral), (dense.F_S, torch.exp(-time * values))):
        expected = basis @ torch.diag(expected) @ basis.T
        torch.testing.assert_close(actual(H, time), expected, rtol=1e-9, atol=1e-11)
    # the finite sum it stands for: Σ_k η (I - ηH)^k over many small steps
    small, eye = H / 1e3, torch.eye(6, dtype=torch.float64)
    count = 20_000
    step = eye - time / count * small
    product, total = eye, torch.zeros_like(eye)
    for _ in range(count):
        total, product = total + time / count * product, product @ step
    torch.testing.assert_close(dense.F_r(small, time), total, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(dense.F_S(small, time), product, rtol=1e-3, atol=1e-3)


# --- SOURCE -------------------------------------------------------------------------------------


@pytest.mark.parametrize("segments", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_source(name: str, segments: int) -> None:
    it = pair(name)
    method = whence.Source.published(segments=segments, fisher="exact")
    scores = method.attribute(it.study, it.query, by_segment=True, **EXACT)
    expected = it.dense.source(segments)
    close(scores.values, expected.sum(0))
    close(scores.by_segment, expected)


@pytest.mark.parametrize("curvature", ["ekfac", "kfac", "diagonal", "identity"])
@pytest.mark.parametrize("fisher", ["exact", "empirical", "sampled"])
@pytest.mark.parametrize("name", MAIN)
def test_source_curvature(name: str, curvature: str, fisher: str) -> None:
    it = pair(name)
    method = whence.Source.published(segments=2, curvature=curvature, fisher=fisher, seed=SEED)
    scores = method.attribute(it.study, it.query, **EXACT)
    close(scores.values, it.dense.source(2, curvature, fisher).sum(0))


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("fisher", ["exact", "sampled"])
def test_source_tasks(name: str, fisher: str) -> None:
    it = pair(name)
    method = whence.Source.published(segments=3, fisher=fisher, seed=SEED)
    scores = method.attribute(it.study, it.query, **EXACT)
    close(scores.values, it.dense.source(3, fisher=fisher).sum(0))


@pytest.mark.parametrize("fisher", ["exact", "empirical", "sampled"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_source_language(reduction: str, fisher: str) -> None:
    torch.manual_seed(1)
    it = Pair(*text_case(whence.LanguageModeling(reduction), tied=False)())
    method = whence.Source.published(segments=2, fisher=fisher, seed=SEED)
    scores = method.attribute(it.study, it.query, **EXACT)
    close(scores.values, it.dense.source(2, fisher=fisher).sum(0))


def test_source_given_segments() -> None:
    it = pair("mlp")
    scores = whence.Source.published(segments=[5, 18], fisher="exact").attribute(
        it.study, it.query, **EXACT
    )
    history = it.dense.history
    first, second = [0, 1], [2, 3, 4, 5]
    parts, start = [], 0
    for members, end in ((first, 5), (second, 18)):
        H = dense.dense_curvature("ekfac", [it.dense.moments(c, "exact") for c in members])
        each = [it.dense.gradients(c, "losses", False) for c in members]
        mean = {key: sum(g[key] for g in each) / len(each) for key in each[0]}
        time = sum(history.rates[start:end]) * (1 - 0.25) / (1 - 0.5)
        parts.append(dense.Segment(H, mean, time))
        start = end
    query = it.dense.gradients(it.dense.last, "measurements", True)
    close(scores.values, dense.source(query, parts, len(it.dense.train)).sum(0))


def test_source_weight_decay_as_curvature() -> None:
    it = pair("mlp")
    method = whence.Source.published(segments=2, fisher="exact", weight_decay="curvature")
    scores = method.attribute(it.study, it.query, **EXACT)
    close(scores.values, it.dense.source(2, weight_decay="curvature").sum(0))


def test_source_sampled_draws_follow_the_step() -> None:
    """Checkpoints with the same weights at other steps have draws of their own."""
    torch.manual_seed(0)
    model, task, train, query = CASES["mlp"]()
    history = models.stationary(model.double(), [2, 3, 7, 8], 0.1)
    oracle = dense.Dense(model, task, train, history, query, uniform)
    study = whence.Study(model, task, train=train, runs=history.run, layers="matrices")
    scores = whence.Source.published(2, fisher="sampled", seed=SEED).attribute(
        study, query, **EXACT
    )
    close(scores.values, oracle.source(2, fisher="sampled").sum(0))
    method = whence.Influence.published(
        1e-3, fisher="sampled", seed=SEED
    )  # with what Source left in store
    scores = method.attribute(study, query, **EXACT)
    close(scores.values, oracle.influence(1e-3, fisher="sampled"))


def test_source_stages() -> None:
    """Each segment with its own stage's data: -(1/N_1) ∇fᵀ S̄_2 r̄_1 and -(1/N_2) ∇fᵀ r̄_2."""
    torch.manual_seed(0)
    model, task, query = models.mlp(), whence.Classification(), models.vectors(3, seed=1)
    data = {"before": models.vectors(10, seed=2), "after": models.vectors(7, seed=3)}
    history = models.train_run(model, task, data["before"], [4, 8, 12], 0.2)
    after = models.train_run(model, task, data["after"], [3, 6], 0.1)
    history.checkpoints += after.checkpoints
    history.steps += [12 + step for step in after.steps]
    history.rates += after.rates
    run = whence.Run.from_checkpoints(
        history.checkpoints,
        history.steps,
        history.rates,
        stages={"before": 12, "after": 18},
        sizes={"before": 10, "after": 7},
    )
    study = whence.Study(model, task, train=data, runs=run, layers="matrices")
    method = whence.Source.published("stages", fisher="exact")
    scores = method.attribute(study, query, by_segment=True, **EXACT)

    parts = []
    for name, members, columns in (
        ("before", [0, 1, 2], slice(0, 10)),
        ("after", [3, 4], slice(10, 17)),
    ):
        oracle = dense.Dense(model, task, data[name], history, query)
        H = dense.dense_curvature("ekfac", [oracle.moments(c, "exact") for c in members])
        each = [oracle.gradients(c, "losses", False) for c in members]
        gradients = {}
        for key in each[0]:
            mean = sum(g[key] for g in each) / len(each) / len(data[name])
            gradients[key] = mean.new_zeros(17, mean.shape[1])
            gradients[key][columns] = mean
        parts.append(dense.Segment(H, gradients, {"before": 12 * 0.2, "after": 6 * 0.1}[name]))
    expected = dense.source(oracle.gradients(4, "measurements", True), parts, 1)
    close(scores.by_segment, expected)
    close(scores.values, expected.sum(0))
    assert list(scores.stage) == ["before"] * 10 + ["after"] * 7
    one = whence.Source.published("stages", fisher="exact", stage="before")
    close(one.attribute(study, query, **EXACT).values, expected.sum(0)[:, :10])


def test_a_run_on_a_subset() -> None:
    """N, curvature and gradients are those of the examples really used."""
    torch.manual_seed(0)
    model, task, whole = models.mlp(), whence.Classification(), models.vectors(15)
    query, used = models.vectors(3, seed=1), [1, 2, 5, 7, 8, 11, 13, 14]
    part = torch.utils.data.Subset(whole, used)
    history = models.train_run(model, task, part, [4, 8], 0.2)
    run = whence.Run.from_checkpoints(
        history.checkpoints, history.steps, history.rates, subset=used
    )
    study = whence.Study(model, task, train=whole, runs=run, layers="matrices")
    oracle = dense.Dense(model, task, part, history, query)
    scores = whence.Source.published(2, fisher="exact").attribute(study, query, **EXACT)
    columns = [list(scores.train_ids).index(example) for example in used]
    close(scores.values[:, columns], oracle.source(2).sum(0))
    scores = whence.Influence.published(1e-3, fisher="exact").attribute(study, query, **EXACT)
    close(scores.values[:, columns], oracle.influence(1e-3))


# --- influence functions, TracIn ----------------------------------------------------------------


@pytest.mark.parametrize("damping", [1e-8, 1e-5, 1e-2, 1.0, "source"])
@pytest.mark.parametrize("name", CASES)
def test_influence(name: str, damping: float | str) -> None:
    it = pair(name)
    method = whence.Influence.published(damping=damping, fisher="exact")
    scores = method.attribute(it.study, it.query, **EXACT)
    close(scores.values, it.dense.influence(damping))


@pytest.mark.parametrize("curvature", ["ekfac", "kfac", "diagonal", "identity"])
@pytest.mark.parametrize("fisher", ["exact", "empirical", "sampled"])
@pytest.mark.parametrize("name", MAIN)
def test_influence_curvature(name: str, curvature: str, fisher: str) -> None:
    it = pair(name)
    method = whence.Influence.published(damping=1e-3, curvature=curvature, fisher=fisher, seed=SEED)
    scores = method.attribute(it.study, it.query, **EXACT)
    close(scores.values, it.dense.influence(1e-3, curvature, fisher))


@pytest.mark.parametrize("name", [*CASES, *TASKS])
def test_tracin(name: str) -> None:
    it = pair(name)
    scores = whence.TracIn().attribute(it.study, it.query, **EXACT)
    close(scores.values, it.dense.tracin())


@pytest.mark.parametrize("name", MAIN)
def test_self_influence(name: str) -> None:
    it = pair(name)
    scores = whence.Source.published(segments=3, fisher="exact").attribute(it.study, **EXACT)
    close(scores.values, it.dense_self.source(3).sum(0))
    scores = whence.Influence.published(damping=1e-3, fisher="exact").attribute(it.study, **EXACT)
    close(scores.values, it.dense_self.influence(1e-3))
    close(whence.TracIn().attribute(it.study, **EXACT).values, it.dense_self.tracin())


# --- unusual layers -----------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "layer"), [("twice", "fc"), ("tied", "one")])
def test_shared_weights_are_exact_or_refused(name: str, layer: str) -> None:
    it = pair(name)
    try:
        actual = {
            "source": whence.Source.published(2, fisher="exact").attribute(
                it.study, it.query, **EXACT
            ),
            "influence": whence.Influence.published(1e-3, fisher="exact").attribute(
                it.study, it.query, **EXACT
            ),
            "tracin": whence.TracIn().attribute(it.study, it.query, **EXACT),
        }
    except (ValueError, TypeError, NotImplementedError) as error:
        assert layer in str(error)
        return
    close(actual["source"].values, it.dense.source(2).sum(0))
    close(actual["influence"].values, it.dense.influence(1e-3))
    close(actual["tracin"].values, it.dense.tracin())


@pytest.mark.parametrize(
    ("kind", "layer"), [(models.Attentive, "attention"), (models.Subclassed, "odd")]
)
def test_unknown_layers_are_left_out_by_name_or_refused(kind: Any, layer: str) -> None:
    torch.manual_seed(0)
    it = Pair(*vector_case(kind)())
    method = whence.Source.published(2, fisher="exact")
    try:
        scores = method.attribute(it.study, it.query, **EXACT)
    except (ValueError, TypeError, NotImplementedError) as error:
        assert layer in str(error)
        return
    assert layer in str(scores.excluded)
    close(scores.values, it.dense.source(2).sum(0))


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    groups=st.sampled_from([1, 2]),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    padding=st.one_of(
        st.tuples(st.integers(0, 2), st.integers(0, 2)), st.sampled_from(["same", "valid"])
    ),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    mode=st.sampled_from(["zeros", "circular", "reflect", "replicate"]),
    bias=st.booleans(),
)
def test_any_convolution(
    groups: int, kernel: Any, stride: Any, padding: Any, dilation: Any, mode: str, bias: bool
) -> None:
    if padding == "same":
        stride = (1, 1)
    pads = (0, 0) if padding == "valid" else padding
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    assume(padding == "same" or all(r < 4 + 2 * p for r, p in zip(reach, pads, strict=True)))
    torch.manual_seed(0)
    shape = {"groups": groups, "stride": stride, "padding": padding, "dilation": dilation}
    layer = nn.Conv2d(2, 4, kernel, **shape, padding_mode=mode, bias=bias)
    model = nn.Sequential(layer, nn.ReLU(True), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model.append(nn.Linear(4, 3)).double()
    task, train, query = whence.Classification(), models.images(6), models.images(2, seed=1)
    history = models.stationary(model, [10], 0.3)
    study = whence.Study(model, task, train=train, runs=history.run, layers="matrices")
    oracle = dense.Dense(model, task, train, history, query)
    scores = whence.Source.published(1, fisher="exact").attribute(study, query, **EXACT)
    close(scores.values, oracle.source(1).sum(0))


def test_positions_in_several_axes() -> None:
    """A Linear on (n, t, u, i)."""

    class Grid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.head = nn.Linear(4, 3), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.tanh(self.mix(x)).mean((1, 2)))

    torch.manual_seed(0)
    it = Pair(Grid(), whence.Classification(), models.images(), models.images(3, seed=1))
    scores = whence.Source.published(2, fisher="exact").attribute(it.study, it.query, **EXACT)
    close(scores.values, it.dense.source(2).sum(0))


def test_curvature_follows_a_loss_that_a_subclass_changes() -> None:
    class Weighted(whence.Classification):
        def losses(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
            return (1 + self.labels(batch)) * super().losses(outputs, batch)

    torch.manual_seed(0)
    task, outputs = Weighted(), torch.randn(5, 3, dtype=torch.float64)
    batch = (None, torch.tensor([0, 1, 2, 2, 1]))
    factor = task.output_factor(outputs, batch)
    for row, label, actual in zip(outputs, batch[1], factor @ factor.mT, strict=True):
        one = (None, label.reshape(1))
        hessian = torch.func.hessian(lambda z, one=one: task.losses(z.unsqueeze(0), one)[0])(row)
        torch.testing.assert_close(actual, hessian, rtol=1e-8, atol=1e-10)
    # and the draws have that covariance
    many = outputs[:1].repeat(40_000, 1).requires_grad_()
    twos = (None, torch.full((40_000,), 2))
    uniform = torch.rand(40_000, 3, dtype=torch.float64)
    (drawn,) = torch.autograd.grad(task.pseudo_losses(many, twos, uniform).sum(), many)
    p = outputs[0].softmax(0)
    wanted = 3 * (p.diag() - torch.outer(p, p))
    torch.testing.assert_close(drawn.T @ drawn / 40_000, wanted, rtol=0, atol=0.03)
