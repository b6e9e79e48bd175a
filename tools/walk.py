"""Follow `Source().attribute(study, query, out=...)`: the files and functions that it runs.

    python -m tools.walk
    python -m tools.walk --functions

The case is the plain one: a small MLP, trained by SGD in one process. With progress=True it passes
through two more files: `progress.py` for the bars, and `engine/costs.py` for the estimate that is
shown before long work. The walk is taken twice, with factors that have to be fitted and with cached
ones. Its files are what you read to know where scores come from; `tests/test_walk.py` keeps their
number from growing.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils.data import TensorDataset

import whence

PACKAGE = Path(whence.__file__).parent

#: the functions of each file with the number of their calls, in the order of the first call
Walk = dict[str, dict[str, int]]


def follow(function: Callable[[], object]) -> Walk:
    """The named functions of whence that a call runs, except those that an import runs."""
    walk: Walk = {}
    importing = 0

    def enter(frame: FrameType, event: str, _: Any) -> None:
        nonlocal importing
        code = frame.f_code
        if code.co_name == "<module>":
            importing += {"call": 1, "return": -1}.get(event, 0)
        elif event == "call" and not importing and not code.co_name.startswith("<"):
            file = Path(code.co_filename)
            if PACKAGE in file.parents:
                calls = walk.setdefault(file.relative_to(PACKAGE).as_posix(), {})
                calls[code.co_qualname] = calls.get(code.co_qualname, 0) + 1

    sys.setprofile(enter)
    try:
        function()
    finally:
        sys.setprofile(None)
    return walk


def plain_study(folder: Path) -> tuple[whence.Study, TensorDataset]:
    """A small MLP that SGD trained for four epochs, and queries."""
    torch.manual_seed(0)
    x = torch.randn(40, 6)
    y = (x.sum(1) > 0).long()
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with whence.Recorder(folder, model, optimizer, checkpoints=4, total_steps=16):
        for step in range(16):
            batch = torch.arange(8) + step % 4 * 8
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    data, query = TensorDataset(x[:32], y[:32]), TensorDataset(x[32:], y[32:])
    return whence.Study(model, whence.Classification(), data, folder), query


def walks(folder: Path) -> tuple[Walk, Walk]:
    """With factors that have to be fitted, and with cached ones."""
    study, query = plain_study(folder / "run")

    def walk(out: str) -> Walk:
        method = whence.Source()
        with patch("whence.persist.files.monotonic", return_value=0.0):  # no save in between is due
            return follow(lambda: method.attribute(study, query, out=folder / out, progress=False))

    return walk("fitted"), walk("cached")


def main() -> None:
    parser = argparse.ArgumentParser(description="The files between `attribute` and scores.")
    parser.add_argument("--functions", action="store_true", help="also the functions of each file")
    functions = parser.parse_args().functions
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        fitted, cached = walks(Path(folder))
    for name, walk in (("factors are fitted", fitted), ("factors are cached", cached)):
        number = sum(map(len, walk.values()))
        print(f"{name}: {len(walk)} files, {number} functions")
    for file in fitted | cached:
        calls = fitted.get(file, {}) | cached.get(file, {})
        print(f"{len(calls):4} {file}", *(f"\n       {f}" for f in calls if functions), sep="")


if __name__ == "__main__":
    main()
