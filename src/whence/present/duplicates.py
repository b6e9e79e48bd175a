"""Near-duplicates: examples with nearly the same picture, text or row, and the same label.

    sketch(m)                     a unit vector: the pixels, or which words or cells occur
    m duplicates l                if sketch(m) · sketch(l) ≥ SIMILAR[kind]

The first example of a group leads it; the others duplicate their leader, so groups do not chain.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import adaptive_avg_pool2d

SIMILAR = {"image": 0.98, "text": 0.85, "row": 0.9}  # the least cosine of two duplicates
PIXELS = 784  # numbers of a picture's sketch, at most
HASHED = 512  # numbers of a text's or row's sketch
BLOCK = 2**24  # cosines in memory at a time


@dataclass(frozen=True)
class Sketch:
    """What two examples must share to be near-duplicates.

    Attributes:
        kind: "image", "text" or "row".
        label: examples with another label are no duplicates.
        vector: of unit length.
    """

    kind: str
    label: str | None
    vector: NDArray[np.float32]

    @property
    def comparable(self) -> Hashable:
        return self.kind, self.label, len(self.vector)


def sketch(content: dict[str, Any]) -> Sketch | None:
    """The sketch of what `Examples.content` returned; None if there is nothing to compare."""
    kind, label = content["kind"], content["label"]
    if kind == "image":
        return Sketch(kind, label, _pixels(content["array"]))
    if kind == "text":
        words = re.findall(r"\w+", content["text"].casefold())
        return Sketch(kind, label, _hashed([*words, *map(" ".join, pairwise(words))]))
    if kind == "row":
        return Sketch(kind, label, _hashed(f"{name}={value}" for name, value in content["row"]))
    return None


def leaders(sketches: Sequence[Sketch | None]) -> NDArray[np.int64]:
    """(n,) the position of the example that each duplicates; its own if it duplicates none.

    Time is quadratic in the number of examples with one label.
    """
    leading = np.arange(len(sketches))
    together: dict[Hashable, list[int]] = {}
    for place, sketch in enumerate(sketches):
        if sketch is not None:
            together.setdefault(sketch.comparable, []).append(place)
    for places in together.values():
        if len(places) < 2:
            continue
        first = sketches[places[0]]
        assert first is not None
        vectors = np.stack([sketch.vector for p in places if (sketch := sketches[p]) is not None])
        for earlier, later in _pairs(vectors, SIMILAR[first.kind]):
            a, b = places[earlier], places[later]
            if leading[a] == a and leading[b] == b:
                leading[b] = a
    return leading


def _pairs(vectors: NDArray[np.float32], least: float) -> Iterable[tuple[int, int]]:
    """(earlier, later) with a cosine of at least this, ordered by the earlier one."""
    count = len(vectors)
    step = max(1, BLOCK // count)
    for start in range(0, count, step):
        block = vectors[start : start + step] @ vectors[start:].T
        earlier, later = np.nonzero(np.triu(block >= least, 1))
        yield from zip((earlier + start).tolist(), (later + start).tolist(), strict=True)


def _pixels(array: NDArray[Any]) -> NDArray[np.float32]:
    """A picture (c, h, w) without its brightness and contrast, in at most `PIXELS` numbers."""
    pixels = np.nan_to_num(np.asarray(array[:3], np.float64))
    side = int((PIXELS / len(pixels)) ** 0.5)
    small = (min(side, pixels.shape[1]), min(side, pixels.shape[2]))
    if small != pixels.shape[1:]:
        pixels = adaptive_avg_pool2d(torch.from_numpy(pixels), small).numpy()
    flat = pixels.ravel()
    centred = flat - flat.mean()
    size = float(np.linalg.norm(centred))
    if not math.isfinite(size) or size <= 1e-6 * float(np.linalg.norm(flat)):
        centred = np.ones_like(flat)  # one colour: orthogonal to every other picture
    return np.asarray(centred / np.linalg.norm(centred), np.float32)


def _hashed(features: Iterable[str]) -> NDArray[np.float32]:
    """Which features occur, hashed to `HASHED` numbers. The hash does not depend on the process."""
    vector = np.zeros(HASHED, np.float32)
    for feature in set(features):
        number = zlib.crc32(feature.encode("utf-8", "replace"))
        vector[number % HASHED] += 1.0 if number & (1 << 31) else -1.0
    size = float(np.linalg.norm(vector))
    return vector / size if size else vector
