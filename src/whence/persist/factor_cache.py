"""Where fitted factors are kept: safetensors files under a key of everything they depend on.

Nothing stale can be reused: weights, data, task, layers and settings are all in the key. A pass
over the data leaves snapshots, from which the same call resumes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from whence.persist.files import make_folder
from whence.persist.snapshots import Throttle
from whence.persist.tensors import load_tensors, save_tensors

SNAPSHOT_SECONDS = 20.0
REMEDY = "delete it to fit it again"


class FactorCache:
    """Entries (dicts of tensors) by key, in a folder, or in memory when there is no folder."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._memory: dict[str, dict[str, Tensor]] = {}
        self._throttle = Throttle(SNAPSHOT_SECONDS)

    def get(self, key: str) -> dict[str, Tensor] | None:
        if self.folder is None:
            return self._memory.get(key)
        path = self._path(key)
        return load_tensors(path, remedy=REMEDY)[0] if path.exists() else None

    def put(self, key: str, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> None:
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
        if self.folder is None or not self._partial(key).exists():
            return None
        totals, about = load_tensors(self._partial(key), remedy=REMEDY)
        return totals, about["position"]

    def offer_snapshot(
        self, key: str, tensors: Mapping[str, Tensor], position: dict[str, int]
    ) -> None:
        """Save the totals of a pass if it is time to."""
        if self.folder is not None and self._throttle.due():
            with self._throttle.saving():
                self._save(self._partial(key), tensors, {"position": position})

    def _save(self, path: Path, tensors: Mapping[str, Tensor], about: dict[str, Any]) -> None:
        make_folder(path.parent)
        save_tensors(path, tensors, about)

    def _path(self, key: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{key}.safetensors"

    def _partial(self, key: str) -> Path:
        return self._path(key + ".partial")
