"""What an experiment is: a task of the paper, and how much of its evaluation is run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.utils.data import TensorDataset

import whence
from experiments.tasks.methods import FLOAT32, PAPER, MethodSettings, build_method

RESULTS = Path(__file__).parents[1] / "results"
# The held-out data has the queries at its front and validation examples at its back.
RecipeAndHeldOut = tuple[whence.Recipe, TensorDataset]


@dataclass(frozen=True)
class Removal:
    """Subset removal (appendix B.3).

    Attributes:
        queries: how many queries are tried.
        k: how many examples are removed, in increasing order.
        seeds: trainings per removal.
        select_seeds: trainings on all data that select the queries.
        methods: whose most helpful examples are removed.
    """

    queries: int = 100
    k: tuple[int, ...] = ()
    seeds: int = 3
    select_seeds: int = 5
    methods: tuple[str, ...] = ("TracIn", "TRAK", "influence", "SOURCE")


@dataclass(frozen=True)
class Scale:
    """The size of a task's evaluation.

    Attributes:
        subsets, seeds: M and R of the truth at α = ½.
        queries: how many queries are attributed.
        measured: how many the truth measures, if more. Attributing these later needs no training.
        runs: models in an ensemble.
        runs_by_method: the same for methods that have fewer.
        alphas: other sampling ratios at which the LDS is measured; 1.0 stands for 1 - 1/N.
        epochs: lengths of training at which it is measured, at α = 0.9, each with its own truth.
        downsampled: half-data models for Downsampling.
        removal: subset removal.
        panels: queries whose most helpful and most harmful examples are stored.
    """

    subsets: int = 100
    seeds: int = 10
    queries: int = 500
    measured: int = 0
    runs: int = 10
    runs_by_method: Mapping[str, int] = field(default_factory=dict)
    alphas: tuple[float, ...] = ()
    epochs: tuple[int, ...] = ()
    downsampled: int = 0
    removal: Removal | None = None
    panels: int = 0

    def models(self, method: str) -> int:
        """The number of models that a method is judged on."""
        return min(self.runs, self.runs_by_method.get(method, self.runs))


@dataclass(frozen=True)
class Experiment:
    """One task.

    Attributes:
        make: builds the recipe and the held-out data, given `quick`, a rate and a weight decay.
        setting: model and training, in words.
        full, quick: sizes of the full and of the small version.
        group: "converged", "not converged", "two stages", "linear", or "not in the paper".
        paper_seeds: R of the paper.
        differs: differences from the paper's setting.
        rates: learning rate and weight decay; None where `experiments.engine.search` chose them.
        grid: rates and weight decays that it searches.
        segments, checkpoints, trak_dimension: L, C and the dimension of TRAK's projection.
        methods, expensive: methods to judge, and those to judge last.
        stage: whose data is attributed to and resampled.
        gpu: whether the full version is too slow on a CPU.
        float32: methods whose products are never rounded to TF32.
        keep_factors: whether methods share fitted factors (`seconds` then exclude the fit).
        panel: kind of the examples: "image", "text" or None.
        quick_blocks: how many of the last blocks the quick version tracks; None for all layers.
    """

    name: str
    title: str
    make: Callable[[bool, float, float], RecipeAndHeldOut]
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
    trak_dimension: int = 4096
    methods: tuple[str, ...] = PAPER
    expensive: tuple[str, ...] = ()
    stage: str | None = None
    gpu: bool = False
    float32: tuple[str, ...] = FLOAT32
    keep_factors: bool = False
    panel: str | None = None
    quick_blocks: int | None = None

    @property
    def source(self) -> str:
        """The name of SOURCE with this task's number of segments."""
        return "SOURCE" if "SOURCE" in self.methods else "SOURCE, L = 1"

    def method(self, name: str, examples: int) -> Any:
        """A method by its name, for this many training examples."""
        dimension = min(self.trak_dimension, examples)
        return build_method(name, MethodSettings(self.segments, self.stage, dimension))

    def recipe(self, quick: bool = False) -> RecipeAndHeldOut:
        """The recipe with its learning rate and weight decay, and the held-out data."""
        return self.make(quick, *self.chosen_rates())

    def chosen_rates(self) -> tuple[float, float]:
        """Learning rate and weight decay: `rates`, or the result of the grid search."""
        if self.rates is not None:
            return self.rates
        file = RESULTS / "search" / f"{self.name}.json"
        if not file.exists():
            raise FileNotFoundError(
                f"{file} does not exist: run `python -m experiments.engine.search {self.name}` to "
                "choose this task's learning rate and weight decay"
            )
        best = json.loads(file.read_text())["best"]
        return best["rate"], best["weight_decay"]
