"""The same scores on a GPU: run by hand where there is one, with pytest -m gpu."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch

import whence
from whence.data import place

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
]
CASES: dict[str, Any] = {
    "mlp": lambda: (models.mlp(), whence.Classification(), models.vectors(20), models.vectors(3)),
    "conv": lambda: (models.ConvNet(), whence.Classification(), models.images(), models.images(3)),
    "gpt": lambda: (
        models.Transformer(),
        whence.LanguageModeling(),
        models.documents(),
        models.documents(3, seed=1),
    ),
}
METHODS = [
    whence.Source(2),
    whence.Source(1, fisher="exact", curvature="kfac"),
    whence.FastSource(2),
    whence.Influence(1e-3),
    whence.Influence("source"),
    whence.TracIn(),
]


def adam_run(model: Any, task: Any, data: Any, folder: Path) -> whence.Run:
    """A few Adam updates on the GPU through the Recorder, and back."""
    device = torch.device("cuda")
    model = model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with whence.Recorder(folder / "run", model, optimizer, checkpoints=3, total_steps=9):
        for _ in range(9):
            batch = place(
                torch.utils.data.default_collate([data[k] for k in range(len(data))]),
                device,
                torch.float64,
            )
            optimizer.zero_grad()
            task.losses(task.outputs(model, batch), batch).mean().backward()
            optimizer.step()
    model.to("cpu")
    return whence.Run.open(folder / "run")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_the_device_changes_nothing(name: str, optimizer: str, method: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, task, train, query = CASES[name]()
    model = model.double()
    if optimizer == "adam":
        run = adam_run(model, task, train, tmp_path)
    else:
        run = models.train_run(model, task, train, [2, 5, 9], 0.1).run
    warnings.simplefilter("ignore")
    found = {}
    for device in ("cpu", "cuda"):
        # a cache of its own, or the second device would read what the first has fitted
        cache = tmp_path / device
        study = whence.Study(model, task, train=train, runs=run, cache=cache)
        options: dict[str, Any] = {"device": device, "dtype": torch.float64, "progress": False}
        found[device] = (
            method.attribute(study, query, **options).values,
            method.attribute(study, **options).values,
            method.attribute(study, query, **(options | {"dtype": torch.float32})).values,
        )
    single = 2e-2 if optimizer == "sgd" else 1e-1  # the mixed form at 1e-8 is sensitive
    for cpu, gpu, close in zip(found["cpu"], found["cuda"], (1e-8, 1e-8, single), strict=True):
        np.testing.assert_allclose(gpu, cpu, rtol=0, atol=close * abs(cpu).max())
