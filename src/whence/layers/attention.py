"""`nn.MultiheadAttention`: its packed projection of queries, keys and values, and its output.

The module calls neither as a layer: it hands their weights to a function that multiplies by them.
So the products themselves are captured (`seen`). They have positions before examples.
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from whence.layers.kind import Kind, register
from whence.layers.linear import Linear


class Projection(Kind):
    """The packed projection: of self-attention, one product gives queries, keys and values; of
    attention to another sequence, products with rows of the weight do."""

    module = nn.MultiheadAttention
    attributes = ("in_proj_weight", "in_proj_bias")
    seen = "product"

    def refusal(self, module: nn.Module) -> str | None:
        if module._parameters.get("in_proj_weight") is None:
            return "it has separate weights for queries, keys and values (kdim, vdim)"
        return super().refusal(module)


class Output(Linear):
    """The output projection, for which PyTorch has a separate class."""

    module = NonDynamicallyQuantizableLinear
    seen = "product"


register(Projection())
register(Output())
