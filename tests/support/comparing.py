"""How close two arrays are."""

from __future__ import annotations

from typing import Any

import numpy as np

import whence


def close(values: Any, expected: Any, tolerance: float = 1e-6) -> None:
    """Asserts equal shapes, and errors of at most `tolerance` times the largest expected value."""
    values, expected = np.asarray(values), np.asarray(expected)
    assert values.shape == expected.shape
    error, scale = abs(values - expected).max(), abs(expected).max()
    assert error <= tolerance * scale, f"error {error:.2e}, allowed {tolerance * scale:.2e}"


def agree(scores: whence.Scores, expected: np.ndarray) -> None:
    """Asserts that scores and their segments are close to `expected`, (segments, q, n)."""
    close(scores.by_segment, expected)
    close(scores.values, expected.sum(0))
