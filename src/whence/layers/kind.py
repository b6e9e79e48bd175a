"""A kind of layer: how its input and its output's gradient become positions.

Every tracked layer is linear in its parameters. With an input `a` and the gradient `s` of the loss
in the output at each position t, the per-example gradient of the weight has one of three forms:

    matrix          y_t = W a_t         G = Σ_t s_t a_tᵀ          a (n, t, i), s (n, t, o)
    lookup          y_t = W[a_t]        G = Σ_t 1[a_t] s_tᵀ       a row numbers, s (n, t, i)
    elementwise     y_t = w ∘ a_t       g = Σ_t s_t ∘ a_t         a and s (n, t, d)

A kind turns the module's input x and the gradient at its output, dloss/dy, into `a` and `s`. A
layer that consists of several independent ones (a grouped convolution) gives one pair per block.

To support another layer, write a subclass and `register` it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from whence.layers.rows import Rows

Form = Literal["matrix", "lookup", "elementwise"]


class Kind(ABC):
    """How to capture one kind of layer. All methods are pure."""

    #: the class of the modules, or a pattern of its name where importing it would cost too much
    module: ClassVar[type[nn.Module] | str] = nn.Module
    #: how the gradient is made up
    form: ClassVar[Form] = "matrix"
    #: names of its weight and bias in the module
    attributes: ClassVar[tuple[str, str]] = ("weight", "bias")
    #: whether the weight is used by `F.linear` with positions before examples, and by no module
    functional: ClassVar[bool] = False
    #: whether a bias is a last column of the matrix; if not, it is a layer of its own
    bias_column: ClassVar[bool] = True
    #: whether its modules are called; if not, a parameter is replaced by one copy per example
    hooked: ClassVar[bool] = True

    def claims(self, module: nn.Module) -> bool:
        """Whether a module of that class, or of a subclass, is of this kind."""
        return True

    @abstractmethod
    def refusal(self, module: nn.Module) -> str | None:
        """Why this module cannot be captured; None if it can."""

    @abstractmethod
    def shape(self, module: Any) -> tuple[int, int, int]:
        """(blocks, o, i) without the bias coordinate; (1, rows, i) of a lookup, (1, d, 1) of an
        elementwise layer."""

    @abstractmethod
    def inputs(self, module: Any, x: Tensor) -> Sequence[Tensor | Rows]:
        """`a` of each block: (n, t, i), or `Rows` of a lookup."""

    def add_gram(self, module: Any, x: Tensor, total: Tensor) -> Tensor | None:
        """Add Σ a aᵀ over all positions to the upper triangle of total (i, i) without forming `a`.

        Returns Σ a (i,), or None, with nothing added, if the kind has no such shortcut.
        """
        return None

    @abstractmethod
    def gradients(self, module: Any, gradient: Tensor) -> list[Tensor]:
        """`s` (n, t, o) of each block."""

    def matrices(self, module: Any, weight: Tensor) -> list[Tensor]:
        """A tensor shaped like the weight as matrices (o, i), one per block."""
        _, o, i = self.shape(module)
        return [weight.reshape(o, i)]

    def vectors(self, module: Any, bias: Tensor) -> list[Tensor]:
        """A tensor shaped like the bias as (o,) vectors, one per block."""
        return list(bias.reshape(self.shape(module)[0], -1))


KINDS: list[Kind] = []


def register(kind: Kind) -> None:
    """Track layers of this kind in every later Study. Kinds registered later take precedence."""
    KINDS.insert(0, kind)


def kind_of(module: nn.Module) -> Kind | None:
    """The first kind that has the module's class and claims it, if any."""
    classes = type(module).__mro__

    def is_of(expected: type[nn.Module] | str) -> bool:
        if isinstance(expected, str):
            return any(fnmatchcase(each.__name__, expected) for each in classes)
        return expected in classes

    return next((kind for kind in KINDS if is_of(kind.module) and kind.claims(module)), None)


def same_forward(module: nn.Module, base: type[nn.Module]) -> bool:
    """Whether a (subclass) module computes exactly what its base class computes."""
    return type(module).forward is base.forward


def refused_subclass(module: nn.Module, base: type[nn.Module]) -> str | None:
    """Why a subclass with a forward of its own is refused; None if it has none."""
    if same_forward(module, base):
        return None
    return f"{type(module).__name__} is a subclass of {base.__name__} with its own forward"
