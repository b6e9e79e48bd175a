"""What the trained model says of examples: prediction and measurement at the final checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whence.data import Batches, cut, place
from whence.layers.passes import WeightLoader, precision_as_asked
from whence.run import Run
from whence.study import Study, cast, copied
from whence.task import Classification, Task

BATCH = 256


def predictions(
    study: Study, dataset: Any, indices: Sequence[int] | None = None, *, stage: str | None = None
) -> dict[int, dict[str, Any]]:
    """By index, the study's final model on examples of a dataset, in eval mode.

    Of several runs, probabilities, outputs and measurements are averaged. The study's own model is
    copied, and not changed.

    Args:
        indices: which examples (default: all).
        stage: whose model and task (default: the last stage's, which queries are measured by).

    Returns:
        For each `measurement` (a float) and `output`: {"class": number, "probability": float} of a
        classification, {"value": float} where the model puts out one number, else None.
    """
    stage = study.stages[-1] if stage is None else stage
    data = Batches("examples", dataset, study.collate)
    which = np.arange(len(data)) if indices is None else np.asarray(indices, dtype=np.int64)
    measured = torch.zeros(len(which), dtype=torch.float64)
    outputs: list[Tensor | None] = [None] * len(which)
    for run in study.runs:
        for where, found, numbers in _run_over(study, run, stage, data, which):
            measured[where] += found / len(study.runs)
            for k, row in zip(where, numbers if numbers is not None else [], strict=False):
                share = row / len(study.runs)
                outputs[k] = share if outputs[k] is None else outputs[k] + share
    return {
        int(index): {"measurement": float(measured[k]), "output": _said(outputs[k])}
        for k, index in enumerate(which)
    }


def _run_over(study: Study, run: Run, stage: str, data: Batches, which: np.ndarray) -> Any:
    """(positions in `which`, measurements, outputs (n, c) or None), batch by batch."""
    task, own = study.tasks[stage], study.models[stage]
    parameter = next(own.parameters(), torch.zeros(()))
    dtype = parameter.dtype if parameter.is_floating_point() else torch.float32
    loaded = WeightLoader(cast(copied(own), parameter.device, dtype).eval())
    loaded.load([c for c in run.checkpoints if c.stage == stage][-1])
    with torch.no_grad(), precision_as_asked():
        for where in cut(len(which), BATCH):
            batch = place(data.take(which[where]), parameter.device, dtype)
            outputs = task.outputs(loaded.model, batch)
            measured = task.measurements(outputs, batch).double().cpu()
            yield where, measured, _readable(task, outputs)


def _readable(task: Task, outputs: Tensor) -> Tensor | None:
    """Class probabilities (n, c), single outputs (n, 1), or None where neither is meant."""
    if isinstance(task, Classification):
        return task.logits(outputs).double().softmax(1).cpu()
    flat = outputs.reshape(len(outputs), -1)
    return flat.double().cpu() if flat.shape[1] == 1 else None


def _said(output: Tensor | None) -> dict[str, Any] | None:
    if output is None or not bool(output.isfinite().all()):
        return None
    if len(output) == 1:
        return {"value": float(output)}
    best = int(output.argmax())
    return {"class": best, "probability": float(output[best])}
