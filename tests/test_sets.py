"""Examples that are sets of rows: losses, gradients and curvature against formulas written out."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from support import models
from support.autograd import EXACT, once
from support.comparing import close
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import whence
from whence.draws import Uniform


def labelled(n: int, *shape: int, seed: int = 0) -> TensorDataset:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, *shape, generator=g, dtype=torch.float64)
    return TensorDataset(x, torch.arange(n) % 3)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(2, 4, 3),
        nn.Tanh(),
        nn.BatchNorm1d(4),
        nn.Flatten(),
        nn.Linear(12, 3),
    ).double()


def noisy(example: Any) -> Any:
    """Draws from all three generators."""
    x, y = example
    shift = float(np.random.randn()) + random.random()
    return x + 0.5 * torch.randn(x.shape, dtype=x.dtype) + shift, y


def gradient(model: nn.Module, value: Tensor) -> Tensor:
    parts = torch.autograd.grad(
        value, list(model.parameters()), materialize_grads=True, allow_unused=True
    )
    return torch.cat([part.flatten() for part in parts])


# --- draws of an augmentation ---------------------------------------------------------------------


def test_gradients_are_means_over_draws() -> None:
    model, task = network(), whence.Averaged(whence.Classification())
    train = whence.Augmented(labelled(7, 2, 5), noisy, draws=3)
    query = whence.Augmented(labelled(2, 2, 5, seed=1), draws=1)
    study = whence.Study(model, task, train, once(model), layers="all")
    twin = copy.deepcopy(model).eval()
    f = [
        gradient(twin, whence.Classification().measurements(twin(s.rows[0]), s.rows)[0])
        for s in query
    ]
    g = [
        gradient(twin, F.cross_entropy(twin(s.rows[0]), s.rows[1]))
        for s in (train[k] for k in range(7))
    ]
    expected = -(torch.stack(f) @ torch.stack(g).T)
    for size in (1, 3, 7):
        scores = whence.TracIn().attribute(study, query, batch_size=size, **EXACT)
        assert not scores.excluded
        close(scores.values, expected.numpy(), 1e-9)


def test_the_matrix_of_means_over_draws() -> None:
    """(1/N) Σ_n (1/k) Σ_r Jᵀ (diag p - p pᵀ) J, inverted."""
    model, task = network(), whence.Averaged(whence.Classification("loss"))
    train = whence.Augmented(labelled(7, 2, 5), noisy, draws=3)
    query = whence.Augmented(labelled(2, 2, 5, seed=1), draws=1)
    study = whence.Study(model, task, train, once(model), layers="all")
    how = {"solver": "cg", "tolerance": 1e-12, "iterations": 2000}
    scores = whence.Influence(damping=0.1, **how).attribute(study, query, **EXACT)
    twin = copy.deepcopy(model).eval()
    H = torch.zeros(())
    g = []
    for k in range(7):
        x, y = train[k].rows
        outputs = twin(x)
        g.append(gradient(twin, F.cross_entropy(outputs, y)))
        for row in range(3):
            J = torch.stack([gradient(twin, twin(x)[row, c]) for c in range(3)])
            p = outputs[row].detach().softmax(0)
            H = H + J.T @ (p.diag() - torch.outer(p, p)) @ J / 21
    f = torch.stack([gradient(twin, F.cross_entropy(twin(s.rows[0]), s.rows[1])) for s in query])
    solved = torch.linalg.solve(H + 0.1 * torch.eye(len(H)).double(), torch.stack(g).T)
    close(scores.values, (-(f @ solved) / 7).numpy(), 1e-6)


def test_pseudo_losses_have_the_curvature_of_the_mean() -> None:
    task = whence.Averaged(whence.Classification())
    g = torch.Generator().manual_seed(0)
    outputs = torch.randn(1, 2, 3, generator=g, dtype=torch.float64).requires_grad_()
    batch = whence.RowSet(
        (torch.zeros(1, 2, 1), torch.tensor([[0, 2]])), torch.tensor([[0.7, 0.3]])
    )
    hessian = torch.autograd.functional.hessian(
        lambda y: task.losses(y.view(1, 2, 3), batch).sum(), outputs.detach().flatten()
    )
    B = task.output_factor(outputs, batch)[0]
    np.testing.assert_allclose(B @ B.T, hessian, atol=1e-12)
    many = 20_000
    spread = outputs.detach().expand(many, 2, 3).clone().requires_grad_()
    sets = whence.RowSet(
        (torch.zeros(many, 2, 1), batch.rows[1].expand(many, 2)), batch.weights.expand(many, 2)
    )
    drawn = task.pseudo_losses(spread, sets, Uniform(0, 1, np.arange(many)))
    (slopes,) = torch.autograd.grad(drawn.sum(), spread)
    flat = slopes.flatten(1)
    np.testing.assert_allclose(flat.T @ flat / many, hessian, atol=0.01)
    np.testing.assert_allclose(flat.mean(0), 0, atol=0.01)


@pytest.mark.parametrize("curvature", ["auto", "ekfac", "kfac"])
def test_sampled_curvature_does_not_depend_on_batches(curvature: str) -> None:
    model, task = network(), whence.Averaged(whence.Classification())
    train, query = (whence.Augmented(labelled(7, 2, 5, seed=s), noisy, draws=2) for s in (0, 1))
    study = whence.Study(model, task, train, once(model), layers="all")
    method = whence.Influence(damping=0.1, curvature=curvature)
    every = [method.attribute(study, query, batch_size=n, **EXACT).values for n in (1, 4)]
    np.testing.assert_allclose(every[0], every[1], rtol=1e-8)


def test_representations_are_means_over_draws() -> None:
    model, task = network(), whence.Averaged(whence.Classification())
    train = whence.Augmented(labelled(7, 2, 5), noisy, draws=3)
    query = whence.Augmented(labelled(2, 2, 5, seed=1), draws=1)
    study = whence.Study(model, task, train, once(model))
    scores = whence.RepSim().attribute(study, query, **EXACT)
    body = copy.deepcopy(model).eval()[:-1]
    x, y = (
        torch.stack([body(each[k].rows[0]).mean(0) for k in range(len(each))]).detach()
        for each in (query, train)
    )
    close(scores.values, F.cosine_similarity(x[:, None], y[None], dim=2).numpy(), 1e-6)


def test_draws_are_the_same_again_and_leave_generators_alone() -> None:
    data = whence.Augmented(labelled(3, 2, 5), noisy, draws=4, seed=5)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    first, second = data[1], data[1]
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all() and before[2] == random.getstate()
    assert torch.equal(first.rows[0], second.rows[0])
    assert not torch.equal(first.rows[0][0], first.rows[0][1])
    other = whence.Augmented(labelled(3, 2, 5), noisy, draws=4, seed=6)[1]
    assert not torch.equal(first.rows[0], other.rows[0])


# --- language models ------------------------------------------------------------------------------


def tokens(g: torch.Generator, least: int, most: int) -> list[int]:
    size = int(torch.randint(least, most + 1, (), generator=g))
    return torch.randint(1, 5, (size,), generator=g).tolist()


def language() -> nn.Module:
    torch.manual_seed(0)
    return models.Transformer().double()


def nll(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    """Σ of the negative log-probabilities of the labelled tokens of one row."""
    log = model(ids[None])[0].log_softmax(-1)
    return -sum(
        (log[k - 1, labels[k]] for k in range(1, len(ids)) if labels[k] != -100),
        torch.zeros((), dtype=torch.float64),
    )


def test_rewards_are_weights() -> None:
    """-Σ A log p / k, the mean over each answer's tokens; groups of different sizes."""
    g = torch.Generator().manual_seed(0)
    groups = []
    for k in (2, 4, 3, 2):
        rewards = torch.randn(k, generator=g).tolist()
        groups.append(whence.group(tokens(g, 1, 3), [tokens(g, 1, 4) for _ in range(k)], rewards))
    query = [
        whence.RowSet([whence.completion(tokens(g, 1, 3), tokens(g, 1, 4))], torch.ones(1))
        for _ in range(2)
    ]
    model, task = language(), whence.Averaged(whence.LanguageModeling(measurement="log_prob"))
    study = whence.Study(model, task, groups, once(model), collate=whence.padded, layers="all")
    twin = copy.deepcopy(model).eval()

    def loss(example: whence.RowSet) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for row, weight in zip(example.rows, example.weights, strict=True):
            answer = int((row["labels"] != -100).sum())
            total = total + weight * nll(twin, row["input_ids"], row["labels"]) / answer
        return total

    f = torch.stack([gradient(twin, -loss(s)) for s in query])
    expected = -(f @ torch.stack([gradient(twin, loss(s)) for s in groups]).T).numpy()
    for size in (1, 4):
        scores = whence.TracIn().attribute(study, query, batch_size=size, **EXACT)
        assert not scores.excluded
        close(scores.values, expected, 1e-9)
    method = whence.Influence(damping=0.1)
    every = [method.attribute(study, query, batch_size=n, **EXACT).values for n in (1, 4)]
    np.testing.assert_allclose(every[0], every[1], rtol=1e-7)


def test_advantages() -> None:
    example = whence.group([1], [[2], [3], [4]], [1.0, 2.0, 6.0])
    rewards = np.array([1.0, 2.0, 6.0])
    expected = (rewards - 3) / rewards.std(ddof=1) / 3
    np.testing.assert_allclose(example.weights, expected, rtol=1e-12)
    plain = whence.group([1], [[2], [3], [4]], [1.0, 2.0, 6.0], scaled=False)
    np.testing.assert_allclose(plain.weights, (rewards - 3) / 3, rtol=1e-12)
    assert not whence.group([1], [[2], [3]], [1.0, 1.0]).weights.any()
    for answers, given in (([[2]], [1.0]), ([[2], [3]], [1.0]), ([[2], [3]], [1.0, float("nan")])):
        with pytest.raises(ValueError, match="at least two answers"):
            whence.group([1], answers, given)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_documents_in_packed_rows(reduction: str) -> None:
    """A document is what its tokens add to the losses of the rows that it is in."""
    g = torch.Generator().manual_seed(0)
    rows = [{"input_ids": torch.randint(1, 5, (6,), generator=g)} for _ in range(3)]
    numbers = [[0, 0, 0, 1, 1, 1], [1, 1, 2, 2, 2, 2], [2, 3, 3, 3, 4, 4]]
    alone = [whence.RowSet([row], torch.ones(1)) for row in rows]
    inner = whence.LanguageModeling(reduction=reduction)
    model, task = language(), whence.Averaged(inner)
    parts = whence.unpacked(rows, numbers, reduction)
    query = [whence.RowSet([{"input_ids": torch.tensor([1, 2, 3])}], torch.ones(1))]
    options: Any = {"collate": whence.padded, "layers": "all"}
    plain = whence.Study(model, task, alone, once(model), **options)
    study = whence.Study(model, task, alone, once(model), candidates=parts, **options)
    twin = copy.deepcopy(model).eval()
    f = gradient(
        twin,
        inner.measurements(
            twin(query[0].rows[0]["input_ids"][None]), query[0].rows[0]["input_ids"][None]
        )[0],
    )
    expected = np.zeros(5)
    for document in range(5):
        for row, of in zip(rows, numbers, strict=True):
            ids = row["input_ids"]
            labels = ids.masked_fill(torch.tensor(of) != document, -100)
            if (labels != -100).any():
                scale = 5 if reduction == "mean" else 1  # each row predicts five tokens
                value = nll(twin, ids, labels) / scale
                expected[document] -= float(f @ gradient(twin, value)) if value.requires_grad else 0
    scores = whence.TracIn().attribute(study, query, **EXACT).values
    close(scores, expected[None], 1e-9)
    whole = whence.TracIn().attribute(plain, query, **EXACT).values
    np.testing.assert_allclose(scores.sum(), whole.sum(), rtol=1e-9)
    with pytest.raises(ValueError, match="row 1 has 6 tokens"):
        whence.unpacked(rows, [numbers[0], [1, 2], numbers[2]])
    with pytest.raises(ValueError, match="3 rows"):
        whence.unpacked(rows, numbers[:2])


def test_tokens_of_queries_add_up() -> None:
    """One query for each token of a document: its share of the document's measurement."""
    g = torch.Generator().manual_seed(0)
    rows = [{"input_ids": torch.tensor(tokens(g, 3, 6))} for _ in range(5)]
    train = [whence.RowSet([row], torch.ones(1)) for row in rows]
    document = {"input_ids": torch.tensor([1, 4, 2, 3])}
    model, task = language(), whence.Averaged(whence.LanguageModeling())
    study = whence.Study(model, task, train, once(model), collate=whence.padded, layers="all")
    whole = whence.Source().attribute(study, [whence.RowSet([document], torch.ones(1))], **EXACT)
    each = whence.unpacked([document], [range(4)])
    by_token = whence.Source().attribute(study, each, **EXACT).values
    assert by_token.shape == (4, 5) and not by_token[0].any()  # no token predicts the first
    np.testing.assert_allclose(by_token.sum(0), whole.values[0], rtol=1e-8)


# --- lists of items -------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [2, 4])
def test_ranking(length: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    g = torch.Generator().manual_seed(0)
    items = torch.randn(9, length, 3, generator=g, dtype=torch.float64)
    which = torch.randint(0, length, (9,), generator=g)
    train, query = TensorDataset(items[:7], which[:7]), TensorDataset(items[7:], which[7:])
    study = whence.Study(model, whence.Ranking(), train, once(model))
    twin = copy.deepcopy(model)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        scores = twin(x)[:, 0]
        if length == 2:  # the logistic loss of the difference
            return F.softplus(scores[1 - y] - scores[y])
        return scores.exp().sum().log() - scores[y]

    def margin(x: Tensor, y: Tensor) -> Tensor:
        scores = twin(x)[:, 0]
        others = torch.cat([scores[:y], scores[y + 1 :]])
        return scores[y] - others.logsumexp(0)

    f = torch.stack([gradient(twin, margin(*row)) for row in query])
    expected = -(f @ torch.stack([gradient(twin, loss(*row)) for row in train]).T).numpy()
    scores = whence.TracIn().attribute(study, query, batch_size=3, **EXACT)
    close(scores.values, expected, 1e-9)
    named = [{"x": x, "labels": y} for x, y in train]

    class ByName(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = copy.deepcopy(model)

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x).squeeze(1)

    wrapped = ByName()
    study = whence.Study(wrapped, whence.Ranking(), named, once(wrapped))
    by_name = whence.TracIn().attribute(study, [{"x": x, "labels": y} for x, y in query], **EXACT)
    close(by_name.values, expected, 1e-9)


# --- what is refused ------------------------------------------------------------------------------


def test_wrong_sets_are_refused() -> None:
    model, data = network(), labelled(7, 2, 5)
    study = whence.Study(model, whence.Averaged(whence.Classification()), data, once(model))
    with pytest.raises(TypeError, match="sets of rows"):
        whence.TracIn().attribute(study, data, **EXACT)
    with pytest.raises(TypeError, match="give a task"):
        whence.Averaged("loss")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="draws=0"):
        whence.Augmented(data, draws=0)
    wrong = [whence.RowSet((x.expand(2, 2, 5), y.expand(2)), torch.ones(3)) for x, y in data]
    study = whence.Study(model, whence.Averaged(whence.Classification()), wrong, once(model))
    with pytest.raises(ValueError, match="for 3 weights"):
        whence.TracIn().attribute(study, wrong, **EXACT)
    for shape, message in (((7, 4, 3), "one score for every item"), ((7,), "needs lists of items")):
        lists = TensorDataset(torch.randn(shape).double(), torch.zeros(7).long())
        flat = nn.Linear(3, 2).double()
        study = whence.Study(flat, whence.Ranking(), lists, once(flat))
        with pytest.raises(ValueError, match=message):
            whence.TracIn().attribute(study, lists, **EXACT)
