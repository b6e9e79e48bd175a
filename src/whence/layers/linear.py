"""`nn.Linear`, over any number of middle dimensions."""

from __future__ import annotations

from torch import nn

from whence.layers.kind import Kind, register


class Linear(Kind):
    module = nn.Linear


register(Linear())
