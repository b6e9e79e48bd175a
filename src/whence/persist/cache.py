"""Fitted factors on disk, and the losses they belong to.

`FactorCache` holds entries under a key of everything they depend on: weights, data, task, layers
and settings. So nothing stale is ever reused. What model and task compute for every example is one
of these things. Losses differ in their last bits with batch size and device, so they are compared
with a tolerance, not by a digest: `Tried` has the losses that a stored result must agree with, and
`Version` names those of a cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whence.errors import FolderConflict
from whence.persist.arrays import load_tensors, open_tensors, save_in_turn, save_tensors
from whence.persist.files import Throttle, make_folder
from whence.persist.identity import key_of, sha256_of, tensors_sha256
from whence.world import Owner, World, everyone

SNAPSHOT_SECONDS = 20.0
REFIT = "delete it to fit it again"
GPU_SHARE = 16  # of this many parts of a GPU's memory, entries take one at most
VERSIONS = 16  # of losses at one checkpoint that a cache tells apart


class FactorCache:
    """Entries (dicts of tensors) by key, in a folder, or in memory when there is no folder: on a
    GPU that they come from while they take little of it, else on the CPU.

    A pass over the data leaves snapshots, from which the same call resumes.

    Attributes:
        unsaved: losses that passes have noted since they were last saved. They are saved before
            any entry, which may depend on them.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._memory: dict[str, dict[str, Tensor]] = {}
        self._throttle = Throttle(SNAPSHOT_SECONDS)
        self.unsaved: list[Version] = []

    def get(self, key: str) -> dict[str, Tensor] | None:
        if self.folder is None:
            return self._memory.get(key)
        entry = self._load(self._path(key))
        return None if entry is None else entry[0]

    def put(self, key: str, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> None:
        self._save_losses()
        if self.folder is None:
            on_cpu = {name: t.detach().contiguous() for name, t in tensors.items()}
            if not self._fits_on_gpu(on_cpu.values()):
                on_cpu = {name: t.cpu() for name, t in on_cpu.items()}
            self._memory[key] = on_cpu
            return
        self._save(self._path(key), tensors, {"settings": settings})
        self._partial(key).unlink(missing_ok=True)

    def _fits_on_gpu(self, new: Iterable[Tensor]) -> bool:
        """Whether these can stay where they are, with all that is there."""
        there = [t for entry in self._memory.values() for t in entry.values()]
        size = sum(t.nbytes for t in (*there, *new) if t.is_cuda)
        return size == 0 or size * GPU_SHARE <= torch.cuda.mem_get_info()[1]

    def put_in_turn(
        self,
        key: str,
        forms: Mapping[str, tuple[torch.dtype, Sequence[int]]],
        tensors: Iterable[tuple[str, Tensor]],
        settings: Mapping[str, Any],
    ) -> None:
        """`put`, into a folder, of tensors that are there one at a time, in the order of their
        names."""
        self._save_losses()
        path = self._path(key)
        make_folder(path.parent)
        save_in_turn(path, forms, tensors, {"settings": settings})
        self._partial(key).unlink(missing_ok=True)

    def opened(self, key: str) -> Mapping[str, Tensor] | None:
        """`get`, from a folder, of tensors that are read when they are asked for."""
        try:
            return open_tensors(self._path(key), remedy=REFIT)[0]
        except FileNotFoundError:
            return None

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
        if self.folder is not None and self._due(position):
            with self._throttle.saving():
                self._save_losses()
                self._save(self._partial(key), tensors, {"position": position})

    def _due(self, position: dict[str, int]) -> bool:
        return self._throttle.due()

    @staticmethod
    def _load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        try:
            return load_tensors(path, remedy=REFIT)
        except FileNotFoundError:  # not there yet, or another process has just removed it
            return None

    def _save_losses(self) -> None:
        for version in list(self.unsaved):
            version.save()

    def _save(self, path: Path, tensors: Mapping[str, Tensor], about: dict[str, Any]) -> None:
        make_folder(path.parent)
        save_tensors(path, tensors, about)

    def _path(self, key: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{key}.safetensors"

    def _partial(self, key: str) -> Path:
        return self._path(key + ".partial")


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
        stored = self.cache.opened(key) if self.world.first else None
        given = self.world.hand_out(stored, self.owner)
        if given is not None and self.world.first:
            for name in given:
                given[name] = given[name].clone()  # which was mapped from the file
        return given

    def put(self, key: str, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> None:
        if self.folder is None:
            self.cache.put(key, tensors, settings)
            return
        forms, arriving = self.world.collect(tensors, self.owner)
        try:
            if self.world.first:
                self.cache.put_in_turn(key, forms, arriving, settings)
        finally:  # also where rank 0 cannot write: the others send
            for _ in arriving:
                pass
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

    def _due(self, position: dict[str, int]) -> bool:
        """Of totals that are divided among the ranks, all save the same moment's."""
        due = self._throttle.due()
        return self.world.either(due) if position.get("divided") else due

    def _part(self, key: str) -> str:
        """The key of the sums of this rank's share."""
        return f"{key}-{self.world.rank}-of-{self.world.size}"


def shared(cache: FactorCache, world: World, owner: Owner = everyone) -> FactorCache:
    """The cache for all ranks; a world of one process needs no other."""
    if world.size == 1:
        return cache
    plain = cache.cache if isinstance(cache, SharedCache) else cache
    return SharedCache(plain, world, owner)


@dataclass(frozen=True)
class Tried:
    """Losses or measurements of examples, with the root mean square and the maximum of their
    outputs, (n, 3) by the name of data and checkpoint."""

    values: Mapping[str, Tensor]
    tolerance: float

    def save(self, path: Path) -> None:
        save_tensors(path, self.values, {})

    def differs_from(self, path: Path, remedy: str) -> list[str]:
        """The names of what is not in a file as it is here; examples may have been added."""
        stored = load_tensors(path, remedy=remedy)[0] if path.exists() else {}
        return [
            name
            for name, now in self.values.items()
            if name not in stored or not _agree(stored[name], now, self.tolerance)
        ]


@dataclass(eq=False)
class Version:
    """Values (n, 3) of examples at one place, in a cache, and the token that names them.

    Factors under a token are of the same losses, whatever their last bits. The first values at a
    place have nothing to agree with, so they need no pass of their own: `first` gives a token
    before any is known, and the passes that fit factors `add` them.

    Attributes:
        seen: which of the values are known, (n,).
        share: how far values may differ, relative to the outputs.
    """

    cache: FactorCache
    settings: Mapping[str, Any]
    values: Tensor
    seen: Tensor
    token: str
    share: float
    _new: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # indices; values, anywhere

    @classmethod
    def of(
        cls, cache: FactorCache, settings: Mapping[str, Any], values: Tensor, share: float
    ) -> Version:
        """The stored version that agrees with these values, or a new one."""
        everyone, known = torch.ones(len(values), dtype=torch.bool), False
        for number in range(VERSIONS):
            entry = _entry(settings, number)
            stored = cache.get(key_of(entry))
            token = tensors_sha256({"values": values})
            if stored is None or number == VERSIONS - 1:
                break
            seen = stored["seen"].bool()
            if len(seen) == len(values) and _agree(stored["values"][seen], values[seen], share):
                token = bytes(stored["token"].tolist()).hex()
                values = torch.where(seen.unsqueeze(1), stored["values"], values)
                known = bool(seen.all())
                break
        version = cls(cache, entry, values, everyone, token, share)
        if not known:
            version.save()
        return version

    @classmethod
    def first(
        cls, cache: FactorCache, settings: Mapping[str, Any], count: int, share: float
    ) -> Version | None:
        """The first version, of which no values are known yet; None if there is one already."""
        entry = _entry(settings, 0)
        if cache.get(key_of(entry)) is not None:
            return None
        unseen = torch.zeros(count, dtype=torch.bool)
        token = sha256_of("first", key_of(entry))
        return cls(cache, entry, torch.zeros(count, 3), unseen, token, share)

    def add(self, indices: Tensor, values: Tensor) -> None:
        """Values of some examples. They stay on their device until they are saved, because a
        transfer in every batch would make a GPU wait."""
        self._new.append((indices, values))
        self.seen[indices] = True
        if self not in self.cache.unsaved:
            self.cache.unsaved.append(self)

    def save(self) -> None:
        """Into the cache. Another process may have stored the same version meanwhile, of another
        loss."""
        if self._new:
            indices, values = (torch.cat(parts) for parts in zip(*self._new, strict=True))
            self._new.clear()
            self.values = self.values.to(values.dtype)
            self.values[indices] = values.cpu()
        key = key_of(self.settings)
        stored = self.cache.get(key)
        if stored is not None and bytes(stored["token"].tolist()).hex() == self.token:
            both = stored["seen"].bool() & self.seen
            if not _agree(stored["values"][both], self.values[both], self.share):
                raise FolderConflict(
                    f"another process fits factors of other losses into {self.cache.folder}: wait "
                    "until it has finished, or use another folder, Study(cache=...)"
                )
        if self in self.cache.unsaved:
            self.cache.unsaved.remove(self)
        token = torch.tensor(list(bytes.fromhex(self.token)), dtype=torch.uint8)
        tensors = {"values": self.values, "seen": self.seen.to(torch.uint8), "token": token}
        self.cache.put(key, tensors, self.settings)


def _entry(settings: Mapping[str, Any], number: int) -> dict[str, Any]:
    return {"what": "tried examples", "version": number, **settings}


def _agree(stored: Tensor, now: Tensor, share: float) -> bool:
    if stored.shape[1:] != now.shape[1:] or len(stored) > len(now):
        return False
    now = now[: len(stored)]
    allowed = share * (now.abs() + now[:, 2:])
    same = (now - stored).abs() <= allowed
    special = ~now.isfinite() | ~stored.isfinite()
    same |= special & ((now == stored) | (now.isnan() & stored.isnan()))
    return bool(same.all())
