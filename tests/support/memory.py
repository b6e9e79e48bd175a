"""The bytes of all tensors that a program holds at once."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts tensors that are made inside: those alive, and the most that were so at one time.

    Attributes:
        least: bytes of the smallest tensor that counts.
    """

    def __init__(self, least: int = 1) -> None:
        super().__init__()
        self.least, self.alive, self.peak = least, 0, 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {storage._cdata for storage in _storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            if storage._cdata not in before:  # of a view, or of what is written in place
                self._count(storage)
        return result

    def _count(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or size < self.least:
            return
        self._known.add(key)
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.alive -= size


def _storages(tree: Any) -> list[Any]:
    tensors = [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]
    return [x.untyped_storage() for x in tensors if x.device.type != "meta"]
