"""A Recorder for trainers, whose callbacks hear of a beginning and an end and know no `with`."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from whence.run.checkpoint import RunError, weights_sha256
from whence.run.format import RunData
from whence.run.recorder import Recorder
from whence.run.resume import resumed_run

OPTIONS = set(inspect.signature(Recorder).parameters) - {
    "path",
    "model",
    "optimizer",
    "checkpoints",
}


class TrainerRecorder:
    """What the callbacks of all trainers have in common.

    Args:
        path: the run's folder.
        checkpoints: as for the Recorder.
        options: of the Recorder; they go before what the trainer says.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        checkpoints: int | Sequence[int],
        options: Mapping[str, Any],
    ) -> None:
        unknown = sorted(set(options) - OPTIONS)
        if unknown:
            raise TypeError(
                f"RecorderCallback got {', '.join(unknown)}: its options are the Recorder's, "
                f"{', '.join(sorted(OPTIONS))}"
            )
        self.path, self.checkpoints, self.options = Path(path), checkpoints, dict(options)
        self._recorder: Recorder | None = None

    def begin(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        total_steps: int | None,
        done: int,
        size: int | None,
        notes: Mapping[str, Any],
        retried: bool = False,
    ) -> None:
        """Start recording, or go on.

        Args:
            model, optimizer: as they are now, restored when the trainer resumes.
            total_steps: planned updates of this training, those before a resumption included.
            done: how many of them are before this moment.
            size: number of training examples.
            notes: what the trainer does and SOURCE does not model.
            retried: whether the trainer starts over by itself, from where its failed attempt left
                the weights.
        """
        failed, self._recorder = self._recorder, None
        if failed is not None:  # an error ended that training, and the trainer tells nobody of it
            failed.__exit__(RuntimeError, None, None)
        _refuse_shards(model)
        options: dict[str, Any] = {"total_steps": total_steps, "size": size, **self.options}
        options["notes"] = dict(notes) | dict(self.options.get("notes") or {})
        options["overwrite"] = self._anew(model, done) or (retried and failed is not None)
        recorder = Recorder(self.path, model, optimizer, checkpoints=self.checkpoints, **options)
        recorder.__enter__()
        self._recorder = recorder
        total_steps = options["total_steps"]
        if done and not recorder.updates and not recorder._silent:
            warnings.warn(
                f"the first {done} updates of this training were not recorded in {self.path}: the "
                "run starts after them",
                stacklevel=2,
            )
            if total_steps is not None and total_steps > done:
                recorder.stage(
                    options.get("stage", "train"),
                    size=options["size"],
                    total_steps=total_steps - done,
                )

    def mark(self) -> None:
        """The trainer is about to save a checkpoint of its own, from which it may resume."""
        if self._recorder is not None:
            self._recorder.mark()

    def end(self, error: BaseException | None = None) -> None:
        """Finish the run; with an error, leave it as unfinished."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.__exit__(type(error) if error is not None else None, error, None)

    def _anew(self, model: nn.Module, done: int) -> bool:
        """Whether to replace what the folder holds."""
        wanted = bool(self.options.get("overwrite"))
        if not (self.path / "run.json").exists():
            return wanted
        if done:  # overwrite=True is for a training that starts, and not for its resumption
            return wanted and not self._knows(model)
        record = RunData.read(self.path)
        stage = self.options.get("stage", "train")
        if record.finished and not wanted and any(s.name == stage for s in record.stages):
            raise RunError(
                f"{self.path} holds a finished run of {record.steps} updates: record elsewhere, "
                "pass overwrite=True to replace it, or give this training a stage= of its own to "
                "add it to the run's end"
            )
        # A warm-up starts with a rate of 0: the weights after the first update are the initial
        # ones, and only the trainer knows that it stands before it.
        start = record.initial.sha256 if record.initial and not record.finished else None
        return wanted or start == weights_sha256(model)

    def _knows(self, model: nn.Module) -> bool:
        try:
            return resumed_run(self.path, model) is not None
        except RunError:
            return False


def dataset_size(loader: Any) -> int | None:
    """The number of examples behind a data loader; None where that is unknown."""
    try:
        return len(loader.dataset) or None
    except (AttributeError, TypeError, NotImplementedError):
        return None


def _refuse_shards(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        sharded = type(parameter).__name__ == "DTensor" or hasattr(parameter, "ds_id")
        if sharded or "_fsdp_wrapped_module" in name or "_flat_param" in name:
            raise ValueError(
                f"{name} is sharded over processes (FSDP, ZeRO-3 or tensor parallelism), and a run "
                "keeps whole weights: train with DDP, or gather checkpoints and use "
                "Run.from_checkpoints"
            )
