"""RepSim: representations and similarities worked out by hand from the model's own modules."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import dense, judged, models
from support.comparing import close
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import whence
from whence.methods.repsim import RepSim

EXACT: Any = {"dtype": torch.float64, "progress": False}
TRAIN, QUERY = models.vectors(12), models.vectors(3, seed=1)


def study_of(model: nn.Module, task: Any, train: Any, steps: int = 4) -> whence.Study:
    history = models.train_run(model, task, train, [2, steps], 0.1)
    return whence.Study(model, task, train=train, runs=history.run)


def similarity(metric: str, a: Tensor, b: Tensor) -> np.ndarray:
    """One pair at a time."""
    actual = np.empty((len(a), len(b)))
    for i, x in enumerate(a.detach().numpy()):
        for j, y in enumerate(b.detach().numpy()):
            if metric == "cosine":
                actual[i, j] = x @ y / (np.linalg.norm(x) * np.linalg.norm(y) or 1.0)
            elif metric == "dot":
                actual[i, j] = x @ y
            else:
                actual[i, j] = -((x - y) ** 2).sum()
    return actual


def hidden(model: nn.Module, data: TensorDataset) -> Tensor:
    """What a Sequential's last layer is given."""
    return model[:-1](data.tensors[0])  # type: ignore[index]


@pytest.fixture(scope="module")
def mlp() -> tuple[nn.Module, whence.Study]:
    torch.manual_seed(0)
    model = models.mlp()
    return model, study_of(model, whence.Classification(), TRAIN)


@pytest.mark.parametrize("metric", ["cosine", "dot", "l2"])
def test_metrics(mlp: Any, metric: str) -> None:
    model, study = mlp
    scores = RepSim(metric).attribute(study, QUERY, **EXACT)
    expected = similarity(metric, hidden(model, QUERY), hidden(model, TRAIN))
    close(scores.values, expected, 1e-10)
    alone = RepSim(metric).attribute(study, **EXACT)
    selves = similarity(metric, hidden(model, TRAIN), hidden(model, TRAIN)).diagonal()
    np.testing.assert_allclose(alone.values, selves, atol=1e-12)
    assert scores.diagnostics["representation"] == {"train": "4"}


def test_zeros_are_like_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3))
    nn.init.constant_(model[0].weight, 0.0)
    nn.init.constant_(model[0].bias, -1.0)
    run = whence.Run.from_checkpoints([model.state_dict()], [1], 0.1)
    study = whence.Study(model, whence.Classification(), train=TRAIN, runs=run)
    assert (RepSim().attribute(study, QUERY, progress=False).values == 0).all()


@pytest.mark.parametrize("measurement", ["margin", "loss"])
def test_similar_is_helpful_whatever_the_measurement(measurement: str) -> None:
    """And the values have the measurement's sign: what lowers a loss is negative."""
    torch.manual_seed(0)
    model = models.mlp()
    study = study_of(model, whence.Classification(measurement), TRAIN)
    scores = RepSim().attribute(study, QUERY, **EXACT)
    expected = similarity("cosine", hidden(model, QUERY), hidden(model, TRAIN))
    close(scores.values, expected if measurement == "margin" else -expected, 1e-10)
    for query in range(3):
        assert scores.helpful(query, k=1).examples == [int(expected[query].argmax())]


class HeadFirst(nn.Module):
    """Layers registered in another order than they are used in."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.body = nn.Linear(5, 3), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


def test_the_last_layer_is_the_one_that_runs_last() -> None:
    torch.manual_seed(0)
    model = HeadFirst()
    study = study_of(model, whence.Classification(), TRAIN)
    scores = RepSim("dot").attribute(study, QUERY, **EXACT)
    a, b = (torch.tanh(model.body(data.tensors[0])) for data in (QUERY, TRAIN))
    close(scores.values, similarity("dot", a, b), 1e-10)


def test_convolutions() -> None:
    torch.manual_seed(0)
    model, train, query = models.ConvNet(), models.images(), models.images(3, seed=1)
    study = study_of(model, whence.Classification(), train)
    given: dict[str, Tensor] = {}
    for name in ("head", "circular"):
        model.get_submodule(name).register_forward_hook(
            lambda module, inputs, output, name=name: given.update({name: inputs[0].clone()})
        )
    actual = {}
    for what, data in (("query", query), ("train", train)):
        model(data.tensors[0])
        actual[what] = given["head"], given["circular"].mean((2, 3))
    for k, layer in enumerate((None, "circular")):
        scores = RepSim("dot", layer).attribute(study, query, **EXACT)
        close(scores.values, similarity("dot", actual["query"][k], actual["train"][k]), 1e-10)


@pytest.mark.parametrize("tied", [True, False])
def test_documents_are_averaged_over_their_tokens(tied: bool) -> None:
    """Padding left out; the last layer is the head, tied or not."""
    torch.manual_seed(0)
    model = models.Transformer(tied=tied)
    train, query = models.documents(8), models.documents(3, seed=1)
    study = study_of(model, whence.LanguageModeling(), train)
    given: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda m, x, y: given.append(x[0]))
    rows = []
    for data in (query, train):
        kept = []
        for index in range(len(data)):
            batch = dense.batch_of([data[index]])
            given.clear()
            model(batch["input_ids"])
            kept.append(given[0][0, : int(batch["attention_mask"].sum())].mean(0))
        rows.append(torch.stack(kept))
    expected = -similarity("cosine", *rows)  # the measurement is a loss
    scores = RepSim().attribute(study, query, batch_size=3, **EXACT)
    close(scores.values, expected, 1e-10)
    named = RepSim(layer="ln_f").attribute(study, query, **EXACT)
    assert named.values.shape == (3, 8) and not np.allclose(named.values, expected)


class Pooled(whence.Classification):
    def representations(self, model: nn.Module, batch: Any) -> Tensor:
        return torch.relu(model[0](batch[0]))  # type: ignore[index]


def test_a_task_may_have_its_own(mlp: Any) -> None:
    model, study = mlp
    pooled = whence.Study(model, Pooled(), train=TRAIN, runs=study.runs[0])
    scores = RepSim("dot").attribute(pooled, QUERY, **EXACT)
    close(
        scores.values,
        similarity("dot", *(model[:2](data.tensors[0]) for data in (QUERY, TRAIN))),
        1e-10,
    )
    assert scores.diagnostics["representation"] == {"train": "Pooled.representations"}
    named = RepSim("dot", layer="4").attribute(pooled, QUERY, **EXACT)  # a layer that is named wins
    close(named.values, RepSim("dot").attribute(study, QUERY, **EXACT).values, 1e-10)


def test_runs_are_averaged(mlp: Any) -> None:
    model, study = mlp
    other = models.train_run(copy.deepcopy(model), whence.Classification(), TRAIN, [3], 0.3).run
    runs = [study.runs[0], other]
    task = whence.Classification()
    both = RepSim().attribute(whence.Study(model, task, train=TRAIN, runs=runs), QUERY, **EXACT)
    each = [
        RepSim().attribute(whence.Study(model, task, train=TRAIN, runs=run), QUERY, **EXACT).values
        for run in runs
    ]
    close(both.values, np.mean(each, 0), 1e-10)
    close(both.spread, np.std(each, 0, ddof=1), 1e-10)


class TwoHeads(nn.Module):
    def __init__(self, old: int = 4) -> None:
        super().__init__()
        self.body, self.more = nn.Linear(4, 4), nn.Linear(4, old)
        self.old, self.new = nn.Linear(old, 2), nn.Linear(4, 3)

    def forward(self, x: Tensor, head: str) -> Tensor:
        x = torch.tanh(self.body(x))
        return self.new(x) if head == "new" else self.old(torch.tanh(self.more(x)))


class Head(whence.Classification):
    def __init__(self, head: str) -> None:
        super().__init__()
        self.head = head

    def outputs(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0], self.head)


def staged(old: int) -> tuple[nn.Module, whence.Study, dict[str, TensorDataset]]:
    torch.manual_seed(0)
    model = TwoHeads(old).double()
    data = {"before": models.vectors(7, classes=2, seed=2), "after": models.vectors(5, seed=3)}
    run = whence.Run.from_checkpoints(
        [model.state_dict()] * 2, [3, 6], 0.1, stages={"before": 3, "after": 6}
    )
    tasks = {"before": Head("old"), "after": Head("new")}
    return model, whence.Study(model, tasks, train=data, runs=run), data


def test_each_stage_has_its_own_last_layer() -> None:
    model, study, data = staged(old=4)
    body = {k: torch.tanh(model.body(d.tensors[0])) for k, d in data.items()}
    before = torch.tanh(model.more(body["before"]))
    query = torch.tanh(model.body(QUERY.tensors[0]))
    expected = similarity("dot", query, torch.cat([before, body["after"]]))
    scores = RepSim("dot").attribute(study, QUERY, **EXACT)
    close(scores.values, expected, 1e-10)
    one = RepSim("dot", stage="after").attribute(study, QUERY, **EXACT)
    close(one.values, expected[:, 7:], 1e-10)
    shared = RepSim("dot", layer="body").attribute(study, QUERY, **EXACT)
    inputs = torch.cat([d.tensors[0] for d in data.values()])
    close(shared.values, similarity("dot", QUERY.tensors[0], inputs), 1e-10)


def test_stages_that_cannot_be_compared() -> None:
    _, study, _ = staged(old=6)
    with pytest.raises(ValueError, match=r"have 4 numbers, those of stage 'before' \(old\) 6"):
        RepSim().attribute(study, QUERY, **EXACT)


@pytest.mark.parametrize("options", [{"batch_size": 5}, {"memory": "1MB"}], ids=str)
def test_nothing_depends_on_batches(mlp: Any, options: Any) -> None:
    _, study = mlp
    plain = RepSim().attribute(study, QUERY, **EXACT).values
    close(RepSim().attribute(study, QUERY, **EXACT, **options).values, plain, 1e-10)


def test_top_and_parts(mlp: Any, tmp_path: Path) -> None:
    _, study = mlp
    plain = RepSim().attribute(study, QUERY, **EXACT)
    top = RepSim().attribute(study, QUERY, top=4, **EXACT)
    assert top.helpful(1, 4).examples == plain.helpful(1, 4).examples
    parts = RepSim().attribute(study, QUERY, by_segment=True, **EXACT)
    assert (parts.by_segment == plain.values[None]).all()
    stored = RepSim().attribute(study, QUERY, out=tmp_path / "scores", **EXACT)
    assert (whence.Scores.load(tmp_path / "scores").values == stored.values).all()


def test_the_model_is_left_alone(mlp: Any) -> None:
    model, study = mlp
    before = copy.deepcopy(model.state_dict())
    RepSim().attribute(study, QUERY, progress=False)
    assert all((before[k] == v).all() for k, v in model.state_dict().items())
    assert not any(m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RepSim("angle"), "metric='angle' is not known: use one of 'cosine', 'dot', 'l2'"),
        (lambda: RepSim(layer="body"), "layer='body' is not in the model: it has 0, 1, 2, 3, 4"),
        (lambda: RepSim(stage="tune"), "stage='tune' is not in the run"),
    ],
)
def test_bad_input(mlp: Any, make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make().attribute(mlp[1], QUERY, **EXACT)


def test_a_layer_that_is_not_run() -> None:
    _, study, _ = staged(old=4)
    with pytest.raises(ValueError, match="layer='old' is not called"):
        RepSim(layer="old").attribute(study, QUERY, **EXACT)


def test_a_bad_example_is_named(mlp: Any) -> None:
    model, study = mlp
    x, y = (t.clone() for t in TRAIN.tensors)
    x[5] = float("nan")
    bad = whence.Study(
        model, whence.Classification(), train=TensorDataset(x, y), runs=study.runs[0]
    )
    with pytest.raises(FloatingPointError, match="NaN or infinite for train example 5"):
        RepSim().attribute(bad, QUERY, **EXACT)


def test_on_digits() -> None:
    scores = RepSim().attribute(judged.study(100), judged.data()[1], progress=False)
    assert 0.15 < judged.judge(scores) < 0.45


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_the_same_on_a_gpu(mlp: Any) -> None:
    for metric in ("cosine", "dot", "l2"):
        expected = RepSim(metric).attribute(mlp[1], QUERY, **EXACT).values
        close(
            RepSim(metric).attribute(mlp[1], QUERY, device="cuda", **EXACT).values, expected, 1e-10
        )
