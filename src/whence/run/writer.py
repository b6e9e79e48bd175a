"""Writes a run while training proceeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from whence.persist.arrays import serialize
from whence.persist.files import FolderLock
from whence.persist.identity import sha256_of
from whence.run import optimizers
from whence.run.checkpoint import Checkpoint, RunError, model_weights, weights_sha256
from whence.run.format import RunData, Stage, write_checkpoint
from whence.world import gathered


class RunWriter:
    """Appends updates, stages and checkpoints to a run and writes them to its folder."""

    def __init__(self, folder: Path, model: nn.Module, data: RunData) -> None:
        self.folder, self.model, self.data = folder, model, data
        # (learning rate, momentum) of every update and group; early rows may have fewer groups
        self.rates: list[list[tuple[float, float]]] = [
            list(zip(*row, strict=True))
            for row in zip(data.learning_rates.tolist(), data.momentums.tolist(), strict=True)
        ]
        self._optimizer: Optimizer | None = None  # the one the current columns belong to
        self._first: dict[str, str] | None = None  # digests of the first checkpoint's tensors
        self._lock: FolderLock | None = None

    @property
    def updates(self) -> int:
        return len(self.rates)

    def begin(self, stage: str) -> None:
        """Lock the folder and make it match the model, before its first update."""
        self._lock = FolderLock(self.folder, "records a run")
        if not self.updates:
            # Write an empty run first: files that it does not list may then be replaced.
            self.data.write(self.folder, shorter=True)
            weights = model_weights(self.model)
            self.data.initial = write_checkpoint(self.folder, 0, stage, *weights)
            self._first = None
        self.write(shorter=True)
        self.data.delete_unused(self.folder)

    def release(self) -> None:
        """Let others write to the folder."""
        if self._lock is not None:
            self._lock.release()

    def resume_stage(self, name: str, size: int | None, optimizer: Optimizer) -> Stage:
        """Return to a stage that the run already has."""
        (at,) = (i for i, s in enumerate(self.data.stages) if s.name == name)
        stage = self.data.stages[at]
        if size is not None:
            if stage.size not in (None, size):
                raise RunError(f"stage {name!r} was recorded with size={stage.size}, not {size}")
            stage = self.data.stages[at] = replace(stage, size=size)
        self._optimizer = optimizer
        return stage

    def open_stage(self, name: str, size: int | None, optimizer: Optimizer) -> None:
        data = self.data
        same = self._optimizer is optimizer and data.stages
        data.columns[name] = list(data.columns[data.stages[-1].name]) if same else []
        data.optimizers[name] = optimizers.kind(optimizer)
        data.stages.append(Stage(name, self.updates, self.updates, size))
        self._optimizer = optimizer

    def update(
        self,
        optimizer: Optimizer,
        names: Mapping[int, list[str]],
        batch: NDArray[np.int64] | None,
    ) -> None:
        """Count an update and note the learning rates it applied."""
        data = self.data
        if batch is None and data.batches is not None:
            raise RunError(
                f"update {self.updates + 1} was made without recorder.step(indices): call it "
                "before every optimizer.step(), or never"
            )
        if batch is not None:
            data.batches = data.batches if data.batches is not None else []
            data.batches.append(batch)
        rates = {
            self._column(optimizer, group, names): optimizers.rate(group)
            for group in optimizer.param_groups
        }
        self.rates.append([rates.get(column, (0.0, 0.0)) for column in range(len(data.groups))])

    def _column(
        self, optimizer: Optimizer, group: Mapping[str, Any], names: Mapping[int, list[str]]
    ) -> int:
        """The column of a parameter group; a new one if the parameters it trains have changed."""
        trained = [
            name
            for parameter in group["params"]
            if parameter.requires_grad
            for name in names.get(id(parameter), ())
        ]
        data = self.data
        columns = data.columns[data.stages[-1].name]
        for column in columns:
            if data.groups[column] == trained:
                return column
        columns.append(len(data.groups))
        data.groups.append(trained)
        data.hyperparameters.append(optimizers.hyperparameters(optimizer, group))
        return columns[-1]

    def _unchanged(self, weights: Mapping[str, Tensor]) -> list[str]:
        """The tensors that no optimizer trains and that are as in the first checkpoint, if they are
        most of the model: these are stored once."""
        data = self.data
        trained = {name for names in data.groups for name in names}
        frozen = {name: x for name, x in weights.items() if name not in trained}
        size = sum(x.nbytes for x in frozen.values())
        if data.initial is None or 2 * size < sum(x.nbytes for x in weights.values()):
            return []
        if self._first is None:
            self._first = {k: _digest(x) for k, x in data.initial.weights().items()}
        return [name for name, x in frozen.items() if self._first.get(name) == _digest(x)]

    def _write_checkpoint(self, *more: Mapping[str, Tensor] | None) -> Checkpoint:
        weights, aliases = model_weights(self.model)
        stage, initial = self.data.stages[-1].name, self.data.initial
        base, unchanged = None if initial is None else initial.files, self._unchanged(weights)
        place = self.folder, self.updates, stage
        return write_checkpoint(*place, weights, aliases, *more, base=base, unchanged=unchanged)

    def save_weights(self) -> None:
        """Save the weights after an update that has no checkpoint."""
        self.data.between.append(self._write_checkpoint())

    def save_checkpoint(self, optimizer: Optimizer, names: Mapping[int, list[str]]) -> None:
        """Save the current model as a checkpoint, unless it already is one."""
        data, step = self.data, self.updates
        if not step or (data.checkpoints and data.checkpoints[-1].step == step):
            return
        state = optimizers.flat_state(optimizer, names) if data.resumable else None
        data.resumable = state is not None
        moments = optimizers.second_moments(optimizer, names)
        state, moments = gathered("state", state or {}), gathered("moments", moments or {})
        data.checkpoints.append(self._write_checkpoint(moments or None, state or None))
        data.between = [c for c in data.between if c.step != step]
        self.write()

    def mark(self) -> None:
        """Write the rates so far and a checksum of the weights. The run can then be resumed from
        a checkpoint that a trainer saves at this update."""
        if not any(c.step == self.updates for c in self.data.checkpoints):
            self.data.marks[self.updates] = weights_sha256(self.model)
            self.write()

    def write(self, *, shorter: bool = False) -> None:
        data, groups = self.data, len(self.data.groups)
        rows = [row + [(0.0, 0.0)] * (groups - len(row)) for row in self.rates]
        rates = np.array(rows, dtype=np.float64).reshape(self.updates, groups, 2)
        data.learning_rates, data.momentums = rates[..., 0].copy(), rates[..., 1].copy()
        if data.stages:
            data.stages[-1] = replace(data.stages[-1], end=self.updates)
        data.write(self.folder, shorter=shorter)


def _digest(tensor: Tensor) -> str:
    return sha256_of(serialize({"": tensor}))
