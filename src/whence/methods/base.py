"""What every method does that looks at models: one run after another, laid out, scored, described.

A method says what it does with one run; the rest (layout, estimate, ensembles, the account of what
was done) is here and the same for all.
"""

from __future__ import annotations

import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from whence.data import Batches
from whence.engine.memory import allowance
from whence.engine.workspace import Workspace
from whence.layers.passes import precision_as_asked
from whence.operators import cost, key_of
from whence.run import Run
from whence.scores import Scores, ScoreWriter, ensemble
from whence.study import Study

FACTORS = {"cuda": 0.5}  # of what may be used: room for factors. A CPU has no other place for them
SENSITIVE = 0.3  # share of a score vector that may hang on the damping before it is said


class Method(ABC):
    """`attribute`, for whatever can score one run."""

    stage: str | None = None
    _own_layers = False  # whether layers that only some of the stages have are of use

    @abstractmethod
    def _attribute_one(
        self,
        workspace: Workspace,
        out: str | os.PathLike[str] | None,
        top: int | None,
        by_segment: bool,
    ) -> Scores:
        """The scores of one run."""

    def attribute(
        self,
        study: Study,
        query: Any = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        batch_size: int | None = None,
        memory: int | str | None = None,
        out: str | os.PathLike[str] | None = None,
        top: int | None = None,
        progress: bool = True,
        by_segment: bool = False,
        workers: int = 0,
    ) -> Scores:
        """Scores of every training example for every query.

        Args:
            query: map-style dataset built like the training data; None is self-influence, shape
                (n,).
            device: where to compute (default: where the model is).
            dtype: float32, float64, or bfloat16 for the products (sums stay in float32).
            batch_size: examples per pass (default: chosen from memory). No score depends on it.
            memory: what may be used, in bytes or like "8GB" (default: 40 % of the machine's,
                60 % of a GPU's).
            out: folder for the scores, written block by block; the same call again goes on from
                there.
            top: keep only each query's so many most helpful and most harmful examples.
            by_segment: keep the contribution of each segment (TracIn: of each checkpoint).
            workers: processes that load data.
        """
        if len(study.runs) > 1 and top is not None:
            raise ValueError(
                f"top={top} with {len(study.runs)} runs: the strongest of a mean are not known "
                "from the strongest of each run. Leave top out, or attribute one run"
            )

        def each() -> Iterator[Scores]:
            for k, run in enumerate(study.runs):
                place = Path(out) / f"run-{k}" if out is not None and len(study.runs) > 1 else out
                with torch.no_grad(), precision_as_asked():
                    workspace = self._workspace(
                        study, run, query, device, dtype, batch_size, memory, progress, workers
                    )
                    scores = self._attribute_one(workspace, place, top, by_segment)
                yield scores

        if len(study.runs) == 1:
            return next(each())
        mean = ensemble(each())
        if out is not None:
            mean.save(out)
        return mean

    def _workspace(
        self,
        study: Study,
        run: Run,
        query: Any,
        device: torch.device | str | None,
        dtype: torch.dtype,
        batch_size: int | None,
        memory: int | str | None,
        progress: bool,
        workers: int,
    ) -> Workspace:
        return lay_out(
            study,
            run,
            query=None if query is None else study.query(query),
            stage=self.stage,
            shared=query is not None and not self._own_layers,
            frozen=self._own_layers,
            device=device,
            dtype=dtype,
            batch_size=batch_size,
            memory=memory,
            progress=progress,
            workers=workers,
        )

    def _writer(
        self,
        workspace: Workspace,
        out: str | os.PathLike[str] | None,
        top: int | None,
        segments: int | None,
    ) -> ScoreWriter:
        """Where this run's scores go."""
        writer = ScoreWriter(
            out,
            None if workspace.query is None else len(workspace.query),
            sum(len(workspace.study.data[stage]) for stage in workspace.stages),
            key=self._key(workspace),
            segments=segments,
            top=top,
            dtype=np.float64 if workspace.final_passes.dtype == torch.float64 else np.float32,
        )
        workspace.account = writer.account
        return writer

    def _key(self, workspace: Workspace) -> str:
        """Of everything that the scores depend on."""
        tracked = workspace.final_passes.tracked
        return key_of(
            {
                "method": repr(self),
                "run": workspace.run.fingerprint,
                "train": {
                    s: workspace.study.identity(workspace.run, s, tracked)
                    for s in workspace.study.stages
                },
                "query": None if workspace.query is None else workspace.query.fingerprint(),
                "tasks": [repr(task) for task in workspace.study.tasks.values()],
                "measured": workspace.study.probe[workspace.study.stages[-1]]["measurements"],
                "dtype": workspace.final_passes.arithmetic,
            }
        )

    def _announce(
        self,
        workspace: Workspace,
        work: Mapping[str, float],
        passes: Mapping[str, int],
        numbers: int,
    ) -> None:
        """An estimate of time and memory, kept with the scores and shown before long work.

        Args:
            work: operations per example of each kind of pass.
            passes: how many of each kind.
            numbers: held at once.
        """
        announce(self, workspace, work, passes, numbers)

    def _metadata(self, workspace: Workspace) -> dict[str, Any]:
        study, tracked = workspace.study, workspace.final_passes.tracked
        task = study.tasks[study.stages[-1]]
        sizes = workspace.account.get("magnitudes", [])  # Σ |contribution| of each term
        for k, segment in enumerate(workspace.diagnostics.get("segments", [])):
            segment["share_of_score"] = sizes[k] / (sum(sizes) or 1.0)
            if str(k) in workspace.account.get("survival", {}):
                segment["survival"] = workspace.account["survival"][str(k)]
        if "damping_sensitivity" in workspace.account:
            moved = workspace.account["damping_sensitivity"]
            workspace.diagnostics["damping_sensitivity"] = moved
            share = float(np.median(list(moved.values())))
            if share > SENSITIVE:
                warnings.warn(
                    f"the scores hang on the damping: in the median layer {share:.0%} of the score "
                    "vector changes when it is ten times larger, so directions of hardly any "
                    "curvature dominate it. Compare Source(exact=True), which is appendix C as it "
                    "stands, damping='preconditioner', or a larger number",
                    stacklevel=2,
                )
        clock = workspace.final_passes.clock
        workspace.diagnostics |= {
            "seconds": clock.seconds,
            "cpu_seconds": clock.cpu_seconds,
            "batch_size": workspace.batch_size,
            "tracked": tracked.summary(),
        }
        counts = {stage: len(study.data[stage]) for stage in workspace.stages}
        return {
            "method": type(self).__name__,
            "settings": self.settings(),
            "measurement": task.measurement,
            "unit": task.unit,
            "higher_is_better": task.higher_is_better,
            "query_ids": None if workspace.query is None else np.arange(len(workspace.query)),
            "train_ids": np.concatenate([np.arange(count) for count in counts.values()]),
            "stage": [s for s, c in counts.items() for _ in range(c)]
            if len(study.stages) > 1
            else None,
            "diagnostics": workspace.diagnostics,
            "provenance": {
                "run": workspace.run.fingerprint,
                "train": self._data(workspace),
                "collated": study.collate is not None,
                "query": None if workspace.query is None else workspace.query.fingerprint(),
                "torch": torch.__version__,
                "device": str(workspace.final_passes.device),
                "dtype": workspace.final_passes.arithmetic,
            },
            "excluded": [asdict(e) for e in tracked.excluded],
        }

    def _data(self, workspace: Workspace) -> dict[str, str]:
        """Fingerprints of the data whose examples are scored, by stage."""
        return {stage: workspace.study.data[stage].fingerprint() for stage in workspace.stages}

    def settings(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {k: v for k, v in vars(self).items() if not k.startswith("_")}

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.settings().items())})"
        )


def lay_out(
    study: Study,
    run: Run,
    *,
    query: Batches | None = None,
    stage: str | None = None,
    shared: bool = True,
    frozen: bool = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
    batch_size: int | None = None,
    memory: int | str | None = None,
    progress: bool = True,
    workers: int = 0,
) -> Workspace:
    """One run of a study, ready for work on a device.

    Args:
        stage: whose examples are meant (None: all stages').
        shared: whether only layers that a query can see are tracked in earlier stages.
        frozen: whether layers that training did not move are tracked too.
    """
    stages = asked_stages(study, stage)
    own = next(study.model.parameters(), torch.zeros(()))
    where = own.device if device is None else torch.device(device)
    for data in study.data.values():
        data.refresh()
    passes = study.passes(
        run,
        device=where,
        dtype=dtype,
        workers=workers,
        progress=progress,
        shared=shared,
        frozen=frozen,
    )
    allowed = allowance(memory, where)
    if batch_size is None:
        numbers = cost.per_example_numbers(passes[study.stages[-1]].tracked) * dtype.itemsize
        cap, share = (512, 2**28) if where.type == "cpu" else (4096, allowed // 2)
        batch_size = int(min(cap, max(1, min(share, allowed // 2) // numbers)))
        batch_size = 1 << (batch_size.bit_length() - 1)
    elif batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1")
    room = int(FACTORS[where.type] * allowed) if where.type in FACTORS else None
    return Workspace(study, run, query, stages, passes, batch_size, allowed, room=room)


def asked_stages(study: Study, stage: str | None) -> list[str]:
    """The stages whose examples are meant: one, or all."""
    if stage is not None and stage not in study.stages:
        raise ValueError(f"stage={stage!r} is not in the run: it has {study.stages}")
    return study.stages if stage is None else [stage]


def announce(
    what: object,
    workspace: Workspace,
    work: Mapping[str, float],
    passes: Mapping[str, int],
    numbers: int,
) -> None:
    """An estimate of time and memory, kept with the diagnostics and shown before long work."""
    dtype = workspace.final_passes.dtype
    examples = sum(len(workspace.study.data[stage]) for stage in workspace.stages)
    operations = examples * sum(work[kind] * count for kind, count in passes.items())
    seconds = (
        1.5 * operations / cost.rate(workspace.final_passes.device, dtype)
    )  # beside the products
    held = min(numbers * dtype.itemsize, workspace.memory)
    workspace.diagnostics["estimate"] = {"seconds": seconds, "bytes": held, "passes": dict(passes)}
    if workspace.final_passes.progress and seconds > 10:
        kinds = ", ".join(f"{count} × {kind}" for kind, count in passes.items())
        queries = "" if workspace.query is None else f", {len(workspace.query):,} queries"
        tqdm.write(
            f"{what!r}: {examples:,} examples{queries}; passes: {kinds}; "
            f"about {_duration(seconds)} and {held / 2**30:.1f} GiB"
        )


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
