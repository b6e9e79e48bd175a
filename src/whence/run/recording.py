"""A run while it is being made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer

from whence.run import optimizers
from whence.run.checkpoint import RunError, model_weights, weights_sha256
from whence.run.record import Record, write_checkpoint
from whence.run.segments import Stage


class Recording:
    """A record that grows by updates, stages and checkpoints, and its folder."""

    def __init__(self, folder: Path, model: nn.Module, record: Record) -> None:
        self.folder, self.model, self.record = folder, model, record
        # (learning rate, momentum) of every update and group; early rows may have fewer groups
        self.rates: list[list[tuple[float, float]]] = [
            list(zip(*row, strict=True))
            for row in zip(record.learning_rates.tolist(), record.momentums.tolist(), strict=True)
        ]
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
                f"update {self.updates + 1} was made without recorder.step(indices): call it "
                "before every optimizer.step(), or never"
            )
        if batch is not None:
            record.batches = record.batches if record.batches is not None else []
            record.batches.append(batch)
        rates = {
            self._column(optimizer, group, names): optimizers.rate(group)
            for group in optimizer.param_groups
        }
        self.rates.append([rates.get(column, (0.0, 0.0)) for column in range(len(record.groups))])

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
        state = optimizers.flat_state(optimizer, names) if record.resumable else None
        record.resumable = state is not None
        kept = write_checkpoint(
            self.folder,
            step,
            record.stages[-1].name,
            *model_weights(self.model),
            optimizers.second_moments(optimizer, names),
            state or None,
        )
        record.checkpoints.append(kept)
        record.between = [c for c in record.between if c.step != step]
        self.write()

    def mark(self) -> None:
        """Keep the rates up to here, and what the weights are, so that a training which goes on
        with weights that somebody else keeps is known again."""
        if not any(c.step == self.updates for c in self.record.checkpoints):
            self.record.marks[self.updates] = weights_sha256(self.model)
            self.write()

    def write(self) -> None:
        record, groups = self.record, len(self.record.groups)
        rates = np.zeros((self.updates, groups, 2))
        for filled, row in zip(rates, self.rates, strict=True):
            filled[: len(row)] = np.reshape(row, (-1, 2))
        record.learning_rates, record.momentums = rates[..., 0].copy(), rates[..., 1].copy()
        if record.stages:
            record.stages[-1] = replace(record.stages[-1], end=self.updates)
        record.write(self.folder)
