"""The base of Unrolled and HYDRA: a sweep over the updates becomes scores.

A method defines how to propagate a block of queries from the end of training to its start. It
yields the credit of each update to its examples.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from whence.data import cut
from whence.engine.costs import Cost, announce
from whence.engine.queries import Queries
from whence.engine.workspace import ComputeOptions, Workspace
from whence.errors import NotFinite, warn
from whence.methods.base import Folder, Method
from whence.operators import cost
from whence.persist.identity import key_of
from whence.progress import progress_bar
from whence.replay.objective import Tensors, twice_differentiable
from whence.replay.sweep import Credit, CreditSum, QueryBlock, ReplayWorkspace, SweepSnapshot
from whence.replay.training import Adjoint, Indices, Replay
from whence.run import Run
from whence.scores import Scores
from whence.study import Study


class Unrolling(Method):
    """A method that propagates backwards through a run's training, update by update."""

    accepts = frozenset({"query_weights"})
    _quiet = True  # every trained parameter counts, tracked or not
    query_at = "final"  # or "run": where the query gradient is taken
    _follows = True  # dropout and batch norm, in training mode

    # -- defined by each method ----------------------------------------------------------------

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
            adjoint: of an interrupted sweep at `last`; None at the end of training.
        """

    @abstractmethod
    def operations(self, workspace: ReplayWorkspace, queries: int) -> float:
        """The operations of a sweep with this many queries, for the estimate."""

    def check(self, replay: Replay) -> None:
        """Refuse a replay that the method's settings do not fit, before long work."""

    # -- shared --------------------------------------------------------------------------------

    def lay_out(
        self,
        study: Study,
        run: Run,
        query: Any,
        options: ComputeOptions,
        examples: Any = None,
    ) -> ReplayWorkspace:
        workspace = super().lay_out(study, run, query, options, examples)
        with twice_differentiable():
            mode = "follow" if self._follows else "ignore" if run.trajectory else "refuse"
            replay = Replay(workspace, options.batch_size, mode)
        self.check(replay)
        if replay.unmodelled:
            modules = "; ".join(dict.fromkeys(replay.unmodelled))
            workspace.ledger.diagnostics["unmodelled"] = modules
            warn(f"{modules}: gradients are taken without", stacklevel=3)
        parts = {part.name: getattr(workspace, part.name) for part in fields(workspace)}
        return ReplayWorkspace(**parts, replay=replay)

    def score(
        self, workspace: Workspace, out: Folder, top: int | None, by: str | None = None
    ) -> Scores:
        assert isinstance(workspace, ReplayWorkspace)
        ends = [checkpoint.step for checkpoint in workspace.run.checkpoints]
        places = [(checkpoint.stage, checkpoint) for checkpoint in workspace.run.checkpoints]
        writer = self.writer(workspace, out, top, len(ends) if by else None, places)
        world = workspace.world
        name = "sweep.safetensors" if world.first else f"sweep-{world.rank}.safetensors"
        snapshot = SweepSnapshot(None if out is None else Path(out) / name, writer.of)
        if writer.already is not None:
            snapshot.discard()
            return writer.already
        blocks = self._blocks(workspace, len(ends) if by else 1)
        if workspace.progress:
            announce(self, workspace, self._cost(workspace, blocks))
        blocks = list(world.mine(blocks))
        length = sum(workspace.replay.steps - block.first(workspace.run) for block in blocks)
        bar = progress_bar(total=length, desc="updates, backwards", shown=workspace.progress)
        with bar, workspace.clock("scores"), twice_differentiable():
            for block in blocks:
                if writer.done(block.rows, block.columns):
                    bar.update(workspace.replay.steps - block.first(workspace.run))
                    continue
                total = CreditSum(block, ends, by is not None)
                self._fill(workspace, block, total, snapshot, bar)
                before = workspace.ledger.tallies.get("magnitudes", [0.0] * len(ends))
                added = [x + y for x, y in zip(before, total.magnitudes, strict=True)]
                workspace.ledger.tallies["magnitudes"] = added
                parts = total.values if by else None
                writer.write(block.rows, block.columns, total.values.sum(0), parts)
                snapshot.discard()
        self._note_deviations(workspace)
        workspace.replay.warn(workspace.ledger.tallies["deviations"])
        return writer.finish(**self.metadata(workspace))

    def _fill(
        self,
        workspace: ReplayWorkspace,
        block: QueryBlock,
        total: CreditSum,
        snapshot: SweepSnapshot,
        bar: Any,
    ) -> None:
        """Add up all credits of a block; resumes from the snapshot of an earlier call."""
        place = {"rows": str(block.rows), "columns": str(block.columns), "apart": total.apart}
        key = key_of({"scores": self.key(workspace), "losses": snapshot.of, **place})
        step, adjoint = workspace.replay.steps, None
        resumed = snapshot.load(key, total)
        if resumed is not None:
            step, adjoint, account = resumed
            workspace.ledger.tallies.update(account)
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
                if snapshot.due():
                    total.settle()
                    self._note_deviations(workspace)
                    snapshot.save(key, total, step, credit.adjoint, workspace.ledger.tallies)
        total.settle()
        total.close()
        self._note_deviations(workspace)
        if not np.isfinite(total.values).all():
            raise NotFinite(
                f"the scores of {self!r} are beyond {workspace.dtype}: the derivative of this "
                "training grows without bound. Use curvature='gauss-newton', or dtype=torch.float64"
            )

    def _gradients(self, workspace: ReplayWorkspace, block: QueryBlock) -> Tensors:
        """∇f(q), (q, ...): at the final weights, or the mean over the last stage's checkpoints."""
        points = workspace.run.query_points(self.query_at)
        gradients: Tensors = {}
        for point in points:
            weights = workspace.replay.recorded(point.step)
            for name, g in self._gradients_at(workspace, block, weights).items():
                gradients[name] = gradients[name].add_(g) if name in gradients else g
        return {name: g.div_(len(points)) for name, g in gradients.items()}

    def _gradients_at(
        self, workspace: ReplayWorkspace, block: QueryBlock, weights: Tensors
    ) -> Tensors:
        replay, objective = workspace.replay, workspace.replay.objectives[block.stage]
        queries = Queries(block.data, block.stage, block.indices)
        if workspace.query is not None:
            queries = workspace.query.some(block.stage, block.indices)
        gradients = {name: w.new_zeros(len(queries), *w.shape) for name, w in weights.items()}
        singles = queries.data.stream(queries.batches(1), replay.device, replay.dtype)
        for k, (index, batch) in enumerate(singles):
            of_one = objective.gradient(weights, weights, batch, "measurements", 1)
            for name, g in of_one.items():
                if queries.weights is None:
                    gradients[name][k] = g
                else:
                    shares = queries.weights[:, k].to(g)
                    gradients[name] += shares.view(-1, *[1] * g.dim()) * g
            if not all(bool(part.isfinite().all()) for part in of_one.values()):
                raise NotFinite(
                    f"the gradient of the measurement is NaN or infinite for {block.data.name} "
                    f"example {int(index[0])}: correct or leave out the example"
                )
        return gradients

    def _blocks(self, workspace: ReplayWorkspace, segments: int) -> list[QueryBlock]:
        """The queries, in blocks that fit in memory together with their scores per segment, at
        least one for each rank."""
        study, replay, query = workspace.study, workspace.replay, workspace.query
        everyone = {stage: np.arange(len(study.data[stage])) for stage in workspace.stages}
        # adjoints of weight and state, before and after; pulls, products, temporaries of the same
        # size, and the memory of CUDA graphs
        numbers = (2 * replay.slots + 10) * replay.numbers + cost.per_example_numbers(
            workspace.tracked
        )
        per_query = numbers * replay.dtype.itemsize
        if query is not None:
            per_query += 8 * (segments + 1) * sum(map(len, everyone.values()))
        at_once = int(max(1, workspace.memory // 2 // per_query))
        queries = sum(map(len, everyone.values())) if query is None else len(query)
        at_once = min(at_once, -(-queries // workspace.world.size))
        if query is not None:
            whole = slice(0, sum(map(len, everyone.values())))
            return [
                QueryBlock(_slice(rows), whole, query.data, study.stages[-1], rows, everyone)
                for rows in cut(len(query), at_once)
            ]
        blocks, start = [], 0
        for stage, indices in everyone.items():
            for part in cut(len(indices), at_once):
                place = slice(start + int(part[0]), start + int(part[-1]) + 1)
                blocks.append(
                    QueryBlock(None, place, study.data[stage], stage, part, {stage: part})
                )
            start += len(indices)
        return blocks

    def _cost(self, workspace: ReplayWorkspace, blocks: list[QueryBlock]) -> Cost:
        """The counts of all its work on these blocks."""
        queries = max(len(block.indices) for block in blocks)
        operations = sum(self.operations(workspace, len(block.indices)) for block in blocks)
        numbers = queries * (2 * workspace.replay.slots + 10) * workspace.replay.numbers
        steps = workspace.replay.steps * len(blocks)
        return Cost({"updates": steps}, {"updates": operations}, vector_numbers=numbers)

    def _note_deviations(self, workspace: ReplayWorkspace) -> None:
        deviations = workspace.ledger.tallies.setdefault("deviations", {})
        deviations |= {str(step): value for step, value in workspace.replay.deviations.items()}

    def key(self, workspace: Workspace) -> str:
        assert isinstance(workspace, ReplayWorkspace)
        return key_of({"scores": super().key(workspace), "replay": workspace.replay.fingerprint()})

    def metadata(self, workspace: Workspace) -> dict[str, Any]:
        assert isinstance(workspace, ReplayWorkspace)
        metadata, replay = super().metadata(workspace), workspace.replay
        sizes, ends = (
            workspace.ledger.tallies["magnitudes"],
            [c.step for c in workspace.run.checkpoints],
        )
        workspace.ledger.diagnostics |= {
            "tracked": f"all {replay.numbers:,} trained parameters",
            "replay": {
                "updates": replay.steps,
                "points_held": replay.width,
                "deviation": max(workspace.ledger.tallies["deviations"].values(), default=0.0),
            },
            "segments": [
                {"end": end, "share_of_score": size / (sum(sizes) or 1.0)}
                for end, size in zip(ends, sizes, strict=True)
            ],
        }
        return metadata | {"diagnostics": workspace.ledger.diagnostics, "excluded": []}


def _slice(rows: Indices) -> slice:
    return slice(int(rows[0]), int(rows[-1]) + 1)
