"""Trainings on a Ray cluster: this process deals out units and stores their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from whence.engine.cluster import MAX_RETRIES, connect
from whence.retrain.grid import Grid
from whence.retrain.pool import TrainingPool
from whence.retrain.training import Training


def workers() -> int:
    """The number of units that can run at the same time: one per GPU, or per core."""
    resources = connect().cluster_resources()
    return int(resources.get("GPU", 0) or resources.get("CPU", 1)) or 1


def distribute(
    pool: TrainingPool,
    units: Sequence[Sequence[Training]],
    grid: Grid,
    report: Callable[[int], Any],
) -> None:
    """Make the missing units, each on some worker, and repeat those whose worker dies.

    Finished units are stored as they arrive, so a driver that dies loses only unfinished ones.
    """
    ray = connect()
    resources = {"num_gpus": 1} if ray.cluster_resources().get("GPU") else {"num_cpus": 1}

    @ray.remote(max_retries=MAX_RETRIES, **resources)  # type: ignore[untyped-decorator]
    def make(recipe: Any, query: Any, engine: str | None, todo: list[Training]) -> Any:
        import torch

        from whence.retrain.pool import TrainingPool

        torch.set_num_threads(1)
        setting = "auto" if engine else "single"
        return TrainingPool.open(recipe, query, None, setting, engine, what).make(todo)

    what = tuple(pool.what)
    recipe, query = ray.put(pool.recipe), ray.put(pool.query)
    pending: dict[Any, list[str]] = {}
    for unit in units:
        todo = [t for t in unit if t.key not in grid]
        if todo:
            job = make.remote(recipe, query, pool.engine, todo)
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
