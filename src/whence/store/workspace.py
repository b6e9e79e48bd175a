"""A store as a workspace: the same methods run on stored, projected gradients.

Rows P∇L(m, θ_c) and second moments come from the store; only query gradients are computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whence.data import cut
from whence.engine.queries import Queries, QuerySet
from whence.engine.scoring import Scoring
from whence.engine.workspace import Columns, Workspace
from whence.errors import DamagedFile, InvalidInput
from whence.layers.passes import LOSSES, Weights
from whence.operators import cost
from whence.operators.projected import Projected, ProjectedVectors, never_zero
from whence.persist.cache import Tried
from whence.store.contents import StoreContents
from whence.store.index import candidates
from whence.study import task_identity
from whence.table import listed

CHUNK = 1 << 14  # examples per block of scores


@dataclass
class StoreWorkspace(Workspace):
    """A workspace that reads training gradients and curvature from a store."""

    store: StoreContents = field(kw_only=True)
    searched: int | None = None  # how many strongest examples an index is asked for

    reads_training_data = False

    def curvature(
        self,
        kind: str,
        stages: Sequence[str] | None,
        checkpoints: Sequence[Weights],
        blocks: Mapping[str, Any],
        **_: Any,
    ) -> Projected:
        """P H Pᵀ from the store's second moments, for any `kind` of curvature."""
        stages = self.study.stages if stages is None else stages
        examples = sum(len(self.used(stage)) for stage in stages) * len(checkpoints)

        def matrices() -> list[Tensor]:
            curvatures = [self.store.curvature(self, s, c) for s in stages for c in checkpoints]
            parts = zip(*curvatures, strict=True)
            return [sum(part[1:], part[0]) / examples for part in parts]

        identity = {"stages": list(stages), "weights": [c.sha256 for c in checkpoints]}
        projection = self.store.projection(self)
        layers = [part.names for part in projection.parts]
        names = [members[0] if len(members) == 1 else "all layers" for members in layers]
        about = projection.columns, names, self.accumulator, self._remember, identity
        return Projected(matrices, *about)

    def _remember(self, key: Mapping[str, Any], fit: Any) -> list[Tensor]:
        return self.store.decomposition(self, key, fit, on_disk="durations" in key)

    @property
    def preconditioned(self) -> bool:
        return self.store.preconditioned

    def check_room(self, method: object) -> None:
        """Vectors are projected."""

    def check_preconditioner(self, optimizer: str) -> None:
        if not self.store.preconditioned:
            raise InvalidInput(
                f"the store has plain gradients, and {optimizer!r} preconditioned them. Build a "
                "store with methods=['source'] for SOURCE, or use influence with a number as "
                "damping, tracin or trak"
            )

    def diagonal(self, values: Mapping[str, Any]) -> Tensor:
        """One number per coordinate, (d,). A layer without a value does not move."""
        projection = self.store.projection(self)
        missing = {name: 0.0 for name in self.blocks if name not in values}
        rates = projection.per_coordinate({**values, **missing})
        return never_zero(rates) if missing else rates

    def query_gradients(
        self, queries: Queries, checkpoints: Sequence[Weights], bases: Any
    ) -> ProjectedVectors:
        """The mean over checkpoints of P∇f(q, θ_c)."""
        gradients = [self.plain_gradients(queries, c).values for c in checkpoints]
        return ProjectedVectors(torch.stack(gradients).mean(0))

    def plain_gradients(self, queries: Queries, checkpoint: Weights) -> ProjectedVectors:
        rows = self.store.projected(self, queries.data, queries.indices, checkpoint)
        return ProjectedVectors(queries.summed([rows.to(self.accumulator)]))

    def projected_space(self, dimension: int, joint: bool, seed: int) -> StoredSpace:
        return StoredSpace(self)

    def scoring(self, *arguments: Any) -> StoredScoring:
        return StoredScoring(self, *arguments)

    def identity(self) -> dict[str, Any]:
        assert self.query is not None
        return {
            "store": self.store.fingerprint,
            "query": self.query.identity(),
            "task": task_identity(self.study.tasks[self.study.stages[-1]], measured=True),
        }

    def tried(self, places: Iterable[tuple[str, Weights]], what: str = LOSSES) -> Tried:
        """Of the queries only: the store's rows are compared when it is opened."""
        return super().tried([], what)

    def data_fingerprints(self) -> dict[str, str]:
        """The fingerprints that the store recorded; this does not read the training data again."""
        return {stage: self.store.data[stage]["sha256"] for stage in self.stages}

    def settings(self) -> dict[str, Any]:
        how = {} if self.searched is None else {"index": "faiss"}
        return self.store.settings | super().settings() | how


@dataclass(frozen=True)
class StoredSpace:
    """A store's projected space. Vectors stay in it: `lift` is the identity."""

    workspace: StoreWorkspace

    @property
    def columns(self) -> Sequence[slice]:
        return self.workspace.store.projection(self.workspace).columns

    def gradients(self, queries: Queries, checkpoint: Weights) -> ProjectedVectors:
        return self.workspace.plain_gradients(queries, checkpoint)

    def measurement_moments(self) -> list[Tensor]:
        """Σ φφᵀ over all examples of all stages, φ = P∇f, for each part of P."""
        store, stages = self.workspace.store, self.workspace.study.stages
        pooled = [store.measured(self.workspace, stage) for stage in stages]
        return [sum(parts[1:], parts[0]) for parts in zip(*pooled, strict=True)]

    def lift(self, v: ProjectedVectors, blocks: Any = None) -> ProjectedVectors:
        return v


class StoredScoring(Scoring):
    """Scores as inner products of query vectors (q, d) with the stored rows."""

    workspace: StoreWorkspace

    def readouts(self, vectors: ProjectedVectors, scale: float, examples: int) -> Tensor:
        return (vectors.values * scale).to(self.workspace.accumulator)

    def queries(self, query: QuerySet) -> None:
        k, workspace = self.workspace.searched, self.workspace
        if k is None:
            super().queries(query)
            return
        last, stages = workspace.study.stages[-1], workspace.stages
        for rows in cut(len(query), self._at_once()):
            ready = list(self._ready(query.some(last, rows), workspace.examples))
            parts, columns, offset = [], [], 0
            for stage in stages:
                examples = self._candidates(ready, stage, k)
                parts.append(self._of(ready, stage, examples))
                columns.append(examples + offset)
                offset += len(workspace.scored(stage))
            contributions = torch.cat(parts, 2)
            self._note_sizes(contributions)
            where = slice(int(rows[0]), int(rows[-1]) + 1)
            values = contributions.sum(0).cpu().numpy()
            self.writer.write_strongest(where, np.concatenate(columns), values)

    def _candidates(
        self, ready: Sequence[tuple[int, Tensor]], stage: str, k: int
    ) -> NDArray[np.int64]:
        """The examples of a stage that are probably strongest; all if too few are found."""
        store, everyone = self.workspace.store, self.workspace.scored(stage)
        pairs = [
            (vectors, checkpoint)
            for number, vectors in ready
            for checkpoint in self.terms[number].checkpoints
            if self.terms[number].stage == stage
        ]
        if not pairs:
            return everyone[:k]
        index = store.index(stage, [checkpoint for _, checkpoint in pairs])
        side_by_side = torch.cat([vectors for vectors, _ in pairs], 1).float().cpu().numpy()
        examples = candidates(index, side_by_side, k)
        return examples if len(examples) >= min(k, len(everyone)) else everyone

    def _of(
        self, ready: Iterable[tuple[int, Tensor]], stage: str, examples: NDArray[np.int64]
    ) -> Tensor:
        """Each term's part of the scores of some examples, (terms, q, n)."""
        parts = dict(ready)
        like = next(iter(parts.values()))
        totals = like.new_zeros(len(self.terms), len(like), len(examples))
        for k, term in enumerate(self.terms):
            for checkpoint in term.checkpoints if term.stage == stage else ():
                rows = self.workspace.store.rows(stage, checkpoint)[examples]
                totals[k] += parts[k] @ rows.to(like).T
        return totals

    def _contributions(
        self, ready: Iterable[tuple[int, Any]], chunk: Columns, queries: int | None
    ) -> Tensor:
        assert queries is not None
        workspace, shape = self.workspace, (len(self.terms), queries, len(chunk.indices))
        totals = torch.zeros(shape, dtype=workspace.accumulator, device=workspace.device)
        block = slice(int(chunk.indices[0]), int(chunk.indices[-1]) + 1)
        for k, vectors in ready:
            term, total = self.terms[k], totals[k]
            for checkpoint in term.checkpoints if term.stage == chunk.stage else ():
                rows = workspace.store.rows(chunk.stage, checkpoint)
                total += rows.inner(block, vectors)
                if not bool(total.sum().isfinite()):
                    self._refuse(rows[block], chunk, checkpoint)
        return totals

    @staticmethod
    def _refuse(rows: Tensor, chunk: Columns, checkpoint: Weights) -> None:
        bad = chunk.indices[(~rows.isfinite().all(1)).numpy()]
        if len(bad):
            raise DamagedFile(
                f"the stored gradients of {chunk.stage} example {listed(bad)} at step "
                f"{checkpoint.step} are NaN or infinite: the store is damaged. Delete it, and "
                "build it again"
            )

    def _chunk(self, queries: int) -> int:
        return CHUNK

    def _at_once(self) -> int:
        # one answer computes the vectors of all terms together
        return max(1, self._fitting(len(self.terms)))

    def _fitting(self, sets: int) -> int:
        numbers, size = self.workspace.store.dimension, self.workspace.accumulator.itemsize
        return cost.queries_at_once(numbers, size, self.workspace.memory, sets)

    def _groups(self, stage: str) -> list[list[str]]:
        return [[block.name for block in self.workspace.passes[stage].tracked.blocks]]
