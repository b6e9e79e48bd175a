"""Make trainings, many at once where that is possible, and measure the models they end in."""

from __future__ import annotations

import copy
import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves
from tqdm.auto import tqdm

from whence.data import Batches, cut, place
from whence.engine.options import allowance, free_and_total
from whence.retrain.grid import Grid, name_of
from whence.retrain.recipe import Recipe, training_device
from whence.retrain.stack import Data, Interrupted, Stack, choose_engine, train_stack
from whence.retrain.stage import StageRecipe
from whence.retrain.training import Training
from whence.retrain.unfinished import LONG, Unfinished

ENGINES = ("auto", "products", "vmap", "single")
CACHED = 32 * 2**20  # bytes of parameters, gradients and momenta that a CPU core keeps at hand
SHARE = {"cuda": 0.85, "cpu": 0.5}  # of free memory, that models take by default
# bytes that one model with convolutions keeps of a batch when it fills the machine: more than a
# CPU's caches; on a GPU, some ten MB for every kernel
FILLING = {"cpu": CACHED, "cuda": 2**28}
HELD = 0.25  # of free memory, that data may take beside models trained one at a time
PROBED = 8  # models whose memory is measured


def measure(
    recipe: Recipe,
    query: Any,
    trainings: Sequence[Training],
    *,
    out: str | os.PathLike[str] | None = None,
    device: torch.device | str | None = None,
    memory: int | str | None = None,
    executor: str | None = None,
    engine: str = "auto",
    progress: bool = True,
) -> NDArray[np.float64]:
    """The measurement of every query by the model that each training ends in, (T, q).

    A training whose measurements are not all finite diverged: its row is NaN.

    Args:
        query: map-style dataset built like the training data.
        trainings: which seeds and subsets.
        out: folder in which every finished training is kept; the same call goes on from there, and
            several processes may share it.
        device: where to train (default: a GPU when there is one).
        memory: what models trained at once may take, in bytes or like "8GB" (default: most of what
            is free).
        executor: None for this process (under torchrun, for each of its processes), "ray" for a
            Ray cluster.
        engine: "auto"; or how to train at once: "products", "vmap", or "single" for one by one.
    """
    data = Batches("query", query, recipe.collate)
    grid = Grid(out, identity(recipe, data), len(data))
    return run_grid(
        recipe,
        data,
        trainings,
        grid,
        device=device,
        memory=memory,
        executor=executor,
        engine=engine,
        progress=progress,
    )


def identity(recipe: Recipe, query: Batches) -> dict[str, Any]:
    """What makes two folders of trainings the same."""
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
    device: torch.device | str | None,
    memory: int | str | None,
    executor: str | None,
    engine: str,
    progress: bool,
) -> NDArray[np.float64]:
    """`measure`, with the trainings of a grid."""
    if engine not in ENGINES:
        raise ValueError(f"engine={engine!r}: choose one of {ENGINES}")
    if executor not in (None, "ray"):
        raise ValueError(f"executor={executor!r}: use None for this process, or 'ray'")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1 and grid.folder is None:
        raise ValueError(f"{world} processes need a folder to share: give out=")
    keys = [training.key for training in trainings]
    if not keys:
        return np.empty((0, len(query)))
    if any(key not in grid for key in keys):
        workshop = Workshop.open(recipe, query, device, engine, grid.notes.get("engine"))
        if executor == "ray":
            from whence.retrain.cluster import workers

            world = workers()
        settled = grid.settle(
            {
                "engine": workshop.engine,
                "why": workshop.why,
                "at_once": workshop.at_once(trainings[0], memory, -(-len(trainings) // world)),
            }
        )
        workshop.tell()
        units = list(_units(recipe, trainings, settled["at_once"]))
        done = sum(key in grid for key in keys)
        bar = tqdm(
            total=len(keys), initial=done, unit="training", disable=not progress, leave=False
        )
        with bar:
            if executor == "ray":
                from whence.retrain.cluster import spread

                spread(workshop, units, grid, bar.update)
            else:
                _work(workshop, units, grid, bar)
    rows = np.stack([grid[key] for key in keys])
    lost = int(np.isnan(rows).any(1).sum())
    if lost:
        warnings.warn(
            f"{lost} of {len(rows):,} trainings diverged: their measurements are not numbers",
            stacklevel=3,
        )
    return rows


def _units(recipe: Recipe, trainings: Sequence[Training], at_once: int) -> Iterator[list[Training]]:
    """Trainings that are made together: of one subset size, in order."""
    by_size: dict[tuple[int, ...], list[Training]] = {}
    for training in trainings:
        sizes = recipe.examples(training.subset, training.stage).values()
        by_size.setdefault(tuple(len(e) for e in sizes), []).append(training)
    for alike in by_size.values():
        for block in cut(len(alike), at_once):
            yield [alike[k] for k in block]


@dataclass
class Workshop:
    """What making trainings needs: the recipe, the queries, the device, and how."""

    recipe: Recipe
    query: Batches
    device: torch.device
    engine: str | None  # None: one at a time
    why: str | None
    longest: float = 0.0  # seconds of a training made by itself
    _data: dict[str, Data] = field(default_factory=dict)

    @classmethod
    def open(
        cls,
        recipe: Recipe,
        query: Batches,
        device: torch.device | str | None,
        engine: str = "auto",
        settled: str | None = None,
    ) -> Workshop:
        """`settled` is an engine that was found to do before."""
        shop = cls(recipe, query, training_device(device, recipe.build(0)), None, None)
        if engine == "single":
            return shop
        if settled is not None and engine in ("auto", settled):
            shop.engine = settled
            return shop
        try:
            shop.data()
        except Exception as error:  # whatever a collate may raise on all examples at once
            shop.why = str(error) or repr(error)
        else:
            engines = ("products", "vmap") if engine == "auto" else (engine,)
            shop.engine, shop.why = choose_engine(recipe, query, shop.device, engines)
        if shop.engine is None:
            shop._data.clear()
        if engine != "auto" and shop.engine is None:
            raise ValueError(f"engine={engine!r} cannot train this recipe: {shop.why}")
        return shop

    def tell(self) -> None:
        if self.engine is None and self.why is not None:
            warnings.warn(f"models are trained one at a time: {self.why}", stacklevel=4)

    @cached_property
    def dtype(self) -> torch.dtype:
        return next(self.recipe.build(0).parameters()).dtype

    @property
    def block(self) -> int:
        """How many queries a model measures at a time: what it trains on at a time has room."""
        return self.recipe.stages[-1].batch_size

    def data(self) -> dict[str, Data]:
        """Every stage's dataset, and the queries, on the device."""
        if not self._data:
            for stage in self.recipe.stages:
                self._data[stage.name] = Data(stage.data, self.device, self.dtype)
            self._data[_QUERY] = Data(self.query, self.device, self.dtype)
        return self._data

    def at_once(self, example: Training, memory: int | str | None, most: int) -> int:
        """How many models to train together: as many as fit; on a CPU, as its caches hold. One, if
        it fills the machine, and its layers would copy several models' batches into one."""
        if self.engine is None:
            return 1
        if memory is None:
            room = int(free_and_total(self.device)[0] * SHARE.get(self.device.type, 0.5))
        else:
            room = allowance(memory, self.device)
        model, kept = self.recipe.build(0), self._activations()
        copied = any(isinstance(module, (nn.Conv2d, _BatchNorm)) for module in model.modules())
        if copied and kept >= FILLING.get(self.device.type, 0):
            return 1
        if self.device.type == "cpu":
            size = sum(p.numel() * p.element_size() for p in model.parameters())
            each = 6 * size + 2 * kept
            room //= torch.get_num_threads()
            # tiny models, whose updates are mostly overhead, by the thousand
            most_at_once = max(64, min(4096, CACHED // each))
            fit = min(most_at_once, max(4, CACHED // (3 * size)), room // each)
            return int(max(1, min(fit, -(-most // torch.get_num_threads()))))
        return int(max(1, min(most, room // self._bytes_each(example))))

    def _activations(self) -> int:
        """The bytes that a model keeps of a batch for its backward pass, in the largest stage."""
        model, most = self.recipe.build(0).to(self.device), 0
        for stage in self.recipe.stages:
            kept: dict[int, int] = {}

            def keep(x: Tensor, kept: dict[int, int] = kept) -> Tensor:
                kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
                return x

            task = copy.copy(stage.task)
            rows = torch.arange(stage.batch_size, device=self.device)
            batch = self.data()[stage.name].rows(rows)
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
                losses = task.losses(task.outputs(model, batch), batch)
            most = max(most, sum(kept.values()))
            del losses
        return most

    def _bytes_each(self, example: Training) -> int:
        """What a model takes while it trains, with the copy that CUDA graphs hold."""
        data, count = self.data(), len(self.query)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        some = [Training(k, example.subset, example.stage) for k in range(PROBED)]
        assert self.engine is not None
        stack = train_stack(self.recipe, some, self.engine, self.device, data, updates=2)
        stack.measurements(self.recipe.task, data[_QUERY], count, self.block)
        peak = torch.cuda.max_memory_allocated(self.device) - before
        del stack
        torch.cuda.empty_cache()
        return 2 * peak // PROBED + 1

    def make(
        self,
        trainings: Sequence[Training],
        stop: threading.Event | None = None,
        scratch: Path | None = None,
    ) -> NDArray[np.float64]:
        """Measurements (k, q) of the models of these trainings."""
        if self.engine is None:
            return np.stack([self._single(t, scratch) for t in trainings])
        data, unfinished = self.data(), None
        if scratch is not None:
            file = scratch / f"{name_of([t.key for t in trainings])}.safetensors"
            unfinished = Unfinished(file, LONG)
        try:
            stack: Stack = train_stack(
                self.recipe,
                trainings,
                self.engine,
                self.device,
                data,
                stop=stop,
                begun=None if unfinished is None else unfinished.find(),
                keep=None if unfinished is None else unfinished.offer,
            )
            task = copy.copy(self.recipe.task)  # each thread's own
            found = stack.measurements(task, data[_QUERY], len(self.query), self.block)
            if unfinished is not None:
                unfinished.drop()
            return found
        except torch.OutOfMemoryError:
            if len(trainings) == 1:
                raise
        torch.cuda.empty_cache()
        half = len(trainings) // 2
        warnings.warn(
            f"{len(trainings)} models at once do not fit into memory: {half} are tried",
            stacklevel=2,
        )
        parts = (trainings[:half], trainings[half:])
        return np.concatenate([self.make(part, stop, scratch) for part in parts])

    @cached_property
    def nearby(self) -> Recipe:
        """The recipe, for trainings one at a time: on a GPU with the data there, if it fits. The
        trainings are the same, bit by bit."""
        if self.device.type == "cpu":
            return self.recipe
        recipe = copy.copy(self.recipe)
        recipe.stages = tuple(self._placed(stage) for stage in recipe.stages)
        return recipe

    def _placed(self, stage: StageRecipe) -> StageRecipe:
        example = tree_leaves(place(stage.data.take([0]), torch.device("cpu"), self.dtype))
        size = len(stage.data) * sum(x.nbytes for x in example if isinstance(x, Tensor))
        where = (self.device, torch.device("cpu"))  # by way of which it gets there
        if size > HELD * min(free_and_total(device)[0] for device in where):
            return stage
        try:
            return replace(stage, held=Data(stage.data, self.device, self.dtype))
        except Exception:  # no batch of all examples, as of texts: they are taken as they come
            return stage

    def _single(self, training: Training, scratch: Path | None) -> NDArray[np.float64]:
        """An ordinary training. One that takes long is kept on the way, and goes on from there."""
        started = time.monotonic()
        folder = None if scratch is None else scratch / training.key[:24]
        if folder is not None and (self.longest > LONG or folder.exists()):
            model = self._kept(training, folder)
        else:
            model = self.nearby.train(
                training.seed, training.subset, stage=training.stage, device=self.device
            )
        self.longest = max(self.longest, time.monotonic() - started)
        measured = self._measurements(model)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        return measured

    def _kept(self, training: Training, folder: Path) -> nn.Module:
        examples = self.recipe.examples(training.subset, training.stage)
        totals = [s.total_steps(len(examples[s.name])) for s in self.recipe.stages]
        # the same update counts whenever it is gone on with
        ends = np.cumsum(totals)
        steps = sorted({*np.linspace(0, ends[-1], 17, dtype=int).tolist(), *ends.tolist()} - {0})
        run = self.nearby.run(
            training.seed,
            folder,
            steps,
            training.subset,
            stage=training.stage,
            device=self.device,
        )
        model = self.recipe.build(training.seed)
        model.load_state_dict(run.final.weights())
        return model.to(self.device).eval()

    @torch.no_grad()
    def _measurements(self, model: nn.Module) -> NDArray[np.float64]:
        task, found = copy.copy(self.recipe.task), []
        for block in cut(len(self.query), self.block):
            batch = place(self.query.take(block), self.device, self.dtype)
            found.append(task.measurements(task.outputs(model, batch), batch).double().cpu())
        return torch.cat(found).numpy()


_QUERY = "#query"  # beside the stages' names


def _work(workshop: Workshop, units: Sequence[Sequence[Training]], grid: Grid, bar: Any) -> None:
    """Make the units that nobody has made, until all are there.

    On a CPU each core takes units of its own: small products gain nothing from two cores at once.
    """
    threads = torch.get_num_threads()
    cores = threads if workshop.device.type == "cpu" and workshop.engine is not None else 1
    if workshop.engine is not None:
        workshop.data()
    stop = threading.Event()
    queue = _Queue(units, grid, bar, stop)
    scratch = None if grid.folder is None else grid.folder / "unfinished"
    if cores == 1:
        queue.work(lambda todo: workshop.make(todo, stop, scratch))
        return
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(cores) as pool:
            jobs = [
                pool.submit(queue.work, lambda todo: workshop.make(todo, stop, scratch))
                for _ in range(cores)
            ]
            try:
                wait(jobs, return_when=FIRST_EXCEPTION)
            finally:
                stop.set()  # an interrupt, or an error in one of them, ends the others
        errors = [job.exception() for job in jobs]
        for error in sorted(filter(None, errors), key=lambda e: isinstance(e, Interrupted)):
            raise error
    finally:
        torch.set_num_threads(threads)


class _Queue:
    """Units still to be made, dealt out to threads; other processes' units are waited for."""

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
            if todo:  # another process is at it
                self.stop.wait(0.1)
                with self.guard:
                    self.grid.refresh()
                    self.bar.n = sum(key in self.grid for key in self.trainings)
                    self.waiting.append(keys)
