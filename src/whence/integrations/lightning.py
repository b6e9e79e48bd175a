"""Lightning: a callback that records a Trainer."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from whence.integrations.callback import TrainerRecorder, dataset_size

PACKAGES = ("lightning.pytorch", "pytorch_lightning")  # the same library under two names


def _callback() -> Any:
    """A Callback for the Trainers of the packages that are in use; of one, before any is."""
    used = [name for name in PACKAGES if name in sys.modules]
    found = []
    for name in used or PACKAGES:
        try:
            found.append(import_module(name).Callback)
        except ImportError:
            continue
        if not used:
            break
    if not found:
        raise ImportError("whence.integrations.lightning needs Lightning: pip install lightning")
    return type("Callback", tuple(found), {})


_Callback: Any = _callback()


class RecorderCallback(_Callback):  # type: ignore[misc]
    """Records what a Lightning Trainer does, of `lightning.pytorch` or `pytorch_lightning`:

        trainer = Trainer(..., callbacks=[RecorderCallback("runs/mnist", module="model")])
        trainer.fit(module, loader)

    `trainer.fit(..., ckpt_path=...)` goes on with the run. Automatic and manual optimization, with
    one optimizer. Gradient clipping and weight averaging by the Trainer is noted with the run.

    Args:
        path: the run's folder.
        checkpoints: how many, evenly spaced; or their update counts. They are the run's own, and
            have nothing to do with those that Lightning saves.
        module: the part of the LightningModule whose run it is: `module="model"` for
            `Study(lightning_module.model, ...)`. Default: all of it.
        options: the Recorder's, such as stage, subset, every_step, overwrite, notes. The number of
            updates and of training examples is the Trainer's; a loop that steps more than once a
            batch, or has no known length, needs total_steps.
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
            raise ValueError(
                f"module={self._module!r} is no part of {type(pl_module).__name__}: it has {parts}"
            ) from error
        if len(trainer.optimizers) != 1:
            raise ValueError(
                f"{type(pl_module).__name__} has {len(trainer.optimizers)} optimizers: a run is "
                "that of one; record it by a whence.Recorder in the module"
            )
        planned = trainer.estimated_stepping_batches
        notes: dict[str, Any] = {}
        if trainer.gradient_clip_val:
            by_value = trainer.gradient_clip_algorithm == "value"
            notes["clip_value" if by_value else "clip_norm"] = trainer.gradient_clip_val
        averaging = [type(c).__name__ for c in trainer.callbacks if _averages(c)]
        if averaging:
            notes["weight_averaging"] = averaging[0]
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


def _averages(callback: Any) -> bool:
    """StochasticWeightAveraging, WeightAveraging, EMAWeightAveraging and what derives from them."""
    return any("WeightAveraging" in kind.__name__ for kind in type(callback).__mro__)
