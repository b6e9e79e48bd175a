"""How examples look: images, texts, rows, and what a renderer returns."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import whence
from whence.present.examples import CHARACTERS, HTML, Examples, png


def pixels(shown: dict[str, Any]) -> np.ndarray:
    """A rendered image as another library reads it."""
    data = base64.b64decode(shown["image"].removeprefix("data:image/png;base64,"))
    return np.asarray(Image.open(io.BytesIO(data)))


@pytest.mark.parametrize("shape", [(1, 1, 1), (28, 28, 1), (5, 3, 3), (1, 9, 3)])
def test_pngs_are_pngs(shape: tuple[int, int, int]) -> None:
    random = np.random.default_rng(0)
    for image in (random.integers(0, 256, shape), np.indices(shape).sum(0)):
        found = np.asarray(Image.open(io.BytesIO(png(image.astype(np.uint8)))))
        assert (found.reshape(shape) == image).all()


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (torch.tensor([[0.0, 0.5], [1.0, 0.25]]), [[0, 128], [255, 64]]),
        (torch.tensor([[-1.0, 0.0], [1.0, 3.0]]), [[0, 64], [128, 255]]),
        (np.array([[0, 65535], [32768, 0]], np.uint16), [[0, 255], [128, 0]]),
        (np.array([[0, 200]], np.uint8), [[0, 200]]),
        (np.array([[True, False]]), [[255, 0]]),
        (np.array([[NAN, INF, 1.0, 0.0]]), [[128, 128, 255, 0]]),
        (np.array([[NAN]]), [[128]]),
        (np.array([[7e300]]), [[128]]),
        (np.array([[-1.7e308, 1.7e308]]), [[0, 255]]),
        (np.array([[[0.0]], [[1.0]]]), [[128]]),  # two channels: their mean
        (torch.zeros(1, 1), [[0]]),
        (torch.tensor([[[0.0]], [[1.0]], [[0.0]], [[0.3]]]), [[[0, 255, 0]]]),  # four: first three
        (np.zeros((6, 5, 3), np.uint8), np.zeros((6, 5, 3))),  # channels last
        (Image.new("RGB", (2, 1), (1, 2, 3)), [[[1, 2, 3], [1, 2, 3]]]),
        (torch.tensor([[0.0, 1.0]], dtype=torch.bfloat16), [[0, 255]]),
    ],
    ids=lambda given: type(given).__name__,  # a repr would hold an address
)
def test_images_of_any_range_and_shape(array: Any, expected: Any) -> None:
    shown = Examples([(array, 1)]).render(0)
    assert shown["kind"] == "image"
    assert np.abs(pixels(shown).astype(int) - np.asarray(expected)).max() <= 1


def test_large_and_flat_images() -> None:
    assert pixels(Examples([torch.rand(5000, 3)]).render(0)).shape == (64, 1)
    picture = np.zeros((200, 100, 3), np.uint8)
    picture[:100] = 255
    small = pixels(Examples([picture]).render(0))
    assert small.shape == (64, 32, 3) and (small[:30] == 255).all() and (small[34:] == 0).all()
    digit = torch.rand(64)
    found = pixels(Examples([(digit, 3)]).render(0))
    assert np.abs(found - (digit.view(8, 8) * 255).numpy()).max() <= 1
    assert Examples([(digit, 3)], columns=[f"c{k}" for k in range(64)]).render(0)["kind"] == "row"
    assert Examples([torch.rand(2, 3, 4, 5)]).render(0)["row"] == [
        ["array", "float32 of shape 2 × 3 × 4 × 5"]
    ]
    assert Examples([torch.rand(0, 3)]).render(0)["kind"] == "row"


def test_texts_rows_and_labels() -> None:
    class Words:
        def decode(self, ids: list[int]) -> str:
            return " ".join(f"w{i}" for i in ids)

    def shown(example: Any, **options: Any) -> dict[str, Any]:
        return Examples([example], **options).render(0)

    assert shown("hello")["text"] == "hello"
    assert shown(("hello", 1), classes=["no", "yes"])["label"] == "yes"
    assert shown(("hello", 7), classes=["no", "yes"])["label"] == "7"
    assert shown(("hello", 1), classes={1: "one"})["label"] == "one"
    assert shown(("a", torch.tensor(0.12345678)))["label"] == "0.1235"
    for empty in (None, "", torch.zeros(0), [], torch.zeros(3)):
        assert shown(("a", empty))["label"] is None
    assert shown({"text": "t", "id": 3, "label": 2})["text"] == "t"
    assert shown({"text": "t", "id": 3, "label": 2})["label"] == "2"
    assert shown({"age": 31, "job": "cook"})["row"] == [["age", "31"], ["job", "cook"]]
    ids = {"input_ids": [4, 2, 9], "attention_mask": [1, 1, 0], "labels": [4, 2, -100]}
    assert shown(ids, tokenizer=Words())["text"] == "w4 w2"
    assert shown(ids)["text"] == "4 2" and shown(ids)["label"] is None
    assert shown((torch.tensor([3, 1]),), tokenizer=Words())["text"] == "w3 w1"
    row = shown((torch.tensor([0.5, 2.0]), 1), columns=["x", "y"])
    assert row["row"] == [["x", "0.5"], ["y", "2"]]
    assert shown(torch.zeros(2), columns=["x"])["note"] == "columns has 1 names for 2 values"
    assert len(shown(torch.zeros(100))["row"]) == 60
    assert shown(torch.zeros(100))["more"] == "40 more values"
    assert shown(object())["kind"] == "text"
    million = shown("y" * 1_000_000)
    assert len(million["text"]) == CHARACTERS + 1 and million["more"] == "998,000 more characters"
    assert shown("lone \ud800 surrogate")["text"].encode()
    with pytest.raises(ValueError, match="labels has 1 entries, but the dataset has 2"):
        Examples(["a", "b"], labels=["x"])
    assert shown(("a", 1), classes=np.array(["no", "yes"]))["label"] == "yes"
    flat = shown(torch.zeros(64), columns=["x"])  # these columns are of something else
    assert flat["kind"] == "image" and flat["note"] == "columns has 1 names for 64 values"
    for options, message in [
        ({"tokenizer": 3}, "tokenizer is a int: it must have decode"),
        ({"classes": "abc"}, "classes is a str: it must be a list of names"),
        ({"classes": {"cat": 0}}, r"classes has keys that are not numbers: give {number: name}"),
        ({"classes": torch.arange(3)}, "classes is a Tensor: it must be a list"),
        ({"columns": 3}, "columns is a int: it must be a list of names"),
        ({"columns": {"a", "b"}}, "columns is a set: it must be a list of names"),
        ({"renderer": "svg"}, "renderer is a str: it must be a function"),
    ]:
        with pytest.raises(TypeError, match=message):
            Examples(["a"], **options)


def test_a_renderer_may_give_anything() -> None:
    def shown(renderer: Any) -> dict[str, Any]:
        return Examples([(torch.zeros(3), 1)], renderer=renderer).render(0)

    assert shown(lambda e: HTML("<b>x</b>")) | {} == {
        "id": 0,
        "kind": "custom",
        "html": "<b>x</b>",
        "label": "1",
    }
    assert shown(lambda e: "<b>x</b>")["kind"] == "text"  # not marked: text
    assert shown(lambda e: np.zeros((4, 4)))["kind"] == "image"
    assert shown(lambda e: {"label id": int(e[1])})["row"] == [["label id", "1"]]
    with pytest.warns(UserWarning, match=r"example 0 is not shown: rendering it failed: KeyError"):
        failed = shown(lambda e: {}["no"])
    assert failed["kind"] == "missing" and "KeyError" in failed["note"]


def _tokenizer(kind: str) -> Any:
    """A real tokenizer with a vocabulary of a few words, as models of each kind have."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    marks = {"wordpiece": ("", "##"), "sentencepiece": ("▁", ""), "bytes": ("Ġ", "")}
    begin, go_on = marks[kind]
    words = [begin + word for word in ("rich", "veins", "of", "pay", "<b>")]
    vocabulary = {t: k for k, t in enumerate(["[UNK]", *words, go_on + "off", "."])}
    if kind == "wordpiece":
        inner = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
        inner.decoder = tokenizers.decoders.WordPiece()
    else:
        inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="[UNK]"))
        decoders = tokenizers.decoders
        inner.decoder = decoders.Metaspace() if kind == "sentencepiece" else decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]")


@pytest.mark.parametrize("kind", ["wordpiece", "sentencepiece", "bytes"])
def test_tokens_are_joined_as_the_tokenizer_joins_them(kind: str) -> None:
    tokenizer = _tokenizer(kind)
    ids = [1, 2, 3, 4, 6, 5, 0, 0]  # rich veins of pay|off <b>, and padding
    example = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor([1] * 6 + [0] * 2)}
    pieces = Examples([example], tokenizer=tokenizer).pieces(0)
    assert pieces is not None and len(pieces) == len(ids)
    assert "".join(pieces).strip() == "rich veins of payoff <b>"
    assert [piece.strip() for piece in pieces[:6]] == ["rich", "veins", "of", "pay", "off", "<b>"]
    assert pieces[6:] == ["", ""]


def test_labels_that_are_numbers_name_no_classes() -> None:
    def names(*labels: Any, **options: Any) -> bool:
        return Examples([("text", label) for label in labels], **options).names_classes

    assert names(0, 1, 2) and names("cat", "dog") and names(torch.tensor(3))
    assert names(0.0, 1.0)  # the targets of one logit
    assert not names(0.0, 1.5) and not names(torch.tensor([0.25]))
    assert names(0.0, 1.5, classes=["a", "b"])
    assert not names(3.0, 4.0, task=whence.Regression())
    assert names(0.5, 1.0, task=whence.Classification())
