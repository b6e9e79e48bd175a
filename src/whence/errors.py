"""The errors that whence raises on purpose, the checks that raise them, and its warnings.

Each error is also a built-in error, such as `InvalidInput`, which is a `ValueError`. Catch
`WhenceError` for anything that whence complains about, or the built-in type as usual:

    try:
        scores = whence.Source().attribute(study, query)
    except ValueError: ...            # also catches InvalidInput
    except whence.WhenceError: ...    # any complaint of whence, and nothing else

An error that your model, task or dataset raises becomes the `__cause__` of an `InvalidInput` that
names the examples. An error of another type that comes out of whence is a bug, or comes from code
that is not called on examples. This module needs only the standard library, so that every room may
use it.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from numbers import Real
from operator import index
from typing import Any

__all__ = [
    "DamagedFile",
    "DiskFull",
    "FolderConflict",
    "InvalidIndex",
    "InvalidInput",
    "InvalidTarget",
    "InvalidType",
    "MissingDependency",
    "MissingFile",
    "MissingKey",
    "NotAFolder",
    "NotFinite",
    "NotWritable",
    "RankFailed",
    "WhenceError",
]


class WhenceError(Exception):
    """Anything that whence complains about. The message says what to do."""


class InvalidInput(WhenceError, ValueError):
    """A value that cannot be used: a setting, a dataset, a model, a shape."""


class InvalidTarget(InvalidInput):
    """A label that the task's loss is not defined for.

    Args:
        problem: what is wrong with it, as in "has the target 7, but ...".
        position: of the example in its batch.
    """

    def __init__(self, problem: str, position: int | None = None) -> None:
        self.problem, self.position = problem, position
        of_batch = "" if position is None else f"example {position} of the batch "
        super().__init__(of_batch + problem)


class InvalidType(WhenceError, TypeError):
    """An object of the wrong type."""


class InvalidIndex(WhenceError, IndexError):
    """A query or example that does not exist."""


class MissingKey(WhenceError, KeyError):
    """A name that does not exist."""

    def __str__(self) -> str:  # KeyError shows the repr of its message
        return Exception.__str__(self)


class MissingFile(WhenceError, FileNotFoundError):
    """A file or folder that does not exist, or an incomplete folder."""


class NotAFolder(WhenceError, NotADirectoryError):
    """A file where a folder is needed."""


class NotWritable(WhenceError, PermissionError):
    """A file or folder that may not be written."""


class DamagedFile(WhenceError, OSError, ValueError):
    """A file that is truncated, altered, or not of the format it should have."""


class DiskFull(WhenceError, OSError):
    """Too little free space for results, noticed before they are written."""


class FolderConflict(InvalidInput):
    """A folder that holds the results of a different calculation."""


class NotFinite(WhenceError, FloatingPointError):
    """NaN or infinity in a calculation: the run diverged, or a setting is too extreme."""


class RankFailed(WhenceError, ConnectionError):
    """Another process of a distributed calculation failed, ended, or makes other calls."""


class MissingDependency(WhenceError, ImportError):
    """An optional package that is not installed."""


# -- checks of settings ----------------------------------------------------------------------------


def check_choice(name: str, value: str, options: Iterable[str]) -> str:
    """The value of a setting; refuses one that is not among the options."""
    if value not in (known := list(options)):
        listed = ", ".join(map(repr, known))
        raise InvalidInput(f"{name}={value!r} is not known: use one of {listed}")
    return value


def whole(name: str, value: Any, least: int | None = None, otherwise: str = "") -> int:
    """The value of a setting as an int, also of NumPy's integers; refuses all that is no whole
    number, True and False, and what is below `least`; `otherwise` names other choices."""
    try:
        number = None if isinstance(value, bool) else index(value)
    except TypeError:
        number = None
    if least is not None and (number is None or number < least):
        raise InvalidInput(f"{name}={value!r} must be a whole number, at least {least}{otherwise}")
    if number is None:
        raise InvalidType(f"{name}={value!r} must be a whole number")
    return number


def finite(name: str, value: Any) -> float:
    """The value of a setting as a float; refuses texts, NaN and infinity."""
    try:
        read = math.nan if isinstance(value, (bool, str, bytes)) else float(value)
    except (TypeError, ValueError, RuntimeError):
        read = math.nan
    if not math.isfinite(read):
        raise InvalidInput(f"{name}={value!r} must be a finite number")
    return read


def flag(name: str, value: Any) -> bool:
    """The value of a setting that is True or False; a text such as "no" would count as True."""
    if not isinstance(value, bool) and type(value).__name__ not in ("bool_", "bool"):
        raise InvalidType(f"{name}={value!r} must be True or False")
    return bool(value)


def check_count(name: str, value: Any, otherwise: str = "") -> None:
    """Refuse a value that is not a whole number, at least 1; `otherwise` names other choices."""
    whole(name, value, 1, otherwise)


def check_damping(damping: Any, otherwise: str = "") -> None:
    """Refuse a damping that is negative or not a number; `otherwise` names other choices."""
    known = isinstance(damping, Real) and not isinstance(damping, bool)
    if not known or not 0 <= float(damping) < float("inf"):
        raise InvalidInput(f"damping={damping!r} must be zero or positive{otherwise}")


def check_positive(name: str, value: Any) -> None:
    """Refuse a value that is not a positive number."""
    if isinstance(value, bool) or not (isinstance(value, Real) and 0 < float(value) < float("inf")):
        raise InvalidInput(f"{name}={value!r} must be a positive number")


def check_share(name: str, value: Any) -> None:
    """Refuse a value that is not between 0 and 1."""
    if isinstance(value, bool) or not (isinstance(value, Real) and 0 <= float(value) <= 1):
        raise InvalidInput(f"{name}={value!r} must be a share, from 0 to 1")


# -- errors of other people's code -----------------------------------------------------------------


@contextmanager
def examples_of(name: str, indices: Any, code: str = "the model or the task") -> Iterator[None]:
    """Name the dataset and the examples in an error about a batch of them: which target is wrong,
    or which of the user's own code failed."""
    try:
        yield
    except InvalidTarget as error:
        if error.position is None:
            raise
        example = int(indices[error.position])
        raise InvalidTarget(f"{name} example {example} {error.problem}") from None
    except Exception as error:
        if isinstance(error, (WhenceError, MemoryError)) or "OutOfMemory" in type(error).__name__:
            raise
        shown = ", ".join(str(int(k)) for k in indices[:4]) + (", ..." if len(indices) > 4 else "")
        raise InvalidInput(
            f"{code} failed on {name} example {shown}: {type(error).__name__}: {error}"
        ) from error


@contextmanager
def optional(needs: str, extra: str) -> Iterator[None]:
    """For imports of optional packages: an error says what needs them, and how to install them."""
    try:
        yield
    except ImportError as error:
        raise MissingDependency(f"{needs}: pip install 'whence-tda[{extra}]'") from error


# -- warnings --------------------------------------------------------------------------------------

_collected: ContextVar[tuple[list[str], ...]] = ContextVar("collected warnings", default=())
_shown: set[str] = set()  # messages of `show_once`
_INSIDE = ("whence", "contextlib")  # whose lines are not the user's


def warn(message: str, *, stacklevel: int = 2) -> None:
    """Warn, and note the message for every result that is being computed.

    Python shows the same warning of the same line once; each result stores all of its warnings.
    """
    note(message)
    warnings.warn(message, stacklevel=stacklevel + 1)


def note(message: str) -> None:
    """Note a message for every result that is being computed, and show nothing."""
    for messages in _collected.get():
        if message not in messages:
            messages.append(message)


def show_once(message: str) -> None:
    """Show a warning the first time in this process, at the user's line; note nothing."""
    if message not in _shown:
        _shown.add(message)
        frame, level = sys._getframe(1), 2
        while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in _INSIDE:
            frame, level = frame.f_back, level + 1
        warnings.warn(message, stacklevel=level)


def collected_warnings() -> list[str]:
    """The list that `warn` adds to; an empty one where nothing is collected."""
    return _collected.get()[-1] if _collected.get() else []


@contextmanager
def collect_warnings() -> Iterator[list[str]]:
    """The messages of `warn` inside the `with`, or inside the function that this decorates, each
    once. `Scores` that are made there have them."""
    messages: list[str] = []
    token = _collected.set((*_collected.get(), messages))
    try:
        yield messages
    finally:
        _collected.reset(token)
