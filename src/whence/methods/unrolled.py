"""Unrolled differentiation (Hara et al., 2019; section 3.1 of the paper), for many queries at once.

Update t makes the weights θ and the optimizer's state s anew from the gradient of its batch, in
which every example m has a weight w_m, one:

    g_t = (1/B_t) Σ_{m in batch t} w_m ∇L(m, θ_t)          (θ, s)_{t+1} = update_t(θ_t, s_t, g_t)

    values[q, m] = ∂f(q, θ_T) / ∂w_m = Σ_t (1/B_t) [m in batch t] ⟨ḡ_t(q), ∇L(m, θ_t)⟩

which is f(with m) - f(without m) to first order. ḡ_t, the derivative of f in g_t, comes from the
adjoints of what update t made; the adjoint of θ_t then gets H_t ḡ_t too, for g_t moves with θ_t by
the Hessian of the batch.

*Expected*: an example counts at every update by its expected share 1/N, not by 1/B_t where it was
drawn, and H_t is that of a fresh batch: what is common to trainings that draw their batches anew.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whence.data import cut
from whence.draws import keys
from whence.engine.workspace import Workspace
from whence.replay.objective import Objective, Tensors
from whence.replay.sweep import (
    Credit,
    QueryBlock,
    ReplayWorkspace,
    Unrolling,
    forward_operations,
    update_credits,
)
from whence.replay.training import Adjoint, Draw, Indices, Update
from whence.replay.updates import WEIGHT
from whence.run import Stage

CURVATURES: dict[str, Callable[..., tuple[Tensors, Tensor]]] = {
    "hessian": Objective.hessian,
    "gauss-newton": Objective.gauss_newton,
}
PRODUCTS = {"hessian": 6, "gauss-newton": 4}  # as many forward passes a product with it costs
CURVATURE_BATCH = 512
STRETCHES = 32  # of a stage, with a pass over its data for each
CHAOS = 1e3  # growth of the adjoint beyond which one trajectory says little about another


class Unrolled(Unrolling):
    """The exact derivative of the recorded training in the weight of every example.

    Needs a run that has recorded its batches (`recorder.step(indices)`); weights are replayed.

    Args:
        curvature: "hessian", or "gauss-newton" in its place, which has no negative directions along
            which the derivative could grow.
        expected: credit every example at every update, by 1/N, not only where it was drawn.
        curvature_batch: with `expected`, how many examples each update's curvature is taken of,
            drawn anew (default: 512, or all where there are fewer).
        credit_every: with `expected`, over how many updates weights count as constant when every
            example is credited: a pass over the data for each such stretch, at the weights in its
            middle (default: a 32nd of the stage).
        stage: attribute to this stage's examples only (default: all stages').
        seed: of the curvature's batches.
    """

    def __init__(
        self,
        curvature: str = "hessian",
        expected: bool = False,
        curvature_batch: int | None = None,
        credit_every: int | None = None,
        stage: str | None = None,
        seed: int = 0,
    ) -> None:
        if curvature not in CURVATURES:
            known = ", ".join(map(repr, CURVATURES))
            raise ValueError(f"curvature={curvature!r} is not known: use one of {known}")
        for name, value in (("curvature_batch", curvature_batch), ("credit_every", credit_every)):
            if value is not None and not expected:
                raise ValueError(
                    f"{name}={value} is for expected=True: otherwise it is each update's own batch "
                    "that is differentiated and credited"
                )
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        self.curvature, self.expected = curvature, expected
        self.curvature_batch, self.credit_every = curvature_batch, credit_every
        self.stage, self.seed = stage, seed

    def sweep(
        self,
        workspace: ReplayWorkspace,
        block: QueryBlock,
        gradients: Tensors,
        adjoint: Adjoint | None,
        last: int,
    ) -> Iterator[Credit]:
        norms = _norms(gradients)
        if adjoint is None:
            adjoint = {name: {WEIGHT: gradient} for name, gradient in gradients.items()}
        pulled: Tensors = {}  # ḡ, added up over a stretch, and the weights in its middle
        middle: Tensors = {}
        draw = self._draw(workspace) if self.expected else None
        size = workspace.at_once(len(block.indices))
        for update in workspace.replay.backward(last, block.first(workspace.run), draw, size):
            adjoint, pulls = update.pull_back(adjoint)
            pulls = update.unclip(pulls)
            slopes = self._through_gradient(workspace, update, adjoint, pulls)
            if update.step in workspace.replay.anchors or not update.step:
                self._look(workspace, update.step, adjoint, norms)
            if not self.expected:
                yield from update_credits(update, slopes, adjoint)
            else:
                start, end = self._stretch(update.stage, update.step, workspace.replay.steps)
                for name, pull in pulls.items():
                    pulled[name] = pulled[name].add_(pull) if name in pulled else pull.clone()
                if update.step == (start + end) // 2:
                    middle = update.point.weights
                if update.step == start:
                    yield from self._everyone(workspace, block, update, middle, pulled, adjoint)
                    pulled = {}

    def _through_gradient(
        self, workspace: ReplayWorkspace, update: Update, adjoint: Adjoint, pulls: Tensors
    ) -> list[Tensor]:
        """Add H_t ḡ_t to the adjoint of θ_t; and ⟨ḡ_t, ∇L(m, θ_t)⟩ (q, n), part by part."""
        objective, weights = workspace.replay.objectives[update.stage.name], update.point.weights
        product, found = CURVATURES[self.curvature], []
        for _, batch in update.parts if pulls else ():
            products, slopes = product(objective, weights, pulls, batch, 1 / update.examples)
            for name, value in products.items():
                adjoint[name][WEIGHT].add_(value)
            found.append(slopes)
        return found

    def _everyone(
        self,
        workspace: ReplayWorkspace,
        block: QueryBlock,
        update: Update,
        weights: Tensors,
        pulled: Tensors,
        adjoint: Adjoint,
    ) -> Iterator[Credit]:
        """(1/N) ⟨Σ_t ḡ_t, ∇L(m, θ)⟩ of every example m that is asked for."""
        replay, stage = workspace.replay, update.stage.name
        wanted, share = block.wanted.get(stage), 1 / len(workspace.study.used(workspace.run, stage))
        if wanted is None or not pulled:
            return
        parts = [wanted[part] for part in cut(len(wanted), workspace.at_once(len(block.indices)))]
        stream = workspace.study.data[stage].stream(
            parts, replay.device, replay.dtype, replay.workers
        )
        for k, (indices, batch) in enumerate(stream, 1):
            slopes = replay.objectives[stage].slopes(weights, pulled, batch)
            ready = adjoint if k == len(parts) else None
            yield Credit(stage, indices, share * slopes, update.step, ready, update.step)

    def _stretch(self, stage: Stage, t: int, last: int) -> tuple[int, int]:
        """The updates, from and up to, over which weights count as constant around update t."""
        length = min(stage.end, last) - stage.start
        count = math.ceil(length / (self.credit_every or math.ceil(length / STRETCHES)))
        ends = [stage.start + length * k // count for k in range(count + 1)]
        k = int(np.searchsorted(ends, t, side="right"))
        return ends[k - 1], ends[k]

    def _draw(self, workspace: ReplayWorkspace) -> Draw:
        """A fresh batch for each update's curvature, without replacement, the same by seed."""
        most = CURVATURE_BATCH if self.curvature_batch is None else self.curvature_batch

        def drawn(t: int) -> Indices:
            used = workspace.study.used(workspace.run, workspace.replay.stage(t).name)
            count = min(most, len(used))
            order = keys(self.seed, t, torch.from_numpy(used)).numpy()
            return np.sort(used[np.argpartition(order, count - 1)[:count]])

        return drawn

    def _look(self, workspace: ReplayWorkspace, step: int, adjoint: Adjoint, norms: Tensor) -> None:
        """Note how the adjoint has grown by the time the sweep comes to a checkpoint."""
        now = _norms({name: state[WEIGHT] for name, state in adjoint.items()})
        if not bool(now.isfinite().all()):
            raise FloatingPointError(
                f"going back from update {workspace.replay.steps} to {step}, the derivative of the "
                f"training has grown beyond {workspace.replay.dtype}: it is chaotic. Use "
                "curvature='gauss-newton', or dtype=torch.float64"
            )
        logs = (now / norms)[norms > 0].log()
        noted = workspace.account.setdefault("growth", {}).setdefault(str(step), [0.0, 0])
        noted[0] += float(logs.sum())
        noted[1] += len(logs)

    def operations(self, workspace: ReplayWorkspace, queries: int) -> float:
        replay, forward = workspace.replay, forward_operations(workspace)
        drawn = sum(map(len, replay.batches[: replay.steps]))
        curved, credited = drawn, 0
        if self.expected:
            curved = 0
            for stage in workspace.run.stages:
                steps = range(stage.start, min(stage.end, replay.steps))
                curved += len(steps) * len(self._draw(workspace)(stage.start))
                stretches = {self._stretch(stage, t, replay.steps) for t in steps}
                credited += len(stretches) * len(workspace.study.data[stage.name])
        return forward * (6 * drawn + queries * (PRODUCTS[self.curvature] * curved + 2 * credited))

    def _metadata(self, workspace: Workspace) -> dict[str, Any]:
        about = super()._metadata(workspace)
        growth = {
            int(step): math.exp(logs / count) if count else 1.0
            for step, (logs, count) in workspace.account.get("growth", {}).items()
        }
        about["diagnostics"]["adjoint_growth"] = {
            str(step): growth[step] for step in sorted(growth)
        }
        worst = max(growth, key=lambda step: growth[step], default=None)
        if worst is not None and growth[worst] > CHAOS:
            warnings.warn(
                f"going back to update {worst}, the derivative of this training has grown "
                f"{growth[worst]:.2g} times: it is chaotic, and the exact derivative of one "
                "trajectory says little about retraining. Use Unrolled(curvature='gauss-newton', "
                "expected=True)",
                stacklevel=2,
            )
        return about


def _norms(vectors: Tensors) -> Tensor:
    """(q,); in the same order whenever, for the same bits."""
    parts = [torch.linalg.vector_norm(vectors[k].flatten(1), dim=1) for k in sorted(vectors)]
    norms: Tensor = torch.linalg.vector_norm(torch.stack(parts).double(), dim=0)
    return norms
