"""Scores by position, and choosing layers."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from support import models
from torch import nn

import benchmarks.models
import whence
import whence.layers

EXACT: dict[str, Any] = {"dtype": torch.float64, "progress": False}


@pytest.fixture(scope="module")
def study() -> whence.Study:
    torch.manual_seed(0)
    model, task, train = models.Transformer(), whence.LanguageModeling(), models.documents()
    history = models.train_run(model, task, train, [2, 5, 9], 0.1)
    warnings.simplefilter("ignore")
    return whence.Study(model, task, train=train, runs=history.run)


@pytest.mark.parametrize(
    "method",
    [whence.Source.published(2), whence.Influence.published(1e-3), whence.TracIn()],
    ids=repr,
)
def test_positions_add_up_to_the_score(study: whence.Study, method: Any) -> None:
    query = models.documents(3, seed=1)
    scores = method.attribute(study, query, **EXACT).values
    for tokens in method.tokens(study, query, [4, 0], **EXACT):
        assert tokens.values.shape == (3, len(models.documents()[0]["input_ids"]))
        total = tokens.values.sum(1) + tokens.rest
        np.testing.assert_allclose(total, scores[:, tokens.example], rtol=1e-8, atol=1e-12)


def test_what_comes_after_pooling_is_the_rest() -> None:
    """A mean over positions and then a Linear: only the first layer has positions."""

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.each, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.tanh(self.each(x)).mean(1))

    torch.manual_seed(0)
    model = Pooled().double()
    data = torch.utils.data.TensorDataset(torch.randn(4, 6, 4).double(), torch.arange(4) % 3)
    run = whence.Run.from_checkpoints([model.state_dict()], [3], 1.0)
    study = whence.Study(model, whence.Classification("loss"), train=data, runs=run)
    (tokens,) = whence.TracIn().tokens(study, data, [1], **EXACT)
    hidden = torch.tanh(model.each(data.tensors[0])).mean(1)
    slopes = torch.autograd.grad(
        nn.functional.cross_entropy(model.head(hidden), data.tensors[1], reduction="sum"), hidden
    )[0]
    error = torch.softmax(model.head(hidden), 1) - nn.functional.one_hot(data.tensors[1], 3)
    head = (error @ error[1]) * (hidden @ hidden[1] + 1)
    np.testing.assert_allclose(tokens.rest, -head.detach().numpy(), rtol=1e-10)
    s = (slopes[:, None] / 6 * (1 - torch.tanh(model.each(data.tensors[0])) ** 2)).detach()
    x = data.tensors[0]
    same = torch.einsum("nto,uo->ntu", s, s[1]) * (torch.einsum("nti,ui->ntu", x, x[1]) + 1)
    np.testing.assert_allclose(tokens.values, -same.sum(1).numpy(), rtol=1e-10)


def test_tokens_refuses_what_is_not_there(study: whence.Study) -> None:
    with pytest.raises(IndexError, match=r"examples=\[99\].*it has"):
        whence.TracIn().tokens(study, models.documents(1, seed=1), [99], **EXACT)
    with pytest.raises(TypeError, match=r"examples=\(0, 1\) must be a whole number"):
        whence.TracIn().tokens(study, models.documents(1, seed=1), [(0, 1)], **EXACT)


def names(model: nn.Module) -> dict[str, nn.Module]:
    return {n: m for n, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))}


def test_choosers() -> None:
    layers = names(benchmarks.models.GPT(depth=3, width=8, vocabulary=11, length=4, heads=2))
    assert whence.layers.mlp_only(layers) == {
        f"blocks.{k}.{part}" for k in range(3) for part in ("projection", "up", "down")
    }
    assert whence.layers.last_blocks(1)(layers) == {n for n in layers if n.startswith("blocks.2")}
    assert whence.layers.by_type(nn.Conv2d)(layers) == set()
    layers = names(benchmarks.models.resnet9())
    assert whence.layers.by_type(nn.Linear)(layers) == {"9"}
    with pytest.raises(ValueError, match="at least one"):
        whence.layers.last_blocks(0)


def test_a_chooser_is_what_study_tracks(study: whence.Study) -> None:
    chosen = whence.Study(
        study.model,
        whence.LanguageModeling(),
        train=study.train["train"],
        runs=study.runs[0],
        layers=whence.layers.last_blocks(1),
    )
    scores = whence.TracIn().attribute(chosen, models.documents(1, seed=1), **EXACT)
    assert any(e["reason"] == "not chosen" for e in scores.excluded) or len(names(study.model)) <= 4
    assert "h.0" in str(chosen.describe())
