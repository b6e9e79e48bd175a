"""Curvature of the training objective: covariances, eigenbases, eigenvalues, their functions."""

from whence.operators import cost
from whence.operators.fit import (
    FISHERS,
    KINDS,
    BlockCurvature,
    Curvature,
    FitData,
    Fitter,
    bases_of,
    check_choices,
)
from whence.operators.functions import inverse, response, survival
from whence.operators.products import Basis, Readout
from whence.persist.identity import key_of

__all__ = [
    "FISHERS",
    "KINDS",
    "Basis",
    "BlockCurvature",
    "Curvature",
    "FitData",
    "Fitter",
    "Readout",
    "bases_of",
    "check_choices",
    "cost",
    "inverse",
    "key_of",
    "response",
    "survival",
]
