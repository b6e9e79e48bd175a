"""How to show an example: as an image, a text, a row of a table, or as a renderer decides.

Datasets are not trusted. The result is plain data (strings, numbers, a PNG encoded here), which the
page inserts as text. Only the user's own renderer can return HTML.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence, Set, Sized
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from whence.errors import InvalidInput, InvalidType, warn
from whence.task import IGNORED, LABEL_KEYS, SUM_TOLERANCE, Classification, Regression, Task

Renderer = Callable[[Any], Any]
Rendered = dict[str, Any]

QUERY_SIZE = 128  # pixels of a query's image
CHARACTERS = 2000  # shown of a text
CELLS = 60  # shown of a row
LOOKED_AT = 64  # labels from which it is seen whether they name classes
MAX_CLASSES = 4096  # numbers in a target that may be one per class
# flat vectors of these lengths are more likely images than rows: shape (c, h, w)
FLAT = {64: (1, 8, 8), 256: (1, 16, 16), 784: (1, 28, 28), 1024: (1, 32, 32)}
FLAT |= {3072: (3, 32, 32), 4096: (1, 64, 64), 12288: (3, 64, 64)}
IMAGE_KEYS = ("image", "img", "pixel_values", "picture")
TEXT_KEYS = ("text", "sentence", "content", "prompt", "document")


class HTML(str):
    """Text that a renderer returns to be inserted into the page as HTML.

    Scripts in it do not run. Escape text from the data yourself (`html.escape`).
    """


class Examples:
    """A dataset whose examples can be shown.

    Args:
        dataset: map-style; None shows examples by their index only.
        renderer: turns an example into what to show: text, an array or PIL image, a mapping (a row
            of a table), or `HTML`.
        labels: one label per example, instead of those in the dataset.
        classes: names of the classes, in order or by number.
        columns: names of the features; an example with that many values is a row of a table.
        tokenizer: decodes token ids (its `decode` is called).
        size: the maximum length of an image's longer side, in pixels.
        task: whose targets the labels are.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        renderer: Renderer | None = None,
        labels: Sequence[Any] | None = None,
        classes: Iterable[str] | Mapping[int, str] | None = None,
        columns: Iterable[str] | None = None,
        tokenizer: Any = None,
        size: int = 64,
        task: Task | None = None,
    ) -> None:
        check_display_options(
            renderer=renderer, classes=classes, columns=columns, tokenizer=tokenizer
        )
        if labels is not None and dataset is not None and len(labels) != len(dataset):
            raise InvalidInput(
                f"labels has {len(labels)} entries, but the dataset has {len(dataset)}: give one "
                "label per example"
            )
        self.dataset, self.renderer, self.labels = dataset, renderer, labels
        names = classes if isinstance(classes, Mapping) else dict(enumerate(_strings(classes)))
        self.classes = {int(number): str(name) for number, name in names.items()}
        self.columns = None if columns is None else _strings(columns)
        self.tokenizer, self.size, self.task = tokenizer, size, task
        self._warned = False

    def __len__(self) -> int:
        return 0 if self.dataset is None else len(self.dataset)

    def render(self, index: int) -> Rendered:
        """An example as plain data.

        Returns:
            Always `id`, `kind` and `label` (text or None); depending on the kind, `image` (a data
            URI), `text`, `row` ([name, value] pairs) or `html`. There may be a `note`, and `more`,
            which says how much of a text or row was cut.
        """
        return self._read(index, drawn=True)

    def content(self, index: int) -> Rendered:
        """As `render`, with the `array` (c, h, w) of an image instead of its data URI."""
        return self._read(index, drawn=False)

    def _read(self, index: int, drawn: bool) -> Rendered:
        rendered: Rendered = {"id": int(index), "kind": "missing", "label": None}
        if self.dataset is None:
            return rendered
        try:
            example = self.dataset[int(index)]
            rendered["label"] = self._label(example, index)
            given = _input(example) if self.renderer is None else self.renderer(example)
            content = self._content(given)
            if drawn and content["kind"] == "image":
                content = _image(content.pop("array"), self.size, content.get("note"))
            return rendered | content
        except Exception as error:
            # One example that cannot be shown must not cost the page.
            what = "reading" if self.renderer is None else "rendering"
            rendered["note"] = _cut(f"{what} it failed: {type(error).__name__}: {error}", 200)[0]
            if not self._warned:
                self._warned = True
                warn(f"example {index} is not shown: {rendered['note']}", stacklevel=2)
            return rendered

    def label(self, index: int) -> str | None:
        """The example's label as text."""
        if self.dataset is None:
            return None
        try:
            example = None if self.labels is not None else self.dataset[int(index)]
            return self._label(example, index)
        except Exception:  # render reports it
            return None

    @cached_property
    def wordless(self) -> bool:
        """Whether the examples are images (the first one is), or there are none."""
        return len(self) == 0 or self.content(0)["kind"] == "image"

    def in_words(self, index: int) -> tuple[str, str]:
        """An example's label and text; images are not drawn for it."""
        if self.wordless:
            return self.label(index) or "", ""
        content = self.content(index)
        return content["label"] or "", words(content)

    @cached_property
    def names_classes(self) -> bool:
        """Whether labels are classes: of which there are few, so that counting them makes sense.

        The task says so, or names of the classes were given. Otherwise the first labels must have
        no number that is not an integer.
        """
        if self.classes or isinstance(self.task, Classification):
            return True
        if isinstance(self.task, Regression):
            return False
        return not any(map(self._is_fraction, range(min(LOOKED_AT, len(self)))))

    def _is_fraction(self, index: int) -> bool:
        try:
            label = _target(self.dataset[index]) if self.labels is None else self.labels[index]
        except Exception:  # render reports it
            return False
        if isinstance(label, (Tensor, np.ndarray, np.generic)) and math.prod(label.shape) == 1:
            label = label.item()
        return isinstance(label, float) and not label.is_integer()

    def class_name(self, number: int) -> str:
        """The name of a class."""
        return _cut(str(self.classes.get(number, number)), 80)[0]

    def pieces(self, index: int) -> list[str] | None:
        """The text of each token, empty for padding; None if the example has no token ids.

        A token that begins a word begins with a space, so that the texts joined are the example.
        """
        if self.dataset is None:
            return None
        content = _input(self.dataset[int(index)])
        ids, mask = _token_ids(content)
        if ids is None:
            return None
        texts, before = [], None
        for token, exists in zip(ids.tolist(), mask.tolist(), strict=True):
            texts.append(self._piece(before, token) if exists else "")
            before = token if exists else before
        return texts

    def _piece(self, before: int | None, token: int) -> str:
        """The text of a token after another one.

        Alone, a token does not show whether it begins a word: WordPiece marks what continues a
        word (`##off`), SentencePiece drops the first space. So it is what the tokenizer appends.
        """
        if self.tokenizer is None:
            return f"{token} "
        text = str(self.tokenizer.decode([token]))
        if before is not None:
            first = str(self.tokenizer.decode([before]))
            both = str(self.tokenizer.decode([before, token]))
            text = both[len(first) :] if both.startswith(first) else text
        return _cut(text, 100)[0]

    # -- guessing the kind ---------------------------------------------------------------------

    def _content(self, content: Any) -> Rendered:
        if isinstance(content, HTML):
            return {"kind": "custom", "html": _cut(content, len(content))[0]}
        if isinstance(content, str):
            return _text(content)
        if isinstance(content, bytes):
            return _text(content[: 4 * CHARACTERS].decode(errors="replace"))
        if isinstance(content, Mapping):
            return self._mapping(content)
        if isinstance(content, (list, tuple)) and not _numbers(content):
            return _row([[str(k), _value(v)] for k, v in enumerate(content)])
        array = _array(content)
        if array is None:
            return _text(str(content))
        return self._from_array(array)

    def _mapping(self, content: Mapping[Any, Any]) -> Rendered:
        fields = {str(k): v for k, v in content.items() if k not in LABEL_KEYS}
        for name in IMAGE_KEYS:
            array = _array(fields.get(name))
            if array is not None and array.ndim in (2, 3):
                return self._from_array(array)
        ids, mask = _token_ids(content)
        if self.tokenizer is not None and ids is not None:
            return self._decoded(ids[mask])
        words = [name for name, value in fields.items() if isinstance(value, str)]
        named = [name for name in TEXT_KEYS if name in words]
        if named or fields.keys() == {*words[:1]}:
            return _text(fields[(named or words)[0]])
        if not words and ids is not None:
            return self._decoded(ids[mask])
        return _row([[name, _value(value)] for name, value in fields.items()])

    def _from_array(self, array: NDArray[Any]) -> Rendered:
        if array.ndim == 0:
            return _row([[(self.columns or ["value"])[0], _value(array.item())]])
        if array.ndim == 1:
            return self._vector(array)
        if array.ndim == 2 and min(array.shape) > 0:
            return _picture(array[None])
        if array.ndim == 3 and min(array.shape) > 0:
            if array.shape[0] <= 4:
                return _picture(array)
            if array.shape[2] <= 4:
                return _picture(array.transpose(2, 0, 1))
        return _row([["array", _value(array)]])

    def _vector(self, array: NDArray[Any]) -> Rendered:
        if self.columns is not None and len(self.columns) == len(array):
            cells = zip(self.columns, array.tolist(), strict=True)
            return _row([[name, _value(value)] for name, value in cells])
        if array.dtype.kind == "i" and array.dtype.itemsize >= 4:
            rendered = self._decoded(array)
        elif len(array) in FLAT:
            rendered = _picture(array.reshape(FLAT[len(array)]))
        else:
            rendered = _row([[f"x{k}", _value(value)] for k, value in enumerate(array.tolist())])
        if self.columns is not None:
            note = f"columns has {len(self.columns)} names for {len(array)} values"
            rendered["note"] = "; ".join(filter(None, [rendered.get("note"), note]))
        return rendered

    def _decoded(self, ids: NDArray[Any]) -> Rendered:
        if self.tokenizer is None:
            return _text(" ".join(map(str, ids.tolist())))
        return _text(str(self.tokenizer.decode(ids.tolist())))

    def _label(self, example: Any, index: int) -> str | None:
        label = self.labels[index] if self.labels is not None else _target(example)
        if isinstance(label, (Tensor, np.ndarray, np.generic)):
            if math.prod(label.shape) != 1:
                return self._label_of_vector(np.asarray(label))
            label = label.item()
        if label is None or isinstance(label, (list, tuple, Mapping)):
            return None
        if isinstance(label, float) and not label.is_integer():
            return f"{label:.4g}"
        if isinstance(label, (bool, int, float)) and math.isfinite(label):
            return None if label == IGNORED else self.class_name(int(label))
        return _cut(str(label), 80)[0] or None

    def _label_of_vector(self, label: NDArray[Any]) -> str | None:
        """The most probable class of one-hot and soft targets; of several labels, those given."""
        if label.ndim != 1 or label.dtype.kind not in "buif" or len(label) > MAX_CLASSES:
            return None
        label = label.astype(np.float64)
        if (label >= 0).all() and abs(label.sum() - 1) <= SUM_TOLERANCE:
            return self.class_name(int(label.argmax()))
        if not np.isin(label, (0, 1, IGNORED)).all():
            return None
        numbers = np.flatnonzero(label == 1).tolist()
        return _cut(", ".join(map(self.class_name, numbers)), 80)[0] or None


def words(rendered: Rendered) -> str:
    """The text of a rendered example."""
    cells = " ".join(f"{name} {value}" for name, value in rendered.get("row", []))
    return f"{rendered.get('text', '')}{cells}{rendered.get('html', '')}"


def check_display_options(
    *, renderer: Any = None, classes: Any = None, columns: Any = None, tokenizer: Any = None
) -> None:
    """Raise if an option cannot be used to show examples."""
    if renderer is not None and not callable(renderer):
        raise InvalidType(f"renderer is a {type(renderer).__name__}: it must be a function")
    if tokenizer is not None and (isinstance(tokenizer, type) or not hasattr(tokenizer, "decode")):
        raise InvalidType(f"tokenizer is a {type(tokenizer).__name__}: it must have decode(ids)")
    if isinstance(classes, Mapping) and not _numbers([0, *classes]):
        raise InvalidType("classes has keys that are not numbers: give {number: name}")
    lists = {"columns": columns} | ({} if isinstance(classes, Mapping) else {"classes": classes})
    for what, given in lists.items():
        if given is not None and not _are_names(given):
            raise InvalidType(f"{what} is a {type(given).__name__}: it must be a list of names")


def _are_names(given: Any) -> bool:
    """Whether it is a sequence of names: a list, a tuple, an array."""
    if isinstance(given, (type, str, bytes, Mapping, Set)) or not isinstance(given, Sized):
        return False
    plain = (str, int, float, np.generic)
    return isinstance(given, Iterable) and all(isinstance(name, plain) for name in given)


def _strings(names: Iterable[Any] | None) -> list[str]:
    return [str(name) for name in ([] if names is None else names)]


# -- the parts of an example ---------------------------------------------------------------------


def _input(example: Any) -> Any:
    """An example without its label."""
    if isinstance(example, (tuple, list)) and not _numbers(example) and len(example):
        return example[0] if len(example) <= 2 else example[:-1]
    return example


def _target(example: Any) -> Any:
    if isinstance(example, Mapping):
        return next((example[key] for key in LABEL_KEYS if key in example), None)
    if isinstance(example, (tuple, list)) and len(example) > 1 and not _numbers(example[:-1]):
        return example[-1]
    return None


def _numbers(values: Sequence[Any]) -> bool:
    return len(values) > 0 and all(isinstance(v, (int, float, np.number)) for v in values)


def _array(value: Any) -> NDArray[Any] | None:
    """A tensor, array, number or PIL image as a numeric array; None for anything else."""
    if isinstance(value, Tensor):
        tensor = value.detach().cpu()
        value = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    elif hasattr(value, "convert") and hasattr(value, "getbands"):  # a PIL image
        value = np.asarray(value.convert("RGB" if len(value.getbands()) > 2 else "L"))
    elif isinstance(value, (list, tuple, int, float, np.number)):
        try:
            value = np.asarray(value)
        except ValueError:  # ragged
            return None
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return value
    return None


def _token_ids(content: Any) -> tuple[NDArray[Any] | None, NDArray[np.bool_]]:
    """Token ids (t,), or None, and a mask that is False for padding."""
    mask = None
    if isinstance(content, Mapping):
        mask = _array(content.get("attention_mask"))
        content = content.get("input_ids")
    ids = _array(content)
    if ids is None or ids.ndim != 1 or ids.dtype.kind not in "iu":
        return None, np.zeros(0, dtype=bool)
    if mask is None or mask.shape != ids.shape:
        return ids, np.ones(len(ids), dtype=bool)
    return ids, mask.astype(bool)


# -- rendering -----------------------------------------------------------------------------------


def _cut(text: str, limit: int) -> tuple[str, int]:
    """The beginning of a text, and how many characters were cut. Replaces lone surrogates."""
    more = max(0, len(text) - limit)
    beginning = text[:limit] + ("…" if more else "")
    return beginning.encode("utf-8", "replace").decode(), more


def _text(text: str) -> Rendered:
    text, more = _cut(text, CHARACTERS)
    return {"kind": "text", "text": text} | ({"more": f"{more:,} more characters"} if more else {})


def _row(cells: list[list[str]]) -> Rendered:
    more = len(cells) - CELLS
    row = [[_cut(name, 80)[0], _cut(value, 300)[0]] for name, value in cells[:CELLS]]
    return {"kind": "row", "row": row} | ({"more": f"{more:,} more values"} if more > 0 else {})


def _value(value: Any) -> str:
    """The text of a cell: numbers in four digits, arrays by their type and shape."""
    array = _array(value)
    if isinstance(value, (bool, str)) or array is None:
        return str(value)
    if array.ndim:
        return f"{array.dtype} of shape {' × '.join(map(str, array.shape))}"
    number = array.item()
    return f"{number:.4g}" if isinstance(number, float) else str(number)


def _picture(array: NDArray[Any]) -> Rendered:
    return {"kind": "image", "array": array}


def _image(array: NDArray[Any], size: int, note: str | None = None) -> Rendered:
    """A small PNG of an array (c, h, w), c ≤ 4, with values in any range.

    Bytes are used unchanged, and values in [0, 1] are multiplied by 255. Other values are scaled
    from their finite minimum and maximum. Values that are not finite are grey.
    """
    pixels = np.asarray(array, dtype=np.float64)
    finite = np.isfinite(pixels)
    whole = bool(finite.all())
    known = pixels if whole else pixels[finite]
    low, high = 0.0, 255.0 if array.dtype == np.uint8 else 1.0
    if known.size:
        least, most = float(known.min()), float(known.max())
        if least < 0 or most > high:
            low, high = least, most
    # halves, because the difference of two doubles may overflow
    span = high / 2 - low / 2
    with np.errstate(invalid="ignore"):
        scaled = (pixels / 2 - low / 2) / span if span > 0 else np.full(pixels.shape, 0.5)
    notes = [] if note is None else [note]
    if not whole:
        scaled = np.where(finite, scaled, 0.5)
        notes.append(f"{int((~finite).sum()):,} values are not finite")
    channels, height, width = scaled.shape
    if channels == 2:
        scaled = scaled.mean(0, keepdims=True)
        notes.append("mean of 2 channels")
    scaled = scaled[:3]
    longer = max(height, width)
    if longer > size:
        small = (max(1, round(height * size / longer)), max(1, round(width * size / longer)))
        scaled = adaptive_avg_pool2d(torch.from_numpy(scaled), small).numpy()
    if longer > 4 * min(height, width) or longer > size:
        notes.append(f"{height} × {width}")
    data = (scaled * 255).round().clip(0, 255).astype(np.uint8).transpose(1, 2, 0)
    uri = "data:image/png;base64," + base64.b64encode(png(data)).decode()
    return {"kind": "image", "image": uri} | ({"note": "; ".join(notes)} if notes else {})


def png(pixels: NDArray[np.uint8]) -> bytes:
    """Encode (h, w, 1) or (h, w, 3) as PNG: grey or RGB, 8 bits, the smallest of three filters."""
    height, width, channels = pixels.shape
    left, above = pixels.copy(), pixels.copy()
    left[:, 1:] -= pixels[:, :-1]
    above[1:] -= pixels[:-1]
    packed = []
    for kind, rows in enumerate((pixels, left, above)):
        lines = np.full((height, 1 + width * channels), kind, np.uint8)
        lines[:, 1:] = rows.reshape(height, -1)
        packed.append(zlib.compress(lines.tobytes(), 6))

    def chunk(name: bytes, data: bytes) -> bytes:
        check = zlib.crc32(name + data)
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", check)

    head = struct.pack(">IIBBBBB", width, height, 8, 2 if channels == 3 else 0, 0, 0, 0)
    parts = [(b"IHDR", head), (b"IDAT", min(packed, key=len)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)
