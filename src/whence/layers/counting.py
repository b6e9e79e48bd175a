"""Operations of a model's passes, counted while they run: tracked layers and all others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

#: which PyTorch does not count: attention as CPUs compute it, and on the meta device
ATTENTION = {
    "aten._scaled_dot_product_flash_attention_for_cpu": sdpa_flop,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": sdpa_backward_flop,
    "aten._scaled_dot_product_fused_attention_overrideable": sdpa_flop,
    "aten._scaled_dot_product_fused_attention_overrideable_backward": sdpa_backward_flop,
}


class OperationCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside the `with`, adds up the operations of products, convolutions and attention, and the
    numbers in their results.

    Works without weights, on the meta device. A product of n terms is 2n operations; elementwise
    work is not counted.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations, self.numbers = 0, 0

    def __torch_dispatch__(
        self,
        function: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        packet = function._overloadpacket
        count: Any = flop_registry.get(packet) or ATTENTION.get(str(packet))
        if count is not None:
            self.operations += int(count(*args, **(kwargs or {}), out_val=result))
            results = result if isinstance(result, tuple) else (result,)
            self.numbers += sum(x.numel() for x in results if isinstance(x, Tensor))
        return result
