"""A model's losses as functions of its weights, and their derivatives along many directions.

Directions are tensors (q, ...), one for each parameter that they move: q directions at once.
Everything that does not depend on a direction is computed once for all of them. The rest is a few
large products per layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map_only

from whence.data import batch_length
from whence.engine.graphs import Graphs
from whence.errors import InvalidInput
from whence.layers.capture import without_checkpoints
from whence.task import Task

Tensors = dict[str, Tensor]  # by parameter


class Objective:
    """A stage's losses and measurements as functions of the trained weights θ."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        self.task, self.model = task, model
        self._module, self._replayed = _Outputs(model, task), Graphs()

    def outputs(self, weights: Mapping[str, Tensor], batch: Any) -> Tensor:
        """The model's outputs with these weights instead of its own."""
        renamed = {f"model.{name}": weight for name, weight in weights.items()}
        copied = tree_map_only(Tensor, Tensor.clone, batch)  # a model may change its input in place
        outputs: Tensor = functional_call(self._module, renamed, (copied,))
        return outputs

    def losses(self, weights: Mapping[str, Tensor], batch: Any) -> Tensor:
        """(n,)"""
        return self._one_each("losses", self.outputs(weights, batch), batch)

    def gradient(
        self, weights: Tensors, names: Iterable[str], batch: Any, of: str, count: int
    ) -> Tensors:
        """∇ (1/count) Σ losses, or Σ measurements, in the named parameters.

        A parameter that they do not depend on is absent, as its .grad would be None.
        """
        names = tuple(names)

        def descent(weights: Tensors, batch: Any) -> Tensors:
            with torch.enable_grad():
                leaves = {name: weights[name].detach().requires_grad_() for name in names}
                values = self._one_each(of, self.outputs(weights | leaves, batch), batch)
                mean = values.sum() / count
                slopes = torch.autograd.grad(mean, list(leaves.values()), allow_unused=True)
            return {name: g for name, g in zip(leaves, slopes, strict=True) if g is not None}

        return self._replayed(("gradient", names, of, count), descent, weights, batch)

    def slopes(self, weights: Tensors, directions: Tensors, batch: Any) -> Tensor:
        """⟨v_q, ∇L(m, θ)⟩ of every direction v (q, ...) and example, (q, n)."""

        def slopes(weights: Tensors, directions: Tensors, batch: Any) -> Tensor:
            def along(v: Tensors) -> Any:
                return _along(lambda w: self.losses(weights | w, batch), _only(weights, v), v)

            values: Tensor = vmap(along)(directions)
            return values

        return self._replayed("slopes", slopes, weights, directions, batch)

    def hessian(
        self, weights: Tensors, directions: Tensors, batch: Any, share: float
    ) -> tuple[Tensors, Tensor]:
        """(H v (q, ...), slopes (q, n)) with H the Hessian of share · Σ losses.

        It is the derivative of a backward pass.
        """

        def product(weights: Tensors, directions: Tensors, batch: Any) -> tuple[Tensors, Tensor]:
            def total(w: Tensors) -> tuple[Tensor, Tensor]:
                losses = self.losses(w, batch)
                return share * losses.sum(), losses

            slope = grad(total, has_aux=True)

            def along(v: Tensors) -> Any:
                return _along(lambda w: slope(weights | w), _only(weights, v), v)

            products: tuple[Tensors, Tensor] = vmap(along)(directions)
            return products

        return self._replayed(("hessian", share), product, weights, directions, batch)

    def gauss_newton(
        self, weights: Tensors, directions: Tensors, batch: Any, share: float
    ) -> tuple[Tensors, Tensor]:
        """(G v, slopes) with G = share · Σ Jᵀ ∇²L J: the Hessian for outputs linear in θ.

        `operators.gauss_newton.Linearised` says why there are two such products.
        """

        def product(weights: Tensors, directions: Tensors, batch: Any) -> tuple[Tensors, Tensor]:
            def total(outputs: Tensor) -> tuple[Tensor, Tensor]:
                losses = self._one_each("losses", outputs, batch)
                return share * losses.sum(), losses

            pulled: Any = vjp(lambda w: self.outputs(w, batch), weights)
            (outputs, back), slope = pulled, grad(total, has_aux=True)

            def along(v: Tensors) -> tuple[Tensors, Tensor]:
                moved = _along(lambda w: self.outputs(weights | w, batch), _only(weights, v), v)
                bent, slopes = _along(slope, outputs, moved)
                return back(bent)[0], slopes

            products: tuple[Tensors, Tensor] = vmap(along)(directions)
            return products

        return self._replayed(("gauss-newton", share), product, weights, directions, batch)

    def _one_each(self, what: str, outputs: Tensor, batch: Any) -> Tensor:
        values: Tensor = getattr(self.task, what)(outputs, batch)
        if values.dim() != 1:
            raise InvalidInput(
                f"{type(self.task).__name__}.{what} returned shape {tuple(values.shape)} for "
                f"{batch_length(batch)} examples: it must be one number per example"
            )
        return values


class _Outputs(nn.Module):
    def __init__(self, model: nn.Module, task: Task) -> None:
        super().__init__()
        self.model, self.task = model, task

    def forward(self, batch: Any) -> Tensor:
        return self.task.outputs(self.model, batch)


def _along(function: Callable[[Any], Any], at: Any, v: Any) -> Any:
    """The derivative of a function at a point, along a direction."""
    return jvp(function, (at,), (v,))[1]


def _only(weights: Tensors, names: Iterable[str]) -> Tensors:
    return {name: weights[name] for name in names}


@contextmanager
def twice_differentiable() -> Iterator[None]:
    """Compute attention by plain products, because fused kernels have no second derivative; and
    nothing again in the backward pass, which function transforms cannot."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), without_checkpoints():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
