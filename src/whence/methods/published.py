"""SOURCE and influence functions as published: final query gradient, no coupling, no floor, and of
linear layers and convolutions only, unless the study chooses others.

For Adam-type optimizers (appendix D.2) the exponential is taken with the diagonal of the
Gauss-Newton matrix, diag(H̄), the inverse with the EK-FAC H̄:

    S̄ = E = exp(-η̄K P̄ diag(H̄))         r̄ = (I - E) H̄⁻¹ ḡ
    seen from the query:  w = (H̄ + λ)⁻¹ (I - E) v,   v ← E v
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from whence.engine.costs import Workload
from whence.engine.dynamics import PRECONDITIONED, Rates
from whence.engine.ledger import Ledger
from whence.engine.workspace import Term, Workspace
from whence.errors import InvalidInput
from whence.layers.choose import matrices
from whence.layers.passes import Weights
from whence.methods.influence import Influence
from whence.methods.source import Source
from whence.operators import (
    KINDS,
    BlockDiagonal,
    BlockVectors,
    Diagonal,
    EigenFactors,
    Factored,
    Operator,
    cost,
    decayed,
    inverse,
    significant,
    survival,
)
from whence.operators.operator import ByBlock, Function, rotate
from whence.run import MeanCheckpoint, Segment

DAMPING = 1e-8  # of the inverse


class PublishedSource(Source):
    """The class of `Source.published(...)`.

    Args:
        damping: added to the eigenvalues. Default: none for SGD, where F_r needs none, and 1e-8 in
            the inverse of Adam's form.
    """

    default_layers = staticmethod(matrices)
    _fixed = ("coupling", "query_at", "floor")

    def __init__(
        self,
        segments: int | str | Sequence[int] = 3,
        curvature: str = "ekfac",
        fisher: str = "sampled",
        damping: float | None = None,
        weight_decay: str = "ignore",
        stage: str | None = None,
        seed: int = 0,
    ) -> None:
        given = 0.0 if damping is None else damping
        super().__init__(
            segments, curvature, fisher, stage, given, weight_decay, False, "final", 0.0, seed
        )
        self.damping = damping  # type: ignore[assignment]  # None: by the optimizer

    @property
    def name(self) -> str:
        return "Source.published"

    def rates(self, workspace: Workspace, segment: Segment) -> Rates:
        optimizer = workspace.run.optimizers[segment.stage.name]
        damping = 0.0 if self._is_mixed(optimizer) else self._given_damping(optimizer)
        return Rates.of(
            workspace, segment, floor=0.0, damping=damping, weight_decay=self.weight_decay
        )

    def _is_mixed(self, optimizer: str) -> bool:
        """Whether the exponential and the inverse are of different matrices."""
        factored = self.curvature in KINDS and "covariances" in KINDS[self.curvature].passes
        return optimizer in PRECONDITIONED and factored

    def _given_damping(self, optimizer: str) -> float:
        if self.damping is not None:
            return self.damping
        return DAMPING if optimizer in PRECONDITIONED and self.curvature == "identity" else 0.0

    def whitens(self, work: Workload) -> bool:
        return False

    def rate_numbers(self, work: Workload) -> int:
        return work.terms * cost.vector_numbers(work.tracked) if work.preconditioned else 0

    def operator(
        self, workspace: Workspace, term: Term, rates: Rates, resident: int
    ) -> tuple[Any, Any, dict[str, float]]:
        if not self._is_mixed(rates.optimizer):
            return super().operator(workspace, term, rates, resident)
        if self.damping is None and workspace.dtype.itemsize < 4:
            raise InvalidInput(
                f"{workspace.dtype} cannot resolve the eigenvalues that a damping of {DAMPING:.0e} "
                "depends on: use Source(), which needs no inverse, a damping such as 1e-2, or "
                "dtype=torch.float32"
            )
        how: Any = {"fisher": self.fisher, "seed": self.seed, "resident": resident}
        kind, stages = KINDS[self.curvature], [term.stage]
        H = kind.fit(workspace, term.checkpoints, stages=stages, diagonal=True, **how)
        λ = DAMPING if self.damping is None else self.damping
        ones = BlockDiagonal(dict.fromkeys(rates.applied, 1.0))
        return Mixture(H, rates, λ, workspace.ledger), ones, {}


class PublishedFastSource(PublishedSource):
    """What `FastSource.published` makes."""

    @property
    def name(self) -> str:
        return "FastSource.published"

    def points(self, segment: Segment) -> Sequence[Weights]:
        return [MeanCheckpoint(segment.checkpoints)]


class PublishedInfluence(Influence):
    """What `Influence.published` makes."""

    default_layers = staticmethod(matrices)
    _floor = 0.0

    @property
    def name(self) -> str:
        return "Influence.published"

    @staticmethod
    def defaults(solver: str) -> dict[str, Any]:
        changed = {"damping": 1e-8, "curvature": "ekfac", "coupling": False}
        return Influence.defaults(solver) | (changed if solver == "ekfac" else {})


@dataclass(frozen=True)
class Mixture:
    """A segment in appendix D.2's form: what takes the place of M in the loop of `Source`.

    Attributes:
        H: with diag(H̄) in addition to its factors.
        damping: λ of the inverse.
    """

    H: Factored
    rates: Rates
    damping: float
    ledger: Ledger

    @property
    def bases(self) -> dict[str, None]:
        return {}

    def eigenvalues(self) -> Mapping[str, Tensor]:
        """η̄K (P̄ (diag(H̄) + l₂) + d), by block."""
        names = [name for name in self.H.names if name in self.rates.applied]
        return ByBlock(names, lambda name: self._exponent([name]).eigenvalues()[name])

    def _exponent(self, blocks: Container[str]) -> Operator[BlockVectors]:
        """The exponents of these blocks as a diagonal operator."""
        names = [name for name in self.H.names if name in self.rates.applied and name in blocks]
        diagonals = {name: self.H.factors[name].diagonal for name in names}
        factors = {n: EigenFactors(x, None) for n, x in diagonals.items() if x is not None}
        return Diagonal(factors).whitened(self.rates.applied) + self.rates.shift

    def apply(
        self, functions: Sequence[Function | None], v: BlockVectors, *, overwrite: bool = False
    ) -> list[BlockVectors | None]:
        """(H̄ + λ)⁻¹ (I - E) v instead of F_r(M) v, and E v."""
        needed = [f and g for f, g in zip(functions, (decayed, survival), strict=True)]
        lost, surviving = self._exponent(v.values).apply(needed, v)
        if lost is None:
            return [None, surviving]
        w = {name: self._inverse(name, lost.matrix(name)) for name in lost.values}
        return [BlockVectors(w, dict.fromkeys(w)), surviving]

    def _inverse(self, name: str, u: Tensor) -> Tensor:
        """(H̄ + l₂ + λ)⁻¹ u of one block, plus d/P̄ inside where weight decay is decoupled."""
        decay, λ = self.rates.decays.get(name, 0.0), self.damping
        if decay and self.rates.optimizer == "adamw":
            pull = decay * self.rates.durations[name] / self.rates.applied[name] + λ
            solved = self.H.inverse(BlockDiagonal({name: pull}))
            return (solved @ BlockVectors({name: u}, {name: None})).matrix(name)
        block = self.H.factors[name]
        σ = block.eigenvalues
        # (I - E)v has parts in H's null space, which no training gradient has; divided by a small
        # λ their rounding errors would drown the rest, so they are left out
        f = inverse(σ + decay, λ) * significant(σ, self.H.squared)
        w = rotate(u, None, block.basis) * f
        larger = w * ((σ + decay + λ) / (σ + decay + 10 * λ))
        share = float((larger - w).norm() / w.norm().clamp_min(1e-30))
        self.ledger.note_sensitivity(name, share)
        return rotate(w, block.basis, None)
