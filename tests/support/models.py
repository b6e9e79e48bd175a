"""Tiny models, datasets and trainings: small enough for dense matrices, awkward on purpose."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset, default_collate

import whence
from support.dense import batch_of

# --- models ------------------------------------------------------------------------------------


def mlp(
    sizes: tuple[int, ...] = (4, 5, 4, 3), bias: bool = True, inplace: bool = True
) -> nn.Module:
    parts: list[nn.Module] = []
    for entering, leaving in pairwise(sizes):
        parts += [nn.Linear(entering, leaving, bias=bias), nn.ReLU(inplace=inplace)]
    return nn.Sequential(*parts[:-1])


class ConvNet(nn.Module):
    """Strides, padding, dilation, groups, circular padding, batch norm, in-place residual."""

    def __init__(self, bias: bool = True, classes: int = 3) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=1, bias=bias)
        self.norm = nn.BatchNorm2d(4)
        self.grouped = nn.Conv2d(4, 4, (3, 2), padding=(2, 1), dilation=2, groups=2, bias=bias)
        self.circular = nn.Conv2d(4, 3, 2, padding=1, padding_mode="circular", bias=bias)
        self.head = nn.Linear(3, classes, bias=bias)
        nn.init.uniform_(self.norm.running_mean, -0.5, 0.5)
        nn.init.uniform_(self.norm.running_var, 0.5, 2.0)
        nn.init.uniform_(self.norm.weight, 0.5, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)), inplace=True)
        y = self.grouped(x)
        y += x
        y = self.circular(F.relu_(y))
        return self.head(torch.relu_(y).mean((2, 3)))


class Conv1D(nn.Module):
    """As transformers.pytorch_utils.Conv1D: a Linear whose weight is (in, out)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf) / nx**0.5)
        self.bias = nn.Parameter(torch.randn(nf) / 10)

    def forward(self, x: Tensor) -> Tensor:
        size = (*x.shape[:-1], self.nf)
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(size)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = Conv1D(3 * width, width), Conv1D(width, width)
        self.c_fc, self.c_out = Conv1D(width + 2, width), nn.Linear(width + 2, width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, width = x.shape
        joint = self.c_attn(self.ln_1(x)).view(n, t, 3 * self.heads, -1).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(*joint.chunk(3, 1), is_causal=True)
        x = x + self.c_proj(mixed.transpose(1, 2).reshape(n, t, width))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x))))


class Transformer(nn.Module):
    """GPT-2 in small: fused qkv, Conv1D, learned positions, head tied to the embedding or not."""

    def __init__(
        self, vocabulary: int = 5, width: int = 4, heads: int = 2, depth: int = 1, tied: bool = True
    ) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(8, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.wte(input_ids) + self.wpe(
            torch.arange(input_ids.shape[1], device=input_ids.device)
        )
        for block in self.h:  # padding is on the right: causal attention never looks at it
            x = block(x)
        return self.lm_head(self.ln_f(x))


class UsedTwice(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(4, 4, bias=bias), nn.Linear(4, 3, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.fc(torch.tanh(self.fc(x)))))


class Tied(nn.Module):
    """Two Linears, one Parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.two.weight = self.one.weight
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.two(torch.tanh(self.one(x)))))


class Attentive(nn.Module):
    """nn.MultiheadAttention calls its out_proj without calling the module."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(2, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.enter(x.view(len(x), 2, 2)))
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


class DoubledLinear(nn.Linear):
    """A Linear only by name."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Subclassed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.odd, self.head = DoubledLinear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.odd(x)))


# --- data --------------------------------------------------------------------------------------


class Rows(Dataset):
    """Each example a dict, as Hugging Face datasets give them."""

    def __init__(self, **columns: Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self.columns.items()}


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def vectors(n: int = 12, inputs: int = 4, classes: int = 3, seed: int = 0) -> TensorDataset:
    g = _generator(seed)
    x = torch.randn(n, inputs, generator=g, dtype=torch.float64)
    return TensorDataset(x, torch.randint(classes, (n,), generator=g))


def images(n: int = 8, classes: int = 3, seed: int = 0) -> TensorDataset:
    g = _generator(seed)
    x = torch.randn(n, 2, 5, 4, generator=g, dtype=torch.float64)
    return TensorDataset(x, torch.randint(classes, (n,), generator=g))


def regression(n: int = 12, inputs: int = 4, outputs: int = 1, seed: int = 0) -> TensorDataset:
    g = _generator(seed)
    x = torch.randn(n, inputs, generator=g, dtype=torch.float64)
    return TensorDataset(x, torch.randn(n, outputs, generator=g, dtype=torch.float64))


def documents(n: int = 6, length: int = 4, vocabulary: int = 5, seed: int = 0) -> Rows:
    """Token ids with padding on the right, at least two tokens each."""
    g = _generator(seed)
    ids = torch.randint(vocabulary, (n, length), generator=g)
    sizes = torch.randint(2, length + 1, (n, 1), generator=g)
    sizes[0] = length
    mask = (torch.arange(length) < sizes).long()
    return Rows(input_ids=ids * mask, attention_mask=mask, labels=ids.where(mask == 1, -100))


# --- training ----------------------------------------------------------------------------------


@dataclass
class History:
    """What a training produced; the dense oracle reads this, the library reads ``run``."""

    checkpoints: list[dict[str, Tensor]]
    steps: list[int]
    rates: list[float]  # one per update
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0

    @property
    def run(self) -> Any:
        import whence

        return whence.Run.from_checkpoints(
            self.checkpoints,
            self.steps,
            self.rates,
            momentum=self.momentum,
            dampening=self.dampening,
            weight_decay=self.weight_decay,
        )


def stationary(model: nn.Module, steps: list[int], rate: float) -> History:
    """A training that never moves: the model's own weights at every checkpoint."""
    weights = copy.deepcopy(model).double().state_dict()
    return History([weights] * len(steps), steps, [rate] * steps[-1])


def train_run(
    model: nn.Module,
    task: Any,
    dataset: Any,
    steps: list[int],
    lr: float | Callable[[int], float] = 0.1,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    batch_size: int | None = None,
    collate: Callable[..., Any] = default_collate,
    seed: int = 0,
) -> History:
    """Train ``model`` in place, in float64, up to steps[-1]; keep its weights at ``steps``."""
    model.double().train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    rate = lr if callable(lr) else lambda step: lr
    rates = [rate(step) for step in range(steps[-1])]
    settings = {"momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, **settings)
    g = _generator(seed)
    checkpoints = []
    for step, value in enumerate(rates, 1):
        optimizer.param_groups[0]["lr"] = value
        chosen = torch.randperm(len(dataset), generator=g)[:batch_size].tolist()
        batch = batch_of([dataset[i] for i in chosen], collate)
        optimizer.zero_grad()
        task.losses(task.outputs(model, batch), batch).mean().backward()
        optimizer.step()
        if step in steps:
            checkpoints.append(copy.deepcopy(model.state_dict()))
    optimizer.zero_grad(set_to_none=True)
    model.eval()
    return History(checkpoints, steps, rates, momentum, dampening, weight_decay)


#: a model, its task, training data and queries
CASES: dict[str, Any] = {
    "mlp": lambda: (mlp(), whence.Classification(), vectors(20), vectors(3)),
    "conv": lambda: (ConvNet(), whence.Classification(), images(), images(3)),
    "gpt": lambda: (
        Transformer(),
        whence.LanguageModeling(),
        documents(),
        documents(3, seed=1),
    ),
}


class OneByOne(Dataset):
    """Not a TensorDataset: every example is fetched by itself."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index]
