"""Fitting the curvature of a segment: covariances → eigenbasis → eigenvalues in it (appendix D.2).

    A_c = Σ_{n,t} a aᵀ / N        S_c = Σ_{n,t} s sᵀ / Σ_n t_n         at each checkpoint c
    Ā, S̄ = means over the segment's checkpoints = Q_A Λ_A Q_Aᵀ, Q_S Λ_S Q_Sᵀ
    Λ̄ = mean over checkpoints of (1/N) Σ_n (Q_Sᵀ G_n Q_A)²

`s` and `G` are of pseudo-losses (sampled Fisher), of the Gauss-Newton matrix's columns (exact) or
of the losses (empirical).

A layer's factors are o² + width² numbers, often many times its parameters. Where those of all
layers do not fit on a device, groups of layers are fitted one after another, each with passes over
the data of its own, and the result stays on the CPU and is brought to the device layer by layer
(`OffloadedFactors`). The numbers are the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whence.data import Batches, cut
from whence.layers.capture import ParameterBlock
from whence.layers.passes import BackwardPass, Passes, Signal, Weights
from whence.operators import products
from whence.operators.products import Basis
from whence.persist.factor_cache import FactorCache
from whence.persist.identity import key_of

KINDS = ("ekfac", "kfac", "diagonal", "identity")
FISHERS = ("sampled", "exact", "empirical")


def check_choices(curvature: str, fisher: str, *more: str) -> None:
    """Refuse a kind of curvature (of these, and `more`) or of Fisher matrix that does not exist."""
    kinds = (*KINDS, *more)
    for name, value, options in (("curvature", curvature, kinds), ("fisher", fisher, FISHERS)):
        if value not in options:
            known = ", ".join(map(repr, options))
            raise ValueError(f"{name}={value!r} is not known: use one of {known}")


@dataclass(frozen=True)
class BlockCurvature:
    """Curvature of one block: eigenvalues (o, width) in a basis (None: the parameters' own).

    `diagonal` (o, width), where it was asked for, is the Gauss-Newton matrix's own diagonal.
    `squared` says that eigenvalues are sums of squares (EK-FAC's), whose rounding is that squared.
    """

    eigenvalues: Tensor
    basis: Basis | None
    diagonal: Tensor | None = None
    squared: bool = True

    def significant(self) -> Tensor:
        """1 where an eigenvalue is more than the rounding of a zero, else 0."""
        σ = self.eigenvalues
        rounding = 8 * torch.finfo(σ.dtype).eps
        noise = rounding**2 * σ.sum() if self.squared else rounding * σ.max()
        return (σ > noise).to(σ.dtype)


Curvature = Mapping[str, BlockCurvature]


class OffloadedFactors(Mapping[str, BlockCurvature]):
    """A curvature that lies on the CPU: a block is brought to the device when it is asked for, and
    gone with the next one."""

    def __init__(self, names: Sequence[str], bring: Callable[[str], BlockCurvature]) -> None:
        self._names, self._bring = list(names), bring
        self._last: tuple[str, BlockCurvature] | None = None

    def __getitem__(self, name: str) -> BlockCurvature:
        if self._last is None or self._last[0] != name:
            if name not in self._names:
                raise KeyError(name)
            self._last = None  # before there are two
            self._last = (name, self._bring(name))
        return self._last[1]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def bases_of(curvature: Curvature) -> dict[str, Basis | None]:
    """Where vectors are best built: in the eigenbases, if they are at hand."""
    if isinstance(curvature, OffloadedFactors):
        return dict.fromkeys(curvature)
    return {name: block.basis for name, block in curvature.items()}


@dataclass(frozen=True)
class Totals:
    """What a pass adds up, of some blocks."""

    shapes: Mapping[str, tuple[int, ...]]
    update: Callable[[dict[str, Tensor], BackwardPass], None]
    finish: Callable[[dict[str, Tensor]], dict[str, Tensor]]


@dataclass(frozen=True)
class FitData:
    """Some data a curvature is fitted on, and the passes (model, task, layers) it goes through.

    Args:
        indices: the examples the run really used.
        identity: what makes two fits the same besides weights and settings (data, task, model,
            layers).
    """

    passes: Passes
    data: Batches
    indices: NDArray[np.int64]
    identity: Mapping[str, Any]


@dataclass(frozen=True)
class Fitter:
    """Fits curvatures at any checkpoints, reusing whatever the store already has.

    Args:
        parts: the data; several parts (stages) are pooled.
        diagonal: whether the Gauss-Newton matrix's own diagonal is wanted beside an EK-FAC.
        room: bytes on the device for factors; None for as many as they need.
        held: how many fitted curvatures are to be there at a time.
        notes: is told into how many groups the layers were parted, if they were.
    """

    parts: Sequence[FitData]
    store: FactorCache
    batch_size: int
    kind: str = "ekfac"
    fisher: str = "sampled"
    seed: int = 0
    diagonal: bool = False
    room: int | None = None
    held: int = 1
    notes: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choices(self.kind, self.fisher)
        self.settings.update(
            identity=[dict(part.identity) for part in self.parts],
            fisher=self.fisher,
            seed=self.seed if self.fisher == "sampled" else None,
            dtype=self.passes.arithmetic,
        )

    @property
    def passes(self) -> Passes:
        return self.parts[0].passes

    @property
    def examples(self) -> int:
        """N."""
        return sum(len(part.indices) for part in self.parts)

    def fit(self, checkpoints: Sequence[Weights]) -> Curvature:
        """The curvature averaged over these checkpoints."""
        if self.kind == "identity":
            ones = {f"{b.name}/eigenvalues": torch.ones(b.shape) for b in self._blocks}
            return self._placed(ones)
        return self._placed(self._entry(checkpoints))

    def _entry(self, checkpoints: Sequence[Weights]) -> dict[str, Tensor]:
        """Bases and eigenvalues: stored, put together of what is stored, or fitted."""
        settings = self._entry_settings(checkpoints)
        key = key_of(settings)
        found = self.store.get(key) or self._put_together(checkpoints)
        if found is None:
            found = self._fitted(checkpoints)
            self.store.put(key, found, settings)
            for checkpoint in checkpoints if self.kind != "diagonal" else ():  # only for this basis
                self.store.drop(self._squares_key(checkpoint, checkpoints)[0])
        return found

    def _entry_settings(self, checkpoints: Sequence[Weights]) -> dict[str, Any]:
        return {
            **self.settings,
            "curvature": self.kind,
            "diagonal": self.diagonal,
            "weights": [_name(c) for c in checkpoints],
        }

    def _put_together(self, checkpoints: Sequence[Weights]) -> dict[str, Tensor] | None:
        """From the same fitted with the diagonal, or without it, if there is one."""
        if self.kind == "diagonal":
            return None
        other = replace(self, diagonal=not self.diagonal)
        found = self.store.get(key_of(other._entry_settings(checkpoints)))
        if found is None:
            return None
        if not self.diagonal:
            return {name: value for name, value in found.items() if not name.endswith("/diagonal")}
        alone = replace(self, kind="diagonal", diagonal=False)._entry(checkpoints)
        own = {name.removesuffix("/eigenvalues"): value for name, value in alone.items()}
        return found | {f"{name}/diagonal": value for name, value in own.items()}

    def _fitted(self, checkpoints: Sequence[Weights]) -> dict[str, Tensor]:
        if self.kind == "diagonal":
            squares = self._mean_squares(checkpoints, {})
            return {f"{name}/eigenvalues": value for name, value in squares.items()}
        bases, found = self._bases(checkpoints)
        if self.kind == "ekfac" or self.diagonal:
            found |= self._mean_squares(checkpoints, bases)
        for name, basis in bases.items():
            found |= {f"{name}/outputs": basis.outputs, f"{name}/inputs": basis.inputs}
        return found

    @property
    def _sums(self) -> torch.dtype:
        return accumulator(self.passes.dtype)

    @property
    def _blocks(self) -> list[ParameterBlock]:
        found = {b.name: b for part in self.parts for b in part.passes.tracked.blocks}
        return list(found.values())

    @property
    def _signal(self) -> Signal:
        return Signal("loss" if self.fisher == "empirical" else self.fisher, self.seed)

    def _placed(self, found: Mapping[str, Tensor]) -> Curvature:
        names = [b.name for b in self._blocks]
        if self.room is None or self.held * self._needed <= self.room:
            return {name: self._block(name, found) for name in names}
        lying = {name: value.cpu() for name, value in found.items()}
        return OffloadedFactors(names, lambda name: self._block(name, lying))

    def _block(self, name: str, found: Mapping[str, Tensor]) -> BlockCurvature:
        device, dtype = self.passes.device, self._sums
        basis, diagonal = None, found.get(f"{name}/diagonal")
        if f"{name}/outputs" in found:
            basis = Basis(found[f"{name}/outputs"], found[f"{name}/inputs"]).to(device, dtype)
        return BlockCurvature(
            found[f"{name}/eigenvalues"].to(device, dtype),
            basis,
            None if diagonal is None else diagonal.to(device, dtype),
            self.kind != "kfac",
        )

    # -- groups of layers ----------------------------------------------------------------------

    @property
    def _needed(self) -> int:
        """Bytes that the factors of all blocks take."""
        return sum(factor_bytes(b, self.kind, self._sums) for b in self._blocks)

    @property
    def groups(self) -> list[list[ParameterBlock]]:
        """Blocks that are fitted together."""
        return grouped(self._blocks, self.kind, self._sums, self.room)

    def _totals(
        self,
        work: str,
        checkpoint: Weights,
        key: str,
        settings: Mapping[str, Any],
        of: Callable[[Sequence[ParameterBlock]], Totals],
    ) -> dict[str, Tensor]:
        """Totals over all examples at a checkpoint: stored, or by a pass for each group of blocks
        (then on the CPU)."""
        found = self.store.get(key)
        if found is not None:
            return found
        groups = self.groups
        if len(groups) == 1:
            return self._pass(work, checkpoint, key, settings, of(groups[0]))
        self._tell(len(groups))
        found, keys = {}, []
        for blocks in groups:
            own = {**settings, "blocks": [block.name for block in blocks]}
            keys.append(key_of(own))
            part = self._pass(work, checkpoint, keys[-1], own, of(blocks))
            found |= {name: value.cpu() for name, value in part.items()}
        self.store.put(key, found, settings)
        for own_key in keys:
            self.store.drop(own_key)
        return found

    def _tell(self, groups: int) -> None:
        assert self.room is not None
        self.notes["factor_groups"] = groups
        warnings.warn(
            f"the factors of all {len(self._blocks)} layers take {self._needed / 2**30:.2g} GiB, "
            f"and there is room for {self.room / 2**30:.2g}: they are fitted in {groups} groups of "
            "layers, with passes over the data for each. It is faster with more memory=, or with "
            "fewer layers (Study(layers=...))",
            stacklevel=2,
        )

    # -- covariances and their eigenbases ----------------------------------------------------

    def covariances(self, checkpoint: Weights) -> dict[str, Tensor]:
        """ "<block>/A" and "<block>/S" at one checkpoint."""
        settings = {**self.settings, "what": "covariances", "weights": _name(checkpoint)}
        return self._totals(
            "covariances", checkpoint, key_of(settings), settings, self._covariances_of
        )

    def _covariances_of(self, blocks: Sequence[ParameterBlock]) -> Totals:
        shapes: dict[str, tuple[int, ...]] = {}
        for b in blocks:
            shapes |= {
                f"{b.name}/A": (b.width, b.width),
                f"{b.name}/S": (b.o, b.o),
                f"{b.name}/positions": (),
            }

        def update(totals: dict[str, Tensor], sweep: BackwardPass) -> None:
            for _, pairs in sweep.pairs:
                for pair in pairs:
                    name = pair.block.name
                    if f"{name}/S" not in totals:
                        continue
                    count = products.add_output_covariance(totals[f"{name}/S"], pair.s, pair.mask)
                    if sweep.first:
                        products.add_input_covariance(totals[f"{name}/A"], pair)
                        totals[f"{name}/positions"] += count

        def finish(totals: dict[str, Tensor]) -> dict[str, Tensor]:
            done = {}
            for b in blocks:
                done[f"{b.name}/A"] = products.mirror(totals[f"{b.name}/A"]) / self.examples
                done[f"{b.name}/S"] = (
                    products.mirror(totals[f"{b.name}/S"]) / totals[f"{b.name}/positions"]
                )
            return done

        return Totals(shapes, update, finish)

    def _bases(self, checkpoints: Sequence[Weights]) -> tuple[dict[str, Basis], dict[str, Tensor]]:
        """Eigenbases of the mean covariances; and K-FAC's eigenvalues λ_S λ_Aᵀ in them, where they
        are wanted. On the CPU, if there are groups."""
        where = self.passes.device if len(self.groups) == 1 else torch.device("cpu")
        means: dict[str, Tensor] = {}
        for checkpoint in checkpoints:
            for name, value in self.covariances(checkpoint).items():
                share = value.to(where, torch.float64) / len(checkpoints)
                means[name] = means[name].add_(share) if name in means else share
        bases, kronecker = {}, {}
        with self.passes.clock("eigendecomposition"):
            for b in self._blocks:
                both = (means.pop(f"{b.name}/{k}").to(self.passes.device) for k in "SA")
                (s_values, s_vectors), (a_values, a_vectors) = map(torch.linalg.eigh, both)
                # found in float64, kept in the precision they are used in
                basis = Basis(s_vectors.contiguous(), a_vectors.contiguous())
                bases[b.name] = basis.to(where, self._sums)
                if self.kind == "kfac":
                    values = torch.outer(s_values.clamp_min(0), a_values.clamp_min(0))
                    kronecker[f"{b.name}/eigenvalues"] = values.to(where)
        return bases, kronecker

    # -- eigenvalues ---------------------------------------------------------------------------

    def _mean_squares(
        self, checkpoints: Sequence[Weights], bases: Mapping[str, Basis]
    ) -> dict[str, Tensor]:
        """Second moments of whole per-example gradients, averaged over checkpoints.

        "<block>/eigenvalues" in the bases and, where wanted, "<block>/diagonal" in the parameters'
        own coordinates; without bases just "<block>".
        """

        def of(blocks: Sequence[ParameterBlock]) -> Totals:
            return self._squares_of(blocks, bases)

        mean: dict[str, Tensor] = {}
        for checkpoint in checkpoints:
            key, settings = self._squares_key(checkpoint, checkpoints)
            found = self._totals("eigenvalues", checkpoint, key, settings, of)
            for name, value in found.items():
                share = value / len(checkpoints)
                mean[name] = mean[name] + share if name in mean else share
        return mean

    def _squares_of(self, blocks: Sequence[ParameterBlock], bases: Mapping[str, Basis]) -> Totals:
        where, dtype = self.passes.device, self.passes.dtype
        placed = {b.name: bases[b.name].to(where, dtype) for b in blocks if b.name in bases}
        kinds: dict[str, Mapping[str, Basis]] = {"": {}}
        if bases:
            kinds = {"/eigenvalues": placed} if self.kind == "ekfac" else {}
            kinds |= {"/diagonal": {}} if self.diagonal else {}
        shapes = {b.name + suffix: b.shape for b in blocks for suffix in kinds}

        def update(totals: dict[str, Tensor], sweep: BackwardPass) -> None:
            for _, pairs in sweep.pairs:
                for pair in pairs:
                    name, bias = pair.block.name, pair.block.bias
                    for suffix, basis in kinds.items():
                        total = totals.get(name + suffix)
                        if total is not None:
                            products.add_squares(total, pair.a, pair.s, basis.get(name), bias)

        def finish(totals: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: value / self.examples for name, value in totals.items()}

        return Totals(shapes, update, finish)

    def _squares_key(
        self, checkpoint: Weights, basis: Sequence[Weights]
    ) -> tuple[str, dict[str, Any]]:
        of = None if self.kind == "diagonal" else [_name(c) for c in basis]
        settings = {**self.settings, "what": "squares", "weights": _name(checkpoint), "basis": of}
        settings |= {"kind": self.kind, "diagonal": self.diagonal}
        return key_of(settings), settings

    # -- one resumable pass over the data ------------------------------------------------------

    def _pass(
        self,
        work: str,
        checkpoint: Weights,
        key: str,
        settings: Mapping[str, Any],
        of: Totals,
    ) -> dict[str, Tensor]:
        """Totals over all examples at a checkpoint: stored, from a snapshot on, or from scratch."""
        found = self.store.get(key)
        if found is not None:
            return found
        with self.passes.clock(work):
            totals = {
                name: torch.zeros(shape, device=self.passes.device, dtype=self._sums)
                for name, shape in of.shapes.items()
            }
            done, batch_size = 0, self.batch_size  # batches
            left = self.store.snapshot(key)
            if left is not None:
                done, batch_size = left[1]["done"], left[1]["batch_size"]
                totals = {name: value.to(self.passes.device) for name, value in left[0].items()}
            skip = done
            for part in self.parts:
                blocks = [part.indices[b] for b in cut(len(part.indices), batch_size)]
                blocks, skip = blocks[skip:], max(0, skip - len(blocks))
                part.passes.load(checkpoint)
                label = f"{work}, step {checkpoint.step}"
                for sweep in part.passes.backward_passes(part.data, blocks, self._signal, label):
                    of.update(totals, sweep)
                    if sweep.last:
                        done += 1
                        position = {"done": done, "batch_size": batch_size}
                        self.store.offer_snapshot(key, totals, position)
            result = of.finish(totals)
            self.store.put(key, result, settings)
        return result


def _name(checkpoint: Weights) -> str:
    """Weights by content; and by step, because pseudo-targets are drawn anew at each."""
    return f"{checkpoint.sha256}@{checkpoint.step}"


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """What sums are kept in: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def factor_bytes(block: ParameterBlock, kind: str, dtype: torch.dtype) -> int:
    """What a block's factors take, when they are fitted and while they are."""
    bases = block.o**2 + block.width**2 if kind in ("ekfac", "kfac") else 0
    return (bases + 2 * block.size) * dtype.itemsize


def grouped(
    blocks: Iterable[ParameterBlock], kind: str, dtype: torch.dtype, room: int | None
) -> list[list[ParameterBlock]]:
    """Blocks in order, as many at a time as there is room for; at least one."""
    groups: list[list[ParameterBlock]] = [[]]
    left = room
    for block in blocks:
        size = factor_bytes(block, kind, dtype)
        if groups[-1] and left is not None and size > left:
            groups.append([])
            left = room
        groups[-1].append(block)
        left = None if left is None else left - size
    return groups
