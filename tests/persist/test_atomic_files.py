"""Files are written whole or not at all, whoever else writes them, and checked when read."""

import errno
import json
import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from whence.errors import DamagedFile, NotWritable
from whence.persist import files
from whence.persist.arrays import load_array, load_tensors, map_array, save_array, save_tensors
from whence.persist.files import (
    atomic,
    make_folder,
    move_into_place,
    read_json,
    write_bytes,
    write_json,
)
from whence.run.checkpoint import RunError, file_sha256


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def python(code: str, *arguments: object) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


WRITERS: dict[str, Any] = {
    "bytes": lambda path, value: write_bytes(path, bytes([value]) * 99),
    "json": lambda path, value: write_json(path, {"value": value}),
    "array": lambda path, value: save_array(path, np.full(9, value)),
    "tensors": lambda path, value: save_tensors(path, {"x": torch.full((9,), value)}, {}),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_an_error_before_the_rename_leaves_the_old_file_and_nothing_else(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    WRITERS[kind](path, 1)
    before = path.read_bytes()

    def fails(*_: Any) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fails)
        with pytest.raises(OSError, match="no space left"):
            WRITERS[kind](path, 2)
    assert path.read_bytes() == before and names(tmp_path) == ["file"]
    WRITERS[kind](path, 2)
    assert path.read_bytes() != before and names(tmp_path) == ["file"]


def test_an_error_while_writing_leaves_the_old_file(tmp_path: Path) -> None:
    write_bytes(tmp_path / "file", b"old")
    with pytest.raises(KeyboardInterrupt), atomic(tmp_path / "file") as temporary:
        temporary.write_bytes(b"ne")
        raise KeyboardInterrupt
    assert (tmp_path / "file").read_bytes() == b"old" and names(tmp_path) == ["file"]


KILLED = """
    import os, signal, sys
    from pathlib import Path
    from whence.persist import files

    os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    files.write_json(Path(sys.argv[1]), {"value": "new"})
"""


def test_a_killed_writer_leaves_the_old_file_and_its_rest_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_json(path, {"value": "old"})
    process = python(KILLED, path)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert read_json(path) == {"value": "old"}
    (rest,) = set(names(tmp_path)) - {"state.json"}
    assert rest.startswith(".state.json.")  # hidden, and no *.json
    make_folder(tmp_path)
    assert names(tmp_path) == ["state.json"]


def test_the_temporary_files_of_other_writers_are_left_alone(tmp_path: Path) -> None:
    """Those of a running process and of another machine; after an hour they are abandoned."""
    machine = files._machine()
    other = f"{int(machine, 16) ^ 1:08x}"
    foreign = [f".a.{machine}-{os.getpid()}-0.tmp", f".a.{other}-1-0.tmp", ".tmpAb3dEf"]
    kept = [*foreign, "notes.tmp", ".hidden"]
    for name in kept:
        (tmp_path / name).touch()
    make_folder(tmp_path)
    assert names(tmp_path) == sorted(kept)
    hours_ago = time.time() - 2 * files.ABANDONED
    for name in kept:
        os.utime(tmp_path / name, (hours_ago, hours_ago))
    make_folder(tmp_path)
    assert names(tmp_path) == [".hidden", "notes.tmp"]


SAME_NAME = """
    import sys
    from pathlib import Path
    import numpy as np
    from whence.persist.arrays import map_array, save_array

    path, value = Path(sys.argv[1]), float(sys.argv[2])
    for _ in range(100):
        save_array(path, np.full(5000, value))
        found = map_array(path)
        assert found.shape == (5000,) and len(set(found.tolist())) == 1, found
"""


def test_two_processes_may_write_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.npy"
    writers = [python(SAME_NAME, path, value) for value in (1, 2)]
    for writer in writers:
        _, errors = writer.communicate()
        assert writer.returncode == 0, errors
    assert names(tmp_path) == ["rows.npy"]
    assert set(map_array(path).tolist()) in ({1.0}, {2.0})


@pytest.mark.parametrize("kind", WRITERS)
def test_files_can_be_read_by_whom_the_umask_allows(kind: str, tmp_path: Path) -> None:
    mask = os.umask(0o027)
    try:
        WRITERS[kind](tmp_path / "file", 1)
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_files_are_synced_before_they_are_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    sync, rename = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        done.append("sync folder" if folder else "sync file")
        sync(descriptor)

    def replace(source: Path, target: Path) -> None:
        done.append("rename")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    write_bytes(tmp_path / "a", b"content")
    assert done == ["sync file", "rename", "sync folder"]
    move_into_place(tmp_path / "a", tmp_path / "b")
    assert done[3:] == done[:3] and names(tmp_path) == ["b"]


def test_a_folder_that_cannot_be_synced_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError("invalid argument")
        true(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write_bytes(tmp_path / "a", b"content")
    assert (tmp_path / "a").read_bytes() == b"content"


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "deeper"):
        with pytest.raises(NotADirectoryError, match="is a file: give a folder"):
            make_folder(path)


# --- reading --------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "{", '{"schema": 1', "[1, 2]", "null", "\udcff"])
def test_damaged_json_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(DamagedFile, match=r"a\.json is damaged \(.+\): make it again$"):
        read_json(path, remedy="make it again")


def test_the_schema_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"schema": 1, "x": [1, None]})
    assert read_json(path, schema=1) == {"schema": 1, "x": [1, None]}
    assert json.loads(path.read_text()).keys() == {"schema", "x", "checksum"}
    with pytest.raises(ValueError, match="has schema 1, this whence reads 2: use the version of"):
        read_json(path, schema=2)
    write_json(path, {"x": 1})
    with pytest.raises(DamagedFile, match="no schema version"):
        read_json(path, schema=1)
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "none.json", schema=1)


@pytest.mark.parametrize("size", [0, 3, 60, 130, -1])
@pytest.mark.parametrize("mode", ["r", "c", "r+"])
def test_truncated_arrays_are_refused(tmp_path: Path, size: int, mode: Any) -> None:
    path = tmp_path / "a.npy"
    save_array(path, np.arange(6.0))
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DamagedFile, match=r"a\.npy is damaged \(truncated.*\): make it again$"):
        map_array(path, mode, remedy="make it again")


def test_arrays_are_never_unpickled_nor_pickled(tmp_path: Path) -> None:
    objects = np.array([{}], dtype=object)
    np.save(tmp_path / "a.npy", objects, allow_pickle=True)
    with pytest.raises(DamagedFile, match="is damaged"):
        map_array(tmp_path / "a.npy")
    with pytest.raises(ValueError, match="allow_pickle"):
        save_array(tmp_path / "b.npy", objects)
    np.savez(tmp_path / "c.npz", x=np.ones(2))
    with pytest.raises(DamagedFile, match=r"not a \.npy file"):
        map_array(tmp_path / "c.npz")


def test_arrays_that_do_not_fit_their_description(tmp_path: Path) -> None:
    entry = save_array(tmp_path / "a.npy", np.arange(6.0))
    assert load_array(tmp_path / "a.npy", entry).tolist() == list(range(6))
    for change in ({"shape": [5]}, {"dtype": "float32"}):
        with pytest.raises(DamagedFile, match="do not belong together"):
            load_array(tmp_path / "a.npy", entry | change)
    with pytest.raises(FileNotFoundError, match=r"b\.npy is missing: restore it"):
        load_array(tmp_path / "b.npy", entry)


def test_damage_is_an_oserror_and_a_valueerror() -> None:
    assert issubclass(DamagedFile, OSError) and issubclass(DamagedFile, ValueError)
    assert (
        str(files.damaged(Path("a"), KeyError("x"), "do y"))
        == "a is damaged ('x' is missing): do y"
    )


# --- locks ----------------------------------------------------------------------------------------

HOLDS = """
    import sys
    from pathlib import Path
    from whence.persist import files

    file = files.acquire_lock(Path(sys.argv[1]), wait=False)
    print("held" if file else "refused", flush=True)
    sys.stdin.read()
"""


def test_a_lock_is_free_again_when_its_process_dies(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    command = [sys.executable, "-c", textwrap.dedent(HOLDS), str(path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        assert files.acquire_lock(path, wait=False) is None
        process.kill()
        file = files.acquire_lock(path, wait=True)
        assert file is not None
        file.close()
        process.communicate()
    again = files.acquire_lock(path, wait=False)
    assert again is not None
    again.close()


READERS: dict[str, Any] = {
    "json": read_json,
    "array": map_array,
    "tensors": load_tensors,
    "checkpoint": file_sha256,
}


@pytest.mark.parametrize("name", READERS)
def test_a_pipe_is_not_waited_for(name: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    os.mkfifo(path)
    with pytest.raises((DamagedFile, RunError), match="it is not a file, but"):
        READERS[name](path)


REFUSED: dict[str, Any] = {
    "bytes": lambda folder: write_bytes(folder / "a", b"1"),
    "folder": lambda folder: make_folder(folder / "a"),
    "lock": lambda folder: files.FolderLock(folder, "writes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_place_that_may_not_be_written_to_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk that is mounted read-only."""

    def refuse(path: Any, *_: Any, **__: Any) -> Any:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr("builtins.open", refuse)
    if name == "folder":
        monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(NotWritable, match=r"cannot be written \(Read-only.*Study\(cache="):
        REFUSED[name](tmp_path)
