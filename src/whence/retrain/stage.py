"""How one stage of a recipe is trained: an ordinary loop, and the draws that it is random by."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from whence.data import Batches, Collate, place
from whence.draws import Uniform, keys
from whence.persist.identity import digest, sha256_of
from whence.run import optimizers
from whence.task import Task

Ints = NDArray[np.int64]
MakeOptimizer = Callable[[Any], Optimizer]
MakeScheduler = Callable[[Optimizer, int], Any]
Transform = Callable[[Any, Uniform], Any]
TRIED = 8  # examples by which a recipe's functions are known
SETTINGS = (
    "task",
    "train",
    "optimizer",
    "batch_size",
    "epochs",
    "scheduler",
    "scheduler_every",
    "transform",
    "clip_norm",
)


class Rows(Protocol):
    """A dataset that lies on a device, in the parameters' kind."""

    def rows(self, index: Tensor) -> Any:
        """A batch of these examples."""


@dataclass(frozen=True)
class StageRecipe:
    """How one stage is trained. `number` is its place among the stages."""

    name: str
    number: int
    task: Task
    data: Batches
    optimizer: MakeOptimizer
    batch_size: int
    epochs: int
    scheduler: MakeScheduler | None
    scheduler_every: str
    transform: Transform | None
    clip_norm: float | None
    held: Rows | None = field(default=None, compare=False, repr=False)  # `data`, to take it from

    def batches_per_epoch(self, examples: int) -> int:
        return -(-examples // self.batch_size)

    def total_steps(self, examples: int) -> int:
        """How many updates the stage makes on so many examples."""
        return self.epochs * self.batches_per_epoch(examples)

    def order(self, seed: int | Tensor, epoch: int, examples: Tensor) -> Tensor:
        """The examples in the order of an epoch: sorted by random keys of their own, so that two
        subsets see those they share in the same order. Several at once: seeds (U, 1) -> (U, n)."""
        drawn = keys(seed, self.number, epoch, examples, device=examples.device)
        return examples[drawn.argsort(dim=-1, stable=True)]

    def draws(self, seed: int | Tensor, step: int, ids: Ints | Tensor, device: Any) -> Uniform:
        """What `transform` may be random by at an update: the same for the same example."""
        return Uniform(seed, self.number * 2**32 + step, ids, device=device)

    def batch(self, block: Ints, like: Tensor) -> Any:
        """These examples, where and of what kind the parameters are."""
        if self.held is not None:
            return self.held.rows(torch.from_numpy(block).to(like.device))
        return place(self.data.take(block), like.device, like.dtype)

    def transformed(
        self, batch: Any, seed: int | Tensor, step: int, ids: Ints | Tensor, like: Tensor
    ) -> Any:
        """The batch of an update after `transform`, where and of what kind the parameters are."""
        if self.transform is None:
            return batch
        changed = self.transform(batch, self.draws(seed, step, ids, like.device))
        return place(changed, like.device, like.dtype)

    def make_optimizer(self, model: nn.Module) -> Optimizer:
        optimizer = self.optimizer(model.parameters())
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"optimizer(parameters) returned {type(optimizer).__name__}: it must return a "
                "torch.optim optimizer, such as lambda p: torch.optim.SGD(p, lr=0.1)"
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError(
                "LBFGS computes the loss several times in an update, which a recipe does once: use "
                "another optimizer"
            )
        own = {id(p) for p in model.parameters()}
        if not own.issuperset(id(p) for group in optimizer.param_groups for p in group["params"]):
            raise ValueError(
                "optimizer(parameters) trains a tensor that is none of the model's parameters: a "
                "second training would go on from the first. Make it a parameter of the model"
            )
        return optimizer

    def make_scheduler(self, optimizer: Optimizer, examples: int) -> Any:
        if self.scheduler is None:
            return None
        scheduler = self.scheduler(optimizer, self.total_steps(examples))
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ValueError(
                "ReduceLROnPlateau follows a validation loss, which a recipe has not: use a "
                "scheduler that depends on the update count alone"
            )
        # torch warns of a schedule ahead of its updates, which `updates` and `schedule` mean to be
        setattr(optimizer, "_opt_called", True)  # noqa: B010
        return scheduler

    def updates(
        self, model: nn.Module, optimizer: Optimizer, seed: int, examples: Ints, skip: int = 0
    ) -> Iterator[Ints]:
        """Train a model on the examples; an ordinary loop, that gives way before each update.

        Yields the indices of the batch whose gradient the parameters now hold. `skip` updates have
        been made before: only the schedule follows them.
        """
        scheduler = self.make_scheduler(optimizer, len(examples))
        first, task = next(model.parameters()), copy.copy(self.task)  # which may keep something
        everyone, step = torch.from_numpy(examples), 0
        for epoch in range(self.epochs):
            order = self.order(seed, epoch, everyone).numpy()
            for start in range(0, len(order), self.batch_size):
                if step >= skip:
                    block = order[start : start + self.batch_size]
                    # what a model draws (dropout) then hangs on seed and update alone
                    reseed(int(keys(seed, self.number, step)), first.device)
                    batch = self.transformed(self.batch(block, first), seed, step, block, first)
                    model.zero_grad(set_to_none=True)
                    losses = task.losses(task.outputs(model, batch), batch)
                    losses.mean().backward()  # type: ignore[no-untyped-call]
                    if self.clip_norm is not None:
                        nn.utils.clip_grad_norm_(model.parameters(), self.clip_norm)
                    yield block
                    optimizer.step()
                step += 1
                if scheduler is not None and self.scheduler_every == "update":
                    scheduler.step()
            if scheduler is not None and self.scheduler_every == "epoch":
                scheduler.step()
        model.zero_grad(set_to_none=True)

    def schedule(self, model: nn.Module, examples: int) -> list[list[dict[str, Any]]]:
        """The settings of each parameter group at each update, as the user's own scheduler makes
        them: an optimizer that never sees a gradient is taken through the whole stage."""
        optimizer = self.make_optimizer(model)
        scheduler = self.make_scheduler(optimizer, examples)
        table = []
        for step in range(1, self.total_steps(examples) + 1):
            table.append([_settings(group) for group in optimizer.param_groups])
            every = 1 if self.scheduler_every == "update" else self.batches_per_epoch(examples)
            if scheduler is not None and step % every == 0:
                scheduler.step()
        return table

    def identity(self, model: nn.Module) -> dict[str, Any]:
        """What this stage is, for the recipe's fingerprint."""
        optimizer, names = self.make_optimizer(model), optimizers.names_of(model)
        table = self.schedule(model, len(self.data))
        rates = [
            [{k: v for k, v in now.items() if k == "lr" or v != then.get(k)} for now, then in rows]
            for rows in (zip(groups, table[0], strict=True) for groups in table)
        ]
        return {
            "data": self.data.fingerprint(),
            "task": named(self.task),
            "batch_size": self.batch_size,
            "epochs": self.epochs,
            "clip_norm": self.clip_norm,
            "transform": self._transforms(next(model.parameters())),
            "optimizer": optimizers.kind(optimizer),
            "groups": [
                {
                    "parameters": [n for p in group["params"] for n in names.get(id(p), ())],
                    "settings": optimizers.hyperparameters(optimizer, group),
                }
                for group in optimizer.param_groups
            ],
            "rates": sha256_of(json.dumps(rates, default=repr)),
        }

    def _transforms(self, like: Tensor) -> str | None:
        """What `transform` makes of the first examples."""
        if self.transform is None:
            return None
        like, block = like.detach().cpu(), np.arange(min(TRIED, len(self.data)))
        found = set()
        with torch.random.fork_rng([]):
            for _ in range(2):
                batch = place(self.data.take(block), like.device, like.dtype)
                found.add(digest(self.transformed(batch, 0, 0, block, like)))
        if len(found) > 1:
            raise ValueError(
                "transform makes other batches of the same examples: it draws numbers by itself. "
                "Draw them by the uniform(k) that it is given"
            )
        return found.pop()


def make_stages(
    given: Mapping[str, Any],
    stages: Sequence[str] | Mapping[str, Mapping[str, Any]] | None,
    collate: Collate | None,
) -> tuple[StageRecipe, ...]:
    own: dict[str, dict[str, Any]] = {}
    if isinstance(stages, Mapping):
        own = {name: dict(settings) for name, settings in stages.items()}
    elif isinstance(stages, str):
        raise TypeError(f"stages={stages!r}: give a list of names")
    elif stages is not None:
        own = {str(name): {} for name in stages}
    elif isinstance(given["train"], Mapping):
        own = {str(name): {} for name in given["train"]}
    names = list(own) or ["train"]
    for name, settings in own.items():
        unknown = sorted(set(settings) - set(SETTINGS))
        if unknown:
            raise ValueError(f"stage {name!r} sets {unknown}: stages may set {sorted(SETTINGS)}")

    def setting(what: str, name: str) -> Any:
        if what in own.get(name, {}):
            return own[name][what]
        value = given[what]
        if not isinstance(value, Mapping):
            return value
        if set(value) != set(names):
            raise ValueError(f"{what} has the stages {sorted(value)}, but the recipe has {names}")
        return value[name]

    found = []
    for number, name in enumerate(names):
        settings = {what: setting(what, name) for what in SETTINGS}
        data = Batches(f"{name} data" if len(names) > 1 else "train", settings["train"], collate)
        found.append(_stage(name, number, data, settings))
    return tuple(found)


def _stage(name: str, number: int, data: Batches, given: dict[str, Any]) -> StageRecipe:
    if not isinstance(given["task"], Task):
        raise TypeError(
            f"task must be a whence.Task (such as Classification()), not {given['task']!r}"
        )
    if not callable(given["optimizer"]) or isinstance(given["optimizer"], Optimizer):
        raise TypeError(
            f"optimizer is {given['optimizer']!r}: give a function of the parameters, such as "
            "lambda p: torch.optim.SGD(p, lr=0.1)"
        )
    for what in ("scheduler", "transform"):
        if given[what] is not None and not callable(given[what]):
            raise TypeError(f"{what} is {given[what]!r}: give a function, or None")
    sizes = {what: index(given[what]) for what in ("batch_size", "epochs")}
    for what, size in sizes.items():
        if size < 1:
            raise ValueError(f"{what}={size} must be at least 1")
    if sizes["batch_size"] > len(data):
        raise ValueError(
            f"batch_size={sizes['batch_size']}, but {data.name} has {len(data)} examples: use a "
            "smaller one"
        )
    if given["scheduler_every"] not in ("update", "epoch"):
        raise ValueError(f"scheduler_every={given['scheduler_every']!r}: use 'update' or 'epoch'")
    clip = given["clip_norm"]
    if clip is not None and not clip > 0:
        raise ValueError(f"clip_norm={clip!r} must be positive, or None")
    return StageRecipe(
        name,
        number,
        given["task"],
        data,
        given["optimizer"],
        batch_size=sizes["batch_size"],
        epochs=sizes["epochs"],
        scheduler=given["scheduler"],
        scheduler_every=given["scheduler_every"],
        transform=given["transform"],
        clip_norm=None if clip is None else float(clip),
    )


def reseed(value: int, device: torch.device) -> None:
    """Seed the generators that a model on this device may draw from."""
    torch.default_generator.manual_seed(value % 2**63)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(value % 2**63)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group's settings as they are now: a rate in a tensor is changed in place."""
    return {k: v.item() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}


def named(thing: object) -> str:
    """The repr, without addresses."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(thing))
