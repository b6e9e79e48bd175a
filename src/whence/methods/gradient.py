"""What SOURCE, influence functions, TracIn and TRAK share: scores linear in training gradients.

A method says which checkpoints form its terms, and what the query vectors of each term are; the
scoring is here and the same for all.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whence.data import Batches
from whence.engine.scoring import Scoring, Tokens, by_token
from whence.engine.workspace import LOSS, Readouts, Term, Workspace
from whence.layers.passes import Signal, precision_as_asked
from whence.methods.base import Method, lay_out
from whence.operators import cost
from whence.scores import Scores
from whence.study import Study


class GradientMethod(Method):
    """A method whose scores are inner products of query vectors with training gradients."""

    _factored = False  # whether the query vectors are plain gradients
    _shared = False  # whether all terms have the same vectors

    # -- what a method defines -----------------------------------------------------------------

    @abstractmethod
    def terms(self, workspace: Workspace) -> list[Term]:
        """Which checkpoints' training gradients count, in the order of training."""

    @abstractmethod
    def prepare(self, workspace: Workspace, terms: list[Term]) -> Any:
        """Fit what the vectors need; called once per run."""

    @abstractmethod
    def vectors(
        self,
        workspace: Workspace,
        prepared: Any,
        data: Batches,
        stage: str,
        indices: np.ndarray,
        examples: int,
    ) -> Iterator[tuple[int, Readouts]]:
        """The vectors w of these queries for each term, by its number, in any order; to be used on
        so many examples. A set that was given is not kept here, so that its memory can go."""

    def training(
        self, workspace: Workspace, prepared: Any
    ) -> tuple[Signal, Mapping[str, Tensor] | None]:
        """What of an example is differentiated, and its weight if any, (n,) per stage."""
        return LOSS, None

    def passes_needed(self, workspace: Workspace) -> dict[str, int]:
        """How many passes of each kind over the training data, for the estimate."""
        terms = [term for term in self.terms(workspace) if term.stage in workspace.stages]
        return {"scores": sum(len(term.checkpoints) for term in terms)}

    def operations(self, workspace: Workspace, queries: int) -> dict[str, float]:
        """What a pass of each kind costs per example, for the estimate."""
        return cost.pass_operations(workspace.final_passes.tracked, queries, self._factored)

    def numbers_held(self, workspace: Workspace, queries: int) -> int:
        """How many numbers are in memory at once, for the estimate."""
        tracked = workspace.final_passes.tracked
        return 2 * cost.factor_numbers(tracked) + queries * cost.vector_numbers(tracked)

    # -- what all of them do -------------------------------------------------------------------

    def fit(
        self,
        study: Study,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        batch_size: int | None = None,
        memory: int | str | None = None,
        progress: bool = True,
        workers: int = 0,
    ) -> None:
        """Fit now what `attribute` needs besides queries, into the study's cache.

        `attribute` with the same settings finds it there. The arguments are those of `attribute`.
        """
        for run in study.runs:
            with torch.no_grad(), precision_as_asked():
                workspace = lay_out(
                    study,
                    run,
                    stage=self.stage,
                    device=device,
                    dtype=dtype,
                    batch_size=batch_size,
                    memory=memory,
                    progress=progress,
                    workers=workers,
                )
                self.prepare(workspace, self.terms(workspace))

    def estimate(
        self,
        study: Study,
        query: Any = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        batch_size: int | None = None,
        memory: int | str | None = None,
    ) -> dict[str, Any]:
        """What `attribute` would take of each run: seconds, bytes, and passes over the data."""
        with torch.no_grad(), precision_as_asked():
            workspace = self._workspace(
                study, study.runs[0], query, device, dtype, batch_size, memory, False, 0
            )
            self._announce_work(workspace)
        return dict(workspace.diagnostics["estimate"])

    def _announce_work(self, workspace: Workspace) -> None:
        queries = 1 if workspace.query is None else len(workspace.query)
        work, held = self.operations(workspace, queries), self.numbers_held(workspace, queries)
        passes = self.passes_needed(workspace)
        for kind in passes.keys() & {"covariances", "eigenvalues"}:
            passes[kind] *= workspace.factor_groups
        self._announce(workspace, work, passes, held)

    def tokens(
        self,
        study: Study,
        query: Any,
        examples: Sequence[int],
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        memory: int | str | None = None,
        progress: bool = True,
    ) -> list[Tokens]:
        """Scores of a few training examples, position by position: which of its tokens did it.

        Meant for the examples that `attribute` found: each costs a pass of its own at every
        checkpoint. Runs of several are not averaged: give a study of one.

        Args:
            examples: indices in the training data (of `stage`, or of the last stage).
        """
        if len(study.runs) != 1:
            raise ValueError(f"tokens() needs a study of one run, not of {len(study.runs)}")
        stage = self.stage or study.stages[-1]
        count = len(study.data[stage])
        wrong = [e for e in examples if not 0 <= e < count]
        if wrong:
            raise IndexError(f"examples={wrong[:3]} are not in the training data: it has {count}")
        if query is None:
            raise ValueError("tokens() needs queries: give the ones that were attributed")
        with torch.no_grad(), precision_as_asked():
            workspace = self._workspace(
                study, study.runs[0], query, device, dtype, None, memory, progress, 0
            )
            assert workspace.query is not None
            terms = self.terms(workspace)
            rows, last = np.arange(len(workspace.query)), study.stages[-1]
            prepared = self.prepare(workspace, terms)
            ready = dict(
                self.vectors(workspace, prepared, workspace.query, last, rows, len(examples))
            )
            return [by_token(workspace, terms, ready, stage, example) for example in examples]

    def _attribute_one(
        self,
        workspace: Workspace,
        out: str | os.PathLike[str] | None,
        top: int | None,
        by_segment: bool,
    ) -> Scores:
        terms = self.terms(workspace)
        writer = self._writer(workspace, out, top, len(terms) if by_segment else None)
        if writer.already is not None:
            return writer.already
        self._announce_work(workspace)
        prepared = self.prepare(workspace, terms)
        vectors = partial(self.vectors, workspace, prepared)
        signal, weights = self.training(workspace, prepared)
        scoring = Scoring(
            workspace, terms, vectors, writer, by_segment, signal, weights, self._shared
        )
        with workspace.final_passes.clock("scores"):
            if workspace.query is None:
                scoring.selves()
            else:
                scoring.queries(workspace.query)
        return writer.finish(**self._metadata(workspace))
