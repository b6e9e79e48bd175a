"""SOURCE: segmented stationary unrolling for counterfactual estimation (Bae et al., 2024).

Training is cut into L segments in which curvature H̄_ℓ, gradients ḡ_ℓ and learning rate η̄_ℓ are
taken as constant. Then

    values[q, m] = -(1/N) ∇f(q, θ_T)ᵀ Σ_ℓ S̄_L ⋯ S̄_{ℓ+1} F_r(H̄_ℓ) ḡ_ℓ(m)            (Eq. 20-22)
    S̄_ℓ = exp(-η̄_ℓ K_ℓ H̄_ℓ)          F_r(σ) = (1 - exp(-η̄_ℓ K_ℓ σ)) / σ

The products are taken from the left, on the few query gradients; the training gradients are never
transformed. With momentum β the rate is η̄/(1-β); preconditioned optimizers have a form of their
own (see `dynamics`). The sign is that of f(with m) - f(without m).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whence.data import Batches
from whence.engine.workspace import Readouts, Term, Workspace
from whence.layers.passes import Weights
from whence.methods.dynamics import HELD, Dynamics, Exact, Plain, Preconditioned, Whole
from whence.methods.gradient import GradientMethod
from whence.methods.segmentation import automatic
from whence.operators import Fitter, check_choices, cost
from whence.run import Segment

PRECONDITIONED = ("adam", "adamw", "rmsprop")
FORGOTTEN = 1e-6  # share of ‖v‖² below which nothing is left of what came before a segment
DAMPING = 1e-8  # of the preconditioned form's inverse
WHOLE = "gauss-newton"
USUAL = 40  # Lanczos steps that the whole matrix takes, for the estimate


@dataclass(frozen=True)
class Prepared:
    """A segment: where its gradients are taken, how it acts, and N."""

    segment: Segment
    points: Sequence[Weights]
    dynamics: Dynamics
    examples: int


class Source(GradientMethod):
    """SOURCE for SGD (momentum or not), Adam, AdamW and RMSprop, under any schedule.

    Args:
        segments: how many segments to deal the checkpoints into, a list of the updates at which
            they end, "stages", or "auto" (a new one where the curvature has changed).
        curvature: "ekfac", "kfac", "diagonal" or "identity", layer by layer; or "gauss-newton", the
            whole matrix of all layers together, for scores about as large as the real changes, at
            the price of some dozens of passes over the data for each checkpoint.
        fisher: "sampled" (seeded pseudo-targets), "exact" (one backward pass per output) or
            "empirical" (true targets).
        stage: attribute to this stage's examples only (default: all stages').
        damping: added to the eigenvalues. Default: none for SGD, where F_r needs none, and 1e-8 in
            the inverse of the preconditioned form. "preconditioner": there (H̄ + P̄⁻¹/(η̄K))⁻¹ in
            place of the exponential and the inverse (appendix C, last equation).
        weight_decay: "ignore" it, as the paper does, or count it as "curvature".
        exact: for Adam and its kin, take the whole curvature in the exponential too, and need no
            inverse: appendix C as it stands, by Lanczos iterations. SGD's form is exact as it is.
        floor: for Adam and its kin, the least that a root √v̂ counts as, a share of the root mean v̂
            of its parameter. 0 as published; 0.1 keeps P̄ from values that no update ever saw, where
            gradients are rare.
        seed: of the pseudo-targets.
    """

    def __init__(
        self,
        segments: int | str | Sequence[int] = 3,
        curvature: str = "ekfac",
        fisher: str = "sampled",
        stage: str | None = None,
        damping: float | str | None = None,
        weight_decay: str = "ignore",
        seed: int = 0,
        exact: bool = False,
        floor: float = 0.0,
    ) -> None:
        check_choices(curvature, fisher, WHOLE)
        if curvature == WHOLE:
            _check_whole(segments=segments, fisher=fisher, damping=damping, exact=exact)
        named = damping is None or damping == "preconditioner"
        if not named and not (isinstance(damping, Real) and damping >= 0):
            raise ValueError(f"damping={damping!r} must be zero or positive, or 'preconditioner'")
        if weight_decay not in ("ignore", "curvature"):
            raise ValueError(f"weight_decay={weight_decay!r}: use 'ignore' or 'curvature'")
        if exact and damping == "preconditioner":
            raise ValueError("exact=True needs no inverse, and so no damping='preconditioner'")
        if not (isinstance(floor, (int, float)) and 0 <= floor <= 1):
            raise ValueError(f"floor={floor!r} must be a share, from 0 to 1")
        self.segments = segments if isinstance(segments, (int, str)) else list(segments)
        self.curvature, self.fisher, self.stage = curvature, fisher, stage
        self.damping, self.weight_decay, self.seed = damping, weight_decay, seed
        self.exact, self.floor = bool(exact), float(floor)

    def points(self, segment: Segment) -> Sequence[Weights]:
        """Where a segment's gradients and curvature are taken."""
        return segment.checkpoints

    def cut(self, workspace: Workspace) -> list[Segment]:
        """The segments of the run."""
        if self.segments != "auto":
            return workspace.run.segments(self.segments)
        if not workspace.segments:
            stages = workspace.study.stages
            workspace.segments = automatic(
                workspace, {s: self._fitter(workspace, s) for s in stages}
            )
        return workspace.segments

    def terms(self, workspace: Workspace) -> list[Term]:
        return [Term(s.stage.name, self.points(s)) for s in self.cut(workspace)]

    def prepare(self, workspace: Workspace, terms: list[Term]) -> dict[int, Prepared]:
        """The segments by number, from the first whose examples are scored on: what came before
        has no part in it."""
        segments, prepared = self.cut(workspace), {}
        needed = range(_first_scored(workspace, terms), len(terms))
        for k in needed:
            examples = len(workspace.study.used(workspace.run, terms[k].stage))
            dynamics = self._dynamics(workspace, segments[k], terms[k].checkpoints, len(needed))
            prepared[k] = Prepared(segments[k], terms[k].checkpoints, dynamics, examples)
        workspace.diagnostics["segments"] = [
            described(segment, prepared[k].dynamics if k in prepared else None)
            for k, segment in enumerate(segments)
        ]
        return prepared

    def passes_needed(self, workspace: Workspace) -> dict[str, int]:
        needed, terms = super().passes_needed(workspace), self.terms(workspace)
        fitted = sum(len(term.checkpoints) for term in terms[_first_scored(workspace, terms) :])
        if self.curvature == WHOLE:
            return {"products": USUAL * fitted} | needed
        return needed | fitting_passes(self.curvature, fitted)

    def operations(self, workspace: Workspace, queries: int) -> dict[str, float]:
        work = super().operations(workspace, queries)
        if self.curvature == WHOLE and workspace.query is None:  # every example goes through
            everyone = sum(len(workspace.study.data[stage]) for stage in workspace.stages)
            work["products"] = super().operations(workspace, everyone)["products"]
        return work

    def numbers_held(self, workspace: Workspace, queries: int) -> int:
        if self.curvature == WHOLE:
            return queries * HELD * cost.vector_numbers(workspace.final_passes.tracked)
        return super().numbers_held(workspace, queries)

    def vectors(
        self,
        workspace: Workspace,
        prepared: Any,
        data: Batches,
        stage: str,
        indices: np.ndarray,
        examples: int,
    ) -> Iterator[tuple[int, Readouts]]:
        first, last = min(prepared), max(prepared)
        bases = prepared[last].dynamics.bases
        v = workspace.gradients(data, stage, indices, workspace.run.final, bases)  # ∇f(q, θ_T)
        for k, p in reversed(prepared.items()):
            before = v.squared_norm() if k > first else None
            r, v = p.dynamics.through(
                v, p.segment.stage.name in workspace.stages, survive=k > first
            )
            if before is not None:
                self._note_survival(workspace, k, v.squared_norm() / before)
            if r is not None:
                scale = -1.0 / (p.examples * len(p.points))
                yield k, workspace.readouts(r, scale, examples * len(p.points))
                del r

    def _dynamics(
        self, workspace: Workspace, segment: Segment, points: Sequence[Weights], held: int
    ) -> Dynamics:
        """Those of one of so many segments."""
        optimizer = known_optimizer(workspace, segment)
        adaptive = optimizer in PRECONDITIONED
        if self.floor and not adaptive:
            raise ValueError(f"floor={self.floor} is for Adam, AdamW and RMSprop, not SGD")
        if self.curvature == WHOLE:
            return self._whole(workspace, segment, points, optimizer)
        mixed = adaptive and not self.exact and self.curvature in ("ekfac", "kfac")
        if mixed and self.damping is None and workspace.final_passes.dtype.itemsize < 4:
            raise ValueError(
                f"{workspace.final_passes.dtype} cannot resolve the eigenvalues that a damping of {DAMPING:.0e} "
                "hangs on: use exact=True, damping='preconditioner' or a number such as 1e-2, or "
                "dtype=float32"
            )
        fitter = self._fitter(workspace, segment.stage.name, diagonal=mixed, held=held)
        durations = block_durations(workspace, segment)
        decays = self._decays(workspace, segment)
        if not adaptive:
            if self.damping == "preconditioner":
                raise ValueError("damping='preconditioner' is for Adam, AdamW and RMSprop, not SGD")
            extra = float(self.damping or 0.0)
            shifts = {name: extra + decay for name, decay in decays.items()}
            return Plain(fitter.fit(points), durations, shifts)
        none = dict.fromkeys(decays, 0.0)
        decoupled = optimizer == "adamw"
        P = preconditioner(workspace, segment, floor=self.floor)
        if self.exact:
            extra = float(self.damping or 0.0)
            return Exact(
                fitter.fit(points),
                durations,
                P,
                {name: extra + (0.0 if decoupled else decay) for name, decay in decays.items()},
                decays if decoupled else none,
            )
        damping = DAMPING if self.damping is None and self.curvature != "diagonal" else self.damping
        return Preconditioned(
            fitter.fit(points),
            durations,
            P,
            None if damping == "preconditioner" else float(damping or 0.0),
            l2=none if decoupled else decays,
            decay=decays if decoupled else none,
            diagnostics=workspace.account,
        )

    def _whole(
        self, workspace: Workspace, segment: Segment, points: Sequence[Weights], optimizer: str
    ) -> Whole:
        """The segment's dynamics with the whole Gauss-Newton matrix."""
        stage, adaptive = segment.stage.name, optimizer in PRECONDITIONED
        here = {block.name for block in workspace.passes[stage].tracked.blocks}
        trained = {
            k: ηK for k, ηK in block_durations(workspace, segment).items() if ηK and k in here
        }
        queries = 1 if workspace.query is None else len(workspace.query)
        H = workspace.gauss_newton(workspace.parts([stage]), points, trained, queries)
        P = preconditioner(workspace, segment, floor=self.floor) if adaptive else {}
        decays, decoupled = self._decays(workspace, segment), optimizer == "adamw"
        rates, shift = [workspace.zero.new_zeros(0)], [workspace.zero.new_zeros(0)]
        for name, block in H.layout.blocks.items():
            D = trained[name] * P.get(name, workspace.zero.new_ones(block.shape))
            curved = float(self.damping or 0.0) + (0.0 if decoupled else decays[name])
            pulled = trained[name] * decays[name] if decoupled else 0.0
            rates.append(D.flatten())
            shift.append((D * curved + pulled).flatten())
        memory = workspace.memory // 4
        joined = torch.cat(rates), torch.cat(shift)
        return Whole(
            H, trained, *joined, memory, workspace.final_passes.progress, workspace.account
        )

    def _metadata(self, workspace: Workspace) -> dict[str, Any]:
        if "lanczos" in workspace.account:
            workspace.diagnostics["lanczos"] = workspace.account["lanczos"]
        return super()._metadata(workspace)

    def _fitter(self, workspace: Workspace, stage: str, **more: Any) -> Fitter:
        return workspace.fitter(
            [stage], kind=self.curvature, fisher=self.fisher, seed=self.seed, **more
        )

    def _decays(self, workspace: Workspace, segment: Segment) -> dict[str, float]:
        """Weight decay of every block, where it counts."""
        decays = dict.fromkeys(workspace.blocks, 0.0)
        for site in workspace.layers if self.weight_decay == "curvature" else ():
            both = [segment.weight_decay(name) for name in site.parameter_names()]
            if len(set(both)) > 1:
                warnings.warn(
                    f"layer {site.name}: weight decay {both[0]} on the weight and {both[1]} on the "
                    "bias; the weight's is taken for both",
                    stacklevel=2,
                )
            decays.update(dict.fromkeys((b.name for b in site.blocks), both[0]))
        return decays

    @staticmethod
    def _note_survival(workspace: Workspace, k: int, kept: Tensor) -> None:
        noted = workspace.account.setdefault("survival", {})
        if str(k) in noted:
            return
        share = noted[str(k)] = float(kept.nanmedian().nan_to_num(1.0))  # 0/0: a flat query
        if share < FORGOTTEN:
            segment = workspace.diagnostics["segments"][k]
            warnings.warn(
                f"segment {k + 1} (updates {segment['start']}..{segment['end']}) is saturated: "
                f"only {share:.1e} of what was learned before survives it, so earlier segments "
                "score about zero. If that surprises you, check that losses() is scaled as in "
                "training (mean or sum over tokens) and that the learning rates are right",
                stacklevel=2,
            )


def _check_whole(**given: Any) -> None:
    """Refuse settings that mean nothing where nothing is sampled, factored or inverted."""
    said = {
        "segments": ("auto", "looks at the covariances of EK-FAC: give their number"),
        "exact": (True, "is for EK-FAC: with 'gauss-newton' nothing is left out anyway"),
        "damping": ("preconditioner", "is for an inverse, and with 'gauss-newton' there is none"),
    }
    for name, (value, why) in said.items():
        if given[name] == value and isinstance(given[name], type(value)):
            raise ValueError(f"{name}={value!r} {why}; or use curvature='ekfac'")
    if given["fisher"] != "sampled":
        raise ValueError(
            f"fisher={given['fisher']!r} means nothing to curvature='gauss-newton', which samples "
            "nothing: leave it out"
        )


def known_optimizer(workspace: Workspace, segment: Segment) -> str:
    """The optimizer of a segment, if its dynamics are known."""
    optimizer = workspace.run.optimizers[segment.stage.name]
    if optimizer != "sgd" and optimizer not in PRECONDITIONED:
        raise ValueError(
            f"the optimizer {optimizer!r} of stage {segment.stage.name!r} is not known: SGD, Adam, "
            "AdamW and RMSprop are. For another with a diagonal preconditioner P, make the run "
            "with Run.from_checkpoints(..., optimizer='rmsprop', second_moments=[(1/P - epsilon)², "
            "...]); Influence with a number as damping, and TracIn, do not need to know"
        )
    return optimizer


def block_durations(workspace: Workspace, segment: Segment) -> dict[str, float]:
    """η̄K of every block in a segment, from the parameter group its weight and bias are in."""
    durations = {name: rate * segment.steps for name, rate in workspace.rates(segment.rate).items()}
    if not any(durations.values()):
        warnings.warn(
            f"updates {segment.start}..{segment.end} are inert: every tracked layer's rate is 0",
            stacklevel=2,
        )
    return durations


def preconditioner(
    workspace: Workspace, *segments: Segment, floor: float = 0.0
) -> dict[str, Tensor]:
    """P̄: the mean over the segments' checkpoints of 1/(√v̂ + ε), per block (o, width).

    A parameter whose gradients are rare has hardly any v̂ between them, and 1/√v̂ is what none of its
    updates saw: v̂ rises with the gradient itself. `floor` is the least share of the parameter's
    root mean v̂ that a root counts as.
    """
    checkpoints = [(segment, c) for segment in segments for c in segment.checkpoints]
    mean: dict[str, Tensor] = {}
    for segment, checkpoint in checkpoints:
        moments = checkpoint.second_moments()
        if moments is None:
            raise ValueError(
                f"the run used {workspace.run.optimizers[checkpoint.stage]!r}, but its checkpoint at "
                f"step {checkpoint.step} has no second moments: record it with a Recorder, or give "
                "second_moments to Run.from_checkpoints (or optimizer='sgd' if that is what it was)"
            )
        epsilon = workspace.run.epsilon(checkpoint.stage)
        roots = {n: v.double().sqrt() for n, v in moments.items()}
        least = {n: floor * float(v.double().mean().sqrt()) for n, v in moments.items()}
        inverses = {
            n: 1 / (root.clamp_min(least[n]) + epsilon.get(n, 1e-8)) for n, root in roots.items()
        }
        _check_moments(workspace, segment, checkpoint.step, moments, inverses)
        for name, value in workspace.matrices(inverses).items():
            share = value / len(checkpoints)
            mean[name] = mean[name] + share if name in mean else share
    # what was not trained has no moments; its rate is 0, and its P must only be finite
    return {name: torch.where(value > 0, value, 1.0) for name, value in mean.items()}


def _check_moments(
    workspace: Workspace,
    segment: Segment,
    step: int,
    moments: Mapping[str, Tensor],
    inverses: Mapping[str, Tensor],
) -> None:
    """Every parameter that the segment trains must have sound second moments."""
    for site in workspace.passes[segment.stage.name].tracked.layers:
        module: Any = site.modules[0]
        held = dict(zip(site.parameter_names(), (module.weight, module.bias), strict=False))
        for name, parameter in held.items() if segment.rate(site.weight) else ():
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
                raise ValueError(
                    f"the second moments of {name} at step {step} {problem}: give the optimizer's "
                    "own, bias-corrected, and its epsilon"
                )


def described(segment: Segment, dynamics: Dynamics | None) -> dict[str, Any]:
    """A segment, with its η̄K and the spread of η̄Kσ if it was fitted, for people to read."""
    about = {
        "start": segment.start,
        "end": segment.end,
        "stage": segment.stage.name,
        "checkpoints": [c.step for c in segment.checkpoints],
    }
    if dynamics is None:
        return about
    times = [x for name, x in dynamics.durations.items() if name in dynamics.bases]
    return about | spread(times, dynamics.exponents().values())


def spread(durations: Iterable[float], exponents: Iterable[Tensor]) -> dict[str, Any]:
    """The ends of η̄K over layers, and quantiles of η̄Kσ over all directions, where known."""
    times, known = list(durations), [part.flatten().cpu() for part in exponents]
    found: dict[str, Any] = {"duration": {"least": min(times), "most": max(times)}} if times else {}
    if not known:
        return found
    levels = torch.tensor([0.0, 0.25, 0.5, 0.75, 0.95, 1.0], dtype=torch.float64)
    x = torch.cat(known).numpy()
    places = (levels * (len(x) - 1)).round().long().numpy()
    chosen = np.partition(x, places)[places]  # a sort would take longer
    quantiles = zip(levels, chosen, strict=True)
    return found | {
        "duration_times_eigenvalue": {f"{level:.2f}": float(x) for level, x in quantiles}
    }


def _first_scored(workspace: Workspace, terms: Sequence[Term]) -> int:
    """Which term is the first whose stage is asked about."""
    return next(k for k, term in enumerate(terms) if term.stage in workspace.stages)


def fitting_passes(curvature: str, checkpoints: int) -> dict[str, int]:
    """Passes over the data that fitting at so many checkpoints takes."""
    return {
        "covariances": checkpoints if curvature in ("ekfac", "kfac") else 0,
        "eigenvalues": checkpoints if curvature in ("ekfac", "diagonal") else 0,
    }
