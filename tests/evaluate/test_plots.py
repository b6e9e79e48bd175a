"""Figures say what the results say; tables are well made in all three forms."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from whence.evaluate import (
    LDS,
    Comparison,
    Mislabeled,
    SubsetRemoval,
    calibration,
    combine,
    mislabeled,
)
from whence.report import (
    Table,
    plot_calibration,
    plot_combination,
    plot_lds,
    plot_lds_over_alpha,
    plot_mislabeled,
    plot_removal,
)
from whence.retrain import Truth
from whence.scores import Scores
from whence.table import estimate


def lds_of(value: float, alpha: float = 0.5, **more: Any) -> LDS:
    actual = LDS(
        value=value,
        interval=(value - 0.03, value + 0.02),
        per_query=np.full(9, value),
        ceiling=0.8,
        method="Source",
        queries=9,
        undefined=0,
        unranked=0,
        subsets=100,
        seeds=10,
        alpha=alpha,
        diverged=0,
        lost=0,
    )
    return replace(actual, **more)


def removal() -> SubsetRemoval:
    margins = {
        "Source": np.array([[-1.0, 1, 1, 1], [np.nan, -1, -1, 1]]),
        "Random": np.array([[1.0, 1, 1, 1], [1, -1, 1, 1]]),
    }
    return SubsetRemoval((10, 200), margins, np.arange(4), 6, (0, 1), (2, 3), 30, 0)


def suspicious() -> dict[str, Any]:
    random, flipped = np.random.default_rng(0), np.arange(100) < 20
    return {
        name: mislabeled(random.normal(size=100) + strength * flipped, flipped)
        for name, strength in (("Source", 2.0), ("TracIn", 1.0))
    }


def calibrated(queries: int, scale: float = 1.0) -> Any:
    random = np.random.default_rng(1)
    masks, values = random.random((30, 20)) < 0.5, random.normal(size=(queries, 20))
    measured = (masks @ values.T)[:, None] + random.normal(size=(30, 3, queries))
    truth = Truth(masks, measured, alpha=0.5, measurement="margin", unit="logits")
    return calibration(scale * values, truth)


def combined() -> Scores:
    random = np.random.default_rng(2)
    masks, values = random.random((30, 20)) < 0.5, random.normal(size=(4, 20))
    measured = (masks @ values.T)[:, None] + random.normal(size=(30, 3, 4))
    about: Any = {"measurement": "margin", "unit": "logits", "higher_is_better": True}
    truth = Truth(masks, measured, alpha=0.5, **about)
    inputs = {
        name: Scores(values + noise * random.normal(size=values.shape), method=name, **about)
        for name, noise in (("Source", 1.0), ("in $5$", 1.5))
    }
    return combine(inputs, truth)


ENSEMBLE = {"Source": lds_of(0.5, single=lds_of(0.4)), "TracIn": lds_of(0.2)}
SERIES = {"Source": [lds_of(0.5, 0.5), lds_of(0.6, 0.1)], "TracIn": [lds_of(0.2, 0.5)]}
PLOTS = {
    "lds": lambda **more: plot_lds(ENSEMBLE, **more),
    "alpha": lambda **more: plot_lds_over_alpha(SERIES, **more),
    "removal": lambda **more: plot_removal(removal(), **more),
    "mislabeled": lambda **more: plot_mislabeled(suspicious(), **more),
    "few": lambda **more: plot_calibration(calibrated(5), **more),
    "many": lambda **more: plot_calibration(calibrated(100), **more),
    "combination": lambda **more: plot_combination(combined(), **more),
    "unitless": lambda **more: plot_calibration(calibrated(5, 1000.0), **more),
}


@pytest.mark.parametrize("name", PLOTS)
def test_every_word_is_inside_the_figure(name: str) -> None:
    before = dict(matplotlib.rcParams)
    figure = PLOTS[name](title="A title")
    assert dict(matplotlib.rcParams) == before
    FigureCanvasAgg(figure).draw()
    drawn, axis = figure.get_tightbbox(), figure.axes[0]
    assert drawn.xmin >= 0 and drawn.ymin >= 0
    assert drawn.xmax <= figure.get_figwidth() and drawn.ymax <= figure.get_figheight()
    assert axis.get_title() == "A title" and axis.get_ylabel()
    assert axis.get_xlabel() or name == "lds"


@pytest.mark.parametrize(
    ("suffix", "start"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")]
)
@pytest.mark.parametrize("name", ["lds", "many"])
def test_the_same_figure_is_the_same_file(
    name: str, suffix: str, start: bytes, tmp_path: Path
) -> None:
    first, second = (tmp_path / folder / f"{name}.{suffix}" for folder in "ab")
    for path in (first, second):
        PLOTS[name](path=path)
    assert first.read_bytes().startswith(start) and first.read_bytes() == second.read_bytes()


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def test_bars_have_the_heights_of_the_scores() -> None:
    figure = plot_lds(ENSEMBLE)
    bars = [patch for patch in figure.axes[0].patches if isinstance(patch, Rectangle)]
    assert [bar.get_height() for bar in bars] == pytest.approx([0.5, 0.4, 0.2])
    assert legend(figure) == ["ensemble of runs", "single run", "ceiling"]
    alone = plot_lds({"Source": lds_of(0.5, ceiling=None)})
    assert legend(alone) == []


def test_lines_go_through_the_results() -> None:
    figure = plot_removal(removal())
    lines = {line.get_label(): line.get_ydata() for line in figure.axes[0].lines}
    np.testing.assert_allclose(lines["Source"], [0.25, 0.75])
    np.testing.assert_allclose(lines["Random"], [0.0, 0.25])
    assert figure.axes[0].get_xscale() == "log"
    actual = suspicious()
    curves = plot_mislabeled(actual)
    np.testing.assert_allclose(curves.axes[0].lines[0].get_ydata(), 100 * actual["Source"].found)
    assert legend(curves)[0] == f"Source (AUC {actual['Source'].roc_auc:.2f})"
    over = plot_lds_over_alpha(SERIES)
    np.testing.assert_allclose(over.axes[0].lines[0].get_ydata(), [0.6, 0.5])
    assert legend(over) == ["Source", "TracIn", "ceiling"]
    result = calibrated(5)
    slope = plot_calibration(result).axes[0].lines[-1]
    np.testing.assert_allclose(slope.get_ydata(), result.slope * slope.get_xdata())


def test_points_are_at_the_scores_of_what_was_weighed() -> None:
    scores = combined()
    about, axis = scores.diagnostics["combination"], plot_combination(scores).axes[0]
    every = [*about["inputs"].values(), about["equal"], about["combined"]]
    points = [line for line in axis.lines if line.get_marker() == "o"]
    assert [line.get_xdata()[0] for line in points] == [one["lds"] for one in every]
    labels = [label.get_text() for label in axis.get_yticklabels()]
    assert labels[0] == f"Source (weight {about['weights']['Source']:.2g})"
    assert labels[-1] == about["returned"] == "combination"
    filled = [line.get_markerfacecolor() != "white" for line in points]
    assert filled == [False, False, False, True]
    with pytest.raises(ValueError, match=r"use evaluate\.combine"):
        plot_combination(scores.with_values(scores.values, diagnostics={}))


def test_bad_input(tmp_path: Path) -> None:
    for plot in (plot_lds, plot_lds_over_alpha, plot_mislabeled):
        with pytest.raises(ValueError, match="results is empty"):
            plot({})
    with pytest.raises(ValueError, match=r"bars\.jpg' must end in \.png, \.pdf or \.svg"):
        plot_lds(ENSEMBLE, path=tmp_path / "bars.jpg")


def test_light_to_import() -> None:
    code = (
        "import sys, whence; whence.evaluate.lds, whence.report.plot_lds, whence.retrain.measure;"
        "heavy = 'matplotlib scipy sklearn pandas ray transformers lightning fastapi'.split();"
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- tables ------------------------------------------------------------------------------------


def test_a_table_in_three_forms() -> None:
    table = Table(["method", "LDS"], [["a|b", 0.5], ["<c>", None]], title="<Judged>")
    assert str(table).splitlines() == [
        "<Judged>",
        "  method  LDS",
        "  ------  ---",
        "  a|b     0.5",
        "  <c>       –",
    ]
    assert table.markdown().splitlines() == [
        "| method | LDS |",
        "| --- | ---: |",
        "| a\\|b | 0.5 |",
        "| <c> | – |",
    ]
    html = table._repr_html_()
    assert "&lt;c&gt;" in html and "<c>" not in html and "<caption>&lt;Judged&gt;" in html


def test_a_sheet_of_facts() -> None:
    sheet = Table(None, [("a", "one"), ("long", "two")])
    assert str(sheet).splitlines() == ["a     one", "long  two"]
    assert "<thead>" not in sheet._repr_html_()
    assert sheet.markdown().splitlines()[1] == "| --- | --- |"


def test_a_row_of_another_length() -> None:
    with pytest.raises(ValueError, match="a row has 1 cells; the table has 2 columns"):
        Table(["a", "b"], [["x"]])


def test_an_estimate() -> None:
    assert estimate(0.4123, (0.38, 0.44051)) == "0.412 [0.380, 0.441]"


def test_results_plot_themselves(tmp_path: Path) -> None:
    result = calibrated(5)
    figure = result.plot(title="mine", path=tmp_path / "c.png")
    assert figure.axes[0].get_title() == "mine" and (tmp_path / "c.png").stat().st_size > 1000
    for kind in (LDS, Comparison, SubsetRemoval, Mislabeled):
        assert callable(kind.plot)
    actual = mislabeled(-np.arange(20.0), np.arange(20) < 5)
    assert actual.plot().axes[0].get_ylabel() == "mislabelled examples found (%)"
