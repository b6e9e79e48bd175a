"""SOURCE: segmented stationary unrolling for counterfactual estimation (Bae et al., 2024).

Training is cut into L segments in which curvature H̄_ℓ, gradients ḡ_ℓ and learning rate η̄_ℓ are
taken as constant. Then

    values[q, m] = -(1/N) ∇f(q, θ_T)ᵀ Σ_ℓ S̄_L ⋯ S̄_{ℓ+1} F_r(H̄_ℓ) ḡ_ℓ(m)            (Eq. 20-22)
    S̄_ℓ = exp(-η̄_ℓ K_ℓ H̄_ℓ)          F_r(σ) = (1 - exp(-η̄_ℓ K_ℓ σ)) / σ

The products are taken from the left, on the few query gradients; the training gradients are never
transformed. With momentum β the rate is η̄/(1-β). The sign is that of f(with m) - f(without m).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whence.curvature import Curvature, check_choices, response, survival
from whence.data import Batches
from whence.methods.bench import Bench, Readouts, Term
from whence.methods.gradient import GradientMethod
from whence.run import Segment

PLAIN = ("sgd",)  # optimizers whose update is a rate times a (running mean of) gradients
FORGOTTEN = 1e-6  # share of ‖v‖² below which nothing is left of what came before a segment


@dataclass(frozen=True)
class Prepared:
    """A segment, its curvature, and η̄K of every block."""

    segment: Segment
    curvature: Curvature
    durations: dict[str, float]
    shifts: dict[str, float]  # added to the block's eigenvalues
    examples: int  # N


class Source(GradientMethod):
    """SOURCE for SGD, with or without momentum, under any learning-rate schedule.

    Args:
        segments: how many segments to deal the checkpoints into, a list of the updates at which
            they end, or "stages".
        curvature: "ekfac", "kfac", "diagonal" or "identity".
        fisher: "sampled" (seeded pseudo-targets), "exact" (one backward pass per output) or
            "empirical" (true targets).
        stage: attribute to this stage's examples only (default: all stages').
        damping: added to the eigenvalues (default: none; F_r needs none).
        weight_decay: "ignore" it, as the paper does, or count it as "curvature": L2 adds its
            coefficient to every eigenvalue.
        seed: of the pseudo-targets.
    """

    def __init__(
        self,
        segments: int | str | Sequence[int] = 3,
        curvature: str = "ekfac",
        fisher: str = "sampled",
        stage: str | None = None,
        damping: float | None = None,
        weight_decay: str = "ignore",
        seed: int = 0,
    ) -> None:
        self.segments = segments if isinstance(segments, (int, str)) else list(segments)
        self.curvature, self.fisher, self.stage, self.damping, self.seed = (
            curvature,
            fisher,
            stage,
            damping,
            seed,
        )
        self.weight_decay = weight_decay
        check_choices(curvature, fisher)
        if damping is not None and not (isinstance(damping, Real) and damping >= 0):
            raise ValueError(f"damping={damping!r} must be zero or positive")
        if weight_decay not in ("ignore", "curvature"):
            raise ValueError(f"weight_decay={weight_decay!r}: use 'ignore' or 'curvature'")

    def terms(self, bench: Bench) -> list[Term]:
        return [Term(s.stage.name, s.checkpoints) for s in bench.run.segments(self.segments)]

    def prepare(self, bench: Bench, terms: list[Term]) -> list[Prepared]:
        run = bench.run
        if run.optimizer not in PLAIN:
            raise ValueError(
                "Source understands runs trained with SGD (momentum or not); this one used "
                f"{run.optimizer!r}: its preconditioner changes the "
                "formula. Influence and TracIn work on this run"
            )
        prepared = []
        for segment in run.segments(self.segments):
            fitter = bench.fitter(
                segment.stage.name, kind=self.curvature, fisher=self.fisher, seed=self.seed
            )
            durations = block_durations(bench, segment)
            examples = len(bench.study.used(run, segment.stage.name))
            curvature = fitter.fit(segment.checkpoints)
            shifts = self._shifts(bench, segment)
            prepared.append(Prepared(segment, curvature, durations, shifts, examples))
        bench.diagnostics["segments"] = [_diagnosed(p) for p in prepared]
        return prepared

    def passes_needed(self, bench: Bench) -> dict[str, int]:
        needed = super().passes_needed(bench)
        return needed | _fitting_passes(self.curvature, needed["scores"])

    def vectors(
        self,
        bench: Bench,
        prepared: Any,
        data: Batches,
        stage: str,
        indices: np.ndarray,
        examples: int,
    ) -> list[Readouts]:
        bases = {name: block.basis for name, block in prepared[-1].curvature.items()}
        v = bench.gradients(data, stage, indices, bench.run.final, bases)  # ∇f(q, θ_T)
        readouts: list[Readouts] = []
        for k, p in reversed(list(enumerate(prepared))):
            H, ηK, λ, checkpoints = p.curvature, p.durations, p.shifts, len(p.segment.checkpoints)
            r = v.apply(H, lambda name, σ: response(σ + λ[name], ηK[name]), last=k == 0)  # noqa: B023
            readouts.insert(
                0, bench.readouts(r, -1.0 / (p.examples * checkpoints), examples * checkpoints)
            )
            if k > 0:
                before = v.squared_norm()
                v = v.apply(H, lambda name, σ: survival(σ + λ[name], ηK[name]), last=True)  # noqa: B023
                self._note_survival(bench, k, v.squared_norm() / before)
        return readouts

    def _shifts(self, bench: Bench, segment: Segment) -> dict[str, float]:
        """Damping and, if it counts, weight decay of every block."""
        shifts = dict.fromkeys(bench.blocks, self.damping or 0.0)
        for site in bench.any.tracked.sites if self.weight_decay == "curvature" else ():
            decays = [segment.weight_decay(name) for name in site.parameter_names()]
            if len(set(decays)) > 1:
                warnings.warn(
                    f"layer {site.name}: weight decay {decays[0]} on the weight and {decays[1]} on "
                    "the bias; the weight's is taken for both",
                    stacklevel=2,
                )
            for block in site.blocks:
                shifts[block.name] += decays[0]
        return shifts

    @staticmethod
    def _note_survival(bench: Bench, k: int, kept: Tensor) -> None:
        noted = bench.account.setdefault("survival", {})
        if str(k) in noted:
            return
        share = noted[str(k)] = float(kept.nanmedian().nan_to_num(1.0))  # 0/0: a flat query
        if share < FORGOTTEN:
            segment = bench.diagnostics["segments"][k]
            warnings.warn(
                f"segment {k + 1} (updates {segment['start']}..{segment['end']}) is saturated: "
                f"only {share:.1e} of what was learned before survives it, so earlier segments "
                "score about zero. If that surprises you, check that losses() is scaled as in "
                "training (mean or sum over tokens) and that the learning rates are right",
                stacklevel=2,
            )


def block_durations(bench: Bench, segment: Segment) -> dict[str, float]:
    """η̄K of every block in a segment, from the parameter group its weight and bias are in."""
    durations = {name: rate * segment.steps for name, rate in bench.rates(segment.rate).items()}
    if not any(durations.values()):
        warnings.warn(
            f"updates {segment.start}..{segment.end} are inert: every tracked layer's rate is 0",
            stacklevel=2,
        )
    return durations


def _diagnosed(p: Prepared) -> dict[str, Any]:
    levels = torch.tensor([0.0, 0.25, 0.5, 0.75, 0.95, 1.0], dtype=torch.float64)
    products = torch.cat(
        [
            (b.eigenvalues.double() * p.durations[name]).flatten().cpu()
            for name, b in p.curvature.items()
        ]
    )
    products = products.sort().values
    chosen = products[(levels * (len(products) - 1)).round().long()]
    return {
        "start": p.segment.start,
        "end": p.segment.end,
        "stage": p.segment.stage.name,
        "checkpoints": [c.step for c in p.segment.checkpoints],
        "duration": {"least": min(p.durations.values()), "most": max(p.durations.values())},
        "duration_times_eigenvalue": {
            f"{level:.2f}": float(x) for level, x in zip(levels, chosen, strict=True)
        },
    }


def _fitting_passes(curvature: str, checkpoints: int) -> dict[str, int]:
    return {
        "covariances": checkpoints if curvature in ("ekfac", "kfac") else 0,
        "eigenvalues": checkpoints if curvature in ("ekfac", "diagonal") else 0,
    }
