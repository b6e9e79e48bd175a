"""The estimate's operations next to those that PyTorch counts while the work is done."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.estimated import CASES, METHODS, counted

pytestmark = pytest.mark.filterwarnings("ignore")
LARGE = ["ResNet-9"]


def _slow(case: str, method: str) -> bool:
    """Eigendecompositions that take long; SOURCE has those of three segments."""
    return case in LARGE or (method == "SOURCE" and case not in ("MLP 784-512-256-10", "GPT-2"))


@pytest.mark.parametrize(
    ("case", "method"),
    [
        pytest.param(c, m, marks=[pytest.mark.slow] * _slow(c, m))
        for c, m in itertools.product(CASES, METHODS)
    ],
)
def test_operations_are_those_of_the_work(case: str, method: str) -> None:
    for package in {"BERT": ["transformers"], "GPT-2": ["transformers", "peft"]}.get(case[:5], []):
        pytest.importorskip(package)
    # on little data, what checks a model of this size costs is not negligible
    estimated, operations = counted(case, method, scale=8 if case in LARGE else 2)
    assert 0.6 < estimated / operations < 1.5, estimated / operations
