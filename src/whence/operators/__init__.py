"""Curvature of the training objective as operators on a space of vectors.

A curvature layer by layer is a class with a `compute`, and a name in `KINDS` (`factored.py`).
"""

from whence.operators.factored import (
    EKFAC,
    KFAC,
    KINDS,
    Automatic,
    Diagonal,
    EigenFactors,
    Factored,
    Identity,
    OffloadedFactors,
    Shampoo,
)
from whence.operators.fit import FISHERS, Fitter, accumulator
from whence.operators.gauss_newton import GaussNewton
from whence.operators.operator import (
    Basis,
    BlockDiagonal,
    BlockSpace,
    BlockVectors,
    Inverse,
    Operator,
    coupling,
    decayed,
    inverse,
    response,
    significant,
    survival,
)
from whence.operators.statistics import FitData
from whence.operators.whitened import Whitened

__all__ = [
    "EKFAC",
    "FISHERS",
    "KFAC",
    "KINDS",
    "Automatic",
    "Basis",
    "BlockDiagonal",
    "BlockSpace",
    "BlockVectors",
    "Diagonal",
    "EigenFactors",
    "Factored",
    "FitData",
    "Fitter",
    "GaussNewton",
    "Identity",
    "Inverse",
    "OffloadedFactors",
    "Operator",
    "Shampoo",
    "Whitened",
    "accumulator",
    "coupling",
    "decayed",
    "inverse",
    "response",
    "significant",
    "survival",
]
