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
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from whence.curvature import products
from whence.curvature.products import Basis
from whence.curvature.store import Store, key_of, zeros
from whence.data import Batches, cut
from whence.layers.capture import Block
from whence.layers.passes import Passes, Signal, Sweep

KINDS = ("ekfac", "kfac", "diagonal", "identity")
FISHERS = ("sampled", "exact", "empirical")


def check_choices(curvature: str, fisher: str) -> None:
    """Refuse a kind of curvature or of Fisher matrix that does not exist."""
    for name, value, options in (("curvature", curvature, KINDS), ("fisher", fisher, FISHERS)):
        if value not in options:
            known = ", ".join(map(repr, options))
            raise ValueError(f"{name}={value!r} is not known: use one of {known}")


class Weights(Protocol):
    """What fitting needs of a checkpoint."""

    @property
    def step(self) -> int: ...
    @property
    def sha256(self) -> str: ...
    def weights(self) -> dict[str, Tensor]: ...


@dataclass(frozen=True)
class BlockCurvature:
    """Curvature of one block: eigenvalues (o, width) in a basis (None: the parameters' own)."""

    eigenvalues: Tensor
    basis: Basis | None


Curvature = dict[str, BlockCurvature]


@dataclass(frozen=True)
class Fitter:
    """Fits curvatures on some data, at any checkpoints, reusing whatever the store already has.

    Args:
        indices: the training examples the run really used.
        identity: what makes two fits the same besides weights and settings (data, task, model,
            layers).
    """

    passes: Passes
    data: Batches
    indices: np.ndarray
    store: Store
    identity: Mapping[str, Any]
    batch_size: int
    kind: str = "ekfac"
    fisher: str = "sampled"
    seed: int = 0
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choices(self.kind, self.fisher)
        self.settings.update(
            identity=dict(self.identity),
            fisher=self.fisher,
            seed=self.seed if self.fisher == "sampled" else None,
            dtype=str(self.passes.dtype),
        )

    def fit(self, checkpoints: Sequence[Weights]) -> Curvature:
        """The curvature averaged over these checkpoints."""
        if self.kind == "identity":
            ones = {b.name: torch.ones(b.o, b.width) for b in self._blocks}
            return self._placed(ones, {})
        if self.kind == "diagonal":
            return self._placed(self._mean_squares(checkpoints, {}), {})
        settings = {
            **self.settings,
            "curvature": self.kind,
            "weights": [_name(c) for c in checkpoints],
        }
        key = key_of(settings)
        found = self.store.get(key)
        if found is None:
            bases, kronecker = self._bases(checkpoints)
            values = kronecker if self.kind == "kfac" else self._mean_squares(checkpoints, bases)
            found = {f"{name}/eigenvalues": value for name, value in values.items()}
            for name, basis in bases.items():
                found |= {f"{name}/outputs": basis.outputs, f"{name}/inputs": basis.inputs}
            self.store.put(key, found, settings)
            if self.kind == "ekfac":
                for checkpoint in checkpoints:  # superseded by their mean
                    self.store.drop(self._squares_key(checkpoint, checkpoints)[0])
        names = [b.name for b in self._blocks]
        bases = {n: Basis(found[f"{n}/outputs"], found[f"{n}/inputs"]) for n in names}
        return self._placed({n: found[f"{n}/eigenvalues"] for n in names}, bases)

    @property
    def _blocks(self) -> list[Block]:
        return self.passes.tracked.blocks

    @property
    def _signal(self) -> Signal:
        return Signal("loss" if self.fisher == "empirical" else self.fisher, self.seed)

    def _placed(self, values: Mapping[str, Tensor], bases: Mapping[str, Basis]) -> Curvature:
        device, dtype = self.passes.device, accumulator(self.passes.dtype)
        return {
            name: BlockCurvature(
                value.to(device, dtype), bases[name].to(device, dtype) if name in bases else None
            )
            for name, value in values.items()
        }

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
                        total = totals[f"{name}/A"]
                        products.add_input_covariance(total, pair.a, pair.mask, pair.block.bias)
                        totals[f"{name}/positions"] += count

        def finish(totals: dict[str, Tensor]) -> dict[str, Tensor]:
            done = {}
            for b in self._blocks:
                done[f"{b.name}/A"] = products.mirror(totals[f"{b.name}/A"]) / len(self.indices)
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
                bases[b.name] = Basis(s_vectors.contiguous(), a_vectors.contiguous())
                kronecker[b.name] = torch.outer(s_values.clamp_min(0), a_values.clamp_min(0))
        return bases, kronecker

    # -- eigenvalues ---------------------------------------------------------------------------

    def _mean_squares(
        self, checkpoints: Sequence[Weights], bases: Mapping[str, Basis]
    ) -> dict[str, Tensor]:
        """Second moments of whole per-example gradients in the bases, averaged over checkpoints."""
        placed = {n: b.to(self.passes.device, self.passes.dtype) for n, b in bases.items()}
        shapes = {b.name: (b.o, b.width) for b in self._blocks}

        def update(totals: dict[str, Tensor], sweep: Sweep) -> None:
            for _, pairs in sweep.pairs:
                for pair in pairs:
                    name, bias = pair.block.name, pair.block.bias
                    products.add_squares(totals[name], pair.a, pair.s, placed.get(name), bias)

        def finish(totals: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: value / len(self.indices) for name, value in totals.items()}

        mean: dict[str, Tensor] = {}
        for checkpoint in checkpoints:
            key, settings = self._squares_key(checkpoint, checkpoints if bases else None)
            found = self._pass("eigenvalues", checkpoint, key, settings, shapes, update, finish)
            for name, value in found.items():
                share = value / len(checkpoints)
                mean[name] = mean[name] + share if name in mean else share
        return mean

    def _squares_key(
        self, checkpoint: Weights, basis: Sequence[Weights] | None
    ) -> tuple[str, dict[str, Any]]:
        of = None if basis is None else [_name(c) for c in basis]
        settings = {**self.settings, "what": "squares", "weights": _name(checkpoint), "basis": of}
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
            start, batch_size = 0, self.batch_size
            left = self.store.snapshot(key)
            if left is not None:
                start, batch_size = left[1]["next"], left[1]["batch_size"]
                totals = {name: value.to(self.passes.device) for name, value in left[0].items()}
            self.passes.load(checkpoint.weights(), checkpoint.step)
            left_over = cut(len(self.indices), batch_size)[-(-start // batch_size) :]
            blocks = [self.indices[b] for b in left_over]
            label = f"{work}, step {checkpoint.step}"
            for sweep in self.passes.sweeps(self.data, blocks, self._signal, label):
                update(totals, sweep)
                if sweep.last:
                    start += len(sweep.indices)
                    self.store.offer_snapshot(
                        key, totals, {"next": start, "batch_size": batch_size}
                    )
            result = finish(totals)
            self.store.put(key, result, settings)
        return result


def _name(checkpoint: Weights) -> str:
    """Weights by content; and by step, because pseudo-targets are drawn anew at each."""
    return f"{checkpoint.sha256}@{checkpoint.step}"


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """What sums are kept in: at least float32."""
    return torch.promote_types(dtype, torch.float32)
