"""Sums of queries, contrasts, query vectors of low rank: against the scores of single queries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from support import dense, models, transformers_models
from support.comparing import close
from torch import nn
from torch.utils.data import Subset

import whence
from benchmarks.models import GPT
from whence.engine.query_factors import plan
from whence.errors import FolderConflict
from whence.layers.kind import ParameterBlock
from whence.layers.rows import Rows
from whence.operators.products import FactoredReadout, leading

EXACT: Any = {"dtype": torch.float64, "progress": False}
METHODS: dict[str, Any] = {
    "source": lambda: whence.Source(2),
    "fast-source": lambda: whence.FastSource(2),
    "published": lambda: whence.Source.published(2),
    "influence": whence.Influence,
    "datainf": lambda: whence.Influence(solver="datainf"),
    "tracin": whence.TracIn,
    "trak": lambda: whence.Trak(dimension=4, damping=1e-3),
    "unrolled": whence.Unrolled,
    "hydra": whence.Hydra,
}


def study_blocks(study: whence.Study) -> Any:
    passes = study.passes(
        study.runs[0], device=torch.device("cpu"), dtype=torch.float64, quiet=True
    )
    return passes[study.stages[-1]].tracked.blocks


WEIGHTS = np.array([[1 / 3, 1 / 3, 1 / 3], [1.0, -1.0, 0.0]])


def study_of(case: str, layers: Any = None) -> tuple[whence.Study, Any]:
    torch.manual_seed(0)
    model, task, train, query = models.CASES[case]()
    start = {name: w.double().clone() for name, w in model.state_dict().items()}
    history = models.train_run(model, task, train, [2, 4, 6, 8], 0.1)
    everyone = [np.arange(len(train))] * 8  # the order within a batch does not matter
    run = whence.Run.from_checkpoints(
        history.checkpoints, history.steps, history.rates, initial=start, batches=everyone
    )
    return whence.Study(model, task, train=train, runs=run, layers=layers), query


@pytest.mark.parametrize("case", ["mlp", "conv", "gpt"])
@pytest.mark.parametrize("method", METHODS)
def test_a_sum_of_queries_has_the_sum_of_their_scores(method: str, case: str) -> None:
    study, query = study_of(case)
    each = METHODS[method]().attribute(study, query, **EXACT).values
    sums = METHODS[method]().attribute(study, query, query_weights=WEIGHTS, batch_size=2, **EXACT)
    close(sums.values, WEIGHTS @ each, 1e-8)
    assert sums.settings["query_weights"] == [2, 3]
    one = METHODS[method]().attribute(study, query, query_weights=WEIGHTS[0], **EXACT)
    close(one.values, WEIGHTS[:1] @ each, 1e-8)


@pytest.mark.parametrize("method", ["source", "influence", "tracin", "trak"])
@pytest.mark.parametrize("case", ["mlp", "conv", "gpt"])
def test_full_rank_is_exact_and_low_rank_says_what_it_loses(method: str, case: str) -> None:
    study, query = study_of(case)
    whole = METHODS[method]().attribute(study, query, **EXACT)
    full = METHODS[method]().attribute(study, query, query_rank=50, **EXACT)
    close(full.values, whole.values, 1e-9)
    assert full.diagnostics["query_factors"]["lost_energy"] < 1e-9
    low = METHODS[method]().attribute(study, query, query_rank=1, batch_size=2, **EXACT)
    about = low.diagnostics["query_factors"]
    assert about["rank"] == 1 and 0 <= about["lost_energy"] <= about["most_lost_energy"] <= 1
    assert set(about["lost_energy_by_layer"]) == {b.name for b in study_blocks(study)}


def test_leading_singular_vectors_are_those_of_the_svd() -> None:
    generator = torch.Generator().manual_seed(0)
    shape = 3, 30, 20
    matrices = torch.randn(shape, generator=generator, dtype=torch.float64)
    matrices *= torch.logspace(0, -3, 20, dtype=torch.float64)  # the spectrum decays
    left, right = leading(matrices, 4)
    for matrix, u, v in zip(matrices.numpy(), left.numpy(), right.numpy(), strict=True):
        U, σ, V = np.linalg.svd(matrix)
        close(u @ u.T, np.eye(4), 1e-12)
        close(u.T @ v, U[:, :4] * σ[:4] @ V[:4], 1e-3)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 6), (7, 3, 2), (2, 40, 3), (50, 3, 1)])
def test_both_contractions_of_factors(shape: tuple[int, int, int], bias: bool) -> None:
    """(n, t, q): some are cheaper by position, some multiplied out."""
    (n, t, q), o, i, r = shape, 9, 7, 2
    generator = torch.Generator().manual_seed(0)

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator, dtype=torch.float64)

    a, s, left, right = draw(n, t, i), draw(n, t, o), draw(q, r, o), draw(q, r, i + bias)
    readout = FactoredReadout.of(left, right, bias, torch.float64)
    inputs = torch.cat([a, torch.ones(n, t, 1)], 2) if bias else a
    expected = torch.einsum("qro,qrw,nto,ntw->qnt", left, right, s, inputs)
    close(readout.by_position(a, s), expected, 1e-12)
    total = torch.ones(q, n, dtype=torch.float64)
    readout.add_inner(total, a, s)
    close(total - 1, expected.sum(2), 1e-12)
    total = torch.ones(q, n, dtype=torch.float64)
    readout._add_expanded(total, a, s)
    close(total - 1, expected.sum(2), 1e-12)


def test_factors_of_a_lookup() -> None:
    """An embedding's one-hot output gradients are never formed."""
    (n, t, q), o, i, r = (5, 3, 4), 9, 7, 2
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(o, (n, t), generator=generator)
    a, left, right = (
        torch.randn(sizes, generator=generator, dtype=torch.float64)
        for sizes in ((n, t, i), (q, r, o), (q, r, i))
    )
    readout = FactoredReadout.of(left, right, False, torch.float64)
    one_hot = torch.nn.functional.one_hot(ids, o).double()
    expected = torch.einsum("qro,qrw,nto,ntw->qnt", left, right, one_hot, a)
    close(readout.by_position(a, Rows(ids, o)), expected, 1e-12)
    total = torch.zeros(q, n, dtype=torch.float64)
    readout.add_inner(total, a, Rows(ids, o))
    close(total, expected.sum(2), 1e-12)


@pytest.mark.parametrize("method", ["source", "influence", "tracin"])
def test_with_every_layer(method: str) -> None:
    study, query = study_of("gpt", "all")
    each = METHODS[method]().attribute(study, query, **EXACT)
    assert not each.excluded
    sums = METHODS[method]().attribute(study, query, query_weights=WEIGHTS, **EXACT)
    close(sums.values, WEIGHTS @ each.values, 1e-8)
    full = METHODS[method]().attribute(study, query, query_rank=50, **EXACT)
    close(full.values, each.values, 1e-9)
    low = METHODS[method]().attribute(study, query, query_rank=2, **EXACT)
    assert spearmanr(low.values[0], each.values[0]).statistic > 0.8
    parts = METHODS[method]().attribute(study, query, by_layer=True, **EXACT)
    close(parts.by_layer.sum(0), each.values, 1e-9)


def test_low_rank_scores_are_those_of_a_truncated_svd() -> None:
    """TracIn at one checkpoint: gradients by autograd, cut to rank 2 by NumPy, layer by layer."""
    torch.manual_seed(0)
    model, task, train, query = models.CASES["gpt"]()
    history = models.train_run(model, task, train, [4], 0.1)
    study = whence.Study(model, task, train=train, runs=history.run, layers="matrices")
    found = whence.TracIn().attribute(study, query, query_rank=2, batch_size=4, **EXACT)
    of = dense.per_example_gradients
    weights = history.checkpoints[0]
    measured = of(model, weights, task, "measurements", query)
    trained = of(model, weights, task, "losses", train)
    expected, lost, total = np.zeros(found.shape), np.zeros(3), np.zeros(3)
    for name, G in measured.items():
        if name not in found.diagnostics["query_factors"]["lost_energy_by_layer"]:
            continue
        U, σ, V = np.linalg.svd(G.numpy())
        rank = 2 if 2 * sum(G.shape[1:]) < G[0].numel() else None
        cut = U[..., :rank][..., : σ.shape[1]] * σ[:, None, :rank] @ V[:, :rank][:, : σ.shape[1]]
        expected -= 0.1 * np.einsum("qoi,noi->qn", cut, trained[name].numpy())
        total += (σ**2).sum(1)
        lost += 0 if rank is None else (σ[:, rank:] ** 2).sum(1)
    close(found.values, expected, 1e-5)
    about = found.diagnostics["query_factors"]
    assert about["lost_energy"] == pytest.approx((lost / total).mean(), rel=1e-4)
    assert about["most_lost_energy"] == pytest.approx((lost / total).max(), rel=1e-4)


@pytest.fixture(scope="module")
def small_gpt() -> tuple[whence.Study, Any]:
    torch.manual_seed(0)
    model = models.Transformer(vocabulary=32, width=32, heads=4, depth=2, tied=False)
    task, train = whence.LanguageModeling(), models.documents(60, 8, 32)
    history = models.train_run(model, task, train, [20, 40], 0.3, batch_size=8)
    study = whence.Study(model.float(), task, train=train, runs=history.run, layers="matrices")
    return study, models.documents(24, 8, 32, seed=1)


@pytest.mark.parametrize("method", ["source", "influence"])
def test_a_low_rank_ranks_as_whole_vectors_do(small_gpt: Any, method: str) -> None:
    study, query = small_gpt
    whole, low = (
        METHODS[method]().attribute(study, query, query_rank=rank, progress=False)
        for rank in (None, 8)
    )
    same = [spearmanr(a, b).statistic for a, b in zip(whole.values, low.values, strict=True)]
    assert np.mean(same) >= 0.99
    assert low.diagnostics["query_factors"]["most_lost_energy"] < 0.05 and not low.warnings
    with pytest.warns(UserWarning, match=r"query_rank=1 loses \d\d% of the energy"):
        lossy = METHODS[method]().attribute(study, query, query_rank=1, progress=False)
    assert any("query_rank=1 loses" in message for message in lossy.warnings)


def test_auto_takes_the_rank_that_fits(small_gpt: Any) -> None:
    """And queries that share a pass have the scores that they have alone."""
    study, query = small_gpt
    quiet = {"progress": False, "batch_size": 16}
    method = whence.Source(2)
    enough = method.attribute(study, query, query_rank="auto", **quiet)
    assert "query_factors" not in enough.diagnostics  # whole vectors fit
    tight = method.attribute(study, query, query_rank="auto", memory="9MB", **quiet)
    rank = tight.diagnostics["query_factors"]["rank"]
    assert 16 < rank < 64
    least = method.attribute(study, query, query_rank="auto", memory="1MB", **quiet)
    assert least.diagnostics["query_factors"]["rank"] == 16  # in several passes
    roomy = method.attribute(study, query, query_rank=16, **quiet)
    close(least.values, roomy.values, 1e-5)
    estimates = [
        method.estimate(study, query, query_rank=rank, memory="4MB", batch_size=16)
        for rank in (None, 4, 12)
    ]
    assert estimates[2]["seconds"] > estimates[1]["seconds"]
    assert estimates[1]["bytes"] < estimates[2]["bytes"] < estimates[0]["bytes"]


@pytest.mark.parametrize("sets", [1, 3])  # influence; SOURCE with three segments
def test_many_queries_of_gpt2_small_share_at_most_two_passes(sets: int) -> None:
    """481 queries on a GPU of which 120 GiB may be used; without weights."""
    with torch.device("meta"):
        model = GPT(depth=12, width=768, vocabulary=50257, length=1024, heads=12)
    blocks = [
        ParameterBlock(name, layer.out_features, layer.in_features, True, f"{name}.weight")
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear)
    ]
    assert len(blocks) == 48 and sum(block.size for block in blocks) == 85_017_600
    chosen = plan(blocks, 4, 120 * 2**30, 481, "auto", sets)
    assert chosen is not None and chosen.rank >= 16
    assert -(-481 // chosen.rows) <= 2
    assert chosen.numbers(blocks, sets) * 4 <= 120 * 2**30 / 2
    small = plan(blocks, 4, 16 * 2**30, 481, "auto", sets)
    assert small is not None and small.rank <= chosen.rank


@pytest.mark.parametrize("rank", [None, 2])
def test_sums_in_blocks_and_from_a_folder(tmp_path: Path, small_gpt: Any, rank: int | None) -> None:
    study, query = small_gpt
    weights = np.random.default_rng(0).normal(size=(9, 24)) * (np.arange(24) % 2)
    options: Any = {"query_weights": weights, "query_rank": rank, "progress": False}
    roomy = whence.Influence().attribute(study, query, **options)
    tight = whence.Influence().attribute(
        study, query, out=tmp_path, memory="1MB", batch_size=8, **options
    )
    close(tight.values, roomy.values, 1e-5)
    again = whence.Influence().attribute(study, query, out=tmp_path, **options)
    np.testing.assert_array_equal(again.values, tight.values)
    with pytest.raises(FolderConflict):
        other = options | {"query_weights": 2 * weights}
        whence.Influence().attribute(study, query, out=tmp_path, **other)


def test_a_contrast_is_the_difference_of_two_queries() -> None:
    study, query = study_of("gpt")
    a, b = Subset(query, [0, 1]), Subset(query, [2, 0])
    method = whence.Source(2)
    each = method.attribute(study, query, **EXACT).values
    found = method.attribute(study, whence.Contrast(a, b), **EXACT)
    close(found.values, each[[0, 1]] - each[[2, 0]], 1e-8)
    mean = method.attribute(study, whence.Contrast(a, b), query_weights=[0.5, 0.5], **EXACT)
    close(mean.values, found.values.mean(0, keepdims=True), 1e-8)
    tokens = method.tokens(study, whence.Contrast(a, b), [4], **EXACT)[0]
    close(tokens.values.sum(1) + tokens.rest, found.values[:, 4], 1e-8)
    with pytest.raises(whence.WhenceError, match="Contrast of 2 and 3 examples"):
        whence.Contrast(a, query)
    with pytest.raises(whence.WhenceError, match=r"write Contrast\(\[a\], \[b\]\)"):
        whence.Contrast(whence.completion([1], [2]), whence.completion([1], [3]))
    for wrapped in ([whence.Contrast(a, b)], [a[0], whence.Contrast(a, b)]):
        with pytest.raises(whence.WhenceError, match="query has a Contrast among its examples"):
            method.attribute(study, wrapped, **EXACT)


def test_sums_from_a_store(tmp_path: Path) -> None:
    study, query = study_of("mlp")
    store = whence.GradientStore.build(study, tmp_path, dimension=10, progress=False)
    for answer in (
        store.tracin,
        store.influence,
        store.source,
        lambda q, **o: store.trak(q, 1.0, **o),
    ):
        each = answer(query, progress=False).values
        close(answer(query, query_weights=WEIGHTS, progress=False).values, WEIGHTS @ each, 1e-5)


def test_refused_sums_and_ranks() -> None:
    study, query = study_of("mlp")
    source = whence.Source()
    for given, message in (
        ([1.0, 2.0], r"shape \(2,\), but there are 3 queries"),
        (np.ones((2, 2, 3)), r"shape \(2, 2, 3\)"),
        (np.ones((0, 3)), r"shape \(0, 3\)"),
        ([[1, 0, 0], [0, 0, 0]], r"query_weights\[1\] has only zeros"),
        ([1.0, np.nan, 0.0], r"not finite"),
        (["a", "b", "c"], "must be numbers"),
    ):
        with pytest.raises(whence.WhenceError, match=message):
            source.attribute(study, query, query_weights=given, **EXACT)
    for rank in (0, -1, 2.5, "low"):
        with pytest.raises(whence.WhenceError, match="query_rank"):
            source.attribute(study, query, query_rank=rank, **EXACT)
    for option in ({"query_weights": [1.0]}, {"query_rank": 2}):
        with pytest.raises(whence.WhenceError, match="self-influence has no queries"):
            source.attribute(study, **option, **EXACT)
    with pytest.raises(whence.WhenceError, match="RepSim, whose scores are not linear"):
        whence.RepSim().attribute(study, query, query_weights=WEIGHTS, **EXACT)
    for method in (whence.RepSim(), whence.Unrolled()):
        with pytest.raises(whence.WhenceError, match=f"means nothing to {method.name}"):
            method.attribute(study, query, query_rank=2, **EXACT)


# --- completions ----------------------------------------------------------------------------------


class Documents(list[Any]):
    """A dataset of `whence.completion`s."""


def completions(count: int, seed: int) -> Documents:
    generator = torch.Generator().manual_seed(seed)

    def draw(most: int) -> torch.Tensor:
        size = int(torch.randint(1, most + 1, (), generator=generator))
        return torch.randint(1, 32, (size,), generator=generator)

    return Documents(whence.completion(draw(4), draw(4)) for _ in range(count))


def completion_study() -> whence.Study:
    torch.manual_seed(0)
    model = models.Transformer(vocabulary=32, width=8, depth=1, tied=False)
    task, train = whence.LanguageModeling(measurement="log_prob"), completions(12, 0)
    history = models.train_run(model, task, train, [3, 6], 0.2, collate=whence.padded)
    return whence.Study(model, task, train=train, runs=history.run, collate=whence.padded)


def log_probability(model: Any, weights: Any, document: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean log probability of the completion, one token at a time."""
    ids, labels = document["input_ids"], document["labels"]
    logits = torch.func.functional_call(model, weights, (ids[None],))[0].log_softmax(-1)
    places = [k for k in range(1, len(ids)) if labels[k] != -100]
    return torch.stack([logits[k - 1, ids[k]] for k in places]).mean()


def test_why_this_completion_rather_than_that_one() -> None:
    """TracIn of a contrast of different lengths, by autograd, without padding or masks."""
    study, model = completion_study(), None
    a = Documents([whence.completion([3, 4, 5], [6, 7, 8, 9]), whence.completion([1], [2, 3])])
    b = Documents([whence.completion([3, 4, 5], [10]), whence.completion([1], [4])])
    found = whence.TracIn().attribute(study, whence.Contrast(a, b), by_layer=True, **EXACT)
    model, expected = study.model.double(), 0.0
    for checkpoint in study.runs[0].checkpoints:
        weights = checkpoint.weights()

        def gradient(document: Any, weights: Any = weights) -> dict[str, torch.Tensor]:
            of = torch.func.grad(lambda w: log_probability(model, w, document))
            return of(weights)

        for name in weights:
            if name.rsplit(".", 1)[0] not in found.layers:
                continue
            pairs = zip(a, b, strict=True)
            query = torch.stack([gradient(x)[name] - gradient(y)[name] for x, y in pairs])
            train = torch.stack([gradient(document)[name] for document in study.train["train"]])
            expected += 0.2 * (query.flatten(1) @ train.flatten(1).T).numpy()  # losses are -log p
    close(found.values, expected, 1e-8)


def test_a_prompt_has_no_loss() -> None:
    document = whence.completion([3, 4], torch.tensor([5, 6]))
    assert document["labels"].tolist() == [-100, -100, 5, 6]
    batch = whence.padded([document, whence.completion([1], [2])])
    assert batch["input_ids"].tolist() == [[3, 4, 5, 6], [1, 2, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch["labels"].tolist() == [[-100, -100, 5, 6], [-100, 2, -100, -100]]
    for prompt, answer in (([], [1]), ([1], [])):
        with pytest.raises(whence.WhenceError, match="both must have one"):
            whence.completion(prompt, answer)
    with pytest.raises(whence.WhenceError, match=r"input_ids of shape \(2,\) and labels"):
        whence.padded([{"input_ids": [1, 2], "labels": [1]}])


def test_documents_of_different_or_too_great_length() -> None:
    study = completion_study()
    whole = whence.Study(study.model, study.tasks["train"], study.train["train"], study.runs)
    with pytest.raises(whence.WhenceError, match=r"different sizes.*collate=.*whence\.padded"):
        whence.TracIn().attribute(whole, completions(2, 1), **EXACT)
    long = Documents([whence.completion(range(1, 6), range(1, 6))])  # the model has 8 positions
    with pytest.raises(whence.WhenceError, match="documents of 10 tokens"):
        whence.TracIn().attribute(study, long, **EXACT)


@pytest.mark.parametrize("make", ["gpt2", "llama"])
def test_a_table_of_positions_has_an_end(make: str) -> None:
    """Rotary positions have none."""
    pytest.importorskip("transformers")
    model = getattr(transformers_models, make)().double()
    most, task = model.config.max_position_embeddings, whence.LanguageModeling()
    ids = torch.ones(2, most + 1, dtype=torch.long)
    task.outputs(model, {"input_ids": ids[:, :most]})
    if make == "gpt2":
        with pytest.raises(
            whence.WhenceError, match=f"{most + 1} tokens, but the model has {most}"
        ):
            task.outputs(model, {"input_ids": ids})
    else:
        assert task.outputs(model, {"input_ids": ids}).shape[:2] == ids.shape


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("method", ["source", "influence", "tracin", "trak"])
def test_embeddings_norms_and_tied_heads_too(method: str, tied: bool) -> None:
    """Sums, ranks that lose nothing, layers and chosen examples, with everything tracked."""
    torch.manual_seed(0)
    model, task = models.Transformer(tied=tied), whence.LanguageModeling()
    train, query = models.documents(), models.documents(3, seed=1)
    history = models.train_run(model, task, train, [2, 4], 0.1)
    study = whence.Study(model, task, train=train, runs=history.run, layers="all")
    each = METHODS[method]().attribute(study, query, by_layer=True, **EXACT)
    assert not each.left_out[1] and "wte" in each.layers and "ln_f" in each.layers
    close(each.by_layer.sum(0), each.values, 1e-9)
    sums = METHODS[method]().attribute(study, query, query_weights=WEIGHTS, **EXACT)
    close(sums.values, WEIGHTS @ each.values, 1e-8)
    whole = METHODS[method]().attribute(study, query, query_rank=4, **EXACT)  # width 4
    close(whole.values, each.values, 1e-8)
    some = METHODS[method]().attribute(study, query, examples=[4, 1], **EXACT)
    close(some.values, each.values[:, [4, 1]], 1e-8)
