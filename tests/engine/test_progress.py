"""One bar for a call, with the time left; nothing in a log file."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import tqdm.auto
from support import models

import whence
from whence import progress

TRAIN, QUERY = models.vectors(24), models.vectors(3, seed=1)


class Bar:
    """What a call tells its bar."""

    bars: ClassVar[list[Bar]]

    def __init__(self, iterable: Any = None, **options: Any) -> None:
        self.total, self.n, self.labels, self.closed = options.get("total"), 0.0, [], False
        self.disable, self.desc = options.get("disable", False), options.get("desc")
        self.iterable = iterable
        self.reached: list[float] = []
        type(self).bars.append(self)

    def update(self, count: float = 1) -> None:
        assert count >= 0
        self.n += count
        self.reached.append(self.n)

    def set_description(self, label: str) -> None:
        self.labels.append(label)

    def close(self) -> None:
        self.closed = True

    def __iter__(self) -> Any:
        return iter(self.iterable)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Bar]:
    class Recorded(Bar):
        bars: ClassVar[list[Bar]] = []

    monkeypatch.setattr(tqdm.auto, "tqdm", Recorded)
    monkeypatch.setattr(progress, "_visible", lambda: True)
    return Recorded.bars


def study(runs: int = 1, **options: Any) -> whence.Study:
    torch.manual_seed(0)
    model, task = models.mlp(), whence.Classification()
    history = models.train_run(model, task, TRAIN, [2, 4, 6, 8], 0.1)
    return whence.Study(model, task, TRAIN, [history.run] * runs, **options)


@pytest.mark.parametrize("runs", [1, 2])
@pytest.mark.parametrize("method", [whence.Source(segments=2), whence.Influence(), whence.TracIn()])
def test_one_bar_for_all_passes(bars: list[Bar], runs: int, method: Any) -> None:
    method.attribute(study(runs), QUERY, batch_size=8)
    shown = [bar for bar in bars if not bar.disable]
    assert len(shown) == 1  # and none for a pass
    (bar,) = shown
    assert bar.closed and bar.n == pytest.approx(bar.total)
    assert bar.reached == sorted(bar.reached) and len(bar.reached) >= runs
    name = type(method).__name__
    assert bar.labels[-1] == f"{name}: scores"
    if name != "TracIn":
        assert any(label.startswith(f"{name}: covariances, step") for label in bar.labels)


def test_what_is_cached_counts_as_done(bars: list[Bar], tmp_path: Path) -> None:
    for _ in range(2):
        whence.Source(segments=2).attribute(study(cache=tmp_path), QUERY, batch_size=8)
    _, second = (bar for bar in bars if not bar.disable)
    assert second.labels == ["Source: scores"]
    assert second.reached[0] > 0.3 * second.total and second.n == pytest.approx(second.total)


def test_self_influence_and_solvers_have_bars_too(bars: list[Bar]) -> None:
    whence.Influence().attribute(study(), batch_size=8)
    whence.Influence(1e-2, solver="cg").attribute(study(), QUERY, batch_size=8)
    assert all(bar.closed or bar.iterable is not None for bar in bars)


def test_a_failed_call_leaves_no_bar(bars: list[Bar], monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> Any:
        raise whence.errors.InvalidInput("no")

    monkeypatch.setattr(whence.Source, "vectors", failing)
    with pytest.raises(whence.WhenceError, match="no"):
        whence.Source().attribute(study(), QUERY)
    assert [bar.closed for bar in bars if not bar.disable] == [True]
    assert not progress._calls


@pytest.mark.parametrize("how", ["log file", "progress=False"])
def test_nothing_where_nobody_looks(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: how != "log file", raising=False)
    monkeypatch.setattr(sys, "stderr", terminal)
    whence.Source(segments=2).attribute(study(), QUERY, progress=how == "log file")
    assert terminal.getvalue() == ""
