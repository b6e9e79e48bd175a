"""One training of a recipe."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from whence.errors import InvalidInput
from whence.persist.identity import digest

if TYPE_CHECKING:
    from whence.retrain.recipe import Recipe


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
