"""A callback that records a `transformers.Trainer`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from whence.errors import MissingDependency
from whence.integrations.trainer_recorder import TrainerRecorder, dataset_size


def _callback_class() -> Any:
    try:
        return import_module("transformers").TrainerCallback
    except ImportError:  # from_huggingface only reads files
        return object


_TrainerCallback: Any = _callback_class()


class RecorderCallback(_TrainerCallback):  # type: ignore[misc]
    """Records a training by a `transformers.Trainer`:

        trainer = Trainer(model, args, ..., callbacks=[RecorderCallback("runs/bert")])
        trainer.train()

    `trainer.train(resume_from_checkpoint=...)` resumes the run. Gradient clipping, and other
    training arguments that SOURCE does not model, are stored as notes.

    Args:
        path: the run's folder.
        checkpoints: the number of checkpoints, evenly spaced; or their update counts. These are
            the run's checkpoints, independent of those that the Trainer saves.
        options: the Recorder's, such as stage, subset, every_step, overwrite, notes. The number of
            updates and of training examples comes from the Trainer.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        checkpoints: int | Sequence[int] = 6,
        **options: Any,
    ) -> None:
        if _TrainerCallback is object:
            raise MissingDependency("RecorderCallback needs transformers: pip install transformers")
        self._run = TrainerRecorder(path, checkpoints, options)

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        *,
        model: Any = None,
        optimizer: Any = None,
        train_dataloader: Any = None,
        **others: Any,
    ) -> None:
        not_modelled = {
            "clip_norm": args.max_grad_norm,
            "label_smoothing": args.label_smoothing_factor,
            "neftune_noise_alpha": args.neftune_noise_alpha,
            "load_best_model_at_end": args.load_best_model_at_end,
        }
        default = type(args).__dataclass_fields__["max_grad_norm"].default
        self._run.begin(
            model,
            optimizer,
            total_steps=state.max_steps if state.max_steps > 0 else None,
            done=state.global_step,
            size=dataset_size(train_dataloader),
            notes={name: value for name, value in not_modelled.items() if value},
            usual=["clip_norm"] if args.max_grad_norm == default else [],
            retried=args.auto_find_batch_size and not state.global_step,
        )

    # Mark before the Trainer saves, so that a process killed in between can still resume.

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if control.should_save:
            self._run.mark()

    on_epoch_end = on_step_end

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._run.mark()  # an evaluation may decide to save after on_step_end

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        # The Trainer's last log comes after the last update, and before load_best_model_at_end
        # replaces the final weights.
        if logs and "train_runtime" in logs:
            self._run.end()

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._run.end()
