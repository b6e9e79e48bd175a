"""What SOURCE, influence functions, TracIn and TRAK share: scores linear in training gradients.

A method says which checkpoints form its terms, and what the query vectors of each term are; the
scoring is here and the same for all.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from whence.engine.estimate import announce
from whence.engine.options import ComputeOptions, Options
from whence.engine.scoring import Tokens, score_tokens
from whence.engine.workspace import LOSS, Queries, Term, Workspace
from whence.errors import InvalidIndex, InvalidInput
from whence.layers.passes import Signal, precision_as_asked
from whence.methods.base import Folder, Method
from whence.operators import cost
from whence.scores import Scores
from whence.study import Study

#: for the terms with these numbers: the vectors w of some queries, and a number they are times
Vectors = Iterator[tuple[Sequence[int], Any, float]]


class GradientMethod(Method):
    """A method whose scores are inner products of query vectors with training gradients."""

    _factored = False  # whether the query vectors are plain gradients
    _shared = False  # whether all terms have the same vectors

    # -- what a method defines -------------------------------------------------------------------

    @abstractmethod
    def terms(self, workspace: Workspace) -> list[Term]:
        """Which checkpoints' training gradients count, in the order of training."""

    @abstractmethod
    def prepare(self, workspace: Workspace, terms: list[Term]) -> Any:
        """Fit what the vectors need; called once per run."""

    @abstractmethod
    def vectors(self, workspace: Workspace, prepared: Any, queries: Queries) -> Vectors:
        """The vectors w of these queries for each term, in any order. What was given is not used
        here any more, so that its memory can be reused."""

    def training(
        self, workspace: Workspace, prepared: Any
    ) -> tuple[Signal, Mapping[str, Tensor] | None]:
        """What of an example is differentiated, and its weight if any, (n,) per stage."""
        return LOSS, None

    def passes_needed(self, workspace: Workspace, terms: list[Term]) -> dict[str, int]:
        """How many passes of each kind over the training data, for the estimate."""
        scored = [term for term in terms if term.stage in workspace.stages]
        return {"scores": sum(len(term.checkpoints) for term in scored)}

    def operations(self, workspace: Workspace, queries: int) -> dict[str, float]:
        """What a pass of each kind costs per example, for the estimate."""
        work = cost.pass_operations(workspace.tracked, queries, self._factored)
        if workspace.query is None:  # every example is a query that has to be solved
            everyone = sum(len(workspace.study.data[stage]) for stage in workspace.stages)
            solved = cost.pass_operations(workspace.tracked, everyone, self._factored)
            work |= {kind: solved[kind] for kind in ("sums", "products")}
        return work

    def numbers_held(self, workspace: Workspace, queries: int) -> int:
        """How many numbers are in memory at once, for the estimate."""
        tracked = workspace.tracked
        return 2 * cost.factor_numbers(tracked) + queries * cost.vector_numbers(tracked)

    # -- what all of them do ---------------------------------------------------------------------

    def score(self, workspace: Workspace, out: Folder, top: int | None, by_segment: bool) -> Scores:
        terms = self.terms(workspace)
        places = [(term.stage, c) for term in terms for c in term.checkpoints]
        writer = self.writer(workspace, out, top, len(terms) if by_segment else None, places)
        if writer.already is not None:
            return writer.already
        if workspace.reads_training_data:
            self._announce(workspace, terms)
        prepared = self.prepare(workspace, terms)
        vectors = partial(self.vectors, workspace, prepared)
        signal, weights = self.training(workspace, prepared)
        scoring = workspace.scoring(
            terms, vectors, writer, by_segment, signal, weights, self._shared
        )
        with workspace.clock("scores"):
            if workspace.query is None:
                scoring.selves()
            else:
                scoring.queries(workspace.query)
        return writer.finish(**self.metadata(workspace))

    def fit(self, study: Study, **options: Unpack[Options]) -> None:
        """Fit now what `attribute` needs besides queries, into the study's cache.

        `attribute` with the same settings finds it there.

        Args:
            options: device, dtype, batch_size, memory, progress, workers: as in `attribute`.
        """
        for run in study.runs:
            with torch.no_grad(), precision_as_asked():
                workspace = Workspace.lay_out(
                    study, run, ComputeOptions(**options), stage=self.stage
                )
                self.prepare(workspace, self.terms(workspace))

    def estimate(
        self, study: Study, query: Any = None, **options: Unpack[Options]
    ) -> dict[str, Any]:
        """What `attribute` would take for each run: seconds, bytes, and passes over the data.

        Args:
            options: device, dtype, batch_size, memory: as in `attribute`.
        """
        options["progress"] = False
        with torch.no_grad(), precision_as_asked():
            workspace = self.lay_out(study, study.runs[0], query, ComputeOptions(**options))
            self._announce(workspace, self.terms(workspace))
        return dict(workspace.ledger.diagnostics["estimate"])

    def _announce(self, workspace: Workspace, terms: list[Term]) -> None:
        queries = 1 if workspace.query is None else len(workspace.query)
        passes = self.passes_needed(workspace, terms)
        for kind in passes.keys() & {"covariances", "eigenvalues"}:
            passes[kind] *= workspace.factor_groups
        work, numbers = self.operations(workspace, queries), self.numbers_held(workspace, queries)
        announce(self, workspace, work, passes, numbers)

    def tokens(
        self, study: Study, query: Any, examples: Sequence[int], **options: Unpack[Options]
    ) -> list[Tokens]:
        """Scores of a few training examples, position by position: which of its tokens did it.

        Meant for the examples that `attribute` found: each costs a pass of its own at every
        checkpoint. Several runs are not averaged: give a study of one.

        Args:
            examples: indices in the training data (of `stage`, or of the last stage).
            options: device, dtype, memory, progress: as in `attribute`.
        """
        if len(study.runs) != 1:
            raise InvalidInput(f"tokens() needs a study of one run, not of {len(study.runs)}")
        stage = self.stage or study.stages[-1]
        count = len(study.data[stage])
        wrong = [e for e in examples if not 0 <= e < count]
        if wrong:
            raise InvalidIndex(f"examples={wrong[:3]} are not in the training data: it has {count}")
        if query is None:
            raise InvalidInput("tokens() needs queries: give the ones that were attributed")
        with torch.no_grad(), precision_as_asked():
            workspace = self.lay_out(study, study.runs[0], query, ComputeOptions(**options))
            assert workspace.query is not None
            terms = self.terms(workspace)
            prepared = self.prepare(workspace, terms)
            rows = np.arange(len(workspace.query))
            queries = Queries(workspace.query, study.stages[-1], rows)
            readouts: dict[int, Any] = {}
            for which, w, scale in self.vectors(workspace, prepared, queries):
                ready = workspace.readouts(w, scale, len(examples))
                readouts |= dict.fromkeys(which, ready)
            return [score_tokens(workspace, terms, readouts, stage, e) for e in examples]
