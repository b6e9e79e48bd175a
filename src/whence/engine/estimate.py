"""An estimate of time and memory, before long work."""

from __future__ import annotations

from collections.abc import Mapping

from tqdm.auto import tqdm

from whence.engine.workspace import Workspace
from whence.operators import cost

OVERHEAD = 1.5  # time of all work, in units of its matrix products' time
WORTH_TELLING = 10  # seconds


def announce(
    what: object,
    workspace: Workspace,
    work: Mapping[str, float],
    passes: Mapping[str, int],
    numbers: int,
) -> None:
    """Note an estimate with the diagnostics, and show it if the work is long.

    Args:
        work: operations per example of each kind of pass.
        passes: how many passes of each kind.
        numbers: in memory at once.
    """
    examples = sum(len(workspace.study.data[stage]) for stage in workspace.stages)
    operations = examples * sum(work[kind] * count for kind, count in passes.items())
    seconds = OVERHEAD * operations / cost.rate(workspace.device, workspace.dtype)
    size = min(numbers * workspace.dtype.itemsize, workspace.memory)
    estimate = {"seconds": seconds, "bytes": size, "passes": dict(passes)}
    workspace.ledger.diagnostics["estimate"] = estimate
    if workspace.progress and seconds > WORTH_TELLING:
        kinds = ", ".join(f"{count} × {kind}" for kind, count in passes.items())
        queries = "" if workspace.query is None else f", {len(workspace.query):,} queries"
        tqdm.write(
            f"{what!r}: {examples:,} examples{queries}; passes: {kinds}; "
            f"about {duration(seconds)} and {size / 2**30:.1f} GiB"
        )


def duration(seconds: float) -> str:
    """Seconds for people to read."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
