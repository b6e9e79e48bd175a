"""The estimate's memory next to the peak of a process that does the work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import ranks
from support.memory import LiveBytes
from torch.utils._python_dispatch import _disable_current_modes

import whence
from whence.engine.queries import QuerySet
from whence.engine.workspace import ComputeOptions
from whence.operators.fit import Fitter

PROCESS = """
import json, sys, torch, whence
from torch import nn
from torch.utils.data import TensorDataset

d, queries = 500, 60
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, d), nn.ReLU(), nn.Linear(d, d), nn.ReLU(), nn.Linear(d, 4))
data = [TensorDataset(torch.randn(n, 16), torch.randint(4, (n,))) for n in (600, queries)]
weights = {k: v.clone() for k, v in model.state_dict().items()}
run = whence.Run.from_checkpoints([weights] * 3, [1, 2, 3], [0.1] * 3, optimizer="sgd")
study = whence.Study(model, whence.Classification(), data[0], run)
method = getattr(whence, sys.argv[1])(*json.loads(sys.argv[2]))
estimate = method.estimate(study, data[1], device="cpu")["bytes"]

def known(name):  # in KiB
    return int(open("/proc/self/status").read().split(name + ":")[1].split()[0]) * 1024

open("/proc/self/clear_refs", "w").write("5")  # the peak so far
before = known("VmRSS")
method.attribute(study, data[1], device="cpu", progress=False)
print(json.dumps([estimate, known("VmHWM") - before]))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads a peak from /proc")
@pytest.mark.parametrize(
    ("method", "arguments"), [("Source", [3]), ("Influence", ["source"]), ("TracIn", [])]
)
@pytest.mark.slow
def test_memory_is_that_of_the_work(method: str, arguments: list[object]) -> None:
    line = [sys.executable, "-W", "ignore", "-c", PROCESS, method, json.dumps(arguments)]
    answer = subprocess.run(line, capture_output=True, text=True, check=True).stdout
    estimate, peak = json.loads(answer)
    slack = 20 * 2**20  # of the process itself
    assert peak / 2 - slack < estimate < 2 * peak + slack, (estimate / 2**20, peak / 2**20)


RATES: dict[str, Any] = {
    "source": whence.Source(2),
    "published source": whence.Source.published(2),
    "influence": whence.Influence(),
}


@pytest.mark.parametrize("name", RATES)
@pytest.mark.parametrize("run", ranks.DEEP)
def test_rates_after_adam_are_those_that_are_left(name: str, run: str, tmp_path: Path) -> None:
    """Between fitting and scoring, besides the factors."""
    ranks.record_deep(tmp_path)
    method, left, fit = RATES[name], [], Fitter.fit
    prepare = type(method).prepare

    def hidden(*given: Any) -> Any:
        with _disable_current_modes():
            return fit(*given)

    def weighed(*given: Any) -> Any:
        with LiveBytes(8 * ranks.NARROW) as live:
            prepared = prepare(*given)
        left.append(live.alive)
        return prepared

    study, options = ranks.deep(tmp_path, run), {"dtype": torch.float64, "progress": False}
    queries = QuerySet.of(study, ranks.SEQUENCES)
    workspace = method.lay_out(study, study.runs[0], queries, ComputeOptions(**options))
    counts = method.counted(method.workload(workspace, method.terms(workspace)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("whence.engine.workspace.FACTOR_SHARE", {"cpu": 1e-9})
        patch.setattr(Fitter, "fit", hidden)
        patch.setattr(type(method), "prepare", weighed)
        method.attribute(study, ranks.SEQUENCES, **options)
    vector = 8 * sum(p.numel() for p in study.model.parameters())
    held = left[0] / vector
    expected = 8 * counts.rate_numbers / vector
    assert held == pytest.approx(expected, abs=0.1) or (name == "influence" and held < expected)
