"""Second moments of projected gradients: Σ_n φ_n φ_nᵀ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whence.layers.passes import Signal, Weights
from whence.operators import FitData
from whence.operators.products import add_gram, mirror
from whence.operators.statistics import Statistic, Tensors, measure
from whence.persist.cache import FactorCache
from whence.projections.gradients import projected
from whence.projections.projection import Projection


@dataclass(frozen=True)
class ProjectedMoments(Statistic):
    """Σ φφᵀ, (d, d) in float64 for each part of the projection.

    The sums are in float64, because their smallest eigenvalues matter. That costs little compared
    with projecting.
    """

    projection: Projection
    signal: Signal
    device: torch.device
    memory: int  # bytes for gathered gradients

    work = "projection"

    def zeros(self) -> Tensors:
        sizes = [part.dimension for part in self.projection.parts]
        like: Any = {"device": self.device, "dtype": torch.float64}
        return {f"{k}": torch.zeros(d, d, **like) for k, d in enumerate(sizes)}

    def add(
        self, totals: Tensors, part: FitData, batches: list[NDArray[np.int64]], label: str
    ) -> Iterator[int | None]:
        how = self.signal, self.projection, self.memory, label
        for piece in projected(part.passes, part.data, batches, *how):
            rows = piece.rows.double()
            for k, columns in enumerate(self.projection.columns):
                add_gram(totals[f"{k}"], rows[:, columns])
            yield piece.done

    def finish(self, totals: Tensors) -> Tensors:
        return {name: mirror(total) for name, total in totals.items()}


def moments(
    parts: Sequence[FitData],
    checkpoint: Weights,
    signal: Signal,
    projection: Projection,
    store: FactorCache,
    settings: Mapping[str, Any],
    batch_size: int,
    memory: int,
) -> list[Tensor]:
    """Σ φφᵀ over the examples of all parts of the data, for each part of the projection.

    Args:
        store: caches them under `settings`.
    """
    device = parts[0].passes.device
    statistic = ProjectedMoments(projection, signal, device, memory)
    sums = measure(statistic, parts, checkpoint, store, settings, batch_size)
    return [sums[f"{k}"].to(device) for k in range(len(projection.parts))]
