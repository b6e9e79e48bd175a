"""Per-example gradients in few dimensions: random, two-sided, leading eigenvectors."""

from whence.projections.eigenbasis import Eigenbasis
from whence.projections.gradients import Gradients, gather, projected
from whence.projections.moments import moments
from whence.projections.projection import Projection, check
from whence.projections.random import Random
from whence.projections.two_sided import TwoSided

__all__ = [
    "Eigenbasis",
    "Gradients",
    "Projection",
    "Random",
    "TwoSided",
    "check",
    "gather",
    "moments",
    "projected",
]
