"""Runs built from the `checkpoint-*` folders of a `transformers.Trainer`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from whence.errors import collect_warnings, collected_warnings, warn
from whence.integrations.huggingface.trainer_files import (
    PretrainedWeights,
    SavedOptimizer,
    SecondMoments,
    read_json,
    relative_rates,
    trainable_parameters,
)
from whence.persist.files import as_path
from whence.run import optimizers
from whence.run.checkpoint import Checkpoint, RunError
from whence.run.format import Stage
from whence.run.run import Run

# Earlier versions of the Trainer logged the rate of the next update (huggingface/transformers,
# pull 36973).
FIRST_VERSION_LOGGING_OWN_RATE = (4, 51)


@collect_warnings()
def from_huggingface(
    output_dir: str | os.PathLike[str],
    model: nn.Module,
    *,
    stage: str = "train",
    size: int | None = None,
    notes: Mapping[str, Any] | None = None,
) -> Run:
    """Build a run from the `checkpoint-*` folders of a `transformers.Trainer`.

    They hold the weights, the optimizer's settings and second moments, and the learning rates that
    were logged. Unless every update was logged (`logging_steps=1`), the rates in between are
    interpolated, and a warning gives their number. The folders do not hold the initial weights, nor
    say (without unpickling `training_args.bin`) whether gradients were clipped. `RecorderCallback`
    records both.

    Args:
        output_dir: the Trainer's output_dir. Nothing in it is unpickled.
        model: the model that was trained, with the same parameters frozen. Its weights do not
            matter, except the frozen ones of a PEFT model, whose folders hold only the adapter.
        stage: the name of the run's only stage.
        size: number of training examples.
        notes: aspects of the training that SOURCE does not model: {"clip_norm": 1.0}.
    """
    folder = as_path(output_dir)
    folders = _folders(folder)
    weights = {step: PretrainedWeights.find(place, model) for step, place in folders.items()}
    state_path = _trainer_state(folder, folders)
    state = read_json(state_path)
    saved = _optimizers(folders, model)
    initial = weights.pop(0, None)
    steps = list(weights)
    total = steps[-1]
    if saved:
        last = list(saved.values())[-1]
        kind, groups, settings = last.kind(), last.flat_names, last.hyperparameters()
        scale = relative_rates(list(saved.values()))
        momentums = [optimizers.rate(group)[1] for group in last.groups]
    else:
        trained = [name for _, names in trainable_parameters(model) for name in names]
        kind, groups, settings = "adamw", [trained], [{}]
        scale, momentums = [1.0], [0.0]
    shifted = _version(folders[total]) < FIRST_VERSION_LOGGING_OWN_RATE
    # A checkpoint is saved after the scheduler has set the rate of the next update.
    known = {step + 1: optimizer.rates("lr")[0] for step, optimizer in saved.items()}
    highest = max((optimizer.rates("initial_lr")[0] for optimizer in saved.values()), default=0.0)
    rates = _rates(known | _logged(state, state_path, shifted), highest, total, state_path)
    planned = state.get("max_steps") or total
    _check_spacing(steps, int(state.get("save_steps") or 0))
    if planned > total:
        warn(
            f"training was planned to reach update {planned} (max_steps), but the last checkpoint "
            f"in {folder} is after {total}: the run ends there",
            stacklevel=2,
        )
    moments = saved if kind in ("adam", "adamw", "rmsprop") else {}
    return Run(
        checkpoints=[
            Checkpoint(
                step, stage, file, SecondMoments.of(moments[step]) if step in moments else None
            )
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
        warnings=list(collected_warnings()),
        finished=planned <= total,
    )


def _folders(folder: Path) -> dict[int, Path]:
    """{step: checkpoint folder}, in order."""
    if not folder.is_dir():
        raise RunError(f"{folder} is not a folder: give the output_dir of a Trainer")
    matches = ((re.fullmatch(r"checkpoint-(\d+)", f.name), f) for f in folder.iterdir())
    folders = {int(match[1]): f for match, f in matches if match and f.is_dir()}
    if not any(folders):
        is_checkpoint = (folder / "trainer_state.json").exists()
        raise RunError(
            f"{folder} has no checkpoint-* folders: give "
            f"{'its parent folder' if is_checkpoint else 'the output_dir of a Trainer'}, or build "
            "a run from other files with Run.from_checkpoints"
        )
    return dict(sorted(folders.items()))


def _trainer_state(folder: Path, folders: Mapping[int, Path]) -> Path:
    last = folders[max(folders)]
    for place in (last, folder):
        if (place / "trainer_state.json").exists():
            return place / "trainer_state.json"
    raise RunError(
        f"{last} has no trainer_state.json, so the learning rates are unknown: restore it from a "
        "copy, or pass the learning rates to Run.from_checkpoints"
    )


def _optimizers(folders: Mapping[int, Path], model: nn.Module) -> dict[int, SavedOptimizer]:
    paths = {step: place / "optimizer.pt" for step, place in folders.items() if step}
    missing = [step for step, path in paths.items() if not path.exists()]
    if missing:
        all_missing = len(missing) == len(paths)
        warn(
            f"no optimizer.pt at {missing}: no second moments there, which SOURCE needs for "
            "Adam-type optimizers" + all_missing * ". Assuming AdamW, the Trainer's default",
            stacklevel=3,
        )
    saved = {
        step: SavedOptimizer.read(path, model)
        for step, path in paths.items()
        if step not in missing
    }
    for step, optimizer in saved.items():
        if optimizer.names != saved[max(saved)].names:
            raise RunError(
                f"{optimizer.path} trains other parameters than {saved[max(saved)].path}: use "
                "RecorderCallback, or Run.from_checkpoints"
            )
        if optimizer.updates not in (None, step):
            warn(
                f"{optimizer.path} has counted {optimizer.updates} updates, not {step}: some were "
                "skipped (as fp16 does when gradients overflow), or the optimizer was restarted. "
                f"The run counts all {step}",
                stacklevel=3,
            )
    return saved


def _version(folder: Path) -> tuple[int, ...]:
    """The version of transformers that saved a checkpoint; a recent one if that is unknown."""
    if not (folder / "config.json").exists():
        return FIRST_VERSION_LOGGING_OWN_RATE
    version = str(read_json(folder / "config.json").get("transformers_version"))
    return tuple(map(int, re.findall(r"\d+", version)[:2])) or FIRST_VERSION_LOGGING_OWN_RATE


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
        raise RunError(f"{path} is damaged: it logs a negative or infinite learning rate")
    return rates


def _rates(
    known: Mapping[int, float], highest: float, total: int, path: Path
) -> NDArray[np.float64]:
    """The rate of every update (T,), interpolated where it is not known. `highest` is the rate
    that the scheduler scales."""
    updates = np.arange(1, total + 1)
    missing = total - sum(step in known for step in updates.tolist())
    if missing == total:
        raise RunError(
            f"{path} has no learning rate of updates 1 … {total}: pass them to Run.from_checkpoints"
        )
    if missing:
        warn(
            f"the learning rates of {missing} of {total} updates were not logged in {path} and are "
            "interpolated. Train with logging_steps=1 to log all, or use RecorderCallback",
            stacklevel=3,
        )
    steps = np.array(sorted(known))
    values = np.array([known[step] for step in steps.tolist()])
    rates = np.interp(updates, steps, values)
    if len(steps) > 1:  # before the first known rate: on the line through the first two
        slope = (values[1] - values[0]) / (steps[1] - steps[0])
        line = np.clip(values[0] + slope * (updates - steps[0]), 0, max(highest, *values))
        rates = np.where(updates < steps[0], line, rates)
    return np.asarray(rates, np.float64)


def _check_spacing(steps: Sequence[int], save_steps: int) -> None:
    """Warn if some checkpoints are missing, as with save_total_limit."""
    gaps = np.diff([0, *steps]).tolist()
    regular = save_steps > 0 and all(step % save_steps == 0 for step in steps[:-1])
    interval = save_steps if regular else min(gaps)
    wide = [(end - gap, end) for end, gap in zip(steps, gaps, strict=True) if gap >= 2 * interval]
    if wide and len(set(gaps)) > 1:
        warn(
            "no checkpoint between updates "
            + ", ".join(f"{start} and {end}" for start, end in wide[:3])
            + f", though there is one every {interval} elsewhere: some were deleted, perhaps by "
            "save_total_limit. Segments use the remaining ones",
            stacklevel=3,
        )
