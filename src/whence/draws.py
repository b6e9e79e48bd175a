"""Counter-based random numbers: each depends only on its key, and is the same on every device.

So no draw depends on batches, order, workers, or how many models train at once. The generator is
SplitMix64 on int64 tensors, whose arithmetic wraps modulo 2^64.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

Ids = Sequence[int] | np.ndarray | Tensor


def _signed(value: int) -> int:
    value %= 2**64
    return value - 2**64 if value >= 2**63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST, _SECOND = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def _shifted(x: Tensor, by: int) -> Tensor:
    """A logical shift to the right: torch's `>>` copies the sign bit."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def mix(x: Tensor) -> Tensor:
    """One SplitMix64 step on int64 counters."""
    x = x + _GOLDEN
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def keys(*parts: int | Ids, device: torch.device | None = None) -> Tensor:
    """One int64 key from several parts, numbers or tensors that broadcast against each other."""
    key = torch.zeros((), dtype=torch.int64, device=device)
    for part in parts:
        counter = (
            _signed(part)  # a tensor would make a GPU wait for the copy
            if isinstance(part, int)
            else torch.as_tensor(part, dtype=torch.int64, device=device)
        )
        key = mix(key + counter)
    return key


def uniforms(key: Tensor, count: int) -> Tensor:
    """`count` float64 numbers in (0, 1) for each key: (..., count)."""
    counters = torch.arange(1, count + 1, device=key.device) * _GOLDEN
    bits = _shifted(mix(key.unsqueeze(-1) + counters), 11)
    return (bits.double() + 0.5) * 2.0**-53


def update_seed(seed: int, stage: int, step: int) -> int:
    """The seed of what a model itself draws (dropout) in one update of a recipe's training."""
    return int(keys(seed, stage, step))


def reseed(value: int, device: torch.device) -> None:
    """Seed the generators that a model on this device draws from."""
    torch.default_generator.manual_seed(value % 2**63)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(value % 2**63)


class Uniform:
    """Uniform draws keyed by (seed, step, example id, position).

    `Uniform(seed, step, ids)(positions)` has shape (n, positions), float64 in (0, 1). `seed` may be
    a tensor with one seed per example.
    """

    def __init__(
        self, seed: int | Tensor, step: int, ids: Ids, device: torch.device | None = None
    ) -> None:
        self._keys = keys(seed, step, ids, device=device)

    def __call__(self, positions: int) -> Tensor:
        return uniforms(self._keys, positions)

    def rows(self, count: int) -> Uniform:
        """Draws for each of `count` rows of every example, (n count, positions)."""
        draws = Uniform.__new__(Uniform)
        rows = torch.arange(count, device=self._keys.device)
        draws._keys = mix(self._keys.unsqueeze(-1) + rows).flatten()
        return draws
