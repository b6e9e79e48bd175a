"""A sweep over the updates of a training, from the last to the first.

This module holds its queries, the credit of each update to its examples, and the snapshots from
which an interrupted sweep resumes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whence.data import Batches
from whence.engine.workspace import Workspace
from whence.operators import cost
from whence.persist.arrays import load_tensors, save_tensors
from whence.persist.files import Throttle, parsing
from whence.replay.training import Adjoint, Indices, Replay, Update
from whence.run import Run

SNAPSHOT_SECONDS = 60.0  # between two snapshots of a sweep
REMEDY = "delete it to start over"
MAX_PENDING = 64  # credits on the device before they are fetched


@dataclass
class ReplayWorkspace(Workspace):
    """A workspace with a replay of the run's training."""

    replay: Replay = field(kw_only=True)

    def at_once(self, queries: int) -> int:
        """The number of examples per pass that fits in memory with this many queries."""
        per_example = queries * cost.per_example_numbers(self.tracked) * self.replay.dtype.itemsize
        return min(self.batch_size, max(1, self.memory // 4 // per_example))


@dataclass(frozen=True)
class Credit:
    """The credit that an update, or a stretch of updates, gives to some examples.

    Attributes:
        stage, indices: the examples.
        values: their effects on the queries, (q, n).
        update: the update that decides the segment of the credit.
        adjoint: the adjoint to resume from once this credit is added; None if more credits of the
            same update follow.
        step: the number of updates that remain then.
    """

    stage: str
    indices: Indices
    values: Tensor
    update: int
    adjoint: Adjoint | None
    step: int


def update_credits(update: Update, slopes: list[Tensor], adjoint: Adjoint) -> Iterator[Credit]:
    """(1/B_t) ⟨ḡ_t, ∇L(m, θ_t)⟩ of an update's examples, from the slopes of each part."""
    for k, ((indices, _), slope) in enumerate(zip(update.parts, slopes, strict=False), 1):
        ready = adjoint if k == len(slopes) else None
        yield Credit(
            update.stage.name, indices, slope / update.examples, update.step, ready, update.step
        )


@dataclass(frozen=True)
class QueryBlock:
    """Some queries, and the examples to score for them.

    Attributes:
        rows, columns: their place among the scores; no rows for self-influence.
        data, stage, indices: the queries.
        wanted: {stage: examples}.
    """

    rows: slice | None
    columns: slice
    data: Batches
    stage: str
    indices: Indices
    wanted: dict[str, Indices]

    def first(self, run: Run) -> int:
        """The number of updates before the first stage of the examples."""
        return min(stage.start for stage in run.stages if stage.name in self.wanted)


class CreditSum:
    """The sum of a block's credits in float64, segment by segment.

    Args:
        ends: the steps at which the L segments end.
        apart: whether to keep the segments apart, (L, q, n), or to add them up, (1, q, n).
            Self-influence has no axis q.
    """

    def __init__(self, block: QueryBlock, ends: list[int], apart: bool) -> None:
        self.block, self.ends, self.apart = block, ends, apart
        sizes = [len(indices) for indices in block.wanted.values()]
        starts = np.cumsum([0, *sizes[:-1]])
        self._offsets = dict(zip(block.wanted, starts.tolist(), strict=True))
        queries = [] if block.rows is None else [len(block.indices)]
        self.values = np.zeros([len(ends) if apart else 1, *queries, sum(sizes)])
        self.here = np.zeros_like(self.values[0])  # of the current segment
        self.segment = len(ends) - 1
        self.magnitudes = [0.0] * len(ends)  # Σ |credit| of each segment
        self._pending: list[Credit] = []

    def add(self, credit: Credit) -> None:
        if credit.stage in self.block.wanted:
            self._pending.append(replace(credit, adjoint=None))  # to free the adjoint's memory
            if len(self._pending) >= MAX_PENDING:
                self.settle()

    def settle(self) -> None:
        """Fetch pending credits from the device, and add them in order, for the same bits."""
        for credit in self._pending:
            segment = int(np.searchsorted(self.ends, credit.update, side="right"))
            if segment != self.segment:
                self.close()
                self.segment = segment
            wanted, values = self.block.wanted[credit.stage], credit.values.cpu().numpy()
            columns = credit.indices - wanted[0] + self._offsets[credit.stage]
            if self.block.rows is None:
                inside = np.flatnonzero((columns >= 0) & (columns < len(wanted)))
                np.add.at(self.here, columns[inside], values[columns[inside], inside])
            elif len(np.unique(columns)) == len(columns):
                self.here[:, columns] += values
            else:  # an example may be drawn twice
                np.add.at(self.here.T, columns, values.T)
        self._pending.clear()

    def close(self) -> None:
        """Add the current segment to the total."""
        self.magnitudes[self.segment] += float(np.abs(self.here).sum())
        self.values[self.segment if self.apart else 0] += self.here
        self.here[...] = 0.0


class SweepSnapshot:
    """The state of a sweep on disk, from which an interrupted one resumes with the same bits."""

    def __init__(self, path: Path | None, of: str = "") -> None:
        """Args:
        of: the digest of the losses that the sweep is of.
        """
        self.path, self.of, self._throttle = path, of, Throttle(SNAPSHOT_SECONDS)

    def due(self) -> bool:
        return self.path is not None and self._throttle.due()

    def save(
        self, key: str, total: CreditSum, step: int, adjoint: Adjoint, account: dict[str, Any]
    ) -> None:
        assert self.path is not None
        tensors = {
            f"{slot}/{name}": value
            for name, state in adjoint.items()
            for slot, value in state.items()
        }
        tensors |= {"values": torch.from_numpy(total.values), "here": torch.from_numpy(total.here)}
        progress = {
            "key": key,
            "step": step,
            "segment": total.segment,
            "magnitudes": total.magnitudes,
            "account": account,
        }
        with self._throttle.saving():
            save_tensors(self.path, tensors, progress)

    def load(self, key: str, total: CreditSum) -> tuple[int, Adjoint, dict[str, Any]] | None:
        """The step, adjoint and tallies that an earlier call with the same key saved.

        Fills in `total`. None if there is no such snapshot.
        """
        if self.path is None or not self.path.exists():
            return None
        tensors, progress = load_tensors(self.path, remedy=REMEDY, checksum_required=False)
        if progress.get("key") != key:
            return None
        with parsing(self.path, REMEDY):
            total.values, total.here = (tensors.pop(name).numpy() for name in ("values", "here"))
            total.segment, total.magnitudes = progress["segment"], progress["magnitudes"]
            adjoint: Adjoint = {}
            for name, tensor in tensors.items():
                slot, parameter = name.split("/", 1)
                adjoint.setdefault(parameter, {})[slot] = tensor
            return progress["step"], adjoint, progress["account"]

    def discard(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)
        self._throttle.restart()


def forward_operations(workspace: Workspace) -> float:
    """Operations of one example's forward pass, about."""
    return workspace.tracked.operations / 2
