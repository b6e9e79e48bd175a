"""How to compute: the options that every method takes, in one object; and checks of settings."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Any, TypedDict

import torch

from whence.errors import InvalidInput, finite, whole

SHARE = {"cpu": 0.4, "cuda": 0.6}  # of all memory: a CPU's is shared with everything else

FACTOR_SHARE = {"cuda": 0.5}  # of the allowed memory, for factors. A CPU has no other place
QUERY_AT = ("run", "final")  # where query gradients are taken: `Run.query_points`


class Options(TypedDict, total=False):
    """`ComputeOptions` as keyword arguments."""

    device: torch.device | str | None
    dtype: torch.dtype
    batch_size: int | None
    memory: int | str | None
    progress: bool
    workers: int


@dataclass(frozen=True)
class ComputeOptions:
    """Where and how to compute.

    Attributes:
        device: default: where the model is.
        dtype: float32, float64, or bfloat16 for the products (sums stay in float32).
        batch_size: examples per pass (default: chosen from memory). No score depends on it.
        memory: what may be used, in bytes or like "8GB" (default: 40 % of the machine's, 60 % of a
            GPU's).
        progress: show progress bars and an estimate before long work.
        workers: processes that load data.
    """

    device: torch.device | str | None = None
    dtype: torch.dtype = torch.float32
    batch_size: int | None = None
    memory: int | str | None = None
    progress: bool = True
    workers: int = 0

    def __post_init__(self) -> None:
        if self.batch_size is not None:
            check_count("batch_size", self.batch_size)
        whole("workers", self.workers, 0)
        if not isinstance(self.dtype, torch.dtype) or not self.dtype.is_floating_point:
            raise InvalidInput(f"dtype={self.dtype!r} must be a dtype such as torch.float32")
        if self.device is not None:
            check_device(self.device)


def allowance(memory: int | str | None, device: torch.device) -> int:
    """Bytes that may be used, from bytes or a text like "8GB".

    By default a fixed share of the machine's memory, not of what happens to be free, so that the
    same call splits the work, and rounds, in the same way; less only when memory is short.
    """
    if memory is None:
        free, total = free_and_total(device)
        return int(min(SHARE.get(device.type, 0.4) * total, 0.8 * free))
    if isinstance(memory, str):
        units = {"KB": 2**10, "MB": 2**20, "GB": 2**30, "TB": 2**40}
        text = memory.upper().replace("IB", "B").replace(" ", "")
        try:
            memory = int(float(text[:-2]) * units[text[-2:]])
        except (KeyError, ValueError, OverflowError):
            raise InvalidInput(
                f"memory={memory!r} is not understood: use bytes, or a text like '8GB'"
            ) from None
    memory = int(finite("memory", memory))
    if memory < 2**20:
        raise InvalidInput(
            f"memory={memory} bytes is less than a mebibyte: use bytes, or a text like '8GB'"
        )
    return memory


def free_and_total(device: torch.device) -> tuple[int, int]:
    """(free, total) bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    try:
        with open("/proc/meminfo") as file:
            sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in file}
        return sizes["MemAvailable"], sizes["MemTotal"]
    except (OSError, KeyError):  # not Linux: assume a small machine
        return 8 * 2**30, 8 * 2**30


# --- checks of settings ---------------------------------------------------------------------------


def check_device(device: Any) -> None:
    """Refuse what is no device, or none of this machine."""
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError) as error:
        raise InvalidInput(f"device={device!r} must be a device such as 'cpu' or 'cuda'") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise InvalidInput(f"device={device!r}, but PyTorch sees no GPU here: use device='cpu'")


def check_count(name: str, value: Any) -> None:
    """Refuse a value that is not a whole number, at least 1."""
    whole(name, value, 1)


def check_damping(damping: Any, otherwise: str = "") -> None:
    """Refuse a damping that is negative or not a number; `otherwise` names other choices."""
    known = isinstance(damping, Real) and not isinstance(damping, bool)
    if not known or not 0 <= float(damping) < float("inf"):
        raise InvalidInput(f"damping={damping!r} must be zero or positive{otherwise}")


def check_positive(name: str, value: Any) -> None:
    """Refuse a value that is not a positive number."""
    if isinstance(value, bool) or not (isinstance(value, Real) and 0 < float(value) < float("inf")):
        raise InvalidInput(f"{name}={value!r} must be a positive number")


def check_share(name: str, value: Any) -> None:
    """Refuse a value that is not between 0 and 1."""
    if isinstance(value, bool) or not (isinstance(value, Real) and 0 <= float(value) <= 1):
        raise InvalidInput(f"{name}={value!r} must be a share, from 0 to 1")
