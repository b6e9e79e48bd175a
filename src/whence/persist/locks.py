"""Locks between processes. The system releases them when a process dies."""

from __future__ import annotations

from pathlib import Path
from typing import IO


def acquire(path: Path, *, wait: bool) -> IO[bytes] | None:
    """Lock a file, which is created if needed. Close the returned file to release it.

    Args:
        wait: until the lock is free; otherwise None is returned if another process holds it.
    """
    import fcntl  # not on Windows, where nothing that needs a lock is supported

    file = open(path, "a+b")  # noqa: SIM115  open as long as the lock is held
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        file.close()
        return None
    except BaseException:
        file.close()
        raise
    return file
