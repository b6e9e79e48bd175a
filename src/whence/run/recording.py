"""A run while it is being made."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer

from whence.run import optimizers
from whence.run.checkpoint import RunError, model_weights, serialize
from whence.run.record import Record, write_checkpoint
from whence.run.segments import Stage


def continued(folder: Path, model: nn.Module) -> Record | None:
    """The record in a folder up to where the model's weights stand in it; None for its very start.

    Weights that are none of the run's, or lie before the end of a finished run, are refused.
    """
    record = Record.read(folder)
    kept = [c for c in [record.initial, *record.checkpoints] if c is not None]
    if not kept:
        return None
    sha256 = hashlib.sha256(serialize(model_weights(model)[0])).hexdigest()
    at = max((c.step for c in kept if c.sha256 == sha256), default=None)
    if at is None:
        raise RunError(
            f"{folder} holds a run, and the model's weights are none of its checkpoints: to go on, "
            "load the last with recorder.restore() before the `with` (or load "
            "Run.open(path).checkpoints[-1].weights() yourself); to start anew, pass overwrite=True"
        )
    if record.finished and at != kept[-1].step:
        raise RunError(
            f"{folder} holds a finished run of {record.steps} updates, and the model is where it was "
            f"after {at}: record elsewhere, pass overwrite=True to start anew, or call "
            "recorder.restore() before the `with` to add to its end"
        )
    return record.until(at) if at else None


class Recording:
    """A record that grows by updates, stages and checkpoints, and its folder."""

    def __init__(self, folder: Path, model: nn.Module, record: Record) -> None:
        self.folder, self.model, self.record = folder, model, record
        self.rates: list[list[float]] = record.learning_rates.tolist()
        self.momentums: list[list[float]] = record.momentums.tolist()
        self._optimizer: Optimizer | None = None  # the one the current columns belong to

    @property
    def updates(self) -> int:
        return len(self.rates)

    def begin(self, stage: str) -> None:
        """Bring the folder to where the model stands, before its first update."""
        if not self.updates:
            # An empty record first: what it no longer mentions may then be replaced.
            self.record.write(self.folder)
            weights = model_weights(self.model)
            self.record.initial = write_checkpoint(self.folder, 0, stage, *weights)
        self.write()
        self.record.sweep(self.folder)

    def resume_stage(self, name: str, size: int | None, optimizer: Optimizer) -> Stage:
        """Name a stage that was recorded before, as the current one's or on the way there."""
        (at,) = (i for i, s in enumerate(self.record.stages) if s.name == name)
        stage = self.record.stages[at]
        if size is not None:
            if stage.size not in (None, size):
                raise RunError(f"stage {name!r} was recorded with size={stage.size}, not {size}")
            stage = self.record.stages[at] = replace(stage, size=size)
        self._optimizer = optimizer
        return stage

    def open_stage(self, name: str, size: int | None, optimizer: Optimizer) -> None:
        record = self.record
        known = self._optimizer is optimizer and record.stages
        record.columns[name] = list(record.columns[record.stages[-1].name]) if known else []
        record.optimizers[name] = optimizers.kind(optimizer)
        record.stages.append(Stage(name, self.updates, self.updates, size))
        self._optimizer = optimizer

    def update(
        self,
        optimizer: Optimizer,
        names: Mapping[int, list[str]],
        batch: NDArray[np.int64] | None,
    ) -> None:
        """Count an update, with the rates that were applied."""
        record = self.record
        if batch is None and record.batches is not None:
            raise RunError(
                f"update {self.updates + 1} was made without recorder.step(indices): call it before "
                "every optimizer.step(), or never"
            )
        if batch is not None:
            record.batches = record.batches if record.batches is not None else []
            record.batches.append(batch)
        rates = {
            self._column(optimizer, group, names): optimizers.rate(group)
            for group in optimizer.param_groups
        }
        applied = [rates.get(column, (0.0, 0.0)) for column in range(len(record.groups))]
        self.rates.append([lr for lr, _ in applied])
        self.momentums.append([momentum for _, momentum in applied])

    def _column(
        self, optimizer: Optimizer, group: Mapping[str, Any], names: Mapping[int, list[str]]
    ) -> int:
        """The column of a parameter group: a new one where the parameters it trains changed."""
        trained = [
            name
            for parameter in group["params"]
            if parameter.requires_grad
            for name in names.get(id(parameter), ())
        ]
        record = self.record
        columns = record.columns[record.stages[-1].name]
        for column in columns:
            if record.groups[column] == trained:
                return column
        columns.append(len(record.groups))
        record.groups.append(trained)
        record.hyperparameters.append(optimizers.hyperparameters(optimizer, group))
        return columns[-1]

    def keep_weights(self) -> None:
        """Keep the weights of an update that is no checkpoint."""
        weights, stage = model_weights(self.model), self.record.stages[-1].name
        kept = write_checkpoint(self.folder, self.updates, stage, *weights)
        self.record.between.append(kept)

    def keep(self, optimizer: Optimizer, names: Mapping[int, list[str]]) -> None:
        """Make the model as it is now a checkpoint, unless it is one already."""
        record, step = self.record, self.updates
        if not step or (record.checkpoints and record.checkpoints[-1].step == step):
            return
        kept = write_checkpoint(
            self.folder,
            step,
            record.stages[-1].name,
            *model_weights(self.model),
            optimizers.second_moments(optimizer, names),
            optimizers.flat_state(optimizer, names) if record.resumable else None,
        )
        record.checkpoints.append(kept)
        record.between = [c for c in record.between if c.step != step]
        self.write()

    def write(self) -> None:
        record, groups = self.record, len(self.record.groups)
        rates, momentums = (
            [row + [0.0] * (groups - len(row)) for row in rows]
            for rows in (self.rates, self.momentums)
        )
        record.learning_rates = np.array(rates, np.float64).reshape(len(rates), groups)
        record.momentums = np.array(momentums, np.float64).reshape(len(rates), groups)
        if record.stages:
            record.stages[-1] = replace(record.stages[-1], end=self.updates)
        record.write(self.folder)
