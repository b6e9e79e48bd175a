"""The device to train on."""

from __future__ import annotations

import os

import torch
from torch import nn

from whence.engine.workspace import check_device


def training_device(device: torch.device | str | None, model: nn.Module) -> torch.device:
    """The device asked for; else the one the factory put the model on, or a GPU if there is one."""
    if device is not None:
        check_device(device)
        return torch.device(device)
    built_on = next(model.parameters()).device
    if built_on.type != "cpu" or not torch.cuda.is_available():
        return built_on
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))


def cuda_devices(device: torch.device) -> list[torch.device]:
    """The devices whose generators `torch.random.fork_rng` must restore besides the CPU's."""
    return [device] if device.type == "cuda" else []
