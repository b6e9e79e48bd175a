"""Every method's LDS on digits is what such a method reaches: no sign, unit or data mixed up.

RepSim, TRAK, stores, solvers and Downsampling have theirs beside their other tests.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from support import judged

import whence

RANGES: dict[str, tuple[Any, float, float]] = {
    "SOURCE, three segments": (whence.Source.published(3), 0.3, 0.6),
    "SOURCE, one segment": (whence.Source.published(1), 0.3, 0.6),
    "FastSource": (whence.FastSource.published(3), 0.2, 0.5),
    "influence": (whence.Influence.published(), 0.05, 0.35),
    "influence, damped as SOURCE": (whence.Influence.published("source"), 0.15, 0.45),
    "TracIn": (whence.TracIn(), 0.05, 0.4),
    "HYDRA": (whence.Hydra(), 0.05, 0.4),
    "Unrolled": (whence.Unrolled(), -0.2, 0.2),  # of one chaotic training: about nothing
    "Unrolled, expected": (whence.Unrolled("gauss-newton", expected=True), 0.02, 0.35),
    "Random": (whence.Random(), 0.0, 0.35),  # counts the query's class
}


@cache
def found(name: str) -> float:
    runs = judged.study(1000, 1001)
    return judged.judge(RANGES[name][0].attribute(runs, judged.data()[1], progress=False))


@pytest.mark.filterwarnings("ignore:going back to update")
@pytest.mark.parametrize("name", RANGES)
def test_lds_is_in_a_sane_range(name: str) -> None:
    _, least, most = RANGES[name]
    assert least < found(name) < most


@pytest.mark.filterwarnings("ignore:going back to update")
def test_the_order_is_the_papers() -> None:
    assert found("SOURCE, three segments") > found("FastSource") > found("influence")
    assert found("SOURCE, three segments") > found("TracIn")
    assert found("Unrolled, expected") > found("Unrolled")
