"""Brute force for preconditioned optimizers, several stages and averaged parameters.

On top of dense.py and in its ways: float64, explicit (o*i, o*i) matrices, nothing that knows how
whence works. A preconditioner is a diagonal over a block's parameters, given as a vector (o*i,).
A layer that a stage does not call, that no optimizer of it trains, or that has another shape there,
neither learns nor forgets in it: S = I, r = 0.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from support import dense
from support.dense import F_S, Blocks, F_r, Moments

Values = dict[str, Tensor]  # by parameter name


# --- one block, one segment --------------------------------------------------------------------


def dynamics(
    H: Tensor,
    D: Tensor,
    time: float,
    P: Tensor | None = None,
    *,
    damping: float | str | None = None,
    decay: float = 0.0,
    decoupled: bool = False,
    diagonal: bool = False,
    exact: bool = False,
) -> tuple[Tensor, Tensor]:
    """(S, R): a query vector v becomes S v going back through the segment, and R v is what it
    meets the training gradients with. Both act on columns.

    Args:
        H: (k, k), the curvature that is inverted. D: (k,), the one that is exponentiated.
        time: η̄K. P: (k,), None for gradient descent.
        damping: λ; "preconditioner" is λ P⁻¹ with λ = 1/(η̄K) instead of the exponential.
        decay: weight decay that counts; L2 is curvature, decoupled it is curvature / P.
        diagonal: the fully diagonal form of appendix C, which needs no inverse.
        exact: appendix C as it stands, with H in the exponential too.
    """
    eye = torch.eye(len(H), dtype=H.dtype)
    if P is None:
        assert damping is None or not isinstance(damping, str)
        H = H + ((damping or 0.0) + decay) * eye
        return F_S(H, time), F_r(H, time)
    # all of P, D and their exponentials are diagonal: entry by entry, right for any P (appendix C's
    # own matrices, with matrix_exp, are in preconditioned_exactly, and a test compares the two)
    shift = decay / P if decoupled else decay * torch.ones_like(P)
    if exact:
        return preconditioned_exactly(H + torch.diag(shift) + float(damping or 0.0) * eye, time, P)
    rate = P * (D + shift)
    survival = torch.exp(-time * rate)
    if damping == "preconditioner":
        return torch.diag(survival), torch.linalg.inv(H + torch.diag(shift + 1 / (time * P)))
    if diagonal:
        assert damping is None, "the diagonal form needs none"
        lost = torch.where(rate > 0, -torch.expm1(-time * rate) / rate, time)
        return torch.diag(survival), torch.diag(P * lost)
    λ = 1e-8 if damping is None else float(damping)
    lost = torch.diag(-torch.expm1(-time * rate))
    return torch.diag(survival), torch.linalg.solve(H + torch.diag(shift) + λ * eye, lost)


def preconditioned_exactly(H: Tensor, time: float, P: Tensor) -> tuple[Tensor, Tensor]:
    """(S, R) of appendix C without any approximation: exp(-η̄K P H) and the integral of
    exp(-u P H) P over u up to η̄K; transposed, to act on query vectors."""
    size, scale = len(H), torch.diag(P)
    augmented = H.new_zeros(2 * size, 2 * size)
    augmented[:size, :size], augmented[:size, size:] = -time * scale @ H, time * scale
    both = torch.linalg.matrix_exp(augmented)
    return both[:size, :size].T, both[:size, size:].T


def preconditioner(
    model: nn.Module, moments: list[Values], epsilon: float, floor: float = 0.0
) -> Blocks:
    """P̄ (o*i,) per block: the mean over checkpoints of 1 / (√v̂ + ε); NaN where v̂ is not known."""
    shapes = {name: p.shape for name, p in model.named_parameters()}
    each = []
    for held in moments:
        unknown = {n: torch.full(s, torch.nan, dtype=torch.float64) for n, s in shapes.items()}
        known = {
            n: 1 / (v.double().clamp_min(floor**2 * v.double().mean()).sqrt() + epsilon)
            for n, v in held.items()
        }
        each.append(dense.matrices(model, unknown | known))
    return {name: torch.stack([p[name] for p in each]).mean(0).flatten() for name in each[0]}


# --- a training, as its own loop saw it ----------------------------------------------------------


@dataclass
class Segment:
    """Some checkpoints of one stage and the updates that led there."""

    stage: str
    checkpoints: list[Values]
    steps: list[int]
    times: dict[str, float]  # parameter -> η̄K
    moments: list[Values] | None = None  # v̂ at the checkpoints; None: gradient descent
    epsilon: float = 1e-8
    decay: float = 0.0
    decoupled: bool = False

    def averaged(self) -> Segment:
        """With the mean parameters and buffers as its one checkpoint; P̄ as it was."""
        mean = {
            name: torch.stack([c[name] for c in self.checkpoints]).mean(0)
            if value.is_floating_point()
            else value
            for name, value in self.checkpoints[-1].items()
        }
        return replace(self, checkpoints=[mean], steps=self.steps[-1:])


@dataclass
class Leg:
    """One stage of a training."""

    stage: str
    kind: str  # "sgd", "adam", "adamw", "rmsprop"
    settings: dict[str, Any]
    start: int
    checkpoints: list[Values] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)  # counted from the start of the training
    rates: list[dict[str, float]] = field(default_factory=list)  # of every update: parameter -> η
    moments: list[Values] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.start + len(self.rates)

    @property
    def effective(self) -> float:
        """Where momentum sums gradients, and does not average them, each is applied over again."""
        if self.kind not in ("sgd", "rmsprop"):
            return 1.0
        sums = (1 - self.settings.get("dampening", 0.0)) / (1 - self.settings.get("momentum", 0.0))
        return float(sums)

    def segments(self, spec: int | list[list[int]] = 1) -> list[Segment]:
        """Dealt out in order as equally as can be, or as lists of checkpoint numbers."""
        everything = np.arange(len(self.checkpoints))
        dealt = np.array_split(everything, spec) if isinstance(spec, int) else spec
        actual, start = [], self.start
        for members in dealt:
            end = self.steps[members[-1]]
            rates = self.rates[start - self.start : end - self.start]
            names = {name for row in rates for name in row}
            actual.append(
                Segment(
                    self.stage,
                    [self.checkpoints[c] for c in members],
                    [self.steps[c] for c in members],
                    {n: sum(row.get(n, 0.0) for row in rates) * self.effective for n in names},
                    None if self.kind == "sgd" else [self.moments[c] for c in members],
                    self.settings.get("eps", 1e-8),
                    self.settings.get("weight_decay", 0.0),
                    self.kind == "adamw",
                )
            )
            start = end
        return actual


def second_moments(model: nn.Module, optimizer: Any) -> Values:
    """v̂ = v / (1 - β₂^t) of Adam; RMSprop's v as it is, less the squared mean when centered."""
    actual = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter, {})
        if "exp_avg_sq" in state:
            beta = optimizer.defaults["betas"][1]
            actual[name] = state["exp_avg_sq"] / (1 - beta ** int(state["step"]))
        elif "square_avg" in state:
            mean = state.get("grad_avg", torch.zeros_like(parameter))
            actual[name] = state["square_avg"] - mean.square()
    return actual


def train(
    model: nn.Module,
    task: Any,
    data: Any,
    optimizer: torch.optim.Optimizer,
    steps: list[int],
    *,
    stage: str = "train",
    start: int = 0,
    factor: Callable[[int], float] = lambda step: 1.0,
    batch_size: int | None = None,
    norms: bool = False,
    seed: int = 0,
) -> Leg:
    """Train in place up to update steps[-1] (counted from ``start``), keeping what SOURCE needs.

    ``factor`` scales the rates; batch norms learn their statistics only with ``norms``.
    """
    kind = type(optimizer).__name__.lower()
    leg = Leg(stage, kind, dict(optimizer.defaults), start)
    names = {id(p): name for name, p in model.named_parameters()}
    base = [group["lr"] for group in optimizer.param_groups]
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.train(norms)
    for step in range(1, steps[-1] + 1):
        for group, rate in zip(optimizer.param_groups, base, strict=True):
            group["lr"] = rate * factor(step)
        chosen = torch.randperm(len(data), generator=generator)[:batch_size].tolist()
        batch = dense.batch_of([data[i] for i in chosen])
        optimizer.zero_grad()
        task.losses(task.outputs(model, batch), batch).mean().backward()
        optimizer.step()
        groups = optimizer.param_groups
        leg.rates.append({names[id(p)]: g["lr"] for g in groups for p in g["params"]})
        if step in steps:
            leg.checkpoints.append(copy.deepcopy(model.state_dict()))
            leg.steps.append(start + step)
            leg.moments.append(copy.deepcopy(second_moments(model, optimizer)))
    optimizer.zero_grad(set_to_none=True)
    model.eval()
    return leg


# --- all together --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """What a stage trains, by which task, on what."""

    model: nn.Module
    task: Any
    data: Any


class Staged:
    """SOURCE, FastSource and influence of a training in stages, by brute force.

    Columns are the examples of all stages, in order. With ``query=None``: self-influence, each
    example measured by its own stage's task at the final weights.
    """

    def __init__(
        self,
        stages: dict[str, Stage],
        query: Any,
        final: Values,
        uniform: Callable[[int, int], Any] | None = None,
    ) -> None:
        self.stages, self.query, self.final, self.uniform = stages, query, final, uniform
        self.last = list(stages)[-1]
        self.sizes = {name: len(stage.data) for name, stage in stages.items()}
        offsets = np.cumsum([0, *self.sizes.values()])
        self.total = int(offsets[-1])
        self.columns = {n: slice(*offsets[k : k + 2]) for k, n in enumerate(stages)}
        self._weights: dict[int, Values] = {}
        self.gradients, self.moments = cache(self._gradients), cache(self._moments)

    def _key(self, weights: Values) -> int:
        self._weights[id(weights)] = weights  # kept, so that no other gets its id
        return id(weights)

    def _gradients(self, key: int, stage: str, quantity: str, of_query: bool) -> Blocks:
        it = self.stages[stage]
        data = self.query if of_query else it.data
        actual = dense.per_example_gradients(it.model, self._weights[key], it.task, quantity, data)
        return {name: gradient.flatten(1) for name, gradient in actual.items()}

    def _moments(self, key: int, stage: str, fisher: str, step: int) -> dict[str, Moments]:
        it = self.stages[stage]
        kinds = {"exact": dense.exact, "empirical": dense.empirical}
        if fisher in kinds:
            columns = kinds[fisher](it.task)
        else:
            columns = dense.sampled(it.task, self.uniform)
        return dense.moments(it.model, self._weights[key], it.task, columns, it.data, step=step)

    def _queries(self, stage: str) -> Blocks:
        key = self._key(self.final)
        if self.query is None:
            return self.gradients(key, stage, "measurements", False)
        return self.gradients(key, self.last, "measurements", True)

    def _time(self, segment: Segment, block: str) -> float:
        return _of_layer(self.stages[segment.stage].model, segment.times, block)

    def source(
        self,
        segments: list[Segment],
        curvature: str = "ekfac",
        fisher: str = "exact",
        damping: float | str | None = None,
        weight_decay: str = "ignore",
        exact: bool = False,
        floor: float = 0.0,
    ) -> np.ndarray:
        """Contributions (L, q, n); (L, n) for self-influence."""
        how = (curvature, fisher, damping, weight_decay, exact, floor)
        if self.query is not None:
            return self._source(segments, self.last, *how)
        actual = np.zeros((len(segments), self.total))
        for stage, columns in self.columns.items():
            each = self._source(segments, stage, *how)
            actual[:, columns] = each[:, :, columns].diagonal(axis1=1, axis2=2)
        return actual

    def _source(
        self,
        segments: list[Segment],
        measured: str,
        curvature: str,
        fisher: str,
        damping: float | str | None,
        weight_decay: str,
        exact: bool,
        floor: float,
    ) -> np.ndarray:
        query = dict(self._queries(measured))
        count = len(next(iter(query.values())))
        result = torch.zeros(len(segments), count, self.total, dtype=torch.float64)
        for k, segment in reversed(list(enumerate(segments))):
            stage = segment.stage
            keys = [self._key(weights) for weights in segment.checkpoints]
            moments = [
                self.moments(key, stage, fisher, step)
                for key, step in zip(keys, segment.steps, strict=True)
            ]
            H = dense.dense_curvature(curvature, moments)
            kind = "identity" if curvature == "identity" else "diagonal"
            D = {n: h.diagonal() for n, h in dense.dense_curvature(kind, moments).items()}
            each = [self.gradients(key, stage, "losses", False) for key in keys]
            P: dict[str, Any] = dict.fromkeys(H)
            if segment.moments is not None:
                model = self.stages[stage].model
                P = preconditioner(model, segment.moments, segment.epsilon, floor)
            for name, v in query.items():
                if name not in H or len(H[name]) != v.shape[1] or not self._time(segment, name):
                    continue
                S, R = dynamics(
                    H[name],
                    D[name],
                    self._time(segment, name),
                    P[name],
                    damping=damping,
                    decay=segment.decay if weight_decay == "curvature" else 0.0,
                    decoupled=segment.decoupled,
                    diagonal=curvature in ("diagonal", "identity"),
                    exact=exact,
                )
                g = torch.stack([g[name] for g in each]).mean(0)
                result[k, :, self.columns[stage]] -= v @ R.T @ g.T / self.sizes[stage]
                query[name] = v @ S.T
        return result.detach().numpy()

    def influence(
        self,
        damping: float | str = 1e-8,
        curvature: str = "ekfac",
        fisher: str = "exact",
        segments: list[Segment] | None = None,
    ) -> np.ndarray:
        """(q, n): curvature and gradients of all stages' examples together, at the final weights.

        "source" needs the whole run as one segment of one stage.
        """
        key, step = self._key(self.final), segments[-1].steps[-1] if segments else 0
        actual = {s: self.moments(key, s, fisher, step) for s in self.stages}
        together = pooled(list(actual.values()), list(self.sizes.values()))
        H = dense.dense_curvature(curvature, [together])
        query = self._queries(self.last)
        shift = dict.fromkeys(query, damping)
        if damping == "source":
            assert segments is not None
            (whole,) = segments
            shift = {name: 1 / self._time(whole, name) for name in query}
            if whole.moments is not None:
                P = preconditioner(self.stages[self.last].model, whole.moments, whole.epsilon)
                shift = {name: shift[name] / P[name] for name in query}
        result = torch.zeros(len(self.query), self.total, dtype=torch.float64)
        for name in query.keys() & H.keys():
            damped = H[name] + shift[name] * torch.eye(len(H[name]), dtype=torch.float64)
            for stage, columns in self.columns.items():
                g = self.gradients(key, stage, "losses", False)[name]
                result[:, columns] -= query[name] @ torch.linalg.solve(damped, g.T) / self.total
        return result.detach().numpy()


def pooled(stages: list[dict[str, Moments]], sizes: list[int]) -> dict[str, Moments]:
    """The moments of several datasets' examples taken as one dataset."""
    total = sum(sizes)
    actual = {}
    for name in dict.fromkeys(name for moments in stages for name in moments):
        present = [(m[name], n) for m, n in zip(stages, sizes, strict=True) if name in m]
        positions = sum(m.positions for m, _ in present)
        actual[name] = Moments(
            sum(m.A * n for m, n in present) / total,  # type: ignore[arg-type]
            sum(m.S * m.positions for m, _ in present) / positions,  # type: ignore[arg-type]
            torch.cat([m.gradients * (n / total) ** 0.5 for m, n in present]),
            positions,
        )
    return actual


def _of_layer(model: nn.Module, values: dict[str, float], block: str) -> float:
    """A value of a block's weight; "name.g" is a group of the convolution "name"."""
    names = dense.layers(model)
    layer = block if block in names else block.rpartition(".")[0]
    return values.get(f"{layer}.weight", 0.0)


# --- real trainings, differentiated --------------------------------------------------------------


@dataclass
class Descent:
    """Full-batch training of a linear model on half or whole squared errors."""

    inputs: Tensor  # (n, d), the last column 1 for the bias
    targets: Tensor  # (n,)
    update: Callable[[int, Tensor, Tensor], Tensor]  # (k, θ, gradient) -> θ
    count: int
    scale: float = 1.0  # of the squared error

    @property
    def hessian(self) -> Tensor:
        return 2 * self.scale * self.inputs.T @ self.inputs / len(self.inputs)

    def losses(self, theta: Tensor) -> Tensor:
        return self.scale * (self.inputs @ theta - self.targets).square()


def unrolled(
    theta: Tensor, legs: list[Descent], query: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs' derivative in the weight of every training example, by autograd through it all.

    Each leg minimises the mean of its weighted losses. Gives, for each leg, (q, n): to first order
    f(with the example) - f(without it); and all θ after every update.
    """
    weights = [torch.ones(len(leg.inputs), dtype=theta.dtype, requires_grad=True) for leg in legs]
    theta = theta.detach().clone().requires_grad_()
    passed = []
    for weight, leg in zip(weights, legs, strict=True):
        for k in range(leg.count):
            cost = (weight * leg.losses(theta)).sum() / len(leg.inputs)
            (gradient,) = torch.autograd.grad(cost, theta, create_graph=True)
            theta = leg.update(k, theta, gradient)
            passed.append(theta.detach())
    rows = [torch.autograd.grad(f, weights, retain_graph=True) for f in query @ theta]
    return [torch.stack([row[k] for row in rows]) for k in range(len(legs))], passed


def extrapolated(truth: Callable[[int], list[Tensor]]) -> list[Tensor]:
    """The limit of infinitely many infinitely small updates.

    truth(f) makes f times as many updates, each f times smaller: its error is a/f + b/f² + ..., and
    (truth(1) - 6 truth(2) + 8 truth(4)) / 3 is free of the first two terms.
    """
    once, twice, more = (truth(f) for f in (1, 2, 4))
    return [(a - 6 * b + 8 * c) / 3 for a, b, c in zip(once, twice, more, strict=True)]
