"""Query vectors that do not fit: layers take turns, and scores are those of whole vectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import models, ranks
from support.comparing import close
from support.memory import LiveBytes
from torch import nn
from torch.utils.data import Subset

import whence
from whence.engine.queries import Queries, QuerySet
from whence.engine.query_factors import plan
from whence.engine.scoring import Scoring
from whence.engine.workspace import ComputeOptions
from whence.layers.capture import Tape
from whence.layers.passes import Passes

TIGHT, ROOMY = {"memory": 2**20}, {"memory": 2**30}
EXACT: dict[str, Any] = {"dtype": torch.float64, "progress": False, "batch_size": 4}
METHODS: dict[str, tuple[Any, str]] = {
    "source": (whence.Source(2), "deep sgd"),
    "source of adamw": (whence.Source(2), "deep adamw"),
    "source, k-fac": (whence.Source(2, curvature="kfac"), "deep sgd"),
    "fastsource": (whence.FastSource(2), "deep sgd"),
    "published source": (whence.Source.published(2), "deep sgd"),
    "published source of adamw": (whence.Source.published(2), "deep adamw"),
    "influence": (whence.Influence(), "deep sgd"),
    "influence of adamw": (whence.Influence(), "deep adamw"),
    "influence, datainf": (whence.Influence(solver="datainf"), "deep sgd"),
    "tracin": (whence.TracIn(), "deep sgd"),
    "trak": (whence.Trak(5), "deep sgd"),
}
TOLERANCES = {"influence of adamw": 1e-11}  # Lanczos iterations of one query, or of several


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    ranks.record_deep(folder)
    return folder


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Into how many groups each set of queries was divided."""
    seen, by_group = [], Queries.by_group

    def counting(self: Queries, groups: Any) -> Any:
        seen.append(len(groups))
        return by_group(self, groups)

    monkeypatch.setattr(Queries, "by_group", counting)
    return seen


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    "options",
    [{}, {"query_rank": 3}, {"query_rank": 3, "query_weights": [[0.5, 0.5, 0], [1, 0, -1]]}],
    ids=["whole", "low rank", "sums"],
)
def test_scores_are_those_of_whole_vectors(
    name: str, options: Any, runs: Path, groups: list[int]
) -> None:
    method, run = METHODS[name]
    given = ranks.deep(runs, run)
    whole = method.attribute(given, ranks.SEQUENCES, **options, **EXACT, **ROOMY)
    assert set(groups) == {1}
    groups.clear()
    tight = method.attribute(given, ranks.SEQUENCES, **options, **EXACT, **TIGHT)
    assert min(groups) > 1
    close(tight.values, whole.values, TOLERANCES.get(name, 1e-12))
    for what in ("query_factors", "segments"):
        if what in whole.diagnostics:
            assert same(tight.diagnostics[what], whole.diagnostics[what])
    assert len(tight.warnings) == len(whole.warnings)


@pytest.mark.parametrize("options", [{}, {"query_rank": 3}], ids=["whole", "low rank"])
def test_survival_is_that_of_all_layers(options: Any, runs: Path, groups: list[int]) -> None:
    given, one = ranks.deep(runs, "deep adamw"), Subset(ranks.SEQUENCES, [0])
    each = [
        whence.Source(3).attribute(given, one, **options, **EXACT, **memory).diagnostics["segments"]
        for memory in (ROOMY, TIGHT)
    ]
    assert max(groups) > 1
    kept = [[segment.get("survival") for segment in segments] for segments in each]
    assert kept[1][1:] == pytest.approx(kept[0][1:], rel=1e-9) and 0 < kept[0][2] < 1


def same(left: Any, right: Any) -> bool:
    """Whether diagnostics are equal to rounding. Survival is of the queries that are taken first:
    with less memory, of fewer."""
    if isinstance(left, dict):
        names = left.keys() - {"survival"}
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in names)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    if not isinstance(left, float):
        return bool(left == right)
    return left == pytest.approx(right, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", METHODS)
def test_self_influence(name: str, runs: Path, groups: list[int]) -> None:
    method, run = METHODS[name]
    given = ranks.deep(runs, run)
    whole = method.attribute(given, **EXACT, **ROOMY)
    groups.clear()
    tight = method.attribute(given, by_layer=True, **EXACT, **TIGHT)
    assert min(groups) > 1
    close(tight.values, whole.values, 1e-12)
    close(tight.by_layer.sum(0), whole.values, 1e-11)


def test_a_contrast_in_contributions_of_layers(runs: Path, groups: list[int]) -> None:
    given, query = ranks.deep(runs), ranks.SEQUENCES
    contrast = whence.Contrast(Subset(query, [0, 1]), Subset(query, [2, 0]))
    each = [
        whence.Source(2)
        .attribute(given, contrast, query_rank=3, by_layer=True, **EXACT, **memory)
        .by_layer
        for memory in (ROOMY, TIGHT)
    ]
    assert max(groups) > 1
    close(each[1], each[0], 1e-12)


def test_few_queries_and_every_rank_take_turns_too(runs: Path, groups: list[int]) -> None:
    """ "auto" keeps whole vectors only where they fit."""
    one = Subset(ranks.SEQUENCES, [0])
    auto = whence.TracIn().attribute(ranks.deep(runs), one, query_rank="auto", **EXACT, **TIGHT)
    assert max(groups) > 1 and auto.diagnostics["query_factors"]["rank"] == 64
    whole = whence.TracIn().attribute(ranks.deep(runs), one, **EXACT, **ROOMY)
    close(auto.values, whole.values, 1e-12)  # no layer has a larger rank


def test_an_interrupted_call_resumes(
    runs: Path, tmp_path: Path, groups: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whence.engine.scoring.CHUNK", 4)
    method, given, query = whence.Source(2), ranks.deep(runs), ranks.SEQUENCES
    how: dict[str, Any] = {"query_rank": 3, **EXACT, **TIGHT, "batch_size": 1}
    with pytest.MonkeyPatch.context() as patch:
        written = Scoring._write
        patch.setattr("whence.persist.files.Throttle.due", lambda *_: True)

        def failing(self: Any, rows: Any, chunk: Any, contributions: Any) -> None:
            if chunk.place.start >= 8:
                raise KeyboardInterrupt
            written(self, rows, chunk, contributions)

        patch.setattr(Scoring, "_write", failing)
        with pytest.raises(KeyboardInterrupt):
            method.attribute(given, query, out=tmp_path, **how)
    assert list(tmp_path.glob("progress*.json"))
    resumed = method.attribute(given, query, out=tmp_path, **how)
    alone = method.attribute(given, query, **how)
    np.testing.assert_array_equal(resumed.values, alone.values)
    for what in ("query_factors", "segments"):
        assert same(resumed.diagnostics[what], alone.diagnostics[what])
    survival = [x.diagnostics["segments"][1]["survival"] for x in (resumed, alone)]
    assert survival[0] == survival[1] < 1
    assert max(groups) > 1


@pytest.mark.parametrize("method", [whence.Influence(), whence.Influence(solver="datainf")])
@pytest.mark.parametrize("query", ["rank", "self"])
def test_memory_is_that_of_a_group(method: Any, query: str, runs: Path) -> None:
    """While one query is scored: the weights are loaded before."""
    peaks: list[int] = []
    how: dict[str, Any] = {"query_rank": 2} if query == "rank" else {}
    asked = Subset(ranks.SEQUENCES, [0]) if query == "rank" else None
    for memory in (2**30, 2**18):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("whence.engine.workspace.allowance", lambda *_, size=memory: size)
            for name in ("queries", "selves"):
                patch.setattr(Scoring, name, weighing(getattr(Scoring, name), peaks))
            method.attribute(ranks.deep(runs), asked, examples=[0], **how, **EXACT)
    vector = 8 * (ranks.DEPTH * ranks.NARROW * (ranks.NARROW + 1))
    assert peaks[1] < 0.8 * vector < vector < peaks[0], (peaks, vector)


def weighing(work: Any, peaks: list[int]) -> Any:
    def weighed(self: Any, *given: Any) -> None:
        with LiveBytes(8 * ranks.NARROW**2) as live:
            work(self, *given)
        peaks.append(live.peak)

    return weighed


JOINT = [
    whence.Source(curvature="gauss-newton"),
    whence.Best(),
    whence.Influence(solver="cg"),
    whence.Influence(solver="arnoldi", rank=2, iterations=2),
    whence.GradientCosine(),
]


@pytest.mark.parametrize("method", JOINT, ids=repr)
def test_layers_that_cannot_take_turns_are_refused(
    method: Any, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is fitted."""
    monkeypatch.setattr("whence.engine.workspace.VECTORS", 6)  # 1.3 MiB
    monkeypatch.setattr(type(method), "prepare", None)
    for options in ({}, {"query_rank": 2}):
        with pytest.raises(whence.WhenceError, match=r"takes all layers together, and 6 vectors"):
            method.attribute(ranks.deep(runs), ranks.SEQUENCES, **options, **EXACT, **TIGHT)


@pytest.mark.parametrize("method", [*JOINT[:3], JOINT[4]], ids=repr)
def test_layers_that_cannot_take_turns_do_not(method: Any, runs: Path, groups: list[int]) -> None:
    """Where three vectors fit into memory, though not into the part that is meant for them."""
    query = Subset(ranks.SEQUENCES, [1])
    tight, roomy = (
        method.attribute(ranks.deep(runs), query, query_rank=3, **EXACT, **memory).values
        for memory in (TIGHT, ROOMY)
    )
    assert set(groups) == {1}
    close(tight, roomy, 1e-6)


def test_groups_are_as_large_as_fit(runs: Path) -> None:
    given = ranks.deep(runs)
    where: Any = {"device": torch.device("cpu"), "dtype": torch.float64, "quiet": True}
    blocks = given.passes(given.runs[0], **where)["train"].tracked.blocks
    size = 8 * sum(b.size for b in blocks)
    for memory, count in ((12 * size, 1), (12 * size - 1, 2), (4 * size, 4)):
        chosen = plan(blocks, 8, memory, 5, 2, 1)
        assert chosen is not None and len(chosen.groups) == count
        assert [name for group in chosen.groups for name in group] == [b.name for b in blocks]
        assert chosen.numbers(blocks, 1) * 8 <= memory / 2
    least = plan(blocks, 8, 2**20, 5, 2, 1)
    assert least is not None and least.whole == 1


@pytest.mark.parametrize("name", ["source", "influence", "tracin", "source of adamw"])
def test_the_estimate_counts_the_passes_over_queries(name: str, runs: Path) -> None:
    method, run = METHODS[name]
    taken, backward = [0], Passes.backward_passes

    def counting(self: Any, data: Any, blocks: Any, signal: Any, *rest: Any, **more: Any) -> Any:
        taken[0] += sum(map(len, blocks)) * (signal.name == "measurement")
        return backward(self, data, blocks, signal, *rest, **more)

    queries = QuerySet.of(ranks.deep(runs, run), ranks.SEQUENCES, rank=3)
    options = ComputeOptions(**EXACT, **TIGHT)
    workspace = method.lay_out(
        ranks.deep(runs, run), ranks.deep(runs, run).runs[0], queries, options
    )
    counts = method.counted(method.workload(workspace, method.terms(workspace)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Passes, "backward_passes", counting)
        how = {"query_rank": 3, **EXACT, **TIGHT}
        method.attribute(ranks.deep(runs, run), ranks.SEQUENCES, **how)
    assert taken[0] == 3 * counts.query_passes


def test_layers_whose_turn_it_is_not_are_not_captured(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the first batch of a size was compared with its examples alone, in all layers."""
    captured, init = [], Tape.__init__

    def counting(self: Tape, model: Any, layers: Any, *rest: Any) -> None:
        captured.append(len(layers))
        init(self, model, layers, *rest)

    given, query = ranks.deep(runs), Subset(ranks.SEQUENCES, [0])
    given.passes(given.runs[0], device=torch.device("cpu"), dtype=torch.float64, quiet=True)
    monkeypatch.setattr(Tape, "__init__", counting)
    whence.Influence(curvature="diagonal").attribute(given, query, query_rank=3, **EXACT, **TIGHT)
    some = [count for count in captured if count < ranks.DEPTH + 2]
    assert sum(some) == ranks.DEPTH + 2 and len(some) > 1  # each layer of the query once


class Half(whence.Classification):
    """Losses of two models, and measurements of the first."""

    def losses(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return super().losses(outputs[:, :3], batch) + super().losses(outputs[:, 3:], batch)

    def measurements(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return super().measurements(outputs[:, :3], batch)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = models.mlp((4, 6, 3)), models.mlp((4, *[50] * 12, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.first(x), self.second(x)], 1)


def test_a_measurement_need_not_depend_on_a_group(groups: list[int]) -> None:
    data, query = models.vectors(8), models.vectors(3, seed=1)
    run = models.train_run(model := Two(), Half(), data, [2], 0.1).run
    study = whence.Study(model, Half(), data, run)
    tight, roomy = (
        whence.TracIn().attribute(study, query, query_rank=2, **EXACT, **memory).values
        for memory in (TIGHT, ROOMY)
    )
    assert max(groups) > 1
    close(tight, roomy, 1e-12)
