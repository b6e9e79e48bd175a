"""What is explained: the examples of a dataset, or weighted sums of them; and their gradients."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from whence.data import Batches, Contrast, cut
from whence.errors import InvalidInput, check_count
from whence.layers.capture import LayerFactors
from whence.layers.kind import ParameterBlock
from whence.layers.passes import Passes, Signal, Weights
from whence.operators import Basis, BlockVectors, accumulator
from whence.operators.products import FactoredReadout, Readout, add_weighted, build
from whence.persist.identity import key_of, sha256_of
from whence.study import Study

AUTO = "auto"

Readouts = dict[str, Readout | FactoredReadout]


@dataclass(frozen=True)
class QuerySet:
    """All queries of a calculation; each is one row of the scores.

    Attributes:
        data: the examples whose measurements are taken.
        weights: (q, examples): a query is the sum of the examples' measurements, times these. None:
            every example is a query.
        rank: of the query vectors' factors in each layer; "auto" for the largest that fits into
            memory; None for whole vectors.
    """

    data: Batches
    weights: NDArray[np.float64] | None = None
    rank: int | str | None = None

    @classmethod
    def of(
        cls, study: Study, query: Any, weights: ArrayLike | None = None, rank: Any = None
    ) -> QuerySet | None:
        """The queries that a caller asked for; None is self-influence."""
        for name, value in (("query_weights", weights), ("query_rank", rank)):
            if query is None and value is not None:
                raise InvalidInput(
                    f"{name} without query: self-influence has no queries. Give query=, or leave "
                    f"{name} out"
                )
        if rank is not None and rank != AUTO:
            check_count("query_rank", rank, ", or 'auto'")
        if query is None:
            return None
        if isinstance(query, QuerySet):
            return query
        if isinstance(query, Contrast):
            ones = np.eye(len(query))
            queries = cls(study.query(query.examples), np.concatenate([ones, -ones], 1), rank)
        else:
            queries = cls(study.query(query), None, rank)
        return queries if weights is None else queries._weighted(weights)

    def _weighted(self, given: ArrayLike) -> QuerySet:
        try:
            weights = np.atleast_2d(np.asarray(given, dtype=np.float64))
        except (TypeError, ValueError, RuntimeError):  # also a tensor that requires gradients
            raise InvalidInput(
                "query_weights must be numbers, (queries,) or (k, queries)"
            ) from None
        if weights.ndim != 2 or weights.shape[1] != len(self) or not len(weights):
            raise InvalidInput(
                f"query_weights has the shape {np.shape(given)}, but there are {len(self)} "
                f"queries: give one weight for each, ({len(self)},), or several rows of them"
            )
        wrong = np.flatnonzero(~(np.isfinite(weights).all(1) & weights.any(1)))
        if len(wrong):
            raise InvalidInput(
                f"query_weights[{wrong[0]}] has only zeros, or numbers that are not finite: every "
                "row must be a sum of some queries"
            )
        return replace(self, weights=weights if self.weights is None else weights @ self.weights)

    def __len__(self) -> int:
        return len(self.data if self.weights is None else self.weights)

    def fingerprint(self) -> str:
        """A digest of the examples, and of their weights if there are any."""
        data = self.data.fingerprint()
        if self.weights is None:
            return data
        return sha256_of(data, str(self.weights.shape), self.weights)

    def identity(self) -> str:
        """A digest of everything in the queries that scores depend on."""
        examples = self.fingerprint()
        if self.rank is None:
            return examples
        return key_of({"query": examples, "rank": self.rank})

    def settings(self) -> dict[str, Any]:
        """What is stored with the scores."""
        shape = {} if self.weights is None else {"query_weights": list(self.weights.shape)}
        return shape | ({} if self.rank is None else {"query_rank": self.rank})

    def some(self, stage: str, rows: NDArray[np.int64]) -> Queries:
        """The queries of these rows, measured in this stage."""
        if self.weights is None:
            return Queries(self.data, stage, rows)
        weights = self.weights[rows]
        used = np.flatnonzero(weights.any(0))
        return Queries(self.data, stage, used, torch.from_numpy(weights[:, used]), int(rows[0]))


@dataclass(frozen=True)
class PlainGradients:
    """Query gradients as they are, factored where an example is one position."""

    readouts: Readouts

    def times(self, factors: Mapping[str, float | Tensor]) -> PlainGradients:
        scaled: Readouts = {}
        for name in [name for name in self.readouts if name in factors]:
            scaled[name] = self.readouts.pop(name).scaled(float(factors[name]))  # frees memory
        return PlainGradients(scaled)


@dataclass(frozen=True)
class Queries:
    """Some examples whose measurements, or sums of them, are explained.

    Attributes:
        indices: the examples, in the data.
        weights: (q, examples); None: every example is a query.
        first: the number of the first sum.
        blocks: whose gradients are taken; None: all that are tracked.
        more: whether the same queries follow with other blocks.
    """

    data: Batches
    stage: str
    indices: NDArray[np.int64]
    weights: Tensor | None = None
    first: int | None = None
    blocks: Collection[str] | None = None
    more: bool = False

    def __len__(self) -> int:
        return len(self.indices if self.weights is None else self.weights)

    @property
    def label(self) -> str:
        return f"{self.stage} {self.indices[0] if self.first is None else self.first}"

    def share(self, rows: NDArray[np.int64]) -> Queries:
        """Some of these queries, by their positions."""
        if self.weights is None:
            return replace(self, indices=self.indices[rows])
        weights = self.weights[torch.from_numpy(rows)]
        used = weights.any(0)
        first = None if self.first is None else self.first + int(rows[0])
        indices = self.indices[used.numpy()]
        return replace(self, indices=indices, weights=weights[:, used], first=first)

    def by_group(self, groups: Sequence[Collection[str]]) -> Iterator[Queries]:
        """These queries with one group of blocks after another."""
        for k, blocks in enumerate(groups, 1):
            yield replace(self, blocks=blocks, more=k < len(groups))

    def blocks_in(self, passes: Passes) -> dict[str, ParameterBlock]:
        """The blocks whose gradients are taken."""
        every = passes.tracked.blocks
        return {b.name: b for b in every if self.blocks is None or b.name in self.blocks}

    def batches(self, size: int) -> list[NDArray[np.int64]]:
        return [self.indices[b] for b in cut(len(self.indices), size)]

    def summed(self, rows: Iterable[Tensor]) -> Tensor:
        """The examples' rows (examples, d), in pieces, as rows of the queries, (q, d)."""
        if self.weights is None:
            return torch.cat(list(rows))
        total, start = torch.zeros(()), 0
        for piece in rows:
            weights = self.weights[:, start : start + len(piece)].to(piece)
            total, start = total.to(piece) + weights @ piece, start + len(piece)
        return total

    def gradients(
        self,
        passes: Passes,
        checkpoints: Sequence[Weights],
        bases: Mapping[str, Basis | None],
        batch_size: int,
    ) -> BlockVectors:
        """The mean over checkpoints of ∇f(q, θ_c), each block built in its basis."""
        if self.weights is not None:
            sums = self._summed_gradients(passes, checkpoints, batch_size)
            scales = dict.fromkeys(sums, 1 / len(checkpoints))
            return BlockVectors(sums, dict.fromkeys(sums), scales).written_in(bases)
        dtype = accumulator(passes.dtype)
        values = {
            name: torch.empty(len(self), *block.shape, dtype=dtype, device=passes.device)
            for name, block in self.blocks_in(passes).items()
        }
        for k, checkpoint in enumerate(checkpoints):
            for rows, factors in self._measured(passes, checkpoint, batch_size):
                name, bias = factors.block.name, factors.block.bias
                a, s = factors.a.to(dtype), factors.s.to(dtype)
                gradient = build(a, s, bases.get(name), bias)
                if k == 0:
                    values[name][rows] = gradient
                else:
                    values[name][rows] += gradient
        scales = dict.fromkeys(values, 1.0 / len(checkpoints))
        return BlockVectors(values, {name: bases.get(name) for name in values}, scales)

    def plain_gradients(
        self, passes: Passes, checkpoint: Weights, batch_size: int
    ) -> PlainGradients:
        """∇f(q, θ_c) as it is, factored where an example is one position."""
        biases = {name: block.bias for name, block in self.blocks_in(passes).items()}
        if self.weights is not None:
            sums = self._summed_gradients(passes, [checkpoint], batch_size).items()
            return PlainGradients(
                {name: Readout.of(v, None, biases[name], passes.dtype) for name, v in sums}
            )
        parts: dict[str, list[tuple[Tensor, Tensor | None]]] = {name: [] for name in biases}
        for _, factors in self._measured(passes, checkpoint, batch_size):
            if factors.a.shape[1] == 1 and isinstance(factors.s, Tensor):
                parts[factors.block.name].append((factors.a, factors.s))
            else:
                whole = build(factors.a, factors.s, None, factors.block.bias)
                parts[factors.block.name].append((whole, None))
        readouts: Readouts = {}
        for name, pieces in parts.items():
            slopes = [s for _, s in pieces if s is not None]
            if len(slopes) == len(pieces):
                inputs = torch.cat([a for a, _ in pieces])
                readout = FactoredReadout(inputs[:, 0], torch.cat(slopes)[:, 0], biases[name])
                readouts[name] = readout
            else:  # among others, batches of documents of one token
                built = [g if s is None else build(g, s, None, biases[name]) for g, s in pieces]
                readouts[name] = Readout.of(torch.cat(built), None, biases[name], passes.dtype)
        return PlainGradients(readouts)

    def _summed_gradients(
        self, passes: Passes, checkpoints: Sequence[Weights], batch_size: int
    ) -> dict[str, Tensor]:
        """The sum over checkpoints of the weighted sums of gradients, (q, o, width)."""
        assert self.weights is not None
        dtype = accumulator(passes.dtype)
        weights = self.weights.to(passes.device, dtype)
        blocks = self.blocks_in(passes)
        sums = {name: weights.new_zeros(len(self), *b.shape) for name, b in blocks.items()}
        for checkpoint in checkpoints:
            for rows, factors in self._measured(passes, checkpoint, batch_size):
                a, s = factors.a.to(dtype), factors.s.to(dtype)
                add_weighted(sums[factors.block.name], weights[:, rows], a, s, factors.block.bias)
        return sums

    def _measured(
        self, passes: Passes, checkpoint: Weights, batch_size: int
    ) -> Iterator[tuple[slice, LayerFactors]]:
        """(rows, factors) of every batch of examples and block."""
        start, measurement, blocks = 0, Signal("measurement"), self.blocks_in(passes)
        passes.load(checkpoint)
        batches = self.batches(batch_size)
        for backward in passes.backward_passes(self.data, batches, measurement, needed=blocks):
            rows = slice(start, start + len(backward.indices))
            for factors in backward.factors():
                if factors.block.name in blocks:
                    yield rows, factors
            start = rows.stop
