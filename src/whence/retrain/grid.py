"""A folder of trainings, each stored once, whichever process made it.

    grid.json             recipe and queries, and how many models train together, and how
    parts/*.safetensors   measurements (k, q) of k trainings, and their keys
    parts/*.lock          held by the process that works on a part, until it finishes or dies

Several processes, started by torchrun or by hand, may share a folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from whence.errors import InvalidInput
from whence.persist import files
from whence.persist.arrays import load_tensors, save_tensors
from whence.persist.files import as_path, damaged, make_folder, parsing, read_json, write_json
from whence.persist.identity import sha256_of

SCHEMA = 1
Rows = NDArray[np.float64]


class Grid:
    """Measurements by training key; in memory, or in a folder.

    Args:
        out: the folder, or None to keep the measurements in memory.
        identity: what the trainings have in common. A folder with another identity is refused.
        queries: q, the length of a row.
    """

    def __init__(
        self, out: str | os.PathLike[str] | None, identity: Mapping[str, Any], queries: int
    ) -> None:
        self.folder = None if out is None else as_path(out)
        self.queries = queries
        self._rows: dict[str, Rows] = {}
        self._read: set[str] = set()
        self.notes: dict[str, Any] = {}
        if self.folder is None:
            return
        make_folder(self.folder)
        make_folder(self.folder / "parts")
        with self.lock("grid"):
            self._open(json.loads(json.dumps(dict(identity))))
        self.refresh()

    def _open(self, identity: dict[str, Any]) -> None:
        assert self.folder is not None
        file = self.folder / "grid.json"
        if not file.exists():
            self._identity = identity
            self._write()
            return
        remedy = "delete the folder, and rerun to train again"
        content = read_json(file, schema=SCHEMA, remedy=remedy)
        with parsing(file, remedy):
            recorded, self.notes = content["identity"], dict(content["notes"])
        if recorded != identity:
            raise InvalidInput(
                f"{self.folder} holds other trainings, which differ in: "
                f"{differences(recorded, identity)}. Give another folder, or delete this one"
            )
        self._identity = identity

    def _write(self) -> None:
        assert self.folder is not None
        content = {"schema": SCHEMA, "identity": self._identity, "notes": self.notes}
        write_json(self.folder / "grid.json", content)

    def settle(self, notes: Mapping[str, Any]) -> dict[str, Any]:
        """Store how the trainings are made.

        Earlier settings stay, so that a call that resumes forms the same units.
        """
        if self.folder is None:
            self.notes = dict(notes)
            return self.notes
        with self.lock("grid"):
            self._open(self._identity)
            self.notes = {**notes, **self.notes}
            self._write()
        return self.notes

    def refresh(self) -> None:
        """Read the parts that other processes have written since."""
        if self.folder is None:
            return
        for file in sorted((self.folder / "parts").glob("*.safetensors")):
            if file.name not in self._read:
                self._rows.update(_read(file, self.queries))
                self._read.add(file.name)

    def __contains__(self, key: str) -> bool:
        return key in self._rows

    def __getitem__(self, key: str) -> Rows:
        return self._rows[key]

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, keys: Sequence[str], rows: Rows) -> None:
        """Store the measurements (k, q) of k trainings. Rows of diverged ones become all NaN."""
        rows = np.where(np.isfinite(rows).all(1, keepdims=True), rows, np.nan)
        if self.folder is not None:
            tensors = {
                "measurements": torch.from_numpy(np.asarray(rows, np.float64)),
                "trainings": torch.tensor([list(bytes.fromhex(key)) for key in keys]).byte(),
            }
            name = f"{name_of(keys)}.safetensors"
            save_tensors(self.folder / "parts" / name, tensors, {})
            self._read.add(name)
        self._rows.update(zip(keys, rows, strict=True))

    @contextmanager
    def claim(self, keys: Sequence[str]) -> Iterator[bool]:
        """Whether this process gets to make these trainings."""
        if self.folder is None:
            yield True
            return
        with self.lock(name_of(keys), wait=False) as mine:
            if mine:
                self.refresh()
            yield mine

    @contextmanager
    def lock(self, name: str, wait: bool = True) -> Iterator[bool]:
        """Hold a lock file. The system releases it when the process dies."""
        assert self.folder is not None
        path = self.folder / "parts" / f"{name}.lock"
        file = files.acquire_lock(path, wait=wait)
        if file is None:
            yield False
            return
        with file:
            yield True
            if not wait:
                # a process that opened it before will find the part written under it
                path.unlink(missing_ok=True)


def name_of(keys: Sequence[str]) -> str:
    """The name of the file of trainings that are made together."""
    return sha256_of(*keys)[:24]


def _read(file: Path, queries: int) -> dict[str, Rows]:
    remedy = "delete it, and rerun to repeat its trainings"
    tensors, _ = load_tensors(file, remedy=remedy, checksum_required=False)
    with parsing(file, remedy):
        keys, rows = tensors["trainings"].numpy(), tensors["measurements"].numpy()
    if rows.shape != (len(keys), queries):
        raise damaged(file, f"shape {rows.shape}, not ({len(keys)}, {queries})", remedy)
    return {key.tobytes().hex(): row for key, row in zip(keys, rows, strict=True)}


def differences(stored: Any, given: Any, name: str = "") -> str:
    """The names of the differences between two identities, such as "recipe.stages.train.rates".

    A part that only `given` has is marked: an older version of whence wrote the stored identity.
    """
    if isinstance(stored, dict) and isinstance(given, dict):
        parts = [
            differences(stored.get(key), given.get(key), f"{name}.{key}" if name else str(key))
            + ("" if key in stored else " (not recorded by the whence that wrote it)")
            for key in sorted({*stored, *given})
            if stored.get(key) != given.get(key)
        ]
        return ", ".join(parts)
    return name
