"""Rivals that need many cheap models of a task, and no gradients.

Both are one formula on measurements of models that train together (`whence.retrain.measure`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

import whence
from experiments.engine.trainings import Trainings
from whence.data import Batches
from whence.retrain import Training, measure
from whence.scores import Scores

Floats = NDArray[np.float64]
FIRST_POSTERIOR = 5000  # seeds of the models that stand for a posterior
RIDGES = 10.0 ** np.arange(-4, 5)


def ridge(masks: Floats, measured: Floats) -> Floats:
    """Coefficients (q, n) of measurements (M, q) on masks (M, n), both centred over the models.

    One penalty for all queries, by the leave-one-out error in closed form.
    """
    x, y = masks - masks.mean(0), measured - measured.mean(0)
    eigenvalues, basis = np.linalg.eigh(x @ x.T)
    eigenvalues = np.maximum(eigenvalues, 0.0)
    rotated = basis.T @ y
    best: tuple[float, Floats] | None = None
    for penalty in RIDGES * eigenvalues.mean():
        shrunk = 1 / (eigenvalues + penalty)
        dual = basis @ (shrunk[:, None] * rotated)  # (K + λ)⁻¹ y
        left = ((basis**2) @ shrunk)[:, None]  # its diagonal
        error = float(np.square(dual / left).sum())
        if best is None or error < best[0]:
            best = error, dual
    assert best is not None
    return np.asarray(best[1].T @ x)


def datamodels(work: Trainings, models: int) -> Floats:
    """Datamodels (Ilyas et al., 2022): ridge regression on halves of the data."""
    truth = work.halves(models)
    sound = np.isfinite(truth.measurements).all((1, 2))
    return ridge(truth.masks[sound].astype(np.float64), truth.means[sound])


def bayesian(work: Trainings, models: int) -> Floats:
    """Bayesian influence (Kreer et al., 2025): minus the covariance, over models, of an example's
    loss and the query's measurement. The models are trainings of other seeds."""
    seeds = range(FIRST_POSTERIOR, FIRST_POSTERIOR + models)
    trainings = [Training(seed) for seed in seeds]
    data = work.recipe.stage(work.experiment.stage).data.dataset
    options: dict[str, Any] = {"device": work.device, "memory": work.memory, "progress": False}
    with work.training("posterior"):
        f = measure(work.recipe, work.query, trainings, out=work.work / "posterior", **options)
        losses = measure(
            measuring_losses(work.recipe),
            data,
            trainings,
            out=work.work / "posterior-losses",
            **options,
        )
    sound = np.isfinite(f).all(1) & np.isfinite(losses).all(1)
    f, losses = f[sound] - f[sound].mean(0), losses[sound] - losses[sound].mean(0)
    return np.asarray(-f.T @ losses / max(1, len(f) - 1))


def measuring_losses(recipe: whence.Recipe) -> whence.Recipe:
    """The same training; its measurement is the loss."""
    changed, task = copy.copy(recipe), copy.copy(recipe.task)
    kind = type(task)
    task.__class__ = type(
        f"{kind.__name__}Loss",
        (kind,),
        {"measurements": lambda self, outputs, batch: self.losses(outputs, batch)},
    )
    changed.stages = (*recipe.stages[:-1], replace(recipe.stages[-1], task=task))
    changed._precise = None
    return changed


RIVALS: Mapping[str, tuple[Callable[[Trainings, int], Floats], str]] = {
    "datamodels, ridge": (datamodels, "ridge regression on retrained halves of the data"),
    "Bayesian influence": (bayesian, "covariance of losses over models of other seeds"),
}


def rival_scores(name: str, work: Trainings, models: int) -> Scores:
    """The scores of a rival, as if a method had made them."""
    task, about = work.recipe.task, {"recipe": work.recipe.fingerprint}
    about["query"] = Batches("query", work.query).fingerprint()
    return Scores(
        RIVALS[name][0](work, models),
        method=name,
        measurement=task.measurement,
        unit=task.unit,
        higher_is_better=task.higher_is_better,
        provenance=about,
    )
