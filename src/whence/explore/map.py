"""The training examples in two dimensions: principal components of their representations.

    h(m)  (n, r)     what the last layer sees of example m in the final model
    x(m)  (n, 2)     its first two principal components, scaled to [-1, 1]

Each stage has its own components, side by side. Wide representations are first projected at random,
which preserves large components.
"""

from __future__ import annotations

import base64
import threading
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whence.data import cut
from whence.explore.scored_data import ScoredData
from whence.layers.passes import precision_as_asked
from whence.layers.representation import representations
from whence.study import Study

BATCH = 256
WIDEST = 512  # numbers of a representation that are kept
APART = 2.4  # the distance between two stages
MOST_CLASSES = 200


def coordinates(data: ScoredData, stop: threading.Event) -> tuple[NDArray[np.float32], str]:
    """(N, 2) where each training example is, by place, and what the map is of."""
    assert data.study is not None
    points = np.full((len(data.ids), 2), np.nan, np.float32)
    sources = []
    for k, name in enumerate(data.stages):
        stage = name or data.study.stages[-1]
        places = np.flatnonzero(data.stage_of == k)
        h, source = _represented(data.study, stage, data.ids[places], stop)
        points[places] = principal(h) + np.array([APART * k, 0.0], np.float32)
        sources.append(source)
    return points, ", ".join(dict.fromkeys(sources))


def principal(h: Tensor) -> NDArray[np.float32]:
    """(n, 2) the first two principal components of (n, r), each scaled to [-1, 1].

    Signs are fixed: the entry of the direction that is largest in size is positive.
    """
    h = h.double() - h.double().mean(0)
    _, directions = torch.linalg.eigh(h.T @ h)
    first = directions[:, -2:].flip(1)
    first = first * first.gather(0, first.abs().argmax(0, keepdim=True)).sign()
    points = h @ first
    if points.shape[1] < 2:  # one number only
        points = torch.cat([points, torch.zeros_like(points)], 1)
    return np.asarray((points / points.abs().amax(0).clamp_min(1e-30)).float().numpy())


def packed(values: NDArray[Any]) -> str:
    """Numbers as base64, for a typed array of the page."""
    return base64.b64encode(np.ascontiguousarray(values).tobytes()).decode()


def _represented(
    study: Study, stage: str, ids: NDArray[np.int64], stop: threading.Event
) -> tuple[Tensor, str]:
    """(n, r) the representations of a stage's examples in its final model."""
    run = study.runs[0]
    with torch.no_grad(), precision_as_asked():
        options: dict[str, Any] = {"device": study.device, "dtype": torch.float32}
        passes = study.passes(run, quiet=True, scope="model", **options)[stage]
        passes.load([c for c in run.checkpoints if c.stage == stage][-1])
        parts, source = [], ""
        for where in cut(len(ids), BATCH):
            if stop.is_set():
                raise InterruptedError
            stream = study.data[stage].stream([ids[where]], passes.device, passes.dtype, 0)
            for _, batch in stream:
                h, source = representations(passes, batch, None)
                parts.append(_narrowed(h.float().cpu()))
    return torch.cat(parts), source


def _narrowed(h: Tensor) -> Tensor:
    """At most `WIDEST` numbers of each, by a random projection that is always the same."""
    if h.shape[1] <= WIDEST:
        return h
    random = torch.Generator().manual_seed(0)
    projection = torch.randn(h.shape[1], WIDEST, generator=random) / WIDEST**0.5
    narrow: Tensor = h @ projection
    return narrow
