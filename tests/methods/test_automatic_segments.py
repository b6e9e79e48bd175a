"""segments="auto": where the curvature changes, a segment ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support import models

import whence

EXACT: dict[str, Any] = {"dtype": torch.float64, "progress": False}


def scaled(model: torch.nn.Module, factor: float) -> dict[str, torch.Tensor]:
    return {name: value * factor for name, value in model.state_dict().items()}


def ends(scores: whence.Scores) -> list[int]:
    return [segment["end"] for segment in scores.diagnostics["segments"]]


@pytest.mark.parametrize(
    ("factors", "expected"),
    [
        ([1.0, 1.0, 1.0, 1.0], [40]),
        ([0.3, 0.3, 2.0, 2.0], [20, 40]),
        ([0.1, 0.3, 1.0, 3.0], [10, 20, 30, 40]),
    ],
)
def test_a_segment_ends_where_the_curvature_changes(
    factors: list[float], expected: list[int]
) -> None:
    torch.manual_seed(0)
    model, train = models.mlp().double(), models.vectors(30)
    run = whence.Run.from_checkpoints([scaled(model, f) for f in factors], [10, 20, 30, 40], 0.05)
    study = whence.Study(model, whence.Classification(), train=train, runs=run)
    method = whence.Source.published("auto", fisher="exact")
    scores = method.attribute(study, models.vectors(3, seed=1), **EXACT)
    assert ends(scores) == expected
    given = whence.Source.published(expected, fisher="exact")
    again = given.attribute(study, models.vectors(3, seed=1), **EXACT)
    assert np.array_equal(scores.values, again.values)


def test_a_stage_always_ends_a_segment() -> None:
    torch.manual_seed(0)
    model, train = models.mlp().double(), models.vectors(12)
    run = whence.Run.from_checkpoints(
        [model.state_dict()] * 3, [10, 20, 30], 0.05, stages={"a": 20, "b": 30}
    )
    study = whence.Study(model, whence.Classification(), train={"a": train, "b": train}, runs=run)
    scores = whence.Source.published("auto").attribute(study, models.vectors(3, seed=1), **EXACT)
    assert ends(scores) == [20, 30]
