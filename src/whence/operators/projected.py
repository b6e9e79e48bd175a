"""Curvature in projected coordinates: a dense (d, d) matrix for each part of a projection.

What methods say about gradients g and curvature H holds here for Pg and PHPᵀ, P the projection: d
numbers per example and a d × d matrix (or one per layer), with nothing factored. Where P has
orthonormal rows (the eigenbasis) this is exact within the subspace that was kept; random signs
preserve inner products and the leading eigenvalues up to chance, about 1/√d.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from whence.errors import InvalidInput
from whence.layers.passes import Weights
from whence.operators.operator import Function, Inverse, Operator

#: keeps what a function computes under a key, and finds it there the next time
Remember = Callable[[Mapping[str, Any], Callable[[], list[Tensor]]], list[Tensor]]


@dataclass(frozen=True)
class ProjectedVectors:
    """q vectors of d projected coordinates, (q, d). A diagonal is a tensor (d,)."""

    values: Tensor

    def __rmul__(self, diagonal: Tensor) -> ProjectedVectors:
        return ProjectedVectors(self.values * diagonal.to(self.values))

    def __truediv__(self, diagonal: Tensor) -> ProjectedVectors:
        return ProjectedVectors(self.values / diagonal.to(self.values))

    def mapped(self, function: Callable[[Tensor], Tensor]) -> ProjectedVectors:
        """With a function of the coordinates in their place."""
        return ProjectedVectors(function(self.values))

    def updated(self, other: ProjectedVectors) -> ProjectedVectors:
        return other

    def squared_norm(self) -> Tensor:
        return self.values.square().sum(1)


@dataclass(frozen=True)
class Decomposed(Operator[ProjectedVectors]):
    """V diag(x) Vᵀ in each part of the projected space.

    Attributes:
        spectra, eigenvectors: x (d_k,) and V (d_k, d_k).
        columns: where each part's coordinates are.
        names: of the parts: a layer's, or that of all layers together.
    """

    spectra: Sequence[Tensor]
    eigenvectors: Sequence[Tensor]
    columns: Sequence[slice]
    names: Sequence[str]

    @property
    def block_diagonal(self) -> bool:
        return len(self.columns) > 1

    def _apply(
        self, functions: Sequence[Function | None], v: ProjectedVectors, overwrite: bool
    ) -> list[ProjectedVectors | None]:
        parts = list(zip(self.spectra, self.eigenvectors, self.columns, strict=True))
        inside = [v.values[:, where].to(V) @ V for _, V, where in parts]
        results: list[ProjectedVectors | None] = []
        for f in functions:
            if f is None:
                results.append(None)
                continue
            answers = [u * f(x) @ V.T for u, (x, V, _) in zip(inside, parts, strict=True)]
            results.append(ProjectedVectors(torch.cat(answers, 1)))
        return results

    def inverse(self, damping: float | Tensor) -> Inverse[ProjectedVectors]:
        return Inverse(partial((self + damping).apply, torch.reciprocal))

    def diagonal(self) -> dict[str, Tensor]:
        """The diagonal of each part, (d_k,)."""
        parts = zip(self.names, self.spectra, self.eigenvectors, strict=True)
        return {name: V.square() @ x for name, x, V in parts}

    def trace(self) -> dict[str, float]:
        return {name: float(x.sum()) for name, x in self.eigenvalues().items()}

    def eigenvalues(self) -> dict[str, Tensor]:
        return dict(zip(self.names, self.spectra, strict=True))

    def scaled(self, factors: Mapping[str, float]) -> Decomposed:
        spectra = [x * factors.get(name, 1.0) for name, x in self.eigenvalues().items()]
        return replace(self, spectra=spectra)

    def __add__(self, shift: float | Tensor | Mapping[str, Any]) -> Decomposed:
        if isinstance(shift, Mapping):
            if shift:
                raise InvalidInput(
                    "damping and weight decay by layer have no counterpart in the projected space: "
                    "use whence.Source itself"
                )
            return self
        moved = everywhere(shift, self.columns)
        return self._decomposed(lambda M, where: M + torch.diag(moved[where].to(M)))

    def whitened(self, diagonal: float | Tensor) -> Decomposed:
        root = everywhere(diagonal, self.columns).sqrt()
        return self._decomposed(lambda M, where: root[where, None].to(M) * M * root[where].to(M))

    def _decomposed(self, change: Callable[[Tensor, slice], Tensor]) -> Decomposed:
        """The same after a change of the dense matrices."""
        spectra, eigenvectors = [], []
        for x, V, where in zip(self.spectra, self.eigenvectors, self.columns, strict=True):
            values, vectors = torch.linalg.eigh(change((V * x) @ V.T, where))
            spectra.append(values.clamp_min(0))
            eigenvectors.append(vectors)
        return replace(self, spectra=spectra, eigenvectors=eigenvectors)


class Projects(Protocol):
    """What `fit` needs: a `StoreWorkspace`."""

    def curvature(
        self,
        kind: str,
        stages: Sequence[str] | None,
        checkpoints: Sequence[Weights],
        blocks: Mapping[str, Any],
    ) -> Projected: ...


@dataclass(frozen=True)
class Projected(Operator[ProjectedVectors]):
    """P H Pᵀ, dense, of which decompositions are remembered.

    Attributes:
        matrices: computes the matrices (d_k, d_k) in float64, when they are needed.
        columns: where each part's coordinates are.
        names: of the parts: a layer's, or that of all layers together.
        dtype: what vectors are computed in.
        remember: keeps decompositions under a key.
        identity: what the matrices depend on.
    """

    matrices: Callable[[], Sequence[Tensor]]
    columns: Sequence[slice]
    names: Sequence[str]
    dtype: torch.dtype
    remember: Remember
    identity: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def fit(
        cls,
        workspace: Projects,
        checkpoints: Sequence[Weights],
        *,
        stages: Sequence[str] | None = None,
    ) -> Projected:
        """The curvature of a gradient store, averaged over these checkpoints.

        Args:
            stages: whose data it is of, pooled (default: all).
        """
        return workspace.curvature("projected", stages, checkpoints, {})

    @property
    def block_diagonal(self) -> bool:
        return len(self.columns) > 1

    def whitened(self, diagonal: float | Tensor) -> Decomposed:
        """D^½ H D^½, decomposed; in float64 where rates differ by more than float32 resolves."""
        diagonal = everywhere(diagonal, self.columns)
        wide = bool(diagonal.min() < 1e-6 * diagonal.max())
        dtype = torch.float64 if wide else self.dtype
        key = {**self.identity, "durations": diagonal.tolist()}

        def fit() -> list[Tensor]:
            tensors = []
            for H, where in zip(self.matrices(), self.columns, strict=True):
                root = diagonal[where].sqrt().to(H)
                x, V = torch.linalg.eigh(root.unsqueeze(1) * H * root)
                tensors += [x.clamp_min(0).to(dtype), V.to(dtype)]
            return tensors

        tensors = self.remember(key, fit)
        return Decomposed(tensors[::2], tensors[1::2], self.columns, self.names)

    def inverse(self, damping: float | Tensor) -> Inverse[ProjectedVectors]:
        """By Cholesky factors."""
        damping = everywhere(damping, self.columns)
        key = {**self.identity, "inverse": "fisher", "damping": damping.tolist()}

        def fit() -> list[Tensor]:
            pairs = zip(self.matrices(), self.columns, strict=True)
            return [_cholesky(H, damping[where]) for H, where in pairs]

        factors = self.remember(key, fit)

        def solve(v: ProjectedVectors) -> ProjectedVectors:
            parts = zip(factors, self.columns, strict=True)
            solutions = [torch.cholesky_solve(v.values[:, w].to(L).T, L).T for L, w in parts]
            return ProjectedVectors(torch.cat(solutions, 1))

        return Inverse(solve)

    def _whole(self) -> Decomposed:
        ones = torch.ones(self.columns[-1].stop, dtype=torch.float64)
        return self.whitened(ones.to(next(iter(self.matrices())).device))

    def _apply(
        self, functions: Sequence[Function | None], v: ProjectedVectors, overwrite: bool
    ) -> list[ProjectedVectors | None]:
        return self._whole().apply(functions, v)

    def diagonal(self) -> dict[str, Tensor]:
        """The diagonal of each part, (d_k,)."""
        named = zip(self.names, self.matrices(), strict=True)
        return {name: H.diagonal() for name, H in named}

    def eigenvalues(self) -> dict[str, Tensor]:
        return self._whole().eigenvalues()

    def scaled(self, factors: Mapping[str, float]) -> Decomposed:
        return self._whole().scaled(factors)

    def __add__(self, shift: float | Tensor) -> Decomposed:
        return self._whole() + shift


def everywhere(given: float | Tensor, columns: Sequence[slice]) -> Tensor:
    """A number as a diagonal (d,) with that number in all coordinates."""
    if isinstance(given, Tensor):
        return given
    return torch.full((columns[-1].stop,), float(given), dtype=torch.float64)


def _cholesky(H: Tensor, damping: Tensor) -> Tensor:
    """The Cholesky factor of H + diag(λ)."""
    damped = H.clone()
    damped.diagonal().add_(damping.to(H))
    factor: Tensor
    factor, failed = torch.linalg.cholesky_ex(damped)
    if bool(failed):
        raise InvalidInput(
            f"the curvature is singular with a damping of {float(damping.min()):.0e}: its mean "
            f"diagonal entry is {float(H.diagonal().mean()):.1e}. Use a larger damping"
        )
    return factor


def never_zero(rates: Tensor) -> Tensor:
    """Rates (d,) of which none is exactly 0.

    A coordinate that does not move counts as one that moves 1e10 times more slowly than the
    fastest, which it is the limit of.
    """
    return rates.clamp_min(max(1e-10 * float(rates.max()), 1e-30))
