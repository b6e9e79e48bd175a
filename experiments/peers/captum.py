"""captum: TracInCP, and influence functions by Arnoldi iterations."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
from torch import Tensor, nn

import whence
from experiments.engine.trainings import Trainings
from experiments.peers.inputs import (
    BATCH,
    Values,
    batches,
    checkpoints,
    final_model,
    training_data,
    weights,
)


def tracin(work: Trainings, study: whence.Study) -> Values:
    """TracIn at all checkpoints."""
    points = {str(one.step): (one, rate) for one, rate in checkpoints(study)}

    def load(model: nn.Module, step: str) -> float:
        checkpoint, rate = points[step]
        model.load_state_dict(weights(checkpoint, work.device))
        return rate

    return scores(work, study, "TracInCP", checkpoints=list(points), checkpoints_load_func=load)


def arnoldi(work: Trainings, study: whence.Study, damping: float, rank: int) -> Values:
    """Influence functions on the leading eigenvectors of the Hessian."""

    def load(model: nn.Module, step: str) -> float:
        model.load_state_dict(weights(study.runs[0].final, work.device))
        return 1.0

    settings = {"projection_dim": rank, "arnoldi_dim": 2 * rank, "hessian_reg": damping}
    name = "ArnoldiInfluenceFunction"
    values = scores(work, study, name, checkpoint="", checkpoints_load_func=load, **settings)
    return values / work.examples


def scores(work: Trainings, study: whence.Study, name: str, **settings: Any) -> Values:
    ours, classes = work.recipe.task, import_module("captum.influence._core")
    module = {"TracInCP": "tracincp"}.get(name, "arnoldi_influence_function")
    kind = getattr(import_module(f"{classes.__name__}.{module}"), name)
    judge = kind(
        final_model(study).to(work.device),
        training_data(work),
        batch_size=BATCH,
        loss_fn=total(ours.losses),
        test_loss_fn=total(ours.measurements),
        sample_wise_grads_per_batch=True,
        **settings,
    )
    parts = [judge.influence(tuple(batch)) for batch in batches(work.query, work.device)]
    return -np.concatenate([part.detach().cpu().numpy() for part in parts]).astype(np.float64)


def total(each: Callable[[Tensor, Any], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """The sum over a batch, as captum wants it."""

    def value(outputs: Tensor, targets: Tensor) -> Tensor:
        return each(outputs, (None, targets)).sum()

    return value
