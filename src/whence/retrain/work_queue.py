"""Deal out trainings to the cores of this machine, and to processes that share a folder."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextvars import copy_context
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from whence.data import cut
from whence.retrain.callback import Interrupted
from whence.retrain.grid import Grid
from whence.retrain.pool import TrainingPool, TrainingsCallback
from whence.retrain.recipe import Recipe
from whence.retrain.training import Training


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
    """Make the units that the grid lacks, until all are there.

    On a CPU, each core works on its own units: small products gain nothing from two cores.
    """
    threads = torch.get_num_threads()
    cores = threads if pool.device.type == "cpu" and pool.engine is not None else 1
    if pool.engine is not None:
        pool.data()
    stop = threading.Event()
    queue = UnitQueue(units, grid, bar, stop)
    scratch = None if grid.folder is None else grid.folder / "unfinished"

    def make(todo: Sequence[Training]) -> NDArray[np.float64]:
        return pool.make(todo, stop, scratch, callback)

    if cores == 1:
        queue.work(make)
        return
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(cores) as executor:
            jobs = [executor.submit(copy_context().run, queue.work, make) for _ in range(cores)]
            try:
                wait(jobs, return_when=FIRST_EXCEPTION)
            finally:
                stop.set()  # an interrupt, or an error in one thread, stops the others
        errors = [job.exception() for job in jobs]
        for error in sorted(filter(None, errors), key=lambda e: isinstance(e, Interrupted)):
            raise error
    finally:
        torch.set_num_threads(threads)


class UnitQueue:
    """Units that are still to be made, for several threads. Waits for units of other processes."""

    def __init__(
        self, units: Sequence[Sequence[Training]], grid: Grid, bar: Any, stop: threading.Event
    ) -> None:
        self.grid, self.bar, self.stop, self.guard = grid, bar, stop, threading.Lock()
        self.waiting = [[t.key for t in unit] for unit in units]
        self.trainings = {t.key: t for unit in units for t in unit}

    def work(self, make: Callable[[Sequence[Training]], NDArray[np.float64]]) -> None:
        while not self.stop.is_set():
            with self.guard:
                keys = self.waiting.pop(0) if self.waiting else None
            if keys is None:
                return
            with self.grid.claim(keys) as mine:
                todo = [key for key in keys if key not in self.grid]
                if mine and todo:
                    rows = make([self.trainings[key] for key in todo])
                    with self.guard:
                        self.grid.add(todo, rows)
                        self.bar.update(len(todo))
                    continue
            if todo:  # another process works on them
                self.stop.wait(0.1)
                with self.guard:
                    self.grid.refresh()
                    self.bar.n = sum(key in self.grid for key in self.trainings)
                    self.waiting.append(keys)
