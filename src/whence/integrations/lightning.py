"""Lightning: a callback that records a Trainer."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from whence.errors import InvalidInput, MissingDependency
from whence.integrations.trainer_recorder import TrainerRecorder, dataset_size

PACKAGES = ("lightning.pytorch", "pytorch_lightning")  # the same library under two names


def _callback_class() -> Any:
    """A Callback for the packages that are already imported, or else for the first installed."""
    imported = [name for name in PACKAGES if name in sys.modules]
    bases = []
    for name in imported or PACKAGES:
        try:
            bases.append(import_module(name).Callback)
        except ImportError:
            continue
        if not imported:
            break
    if not bases:
        raise MissingDependency(
            "whence.integrations.lightning needs Lightning: pip install 'whence-tda[lightning]'"
        )
    return type("Callback", tuple(bases), {})


_Callback: Any = _callback_class()


class RecorderCallback(_Callback):  # type: ignore[misc]
    """Records a training by a Trainer of `lightning.pytorch` or `pytorch_lightning`:

        trainer = Trainer(..., callbacks=[RecorderCallback("runs/mnist", module="model")])
        trainer.fit(module, loader)

    `trainer.fit(..., ckpt_path=...)` resumes the run. Automatic and manual optimization work, with
    one optimizer. Gradient clipping and weight averaging by the Trainer are stored as notes.

    Args:
        path: the run's folder.
        checkpoints: the number of checkpoints, evenly spaced; or their update counts. These are
            the run's checkpoints, independent of those that Lightning saves.
        module: the part of the LightningModule to record: `module="model"` for
            `Study(lightning_module.model, ...)`. Default: all of it.
        options: the Recorder's, such as stage, subset, every_step, overwrite, notes. The number of
            updates and of training examples comes from the Trainer. A loop that makes more than
            one update per batch, or has no known length, needs total_steps.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        checkpoints: int | Sequence[int] = 6,
        *,
        module: str = "",
        **options: Any,
    ) -> None:
        self._run, self._module = TrainerRecorder(path, checkpoints, options), module

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        try:
            model = pl_module.get_submodule(self._module)
        except AttributeError as error:
            parts = ", ".join(name for name, _ in pl_module.named_children())
            raise InvalidInput(
                f"module={self._module!r} is not in {type(pl_module).__name__}, which has {parts}"
            ) from error
        if len(trainer.optimizers) != 1:
            raise InvalidInput(
                f"{type(pl_module).__name__} has {len(trainer.optimizers)} optimizers, but a run "
                "records one: use a whence.Recorder inside the module"
            )
        planned = trainer.estimated_stepping_batches
        notes: dict[str, Any] = {}
        if trainer.gradient_clip_val:
            by_value = trainer.gradient_clip_algorithm == "value"
            notes["clip_value" if by_value else "clip_norm"] = trainer.gradient_clip_val
        for callback in trainer.callbacks:  # StochasticWeightAveraging, EMAWeightAveraging, ...
            if any("WeightAveraging" in kind.__name__ for kind in type(callback).__mro__):
                notes.setdefault("weight_averaging", type(callback).__name__)
        self._run.begin(
            model,
            trainer.optimizers[0],
            total_steps=int(planned) if 0 < planned < math.inf else None,
            done=trainer.global_step,
            size=dataset_size(trainer.train_dataloader),
            notes=notes,
        )

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        self._run.mark()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._run.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._run.end(exception)
