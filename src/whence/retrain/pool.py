"""Train models of a recipe, together or one at a time, and measure them."""

from __future__ import annotations

import copy
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from whence.data import Batches, cut, place
from whence.engine.workspace import free_and_total
from whence.errors import InvalidInput, InvalidTarget, examples_of, warn
from whence.retrain.capacity import models_at_once
from whence.retrain.device import cuda_devices, training_device
from whence.retrain.engine_choice import choose_engine
from whence.retrain.grid import name_of
from whence.retrain.recipe import Recipe
from whence.retrain.stack import Data, train_stack
from whence.retrain.stage import StageRecipe
from whence.retrain.training import Callback, Interrupted, Training, Update
from whence.retrain.unfinished import CHECKPOINT_SECONDS, Unfinished
from whence.task import Task

ENGINES = ("auto", "products", "vmap", "single")
DATA_MEMORY_SHARE = 0.25  # of free memory, for a dataset on the device of a single model
QUERIES = "#query"  # the key of the queries among the stages' datasets

# `Callback`, which also learns which trainings made the update.
TrainingsCallback = Callable[[Sequence[Training], Update], None]


@dataclass
class TrainingPool:
    """Everything that trainings of a recipe share: queries, device, engine and data.

    Attributes:
        engine: how models train together; None to train them one at a time.
        why: why a better engine cannot train the recipe, or None.
        what: the methods of the task that measure the queries, side by side.
    """

    recipe: Recipe
    query: Batches
    device: torch.device
    engine: str | None
    why: str | None
    what: Sequence[str] = ("measurements",)
    _longest: float = 0.0  # seconds of a training that was made by itself
    _data: dict[str, Data] = field(default_factory=dict)

    @classmethod
    def open(
        cls,
        recipe: Recipe,
        query: Batches,
        device: torch.device | str | None,
        engine: str = "auto",
        known_engine: str | None = None,
        what: Sequence[str] = ("measurements",),
    ) -> TrainingPool:
        """Choose the engine. `known_engine` was chosen for this recipe before."""
        pool = cls(recipe, query, training_device(device, recipe.build(0)), None, None, what)
        if engine == "single":
            return pool
        if known_engine is not None and engine in ("auto", known_engine):
            pool.engine = known_engine
            return pool
        try:
            pool.data()
        except InvalidTarget:
            raise
        except Exception as error:  # a collate may raise anything on all examples together
            pool.why = str(error) or repr(error)
        else:
            engines = ("products", "vmap") if engine == "auto" else (engine,)
            pool.engine, pool.why = choose_engine(recipe, query, pool.device, engines)
        if pool.engine is None:
            pool._data.clear()
        if engine != "auto" and pool.engine is None:
            raise InvalidInput(f"engine={engine!r} cannot train this recipe: {pool.why}")
        return pool

    def warn_if_sequential(self) -> None:
        if self.engine is None and self.why is not None:
            warn(f"models are trained one at a time: {self.why}", stacklevel=4)

    @cached_property
    def dtype(self) -> torch.dtype:
        return next(self.recipe.build(0).parameters()).dtype

    @property
    def query_block(self) -> int:
        """The number of queries that a model measures at a time; a training batch fits as well."""
        return self.recipe.stages[-1].batch_size

    def data(self) -> dict[str, Data]:
        """The datasets of all stages, and the queries, on the device."""
        if not self._data:
            for stage in self.recipe.stages:
                self._data[stage.name] = Data(stage.data, self.device, self.dtype)
                if stage.transform is None:
                    self._check_targets(stage.task, stage.data, self._data[stage.name])
            self._data[QUERIES] = Data(self.query, self.device, self.dtype)
        return self._data

    def _check_targets(self, task: Task, batches: Batches, data: Data) -> None:
        """Raise an error that names a wrong target, before many models are trained on it.

        Targets do not depend on outputs: all examples get the outputs of the first.
        """
        model, task = self.recipe.build(0).to(self.device).eval(), copy.copy(task)
        two = torch.arange(min(2, len(batches)), device=self.device)  # batch norm may need two
        try:
            with torch.no_grad(), torch.random.fork_rng(cuda_devices(self.device)):
                first = task.outputs(model, data.rows(two))[:1].cpu()
            with torch.no_grad(), examples_of(batches.name, range(len(batches))):
                outputs = first.expand(len(batches), *first.shape[1:])
                task.losses(outputs, tree_map(lambda x: x.cpu(), data.tree))
        except InvalidTarget:
            raise
        except Exception:  # a task whose losses are not of each example's outputs and targets
            return

    def at_once(self, example: Training, memory: int | str | None, most: int) -> int:
        """The number of models to train together, at most `most`.

        Args:
            example: one of the trainings.
            memory: as in `measure`.
        """
        if self.engine is None:
            return 1
        return models_at_once(
            self.recipe,
            self.device,
            self.data(),
            memory,
            most,
            partial(self._train_some, example),
        )

    def _train_some(self, example: Training, count: int) -> None:
        """Train this many models for two updates and measure them, to probe memory."""
        assert self.engine is not None
        data = self.data()
        trainings = [replace(example, seed=k) for k in range(count)]
        stack = train_stack(self.recipe, trainings, self.engine, self.device, data, updates=2)
        stack.measurements(self.recipe.task, data[QUERIES], len(self.query), self.query_block)

    def make(
        self,
        trainings: Sequence[Training],
        stop: threading.Event | None = None,
        scratch: Path | None = None,
        callback: TrainingsCallback | None = None,
    ) -> NDArray[np.float64]:
        """Train these models and measure the queries, (k, q).

        Args:
            stop: once it is set, training raises Interrupted after the next update.
            scratch: folder for the checkpoints of long trainings (default: no checkpoints).
            callback: called after each update. An exception that it raises stops the training.
        """
        if self.engine is None:
            return np.stack([self._make_one(t, stop, scratch, callback) for t in trainings])
        data, unfinished = self.data(), None
        if scratch is not None:
            file = scratch / f"{name_of([t.key for t in trainings])}.safetensors"
            unfinished = Unfinished(file, CHECKPOINT_SECONDS)
        try:
            stack = train_stack(
                self.recipe,
                trainings,
                self.engine,
                self.device,
                data,
                callback=_after_update(trainings, unfinished, stop, callback),
                start=None if unfinished is None else unfinished.find(),
            )
            task = copy.copy(self.recipe.task)  # one per thread
            sizes = len(self.query), self.query_block
            parts = [stack.measurements(task, data[QUERIES], *sizes, what) for what in self.what]
            if unfinished is not None:
                unfinished.drop()
            return np.concatenate(parts, 1)
        except torch.OutOfMemoryError:
            if len(trainings) == 1:
                raise
        parts = [self.make(part, stop, scratch, callback) for part in halves(trainings)]
        return np.concatenate(parts)

    @cached_property
    def recipe_on_device(self) -> Recipe:
        """The recipe for training one model at a time: on a GPU with its data there, if it fits.
        Its trainings are the same, bit by bit."""
        if self.device.type == "cpu":
            return self.recipe
        recipe = copy.copy(self.recipe)
        recipe.stages = tuple(self._stage_on_device(stage) for stage in recipe.stages)
        return recipe

    def _stage_on_device(self, stage: StageRecipe) -> StageRecipe:
        example = tree_leaves(place(stage.data.take([0]), torch.device("cpu"), self.dtype))
        size = len(stage.data) * sum(x.nbytes for x in example if isinstance(x, Tensor))
        passes_through = (self.device, torch.device("cpu"))
        if size > DATA_MEMORY_SHARE * min(free_and_total(d)[0] for d in passes_through):
            return stage
        try:
            return replace(stage, on_device=Data(stage.data, self.device, self.dtype))
        except Exception:  # the examples do not fit into one batch (texts): take them one by one
            return stage

    def _make_one(
        self,
        training: Training,
        stop: threading.Event | None,
        scratch: Path | None,
        callback: TrainingsCallback | None,
    ) -> NDArray[np.float64]:
        """An ordinary training. A long one is checkpointed, and resumes from there."""
        started = time.monotonic()
        folder = None if scratch is None else scratch / training.key[:24]
        recipe = training.weighted(self.recipe_on_device)
        how: Any = {"stage": training.stage, "device": self.device}
        how["callback"] = _after_update([training], None, stop, callback)
        if folder is not None and (self._longest > CHECKPOINT_SECONDS or folder.exists()):
            steps = self._checkpoint_steps(training)
            run = recipe.run(training.seed, folder, steps, training.subset, **how)
            model = self.recipe.build(training.seed)
            model.load_state_dict(run.final.weights())
            model.to(self.device).eval()
        else:
            model = recipe.train(training.seed, training.subset, **how)
        self._longest = max(self._longest, time.monotonic() - started)
        measured = self._measurements(model)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        return measured

    def _checkpoint_steps(self, training: Training) -> list[int]:
        """When a long training is checkpointed: the same updates in every call that resumes it."""
        examples = self.recipe.examples(training.subset, training.stage)
        ends = np.cumsum([s.total_steps(len(examples[s.name])) for s in self.recipe.stages])
        return sorted({*np.linspace(0, ends[-1], 17, dtype=int).tolist(), *ends.tolist()} - {0})

    @torch.no_grad()
    def _measurements(self, model: nn.Module) -> NDArray[np.float64]:
        task, blocks = copy.copy(self.recipe.task), []
        for block in cut(len(self.query), self.query_block):
            batch = place(self.query.take(block), self.device, self.dtype)
            outputs = task.outputs(model, batch)
            rows = [getattr(task, what)(outputs, batch).double().cpu() for what in self.what]
            blocks.append(torch.stack(rows))
        return torch.cat(blocks, 1).flatten().numpy()


def _after_update(
    trainings: Sequence[Training],
    unfinished: Unfinished | None,
    stop: threading.Event | None,
    callback: TrainingsCallback | None,
) -> Callback | None:
    """One callback that checkpoints, reports, and stops the training when asked to."""
    if unfinished is None and stop is None and callback is None:
        return None

    def after_update(update: Update) -> None:
        if unfinished is not None:
            unfinished.offer(update)
        if callback is not None:
            callback(trainings, update)
        if stop is not None and stop.is_set():
            raise Interrupted

    return after_update


def halves(trainings: Sequence[Training]) -> tuple[Sequence[Training], Sequence[Training]]:
    """Two stacks instead of one that did not fit into memory."""
    torch.cuda.empty_cache()
    half = len(trainings) // 2
    warn(f"{len(trainings)} models together do not fit into memory: trying {half}", stacklevel=3)
    return trainings[:half], trainings[half:]
