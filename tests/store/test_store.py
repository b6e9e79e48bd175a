"""GradientStore: exact where its subspace is everything; written once, resumed, grown, refused."""

from __future__ import annotations

import copy
import json
import shutil
import sys
import warnings
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import dense, judged, models
from support.comparing import close
from support.files import edit_json
from support.flat import Flat
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import whence
import whence.errors
import whence.persist.files
import whence.store.building as building
import whence.store.contents as contents
import whence.store.index as store_index
from whence.engine.workspace import ComputeOptions
from whence.errors import DamagedFile
from whence.layers.passes import Passes
from whence.methods.trak import Trak
from whence.operators import EKFAC
from whence.operators import response as F_r
from whence.operators import survival as F_S
from whence.operators.projected import Projected, ProjectedVectors, never_zero
from whence.projections import Random
from whence.scores import ensemble
from whence.store import GradientStore
from whence.store.rows import FORMS, Rows, StoredRows, columns, encoded, inner

QUIET: Any = {"progress": False}
BUILD: Any = {"dtype": torch.float64, "progress": False, "fisher": "exact"}
TRAIN, QUERY = models.vectors(24), models.vectors(3, seed=1)
STEPS = [3, 6, 10, 14]

PAPER: Any = {"coupling": False, "query_at": "final"}


class Case:
    def __init__(self, model: nn.Module, task: Any, train: Any, query: Any) -> None:
        self.model, self.task, self.train, self.query = model, task, train, query
        kind = {"momentum": 0.5, "batch_size": 8}
        self.history = models.train_run(model, task, train, STEPS, lambda k: 0.2 / (1 + k), **kind)
        run = self.history.run
        self.study = whence.Study(model, task, train=train, runs=run, layers="matrices")
        self.dense = dense.Dense(model, task, train, self.history, query)
        self.flat = Flat(self.study)
        self.parameters = sum(b.size for b in self.flat.blocks.values())

    @property
    def times(self) -> list[float]:
        """η̄K of two segments."""
        return [2 * sum(self.history.rates[a:b]) for a, b in ((0, 6), (6, 14))]


CASES: dict[str, Callable[[], Case]] = {
    "mlp": lambda: Case(models.mlp(), whence.Classification(), TRAIN, QUERY),
    "conv": lambda: Case(
        models.ConvNet(), whence.Classification(), models.images(12), models.images(3, seed=1)
    ),
    "gpt": lambda: Case(
        models.Transformer(tied=False),
        whence.LanguageModeling(),
        models.documents(10),
        models.documents(3, seed=1),
    ),
}


@cache
def case(name: str = "mlp") -> Case:
    torch.manual_seed(0)
    return CASES[name]()


@pytest.fixture
def it() -> Case:
    return case()


# --- exact where everything is kept ---------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_everything_layer_by_layer(name: str, tmp_path: Path) -> None:
    """All coordinates of the eigenbasis, one block per layer: the dense Gauss-Newton's answers."""
    it = case(name)
    store = GradientStore.build(
        it.study, tmp_path / "s", it.parameters, "eigenbasis", joint=False, **BUILD
    )
    scores = store.source(it.query, segments=2, by_segment=True, **PAPER, **QUIET)
    close(scores.by_segment, it.dense.source(2, "gauss-newton", "exact"), 1e-8)
    close(scores.values, it.dense.source(2, "gauss-newton", "exact").sum(0), 1e-8)
    close(store.tracin(it.query, **QUIET).values, it.dense.tracin(), 1e-8)
    for damping in (1e-2, "source"):
        expected = it.dense.influence(damping, "gauss-newton", "exact")
        close(store.influence(it.query, damping, coupling=False, **QUIET).values, expected, 1e-8)


def joint_source(
    columns: list[list[Tensor]], rows: list[list[Tensor]], q: Tensor, times: list[Tensor]
) -> Tensor:
    """SOURCE with whole matrices: exp(-TH) as it stands, T diagonal, not symmetric."""
    n, parts = len(rows[0][0]), []
    for C, g, T in reversed(list(zip(columns, rows, times, strict=True))):
        H = torch.stack([c.T @ c / n for c in C]).mean(0)
        TH = T.unsqueeze(1) * H
        size = len(H)
        corner = torch.zeros(2 * size, 2 * size, dtype=H.dtype)  # exp([[-TH, T], [0, 0]])
        corner[:size, :size], corner[:size, size:] = -TH, T.diag()
        r = torch.linalg.matrix_exp(corner)[:size, size:]
        parts.insert(0, -(q @ r @ torch.stack(g).mean(0).T) / n)
        q = q @ torch.linalg.matrix_exp(-TH)
    return torch.stack(parts)


def test_everything_jointly(it: Case, tmp_path: Path) -> None:
    """One curvature matrix for all layers, with what is between them."""
    store = GradientStore.build(it.study, tmp_path / "s", it.parameters, "eigenbasis", **BUILD)
    found = it.study.runs[0].checkpoints
    columns = [it.flat.columns(c, it.train) for c in found]
    rows = [it.flat.gradients(c, "losses", it.train) for c in found]
    q = it.flat.gradients(found[-1], "measurements", it.query)
    times = [torch.full((it.parameters,), x, dtype=torch.float64) for x in it.times]
    expected = joint_source([columns[:2], columns[2:]], [rows[:2], rows[2:]], q, times)
    close(
        store.source(it.query, segments=2, by_segment=True, **PAPER, **QUIET).by_segment,
        expected,
        1e-8,
    )
    H = columns[-1].T @ columns[-1] / 24 + 0.1 * torch.eye(it.parameters).double()
    expected = -(q @ torch.linalg.solve(H, rows[-1].T)) / 24
    close(store.influence(it.query, 0.1, coupling=False, **QUIET).values, expected, 1e-8)


def test_coupled_layers(it: Case, tmp_path: Path) -> None:
    """Each layer's curvature times the share that the trace of all has over its own."""
    store = GradientStore.build(
        it.study, tmp_path / "s", it.parameters, "eigenbasis", joint=False, **BUILD
    )
    found = it.study.runs[0].checkpoints
    rows = [it.flat.gradients(c, "losses", it.train) for c in found]
    q = torch.stack([it.flat.gradients(c, "measurements", it.query) for c in found]).mean(0)
    blocks = list(it.flat.blocks.values())
    columns, shares = [], []
    for segment in (found[:2], found[2:]):
        each = [_apart(it.flat.columns(c, it.train), it) for c in segment]
        squares = torch.stack([c.square().sum(0) for c in each]).sum(0)  # of H's diagonal
        traces = torch.stack([part.sum() for part in squares.split([b.size for b in blocks])])
        c = torch.cat(
            [x.expand(b.size) for x, b in zip(traces.sum() / traces, blocks, strict=True)]
        )
        columns.append([one * c.sqrt() for one in each])
        shares.append(dict(zip(it.flat.blocks, (traces.sum() / traces).tolist(), strict=True)))
    times = [torch.full((it.parameters,), x, dtype=torch.float64) for x in it.times]
    expected = joint_source(columns, [rows[:2], rows[2:]], q, times)
    scores = store.source(it.query, segments=2, by_segment=True, **QUIET)
    close(scores.by_segment, expected, 1e-8)
    for segment, share in zip(scores.diagnostics["segments"], shares, strict=True):
        assert segment["coupling"] == pytest.approx(share)


def grouped(rates: Any) -> tuple[whence.Study, Case]:
    """The first layer in a group of its own; rates (updates, 2)."""
    it = case()
    groups = [["0.weight", "0.bias"], ["2.weight", "2.bias", "4.weight", "4.bias"]]
    run = whence.Run.from_checkpoints(it.history.checkpoints, STEPS, rates, groups=groups)
    return whence.Study(it.model, it.task, train=TRAIN, runs=run), it


@pytest.mark.parametrize("rates", [([0.2, 0.05], [0.1, 0.3]), ([0.2, 0.1], [0.0, 0.1])], ids=str)
@pytest.mark.parametrize("joint", [True, False])
def test_rates_of_layers(tmp_path: Path, rates: Any, joint: bool) -> None:
    """Each layer by its own clock, also one that stands still in a segment."""
    study, it = grouped(np.repeat(rates, [6, 8], axis=0))
    store = GradientStore.build(
        study, tmp_path / "s", it.parameters, "eigenbasis", joint=joint, **BUILD
    )
    found = study.runs[0].checkpoints
    columns = [it.flat.columns(c, it.train) for c in found]
    if not joint:  # no curvature between layers
        columns = [_apart(c, it) for c in columns]
    rows = [it.flat.gradients(c, "losses", it.train) for c in found]
    q = it.flat.gradients(found[-1], "measurements", it.query)
    times = []
    for pair, steps in zip(rates, (6, 8), strict=True):
        per_block = [pair[name != "0"] * steps for name in it.flat.blocks]
        sizes = torch.tensor([b.size for b in it.flat.blocks.values()])
        times.append(torch.tensor(per_block, dtype=torch.float64).repeat_interleave(sizes))
    expected = joint_source([columns[:2], columns[2:]], [rows[:2], rows[2:]], q, times)
    close(
        store.source(it.query, segments=2, by_segment=True, **PAPER, **QUIET).by_segment,
        expected,
        1e-8,
    )
    if joint and 0.0 not in rates[1]:
        with pytest.raises(ValueError, match=r"learning rates differ .* use joint=False, or"):
            GradientStore.build(study, tmp_path / "r", 8, **QUIET).source(QUERY, **PAPER, **QUIET)


def _apart(columns: Tensor, it: Case) -> Tensor:
    """Each column cut into one for each layer."""
    sizes = [b.size for b in it.flat.blocks.values()]
    ends = np.cumsum([0, *sizes])
    made = []
    for a, b in pairwise(ends):
        only = torch.zeros_like(columns)
        only[:, a:b] = columns[:, a:b]
        made.append(only)
    return torch.cat(made)


def test_a_stretch_whose_clock_stands_still_is_the_limit_of_a_slow_one() -> None:
    generator = torch.Generator().manual_seed(0)
    A = torch.randn(5, 5, generator=generator).double()
    H, v = A @ A.T, torch.randn(2, 5, generator=generator).double()

    def survived(T: Tensor) -> tuple[Tensor, Tensor]:
        whole = Projected(lambda: [H], [slice(0, 5)], ["0"], torch.float64, lambda _, fit: fit())
        root = never_zero(T).sqrt()
        M = whole.whitened(never_zero(T))
        response, survival = M.apply((F_r, F_S), root * ProjectedVectors(v))
        assert response is not None and survival is not None
        return (root * response).values, (survival / root).values

    slow, still = (survived(torch.tensor([0.3, t, 0.2, t, 1.0]).double()) for t in (1e-12, 0.0))
    T = torch.tensor([0.3, 0.0, 0.2, 0.0, 1.0]).double()
    expected = v @ torch.linalg.matrix_exp(-H * T).T
    for one in (slow, still):
        torch.testing.assert_close(one[1], expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(slow[0], still[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("joint", [True, False])
def test_trak_is_trak(it: Case, tmp_path: Path, joint: bool) -> None:
    store = GradientStore.build(
        it.study, tmp_path / "s", 9, joint=joint, seed=3, methods=["trak"], **BUILD
    )
    for damping in (0.0, 1e-2):
        method = Trak(9, seed=3, joint=joint, damping=damping)
        expected = method.attribute(it.study, it.query, dtype=torch.float64, **QUIET)
        close(store.trak(it.query, damping, **QUIET).values, expected.values, 1e-8)


@pytest.mark.parametrize("fisher", ["sampled", "empirical"])
def test_fishers(it: Case, tmp_path: Path, fisher: str) -> None:
    """The second moments are those of the brute force, example by example."""
    store = GradientStore.build(
        it.study,
        tmp_path / "s",
        it.parameters,
        "eigenbasis",
        joint=False,
        seed=2,
        **(BUILD | {"fisher": fisher}),
    )
    from whence.task import Uniform

    uniform = lambda example, step: Uniform(2, step, [example])  # noqa: E731
    oracle = dense.Dense(it.model, it.task, it.train, it.history, it.query, uniform)
    expected = oracle.source(2, "gauss-newton", fisher)
    close(
        store.source(it.query, segments=2, by_segment=True, **PAPER, **QUIET).by_segment,
        expected,
        1e-8,
    )


def test_stages(tmp_path: Path) -> None:
    """Influence and TRAK pool the stages at the final model; SOURCE and TracIn keep them apart."""
    torch.manual_seed(0)
    model, task = models.mlp(), whence.Classification()
    data = {"a": models.vectors(18, seed=2), "b": models.vectors(10, seed=3)}
    legs = [models.train_run(model, task, own, [4, 8], 0.1) for own in data.values()]
    run = whence.Run.from_checkpoints(
        [c for leg in legs for c in leg.checkpoints], [4, 8, 12, 16], 0.1, stages={"a": 8, "b": 16}
    )
    study = whence.Study(model, task, train=data, runs=run)
    flat = Flat(study)
    p = sum(b.size for b in flat.blocks.values())
    store = GradientStore.build(study, tmp_path / "s", p, "eigenbasis", **BUILD)
    final, q = run.final, flat.gradients(run.final, "measurements", QUERY)
    both = [torch.cat([flat.gradients(final, "losses", d) for d in data.values()])]
    C = torch.cat([flat.columns(final, d) for d in data.values()])
    H = C.T @ C / 28 + 0.1 * torch.eye(p).double()
    expected = -(q @ torch.linalg.solve(H, both[0].T)).numpy() / 28
    scores = store.influence(QUERY, 0.1, coupling=False, **QUIET)
    close(scores.values, expected, 1e-8)
    assert list(scores.stage or []) == ["a"] * 18 + ["b"] * 10
    close(
        store.influence(QUERY, 0.1, stage="b", coupling=False, **QUIET).values,
        expected[:, 18:],
        1e-8,
    )
    method = whence.TracIn()
    close(
        store.tracin(QUERY, **QUIET).values,
        method.attribute(study, QUERY, dtype=torch.float64, **QUIET).values,
        1e-8,
    )
    close(
        store.trak(QUERY, 1e-2, **QUIET).values,
        _unprojected_trak(flat, final, data, q, 1e-2),
        1e-8,
    )
    own = store.source(QUERY, "stages", by_segment=True, **PAPER, **QUIET)
    first, second = (_leg(flat, leg, run, name) for leg, name in ((0, "a"), (1, "b")))
    time = torch.full((p,), 0.8, dtype=torch.float64)
    close(own.by_segment[1][:, 18:], joint_source([second[0]], [second[1]], q, [time])[0], 1e-8)
    H2 = torch.stack([c.T @ c / 10 for c in second[0]]).mean(0)
    seen = q @ torch.linalg.matrix_exp(-0.8 * H2)
    close(own.by_segment[0][:, :18], joint_source([first[0]], [first[1]], seen, [time])[0], 1e-8)


def _leg(flat: Flat, leg: int, run: Any, name: str) -> tuple[list[Tensor], list[Tensor]]:
    found, data = run.checkpoints[2 * leg : 2 * leg + 2], flat.study.train[name]
    return [flat.columns(c, data) for c in found], [
        flat.gradients(c, "losses", data) for c in found
    ]


def _unprojected_trak(flat: Flat, final: Any, data: Any, q: Tensor, damping: float) -> Tensor:
    f, L = (
        torch.cat([flat.gradients(final, what, d) for d in data.values()])
        for what in ("measurements", "losses")
    )
    gram = f.T @ f + damping * len(f) * torch.eye(f.shape[1]).double()
    return -q @ torch.linalg.solve(gram, L.T)


def test_a_run_on_half_the_data(it: Case, tmp_path: Path) -> None:
    """Rows of all examples, curvature and 1/N of those that were trained on."""
    half = np.arange(1, 24, 2)
    run = whence.Run.from_checkpoints(
        it.history.checkpoints, STEPS, it.history.rates, momentum=0.5, subset=half
    )
    study = whence.Study(it.model, it.task, train=TRAIN, runs=run)
    store = GradientStore.build(study, tmp_path / "s", it.parameters, "eigenbasis", **BUILD)
    C = it.flat.columns(run.final, TensorDataset(*TRAIN[torch.from_numpy(half)]))
    L = it.flat.gradients(run.final, "losses", TRAIN)
    q = it.flat.gradients(run.final, "measurements", QUERY)
    H = C.T @ C / 12 + 0.1 * torch.eye(it.parameters).double()
    expected = -(q @ torch.linalg.solve(H, L.T)) / 12
    close(store.influence(QUERY, 0.1, coupling=False, **QUIET).values, expected, 1e-8)


# --- fewer dimensions -----------------------------------------------------------------------------


def test_random_inner_products_have_the_error_they_should(tmp_path: Path) -> None:
    """TracIn at one checkpoint: unbiased, with a variance of about (‖v‖²‖g‖² + ⟨v,g⟩²)/d."""
    torch.manual_seed(0)
    model, d = models.mlp((4, 40, 3)).double(), 200
    run = whence.Run.from_checkpoints([model.state_dict()], [1], 1.0)
    study = whence.Study(model, whence.Classification(), train=TRAIN, runs=run)
    flat = Flat(study)
    g = flat.gradients(run.final, "losses", TRAIN)
    v = flat.gradients(run.final, "measurements", QUERY)
    true = -(v @ g.T)
    deviation = ((v.square().sum(1, keepdim=True) * g.square().sum(1) + true.square()) / d).sqrt()
    off = []
    for seed in range(8):
        path = tmp_path / str(seed)
        store = GradientStore.build(
            study, path, d, seed=seed, methods=["tracin"], dtype=torch.float64, **QUIET
        )
        found = torch.from_numpy(store.tracin(QUERY, **QUIET).to_numpy())
        off.append((found - true) / deviation)
    z = torch.stack(off)
    assert 0.4 < float(z.square().mean()) < 1.3
    assert abs(float(z.mean())) < 0.3


@pytest.mark.parametrize("projection", ["random", "eigenbasis"])
def test_more_dimensions_are_nearer(it: Case, tmp_path: Path, projection: str) -> None:
    full = GradientStore.build(it.study, tmp_path / "s", it.parameters, "eigenbasis", **BUILD)
    expected = full.source(QUERY, **QUIET).values
    near = []
    for d in (4, 16, 48):
        store = GradientStore.build(it.study, tmp_path / f"{d}", d, projection, **BUILD)
        found = store.source(QUERY, **QUIET).values
        ranks = [np.argsort(np.argsort(values, axis=1), axis=1) for values in (found, expected)]
        near.append(np.mean([np.corrcoef(*pair)[0, 1] for pair in zip(*ranks, strict=True)]))
    assert near[-1] > (0.95 if projection == "eigenbasis" else 0.5) and near[-1] > near[0]


def test_the_leading_coordinates_are_kept(it: Case, tmp_path: Path) -> None:
    """No other set of as many entries in these bases has a larger second moment."""
    store = GradientStore.build(it.study, tmp_path / "s", 10, "eigenbasis", **BUILD)
    options = ComputeOptions(dtype=torch.float64, progress=False)
    workspace = whence.Source.published().lay_out(it.study, it.study.runs[0], QUERY, options)
    fitted = EKFAC.fit(workspace, workspace.run.checkpoints, fisher="exact").factors
    every = torch.cat([block.eigenvalues.flatten() for block in fitted.values()])
    leading = every.sort(descending=True).values[:10]
    (part,) = store.projection(workspace).parts
    kept = []
    for name, own in part.entries.items():  # type: ignore[union-attr]
        basis = fitted[name].basis
        assert basis is not None
        outputs = [_column(basis.outputs, c) for c in own.basis.outputs.T]
        inputs = [_column(basis.inputs, c) for c in own.basis.inputs.T]
        pairs = zip(own.rows.tolist(), own.columns.tolist(), strict=True)
        kept += [float(fitted[name].eigenvalues[outputs[r], inputs[c]]) for r, c in pairs]
    np.testing.assert_allclose(sorted(kept, reverse=True), leading)


def _column(basis: Tensor, column: Tensor) -> int:
    return int((basis - column.unsqueeze(1)).norm(dim=0).argmin())


@pytest.mark.parametrize("projection", ["random", "eigenbasis"])
def test_on_digits(tmp_path: Path, projection: str) -> None:
    """SOURCE in 256 of 6,000 dimensions still predicts retraining."""
    study, query = judged.study(100), judged.data()[1]
    store = GradientStore.build(study, tmp_path / "s", 256, projection, **QUIET)
    source, influence, tracin = (
        judged.judge(answer(query, **QUIET))
        for answer in (store.source, store.influence, store.tracin)
    )
    assert 0.18 < source < 0.5 and 0.05 < influence < 0.45 and 0.02 < tracin < 0.4
    assert source > tracin


# --- queries --------------------------------------------------------------------------------------


class Counted(TensorDataset):
    """Says when it is read."""

    def __getitem__(self, index: Any) -> Any:
        self.read = getattr(self, "read", 0) + 1
        return super().__getitem__(index)


def test_queries_do_not_touch_the_training_data(it: Case, tmp_path: Path) -> None:
    data = Counted(*TRAIN.tensors)
    study = whence.Study(it.model, it.task, train=data, runs=it.history.run)
    store = GradientStore.build(study, tmp_path / "s", 12, **BUILD)
    first = store.source(QUERY, **QUIET)
    before = data.read
    again = store.source(QUERY, **QUIET)
    for answer in (store.tracin, store.influence, store.trak):
        answer(models.vectors(4, seed=7), **QUIET)
    assert data.read - before <= 4  # only what a query is compared with: how an example is built
    assert (first.values == again.values).all()


def test_opened_again(it: Case, tmp_path: Path) -> None:
    for projection in ("random", "eigenbasis"):
        built = GradientStore.build(it.study, tmp_path / projection, 12, projection, **BUILD)
        opened = GradientStore.open(tmp_path / projection, it.study)
        for answer in ("tracin", "influence", "trak", "source"):
            one, other = (getattr(s, answer)(QUERY, **QUIET) for s in (built, opened))
            assert (one.values == other.values).all()
    assert "eigenbasis, dimension 12, examples {train: 24}" in repr(opened)


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("projection", ["random", "eigenbasis"])
def test_opened_again_it_answers_with_the_same_bits(
    tmp_path: Path, projection: str, joint: bool
) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        train, query = models.vectors(60, seed=seed), models.vectors(13, seed=seed + 9)
        model, task = models.mlp((4, 6, 3)).double(), whence.Classification()
        study = whence.Study(
            model, task, train, models.train_run(model, task, train, STEPS, 0.3).run
        )
        options: Any = {"joint": joint, "dtype": torch.float64, "progress": False}
        built = GradientStore.build(study, tmp_path / f"{seed}", 17, projection, **options)
        opened = GradientStore.open(tmp_path / f"{seed}", study)
        for method in ("tracin", "influence", "trak", "source"):
            answers = [getattr(store, method)(query, **QUIET).values for store in (built, opened)]
            np.testing.assert_array_equal(*answers, err_msg=method)


def test_a_store_that_cannot_be_written_to_answers(
    it: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = GradientStore.build(it.study, tmp_path / "s", 12, **BUILD)
    expected = store.source(QUERY, **QUIET).values

    def refuse(*_: Any) -> None:
        raise PermissionError("read-only")

    shutil.rmtree(tmp_path / "s" / "decompositions")
    opened = GradientStore.open(tmp_path / "s", it.study)
    monkeypatch.setattr(opened._decompositions, "put", refuse)
    with pytest.warns(UserWarning, match="cannot be saved with the store"):
        assert (opened.source(QUERY, **QUIET).values == expected).all()


def test_decompositions_make_room(
    it: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "DECOMPOSITION_BYTES", 3 * 12 * 12 * 8)
    store = GradientStore.build(it.study, tmp_path / "s", 12, **BUILD)
    first = store.influence(QUERY, 0.1, **QUIET).values
    for damping in (0.2, 0.3, 0.4, 0.5):
        store.influence(QUERY, damping, **QUIET)
    assert len(store._in_memory) <= 3
    assert (store.influence(QUERY, 0.1, **QUIET).values == first).all()
    assert not (tmp_path / "s" / "decompositions").exists()  # cheap ones are not kept on disk


def test_many_queries_and_settings(it: Case, tmp_path: Path) -> None:
    store = GradientStore.build(it.study, tmp_path / "s", 12, **BUILD)
    plain = store.source(TRAIN, **QUIET)
    assert plain.settings["projection"] == "random" and plain.settings["segments"] == "auto"
    assert plain.diagnostics["segments"][0]["share_of_score"] > 0
    small = store.source(TRAIN, memory="1MB", batch_size=7, **QUIET)
    close(small.values, plain.values, 1e-9)
    top = store.source(TRAIN, top=3, **QUIET)
    assert top.helpful(5, 3).examples == plain.helpful(5, 3).examples
    out = store.source(TRAIN, out=tmp_path / "scores", **QUIET)
    assert (whence.Scores.load(tmp_path / "scores").values == plain.values).all()
    assert (out.values == plain.values).all()
    for count in (1, 2, 8, 20):
        few = store.source(TensorDataset(*TRAIN[:count]), **QUIET)
        close(few.values, plain.values[:count], 1e-9)


@pytest.mark.parametrize("q", [1, 3, 6, 7, 16, 40])
def test_inner_products(q: int) -> None:
    generator = torch.Generator().manual_seed(q)
    rows = torch.randn(300, 5, generator=generator)
    vectors = torch.randn(q, 5, generator=generator)
    torch.testing.assert_close(inner(rows, vectors), vectors @ rows.T)


@pytest.mark.parametrize("form", ["full", "float16", "int8"])
def test_rows_are_read_ahead(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any order, with the same products; damage is reported where the rows are used."""
    monkeypatch.setattr("whence.persist.arrays.LARGE", 0)
    monkeypatch.setattr("whence.persist.arrays.BLOCK", 2**12)
    values = torch.randn(900, 40, generator=torch.Generator().manual_seed(0))
    dtype = FORMS[form] or np.dtype(np.float32)
    about = {"shape": [900, columns(form, 40)], "dtype": str(dtype)}
    rows = Rows(tmp_path / "rows.npy", about, None, None, form)
    rows.write(values)
    entry = rows.entry
    rows.flush()
    rows.finish()
    vectors = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    for starts in (range(0, 900, 100), range(0, 900, 300), [800, 0, 500]):
        stored = StoredRows(tmp_path / "rows.npy", entry, form)
        for start in starts:
            here = slice(start, start + 100)
            close(stored.inner(here, vectors), vectors @ stored[here].T, 1e-5)
    content = bytearray((tmp_path / "rows.npy").read_bytes())
    content[-50] ^= 1
    (tmp_path / "rows.npy").write_bytes(content)
    stored = StoredRows(tmp_path / "rows.npy", entry, form)
    for start in range(0, 700, 100):
        stored.inner(slice(start, start + 100), vectors)
    with pytest.raises(DamagedFile, match="has another checksum"):
        stored.inner(slice(800, 900), vectors)


@pytest.mark.parametrize("method", ["source", "influence", "tracin", "trak"])
def test_an_index_finds_the_strongest(
    it: Case, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("faiss")
    store = GradientStore.build(it.study, tmp_path / "s", 12, **BUILD)
    exact = getattr(store, method)(QUERY, top=4, **QUIET)
    found = getattr(store, method)(QUERY, top=4, index="faiss", **QUIET)
    np.testing.assert_array_equal(found.strongest.columns, exact.strongest.columns)
    close(found.strongest.values, exact.strongest.values, 1e-10)
    assert found.settings["index"] == "faiss"
    monkeypatch.setattr("whence.store.index.built", lambda *_: 1 / 0)  # it is in the store
    again = getattr(GradientStore.open(tmp_path / "s", it.study), method)
    found = again(QUERY, top=4, index="faiss", out=tmp_path / "scores", **QUIET)
    np.testing.assert_array_equal(found.strongest.columns, exact.strongest.columns)


def test_an_index_of_many_rows(tmp_path: Path) -> None:
    """In cells: most of the strongest are found."""
    pytest.importorskip("faiss")
    draw = torch.Generator().manual_seed(0)
    middles = torch.randn(40, 16, generator=draw)
    matrices = []
    for name in "ab":
        values = middles.repeat(500, 1) + 0.3 * torch.randn(20_000, 16, generator=draw)
        about = {"shape": [20_000, 16], "dtype": "float32"}
        rows = Rows(tmp_path / f"{name}.npy", about, None, None)
        rows.write(values)
        entry = rows.entry
        rows.finish()
        matrices.append(StoredRows(tmp_path / f"{name}.npy", entry))
    index = store_index.opened(store_index.built(matrices))
    vectors = torch.randn(5, 32, generator=draw)
    whole = torch.cat([matrix[:] for matrix in matrices], 1)
    found = {*store_index.candidates(index, vectors.numpy(), 20).tolist()}
    scores = vectors @ whole.T
    strongest = {*scores.topk(20).indices.flatten().tolist()}
    strongest |= {*scores.topk(20, largest=False).indices.flatten().tolist()}
    assert len(strongest & found) >= 0.9 * len(strongest) and len(found) < 1000


def test_an_index_that_cannot_be(it: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = GradientStore.build(it.study, tmp_path / "s", 12, **BUILD)
    with pytest.raises(ValueError, match="index='annoy'"):
        store.source(QUERY, top=3, index="annoy", **QUIET)
    with pytest.raises(ValueError, match="finds the strongest examples only: give top="):
        store.source(QUERY, index="faiss", **QUIET)
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(
        ImportError, match=r"index='faiss' needs FAISS: pip install 'whence-tda\[faiss"
    ):
        store.source(QUERY, top=3, index="faiss", **QUIET)


def test_an_ensemble_of_stores(it: Case, tmp_path: Path) -> None:
    stores = [GradientStore.build(it.study, tmp_path / f"{k}", 12, seed=k, **BUILD) for k in (0, 1)]
    each = [store.source(QUERY, **QUIET) for store in stores]
    close(ensemble(each).values, (each[0].values + each[1].values) / 2, 1e-8)


def test_float32(it: Case, tmp_path: Path) -> None:
    exact, single = (
        GradientStore.build(it.study, tmp_path / str(k), 40, "eigenbasis", **options)
        for k, options in enumerate((BUILD, BUILD | {"dtype": torch.float32}))
    )
    assert single.rows("train", it.study.runs[0].final)[:].dtype == torch.float32
    close(single.source(QUERY, **QUIET).values, exact.source(QUERY, **QUIET).values, 1e-3)


FULL = {"float16": (1e-3, 2), "int8": (0.02, 1)}  # error of a row, and bytes of an entry


@pytest.mark.parametrize("form", FULL)
def test_smaller_rows(it: Case, tmp_path: Path, form: str) -> None:
    tolerance, size = FULL[form]
    full = GradientStore.build(it.study, tmp_path / "full", 40, **BUILD)
    small = GradientStore.build(it.study, tmp_path / form, 40, rows=form, **BUILD)
    for checkpoint in it.study.runs[0].checkpoints:
        exact, stored = (s.rows("train", checkpoint)[:] for s in (full, small))
        largest = exact.abs().amax(1, keepdim=True)
        steps = {"float16": 2.0**-11, "int8": 1 / 254}[form]  # half a step of the largest entry
        assert bool(((stored - exact).abs() <= 1.001 * steps * largest).all())
        assert not torch.equal(stored.to(exact), exact)
    file = tmp_path / form / "gradients" / "0-00000014.npy"
    assert np.load(file).nbytes == 24 * (40 * size + 4)
    for answer in ("tracin", "influence", "source"):
        one, other = (getattr(s, answer)(QUERY, **QUIET).values for s in (small, full))
        assert np.corrcoef(one.ravel(), other.ravel())[0, 1] > 0.99
    one, other = (s.tracin(QUERY, **QUIET).values for s in (small, full))
    assert abs(one - other).max() < 3 * tolerance * abs(other).max()
    again = GradientStore.open(tmp_path / form, it.study)
    assert (again.source(QUERY, **QUIET).values == small.source(QUERY, **QUIET).values).all()
    with pytest.raises(ValueError, match=f"rows='{form}', not 'full'"):
        GradientStore.build(it.study, tmp_path / form, 40, **BUILD)
    with pytest.raises(ValueError, match=f"rows='full', not '{form}'"):
        GradientStore.build(it.study, tmp_path / "full", 40, rows=form, **BUILD)


@pytest.mark.parametrize("form", FULL)
@pytest.mark.parametrize("dimension", [12, 13, 14, 15])
def test_smaller_rows_of_any_width(it: Case, tmp_path: Path, dimension: int, form: str) -> None:
    """Also where a row does not begin at a multiple of the size of its scale."""
    store = GradientStore.build(it.study, tmp_path / "s", dimension, rows=form, **BUILD)
    rows = store.rows("train", it.study.runs[0].final)
    assert torch.equal(rows[:1], rows[:][:1])
    assert store.source(QUERY, **QUIET).values.shape == (3, 24)


def test_smaller_rows_that_grow_are_those_of_one_build(it: Case, tmp_path: Path) -> None:
    first = TensorDataset(*TRAIN[:15])
    part = whence.Study(it.model, it.task, train=first, runs=it.history.run)
    for study in (part, it.study):
        GradientStore.build(study, tmp_path / "grown", 12, rows="int8", **BUILD)
    GradientStore.build(it.study, tmp_path / "once", 12, rows="int8", **BUILD)
    grown, once = (tmp_path / name / "gradients/0-00000014.npy" for name in ("grown", "once"))
    assert grown.read_bytes() == once.read_bytes()


def test_rows_of_zeros_and_of_extreme_sizes() -> None:
    values = np.array([[0.0, 0.0, 0.0], [1e-30, -5e-31, 0.0], [1e30, 2e29, -1e30]], np.float32)
    for form in FULL:
        stored = encoded(values, form)
        width = values.shape[1]
        scales = np.ascontiguousarray(stored[:, width:]).view(np.float32)
        np.testing.assert_allclose(stored[:, :width] * scales, values, rtol=0.02)


# --- killed, grown --------------------------------------------------------------------------------


class Interrupted(BaseException):
    pass


@pytest.fixture
def notes_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whence.persist.files.Throttle, "due", lambda _: True)
    monkeypatch.setattr("whence.projections.random.PREFERRED_BATCH", {"cpu": 8, "cuda": 8})


def bytes_of(path: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in sorted((path / "gradients").iterdir())}


@pytest.mark.parametrize("at", [1, 3, 8, 17, 23])
def test_killed_anywhere_it_resumes(
    it: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notes_everything: None, at: int
) -> None:
    options = BUILD | {"fisher": "sampled", "batch_size": 8}
    whole = GradientStore.build(it.study, tmp_path / "whole", 12, **options)
    true, seen = Passes._batch, []

    def counted(self: Any, data: Any, indices: Any, batch: Any, signal: Any, *rest: Any) -> Any:
        seen.append((self.step, signal.name, int(indices[0])))
        if len(seen) == at + 1:
            raise Interrupted
        return true(self, data, indices, batch, signal, *rest)

    monkeypatch.setattr(Passes, "_batch", counted)
    with pytest.raises(Interrupted):
        GradientStore.build(it.study, tmp_path / "cut", 12, **options)
    with pytest.raises(ValueError, match=r"is not finished: make the same GradientStore\.build"):
        GradientStore.open(tmp_path / "cut", it.study)
    done = seen[:at]
    store = GradientStore.build(it.study, tmp_path / "cut", 12, **options)
    again = [one for one in seen[at + 1 :] if one in done]
    assert len(again) <= 2  # the projection is tried again; at most one batch is done twice
    assert bytes_of(tmp_path / "cut") == bytes_of(tmp_path / "whole")
    for answer in ("source", "trak"):
        one, other = (getattr(s, answer)(QUERY, **QUIET).values for s in (store, whole))
        assert (one == other).all()


@pytest.mark.parametrize("fisher", ["sampled", "empirical"])
@pytest.mark.parametrize("projection", ["random", "eigenbasis"])
def test_data_that_has_grown(
    it: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, projection: str, fisher: str
) -> None:
    options = BUILD | {"fisher": fisher}
    first = TensorDataset(*TRAIN[:15])
    small, large = (
        whence.Study(it.model, it.task, train=data, runs=it.history.run) for data in (first, TRAIN)
    )
    GradientStore.build(small, tmp_path / "s", 12, projection, **options).source(QUERY, **QUIET)
    assert any((tmp_path / "s" / "decompositions").iterdir())
    with pytest.raises(ValueError, match=r"is of 15 examples, and train has 24: .*build adds"):
        GradientStore.open(tmp_path / "s", large)
    true, seen = Passes._batch, []

    def counted(self: Any, data: Any, indices: Any, batch: Any, signal: Any, *rest: Any) -> Any:
        if len(indices) > 8:  # more than the probe's
            seen.extend(indices.tolist())
        return true(self, data, indices, batch, signal, *rest)

    monkeypatch.setattr(Passes, "_batch", counted)
    store = GradientStore.build(large, tmp_path / "s", 12, projection, **options)
    assert set(seen) == set(range(15, 24))
    assert not (tmp_path / "s" / "decompositions").exists()
    monkeypatch.setattr(Passes, "_batch", true)
    if projection == "random":  # the eigenbasis stays that of the first examples
        fresh = GradientStore.build(large, tmp_path / "fresh", 12, projection, **options)
        for answer in ("tracin", "influence", "trak", "source"):
            one, other = (getattr(s, answer)(QUERY, **QUIET).values for s in (store, fresh))
            close(one, other, 1e-9)
    assert store.source(QUERY, **QUIET).values.shape == (3, 24)
    assert GradientStore.open(tmp_path / "s", large).tracin(QUERY, **QUIET).shape == (3, 24)


def test_more_methods_later(it: Case, tmp_path: Path) -> None:
    store = GradientStore.build(it.study, tmp_path / "s", 12, methods=["influence"], **BUILD)
    files = [f.name for f in (tmp_path / "s" / "gradients").iterdir()]
    assert files == ["0-00000014.npy"]
    with pytest.raises(ValueError, match="built for influence, not for source: build it again"):
        store.source(QUERY, **QUIET)
    store = GradientStore.build(it.study, tmp_path / "s", 12, methods=["source"], **BUILD)
    whole = GradientStore.build(it.study, tmp_path / "t", 12, **BUILD)
    for answer in ("influence", "source"):
        one, other = (getattr(s, answer)(QUERY, **QUIET).values for s in (store, whole))
        close(one, other, 1e-12)
    with pytest.raises(ValueError, match="not for trak"):
        store.trak(QUERY, **QUIET)


# --- refused --------------------------------------------------------------------------------------


def changed(it: Case, **changes: Any) -> whence.Study:
    given = {"task": it.task, "train": TRAIN, "runs": it.history.run}
    return whence.Study(changes.pop("model", it.model), **(given | changes))


def other_weights(it: Case) -> whence.Study:
    moved = copy.deepcopy(it.history.checkpoints)
    moved[-1]["0.weight"] = moved[-1]["0.weight"] + 1e-3
    run = whence.Run.from_checkpoints(moved, STEPS, it.history.rates, momentum=0.5)
    return changed(it, runs=run)


def other_data(it: Case) -> whence.Study:
    x, y = (t.clone() for t in TRAIN.tensors)
    x[7, 0] += 1e-3
    return changed(it, train=TensorDataset(x, y))


class Doubled(whence.Classification):
    def losses(self, outputs: Tensor, batch: Any) -> Tensor:
        return 2 * super().losses(outputs, batch)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (other_weights, "built with other weights or rates of the run"),
        (other_data, "other data: the first 24 examples of train are not its own"),
        (lambda it: changed(it, train=TensorDataset(*TRAIN[:20])), "was built from other data"),
        (lambda it: changed(it, layers=["0", "2"]), "built with other layers"),
        (lambda it: changed(it, task=Doubled()), "built with another task"),
    ],
)
def test_another_study(it: Case, tmp_path: Path, make: Any, message: str) -> None:
    GradientStore.build(it.study, tmp_path / "s", 12, **BUILD)
    for again in (
        lambda: GradientStore.open(tmp_path / "s", make(it)),
        lambda: GradientStore.build(make(it), tmp_path / "s", 12, **BUILD),
    ):
        with pytest.raises(ValueError, match=message):
            again()


def test_a_store_without_its_losses_says_so(it: Case, tmp_path: Path) -> None:
    """Also with every answer, and when it is completed. Put back, they are compared again."""
    GradientStore.build(it.study, tmp_path / "s", 12, **{**BUILD, "methods": ["influence"]})
    (file,) = (tmp_path / "s" / "losses").iterdir()
    file.rename(tmp_path / file.name)
    with pytest.warns(UserWarning, match=f"{file.name} is missing") as caught:
        store = GradientStore.open(tmp_path / "s", it.study)
    assert len(caught) == 1
    with pytest.warns(UserWarning, match="is missing"):
        assert any("is missing" in m for m in store.influence(QUERY, **QUIET).warnings)
    (tmp_path / file.name).rename(file)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GradientStore.open(tmp_path / "s", it.study)
    file.unlink()
    with pytest.warns(UserWarning, match=f"{file.name} is missing"):
        GradientStore.build(it.study, tmp_path / "s", 12, **BUILD)


def test_a_changed_loss_is_noticed(it: Case, tmp_path: Path) -> None:
    """A row is made again before the first answer: whatever changed, it shows there."""
    store = GradientStore.build(it.study, tmp_path / "s", 12, **BUILD)
    store.study = changed(it, task=Doubled())
    with pytest.raises(ValueError, match="does not belong to this study: example 0 of train"):
        store.tracin(QUERY, **QUIET)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dimension": 13}, "built with dimension=12, not 13"),
        ({"seed": 1}, "seed=0, not 1"),
        ({"fisher": "sampled"}, "fisher='exact', not 'sampled'"),
        (
            {"joint": False, "projection": "eigenbasis"},
            "projection='random', not 'eigenbasis'; joint=True, not False",
        ),
        ({"dtype": torch.float32}, "dtype='float64', not 'float32'"),
        ({"projection": "hash"}, "projection='hash' is not known: use one of 'random'"),
        ({"methods": ["hydra"]}, "methods='hydra' is not known"),
        ({"methods": []}, "methods is empty"),
        ({"fisher": "true"}, "fisher='true' is not known"),
        ({"rows": "int4"}, "rows='int4' is not known: use one of 'full', 'float16', 'int8'"),
        ({"dimension": 65}, "dimension=65, but only 64 parameters are tracked"),
    ],
)
def test_other_settings(it: Case, tmp_path: Path, options: Any, message: str) -> None:
    GradientStore.build(it.study, tmp_path / "s", 12, **BUILD)
    with pytest.raises(ValueError, match=message):
        GradientStore.build(it.study, tmp_path / "s", **({"dimension": 12} | BUILD | options))


def cut_off(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def emptied(path: Path) -> None:
    np.save(path, np.zeros((24, 5)))


def shortened(path: Path) -> None:
    np.save(path, np.load(path)[:20])


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (cut_off, ValueError, r"is damaged \(truncated"),
        (emptied, ValueError, "belongs to another store"),
        (shortened, ValueError, "has 20 rows, but the store has 24 examples"),
        (Path.unlink, FileNotFoundError, "is missing, so the store is incomplete"),
    ],
)
def test_damaged_rows(it: Case, tmp_path: Path, damage: Any, error: Any, message: str) -> None:
    GradientStore.build(it.study, tmp_path / "s", 12, **BUILD)
    damage(tmp_path / "s" / "gradients" / "0-00000006.npy")
    with pytest.raises(error, match=message):
        GradientStore.open(tmp_path / "s", it.study)


def test_missing_second_moments(it: Case, tmp_path: Path) -> None:
    GradientStore.build(it.study, tmp_path / "s", 12, **BUILD)
    for file in (tmp_path / "s" / "factors").iterdir():
        file.unlink()
    with pytest.raises(FileNotFoundError, match=r"is incomplete: second moments .* are missing"):
        GradientStore.open(tmp_path / "s", it.study).source(QUERY, **QUIET)


def test_rows_that_are_not_numbers_are_named(it: Case, tmp_path: Path) -> None:
    GradientStore.build(it.study, tmp_path / "s", 12, **BUILD)
    path = tmp_path / "s" / "gradients" / "0-00000006.npy"
    rows = np.load(path)
    rows[17, 3] = np.nan
    np.save(path, rows)
    with pytest.raises(DamagedFile, match=r"0-00000006.npy is damaged \(altered"):
        GradientStore.open(tmp_path / "s", it.study)
    edit_json(tmp_path / "s" / "store.json", rows={})  # a store from before there were checksums
    store = GradientStore.open(tmp_path / "s", it.study)
    with pytest.raises(ValueError, match="of train example 17 at step 6 are NaN or infinite"):
        store.tracin(QUERY, **QUIET)


@pytest.mark.filterwarnings("ignore:.*no checksum")
def test_methods_and_warnings_that_are_no_names_are_refused(it: Case, tmp_path: Path) -> None:
    GradientStore.build(it.study, tmp_path / "s", 12, **BUILD)
    for wrong in ({"methods": [["trak"]]}, {"methods": [None]}, {"warnings": [{}]}):
        edit_json(tmp_path / "s" / "store.json", **({"methods": ["trak"], "warnings": []} | wrong))
        with pytest.raises(DamagedFile, match=r"store\.json is damaged"):
            GradientStore.open(tmp_path / "s", it.study)
        with pytest.raises(DamagedFile, match=r"store\.json is damaged"):
            GradientStore.build(it.study, tmp_path / "s", 12, **BUILD)


def test_an_example_that_is_not_a_number_is_named(it: Case, tmp_path: Path) -> None:
    x, y = (t.clone() for t in TRAIN.tensors)
    x[9] = float("nan")
    with pytest.raises(FloatingPointError, match="NaN or infinite for train example 9"):
        GradientStore.build(changed(it, train=TensorDataset(x, y)), tmp_path / "s", 12, **BUILD)


def test_no_store(it: Case, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist"):
        GradientStore.open(tmp_path / "none", it.study)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(FileNotFoundError, match=r"has no store\.json"):
        GradientStore.open(tmp_path / "other", it.study)
    with pytest.raises(ValueError, match="is not empty and is not a store"):
        GradientStore.build(it.study, tmp_path / "other", 12, **BUILD)
    for text, message in (
        ("{", "is damaged"),
        (json.dumps({"schema": 99}), "has schema 99"),
        (json.dumps({"schema": 2}), r"is incomplete \(complete, data"),
    ):
        (tmp_path / "other" / "store.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            GradientStore.open(tmp_path / "other", it.study)


def test_what_a_store_cannot_do(it: Case, tmp_path: Path) -> None:
    two = whence.Study(it.model, it.task, train=TRAIN, runs=[it.history.run, it.history.run])
    with pytest.raises(ValueError, match=r"one run, and the study has 2.*whence\.scores\.ensemble"):
        GradientStore.build(two, tmp_path / "s", 12, **BUILD)
    store = GradientStore.build(it.study, tmp_path / "s", 12, **BUILD)
    with pytest.raises(ValueError, match="a store answers queries: for self-influence use"):
        store.source(None, **QUIET)
    with pytest.raises(ValueError, match="stage='tune' is not in the run"):
        store.source(QUERY, stage="tune", **QUIET)
    with pytest.raises(ValueError, match=r"damping=0\.0 must be positive, or 'source'"):
        store.influence(QUERY, 0.0, **QUIET)
    with pytest.raises(ValueError, match=r"damping=-1\.0 must be zero or positive"):
        store.trak(QUERY, -1.0, **QUIET)
    with pytest.raises(ValueError, match="segments=5, but the run has only 4"):
        store.source(QUERY, segments=5, **QUIET)
    wide = GradientStore.build(it.study, tmp_path / "w", 50, "eigenbasis", **BUILD)
    with pytest.raises(ValueError, match="dimension=50, but there are only 24 training examples"):
        wide.trak(QUERY, **QUIET)


def adam(it: Case, seed: int = 0) -> Any:
    """The run, with second moments, as Adam's."""
    random = torch.Generator().manual_seed(seed)
    moments = [
        {name: torch.rand(x.shape, generator=random).double() for name, x in weights.items()}
        for weights in it.history.checkpoints
    ]
    about: Any = {"optimizer": "adam", "second_moments": moments, "epsilon": 1e-8}
    return whence.Run.from_checkpoints(it.history.checkpoints, STEPS, 2**-5, **about), moments


def projection_matrix(store: GradientStore, flat: Flat) -> Tensor:
    """P, (d, p), without a preconditioner."""
    options = ComputeOptions(dtype=torch.float64, progress=False)
    projection = store.projection(store._workspace(options))
    every, matrix = torch.eye(store.dimension, dtype=torch.float64), {}
    for part, where in zip(projection.parts, projection.columns, strict=True):
        assert isinstance(part, Random)
        matrix |= part.lift(every[:, where])
    return torch.cat([matrix[name].flatten(1) for name in flat.blocks], 1)


@pytest.mark.parametrize("projection", ["random", "two-sided"])
@pytest.mark.parametrize("segments", [1, 2])
def test_source_of_adam(it: Case, tmp_path: Path, projection: str, segments: int) -> None:
    """Against whole matrices of preconditioned, projected gradients."""
    run, moments = adam(it)
    study = changed(it, runs=run)
    build = {**BUILD, "methods": ["source"]}
    store = GradientStore.build(study, tmp_path / "s", 40, projection, **build)
    flat = Flat(study)
    assert store.dimension == 40 if projection == "random" else 27 <= store.dimension <= 40
    P, found = projection_matrix(store, flat), study.runs[0].checkpoints
    mean = torch.stack([roots(flat, v) for v in moments]).mean(0)
    scale = mean.sqrt() * P
    columns = [flat.columns(c, it.train) @ scale.T for c in found]
    rows = [flat.gradients(c, "losses", it.train) @ scale.T for c in found]
    q = flat.gradients(found[-1], "measurements", it.query) @ scale.T
    cuts = {1: [slice(0, 4)], 2: [slice(0, 2), slice(2, 4)]}[segments]
    updates = {1: [14], 2: [6, 8]}[segments]
    times = [torch.full((store.dimension,), 2**-5 * k).double() for k in updates]
    expected = joint_source([columns[c] for c in cuts], [rows[c] for c in cuts], q, times)
    scores = store.source(it.query, segments=segments, by_segment=True, **PAPER, **QUIET)
    close(scores.by_segment, expected, 1e-8)
    again = GradientStore.open(tmp_path / "s", study)
    np.testing.assert_array_equal(
        again.source(it.query, segments=segments, **PAPER, **QUIET).values, scores.values
    )
    with pytest.raises(ValueError, match=r"not for tracin: .* preconditioned, so build another"):
        store.tracin(it.query, **QUIET)
    with pytest.raises(ValueError, match="preconditioned=True, not False"):
        GradientStore.build(study, tmp_path / "s", 40, projection, **BUILD)


def roots(flat: Flat, moments: Any) -> Tensor:
    """1/(√v + ε) of every number, with Source's floor, in the order of `Flat`."""
    inverses = {}
    for name, v in moments.items():
        least = 0.1 * float(v.mean().sqrt())
        inverses[name] = 1 / (v.sqrt().clamp_min(least) + 1e-8)
    parts = []
    for layer in flat.sites:
        weight, bias = (inverses[f"{layer.name}.{key}"] for key in ("weight", "bias"))
        parts.append(torch.cat([weight, bias[:, None]], 1).flatten())
    return torch.cat(parts)


def test_adam(it: Case, tmp_path: Path) -> None:
    run = whence.Run.from_checkpoints(it.history.checkpoints, STEPS, 1e-3, optimizer="adam")
    whence.errors._shown.clear()
    with pytest.warns(UserWarning, match=r"SOURCE cannot answer from it.*methods=\['source'\]"):
        store = GradientStore.build(changed(it, runs=run), tmp_path / "s", 12, **BUILD)
    with pytest.raises(ValueError, match=r"the store has plain gradients.*methods=\['source'\]"):
        store.source(QUERY, **QUIET)
    with pytest.raises(ValueError, match="the store has plain gradients"):
        store.influence(QUERY, **QUIET)
    assert np.isfinite(store.influence(QUERY, 1e-2, **QUIET).values).all()
    with pytest.raises(ValueError, match=r"no second moments"):
        GradientStore.build(
            changed(it, runs=run), tmp_path / "none", 12, **BUILD, methods=["source"]
        )
    with pytest.raises(ValueError, match="'eigenbasis' is of plain gradients"):
        GradientStore.build(
            changed(it, runs=run), tmp_path / "e", 12, "eigenbasis", **BUILD, methods=["source"]
        )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("joint", [True, False])
def test_two_sided(name: str, joint: bool, tmp_path: Path) -> None:
    """Every method, against whole matrices of gradients that Kronecker products project."""
    it = case(name)
    store = GradientStore.build(it.study, tmp_path / "s", 30, "two-sided", joint=joint, **BUILD)
    P, found = projection_matrix(store, it.flat), it.study.runs[0].checkpoints
    rows = [it.flat.gradients(c, "losses", it.train) @ P.T for c in found]
    q = it.flat.gradients(found[-1], "measurements", it.query) @ P.T
    columns = it.flat.columns(found[-1], it.train) @ P.T
    H = columns.T @ columns / len(rows[0]) + 0.1 * torch.eye(store.dimension).double()
    if not joint:
        blocks = projection_blocks(store)
        H = torch.where(blocks[:, None] == blocks[None, :], H, 0.0)
    expected = -(q @ torch.linalg.solve(H, rows[-1].T)) / len(rows[0])
    close(store.influence(it.query, 0.1, coupling=False, **QUIET).values, expected, 1e-8)


def projection_blocks(store: GradientStore) -> Tensor:
    """Which part of the projection each coordinate belongs to."""
    options = ComputeOptions(dtype=torch.float64, progress=False)
    parts = store.projection(store._workspace(options)).columns
    return torch.cat([torch.full((c.stop - c.start,), k) for k, c in enumerate(parts)])


def test_a_full_disk(it: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(building.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(OSError, match=r"the store needs .* GiB in .*, where 0\.0 GiB are free"):
        GradientStore.build(it.study, tmp_path / "s", 12, **BUILD)


@pytest.mark.parametrize("option", ["examples", "by_layer", "query_rank", "dtype"])
def test_options_that_a_store_does_not_have(it: Case, tmp_path: Path, option: str) -> None:
    store = GradientStore.build(it.study, tmp_path / "s", 12, methods=["tracin"], **BUILD)
    with pytest.raises(whence.WhenceError, match=f"^{option} is not an option of a store"):
        store.tracin(QUERY, **{option: None}, **QUIET)  # type: ignore[misc]


def test_the_model_is_left_alone(it: Case, tmp_path: Path) -> None:
    model = it.model.train()
    before = copy.deepcopy(model.state_dict())
    GradientStore.build(it.study, tmp_path / "s", 12, **BUILD).source(QUERY, **QUIET)
    assert model.training and all((before[k] == v).all() for k, v in model.state_dict().items())
    assert not any(p.grad is not None for p in model.parameters())
    model.eval()


# --- on a GPU: run by hand, with pytest -m gpu ---------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize("projection", ["random", "eigenbasis"])
def test_built_and_asked_anywhere(it: Case, tmp_path: Path, projection: str) -> None:
    """Made on one device, asked on the other: the same scores."""
    here = GradientStore.build(it.study, tmp_path / "cpu", 12, projection, **BUILD)
    there = GradientStore.build(it.study, tmp_path / "gpu", 12, projection, device="cuda", **BUILD)
    for answer in ("tracin", "influence", "trak", "source"):
        expected = getattr(here, answer)(QUERY, **QUIET).values
        tolerance = 1e-7
        if projection == "random":  # an eigenbasis is known up to signs that each device chooses
            close(getattr(here, answer)(QUERY, device="cuda", **QUIET).values, expected, tolerance)
        close(getattr(there, answer)(QUERY, device="cuda", **QUIET).values, expected, tolerance)
        close(getattr(there, answer)(QUERY, device="cpu", **QUIET).values, expected, tolerance)
