"""Losses of a model in training mode: with the draws of dropout, and batch norm's statistics.

The draws of an update come from its seed, which a recipe's run determines. Running statistics are a
part of the training's state. Each update moves them towards the statistics of its batch,

    running' = (1 - m) running + m s(θ_t, batch)            s: mean, and variance with n - 1

so the final measurement depends on θ_t through s too. Derivatives are taken twice through the very
operations of the training (a backward pass of a backward pass), so that draws, autocast and kernels
are its own. A batch is never split: its examples meet in batch norm, and in the draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from whence.draws import reseed
from whence.errors import InvalidInput
from whence.replay.norms import normalise
from whence.replay.objective import Objective, Tensors
from whence.task import Task

STATISTICS = ("running_mean", "running_var")


@dataclass(frozen=True)
class Drawn:
    """A batch, and the seed of the draws of its update; None where the model draws nothing."""

    batch: Any
    seed: int | None


class TrainingObjective(Objective):
    """A stage's losses in training mode, and its measurements in evaluation mode.

    Args:
        frozen: modules that stayed in evaluation mode.
        norms: batch norms that measured their batches, by name.
        at_once: how many directions fit in memory with a batch of this many examples.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        frozen: Iterable[nn.Module],
        norms: Mapping[str, _BatchNorm],
        at_once: Callable[[int], int],
    ) -> None:
        super().__init__(model, task)
        self.frozen, self.norms, self.at_once = list(frozen), dict(norms), at_once
        self._batched = True  # until an operation of the model refuses
        self.statistics = {
            f"{path}.{name}" if path else name: norm
            for path, norm in self.norms.items()
            for name in STATISTICS
        }

    def gradient(
        self, weights: Tensors, names: Iterable[str], batch: Any, of: str, count: int
    ) -> Tensors:
        """As `Objective.gradient`; of losses, also the statistics of the batch."""
        if of != "losses":
            with _differentiable(self.norms.values()):
                return super().gradient(weights, names, batch, of, count)
        with torch.enable_grad():
            leaves = {name: weights[name].detach().requires_grad_() for name in names}
            losses, statistics = self._training(weights | leaves, batch)
            slopes = torch.autograd.grad(
                losses.sum() / count, list(leaves.values()), allow_unused=True
            )
        gradients = {name: g for name, g in zip(leaves, slopes, strict=True) if g is not None}
        return gradients | {name: value.detach() for name, value in statistics.items()}

    def hessian(
        self, weights: Tensors, directions: Tensors, batch: Any, share: float
    ) -> tuple[Tensors, Tensor]:
        """As `Objective.hessian`; a direction of a statistic adds its derivative in the weights.

        With a weight c_m of each loss, the gradient ∇ share · Σ c_m L_m has the derivative H in the
        weights, and the examples' slopes in c.
        """
        with torch.enable_grad():
            leaves = {
                name: weight.detach().requires_grad_()
                for name, weight in weights.items()
                if name not in self.statistics
            }
            losses, results = self._training(weights | leaves, batch)
            c = torch.ones_like(losses, requires_grad=True)
            moved = [name for name in directions if name in leaves]
            gradients = torch.autograd.grad(
                share * (c * losses).sum(),
                [leaves[name] for name in moved],
                create_graph=True,
                allow_unused=True,
            )
            results |= {n: g for n, g in zip(moved, gradients, strict=True) if g is not None}
        through = [name for name in directions if name in results and results[name].requires_grad]
        pulled = self._pulled(
            [results[name] for name in through],
            [directions[name] for name in through],
            [*leaves.values(), c],
        )
        *products, slopes = pulled
        count = len(next(iter(directions.values())))
        if slopes is None:
            slopes = losses.new_zeros(count, len(losses))
        named = zip(leaves, products, strict=True)
        return {n: p for n, p in named if p is not None}, slopes / share

    def _pulled(
        self, outputs: list[Tensor], vectors: list[Tensor], inputs: list[Tensor]
    ) -> list[Tensor | None]:
        """Jᵀ v of each direction v (q, ...), as many at once as fit in memory."""
        count, start, parts = len(vectors[0]), 0, list[Any]()
        while start < count:
            size = min(self.at_once(len(inputs[-1])), count - start) if self._batched else 1
            chunk = [vector[start : start + size] for vector in vectors]
            try:
                parts.append(_transposed(outputs, inputs, chunk))
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:  # an operation without a batched form, such as some pooling
                if size == 1:
                    raise
                self._batched = False
                continue
            start += size
        return [
            None if pieces[0] is None else torch.cat(pieces) for pieces in zip(*parts, strict=True)
        ]

    def gauss_newton(
        self, weights: Tensors, directions: Tensors, batch: Any, share: float
    ) -> tuple[Tensors, Tensor]:
        raise InvalidInput(
            "curvature='gauss-newton' has no form for a model in training mode (dropout, batch "
            "norm): use curvature='hessian'"
        )

    def _training(self, weights: Mapping[str, Tensor], batch: Any) -> tuple[Tensor, Tensors]:
        """The losses in training mode (n,), and the statistics of the batch in each norm."""
        device = next(iter(weights.values())).device
        statistics: Tensors = {}
        buffers = {
            name: buffer.clone()
            for path, norm in self.norms.items()
            for name, buffer in norm.named_buffers(path)
        }
        with ExitStack() as stack:
            stack.enter_context(_measuring(self.norms, statistics))
            self.model.train()
            stack.callback(self.model.eval)
            for module in self.frozen:
                module.eval()
            if batch.seed is not None:
                devices = [device] if device.type == "cuda" else []
                stack.enter_context(torch.random.fork_rng(devices))
                reseed(batch.seed, device)
            outputs = self.outputs({**buffers, **_without(weights, buffers)}, batch.batch)
        return self._one_each("losses", outputs, batch.batch), statistics


def _transposed(
    outputs: list[Tensor], inputs: list[Tensor], vectors: list[Tensor]
) -> list[Tensor | None]:
    """Jᵀ v of some directions v (q, ...). A single one is taken without vmap."""
    single = len(vectors[0]) == 1
    slopes = torch.autograd.grad(
        outputs,
        inputs,
        [v[0] for v in vectors] if single else vectors,
        retain_graph=True,
        allow_unused=True,
        is_grads_batched=not single,
    )
    return [g.unsqueeze(0) if single and g is not None else g for g in slopes]


def _without(weights: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """The weights except these: a forward pass in training mode changes its buffers in place."""
    return {name: weight for name, weight in weights.items() if name not in set(names)}


@contextmanager
def _measuring(norms: Mapping[str, _BatchNorm], statistics: Tensors) -> Iterator[None]:
    """Batch norms that store the mean and the variance of their inputs."""

    def forward(path: str, norm: _BatchNorm, x: Tensor) -> Tensor:
        y, *measured = normalise(norm, x)
        for name, value in zip(STATISTICS, measured, strict=True):
            full = f"{path}.{name}" if path else name
            if full in statistics:
                raise InvalidInput(
                    f"{path} is used twice in a forward pass, so its running statistics change "
                    "twice per update: use one batch norm for each place, or LayerNorm"
                )
            statistics[full] = value
        return y

    with _replaced({norm: partial(forward, path, norm) for path, norm in norms.items()}):
        yield


@contextmanager
def _differentiable(norms: Iterable[_BatchNorm]) -> Iterator[None]:
    """Batch norms in evaluation mode whose running statistics have a derivative: torch's own treats
    them as constants."""
    with _replaced({norm: partial(_normalised, norm) for norm in norms}):
        yield


@contextmanager
def _replaced(forwards: Mapping[_BatchNorm, Callable[[Tensor], Tensor]]) -> Iterator[None]:
    """Modules with another forward pass."""
    for norm, forward in forwards.items():
        norm.forward = forward  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        for norm in forwards:
            del norm.forward


def _normalised(norm: _BatchNorm, x: Tensor) -> Tensor:
    assert norm.running_mean is not None and norm.running_var is not None
    shape = [1, -1, *[1] * (x.dim() - 2)]
    scale = (norm.running_var + norm.eps).rsqrt()
    if norm.weight is not None:
        scale = scale * norm.weight
    y = (x - norm.running_mean.view(shape)) * scale.view(shape)
    return y if norm.bias is None else y + norm.bias.view(shape)
