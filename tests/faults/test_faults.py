"""A few attempts of every kind to break whence. `python -m tools.faults` makes more of them."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import whence.engine.scoring
import whence.persist.files
from faults import jobs
from faults.attempts import ATTEMPTS

pytestmark = [pytest.mark.slow, pytest.mark.faults]
FEW = 6


@pytest.fixture(autouse=True, scope="module")
def progress_is_saved_often() -> Iterator[None]:
    kept: Any = whence.persist.files.Throttle.due, whence.engine.scoring.CHUNK
    jobs.often()
    yield
    whence.persist.files.Throttle.due, whence.engine.scoring.CHUNK = kept


@pytest.mark.parametrize("seed", range(FEW))
@pytest.mark.parametrize("kind", ATTEMPTS)
def test_attempt(kind: str, seed: int, tmp_path: Path) -> None:
    ATTEMPTS[kind](random.Random(f"{kind} {seed}"), tmp_path)
