"""Stacks of long trainings, kept on the way: the same trainings, or runs, go on from there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from whence.persist.files import damaged, make_folder, read_json, write_json
from whence.persist.snapshots import Throttle
from whence.persist.tensors import load_tensors, save_tensors
from whence.retrain.grid import name_of
from whence.retrain.stacked import running_statistics
from whence.run import optimizers

if TYPE_CHECKING:
    from whence.retrain.stack import Stack

LONG = 60.0  # seconds; longer trainings are kept on the way
HIDDEN = ".unfinished-"  # folders begin so in which checkpoints wait for their runs


@dataclass(frozen=True)
class Kept:
    """A stack after an update, on the CPU: {name: (S, ...)}."""

    weights: dict[str, Tensor]
    state: dict[str, Tensor]  # of the optimizer; what all models share (update counts) has no axis

    @classmethod
    def of(cls, stack: Stack, optimizer: Optimizer) -> Kept:
        state = optimizers.flat_state(optimizer, _names(stack.parameters))
        assert state is not None  # of elementwise optimizers: tensors and numbers
        weights = {**stack.parameters, **stack.statistics}
        return cls(
            *({k: t.detach().to("cpu", copy=True) for k, t in d.items()} for d in (weights, state))
        )

    @torch.no_grad()
    def restore(self, stack: Stack, optimizer: Optimizer) -> None:
        """Put all models, and the optimizer's state, where they were."""
        for name, tensor in {**stack.parameters, **stack.statistics}.items():
            tensor.copy_(self.weights[name])
        optimizers.load_state(optimizer, _names(stack.parameters), self.state)

    @torch.no_grad()
    def load(self, place: int, model: nn.Module, optimizer: Optimizer) -> None:
        """Put one of the models, and its part of the optimizer's state, into plain ones."""
        parameters = dict(model.named_parameters())
        for name, tensor in (parameters | running_statistics(model)).items():
            tensor.copy_(self.weights[name][place])
        own = {key: t[place] if t.dim() else t for key, t in self.state.items()}
        optimizers.load_state(optimizer, _names(parameters), own)

    def some(self, places: Sequence[int]) -> Kept:
        """These of the models alone."""
        return Kept(
            *(
                {name: t[list(places)] if t.dim() else t for name, t in part.items()}
                for part in (self.weights, self.state)
            )
        )

    def save(self, file: Path, **about: int) -> None:
        """Into a file, whole or not at all."""
        parts = {"weights": self.weights, "state": self.state}
        tensors = {f"{w}/{n}": t for w, part in parts.items() for n, t in part.items()}
        make_folder(file.parent)
        save_tensors(file, tensors, about)

    @classmethod
    def open(cls, file: Path) -> Begun:
        """What was saved, with the stage and the step that were told."""
        remedy = "delete it, and rerun to repeat its trainings"
        tensors, about = load_tensors(file, remedy=remedy, checksum_required=False)
        parts: dict[str, dict[str, Tensor]] = {"weights": {}, "state": {}}
        try:
            for name, tensor in tensors.items():
                part, _, rest = name.partition("/")
                parts[part][rest] = tensor
            return Begun(int(about["stage"]), int(about["step"]), cls(**parts))
        except (KeyError, ValueError) as error:
            raise damaged(file, error, remedy) from error


@dataclass(frozen=True)
class Begun:
    """A stack after so many updates of a stage, which is counted from 0."""

    stage: int
    step: int
    kept: Kept


def _names(parameters: Mapping[str, nn.Parameter]) -> dict[int, list[str]]:
    return {id(parameter): [name] for name, parameter in parameters.items()}


class Unfinished:
    """The file in which a stack is kept on the way.

    Args:
        every: seconds between two times; more, if keeping it takes more than 3 % of them.
    """

    def __init__(self, file: Path, every: float) -> None:
        self.file, self._throttle = file, Throttle(every)

    def offer(self, stage: int, step: int, stack: Stack, optimizer: Optimizer) -> None:
        """Keep a stack after so many updates of a stage, if it is time to."""
        if self._throttle.due():
            with self._throttle.saving():
                Kept.of(stack, optimizer).save(self.file, stage=stage, step=step)

    def find(self) -> Begun | None:
        return Kept.open(self.file) if self.file.exists() else None

    def drop(self) -> None:
        self.file.unlink(missing_ok=True)


class UnfinishedRuns:
    """The checkpoints of a stack, in files beside its runs until they are written.

    Args:
        beside: the folder that the runs are in.
        trainings: the keys of the stack's trainings.
        of: recipe and steps; files of others are not looked at.
    """

    def __init__(self, beside: Path, trainings: Sequence[str], of: object) -> None:
        self.beside, self.trainings = beside, list(trainings)
        self.of = name_of([json.dumps(of, sort_keys=True)])
        self.folder = beside / f"{HIDDEN}{name_of([self.of, *trainings])}"
        self._saved: set[tuple[int, int]] = set()

    def save(self, stage: int, kept: Mapping[int, Kept]) -> None:
        """Those of a stage that are not there yet."""
        about = {"of": self.of, "trainings": self.trainings}
        for step, one in kept.items():
            if (stage, step) not in self._saved:
                file = self.folder / f"{stage:03}-{step:012}.safetensors"
                one.save(file, stage=stage, step=step)
                write_json(self.folder / "stack.json", about)
                self._saved.add((stage, step))

    def found(self) -> Iterator[Begun]:
        """What there is of these trainings, in order; it may be of a stack that has more."""
        for folder, trainings in self._alike():
            if set(self.trainings) <= set(trainings):
                places = [trainings.index(key) for key in self.trainings]
                for file in sorted(folder.glob("*.safetensors")):
                    begun = Kept.open(file)
                    if folder == self.folder:
                        self._saved.add((begun.stage, begun.step))
                    yield replace(begun, kept=begun.kept.some(places))
                return

    def drop(self) -> None:
        """All that is left of such trainings."""
        for folder, _ in self._alike():
            shutil.rmtree(folder, ignore_errors=True)

    def _alike(self) -> Iterator[tuple[Path, list[str]]]:
        for told in sorted(self.beside.glob(f"{HIDDEN}*/stack.json")):
            about = read_json(told, remedy="delete its folder, and rerun to train again")
            if about["of"] == self.of:
                yield told.parent, about["trainings"]
