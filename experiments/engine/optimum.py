"""Linear models at their optimum: a truth without noise (appendix E.3 of the paper).

The optimum of all data and of each subset is computed, not trained for: least squares in closed
form, logistic regression by L-BFGS. The only error left in influence functions is that of the
first-order approximation.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import whence
from experiments.tasks.methods import AT_OPTIMUM
from whence.retrain.truth import Truth, draw_subsets

Floats = NDArray[np.float64]


def at_the_optimum(
    recipe: whence.Recipe, query: Any, alpha: float, subsets: int
) -> tuple[Truth, dict[str, Any]]:
    """The truth from the optima of the subsets, and influence scores at the optimum of all data."""
    stage = recipe.stages[0]
    x, y = (t.double().numpy() for t in stage.data.take(np.arange(len(stage.data))))
    rows = [query[k] for k in range(len(query))]
    xq, yq = (torch.stack([row[c] for row in rows]).double().numpy() for c in (0, 1))
    task = recipe.task
    binary = isinstance(task, whence.Classification)
    masks = draw_subsets(len(x), alpha, subsets)
    solve = _logistic if binary else _least_squares
    measurements = [_measured(_with_bias(xq) @ solve(x[m], y[m]), yq, binary) for m in masks]
    truth = Truth(
        masks,
        np.stack(measurements)[:, None],
        alpha=alpha,
        measurement=task.measurement,
        unit=task.unit,
        higher_is_better=task.higher_is_better,
    )
    w = torch.from_numpy(solve(x, y))
    weight = torch.stack([-w / 2, w / 2]) if binary else w.unsqueeze(0)
    model = recipe.build(0).double()
    state = {"0.weight": weight[:, :-1].clone(), "0.bias": weight[:, -1].clone()}
    model.load_state_dict(state)
    run = whence.Run.from_checkpoints([state], [1], 1e-3)
    study = whence.Study(model, task, stage.data.dataset, run)
    scores = {
        name: build().attribute(study, query, dtype=torch.float64, progress=False)
        for name, build in AT_OPTIMUM.items()
    }
    return truth, scores


def _with_bias(x: Floats) -> Floats:
    return np.concatenate([x, np.ones_like(x[:, :1])], 1)


def _least_squares(x: Floats, y: Floats) -> Floats:
    return np.asarray(np.linalg.lstsq(_with_bias(x), y.ravel(), rcond=None)[0])


def _logistic(x: Floats, y: Floats) -> Floats:
    """Weights of the difference of the two logits: argmin of the mean of log(1 + exp(-s z))."""
    from scipy.optimize import minimize
    from scipy.special import expit

    x, sign = _with_bias(x), np.where(y > 0, 1.0, -1.0)

    def loss(w: Floats) -> tuple[float, Floats]:
        z = sign * (x @ w)
        return float(np.logaddexp(0, -z).mean()), -(x.T @ (sign * expit(-z))) / len(x)

    optimum = minimize(
        loss, np.zeros(x.shape[1]), jac=True, method="L-BFGS-B", options={"gtol": 1e-10, "ftol": 0}
    )
    return np.asarray(optimum.x)


def _measured(z: Floats, y: Floats, binary: bool) -> Floats:
    """The margin, or the absolute error."""
    return np.where(y > 0, z, -z) if binary else np.abs(z - y.ravel())
