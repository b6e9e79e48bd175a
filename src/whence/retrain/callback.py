"""What a training reports after each update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from whence.retrain.stack import Stack
    from whence.retrain.stage import StageRecipe


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
