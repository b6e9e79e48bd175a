"""Views of scores against plain sorting and counting."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
import torch
from support.made import scores_of as made
from torch.utils.data import TensorDataset

import whence
from whence.present.predict import curves
from whence.present.summary import summary
from whence.present.views import harmful_overall, histogram, overview, query_view, strongest


@pytest.mark.parametrize("higher", [True, False])
def test_a_query_is_ranked_like_the_scores_do(higher: bool) -> None:
    values = np.random.default_rng(0).standard_normal((3, 40)).round(1)  # with ties
    scores = made(values, higher)
    view = query_view(scores, 1, 6)
    for end, ranking in (("helpful", scores.helpful(1, 6)), ("harmful", scores.harmful(1, 6))):
        assert [e["column"] for e in view[end]] == ranking.examples
        assert [e["value"] for e in view[end]] == pytest.approx([e.value for e in ranking])
    sign = 1 if higher else -1
    assert view["harmed"] == pytest.approx(values[1][sign * values[1] < 0].sum())


def test_only_what_helped_is_called_helpful() -> None:
    view = query_view(made([[3.0, 0.0, 1.0]]), 0, 5)
    assert [e["column"] for e in view["helpful"]] == [0, 2]
    assert view["harmful"] == []


@pytest.mark.parametrize("values", [[0.3, -2.0, 5.0, 5.0], [1.0, 2.0], [-1.0], [0.0, 0.0]])
def test_no_bin_has_two_signs(values: list[float]) -> None:
    found = histogram(np.array(values))
    edges = found["low"] + found["width"] * np.arange(len(found["counts"]) + 1)
    assert sum(found["counts"]) == len(values)
    assert np.abs(edges).min() < 1e-9 * found["width"] + 1e-12  # zero is an edge
    for value in values:  # every value is in a bin that is counted
        at = min(int(np.floor((value - found["low"]) / found["width"] + 1e-9)), len(edges) - 2)
        assert found["counts"][at] > 0


def test_strongest_is_a_stable_sort() -> None:
    random = np.random.default_rng(1)
    for _ in range(50):
        values = random.integers(0, 6, 30).astype(float)
        k = int(random.integers(1, 40))
        assert strongest(values, k).tolist() == np.argsort(-values, kind="stable")[:k].tolist()


def test_the_class_mix_counts_the_shown() -> None:
    labels = [str(c) for c in np.random.default_rng(0).integers(0, 3, 40)]
    view = query_view(
        made(np.random.default_rng(1).standard_normal((1, 40))), 0, 8, labels.__getitem__
    )
    for end in ("helpful", "harmful"):
        expected = Counter(labels[entry["column"]] for entry in view[end])
        assert dict(view["classes"][end]) == expected
    nothing = query_view(made([[1.0, -1.0]]), 0, 2, lambda column: None)
    assert nothing["classes"] is None  # no labels: no mix


@pytest.mark.parametrize("higher", [True, False])
def test_the_most_harmful_over_all_queries(higher: bool) -> None:
    values = np.random.default_rng(3).standard_normal((6, 30))
    values[2, 4] = np.nan
    scores = made(values, higher)
    sign = 1 if higher else -1
    mean = sign * np.nanmean(values, 0)
    view = harmful_overall(scores, 5, near=3)
    assert [e["column"] for e in view["entries"]] == np.argsort(mean)[:5].tolist()
    filled = np.where(np.isnan(values), np.inf, sign * values)
    near = np.argsort(filled, 1)[:, :3]
    for entry in view["entries"]:
        column = entry["column"]
        assert entry["value"] == pytest.approx(np.nanmean(values[:, column]), rel=1e-4)
        assert entry["queries"] == int((near == column).any(1).sum())
        assert entry["worst"] == int(np.argmin(filled[:, column]))


def test_numbers_that_are_none_are_counted_and_said() -> None:
    values = np.array([[1.0, np.nan, -1.0, np.inf], [0.5, -np.inf, 2.0, -2.0]])
    scores = made(values, spread=np.full((2, 4), np.inf))
    view = query_view(scores, 0, 5)
    assert view["not_numbers"] == 2
    assert [e["column"] for e in view["helpful"]] == [0]
    assert view["helpful"][0]["spread"] is None
    assert sum(view["histogram"]["counts"]) == 2
    assert any("3 scores are not finite" in note for note in overview(scores)["notes"])
    json.dumps([view, overview(scores), harmful_overall(scores)], allow_nan=False)
    hopeless = made(np.full((1, 3), np.nan))
    view = query_view(hopeless, 0)
    assert view["helpful"] == view["harmful"] == [] and view["histogram"] is None


def test_frozen_layers_are_not_left_out() -> None:
    frozen = [{"name": f"f{k}", "share": 0.0, "reason": "frozen"} for k in range(12)]
    view = overview(made([[1.0, -1.0]], excluded=frozen))
    assert view["notes"] == []
    assert view["excluded"] == [{"name": "12 layers", "share": None, "reason": "frozen"}]
    norm = {"name": "norm", "share": 0.25, "reason": "LayerNorm"}
    view = overview(made([[1.0, -1.0]], excluded=[norm, *frozen]))
    assert view["notes"][0].startswith("25.0% of the trained parameters do not contribute")
    assert [part["name"] for part in view["excluded"]] == ["norm", "12 layers"]


def test_calibrated_scores_have_intervals_and_others_none() -> None:
    values = np.array([[0.5, -0.25, 0.125], [1.0, 2.0, -3.0]])
    assert "within" not in query_view(made(values), 1)["helpful"][0]
    assert overview(made(values))["calibrated"] is None
    fit = {"slope": 0.5, "standard_error": 0.1, "quantile": 2.0, "removals": 4.0, "subsets": 9}
    fit |= {"fitted": 0.6, "interval": [0.4, 0.8], "residual": [0.3, 0.5]}
    for noise in (None, [0.1, 0.4]):
        scores = made(values, diagnostics={"calibration": {**fit, "noise": noise}})
        assert overview(scores)["calibrated"].startswith("calibrated on ")
        for row in (0, 1):
            # one of four removals that a subset is worth; noise is no part of an expected change
            unknown = fit["residual"][row] ** 2 - (0 if noise is None else noise[row] ** 2)
            view = query_view(scores, row)
            for entry in view["helpful"] + view["harmful"]:
                expected = 2 * np.sqrt((entry["value"] * 0.1 / 0.5) ** 2 + unknown / 4)
                assert entry["within"] == pytest.approx(expected, rel=1e-4)


# -- overview --------------------------------------------------------------------------------------


@pytest.mark.parametrize("higher", [True, False])
def test_the_overview_is_of_means_over_queries_and_classes(higher: bool) -> None:
    random = np.random.default_rng(0)
    values = random.standard_normal((6, 30)).astype(np.float32)
    values[2, 4] = np.nan
    scores = whence.Scores(values, method="M", measurement="m", unit="u", higher_is_better=higher)
    classes, of = [str(k % 3) for k in range(30)], ["0", "1", "1", "2", "0", "1"]
    predicted = [
        {"comparable": True, "label": "a", "prediction": "a" if q else "b", "measurement": q}
        for q in range(6)
    ]
    view = summary(scores, classes.__getitem__, of.__getitem__, predicted, k=4)
    means = np.nanmean(values.astype(np.float64), 0)
    order = np.argsort(-means if higher else means)
    assert [e["column"] for e in view["helpful"]] == order[:4].tolist()
    assert [e["column"] for e in view["harmful"]] == order[::-1][:4].tolist()
    assert view["right"] == [5, 6] and view["measured"] == 2.5
    assert view["classes"]["names"] == ["0", "1", "2"]
    for row in range(3):
        for column in range(3):
            block = [
                values[q, m]
                for q in range(6)
                for m in range(30)
                if of[q] == str(row) and classes[m] == str(column) and np.isfinite(values[q, m])
            ]
            assert view["classes"]["means"][row][column] == pytest.approx(np.mean(block), rel=1e-3)
    nothing = summary(scores, lambda _: None, lambda _: None)
    assert nothing["classes"] is None and nothing["right"] is None
    many = summary(scores, str, lambda q: str(q))  # 30 classes: no table anybody reads
    assert many["classes"] is None


def test_the_curve_of_a_query_is_its_measurement_at_each_checkpoint() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    states = [{n: t + 0.1 * k for n, t in model.state_dict().items()} for k in range(4)]
    run = whence.Run.from_checkpoints(states[1:], [5, 10, 15], 0.1, initial=states[0])
    x, y = torch.randn(300, 3), torch.randint(2, (300,))
    study = whence.Study(model, whence.Classification(), TensorDataset(x, y), run)
    steps, measured = curves(study, TensorDataset(x, y), [7, 299])
    assert steps == [0, 5, 10, 15] and measured.shape == (4, 2)
    for state, row in zip(states, measured, strict=True):
        logits = x[[7, 299]] @ state["weight"].T + state["bias"]
        margins = [z[int(c)] - z[1 - int(c)] for z, c in zip(logits, y[[7, 299]], strict=True)]
        np.testing.assert_allclose(row, margins, rtol=1e-5)
