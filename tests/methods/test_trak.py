"""TRAK: its projection, its formula by brute force, and the authors' own library."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import dense, judged, models
from support.comparing import close
from support.flat import Flat
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import whence
import whence.persist.files
from whence.engine.loss_weights import loss_by_measurement
from whence.engine.projected_space import random_projection
from whence.engine.workspace import ComputeOptions
from whence.layers.kind import ParameterBlock
from whence.layers.passes import Passes
from whence.methods.trak import Trak
from whence.projections import Gradients, Projection, Random, TwoSided
from whence.projections import random as signs
from whence.projections.projection import check
from whence.projections.random import shares
from whence.projections.two_sided import square_ranks

EXACT: Any = {"dtype": torch.float64, "progress": False}
CPU = torch.device("cpu")


# --- the projection -----------------------------------------------------------------------------

BLOCKS = [
    ParameterBlock("a", 7, 5, True, "a.weight"),
    ParameterBlock("b", 3, 11, False, "b.weight"),
]


def random(d: int = 70, key: int = 1, dtype: torch.dtype = torch.float64, blocks: Any = BLOCKS):
    return Random(blocks, d, key, CPU, dtype)


def matrix(part: Random) -> Tensor:
    """P as a whole, (d, p), by lifting unit vectors."""
    rows = part.lift(torch.eye(part.dimension, dtype=torch.float64))
    return torch.cat([rows[block.name].flatten(1) for block in part.blocks], 1)


def held(n: int, t: int, dtype: torch.dtype = torch.float64) -> tuple[dict[str, Gradients], Tensor]:
    """Gradients of n examples at t positions, as the library holds them and as one matrix."""
    generator = torch.Generator().manual_seed(t)
    actual, whole = {}, []
    for block in BLOCKS:
        a = torch.randn(n, t, block.i, generator=generator, dtype=dtype)
        s = torch.randn(n, t, block.o, generator=generator, dtype=dtype)
        gradient = torch.einsum("nto,nti->noi", s, a)
        if block.bias:
            gradient = torch.cat([gradient, s.sum(1).unsqueeze(2)], 2)
        actual[block.name] = Gradients(block, [(a[:2], s[:2]), (gradient[2:], None)])
        whole.append(gradient.flatten(1))
    return actual, torch.cat(whole, 1)


@pytest.mark.parametrize("t", [1, 4])
@pytest.mark.parametrize("limit", [1 << 22, 200])
def test_projection_is_the_matrix_that_lifting_shows(
    monkeypatch: pytest.MonkeyPatch, t: int, limit: int
) -> None:
    """Also when it is made in many small blocks, none of which ends where a row does."""
    P = matrix(random())
    monkeypatch.setattr(signs, "LARGE", {"cpu": limit, "cuda": limit})
    gradients, whole = held(5, t)
    close(random().project(gradients), whole @ P.T, 1e-12)
    close(matrix(random()), P, 0.0)


def test_the_signs_are_random() -> None:
    """Balanced, uncorrelated along rows and columns, other for every seed and layer."""
    block = ParameterBlock("a", 60, 50, False, "a.weight")
    d, p = 640, block.size
    R = matrix(random(d, blocks=[block])) * d**0.5
    assert set(R.unique().tolist()) == {-1.0, 1.0}
    for other in (
        matrix(random(d, 2, blocks=[block])) * d**0.5,
        matrix(random(d, blocks=[ParameterBlock("b", 60, 50, False, "b.weight")])) * d**0.5,
    ):
        assert abs(float((R * other).mean())) < 5 / (d * p) ** 0.5
    assert abs(float(R.mean())) < 5 / (d * p) ** 0.5
    for gram, count in ((R @ R.T / p, p), (R.T @ R / d, d)):
        off = gram - torch.eye(len(gram))
        assert float(off.square().mean()) == pytest.approx(1 / count, rel=0.05)
        assert float(off.abs().max()) < 7 / count**0.5


def test_a_smaller_dimension_is_the_first_part_of_a_larger_one() -> None:
    few, many = matrix(random(10)), matrix(random(70))
    close(few * 10**0.5, many[:10] * 70**0.5, 1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_precision_has_the_same_signs(dtype: torch.dtype) -> None:
    gradients, whole = held(5, 1)
    for one in gradients.values():
        one.pieces = [(a.to(dtype), None if s is None else s.to(dtype)) for a, s in one.pieces]
    actual = random(dtype=dtype).project(gradients)
    assert actual.dtype == torch.float32
    close(actual.double(), whole @ matrix(random()).T, 5e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_gpu_makes_the_same_signs(dtype: torch.dtype) -> None:
    some = torch.arange(256, dtype=torch.uint8).repeat(3)
    looked_up = signs.looked_up(some, dtype).clone()  # before its memory is used again
    assert looked_up.unique().tolist() == [-1, 1] and looked_up[5].tolist()[:4] == [1, -1, 1, -1]
    assert torch.equal(signs.compared(some, dtype), looked_up)


def test_lengths_are_kept() -> None:
    gradients, whole = held(6, 2)
    check(Projection([random(4000)]), gradients)
    ratio = random(4000).project(gradients).square().sum(1) / whole.square().sum(1)
    assert ((ratio - 1).abs() < 0.15).all()


@pytest.mark.parametrize("wrong", [0.0, 3.0])
def test_a_projection_that_does_not_work_is_noticed(
    monkeypatch: pytest.MonkeyPatch, wrong: float
) -> None:
    table = signs.byte_signs(CPU, torch.float64)
    monkeypatch.setattr(signs, "byte_signs", lambda *_: table * wrong)
    with pytest.raises(RuntimeError, match=r"does not work on cpu.*layer [024] "):
        Trak(16).attribute(case("mlp").study, QUERY, **EXACT)


def test_a_projection_that_leaves_a_layer_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    true = Random._signs

    def without(self: Random, block: ParameterBlock, parameters: range) -> Any:
        for here, actual in true(self, block, parameters):
            yield here, actual * (block.name != "2")

    monkeypatch.setattr(Random, "_signs", without)
    with pytest.raises(RuntimeError, match="layer 2"):
        Trak(16).attribute(case("mlp").study, QUERY, **EXACT)


def test_shares_of_layers() -> None:
    sizes = [1000, 30, 1000, 8]
    blocks = [ParameterBlock(str(k), size, 1, False, "w") for k, size in enumerate(sizes)]
    assert shares(blocks, 119) == [50, 15, 50, 4]
    assert shares(blocks, 8) == [2, 2, 2, 2]
    assert shares(blocks, 1019) == [500, 15, 500, 4]
    for dimension in (3, 1020):
        with pytest.raises(ValueError, match=f"dimension={dimension} cannot be shared out among 4"):
            shares(blocks, dimension)


# --- one run, by brute force --------------------------------------------------------------------


class Case:
    def __init__(self, model: nn.Module, task: Any, train: Any, query: Any) -> None:
        self.model, self.task, self.train, self.query = model, task, train, query
        self.history = models.train_run(model, task, train, [4, 8], 0.1, batch_size=8)
        self.study = whence.Study(model, task, train=train, runs=self.history.run)
        self.flat = Flat(self.study)


def regressed(outputs: int, *options: str) -> Callable[[], Case]:
    task = whence.Regression(*options)
    data = models.regression(30, outputs=outputs), models.regression(3, outputs=outputs, seed=1)
    return lambda: Case(models.mlp((4, 5, outputs)), task, *data)


CASES: dict[str, Callable[[], Case]] = {
    "mlp": lambda: Case(models.mlp(), whence.Classification(), TRAIN, QUERY),
    "loss": lambda: Case(models.mlp(), whence.Classification("loss"), TRAIN, QUERY),
    "conv": lambda: Case(
        models.ConvNet(), whence.Classification(), models.images(30), models.images(3, seed=1)
    ),
    "gpt": lambda: Case(
        models.Transformer(tied=False),
        whence.LanguageModeling(),
        models.documents(30),
        models.documents(3, seed=1),
    ),
    "binary": lambda: Case(
        models.mlp((4, 5, 1)),
        whence.Classification(),
        models.vectors(30, classes=2),
        models.vectors(3, classes=2, seed=1),
    ),
    "absolute-error": regressed(1),
    "outputs": regressed(2, "half_mse", "absolute_error"),  # the loss is no function of it
}
TRAIN, QUERY = models.vectors(40), models.vectors(3, seed=1)


@cache
def case(name: str) -> Case:
    torch.manual_seed(0)
    return CASES[name]()


def projection(study: whence.Study, d: int, joint: bool = True) -> Projection:
    """The projection that Trak uses for the study's (first) run."""
    options = ComputeOptions(dtype=torch.float64, progress=False)
    workspace = Trak().lay_out(study, study.runs[0], study.train[study.stages[-1]], options)
    return random_projection(workspace, d, joint, seed=0)


def parts_of(found: Projection, flat: Flat) -> list[Tensor]:
    """Each part's P as (d, p), with zeros for layers that it does not see."""
    matrices = []
    for part in found.parts:
        rows = part.lift(torch.eye(part.dimension, dtype=torch.float64))
        zero = {n: torch.zeros(part.dimension, b.size).double() for n, b in flat.blocks.items()}
        named = zero | {name: value.flatten(1) for name, value in rows.items()}
        matrices.append(torch.cat([named[name] for name in flat.blocks], 1))
    return matrices


def brute(
    matrices: list[Tensor], train: Tensor, query: Tensor, right: Tensor, damping: float = 0.0
) -> Tensor:
    """Σ over parts of φ(q)ᵀ(ΦᵀΦ + NλI)⁻¹ P·right."""
    total: Any = 0
    for P in matrices:
        Φ, φ = train @ P.T, query @ P.T
        gram = Φ.T @ Φ + damping * len(Φ) * torch.eye(len(P)).double()
        total = total + φ @ torch.linalg.solve(gram, P @ right.T)
    return total


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_one_run(name: str, joint: bool) -> None:
    """-φ(q)ᵀ (ΦᵀΦ)⁻¹ P∇L(m), every gradient from plain autograd."""
    it, d = case(name), 12
    final = it.study.runs[0].final
    f = it.flat.gradients(final, "measurements", it.train)
    L = it.flat.gradients(final, "losses", it.train)
    q = it.flat.gradients(final, "measurements", it.query)
    P = parts_of(projection(it.study, d, joint), it.flat)
    assert sum(map(len, P)) == d and len(P) == (1 if joint else len(it.flat.blocks))
    damping = 0.0 if joint else 1e-4
    scores = Trak(d, joint=joint, damping=damping).attribute(it.study, it.query, **EXACT)
    close(scores.values, -brute(P, f, q, L, damping).detach(), 1e-8)


def test_the_published_form() -> None:
    """φᵀ(ΦᵀΦ)⁻¹ΦᵀQ with Q = 1 - p for the margin, and -2|e| for the absolute error."""
    for name, of in (("mlp", "margin"), ("absolute-error", "error")):
        it = case(name)
        final = it.study.runs[0].final
        f = it.flat.gradients(final, "measurements", it.train)
        q = it.flat.gradients(final, "measurements", it.query)
        batch = dense.batch_of(it.train)
        outputs = it.task.outputs(it.model.double(), batch).detach()
        if of == "margin":
            Q = 1 - outputs.softmax(1)[torch.arange(len(f)), batch[1]]
        else:
            Q = -2 * (outputs - batch[1]).abs().squeeze(1)
        (P,) = parts_of(projection(it.study, 12), it.flat)
        scores = Trak(12).attribute(it.study, it.query, **EXACT)
        close(scores.values, brute([P], f, q, f * Q.unsqueeze(1)), 1e-8)


def test_the_sign_is_that_of_training_on_it() -> None:
    """An example raises its own margin and lowers its own loss: f(with) - f(without)."""
    assert (Trak(12).attribute(case("mlp").study, **EXACT).values > 0).all()
    assert (Trak(12).attribute(case("loss").study, **EXACT).values < 0).all()


def test_self_influence_is_the_diagonal() -> None:
    it = case("mlp")
    everyone = Trak(12).attribute(it.study, it.train, **EXACT)
    close(Trak(12).attribute(it.study, **EXACT).values, np.diagonal(everyone.values), 1e-9)


def test_tokens_add_up() -> None:
    it = case("gpt")
    scores = Trak(12).attribute(it.study, it.query, **EXACT)
    for one in Trak(12).tokens(it.study, it.query, [0, 7], dtype=torch.float64, progress=False):
        close(one.values.sum(1) + one.rest, scores.values[:, one.example], 1e-9)


@pytest.mark.parametrize("options", [{"batch_size": 7}, {"memory": "1MB"}, {"top": 5}], ids=str)
def test_nothing_depends_on_how_the_work_is_cut(options: Any) -> None:
    it = case("gpt")
    plain = Trak(12).attribute(it.study, it.query, **EXACT)
    study = whence.Study(it.model, it.task, train=it.train, runs=it.history.run)
    other = Trak(12).attribute(study, it.query, **EXACT, **options)
    if "top" not in options:
        close(other.values, plain.values, 1e-9)
    assert other.helpful(query=1, k=5).examples == plain.helpful(query=1, k=5).examples


def test_float32() -> None:
    it = case("mlp")
    exact = Trak(12).attribute(it.study, QUERY, **EXACT).values
    close(Trak(12).attribute(it.study, QUERY, progress=False).values, exact, 1e-3)


def test_seeds() -> None:
    it = case("mlp")
    one, again, other = (
        Trak(12, seed=seed).attribute(it.study, QUERY, **EXACT).values for seed in (0, 0, 1)
    )
    assert (one == again).all() and not np.allclose(one, other)


def test_a_frozen_layer_has_no_part() -> None:
    torch.manual_seed(0)
    model, task = models.mlp(), whence.Classification()
    weights = copy.deepcopy(model).double().state_dict()
    groups = [["0.weight", "0.bias"], ["2.weight", "2.bias", "4.weight", "4.bias"]]
    run = whence.Run.from_checkpoints([weights], [5], np.tile([0.0, 0.1], (5, 1)), groups=groups)
    frozen = whence.Study(model, task, train=TRAIN, runs=run)
    without = whence.Study(model, task, train=TRAIN, runs=run, layers=["2", "4"])
    scores = [Trak(12).attribute(study, QUERY, **EXACT).values for study in (frozen, without)]
    close(*scores, 1e-9)


# --- ensembles ----------------------------------------------------------------------------------


@cache
def ensemble(task: Any = None) -> tuple[whence.Study, list[np.ndarray]]:
    """Three runs, each trained on another half of the data."""
    task = task or whence.Classification()
    runs, halves = [], []
    for seed in range(3):
        torch.manual_seed(seed)
        model, half = models.mlp(), np.random.default_rng(seed).permutation(40)[:20]
        data = TensorDataset(*TRAIN[torch.from_numpy(half)])
        history = models.train_run(model, task, data, [5, 10], 0.2, batch_size=8, seed=seed)
        recorded = (history.checkpoints, history.steps, history.rates)
        runs.append(whence.Run.from_checkpoints(*recorded, subset=np.sort(half)))
        halves.append(half)
    return whence.Study(models.mlp(), task, train=TRAIN, runs=runs), halves


def test_runs_on_halves_are_averaged_as_published() -> None:
    """(mean of φᵀ(ΦᵀΦ)⁻¹Φᵀ) ⊙ (mean of Q), over all examples, each run with a P of its own."""
    study, _ = ensemble()
    flat, features, weights, matrices = Flat(study), [], [], []
    for run in study.runs:
        alone = whence.Study(study.model, study.tasks, train=TRAIN, runs=run)
        (P,) = parts_of(projection(alone, 12), flat)
        f = flat.gradients(run.final, "measurements", TRAIN)
        q = flat.gradients(run.final, "measurements", QUERY)
        model = copy.deepcopy(study.model).double()
        model.load_state_dict(run.final.weights())
        p = model(TRAIN.tensors[0]).softmax(1)[torch.arange(40), TRAIN.tensors[1]]
        features.append(brute([P], f, q, f))
        weights.append(1 - p.detach())
        matrices.append(P)
    assert not torch.equal(matrices[0], matrices[1])
    expected = torch.stack(features).mean(0) * torch.stack(weights).mean(0)
    scores = Trak(12).attribute(study, QUERY, **EXACT)
    close(scores.values, expected, 1e-8)
    each = torch.stack(features) * torch.stack(weights).mean(0)
    close(scores.spread, each.std(0), 1e-8)


def test_an_ensemble_without_q() -> None:
    """Where the loss is no function of the measurement, runs' scores are averaged as they are."""
    it = case("outputs")
    runs = [it.history.run, models.train_run(it.model, it.task, it.train, [3, 6], 0.1).run]
    study = whence.Study(it.model, it.task, train=it.train, runs=runs)
    with pytest.warns(UserWarning, match="not a function of its measurement"):
        scores = Trak(12).attribute(study, it.query, **EXACT)
    each = [
        Trak(12).attribute(
            whence.Study(it.model, it.task, train=it.train, runs=run), it.query, **EXACT
        )
        for run in runs
    ]
    close(scores.values, np.mean([one.values for one in each], 0), 1e-9)
    assert "not a function" in scores.diagnostics["ensemble"]


def test_loss_by_measurement() -> None:
    """∂L/∂f where it exists, by finite differences of L as a function of f; flagged where not."""
    g = torch.Generator().manual_seed(0)
    x, labels = torch.randn(9, 4, generator=g).double(), torch.randint(4, (9,), generator=g)
    x[0, labels[0]] += 60  # all but certain
    tasks: dict[Any, Any] = {
        whence.Classification(): lambda p: -(1 - p),
        whence.Classification("log_prob"): lambda p: -torch.ones_like(p),
        whence.Classification("loss"): torch.ones_like,
    }

    class Identity(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    class Holder:
        model = Identity()

    for task, expected in tasks.items():
        Holder.task = task  # type: ignore[attr-defined]
        slopes, off = loss_by_measurement(Holder, (x, labels))  # type: ignore[arg-type]
        p = x.softmax(1)[torch.arange(9), labels]
        torch.testing.assert_close(slopes, expected(p), rtol=1e-9, atol=1e-12)
        assert not off.any()
        slopes32, off = loss_by_measurement(Holder, (x.float(), labels))  # type: ignore[arg-type]
        assert not off.any()
        torch.testing.assert_close(slopes32.double(), slopes, rtol=1e-4, atol=1e-6)
    Holder.task = whence.Regression()  # type: ignore[attr-defined]
    _, off = loss_by_measurement(Holder, (x, x + torch.arange(1, 5)))  # type: ignore[arg-type]
    assert off.all()


# --- stages -------------------------------------------------------------------------------------


def test_stages_are_pooled() -> None:
    torch.manual_seed(0)
    model, task = models.mlp(), whence.Classification()
    first, second = models.vectors(30, seed=2), models.vectors(14, seed=3)
    histories = [models.train_run(model, task, data, [4, 8], 0.1) for data in (first, second)]
    run = whence.Run.from_checkpoints(
        [c for h in histories for c in h.checkpoints], [4, 8, 12, 16], 0.1, stages={"a": 8, "b": 16}
    )
    study = whence.Study(model, task, train={"a": first, "b": second}, runs=run)
    flat = Flat(study)
    f, L = (
        torch.cat([flat.gradients(run.final, what, data) for data in (first, second)])
        for what in ("measurements", "losses")
    )
    q = flat.gradients(run.final, "measurements", QUERY)
    (P,) = parts_of(projection(study, 20), flat)  # more than the second stage has examples
    expected = -brute([P], f, q, L).numpy()
    scores = Trak(20).attribute(study, QUERY, **EXACT)
    close(scores.values, expected, 1e-7)
    assert list(scores.stage or []) == ["a"] * 30 + ["b"] * 14
    for stage, columns in (("a", slice(0, 30)), ("b", slice(30, 44))):
        one = Trak(20, stage=stage).attribute(study, QUERY, **EXACT)
        close(one.values, expected[:, columns], 1e-7)


# --- interrupted, and again ---------------------------------------------------------------------


class Interrupted(BaseException):
    pass


def test_projecting_resumes_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = case("mlp")
    monkeypatch.setattr(whence.persist.files.Throttle, "due", lambda _: True)
    monkeypatch.setattr(signs, "PREFERRED_BATCH", {"cpu": 8, "cuda": 8})
    options = EXACT | {"batch_size": 8}
    plain = Trak(12).attribute(
        whence.Study(it.model, it.task, train=TRAIN, runs=it.history.run.save(tmp_path / "a")),
        QUERY,
        **options,
    )
    study = whence.Study(it.model, it.task, train=TRAIN, runs=it.history.run.save(tmp_path / "b"))
    true, seen = Passes._batch, []

    def counted(self: Any, data: Any, indices: Any, batch: Any, signal: Any, *rest: Any) -> Any:
        if len(indices) == 8 and signal.name == "measurement" and data.name == "train":
            seen.append(indices[0])
            if len(seen) == 5:  # after the probe, the fourth batch
                raise Interrupted
        return true(self, data, indices, batch, signal, *rest)

    monkeypatch.setattr(Passes, "_batch", counted)
    with pytest.raises(Interrupted):
        Trak(12).attribute(study, QUERY, **options)
    scores = Trak(12).attribute(study, QUERY, **options)
    assert seen == [0, 0, 8, 16, 24, 0, 24, 32]  # probe, three batches, killed; probe, the rest
    assert (scores.values == plain.values).all()
    before = len(seen)
    Trak(12).attribute(study, models.vectors(2, seed=5), **options)
    assert seen[before:] == [0]  # only the probe: what was projected is used again


def test_another_measurement_is_projected_again(tmp_path: Path) -> None:
    it = case("mlp")
    run = it.history.run.save(tmp_path / "run")
    for task in (whence.Classification(), whence.Classification("loss")):
        fresh = whence.Study(it.model, task, train=TRAIN, runs=it.history.run)
        cached = whence.Study(it.model, task, train=TRAIN, runs=run)
        close(*(Trak(12).attribute(s, QUERY, **EXACT).values for s in (cached, fresh)), 1e-12)


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (lambda: Trak(41), "dimension=41, but there are only 40 training examples"),
        (lambda: Trak(65, damping=1e-3), "dimension=65, but only 64 parameters are tracked"),
        (lambda: Trak(38), "is singular: the projected gradients.*linearly dependent"),
        (lambda: Trak(0), "dimension=0 must be a whole number, at least 1"),
        (lambda: Trak(8, damping=-1.0), "damping=-1.0 must be zero or positive"),
        (lambda: Trak(8, stage="tune"), "stage='tune' is not in the run"),
    ],
)
def test_bad_input(method: Callable[[], Trak], message: str) -> None:
    x, y = TRAIN.tensors
    doubled = TensorDataset(x[:20].repeat(2, 1), y[:20].repeat(2))
    it = case("mlp")
    study = whence.Study(it.model, it.task, train=doubled, runs=it.history.run)
    with pytest.raises(ValueError, match=message):
        method().attribute(study, QUERY, **EXACT)


def test_a_dimension_that_does_not_fit() -> None:
    model = models.mlp((4, 100, 3))
    run = whence.Run.from_checkpoints([model.state_dict()], [1], 0.1)
    study = whence.Study(model, whence.Classification(), train=models.vectors(400), runs=run)
    with pytest.raises(ValueError, match=r"dimension=300 needs .* GiB for matrices of that size"):
        Trak(300).attribute(study, QUERY, memory="2MB", **EXACT)


# --- the authors' library -----------------------------------------------------------------------


def test_against_traker(tmp_path: Path) -> None:
    """Their gradients, Q, scorer and ensembling, their CPU projector with our P put into it."""
    trak = pytest.importorskip("trak")
    from trak.projectors import BasicProjector, ProjectionType
    from trak.score_computers import BasicScoreComputer

    study, _ = ensemble()
    runs, d = study.runs, 12
    flat = Flat(study)
    order = _their_order(study, flat)
    matrices = {}
    for k, run in enumerate(runs):
        alone = whence.Study(study.model, study.tasks, train=TRAIN, runs=run)
        (P,) = parts_of(projection(alone, d), flat)
        matrices[k] = P.T[order].float()

    class Ours(BasicProjector):
        def generate_sketch_matrix(self, state: Any) -> None:
            (k,) = (k for k, known in enumerate(self.generator_states) if known is state)
            columns = slice(k * self.block_size, (k + 1) * self.block_size)
            self.proj_matrix = matrices[self.model_id][:, columns]

    class Unscaled(BasicScoreComputer):
        """They divide the inverse by its mean entry, which ranks the same."""

        def get_x_xtx_inv(self, grads: Tensor, xtx: Tensor) -> Tensor:
            return super().get_x_xtx_inv(grads, xtx) * torch.linalg.inv(xtx).abs().mean()

    model = copy.deepcopy(study.model).float().eval()
    size = sum(p.numel() for p in model.parameters())
    projector = Ours(size, d, 0, ProjectionType.rademacher, "cpu", block_size=d // 2)
    theirs = trak.TRAKer(
        model=model,
        task="image_classification",
        train_set_size=40,
        save_dir=str(tmp_path),
        device="cpu",
        proj_dim=d,
        projector=projector,
        score_computer=Unscaled,
        use_half_precision=False,
        logging_level=100,
    )
    x, y = TRAIN.tensors
    qx, qy = QUERY.tensors
    for k, run in enumerate(runs):
        weights = {name: value.float() for name, value in run.final.weights().items()}
        theirs.load_checkpoint(weights, model_id=k)
        theirs.featurize((x.float(), y), num_samples=40)
        theirs.finalize_features(model_ids=[k])
        theirs.start_scoring_checkpoint("q", weights, k, num_targets=3)
        theirs.score((qx.float(), qy), num_samples=3)
    one = whence.Study(study.model, study.tasks, train=TRAIN, runs=runs[0])
    for ours, models_of in ((one, [0]), (study, [0, 1, 2])):
        expected = np.array(theirs.finalize_scores("q", model_ids=models_of)).T
        close(Trak(d).attribute(ours, QUERY, **EXACT).values, expected, 1e-4)


def _their_order(study: whence.Study, flat: Flat) -> Tensor:
    """Where each of their parameters (weights flat, then biases) is in our long vector."""
    start, places = 0, {}
    for name, block in flat.blocks.items():
        where = torch.arange(start, start + block.size).view(block.shape)
        places[f"{name}.weight"] = where[:, : block.i].flatten()
        places[f"{name}.bias"] = where[:, block.i]
        start += block.size
    return torch.cat([places[name] for name, _ in study.model.named_parameters()])


# --- digits -------------------------------------------------------------------------------------


def test_on_digits() -> None:
    """Little for one model; for eight, each trained on another half, as good as any."""
    query = judged.data()[1]
    alone = judged.judge(Trak(64).attribute(judged.study(100), query, progress=False))
    eight = judged.study(*range(100, 108), half=True)
    together = judged.judge(Trak(64).attribute(eight, query, progress=False))
    assert -0.1 < alone < 0.25 < together < 0.5


# --- on a GPU: run by hand, with pytest -m gpu ----------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_the_same_projection_and_scores_on_a_gpu() -> None:
    there = Random(BLOCKS, 70, 1, torch.device("cuda"), torch.float64)
    rows = there.lift(torch.eye(70, dtype=torch.float64, device="cuda"))
    actual = torch.cat([rows[block.name].flatten(1) for block in BLOCKS], 1)
    assert torch.equal(actual.cpu(), matrix(random()))
    for name in CASES:
        it = case(name)
        study = whence.Study(it.model, it.task, train=it.train, runs=it.history.run)
        expected = Trak(12).attribute(it.study, it.query, **EXACT)
        scores = Trak(12).attribute(study, it.query, device="cuda", **EXACT)
        close(scores.values, expected.values, 1e-8)
    study, _ = ensemble()
    expected = Trak(12).attribute(study, QUERY, **EXACT)
    again = whence.Study(study.model, study.tasks, train=TRAIN, runs=study.runs)
    close(Trak(12).attribute(again, QUERY, device="cuda", **EXACT).values, expected.values, 1e-8)


@pytest.mark.parametrize("t", [1, 3, 40])
def test_two_sided_projection(t: int) -> None:
    """Of all blocks together, and of gradients that a diagonal multiplies."""
    random = torch.Generator().manual_seed(0)
    gradients, whole = held(6, t)
    sides = [
        tuple(torch.randn(2, n, generator=random, dtype=torch.float64) for n in block.shape)
        for block in BLOCKS
    ]
    part = TwoSided(BLOCKS, sides, "")
    P = torch.block_diag(*(torch.kron(*both) for both in sides))
    close(matrix(part), P)
    close(part.project(gradients), whole @ P.T)
    diagonal = {b.name: torch.rand(b.shape, generator=random).double() for b in BLOCKS}
    scaled = whole * torch.cat([diagonal[b.name].flatten() for b in BLOCKS])
    close(Projection([part]).scaled(diagonal).project(gradients), scaled @ P.T)


def test_a_random_two_sided_projection_keeps_inner_products_on_average() -> None:
    like, ranks = torch.zeros(1, dtype=torch.float64), [(2, 2)] * len(BLOCKS)
    many = [matrix(TwoSided.random(BLOCKS, ranks, key, like)) for key in range(3000)]
    mean = torch.stack([one.T @ one for one in many]).mean(0)
    assert float((mean - torch.eye(len(mean))).abs().max()) < 0.35  # E[PᵀP] = I


@pytest.mark.parametrize("dimension", range(3, 200, 7))
def test_the_dimension_of_a_two_sided_projection(dimension: int) -> None:
    """The largest square that fits; asked for what it has, it stays as it is."""
    ranks = square_ranks(BLOCKS, dimension)
    has = sum(k * width for k, width in ranks)
    assert has <= dimension and square_ranks(BLOCKS, has) == ranks
    k = max(max(pair) for pair in ranks) + 1
    larger = sum(min(k, block.o) * min(k, block.width) for block in BLOCKS)
    assert larger > dimension or has == sum(block.size for block in BLOCKS)
