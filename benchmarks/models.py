"""The three workloads: plain PyTorch models and random data of the right shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import whence


def mlp() -> nn.Module:
    """784-512-256-10."""
    return nn.Sequential(
        nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10)
    )


class Residual(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.inside = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        inside: Tensor = self.inside(x)
        return x + inside


def convolution(
    inputs: int, outputs: int, kernel: int = 3, stride: int = 1, padding: int = 1
) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


def resnet9() -> nn.Module:
    """The ResNet-9 of the peer's CIFAR-10 example, for 32 × 32 images."""
    return nn.Sequential(
        convolution(3, 64),
        convolution(64, 128, kernel=5, stride=2, padding=2),
        Residual(convolution(128, 128), convolution(128, 128)),
        convolution(128, 256),
        nn.MaxPool2d(2),
        Residual(convolution(256, 256), convolution(256, 256)),
        convolution(256, 128, padding=0),
        nn.AdaptiveMaxPool2d((1, 1)),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, width = x.shape
        q, k, v = (
            part.view(n, t, self.heads, -1).transpose(1, 2)
            for part in self.attention(self.ln_1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(n, t, width))
        feedforward: Tensor = self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))
        return x + feedforward


class GPT(nn.Module):
    """GPT-2's shape, with its head tied to the embedding."""

    def __init__(
        self,
        depth: int = 4,
        width: int = 256,
        vocabulary: int = 5000,
        length: int = 128,
        heads: int = 4,
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x: Tensor = self.norm(self.blocks(self.tokens(ids) + self.places(places)))
        return x @ self.tokens.weight.T


@dataclass(frozen=True)
class Workload:
    """One comparison: a model, a task and data of some size."""

    name: str
    model: Callable[[], nn.Module]
    task: whence.Task
    data: Callable[[int, int], TensorDataset]  # (examples, seed)
    train: int
    query: int
    batch: int
    reduced: tuple[int, int]  # train × query where the full size takes too long

    def sized(self, share: str) -> tuple[int, int]:
        return (self.train, self.query) if share == "full" else self.reduced


def vectors(n: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(n, 784, generator=generator), torch.randint(10, (n,), generator=generator)
    )


def images(n: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(n, 3, 32, 32, generator=generator), torch.randint(10, (n,), generator=generator)
    )


def documents(n: int, seed: int, vocabulary: int = 5000, length: int = 128) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randint(vocabulary, (n, length), generator=generator))


# The peer needs the summed token loss (with a mean its scores depend on the batch), so the
# language model is compared with reduction="sum".
WORKLOADS: dict[str, Workload] = {
    w.name: w
    for w in (
        Workload("mlp", mlp, whence.Classification(), vectors, 6000, 100, 128, (1500, 100)),
        Workload("resnet9", resnet9, whence.Classification(), images, 2000, 50, 32, (128, 50)),
        Workload("gpt", GPT, whence.LanguageModeling("sum"), documents, 512, 16, 8, (64, 16)),
    )
}


def final_run(model: nn.Module, updates: int = 100) -> Any:
    """The model as it is, as a run of one checkpoint."""
    return whence.Run.from_checkpoints([model.state_dict()], [updates], 0.01)


def run_of(model: nn.Module) -> whence.Run:
    """Six checkpoints a little apart, as a training would leave them."""
    checkpoints = []
    for _ in range(6):
        checkpoints.append({k: v.clone() for k, v in model.state_dict().items()})
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=1e-3)
    return whence.Run.from_checkpoints(checkpoints, [100 * k for k in range(1, 7)], 0.01)
