"""A model that two processes divide with FSDP2: trained, recorded, attributed."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import whence
from support import models
from whence.run.writer import RunWriter

TASK = whence.LanguageModeling()
TRAIN, QUERY = models.documents(9), models.documents(3, seed=1)
STEPS = 4
EXACT: dict[str, Any] = {"dtype": torch.float64, "progress": False, "batch_size": 2}
METHODS: dict[str, Callable[[], Any]] = {
    "source": lambda: whence.Source(segments=2),
    "gauss-newton": lambda: whence.Source(curvature="gauss-newton"),
    "fastsource": lambda: whence.FastSource(),
    "hydra": lambda: whence.Hydra(),
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return models.Transformer(depth=2).double()


def shard(model: Any, size: int = 2) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (size,))
    for block in model.h:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(
    folder: Path,
    model: nn.Module,
    rank: int,
    size: int,
    stop: int = STEPS,
    restored: bool = False,
    **how: Any,
) -> nn.Module:
    """Whole batches, of which each rank takes its examples; FSDP averages their gradients."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    recorder = whence.Recorder(
        folder, model, optimizer, checkpoints=[2, 3, STEPS], every_step=True, **how
    )
    start = recorder.restore() if restored else 0
    with recorder:
        for step in range(start, stop):
            batch = np.random.default_rng(step).choice(len(TRAIN), 4, replace=False)
            share = torch.utils.data.default_collate([TRAIN[int(k)] for k in batch[rank::size]])
            optimizer.zero_grad()
            TASK.losses(TASK.outputs(model, share), share).mean().backward()
            recorder.step(batch)
            optimizer.step()
        if stop < STEPS:
            raise KeyboardInterrupt
    return model


def state(model: nn.Module) -> dict[str, Tensor]:
    """This rank's parts."""
    return {name: p.to_local().clone() for name, p in model.named_parameters()}  # type: ignore


def fingerprint(model: nn.Module) -> list[Any]:
    """What a caller could see of a model."""
    modules = [
        [name, type(m).__name__, m.training, sorted(vars(m)), len(m._forward_hooks)]
        for name, m in model.named_modules()
    ]
    return [modules, [(id(p), p.requires_grad, p.grad is None) for p in model.parameters()]]


def study(model: nn.Module, run: Path, folder: Path) -> whence.Study:
    return whence.Study(model, TASK, TRAIN, run, cache=folder / "cache")


def everything(folder: Path, rank: int) -> None:
    """Records, attributes, resumes and fails, in each of two processes."""
    model = train(folder / "run", shard(net()), rank, 2)
    before, parts = fingerprint(model), state(model)
    for name, method in METHODS.items():
        scores = method().attribute(study(model, folder / "run", folder), QUERY, **EXACT)
        np.save(folder / f"{name}-{rank}.npy", scores.values)
    unchanged = fingerprint(model) == before
    unchanged &= all(torch.equal(p, parts[name]) for name, p in state(model).items())
    whole = {k: v.full_tensor() for k, v in model.state_dict().items()}  # type: ignore
    if rank == 0:
        torch.save(whole, folder / "whole.pt")
    with suppress(KeyboardInterrupt):
        train(folder / "resumed", shard(net()), rank, 2, stop=3)
    again = train(folder / "resumed", shard(net()), rank, 2, restored=True)
    resumed = all(torch.equal(p, parts[name]) for name, p in state(again).items())
    report = {"unchanged": unchanged, "resumed": resumed, "failure": failure(folder, rank)}
    (folder / f"{rank}.json").write_text(json.dumps(report))


def failure(folder: Path, rank: int) -> str:
    """The error of each rank if rank 0 cannot write a checkpoint."""
    save = RunWriter.save_checkpoint

    def full(*_: Any) -> None:
        raise whence.errors.DiskFull("the disk is full")

    try:
        RunWriter.save_checkpoint = full  # type: ignore[method-assign]
        train(folder / "full", shard(net()), rank, 2)
    except whence.WhenceError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        RunWriter.save_checkpoint = save  # type: ignore[method-assign]
    return ""


def alone(folder: Path) -> nn.Module:
    """The same training in one process, with a whole model."""
    return train(folder / "alone", copy.deepcopy(net()), 0, 1)
