"""AdamW with an epsilon under its root, so that its step is smooth in the gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from whence.errors import InvalidInput


class SmoothAdamW(Optimizer):
    """AdamW that divides by √(v̂ + eps_root) + eps, where torch's divides by √v̂ + eps.

    The step of torch's Adam changes its sign within a gradient of the size of eps: its derivative
    is up to 1/eps, and a training with many small gradients is rough in the weights of its data
    (`whence.evaluate.metasmoothness`). Here the derivative is at most 1/√eps_root. `Unrolled`
    differentiates it, and every other method knows its second moments.

    Args:
        params, lr, betas, eps, weight_decay: as in `torch.optim.AdamW`.
        eps_root: added to the second moment before its root.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        eps_root: float = 1e-8,
    ) -> None:
        for name, value in (("lr", lr), ("eps", eps), ("eps_root", eps_root)):
            if not float(value) >= 0:
                raise InvalidInput(f"{name}={value} must not be negative")
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, settings | {"eps_root": eps_root})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        (β1, β2), lr, count = group["betas"], float(group["lr"]), float(state["step"])
        parameter.mul_(1 - lr * group["weight_decay"])
        m = state["exp_avg"].lerp_(gradient, 1 - β1)
        v = state["exp_avg_sq"].mul_(β2).addcmul_(gradient, gradient, value=1 - β2)
        below = (v / (1 - β2**count)).add_(group["eps_root"]).sqrt_().add_(group["eps"])
        parameter.addcdiv_(m, below, value=-lr / (1 - β1**count))
