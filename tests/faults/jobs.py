"""The long jobs, in small. Each works in a folder and resumes what an earlier call left there.

A job returns the digest of its result, whatever happened before.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support import models, recipes
from support.speed import fix_speed
from torch import nn

import whence
import whence.engine.scoring
import whence.persist.files
from whence.errors import DiskFull, FolderConflict
from whence.explore.jobs import Jobs
from whence.persist.identity import digest
from whence.retrain import ground_truth
from whence.retrain import record as record_together
from whence.scores import Scores
from whence.store import GradientStore

TRAIN, QUERY = models.vectors(20), models.vectors(5, seed=1)
TASK = whence.Classification()
EXACT: dict[str, Any] = {"dtype": torch.float64, "progress": False, "batch_size": 4}
UPDATES = 9


def often() -> None:
    """Save progress whenever there is some, in small chunks, so that a kill finds it."""
    whence.persist.files.Throttle.due = lambda _: True  # type: ignore[method-assign]
    whence.engine.scoring.CHUNK = 4
    fix_speed()
    torch.set_num_threads(1)


def net() -> nn.Module:
    torch.manual_seed(0)
    return models.mlp((4, 6, 3)).double()


def record(folder: Path) -> str:
    """A training loop with the recorder, which resumes from its last checkpoint."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    recorder = whence.Recorder(
        folder / "run", model, optimizer, checkpoints=3, total_steps=UPDATES, size=20
    )
    start = recorder.restore()
    with recorder:
        for step in range(UPDATES):
            optimizer.param_groups[0]["lr"] = 0.3 / (1 + step)
            chosen = np.random.default_rng(step).permutation(20)[:6]
            if step >= start:
                recorder.step(chosen)
                x, y = (t[chosen] for t in TRAIN.tensors)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x.double()), y).backward()
                optimizer.step()
    return read_run(folder)


def read_run(folder: Path) -> str:
    run = whence.Run.open(folder / "run")
    parts: list[Any] = [run.learning_rates, run.momentums, run.groups, run.hyperparameters]
    parts += [[s.name, s.start, s.end, s.size] for s in run.stages]
    parts += [run.batches, run.finished, run.optimizers]
    for checkpoint in [run.initial, *run.checkpoints]:
        assert checkpoint is not None
        parts += [checkpoint.step, checkpoint.weights(), checkpoint.optimizer_state() or {}]
    return digest(parts)


def study(folder: Path) -> whence.Study:
    if not (folder / "run" / "run.json").exists():
        trained = models.train_run(net(), TASK, TRAIN, [3, 6, 9], 0.3)
        trained.run.save(folder / "run")
    return whence.Study(net(), TASK, TRAIN, folder / "run")


def source(folder: Path) -> str:
    method = whence.Source(2, curvature="ekfac")
    options = {"out": folder / "scores", "by_segment": True}
    return of_scores(method.attribute(study(folder), QUERY, **options, **EXACT))


def top(folder: Path) -> str:
    options = {"out": folder / "scores", "top": 3}
    return of_scores(whence.TracIn().attribute(study(folder), QUERY, **options, **EXACT))


def trak(folder: Path) -> str:
    out = folder / "scores"
    return of_scores(whence.Trak(8).attribute(study(folder), QUERY, out=out, **EXACT))


def unrolled(folder: Path) -> str:
    return _swept(whence.Unrolled(), folder)


def hydra(folder: Path) -> str:
    return _swept(whence.Hydra(), folder)


def _swept(method: Any, folder: Path) -> str:
    """By going back through the updates of a recorded run, a few queries at a time."""
    given = whence.Study(net(), TASK, TRAIN, _recorded())
    return of_scores(method.attribute(given, QUERY, out=folder / "scores", **EXACT))


@cache
def _recorded() -> whence.Run:
    """A run with its batches, in memory."""
    with tempfile.TemporaryDirectory() as folder:
        record(Path(folder))
        return whence.Run.open(Path(folder) / "run").in_memory()


def of_scores(scores: Scores) -> str:
    arrays = scores._arrays()
    parts = [[name, np.array(array[...])] for name, array in sorted(arrays.items())]
    return digest([*parts, scores.method, scores.unit, scores.higher_is_better, scores.settings])


def store(folder: Path) -> str:
    given = study(folder)
    GradientStore.build(given, folder / "store", 8, **EXACT)
    opened = GradientStore.open(folder / "store", given)
    scores = opened.source(QUERY, progress=False)
    return digest([of_scores(scores), of_scores(opened.trak(QUERY, progress=False))])


def recipe() -> whence.Recipe:
    return recipes.recipe(train=recipes.dataset(24), epochs=2)


def truth(folder: Path) -> str:
    actual = ground_truth(
        recipe(),
        recipes.dataset(3, 9),
        0.5,
        3,
        2,
        out=folder / "truth",
        device="cpu",
        progress=False,
    )
    return of_truth(actual)


def of_truth(found: whence.retrain.Truth) -> str:
    parts = [found.masks, found.measurements, found.seeds, found.alpha, found.recipe, found.query]
    return digest([*parts, found.measurement, found.higher_is_better])


def record_many(folder: Path) -> str:
    options: dict[str, Any] = {"device": "cpu", "progress": False}
    runs = record_together(recipe(), [0, 1, 2], folder / "runs", 3, **options)
    return digest([[c.sha256 for c in run.checkpoints] for run in runs])


def explored(folder: Path) -> str:
    """The retrainings of an explorer."""
    work = Jobs(folder / "explored", recipe(), recipes.dataset(3, 9), device="cpu")
    if work.refused is not None:
        raise FolderConflict(work.refused)
    try:
        job = work.submit(None, [1, 2], 1)
        limit = time.monotonic() + 60
        while job.state in ("waiting", "running") and time.monotonic() < limit:
            time.sleep(0.002)
        outcome = work.outcome(job)
        if outcome is None:
            kind = DiskFull if "the disk is full" in str(job.error) else AssertionError
            raise kind(f"a retraining ended as {job.state}: {job.error}")
        return digest([outcome.before, outcome.after])
    finally:
        work.close()


def recipe_run(folder: Path) -> str:
    recipe().run(0, folder / "run", checkpoints=3, device="cpu")
    return read_run(folder)


JOBS: dict[str, Callable[[Path], str]] = {
    "recording": record,
    "recording a recipe": recipe_run,
    "SOURCE": source,
    "top scores of TracIn": top,
    "TRAK": trak,
    "store": store,
    "ground truth": truth,
    "Unrolled": unrolled,
    "Hydra": hydra,
    "recording many": record_many,
    "explorer": explored,
}
_EXPECTED: dict[str, str] = {}


def expected(name: str, folder: Path) -> str:
    """The digest of an undisturbed job."""
    if name not in _EXPECTED:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _EXPECTED[name] = JOBS[name](folder / "undisturbed")
    return _EXPECTED[name]
