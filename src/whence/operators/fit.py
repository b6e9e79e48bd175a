"""Fitting curvature layer by layer: covariances → eigenbases → eigenvalues (appendix D.2).

    A_c = Σ_{n,t} a aᵀ / N     S_c = Σ_{n,t} s sᵀ / Σ_n t_n       `Covariances`, at a checkpoint c
    mean_c A_c = Q_A Λ_A Q_Aᵀ  mean_c S_c = Q_S Λ_S Q_Sᵀ          `Fitter.eigenbases`
    Λ = mean_c (1/N) Σ_n (Q_Sᵀ G_n Q_A)²                          `SecondMoments`

`s` and `G` are of pseudo-losses (sampled Fisher), of the Gauss-Newton matrix's columns (exact) or
of the losses (empirical). Each kind of curvature chooses its steps in `Factored.compute`.

A layer's factors are o² + width² numbers, often many times its parameters. Where those of all
layers do not fit on a device, groups of layers are fitted one after another, each with its own
passes over the data, and the result stays on the CPU and is brought to the device layer by layer
(`OffloadedFactors`). The numbers are the same.

Among several ranks, each sums over its share of the examples, and each block is owned by one rank:
it gets the block's sums, decomposes them, and keeps the factors. The other ranks get them when they
are asked for, one block at a time. Where the sums of all blocks do not fit on every rank, no rank
has them: all ranks take a batch each, and exchange what it adds to each block, and its basis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from whence.errors import NotFinite, warn
from whence.layers.kind import ParameterBlock
from whence.layers.passes import Signal, Weights
from whence.layers.tracked import Tracked
from whence.operators import cost
from whence.operators.factored import EigenFactors, Factored, OffloadedFactors
from whence.operators.operator import Basis
from whence.operators.statistics import (
    Covariances,
    FitData,
    Owners,
    SecondMoments,
    Statistic,
    Tensors,
    measure,
)
from whence.persist.cache import FactorCache, shared
from whence.persist.identity import key_of

POSITIONS, BATCH_BYTES = 4096, 2**28  # of a batch, where ranks exchange what each batch adds
FISHERS = ("sampled", "exact", "empirical")


@dataclass
class Fitter:
    """Fits curvatures at any checkpoints, reusing whatever the cache already has.

    Args:
        data: the data; several parts (stages) are pooled.
        room: bytes on the device for factors; None for as many as they need.
        resident: how many fitted curvatures are needed at the same time.
        memory: bytes that Krylov iterations may use.
        notes: where the number of groups of layers is noted, if there are several.
        tallies: where Krylov iterations are noted.

    Attributes:
        examples: N.
        blocks, positions: of all parts; t of every block.
    """

    data: Sequence[FitData]
    cache: FactorCache
    batch_size: int
    fisher: str = "sampled"
    seed: int = 0
    room: int | None = None
    resident: int = 1
    memory: int = 2**30
    notes: dict[str, Any] = field(default_factory=dict)
    tallies: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.passes, self.world = self.data[0].passes, self.data[0].world
        self.device, self.accumulator = self.passes.device, accumulator(self.passes.dtype)
        self._zero = torch.zeros((), device=self.device, dtype=self.accumulator)
        self.signal = Signal("loss" if self.fisher == "empirical" else self.fisher, self.seed)
        self.examples = sum(len(part.indices) for part in self.data)  # N
        tracked = [part.passes.tracked for part in self.data]
        self.blocks = list({b.name: b for layers in tracked for b in layers.blocks}.values())
        self.positions = {name: t for layers in tracked for name, t in layers.positions.items()}

    def fit(
        self, kind: type[Factored], checkpoints: Sequence[Weights], diagonal: bool
    ) -> Mapping[str, EigenFactors]:
        """The factors of a kind of curvature, averaged over these checkpoints."""
        if not kind.passes:  # nothing is measured
            return self._placed(kind, kind.compute(self, checkpoints, diagonal))
        settings = self._factor_settings(kind, checkpoints, diagonal)
        key = key_of(settings)
        factors = self._cache.get(key)
        if factors is None:
            factors = self._with_other_diagonal(kind, checkpoints, diagonal)
        if factors is None:
            factors = kind.compute(self, checkpoints, diagonal)
            self._cache.put(key, factors, settings)
            for checkpoint in checkpoints if _has_bases(kind) else ():  # only for these bases
                squares = self._squares_settings(kind.kind, checkpoint, checkpoints, diagonal)
                self._cache.drop(key_of(squares))
        return self._placed(kind, factors)

    def covariances(self, checkpoint: Weights, whole: Sequence[str] = ()) -> Tensors:
        """ "<block>/A" and "<block>/S" at one checkpoint; R and L in the blocks `whole`."""
        settings = {**self.settings, "what": "covariances", "weights": self._identity(checkpoint)}
        settings |= {"whole": list(whole)} if whole else {}

        def statistic(blocks: Sequence[ParameterBlock]) -> Covariances:
            return Covariances(
                blocks, self.signal, self.examples, self._zero, self._division, whole
            )

        return self._measured(statistic, checkpoint, settings, bases=True)

    def eigenbases(
        self, checkpoints: Sequence[Weights], whole: Sequence[str] = ()
    ) -> tuple[dict[str, Basis | None], dict[str, tuple[Tensor, Tensor]]]:
        """(Q_S, Q_A) and (Λ_S, Λ_A) of each block that this rank owns. On the CPU, if there are
        groups of layers.

        Args:
            whole: blocks whose bases come from whole gradients.
        """
        where, means = self._home(bases=True), dict[str, Tensor]()
        for checkpoint in checkpoints:
            covariances = dict(self.covariances(checkpoint, whole))
            for name in list(covariances):
                value = covariances.pop(name).to(where)
                if len(checkpoints) > 1:
                    value = value.double() / len(checkpoints)
                means[name] = means[name].add_(value) if name in means else value
        bases: dict[str, Basis | None] = {}
        eigenvalues = {}
        with self.passes.clock("eigendecomposition"):
            for b in [b for b in self.blocks if f"{b.name}/S" in means]:
                S, A = (means.pop(f"{b.name}/{key}").to(self.device).double() for key in "SA")
                if not (S.isfinite().all() and A.isfinite().all()):
                    raise NotFinite(
                        f"the covariances of block {b.name} overflow: its inputs or gradients are "
                        "too large to be squared. Scale the inputs, or use dtype=torch.float64"
                    )
                (Λ_S, Q_S) = (S, None) if b.rows else torch.linalg.eigh(S)
                Λ_A, Q_A = torch.linalg.eigh(A)
                eigenvalues[b.name] = Λ_S.to(where).double(), Λ_A.to(where).double()
                # decomposed in a higher precision than they are stored and used in
                basis = Basis(None if Q_S is None else Q_S.contiguous(), Q_A.contiguous())
                bases[b.name] = None if b.diagonal else basis.to(where, self.accumulator)
        return bases, eigenvalues

    def second_moments(
        self,
        kind: str,
        checkpoints: Sequence[Weights],
        bases: Mapping[str, Basis | None] | None,
        diagonal: bool,
    ) -> Tensors:
        """The mean over checkpoints of `SecondMoments`.

        Args:
            kind: of curvature, whose bases they are; "diagonal" for none.
            bases: of the blocks that this rank owns; None measures only the diagonal.
        """

        def statistic(blocks: Sequence[ParameterBlock]) -> SecondMoments:
            sums = self.signal, self.examples, self._zero, self._division
            if bases is None:
                return SecondMoments(blocks, *sums, {}, diagonal)
            gather = partial(self._gathered, bases=bases)
            if self._division is not None:
                return SecondMoments(blocks, *sums, {}, diagonal, gather)
            self.world.wait()
            return SecondMoments(blocks, *sums, {b.name: gather(b) for b in blocks}, diagonal)

        where, mean = self._home(bases is not None), dict[str, Tensor]()
        for checkpoint in checkpoints:
            settings = self._squares_settings(kind, checkpoint, checkpoints, diagonal)
            squares = self._measured(statistic, checkpoint, settings, bases=bases is not None)
            for name, value in squares.items():
                share = value.to(where) / len(checkpoints)
                mean[name] = mean[name] + share if name in mean else share
        return mean

    # -- which rank has what ---------------------------------------------------------------------

    @cached_property
    def _owners(self) -> dict[str, int]:
        sizes = {b.name: float(factor_bytes(b, True, self.accumulator)) for b in self.blocks}
        return self.world.owners(sizes)

    def _owner(self, name: str) -> int:
        """The owner of a tensor such as "<block>/A"."""
        return self._owners[name.rpartition("/")[0]]

    @property
    def _cache(self) -> FactorCache:
        return shared(self.cache, self.world, self._owner)

    @cached_property
    def _division(self) -> Owners | None:
        """Where the sums of all blocks do not fit on every rank, or there is no device that they
        could leave: whose they are."""
        if self.world.size == 1 or (self.room is not None and self._bytes(True) <= self.room):
            return None
        return Owners(self.world, self._owners)

    def _gathered(self, block: ParameterBlock, bases: Mapping[str, Basis | None]) -> Basis | None:
        """A block's basis from its owner, in the precision of the passes."""
        if block.diagonal:
            return None
        basis = bases.get(block.name)
        if self.world.size == 1 and basis is not None:
            return basis.to(self.device, self.passes.dtype).aligned()
        owner, sides = self._owners[block.name], [block.width, *([] if block.rows else [block.o])]
        if basis is None:
            flat = self._zero.new_empty(sum(side**2 for side in sides), dtype=self.passes.dtype)
        else:
            parts = [basis.inputs] if basis.outputs is None else [basis.inputs, basis.outputs]
            flat = torch.cat([part.flatten() for part in parts]).to(self.device, self.passes.dtype)
        lent = torch.split(self.world.lend(owner, flat), [side**2 for side in sides])
        inputs, *outputs = (part.view(n, n) for part, n in zip(lent, sides, strict=True))
        return Basis(outputs[0] if outputs else None, inputs).aligned()

    # -- the cache -------------------------------------------------------------------------------

    def _identity(self, checkpoint: Weights) -> list[str]:
        """Weights by content; by step, because pseudo-targets are drawn again at each; and by the
        losses there."""
        losses = [part.losses(checkpoint) for part in self.data]
        return [f"{checkpoint.sha256}@{checkpoint.step}", *losses]

    @property
    def settings(self) -> dict[str, Any]:
        """What every cached result depends on."""
        return {
            "identity": [dict(part.identity) for part in self.data],
            "fisher": self.fisher,
            "seed": self.seed if self.fisher == "sampled" else None,
            "dtype": self.passes.arithmetic,
        }

    def _factor_settings(
        self, kind: type[Factored], checkpoints: Sequence[Weights], diagonal: bool
    ) -> dict[str, Any]:
        weights = [self._identity(c) for c in checkpoints]
        return {**self.settings, "curvature": kind.kind, "diagonal": diagonal, "weights": weights}

    def _squares_settings(
        self, kind: str, checkpoint: Weights, checkpoints: Sequence[Weights], diagonal: bool
    ) -> dict[str, Any]:
        basis = None if kind == "diagonal" else [self._identity(c) for c in checkpoints]
        about = {"what": "squares", "kind": kind, "basis": basis, "diagonal": diagonal}
        return {**self.settings, **about, "weights": self._identity(checkpoint)}

    def _with_other_diagonal(
        self, kind: type[Factored], checkpoints: Sequence[Weights], diagonal: bool
    ) -> Tensors | None:
        """From the same factors with the diagonal, or without it, if they are cached."""
        if not _has_bases(kind):
            return None
        factors = self._cache.get(key_of(self._factor_settings(kind, checkpoints, not diagonal)))
        if factors is None:
            return None
        if not diagonal:
            return {n: x for n, x in factors.items() if not n.endswith("/diagonal")}
        return factors | self.second_moments("diagonal", checkpoints, None, True)

    # -- groups of layers ------------------------------------------------------------------------

    def groups(self, bases: bool) -> list[list[ParameterBlock]]:
        """Blocks that are fitted together."""
        room = self.room
        if room is not None and self._division is not None:
            room *= self.world.size
        return grouped(self.blocks, bases, self.accumulator, room)

    def _home(self, bases: bool) -> torch.device:
        """Where sums are: on the device, or on the CPU if there are groups of layers."""
        return self.device if len(self.groups(bases)) == 1 else torch.device("cpu")

    def _measured(
        self,
        statistic: Callable[[Sequence[ParameterBlock]], Statistic],
        checkpoint: Weights,
        settings: Mapping[str, Any],
        bases: bool,
    ) -> Tensors:
        """A statistic of all blocks, in one pass, or in one for each group (then on the CPU)."""

        def passed(blocks: Sequence[ParameterBlock], about: Mapping[str, Any]) -> Tensors:
            size = self.batch_size
            if self._division is not None:
                size = exchanged_batch(size, self.passes.tracked)
            data, cache, owner = self.data, self._cache, self._owner
            return measure(statistic(blocks), data, checkpoint, cache, about, size, owner)

        groups = self.groups(bases)
        if len(groups) == 1:
            return passed(groups[0], settings)
        cached = self._cache.get(key_of(settings))
        if cached is not None:
            return cached
        self._warn_of_groups(len(groups), bases)
        parts = [{**settings, "blocks": [b.name for b in blocks]} for blocks in groups]
        values: Tensors = {}
        for blocks, part in zip(groups, parts, strict=True):
            values |= {name: value.cpu() for name, value in passed(blocks, part).items()}
        self._cache.put(key_of(settings), values, settings)
        for part in parts:
            self._cache.drop(key_of(part))
        return values

    def _warn_of_groups(self, groups: int, bases: bool) -> None:
        assert self.room is not None
        self.notes["factor_groups"] = groups
        warn(
            f"the factors of all {len(self.blocks)} layers take {self._bytes(bases) / 2**30:.2g} "
            f"GiB, and there is room for {self.room / 2**30:.2g}: they are fitted in {groups} "
            "groups of layers, with passes over the data for each. Give more memory=, or track "
            "fewer layers (Study(layers=...)), to make it faster",
            stacklevel=2,
        )

    def _bytes(self, bases: bool) -> int:
        """What the factors of all blocks take."""
        return sum(factor_bytes(b, bases, self.accumulator) for b in self.blocks)

    def _placed(self, kind: type[Factored], factors: Tensors) -> Mapping[str, EigenFactors]:
        """On the device; if there is no room, on the CPU until a block is asked for. At its owner,
        if there are several ranks."""
        names, needed = [b.name for b in self.blocks], self._bytes(_has_bases(kind))
        fits = self.room is None or self.resident * needed / self.world.size <= self.room
        if fits and (self.world.size == 1 or not kind.passes):
            return {name: self._block(name, factors) for name in names}
        if not fits:
            factors = {name: value.cpu() for name, value in factors.items()}
        parts: dict[str, Tensors] = {name: {} for name in names}
        for name, value in factors.items():
            parts[name.rpartition("/")[0]][name] = value
        return OffloadedFactors(parts, self._from_owner)

    def _from_owner(self, name: str, factors: Tensors) -> EigenFactors:
        given = self.world.share(factors, self._owners[name], self.device)
        assert given is not None
        return self._block(name, given)

    def _block(self, name: str, factors: Tensors) -> EigenFactors:
        keys = [k for k in ("outputs", "inputs", "diagonal") if f"{name}/{k}" in factors]
        x = {k: factors[f"{name}/{k}"].to(self.device, self.accumulator) for k in keys}
        eigenvalues = factors[f"{name}/eigenvalues"].to(self.device, self.accumulator)
        basis = Basis(x.get("outputs"), x["inputs"]) if "inputs" in x else None
        return EigenFactors(eigenvalues, basis, x.get("diagonal"))


def _has_bases(kind: type[Factored]) -> bool:
    return "covariances" in kind.passes


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """What sums are kept in: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def factor_bytes(block: ParameterBlock, bases: bool, dtype: torch.dtype) -> int:
    """What a block's factors take, when they are fitted and while they are."""
    numbers = cost.basis_numbers(block) if bases else 0
    return (numbers + 2 * block.size) * dtype.itemsize


def exchanged_batch(batch_size: int, tracked: Tracked) -> int:
    """Examples in a batch, where ranks exchange what each adds: enough positions that this takes
    little of the time."""
    positions = max(tracked.positions.values(), default=1)
    fitting = BATCH_BYTES // (4 * cost.per_example_numbers(tracked))
    return max(batch_size, min(POSITIONS // positions, fitting))


def grouped(
    blocks: Iterable[ParameterBlock], bases: bool, dtype: torch.dtype, room: int | None
) -> list[list[ParameterBlock]]:
    """Blocks in order, as many at a time as there is room for; at least one."""
    return cost.in_groups(blocks, lambda block: factor_bytes(block, bases, dtype), room)
