"""The machine, versions and date of a result."""

from __future__ import annotations

import datetime
import platform
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
