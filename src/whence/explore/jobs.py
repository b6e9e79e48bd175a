"""Retraining without chosen examples: one job after another in a thread, kept in a folder.

    lock                      held by the explorer that retrains
    jobs/ID.json              what was asked, and how it went
    jobs/ID.npy               measurements (2, R, q): with all data, and without the examples
    trainings/FINGERPRINT/    every finished training, as `whence.retrain` keeps them

A job that was cut off (Ctrl-C, a crash) is gone on with by the next explorer of the folder. Axes:
``R`` seeds, ``q`` queries.
"""

from __future__ import annotations

import copy
import json
import os
import queue
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from whence.data import Batches
from whence.explore.reading import Floats
from whence.persist import locks
from whence.persist.files import load_array, make_folder, read_json, save_array, write_json
from whence.persist.identity import digest, sha256_of
from whence.retrain import Training
from whence.retrain.grid import Grid
from whence.retrain.measure import identity, run_grid
from whence.retrain.recipe import Recipe
from whence.retrain.stage import StageRecipe

SCHEMA = 1
MOST_SEEDS = 100
WAITING, RUNNING, DONE, FAILED, CANCELLED = "waiting", "running", "done", "failed", "cancelled"
UNFINISHED = (WAITING, RUNNING)


class Cancelled(BaseException):
    """The training was asked to stop. No Exception: nothing that tries a model may swallow it."""


class Watch:
    """How far the trainings of a job are, and the means to stop them.

    Args:
        updates: how many each stage makes, in order.
    """

    def __init__(self, updates: Sequence[int]) -> None:
        self.stop = threading.Event()
        self._before = [0, *np.cumsum(updates).tolist()]
        self._models: dict[int, int] = {}  # by thread: how many it trains at once
        self._share: dict[int, float] = {}  # by thread: how far these are

    def begin(self, models: int) -> None:
        """An epoch of so many models begins in this thread."""
        self._check()
        self._models[threading.get_ident()] = models

    def update(self, stage: int, step: int) -> None:
        """So many updates of a stage are made in this thread."""
        self._check()
        share = (self._before[stage] + step) / self._before[-1]
        self._share[threading.get_ident()] = min(1.0, share)

    def end(self) -> None:
        """What this thread trained is finished and kept."""
        self._share.pop(threading.get_ident(), None)

    @property
    def trainings(self) -> float:
        """The unfinished ones, each as the share of it that is done."""
        return sum(share * self._models.get(who, 1) for who, share in list(self._share.items()))

    def _check(self) -> None:
        if self.stop.is_set():
            raise Cancelled


@dataclass(frozen=True)
class WatchedStage(StageRecipe):
    """A stage that tells where it is. Trainings made one by one and trainings made at once both ask
    it for an epoch's order and, on a CPU or with a transform, for each batch."""

    watch: Watch = field(kw_only=True)

    @classmethod
    def of(cls, stage: StageRecipe, watch: Watch) -> WatchedStage:
        return cls(**{f.name: getattr(stage, f.name) for f in fields(stage)}, watch=watch)

    def order(self, seed: int | Tensor, epoch: int, examples: Tensor) -> Tensor:
        self.watch.begin(len(seed) if isinstance(seed, Tensor) else 1)
        self.watch.update(self.number, epoch * self.batches_per_epoch(len(examples)))
        return super().order(seed, epoch, examples)

    def transformed(self, batch: Any, seed: int | Tensor, step: int, ids: Any, like: Tensor) -> Any:
        self.watch.update(self.number, step)
        return super().transformed(batch, seed, step, ids, like)


class WatchedGrid(Grid):
    """A folder of trainings that tells when some are finished."""

    watch: Watch | None = None

    def add(self, keys: Sequence[str], rows: Floats) -> None:
        super().add(keys, rows)
        if self.watch is not None:
            self.watch.end()


def watched(recipe: Recipe, watch: Watch) -> Recipe:
    """The recipe, whose trainings can be followed and stopped."""
    made = copy.copy(recipe)
    made.stages = tuple(WatchedStage.of(stage, watch) for stage in recipe.stages)
    made._precise = None
    return made


@dataclass
class Job:
    """A retraining without some examples of one stage, by several seeds."""

    id: str
    of: str  # fingerprint of recipe and queries
    stage: str
    examples: list[int]
    seeds: list[int]
    created: float
    state: str = WAITING
    error: str | None = None
    seconds: float = 0.0
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What the trainings of a job measured: ``before`` with all data, ``after`` without, (R, q)."""

    before: Floats
    after: Floats

    @property
    def sound(self) -> NDArray[np.bool_]:
        """(R,) seeds neither of whose trainings diverged."""
        return np.asarray(np.isfinite(self.before).all(1) & np.isfinite(self.after).all(1))

    @property
    def change(self) -> Floats:
        """(q,) mean over the seeds of after − before; NaN if all diverged."""
        return self._over_seeds(lambda d: d.mean(0), 1)

    @property
    def error(self) -> Floats:
        """(q,) standard error of ``change``; NaN with fewer than two seeds."""
        return self._over_seeds(lambda d: d.std(0, ddof=1) / np.sqrt(len(d)), 2)

    @property
    def baseline(self) -> Floats:
        """(q,) mean over the seeds of the measurement with all data."""
        kept = self.before[self.sound]
        return kept.mean(0) if len(kept) else np.full(self.before.shape[1], np.nan)

    def _over_seeds(self, reduce: Any, least: int) -> Floats:
        differences = (self.after - self.before)[self.sound]
        if len(differences) < least:
            return np.full(self.before.shape[1], np.nan)
        return np.asarray(reduce(differences))


class Jobs:
    """The retrainings of a folder.

    Args:
        folder: where they are kept.
        recipe: how to train.
        query: what is measured, a map-style dataset.
        device: where to train (default: a GPU when there is one).

    Attributes:
        refused: why this explorer does not retrain; None when it does.
    """

    def __init__(
        self, folder: str | os.PathLike[str], recipe: Recipe, query: Any, *, device: Any = None
    ) -> None:
        self.folder, self.recipe, self.device = Path(folder), recipe, device
        self.query = Batches("query", query, recipe.collate)
        self._identity = identity(recipe, self.query)
        self.of = sha256_of(json.dumps(self._identity, sort_keys=True))
        make_folder(self.folder / "jobs")
        self._lock, self.refused = _hold(self.folder)
        self._guard = threading.RLock()
        self._jobs: dict[str, Job] = {}
        self.others = 0  # jobs in the folder that are of another recipe or of other queries
        self._now: tuple[Job, WatchedGrid | None, Watch, float, list[str]] | None = None
        self._closing = False
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._refresh()
        if self.refused is None:
            self._thread = threading.Thread(target=self._work, name="retraining", daemon=True)
            self._thread.start()
            for job in reversed(self._sorted()):
                if job.state in UNFINISHED:  # the explorer that was at it is gone
                    job.state = WAITING
                    self._queue.put(job.id)

    def ask(self, stage: str | None, examples: Sequence[int], seeds: int) -> Job:
        """Retrain without these examples of a stage, by the seeds 0 .. R-1. What was asked before
        is not done again; what failed or was cancelled is gone on with."""
        self._check_mine()
        own = self.recipe.stage(stage)
        removed = sorted({int(k) for k in examples})
        if not removed:
            raise ValueError("no example is ticked: tick those to train without")
        if removed[0] < 0 or removed[-1] >= len(own.data):
            wrong = removed[-1] if removed[-1] >= len(own.data) else removed[0]
            raise ValueError(
                f"example {wrong} is not in the recipe's data, which has 0..{len(own.data) - 1}"
            )
        left = len(own.data) - len(removed)
        if left < own.batch_size:
            raise ValueError(
                f"without these {len(removed)} examples {left} are left, fewer than "
                f"batch_size={own.batch_size}: tick fewer"
            )
        if not 1 <= seeds <= MOST_SEEDS:
            raise ValueError(f"seeds={seeds}: train with 1 to {MOST_SEEDS} seeds")
        named = digest([self.of, own.name, removed, int(seeds)])[:16]
        with self._guard:
            if named not in self._jobs:
                job = Job(named, self.of, own.name, removed, list(range(seeds)), time.time())
                self._jobs[named] = job
            elif self._jobs[named].state in (FAILED, CANCELLED):
                self._jobs[named].state, self._jobs[named].error = WAITING, None
            else:
                return self._jobs[named]
            self._keep(self._jobs[named])
            self._queue.put(named)
            return self._jobs[named]

    def go_on(self, name: str) -> Job:
        """Ask again for a job that failed or was cancelled."""
        job = self.get(name)
        return self.ask(job.stage, job.examples, len(job.seeds))

    def cancel(self, name: str) -> Job:
        """Stop a job; its finished trainings stay."""
        self._check_mine()
        with self._guard:
            job = self.get(name)
            if job.state in UNFINISHED:
                job.state = CANCELLED
                self._keep(job)
                if self._now is not None and self._now[0] is job:
                    self._now[2].stop.set()
            return job

    def forget(self, name: str) -> None:
        """Take a job off the list. Its trainings stay: they may be another's too."""
        self._check_mine()
        with self._guard:
            self.cancel(name)
            del self._jobs[name]
            for kind in ("json", "npy"):
                (self.folder / "jobs" / f"{name}.{kind}").unlink(missing_ok=True)

    def get(self, name: str) -> Job:
        with self._guard:
            if self.refused is not None:
                self._refresh()
            if name not in self._jobs:
                raise KeyError(f"there is no retraining {name!r}")
            return self._jobs[name]

    def all(self) -> list[Job]:
        """Newest first. Of another explorer's folder, as they are on disk now."""
        with self._guard:
            if self.refused is not None:
                self._refresh()
            return self._sorted()

    def progress(self, job: Job) -> dict[str, Any]:
        """Share done, and seconds that are left as far as one can tell."""
        now = self._now
        if now is None or now[0] is not job:
            return {"share": 1.0 if job.state == DONE else 0.0, "left": None, "done": 0, "of": 0}
        _, grid, watch, started, keys = now
        # trainings that were there before cost no time
        finished = 0 if grid is None else sum(key in grid for key in keys)
        share = min(1.0, (finished + watch.trainings) / max(1, len(keys)))
        fresh = share - job.notes.get("found", 0) / max(1, len(keys))
        spent = time.monotonic() - started
        left = spent / fresh * (1 - share) if fresh > 0.01 else None
        return {"share": share, "left": left, "done": finished, "of": len(keys)}

    def outcome(self, job: Job) -> Outcome | None:
        """What was measured, once the job is done."""
        if job.state != DONE:
            return None
        shape = (2, len(job.seeds), len(self.query))
        before, after = load_array(self.folder / "jobs" / f"{job.id}.npy", shape, "float64")
        return Outcome(before, after)

    def close(self, wait: float = 10.0) -> None:
        """Stop. A job at work is left as it is, for the next explorer to go on with."""
        self._closing = True
        with self._guard:
            if self._now is not None:
                self._now[2].stop.set()
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(wait)
        if self._lock is not None:
            self._lock.close()

    def _check_mine(self) -> None:
        if self.refused is not None:
            raise PermissionError(self.refused)

    def _sorted(self) -> list[Job]:
        return sorted(self._jobs.values(), key=lambda job: (-job.created, job.id))

    def _keep(self, job: Job) -> None:
        write_json(self.folder / "jobs" / f"{job.id}.json", {"schema": SCHEMA, **asdict(job)})

    def _refresh(self) -> None:
        """Read the jobs as they are on disk."""
        found = [_read(file) for file in (self.folder / "jobs").glob("*.json")]
        self._jobs = {job.id: job for job in found if job is not None and job.of == self.of}
        self.others = len(found) - len(self._jobs)

    def _work(self) -> None:
        while (name := self._queue.get()) is not None and not self._closing:
            with self._guard:
                job = self._jobs.get(name)
                if job is None or job.state != WAITING:
                    continue
                watch = Watch([s.total_steps(len(s.data)) for s in self.recipe.stages])
                job.state, job.error = RUNNING, None
                self._keep(job)
                self._now = (job, None, watch, time.monotonic(), [])
            ended: tuple[str, str | None] | None = None
            try:
                self._retrain(job, watch)
                ended = DONE, None
            except Cancelled:
                pass  # the state says why: cancelled, asked for again since, or closing
            except BaseException as problem:  # a user's model may raise anything
                traceback.print_exc()
                ended = FAILED, f"{type(problem).__name__}: {problem}"
            with self._guard:
                job.seconds += time.monotonic() - self._now[3]
                self._now = None
                if ended is not None:
                    job.state, job.error = ended
                if job.id in self._jobs:  # and not taken off the list meanwhile
                    self._keep(job)

    def _retrain(self, job: Job, watch: Watch) -> None:
        own = self.recipe.stage(job.stage)
        kept = np.setdiff1d(np.arange(len(own.data)), job.examples)
        trainings = [Training(seed) for seed in job.seeds]
        trainings += [Training(seed, kept, own.name) for seed in job.seeds]
        recipe = watched(self.recipe, watch)
        grid = WatchedGrid(
            self.folder / "trainings" / self.of[:16], self._identity, len(self.query)
        )
        grid.watch, keys = watch, [training.key for training in trainings]
        job.notes["found"] = sum(key in grid for key in keys)
        self._now = (job, grid, watch, time.monotonic(), keys)
        rows = run_grid(
            recipe,
            self.query,
            trainings,
            grid,
            device=self.device,
            memory=None,
            executor=None,
            engine="auto",
            progress=False,
        )
        job.notes["why"] = grid.notes.get("why")
        measured = rows.reshape(2, len(job.seeds), -1)
        job.notes["diverged"] = int(np.isnan(measured[..., 0]).sum())
        save_array(self.folder / "jobs" / f"{job.id}.npy", measured)


def _read(file: Path) -> Job | None:
    """A job, or None if the file is not one that this whence wrote."""
    try:
        content = read_json(file, schema=SCHEMA)
        del content["schema"]
        return Job(**content) if content["id"] == file.stem else None
    except (ValueError, KeyError, TypeError, FileNotFoundError):
        return None


def _hold(folder: Path) -> tuple[IO[bytes] | None, str | None]:
    """The folder's lock, or why it is not ours. The system lets go of it when the process dies."""
    file = locks.acquire(folder / "lock", wait=False)  # held as long as the explorer lives
    if file is None:
        who = (folder / "lock").read_text(errors="replace").strip()
        return None, (
            f"another explorer{f' ({who})' if who else ''} works in {folder}: retraining is its. "
            "Close it, or start this one with another folder (out=)"
        )
    file.truncate(0)
    file.write(f"process {os.getpid()}".encode())
    file.flush()
    return file, None
