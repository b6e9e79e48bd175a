"""A kind of layer: how its input and its output's gradient become positions.

Every tracked layer is linear in its parameters: at each position it maps an input `a` (i) to an
output `W a` (o). Its per-example gradient is therefore Σ_t s_t a_tᵀ, with `s` the gradient of the
loss in the output. A kind turns the module's input x and the gradient at its output, dloss/dy, into
`a` (n, t, i) and `s` (n, t, o). A layer that consists of several independent ones (a grouped
convolution) gives one pair (a, s) per block.

To support another layer, write a subclass and `register` it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import Tensor, nn


class Kind(ABC):
    """How to capture one kind of layer. All methods are pure."""

    #: the class of the modules, or its name where importing it would cost too much
    module: ClassVar[type[nn.Module] | str] = nn.Module

    def claims(self, module: nn.Module) -> bool:
        """Whether a module of that class, or of a subclass, is of this kind."""
        return True

    @abstractmethod
    def refusal(self, module: nn.Module) -> str | None:
        """Why this module cannot be captured; None if it can."""

    @abstractmethod
    def shape(self, module: Any) -> tuple[int, int, int]:
        """(blocks, o, i) without the bias coordinate."""

    @abstractmethod
    def inputs(self, module: Any, x: Tensor) -> list[Tensor]:
        """`a` (n, t, i) of each block."""

    def add_gram(self, module: Any, x: Tensor, total: Tensor) -> Tensor | None:
        """Add Σ a aᵀ over all positions to the upper triangle of total (i, i) without forming `a`.

        Returns Σ a (i,), or None, with nothing added, if the kind has no such shortcut.
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
    """Track layers of this kind in every later Study. Kinds registered later take precedence."""
    KINDS.insert(0, kind)


def kind_of(module: nn.Module) -> Kind | None:
    """The first kind that has the module's class and claims it, if any."""
    classes = {*type(module).__mro__} | {c.__name__ for c in type(module).__mro__}
    return next((kind for kind in KINDS if kind.module in classes and kind.claims(module)), None)


def same_forward(module: nn.Module, base: type[nn.Module]) -> bool:
    """Whether a (subclass) module computes exactly what its base class computes."""
    return type(module).forward is base.forward
