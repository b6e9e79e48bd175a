"""Fingerprints are of what is read, example by example; data that moves is noticed."""

from __future__ import annotations

import hashlib
import sys
import types
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

import whence.data
from whence.data import Batches
from whence.persist.identity import digest

INPUTS = torch.arange(1200.0).reshape(600, 2)
LABELS = torch.arange(600) // 200


class Watched(Dataset):
    """A map-style dataset whose examples a test changes."""

    def __init__(self, count: int = 600) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, k: int) -> Any:
        return INPUTS[k % 600], LABELS[k % 600]


class OneNoisy(Watched):
    """Only this example is random."""

    noisy = 417

    def __getitem__(self, k: int) -> Any:
        x, y = super().__getitem__(k)
        return (x + torch.rand(2) if k == self.noisy else x), y


class Flipping(Watched):
    """A random flip of one class, half of the time."""

    def __getitem__(self, k: int) -> Any:
        x, y = super().__getitem__(k)
        return (x.flip(0) if y == 2 and np.random.rand() < 0.5 else x), y


class ShufflesAfterAPass(Watched):
    """Another order for every pass over the data."""

    def __init__(self) -> None:
        super().__init__()
        self.order, self.reads = np.arange(600), 0

    def __getitem__(self, k: int) -> Any:
        if self.reads and self.reads % 600 == 0:
            np.random.shuffle(self.order)
        self.reads += 1
        return super().__getitem__(int(self.order[k]))


class ShufflesInLen(Watched):
    def __init__(self) -> None:
        self.order = np.arange(600)

    def __len__(self) -> int:
        np.random.shuffle(self.order)
        return 600

    def __getitem__(self, k: int) -> Any:
        return super().__getitem__(int(self.order[k]))


def rare_collate(rows: list[Any]) -> Any:
    """Masks one number of a batch at random, as a collator of masked language models does."""
    x = torch.stack([row[0] for row in rows])
    x[np.random.randint(len(x))] = 0.0
    return x, torch.stack([row[1] for row in rows])


@pytest.mark.parametrize(
    "data",
    [
        lambda: Batches("train", OneNoisy()),
        lambda: Batches("train", Flipping()),
        lambda: Batches("train", ShufflesAfterAPass()),
        lambda: Batches("train", ShufflesInLen()),
        lambda: Batches("train", TensorDataset(INPUTS, LABELS), rare_collate),
        lambda: Batches("train", Flipping(50_000)),
        lambda: Batches("train", Subset(OneNoisy(), range(600))),
        lambda: Batches("train", hugging_face().with_transform(noise)),
        lambda: Batches("query", whence.Contrast(Watched(), OneNoisy()).examples),
    ],
)
@pytest.mark.parametrize("seed", range(5))
def test_data_that_moves_is_always_noticed(data: Any, seed: int) -> None:
    np.random.seed(seed)
    with pytest.warns(UserWarning, match="differs between two reads"):
        assert data().moving


@pytest.mark.parametrize(
    "data",
    [
        lambda: Watched(),
        lambda: Watched(50_000),
        lambda: TensorDataset(INPUTS, LABELS),
        lambda: [(x, int(y)) for x, y in zip(INPUTS, LABELS, strict=True)],
        lambda: hugging_face(),
    ],
)
def test_data_that_stays_is_not_warned_of(data: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, again = Batches("train", data()), Batches("train", data())
        assert not first.moving and first.fingerprint() == again.fingerprint()


def test_the_example_that_moves_is_named() -> None:
    with pytest.warns(UserWarning, match=r"train\[417\] differs"):
        Batches("train", OneNoisy()).fingerprint()


# --- whose fingerprint is believed --------------------------------------------------------------


class Arrow:
    """What of a `datasets.Dataset` is used here (the package is not installed everywhere)."""

    def __init__(self, transform: Any = None) -> None:
        self.columns = {"x": INPUTS.tolist(), "y": LABELS.tolist()}
        self.transform = transform
        self._fingerprint = hashlib.sha256(repr(self.columns).encode()).hexdigest()[:16]

    @property
    def format(self) -> dict[str, Any]:
        return {"type": None if self.transform is None else "custom"}

    def with_transform(self, transform: Any) -> Any:
        return type(self)(transform)

    def __len__(self) -> int:
        return 600

    def __getitem__(self, k: int) -> Any:
        row = {name: column[k] for name, column in self.columns.items()}
        if self.transform is None:
            return row
        several = self.transform({name: [value] for name, value in row.items()})
        return {name: values[0] for name, values in several.items()}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("datasets.arrow_dataset")
    module.Dataset = Arrow  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets.arrow_dataset", module)


def hugging_face() -> Any:
    return Arrow()


def noise(rows: Any) -> Any:
    return {"x": torch.rand(len(rows["x"]), 2), "y": torch.tensor(rows["y"])}


class Wrapper(Dataset):
    """Shows every attribute of the dataset inside, and other labels."""

    def __init__(self, inner: Any, last: int) -> None:
        self.inner, self.last = inner, last

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, k: int) -> Any:
        row = self.inner[k]
        return {"x": torch.tensor(row["x"]), "y": self.last if k == 599 else row["y"]}


class Subclass(Arrow):
    last = 0

    def __getitem__(self, k: Any) -> Any:
        row = super().__getitem__(k)
        return {"x": torch.tensor(row["x"]), "y": self.last if k == 599 else row["y"]}


class Claims(Watched):
    def __init__(self, last: float) -> None:
        super().__init__()
        self.last, self._fingerprint = last, "0123456789abcdef"

    def __getitem__(self, k: int) -> Any:
        x, y = super().__getitem__(k)
        return (x + self.last if k == 599 else x), y


def subclassed(last: int) -> Any:
    data = hugging_face()
    data.__class__ = type("Dataset", (Subclass,), {"last": last})
    return data


@pytest.mark.parametrize("make", [lambda n: Wrapper(hugging_face(), n), Claims, subclassed])
def test_only_a_dataset_itself_is_believed(make: Any) -> None:
    one, other = (Batches("train", make(last)).fingerprint() for last in (0, 1))
    assert one != other and "0123456789abcdef" not in (one, other)


def test_a_hugging_face_dataset_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    data = hugging_face()
    monkeypatch.setattr(Batches, "take", None)
    assert Batches("train", data).fingerprint() == data._fingerprint


# --- batches that are objects -------------------------------------------------------------------


@dataclass
class Graph:
    nodes: Tensor
    edges: list[Tensor]


class Plain:
    def __init__(self, nodes: Tensor) -> None:
        self.nodes = nodes

    def __repr__(self) -> str:
        return "Plain()"


class Slotted:
    __slots__ = ("nodes",)

    def __init__(self, nodes: Tensor) -> None:
        self.nodes = nodes


class Holder:
    def __init__(self, nodes: Tensor) -> None:
        self.nodes, self.again = {"deep": (nodes, [Plain(nodes)])}, self


def array_of_objects(nodes: Tensor) -> Any:
    array = np.empty(2, dtype=object)
    array[:] = [Plain(nodes), "text"]
    return array


class Tagged(Tensor):
    """A tensor with an attribute."""


class Labels(list):
    pass


class Named(str):
    def __repr__(self) -> str:
        return "Named(...)"


def tagged(content: Any, nodes: Tensor) -> Any:
    content.nodes = nodes
    return content


KINDS: dict[str, Any] = {
    "tensor with an attribute": lambda nodes: tagged(torch.ones(3).as_subclass(Tagged), nodes),
    "list with an attribute": lambda nodes: tagged(Labels([1, 2]), nodes),
    "text with its own repr": lambda nodes: Named(float(nodes.sum())),
    "record of arrays": lambda nodes: np.array([(nodes.numpy(),)], dtype=[("a", object)])[0],
    "conjugate": lambda nodes: torch.complex(nodes, nodes).conj(),
    "dataclass": lambda nodes: Graph(nodes, [nodes]),
    "plain": Plain,
    "slots": Slotted,
    "with a cycle": Holder,
    "array of objects": array_of_objects,
    "set": lambda nodes: {float(x) for x in nodes[::500]},
    "function": lambda nodes: lambda: nodes,
    "nested": lambda nodes: {"a": [Plain(nodes)], 3: None},
}


@pytest.mark.parametrize("kind", KINDS)
def test_objects_are_digested_field_by_field(kind: str) -> None:
    nodes = torch.zeros(5000)
    other = nodes.clone()
    other[2500] = 1e-6  # no repr shows it
    make = KINDS[kind]
    assert digest(make(nodes)) == digest(make(nodes.clone()))
    assert digest(make(nodes)) != digest(make(other))


def test_a_batch_of_objects_counts() -> None:
    class Graphs(Watched):
        def __init__(self, last: float) -> None:
            super().__init__()
            self.nodes = torch.zeros(600, 2000)
            self.nodes[599, 1000] = last

        def __getitem__(self, k: int) -> Any:
            return self.nodes[k]

    def collate(rows: list[Tensor]) -> Any:
        return Graph(torch.stack(rows), rows)

    prints = [Batches("train", Graphs(last), collate).fingerprint() for last in (0.0, 0.0, 1.0)]
    assert prints[0] == prints[1] != prints[2]


def test_views_are_digested_by_what_they_show() -> None:
    x = torch.complex(INPUTS, INPUTS)
    assert digest(x.conj()) == digest(x.conj().resolve_conj()) != digest(x)
    assert digest(x.conj().imag) == digest(-INPUTS)
    assert digest(torch.empty(3, device="meta")) == digest(torch.empty(3, device="meta"))


class ChangesLater(Watched):
    """Another brightness after a number of reads."""

    reads = 0

    def __getitem__(self, k: int) -> Any:
        self.reads += 1
        x, y = super().__getitem__(k)
        return x * (1 + self.reads // 1700), y


def test_data_that_changes_after_it_was_read() -> None:
    data = Batches("train", ChangesLater())
    assert not data.moving
    data.check_unchanged()
    assert not data.moving
    data.take(range(600))
    with pytest.warns(UserWarning, match=r"train\[512\] to \[599\] are not what they were"):
        data.check_unchanged()


def test_a_cycle_ends_and_content_in_it_counts() -> None:
    def ring(value: float) -> list[Any]:
        items: list[Any] = [value]
        items.append(items)
        return items

    assert digest(ring(1.0)) == digest(ring(1.0)) != digest(ring(2.0))


def test_few_examples_are_read_twice_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []

    class Counted(Watched):
        def __getitem__(self, k: int) -> Any:
            reads.append(k)
            return super().__getitem__(k)

    Batches("train", Counted(50_000)).fingerprint()
    assert len(reads) == 50_000 + 2 * whence.data.READ_TWICE


@pytest.mark.parametrize("length", [24.0, 2**62, RuntimeError("no idea")])
def test_lengths_that_make_no_sense(length: Any) -> None:
    class Odd(Watched):
        def __len__(self) -> int:
            if isinstance(length, Exception):
                raise length
            return length  # type: ignore[no-any-return]

    with pytest.raises(whence.WhenceError, match=r"^len\(train\) "):
        Batches("train", Odd())


def test_a_batch_that_contains_itself_is_refused() -> None:
    def collate(rows: list[Any]) -> Any:
        batch: list[Any] = [torch.stack([row[0] for row in rows])]
        batch.append(batch)
        return batch

    with pytest.raises(whence.WhenceError, match="collate function failed on train example 0"):
        Batches("train", Watched(), collate).take([0])
