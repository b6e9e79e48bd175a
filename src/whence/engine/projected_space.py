"""Gradients of one run in few dimensions: P∇f of queries, second moments, and the way back."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from whence.engine.queries import Queries
from whence.engine.workspace import MEASUREMENT, Workspace
from whence.errors import InvalidInput, whole
from whence.layers.kind import ParameterBlock
from whence.layers.passes import MEASUREMENTS, Signal, Weights
from whence.layers.tracked import Tracked
from whence.operators import BlockVectors, FitData, cost
from whence.operators.projected import ProjectedVectors
from whence.persist.identity import key_of
from whence.projections import Projection, Random, TwoSided, check, gather, moments, projected
from whence.projections.projection import PROBED
from whence.projections.random import shares
from whence.projections.two_sided import square_ranks
from whence.study import task_identity


class Space(Protocol):
    """A projected space and the data in it."""

    @property
    def columns(self) -> Sequence[slice]: ...
    def gradients(self, queries: Queries, checkpoint: Weights) -> ProjectedVectors: ...
    def measurement_moments(self) -> list[Tensor]: ...
    def lift(self, v: ProjectedVectors, blocks: Collection[str] | None = None) -> Any: ...


@dataclass(frozen=True)
class ProjectedSpace:
    """The space of a random projection, with nothing stored."""

    workspace: Workspace
    projection: Projection

    @classmethod
    def random(cls, workspace: Workspace, dimension: int, joint: bool, seed: int) -> ProjectedSpace:
        """Random signs, tried out on the gradients of a few examples."""
        projection = random_projection(workspace, dimension, joint, seed)
        try_out(workspace, projection)
        return cls(workspace, projection)

    @property
    def columns(self) -> Sequence[slice]:
        return self.projection.columns

    def gradients(self, queries: Queries, checkpoint: Weights) -> ProjectedVectors:
        """P∇f(q, θ_c), (q, d)."""
        return ProjectedVectors(queries.summed(self.rows(queries, checkpoint, MEASUREMENT)))

    def rows(
        self,
        examples: Queries,
        checkpoint: Weights,
        signal: Signal,
        diagonal: Mapping[str, Tensor] | None = None,
    ) -> Iterator[Tensor]:
        """P D ∇ of each example, (n, d), in pieces; D = 1 without a diagonal."""
        passes = self.workspace.passes[examples.stage]
        passes.load(checkpoint)
        batches, room = examples.batches(self.workspace.batch_size), self.workspace.memory // 4
        how = self.projection if diagonal is None else self.projection.scaled(diagonal)
        for piece in projected(passes, examples.data, batches, signal, how, room):
            yield piece.rows

    def measurement_moments(self) -> list[Tensor]:
        """Σ φφᵀ of P∇f over all examples of all stages at the final model, for each part."""
        workspace, study, run = self.workspace, self.workspace.study, self.workspace.run
        data = []
        for stage in study.stages:
            everyone, passes = np.arange(len(study.data[stage])), workspace.passes[stage]
            identity = study.identity(run, stage, passes.tracked) | {"used": "all"}
            losses = partial(workspace.losses, stage)
            how = identity, losses, workspace.world
            data.append(FitData(passes, study.data[stage], everyone, *how))
        settings = {
            "what": "moments of projected measurement gradients",
            "projection": [repr(part) for part in self.projection.parts],
            "identity": [part.identity for part in data],
            "tasks": [
                [
                    task_identity(study.tasks[s], measured=True),
                    workspace.losses(s, run.final, MEASUREMENTS),
                ]
                for s in study.stages
            ],
            "weights": run.final.sha256,
            "dtype": workspace.final_passes.arithmetic,
        }
        cache, room = study.store(run), workspace.memory // 4
        limits = workspace.batch_size, room
        return moments(data, run.final, MEASUREMENT, self.projection, cache, settings, *limits)

    def lift(self, v: ProjectedVectors, blocks: Collection[str] | None = None) -> BlockVectors:
        """Pᵀv, over the parameters of these blocks (None: all)."""
        values: dict[str, Tensor] = {}
        for part, columns in zip(self.projection.parts, self.projection.columns, strict=True):
            assert isinstance(part, Random)
            values |= part.lift(v.values[:, columns], blocks)
        return BlockVectors(values, dict.fromkeys(values))


def projecting(tracked: Tracked, dimension: int) -> float:
    """Operations of one example's passes, and of projecting its gradient, for the estimate."""
    return tracked.operations + 2.0 * dimension * cost.vector_numbers(tracked)


def random_projection(workspace: Workspace, dimension: int, joint: bool, seed: int) -> Projection:
    """Random signs keyed by the seed and the final weights: another run has another P."""
    blocks = workspace.trained_blocks()
    check_dimension(dimension, blocks, workspace.memory)
    parts = [(blocks, dimension)]
    if not joint:
        parts = [([b], d) for b, d in zip(blocks, shares(blocks, dimension), strict=True)]
    key, where = _key(workspace, seed), (workspace.device, workspace.dtype)
    return Projection([Random(part_blocks, d, key, *where) for part_blocks, d in parts])


def two_sided_projection(
    workspace: Workspace, dimension: int, joint: bool, seed: int
) -> Projection:
    """Random projections of each layer's inputs and outputs, keyed alike. Its dimension is at most
    the given one."""
    blocks, like = workspace.trained_blocks(), workspace.zero.to(workspace.dtype)
    ranks, key = square_ranks(blocks, dimension), _key(workspace, seed)
    parts = [(blocks, ranks)]
    if not joint:
        parts = [([b], [rank]) for b, rank in zip(blocks, ranks, strict=True)]
    return Projection([TwoSided.random(part_blocks, k, key, like) for part_blocks, k in parts])


def _key(workspace: Workspace, seed: int) -> int:
    return int(key_of({"seed": seed, "weights": workspace.run.final.sha256}), 16)


def try_out(workspace: Workspace, projection: Projection) -> None:
    """Refuse a projection that does not work here, by the gradients of a few examples."""
    passes, data = workspace.final_passes, workspace.study.data[workspace.study.stages[-1]]
    passes.load(workspace.run.final)
    check(projection, gather(passes, data, np.arange(min(PROBED, len(data))), MEASUREMENT))


def check_dimension(dimension: int, blocks: Sequence[ParameterBlock], memory: int) -> None:
    """Refuse a projection to more numbers than parameters, or than there is memory for."""
    parameters = sum(block.size for block in blocks)
    whole("dimension", dimension, 1)
    if dimension > parameters:
        raise InvalidInput(
            f"dimension={dimension}, but only {parameters} parameters are tracked and trained: "
            f"use dimension<={parameters}"
        )
    needed = 3 * 8 * dimension**2
    if needed > memory:
        raise InvalidInput(
            f"dimension={dimension} needs {needed / 2**30:.1f} GiB for matrices of that size, and "
            f"memory allows {memory / 2**30:.1f}: use a smaller dimension, or more memory="
        )
