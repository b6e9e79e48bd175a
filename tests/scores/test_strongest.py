"""The strongest of blocks in any order, some of them twice, at two ranks: those of the whole."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from whence.scores.strongest import Strongest


@pytest.mark.parametrize("seed", range(60))
def test_blocks_in_any_order_give_the_strongest_of_the_whole(seed: int) -> None:
    random = np.random.default_rng(seed)
    q, n = int(random.integers(1, 4)), int(random.integers(1, 15))
    k = int(random.integers(1, n + 1))
    scores = random.integers(-3, 4, (q, n)).astype(np.float32)  # with many ties
    ends = sorted({0, n, *random.integers(0, n + 1, 3).tolist()})
    blocks = list(pairwise(ends))
    blocks += [blocks[i] for i in random.integers(0, len(blocks), 2)]  # twice
    start = int(random.integers(0, n))
    blocks.append((start, int(random.integers(start + 1, n + 1))))  # across others
    ranks = [Strongest(k, q, n, scores.dtype) for _ in range(2)]
    for start, end in random.permutation(blocks):
        ranks[random.integers(2)].add(slice(0, q), int(start), scores[:, start:end])
    ranks[0].merge(ranks[1].arrays)
    top = ranks[0].top((q, n))
    for end, sign in enumerate((1, -1)):
        columns = np.broadcast_to(np.arange(n), scores.shape)
        expected = np.lexsort((columns, -sign * scores), axis=1)[:, :k]
        np.testing.assert_array_equal(top.columns[end], expected)
        np.testing.assert_array_equal(top.values[end], np.take_along_axis(scores, expected, 1))
