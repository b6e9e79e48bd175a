"""Fitting the curvature of a segment: covariances → eigenbases → eigenvalues (appendix D.2).

    A_c = Σ_{n,t} a aᵀ / N        S_c = Σ_{n,t} s sᵀ / Σ_n t_n         at each checkpoint c
    Ā, S̄ = means over the segment's checkpoints = Q_A Λ_A Q_Aᵀ, Q_S Λ_S Q_Sᵀ
    Λ̄ = mean over checkpoints of (1/N) Σ_n (Q_Sᵀ G_n Q_A)²

`s` and `G` are of pseudo-losses (sampled Fisher), of the Gauss-Newton matrix's columns (exact) or
of the losses (empirical).

A layer's factors are o² + width² numbers, often many times its parameters. Where those of all
layers do not fit on a device, groups of layers are fitted one after another, each with its own
passes over the data, and the result stays on the CPU and is brought to the device layer by layer
(`OffloadedFactors`). The numbers are the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whence.data import Batches, cut
from whence.layers.capture import ParameterBlock
from whence.layers.passes import BackwardPass, Passes, Signal, Weights
from whence.operators import products
from whence.operators.factored import EigenFactors, Factored, OffloadedFactors
from whence.operators.space import Basis
from whence.persist.factor_cache import FactorCache
from whence.persist.identity import key_of

FISHERS = ("sampled", "exact", "empirical")


@dataclass(frozen=True)
class FitData:
    """Data that a curvature is fitted on, and the passes (model, task, layers) it goes through.

    Args:
        indices: the examples the run really used.
        identity: what makes two fits the same besides weights and settings (data, task, model,
            layers).
        losses: the digest of the losses of all examples at given weights.
    """

    passes: Passes
    data: Batches
    indices: NDArray[np.int64]
    identity: Mapping[str, Any]
    losses: Callable[[Weights], str]


@dataclass(frozen=True)
class Totals:
    """What a pass adds up, of some blocks."""

    shapes: Mapping[str, tuple[int, ...]]
    update: Callable[[dict[str, Tensor], BackwardPass], None]
    finish: Callable[[dict[str, Tensor]], dict[str, Tensor]]


TotalsOf = Callable[[Sequence[ParameterBlock]], Totals]


@dataclass(frozen=True)
class Fitter:
    """Fits curvatures at any checkpoints, reusing whatever the cache already has.

    Args:
        data: the data; several parts (stages) are pooled.
        room: bytes on the device for factors; None for as many as they need.
        resident: how many fitted curvatures are needed at the same time.
        memory: bytes that Krylov iterations may use.
        notes: where the number of groups of layers is noted, if there are several.
        tallies: where Krylov iterations are noted.
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

    @property
    def settings(self) -> dict[str, Any]:
        """What every cached result depends on."""
        return {
            "identity": [dict(part.identity) for part in self.data],
            "fisher": self.fisher,
            "seed": self.seed if self.fisher == "sampled" else None,
            "dtype": self.passes.arithmetic,
        }

    @property
    def passes(self) -> Passes:
        return self.data[0].passes

    @property
    def examples(self) -> int:
        """N."""
        return sum(len(part.indices) for part in self.data)

    @property
    def blocks(self) -> list[ParameterBlock]:
        named = {b.name: b for part in self.data for b in part.passes.tracked.blocks}
        return list(named.values())

    @property
    def positions(self) -> dict[str, int]:
        """t of every block."""
        tracked = [part.passes.tracked for part in self.data]
        return {name: t for each in tracked for name, t in each.positions.items()}

    @property
    def _sums(self) -> torch.dtype:
        return accumulator(self.passes.dtype)

    @property
    def _signal(self) -> Signal:
        return Signal("loss" if self.fisher == "empirical" else self.fisher, self.seed)

    def _identity(self, checkpoint: Weights) -> list[str]:
        """Weights by content; by step, because pseudo-targets are drawn again at each; and by the
        losses there."""
        losses = [part.losses(checkpoint) for part in self.data]
        return [f"{checkpoint.sha256}@{checkpoint.step}", *losses]

    # -- factors: cached, put together from what is cached, or fitted ----------------------------

    def fit(
        self, kind: type[Factored], checkpoints: Sequence[Weights], diagonal: bool
    ) -> Mapping[str, EigenFactors]:
        """The factors of a kind of curvature, averaged over these checkpoints."""
        if not kind.passes:  # nothing is measured
            return self._placed(kind, kind.compute(self, checkpoints, diagonal))
        settings = self._entry(kind, checkpoints, diagonal)
        key = key_of(settings)
        factors = self.cache.get(key) or self._with_other_diagonal(kind, checkpoints, diagonal)
        if factors is None:
            factors = kind.compute(self, checkpoints, diagonal)
            self.cache.put(key, factors, settings)
            for checkpoint in checkpoints if _has_bases(kind) else ():  # only for these bases
                squares = self._squares_settings(kind, checkpoint, checkpoints, diagonal)
                self.cache.drop(key_of(squares))
        return self._placed(kind, factors)

    def _entry(
        self, kind: type[Factored], checkpoints: Sequence[Weights], diagonal: bool
    ) -> dict[str, Any]:
        weights = [self._identity(c) for c in checkpoints]
        return {**self.settings, "curvature": kind.kind, "diagonal": diagonal, "weights": weights}

    def _with_other_diagonal(
        self, kind: type[Factored], checkpoints: Sequence[Weights], diagonal: bool
    ) -> dict[str, Tensor] | None:
        """From the same factors with the diagonal, or without it, if they are cached."""
        if "covariances" not in kind.passes:
            return None
        factors = self.cache.get(key_of(self._entry(kind, checkpoints, not diagonal)))
        if factors is None:
            return None
        if not diagonal:
            return {name: x for name, x in factors.items() if not name.endswith("/diagonal")}
        return factors | self.second_moments(None, checkpoints, {}, True)

    def _placed(
        self, kind: type[Factored], factors: Mapping[str, Tensor]
    ) -> Mapping[str, EigenFactors]:
        names = [b.name for b in self.blocks]
        if self.room is None or self.resident * self._bytes(_has_bases(kind)) <= self.room:
            return {name: self._block(name, factors) for name in names}
        on_cpu = {name: value.cpu() for name, value in factors.items()}
        return OffloadedFactors(names, lambda name: self._block(name, on_cpu))

    def _block(self, name: str, factors: Mapping[str, Tensor]) -> EigenFactors:
        device, dtype = self.passes.device, self._sums
        basis, diagonal = None, factors.get(f"{name}/diagonal")
        if f"{name}/outputs" in factors:
            basis = Basis(factors[f"{name}/outputs"], factors[f"{name}/inputs"]).to(device, dtype)
        return EigenFactors(
            factors[f"{name}/eigenvalues"].to(device, dtype),
            basis,
            None if diagonal is None else diagonal.to(device, dtype),
        )

    # -- groups of layers ------------------------------------------------------------------------

    def _bytes(self, bases: bool) -> int:
        """What the factors of all blocks take."""
        return sum(factor_bytes(b, bases, self._sums) for b in self.blocks)

    def groups(self, bases: bool) -> list[list[ParameterBlock]]:
        """Blocks that are fitted together."""
        return grouped(self.blocks, bases, self._sums, self.room)

    def _totals(
        self, work: str, checkpoint: Weights, settings: Mapping[str, Any], of: TotalsOf, bases: bool
    ) -> dict[str, Tensor]:
        """Totals over all examples at a checkpoint: cached, or by a pass for each group of blocks
        (then on the CPU)."""
        key = key_of(settings)
        cached = self.cache.get(key)
        if cached is not None:
            return cached
        groups = self.groups(bases)
        if len(groups) == 1:
            return self._pass(work, checkpoint, settings, of(groups[0]))
        self._warn_of_groups(len(groups), bases)
        totals: dict[str, Tensor] = {}
        keys = []
        for blocks in groups:
            part = {**settings, "blocks": [block.name for block in blocks]}
            keys.append(key_of(part))
            values = self._pass(work, checkpoint, part, of(blocks))
            totals |= {name: value.cpu() for name, value in values.items()}
        self.cache.put(key, totals, settings)
        for part_key in keys:
            self.cache.drop(part_key)
        return totals

    def _warn_of_groups(self, groups: int, bases: bool) -> None:
        assert self.room is not None
        self.notes["factor_groups"] = groups
        warnings.warn(
            f"the factors of all {len(self.blocks)} layers take {self._bytes(bases) / 2**30:.2g} "
            f"GiB, and there is room for {self.room / 2**30:.2g}: they are fitted in {groups} "
            "groups of layers, with passes over the data for each. Give more memory=, or track "
            "fewer layers (Study(layers=...)), to make it faster",
            stacklevel=2,
        )

    # -- eigenbases ------------------------------------------------------------------------------

    def covariances(self, checkpoint: Weights, whole: Sequence[str] = ()) -> dict[str, Tensor]:
        """ "<block>/A" and "<block>/S" at one checkpoint; R and L in their place for the blocks
        whose bases come from whole gradients."""
        settings = {**self.settings, "what": "covariances", "weights": self._identity(checkpoint)}
        settings |= {"whole": list(whole)} if whole else {}

        def of(blocks: Sequence[ParameterBlock]) -> Totals:
            return self._covariances_of(blocks, whole)

        return self._totals("covariances", checkpoint, settings, of, True)

    def _covariances_of(self, blocks: Sequence[ParameterBlock], whole: Sequence[str]) -> Totals:
        shapes: dict[str, tuple[int, ...]] = {}
        for b in blocks:
            shapes |= {
                f"{b.name}/A": (b.width, b.width),
                f"{b.name}/S": (b.o, b.o),
                f"{b.name}/positions": (),
            }

        def update(totals: dict[str, Tensor], one: BackwardPass) -> None:
            for factors in one.factors():
                name = factors.block.name
                if f"{name}/S" not in totals:
                    continue
                A, S = totals[f"{name}/A"], totals[f"{name}/S"]
                if name in whole:
                    products.add_whole_grams(S, A, factors.a, factors.s, factors.block.bias)
                    totals[f"{name}/positions"] += len(factors.s) if one.first else 0
                    continue
                count = products.add_output_covariance(S, factors.s, factors.mask)
                if one.first:
                    products.add_input_covariance(A, factors)
                    totals[f"{name}/positions"] += count

        def finish(totals: dict[str, Tensor]) -> dict[str, Tensor]:
            covariances = {}
            for b in blocks:
                A, S = (products.mirror(totals[f"{b.name}/{k}"]) for k in "AS")
                covariances[f"{b.name}/A"] = A / self.examples
                covariances[f"{b.name}/S"] = S / totals[f"{b.name}/positions"]
            return covariances

        return Totals(shapes, update, finish)

    def eigenbases(
        self,
        checkpoints: Sequence[Weights],
        eigenvalues: dict[str, tuple[Tensor, Tensor]] | None = None,
        whole: Sequence[str] = (),
    ) -> dict[str, Basis]:
        """Eigenbases of the mean covariances. On the CPU, if there are groups of layers.

        Args:
            eigenvalues: is filled with those of S and A by block, where they are wanted.
            whole: blocks whose bases come from whole gradients.
        """
        where = self.passes.device if len(self.groups(True)) == 1 else torch.device("cpu")
        means: dict[str, Tensor] = {}
        for checkpoint in checkpoints:
            for name, value in self.covariances(checkpoint, whole).items():
                share = value.to(where, torch.float64) / len(checkpoints)
                means[name] = means[name].add_(share) if name in means else share
        bases = {}
        with self.passes.clock("eigendecomposition"):
            for b in self.blocks:
                both = (means.pop(f"{b.name}/{k}").to(self.passes.device) for k in "SA")
                (s_values, s_vectors), (a_values, a_vectors) = map(torch.linalg.eigh, both)
                # found in float64, kept in the precision they are used in
                basis = Basis(s_vectors.contiguous(), a_vectors.contiguous())
                bases[b.name] = basis.to(where, self._sums)
                if eigenvalues is not None:
                    eigenvalues[b.name] = s_values.to(where), a_values.to(where)
        return bases

    @staticmethod
    def as_tensors(bases: Mapping[str, Basis]) -> dict[str, Tensor]:
        """Bases by the names they are cached under."""
        tensors: dict[str, Tensor] = {}
        for name, basis in bases.items():
            tensors |= {f"{name}/outputs": basis.outputs, f"{name}/inputs": basis.inputs}
        return tensors

    # -- eigenvalues -----------------------------------------------------------------------------

    def second_moments(
        self,
        kind: type[Factored] | None,
        checkpoints: Sequence[Weights],
        bases: Mapping[str, Basis],
        diagonal: bool,
    ) -> dict[str, Tensor]:
        """Second moments of whole per-example gradients, averaged over checkpoints.

        "<block>/eigenvalues" in the bases, if there are any, and "<block>/diagonal" in the
        parameters' own coordinates, if that is asked for.

        Args:
            kind: whose bases they are; None for none.
        """

        def of(blocks: Sequence[ParameterBlock]) -> Totals:
            return self._squares_of(blocks, bases, diagonal)

        mean: dict[str, Tensor] = {}
        for checkpoint in checkpoints:
            settings = self._squares_settings(kind, checkpoint, checkpoints, diagonal)
            totals = self._totals("eigenvalues", checkpoint, settings, of, bool(bases))
            for name, value in totals.items():
                share = value / len(checkpoints)
                mean[name] = mean[name] + share if name in mean else share
        return mean

    def _squares_of(
        self, blocks: Sequence[ParameterBlock], bases: Mapping[str, Basis], diagonal: bool
    ) -> Totals:
        where, dtype = self.passes.device, self.passes.dtype
        placed = {b.name: bases[b.name].to(where, dtype) for b in blocks if b.name in bases}
        coordinates: dict[str, Mapping[str, Basis]] = {"/eigenvalues": placed} if bases else {}
        coordinates |= {"/diagonal": {}} if diagonal else {}
        shapes = {b.name + suffix: b.shape for b in blocks for suffix in coordinates}

        def update(totals: dict[str, Tensor], one: BackwardPass) -> None:
            for factors in one.factors():
                name, bias = factors.block.name, factors.block.bias
                for suffix, basis in coordinates.items():
                    total = totals.get(name + suffix)
                    if total is not None:
                        products.add_squares(total, factors.a, factors.s, basis.get(name), bias)

        def finish(totals: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: value / self.examples for name, value in totals.items()}

        return Totals(shapes, update, finish)

    def _squares_settings(
        self,
        kind: type[Factored] | None,
        checkpoint: Weights,
        basis: Sequence[Weights],
        diagonal: bool,
    ) -> dict[str, Any]:
        in_bases = kind is not None and "covariances" in kind.passes
        return {
            **self.settings,
            "what": "squares",
            "weights": self._identity(checkpoint),
            "basis": [self._identity(c) for c in basis] if in_bases else None,
            "kind": kind.kind if in_bases and kind is not None else "diagonal",
            "diagonal": diagonal,
        }

    # -- one resumable pass over the data --------------------------------------------------------

    def _pass(
        self, work: str, checkpoint: Weights, settings: Mapping[str, Any], of: Totals
    ) -> dict[str, Tensor]:
        """Totals over all examples at a checkpoint: cached, from a snapshot on, or from scratch."""
        key = key_of(settings)
        cached = self.cache.get(key)
        if cached is not None:
            return cached
        with self.passes.clock(work):
            totals = {
                name: torch.zeros(shape, device=self.passes.device, dtype=self._sums)
                for name, shape in of.shapes.items()
            }
            done, batch_size = 0, self.batch_size  # batches
            snapshot = self.cache.snapshot(key)
            if snapshot is not None:
                done, batch_size = snapshot[1]["done"], snapshot[1]["batch_size"]
                totals = {name: value.to(self.passes.device) for name, value in snapshot[0].items()}
            skip = done
            for part in self.data:
                batches = [part.indices[b] for b in cut(len(part.indices), batch_size)]
                batches, skip = batches[skip:], max(0, skip - len(batches))
                part.passes.load(checkpoint)
                label = f"{work}, step {checkpoint.step}"
                for one in part.passes.backward_passes(part.data, batches, self._signal, label):
                    of.update(totals, one)
                    if one.last:
                        done += 1
                        position = {"done": done, "batch_size": batch_size}
                        self.cache.offer_snapshot(key, totals, position)
            result = of.finish(totals)
            self.cache.put(key, result, settings)
        return result


def _has_bases(kind: type[Factored]) -> bool:
    return "covariances" in kind.passes


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """What sums are kept in: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def factor_bytes(block: ParameterBlock, bases: bool, dtype: torch.dtype) -> int:
    """What a block's factors take, when they are fitted and while they are."""
    numbers = block.o**2 + block.width**2 if bases else 0
    return (numbers + 2 * block.size) * dtype.itemsize


def grouped(
    blocks: Iterable[ParameterBlock], bases: bool, dtype: torch.dtype, room: int | None
) -> list[list[ParameterBlock]]:
    """Blocks in order, as many at a time as there is room for; at least one."""
    groups: list[list[ParameterBlock]] = [[]]
    left = room
    for block in blocks:
        size = factor_bytes(block, bases, dtype)
        if groups[-1] and left is not None and size > left:
            groups.append([])
            left = room
        groups[-1].append(block)
        left = None if left is None else left - size
    return groups
