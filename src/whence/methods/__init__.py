"""One file per method, nothing but the method's own mathematics."""

from whence.methods.influence import Influence
from whence.methods.source import Source
from whence.methods.tracin import TracIn

__all__ = ["Influence", "Source", "TracIn"]
