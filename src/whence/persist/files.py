"""Files that are written whole or not at all, by one process at a time, and checked when read.

Nothing is ever pickled or unpickled.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import re
import secrets
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from time import monotonic
from typing import IO, Any, ClassVar
from weakref import WeakValueDictionary

from whence.errors import (
    DamagedFile,
    DiskFull,
    FolderConflict,
    InvalidInput,
    InvalidType,
    NotAFolder,
    NotWritable,
    WhenceError,
    warn,
)

REMEDY = "restore it from a copy, or compute it again"

# Temporary files: ours, with their writer's machine and process, and those of safetensors.
TEMPORARY = re.compile(
    r"\..+\.(?P<machine>[0-9a-f]{8})-(?P<process>\d+)-[0-9a-f]+\.tmp|\.tmp[A-Za-z0-9]{6}"
)
ABANDONED = 3600.0  # seconds without a change, after which the writer is taken to be dead
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
TOO_LONG = errno.ENAMETOOLONG
FORBIDDEN = (errno.EROFS, errno.EACCES, errno.EPERM)
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)  # of some network disks
LOCK = ".lock"  # the name of a folder's lock
CHECKSUM = "checksum"  # the name of the checksum in a JSON file

SAVING_SHARE = 0.03  # of the time, at most, is spent on saving unfinished work
FREE = 0.01  # seconds; saving that takes less is not counted


def damaged(path: Path, reason: object, remedy: str = REMEDY) -> DamagedFile:
    """The error for a damaged file: what is wrong with it (text, or an exception), what to do."""
    if isinstance(reason, KeyError):
        reason = f"{reason} is missing"
    elif isinstance(reason, Exception) and not isinstance(reason, WhenceError):
        reason = f"{type(reason).__name__}: {reason}"
    return DamagedFile(f"{path} is damaged ({reason}): {remedy}")


def as_path(given: object) -> Path:
    """A path that somebody gives, refused if no file or folder can have it."""
    if not isinstance(given, (str, os.PathLike)) or not given:
        raise InvalidType(f"{given!r} is not a path: give the name of a file or folder")
    path = Path(given)
    try:
        path.exists()
        os.fsencode(path)
    except (OSError, ValueError) as error:
        if not isinstance(error, OSError) or error.errno == TOO_LONG:
            raise _impossible(path, error) from error
    if "\0" in str(path):
        raise _impossible(path, "it has a null character")
    return path


def _impossible(path: Path, reason: object) -> InvalidInput:
    reason = reason.strerror if isinstance(reason, OSError) else reason
    shown, letters = ascii(str(path)), len(str(path))
    shown = shown if letters < 80 else f"{shown[:40]}...{shown[-30:]} ({letters} letters)"
    return InvalidInput(
        f"{shown} cannot be the name of a file or folder ({reason}): choose another"
    )


# --- writing ------------------------------------------------------------------------------------


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Replace a file as a whole: a killed process leaves the old file or the new one.

    Write to the path that is yielded, a private one in the same folder. When the block ends, the
    content is synced to disk and renamed; when it raises, the old file stays.
    """
    # a name that no other process, thread or machine uses, and not longer than a name may be
    writer = f"{_machine()}-{os.getpid()}-{secrets.token_hex(4)}"
    temporary = path.with_name(f".{path.name[:40]}.{writer}.tmp")
    try:
        with naming_write_errors(path):
            with open(temporary, "xb") as file:
                mode = os.fstat(file.fileno()).st_mode
            yield temporary
            if temporary.stat().st_mode != mode:  # safetensors lets only the owner read its files
                os.chmod(temporary, mode)
            move_into_place(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def naming_write_errors(path: Path) -> Iterator[None]:
    """Report a write that fails for lack of space, the disk's or a limit's, or of permission."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.errno in FORBIDDEN:
            raise NotWritable(
                f"{path} cannot be written ({error.strerror}): use a folder that you may write to. "
                "For factors of a run that is read-only: Study(cache=...)"
            ) from error
        if isinstance(error, OSError) and error.errno == TOO_LONG:
            raise _impossible(path, error) from error
        words = str(error)  # safetensors: "(os error 28)"; NumPy: "9 requested and 3 written"
        full = "requested and" in words or any(f"(os error {code})" in words for code in FULL)
        if isinstance(error, OSError) and error.errno is not None:
            full = error.errno in FULL
        if not full or isinstance(error, WhenceError):
            raise
        raise DiskFull(
            f"{path} cannot be written, because the disk is full ({error}): free some space, and "
            "make the same call again. What was there before is unharmed"
        ) from error


def move_into_place(written: Path, path: Path) -> None:
    """Sync a finished file to disk and rename it, so that `path` survives a power failure."""
    with naming_write_errors(path):
        with open(written, "rb+") as file:
            os.fsync(file.fileno())
        try:
            os.replace(written, path)
        except IsADirectoryError as error:
            raise InvalidInput(
                f"{path} is a folder, where a file is to be written: move it away"
            ) from error
    with suppress(OSError):  # folders cannot be synced on Windows and on some network disks
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_bytes(path: Path, content: bytes) -> None:
    with atomic(path) as temporary:
        temporary.write_bytes(content)


def write_json(path: Path, content: Any, *, checksum: bool = True) -> None:
    """Write a JSON object, by default with a checksum, which `read_json` verifies."""
    if checksum:
        content = {**content, CHECKSUM: _checksum(json.loads(json.dumps(content)))}
    write_bytes(path, json.dumps(content, indent=2).encode())


def _checksum(content: Mapping[str, Any]) -> str:
    """A digest of values, not of layout: a file may be indented in another way."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def make_folder(path: Path) -> None:
    """Create a folder if needed. Remove what killed processes left in it."""
    try:
        with naming_write_errors(path):
            path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise NotAFolder(f"{path} is a file: give a folder") from error
    remove_abandoned(path)


# --- unfinished work ----------------------------------------------------------------------------


class Throttle:
    """Decides when to save: at intervals, which are longer where saving is slow.

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


@contextmanager
def parsing(path: Path, remedy: str = REMEDY) -> Iterator[None]:
    """Report whatever goes wrong while the content of a file is taken apart as damage to it."""
    refuse_special(path, remedy)
    try:
        yield
    except (DamagedFile, FileNotFoundError, PermissionError):
        raise
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        LookupError,
        MemoryError,
        OSError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        raise damaged(path, error, remedy) from error


def refuse_special(path: Path, remedy: str = REMEDY) -> None:
    """Refuse what is not a file: a pipe, which would be waited for, a device, a folder."""
    try:
        special = path.exists() and not path.is_file()
    except (OSError, ValueError):  # a name that no file can have
        special = False
    if special:
        raise damaged(path, "it is not a file, but a folder, a pipe or a device", remedy)


def read_json(path: Path, *, schema: int | None = None, remedy: str = REMEDY) -> dict[str, Any]:
    """The object in a JSON file, without its checksum, which is verified.

    Args:
        schema: the schema version that it must have (None: it has no version).
        remedy: what to do if the file is damaged.

    Raises:
        DamagedFile: the file is not a JSON object, or was altered.
        InvalidInput: the file has another schema version.
    """
    with parsing(path, remedy):
        content = json.loads(path.read_bytes())
    if not isinstance(content, dict):
        raise damaged(path, f"{type(content).__name__} instead of an object", remedy)
    if schema is not None and "schema" not in content:
        raise damaged(path, "it has no schema version", remedy)
    if schema is not None and content["schema"] != schema:
        raise InvalidInput(
            f"{path} has schema {content['schema']!r}, this whence reads {schema}: use the version "
            "of whence that wrote it"
        )
    checksum = content.pop(CHECKSUM, None)
    if checksum is not None and checksum != _checksum(content):
        reason = f"altered: its checksum does not fit. If you edited it, delete its {CHECKSUM!r}"
        raise damaged(path, reason, remedy)
    if checksum is None and schema is not None:
        warn(
            f"{path} has no checksum, as earlier versions of whence wrote it: damage to it and to "
            "the arrays that it describes is not noticed. To add checksums, save or compute it "
            "again",
            stacklevel=3,
        )
    return content


def check_types(content: Mapping[str, Any], **kinds: type | tuple[type, ...]) -> None:
    """Refuse values of another type than these. Call it inside `parsing`, which names the file."""
    for name, kind in kinds.items():
        value = content[name]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise InvalidType(f"{name} is a {type(value).__name__}")


# --- one process at a time ----------------------------------------------------------------------
# The system releases a lock when its process dies. The file says who holds it: `process 4711 on
# gpu7, since 2026-11-16 07:44:58`.


def acquire_lock(path: Path, *, wait: bool) -> IO[bytes] | None:
    """Lock a file, which is created if needed. Close the returned file to release it.

    Args:
        wait: until the lock is free; otherwise None is returned if another process holds it.
    """
    import fcntl  # not on Windows, where nothing that needs a lock is supported

    while True:
        try:
            with naming_write_errors(path):
                file = open(path, "a+b", buffering=0)  # noqa: SIM115  open as long as it is held
        except IsADirectoryError as error:
            raise InvalidInput(f"{path} is a folder, where a lock belongs: move it away") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                break
        except BlockingIOError:
            file.close()
            return None
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno in NO_LOCKS:  # nobody can hold a lock there
                return file
            file.close()
            raise
        except BaseException:
            file.close()
            raise
        file.close()  # its holder has removed it meanwhile: lock the new one
    with suppress(OSError):  # on a full disk the lock holds without a name
        file.truncate(0)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        file.write(f"process {os.getpid()} on {platform.node()}, since {since}".encode())
    return file


def lock_holder(path: Path) -> str:
    """Who holds a lock, according to its file."""
    try:
        content = path.read_bytes()[:200].decode(errors="replace").strip()
    except OSError:
        content = ""
    return content or "unknown"


class FolderLock:
    """One writer at a time in a folder.

    Args:
        folder: created if needed. The lock is the file `.lock` in it while it is held.
        doing: what the writer does, such as "builds a store".
        takeover: take the lock from an earlier writer of this process, which may have failed
            without releasing it. That writer fails at its next `check`.

    Raises:
        FolderConflict: another writer holds the lock.
    """

    _of_this_process: ClassVar[WeakValueDictionary[str, FolderLock]] = WeakValueDictionary()

    def __init__(self, folder: Path, doing: str, *, takeover: bool = False) -> None:
        make_folder(folder)
        self.path, self.doing = folder.resolve() / LOCK, doing
        earlier = self._of_this_process.get(str(self.path))
        if earlier is not None and takeover:
            earlier.release()
        self._file: IO[bytes] | None = None
        if os.name != "nt":
            self._file = acquire_lock(self.path, wait=False)
            if self._file is None:
                raise FolderConflict(
                    f"another writer {doing} in {folder} ({lock_holder(self.path)}): wait until it "
                    "has finished, end it, or choose another folder"
                )
        self.held = True
        self._of_this_process[str(self.path)] = self

    def check(self) -> None:
        """Refuse to continue after another writer of this process took the lock."""
        if not self.held:
            raise FolderConflict(
                f"a later call in this process {self.doing} in {self.path.parent}: this one stops"
            )

    def release(self) -> None:
        if self._file is not None:
            self.path.unlink(missing_ok=True)
            self._file.close()
        self._file, self.held = None, False

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
