"""Gradient norm, gradient cosine, BM25, LESS, TrackStar: against autograd and by hand."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from support import dense, models
from support.comparing import close
from torch import nn

import whence
from whence.engine.projected_space import ProjectedSpace
from whence.engine.workspace import ComputeOptions

EXACT: Any = {"dtype": torch.float64, "progress": False}
TRAIN, QUERY = models.vectors(12), models.vectors(3, seed=1)
EPSILON = 1e-3


def study_of(case: str) -> tuple[whence.Study, Any, models.History]:
    torch.manual_seed(0)
    model, task, train, query = models.CASES[case]()
    history = models.train_run(model, task, train, [2, 4], 0.1)
    study = whence.Study(model, task, train=train, runs=history.run, layers="matrices")
    return study, query, history


def adam_study() -> tuple[whence.Study, list[dict[str, torch.Tensor]], list[Any]]:
    """With two checkpoints and their second moments, made up."""
    torch.manual_seed(0)
    model = models.mlp().double()
    history = models.train_run(model, whence.Classification(), TRAIN, [2, 4], 0.1)
    moments = [{k: torch.rand_like(w) for k, w in c.items()} for c in history.checkpoints]
    run = whence.Run.from_checkpoints(
        history.checkpoints,
        history.steps,
        [0.1, 0.1, 0.3, 0.3],
        optimizer="adam",
        second_moments=moments,
        epsilon=EPSILON,
    )
    return (
        whence.Study(model, whence.Classification(), TRAIN, run),
        moments,
        history.checkpoints,
    )


def gradients(
    study: whence.Study, weights: Any, quantity: str, data: Any, scale: Any = None
) -> np.ndarray:
    """All tracked parameters' gradients as rows, (n, p)."""
    task = study.tasks["train"]
    blocks = dense.per_example_gradients(study.model, weights, task, quantity, data)
    rows = []
    for name in (block.name for block in tracked(study)):
        part = blocks[name.replace("[", ".").replace("]", "")]
        if scale is not None:
            v = dense.matrices(study.model, scale)[name]
            part = part / (v.double().sqrt() + EPSILON)
        rows.append(part.flatten(1))
    return torch.cat(rows, 1).numpy()


def tracked(study: whence.Study) -> Any:
    where: Any = {"device": torch.device("cpu"), "dtype": torch.float64, "quiet": True}
    return study.passes(study.runs[0], **where)["train"].tracked.blocks


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.array([[x @ y / math.sqrt(x @ x * (y @ y)) for y in b] for x in a])


@pytest.mark.parametrize("case", ["mlp", "conv", "gpt"])
def test_gradient_norm_and_cosine(case: str) -> None:
    study, query, history = study_of(case)
    weights, train = history.checkpoints[-1], study.train["train"]
    g, f = (
        gradients(study, weights, what, data)
        for what, data in (("losses", train), ("measurements", query))
    )
    sign = 1.0 if study.tasks["train"].higher_is_better else -1.0
    norms = whence.GradientNorm().attribute(study, query, batch_size=2, **EXACT)
    expected = sign * np.linalg.norm(g, axis=1)
    close(norms.values, np.stack([expected] * 3), 1e-9)
    close(whence.GradientNorm().attribute(study, **EXACT).values, expected, 1e-9)
    actual = whence.GradientCosine().attribute(study, query, by_layer=True, **EXACT)
    close(actual.values, -cosines(f, g), 1e-9)
    close(actual.by_layer.sum(0), actual.values, 1e-9)
    measured = gradients(study, weights, "measurements", train)
    expected = [-cosines(x[None], y[None])[0, 0] for x, y in zip(measured, g, strict=True)]
    close(whence.GradientCosine().attribute(study, **EXACT).values, expected, 1e-9)


def test_a_zero_gradient_has_no_angle() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3, bias=False))
    x = torch.cat([torch.zeros(1, 4), torch.randn(3, 4)])
    data = torch.utils.data.TensorDataset(x, torch.tensor([0, 1, 2, 0]))
    run = whence.Run.from_checkpoints([model.state_dict()], [1], 0.1)
    study = whence.Study(model, whence.Classification(), train=data, runs=run)
    actual = whence.GradientCosine().attribute(study, data, progress=False).values
    assert (actual[0] == 0).all() and (actual[:, 0] == 0).all() and (actual[1:, 1:] != 0).all()


def projection(study: whence.Study, dimension: int) -> np.ndarray:
    """P (d, p), from the identity."""
    method = whence.Trak(dimension=dimension)
    with torch.no_grad():
        options = ComputeOptions(dtype=torch.float64, progress=False)
        workspace = method.lay_out(study, study.runs[0], None, options)
        space = ProjectedSpace.random(workspace, dimension, True, 0)
        lifted = space.projection.parts[0].lift(torch.eye(dimension, dtype=torch.float64))
    return torch.cat([lifted[block.name].flatten(1) for block in tracked(study)], 1).numpy()


def test_less_is_the_angle_of_adams_steps() -> None:
    study, moments, checkpoints = adam_study()
    P, expected, selves = projection(study, 40), np.zeros((3, 12)), np.zeros(12)
    for weights, v, rate in zip(checkpoints, moments, (0.1, 0.3), strict=True):
        Γ = gradients(study, weights, "losses", TRAIN, v) @ P.T
        f = gradients(study, weights, "measurements", QUERY) @ P.T
        self = gradients(study, weights, "measurements", TRAIN) @ P.T
        expected -= rate * cosines(f, Γ)
        selves -= rate * cosines(self, Γ).diagonal()
    method = whence.LESS(dimension=40)
    close(method.attribute(study, QUERY, batch_size=5, **EXACT).values, expected, 1e-8)
    close(method.attribute(study, **EXACT).values, selves, 1e-8)


@pytest.mark.parametrize("unit_norm", [False, True])
@pytest.mark.parametrize("second_moments", [False, True])
@pytest.mark.parametrize("mixing", [None, 0.0, 0.3, 1.0])
def test_trackstar_with_every_option(
    unit_norm: bool, second_moments: bool, mixing: float | None
) -> None:
    study, moments, checkpoints = adam_study()
    P, v = projection(study, 20), moments[-1] if second_moments else None
    φ = gradients(study, checkpoints[-1], "losses", TRAIN, v) @ P.T
    f = gradients(study, checkpoints[-1], "measurements", QUERY, v) @ P.T
    if mixing is not None:
        R = mixing * f.T @ f / 3 + (1 - mixing) * φ.T @ φ / 12
        inverse = np.linalg.inv(R + 0.1 * np.trace(R) / 20 * np.eye(20))
        L = np.linalg.cholesky(inverse)  # any root gives the same inner products
        φ, f = φ @ L, f @ L
    expected = -(cosines(f, φ) if unit_norm else f @ φ.T)
    method = whence.TrackStar(
        20, mixing or 0.0, 0.1, unit_norm, second_moments, whiten=mixing is not None
    )
    close(method.attribute(study, QUERY, batch_size=5, **EXACT).values, expected, 1e-7)


def test_bm25_by_hand() -> None:
    study, query, _ = study_of("gpt")
    documents = [
        [
            int(token)
            for token, exists in zip(row["input_ids"], row["attention_mask"], strict=True)
            if exists
        ]
        for row in (study.train["train"][k] for k in range(6))
    ]
    asked = [
        [int(t) for t, e in zip(row["input_ids"], row["attention_mask"], strict=True) if e]
        for row in (query[k] for k in range(3))
    ]
    expected = by_hand(asked, documents, 1.2, 0.75)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Sparse")  # of PyTorch
        actual = whence.BM25().attribute(study, query, batch_size=4, **EXACT)
    close(actual.values, -expected, 1e-12)  # lower losses are better
    selves = by_hand(documents, documents, 1.2, 0.75).diagonal()
    close(whence.BM25().attribute(study, **EXACT).values, -selves, 1e-12)
    assert [e.example for e in actual.helpful(0, 1)] == [int(expected[0].argmax())]


def by_hand(asked: list[Any], documents: list[Any], k1: float, b: float) -> np.ndarray:
    mean = sum(map(len, documents)) / len(documents)
    values = np.zeros((len(asked), len(documents)))
    for q, words in enumerate(asked):
        for m, document in enumerate(documents):
            for word in words:
                df = sum(word in other for other in documents)
                idf = math.log(1 + (len(documents) - df + 0.5) / (df + 0.5))
                tf = Counter(document)[word]
                long = 1 - b + b * len(document) / mean
                values[q, m] += idf * tf * (k1 + 1) / (tf + k1 * long) if tf else 0.0
    return values


class Texts(list[Any]):
    pass


def test_bm25_of_words() -> None:
    torch.manual_seed(0)
    texts = ["The cat sat.", "A dog; the DOG!", "birds fly", "the the the"]
    ids = torch.arange(4).view(4, 1) % 5
    rows = [{"input_ids": i, "text": t} for i, t in zip(ids, texts, strict=True)]

    def collate(examples: list[Any]) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.stack([e["input_ids"].repeat(2) for e in examples])}

    model = models.Transformer()
    run = whence.Run.from_checkpoints([model.state_dict()], [1], 0.1)
    study = whence.Study(
        model, whence.LanguageModeling(), train=Texts(rows), runs=run, collate=collate
    )
    query = Texts([{"input_ids": ids[0], "text": "the dog sleeps"}])
    actual = whence.BM25(field="text", k1=2.0, b=0.5).attribute(study, query, **EXACT)
    words = [["the", "cat", "sat"], ["a", "dog", "the", "dog"], ["birds", "fly"], ["the"] * 3]
    close(actual.values, -by_hand([["the", "dog", "sleeps"]], words, 2.0, 0.5), 1e-12)
    with pytest.raises(whence.WhenceError, match="no text in a field 'words'"):
        whence.BM25(field="words").attribute(study, query, **EXACT)


def test_refused() -> None:
    study, query, _ = study_of("mlp")
    for call, message in (
        (lambda: whence.BM25().attribute(study, query, **EXACT), "no token ids"),
        (lambda: whence.BM25(k1=-1), "k1=-1"),
        (lambda: whence.BM25(b=2), "b=2"),
        (lambda: whence.LESS(dimension=0), "dimension=0"),
        (lambda: whence.TrackStar(mixing=2), "mixing=2"),
        (lambda: whence.TrackStar(damping=0), "damping=0"),
        (lambda: whence.TrackStar(dimension=4).attribute(study, **EXACT), "use mixing=0"),
        (lambda: whence.LESS(4).attribute(study, query, query_weights=[1, 1, 1]), "not linear"),
        (
            lambda: whence.GradientCosine().attribute(study, query, query_weights=[1, 1, 1]),
            "not linear",
        ),
    ):
        with pytest.raises(whence.WhenceError, match=message):
            call()


STAGED = {
    "gradient norm": whence.GradientNorm,
    "gradient cosine": whence.GradientCosine,
    "less": lambda **settings: whence.LESS(dimension=10, **settings),
    "trackstar": lambda **settings: whence.TrackStar(dimension=10, mixing=0.5, **settings),
}


@pytest.mark.parametrize("name", STAGED)
def test_a_stage_is_scored_as_among_all(name: str) -> None:
    torch.manual_seed(0)
    model, task = models.mlp().double(), whence.Classification()
    history = models.train_run(model, task, TRAIN, [2, 4], 0.1)
    stages = {"before": 2, "after": 4}
    run = whence.Run.from_checkpoints(history.checkpoints, [2, 4], 0.1, stages=stages)
    train = {"before": TRAIN, "after": models.vectors(5, seed=2)}
    study = whence.Study(model, task, train, run)
    every = STAGED[name]().attribute(study, QUERY, **EXACT)
    for stage, columns in (("before", slice(0, 12)), ("after", slice(12, 17))):
        one = STAGED[name](stage=stage).attribute(study, QUERY, **EXACT)
        assert len(one.train_ids) == len(train[stage])
        close(one.values, every.values[:, columns], 1e-9)


@pytest.mark.parametrize("name", ["less", "trackstar"])
def test_the_seed_decides_the_projection(name: str) -> None:
    study, *_ = adam_study()
    first, again, other = (
        STAGED[name](seed=seed).attribute(study, QUERY, **EXACT).values for seed in (0, 0, 1)
    )
    assert np.array_equal(first, again) and not np.allclose(first, other)
