"""Recorder: the few lines that turn a training loop into a Run."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from whence.errors import InvalidInput, warn, whole
from whence.persist.files import as_path
from whence.run import optimizers
from whence.run.checkpoint import RunError, parameters_sha256, plain_state
from whence.run.format import RunData, checked_indices, checked_subset
from whence.run.gather import assist, divided, leading
from whence.run.resume import Provenance, RestoredCheckpoint, resumed_run
from whence.run.schedule import CheckpointSchedule, DueCheckpoints
from whence.run.watch import GradientWatch, WeightWatch, accumulated, first_gradient
from whence.run.writer import RunWriter

# --- states -------------------------------------------------------------------------------------
#
#     Fresh ──with──▶ Attached ──first update──▶ Recording ──end of the with──▶ Finished
#
# restore() keeps Fresh and Attached, and makes a Finished recorder Fresh. An Attached recorder
# becomes Finished when the `with` ends before an update. A Finished one may enter another `with`.
# On ranks other than 0 the `with` is Observing: nothing is written. They assist rank 0 if the model
# is divided among them.


@dataclass
class Fresh:
    """Outside a `with`. `restored` is the checkpoint that restore() has loaded."""

    when: ClassVar[str] = "before the recorder's `with`"
    restored: RestoredCheckpoint | None = None


@dataclass
class Observing:
    """Inside the `with`, in a process that does not write the run."""

    when: ClassVar[str] = "inside the recorder's `with`"
    restored: RestoredCheckpoint | None = None
    hooks: list[RemovableHandle] = field(default_factory=list)
    updated: bool = False  # whether the first update has begun

    def remove_hooks(self) -> None:
        for hook in self.hooks:
            hook.remove()

    detach = remove_hooks


@dataclass(frozen=True)
class DeclaredStage:
    """The stage that the next update belongs to. That update opens it if the run does not have it,
    and only then does its schedule apply."""

    name: str
    size: int | None
    schedule: CheckpointSchedule | None


@dataclass(kw_only=True)
class Writing:
    """Inside the `with`, in the process that writes: what Attached and Recording share."""

    writer: RunWriter
    stage: DeclaredStage
    due: DueCheckpoints = field(default_factory=DueCheckpoints)
    batch: NDArray[np.int64] | None = None  # the examples of the next update
    noted: tuple[Tensor | None, int] = (None, 0)  # `first_gradient` when they were named
    hooks: list[RemovableHandle] = field(default_factory=list)
    watch: WeightWatch | None = None  # from the first update of a stage on
    gradients: GradientWatch | None = None  # up to the first updates

    def declare(self, stage: DeclaredStage, optimizer: Optimizer) -> None:
        """Set the stage of the next update. A resumed loop may name stages that are over, on its
        way to the one where it stopped."""
        recorded = [s.name for s in self.writer.data.stages]
        schedule, size = stage.schedule or self.stage.schedule, stage.size
        if stage.name in recorded:
            resumed = self.writer.resume_stage(stage.name, size, optimizer)
            self.follow(schedule, resumed.start)
            schedule = None
        elif size is None and not recorded:
            size = self.stage.size
        self.stage = DeclaredStage(stage.name, size, schedule)

    def follow(self, schedule: CheckpointSchedule | None, start: int) -> None:
        """Schedule the checkpoints of a stage that starts after `start` updates."""
        if schedule is not None:
            self.due = schedule.starting_at(start)

    def remove_hooks(self) -> None:
        for hook in self.hooks:
            hook.remove()

    def detach(self) -> None:
        """Remove everything from the optimizer and the model."""
        self.remove_hooks()
        if self.gradients is not None:
            self.gradients.remove()


@dataclass(kw_only=True)
class Attached(Writing):
    """Before the first update. The folder has been read and nothing written, so restore() may
    still choose another checkpoint."""

    when: ClassVar[str] = "inside the recorder's `with`"
    restored: RestoredCheckpoint | None
    weights_at_attach: str | None  # SHA-256 of the parameters, if the folder holds a run


@dataclass(kw_only=True)
class Recording(Writing):
    """From the first update on."""

    when: ClassVar[str] = "after the first update"

    def declare(self, stage: DeclaredStage, optimizer: Optimizer) -> None:
        if stage.name in [s.name for s in self.writer.data.stages[:-1]]:
            raise RunError(f"stage {stage.name!r} is over: choose another name")
        super().declare(stage, optimizer)

    def follow(self, schedule: CheckpointSchedule | None, start: int) -> None:
        if schedule is not None and self.writer.updates:
            self.due.warn_if_missed(self.writer.updates)
        super().follow(schedule, start)

    def update(
        self, optimizer: Optimizer, names: Mapping[int, list[str]], every_step: bool
    ) -> None:
        """Record an update that the optimizer has just made."""
        writer, stages = self.writer, self.writer.data.stages
        if not stages or stages[-1].name != self.stage.name:
            writer.open_stage(self.stage.name, self.stage.size, optimizer)
            self.follow(self.stage.schedule, writer.updates)
            self.stage = replace(self.stage, schedule=None)
        writer.update(optimizer, names, self.batch)
        self.batch = None
        due = writer.updates in self.due.steps
        if self.watch is not None:
            self.watch.after_update(writer.updates, due, optimizer)
        if due:
            writer.save_checkpoint(optimizer, names)
        elif every_step:
            writer.save_weights()

    def begin_update(self) -> None:
        """Compare the weights with those after the previous update, and gradients with those of
        the backward pass."""
        if self.gradients is not None:
            self.gradients.before_update(self.writer.updates, self.writer.data)
        if self.watch is None:
            self.watch = WeightWatch(self.writer.model, self.writer.data, self.stage.name)
        else:
            self.watch.before_update(self.writer.updates)

    def finish(self) -> None:
        """End the stage, before its last checkpoint is written."""
        if self.watch is not None:
            self.watch.finish(self.writer.updates)
            self.watch = None


@dataclass
class Finished:
    """After the `with`."""

    when: ClassVar[str] = "after the recorder's `with`"


State = Fresh | Observing | Attached | Recording | Finished
#: the states in which a call is legal, and what to do instead in the others
LEGAL: dict[str, tuple[tuple[type[State], ...], str]] = {
    "`with recorder`": ((Fresh, Finished), "use another Recorder"),
    "recorder.stage(...)": ((Observing, Attached, Recording), "call it inside"),
    "recorder.restore()": ((Fresh, Observing, Attached, Finished), "call it before"),
}


class Recorder:
    """Records a training into a folder. The loop inside the `with` does not change:

        with whence.Recorder("runs/mnist", model, optimizer, checkpoints=6, total_steps=600):
            train(model, optimizer, loader)

    The recorder counts updates with the optimizer's hooks, so gradient accumulation, schedulers and
    updates skipped by an AMP scaler need no extra code. It always saves the weights before the
    first update and the final model. In distributed training rank 0 writes: whole weights, also of
    a model that FSDP2 (`fully_shard`) divides.

    If you rerun an interrupted program, it records the training from the start. To resume from the
    last checkpoint instead, with bit-identical results:

        recorder = whence.Recorder("runs/mnist", model, optimizer, checkpoints=6, total_steps=600)
        start = recorder.restore()           # 0 when there is nothing yet
        with recorder:
            for step, batch in enumerate(batches):
                if step >= start:
                    update(model, optimizer, batch)
                scheduler.step()

    The same lines with another `stage`, after the end of a run, add a stage to it.

    Args:
        path: the run's folder.
        model: the model that is trained. Prefixes of parameter names that DDP (`module.`) and
            torch.compile (`_orig_mod.`) add are removed.
        optimizer: the optimizer that trains it. Parameters that it does not have, or that do not
            require a gradient, are frozen. The recorder warns if weights change in another way.
        checkpoints: the number of checkpoints, evenly spaced over `total_steps`; or their update
            counts from the start of the run.
        total_steps: number of updates planned, counted from the start of `stage`.
        stage: name of the (first) stage.
        size: number of training examples of that stage.
        every_step: also save the weights after every update: T + 1 copies of the model on disk, 4
            bytes × parameters × (T + 1) in float32. (Hydra and Unrolled need only `step(indices)`:
            they replay the updates.)
        subset: the indices of the training examples used, if not all.
        overwrite: start over, even if the folder holds a run.
        resumable: save the optimizer's state for `restore` (for Adam, twice the size of the
            weights).
        notes: aspects of the training that SOURCE does not model and a reader should know:
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
        overwrite: bool = False,
        resumable: bool = True,
        notes: Mapping[str, Any] | None = None,
    ) -> None:
        self.path, self.model, self.optimizer = as_path(path), model, optimizers.unwrap(optimizer)
        self._schedule = CheckpointSchedule.of(checkpoints, total_steps)
        self._first_stage = DeclaredStage(stage, _checked_size(size), self._schedule)
        self._every_step, self._overwrite = every_step, overwrite
        self._provenance = Provenance(
            subset=checked_subset(subset) if subset is not None else None,
            notes=_as_json(notes or {}),
            resumable=resumable,
        )
        self._usual: frozenset[str] = frozenset()  # notes that need no warning
        self._state: State = Fresh()
        self._messages: list[str] = []  # warnings from before there is a run
        self._parameter_names = self._name_parameters()

    @classmethod
    def _of_recipe(
        cls, *arguments: Any, origin: Mapping[str, Any], subset_stage: str | None, **options: Any
    ) -> Self:
        """A recorder of a recipe's run.

        Args:
            arguments, options: of the Recorder.
            origin: what identifies the recipe, as plain JSON values. Only a run of the same origin
                is resumed.
            subset_stage: the stage that `subset` refers to (default: the first).
        """
        recorder = cls(*arguments, **options)
        recorder._provenance = replace(
            recorder._provenance, origin=_as_json(origin), subset_stage=subset_stage
        )
        return recorder

    @property
    def updates(self) -> int:
        """The number of updates recorded in the run; 0 outside the `with`."""
        return self._state.writer.updates if isinstance(self._state, Writing) else 0

    def __enter__(self) -> Self:
        self._check_legal("`with recorder`")
        chosen = {k: v for k, v in self._provenance.notes.items() if k not in self._usual}
        if chosen and writes_run():
            notes = ", ".join(f"{key}={value!r}" for key, value in chosen.items())
            warn(f"kept with the run, but not modelled by SOURCE: {notes}")
        self._attach(self._state.restored if isinstance(self._state, Fresh) else None)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        state = self._finish()
        if isinstance(state, Observing) and kind is None:
            self._assist()
        if isinstance(state, Writing):
            try:
                with leading(self._sharded and kind is None):
                    self._end(state, kind)
            finally:
                state.writer.release()

    def _end(self, state: Attached | Recording, kind: type[BaseException] | None) -> None:
        """Write the end of the run."""
        writer = state.writer
        if kind is not None:
            if isinstance(state, Recording):
                try:
                    writer.write()
                except Exception as failure:  # the error that ended training matters more
                    warn(f"could not write {self.path}: {failure}")
            return
        if not writer.updates:
            warn("no update was made: nothing was recorded")
            return
        if isinstance(state, Attached):
            if RunData.read(self.path).finished:
                return
            writer.begin(self._first_stage.name)
        else:
            state.finish()
        writer.save_checkpoint(self.optimizer, self._parameter_names)
        state.due.warn_if_missed(writer.updates)
        writer.data.finished = True
        writer.write()

    def stage(
        self,
        name: str,
        *,
        size: int | None = None,
        total_steps: int | None = None,
        checkpoints: int | Sequence[int] | None = None,
        optimizer: Optimizer | None = None,
    ) -> None:
        """Open a stage. Before the first update, name the first stage.

        Args:
            name: the new stage. The previous stage ends here, with a checkpoint: call this before
                you change the model.
            size: number of its training examples.
            total_steps, checkpoints: the schedule of its checkpoints, as for the Recorder.
                `total_steps` counts from here. By default the recorder's schedule continues.
            optimizer: the optimizer of this stage, if it is another one.
        """
        schedule = None
        if checkpoints is not None or total_steps is not None:
            chosen = checkpoints if checkpoints is not None else self._schedule.checkpoints
            schedule = CheckpointSchedule.of(chosen, total_steps)
        self._check_legal("recorder.stage(...)")
        state = self._state
        if isinstance(state, Recording):
            with leading(self._sharded):
                state.finish()
                state.writer.save_checkpoint(self.optimizer, self._parameter_names)
        elif isinstance(state, Observing) and state.updated:
            self._assist()
        if optimizer is not None:
            self.optimizer = optimizers.unwrap(optimizer)
        self._parameter_names = self._name_parameters()
        if isinstance(state, (Writing, Observing)):
            state.remove_hooks()
            state.hooks = self._register_hooks()
        if isinstance(state, Writing):
            state.declare(DeclaredStage(name, _checked_size(size), schedule), self.optimizer)
        restored = state.restored if isinstance(state, (Attached, Observing)) else None
        if optimizer is not None and restored and restored.stage == name:
            restored.load_optimizer(self.optimizer, self._parameter_names)

    def step(self, indices: ArrayLike) -> None:
        """Note the training examples of the next update. Call it before every optimizer.step();
        with gradient accumulation call it once, with the examples of all batches."""
        if isinstance(self._state, Writing):
            if self._state.writer.data.batches is None and self.updates:
                raise RunError(
                    f"recorder.step(indices) was first called after update {self.updates}: call it "
                    "before every optimizer.step(), starting with the first"
                )
            flat = np.asarray(indices).reshape(-1)
            if self._state.batch is not None and accumulated(self.model, self._state.noted):
                self.warn(
                    "recorder.step(indices) was called more than once before an update, and "
                    "gradients were added up: only the examples of the last call are recorded. "
                    "With gradient accumulation call it once, with the examples of all batches"
                )
            self._state.batch = checked_indices("recorder.step(indices)", flat)
            self._state.noted = first_gradient(self.model)

    def warn(self, message: str) -> None:
        """Warn, and store the message with the run."""
        if isinstance(self._state, Writing):
            self._state.writer.data.warn(message)
        else:
            self._messages.append(message)
            warn(message, stacklevel=3)

    def mark(self) -> None:
        """Announce that a trainer is about to save its own checkpoint. If training resumes from
        that checkpoint, the run resumes there too."""
        if isinstance(self._state, Recording) and self.updates:
            with leading(self._sharded):
                self._state.writer.mark()
        elif isinstance(self._state, Observing) and self._state.updated:
            self._assist()

    def restore(self) -> int:
        """Load the last checkpoint into model and optimizer, and return its step. Returns 0 if
        there is none, or with `overwrite=True`. Call it before the `with`, or first thing inside.

        Learning rates, schedulers and random generators are up to the loop: step the scheduler up
        to there, as in the example above, and draw the same batches. (torch may warn about the
        order of the scheduler's steps, because it does not see the earlier updates.)
        """
        self._check_legal("recorder.restore()")
        if self._overwrite:
            return 0
        restored = RestoredCheckpoint.load_into(self.model, self.path)
        if restored is None:
            return 0
        if not restored.resumable:
            self.warn(
                f"{self.path} does not hold the optimizer's state: the optimizer starts from "
                "scratch"
            )
        restored.load_optimizer(self.optimizer, self._parameter_names)
        self._hold(restored)
        return restored.step

    # --- transitions: the only methods that change the state ------------------------------------

    def _hold(self, restored: RestoredCheckpoint) -> None:
        """Keep a restored checkpoint for the first update."""
        if isinstance(self._state, (Attached, Observing)):
            self._attach(restored)
        else:
            self._state = Fresh(restored)

    def _attach(self, restored: RestoredCheckpoint | None) -> None:
        """Enter the `with`, or attach again after restore(): find the model's weights in the run
        that the folder holds."""
        if isinstance(self._state, (Attached, Observing)):
            self._state.detach()
        if not writes_run():
            self._state = Observing(restored, self._register_hooks())
            self._assist()
            return
        earlier, weights_at_attach = None, None
        with leading(self._sharded):
            if self._may_resume:
                earlier = resumed_run(self.path, self.model)
                weights_at_attach = parameters_sha256(self.model)
        provenance = self._provenance
        data = provenance.resume(earlier) if earlier is not None else provenance.start()
        data.warnings += [m for m in self._messages if m not in data.warnings]
        attached = Attached(
            writer=RunWriter(self.path, self.model, data),
            stage=self._first_stage,
            restored=restored,
            weights_at_attach=weights_at_attach,
        )
        attached.declare(self._first_stage, self.optimizer)
        attached.hooks = self._register_hooks()
        if not (provenance.notes or self._sharded or _distributed()):
            attached.gradients = GradientWatch(self.model)
        self._state = attached

    def _start_recording(self, attached: Attached) -> None:
        """Write the start of the run, before its first update."""
        attached.writer.begin(attached.stage.name)
        self._state = Recording(
            writer=attached.writer,
            stage=attached.stage,
            due=attached.due,
            batch=attached.batch,
            hooks=attached.hooks,
            gradients=attached.gradients,
        )

    def _finish(self) -> State:
        """Leave the `with`, and return the state in which it ended."""
        ended, self._state = self._state, Finished()
        if isinstance(ended, (Writing, Observing)):
            ended.detach()
        return ended

    def _check_legal(self, call: str) -> None:
        states, advice = LEGAL[call]
        if not isinstance(self._state, states):
            raise RunError(f"{call} is not possible {self._state.when}: {advice}")

    # --- hooks ----------------------------------------------------------------------------------

    def _register_hooks(self) -> list[RemovableHandle]:
        return [
            self.optimizer.register_step_pre_hook(self._before_update),
            self.optimizer.register_step_post_hook(self._after_update),
        ]

    def _before_update(self, *_: Any) -> None:
        if _inside_another_step(self.optimizer):
            return
        if isinstance(self._state, Observing) and not self._state.updated:
            self._state.updated = True
            self._assist()
        if isinstance(self._state, Attached):
            with leading(self._sharded):
                self._check_first_update(self._state)
                self._start_recording(self._state)
        if isinstance(self._state, Recording):
            parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
            if list(map(id, parameters)) != self._optimized:  # a head was replaced
                self._parameter_names = self._name_parameters()
            self._state.begin_update()

    def _after_update(self, optimizer: Optimizer, *_: Any) -> None:
        if _inside_another_step(self.optimizer) or optimizers.skipped(optimizer):
            return
        if isinstance(self._state, Observing):
            self._assist()
        if isinstance(self._state, Recording):
            with leading(self._sharded):
                self._state.update(optimizer, self._parameter_names, self._every_step)

    # --- a model that is divided among ranks ----------------------------------------------------

    def _assist(self) -> None:
        """Help rank 0 to gather what it writes."""
        if self._sharded:
            of_optimizer = self.optimizer, self._parameter_names
            assist(
                {
                    "weights": lambda: plain_state(self.model),
                    "parameters": lambda: dict(self.model.named_parameters()),
                    "moments": lambda: optimizers.second_moments(*of_optimizer),
                    "state": lambda: optimizers.flat_state(*of_optimizer),
                }
            )

    def _check_first_update(self, state: Attached) -> None:
        stages, name = [s.name for s in state.writer.data.stages], state.stage.name
        if name in stages[:-1]:
            raise RunError(
                f"the run is past stage {name!r} and resumes in {stages[-1]!r}: call "
                f"recorder.stage({stages[-1]!r}) before the next update"
            )
        # Compare parameters only: the first forward pass may change buffers (batch normalisation).
        if self._may_resume and parameters_sha256(self.model) != state.weights_at_attach:
            earlier = resumed_run(self.path, self.model)
            if (earlier.steps if earlier else 0) != state.writer.updates:
                raise RunError(
                    "the model's weights were changed inside the `with`, to those of another "
                    f"update of the run in {self.path}: load them before the `with`, or call "
                    "recorder.restore()"
                )
        restored = state.restored
        if restored and not restored.optimizer_loaded and restored.stage == name:
            self.warn(
                f"the optimizer is not the {restored.optimizer_kind} that was recorded in stage "
                f"{name!r}: it starts from scratch"
            )

    @property
    def _may_resume(self) -> bool:
        return not self._overwrite and (self.path / "run.json").exists()

    def _name_parameters(self) -> dict[int, list[str]]:
        """{id of a parameter: its names in the model}."""
        self._sharded = divided(self.model)
        names = optimizers.names_of(self.model)
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self._optimized = list(map(id, parameters))
        unknown = sum(id(p) not in names for p in parameters)
        if unknown == len(parameters):
            raise InvalidInput(
                "the optimizer trains no parameter of the model: pass the model whose parameters "
                "it was given"
            )
        if unknown:
            self.warn(
                f"{unknown} of the optimizer's {len(parameters)} parameters do not belong to the "
                "model and are not recorded"
            )
        return names


def _inside_another_step(optimizer: Optimizer) -> bool:
    """Whether the step of a hook was called by another one of the optimizer, of a subclass that
    calls super().step(). torch runs the hooks of both, for one update."""
    step = sys._getframe(2)  # torch's wrapper of step(), which called the hook
    caller = step.f_back
    while caller is not None:
        if caller.f_code is step.f_code and caller.f_locals.get("self") is optimizer:
            return True
        caller = caller.f_back
    return False


def writes_run() -> bool:
    """Whether this process writes runs: in distributed training only rank 0 does."""
    return not _distributed() or torch.distributed.get_rank() == 0


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _checked_size(size: int | None) -> int | None:
    if size is not None and whole("size", size) < 1:
        raise InvalidInput(f"size={size}: a stage needs at least one example")
    return whole("size", size) if size is not None else None


def _as_json(values: Mapping[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(dict(values)))
    return plain
