"""A sweep over the updates of a training, from the last to the first: its queries, what each
update gave to its examples, and its state on disk, from which an interrupted sweep resumes."""

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
from whence.persist.snapshots import Throttle
from whence.persist.tensors import load_tensors, save_tensors
from whence.replay.training import Adjoint, Indices, Replay, Update
from whence.run import Run

SAVED_EVERY = 60.0  # seconds between two notes of where a sweep stands
PENDING = 64  # credits that wait on the device before they are fetched


@dataclass
class ReplayWorkspace(Workspace):
    """A workspace with the run's training laid out for being replayed."""

    replay: Replay = field(kw_only=True)

    def at_once(self, queries: int) -> int:
        """How many examples may meet that many queries at a time."""
        each = queries * cost.per_example_numbers(self.tracked) * self.replay.dtype.itemsize
        return min(self.batch_size, max(1, self.memory // 4 // each))


@dataclass(frozen=True)
class Credit:
    """What an update, or a stretch of them, gave to some examples.

    Attributes:
        stage, indices: the examples.
        values: (q, n), what they did to the queries.
        update: the one that it is counted with.
        adjoint: what the sweep goes on with once this is added; None when more must come first.
        step: how many updates are left then.
    """

    stage: str
    indices: Indices
    values: Tensor
    update: int
    adjoint: Adjoint | None
    step: int


def update_credits(update: Update, slopes: list[Tensor], adjoint: Adjoint) -> Iterator[Credit]:
    """(1/B_t) ⟨ḡ_t, ∇L(m, θ_t)⟩ of an update's own examples, from their slopes part by part."""
    for k, ((indices, _), slope) in enumerate(zip(update.parts, slopes, strict=False), 1):
        ready = adjoint if k == len(slopes) else None
        yield Credit(
            update.stage.name, indices, slope / update.examples, update.step, ready, update.step
        )


@dataclass(frozen=True)
class QueryBlock:
    """Some queries, and the examples whose part in them is asked for.

    Attributes:
        rows, columns: their place among the scores; no rows where queries and examples are the same
            ones, each asked about itself.
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
        """How many updates come before the first that used the examples."""
        return min(stage.start for stage in run.stages if stage.name in self.wanted)


class Sum:
    """Credits of a block, added up in float64, segment by segment as the sweep goes back.

    Args:
        ends: where the L segments end.
        apart: keep them apart, (L, q, n); else add them up, (1, q, n). No axis q for selves.
    """

    def __init__(self, block: QueryBlock, ends: list[int], apart: bool) -> None:
        self.block, self.ends, self.apart = block, ends, apart
        sizes = [len(indices) for indices in block.wanted.values()]
        starts = np.cumsum([0, *sizes[:-1]])
        self._offsets = dict(zip(block.wanted, starts.tolist(), strict=True))
        queries = [] if block.rows is None else [len(block.indices)]
        self.values = np.zeros([len(ends) if apart else 1, *queries, sum(sizes)])
        self.here = np.zeros_like(self.values[0])  # of the segment that the sweep is in
        self.segment = len(ends) - 1
        self.magnitudes = [0.0] * len(ends)  # Σ |credit| of each segment
        self._pending: list[Credit] = []

    def add(self, credit: Credit) -> None:
        if credit.stage in self.block.wanted:
            self._pending.append(replace(credit, adjoint=None))  # which would hold memory
            if len(self._pending) >= PENDING:
                self.settle()

    def settle(self) -> None:
        """Fetch what waits on the device; added in order, so the same bits come out every time."""
        for credit in self._pending:
            segment = int(np.searchsorted(self.ends, credit.update, side="right"))
            if segment != self.segment:
                self.close()
                self.segment = segment
            wanted, found = self.block.wanted[credit.stage], credit.values.cpu().numpy()
            columns = credit.indices - wanted[0] + self._offsets[credit.stage]
            if self.block.rows is None:
                own = np.flatnonzero((columns >= 0) & (columns < len(wanted)))
                np.add.at(self.here, columns[own], found[columns[own], own])
            elif len(np.unique(columns)) == len(columns):
                self.here[:, columns] += found
            else:  # an example may be drawn twice
                np.add.at(self.here.T, columns, found.T)
        self._pending.clear()

    def close(self) -> None:
        """Add up the segment that the sweep was in."""
        self.magnitudes[self.segment] += float(np.abs(self.here).sum())
        self.values[self.segment if self.apart else 0] += self.here
        self.here[...] = 0.0


class Saved:
    """Where a sweep stands, on disk, so that an interrupted one goes on with the same bits."""

    def __init__(self, path: Path | None) -> None:
        self.path, self._throttle = path, Throttle(SAVED_EVERY)

    def due(self) -> bool:
        return self.path is not None and self._throttle.due()

    def save(
        self, key: str, total: Sum, step: int, adjoint: Adjoint, account: dict[str, Any]
    ) -> None:
        assert self.path is not None
        tensors = {
            f"{slot}/{name}": value
            for name, state in adjoint.items()
            for slot, value in state.items()
        }
        tensors |= {"values": torch.from_numpy(total.values), "here": torch.from_numpy(total.here)}
        about = {
            "key": key,
            "step": step,
            "segment": total.segment,
            "magnitudes": total.magnitudes,
            "account": account,
        }
        with self._throttle.saving():
            save_tensors(self.path, tensors, about)

    def load(self, key: str, total: Sum) -> tuple[int, Adjoint, dict[str, Any]] | None:
        """What an earlier call with the same key has saved, if anything; the sum is filled in."""
        if self.path is None or not self.path.exists():
            return None
        tensors, about = load_tensors(
            self.path, remedy="delete it to start over", checksum_required=False
        )
        if about.get("key") != key:
            return None
        total.values, total.here = (tensors.pop(name).numpy() for name in ("values", "here"))
        total.segment, total.magnitudes = about["segment"], about["magnitudes"]
        adjoint: Adjoint = {}
        for name, tensor in tensors.items():
            slot, parameter = name.split("/", 1)
            adjoint.setdefault(parameter, {})[slot] = tensor
        return about["step"], adjoint, about["account"]

    def forget(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)
        self._throttle.restart()


def forward_operations(workspace: Workspace) -> float:
    """Of one example's forward pass, in the layers that are counted."""
    tracked = workspace.tracked
    return sum(cost.forward_backward(b, tracked.positions[b.name]) / 2 for b in tracked.blocks)
