"""TracIn, influence functions, TRAK and SOURCE in the projected space.

What the methods say of gradients g and curvature H is said here of Pg and PHPᵀ, P the store's
projection: d numbers per example and a d × d matrix (or one per layer), whole, with nothing
factored. Where P has orthonormal rows (the eigenbasis) this is exact within the subspace that was
kept; random signs keep inner products and the leading eigenvalues up to chance, about 1/√d.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whence.data import Batches
from whence.engine.scoring import Columns, Scoring
from whence.engine.workspace import Term, Workspace
from whence.layers.passes import Weights
from whence.methods.base import Method, asked_stages
from whence.methods.source import (
    PRECONDITIONED,
    Source,
    block_durations,
    described,
    known_optimizer,
    spread,
)
from whence.methods.trak import check_rank, cholesky
from whence.operators import key_of, response, survival
from whence.operators.fit import accumulator
from whence.run import Run, Segment
from whence.scores import Scores
from whence.store.rows import inner
from whence.study import Study

if TYPE_CHECKING:
    from whence.store.store import GradientStore

CHUNK = 1 << 14  # examples between two notes of progress

#: Pv of these queries at a checkpoint, (q, d)
Projected = Callable[[Weights], Tensor]


class FromStore(Scoring):
    """Scores as inner products of query vectors (q, d) with the stored rows."""

    store: GradientStore

    def _contributions(
        self, ready: Iterable[tuple[int, Any]], chunk: Columns, queries: int | None
    ) -> Tensor:
        assert queries is not None
        passes = self.workspace.final_passes
        shape = (len(self.terms), queries, len(chunk.indices))
        totals = torch.zeros(shape, dtype=accumulator(passes.dtype), device=passes.device)
        here = slice(int(chunk.indices[0]), int(chunk.indices[-1]) + 1)
        for which, vectors in ready:
            term, total = self.terms[which], totals[which]
            for checkpoint in term.checkpoints if term.stage == chunk.stage else ():
                rows = self.store.rows(chunk.stage, checkpoint)[here]
                total += inner(rows.to(passes.device), vectors)
                if not bool(total.sum().isfinite()):
                    self._refuse(rows, chunk, checkpoint)
        return totals

    @staticmethod
    def _refuse(rows: Tensor, chunk: Columns, checkpoint: Weights) -> None:
        bad = chunk.indices[(~rows.isfinite().all(1)).numpy()]
        if len(bad):
            named = ", ".join(map(str, bad[:5])) + (", ..." if len(bad) > 5 else "")
            raise ValueError(
                f"the stored gradients of {chunk.stage} example {named} at step {checkpoint.step} "
                "are NaN or infinite: the store is damaged. Delete it, and build it again"
            )

    def _chunk(self, queries: int) -> int:
        return CHUNK

    def _at_once(self) -> int:
        return max(1, self._fitting(len(self.terms)))  # which are made all at once

    def _vector(self) -> int:
        return self.store.dimension


class Stored(Method):
    """A method that answers from a store."""

    def __init__(self, store: GradientStore, stage: str | None) -> None:
        self._store, self.stage = store, stage

    @abstractmethod
    def terms(self, workspace: Workspace) -> list[Term]:
        """Which checkpoints' rows count, in the order of training."""

    @abstractmethod
    def vectors(
        self, workspace: Workspace, terms: list[Term], projected: Projected
    ) -> list[Tensor]:
        """The vectors (q, d) of each term."""

    def _attribute_one(
        self,
        workspace: Workspace,
        out: str | os.PathLike[str] | None,
        top: int | None,
        by_segment: bool,
    ) -> Scores:
        assert workspace.query is not None
        self._store.verify(workspace)
        terms = self.terms(workspace)
        writer = self._writer(workspace, out, top, len(terms) if by_segment else None)
        if writer.already is not None:
            return writer.already

        def vectors(
            data: Batches, stage: str, indices: NDArray[np.int64], examples: int
        ) -> Iterable[tuple[int, Tensor]]:
            projected = partial(self._store.projected, workspace, data, indices)
            wide = accumulator(workspace.final_passes.dtype)
            return enumerate(w.to(wide) for w in self.vectors(workspace, terms, projected))

        scoring = FromStore(workspace, terms, vectors, writer, by_segment)
        scoring.store = self._store
        with workspace.final_passes.clock("scores"):
            scoring.queries(workspace.query)
        return writer.finish(**self._metadata(workspace))

    def _workspace(self, study: Study, run: Run, query: Any, *how: Any) -> Workspace:
        """Laid out once for all queries: copying and checking the model takes longer than one."""
        if query is None:
            raise ValueError(
                "a store answers queries: for self-influence use the method itself, as in "
                "whence.Source().attribute(study)"
            )
        workspaces = self._store.workspaces
        if repr(how) not in workspaces:
            workspaces[repr(how)] = super()._workspace(study, run, query, *how)
        workspace = workspaces[repr(how)]
        workspace.final_passes.clock.seconds.clear()
        workspace.final_passes.clock.cpu_seconds.clear()
        stages = asked_stages(study, self.stage)
        return replace(
            workspace, query=study.query(query), stages=stages, diagnostics={}, account={}
        )

    def _key(self, workspace: Workspace) -> str:
        assert workspace.query is not None
        about = {
            "answer": repr(self),
            "store": self._store.fingerprint,
            "query": workspace.query.fingerprint(),
            "task": repr(workspace.final_passes.task),
            "measured": workspace.study.probe[workspace.study.stages[-1]]["measurements"],
        }
        return key_of(about)

    def _data(self, workspace: Workspace) -> dict[str, str]:
        """As the store knows them: its training data is not read again."""
        return {stage: self._store.data[stage]["sha256"] for stage in workspace.stages}

    def settings(self) -> dict[str, Any]:
        return super().settings() | self._store.settings


class StoredTracIn(Stored):
    """values[q, m] = -Σ_c η_c ⟨P∇f(q, θ_c), P∇L(m, θ_c)⟩"""

    def terms(self, workspace: Workspace) -> list[Term]:
        return [Term(c.stage, [c]) for c in workspace.run.checkpoints]

    def vectors(
        self, workspace: Workspace, terms: list[Term], projected: Projected
    ) -> list[Tensor]:
        found = []
        for checkpoint in workspace.run.checkpoints:
            η = workspace.rates(partial(workspace.run.rate_at, checkpoint))
            found.append(-self._store.projection(workspace).spread(η) * projected(checkpoint))
        return found


class StoredInfluence(Stored):
    """values[q, m] = -(1/N) (P∇f(q))ᵀ (PHPᵀ + λ)⁻¹ P∇L(m) at the final model, stages pooled."""

    def __init__(self, store: GradientStore, damping: float | str, stage: str | None) -> None:
        super().__init__(store, stage)
        if damping != "source" and not (isinstance(damping, (int, float)) and damping > 0):
            raise ValueError(f"damping={damping!r} must be positive, or 'source' for λ = 1/(η̄K)")
        self.damping = damping

    def terms(self, workspace: Workspace) -> list[Term]:
        return [Term(stage, [workspace.run.final]) for stage in workspace.study.stages]

    def vectors(
        self, workspace: Workspace, terms: list[Term], projected: Projected
    ) -> list[Tensor]:
        N = sum(len(workspace.study.used(workspace.run, stage)) for stage in workspace.study.stages)
        λ = self._damping(workspace)
        key = {"inverse": "fisher", "damping": λ.tolist()}

        def fit() -> list[Tensor]:
            pooled = [
                self._store.curvature(workspace, s, workspace.run.final)
                for s in workspace.study.stages
            ]
            sums = [sum(parts[1:], parts[0]) for parts in zip(*pooled, strict=True)]
            columns = self._store.projection(workspace).columns
            return [
                cholesky_damped(total / N, λ[where])
                for total, where in zip(sums, columns, strict=True)
            ]

        w = solve(self._store.kept(workspace, key, fit), projected(workspace.run.final)) / -N
        return [w for _ in terms]

    def _damping(self, workspace: Workspace) -> Tensor:
        projection = self._store.projection(workspace)
        if not isinstance(self.damping, str):
            return torch.full((projection.dimension,), float(self.damping), dtype=torch.float64)
        total = torch.zeros(projection.dimension, dtype=torch.float64)
        for segment in workspace.run.segments("stages"):
            refuse_preconditioned(workspace, segment, "damping='source'")
            total += projection.spread(block_durations(workspace, segment)).cpu()
        return 1 / total.clamp_min(torch.finfo(torch.float32).tiny)


class StoredTrak(Stored):
    """values[q, m] = -φ(q)ᵀ (ΦᵀΦ + NλI)⁻¹ P∇L(m), φ = P∇f, at the final model, stages pooled."""

    def __init__(self, store: GradientStore, damping: float, stage: str | None) -> None:
        super().__init__(store, stage)
        if not 0 <= damping < float("inf"):
            raise ValueError(f"damping={damping!r} must be zero or a positive number")
        self.damping = float(damping)

    def terms(self, workspace: Workspace) -> list[Term]:
        return [Term(stage, [workspace.run.final]) for stage in workspace.study.stages]

    def vectors(
        self, workspace: Workspace, terms: list[Term], projected: Projected
    ) -> list[Tensor]:
        N = sum(len(workspace.study.data[stage]) for stage in workspace.study.stages)
        if self.damping == 0:
            check_rank(self._store.dimension, N)

        def fit() -> list[Tensor]:
            pooled = [self._store.measured(workspace, stage) for stage in workspace.study.stages]
            sums = [sum(parts[1:], parts[0]) for parts in zip(*pooled, strict=True)]
            return [
                cholesky(total, self.damping, N, workspace.final_passes.dtype) for total in sums
            ]

        key = {
            "inverse": "measurement",
            "damping": self.damping,
            "task": repr(workspace.final_passes.task),
        }
        w = -solve(self._store.kept(workspace, key, fit), projected(workspace.run.final))
        return [w for _ in terms]


@dataclass(frozen=True)
class Stretch:
    """A segment in one part of the projected space.

    M = T^½ H̄ T^½ = V diag(x) Vᵀ, with T = η̄K of each coordinate; H̄ itself only where some T is 0.
    """

    x: Tensor  # (d,)
    V: Tensor  # (d, d)
    T: Tensor  # (d,)
    H: Tensor | None

    def respond(self, v: Tensor) -> Tensor:
        """∫₀¹ T exp(-u H̄ T) du v = T^½ (1 - exp(-M))/M T^½ v, what a steady pull adds up to."""
        root = self.T.sqrt()
        return (v * root) @ self.V * response(self.x, 1.0) @ self.V.T * root

    def survive(self, v: Tensor) -> Tensor:
        """exp(-H̄ T) v, the query as seen from the start of the segment."""
        if self.H is not None:  # I - exp(-H̄T) = H̄ ∫₀¹ T exp(-u H̄ T) du, also where T is singular
            return v - self.respond(v) @ self.H
        root = self.T.sqrt()
        return (v * root) @ self.V * survival(self.x, 1.0) @ self.V.T / root


class StoredSource(Stored):
    """SOURCE, with each segment's curvature a whole d × d matrix.

    values[q, m] = -(1/N) v_Lᵀ Σ_ℓ S̄_L ⋯ S̄_{ℓ+1} F_r(H̄_ℓ) Pḡ_ℓ(m),  H̄_ℓ = mean over checkpoints of
    P H_c Pᵀ,  S̄ = exp(-η̄K H̄).
    """

    def __init__(
        self, store: GradientStore, segments: int | str | Sequence[int], stage: str | None
    ) -> None:
        super().__init__(store, stage)
        self.segments = segments if isinstance(segments, (int, str)) else list(segments)

    def terms(self, workspace: Workspace) -> list[Term]:
        return [Term(s.stage.name, s.checkpoints) for s in workspace.run.segments(self.segments)]

    def vectors(
        self, workspace: Workspace, terms: list[Term], projected: Projected
    ) -> list[Tensor]:
        segments = workspace.run.segments(self.segments)
        stretches = [self._stretches(workspace, segment) for segment in segments]
        workspace.diagnostics.setdefault(
            "segments",
            [
                described(segment, None)
                | spread(torch.cat([part.T for part in parts]).tolist(), [part.x for part in parts])
                for segment, parts in zip(segments, stretches, strict=True)
            ],
        )
        columns = self._store.projection(workspace).columns
        v = projected(workspace.run.final).to(stretches[-1][0].V.dtype)
        found: list[Tensor] = []
        for k in reversed(range(len(segments))):
            N = len(workspace.study.used(workspace.run, segments[k].stage.name))
            parts = list(zip(stretches[k], columns, strict=True))
            r = torch.cat([part.respond(v[:, where]) for part, where in parts], 1)
            found.insert(0, r / (-N * len(segments[k].checkpoints)))
            if k > 0:
                before = v.square().sum(1)
                v = torch.cat([part.survive(v[:, where]) for part, where in parts], 1)
                Source._note_survival(workspace, k, v.square().sum(1) / before)
        return found

    def _stretches(self, workspace: Workspace, segment: Segment) -> list[Stretch]:
        refuse_preconditioned(workspace, segment, "SOURCE from a store")
        projection = self._store.projection(workspace)
        T = projection.spread(block_durations(workspace, segment))
        checkpoints = segment.checkpoints
        key = {"segment": [c.sha256 for c in checkpoints], "durations": T.tolist()}
        stage = segment.stage.name

        def fit() -> list[Tensor]:
            N = len(workspace.study.used(workspace.run, stage))
            each = [self._store.curvature(workspace, stage, c) for c in checkpoints]
            found = []
            for parts, where in zip(zip(*each, strict=True), projection.columns, strict=True):
                H = sum(parts[1:], parts[0]) / (N * len(checkpoints))
                root = T[where].sqrt()
                x, V = torch.linalg.eigh(root.unsqueeze(1) * H * root)
                held = [x.clamp_min(0), V, H if bool((T[where] == 0).any()) else x.new_empty(0)]
                found += [value.to(accumulator(workspace.final_passes.dtype)) for value in held]
            return found

        kept = self._store.kept(workspace, key, fit, on_disk=True)
        stretches = []
        for k, where in enumerate(projection.columns):
            x, V, H = kept[3 * k : 3 * k + 3]
            stretches.append(Stretch(x, V, T[where].to(V), H if H.numel() else None))
        return stretches


def refuse_preconditioned(workspace: Workspace, segment: Segment, what: str) -> None:
    """A diagonal preconditioner does not survive a projection."""
    optimizer = known_optimizer(workspace, segment)
    if optimizer in PRECONDITIONED:
        raise ValueError(
            f"{what} is for SGD: the preconditioner of {optimizer!r} has no counterpart in the "
            "projected space. Use whence.Source itself, or the store's other methods (influence "
            "with a number as damping)"
        )


def cholesky_damped(H: Tensor, damping: Tensor) -> Tensor:
    """The Cholesky factor of H + diag(λ)."""
    damped = H.clone()
    damped.diagonal().add_(damping.to(H))
    factor: Tensor
    factor, failed = torch.linalg.cholesky_ex(damped)
    if bool(failed):
        raise ValueError(
            f"the curvature is singular with a damping of {float(damping.min()):.0e}: its mean "
            f"diagonal entry is {float(H.diagonal().mean()):.1e}. Use a larger damping"
        )
    return factor


def solve(factors: list[Tensor], φ: Tensor) -> Tensor:
    """(q, d): each part's columns through the inverse of its matrix."""
    solved, start = [], 0
    for factor in factors:
        part = φ[:, start : start + len(factor)].to(factor)
        solved.append(torch.cholesky_solve(part.T, factor).T)
        start += len(factor)
    return torch.cat(solved, 1)
