"""The machine, versions and date of a result, and the clock of its costs."""

from __future__ import annotations

import datetime
import os
import platform
import time
from pathlib import Path

import torch


def machine() -> dict[str, str]:
    """Processor, versions and date."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return {
        "processor": model,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }


def seconds(device: str) -> float:
    """The clock that costs are read from.

    On a CPU, which may have other work, the seconds of this process's processors, with those of
    the processes that it has waited for; otherwise the seconds that pass.
    """
    return sum(os.times()[:4]) if device == "cpu" else time.perf_counter()
