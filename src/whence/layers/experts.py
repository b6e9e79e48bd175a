"""Fused mixtures of experts, as transformers stores them: one (experts, o, i) weight, one block per
expert; and the routers that choose experts.

The tokens of each example that go to an expert are its positions. Experts have different numbers
of them, so all are filled up with zeros, which are no positions (`Places`). An expert without
tokens has a gradient of zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whence.errors import InvalidInput
from whence.layers.kind import Kind, Notes, Part, Places, register


class Experts(Kind):
    """One weight of a module; the prototype, without a name, stands for all of them."""

    parameter = "down_proj"
    seen = "forward"

    def __init__(self, weight: str = "") -> None:
        self.weight = weight

    def claims(self, module: nn.Module) -> bool:
        down = module._parameters.get("down_proj")
        settings = ("num_experts", "has_gate", "has_bias", "is_transposed", "_apply_gate")
        return down is not None and down.dim() == 3 and all(hasattr(module, s) for s in settings)

    def refusal(self, module: Any) -> str | None:
        if getattr(module, "has_post_expert_norm", False):
            return "a norm follows each expert, which is not supported"
        return None

    def parts(self, module: Any) -> list[Part]:
        names = "gate_up_proj" if module.has_gate else "up_proj", "down_proj"
        if module.has_bias:
            return [(Experts(name), name, f"{name}_bias") for name in names]
        return [(Experts(name), name) for name in names]

    def shape(self, module: Any) -> tuple[int, int, int]:
        experts, o, i = module._parameters[self.weight].shape
        return (experts, i, o) if module.is_transposed else (experts, o, i)

    def matrices(self, module: Any, weight: Tensor) -> list[Tensor]:
        return list(weight.mT if module.is_transposed else weight)

    def inputs(self, module: Any, x: Tensor) -> list[Tensor]:
        return list(x.unbind(1))

    def gradients(self, module: Any, gradient: Tensor) -> list[Tensor]:
        return list(gradient.unbind(1))

    def forward(
        self,
        host: Any,
        note: Notes,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
    ) -> Tensor:
        tokens, k = top_k_index.shape
        if tokens % note.n or len(hidden_states) != tokens:
            raise InvalidInput(f"its {tokens} tokens are not those of {note.n} examples in order")
        n, t = note.n, tokens // note.n
        expert = top_k_index.reshape(n, t * k)
        chosen = F.one_hot(expert, host.num_experts)
        place = (chosen.cumsum(1).gather(2, expert.unsqueeze(2)) - 1).squeeze(2)
        example = torch.arange(n, device=expert.device).unsqueeze(1).expand_as(expert)
        where = example, expert, place
        position = torch.arange(t, device=expert.device).repeat_interleave(k).expand_as(expert)
        shape = n, host.num_experts, int(chosen.sum(1).max())
        numbers = position.new_full(shape, -1).index_put(where, position)
        places = Places(numbers, t)
        x = hidden_states.view(n, t, -1)[example, position]
        x = x.new_zeros(*shape, x.shape[2]).index_put(where, x)
        up, down = (part[1] for part in self.parts(host))
        y = _product(host, note, up, x, places)
        y = host._apply_gate(y) if host.has_gate else host.act_fn(y)
        y = _product(host, note, down, y, places)[where]
        weighted = y * top_k_weights.reshape(n, t * k, 1)
        return weighted.view(tokens, k, -1).sum(1).to(hidden_states.dtype)


def _product(host: Any, note: Notes, name: str, x: Tensor, places: Places) -> Tensor:
    """Inputs (n, experts, t, i) times the weight of each expert: (n, experts, t, o)."""
    n, experts, t, _ = x.shape
    weight = host._parameters[name]
    rows = x.transpose(0, 1).flatten(1, 2) @ (weight if host.is_transposed else weight.mT)
    y: Tensor = rows.view(experts, n, t, -1).transpose(0, 1).contiguous()
    if host.has_bias:
        y = y + host._parameters[f"{name}_bias"].view(1, experts, 1, -1)
    note(name, x, y, places)
    return y


class Router(Kind):
    """A module of transformers that is called a router, whose only parameters are a weight (o, i),
    and perhaps a bias, that `F.linear` multiplies the tokens of all examples by."""

    module = ("*Router", "*Gate")
    seen = "product"
    examples_first = True

    def claims(self, module: nn.Module) -> bool:
        parameters = {name: p for name, p in module._parameters.items() if p is not None}
        weight = parameters.get("weight")
        return (
            weight is not None
            and weight.dim() == 2
            and parameters.keys() <= {"weight", "bias"}
            and not module._modules
        )


register(Experts())
register(Router())
