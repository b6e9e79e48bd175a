"""Every kind of layer against plain autograd, one example at a time; what cannot be captured
exactly is left out by name.

All through the public names: with one checkpoint and rate 1, TracIn is minus the product of
gradients, whatever coordinates the library keeps them in.
"""

from __future__ import annotations

import copy
import warnings
from collections import namedtuple
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import models
from support.autograd import EXACT, Waves, check, normal, once, products, reasons, rows
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import benchmarks.models
import whence
from whence.layers.convolution import Conv2d
from whence.study import copied

# --- the table: a layer kind, its settings, its input --------------------------------------------

Row = tuple[Callable[[], nn.Module], tuple[int, ...]]

LINEAR: dict[str, Row] = {
    f"{kind}{shape}{'' if bias else ' without bias'}": (
        (lambda bias=bias: nn.Linear(4, 3, bias=bias))
        if kind == "Linear"
        else (lambda: models.Conv1D(3, 4)),
        shape,
    )
    for kind in ("Linear", "Conv1D")
    for shape in ((4,), (5, 4), (2, 3, 4), (2, 1, 3, 4))
    for bias in (True, False)
    if bias or kind == "Linear"
}

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "1x1": {"kernel_size": 1},
    "1x1, strided": {"kernel_size": 1, "stride": 2},
    "1x1, padded": {"kernel_size": 1, "padding": 1},
    "non-square": {"kernel_size": (1, 3)},
    "stride": {"stride": 2},
    "strides": {"stride": (3, 1), "kernel_size": (2, 3)},
    "padding": {"padding": 2},
    "paddings": {"padding": (0, 2), "kernel_size": (2, 3)},
    "padding same": {"padding": "same"},
    "padding same, even kernel": {"padding": "same", "kernel_size": (4, 2)},
    "padding same, dilated": {"padding": "same", "dilation": (2, 3), "kernel_size": (2, 2)},
    "padding valid": {"padding": "valid"},
    "dilation": {"dilation": 2},
    "dilations": {"dilation": (1, 2), "padding": (1, 2)},
    "groups": {"groups": 2},
    "depthwise": {"groups": 4, "out_channels": 4},
    "depthwise, multiplied": {"groups": 4, "out_channels": 8, "stride": 2, "padding": 1},
    "everything": {
        "kernel_size": (3, 2),
        "stride": (2, 1),
        "padding": (2, 1),
        "dilation": (1, 2),
        "groups": 2,
        "bias": False,
    },
} | {
    f"{mode}{how}": {"padding_mode": mode} | settings
    for mode in ("zeros", "reflect", "replicate", "circular")
    for how, settings in {
        ", padding": {"padding": (2, 1), "kernel_size": (3, 2), "stride": (1, 2)},
        ", same": {"padding": "same", "kernel_size": (2, 3), "dilation": (1, 2)},
        ", valid": {"padding": "valid"},
        ", groups": {"padding": 1, "groups": 2},
    }.items()
}
PLAIN = {"in_channels": 4, "out_channels": 6, "kernel_size": 3}
CONV: dict[str, Row] = {
    f"Conv2d {name}": ((lambda given=given: nn.Conv2d(**(PLAIN | given))), (4, 7, 6))
    for name, given in SETTINGS.items()
}
TABLE = LINEAR | CONV


@pytest.mark.parametrize("inplace", [False, True], ids=["", "in-place"])
@pytest.mark.parametrize("name", TABLE)
def test_every_layer_is_autograd(name: str, inplace: bool) -> None:
    layer, shape = TABLE[name]
    torch.manual_seed(0)
    model = nn.Sequential(layer(), nn.LeakyReLU(0.3, inplace=inplace), nn.Flatten()).double()
    width = model(torch.zeros(1, *shape, dtype=torch.float64)).shape[1]
    model.append(nn.Linear(width, 2)).double()
    train, query = normal(7, *shape), normal(3, *shape, seed=1)
    check(model, train, query)
    check(model, train, query, ["3"], layers=["0"])


def test_the_root_is_a_layer() -> None:
    torch.manual_seed(0)
    check(nn.Linear(4, 3), normal(7, 4), normal(3, 4, seed=1))
    check(nn.Conv2d(2, 3, 2), normal(7, 2, 4, 3), normal(3, 2, 4, 3, seed=1), layers="*")


class Made(nn.Module):
    """Parts by name, and a forward given as a function."""

    def __init__(self, forward: Callable[[Any, Tensor], Any], **parts: nn.Module) -> None:
        super().__init__()
        self.made = forward
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Any:
        return self.made(self, x)


def small(forward: Callable[[Any, Tensor], Any], **parts: nn.Module) -> nn.Module:
    """fc 4 → 4, head 4 → 3, and whatever else."""
    torch.manual_seed(0)
    return Made(forward, **({"fc": nn.Linear(4, 4), "head": nn.Linear(4, 3)} | parts)).double()


ROWS, QUERIES = normal(7, 4), normal(3, 4, seed=1)


# --- layers used more than once, and weights in more than one place ------------------------------


def test_a_layer_used_twice() -> None:
    torch.manual_seed(0)
    check(models.UsedTwice(), ROWS, QUERIES)
    # once on (n, i) and once on (n, t, i)
    model = small(lambda m, x: m.head(m.fc(torch.tanh(m.fc(x))[:, None] * x[:, :, None])))
    check(model, ROWS, QUERIES)


def test_a_convolution_used_twice_at_two_sizes() -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 4, 3, stride=2, padding=1, groups=2)
    model = nn.Sequential(conv, nn.ReLU(True), conv, nn.Flatten(), nn.Linear(16, 3))
    check(model, normal(7, 4, 7, 6), normal(3, 4, 7, 6, seed=1))


def test_tied_weights() -> None:
    torch.manual_seed(0)
    check(models.Tied(), ROWS, QUERIES)
    model = small(lambda m, x: m.head(torch.tanh(m.also(torch.tanh(m.fc(x))))))
    model.also = nn.Linear(4, 4).double()
    model.also.weight, model.also.bias = model.fc.weight, model.fc.bias
    check(model, ROWS, QUERIES)


def test_tied_in_part_is_left_out_by_name() -> None:
    model = small(lambda m, x: m.head(torch.tanh(m.also(torch.tanh(m.fc(x))))))
    model.also = nn.Linear(4, 4).double()
    model.also.weight = model.fc.weight  # each with a bias of its own
    scores = check(model, ROWS, QUERIES, ["fc", "also"])
    assert "but not both" in reasons(scores)["fc"] and "but not both" in reasons(scores)["also"]


def test_a_head_tied_to_an_embedding_is_no_matrix() -> None:
    torch.manual_seed(0)
    model, task = models.Transformer().double(), whence.LanguageModeling()
    norms = ["h.0.ln_1", "h.0.ln_2", "ln_f", "wpe"]
    train, query = models.documents(7), models.documents(3, seed=1)
    scores = check(model, train, query, ["wte", *norms], task=task, layers="matrices")
    assert "lm_head is tied to wte" in reasons(scores)["wte"]
    check(model, train, query, task=task)


def test_tied_names_that_a_checkpoint_file_keeps_once(tmp_path: Any) -> None:
    """Hugging Face writes a tied tensor under one of its names."""
    from safetensors.torch import save_file

    torch.manual_seed(0)
    model = models.Tied().double()
    held = {k: v.clone() for k, v in model.state_dict().items() if k != "two.weight"}
    save_file(held, tmp_path / "model.safetensors")
    run = whence.Run.from_checkpoints([tmp_path / "model.safetensors"], [1], 1.0)
    study = whence.Study(model, Waves(), train=ROWS, runs=run)
    found = whence.TracIn().attribute(study, QUERIES, **EXACT).values
    names = [name for name, _ in model.named_parameters()]
    expected = products(model, names, ROWS, QUERIES, Waves())
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_a_weight_that_is_also_used_elsewhere_is_left_out_by_name() -> None:
    model = small(lambda m, x: m.head(torch.tanh(m.fc(x)) + F.linear(x, m.fc.weight)))
    scores = check(model, ROWS, QUERIES, ["fc"])
    assert "outside the module" in reasons(scores)["fc"]
    model = small(lambda m, x: m.head(torch.tanh(m.fc(x)) * m.fc.bias))
    check(model, ROWS, QUERIES, ["fc"])


def test_a_weight_used_elsewhere_is_noticed_when_the_first_examples_are_learned() -> None:
    """The examples on which layers are checked may well have a gradient of zero."""
    model = small(lambda m, x: m.head(torch.tanh(m.fc(x)) + F.linear(x, m.fc.weight)))

    class First(Waves):
        def losses(self, outputs: Tensor, batch: Any) -> Tensor:
            learned = (batch[0][:, None] == ROWS.tensors[0][:2]).all(2).any(1)
            return super().losses(outputs, batch).where(~learned, 0.0 * outputs.sum(1))

    check(model, ROWS, QUERIES, ["fc"], task=First())


def test_weights_used_without_their_module_are_left_out_by_name() -> None:
    model = small(lambda m, x: m.head(torch.tanh(F.linear(x, m.fc.weight, m.fc.bias))))
    scores = check(model, ROWS, QUERIES, ["fc"])
    assert "never called" in reasons(scores)["fc"]


def test_an_unused_layer_is_left_out_by_name() -> None:
    model = small(lambda m, x: m.head(torch.tanh(m.fc(x))), spare=nn.Linear(5, 6))
    scores = check(model, ROWS, QUERIES, ["spare"])
    assert "never called" in reasons(scores)["spare"]


# --- in place ------------------------------------------------------------------------------------


def test_outputs_changed_in_place() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.fc(x)
        y[:, 0] = 0.0
        y[:, 1:3] *= 2.0
        y += 1.0
        return m.head(F.relu_(y))

    check(small(forward), ROWS, QUERIES)


@pytest.mark.parametrize("kind", ["Linear", "Conv1D"])
def test_outputs_at_several_positions_changed_in_place(kind: str) -> None:
    """As GPT-2 code does: q, k, v are parts of one output, and one is scaled where it stands."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.fc(x)
        q = y[..., :2]
        q *= 0.5
        return m.head(F.relu_(y)).mean(1)

    parts = {"fc": models.Conv1D(4, 4)} if kind == "Conv1D" else {}
    check(small(forward, **parts), normal(7, 5, 4), normal(3, 5, 4, seed=1))


@pytest.mark.parametrize("trained", [True, False])
def test_an_input_overwritten_after_it_was_read(trained: bool) -> None:
    """Only allowed by autograd where the layer is frozen, so that its input is not needed."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.fc(x)
        y = torch.sin(m.inside(x))
        if m.overwrites:
            x += y
        else:
            x = x + y
        return m.head(x)

    model = small(forward, inside=nn.Linear(4, 4))
    model.overwrites = True
    model.inside.requires_grad_(trained)
    twin = copy.deepcopy(model)
    twin.overwrites = False
    try:
        check(model, ROWS, QUERIES, twin=twin)
    except (ValueError, RuntimeError) as error:
        assert "inside" in str(error) and "in place" in str(error)
    except AssertionError:
        check(model, ROWS, QUERIES, ["inside"], twin=twin)


def test_a_model_that_works_on_its_input_in_place() -> None:
    """What the user gave stays as it was, and every pass sees it."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x *= 0.5
        x += 1.0
        return m.head(torch.tanh(m.fc(x)))

    train, query = normal(7, 4), normal(3, 4, seed=1)
    before = train.tensors[0].clone(), query.tensors[0].clone()
    twin = small(lambda m, x: m.head(torch.tanh(m.fc(0.5 * x + 1.0))))
    study = whence.Study(small(forward), Waves(), train=train, runs=once(small(forward)))
    scores = whence.TracIn().attribute(study, query, **EXACT)
    assert torch.equal(train.tensors[0], before[0]) and torch.equal(query.tensors[0], before[1])
    names = [name for name, _ in twin.named_parameters()]
    np.testing.assert_allclose(scores.values, products(twin, names, train, query, Waves()), 1e-9)


# --- modules with ways of their own --------------------------------------------------------------


def test_multihead_attention_is_no_matrix() -> None:
    torch.manual_seed(0)
    model = models.Attentive().double()
    check(model, ROWS, QUERIES, ["attention", "attention.out_proj"], layers="matrices")
    check(model, ROWS, QUERIES)


ENCODER_PARTS = ["self_attn", "self_attn.out_proj", "norm1", "norm2"]


@pytest.mark.parametrize("depth", [1, 2])
def test_transformer_encoder_layers(depth: int) -> None:
    """In eval mode torch has a fused path for these that calls none of their layers."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True)
    encoder = nn.TransformerEncoder(layer, depth) if depth > 1 else layer
    path = [f"0.layers.{k}." for k in range(depth)] if depth > 1 else ["0."]
    model = nn.Sequential(encoder, nn.Flatten(), nn.Linear(20, 3)).double()
    left_out = [start + part for start in path for part in ENCODER_PARTS]
    check(model, normal(7, 5, 4), normal(3, 5, 4, seed=1), left_out, layers="matrices")
    check(model, normal(7, 5, 4), normal(3, 5, 4, seed=1))


@pytest.mark.parametrize("length", [5, 2, 3])
def test_examples_on_the_second_axis_are_left_out_by_name(length: int) -> None:
    """Also where there happen to be as many positions as examples in a batch."""
    torch.manual_seed(0)

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.head(m.encoder(x.transpose(0, 1)).mean(0))

    encoder = nn.TransformerEncoderLayer(4, 2, 6)
    model = Made(forward, encoder=encoder, head=nn.Linear(4, 3)).double()
    parts = [f"encoder.{part}" for part in ["norm1", "norm2", "linear1", "linear2"]]
    train, query = normal(6, length, 4), normal(3, length, 4, seed=1)
    scores = check(model, train, query, parts)
    assert length == 2 or "the 2 examples of the batch" in reasons(scores)["encoder.linear1"]


def test_batches_of_as_many_examples_as_positions() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.head(torch.tanh(m.fc(x.transpose(0, 1))).sum(0))

    check(small(forward), normal(6, 2, 4), normal(2, 2, 4, seed=1), ["fc"], batch_size=2)


def folded(times: int) -> nn.Module:
    """The positions of all examples are one axis, and each is there `times` times."""

    def forward(m: Any, x: Tensor) -> Tensor:
        n, t, i = x.shape
        x = x.repeat_interleave(times, 1).reshape(n * t * times, i)
        return m.head(torch.tanh(m.fc(x)).view(n, t * times, -1).mean(1))

    return small(forward)


@pytest.mark.parametrize("layers", [None, ["fc"]])
@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_positions_folded_into_the_batch(layers: Any, batch_size: int) -> None:
    """Also where batch and positions are equally long, and where no other layer shows a length."""
    train, query = normal(7, 5, 4), normal(3, 5, 4, seed=1)
    left_out = ["head"] if layers else []
    check(folded(1), train, query, left_out, layers=layers, batch_size=batch_size)


def test_rows_that_are_not_the_positions_of_the_input_are_left_out_by_name() -> None:
    """As where a router chooses tokens: their order is not known."""
    scores = check(folded(2), normal(7, 5, 4), normal(3, 5, 4, seed=1), ["fc"])
    assert "(20, 4)" in reasons(scores)["fc"] and "2 examples" in reasons(scores)["fc"]


@pytest.mark.parametrize("channels", [2, 3])
def test_images_one_by_one_are_left_out_by_name(channels: int) -> None:
    """Also where a batch has as many examples as an image has channels."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.head(m.fc(torch.stack([m.conv(image).sin().mean(1) for image in x])))

    model = small(forward, conv=nn.Conv1d(channels, 4, 2))
    data = normal(7, channels, 5), normal(3, channels, 5, seed=1)
    assert "examples of the batch in front" in reasons(check(model, *data, ["conv"]))["conv"]


def test_windows_that_are_not_in_the_order_of_examples_are_left_out_by_name() -> None:
    """Windows of the same place together, or only some windows of each example."""

    def places_first(m: Any, x: Tensor) -> Tensor:
        windows = x.view(len(x), 3, 2, 4).transpose(0, 1)
        y = torch.tanh(m.fc(windows.reshape(-1, 2, 4))).view(windows.shape)
        return m.head(y.transpose(0, 1).flatten(1, 2)).sum(1)

    def some(m: Any, x: Tensor) -> Tensor:
        windows = x.reshape(-1, 2, 4)
        chosen = windows[:, 0, 0] > 0.5
        y = windows.masked_scatter(chosen[:, None, None], torch.tanh(m.fc(windows[chosen])))
        return m.head(y.view(x.shape)).sum(1)

    data = normal(7, 6, 4), normal(3, 6, 4, seed=1)
    scores = check(small(places_first), *data, ["fc"])
    assert "gradient is not that of its calls" in reasons(scores)["fc"]
    check(small(some), *data, ["fc"])


def test_positions_before_examples_in_one_axis_are_left_out_by_name() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = torch.tanh(m.fc(x.transpose(0, 1).flatten(0, 1)))
        return m.head(y.unflatten(0, (x.shape[1], -1)).mean(0))

    scores = check(small(forward), normal(7, 5, 4), normal(3, 5, 4, seed=1), ["fc"])
    assert "not that of its calls" in reasons(scores)["fc"]


def test_examples_that_change_places_are_not_mistaken_for_each_other() -> None:
    """As where sequences are sorted by length: the sum of all gradients is right, each is not."""
    model = small(lambda m, x: m.head(torch.tanh(m.fc(x.flip(0))).flip(0)))
    check(model, ROWS, QUERIES, ["fc"])


class Routed(nn.Module):
    """Only some examples go through the expert."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.expert, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.gate(x))
        chosen = (x[:, 0] > 0).nonzero()[:, 0]
        return self.head(y.index_put((chosen,), torch.sin(self.expert(y[chosen]))))


@pytest.mark.parametrize("batch_size", [2, 3])
def test_a_layer_that_sees_only_some_examples_is_refused_by_name(batch_size: int) -> None:
    """The first two, on which layers are checked, both go through it, and later one of two."""
    torch.manual_seed(0)
    x = normal(6, 4).tensors[0]
    x[:, 0] = torch.tensor([1.0, 1.0, -1.0, 1.0, 1.0, -1.0])
    model = Routed().double()
    study = whence.Study(model, Waves(), train=TensorDataset(x), runs=once(model))
    query = TensorDataset(x[:2].clone())
    with pytest.raises((ValueError, RuntimeError), match="expert"):
        whence.TracIn().attribute(study, query, batch_size=batch_size, **EXACT)


PARAMETRIZED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
}


@pytest.mark.parametrize("name", PARAMETRIZED)
def test_parametrized_weights_are_no_matrices(name: str) -> None:
    torch.manual_seed(0)
    layer = PARAMETRIZED[name](nn.Linear(4, 4))
    model = small(lambda m, x: m.head(torch.tanh(m.fc(x))), fc=layer)
    check(model, ROWS, QUERIES, ["fc", "fc.parametrizations.weight"], layers="matrices")
    check(model, ROWS, QUERIES)


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize("kind", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_the_older_normed_weights_are_left_out_by_name(kind: Any) -> None:
    torch.manual_seed(0)
    model = small(lambda m, x: m.head(torch.tanh(m.fc(x))), fc=kind(nn.Linear(4, 4)))
    model.train()(ROWS.tensors[0])  # leaves a computed weight behind, as training does
    task = Waves()
    study = whence.Study(model, task, train=ROWS, runs=once(model))
    scores = whence.TracIn().attribute(study, QUERIES, **EXACT)
    assert "parametrization" in reasons(scores)["fc"]
    names, model = ["head.weight", "head.bias"], model.eval()
    left, right = (
        rows(model, names, data, value, task)
        for data, value in ((QUERIES, task.measurements), (ROWS, task.losses))
    )
    np.testing.assert_allclose(scores.values, -(left @ right.T).numpy(), rtol=1e-9)


def test_a_recurrent_layer_that_keeps_a_computed_weight_is_left_out_by_name() -> None:
    """It is in a list of the layer, from its last forward pass."""

    layer = nn.LSTM(4, 4, batch_first=True)
    parametrizations.weight_norm(layer, "weight_hh_l0")
    model = small(lambda m, x: m.head(m.fc(m.layer(x)[0].sum(1))), layer=layer)
    model(normal(2, 3, 4).tensors[0])
    left_out = ["layer", "layer.parametrizations.weight_hh_l0"]
    data = normal(7, 5, 4), normal(3, 5, 4, seed=1)
    scores = check(model, *data, left_out, twin=copied(model))
    assert "Batching rule not implemented" in reasons(scores)["layer"]


def test_a_scripted_layer_is_refused_by_name() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        scripted = torch.jit.script(nn.Linear(4, 4))
    for model, name in (
        (small(lambda m, x: m.head(m.fc(x)), fc=scripted), "fc"),
        (scripted, "mod"),
    ):
        with pytest.raises(TypeError, match=rf"{name}.* is a torch.jit.ScriptModule"):
            whence.Study(model, Waves(), ROWS, once(model))


def test_a_lazy_layer_that_has_no_values_is_refused() -> None:
    lazy = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2))
    with pytest.raises(ValueError, match=r"0\.weight has no values yet.*call the model"):
        once(lazy)
    whole = copy.deepcopy(lazy)
    whole(torch.zeros(1, 4))
    with pytest.raises(ValueError, match="lazy layer"):
        whence.Study(lazy, Waves(), normal(7, 4), once(whole))
    check(whole.double(), normal(7, 4), normal(3, 4, seed=1))


def test_a_model_that_keeps_an_activation_of_its_last_training_step() -> None:
    """Such as attention weights, for plots."""

    def forward(m: Any, x: Tensor) -> Tensor:
        m.seen = torch.tanh(m.fc(x))
        return m.head(m.seen)

    model = small(forward)
    model(ROWS.tensors[0])
    study = whence.Study(model, Waves(), train=ROWS, runs=once(model))
    found = whence.TracIn().attribute(study, QUERIES, **EXACT).values
    fresh = small(forward)
    names = [name for name, _ in fresh.named_parameters()]
    expected = products(fresh, names, ROWS, QUERIES, Waves())
    np.testing.assert_allclose(found, expected, rtol=1e-9)


class Silent(nn.Linear):
    """A subclass that computes what Linear does."""


class Standardized(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return self._conv_forward(x, weight, self.bias)


class Hidden(nn.Conv2d):
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, weight.tanh(), bias)


def test_subclasses() -> None:
    model = small(lambda m, x: m.head(torch.tanh(m.fc(x))), fc=Silent(4, 4))
    check(model, ROWS, QUERIES)
    torch.manual_seed(0)
    check(models.Subclassed(), ROWS, QUERIES)
    scores = check(models.Subclassed(), ROWS, QUERIES, ["odd"], layers="matrices")
    assert "DoubledLinear is a subclass of Linear" in reasons(scores)["odd"]
    for kind in (Standardized, Hidden):
        model = nn.Sequential(kind(2, 3, 2), nn.Flatten(), nn.Linear(18, 3))
        train, query = normal(7, 2, 4, 3), normal(3, 2, 4, 3, seed=1)
        check(model, train, query)
        scores = check(model, train, query, ["0"], layers="matrices")
        assert f"{kind.__name__} is a subclass of Conv2d" in reasons(scores)["0"]


def test_a_forward_or_a_hook_put_on_one_layer_is_left_out_by_name() -> None:
    model = small(lambda m, x: m.head(torch.tanh(m.fc(x))))
    model.fc.register_forward_hook(lambda module, inputs, output: 2 * output)
    check(model, ROWS, QUERIES, ["fc"])
    model = small(lambda m, x: m.head(torch.tanh(m.fc(x))))
    weight = model.fc.weight
    model.fc.forward = lambda x: F.linear(x, weight.detach()).sin()
    check(model, ROWS, QUERIES, ["fc"])


def test_called_by_keyword() -> None:
    model = small(lambda m, x: m.head(torch.tanh(m.fc(input=x))))
    check(model, ROWS, QUERIES)


def test_called_without_gradients_is_left_out_by_name() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = torch.tanh(m.fc(x))
        return m.head(x)

    scores = check(small(forward), ROWS, QUERIES, ["fc"])
    assert "no_grad" in reasons(scores)["fc"]


def test_a_model_wholly_without_gradients_is_refused() -> None:
    model = small(torch.no_grad()(lambda m, x: m.head(torch.tanh(m.fc(x)))))
    study = whence.Study(model, Waves(), train=ROWS, runs=once(model))
    with pytest.raises(ValueError, match=r"no layer .* tracked: fc.weight: .*no_grad"):
        whence.TracIn().attribute(study, QUERIES, **EXACT)


def test_called_where_gradients_are_switched_off() -> None:
    model = small(lambda m, x: m.head(torch.tanh(m.fc(x))))
    with torch.no_grad():
        study = whence.Study(model, Waves(), train=ROWS, runs=once(model))
        found = whence.Source.published(1).attribute(study, QUERIES, **EXACT).values
    assert np.array_equal(
        found, whence.Source.published(1).attribute(study, QUERIES, **EXACT).values
    )


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("inside", [None, nn.PReLU, partial(nn.GRUCell, 4, 4)])
def test_gradient_checkpointing(inside: Any, reentrant: bool) -> None:
    """Also of layers whose forward is computed in another way during a forward pass only."""

    def made(checkpointed: bool) -> nn.Module:
        def part(m: Any, y: Tensor) -> Tensor:
            return torch.tanh(m.inside(m.fc(y)))

        def forward(m: Any, x: Tensor) -> Tensor:
            y = m.first(x)
            again = partial(checkpoint, use_reentrant=reentrant) if checkpointed else _call
            return m.head(again(partial(part, m), y))

        torch.manual_seed(0)
        layer = nn.Identity() if inside is None else inside()
        return small(forward, inside=layer, first=nn.Linear(4, 4))

    check(made(True), ROWS, QUERIES, twin=made(False))


def _call(function: Any, x: Tensor) -> Tensor:
    return function(x)


def test_a_detached_layer_scores_nothing() -> None:
    """Its gradient is zero, as autograd says."""
    check(small(lambda m, x: m.head(torch.tanh(m.fc(x)).detach() + x)), ROWS, QUERIES)


def test_what_the_run_never_moved_is_left_out_without_a_warning() -> None:
    """All of a norm, or only its bias: its weight is tracked."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3)).double()
    names = [name for name, _ in model.named_parameters()]

    def attributed(*frozen: str) -> tuple[whence.Scores, list[str]]:
        moved = [name for name in names if name not in frozen]
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        run = whence.Run.from_checkpoints([weights], [4], 0.1, groups=[moved])
        study = whence.Study(model, whence.Classification(), models.vectors(), run)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            scores = whence.TracIn().attribute(study, models.vectors(2, seed=1), progress=False)
        return scores, [str(w.message) for w in caught if "left out" in str(w.message)]

    frozen = "frozen: no update of the run moved it"
    scores, told = attributed("1.weight", "1.bias", "0.weight", "0.bias")
    assert {e["name"]: e["reason"] for e in scores.excluded} == {"0": frozen, "1": frozen}
    assert told == [] and scores.diagnostics["tracked"] == (
        "all 18 trained parameters are tracked; frozen: 2 layers (35 parameters that no update of "
        "the run moved)"
    )
    assert scores.left_out == (0, []) and "left out     nothing" in repr(scores)
    scores, told = attributed("1.bias")
    assert {e["name"]: e["reason"] for e in scores.excluded} == {"1": frozen}
    assert told == [] and scores.left_out == (0, [])


LAYERS_WITH_A_BIAS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 4),
    "layer norm": lambda: nn.LayerNorm(4),
    "convolution": lambda: nn.Conv2d(4, 4, 2, groups=2),
    "batch norm": lambda: nn.BatchNorm2d(4),
    "group norm": lambda: nn.GroupNorm(2, 4),
    "transposed": lambda: nn.ConvTranspose2d(4, 4, 2),
}


@pytest.mark.parametrize("rates", [(0.0, 0.1), (0.1, 0.0), (0.1, 0.2)])
@pytest.mark.parametrize("layer", LAYERS_WITH_A_BIAS)
def test_a_weight_and_a_bias_with_rates_of_their_own(
    layer: str, rates: tuple[float, float]
) -> None:
    """As where only biases are fine-tuned; against autograd, parameter by parameter."""
    torch.manual_seed(0)
    shape = (4,) if layer in ("linear", "layer norm") else (4, 3, 3)
    first = nn.Sequential(nn.Identity(), LAYERS_WITH_A_BIAS[layer](), nn.Tanh(), nn.Flatten())
    model = nn.Sequential(*first, nn.LazyLinear(3)).double().eval()
    train, query = normal(7, *shape), normal(3, *shape, seed=1)
    model(train.tensors[0])
    groups = [["1.weight"], ["1.bias"], ["4.weight", "4.bias"]]
    steps = [[*rates, 0.1]]
    run = whence.Run.from_checkpoints([model.state_dict()], [1], steps, groups=groups)
    study = whence.Study(model, Waves(), train=train, runs=run)
    scores = whence.TracIn().attribute(study, query, **EXACT)
    assert scores.left_out == (0, [])
    expected = sum(
        rate * products(model, names, train, query, Waves())
        for rate, names in zip(steps[0], groups, strict=True)
    )
    np.testing.assert_allclose(scores.values, expected, rtol=1e-9, atol=1e-12)
    whence.Source(segments=1).attribute(study, query, **EXACT)


def test_frozen_in_the_model_is_not_left_out() -> None:
    """What was trained is for the run to say."""
    model = small(lambda m, x: m.head(torch.tanh(m.fc(x))))
    model.requires_grad_(False)
    check(model, ROWS, QUERIES)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.BatchNorm2d])
def test_batch_norm_without_running_statistics_is_refused(norm: Any) -> None:
    shape = (4,) if norm is nn.BatchNorm1d else (4, 3, 2)
    torch.manual_seed(0)
    first = nn.Linear(4, 4) if norm is nn.BatchNorm1d else nn.Conv2d(4, 4, 1)
    model = nn.Sequential(first, norm(4, track_running_stats=False), nn.Flatten())
    model.append(nn.LazyLinear(3)).double()(torch.zeros(2, *shape, dtype=torch.float64))
    study = whence.Study(model, Waves(), train=normal(7, *shape), runs=once(model))
    with pytest.raises(ValueError, match=r"rest of its batch|running statistics"):
        whence.TracIn().attribute(study, normal(3, *shape, seed=1), **EXACT)


def test_batch_norm_is_no_matrix() -> None:
    torch.manual_seed(0)
    model, task = models.ConvNet().double(), whence.Classification()
    check(model, models.images(7), models.images(3, seed=1), task=task)
    left_out = ["norm"]
    check(model, models.images(7), models.images(3, seed=1), left_out, task=task, layers="matrices")


# --- batches and outputs --------------------------------------------------------------------------


def test_mappings_go_in_by_name_and_logits_come_out() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, scale: Tensor, features: Tensor) -> Any:
            y = self.head(torch.tanh(self.fc(features)) * scale[:, None])
            return SimpleNamespace(logits=y, hidden=None)

    def data(n: int, seed: int) -> models.Rows:
        x, y = models.vectors(n, seed=seed).tensors
        return models.Rows(features=x, label=y, scale=x[:, 0].exp())

    torch.manual_seed(0)
    check(Named().double(), data(7, 0), data(3, 1), task=whence.Classification("loss"))


def test_an_output_that_is_no_tensor_says_what_to_do() -> None:
    model = small(lambda m, x: {"y": m.head(torch.tanh(m.fc(x)))})
    study = whence.Study(model, Waves(), train=ROWS, runs=once(model))
    with pytest.raises(TypeError, match=r"returned dict, not a tensor: override outputs"):
        whence.TracIn().attribute(study, QUERIES, **EXACT)


Point = namedtuple("Point", ["x", "y"])


def test_named_tuples_keep_their_names() -> None:
    class ByName(Waves):
        def outputs(self, model: nn.Module, batch: Any) -> Tensor:
            return model(batch.x) * batch.y[:, None]

    def points(data: TensorDataset) -> list[Point]:
        return [Point(x, x[0]) for (x,) in data]

    model = small(lambda m, x: m.head(torch.tanh(m.fc(x))))
    check(model, points(ROWS), points(QUERIES), task=ByName())


# --- what is said ---------------------------------------------------------------------------------


def test_what_is_left_out_is_said_once_by_name_and_share() -> None:
    parts = {"norm": nn.LayerNorm(4), "odd": models.DoubledLinear(4, 4)}
    model = small(lambda m, x: m.head(m.norm(torch.tanh(m.odd(m.fc(x))))), **parts)
    runs = [once(model), once(model, 2)]
    study = whence.Study(model, Waves(), train=ROWS, runs=runs, layers="matrices")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scores = whence.TracIn().attribute(study, QUERIES, **EXACT)
    said = [str(w.message) for w in caught if "left out" in str(w.message)]
    total = 20 + 15 + 8 + 20
    assert len(said) == 1  # for both runs
    assert f"{35 / total:.1%} of {total} parameters are tracked" in said[0]
    assert f"norm ({8 / total:.1%}: not chosen)" in said[0]
    assert f"odd ({20 / total:.1%}: DoubledLinear is" in said[0]
    shares = {part["name"]: part["share"] for part in scores.excluded}
    assert shares == pytest.approx({"norm": 8 / total, "odd": 20 / total})
    assert {p["name"]: p["parameters"] for p in scores.excluded} == {"norm": 8, "odd": 20}
    assert "44.4% of the trained parameters: odd, norm" in repr(scores).replace(
        "norm, odd", "odd, norm"
    )
    described = str(study.describe())
    assert "left out: " in described and "odd" in described
    assert "<table>" in study.describe()._repr_html_()


def test_a_warning_names_the_largest_three_layers_that_are_left_out() -> None:
    norms = {f"norm{k}": nn.LayerNorm(4) for k in range(6)}
    model = small(
        lambda m, x: m.head(_through(m, torch.tanh(m.odd(m.fc(x))))),
        **norms,
        odd=models.DoubledLinear(4, 4),
    )
    study = whence.Study(model, Waves(), train=ROWS, runs=once(model), layers="matrices")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        whence.TracIn().attribute(study, QUERIES, **EXACT)
    (said,) = [str(w.message) for w in caught if "left out" in str(w.message)]
    assert said.count("norm") == 2 and "left out: odd (" in said and "and 4 more" in said
    assert str(study.describe()).count("norm") == 6  # where there is room for all


def _through(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    for k in range(6):
        x = getattr(model, f"norm{k}")(x)
    return x


def test_chosen_layers() -> None:
    torch.manual_seed(0)
    model = models.mlp().double()
    scores = check(model, ROWS, QUERIES, ["2"], layers=["0", "[3-9]"])
    assert reasons(scores) == {"2": "not chosen"}
    check(model, ROWS, QUERIES, ["0", "4"], layers="2")
    parts = [
        whence.TracIn()
        .attribute(whence.Study(model, Waves(), ROWS, once(model), layers=k), QUERIES, **EXACT)
        .values
        for k in ("0", "2", "4")
    ]
    np.testing.assert_allclose(sum(parts), check(model, ROWS, QUERIES).values, rtol=1e-9)


@pytest.mark.parametrize("layers", [["decoder.*"], ["0", "decoder.*"]])
def test_a_pattern_that_matches_nothing(layers: list[str]) -> None:
    model = models.mlp().double()
    study = whence.Study(model, Waves(), train=ROWS, runs=once(model), layers=layers)
    with pytest.raises(ValueError, match=r"layers=\['decoder.\*'\] match no layer") as error:
        whence.TracIn().attribute(study, QUERIES, **EXACT)
    assert all(name in str(error.value).split("match no layer")[1] for name in "024")


def test_a_pattern_that_matches_only_what_cannot_be_tracked() -> None:
    torch.manual_seed(0)
    model = models.Subclassed().double()
    study = whence.Study(model, Waves(), train=ROWS, runs=once(model), layers="odd")
    with pytest.raises(ValueError, match=r"odd.weight: DoubledLinear is a subclass"):
        whence.TracIn().attribute(study, QUERIES, **EXACT)


# --- a real network -------------------------------------------------------------------------------


def test_resnet9() -> None:
    torch.manual_seed(0)
    model = benchmarks.models.resnet9().double()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.5, 0.5)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    data = benchmarks.models.images(4, 0)
    train = TensorDataset(data.tensors[0].double(), data.tensors[1])
    task, name = whence.Classification("loss"), "5.inside.1.0"
    study = whence.Study(model, task, train=train, runs=once(model), layers=name)
    with pytest.warns(UserWarning, match=r"left out: .* more"):
        scores = whence.TracIn().attribute(study, train, batch_size=4, **EXACT)
    expected = products(model, [f"{name}.weight"], train, train, task)
    np.testing.assert_allclose(scores.values, expected, rtol=1e-9, atol=1e-12 * abs(expected).max())


@settings(
    deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.integers(1, 3), st.integers(1, 4), st.integers(1, 5), st.integers(1, 5), st.integers(0, 99)
)
def test_the_short_cut_for_3_by_3_convolutions_is_the_gram_of_the_patches(
    n: int, c: int, h: int, w: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, c, h, w, generator=generator, dtype=torch.float64)
    layer, kind = nn.Conv2d(c, 2, 3, padding=1), Conv2d()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("whence.layers.convolution.MIN_CHANNELS", 1)
        total = torch.zeros(9 * c, 9 * c, dtype=torch.float64)
        sums = kind.add_gram(layer, x, total)
    (patches,) = kind.inputs(layer, x)
    flat = patches.reshape(-1, 9 * c)
    assert torch.allclose(torch.triu(total), torch.triu(flat.T @ flat))
    assert torch.allclose(sums, flat.sum(0))
