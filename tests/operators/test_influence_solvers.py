"""Influence(solver=...) against the true Gauss-Newton matrix, dense and in float64."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_adam as test_preconditioned
import test_source_exact as test_exactness
import test_stages
import torch
from support import dense, judged, models
from support import dense_stages as ds
from support.comparing import close
from support.interrupting import interrupt
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import whence
import whence.engine.scoring
import whence.persist.files
from whence.operators import Inverse
from whence.operators.gauss_newton import GaussNewton
from whence.operators.krylov import Lanczos, conjugate_gradients, matrix_functions
from whence.operators.products import add_weighted, squared_norms

EXACT: Any = {"dtype": torch.float64, "progress": False}
TIGHT: Any = {"tolerance": 1e-11, "iterations": 500}
FULL: Any = {"rank": 60, "iterations": 100}
NAMES = ["mlp", "mlp-no-bias", "conv", "gpt-tied", "gpt-sum", "binary", "mse-3", "twice", "tied"]
λ = 1e-3


# --- brute force ----------------------------------------------------------------------------------


def flat(blocks: dense.Blocks, names: list[str]) -> Tensor:
    """(n, p): all blocks of an example in one row."""
    return torch.cat([blocks[name].flatten(1) for name in names], 1)


def gauss_newton(model: nn.Module, weights: Any, task: Any, data: Any, names: list[str]) -> Tensor:
    """Σ_n JᵀHJ over all blocks together, (p, p)."""
    parameters, outputs = dense.functional(model, weights, task)
    total: Any = 0
    for batch in dense.examples(data):
        out, pull_back = torch.func.vjp(lambda p, b=batch: outputs(p, b).flatten(), parameters)
        bend = dense.loss_hessian(task, outputs(parameters, batch).detach(), batch)
        rows = [pull_back(unit)[0] for unit in torch.eye(len(out), dtype=out.dtype)]
        jacobian = {name: torch.stack([row[name] for row in rows]) for name in parameters}
        j = flat(dense.matrices(model, jacobian), names)
        total = total + j.T @ bend @ j
    return total


def inverse(H: Tensor, damping: float | Tensor = λ) -> Tensor:
    """(H + λ)⁻¹."""
    return torch.linalg.inv(
        H + torch.diag(torch.as_tensor(damping, dtype=torch.float64).expand(len(H)))
    )


def leading(H: Tensor, damping: float | Tensor, rank: int | None = None) -> Tensor:
    """Uᵀ(Σ + UλUᵀ)⁻¹U: the inverse on the leading eigenvectors, by default on the range of H."""
    values, vectors = torch.linalg.eigh(H)
    kept = [k for k in reversed(range(len(values))) if values[k] > 1e-14 * values[-1]][:rank]
    U = vectors[:, kept].T
    shift = torch.as_tensor(damping, dtype=torch.float64).expand(len(H))
    return U.T @ torch.linalg.inv(torch.diag(values[kept]) + (U * shift) @ U.T) @ U


def datainf(
    v: dense.Blocks, g: dense.Blocks, damping: dict[str, float] | None = None, count: int = 0
) -> np.ndarray:
    """-(1/N) Σ_l v (1/N) Σ_i (g_i g_iᵀ + λ_l)⁻¹ gᵀ with every inverse really taken."""
    count = count or len(next(iter(g.values())))
    total: Any = 0
    for name, rows in g.items():
        size = rows.shape[1]
        shift = 0.1 * rows.square().sum() / (len(rows) * size) if damping is None else damping[name]
        each = torch.einsum("ni,nj->nij", rows, rows) + shift * torch.eye(size, dtype=rows.dtype)
        total = total - v[name] @ torch.linalg.inv(each).mean(0) @ rows.T / count
    return total.numpy()


class Joint:
    """A study of test_exactness.py, and its matrix over all layers together."""

    def __init__(self, name: str) -> None:
        it = test_exactness.pair(name)
        self.study, self.query, self.oracle = it.study, it.query, it.dense
        self.train, self.count = self.oracle.train, len(self.oracle.train)
        last = self.oracle.last
        self.v = self.oracle.gradients(last, "measurements", True)
        self.g = self.oracle.gradients(last, "losses", False)
        self.selves = it.dense_self.gradients(last, "measurements", True)
        self.names = list(self.v)
        self.time = float(sum(self.oracle.history.rates)) * self.oracle.effective
        self.H = self.matrix(self.train)

    def matrix(self, data: Any) -> Tensor:
        weights = self.oracle.history.checkpoints[-1]
        whole = gauss_newton(self.oracle.model, weights, self.oracle.task, data, self.names)
        return whole / len(data)

    def scores(self, inverse: Tensor) -> np.ndarray:
        return (-flat(self.v, self.names) @ inverse @ flat(self.g, self.names).T).numpy() / (
            self.count
        )

    def self_scores(self, inverse: Tensor) -> np.ndarray:
        pairs = (flat(self.selves, self.names) @ inverse * flat(self.g, self.names)).sum(1)
        return -pairs.numpy() / self.count

    def influence(self, **settings: Any) -> whence.Scores:
        options = {k: settings.pop(k) for k in ("batch_size", "memory") if k in settings}
        return whence.Influence.published(**settings).attribute(
            self.study, self.query, **EXACT, **options
        )


@cache
def joint(name: str) -> Joint:
    return Joint(name)


def test_the_oracle_is_not_block_diagonal() -> None:
    it = joint("mlp")
    weights = it.oracle.history.checkpoints[-1]
    blocks = dense.exact_gauss_newton(it.oracle.model, weights, it.oracle.task, it.train)
    apart = torch.block_diag(*(blocks[name] for name in it.names))
    close(it.H * (apart != 0), apart)
    assert (it.H - apart).norm() > 0.1 * it.H.norm()


# --- conjugate gradients --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "columns"),
    [(name, False) for name in NAMES] + [(k, True) for k in ("mlp", "conv", "gpt-tied", "twice")],
    ids=str,
)
def test_cg_is_the_dense_inverse(name: str, columns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Along each vector, or by the columns of the output Hessian."""
    monkeypatch.setattr("whence.operators.gauss_newton.fewer_by_columns", lambda *_: columns)
    it = joint(name)
    found = it.influence(damping=λ, solver="cg", **TIGHT)
    close(found.values, it.scores(inverse(it.H)), 1e-8)
    said = found.diagnostics["solver"]
    assert said["queries"] == 3 and said["unconverged"] == 0 and said["residual"] < 2e-11
    assert 1 < said["iterations"] < 200


@pytest.mark.parametrize("curvature", ["ekfac", "kfac", "diagonal", "identity"])
def test_no_preconditioner_changes_the_answer(curvature: str) -> None:
    it = joint("conv")
    found = it.influence(damping=λ, solver="cg", curvature=curvature, fisher="exact", **TIGHT)
    close(found.values, it.scores(inverse(it.H)), 1e-8)


def test_cg_damped_as_source() -> None:
    it = joint("mlp")
    close(it.influence(solver="cg", **TIGHT).values, it.scores(inverse(it.H, 1 / it.time)), 1e-8)


@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_cg_with_the_optimizers_preconditioner(name: str) -> None:
    """(H + λP̄⁻¹)⁻¹ with a P̄ for every parameter (appendix C)."""
    it = test_preconditioned.pair(name, "adam")
    weights = it.leg.checkpoints[-1]
    key = it.dense._key(weights)
    v = it.dense.gradients(key, "train", "measurements", True)
    g, names = it.dense.gradients(key, "train", "losses", False), list(v)
    H = gauss_newton(it.model, weights, it.task, it.train, names) / len(it.train)
    (whole,) = it.leg.segments()
    P = ds.preconditioner(it.model, whole.moments, whole.epsilon)
    shift = torch.cat([1 / (it.dense._time(whole, name) * P[name]) for name in names])
    expected = -flat(v, names) @ inverse(H, shift) @ flat(g, names).T / len(it.train)
    for settings in (TIGHT, {"curvature": "kfac", **TIGHT}, {"curvature": "identity", **TIGHT}):
        method = whence.Influence.published(solver="cg", **settings)
        close(method.attribute(it.study, it.query, **EXACT).values, expected.numpy(), 1e-8)
    if name == "mlp":  # where no eigenvalue is so small that it may count as zero or not
        expected = -flat(v, names) @ leading(H, shift) @ flat(g, names).T / len(it.train)
        full = whence.Influence.published("source", solver="arnoldi", **FULL)
        close(full.attribute(it.study, it.query, **EXACT).values, expected.numpy(), 1e-6)
    with pytest.raises(ValueError, match=r"one number for each parameter, and DataInf"):
        whence.Influence.published("source", solver="datainf").attribute(
            it.study, it.query, **EXACT
        )


@pytest.mark.parametrize("solver", ["cg", "arnoldi"])
def test_fewer_examples_in_the_matrix(solver: str) -> None:
    """H of a seeded subsample; gradients and 1/N still of everything."""
    it = joint("mlp")
    chosen = np.sort(np.random.default_rng(5).choice(it.count, 7, replace=False))
    H = it.matrix([it.train[int(k)] for k in chosen])
    more = TIGHT if solver == "cg" else FULL
    found = it.influence(damping=λ, solver=solver, examples=7, seed=5, **more)
    invert = inverse if solver == "cg" else leading
    close(found.values, it.scores(invert(H, λ)), 1e-8)


def test_each_query_stops_on_its_own() -> None:
    """Solved alone or among others: the same, to rounding, far below the tolerance."""
    it = joint("gpt-tied")
    together = it.influence(damping=λ, solver="cg", tolerance=0.1).values
    for k in range(3):
        method = whence.Influence.published(λ, solver="cg", tolerance=0.1)
        one = [it.query[k]]
        alone = method.attribute(it.study, one, **EXACT).values
        close(alone, together[k : k + 1], 1e-9)
    assert abs(together - it.scores(inverse(it.H))).max() > 1e-5  # it did stop early


def test_a_residual_that_stays_is_said() -> None:
    it = joint("mlp")
    with pytest.warns(UserWarning, match=r"not converged for 3 of 3 queries .* raise damping"):
        found = it.influence(damping=1e-6, solver="cg", iterations=3)
    said = found.diagnostics["solver"]
    assert said["unconverged"] == 3 and said["iterations"] == 3 and said["residual"] > 0.02


def test_conjugate_gradients_of_any_matrix() -> None:
    g = torch.Generator().manual_seed(0)
    root = torch.randn(30, 30, generator=g, dtype=torch.float64)
    A = root @ root.T + 0.1 * torch.eye(30)
    right = torch.randn(4, 30, generator=g, dtype=torch.float64)
    right[2] = 0
    M = A.diagonal()
    found = conjugate_gradients(lambda x: x @ A, lambda x: x / M, right, 500, 1e-12)
    torch.testing.assert_close(found.x, torch.linalg.solve(A, right.T).T)
    assert found.steps[2] == 0 and not found.x[2].any() and float(found.residuals.max()) < 1e-11
    early = conjugate_gradients(lambda x: x @ A, lambda x: x / M, right, 5, 1e-12)
    left = right - early.x @ A
    expected = ((left**2 / M).sum(1) / (right**2 / M).sum(1)).nan_to_num().sqrt()
    torch.testing.assert_close(early.residuals, expected)


def test_matrix_functions_of_any_matrix() -> None:
    g = torch.Generator().manual_seed(0)
    root = torch.randn(30, 12, generator=g, dtype=torch.float64)
    A = root @ root.T  # of rank 12
    right = torch.randn(4, 30, generator=g, dtype=torch.float64)
    right[1] = root @ torch.ones(12, dtype=torch.float64)
    right[2] = 0
    values, basis = torch.linalg.eigh(A)
    functions = [lambda σ: torch.exp(-0.3 * σ), lambda σ: 1 / (1 + σ)]
    expected = [right @ (basis * f(values.clamp_min(0))) @ basis.T for f in functions]
    found = matrix_functions(lambda x: x @ A, functions, right, 200, 1e-12)
    torch.testing.assert_close(found.x, torch.stack(expected))
    assert found.steps[2] == 0 and not found.x[:, 2].any() and float(found.residuals.max()) < 1e-11
    for row in range(4):  # alone as among others
        (alone,) = matrix_functions(lambda x: x @ A, functions[:1], right[[row]], 200, 1e-12).x
        torch.testing.assert_close(alone[0], found.x[0, row], rtol=1e-9, atol=1e-9)
    for held in (1, 3, 200):  # kept, or made again
        kept = matrix_functions(lambda x: x @ A, functions, right, 200, 1e-12, held)
        torch.testing.assert_close(kept.x, found.x)
        assert torch.equal(kept.steps, found.steps)
    early = matrix_functions(lambda x: x @ A, functions, right, 5, 1e-12)
    assert list(early.steps) == [5, 5, 0, 5] and early.residuals[0] > 1e-4
    near = matrix_functions(lambda x: x @ A.float(), functions, right.float(), 200, 1e-5)
    torch.testing.assert_close(near.x.double(), torch.stack(expected), rtol=1e-4, atol=1e-3)


def test_dynamics_that_are_not_known_well_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from whence.operators import EKFAC, Basis, BlockDiagonal, BlockVectors, EigenFactors

    monkeypatch.setattr("whence.operators.whitened.STEPS", 3)
    g = torch.Generator().manual_seed(0)
    outputs, inputs = (
        torch.linalg.qr(torch.randn(k, k, generator=g, dtype=torch.float64)).Q for k in (6, 7)
    )
    values = 10 ** torch.linspace(-6, 6, 42, dtype=torch.float64).reshape(6, 7)
    H = EKFAC({"fc": EigenFactors(values, Basis(outputs, inputs))})
    M = H.whitened(BlockDiagonal({"fc": torch.ones(6, 7, dtype=torch.float64)}))
    v = BlockVectors({"fc": torch.ones(2, 6, 7, dtype=torch.float64)}, {"fc": None})
    with pytest.warns(
        UserWarning, match=r"the dynamics of layer fc are only known to .* 3 Lanczos"
    ):
        M.apply([torch.sqrt], v)
    assert H.tallies["lanczos"]["iterations"] == 3


# --- Arnoldi --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "damping"),
    [(k, x) for k in NAMES for x in (λ, "source")] + [(k, 0.0) for k in ("mlp", "conv", "binary")],
    ids=str,
)
def test_arnoldi_of_full_rank_is_the_inverse_on_the_range(name: str, damping: Any) -> None:
    it = joint(name)
    shift = 1 / it.time if damping == "source" else damping
    found = it.influence(damping=damping, solver="arnoldi", **FULL)
    expected = it.scores(leading(it.H, shift))
    close(found.values, expected)
    rank = int(torch.linalg.matrix_rank(it.H, hermitian=True))
    assert len(found.diagnostics["solver"]["eigenvalues"]) == rank


@pytest.mark.parametrize("name", ["mlp", "conv", "gpt-tied"])
def test_arnoldi_of_low_rank(name: str) -> None:
    it = joint(name)
    found = it.influence(damping=λ, solver="arnoldi", rank=3, iterations=60)
    close(found.values, it.scores(leading(it.H, λ, 3)), 1e-6)
    said = found.diagnostics["solver"]
    close(said["eigenvalues"], torch.linalg.eigvalsh(it.H).flip(0)[:3])
    assert max(said["residuals"]) < 1e-6 and said["iterations"] < 60
    assert abs(found.values - it.scores(leading(it.H, λ))).max() > 1e-6


def test_the_start_vector_is_the_seeds() -> None:
    it = joint("conv")
    settings: Any = {"damping": λ, "solver": "arnoldi", "rank": 4, "iterations": 4}
    with pytest.warns(UserWarning, match=r"of the 4 leading eigenvectors are only roughly known"):
        first = it.influence(seed=0, **settings).values
    with pytest.warns(UserWarning, match="only roughly known"):
        again = [it.influence(seed=seed, **settings).values for seed in (0, 1)]
    np.testing.assert_array_equal(first, again[0])
    assert abs(first - again[1]).max() > 1e-8 * abs(first).max()


def cached(it: Any, folder: Path) -> whence.Study:
    """A new study of the same run, with a cache on disk."""
    model, task = it.oracle.model, it.oracle.task
    return whence.Study(model, task, train=it.train, runs=it.study.runs, cache=folder)


def test_eigenpairs_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    it = joint("mlp")
    study = cached(it, tmp_path)
    made: list[int] = []
    product = GaussNewton.flat_product
    monkeypatch.setattr(
        GaussNewton, "flat_product", lambda self, v: made.append(1) or product(self, v)
    )
    for damping in (λ, 0.1):
        method = whence.Influence.published(damping, solver="arnoldi", rank=3, iterations=8)
        method.attribute(study, it.query, **EXACT)
    assert len(made) == 8
    whence.Influence.published(λ, solver="arnoldi", rank=3, iterations=8, seed=1).attribute(
        study, it.query, **EXACT
    )
    assert len(made) == 16


def test_a_killed_iteration_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    it = joint("mlp")
    monkeypatch.setattr(whence.persist.files.Throttle, "due", lambda _: True)
    method = whence.Influence.published(λ, solver="arnoldi", rank=3, iterations=9)

    def attribute(cache: Path) -> np.ndarray:
        return method.attribute(cached(it, cache), it.query, **EXACT).values

    expected = attribute(tmp_path / "whole")
    calls = interrupt(monkeypatch, GaussNewton, "flat_product", 6)
    with pytest.raises(KeyboardInterrupt):
        attribute(tmp_path / "killed")
    np.testing.assert_array_equal(attribute(tmp_path / "killed"), expected)
    assert len(calls) == 6 + 4


def test_lanczos_of_a_matrix_with_few_directions() -> None:
    g = torch.Generator().manual_seed(0)
    factor = torch.randn(50, 4, generator=g, dtype=torch.float64)
    A = factor @ factor.T
    lanczos = Lanczos(torch.randn(50, generator=g, dtype=torch.float64), 30)
    while not lanczos.finished:
        lanczos.step(lambda x: x @ A)
    assert lanczos.done <= 6  # four, and one for what the start has outside
    values, vectors, residuals = lanczos.leading(10)
    assert len(values) == 4
    torch.testing.assert_close(values, torch.linalg.eigvalsh(A).flip(0)[:4])
    torch.testing.assert_close(vectors @ A, values[:, None] * vectors, atol=1e-9, rtol=0)
    torch.testing.assert_close(vectors @ vectors.T, torch.eye(4, dtype=torch.float64))
    assert float(residuals.max()) < 1e-9


# --- DataInf --------------------------------------------------------------------------------------


@pytest.mark.parametrize("damping", [None, 0.02, "source"], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_datainf_is_its_formula(name: str, damping: Any) -> None:
    it = joint(name)
    given = None
    if damping is not None:
        given = dict.fromkeys(it.names, 1 / it.time if damping == "source" else damping)
    found = it.influence(damping=damping, solver="datainf")
    close(found.values, datainf(it.v, it.g, given), 1e-9)
    least = (
        min(given.values())
        if given
        else min(0.1 * float(x.square().sum()) / x.numel() for x in it.g.values())
    )
    close(found.diagnostics["damping"]["least"], least)


@pytest.mark.parametrize("shape", [(5, 1, 4, 6), (5, 3, 4, 6), (5, 9, 4, 3), (5, 1, 7, 2)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_sums_of_gradients(shape: tuple[int, ...], bias: bool) -> None:
    n, t, i, o = shape
    g = torch.Generator().manual_seed(0)
    a, s, w = (
        torch.randn(*x, generator=g, dtype=torch.float64) for x in ((n, t, i), (n, t, o), (3, n))
    )
    full = torch.cat([a, torch.ones(n, t, 1)], 2) if bias else a
    each = torch.einsum("nto,nti->noi", s, full)
    total = torch.ones(3, o, i + bias, dtype=torch.float64)
    add_weighted(total, w, a, s, bias)
    torch.testing.assert_close(total, 1 + torch.einsum("qn,noi->qoi", w, each))
    torch.testing.assert_close(squared_norms(a, s, bias), each.square().sum((1, 2)))


# --- all of them ----------------------------------------------------------------------------------

ALL: dict[str, dict[str, Any]] = {
    "cg": {"damping": λ, "solver": "cg", **TIGHT},
    "arnoldi": {"damping": λ, "solver": "arnoldi", **FULL},
    "datainf": {"solver": "datainf"},
}


def expected_of(it: Joint, name: str) -> np.ndarray:
    if name == "datainf":
        return datainf(it.v, it.g)
    return it.scores(inverse(it.H) if name == "cg" else leading(it.H, λ))


@pytest.mark.parametrize("solver", ALL)
@pytest.mark.parametrize("name", ["mlp", "conv", "gpt-tied"])
def test_batches_and_memory_change_nothing(
    name: str, solver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = joint(name)
    expected = expected_of(it, solver)
    for size in (5, 100):
        close(it.influence(batch_size=size, **ALL[solver]).values, expected, 1e-6)
    # one query, one vector and one of its derivatives at a time
    monkeypatch.setattr(whence.engine.scoring.Scoring, "_at_once", lambda _: 2)
    monkeypatch.setattr("whence.engine.solvers.CG_VECTORS", 2**40)
    monkeypatch.setattr("whence.operators.cost.per_example_numbers", lambda _: 2**40)
    found = it.influence(batch_size=100, **ALL[solver])
    close(found.values, expected, 1e-6)
    if solver == "cg":
        assert found.diagnostics["solver"]["queries"] == 3


@pytest.mark.parametrize("solver", ALL)
def test_self_influence(solver: str) -> None:
    it = joint("gpt-tied")
    found = whence.Influence.published(**ALL[solver]).attribute(it.study, **EXACT).values
    if solver == "datainf":
        close(found, datainf(it.selves, it.g).diagonal(), 1e-9)
    else:
        invert = inverse if solver == "cg" else leading
        close(found, it.self_scores(invert(it.H, λ)), 1e-6)


@pytest.mark.parametrize("solver", ALL)
def test_single_precision(solver: str) -> None:
    it = joint("conv")
    settings = ALL[solver] | ({"tolerance": 1e-5} if solver == "cg" else {})
    method = whence.Influence.published(**settings)
    found = method.attribute(it.study, it.query, progress=False).values
    assert found.dtype == np.float32
    close(found, expected_of(it, solver), 2e-3)


@pytest.mark.parametrize("solver", ALL)
def test_killed_and_called_again(
    solver: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With out=: blocks that are written are not solved again, and the bits are the same."""
    it = joint("mlp")
    monkeypatch.setattr(whence.engine.scoring.Scoring, "_at_once", lambda _: 1)
    monkeypatch.setattr(whence.persist.files.Throttle, "due", lambda _: True)
    method = whence.Influence.published(**ALL[solver])
    whole = method.attribute(it.study, it.query, out=tmp_path / "whole", **EXACT)
    calls = interrupt(monkeypatch, Inverse, "__matmul__", 3)
    with pytest.raises(KeyboardInterrupt):
        method.attribute(it.study, it.query, out=tmp_path / "killed", **EXACT)
    again = method.attribute(it.study, it.query, out=tmp_path / "killed", **EXACT)
    np.testing.assert_array_equal(again.values, whole.values)
    assert len(calls) == 4
    assert again.diagnostics.get("solver") == whole.diagnostics.get("solver")


@pytest.mark.parametrize("solver", ALL)
def test_tokens_add_up(solver: str) -> None:
    it = joint("gpt-tied")
    method = whence.Influence.published(**ALL[solver])
    (one,) = method.tokens(it.study, it.query, [2], **EXACT)
    close(one.values.sum(1) + one.rest, expected_of(it, solver)[:, 2], 1e-6)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> test_stages.Trained:
    return test_stages.Trained(tmp_path_factory.mktemp("runs") / "two-heads")


@pytest.mark.parametrize("solver", ALL)
@pytest.mark.parametrize("selves", [False, True], ids=["query", "selves"])
def test_stages_are_pooled(trained: test_stages.Trained, solver: str, selves: bool) -> None:
    """One matrix of both stages' data, over the layers that can be seen from either."""
    oracle = trained.dense
    key, stages = oracle._key(trained.final), test_stages.DATA
    names = ["first", "second", "new"] + (["old"] if selves else [])
    H = sum(
        gauss_newton(trained.model, trained.final, test_stages.TASKS[s], stages[s], names)
        for s in stages
    )
    g = [oracle.gradients(key, s, "losses", False) for s in stages]
    rows = {name: torch.cat([part[name] for part in g]) for name in names}
    if selves:
        v = [oracle.gradients(key, s, "measurements", False) for s in stages]
        queries = {name: torch.cat([part[name] for part in v]) for name in names}
    else:
        queries = oracle.gradients(key, "after", "measurements", True)
    if solver == "datainf":
        expected = datainf({name: queries[name] for name in names}, rows)
    else:
        invert = inverse if solver == "cg" else leading
        w = flat(queries, names) @ invert(H / oracle.total, λ)
        expected = (-w @ flat(rows, names).T / oracle.total).numpy()
    method = whence.Influence.published(**ALL[solver])
    found = method.attribute(trained.study, None if selves else test_stages.QUERY, **EXACT)
    close(found.values, expected.diagonal() if selves else expected, 1e-6)
    if not selves:
        only = whence.Influence.published(**ALL[solver], stage="after")
        part = only.attribute(trained.study, test_stages.QUERY, **EXACT).values
        close(part, expected[:, oracle.columns["after"]], 1e-6)


@pytest.mark.parametrize("solver", ALL)
def test_a_frozen_layer_is_a_constant(solver: str, tmp_path: Path) -> None:
    it = joint("mlp")
    model = copy.deepcopy(it.oracle.model)
    optimizer = torch.optim.SGD([*model[0].parameters(), *model[4].parameters()], 0.1)
    with whence.Recorder(tmp_path, model, optimizer, checkpoints=1, total_steps=1):
        optimizer.step()
    study = whence.Study(model, it.oracle.task, train=it.train, runs=tmp_path, layers="matrices")
    found = whence.Influence.published(**ALL[solver]).attribute(study, it.query, **EXACT).values
    kept = ["0", "4"]
    if solver == "datainf":
        expected = datainf({k: it.v[k] for k in kept}, {k: it.g[k] for k in kept})
    else:
        weights = it.oracle.history.checkpoints[-1]
        H = gauss_newton(it.oracle.model, weights, it.oracle.task, it.train, kept) / it.count
        invert = inverse if solver == "cg" else leading
        expected = -flat(it.v, kept) @ invert(H, λ) @ flat(it.g, kept).T / it.count
        expected = expected.numpy()
    close(found, expected, 1e-6)


@pytest.mark.parametrize("solver", ALL)
def test_several_runs_and_a_run_on_a_subset(solver: str) -> None:
    data = models.vectors(12)
    torch.manual_seed(0)
    model, task, query = models.mlp(), whence.Classification(), models.vectors(2, seed=1)
    history = models.train_run(model, task, data, [6], 0.1)
    used = [0, 2, 3, 7, 8, 11]
    settings: Any = {"subset": used}
    part = whence.Run.from_checkpoints(history.checkpoints, [6], history.rates, **settings)
    half = TensorDataset(*(t[used] for t in data.tensors))
    smaller = whence.Study(model, task, train=half, runs=history.run, layers="matrices")
    both = [
        whence.Influence.published(**ALL[solver]).attribute(study, query, **EXACT).values
        for study in (whence.Study(model, task, train=data, runs=part, layers="matrices"), smaller)
    ]
    close(both[0][:, used], both[1], 1e-8)
    mean = whence.Influence.published(**ALL[solver]).attribute(
        whence.Study(model, task, train=data, runs=[history.run, part], layers="matrices"),
        query,
        **EXACT,
    )
    whole = whence.Influence.published(**ALL[solver]).attribute(
        whence.Study(model, task, train=data, runs=history.run, layers="matrices"), query, **EXACT
    )
    close(mean.values, (whole.values + both[0]) / 2)
    close(mean.spread, abs(whole.values - both[0]) / 2**0.5, 1e-5)


@pytest.mark.parametrize("solver", ALL)
def test_the_model_comes_back_as_it_was(solver: str) -> None:
    it = joint("conv")
    model = copy.deepcopy(it.oracle.model).train()
    before = copy.deepcopy(model.state_dict())
    study = whence.Study(
        model, it.oracle.task, train=it.train, runs=it.study.runs, layers="matrices"
    )
    found = whence.Influence.published(**ALL[solver]).attribute(study, it.query, **EXACT)
    close(found.values, expected_of(it, solver), 1e-6)
    assert model.training and all(p.grad is None for p in model.parameters())
    assert all(p.requires_grad for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


def test_estimates_count_every_pass() -> None:
    it = joint("mlp")

    def estimate(query: Any = it.query, **settings: Any) -> dict[str, Any]:
        return whence.Influence.published(**settings).estimate(it.study, query)

    passes = {name: estimate(**settings)["passes"] for name, settings in ALL.items()}
    assert passes["cg"] == {"covariances": 1, "eigenvalues": 1, "products": 501, "scores": 1}
    assert passes["arnoldi"] == {"steps": 100, "scores": 1}
    assert passes["datainf"] == {"norms": 1, "sums": 1, "scores": 1}
    fewer = estimate(damping=λ, solver="cg", iterations=11, examples=6, tolerance=0.1)
    assert fewer["passes"]["products"] == 6
    everyone = estimate(query=None, solver="datainf")["operations"]
    assert everyone > estimate(solver="datainf")["operations"]


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"solver": "lissa"}, r"solver='lissa' is not known: use one of 'ekfac', 'cg'"),
        ({"rank": 3}, r"rank=3 means nothing to solver='ekfac': .*use solver='arnoldi'"),
        ({"iterations": 3}, r"iterations=3 .*solver='cg' or solver='arnoldi'"),
        ({"tolerance": 0.1}, r"tolerance=0.1 means nothing to solver='ekfac'"),
        ({"examples": 10}, r"examples=10 means nothing to solver='ekfac'"),
        ({"solver": "cg", "rank": 3}, r"rank=3 means nothing to solver='cg'"),
        ({"solver": "arnoldi", "curvature": "ekfac"}, r"curvature='ekfac' means nothing"),
        ({"solver": "arnoldi", "fisher": "exact"}, r"fisher='exact' means nothing"),
        ({"solver": "arnoldi", "tolerance": 0.1}, r"tolerance=0.1 means nothing"),
        ({"solver": "datainf", "curvature": "kfac"}, r"curvature='kfac' means nothing"),
        ({"solver": "datainf", "seed": 1}, r"seed=1 means nothing to solver='datainf'"),
        ({"solver": "datainf", "examples": 5}, r"examples=5 means nothing to solver='datainf'"),
        ({"solver": "cg", "curvature": "gn"}, r"curvature='gn' is not known"),
        ({"solver": "cg", "damping": 0}, r"damping=0 .* 'source'"),
        ({"solver": "cg", "damping": -1.0}, r"damping=-1.0 must be zero or positive"),
        ({"solver": "cg", "iterations": 0}, r"iterations=0 must be a whole number"),
        ({"solver": "cg", "iterations": 1.5}, r"iterations=1.5 must be a whole number"),
        ({"solver": "cg", "tolerance": 0.0}, r"tolerance=0.0 must be between 0 and 1"),
        ({"solver": "cg", "examples": 0}, r"examples=0 must be a whole number"),
        ({"solver": "arnoldi", "rank": 0}, r"rank=0 must be a whole number"),
        ({"solver": "arnoldi", "rank": 9, "iterations": 8}, r"rank=9 .* iterations=8"),
        ({"solver": "datainf", "damping": 0.0}, r"damping=0 is what DataInf divides by"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_meant(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        whence.Influence.published(**settings)


def test_settings_are_only_the_solvers_own() -> None:
    assert whence.Influence.published(solver="datainf").settings() == {
        "solver": "datainf",
        "damping": None,
        "stage": None,
    }
    assert set(whence.Influence.published().settings()) == {
        "solver", "damping", "curvature", "fisher", "seed", "stage", "coupling"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({"solver": "cg", "examples": 13}, {}, r"examples=13, but the run trained on 12"),
        ({"solver": "cg"}, {"dtype": torch.bfloat16}, r"bfloat16 cannot resolve"),
        ({"solver": "arnoldi"}, {"dtype": torch.bfloat16}, r"bfloat16 cannot resolve"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit(settings: Any, options: Any, message: str) -> None:
    it = joint("mlp")
    with pytest.raises(ValueError, match=message):
        whence.Influence.published(**settings).attribute(it.study, it.query, **(EXACT | options))


def test_a_basis_that_does_not_fit_into_memory() -> None:
    torch.manual_seed(0)
    model, data = models.mlp((4, 60, 60, 3)), models.vectors()
    study = whence.Study(
        model, whence.Classification(), train=data, runs=one_step(model), layers="matrices"
    )
    method = whence.Influence.published(solver="arnoldi")
    with pytest.raises(ValueError, match=r"iterations=200: .* lower iterations, raise memory"):
        method.attribute(study, data, memory=2**20, **EXACT)


def one_step(model: nn.Module) -> whence.Run:
    return whence.Run.from_checkpoints([copy.deepcopy(model.state_dict())], [1], 0.1)


@pytest.mark.parametrize("solver", ["arnoldi", "cg", "datainf"])
def test_the_example_that_is_not_finite_is_named(solver: str) -> None:
    inputs, labels = (t.clone() for t in models.vectors().tensors)
    inputs[7] = torch.nan
    torch.manual_seed(0)
    model = models.mlp()
    train = TensorDataset(inputs, labels)
    study = whence.Study(
        model, whence.Classification(), train=train, runs=one_step(model), layers="matrices"
    )
    with pytest.raises(FloatingPointError, match=r"NaN or infinite for train example 7"):
        whence.Influence.published(λ, solver=solver).attribute(
            study, models.vectors(2, seed=1), **EXACT
        )


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return slope * (1 - x.tanh() ** 2)


class Once(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(_Once.apply(self.one(x)))


def test_an_operation_without_second_derivatives() -> None:
    torch.manual_seed(0)
    model, data = Once(), models.vectors()
    study = whence.Study(
        model, whence.Classification(), train=data, runs=one_step(model), layers="matrices"
    )
    with pytest.raises(ValueError, match=r"second derivatives.*such as 'ekfac'"):
        whence.Influence.published(λ, solver="arnoldi").attribute(study, data, **EXACT)
    whence.Influence.published(solver="datainf").attribute(study, data, **EXACT)


class Absolute(whence.Regression):
    """|f - y|: linear in the outputs on either side, so there is no curvature."""

    def losses(self, outputs: Tensor, batch: Any) -> Tensor:
        return self.residuals(outputs, batch).abs().mean(1)


def test_a_loss_without_curvature() -> None:
    """H = 0: (H + λ)⁻¹ is 1/λ."""
    torch.manual_seed(0)
    model, data = models.mlp((4, 5, 1)), models.regression()
    history = models.train_run(model, Absolute(), data, [3], 0.1)
    study = whence.Study(model, Absolute(), train=data, runs=history.run, layers="matrices")
    oracle = dense.Dense(model, Absolute(), data, history, data)
    v, g = (oracle.gradients(0, k, k != "losses") for k in ("measurements", "losses"))
    method = whence.Influence.published(λ, solver="cg", curvature="identity")
    found = method.attribute(study, data, **EXACT)
    close(found.values, (-flat(v, ["0", "2"]) @ flat(g, ["0", "2"]).T / 12 / λ).numpy())


@pytest.mark.parametrize(
    ("settings", "least", "most"),
    [
        ({"solver": "cg"}, 0.15, 0.45),
        ({"solver": "arnoldi", "damping": "source"}, 0.15, 0.45),
        ({"solver": "datainf"}, 0.02, 0.3),
    ],
    ids=str,
)
def test_digits(settings: dict[str, Any], least: float, most: float) -> None:
    method, query = whence.Influence.published(**settings), judged.data()[1]
    found = judged.judge(method.attribute(judged.study(1000), query, progress=False))
    assert least < found < most, found
