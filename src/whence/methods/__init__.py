"""One file per method, nothing but the method's own mathematics."""

from whence.methods.best import Best
from whence.methods.bm25 import BM25
from whence.methods.downsampling import Downsampling
from whence.methods.fastsource import FastSource
from whence.methods.gradientcosine import GradientCosine
from whence.methods.gradientnorm import GradientNorm
from whence.methods.hydra import Hydra
from whence.methods.influence import Influence
from whence.methods.leaveoneout import LeaveOneOut
from whence.methods.less import LESS
from whence.methods.random import Random
from whence.methods.repsim import RepSim
from whence.methods.source import Source
from whence.methods.tracin import TracIn
from whence.methods.trackstar import TrackStar
from whence.methods.trak import Trak
from whence.methods.unrolled import Unrolled

__all__ = [
    "BM25",
    "LESS",
    "Best",
    "Downsampling",
    "FastSource",
    "GradientCosine",
    "GradientNorm",
    "Hydra",
    "Influence",
    "LeaveOneOut",
    "Random",
    "RepSim",
    "Source",
    "TracIn",
    "TrackStar",
    "Trak",
    "Unrolled",
]
