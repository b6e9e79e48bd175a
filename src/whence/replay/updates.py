"""The updates of torch's optimizers as pure functions, and their transposed derivatives.

    state' = rule(state, g)            state = {"weight": θ, "momentum_buffer": b, ...}

Every optimizer here is elementwise, so its Jacobian is a table of diagonals, one for each pair of
an output and an input of the update. All queries share it:

    adjoint[in] = Σ_out  ∂out/∂in · adjoint[out]                                adjoint[in] (q, ...)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: a parameter's weight and its optimizer's tensors, under torch's names; a tensor that the
#: optimizer has not created yet is absent, and counts as zero
State = dict[str, Tensor]
WEIGHT, GRADIENT = "weight", "gradient"
#: the rule of batch norm's running statistics: its "gradient" is the statistic of the batch
RUNNING = "running"
#: the supported optimizers, and the most tensors that each stores per parameter
SLOTS = {"sgd": 1, "adam": 3, "adamw": 3, "rmsprop": 3}

Table = dict[tuple[str, str], float | Tensor]


@dataclass(frozen=True)
class Rule:
    """One update of one parameter.

    Args:
        kind: one of `SLOTS`, or `RUNNING`.
        rate: the learning rate of this update.
        momentum: SGD's and RMSprop's momentum, Adam's β₁, or batch norm's m, of this update.
        settings: the group's other hyperparameters, under torch's names.
        count: the number of updates of the parameter, including this one (Adam's `step`).
    """

    kind: str
    rate: float
    momentum: float
    settings: Mapping[str, Any]
    count: int

    @property
    def linear(self) -> bool:
        """Whether the derivative is the same number at every point and in every coordinate."""
        return self.kind in ("sgd", RUNNING)

    def __call__(self, state: State, gradient: Tensor) -> State:
        """The state after the update, as new tensors."""
        if self.kind == "sgd":
            return self._sgd(state, gradient)
        if self.kind == RUNNING:
            return {WEIGHT: state[WEIGHT].lerp(gradient, self.momentum)}
        if self.kind == "rmsprop":
            return self._rmsprop(state, gradient)
        return self._adam(state, gradient)

    def _sgd(self, state: State, g: Tensor) -> State:
        θ, b, μ = state[WEIGHT], state.get("momentum_buffer"), self.momentum
        g = self._decayed(θ, g)
        if not μ:
            return state | {WEIGHT: θ.add(g, alpha=-self.rate)}
        # torch starts the buffer with the first gradient as it is, without dampening
        b = g if b is None else b.mul(μ).add(g, alpha=1 - self._number("dampening", 0.0))
        step = g.add(b, alpha=μ) if self.settings.get("nesterov") else b
        return state | {WEIGHT: θ.add(step, alpha=-self.rate), "momentum_buffer": b}

    def _adam(self, state: State, g: Tensor) -> State:
        θ, β1, β2 = state[WEIGHT], self.momentum, float(self.settings.get("betas", (0, 0.999))[1])
        if self.kind == "adamw":
            θ = θ.mul(1 - self.rate * self._number("weight_decay", 0.01))
        else:
            g = self._decayed(θ, g)
        m = _slot(state, "exp_avg").lerp(g, 1 - β1)
        v = second = _slot(state, "exp_avg_sq").mul(β2).addcmul(g, g, value=1 - β2)
        after = {"exp_avg": m, "exp_avg_sq": v}
        if self.settings.get("amsgrad"):
            after["max_exp_avg_sq"] = second = _slot(state, "max_exp_avg_sq").maximum(v)
        correction = 1 - β1**self.count, (1 - β2**self.count) ** 0.5
        below = self._below(second, second, correction[1])
        return state | after | {WEIGHT: θ.addcdiv(m, below, value=-self.rate / correction[0])}

    def _rmsprop(self, state: State, g: Tensor) -> State:
        θ, α = state[WEIGHT], self._number("alpha", 0.99)
        g = self._decayed(θ, g)
        v = variance = _slot(state, "square_avg").mul(α).addcmul(g, g, value=1 - α)
        after = {"square_avg": v}
        if self.settings.get("centered"):
            after["grad_avg"] = mean = _slot(state, "grad_avg").lerp(g, 1 - α)
            variance = v.addcmul(mean, mean, value=-1)
        below = self._below(v, variance)
        if not self.momentum:
            return state | after | {WEIGHT: θ.addcdiv(g, below, value=-self.rate)}
        after["momentum_buffer"] = b = (
            _slot(state, "momentum_buffer").mul(self.momentum).addcdiv(g, below)
        )
        return state | after | {WEIGHT: θ.add(b, alpha=-self.rate)}

    def _decayed(self, θ: Tensor, g: Tensor) -> Tensor:
        decay = self._number("weight_decay", 0.0)
        return g.add(θ, alpha=decay) if decay else g

    def _below(self, seen: Tensor, variance: Tensor, correction: float = 1.0) -> Tensor:
        """The denominator √variance / correction + ε of a step; ∞ where there was no gradient yet.

        There the step is zero for any denominator. Its slope would be 1/ε, which holds only for
        gradients far below ε, smaller than any example's.
        """
        under = self._number("eps_root", 0.0)
        if under:  # its slope is at most 1/√eps_root
            return (variance / correction**2).add(under).sqrt().add(self._number("eps", 1e-8))
        positive = variance > 0
        root = torch.where(positive, torch.where(positive, variance, 1.0).sqrt(), 0.0)
        below = (root / correction).add(self._number("eps", 1e-8))
        return torch.where(seen > 0, below, torch.inf)

    def _number(self, name: str, default: float) -> float:
        return float(self.settings.get(name, default) or 0.0)

    def table(self, state: State, gradient: Tensor) -> Table:
        """{(out, in): ∂out/∂in}, elementwise; absent pairs are zero. A linear rule's are floats."""
        inputs = state | {GRADIENT: gradient}
        if self.linear:  # the response to a one among zeros
            zero, one = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
            return {
                (leaving, entering): float(result)
                for entering in inputs
                for leaving, result in self._of(
                    dict.fromkeys(inputs, zero) | {entering: one}
                ).items()
            }
        with torch.enable_grad():
            leaves = {name: value.detach().requires_grad_() for name, value in inputs.items()}
            results = self._of(leaves)
        table: Table = {}
        for leaving, result in results.items():
            slopes = torch.autograd.grad(
                result,
                list(leaves.values()),
                torch.ones_like(result),
                retain_graph=True,
                allow_unused=True,
            )
            named = zip(leaves, slopes, strict=True)
            table |= {(leaving, name): slope for name, slope in named if slope is not None}
        return table

    def _of(self, inputs: State) -> State:
        return self({k: v for k, v in inputs.items() if k != GRADIENT}, inputs[GRADIENT])


def pull_back(table: Table, adjoint: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The adjoints of an update's inputs, from those of its outputs; absent ones are zero.

    An adjoint that the update does not change is returned without a copy.
    """
    terms: dict[str, list[tuple[float | Tensor, Tensor]]] = {}
    for (leaving, entering), slope in table.items():
        nothing = isinstance(slope, float) and slope == 0 and leaving != entering
        if leaving in adjoint and not nothing:
            terms.setdefault(entering, []).append((slope, adjoint[leaving]))
    return {entering: _combined(parts) for entering, parts in terms.items()}


def _combined(parts: list[tuple[float | Tensor, Tensor]]) -> Tensor:
    """Σ slope · value."""
    (slope, value), *others = parts
    if isinstance(slope, float) and slope == 1 and not others:
        return value
    total = value * slope
    for slope, value in others:
        if isinstance(slope, float):
            total.add_(value, alpha=slope)
        else:
            total.addcmul_(value, slope)
    return total


def _slot(state: State, name: str) -> Tensor:
    """One of the optimizer's tensors; zeros if it does not exist yet."""
    tensor = state.get(name)
    return torch.zeros_like(state[WEIGHT]) if tensor is None else tensor
