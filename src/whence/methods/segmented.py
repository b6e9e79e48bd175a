"""What SOURCE does around its formula: settings, segments, what each needs, the query gradient."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from whence.engine.dynamics import Rates
from whence.engine.ledger import segment_summary
from whence.engine.workspace import Queries, Term, Workspace
from whence.layers.passes import Weights
from whence.methods.gradient import GradientMethod
from whence.methods.settings import check_share, check_source, fitting_passes
from whence.operators import Operator
from whence.run import Segment


@dataclass(frozen=True)
class Stretch:
    """A segment made ready: M, D^½, N times its checkpoints, and whether its stage is scored."""

    M: Operator[Any]
    root: Any
    count: int
    scored: bool


class SegmentedMethod(GradientMethod):
    """A method that takes training as stationary within segments."""

    def __init__(
        self,
        segments: int | str | Sequence[int] = "stages",
        curvature: str = "auto",
        fisher: str = "sampled",
        stage: str | None = None,
        damping: float = 0.0,
        weight_decay: str = "ignore",
        coupling: bool = True,
        query_at: str = "run",
        floor: float = 0.1,
        seed: int = 0,
    ) -> None:
        check_source(curvature, fisher, damping, weight_decay, query_at)
        check_share("floor", floor)
        self.segments = segments if isinstance(segments, (int, str)) else list(segments)
        self.curvature, self.fisher, self.stage, self.damping = curvature, fisher, stage, damping
        self.weight_decay, self.coupling = weight_decay, bool(coupling)
        self.query_at, self.floor, self.seed = query_at, floor, seed

    def terms(self, workspace: Workspace) -> list[Term]:
        segments = workspace.run.segments(self.segments)
        return [Term(s.stage.name, self.points(s), s) for s in segments]

    def points(self, segment: Segment) -> Sequence[Weights]:
        """Where a segment's gradients and curvature are taken."""
        return segment.checkpoints

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
        run = workspace.run
        last = [c for c in run.checkpoints if c.stage == run.final.stage]
        points = last if self.query_at == "run" else [run.final]
        return workspace.query_gradients(queries, points, bases)

    def passes_needed(self, workspace: Workspace, terms: list[Term]) -> dict[str, int]:
        first = first_scored(workspace, terms)
        fitted = sum(len(term.checkpoints) for term in terms[first:])
        return fitting_passes(self.curvature, fitted) | super().passes_needed(workspace, terms)


def first_scored(workspace: Workspace, terms: list[Term]) -> int:
    """The index of the first segment whose examples are scored."""
    return next(k for k, term in enumerate(terms) if term.stage in workspace.stages)
