"""Per-example gradients in few dimensions: random projections, leading eigenvectors."""

from whence.project.eigenbasis import Eigenbasis
from whence.project.gradients import Gradients, gather, projected
from whence.project.moments import moments
from whence.project.projection import Projection, check
from whence.project.random import Random

__all__ = [
    "Eigenbasis",
    "Gradients",
    "Projection",
    "Random",
    "check",
    "gather",
    "moments",
    "projected",
]
