"""Recipe: how to train, so that it can be done again on any subset with any seed."""

from __future__ import annotations

import copy
import json
import os
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from operator import index
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import nn
from tqdm.auto import tqdm

from whence.data import Batches, Collate, place
from whence.persist.identity import digest, sha256_of
from whence.retrain.stage import (
    TRIED,
    Ints,
    MakeOptimizer,
    MakeScheduler,
    StageRecipe,
    Transform,
    make_stages,
    reseed,
)
from whence.run import Recorder, Run, RunError
from whence.run.checkpoint import architecture_sha256, weights_sha256
from whence.task import Task

WIDENED = 10**8  # parameters of the largest model that is tried in float64
_SEEDED = threading.Lock()  # torch's default generator is one for all threads


class Recipe:
    """How to train: `model()`, `optimizer(parameters)` and `scheduler(optimizer, total_steps)` are
    the ordinary callables one has.

        recipe = whence.Recipe(
            make_model, whence.Classification(), train_set,
            optimizer=lambda p: torch.optim.SGD(p, lr=0.03, momentum=0.9),
            batch_size=64, epochs=20,
        )
        run = recipe.run(seed=0, out="runs/0")

    The seed decides the initial weights (torch is seeded before `model()` is called) and the order
    of the batches, which is drawn from (seed, epoch, example).

    Several stages: give `train={"pretrain": a, "finetune": b}`; every other setting but the model
    may then be one for all stages or such a mapping. Each stage has a new optimizer.

    Args:
        model: makes a new model, in training mode or not.
        task: what is minimised and measured.
        train: map-style dataset, without random augmentation: that is `transform`'s.
        optimizer: makes the optimizer from the model's parameters.
        batch_size: the last batch of an epoch may be smaller.
        epochs: passes over the data.
        scheduler: makes a scheduler from the optimizer and the number of updates to come.
        scheduler_every: "update" or "epoch": when its step() is called.
        stages: the names of the stages in order (default: the order of `train`), or
            `{name: {setting: value}}` for what differs.
        transform: augmentation, `transform(batch, uniform) -> batch`, example by example;
            `uniform(k)` gives k numbers in (0, 1) for each, (n, k), by seed, update and example.
        clip_norm: largest gradient norm, as `torch.nn.utils.clip_grad_norm_`.
        collate: turns a list of examples into a batch (default: torch's).
    """

    def __init__(
        self,
        model: Callable[[], nn.Module],
        task: Task | Mapping[str, Task],
        train: Any,
        optimizer: MakeOptimizer | Mapping[str, MakeOptimizer],
        batch_size: int | Mapping[str, int],
        epochs: int | Mapping[str, int],
        *,
        scheduler: MakeScheduler | Mapping[str, MakeScheduler | None] | None = None,
        scheduler_every: str | Mapping[str, str] = "update",
        stages: Sequence[str] | Mapping[str, Mapping[str, Any]] | None = None,
        transform: Transform | Mapping[str, Transform | None] | None = None,
        clip_norm: float | Mapping[str, float | None] | None = None,
        collate: Collate | None = None,
    ) -> None:
        if isinstance(model, nn.Module) or not callable(model):
            raise TypeError(
                f"model is {type(model).__name__}: give a function that makes a new model each "
                "time, such as make_model or lambda: Net(...)"
            )
        given = {
            "task": task,
            "train": train,
            "optimizer": optimizer,
            "batch_size": batch_size,
            "epochs": epochs,
            "scheduler": scheduler,
            "scheduler_every": scheduler_every,
            "transform": transform,
            "clip_norm": clip_norm,
        }
        self.model, self.collate = model, collate
        self.stages = make_stages(given, stages, collate)
        self._checked = False
        self._precise: Recipe | None = None

    @property
    def task(self) -> Task:
        """The last stage's task: what is measured."""
        return self.stages[-1].task

    def stage(self, name: str | None) -> StageRecipe:
        """The stage of that name; the first by default."""
        for stage in self.stages:
            if name in (None, stage.name):
                return stage
        raise ValueError(
            f"stage={name!r} is not in the recipe: it has {[s.name for s in self.stages]}"
        )

    def build(self, seed: int) -> nn.Module:
        """The model before its first update, on the CPU unless the factory puts it elsewhere."""
        if not self._checked:
            self._check_factory()
        return self._built(seed)

    def _built(self, seed: int) -> nn.Module:
        every = list(range(torch.cuda.device_count()))  # torch warns when it must find out itself
        with _SEEDED, torch.random.fork_rng(every):
            torch.manual_seed(_seed(seed))
            model = self.model()
        if not isinstance(model, nn.Module):
            raise TypeError(f"model() returned {type(model).__name__}, not a torch.nn.Module")
        if next(model.parameters(), None) is None:
            raise ValueError("model() returned a module without parameters: nothing to train")
        return model.train()

    def _check_factory(self) -> None:
        first, second = self._built(0), self._built(0)
        if first is second:
            raise ValueError(
                "model() returns the same module every time: a second training would go on from "
                "the first. Make a new one in the function (or return copy.deepcopy(...))"
            )
        shared = _shared(first, second)
        if shared is not None:
            raise ValueError(
                f"model() gives {shared} the same memory every time: a second training would go on "
                "from the first. Copy it in the function (tensor.clone(), copy.deepcopy(module))"
            )
        if weights_sha256(first) != weights_sha256(second):
            raise ValueError(
                "model() makes other weights when torch is seeded alike: they come from another "
                "generator (numpy's, or one made inside). Draw them by torch's own, so that a seed "
                "decides them"
            )
        self._checked = True

    def examples(
        self, subset: ArrayLike | None = None, stage: str | None = None
    ) -> dict[str, Ints]:
        """The examples each stage trains on: all, or a subset (indices, or a mask) of one's."""
        found = {s.name: np.arange(len(s.data)) for s in self.stages}
        chosen = self.stage(stage)
        if subset is not None:
            found[chosen.name] = _subset(subset, len(chosen.data))
        if len(found[chosen.name]) < chosen.batch_size:
            raise ValueError(
                f"{len(found[chosen.name])} examples are fewer than batch_size="
                f"{chosen.batch_size}: train on more of them, or with smaller batches"
            )
        return found

    def run(
        self,
        seed: int,
        out: str | os.PathLike[str] | None = None,
        checkpoints: int | Sequence[int] | Mapping[str, int] = 6,
        subset: ArrayLike | None = None,
        *,
        stage: str | None = None,
        every_step: bool = False,
        device: torch.device | str | None = None,
        progress: bool = False,
    ) -> Run:
        """Train once, recorded. The same call goes on with a training that was interrupted, with
        the same bits, and only opens one that is finished.

        Args:
            seed: of initial weights, batch order, and what model and transform draw.
            out: the run's folder (default: the run is kept in memory).
            checkpoints: how many, over all stages; or how many for each; or update counts.
            subset: training indices, or a mask, to train on.
            stage: the stage that `subset` is of (default: the first).
            every_step: keep the weights after every update too.
            device: where to train (default: a GPU when there is one).
        """
        if out is None:
            with tempfile.TemporaryDirectory() as folder:
                return self.run(
                    seed,
                    folder,
                    checkpoints,
                    subset,
                    stage=stage,
                    every_step=every_step,
                    device=device,
                    progress=progress,
                ).in_memory()
        examples = self.examples(subset, stage)
        model = self.build(seed)
        device = training_device(device, model)
        model.to(device)
        totals = {s.name: s.total_steps(len(examples[s.name])) for s in self.stages}
        plan = self._checkpoints(checkpoints)
        chosen = self.stage(stage).name
        origin = {
            "recipe": self.fingerprint,
            "seed": _seed(seed),
            "subset": None if subset is None else digest(examples[chosen]),
            "stage": None if subset is None else chosen,
            "checkpoints": plan if isinstance(plan, list) else list(plan.values()),
            "every_step": every_step,
        }
        finished = _finished(Path(out), origin)
        if finished is not None:
            return finished
        clips = {s.name: s.clip_norm for s in self.stages if s.clip_norm is not None}
        bar = tqdm(total=sum(totals.values()), unit="update", disable=not progress, leave=False)
        recorder: Recorder | None = None
        start = before = 0  # updates of the whole run: recorded earlier; of the stages so far
        with ExitStack() as stack, torch.random.fork_rng(_cuda(device)), bar:
            for s in self.stages:
                optimizer, size = s.make_optimizer(model), len(examples[s.name])
                own = plan if isinstance(plan, list) else plan[s.name]
                if recorder is None:
                    recorder = Recorder(
                        out,
                        model,
                        optimizer,
                        checkpoints=own,
                        total_steps=None if isinstance(plan, list) else totals[s.name],
                        stage=s.name,
                        size=size,
                        every_step=every_step,
                        subset=None if subset is None else examples[chosen],
                        subset_stage=None if subset is None else chosen,
                        origin=origin,
                        notes={"clip_norm": clips} if clips else None,
                    )
                    start = recorder.restore()
                    stack.enter_context(recorder)
                else:
                    more = None if isinstance(plan, list) else own
                    recorder.stage(
                        s.name,
                        size=size,
                        total_steps=totals[s.name] if more else None,
                        checkpoints=more,
                        optimizer=optimizer,
                    )
                skip = min(max(start - before, 0), totals[s.name])
                bar.update(skip)
                for block in s.updates(model, optimizer, seed, examples[s.name], skip):
                    recorder.step(block)
                    bar.update()
                before += totals[s.name]
        return Run.open(out)

    def train(
        self,
        seed: int,
        subset: ArrayLike | None = None,
        *,
        stage: str | None = None,
        device: torch.device | str | None = None,
    ) -> nn.Module:
        """Train once, not recorded: the final model, in eval mode."""
        examples, model = self.examples(subset, stage), self.build(seed)
        model.to(training_device(device, model))
        where = next(model.parameters()).device
        with torch.random.fork_rng(_cuda(where)):
            for s in self.stages:
                for _ in s.updates(model, s.make_optimizer(model), seed, examples[s.name]):
                    pass
        return model.eval()

    def identity(self) -> dict[str, Any]:
        """What the recipe is made of: initial weights, data, rates and settings of each stage."""
        for stage in self.stages:
            stage.data.refresh()
            if not stage.data.steady:
                raise ValueError(
                    f"{stage.data.name}[0] differs between two reads: the data is random "
                    "(augmented?). Give it as it is, and augmentation as transform="
                )
        model, precise = self.build(0), self.precise()
        return {
            "initial": weights_sha256(model),
            "model": architecture_sha256(model),
            "losses": {s.name: precise.tried(s.task, s.data, "losses") for s in self.stages},
            "stages": {s.name: s.identity(model) for s in self.stages},
        }

    def precise(self) -> Recipe:
        """This recipe in float64, for comparisons; as it is where its code is of one precision."""
        if self._precise is None:
            self._precise = self
            if sum(p.numel() for p in self.build(0).parameters()) <= WIDENED:
                wide = copy.copy(self)
                wide.model, wide._precise = partial(_widened, self.model), wide
                with suppress(Exception):  # such as of a float32 tensor that is made in forward
                    for stage in self.stages:
                        wide.tried(stage.task, stage.data, "losses")
                    self._precise = wide
        return self._precise

    def tried(self, task: Task, data: Batches, what: str) -> list[str]:
        """Losses or measurements of a few examples by the untrained model, rounded to what all
        machines agree on: what the model's and the task's code does, whatever it is."""
        model, task = self.build(0), copy.copy(task)
        first, block = next(model.parameters()), np.arange(min(TRIED, len(data)))
        model.train(what == "losses")
        with torch.no_grad(), torch.random.fork_rng(_cuda(first.device)):
            reseed(0, first.device)
            batch = place(data.take(block), first.device, first.dtype)
            found = getattr(task, what)(task.outputs(model, batch), batch)
        if what == "measurements" and found.shape != (len(block),):
            raise ValueError(
                f"{task!r} measures {tuple(found.shape)} for {len(block)} examples of "
                f"{data.name}: measurements(outputs, batch) must give one number for each"
            )
        digits = {torch.float64: 6, torch.float32: 2}.get(first.dtype, 0)
        return [f"{round(value, digits) + 0.0}" for value in found.double().flatten().tolist()]

    @property
    def fingerprint(self) -> str:
        """SHA-256 of `identity()`: of what the recipe does, never of a function's code."""
        return sha256_of(json.dumps(self.identity(), sort_keys=True))

    def _checkpoints(
        self, asked: int | Sequence[int] | Mapping[str, int]
    ) -> dict[str, int] | list[int]:
        """How many checkpoints each stage keeps; or, given as such, their update counts."""
        names = [s.name for s in self.stages]
        if isinstance(asked, Mapping):
            if set(asked) != set(names):
                raise ValueError(f"checkpoints={dict(asked)}, but the stages are {names}")
            return {name: index(asked[name]) for name in names}
        if np.ndim(asked):
            return [index(step) for step in np.asarray(asked)]
        count = index(asked)  # type: ignore[arg-type]
        if count < len(names):
            raise ValueError(
                f"checkpoints={count}: keep at least one for each of the stages {names}"
            )
        shares = np.array_split(np.arange(count), len(names))
        return {name: len(share) for name, share in zip(names, shares, strict=True)}

    def __repr__(self) -> str:
        parts = [
            f"{s.name}: {len(s.data):,} examples, {s.epochs} epochs in batches of {s.batch_size}"
            for s in self.stages
        ]
        return f"Recipe({self.task!r}; {'; '.join(parts)})"


def training_device(device: torch.device | str | None, model: nn.Module) -> torch.device:
    """Where to train: as asked, where the factory puts the model, or a GPU when there is one."""
    if device is not None:
        return torch.device(device)
    own = next(model.parameters()).device
    if own.type != "cpu" or not torch.cuda.is_available():
        return own
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))


def _subset(subset: ArrayLike, count: int) -> Ints:
    """Training indices in order, from indices or a mask."""
    chosen = np.asarray(subset)
    if chosen.dtype == bool:
        if chosen.shape != (count,):
            raise ValueError(f"subset is a mask of shape {chosen.shape} for {count} examples")
        return np.flatnonzero(chosen)
    if chosen.ndim != 1 or (chosen.size and not np.issubdtype(chosen.dtype, np.integer)):
        raise TypeError("subset must be training indices, or a mask over the training examples")
    if len(chosen) > count:
        raise ValueError(f"subset has {len(chosen)} examples, but the data only {count}")
    ordered = np.unique(chosen).astype(np.int64)
    if len(ordered) != len(chosen):
        raise ValueError("subset names an example twice: each may be in it once")
    if len(ordered) and not (ordered[0] >= 0 and ordered[-1] < count):
        worst = int(ordered[-1] if ordered[-1] >= count else ordered[0])
        raise ValueError(f"subset names example {worst}, but the data has 0..{count - 1}")
    return ordered


def _seed(seed: int) -> int:
    if not 0 <= index(seed) < 2**63:
        raise ValueError(f"seed={seed}: use a number from 0 to 2^63 - 1")
    return index(seed)


def _cuda(device: torch.device) -> list[torch.device]:
    return [device] if device.type == "cuda" else []


def _widened(make: Callable[[], nn.Module]) -> nn.Module:
    return make().double()


def _shared(first: nn.Module, second: nn.Module) -> str | None:
    """The name of a tensor that training changes and that two models have in common, or None."""

    def changed(model: nn.Module) -> dict[int, str]:
        found = {p.data_ptr(): name for name, p in model.named_parameters() if p.requires_grad}
        for path, module in model.named_modules():
            if isinstance(module, nn.modules.batchnorm._NormBase):
                found |= {b.data_ptr(): f"{path}.{name}" for name, b in module.named_buffers()}
        return found

    own = changed(second)
    return next((name for place, name in changed(first).items() if place and place in own), None)


def _finished(out: Path, origin: Mapping[str, Any]) -> Run | None:
    """The run in a folder, if this very training made it and it is finished."""
    if not (out / "run.json").exists():
        return None
    run = Run.open(out)
    if run.origin != origin:
        other = sorted(k for k in origin if run.origin.get(k) != origin[k])
        what = ", ".join(other) if run.origin else "no recipe made it"
        raise RunError(
            f"{out} holds another training than the one asked for ({what}): give another folder "
            "(if nothing was changed: is the data made at random? Seed it)"
        )
    return run if run.finished else None
