"""Arrays on disk: damage is noticed, block by block, and no header is believed."""

import json
import os
import struct
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.files import edit_json, flip

import whence
from whence.errors import DamagedFile, DiskFull, FolderConflict, WhenceError
from whence.persist import arrays
from whence.persist.arrays import Checksums, entry_of, load_array, map_array, save_array
from whence.persist.files import FolderLock, read_json, write_json
from whence.retrain import Truth
from whence.scores import Scores


def test_the_checksums_are_those_of_every_mebibyte() -> None:
    array = np.random.default_rng(0).integers(0, 255, 2 * 2**20 + 77, np.uint8)
    data = array.tobytes()
    blocks = [zlib.crc32(data[k : k + 2**20]) for k in range(0, len(data), 2**20)]
    assert entry_of(array)["crc32"] == "".join(f"{b:08x}" for b in blocks)
    for cuts in ([5, 2**20, 2**20 + 1], [0, 2 * 2**20], [2**20 - 1, 2**20 + 2**19]):
        checksums = Checksums()
        for part in np.split(array, cuts):
            checksums.add(part)
        assert checksums.crc32 == entry_of(array)["crc32"] and checksums.size == len(data)
    again = Checksums(entry_of(array[:1000])["crc32"], 1000).add(array[1000:])
    assert again.crc32 == entry_of(array)["crc32"]
    assert entry_of(np.zeros((0, 3)))["crc32"] == ""
    assert (
        entry_of(np.arange(6).reshape(2, 3).T)["crc32"]
        == entry_of(np.array([0, 3, 1, 4, 2, 5]))["crc32"]
    )


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "bool"])
def test_every_flipped_bit_of_an_array_is_noticed(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "a.npy"
    array = np.arange(6).reshape(2, 3).astype(dtype)
    entry = save_array(path, array)
    whole = path.read_bytes()
    for place in range(len(whole)):
        flip(path, place, place % 8)
        try:
            read = load_array(path, entry)
        except DamagedFile:
            pass
        else:  # a byte of the header that says nothing, such as a blank
            assert place < len(whole) - array.nbytes
            assert read.dtype == array.dtype and np.array_equal(read, array)
        path.write_bytes(whole)


def test_every_flipped_bit_of_json_is_noticed(tmp_path: Path) -> None:
    path, content = tmp_path / "a.json", {"schema": 1, "rates": [0.1, 2], "name": "x", "on": True}
    write_json(path, content)
    whole = path.read_bytes()
    for place in range(len(whole)):
        flip(path, place, place % 7)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it has no checksum
                read = read_json(path, schema=1)
        except (DamagedFile, ValueError):
            pass
        else:  # a blank, or the name of the checksum
            assert {k: v for k, v in read.items() if k in content} == content, place
        path.write_bytes(whole)


# --- large arrays ---------------------------------------------------------------------------------


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "LARGE", 0)
    monkeypatch.setattr(arrays, "BLOCK", 64)


READS: dict[str, Callable[[Any], Any]] = {
    "all": lambda a: a[...],
    "ufunc": lambda a: a + 1,
    "reduce": lambda a: a.sum(0),
    "function": lambda a: np.concatenate([a, a]),
    "sort": lambda a: np.sort(a, axis=1),
    "copy": lambda a: a.copy(),
    "astype": lambda a: a.astype(np.float64),
    "transposed": lambda a: a.T,
    "row": lambda a: a[5],
    "negative": lambda a: a[-3],
    "number": lambda a: a[5, 9],
    "column": lambda a: a[:, 9],
    "columns": lambda a: a[:, [3, 9]],
    "rows": lambda a: a[[1, 5]],
    "mask": lambda a: a[np.arange(8) == 5],
    "slice": lambda a: a[4:6, 8:],
    "backwards": lambda a: a[::-1, ::-1],
    "both": lambda a: a[np.array([[5]]), np.array([[9]])],
    "iteration": list,
}
OTHERS: dict[str, Callable[[Any], Any]] = {
    "row": lambda a: a[4],
    "number": lambda a: a[6, 1],
    "rows": lambda a: a[[0, 7]],
    "slice": lambda a: a[:5],
    "stepped": lambda a: a[::2],
    "column": lambda a: a[:5, 9],
    "shape": lambda a: (a.shape, a.dtype, len(a), a.nbytes),
}


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("name", READS)
def test_a_damaged_block_is_noticed_when_it_is_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.npy"
    array = np.arange(8 * 16, dtype=np.float32).reshape(8, 16)  # a row is a block
    entry = save_array(path, array)
    np.testing.assert_array_equal(READS[name](load_array(path, entry)), READS[name](array))
    flip(path, path.stat().st_size - array.nbytes + 5 * 64 + 9 * 4)
    with pytest.raises(DamagedFile, match=r"a\.npy is damaged \(altered: MiB 5 "):
        READS[name](load_array(path, entry))


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("name", OTHERS)
def test_other_blocks_may_still_be_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.npy"
    array = np.arange(8 * 16, dtype=np.float32).reshape(8, 16)
    entry = save_array(path, array)
    flip(path, path.stat().st_size - array.nbytes + 5 * 64 + 9 * 4)
    found, wanted = OTHERS[name](load_array(path, entry)), OTHERS[name](array)
    assert np.array_equal(found, wanted) if name != "shape" else found == wanted


@pytest.mark.usefixtures("blocks")
def test_scores_are_checked_where_they_are_read(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((6, 16)).astype(np.float32)
    scores = Scores(values, method="m", measurement="x", unit="", higher_is_better=True)
    scores.save(tmp_path)
    path = tmp_path / "scores.npy"
    flip(path, path.stat().st_size - 1)  # the last query
    loaded = Scores.load(tmp_path)
    assert loaded.helpful(0).examples == scores.helpful(0).examples
    assert loaded.removal_effect(1, [3]) == scores.removal_effect(1, [3])
    reads: list[Callable[[], Any]] = [
        lambda: loaded.helpful(5),
        lambda: loaded.harmful(5),
        lambda: loaded.removal_effect(5, [3]),
        lambda: loaded.row_scores(5),
        loaded.to_numpy,
        lambda: np.asarray(loaded),
        lambda: loaded.values.mean(),
        lambda: whence.scores.ensemble([loaded, scores]),
        lambda: loaded.save(tmp_path / "again"),
    ]
    for read in reads:
        with pytest.raises(DamagedFile, match=r"scores\.npy is damaged"):
            read()


def test_arrays_stored_by_columns_are_read_and_written_by_rows(tmp_path: Path) -> None:
    values = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    np.save(tmp_path / "old.npy", values)
    assert (map_array(tmp_path / "old.npy") == values).all()
    entry = save_array(tmp_path / "new.npy", values)
    assert (load_array(tmp_path / "new.npy", entry) == values).all()
    assert np.load(tmp_path / "new.npy").flags.c_contiguous


# --- files of earlier versions --------------------------------------------------------------------


def test_what_has_no_checksums_is_read_with_a_warning(tmp_path: Path) -> None:
    scores = Scores(
        np.ones((2, 3), np.float32), method="m", measurement="x", unit="", higher_is_better=True
    )
    scores.save(tmp_path / "s")
    about = json.loads((tmp_path / "s/scores.json").read_text())["arrays"]
    edit_json(
        tmp_path / "s/scores.json",
        arrays={n: {k: e[k] for k in ("shape", "dtype")} for n, e in about.items()},
    )
    with pytest.warns(UserWarning, match=r"scores\.json has no checksum.*To add checksums, save"):
        loaded = Scores.load(tmp_path / "s")
    assert np.array_equal(loaded.values, scores.values)
    loaded.save(tmp_path / "s")
    Scores.load(tmp_path / "s")  # no warning
    truth = Truth(np.eye(3, dtype=bool), np.ones((3, 2, 4)))
    truth.save(tmp_path / "t")
    edit_json(tmp_path / "t/truth.json", shape=[3, 2, 4], examples=3)
    content = json.loads((tmp_path / "t/truth.json").read_text())
    del content["arrays"]
    (tmp_path / "t/truth.json").write_text(json.dumps(content))
    with pytest.warns(UserWarning, match=r"truth\.json has no checksum"):
        assert np.array_equal(Truth.load(tmp_path / "t").measurements, truth.measurements)


# --- hostile files --------------------------------------------------------------------------------


def npy(header: str, data: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    length = struct.pack("<H" if version == b"\x01\x00" else "<I", len(header))
    return b"\x93NUMPY" + version + length + header.encode("latin-1") + data


HOSTILE = {
    "empty": b"",
    "text": b"hello",
    "zip": b"PK\x03\x04" + bytes(100),
    "pickle": b"\x80\x04N.",
    "terabytes": npy("{'descr': '<f8', 'fortran_order': False, 'shape': (1099511627776, 64), }\n"),
    "overflow": npy(
        "{'descr': '<f8', 'fortran_order': False, 'shape': (9999999999999999999999, 9), }\n"
    ),
    "negative": npy("{'descr': '<f8', 'fortran_order': False, 'shape': (-1,), }\n", bytes(8)),
    "objects": npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }\n", b"\x80\x04N."),
    "complex": npy("{'descr': '<c16', 'fortran_order': False, 'shape': (1,), }\n", bytes(16)),
    "text array": npy("{'descr': '<U4', 'fortran_order': False, 'shape': (1,), }\n", bytes(16)),
    "structured": npy(
        "{'descr': [('a', '<f8')], 'fortran_order': False, 'shape': (1,), }\n", bytes(8)
    ),
    "no dtype": npy("{'descr': 'zz', 'fortran_order': False, 'shape': (1,), }\n", bytes(8)),
    "deep": npy("(" * 5000 + ")" * 5000),
    "code": npy("__import__('os').system('true')"),
    "long header": b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**32 - 1) + b"{",
    "more bytes": npy("{'descr': '<f8', 'fortran_order': False, 'shape': (1,), }\n", bytes(9)),
    "version 9": npy("{}", version=b"\x09\x00"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_arrays_are_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.npy"
    path.write_bytes(HOSTILE[name])
    with pytest.raises(DamagedFile, match=r"a\.npy is damaged"):
        map_array(path)


def test_a_folder_where_a_file_belongs(tmp_path: Path) -> None:
    (tmp_path / "a.npy").mkdir()
    (tmp_path / "a.json").mkdir()
    with pytest.raises(DamagedFile, match="is damaged"):
        map_array(tmp_path / "a.npy")
    with pytest.raises(DamagedFile, match="is damaged"):
        read_json(tmp_path / "a.json")


@pytest.mark.parametrize(
    "text", ["[" * 10**5, '{"a":' * 10**5, "9" * 5000, '{"a": ' + "9" * 5000 + "}", "\x00", "NaN"]
)
def test_hostile_json_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DamagedFile, match=r"a\.json is damaged"):
        read_json(tmp_path / "a.json")


# --- space, locks ---------------------------------------------------------------------------------


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    entry = save_array(tmp_path / "a.npy", np.ones(3))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(DiskFull, match=r"a\.npy cannot be written, because the disk is full"):
            save_array(tmp_path / "a.npy", np.zeros(3))
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(DiskFull, match="free some space"):
            arrays.create_array(tmp_path / "b.npy", (4,), "float64")
    assert load_array(tmp_path / "a.npy", entry).tolist() == [1, 1, 1]
    assert [file.name for file in tmp_path.iterdir()] == ["a.npy"]
    assert issubclass(DiskFull, WhenceError)


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    first = FolderLock(tmp_path, "writes")
    with pytest.raises(
        FolderConflict, match=rf"another writer writes in .* \(process {os.getpid()} on .*, since "
    ):
        FolderLock(tmp_path, "writes")
    first.check()
    second = FolderLock(tmp_path, "writes", takeover=True)
    with pytest.raises(FolderConflict, match="a later call in this process writes"):
        first.check()
    second.check()
    second.release()
    assert not list(tmp_path.iterdir())
    with FolderLock(tmp_path, "writes"):
        pass


# --- two writers ----------------------------------------------------------------------------------


def test_a_second_recorder_is_refused(tmp_path: Path) -> None:
    """And the run of the first is unharmed."""

    def parts() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def update(model: Any, optimizer: Any) -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    one, two = parts(), parts()
    with whence.Recorder(tmp_path, *one, checkpoints=1, total_steps=2):
        update(*one)
        with (
            pytest.raises(FolderConflict, match=r"another writer records a run in .*process \d+"),
            whence.Recorder(tmp_path, *two, checkpoints=1, total_steps=2, overwrite=True),
        ):
            update(*two)
        update(*one)
    run = whence.Run.open(tmp_path)
    assert run.finished and run.steps == 2
    assert not (tmp_path / ".lock").exists()


def test_a_run_killed_while_it_is_shortened_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """run.json first, then shorter arrays: the folder always holds the one or the other."""
    from whence.run.format import RunData

    rates = np.arange(12.0).reshape(6, 2)
    whole = RunData(learning_rates=rates, momentums=rates / 20, groups=[["a"], ["b"]])
    whole.hyperparameters = [{}, {}]
    real, written = os.replace, 0

    def stops(*paths: Any) -> None:
        nonlocal written
        written += 1
        if written > allowed:
            raise KeyboardInterrupt
        real(*paths)

    for allowed in range(4):
        with monkeypatch.context() as patch:
            whole.write(tmp_path)
            written = 0
            patch.setattr(os, "replace", stops)
            with pytest.raises(KeyboardInterrupt):
                whole.until(4).write(tmp_path, shorter=True)
        read = RunData.read(tmp_path)
        steps = 4 if allowed else 6
        np.testing.assert_array_equal(read.learning_rates, rates[:steps, : len(read.groups)])


def test_a_store_killed_in_its_first_moments_resumes(tmp_path: Path) -> None:
    from support import models

    trained = models.train_run(models.mlp(), whence.Classification(), models.vectors(8), [2], 0.1)
    study = whence.Study(models.mlp(), whence.Classification(), models.vectors(8), trained.run)
    (tmp_path / "s" / "gradients").mkdir(parents=True)
    (tmp_path / "s" / ".lock").write_text("process 1 on nowhere")
    store = whence.GradientStore.build(study, tmp_path / "s", 4, progress=False)
    assert store.tracin(models.vectors(2), progress=False).shape == (2, 8)
