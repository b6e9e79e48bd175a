"""Recipe: how to train, in a form that can be repeated on any subset with any seed."""

from __future__ import annotations

import copy
import json
import os
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from whence.data import HASH_BATCH, Batches, Collate, cut, place
from whence.draws import reseed
from whence.errors import InvalidInput, InvalidType, examples_of, whole
from whence.persist.files import as_path
from whence.persist.identity import sha256_of
from whence.retrain.device import cuda_devices, training_device
from whence.retrain.recording import record_run
from whence.retrain.stage import (
    FINGERPRINTED,
    Ints,
    MakeOptimizer,
    MakeScheduler,
    StageRecipe,
    Transform,
    checked_seed,
    make_stages,
)
from whence.retrain.training import Callback
from whence.run import Run
from whence.run.checkpoint import architecture_sha256, weights_sha256
from whence.table import one_line
from whence.task import Task

RANDOM_SUMS = 8  # of losses that are not known in float64
TRIED_UPDATES = 3  # that an optimizer of the user's own is tried for
MAX_FLOAT64_PARAMETERS = 10**8  # of a model that is also built in float64, for comparisons
_SEEDING = threading.Lock()  # all threads share torch's default generator


class Recipe:
    """How to train. `model()`, `optimizer(parameters)` and `scheduler(optimizer, total_steps)` are
    ordinary callables.

        recipe = whence.Recipe(
            make_model, whence.Classification(), train_set,
            optimizer=lambda p: torch.optim.SGD(p, lr=0.03, momentum=0.9),
            batch_size=64, epochs=20,
        )
        run = recipe.run(seed=0, out="runs/0")

    The seed determines the initial weights (torch is seeded before `model()` is called) and the
    order of the batches, which depends on (seed, epoch, example).

    For several stages, pass `train={"pretrain": a, "finetune": b}`. Every other setting except the
    model may then be a single value or such a mapping. Each stage has a new optimizer.

    Args:
        model: returns a new model, in training mode or not.
        task: the loss and the measurement.
        train: map-style dataset without random augmentation; use `transform` for that.
        optimizer: returns the optimizer for the model's parameters.
        batch_size: the last batch of an epoch may be smaller.
        drop_last: leave out the last batch of an epoch if it is smaller, as a DataLoader does.
        epochs: passes over the data.
        scheduler: returns a scheduler, given the optimizer and the total number of updates.
        scheduler_every: "update" or "epoch": when to call the scheduler's step().
        stages: the names of the stages in order (default: the order of `train`), or
            `{name: {setting: value}}` for the settings that differ.
        transform: augmentation, `transform(batch, uniform) -> batch`, applied to each example by
            itself. `uniform(k)` returns k numbers in (0, 1) per example, (n, k), which depend on
            seed, update and example.
        clip_norm: largest gradient norm, as in `torch.nn.utils.clip_grad_norm_`.
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
        drop_last: bool | Mapping[str, bool] = False,
        collate: Collate | None = None,
    ) -> None:
        if isinstance(model, nn.Module) or not callable(model):
            raise InvalidType(
                f"model is {type(model).__name__}: give a function that returns a new model each "
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
            "drop_last": drop_last,
        }
        self.model, self.collate = model, collate
        self.stages = make_stages(given, stages, collate)
        self._checked = False
        self._precise: Recipe | None = None

    @property
    def task(self) -> Task:
        """The task of the last stage, which measures the trained model."""
        return self.stages[-1].task

    def stage(self, name: str | None) -> StageRecipe:
        """The stage with this name (default: the first)."""
        for stage in self.stages:
            if name in (None, stage.name):
                return stage
        raise InvalidInput(
            f"stage={name!r} is not in the recipe: it has {[s.name for s in self.stages]}"
        )

    def build(self, seed: int) -> nn.Module:
        """The model before its first update, on the CPU unless the factory moves it elsewhere."""
        if not self._checked:
            self._check_factory()
        return self._built(seed)

    def _built(self, seed: int) -> nn.Module:
        devices = list(range(torch.cuda.device_count()))  # named, because torch warns otherwise
        with _SEEDING, torch.random.fork_rng(devices):
            torch.manual_seed(checked_seed(seed))
            model = self.model()
        if not isinstance(model, nn.Module):
            raise InvalidType(f"model() returned {type(model).__name__}, not a torch.nn.Module")
        if next(model.parameters(), None) is None:
            raise InvalidInput("model() returned a module without parameters: nothing to train")
        return model.train()

    def _check_factory(self) -> None:
        first, second = self._built(0), self._built(0)
        if first is second:
            raise InvalidInput(
                "model() returns the same module every time: a second training would continue from "
                "the first. Create a new one in the function (or return copy.deepcopy(...))"
            )
        shared = _shared(first, second)
        if shared is not None:
            raise InvalidInput(
                f"model() gives {shared} the same memory every time: a second training would "
                "continue from the first. Copy it in the function (tensor.clone(), "
                "copy.deepcopy(module))"
            )
        if weights_sha256(first) != weights_sha256(second):
            raise InvalidInput(
                "model() returns different weights for the same torch seed: they come from another "
                "generator (numpy's, or one created inside). Draw them from torch's default "
                "generator, so that the seed determines them"
            )
        self._checked = True

    def examples(
        self, subset: ArrayLike | None = None, stage: str | None = None
    ) -> dict[str, Ints]:
        """The examples that each stage trains on.

        Args:
            subset: indices or a mask of the examples of `stage` (default: all).
            stage: the stage of the subset (default: the first).
        """
        examples = {s.name: np.arange(len(s.data)) for s in self.stages}
        chosen = self.stage(stage)
        if subset is not None:
            examples[chosen.name] = _subset(subset, len(chosen.data))
        if len(examples[chosen.name]) < chosen.batch_size:
            raise InvalidInput(
                f"{len(examples[chosen.name])} examples are fewer than batch_size="
                f"{chosen.batch_size}: train on more examples, or with smaller batches"
            )
        return examples

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
        callback: Callback | None = None,
    ) -> Run:
        """Train once and record the training.

        Repeat the same call to resume an interrupted training, with the same bits, or to open a
        finished one.

        Args:
            seed: determines the initial weights, the batch order, and the random numbers of the
                model and the transform.
            out: the run's folder (default: the run is kept in memory).
            checkpoints: the number of checkpoints over all stages, or per stage; or the update
                counts to save at.
            subset: training indices, or a mask, to train on (default: all examples).
            stage: the stage of the subset (default: the first).
            every_step: also keep the weights after every update.
            device: where to train (default: a GPU if there is one).
            progress: show a progress bar.
            callback: called with a `whence.retrain.Update` after each update. An exception that it
                raises stops the training.
        """
        record = partial(
            record_run,
            stage=stage,
            device=device,
            fingerprint=self.fingerprint,
            every_step=every_step,
            progress=progress,
            callback=callback,
        )
        if out is not None:
            return record(self, seed, as_path(out), checkpoints, subset)
        with tempfile.TemporaryDirectory() as folder:
            return record(self, seed, Path(folder), checkpoints, subset).in_memory()

    def train(
        self,
        seed: int,
        subset: ArrayLike | None = None,
        *,
        stage: str | None = None,
        device: torch.device | str | None = None,
        callback: Callback | None = None,
    ) -> nn.Module:
        """Train once without recording. Returns the final model, in eval mode."""
        examples, model = self.examples(subset, stage), self.build(seed)
        model.to(training_device(device, model))
        where = next(model.parameters()).device
        with torch.random.fork_rng(cuda_devices(where)):
            for s in self.stages:
                updates = s.updates(
                    model, s.make_optimizer(model), seed, examples[s.name], 0, callback
                )
                for _ in updates:
                    pass
        return model.eval()

    def identity(self) -> dict[str, Any]:
        """What defines the recipe: initial weights, and data, rates and settings of each stage."""
        for stage in self.stages:
            stage.data.refresh()
            if stage.data.moving:
                raise InvalidInput(f"{stage.data.moving}, and the augmentation as transform=")
        model, precise = self.build(0), self.precise()
        return {
            "initial": weights_sha256(model),
            "model": architecture_sha256(model),
            "losses": {s.name: precise.tried(s.task, s.data, "losses", s) for s in self.stages},
            "gradients": {s.name: precise._gradients(s) for s in self.stages},
            "stages": {s.name: s.identity(model) for s in self.stages},
        } | ({"updates": updates} if (updates := self._own_updates()) else {})

    def precise(self) -> Recipe:
        """This recipe in float64, for comparisons; unchanged if its code needs one precision."""
        if self._precise is None:
            self._precise = self
            if sum(p.numel() for p in self.build(0).parameters()) <= MAX_FLOAT64_PARAMETERS:
                wide = copy.copy(self)
                wide.model, wide._precise = partial(_widened, self.model), wide
                with suppress(Exception):  # for example a float32 tensor created in forward
                    for s in self.stages:
                        wide._try(s.task, s.data, "losses", s, _few(s.data), training=True)
                    self._precise = wide
        return self._precise

    def tried(
        self, task: Task, data: Batches, what: str, stage: StageRecipe | None = None
    ) -> list[str]:
        """Losses or measurements of all examples by the untrained model.

        They fingerprint what the code of model and task does: those of a few examples, losses in
        training mode, and a digest of all, in evaluation mode. Rounded, so that all machines agree.

        Args:
            stage: whose `transform` the examples go through.
        """
        few = self._try(task, data, what, stage, _few(data), training=what == "losses")
        digits = {torch.float64: 6, torch.float32: 2}.get(few.dtype, 0)
        texts = [f"{round(value, digits) + 0.0}" for value in few.double().flatten().tolist()]
        blocks = cut(len(data), HASH_BATCH)
        return [*texts, _digest(self._try(task, data, what, stage, blocks, training=False))]

    def _try(
        self,
        task: Task,
        data: Batches,
        what: str,
        stage: StageRecipe | None,
        blocks: Sequence[Ints],
        training: bool,
    ) -> Tensor:
        model, task, values = self.build(0).train(training), copy.copy(task), []
        if not training:
            model.to(training_device(None, model))
        first = next(model.parameters())
        with torch.no_grad(), torch.random.fork_rng(cuda_devices(first.device)):
            reseed(0, first.device)
            for block in blocks:
                batch = place(data.take(block), first.device, first.dtype)
                if stage is not None:
                    batch = stage.transformed(batch, 0, 0, block, first)
                with examples_of(data.name, block):
                    per_example = getattr(task, what)(task.outputs(model, batch), batch)
                if what == "measurements" and per_example.shape != (len(block),):
                    raise InvalidInput(
                        f"{task!r} returns measurements of shape {tuple(per_example.shape)} for "
                        f"{len(block)} examples of {data.name}: measurements(outputs, batch) must "
                        "return one number each"
                    )
                values.append(per_example.to("cpu", first.dtype))
        return torch.cat(values)

    def _gradients(self, stage: StageRecipe) -> list[str]:
        """Norms of the gradient of a few examples' loss: what losses alone do not show, such as a
        `detach` in the model."""
        model = self.build(0)
        _differentiate(model, stage)
        digits = 6 if next(model.parameters()).dtype == torch.float64 else 2
        norms = [0.0 if p.grad is None else float(p.grad.norm()) for p in model.parameters()]
        largest = max(norms) or 1.0
        return [f"{norm / largest:.{digits}f}" for norm in norms]

    def _own_updates(self) -> dict[str, list[str]]:
        """How far a few updates move each parameter, of stages whose optimizer is not torch's: what
        its settings do not show."""
        updates: dict[str, list[str]] = {}
        for stage in self.stages:
            if not type(stage.make_optimizer(self.build(0))).__module__.startswith("torch.optim"):
                for recipe in (self.precise(), self):  # its code may need one precision
                    with suppress(Exception):
                        updates.setdefault(stage.name, recipe._moves(stage))
        return updates

    def _moves(self, stage: StageRecipe) -> list[str]:
        model = self.build(0)
        optimizer, start = stage.make_optimizer(model), copy.deepcopy(list(model.parameters()))
        for _ in range(TRIED_UPDATES):
            model.zero_grad(set_to_none=True)
            _differentiate(model, stage)
            optimizer.step()
        digits = 6 if start[0].dtype == torch.float64 else 2
        pairs = zip(model.parameters(), start, strict=True)
        return [f"{float((p.detach() - q.detach()).norm()):.{digits}g}" for p, q in pairs]

    @property
    def fingerprint(self) -> str:
        """SHA-256 of `identity()`: of what the recipe does, not of the code of a function."""
        return fingerprint_of(self.identity())

    def checkpoint_plan(
        self, asked: int | Sequence[int] | Mapping[str, int]
    ) -> dict[str, int] | list[int]:
        """The number of checkpoints of each stage; or the update counts, if given as such."""
        names = [s.name for s in self.stages]
        if isinstance(asked, Mapping):
            if set(asked) != set(names):
                raise InvalidInput(f"checkpoints={dict(asked)}, but the stages are {names}")
            return {name: whole("checkpoints", asked[name]) for name in names}
        if np.ndim(asked):
            return [whole("checkpoints", step) for step in np.asarray(asked)]
        count = whole("checkpoints", asked)
        if count < len(names):
            raise InvalidInput(
                f"checkpoints={count}: keep at least one for each of the stages {names}"
            )
        shares = np.array_split(np.arange(count), len(names))
        return {name: len(share) for name, share in zip(names, shares, strict=True)}

    def __repr__(self) -> str:
        parts = [
            f"{s.name}: {len(s.data):,} examples, {s.epochs} epochs in batches of {s.batch_size}"
            for s in self.stages
        ]
        return one_line(f"Recipe({self.task!r}; {'; '.join(parts)})")


def _differentiate(model: nn.Module, stage: StageRecipe) -> None:
    """The gradient of the mean loss of a few examples of a stage."""
    task, (block,), first = copy.copy(stage.task), _few(stage.data), next(model.parameters())
    with torch.enable_grad(), torch.random.fork_rng(cuda_devices(first.device)):
        reseed(0, first.device)
        batch = stage.transformed(stage.batch(block, first), 0, 0, block, first)
        task.losses(task.outputs(model, batch), batch).mean().backward()  # type: ignore[no-untyped-call]


def _few(data: Batches) -> list[Ints]:
    """The first examples, as one block."""
    return [np.arange(min(FINGERPRINTED, len(data)))]


def _digest(values: Tensor) -> str:
    """The digest of numbers rounded to a share of their size, so that all machines agree.

    In float64 every number counts. Those of lower precision would not all be rounded alike on two
    machines, so that a few sums of all count instead, with random signs.
    """
    numbers = values.double().flatten().numpy()
    digits = 4
    if values.dtype != torch.float64:
        signs = np.random.default_rng(0).choice([-1.0, 1.0], (RANDOM_SUMS, len(numbers)))
        numbers, digits = signs @ numbers / np.sqrt(len(numbers)), 2
    sizes = np.abs(numbers[np.isfinite(numbers)])
    scale = np.sqrt(np.mean(sizes**2)) if sizes.any() else 1.0
    rounded = np.round(numbers / 10.0 ** np.floor(np.log10(scale)), digits) + 0.0
    return sha256_of(rounded)


def fingerprint_of(identity: Mapping[str, Any]) -> str:
    """The fingerprint of a recipe with this identity."""
    return sha256_of(json.dumps(identity, sort_keys=True))


def _subset(subset: ArrayLike, count: int) -> Ints:
    """Training indices in order, from indices or a mask."""
    chosen = np.asarray(subset)
    if chosen.dtype == bool:
        if chosen.shape != (count,):
            raise InvalidInput(f"subset is a mask of shape {chosen.shape} for {count} examples")
        return np.flatnonzero(chosen)
    if chosen.ndim != 1 or (chosen.size and not np.issubdtype(chosen.dtype, np.integer)):
        raise InvalidType("subset must be training indices, or a mask over the training examples")
    if len(chosen) > count:
        raise InvalidInput(f"subset has {len(chosen)} examples, but the data has only {count}")
    ordered = np.unique(chosen).astype(np.int64)
    if len(ordered) != len(chosen):
        raise InvalidInput("subset names an example twice: name each once")
    if len(ordered) and not (ordered[0] >= 0 and ordered[-1] < count):
        worst = int(ordered[-1] if ordered[-1] >= count else ordered[0])
        raise InvalidInput(f"subset names example {worst}, but the data has 0..{count - 1}")
    return ordered


def _widened(make: Callable[[], nn.Module]) -> nn.Module:
    return make().double()


def _shared(first: nn.Module, second: nn.Module) -> str | None:
    """The name of a tensor that training changes and that two models share, or None."""

    def changed(model: nn.Module) -> dict[int, str]:
        names = {p.data_ptr(): name for name, p in model.named_parameters() if p.requires_grad}
        for path, module in model.named_modules():
            if isinstance(module, nn.modules.batchnorm._NormBase):
                names |= {b.data_ptr(): f"{path}.{name}" for name, b in module.named_buffers()}
        return names

    addresses = changed(second)
    return next((name for at, name in changed(first).items() if at and at in addresses), None)
