"""Functions of tensors as CUDA graphs, so that a device does not wait for Python.

A sweep calls the same few functions on tensors of the same shapes thousands of times. From the
third call on they are replayed: what Python, autograd and torch.func do around the kernels takes
longer than the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

WARM_UP = 2  # calls before a function is captured
HELD = 6  # graphs at a time; each holds memory of its own

T = TypeVar("T")


@dataclass(frozen=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    arguments: list[Tensor]
    result: Any


class Graphs:
    """Calls functions, by replaying them where that is possible."""

    def __init__(self) -> None:
        self._held: dict[Hashable, _Graph] = {}
        self._seen: dict[Hashable, int] = {}
        self._failed: set[Hashable] = set()

    def __call__(self, key: Hashable, function: Callable[..., T], *arguments: Any) -> T:
        """`function(*arguments)`. All that the result depends on beside the tensors among the
        arguments must be in `key`; on the CPU it is a plain call."""
        leaves, spec = tree_flatten(arguments)
        if not all(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in leaves):
            return function(*arguments)
        key = (key, str(spec), tuple((leaf.shape, leaf.dtype) for leaf in leaves))
        self._seen[key] = self._seen.get(key, 0) + 1
        if self._seen[key] <= WARM_UP or key in self._failed:
            return function(*arguments)
        if key not in self._held:
            while len(self._held) >= HELD:
                self._held.pop(next(iter(self._held)))
            try:
                self._held[key] = self._capture(function, leaves, spec)
            except RuntimeError:  # something in the user's model asks the device for a number
                self._failed.add(key)
                torch.cuda.synchronize()
                return function(*arguments)
        held = self._held[key]
        for place, leaf in zip(held.arguments, leaves, strict=True):
            place.copy_(leaf)
        held.graph.replay()
        # the next replay writes where this one has
        copied: T = tree_map_only(Tensor, Tensor.clone, held.result)
        return copied

    @staticmethod
    def _capture(function: Callable[..., Any], leaves: list[Tensor], spec: Any) -> _Graph:
        own = [leaf.detach().clone() for leaf in leaves]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = function(*tree_unflatten(own, spec))
        return _Graph(graph, own, result)
