"""Every kind of layer: many trainings at once are those that one makes one by one.

`ENGINES` lists the kinds of `support.kinds.TABLE` that have no stacked form of their own. These
train together by `torch.vmap`, or, for a reason that is given, one after another.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.autograd import normal
from support.kinds import TABLE, Squares
from torch import Tensor, nn

import whence
from whence.data import Batches
from whence.retrain import Training
from whence.retrain.engine_choice import choose_engine
from whence.retrain.stack import Data, train_stack

CPU = torch.device("cpu")
DRAWS = "mixes examples or draws random numbers"
ENGINES: dict[str, tuple[str | None, str]] = {
    "RMSNorm of another library": ("vmap", "0 (ScaledRMSNorm) has no stacked form"),
    "EmbeddingBag, max, padding 1": (None, "0 (EmbeddingBag) has a padding_idx"),
    "EmbeddingBag, offsets": (None, "an EmbeddingBag has offsets"),
    "EmbeddingBag, offsets, max": (None, "bag (EmbeddingBag) has a padding_idx"),
    "EmbeddingBag, offsets and weights": (None, "an EmbeddingBag has offsets"),
    "LSTM that begins with trained states": ("vmap", "the model (Begins) has no stacked form"),
    "GRU that begins with a trained state": ("vmap", "the model (Begins) has no stacked form"),
    "a parametrization with parameters": ("vmap", "0 (ParametrizedLinear) has no stacked form"),
    "a table with a parametrization": ("vmap", "(ParametrizationList) has no stacked form"),
    "a table without a module": (None, "the gradient of table is different"),  # by its padding
    "class token and positions": ("vmap", "the model (Picture) has no stacked form"),
    "parameters of every shape": ("vmap", "the model (Clip) has no stacked form"),
    "parameters as matrices": ("vmap", "the model (Bottleneck) has no stacked form"),
    "ConvTranspose1d": ("vmap", "0 (ConvTranspose1d) has no stacked form"),
    "ConvTranspose1d, everything": ("vmap", "0 (ConvTranspose1d) has no stacked form"),
    "ConvTranspose2d": ("vmap", "0 (ConvTranspose2d) has no stacked form"),
    "ConvTranspose3d": ("vmap", "0 (ConvTranspose3d) has no stacked form"),
    "weight norm": ("vmap", "0 (ParametrizedLinear) has no stacked form"),
    "weight norm of a convolution": ("vmap", "0 (ParametrizedConv1d) has no stacked form"),
    "a forward of its own": ("vmap", "0 (OwnForward) has no stacked form"),
    "a norm with a forward of its own": ("vmap", "0 (ChannelNorm) has no stacked form"),
    "positions with a forward of their own": ("vmap", "positions (Offset) has no stacked form"),
    "biases of attention": ("vmap", "5 rows cannot be divided among 2 models"),
    "scales": ("vmap", "0 (Scaled) has no stacked form"),
    "PReLU": ("vmap", "0 (PReLU) has no stacked form"),
    "TransformerEncoderLayer": (None, DRAWS),
    "TransformerDecoderLayer": (None, DRAWS),
    "LSTM, everything": (None, f"layer (LSTM) {DRAWS}"),
    "spectral norm": (None, "buffers differ between seeds"),
}
#: which `torch.vmap` cannot compute: batches of packed sequences differ in length
PACKED = ("LSTM, packed", "GRU, packed, given a state")


def recipe_of(name: str) -> tuple[whence.Recipe, Any]:
    make, data, shape = TABLE[name]
    recipe = whence.Recipe(
        model=lambda: make().double(),
        task=Squares(),
        train=data(12, *shape),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.05),
        batch_size=4,
        epochs=2,
    )
    return recipe, data(3, *shape, seed=1)


def alone(recipe: whence.Recipe, training: Training) -> nn.Module:
    """The training as an ordinary loop; orders come from the recipe."""
    task, stage = Squares(), recipe.stages[0]
    with torch.random.fork_rng():
        torch.manual_seed(training.seed)
        model = recipe.model().train()
    optimizer = stage.optimizer(model.parameters())
    for epoch in range(stage.epochs):
        examples = torch.from_numpy(training.subset)
        for rows in stage.order(training.seed, epoch, examples).split(stage.batch_size):
            batch = tuple(t[rows] for t in stage.data.dataset.tensors)
            optimizer.zero_grad()
            task.losses(task.outputs(model, batch), batch).mean().backward()
            optimizer.step()
    return model


@pytest.mark.parametrize("name", TABLE)
def test_every_kind(name: str) -> None:
    recipe, query = recipe_of(name)
    expected, reason = ENGINES.get(name, ("products", ""))
    engine, why = choose_engine(recipe, Batches("query", query), CPU)
    assert engine == expected and reason in (why or "")
    able = {"products": ["products", "vmap"], "vmap": ["vmap"], None: []}[engine]
    subsets = [np.arange(8), np.arange(3, 11), np.arange(4, 12)]
    trainings = [Training(seed, s) for seed, s in zip((3, 5, 3), subsets, strict=True)]
    models = [dict(alone(recipe, t).named_parameters()) for t in trainings] if able else []
    data = {s.name: Data(s.data, CPU, torch.float64) for s in recipe.stages}
    for each in able:
        if each == "vmap" and not _vmappable(name):
            continue
        stack = train_stack(recipe, trainings, each, CPU, data)
        for k, parameters in enumerate(models):
            for label, together in stack.state(k).items():
                if label in parameters:  # not a batch norm's statistics
                    torch.testing.assert_close(together, parameters[label].data, msg=label)


def _vmappable(name: str) -> bool:
    padded = name.startswith("EmbeddingBag") and "None" not in name
    return not padded and name not in PACKED and not name.startswith("BatchNorm")


def test_large_convolutions_take_one_model_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whence.retrain.stacked.PRODUCTS_APART", {"cpu": 1})
    for name in ("Conv1d", "Conv1d, everything", "Conv3d, groups"):
        test_every_kind(name)


class Attends(nn.Module):
    """Masks of all forms, returned weights, and keys of another width."""

    def __init__(self, form: str) -> None:
        super().__init__()
        settings: dict[str, Any] = {"kdim": 3, "vdim": 2} if form == "widths" else {}
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, bias=False, **settings)
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        form, (n, t, _) = self.form, x.shape
        key, value = (x[..., :3], x[..., :2]) if form == "widths" else (x, x)
        later = torch.ones(t, t, dtype=torch.bool).triu(1)
        masks: dict[str, Any] = {}
        if form == "causal":
            masks = {"attn_mask": later, "is_causal": True, "need_weights": False}
        elif form == "padding":
            padding = (x[:, :, 0] > 0.5) & (torch.arange(t) > 0)
            masks = {"key_padding_mask": padding, "attn_mask": later, "need_weights": False}
        elif form == "numbers":
            shifts = x[:, :, 0].repeat_interleave(2, 0).unsqueeze(1).expand(2 * n, t, t)
            masks = {"attn_mask": shifts, "average_attn_weights": False}
        y, weights = self.attention(x, key, value, **masks)
        y = y.sum(1)
        return y if weights is None else y + weights.flatten(1).sin().sum(1, keepdim=True)


@pytest.mark.parametrize("form", ["plain", "widths", "causal", "padding", "numbers"])
def test_attention(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TABLE, "attention", (lambda: Attends(form), normal, (5, 4)))
    test_every_kind("attention")


@pytest.mark.parametrize("first", [True, False])
def test_encoders_without_dropout(first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which evaluate by fused kernels that know one model only."""

    def model() -> nn.Module:
        layer = nn.TransformerEncoderLayer(4, 2, 6, 0.0, batch_first=True, norm_first=first)
        return nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))

    monkeypatch.setitem(TABLE, "encoder", (model, normal, (5, 4)))
    test_every_kind("encoder")


def test_attention_with_keys_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def model() -> nn.Module:
        attends = Attends("plain")
        attends.attention = nn.MultiheadAttention(4, 2, batch_first=True, add_bias_kv=True)
        return attends

    monkeypatch.setitem(TABLE, "attention", (model, normal, (5, 4)))
    reason = "attention has a separate key"
    monkeypatch.setitem(ENGINES, "attention", ("vmap", reason))
    test_every_kind("attention")


@pytest.mark.parametrize(
    "layer", [nn.EmbeddingBag(6, 4, mode="max"), nn.EmbeddingBag(6, 4, max_norm=1.0)]
)
def test_bags_without_a_stacked_form(layer: nn.EmbeddingBag) -> None:
    recipe, query = recipe_of("EmbeddingBag, sum, padding None")

    def model() -> nn.Module:
        settings = {"mode": layer.mode, "max_norm": layer.max_norm}
        return nn.Sequential(nn.EmbeddingBag(6, 4, **settings), nn.Linear(4, 2)).double()

    data = recipe.stages[0].data.dataset
    other = whence.Recipe(
        model, Squares(), data, lambda p: torch.optim.SGD(p, lr=0.1), batch_size=4, epochs=1
    )
    engine, why = choose_engine(other, Batches("query", query), CPU)
    assert engine != "products" and "an EmbeddingBag has" in str(why)
