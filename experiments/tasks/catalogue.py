"""The paper's tasks (appendix B.1), and a few others: how each is trained and evaluated here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import whence
from experiments.tasks import data
from experiments.tasks.experiment import Experiment, RecipeAndHeldOut, Removal, Scale
from experiments.tasks.methods import (
    ADAM,
    EXPENSIVE,
    EXTENDED,
    FLOAT32_ADAM,
    GAUSS_NEWTON,
    LINEAR,
    ONE_RUN_EACH,
    ONE_SEGMENT,
    TWO_STAGES,
)
from experiments.tasks.recipes import (
    adamw,
    cifar10,
    digits,
    glue,
    linear,
    pacs,
    perceptron,
    regression,
    rotated,
    sgd,
    wikitext2,
)

QUICK = Scale(
    subsets=40,
    seeds=3,
    queries=50,
    runs=2,
    runs_by_method=dict.fromkeys((*EXPENSIVE, GAUSS_NEWTON), 1),
)
TEXTS = Scale(subsets=100, seeds=3, queries=100, runs=3, runs_by_method=ONE_RUN_EACH, panels=6)
SLOW = Scale(subsets=16, seeds=1, queries=30, runs=1, panels=2)  # one training is slow
ALPHAS = (0.1, 0.3, 0.7, 0.9, 1.0)
SMALL_IMAGES = "the first 6,000 images of the training split (the paper: about 10 %)"


def fine_tuning(
    title: str, full: Scale, trak_dimension: int, length: int, train: int | None, differs: str
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
            "MiniLM-L6 (all-MiniLM-L6-v2) instead of BERT, without dropout",
            "trained in bfloat16 (autocast)",
            differs,
        ),
        grid=((3e-4, 1e-4, 3e-5), (1e-2,)),
        trak_dimension=trak_dimension,
        methods=ADAM,
        float32=FLOAT32_ADAM,
        gpu=True,
        keep_factors=True,
        panel="text",
        quick_blocks=1,
    )


def linear_model(
    name: str, title: str, make: Callable[..., RecipeAndHeldOut], queries: int
) -> Experiment:
    """A linear model; all held-out rows are queries."""
    return Experiment(
        name,
        title,
        make,
        "linear, SGD, batch 32, 3 epochs",
        Scale(seeds=100, queries=queries, alphas=ALPHAS, epochs=(1, 2, 3, 5, 10, 20, 50)),
        Scale(subsets=40, seeds=5, queries=queries, runs=2, alphas=(0.7,), epochs=(1, 10)),
        group="linear",
        paper_seeds=100,
        differs=(
            "the paper gives no rate and weight decay: chosen by its grid search, on rows that are "
            "also queries",
        ),
        grid=((3e-1, 1e-1, 3e-2, 1e-2, 3e-3, 1e-3), (1e-3, 1e-5, 0.0)),
        segments=1,
        checkpoints=3,
        methods=LINEAR,
    )


def by_output(task: Experiment, load: Callable[[], Any], queries: int) -> Experiment:
    """A regression task of the paper that measures the output, not the absolute error.

    The absolute error changes direction with the sign of the error; the output does not.
    """
    return replace(
        task,
        name=f"{task.name}_output",
        title=f"{task.title}, by its output",
        make=partial(regression, load, 20, measurement="output"),
        setting=f"as {task.title}; the measurement is the output itself",
        full=Scale(seeds=20, queries=queries),
        quick=QUICK,
        group="not in the paper",
        paper_seeds=None,
        methods=("RepSim", "TracIn", "influence", "SOURCE, L = 1", "SOURCE"),
        expensive=(),
    )


CONCRETE = Experiment(
    "concrete",
    "Concrete",
    partial(regression, data.concrete, 20),
    "MLP 8-128-128-128-1, SGD with momentum 3e-2, weight decay 1e-5, batch 32, 20 epochs",
    Scale(seeds=100, queries=103, runs_by_method=dict.fromkeys(EXPENSIVE, 2)),
    QUICK,
    paper_seeds=100,
    rates=(3e-2, 1e-5),
    trak_dimension=512,
    methods=EXTENDED,
    expensive=(*EXPENSIVE, GAUSS_NEWTON),
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

_TASKS = (
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
            runs_by_method=dict.fromkeys(EXPENSIVE, 1) | {"HYDRA": 3},
            alphas=ALPHAS,
            downsampled=512,
            removal=Removal(k=(20, 40, 80, 160, 240, 320)),
            panels=6,
        ),
        Scale(
            subsets=40,
            seeds=3,
            queries=50,
            runs=2,
            runs_by_method=dict.fromkeys(EXPENSIVE, 1),
            alphas=(0.3, 0.7),
            downsampled=64,
            removal=Removal(10, (20, 40, 80), 1, 2),
            panels=3,
        ),
        paper_seeds=10,
        differs=(SMALL_IMAGES,),
        rates=(3e-2, 1e-3),
        methods=EXTENDED,
        expensive=EXPENSIVE,
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
        keep_factors=True,
        panel="image",
    ),
    fine_tuning(
        "RTE",
        replace(TEXTS, measured=150, removal=Removal(10, (100, 300), 1, 2)),
        1024,
        128,
        None,
        "texts of at most 128 tokens",
    ),
    fine_tuning(
        "SST-2",
        replace(TEXTS, measured=200),
        4096,
        48,
        5000,
        "the first 5,000 examples (the paper: 51,200), at most 48 tokens",
    ),
    fine_tuning(
        "QNLI",
        replace(TEXTS, measured=200),
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
        TEXTS,
        SLOW,
        paper_seeds=5,
        differs=(
            "a GPT-2 of 4 layers, width 256, trained from scratch for 5 epochs",
            "the 8,191 most frequent tokens; all others share one",
            "trained in bfloat16 (autocast)",
            "the first 539,000 words of WikiText-103's training split instead of WikiText-2's",
        ),
        grid=((3e-3, 1e-3, 3e-4), (1e-1, 1e-2)),
        trak_dimension=512,
        methods=ADAM,
        float32=FLOAT32_ADAM,
        gpu=True,
        keep_factors=True,
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
        trak_dimension=512,
        checkpoints=3,
    ),
    Experiment(
        "fashion_mnist_n",
        "FashionMNIST-N",
        partial(perceptron, "fashion_mnist", True, 3),
        "as FashionMNIST, 30 % of the labels redrawn at random, rate 1e-2, weight "
        "decay 3e-5, 3 epochs",
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
        methods=TWO_STAGES,
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
            "a ResNet-9 trained from scratch instead of a pretrained ResNet-50",
            "64 × 64 images",
            "trained in bfloat16 (autocast)",
        ),
        grid=((3e-1, 1e-1, 3e-2, 1e-2), (3e-3, 3e-4)),
        segments=2,
        trak_dimension=4096,
        methods=TWO_STAGES,
        stage="first",
        gpu=True,
        keep_factors=True,
        panel="image",
    ),
    linear_model(
        "linear_regression",
        "linear regression (Concrete)",
        partial(linear, data.concrete, whence.Regression()),
        queries=103,
    ),
    linear_model(
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
        "scikit-learn's 8 × 8 digits, MLP 64-128-128-128-10, trained like FashionMNIST",
        Scale(queries=50, runs=2, downsampled=512),
        QUICK,
        group="not in the paper",
        rates=(3e-2, 1e-3),
        trak_dimension=512,
        methods=EXTENDED,
        expensive=(*EXPENSIVE, GAUSS_NEWTON),
    ),
    Experiment(
        "digits_adamw",
        "Digits, AdamW",
        partial(digits, adamw),
        "as Digits, trained with AdamW, rate 1e-3, weight decay 1e-2",
        Scale(seeds=5, queries=50, runs=3),
        QUICK,
        group="not in the paper",
        rates=(1e-3, 1e-2),
        trak_dimension=512,
        methods=(*ADAM, *ONE_SEGMENT, 'influence (λ = "source")'),
        expensive=(f"{GAUSS_NEWTON}, floor",),
        float32=FLOAT32_ADAM,
    ),
)

TASKS: Mapping[str, Experiment] = {task.name: task for task in _TASKS}
