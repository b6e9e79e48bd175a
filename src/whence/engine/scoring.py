"""Inner products of query vectors with training gradients, in blocks that fit, each written once.

values[q, m] = Σ_terms Σ_{c in term} ⟨w_{term,q}, ∇L(m, θ_c)⟩

(or the gradient of another signal, times a weight of each example, where a method says so.)

Queries are processed in batches that fit into memory, and for each batch the examples in chunks. A
chunk is written after all its checkpoints were added up, so written scores are final.

A pass over the examples costs more than the vectors of a few queries, so as many queries as fit in
memory share a pass. If the vectors of all terms fit, they stay in memory while the examples go by.
If not, only one term's vectors do, and they are computed again for each chunk, which is then larger
(EXAMPLES_PER_QUERY).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whence.data import Batches, cut
from whence.engine.queries import PlainGradients, Queries, QuerySet, Readouts
from whence.engine.query_factors import Energy, Plan, joined_readouts, low_rank, plan
from whence.engine.workspace import LOSS, Columns, Term, Workspace
from whence.layers.capture import LayerFactors, Outputs, joined
from whence.layers.heads import Head, heads
from whence.layers.passes import Signal
from whence.operators import cost
from whence.operators.operator import rotate
from whence.operators.products import Readout
from whence.progress import progress_bar
from whence.scores import ScoreWriter
from whence.scores.result import BY_HEAD, BY_LAYER, BY_SEGMENT

CHUNK = 1024  # examples
# Examples per query in a chunk that vectors are computed again for: those of a query (two rotations
# per term) cost about as much as the gradients of ten examples.
EXAMPLES_PER_QUERY = 64
WHOLE = [(slice(None), slice(None))]  # rows and columns of a whole block

#: the vectors of some queries: for the terms with these numbers, vectors and a number they are
#: times, in any order. The receiver may reuse their memory.
VectorsOf = Callable[[Queries], Iterable[tuple[Sequence[int], Any, float]]]


@dataclass(frozen=True)
class Parts:
    """What the parts of scores are of: layers, or the heads of those that have heads.

    Attributes:
        names: of the parts.
        places: the parts of each block: of its layer, and of each of its heads.
    """

    names: list[str]
    places: dict[str, tuple[int | None, list[tuple[int, Head]]]]

    @classmethod
    def of(cls, workspace: Workspace, by: str | None) -> Parts:
        """No parts, unless these are of layers or heads."""
        parts = cls([], {})
        model = next(iter(workspace.passes.values())).model
        for layer in workspace.layers if by in (BY_LAYER, BY_HEAD) else []:
            its_heads = heads(model, layer) if by == BY_HEAD else []
            numbered = [(len(parts.names) + k, head) for k, head in enumerate(its_heads)]
            parts.names.extend(f"{layer.name}, head {head.number}" for head in its_heads)
            whole = None
            # heads in rows are all of a layer; those in columns leave its bias
            if not its_heads or (its_heads[0].columns and layer.bias):
                whole = len(parts.names)
                parts.names.append(layer.name)
            parts.places.update({block.name: (whole, numbered) for block in layer.blocks})
        return parts

    @property
    def cut(self) -> list[str]:
        """The blocks that are cut into heads."""
        return [name for name, (_, its_heads) in self.places.items() if its_heads]


@dataclass
class Scoring:
    """Computes one run's scores, and passes them to a writer."""

    workspace: Workspace
    terms: list[Term]
    vectors: VectorsOf
    writer: ScoreWriter
    by: str | None  # whose parts of the scores are kept
    signal: Signal = LOSS
    weights: Mapping[str, Tensor] | None = None  # of the examples of each stage, (n,)
    shared: bool = False  # whether the vectors of all terms are the same
    factored: bool = False  # whether they are plain gradients
    joint: bool = False  # whether they are of all layers together

    def queries(self, query: QuerySet) -> None:
        """Every query against every example."""
        workspace, stage = self.workspace, self.workspace.study.stages[-1]
        world, examples = workspace.world, workspace.examples
        chosen = None if query.rank is None else self._plan(query, query.rank)
        shown = workspace.progress
        with self._bar(len(query) * examples) if shown else nullcontext() as bar:
            for rows in cut(len(query), self._at_once() if chosen is None else chosen.rows):
                where = slice(int(rows[0]), int(rows[-1]) + 1)
                fits = chosen is not None or self._fits(len(rows))
                size = self._chunk(0 if fits else len(rows))
                columns = workspace.columns(size, workspace.batch_size)
                todo = [c for c in columns if not self.writer.done(where, c.place)]
                block = query.some(stage, rows)
                ready = None
                if chosen is not None and todo:
                    ready = self._factored(query, stage, rows, chosen)
                elif fits and todo:
                    ready = list(self._ready(block, examples))
                if bar is not None:
                    bar.update(len(rows) * (examples - sum(len(c.indices) for c in todo)))
                for chunk, mine in world.rounds(todo):
                    vectors = ready or self._ready(block, len(chunk.indices))
                    if mine:
                        self._write(where, chunk, self._contributions(vectors, chunk, len(rows)))
                    elif ready is None:
                        _exhaust(vectors)
                    if bar is not None:
                        bar.update(len(rows) * len(chunk.indices) * world.size)

    @staticmethod
    def _bar(total: int) -> Any:
        return progress_bar(total=total, desc="scores", unit="score", unit_scale=True, shown=True)

    def selves(self) -> None:
        """Every example against itself."""
        workspace, world = self.workspace, self.workspace.world
        todo: dict[str, list[Columns]] = {stage: [] for stage in workspace.stages}
        for chunk in workspace.columns(self._at_once(), workspace.batch_size):
            if not self.writer.done(None, chunk.place):
                todo[chunk.stage].append(chunk)
        if workspace.in_step:  # all ranks solve all chunks, and each takes the products of some
            rounds = [(c, c in world.mine(part)) for part in todo.values() for c in part]
        else:  # a round is of one stage, whose layers all ranks then ask for
            rounds = [chunks for part in todo.values() for chunks in world.rounds(part)]
        for chunk, mine in progress_bar(rounds, desc="self-influence", shown=workspace.progress):
            examples = Queries(workspace.scored_data(chunk.stage), chunk.stage, chunk.indices)
            ready = self._ready(examples, len(chunk.indices), dealt=False)
            if mine:
                self._write(None, chunk, self._contributions(ready, chunk, None))
            else:
                _exhaust(ready)

    def _plan(self, query: QuerySet, rank: int | str) -> Plan | None:
        """How to take the queries in factors, if they do not fit as they are. An interrupted call's
        rank is taken again."""
        account, workspace = self.writer.account, self.workspace
        known = workspace.world.of_first(account.get("query_rank"))
        rank = rank if known is None else known
        blocks, size = workspace.tracked.blocks, workspace.accumulator.itemsize
        terms = 1 if self.shared else len(self.terms)
        chosen = plan(blocks, size, workspace.memory, len(query), rank, terms, self.joint)
        if chosen is not None:
            account["query_rank"] = chosen.rank
        return chosen

    def _factored(
        self, query: QuerySet, stage: str, rows: NDArray[np.int64], plan: Plan
    ) -> list[tuple[int, Any]]:
        """The vectors of these queries for each term, in factors."""
        world, parts = self.workspace.world, dict[tuple[int, ...], list[Readouts]]()
        for block in cut(len(rows), plan.whole * (world.size if self._dealt else 1)):
            queries = query.some(stage, rows[block])
            energies: dict[tuple[int, ...], Energy] = {}
            for part in self._share(queries).by_group(plan.groups):
                for terms, vectors, scale in self.vectors(part):
                    ready, energy = low_rank(self.workspace, vectors, scale, plan.rank)
                    if self._dealt:  # only the factors travel
                        gather = partial(world.regather, count=len(queries))
                        ready = {name: readout.mapped(gather) for name, readout in ready.items()}
                        energy = energy.mapped(gather)
                    if tuple(terms) not in energies:
                        energies[tuple(terms)] = Energy()
                        parts.setdefault(tuple(terms), []).append({})
                    energies[tuple(terms)].add(energy)
                    parts[tuple(terms)][-1].update(ready)
            for terms, energy in energies.items():
                label = f"{queries.label}, term {terms[0]}"
                lost = energy.lost().cpu().numpy()
                self.workspace.ledger.note_lost_energy(label, plan.rank, lost, energy.by_layer())
        complete = [(terms, joined_readouts(parts.pop(terms))) for terms in list(parts)]
        return [(k, ready) for terms, ready in complete for k in terms]

    def _vectors(self, queries: Queries, dealt: bool) -> Iterator[tuple[Sequence[int], Any, float]]:
        """The vectors of these queries, one group of blocks after another."""
        dealt = dealt and self._dealt
        gather = partial(self.workspace.world.regather, count=len(queries))
        mine = self._share(queries) if dealt else queries
        for part in mine.by_group(self._groups(queries.stage)):
            for terms, vectors, scale in self.vectors(part):
                yield terms, vectors.mapped(gather) if dealt else vectors, scale

    def _groups(self, stage: str) -> list[list[str]]:
        """The blocks in which queries of a stage have gradients, in groups that take turns."""
        workspace = self.workspace
        tracked, size = workspace.passes[stage].tracked, workspace.accumulator.itemsize
        forms = self.factored, self.joint
        groups = cost.vector_groups(tracked, size, workspace.memory, *forms)
        return [[block.name for block in group] for group in groups]

    @property
    def _dealt(self) -> bool:
        """Whether each rank computes the vectors of a share of the queries."""
        return self.workspace.world.size > 1 and not self.workspace.in_step

    def _share(self, queries: Queries) -> Queries:
        """This rank's share of these queries."""
        if not self._dealt:
            return queries
        return queries.share(self.workspace.world.deal(np.arange(len(queries))))

    def _ready(
        self, queries: Queries, examples: int, dealt: bool = True
    ) -> Iterator[tuple[int, Any]]:
        """The vectors of these queries for each term, ready to meet this many examples.

        Args:
            dealt: whether each rank computes those of its share of the queries.
        """
        for terms, vectors, scale in self._vectors(queries, dealt):
            ready = self.readouts(vectors, scale, examples)
            yield from ((k, ready) for k in terms)
            del ready  # before the next ones are computed

    def readouts(self, vectors: Any, scale: float, examples: int) -> Any:
        """The vectors, times `scale`, ready to meet this many examples."""
        return readouts(self.workspace, vectors, scale, examples, self._parts.cut)

    def _contributions(
        self, ready: Iterable[tuple[int, Any]], chunk: Columns, queries: int | None
    ) -> Tensor:
        """Each term's part of the scores: (terms, q, n), or (terms, n) for selves. If the parts of
        layers are kept, they follow."""
        shape = [
            len(self.terms) + len(self._parts.names),
            *([] if queries is None else [queries]),
            len(chunk.indices),
        ]
        totals = torch.zeros(shape, dtype=self.workspace.accumulator, device=self.workspace.device)
        data = self.workspace.scored_data(chunk.stage)
        batches = [chunk.indices[b] for b in cut(len(chunk.indices), self.workspace.batch_size)]
        for k, readouts in ready:
            if not readouts:  # the vectors reach none of these layers
                continue
            term, total = self.terms[k], totals[k]
            needed = list(readouts) if len(self._groups(chunk.stage)) > 1 else None
            gradients = self._gradients(term, chunk.stage, data, batches, needed)
            for columns, name, a, s in gradients:
                if name not in readouts:  # the vectors do not reach this layer
                    continue
                if self._parts.names:
                    part = torch.zeros_like(total[..., columns])
                    self._add(part, readouts[name], a, s, columns)
                    total[..., columns] += part
                    parts = totals[len(self.terms) :]
                    self._add_parts(parts, part, name, readouts[name], a, s, columns)
                else:
                    self._add(total[..., columns], readouts[name], a, s, columns)
            del readouts  # before the next ones are computed
        if self.weights is not None:
            totals *= self.weights[chunk.stage][torch.from_numpy(chunk.indices)].to(totals)
        return totals

    @staticmethod
    def _add(total: Tensor, readout: Any, a: Tensor, s: Outputs, columns: slice) -> None:
        """Inner products of all queries with these examples, (q, n), or of each with its own."""
        if total.dim() == 1:
            total += readout.paired(a, s, columns)
        else:
            readout.add_inner(total, a, s)

    def _add_parts(
        self,
        totals: Tensor,
        part: Tensor,
        name: str,
        readout: Any,
        a: Tensor,
        s: Any,
        columns: slice,
    ) -> None:
        """Add a block's part of the scores to those of its heads, and the rest to its layer's."""
        whole, its_heads = self._parts.places[name]
        rest = part
        for number, head in its_heads:
            inner = torch.zeros_like(part)
            if head.columns:
                self._add(inner, readout.of_columns(head.take), head.take(a, 2), s, columns)
            else:
                self._add(inner, readout.of_rows(head.take), a, head.take(s, 2), columns)
            totals[number][..., columns] += inner
            rest = rest - inner
        if whole is not None:
            totals[whole][..., columns] += rest

    @cached_property
    def _parts(self) -> Parts:
        return Parts.of(self.workspace, self.by)

    def _gradients(
        self,
        term: Term,
        stage: str,
        data: Batches,
        batches: list[NDArray[np.int64]],
        needed: Collection[str] | None,
    ) -> Iterator[tuple[slice, str, Tensor, Outputs]]:
        """(columns, layer, a, s) of a term's gradients, in these layers at least (None: all).

        Where examples are single positions, a term's checkpoints are given as positions of one
        gradient, so that their sum meets the queries once and not once for each.
        """
        passes, checkpoints = self.workspace.passes[stage], term.checkpoints
        single = all(t == 1 for t in self.workspace.positions.values())
        if term.stage != stage:
            return
        if not single or len(checkpoints) == 1:
            for checkpoint in checkpoints:
                passes.load(checkpoint)
                start = 0
                for backward in passes.backward_passes(data, batches, self.signal, needed=needed):
                    columns = slice(start, start + len(backward.indices))
                    for factors in backward.factors():
                        yield columns, factors.block.name, factors.a, factors.s
                    start = columns.stop
            return
        start = 0
        for batch in batches:
            by_block: dict[str, list[LayerFactors]] = {}
            for checkpoint in checkpoints:
                passes.load(checkpoint)
                one_batch = data, [batch], self.signal
                for backward in passes.backward_passes(*one_batch, needed=needed):
                    for factors in backward.factors():
                        by_block.setdefault(factors.block.name, []).append(factors)
            columns = slice(start, start + len(batch))
            for name, of_checkpoints in by_block.items():
                a = joined([factors.a for factors in of_checkpoints])
                yield columns, name, a, joined([factors.s for factors in of_checkpoints])
            start = columns.stop

    def _write(self, rows: slice | None, chunk: Columns, contributions: Tensor) -> None:
        terms = len(self.terms)
        contributions, layers = contributions[:terms], contributions[terms:]
        self._note_sizes(contributions, self.writer.missing(rows, chunk.place))
        values = contributions[0] if len(contributions) == 1 else contributions.sum(0)
        parts = {BY_SEGMENT: contributions}.get(self.by or "", layers if len(layers) else None)
        stored = None if parts is None else parts.cpu().numpy()
        self.writer.write(rows, chunk.place, values.cpu().numpy(), stored)

    def _note_sizes(
        self, contributions: Tensor, new: Sequence[tuple[slice, slice]] = WHOLE
    ) -> None:
        """Add to the account how large each term's part of the scores is, in the parts of a block
        that are new: an interrupted call may have written some of them."""
        tiles = contributions.unsqueeze(1) if contributions.dim() == 2 else contributions
        for rows, columns in new:
            sizes = [torch.linalg.vector_norm(term[rows, columns], 1) for term in tiles]
            before = self.writer.account.get("magnitudes", [0.0] * len(self.terms))
            added = torch.stack(sizes).tolist()
            self.writer.account["magnitudes"] = [x + y for x, y in zip(before, added, strict=True)]

    def _chunk(self, queries: int) -> int:
        """How many examples are scored between two notes of progress: whole batches.

        Args:
            queries: whose vectors are computed for each chunk; 0 if they are kept.
        """
        batch, size = self.workspace.batch_size, self.workspace.accumulator.itemsize
        scores = (len(self.terms) + len(self._parts.names)) * max(1, queries) * size
        room = self.workspace.memory // 8 // scores
        return max(CHUNK, 4 * batch, min(EXAMPLES_PER_QUERY * queries, room)) // batch * batch

    def _at_once(self) -> int:
        """How many queries' vectors fit: one term's, and two sets on the way to the next, of one
        group of blocks."""
        workspace = self.workspace
        sizes = {block.name: block.size for block in workspace.tracked.blocks}
        groups = self._groups(workspace.study.stages[-1])
        largest = max(sum(sizes[name] for name in group) for group in groups)
        size, memory = workspace.accumulator.itemsize, workspace.memory
        return max(1, cost.queries_at_once(largest, size, memory, 1))

    def _fits(self, queries: int) -> bool:
        """Whether the vectors of all terms fit, of that many queries."""
        return self._fitting(1 if self.shared else len(self.terms)) >= queries

    def _fitting(self, sets: int) -> int:
        """How many queries' vectors fit, with this many sets of them."""
        workspace = self.workspace
        numbers, size = cost.vector_numbers(workspace.tracked), workspace.accumulator.itemsize
        return cost.queries_at_once(numbers, size, workspace.memory, sets)


def _exhaust(vectors: Iterable[Any]) -> None:
    """Take part in the exchanges that vectors need, where only other ranks use them."""
    for _ in vectors:
        pass


def readouts(
    workspace: Workspace, vectors: Any, scale: float, examples: int, plain: Collection[str] = ()
) -> Readouts:
    """The vectors, times `scale`, in whichever basis makes the inner products with this many
    examples cheapest; of the blocks `plain`, in the parameters'. Their memory is reused."""
    if isinstance(vectors, PlainGradients):
        return {k: vectors.readouts.pop(k).scaled(scale) for k in list(vectors.readouts)}
    ready: Readouts = {}
    for name in list(vectors.values):
        value, basis = vectors.values.pop(name), vectors.bases[name]
        block, t = workspace.blocks[name], workspace.positions[name]
        if basis is not None and (
            name in plain
            or cost.rotate_queries(block, len(value)) < cost.rotate_examples(block, t, examples)
        ):
            value, basis = rotate(value, basis, None), None
        value = value.mul_(scale * vectors.scale(name))
        ready[name] = Readout.of(value, basis, block.bias, workspace.dtype)
    return ready
