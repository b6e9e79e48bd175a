"""Which layers are tracked, and what one forward and backward pass says about each."""

from whence.layers import conv1d, conv2d, linear  # noqa: F401  (each registers its kind)
from whence.layers.capture import Block, Pair, Site, Tape
from whence.layers.kind import KINDS, Kind, register
from whence.layers.tracked import Excluded, Tracked, find, report

__all__ = [
    "KINDS",
    "Block",
    "Excluded",
    "Kind",
    "Pair",
    "Site",
    "Tape",
    "Tracked",
    "find",
    "register",
    "report",
]
