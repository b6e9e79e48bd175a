"""Tasks that a single core retrains a hundred times in minutes, for studies of one question."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import whence
from experiments.tasks import data, models
from experiments.tasks.experiment import Experiment, RecipeAndHeldOut, Scale
from experiments.tasks.recipes import adamw, frequent, rise_and_fall, sgd, to_zero

SCALE = Scale(subsets=60, seeds=3, queries=100, runs=2)
QUICK = Scale(subsets=4, seeds=2, queries=4, runs=1)


def photographs(quick: bool, rate: float, wd: float) -> RecipeAndHeldOut:
    """A ResNet-9 with batch norm, an eighth as wide as published, on 2,000 images."""
    train, held_out = data.cifar10(100 if quick else 2000)
    recipe = whence.Recipe(
        partial(models.ResNet9, stem_stride=2, width=4 if quick else 8, autocast=False),
        whence.Classification(),
        train,
        sgd(rate, wd),
        batch_size=20 if quick else 100,
        epochs=2 if quick else 10,
        scheduler=rise_and_fall,
    )
    return recipe, held_out


def reviews(quick: bool, rate: float, wd: float) -> RecipeAndHeldOut:
    """An encoder of two layers from scratch, on 2,000 sentences of at most 32 tokens."""
    vocabulary, examples = (256, 60) if quick else (2048, 2000)
    train, held_out = frequent(data.glue("SST-2", 32, examples), vocabulary)
    recipe = whence.Recipe(
        partial(models.small_bert, vocabulary, 1 if quick else 2, 16 if quick else 64),
        models.TextClassification(),
        train,
        adamw(rate, wd),
        batch_size=20 if quick else 50,
        epochs=2 if quick else 4,
        scheduler=to_zero,
    )
    return recipe, held_out


SMALL: Mapping[str, Experiment] = {
    "cifar10_small": Experiment(
        "cifar10_small",
        "ResNet-9 with batch norm",
        photographs,
        "ResNet-9 of an eighth of the width with batch norm, stride 2 at the stem, 2,000 images of "
        "CIFAR-10, SGD with momentum, batch 100, 10 epochs, a rate that rises and falls to zero",
        SCALE,
        QUICK,
        group="not in the paper",
        rates=(0.2, 1e-3),
    ),
    "sst2_small": Experiment(
        "sst2_small",
        "BERT of 2 layers, AdamW",
        reviews,
        "BERT of 2 layers and width 64 from scratch, 2,000 sentences of SST-2 of at most 32 "
        "tokens, AdamW, batch 50, 4 epochs, rate to zero",
        SCALE,
        QUICK,
        group="not in the paper",
        rates=(1e-3, 1e-2),
    ),
}
