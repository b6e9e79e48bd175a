"""Work in the background, so that answers are immediate: texts to search, means, predictions.

Axes: ``n`` training examples, ``q`` queries.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whence.present.examples import Examples, Rendered
from whence.scores import Scores

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

BLOCK_NUMBERS = 2**20  # scores that are converted to float64 at a time
SEARCHED = 2**28  # characters of a dataset that are kept for searching
REQUEST_SECONDS = 0.15  # seconds that one request may spend on a longer computation


class Busy(RuntimeError):
    """The answer takes longer than one request may: ask again."""


class SharedExamples(Examples):
    """Examples for several threads: only one at a time uses the dataset and the renderer."""

    def __init__(self, dataset: Any, **looks: Any) -> None:
        super().__init__(dataset, **looks)
        self._guard = threading.RLock()

    def _read(self, index: int, drawn: bool) -> Rendered:
        with self._guard:
            return super()._read(index, drawn)

    def label(self, index: int) -> str | None:
        with self._guard:
            return super().label(index)

    def _is_fraction(self, index: int) -> bool:
        with self._guard:
            return super()._is_fraction(index)


@dataclass
class Index:
    """The labels and texts of a dataset, read in the background, for searching.

    Attributes:
        labels: those read so far.
        texts: likewise, in lower case; None for images, which have none.
    """

    examples: Examples
    labels: list[str] = field(default_factory=list)
    texts: list[str] | None = None

    def build(self, stop: threading.Event) -> None:
        """Read each example once."""
        count = len(self.examples)
        if not self.examples.wordless:
            self.texts = []
        length = SEARCHED // max(1, count)
        for k in range(count):
            if stop.is_set():
                return
            label, text = self.examples.in_words(k)
            if self.texts is not None:
                self.texts.append(text.casefold()[:length])
            self.labels.append(label)

    def matches(self, ids: Ints, text: str, label: str) -> NDArray[np.bool_]:
        """Which of the examples ``ids`` have this label and contain this text (or number)."""
        matching = np.ones(len(ids), dtype=bool)
        if label:
            same = np.zeros(len(self.examples), dtype=bool)
            same[: len(self.labels)] = np.array(self.labels, dtype=object) == label
            matching &= same[ids] if len(same) else False
        if text:
            wanted = text.casefold().strip()
            holds = np.zeros(len(self.examples), dtype=bool)
            if self.texts is not None:
                holds[: len(self.texts)] = [wanted in content for content in self.texts]
            contains = holds[ids] if len(holds) else np.zeros(len(ids), dtype=bool)
            number = wanted.removeprefix("#")
            if number.isdecimal() and len(number) < 16:
                contains |= ids == int(number)
            matching &= contains
        return matching


class Mean:
    """The mean over the queries of their finite scores, (n,), computed in steps."""

    def __init__(self, scores: Scores) -> None:
        self._scores = scores
        self._total, self._counted = np.zeros((2, scores.shape[-1]))
        self._done = 0
        self._guard = threading.Lock()

    def advance(self, seconds: float) -> Floats:
        """The mean. Raises Busy if it takes longer than this."""
        rows, n = self._scores.shape
        end, step = time.monotonic() + seconds, max(1, BLOCK_NUMBERS // n)
        while self._done < rows:
            with self._guard:
                block = self._scores.values[self._done : self._done + step].astype(np.float64)
                finite = np.isfinite(block)
                self._total += np.where(finite, block, 0.0).sum(0)
                self._counted += finite.sum(0)
                self._done += step
            if time.monotonic() > end and self._done < rows:
                raise Busy("the mean over all queries is being computed: ask again in a moment")
        with np.errstate(invalid="ignore"):
            return np.asarray(self._total / self._counted)


class PredictionWorker:
    """Computes predictions in a thread, and waits for them no longer than one request may.

    Args:
        predict: the predictions for some examples, by example.
    """

    def __init__(self, predict: Callable[[Sequence[int]], Mapping[int, Any]]) -> None:
        self._predict = predict
        self._known: dict[int, Any] = {}
        self._requested: dict[int, Future[None]] = {}
        self._pool = ThreadPoolExecutor(1, "predicting")

    def predictions(self, places: Sequence[int]) -> dict[int, Any]:
        """The predictions that are known by now. Where some are missing, ask again."""
        missing = [p for p in places if p not in self._requested]
        if missing:
            work = self._pool.submit(lambda: self._known.update(self._predict(missing)))
            self._requested |= dict.fromkeys(missing, work)
        end = time.monotonic() + REQUEST_SECONDS
        for work in {id(self._requested[p]): self._requested[p] for p in places}.values():
            wait([work], timeout=max(0.0, end - time.monotonic()))
        return {p: self._known[p] for p in places if p in self._known}

    def waiting(self, places: Sequence[int]) -> bool:
        """Whether more predictions are coming."""
        return any(p in self._requested and not self._requested[p].done() for p in places)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
