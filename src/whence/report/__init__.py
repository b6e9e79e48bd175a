"""Results as a page, as tables and as plots."""

from whence.evaluate.plots import (
    plot_calibration,
    plot_combination,
    plot_lds,
    plot_lds_over_alpha,
    plot_mislabeled,
    plot_removal,
)
from whence.present.card import Card, card
from whence.present.check import check_data
from whence.present.examples import HTML, Examples
from whence.present.notebook import show
from whence.present.ranking import ranking
from whence.report.page import write
from whence.table import Table

__all__ = [
    "HTML",
    "Card",
    "Examples",
    "Table",
    "card",
    "check_data",
    "plot_calibration",
    "plot_combination",
    "plot_lds",
    "plot_lds_over_alpha",
    "plot_mislabeled",
    "plot_removal",
    "ranking",
    "show",
    "write",
]
