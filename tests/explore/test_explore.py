"""The explorer without a browser: its numbers, its retrainings, its server."""

from __future__ import annotations

import csv
import errno
import gc
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from starlette.testclient import TestClient
from support import recipes
from support.files import edit_json

import whence
from whence.data import Batches
from whence.evaluate.agreement import agreement, mid_ranks, rank_correlation
from whence.explore import jobs as jobs_module
from whence.explore import start
from whence.explore.compare import Overall, compare_query
from whence.explore.explorer import Explorer
from whence.explore.jobs import CANCELLED, DONE, FAILED, Job, Jobs
from whence.explore.launch import prepare
from whence.explore.map import principal
from whence.explore.reading import PredictionWorker
from whence.explore.scored_data import Refused, ScoredData, open_scores
from whence.explore.server import create_app
from whence.explore.whatif import judged, predicted, what_if
from whence.scores import Scores
from whence.scores.result import Top

Q, N = 6, recipes.N
TRAIN, QUERY = recipes.dataset(), recipes.dataset(Q, 7)
TEXTS = ["<script>alert(1)</script>", "=1+1", 'a "quoted"\nline', "naïve café", "plain words"]


def make(
    values: Any = None, *, seed: int = 0, higher: bool = True, top: int | None = None, **more: Any
) -> Scores:
    """Scores (Q, N) at random, or as given."""
    if values is None:
        values = np.random.default_rng(seed).standard_normal((Q, N)).astype(np.float32)
    kept = None
    if top is not None:
        order = np.argsort(-values, axis=1, kind="stable")
        columns = np.stack([order[:, :top], order[:, ::-1][:, :top]])
        kept = Top(np.take_along_axis(np.stack([values] * 2), columns, 2), columns)
        more.setdefault("train_ids", np.arange(values.shape[-1]))
    more.setdefault("method", "Made")
    return Scores(
        values if kept is None else None,
        measurement="margin",
        unit="logits",
        higher_is_better=higher,
        top=kept,
        **more,
    )


def strict(content: object) -> str:
    """JSON as a browser reads it: no NaN."""
    return json.dumps(content, allow_nan=False)


# -- numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("higher", [True, False])
@pytest.mark.parametrize("top", [None, N])
def test_what_if_is_the_removal_effect(higher: bool, top: int | None) -> None:
    scores = make(higher=higher, top=top)
    change, unknown = predicted(ScoredData({"a": scores}), "a", [3, 14, 40])
    expected = [scores.removal_effect(q, [3, 14, 40]) for q in range(Q)]
    np.testing.assert_allclose(change, expected, rtol=1e-6)
    assert not unknown.any()


def test_what_if_without_kept_scores_is_unknown_and_never_zero() -> None:
    full = make().values
    places = [3, 14, 40]
    view = what_if(ScoredData({"few": make(full, top=5), "all": make(full)}), places)
    for row in range(Q):
        order = np.argsort(full[row])
        lost = len(set(places) - set(order[:5]) - set(order[-5:]))
        assert view["sets"]["few"]["unknown"][row] == lost
        value = view["sets"]["few"]["change"][row]
        if lost:
            assert value is None
        else:
            assert value == pytest.approx(-full[row, places].sum(), rel=1e-4)
        assert view["sets"]["all"]["change"][row] is not None
    assert "are not among the top 5 that were kept" in view["sets"]["few"]["note"]
    assert view["sets"]["all"]["note"] is None


def test_rank_correlation_and_overlap() -> None:
    random = np.random.default_rng(1)
    u = random.integers(0, 20, 300).astype(float)  # many ties
    v = u + random.integers(-5, 5, 300)
    np.testing.assert_array_equal(mid_ranks(u), stats.rankdata(u) - 1)
    assert rank_correlation(u, v) == pytest.approx(stats.spearmanr(u, v).statistic, abs=1e-12)
    holed = np.where(random.random(300) < 0.2, np.nan, v)
    both = np.isfinite(holed)
    expected = stats.spearmanr(u[both], v[both]).statistic
    assert rank_correlation(u, holed) == pytest.approx(expected, abs=1e-12)
    assert rank_correlation(u, np.full(300, 2.0)) is None
    assert rank_correlation(1e-200 * u, 1e-200 * v) == pytest.approx(
        stats.spearmanr(u, v).statistic, abs=1e-12
    )

    a, b = make(seed=1), make(seed=2, higher=False)
    view = compare_query(ScoredData({"a": a, "b": b}), "a", "b", 2, 7)
    helpful = [set(s.helpful(2, 7).examples) for s in (a, b)]
    harmful = [set(s.harmful(2, 7).examples) for s in (a, b)]
    assert view["overlap"]["helpful"] == len(set.intersection(*helpful)) / 7
    assert view["overlap"]["harmful"] == len(set.intersection(*harmful)) / 7
    # b's measurement is better low: what helps is compared with what helps
    expected = stats.spearmanr(a.values[2], -b.values[2]).statistic
    assert view["spearman"] == pytest.approx(expected, abs=1e-4)
    assert [e["column"] for e in view["lists"]["b"]["harmful"]] == b.harmful(2, 7).examples
    ranks = {m: k + 1 for k, m in enumerate(b.helpful(2, N).examples)}
    for entry in view["lists"]["a"]["helpful"]:
        assert entry["other"] == ranks[entry["column"]]


def test_overall_continues_from_call_to_call() -> None:
    a, b = make(seed=1), make(seed=2)
    overall = Overall(ScoredData({"a": a, "b": b}), "a", "b", 10)
    steps = [overall.advance(0.0)["done"] for _ in range(Q)]
    assert steps == list(range(1, Q + 1))
    found = overall.advance(0.0)
    each = [stats.spearmanr(a.values[q], b.values[q]).statistic for q in range(Q)]
    assert found["spearman"] == pytest.approx(np.mean(each), abs=1e-4)
    assert found["least"][0] == int(np.argmin(each))


def test_scores_of_some_examples_are_compared_by_id() -> None:
    """Such as leave-one-out on a few examples, in an order of its own."""
    full, ids = make(seed=1), np.array([30, 4, 11, 25])
    few = make(full.values[:, ids] * 2, train_ids=ids)
    explored = ScoredData({"all": full, "few": few})
    view = compare_query(explored, "all", "few", 0, 4)
    assert view["common"] == 4 and view["spearman"] == 1.0
    assert view["lists"]["few"]["helpful"][0]["column"] in ids
    change, unknown = predicted(explored, "few", [4, 25])
    np.testing.assert_allclose(change, -2 * full.values[:, [4, 25]].sum(1), rtol=1e-6)
    change, unknown = predicted(explored, "few", [4, 5])
    assert np.isnan(change).all() and (unknown == 1).all()


def test_top_only_scores_have_no_rank_correlation_but_overlap() -> None:
    explored = ScoredData({"a": make(seed=1, top=6), "b": make(seed=2)})
    view = compare_query(explored, "a", "b", 0, 50)
    assert view["k"] == 6 and view["spearman"] is None and "a kept only the top" in view["why"]
    assert Overall(explored, "a", "b", 50).advance(9)["what"] == "overlap of the top 6"
    listed = explored.list_examples("a", 0, limit=N)
    assert listed["unknown"] == N - 12  # and none of these is a zero
    assert [item["value"] for item in listed["items"]].count(None) == N - 12


def test_scores_that_are_not_numbers_become_null() -> None:
    values = make().values.copy()
    values[0, 3], values[1], values[2, 5] = np.nan, np.nan, np.inf
    explored = ScoredData({"a": make(values), "b": make(seed=3)})
    explorer = Explorer(explored)
    for row in range(Q):
        strict(explorer.query("a", row, 50))
        strict(explorer.compare("a", "b", row, 10))
        strict(explored.list_examples("a", row, limit=N))
    strict([explorer.overview(), explorer.audit("a"), explorer.overall("a", "b", 5)])
    assert explored.list_examples("a", 0)["unknown"] == 1
    assert explored.list_examples("a", 0, limit=N)["items"][-1]["example"]["id"] == 3  # NaN last
    change, unknown = predicted(explored, "a", [3])
    assert np.isnan(change[[0, 1]]).all() and np.isfinite(change[2:]).all()
    assert unknown.tolist() == [1, 1, 0, 0, 0, 0]
    strict(what_if(explored, [3, 5]))
    finite = np.where(np.isfinite(values), values, np.nan)
    np.testing.assert_allclose(explored.mean_help("a"), np.nanmean(finite, 0), rtol=1e-5)


def test_lists_are_filtered_ordered_and_cut_into_pages() -> None:
    data = [(f"{TEXTS[k % 5]} {k}", k % 3) for k in range(N)]
    scores = make(higher=False)
    explored = ScoredData({"a": scores}, train=data, query=data[:Q], classes=["cat", "dog", "eel"])
    explored.read()
    help_ = -scores.values[1].astype(float)
    order = np.argsort(-help_, kind="stable")

    def ids(**asked: Any) -> list[int]:
        found = explored.list_examples("a", 1, limit=N, **asked)
        assert found["total"] == len(found["items"])
        return [item["example"]["id"] for item in found["items"]]

    assert ids() == order.tolist()
    assert ids(order="harmful") == order[::-1].tolist()
    assert ids(order="number") == list(range(N))
    assert ids(order="strongest") == np.argsort(-np.abs(help_), kind="stable").tolist()
    assert ids(sign="harmful") == [k for k in order if help_[k] < 0]
    assert ids(label="dog") == [k for k in order if k % 3 == 1]
    assert ids(text="CAFÉ") == [k for k in order if k % 5 == 3]
    assert ids(text="<script>", label="eel") == [k for k in order if k % 5 == 0 and k % 3 == 2]
    assert ids(text="#7", order="number") == [7]
    means = np.argsort(scores.values.mean(0, dtype=np.float64), kind="stable")
    listed = explored.list_examples("a", limit=N)["items"]
    assert [item["example"]["id"] for item in listed] == means.tolist()
    second = explored.list_examples("a", 1, offset=10, limit=5)
    assert [i["example"]["id"] for i in second["items"]] == order[10:15].tolist()
    assert [q["id"] for q in explored.list_queries(label="dog")["items"]] == [1, 4]
    assert explored.labels() == ["cat", "dog", "eel"]
    for wrong in ({"order": "odd"}, {"stage": "nowhere"}):
        with pytest.raises(Refused, match=r"odd|nowhere"):
            ids(**wrong)
    with pytest.raises(Refused, match="this needs study= and query="):
        explored.list_queries(wrong=True)


def test_numbers_are_no_classes_to_choose_from() -> None:
    x, y = TRAIN.tensors
    for labels, classes in ((y, {str(int(k)) for k in y}), (y + 0.25, set())):
        data = ScoredData({"a": make()}, train=torch.utils.data.TensorDataset(x, labels))
        explorer = Explorer(data)
        data.read()
        assert set(explorer.overview()["labels"]) == classes
        assert (explorer.query("a", 0, 5)["classes"] is not None) == bool(classes)
        explorer.close()


def test_wrong_predictions_come_from_the_model(tmp_path: Path) -> None:
    recipe = recipes.recipe()
    study = whence.Study(
        recipes.mlp(), whence.Classification(), TRAIN, recipe.run(0, tmp_path, device="cpu")
    )
    explored = ScoredData({"a": make()}, study=study, query=QUERY)
    explored.read()
    model = recipe.train(0, device="cpu")
    x, y = QUERY.tensors
    with torch.no_grad():
        outputs = model(x.double())
    wrong = (outputs.argmax(1) != y).numpy()
    rows = [item["row"] for item in explored.list_queries(wrong=True)["items"]]
    assert rows == np.flatnonzero(wrong).tolist()
    margins = whence.Classification().measurements(outputs, (x, y)).numpy()
    np.testing.assert_allclose(explored.measured, margins, rtol=1e-9)
    worst = [item["row"] for item in explored.list_queries(order="worst")["items"]]
    assert worst == np.argsort(margins).tolist()
    predictions, more = explored.predictions([0, 5])
    while more:
        predictions, more = explored.predictions([0, 5])
    explored.close()
    with torch.no_grad():
        says = model(TRAIN.tensors[0].double()).argmax(1)
    assert [predictions[k]["prediction"] for k in (0, 5)] == [str(int(says[k])) for k in (0, 5)]


class Fixed(torch.nn.Module):
    """A model whose logits are its input, times one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Linear(4, 4, bias=False)
        torch.nn.init.eye_(self.scale.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.scale(x))


def test_a_margin_below_zero_is_not_a_wrong_prediction() -> None:
    shares = torch.tensor(
        [
            [0.4, 0.2, 0.2, 0.2],  # right, with p < 1/2: the margin is negative
            [0.3, 0.4, 0.2, 0.1],  # wrong
            [0.9, 0.05, 0.03, 0.02],  # right, by far
        ],
        dtype=torch.float64,
    )
    query = torch.utils.data.TensorDataset(shares.log(), torch.zeros(3, dtype=torch.long))
    train = torch.utils.data.TensorDataset(torch.eye(4).double(), torch.arange(4))
    model = Fixed().double()
    run = whence.Run.from_checkpoints(
        [model.state_dict()] * 2, [0, 1], learning_rates=[0.1], optimizer="sgd"
    )
    study = whence.Study(model, whence.Classification(), train, run)
    # without example 0, the margins change by these amounts
    change = np.array([[-0.1, -0.6, 0.2, 0.5], [0.2, 0.3, 0.1, 0.0], [-2.0, -5.0, 0.0, 1.0]])
    data = ScoredData({"a": make(-change)}, study=study, query=query, train=train)
    data.read()
    data.close()
    assert data.wrong is not None and data.wrong.tolist() == [False, True, False]
    others = np.log([0.4 / 0.2, 0.3 / 0.4, 0.9 / 0.05])
    assert data.lead == pytest.approx(others)
    logit = np.log([0.4 / 0.6, 0.3 / 0.7, 0.9 / 0.1])
    runner_up = np.array([0.2 / 0.6, 0.4 / 0.7, 0.05 / 0.1])  # share of 1 - p
    for example in range(4):
        p = 1 / (1 + np.exp(-(logit + change[:, example])))
        right = p > runner_up * (1 - p)
        expected = [
            None if r != w else "right" if r else "wrong"
            for r, w in zip(right.tolist(), data.wrong.tolist(), strict=True)
        ]
        assert what_if(data, [example])["sets"]["a"]["becomes"] == expected
    words = [what_if(data, [m])["sets"]["a"]["becomes"] for m in range(4)]
    assert words[0] == [None, None, None]  # -0.51 of margin is right, and stays so
    assert "wrong" in words[1] and "right" in words[1]
    # retrained models are judged by the same boundary
    before = np.log(np.array([[0.4 / 0.6, 0.3 / 0.7, 0.9 / 0.1]]))
    outcome = jobs_module.Outcome(before, before + change[:, 1])
    job = Job("a", "", "train", [1], [0], 0.0)
    assert judged(data, job, outcome, np.array([1]))["becomes"] == words[1]


def test_what_a_slow_model_says_comes_later() -> None:
    asked: list[list[int]] = []
    go = threading.Event()

    def ask(places: Any) -> dict[int, str]:
        asked.append(list(places))
        assert go.wait(30)
        return {p: f"says {p}" for p in places}

    worker = PredictionWorker(ask)
    assert worker.predictions([1, 2]) == {} and worker.waiting([1, 2])
    assert worker.predictions([2, 3]) == {}  # nothing is asked twice
    go.set()
    while worker.waiting([1, 2, 3]):
        time.sleep(0.01)
    assert worker.predictions([1, 3]) == {1: "says 1", 3: "says 3"} and not worker.waiting([1, 3])
    assert asked == [[1, 2], [3]]
    worker.close()


def test_a_model_that_raises_costs_only_its_predictions(tmp_path: Path) -> None:
    run = recipes.recipe().run(0, tmp_path, device="cpu")
    study = whence.Study(recipes.mlp(), whence.Classification(), TRAIN, run)
    wrong = torch.utils.data.TensorDataset(torch.zeros(Q, 3), torch.zeros(Q, dtype=torch.long))
    explored = ScoredData({"a": make()}, study=study, query=wrong)
    explored.read()
    explored.close()
    assert explored.wrong is None and explored.reading is None
    assert any("Predictions for queries are not shown" in n for n in explored.unchecked)
    assert explored.list_queries()["total"] == Q


def test_stages_are_told_apart() -> None:
    stage = ["pretrain"] * 40 + ["finetune"] * 24
    values = np.random.default_rng(0).standard_normal((Q, 64)).astype(np.float32)
    ids = np.concatenate([np.arange(40), np.arange(24)])
    scores = make(values, stage=stage, train_ids=ids)
    train = {"finetune": recipes.dataset(24, 2), "pretrain": recipes.dataset(40, 1)}
    explored = ScoredData({"a": scores}, train=train)
    found = explored.list_examples("a", 0, stage="finetune", order="number", limit=64)
    assert [i["example"]["id"] for i in found["items"]] == list(range(24))
    assert {i["example"]["stage"] for i in found["items"]} == {"finetune"}
    place = found["items"][3]["example"]["place"]
    change, _ = predicted(explored, "a", [place])
    expected = [scores.removal_effect(q, [3], stage="finetune") for q in range(Q)]
    np.testing.assert_allclose(change, expected, rtol=1e-6)


def test_audit_sorts_by_suspicion_and_exports_it() -> None:
    data = [(TEXTS[k % 5], k % 3) for k in range(N)]
    own = make(np.random.default_rng(5).standard_normal(N), method="Self")
    explored = ScoredData({"a": make(higher=False), "self": own}, train=data)
    explored.read()
    explorer = Explorer(explored)
    wrong = np.arange(N) % 2 == 0
    for name in ("a", "self"):
        expected = whence.evaluate.mislabeled(explored.scores(name), wrong).suspicion
        order = np.argsort(-expected, kind="stable")
        items = explorer.audit(name, limit=N)["items"]
        assert [item["example"]["id"] for item in items] == order.tolist()
        lines = list(csv.reader(io.StringIO("".join(explorer.audit_csv(name)))))
        assert lines[0] == ["rank", "stage", "example", "label", "suspicion", "text"]
        assert [int(line[2]) for line in lines[1:]] == order.tolist()
        np.testing.assert_allclose([float(line[4]) for line in lines[1:]], expected[order])
        texts = {line[5] for line in lines[1:]}
        # what a spreadsheet would take for a formula is quoted, all else is as it was
        assert texts == {*TEXTS, "'=1+1"} - {"=1+1"}
    only = list(csv.reader(io.StringIO("".join(explorer.audit_csv("self", label="1")))))
    assert {line[3] for line in only[1:]} == {"1"} and len(only) == 1 + N // 3
    with pytest.raises(Refused, match="keeps only each query's top"):
        ScoredData({"few": make(top=4)}).suspicion("few")


# -- bad input -------------------------------------------------------------------------------------


def test_a_truth_judges_the_scores_and_gives_them_their_size(tmp_path: Path) -> None:
    recipe = recipes.recipe()
    study = whence.Study(
        recipes.mlp(), recipe.task, recipes.dataset(), recipe.run(0, tmp_path / "run")
    )
    truth = whence.retrain.ground_truth(recipe, QUERY, subsets=12, seeds=2, progress=False)
    scores = whence.Source().attribute(study, QUERY, progress=False)
    slope = whence.evaluate.calibration(scores, truth).slope
    with start({"a": scores}, study=study, query=QUERY, truth=truth) as page:
        page.explorer._worker.join(60)
        judged = dict(page.explorer.summary("a")["judged"])
        shown = page.explorer.data.scores("a")
    assert judged["real change per predicted change"].startswith(f"{slope:.2f} [")
    np.testing.assert_array_equal(shown.values, whence.evaluate.calibrate(scores, truth).values)


def test_scores_of_different_queries_are_refused() -> None:
    a = make(provenance={"query": "abc"})
    with pytest.raises(ValueError, match=r"a and b are scores of different queries.*other query d"):
        ScoredData({"a": a, "b": make(provenance={"query": "xyz"})})
    with pytest.raises(ValueError, match=r"6 and 5 queries.*explore one at a time"):
        ScoredData({"a": a, "b": make(a.values[:5])})
    with pytest.raises(ValueError, match="other query ids"):
        ScoredData({"a": a, "b": make(query_ids=np.arange(Q)[::-1])})


def test_data_of_another_length_or_order_is_refused() -> None:
    known = {"train": {"train": Batches("t", TRAIN).fingerprint()}}
    scores = {"a": make(provenance=known | {"query": Batches("q", QUERY).fingerprint()})}
    ScoredData(scores, train=TRAIN, query=QUERY)
    with pytest.raises(ValueError, match="a: the training data has 40 examples, but the scores"):
        ScoredData(scores, train=recipes.dataset(40), query=QUERY)
    turned = torch.utils.data.TensorDataset(*(t.flip(0) for t in TRAIN.tensors))
    with pytest.raises(ValueError, match=r"a: .*content or order differs"):
        ScoredData(scores, train=turned, query=QUERY)
    with pytest.raises(ValueError, match="the query data has 4 examples"):
        ScoredData(scores, train=TRAIN, query=recipes.dataset(4, 7))


def test_folders_are_opened_by_name(tmp_path: Path) -> None:
    for name in ("one/source", "two/source"):
        make().save(tmp_path / name)
    found = open_scores([tmp_path / "one/source", tmp_path / "two/source"])
    assert list(found) == ["source", "two/source"]
    assert list(open_scores(tmp_path / "one/source")) == ["source"]
    assert list(open_scores(make())) == ["Made"]
    with pytest.raises(FileNotFoundError, match="does not exist"):
        open_scores([tmp_path / "three"])
    with pytest.raises(ValueError, match="no scores"):
        ScoredData({})
    with pytest.raises(TypeError, match="a is a str: give Scores"):
        open_scores({"a": "scores/source"})


# -- retraining ------------------------------------------------------------------------------------


def finished(jobs: Jobs, job: Job, seconds: float = 60) -> Job:
    end = time.monotonic() + seconds
    while jobs.get(job.id).state in jobs_module.UNFINISHED:
        assert time.monotonic() < end, "the job did not end"
        time.sleep(0.02)
    return jobs.get(job.id)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for thread in threading.enumerate():
        assert thread.name != "retraining" or not thread.is_alive(), "a test left its jobs open"


def test_retraining_measures_what_training_by_hand_does(folder: Path) -> None:
    recipe = recipes.recipe()
    jobs = Jobs(folder, recipe, QUERY, device="cpu")
    job = finished(jobs, jobs.submit(None, [40, 3, 14], 2))
    assert job.state == DONE and job.error is None
    outcome = jobs.outcome(job)
    assert outcome is not None
    kept = [k for k in range(N) if k not in (3, 14, 40)]
    x, y = QUERY.tensors
    for seed in (0, 1):
        for found, subset in ((outcome.before, None), (outcome.after, kept)):
            model = recipe.train(seed, subset, device="cpu")
            with torch.no_grad():
                expected = recipe.task.measurements(model(x.double()), (x, y))
            np.testing.assert_allclose(found[seed], expected, rtol=1e-6)
    differences = outcome.after - outcome.before
    np.testing.assert_allclose(outcome.change, differences.mean(0))
    np.testing.assert_allclose(outcome.error, stats.sem(differences, axis=0))

    scores = make()
    view = judged(ScoredData({"a": scores}), job, outcome, np.array([3, 14, 40]))
    expected = [scores.removal_effect(q, [3, 14, 40]) for q in range(Q)]
    np.testing.assert_allclose(view["sets"]["a"]["change"], expected, rtol=1e-4)
    rank = stats.spearmanr(expected, outcome.change).statistic
    assert view["sets"]["a"]["spearman"] == pytest.approx(rank)
    assert view["becomes"] is None  # without the model, predictions are not known
    strict(view)

    # the baseline is there already: another job trains its own two models alone
    again = finished(jobs, jobs.submit(None, [7], 2))
    assert again.notes["reused"] == 2
    assert jobs.submit(None, [7], 2) is again  # and what was asked before is not done again
    jobs.close()

    restarted = Jobs(folder, recipe, QUERY, device="cpu")
    assert [j.id for j in restarted.all()] == [again.id, job.id]
    kept_outcome = restarted.outcome(restarted.get(job.id))
    assert kept_outcome is not None
    np.testing.assert_array_equal(kept_outcome.after, outcome.after)
    restarted.remove(again.id)
    assert [j.id for j in restarted.all()] == [job.id]
    restarted.close()

    other = Jobs(folder, recipes.recipe(epochs=6), QUERY, device="cpu")
    assert other.all() == [] and other.others == 1
    other.close()


def test_agreement_with_a_line() -> None:
    p = np.array([1.0, -2.0, 3.0, np.nan, 0.5])
    found = agreement(p, 0.25 * p)
    assert found["slope"] == pytest.approx(0.25)
    assert found["pearson"] == pytest.approx(1) and found["spearman"] == pytest.approx(1)
    assert agreement(np.zeros(4), np.ones(4)) == {"spearman": None, "pearson": None, "slope": None}


class Slow(torch.nn.Sequential):
    """An MLP that waits, while `Slow.waits` is set, after it has signalled that it trains."""

    trains = threading.Event()
    waits = threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and Slow.waits.is_set():
            Slow.trains.set()
            time.sleep(0.02)
        return super().forward(x)


def slow() -> torch.nn.Module:
    return Slow(recipes.mlp())


def test_cancelled_and_interrupted_retrainings_go_on(folder: Path) -> None:
    recipe = recipes.recipe(model=slow, epochs=30)
    jobs = Jobs(folder, recipe, QUERY, device="cpu")
    Slow.waits.set()
    try:
        job = jobs.submit(None, [1, 2], 1)
        assert Slow.trains.wait(60)
        shares = []
        while len(set(shares)) < 4:
            shares.append(jobs.progress(job)["share"])
            time.sleep(0.01)
        assert shares == sorted(shares) and shares[-1] < 1
        jobs.cancel(job.id)
        deadline = time.monotonic() + 20
        while jobs._current is not None:
            assert time.monotonic() < deadline, "a cancelled training must stop at an update"
            time.sleep(0.01)
        assert job.state == CANCELLED and jobs.outcome(job) is None

        Slow.trains.clear()
        jobs.resume(job.id)
        assert Slow.trains.wait(60)
        jobs.cancel(job.id)
        jobs.resume(job.id)  # at once: it must not be lost between the two
        while (now := jobs.progress(job))["share"] == 0 or jobs.get(job.id).state != "running":
            assert time.monotonic() < deadline + 20, now
            time.sleep(0.01)
        second = Jobs(folder, recipe, QUERY, device="cpu")
        assert second.refused is not None and "another explorer" in second.refused
        assert "retrains in" in second.refused
        assert [j.state for j in second.all()] == ["running"]
        with pytest.raises(PermissionError, match="another explorer"):
            second.submit(None, [5], 1)
        second.close()
        jobs.close()  # as Ctrl-C does
    finally:
        Slow.waits.clear()
    assert json.loads((folder / "jobs" / f"{job.id}.json").read_text())["state"] == "running"
    jobs = Jobs(folder, recipe, QUERY, device="cpu")
    assert finished(jobs, job).state == DONE
    jobs.close()


def test_a_retraining_that_fails_is_reported_and_the_next_one_runs(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = threading.Event()

    def model() -> torch.nn.Module:
        if broken.is_set():
            raise RuntimeError("the disk <b>is full</b>")
        return recipes.mlp()

    jobs = Jobs(folder, recipes.recipe(model=model), QUERY, device="cpu")
    broken.set()
    job = finished(jobs, jobs.submit(None, [1], 1))
    assert job.state == FAILED and job.error == "RuntimeError: the disk <b>is full</b>"
    assert "the disk" in capsys.readouterr().err
    broken.clear()
    assert finished(jobs, jobs.resume(job.id)).state == DONE
    for examples, seeds, why in (
        ([], 1, "no example is ticked"),
        ([N], 1, f"example {N} is not in the recipe's data"),
        (range(N - 3), 1, "3 are left, fewer than batch_size=7"),
        ([1], 0, "seeds=0"),
    ):
        with pytest.raises(ValueError, match=why):
            jobs.submit(None, list(examples), seeds)
    jobs.close()


def test_a_retraining_fails_though_its_error_cannot_be_printed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log on a full disk."""

    def model() -> torch.nn.Module:
        raise RuntimeError("no such layer")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    jobs = Jobs(folder, recipes.recipe(), QUERY, device="cpu")
    monkeypatch.setattr("traceback.print_exc", full)
    monkeypatch.setattr(jobs, "_retrain", lambda _: model())
    assert finished(jobs, jobs.submit(None, [1], 1)).error == "RuntimeError: no such layer"
    jobs.close()


def test_retraining_leaves_out_examples_of_the_ticked_stage(folder: Path) -> None:
    recipe = recipes.two_stages()
    values = np.random.default_rng(0).standard_normal((Q, 64)).astype(np.float32)
    scores = make(
        values,
        stage=["pretrain"] * 40 + ["finetune"] * 24,
        train_ids=np.concatenate([np.arange(40), np.arange(24)]),
    )
    explored = ScoredData({"a": scores})
    explorer = Explorer(explored, Jobs(folder, recipe, QUERY, device="cpu"))
    assert explorer.jobs is not None
    with pytest.raises(Refused, match=r"stages finetune and pretrain: .*one stage at a time"):
        explorer.submit([0, 45], 1)
    view = explorer.submit([45, 46], 1)
    job = finished(explorer.jobs, explorer.jobs.get(view["id"]))
    assert (job.stage, job.examples) == ("finetune", [5, 6])
    outcome = explorer.jobs.outcome(job)
    kept = [k for k in range(24) if k not in (5, 6)]
    model = recipe.train(0, kept, stage="finetune", device="cpu")
    x, y = QUERY.tensors
    with torch.no_grad():
        expected = recipe.task.measurements(model(x.double()), (x, y))
    assert outcome is not None
    np.testing.assert_allclose(outcome.after[0], expected, rtol=1e-6)
    assert explorer.job(job.id)["examples"] == [45, 46]
    explorer.close()


def test_recipes_that_do_not_fit_are_no_reason_not_to_explore(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"query": QUERY, "out": tmp_path}

    def refused(scores: Scores, **more: Any) -> str:
        page = prepare({"a": scores}, **(settings | more))
        page.explorer.close()
        page._socket.close()
        return page.explorer.refused or ""

    assert "there is no recipe" in refused(make())
    assert "no queries to measure" in refused(make(), recipe=recipes.recipe(), query=None)
    loss = recipes.recipe(task=whence.Classification(measurement="loss"))
    assert "a are scores of the margin, but the recipe's task measures the loss" in refused(
        make(), recipe=loss
    )
    short = recipes.recipe(train=recipes.dataset(40))
    assert "the recipe does not fit a: the training data has 40" in refused(make(), recipe=short)
    assert refused(make(), recipe=recipes.recipe()) == ""


# -- the server ------------------------------------------------------------------------------------

HOST, SECRET = "127.0.0.1:8765", "s3cret-token"


@pytest.fixture
def client(folder: Path) -> Iterator[TestClient]:
    data = [(TEXTS[k % 5], k % 3) for k in range(N)]
    scores = {"a": make(), "b": make(seed=1), "self": make(np.arange(N) * 1.0)}
    explored = ScoredData(scores, train=data, query=data[:Q])
    explorer = Explorer(explored, Jobs(folder, recipes.recipe(), QUERY, device="cpu"))
    explored.read()
    app = create_app(explorer, SECRET, frozenset({HOST, "localhost:8765"}))
    with TestClient(app, base_url=f"http://{HOST}", raise_server_exceptions=False) as made:
        yield made
    explorer.close()


TOLD = {"x-whence-token": SECRET}


def test_only_this_machines_page_with_the_token_gets_in(client: TestClient) -> None:
    addresses = ["/", "/static/views.js", "/api/overview", "/api/audit.csv?scores=a", "/nowhere"]
    for address in addresses:
        for headers in ({}, {"x-whence-token": "wrong"}, {"cookie": "whence-token-8765=wrong"}):
            answer = client.get(address, headers=headers)
            assert answer.status_code == 403 and "token is missing or wrong" in answer.text
            assert SECRET not in answer.text
        foreign = (
            {"host": "evil.example:8765"},  # DNS rebinding
            {"host": "127.0.0.1:9999"},
            {"origin": "http://evil.example"},
            {"origin": "http://127.0.0.1:9999"},
            {"origin": "null"},
        )
        for more in foreign:
            assert client.get(address, headers=TOLD | more).status_code == 403, (address, more)
    for site in ("cross-site", "same-site"):
        assert (
            client.get("/api/overview", headers=TOLD | {"sec-fetch-site": site}).status_code == 403
        )
    # the token in an address opens the page, and nothing else
    assert client.get(f"/api/overview?token={SECRET}").status_code == 403
    assert client.get("/?token=wrong").status_code == 403
    page = client.get(f"/?token={SECRET}", headers={"sec-fetch-site": "cross-site"})
    assert page.status_code == 200 and f'content="{SECRET}"' in page.text
    cookie = page.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie
    assert client.get("/api/overview").status_code == 200  # by the cookie, that the client keeps
    assert client.get("/api/overview", headers={"origin": f"http://{HOST}"}).status_code == 200
    assert client.get("/api/overview", headers={"host": "localhost:8765"}).status_code == 200


def test_changes_need_the_token_in_a_header(client: TestClient) -> None:
    client.get(f"/?token={SECRET}")  # a cookie is not enough
    asked = {"places": [1, 2], "seeds": 1}
    assert client.post("/api/jobs", json=asked).status_code == 403
    assert client.post("/api/jobs", json=asked, headers={"x-whence-token": "no"}).status_code == 403
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        assert client.request(method, "/api/jobs", headers=TOLD).status_code == 405
    big = client.post("/api/jobs", content=b" " * (2**20 + 1), headers=TOLD)
    assert big.status_code == 413
    for wrong in (
        {"places": ["x"], "seeds": 1},
        {"places": [1]},
        [],
        {"places": [1], "seeds": "?"},
    ):
        answer = client.post("/api/jobs", json=wrong, headers=TOLD)
        assert answer.status_code == 422 and answer.json()["error"]
    assert client.post("/api/jobs", json={"places": [N], "seeds": 1}, headers=TOLD).json() == {
        "error": f"place {N} is out of range: use 0..{N - 1}"
    }


@pytest.mark.parametrize("shape", [(50, 7), (40, 2), (30, 1)])
def test_the_map_has_the_first_two_principal_components(shape: tuple[int, int]) -> None:
    h = np.random.default_rng(0).standard_normal(shape) * np.linspace(3, 1, shape[1])
    points = principal(torch.from_numpy(h))
    centred = h - h.mean(0)
    left, sizes, _ = np.linalg.svd(centred, full_matrices=False)
    expected = left * sizes
    assert points.shape == (shape[0], 2) and np.abs(points).max() == pytest.approx(1)
    for k in range(min(2, shape[1])):
        correlation = np.corrcoef(points[:, k], expected[:, k])[0, 1]
        assert abs(correlation) == pytest.approx(1, abs=1e-6)


def test_a_notebook_shows_the_explorer_in_a_frame() -> None:
    with start({"made": make()}) as page:
        shown = page._repr_html_()
        assert f'<iframe src="http://localhost:{page.port}/?token=' in shown
        assert repr(page) == f"Running({page.url})"


def test_answers_forbid_what_they_do_not_need(client: TestClient) -> None:
    for address, status in (("/", 200), ("/api/overview", 200), ("/static/../server.py", 404)):
        answer = client.get(address, headers=TOLD)
        assert answer.status_code == status
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self'" in policy
        assert "unsafe" not in policy and "frame-ancestors 'none'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-store"
    page = client.get("/", headers=TOLD).text
    assert "<script>" not in page and " style=" not in page and "http://" not in page
    for name in ("views.js", "whence.css", "map.js", "explore.js", "explore.css"):
        found = client.get(f"/static/{name}", headers=TOLD)
        assert found.status_code == 200 and found.text
    assert client.get("/static/index.html", headers=TOLD).status_code == 404
    # training text is data in JSON, never markup
    answer = client.get("/api/examples?scores=a&row=0", headers=TOLD)
    assert answer.headers["content-type"] == "application/json"
    assert "<script>alert(1)</script>" in {i["example"]["text"] for i in answer.json()["items"]}


def test_every_answer_is_json_and_every_error_a_sentence(client: TestClient) -> None:
    good = (
        "overview",
        "queries?text=café",
        "query?scores=a&row=5&k=99999",
        "examples?scores=b&order=strongest&offset=40",
        "example?place=3&scores=a",
        "example?place=3&scores=self",
        "chosen?places=3,4",
        "rows?rows=1,0",
        "compare?a=a&b=b&row=2",
        "compare/overall?a=a&b=b",
        "audit?scores=self",
        "whatif?places=1,2,3",
        "whatif?places=",
        "jobs",
    )
    for address in good:
        answer = client.get(f"/api/{address}", headers=TOLD)
        assert answer.status_code == 200, (address, answer.text)
        strict(answer.json())
    bad = {
        "query?scores=zzz&row=0": (400, "there are no scores 'zzz': choose from a, b, self"),
        "query?scores=self&row=0": (400, "self is self-influence, which has no queries"),
        "query?scores=a&row=6": (400, "query 6 is out of range: use 0..5"),
        "query?scores=a&row=-1": (422, "row: "),
        "query?scores=a": (422, "row: Field required"),
        "rows?rows=9": (400, "query 9 is out of range"),
        "whatif?places=1,x": (400, "places must be numbers"),
        "whatif?places=-1": (400, "places must be numbers"),
        "whatif?places=48": (400, "place 48 is out of range"),
        f"whatif?places={','.join(map(str, range(5001)))}": (400, "tick at most 5000"),
        "audit?scores=zzz": (400, "there are no scores"),
        "audit.csv?scores=zzz": (400, "there are no scores"),
        "queries?wrong=true": (400, "whether a prediction is wrong is unknown"),
        "jobs/nothing": (404, "there is no retraining 'nothing'"),
        "examples?scores=a&sign=odd": (422, "sign: "),
        "nothing": (404, "Not Found"),
    }
    for address, (status, words) in bad.items():
        answer = client.get(f"/api/{address}", headers=TOLD)
        assert answer.status_code == status, (address, answer.text)
        assert words in answer.json()["error"], address
    huge = client.post("/api/jobs", json={"places": [10**30], "seeds": 1}, headers=TOLD)
    assert huge.status_code == 422 and "places.0: " in huge.json()["error"]
    table = client.get("/api/audit.csv?scores=self", headers=TOLD)
    assert table.headers["content-type"].startswith("text/csv")
    assert "attachment" in table.headers["content-disposition"]
    assert len(list(csv.reader(io.StringIO(table.text)))) == N + 1


def test_retraining_over_http(client: TestClient) -> None:
    job = client.post("/api/jobs", json={"places": [5, 3], "seeds": 2}, headers=TOLD).json()
    assert job["removed"] == 2 and job["at_work"]
    end = time.monotonic() + 60
    while (found := client.get(f"/api/jobs/{job['id']}", headers=TOLD).json())["at_work"]:
        assert 0 <= found["progress"]["share"] <= 1 and time.monotonic() < end
        time.sleep(0.05)
    assert found["state"] == "done" and found["examples"] == [3, 5]
    assert set(found["judged"]["sets"]) == {"a", "b"} and len(found["judged"]["real"]) == Q
    assert [j["id"] for j in client.get("/api/jobs", headers=TOLD).json()["jobs"]] == [job["id"]]
    gone = client.post(f"/api/jobs/{job['id']}/remove", headers=TOLD | {"content-length": "0"})
    assert gone.json()["jobs"] == []


def test_a_port_in_use_and_other_addresses() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"port {port} is in use.*port=0 for a free one"):
            prepare({"a": make()}, port=port)
    with pytest.raises(ValueError, match="port=70000"):
        prepare({"a": make()}, port=70000)
    with pytest.raises(ValueError, match=r"host='0.0.0.0' would show your training data"):
        prepare({"a": make()}, host="0.0.0.0")


def test_a_running_explorer_answers_and_stops() -> None:
    import httpx

    with start({"a": make()}) as page, start({"a": make()}) as other:
        assert page.token != other.token
        both = httpx.Client(follow_redirects=False)  # one browser: cookies know no ports
        assert both.get(page.url).status_code == both.get(other.url).status_code == 200
        for one in (page, other):
            assert both.get(f"{one.address}/api/overview").status_code == 200
        assert page.url.startswith("http://127.0.0.1:")
        assert httpx.get(page.url).status_code == 200
        assert httpx.get(page.address).status_code == 403
        address = f"{page.address}/api/overview"
        found = httpx.get(address, headers={"x-whence-token": page.token}).json()
        many = ",".join(["000000003"] * 5000)
        token = {"x-whence-token": page.token}
        effect = httpx.get(f"{page.address}/api/whatif?places={many}", headers=token).json()
        assert effect["examples"] == 1
        assert found["sets"] == ["a"] and "there is no recipe" in found["retrain"]["refused"]
    with pytest.raises(httpx.ConnectError):
        httpx.get(page.address)


def test_ctrl_c_ends_it_cleanly(tmp_path: Path) -> None:
    make().save(tmp_path / "scores")
    where = str(tmp_path / "scores")
    code = f"""
import sys
from whence.explore import serve
assert not {{"fastapi", "uvicorn"}} & set(sys.modules), "these are for those who explore"
serve([{where!r}], open_browser=False)
"""
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        assert child.stdout is not None
        first = child.stdout.readline()
        assert first.startswith("Exploring at http://127.0.0.1:") and "?token=" in first
        time.sleep(0.5)
        child.send_signal(signal.SIGINT)
        rest, _ = child.communicate(timeout=30)
    finally:
        child.kill()
    assert child.returncode == 0, rest
    assert "Stopped." in rest and "Traceback" not in rest


def test_what_was_read_is_not_visited_by_the_garbage_collector() -> None:
    """A full collection took 170 ms, in the middle of an answer."""
    gc.unfreeze()
    explorer = Explorer(ScoredData({"a": make()}))
    explorer.start()
    explorer._worker.join(60)
    try:
        assert explorer.summary("a")["queries"] == Q
        assert gc.get_freeze_count() > 10_000
    finally:
        explorer.close()
    assert gc.get_freeze_count() == 0


def test_a_thousand_queries_of_sixty_thousand_examples_stay_on_disk(tmp_path: Path) -> None:
    q, n = 1000, 60_000
    shape = make(np.zeros((2, 3), np.float32), query_ids=[0, 1])
    shape.save(tmp_path)
    values = np.lib.format.open_memmap(  # a file with holes: it takes little room
        tmp_path / "scores.npy", "w+", np.float32, (q, n)
    )
    values[::100] = np.random.default_rng(0).standard_normal((10, n))
    values.flush()
    np.save(tmp_path / "query_ids.npy", np.arange(q))
    np.save(tmp_path / "train_ids.npy", np.arange(n))
    meta = json.loads((tmp_path / "scores.json").read_text())
    meta["arrays"] = {
        "scores": {"shape": [q, n], "dtype": "float32"},
        "query_ids": {"shape": [q], "dtype": "int64"},
        "train_ids": {"shape": [n], "dtype": "int64"},
    }
    edit_json(tmp_path / "scores.json", **meta)
    scores = Scores.load(tmp_path)
    explorer = Explorer(ScoredData({"a": scores, "b": scores}))
    places = list(range(0, n, 60))
    tracemalloc.start()
    try:
        view = explorer.query("a", 100, 10)
        explorer.data.list_examples("a", 100, sign="harmful", offset=20_000)
        explorer.data.list_queries(offset=900)
        compared = explorer.compare("a", "b", 100, 10)
        overall = explorer.overall("a", "b", 10)
        change = explorer.what_if(places)["sets"]["a"]["change"]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 48 * 2**20, f"{peak / 2**20:.0f} MB for a file of 240"
    assert [e["column"] for e in view["helpful"]] == scores.helpful(100, 10).examples
    assert compared["spearman"] == 1.0 and len(compared["dots"]) < 2000
    assert 1 <= overall["done"] <= q
    assert change[100] == pytest.approx(-float(values[100, places].sum()), rel=1e-3)
