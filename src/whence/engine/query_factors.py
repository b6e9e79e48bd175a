"""Query vectors in factors of low rank, so that many queries share a pass (Grosse et al., 2023).

In each layer, a query's matrix W (o, width) is cut to its r leading singular vectors, after the
curvature was applied to it. That takes r (o + width) numbers instead of o times width.

On the way to its factors, a query has whole vectors. Where those of all layers do not fit into
memory, layers take turns: the vectors of a group of blocks are built and cut, then those of the
next. Each group takes a pass over the queries, and none over the data.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from whence.engine.costs import Workload
from whence.engine.queries import AUTO, PlainGradients, Readouts
from whence.engine.workspace import VECTORS, Workspace
from whence.layers.kind import ParameterBlock
from whence.operators import cost
from whence.operators.operator import rotate
from whence.operators.products import (
    OVERSAMPLED,
    SUBSPACE_ITERATIONS,
    FactoredReadout,
    Readout,
    leading,
    squared_norms,
)

AUTO_RANKS = 16, 64  # the least and the largest that "auto" takes


@dataclass(frozen=True)
class Plan:
    """How query vectors are compressed to factors.

    Attributes:
        rank: rank of the factors.
        rows: number of queries whose factors fit into memory, and which share a pass.
        whole: number of queries whose whole vectors fit, before they become factors; each rank
            takes as many.
        groups: names of the blocks whose whole vectors are in memory together.
    """

    rank: int
    rows: int
    whole: int
    groups: tuple[tuple[str, ...], ...]

    def numbers(self, blocks: Collection[ParameterBlock], sets: int) -> int:
        """In memory at once: factors of all terms, and whole vectors on the way to them."""
        sizes = {b.name: b.size for b in blocks}
        largest = max(sum(sizes[name] for name in group) for group in self.groups)
        factors = sum(cost.low_rank_numbers(b, self.rank) for b in blocks)
        return sets * self.rows * factors + VECTORS * self.whole * largest


def plan(
    blocks: Collection[ParameterBlock],
    size: int,
    memory: int,
    queries: int,
    rank: int | str,
    sets: int,
    joint: bool = False,
) -> Plan | None:
    """How to take the queries in factors; None for whole vectors.

    A quarter of the memory is for the factors, another for whole vectors.

    Args:
        size: bytes of a number.
        rank: that is asked for, as in `attribute`.
        sets: of vectors that a pass needs, one for each term.
        joint: whether vectors are of all layers together, which then take no turns.
    """

    def fitting(numbers: int, sets: int) -> int:
        return max(1, int(memory // 4 // (sets * numbers * size)))

    numbers = sum(block.size for block in blocks)
    room = None if joint else memory // 4 // (VECTORS * size)
    groups = cost.in_groups(blocks, lambda block: block.size, room)
    names = tuple(tuple(block.name for block in group) for group in groups)
    whole = fitting(max(sum(b.size for b in group) for group in groups), VECTORS)

    def of(rank: int) -> Plan:
        rows = fitting(sum(cost.low_rank_numbers(b, rank) for b in blocks), sets)
        return Plan(rank, min(rows, queries), min(whole, queries), names)

    if rank != AUTO:
        return of(int(rank))
    # as many as are taken without a rank
    if len(groups) == 1 and 2 * fitting(numbers, sets + 2) >= queries:
        return None
    least, most = AUTO_RANKS
    fits = (r for r in range(most, least - 1, -1) if of(r).rows == queries)
    return of(next(fits, least))


@dataclass(frozen=True)
class Energy:
    """‖W‖² of each query in each block, and how much of it the factors have: (q,)."""

    total: dict[str, Tensor] = field(default_factory=dict)
    retained: dict[str, Tensor] = field(default_factory=dict)

    def add(self, others: Energy) -> None:
        """Add other blocks'."""
        self.total.update(others.total)
        self.retained.update(others.retained)

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Energy:
        """With a function of every block's numbers in their place."""
        total, retained = (
            {name: function(values) for name, values in part.items()}
            for part in (self.total, self.retained)
        )
        return Energy(total, retained)

    def lost(self) -> Tensor:
        """The share of each query's energy that is lost, (q,)."""
        parts = self.total, self.retained
        return _lost(*(torch.stack(list(part.values())).sum(0) for part in parts))

    def by_layer(self) -> dict[str, float]:
        """The share of a query's energy in each block that is lost, the mean over queries."""
        return {
            name: float(_lost(total, self.retained[name]).mean())
            for name, total in self.total.items()
        }


def _lost(total: Tensor, retained: Tensor) -> Tensor:
    """The share of each query's energy that is lost: nothing of none."""
    return torch.where(total > 0, 1 - retained / total, 0.0).clamp_min(0)


def low_rank(
    workspace: Workspace, vectors: Any, scale: float, rank: int
) -> tuple[Readouts, Energy]:
    """The vectors, times `scale`, cut to a rank where that takes less memory; what that loses."""
    ready: Readouts = {}
    energy = Energy()
    for name, whole, basis, factor in _matrices(workspace, vectors):
        block, dtype = workspace.blocks[name], workspace.dtype
        if isinstance(whole, FactoredReadout):
            ready[name] = exact = whole.scaled(scale)
            squares = squared_norms(exact.a[:, None], exact.s[:, None], bool(exact.c))
            retained = total = squares.double()
        elif cost.low_rank_numbers(block, rank) == block.size:
            matrices = rotate(whole, basis, None) * (scale * factor)
            ready[name] = Readout.of(matrices, None, block.bias, dtype)
            retained = total = _squares(matrices)
        else:
            left, right = leading(whole, rank)
            right = right * (scale * factor)
            total, retained = _squares(whole) * (scale * factor) ** 2, _squares(right)
            if basis is not None:  # leftᵀ right → Q_S leftᵀ right Q_Aᵀ
                right = right @ basis.inputs.mT
                left = left if basis.outputs is None else left @ basis.outputs.mT
            ready[name] = FactoredReadout.of(left, right, block.bias, dtype)
        energy.total[name], energy.retained[name] = total, retained
    return ready, energy


def _squares(values: Tensor) -> Tensor:
    return values.flatten(1).double().square().sum(1)


def _matrices(workspace: Workspace, vectors: Any) -> Iterator[tuple[str, Any, Any, float]]:
    """(block, matrices (q, o, width), their basis, a number they are times); or, instead of
    matrices, gradients that are factored already. Their memory is reused."""
    if isinstance(vectors, PlainGradients):
        for name in list(vectors.readouts):
            readout = vectors.readouts.pop(name)
            if isinstance(readout, Readout):
                columns = [] if readout.column is None else [readout.column.unsqueeze(2)]
                whole = torch.cat([readout.weight, *columns], 2).to(workspace.accumulator)
                yield name, whole, readout.basis, 1.0
            else:
                yield name, readout, None, 1.0
        return
    for name in list(vectors.values):
        yield name, vectors.values.pop(name), vectors.bases[name], vectors.scale(name)


def joined_readouts(parts: list[Readouts]) -> Readouts:
    """The readouts of some queries after those of others."""
    return {name: _joined([part[name] for part in parts]) for name in parts[0]}


def _joined(parts: list[Any]) -> Readout | FactoredReadout:
    def cat(values: Iterable[Any]) -> Any:
        first, *others = values
        return torch.cat([first, *others]) if isinstance(first, Tensor) else first

    first = parts[0]
    if isinstance(first, Readout):
        return Readout(cat(p.weight for p in parts), cat(p.column for p in parts), first.basis)
    a, s, c = cat(p.a for p in parts), cat(p.s for p in parts), cat(p.c for p in parts)
    return FactoredReadout(a, s, c, first.rank)


def operations(work: Workload, plan: Plan) -> float:
    """Operations of a term's factors and inner products, per scored example."""
    n, q, r, queries = work.batch_size, plan.rows, plan.rank, work.asked
    cut, inner = 0.0, work.tracked.operations * -(-queries // q)
    for b in work.tracked.blocks:
        t = work.tracked.positions[b.name]
        if cost.low_rank_numbers(b, r) == b.size:
            inner += cost.inner(b, t, queries)
            continue
        ways = cost.inner_by_position, cost.inner_expanded
        per_example = min(way(n, t, b.o, b.width, q, r) for way in ways) / n
        if b.lookup:  # its outputs are looked up, position by position
            per_example = cost.inner_by_position(n, t, 0, b.width, q, r) / n
        inner += per_example * queries / q
        columns = min(r + OVERSAMPLED, b.o, b.width)
        cut += 2.0 * b.size * columns * (2 * SUBSPACE_ITERATIONS + 3) * queries
    return inner + cut / work.examples
