"""A cache of factors that several processes use together: only rank 0 uses its files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from whence.persist.tensors import FactorCache
from whence.world import Owner, World, everyone


class SharedCache(FactorCache):
    """The cache of one process, for all ranks. Each makes the same calls in the same order.

    Args:
        owner: the rank that gives and gets a tensor, by its name. In memory, without a folder, each
            rank holds its own. In a file are those of all ranks, so that the number of ranks may
            change.
    """

    def __init__(self, cache: FactorCache, world: World, owner: Owner = everyone) -> None:
        super().__init__(cache.folder)
        self.cache, self.world, self.owner = cache, world, owner

    def get(self, key: str) -> dict[str, Tensor] | None:
        if self.folder is None:
            return self.cache.get(key)
        return self.world.hand_out(self.cache.get(key) if self.world.first else None, self.owner)

    def put(self, key: str, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> None:
        if self.folder is None:
            self.cache.put(key, tensors, settings)
            return
        whole = self.world.collect(tensors, self.owner)
        if self.world.first:
            self.cache.put(key, whole, settings)
        self._partial(self._part(key)).unlink(missing_ok=True)

    def drop(self, key: str) -> None:
        if self.folder is None or self.world.first:
            self.cache.drop(key)

    def snapshot(self, key: str) -> tuple[dict[str, Tensor], dict[str, int]] | None:
        return super().snapshot(self._part(key))

    def offer_snapshot(
        self, key: str, tensors: Mapping[str, Tensor], position: dict[str, int]
    ) -> None:
        super().offer_snapshot(self._part(key), tensors, position)

    def _part(self, key: str) -> str:
        """Of the sums of this rank's share."""
        return f"{key}-{self.world.rank}-of-{self.world.size}"


def shared(cache: FactorCache, world: World, owner: Owner = everyone) -> FactorCache:
    """The cache for all ranks; a world of one process needs no other."""
    if world.size == 1:
        return cache
    plain = cache.cache if isinstance(cache, SharedCache) else cache
    return SharedCache(plain, world, owner)
