"""The leaderboard: its tasks, the methods on it, and how large each protocol is.

The tasks are the sizes of ASTRA's settings (arXiv 2507.14740), whole batches all of them, so that a
dropped example in one protocol and a smaller subset in the other are of the same data. The smooth
ones are trained so that the derivative of the training means something: GELU instead of ReLU, large
batches, a rate that falls to zero.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

import whence
from experiments.tasks import data, models
from experiments.tasks.catalogue import TASKS
from experiments.tasks.experiment import Experiment, RecipeAndHeldOut, Scale
from experiments.tasks.methods import MethodSettings, build_method
from experiments.tasks.recipes import (
    adamw,
    first,
    frequent,
    perceptron,
    regression,
    rise_and_fall,
    sgd,
    to_zero,
)
from whence.layers.choose import Chooser, everything
from whence.retrain import SmoothAdamW

SCHEMA = 1  # of results/leaderboard.json
SINGLE, EXPECTED = "single", "expected"
FINAL, ALONG, BATCHES = "final checkpoint", "checkpoints", "batches"  # what a method needs
FULL = Scale(subsets=100, seeds=5, queries=100, runs=2)
QUICK = Scale(subsets=8, seeds=2, queries=4, runs=2)


@dataclass(frozen=True)
class Protocol:
    """How the truth is made.

    Attributes:
        in_place: as in `whence.evaluate.ground_truth`.
        alpha: the share of the examples that stays.
    """

    in_place: bool
    alpha: float

    @property
    def name(self) -> str:
        return f"{SINGLE if self.in_place else EXPECTED}-{self.alpha:g}"

    @property
    def title(self) -> str:
        if self.in_place:
            return f"Single model, {100 * (1 - self.alpha):.0f} % dropped in place"
        return f"Expected, {100 * (1 - self.alpha):.0f} % left out"


PROTOCOLS = (Protocol(True, 0.99), Protocol(True, 0.5), Protocol(False, 0.5))


# --- tasks ----------------------------------------------------------------------------------------


def head(load: Callable[[], Any], count: int) -> Any:
    """The first `count` training examples, and the held-out ones."""
    train, held_out = load()
    return first(train, count), held_out


def rows(load: Callable[[], Any], count: int, quick: bool, rate: float, wd: float) -> Any:
    """A regression task."""
    some = partial(head, load, 128 if quick else count)
    return regression(some, 2 if quick else 20, quick, rate, wd)


def pictures(name: str, noisy: bool, epochs: int, quick: bool, rate: float, wd: float) -> Any:
    """An MLP on 6,144 images."""
    return perceptron(name, noisy, epochs, quick, rate, wd, examples=128 if quick else 6144)


def photographs(quick: bool, rate: float, wd: float) -> RecipeAndHeldOut:
    """A ResNet-9 with batch norm on 3,072 images, without augmentation, in float32."""
    train, held_out = data.cifar10(128 if quick else 3072)
    recipe = whence.Recipe(
        partial(models.ResNet9, width=4 if quick else 32, autocast=False),
        whence.Classification(),
        train,
        sgd(rate, wd),
        batch_size=32 if quick else 512,
        epochs=2 if quick else 25,
        scheduler=to_zero,
    )
    return recipe, held_out


def smooth_mlp(*sizes: int) -> nn.Module:
    """Linear layers with GELUs between them."""
    layers = [nn.GELU() if isinstance(m, nn.ReLU) else m for m in models.mlp(*sizes)]  # type: ignore[attr-defined]
    return nn.Sequential(*layers)


def smooth(
    load: Callable[[], Any],
    sizes: tuple[int, ...],
    epochs: int,
    quick: bool,
    rate: float,
    wd: float,
) -> RecipeAndHeldOut:
    """A training that is nearly linear in the weights of its examples."""
    train, held_out = load()
    recipe = whence.Recipe(
        partial(smooth_mlp, *sizes),
        whence.Classification(),
        first(train, 128 if quick else None),
        sgd(rate, wd),
        batch_size=32 if quick else 256,
        epochs=2 if quick else epochs,
        scheduler=to_zero,
    )
    return recipe, held_out


def tiny_gpt(
    optimizer: Callable[[float, float], Any],
    scheduler: Callable[..., Any],
    batch: int,
    epochs: int,
    quick: bool,
    rate: float,
    wd: float,
) -> RecipeAndHeldOut:
    """A GPT of two layers on 2,048 blocks of 64 tokens."""
    train, held_out = frequent(data.wikitext2(64), 256 if quick else 2048)
    recipe = whence.Recipe(
        partial(models.gpt2, *((256, 1, 16) if quick else (2048, 2, 128)), 2, 64, autocast=False),
        whence.LanguageModeling(),
        first(train, 128 if quick else 2048),
        optimizer(rate, wd),
        batch_size=16 if quick else batch,
        epochs=2 if quick else epochs,
        scheduler=scheduler,
    )
    return recipe, held_out


def smooth_gpt(
    quick: bool, rate: float, wd: float, batch: int = 256, epochs: int = 8, eps_root: float = 1e-6
) -> RecipeAndHeldOut:
    """The GPT with an epsilon under AdamW's root, large batches and a rate that rises first."""
    optimizer = partial(smooth_adamw, eps_root=eps_root)
    return tiny_gpt(optimizer, rise_and_fall, batch, epochs, quick, rate, wd)


def smooth_resnet(
    quick: bool,
    rate: float,
    wd: float,
    batch: int = 512,
    epochs: int = 10,
    width: int = 32,
    examples: int = 3072,
) -> RecipeAndHeldOut:
    """The ResNet-9 with batch norm, with GELU, average pooling and a rate that rises first."""
    train, held_out = data.cifar10(128 if quick else examples)
    recipe = whence.Recipe(
        partial(models.smooth_resnet9, 4 if quick else width),
        whence.Classification(),
        train,
        sgd(rate, wd),
        batch_size=32 if quick else batch,
        epochs=2 if quick else epochs,
        scheduler=rise_and_fall,
    )
    return recipe, held_out


#: tasks whose training can be made smoother or rougher: `experiments.studies.smooth`
SMOOTH: Mapping[str, Callable[..., RecipeAndHeldOut]] = {
    "gpt_smooth": smooth_gpt,
    "resnet9_smooth": smooth_resnet,
}


def smooth_adamw(rate: float, weight_decay: float, eps_root: float) -> Callable[[Any], Any]:
    """AdamW with an epsilon under its root."""
    return partial(SmoothAdamW, lr=rate, weight_decay=weight_decay, eps_root=eps_root)


def task(name: str, title: str, make: Any, rates: tuple[float, float], **more: Any) -> Experiment:
    sizes: dict[str, Any] = {"full": FULL, "quick": QUICK, "trak_dimension": 512}
    return Experiment(name, title, make, rates=rates, **(sizes | more))


def digits_data() -> Any:
    return head(data.digits, 1280)


def as_published(name: str, make: Any) -> Experiment:
    """A task of the paper, at ASTRA's size."""
    return replace(TASKS[name], make=make, full=FULL, quick=QUICK, trak_dimension=512)


_BOARD = (
    as_published("concrete", partial(rows, data.concrete, 896)),
    as_published("parkinsons", partial(rows, data.parkinsons, 5280)),
    as_published("mnist", partial(pictures, "mnist", False, 20)),
    as_published("fashion_mnist", partial(pictures, "fashion_mnist", False, 20)),
    as_published("fashion_mnist_n", partial(pictures, "fashion_mnist", True, 3)),
    task(
        "cifar10",
        "CIFAR-10",
        photographs,
        (0.1, 1e-3),
        setting="ResNet-9 of half the width with batch norm, no augmentation, SGD with momentum, "
        "batch 512, 25 epochs, rate to zero",
        keep_factors=True,
    ),
    task(
        "digits_smooth",
        "Digits, smooth",
        partial(smooth, digits_data, (64, 128, 128, 10), 20),
        (3e-2, 1e-3),
        setting="MLP 64-128-128-10 with GELU, SGD with momentum 3e-2, batch 256, 20 epochs, rate "
        "to zero",
    ),
    task(
        "fashion_mnist_smooth",
        "FashionMNIST, smooth",
        partial(smooth, partial(data.images, "fashion_mnist", 6144), (784, 256, 128, 10), 10),
        (3e-2, 1e-3),
        setting="MLP 784-256-128-10 with GELU, SGD with momentum 3e-2, batch 256, 10 epochs, rate "
        "to zero",
    ),
    task(
        "gpt",
        "GPT, AdamW",
        partial(tiny_gpt, adamw, to_zero, 64, 4),
        (1e-3, 1e-2),
        setting="GPT-2 of 2 layers and width 128 from scratch, AdamW 1e-3, 2,048 blocks of 64 "
        "tokens of WikiText, batch 64, 4 epochs, rate to zero",
        keep_factors=True,
    ),
    task(
        "gpt_smooth",
        "GPT, smooth",
        smooth_gpt,
        (1e-3, 1e-2),
        setting="as GPT, AdamW, with 1e-6 added under AdamW's root, batch 256, 8 epochs, a rate "
        "that rises for a fifth of the updates and falls to zero",
        keep_factors=True,
    ),
    task(
        "resnet9_smooth",
        "ResNet-9, smooth",
        smooth_resnet,
        (0.05, 1e-3),
        setting="as CIFAR-10, with GELU and average pooling, 10 epochs, half the rate, which rises "
        "for a fifth of the updates and falls to zero",
        keep_factors=True,
    ),
)
BOARD: Mapping[str, Experiment] = {one.name: one for one in _BOARD}


# --- methods --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A method on the leaderboard.

    Attributes:
        make: builds it.
        of: in one sentence, what it is.
        needs: of the run.
        most_runs: attribute at most this many runs, where one takes long.
        layers: that it tracks (default: the task's, which are matrices).
    """

    make: Callable[[MethodSettings], Any]
    of: str
    needs: str = FINAL
    most_runs: int | None = None
    layers: Chooser | None = None


def named(name: str) -> Callable[[MethodSettings], Any]:
    return lambda settings: build_method(name, settings)


ENTRIES: Mapping[str, Entry] = {
    "Random": Entry(named("Random"), "examples of the query's class, in random order"),
    "RepSim": Entry(named("RepSim"), "similarity of the last layer's inputs"),
    "TracIn": Entry(named("TracIn"), "gradient products at the checkpoints", ALONG),
    "TRAK": Entry(named("TRAK"), "projected gradients, one model"),
    "EK-FAC": Entry(named("influence"), "influence functions, EK-FAC, damping 1e-8"),
    "EK-FAC + CG": Entry(
        named("influence, conjugate gradients"),
        "the whole Gauss-Newton matrix of all layers",
    ),
    "ASTRA-IF": Entry(
        named("ASTRA-IF"), "influence functions, EK-FAC-preconditioned stochastic iterations"
    ),
    "ASTRA-SOURCE": Entry(
        named("ASTRA-SOURCE"), "SOURCE, three segments, the same iterations", ALONG, most_runs=1
    ),
    "LoGra": Entry(named("LoGra"), "influence functions in two-sided projections of each layer"),
    "SJLT TRAK": Entry(named("SJLT TRAK"), "TRAK with a sparse projection"),
    "GraSS TRAK": Entry(named("GraSS TRAK"), "the same, on a tenth of the parameters"),
    "TrackStar": Entry(named("TrackStar"), "unit gradients, projected and whitened"),
    "DataInf": Entry(named("DataInf"), "influence functions, inverses of single examples"),
    "SOURCE": Entry(
        lambda s: whence.Source.published(s.segments, stage=s.stage),
        "as published, three segments",
        ALONG,
    ),
    "Influence()": Entry(lambda s: whence.Influence(stage=s.stage), "our influence functions"),
    "Source()": Entry(lambda s: whence.Source(stage=s.stage), "our SOURCE", ALONG),
    "Best()": Entry(lambda s: whence.Best(stage=s.stage), "one equation for all layers", ALONG),
    "Influence(), all layers": Entry(
        lambda s: whence.Influence(stage=s.stage),
        "the same with embeddings, norms and tied heads, as by default",
        layers=everything,
    ),
    "Source(), all layers": Entry(
        lambda s: whence.Source(stage=s.stage), "likewise", ALONG, layers=everything
    ),
    "Best(), all layers": Entry(
        lambda s: whence.Best(stage=s.stage), "likewise", ALONG, layers=everything
    ),
    "HYDRA": Entry(named("HYDRA"), "unrolling without the Hessian", BATCHES, most_runs=1),
    "Unrolled (MAGIC)": Entry(
        named("Unrolled"), "the exact derivative of the training", BATCHES, most_runs=1
    ),
    "Unrolled, expected": Entry(
        named("Unrolled, expected, Gauss-Newton"),
        "the derivative, with expected batches and the Gauss-Newton matrix",
        BATCHES,
        most_runs=1,
    ),
}


def read_board(file: Path) -> dict[str, Any]:
    """The content of leaderboard.json: {protocol: {task: entry}}."""
    if not file.exists():
        return {"schema": SCHEMA, "protocols": {}}
    stored: dict[str, Any] = json.loads(file.read_text())
    if stored.get("schema") != SCHEMA:
        raise ValueError(f"{file} has schema {stored.get('schema')}, not {SCHEMA}: move it")
    return stored


def build_entry(name: str, experiment: Experiment, examples: int) -> Any:
    """A method by its name, for a task with this many training examples."""
    dimension = min(experiment.trak_dimension, examples)
    return ENTRIES[name].make(MethodSettings(3, experiment.stage, dimension))
