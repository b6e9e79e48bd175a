"""Influence functions and unrolling on two parameters, by real trainings (the paper's figure 2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import whence
from experiments.pages.figures import BLUE, GREEN, RED, YELLOW, axes_grid
from experiments.tasks.methods import TWO_WEIGHTS
from whence.evaluate.plots import GREY
from whence.retrain import Training, measure

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Shift:
    """How leaving out one example changes two weights, real and predicted.

    Attributes:
        example: what is left out: x, (2,), and y.
        paths: weights after every update of one training, with the example and without, (k, 2).
        optima: argmin of the loss with it and without, (2, 2).
        hessian: of the mean loss, with it and without, (2, 2, 2).
        real: change of the trained weights by leaving it out, mean over seeds, (2,).
        optimum: change of the optimum, (2,).
        predicted: change by method, (2,).
    """

    example: tuple[Floats, float]
    paths: tuple[Floats, Floats]
    optima: Floats
    hessian: Floats
    real: Floats
    optimum: Floats
    predicted: Mapping[str, Floats]


class Start(nn.Module):
    """x ↦ w · x; w starts at zero for every seed."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Linear(2, 1, bias=False)
        nn.init.constant_(self.weights.weight, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.weights(x)
        return out


def two_weights(seeds: int = 300) -> Shift:
    """Least squares stopped early: one direction of high curvature, one of low.

    Queries are the unit vectors and the measurement is the output, so a score is an example's
    effect on a weight.
    """
    random = np.random.default_rng(3)
    x = random.standard_normal((60, 2)) * (1.0, 0.2)  # curvatures of about 1 and 0.04
    y = x @ (1.0, 1.0) + 0.1 * random.standard_normal(60)
    x[0], y[0] = (0.9, 0.9), 4.0  # the example that is left out
    turn = np.array([[np.cos(0.5), -np.sin(0.5)], [np.sin(0.5), np.cos(0.5)]])
    x = x @ turn.T
    train = TensorDataset(torch.tensor(x), torch.tensor(y[:, None]))
    query = TensorDataset(torch.eye(2, dtype=torch.float64), torch.zeros(2, 1).double())
    task = whence.Regression("half_mse", "output")
    recipe = whence.Recipe(
        lambda: Start().double(),
        task,
        train,
        lambda p: torch.optim.SGD(p, lr=0.1),
        batch_size=10,
        epochs=10,
    )
    rest = np.arange(1, len(x))
    runs = [
        recipe.run(0, subset=subset, every_step=True, checkpoints=6, device="cpu")
        for subset in (None, rest)
    ]
    study = whence.Study(recipe.build(0), task, train, runs[0])
    predicted = {
        name: -np.asarray(
            build(len(x))
            .attribute(study, query, dtype=torch.float64, device="cpu", progress=False)
            .values,
            np.float64,
        )[:, 0]
        for name, build in TWO_WEIGHTS.items()
    }
    ends = [
        measure(
            recipe, query, [Training(s, subset) for s in range(seeds)], device="cpu", progress=False
        ).mean(0)
        for subset in (None, rest)
    ]
    optima = [np.linalg.lstsq(x[k], y[k], rcond=None)[0] for k in (slice(None), rest)]
    return Shift(
        example=(x[0], float(y[0])),
        paths=(_path(runs[0]), _path(runs[1])),
        optima=np.stack(optima),
        hessian=np.stack([x[k].T @ x[k] / len(x[k]) for k in (slice(None), rest)]),
        real=ends[1] - ends[0],
        optimum=optima[1] - optima[0],
        predicted=predicted,
    )


def _path(run: whence.Run) -> Floats:
    return np.stack([c.weights()["weights.weight"].numpy()[0] for c in run.trajectory])


def unrolling(shift: Shift) -> Figure:
    """Left: trainings and optima, with the example and without. Right: how leaving it out changes
    the weights."""
    with axes_grid(2, 2, (3.7, 3.0)) as (figure, (axis, changes)):
        every = np.concatenate([*shift.paths, shift.optima])
        reach = float(np.ptp(every, 0).max()) * 0.58
        middle = (every.max(0) + every.min(0)) / 2
        across = [np.linspace(m - reach, m + reach, 200) for m in middle]
        grid = np.stack(np.meshgrid(*across), -1)
        for k, (text, colour, line) in enumerate(
            (("all examples", BLUE, "-"), ("one left out", RED, "--"))
        ):
            off = grid - shift.optima[k]
            height = 0.5 * np.einsum("abi,ij,abj->ab", off, shift.hessian[k], off)
            levels = 0.5 * np.array([0.01, 0.05, 0.15, 0.4])
            axis.contour(
                *across, height, levels, colors=colour, linestyles=line, linewidths=0.6, alpha=0.6
            )
            path = shift.paths[k]
            axis.plot(*path.T, color=colour, linestyle=line, linewidth=1.4, label=text)
            axis.plot(*path[-1], "o", color=colour, markersize=6)
            axis.plot(*shift.optima[k], "*", color=colour, markersize=11)
        axis.plot(*shift.paths[0][0], "o", color="black", markersize=4)
        axis.plot([], [], "o", color=GREY, label="end of training")
        axis.plot([], [], "*", color=GREY, markersize=10, label="optimum")
        axis.set(xlabel="first weight", ylabel="second weight", title="Trainings")
        axis.set_box_aspect(1)
        axis.legend(loc="upper right", fontsize=7, frameon=True, framealpha=1, edgecolor="white")

        arrows = {
            "end of training, real": (shift.real, "black", "-", 5.0),
            "end, by unrolling": (shift.predicted["unrolling"], GREEN, "-", 3.4),
            "end, by SOURCE": (shift.predicted["SOURCE"], BLUE, "-", 1.6),
            "optimum, real": (shift.optimum, GREY, "-", 4.0),
            "optimum, by influence": (shift.predicted["influence"], YELLOW, "-", 1.6),
        }
        for text, (move, colour, line, width) in arrows.items():
            changes.plot(
                *np.stack([0 * move, move]).T, line, color=colour, linewidth=width, label=text
            )
            changes.plot(*move, "o", color=colour, markersize=width + 2.5)
        changes.plot(0, 0, "+", color="black", markersize=8)
        changes.axhline(0, color=GREY, linewidth=0.5)
        changes.axvline(0, color=GREY, linewidth=0.5)
        changes.set_aspect("equal", adjustable="datalim")
        changes.set_box_aspect(1)
        changes.set(xlabel="change of the first weight", ylabel="change of the second weight")
        changes.set_title("What leaving it out changes")
        changes.legend(loc="upper right", fontsize=7)
    return figure
