"""The estimate's operations next to those that PyTorch counts while the work is done."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import default_collate
from torch.utils.flop_counter import FlopCounterMode

import whence
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


@pytest.mark.parametrize("case, scale", [("GPT, tied head", 4), ("MLP 784-512-256-10", 2)])
@pytest.mark.parametrize("method", [whence.Source(), whence.Influence()])
def test_iterations_after_adam_are_counted(
    method: Any, case: str, scale: int, tmp_path: Path
) -> None:
    """How many they take is only known afterwards, so within a factor of two. The MLP has layers
    that are wider than its data has examples."""
    torch.manual_seed(0)
    model, task, train, query = CASES[case](scale)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with whence.Recorder(tmp_path, model, optimizer, checkpoints=2, total_steps=12) as recorder:
        for k in range(12):
            indices = torch.arange(8 * k, 8 * k + 8) % len(train)
            batch = default_collate([train[int(i)] for i in indices])
            optimizer.zero_grad()
            task.losses(task.outputs(model, batch), batch).mean().backward()
            recorder.step(indices)
            optimizer.step()
    counter = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), counter:
        scores = method.attribute(whence.Study(model, task, train, tmp_path), query)
    estimated = scores.diagnostics["estimate"]["operations"]
    assert 0.5 < estimated / counter.get_total_flops() < 2
