"""Hugging Face: a callback that records a Trainer, and runs made of the folders one has left."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from whence.integrations.callback import TrainerRecorder, dataset_size
from whence.integrations.trainer_files import (
    Moments,
    SavedOptimizer,
    Weights,
    factors,
    read_json,
    trained,
)
from whence.run import optimizers
from whence.run.checkpoint import Checkpoint, RunError
from whence.run.run import Run
from whence.run.segments import Stage

# Before, the Trainer logged the rate of the next update (huggingface/transformers, pull 36973).
LOGS_THIS_UPDATE = (4, 51)


def _callback() -> Any:
    try:
        return import_module("transformers").TrainerCallback
    except ImportError:  # from_huggingface only reads files
        return object


_TrainerCallback: Any = _callback()


class RecorderCallback(_TrainerCallback):  # type: ignore[misc]
    """Records what a `transformers.Trainer` does:

        trainer = Trainer(model, args, ..., callbacks=[RecorderCallback("runs/bert")])
        trainer.train()

    `trainer.train(resume_from_checkpoint=...)` goes on with the run. Gradient clipping, and what
    else the arguments ask for and SOURCE does not model, is noted with it.

    Args:
        path: the run's folder.
        checkpoints: how many, evenly spaced; or their update counts. They are the run's own, and
            have nothing to do with those that the Trainer saves.
        options: the Recorder's, such as stage, subset, every_step, overwrite, notes. The number of
            updates and of training examples is the Trainer's.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        checkpoints: int | Sequence[int] = 6,
        **options: Any,
    ) -> None:
        if _TrainerCallback is object:
            raise ImportError("RecorderCallback needs transformers: pip install transformers")
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
        asked = {
            "clip_norm": args.max_grad_norm,
            "label_smoothing": args.label_smoothing_factor,
            "neftune_noise_alpha": args.neftune_noise_alpha,
            "load_best_model_at_end": args.load_best_model_at_end,
        }
        self._run.begin(
            model,
            optimizer,
            total_steps=state.max_steps if state.max_steps > 0 else None,
            done=state.global_step,
            size=dataset_size(train_dataloader),
            notes={what: value for what, value in asked.items() if value},
            retried=args.auto_find_batch_size and not state.global_step,
        )

    # Marked before the Trainer saves, so that a process killed in between can still go on.

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if control.should_save:
            self._run.mark()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if control.should_save:
            self._run.mark()

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._run.mark()  # where the save was decided later than that, by an evaluation

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        # The Trainer's last words come after the last update, and before load_best_model_at_end
        # puts other weights in the place of the final ones.
        if logs and "train_runtime" in logs:
            self._run.end()

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._run.end()


def from_huggingface(
    output_dir: str | os.PathLike[str],
    model: nn.Module,
    *,
    stage: str = "train",
    size: int | None = None,
    notes: Mapping[str, Any] | None = None,
) -> Run:
    """A run made of the `checkpoint-*` folders that a `transformers.Trainer` has left.

    They tell the weights, the optimizer's settings and second moments, and the learning rates that
    were logged; where not every update was (`logging_steps=1`), those in between are interpolated,
    and a warning says how many. They tell neither the initial weights nor, unless
    `training_args.bin` were unpickled, whether gradients were clipped: `RecorderCallback` does.

    Args:
        output_dir: the Trainer's. Nothing in it is unpickled.
        model: the one that was trained: its names and shapes, and which of its parameters are
            frozen. Its weights do not matter.
        stage: the name of the run's only stage.
        size: number of training examples.
        notes: what is known of the training and SOURCE does not model: {"clip_norm": 1.0}.
    """
    folder = Path(output_dir)
    folders = _folders(folder)
    weights = {step: Weights.find(place, model) for step, place in folders.items()}
    state_path = _trainer_state(folder, folders)
    state = read_json(state_path)
    saved = _optimizers(folders, model)
    initial = weights.pop(0, None)
    steps = list(weights)
    total = steps[-1]
    if saved:
        last = list(saved.values())[-1]
        kind, groups, settings = last.kind(), last.flat_names, last.hyperparameters()
        scale = factors(list(saved.values()))
        momentums = [optimizers.rate(group)[1] for group in last.groups]
    else:
        kind, groups, settings = "adamw", [[n for _, ns in trained(model) for n in ns]], [{}]
        scale, momentums = [1.0], [0.0]
    shifted = _version(folders[total]) < LOGS_THIS_UPDATE
    # A checkpoint is saved when the scheduler has set the rate of the next update.
    known = {step + 1: one.rates("lr")[0] for step, one in saved.items()}
    highest = max((one.rates("initial_lr")[0] for one in saved.values()), default=0.0)
    rates = _rates(known | _logged(state, state_path, shifted), highest, total, state_path)
    planned = state.get("max_steps") or total
    _check_spacing(steps, int(state.get("save_steps") or 0))
    if planned > total:
        warnings.warn(
            f"training was planned to reach update {planned} (max_steps), and the last checkpoint "
            f"in {folder} is after {total}: the run ends there",
            stacklevel=2,
        )
    moments = saved if kind in ("adam", "adamw", "rmsprop") else {}
    return Run(
        checkpoints=[
            Checkpoint(step, stage, file, Moments.of(moments[step]) if step in moments else None)
            for step, file in weights.items()
        ],
        learning_rates=rates[:, None] * np.array(scale),
        momentums=np.tile(momentums, (total, 1)),
        groups=groups,
        hyperparameters=settings,
        stages=[Stage(stage, 0, total, size)],
        optimizers={stage: kind},
        columns={stage: list(range(len(groups)))},
        initial=Checkpoint(0, stage, initial) if initial else None,
        notes=dict(notes or {}),
        finished=planned <= total,
    )


def _folders(folder: Path) -> dict[int, Path]:
    """{step: checkpoint folder}, in order."""
    if not folder.is_dir():
        raise RunError(f"{folder} is no folder: give the output_dir of a Trainer")
    places = ((re.fullmatch(r"checkpoint-(\d+)", f.name), f) for f in folder.iterdir())
    found = {int(match[1]): f for match, f in places if match and f.is_dir()}
    if not any(found):
        inside = (folder / "trainer_state.json").exists()
        raise RunError(
            f"{folder} has no checkpoint-* folders: give "
            f"{'the folder above it' if inside else 'the output_dir of a Trainer'}, or make a run "
            "of weights that lie elsewhere with Run.from_checkpoints"
        )
    return dict(sorted(found.items()))


def _trainer_state(folder: Path, folders: Mapping[int, Path]) -> Path:
    last = folders[max(folders)]
    for place in (last, folder):
        if (place / "trainer_state.json").exists():
            return place / "trainer_state.json"
    raise RunError(
        f"{last} has no trainer_state.json, so the learning rates are unknown: restore it from a "
        "copy, or give them to Run.from_checkpoints"
    )


def _optimizers(folders: Mapping[int, Path], model: nn.Module) -> dict[int, SavedOptimizer]:
    paths = {step: place / "optimizer.pt" for step, place in folders.items() if step}
    missing = [step for step, path in paths.items() if not path.exists()]
    if missing:
        every = len(missing) == len(paths)
        warnings.warn(
            f"no optimizer.pt at {missing}: no second moments there, which SOURCE needs for Adam "
            "and its kin" + every * ". The optimizer is taken to be AdamW, the Trainer's default",
            stacklevel=3,
        )
    saved = {
        step: SavedOptimizer.read(path, model)
        for step, path in paths.items()
        if step not in missing
    }
    for step, one in saved.items():
        if one.names != saved[max(saved)].names:
            raise RunError(f"{one.path} trains other parameters than {saved[max(saved)].path}")
        if one.updates not in (None, step):
            warnings.warn(
                f"{one.path} has counted {one.updates} updates, not {step}: some were skipped (as "
                "fp16 does when gradients overflow), or the optimizer was started afresh. All are "
                "taken to have been made",
                stacklevel=3,
            )
    return saved


def _version(folder: Path) -> tuple[int, ...]:
    """The version of transformers that saved a checkpoint; where nothing tells, a recent one."""
    if not (folder / "config.json").exists():
        return LOGS_THIS_UPDATE
    told = str(read_json(folder / "config.json").get("transformers_version"))
    return tuple(map(int, re.findall(r"\d+", told)[:2])) or LOGS_THIS_UPDATE


def _logged(state: Mapping[str, Any], path: Path, shifted: bool) -> dict[int, float]:
    """{update: the learning rate that was logged for it}."""
    try:
        rates = {
            int(entry["step"]) + shifted: float(entry["learning_rate"])
            for entry in state.get("log_history") or []
            if "learning_rate" in entry
        }
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{path} is damaged: {error!r} in its log_history") from error
    if not all(np.isfinite(rate) and rate >= 0 for rate in rates.values()):
        raise RunError(f"{path} is damaged: it logs a learning rate that is no rate")
    return rates


def _rates(
    known: Mapping[int, float], highest: float, total: int, path: Path
) -> NDArray[np.float64]:
    """The rate of every update (T,), interpolated where it is not known. `highest` is the one that
    the scheduler varies."""
    updates = np.arange(1, total + 1)
    missing = total - sum(step in known for step in updates.tolist())
    if missing == total:
        raise RunError(
            f"{path} has no learning rate of updates 1 … {total}: give them to Run.from_checkpoints"
        )
    if missing:
        warnings.warn(
            f"the learning rates of {missing} of {total} updates were not logged in {path} and are "
            "interpolated. With logging_steps=1 all are logged; RecorderCallback records them",
            stacklevel=3,
        )
    steps = np.array(sorted(known))
    values = np.array([known[step] for step in steps.tolist()])
    rates = np.interp(updates, steps, values)
    if len(steps) > 1:  # before the first one known: on the line through the first two
        slope = (values[1] - values[0]) / (steps[1] - steps[0])
        line = np.clip(values[0] + slope * (updates - steps[0]), 0, max(highest, *values))
        rates = np.where(updates < steps[0], line, rates)
    return np.asarray(rates, np.float64)


def _check_spacing(steps: Sequence[int], save_steps: int) -> None:
    """Warn where checkpoints are missing among others, as save_total_limit leaves it."""
    gaps = np.diff([0, *steps]).tolist()
    regular = save_steps > 0 and all(step % save_steps == 0 for step in steps[:-1])
    interval = save_steps if regular else min(gaps)
    wide = [(end - gap, end) for end, gap in zip(steps, gaps, strict=True) if gap >= 2 * interval]
    if wide and len(set(gaps)) > 1:
        warnings.warn(
            "no checkpoint between updates "
            + ", ".join(f"{start} and {end}" for start, end in wide[:3])
            + f", though there is one every {interval} elsewhere: were some deleted, or "
            "save_total_limit set? Segments are made of those that are left",
            stacklevel=3,
        )
