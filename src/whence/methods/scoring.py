"""Inner products of query vectors with training gradients, in blocks that fit, each written once.

values[q, m] = Σ_terms Σ_{c in term} ⟨w_{term,q}, ∇L(m, θ_c)⟩

(or the gradient of another signal, times a weight of each example, where a method says so.)

Queries are taken so many at once as memory allows; for each such block of queries, examples go by
in chunks. A chunk is written when all its checkpoints are added up, so what is written is final.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm.auto import tqdm

from whence.curvature import cost
from whence.curvature.fit import accumulator
from whence.data import Batches, cut
from whence.layers.capture import Pair
from whence.layers.passes import Signal
from whence.methods.bench import LOSS, Bench, Readouts, Term
from whence.scores import ScoreWriter

CHUNK = 1024  # examples

#: the vectors of some queries: (data, stage, indices, examples they will meet) -> one set per term
VectorsOf = Callable[[Batches, str, NDArray[np.int64], int], list[Any]]


@dataclass(frozen=True)
class Columns:
    """A chunk of examples: indices in the dataset of a stage, and columns of the score matrix."""

    stage: str
    indices: NDArray[np.int64]
    place: slice


@dataclass(frozen=True)
class Tokens:
    """One example's score, position by position.

    Attributes:
        values: (q, t): what each position of the example did to each query.
        rest: (q,): what cannot be told apart by position (layers after pooling). A row's values and
            its rest add up to the example's score.
    """

    example: int
    values: NDArray[np.floating]
    rest: NDArray[np.floating]


@dataclass
class Scoring:
    """One run's scores on their way into a writer."""

    bench: Bench
    terms: list[Term]
    vectors: VectorsOf
    writer: ScoreWriter
    by_segment: bool
    signal: Signal = LOSS
    weights: Mapping[str, Tensor] | None = None  # of the examples of each stage, (n,)

    def queries(self, query: Batches) -> None:
        """Every query against every example."""
        bench, stage = self.bench, self.bench.study.stages[-1]
        columns = self._columns(self._chunk())
        examples = columns[-1].place.stop
        bar = tqdm(
            total=len(query) * examples,
            desc="scores",
            unit="score",
            unit_scale=True,
            disable=not bench.any.progress,
            leave=False,
        )
        with bar:
            for rows in cut(len(query), self._at_once()):
                where = slice(int(rows[0]), int(rows[-1]) + 1)
                todo = [c for c in columns if not self.writer.done(where, c.place)]
                ready = self.vectors(query, stage, rows, examples) if todo else []
                bar.update(len(rows) * (examples - sum(len(c.indices) for c in todo)))
                for chunk in todo:
                    self._write(where, chunk, self._contributions(ready, chunk, len(rows)))
                    bar.update(len(rows) * len(chunk.indices))

    def selves(self) -> None:
        """Every example against itself."""
        chunks = self._columns(self._at_once())
        for chunk in tqdm(
            chunks, desc="self-influence", disable=not self.bench.any.progress, leave=False
        ):
            if not self.writer.done(None, chunk.place):
                data, count = self.bench.study.data[chunk.stage], len(chunk.indices)
                ready = self.vectors(data, chunk.stage, chunk.indices, count)
                self._write(None, chunk, self._contributions(ready, chunk, None))

    def _contributions(self, ready: list[Any], chunk: Columns, queries: int | None) -> Tensor:
        """Each term's part of the scores: (terms, q, n), or (terms, n) for selves."""
        shape = [len(self.terms), *([] if queries is None else [queries]), len(chunk.indices)]
        passes = self.bench.any
        totals = torch.zeros(shape, dtype=accumulator(passes.dtype), device=passes.device)
        data = self.bench.study.data[chunk.stage]
        blocks = [chunk.indices[b] for b in cut(len(chunk.indices), self.bench.batch_size)]
        for term, readouts, total in zip(self.terms, ready, totals, strict=True):
            for here, name, a, s in self._positions_of(term, chunk.stage, data, blocks):
                readout = readouts.get(name)
                if readout is None:  # the vectors do not reach this layer
                    continue
                if queries is None:
                    total[here] += readout.paired(a, s, here)
                else:
                    readout.add_inner(total[:, here], a, s)
        if self.weights is not None:
            totals *= self.weights[chunk.stage][torch.from_numpy(chunk.indices)].to(totals)
        return totals

    def _positions_of(
        self, term: Term, stage: str, data: Batches, blocks: list[NDArray[np.int64]]
    ) -> Iterator[tuple[slice, str, Tensor, Tensor]]:
        """(columns, layer, a, s) of all gradients of a term.

        Where examples are single positions, a term's checkpoints are given as positions of one
        gradient, so that their sum meets the queries once and not once for each.
        """
        passes, checkpoints = self.bench.passes[stage], term.checkpoints
        single = all(t == 1 for t in self.bench.positions.values())
        if term.stage != stage:
            return
        if not single or len(checkpoints) == 1:
            for checkpoint in checkpoints:
                passes.load(checkpoint)
                start = 0
                for sweep in passes.sweeps(data, blocks, self.signal):
                    here = slice(start, start + len(sweep.indices))
                    for pair in (pair for _, pairs in sweep.pairs for pair in pairs):
                        yield here, pair.block.name, pair.a, pair.s
                    start = here.stop
            return
        start = 0
        for block in blocks:
            held: dict[str, list[Pair]] = {}
            for checkpoint in checkpoints:
                passes.load(checkpoint)
                for sweep in passes.sweeps(data, [block], self.signal):
                    for pair in (pair for _, pairs in sweep.pairs for pair in pairs):
                        held.setdefault(pair.block.name, []).append(pair)
            here = slice(start, start + len(block))
            for name, pairs in held.items():
                a = torch.cat([pair.a for pair in pairs], 1)
                yield here, name, a, torch.cat([pair.s for pair in pairs], 1)
            start = here.stop

    def _write(self, rows: slice | None, chunk: Columns, contributions: Tensor) -> None:
        sizes = torch.stack([torch.linalg.vector_norm(part, 1) for part in contributions])
        before = self.writer.account.get("magnitudes", [0.0] * len(self.terms))
        self.writer.account["magnitudes"] = [
            x + y for x, y in zip(before, sizes.tolist(), strict=True)
        ]
        values = contributions[0] if len(contributions) == 1 else contributions.sum(0)
        parts = contributions.cpu().numpy() if self.by_segment else None
        self.writer.write(rows, chunk.place, values.cpu().numpy(), parts)

    def _chunk(self) -> int:
        """How many examples are scored between two notes of progress: whole batches."""
        batch = self.bench.batch_size
        return max(CHUNK, 4 * batch) // batch * batch

    def _at_once(self) -> int:
        """How many queries' vectors fit: one for each term, and two on the way."""
        size = (
            cost.vector_numbers(self.bench.any.tracked) * accumulator(self.bench.any.dtype).itemsize
        )
        return int(max(1, self.bench.memory // 2 // ((len(self.terms) + 2) * size)))

    def _columns(self, size: int) -> list[Columns]:
        found, offset = [], 0
        for stage in self.bench.stages:
            count = len(self.bench.study.data[stage])
            for indices in cut(count, size):
                place = slice(offset + int(indices[0]), offset + int(indices[-1]) + 1)
                found.append(Columns(stage, indices, place))
            offset += count
        return found


def by_token(
    bench: Bench, terms: list[Term], ready: list[Readouts], stage: str, example: int
) -> Tokens:
    """What each position of one example of a stage did to each query whose vectors are ready."""
    data, passes = bench.study.data[stage], bench.passes[stage]
    parts: dict[int, Tensor] = {}  # by number of positions: (q, t)
    for term, readouts in zip(terms, ready, strict=True):
        for checkpoint in term.checkpoints if term.stage == stage else ():
            passes.load(checkpoint)
            for sweep in passes.sweeps(data, [np.array([example])], LOSS):
                for pair in (pair for _, pairs in sweep.pairs for pair in pairs):
                    readout = readouts.get(pair.block.name)
                    if readout is None:
                        continue
                    value = readout.by_position(pair.a, pair.s)[:, 0]
                    if value.shape[1] % pair.calls == 0:  # the same positions, in several calls
                        value = value.reshape(len(value), pair.calls, -1).sum(1)
                    t = value.shape[1]
                    parts[t] = parts[t] + value if t in parts else value
    # the longest axis is the tokens'; layers without it (a pooled head) are the rest
    length = max(parts)
    rest = torch.zeros_like(parts[length][:, 0])
    for t, part in parts.items():
        rest = rest if t == length else rest + part.sum(1)
    return Tokens(int(example), parts[length].cpu().numpy(), rest.cpu().numpy())
