"""Examples that see each other are refused, wherever they are in the data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import models
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import TensorDataset

import whence
from whence.data import Batches
from whence.layers.separate import Separation, pairs

N = 40
LABELS = torch.randint(0, 3, (N,), generator=torch.Generator().manual_seed(1))
PROGRESS: dict[str, Any] = {"progress": False}


def inputs(n: int = N) -> Tensor:
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(0))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return models.mlp((4, 6, 3))  # type: ignore[return-value]


class Changed(nn.Module):
    """A network whose input or output is changed by what the batch holds."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.net, self.how = net(), how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "divided by the maximum":
            x = x / x.abs().max()
        elif self.how == "centred":
            x = x - x.mean(0)
        elif self.how == "batch norm in training mode":
            x = F.batch_norm(x, None, None, training=True)
        elif self.how == "compared with the first":
            x = x - 0.1 * x[:1]
        elif self.how == "one example sees the others":  # only where the mark is
            x = torch.where(x[:, :1] > 50, x.mean(0, keepdim=True), x)
        elif self.how == "attention between examples":
            x = x + 0.05 * torch.softmax(x @ x.T, 1) @ x
        elif self.how == "sorted by size":
            x = x[x.abs().sum(1).argsort()]
        elif self.how == "dropout in evaluation mode":
            x = F.dropout(x, 0.3, training=True)
        elif self.how == "a counter":
            self.calls = getattr(self, "calls", 0) + 1
            x = x * (1 + 0.1 * (self.calls % 3))
        elif self.how == "the detached mean":
            x = x - 0.1 * x.mean(0).detach()
        elif self.how == "three at least":
            x = x + (0.1 * x.mean(0) if len(x) > 2 else 0)
        return self.net(x)


class Negatives(whence.Classification):
    """In-batch negatives: every other example of the batch adds to the loss."""

    def losses(self, outputs: Tensor, batch: Any) -> Tensor:
        return (
            super().losses(outputs, batch)
            + (outputs @ outputs.T).logsumexp(1)
            - (outputs.square().sum(1))
        )


class Shared(whence.Classification):
    """The mean of the batch's losses for each of its examples."""

    def losses(self, outputs: Tensor, batch: Any) -> Tensor:
        losses = super().losses(outputs, batch)
        return losses.mean().expand(len(losses))


class Hardest(whence.Classification):
    """The hardest example of a batch has twice the gradient; losses stay the same."""

    def losses(self, outputs: Tensor, batch: Any) -> Tensor:
        losses = super().losses(outputs, batch)
        return losses + (losses.max() - losses.max().detach())


def test_a_gradient_that_mixes_examples_is_refused() -> None:
    with pytest.raises(whence.WhenceError, match=r"gradient of train example .*do not mix"):
        attribute(net(), TensorDataset(inputs(), LABELS), Hardest())


class Alike(whence.Classification):
    """A few examples of a batch have the mean of their losses."""

    def losses(self, outputs: Tensor, batch: Any) -> Tensor:
        losses, few = super().losses(outputs, batch), batch[0][:, 1].abs() < 0.08
        return torch.where(few, (losses * few).sum() / few.sum().clamp(min=1), losses)


@pytest.mark.parametrize("seed", range(5))
def test_a_few_examples_that_see_each_other_are_refused(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(300, 4, generator=random)
    y = torch.randint(0, 3, (300,), generator=random)
    with pytest.raises(whence.WhenceError, match=r"loss of train example .*do not mix"):
        attribute(net(), TensorDataset(x, y), Alike())


class LateMixing(torch.autograd.Function):
    """The identity, whose backward pass gives each example some of the next one's gradient, in
    batches of some sizes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: Any) -> Tensor:
        ctx.sizes = sizes
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        mixed = 0.5 * gradient + 0.5 * gradient.roll(1, 0)
        return (mixed if ctx.sizes(len(gradient)) else gradient), None


class MixesBackward(nn.Module):
    def __init__(self, sizes: Any) -> None:
        super().__init__()
        self.net, self.sizes = net(), sizes

    def forward(self, x: Tensor) -> Tensor:
        hidden = LateMixing.apply(self.net[:2](x), self.sizes)
        return self.net[2:](hidden)


@pytest.mark.parametrize(
    "sizes", [lambda n: n >= 8, lambda n: n == 32, lambda n: n % 2 == 0 and n > 2, lambda n: n == 8]
)
def test_a_gradient_that_mixes_in_the_batch_of_some_size_is_refused(sizes: Any) -> None:
    """Batches have 32 examples, and the last one 8."""
    with pytest.raises(whence.WhenceError, match=r"gradient of (train|query) example .*do not mix"):
        attribute(MixesBackward(sizes), TensorDataset(inputs(), LABELS), batch_size=32)
    attribute(MixesBackward(lambda n: False), TensorDataset(inputs(), LABELS), batch_size=32)


def attribute(
    model: nn.Module,
    data: Any,
    task: Any = None,
    query: Any = None,
    batch_size: int | None = None,
    **options: Any,
) -> whence.Scores:
    state = model.state_dict()
    run = whence.Run.from_checkpoints([state, {k: t * 1.01 for k, t in state.items()}], [0, 5], 0.1)
    study = whence.Study(model, task or whence.Classification(), data, run, **options)
    query = data if query is None else query
    return whence.TracIn().attribute(study, query, batch_size=batch_size, **PROGRESS)


HOW = [
    "divided by the maximum",
    "centred",
    "batch norm in training mode",
    "compared with the first",
    "three at least",
    "attention between examples",
    "sorted by size",
    "dropout in evaluation mode",
    "a counter",
    "the detached mean",
]


@pytest.mark.parametrize("how", HOW)
def test_a_model_that_mixes_examples_is_refused(how: str) -> None:
    with pytest.raises(whence.WhenceError, match="do not mix"):
        attribute(Changed(how), TensorDataset(inputs(), LABELS))


@pytest.mark.parametrize("task", [Negatives(), Shared()])
def test_a_loss_that_mixes_examples_is_refused(task: whence.Task) -> None:
    with pytest.raises(whence.WhenceError, match=r"loss of train example .*do not mix"):
        attribute(net(), TensorDataset(inputs(), LABELS), task)


@pytest.mark.parametrize("at", [0, 7, 20, 39])
def test_one_example_that_sees_the_others_is_refused(at: int) -> None:
    """It is the largest of all; the others do not see each other."""
    x = inputs()
    x[at, 0] = 60.0
    with pytest.raises(whence.WhenceError, match=f"train example {at} .*do not mix"):
        attribute(Changed("one example sees the others"), TensorDataset(x, LABELS))


class Pooled(nn.Module):
    def __init__(self, masked: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mix, self.head = nn.Embedding(9, 4), nn.Linear(4, 5), nn.Linear(5, 3)
        self.masked = masked

    def forward(self, ids: Tensor) -> Tensor:
        x, mask = torch.tanh(self.mix(self.embed(ids))), (ids > 0).unsqueeze(2)
        pooled = (x * mask).sum(1) / mask.sum(1) if self.masked else x.mean(1)
        return self.head(pooled)


def texts(lengths: list[int]) -> list[tuple[Tensor, int]]:
    random = torch.Generator().manual_seed(0)
    return [
        (torch.randint(1, 9, (t,), generator=random), int(y))
        for t, y in zip(lengths, LABELS, strict=True)
    ]


def padded(rows: list[Any]) -> tuple[Tensor, Tensor]:
    ids, labels = zip(*rows, strict=True)
    return pad_sequence(list(ids), batch_first=True), torch.tensor(labels)


@pytest.mark.filterwarnings("ignore:.*parameters are tracked")
@pytest.mark.parametrize("odd", [{}, {30: 9}, {17: 2}])
def test_pooling_over_padding_is_refused(odd: dict[int, int]) -> None:
    """Also if all documents but one have the same length."""
    lengths = [odd.get(k, 5 + (k % 4 if not odd else 0)) for k in range(N)]
    with pytest.raises(whence.WhenceError, match=r"loss of train example .*do not mix"):
        attribute(Pooled(False), texts(lengths), collate=padded)
    attribute(Pooled(True), texts(lengths), collate=padded)


def test_queries_that_mix_are_refused_too() -> None:
    """Training documents are equally long, so nothing is padded there."""
    train, query = texts([5] * N), texts([5 + k % 3 for k in range(N)])
    with pytest.raises(whence.WhenceError, match=r"measurement of query example .*do not mix"):
        attribute(Pooled(False), train, query=query, collate=padded)


def test_a_model_that_fails_on_one_example() -> None:
    class Squeezed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x.squeeze()).reshape(-1, 3)[: len(x.squeeze().mean(1))]

    with pytest.raises(whence.WhenceError, match="cannot take one example alone"):
        attribute(Squeezed(), TensorDataset(inputs(), LABELS))


@pytest.mark.parametrize("scale", [1.0, 100.0, 1e-3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_separate_examples_pass(scale: float, dtype: torch.dtype) -> None:
    """Large logits leave gradients that are all rounding."""
    model = net()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(scale**0.5 if scale > 1 else 1)
    data = TensorDataset(inputs() * min(scale, 1), LABELS)
    state = model.state_dict()
    run = whence.Run.from_checkpoints([state, {k: t * 1.01 for k, t in state.items()}], [0, 5], 0.1)
    study = whence.Study(model, whence.Classification(), data, run)
    whence.TracIn().attribute(study, data, dtype=dtype, **PROGRESS)


def test_the_pairs_are_spread_and_extreme() -> None:
    lengths = [5] * 1000
    data = [(torch.ones(t), 0) for t in lengths]
    chosen = {k for pair in pairs(Batches("train", data)) for k in pair}
    assert {0, 1, 999} <= chosen and any(300 < k < 700 for k in chosen)
    assert pairs(Batches("train", data[:1])) == []


class Tokens(nn.Module):
    """Many tokens with much the same probability, and logits that depend on the batch in their
    last digits, as products on a GPU do."""

    def __init__(self, wobble: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(2000, 16), nn.Linear(16, 2000)
        nn.init.normal_(self.head.weight, std=0.25)
        self.wobble = wobble

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids)) * (1 + self.wobble * len(ids))


class MixedDraws(whence.LanguageModeling):
    """Pseudo-losses whose draws do not depend on the example alone."""

    def pseudo_losses(self, outputs: Tensor, batch: Any, uniform: Any) -> Tensor:
        return super().pseudo_losses(outputs, batch, lambda t: torch.rand(len(outputs), t).double())


class ScaledDraws(whence.LanguageModeling):
    """Pseudo-losses divided by the largest of the batch."""

    def pseudo_losses(self, outputs: Tensor, batch: Any, uniform: Any) -> Tensor:
        values = super().pseudo_losses(outputs, batch, uniform)
        return values / values.max()


def attribute_tokens(task: whence.Task, wobble: float) -> whence.Scores:
    model = Tokens(wobble)
    ids = torch.randint(0, 2000, (9, 256), generator=torch.Generator().manual_seed(0))
    run = whence.Run.from_checkpoints([model.state_dict()] * 2, [0, 5], 0.1)
    study = whence.Study(model, task, list(ids), run)
    return whence.Source(curvature="diagonal").attribute(study, list(ids[:2]), **PROGRESS)


def test_rounding_that_changes_a_drawn_token_is_no_mixing(monkeypatch: Any) -> None:
    asked = []
    compare = Separation.compare

    def counted(self: Any, indices: Any, together: Any, which: Any, value: Any, *more: Any) -> None:
        asked.append(max(abs(float(value(int(indices[k])) - together[k])) for k in which))
        compare(self, indices, together, which, value, *more)

    monkeypatch.setattr(Separation, "compare", counted)
    attribute_tokens(whence.LanguageModeling(), 3e-5)
    assert max(asked) > 0.05  # a token changed
    attribute_tokens(whence.LanguageModeling(), 0.0)


@pytest.mark.parametrize("task", [MixedDraws(), ScaledDraws()])
def test_pseudo_losses_that_mix_are_refused(task: whence.Task) -> None:
    with pytest.raises(whence.WhenceError, match=r"pseudo-loss of train example .* rest of its"):
        attribute_tokens(task, 0.0)
