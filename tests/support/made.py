"""Scores and subsets that no method and no training made."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import whence

ABOUT: dict[str, Any] = {"measurement": "margin", "unit": "logits", "higher_is_better": True}


def scores_of(values: Any, higher_is_better: bool = True, **more: Any) -> whence.Scores:
    about = {"method": "Source"} | ABOUT | {"higher_is_better": higher_is_better} | more
    return whence.Scores(np.asarray(values), **about)


def masks_of(subsets: int, examples: int, seed: int = 0) -> NDArray[np.bool_]:
    """(subsets, examples): each has a random half."""
    random = np.random.default_rng(seed)
    return np.stack([random.permutation(examples) < examples // 2 for _ in range(subsets)])
