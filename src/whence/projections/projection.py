"""A projection in parts: one for all layers jointly, or one for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from whence.projections.eigenbasis import Eigenbasis
from whence.projections.gradients import Gradients
from whence.projections.random import Random

CHANCE = 8.0  # standard deviations that chance is granted
PROBED = 8  # examples a projection is tried on ...
TRIED = 256  # ... in so many dimensions at least


class Projection:
    """Parts whose coordinates stand side by side; second moments are kept within parts only."""

    def __init__(self, parts: Sequence[Random] | Sequence[Eigenbasis]) -> None:
        self.parts: list[Random | Eigenbasis] = [*parts]
        ends = [0, *accumulate(part.dimension for part in parts)]
        self.columns = [slice(a, b) for a, b in pairwise(ends)]
        self.dimension = ends[-1]

    @property
    def gathers(self) -> int:
        return max(part.gathers for part in self.parts)

    def project(self, gradients: Mapping[str, Gradients]) -> Tensor:
        """(n, d)"""
        found = [part.project(gradients) for part in self.parts]
        return found[0] if len(found) == 1 else torch.cat(found, 1)

    def per_coordinate(self, by_block: Mapping[str, float]) -> Tensor:
        """A number per block as one per coordinate, (d,)."""
        return torch.cat([part.per_coordinate(by_block) for part in self.parts])


def check(projection: Projection, gradients: Mapping[str, Gradients]) -> None:
    """Refuse a random projection that does not keep lengths as chance allows, layer by layer.

    ‖Pg‖²/‖g‖² has mean 1 and a variance of at most 2/d. Zeros, a wrong scale and a layer that is
    left out all show, before any time is spent. A small d, for which chance allows much, is tried
    as the first part of a larger one, which it is.
    """
    for part in projection.parts:
        assert isinstance(part, Random)
        d = max(part.dimension, TRIED)
        wide = Random(part.blocks, d, part.key, part.device, part.dtype)
        allowed = CHANCE * (2 / d) ** 0.5
        for block in part.blocks:
            if block.name not in gradients:
                continue
            alone = {block.name: gradients[block.name]}
            before = alone[block.name].squared_norms()
            ratio = (wide.project(alone).double().square().sum(1) / before)[before > 0]
            if bool(((ratio - 1).abs() > allowed).any()):
                raise RuntimeError(
                    f"the random projection does not work on {part.device}: it makes gradients of "
                    f"layer {block.name} {float(ratio.min()):.3g} to {float(ratio.max()):.3g} "
                    f"times as long (squared), where chance allows 1 ± {allowed:.2g}. Please "
                    "report this"
                )
