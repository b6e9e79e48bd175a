"""Resuming a run that an earlier process recorded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from whence.run import optimizers
from whence.run.checkpoint import RunError, plain_names, weights_sha256
from whence.run.format import RunData
from whence.world import gathered, part_of


@dataclass(frozen=True)
class Provenance:
    """Facts about a run that its updates do not show. `RunData` describes each field."""

    subset: NDArray[np.int64] | None = None
    subset_stage: str | None = None
    origin: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    resumable: bool = True

    def start(self) -> RunData:
        """A new run without updates."""
        return RunData(
            subset=self.subset,
            subset_stage=self.subset_stage,
            origin=self.origin,
            notes=dict(self.notes),
            resumable=self.resumable,
        )

    def resume(self, data: RunData) -> RunData:
        """An earlier run, with these facts added. Raises RunError if they contradict the run's."""
        if data.origin != self.origin:
            raise RunError(
                f"{data.path} was recorded with origin {data.origin or None}, not "
                f"{self.origin or None}: record to another folder, or pass overwrite=True"
            )
        if self.subset is not None and not np.array_equal(data.subset, self.subset):  # type: ignore[arg-type]
            raise RunError(
                f"{data.path} was recorded with another subset of the training data: record to "
                "another folder, or pass overwrite=True"
            )
        data.notes |= self.notes
        data.resumable &= self.resumable
        return data


def resumed_run(folder: Path, model: nn.Module) -> RunData | None:
    """The run in a folder up to the update at which it had the model's weights.

    Returns None for weights from before the first update. Raises RunError for weights that the run
    never had, and for weights from before the end of a finished run.
    """
    data = RunData.read(folder)
    checkpoints = [c for c in [data.initial, *data.checkpoints] if c is not None]
    if not checkpoints:
        return None
    sha256 = weights_sha256(model)
    recorded = [*((c.step, c.sha256) for c in checkpoints), *data.marks.items()]
    at = max((step for step, recorded_sha in recorded if recorded_sha == sha256), default=None)
    if at is None and data.initial is not None and _has_parameters(model, data.initial.weights()):
        at = 0
    if at is None:
        raise RunError(
            f"{folder} holds a run, and the model's weights match none of its checkpoints: to "
            "resume, load the last one with recorder.restore() before the `with` (or load "
            "Run.open(path).checkpoints[-1].weights() yourself); to start over, pass overwrite=True"
        )
    if data.finished and at != checkpoints[-1].step:
        raise RunError(
            f"{folder} holds a finished run of {data.steps} updates, and the model has the weights "
            f"from after update {at}: record to another folder, pass overwrite=True to start over, "
            "or call recorder.restore() before the `with` to append to the run"
        )
    return data.until(at) if at else None


def _has_parameters(model: nn.Module, initial: Mapping[str, Tensor]) -> bool:
    """Whether the model's parameters are the initial ones. Buffers may differ: the initial weights
    are saved after the first forward pass, which changes batch normalisation's statistics."""
    plain = plain_names(model.state_dict())
    parameters = gathered("parameters", dict(model.named_parameters()))
    return all(
        plain[name] in initial and torch.equal(parameter.detach().cpu(), initial[plain[name]])
        for name, parameter in parameters.items()
    )


@dataclass
class RestoredCheckpoint:
    """The last checkpoint of a run, loaded into a model, and the state of its optimizer."""

    step: int
    stage: str
    optimizer_kind: str
    resumable: bool
    state: Mapping[str, Tensor]
    optimizer_loaded: bool = False

    @classmethod
    def load_into(cls, model: nn.Module, folder: Path) -> RestoredCheckpoint | None:
        """Load the last checkpoint's weights into the model. Returns None if there is none."""
        if not (folder / "run.json").exists():
            return None
        data = RunData.read(folder)
        if not data.checkpoints:
            return None
        last = data.checkpoints[-1]
        weights, state_dict = last.opened(), model.state_dict()
        plain = plain_names(state_dict)
        try:
            model.load_state_dict(
                {n: part_of(weights[p], state_dict[n]) for n, p in plain.items() if p in weights}
            )
        except RuntimeError as error:
            raise RunError(f"{last.path} is a checkpoint of another model: {error}") from error
        state = last.optimizer_state() or {}
        return cls(last.step, last.stage, data.optimizers[last.stage], data.resumable, state)

    def load_optimizer(self, optimizer: Optimizer, names: Mapping[int, list[str]]) -> None:
        """Load the state into an optimizer of the same kind with the same parameters.

        Another optimizer is left as it is: if every stage has its own, the state may belong to one
        that the loop has not created yet.
        """
        self.optimizer_loaded = optimizers.kind(optimizer) == self.optimizer_kind and (
            optimizers.has_parameters_of(optimizer, names, self.state)
        )
        if self.optimizer_loaded and self.state:
            optimizers.load_state(optimizer, names, self.state)
