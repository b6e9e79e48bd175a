"""Curvature of the training objective as operators on a space of vectors.

Adding a curvature layer by layer is one file with a `compute`, and a line in `KINDS`.
"""

from whence.operators.diagonal import Diagonal, Identity
from whence.operators.ekfac import EKFAC, Automatic, Shampoo
from whence.operators.factored import EigenFactors, Factored, OffloadedFactors
from whence.operators.fit import FISHERS, Fitter, accumulator
from whence.operators.gauss_newton import GaussNewton
from whence.operators.kfac import KFAC
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
from whence.operators.projected import Projected
from whence.operators.statistics import FitData
from whence.operators.whitened import Whitened

#: curvatures that are fitted layer by layer
KINDS: dict[str, type[Factored]] = {
    kind.kind: kind for kind in (Automatic, EKFAC, Shampoo, KFAC, Diagonal, Identity)
}

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
    "Projected",
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
