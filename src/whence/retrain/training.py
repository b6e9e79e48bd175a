"""One training of a recipe, and what it reports after each update."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from whence.errors import InvalidInput
from whence.persist.identity import digest

if TYPE_CHECKING:
    from whence.retrain.recipe import Recipe
    from whence.retrain.stack import Stack
    from whence.retrain.stage import StageRecipe


@dataclass(frozen=True, eq=False)
class Training:
    """A training of a recipe.

    Attributes:
        seed: determines initial weights and batch order.
        subset: the training indices to use, or a mask; None for all.
        stage: the stage of subset and weights; None for the first.
        weights: of the losses of the stage's examples, (n,); None for one each. An example of
            weight zero keeps its place in its batches, and the mean still divides by all of the
            batch.
    """

    seed: int
    subset: ArrayLike | None = None
    stage: str | None = None
    weights: ArrayLike | None = None

    @property
    def key(self) -> str:
        """Identifies a training among those of one recipe."""
        chosen = None if self.subset is None else np.asarray(self.subset)
        weights = [] if self.weights is None else [np.asarray(self.weights, np.float64)]
        return digest([int(self.seed), chosen, self.stage, *weights])

    def weights_of(self, recipe: Recipe, stage: str) -> NDArray[np.float64] | None:
        """The weights of a stage's examples, (n,); None for one each."""
        chosen = recipe.stage(self.stage)
        if self.weights is None or chosen.name != stage:
            return None
        weights = np.asarray(self.weights, np.float64)
        if weights.shape != (len(chosen.data),) or not np.isfinite(weights).all():
            raise InvalidInput(
                f"weights have shape {weights.shape} for {len(chosen.data)} examples: give one "
                "finite number for each"
            )
        return weights

    def weighted(self, recipe: Recipe) -> Recipe:
        """The recipe with this training's weights in its losses."""
        if self.weights is None:
            return recipe
        weighted = copy.copy(recipe)
        weighted.stages = tuple(
            replace(s, weights=self.weights_of(recipe, s.name)) for s in recipe.stages
        )
        return weighted


@dataclass(frozen=True)
class Update:
    """One update of a training, as passed to a callback.

    Attributes:
        stage: the stage it belongs to, with `stage.name` and `stage.number`.
        step: the number of updates of the stage made so far, from 1.
        indices: the training examples of the batch, (B,); (S, B) when S models train together.
        model: the model after the update; a stack of S models when they train together. Read its
            weights, do not keep it: the next update changes them in place.
        optimizer: the optimizer that made the update.
    """

    stage: StageRecipe
    step: int
    indices: NDArray[np.int64] | Tensor
    model: nn.Module | Stack
    optimizer: Optimizer


# Called after each update. An exception raised by it stops the training.
Callback = Callable[[Update], None]


class Interrupted(Exception):
    """Raised by a callback because the training was asked to stop."""
