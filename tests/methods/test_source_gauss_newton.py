"""SOURCE with the true Gauss-Newton matrix of all layers together, against matrix_exp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_adam as adaptive
import test_source_exact as test_exactness
import test_stages
import torch
from support import dense, forms
from support import dense_stages as ds
from support.comparing import agree, close
from support.interrupting import interrupt
from test_influence_solvers import flat, gauss_newton

import whence
from whence.operators.gauss_newton import GaussNewton

EXACT: dict[str, Any] = {"dtype": torch.float64, "progress": False}
WHOLE = "gauss-newton"


# --- brute force ----------------------------------------------------------------------------------


def whole(
    oracle: ds.Staged,
    segments: list[ds.Segment],
    damping: float = 0.0,
    weight_decay: bool = False,
    floor: float = 0.0,
) -> np.ndarray:
    """Contributions (L, q, n) with one matrix over all blocks that the queries see."""
    query = {name: v for name, v in oracle._queries(oracle.last).items() if v.any()}
    names = list(query)
    widths = {name: v.shape[1] for name, v in query.items()}
    v = flat(query, names)
    result = torch.zeros(len(segments), len(v), oracle.total, dtype=torch.float64)
    for k, segment in reversed(list(enumerate(segments))):
        it, P = oracle.stages[segment.stage], {}
        first = oracle.gradients(
            oracle._key(segment.checkpoints[0]), segment.stage, "losses", False
        )
        here = [n for n in names if n in first and oracle._time(segment, n)]
        if segment.moments is not None:
            P = ds.preconditioner(it.model, segment.moments, segment.epsilon, floor)
        every = [gauss_newton(it.model, w, it.task, it.data, here) for w in segment.checkpoints]
        H = torch.stack(every).mean(0) / len(it.data)
        P_all = torch.cat([P.get(n, torch.ones(widths[n], dtype=torch.float64)) for n in here])
        times = [torch.full((widths[n],), oracle._time(segment, n)) for n in here]
        shift = torch.full((len(H),), damping, dtype=torch.float64)
        if weight_decay:
            shift = shift + (segment.decay / P_all if segment.decoupled else segment.decay)
        S, R = ds.preconditioned_exactly(
            H + torch.diag(shift), 1.0, torch.cat(times).double() * P_all
        )
        place = torch.cat([torch.full((widths[n],), n in here) for n in names])
        g = [
            flat(oracle.gradients(oracle._key(w), segment.stage, "losses", False), here)
            for w in segment.checkpoints
        ]
        mean = torch.stack(g).mean(0)
        columns = oracle.columns[segment.stage]
        result[k, :, columns] = -v[:, place] @ R.T @ mean.T / oracle.sizes[segment.stage]
        v = v.clone()
        v[:, place] = v[:, place] @ S.T
    return result.detach().numpy()


def attribute(it: Any, *args: Any, **settings: Any) -> whence.Scores:
    method = forms.exact(*args, curvature=WHOLE, **settings)
    return method.attribute(it.study, it.query, by_segment=True, **EXACT)


def plain(name: str, segments: int, weight_decay: float = 0.0) -> np.ndarray:
    """The same for SGD, by another oracle: all layers as one block of dense.py."""
    it = test_exactness.pair(name).dense
    names, parts, start = list(it.gradients(it.last, "losses", False)), [], 0
    for members in np.array_split(np.arange(it.last + 1), segments):
        weights = [it.history.checkpoints[c] for c in members]
        each = [gauss_newton(it.model, w, it.task, it.train, names) for w in weights]
        H = torch.stack(each).mean(0) / len(it.train)
        H = H + weight_decay * torch.eye(len(H), dtype=H.dtype)
        g = [flat(it.gradients(int(c), "losses", False), names) for c in members]
        end = it.history.steps[members[-1]]
        time = float(sum(it.history.rates[start:end])) * it.effective
        parts.append(dense.Segment({"all": H}, {"all": torch.stack(g).mean(0)}, time))
        start = end
    v = {"all": flat(it.gradients(it.last, "measurements", True), names)}
    return dense.source(v, parts, len(it.train)).detach().numpy()


# --- scores ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("name", [*test_exactness.MAIN, "mse-3", "binary", "twice"])
def test_sgd(name: str, segments: int) -> None:
    it = test_exactness.pair(name)
    actual = attribute(it, segments)
    agree(actual, plain(name, segments))
    assert actual.diagnostics["lanczos"]["residual"] <= 1e-10


def test_layers_are_not_taken_for_independent() -> None:
    it = test_exactness.pair("mlp")
    apart = it.dense.source(2, "gauss-newton").sum(0)  # the same matrix, its blocks alone
    joint = plain("mlp", 2).sum(0)
    assert abs(apart - joint).max() > 0.05 * abs(joint).max()


def test_weight_decay_as_curvature() -> None:
    it = test_exactness.pair("mlp")
    actual = attribute(it, 2, weight_decay="curvature")
    agree(actual, plain("mlp", 2, it.dense.history.weight_decay))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("mlp", kind) for kind in adaptive.OPTIMIZERS),
        ("conv", "adam"),
        ("gpt", "adamw"),
    ],
)
def test_preconditioned(name: str, kind: str) -> None:
    it = adaptive.pair(name, kind)
    agree(attribute(it, 2), whole(it.dense, it.leg.segments(2)))


@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_damping_weight_decay_and_a_floor(kind: str) -> None:
    it = adaptive.pair("mlp", kind)
    actual = attribute(it, 2, damping=0.1, weight_decay="curvature", floor=0.5)
    agree(actual, whole(it.dense, it.leg.segments(2), 0.1, True, 0.5))


def test_fastsource() -> None:
    it = adaptive.pair("mlp", "adam")
    method = forms.exact(2, curvature=WHOLE, method=whence.FastSource)
    actual = method.attribute(it.study, it.query, by_segment=True, **EXACT)
    segments = it.leg.segments(2)
    averaged = [segment.averaged() for segment in segments]
    agree(actual, whole(it.dense, averaged))


@pytest.mark.parametrize("stage", [None, "before", "after"])
def test_stages_with_groups_of_their_own_rates(stage: str | None, tmp_path: Path) -> None:
    """SGD, then AdamW with a frozen layer and two rates; the heads differ."""
    it = test_stages.Trained(tmp_path / "run")
    expected = whole(it.dense, it.segments(2, 1)).sum(0)
    method = forms.exact([4, 8, 17], curvature=WHOLE, stage=stage)
    actual = method.attribute(it.study, test_stages.QUERY, **EXACT).values
    close(actual, expected if stage is None else expected[:, it.dense.columns[stage]])


def test_self_influence() -> None:
    it = test_exactness.pair("mlp")
    actual = forms.exact(2, curvature=WHOLE).attribute(it.study, **EXACT).values
    close(
        actual,
        [
            forms.exact(2, curvature=WHOLE).attribute(it.study, [row], **EXACT).values[0, k]
            for k, row in enumerate(it.dense.train)
        ],
    )


@pytest.mark.parametrize("options", [{"batch_size": 1}, {"batch_size": 5}, {"memory": 2**20}])
def test_nothing_depends_on_batches_or_memory(options: dict[str, Any]) -> None:
    """Little memory keeps fewer Krylov vectors, and takes fewer queries at a time."""
    it = test_exactness.pair("conv")
    method = forms.exact(2, curvature=WHOLE)
    actual = method.attribute(it.study, it.query, **EXACT, **options).values
    close(actual, plain("conv", 2).sum(0))


def test_single_precision() -> None:
    it = adaptive.pair("conv", "adamw")
    method = forms.exact(2, curvature=WHOLE)
    actual = method.attribute(it.study, it.query, progress=False).values
    close(actual, whole(it.dense, it.leg.segments(2)).sum(0), 5e-3)


def test_tokens_add_up() -> None:
    it = test_exactness.pair("gpt-tied")
    (one,) = forms.exact(2, curvature=WHOLE).tokens(it.study, it.query, [2], **EXACT)
    close(one.values.sum(1) + one.rest, plain("gpt-tied", 2).sum(0)[:, 2])


def test_a_killed_call_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    it = test_exactness.pair("mlp")
    method = forms.exact(2, curvature=WHOLE)
    expected = method.attribute(it.study, it.query, **EXACT).values
    interrupt(monkeypatch, GaussNewton, "flat_product", 5)
    with pytest.raises(KeyboardInterrupt):
        method.attribute(it.study, it.query, out=tmp_path / "scores", **EXACT)
    again = method.attribute(it.study, it.query, out=tmp_path / "scores", **EXACT)
    np.testing.assert_array_equal(again.values, expected)


# --- what cannot be meant -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"fisher": "empirical"}, "fisher='empirical' means nothing to curvature='gauss-newton'"),
    ],
)
def test_settings_that_mean_nothing(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        whence.Source.published(curvature=WHOLE, **settings)


def test_it_is_among_the_kinds_and_not_of_influence() -> None:
    with pytest.raises(ValueError, match=r"curvature='newton' is not known: .*'gauss-newton'"):
        whence.Source.published(curvature="newton")
    with pytest.raises(ValueError, match=r"curvature='gauss-newton' is not known"):
        whence.Influence.published(curvature=WHOLE)


def test_bfloat16_is_refused() -> None:
    it = test_exactness.pair("mlp")
    with pytest.raises(ValueError, match="bfloat16 cannot resolve products"):
        forms.exact(2, curvature=WHOLE).attribute(
            it.study, it.query, dtype=torch.bfloat16, progress=False
        )


def test_a_poor_approximation_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whence.operators.whitened.STEPS", 2)
    it = test_exactness.pair("mlp")
    with pytest.warns(
        UserWarning,
        match=r"all 3 layers together are only known to .* after 2 Lanczos",
    ):
        actual = attribute(it, 1)
    assert actual.diagnostics["lanczos"]["residual"] > 1e-3


def test_the_estimate_counts_products() -> None:
    it = test_exactness.pair("mlp")
    passes = forms.exact(2, curvature=WHOLE).estimate(it.study, it.query)["passes"]
    assert passes["products"] >= 6 and passes["scores"] == 6 and "covariances" not in passes
