"""The estimate's operations next to those that PyTorch counts while the work is done."""

from __future__ import annotations

import pytest

from benchmarks.estimated import CASES, METHODS, counted

pytestmark = pytest.mark.filterwarnings("ignore")
LARGE = ["ResNet-9"]  # its eigendecompositions take a minute


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.slow] * (c in LARGE)) for c in CASES]
)
def test_operations_are_those_of_the_work(case: str, method: str) -> None:
    for package in {"BERT": ["transformers"], "GPT-2": ["transformers", "peft"]}.get(case[:5], []):
        pytest.importorskip(package)
    estimated, operations = counted(case, method, scale=2)
    assert 0.6 < estimated / operations < 1.5, estimated / operations
