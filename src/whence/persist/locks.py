"""Locks between processes. The system releases them when a process dies.

A lock file says who holds it: `process 4711 on gpu7, since 2026-11-16 07:44:58`.
"""

from __future__ import annotations

import errno
import os
import platform
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, ClassVar
from weakref import WeakValueDictionary

from whence.errors import FolderConflict, InvalidInput
from whence.persist.files import make_folder, naming_write_errors

UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
NAME = ".lock"  # of a folder's lock


def acquire(path: Path, *, wait: bool) -> IO[bytes] | None:
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
            if error.errno in UNSUPPORTED:  # some network disks: nobody can hold a lock there
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


def holder(path: Path) -> str:
    """Who holds a lock, as far as its file tells."""
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
        self.path, self.doing = folder.resolve() / NAME, doing
        earlier = self._of_this_process.get(str(self.path))
        if earlier is not None and takeover:
            earlier.release()
        self._file: IO[bytes] | None = None
        if os.name != "nt":
            self._file = acquire(self.path, wait=False)
            if self._file is None:
                raise FolderConflict(
                    f"another writer {doing} in {folder} ({holder(self.path)}): wait until it has "
                    "finished, end it, or choose another folder"
                )
        self.held = True
        self._of_this_process[str(self.path)] = self

    def check(self) -> None:
        """Refuse to go on after another writer of this process took the lock."""
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
