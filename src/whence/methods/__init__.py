"""One file per method, nothing but the method's own mathematics."""

from whence.methods.fastsource import FastSource
from whence.methods.influence import Influence
from whence.methods.random import Random
from whence.methods.source import Source
from whence.methods.tracin import TracIn

__all__ = ["FastSource", "Influence", "Random", "Source", "TracIn"]
