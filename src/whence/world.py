"""The processes that share a calculation, and what passes between them.

With W ranks of `torch.distributed`'s default group, of which each makes the same calls:

    T = Σ_n t(n) = Σ_r Σ_{n in rank r} t(n)     every sum over examples; `deal`, then `total`
    A_b = Q_b Λ_b Q_bᵀ                          block b, at the rank that owns it; `owners`
    w_q                                         query vectors, dealt to ranks; then `regather`
    values[:, m]                                columns, computed and written by one rank each

A share depends on nothing but positions in the list of examples and W. A world of one process sends
nothing, and does all the work.

Only tensors travel, and JSON as bytes: nothing that is received is unpickled. Before each exchange
the ranks compare what they are about to do. A rank that failed says so there, and ranks that are
not in step are refused rather than left waiting for each other.
"""

from __future__ import annotations

import json
import os
import re
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm.auto import tqdm

from whence.errors import InvalidInput, RankFailed, show_once

T = TypeVar("T")
Owner = Callable[[str], int | None]  # the rank that a named tensor belongs to; None: all ranks
SHOWN = 60  # characters of a value; a longer one is a digest
PATIENCE = 10.0  # seconds for which a rank waits for the others without a message
CPU = torch.device("cpu")


def everyone(name: str) -> None:
    """The owner of what all ranks have."""


@dataclass(frozen=True)
class World:
    """This process, one of `size`.

    Attributes:
        unjoined: a warning where several processes were started that form no group.
    """

    size: int = 1
    rank: int = 0
    unjoined: str = ""

    @classmethod
    def current(cls) -> World:
        """The initialised process group, or this process alone."""
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_world_size(), dist.get_rank())
        if (started := launched()).size == 1:
            return cls()
        return cls(
            unjoined=f"{started.size} processes were started, but no process group is initialised: "
            "every process does all the work. Call torch.distributed.init_process_group() first, "
            "in every process"
        )

    @property
    def first(self) -> bool:
        """Whether this rank reads and writes the files that all ranks share."""
        return self.rank == 0

    @classmethod
    @contextmanager
    def together(cls) -> Iterator[World]:
        """Around what all ranks do together: a rank that fails inside tells the others, and only
        rank 0 shows warnings."""
        world = cls.current()
        if world.unjoined and launched().first:
            show_once(world.unjoined)
        if world.size == 1:
            yield world
            return
        _import_collectives()
        world._step("begin", None, patient=True)
        world._leave_word("")
        try:
            with warnings.catch_warnings():
                if not world.first:
                    warnings.simplefilter("ignore")
                yield world
        except RankFailed:
            raise
        except Exception as error:
            world._leave_word(str(error))
            with suppress(RankFailed):
                world._compare(world.rank + 1, 0)
            raise

    @classmethod
    @contextmanager
    def apart(cls) -> Iterator[None]:
        """Around what a rank does by itself: ranks that later wait for it in vain say why."""
        try:
            yield
        except Exception as error:
            cls.current()._leave_word(str(error))
            raise

    # -- who does what ---------------------------------------------------------------------------

    def mine(self, items: Sequence[T]) -> Sequence[T]:
        """This rank's share."""
        return items if self.size == 1 else items[self.rank :: self.size]

    def deal(self, items: Any) -> Any:
        """This rank's share of an array whose rows `regather` puts together again: neighbours,
        and at least one. A rank without any repeats the first, which `regather` drops."""
        most = -(-len(items) // self.size)
        share = items[self.rank * most : (self.rank + 1) * most]
        return share if len(share) else items[:1]

    def rounds(self, items: Sequence[T]) -> Iterator[tuple[T, bool]]:
        """This rank's share, and whether it counts. Every rank gets the same number of items, so
        that all can exchange something in each round."""
        for start in range(0, len(items), self.size):
            mine = start + self.rank < len(items)
            yield items[start + self.rank if mine else start], mine

    def owners(self, sizes: Mapping[str, float]) -> dict[str, int]:
        """A rank for each name, so that the sizes of all ranks are about the same."""
        loads, owners = [0.0] * self.size, dict.fromkeys(sizes, 0)
        for name in sorted(sizes, key=lambda name: -sizes[name]):
            owners[name] = loads.index(min(loads))
            loads[owners[name]] += sizes[name]
        return owners

    # -- exchanges -------------------------------------------------------------------------------

    def total(self, tensors: dict[str, Tensor], owner: Owner = everyone) -> dict[str, Tensor]:
        """Σ over the ranks of each tensor, at its owner only. The given ones are used up."""
        if self.size == 1:
            return tensors
        self._step("total", _forms(tensors))
        sums = {}
        for name in list(tensors):
            given, rank = tensors.pop(name), owner(name)
            sent = self._sent(given)
            if rank is None:
                self._exchange(dist.all_reduce, sent)
            else:
                self._exchange(dist.reduce, sent, rank)
            if rank in (None, self.rank):
                sums[name] = sent.to(given.device)
        return sums

    def share(
        self, tensors: Mapping[str, Tensor] | None, source: int, device: torch.device = CPU
    ) -> dict[str, Tensor] | None:
        """What the rank `source` gives; what the others give is not looked at."""
        if self.size == 1:
            return None if tensors is None else dict(tensors)
        return self._handed("share", tensors, source, lambda name: None, device)

    def hand_out(
        self, tensors: Mapping[str, Tensor] | None, owner: Owner
    ) -> dict[str, Tensor] | None:
        """Of what rank 0 gives, the tensors that this rank owns."""
        if self.size == 1:
            return None if tensors is None else dict(tensors)
        return self._handed("hand out", tensors, 0, owner, CPU)

    def collect(
        self, tensors: Mapping[str, Tensor], owner: Owner
    ) -> tuple[dict[str, tuple[torch.dtype, list[int]]], Iterator[tuple[str, Tensor]]]:
        """The forms of the tensors of all owners, and at rank 0 the tensors, one at a time, in the
        order of their names. Every rank must come to the end of them."""
        of_ranks = [json.loads(text) for text in self.texts(json.dumps(_forms(tensors)))]
        forms = {name: form for of_rank in of_ranks for name, form in of_rank.items()}
        senders = {
            name: 0 if owner(name) is None else next(r for r, x in enumerate(of_ranks) if name in x)
            for name in sorted(forms)
        }
        return {name: _form(form) for name, form in forms.items()}, self._arriving(
            tensors, forms, senders
        )

    def _arriving(
        self, tensors: Mapping[str, Tensor], forms: Mapping[str, Any], senders: Mapping[str, int]
    ) -> Iterator[tuple[str, Tensor]]:
        for name, rank in senders.items():
            if self.first:
                if rank == 0:
                    yield name, tensors[name].cpu()
                else:
                    received = self._empty(forms[name], CPU)
                    self._exchange(dist.recv, received, rank)
                    yield name, received.cpu()
            elif self.rank == rank:
                self._exchange(dist.send, self._sent(tensors[name]), 0)

    def regather(self, rows: Tensor, count: int) -> Tensor:
        """The rows (count, ...) of an array that was dealt, from those of each share."""
        if self.size == 1:
            return rows
        self._step("regather", [str(rows.dtype), list(rows.shape[1:]), count])
        most = -(-count // self.size)
        if len(rows) < most:
            rows = torch.cat([rows, rows.new_zeros(most - len(rows), *rows.shape[1:])])
        sent = self._sent(rows)
        together = sent.new_empty(self.size * most, *rows.shape[1:])
        self._exchange(dist.all_gather, list(together.chunk(self.size)), sent)
        return together[:count].to(rows.device)

    def texts(self, text: str) -> list[str]:
        """The text of every rank."""
        if self.size == 1:
            return [text]
        self._step("texts", None)
        data = torch.tensor(list(text.encode()), dtype=torch.uint8)
        length = self._sent(torch.tensor([len(data)]))
        lengths = [torch.empty_like(length) for _ in range(self.size)]
        self._exchange(dist.all_gather, lengths, length)
        padded = torch.zeros(max(1, *map(int, lengths)), dtype=torch.uint8)
        padded[: len(data)] = data
        sent = self._sent(padded)
        parts = [torch.empty_like(sent) for _ in range(self.size)]
        self._exchange(dist.all_gather, parts, sent)
        named = zip(parts, lengths, strict=True)
        return [bytes(part[: int(n)].tolist()).decode() for part, n in named]

    def values(self, value: Any) -> list[Any]:
        """A plain value of every rank, as JSON holds it."""
        return [value] if self.size == 1 else [json.loads(x) for x in self.texts(json.dumps(value))]

    def of_first(self, value: Any) -> Any:
        """The plain value that rank 0 gives, as JSON holds it."""
        return self.values(value if self.first else None)[0]

    def agree(self, about: Mapping[str, Any]) -> None:
        """Refuse ranks that differ in any of these plain values; the error names them."""
        if self.size == 1:
            return
        self._step("agree", list(about))
        everywhere = self.values({name: str(value) for name, value in about.items()})
        for name in about:
            by_rank = [values[name] for values in everywhere]
            differ = [rank for rank, value in enumerate(by_rank) if value != by_rank[0]]
            if differ:
                ranks, pair = (
                    ", ".join(map(str, differ)),
                    (by_rank[differ[0]], by_rank[0]),
                )
                values = " (it has {}; rank 0: {})".format(*pair)
                shown = "" if max(map(len, pair)) > SHOWN else values
                raise InvalidInput(
                    f"the processes differ in {name}: rank {ranks} of {self.size} is unlike rank 0"
                    f"{shown}. Start all with the same code, data and settings"
                )

    def either(self, flag: bool) -> bool:
        """Whether any rank says so."""
        if self.size == 1:
            return flag
        self._step("either", None)
        flags = self._sent(torch.tensor([int(flag)]))
        self._exchange(dist.all_reduce, flags, dist.ReduceOp.MAX)
        return bool(flags)

    # Of tensors whose form all ranks know, one after another, with nothing compared in between:
    # call `either` first, and fail afterwards.

    def add_at(self, owner: int, tensor: Tensor) -> Tensor:
        """Σ over the ranks at the owner; elsewhere the result means nothing."""
        sent = self._sent(tensor)
        self._exchange(dist.reduce, sent, owner)
        return sent.to(tensor.device)

    def lend(self, owner: int, tensor: Tensor) -> Tensor:
        """The owner's tensor, of the form of each rank's."""
        sent = self._sent(tensor)
        self._exchange(dist.broadcast, sent, owner)
        return sent.to(tensor.device)

    def wait(self) -> None:
        """Until all ranks are here."""
        if self.size > 1:
            self._step("wait", None)

    # -- the wire --------------------------------------------------------------------------------

    def _step(self, what: str, about: Any, patient: bool = False) -> None:
        """Compare with the other ranks what is exchanged next."""
        code = zlib.crc32(json.dumps([what, about]).encode())
        failed, most, least = self._compare(0, code, patient)
        if failed:
            why = self._words().get(failed - 1, "its message says why")
            raise RankFailed(
                f"rank {failed - 1} of {self.size} failed ({why}): this process (rank {self.rank}) "
                "stops too. Run the same command to resume"
            )
        if most != -least:
            raise RankFailed(
                f"the {self.size} processes are not in step: rank {self.rank} is at {what!r}, and "
                "another is elsewhere. All must make the same calls in the same order, with the "
                "same code, data and settings"
            )

    def _compare(self, failed: int, code: int, patient: bool = False) -> list[int]:
        """The largest failed rank + 1, code and -code of all ranks."""
        status = self._sent(torch.tensor([failed, code, -code] if not failed else [failed, 0, 0]))
        try:
            work = dist.all_reduce(status, dist.ReduceOp.MAX, async_op=True)
            assert work is not None
            end = time.monotonic() + PATIENCE
            while patient and self.first and not work.is_completed():
                if time.monotonic() > end:
                    tqdm.write(
                        f"whence waits for {self.size - 1} other process(es) of the group: all of "
                        "them must make this call. To work in one process, destroy the group first"
                    )
                    break
                time.sleep(0.001)
            work.wait()
        except RuntimeError as error:
            raise self._lost(error) from error
        return [int(x) for x in status.tolist()]

    def _exchange(self, operation: Callable[..., Any], *arguments: Any) -> None:
        try:
            operation(*arguments)
        except RuntimeError as error:
            raise self._lost(error) from error

    def _lost(self, error: RuntimeError) -> RankFailed:
        words = [f"the last error of rank {r}: {word}" for r, word in self._words().items()]
        # without the line of gloo's code, and its advice
        reason = re.sub(r"\[[^]]*\.cc:\d+\] *|This is typically caused by.*", "", str(error))
        return RankFailed(
            f"another of the {self.size} processes no longer answers "
            f"({'; '.join(words) or _short(reason)}): it has ended, or makes other calls than this "
            f"one (rank {self.rank}). Run the same command to resume"
        )

    # The group's key-value store holds the last error of each rank. It answers without the others,
    # also after a rank has ended, unless that rank served it.

    def _leave_word(self, word: str) -> None:
        if self.size > 1:
            with suppress(RuntimeError):
                _key_values().set(f"whence/{self.rank}", _short(word, 600))

    def _words(self) -> dict[int, str]:
        """The last errors of the other ranks."""
        words: dict[int, str] = {}
        with suppress(RuntimeError):
            store = _key_values()
            for rank in set(range(self.size)) - {self.rank}:
                key = f"whence/{rank}"
                word = store.get(key).decode(errors="replace") if store.check([key]) else ""
                words |= {rank: word} if word else {}
        return words

    def _handed(
        self,
        what: str,
        tensors: Mapping[str, Tensor] | None,
        source: int,
        owner: Owner,
        device: torch.device,
    ) -> dict[str, Tensor] | None:
        self._step(what, source)
        giver = self.rank == source
        header = json.dumps(None if tensors is None else _forms(tensors)).encode() if giver else b""
        length = self._sent(torch.tensor([len(header)]))
        self._exchange(dist.broadcast, length, source)
        sent = self._sent(torch.tensor(list(header) or [0] * int(length), dtype=torch.uint8))
        self._exchange(dist.broadcast, sent, source)
        forms = json.loads(bytes(sent.tolist()))
        if forms is None:
            return None
        received = {}
        for name, form in forms.items():
            rank = owner(name)
            if giver:
                assert tensors is not None
                value = self._sent(tensors[name])
            elif rank in (None, self.rank):
                value = self._empty(form, device)
            if rank is None:
                self._exchange(dist.broadcast, value, source)
            elif giver and rank != source:
                self._exchange(dist.send, value, rank)
            elif rank == self.rank and not giver:
                self._exchange(dist.recv, value, source)
            if rank in (None, self.rank):
                received[name] = tensors[name] if giver and tensors else value.to(device)
        return received

    def _place(self, device: torch.device) -> torch.device:
        """Where the group can send a tensor of this device from."""
        backends = dist.get_backend_config()
        if device.type == "cuda" and "cuda:nccl" in backends:
            return device
        return CPU if "cpu:" in backends else torch.device("cuda", torch.cuda.current_device())

    def _sent(self, tensor: Tensor) -> Tensor:
        """A contiguous tensor, where the group can send it from."""
        return tensor.detach().to(self._place(tensor.device)).contiguous()

    def _empty(self, form: Sequence[Any], device: torch.device) -> Tensor:
        dtype, shape = _form(form)
        return torch.empty(shape, dtype=dtype, device=self._place(device))


def launched() -> World:
    """This process among those that `torchrun` or SLURM's `srun` started."""
    number = {k: int(v) for k, v in os.environ.items() if k in _COUNTS and v.isdecimal()}
    if "WORLD_SIZE" in os.environ:
        return World(max(1, number.get("WORLD_SIZE", 1)), number.get("RANK", 0))
    return World(max(1, number.get("SLURM_STEP_NUM_TASKS", 1)), number.get("SLURM_PROCID", 0))


# a batch script has SLURM_NTASKS too, but is no step of `srun`
_COUNTS = ("WORLD_SIZE", "RANK", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")


def _forms(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {
        name: [str(x.dtype).removeprefix("torch."), list(x.shape)] for name, x in tensors.items()
    }


def _form(sent: Sequence[Any]) -> tuple[torch.dtype, list[int]]:
    dtype, shape = sent
    known = getattr(torch, str(dtype), None)
    if not isinstance(known, torch.dtype):
        raise RankFailed(f"another process sent {dtype!r}, which is not a dtype")
    return known, [int(n) for n in shape]


def _key_values() -> Any:
    # PyTorch 2.7 has no public way to it; later versions have `ProcessGroup.get_group_store`.
    from torch.distributed.distributed_c10d import _get_default_store  # not in all builds

    return _get_default_store()


def _import_collectives() -> None:
    """Import functions that would keep the default group for ever.

    The group is a default argument of theirs if there is one when they are imported, as some
    operations of PyTorch do. Its threads then outlive `destroy_process_group`, and may abort Python
    while it exits.
    """
    group, dist.GroupMember.WORLD = dist.GroupMember.WORLD, None
    try:
        import_module("torch.distributed.nn.functional")
    finally:
        dist.GroupMember.WORLD = group


def _short(text: str, most: int = 120) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"


# --- tensors of which each process holds a part (FSDP2) -------------------------------------------


def is_sharded(tensor: Tensor) -> bool:
    """Whether this process holds only a part of a tensor."""
    return type(tensor).__name__ == "DTensor" or type(tensor.data).__name__ == "DTensor"


def local(tensor: Any) -> Tensor:
    """The part of a tensor that this process holds."""
    part: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return part


def part_of(whole: Tensor, like: Any) -> Tensor:
    """A whole tensor, divided among the processes as another one is. Nothing is sent."""
    if not is_sharded(like) or whole.shape != like.shape:
        return whole
    from torch.distributed.tensor import distribute_tensor

    whole = whole.to(like.to_local().device)
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def gathered(source: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors on the CPU instead of sharded ones, at rank 0, where the others assist.

    Args:
        source: where the other ranks find tensors of these names.
    """
    names = [name for name, tensor in tensors.items() if is_sharded(tensor)]
    if not names:
        return dict(tensors)
    World.current().of_first([source, names])
    whole = {name: _whole(tensors[name]) for name in names}
    return {name: whole.get(name, tensor) for name, tensor in tensors.items()}


def _whole(tensor: Any) -> Tensor:
    whole: Tensor = tensor.detach().full_tensor().cpu()
    return whole
