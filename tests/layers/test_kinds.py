"""Embeddings, norms, single parameters and further convolutions, each against plain autograd.

One table: every row is tried with TracIn (gradients of each example), with the Gauss-Newton matrix
of all parameters together, with its diagonal and with EK-FAC, against dense matrices in float64.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support import dense, models
from support.autograd import EXACT, Waves, check, normal, once, reasons, rows
from support.kinds import (
    SIZE,
    TABLE,
    Make,
    Sequential,
    Squares,
    TiedWithBias,
    TwoNumbers,
    headed,
    ids,
    made,
)
from torch import Tensor, nn
from torch.nn import functional as F

import whence
import whence.layers.kind
from whence.layers.parameter import OnePerExample
from whence.layers.passes import Signal
from whence.operators import EKFAC, BlockDiagonal, gauss_newton
from whence.operators.factored import EigenFactors
from whence.operators.operator import Basis, BlockVectors
from whence.projections.gradients import gather
from whence.projections.random import Random


@pytest.mark.parametrize("name", TABLE)
def test_gradients(name: str) -> None:
    """Of every example, whatever batch it is in."""
    model, train, query = made(name)
    every = [check(model, train, query, layers="all", batch_size=size).values for size in (1, 3, 7)]
    np.testing.assert_allclose(every[0], every[1], rtol=1e-9, atol=1e-12 * abs(every[0]).max())
    np.testing.assert_allclose(every[0], every[2], rtol=1e-9, atol=1e-12 * abs(every[0]).max())


class Dense:
    """Gradients and the Gauss-Newton matrix of all parameters, by autograd, one by one."""

    def __init__(self, model: nn.Module, train: Any, query: Any) -> None:
        model = copy.deepcopy(model).eval()
        task, names = Squares(), [name for name, _ in model.named_parameters()]
        self.query = rows(model, names, query, task.measurements, task)
        self.train = rows(model, names, train, task.losses, task)
        # ℓ = Σ y²: J ᵀ 2 J, one column √2 ∂y_c/∂θ for each output
        outputs = len(task.outputs(model, dense.batch_of([train[0]])).flatten())
        self.columns = torch.stack(
            [
                2**0.5 * rows(model, names, train, lambda y, _, c=c: y.flatten(1)[:, c], task)
                for c in range(outputs)
            ]
        ).flatten(0, 1)
        self.H = self.columns.T @ self.columns / len(train)

    def influence(self, H: Tensor, damping: float) -> np.ndarray:
        solved = torch.linalg.solve(H + damping * torch.eye(len(H)).to(H), self.train.T)
        return (-(self.query @ solved) / len(self.train)).numpy()


def influence(model: nn.Module, train: Any, query: Any, **settings: Any) -> np.ndarray:
    study = whence.Study(model, Squares(), train=train, runs=once(model), layers="all")
    return whence.Influence(damping=0.1, **settings).attribute(study, query, **EXACT).values


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("columns", [True, False], ids=["by columns", "along"])
def test_the_matrix_of_all_parameters(
    name: str, columns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gauss_newton, "fewer_by_columns", lambda *_: columns)
    model, train, query = made(name)
    scores = influence(model, train, query, solver="cg", tolerance=1e-11, iterations=1000)
    truth = Dense(model, train, query)
    expected = truth.influence(truth.H, 0.1)
    np.testing.assert_allclose(scores, expected, rtol=1e-6, atol=1e-8 * abs(expected).max())


@pytest.mark.parametrize("name", TABLE)
def test_its_diagonal(name: str) -> None:
    model, train, query = made(name)
    settings = {"curvature": "diagonal", "fisher": "exact", "coupling": False}
    truth = Dense(model, train, query)
    expected = truth.influence(truth.H.diagonal().diag(), 0.1)
    scores = influence(model, train, query, **settings)
    np.testing.assert_allclose(scores, expected, rtol=1e-9, atol=1e-12 * abs(expected).max())


def in_rows(columns: Tensor, shape: tuple[int, int], n: int, whole: bool) -> Tensor:
    """EK-FAC of an embedding (rows, i): every row has the eigenvectors of Σ GᵀG, and in them its
    own second moments; between rows there is nothing."""
    G = columns.view(-1, *shape)
    _, Q = torch.linalg.eigh(torch.einsum("koi,koj->ij", G, G))
    moments = (G @ Q).square().sum(0) / n
    return torch.block_diag(*[Q @ m.diag() @ Q.T for m in moments])


@pytest.mark.parametrize("curvature", ["auto", "ekfac", "shampoo"])
def test_ekfac_of_an_embedding_and_a_norm(curvature: str) -> None:
    """One position, where the bases of all three are those of whole gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, SIZE), nn.LayerNorm(SIZE), nn.Tanh()).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    train, query = ids(9), ids(3, seed=1)
    truth = Dense(model, train, query)
    table, norm = truth.columns.split([24, 8], 1)
    blocks = in_rows(table, (6, SIZE), 9, True), norm.square().sum(0).div(9).diag()
    expected = truth.influence(torch.block_diag(*blocks), 0.1)
    settings = {"curvature": curvature, "fisher": "exact", "coupling": False}
    scores = influence(model, train, query, **settings)
    np.testing.assert_allclose(scores, expected, rtol=1e-8, atol=1e-10 * abs(expected).max())


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "not tied"])
def test_bases_of_whole_gradients_where_rows_repeat(tied: bool) -> None:
    """Documents that have a token several times, and a head that meets the embedding."""
    torch.manual_seed(0)
    model = TiedWithBias().double() if tied else TwoNumbers().double()
    train, query = ids(9, 5, rows=4), ids(3, 5, seed=1, rows=4)
    truth = Dense(model, train, query)
    sizes = [p.numel() for p in model.parameters()]
    parts = truth.columns.split(sizes, 1)
    H = torch.block_diag(in_rows(parts[0], (6, SIZE), 9, True), torch.eye(sum(sizes[1:])).double())
    # only the table is compared, so only it is tracked; a head's bias belongs to the head
    keep = slice(0, sizes[0])
    truth.query, truth.train = truth.query[:, keep], truth.train[:, keep]
    expected = truth.influence(H[keep, keep], 0.1)
    names = ["table", "head"] if tied else ["table"]
    study = whence.Study(model, Squares(), train=train, runs=once(model), layers=lambda _: names)
    method = whence.Influence(damping=0.1, curvature="shampoo", fisher="exact", coupling=False)
    scores = method.attribute(study, query, **EXACT).values
    if tied:  # the bias is a layer of its own, which adds its own part
        bias = truth.columns[:, -6:].square().sum(0) / 9
        whole = Dense(model, train, query)
        expected = expected - (
            whole.query[:, -6:] / (bias + 0.1) @ whole.train[:, -6:].T
        ).numpy() / len(train)
    np.testing.assert_allclose(scores, expected, rtol=1e-8, atol=1e-10 * abs(expected).max())


# --- very wide layers -----------------------------------------------------------------------------

WIDE = ["Conv1d", "Conv1d, everything", "MultiheadAttention", "LSTM", "ConvTranspose1d, everything"]


@pytest.mark.parametrize("name", WIDE)
def test_wide_matrices_in_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients, and the matrix of all parameters, are the same."""
    monkeypatch.setattr(whence.layers.kind, "WIDEST", 3)
    model, train, query = made(name)
    check(model, train, query, layers="all")
    scores = influence(model, train, query, solver="cg", tolerance=1e-11, iterations=1000)
    truth = Dense(model, train, query)
    expected = truth.influence(truth.H, 0.1)
    np.testing.assert_allclose(scores, expected, rtol=1e-6, atol=1e-8 * abs(expected).max())
    study = whence.Study(model, Squares(), train=train, runs=once(model), layers="all")
    tracked = study.passes(study.runs[0], device=torch.device("cpu"), dtype=torch.float64)
    blocks = [b for b in tracked["train"].tracked.blocks if not b.rows]
    assert len(blocks) > 2 and all(b.o <= 3 and b.i <= 3 for b in blocks)


@pytest.mark.parametrize("curvature", ["kfac", "ekfac"])
def test_curvature_of_wide_matrices(curvature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Diagonal blocks of the dense covariances: A (6, 6) in 2 + 4, S (4, 4) in 2 + 2."""
    monkeypatch.setattr(whence.layers.kind, "WIDEST", 3)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    train, query = normal(9, 5), normal(3, 5, seed=1)
    truth = Dense(model, train, query)
    ones, weight, bias = torch.ones(9, 1).double(), slice(0, 20), slice(20, 24)
    a = torch.cat([train.tensors[0], ones], 1)
    s = truth.columns[:, bias].view(2, 9, 4)  # of the bias: at the output
    A, S = a.T @ a / 9, torch.einsum("cno,cnp->op", s, s) / 9
    same = torch.block_diag(torch.ones(2, 2), torch.ones(4, 4)).double()
    A, S = A * same, S * torch.block_diag(torch.ones(2, 2), torch.ones(2, 2)).double()
    G = torch.einsum("cno,ni->cnoi", s, a).flatten(0, 1)
    (values_S, Q_S), (values_A, Q_A) = torch.linalg.eigh(S), torch.linalg.eigh(A)
    values = torch.outer(values_S, values_A)
    if curvature == "ekfac":
        values = (Q_S.T @ G @ Q_A).square().sum(0) / 9
    Q = torch.kron(Q_S, Q_A)
    H = Q @ values.flatten().diag() @ Q.T

    def with_bias(rows: Tensor) -> Tensor:
        return torch.cat([rows[:, weight].view(-1, 4, 5), rows[:, bias, None]], 2).flatten(1)

    truth.query, truth.train = with_bias(truth.query), with_bias(truth.train)
    expected = truth.influence(H, 0.1)
    study = whence.Study(model, Squares(), train=train, runs=once(model), layers=["0"])
    settings = {"curvature": curvature, "fisher": "exact", "coupling": False}
    with pytest.warns(UserWarning, match="not chosen"):
        scores = whence.Influence(damping=0.1, **settings).attribute(study, query, **EXACT)
    np.testing.assert_allclose(scores.values, expected, rtol=1e-8)
    method = whence.Influence(damping=0.1, **settings)
    assert method.attribute(study, query, by_layer=True, **EXACT).layers == ["0"]


# --- recurrent layers -----------------------------------------------------------------------------


class Reader(nn.Module):
    """A language model, which reads both ways so that padding is between a text and its end."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(6, 3), nn.Linear(4, 6)
        self.lstm = nn.LSTM(3, 2, bidirectional=True, batch_first=True)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        lengths = attention_mask.sum(1).cpu()
        x = nn.utils.rnn.pack_padded_sequence(
            self.table(input_ids), lengths, batch_first=True, enforce_sorted=False
        )
        y, _ = nn.utils.rnn.pad_packed_sequence(
            self.lstm(x)[0], batch_first=True, total_length=input_ids.shape[1]
        )
        return self.head(y)


def texts(*lengths: int) -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(0, 6, (length,), generator=g)} for length in lengths]


@pytest.mark.parametrize("curvature", ["auto", "ekfac", "kfac"])
def test_recurrent_layers_do_not_depend_on_padding(curvature: str) -> None:
    torch.manual_seed(0)
    model, task = Reader().double(), whence.LanguageModeling()
    train, every = texts(5, 3, 7, 2, 6), []
    method = whence.Influence(damping=0.1, curvature=curvature, fisher="empirical")
    for size in (1, 2, 5):
        study = whence.Study(model, task, train, once(model), layers="all", collate=whence.padded)
        every.append(method.attribute(study, texts(4, 6), batch_size=size, **EXACT).values)
    np.testing.assert_allclose(every[1], every[0], rtol=1e-7)
    np.testing.assert_allclose(every[2], every[0], rtol=1e-7)


def test_tokens_of_recurrent_layers_add_up() -> None:
    torch.manual_seed(0)
    model, task, train = Reader().double(), whence.LanguageModeling(), texts(5, 3, 7)
    study = whence.Study(model, task, train, once(model), layers="all", collate=whence.padded)
    scores = whence.TracIn().attribute(study, texts(4, 6), **EXACT)
    (tokens,) = whence.TracIn().tokens(study, texts(4, 6), [2], **EXACT)
    assert tokens.values.shape == (2, 7) and not tokens.rest.any()
    np.testing.assert_allclose(tokens.values.sum(1), scores.values[:, 2], rtol=1e-9)


def test_a_step_of_a_recurrent_layer_belongs_to_its_token() -> None:
    """Of the reverse direction, the first step, from a state of zeros, is at the last token."""
    torch.manual_seed(0)
    model, each = Reader(), {}
    model.lstm = nn.LSTM(3, 2, bidirectional=True, batch_first=True, bias=False)
    model.double()
    for layer in ("weight_hh_l0", "weight_hh_l0_reverse"):  # trained alone
        how = {"groups": [[f"lstm.{layer}"]]}
        run = whence.Run.from_checkpoints([model.state_dict()], [1], 1.0, **how)
        options = {"layers": "all", "collate": whence.padded}
        study = whence.Study(model, whence.LanguageModeling(), texts(5), run, **options)
        (tokens,) = whence.TracIn().tokens(study, texts(4), [0], **EXACT)
        each[layer] = tokens.values[0] != 0
    assert each["weight_hh_l0"].tolist() == [False, True, True, True, False]
    assert each["weight_hh_l0_reverse"].tolist() == [True, True, True, True, False]


def _doubled(self: nn.LSTM, x: Tensor, hx: Any = None) -> Any:
    y, end = nn.LSTM.forward(self, x, hx)
    return y * 2, end


def test_a_recurrent_layer_with_a_forward_of_its_own_is_left_out_by_name() -> None:
    torch.manual_seed(0)
    model = Sequential(type("Mine", (nn.LSTM,), {"forward": _doubled})(3, 2)).double()
    scores = check(model, normal(7, 4, 3), normal(3, 4, 3, seed=1), ["layer"], layers="all")
    assert "its own forward" in reasons(scores)["layer"]


def test_one_sequence_for_all_examples_is_left_out_by_name() -> None:
    class Prompted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            _, (h, _) = self.lstm(x.new_ones(5, 3))
            return self.head(x * h)

    torch.manual_seed(0)
    model = Prompted().double()
    scores = check(model, normal(7, 4), normal(3, 4, seed=1), ["lstm"], layers="all")
    assert "not a sequence for each" in reasons(scores)["lstm"]


# --- a transformer, with every method -------------------------------------------------------------


def transformer(tied: bool = True) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    model = models.Transformer(tied=tied).double()
    return model, models.documents(9), models.documents(3, seed=1)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "not tied"])
def test_a_transformer_is_tracked_whole(tied: bool) -> None:
    model, train, query = transformer(tied)
    check(model, train, query, task=whence.LanguageModeling(), layers="all")


def test_positions_of_batches_with_as_many_examples_as_positions() -> None:
    """A table that is looked up once for all examples is not taken for one row per example."""
    model, train, query = transformer()
    length = len(train[0]["input_ids"])
    check(model, train, query, task=whence.LanguageModeling(), layers="all", batch_size=length)


def test_every_coordinate_in_a_store_is_the_gradient_itself(tmp_path: Any) -> None:
    model, train, query = transformer()
    task = whence.LanguageModeling()
    study = whence.Study(model, task, train=train, runs=once(model), layers="all")
    size = sum(p.numel() for p in model.parameters())
    store = whence.GradientStore.build(
        study, tmp_path / "store", projection="eigenbasis", dimension=size, **EXACT
    )
    scores = store.tracin(query, progress=False).values
    expected = whence.TracIn().attribute(study, query, **EXACT).values
    np.testing.assert_allclose(scores, expected, rtol=1e-8, atol=1e-10 * abs(expected).max())


def test_random_projections() -> None:
    """P g, with P written out and g by autograd."""
    model, train, _ = transformer()
    task = whence.LanguageModeling()
    study = whence.Study(model, task, train=train, runs=once(model), layers="all")
    passes = study.passes(study.runs[0], device=torch.device("cpu"), dtype=torch.float64)["train"]
    projection = Random(passes.tracked.blocks, 16, 0, passes.device, torch.float64)
    passes.load(study.runs[0].final)
    gathered = gather(passes, study.data["train"], np.arange(9), Signal("loss"))
    names = [name for name, _ in model.named_parameters()]
    gradients = rows(model.eval(), names, train, task.losses, task)
    parameters = dict(model.named_parameters())
    P = projection.lift(torch.eye(16, dtype=torch.float64))  # (d, o, width) of each block
    expected = torch.zeros(9, 16, dtype=torch.float64)
    for k, row in enumerate(gradients):
        parts = row.split([p.numel() for p in parameters.values()])
        named = {n: g.view_as(parameters[n]) for n, g in zip(names, parts, strict=True)}
        for layer in passes.tracked.layers:
            for block, G in zip(layer.blocks, layer.matrices(named), strict=True):
                expected[k] += (P[block.name] * G).sum((1, 2))
    np.testing.assert_allclose(projection.project(gathered), expected, rtol=1e-9, atol=1e-12)


def test_tokens_add_up() -> None:
    model, train, query = transformer()
    study = whence.Study(
        model, whence.LanguageModeling(), train=train, runs=once(model), layers="all"
    )
    method = whence.Source(segments=1)
    scores = method.attribute(study, query, **EXACT)
    (tokens,) = method.tokens(study, query, [2], **EXACT)
    total = tokens.values.sum(1) + tokens.rest
    np.testing.assert_allclose(total, scores.values[:, 2], rtol=1e-8)


# --- with the optimizer's preconditioner ----------------------------------------------------------


def test_functions_with_a_diagonal_between() -> None:
    """D^½ H D^½ + Δ of a table and of a norm, against the dense matrix of each."""
    g = torch.Generator().manual_seed(0)

    def positive(*shape: int) -> Tensor:
        return torch.rand(shape, generator=g, dtype=torch.float64) + 0.1

    Q, _ = torch.linalg.qr(torch.randn(3, 3, generator=g, dtype=torch.float64))
    factors = {
        "table": EigenFactors(positive(5, 3), Basis(None, Q)),
        "norm": EigenFactors(positive(4, 1), None),
    }
    D = BlockDiagonal({name: positive(*f.eigenvalues.shape) for name, f in factors.items()})
    v = {name: torch.randn(2, *x.shape, generator=g).double() for name, x in D.items()}
    shift = {"table": 0.3, "norm": 0.2}
    M = EKFAC(factors).whitened(D) + shift
    (decayed,) = M.apply([lambda x: torch.exp(-x)], BlockVectors(dict(v), dict.fromkeys(v)))
    damping = BlockDiagonal({name: positive(*x.shape) for name, x in D.items()})
    solved = M.inverse(damping) @ BlockVectors(dict(v), dict.fromkeys(v))
    for name, f in factors.items():
        rotation = Q if name == "table" else torch.eye(1).double()
        H = torch.block_diag(*[rotation @ row.diag() @ rotation.T for row in f.eigenvalues])
        root = D[name].flatten().sqrt()
        dense = root[:, None] * H * root + shift[name] * torch.eye(len(H)).double()
        flat = v[name].flatten(1)
        expected = flat @ torch.linalg.matrix_exp(-dense)
        np.testing.assert_allclose(decayed.matrix(name).flatten(1), expected, atol=1e-8)
        expected = torch.linalg.solve(dense + damping[name].flatten().diag(), flat.T).T
        np.testing.assert_allclose(solved.matrix(name).flatten(1), expected, atol=1e-8)


def test_adam_with_all_layers_does_not_depend_on_batches(tmp_path: Any) -> None:
    model, train, query = transformer()
    task = whence.LanguageModeling()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with whence.Recorder(tmp_path / "run", model, optimizer, checkpoints=2, total_steps=6):
        for k in range(6):
            batch = dense.batch_of([train[k], train[k + 1]])
            optimizer.zero_grad()
            task.losses(task.outputs(model, batch), batch).mean().backward()
            optimizer.step()
    study = whence.Study(model, task, train=train, runs=tmp_path / "run", layers="all")
    method = whence.Source(segments=2)
    every = [method.attribute(study, query, batch_size=k, **EXACT).values for k in (1, 4)]
    np.testing.assert_allclose(every[0], every[1], rtol=1e-6)
    assert np.isfinite(every[0]).all() and abs(every[0]).max() > 0


def test_heads_of_multihead_attention_add_up() -> None:
    model, train, query = made("TransformerEncoderLayer")
    study = whence.Study(model, Squares(), train=train, runs=once(model), layers="all")
    scores = whence.TracIn().attribute(study, query, by_layer="heads", **EXACT)
    np.testing.assert_allclose(scores.by_layer.sum(0), scores.values, rtol=1e-9)
    assert (
        "0.self_attn, head 1" in scores.layers and "0.self_attn.out_proj, head 0" in scores.layers
    )


# --- what is refused ------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "max_norm": (lambda: nn.Embedding(6, 4, max_norm=1.0), "max_norm"),
    "sparse": (lambda: nn.Embedding(6, 4, sparse=True), "sparse"),
    "by frequency": (lambda: nn.Embedding(6, 4, scale_grad_by_freq=True), "rest of the batch"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_embeddings_that_are_left_out_by_name(name: str) -> None:
    make, reason = REFUSED[name]
    torch.manual_seed(0)
    model = headed(make(), after=20).double()
    study = whence.Study(model, Waves(), train=ids(7, 5), runs=once(model), layers="all")
    with pytest.warns(UserWarning, match=reason):
        scores = whence.TracIn().attribute(study, ids(3, 5, seed=1), **EXACT)
    assert reason in reasons(scores)["0"]


def test_attention_with_weights_of_their_own_is_left_out_by_name() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, kdim=3, vdim=3, batch_first=True)
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            keys = x[..., :3]
            return self.head(self.attention(x, keys, keys, need_weights=False)[0].mean(1))

    torch.manual_seed(0)
    data = normal(7, 5, 4), normal(3, 5, 4, seed=1)
    scores = check(Wide().double(), *data, ["attention"], layers="all")
    assert "kdim" in reasons(scores)["attention"]


def test_a_norm_without_parameters() -> None:
    torch.manual_seed(0)
    model = headed(nn.Linear(4, 4), nn.LayerNorm(4, elementwise_affine=False), after=4).double()
    check(model, normal(7, 4), normal(3, 4, seed=1), layers="all")


def test_a_parameter_of_two_kinds_of_modules_is_left_out_by_name() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.other = nn.LayerNorm(4, bias=False), nn.RMSNorm(4)
            self.other.weight = self.norm.weight
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.other(self.norm(x))))

    torch.manual_seed(0)
    scores = check(Odd().double(), normal(7, 4), normal(3, 4, seed=1), ["norm"], layers="all")
    assert "tied to other" in reasons(scores)["norm"] or "tied to norm" in reasons(scores)["norm"]


class TwoKinds(nn.Module):
    """One weight, used as a matrix and as a weight of a recurrence."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.cell = nn.Linear(4, 4, bias=False), nn.RNNCell(4, 4, bias=False)
        self.cell.weight_hh = self.first.weight
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x, torch.tanh(self.first(x))))


class TwoLookups(nn.Module):
    """One table, of an embedding and of a bag."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.bag = nn.Embedding(6, SIZE), nn.EmbeddingBag(6, SIZE)
        self.bag.weight = self.table.weight
        self.head = nn.Linear(SIZE, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(x).mean(1)) * self.bag(x))


class ModelsOwn(nn.Module):
    """One weight, of a layer and of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.matrix = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x) + torch.tanh(x @ self.matrix))


@pytest.mark.parametrize(
    ("make", "data", "left_out"),
    [
        (TwoKinds, normal, ["first", "cell"]),
        (TwoLookups, ids, ["table"]),
        (ModelsOwn, normal, ["first", "(model)"]),
    ],
)
def test_a_weight_of_two_kinds_of_layers_is_left_out_by_name(
    make: Make, data: Any, left_out: list[str]
) -> None:
    torch.manual_seed(0)
    shape = (4,) if data is normal else (5,)
    model, train, query = make().double(), data(7, *shape), data(3, *shape, seed=1)
    scores = check(model, train, query, left_out, layers="all")
    assert re.search(r"is tied to [\w(]", reasons(scores)[left_out[0]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_recurrent_layers_in_half_precision(dtype: torch.dtype) -> None:
    """Weights in bfloat16; work in float32, and in bfloat16."""
    torch.manual_seed(0)
    model, task, train = Reader().bfloat16(), whence.LanguageModeling(), texts(5, 3, 7, 4)
    exact, rounded = (
        whence.TracIn()
        .attribute(
            whence.Study(m, task, train, once(m), layers="all", collate=whence.padded),
            texts(4, 6),
            dtype=d,
            progress=False,
        )
        .values
        for m, d in ((copy.deepcopy(model).double(), torch.float64), (model, dtype))
    )
    assert abs(rounded - exact).max() < 0.1 * abs(exact).max()


class Uses(nn.Module):
    """A parameter of this shape, and what is done with it."""

    def __init__(self, shape: tuple[int, ...], use: Callable[[nn.Parameter, Tensor], Tensor]):
        super().__init__()
        self.p, self.use = nn.Parameter(torch.randn(shape)), use
        self.first, self.head = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.use(self.p, self.first(x))).mean(1))


HANDLED: dict[str, tuple[tuple[int, ...], Callable[[nn.Parameter, Tensor], Tensor]]] = {
    "view": ((1, 6, SIZE), lambda p, x: x + p.view(6, SIZE)[:5]),
    "as many rows as examples": ((3, SIZE), lambda p, x: x[:, :3] + p),
    "from the left": ((SIZE,), lambda p, x: p - x / p.exp()),
    "in place": ((SIZE,), lambda p, x: x.mul(1).add_(p)),
    "repeat": ((1, SIZE), lambda p, x: torch.cat([p.repeat(len(x), 1, 1), x], 1)),
    "zeros": ((SIZE,), lambda p, x: torch.cat([p + x.new_zeros(len(x), 1, SIZE), x], 1)),
    "parts": ((2, SIZE), lambda p, x: x * p.softmax(0)[0] + p.unbind()[1]),
    "transpose": ((SIZE, 3), lambda p, x: x @ p @ p.T),
    "left factor": ((3, 5), lambda p, x: p @ x),
    "queries": (
        (2, SIZE),
        lambda p, x: F.scaled_dot_product_attention(p.unsqueeze(0).expand(len(x), -1, -1), x, x),
    ),
    "where": ((SIZE,), lambda p, x: torch.where(x > 0, x, p)),
}
LEFT_OUT: dict[str, tuple[tuple[int, ...], Callable[[nn.Parameter, Tensor], Tensor], str]] = {
    "rows by number": ((5, SIZE), lambda p, x: x + p[torch.arange(5).flip(0)], "getitem of shape"),
    "einsum": ((SIZE, SIZE), lambda p, x: torch.einsum("nti,io->nto", x, p), "einsum of shape"),
    "a constant": ((5, SIZE), lambda p, x: x + p * torch.ones(5, SIZE), "mul of shape (5, 4)"),
    "positions first": (
        (SIZE,),
        lambda p, x: (x.transpose(0, 1) * p).transpose(0, 1),
        "must match",
    ),
    "a number": ((), lambda p, x: x * p.item(), "fails with one for each"),
}


@pytest.mark.parametrize("name", HANDLED)
def test_a_parameter_beside_layers(name: str) -> None:
    """Its gradients are autograd's, whatever the size of a batch."""
    torch.manual_seed(0)
    model = Uses(*HANDLED[name]).double()
    for size in (1, 2, 3, 7):
        check(model, normal(7, 5, SIZE), normal(3, 5, SIZE, seed=1), batch_size=size)


@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_parameter_that_cannot_have_a_copy_per_example_is_left_out_by_name(name: str) -> None:
    torch.manual_seed(0)
    *how, reason = LEFT_OUT[name]
    model = Uses(*how).double()
    scores = check(model, normal(7, 5, SIZE), normal(3, 5, SIZE, seed=1), ["(model)"])
    assert reason in reasons(scores)["(model)"]


def test_a_way_that_loses_gradients_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs are right, and gradients are compared with those of the plain model."""
    of = OnePerExample.of
    monkeypatch.setattr(OnePerExample, "of", staticmethod(lambda each: of(each.detach())))
    torch.manual_seed(0)
    model = Uses(*HANDLED["view"]).double()
    scores = check(model, normal(7, 5, SIZE), normal(3, 5, SIZE, seed=1), ["(model)"])
    assert "its gradients differ" in reasons(scores)["(model)"]


def test_published_forms_track_matrices_alone_by_default() -> None:
    model, train, query = transformer(tied=False)
    run, task, options = once(model), whence.LanguageModeling(), EXACT
    study = whence.Study(model, task, train, run)
    chosen = whence.Study(model, task, train, run, layers="matrices")
    source, fast = whence.Source.published, whence.FastSource.published
    for form in (lambda: source(1), lambda: fast(1), whence.Influence.published):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is left out
            scores = form().attribute(study, query, **options)
            expected = form().attribute(chosen, query, **options)
        left_out = {"wte", "wpe", "h.0.ln_1", "h.0.ln_2", "ln_f"}
        assert {part["name"] for part in scores.excluded} == left_out
        np.testing.assert_array_equal(scores.values, expected.values)
    whole = whence.Influence().attribute(study, query, **options)  # after factors of matrices
    fresh = whence.Study(model, task, train, once(model), layers="all")
    assert whole.excluded == []
    np.testing.assert_array_equal(
        whole.values, whence.Influence().attribute(fresh, query, **options).values
    )
