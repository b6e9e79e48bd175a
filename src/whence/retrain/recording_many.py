"""Recorded runs of several seeds, trained together.

First the models are trained as one stack, whose weights and optimizer state are saved at the
checkpoints. Then each run is recorded as `Recipe.run` records it, with updates that load the saved
states instead of training.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import nn
from torch.optim import Optimizer

from whence.data import Batches
from whence.engine.workspace import free_and_total
from whence.errors import InvalidInput, InvalidType, check_choice, whole
from whence.persist.files import as_path
from whence.progress import progress_bar
from whence.retrain.capacity import MEMORY_SHARE
from whence.retrain.pool import ENGINES, TrainingPool, halves
from whence.retrain.recipe import Recipe, fingerprint_of
from whence.retrain.recording import MakeUpdates, record_run
from whence.retrain.stack import train_stack
from whence.retrain.stage import Ints, StageRecipe
from whence.retrain.training import Callback, Training, Update
from whence.retrain.unfinished import CHECKPOINT_SECONDS, StackCheckpoint, UnfinishedRuns
from whence.retrain.work_queue import units
from whence.run import Run
from whence.run.schedule import CheckpointSchedule

Folder = str | os.PathLike[str]
Steps = Mapping[str, set[int]]  # {stage: its updates that are followed by a checkpoint}
PROBED_EXAMPLES = 4  # examples that an engine's measurements are checked on
COPIES_PER_CHECKPOINT = 4  # of a model, at most: its weights, and its optimizer's moments


def record(
    recipe: Recipe,
    seeds: Sequence[int],
    out: Folder | Sequence[Folder],
    checkpoints: int | Sequence[int] | Mapping[str, int] = 6,
    subsets: Sequence[ArrayLike | None] | None = None,
    *,
    stage: str | None = None,
    device: torch.device | str | None = None,
    memory: int | str | None = None,
    engine: str = "auto",
    progress: bool = True,
) -> list[Run]:
    """Record the runs of several seeds, trained together where possible.

    Each run is what `recipe.run(seed, ...)` records, up to rounding. Repeat the same call to
    resume: finished runs are opened, the others are made.

    Args:
        recipe: how to train.
        seeds: one per run.
        out: a folder, in which the folder of each run is named by its seed; or one folder per run.
        checkpoints: the number of checkpoints of each run over all stages, or per stage; or the
            update counts to save at.
        subsets: training indices, or a mask, for each run (None: all data).
        stage: the stage of the subsets (default: the first).
        device: where to train (default: a GPU if there is one).
        memory: what models that train together may use, in bytes or like "8GB" (default: most of
            what is free).
        engine: "auto", or how models train together: "products" or "vmap"; "single" trains them one
            by one.
        progress: show a progress bar.
    """
    check_choice("engine", engine, ENGINES)
    trainings = _trainings(seeds, subsets, stage)
    folders = _folders(out, trainings)
    due = {t: _checkpoint_steps(recipe, checkpoints, t) for t in trainings}
    if not trainings:
        return []
    recording = _Recording(recipe, checkpoints, folders, due, recipe.identity())
    # a finished run is opened, one of another training refused, one begun by Recipe.run resumed
    runs = {t: recording.write(recipe, t, device) for t in trainings if recording.begun(t)}
    missing = [t for t in trainings if t not in runs]
    bar = progress_bar(total=len(trainings), initial=len(runs), unit="run", shown=progress)
    with ExitStack() as locks, bar:
        if missing:
            for training, run in recording.make(missing, device, memory, engine, locks):
                runs[training] = run
                bar.update()
            for training in missing:
                recording.files([training]).drop()
    return [runs[t] for t in trainings]


@dataclass(frozen=True)
class _Recording:
    """Runs of one recipe: where they are written, and when their checkpoints are due.

    Attributes:
        identity: of the recipe, once for all runs: it takes a pass over the data.
    """

    recipe: Recipe
    checkpoints: int | Sequence[int] | Mapping[str, int]
    folders: Mapping[Training, Path]
    due: Mapping[Training, Steps]
    identity: Mapping[str, Any]

    def write(
        self,
        recipe: Recipe,
        training: Training,
        device: torch.device | str | None,
        make_updates: MakeUpdates | None = None,
    ) -> Run:
        return record_run(
            recipe,
            training.seed,
            self.folders[training],
            self.checkpoints,
            training.subset,
            stage=training.stage,
            device=device,
            fingerprint=fingerprint_of(self.identity),
            make_updates=make_updates,
        )

    def files(self, unit: Sequence[Training]) -> UnfinishedRuns:
        steps = {stage: sorted(numbers) for stage, numbers in self.due[unit[0]].items()}
        return UnfinishedRuns(
            folder=self.folders[unit[0]].parent,
            trainings=[t.key for t in unit],
            identity=[self.identity, steps],
        )

    def begun(self, training: Training) -> bool:
        folder = self.folders[training]
        return (folder / "run.json").exists() and (
            Run.open(folder).finished or not self.files([training]).trained
        )

    def make(
        self,
        trainings: Sequence[Training],
        device: torch.device | str | None,
        memory: int | str | None,
        engine: str,
        locks: ExitStack,
    ) -> Iterator[tuple[Training, Run]]:
        """Make the runs, and yield each once it is written."""
        data = self.recipe.stages[-1].data
        examples = [data.dataset[k] for k in range(min(PROBED_EXAMPLES, len(data)))]
        query = Batches(data.name, examples, data.collate)
        pool = TrainingPool.open(self.recipe, query, device, engine)
        pool.warn_if_sequential()
        if pool.engine is None:
            for training in trainings:
                yield training, self.write(pool.recipe_on_device, training, pool.device)
            return
        most = max(1, min(len(trainings), self._runs_in_memory()))
        # one stack after another: on a CPU, all cores work on its products
        at_once = pool.at_once(trainings[0], memory, most * torch.get_num_threads())
        for unit in units(self.recipe, trainings, min(most, at_once)):
            yield from self._make_together(pool, unit, locks)

    def _runs_in_memory(self) -> int:
        """The number of runs whose checkpoints fit into the CPU's memory."""
        size = sum(p.nbytes for p in self.recipe.build(0).parameters())
        checkpoints = max(sum(map(len, steps.values())) for steps in self.due.values())
        free, _ = free_and_total(torch.device("cpu"))
        return int(MEMORY_SHARE["cpu"] * free) // (COPIES_PER_CHECKPOINT * checkpoints * size)

    def _make_together(
        self, pool: TrainingPool, trainings: Sequence[Training], locks: ExitStack
    ) -> Iterator[tuple[Training, Run]]:
        """Train all models together, then write their runs.

        Until all are written, the checkpoints of the stack are kept in files. A long training
        resumes from the last, and a call that is killed among the runs writes the others from them:
        a model that is trained again, in a smaller stack, would have other last bits.
        """
        assert pool.engine is not None
        on_disk, due = self.files(trainings), self.due[trainings[0]]
        locks.enter_context(on_disk.locked())
        checkpoints = {(c.stage, c.step): c for c in on_disk.checkpoints()}
        start = next(reversed(checkpoints.values()), None)
        started = monotonic()

        def save(update: Update) -> None:
            if update.step in due[update.stage.name]:
                checkpoints[update.stage.number, update.step] = StackCheckpoint.of(update)
                if monotonic() - started >= CHECKPOINT_SECONDS:
                    on_disk.save(checkpoints.values())

        try:
            train_stack(
                self.recipe,
                trainings,
                pool.engine,
                pool.device,
                pool.data(),
                callback=save,
                start=start,
            )
        except torch.OutOfMemoryError:
            if len(trainings) == 1:
                raise
        else:
            last = self.recipe.stages[-1]
            if start is None or (start.stage, start.step) != (last.number, max(due[last.name])):
                on_disk.save(checkpoints.values())
            for position, training in enumerate(trainings):
                played = partial(_play_updates, checkpoints, position)
                yield training, self.write(self.recipe, training, torch.device("cpu"), played)
            return
        for part in halves(trainings):
            yield from self._make_together(pool, part, locks)


def _trainings(
    seeds: Sequence[int], subsets: Sequence[ArrayLike | None] | None, stage: str | None
) -> list[Training]:
    if not np.ndim(seeds):
        raise InvalidType(f"seeds={seeds!r}: give one per run, such as range(10)")
    chosen = [None] * len(seeds) if subsets is None else list(subsets)
    if len(chosen) != len(seeds):
        raise InvalidInput(
            f"{len(chosen)} subsets for {len(seeds)} seeds: give one per run (None for all data)"
        )
    return [
        Training(whole("seeds", s), subset, stage) for s, subset in zip(seeds, chosen, strict=True)
    ]


def _folders(out: Folder | Sequence[Folder], trainings: list[Training]) -> dict[Training, Path]:
    if isinstance(out, (str, os.PathLike)):
        folders = [as_path(out) / str(t.seed) for t in trainings]
    else:
        folders = [as_path(folder) for folder in out]
    if len(folders) != len(trainings):
        raise InvalidInput(
            f"out has {len(folders)} folders for {len(trainings)} runs: give one per run"
        )
    twice = sorted({str(folder) for folder in folders if folders.count(folder) > 1})
    if twice:
        raise InvalidInput(
            f"two runs would have the folder {twice[0]}: use each seed once, or give a folder per "
            "run as out=[...]"
        )
    return dict(zip(trainings, folders, strict=True))


def _checkpoint_steps(
    recipe: Recipe, checkpoints: int | Sequence[int] | Mapping[str, int], training: Training
) -> Steps:
    """The updates after which `Recipe.run` saves a checkpoint: as planned, and at stage ends."""
    plan, start, due = recipe.checkpoint_plan(checkpoints), 0, {}
    examples = recipe.examples(training.subset, training.stage)
    for stage in recipe.stages:
        total = stage.total_steps(len(examples[stage.name]))
        counts = plan if isinstance(plan, list) else plan[stage.name]
        planned = CheckpointSchedule.of(counts, total)
        steps = {step - start for step in planned.starting_at(start).steps}
        due[stage.name] = {step for step in steps if 0 < step < total} | {total}
        start += total
    return due


def _play_updates(
    checkpoints: Mapping[tuple[int, int], StackCheckpoint],
    position: int,
    stage: StageRecipe,
    model: nn.Module,
    optimizer: Optimizer,
    seed: int,
    examples: Ints,
    skip: int,
    callback: Callback | None,
) -> Iterator[Ints]:
    """`StageRecipe.updates` of a model that was trained before, at this position of a stack.

    Batches and settings are those of the training. The weights are right at the checkpoints only.
    """
    assert callback is None  # played by `write` only
    upcoming = 0

    def load(*_: object) -> None:
        if (stage.number, upcoming) in checkpoints:
            checkpoints[stage.number, upcoming].load(position, model, optimizer)

    # The parameters have no gradients, so step() changes nothing itself. The hook runs after the
    # recorder's, which sees the weights before the update, and before the recorder records it.
    hook = optimizer.register_step_pre_hook(load)
    schedule = stage.schedule(model, len(examples))
    for step, block in stage.plain_batches(seed, examples):
        if step < skip:  # recorded by a call that was interrupted
            continue
        for group, settings in zip(optimizer.param_groups, schedule[step], strict=True):
            group.update(settings)
        upcoming = step + 1
        yield block
        optimizer.step()
    hook.remove()
