"""One training of a recipe."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from whence.persist.identity import digest


@dataclass(frozen=True, eq=False)
class Training:
    """A training of a recipe.

    Attributes:
        seed: determines initial weights and batch order.
        subset: the training indices to use, or a mask; None for all.
        stage: the stage of the subset; None for the first.
    """

    seed: int
    subset: ArrayLike | None = None
    stage: str | None = None

    @property
    def key(self) -> str:
        """Identifies a training among those of one recipe."""
        chosen = None if self.subset is None else np.asarray(self.subset)
        return digest([int(self.seed), chosen, self.stage])
