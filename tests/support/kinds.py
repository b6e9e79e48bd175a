"""Models of every kind of layer, each small enough for dense matrices, and data for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils.data import TensorDataset

from support import models
from support.autograd import Waves, normal

SIZE, VOCABULARY = 4, 6


def ids(n: int, *shape: int, seed: int = 0, rows: int = VOCABULARY) -> TensorDataset:
    g = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randint(0, rows, (n, *shape), generator=g))


def headed(*layers: nn.Module, after: int) -> nn.Module:
    return nn.Sequential(*layers, nn.LeakyReLU(0.3), nn.Flatten(), nn.Linear(after, 2))


class Picture(nn.Module):
    """As a vision transformer begins: patches, a class token, and a table of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, SIZE))
        self.positions = nn.Parameter(torch.randn(1, 6, SIZE))
        self.norm, self.head = nn.LayerNorm(SIZE), nn.Linear(SIZE, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(torch.tanh(self.norm(x)).mean(1))


class Clip(nn.Module):
    """As CLIP's encoder: parameters of its own of every shape, beside layers."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(SIZE))
        self.positions = nn.Parameter(torch.randn(8, SIZE))
        self.scale, self.temperature = nn.Parameter(torch.ones(SIZE)), nn.Parameter(torch.ones(()))
        self.projection = nn.Parameter(torch.randn(SIZE, 3))
        self.norm, self.mix = nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), 1, -1), x], 1)
        x = self.norm(x + self.positions[: x.shape[1]])
        x = x + self.scale * torch.tanh(self.mix(x))
        return x[:, 0] @ self.projection * self.temperature.exp()


class Bottleneck(nn.Module):
    """A low-rank update written by hand, beside the layer it adapts."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, 2)
        self.A, self.B = nn.Parameter(torch.randn(2, SIZE)), nn.Parameter(torch.randn(SIZE, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.base(x) + F.linear(x @ self.A.T, self.B)).mean(1))


class ScaledRMSNorm(nn.Module):
    """As Gemma's: the weight is an offset from 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * (1 + self.weight)


class TwoNumbers(nn.Module):
    """The same table, looked up twice: rows of one call meet those of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, SIZE), nn.Linear(SIZE, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(x).sum(1)) * self.table(x.flip(1)[:, :2]).sum(1))


class Bags(nn.Module):
    """Bags of all sizes, one after another, two for each example; rows have weights."""

    def __init__(self, weighted: bool = False, **settings: Any) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCABULARY, SIZE, **settings)
        self.head, self.weighted = nn.Linear(2 * SIZE, 2), weighted

    def forward(self, x: Tensor) -> Tensor:
        bags = [row[:size] for row in x for size in (int(row[0]) % 4, 2)]  # some are empty
        ids, starts = torch.cat(bags), torch.tensor([0] + [len(bag) for bag in bags]).cumsum(0)
        starts = starts if self.bag.include_last_offset else starts[:-1]
        weights = (ids + 1).to(self.head.weight).sin() if self.weighted else None
        return self.head(torch.tanh(self.bag(ids, starts, weights)).view(len(x), -1))


class ByFunction(nn.Module):
    """A table that is no module, as LoRA's for embeddings, beside parts that are never reached."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix = nn.Parameter(torch.randn(SIZE, VOCABULARY)), nn.Linear(SIZE, SIZE)
        self.head = nn.Linear(SIZE, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = F.embedding(x, self.table.T, padding_idx=-2)
        norm = self.mix(torch.eye(SIZE).to(y)).detach().norm()  # as DoRA
        return self.head(torch.tanh(self.mix(y) / norm).sum(1))


class TiedWithBias(nn.Module):
    """A head that is tied to an embedding, and has a bias of its own (BERT)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, SIZE, padding_idx=0)
        self.mix, self.head = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, VOCABULARY)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.table(x))))


class Second(nn.Module):
    """Attention that has its examples on the second axis."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention, self.head = attention, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(0))


class OneAxis(nn.Module):
    """As OPT's feed-forward layers: the tokens of all examples are one axis."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.head = nn.LayerNorm(SIZE), nn.Linear(SIZE, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.mix(self.norm(x.reshape(-1, x.shape[-1]))))
        return self.head(y.view(*x.shape[:-1], -1)).sin().sum(1)


class Windows(nn.Module):
    """As Swin: each example is cut into windows, which are rows of a layer's input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.head = nn.LayerNorm(SIZE), nn.Linear(SIZE, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        windows = x.reshape(-1, 2, SIZE)
        y = torch.tanh(self.mix(self.norm(windows))).cumsum(1)
        return self.head(y.view(*x.shape[:-1], -1)).sin().sum(1)


class Relative(nn.Module):
    """As T5's attention: a table of biases by distance, which all examples share."""

    def __init__(self) -> None:
        super().__init__()
        self.biases, self.head = nn.Embedding(4, 2), nn.Linear(SIZE, 2)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        distances = (places.unsqueeze(1) - places).abs().clamp_max(3)
        biases = self.biases(distances).permute(2, 0, 1).unsqueeze(0)
        weights = ((x @ x.mT).unsqueeze(1) + biases).softmax(-1)
        return self.head((weights @ x.unsqueeze(1)).tanh().sum((1, 2)))


def batch_norm(norm: nn.Module) -> nn.Module:
    nn.init.uniform_(norm.running_mean, -0.5, 0.5)
    nn.init.uniform_(norm.running_var, 0.5, 2.0)
    return norm


Make = Callable[[], nn.Module]
Table = dict[str, tuple[Make, Callable[..., Any], tuple[int, ...]]]
LOOKUPS: Table = {
    "Embedding": (lambda: headed(nn.Embedding(6, SIZE), after=20), ids, (5,)),
    "Embedding, one row": (lambda: headed(nn.Embedding(6, SIZE), after=4), ids, ()),
    "Embedding, more axes": (lambda: headed(nn.Embedding(6, SIZE), after=24), ids, (2, 3)),
    "Embedding, padding_idx": (
        lambda: headed(nn.Embedding(6, SIZE, padding_idx=2), after=20),
        ids,
        (5,),
    ),
    "Embedding, two calls": (TwoNumbers, ids, (5,)),
    "Embedding tied to a head with a bias": (TiedWithBias, ids, (5,)),
    **{
        f"EmbeddingBag, {mode}, padding {padding}": (
            lambda mode=mode, padding=padding: headed(
                nn.EmbeddingBag(6, SIZE, mode=mode, padding_idx=padding), after=4
            ),
            ids,
            (5,),
        )
        for mode in ("sum", "mean")
        for padding in (None, 1)
    },
    "EmbeddingBag, max, padding 1": (
        lambda: headed(nn.EmbeddingBag(6, SIZE, mode="max", padding_idx=1), after=4),
        ids,
        (5,),
    ),
    "EmbeddingBag, offsets": (lambda: Bags(include_last_offset=True), ids, (5,)),
    "EmbeddingBag, offsets, max": (lambda: Bags(mode="max", padding_idx=-6), ids, (5,)),
    "EmbeddingBag, offsets and weights": (lambda: Bags(True, mode="sum"), ids, (5,)),
}
NORMS: Table = {
    "LayerNorm": (lambda: headed(nn.LayerNorm(SIZE), after=20), normal, (5, SIZE)),
    "LayerNorm without bias": (lambda: headed(nn.LayerNorm(4, bias=False), after=4), normal, (4,)),
    "LayerNorm, two axes": (lambda: headed(nn.LayerNorm((3, 4)), after=24), normal, (2, 3, 4)),
    "RMSNorm": (lambda: headed(nn.RMSNorm(SIZE), after=20), normal, (5, SIZE)),
    "RMSNorm of another library": (lambda: headed(ScaledRMSNorm(), after=20), normal, (5, SIZE)),
    "GroupNorm": (lambda: headed(nn.GroupNorm(2, 4), after=24), normal, (4, 3, 2)),
    "BatchNorm1d": (lambda: headed(batch_norm(nn.BatchNorm1d(4)), after=4), normal, (4,)),
    "BatchNorm1d, positions": (
        lambda: headed(batch_norm(nn.BatchNorm1d(4)), after=12),
        normal,
        (4, 3),
    ),
    "BatchNorm2d": (lambda: headed(batch_norm(nn.BatchNorm2d(4)), after=24), normal, (4, 3, 2)),
    "BatchNorm3d": (lambda: headed(batch_norm(nn.BatchNorm3d(4)), after=24), normal, (4, 1, 3, 2)),
    "class token and positions": (Picture, normal, (5, SIZE)),
    "parameters of every shape": (Clip, normal, (5, SIZE)),
    "parameters as matrices": (Bottleneck, normal, (5, SIZE)),
    "tokens of all examples in one axis": (OneAxis, normal, (5, SIZE)),
    "windows": (Windows, normal, (6, SIZE)),
    "biases of attention": (Relative, normal, (5, SIZE)),
}


def convolution(layer: Make, *shape: int) -> tuple[Make, Any, tuple[int, ...]]:
    def make() -> nn.Module:
        body = nn.Sequential(layer(), nn.LeakyReLU(0.3), nn.Flatten())
        return body.append(nn.Linear(body(torch.zeros(1, *shape)).shape[1], 2))

    return make, normal, shape


CONVOLUTIONS: Table = {
    "Conv1d": convolution(lambda: nn.Conv1d(4, 3, 3, stride=2, padding=1), 4, 7),
    "Conv1d, everything": convolution(
        lambda: nn.Conv1d(
            4, 6, 2, padding="same", dilation=2, groups=2, padding_mode="circular", bias=False
        ),
        *(4, 7),
    ),
    "Conv3d": convolution(lambda: nn.Conv3d(2, 3, (1, 2, 3), stride=(1, 2, 1)), 2, 3, 4, 4),
    "Conv3d, groups": convolution(
        lambda: nn.Conv3d(4, 4, 2, padding=1, dilation=(1, 2, 1), groups=2), 4, 2, 3, 2
    ),
    "ConvTranspose1d": convolution(lambda: nn.ConvTranspose1d(4, 3, 3), 4, 5),
    "ConvTranspose1d, everything": convolution(
        lambda: nn.ConvTranspose1d(
            4, 6, 3, stride=3, padding=2, output_padding=1, dilation=2, groups=2
        ),
        *(4, 5),
    ),
    "ConvTranspose2d": convolution(
        lambda: nn.ConvTranspose2d(2, 3, (2, 3), stride=(2, 1), padding=(0, 1), bias=False), 2, 3, 2
    ),
    "ConvTranspose3d": convolution(lambda: nn.ConvTranspose3d(2, 2, 2, stride=2), 2, 2, 1, 2),
}
ATTENTION: Table = {
    "MultiheadAttention": (models.Attentive, normal, (4,)),
    "MultiheadAttention, examples second": (
        lambda: Second(nn.MultiheadAttention(4, 2)),
        normal,
        (5, 4),
    ),
    "TransformerEncoderLayer": (
        lambda: nn.Sequential(
            nn.TransformerEncoderLayer(4, 2, 6, batch_first=True), nn.Flatten(), nn.Linear(20, 3)
        ),
        normal,
        (5, 4),
    ),
}


class Sequential(nn.Module):
    """A recurrent layer that reads a sequence, whole or packed, and a head on all it returns."""

    def __init__(self, layer: nn.Module, packed: bool = False, state: bool = False) -> None:
        super().__init__()
        self.layer, self.packed, self.state = layer, packed, state
        sides, width = 1 + layer.bidirectional, layer.proj_size or layer.hidden_size
        self.head = nn.Linear(sides * width + layer.num_layers * sides * width, 2)

    def forward(self, x: Tensor) -> Tensor:
        first, hx = self.layer.batch_first, None
        if self.state:
            h = x[:, 0, 0].expand(self.layer.num_layers, self.layer.hidden_size, len(x)).mT
            hx = (h, h.sin()) if isinstance(self.layer, nn.LSTM) else h
        if self.packed:  # lengths that differ, in no order
            lengths = (x[:, 0, 0] > 0) * 2 + (x[:, 1, 1] > 0) + 1
            pack = nn.utils.rnn.pack_padded_sequence
            given = pack(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
            y, end = self.layer(given, hx)
            y, _ = nn.utils.rnn.pad_packed_sequence(y, batch_first=True, total_length=x.shape[1])
        else:
            y, end = self.layer(x if first else x.transpose(0, 1), hx)
            y = y if first else y.transpose(0, 1)
        end = end[0] if isinstance(end, tuple) else end
        return self.head(torch.cat([y.sin().sum(1), end.transpose(0, 1).flatten(1)], 1))


class Begins(nn.Module):
    """A recurrent layer, and a cell, that begin with trained states."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.cell, self.head = layer, nn.GRUCell(3, 2), nn.Linear(6, 2)
        self.states = nn.ParameterList([nn.Parameter(torch.randn(2, 1, 2)) for _ in range(2)])
        self.start = nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        h, c = (state.expand(-1, len(x), -1).contiguous() for state in self.states)
        y, _ = self.layer(x, (h, c) if isinstance(self.layer, nn.LSTM) else h * c)
        return self.head(torch.cat([y[:, -1], self.cell(x[:, 0], self.start.expand(len(x), 2))], 1))


class Stepwise(nn.Module):
    """A cell, called step by step."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell, self.head = cell, nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state[0] if isinstance(state, tuple) else state)


def recurrent(layer: Make, **how: bool) -> tuple[Make, Any, tuple[int, ...]]:
    return (lambda: Sequential(layer(), **how)), normal, (4, 3)


RECURRENT: Table = {
    "LSTM": recurrent(lambda: nn.LSTM(3, 2, batch_first=True)),
    "LSTM, everything": recurrent(
        lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True, proj_size=2, dropout=0.5)
    ),
    "LSTM without bias, given a state": recurrent(
        lambda: nn.LSTM(3, 2, bias=False, batch_first=True), state=True
    ),
    "LSTM, packed": recurrent(lambda: nn.LSTM(3, 2, bidirectional=True), packed=True),
    "GRU": recurrent(lambda: nn.GRU(3, 2, num_layers=2, bidirectional=True)),
    "GRU, packed, given a state": recurrent(lambda: nn.GRU(3, 2), packed=True, state=True),
    "RNN": recurrent(lambda: nn.RNN(3, 2, batch_first=True)),
    "RNN, relu": recurrent(lambda: nn.RNN(3, 2, nonlinearity="relu", bias=False)),
    "LSTM that begins with trained states": (
        lambda: Begins(nn.LSTM(3, 2, bidirectional=True, batch_first=True)),
        normal,
        (4, 3),
    ),
    "GRU that begins with a trained state": (
        lambda: Begins(nn.GRU(3, 2, bidirectional=True, batch_first=True)),
        normal,
        (4, 3),
    ),
    "LSTMCell": ((lambda: Stepwise(nn.LSTMCell(3, 3))), normal, (4, 3)),
    "GRUCell": ((lambda: Stepwise(nn.GRUCell(3, 3, bias=False))), normal, (4, 3)),
    "RNNCell": ((lambda: Stepwise(nn.RNNCell(3, 3))), normal, (4, 3)),
}


class OwnForward(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.tanh(), self.bias)


class Offset(nn.Embedding):
    """As OPT's and BART's positions: the first rows are not for tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.arange(x.shape[1]).unsqueeze(0) + 2)


class ChannelNorm(nn.LayerNorm):
    """As ConvNeXt's: the channels are the second axis."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, -1)).transpose(1, -1)


class Positions(nn.Module):
    """Activations plus a table of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.head = Offset(8, SIZE), nn.Linear(SIZE, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(x + self.positions(x)).mean(1))


class Scaled(nn.Module):
    """Channels times a vector and a number of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.factor = nn.Parameter(torch.ones(4)), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor, *, power: int = 1) -> Tensor:
        return x * self.scale**power * self.factor


class Adapted(nn.Module):
    """A low-rank update, and scales, as a parametrization that has parameters of its own."""

    def __init__(self, o: int, i: int) -> None:
        super().__init__()
        self.A, self.B = nn.Linear(i, 2, bias=False), nn.Parameter(torch.randn(o, 2))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.B @ self.A.weight + self.A(weight).sum()


def adapted(layer: nn.Module) -> nn.Module:
    parametrize.register_parametrization(layer, "weight", Adapted(*layer.weight.shape))
    return layer


COPIED: Table = {
    "a parametrization with parameters": (
        lambda: headed(adapted(nn.Linear(4, 3)), after=15),
        normal,
        (5, 4),
    ),
    "a table with a parametrization": (
        lambda: headed(adapted(nn.Embedding(6, SIZE)), after=20),
        ids,
        (5,),
    ),
    "a table without a module": (ByFunction, ids, (5,)),
    "weight norm": (
        lambda: headed(parametrizations.weight_norm(nn.Linear(4, 3)), after=15),
        normal,
        (5, 4),
    ),
    "weight norm of a convolution": convolution(
        lambda: parametrizations.weight_norm(nn.Conv1d(4, 4, 3, groups=2), dim=2), 4, 6
    ),
    "spectral norm": (
        lambda: headed(parametrizations.spectral_norm(nn.Linear(4, 3)), after=3),
        normal,
        (4,),
    ),
    "a forward of its own": (lambda: headed(OwnForward(4, 3), after=3), normal, (4,)),
    "a norm with a forward of its own": (lambda: headed(ChannelNorm(4), after=20), normal, (4, 5)),
    "positions with a forward of their own": (Positions, normal, (5, SIZE)),
    "scales": (lambda: headed(Scaled(), after=20), normal, (5, 4)),
    "PReLU": (lambda: headed(nn.PReLU(), after=20), normal, (5, 4)),
}


class Crossed(nn.Module):
    """Attention of one sequence to another, whose weight is cut into rows: two parts if keys are
    values, else three."""

    def __init__(self, same: bool, first: bool = True) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=first)
        self.head, self.same = nn.Linear(4, 3), same

    def forward(self, x: Tensor) -> Tensor:
        first = self.attention.batch_first
        q, k, v = (
            y if first else y.transpose(0, 1) for y in (x, x.flip(1).sin()[:, 1:], x.cos()[:, 1:])
        )
        y = self.attention(q, k, k if self.same else v, need_weights=False)[0]
        return self.head(y.mean(1 if first else 0))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = (
            nn.TransformerDecoderLayer(4, 2, 6, batch_first=True),
            nn.Linear(4, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x[:, :3], x[:, 3:].sin()).mean(1))


CROSSED: Table = {
    "attention to another sequence": (lambda: Crossed(True), normal, (5, 4)),
    "attention to keys and values": (lambda: Crossed(False, first=False), normal, (5, 4)),
    "TransformerDecoderLayer": (Decoder, normal, (5, 4)),
}
TABLE = LOOKUPS | NORMS | CONVOLUTIONS | ATTENTION | CROSSED | RECURRENT | COPIED


def made(name: str) -> tuple[nn.Module, Any, Any]:
    make, data, shape = TABLE[name]
    torch.manual_seed(0)
    model = make().double()
    for parameter in model.parameters():  # a norm begins with ones
        nn.init.normal_(parameter, std=0.5)
    return model, data(7, *shape), data(3, *shape, seed=1)


class Squares(Waves):
    """Convex, so that the Gauss-Newton matrix is positive."""

    def losses(self, outputs: Tensor, batch: Any) -> Tensor:
        return outputs.flatten(1).square().sum(1)

    def measurements(self, outputs: Tensor, batch: Any) -> Tensor:
        return outputs.flatten(1).sin().sum(1)
