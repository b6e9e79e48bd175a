"""The recipes of the paper's tasks (appendix B.1): model, data, optimizer, schedule.

Each builder returns the recipe and the held-out data. It takes `quick` (the small version), a
learning rate and a weight decay last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import whence
from experiments.tasks import data, models
from experiments.tasks.experiment import RecipeAndHeldOut


def sgd(rate: float, weight_decay: float, momentum: float = 0.9) -> Callable[[Any], Any]:
    return partial(torch.optim.SGD, lr=rate, momentum=momentum, weight_decay=weight_decay)


def adamw(rate: float, weight_decay: float) -> Callable[[Any], Any]:
    return partial(torch.optim.AdamW, lr=rate, weight_decay=weight_decay)


def to_zero(optimizer: Any, total_steps: int) -> Any:
    """A learning rate that falls linearly to zero, as in the Transformers library's scripts."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total_steps)


def rise_and_fall(optimizer: Any, total_steps: int) -> Any:
    """A learning rate that rises for a fifth of the updates, then falls to zero (as TRAK)."""

    def at(step: int) -> float:
        done = (step + 1) / (total_steps + 1)
        return min(done / 0.2, (1 - done) / 0.8)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, at)


def crop_and_flip(batch: Any, uniform: Any) -> Any:
    """A random 32 × 32 crop of the image padded by 4, flipped half of the time."""
    images, labels = batch
    random: Tensor = uniform(3)
    count, _, height, width = images.shape
    padded = F.pad(images, (4, 4, 4, 4))
    down, right = ((random[:, k] * 9).long().clamp(max=8) for k in (0, 1))
    rows = down[:, None] + torch.arange(height, device=images.device)
    columns = right[:, None] + torch.arange(width, device=images.device)
    columns = torch.where(random[:, 2:] < 0.5, columns.flip(1), columns)
    each = torch.arange(count, device=images.device)[:, None, None]
    cropped = padded[each, :, rows[:, :, None], columns[:, None, :]]  # (n, h, w, c)
    return cropped.permute(0, 3, 1, 2), labels


def first(dataset: TensorDataset, count: int | None) -> TensorDataset:
    """The first `count` examples; None for all."""
    return TensorDataset(*(column[:count] for column in dataset.tensors))


def frequent(sets: Sequence[TensorDataset], vocabulary: int) -> list[TensorDataset]:
    """Token ids, the first column, in a vocabulary of the first set's most frequent tokens.

    All other tokens become one token, the last.
    """
    counts = torch.bincount(sets[0].tensors[0].flatten(), minlength=2**16)
    new_id = torch.full_like(counts, vocabulary - 1)
    new_id[counts.argsort(descending=True, stable=True)[: vocabulary - 1]] = torch.arange(
        vocabulary - 1
    )
    return [TensorDataset(new_id[each.tensors[0]], *each.tensors[1:]) for each in sets]


def regression(
    load: Callable[[], Any],
    epochs: int,
    quick: bool,
    rate: float,
    wd: float,
    measurement: str = "absolute_error",
) -> RecipeAndHeldOut:
    train, held_out = load()
    model = partial(models.mlp, train.tensors[0].shape[1], 128, 128, 128, 1)
    task = whence.Regression(measurement=measurement)
    return whence.Recipe(model, task, train, sgd(rate, wd), 32, epochs), held_out


def linear(
    load: Callable[[], Any], task: whence.Task, quick: bool, rate: float, wd: float
) -> RecipeAndHeldOut:
    train, held_out = load()
    outputs = 2 if isinstance(task, whence.Classification) else 1
    model = partial(models.mlp, train.tensors[0].shape[1], outputs)
    return whence.Recipe(model, task, train, sgd(rate, wd, 0.0), 32, epochs=3), held_out


def perceptron(
    name: str,
    noisy: bool,
    epochs: int,
    quick: bool,
    rate: float,
    wd: float,
    examples: int | None = None,
) -> RecipeAndHeldOut:
    count = examples or (1200 if quick else 6000)
    train, held_out = data.images(name, count, noisy=noisy)
    sizes = (784, 128, 64, 10) if quick else (784, 512, 256, 128, 10)
    return (
        whence.Recipe(
            partial(models.mlp, *sizes), whence.Classification(), train, sgd(rate, wd), 64, epochs
        ),
        held_out,
    )


def digits(
    optimizer: Callable[..., Any],
    quick: bool,
    rate: float,
    wd: float,
    epochs: int = 20,
    scheduler: Any = None,
) -> RecipeAndHeldOut:
    train, held_out = data.digits()
    model = partial(models.mlp, 64, 128, 128, 128, 10)
    recipe = whence.Recipe(
        model, whence.Classification(), train, optimizer(rate, wd), 64, epochs, scheduler=scheduler
    )
    return recipe, held_out


def rotated(quick: bool, rate: float, wd: float) -> RecipeAndHeldOut:
    train, held_out = data.rotated_mnist(1500 if quick else 12_500)
    sizes = (784, 128, 64, 10) if quick else (784, 512, 256, 128, 10)
    recipe = whence.Recipe(
        partial(models.mlp, *sizes),
        whence.Classification(),
        train,
        sgd(rate, wd),
        batch_size=128,
        epochs={"first": 20, "second": 10},
    )
    return recipe, held_out


def cifar10(quick: bool, rate: float, wd: float) -> RecipeAndHeldOut:
    train, held_out = data.cifar10(1000 if quick else 10_000)
    recipe = whence.Recipe(
        partial(models.ResNet9, width=16 if quick else 64),
        whence.Classification(),
        train,
        sgd(rate, wd),
        batch_size=100 if quick else 512,
        epochs=8 if quick else 25,
        scheduler=rise_and_fall,
        transform=crop_and_flip,
    )
    return recipe, held_out


def pacs(quick: bool, rate: float, wd: float) -> RecipeAndHeldOut:
    stages, held_out = data.pacs()
    every = {"first": 7, "second": 4}  # every 7th image: the images are sorted by domain
    train = {
        name: TensorDataset(*(c[:: every[name] if quick else 1] for c in stage.tensors))
        for name, stage in stages.items()
    }
    recipe = whence.Recipe(
        partial(models.ResNet9, classes=7, stem_stride=2, width=16 if quick else 32),
        whence.Classification(),
        train,
        sgd(rate, wd),
        batch_size=64 if quick else 128,
        epochs={"first": 6, "second": 3} if quick else {"first": 30, "second": 10},
    )
    return recipe, held_out


def glue(
    name: str, length: int, train: int | None, quick: bool, rate: float, wd: float
) -> RecipeAndHeldOut:
    examples, held_out = data.glue(name, 48 if quick else length, 160 if quick else train)
    recipe = whence.Recipe(
        models.minilm,
        models.TextClassification(),
        examples,
        adamw(rate, wd),
        batch_size=16 if quick else 32,
        epochs=3,
        scheduler=to_zero,
    )
    return recipe, held_out


def wikitext2(quick: bool, rate: float, wd: float) -> RecipeAndHeldOut:
    length, vocabulary = (64, 1024) if quick else (512, 8192)
    train, held_out = frequent(data.wikitext2(length), vocabulary)
    size = (2, 64, 2) if quick else (4, 256, 4)
    recipe = whence.Recipe(
        partial(models.gpt2, vocabulary, *size, length),
        whence.LanguageModeling(),
        first(train, 400 if quick else None),
        adamw(rate, wd),
        batch_size=8,
        epochs=5,
        scheduler=to_zero,
    )
    return recipe, held_out
