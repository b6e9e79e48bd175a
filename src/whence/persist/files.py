"""Files that are written whole or not at all, and checked when they are read.

Nothing is ever pickled or unpickled.
"""

from __future__ import annotations

import json
import os
import platform
import re
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from whence.errors import InvalidInput, MissingFile, NotAFolder

REMEDY = "restore it from a copy, or compute it again"

# Temporary files: ours, with their writer's machine and process, and those of safetensors.
TEMPORARY = re.compile(
    r"\..+\.(?P<machine>[0-9a-f]{8})-(?P<process>\d+)-\d+\.tmp|\.tmp[A-Za-z0-9]{6}"
)
ABANDONED = 3600.0  # seconds without a change, after which the writer is taken to be dead
_NUMBERS = count()

SAVING_SHARE = 0.03  # of the time, at most, is spent on saving unfinished work
FREE = 0.01  # seconds; saving that takes less is not counted


class DamagedFile(OSError, ValueError):
    """A file that is truncated, altered, or not of the format it should have."""


def damaged(path: Path, reason: object, remedy: str = REMEDY) -> DamagedFile:
    """The error for a damaged file: what is wrong with it (text, or an exception), what to do."""
    if isinstance(reason, KeyError):
        reason = f"{reason} is missing"
    return DamagedFile(f"{path} is damaged ({reason}): {remedy}")


# --- writing ------------------------------------------------------------------------------------


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Replace a file as a whole: a killed process leaves the old file or the new one.

    Write to the path that is yielded, a private one in the same folder. When the block ends, the
    content is synced to disk and renamed; when it raises, the old file stays.
    """
    temporary = _temporary(path)
    try:
        with open(temporary, "xb") as file:
            mode = os.fstat(file.fileno()).st_mode
        yield temporary
        if temporary.stat().st_mode != mode:  # safetensors lets only the owner read its files
            os.chmod(temporary, mode)
        move_into_place(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def move_into_place(written: Path, path: Path) -> None:
    """Sync a finished file to disk and rename it, so that `path` survives a power failure."""
    with open(written, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(written, path)
    with suppress(OSError):  # folders cannot be synced on Windows and on some network disks
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_bytes(path: Path, content: bytes) -> None:
    with atomic(path) as temporary:
        temporary.write_bytes(content)


def write_json(path: Path, content: object) -> None:
    write_bytes(path, json.dumps(content, indent=2).encode())


def save_array(path: Path, array: NDArray[Any]) -> None:
    with atomic(path) as temporary, open(temporary, "wb") as file:
        np.save(file, array, allow_pickle=False)


def make_folder(path: Path) -> None:
    """Create a folder if needed. Remove what killed processes left in it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise NotAFolder(f"{path} is a file: give a folder") from error
    remove_abandoned(path)


# --- unfinished work ----------------------------------------------------------------------------


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
        self._interval = max(self.seconds, spent / SAVING_SHARE if spent > FREE else 0.0)

    def restart(self) -> None:
        """Count from now on: there is nothing to save yet."""
        self._last = monotonic()


# --- temporary files ----------------------------------------------------------------------------


def remove_abandoned(folder: Path) -> None:
    """Remove the temporary files that killed processes left in a folder: they may be large."""
    for file in folder.iterdir():
        match = TEMPORARY.fullmatch(file.name)
        if match is not None:
            with suppress(OSError):  # it has just been renamed, or belongs to another user
                gone = match["machine"] == _machine() and not _runs(int(match["process"]))
                if gone or time.time() - file.stat().st_mtime > ABANDONED:
                    file.unlink()


def _temporary(path: Path) -> Path:
    """A name that no other process, thread or machine uses."""
    writer = f"{_machine()}-{os.getpid()}-{next(_NUMBERS)}"
    return path.with_name(f".{path.name}.{writer}.tmp")


@cache
def _machine() -> str:
    """This machine and, in a container, its namespace of process ids."""
    namespace = Path("/proc/self/ns/pid")
    number = namespace.stat().st_ino if namespace.exists() else 0
    return f"{zlib.crc32(f'{platform.node()} {number}'.encode()):08x}"


def _runs(process: int) -> bool:
    if os.name == "nt":  # where os.kill would end it
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is another user's
        pass
    return True


# --- reading ------------------------------------------------------------------------------------


def read_json(path: Path, *, schema: int | None = None, remedy: str = REMEDY) -> dict[str, Any]:
    """The object in a JSON file.

    Args:
        schema: the schema version that it must have (None: it has no version).
        remedy: what to do if the file is damaged.

    Raises:
        DamagedFile: the file is not a JSON object.
        ValueError: the file has another schema version.
    """
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise damaged(path, error, remedy) from error
    if not isinstance(content, dict):
        raise damaged(path, f"{type(content).__name__} instead of an object", remedy)
    if schema is not None:
        check_schema(path, content, schema, remedy)
    return content


def check_schema(path: Path, content: Mapping[str, Any], schema: int, remedy: str = REMEDY) -> None:
    """Refuse a file whose schema version this whence does not read."""
    if "schema" not in content:
        raise damaged(path, "it has no schema version", remedy)
    if content["schema"] != schema:
        raise InvalidInput(
            f"{path} has schema {content['schema']!r}, this whence reads {schema}: use the version "
            "of whence that wrote it"
        )


def load_array(
    path: Path,
    shape: tuple[int, ...] | None = None,
    dtype: str | None = None,
    *,
    mode: Literal["r", "c"] | None = "r",
    remedy: str = REMEDY,
) -> NDArray[Any]:
    """The array in a .npy file.

    Args:
        shape, dtype: what the array must have, according to the file that describes it.
        mode: how it is mapped into memory ("r": read-only, "c": changes stay in memory); None
            reads it.
        remedy: what to do if the file is missing or damaged.
    """
    try:
        array = np.load(path, mmap_mode=mode, allow_pickle=False)
    except FileNotFoundError as error:
        raise MissingFile(f"{path} is missing: {remedy}") from error
    except PermissionError:
        raise
    except (ValueError, OSError, EOFError) as error:
        raise damaged(path, f"truncated, or not a .npy file: {error}", remedy) from error
    if not isinstance(array, np.ndarray):
        raise damaged(path, "an archive instead of an array", remedy)
    if (shape is not None and array.shape != shape) or (dtype and str(array.dtype) != dtype):
        raise damaged(
            path,
            f"{array.dtype} of shape {array.shape}, but its description says {dtype} of shape "
            f"{shape}: the files do not belong together",
            remedy,
        )
    return array
