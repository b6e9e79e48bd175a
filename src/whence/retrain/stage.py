"""How one stage of a recipe is trained: an ordinary loop, and its random draws."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from whence.data import HASH_BATCH, READ_TWICE, Batches, Collate, cut, place
from whence.draws import Uniform, keys, reseed, update_seed
from whence.errors import InvalidInput, InvalidType, examples_of, whole
from whence.persist.identity import digest, sha256_of
from whence.retrain.training import Callback, Update
from whence.run import optimizers
from whence.task import Task

if TYPE_CHECKING:
    from whence.retrain.stack import Data

Ints = NDArray[np.int64]
MakeOptimizer = Callable[[Any], Optimizer]
MakeScheduler = Callable[[Optimizer, int], Any]
Transform = Callable[[Any, Uniform], Any]
Order = TypeVar("Order", Ints, Tensor)
FINGERPRINTED = 8  # examples that a recipe's functions are fingerprinted on


@dataclass(frozen=True)
class StageRecipe:
    """How one stage is trained.

    Attributes:
        number: the index of the stage in the recipe.
        on_device: a copy of `data` on the training device, to take batches from; None to take them
            from `data`.
        weights: of the examples' losses, (n,); None for one each.
    """

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
    drop_last: bool = False
    on_device: Data | None = field(default=None, compare=False, repr=False)
    weights: NDArray[np.float64] | None = field(default=None, compare=False, repr=False)

    def batches_per_epoch(self, examples: int) -> int:
        return examples // self.batch_size if self.drop_last else -(-examples // self.batch_size)

    def total_steps(self, examples: int) -> int:
        """The number of updates of the stage, given its number of examples."""
        return self.epochs * self.batches_per_epoch(examples)

    def order(self, seed: int | Tensor, epoch: int, examples: Tensor) -> Tensor:
        """The examples in the order of an epoch. With seeds (U, 1): U orders, (U, n).

        Examples are sorted by random keys that depend on seed, epoch and example only, so two
        subsets see the examples they share in the same order.
        """
        drawn = keys(seed, self.number, epoch, examples, device=examples.device)
        return examples[drawn.argsort(dim=-1, stable=True)]

    def batches(
        self, examples: int, order: Callable[[int], Order], start: int = 0
    ) -> Iterator[tuple[int, Order]]:
        """The batches of all updates from `start` on, as (step, batch) with steps from 0.

        Args:
            examples: n, the number of examples that the stage trains on.
            order: the examples of an epoch in order, along the last axis: (n,) or (S, n).
        """
        per_epoch, size = self.batches_per_epoch(examples), self.batch_size
        for epoch in range(start // per_epoch, self.epochs):
            shuffled, first = order(epoch), epoch * per_epoch
            for step in range(max(start, first), first + per_epoch):
                at = (step - first) * size
                yield step, shuffled[..., at : at + size]

    def plain_batches(
        self, seed: int, examples: Ints, start: int = 0
    ) -> Iterator[tuple[int, Ints]]:
        """`batches` of one model."""
        everyone = torch.from_numpy(examples)
        return self.batches(
            len(examples), lambda epoch: self.order(seed, epoch, everyone).numpy(), start
        )

    def draws(self, seed: int | Tensor, step: int, ids: Ints | Tensor, device: Any) -> Uniform:
        """The random numbers that `transform` may use: a function of seed, update and example."""
        return Uniform(seed, self.number * 2**32 + step, ids, device=device)

    def batch(self, block: Ints, like: Tensor) -> Any:
        """These examples, on the device and in the dtype of the parameters."""
        if self.on_device is not None:
            return self.on_device.rows(torch.from_numpy(block).to(like.device))
        return place(self.data.take(block), like.device, like.dtype)

    def transformed(
        self, batch: Any, seed: int | Tensor, step: int, ids: Ints | Tensor, like: Tensor
    ) -> Any:
        """The batch after `transform`, on the device and in the dtype of the parameters."""
        if self.transform is None:
            return batch
        changed = self.transform(batch, self.draws(seed, step, ids, like.device))
        return place(changed, like.device, like.dtype)

    def make_optimizer(self, model: nn.Module) -> Optimizer:
        optimizer = self.optimizer(model.parameters())
        if not isinstance(optimizer, Optimizer):
            raise InvalidType(
                f"optimizer(parameters) returned {type(optimizer).__name__}: it must return a "
                "torch.optim optimizer, such as lambda p: torch.optim.SGD(p, lr=0.1)"
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise InvalidInput(
                "LBFGS computes the loss several times per update, but a recipe computes it once: "
                "use another optimizer"
            )
        known = {id(p) for p in model.parameters()}
        if not known.issuperset(id(p) for group in optimizer.param_groups for p in group["params"]):
            raise InvalidInput(
                "optimizer(parameters) trains a tensor that is none of the model's parameters: a "
                "second training would continue from the first. Make it a parameter of the model"
            )
        return optimizer

    def make_scheduler(self, optimizer: Optimizer, examples: int) -> Any:
        if self.scheduler is None:
            return None
        scheduler = self.scheduler(optimizer, self.total_steps(examples))
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise InvalidInput(
                "ReduceLROnPlateau follows a validation loss, which a recipe does not have: use a "
                "scheduler that depends on the update count only"
            )
        # torch warns when a schedule runs ahead of the updates, which is intended here
        setattr(optimizer, "_opt_called", True)  # noqa: B010
        return scheduler

    def scheduler_interval(self, examples: int) -> int:
        """The number of updates between two steps of the scheduler."""
        return 1 if self.scheduler_every == "update" else self.batches_per_epoch(examples)

    def updates(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        seed: int,
        examples: Ints,
        skip: int = 0,
        callback: Callback | None = None,
    ) -> Iterator[Ints]:
        """Train a model on the examples in an ordinary loop. Yields before each update.

        Yields the indices of the batch whose gradient the parameters now hold.

        Args:
            skip: updates made before. Only the schedule follows them.
            callback: called after each update.
        """
        scheduler = self.make_scheduler(optimizer, len(examples))
        interval = self.scheduler_interval(len(examples))
        # a task may keep something between outputs and losses
        first, task = next(model.parameters()), copy.copy(self.task)
        weights = None if self.weights is None else torch.from_numpy(self.weights).to(first)
        if scheduler is not None:
            for _ in range(skip // interval):
                scheduler.step()
        for step, block in self.plain_batches(seed, examples, skip):
            # so that the model's own draws (dropout) depend on seed and update only
            reseed(update_seed(seed, self.number, step), first.device)
            batch = self.transformed(self.batch(block, first), seed, step, block, first)
            model.zero_grad(set_to_none=True)
            with examples_of(self.data.name, block):
                losses = task.losses(task.outputs(model, batch), batch)
            if weights is not None:
                losses = losses * weights[block]
            losses.mean().backward()  # type: ignore[no-untyped-call]
            if self.clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), self.clip_norm)
            yield block
            optimizer.step()
            if scheduler is not None and (step + 1) % interval == 0:
                scheduler.step()
            if callback is not None:
                callback(Update(self, step + 1, block, model, optimizer))
        model.zero_grad(set_to_none=True)

    def schedule(self, model: nn.Module, examples: int) -> list[list[dict[str, Any]]]:
        """The settings of each parameter group at each update.

        They come from the user's own scheduler: an optimizer that never sees a gradient is taken
        through the whole stage.
        """
        optimizer = self.make_optimizer(model)
        scheduler = self.make_scheduler(optimizer, examples)
        interval = self.scheduler_interval(examples)
        table = []
        for step in range(1, self.total_steps(examples) + 1):
            table.append([_settings(group) for group in optimizer.param_groups])
            if scheduler is not None and step % interval == 0:
                scheduler.step()
        return table

    def identity(self, model: nn.Module) -> dict[str, Any]:
        """The part of the recipe's identity that describes this stage."""
        optimizer, names = self.make_optimizer(model), optimizers.names_of(model)
        table = self.schedule(model, len(self.data))
        rates = [
            [{k: v for k, v in now.items() if k == "lr" or v != then.get(k)} for now, then in rows]
            for rows in (zip(groups, table[0], strict=True) for groups in table)
        ]
        return {
            "data": self.data.fingerprint(),
            "task": {"name": type(self.task).__qualname__}
            | {name: digest(value) for name, value in vars(self.task).items()},
            "batch_size": self.batch_size,
            "drop_last": self.drop_last,
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
        } | ({} if self.weights is None else {"weights": digest(self.weights)})

    def _transforms(self, like: Tensor) -> str | None:
        """The digest of the first examples after `transform`. It must be the same twice."""
        if self.transform is None:
            return None
        first = None
        like, order = like.detach().cpu(), np.random.default_rng(0).permutation(len(self.data))
        scattered = [order[block] for block in cut(min(READ_TWICE, len(order)), HASH_BATCH)]
        for block in (np.arange(min(FINGERPRINTED, len(self.data))), *scattered):
            digests = []
            with torch.random.fork_rng([]):
                for _ in range(2):
                    batch = place(self.data.take(block), like.device, like.dtype)
                    digests.append(digest(self.transformed(batch, 0, 0, block, like)))
            if digests[0] != digests[1]:
                raise InvalidInput(
                    "transform returns different batches for the same examples: it draws its own "
                    "random numbers. Draw them with the uniform(k) that it receives"
                )
            first = first or digests[0]
        return first


def make_stages(
    given: Mapping[str, Any],
    stages: Sequence[str] | Mapping[str, Mapping[str, Any]] | None,
    collate: Collate | None,
) -> tuple[StageRecipe, ...]:
    """The stages of a recipe, from settings that may differ by stage."""
    overrides: dict[str, dict[str, Any]] = {}
    if isinstance(stages, Mapping):
        overrides = {name: dict(settings) for name, settings in stages.items()}
    elif isinstance(stages, str):
        raise InvalidType(f"stages={stages!r}: give a list of names")
    elif stages is not None:
        overrides = {str(name): {} for name in stages}
    elif isinstance(given["train"], Mapping):
        overrides = {str(name): {} for name in given["train"]}
    names = list(overrides) or ["train"]
    for name, settings in overrides.items():
        unknown = sorted(set(settings) - set(given))
        if unknown:
            raise InvalidInput(f"stage {name!r} sets {unknown}: stages may set {sorted(given)}")

    def setting(what: str, name: str) -> Any:
        if what in overrides.get(name, {}):
            return overrides[name][what]
        value = given[what]
        if not isinstance(value, Mapping):
            return value
        if set(value) != set(names):
            raise InvalidInput(f"{what} has the stages {sorted(value)}, but the recipe has {names}")
        return value[name]

    recipes = []
    for number, name in enumerate(names):
        settings = {what: setting(what, name) for what in given}
        data = Batches(f"{name} data" if len(names) > 1 else "train", settings["train"], collate)
        recipes.append(_stage(name, number, data, settings))
    return tuple(recipes)


def _stage(name: str, number: int, data: Batches, given: dict[str, Any]) -> StageRecipe:
    if not isinstance(given["task"], Task):
        raise InvalidType(
            f"task must be a whence.Task (such as Classification()), not {given['task']!r}"
        )
    if not callable(given["optimizer"]) or isinstance(given["optimizer"], Optimizer):
        raise InvalidType(
            f"optimizer is {given['optimizer']!r}: give a function of the parameters, such as "
            "lambda p: torch.optim.SGD(p, lr=0.1)"
        )
    for what in ("scheduler", "transform"):
        if given[what] is not None and not callable(given[what]):
            raise InvalidType(f"{what} is {given[what]!r}: give a function, or None")
    sizes = {what: whole(what, given[what]) for what in ("batch_size", "epochs")}
    for what, size in sizes.items():
        if size < 1:
            raise InvalidInput(f"{what}={size} must be at least 1")
    if sizes["batch_size"] > len(data):
        raise InvalidInput(
            f"batch_size={sizes['batch_size']}, but {data.name} has {len(data)} examples: use a "
            "smaller one"
        )
    if given["scheduler_every"] not in ("update", "epoch"):
        raise InvalidInput(f"scheduler_every={given['scheduler_every']!r}: use 'update' or 'epoch'")
    if not isinstance(given["drop_last"], bool):
        raise InvalidType(f"drop_last={given['drop_last']!r}: use True or False")
    clip = given["clip_norm"]
    if clip is not None and not clip > 0:
        raise InvalidInput(f"clip_norm={clip!r} must be positive, or None")
    settings = {what: value for what, value in given.items() if what != "train"}
    settings |= sizes | {"clip_norm": None if clip is None else float(clip)}
    return StageRecipe(name, number, data=data, **settings)


def checked_seed(seed: int) -> int:
    """The seed as a plain integer."""
    if not 0 <= whole("seed", seed) < 2**63:
        raise InvalidInput(f"seed={seed}: use a number from 0 to 2^63 - 1")
    return whole("seed", seed)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a group's settings, with numbers for tensors, which change in place."""
    return {k: v.item() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
