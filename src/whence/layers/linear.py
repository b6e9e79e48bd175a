"""`nn.Linear`, over any number of middle dimensions."""

from __future__ import annotations

from torch import Tensor, nn

from whence.layers.kind import Kind, refused_subclass, register


class Linear(Kind):
    module = nn.Linear

    def refusal(self, module: nn.Module) -> str | None:
        return refused_subclass(module, nn.Linear)

    def shape(self, module: nn.Linear) -> tuple[int, int, int]:
        return 1, module.out_features, module.in_features

    def inputs(self, module: nn.Linear, x: Tensor) -> list[Tensor]:
        return [x.reshape(len(x), -1, module.in_features)]

    def gradients(self, module: nn.Linear, gradient: Tensor) -> list[Tensor]:
        return [gradient.reshape(len(gradient), -1, module.out_features)]


register(Linear())
