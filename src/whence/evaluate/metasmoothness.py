"""Metasmoothness: does the measurement follow the weights of the data along straight lines?

A derivative of the training in the weights w of its examples (`Unrolled`) predicts what happens
without some of them only if the measurement f is nearly linear in w on the way there. You can test
this first: take a direction that drops a few examples, go half of the way, then the rest.

    w₀ = 1            w₁ = 1 - h d          w₂ = 1 - 2h d         d: 1 for the dropped examples
    first = (f(w₁) - f(w₀)) / h             second = (f(w₂) - f(w₁)) / h            both (D, q)

    value = Σ_q |first + second| sign(first) sign(second) / Σ_q |first + second|,  mean over D

This is the empirical metasmoothness of Engstrom et al. (2025, definition 2) of the measurements,
instead of the final weights, along directions that drop examples. It is 1 where both halves of each
way change every measurement to the same side, and about 0 where one says nothing about the other.

Axes: ``D`` directions, ``q`` queries.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np

from whence.errors import InvalidInput, warn, whole
from whence.evaluate.groups import Floats
from whence.retrain import Training, measure
from whence.retrain.measure import TrainingOptions
from whence.retrain.recipe import Recipe
from whence.retrain.truth import draw_subsets
from whence.table import Table, Tabled

ROUGH = 0.8  # below, derivatives of the training predict little of what happens without examples


@dataclass(frozen=True, eq=False, repr=False)
class Metasmoothness(Tabled):
    """How smooth a training is in the weights of its examples.

    Attributes:
        value: the metasmoothness, from -1 to 1.
        correlation: Pearson's correlation, over the directions, of the changes that the first and
            the second half of the way make, mean over the queries.
        first, second: (D, q) those changes, per unit of weight.
        alpha, step, seed: the share that stays, h, and the seed of the trainings.
    """

    value: float
    correlation: float
    first: Floats
    second: Floats
    alpha: float
    step: float
    seed: int

    @property
    def smooth(self) -> bool:
        """Whether the derivative of the training is likely to predict retraining."""
        return self.value >= ROUGH

    def table(self) -> Table:
        """The number, and what it is based on."""
        directions, queries = self.first.shape
        steps = f"1, {1 - self.step:g} and {1 - 2 * self.step:g}"
        facts = [
            ("metasmoothness", f"{self.value:.3f}  (1 is smooth; below {ROUGH} is rough)"),
            ("correlation", f"{self.correlation:.3f}  of the two halves of the way"),
            ("directions", f"{directions} random sets of {1 - self.alpha:.4g} of the examples"),
            ("weights", f"{steps}, for {queries} queries and seed {self.seed}"),
        ]
        return Table(None, facts, title="Metasmoothness")


def metasmoothness(
    recipe: Recipe,
    query: Any,
    alpha: float = 0.99,
    directions: int = 16,
    *,
    step: float = 0.5,
    stage: str | None = None,
    training_seed: int = 0,
    seed: int = 0,
    out: str | os.PathLike[str] | None = None,
    **options: Unpack[TrainingOptions],
) -> Metasmoothness:
    """Check whether a training is smooth enough to be differentiated, before you run `Unrolled`.

    This takes 2 D + 1 trainings, made together where possible. Warns if the training is rough: then
    the exact derivative says little about retraining. A smaller learning rate, larger batches,
    smooth activations (GELU for ReLU), or an epsilon under Adam's root make it smoother.

    Args:
        recipe: how to train.
        query: the queries to measure after each training.
        alpha: the share of the examples that stays in each direction.
        directions: D, random sets of examples to drop.
        step: h. With 0.5, the dropped examples go from weight 1 to a half, then to none.
        stage: whose examples to drop (default: the first).
        training_seed: of the trainings.
        seed: determines the directions.
        out: folder that keeps every finished training. Repeat the same call to resume.
        options: `device`, `memory`, `executor`, `engine`, `progress`: as in
            `whence.retrain.measure`.
    """
    if not 0 < step <= 0.5:
        raise InvalidInput(f"step={step} must be above 0 and at most 0.5, two steps to weight zero")
    if whole("directions", directions) < 3:
        raise InvalidInput(f"directions={directions}: a correlation needs at least 3")
    chosen = recipe.stage(stage)
    dropped = ~draw_subsets(len(chosen.data), alpha, directions, seed)
    trainings = [Training(training_seed)] + [
        Training(training_seed, None, chosen.name, weights=1 - times * step * mask)
        for mask in dropped
        for times in (1, 2)
    ]
    measured = measure(recipe, query, trainings, out=out, **options)
    if not np.isfinite(measured).all():
        raise InvalidInput("a training diverged: its metasmoothness is not defined")
    half, gone = measured[1::2], measured[2::2]
    first, second = (half - measured[0]) / step, (gone - half) / step
    result = Metasmoothness(
        value=_agreement(first, second),
        correlation=_correlation(first, second),
        first=first,
        second=second,
        alpha=float(alpha),
        step=float(step),
        seed=whole("training_seed", training_seed),
    )
    if not result.smooth:
        warn(
            f"this training is rough: its metasmoothness is {result.value:.2f}, below {ROUGH}. "
            "Unrolled, its exact derivative, will say little about retraining. Use a smaller "
            "learning rate, larger batches or smooth activations; or a method that averages over "
            "trainings, such as Source",
            stacklevel=2,
        )
    return result


def _agreement(first: Floats, second: Floats) -> float:
    moved = np.abs(first + second)
    sizes = moved.sum(1)
    if not sizes.all():
        raise InvalidInput(
            f"{int((sizes == 0).sum())} of {len(sizes)} directions change no measurement: drop "
            "more examples (a smaller alpha)"
        )
    return float(((moved * np.sign(first) * np.sign(second)).sum(1) / sizes).mean())


def _correlation(first: Floats, second: Floats) -> float:
    a, b = first - first.mean(0), second - second.mean(0)
    lengths = np.linalg.norm(a, axis=0) * np.linalg.norm(b, axis=0)
    varies = lengths > 0
    return float(((a * b).sum(0)[varies] / lengths[varies]).mean()) if varies.any() else 0.0
