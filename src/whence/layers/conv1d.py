"""Hugging Face's `Conv1D` (GPT-2): a Linear whose weight is stored (in, out)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from whence.layers.kind import Kind, register


class Conv1D(Kind):
    module = ("Conv1D",)  # by name, so that transformers need not be imported

    def claims(self, module: nn.Module) -> bool:
        return hasattr(module, "nf")

    def refusal(self, module: nn.Module) -> str | None:
        if type(module).__name__ == "Conv1D":
            return None
        return f"{type(module).__name__} is a subclass of Conv1D and may compute something else"

    def shape(self, module: Any) -> tuple[int, int, int]:
        inputs, outputs = module.weight.shape
        return 1, outputs, inputs

    def matrices(self, module: Any, weight: Tensor) -> list[Tensor]:
        return [weight.T]


register(Conv1D())
