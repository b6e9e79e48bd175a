"""Ideas about SOURCE's response and about more runs than were trained.

    longer       F_r(l M): training follows a gradient for l times as long
    noise-aware  δ / (M + δ) instead of F_r(M): the response of `whence.Best`, layer by layer
    redrawn      the mean scores of a run and of others like it, which nobody trained

A change of the initial weights survives a segment by D^½ exp(-M) D^-½ (Eq. 13). So the same
training from other initial weights would have reached checkpoint c, to first order, at

    θ_c + D^½ exp(-M_c) D^-½ τ ε          ε ~ N(0, 1)

M_c is M up to c, and τ the standard deviation of a parameter's initial weights (of its final ones
where they are not recorded). Where the data decided about weights, hardly anything changes; where
only the draw of the initial weights did, they are drawn again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import whence
from whence.engine.dynamics import FLOOR, Rates
from whence.engine.queries import Queries
from whence.engine.workspace import ComputeOptions, Term, Workspace
from whence.methods.gradient import Stretch, Vectors
from whence.operators import BlockVectors, coupling
from whence.operators.operator import survival
from whence.run import Run
from whence.run.checkpoint import Checkpoint, TensorFile


class Longer(whence.Source):
    """`Source` whose response is `length` times as long."""

    def __init__(self, *arguments: Any, length: float, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.length = length

    def operator(
        self, workspace: Workspace, term: Term, rates: Rates, resident: int
    ) -> tuple[Any, Any, dict[str, float]]:
        M, root, c = super().operator(workspace, term, rates, resident)
        return M.scaled(dict.fromkeys(root, self.length)), root, c


class NoiseAware(whence.Source):
    """`Source` of one segment for each stage, with the response δ / (M + δ)."""

    def __init__(self, *arguments: Any, relative_damping: float, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.relative_damping = relative_damping

    def vectors(
        self, workspace: Workspace, prepared: dict[int, Stretch], queries: Queries
    ) -> Vectors:
        δ, last = self.relative_damping, max(prepared)
        v = self.query_gradient(workspace, queries, prepared[last].M.bases)
        for k in reversed(prepared):
            segment = prepared[k]
            response, survived = segment.M.apply(
                (lambda x: δ / (x + δ), survival), segment.root * v
            )
            assert response is not None and survived is not None
            if segment.scored:
                yield [k], segment.root * response, -1.0 / segment.count
            v = v.updated(survived / segment.root)


@dataclass(frozen=True)
class Redrawn:
    """A method on a run and on others like it, drawn instead of trained; the mean of their scores.

    Attributes:
        method: scores each of them.
        count: how many runs, with the one that was trained.
        seed: of the draws.
    """

    method: Any
    count: int = 8
    seed: int = 0

    def attribute(self, study: whence.Study, query: Any, **options: Any) -> whence.Scores:
        (run,) = study.runs
        others = [
            redrawn(study, run, torch.Generator().manual_seed(self.seed * self.count + k))
            for k in range(1, self.count)
        ]
        several = whence.Study(
            study.models,
            study.tasks,
            study.train,
            [run, *others],
            collate=study.collate,
            layers=study.layers,
        )
        scores: whence.Scores = self.method.attribute(several, query, **options)
        return scores


@torch.no_grad()
def redrawn(study: whence.Study, run: Run, generator: torch.Generator) -> Run:
    """The run from other initial weights, to first order."""
    workspace = Workspace.lay_out(study, run, ComputeOptions(progress=False))
    changes: dict[str, dict[str, Tensor]] = {}  # by checkpoint
    draws = _initial(workspace, generator)
    matrices = {
        block.name: matrix.unsqueeze(0).to(workspace.zero)
        for layer in workspace.layers
        for block, matrix in zip(layer.blocks, layer.matrices(draws), strict=True)
    }
    v = BlockVectors(matrices, dict.fromkeys(matrices))
    for segment in run.segments("stages"):
        D = Rates.of(workspace, segment, floor=FLOOR).applied
        stages = [segment.stage.name]
        M = workspace.curvature("auto", stages, segment.checkpoints, D)
        M = M.whitened(workspace.diagonal(D))
        M, root = M.scaled(coupling(M)), D.sqrt()
        rates = run.learning_rates.sum(1)
        total = rates[segment.start : segment.end].sum()
        shares = [float(rates[segment.start : c.step].sum() / total) for c in segment.checkpoints]
        survivals = [partial(survival, duration=share) for share in shares]
        for checkpoint, survived in zip(
            segment.checkpoints, M.apply(survivals, root * v), strict=True
        ):
            assert survived is not None
            changed = v.updated(survived / root)
            changes[checkpoint.sha256] = _by_parameter(workspace, changed, D)
        v = changed

    def moved(checkpoint: Checkpoint) -> Checkpoint:
        weights = checkpoint.weights()
        for name, change in changes[checkpoint.sha256].items():
            weights[name] = weights[name] + change.to(weights[name])
        return replace(checkpoint, files=TensorFile.adopt(weights))

    moved_checkpoints = [moved(c) for c in run.checkpoints]
    nothing: dict[str, Any] = {"between": [], "batches": None, "initial": None, "path": None}
    return replace(run, checkpoints=moved_checkpoints, **nothing)


def _initial(workspace: Workspace, generator: torch.Generator) -> dict[str, Tensor]:
    """τ ε of every parameter of the tracked layers."""
    known = (workspace.run.initial or workspace.run.final).weights()
    draws = {}
    for layer in workspace.layers:
        for name in layer.parameters():
            τ = known[name].double().std(correction=0)
            draws[name] = torch.randn(known[name].shape, generator=generator).double() * τ
    return draws


def _by_parameter(
    workspace: Workspace, vectors: BlockVectors, trained: Mapping[str, Any]
) -> dict[str, Tensor]:
    """One vector's matrices as tensors of the parameters, of the trained layers."""
    tensors: dict[str, Tensor] = {}
    for layer in workspace.layers:
        if not all(block.name in trained for block in layer.blocks):
            continue
        zeros = {name: torch.zeros_like(p).double() for name, p in layer.parameters().items()}
        # each number of a parameter is in one place of the matrices: the adjoint is the inverse
        adjoint: Any = torch.func.vjp(layer.matrices, zeros)[1]
        (back,) = adjoint([vectors.matrix(block.name)[0].double() for block in layer.blocks])
        tensors |= back
    return tensors
