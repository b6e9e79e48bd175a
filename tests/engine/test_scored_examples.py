"""Scores of chosen training examples, and of candidates outside the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import dense, models
from support.comparing import close
from torch.utils.data import Subset

import whence
from whence.errors import FolderConflict

EXACT: Any = {"dtype": torch.float64, "progress": False}
METHODS: dict[str, Any] = {
    "source": lambda: whence.Source(2),
    "influence": whence.Influence,
    "tracin": whence.TracIn,
    "trak": lambda: whence.Trak(dimension=4, damping=1e-3),
    "repsim": whence.RepSim,
    "gradient norm": whence.GradientNorm,
    "gradient cosine": whence.GradientCosine,
    "less": lambda: whence.LESS(dimension=10),
    "trackstar": lambda: whence.TrackStar(dimension=10, mixing=0.0),
}
CHOSEN = [5, 0, 3]


def trained(case: str, **options: Any) -> tuple[whence.Study, Any, models.History]:
    torch.manual_seed(0)
    model, task, train, query = models.CASES[case]()
    history = models.train_run(model, task, train, [2, 4, 6], 0.1)
    return whence.Study(model, task, train=train, runs=history.run, **options), query, history


@pytest.mark.parametrize("case", ["mlp", "gpt"])
@pytest.mark.parametrize("method", METHODS)
def test_chosen_examples_have_the_scores_that_they_have_among_all(method: str, case: str) -> None:
    study, query, _ = trained(case)
    for asked in (query, None):
        every = METHODS[method]().attribute(study, asked, **EXACT)
        some = METHODS[method]().attribute(study, asked, examples=CHOSEN, batch_size=2, **EXACT)
        close(some.values, every.values[..., CHOSEN], 1e-9)
        assert some.train_ids.tolist() == CHOSEN
    entry = some.helpful(k=1)[0]
    assert entry.example in CHOSEN and entry.value == some.removal_effect(None, entry.example) * -1


@pytest.mark.parametrize("case", ["mlp", "gpt"])
@pytest.mark.parametrize("method", METHODS)
def test_a_candidate_that_was_trained_on_has_its_score(method: str, case: str) -> None:
    plain, query, history = trained(case)
    every = METHODS[method]().attribute(plain, query, **EXACT).values
    train = plain.train["train"]
    study = whence.Study(
        plain.model, plain.tasks["train"], train, history.run, candidates=Subset(train, CHOSEN)
    )
    found = METHODS[method]().attribute(study, query, **EXACT)
    close(found.values, every[:, CHOSEN], 1e-9)
    assert found.provenance["candidates"] and found.train_ids.tolist() == [0, 1, 2]
    two = METHODS[method]().attribute(study, query, examples=[2], **EXACT)
    close(two.values, every[:, [3]], 1e-9)


def test_candidates_by_autograd() -> None:
    candidates = models.vectors(5, seed=7)
    study, query, history = trained("mlp", candidates=candidates)
    found, expected = whence.TracIn().attribute(study, query, **EXACT), 0.0
    for weights in history.checkpoints:
        f, g = (
            dense.per_example_gradients(study.model, weights, study.tasks["train"], what, data)
            for what, data in (("measurements", query), ("losses", candidates))
        )
        expected -= 0.1 * sum(torch.einsum("qoi,noi->qn", f[name], g[name]) for name in f).numpy()
    close(found.values, expected, 1e-9)


def test_a_folder_of_other_examples_is_refused(tmp_path: Path) -> None:
    study, query, _ = trained("mlp")
    first = whence.TracIn().attribute(study, query, examples=[1, 2], out=tmp_path, **EXACT)
    again = whence.TracIn().attribute(study, query, examples=[1, 2], out=tmp_path, **EXACT)
    np.testing.assert_array_equal(first.values, again.values)
    with pytest.raises(FolderConflict):
        whence.TracIn().attribute(study, query, examples=[1, 3], out=tmp_path, **EXACT)
    other, _, _ = trained("mlp", candidates=models.vectors(2, seed=7))
    with pytest.raises(FolderConflict):
        whence.TracIn().attribute(other, query, out=tmp_path, **EXACT)


def test_refused(tmp_path: Path) -> None:
    study, query, _ = trained("mlp")
    for examples, message in (
        ([20], r"examples has 20: the data has 0..19"),
        ([-1], "examples has -1"),
        ([1, 1], "more than once"),
        ([], "at least one"),
        ([0.5], "list of indices"),
        ({"late": [1]}, "stage 'late'"),
    ):
        with pytest.raises(whence.WhenceError, match=message):
            whence.Source().attribute(study, query, examples=examples, **EXACT)
    with pytest.raises(whence.WhenceError, match="Unrolled scores all examples"):
        whence.Unrolled().attribute(study, query, examples=[1], **EXACT)
    with pytest.raises(whence.WhenceError, match="candidates batches are built like"):
        trained("mlp", candidates=models.documents())
    with pytest.raises(whence.WhenceError, match=r"candidates of \['late'\]"):
        trained("mlp", candidates={"late": models.vectors(2)})
    outside, query, _ = trained("mlp", candidates=models.vectors(2, seed=7))
    for call in (
        lambda: whence.Unrolled().attribute(outside, query, **EXACT),
        lambda: whence.Random().attribute(outside, query),
        lambda: whence.GradientStore.build(outside, tmp_path, dimension=4),
    ):
        with pytest.raises(whence.WhenceError, match="cannot score candidates"):
            call()
