"""The same trainings over a Ray cluster: this process deals out units and keeps what comes back."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from whence.retrain.grid import Grid
from whence.retrain.training import Training

RETRIES = 5  # of a unit whose worker died


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ImportError("executor='ray' needs Ray: pip install 'whence[ray]'") from error
    if not ray.is_initialized():
        # a cluster of this machine's own, whose workers find the modules that we find
        here = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        ray.init(include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": here})
    return ray


def workers() -> int:
    """How many units can be made at the same time: one on each GPU, or on each core."""
    found = _ray().cluster_resources()
    return int(found.get("GPU", 0) or found.get("CPU", 1)) or 1


def spread(
    workshop: Any,
    units: Sequence[Sequence[Training]],
    grid: Grid,
    report: Callable[[int], Any],
) -> None:
    """Make the units that are missing, each on some worker; one whose worker dies is made again.

    What is finished is kept as it comes, so that a driver that dies loses only what was under way.
    """
    ray = _ray()
    resources = {"num_gpus": 1} if ray.cluster_resources().get("GPU") else {"num_cpus": 1}

    @ray.remote(max_retries=RETRIES, **resources)  # type: ignore[untyped-decorator]
    def make(recipe: Any, query: Any, engine: str | None, todo: list[Training]) -> Any:
        import torch

        from whence.retrain.measure import Workshop

        torch.set_num_threads(1)
        how = "auto" if engine else "single"
        return Workshop.open(recipe, query, None, how, settled=engine).make(todo)

    recipe, query = ray.put(workshop.recipe), ray.put(workshop.query)
    pending: dict[Any, list[str]] = {}
    for unit in units:
        todo = [t for t in unit if t.key not in grid]
        if todo:
            job = make.remote(recipe, query, workshop.engine, todo)
            pending[job] = [t.key for t in todo]
    try:
        while pending:
            ready, _ = ray.wait(list(pending))
            for job in ready:
                keys = pending.pop(job)
                grid.add(keys, ray.get(job))
                report(len(keys))
    finally:
        for job in pending:
            ray.cancel(job, force=True)
