"""Per-example gradients in few dimensions: random projections, leading eigenvectors."""

from whence.projections.eigenbasis import Eigenbasis
from whence.projections.gradients import Gradients, gather, projected
from whence.projections.moments import moments
from whence.projections.projection import Projection, Scaled, check
from whence.projections.random import Random

__all__ = [
    "Eigenbasis",
    "Gradients",
    "Projection",
    "Random",
    "Scaled",
    "check",
    "gather",
    "moments",
    "projected",
]
