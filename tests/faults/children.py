"""Attempts run in children of this process, which may be killed, limited, or run side by side."""

from __future__ import annotations

import os
import random
import resource
import select
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from whence.errors import WhenceError

SECONDS = 120.0  # after which a child hangs


class Broken(AssertionError):
    """A promise that does not hold."""


@dataclass
class Ended:
    """How a child ended: what it returned, the error it raised, or the signal that killed it."""

    value: str = ""
    error: str = ""
    refused: bool = False  # by an error of whence
    signal: int = 0

    @property
    def fine(self) -> bool:
        return not self.error and not self.signal


class Child:
    """A fork of this process that calls a function, which returns text."""

    def __init__(self, function: Callable[[], str]) -> None:
        self.read, write = os.pipe()
        self.process = os.fork()
        if self.process == 0:
            os.close(self.read)
            try:
                warnings.simplefilter("ignore")
                kind, text = "fine", function()
            except WhenceError as error:
                kind, text = "refused", f"{type(error).__name__}: {error}"
            except BaseException:
                kind, text = "error", traceback.format_exc()
            message = f"{kind}\n{text}".encode("utf-8", "backslashreplace")
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
            while message:
                message = message[os.write(write, message) :]
            os._exit(0)
        os.close(write)
        self.started = time.monotonic()

    def kill(self) -> None:
        os.kill(self.process, signal.SIGKILL)

    def end(self, seconds: float = SECONDS) -> Ended:
        """Wait for it."""
        message, limit = b"", self.started + seconds
        while True:
            ready, _, _ = select.select([self.read], [], [], max(0.0, limit - time.monotonic()))
            if not ready:
                self.kill()
                os.waitpid(self.process, 0)
                os.close(self.read)
                return Ended(error=f"it hangs: no end after {seconds:.0f} s")
            part = os.read(self.read, 65536)
            if not part:
                break
            message += part
        os.close(self.read)
        code = os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
        if code < 0:
            return Ended(signal=-code)
        kind, _, text = message.decode().partition("\n")
        if kind == "fine":
            return Ended(text)
        return Ended(error=text or "it ended without a word", refused=kind == "refused")


def run(function: Callable[[], str]) -> Ended:
    return Child(function).end()


def killed_at_write(function: Callable[[], str], rng: random.Random) -> Callable[[], str]:
    """The function, in a process that kills itself before one of its next system calls on files."""

    def dies() -> str:
        left = [1 + int(rng.expovariate(1 / 12))]
        for name in ("replace", "fsync", "unlink", "mkdir", "open"):
            setattr(os, name, _counting(getattr(os, name), left))
        return function()

    return dies


def _counting(real: Callable[..., Any], left: list[int]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)

    return call
