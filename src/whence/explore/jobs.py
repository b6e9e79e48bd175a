"""Retraining without chosen examples: one job after another in a thread, stored in a folder.

    lock                      held by the explorer that retrains
    jobs/ID.json              the request, and its state
    jobs/ID.npy               measurements (2, R, q): with all data, and without the examples
    trainings/FINGERPRINT/    every finished training, in the format of `whence.retrain`

The next explorer of the folder resumes a job that was interrupted (Ctrl-C, a crash). Axes: ``R``
seeds, ``q`` queries.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from whence.data import Batches
from whence.errors import InvalidInput, MissingKey
from whence.explore.reading import Floats
from whence.persist import files
from whence.persist.arrays import load_array, save_array
from whence.persist.files import check_types, make_folder, read_json, write_json
from whence.persist.identity import digest, sha256_of
from whence.retrain import Training, Update
from whence.retrain.grid import Grid
from whence.retrain.measure import identity, run_grid
from whence.retrain.recipe import Recipe

SCHEMA = 1
MAX_SEEDS = 100
WAITING, RUNNING, DONE, FAILED, CANCELLED = "waiting", "running", "done", "failed", "cancelled"
UNFINISHED = (WAITING, RUNNING)
STATES = (*UNFINISHED, DONE, FAILED, CANCELLED)


class Cancelled(BaseException):
    """The job was cancelled. Not an Exception: code that tries a model must not catch it."""


@dataclass
class Job:
    """A retraining without some examples of one stage, with several seeds."""

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
    measured: dict[str, Any] = field(default_factory=dict)  # the array's checksums


class RunningJob:
    """The job that is running. The trainer calls it after each update: it follows the trainings,
    and stops them when asked to.

    Args:
        updates: the number of updates of each stage, in order.
    """

    def __init__(self, job: Job, updates: Sequence[int]) -> None:
        self.job, self.stop, self.started = job, threading.Event(), time.monotonic()
        self.grid: Grid | None = None
        self.trainings: dict[str, Training] = {}  # by key
        self._before = [0, *np.cumsum(updates).tolist()]
        self._shares: dict[Training, float] = {}  # of its updates that are done

    def __call__(self, trainings: Sequence[Training], update: Update) -> None:
        if self.stop.is_set():
            raise Cancelled
        share = (self._before[update.stage.number] + update.step) / self._before[-1]
        self._shares.update(dict.fromkeys(trainings, min(1.0, share)))

    def progress(self) -> dict[str, Any]:
        """The share done, and an estimate of the seconds left."""
        count, grid = max(1, len(self.trainings)), self.grid
        finished = [t for key, t in self.trainings.items() if grid is not None and key in grid]
        shares = {t: self._shares.get(t, 0.0) for t in self.trainings.values()}
        share = min(1.0, sum((shares | dict.fromkeys(finished, 1.0)).values()) / count)
        # trainings that existed before took no time
        fresh = share - self.job.notes.get("reused", 0) / count
        spent = time.monotonic() - self.started
        left = spent / fresh * (1 - share) if fresh > 0.01 else None
        return {"share": share, "left": left, "done": len(finished), "of": len(self.trainings)}


@dataclass(frozen=True)
class Outcome:
    """Measurements of a job, (R, q): ``before`` with all data, ``after`` without the examples."""

    before: Floats
    after: Floats

    @property
    def sound(self) -> NDArray[np.bool_]:
        """(R,) the seeds whose trainings did not diverge."""
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
        rows = self.before[self.sound]
        return rows.mean(0) if len(rows) else np.full(self.before.shape[1], np.nan)

    def _over_seeds(self, reduce: Any, least: int) -> Floats:
        differences = (self.after - self.before)[self.sound]
        if len(differences) < least:
            return np.full(self.before.shape[1], np.nan)
        return np.asarray(reduce(differences))


class Jobs:
    """The retrainings of a folder.

    Args:
        folder: where to store them.
        recipe: how to train.
        query: the queries to measure, a map-style dataset.
        device: where to train (default: a GPU if there is one).

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
        self.others = 0  # jobs in the folder with another recipe or other queries
        self._current: RunningJob | None = None
        self._closing = False
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._refresh()
        if self.refused is None:
            self._thread = threading.Thread(target=self._work, name="retraining", daemon=True)
            self._thread.start()
            for job in reversed(self._sorted()):
                if job.state in UNFINISHED:  # its explorer is gone
                    job.state = WAITING
                    self._queue.put(job.id)

    def submit(self, stage: str | None, examples: Sequence[int], seeds: int) -> Job:
        """Retrain without these examples of a stage, with the seeds 0 .. R-1.

        A request that was made before is not repeated; if it failed or was cancelled, it resumes.
        """
        self._check_mine()
        chosen = self.recipe.stage(stage)
        count = len(chosen.data)
        removed = sorted({int(k) for k in examples})
        if not removed:
            raise InvalidInput("no example is ticked: tick the examples to train without")
        if removed[0] < 0 or removed[-1] >= count:
            wrong = removed[-1] if removed[-1] >= count else removed[0]
            raise InvalidInput(
                f"example {wrong} is not in the recipe's data, which has 0..{count - 1}"
            )
        left = count - len(removed)
        if left < chosen.batch_size:
            raise InvalidInput(
                f"without these {len(removed)} examples, {left} are left, fewer than "
                f"batch_size={chosen.batch_size}: tick fewer"
            )
        if not 1 <= seeds <= MAX_SEEDS:
            raise InvalidInput(f"seeds={seeds}: train with 1 to {MAX_SEEDS} seeds")
        name = digest([self.of, chosen.name, removed, int(seeds)])[:16]
        with self._guard:
            if name not in self._jobs:
                job = Job(name, self.of, chosen.name, removed, list(range(seeds)), time.time())
                self._jobs[name] = job
            elif self._jobs[name].state in (FAILED, CANCELLED):
                self._jobs[name].state, self._jobs[name].error = WAITING, None
            else:
                return self._jobs[name]
            self._keep(self._jobs[name])
            self._queue.put(name)
            return self._jobs[name]

    def resume(self, name: str) -> Job:
        """Resume a job that failed or was cancelled."""
        job = self.get(name)
        return self.submit(job.stage, job.examples, len(job.seeds))

    def cancel(self, name: str) -> Job:
        """Stop a job. Its finished trainings stay."""
        self._check_mine()
        with self._guard:
            job = self.get(name)
            if job.state in UNFINISHED:
                job.state = CANCELLED
                self._keep(job)
                if self._current is not None and self._current.job is job:
                    self._current.stop.set()
            return job

    def remove(self, name: str) -> None:
        """Remove a job from the list. Its trainings stay, because other jobs may share them."""
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
                raise MissingKey(f"there is no retraining {name!r}")
            return self._jobs[name]

    def all(self) -> list[Job]:
        """All jobs, newest first. In another explorer's folder, as they are on disk now."""
        with self._guard:
            if self.refused is not None:
                self._refresh()
            return self._sorted()

    def progress(self, job: Job) -> dict[str, Any]:
        """The share done, and an estimate of the seconds left."""
        current = self._current
        if current is not None and current.job is job:
            return current.progress()
        return {"share": 1.0 if job.state == DONE else 0.0, "left": None, "done": 0, "of": 0}

    def outcome(self, job: Job) -> Outcome | None:
        """The measurements, once the job is done."""
        if job.state != DONE:
            return None
        entry = {"shape": [2, len(job.seeds), len(self.query)], "dtype": "float64"}
        entry |= {name: job.measured[name] for name in ("crc32",) if name in job.measured}
        remedy = "remove this retraining from the list, and request it again"
        before, after = load_array(self.folder / "jobs" / f"{job.id}.npy", entry, remedy=remedy)
        return Outcome(before, after)

    def close(self, wait: float = 10.0) -> None:
        """Stop. The next explorer of the folder resumes a job that is running."""
        self._closing = True
        with self._guard:
            if self._current is not None:
                self._current.stop.set()
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
        jobs = [_read(file) for file in (self.folder / "jobs").glob("*.json")]
        self._jobs = {job.id: job for job in jobs if job is not None and job.of == self.of}
        self.others = len(jobs) - len(self._jobs)

    def _work(self) -> None:
        while (name := self._queue.get()) is not None and not self._closing:
            with self._guard:
                job = self._jobs.get(name)
                if job is None or job.state != WAITING:
                    continue
                job.state, job.error = RUNNING, None
                updates = [s.total_steps(len(s.data)) for s in self.recipe.stages]
                current = self._current = RunningJob(job, updates)
            ended: tuple[str, str | None] | None = None
            try:
                self._keep(job)
                self._retrain(current)
                ended = DONE, None
            except Cancelled:
                pass  # the state says why: cancelled, submitted again since, or closing
            except BaseException as problem:  # a user's model may raise anything
                ended = FAILED, f"{type(problem).__name__}: {problem}"
                with suppress(OSError):  # where a log is on the full disk too
                    traceback.print_exc()
            with self._guard:
                job.seconds += time.monotonic() - current.started
                self._current = None
                if ended is not None:
                    job.state, job.error = ended
                try:
                    if job.id in self._jobs:  # not removed from the list meanwhile
                        self._keep(job)
                except OSError as problem:  # a full disk must not end the thread
                    job.state, job.error = FAILED, f"{type(problem).__name__}: {problem}"

    def _retrain(self, current: RunningJob) -> None:
        job, stage = current.job, self.recipe.stage(current.job.stage)
        remaining = np.setdiff1d(np.arange(len(stage.data)), job.examples)
        trainings = [Training(seed) for seed in job.seeds]
        trainings += [Training(seed, remaining, stage.name) for seed in job.seeds]
        grid = Grid(self.folder / "trainings" / self.of[:16], self._identity, len(self.query))
        keys = [training.key for training in trainings]
        job.notes["reused"] = sum(key in grid for key in keys)
        current.grid, current.trainings = grid, dict(zip(keys, trainings, strict=True))
        current.started = time.monotonic()
        rows = run_grid(
            self.recipe,
            self.query,
            trainings,
            grid,
            device=self.device,
            progress=False,
            callback=current,
        )
        job.notes["why"] = grid.notes.get("why")
        measured = rows.reshape(2, len(job.seeds), -1)
        job.notes["diverged"] = int(np.isnan(measured[..., 0]).sum())
        job.measured = save_array(self.folder / "jobs" / f"{job.id}.npy", measured)


def _read(file: Path) -> Job | None:
    """A job, or None if this version of whence did not write the file."""
    try:
        content = read_json(file, schema=SCHEMA)
        del content["schema"]
        check_types(content, of=str, stage=str, examples=list, seeds=list, created=float)
        check_types({"measured": {}} | content, state=str, notes=dict, measured=dict)
        check_types(content, error=(str, type(None)), seconds=(int, float))
        numbers = [*content["examples"], *content["seeds"]]
        if content["state"] not in STATES or not all(type(k) is int for k in numbers):
            return None
        return Job(**content) if content["id"] == file.stem else None
    except (ValueError, KeyError, TypeError, FileNotFoundError):
        return None


def _hold(folder: Path) -> tuple[IO[bytes] | None, str | None]:
    """The folder's lock, or why we do not have it. The system releases it when the process dies."""
    file = files.acquire_lock(folder / "lock", wait=False)  # held as long as the explorer lives
    if file is not None:
        return file, None
    return None, (
        f"another explorer ({files.lock_holder(folder / 'lock')}) retrains in {folder}: close it, "
        "or start this one with another folder (out=)"
    )
