"""Parameters that are used as they are: class tokens, tables of positions, scales, and biases that
are no column of a matrix."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from whence.errors import InvalidInput
from whence.layers.kind import Kind, Seen

MAX_COPIED_NUMBERS = 2**22  # numbers in a parameter, above which copies take too much memory


class Bias(Kind):
    """A bias that is added to every position of a module's output, and is no column of its matrix:
    the matrix is a table or a transposed kernel, or was trained at other rates.

    Args:
        kind: that of the module.
    """

    form = "elementwise"

    def __init__(self, kind: Kind) -> None:
        self.kind = kind

    def shape(self, module: Any) -> tuple[int, int, int]:
        return 1, module.bias.numel(), 1

    def inputs(self, module: Any, x: Tensor) -> list[Tensor]:
        return [module.bias.new_ones(len(x), 1, 1)]

    def gradients(self, module: Any, gradient: Tensor) -> list[Tensor]:
        return [self.kind.bias_gradient(module, gradient)]


class Direct(Kind):
    """A parameter of a module of any class, of which each example gets a copy (`OnePerExample`)."""

    form = "elementwise"
    seen: ClassVar[Seen] = "copies"

    def __init__(self, attribute: str) -> None:
        self.attribute = attribute

    def refusal(self, module: nn.Module) -> str | None:
        parameter = module._parameters[self.attribute]
        assert parameter is not None
        if parameter.numel() <= MAX_COPIED_NUMBERS:
            return None
        return f"a copy of its {parameter.numel():,} numbers for each example takes too much memory"

    def shape(self, module: Any) -> tuple[int, int, int]:
        return 1, module._parameters[self.attribute].numel(), 1

    def inputs(self, module: Any, x: Tensor) -> list[Tensor]:
        return [x.new_ones(len(x), 1, 1)]

    def gradients(self, module: Any, gradient: Tensor) -> list[Tensor]:
        return [gradient.reshape(len(gradient), 1, -1)]


def one_for_all(parameter: Tensor) -> bool:
    """Whether a parameter is (1, ...), as one row of a batch."""
    return parameter.dim() > 1 and len(parameter) == 1


class OnePerExample(Tensor):
    """A tensor (...) that has a value for each of n examples: `each`, (n, ...).

    It looks like the value of one example. Functions of it alone give another such tensor. Where it
    meets the activations of a batch, (n, ...), each example meets its own value. A study compares
    the outputs and the gradients of a model that uses it with those of the plain model.
    """

    each: Tensor

    @staticmethod
    def of(each: Tensor) -> OnePerExample:
        value = torch.Tensor._make_subclass(OnePerExample, each[0].detach())
        value.each = each
        return value

    def in_batch(self, function: str = "an input", axes: int = 0, matrix: bool = False) -> Tensor:
        """Its values as a batch (n, ...), with axes of length 1 between where the batch has more.

        Args:
            function: what takes it.
            axes: of the batch that it meets.
            matrix: whether it is the right factor of a product.
        """
        n = len(self.each)
        if self.dim() < axes or (matrix and self.dim() == 2 and axes <= 2):
            return self.each.reshape(n, *[1] * (axes - 1 - self.dim()), *self.shape)
        axis = 1 if function in SECOND else 0  # of the batch
        if self.dim() > axis and self.shape[axis] == n:  # one for each example, as by `expand`
            return self.each.diagonal(0, 0, axis + 1).movedim(-1, axis)
        if axis == 0 and self.dim() and len(self) == 1:
            return self.each.squeeze(1)
        raise InvalidInput(f"{function} of shape {tuple(self.shape)} has no axis for {n} examples")

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            name = getattr(func, "__name__", "").strip("_")
            if name in DESCRIBES and not isinstance(result := func(*args, **kwargs or {}), Tensor):
                return result
            compute: Callable[..., Any] = PRODUCTS.get(name, func)
            leaves, structure = tree_flatten((args, kwargs or {}))
            copies = [k for k, x in enumerate(leaves) if isinstance(x, OnePerExample)]
            batch = [x.dim() for x in leaves if type(x) is not cls and isinstance(x, Tensor)]

            def call(values: Sequence[Tensor]) -> Any:
                operands = list(leaves)
                for k, value in zip(copies, values, strict=True):
                    operands[k] = value
                positional, named = tree_unflatten(operands, structure)
                return compute(*positional, **named)

            if not any(batch):  # a number beside it is no batch
                values = torch.vmap(call)([leaves[k].each for k in copies])
                return tree_map(OnePerExample.of, values)
            axes = max(batch) if name in BROADCASTS or name in PRODUCTS else 0
            matrix = 1 if name in PRODUCTS else None  # the place of the right factor
            return call([leaves[k].in_batch(name, axes, k == matrix) for k in copies])


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight; x (n, i) may have no positions, where the weight is (n, i, o)."""
    if x.dim() == 2 and weight.dim() == 3:
        return (x.unsqueeze(1) @ weight).squeeze(1)
    return x @ weight


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = _product(x, weight.mT)
    return y if bias is None else y + bias


def _embedding(
    ids: Tensor, table: Tensor, padding_idx: int | None = None, max_norm: Any = None, **_: Any
) -> Tensor:
    """Rows of the example's own table (n, rows, i) at ids (n, ...)."""
    if max_norm is not None or len(ids) != len(table):
        raise InvalidInput(f"row numbers {tuple(ids.shape)} of {len(table)} tables")
    example = torch.arange(len(ids), device=ids.device).view(-1, *[1] * (ids.dim() - 1))
    rows = table[example, ids]
    if padding_idx is None:
        return rows
    return torch.where((ids == padding_idx % table.shape[1]).unsqueeze(-1), rows.detach(), rows)


#: functions that only say something about a tensor; "get" is that of `shape`, but also of `T`
DESCRIBES = {"get", "size", "dim", "ndimension", "numel", "len", "is_floating_point", "stride"}
#: functions that give the values of all operands the same axes, or need them
BROADCASTS = {
    *(f"{how}{what}" for what in ("add", "sub", "mul", "truediv") for how in ("", "r", "i")),
    *("div", "divide", "true_divide", "multiply", "subtract", "where", "maximum", "minimum"),
    *("cat", "concat", "concatenate"),
}
#: functions whose states have the examples of a batch on their second axis
SECOND = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
PRODUCTS: Mapping[str, Callable[..., Tensor]] = {
    "matmul": _product,
    "linear": _linear,
    "embedding": _embedding,
}
