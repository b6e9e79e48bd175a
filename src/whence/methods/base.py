"""What every method does that looks at models: one run after another, laid out, scored, described.

A method says how it scores one run; layout, ensembles and the description of what was done are here
and the same for all.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from whence.data import Batches
from whence.engine.options import ComputeOptions
from whence.engine.trials import LOSSES
from whence.engine.workspace import Workspace
from whence.errors import InvalidInput, collect_warnings, collected_warnings, warn
from whence.layers.passes import Weights, precision_as_asked
from whence.persist.identity import key_of
from whence.run import Run
from whence.scores import Scores, ScoreWriter, ensemble
from whence.study import Study
from whence.world import World

Folder = str | os.PathLike[str] | None


class Method(ABC):
    """`attribute`, for whatever can score one run."""

    stage: str | None = None
    _own_layers = False  # whether layers that only some of the stages have are of use
    _quiet = False  # whether excluded layers do not matter

    @abstractmethod
    def score(self, workspace: Workspace, out: Folder, top: int | None, by_segment: bool) -> Scores:
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
        out: Folder = None,
        top: int | None = None,
        progress: bool = True,
        by_segment: bool = False,
        workers: int = 0,
    ) -> Scores:
        """Scores of every training example for every query.

        Args:
            query: map-style dataset with the same fields as the training data; None is
                self-influence, shape (n,).
            device: where to compute (default: where the model is).
            dtype: float32, float64, or bfloat16 for the products (sums stay in float32).
            batch_size: examples per pass (default: chosen from memory). No score depends on it.
            memory: what may be used, in bytes or like "8GB" (default: 40 % of the machine's,
                60 % of a GPU's).
            out: folder for the scores, written block by block; rerun the same call to resume.
            top: keep only the `top` most helpful and most harmful examples of each query.
            progress: show progress bars, and an estimate before long work.
            by_segment: keep the contribution of each segment (TracIn: of each checkpoint).
            workers: processes that load data.
        """
        if len(study.runs) > 1 and top is not None:
            raise InvalidInput(
                f"top={top} with {len(study.runs)} runs: the strongest of a mean are not known "
                "from the strongest of each run. Leave top out, or attribute one run"
            )
        options = ComputeOptions(device, dtype, batch_size, memory, progress, workers)

        def each() -> Iterator[Scores]:
            for k, run in enumerate(study.runs):
                folder = Path(out) / f"run-{k}" if out is not None and len(study.runs) > 1 else out
                with torch.no_grad(), precision_as_asked(), collect_warnings():
                    workspace = self.lay_out(study, run, query, options)
                    scores = self.score(workspace, folder, top, by_segment)
                yield scores

        with World.together() as world:
            if len(study.runs) == 1:
                return next(each())
            mean = ensemble(each())
            if out is not None and world.first:
                mean.save(out)
            world.wait()
            return mean

    def lay_out(self, study: Study, run: Run, query: Any, options: ComputeOptions) -> Workspace:
        """One run of the study, ready for these queries."""
        batches: Batches | None = None if query is None else study.query(query)
        return Workspace.lay_out(
            study,
            run,
            options,
            query=batches,
            stage=self.stage,
            shared=query is not None and not self._own_layers,
            frozen=self._own_layers,
            quiet=self._quiet,
        )

    def writer(
        self,
        workspace: Workspace,
        out: Folder,
        top: int | None,
        segments: int | None,
        places: Iterable[tuple[str, Weights]],
        what: str = LOSSES,
    ) -> ScoreWriter:
        """Where this run's scores go. What is tallied on the way is kept with them.

        Args:
            places: the stages and weights at which training examples are looked at.
            what: of them the scores depend on: losses, or only outputs.
        """
        world = workspace.world
        asked = {"the method": self, "out": out, "top": top, "by_segment": segments}
        world.agree(asked)
        writer = ScoreWriter(
            out,
            None if workspace.query is None else len(workspace.query),
            sum(len(workspace.study.data[stage]) for stage in workspace.stages),
            key=self.key(workspace),
            segments=segments,
            top=top,
            dtype=np.float64 if workspace.dtype == torch.float64 else np.float32,
            tried=None if out is None else workspace.tried(places, what),
            world=world,
        )
        workspace.ledger.tallies = writer.account
        for message in workspace.study.warnings(workspace.run):
            warn(message, stacklevel=4)
        messages = collected_warnings()
        messages[:0] = [m for m in writer.account.get("warnings", []) if m not in messages]
        writer.account["warnings"] = messages  # what is added later is saved with the progress
        return writer

    def key(self, workspace: Workspace) -> str:
        """Of everything that the scores depend on."""
        return key_of({"method": repr(self), **workspace.identity()})

    def metadata(self, workspace: Workspace) -> dict[str, Any]:
        """What is stored with the scores, the same in all ranks."""
        study, world = workspace.study, workspace.world
        workspace.ledger.merge(world)
        task = study.tasks[study.stages[-1]]
        diagnostics = workspace.ledger.summary() | {
            "seconds": workspace.clock.seconds,
            "cpu_seconds": workspace.clock.cpu_seconds,
            "batch_size": workspace.batch_size,
            "tracked": workspace.tracked.summary(),
        }
        counts = {stage: len(study.data[stage]) for stage in workspace.stages}
        several = len(study.stages) > 1
        return {
            "method": self.name,
            "settings": self.settings() | workspace.settings(),
            "measurement": task.measurement,
            "unit": task.unit,
            "higher_is_better": task.higher_is_better,
            "query_ids": None if workspace.query is None else np.arange(len(workspace.query)),
            "train_ids": np.concatenate([np.arange(count) for count in counts.values()]),
            "stage": [s for s, c in counts.items() for _ in range(c)] if several else None,
            "diagnostics": diagnostics if world.size == 1 else world.of_first(diagnostics),
            "provenance": workspace.provenance(),
            "excluded": [asdict(e) for e in workspace.tracked.excluded],
        }

    @property
    def name(self) -> str:
        return type(self).__name__

    def settings(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {k: v for k, v in vars(self).items() if not k.startswith("_")}

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in self.settings().items())})"
