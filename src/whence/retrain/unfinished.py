"""Checkpoints of unfinished stacks, from which long trainings and runs resume."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from whence.persist.arrays import load_tensors, save_tensors
from whence.persist.files import FolderLock, Throttle, make_folder, parsing, read_json, write_json
from whence.retrain.grid import name_of
from whence.retrain.stacked import running_statistics
from whence.retrain.training import Update
from whence.run import optimizers

if TYPE_CHECKING:
    from whence.retrain.stack import Stack

CHECKPOINT_SECONDS = 60.0  # seconds; longer trainings are checkpointed
HIDDEN = ".unfinished-"  # prefix of the folders with the checkpoints of unfinished runs


@dataclass(frozen=True)
class StackCheckpoint:
    """Weights and optimizer state of a stack, on the CPU: {name: (S, ...)}.

    Values of the state that all models share (update counts) have no axis S.

    Attributes:
        stage, step: it was taken after `step` updates of a stage, numbered from 0.
    """

    stage: int
    step: int
    weights: dict[str, Tensor]
    state: dict[str, Tensor]

    @classmethod
    def of(cls, update: Update) -> StackCheckpoint:
        stack = cast("Stack", update.model)
        state = optimizers.flat_state(update.optimizer, _names(stack.parameters))
        assert state is not None  # elementwise optimizers have tensors and numbers only
        weights = {**stack.parameters, **stack.statistics}
        parts = (
            {k: t.detach().to("cpu", copy=True) for k, t in d.items()} for d in (weights, state)
        )
        return cls(update.stage.number, update.step, *parts)

    @torch.no_grad()
    def restore(self, stack: Stack, optimizer: Optimizer) -> None:
        """Load all models and the optimizer's state."""
        for name, tensor in {**stack.parameters, **stack.statistics}.items():
            tensor.copy_(self.weights[name])
        optimizers.load_state(optimizer, _names(stack.parameters), self.state)

    @torch.no_grad()
    def load(self, position: int, model: nn.Module, optimizer: Optimizer) -> None:
        """Load one model of the stack, and its part of the optimizer's state, into plain ones."""
        parameters = dict(model.named_parameters())
        for name, tensor in (parameters | running_statistics(model)).items():
            tensor.copy_(self.weights[name][position])
        state = {key: t[position] if t.dim() else t for key, t in self.state.items()}
        optimizers.load_state(optimizer, _names(parameters), state)

    def select(self, positions: Sequence[int]) -> StackCheckpoint:
        """The checkpoint of these models only."""
        weights, state = (
            {name: t[list(positions)] if t.dim() else t for name, t in part.items()}
            for part in (self.weights, self.state)
        )
        return replace(self, weights=weights, state=state)

    def save(self, file: Path) -> None:
        """Write a file atomically."""
        parts = {"weights": self.weights, "state": self.state}
        tensors = {f"{w}/{n}": t for w, part in parts.items() for n, t in part.items()}
        make_folder(file.parent)
        save_tensors(file, tensors, {"stage": self.stage, "step": self.step})

    @classmethod
    def open(cls, file: Path) -> StackCheckpoint:
        """Read what `save` wrote."""
        remedy = "delete it, and rerun to repeat its trainings"
        tensors, about = load_tensors(file, remedy=remedy, checksum_required=False)
        parts: dict[str, dict[str, Tensor]] = {"weights": {}, "state": {}}
        with parsing(file, remedy):
            for name, tensor in tensors.items():
                part, _, key = name.partition("/")
                parts[part][key] = tensor
            return cls(int(about["stage"]), int(about["step"]), **parts)


def _names(parameters: Mapping[str, nn.Parameter]) -> dict[int, list[str]]:
    return {id(parameter): [name] for name, parameter in parameters.items()}


class Unfinished:
    """The file that an unfinished stack is checkpointed to.

    Args:
        every: seconds between two checkpoints; more if writing one takes over 3 % of that time.
    """

    def __init__(self, file: Path, every: float) -> None:
        self.file, self._throttle = file, Throttle(every)

    def offer(self, update: Update) -> None:
        """Write a checkpoint after this update, if the last one is old enough."""
        if self._throttle.due():
            with self._throttle.saving():
                StackCheckpoint.of(update).save(self.file)

    def find(self) -> StackCheckpoint | None:
        return StackCheckpoint.open(self.file) if self.file.exists() else None

    def drop(self) -> None:
        self.file.unlink(missing_ok=True)


class UnfinishedRuns:
    """The checkpoints of a stack, in files next to its runs until the runs are written.

    Args:
        folder: the folder that holds the runs.
        trainings: the keys of the stack's trainings.
        identity: recipe and steps. Files of another identity are ignored.
    """

    def __init__(self, folder: Path, trainings: Sequence[str], identity: object) -> None:
        self.runs, self.trainings = folder, list(trainings)
        self.identity = name_of([json.dumps(identity, sort_keys=True)])
        self.folder = folder / f"{HIDDEN}{name_of([self.identity, *trainings])}"
        self._saved: set[tuple[int, int]] = set()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Refuse another process that would record these runs."""
        folder, _ = self._stack()
        try:
            with FolderLock(folder, "records runs"):
                yield
        finally:
            with suppress(OSError):  # it holds checkpoints, or is gone
                folder.rmdir()

    @property
    def trained(self) -> bool:
        """Whether there are checkpoints of these trainings."""
        return bool(self._stack()[1])

    def _stack(self) -> tuple[Path, list[str]]:
        """The folder of the stack that these trainings are in, and all its trainings."""
        for folder, trainings in self._same_identity():
            if set(self.trainings) <= set(trainings):
                return folder, trainings
        return self.folder, []

    def save(self, checkpoints: Iterable[StackCheckpoint]) -> None:
        """Write those checkpoints that are not on disk yet."""
        about = {"of": self.identity, "trainings": self.trainings}
        for c in checkpoints:
            if (c.stage, c.step) not in self._saved:
                c.save(self.folder / f"{c.stage:03}-{c.step:012}.safetensors")
                write_json(self.folder / "stack.json", about)
                self._saved.add((c.stage, c.step))

    def checkpoints(self) -> Iterator[StackCheckpoint]:
        """The checkpoints of these trainings in order, possibly from a stack that has more."""
        folder, trainings = self._stack()
        positions = [trainings.index(key) for key in self.trainings if trainings]
        for file in sorted(folder.glob("*.safetensors")) if trainings else ():
            checkpoint = StackCheckpoint.open(file)
            if folder == self.folder:
                self._saved.add((checkpoint.stage, checkpoint.step))
            yield checkpoint.select(positions)

    def drop(self) -> None:
        """Remove all files of this identity."""
        for folder, _ in self._same_identity():
            shutil.rmtree(folder, ignore_errors=True)

    def _same_identity(self) -> Iterator[tuple[Path, list[str]]]:
        for file in sorted(self.runs.glob(f"{HIDDEN}*/stack.json")):
            remedy = "delete its folder, and rerun to train again"
            try:
                about = read_json(file, remedy=remedy)
            except FileNotFoundError:  # another process has just written its last run
                continue
            with parsing(file, remedy):
                same, trainings = about["of"] == self.identity, list(about["trainings"])
            if same:
                yield file.parent, trainings
