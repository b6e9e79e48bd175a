"""Ways to (H + λ)⁻¹ v for influence functions, one per file."""

from whence.methods.solvers.arnoldi import Arnoldi
from whence.methods.solvers.cg import ConjugateGradients
from whence.methods.solvers.datainf import DataInf
from whence.methods.solvers.ekfac import EKFAC
from whence.methods.solvers.solver import Damping, Solver

SOLVERS: dict[str, type[Solver]] = {
    "ekfac": EKFAC,
    "cg": ConjugateGradients,
    "arnoldi": Arnoldi,
    "datainf": DataInf,
}

__all__ = ["SOLVERS", "Damping", "Solver"]
