"""What SOURCE, influence functions, TracIn and TRAK share: scores linear in training gradients.

A method defines which checkpoints form its terms, and the query vectors of each term. The scoring
is here, the same for all. `SegmentedMethod` is what SOURCE does around its formula: settings,
segments, what each segment needs, and the query gradient.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Unpack

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from whence.engine.costs import SCORED, Cost, Workload, announce, estimated, show_progress
from whence.engine.dynamics import FLOOR, PRECONDITIONED, Rates
from whence.engine.ledger import segment_summary
from whence.engine.queries import Queries, QuerySet
from whence.engine.query_factors import operations as factor_operations
from whence.engine.query_factors import plan
from whence.engine.scoring import Parts, readouts
from whence.engine.tokens import Tokens, score_tokens, shared_tokens
from whence.engine.workspace import (
    GAUSS_NEWTON,
    LOSS,
    ComputeOptions,
    Options,
    Outline,
    Term,
    Workspace,
)
from whence.errors import (
    InvalidIndex,
    InvalidInput,
    check_choice,
    check_damping,
    check_share,
    flag,
    whole,
)
from whence.layers.passes import Signal, Weights, precision_as_asked
from whence.methods.base import Folder, Method
from whence.operators import FISHERS, KINDS, Operator, cost
from whence.run import Segment
from whence.run.run import QUERY_AT
from whence.scores import Scores
from whence.scores.result import BY_SEGMENT
from whence.study import Study
from whence.world import World

AUTO, SEGMENTS = "auto", 3  # the choice of `chosen_segments`, and the paper's number
VECTOR_STEPS = 10  # reads and writes of a query's vector in each segment, for the estimate
USUAL_PRODUCTS = 40  # Lanczos steps with the Gauss-Newton matrix, for the estimate
USUAL_STEPS = 10  # Lanczos steps with a layer's whitened curvature, for the estimate

#: (numbers of terms, the vectors w that these terms share, a factor that multiplies w)
Vectors = Iterator[tuple[Sequence[int], Any, float]]


class GradientMethod(Method):
    """A method whose scores are inner products of query vectors with training gradients."""

    accepts = frozenset({"query_weights", "query_rank", "by_layer", "examples"})
    _factored = False  # whether the query vectors are plain gradients
    _shared = False  # whether all terms have the same vectors
    _joint = False  # whether the query vectors are of all layers together

    # -- what a method defines -------------------------------------------------------------------

    def terms(self, workspace: Outline) -> list[Term]:
        """The checkpoints whose training gradients count, in the order of training; by default the
        final one, for the examples of every stage."""
        return [Term(stage.name, [workspace.run.final]) for stage in workspace.run.stages]

    @abstractmethod
    def prepare(self, workspace: Workspace, terms: list[Term]) -> Any:
        """Fit what the vectors need; called once per run."""

    @abstractmethod
    def vectors(self, workspace: Workspace, prepared: Any, queries: Queries) -> Vectors:
        """The vectors w of these queries for each term, in any order. The caller may reuse the
        memory of the vectors that it receives."""

    def training(
        self, workspace: Workspace, prepared: Any
    ) -> tuple[Signal, Mapping[str, Tensor] | None]:
        """What is differentiated for each example, and weights of the examples, (n,) per stage."""
        return LOSS, None

    def passes_needed(self, work: Workload) -> dict[str, int]:
        """How many passes of each kind over the training data, for the estimate."""
        return {"scores": work.scored}

    def query_passes(self, work: Workload) -> int:
        """At how many checkpoints queries have gradients, for the estimate."""
        return 1

    def operations(self, work: Workload) -> dict[str, float]:
        """What a pass of each kind costs per example, for the estimate."""
        tracked, count = work.tracked, work.asked
        kind = KINDS.get(getattr(self, "curvature", None) or "ekfac")
        whole = [] if kind is None else kind.whole_blocks(tracked.positions)
        columns = tracked.outputs if getattr(self, "fisher", None) == "exact" else 1
        operations = cost.pass_operations(tracked, count, self._factored, whole, columns)
        if work.queries is None:  # every example is a query that has to be solved
            solved = cost.pass_operations(tracked, work.examples, self._factored)
            operations |= {kind: solved[kind] for kind in ("sums", "products")}
        return operations

    def fitted_numbers(self, work: Workload, passes: Mapping[str, int]) -> int:
        """How many numbers of what is fitted are in memory at once, for the estimate: of the last
        segment while it is fitted, and of the others at their owners."""
        if not passes.get("eigenvalues") and not passes.get("covariances"):
            return 0
        per_segment = 2 * cost.factor_numbers(work.tracked, bool(passes.get("covariances")))
        owned, others = -(-per_segment // work.ranks), 0 if self._shared else work.terms - 1
        total = others * owned + (owned if work.divided else per_segment)
        return total if work.room is None else min(total, work.room // work.accumulator.itemsize)

    def rate_numbers(self, work: Workload) -> int:
        """How many numbers of Adam's rates are in memory at once, for the estimate: D^½ of every
        parameter, in M and beside it."""
        sets = 1 if self._shared else work.terms
        return 2 * sets * cost.vector_numbers(work.tracked) if self.whitens(work) else 0

    def whitens(self, work: Workload) -> bool:
        """Whether curvature is whitened by the optimizer's preconditioner, for the estimate."""
        return work.preconditioned

    def counted(self, work: Workload) -> Cost:
        """The counts of all its work."""
        tracked, count, sets = work.tracked, work.asked, 1 if self._shared else work.terms
        passes, per_example = self.passes_needed(work), self.operations(work)
        for kind in passes.keys() & {"covariances", "eigenvalues"}:
            passes[kind] *= work.factor_groups
        size, low_rank = work.accumulator.itemsize, None
        if work.query_rank is not None:
            how = work.query_rank, sets, self._joint
            low_rank = plan(tracked.blocks, size, work.memory, count, *how)
        fitted, rates = self.fitted_numbers(work, passes), self.rate_numbers(work)
        handled = dict.fromkeys(passes, cost.handled_numbers(tracked))
        if low_rank is None:
            whole = self._count_whole_vectors(work, sets, per_example, handled)
            vectors, blocks, groups, together = whole
        else:
            per_example["scores"] = factor_operations(work, low_rank)
            vectors, groups = low_rank.numbers(tracked.blocks, sets), len(low_rank.groups)
            blocks, together = -(-count // low_rank.rows), low_rank.whole
        query_passes = groups * self.query_passes(work)
        examples = {k: work.examples if k in SCORED else work.trained for k in passes}
        operations = {k: examples[k] * passes[k] * per_example[k] for k in passes}
        solved = work.queries or work.examples
        operations["queries"] = query_passes * solved * tracked.operations
        sides: list[int] = []
        steps = 0
        if passes.get("covariances"):
            steps = USUAL_STEPS * sets if self.whitens(work) else 0
            operations["queries"] += self._solving(work, sets, steps)
            sides = sets * [side for b in tracked.blocks for side in cost.sides(b)]
        if low_rank is None and all(t == 1 for t in tracked.positions.values()):
            # a term's checkpoints meet the queries together
            meet = work.scored - sets if not self._factored else 0
            operations["scores"] -= (
                work.examples * meet * (per_example["scores"] - tracked.operations)
            )
            handled["scores"] *= sets / max(1, work.scored)
        touched = {k: examples[k] * passes[k] * handled[k] for k in passes}
        vector = cost.vector_numbers(tracked, self._factored)
        touched["queries"] = VECTOR_STEPS * (sets + steps) * count * float(vector)
        passes["scores"] *= blocks
        numbers, turns = (fitted, vectors, rates), (query_passes, together)
        return Cost(passes, operations, touched, *numbers, sides, low_rank, *turns)

    def _count_whole_vectors(
        self, work: Workload, sets: int, per_example: dict[str, float], handled: dict[str, float]
    ) -> tuple[int, int, int, int]:
        """Add what scores take with whole query vectors. Returns how many of their numbers are in
        memory, how many passes over the examples they take, in how many groups layers take
        turns, and how many queries are taken together."""
        tracked, count, size = work.tracked, work.asked, work.accumulator.itemsize
        groups = cost.vector_groups(tracked, size, work.memory, self._factored, self._joint)
        largest = max(sum(block.size for block in group) for group in groups)
        at_once = max(1, cost.queries_at_once(largest, size, work.memory, 1))
        blocks = -(-count // at_once) * len(groups)  # each has a pass over the examples
        per_example["scores"] += (blocks - 1) * cost.again(tracked)
        handled["scores"] = blocks * handled.get("scores", 0.0)
        handled["scores"] += cost.meeting_numbers(tracked, count, self._factored)
        vector = cost.vector_numbers(tracked, self._factored)
        most = max(work.memory // 2 // size, 3 * largest)
        return min((sets + 1) * count * vector, most), blocks, len(groups), at_once

    @staticmethod
    def _solving(work: Workload, sets: int, steps: int) -> float:
        """Operations of the queries' rotations, and of this many Krylov steps."""
        tracked, solved = work.tracked, work.queries or work.examples
        rotated = cost.rotations(tracked, solved, work.examples, sets)
        return rotated + cost.krylov(tracked, solved, steps, work.trained)

    # -- what all of them do ---------------------------------------------------------------------

    def score(
        self, workspace: Workspace, out: Folder, top: int | None, by: str | None = None
    ) -> Scores:
        terms = self.terms(workspace)
        places = [(term.stage, c) for term in terms for c in term.checkpoints]
        layers = Parts.of(workspace, by).names or None
        segments = len(terms) if by == BY_SEGMENT else None
        writer = self.writer(workspace, out, top, segments, places, layers=layers)
        if writer.already is not None:
            return writer.already
        if workspace.progress and workspace.reads_training_data:
            counts = self.counted(self.workload(workspace, terms))
            announce(self, workspace, counts)
            show_progress(workspace, counts)
        if self._joint:
            workspace.check_room(self)
        workspace.in_step = self._factored  # plain gradients are not worth dealing
        prepared = self.prepare(workspace, terms)
        vectors = partial(self.vectors, workspace, prepared)
        signal, weights = self.training(workspace, prepared)
        forms = self._shared, self._factored, self._joint
        scoring = workspace.scoring(terms, vectors, writer, by, signal, weights, *forms)
        with workspace.clock("scores"):
            if workspace.query is None:
                scoring.selves()
            else:
                scoring.queries(workspace.query)
        return writer.finish(**self.metadata(workspace))

    def fit(self, study: Study, **options: Unpack[Options]) -> None:
        """Fit everything that does not depend on queries, and store it in the study's cache.

        `attribute` with the same settings reuses it.

        Args:
            options: device, dtype, batch_size, memory, progress, workers: as in `attribute`.
        """
        for run in study.runs:
            with World.together(), torch.no_grad(), precision_as_asked():
                workspace = Workspace.lay_out(
                    study,
                    run,
                    ComputeOptions(**options),
                    stage=self.stage,
                    layers=self.default_layers,
                )
                self.prepare(workspace, self.terms(workspace))

    def estimate(
        self,
        study: Study,
        query: Any = None,
        *,
        query_weights: ArrayLike | None = None,
        query_rank: int | str | None = None,
        **options: Unpack[Options],
    ) -> dict[str, Any]:
        """What `attribute` would take for each run: seconds, bytes, and passes over the data.

        Args:
            query_weights, query_rank: as in `attribute`.
            options: device, dtype, batch_size, memory: as in `attribute`.
        """
        options["progress"] = False
        with World.together(), torch.no_grad(), precision_as_asked():
            queries = QuerySet.of(study, query, query_weights, query_rank)
            workspace = self.lay_out(study, study.runs[0], queries, ComputeOptions(**options))
            work = self.workload(workspace, self.terms(workspace))
            return estimated(workspace, self.counted(work))

    def workload(self, workspace: Workspace, terms: list[Term]) -> Workload:
        """What the cost of these terms depends on."""
        first, query = first_scored(workspace, terms), workspace.query
        scored = [term for term in terms if term.stage in workspace.stages]
        return Workload(
            workspace.tracked,
            workspace.examples,
            sum(len(workspace.used(stage)) for stage in workspace.study.stages),
            None if query is None else len(query),
            len(terms),
            sum(len(term.checkpoints) for term in scored),
            sum(len(term.checkpoints) for term in terms[first:]),
            workspace.batch_size,
            workspace.memory,
            workspace.room,
            workspace.dtype,
            None if query is None else query.rank,
            workspace.world.size,
            not PRECONDITIONED.isdisjoint(workspace.run.optimizers.values()),
        )

    def tokens(
        self, study: Study, query: Any, examples: Sequence[int], **options: Unpack[Options]
    ) -> list[Tokens]:
        """Scores of a few training examples, token by token.

        Use it for the examples that `attribute` ranks first: each costs a separate pass at every
        checkpoint. The study must have one run. To score the tokens of queries instead, make one
        query of each (`whence.unpacked`).

        Args:
            examples: indices in the training data (of `stage`, or of the last stage).
            options: device, dtype, memory, progress: as in `attribute`.
        """
        if len(study.runs) != 1:
            raise InvalidInput(f"tokens() needs a study of one run, not of {len(study.runs)}")
        stage = self.stage or study.stages[-1]
        count = len(study.candidates.get(stage, study.data[stage]))
        examples = [whole("examples", example) for example in examples]
        wrong = [e for e in examples if not 0 <= e < count]
        if wrong:
            raise InvalidIndex(f"examples={wrong[:3]} are not in the training data: it has {count}")
        if query is None:
            raise InvalidInput("tokens() needs queries: give the ones that were attributed")
        with World.together() as world, torch.no_grad(), precision_as_asked():
            workspace = self.lay_out(study, study.runs[0], query, ComputeOptions(**options))
            assert workspace.query is not None
            world.agree({"the method": self, "examples": list(examples)})
            terms = self.terms(workspace)
            prepared = self.prepare(workspace, terms)
            rows = np.arange(len(workspace.query))
            queries = workspace.query.some(study.stages[-1], rows)
            ready: dict[int, Any] = {}
            for term_numbers, w, scale in self.vectors(workspace, prepared, queries):
                ready |= dict.fromkeys(term_numbers, readouts(workspace, w, scale, len(examples)))
            mine = score_tokens(workspace, terms, ready, stage, world.mine(examples))
            return shared_tokens(world, mine, examples)


@dataclass(frozen=True)
class Stretch:
    """A prepared segment: M, D^½, N times its checkpoints, and whether its stage is scored."""

    M: Operator[Any]
    root: Any
    count: int
    scored: bool


class SegmentedMethod(GradientMethod):
    """A method that treats training as stationary within segments."""

    def __init__(
        self,
        segments: int | str | Sequence[int] = AUTO,
        curvature: str = "auto",
        fisher: str = "sampled",
        stage: str | None = None,
        damping: float = 0.0,
        weight_decay: str = "ignore",
        coupling: bool = True,
        query_at: str = "run",
        floor: float = FLOOR,
        seed: int = 0,
    ) -> None:
        check_choice("curvature", curvature, [*KINDS, GAUSS_NEWTON])
        check_choice("fisher", fisher, FISHERS)
        check_choice("weight_decay", weight_decay, ["ignore", "curvature"])
        check_choice("query_at", query_at, QUERY_AT)
        check_damping(damping)
        check_share("floor", floor)
        if curvature == GAUSS_NEWTON and fisher != "sampled":
            raise InvalidInput(
                f"fisher={fisher!r} means nothing to curvature='gauss-newton', which samples "
                "nothing: leave it out"
            )
        self.segments = read_segments(segments)
        self.curvature, self.fisher, self.stage, self.damping = curvature, fisher, stage, damping
        self.weight_decay, self.coupling = weight_decay, flag("coupling", coupling)
        self.query_at, self.floor, self.seed = query_at, floor, whole("seed", seed)
        self._joint = self._joint or curvature == GAUSS_NEWTON

    def terms(self, workspace: Outline) -> list[Term]:
        spec = chosen_segments(workspace) if self.segments == AUTO else self.segments
        segments = workspace.run.segments(spec)
        return [Term(s.stage.name, self.points(s), s) for s in segments]

    def points(self, segment: Segment) -> Sequence[Weights]:
        """Where a segment's gradients and curvature are taken."""
        return segment.checkpoints

    def curvature_of(
        self, workspace: Workspace, term: Term, rates: Rates, resident: int
    ) -> Operator[Any]:
        """H̄ of a segment.

        Args:
            resident: how many segments' are needed at the same time.
        """
        how: Any = {"fisher": self.fisher, "seed": self.seed, "resident": resident}
        stages, points = [term.stage], term.checkpoints
        return workspace.curvature(self.curvature, stages, points, rates.applied, **how)

    @abstractmethod
    def operator(
        self, workspace: Workspace, term: Term, rates: Rates, resident: int
    ) -> tuple[Any, Any, dict[str, float]]:
        """M of a segment, D^½, and the coupling c of each layer."""

    def prepare(self, workspace: Workspace, terms: list[Term]) -> dict[int, Stretch]:
        """The segments from the first whose examples are scored; earlier ones do not contribute."""
        first = first_scored(workspace, terms)
        summaries = [segment_summary(term.segment) for term in terms[:first]]
        stretches = {}
        for k, term in list(enumerate(terms))[first:]:
            assert term.segment is not None
            rates = self.rates(workspace, term.segment)
            M, root, c = self.operator(workspace, term, rates, resident=len(terms) - first)
            count = len(workspace.used(term.stage)) * len(term.checkpoints)
            stretches[k] = Stretch(M, root, count, term.stage in workspace.stages)
            about = rates.durations, M.eigenvalues(), c
            summaries.append(segment_summary(term.segment, *about))
        workspace.ledger.diagnostics["segments"] = summaries
        return stretches

    def rates(self, workspace: Workspace, segment: Segment) -> Rates:
        """D = η̄K P̄, and what damping and weight decay add to M."""
        return Rates.of(
            workspace,
            segment,
            floor=self.floor,
            damping=self.damping,
            weight_decay=self.weight_decay,
        )

    def query_gradient(self, workspace: Workspace, queries: Queries, bases: Any) -> Any:
        """∇f(q), the mean over the last stage's checkpoints, or at the final model."""
        points = workspace.run.query_points(self.query_at)
        return workspace.query_gradients(queries, points, bases)

    def query_passes(self, work: Workload) -> int:
        return work.fitted if self.query_at == "run" else 1

    def passes_needed(self, work: Workload) -> dict[str, int]:
        passes = {"products": USUAL_PRODUCTS * work.fitted}
        if self.curvature != GAUSS_NEWTON:
            passes = KINDS[self.curvature].passes_over(work.fitted)
        return passes | super().passes_needed(work)


def read_segments(given: Any) -> int | str | list[int]:
    """`segments` as plain numbers; whether they fit is known with the run."""
    if isinstance(given, str):
        if given not in (AUTO, "stages"):
            raise InvalidInput(
                f"segments={given!r}: use a number, a list of update counts, 'auto' or 'stages'"
            )
        return given
    if np.ndim(given) == 0:
        return whole("segments", given)
    return [whole("segments", end) for end in given]


def chosen_segments(workspace: Outline) -> int | str:
    """The meaning of segments="auto": three if a single stage trained mostly weights that are
    shared over positions (convolutions, transformers), otherwise one for each stage."""
    sizes = {name: block.size for name, block in workspace.blocks.items()}
    shared = sum(sizes[name] for name, t in workspace.positions.items() if t > 1)
    enough = len(workspace.run.stages) == 1 and len(workspace.run.checkpoints) >= SEGMENTS
    return SEGMENTS if enough and shared > sum(sizes.values()) / 2 else "stages"


def first_scored(workspace: Outline, terms: list[Term]) -> int:
    """The index of the first segment whose examples are scored."""
    return next(k for k, term in enumerate(terms) if term.stage in workspace.stages)
