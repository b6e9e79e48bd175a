"""Named tensors in safetensors files, with a checksum that is verified when they are read.

`FactorCache` holds fitted factors, each entry under a key of everything it depends on: weights,
data, task, layers and settings. So nothing stale is ever reused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from whence.persist.files import (
    CHECKSUM,
    REMEDY,
    Throttle,
    atomic,
    damaged,
    make_folder,
    parsing,
)
from whence.persist.identity import sha256_of, tensors_sha256

SNAPSHOT_SECONDS = 20.0
REFIT = "delete it to fit it again"


def independent(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU, contiguous, none a view of another, as safetensors requires."""
    separate: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage()
        if storage.nbytes() != tensor.nbytes or storage.data_ptr() in storages:
            tensor = tensor.clone()
        storages.add(storage.data_ptr())
        separate[name] = tensor
    return separate


def serialize(tensors: Mapping[str, Tensor]) -> bytes:
    """A safetensors file: the same tensors give the same bytes, whatever their order or device."""
    return safetensors.torch.save(independent(tensors))


def save_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write tensors and what is to be known about them, as JSON, with a checksum."""
    separate = independent(tensors)
    plain = json.loads(json.dumps(about, default=str))
    text = json.dumps({**plain, CHECKSUM: _checksum(separate, plain)})
    with atomic(path) as temporary:
        # One metadata entry, because the order of several varies.
        safetensors.torch.save_file(separate, temporary, {"about": text})


def _checksum(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> str:
    """A digest of the tensors, with names, dtypes and shapes, and of what is known about them."""
    forms = {name: [str(t.dtype), list(t.shape)] for name, t in tensors.items()}
    return sha256_of(json.dumps([forms, about], sort_keys=True), tensors_sha256(tensors))


def load_tensors(
    path: Path, *, remedy: str = REMEDY, checksum_required: bool = True
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a safetensors file, and what `save_tensors` was given about them.

    Args:
        remedy: what to do if the file is damaged.
        checksum_required: refuse a file without a checksum. Some kinds of files did not have one
            in earlier versions, and kept what is to be known in separate metadata entries.

    Raises:
        DamagedFile: the file is truncated or altered.
    """
    with parsing(path, remedy):
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
                about: dict[str, Any] = dict(file.metadata() or {})
        except SafetensorError as error:
            raise damaged(path, f"truncated, or not a safetensors file: {error}", remedy) from error
        about |= json.loads(about.pop("about", "{}"))
    # Earlier versions had a checksum of the names and bytes only, or none.
    checksum, bytes_only = about.pop(CHECKSUM, None), about.pop("sha256", None)
    if checksum is None and bytes_only is None and checksum_required:
        raise damaged(path, "it has no checksum", remedy)
    if (checksum is not None and checksum != _checksum(tensors, about)) or (
        bytes_only is not None and bytes_only != tensors_sha256(tensors)
    ):
        raise damaged(path, "altered: its checksum does not fit", remedy)
    return tensors, about


class FactorCache:
    """Entries (dicts of tensors) by key, in a folder, or in memory when there is no folder.

    A pass over the data leaves snapshots, from which the same call resumes.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._memory: dict[str, dict[str, Tensor]] = {}
        self._throttle = Throttle(SNAPSHOT_SECONDS)
        self.before_saving: dict[str, Callable[[], None]] = {}  # what entries depend on, by its key

    def get(self, key: str) -> dict[str, Tensor] | None:
        if self.folder is None:
            return self._memory.get(key)
        entry = self._load(self._path(key))
        return None if entry is None else entry[0]

    def put(self, key: str, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> None:
        self._save_dependencies()
        if self.folder is None:
            self._memory[key] = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
            return
        self._save(self._path(key), tensors, {"settings": settings})
        self._partial(key).unlink(missing_ok=True)

    def drop(self, key: str) -> None:
        self._memory.pop(key, None)
        if self.folder is not None:
            self._path(key).unlink(missing_ok=True)

    def snapshot(self, key: str) -> tuple[dict[str, Tensor], dict[str, int]] | None:
        """The totals of a pass that was interrupted, and how far it had come."""
        entry = None if self.folder is None else self._load(self._partial(key))
        return None if entry is None else (entry[0], entry[1]["position"])

    def offer_snapshot(
        self, key: str, tensors: Mapping[str, Tensor], position: dict[str, int]
    ) -> None:
        """Save the totals of a pass if it is time to."""
        if self.folder is not None and self._throttle.due():
            with self._throttle.saving():
                self._save_dependencies()
                self._save(self._partial(key), tensors, {"position": position})

    @staticmethod
    def _load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        try:
            return load_tensors(path, remedy=REFIT)
        except FileNotFoundError:  # not there yet, or another process has just removed it
            return None

    def _save_dependencies(self) -> None:
        for save in list(self.before_saving.values()):
            save()

    def _save(self, path: Path, tensors: Mapping[str, Tensor], about: dict[str, Any]) -> None:
        make_folder(path.parent)
        save_tensors(path, tensors, about)

    def _path(self, key: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{key}.safetensors"

    def _partial(self, key: str) -> Path:
        return self._path(key + ".partial")
