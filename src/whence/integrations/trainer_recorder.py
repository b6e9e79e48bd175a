"""A Recorder for trainer callbacks, which have a beginning and an end instead of a `with`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from torch import nn
from torch.optim import Optimizer

from whence.errors import InvalidInput, InvalidType
from whence.persist.files import as_path
from whence.run.checkpoint import RunError, weights_sha256
from whence.run.format import RunData
from whence.run.recorder import Recorder, writes_run
from whence.run.resume import resumed_run

OPTIONS = set(inspect.signature(Recorder).parameters) - {
    "path",
    "model",
    "optimizer",
    "checkpoints",
}


class TrainerRecorder:
    """What the callbacks of all trainers share.

    Args:
        path: the run's folder.
        checkpoints: as for the Recorder.
        options: of the Recorder. They take precedence over the trainer's values.
    """

    _unended: ClassVar[WeakValueDictionary[Path, Recorder]] = WeakValueDictionary()

    def __init__(
        self,
        path: str | os.PathLike[str],
        checkpoints: int | Sequence[int],
        options: Mapping[str, Any],
    ) -> None:
        unknown = sorted(set(options) - OPTIONS)
        if unknown:
            raise InvalidType(
                f"RecorderCallback got {', '.join(unknown)}: its options are those of the "
                f"Recorder: {', '.join(sorted(OPTIONS))}"
            )
        self.path, self.checkpoints, self.options = as_path(path), checkpoints, dict(options)
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
        usual: Collection[str] = (),
        retried: bool = False,
    ) -> None:
        """Start or resume recording.

        Args:
            model, optimizer: already restored if the trainer resumes.
            total_steps: planned updates of this training, including those before it was resumed.
            done: the number of updates already made.
            size: number of training examples.
            notes: what the trainer does and SOURCE does not model.
            usual: names of notes that are the trainer's defaults: stored, without a warning.
            retried: whether the trainer restarts automatically, with the weights that its failed
                attempt left.
        """
        failed, self._recorder = self._recorder, None
        left = self._unended.pop(self.path.resolve(), failed)
        if left is not None:  # an error ended that training without a call of the callback
            left.__exit__(RuntimeError, None, None)
        _refuse_shards(model)
        options: dict[str, Any] = {"total_steps": total_steps, "size": size, **self.options}
        options["notes"] = dict(notes) | dict(self.options.get("notes") or {})
        options["overwrite"] = self._overwrites(model, done) or (retried and failed is not None)
        recorder = Recorder(self.path, model, optimizer, checkpoints=self.checkpoints, **options)
        recorder._usual = frozenset(usual)
        recorder.__enter__()
        self._recorder = self._unended[self.path.resolve()] = recorder
        total_steps = options["total_steps"]
        if done and not recorder.updates and writes_run():
            recorder.warn(
                f"the first {done} updates of this training were not recorded in {self.path}: the "
                "run starts after them"
            )
            if total_steps is not None and total_steps > done:
                recorder.stage(
                    options.get("stage", "train"),
                    size=options["size"],
                    total_steps=total_steps - done,
                )

    def mark(self) -> None:
        """Announce that the trainer is about to save its own checkpoint, and may resume from it."""
        if self._recorder is not None:
            self._recorder.mark()

    def end(self, error: BaseException | None = None) -> None:
        """Finish the run. After an error, leave it unfinished."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            self._unended.pop(self.path.resolve(), None)
            recorder.__exit__(type(error) if error is not None else None, error, None)

    def _overwrites(self, model: nn.Module, done: int) -> bool:
        """Whether to replace the contents of the folder."""
        requested = bool(self.options.get("overwrite"))
        if not (self.path / "run.json").exists():
            return requested
        if done:  # overwrite=True applies to a training that starts, not to one that resumes
            return requested and not self._can_resume(model)
        earlier = RunData.read(self.path)
        stage = self.options.get("stage", "train")
        if earlier.finished and not requested and any(s.name == stage for s in earlier.stages):
            raise RunError(
                f"{self.path} holds a finished run of {earlier.steps} updates: record to another "
                "folder, pass overwrite=True to replace it, or append this training to the run by "
                "giving it another stage="
            )
        # A warm-up starts with rate 0, so the weights after the first update equal the initial
        # ones. Only the trainer knows that it has not made that update.
        start = earlier.initial.sha256 if earlier.initial and not earlier.finished else None
        return requested or start == weights_sha256(model)

    def _can_resume(self, model: nn.Module) -> bool:
        try:
            return resumed_run(self.path, model) is not None
        except RunError:
            return False


def dataset_size(loader: Any) -> int | None:
    """The number of examples of a data loader; None if that is unknown."""
    try:
        return len(loader.dataset) or None
    except (AttributeError, TypeError, NotImplementedError):
        return None


def _refuse_shards(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        sharded = type(parameter).__name__ == "DTensor" or hasattr(parameter, "ds_id")
        if sharded or "_fsdp_wrapped_module" in name or "_flat_param" in name:
            raise InvalidInput(
                f"{name} is sharded over processes (FSDP, ZeRO-3 or tensor parallelism), but a run "
                "needs whole weights, which a trainer's callback cannot gather: train with DDP, in "
                "a loop of your own with whence.Recorder and fully_shard, or gather checkpoints "
                "and use Run.from_checkpoints"
            )
