"""What must hold whatever the numbers are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr
from support import dense, models
from support.comparing import close
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Subset

import whence
import whence.task

EXACT = {"dtype": torch.float64, "progress": False}
METHODS: dict[str, Callable[[], Any]] = {
    "source": lambda: whence.Source.published(segments=2, fisher="exact"),
    "source-whole": lambda: whence.Source.published(segments=2, curvature="gauss-newton"),
    "influence": lambda: whence.Influence.published(damping=1e-3, fisher="exact"),
    "tracin": whence.TracIn,
}
each_method = pytest.mark.parametrize("method", METHODS)


def trained(
    model: nn.Module | None = None, ends: tuple[int, ...] = (4, 8, 12, 16), **options: Any
) -> tuple[nn.Module, models.History]:
    torch.manual_seed(0)
    model = model or models.mlp()
    task, data = whence.Classification(), models.vectors()
    return model, models.train_run(model, task, data, list(ends), 0.2, 0.5, **options)


def values(
    method: Any, model: nn.Module, history: models.History, train: Any, query: Any, **options: Any
) -> np.ndarray:
    task = options.pop("task", None) or whence.Classification()
    study = whence.Study(model, task, train=train, runs=history.run)
    return method.attribute(study, query, **(EXACT | options)).values


TRAIN, QUERY = models.vectors(), models.vectors(3, seed=1)

# --- mathematics --------------------------------------------------------------------------------


@pytest.mark.parametrize("curvature", ["ekfac", "kfac", "diagonal", "identity"])
def test_splitting_a_stationary_segment_changes_nothing(curvature: str) -> None:
    torch.manual_seed(0)
    model = models.mlp().double()
    history = models.stationary(model, [3, 4, 11, 12, 20, 29], 0.3)
    history.rates = [0.5 / (1 + step) for step in range(29)]
    actual = [
        values(
            whence.Source.published(segments, curvature, fisher="exact"),
            model,
            history,
            TRAIN,
            QUERY,
        )
        for segments in (1, 2, 3, 6, [11, 29])
    ]
    for other in actual[1:]:
        close(other, actual[0], 1e-9)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(cuts=st.sets(st.integers(1, 19), min_size=1, max_size=5), scale=st.floats(1e-3, 1e3))
def test_any_split_of_a_stationary_training(cuts: set[int], scale: float) -> None:
    torch.manual_seed(0)
    model = models.mlp((4, 3)).double()
    history = models.stationary(model, [*sorted(cuts), 20], scale)
    whole = values(whence.Source.published(1, fisher="exact"), model, history, TRAIN, QUERY)
    ends = [*sorted(cuts), 20]
    close(
        values(whence.Source.published(ends, fisher="exact"), model, history, TRAIN, QUERY),
        whole,
        1e-9,
    )


def test_endless_training_gives_the_influence_function() -> None:
    torch.manual_seed(0)
    model, task = models.mlp((4, 3, 1), inplace=False).double(), whence.Regression()
    model[1] = nn.Tanh()  # no dead units: every eigenvalue is positive
    train, query = models.regression(30), models.regression(3, seed=1)
    history = models.stationary(model, [1000], 1e6)
    source = values(
        whence.Source.published(1, fisher="exact"), model, history, train, query, task=task
    )
    method = whence.Influence.published(damping=1e-12, fisher="exact")
    close(source, values(method, model, history, train, query, task=task), 1e-6)


def test_barely_any_training_gives_the_gradients_product() -> None:
    """F_r → η̄K as ησK → 0: TracIn with the effective rate, over N."""
    torch.manual_seed(0)
    model = models.mlp().double()
    history = models.stationary(model, [1], 1e-9)
    source = values(whence.Source.published(1, fisher="exact"), model, history, TRAIN, QUERY)
    tracin = values(whence.TracIn(), model, history, TRAIN, QUERY)
    close(source * len(TRAIN), tracin, 1e-6)


def unrolled(
    start: Tensor, x: Tensor, y: Tensor, queries: tuple[Tensor, Tensor], rates: list[float]
) -> np.ndarray:
    """d |f(q) - y| / d weight of each example, through every update of least squares."""
    weights = torch.zeros(len(x), dtype=torch.float64, requires_grad=True)
    theta = start.clone()
    for rate in rates:
        residual = x @ theta - y[:, 0]
        gradient = 2 * ((1 + weights) * residual) @ x / len(x)
        theta = theta - rate * gradient
    errors = (queries[0] @ theta - queries[1][:, 0]).abs()
    rows = [torch.autograd.grad(error, weights, retain_graph=True)[0] for error in errors]
    return torch.stack(rows).numpy()


@pytest.mark.parametrize("at_optimum", [True, False])
def test_linear_model_is_unrolled_exactly(at_optimum: bool) -> None:
    """Full-batch gradient descent on least squares.

    At the optimum nothing moves, gradients are stationary and one segment is exact but for
    (1 - ησ)^K ≈ exp(-ησK). Away from it every update is a checkpoint and a segment of its own; what
    then remains is that a segment's gradient is taken at its end: first order in the rate.
    """
    train, query = models.regression(15), models.regression(3, seed=1)
    x, y = train.tensors
    best = torch.linalg.lstsq(x, y).solution[:, 0]
    model, task = nn.Linear(4, 1, bias=False).double(), whence.Regression()
    errors = []
    for halved in (0, 1, 2):
        rate, count = 0.04 / 2**halved, 10 * 2**halved
        start = best if at_optimum else torch.ones(4, dtype=torch.float64)
        expected = unrolled(start, x, y, query.tensors, [rate] * count)
        with torch.no_grad():
            model.weight.copy_(start[None])
        if at_optimum:
            history, segments = models.stationary(model, [count], rate), 1
        else:
            steps = list(range(1, count + 1))
            history, segments = models.train_run(model, task, train, steps, rate), count
        method = whence.Source.published(segments, fisher="exact")
        actual = values(method, model, history, train, query, task=task)
        errors.append(abs(actual - expected).max() / abs(expected).max())
    assert errors[2] < 0.05
    assert errors[1] < 0.6 * errors[0] and errors[2] < 0.6 * errors[1], errors


def test_removal_is_predicted_with_the_right_sign_and_scale() -> None:
    """f(with m) - f(without m) of least squares to convergence, really refitted."""
    train, query = models.regression(40), models.regression(5, seed=1)
    x, y = train.tensors
    model, task = nn.Linear(4, 1, bias=False).double(), whence.Regression(measurement="output")
    best = torch.linalg.lstsq(x, y).solution
    with torch.no_grad():
        model.weight.copy_(best.T)
    truth = []
    for left_out in range(40):
        remaining = torch.arange(40) != left_out
        other = torch.linalg.lstsq(x[remaining], y[remaining]).solution
        truth.append((query.tensors[0] @ (best - other))[:, 0].numpy())
    history = models.stationary(model, [10_000], 1.0)
    for method in (
        whence.Source.published(1, fisher="exact"),
        whence.Influence.published(1e-10, fisher="exact"),
    ):
        actual = values(method, model, history, train, query, task=task)
        close(actual, np.stack(truth, 1), 0.25)  # 1/(1 - leverage), a tenth or so


@each_method
def test_scaling_the_measurement_scales_the_scores(method: str) -> None:
    class Scaled(whence.Classification):
        def measurements(self, outputs: Tensor, batch: Any) -> Tensor:
            return -7.5 * super().measurements(outputs, batch)

    model, history = trained()
    plain = values(METHODS[method](), model, history, TRAIN, QUERY)
    scaled = values(METHODS[method](), model, history, TRAIN, QUERY, task=Scaled())
    close(scaled, -7.5 * plain, 1e-12)


# --- how the data is read -----------------------------------------------------------------------


@pytest.mark.parametrize("fisher", ["exact", "sampled"])
def test_batches_and_workers_change_nothing(fisher: str) -> None:
    model, history = trained(ends=(4, 8))  # every pass over the data starts the workers again
    method = whence.Source.published(segments=2, fisher=fisher)
    whole = values(method, model, history, TRAIN, QUERY)
    for batch_size in (1, 5, 12):
        again = values(method, model, history, TRAIN, QUERY, batch_size=batch_size)
        close(again, whole, 1e-10)
    for workers in (0, 2):
        kind = {"batch_size": 5, "workers": workers}
        close(values(method, model, history, models.OneByOne(TRAIN), QUERY, **kind), whole, 1e-10)


def test_batches_of_documents_change_nothing() -> None:
    torch.manual_seed(0)
    model, task = models.Transformer(), whence.LanguageModeling()
    train, query = models.documents(), models.documents(3, seed=1)
    history = models.train_run(model, task, train, [4, 8], 0.1)
    method = whence.Source.published(segments=2, fisher="sampled")
    whole = values(method, model, history, train, query, task=task)
    for batch_size in (1, 4):
        again = values(method, model, history, train, query, task=task, batch_size=batch_size)
        close(again, whole, 1e-10)


@each_method
def test_example_order_changes_nothing(method: str) -> None:
    model, history = trained()
    order = np.random.default_rng(0).permutation(len(TRAIN))
    plain = values(METHODS[method](), model, history, TRAIN, QUERY)
    mixed = values(METHODS[method](), model, history, Subset(TRAIN, order.tolist()), QUERY)
    close(mixed, plain[:, order], 1e-9)
    turned = values(METHODS[method](), model, history, TRAIN, Subset(QUERY, [2, 0, 1]))
    close(turned, plain[[2, 0, 1]], 1e-12)


@each_method
def test_a_duplicate_gets_the_same_score(method: str) -> None:
    model, history = trained()
    twice = Subset(TRAIN, [*range(len(TRAIN)), 5, 5])
    actual = values(METHODS[method](), model, history, twice, QUERY, batch_size=4)
    close(actual[:, -2], actual[:, 5], 1e-12)
    close(actual[:, -1], actual[:, 5], 1e-12)


def test_dict_examples_are_tuple_examples() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = models.mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    model, history = trained(Named())
    method = whence.Source.published(segments=2, fisher="sampled")
    plain = values(method, model, history, TRAIN, QUERY)
    rows = [models.Rows(x=d.tensors[0], labels=d.tensors[1]) for d in (TRAIN, QUERY)]
    close(values(method, model, history, *rows), plain, 1e-12)


# --- numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "conv", "gpt"])
def test_float32_agrees_with_float64(name: str) -> None:
    torch.manual_seed(0)
    task: Any = whence.Classification()
    if name == "mlp":
        model, train, query = models.mlp(), models.vectors(40), models.vectors(5, seed=1)
    elif name == "conv":
        model, train, query = models.ConvNet(), models.images(24), models.images(5, seed=1)
    else:
        model, task = models.Transformer(tied=False), whence.LanguageModeling()
        train, query = models.documents(24), models.documents(5, seed=1)
    history = models.train_run(model, task, train, [4, 8, 12], 0.2, 0.5)
    for method in (
        whence.Source.published(segments=3, fisher="exact"),
        whence.Influence.published(damping=1e-3, fisher="exact"),
        whence.Influence.published(damping="source", fisher="exact"),
        whence.TracIn(),
    ):
        precise = values(method, model, history, train, query, task=task)
        quick = values(method, model, history, train, query, task=task, dtype=torch.float32)
        close(quick, precise, 1e-3)
    method = whence.Influence.published(damping=1e-8, fisher="exact")
    precise = values(method, model, history, train, query, task=task)
    quick = values(method, model, history, train, query, task=task, dtype=torch.float32)
    for row, other in zip(quick, precise, strict=True):
        assert spearmanr(row, other).statistic > 0.95


def test_precision_is_honoured() -> None:
    model, history = trained()
    for dtype in (torch.float64, torch.float32):
        actual = values(METHODS["source"](), model, history, TRAIN, QUERY, dtype=dtype)
        assert actual.dtype == {torch.float64: np.float64, torch.float32: np.float32}[dtype]


def test_same_seed_same_bits() -> None:
    model, history = trained()

    def once(seed: int) -> np.ndarray:
        return values(whence.Source.published(2, seed=seed), model, history, TRAIN, QUERY)

    first = once(0)
    torch.manual_seed(999)
    torch.rand(3)
    assert np.array_equal(first, once(0))
    assert not np.array_equal(first, once(1))


# --- manners ------------------------------------------------------------------------------------

HOOKS = [
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
]


def portrait(model: nn.Module) -> dict[str, Any]:
    return {
        "modules": [(name, id(module), type(module)) for name, module in model.named_modules()],
        "modes": [module.training for module in model.modules()],
        "hooks": [[list(getattr(m, h)) for h in HOOKS] for m in model.modules()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "parameters": [
            (name, id(p), p.requires_grad, p.dtype, p.is_leaf, list(p._backward_hooks or []))
            for name, p in model.named_parameters(remove_duplicate=False)
        ],
        "buffers": [(name, b.dtype) for name, b in model.named_buffers()],
    }


@each_method
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_model_comes_back_as_it_was(method: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    data, query = models.images(), models.images(3, seed=1)
    task = whence.Classification()
    history = models.train_run(models.ConvNet(), task, data, [2, 4, 6, 8], 0.1)
    model = models.ConvNet().float()  # other weights than any checkpoint's
    model.train()
    model.norm.eval()
    model.head.bias.requires_grad_(False)
    model.first.weight.grad = torch.ones_like(model.first.weight)
    model.head.register_forward_hook(lambda *_: None)
    before, state = portrait(model), copy.deepcopy(model.state_dict())
    settings = torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads()
    draws = torch.get_rng_state()

    study = whence.Study(model, task, train=data, runs=history.run)
    METHODS[method]().attribute(study, query, dtype=dtype, progress=False)

    assert portrait(model) == before
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert torch.equal(model.first.weight.grad, torch.ones_like(model.first.weight))
    assert model.head.weight.grad is None
    now = torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads()
    assert now == settings
    assert torch.equal(torch.get_rng_state(), draws)


def test_the_model_comes_back_after_an_error() -> None:
    class Failing(whence.Classification):
        def losses(self, outputs: Tensor, batch: Any) -> Tensor:
            raise RuntimeError("on purpose")

    model, history = trained()
    model.train()
    before, state = portrait(model), copy.deepcopy(model.state_dict())
    with pytest.raises(whence.WhenceError, match=r"task failed on train .*on purpose") as caught:
        values(whence.TracIn(), model, history, TRAIN, QUERY, task=Failing())
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert portrait(model) == before
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_training_mode_does_not_matter() -> None:
    """Batch statistics and dropout are those of evaluation."""
    torch.manual_seed(0)
    data, query, task = models.images(), models.images(3, seed=1), whence.Classification()
    model = models.ConvNet()
    history = models.train_run(model, task, data, [2, 4], 0.1)
    method = METHODS["source"]()
    plain = values(method, model.eval(), history, data, query)
    assert np.array_equal(values(method, model.train(), history, data, query), plain)


# --- tasks --------------------------------------------------------------------------------------


def test_tasks_are_the_plain_formulas() -> None:
    logits, labels = torch.randn(6, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 0, 1])
    batch, task = (None, labels), whence.Classification()
    p = logits.softmax(1)[range(6), labels]
    close(task.losses(logits, batch), -p.log(), 1e-12)
    close(task.measurements(logits, batch), (p / (1 - p)).log(), 1e-10)
    close(whence.Classification("loss").measurements(logits, batch), -p.log(), 1e-12)
    close(whence.Classification("log_prob").measurements(logits, batch), p.log(), 1e-12)
    binary, signs = logits[:, :1], torch.tensor([0, 1, 1, 0, 1, 0])
    expected = F.binary_cross_entropy_with_logits(binary[:, 0], signs.double(), reduction="none")
    close(task.losses(binary, (None, signs)), expected, 1e-12)
    close(task.measurements(binary, (None, signs)), (2 * signs - 1) * binary[:, 0], 1e-12)

    f, y = torch.randn(6, 2, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    mse = torch.stack([F.mse_loss(a, b) for a, b in zip(f, y, strict=True)])
    close(whence.Regression().losses(f, (None, y)), mse, 1e-12)
    close(whence.Regression("half_mse").losses(f, (None, y)), mse / 2, 1e-12)
    close(whence.Regression().measurements(f[:, :1], (None, y[:, 0])), abs(f - y)[:, 0], 1e-12)

    documents = models.documents()
    batch = dense.batch_of(documents)
    out = torch.randn(6, 4, 5, dtype=torch.float64)
    sums, means = [], []
    for row, ids, size in zip(out, batch["input_ids"], batch["attention_mask"].sum(1), strict=True):
        tokens = [-row[t].log_softmax(0)[ids[t + 1]] for t in range(size - 1)]
        sums.append(sum(tokens))
        means.append(sums[-1] / len(tokens))
    close(whence.LanguageModeling("sum").losses(out, batch), torch.stack(sums), 1e-12)
    close(whence.LanguageModeling("mean").losses(out, batch), torch.stack(means), 1e-12)
    without = {key: value for key, value in batch.items() if key != "labels"}
    close(whence.LanguageModeling().losses(out, without), torch.stack(means), 1e-12)


def document_batch() -> dict[str, Tensor]:
    ids = torch.tensor([[1, 2, 0, 2]])
    return {"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 1, 0]])}


PSEUDO: dict[str, tuple[Any, tuple[int, ...], Any]] = {
    "softmax": (whence.Classification(), (4,), (None, torch.tensor([2]))),
    "two logits": (whence.Classification(), (2,), (None, torch.tensor([1]))),
    "binary": (whence.Classification(), (1,), (None, torch.tensor([1]))),
    "mse": (whence.Regression(), (1,), (None, torch.zeros(1, 1))),
    "mse of 3": (whence.Regression(), (3,), (None, torch.zeros(1, 3))),
    "half_mse": (whence.Regression("half_mse"), (1,), (None, torch.zeros(1, 1))),
    "half_mse of 3": (whence.Regression("half_mse"), (3,), (None, torch.zeros(1, 3))),
    "tokens, mean": (whence.LanguageModeling("mean"), (4, 3), document_batch()),
    "tokens, sum": (whence.LanguageModeling("sum"), (4, 3), document_batch()),
}


@pytest.mark.parametrize("name", PSEUDO)
def test_pseudo_losses_have_the_hessian_as_covariance(name: str) -> None:
    """One example repeated under many ids; the gradients' second moment is its loss's Hessian."""
    task, shape, batch = PSEUDO[name]
    torch.manual_seed(0)
    point = torch.randn(1, *shape, dtype=torch.float64)
    hessian = dense.loss_hessian(task, point, batch)
    draws = 40_000

    def repeat(value: Any) -> Any:
        return value.expand(draws, *value.shape[1:]) if isinstance(value, Tensor) else value

    if isinstance(batch, dict):
        many: Any = {key: repeat(value) for key, value in batch.items()}
    else:
        many = tuple(repeat(value) for value in batch)
    outputs = point.expand(draws, *shape).clone().requires_grad_()
    uniform = whence.task.Uniform(1, 7, np.arange(draws))
    (gradient,) = torch.autograd.grad(task.pseudo_losses(outputs, many, uniform).sum(), outputs)
    gradient = gradient.flatten(1)
    scale = hessian.diagonal().max()
    # standard errors are about 1/√draws = 0.005 of the scale
    assert (gradient.T @ gradient / draws - hessian).abs().max() < 0.03 * scale
    assert gradient.mean(0).abs().max() < 0.03 * scale.sqrt()


def test_uniform_draws_hang_on_their_key_alone() -> None:
    Uniform = whence.task.Uniform
    whole = Uniform(5, 10, np.arange(2000))(4)
    assert whole.shape == (2000, 4) and whole.dtype == torch.float64
    assert whole.min() > 0 and whole.max() < 1
    assert torch.equal(Uniform(5, 10, [7, 3])(4), whole[[7, 3]])
    assert torch.equal(Uniform(5, 10, [7])(2), whole[[7], :2])
    for other in (Uniform(6, 10, np.arange(2000)), Uniform(5, 11, np.arange(2000))):
        assert abs(np.corrcoef(other(4).flatten(), whole.flatten())[0, 1]) < 0.05
    assert abs(np.corrcoef(whole.T) - np.eye(4)).max() < 0.1
    assert abs(np.corrcoef(whole[:-1, 0], whole[1:, 0])[0, 1]) < 0.1
    assert abs(whole.mean() - 0.5) < 0.01 and abs(whole.var() - 1 / 12) < 0.005
