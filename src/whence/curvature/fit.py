"""Fitting the curvature of a segment: covariances → eigenbasis → eigenvalues in it (appendix D.2).

    A_c = Σ_{n,t} a aᵀ / N        S_c = Σ_{n,t} s sᵀ / Σ_n t_n         at each checkpoint c
    Ā, S̄ = means over the segment's checkpoints = Q_A Λ_A Q_Aᵀ, Q_S Λ_S Q_Sᵀ
    Λ̄ = mean over checkpoints of (1/N) Σ_n (Q_Sᵀ G_n Q_A)²

`s` and `G` are of pseudo-losses (sampled Fisher), of the Gauss-Newton matrix's columns (exact) or
of the losses (empirical).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whence.curvature import products
from whence.curvature.products import Basis
from whence.curvature.store import Store, key_of, zeros
from whence.data import Batches, cut
from whence.layers.capture import Block
from whence.layers.passes import Passes, Signal, Sweep, Weights

KINDS = ("ekfac", "kfac", "diagonal", "identity")
FISHERS = ("sampled", "exact", "empirical")


def check_choices(curvature: str, fisher: str) -> None:
    """Refuse a kind of curvature or of Fisher matrix that does not exist."""
    for name, value, options in (("curvature", curvature, KINDS), ("fisher", fisher, FISHERS)):
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


Curvature = dict[str, BlockCurvature]


@dataclass(frozen=True)
class Part:
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
    """

    parts: Sequence[Part]
    store: Store
    batch_size: int
    kind: str = "ekfac"
    fisher: str = "sampled"
    seed: int = 0
    diagonal: bool = False
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
        settings = {
            **self.settings,
            "curvature": self.kind,
            "diagonal": self.diagonal,
            "weights": [_name(c) for c in checkpoints],
        }
        key = key_of(settings)
        found = self.store.get(key)
        if found is None:
            found = self._fitted(checkpoints)
            self.store.put(key, found, settings)
            for checkpoint in checkpoints if self.kind != "diagonal" else ():  # only for this basis
                self.store.drop(self._squares_key(checkpoint, checkpoints)[0])
        return self._placed(found)

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
    def _blocks(self) -> list[Block]:
        found = {b.name: b for part in self.parts for b in part.passes.tracked.blocks}
        return list(found.values())

    @property
    def _signal(self) -> Signal:
        return Signal("loss" if self.fisher == "empirical" else self.fisher, self.seed)

    def _placed(self, found: Mapping[str, Tensor]) -> Curvature:
        device, dtype = self.passes.device, accumulator(self.passes.dtype)
        placed = {}
        for name in (b.name for b in self._blocks):
            basis = None
            if f"{name}/outputs" in found:
                basis = Basis(found[f"{name}/outputs"], found[f"{name}/inputs"]).to(device, dtype)
            diagonal = found.get(f"{name}/diagonal")
            placed[name] = BlockCurvature(
                found[f"{name}/eigenvalues"].to(device, dtype),
                basis,
                None if diagonal is None else diagonal.to(device, dtype),
                self.kind != "kfac",
            )
        return placed

    # -- covariances and their eigenbases ----------------------------------------------------

    def covariances(self, checkpoint: Weights) -> dict[str, Tensor]:
        """ "<block>/A" and "<block>/S" at one checkpoint."""
        shapes: dict[str, tuple[int, ...]] = {}
        for b in self._blocks:
            shapes |= {
                f"{b.name}/A": (b.width, b.width),
                f"{b.name}/S": (b.o, b.o),
                f"{b.name}/positions": (),
            }

        def update(totals: dict[str, Tensor], sweep: Sweep) -> None:
            for _, pairs in sweep.pairs:
                for pair in pairs:
                    name = pair.block.name
                    count = products.add_output_covariance(totals[f"{name}/S"], pair.s, pair.mask)
                    if sweep.first:
                        products.add_input_covariance(totals[f"{name}/A"], pair)
                        totals[f"{name}/positions"] += count

        def finish(totals: dict[str, Tensor]) -> dict[str, Tensor]:
            done = {}
            for b in self._blocks:
                done[f"{b.name}/A"] = products.mirror(totals[f"{b.name}/A"]) / self.examples
                done[f"{b.name}/S"] = (
                    products.mirror(totals[f"{b.name}/S"]) / totals[f"{b.name}/positions"]
                )
            return done

        settings = {**self.settings, "what": "covariances", "weights": _name(checkpoint)}
        return self._pass(
            "covariances", checkpoint, key_of(settings), settings, shapes, update, finish
        )

    def _bases(self, checkpoints: Sequence[Weights]) -> tuple[dict[str, Basis], dict[str, Tensor]]:
        """Eigenbases of the mean covariances, and λ_S λ_Aᵀ in them (K-FAC's eigenvalues)."""
        means: dict[str, Tensor] = {}
        for checkpoint in checkpoints:
            for name, value in self.covariances(checkpoint).items():
                share = value.to(self.passes.device, torch.float64) / len(checkpoints)
                means[name] = means[name] + share if name in means else share
        bases, kronecker = {}, {}
        with self.passes.clock("eigendecomposition"):
            for b in self._blocks:
                (s_values, s_vectors) = torch.linalg.eigh(means.pop(f"{b.name}/S"))
                (a_values, a_vectors) = torch.linalg.eigh(means.pop(f"{b.name}/A"))
                basis = Basis(s_vectors.contiguous(), a_vectors.contiguous())
                # found in float64, kept in the precision they are used in
                bases[b.name] = basis.to(self.passes.device, accumulator(self.passes.dtype))
                values = torch.outer(s_values.clamp_min(0), a_values.clamp_min(0))
                kronecker[f"{b.name}/eigenvalues"] = values
        return bases, kronecker

    # -- eigenvalues ---------------------------------------------------------------------------

    def _mean_squares(
        self, checkpoints: Sequence[Weights], bases: Mapping[str, Basis]
    ) -> dict[str, Tensor]:
        """Second moments of whole per-example gradients, averaged over checkpoints.

        "<block>/eigenvalues" in the bases and, where wanted, "<block>/diagonal" in the parameters'
        own coordinates; without bases just "<block>".
        """
        placed = {n: b.to(self.passes.device, self.passes.dtype) for n, b in bases.items()}
        kinds: dict[str, Mapping[str, Basis]] = {"": {}}
        if bases:
            kinds = {"/eigenvalues": placed} if self.kind == "ekfac" else {}
            kinds |= {"/diagonal": {}} if self.diagonal else {}
        shapes: dict[str, tuple[int, ...]] = {
            b.name + suffix: b.shape for b in self._blocks for suffix in kinds
        }

        def update(totals: dict[str, Tensor], sweep: Sweep) -> None:
            for _, pairs in sweep.pairs:
                for pair in pairs:
                    name, bias = pair.block.name, pair.block.bias
                    for suffix, basis in kinds.items():
                        total = totals[name + suffix]
                        products.add_squares(total, pair.a, pair.s, basis.get(name), bias)

        def finish(totals: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: value / self.examples for name, value in totals.items()}

        mean: dict[str, Tensor] = {}
        for checkpoint in checkpoints:
            key, settings = self._squares_key(checkpoint, checkpoints)
            found = self._pass("eigenvalues", checkpoint, key, settings, shapes, update, finish)
            for name, value in found.items():
                share = value / len(checkpoints)
                mean[name] = mean[name] + share if name in mean else share
        return mean

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
        shapes: Mapping[str, tuple[int, ...]],
        update: Callable[[dict[str, Tensor], Sweep], None],
        finish: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    ) -> dict[str, Tensor]:
        """Totals over all examples at a checkpoint: stored, from a snapshot on, or from scratch."""
        found = self.store.get(key)
        if found is not None:
            return found
        with self.passes.clock(work):
            totals = zeros(shapes, self.passes.device, accumulator(self.passes.dtype))
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
                for sweep in part.passes.sweeps(part.data, blocks, self._signal, label):
                    update(totals, sweep)
                    if sweep.last:
                        done += 1
                        position = {"done": done, "batch_size": batch_size}
                        self.store.offer_snapshot(key, totals, position)
            result = finish(totals)
            self.store.put(key, result, settings)
        return result


def _name(checkpoint: Weights) -> str:
    """Weights by content; and by step, because pseudo-targets are drawn anew at each."""
    return f"{checkpoint.sha256}@{checkpoint.step}"


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """What sums are kept in: at least float32."""
    return torch.promote_types(dtype, torch.float32)
