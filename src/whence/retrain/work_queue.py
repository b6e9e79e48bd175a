"""Deal out trainings to the cores of this machine, and to processes that share a folder."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextvars import copy_context
from typing import Any

import torch

from whence.data import cut
from whence.retrain.grid import Grid
from whence.retrain.pool import TrainingPool, TrainingsCallback
from whence.retrain.recipe import Recipe
from whence.retrain.training import Interrupted, Training


def units(recipe: Recipe, trainings: Sequence[Training], at_once: int) -> Iterator[list[Training]]:
    """Trainings to make together: with subsets of one size, in order, at most `at_once`."""
    by_size: dict[tuple[int, ...], list[Training]] = {}
    for training in trainings:
        sizes = recipe.examples(training.subset, training.stage).values()
        by_size.setdefault(tuple(len(e) for e in sizes), []).append(training)
    for alike in by_size.values():
        for block in cut(len(alike), at_once):
            yield [alike[k] for k in block]


def work(
    pool: TrainingPool,
    units: Sequence[Sequence[Training]],
    grid: Grid,
    bar: Any,
    callback: TrainingsCallback | None = None,
) -> None:
    """Make the units that the grid lacks, until all are there, also those of other processes.

    On a CPU, each core works on its own units: small products gain nothing from two cores.
    """
    threads = torch.get_num_threads()
    cores = threads if pool.device.type == "cpu" and pool.engine is not None else 1
    if pool.engine is not None:
        pool.data()
    stop, guard = threading.Event(), threading.Lock()
    scratch = None if grid.folder is None else grid.folder / "unfinished"
    trainings = {t.key: t for unit in units for t in unit}
    waiting = [[t.key for t in unit] for unit in units]

    def make_units() -> None:
        while not stop.is_set():
            with guard:
                keys = waiting.pop(0) if waiting else None
            if keys is None:
                return
            with grid.claim(keys) as mine:
                todo = [key for key in keys if key not in grid]
                if mine and todo:
                    rows = pool.make([trainings[key] for key in todo], stop, scratch, callback)
                    with guard:
                        grid.add(todo, rows)
                        bar.update(len(todo))
                    continue
            if todo:  # another process works on them
                stop.wait(0.1)
                with guard:
                    grid.refresh()
                    bar.n = sum(key in grid for key in trainings)
                    waiting.append(keys)

    if cores == 1:
        make_units()
        return
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(cores) as executor:
            jobs = [executor.submit(copy_context().run, make_units) for _ in range(cores)]
            try:
                wait(jobs, return_when=FIRST_EXCEPTION)
            finally:
                stop.set()  # an interrupt, or an error in one thread, stops the others
        errors = [job.exception() for job in jobs]
        for error in sorted(filter(None, errors), key=lambda e: isinstance(e, Interrupted)):
            raise error
    finally:
        torch.set_num_threads(threads)
