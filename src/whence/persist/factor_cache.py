"""Where fitted factors live: safetensors under a key made of everything they depend on.

Nothing stale can be reused: weights, data, task, layers and settings are all in the key. Entries
are written to a temporary name and renamed; a pass that is under way leaves snapshots from which
the same call goes on.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

SNAPSHOT_SECONDS = 20.0


def key_of(settings: Mapping[str, Any]) -> str:
    """A name for these settings: SHA-256 of their canonical JSON."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[
        :32
    ]


class FactorCache:
    """Entries (dicts of tensors) by key, in a folder, or in memory when there is no folder."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._memory: dict[str, dict[str, Tensor]] = {}
        self._saved_at = time.monotonic()
        self._interval = SNAPSHOT_SECONDS

    def get(self, key: str) -> dict[str, Tensor] | None:
        if self.folder is None:
            return self._memory.get(key)
        found = self._read(self._path(key))
        return None if found is None else found[0]

    def put(self, key: str, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> None:
        kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        if self.folder is None:
            self._memory[key] = kept
            return
        self._write(self._path(key), kept, {"settings": settings})
        self._snapshot(key).unlink(missing_ok=True)

    def drop(self, key: str) -> None:
        self._memory.pop(key, None)
        if self.folder is not None:
            self._path(key).unlink(missing_ok=True)

    def snapshot(self, key: str) -> tuple[dict[str, Tensor], dict[str, int]] | None:
        """What a killed pass left: its totals, and where it was."""
        found = None if self.folder is None else self._read(self._snapshot(key))
        return None if found is None else (found[0], found[1]["position"])

    def offer_snapshot(
        self, key: str, tensors: Mapping[str, Tensor], position: dict[str, int]
    ) -> None:
        """Keep the totals if enough time went by since the last snapshot."""
        if self.folder is None or time.monotonic() - self._saved_at < self._interval:
            return
        start = time.monotonic()
        kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        self._write(self._snapshot(key), kept, {"position": position})
        self._saved_at = time.monotonic()
        self._interval = max(SNAPSHOT_SECONDS, 30 * (self._saved_at - start))  # ≤ 3 % of the time

    def _path(self, key: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{key}.safetensors"

    def _snapshot(self, key: str) -> Path:
        return self._path(key + ".partial")

    @staticmethod
    def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        if not path.exists():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                about = json.loads((file.metadata() or {}).get("about", "{}"))
        except SafetensorError as error:
            raise OSError(f"{path} is damaged ({error}): delete it to fit it again") from error
        if about.get("sha256") != _digest(tensors):
            raise OSError(f"{path} is damaged (checksum): delete it to fit it again")
        return tensors, about

    @staticmethod
    def _write(path: Path, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".tmp")
        text = json.dumps(about | {"sha256": _digest(tensors)}, default=str)
        save_file(tensors, temporary, {"about": text})  # one entry: its order never varies
        os.replace(temporary, path)


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def zeros(
    shapes: Mapping[str, tuple[int, ...]], device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Fresh totals."""
    return {name: torch.zeros(shape, device=device, dtype=dtype) for name, shape in shapes.items()}
