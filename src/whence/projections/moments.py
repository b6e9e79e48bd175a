"""Second moments of projected gradients: Σ_n φ_n φ_nᵀ, in one resumable pass over the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from whence.data import cut
from whence.layers.passes import Signal, Weights
from whence.operators import FitData
from whence.operators.products import add_gram, mirror
from whence.persist.factor_cache import FactorCache
from whence.persist.identity import key_of
from whence.projections.gradients import projected
from whence.projections.projection import Projection


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
    """Σ φφᵀ over the examples of all parts, (d, d) in float64 for each part of the projection.

    In float64, because their smallest eigenvalues matter, and because beside projecting it costs
    little.

    Args:
        store: where they are found again under `settings`, and where a killed pass goes on.
    """
    key = key_of(settings)
    names = [f"{k}" for k in range(len(projection.parts))]
    found = store.get(key)
    if found is None:
        passes = parts[0].passes
        with passes.clock("projection"):
            totals = {
                name: torch.zeros(
                    part.dimension, part.dimension, device=passes.device, dtype=torch.float64
                )
                for name, part in zip(names, projection.parts, strict=True)
            }
            done = 0
            left = store.snapshot(key)
            if left is not None:
                done, batch_size = left[1]["done"], left[1]["batch_size"]
                totals = {name: value.to(passes.device) for name, value in left[0].items()}
            skip = done
            for part in parts:
                batches = [part.indices[b] for b in cut(len(part.indices), batch_size)]
                batches, skip = batches[skip:], max(0, skip - len(batches))
                part.passes.load(checkpoint)
                before = done
                label = f"projection, step {checkpoint.step}"
                for piece in projected(
                    part.passes, part.data, batches, signal, projection, memory, label
                ):
                    rows = piece.rows.double()
                    for name, columns in zip(names, projection.columns, strict=True):
                        add_gram(totals[name], rows[:, columns])
                    if piece.done is not None:
                        done = before + piece.done
                        store.offer_snapshot(key, totals, {"done": done, "batch_size": batch_size})
            found = {name: mirror(total) for name, total in totals.items()}
            store.put(key, found, settings)
    return [found[name].to(parts[0].passes.device) for name in names]
