"""Unrolled differentiation (Hara et al., 2019; section 3.1 of the paper), for many queries at once.

Update t computes new weights θ and optimizer state s from its batch, with weights w_m = 1:

    g_t = (1/B_t) Σ_{m in batch t} w_m ∇L(m, θ_t)          (θ, s)_{t+1} = update_t(θ_t, s_t, g_t)

    values[q, m] = ∂f(q, θ_T) / ∂w_m = Σ_t (1/B_t) [m in batch t] ⟨ḡ_t(q), ∇L(m, θ_t)⟩

which is f(with m) - f(without m) to first order. ḡ_t, the derivative of f in g_t, comes from the
adjoints of what update t made. The adjoint of θ_t then gets H_t ḡ_t too, the Hessian of the batch.

*Expected*: an example counts at every update by its share 1/N, not by 1/B_t where it was drawn, and
H_t is that of a fresh batch: what trainings with other batches have in common.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from whence.engine.workspace import Workspace
from whence.errors import InvalidInput, check_choice, check_damping
from whence.methods.unrolling import Unrolling
from whence.replay.expected import ExpectedCredits
from whence.replay.growth import growth_summary, norms, note_growth
from whence.replay.objective import Tensors
from whence.replay.sweep import (
    Credit,
    QueryBlock,
    ReplayWorkspace,
    forward_operations,
    update_credits,
)
from whence.replay.training import Adjoint, Replay, Update
from whence.replay.updates import WEIGHT
from whence.run.run import QUERY_AT

CURVATURES = {"hessian": "hessian", "gauss-newton": "gauss_newton"}  # methods of `Objective`
PRODUCTS = {"hessian": 6, "gauss-newton": 4}  # a product with it costs as many forward passes


class Unrolled(Unrolling):
    """The exact derivative of the recorded training in the weight of every example.

    Needs a run that has recorded its batches (`recorder.step(indices)`); weights are replayed, in
    training mode if the model has batch norm, or dropout in a run of `Recipe.run`.
    `whence.evaluate.metasmoothness` measures beforehand whether the derivative predicts anything.

    Args:
        curvature: "hessian", or "gauss-newton" in its place, which has no negative directions along
            which the derivative could grow.
        expected: credit every example at every update, by 1/N, not only where it was drawn.
        curvature_batch: with `expected`, the number of examples for the curvature of each update,
            drawn anew (default: 512, or all).
        credit_every: with `expected`, updates per interval (default: a 32nd of the stage). A pass
            over the data credits every example at the weights in the middle of each interval.
        stage: attribute to this stage's examples only (default: all stages).
        damping: added to the eigenvalues of the curvature.
        query_at: take the query gradient at the "final" model, or along the "run" (the mean over
            the last stage's checkpoints).
        seed: seed of the curvature's batches.
    """

    def __init__(
        self,
        curvature: str = "hessian",
        expected: bool = False,
        curvature_batch: int | None = None,
        credit_every: int | None = None,
        stage: str | None = None,
        damping: float = 0.0,
        query_at: str = "final",
        seed: int = 0,
    ) -> None:
        check_choice("curvature", curvature, CURVATURES)
        check_choice("query_at", query_at, QUERY_AT)
        check_damping(damping)
        for name, value in (("curvature_batch", curvature_batch), ("credit_every", credit_every)):
            if value is not None and not expected:
                raise InvalidInput(
                    f"{name}={value} is for expected=True: otherwise each update's own batch counts"
                )
            if value is not None and value < 1:
                raise InvalidInput(f"{name}={value} must be at least 1")
        self.curvature, self.expected = curvature, expected
        self.curvature_batch, self.credit_every = curvature_batch, credit_every
        self.stage, self.damping, self.query_at, self.seed = stage, damping, query_at, seed

    def check(self, replay: Replay) -> None:
        if replay.active and (self.expected or self.curvature != "hessian"):
            raise InvalidInput(
                f"{self!r} cannot follow a model in training mode (dropout, batch norm): use "
                "expected=False, curvature='hessian'"
            )

    def sweep(
        self,
        workspace: ReplayWorkspace,
        block: QueryBlock,
        gradients: Tensors,
        adjoint: Adjoint | None,
        last: int,
    ) -> Iterator[Credit]:
        before = norms(gradients)
        if adjoint is None:
            adjoint = {name: {WEIGHT: gradient} for name, gradient in gradients.items()}
        expected = self._expected(workspace) if self.expected else None
        draw = None if expected is None else expected.draw
        size = workspace.at_once(len(block.indices))
        for update in workspace.replay.backward(last, block.first(workspace.run), draw, size):
            adjoint, pulls = update.pull_back(adjoint)
            pulls = update.unclip(pulls)
            slopes = self._through_gradient(workspace, update, adjoint, pulls)
            if update.step in workspace.replay.anchors or not update.step:
                note_growth(workspace, update.step, adjoint, before)
            if expected is None:
                yield from update_credits(update, slopes, adjoint)
            else:
                yield from expected.credits(block, update, pulls, adjoint)

    def _expected(self, workspace: ReplayWorkspace) -> ExpectedCredits:
        return ExpectedCredits(workspace, self.curvature_batch, self.credit_every, self.seed)

    def _through_gradient(
        self, workspace: ReplayWorkspace, update: Update, adjoint: Adjoint, pulls: Tensors
    ) -> list[Tensor]:
        """Add (H_t + λ) ḡ_t to the adjoint of θ_t; and ⟨ḡ_t, ∇L(m, θ_t)⟩ (q, n), part by part."""
        objective, weights = workspace.replay.objectives[update.stage.name], update.point.weights
        product, slopes = getattr(objective, CURVATURES[self.curvature]), []
        for _, batch in update.parts if pulls else ():
            products, slope = product(weights, pulls, batch, 1 / update.examples)
            for name, value in products.items():
                adjoint[name][WEIGHT].add_(value)
            slopes.append(slope)
        for name in (n for n in pulls if self.damping and not update.measures(n)):
            adjoint[name][WEIGHT].add_(pulls[name], alpha=self.damping)
        return slopes

    def operations(self, workspace: ReplayWorkspace, queries: int) -> float:
        replay, forward = workspace.replay, forward_operations(workspace)
        drawn = sum(map(len, replay.batches[: replay.steps]))
        curved, credited = self._expected(workspace).counts() if self.expected else (drawn, 0)
        return forward * (6 * drawn + queries * (PRODUCTS[self.curvature] * curved + 2 * credited))

    def metadata(self, workspace: Workspace) -> dict[str, Any]:
        about = super().metadata(workspace)
        about["diagnostics"]["adjoint_growth"] = growth_summary(workspace.ledger.tallies)
        return about
