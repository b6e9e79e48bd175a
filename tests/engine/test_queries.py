"""Sums of queries, contrasts, and query vectors of low rank: against the scores of single queries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import models
from support.comparing import close

import whence

EXACT: Any = {"dtype": torch.float64, "progress": False}
METHODS: dict[str, Any] = {
    "source": lambda: whence.Source(2),
    "fast-source": lambda: whence.FastSource(2),
    "published": lambda: whence.Source.published(2),
    "influence": whence.Influence,
    "datainf": lambda: whence.Influence(solver="datainf"),
    "tracin": whence.TracIn,
    "trak": lambda: whence.Trak(dimension=4, damping=1e-3),
    "unrolled": whence.Unrolled,
    "hydra": whence.Hydra,
}
WEIGHTS = np.array([[1 / 3, 1 / 3, 1 / 3], [1.0, -1.0, 0.0]])


def study_of(case: str) -> tuple[whence.Study, Any]:
    torch.manual_seed(0)
    model, task, train, query = models.CASES[case]()
    start = {name: w.double().clone() for name, w in model.state_dict().items()}
    history = models.train_run(model, task, train, [2, 4, 6, 8], 0.1)
    everyone = [np.arange(len(train))] * 8  # the order within a batch does not matter
    run = whence.Run.from_checkpoints(
        history.checkpoints, history.steps, history.rates, initial=start, batches=everyone
    )
    return whence.Study(model, task, train=train, runs=run), query


@pytest.mark.parametrize("case", ["mlp", "conv", "gpt"])
@pytest.mark.parametrize("method", METHODS)
def test_a_sum_of_queries_has_the_sum_of_their_scores(method: str, case: str) -> None:
    study, query = study_of(case)
    each = METHODS[method]().attribute(study, query, **EXACT).values
    sums = METHODS[method]().attribute(study, query, query_weights=WEIGHTS, batch_size=2, **EXACT)
    close(sums.values, WEIGHTS @ each, 1e-8)
    assert sums.settings["query_weights"] == [2, 3]
    one = METHODS[method]().attribute(study, query, query_weights=WEIGHTS[0], **EXACT)
    close(one.values, WEIGHTS[:1] @ each, 1e-8)
