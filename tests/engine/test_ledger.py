"""Tallies of an interrupted call that no call writes are damage to its file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from whence.engine.ledger import Ledger
from whence.errors import DamagedFile

SOLVED = {"queries": 2, "unconverged": 0, "iterations": 5, "residual": 1e-9}
FACTORS = {"rank": 2, "queries": 2, "lost": 0.1, "most": 0.2, "above": 0, "layers": {"0": 0.1}}
SOUND = {
    "magnitudes": [1.0, 2.5],
    "warnings": ["something"],
    "survival": {"0": 0.5},
    "lanczos": {"iterations": 3, "residual": 0.0},
    "solver": {"0..2": SOLVED},
    "query_factors": {"0..2": FACTORS},
    "query_rank": 2,
    "growth": {"4": [1.5, 1]},
}


def test_sound_tallies_are_restored(tmp_path: Path) -> None:
    ledger = Ledger()
    ledger.restore(SOUND, tmp_path / "progress.json")
    assert ledger.tallies is SOUND
    assert ledger.summary()["solver"]["iterations"] == 5


@pytest.mark.parametrize(
    "changed",
    [
        {"magnitudes": None},
        {"magnitudes": [1.0, None]},
        {"magnitudes": {"0": 1.0}},
        {"warnings": [3]},
        {"survival": 0.5},
        {"survival": {"0": "half"}},
        {"solver": {"0..2": 3}},
        {"solver": {"0..2": {"queries": 2}}},
        {"query_factors": {"0..2": FACTORS | {"layers": 1.0}}},
        {"query_rank": "two"},
        {"growth": None},
    ],
    ids=str,
)
def test_others_are_refused_with_the_file(changed: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(DamagedFile, match=r"progress\.json .* delete the folder"):
        Ledger().restore(SOUND | changed, tmp_path / "progress.json")
