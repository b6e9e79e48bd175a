"""Figures of docs/reproduce.md, in the paper's layout: a function each, from results by task.

Each is given all results and the tasks to show, and returns a matplotlib Figure. A method has the
same colour, line and marker in all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import whence
from experiments.pages.tables import Found, baselines, over_values, title
from experiments.tasks import TASKS, Experiment, data
from experiments.tasks.methods import TWO_WEIGHTS
from whence.evaluate.plots import COLOURS, GREY, LINES, MARKERS, STYLE
from whence.retrain import Training, measure

Floats = NDArray[np.float64]
Results = Mapping[str, Found]

BLUE, RED, GREEN, PINK, YELLOW, SKY, SILVER = COLOURS
EXACT_FORM = "SOURCE, exact"  # for Adam, beside the paper's own
LOOKS = {
    "RepSim": (SILVER, 0),
    "TracIn": (SKY, 1),
    "TRAK": (GREEN, 2),
    "influence": (YELLOW, 3),
    "FastSource": (PINK, 4),
    "SOURCE, L = 1": (RED, 5),
    "SOURCE": (BLUE, 6),
    "SOURCE, λP⁻¹": ("#56789A", 6),
    EXACT_FORM: ("#003A66", 6),
    'influence (λ = "source")': ("#8A6D00", 3),
    "influence, conjugate gradients": ("#8A6D00", 3),
    "Random": (GREY, 0),
}
SHORT = {
    'influence (λ = "source")': 'influence, λ = "source"',
    "influence, conjugate gradients": "influence, exact inverse",
}
LAST_ALPHA = "1 − 1/N"
AVERAGED = ("influence", "FastSource", "SOURCE")
QUERIES = 2  # shown in a panel of examples
PITCH = 1.22  # from one row of images to the next, in images
GARMENTS = (
    "T-shirt",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "boot",
)
CIFAR10 = ("plane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def save(figure: Figure, path: Path) -> None:
    """As a PNG file of 128 colours: a third of the size."""
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(drawn, dpi=120, format="png")
    with Image.open(drawn) as image:
        few = image.convert("RGB").quantize(
            128, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE
        )
    few.save(path, optimize=True)


@contextmanager
def panels(
    count: int, columns: int, size: tuple[float, float]
) -> Iterator[tuple[Figure, list[Axes]]]:
    """A figure of so many axes in our style, each of that size in inches."""
    columns = min(columns, count)
    rows = -(-count // columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(size[0] * columns, size[1] * rows + 0.4), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False).ravel()
        for axis in axes[count:]:
            axis.remove()
        yield figure, list(axes[:count])


def legend(figure: Figure, axes: Sequence[Axes]) -> None:
    """One for all axes: above several, beside a single one; the ceiling last."""
    shown: dict[str, Any] = {}
    for axis in axes:
        shown |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    for last in ("Random", "noise ceiling"):
        if last in shown:
            shown[last] = shown.pop(last)
    columns = max(1, int(figure.get_figwidth() / 1.35))
    if len(axes) > 1 or len(shown) <= columns:
        figure.legend(shown.values(), shown, loc="outside upper center", ncols=columns)
        return
    figure.set_figwidth(figure.get_figwidth() + 1.6)
    figure.legend(shown.values(), shown, loc="outside right center")


def look(method: str) -> dict[str, Any]:
    colour, k = LOOKS[method]
    return {"color": colour, "linestyle": LINES[k], "marker": MARKERS[k]}


def lds_bars(results: Results, shown: Sequence[str]) -> Figure:
    """LDS at α = ½ of the paper's five methods, one model beside the ensemble, a panel per task;
    where training was Adam's, of SOURCE's other forms too."""
    with panels(len(shown), 5, (1.72, 2.15)) as (figure, axes):
        for axis, task in zip(axes, shown, strict=True):
            experiment, lds = TASKS[task], results[task]["lds"]
            names = [*baselines(experiment), experiment.source]
            names += [name for name in ("SOURCE, λP⁻¹", EXACT_FORM) if name in experiment.methods]
            for x, name in enumerate(names):
                entry, colour = lds.get(name), LOOKS[name][0]
                if entry is None:
                    axis.text(x, 0.01, "not run", rotation=90, ha="center", va="bottom", fontsize=6)
                    continue
                _bar(axis, x - 0.2, entry["single"], edgecolor=colour, color="white", hatch="/////")
                _bar(axis, x + 0.2, entry["ensemble"], edgecolor=colour, color=colour)
            _ceiling(axis, lds)
            axis.set_xlim(-0.6, len(names) - 0.4)
            axis.axhline(0, color="black", linewidth=0.8)
            slanted: dict[str, Any] = {"rotation": 55, "ha": "right", "rotation_mode": "anchor"}
            axis.set_xticks(range(len(names)), names, fontsize=7, **slanted)
            axis.tick_params(axis="x", length=0, pad=2)
            axis.set_title(title(task, results[task]), fontsize=9)
        for axis in axes[::5]:
            axis.set_ylabel("LDS")
        axes[0].bar(0, 0, edgecolor=GREY, color="white", hatch="/////", label="one model")
        axes[0].bar(0, 0, color=GREY, label="ensemble")
        legend(figure, axes)
    return figure


def _bar(
    axis: Axes, x: float, value: Sequence[float] | None, width: float = 0.36, **look: Any
) -> None:
    """A bar with its interval; nothing where there is no value."""
    if value is not None:
        axis.bar(x, value[0], width, linewidth=0.8, **look)
        error = np.abs(np.array(value[1:]) - value[0])[:, None]
        axis.errorbar(x, value[0], error, color="black", capsize=1.5, elinewidth=0.8, capthick=0.8)


def _ceiling(axis: Axes, entries: Found) -> None:
    known = [e["ceiling"] for e in entries.values() if e["ceiling"] is not None]
    if known:
        axis.axhline(max(known), color=GREY, linestyle="--", linewidth=1, label="noise ceiling")


def average_bars(results: Results, shown: Sequence[str]) -> Figure:
    """LDS of one model by influence functions, FastSource and SOURCE."""
    with panels(1, 1, (1.4 + 0.58 * len(shown), 2.4)) as (figure, (axis,)):
        for k, name in enumerate(AVERAGED):
            for x, task in enumerate(shown):
                value = results[task]["lds"][name]["single"]
                _bar(axis, x + 0.27 * (k - 1), value, 0.24, color=LOOKS[name][0], label=name)
        axis.axhline(0, color="black", linewidth=0.8)
        titles = [title(t, results[t]) for t in shown]
        axis.set_xticks(range(len(shown)), titles, rotation=25, ha="right", rotation_mode="anchor")
        axis.tick_params(axis="x", length=0)
        axis.set_ylabel("LDS, one model")
        legend(figure, [axis])
    return figure


def over(results: Results, shown: Sequence[str], part: str) -> Figure:
    """LDS of one model over α or epochs: a part of the results."""
    with panels(len(shown), 3, (2.8, 2.3)) as (figure, axes):
        for axis, task in zip(axes, shown, strict=True):
            by_column = over_values(results[task], part)
            columns = sorted(by_column)
            names = [n for n in LOOKS if any(n in by_column[c] for c in columns if c != 0.5)]
            for k, name in enumerate(names):
                own = [
                    (x, by_column[c][name]) for x, c in enumerate(columns) if name in by_column[c]
                ]
                found = np.array([e["single"] or e["ensemble"] for _, e in own])
                where = np.array([x for x, _ in own]) + 0.05 * (k - (len(names) - 1) / 2)
                error = np.abs(found[:, 1:].T - found[:, 0])
                axis.errorbar(
                    where,
                    found[:, 0],
                    error,
                    label=SHORT.get(name, name),
                    capsize=1.5,
                    elinewidth=0.8,
                    **look(name),
                )
            ceilings = [
                (x, e["ceiling"])
                for x, c in enumerate(columns)
                for e in [next(iter(by_column[c].values()))]
                if e["ceiling"] is not None
            ]
            if ceilings:
                x, y = zip(*ceilings, strict=True)
                axis.plot(x, y, color=GREY, linestyle="--", linewidth=1, label="noise ceiling")
            axis.axhline(0, color="black", linewidth=0.8)
            epochs = part == "epochs"
            texts = [LAST_ALPHA if c == 1 and not epochs else format(c, "g") for c in columns]
            axis.set_xticks(range(len(columns)), texts)
            axis.set_xlabel("epochs" if epochs else "share of the data in a subset, α")
            axis.set_title(title(task, results[task]), fontsize=9)
        axes[0].set_ylabel("LDS")
        legend(figure, axes)
    return figure


def removal(results: Results, shown: Sequence[str]) -> Figure:
    """Share of the queries that flip after at most k examples were removed."""
    with panels(len(shown), 4, (2.25, 2.3)) as (figure, axes):
        for axis, task in zip(axes, shown, strict=True):
            r = results[task]["removal"]
            for name, shares in r["flipped"].items():
                floor = {"linestyle": ":", "marker": "x"} if name == "Random" else {}
                drawn = look(name) | floor
                low, high = np.array(r["interval"][name]).T
                axis.fill_between(r["k"], low, high, color=drawn["color"], alpha=0.1, linewidth=0)
                axis.plot(r["k"], shares, label=name, **drawn)
            axis.set_xscale("log")
            axis.minorticks_off()
            ticks = _apart(r["k"])
            axis.set_xticks(ticks, [str(k) for k in ticks], fontsize=7)
            top = max(high for bands in r["interval"].values() for _, high in bands)
            axis.set_ylim(-0.02 * top, 1.04 * top)
            axis.set_xlabel("examples removed, at most")
            axis.set_title(title(task, results[task]), fontsize=9)
        axes[0].set_ylabel("share of queries flipped")
        legend(figure, axes)
    return figure


def _apart(counts: Sequence[int]) -> list[int]:
    """Those that leave room for their labels on a logarithmic axis: the ends, and what lies apart
    from both neighbours."""
    room = 0.15 * np.log(counts[-1] / counts[0])
    found = [counts[0]]
    for count in counts[1:-1]:
        if min(np.log(count / found[-1]), np.log(counts[-1] / count)) >= room:
            found.append(count)
    return [*found, counts[-1]] if len(counts) > 1 else found


# --- influence against unrolling, on two parameters ---------------------------------------------


@dataclass(frozen=True)
class Shift:
    """What leaving one example out does to two weights, really and as predicted.

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
    """x ↦ w · x; w begins at the same place for every seed."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Linear(2, 1, bias=False)
        nn.init.constant_(self.weights.weight, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.weights(x)
        return out


def two_weights(seeds: int = 300) -> Shift:
    """Least squares stopped early: one direction of high curvature, one of low.

    Queries are the unit vectors and the measurement is the output, so a score is what an example
    does to a weight.
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
    """Left: trainings and optima, with the example and without. Right: what leaving it out does."""
    with panels(2, 2, (3.7, 3.0)) as (figure, (axis, changes)):
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


# --- examples ------------------------------------------------------------------------------------


def examples(
    found: Found, experiment: Experiment, train: TensorDataset, query: TensorDataset
) -> Figure:
    """For a few queries, by method: the most helpful images, and the most harmful ones."""
    kept: Mapping[str, Any] = found["panels"]["methods"]
    count = min(QUERIES, *(len(rows) for rows in kept.values()))
    across = len(next(iter(kept.values()))[0]["helpful"])
    wide, high = 2 * across + 3.0, len(kept) * PITCH + 0.55  # in images
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(0.52 * wide, 0.52 * high * count))
        axes = figure.subplots(count, 1, squeeze=False).ravel()
        figure.subplots_adjust(0, 0, 1, 1, hspace=0)
        for row, axis in enumerate(axes):
            axis.set(xlim=(-2.7, wide - 2.7), ylim=(high - 0.5, -0.5))
            axis.axis("off")
            _picture(axis, experiment, query, row, -2.55, (high - 2.2) / 2, 1.15, "query:\n")
            for left, text, colour in (
                (0, "most helpful", BLUE),
                (across + 0.15, "most harmful", RED),
            ):
                axis.text(left + across / 2, -0.15, text, ha="center", fontsize=8, color=colour)
            for k, (name, rows) in enumerate(kept.items()):
                top = k * PITCH
                axis.text(-0.1, top + 0.45, name, ha="right", va="center", fontsize=7.5)
                for side, start in (("helpful", 0.0), ("harmful", across + 0.15)):
                    for place, index in enumerate(rows[row][side]):
                        _picture(axis, experiment, train, index, start + place, top, 0.94)
    return figure


def _picture(
    axis: Axes,
    experiment: Experiment,
    images: TensorDataset,
    index: int,
    left: float,
    top: float,
    size: float,
    before: str = "",
) -> None:
    x, y = images[index]
    extent = (left, left + size, top + size, top)
    axis.imshow(
        picture(x, experiment.name), extent=extent, cmap="gray_r", vmin=0, vmax=1, aspect="auto"
    )
    axis.text(
        left + size / 2,
        top + size + 0.02,
        before + class_name(int(y), experiment.name),
        ha="center",
        va="top",
        fontsize=5.5 if not before else 6.5,
    )


def picture(x: Tensor, task: str) -> NDArray[Any]:
    """An input as one draws it: (h, w) or (h, w, 3), from 0 to 1."""
    if x.ndim == 1:
        side = round(len(x) ** 0.5)
        return x.reshape(side, side).numpy()
    if task == "cifar10":
        mean, std = (torch.tensor(c).view(3, 1, 1) for c in (data.CIFAR10_MEAN, data.CIFAR10_STD))
        x = x * std + mean
    else:
        x = (x + 1) / 2
    return x.clamp(0, 1).movedim(0, -1).numpy()


def class_name(label: int, task: str) -> str:
    names = {"fashion_mnist": GARMENTS, "cifar10": CIFAR10, "pacs": data.OBJECTS}.get(task)
    return names[label] if names else str(label)
