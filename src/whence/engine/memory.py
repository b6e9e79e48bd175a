"""How much memory there is, and how much of it may be used."""

from __future__ import annotations

import torch

SHARE = {"cpu": 0.4, "cuda": 0.6}  # of all memory: a CPU's is everybody's


def allowance(memory: int | str | None, device: torch.device) -> int:
    """Bytes that may be used, from bytes or a text like "8GB".

    By default a fixed share of the machine's memory, not of what happens to be free, so that the
    same call cuts the work, and rounds, in the same way; less only when memory is short.
    """
    if memory is None:
        free, total = free_and_total(device)
        return int(min(SHARE.get(device.type, 0.4) * total, 0.8 * free))
    if isinstance(memory, str):
        units = {"KB": 2**10, "MB": 2**20, "GB": 2**30, "TB": 2**40}
        text = memory.upper().replace("IB", "B").replace(" ", "")
        try:
            memory = int(float(text[:-2]) * units[text[-2:]])
        except (KeyError, ValueError):
            raise ValueError(
                f"memory={memory!r} is not understood: use bytes, or a text like '8GB'"
            ) from None
    if memory < 2**20:
        raise ValueError(
            f"memory={memory} bytes is less than a mebibyte: use bytes, or a text like '8GB'"
        )
    return memory


def free_and_total(device: torch.device) -> tuple[int, int]:
    """(free, total) bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    try:
        with open("/proc/meminfo") as file:
            found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in file}
        return found["MemAvailable"], found["MemTotal"]
    except (OSError, KeyError):  # not Linux: assume a small machine
        return 8 * 2**30, 8 * 2**30
