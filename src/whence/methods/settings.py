"""Settings that several methods check alike."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

from whence.engine.solvers import SOLVERS
from whence.engine.workspace import GAUSS_NEWTON
from whence.errors import InvalidInput
from whence.operators import FISHERS, KINDS

NEED_DAMPING = {
    "cg": "leaves directions in which the Gauss-Newton matrix is 0, and conjugate gradients do "
    "not end. Give a positive number, or 'source'",
    "datainf": "is what DataInf divides by. Give a positive number, or none",
}
USUAL_PRODUCTS = 40  # Lanczos steps that the Gauss-Newton matrix takes, for the estimate


def check_choice(name: str, value: Any, options: Iterable[str]) -> None:
    """Refuse a value that is not among the options."""
    if value not in (known := list(options)):
        listed = ", ".join(map(repr, known))
        raise InvalidInput(f"{name}={value!r} is not known: use one of {listed}")


def check_count(name: str, value: Any) -> None:
    """Refuse a value that is not a whole number, at least 1."""
    if not isinstance(value, Integral) or value < 1:
        raise InvalidInput(f"{name}={value!r} must be a whole number, at least 1")


def check_damping(damping: Any) -> None:
    """Refuse a damping that is not zero or a positive number."""
    if isinstance(damping, bool) or not (isinstance(damping, Real) and float(damping) >= 0):
        raise InvalidInput(f"damping={damping!r} must be zero or positive")


def check_share(name: str, value: Any) -> None:
    """Refuse a value that is not between 0 and 1."""
    if isinstance(value, bool) or not (isinstance(value, Real) and 0 <= float(value) <= 1):
        raise InvalidInput(f"{name}={value!r} must be a share, from 0 to 1")


def fitting_passes(curvature: str, checkpoints: int) -> dict[str, int]:
    """Passes over the data that fitting a curvature at that many checkpoints takes."""
    if curvature == GAUSS_NEWTON:
        return {"products": USUAL_PRODUCTS * checkpoints}
    kinds = KINDS[curvature].passes
    return {work: checkpoints * (work in kinds) for work in ("covariances", "eigenvalues")}


def check_source(
    curvature: str, fisher: str, damping: Any, weight_decay: str, query_at: str
) -> None:
    """Refuse settings of SOURCE that do not exist, or mean nothing together."""
    check_choice("curvature", curvature, [*KINDS, GAUSS_NEWTON])
    check_choice("fisher", fisher, FISHERS)
    check_choice("weight_decay", weight_decay, ["ignore", "curvature"])
    check_choice("query_at", query_at, ["run", "final"])
    check_damping(damping)
    if curvature == GAUSS_NEWTON and fisher != "sampled":
        raise InvalidInput(
            f"fisher={fisher!r} means nothing to curvature='gauss-newton', which samples nothing: "
            "leave it out"
        )


def check_influence(solver: str, given: dict[str, Any], settings: dict[str, Any]) -> None:
    """Refuse settings of Influence that its solver does not have, or that cannot be meant."""
    for name in given.keys() - SOLVERS[solver].defaults.keys():
        owners = [f"solver={k!r}" for k, other in SOLVERS.items() if name in other.defaults]
        raise InvalidInput(
            f"{name}={given[name]!r} means nothing to solver={solver!r}: leave it out, or use "
            + " or ".join(owners)
        )
    damping = settings["damping"]
    if damping not in (None, "source") and (
        isinstance(damping, bool) or not (isinstance(damping, Real) and float(damping) >= 0)
    ):
        raise InvalidInput(
            f"damping={damping!r} must be zero or positive, or 'source' for λ = 1/(η̄K)"
        )
    if damping == 0 and solver in NEED_DAMPING:
        raise InvalidInput(f"damping=0 {NEED_DAMPING[solver]}")
    if settings.get("curvature") is not None:
        check_choice("curvature", settings["curvature"], KINDS)
    if settings.get("fisher") is not None:
        check_choice("fisher", settings["fisher"], FISHERS)
    for name in ("rank", "iterations", "examples"):
        if settings.get(name) is not None:
            check_count(name, settings[name])
    if settings.get("rank", 0) > settings.get("iterations", 1):
        raise InvalidInput(
            f"rank={settings['rank']} is more than iterations={settings['iterations']}: each "
            "iteration finds one more eigenvector. Use two iterations for each that is kept"
        )
    tolerance = settings.get("tolerance", 0.5)
    if not isinstance(tolerance, (int, float)) or not 0 < tolerance < 1:
        raise InvalidInput(f"tolerance={tolerance!r} must be between 0 and 1")
