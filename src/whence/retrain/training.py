"""One training to make."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from whence.persist.identity import digest


@dataclass(frozen=True, eq=False)
class Training:
    """A training of a recipe.

    Attributes:
        seed: of initial weights and batch order.
        subset: the training indices used, or a mask; None for all.
        stage: the stage that the subset is of; None for the first.
    """

    seed: int
    subset: ArrayLike | None = None
    stage: str | None = None

    @property
    def key(self) -> str:
        """Tells trainings of one recipe apart."""
        chosen = None if self.subset is None else np.asarray(self.subset)
        return digest([int(self.seed), chosen, self.stage])
