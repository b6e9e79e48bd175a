"""A command that several processes run together, started by `torchrun` or a cluster's scheduler."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from whence.errors import InvalidInput

NEEDED = ("RANK", "MASTER_ADDR", "MASTER_PORT")
FIRST_HOST = re.compile(r"([^\[,]*)(?:\[([^\],-]+)[^\]]*\])?([^,]*)")  # of gpu[03-05,9],cpu1


def count() -> int:
    """How many processes were started."""
    return _launched()[0]


def rank() -> int:
    """Which of them this is."""
    size, rank = _launched()
    return rank if size > 1 else 0


def _launched() -> tuple[int, int]:
    if not {"WORLD_SIZE", "SLURM_STEP_NUM_TASKS"} & os.environ.keys():
        return 1, 0
    from whence.world import launched  # which imports torch

    world = launched()
    return world.size, world.rank


def named() -> str:
    """The program, with the rank if there are several processes."""
    return "whence" if count() == 1 else f"whence (rank {rank()} of {count()})"


def launcher() -> str:
    """What stood before the command that started several processes."""
    if count() == 1:
        return ""
    return "torchrun ... -m " if "WORLD_SIZE" in os.environ else "srun ... "


def meeting() -> str:
    """Where the processes find each other: torchrun's variables say it, or those of SLURM."""
    if "WORLD_SIZE" in os.environ:
        missing = [name for name in NEEDED if name not in os.environ]
        if missing:
            raise InvalidInput(
                f"WORLD_SIZE={count()}, but {', '.join(missing)} are not set: start the command "
                "with torchrun --nproc-per-node=... -m whence ..., or unset WORLD_SIZE"
            )
        return "env://"
    nodes = os.environ.get("SLURM_STEP_NODELIST", os.environ.get("SLURM_JOB_NODELIST", ""))
    host = FIRST_HOST.match(nodes)
    job = os.environ.get("SLURM_JOB_ID", "0")
    address = os.environ.get("MASTER_ADDR", "".join(host.groups("")) if host else "")
    chosen = 20000 + int(job) % 20000 if job.isdecimal() else 29500
    port = os.environ.get("MASTER_PORT", str(chosen))
    if not address:
        raise InvalidInput(
            f"srun started {count()} processes, but SLURM_STEP_NODELIST is not set: set MASTER_ADDR"
        )
    return f"tcp://{address}:{port}"


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
    place = meeting()
    import torch
    import torch.distributed as dist

    backend = "gloo"
    if device == "cuda" and torch.cuda.is_available():
        local = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")))
        torch.cuda.set_device(local % torch.cuda.device_count())  # a task may see only its own
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=place, rank=rank(), world_size=count())
    # torchrun sends it when another process has ended, SLURM before it takes a node away
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        dist.destroy_process_group()
