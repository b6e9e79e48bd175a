"""TRAK (Park et al., 2023): influence functions in a random projection, over several models.

    φ(m) = P ∇f(m, θ_T)        Φ = [φ(1); …; φ(N)]        Q = diag(-∂L/∂f)
    values[q, ·] = φ(q)ᵀ (ΦᵀΦ)⁻¹ Φᵀ Q                                            (appendix B.4)

f is the measurement (for classification the margin, whose -∂L/∂f is 1 - p), P random signs. Since
Q φ(m) = -P ∇L(m) wherever the loss is a function of the measurement, one run's scores are

    values[q, m] = -⟨w_q, ∇L(m, θ_T)⟩        w_q = Pᵀ (ΦᵀΦ)⁻¹ φ(q)

which needs no Q and is also defined where the loss is not such a function. So the projected
gradients are never kept: one pass adds up ΦᵀΦ, another takes inner products with the few w_q.

Over several runs the two factors are averaged separately, as published: (mean of φᵀ(ΦᵀΦ)⁻¹Φᵀ) times
(mean of Q). Each run, and so each P, sees all examples, also those it was not trained on. Stages
are pooled, as the paper does. The sign is that of f(with m) - f(without m).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whence.data import Batches, cut
from whence.engine.workspace import LOSS, MEASUREMENT, Readouts, Term, Vectors, Workspace
from whence.layers.capture import ParameterBlock
from whence.layers.passes import Passes, Signal
from whence.methods.gradient import GradientMethod
from whence.operators import FitData, cost, key_of
from whence.projections import Projection, Random, check, gather, moments, projected
from whence.projections.projection import PROBED
from whence.projections.random import shares
from whence.run import Run


@dataclass(frozen=True)
class Prepared:
    """P, Cholesky factors of ΦᵀΦ (one per part of P), and Q (None for one run: see above)."""

    projection: Projection
    factors: list[Tensor]
    weights: dict[str, Tensor] | None


class Trak(GradientMethod):
    """TRAK with any number of runs; the paper's ensembles are of runs on half the data.

    Args:
        dimension: of the projection. More is nearer to the gradients themselves, up to where ΦᵀΦ
            becomes ill-conditioned; at most the number of training examples.
        seed: of the projection; every run has its own.
        stage: attribute to this stage's examples only (default: all stages').
        joint: one projection for all layers together, or one for each, which takes ΦᵀΦ as
            block-diagonal and shares the dimension out equally.
        damping: λ in (ΦᵀΦ + NλI)⁻¹. 0 as published.
    """

    _shared = True

    def __init__(
        self,
        dimension: int = 4096,
        seed: int = 0,
        stage: str | None = None,
        joint: bool = True,
        damping: float = 0.0,
    ) -> None:
        if dimension < 1:
            raise ValueError(f"dimension={dimension} must be at least 1")
        if not 0 <= damping < float("inf"):
            raise ValueError(f"damping={damping!r} must be zero or a positive number")
        self.dimension, self.seed, self.stage = dimension, seed, stage
        self.joint, self.damping = bool(joint), float(damping)

    def terms(self, workspace: Workspace) -> list[Term]:
        return [Term(stage, [workspace.run.final]) for stage in workspace.study.stages]

    def prepare(self, workspace: Workspace, terms: list[Term]) -> Prepared:
        stages = workspace.study.stages
        examples = sum(len(workspace.study.data[stage]) for stage in stages)
        if self.damping == 0:
            check_rank(self.dimension, examples)
        projection = random_projection(workspace, self.dimension, self.joint, self.seed)
        try_out(workspace, projection)
        grams = measured_moments(workspace, projection)
        with workspace.final_passes.clock("factorisation"):
            factors = [
                cholesky(gram, self.damping, examples, workspace.final_passes.dtype)
                for gram in grams
            ]
        return Prepared(projection, factors, ensemble_weights(workspace))

    def vectors(
        self,
        workspace: Workspace,
        prepared: Prepared,
        data: Batches,
        stage: str,
        indices: np.ndarray,
        examples: int,
    ) -> Iterator[tuple[int, Readouts]]:
        passes, projection = workspace.passes[stage], prepared.projection
        passes.load(workspace.run.final)
        batches = [indices[b] for b in cut(len(indices), workspace.batch_size)]
        pieces = projected(passes, data, batches, MEASUREMENT, projection, workspace.memory // 4)
        φ = torch.cat([piece.rows for piece in pieces])
        w: dict[str, Tensor] = {}
        for part, columns, factor in zip(
            projection.parts, projection.columns, prepared.factors, strict=True
        ):
            assert isinstance(part, Random)
            solved = torch.cholesky_solve(φ[:, columns].double().T, factor).T  # (ΦᵀΦ)⁻¹ φ
            w |= part.lift(solved)
        sign = -1.0 if prepared.weights is None else 1.0
        ready = workspace.readouts(Vectors(w, dict.fromkeys(w)), sign, examples)
        yield from ((k, ready) for k in range(len(workspace.study.stages)))

    def training(
        self, workspace: Workspace, prepared: Prepared
    ) -> tuple[Signal, Mapping[str, Tensor] | None]:
        return (LOSS, None) if prepared.weights is None else (MEASUREMENT, prepared.weights)

    def passes_needed(self, workspace: Workspace) -> dict[str, int]:
        return {"projection": 1, "scores": 1}

    def operations(self, workspace: Workspace, queries: int) -> dict[str, float]:
        blocks, positions = (
            workspace.final_passes.tracked.blocks,
            workspace.final_passes.tracked.positions,
        )
        work = sum(cost.forward_backward(b, positions[b.name]) for b in blocks)
        work += 2.0 * cost.vector_numbers(workspace.final_passes.tracked) * self.dimension
        return super().operations(workspace, queries) | {"projection": work}

    def numbers_held(self, workspace: Workspace, queries: int) -> int:
        return 3 * self.dimension**2 + queries * cost.vector_numbers(workspace.final_passes.tracked)

    def _key(self, workspace: Workspace) -> str:
        """With several runs, each one's scores depend on all of them, through Q."""
        own, runs = super()._key(workspace), [run.fingerprint for run in workspace.study.runs]
        return own if len(runs) == 1 else key_of({"own": own, "runs": runs})


def trained_blocks(workspace: Workspace) -> list[ParameterBlock]:
    """The blocks that training moved: a frozen layer does not respond to the data."""
    rates = workspace.rates(workspace.run.peak_rate)
    found = [block for name, block in workspace.blocks.items() if rates[name]]
    if not found:
        raise ValueError(
            "the run's learning rates are 0 for every tracked layer: nothing was trained, so "
            "nothing can be attributed. Give the rates that were really applied"
        )
    return found


def random_projection(workspace: Workspace, dimension: int, joint: bool, seed: int) -> Projection:
    """Random signs keyed by the seed and the final weights: another run has another P."""
    blocks = trained_blocks(workspace)
    check_dimension(dimension, blocks, workspace.memory)
    parts = [(blocks, dimension)]
    if not joint:
        parts = [([b], d) for b, d in zip(blocks, shares(blocks, dimension), strict=True)]
    key = int(key_of({"seed": seed, "weights": workspace.run.final.sha256}), 16)
    device, dtype = workspace.final_passes.device, workspace.final_passes.dtype
    return Projection([Random(own, d, key, device, dtype) for own, d in parts])


def try_out(workspace: Workspace, projection: Projection) -> None:
    """Refuse a projection that does not work here, by the gradients of a few examples."""
    data = workspace.study.data[workspace.study.stages[-1]]
    workspace.final_passes.load(workspace.run.final)
    check(
        projection,
        gather(workspace.final_passes, data, np.arange(min(PROBED, len(data))), MEASUREMENT),
    )


def check_dimension(dimension: int, blocks: Sequence[ParameterBlock], memory: int) -> None:
    """Refuse a projection to more numbers than parameters, or than there is memory for."""
    parameters = sum(block.size for block in blocks)
    if dimension > parameters:
        raise ValueError(
            f"dimension={dimension}, but only {parameters} parameters are tracked and trained: "
            f"use dimension<={parameters}"
        )
    needed = 3 * 8 * dimension**2
    if needed > memory:
        raise ValueError(
            f"dimension={dimension} needs {needed / 2**30:.1f} GiB for matrices of that size, and "
            f"memory allows {memory / 2**30:.1f}: use a smaller dimension, or more memory="
        )


def check_rank(dimension: int, examples: int) -> None:
    """Refuse a dimension in which ΦᵀΦ cannot have an inverse."""
    if dimension > examples:
        raise ValueError(
            f"dimension={dimension}, but there are only {examples} training examples, so that "
            f"ΦᵀΦ has no inverse: use dimension<={examples} (well below it is better), or a damping"
        )


def measured_moments(workspace: Workspace, projection: Projection) -> list[Tensor]:
    """ΦᵀΦ over all examples of all stages at the final model, one per part of the projection."""
    study, run = workspace.study, workspace.run
    parts = []
    for stage in study.stages:
        everything = np.arange(len(study.data[stage]))
        identity = study.identity(run, stage, workspace.passes[stage].tracked) | {"used": "all"}
        parts.append(FitData(workspace.passes[stage], study.data[stage], everything, identity))
    settings = {
        "what": "moments of projected measurement gradients",
        "projection": [repr(part) for part in projection.parts],
        "identity": [part.identity for part in parts],
        "tasks": [[repr(study.tasks[s]), study.probe[s]["measurements"]] for s in study.stages],
        "weights": run.final.sha256,
        "dtype": workspace.final_passes.arithmetic,
    }
    where, room = study.store(run), workspace.memory // 4
    batch = workspace.batch_size
    return moments(parts, run.final, MEASUREMENT, projection, where, settings, batch, room)


def cholesky(gram: Tensor, damping: float, examples: int, dtype: torch.dtype) -> Tensor:
    """The Cholesky factor of ΦᵀΦ + NλI; refused where Φ's columns are linearly dependent."""
    d = len(gram)
    damped = gram.clone()
    damped.diagonal().add_(damping * examples)
    factor: Tensor
    factor, failed = torch.linalg.cholesky_ex(damped)
    pivots = factor.diagonal().square()
    # what the rounding of φ in its own precision, and of ΦᵀΦ in float64, would leave of a zero
    noise = max((8 * torch.finfo(dtype).eps) ** 2, 8 * d * torch.finfo(torch.float64).eps)
    if bool(failed) or not bool(pivots.min() > noise * pivots.max()):
        raise ValueError(
            f"ΦᵀΦ ({d} × {d}) is singular: the projected gradients of the {examples} training "
            "examples are linearly dependent. Use a smaller dimension, or a damping; the mean "
            f"diagonal entry of ΦᵀΦ/N is {float(gram.diagonal().mean()) / examples:.1e}"
        )
    return factor


# -- Q -----------------------------------------------------------------------------------------


def ensemble_weights(workspace: Workspace) -> dict[str, Tensor] | None:
    """Q averaged over the study's runs, (n,) per stage; None if not needed, or not defined."""
    runs = workspace.study.runs
    if len(runs) == 1:
        return None
    means: dict[str, Tensor] = {}
    for run in runs:
        for stage in workspace.study.stages:
            weights, along = _weights(workspace, run, stage)
            if not along:
                task = workspace.study.tasks[stage]
                said = (
                    f"the loss of {task!r} is not a function of its measurement, so that TRAK's Q "
                    "is not defined: scores are averaged over runs as they are, with -∇L in place "
                    "of Q∇f"
                )
                warnings.warn(said, stacklevel=2)
                workspace.diagnostics["ensemble"] = said
                return None
            share = weights / len(runs)
            means[stage] = means[stage] + share if stage in means else share
    return means


def _weights(workspace: Workspace, run: Run, stage: str) -> tuple[Tensor, bool]:
    """A run's Q of a stage's examples (n,), and whether the loss is a function of the measurement.

    Kept with the run's factors, because every run of an ensemble asks for all of them.
    """
    passes, study = workspace.passes[stage], workspace.study
    identity = study.identity(run, stage, passes.tracked)
    settings = {
        "what": "loss by measurement",
        # not "used": all examples are; nor the probe, which is of the run that is at work
        "identity": {k: v for k, v in identity.items() if k not in ("used", "probe")},
        "task": repr(study.tasks[stage]),
        "weights": run.final.sha256,
        "dtype": passes.arithmetic,
    }
    key, store = key_of(settings), study.store(run)
    found = store.get(key)
    if found is None:
        passes.load(run.final)
        blocks = cut(len(study.data[stage]), workspace.batch_size)
        with passes.clock("weights"):
            parts = [
                loss_by_measurement(passes, batch)
                for _, batch in study.data[stage].stream(
                    blocks, passes.device, passes.dtype, passes.workers
                )
            ]
        slopes, off = (torch.cat(column) for column in zip(*parts, strict=True))
        found = {"weights": -slopes, "along": ~off.any()}
        store.put(key, found, settings)
    return found["weights"].to(passes.device), bool(found["along"])


def loss_by_measurement(passes: Passes, batch: Any) -> tuple[Tensor, Tensor]:
    """∂L/∂f of each example, (n,), and where the two gradients in the outputs are not parallel."""
    task = passes.task
    outputs = task.outputs(passes.model, batch).detach().requires_grad_()
    with torch.enable_grad():
        values = task.losses(outputs, batch).sum(), task.measurements(outputs, batch).sum()
        wide = torch.promote_types(outputs.dtype, torch.float32)
        loss, measured = (
            torch.autograd.grad(value, outputs)[0].flatten(1).to(wide) for value in values
        )
    # in units of the largest entry: the squares of small ones would be zero
    unit = measured.abs().amax(1, keepdim=True)
    unit = torch.where(unit > 0, unit, 1.0)
    loss, measured = loss / unit, measured / unit
    squares = measured.square().sum(1)
    slopes = (loss * measured).sum(1) / torch.where(squares > 0, squares, 1.0)
    rest = torch.linalg.vector_norm(loss - slopes.unsqueeze(1) * measured, dim=1)
    rounding = 64 * torch.finfo(outputs.dtype).eps
    allowed = 1e-3 * torch.linalg.vector_norm(loss, dim=1) + rounding * squares.sqrt()
    return slopes, rest > allowed
