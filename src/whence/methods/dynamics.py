"""What one segment of training does to a perturbation: S̄ and F_r, seen from the query's side.

`Plain` is SGD's: both are functions of one symmetric matrix. `Preconditioned` is Adam's and its
kin's (appendix C): θ ← θ - ηPg with a diagonal P. There the exponential is taken with the diagonal
Gauss-Newton matrix D̄, the inverse with the EK-FAC H̄ (appendix D.2):

    S̄ = E = exp(-η̄K P̄ D̄)         r̄ = (I - E) H̄⁻¹ ḡ
    seen from the query:  w = (H̄ + λ)⁻¹ (I - E) v,   v ← E v

`Exact` takes H̄ for both, and needs no inverse (appendix C as it stands, M = P̄^½ H̄ P̄^½):

    w = P̄^½ F_r(M) P̄^½ v,   v ← P̄^-½ exp(-η̄K M) P̄^½ v

`Whole` does so with the true Gauss-Newton matrix of all layers together, for every optimizer.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from tqdm.auto import tqdm

from whence.data import cut
from whence.engine.workspace import Vectors
from whence.layers.passes import products_as
from whence.operators import Basis, Curvature, bases_of, inverse, response, survival
from whence.operators.gauss_newton import GaussNewton
from whence.operators.krylov import Solution, matrix_functions
from whence.operators.solve import apply, diagonal_of, solve

STEPS = 500  # Lanczos steps with the whole Gauss-Newton matrix, at most
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-10}
HELD = 10  # vectors of a query meanwhile: right side, answers, and products on the way


class Dynamics(Protocol):
    """How a segment answers to a pull on the parameters, and what it leaves of earlier ones."""

    @property
    def durations(self) -> dict[str, float]: ...
    @property
    def bases(self) -> dict[str, Basis | None]:
        """Of each block that the segment has: where query vectors are best built for it."""
        ...

    def through(self, v: Vectors, respond: bool, survive: bool) -> tuple[Vectors | None, Vectors]:
        """F_r(H̄) v, what a steady pull in this segment does, along v, by its end (None if it is not
        asked for); and S̄ᵀ v, the query as seen from the start of the segment (v if it is not asked
        for). v is not good for anything else afterwards."""
        ...

    def exponents(self) -> dict[str, Tensor]:
        """η̄K times the curvature as the exponential sees it, per block where it is known."""
        ...


class _ByTurns(ABC):
    """Dynamics that respond first, and survive then."""

    @abstractmethod
    def respond(self, v: Vectors, last: bool) -> Vectors:
        """F_r(H̄) v; if it is the last that is asked of v, its memory can be reused."""

    @abstractmethod
    def survive(self, v: Vectors) -> Vectors:
        """S̄ᵀ v. v may be overwritten."""

    def through(self, v: Vectors, respond: bool, survive: bool) -> tuple[Vectors | None, Vectors]:
        r = self.respond(v, not survive) if respond else None
        return r, self.survive(v) if survive else v


@dataclass(frozen=True)
class Plain(_ByTurns):
    """SGD, with or without momentum."""

    curvature: Curvature
    durations: dict[str, float]  # η̄K of every block
    shifts: dict[str, float]  # added to its eigenvalues

    @property
    def bases(self) -> dict[str, Basis | None]:
        return bases_of(self.curvature)

    def respond(self, v: Vectors, last: bool) -> Vectors:
        def f(name: str, σ: Tensor) -> Tensor:
            return response(σ + self.shifts[name], self.durations[name])

        return v.apply(self.curvature, f, last=last)

    def survive(self, v: Vectors) -> Vectors:
        def f(name: str, σ: Tensor) -> Tensor:
            return survival(σ + self.shifts[name], self.durations[name])

        return v.apply(self.curvature, f, keep=True, last=True)

    def exponents(self) -> dict[str, Tensor]:
        return {name: b.eigenvalues * self.durations[name] for name, b in self.curvature.items()}


@dataclass(frozen=True)
class Preconditioned(_ByTurns):
    """A diagonal preconditioner P̄ (o, width) per block.

    Args:
        damping: λ of the inverse; None is appendix C's (H̄ + P̄⁻¹/η̄K)⁻¹ in place of (I - E) H̄⁻¹.
        l2: L2 regularisation, which adds to the curvature.
        decay: decoupled weight decay, which adds to P̄H̄.
    """

    curvature: Curvature
    durations: dict[str, float]
    preconditioner: dict[str, Tensor]
    damping: float | None
    l2: dict[str, float]
    decay: dict[str, float]
    diagnostics: dict[str, Any]

    @property
    def bases(self) -> dict[str, Basis | None]:
        return dict.fromkeys(self.curvature)

    def respond(self, v: Vectors, last: bool) -> Vectors:
        v, found = v.own(), {}
        for name, value in v.values.items():
            if name in self.curvature:
                found[name] = self._inverse(name, value)
        return Vectors(found, dict.fromkeys(found))

    def _inverse(self, name: str, v: Tensor) -> Tensor:
        block, P, ηK = self.curvature[name], self.preconditioner[name], self.durations[name]
        if ηK == 0:
            return torch.zeros_like(v)
        pull, l2 = self.decay[name] / P, self.l2[name]
        if self.damping is None:  # (H̄ + λP̄⁻¹)⁻¹ with λ = 1/(η̄K)
            return solve(block, 1 / (ηK * P) + pull + l2, v, name)
        if block.basis is None:  # everything is diagonal: F_r as it is, right also where D̄ = 0
            σ = P * (block.eigenvalues + l2 + self.damping) + self.decay[name]
            return v * P * response(σ, ηK)
        u = v * -torch.expm1(-self._exponent(name))
        if self.decay[name]:
            return solve(block, pull + l2 + self.damping, u, name)
        one, λ = Vectors({name: u}, {name: None}), self.damping
        # (I - E)v has parts in H's null space, which no training gradient has; divided by a small
        # λ their rounding would drown the rest, so they are left out
        w = one.apply({name: block}, lambda _, σ: inverse(σ + l2, λ) * block.significant())
        self._note_sensitivity(name, w.values[name], block.eigenvalues + l2)
        return w.own().values[name]

    def _note_sensitivity(self, name: str, w: Tensor, σ: Tensor) -> None:
        """How far w moves when the damping is ten times larger: 0 not at all, 1 entirely."""
        assert self.damping is not None
        noted = self.diagnostics.setdefault("damping_sensitivity", {})
        if name not in noted:
            other = w * ((σ + self.damping) / (σ + 10 * self.damping))
            noted[name] = float((other - w).norm() / w.norm().clamp_min(1e-30))

    def survive(self, v: Vectors) -> Vectors:
        factors = {name: torch.exp(-self._exponent(name)) for name in self.curvature}
        return v.own().times(factors, keep=True)

    def _exponent(self, name: str) -> Tensor:
        block, P = self.curvature[name], self.preconditioner[name]
        D, l2 = block.diagonal, self.l2[name]
        if D is None:  # the fully diagonal form: damping counts as curvature throughout, as for SGD
            D, l2 = block.eigenvalues, l2 + (self.damping or 0.0)
        x: Tensor = self.durations[name] * (P * (D + l2) + self.decay[name])
        return x

    def exponents(self) -> dict[str, Tensor]:
        return {name: self._exponent(name) for name in self.curvature}


@dataclass(frozen=True)
class Exact:
    """A diagonal preconditioner P̄ with the EK-FAC H̄ throughout, by Lanczos iterations.

    Args:
        shifts: added to H̄: damping, and L2 regularisation.
        decay: decoupled weight decay, which adds to P̄H̄.
    """

    curvature: Curvature
    durations: dict[str, float]
    preconditioner: dict[str, Tensor]
    shifts: dict[str, float]
    decay: dict[str, float]

    @property
    def bases(self) -> dict[str, Basis | None]:
        return dict.fromkeys(self.curvature)

    def through(self, v: Vectors, respond: bool, survive: bool) -> tuple[Vectors | None, Vectors]:
        """Both are functions of one matrix of one vector, and cost hardly more than one of them."""
        own = v.own().values
        responded: dict[str, Tensor] = {}
        survived = dict(own)
        for name in own.keys() & self.curvature.keys():
            P, ηK = self.preconditioner[name], self.durations[name]
            root, shift = P.sqrt(), P * self.shifts[name] + self.decay[name]
            wanted = [f for f, yes in ((response, respond), (survival, survive)) if yes]
            functions = [partial(f, duration=ηK) for f in wanted]
            made = apply(self.curvature[name], root, shift, functions, root * own[name], name)
            if survive:
                survived[name] = made.pop().div_(root)
            if respond:
                responded[name] = made.pop().mul_(root)
        return (
            Vectors(responded, dict.fromkeys(responded)) if respond else None,
            Vectors(survived, dict.fromkeys(survived)),
        )

    def exponents(self) -> dict[str, Tensor]:
        """By the diagonal of M, whose eigenvalues are not known."""
        return {
            name: self.durations[name]
            * (P * (diagonal_of(self.curvature[name]) + self.shifts[name]) + self.decay[name])
            for name, P in self.preconditioner.items()
            if name in self.curvature
        }


@dataclass(frozen=True)
class Whole:
    """The true Gauss-Newton matrix H̄ of all layers together, by Lanczos iterations.

    With D = η̄K P̄ of every parameter (P̄ = 1 for SGD) and M = D^½ H̄ D^½ + Δ:

        w = D^½ (1 - exp(-M)) M⁻¹ D^½ v,   v ← D^-½ exp(-M) D^½ v

    Args:
        durations: η̄K of every block that was trained; H is over those.
        rates, shift: D and Δ (p,).
        memory: bytes that vectors may take.
        account: is told how the iterations went.
    """

    H: GaussNewton
    durations: dict[str, float]
    rates: Tensor
    shift: Tensor
    memory: int
    progress: bool
    account: dict[str, Any]

    @property
    def bases(self) -> dict[str, Basis | None]:
        return dict.fromkeys(self.durations)

    def through(self, v: Vectors, respond: bool, survive: bool) -> tuple[Vectors | None, Vectors]:
        """Both are functions of one matrix of one vector, and cost hardly more than one of them."""
        own, layout, root = v.own().values, self.H.layout, self.rates.sqrt()
        wanted = [f for f, yes in ((response, respond), (survival, survive)) if yes]
        made = self._functions([partial(f, duration=1.0) for f in wanted], layout.join(own) * root)
        survived = dict(own)
        if survive:
            survived |= layout.split(made.pop().div_(root))
        responded = layout.split(made.pop().mul_(root)) if respond else None
        return (
            None if responded is None else Vectors(responded, dict.fromkeys(responded)),
            Vectors(survived, dict.fromkeys(survived)),
        )

    def _functions(self, functions: list[Callable[[Tensor], Tensor]], v: Tensor) -> list[Tensor]:
        """f(M) v of each row (q, p), as many rows at a time as fit."""
        root, tolerance = self.rates.sqrt(), TOLERANCE[v.dtype]
        size = v.element_size() * max(1, v.shape[1])
        made = [torch.empty_like(v) for _ in functions]
        for rows in cut(len(v), max(1, self.memory // 2 // (HELD * size))):
            here = slice(int(rows[0]), int(rows[-1]) + 1)
            bar = tqdm(desc="Lanczos iterations", disable=not self.progress, leave=False)

            def product(x: Tensor, bar: Any = bar) -> Tensor:
                bar.update()
                return (self.H @ (x * root)).mul_(root).addcmul_(self.shift, x)

            kept = self.memory // 2 // (len(rows) * size)
            with bar, products_as("highest"):  # rounded to TF32 they do not converge
                found = matrix_functions(product, functions, v[here], STEPS, tolerance, kept)
            for own, part in zip(made, found.x, strict=True):
                own[here] = part
            self._note(found, tolerance)
        return made

    def _note(self, found: Solution, tolerance: float) -> None:
        left, most = float(found.residuals.max()), int(found.steps.max())
        noted = self.account.setdefault("lanczos", {"iterations": 0, "residual": 0.0})
        if left > tolerance >= noted["residual"]:
            warnings.warn(
                f"the dynamics are only known to {left:.0e} after {STEPS} Lanczos steps: use "
                "dtype=torch.float64, floor=0.1 (for Adam), or curvature='ekfac'",
                stacklevel=2,
            )
        noted["iterations"] = max(noted["iterations"], most)
        noted["residual"] = max(noted["residual"], left)

    def exponents(self) -> dict[str, Tensor]:
        return {}
