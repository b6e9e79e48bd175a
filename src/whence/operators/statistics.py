"""Statistics of the data at a checkpoint: sums over all examples, in one cached, resumable pass.

`Covariances`       A = Σ_{n,t} a aᵀ / N        S = Σ_{n,t} s sᵀ / Σ_n t_n
`SecondMoments`     Λ = Σ_n (Q_Sᵀ G_n Q_A)² / N
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whence.data import Batches, cut
from whence.layers.capture import LayerFactors
from whence.layers.kind import ParameterBlock
from whence.layers.passes import BackwardPass, Passes, Signal, Weights
from whence.operators import products
from whence.operators.operator import Basis
from whence.persist.cache import FactorCache
from whence.persist.identity import key_of
from whence.world import Owner, World, everyone

Tensors = dict[str, Tensor]  # by names such as "<block>/A"


@dataclass(frozen=True)
class FitData:
    """Data that a curvature is fitted on, and the passes (model, task, layers) it goes through.

    Args:
        indices: the examples the run really used.
        identity: what makes two fits the same besides weights and settings (data, task, model,
            layers).
        losses: the digest of the losses of all examples at given weights.
        world: whose ranks the examples are dealt to.
    """

    passes: Passes
    data: Batches
    indices: NDArray[np.int64]
    identity: Mapping[str, Any]
    losses: Callable[[Weights], str]
    world: World = field(default_factory=World)

    def batches(self, size: int) -> list[NDArray[np.int64]]:
        """This rank's examples."""
        share = self.indices[self.world.rank :: self.world.size]
        return [share[b] for b in cut(len(share), size)]

    def backward_passes(
        self, signal: Signal, batch_size: int, label: str | None = None
    ) -> Iterator[BackwardPass]:
        """Over this rank's share of the data, with the weights that are loaded."""
        return self.passes.backward_passes(self.data, self.batches(batch_size), signal, label)


class Statistic(ABC):
    """What is summed over the examples."""

    work: ClassVar[str]  # the name of the pass, in `Factored.passes` and for people

    @property
    def divided(self) -> bool:
        """Whether ranks add each batch together, and each has the totals of its own blocks only."""
        return False

    @abstractmethod
    def zeros(self) -> Tensors:
        """The totals of no examples."""

    @abstractmethod
    def add(
        self, totals: Tensors, part: FitData, batches: list[NDArray[np.int64]], label: str
    ) -> Iterator[int | None]:
        """Add these batches. Yields how many are complete, or None inside a batch."""

    @abstractmethod
    def finish(self, totals: Tensors) -> Tensors:
        """The statistic from the totals of all examples, of which some may be elsewhere. They are
        used up."""


def measure(
    statistic: Statistic,
    data: Sequence[FitData],
    checkpoint: Weights,
    cache: FactorCache,
    settings: Mapping[str, Any],
    batch_size: int,
    owner: Owner = everyone,
) -> Tensors:
    """A statistic over all parts of the data: cached, from a snapshot on, or from scratch.

    Args:
        settings: all that it depends on, the key of the cache.
        owner: the rank that gets a total, by its name.
    """
    key, passes, world = key_of(settings), data[0].passes, data[0].world
    values = cache.get(key)
    if values is not None:
        return values
    with passes.clock(statistic.work):
        totals, done = statistic.zeros(), 0  # batches
        divided, snapshot = statistic.divided, cache.snapshot(key)
        if snapshot is not None and snapshot[1].get("divided", False) != divided:
            snapshot = None
        if divided and len({*map(str, world.values(snapshot and snapshot[1]))}) > 1:
            snapshot = None  # not of the same moment in all ranks
        if snapshot is not None:
            totals = {name: total.to(passes.device) for name, total in snapshot[0].items()}
            done, batch_size = snapshot[1]["done"], snapshot[1]["batch_size"]
        skip, label = done, f"{statistic.work}, step {checkpoint.step}"
        for part in data:
            batches, before = part.batches(batch_size), done
            batches, skip = batches[skip:], max(0, skip - len(batches))
            part.passes.load(checkpoint)
            for complete in statistic.add(totals, part, batches, label):
                if complete is not None:
                    done = before + complete
                    position = {"done": done, "batch_size": batch_size, "divided": divided}
                    cache.offer_snapshot(key, totals, position)
        values = statistic.finish(totals if divided else world.total(totals, owner))
        cache.put(key, values, settings)
    return values


@dataclass(frozen=True)
class Owners:
    """The rank that owns each block, and alone has its totals."""

    world: World
    ranks: Mapping[str, int]

    def mine(self, block: ParameterBlock) -> bool:
        return self.ranks[block.name] == self.world.rank


@dataclass(frozen=True)
class LayerStatistic(Statistic):
    """A sum over the layer factors of some blocks."""

    blocks: Sequence[ParameterBlock]
    signal: Signal
    examples: int  # N
    like: Tensor  # on the device and with the dtype of the totals
    owners: Owners | None  # None: every rank has totals of all blocks

    @property
    def divided(self) -> bool:
        return self.owners is not None

    @abstractmethod
    def shapes(self, block: ParameterBlock) -> dict[str, tuple[int, ...]]:
        """Shapes of the totals of a block."""

    @abstractmethod
    def add_layer(self, totals: Tensors, factors: LayerFactors, first: bool) -> None:
        """Add one block of a batch; `first` in the first of the batch's backward passes."""

    def at(self, block: ParameterBlock) -> LayerStatistic:
        """The same, with what `add_layer` needs for a block, from its owner."""
        return self

    def zeros(self) -> Tensors:
        blocks = [b for b in self.blocks if self.owners is None or self.owners.mine(b)]
        named = {f"{b.name}/{k}": x for b in blocks for k, x in self.shapes(b).items()}
        return {name: self.like.new_zeros(shape) for name, shape in named.items()}

    def add(
        self, totals: Tensors, part: FitData, batches: list[NDArray[np.int64]], label: str
    ) -> Iterator[int | None]:
        passes = part.passes.backward_passes(part.data, batches, self.signal, label)
        if self.owners is not None:
            yield from self._add_together(self.owners, totals, part, passes, len(batches))
            return
        done = 0
        for backward in passes:
            for factors in self._factors(backward):
                self.add_layer(totals, factors, backward.first)
            done += backward.last
            yield done if backward.last else None

    def _factors(self, backward: BackwardPass) -> Iterator[LayerFactors]:
        names = {b.name for b in self.blocks}
        return (factors for factors in backward.factors() if factors.block.name in names)

    def _add_together(
        self,
        owners: Owners,
        totals: Tensors,
        part: FitData,
        passes: Iterator[BackwardPass],
        batches: int,
    ) -> Iterator[int]:
        """Every rank's next batch, block by block, to the totals of the block's owner."""
        world, names = owners.world, {b.name for b in self.blocks}
        blocks = [b for b in part.passes.tracked.blocks if b.name in names]
        for done in range(1, max(world.values(batches)) + 1):
            left = done <= batches  # whether this rank has a pass of the batch to make
            while world.either(left):
                backward, failure = None, None
                factors: Iterator[LayerFactors] = iter(())
                for block in blocks:
                    flat, sums = self._empty(block)
                    ready = self.at(block)
                    try:
                        if left and backward is None:
                            backward = next(passes)
                            factors = self._factors(backward)
                        if backward is not None:
                            ready.add_layer(sums, next(factors), backward.first)
                    except Exception as error:  # raised when the other ranks can notice
                        left, backward, failure = False, None, failure or error
                    added = world.add_at(owners.ranks[block.name], flat)
                    if owners.mine(block):
                        for name, value in self._named(block, added).items():
                            totals[name] += value
                if failure is not None:
                    raise failure
                for _ in factors:  # which checks that all were finite
                    pass
                left = backward is not None and not backward.last
            yield done

    def _empty(self, block: ParameterBlock) -> tuple[Tensor, Tensors]:
        """Zeros for the totals of a block, as one vector and by name."""
        flat = self.like.new_zeros(sum(math.prod(x) for x in self.shapes(block).values()))
        return flat, self._named(block, flat)

    def _named(self, block: ParameterBlock, flat: Tensor) -> Tensors:
        shapes = self.shapes(block)
        parts = torch.split(flat, [math.prod(x) for x in shapes.values()])
        named = zip(shapes.items(), parts, strict=True)
        return {f"{block.name}/{key}": part.view(shape) for (key, shape), part in named}


@dataclass(frozen=True)
class Covariances(LayerStatistic):
    """ "<block>/A" = Σ a aᵀ / N and "<block>/S" = Σ s sᵀ / Σ t.

    In the blocks `whole`, R = Σ_n G_nᵀ G_n / N and L = Σ_n G_n G_nᵀ / N (Shampoo) in their place.
    A weight that is both matrix and table has no `a` of one meaning: it always has R, and L / tr L,
    so that K-FAC's product has the right trace.
    """

    whole: Sequence[str]

    work = "covariances"

    def shapes(self, block: ParameterBlock) -> dict[str, tuple[int, ...]]:
        S = (block.o,) if block.rows else (block.o, block.o)  # of rows, its diagonal
        return {"A": (block.width, block.width), "S": S, "positions": ()}

    def add_layer(self, totals: Tensors, factors: LayerFactors, first: bool) -> None:
        block, name = factors.block, factors.block.name
        A, S, positions = (totals[f"{name}/{key}"] for key in ("A", "S", "positions"))
        if name in self.whole or block.tied:
            products.add_whole_grams(S, A, factors.a, factors.s, block.bias)
            positions += len(factors.s) if first else 0
            return
        # of a lookup, `s` is the input; inputs are the same in all backward passes of a batch
        count = 0.0
        if first or not block.lookup:
            count = products.add_output_covariance(S, factors.s, factors.mask)
        if first or block.lookup:
            products.add_input_covariance(A, factors)
        positions += count if first else 0.0

    def finish(self, totals: Tensors) -> Tensors:
        covariances = {}
        for b in [b for b in self.blocks if f"{b.name}/A" in totals]:
            A, S = (totals.pop(f"{b.name}/{key}") for key in "AS")  # frees memory
            S = S if b.rows else products.mirror(S)
            covariances[f"{b.name}/A"] = products.mirror(A) / self.examples
            scale = S.sum() if b.tied else totals[f"{b.name}/positions"]
            covariances[f"{b.name}/S"] = S / scale
        return covariances


@dataclass(frozen=True)
class SecondMoments(LayerStatistic):
    """ "<block>/eigenvalues" = Σ_n (Q_Sᵀ G_n Q_A)² / N, if there are bases, and, if it is asked
    for, "<block>/diagonal": the same in the parameters' own coordinates."""

    bases: Mapping[str, Basis | None]
    diagonal: bool
    gather: Callable[[ParameterBlock], Basis | None] | None = None  # instead of `bases`

    work = "eigenvalues"

    def at(self, block: ParameterBlock) -> SecondMoments:
        if self.gather is None:
            return self
        return replace(self, bases={block.name: self.gather(block)})

    def shapes(self, block: ParameterBlock) -> dict[str, tuple[int, ...]]:
        rotated = bool(self.bases) or self.gather is not None
        wanted = ["eigenvalues"] * rotated + ["diagonal"] * self.diagonal
        return dict.fromkeys(wanted, block.shape)

    def add_layer(self, totals: Tensors, factors: LayerFactors, first: bool) -> None:
        name, bias, a, s = factors.block.name, factors.block.bias, factors.a, factors.s
        if self.bases:
            products.add_squares(totals[f"{name}/eigenvalues"], a, s, self.bases[name], bias)
        if self.diagonal:
            products.add_squares(totals[f"{name}/diagonal"], a, s, None, bias)

    def finish(self, totals: Tensors) -> Tensors:
        return {name: totals.pop(name) / self.examples for name in list(totals)}
