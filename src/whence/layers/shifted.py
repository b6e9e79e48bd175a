"""The input covariance of a 3 × 3 convolution without its patches.

The (9c × 9c) matrix Σ a aᵀ over patches has 81 blocks Σ_p X[p + u] X[p + u']ᵀ. Up to the border
they depend only on the shift u' - u, so 13 correlations of the padded image with itself (and their
transposes) give them all: a third of the work of half the full product, and a ninth of the memory.
"""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

KERNEL = 3


def add_shifted_gram(total: Tensor, image: Tensor) -> None:
    """total (9c, 9c) += Σ a aᵀ over all 3 × 3 patches (row, column, c); upper triangle.

    Args:
        image: (n, h + 2, w + 2, c), contiguous, with a border of zeros one pixel wide. Two zeros
            then separate adjacent rows and images in memory, so that a correlation over the flat
            image never pairs pixels that are not neighbours.
    """
    _, h, w, c = image.shape
    whole = {(0, d): _correlation(image, d) for d in range(KERNEL)}
    for down, right in product((1, 2), range(-2, 3)):
        whole[down, right] = _correlation(image, down * w + right)
    # Kernel place 0 never reaches the image's last row or column, place 2 never its first.
    edge = {0: (h - 2, w - 2), 2: (1, 1)}
    rows = {(u, d): _correlation(image[:, edge[u][0]], d) for u, d in product(edge, range(KERNEL))}
    columns = {
        (v, d): _correlation(image[:, :, edge[v][1]], d) for v, d in product(edge, range(KERNEL))
    }
    corners = {
        (u, v): _correlation(image[:, edge[u][0], edge[v][1]], 0) for u, v in product(edge, edge)
    }
    places = list(product(range(KERNEL), range(KERNEL)))
    for first, (u, v) in enumerate(places):
        for second, (s, t) in enumerate(places[first:], first):
            block = whole[s - u, t - v]
            if s == u and u in edge:
                block = block - rows[u, t - v]
            if t == v and v in edge:
                block = block - columns[v, s - u]
            if (s, t) == (u, v) and u in edge and v in edge:
                block = block + corners[u, v]
            total[first * c : (first + 1) * c, second * c : (second + 1) * c] += block


def patch_sums(image: Tensor) -> Tensor:
    """Σ over all patches a: (9c,)."""
    _, h, w, _ = image.shape
    once = image.sum(0)
    windows = [
        once[u : u + h - 2, v : v + w - 2].sum((0, 1))
        for u, v in product(range(KERNEL), range(KERNEL))
    ]
    return torch.cat(windows)


def _correlation(image: Tensor, shift: int) -> Tensor:
    """Σ_r X[r] X[r + shift]ᵀ over the flat pixels of (..., c)."""
    pixels = image.reshape(-1, image.shape[-1])
    return pixels[: len(pixels) - shift].T @ pixels[shift:]
