"""Curvature as an operator: a symmetric positive semidefinite matrix that is never written out.

    H @ v                       products
    H.apply([f, g], v)          functions of its eigenvalues: f(H) v, g(H) v
    H.inverse(damping) @ v      (H + λ)⁻¹ v
    H.trace()  H.eigenvalues()  by block
    H.scaled(c)  H + shift  H.whitened(D)      each again an operator

`Factored` operators (EK-FAC, K-FAC, the diagonal, the identity) answer in closed form. All others
answer by Krylov iterations (`whitened.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from torch import Tensor

from whence.operators.space import Basis

V = TypeVar("V")  # vectors: BlockVectors or ProjectedVectors
Function = Callable[[Tensor], Tensor]  # elementwise on eigenvalues


@dataclass(frozen=True)
class Inverse(Generic[V]):
    """(H + λ)⁻¹. `@` may reuse the memory of the vectors it is given.

    Attributes:
        bases: where the vectors are best built; the parameters' own coordinates by default.
        statistics: how the last solve went, if it was iterative.
    """

    solve: Callable[[V], V]
    bases: Mapping[str, Basis | None] = field(default_factory=dict)
    statistics: dict[str, Any] = field(default_factory=dict)

    def __matmul__(self, v: V) -> V:
        return self.solve(v)


class Operator(ABC, Generic[V]):
    """A symmetric positive semidefinite matrix over a space of vectors."""

    @property
    def block_diagonal(self) -> bool:
        """Whether layers are independent of each other, so that a layer's response does not depend
        on the others' (see `coupling`)."""
        return True

    @property
    def bases(self) -> Mapping[str, Basis | None]:
        """Where vectors are best built; the parameters' own coordinates by default."""
        return {}

    @abstractmethod
    def apply(
        self, functions: Sequence[Function | None], v: V, *, overwrite: bool = False
    ) -> list[V | None]:
        """f(H) v for each function f of the eigenvalues, restricted to the blocks of H.

        Args:
            functions: None stands for a function that is not needed; so does its result.
            overwrite: v is not needed any more, so its memory may be reused.
        """

    def __matmul__(self, v: V) -> V:
        (product,) = self.apply([lambda sigma: sigma], v)
        assert product is not None
        return product

    @abstractmethod
    def inverse(self, damping: Any) -> Inverse[V]:
        """(H + λ)⁻¹, λ a diagonal with a number, or a tensor of numbers, for each block."""

    @abstractmethod
    def trace(self) -> dict[str, float]:
        """Of every block."""

    @abstractmethod
    def eigenvalues(self) -> dict[str, Tensor]:
        """Of every block; where they are not known, the diagonal; nothing if neither is."""

    @abstractmethod
    def scaled(self, factors: Mapping[str, float]) -> Operator[V]:
        """Each block times a number."""

    @abstractmethod
    def __add__(self, shift: Any) -> Operator[V]:
        """H + a diagonal."""

    @abstractmethod
    def whitened(self, diagonal: Any) -> Operator[V]:
        """D^½ H D^½, restricted to the blocks of the diagonal D."""


def coupling(operator: Operator[Any]) -> dict[str, float]:
    """How much more strongly each block's curvature acts because all layers correct the same error.

    Layers share the outputs. With J = [J₁ … J_L] the Jacobian of all outputs and Θ_ℓ = J_ℓ J_ℓᵀ,
    F(JᵀJ) Jᵀu has the block J_ℓᵀ F(Θ₁ + … + Θ_L) u. Where the layers' kernels Θ_ℓ are proportional
    to each other, this is F(c_ℓ H_ℓ) J_ℓᵀu with

        c_ℓ = Σ_k tr H_k / tr H_ℓ

    A matrix of all layers together needs no such factor: all its blocks get 1.
    """
    if not operator.block_diagonal:
        return {}
    traces = operator.trace()
    total = sum(traces.values())
    return {name: total / trace if trace > 0 else 1.0 for name, trace in traces.items()}
