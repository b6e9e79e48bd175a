"""What influence functions ask of a solver, and what several of them share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from numbers import Integral
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from whence.engine.workspace import Vectors, Workspace
from whence.operators import Basis, FitData
from whence.operators.gauss_newton import GaussNewton, Layout


@dataclass(frozen=True)
class Damping:
    """λ of every block: a number, infinite for a layer that was not trained.

    `matrices`, where training was preconditioned, are λP̄⁻¹ (o, width) in its place.
    """

    numbers: dict[str, float]
    matrices: dict[str, Tensor] | None = None

    def responds(self, name: str) -> bool:
        """Whether a block was trained, and so responds to the data at all."""
        return isfinite(self.numbers[name])

    def vector(self, layout: Layout, like: Tensor) -> Tensor:
        """λ over the parameters of a layout, (p,)."""
        given = self.matrices or {
            name: torch.tensor(self.numbers[name], dtype=like.dtype).expand(block.shape)
            for name, block in layout.blocks.items()
        }
        return layout.join({name: given[name].to(like)[None] for name in layout.blocks})[0]


class Solver(ABC):
    """(H + λ)⁻¹ for many vectors."""

    #: the settings it has, and their defaults; `damping` is always among them
    defaults: ClassVar[dict[str, Any]]

    @classmethod
    @abstractmethod
    def check(cls, **settings: Any) -> None:
        """Refuse settings that cannot be meant."""

    @classmethod
    @abstractmethod
    def passes(cls, total: int, **settings: Any) -> dict[str, int]:
        """Passes of each kind over the `total` training examples, at most, before the scores'."""

    @classmethod
    @abstractmethod
    def prepare(
        cls, workspace: Workspace, parts: Sequence[FitData], λ: Damping, **settings: Any
    ) -> Self:
        """Fit what does not depend on the queries, at the run's final model."""

    @property
    def bases(self) -> Mapping[str, Basis | None]:
        """Where the vectors are best built; None: in the parameters' own coordinates."""
        return {}

    @abstractmethod
    def solve(self, v: Vectors) -> tuple[Vectors, dict[str, Any]]:
        """(H + λ)⁻¹ v, and how it went. The memory of v may be reused."""


def check_count(name: str, value: Any) -> None:
    """Refuse what is not a number of things."""
    if not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{name}={value!r} must be a whole number, at least 1")


def gauss_newton(
    workspace: Workspace,
    parts: Sequence[FitData],
    λ: Damping,
    queries: int,
    examples: int | None,
    seed: int,
) -> GaussNewton:
    """The true matrix of the layers that were trained, for so many vectors at a time."""
    chosen = parts if examples is None else subsample(parts, examples, seed)
    trained = {name for name in workspace.blocks if λ.responds(name)}
    return workspace.gauss_newton(chosen, [workspace.run.final], trained, queries)


def subsample(parts: Sequence[FitData], count: int, seed: int) -> list[FitData]:
    """So many of the parts' examples, chosen by the seed alone."""
    total = sum(len(part.indices) for part in parts)
    if count > total:
        raise ValueError(f"examples={count}, but the run trained on {total}: use at most that many")
    chosen = np.sort(np.random.default_rng(seed).choice(total, count, replace=False))
    ends = np.cumsum([len(part.indices) for part in parts])
    kept = []
    for part, end in zip(parts, ends, strict=True):
        places = chosen - (end - len(part.indices))
        inside = places[(places >= 0) & (places < len(part.indices))]
        kept.append(replace(part, indices=part.indices[inside]))
    return [part for part in kept if len(part.indices)]
