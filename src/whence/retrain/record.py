"""Recorded runs of several seeds, trained many at a time.

The models are trained as one stack, of which weights and optimizer's state are kept at the
checkpoints. Then `Recipe.run` records each run as it records any other; only its updates are played
back instead of computed.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import index
from pathlib import Path
from time import monotonic

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import nn
from torch.optim import Optimizer
from tqdm.auto import tqdm

from whence.data import Batches
from whence.engine.options import free_and_total
from whence.retrain.measure import ENGINES, SHARE, Workshop, _units
from whence.retrain.recipe import Recipe
from whence.retrain.stack import Stack, train_stack
from whence.retrain.stage import Ints, StageRecipe
from whence.retrain.training import Training
from whence.retrain.unfinished import LONG, Begun, Kept, UnfinishedRuns
from whence.run import Run
from whence.run.plan import Plan

Folder = str | os.PathLike[str]
Steps = Mapping[str, set[int]]  # {stage: those of its updates that checkpoints follow}
Write = Callable[[Recipe, Training, torch.device], Run]
TRIED = 4  # examples by which an engine's measurements are checked
COPIES = 4  # of a model at a checkpoint, at most: its weights, and the moments of its optimizer


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
    """The runs of several seeds, each what `recipe.run(seed, ...)` makes, up to rounding; trained
    many at a time where that is possible.

    The same call opens the runs that are finished, and makes the others.

    Args:
        seeds: one for each run.
        out: a folder, in which each run has one that is named by its seed; or one folder for each.
        checkpoints: how many of each run, over all stages; or how many for each; or update counts.
        subsets: training indices, or a mask, for each run (None: all data).
        stage: the stage that the subsets are of (default: the first).
        device: where to train (default: a GPU when there is one).
        memory: what models trained at once may take, in bytes or like "8GB" (default: most of what
            is free).
        engine: "auto"; or how to train at once: "products", "vmap", or "single" for one by one.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine={engine!r}: choose one of {ENGINES}")
    trainings = _trainings(seeds, subsets, stage)
    folders = _folders(out, trainings)
    due = {t: _due(recipe, checkpoints, t) for t in trainings}
    if not trainings:
        return []
    known, identity = copy.copy(recipe), recipe.identity()
    # found out once: it takes a pass over the data
    known.identity = lambda: identity  # type: ignore[method-assign]

    def write(by: Recipe, t: Training, where: torch.device | str | None) -> Run:
        return by.run(t.seed, folders[t], checkpoints, t.subset, stage=t.stage, device=where)

    def files(unit: Sequence[Training]) -> UnfinishedRuns:
        steps = {stage: sorted(own) for stage, own in due[unit[0]].items()}
        return UnfinishedRuns(folders[unit[0]].parent, [t.key for t in unit], [identity, steps])

    # finished; or of another training, and refused; or begun by Recipe.run, which goes on with it
    runs = {t: write(known, t, device) for t in trainings if (folders[t] / "run.json").exists()}
    missing = [t for t in trainings if t not in runs]
    bar = tqdm(
        total=len(trainings), initial=len(runs), unit="run", disable=not progress, leave=False
    )
    with bar:
        if missing:
            made = _made(known, missing, due, write, files, device, memory, engine)
            for training, run in made:
                runs[training] = run
                bar.update()
            for training in missing:
                files([training]).drop()
    return [runs[t] for t in trainings]


def _trainings(
    seeds: Sequence[int], subsets: Sequence[ArrayLike | None] | None, stage: str | None
) -> list[Training]:
    if not np.ndim(seeds):
        raise TypeError(f"seeds={seeds!r}: give one for each run, such as range(10)")
    chosen = [None] * len(seeds) if subsets is None else list(subsets)
    if len(chosen) != len(seeds):
        raise ValueError(
            f"{len(chosen)} subsets for {len(seeds)} seeds: give one for each run (None for all "
            "data)"
        )
    return [Training(index(s), subset, stage) for s, subset in zip(seeds, chosen, strict=True)]


def _folders(out: Folder | Sequence[Folder], trainings: list[Training]) -> dict[Training, Path]:
    if isinstance(out, (str, os.PathLike)):
        found = [Path(out) / str(t.seed) for t in trainings]
    else:
        found = [Path(folder) for folder in out]
    if len(found) != len(trainings):
        raise ValueError(f"out has {len(found)} folders for {len(trainings)} runs: give one each")
    twice = sorted({str(folder) for folder in found if found.count(folder) > 1})
    if twice:
        raise ValueError(
            f"two runs would have the folder {twice[0]}: use each seed once, or give a folder for "
            "each run as out=[...]"
        )
    return dict(zip(trainings, found, strict=True))


def _due(
    recipe: Recipe, checkpoints: int | Sequence[int] | Mapping[str, int], training: Training
) -> Steps:
    """When `Recipe.run` keeps a checkpoint: as planned, and at the end of each stage."""
    plan, start, due = recipe._checkpoints(checkpoints), 0, {}
    examples = recipe.examples(training.subset, training.stage)
    for stage in recipe.stages:
        total = stage.total_steps(len(examples[stage.name]))
        planned = Plan.of(plan if isinstance(plan, list) else plan[stage.name], total)
        steps = {step - start for step in planned.starting(start).steps}
        due[stage.name] = {step for step in steps if 0 < step < total} | {total}
        start += total
    return due


def _made(
    recipe: Recipe,
    trainings: Sequence[Training],
    due: Mapping[Training, Steps],
    write: Write,
    files: Callable[[Sequence[Training]], UnfinishedRuns],
    device: torch.device | str | None,
    memory: int | str | None,
    engine: str,
) -> Iterator[tuple[Training, Run]]:
    """Make the runs, and give each when it is written."""
    data = recipe.stages[-1].data
    some = [data.dataset[k] for k in range(min(TRIED, len(data)))]
    shop = Workshop.open(recipe, Batches(data.name, some, data.collate), device, engine)
    shop.tell()
    if shop.engine is None:
        for training in trainings:
            yield training, write(shop.nearby, training, shop.device)
        return
    most = max(1, min(len(trainings), _held_at_once(recipe, due)))
    # one stack after another: the cores of a CPU share its products
    at_once = shop.at_once(trainings[0], memory, most * torch.get_num_threads())
    for unit in _units(recipe, trainings, min(most, at_once)):
        yield from _trained(shop, unit, due[unit[0]], write, files)


def _held_at_once(recipe: Recipe, due: Mapping[Training, Steps]) -> int:
    """How many runs' checkpoints fit into the CPU's memory."""
    size = sum(p.nbytes for p in recipe.build(0).parameters())
    kept = max(sum(map(len, steps.values())) for steps in due.values())
    free, _ = free_and_total(torch.device("cpu"))
    return int(SHARE["cpu"] * free) // (COPIES * kept * size)


def _trained(
    shop: Workshop,
    trainings: Sequence[Training],
    due: Steps,
    write: Write,
    files: Callable[[Sequence[Training]], UnfinishedRuns],
) -> Iterator[tuple[Training, Run]]:
    """Train all at once, then write each. Checkpoints of a training that takes long are kept in
    files until then, and it goes on from the last."""
    assert shop.engine is not None
    on_disk, names = files(trainings), [stage.name for stage in shop.recipe.stages]
    kept: dict[str, dict[int, Kept]] = {name: {} for name in names}
    begun: Begun | None = None
    for begun in on_disk.found():
        kept[names[begun.stage]][begun.step] = begun.kept
    started = monotonic()

    def keep(stage: StageRecipe, step: int, stack: Stack, optimizer: Optimizer) -> None:
        if step in due[stage.name]:
            kept[stage.name][step] = Kept.of(stack, optimizer)
            if monotonic() - started >= LONG:
                for number, name in enumerate(names):
                    on_disk.save(number, kept[name])

    try:
        train_stack(
            shop.recipe, trainings, shop.engine, shop.device, shop.data(), after=keep, begun=begun
        )
    except torch.OutOfMemoryError:
        if len(trainings) == 1:
            raise
    else:
        for k, training in enumerate(trainings):
            recipe = copy.copy(shop.recipe)
            recipe.stages = tuple(
                _Played(**vars(s), kept=kept[s.name], place=k) for s in recipe.stages
            )
            yield training, write(recipe, training, torch.device("cpu"))
        return
    torch.cuda.empty_cache()
    half = len(trainings) // 2
    warnings.warn(
        f"{len(trainings)} models at once do not fit into memory: {half} are tried", stacklevel=2
    )
    for part in (trainings[:half], trainings[half:]):
        yield from _trained(shop, part, due, write, files)


@dataclass(frozen=True)
class _Played(StageRecipe):
    """A stage that was trained before, as the model `place` of a stack."""

    kept: Mapping[int, Kept] = field(default_factory=dict, compare=False, repr=False)
    place: int = 0

    def updates(
        self, model: nn.Module, optimizer: Optimizer, seed: int, examples: Ints, skip: int = 0
    ) -> Iterator[Ints]:
        """The same batches and settings; the weights are right at the checkpoints alone."""
        assert not skip  # only a folder without a run is played into
        everyone, table = torch.from_numpy(examples), self.schedule(model, len(examples))
        for epoch in range(self.epochs):
            order = self.order(seed, epoch, everyone).numpy()
            for number, start in enumerate(range(0, len(order), self.batch_size), 1):
                step = epoch * self.batches_per_epoch(len(order)) + number
                for group, now in zip(optimizer.param_groups, table[step - 1], strict=True):
                    group.update(now)
                yield order[start : start + self.batch_size]
                # no parameter has a gradient: what moves the weights is the closure, after the
                # recorder has seen those from before the update
                optimizer.step(partial(self._moved, step, model, optimizer))

    def _moved(self, step: int, model: nn.Module, optimizer: Optimizer) -> float:
        if step in self.kept:
            self.kept[step].load(self.place, model, optimizer)
        return 0.0
