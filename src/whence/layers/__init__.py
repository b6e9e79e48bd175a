"""Which layers are tracked, and their factors (a, s) from a forward and a backward pass."""

from whence.layers import (  # noqa: F401  (kinds)
    attention,
    conv1d,
    convolution,
    embedding,
    experts,
    linear,
    norms,
    recurrent,
)
from whence.layers.capture import LayerFactors, Tape
from whence.layers.choose import (
    Chooser,
    by_name,
    by_type,
    everything,
    last_blocks,
    matrices,
    mlp_only,
)
from whence.layers.kind import KINDS, Kind, ParameterBlock, TrackedLayer, register
from whence.layers.tracked import Excluded, Tracked, Updates, find

__all__ = [
    "KINDS",
    "Chooser",
    "Excluded",
    "Kind",
    "LayerFactors",
    "ParameterBlock",
    "Tape",
    "Tracked",
    "TrackedLayer",
    "Updates",
    "by_name",
    "by_type",
    "everything",
    "find",
    "last_blocks",
    "matrices",
    "mlp_only",
    "register",
]
