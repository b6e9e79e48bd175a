"""Results as pictures and tables."""

from whence.report.plots import (
    plot_calibration,
    plot_lds,
    plot_lds_over_alpha,
    plot_mislabeled,
    plot_removal,
)
from whence.table import Table

__all__ = [
    "Table",
    "plot_calibration",
    "plot_lds",
    "plot_lds_over_alpha",
    "plot_mislabeled",
    "plot_removal",
]
