"""Parameters that are used as they are: class tokens, tables of positions, and biases that are no
column of a matrix."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from whence.layers.kind import Kind, Seen


class Bias(Kind):
    """A bias that is added to every position of a module's output, and no column of its matrix.

    Args:
        kind: that of the module.
    """

    form = "elementwise"

    def __init__(self, kind: Kind) -> None:
        self.kind = kind

    def shape(self, module: Any) -> tuple[int, int, int]:
        return 1, module.bias.numel(), 1

    def inputs(self, module: Any, x: Tensor) -> list[Tensor]:
        return [module.bias.new_ones(len(x), 1, 1)]

    def gradients(self, module: Any, gradient: Tensor) -> list[Tensor]:
        if self.kind.bias_column:  # s of the module is that of its bias
            return [torch.cat(self.kind.gradients(module, gradient), -1)]
        return [gradient.movedim(1, -1).reshape(len(gradient), -1, module.bias.numel())]


class Direct(Kind):
    """A parameter (1, ...) of a module of any class, of which each example gets a copy (n, ...)."""

    form = "elementwise"
    seen: ClassVar[Seen] = "copies"

    def __init__(self, attribute: str) -> None:
        self.attribute = attribute

    def shape(self, module: Any) -> tuple[int, int, int]:
        return 1, module._parameters[self.attribute].numel(), 1

    def inputs(self, module: Any, x: Tensor) -> list[Tensor]:
        return [x.new_ones(len(x), 1, 1)]

    def gradients(self, module: Any, gradient: Tensor) -> list[Tensor]:
        return [gradient.reshape(len(gradient), 1, -1)]


def one_for_all(parameter: Tensor) -> bool:
    """Whether a parameter is (1, ...), so that it may be replaced by one copy per example."""
    return parameter.dim() > 1 and len(parameter) == 1
