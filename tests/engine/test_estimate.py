"""The estimate of a model that was not trained: the counts of the one before an attribution."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import whence
from benchmarks.models import GPT, documents
from whence.engine.estimate import GPUS, Gpu, estimate
from whence.errors import InvalidInput

pytestmark = pytest.mark.filterwarnings("ignore:.*left out")
TASK = whence.LanguageModeling()


def _gpt(device: str, width: int = 32) -> tuple[nn.Module, Any]:
    with torch.device(device):
        model = GPT(depth=2, width=width, vocabulary=50, length=16)
        return model, torch.zeros(2, 16, dtype=torch.long)


def _of(method: Any = None, device: str = "meta", width: int = 32, **settings: Any) -> Any:
    model, batch = _gpt(device, width)
    settings = {"examples": 64, "queries": 5} | settings
    return estimate(model, TASK, batch, method or whence.Source(), **settings)


@pytest.mark.parametrize(
    "method", [whence.Source(), whence.FastSource(), whence.Influence(), whence.TracIn()]
)
def test_counts_are_those_before_an_attribution(method: Any) -> None:
    model, _ = _gpt("cpu")
    weights = model.state_dict()
    run = whence.Run.from_checkpoints([weights] * 6, range(1, 7), 0.1)
    study = whence.Study(model, TASK, documents(64, 0, 50, 16), run)
    query = TensorDataset(documents(5, 1, 50, 16).tensors[0])
    known = method.estimate(study, query)
    planned = _of(method, "cpu")
    assert planned.passes == known["passes"]
    assert planned.operations == pytest.approx(known["operations"])


def test_adam_takes_iterations_and_second_moments() -> None:
    plain, adam = _of(), _of(optimizer="adamw")
    assert adam.disk["checkpoints"] == 2 * plain.disk["checkpoints"]
    assert adam.operations > plain.operations
    published = [_of(whence.Source.published(), optimizer=name) for name in ("sgd", "adamw")]
    assert published[0].operations == published[1].operations  # in closed form


def test_weights_are_not_needed() -> None:
    assert _of().operations == pytest.approx(_of(device="cpu").operations, rel=0.02)


def test_gpus_share_the_time_and_send() -> None:
    one, eight = _of(examples=10**6), _of(examples=10**6, gpus=8)
    assert one.network == 0 < eight.network
    for kind in ("covariances", "scores"):
        assert eight.seconds[kind] == pytest.approx(one.seconds[kind] / 8)
    assert _of(examples=10**6, gpus=8, sharded=True).memory["weights"] < one.memory["weights"] / 7


def test_queries_that_share_no_pass_are_counted_and_named() -> None:
    card = Gpu(60, 400, 900, 3.0, memory=0.02)
    few, many = (_of(gpu=card, width=128, queries=q, examples=10**6) for q in (1, 40))
    assert many.passes["scores"] > 4 * few.passes["scores"] == 4 * 6
    assert many.hours > 3 * few.hours
    low = _of(gpu=card, width=128, queries=40, examples=10**6, query_rank="auto")
    assert low.passes["scores"] < many.passes["scores"]
    assert many.faster["query_rank='auto'"] == low.hours < many.hours
    slow = Gpu(0.1, 0.1, 10, 3.0, memory=80)
    hours = _of(gpu=slow, examples=10**6, dtype="bfloat16").hours
    assert _of(gpu=slow, examples=10**6).faster == {"dtype bfloat16": hours}
    assert "query_rank='auto' (" in str(many)


def test_only_the_factors_of_queries_travel() -> None:
    settings: dict[str, Any] = {"width": 128, "queries": 40, "examples": 10**6, "gpus": 4}
    whole, low = _of(whence.TracIn(), **settings), _of(whence.TracIn(), **settings, query_rank=2)
    assert low.network < whole.network / 4


def test_a_setting_that_makes_it_fit() -> None:
    card = Gpu(60, 400, 900, 3.0, memory=0.02)
    large = _of(gpu=card, width=128, queries=40, batch_size=64)
    assert not large.fits and large.limit.startswith("memory")
    assert large.fixes
    changes: dict[str, dict[str, Any]] = {
        "query_rank='auto'": {"query_rank": "auto"},
        "dtype bfloat16": {"dtype": "bfloat16"},
        "batch_size=1": {"batch_size": 1},
    }
    settings = {"batch_size": 64} | {k: v for name in large.fixes for k, v in changes[name].items()}
    assert _of(gpu=card, width=128, queries=40, **settings).fits
    tiny = _of(gpu=Gpu(60, 400, 900, 3.0, memory=0.0001), width=128)
    assert not tiny.fits and not tiny.fixes
    assert "more memory" in str(tiny)


def test_low_precision_and_faster_cards_take_less() -> None:
    hours = [_of(examples=10**6, gpu=g, dtype=d).hours for g in GPUS for d in ("float32",)]
    assert len(set(hours)) == len(GPUS)
    assert _of(examples=10**6, dtype="bfloat16").hours < _of(examples=10**6).hours


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"examples": 0}, "examples=0"),
        ({"gpus": 0}, "gpus=0"),
        ({"queries": 0}, "queries=0"),
        ({"gpu": "h900"}, "a100.*h900|h900.*a100"),
        ({"dtype": "int4"}, "int4"),
        ({"sharded": True}, "several GPUs"),
    ],
)
def test_bad_input(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        _of(**settings)


def test_layers_take_turns_where_one_vector_does_not_fit() -> None:
    """The vectors then fit their share of the memory, for passes over the queries."""
    roomy, tight = Gpu(60, 400, 900, 3.0, memory=80), Gpu(60, 400, 900, 3.0, memory=0.012)
    for method, checkpoints in (
        (whence.TracIn(), 6),
        (whence.Source(), 6),
        (whence.Influence(), 1),
    ):
        one, several = (_of(method, gpu=g, width=128, query_rank=2) for g in (roomy, tight))
        assert one.query_passes == checkpoints
        turns, rest = divmod(several.query_passes, checkpoints)
        assert turns > 1 and not rest
        assert several.memory["query vectors"] <= 0.6 * 0.012e9 / 2
        assert several.seconds["queries"] > one.seconds["queries"]
        whole = _of(method, gpu=tight, width=128, queries=None)  # self-influence
        assert whole.passes["scores"] > _of(method, gpu=roomy, queries=None).passes["scores"]
    joint = _of(whence.Source(curvature="gauss-newton"), gpu=tight, width=128, query_rank=2)
    assert joint.memory["query vectors"] > 0.6 * 0.012e9 / 2
    assert joint.query_passes == 6


def test_rates_after_adam_are_counted() -> None:
    """Two numbers for each parameter and segment."""
    with torch.device("meta"):
        model, batch = _gpt("meta")
    rest = {"examples": 64, "queries": 5, "layers": "matrices"}
    parameters = sum(
        module.weight.numel() + (module.bias is not None) * module.out_features
        for module in model.modules()
        if isinstance(module, nn.Linear)
    )
    for method, segments in ((whence.Source(segments=3), 3), (whence.Influence(), 1)):
        plain, adam = (
            estimate(model, TASK, batch, method, optimizer=name, **rest).memory["rates"]
            for name in ("sgd", "adamw")
        )
        assert (plain, adam) == (0, 4 * 2 * segments * parameters)


def test_self_influence_asks_for_factors_again_and_again() -> None:
    """Each rank solves its own examples, as many at a time as fit."""
    settings: dict[str, Any] = {"width": 128, "queries": None, "gpus": 4, "examples": 4096}
    roomy, tight = (
        _of(whence.Influence(), gpu=Gpu(60, 400, 900, 3.0, memory=memory), **settings).network
        for memory in (80, 0.2)
    )
    assert tight > 10 * roomy
