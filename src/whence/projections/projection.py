"""A projection in parts: one for all layers jointly, or one for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from whence.projections.eigenbasis import Eigenbasis
from whence.projections.gradients import Gradients
from whence.projections.random import Random

TOLERANCE = 8.0  # standard deviations by which a squared length may change
PROBED = 8  # examples that test a projection ...
PROBED_DIMENSIONS = 256  # ... and the least dimension they are projected to


class Projection:
    """Parts whose coordinates are concatenated; second moments stay within each part.

    Args:
        diagonal: what gradients are multiplied by first, (o, width) by block; None for nothing.
    """

    def __init__(
        self,
        parts: Sequence[Random | Eigenbasis],
        diagonal: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.diagonal = diagonal
        self.parts: list[Random | Eigenbasis] = [*parts]
        ends = [0, *accumulate(part.dimension for part in parts)]
        self.columns = [slice(a, b) for a, b in pairwise(ends)]
        self.dimension = ends[-1]

    @property
    def preferred_batch(self) -> int:
        return max(part.preferred_batch for part in self.parts)

    def project(self, gradients: Mapping[str, Gradients]) -> Tensor:
        """(n, d)"""
        if self.diagonal is not None:
            gradients = {k: replace(g, diagonal=self.diagonal[k]) for k, g in gradients.items()}
        rows = [part.project(gradients) for part in self.parts]
        return rows[0] if len(rows) == 1 else torch.cat(rows, 1)

    def scaled(self, diagonal: Mapping[str, Tensor]) -> Projection:
        """The same, of gradients that a diagonal multiplies first."""
        return Projection(self.parts, diagonal)

    def per_coordinate(self, by_block: Mapping[str, float]) -> Tensor:
        """One number per coordinate, (d,), from one number per block."""
        return torch.cat([part.per_coordinate(by_block) for part in self.parts])


def check(projection: Projection, gradients: Mapping[str, Gradients]) -> None:
    """Refuse a random projection that changes lengths by more than chance, layer by layer.

    ‖Pg‖²/‖g‖² has mean 1 and a variance of at most 2/d. The check detects zeros, a wrong scale and
    a missing layer before any time is spent. For a small d chance allows large deviations, so the
    check uses the larger projection of which it is the first part.
    """
    for part in projection.parts:
        assert isinstance(part, Random)
        d = max(part.dimension, PROBED_DIMENSIONS)
        wide = Random(part.blocks, d, part.key, part.device, part.dtype)
        allowed = TOLERANCE * (2 / d) ** 0.5
        for block in part.blocks:
            if block.name not in gradients:
                continue
            alone = {block.name: gradients[block.name]}
            before = alone[block.name].squared_norms()
            ratio = (wide.project(alone).double().square().sum(1) / before)[before > 0]
            if bool(((ratio - 1).abs() > allowed).any()):
                raise RuntimeError(
                    f"the random projection does not work on {part.device}: it multiplies squared "
                    f"gradient norms of layer {block.name} by {float(ratio.min()):.3g} to "
                    f"{float(ratio.max()):.3g}, where chance allows 1 ± {allowed:.2g}. Please "
                    "report this"
                )
