"""The updates of torch's optimizers as pure functions, and their derivatives read backwards.

    state' = rule(state, g)            state = {"weight": θ, "momentum_buffer": b, ...}

Every optimizer here is elementwise, so its Jacobian is a table of diagonals, one for each pair of
something that leaves an update and something that enters it: the gradients of what leaves, summed.
All queries share it:

    adjoint[in] = Σ_out  ∂out/∂in · adjoint[out]                                adjoint[in] (q, ...)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: what is kept of one parameter: its weight and its optimizer's tensors, under torch's names; what
#: an optimizer has not begun to keep is absent, and as good as zero
State = dict[str, Tensor]
WEIGHT, GRADIENT = "weight", "gradient"
#: the optimizers that are known, and how many tensors each keeps of a parameter, at most
SLOTS = {"sgd": 1, "adam": 3, "adamw": 3, "rmsprop": 3}

Table = dict[tuple[str, str], float | Tensor]


@dataclass(frozen=True)
class Rule:
    """One update of one parameter.

    Args:
        kind: one of `SLOTS`.
        rate: the learning rate of this update.
        momentum: SGD's and RMSprop's momentum, or Adam's β₁, of this update.
        settings: the group's other hyperparameters, as torch calls them.
        count: how many updates the parameter has had, this one included (Adam's `step`).
    """

    kind: str
    rate: float
    momentum: float
    settings: Mapping[str, Any]
    count: int

    @property
    def linear(self) -> bool:
        """Whether the derivative is the same everywhere, and in every coordinate."""
        return self.kind == "sgd"

    def __call__(self, state: State, gradient: Tensor) -> State:
        """The state after the update; nothing is changed in place."""
        if self.kind == "sgd":
            return self._sgd(state, gradient)
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
        m = _kept(state, "exp_avg").lerp(g, 1 - β1)
        v = second = _kept(state, "exp_avg_sq").mul(β2).addcmul(g, g, value=1 - β2)
        after = {"exp_avg": m, "exp_avg_sq": v}
        if self.settings.get("amsgrad"):
            after["max_exp_avg_sq"] = second = _kept(state, "max_exp_avg_sq").maximum(v)
        correction = 1 - β1**self.count, (1 - β2**self.count) ** 0.5
        below = self._below(second, second, correction[1])
        return state | after | {WEIGHT: θ.addcdiv(m, below, value=-self.rate / correction[0])}

    def _rmsprop(self, state: State, g: Tensor) -> State:
        θ, α = state[WEIGHT], self._number("alpha", 0.99)
        g = self._decayed(θ, g)
        v = variance = _kept(state, "square_avg").mul(α).addcmul(g, g, value=1 - α)
        after = {"square_avg": v}
        if self.settings.get("centered"):
            after["grad_avg"] = mean = _kept(state, "grad_avg").lerp(g, 1 - α)
            variance = v.addcmul(mean, mean, value=-1)
        below = self._below(v, variance)
        if not self.momentum:
            return state | after | {WEIGHT: θ.addcdiv(g, below, value=-self.rate)}
        after["momentum_buffer"] = b = (
            _kept(state, "momentum_buffer").mul(self.momentum).addcdiv(g, below)
        )
        return state | after | {WEIGHT: θ.add(b, alpha=-self.rate)}

    def _decayed(self, θ: Tensor, g: Tensor) -> Tensor:
        decay = self._number("weight_decay", 0.0)
        return g.add(θ, alpha=decay) if decay else g

    def _below(self, seen: Tensor, variance: Tensor, correction: float = 1.0) -> Tensor:
        """√variance / correction + ε, what a step is divided by; ∞ where there was no gradient yet.

        There the step is zero whatever divides it. Its slope would be 1/ε, true only for gradients
        far below ε: nothing that an example could have done.
        """
        positive = variance > 0
        root = torch.where(positive, torch.where(positive, variance, 1.0).sqrt(), 0.0)
        below = (root / correction).add(self._number("eps", 1e-8))
        return torch.where(seen > 0, below, torch.inf)

    def _number(self, name: str, default: float) -> float:
        return float(self.settings.get(name, default) or 0.0)

    def table(self, state: State, gradient: Tensor) -> Table:
        """{(out, in): ∂out/∂in}, elementwise; absent pairs are zero. A linear rule's are floats."""
        inputs = state | {GRADIENT: gradient}
        if self.linear:  # what a one makes of it, among zeros
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
        found: Table = {}
        for leaving, result in results.items():
            slopes = torch.autograd.grad(
                result,
                list(leaves.values()),
                torch.ones_like(result),
                retain_graph=True,
                allow_unused=True,
            )
            named = zip(leaves, slopes, strict=True)
            found |= {(leaving, name): slope for name, slope in named if slope is not None}
        return found

    def _of(self, inputs: State) -> State:
        return self({k: v for k, v in inputs.items() if k != GRADIENT}, inputs[GRADIENT])


def pull_back(table: Table, adjoint: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The adjoints of what entered an update, from those of what left it; absent ones are zero.

    A tensor that is only passed on is returned as it is, not copied.
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


def _kept(state: State, name: str) -> Tensor:
    held = state.get(name)
    return torch.zeros_like(state[WEIGHT]) if held is None else held
