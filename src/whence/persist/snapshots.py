"""When unfinished work is saved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

SHARE = 0.03  # of the time, at most, is spent on saving
FREE = 0.01  # seconds; saving that takes less is not counted


class Throttle:
    """Says when to save: every so often, and less often where saving is slow.

    Saving takes at most 3 % of the time.

    Args:
        seconds: between two saves.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = self._interval = seconds
        self._last = monotonic()

    def due(self) -> bool:
        """Whether it is time to save."""
        return monotonic() - self._last >= self._interval

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Save inside this block: its duration decides when the next save is due."""
        start = monotonic()
        yield
        self._last = monotonic()
        spent = self._last - start
        self._interval = max(self.seconds, spent / SHARE if spent > FREE else 0.0)

    def restart(self) -> None:
        """Count from now on: there is nothing to save yet."""
        self._last = monotonic()
