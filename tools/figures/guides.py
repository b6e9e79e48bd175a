"""Draw the figures of the guide, from committed results: python -m tools.figures.guides [NAME ...]

Each function draws the figure docs/figures/guide-NAME.png of the page that has its name.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from torch import nn

import whence
from tools import scale as scaling
from whence.demo import CLASSES, network, pictures, recipe_for

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "docs/figures"
BLUE, ORANGE, GREY, GREEN = "#0072B2", "#D55E00", "#888888", "#009E73"
QUERY = 222  # of the demo: a shirt that is read as a bag
DRAWN: dict[str, Callable[[], Any]] = {}


def drawn(function: Callable[[], Any]) -> Callable[[], Any]:
    DRAWN[function.__name__.replace("_", "-")] = function
    return function


def results(path: str) -> Any:
    return json.loads((ROOT / path).read_text())


def axes(width: float = 7.2, height: float = 2.8, **options: Any) -> tuple[Any, Any]:
    figure, places = plt.subplots(figsize=(width, height), **options)
    for axis in np.atleast_1d(places):
        axis.spines[["top", "right"]].set_visible(False)
    return figure, places


def boxes(rows: Sequence[Sequence[str]], notes: Sequence[str], colour: str = BLUE) -> Any:
    """Columns of boxes with arrows from each column to the next, and a note above each."""
    figure, axis = plt.subplots(figsize=(7.2, 2.5))
    centres = []
    for column, (texts, note) in enumerate(zip(rows, notes, strict=True)):
        axis.text(column, 1.35, note, ha="center", fontsize=8.5, color=GREY)
        places = np.linspace(1, -1, len(texts)) if len(texts) > 1 else np.zeros(1)
        centres.append(places)
        for place, text in zip(places, texts, strict=True):
            edge = {"boxstyle": "round,pad=0.45", "facecolor": "white", "edgecolor": colour}
            axis.text(column, place, text, ha="center", va="center", fontsize=8.5, bbox=edge)
    for column, (left, right) in enumerate(pairwise(centres)):
        for start in left:
            for end in right:
                arrow = {"arrowstyle": "-|>", "color": GREY, "linewidth": 0.8}
                ends: dict[str, Any] = {
                    "xy": (column + 0.68, end),
                    "xytext": (column + 0.32, start),
                }
                axis.annotate("", **ends, arrowprops=arrow)
    axis.set(xlim=(-0.5, len(rows) - 0.5), ylim=(-1.4, 1.7))
    axis.axis("off")
    return figure


@drawn
def record() -> Any:
    """A real training of 128 updates, recorded: learning rates, checkpoints and three segments."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    updates, checkpoints = 128, 6
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=updates)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        options: dict[str, Any] = {"checkpoints": checkpoints, "total_steps": updates, "size": 64}
        with whence.Recorder(path, model, optimizer, **options):
            for _ in range(updates):
                model(torch.ones(8, 4)).sum().backward()
                optimizer.step()
                schedule.step()
        run = whence.Run.open(path)
        rates = np.asarray(run.learning_rates)[:, 0]
        saved = [checkpoint.step for checkpoint in run.checkpoints]
    figure, axis = axes()
    axis.plot(range(1, updates + 1), rates, color=BLUE, linewidth=2)
    for k, step in enumerate(saved):
        axis.axvline(step, color=ORANGE, linewidth=1.4, linestyle="--")
        axis.text(step, 0.113, f"{step}", ha="center", fontsize=8, color=ORANGE)
        if k % 2:
            first = saved[k - 2] if k > 1 else 0
            axis.axvspan(first, step, color=GREY, alpha=(0.05, 0.12, 0.05)[k // 2], linewidth=0)
            axis.text(
                (3 * first + step) / 4, 0.006, f"segment {k // 2 + 1}", ha="center", fontsize=8
            )
    axis.set(xlabel="update", ylabel="learning rate", xlim=(0, updates + 1), ylim=(0, 0.112))
    return figure


@drawn
def attribute() -> Any:
    """All scores of one query of the demo, sorted: a few examples carry most of them."""
    data = pictures(0)
    recipe = recipe_for(data.train)
    with tempfile.TemporaryDirectory() as folder:
        run = recipe.run(0, Path(folder) / "run", device="cpu", progress=False)
        study = whence.Study(network(), recipe.task, data.train, run)
        query = torch.utils.data.Subset(data.query, [QUERY])
        values = np.sort(whence.Source().attribute(study, query, progress=False).values[0])
    label = CLASSES[int(data.query[QUERY][1])]
    figure, axis = axes()
    places = np.arange(len(values))
    axis.fill_between(places, values, where=values > 0, color=BLUE, linewidth=0)
    axis.fill_between(places, values, where=values < 0, color=ORANGE, linewidth=0)
    axis.axhline(0, color=GREY, linewidth=0.8)
    axis.text(60, 0.6 * values.min(), "harmful(query, k)", color=ORANGE, fontsize=9)
    axis.text(1440, 0.6 * values.max(), "helpful(query, k)", color=BLUE, fontsize=9, ha="right")
    axis.set(
        xlabel=f"1,500 training pictures, by their score for one {label}", ylabel="score, logits"
    )
    return figure


@drawn
def tasks() -> Any:
    """The measurements of `Classification` over the probability of the correct class of two."""
    p = torch.linspace(0.005, 0.995, 200)
    logits = torch.stack([torch.zeros_like(p), (p / (1 - p)).log()], 1)
    batch = (logits, torch.ones(len(p), dtype=torch.long))
    figure, axis = axes()
    for name, colour, style in (
        ("margin", BLUE, "-"),
        ("log_prob", GREEN, "--"),
        ("loss", ORANGE, ":"),
    ):
        values = whence.Classification(name).measurements(logits, batch)
        axis.plot(p, values, color=colour, linestyle=style, linewidth=2, label=f'"{name}"')
    axis.axhline(0, color=GREY, linewidth=0.8)
    axis.axvline(0.5, color=GREY, linewidth=0.8, linestyle=":")
    axis.set(xlabel="probability of the correct class, of two", ylabel="measurement", xlim=(0, 1))
    axis.legend(frameon=False)
    return figure


@drawn
def several_rows() -> Any:
    """How the rows of an example become one score."""
    rows = ["row 1, weight w₁", "row 2, weight w₂", "row 3, weight w₃"]
    columns = [["one RowSet"], rows, ["Σ wᵣ · loss(row r)"], ["one score"]]
    return boxes(columns, ["an example", "rows of the model's batch", "its loss", "for each query"])


@drawn
def layers() -> Any:
    """LDS by the layers that are tracked, on a small GPT-2."""
    (row,) = results("experiments/results/layers.json")["tasks"]["wikitext2-quick"]
    kinds = ["matrices", "matrices and norms", "matrices and embeddings", "all"]
    shown = ["matrices", "with norms", "with embeddings", "all\n(default)"]
    figure, axis = axes()
    for k, (method, colour) in enumerate((("Source", BLUE), ("TracIn", ORANGE))):
        cells = [row["methods"][method][kind] for kind in kinds]
        lds, ends = np.array([c["lds"] for c in cells]), np.array([c["interval"] for c in cells]).T
        places = np.arange(len(kinds)) + 0.4 * k - 0.2
        off = [lds - ends[0], ends[1] - lds]
        error = {"elinewidth": 1, "ecolor": "#333333", "capsize": 2}
        hatch = "" if k == 0 else "//"
        axis.bar(
            places, lds, 0.38, yerr=off, error_kw=error, color=colour, label=method, hatch=hatch
        )
    axis.set_xticks(range(len(kinds)), shown, fontsize=9)
    axis.set(ylabel="LDS")
    axis.legend(frameon=False)
    return figure


@drawn
def retrain() -> Any:
    """Seconds of one of 500 trainings."""
    seconds = results("benchmarks/results/retraining_cpu.json")["digits, float32"]["seconds_each"]
    names = {"DataLoader": "a loop with a DataLoader", "tensors": "a loop over tensors"}
    figure, axis = axes(height=1.8)
    shown = [names.get(name, "whence, 64 at once") for name in seconds]
    bars = axis.barh(shown, list(seconds.values()), color=[GREY, GREY, BLUE], height=0.6)
    axis.bar_label(bars, [f" {value:.2f} s" for value in seconds.values()], fontsize=9)
    axis.set(xlabel="seconds for one of 500 trainings on digits")
    axis.invert_yaxis()
    return figure


@drawn
def benchmark() -> Any:
    """A published truth: what `whence score-against` compares with."""
    board = results("experiments/results/leaderboard.json")["protocols"]["expected-0.5"]
    methods = {k: v for k, v in board["fashion_mnist"]["methods"].items() if v.get("lds")}
    names = sorted(methods, key=lambda name: methods[name]["lds"][0])
    lds = np.array([methods[name]["lds"] for name in names])
    figure, axis = axes(height=0.8 + 0.22 * len(names))
    error = {"xerr": [lds[:, 0] - lds[:, 1], lds[:, 2] - lds[:, 0]], "linestyle": "none"}
    axis.errorbar(lds[:, 0], range(len(names)), marker="o", color=BLUE, capsize=2, **error)
    ceiling = next(v["ceiling"] for v in methods.values() if v.get("ceiling"))
    axis.axvline(ceiling, color=GREY, linestyle="--", linewidth=1)
    axis.text(ceiling, 0, "ceiling ", color=GREY, ha="right", fontsize=8.5)
    axis.set_yticks(range(len(names)), names, fontsize=9)
    axis.set(xlabel="LDS on FashionMNIST, with its 95 % interval")
    return figure


@drawn
def store() -> Any:
    """LDS over the bytes that a store holds for an example."""
    rows = results("experiments/results/store_digits.json")["rows"]
    lines = {
        ("eigenbasis", "full"): ("eigenbasis, float32", BLUE, "o-"),
        ("eigenbasis", "float16"): ("eigenbasis, float16", GREEN, "s--"),
        ("eigenbasis", "int8"): ("eigenbasis, int8", ORANGE, "^:"),
        ("random", "full"): ("random projection, float32", GREY, "x-"),
    }
    figure, axis = axes()
    for key, (label, colour, style) in lines.items():
        chosen = [r for r in rows if (r["projection"], r["rows"]) == key]
        heights = [r["lds"][0] for r in chosen]
        axis.plot([r["bytes"] for r in chosen], heights, style, color=colour, label=label)
    axis.set(xscale="log", xlabel="bytes of a row", ylabel="LDS")
    axis.legend(frameon=False, fontsize=9, loc="lower right")
    return figure


@drawn
def cli() -> Any:
    """From a training to an answer, by commands."""
    answers = ["whence top, card", "whence report", "whence explore", "whence whatif"]
    columns = [["whence init"], ["study.py"], ["whence attribute"], answers]
    notes = ["your training", "what was trained", "scores/", "answers"]
    return boxes(columns, notes)


@drawn
def distributed() -> Any:
    """The stages of one attribution in one process and in two."""
    case = results("benchmarks/results/several_processes.json")["gpt, influence"]
    stages = list(case["one"][0]["stages"])
    figure, axis = axes(height=2.2)
    for name, ranks in (("one process", case["one"]), ("two processes", case["two"])):
        left = 0.0
        for stage, colour in zip(stages, (GREY, BLUE, "#56B4E9", GREEN, ORANGE), strict=True):
            seconds = max(rank["stages"][stage] for rank in ranks)
            label = stage if name == "one process" else None
            axis.barh(name, seconds, left=left, color=colour, height=0.6, label=label)
            left += seconds
    axis.invert_yaxis()
    axis.set(xlabel="seconds, influence functions of a GPT, one core each")
    axis.legend(frameon=False, fontsize=8.5, ncols=5, loc="lower center", bbox_to_anchor=(0.45, 1))
    return figure


def against_measured(pairs: Sequence[tuple[str, float, float]], unit: str) -> Any:
    """Predicted over measured, with the line where they are equal."""
    figure, axis = axes(5.2, 3.6)
    kinds = {"SOURCE": (BLUE, "o"), "FastSource": (GREEN, "D"), "influence": (ORANGE, "s")}
    for kind, (colour, marker) in (kinds | {"TracIn": (GREY, "^")}).items():
        chosen = [(measured, guess) for what, guess, measured in pairs if what.startswith(kind)]
        if chosen:
            x, y = zip(*chosen, strict=True)
            axis.scatter(x, y, color=colour, marker=marker, label=kind, s=28, alpha=0.85)
    ends = [0.7 * min(min(p[1:]) for p in pairs), 1.4 * max(max(p[1:]) for p in pairs)]
    axis.plot(ends, ends, color=GREY, linewidth=0.8)
    axis.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axis.set(xlabel=f"measured {unit}", ylabel=f"estimated {unit}")
    axis.legend(frameon=False, fontsize=9)
    return figure


@drawn
def cost() -> Any:
    cases = results("benchmarks/results/estimated.json")["cases"]
    return against_measured([(what, *c["operations"]) for what, c in cases.items()], "operations")


@drawn
def scale() -> Any:
    return against_measured(scaling.comparisons(), "seconds on one GPU")


@drawn
def trust() -> Any:
    """The attempts of tools.faults to break a promise."""
    rows = results("experiments/results/faults.json")["rows"]
    names = list(rows)
    attempts = [rows[name]["attempts"] for name in names]
    figure, axis = axes()
    bars = axis.barh(names, attempts, color=BLUE, height=0.6)
    texts = [
        f" {rows[n]['attempts']} attempts, {rows[n]['failures']} broke a promise" for n in names
    ]
    axis.bar_label(bars, texts, fontsize=8.5)
    axis.set(xlim=(0, 1.6 * max(attempts)), xlabel="attempts at random")
    axis.invert_yaxis()
    return figure


@drawn
def coming_from() -> Any:
    """Seconds of influence functions by EK-FAC, in whence and in kronfluence."""
    cases = results("benchmarks/results/against_kronfluence.json")
    names = {"mlp-full": "MLP", "gpt-full": "GPT", "resnet9-full": "ResNet-9"}
    figure, axis = axes(height=2.4)
    for k, (library, colour) in enumerate((("whence", BLUE), ("kronfluence", GREY))):
        seconds = [sum(cases[name][library].values()) for name in names]
        places = np.arange(len(names)) + 0.4 * k - 0.2
        bars = axis.bar(places, seconds, 0.38, color=colour, label=library, hatch="//" if k else "")
        axis.bar_label(bars, [f"{value:.0f} s" for value in seconds], fontsize=8.5)
    axis.set_xticks(range(len(names)), list(names.values()))
    axis.set(ylabel="seconds, one core")
    axis.legend(frameon=False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", choices=[[], *DRAWN])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for name in parser.parse_args().names or DRAWN:
        figure = DRAWN[name]()
        figure.tight_layout()
        figure.savefig(FIGURES / f"guide-{name}.png", dpi=140)
        plt.close(figure)


if __name__ == "__main__":
    main()
