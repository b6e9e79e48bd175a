"""Figures of judgements, one function each.

Every function returns a matplotlib Figure, and writes it where ``path`` is given (png, pdf or svg
by suffix). Colours are Okabe and Ito's, safe for the colour-blind, and never the only difference:
lines have markers, bars hatches. pyplot and its global state are left alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from whence.errors import InvalidInput, optional
from whence.table import one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from whence.evaluate.calibration import Calibration
    from whence.evaluate.lds import LDS
    from whence.evaluate.mislabeled import Mislabeled
    from whence.evaluate.removal import SubsetRemoval
    from whence.scores import Scores

StrPath = str | os.PathLike[str]
T = TypeVar("T")

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", "--", "-.", (0, (3, 1, 1, 1, 1, 1)), (0, (5, 1)), (0, (1, 1)), "-")
GREY = "#777777"
JOINT = {"equal-weight sum": "equal", "combination": "combined"}  # in the diagnostics of `combine`
MANY = 2000  # points above which a scatter becomes hexagons
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.labelsize": 9,
    "axes.titlesize": 10,
    "legend.fontsize": 8,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "lines.linewidth": 1.5,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "hatch.linewidth": 0.6,
    "pdf.fonttype": 42,
    "svg.hashsalt": "whence",  # the same figure, the same file
}


def plot_lds(
    results: Mapping[str, LDS], *, title: str | None = None, path: StrPath | None = None
) -> Figure:
    """Bars with 95 % intervals, one method each; where runs were given one by one, the mean of the
    single runs (hatched) next to their ensemble. The dashed line is the noise ceiling of the truth.
    """
    results = _named(results)
    both = any(result.single is not None for result in results.values())
    width = 0.36 if both else 0.6
    with _figure((1.9 + (0.8 if both else 0.6) * len(results), 3.0), path) as (fig, axis):

        def bar(x: float, result: LDS, **look: Any) -> None:
            error = np.abs(np.array(result.interval) - result.value)[:, None]
            axis.bar(x, result.value, 0.92 * width, **look)
            axis.errorbar(x, result.value, error, color="black", capsize=2.5, elinewidth=1)

        for k, result in enumerate(results.values()):
            colour = _look(k)["color"]
            look = {"color": colour, "edgecolor": colour, "label": "ensemble of runs" * both}
            bar(k + width / 2 * both, result, **look)
            if result.single is not None:
                look |= {"color": "white", "hatch": "////", "label": "single run"}
                bar(k - width / 2, result.single, **look)
        axis.axhline(0, color="black", linewidth=0.8)
        ceilings = [np.nan if f.ceiling is None else f.ceiling for f in results.values()]
        if not np.isnan(ceilings).all():  # steps, where methods were judged by different truths
            edges = np.arange(len(results) + 1) - 0.5
            axis.stairs(ceilings, edges, baseline=None, color=GREY, linestyle="--", label="ceiling")
        axis.set_xlim(-0.55, len(results) - 0.45)
        slanted = sum(map(len, results)) > 9 * len(results)
        axis.set_xticks(
            range(len(results)),
            results,
            rotation=30 if slanted else 0,
            ha="right" if slanted else "center",
            rotation_mode="anchor" if slanted else "default",
        )
        axis.tick_params(axis="x", length=0)
        axis.set_ylabel("LDS (rank correlation)")
        _finish(fig, axis, title)
    return fig


def plot_lds_over_alpha(
    results: Mapping[str, Sequence[LDS]], *, title: str | None = None, path: StrPath | None = None
) -> Figure:
    """LDS with 95 % intervals over the share α of the data that the subsets hold, a line for each
    method; the noise ceiling in grey."""
    results = _named(results)
    shares = sorted({result.alpha for series in results.values() for result in series})
    apart = 0.008 * (shares[-1] - shares[0])  # so that error bars stand next to each other
    ceilings: dict[float, float] = {}
    with _figure((4.6, 2.9), path) as (fig, axis):
        for k, (name, series) in enumerate(results.items()):
            ordered = sorted(series, key=lambda result: result.alpha)
            values = np.array([result.value for result in ordered])
            error = np.abs(np.array([result.interval for result in ordered]).T - values)
            x = np.array([result.alpha for result in ordered]) + apart * (
                k - (len(results) - 1) / 2
            )
            axis.errorbar(x, values, error, label=name, capsize=2, elinewidth=0.9, **_look(k))
            ceilings |= {f.alpha: f.ceiling for f in ordered if f.ceiling is not None}
        if ceilings:
            known = sorted(ceilings)
            heights = [ceilings[share] for share in known]
            axis.plot(known, heights, color=GREY, linestyle="--", linewidth=1, label="ceiling")
        axis.axhline(0, color="black", linewidth=0.8)
        axis.set_xticks(shares, [f"{share:.3g}" for share in shares])
        axis.set_xlabel("share of the training data in a subset, α")
        axis.set_ylabel("LDS (rank correlation)")
        _finish(fig, axis, title)
    return fig


def plot_removal(
    result: SubsetRemoval, *, title: str | None = None, path: StrPath | None = None
) -> Figure:
    """Share of queries that flipped after removing at most k examples, with 95 % bands; the random
    floor in grey."""
    with _figure((4.6, 2.9), path) as (fig, axis):
        for k, name in enumerate(result.margins):
            floor = {"color": GREY, "linestyle": ":", "marker": "x"} if name == "Random" else {}
            look = _look(k) | floor
            low, high = result.interval(name).T
            axis.fill_between(result.k, low, high, color=look["color"], alpha=0.12, linewidth=0)
            axis.plot(result.k, result.flipped(name), label=_drawn(name), **look)
        if result.k[-1] > 12 * result.k[0]:
            axis.set_xscale("log")
            axis.minorticks_off()
        axis.set_xticks(result.k, [f"{count:,}" for count in result.k])
        axis.set_ylim(-0.02, 1.02)
        axis.set_xlabel("training examples removed, at most")
        axis.set_ylabel(f"share of {len(result.queries)} queries flipped")
        _finish(fig, axis, title)
    return fig


def plot_mislabeled(
    results: Mapping[str, Mislabeled], *, title: str | None = None, path: StrPath | None = None
) -> Figure:
    """Share of the mislabelled examples found over the share of the data checked, most suspicious
    first; with the best possible curve, and that of luck."""
    results = _named(results)
    with _figure((5.6, 2.9), path) as (fig, axis):
        for k, (name, result) in enumerate(results.items()):
            checked = np.linspace(0, 100, result.examples + 1)
            axis.plot(
                checked,
                100 * result.found,
                label=f"{name} (AUC {result.roc_auc:.2f})",
                markevery=max(1, result.examples // 10),
                **_look(k),
            )
        share = 100 * result.flipped / result.examples
        axis.plot([0, share, 100], [0, 100, 100], color=GREY, linewidth=1, label="best possible")
        axis.plot([0, 100], [0, 100], color=GREY, linestyle=":", linewidth=1, label="luck")
        axis.set(xlim=(0, 100), ylim=(0, 102))
        axis.set_xlabel("training examples checked (%)")
        axis.set_ylabel("mislabelled examples found (%)")
        _finish(fig, axis, title)
    return fig


def plot_calibration(
    result: Calibration, *, title: str | None = None, path: StrPath | None = None
) -> Figure:
    """Real over predicted change of the measurement, a point for each query and subset (hexagons
    where there are many), with the line of slope 1 and the fitted one."""
    x, y = result.predicted.ravel(), result.real.ravel()
    far = [1.05 * float(np.quantile(np.abs(values), 0.998)) or 1.0 for values in (x, y)]
    unit = f" ({result.unit})" if result.unit else ""
    with _figure((4.6, 3.2), path) as (fig, axis):
        if 0.2 < far[0] / far[1] < 5:  # comparable: one scale for both
            far = [max(far)] * 2
            axis.set_box_aspect(1)
        if len(x) > MANY:
            extent = (-far[0], far[0], -far[1], far[1])
            hexagons = axis.hexbin(
                x, y, gridsize=40, extent=extent, mincnt=1, bins="log", cmap="Blues", linewidths=0.1
            )
            fig.colorbar(hexagons, ax=axis, label="pairs of query and subset", shrink=0.8)
        else:
            axis.plot(x, y, "o", color=COLOURS[0], markersize=3, alpha=0.4, markeredgewidth=0)
        reach = np.array([-far[0], far[0]])
        axis.plot(reach, reach, color="black", linestyle="--", linewidth=1, label="slope 1")
        fitted = f"slope {result.slope:.3g}, R² = {result.r2_line:.2f}"
        axis.plot(reach, result.slope * reach, color=COLOURS[1], label=fitted)
        axis.set(xlim=reach, ylim=(-far[1], far[1]))
        axis.set_xlabel(f"predicted change of the {result.measurement}{unit}")
        axis.set_ylabel(f"real change of the {result.measurement}{unit}")
        _finish(fig, axis, title or result.method, beside=False)
    return fig


def plot_combination(
    scores: Scores, *, title: str | None = None, path: StrPath | None = None
) -> Figure:
    """LDS with 95 % intervals of what `combine` weighed: each input with its weight, their
    equal-weight sum, and the combination, cross-validated. What was returned is filled."""
    about = scores.diagnostics.get("combination")
    if about is None:
        raise InvalidInput("scores have no combination in their diagnostics: use evaluate.combine")
    weights, inputs = about["weights"], about["inputs"]
    rows = {f"{name} (weight {weights[name]:.2g})": (name, lds) for name, lds in inputs.items()}
    rows |= {name: (name, about[key]) for name, key in JOINT.items()}
    with _figure((4.6, 1.2 + 0.3 * len(rows)), path) as (fig, axis):
        for k, (name, lds) in enumerate(rows.values()):
            error = np.abs(np.array(lds["interval"]) - lds["lds"])[:, None]
            face = COLOURS[0] if name == about["returned"] else "white"
            look: dict[str, Any] = _look(0) | {"linestyle": "none", "markerfacecolor": face}
            axis.errorbar(lds["lds"], k, xerr=error, elinewidth=1, capsize=2.5, **look)
        axis.set_yticks(range(len(rows)), list(_named(rows)))
        axis.set_ylim(len(rows) - 0.5, -0.5)
        axis.set_xlabel(f"LDS (rank correlation) on {about['subsets']} subsets")
        axis.set_ylabel("scores")
        _finish(fig, axis, title)
    return fig


@contextmanager
def _figure(size: tuple[float, float], path: StrPath | None) -> Iterator[tuple[Figure, Axes]]:
    """A figure with one axis, in our style; written to ``path`` at the end."""
    with optional("plots need matplotlib", "plots"):
        import matplotlib
        from matplotlib.figure import Figure
    suffix = "" if path is None else Path(path).suffix.lower()
    if path is not None and suffix not in (".png", ".pdf", ".svg"):
        raise InvalidInput(f"path={os.fspath(path)!r} must end in .png, .pdf or .svg")
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=size, layout="constrained")
        yield fig, fig.add_subplot()
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            undated = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}
            fig.savefig(path, dpi=200, metadata=undated.get(suffix))


def _finish(fig: Figure, axis: Axes, title: str | None, beside: bool = True) -> None:
    """Title, and a legend to the right of the axis, or above it."""
    if title:
        axis.set_title(title)
    handles, labels = axis.get_legend_handles_labels()
    shown = {label: handle for handle, label in zip(handles, labels, strict=True) if label}
    if "ceiling" in shown:  # after the methods
        shown["ceiling"] = shown.pop("ceiling")
    if shown:
        where: Any = "outside right upper" if beside else "outside upper center"
        fig.legend(shown.values(), shown, loc=where, ncols=1 if beside else 2)


def _look(k: int) -> dict[str, Any]:
    """Colour, line and marker of the k-th method."""
    return {
        "color": COLOURS[k % len(COLOURS)],
        "linestyle": LINES[k % len(LINES)],
        "marker": MARKERS[k % len(MARKERS)],
    }


def _named(results: Mapping[str, T]) -> dict[str, T]:
    """Results by the names to draw."""
    if not results:
        raise InvalidInput("results is empty: give at least one result, by the name of its method")
    return {_drawn(name): result for name, result in results.items()}


def _drawn(name: str) -> str:
    """A name that matplotlib draws as it is: it takes what is between $ for TeX."""
    return one_line(name).replace("$", r"\$")
