"""The paper's tasks (appendix B.1): a recipe each, the queries it is asked about, and how much of
its evaluation is done here."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import whence

from . import data, models

RESULTS = Path(__file__).parent / "results"
Held = TensorDataset  # queries from its front, validation examples from its back
Made = tuple[whence.Recipe, Held]

# The order is that of tables and figures.
PAPER = ("RepSim", "TracIn", "TRAK", "influence", "FastSource", "SOURCE, L = 1", "SOURCE")
STAGED = tuple(name for name in PAPER if name != "SOURCE, L = 1")  # a segment never spans stages
# with Adam, 1e-8 in the inverse of SOURCE's preconditioned form is little: others beside it
FORMS = ("SOURCE, λP⁻¹", "SOURCE, exact")
FLOORED = tuple(f"{name}, floor" for name in FORMS)
ONE_SEGMENT = ("SOURCE, exact, L = 1", "SOURCE, exact, floor, L = 1")
ADAM = (*PAPER, *FORMS, *FLOORED)
# An inverse at 1e-8 makes much of TF32's rounding: `experiments.rounding` measures how much.
EXACT = ("influence",)
MIXED = ("influence", "FastSource", "SOURCE, L = 1", "SOURCE")  # with Adam
MORE = (*PAPER, 'influence (λ = "source")', "DataInf", "Random")
DEAR = (
    "HYDRA",
    "Unrolled",
    "Unrolled, expected, Gauss-Newton",
    "influence, conjugate gradients",
    "influence, Arnoldi",
)
WHOLE = "SOURCE, Gauss-Newton"  # of all layers together
LINEAR = ("TracIn", "influence", "SOURCE, L = 1")
OTHER_FORMS = dict.fromkeys((*FORMS, *FLOORED), 1)  # they take long on language models


@dataclass(frozen=True)
class Removal:
    """Subset removal (appendix B.3): how many queries, how many examples to remove, seeds."""

    queries: int = 100
    k: tuple[int, ...] = ()
    seeds: int = 3
    select_seeds: int = 5
    methods: tuple[str, ...] = ("TracIn", "TRAK", "influence", "SOURCE")


@dataclass(frozen=True)
class Scale:
    """How much of a task is done.

    Attributes:
        subsets, seeds: M and R of the truth at α = ½.
        queries: how many.
        measured: how many the trainings of the truth measure, if more: attributed later, they need
            no training.
        runs: models in an ensemble.
        fewer: the same, of methods that have fewer.
        alphas: other sampling ratios at which the LDS is measured; 1.0 stands for 1 - 1/N.
        epochs: numbers of epochs at which it is measured anew at α = 0.9.
        downsampled: half-data models for Downsampling.
        removal: subset removal.
        panels: queries whose most helpful and harmful examples are kept.
    """

    subsets: int = 100
    seeds: int = 10
    queries: int = 500
    measured: int = 0
    runs: int = 10
    fewer: Mapping[str, int] = field(default_factory=dict)
    alphas: tuple[float, ...] = ()
    epochs: tuple[int, ...] = ()
    downsampled: int = 0
    removal: Removal | None = None
    panels: int = 0

    def models(self, method: str) -> int:
        """How many models a method is judged on."""
        return min(self.runs, self.fewer.get(method, self.runs))


@dataclass(frozen=True)
class Experiment:
    """One task.

    Attributes:
        make: the recipe and the held-out data, small or not, with a rate and a weight decay.
        setting: model and training, in words.
        paper_seeds: R of the paper.
        differs: what is not as in the paper.
        group: "converged", "not converged", "two stages", "linear", or "not in the paper".
        rates: learning rate and weight decay; None where `experiments.search` found them.
        grid: what it searches: rates and weight decays.
        segments, checkpoints, trak: L, C and TRAK's dimension.
        methods, dear: what is judged, and what last of all.
        stage: whose data is attributed to and resampled.
        gpu: whether the whole needs one to be done in a sitting.
        exact: methods whose products are never rounded to TF32.
        kept: whether fitted factors are kept between methods (then `seconds` are not from scratch).
        panel: what the examples are: "image", "text" or None.
        quick_blocks: how many of the last blocks the quick version tracks; None for all layers.
    """

    name: str
    title: str
    make: Callable[[bool, float, float], Made]
    setting: str
    full: Scale
    quick: Scale
    group: str = "converged"
    paper_seeds: int | None = None
    differs: tuple[str, ...] = ()
    rates: tuple[float, float] | None = None
    grid: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    segments: int = 3
    checkpoints: int = 6
    trak: int = 4096
    methods: tuple[str, ...] = PAPER
    dear: tuple[str, ...] = ()
    stage: str | None = None
    gpu: bool = False
    exact: tuple[str, ...] = EXACT
    kept: bool = False
    panel: str | None = None
    quick_blocks: int | None = None

    @property
    def source(self) -> str:
        """SOURCE with the task's own number of segments, as a method is called."""
        return "SOURCE" if "SOURCE" in self.methods else "SOURCE, L = 1"

    def recipe(self, quick: bool = False) -> Made:
        """The recipe at the rates that are given, or were found."""
        return self.make(quick, *self.found_rates())

    def found_rates(self) -> tuple[float, float]:
        if self.rates is not None:
            return self.rates
        file = RESULTS / "search" / f"{self.name}.json"
        if not file.exists():
            raise FileNotFoundError(
                f"{file} is not there: python -m experiments.search {self.name} finds the rate and "
                "weight decay of this task"
            )
        best = json.loads(file.read_text())["best"]
        return best["rate"], best["weight_decay"]


def sgd(rate: float, weight_decay: float, momentum: float = 0.9) -> Callable[[Any], Any]:
    return partial(torch.optim.SGD, lr=rate, momentum=momentum, weight_decay=weight_decay)


def adamw(rate: float, weight_decay: float) -> Callable[[Any], Any]:
    return partial(torch.optim.AdamW, lr=rate, weight_decay=weight_decay)


def to_zero(optimizer: Any, total_steps: int) -> Any:
    """A rate that falls linearly to zero, as in the Transformers library's scripts."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total_steps)


def rise_and_fall(optimizer: Any, total_steps: int) -> Any:
    """A rate that rises for a fifth of the updates, and falls to zero (TRAK's CIFAR example)."""

    def at(step: int) -> float:
        done = (step + 1) / (total_steps + 1)
        return min(done / 0.2, (1 - done) / 0.8)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, at)


def crop_and_flip(batch: Any, uniform: Any) -> Any:
    """A random 32 × 32 crop of the image padded by 4, flipped half of the time."""
    images, labels = batch
    drawn: Tensor = uniform(3)
    count, _, height, width = images.shape
    padded = F.pad(images, (4, 4, 4, 4))
    down, right = ((drawn[:, k] * 9).long().clamp(max=8) for k in (0, 1))
    rows = down[:, None] + torch.arange(height, device=images.device)
    columns = right[:, None] + torch.arange(width, device=images.device)
    columns = torch.where(drawn[:, 2:] < 0.5, columns.flip(1), columns)
    each = torch.arange(count, device=images.device)[:, None, None]
    cropped = padded[each, :, rows[:, :, None], columns[:, None, :]]  # (n, h, w, c)
    return cropped.permute(0, 3, 1, 2), labels


def first(dataset: TensorDataset, count: int | None) -> TensorDataset:
    """The first so many examples; None for all."""
    return TensorDataset(*(column[:count] for column in dataset.tensors))


def frequent(sets: Sequence[TensorDataset], vocabulary: int) -> list[TensorDataset]:
    """Token blocks in a vocabulary of the first set's most frequent tokens; the others are one."""
    counts = torch.bincount(sets[0].tensors[0].flatten(), minlength=2**16)
    place = torch.full_like(counts, vocabulary - 1)
    place[counts.argsort(descending=True, stable=True)[: vocabulary - 1]] = torch.arange(
        vocabulary - 1
    )
    return [TensorDataset(place[own.tensors[0]]) for own in sets]


def regression(
    load: Callable[[], Any],
    epochs: int,
    quick: bool,
    rate: float,
    wd: float,
    measurement: str = "absolute_error",
) -> Made:
    train, held = load()
    model = partial(models.mlp, train.tensors[0].shape[1], 128, 128, 128, 1)
    task = whence.Regression(measurement=measurement)
    return whence.Recipe(model, task, train, sgd(rate, wd), 32, epochs), held


def linear(load: Callable[[], Any], task: whence.Task, quick: bool, rate: float, wd: float) -> Made:
    train, held = load()
    outputs = 2 if isinstance(task, whence.Classification) else 1
    model = partial(models.mlp, train.tensors[0].shape[1], outputs)
    return whence.Recipe(model, task, train, sgd(rate, wd, 0.0), 32, epochs=3), held


def perceptron(name: str, noisy: bool, epochs: int, quick: bool, rate: float, wd: float) -> Made:
    train, held = data.images(name, 1200 if quick else 6000, noisy=noisy)
    sizes = (784, 128, 64, 10) if quick else (784, 512, 256, 128, 10)
    return (
        whence.Recipe(
            partial(models.mlp, *sizes), whence.Classification(), train, sgd(rate, wd), 64, epochs
        ),
        held,
    )


def digits(
    optimizer: Callable[..., Any],
    quick: bool,
    rate: float,
    wd: float,
    epochs: int = 20,
    scheduler: Any = None,
) -> Made:
    train, held = data.digits()
    model = partial(models.mlp, 64, 128, 128, 128, 10)
    recipe = whence.Recipe(
        model, whence.Classification(), train, optimizer(rate, wd), 64, epochs, scheduler=scheduler
    )
    return recipe, held


def rotated(quick: bool, rate: float, wd: float) -> Made:
    train, held = data.rotated_mnist(1500 if quick else 12_500)
    sizes = (784, 128, 64, 10) if quick else (784, 512, 256, 128, 10)
    recipe = whence.Recipe(
        partial(models.mlp, *sizes),
        whence.Classification(),
        train,
        sgd(rate, wd),
        batch_size=128,
        epochs={"first": 20, "second": 10},
    )
    return recipe, held


def cifar10(quick: bool, rate: float, wd: float) -> Made:
    train, held = data.cifar10(1000 if quick else 10_000)
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
    return recipe, held


def pacs(quick: bool, rate: float, wd: float) -> Made:
    stages, held = data.pacs()
    drawn = {"first": 7, "second": 4}  # every 7th image: the domains lie one after the other
    train = {
        name: TensorDataset(*(c[:: drawn[name] if quick else 1] for c in own.tensors))
        for name, own in stages.items()
    }
    recipe = whence.Recipe(
        partial(models.ResNet9, classes=7, stem_stride=2, width=16 if quick else 32),
        whence.Classification(),
        train,
        sgd(rate, wd),
        batch_size=64 if quick else 128,
        epochs={"first": 6, "second": 3} if quick else {"first": 30, "second": 10},
    )
    return recipe, held


def glue(name: str, length: int, train: int | None, quick: bool, rate: float, wd: float) -> Made:
    own, held = data.glue(name, 48 if quick else length, 160 if quick else train)
    recipe = whence.Recipe(
        models.minilm,
        models.TextClassification(),
        own,
        adamw(rate, wd),
        batch_size=16 if quick else 32,
        epochs=3,
        scheduler=to_zero,
    )
    return recipe, held


def wikitext2(quick: bool, rate: float, wd: float) -> Made:
    length, vocabulary = (64, 1024) if quick else (512, 8192)
    own, held = frequent(data.wikitext2(length), vocabulary)
    size = (2, 64, 2) if quick else (4, 256, 4)
    recipe = whence.Recipe(
        partial(models.gpt2, vocabulary, *size, length),
        whence.LanguageModeling(),
        first(own, 400 if quick else None),
        adamw(rate, wd),
        batch_size=8,
        epochs=5,
        scheduler=to_zero,
    )
    return recipe, held


def _named(*experiments: Experiment) -> Mapping[str, Experiment]:
    return {experiment.name: experiment for experiment in experiments}


QUICK = Scale(subsets=40, seeds=3, queries=50, runs=2, fewer=dict.fromkeys((*DEAR, WHOLE), 1))
SLOW = Scale(subsets=16, seeds=1, queries=30, runs=1, panels=2)  # where one training is slow
SHARES = (0.1, 0.3, 0.7, 0.9, 1.0)
SGDM = (3e-1, 1e-1, 3e-2, 1e-2, 3e-3, 1e-3)  # the upper part of the paper's grid
SMALL_IMAGES = "the first 6,000 images of the training split (the paper: about 10 %)"


def fine_tuning(
    title: str, full: Scale, trak: int, length: int, train: int | None, differs: str
) -> Experiment:
    """A GLUE task, on MiniLM."""
    return Experiment(
        title.lower().replace("-", ""),
        title,
        partial(glue, title, length, train),
        "MiniLM-L6 fine-tuned, AdamW, batch 32, 3 epochs, rate to zero",
        full,
        SLOW,
        paper_seeds=5,
        differs=(
            "MiniLM-L6 (all-MiniLM-L6-v2) in BERT's place, without dropout",
            "trained in bfloat16 (autocast)",
            differs,
        ),
        grid=((3e-4, 1e-4, 3e-5), (1e-2,)),
        trak=trak,
        methods=ADAM,
        exact=MIXED,
        gpu=True,
        kept=True,
        panel="text",
        quick_blocks=1,
    )


def not_deep(name: str, title: str, make: Callable[..., Made], queries: int) -> Experiment:
    """A linear model, of which all held-out rows are queries."""
    return Experiment(
        name,
        title,
        make,
        "linear, SGD, batch 32, 3 epochs",
        Scale(seeds=100, queries=queries, alphas=SHARES, epochs=(1, 2, 3, 5, 10, 20, 50)),
        Scale(subsets=40, seeds=5, queries=queries, runs=2, alphas=(0.7,), epochs=(1, 10)),
        group="linear",
        paper_seeds=100,
        differs=(
            "rate and weight decay are not given in the paper: found by its grid search, on rows "
            "that are queries too",
        ),
        grid=((3e-1, 1e-1, 3e-2, 1e-2, 3e-3, 1e-3), (1e-3, 1e-5, 0.0)),
        segments=1,
        checkpoints=3,
        methods=LINEAR,
    )


def by_output(of: Experiment, load: Callable[[], Any], queries: int) -> Experiment:
    """A regression task of the paper, asked about the output in place of its absolute error, whose
    direction changes with the error's sign."""
    return replace(
        of,
        name=f"{of.name}_output",
        title=f"{of.title}, by its output",
        make=partial(regression, load, 20, measurement="output"),
        setting=f"as {of.title}; the measurement is the output itself",
        full=Scale(seeds=20, queries=queries),
        quick=QUICK,
        group="not in the paper",
        paper_seeds=None,
        methods=("RepSim", "TracIn", "influence", "SOURCE, L = 1", "SOURCE"),
        dear=(),
    )


CONCRETE = Experiment(
    "concrete",
    "Concrete",
    partial(regression, data.concrete, 20),
    "MLP 8-128-128-128-1, SGD with momentum 3e-2, weight decay 1e-5, batch 32, 20 epochs",
    Scale(seeds=100, queries=103, fewer=dict.fromkeys(DEAR, 2)),
    QUICK,
    paper_seeds=100,
    rates=(3e-2, 1e-5),
    trak=512,
    methods=MORE,
    dear=(*DEAR, WHOLE),
)
PARKINSONS = Experiment(
    "parkinsons",
    "Parkinsons",
    partial(regression, data.parkinsons, 20),
    "MLP 19-128-128-128-1, SGD with momentum 1e-2, weight decay 3e-5, batch 32, 20 epochs",
    Scale(seeds=100),
    Scale(subsets=24, seeds=2, queries=50, runs=1),
    paper_seeds=100,
    rates=(1e-2, 3e-5),
)

TASKS: Mapping[str, Experiment] = _named(
    CONCRETE,
    PARKINSONS,
    Experiment(
        "mnist",
        "MNIST",
        partial(perceptron, "mnist", False, 20),
        "MLP 784-512-256-128-10, SGD with momentum 3e-2, weight decay 1e-3, batch 64, 20 epochs",
        Scale(),
        QUICK,
        paper_seeds=10,
        differs=(SMALL_IMAGES,),
        rates=(3e-2, 1e-3),
        gpu=True,
    ),
    Experiment(
        "fashion_mnist",
        "FashionMNIST",
        partial(perceptron, "fashion_mnist", False, 20),
        "MLP 784-512-256-128-10, SGD with momentum 3e-2, weight decay 1e-3, batch 64, 20 epochs",
        Scale(
            fewer=dict.fromkeys(DEAR, 1) | {"HYDRA": 3},
            alphas=SHARES,
            downsampled=512,
            removal=Removal(k=(20, 40, 80, 160, 240, 320)),
            panels=6,
        ),
        Scale(
            subsets=40,
            seeds=3,
            queries=50,
            runs=2,
            fewer=dict.fromkeys(DEAR, 1),
            alphas=(0.3, 0.7),
            downsampled=64,
            removal=Removal(10, (20, 40, 80), 1, 2),
            panels=3,
        ),
        paper_seeds=10,
        differs=(SMALL_IMAGES,),
        rates=(3e-2, 1e-3),
        methods=MORE,
        dear=DEAR,
        gpu=True,
        panel="image",
    ),
    Experiment(
        "cifar10",
        "CIFAR-10",
        cifar10,
        "ResNet-9, crop and flip, SGD with momentum, batch 512, 25 epochs, cyclic rate",
        Scale(
            subsets=100,
            seeds=1,
            queries=200,
            measured=500,
            runs=3,
            removal=Removal(10, (100, 400), 1, 2),
            panels=6,
        ),
        SLOW,
        paper_seeds=20,
        differs=("10,000 of the 50,000 training images", "trained in bfloat16 (autocast)"),
        grid=((1.0, 0.5, 0.2), (3e-3, 1e-3)),
        gpu=True,
        kept=True,
        panel="image",
    ),
    fine_tuning(
        "RTE",
        Scale(
            subsets=100,
            seeds=3,
            queries=100,
            measured=150,
            runs=3,
            fewer=OTHER_FORMS,
            removal=Removal(10, (100, 300), 1, 2),
            panels=6,
        ),
        1024,
        128,
        None,
        "texts of at most 128 tokens",
    ),
    fine_tuning(
        "SST-2",
        Scale(subsets=100, seeds=3, queries=100, measured=200, runs=3, fewer=OTHER_FORMS, panels=6),
        4096,
        48,
        5000,
        "the first 5,000 examples (the paper: 51,200), at most 48 tokens",
    ),
    fine_tuning(
        "QNLI",
        Scale(subsets=100, seeds=3, queries=100, measured=200, runs=3, fewer=OTHER_FORMS, panels=6),
        2048,
        128,
        4000,
        "4,000 examples of the development split (the paper: 51,200 of the training split), "
        "at most 128 tokens",
    ),
    Experiment(
        "wikitext2",
        "WikiText-2",
        wikitext2,
        "GPT-2 of 4 layers and width 256 from scratch, AdamW, batch 8, length 512, 5 epochs",
        Scale(subsets=100, seeds=3, queries=100, runs=3, fewer=OTHER_FORMS, panels=6),
        SLOW,
        paper_seeds=5,
        differs=(
            "a GPT-2 of 4 layers, width 256, trained from scratch for 5 epochs",
            "the 8,191 most frequent tokens; the others are one",
            "trained in bfloat16 (autocast)",
            "the first 539,000 words of WikiText-103's training split in place of WikiText-2's",
        ),
        grid=((3e-3, 1e-3, 3e-4), (1e-1, 1e-2)),
        trak=512,
        methods=ADAM,
        exact=MIXED,
        gpu=True,
        kept=True,
        panel="text",
    ),
    Experiment(
        "concrete_n",
        "Concrete-N",
        partial(regression, partial(data.concrete, noisy=True), 3),
        "as Concrete, 30 % of the targets replaced by noise, 3 epochs",
        Scale(seeds=100, queries=103),
        QUICK,
        group="not converged",
        paper_seeds=100,
        rates=(3e-2, 1e-5),
        trak=512,
        checkpoints=3,
    ),
    Experiment(
        "fashion_mnist_n",
        "FashionMNIST-N",
        partial(perceptron, "fashion_mnist", True, 3),
        "as FashionMNIST, 30 % of the labels drawn anew, rate 1e-2, weight decay 3e-5, 3 epochs",
        Scale(),
        QUICK,
        group="not converged",
        paper_seeds=10,
        differs=(SMALL_IMAGES,),
        rates=(1e-2, 3e-5),
        checkpoints=3,
        gpu=True,
    ),
    Experiment(
        "rotated_mnist",
        "RotatedMNIST",
        rotated,
        "MLP 784-512-256-128-10, SGD with momentum 1e-1, weight decay 1e-5, batch 128; first 0°, "
        "15°, 45°, 60° (20 epochs), then 30° (10 epochs)",
        Scale(seeds=20, removal=Removal(50, (40, 80, 160, 320, 640), 3, 5), panels=6),
        Scale(
            subsets=40,
            seeds=2,
            queries=50,
            runs=2,
            removal=Removal(8, (30, 60), 1, 2),
            panels=3,
        ),
        group="two stages",
        paper_seeds=20,
        differs=("2,500 images per angle",),
        rates=(1e-1, 1e-5),
        segments=2,
        methods=STAGED,
        stage="first",
        gpu=True,
        panel="image",
    ),
    Experiment(
        "pacs",
        "PACS",
        pacs,
        "ResNet-9 of half the width (stride 2 at the stem), SGD with momentum, batch 128; first "
        "cartoon, photo, sketch (30 epochs), then art paintings (10 epochs)",
        Scale(subsets=100, seeds=2, queries=100, measured=200, runs=3, panels=6),
        SLOW,
        group="two stages",
        paper_seeds=20,
        differs=(
            "a ResNet-9 trained from scratch in place of a pretrained ResNet-50",
            "64 × 64 images",
            "trained in bfloat16 (autocast)",
        ),
        grid=((3e-1, 1e-1, 3e-2, 1e-2), (3e-3, 3e-4)),
        segments=2,
        trak=4096,
        methods=STAGED,
        stage="first",
        gpu=True,
        kept=True,
        panel="image",
    ),
    not_deep(
        "linear_regression",
        "linear regression (Concrete)",
        partial(linear, data.concrete, whence.Regression()),
        queries=103,
    ),
    not_deep(
        "logistic_regression",
        "logistic regression (Pima diabetes)",
        partial(linear, data.pima, whence.Classification()),
        queries=77,
    ),
    by_output(CONCRETE, data.concrete, 103),
    by_output(PARKINSONS, data.parkinsons, 200),
    Experiment(
        "digits",
        "Digits",
        partial(digits, sgd),
        "scikit-learn's 8 × 8 digits, MLP 64-128-128-128-10, trained as FashionMNIST is",
        Scale(queries=50, runs=2, downsampled=512),
        QUICK,
        group="not in the paper",
        rates=(3e-2, 1e-3),
        trak=512,
        methods=MORE,
        dear=(*DEAR, WHOLE),
    ),
    Experiment(
        "digits_adamw",
        "Digits, AdamW",
        partial(digits, adamw),
        "as Digits, trained by AdamW, rate 1e-3, weight decay 1e-2",
        Scale(seeds=5, queries=50, runs=3),
        QUICK,
        group="not in the paper",
        rates=(1e-3, 1e-2),
        trak=512,
        methods=(*ADAM, *ONE_SEGMENT, 'influence (λ = "source")'),
        dear=(f"{WHOLE}, floor",),
        exact=MIXED,
    ),
)
