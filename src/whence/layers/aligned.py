"""Products with a long weight whose rows would not be aligned, such as the logits of 50,257 tokens.

In bfloat16 or TF32, a GPU multiplies several times more slowly where rows do not start at multiples
of 16 bytes. Inside `AlignedProducts`, such products are computed with some columns of zeros, which
are then left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

ALIGNMENT_BYTES = {"cuda": 16}  # to which rows are aligned
MIN_COLUMNS = 4096  # columns, from which the time for copying them is small
PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__}
LINEAR = F.linear  # which `Tape` replaces


class AlignedProducts(TorchFunctionMode):
    """Inside it, x Wᵀ of a model's weight W (o, i) is computed with aligned rows."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function is LINEAR and not kwargs and missing_rows(args[1]):
            return linear(*args)
        if function in PRODUCTS and not kwargs and all(map(matrices, args)):
            x, right = args
            if right.dim() == 2 and missing_rows(right.mT):
                return linear(x, right.mT)
        return function(*args, **(kwargs or {}))


def matrices(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 1


def missing_rows(weight: Tensor) -> int:
    """By how many rows a weight (o, i) must be longer for x Wᵀ to be aligned; 0 if it does not
    matter."""
    single = weight.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    if len(weight) < MIN_COLUMNS or not (single or weight.dtype in (torch.bfloat16, torch.float16)):
        return 0
    return -len(weight) % max(1, ALIGNMENT_BYTES.get(weight.device.type, 1) // weight.itemsize)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b: (..., i) and (o, i) -> (..., o)."""
    missing = missing_rows(weight)
    bias = None if bias is None else F.pad(bias, (0, missing))
    return LINEAR(x, F.pad(weight, (0, 0, 0, missing)), bias)[..., : len(weight)].contiguous()
