"""Recorder: the few lines that turn a training loop into a Run."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from operator import index
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from whence.run import optimizers
from whence.run.checkpoint import RunError, parameters_sha256
from whence.run.plan import Due, Plan
from whence.run.record import Record
from whence.run.recording import Recording
from whence.run.resume import Restored, continued


class Recorder:
    """Records a training into a folder. The loop inside the `with` stays as it is:

        with whence.Recorder("runs/mnist", model, optimizer, checkpoints=6, total_steps=600):
            train(model, optimizer, loader)

    Updates are counted by the optimizer's own hook, so that gradient accumulation, schedulers and
    updates skipped by an AMP scaler need nothing. The weights before the first update and the final
    model are always kept. In distributed training (replicated models) rank 0 writes.

    A training that was interrupted is recorded anew when the same program is run again. To go on
    from its last checkpoint instead, with the same bits as if nothing had happened:

        recorder = whence.Recorder("runs/mnist", model, optimizer, checkpoints=6, total_steps=600)
        start = recorder.restore()           # 0 when there is nothing yet
        with recorder:
            for step, batch in enumerate(batches):
                if step >= start:
                    update(model, optimizer, batch)
                scheduler.step()

    The same lines after the end of a run, with another `stage`, add a stage to it.

    Args:
        path: the run's folder.
        model: what is trained; names lose `module.` (DDP) and `_orig_mod.` (torch.compile).
        optimizer: what trains it. Parameters it has not, or that need no gradient, are frozen.
        checkpoints: how many, evenly spaced over `total_steps`; or the update counts themselves,
            counted from the start of the run.
        total_steps: number of updates planned, counted from the start of `stage`.
        stage: name of the (first) stage.
        size: number of training examples of that stage.
        every_step: keep the weights after every update too: T + 1 copies of the model on disk, 4
            bytes × parameters × (T + 1) in float32. (Hydra and Unrolled need only `step(indices)`:
            they replay the updates.)
        subset: the training indices used, when not all.
        subset_stage: the stage whose examples they are (default: the first).
        origin: what makes this run, as plain JSON values; what another made is not gone
            on with.
        overwrite: start anew, whatever the folder holds.
        resumable: keep the optimizer's state for `restore` (for Adam, twice the weights' size).
        notes: what SOURCE does not model and a reader should know of:
            {"clip_norm": 1.0, "ema": 0.999}.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        model: nn.Module,
        optimizer: Optimizer,
        *,
        checkpoints: int | Sequence[int] = 6,
        total_steps: int | None = None,
        stage: str = "train",
        size: int | None = None,
        every_step: bool = False,
        subset: ArrayLike | None = None,
        subset_stage: str | None = None,
        origin: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        resumable: bool = True,
        notes: Mapping[str, Any] | None = None,
    ) -> None:
        self.path, self.model, self.optimizer = Path(path), model, optimizers.unwrap(optimizer)
        self._checkpoints = checkpoints
        self._first = (stage, _size(size), Plan.of(checkpoints, total_steps))
        self._every_step, self._overwrite, self._resumable = every_step, overwrite, resumable
        self._subset = np.asarray(subset, np.int64).reshape(-1) if subset is not None else None
        self._subset_stage = subset_stage
        self._origin: dict[str, Any] = json.loads(json.dumps(dict(origin or {})))
        self._notes: dict[str, Any] = json.loads(json.dumps(dict(notes or {})))
        self._name_parameters()
        self._recording: Recording | None = None
        self._restored: Restored | None = None  # until the next update
        self._begun = False  # whether this `with` has seen an update
        self._stood: str | None = None  # the parameters, where a run goes on
        self._batch: NDArray[np.int64] | None = None
        self._hooks: list[RemovableHandle] = []

    @property
    def updates(self) -> int:
        """How many updates the run has; 0 outside the `with`."""
        return self._recording.updates if self._recording else 0

    @property
    def _silent(self) -> bool:
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        return distributed and torch.distributed.get_rank() != 0

    def __enter__(self) -> Self:
        if not self._silent:
            if self._notes:
                told = ", ".join(f"{key}={value!r}" for key, value in self._notes.items())
                warnings.warn(
                    f"kept with the run, but not modelled by SOURCE: {told}", stacklevel=2
                )
            self._begun = False
            self._attach()
            self._hook()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._recording is None:
            return
        recording, self._recording = self._recording, None
        self._unhook()
        if kind is not None:
            if self._begun:
                try:
                    recording.write()
                except Exception as failure:  # the error that ended training matters more
                    warnings.warn(f"could not write {self.path}: {failure}", stacklevel=2)
            return
        if not recording.updates:
            warnings.warn("no update was made: nothing was recorded", stacklevel=2)
            return
        if not self._begun:
            if Record.read(self.path).finished:
                return
            recording.begin(self._first[0])
        recording.keep(self.optimizer, self._names)
        self._due.check(recording.updates)
        recording.record.finished = True
        recording.write()

    def stage(
        self,
        name: str,
        *,
        size: int | None = None,
        total_steps: int | None = None,
        checkpoints: int | Sequence[int] | None = None,
        optimizer: Optimizer | None = None,
    ) -> None:
        """Open a stage; before the first update, name the first one.

        Args:
            name: the new stage. The one before it ends here, with a checkpoint: call this before
                changing the model.
            size: number of its training examples.
            total_steps, checkpoints: its own checkpoints, as for the Recorder, `total_steps` being
                counted from here. By default the recorder's plan goes on.
            optimizer: the one that steps from now on, when it is another.
        """
        plan = None
        if checkpoints is not None or total_steps is not None:
            chosen = checkpoints if checkpoints is not None else self._checkpoints
            plan = Plan.of(chosen, total_steps)
        if self._recording is None and not self._silent:
            raise RunError(f"stage({name!r}) was called outside the recorder's `with`")
        if self._recording and self._begun:
            self._recording.keep(self.optimizer, self._names)
        if optimizer is not None:
            self.optimizer = optimizers.unwrap(optimizer)
        self._name_parameters()
        if self._recording:
            self._unhook()
            self._hook()
            self._declare(self._recording, name, _size(size), plan)
        if optimizer is not None and self._restored and self._restored.stage == name:
            self._restored.load(self.optimizer, self._names)

    def step(self, indices: ArrayLike) -> None:
        """Note the training examples of the coming update. Call it before every optimizer.step();
        with gradient accumulation once, with all of them."""
        if self._recording:
            if self._recording.record.batches is None and self.updates:
                raise RunError(
                    f"recorder.step(indices) came only after update {self.updates}: call it before "
                    "every optimizer.step(), from the first one on"
                )
            self._batch = np.asarray(indices, np.int64).reshape(-1).copy()

    def mark(self) -> None:
        """Say that this very moment is about to be kept elsewhere, by a trainer that saves its own
        checkpoints: a training that goes on from there, with those weights, is then recorded on."""
        if self._recording and self._begun and self.updates:
            self._recording.mark()

    def restore(self) -> int:
        """Load the last checkpoint into model and optimizer, and return its step: 0 where there is
        none, or with `overwrite=True`. Call it before the `with`, or first thing inside.

        Learning rates, schedulers and random generators are the loop's own: let the scheduler make
        its steps up to there, as in the example above (torch, which does not know of the earlier
        updates, may warn about their order), and draw the same batches.
        """
        if self._begun and self._recording:
            raise RunError("restore() was called after an update: call it before the training loop")
        if self._overwrite:
            return 0
        restored = Restored.into(self.model, self.path)
        if restored is None:
            return 0
        if not restored.resumable:
            warnings.warn(
                f"{self.path} does not keep the optimizer's state: it starts afresh", stacklevel=2
            )
        restored.load(self.optimizer, self._names)
        self._restored = restored
        if self._recording:
            self._attach()
        return restored.step

    def _attach(self) -> None:
        """Find out where the model stands in what the folder holds. Nothing is written before the
        first update, so that until then restore() is free to choose otherwise."""
        record = None
        if not self._overwrite and (self.path / "run.json").exists():
            record = continued(self.path, self.model)
            self._stood = parameters_sha256(self.model)
        if record is None:
            record = Record(
                subset=self._subset,
                subset_stage=self._subset_stage,
                origin=self._origin,
                notes=self._notes,
                resumable=self._resumable,
            )
        elif record.origin != self._origin:
            raise RunError(
                f"{self.path} was recorded by {record.origin or 'something else'}, not by "
                f"{self._origin or 'this'}: record elsewhere, or pass overwrite=True"
            )
        elif self._subset is not None and not np.array_equal(record.subset, self._subset):  # type: ignore[arg-type]
            raise RunError(f"{self.path} was recorded with another subset of the training data")
        record.notes |= self._notes
        record.resumable &= self._resumable
        self._recording = Recording(self.path, self.model, record)
        self._batch = None
        self._due = Due()
        self._size: int | None = None
        self._plan: Plan | None = None  # of a stage that is declared and not yet opened
        self._declare(self._recording, *self._first)

    def _declare(
        self, recording: Recording, name: str, size: int | None, plan: Plan | None
    ) -> None:
        """Say what stage the next update belongs to. A new one is opened by that update, so that a
        program run again may name the stages it passes on its way to where it stopped."""
        stages = [s.name for s in recording.record.stages]
        if name in stages[:-1] and self._begun:
            raise RunError(f"stage {name!r} is over: choose another name")
        plan = plan or self._plan
        if name in stages:
            self._follow(plan, recording.resume_stage(name, size, self.optimizer).start)
            plan = None
        elif size is None and not stages:
            size = self._size
        self._named, self._size, self._plan = name, size, plan

    def _follow(self, plan: Plan | None, start: int) -> None:
        if plan is not None:
            if self._begun and self.updates:
                self._due.check(self.updates)
            self._due = plan.starting(start)

    def _hook(self) -> None:
        self._hooks = [
            self.optimizer.register_step_pre_hook(self._before_update),
            self.optimizer.register_step_post_hook(self._after_update),
        ]

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before_update(self, *_: Any) -> None:
        recording = self._recording
        if recording is None or self._begun:
            return
        passed = [s.name for s in recording.record.stages[:-1]]
        if self._named in passed:
            raise RunError(
                f"the run is past stage {self._named!r}: it goes on in "
                f"{recording.record.stages[-1].name!r}, which recorder.stage(...) must name"
            )
        # the first forward pass may have changed buffers (batch normalisation), but no parameter
        if (
            not self._overwrite
            and (self.path / "run.json").exists()
            and parameters_sha256(self.model) != self._stood
        ):
            found = continued(self.path, self.model)
            if (found.steps if found else 0) != recording.updates:
                raise RunError(
                    "the model's weights were changed inside the `with`, to others of the run in "
                    f"{self.path}: load them before the `with`, or call recorder.restore()"
                )
        restored = self._restored
        if restored and not restored.taken and restored.stage == self._named:
            warnings.warn(
                f"the optimizer is not the {restored.kind} that was recorded in stage "
                f"{self._named!r}: it starts afresh",
                stacklevel=2,
            )
        recording.begin(self._named)
        self._begun, self._restored = True, None

    def _after_update(self, optimizer: Optimizer, *_: Any) -> None:
        recording = self._recording
        if recording is None or optimizers.skipped(optimizer):
            return
        stages = recording.record.stages
        if not stages or stages[-1].name != self._named:
            recording.open_stage(self._named, self._size, optimizer)
            self._follow(self._plan, recording.updates)
            self._plan = None
        recording.update(optimizer, self._names, self._batch)
        self._batch = None
        if recording.updates in self._due.steps:
            recording.keep(optimizer, self._names)
        elif self._every_step:
            recording.keep_weights()

    def _name_parameters(self) -> None:
        self._names = optimizers.names_of(self.model)
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        strangers = sum(id(p) not in self._names for p in held)
        if strangers == len(held):
            raise ValueError(
                "the optimizer trains no parameter of the model: pass the model it was made for"
            )
        if strangers:
            warnings.warn(
                f"{strangers} of the optimizer's {len(held)} parameters are not the model's, and "
                "are not recorded",
                stacklevel=3,
            )


def _size(size: int | None) -> int | None:
    if size is not None and index(size) < 1:
        raise ValueError(f"size={size}: a stage trains on at least one example")
    return index(size) if size is not None else None
