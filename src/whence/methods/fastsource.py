"""FastSource: SOURCE with the parameters averaged within a segment (appendix E.2).

One set of factors and one pass of training gradients per segment, rather than per checkpoint: L
times the cost of influence functions rather than C times. The query gradient is still taken at the
final model.
"""

from __future__ import annotations

from collections.abc import Sequence

from whence.layers.passes import Weights
from whence.methods.source import Source
from whence.run import Averaged, Segment


class FastSource(Source):
    """`Source` at each segment's mean parameters. The arguments are the same."""

    def points(self, segment: Segment) -> Sequence[Weights]:
        return [Averaged(segment.checkpoints)]
