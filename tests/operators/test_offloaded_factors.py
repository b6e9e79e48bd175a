"""Factors of all layers that do not fit: groups of layers, fitted one after another, and brought to
the device layer by layer. A CPU has no other place for them; the test pretends that it has."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import forms, models
from torch import nn
from torch.utils.data import default_collate

import whence
import whence.engine.workspace
import whence.operators.fit
from whence.data import place
from whence.layers.kind import ParameterBlock
from whence.layers.passes import Passes
from whence.operators import OffloadedFactors
from whence.operators.fit import factor_bytes, grouped

EXACT: dict[str, Any] = {"dtype": torch.float64, "progress": False}
METHODS = [
    whence.Source.published(2),
    whence.Source.published(2, curvature="kfac", weight_decay="curvature"),
    whence.Source.published(2, curvature="diagonal"),
    whence.Source(1, fisher="exact"),
    whence.FastSource.published(2),
    whence.Influence.published(1e-3),
    whence.Influence.published("source"),
    whence.Influence.published("source", solver="cg"),
]
ADAM = [
    whence.Source.published(2),
    forms.exact(2),
    whence.Source.published(2, curvature="diagonal"),
    whence.Influence.published("source"),
    whence.Influence(solver="cg"),
    whence.Best(),
]


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for no more than one layer at a time."""
    monkeypatch.setitem(whence.engine.workspace.FACTOR_SHARE, "cpu", 0.0)


def sgd_run(model: nn.Module, task: Any, data: Any, folder: Path) -> whence.Run:
    return models.train_run(model, task, data, [2, 5, 9], 0.1).run.save(folder)


def adam_run(model: nn.Module, task: Any, data: Any, folder: Path) -> whence.Run:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batch = default_collate([data[k] for k in range(len(data))])
    batch = place(batch, torch.device("cpu"), torch.float64)
    with whence.Recorder(folder, model, optimizer, checkpoints=3, total_steps=9):
        for _ in range(9):
            optimizer.zero_grad()
            task.losses(task.outputs(model, batch), batch).mean().backward()
            optimizer.step()
    return whence.Run.open(folder)


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", models.CASES)
@pytest.mark.parametrize(
    ("train_run", "method"),
    [*((sgd_run, m) for m in METHODS), *((adam_run, m) for m in ADAM)],
    ids=lambda x: x.__name__ if callable(x) else repr(x),
)
def test_groups_of_layers_change_nothing(
    name: str, train_run: Any, method: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, task, train, query = models.CASES[name]()
    model = model.double()
    run = train_run(model, task, train, tmp_path / "run")
    scores, kept = {}, {}
    for how, share in (("together", None), ("apart", 0.0)):
        if share is not None:
            monkeypatch.setitem(whence.engine.workspace.FACTOR_SHARE, "cpu", share)
        cache = tmp_path / how
        study = whence.Study(model, task, train=train, runs=run, cache=cache)
        scores[how] = [method.attribute(study, q, **EXACT).values for q in (query, None)]
        kept[how] = content(cache)
    assert kept["apart"] == kept["together"]  # to the bit, and nothing else is left behind
    for apart, together in zip(scores["apart"], scores["together"], strict=True):
        # vectors are turned once more on the way
        np.testing.assert_allclose(apart, together, rtol=0, atol=1e-7 * abs(together).max())


def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    seen: Counter[str] = Counter()
    sweeps = Passes.backward_passes

    def counting(self: Passes, data: Any, blocks: Any, signal: Any, label: str = "", **more: Any):  # type: ignore[no-untyped-def]
        seen[re.sub(r",.*", "", label)] += 1
        return sweeps(self, data, blocks, signal, label, **more)

    monkeypatch.setattr(Passes, "backward_passes", counting)
    return seen


def small(tmp_path: Path) -> whence.Study:
    torch.manual_seed(0)
    model, task, train, _ = models.CASES["mlp"]()
    run = sgd_run(model.double(), task, train, tmp_path / "run")
    return whence.Study(model, task, train=train, runs=run)


def test_it_is_said_and_stored(
    tmp_path: Path, crowded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    study, query = small(tmp_path), models.vectors(3)
    layers = sum(isinstance(m, nn.Linear) for m in study.model.modules())
    expected = whence.Influence.published(1e-3).estimate(study, query, **{"dtype": torch.float64})
    passes = counted(monkeypatch)
    with pytest.warns(UserWarning, match=rf"fitted in {layers} groups of layers.*more memory="):
        scores = whence.Influence.published(1e-3).attribute(study, query, **EXACT)
    assert scores.diagnostics["factor_groups"] == layers > 1
    assert passes["covariances"] == passes["eigenvalues"] == layers
    assert expected["passes"]["covariances"] == expected["passes"]["eigenvalues"] == layers


def test_with_room_enough_nothing_is_parted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setitem(whence.engine.workspace.FACTOR_SHARE, "cpu", 0.5)
    passes = counted(monkeypatch)
    scores = whence.Influence.published(1e-3).attribute(small(tmp_path), models.vectors(3), **EXACT)
    assert "factor_groups" not in scores.diagnostics and passes["covariances"] == 1
    assert not [w for w in recwarn if "groups of layers" in str(w.message)]


def test_stopped_among_the_groups_it_resumes(
    tmp_path: Path, crowded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stop(BaseException): ...

    study, query, method = small(tmp_path), models.vectors(3), whence.Influence.published(1e-3)
    fit, left = whence.operators.fit.measure, [3]

    def limited(*args: Any) -> Any:
        if not left[0]:
            raise Stop
        left[0] -= 1
        return fit(*args)

    with pytest.warns(UserWarning, match="groups"), monkeypatch.context() as patch:
        patch.setattr(whence.operators.fit, "measure", limited)
        with pytest.raises(Stop):
            method.attribute(study, query, **EXACT)
    passes = counted(monkeypatch)
    with pytest.warns(UserWarning, match="groups"):
        found = method.attribute(study, query, **EXACT)
    layers = found.diagnostics["factor_groups"]
    assert passes["covariances"] + passes["eigenvalues"] == 2 * layers - 3
    monkeypatch.delitem(whence.engine.workspace.FACTOR_SHARE, "cpu")
    other = small(tmp_path / "other")
    np.testing.assert_allclose(found.values, method.attribute(other, query, **EXACT).values, 1e-7)


def block(name: str, o: int, i: int) -> ParameterBlock:
    return ParameterBlock(name, o, i, bias=False, parameter=f"{name}.weight")


def test_groups_are_filled_in_order() -> None:
    blocks = [block(n, o, 3) for n, o in (("a", 2), ("b", 2), ("c", 9), ("d", 2), ("e", 2))]
    size = factor_bytes(blocks[0], True, torch.float32)
    assert size == 4 * (2 * 2 + 3 * 3 + 2 * 6)
    assert factor_bytes(blocks[0], False, torch.float64) == 8 * 2 * 6
    named = [[b.name for b in g] for g in grouped(blocks, True, torch.float32, 2 * size)]
    assert named == [["a", "b"], ["c"], ["d", "e"]]
    assert [len(g) for g in grouped(blocks, True, torch.float32, 0)] == [1] * 5
    assert [len(g) for g in grouped(blocks, True, torch.float32, None)] == [5]


def test_one_block_at_a_time_is_there() -> None:
    brought: list[str] = []

    def bring(name: str, tensors: Any) -> Any:
        brought.append(name)
        return name.upper()

    away = OffloadedFactors({"a": {}, "b": {}}, bring)
    assert list(away) == ["a", "b"] and len(away) == 2 and "a" in away and "c" not in away
    assert brought == []
    assert (away["a"], away["a"], away["b"], away["a"]) == ("A", "A", "B", "A")
    assert brought == ["a", "b", "a"]
    with pytest.raises(KeyError):
        away["c"]
