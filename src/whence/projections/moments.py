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
from whence.persist.identity import key_of
from whence.persist.tensors import FactorCache
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

    The sums are in float64, because their smallest eigenvalues matter. That costs little compared
    with projecting.

    Args:
        store: caches them under `settings`, and holds the snapshots from which an interrupted pass
            resumes.
    """
    key = key_of(settings)
    names = [f"{k}" for k in range(len(projection.parts))]
    sums = store.get(key)
    if sums is None:
        passes = parts[0].passes
        with passes.clock("projection"):
            totals = {
                name: torch.zeros(
                    part.dimension, part.dimension, device=passes.device, dtype=torch.float64
                )
                for name, part in zip(names, projection.parts, strict=True)
            }
            done = 0
            snapshot = store.snapshot(key)
            if snapshot is not None:
                tensors, progress = snapshot
                done, batch_size = progress["done"], progress["batch_size"]
                totals = {name: value.to(passes.device) for name, value in tensors.items()}
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
            sums = {name: mirror(total) for name, total in totals.items()}
            store.put(key, sums, settings)
    return [sums[name].to(parts[0].passes.device) for name in names]
