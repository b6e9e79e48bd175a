"""What the optimizer did in a segment: D = η̄K P̄ of every parameter, and weight decay.

An update is θ ← θ - ηP(g + l₂θ) - ηdθ: P = 1 and d = 0 for SGD, P = 1/(√v̂ + ε) for Adam, AdamW and
RMSprop (appendix C), d AdamW's decoupled weight decay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from whence.engine.workspace import Workspace
from whence.errors import InvalidInput, warn
from whence.layers.passes import Weights
from whence.operators import BlockDiagonal
from whence.run import Segment

FLOOR = 0.1  # of roots of second moments: see `preconditioner`
PRECONDITIONED = frozenset({"adam", "adamw", "rmsprop"})


@dataclass(frozen=True)
class Rates:
    """A segment's D and Δ, of every block that it trained.

    Attributes:
        optimizer: its name.
        durations: η̄K.
        applied: D = η̄K P̄.
        shift: Δ = D (damping + l₂) + η̄K d.
        decays: l₂, or d for AdamW.
    """

    optimizer: str
    durations: dict[str, float]
    applied: BlockDiagonal
    shift: dict[str, float | Tensor]
    decays: dict[str, float]

    @classmethod
    def of(
        cls,
        workspace: Workspace,
        segment: Segment,
        *,
        floor: float = 0.0,
        damping: float = 0.0,
        weight_decay: str = "ignore",
    ) -> Rates:
        optimizer = known_optimizer(workspace, segment)
        durations = {k: x for k, x in block_durations(workspace, segment).items() if x}
        applied = BlockDiagonal(durations)
        if optimizer in PRECONDITIONED and not workspace.preconditioned:
            P = preconditioner(workspace, segment, floor=floor)
            applied = BlockDiagonal({k: P[k] * x for k, x in durations.items()})
        decays = block_decays(workspace, segment) if weight_decay == "curvature" else {}
        shift: dict[str, float | Tensor] = {}
        for name, duration in durations.items():
            decay, decoupled = decays.get(name, 0.0), optimizer == "adamw"
            inside, outside = damping + decay * (not decoupled), duration * decay * decoupled
            if inside or outside:
                shift[name] = applied[name] * inside + outside
        return cls(optimizer, durations, applied, shift, decays)


def source_damping(
    workspace: Workspace, floor: float
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """λ = 1/(η̄K) over the whole run, with which influence functions come close to SOURCE; and P̄
    when the optimizer was preconditioned (appendix C)."""
    segments = workspace.run.segments("stages")
    total = dict.fromkeys(workspace.blocks, 0.0)
    for segment in segments:
        for name, duration in block_durations(workspace, segment).items():
            total[name] += duration
    λ = {name: 1 / x if x else float("inf") for name, x in total.items()}
    adaptive = {known_optimizer(workspace, s) in PRECONDITIONED for s in segments}
    if adaptive == {True, False}:
        raise InvalidInput(
            "damping='source' needs one kind of optimizer: this run had a preconditioned one in "
            "some stages and SGD in others. Give a number"
        )
    return λ, {} if adaptive == {False} else preconditioner(workspace, *segments, floor=floor)


def known_optimizer(workspace: Workspace, segment: Segment) -> str:
    """The optimizer of a segment, if its dynamics are known."""
    optimizer = workspace.run.optimizers[segment.stage.name]
    if optimizer != "sgd" and optimizer not in PRECONDITIONED:
        raise InvalidInput(
            f"the optimizer {optimizer!r} of stage {segment.stage.name!r} is not known: use SGD, "
            "Adam, AdamW or RMSprop. For another with a diagonal preconditioner P, build the run "
            "with Run.from_checkpoints(..., optimizer='rmsprop', second_moments=[(1/P - epsilon)², "
            "...]). Influence with a number as damping, and TracIn, work with any optimizer"
        )
    if optimizer in PRECONDITIONED:
        workspace.check_preconditioner(optimizer)
    return optimizer


def block_durations(workspace: Workspace, segment: Segment) -> dict[str, float]:
    """η̄K of every block in a segment, from the parameter group of its weight and bias."""
    rates = workspace.rates(segment.rate)
    if not any(rates.values()):
        warn(
            f"updates {segment.start}..{segment.end} are inert: every tracked layer's rate is 0",
            stacklevel=2,
        )
    return {name: rate * segment.steps for name, rate in rates.items()}


def block_decays(workspace: Workspace, segment: Segment) -> dict[str, float]:
    """Weight decay of every block."""
    decays: dict[str, float] = {}
    for layer in workspace.layers:
        coefficients = [segment.weight_decay(name) for name in layer.parameter_names()]
        if len(set(coefficients)) > 1:
            warn(
                f"layer {layer.name}: weight decay {coefficients[0]} on the weight and "
                f"{coefficients[1]} on the bias; the weight's is used for both",
                stacklevel=2,
            )
        decays.update(dict.fromkeys((b.name for b in layer.blocks), coefficients[0]))
    return decays


def preconditioner(workspace: Workspace, *segments: Segment, floor: float) -> dict[str, Tensor]:
    """P̄: the mean over the segments' checkpoints of 1/(√v̂ + ε), per block (o, width).

    Between rare gradients a parameter's v̂ decays to almost zero. 1/√v̂ is then a step size that none
    of its updates had, because v̂ rises with the gradient itself. `floor` is the smallest value that
    a root √v̂ counts as, as a share of the parameter's root mean v̂.
    """
    checkpoints = [(segment, c) for segment in segments for c in segment.checkpoints]
    mean: dict[str, Tensor] = {}
    for segment, checkpoint in checkpoints:
        moments = checkpoint.second_moments()
        if moments is None:
            optimizer = workspace.run.optimizers[checkpoint.stage]
            raise InvalidInput(
                f"the run used {optimizer!r}, but its checkpoint at step {checkpoint.step} has no "
                "second moments: record it with a Recorder, or give second_moments to "
                "Run.from_checkpoints (or optimizer='sgd' if that is what it was)"
            )
        epsilon = workspace.run.epsilon(checkpoint.stage)
        inverses = {}
        for name, v in moments.items():
            least = floor * float(v.double().mean().sqrt())
            inverses[name] = 1 / (v.double().sqrt().clamp_min(least) + epsilon.get(name, 1e-8))
        _check_moments(workspace, segment, checkpoint.step, moments, inverses)
        for name, value in _matrices(workspace, inverses).items():
            share = value / len(checkpoints)
            mean[name] = mean[name] + share if name in mean else share
    # a layer that was not trained has no moments; its rate is 0, and its P must only be finite
    return {name: torch.where(value > 0, value, 1.0) for name, value in mean.items()}


def run_preconditioner(workspace: Workspace) -> dict[str, Tensor]:
    """P̄^½ over all checkpoints of the run, with the floor of `Source`."""
    P = preconditioner(workspace, *workspace.run.segments("stages"), floor=FLOOR)
    return {name: value.sqrt() for name, value in P.items()}


def preconditioner_at(workspace: Workspace, checkpoint: Weights) -> dict[str, Tensor] | None:
    """1/(√v̂ + ε) at one checkpoint, per block (o, width); None for SGD, whose P is 1."""
    for segment in workspace.run.segments("stages"):
        matching = tuple(c for c in segment.checkpoints if c.sha256 == checkpoint.sha256)
        if matching:
            if known_optimizer(workspace, segment) not in PRECONDITIONED:
                return None
            return preconditioner(workspace, replace(segment, checkpoints=matching[:1]), floor=0.0)
    raise InvalidInput(f"the checkpoint at step {checkpoint.step} is not one of the run's")


def _matrices(workspace: Workspace, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by parameter name as the matrices (o, width) of the blocks; absent ones are 0, and so
    are those of another stage's layer that has the same name but another shape."""

    def given(name: str, like: Tensor) -> Tensor:
        tensor = tensors.get(name, torch.zeros_like(like))
        return (tensor if tensor.shape == like.shape else torch.zeros_like(like)).to(workspace.zero)

    matrices: dict[str, Tensor] = {}
    for layer in workspace.layers:
        parts = layer.matrices({name: given(name, p) for name, p in layer.parameters().items()})
        matrices |= {b.name: part for b, part in zip(layer.blocks, parts, strict=True)}
    return matrices


def _check_moments(
    workspace: Workspace,
    segment: Segment,
    step: int,
    moments: Mapping[str, Tensor],
    inverses: Mapping[str, Tensor],
) -> None:
    """Every parameter that the segment trains must have sound second moments."""
    for layer in workspace.passes[segment.stage.name].tracked.layers:
        parameters = layer.parameters() if segment.rate(layer.weight) else {}
        for name, parameter in parameters.items():
            problem = None
            if name not in moments:
                problem = "are missing"
            elif moments[name].shape != parameter.shape:
                shapes = f"{tuple(moments[name].shape)}, not {tuple(parameter.shape)}"
                problem = f"have shape {shapes}"
            elif not bool((moments[name] >= 0).all() & moments[name].isfinite().all()):
                problem = "are negative, NaN or infinite"
            elif not bool(inverses[name].isfinite().all()):
                problem = "are 0 somewhere, and so is epsilon: 1/(√v̂ + ε) is infinite"
            if problem:
                raise InvalidInput(
                    f"the second moments of {name} at step {step} {problem}: give the optimizer's "
                    "own, bias-corrected, and its epsilon"
                )
