"""Scores layer by layer: each is that of a study of the layer alone, and they add up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import dense, models
from support.comparing import close

import whence

EXACT: Any = {"dtype": torch.float64, "progress": False}
METHODS: dict[str, Any] = {
    "source": lambda: whence.Source(2),
    "influence": whence.Influence,
    "tracin": whence.TracIn,
    "trak": lambda: whence.Trak(dimension=4, damping=1e-3),
}


def trained(case: str) -> tuple[whence.Study, Any, models.History]:
    torch.manual_seed(0)
    model, task, train, query = models.CASES[case]()
    history = models.train_run(model, task, train, [2, 4, 6], 0.1)
    study = whence.Study(model, task, train=train, runs=history.run, layers="matrices")
    return study, query, history


@pytest.mark.parametrize("case", ["mlp", "conv", "gpt"])
@pytest.mark.parametrize("method", METHODS)
def test_layers_add_up(tmp_path: Path, method: str, case: str) -> None:
    study, query, _ = trained(case)
    plain = METHODS[method]().attribute(study, query, **EXACT)
    actual = METHODS[method]().attribute(study, query, by_layer=True, out=tmp_path, **EXACT)
    assert actual.by_layer.shape == (len(actual.layers), *plain.shape) and not plain.layers
    close(actual.values, plain.values, 1e-10)
    close(actual.by_layer.sum(0), plain.values, 1e-10)
    assert (abs(actual.by_layer).max((1, 2)) > 0).all()
    shares = [
        [s["share_of_score"] for s in x.diagnostics.get("segments", [])] for x in (actual, plain)
    ]
    assert shares[0] == pytest.approx(shares[1])
    opened = whence.Scores.load(tmp_path)
    assert opened.layers == actual.layers
    np.testing.assert_array_equal(opened.by_layer, actual.by_layer)


def test_a_layer_has_the_products_of_its_own_gradients() -> None:
    """TracIn against autograd, layer by layer; grouped convolutions are one layer."""
    study, query, history = trained("conv")
    model, task, train = study.model, study.tasks["train"], study.train["train"]
    actual = whence.TracIn().attribute(study, query, by_layer=True, **EXACT)
    expected = {name: np.zeros(actual.shape) for name in actual.layers}
    for weights in history.checkpoints:
        measured = dense.per_example_gradients(model, weights, task, "measurements", query)
        losses = dense.per_example_gradients(model, weights, task, "losses", train)
        for block, gradients in measured.items():
            layer = block.rsplit(".", 1)[0] if block[-1].isdigit() else block
            product = np.einsum("qoi,noi->qn", gradients.numpy(), losses[block].numpy())
            expected[layer] -= 0.1 * product
    close(actual.by_layer, np.stack([expected[name] for name in actual.layers]), 1e-10)


def test_self_influence_and_several_runs() -> None:
    study, query, _ = trained("mlp")
    selves = whence.Source().attribute(study, by_layer=True, **EXACT)
    close(selves.by_layer.sum(0), whence.Source().attribute(study, **EXACT).values, 1e-10)
    twice = whence.Study(
        study.model, study.tasks["train"], study.train["train"], [study.runs[0]] * 2
    )
    mean = whence.Source().attribute(twice, query, by_layer=True, **EXACT)
    one = whence.Source().attribute(study, query, by_layer=True, **EXACT)
    close(mean.by_layer, one.by_layer, 1e-10)


def test_refused() -> None:
    study, query, _ = trained("mlp")
    for method, options, message in (
        (whence.Source(), {"by_segment": True}, "by_segment and by_layer cannot be combined"),
        (whence.Source(), {"top": 2}, "top=2 together with by_layer"),
        (whence.RepSim(), {}, "the scores of RepSim are not sums over layers"),
        (whence.Unrolled(), {}, "the scores of Unrolled are not sums over layers"),
    ):
        with pytest.raises(whence.WhenceError, match=message):
            method.attribute(study, query, by_layer=True, **options, **EXACT)
