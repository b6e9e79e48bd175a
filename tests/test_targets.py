"""Targets: integers, soft, one-hot and multi-label ones are right; others are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import models
from support.comparing import close
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import whence
from whence.draws import Uniform
from whence.task import inverted_in_blocks, sample

EXACT: dict[str, Any] = {"dtype": torch.float64, "progress": False}
DRAWS = 40_000


def net(outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return models.mlp((4, 5, outputs)).double()


def inputs(n: int = 12, seed: int = 0) -> Tensor:
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(n: int = 12, classes: int = 3) -> Tensor:
    return torch.randint(0, classes, (n,), generator=torch.Generator().manual_seed(1))


def scored(task: whence.Task, y: Tensor, outputs: int = 3, method: Any = None) -> np.ndarray:
    """Source scores of a training with these targets, for queries with the first three of them."""
    data, query = TensorDataset(inputs(), y), TensorDataset(inputs(3, seed=5), y[:3])
    run = models.train_run(net(outputs), task, data, [4, 8], 0.2).run
    study = whence.Study(net(outputs), task, data, run)
    method = method or whence.Source(2, fisher="exact")
    return method.attribute(study, query, **EXACT).to_numpy()


TASKS: dict[str, tuple[whence.Task, Tensor, int]] = {
    "integers": (whence.Classification(), labels(), 3),
    "one-hot": (whence.Classification(), F.one_hot(labels(), 3), 3),
    "soft": (whence.Classification("loss"), torch.rand(12, 3).double().softmax(1), 3),
    "one logit": (whence.Classification("loss"), torch.rand(12).double(), 1),
    "ignored": (whence.Classification(), labels().index_fill(0, torch.tensor([1, 4]), -100), 3),
    "one logit, ignored": (whence.Classification(), torch.tensor([0, 1, -100.0] * 4).double(), 1),
    "labels, mean": (whence.MultiLabel(), (torch.rand(12, 3) < 0.4).double(), 3),
    "labels, sum": (whence.MultiLabel("sum", "loss"), (torch.rand(12, 3) < 0.4).long(), 3),
    "soft labels": (whence.MultiLabel(), torch.rand(12, 3).double(), 3),
    "labels, some unknown": (
        whence.MultiLabel(),
        torch.tensor([[0, 1, -100], [-100, -100, -100], [1, 1, 0.0]] * 4).double(),
        3,
    ),
}


@pytest.mark.parametrize("name", TASKS)
def test_the_factor_and_the_draws_have_the_hessian_of_the_loss(name: str) -> None:
    task, y, width = TASKS[name]
    outputs = torch.randn(12, width, dtype=torch.float64)
    factor = task.output_factor(outputs, (None, y))
    hessians = []
    for row, target, B in zip(outputs, y, factor, strict=True):
        one = (None, target.unsqueeze(0))
        hessian = torch.func.hessian(lambda z, one=one: task.losses(z.unsqueeze(0), one)[0])(row)
        torch.testing.assert_close(B @ B.T, hessian, rtol=1e-9, atol=1e-12)
        hessians.append(hessian)
    many = outputs.repeat(DRAWS // 12, 1).requires_grad_()
    batch = (None, y.repeat(DRAWS // 12, *[1] * (y.dim() - 1)))
    uniform = Uniform(0, 1, np.arange(len(many)))
    (drawn,) = torch.autograd.grad(task.pseudo_losses(many, batch, uniform).sum(), many)
    drawn = drawn.reshape(-1, 12, width)
    sampled = torch.einsum("kni,knj->nij", drawn, drawn) / len(drawn)
    torch.testing.assert_close(sampled, torch.stack(hessians), rtol=0, atol=0.03)
    assert drawn.mean(0).abs().max() < 0.05


@pytest.mark.parametrize("name", TASKS)
def test_losses_are_torchs(name: str) -> None:
    task, y, width = TASKS[name]
    outputs = torch.randn(12, width, dtype=torch.float64)
    losses = task.losses(outputs, (None, y))
    if isinstance(task, whence.MultiLabel):
        each = F.binary_cross_entropy_with_logits(outputs, y.double(), reduction="none")
        known = y != -100
        sums = torch.where(known, each, 0).sum(1)
        expected = sums if task.reduction == "sum" else sums / known.sum(1).clamp_min(1)
    elif width == 1:
        each = F.binary_cross_entropy_with_logits(outputs[:, 0], y, reduction="none")
        expected = torch.where(y == -100, 0, each)
    else:
        target = y.double() if y.dim() == 2 else y
        expected = F.cross_entropy(outputs, target, reduction="none")
    torch.testing.assert_close(losses, expected)
    if name == "labels, mean":
        torch.testing.assert_close(losses.mean(), nn.BCEWithLogitsLoss()(outputs, y))


def test_a_margin_of_several_labels_is_the_mean_of_each() -> None:
    z, y = torch.randn(5, 3), (torch.rand(5, 3) < 0.5).float()
    each = [whence.Classification().measurements(z[:, k], (None, y[:, k])) for k in range(3)]
    torch.testing.assert_close(
        whence.MultiLabel().measurements(z, (None, y)), torch.stack(each).mean(0)
    )


@pytest.mark.parametrize("measurement", ["margin", "loss", "log_prob"])
def test_one_hot_targets_score_as_integers_do(measurement: str) -> None:
    task = whence.Classification(measurement)
    one_hot = F.one_hot(labels(), 3)
    for same in (one_hot, one_hot.double(), labels().double(), labels().unsqueeze(1)):
        close(scored(task, same), scored(task, labels()), 1e-10)


def test_one_logit_takes_probabilities_as_two_logits_do() -> None:
    y = torch.rand(12).double()
    z = torch.randn(12, 1, dtype=torch.float64)
    task = whence.Classification("loss")
    both = task.losses(F.pad(z, (1, 0)), (None, torch.stack([1 - y, y], 1)))
    torch.testing.assert_close(task.losses(z, (None, y)), both)
    torch.testing.assert_close(task.losses(z, (None, y.unsqueeze(1))), both)


@pytest.mark.parametrize("method", ["sampled", "exact", "empirical"])
def test_ignored_examples_have_no_loss_and_no_curvature(method: str) -> None:
    """A zero weight in a task of one's own says the same, by another way."""

    class Weighted(whence.Task):
        measurement, unit = "loss", "nats"
        higher_is_better = False

        def losses(self, outputs: Tensor, batch: Any) -> Tensor:
            y = batch[1]
            return F.cross_entropy(outputs, y.clamp_min(0), reduction="none") * (y >= 0)

        measurements = losses

    y = labels().index_fill(0, torch.tensor([3, 4, 9]), -100)
    influence = whence.Influence(damping=0.01, fisher=method, curvature="kfac")
    values = scored(whence.Classification("loss"), y, method=influence)
    if method != "sampled":  # whose draws are of two kinds
        expected = scored(Weighted(), y, method=influence)
        close(values, expected, 1e-8)
    assert (values[:, [3, 4, 9]] == 0).all() and (values[:, [0, 1, 2]] != 0).any()


def test_what_ignored_examples_are_divided_by_is_announced() -> None:
    y = labels().index_fill(0, torch.tensor([3, 4, 9]), -100)
    data = TensorDataset(inputs(), y)
    run = models.train_run(net(), whence.Classification(), data, [4, 8], 0.2).run
    study = whence.Study(net(), whence.Classification(), data, run)
    with pytest.warns(UserWarning, match="3 of 12 examples .* the target -100"):
        scores = whence.TracIn().attribute(study, data, **EXACT)
    examples, queries = scores.warnings
    assert "examples" in examples and "3 of 12 queries" in queries


WITHOUT = torch.tensor([[-100, -100, -100], [0, 1, -100]] * 6)
NOTHING: dict[str, tuple[whence.Task, Tensor]] = {
    "labels": (whence.MultiLabel(), WITHOUT.double()),
    "documents": (whence.LanguageModeling(), WITHOUT),
}


@pytest.mark.parametrize("kind", NOTHING)
def test_examples_without_any_target(kind: str) -> None:
    task, targets = NOTHING[kind]
    ignored = task.ignored((inputs(), targets))
    assert ignored is not None and ignored.tolist() == [True, False] * 6

    class Other(type(task)):  # type: ignore[misc]
        def losses(self, outputs: Tensor, batch: Any) -> Tensor:
            return outputs.sum(1)

    assert Other().ignored((inputs(), targets)) is None  # whose losses are not known


def test_ignored_positions_of_a_document_have_no_curvature() -> None:
    task = whence.LanguageModeling()
    outputs = torch.randn(2, 4, 5, dtype=torch.float64)
    ids = torch.randint(0, 5, (2, 4))
    y = torch.tensor([[1, -100, 2, -100], [-100] * 4])
    factor = task.output_factor(outputs, (ids, y))
    curvature = (factor @ factor.mT).diagonal(dim1=1, dim2=2).reshape(2, 4, 5).sum(2)
    assert (curvature[0] > 1e-9).tolist() == [False, True, False, False]
    assert float(curvature[1].abs().max()) < 1e-12
    point = outputs.requires_grad_()
    uniform = Uniform(0, 0, np.arange(2))
    (drawn,) = torch.autograd.grad(task.pseudo_losses(point, (ids, y), uniform).sum(), point)
    assert (drawn.abs().sum(2) > 0).tolist() == [[False, True, False, False], [False] * 4]


def last(y: Any, value: Any) -> Tensor:
    """The targets, with another value in example 10."""
    y = torch.as_tensor(y).clone()
    y[10] = value
    return y


ZEROS = torch.zeros(12)
REFUSED: dict[str, tuple[whence.Task, Tensor, int, str]] = {
    "out of range": (
        whence.Classification(),
        last(labels(), 7),
        3,
        "target 7, .*0 to 2",
    ),
    "negative": (whence.Classification(), last(labels(), -1), 3, "target -1"),
    "plus or minus one": (whence.Classification(), last(ZEROS.long(), -1), 2, r"\(y \+ 1\)"),
    "plus or minus one, one logit": (whence.Classification(), last(ZEROS, -1), 1, r"\(y \+ 1\)"),
    "a fraction": (whence.Classification(), last(ZEROS, 0.9), 3, "target 0.9.*soft targets"),
    "NaN": (whence.Classification(), last(ZEROS, torch.nan), 3, "target nan"),
    "NaN, one logit": (whence.Classification(), last(ZEROS, torch.nan), 1, "target nan"),
    "two, one logit": (whence.Classification(), last(ZEROS.long(), 2), 1, "target 2"),
    "two labels": (
        whence.Classification(),
        last(F.one_hot(labels(), 3), torch.tensor([1, 1, 0])),
        3,
        "sum to 2, not 1: use MultiLabel",
    ),
    "no label": (
        whence.Classification(),
        last(F.one_hot(labels(), 3).double(), torch.zeros(3).double()),
        3,
        "sum to 0",
    ),
    "a negative probability": (
        whence.Classification(),
        last(F.one_hot(labels(), 3).double(), torch.tensor([1.5, -0.5, 0]).double()),
        3,
        "probability 1.5",
    ),
    "a label of two": (whence.MultiLabel(), last(torch.zeros(12, 3), 2), 3, "target 2"),
    "a label of minus one": (whence.MultiLabel(), last(torch.ones(12, 3), -1), 3, "target -1"),
    "a NaN label": (whence.MultiLabel(), last(torch.ones(12, 3), torch.nan), 3, "target nan"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("fisher", ["sampled", "exact"])
def test_a_wrong_target_is_named(name: str, fisher: str) -> None:
    task, y, width, message = REFUSED[name]
    y = y.double() if y.is_floating_point() else y
    data = TensorDataset(inputs(), y)
    right = TensorDataset(inputs()[:10], y[:10])
    run = models.train_run(net(width), task, right, [4, 8], 0.2).run
    run.stages[0] = whence.run.Stage("train", 0, 8, None)
    study = whence.Study(net(width), task, data, run)
    with pytest.raises(whence.WhenceError, match=f"train example 10 has .*{message}"):
        whence.Source(2, fisher=fisher).attribute(study, right, **EXACT)
    study = whence.Study(net(width), task, right, run)
    with pytest.raises(whence.WhenceError, match=f"query example 10 has .*{message}"):
        whence.Source(2).attribute(study, data, **EXACT)


@pytest.mark.parametrize(
    ("task", "shape"),
    [
        (whence.Classification(), (12,)),
        (whence.MultiLabel(), (12, 3)),
        (whence.Regression(), (12, 3)),
        (whence.LanguageModeling(), (12, 4)),
    ],
)
def test_targets_that_are_no_real_numbers_are_refused(
    task: whence.Task, shape: tuple[int, ...]
) -> None:
    outputs = torch.zeros(12, 3) if shape != (12, 4) else torch.zeros(12, 4, 3)
    with pytest.raises(whence.WhenceError, match=r"targets are torch\.complex64"):
        task.losses(outputs, (outputs, torch.zeros(shape, dtype=torch.complex64)))
    if shape != (12, 4):
        with pytest.raises(whence.WhenceError, match="labels are str \\('cat'\\), not numbers"):
            task.losses(outputs, (outputs, ["cat"] * 12))


SHAPES: dict[str, tuple[whence.Task, tuple[int, ...], tuple[int, ...]]] = {
    "another number of classes": (whence.Classification(), (12, 3), (12, 4)),
    "several targets, one logit": (whence.Classification(), (12, 1), (12, 2)),
    "three axes": (whence.Classification(), (12, 3), (12, 3, 1)),
    "too few": (whence.Classification(), (12, 3), (11,)),
    "one class per example": (whence.MultiLabel(), (12, 3), (12,)),
    "another number of labels": (whence.MultiLabel(), (12, 3), (12, 2)),
    "turned": (whence.Regression(), (12, 3), (3, 12)),
    "one label per document": (whence.LanguageModeling(), (12, 4, 3), (12, 1)),
    "logits without positions": (whence.LanguageModeling(), (12, 3), (12, 4)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_that_do_not_fit_are_refused(name: str) -> None:
    task, outputs, targets = SHAPES[name]
    with pytest.raises(whence.WhenceError, match="shape"):
        task.losses(
            torch.zeros(outputs), (torch.zeros(targets).long(), torch.zeros(targets).long())
        )


def test_labels_of_a_language_model_are_checked() -> None:
    outputs, ids = torch.zeros(2, 3, 5), torch.zeros(2, 3).long()
    wrong = torch.tensor([[0, 1, 2], [0, -1, 2]])
    with pytest.raises(whence.WhenceError, match="example 1 of the batch has the target -1"):
        whence.LanguageModeling().losses(outputs, (ids, wrong))
    with pytest.raises(whence.WhenceError, match=r"target 1\.5"):
        whence.LanguageModeling().losses(outputs, (ids, wrong.abs() + 0.5))


def test_rounded_class_numbers_are_refused() -> None:
    with pytest.raises(whence.WhenceError, match="integers"):
        outputs = torch.zeros(2, 1000, dtype=torch.bfloat16)
        whence.Classification().losses(outputs, (None, torch.tensor([1, 999]).bfloat16()))


@pytest.mark.parametrize("task", [whence.Classification("loss"), whence.MultiLabel("sum", "loss")])
def test_where_targets_cannot_be_read_a_wrong_one_has_no_loss(task: whence.Task) -> None:
    """Inside torch.vmap, and on a GPU: NaN, never a number."""
    y = torch.tensor([0, 1, 7, -100]) if isinstance(task, whence.Classification) else None
    targets = y if y is not None else torch.tensor([[0, 1], [1, 1], [0, 7], [-100, 1]]).float()
    outputs = torch.randn(2, 4, 2)
    losses = torch.vmap(lambda z, t: task.losses(z, (None, t)))(
        outputs, targets.expand(2, *targets.shape)
    )
    assert losses.isnan().tolist() == [[False, False, True, False]] * 2
    expected = task.losses(outputs[0][[0, 1, 3]], (None, targets[[0, 1, 3]]))
    torch.testing.assert_close(losses[0][[0, 1, 3]], expected)


def recipe(task: whence.Task, y: Tensor) -> whence.Recipe:
    return whence.Recipe(
        lambda: models.mlp((4, 5, 3)),
        task,
        TensorDataset(inputs().float(), y.float() if y.is_floating_point() else y),
        lambda parameters: torch.optim.SGD(parameters, 0.2),
        batch_size=4,
        epochs=3,
    )


@pytest.mark.parametrize("name", ["one-hot", "soft", "ignored", "labels, mean", "soft labels"])
def test_trainings_in_a_stack_are_those_of_a_plain_loop(name: str, tmp_path: Path) -> None:
    task, y, _ = TASKS[name]
    built = recipe(task, y)
    query = TensorDataset(inputs(3, seed=5).float(), built.stages[0].data.dataset.tensors[1][:3])
    truth = whence.evaluate.ground_truth(
        built, query, alpha=0.5, subsets=3, seeds=1, out=tmp_path, progress=False
    )
    for mask, measured in zip(truth.masks, truth.measurements, strict=True):
        model = built.train(int(truth.seeds[0]), mask)
        batch = query[:]
        expected = task.measurements(model(batch[0]), batch).detach()
        close(np.ravel(measured)[:3], expected.double(), 1e-4)


def test_a_recipe_names_a_wrong_target() -> None:
    with pytest.raises(whence.WhenceError, match="example 10 has the target 7"):
        recipe(whence.Classification(), last(labels(), 7)).train(0)


@pytest.mark.parametrize("engine", ["auto", "products", "vmap", "single"])
def test_many_trainings_name_a_wrong_target(engine: str, tmp_path: Path) -> None:
    wrong = recipe(whence.Classification(), last(labels(), 7))
    query = TensorDataset(inputs(3, seed=5).float(), labels()[:3])
    with pytest.raises(whence.WhenceError, match="example 10 has the target 7"):
        whence.evaluate.ground_truth(
            wrong, query, alpha=0.9, subsets=2, seeds=1, out=tmp_path, progress=False, engine=engine
        )


def test_classes_of_soft_targets_are_the_most_probable_ones() -> None:
    task = whence.Classification()
    soft = torch.tensor([[0.2, 0.8], [0.6, 0.4]])
    assert task.labels((None, soft)).tolist() == [1, 0]
    assert task.labels((None, torch.tensor([0.2, 0.8, 1.0, -100]))).tolist() == [0, 1, 1, -100]
    assert task.labels((None, torch.tensor([[2], [0]]))).tolist() == [2, 0]


def test_labels_of_a_subclass_are_used() -> None:
    class Signs(whence.Classification):
        def labels(self, batch: Any) -> Tensor:
            return (super().targets(batch) + 1) // 2

    z, y = torch.randn(4, 2), torch.tensor([-1, 1, 1, -1])
    torch.testing.assert_close(
        Signs().losses(z, (None, y)), F.cross_entropy(z, (y + 1) // 2, reduction="none")
    )


@pytest.mark.parametrize("classes", [300, 1024, 5000])
def test_draws_by_blocks_of_classes_are_those_of_whole_rows(classes: int) -> None:
    """As a GPU draws. Classes without probability at the start or at the end are not drawn."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(3, 200, classes, generator=generator, dtype=torch.float64)
    logits[0, :, -280:], logits[1, :, :280] = -torch.inf, -torch.inf
    draws = torch.rand(3, 200, generator=generator, dtype=torch.float64)
    draws[:, 0], draws[:, 1] = 2.0**-54, 1 - 2.0**-53
    probabilities = logits.softmax(-1)
    cumulative = np.cumsum(probabilities.numpy(), -1)
    levels = draws.unsqueeze(-1).numpy() * cumulative[..., -1:]
    wanted = (cumulative < levels).sum(-1)
    drawn = inverted_in_blocks(probabilities, draws.unsqueeze(-1)).squeeze(-1)
    assert np.array_equal(drawn.numpy(), wanted)
    assert torch.equal(sample(logits, draws), drawn)
