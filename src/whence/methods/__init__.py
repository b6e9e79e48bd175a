"""One file per method, nothing but the method's own mathematics."""

from whence.methods.best import Best
from whence.methods.downsampling import Downsampling
from whence.methods.fastsource import FastSource
from whence.methods.hydra import Hydra
from whence.methods.influence import Influence
from whence.methods.leaveoneout import LeaveOneOut
from whence.methods.random import Random
from whence.methods.repsim import RepSim
from whence.methods.source import Source
from whence.methods.tracin import TracIn
from whence.methods.trak import Trak
from whence.methods.unrolled import Unrolled

__all__ = [
    "Best",
    "Downsampling",
    "FastSource",
    "Hydra",
    "Influence",
    "LeaveOneOut",
    "Random",
    "RepSim",
    "Source",
    "TracIn",
    "Trak",
    "Unrolled",
]
