"""Solvers of influence functions: ways to compute (H + λ)⁻¹, with their settings and costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whence.engine.workspace import Workspace
from whence.errors import InvalidInput, check_choice, check_count, check_damping
from whence.operators import FISHERS, KINDS, BlockDiagonal, FitData, Inverse, coupling
from whence.operators.datainf import DataInf
from whence.operators.gauss_newton import GaussNewton
from whence.operators.low_rank import LowRank

# Below this share of EK-FAC's largest eigenvalue the preconditioner is flat. EK-FAC finds the few
# large eigenvalues of H, but many of its small ones are not H's, and dividing by them costs
# iterations (to 1 % error on digits, three models: 25 to 37 instead of 50 to 80).
FLAT = 0.1
CG_VECTORS = 8  # per query: right side, solution, residual, direction, and products on the way
NEED_DAMPING = {
    "cg": "leaves directions in which the Gauss-Newton matrix is 0, and conjugate gradients do "
    "not end. Give a positive number, or 'source'",
    "datainf": "is what DataInf divides by. Give a positive number, or none",
}


@dataclass(frozen=True)
class Solver:
    """A way to (H + λ)⁻¹.

    Attributes:
        defaults: the settings it has, and their defaults.
        passes: passes of each kind over the training data, from the settings and the share of the
            examples that H is taken on.
        inverse: from the workspace, λ of the blocks that training moved, and the settings.
        joint: whether H is of all layers together.
    """

    defaults: Mapping[str, Any]
    passes: Callable[[Mapping[str, Any], float], dict[str, int]]
    inverse: Callable[[Workspace, BlockDiagonal, Mapping[str, Any]], Inverse[Any]]
    joint: bool = False


def layer_by_layer(
    workspace: Workspace, λ: BlockDiagonal, settings: Mapping[str, Any]
) -> Inverse[Any]:
    """EK-FAC or another curvature in closed form, coupled or not."""
    stages, how = workspace.study.stages, {k: settings[k] for k in ("fisher", "seed")}
    H = workspace.curvature(settings["curvature"], stages, [workspace.run.final], λ, **how)
    if settings["coupling"] and H.block_diagonal:
        D: dict[str, float | Tensor] = dict.fromkeys(λ, 1.0)
        if all(bool(torch.as_tensor(x > 0).all()) for x in λ.values()):
            D = {name: 1 / x for name, x in λ.items()}
        c = coupling(H.whitened(workspace.diagonal(D)))
        workspace.ledger.diagnostics["coupling"] = c
        H = H.scaled(c)
    return H.inverse(workspace.diagonal(λ))


def conjugate_gradients(
    workspace: Workspace, λ: BlockDiagonal, settings: Mapping[str, Any]
) -> Inverse[Any]:
    """The true Gauss-Newton matrix of all layers together, preconditioned by EK-FAC.

    What is left of the error is the residual r = v - (H + λ) w, reported in the norm of the
    preconditioner M: √(rᵀM⁻¹r / vᵀM⁻¹v), about the error of w as scores see it.
    """
    data, final = workspace.fit_data(workspace.study.stages), [workspace.run.final]
    how = {k: settings[k] for k in ("fisher", "seed")}
    H = _gauss_newton(
        workspace,
        data,
        λ,
        settings,
        queries=solved_at_once(workspace),
        iterations=settings["iterations"],
        relative_residual=settings["tolerance"],
        preconditioner=KINDS[settings["curvature"]].fit(workspace, final, **how),
        flat=FLAT,
    )
    return H.inverse(λ)


def solved_at_once(workspace: Workspace) -> int:
    """The number of queries that conjugate gradients can solve together."""
    size = sum(block.size for block in workspace.blocks.values())
    per_query = CG_VECTORS * workspace.zero.element_size() * size
    examples = sum(len(workspace.used(stage)) for stage in workspace.study.stages)
    asked = examples if workspace.query is None else len(workspace.query)
    return max(1, min(asked, workspace.memory // 4 // max(1, per_query)))


def arnoldi(workspace: Workspace, λ: BlockDiagonal, settings: Mapping[str, Any]) -> Inverse[Any]:
    """The true Gauss-Newton matrix on its leading eigenvectors."""
    data = workspace.fit_data(workspace.study.stages)
    H = _gauss_newton(workspace, data, λ, settings, queries=1)
    limits = settings["rank"], settings["iterations"], settings["seed"]
    cache, room = workspace.study.store(workspace.run), workspace.memory // 2
    leading = LowRank.fit(H, cache, workspace.zero, room, *limits)
    workspace.ledger.diagnostics["solver"] = leading.statistics
    return leading.inverse(λ)


def datainf(workspace: Workspace, λ: BlockDiagonal, settings: Mapping[str, Any]) -> Inverse[Any]:
    """A mean over the examples of inverses in closed form."""
    if not λ.scalar:
        raise InvalidInput(
            "damping='source' is λP̄⁻¹ for a preconditioned optimizer, one number for each "
            "parameter, and DataInf takes one for each layer: give a number, or none"
        )
    data, workspace.in_step = workspace.fit_data(workspace.study.stages), True
    return DataInf(data, workspace.run.final, workspace.batch_size).inverse(λ)


def _gauss_newton(
    workspace: Workspace,
    data: Sequence[FitData],
    λ: Mapping[str, float | Tensor],
    settings: Mapping[str, Any],
    queries: int,
    **more: Any,
) -> GaussNewton:
    """The true matrix of the layers that were trained, on all examples or some."""
    if settings["examples"] is not None:
        data = _subsample(data, settings["examples"], settings["seed"])
    return workspace.gauss_newton(data, [workspace.run.final], λ, queries, **more)


def _subsample(data: Sequence[FitData], count: int, seed: int) -> list[FitData]:
    """This many of the examples, chosen by the seed alone."""
    total = sum(len(part.indices) for part in data)
    if count > total:
        raise InvalidInput(
            f"examples={count}, but the run trained on {total}: use at most that many"
        )
    chosen = np.sort(np.random.default_rng(seed).choice(total, count, replace=False))
    ends = np.cumsum([len(part.indices) for part in data])
    parts = []
    for part, end in zip(data, ends, strict=True):
        places = chosen - (end - len(part.indices))
        inside = places[(places >= 0) & (places < len(part.indices))]
        parts.append(replace(part, indices=part.indices[inside]))
    return [part for part in parts if len(part.indices)]


def _fitting(settings: Mapping[str, Any]) -> dict[str, int]:
    return KINDS[settings["curvature"]].passes_over(1)


SOLVERS = {
    "ekfac": Solver(
        {
            "damping": "source",
            "curvature": "auto",
            "fisher": "sampled",
            "seed": 0,
            "coupling": True,
        },
        lambda settings, share: _fitting(settings),
        layer_by_layer,
    ),
    "cg": Solver(
        {
            "damping": "source",
            "curvature": "ekfac",
            "fisher": "sampled",
            "seed": 0,
            "iterations": 100,
            "tolerance": 1e-2,
            "examples": None,
        },
        lambda settings, share: (
            _fitting(settings) | {"products": max(1, round((settings["iterations"] + 1) * share))}
        ),
        conjugate_gradients,
        joint=True,
    ),
    "arnoldi": Solver(
        {"damping": 1e-8, "seed": 0, "rank": 100, "iterations": 200, "examples": None},
        lambda settings, share: {"steps": max(1, round(settings["iterations"] * share))},
        arnoldi,
        joint=True,
    ),
    "datainf": Solver(
        {"damping": None},
        lambda settings, share: {"norms": int(settings["damping"] is None), "sums": 1},
        datainf,
    ),
}


def check_settings(solver: str, given: dict[str, Any], settings: dict[str, Any]) -> None:
    """Refuse settings that the solver does not have, and values that make no sense.

    Args:
        given: those that differ from its defaults.
        settings: all of them.
    """
    for name in given.keys() - SOLVERS[solver].defaults.keys():
        owners = [f"solver={k!r}" for k, other in SOLVERS.items() if name in other.defaults]
        raise InvalidInput(
            f"{name}={given[name]!r} means nothing to solver={solver!r}: leave it out, or use "
            + " or ".join(owners)
        )
    damping = settings["damping"]
    if damping not in (None, "source"):
        check_damping(damping, ", or 'source' for λ = 1/(η̄K)")
    if damping == 0 and solver in NEED_DAMPING:
        raise InvalidInput(f"damping=0 {NEED_DAMPING[solver]}")
    if "curvature" in settings:
        check_choice("curvature", settings["curvature"], KINDS)
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
