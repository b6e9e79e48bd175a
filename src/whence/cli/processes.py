"""A command that several processes run together, started by `torchrun` or a cluster's scheduler."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from whence.errors import InvalidInput

NEEDED = ("RANK", "MASTER_ADDR", "MASTER_PORT")


def count() -> int:
    """How many processes were started."""
    size = os.environ.get("WORLD_SIZE", "1")
    return int(size) if size.isdecimal() else 1


def rank() -> int:
    """Which of them this is."""
    return int(os.environ.get("RANK", "0")) if count() > 1 else 0


def named() -> str:
    """The program, with the rank if there are several processes."""
    return "whence" if count() == 1 else f"whence (rank {rank()} of {count()})"


@contextmanager
def joined(shared: bool, device: str | None) -> Iterator[None]:
    """A process group of all processes, while the command runs; no group if there is only one.

    Args:
        shared: whether the command divides its work in a group. Another needs none.
        device: that was asked for. With "cuda", every process gets the GPU of its local rank.
    """
    if count() == 1 or not shared:
        yield
        return
    missing = [name for name in NEEDED if name not in os.environ]
    if missing:
        raise InvalidInput(
            f"WORLD_SIZE={count()}, but {', '.join(missing)} are not set: start the command with "
            "torchrun --nproc-per-node=... -m whence ..., or unset WORLD_SIZE"
        )
    import torch
    import torch.distributed as dist

    backend = "gloo"
    if device == "cuda" and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend)
    try:
        yield
    finally:
        dist.destroy_process_group()
