"""The datasets of the paper's tasks, as tensors of fixed shapes.

A file is read from $WHENCE_DATA, which has one folder for each dataset, else from the user's cache,
else it is downloaded into the cache. `SOURCES` describes each file and how to get it.
"""

from __future__ import annotations

import csv
import os
import shutil
import tempfile
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import TensorDataset

Pair = tuple[TensorDataset, TensorDataset]  # to train on, and queries
Stages = tuple[dict[str, TensorDataset], TensorDataset]  # two stages to train on, and queries
Texts = tuple[list[tuple[str, ...]], list[tuple[str, ...]]]

MEASURED = ("motor_UPDRS", "total_UPDRS")  # what Parkinsons' patients were rated
ANGLES = (0, 15, 30, 45, 60)  # of RotatedMNIST
SECOND_ANGLE = 30  # that of its second stage
CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
DOMAINS = ("art_painting", "cartoon", "photo", "sketch")
OBJECTS = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
NOISE = 0.3  # of the targets of the -N tasks
MOST_TEXTS = 51_200  # of GLUE, as in the paper
GLUE: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # columns of text, and the labels
    "RTE": (("sentence1", "sentence2"), ("entailment", "not_entailment")),
    "SST-2": (("sentence",), ("0", "1")),
    "QNLI": (("question", "sentence"), ("entailment", "not_entailment")),
}
WIKITEXT = {  # to train on: the queries that go with it
    "wiki.train.raw": "wiki.valid.raw",
    "wikitext103vocab.train_part.txt": "wikitext103vocab.valid.txt",
}


# --- files ----------------------------------------------------------------------------------------


def roots() -> list[Path]:
    """The folders that are searched for datasets: $WHENCE_DATA if it is set, and the cache."""
    given = os.environ.get("WHENCE_DATA")
    return ([Path(given)] if given else []) + [cache()]


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "whence"


def find(folder: str, *files: str) -> Path:
    """The first of these files that exists, downloaded if none does.

    A download writes the first of them.

    Raises:
        FileNotFoundError: with the file that is needed, and how to get it.
    """
    for root in roots():
        for file in files:
            if (root / folder / file).is_file():
                return root / folder / file
    source = SOURCES[folder]
    try:
        _download(folder)
        why = f"the download had no {files[0]}"
    except Exception as error:  # a package, the network or the site may fail in any way
        why = str(error) or repr(error)
    downloaded = cache() / folder / files[0]
    if downloaded.is_file():
        return downloaded
    wanted = Path(os.environ.get("WHENCE_DATA") or "$WHENCE_DATA") / folder / files[0]
    raise FileNotFoundError(
        f"{wanted} does not exist: put {source['what']} there, and set "
        f"WHENCE_DATA to the folder that has {folder} in it (or put it into "
        f"{cache() / folder}). To get it: {source['how']}. The download failed: {why}"
    )


def _download(folder: str) -> None:
    """Download a dataset's files into a temporary folder, then move them into the cache."""
    fetch = FETCH.get(folder)
    if fetch is None:
        raise RuntimeError("this dataset cannot be downloaded automatically")
    cache().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache(), prefix=".download-") as scratch:
        fetch(Path(scratch))
        (cache() / folder).mkdir(parents=True, exist_ok=True)
        for file in sorted(Path(scratch).iterdir()):
            if file.is_file():
                os.replace(file, cache() / folder / file.name)


def _broken(path: Path, folder: str, why: object) -> ValueError:
    return ValueError(
        f"{path} is not {SOURCES[folder]['what']} ({why}): delete it, and get it again: "
        f"{SOURCES[folder]['how']}"
    )


def _arrays(folder: str, path: Path, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """Arrays of an .npz file; `shapes` are those of one example."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in shapes}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise _broken(path, folder, error) from None
    for name, shape in shapes.items():
        if arrays[name].shape[1:] != shape or arrays[name].dtype.kind not in "iu":
            raise _broken(path, folder, f"{name} is {arrays[name].dtype} {arrays[name].shape}")
    return arrays


def _table(folder: str, file: str) -> tuple[Path, list[str], NDArray[np.float64]]:
    """Column names and numbers of a .csv file."""
    path = find(folder, file)
    try:
        names = path.read_text().split("\n", 1)[0].strip().replace('"', "").split(",")
        rows = np.loadtxt(path, delimiter=",", skiprows=1, ndmin=2)
    except (OSError, ValueError) as error:
        raise _broken(path, folder, error) from None
    if len(rows) < 2 or rows.shape[1] != len(names) or not np.isfinite(rows).all():
        raise _broken(path, folder, f"a table of {rows.shape} under {len(names)} names")
    return path, names, rows


# --- tables ---------------------------------------------------------------------------------------


def digits(train: int = 1500) -> Pair:
    """scikit-learn's 8 × 8 digits, shuffled once: `train` to train on, the rest as queries."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    x = torch.from_numpy(images[order].astype(np.float32) / 16)
    y = torch.from_numpy(labels[order].astype(np.int64))
    return TensorDataset(x[:train], y[:train]), TensorDataset(x[train:], y[train:])


def concrete(noisy: bool = False) -> Pair:
    """UCI Concrete: 8 features and a target, standardised; nine tenths to train on.

    Args:
        noisy: replace 30 % of the training targets by draws from N(0, 1) (Concrete-N).
    """
    path, names, rows = _table("concrete", "concrete.csv")
    if len(names) != 9:
        raise _broken(path, "concrete", f"{len(names)} columns")
    train, query = _regression(rows)
    if noisy:
        targets, random = train.tensors[1], np.random.default_rng(1)
        chosen = random.choice(len(targets), round(NOISE * len(targets)), replace=False)
        targets[chosen] = torch.from_numpy(random.standard_normal((len(chosen), 1))).float()
    return train, query


def parkinsons() -> Pair:
    """UCI Parkinsons telemonitoring: 19 features and total_UPDRS, standardised.

    The paper does not name the target. The other rating and the patient's number, which would
    reveal the target, are excluded from the features.
    """
    path, names, rows = _table("parkinsons", "parkinsons_updrs.csv")
    out = [name for name in names if name in (*MEASURED, "subject#")]
    if "total_UPDRS" not in out or len(names) - len(out) != 19:
        raise _broken(path, "parkinsons", f"its columns are {names}")
    features = [k for k, name in enumerate(names) if name not in out]
    return _regression(rows[:, [*features, names.index("total_UPDRS")]])


def pima() -> Pair:
    """Pima diabetes: 8 standardised features, 2 classes; nine tenths to train on."""
    path, names, rows = _table("pima", "pima_diabetes.csv")
    if len(names) != 9 or set(rows[:, -1]) != {0.0, 1.0}:
        raise _broken(path, "pima", f"{len(names)} columns, labels {sorted(set(rows[:, -1]))[:5]}")
    rows, cut = _shuffled(rows)
    x = torch.from_numpy(_standardised(rows[:, :-1], cut)).float()
    return _cut(cut, x, torch.from_numpy(rows[:, -1].astype(np.int64)))


def _regression(rows: NDArray[np.float64]) -> Pair:
    """Shuffled once and standardised by the training rows; the last column is the target."""
    rows, cut = _shuffled(rows)
    table = torch.from_numpy(_standardised(rows, cut)).float()
    return _cut(cut, table[:, :-1].contiguous(), table[:, -1:].contiguous())


def _shuffled(rows: NDArray[np.float64]) -> tuple[NDArray[np.float64], int]:
    return rows[np.random.default_rng(0).permutation(len(rows))], len(rows) * 9 // 10


def _standardised(rows: NDArray[np.float64], cut: int) -> NDArray[np.float64]:
    standardised: NDArray[np.float64] = (rows - rows[:cut].mean(0)) / rows[:cut].std(0)
    return standardised


def _cut(at: int, *columns: Tensor) -> Pair:
    return TensorDataset(*(c[:at] for c in columns)), TensorDataset(*(c[at:] for c in columns))


# --- images ---------------------------------------------------------------------------------------


def images(name: str, train: int = 6000, test: int = 2000, noisy: bool = False) -> Pair:
    """The first images of either split, flat, from 0 to 1.

    Args:
        name: "mnist" or "fashion_mnist".
        noisy: give 30 % of the training images a label drawn from all ten (FashionMNIST-N); by
            chance, a tenth of these keep theirs.
    """
    if name not in ("mnist", "fashion_mnist"):
        raise ValueError(f"images({name!r}): choose 'mnist' or 'fashion_mnist'")
    sets = _splits(name, (f"{name}.npz",), (28, 28), train, test)
    (x, y), (a, b) = ((flat.flatten(1).float() / 255, labels) for flat, labels in sets)
    if noisy:
        random = np.random.default_rng(1)
        chosen = random.choice(len(y), round(NOISE * len(y)), replace=False)
        y[chosen] = torch.from_numpy(random.integers(0, 10, len(chosen)))
    return TensorDataset(x, y), TensorDataset(a, b)


def rotated_mnist(train: int = 12_500, test: int = 2000) -> Stages:
    """RotatedMNIST as DomainBed makes it: after a shuffle, image i is turned by angle i mod 5.

    The first stage has the images turned by 0, 15, 45 and 60 degrees, the second those by 30, and
    the queries are test images turned by 30. Images are flat, from 0 to 1.

    Args:
        train: images of both stages together.
        test: queries.
    """
    (x, y), (a, b) = _splits("mnist", ("mnist.npz",), (28, 28), None, test)
    if not 5 <= train <= len(x):
        raise ValueError(f"train={train}: choose from 5 to {len(x)} images")
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(x))[:train])
    x, y, turned = x[order], y[order], torch.arange(train) % len(ANGLES)
    for k, angle in enumerate(ANGLES):
        x[turned == k] = rotate_bytes(x[turned == k], angle)
    late = turned == ANGLES.index(SECOND_ANGLE)
    stages = {
        "first": TensorDataset(x[~late].flatten(1) / 255, y[~late]),
        "second": TensorDataset(x[late].flatten(1) / 255, y[late]),
    }
    return stages, TensorDataset(rotate_bytes(a, SECOND_ANGLE).flatten(1) / 255, b)


def rotate_bytes(images: Tensor, degrees: float) -> Tensor:
    """Images of uint8, truncated to uint8 as Pillow does: the same on every machine."""
    return (rotate(images.double(), degrees) + 1e-6).to(torch.uint8)


def rotate(images: Tensor, degrees: float) -> Tensor:
    """Square images (n, h, h), rotated counter-clockwise about their centre; new pixels are 0."""
    turn = torch.tensor(np.deg2rad(degrees), dtype=images.dtype)
    cos, sin = turn.cos(), turn.sin()
    # the position in the old image of each pixel of the new one; rows count downwards
    back = torch.stack([cos, -sin, cos * 0, sin, cos, cos * 0]).reshape(1, 2, 3)
    grid = F.affine_grid(back.expand(len(images), -1, -1), [*images.unsqueeze(1).shape], False)
    turned: Tensor = F.grid_sample(images.unsqueeze(1), grid, "bilinear", "zeros", False)
    return turned.squeeze(1)


def cifar10(train: int = 10_000, test: int = 2000) -> Pair:
    """CIFAR-10's first images, (n, 3, 32, 32), with each channel standardised."""
    files = ("cifar10.npz", "cifar10_subset.npz")
    mean, std = (torch.tensor(c).view(1, 3, 1, 1) for c in (CIFAR10_MEAN, CIFAR10_STD))
    sets = [
        TensorDataset((x.movedim(-1, 1).float() / 255 - mean) / std, y)
        for x, y in _splits("cifar10", files, (32, 32, 3), train, test)
    ]
    return sets[0], sets[1]


def _splits(
    folder: str, files: Sequence[str], shape: tuple[int, ...], train: int | None, test: int
) -> list[tuple[Tensor, Tensor]]:
    """The first images (n, ...), of type uint8, and their labels, of either split."""
    path, splits = find(folder, *files), []
    shapes = {"train_images": shape, "train_labels": (), "test_images": shape, "test_labels": ()}
    arrays = _arrays(folder, path, shapes)
    for split, count in (("train", train), ("test", test)):
        x, y = arrays[f"{split}_images"], arrays[f"{split}_labels"]
        if len(x) != len(y):
            raise _broken(path, folder, f"{len(x)} {split} images, {len(y)} labels")
        if count is not None and not 1 <= count <= len(x):
            raise ValueError(
                f"{split}={count}: {path} holds {len(x)} images of it; for more, put "
                f"{SOURCES[folder]['what']} in its place: {SOURCES[folder]['how']}"
            )
        labels = torch.from_numpy(y[:count].astype(np.int64))
        splits.append((torch.from_numpy(x[:count]), labels))
    return splits


def pacs(test: int = 400) -> Stages:
    """PACS at 64 × 64, (n, 3, 64, 64), from -1 to 1: cartoons, photos and sketches first, then art
    paintings, of which a random part are queries and not trained on.

    Args:
        test: queries.
    """
    path = find("pacs", "pacs_64.npz")
    arrays = _arrays("pacs", path, {"images": (64, 64, 3), "domain": (), "label": ()})
    domain, labels = (torch.from_numpy(arrays[k].astype(np.int64)) for k in ("domain", "label"))
    if not len(arrays["images"]) == len(domain) == len(labels):
        raise _broken(path, "pacs", "images, domains and labels differ in number")
    pixels = torch.from_numpy(arrays["images"])

    def these(rows: Tensor) -> TensorDataset:
        scaled = pixels[rows].movedim(-1, 1).float().div_(127.5).sub_(1)
        return TensorDataset(scaled.contiguous(), labels[rows])

    painted = domain == DOMAINS.index("art_painting")
    paintings = painted.nonzero().squeeze(1)
    if not 1 <= test < len(paintings):
        raise ValueError(f"test={test}: choose from 1 to {len(paintings) - 1} of the art paintings")
    asked = torch.zeros_like(painted)
    asked[paintings[np.random.default_rng(0).permutation(len(paintings))[:test]]] = True
    stages = {"first": these(~painted), "second": these(painted & ~asked)}
    return stages, these(asked)


def pack_pacs(folder: str | os.PathLike[str]) -> Path:
    """Write pacs_64.npz into the cache, from the published images, folder/DOMAIN/OBJECT/*.jpg."""
    from PIL import Image

    packed: dict[str, list[Any]] = {"images": [], "domain": [], "label": []}
    for d, domain in enumerate(DOMAINS):
        for k, thing in enumerate(OBJECTS):
            files = sorted((Path(folder) / domain / thing).glob("*.[jp][pn]g"))
            if not files:
                raise FileNotFoundError(f"no images in {Path(folder) / domain / thing}")
            for file in files:
                with Image.open(file) as image:
                    small = image.convert("RGB").resize((64, 64), Image.Resampling.BILINEAR)
                packed["images"].append(np.asarray(small))
                packed["domain"].append(d)
                packed["label"].append(k)
    into = cache() / "pacs"
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into) as scratch:
        archive = Path(scratch) / "pacs_64.npz"
        arrays: dict[str, Any] = {k: np.asarray(v, np.uint8) for k, v in packed.items()}
        np.savez_compressed(archive, **arrays)
        return archive.replace(into / archive.name)


# --- texts ----------------------------------------------------------------------------------------


def glue(name: str, length: int, train: int | None = None) -> Pair:
    """A GLUE task as (ids, mask, types, label): three of (n, length), in BERT's tokens.

    Texts that are too long lose the end of their longer sentence. The queries are the development
    split. If QNLI has only a dev.tsv, it is shuffled and split: 4,000 examples to train on.

    Args:
        name: "RTE", "SST-2" or "QNLI".
        length: tokens, with padding.
        train: number of training examples (default: at most 51,200, as in the paper).
    """
    sentences, tokenizer, sets = _glue(name, train), _wordpiece(), []
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length)
    for texts, labels in sentences:
        encoded = tokenizer.encode_batch([t if len(t) > 1 else t[0] for t in texts])
        columns = ([e.ids for e in encoded], [e.attention_mask for e in encoded])
        types = [e.type_ids for e in encoded]
        sets.append(TensorDataset(*(torch.tensor(c) for c in (*columns, types, labels))))
    return sets[0], sets[1]


def _wordpiece() -> Any:
    from tokenizers import BertWordPieceTokenizer

    vocabulary = find("tokenizers/bert_uncased", "vocab.txt")
    try:
        return BertWordPieceTokenizer(str(vocabulary), lowercase=True)
    except Exception as error:  # the tokenizers library raises plain ones
        raise _broken(vocabulary, "tokenizers/bert_uncased", error) from None


def glue_texts(name: str, train: int | None = None) -> Texts:
    """The sentences of `glue`'s examples, in their order."""
    (train_texts, _), (query_texts, _) = _glue(name, train)
    return train_texts, query_texts


def _glue(name: str, train: int | None) -> list[tuple[list[tuple[str, ...]], list[int]]]:
    """Texts and labels to train on, and those of the queries."""
    if name not in GLUE:
        raise ValueError(f"glue({name!r}): choose one of {', '.join(GLUE)}")
    dev = find(f"glue/{name}", "dev.tsv")
    train_file = dev.with_name("train.tsv")
    if name == "QNLI" and not train_file.is_file():
        texts, labels = _sentences(name, dev)
        order = np.random.default_rng(0).permutation(len(texts))
        count = 4000 if train is None else train
        if not 1 <= count < len(texts):
            raise ValueError(f"train={count}: choose from 1 to {len(texts) - 1} of {dev}")
        return [
            ([texts[k] for k in half], [labels[k] for k in half])
            for half in (order[:count], order[count:])
        ]
    texts, labels = _sentences(name, find(f"glue/{name}", "train.tsv"))
    count = min(MOST_TEXTS, len(texts)) if train is None else train
    if not 1 <= count <= len(texts):
        raise ValueError(f"train={count}: choose from 1 to {len(texts)} of {train_file}")
    return [(texts[:count], labels[:count]), _sentences(name, dev)]


def _sentences(name: str, path: Path) -> tuple[list[tuple[str, ...]], list[int]]:
    columns, classes = GLUE[name]
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
        texts = [tuple(row[column] or "" for column in columns) for row in rows]
        return texts, [classes.index(row["label"]) for row in rows]
    except (OSError, ValueError, KeyError, csv.Error) as error:
        raise _broken(path, f"glue/{name}", error) from None


def wikitext2(length: int = 512) -> Pair:
    """WikiText-2 in GPT-2's tokens, as transformers' run_clm_no_trainer makes it: lines are
    tokenised, put one after the other, and cut into blocks (n, length).

    Where there is no wiki.train.raw, part of WikiText-103 takes the place of its training split
    (wikitext103vocab.train_part.txt). The queries are of the validation split.
    """
    tokenizer = _bpe()
    train, valid = (TensorDataset(_blocks(path, tokenizer, length)) for path in _wikitext())
    return train, valid


def wikitext2_texts(length: int = 512) -> tuple[list[str], list[str]]:
    """The text of each of `wikitext2`'s blocks."""
    train, query = (s.tensors[0].tolist() for s in wikitext2(length))
    tokenizer = _bpe()
    return tokenizer.decode_batch(train), tokenizer.decode_batch(query)


def _wikitext() -> tuple[Path, Path]:
    train = find("wikitext2", *WIKITEXT)
    valid = train.with_name(WIKITEXT[train.name])
    if not valid.is_file():
        raise FileNotFoundError(f"{valid} does not exist: it belongs to {train.name}")
    return train, valid


def _bpe() -> Any:
    from tokenizers import ByteLevelBPETokenizer

    vocabulary = find("tokenizers/gpt2", "encoder.json")
    merges = find("tokenizers/gpt2", "vocab.bpe")
    try:
        return ByteLevelBPETokenizer.from_file(str(vocabulary), str(merges))
    except Exception as error:  # the tokenizers library raises plain ones
        raise _broken(vocabulary.parent, "tokenizers/gpt2", error) from None


def _blocks(path: Path, tokenizer: Any, length: int) -> Tensor:
    try:
        with path.open(encoding="utf-8", newline="\n") as file:
            # as in Hugging Face's dataset: with line ends, and empty strings for empty lines
            lines = [line if line.strip() else "" for line in file]
    except (OSError, ValueError) as error:
        raise _broken(path, "wikitext2", error) from None
    tokens = torch.tensor([token for e in tokenizer.encode_batch(lines) for token in e.ids])
    count = len(tokens) // length
    if count == 0:
        raise ValueError(f"length={length}: {path} has {len(tokens)} tokens")
    return tokens[: count * length].reshape(count, length)


# --- downloads: each writes a dataset's files into a folder ---------------------------------------


def _fetch_url(url: str, file: str, into: Path) -> None:
    with urllib.request.urlopen(url, timeout=60) as answer, (into / file).open("wb") as out:
        shutil.copyfileobj(answer, out)


def _fetch_pima(into: Path) -> None:
    from sklearn.datasets import fetch_openml

    fetched = fetch_openml(data_id=37, as_frame=False, parser="liac-arff")
    label = (fetched.target == "tested_positive").astype(float)
    table = np.column_stack([fetched.data.astype(float), label])
    header = ",".join([*fetched.feature_names, "label"])
    np.savetxt(into / "pima_diabetes.csv", table, "%.10g", ",", header=header, comments="")


def _fetch_images(kind: str, file: str, into: Path) -> None:
    from torchvision import datasets  # type: ignore[import-not-found]

    arrays: dict[str, Any] = {}
    for split in ("train", "test"):
        downloaded = getattr(datasets, kind)(into / "raw", train=split == "train", download=True)
        arrays[f"{split}_images"] = np.asarray(downloaded.data)
        arrays[f"{split}_labels"] = np.asarray(downloaded.targets, np.uint8)
    np.savez_compressed(into / file, **arrays)


def _fetch_glue(name: str, into: Path) -> None:
    from datasets import load_dataset  # type: ignore[import-not-found]

    columns, classes = GLUE[name]
    dataset = load_dataset("nyu-mll/glue", name.replace("-", "").lower())
    for split, file in (("train", "train.tsv"), ("validation", "dev.tsv")):
        with (into / file).open("w", encoding="utf-8", newline="") as out:
            out.write("\t".join([*columns, "label"]) + "\n")
            for row in dataset[split]:
                cells = [" ".join(row[c].split()) for c in columns]  # no tabs, no line ends
                out.write("\t".join([*cells, classes[row["label"]]]) + "\n")


def _fetch_wikitext(into: Path) -> None:
    from datasets import load_dataset

    dataset = load_dataset("Salesforce/wikitext", "wikitext-2-raw-v1")
    for split, file in (("train", "wiki.train.raw"), ("validation", "wiki.valid.raw")):
        lines = [text or " \n" for text in dataset[split]["text"]]
        (into / file).write_text("".join(lines), encoding="utf-8", newline="\n")


def _fetch_hub(repository: str, files: dict[str, str], into: Path) -> None:
    from huggingface_hub import hf_hub_download

    for theirs, ours in files.items():
        shutil.copy(hf_hub_download(repository, theirs), into / ours)


_BERT, _GPT2 = "google-bert/bert-base-uncased", "openai-community/gpt2"
_UCI = "https://archive.ics.uci.edu/static/public"
_IMAGE_KEYS = "with train_images, train_labels, test_images and test_labels, of type uint8"

FETCH: dict[str, Callable[[Path], None]] = {
    "concrete": partial(_fetch_url, f"{_UCI}/165/data.csv", "concrete.csv"),
    "parkinsons": partial(_fetch_url, f"{_UCI}/189/data.csv", "parkinsons_updrs.csv"),
    "pima": _fetch_pima,
    "mnist": partial(_fetch_images, "MNIST", "mnist.npz"),
    "fashion_mnist": partial(_fetch_images, "FashionMNIST", "fashion_mnist.npz"),
    "cifar10": partial(_fetch_images, "CIFAR10", "cifar10.npz"),
    **{f"glue/{name}": partial(_fetch_glue, name) for name in GLUE},
    "wikitext2": _fetch_wikitext,
    "tokenizers/bert_uncased": partial(_fetch_hub, _BERT, {"vocab.txt": "vocab.txt"}),
    "tokenizers/gpt2": partial(
        _fetch_hub, _GPT2, {"vocab.json": "encoder.json", "merges.txt": "vocab.bpe"}
    ),
}

SOURCES: dict[str, dict[str, str]] = {
    "concrete": {
        "what": "UCI Concrete Compressive Strength as a .csv file (a line of names, 8 features, "
        "the target)",
        "where": "concrete/concrete.csv",
        "how": f"{_UCI}/165/data.csv",
    },
    "parkinsons": {
        "what": "UCI Parkinsons Telemonitoring as a .csv file (a line of names, among them "
        "subject#, motor_UPDRS and total_UPDRS, and 19 features)",
        "where": "parkinsons/parkinsons_updrs.csv",
        "how": f"{_UCI}/189/data.csv",
    },
    "pima": {
        "what": "Pima Indians Diabetes as a .csv file (a line of names, 8 features, a label of 0 "
        "or 1)",
        "where": "pima/pima_diabetes.csv",
        "how": "https://www.openml.org/d/37, or sklearn.datasets.fetch_openml(data_id=37)",
    },
    "mnist": {
        "what": f"MNIST as an .npz file {_IMAGE_KEYS}, images of 28 × 28",
        "where": "mnist/mnist.npz",
        "how": "`pip install torchvision`, which downloads it",
    },
    "fashion_mnist": {
        "what": f"FashionMNIST as an .npz file {_IMAGE_KEYS}, images of 28 × 28",
        "where": "fashion_mnist/fashion_mnist.npz",
        "how": "`pip install torchvision`, which downloads it",
    },
    "cifar10": {
        "what": f"CIFAR-10 as an .npz file {_IMAGE_KEYS}, images of 32 × 32 × 3",
        "where": "cifar10/cifar10.npz, or cifar10_subset.npz with the first images of it",
        "how": "`pip install torchvision`, which downloads it",
    },
    "pacs": {
        "what": "PACS as an .npz file with images (n, 64, 64, 3), domain and label (n), of type "
        f"uint8; domains {', '.join(DOMAINS)}; labels {', '.join(OBJECTS)}",
        "where": "pacs/pacs_64.npz",
        "how": "download the images with DomainBed (python -m domainbed.scripts.download), and "
        "give the folder PACS to experiments.tasks.data.pack_pacs, which writes it into the cache",
    },
    **{
        f"glue/{name}": {
            "what": f"GLUE's {name} as train.tsv and dev.tsv, with the columns "
            f"{', '.join([*columns, 'label'])} and the labels {' and '.join(classes)}",
            "where": f"glue/{name}/train.tsv and dev.tsv",
            "how": "`pip install datasets`, which downloads it, or https://gluebenchmark.com",
        }
        for name, (columns, classes) in GLUE.items()
    },
    "wikitext2": {
        "what": "WikiText-2's raw text as wiki.train.raw and wiki.valid.raw",
        "where": "wikitext2/wiki.train.raw and wiki.valid.raw, or "
        "wikitext103vocab.train_part.txt and wikitext103vocab.valid.txt",
        "how": "`pip install datasets`, which downloads it (Salesforce/wikitext)",
    },
    "tokenizers/bert_uncased": {
        "what": "BERT's uncased vocabulary as vocab.txt",
        "where": "tokenizers/bert_uncased/vocab.txt",
        "how": f"https://huggingface.co/{_BERT}",
    },
    "tokenizers/gpt2": {
        "what": "GPT-2's vocabulary as encoder.json and its merges as vocab.bpe",
        "where": "tokenizers/gpt2/encoder.json and vocab.bpe",
        "how": f"vocab.json and merges.txt of https://huggingface.co/{_GPT2}",
    },
}
