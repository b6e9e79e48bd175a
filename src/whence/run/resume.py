"""Going on with a run that was recorded before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from whence.run import optimizers
from whence.run.checkpoint import RunError, plain_names, weights_sha256
from whence.run.record import Record


def continued(folder: Path, model: nn.Module) -> Record | None:
    """The record in a folder up to where the model's weights stand in it; None for its very start.

    Weights that are none of the run's, or lie before the end of a finished run, are refused.
    """
    record = Record.read(folder)
    kept = [c for c in [record.initial, *record.checkpoints] if c is not None]
    if not kept:
        return None
    sha256 = weights_sha256(model)
    known = [*((c.step, c.sha256) for c in kept), *record.marks.items()]
    at = max((step for step, held in known if held == sha256), default=None)
    if at is None and record.initial is not None and _begins(model, record.initial.weights()):
        at = 0
    if at is None:
        raise RunError(
            f"{folder} holds a run, and the model's weights are none of its checkpoints: to go on, "
            "load the last with recorder.restore() before the `with` (or load "
            "Run.open(path).checkpoints[-1].weights() yourself); to start anew, pass overwrite=True"
        )
    if record.finished and at != kept[-1].step:
        raise RunError(
            f"{folder} holds a finished run of {record.steps} updates, and the model is where it "
            f"was after {at}: record elsewhere, pass overwrite=True to start anew, or call "
            "recorder.restore() before the `with` to add to its end"
        )
    return record.until(at) if at else None


def _begins(model: nn.Module, initial: Mapping[str, Tensor]) -> bool:
    """Whether the model's parameters are the initial ones. Its buffers may differ: those of the
    initial weights have seen the first forward pass (batch normalisation)."""
    own = dict(model.named_parameters())
    plain = plain_names(model.state_dict())
    return all(
        plain[name] in initial and torch.equal(p.detach().cpu(), initial[plain[name]])
        for name, p in own.items()
    )


@dataclass
class Restored:
    """The last checkpoint of a run, whose weights a model has taken, and its optimizer's state."""

    step: int
    stage: str
    kind: str
    resumable: bool
    state: Mapping[str, Tensor]
    taken: bool = False

    @classmethod
    def into(cls, model: nn.Module, folder: Path) -> Restored | None:
        """Load the last checkpoint's weights into the model; None where there is none."""
        if not (folder / "run.json").exists():
            return None
        record = Record.read(folder)
        if not record.checkpoints:
            return None
        last = record.checkpoints[-1]
        weights, plain = last.weights(), plain_names(model.state_dict())
        try:
            model.load_state_dict({n: weights[p] for n, p in plain.items() if p in weights})
        except RuntimeError as error:
            raise RunError(f"{last.path} is of another model: {error}") from error
        state = last.optimizer_state() or {}
        return cls(last.step, last.stage, record.optimizers[last.stage], record.resumable, state)

    def load(self, optimizer: Optimizer, names: Mapping[int, list[str]]) -> None:
        """Load the state into an optimizer, if it is of that kind and has those parameters: where
        stages have optimizers of their own, it may belong to one that is still to come."""
        self.taken = optimizers.kind(optimizer) == self.kind and optimizers.fits(
            optimizer, names, self.state
        )
        if self.taken and self.state:
            optimizers.load_state(optimizer, names, self.state)
