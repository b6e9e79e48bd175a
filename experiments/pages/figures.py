"""Figures of docs/reproduce.md, in the paper's layout.

Each function takes all results and the tasks to show, and returns a matplotlib Figure. A method has
the same colour, line and marker in all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from torch import Tensor
from torch.utils.data import TensorDataset

from experiments.pages import ours
from experiments.pages.tables import Result, baselines, over_values, title
from experiments.tasks import TASKS, Experiment, data
from experiments.tasks.forms import BASELINES, BEST, INFLUENCE, PUBLISHED
from whence.demo import CLASSES as GARMENTS
from whence.evaluate.plots import COLOURS, GREY, LINES, MARKERS, STYLE

Floats = NDArray[np.float64]
Results = Mapping[str, Result]

BLUE, RED, GREEN, PINK, YELLOW, SKY, SILVER = COLOURS
EXACT_FORM = "SOURCE, exact"  # for Adam, next to the paper's form
LOOKS = {
    "RepSim": (SILVER, 0),
    "TracIn": (SKY, 1),
    "TRAK": (GREEN, 2),
    "influence": (YELLOW, 3),
    "FastSource": (PINK, 4),
    "SOURCE, L = 1": (RED, 5),
    "SOURCE": (BLUE, 6),
    EXACT_FORM: ("#003A66", 6),
    'influence (λ = "source")': ("#8A6D00", 3),
    "influence, conjugate gradients": ("#8A6D00", 3),
    "Random": (GREY, 0),
}
FORM_LOOKS = {  # colour and marker of the forms in `experiments.pages.ours.SHOWN`
    INFLUENCE: (YELLOW, "v"),
    PUBLISHED: (BLUE, "o"),
    "influence, coupled": (YELLOW, "v"),
    None: (BLUE, "o"),
    BEST: (GREEN, "D"),
    "combined, 20 retrainings": (RED, "s"),
}
SHORT = {
    'influence (λ = "source")': 'influence, λ = "source"',
    "influence, conjugate gradients": "influence, exact inverse",
}
LAST_ALPHA = "1 − 1/N"
AVERAGED = ("influence", "FastSource", "SOURCE")
FOLDER = "figures/reproduce"  # below docs/
QUERIES = 2  # in a panel of examples
PITCH = 1.22  # from one row of images to the next, in heights of an image
CIFAR10 = ("plane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def save(figure: Figure, path: Path) -> None:
    """Save as a PNG of 128 colours, a third of the usual size."""
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, dpi=120, format="png")
    with Image.open(buffer) as image:
        reduced = image.convert("RGB").quantize(
            128, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE
        )
    reduced.save(path, optimize=True)


@contextmanager
def axes_grid(
    count: int, columns: int, size: tuple[float, float]
) -> Iterator[tuple[Figure, list[Axes]]]:
    """A figure with `count` axes in our style, each of `size` inches."""
    columns = min(columns, count)
    rows = -(-count // columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(size[0] * columns, size[1] * rows + 0.4), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False).ravel()
        for axis in axes[count:]:
            axis.remove()
        yield figure, list(axes[:count])


def legend(figure: Figure, axes: Sequence[Axes], width: float = 1.35) -> None:
    """One legend for all axes: above several, to the right of one; the ceiling comes last. An entry
    takes `width` inches."""
    handles: dict[str, Any] = {}
    for axis in axes:
        handles |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    for last in ("Random", "noise ceiling"):
        if last in handles:
            handles[last] = handles.pop(last)
    columns = max(1, int(figure.get_figwidth() / width))
    if len(axes) > 1 or len(handles) <= columns:
        figure.legend(handles.values(), handles, loc="outside upper center", ncols=columns)
        return
    figure.set_figwidth(figure.get_figwidth() + 1.6)
    figure.legend(handles.values(), handles, loc="outside right center")


def look(method: str) -> dict[str, Any]:
    colour, k = LOOKS[method]
    return {"color": colour, "linestyle": LINES[k], "marker": MARKERS[k]}


def lds_bars(results: Results, tasks: Sequence[str]) -> Figure:
    """LDS at α = ½ of the paper's five methods, one model next to the ensemble, a panel per task.
    Tasks trained with Adam also show SOURCE's other forms."""
    with axes_grid(len(tasks), 5, (1.72, 2.15)) as (figure, axes):
        for axis, task in zip(axes, tasks, strict=True):
            experiment, lds = TASKS[task], results[task]["lds"]
            names = [*baselines(experiment), experiment.source]
            names += [name for name in (EXACT_FORM,) if name in experiment.methods]
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


def _ceiling(axis: Axes, entries: Result) -> None:
    ceilings = [e["ceiling"] for e in entries.values() if e["ceiling"] is not None]
    if ceilings:
        axis.axhline(max(ceilings), color=GREY, linestyle="--", linewidth=1, label="noise ceiling")


def average_bars(results: Results, tasks: Sequence[str]) -> Figure:
    """LDS of one model by influence functions, FastSource and SOURCE."""
    with axes_grid(1, 1, (1.4 + 0.58 * len(tasks), 2.4)) as (figure, (axis,)):
        for k, name in enumerate(AVERAGED):
            for x, task in enumerate(tasks):
                value = results[task]["lds"][name]["single"]
                _bar(axis, x + 0.27 * (k - 1), value, 0.24, color=LOOKS[name][0], label=name)
        axis.axhline(0, color="black", linewidth=0.8)
        titles = [title(t, results[t]) for t in tasks]
        axis.set_xticks(range(len(tasks)), titles, rotation=25, ha="right", rotation_mode="anchor")
        axis.tick_params(axis="x", length=0)
        axis.set_ylabel("LDS, one model")
        legend(figure, [axis])
    return figure


def beside(results: Mapping[str, Sequence[Any]], tasks: Sequence[str]) -> Figure:
    """Our forms (filled) and the published ones (hollow): a line for each task, the best on the
    right; one model on the left, the ensemble on the right."""
    names = ours.columns(results)
    size = (3.9, 0.55 + 0.3 * len(tasks))
    with axes_grid(2, 2, size) as (figure, axes):
        for axis, (kind, word) in zip(axes, ours.KINDS.items(), strict=True):
            for y, task in enumerate(tasks):
                entry = ours.shown(results[task])
                axis.axhline(y, color="#DDDDDD", linewidth=0.6, zorder=0)
                known = ours.ceiling(entry)
                if known is not None:
                    where = [y - 0.36, y + 0.36]
                    axis.plot([known] * 2, where, color=GREY, linewidth=2, label="noise ceiling")
                for k, name in enumerate(names):
                    value = entry["forms"].get(ours.form(task, name), {}).get(kind)
                    if value is None:
                        continue
                    colour, marker = FORM_LOOKS[name]
                    hollow = name in BASELINES
                    axis.errorbar(
                        value[0],
                        y + 0.09 * (k - (len(names) - 1) / 2),
                        xerr=np.abs(np.array(value[1:]) - value[0])[:, None],
                        fmt=marker,
                        color=colour,
                        markerfacecolor="white" if hollow else colour,
                        elinewidth=0.8,
                        label=names[name].replace("`", ""),
                    )
            axis.set_ylim(len(tasks) - 0.5, -0.5)
            axis.set_xlim(left=min(0.0, axis.get_xlim()[0]))
            axis.set_xlabel(f"LDS, {word}")
            axis.tick_params(axis="y", length=0)
        labels = [
            title(task) + (" †" if ours.shown(results[task])["chosen_on"] else "") for task in tasks
        ]
        axes[0].set_yticks(range(len(tasks)), labels)
        axes[1].set_yticks(range(len(tasks)), [""] * len(tasks))
        legend(figure, axes, 1.9)
    return figure


def over(results: Results, tasks: Sequence[str], part: str) -> Figure:
    """LDS of one model over α or epochs: a part of the results."""
    with axes_grid(len(tasks), 3, (2.8, 2.3)) as (figure, axes):
        for axis, task in zip(axes, tasks, strict=True):
            by_column = over_values(results[task], part)
            columns = sorted(by_column)
            names = [n for n in LOOKS if any(n in by_column[c] for c in columns if c != 0.5)]
            for k, name in enumerate(names):
                entries = [
                    (x, by_column[c][name]) for x, c in enumerate(columns) if name in by_column[c]
                ]
                values = np.array([e["single"] or e["ensemble"] for _, e in entries])
                where = np.array([x for x, _ in entries]) + 0.05 * (k - (len(names) - 1) / 2)
                error = np.abs(values[:, 1:].T - values[:, 0])
                axis.errorbar(
                    where,
                    values[:, 0],
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


def removal(results: Results, tasks: Sequence[str]) -> Figure:
    """Share of the queries that flip after at most k examples were removed."""
    with axes_grid(len(tasks), 4, (2.25, 2.3)) as (figure, axes):
        for axis, task in zip(axes, tasks, strict=True):
            result = results[task]["removal"]
            for name, shares in result["flipped"].items():
                dotted = {"linestyle": ":", "marker": "x"} if name == "Random" else {}
                style = look(name) | dotted
                low, high = np.array(result["interval"][name]).T
                axis.fill_between(
                    result["k"], low, high, color=style["color"], alpha=0.1, linewidth=0
                )
                axis.plot(result["k"], shares, label=name, **style)
            axis.set_xscale("log")
            axis.minorticks_off()
            ticks = _apart(result["k"])
            axis.set_xticks(ticks, [str(k) for k in ticks], fontsize=7)
            top = max(high for bands in result["interval"].values() for _, high in bands)
            axis.set_ylim(-0.02 * top, 1.04 * top)
            axis.set_xlabel("examples removed, at most")
            axis.set_title(title(task, results[task]), fontsize=9)
        axes[0].set_ylabel("share of queries flipped")
        legend(figure, axes)
    return figure


def _apart(counts: Sequence[int]) -> list[int]:
    """The counts whose labels do not overlap on a logarithmic axis; the ends always stay."""
    room = 0.15 * np.log(counts[-1] / counts[0])
    ticks = [counts[0]]
    for count in counts[1:-1]:
        if min(np.log(count / ticks[-1]), np.log(counts[-1] / count)) >= room:
            ticks.append(count)
    return [*ticks, counts[-1]] if len(counts) > 1 else ticks


# --- examples ------------------------------------------------------------------------------------


def examples(
    result: Result, experiment: Experiment, train: TensorDataset, query: TensorDataset
) -> Figure:
    """For a few queries, by method: the most helpful images, and the most harmful ones."""
    methods: Mapping[str, Any] = result["panels"]["methods"]
    count = min(QUERIES, *(len(rows) for rows in methods.values()))
    across = len(next(iter(methods.values()))[0]["helpful"])
    wide, high = 2 * across + 3.0, len(methods) * PITCH + 0.55  # in images
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
            for k, (name, rows) in enumerate(methods.items()):
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
    """An input as an image: (h, w) or (h, w, 3), from 0 to 1."""
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
