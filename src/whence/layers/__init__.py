"""Which layers are tracked, and what one forward and backward pass says about each."""

from whence.layers import conv1d, conv2d, linear  # noqa: F401  (each registers its kind)
from whence.layers.capture import Block, Pair, Site, Tape
from whence.layers.choose import Chooser, by_name, by_type, last_blocks, mlp_only
from whence.layers.kind import KINDS, Kind, register
from whence.layers.tracked import Excluded, Tracked, find, report

__all__ = [
    "KINDS",
    "Block",
    "Chooser",
    "Excluded",
    "Kind",
    "Pair",
    "Site",
    "Tape",
    "Tracked",
    "by_name",
    "by_type",
    "find",
    "last_blocks",
    "mlp_only",
    "register",
    "report",
]
