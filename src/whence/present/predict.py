"""Predictions and measurements of examples by the final model."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whence.data import Batches, cut, place
from whence.layers.passes import precision_as_asked
from whence.run.checkpoint import Checkpoint
from whence.study import Study, loader
from whence.task import Classification, Task

BATCH = 256
CURVE_POINTS = 20  # checkpoints of a curve, at most


def predictions(
    study: Study, dataset: Any, indices: Sequence[int] | None = None, *, stage: str | None = None
) -> dict[int, dict[str, Any]]:
    """Evaluate the study's final model on examples of a dataset, in eval mode.

    With several runs, probabilities, outputs and measurements are averaged. The study's model is
    copied, not changed.

    Args:
        indices: which examples (default: all).
        stage: whose model and task to use (default: the last stage's, which measures queries).

    Returns:
        {index: {"measurement": float, "output": ...}}. The output is {"class": number,
        "probability": float, "lead": float} for classification, {"value": float} if the model has a
        single output, else None. The lead is ln(p / p'), with p the probability of the example's
        label and p' that of the most probable other class. It is positive if the prediction is
        right, which a margin ln(p / (1 - p)) is only if p > 1/2.
    """
    stage = study.stages[-1] if stage is None else stage
    data = Batches("examples", dataset, study.collate)
    places = np.arange(len(data)) if indices is None else np.asarray(indices, dtype=np.int64)
    measured = torch.zeros(len(places), dtype=torch.float64)
    outputs: list[Tensor | None] = [None] * len(places)
    labels = np.full(len(places), -1)
    for run in study.runs:
        final = [c for c in run.checkpoints if c.stage == stage][-1]
        for where, batch_measured, rows, given in _evaluate(study, final, stage, data, places):
            measured[where] += batch_measured / len(study.runs)
            labels[where] = given
            for k, row in zip(where, rows if rows is not None else [], strict=False):
                share = row / len(study.runs)
                outputs[k] = share if outputs[k] is None else outputs[k] + share
    return {
        int(index): {
            "measurement": float(measured[k]),
            "output": _format_output(outputs[k], labels[k]),
        }
        for k, index in enumerate(places)
    }


def curves(
    study: Study, dataset: Any, indices: Sequence[int]
) -> tuple[list[int], NDArray[np.float64]]:
    """How the measurement of examples went during training, in eval mode.

    Returns:
        The updates, at most `CURVE_POINTS` of them, and the measurements (updates, n) of the first
        run at its checkpoints, from the beginning of the last stage.
    """
    stage, run = study.stages[-1], study.runs[0]
    checkpoints = [c for c in [run.initial, *run.checkpoints] if c is not None and c.stage == stage]
    chosen = np.unique(np.linspace(0, len(checkpoints) - 1, CURVE_POINTS).round().astype(int))
    data, places = Batches("examples", dataset, study.collate), np.asarray(indices, np.int64)
    measured = np.zeros((len(chosen), len(places)))
    for k, at in enumerate(chosen):
        for where, values, _, _ in _evaluate(study, checkpoints[at], stage, data, places):
            measured[k, where] = values
    return [checkpoints[at].step for at in chosen], measured


def _evaluate(
    study: Study, checkpoint: Checkpoint, stage: str, data: Batches, places: np.ndarray
) -> Any:
    """(positions in `which`, measurements, outputs (n, c) or None, labels), batch by batch."""
    task, model = study.tasks[stage], study.models[stage]
    parameter = next(model.parameters(), torch.zeros(()))
    dtype = parameter.dtype if parameter.is_floating_point() else torch.float32
    loaded = loader(model, study.device, dtype)
    loaded.load(checkpoint)
    with torch.no_grad(), precision_as_asked():
        for where in cut(len(places), BATCH):
            batch = place(data.take(places[where]), study.device, dtype)
            outputs = task.outputs(loaded.model, batch)
            measured = task.measurements(outputs, batch).double().cpu()
            labels = task.labels(batch).cpu().numpy() if isinstance(task, Classification) else -1
            yield where, measured, _readable(task, outputs), labels


def _readable(task: Task, outputs: Tensor) -> Tensor | None:
    """Class probabilities (n, c), single outputs (n, 1), or None if the outputs are neither."""
    if isinstance(task, Classification):
        return task.logits(outputs).double().softmax(1).cpu()
    flat = outputs.reshape(len(outputs), -1)
    return flat.double().cpu() if flat.shape[1] == 1 else None


def _format_output(output: Tensor | None, label: int) -> dict[str, Any] | None:
    if output is None or not bool(output.isfinite().all()):
        return None
    if len(output) == 1:
        return {"value": float(output)}
    best = int(output.argmax())
    formatted = {"class": best, "probability": float(output[best])}
    return formatted | ({"lead": _lead(output, int(label))} if label >= 0 else {})


def _lead(probabilities: Tensor, label: int) -> float:
    """ln(p / p'): of the label's class (c,), ahead of the most probable other one."""
    others = probabilities.clone()
    others[label] = -1.0
    least = sys.float_info.min  # a probability may be rounded to 0
    right, other = float(probabilities[label]), float(others.max())
    return math.log(max(right, least)) - math.log(max(other, least))
