"""What Unrolled and HYDRA share: a sweep over the updates, from the last to the first.

A method says how it carries a block of queries from the end of training to its start, and yields
on the way what each update gave to its examples; adding that up, keeping the state of the sweep on
disk so that it can go on, and the account of it all are here.
"""

from __future__ import annotations

import os
import warnings
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from whence.data import Batches, cut
from whence.engine.workspace import Workspace
from whence.methods.base import Method
from whence.operators import cost, key_of
from whence.persist.snapshots import Throttle
from whence.persist.tensors import load_tensors, save_tensors
from whence.replay.objective import Tensors, twice_differentiable
from whence.replay.training import Adjoint, Indices, Replay, Update
from whence.run import Run
from whence.scores import Scores
from whence.study import Study

SAVED_EVERY = 60.0  # seconds between two notes of where a sweep stands
PENDING = 64  # credits that wait on the device before they are fetched


@dataclass
class ReplayWorkspace(Workspace):
    """A workspace with the run's training laid out for being replayed."""

    replay: Replay = field(kw_only=True)

    def at_once(self, queries: int) -> int:
        """How many examples may meet so many queries at a time."""
        each = queries * cost.per_example_numbers(self.any.tracked) * self.replay.dtype.itemsize
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


class Unrolling(Method):
    """A method that goes back through a run's training, update by update."""

    _modelled = True  # whether what the model does in training alone must be known

    # -- what a method defines -----------------------------------------------------------------

    @abstractmethod
    def sweep(
        self,
        workspace: ReplayWorkspace,
        block: QueryBlock,
        gradients: Tensors,
        adjoint: Adjoint | None,
        last: int,
    ) -> Iterator[Credit]:
        """The credits of the updates from number `last` back to the block's first.

        Args:
            gradients: ∇f(q, θ_T) of the block's queries, (q, ...).
            adjoint: what an interrupted sweep had come to at `last`; None at the end of training.
        """

    @abstractmethod
    def operations(self, workspace: ReplayWorkspace, queries: int) -> float:
        """What the sweep of so many queries costs, for the estimate."""

    # -- what both do --------------------------------------------------------------------------

    def _workspace(self, study: Study, run: Run, query: Any, *others: Any) -> ReplayWorkspace:
        told, study._told = study._told, True  # every trained parameter counts, tracked or not
        try:
            workspace = super()._workspace(study, run, query, *others)
        finally:
            study._told = told
        _, _, batch_size, *_ = others
        with twice_differentiable():
            replay = Replay(workspace, batch_size, self._modelled or not run.trajectory)
        if replay.unmodelled:
            told_once = "; ".join(dict.fromkeys(replay.unmodelled))
            workspace.diagnostics["unmodelled"] = told_once
            warnings.warn(f"{told_once}: gradients are taken without", stacklevel=3)
        return ReplayWorkspace(**vars(workspace), replay=replay)

    def _attribute_one(
        self,
        workspace: Workspace,
        out: str | os.PathLike[str] | None,
        top: int | None,
        by_segment: bool,
    ) -> Scores:
        assert isinstance(workspace, ReplayWorkspace)
        ends = [checkpoint.step for checkpoint in workspace.run.checkpoints]
        writer = self._writer(workspace, out, top, len(ends) if by_segment else None)
        saved = Saved(None if out is None else Path(out) / "sweep.safetensors")
        if writer.already is not None:
            saved.forget()
            return writer.already
        blocks = self._blocks(workspace, len(ends) if by_segment else 1)
        self._estimate(workspace, blocks)
        length = sum(workspace.replay.steps - block.first(workspace.run) for block in blocks)
        bar = tqdm(
            total=length,
            desc="updates, backwards",
            disable=not workspace.final_passes.progress,
            leave=False,
        )
        with bar, workspace.final_passes.clock("scores"), twice_differentiable():
            for block in blocks:
                if writer.done(block.rows, block.columns):
                    bar.update(workspace.replay.steps - block.first(workspace.run))
                    continue
                total = Sum(block, ends, by_segment)
                self._fill(workspace, block, total, saved, bar)
                before = workspace.account.get("magnitudes", [0.0] * len(ends))
                added = [x + y for x, y in zip(before, total.magnitudes, strict=True)]
                workspace.account["magnitudes"] = added
                parts = total.values if by_segment else None
                writer.write(block.rows, block.columns, total.values.sum(0), parts)
                saved.forget()
        workspace.replay.warn(workspace.account["deviations"])
        return writer.finish(**self._metadata(workspace))

    def _fill(
        self,
        workspace: ReplayWorkspace,
        block: QueryBlock,
        total: Sum,
        saved: Saved,
        bar: tqdm[Any],
    ) -> None:
        """Add up all credits of a block, from where an earlier call has left it."""
        place = {"rows": str(block.rows), "columns": str(block.columns), "apart": total.apart}
        key = key_of({"scores": self._key(workspace), **place})
        step, adjoint = workspace.replay.steps, None
        found = saved.load(key, total)
        if found is not None:
            step, adjoint, account = found
            workspace.account.update(account)
            bar.update(workspace.replay.steps - step)
            adjoint = {
                name: {slot: value.to(workspace.replay.device) for slot, value in state.items()}
                for name, state in adjoint.items()
            }
        gradients = self._gradients(workspace, block)
        for credit in self.sweep(workspace, block, gradients, adjoint, step):
            total.add(credit)
            if credit.adjoint is not None:
                bar.update(step - credit.step)
                step = credit.step
                if saved.due():
                    total.settle()
                    self._note_deviations(workspace)
                    saved.save(key, total, step, credit.adjoint, workspace.account)
        total.settle()
        total.close()
        self._note_deviations(workspace)
        if not np.isfinite(total.values).all():
            raise FloatingPointError(
                f"the scores of {self!r} are beyond {workspace.final_passes.dtype}: the derivative of this "
                "training grows without bound. Use curvature='gauss-newton', or dtype=torch.float64"
            )

    def _gradients(self, workspace: ReplayWorkspace, block: QueryBlock) -> Tensors:
        """∇f(q, θ_T), (q, ...)."""
        replay, count = workspace.replay, len(block.indices)
        weights, objective = replay.final().weights, replay.objectives[block.stage]
        found = {name: w.new_zeros(count, *w.shape) for name, w in weights.items()}
        singles = block.data.stream(
            [block.indices[k : k + 1] for k in range(count)], replay.device, replay.dtype
        )
        for k, (index, batch) in enumerate(singles):
            for name, g in objective.gradient(weights, weights, batch, "measurements", 1).items():
                found[name][k] = g
            if not all(bool(part[k].isfinite().all()) for part in found.values()):
                raise FloatingPointError(
                    f"the gradient of the measurement is NaN or infinite for {block.data.name} "
                    f"example {int(index[0])}: mend or leave out the example"
                )
        return found

    def _blocks(self, workspace: ReplayWorkspace, segments: int) -> list[QueryBlock]:
        """The queries, so many at once as memory allows, their scores of so many segments too."""
        study, replay, query = workspace.study, workspace.replay, workspace.query
        everyone = {stage: np.arange(len(study.data[stage])) for stage in workspace.stages}
        # adjoints of weight and state before and after; pulls, products, as much again on the
        # way, and what CUDA graphs hold of them
        numbers = (2 * replay.slots + 10) * replay.numbers + cost.per_example_numbers(
            workspace.final_passes.tracked
        )
        each = numbers * replay.dtype.itemsize
        if query is not None:
            each += 8 * (segments + 1) * sum(map(len, everyone.values()))
        at_once = int(max(1, workspace.memory // 2 // each))
        if query is not None:
            whole = slice(0, sum(map(len, everyone.values())))
            return [
                QueryBlock(_slice(rows), whole, query, study.stages[-1], rows, everyone)
                for rows in cut(len(query), at_once)
            ]
        found, start = [], 0
        for stage, indices in everyone.items():
            for part in cut(len(indices), at_once):
                place = slice(start + int(part[0]), start + int(part[-1]) + 1)
                found.append(QueryBlock(None, place, study.data[stage], stage, part, {stage: part}))
            start += len(indices)
        return found

    def _estimate(self, workspace: ReplayWorkspace, blocks: list[QueryBlock]) -> None:
        queries = max(len(block.indices) for block in blocks)
        examples = sum(len(workspace.study.data[stage]) for stage in workspace.stages)
        work = sum(self.operations(workspace, len(block.indices)) for block in blocks)
        numbers = queries * (2 * workspace.replay.slots + 10) * workspace.replay.numbers
        steps = workspace.replay.steps * len(blocks)
        per_update = work / steps / examples if examples else 0.0
        self._announce(workspace, {"updates": per_update}, {"updates": steps}, numbers)

    def _note_deviations(self, workspace: ReplayWorkspace) -> None:
        noted = workspace.account.setdefault("deviations", {})
        noted |= {str(step): value for step, value in workspace.replay.deviations.items()}

    def _key(self, workspace: Workspace) -> str:
        assert isinstance(workspace, ReplayWorkspace)
        return key_of({"scores": super()._key(workspace), "replay": workspace.replay.fingerprint()})

    def _metadata(self, workspace: Workspace) -> dict[str, Any]:
        assert isinstance(workspace, ReplayWorkspace)
        about, replay = super()._metadata(workspace), workspace.replay
        sizes, ends = workspace.account["magnitudes"], [c.step for c in workspace.run.checkpoints]
        workspace.diagnostics |= {
            "tracked": f"all {replay.numbers:,} trained parameters",
            "replay": {
                "updates": replay.steps,
                "points_held": replay.width,
                "deviation": max(workspace.account["deviations"].values(), default=0.0),
            },
            "segments": [
                {"end": end, "share_of_score": size / (sum(sizes) or 1.0)}
                for end, size in zip(ends, sizes, strict=True)
            ],
        }
        return about | {"diagnostics": workspace.diagnostics, "excluded": []}


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


def _slice(rows: Indices) -> slice:
    return slice(int(rows[0]), int(rows[-1]) + 1)


def forward_operations(workspace: Workspace) -> float:
    """Of one example's forward pass, in the layers that are counted."""
    tracked = workspace.final_passes.tracked
    return sum(cost.forward_backward(b, tracked.positions[b.name]) / 2 for b in tracked.blocks)
