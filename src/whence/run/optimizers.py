"""What a run needs to know about a torch optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from whence.run.checkpoint import plain_names
from whence.run.smooth_adamw import SmoothAdamW
from whence.world import part_of

NAMES: dict[type[Optimizer], str] = {
    SGD: "sgd",
    Adam: "adam",
    AdamW: "adamw",
    SmoothAdamW: "adamw",
    RMSprop: "rmsprop",
}
# Marks a Python number among an optimizer's tensors, so that it comes back as a number.
NUMBER = "#"


def unwrap(optimizer: Any) -> Optimizer:
    """The torch optimizer inside accelerate's or Lightning's wrapper: the one that updates."""
    inner = getattr(optimizer, "optimizer", None)
    return unwrap(inner) if isinstance(inner, Optimizer) else optimizer


def kind(optimizer: Optimizer) -> str:
    """ "sgd", "adam", "adamw", "rmsprop", or the class name of any other optimizer."""
    if type(optimizer) is Adam and optimizer.defaults.get("decoupled_weight_decay"):
        return "adamw"
    return NAMES.get(type(optimizer), type(optimizer).__name__)


def names_of(model: nn.Module) -> dict[int, list[str]]:
    """{id of a parameter: its plain names}. A tied parameter has more than one."""
    named = list(model.named_parameters(remove_duplicate=False))
    plain = plain_names(name for name, _ in named)
    names: dict[int, list[str]] = {}
    for name, parameter in named:
        names.setdefault(id(parameter), []).append(plain[name])
    return names


def rate(group: Mapping[str, Any]) -> tuple[float, float]:
    """A parameter group's learning rate and momentum (β₁ for Adam-type optimizers)."""
    betas = group.get("betas") or (0.0,)
    return float(group.get("lr") or 0.0), float(group.get("momentum", betas[0]) or 0.0)


def hyperparameters(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group's settings except the learning rate, as plain JSON values."""
    settings = {}
    for key in optimizer.defaults:
        value = group.get(key)
        if isinstance(value, Tensor):
            value = value.tolist()
        if isinstance(value, tuple):
            value = [None if v is None else float(v) for v in value]
        if key != "lr" and isinstance(value, (bool, int, float, str, list, type(None))):
            settings[key] = value
    return settings


def skipped(optimizer: Optimizer) -> bool:
    """Whether a step left the weights unchanged: an AMP scaler calls a fused optimizer even when a
    gradient overflowed, and the optimizer then skips the update itself."""
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and bool(found_inf.item())


def second_moments(
    optimizer: Optimizer, names: Mapping[int, list[str]]
) -> dict[str, Tensor] | None:
    """{parameter: v̂}: bias-corrected for Adam and AMSGrad (its maximum), plain for RMSprop."""
    if kind(optimizer) not in ("adam", "adamw", "rmsprop"):
        return None
    moments = {}
    for name, parameter, group in _named(optimizer, names):
        moment = second_moment(optimizer.state.get(parameter) or {}, group)
        if moment is not None:
            moments[name] = moment
    return moments or None


def second_moment(state: Mapping[str, Any], group: Mapping[str, Any]) -> Tensor | None:
    """v̂ of one parameter, with what is added to it, from its state and its group's settings."""
    moment: Tensor
    if "square_avg" in state:
        moment = state["square_avg"].detach()
        if "grad_avg" in state:  # centered: torch divides by the root of the variance
            moment = moment - state["grad_avg"].detach().square()
        return moment
    if "exp_avg_sq" in state:
        moment = state.get("max_exp_avg_sq", state["exp_avg_sq"]).detach()
        moment = moment / (1 - float(group["betas"][1]) ** float(state["step"]))
        if group.get("eps_root"):
            moment = moment + float(group["eps_root"])
        return moment
    return None


def flat_state(optimizer: Optimizer, names: Mapping[int, list[str]]) -> dict[str, Tensor] | None:
    """{"parameter/key": tensor}, or None if the state holds anything but tensors and numbers."""
    flat: dict[str, Tensor] = {}
    for name, parameter, _ in _named(optimizer, names):
        for key, value in (optimizer.state.get(parameter) or {}).items():
            if isinstance(value, Tensor):
                flat[f"{name}/{key}"] = value.detach()
            elif isinstance(value, (bool, int, float)):
                precise = torch.float64 if isinstance(value, float) else None
                flat[f"{name}/{key}{NUMBER}"] = torch.tensor(value, dtype=precise)
            elif value is not None:
                return None
    return flat


def has_parameters_of(
    optimizer: Optimizer, names: Mapping[int, list[str]], flat: Mapping[str, Tensor]
) -> bool:
    """Whether the optimizer trains all parameters that a flat state names."""
    trained = {name for name, _, _ in _named(optimizer, names)}
    return trained >= {key.rsplit("/", 1)[0] for key in flat}


def load_state(
    optimizer: Optimizer, names: Mapping[int, list[str]], flat: Mapping[str, Tensor]
) -> None:
    """Load a flat state. Learning rates and other settings of the groups do not change."""
    parameters = {name: parameter for name, parameter, _ in _named(optimizer, names)}
    states: dict[str, dict[str, Any]] = {}
    for key, tensor in flat.items():
        name, entry = key.rsplit("/", 1)
        is_number = entry.endswith(NUMBER)
        states.setdefault(name, {})[entry.removesuffix(NUMBER)] = (
            tensor.item() if is_number else part_of(tensor.clone(), parameters[name])
        )
    packed = optimizer.state_dict()["param_groups"]
    numbered = {
        id(p): number
        for group, packed_group in zip(optimizer.param_groups, packed, strict=True)
        for p, number in zip(group["params"], packed_group["params"], strict=True)
    }
    state = {
        numbered[id(parameter)]: states[name]
        for name, parameter, _ in _named(optimizer, names)
        if name in states
    }
    optimizer.load_state_dict({"state": state, "param_groups": packed})


def _named(
    optimizer: Optimizer, names: Mapping[int, list[str]]
) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in names:
                yield names[id(parameter)][0], parameter, group
