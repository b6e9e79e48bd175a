"""Progress bars.

A call with several passes over the data shows one bar, whose length is the time that they are
expected to take, with the time left. Work outside such a call has its own bars. A log file gets no
bars, because they would fill it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

Batch = tuple[Any, Any]  # indices of examples, and what they are
SCORES = "scores"  # the last kind of work of a run
_calls: list[CallBar] = []  # the innermost is the last


def progress_bar(*arguments: Any, shown: bool, **options: Any) -> Any:
    """A bar of tqdm, or a part of the bar of the call."""
    from tqdm.auto import tqdm

    if shown and _calls and _calls[-1].has(options.get("desc")):
        return PartOfBar(_calls[-1], *arguments, **options)
    return tqdm(*arguments, disable=not (shown and _visible()), leave=False, **options)


def counted(batches: Iterable[Batch], total: int, label: str) -> Iterator[Batch]:
    """The same (indices, batch), with a bar of examples."""
    with progress_bar(total=total, desc=label, unit="ex", shown=True) as bar:
        for indices, batch in batches:
            yield indices, batch
            bar.update(len(indices))


@contextmanager
def one_bar(name: str, runs: int) -> Iterator[CallBar]:
    """One bar for all passes inside, from when `CallBar.expect` is called on.

    Args:
        runs: how many times the same passes are made.
    """
    call = CallBar(name, runs, _visible())
    _calls.append(call)
    try:
        yield call
    finally:
        _calls.remove(call)
        if call.bar is not None:
            call.bar.close()


def expect(seconds: Mapping[str, float], passes: Mapping[str, int]) -> None:
    """Tell the bar of the call what one run takes.

    Args:
        seconds: by kind of work.
        passes: how many of each kind have a bar.
    """
    if _calls:
        _calls[-1].expect(seconds, passes)


class CallBar:
    """The bar of a call, in expected seconds."""

    def __init__(self, name: str, runs: int, shown: bool) -> None:
        self.name, self.runs, self.shown = name, runs, shown
        self.bar: Any = None
        self._each: dict[str, float] = {}  # seconds of a pass
        self._done, self._run = 0.0, 0
        self._scores = 0.0  # where these begin

    def expect(self, seconds: Mapping[str, float], passes: Mapping[str, int]) -> None:
        from tqdm.auto import tqdm

        total, with_bars = sum(seconds.values()), sum(seconds.get(k, 0.0) for k in passes)
        if not self.shown or not with_bars > 0:
            return
        if self.bar is None:
            form = "{l_bar}{bar}| {elapsed}, about {remaining} left"
            how: Any = {"desc": self.name, "bar_format": form, "leave": False, "smoothing": 0.05}
            self.bar = tqdm(total=self.runs * total, **how)
        self._run += 1
        self._reach((self._run - 1) * total)  # what was cached is done
        longer = total / with_bars  # for what happens between the passes
        self._each = {k: longer * seconds[k] / n for k, n in passes.items() if n and k in seconds}
        self._scores = self._run * total - self._each.get(SCORES, 0.0)

    def has(self, label: str | None) -> bool:
        """Whether work with this label is a part of the bar."""
        return self.bar is not None and _work_of(label) in self._each

    def begin(self, label: str) -> float:
        """Show what is done now; the seconds that it is expected to take."""
        if _work_of(label) == SCORES:
            self._reach(self._scores)
        self.bar.set_description(f"{self.name}: {label}")
        return self._each[_work_of(label)]

    def advance(self, seconds: float) -> None:
        self._reach(self._done + seconds)

    def _reach(self, seconds: float) -> None:
        seconds = min(seconds, self.bar.total)
        if seconds > self._done:
            self.bar.update(seconds - self._done)
            self._done = seconds


class PartOfBar:
    """One pass of a call, used as a bar of tqdm is."""

    def __init__(
        self,
        call: CallBar,
        iterable: Any = None,
        *,
        total: float | None = None,
        desc: str | None = None,
        **_: Any,
    ) -> None:
        self._call, self._iterable = call, iterable
        self._total = total if total is not None else len(iterable)
        self._seconds = call.begin(desc or "")

    def update(self, count: float = 1) -> None:
        self._call.advance(self._seconds * count / max(1, self._total))

    def __iter__(self) -> Iterator[Any]:
        for item in self._iterable:
            yield item
            self.update()

    def __enter__(self) -> PartOfBar:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _work_of(label: str | None) -> str:
    """Of work with a label such as "covariances, step 188"."""
    return (label or "").split(",")[0]


def _visible() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return sys.stderr.isatty() or "IPKernelApp" in getattr(shell, "config", ())
