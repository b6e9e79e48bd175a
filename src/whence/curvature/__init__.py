"""Curvature of the training objective: covariances, eigenbases, eigenvalues, their functions."""

from whence.curvature import cost
from whence.curvature.fit import (
    FISHERS,
    KINDS,
    BlockCurvature,
    Curvature,
    Fitter,
    Part,
    bases_of,
    check_choices,
)
from whence.curvature.functions import inverse, response, survival
from whence.curvature.products import Basis, Readout
from whence.curvature.store import Store, key_of

__all__ = [
    "FISHERS",
    "KINDS",
    "Basis",
    "BlockCurvature",
    "Curvature",
    "Fitter",
    "Part",
    "Readout",
    "Store",
    "bases_of",
    "check_choices",
    "cost",
    "inverse",
    "key_of",
    "response",
    "survival",
]
