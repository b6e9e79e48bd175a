"""`nn.RNN`, `nn.LSTM`, `nn.GRU` with all their layers and directions, and the cells of the three.

Their kernels hide the products of single steps. So the recurrence is computed step by step, from
the same weights, and the operands and results of its products are noted. A study checks that the
model's outputs stay the same. Dropout between layers is off, as the whole model is in eval mode.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from whence.errors import InvalidInput
from whence.layers.kind import Kind, Notes, Part, Places, register_each

State = tuple[Tensor, ...]  # h, and c of an LSTM
Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
FAMILIES: dict[type[nn.Module], str] = {
    nn.RNN: "rnn",
    nn.LSTM: "lstm",
    nn.GRU: "gru",
    nn.RNNCell: "rnn",
    nn.LSTMCell: "lstm",
    nn.GRUCell: "gru",
}


class Recurrent(Kind):
    """One weight of a recurrent module; the prototype, without a name, stands for all of them."""

    seen = "forward"

    def __init__(self, weight: str = "") -> None:
        self.weight = weight

    def parts(self, module: Any) -> list[Part]:
        weights = [name for name in module._parameters if name.startswith("weight")]
        pairs = [(name, name.replace("weight", "bias", 1)) for name in weights]
        mine = type(self)
        return [
            (mine(w), w, b) if module._parameters.get(b) is not None else (mine(w), w)
            for w, b in pairs
        ]

    def shape(self, module: Any) -> tuple[int, int, int]:
        o, i = module._parameters[self.weight].shape
        return 1, o, i

    def forward(self, host: Any, note: Notes, *args: Any, **kwargs: Any) -> Any:
        return _forward(host, partial(_Products, host, F.linear, note), note.n, *args, **kwargs)


def stepwise(module: nn.Module, linear: Linear, *args: Any, **kwargs: Any) -> Any:
    """What a recurrent module returns, computed with another function than `F.linear`."""
    return _forward(module, partial(_Products, module, linear, None), None, *args, **kwargs)


def _forward(
    module: nn.Module, products: Callable[[str], _Products], n: int | None, *args: Any, **named: Any
) -> Any:
    family = next(name for kind, name in FAMILIES.items() if isinstance(module, kind))
    if isinstance(module, nn.RNNCellBase):
        return _cell(module, products(""), family, *args, **named)
    return _sequence(module, products, family, n, *args, **named)


@dataclass(frozen=True)
class _Products:
    """Products with the weights of one layer and direction: "weight_ih" + "_l0_reverse"."""

    module: Any
    linear: Linear
    note: Notes | None
    suffix: str

    def __call__(self, weight: str, x: Tensor, places: Places | None = None) -> Tensor:
        name = weight + self.suffix
        parameters = self.module._parameters
        y = self.linear(x, parameters[name], parameters.get(name.replace("weight", "bias", 1)))
        if self.note is not None:
            self.note(name, x, y, places)
        return y


def _cell(
    module: Any, products: _Products, family: str, input: Tensor, hx: Any = None
) -> Tensor | tuple[Tensor, Tensor]:
    """One step, as the module's own forward returns it."""
    if input.dim() != 2:
        raise InvalidInput(f"an input of shape {tuple(input.shape)}: it must be (n, i)")
    zeros = input.new_zeros(len(input), module.hidden_size)
    state = _initial(hx, lambda _: zeros, family)
    h, *rest = _step(family, products, products("weight_ih", input), state, None)
    return (h, rest[0]) if rest else h


def _step(
    family: str, products: _Products, x: Tensor, state: State, places: Places | None
) -> State:
    """The next state (n, ...) from x = W_ih x + b_ih and the state before."""
    y = products("weight_hh", state[0], places)
    if family == "rnn":
        relu = products.module.nonlinearity == "relu"
        return (torch.relu(x + y) if relu else torch.tanh(x + y),)
    if family == "gru":
        (r, z, new), (r_h, z_h, new_h) = x.chunk(3, 1), y.chunk(3, 1)
        z, new = torch.sigmoid(z + z_h), torch.tanh(new + torch.sigmoid(r + r_h) * new_h)
        return (new + z * (state[0] - new),)
    enter, forget, cell, leave = (x + y).chunk(4, 1)
    c = torch.sigmoid(forget) * state[1] + torch.sigmoid(enter) * torch.tanh(cell)
    h = torch.sigmoid(leave) * torch.tanh(c)
    if getattr(products.module, "proj_size", 0):
        h = products("weight_hr", h, places)
    return h, c


def _initial(hx: Any, zeros: Callable[[str], Tensor], family: str) -> State:
    """The state (n, ...) to begin with: of zeros, unless one is given."""
    if family == "lstm":
        return (zeros("h"), zeros("c")) if hx is None else tuple(hx)
    return (zeros("h") if hx is None else hx,)


def _sequence(
    module: Any,
    products: Callable[[str], _Products],
    family: str,
    n: int | None,
    input: Tensor | PackedSequence,
    hx: Any = None,
) -> tuple[Any, Any]:
    """All layers and directions over a sequence, as the module's own forward returns them."""
    if isinstance(input, PackedSequence):
        x, lengths = pad_packed_sequence(input, batch_first=True)
    else:
        x, lengths = input if module.batch_first else input.transpose(0, 1), None
    if x.dim() != 3 or n not in (None, len(x)):
        raise InvalidInput(
            f"its input has the shape {tuple(x.shape)}, not a sequence for each of {n} examples"
        )
    numbers = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
    if lengths is not None:
        numbers = numbers.where(numbers < lengths.to(x.device).unsqueeze(1), -1)
    directions = 1 + module.bidirectional
    ends: list[State] = []
    whole = _initial(hx, partial(_zeros, module, x, directions), family)
    for layer in range(module.num_layers):
        outputs = []
        for backward in range(directions):
            weights = products(f"_l{layer}" + "_reverse" * backward)
            state = tuple(part[len(ends)] for part in whole)
            y, end = _along(family, weights, x, state, numbers, bool(backward))
            outputs.append(y)
            ends.append(end)
        x = torch.cat(outputs, 2)
    final = tuple(torch.stack(part) for part in zip(*ends, strict=True))
    last = final if family == "lstm" else final[0]
    if isinstance(input, PackedSequence):
        return _packed(x, numbers, input), last
    return x if module.batch_first else x.transpose(0, 1), last


def _zeros(module: Any, x: Tensor, directions: int, part: str) -> Tensor:
    width = getattr(module, "proj_size", 0) if part == "h" else 0
    return x.new_zeros(module.num_layers * directions, len(x), width or module.hidden_size)


def _along(
    family: str, products: _Products, x: Tensor, state: State, numbers: Tensor, backward: bool
) -> tuple[Tensor, State]:
    """One layer in one direction: its outputs (n, t, o), and its last state."""
    steps = products("weight_ih", x, Places(numbers, x.shape[1])).unbind(1)
    outputs = []
    for t in reversed(range(len(steps))) if backward else range(len(steps)):
        number = numbers[:, t : t + 1]
        after = _step(family, products, steps[t], state, Places(number, len(steps)))
        pairs = zip(after, state, strict=True)  # a sequence that has ended keeps its state
        state = tuple(torch.where(number >= 0, new, before) for new, before in pairs)
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backward else outputs, 1), state


def _packed(x: Tensor, numbers: Tensor, like: PackedSequence) -> PackedSequence:
    """Outputs (n, t, o), in the order that the input was packed in."""
    order = like.sorted_indices
    lengths = (numbers >= 0).sum(1)
    x, lengths = (x, lengths) if order is None else (x[order], lengths[order])
    data = pack_padded_sequence(x, lengths.cpu(), batch_first=True).data
    return like._replace(data=data)


register_each(Recurrent, *FAMILIES)
