"""FastSource: SOURCE with the parameters averaged within a segment (appendix E.2).

One set of factors and one pass of training gradients per segment, rather than per checkpoint: L
times the cost of influence functions rather than C times.
"""

from __future__ import annotations

from collections.abc import Sequence

from whence.layers.passes import Weights
from whence.methods.source import Source
from whence.run import MeanCheckpoint, Segment


class FastSource(Source):
    """`Source` at each segment's mean parameters. The arguments are the same."""

    def points(self, segment: Segment) -> Sequence[Weights]:
        return [MeanCheckpoint(segment.checkpoints)]

    @classmethod
    def published(
        cls,
        segments: int | str | Sequence[int] = 3,
        curvature: str = "ekfac",
        fisher: str = "sampled",
        damping: float | None = None,
        weight_decay: str = "ignore",
        stage: str | None = None,
        seed: int = 0,
    ) -> Source:
        """The paper to the letter. The arguments are those of `Source.published`."""
        from whence.methods.published import PublishedFastSource

        return PublishedFastSource(segments, curvature, fisher, damping, weight_decay, stage, seed)
