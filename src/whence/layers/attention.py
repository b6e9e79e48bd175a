"""`nn.MultiheadAttention`: its packed projection of queries, keys and values, and its output.

The module calls neither as a layer: it hands their weights to a function that multiplies by them.
So the products themselves are captured (`seen`). They have positions before examples.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from whence.layers.kind import Kind, refused_subclass, register
from whence.layers.linear import Linear


class Projection(Kind):
    """The packed projection: of self-attention, one product gives queries, keys and values; of
    attention to another sequence, products with rows of the weight do."""

    module = nn.MultiheadAttention
    attributes = ("in_proj_weight", "in_proj_bias")
    seen = "product"

    def refusal(self, module: nn.Module) -> str | None:
        if module._parameters.get("in_proj_weight") is None:
            return "it projects queries, keys and values with weights of their own (kdim, vdim)"
        return refused_subclass(module, nn.MultiheadAttention)

    def shape(self, module: Any) -> tuple[int, int, int]:
        return 1, 3 * module.embed_dim, module.embed_dim

    def inputs(self, module: Any, x: Tensor) -> list[Tensor]:
        return [x]

    def gradients(self, module: Any, gradient: Tensor) -> list[Tensor]:
        return [gradient]


class Output(Linear):
    """The output projection, which PyTorch gives a class of its own."""

    module = NonDynamicallyQuantizableLinear
    seen = "product"


register(Projection())
register(Output())
