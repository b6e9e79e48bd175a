"""Where a gradient method works: one run on one device, query vectors, their readouts."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whence.data import Batches, cut
from whence.layers.capture import ParameterBlock, TrackedLayer
from whence.layers.passes import Passes, Signal, Weights
from whence.operators import Basis, Curvature, FitData, Fitter, Readout, cost
from whence.operators.fit import OffloadedFactors, accumulator, grouped
from whence.operators.gauss_newton import INSTEAD, GaussNewton, Layout
from whence.operators.products import FactoredReadout, build, turn
from whence.run import Run, Segment
from whence.study import Study

Readouts = dict[str, Readout | FactoredReadout]
LOSS, MEASUREMENT = Signal("loss"), Signal("measurement")


@dataclass(frozen=True)
class Term:
    """Checkpoints whose training gradients are multiplied by the same vectors."""

    stage: str
    checkpoints: Sequence[Weights]


@dataclass(frozen=True)
class Vectors:
    """q vectors over the tracked parameters: block → matrices (q, o, width), each in some basis."""

    values: dict[str, Tensor]
    bases: dict[str, Basis | None]

    def apply(
        self,
        curvature: Curvature,
        function: Callable[[str, Tensor], Tensor],
        *,
        keep: bool = False,
        last: bool = False,
    ) -> Vectors:
        """f(H) v: turned into the eigenbasis, where f acts on eigenvalues; left there, if it stays.

        Args:
            keep: blocks that the curvature does not know stay as they are; else they are left out.
            last: these vectors are needed no more, so their memory can be reused.
        """
        values = dict(self.values) if keep else {}
        bases = dict(self.bases) if keep else {}
        for name in self.values.keys() & curvature.keys():
            value, block = self.values[name], curvature[name]
            turned = turn(value, self.bases[name], block.basis)
            fresh = last or turned is not value
            factor = function(name, block.eigenvalues)
            values[name] = turned.mul_(factor) if fresh else turned * factor
            bases[name] = block.basis
            if isinstance(curvature, OffloadedFactors):  # whose basis goes
                values[name], bases[name] = turn(values[name], block.basis, None), None
        return Vectors(values, bases)

    def own(self) -> Vectors:
        """The same vectors in the parameters' own coordinates."""
        values = {name: turn(value, self.bases[name], None) for name, value in self.values.items()}
        return Vectors(values, dict.fromkeys(values))

    def times(self, factors: Mapping[str, Tensor], *, keep: bool = False) -> Vectors:
        """Multiplied elementwise (in their basis); other blocks stay (`keep`) or are left out."""
        values = dict(self.values) if keep else {}
        values |= {n: v * factors[n] for n, v in self.values.items() if n in factors}
        return Vectors(values, {name: self.bases[name] for name in values})

    def squared_norm(self) -> Tensor:
        """‖v‖² of each query, (q,)."""
        return torch.stack([v.flatten(1).square().sum(1) for v in self.values.values()]).sum(0)


@dataclass
class Workspace:
    """One run of a study laid out for work on one device: data, passes, batch size, memory."""

    study: Study
    run: Run
    query: Batches | None
    stages: list[str]  # whose examples are scored
    passes: dict[str, Passes]
    batch_size: int
    memory: int
    diagnostics: dict[str, Any] = field(default_factory=dict)
    account: dict[str, Any] = field(default_factory=dict)  # what is added up block by block
    segments: list[Segment] = field(default_factory=list)  # if they were found by looking
    room: int | None = None  # bytes on the device for factors; None for as many as they need

    @property
    def final_passes(self) -> Passes:
        return self.passes[self.study.stages[-1]]

    @property
    def zero(self) -> Tensor:
        """A number where vectors live, and as precise as they are."""
        return torch.zeros(
            (), device=self.final_passes.device, dtype=accumulator(self.final_passes.dtype)
        )

    @property
    def layers(self) -> list[TrackedLayer]:
        """The tracked layers of all stages; where several have one, the last stage's."""
        stages = reversed(self.study.stages)
        found = [site for stage in stages for site in self.passes[stage].tracked.layers]
        return list({site.name: site for site in reversed(found)}.values())

    @property
    def blocks(self) -> dict[str, ParameterBlock]:
        return {block.name: block for site in self.layers for block in site.blocks}

    @property
    def positions(self) -> dict[str, int]:
        """t of every block."""
        stages = self.study.stages
        return {k: t for s in stages for k, t in self.passes[s].tracked.positions.items()}

    def rates(self, rate: Callable[[str], float]) -> dict[str, float]:
        """A learning rate of every block; its weight and bias must agree on it."""
        found = {}
        for site in self.layers:
            both = {name: rate(name) for name in site.parameter_names()}
            if len(set(both.values())) > 1:
                said = ", ".join(f"{name} {value:.3g}" for name, value in both.items())
                raise ValueError(
                    f"layer {site.name} has its weight and bias in groups with different rates "
                    f"({said}): no single η̄ fits it. Leave it out with Study(layers=...)"
                )
            found.update(dict.fromkeys((b.name for b in site.blocks), both[site.weight]))
        return found

    def parts(self, stages: Sequence[str]) -> list[FitData]:
        """The data of these stages that the run trained on, and what it goes through."""
        return [
            FitData(
                self.passes[stage],
                self.study.data[stage],
                self.study.used(self.run, stage),
                self.study.identity(self.run, stage, self.passes[stage].tracked),
            )
            for stage in stages
        ]

    def fitter(self, stages: Sequence[str], **settings: Any) -> Fitter:
        """Fits curvature on the data of these stages, pooled."""
        parts = self.parts(stages)
        return Fitter(
            parts,
            self.study.store(self.run),
            self.batch_size,
            room=self.room,
            notes=self.diagnostics,
            **settings,
        )

    def gauss_newton(
        self,
        parts: Sequence[FitData],
        checkpoints: Sequence[Weights],
        names: Container[str],
        queries: int,
    ) -> GaussNewton:
        """The true matrix over these blocks, for so many vectors at a time."""
        dtype = self.final_passes.dtype
        if dtype.itemsize < 4:
            raise ValueError(
                f"{dtype} cannot resolve products with the Gauss-Newton matrix: use dtype=float32 "
                f"or float64, or {INSTEAD}"
            )
        room = (
            min(2**28, self.memory // 4)
            if self.final_passes.device.type == "cpu"
            else self.memory // 4
        )
        H = GaussNewton(
            parts,
            checkpoints,
            Layout(block for name, block in self.blocks.items() if name in names),
            self.batch_size,
            numbers=room // dtype.itemsize,
            queries=queries,
        )
        H.check()
        return H

    @property
    def factor_groups(self) -> int:
        """How many groups of layers EK-FAC's factors are fitted in."""
        dtype = accumulator(self.final_passes.dtype)
        return len(grouped(self.blocks.values(), "ekfac", dtype, self.room))

    def matrices(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors by parameter name as the matrices (o, width) of the blocks; absent ones are 0."""
        found = {}
        for site in self.layers:
            module: Any = site.modules[0]
            weights = site.kind.matrices(module, self._given(tensors, site.weight, module.weight))
            columns = [[weight] for weight in weights]
            if site.bias:
                bias = self._given(tensors, site.bias, module.bias)
                for held, part in zip(columns, site.kind.vectors(module, bias), strict=True):
                    held.append(part.unsqueeze(1))
            for block, held in zip(site.blocks, columns, strict=True):
                found[block.name] = torch.cat(held, 1)
        return found

    def _given(self, tensors: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor:
        dtype = accumulator(self.final_passes.dtype)
        return tensors.get(name, torch.zeros_like(like)).to(self.final_passes.device, dtype)

    def gradients(
        self,
        data: Batches,
        stage: str,
        indices: np.ndarray,
        checkpoint: Weights,
        bases: dict[str, Basis | None],
    ) -> Vectors:
        """∇f(q, θ_c) of these queries, each block built in its basis."""
        passes, dtype = self.passes[stage], accumulator(self.final_passes.dtype)
        passes.load(checkpoint)
        values = {
            b.name: torch.empty(len(indices), *b.shape, dtype=dtype, device=passes.device)
            for b in passes.tracked.blocks
        }
        start = 0
        blocks = [indices[b] for b in cut(len(indices), self.batch_size)]
        for sweep in passes.backward_passes(data, blocks, MEASUREMENT):
            rows = slice(start, start + len(sweep.indices))
            for _, pairs in sweep.pairs:
                for pair in pairs:
                    name = pair.block.name
                    a, s = pair.a.to(dtype), pair.s.to(dtype)
                    values[name][rows] = build(a, s, bases.get(name), pair.block.bias)
            start = rows.stop
        return Vectors(values, {name: bases.get(name) for name in values})

    def own_gradients(
        self, data: Batches, stage: str, indices: np.ndarray, checkpoint: Weights
    ) -> Readouts:
        """∇f(q, θ_c) as functionals of their own, factored where an example is one position."""
        self.passes[stage].load(checkpoint)
        found: dict[str, list[tuple[Tensor, Tensor | None]]] = {
            block.name: [] for block in self.passes[stage].tracked.blocks
        }
        blocks = [indices[b] for b in cut(len(indices), self.batch_size)]
        for sweep in self.passes[stage].backward_passes(data, blocks, MEASUREMENT):
            for _, pairs in sweep.pairs:
                for pair in pairs:
                    if pair.a.shape[1] == 1:
                        found[pair.block.name].append((pair.a, pair.s))
                    else:
                        whole = build(pair.a, pair.s, None, pair.block.bias)
                        found[pair.block.name].append((whole, None))
        ready: Readouts = {}
        for name, parts in found.items():
            bias = self.blocks[name].bias
            slopes = [s for _, s in parts if s is not None]
            if len(slopes) == len(parts):
                inputs = torch.cat([a for a, _ in parts])
                ready[name] = FactoredReadout(inputs[:, 0], torch.cat(slopes)[:, 0], bias)
            else:  # among others, batches of documents of one token
                built = [g if s is None else build(g, s, None, bias) for g, s in parts]
                ready[name] = Readout.of(torch.cat(built), None, bias, self.final_passes.dtype)
        return ready

    def readouts(self, vectors: Vectors, scale: float, examples: int) -> Readouts:
        """The vectors, scaled, in whichever basis makes the many inner products cheapest.

        Their memory is reused: the vectors are not good for anything else afterwards.
        """
        ready: Readouts = {}
        for name, value in vectors.values.items():
            block, basis = self.blocks[name], vectors.bases[name]
            t = self.positions[name]
            if basis is not None and (
                cost.rotate_queries(block, len(value)) < cost.rotate_examples(block, t, examples)
            ):
                value, basis = turn(value, basis, None), None
            ready[name] = Readout.of(value.mul_(scale), basis, block.bias, self.final_passes.dtype)
        return ready
