"""Judging scores by what really happens: retrain on known subsets, and look."""

from whence.evaluate.benchmark import Benchmark, Published, Standing, score_against
from whence.evaluate.calibrate import calibrate
from whence.evaluate.calibration import Calibration, calibration
from whence.evaluate.combine import combine
from whence.evaluate.lds import LDS, Comparison, Difference, compare, lds
from whence.evaluate.metasmoothness import Metasmoothness, metasmoothness
from whence.evaluate.mislabeled import Mislabeled, mislabeled
from whence.evaluate.removal import SubsetRemoval, subset_removal
from whence.evaluate.selection import Selection, select
from whence.retrain import Truth, ground_truth

__all__ = [
    "LDS",
    "Benchmark",
    "Calibration",
    "Comparison",
    "Difference",
    "Metasmoothness",
    "Mislabeled",
    "Published",
    "Selection",
    "Standing",
    "SubsetRemoval",
    "Truth",
    "calibrate",
    "calibration",
    "combine",
    "compare",
    "ground_truth",
    "lds",
    "metasmoothness",
    "mislabeled",
    "score_against",
    "select",
    "subset_removal",
]
