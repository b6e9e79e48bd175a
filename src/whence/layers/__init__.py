"""Which layers are tracked, and their factors (a, s) from a forward and a backward pass."""

from whence.layers import conv1d, conv2d, linear  # noqa: F401  (each registers its kind)
from whence.layers.capture import LayerFactors, ParameterBlock, Tape, TrackedLayer
from whence.layers.choose import Chooser, by_name, by_type, last_blocks, mlp_only
from whence.layers.kind import KINDS, Kind, register
from whence.layers.tracked import Excluded, Tracked, find, report

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
    "by_name",
    "by_type",
    "find",
    "last_blocks",
    "mlp_only",
    "register",
    "report",
]
