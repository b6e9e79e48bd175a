"""The same weights through kronfluence 1.0.1 and curvlinops, in float64.

How the peers' conventions relate to ours (N examples, t positions each, P = Σ_n t_n):

- kronfluence keeps the raw sums Σ a aᵀ and Σ s sᵀ with P as their count, and normalises both by P.
  Ours: A is the first sum over N, S the second over P. The eigenbasis is the same; its Kronecker
  eigenvalues are ours / t, so that "kfac" scores agree where t = 1 only. EK-FAC eigenvalues: a raw
  sum, normalised by N, the same as ours.
- It must see *summed* losses, and its pairwise score is ∇fᵀ (H + λ)⁻¹ ∇L without sign and without
  1/N: ours = -its / N. Its sampled Fisher has no seed, so the empirical one is compared.
- It knows neither Conv1D nor padding modes nor groups: it gets a Linear copy and a plain network.
- curvlinops with reduction="mean" has A over P and S over N: the same product kron(S, A) as ours.
  With outputs at many positions its "type-2" columns are shared between positions, so it gets
  classifiers only.
"""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import dense, models
from support.comparing import close
from torch import Tensor, nn
from torch.utils.data import DataLoader

import whence
from whence.operators import EKFAC, FitData, Fitter

kronfluence = pytest.importorskip("kronfluence")
curvlinops = pytest.importorskip("curvlinops")

from kronfluence.analyzer import Analyzer, prepare_model  # noqa: E402
from kronfluence.arguments import FactorArguments, ScoreArguments  # noqa: E402
from kronfluence.task import Task as PeerTask  # noqa: E402


def factors_of(study: Any, fisher: str) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """The library's factors at the run's last checkpoint, in float64.

    Per layer A (i, i), S (o, o) and the EK-FAC eigenvalues (o, i), rows and columns in the order of
    ascending eigenvalues of S and A. Patches are kept (row, column, channel) by the library; here
    they are (channel, row, column) as in the weight.
    """
    run = study.runs[0]
    (passes,) = study.passes(
        run, device=torch.device("cpu"), dtype=torch.float64, quiet=True
    ).values()
    identity = study.identity(run, "train", passes.tracked)
    part = FitData(passes, study.data["train"], study.used(run, "train"), identity, lambda _: "")
    fitter = Fitter([part], study.store(run), batch_size=5, fisher=fisher)
    covariances, fitted = fitter.covariances(run.final), fitter.fit(EKFAC, [run.final], False)
    actual = {}
    for site in passes.tracked.layers:
        A, S = covariances[f"{site.name}/A"], covariances[f"{site.name}/S"]
        weight = site.uses[0][0].weight
        if weight.dim() == 4:
            c, rows, columns = weight.shape[1:]
            order = (
                torch.arange(rows * columns * c).view(rows, columns, c).permute(2, 0, 1).flatten()
            )
            order = torch.cat([order, torch.arange(len(order), len(A))])
            A = A[order][:, order]
        actual[site.name] = (A, S, fitted[site.name].eigenvalues)
    return actual


# --- cases --------------------------------------------------------------------------------------


def plain_convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=1),
        nn.ReLU(),
        nn.Conv2d(4, 3, 2, dilation=(1, 2), bias=False),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(3, 3),
    )


class Case:
    def __init__(self, model: nn.Module, task: Any, train: Any, query: Any) -> None:
        self.model, self.task, self.train, self.query = model, task, train, query
        self.history = models.train_run(model, task, train, [5, 10], 0.2)
        run = self.history.run
        self.study = whence.Study(model, task, train=train, runs=run, layers="matrices")
        self.dense = dense.Dense(model, task, train, self.history, query)

    def values(self, **settings: Any) -> np.ndarray:
        method = whence.Influence.published(**settings)
        kind = {"dtype": torch.float64, "progress": False}
        return method.attribute(self.study, self.query, **kind).values


@cache
def case(name: str) -> Case:
    torch.manual_seed(0)
    if name == "gpt":
        task, kind = whence.LanguageModeling("sum"), models.Transformer()
        return Case(kind, task, models.documents(10), models.documents(3, seed=1))
    task = whence.Classification()
    if name == "conv":
        return Case(plain_convnet(), task, models.images(20), models.images(3, seed=1))
    kind = models.mlp(inplace=False)
    return Case(kind, task, models.vectors(30), models.vectors(3, seed=1))


CASES = ["mlp", "conv", "gpt"]
CLASSIFIERS = ["mlp", "conv"]

# --- kronfluence --------------------------------------------------------------------------------


def with_linears(model: nn.Module) -> nn.Module:
    """The same model with a Linear for every Conv1D."""
    model = copy.deepcopy(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, models.Conv1D):
            linear = nn.Linear(*module.weight.shape).to(module.weight.dtype)
            linear.weight.data, linear.bias.data = module.weight.data.T.clone(), module.bias.data
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, linear)
    return model


class Adapter(PeerTask):
    def __init__(self, task: Any, tracked: list[str]) -> None:
        self.task, self.tracked = task, tracked

    def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
        assert not sample
        return self.task.losses(self.task.outputs(model, batch), batch).sum()

    def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
        return self.task.measurements(self.task.outputs(model, batch), batch).sum()

    def get_influence_tracked_modules(self) -> list[str]:
        return self.tracked

    def get_attention_mask(self, batch: Any) -> Tensor | None:
        return batch["attention_mask"] if isinstance(batch, dict) else None


def peer_scores(
    it: Case, folder: Path, strategy: str, damping: float
) -> tuple[Tensor, dict[str, Any], dict[str, Any]]:
    """Scores (q, n), raw covariances, raw eigenvalues."""
    double = torch.float64
    adapter = Adapter(it.task, list(dense.layers(it.model)))
    model = prepare_model(with_linears(it.model), adapter)
    analyzer = Analyzer(
        "peer", model, adapter, cpu=True, disable_tqdm=True, output_dir=str(folder), log_level=40
    )
    factor_settings = FactorArguments(
        strategy=strategy,
        use_empirical_fisher=True,
        activation_covariance_dtype=double,
        gradient_covariance_dtype=double,
        per_sample_gradient_dtype=double,
        lambda_dtype=double,
    )
    score_settings = ScoreArguments(
        damping_factor=damping,
        per_sample_gradient_dtype=double,
        precondition_dtype=double,
        score_dtype=double,
    )
    analyzer.fit_all_factors(
        strategy, it.train, per_device_batch_size=7, factor_args=factor_settings
    )
    analyzer.compute_pairwise_scores(
        "scores", strategy, it.query, it.train, 2, 7, score_args=score_settings
    )
    covariances = analyzer.load_covariance_matrices(strategy)
    eigenvalues = analyzer.load_lambda_matrices(strategy) if strategy == "ekfac" else {}
    return analyzer.load_pairwise_scores("scores")["all_modules"], covariances, eigenvalues


@cache
def ekfac_peer(name: str, folder: Path) -> Any:
    return peer_scores(case(name), folder, "ekfac", 1e-3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kronfluence")


@pytest.mark.parametrize(
    "name", [pytest.param(c, marks=[pytest.mark.slow] * (c == "gpt")) for c in CASES]
)
def test_influence_against_kronfluence(name: str, folder: Path) -> None:
    it = case(name)
    theirs = -ekfac_peer(name, folder / name)[0] / len(it.train)
    close(it.dense.influence(1e-3, "ekfac", "empirical"), theirs, 1e-6)
    close(it.values(damping=1e-3, fisher="empirical"), theirs, 1e-6)


def test_kfac_influence_against_kronfluence(tmp_path: Path) -> None:
    it = case("mlp")
    theirs = -peer_scores(it, tmp_path, "kfac", 1e-3)[0] / len(it.train)
    close(it.dense.influence(1e-3, "kfac", "empirical"), theirs, 1e-6)
    close(it.values(damping=1e-3, curvature="kfac", fisher="empirical"), theirs, 1e-6)


def kronfluence_factors(name: str, folder: Path) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """In our conventions."""
    it = case(name)
    _, covariances, eigenvalues = ekfac_peer(name, folder / name)
    actual = {}
    for layer, sum_s in covariances["gradient_covariance"].items():
        positions = covariances["num_gradient_covariance_processed"][layer]
        A = covariances["activation_covariance"][layer] / len(it.train)
        processed = eigenvalues["num_lambda_processed"][layer]
        actual[layer] = (A, sum_s / positions, eigenvalues["lambda_matrix"][layer] / processed)
    return actual


def dense_factors(it: Case, fisher: str) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    actual = {}
    for name, m in it.dense.moments(it.dense.last, fisher).items():
        bases = torch.linalg.eigh(m.S)[1], torch.linalg.eigh(m.A)[1]
        gradients = m.gradients.unflatten(1, (len(m.S), len(m.A)))
        actual[name] = (m.A, m.S, (bases[0].T @ gradients @ bases[1]).square().sum(0))
    return actual


@pytest.mark.parametrize("ours", ["dense", "library"])
@pytest.mark.parametrize("name", CASES)
def test_factors_against_kronfluence(name: str, ours: str, folder: Path) -> None:
    it = case(name)
    theirs = kronfluence_factors(name, folder)
    actual = (
        dense_factors(it, "empirical") if ours == "dense" else factors_of(it.study, "empirical")
    )
    assert set(actual) == set(theirs)
    for layer, expected in theirs.items():
        for mine, other in zip(actual[layer], expected, strict=True):
            close(mine, other, 1e-6)


# --- curvlinops ---------------------------------------------------------------------------------


def operator(it: Case, kind: Any, **settings: Any) -> Tensor:
    """Its matrix over all parameters."""
    parameters = list(it.model.parameters())
    if kind is not curvlinops.GGNLinearOperator:
        settings["separate_weight_and_bias"] = False
    data = DataLoader(it.train, batch_size=7)
    linear = kind(it.model, nn.CrossEntropyLoss(), parameters, data, **settings)
    return (linear @ torch.eye(linear.shape[1], dtype=torch.float64)).detach()


def blocks_of(it: Case, matrix: Tensor) -> dict[str, Tensor]:
    """The layers' diagonal blocks, in our order of parameters: bias in the last column."""
    names, start, where = dict(it.model.named_parameters()), 0, {}
    for name, parameter in names.items():
        count = parameter.numel()
        where[name] = torch.arange(start, start + count).view(parameter.shape)
        start += count
    actual = dense.matrices(it.model, where)
    return {k: matrix[v.flatten()][:, v.flatten()] for k, v in actual.items()}


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
@pytest.mark.parametrize("curvature", ["kfac", "ekfac"])
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_curvature_against_curvlinops(name: str, curvature: str, fisher: str) -> None:
    """Its matrix is the oracle's, and influence solved with it is the library's."""
    it = case(name)
    kind = curvlinops.KFACLinearOperator if curvature == "kfac" else curvlinops.EKFACLinearOperator
    its_fisher = {"exact": "type-2", "empirical": "empirical"}[fisher]
    theirs = blocks_of(it, operator(it, kind, fisher_type=its_fisher))
    mine = dense.dense_curvature(curvature, [it.dense.moments(it.dense.last, fisher)])
    assert set(mine) == set(theirs)
    for layer, matrix in mine.items():
        close(matrix, theirs[layer], 1e-8)
    query = it.dense.gradients(it.dense.last, "measurements", True)
    train = it.dense.gradients(it.dense.last, "losses", False)
    expected = dense.influence(query, theirs, train, len(it.train), 1e-3)
    close(it.values(damping=1e-3, curvature=curvature, fisher=fisher), expected, 1e-6)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_gauss_newton_against_curvlinops(name: str) -> None:
    it = case(name)
    theirs = blocks_of(it, operator(it, curvlinops.GGNLinearOperator))
    mine = dense.exact_gauss_newton(it.model, it.history.checkpoints[-1], it.task, it.train)
    for layer, matrix in mine.items():
        close(matrix, theirs[layer], 1e-8)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_factors_against_curvlinops(name: str) -> None:
    it = case(name)
    theirs = blocks_of(it, operator(it, curvlinops.EKFACLinearOperator, fisher_type="type-2"))
    for layer, (A, S, values) in factors_of(it.study, "exact").items():
        basis = torch.kron(torch.linalg.eigh(S)[1], torch.linalg.eigh(A)[1])
        close(basis @ torch.diag(values.flatten()) @ basis.T, theirs[layer], 1e-6)
