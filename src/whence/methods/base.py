"""The base of all methods that run a model: each run is laid out, scored and described.

A method defines how it scores one run. Layout, ensembles and the stored description are here, the
same for all methods.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import ArrayLike

from whence.engine.queries import QuerySet
from whence.engine.workspace import ComputeOptions, Workspace
from whence.errors import InvalidInput, collect_warnings, collected_warnings, warn
from whence.layers.choose import Chooser
from whence.layers.passes import LOSSES, Weights, precision_as_asked
from whence.persist.files import as_path
from whence.persist.identity import call_text, defaults_of, key_of
from whence.progress import one_bar
from whence.run import Run
from whence.scores import Scores, ScoreWriter, ensemble
from whence.scores.result import BY_HEAD, BY_LAYER, BY_SEGMENT
from whence.study import Scope, Study
from whence.world import World

Folder = str | os.PathLike[str] | None


class Method(ABC):
    """`attribute`, for every class that can score one run."""

    stage: str | None = None
    default_layers: Chooser | None = None  # tracked if the study does not choose; None: all
    _scope: Scope | None = None  # of the layers (`Study.passes`), whatever the queries are
    _quiet = False  # whether excluded layers do not matter
    #: arguments of `attribute` that not every method can take. "query_weights" need scores that are
    #: linear in the measurements, "query_rank" and "by_layer" query vectors in layers, and
    #: "examples" (candidates too) scores that do not depend on all examples together
    accepts: ClassVar[frozenset[str]] = frozenset()
    _fixed: tuple[str, ...] = ()  # settings of a base class that this method does not have

    def __init__(self, stage: str | None = None) -> None:
        self.stage = stage

    @abstractmethod
    def score(
        self, workspace: Workspace, out: Folder, top: int | None, by: str | None = None
    ) -> Scores:
        """The scores of one run."""

    def attribute(
        self,
        study: Study,
        query: Any = None,
        *,
        query_weights: ArrayLike | None = None,
        query_rank: int | str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        batch_size: int | None = None,
        memory: int | str | None = None,
        out: Folder = None,
        top: int | None = None,
        progress: bool = True,
        by_segment: bool = False,
        by_layer: bool | str = False,
        examples: Any = None,
        workers: int = 0,
        executor: str | None = None,
    ) -> Scores:
        """Scores of every training example for every query.

        Args:
            query: map-style dataset with the same fields as the training data, or a
                `whence.Contrast` of two; None is self-influence, shape (n,).
            query_weights: one weight for each query, (q,), or k rows of them, (k, q). The scores
                are then of these k sums of measurements, at the cost of k queries.
            query_rank: keep each query's vector in every layer as factors of this rank, so that
                more queries share a pass over the data. Scores are then approximate. "auto" keeps
                whole vectors if they fit, otherwise it takes the largest rank that fits (16 to 64).
                None keeps whole vectors.
            device: where to compute (default: where the model is).
            dtype: float32, float64, or bfloat16 for the products (sums stay in float32).
            batch_size: examples per pass (default: chosen from memory). No score depends on it.
            memory: what may be used, in bytes or like "8GB" (default: 40 % of the machine's,
                60 % of a GPU's).
            out: folder for the scores, written block by block; rerun the same call to resume.
            top: keep only the `top` most helpful and most harmful examples of each query.
            progress: show progress bars, and an estimate before long work.
            by_segment: keep the contribution of each segment (TracIn: of each checkpoint).
            by_layer: keep the contribution of each layer (gradient methods only); with "heads",
                of each head of the attention projections.
            examples: score only these training examples, by their indices, or {stage: indices}:
                for example the candidates that a `GradientStore` ranked first.
            workers: processes that load data.
            executor: None for this process and its process group, "ray" for all free workers of a
                Ray cluster, which share the work. They need the same modules and, with `out`, a
                folder that all of them see.
        """
        if executor is not None:
            given = {name: x for name, x in locals().items() if name not in ("self", "executor")}
            return self._on_cluster(executor, **given)
        if by_layer not in (False, True, BY_HEAD):
            raise InvalidInput(f"by_layer={by_layer!r} must be True, False or {BY_HEAD!r}")
        layered = BY_HEAD if by_layer == BY_HEAD else BY_LAYER
        by = layered if by_layer else BY_SEGMENT if by_segment else None
        if by_segment and by_layer:
            raise InvalidInput("by_segment and by_layer cannot be combined: ask for one of the two")
        if by_layer and "by_layer" not in self.accepts:
            raise InvalidInput(
                f"by_layer: the scores of {self.name} are not sums over layers. Leave it out"
            )
        if len(study.runs) > 1 and top is not None:
            raise InvalidInput(
                f"top={top} with {len(study.runs)} runs: the strongest examples of the "
                "mean are not known from those of each run. Leave top out, or attribute one run"
            )
        queries = QuerySet.of(study, query, query_weights, query_rank)
        options = ComputeOptions(device, dtype, batch_size, memory, progress, workers)

        def each() -> Iterator[Scores]:
            for k, run in enumerate(study.runs):
                folder = (
                    as_path(out) / f"run-{k}" if out is not None and len(study.runs) > 1 else out
                )
                with torch.no_grad(), precision_as_asked(dtype), collect_warnings():
                    workspace = self.lay_out(study, run, queries, options, examples)
                    scores = self.score(workspace, folder, top, by)
                yield scores

        with (
            World.together() as world,
            one_bar(self.name, len(study.runs)) if progress and world.first else nullcontext(),
        ):
            if len(study.runs) == 1:
                return next(each())
            mean = ensemble(each())
            if out is not None and world.first:
                mean.save(out)
            world.wait()
            return mean

    def _on_cluster(self, executor: str, **call: Any) -> Scores:
        """The same call by the workers of a cluster."""
        if executor != "ray":
            raise InvalidInput(f"executor={executor!r}: use None for this process, or 'ray'")
        from whence.engine.cluster import on_ray

        if call["out"] is None:
            scores: Scores = on_ray(partial(self.attribute, **call), resumes=False)
            return scores
        on_ray(partial(self._store, **call), resumes=True)
        return Scores.load(call["out"])

    def _store(self, **call: Any) -> None:
        """Write the scores to their folder, from which the caller loads them."""
        self.attribute(**call)

    def lay_out(
        self,
        study: Study,
        run: Run,
        query: Any,
        options: ComputeOptions,
        examples: Any = None,
    ) -> Workspace:
        """One run of the study, ready for these queries; refuses what the method cannot do."""
        queries = QuerySet.of(study, query)
        weights, rank = (None, None) if queries is None else (queries.weights, queries.rank)
        if weights is not None and "query_weights" not in self.accepts:
            raise InvalidInput(
                f"query_weights or a Contrast with {self.name}, whose scores are not linear in "
                "the queries: use a gradient method, such as Source, or add up the rows of its "
                "scores yourself"
            )
        if rank is not None and "query_rank" not in self.accepts:
            raise InvalidInput(
                f"query_rank={rank!r} means nothing to {self.name}, which has no query "
                "vectors in layers: leave it out"
            )
        if "examples" not in self.accepts:
            study.refuse_candidates(self.name)
            if examples is not None:
                raise InvalidInput(f"examples: {self.name} scores all examples. Leave it out")
        return Workspace.lay_out(
            study,
            run,
            options,
            query=queries,
            stage=self.stage,
            scope=self._scope or ("stage" if query is None else "query"),
            quiet=self._quiet,
            layers=self.default_layers,
            examples=examples,
        )

    def writer(
        self,
        workspace: Workspace,
        out: Folder,
        top: int | None,
        segments: int | None,
        places: Iterable[tuple[str, Weights]],
        what: str = LOSSES,
        layers: Sequence[str] | None = None,
    ) -> ScoreWriter:
        """The writer of this run's scores. It also stores the tallies of the ledger.

        Args:
            places: the stages and weights at which the model runs on training examples.
            what: what the scores depend on there: losses, or only outputs.
            layers: names of the layers whose contributions are kept.
        """
        world = workspace.world
        parts = {"by_segment": segments, "by_layer": layers}
        world.agree({"the method": self, "out": out, "top": top, **parts})
        writer = ScoreWriter(
            out,
            None if workspace.query is None else len(workspace.query),
            workspace.examples,
            key=self.key(workspace),
            segments=segments,
            layers=None if layers is None else len(layers),
            top=top,
            dtype=np.float64 if workspace.dtype == torch.float64 else np.float32,
            tried=None if out is None else workspace.tried(places, what),
            world=world,
        )
        workspace.ledger.restore(writer.account, writer.progress_file)
        if layers is not None:
            workspace.ledger.diagnostics["layers"] = list(layers)
        reasons = list(workspace.study.warnings(workspace.run))
        if workspace.query is not None and what == LOSSES:
            reasons += workspace.study.query_warnings(workspace.query.data)
        for message in reasons:
            warn(message, stacklevel=4)
        messages = collected_warnings()
        messages[:0] = [m for m in writer.account.get("warnings", []) if m not in messages]
        writer.account["warnings"] = messages  # later messages are saved with the progress
        return writer

    def key(self, workspace: Workspace) -> str:
        """A digest of everything that the scores depend on."""
        settings = call_text(self.name, self.settings(), {})  # with defaults, which may change
        return key_of({"method": settings, **workspace.identity()})

    def metadata(self, workspace: Workspace) -> dict[str, Any]:
        """What is stored with the scores, the same in all ranks."""
        study, world = workspace.study, workspace.world
        for data in study.data.values():
            data.check_unchanged()
        if world.size > 1:
            workspace.ledger.merge(world)
        task = study.tasks[study.stages[-1]]
        diagnostics = workspace.ledger.summary() | {
            "seconds": workspace.clock.seconds,
            "cpu_seconds": workspace.clock.cpu_seconds,
            "batch_size": workspace.batch_size,
            "tracked": workspace.tracked.summary(),
        }
        scored = {stage: workspace.scored(stage) for stage in workspace.stages}
        several = len(study.stages) > 1
        return {
            "method": self.name,
            "settings": self.settings() | workspace.settings(),
            "measurement": task.measurement,
            "unit": task.unit,
            "higher_is_better": task.higher_is_better,
            "query_ids": None if workspace.query is None else np.arange(len(workspace.query)),
            "train_ids": np.concatenate(list(scored.values())),
            "stage": [s for s, which in scored.items() for _ in which] if several else None,
            "diagnostics": diagnostics,
            "provenance": workspace.provenance() | {"call": repr(self)},
            "excluded": [asdict(e) for e in workspace.tracked.excluded],
        }

    @property
    def name(self) -> str:
        return type(self).__name__

    def settings(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {
            k: v for k, v in vars(self).items() if not k.startswith("_") and k not in self._fixed
        }

    def defaults_shown(self) -> dict[str, Any]:
        """The settings that need not be shown."""
        return defaults_of(type(self))

    def __repr__(self) -> str:
        return call_text(self.name, self.settings(), self.defaults_shown())
