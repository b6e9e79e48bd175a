"""The errors that whence raises on purpose. Each is also the built-in error of its kind.

Catch `WhenceError` for anything that whence complains about, or the built-in type as usual:

    try:
        scores = whence.Source().attribute(study, query)
    except ValueError: ...            # also catches InvalidInput
    except whence.WhenceError: ...    # any complaint of whence, and nothing else

An error of another type that comes out of whence is from your own code, from another library, or a
bug. This module needs only the standard library, so that every room may use it.
"""

from __future__ import annotations

__all__ = [
    "DamagedFile",
    "DiskFull",
    "FolderConflict",
    "InvalidIndex",
    "InvalidInput",
    "InvalidType",
    "MissingDependency",
    "MissingFile",
    "MissingKey",
    "NotAFolder",
    "NotFinite",
    "WhenceError",
]


class WhenceError(Exception):
    """Anything that whence complains about. The message says what to do."""


class InvalidInput(WhenceError, ValueError):
    """A value that cannot be used: a setting, a dataset, a model, a shape."""


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


class DamagedFile(WhenceError, OSError, ValueError):
    """A file that is truncated, altered, or not of the format it should have."""


class DiskFull(WhenceError, OSError):
    """Too little free space for results, noticed before they are written."""


class FolderConflict(InvalidInput):
    """A folder that holds the results of a different calculation."""


class NotFinite(WhenceError, FloatingPointError):
    """NaN or infinity in a calculation: the run diverged, or a setting is too extreme."""


class MissingDependency(WhenceError, ImportError):
    """An optional package that is not installed."""
