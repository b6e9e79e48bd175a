"""Any other module, computed with one copy of its parameters for each example.

This is exact for every module whose forward `torch.vmap` can follow: weights with a parametrization
(weight norm, spectral norm), layers whose class overrides `forward`, scales of channels. It costs a
copy of the parameters per example, and the curvature is diagonal.
"""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from whence.errors import InvalidInput
from whence.layers.kind import Notes, Seen
from whence.layers.parameter import Direct


class Copied(Direct):
    """A parameter of a module `host`, or of its parametrizations."""

    seen: ClassVar[Seen] = "forward"

    def __init__(self, attribute: str, host: nn.Module) -> None:
        super().__init__(attribute)
        self._host = host

    def host(self, module: Any) -> nn.Module:
        return self._host

    def forward(self, host: Any, note: Notes, *args: Any, **kwargs: Any) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        tensor_places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        shapes = [tuple(leaves[k].shape) for k in tensor_places]
        for shape in shapes:
            if shape[:1] not in ((note.n,), (1,)):  # or one row for all
                raise InvalidInput(f"an input {shape} does not have the {note.n} examples in front")
        inside, parameters = _Inside(host, note.forward), dict(host.named_parameters())
        copies = {}
        for name in note.names:
            weight = parameters[name]
            copies[f"host.{name}"] = copy = weight.unsqueeze(0).expand(note.n, *weight.shape)
            note(name, weight.new_ones(note.n, 1), copy)

        def alone(copies: dict[str, Tensor], inputs: list[Tensor]) -> Any:
            arguments = list(leaves)
            for k, x in zip(tensor_places, inputs, strict=True):
                arguments[k] = x.unsqueeze(0)
            args, kwargs = tree_unflatten(arguments, structure)
            outputs = functional_call(inside, copies, args, kwargs)
            return tree_map(lambda y: y.squeeze(0), outputs)

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")  # of vmap, in a loop
            inputs = [leaves[k].expand(note.n, *leaves[k].shape[1:]) for k in tensor_places]
            return torch.vmap(alone)(copies, inputs)


class _Inside(nn.Module):
    """A module with the forward it has without us."""

    def __init__(self, host: nn.Module, forward: Any) -> None:
        super().__init__()
        self.host, self._forward = host, forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)
