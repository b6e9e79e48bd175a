"""How many models of a recipe to train together."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from whence.engine.workspace import allowance, free_and_total
from whence.retrain.recipe import Recipe
from whence.retrain.stack import Data

CACHE_BYTES = 32 * 2**20  # bytes of parameters, gradients and momenta that fit a CPU core's caches
MEMORY_SHARE = {"cuda": 0.85, "cpu": 0.5}  # of free memory, that models use by default
# bytes that one model with convolutions saves of a batch when it saturates the device: more than a
# CPU's caches; on a GPU, about ten MB per kernel
SATURATING_BYTES = {"cpu": CACHE_BYTES, "cuda": 2**28}
PROBED_MODELS = 8  # models whose memory is measured


def models_at_once(
    recipe: Recipe,
    device: torch.device,
    data: Mapping[str, Data],
    memory: int | str | None,
    most: int,
    train_some: Callable[[int], None],
) -> int:
    """As many models as fit into memory; on a CPU, into its caches.

    One, if a single model saturates the device and its layers would copy the batches of several
    models into one.

    Args:
        data: the dataset of each stage, on the device.
        memory: what the models may use, in bytes or like "8GB" (default: most of what is free).
        most: an upper limit.
        train_some: trains a number of models for two updates, to probe memory.
    """
    if memory is None:
        room = int(free_and_total(device)[0] * MEMORY_SHARE.get(device.type, 0.5))
    else:
        room = allowance(memory, device)
    model, saved = recipe.build(0), _activation_bytes(recipe, device, data)
    copied = any(isinstance(module, (nn.Conv2d, _BatchNorm)) for module in model.modules())
    if copied and saved >= SATURATING_BYTES.get(device.type, 0):
        return 1
    if device.type == "cpu":
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        per_model = 6 * size + 2 * saved
        room //= torch.get_num_threads()
        # updates of tiny models are mostly overhead: train thousands together
        most_at_once = max(64, min(4096, CACHE_BYTES // per_model))
        fit = min(most_at_once, max(4, CACHE_BYTES // (3 * size)), room // per_model)
        return int(max(1, min(fit, -(-most // torch.get_num_threads()))))
    return int(max(1, min(most, room // _bytes_per_model(device, train_some))))


def _activation_bytes(recipe: Recipe, device: torch.device, data: Mapping[str, Data]) -> int:
    """The bytes that a model saves of a batch for its backward pass, in the largest stage."""
    model, most = recipe.build(0).to(device), 0
    for stage in recipe.stages:
        saved: dict[int, int] = {}

        def save(x: Tensor, saved: dict[int, int] = saved) -> Tensor:
            saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        task = copy.copy(stage.task)
        batch = data[stage.name].rows(torch.arange(stage.batch_size, device=device))
        with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
            losses = task.losses(task.outputs(model, batch), batch)
        most = max(most, sum(saved.values()))
        del losses
    return most


def _bytes_per_model(device: torch.device, train_some: Callable[[int], None]) -> int:
    """The memory of a model during training, including the copy that CUDA graphs hold."""
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    train_some(PROBED_MODELS)
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return 2 * peak // PROBED_MODELS + 1
