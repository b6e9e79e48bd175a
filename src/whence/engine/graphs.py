"""Functions of tensors as CUDA graphs, so that a device does not wait for Python.

A replay of a training, or many trainings in one program, call the same few functions on tensors of
the same shapes thousands of times. If the kernels are small, Python, autograd and torch.func take
longer than the kernels. From the third call on, `Graphs` therefore replays a captured CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

WARM_UP = 2  # plain calls before a function is captured
MAX_GRAPHS = 6  # at a time, since each has its own memory

T = TypeVar("T")


@dataclass(frozen=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    arguments: list[Tensor]
    result: Any


class Graphs:
    """Calls functions, and replays them as CUDA graphs where possible.

    Args:
        stream: the stream to capture on (default: torch's own capture stream). A caller that runs
            on a side stream passes that one: a function is captured where its warm-up calls ran.

    Attributes:
        failed: keys of functions that could not be captured. These are called plainly.
    """

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self.stream = stream
        self.failed: set[Hashable] = set()
        self._captured: dict[Hashable, _Graph] = {}
        self._calls: dict[Hashable, int] = {}

    def __call__(self, key: Hashable, function: Callable[..., T], *arguments: Any) -> T:
        """`function(*arguments)`. On the CPU, this is a plain call.

        Args:
            key: everything that the result depends on, except the tensors among the arguments.
            function: may return tensors, or change tensors that outlive the call in place.
            arguments: tensors, or trees of tensors.
        """
        leaves, spec = tree_flatten(arguments)
        if not all(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in leaves):
            return function(*arguments)
        key = (key, str(spec), tuple((leaf.shape, leaf.dtype) for leaf in leaves))
        self._calls[key] = self._calls.get(key, 0) + 1
        if self._calls[key] <= WARM_UP or key in self.failed:
            return function(*arguments)
        if key not in self._captured:
            while len(self._captured) >= MAX_GRAPHS:
                self._captured.pop(next(iter(self._captured)))
            try:
                self._captured[key] = self._capture(function, leaves, spec)
            except RuntimeError:  # the user's model reads a number from the device, as by .item()
                self.failed.add(key)
                torch.cuda.synchronize()
                return function(*arguments)
        captured = self._captured[key]
        for static, leaf in zip(captured.arguments, leaves, strict=True):
            static.copy_(leaf)
        captured.graph.replay()  # capturing only recorded the function, and did not run it
        # the next replay overwrites these results
        copied: T = tree_map_only(Tensor, Tensor.clone, captured.result)
        return copied

    def _capture(self, function: Callable[..., Any], leaves: list[Tensor], spec: Any) -> _Graph:
        arguments = [leaf.detach().clone() for leaf in leaves]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            result = function(*tree_unflatten(arguments, spec))
        return _Graph(graph, arguments, result)
