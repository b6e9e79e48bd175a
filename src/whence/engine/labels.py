"""The classes of examples, read from the data."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from whence.data import Batches, cut
from whence.task import Classification, Task

READ_AT_ONCE = 1024  # examples

Labels = NDArray[np.int64]


def classes(task: Task, data: Batches) -> Labels | None:
    """The class of every example, (n,); None for a task that is no classification."""
    if not isinstance(task, Classification):
        return None
    blocks = cut(len(data), READ_AT_ONCE)
    return np.concatenate([task.labels(data.take(block)).cpu().numpy() for block in blocks])
