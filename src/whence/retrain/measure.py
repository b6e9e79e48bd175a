"""Measurements of the models that many trainings end in."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, TypedDict, Unpack

import numpy as np
import torch
from numpy.typing import NDArray

from whence.data import Batches
from whence.errors import InvalidInput, check_choice, warn
from whence.progress import progress_bar
from whence.retrain.grid import Grid
from whence.retrain.pool import ENGINES, TrainingPool, TrainingsCallback
from whence.retrain.recipe import Recipe
from whence.retrain.training import Training
from whence.retrain.work_queue import units, work


class TrainingOptions(TypedDict, total=False):
    """How to train many models, as keyword arguments; see `measure`."""

    device: torch.device | str | None
    memory: int | str | None
    executor: str | None
    engine: str
    progress: bool


def measure(
    recipe: Recipe,
    query: Any,
    trainings: Sequence[Training],
    *,
    out: str | os.PathLike[str] | None = None,
    what: Sequence[str] = ("measurements",),
    **options: Unpack[TrainingOptions],
) -> NDArray[np.float64]:
    """Measure every query with the model that each training ends in, (T, q).

    The row of a training that diverged (not all its measurements are finite) is NaN.

    Args:
        recipe: how to train.
        query: map-style dataset built like the training data.
        trainings: seeds and subsets.
        out: folder that keeps every finished training. Repeat the same call to resume; several
            processes may share the folder.
        device: where to train (default: a GPU if there is one).
        memory: what models that train together may use, in bytes or like "8GB" (default: most of
            what is free).
        executor: None for this process (under torchrun, for each of its processes), "ray" for a
            Ray cluster.
        engine: "auto", or how models train together: "products" or "vmap"; "single" trains them one
            by one.
        progress: show a progress bar (default: True).
        what: the methods of the task that measure, such as "correct"; of several, the results are
            side by side, (T, k·q).
    """
    data = Batches("query", query, recipe.collate)
    about = identity(recipe, data)
    if tuple(what) != ("measurements",):
        about["what"] = list(what)
    grid = Grid(out, about, len(what) * len(data))
    return run_grid(recipe, data, trainings, grid, what=what, **options)


def identity(recipe: Recipe, query: Batches) -> dict[str, Any]:
    """What trainings in one folder must have in common."""
    return {
        "recipe": recipe.identity(),
        "query": query.fingerprint(),
        "measurements": recipe.precise().tried(recipe.task, query, "measurements"),
    }


def run_grid(
    recipe: Recipe,
    query: Batches,
    trainings: Sequence[Training],
    grid: Grid,
    *,
    device: torch.device | str | None = None,
    memory: int | str | None = None,
    executor: str | None = None,
    engine: str = "auto",
    progress: bool = True,
    callback: TrainingsCallback | None = None,
    what: Sequence[str] = ("measurements",),
) -> NDArray[np.float64]:
    """`measure`, with the trainings of a grid.

    Args:
        callback: called after each update. An exception that it raises stops all trainings.
    """
    check_choice("engine", engine, ENGINES)
    if executor not in (None, "ray"):
        raise InvalidInput(f"executor={executor!r}: use None for this process, or 'ray'")
    if executor == "ray" and callback is not None:
        raise InvalidInput("a callback cannot follow trainings on a Ray cluster: use executor=None")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1 and grid.folder is None:
        raise InvalidInput(f"{world} processes need a folder to share: give out=")
    keys = [training.key for training in trainings]
    if not keys:
        return np.empty((0, len(what) * len(query)))
    if any(key not in grid for key in keys):
        pool = TrainingPool.open(recipe, query, device, engine, grid.notes.get("engine"), what)
        if executor == "ray":
            from whence.retrain.cluster import workers

            world = workers()
        settings = grid.settle(
            {
                "engine": pool.engine,
                "why": pool.why,
                "at_once": pool.at_once(trainings[0], memory, -(-len(trainings) // world)),
            }
        )
        pool.warn_if_sequential()
        todo = list(units(recipe, trainings, settings["at_once"]))
        done = sum(key in grid for key in keys)
        bar = progress_bar(total=len(keys), initial=done, unit="training", shown=progress)
        with bar:
            if executor == "ray":
                from whence.retrain.cluster import distribute

                distribute(pool, todo, grid, bar.update)
            else:
                work(pool, todo, grid, bar, callback)
    rows = np.stack([grid[key] for key in keys])
    diverged = int(np.isnan(rows).any(1).sum())
    if diverged:
        warn(
            f"{diverged} of {len(rows):,} trainings diverged: their measurements are NaN",
            stacklevel=3,
        )
    return rows
