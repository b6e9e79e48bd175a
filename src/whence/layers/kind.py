"""A kind of layer: how its input and its output's gradient become positions.

Every tracked layer is linear in its parameters: at each position it maps an input `a` (i) to an
output `W a` (o). Its per-example gradient is therefore Σ_t s_t a_tᵀ, with `s` the gradient of the
loss in the output. A kind turns what the module saw, (x, dloss/dy), into `a` (n, t, i) and `s` (n,
t, o); a layer that is really several independent ones (a grouped convolution) gives one such pair
per block.

To support another layer: write a subclass, and `register` it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import Tensor, nn


class Kind(ABC):
    """How one kind of layer is captured. All methods are pure."""

    #: class names the kind is for, for messages
    label: ClassVar[str]

    @abstractmethod
    def claims(self, module: nn.Module) -> bool:
        """Whether the module is of this kind, or a subclass that may have changed it."""

    @abstractmethod
    def refusal(self, module: nn.Module) -> str | None:
        """Why this module cannot be captured after all; None when it can."""

    @abstractmethod
    def shape(self, module: Any) -> tuple[int, int, int]:
        """(blocks, o, i) without the bias coordinate."""

    @abstractmethod
    def inputs(self, module: Any, x: Tensor) -> list[Tensor]:
        """`a` (n, t, i) of each block."""

    def add_gram(self, module: Any, x: Tensor, total: Tensor) -> Tensor | None:
        """Add Σ a aᵀ over all positions to the upper triangle of total (i, i) without forming `a`.

        Returns Σ a (i,), or None, with nothing added, where there is no such short cut.
        """
        return None

    @abstractmethod
    def gradients(self, module: Any, gradient: Tensor) -> list[Tensor]:
        """`s` (n, t, o) of each block."""

    @abstractmethod
    def matrices(self, module: Any, weight: Tensor) -> list[Tensor]:
        """A tensor shaped like the weight as (o, i) matrices, one per block."""

    def vectors(self, module: Any, bias: Tensor) -> list[Tensor]:
        """A tensor shaped like the bias as (o,) vectors, one per block."""
        return list(bias.reshape(self.shape(module)[0], -1))


KINDS: list[Kind] = []


def register(kind: Kind) -> None:
    """Make layers of this kind known to every Study from now on. Later kinds are asked first."""
    KINDS.insert(0, kind)


def kind_of(module: nn.Module) -> Kind | None:
    """The kind that claims a module."""
    return next((kind for kind in KINDS if kind.claims(module)), None)


def same_forward(module: nn.Module, base: type[nn.Module]) -> bool:
    """Whether a (subclass) module computes exactly what its base class computes."""
    return type(module).forward is base.forward
