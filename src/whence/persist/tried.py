"""What model and task compute for every example, stored to notice a change of either.

Losses differ in their last bits with batch size and device, so they are compared with a tolerance,
not by a digest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whence.persist.identity import key_of, tensors_sha256
from whence.persist.tensors import FactorCache, load_tensors, save_tensors

TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-5}  # of the largest output
ROUNDED = 2e-2  # with bfloat16 or TF32 products
VERSIONS = 16  # of losses at one checkpoint that a cache tells apart


@dataclass(frozen=True)
class Tried:
    """Losses or measurements of examples, with the root mean square and the maximum of their
    outputs, (n, 3) by the name of data and checkpoint."""

    values: Mapping[str, Tensor]
    tolerance: float

    def differences(self, stored: Mapping[str, Tensor]) -> list[str]:
        """The names of what is not in `stored` as it is here; examples may have been added."""
        return [
            name
            for name, now in self.values.items()
            if name not in stored or not _agree(stored[name], now, self.tolerance)
        ]

    def version(self, cache: FactorCache, settings: Mapping[str, Any]) -> str:
        """The digest of the stored values that agree with these; stores these if none do.

        So factors under this digest are of the same losses, whatever their last bits.
        """
        for number in range(VERSIONS):
            entry = {"what": "tried examples", "version": number, **settings}
            stored = cache.get(key_of(entry))
            if stored is not None and not self.differences(stored):
                return tensors_sha256(stored)
            if stored is None or number == VERSIONS - 1:
                cache.put(key_of(entry), self.values, entry)
                break
        return tensors_sha256(self.values)

    def save(self, path: Path) -> None:
        save_tensors(path, self.values, {})

    def differs_from(self, path: Path, remedy: str) -> list[str]:
        """`differences` from what was saved; all names, if nothing was."""
        stored = load_tensors(path, remedy=remedy)[0] if path.exists() else {}
        return self.differences(stored)


def tolerance(dtype: torch.dtype, exact_products: bool) -> float:
    """How far two computations of the same loss may differ, relative to the outputs."""
    return TOLERANCES.get(dtype, ROUNDED) if exact_products else ROUNDED


def _agree(stored: Tensor, now: Tensor, share: float) -> bool:
    if stored.shape[1:] != now.shape[1:] or len(stored) > len(now):
        return False
    now = now[: len(stored)]
    allowed = share * (now.abs() + now[:, 2:])
    same = (now - stored).abs() <= allowed
    special = ~now.isfinite() | ~stored.isfinite()
    same |= special & ((now == stored) | (now.isnan() & stored.isnan()))
    return bool(same.all())
