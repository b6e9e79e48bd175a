"""-∂L/∂f of every example: TRAK's Q, averaged over the runs of an ensemble."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from whence.data import cut
from whence.engine.workspace import Workspace
from whence.errors import warn
from whence.layers.passes import LOSSES, MEASUREMENTS, Passes
from whence.persist.identity import key_of
from whence.run import Run
from whence.study import task_identity


def ensemble_weights(workspace: Workspace) -> dict[str, Tensor] | None:
    """Q averaged over the study's runs, (n,) per stage; None if it is not needed or not defined."""
    runs = workspace.study.runs
    if len(runs) == 1:
        return None
    means: dict[str, Tensor] = {}
    for run in runs:
        for stage in workspace.study.stages:
            weights, along = _weights(workspace, run, stage)
            if not along:
                task = workspace.study.tasks[stage]
                message = (
                    f"the loss of {task!r} is not a function of its measurement, so that TRAK's Q "
                    "is not defined: scores are averaged over runs as they are, with -∇L in place "
                    "of Q∇f"
                )
                warn(message, stacklevel=2)
                workspace.ledger.diagnostics["ensemble"] = message
                return None
            share = weights / len(runs)
            means[stage] = means[stage] + share if stage in means else share
    return means


def _weights(workspace: Workspace, run: Run, stage: str) -> tuple[Tensor, bool]:
    """A run's Q of a stage's examples (n,), and whether the loss is a function of the measurement.

    It is cached with the run's factors, because every run of an ensemble needs all of them.
    """
    passes, study = workspace.passes[stage], workspace.study
    identity = study.identity(run, stage, passes.tracked)
    settings = {
        "what": "loss by measurement",
        # "used" does not matter, because all examples count
        "identity": {k: v for k, v in identity.items() if k != "used"},
        "task": task_identity(study.tasks[stage], measured=True),
        "weights": run.final.sha256,
        "losses": [workspace.losses(stage, run.final, what) for what in (LOSSES, MEASUREMENTS)],
        "dtype": passes.arithmetic,
    }
    key, store = key_of(settings), study.store(run)
    cached = store.get(key)
    if cached is None:
        passes.load(run.final)
        world, count = workspace.world, len(study.data[stage])
        share = world.deal(np.arange(count))
        blocks = [share[block] for block in cut(len(share), workspace.batch_size)]
        with passes.clock("weights"):
            parts = [
                loss_by_measurement(passes, batch)
                for _, batch in study.data[stage].stream(
                    blocks, passes.device, passes.dtype, passes.workers
                )
            ]
        columns = [torch.cat(column) for column in zip(*parts, strict=True)]
        slopes, off = (world.regather(column, count) for column in columns)
        cached = {"weights": -slopes, "along": ~off.any()}
        store.put(key, cached, settings)
    return cached["weights"].to(passes.device), bool(cached["along"])


def loss_by_measurement(passes: Passes, batch: Any) -> tuple[Tensor, Tensor]:
    """∂L/∂f of each example, (n,), and where the two gradients in the outputs are not parallel."""
    task = passes.task
    outputs = task.outputs(passes.model, batch).detach().requires_grad_()
    with torch.enable_grad():
        values = task.losses(outputs, batch).sum(), task.measurements(outputs, batch).sum()
        wide = torch.promote_types(outputs.dtype, torch.float32)
        loss, measured = (
            torch.autograd.grad(value, outputs)[0].flatten(1).to(wide) for value in values
        )
    # in units of the largest entry, because squares of small numbers would underflow
    unit = measured.abs().amax(1, keepdim=True)
    unit = torch.where(unit > 0, unit, 1.0)
    loss, measured = loss / unit, measured / unit
    squares = measured.square().sum(1)
    slopes = (loss * measured).sum(1) / torch.where(squares > 0, squares, 1.0)
    rest = torch.linalg.vector_norm(loss - slopes.unsqueeze(1) * measured, dim=1)
    rounding = 64 * torch.finfo(outputs.dtype).eps
    allowed = 1e-3 * torch.linalg.vector_norm(loss, dim=1) + rounding * squares.sqrt()
    return slopes, rest > allowed
