"""What is read in the background, so that answers come at once: texts to search in, means, what the
model says.

Axes: ``n`` training examples, ``q`` queries.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whence.present.examples import Examples, Rendered
from whence.scores import Scores

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

AT_ONCE = 2**20  # scores that are held in float64 at a time
SEARCHED = 2**28  # characters of a dataset that are kept to search in
WORK = 0.15  # seconds that an answer may work on what takes longer


class Busy(RuntimeError):
    """What was asked for takes longer than an answer may: ask again."""


class SharedExamples(Examples):
    """Examples that several threads ask for: datasets and renderers are used by one at a time."""

    def __init__(self, dataset: Any, **looks: Any) -> None:
        super().__init__(dataset, **looks)
        self._guard = threading.RLock()

    def render(self, index: int) -> Rendered:
        with self._guard:
            return super().render(index)

    def label(self, index: int) -> str | None:
        with self._guard:
            return super().label(index)


@dataclass
class Index:
    """The labels and texts of a dataset, read in the background, to search in.

    Attributes:
        labels: those read so far.
        texts: likewise, lower case; None for images, which have none.
    """

    examples: Examples
    labels: list[str] = field(default_factory=list)
    texts: list[str] | None = None

    @cached_property
    def wordless(self) -> bool:
        """Whether the examples are images (the first one is)."""
        return len(self.examples) == 0 or "image" in self.examples.render(0)

    def build(self, stop: threading.Event) -> None:
        """Read every example once."""
        count = len(self.examples)
        if not self.wordless:
            self.texts = []
        kept = SEARCHED // max(1, count)
        for k in range(count):
            if stop.is_set():
                return
            if self.texts is None:
                label = self.examples.label(k)
            else:
                shown = self.examples.render(k)
                label = shown["label"]
                self.texts.append(words(shown).casefold()[:kept])
            self.labels.append(label or "")

    def matches(self, ids: Ints, text: str, label: str) -> NDArray[np.bool_]:
        """Which of the examples ``ids`` have this label and hold this text (or number)."""
        found = np.ones(len(ids), dtype=bool)
        if label:
            same = np.zeros(len(self.examples), dtype=bool)
            same[: len(self.labels)] = np.array(self.labels, dtype=object) == label
            found &= same[ids] if len(same) else False
        if text:
            wanted = text.casefold().strip()
            holds = np.zeros(len(self.examples), dtype=bool)
            if self.texts is not None:
                holds[: len(self.texts)] = [wanted in one for one in self.texts]
            here = holds[ids] if len(holds) else np.zeros(len(ids), dtype=bool)
            number = wanted.removeprefix("#")
            if number.isdecimal() and len(number) < 16:
                here |= ids == int(number)
            found &= here
        return found


def words(shown: Rendered) -> str:
    """What there is to read of a rendered example."""
    cells = " ".join(f"{name} {value}" for name, value in shown.get("row", []))
    return f"{shown.get('text', '')}{cells}{shown.get('html', '')}"


class Mean:
    """The mean over the queries of their finite scores, (n,), worked out bit by bit."""

    def __init__(self, scores: Scores) -> None:
        self._scores = scores
        self._total, self._counted = np.zeros((2, scores.shape[-1]))
        self._done = 0
        self._guard = threading.Lock()

    def go_on(self, seconds: float) -> Floats:
        """The mean; Busy if it takes longer."""
        rows, n = self._scores.shape
        end, step = time.monotonic() + seconds, max(1, AT_ONCE // n)
        while self._done < rows:
            with self._guard:
                block = self._scores.values[self._done : self._done + step].astype(np.float64)
                finite = np.isfinite(block)
                self._total += np.where(finite, block, 0.0).sum(0)
                self._counted += finite.sum(0)
                self._done += step
            if time.monotonic() > end and self._done < rows:
                raise Busy("the mean over all queries is being worked out: ask again in a moment")
        with np.errstate(invalid="ignore"):
            return np.asarray(self._total / self._counted)


class Teller:
    """Asks the model about examples in a thread, and waits for it no longer than an answer may.

    Args:
        ask: what it says, by example.
    """

    def __init__(self, ask: Callable[[Sequence[int]], Mapping[int, Any]]) -> None:
        self._ask = ask
        self._known: dict[int, Any] = {}
        self._asked: dict[int, Future[None]] = {}
        self._pool = ThreadPoolExecutor(1, "asking")

    def told(self, places: Sequence[int]) -> dict[int, Any]:
        """What is known of these by now. Where some are missing, ask again."""
        missing = [p for p in places if p not in self._asked]
        if missing:
            self._asked |= dict.fromkeys(missing, self._pool.submit(self._work, missing))
        end = time.monotonic() + WORK
        for work in {id(self._asked[p]): self._asked[p] for p in places}.values():
            wait([work], timeout=max(0.0, end - time.monotonic()))
        return {p: self._known[p] for p in places if p in self._known}

    def waiting(self, places: Sequence[int]) -> bool:
        """Whether more is to come."""
        return any(p in self._asked and not self._asked[p].done() for p in places)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _work(self, places: Sequence[int]) -> None:
        self._known |= self._ask(places)
