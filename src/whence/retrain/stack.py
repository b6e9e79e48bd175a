"""Many models of one recipe, trained as one program.

With S models, B examples per batch and n examples each, parameters are stacks (S, ...), a batch is
S·B rows gathered from data on the device, and the user's optimizer class updates the stacks, since
its arithmetic is elementwise. Seeds and batch orders are those of `Recipe.run`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.utils._pytree import tree_leaves, tree_map

from whence.data import Batches, place
from whence.engine.graphs import Graphs
from whence.errors import InvalidInput
from whence.persist.identity import digest
from whence.retrain.recipe import Recipe
from whence.retrain.stacked import (
    make_vmappable,
    running_statistics,
    stack_modules,
    stack_parameters,
)
from whence.retrain.stage import StageRecipe
from whence.retrain.training import Callback, Training, Update
from whence.retrain.unfinished import StackCheckpoint
from whence.task import Task

FUSED = (SGD, Adam, AdamW)
GRAPHED = (SGD, Adam, AdamW, RMSprop)  # whose rate may be a tensor inside a CUDA graph
# change speed, not results
IMPLEMENTATION_FLAGS = ("fused", "foreach", "capturable", "differentiable")


class Data:
    """A whole dataset as one batch on a device, from which batches are gathered."""

    def __init__(self, batches: Batches, device: torch.device, dtype: torch.dtype) -> None:
        def collated(rows: NDArray[Any]) -> Any:
            return place(batches.take(rows), torch.device("cpu"), dtype)

        everyone = np.arange(len(batches)).reshape(-1, 1)
        self.tree = collated(everyone.ravel())
        probes = everyone[np.unique(np.linspace(0, len(batches) - 1, 16, dtype=int))]
        # a custom collate may pad each batch to its longest example
        alone = everyone if batches.collate is not None else probes
        if (
            not all(isinstance(leaf, Tensor) for leaf in tree_leaves(self.tree))
            or any(_shapes(collated(k)) != _shapes(self.tree) for k in alone)
            or any(digest(self.rows(torch.from_numpy(k))) != digest(collated(k)) for k in probes)
        ):
            raise InvalidInput(
                f"{batches.name} cannot be collated into one batch: it holds non-tensors, or its "
                "padding depends on the batch (pad all examples to one length)"
            )
        self.tree = place(self.tree, device, dtype)

    def rows(self, index: Tensor) -> Any:
        """A copy of these rows, because a model may change its input in place."""
        return tree_map(lambda column: column[index], self.tree)


def _shapes(batch: Any) -> list[torch.Size]:
    """The shapes of one example's tensors."""
    return [leaf.shape[1:] for leaf in tree_leaves(batch)]


class ModelWithTask(nn.Module):
    """A model with its task as one module, for `torch.func.functional_call`."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        super().__init__()
        self.model, self.task = model, task

    def forward(self, batch: Any, what: str) -> Tensor:
        values: Tensor = getattr(self.task, what)(self.task.outputs(self.model, batch), batch)
        return values


@dataclass
class Stack:
    """S models: their parameters, and how to compute their losses and measurements."""

    template: nn.Module
    parameters: dict[str, nn.Parameter]
    statistics: dict[str, Tensor]  # batch norm's buffers
    engine: str  # "products" (stacked layers) or "vmap"
    size: int

    @classmethod
    def of(cls, recipe: Recipe, seeds: Sequence[int], engine: str, device: torch.device) -> Stack:
        """The models of these seeds, before their first update."""
        distinct = {seed: recipe.build(seed) for seed in dict.fromkeys(seeds)}
        states = {seed: dict(model.named_parameters()) for seed, model in distinct.items()}
        running = {seed: running_statistics(model) for seed, model in distinct.items()}
        template = distinct[seeds[0]].to("cpu")
        with torch.no_grad():
            stacked = stack_parameters(template, [states[seed] for seed in seeds], device)
            statistics = {
                name: torch.stack([running[seed][name].to(device) for seed in seeds])
                for name in running[seeds[0]]
            }
        template.to(device)
        if engine == "products":
            template = stack_modules(template, stacked, statistics, len(seeds))
        else:
            make_vmappable(template)
        return cls(template, stacked, statistics, engine, len(seeds))

    def values(self, what: str, task: Task, batch: Any) -> Tensor:
        """The loss or measurement of each example, (S, B), for a batch of S·B rows."""
        objective = ModelWithTask(self.template, task)
        if self.engine == "products":
            values: Tensor = objective(batch, what).reshape(self.size, -1)
            return values

        def one(tensors: dict[str, Tensor], rows: Any) -> Tensor:
            named = {f"model.{name}": tensor for name, tensor in tensors.items()}
            result: Tensor = functional_call(objective, named, (rows, what))
            return result

        by_model = tree_map(lambda x: x.reshape(self.size, -1, *x.shape[1:]), batch)
        stacked: Tensor = torch.vmap(one)({**self.parameters, **self.statistics}, by_model)
        return stacked

    def gradients(
        self, task: Task, batch: Any, clip_norm: float | None, weights: Tensor | None = None
    ) -> None:
        """Set the parameters' `.grad` to the gradient of each model's mean loss.

        Args:
            weights: of the losses, (S, B); None for one each.
        """
        learned = [p for p in self.parameters.values() if p.requires_grad]
        losses = self.values("losses", task, batch)
        total = (losses if weights is None else losses * weights).mean(1).sum()
        gradients = torch.autograd.grad(total, learned, allow_unused=True)
        if clip_norm is not None:  # per model, as torch.nn.utils.clip_grad_norm_ does
            used = [g for g in gradients if g is not None]
            norms = torch.stack([g.flatten(1).norm(dim=1) for g in used]).norm(dim=0)
            scale = (clip_norm / (norms + 1e-6)).clamp(max=1.0)
            for g in used:
                g.mul_(scale.view(-1, *[1] * (g.dim() - 1)))
        for parameter, gradient in zip(learned, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.contiguous()

    @torch.no_grad()
    def measurements(
        self, task: Task, query: Data, count: int, block: int, what: str = "measurements"
    ) -> NDArray[np.float64]:
        """The measurement of every query by every model, (S, q), `block` queries at a time.

        Args:
            what: the task's method that measures.
        """
        self.template.eval()
        device = next(iter(self.parameters.values())).device
        blocks = []
        for start in range(0, count, block):
            rows = torch.arange(start, min(start + block, count), device=device)
            batch = query.rows(rows.repeat(self.size))
            blocks.append(self.values(what, task, batch).double().cpu())
        self.template.train()
        return torch.cat(blocks, 1).numpy()

    def state(self, model: int) -> dict[str, Tensor]:
        """The parameters and batch-norm buffers of one of the models."""
        stacks = {**self.parameters, **self.statistics}
        return {name: stack[model].detach().clone() for name, stack in stacks.items()}


def train_stack(
    recipe: Recipe,
    trainings: Sequence[Training],
    engine: str,
    device: torch.device,
    data: dict[str, Data],
    *,
    updates: int | None = None,
    callback: Callback | None = None,
    start: StackCheckpoint | None = None,
) -> Stack:
    """Train one model per training, all on subsets of the same size.

    Args:
        data: the dataset of each stage, on the device.
        updates: stop each stage after this many updates, e.g. to probe memory.
        callback: called after each update. An exception that it raises stops the training.
        start: where to resume.
    """
    stack = Stack.of(recipe, [t.seed for t in trainings], engine, device)
    model = recipe.build(0).to(device)  # for the optimizers' factories
    for stage in recipe.stages:
        if start is not None and stage.number < start.stage:
            continue
        examples = [recipe.examples(t.subset, t.stage)[stage.name] for t in trainings]
        seeds = [t.seed for t in trainings]
        weights = _stack_weights([t.weights_of(recipe, stage.name) for t in trainings])
        training = _StageTraining(stack, stage, seeds, examples, weights, model, data[stage.name])
        done = 0
        if start is not None and stage.number == start.stage:
            done = start.step
            start.restore(stack, training.optimizer)
        training.run(done, updates, callback)
    return stack


class _StageTraining:
    """One stage of a stack's training."""

    def __init__(
        self,
        stack: Stack,
        stage: StageRecipe,
        seeds: Sequence[int],
        chosen: Sequence[NDArray[np.int64]],
        weights: NDArray[np.float64] | None,
        model: nn.Module,
        data: Data,
    ) -> None:
        self.stack, self.stage, self.data = stack, stage, data
        self.like = next(model.parameters())
        self.device = device = self.like.device
        self.task = copy.copy(stage.task)  # a task may keep something between outputs and losses
        distinct = list(dict.fromkeys(seeds))
        self.distinct = torch.tensor(distinct, device=device).unsqueeze(1)
        self.whose = torch.tensor([distinct.index(seed) for seed in seeds], device=device)
        self.seeds = self.distinct[self.whose]
        self.size = len(chosen[0])
        self.masks = None
        if self.size < len(stage.data):
            masks = np.zeros((len(chosen), len(stage.data)), bool)
            for mask, examples in zip(masks, chosen, strict=True):
                mask[examples] = True
            self.masks = torch.from_numpy(masks).to(device)
        self.weights = None if weights is None else torch.from_numpy(weights).to(self.like)
        self.optimizer, self.schedule = _stack_optimizer(model, stage, stack, self.size)
        self.graphed = all(
            isinstance(group["lr"], Tensor) for group in self.optimizer.param_groups
        ) and _only_rates_change(self.schedule)
        self.graphs = Graphs()

    def order(self, epoch: int) -> Tensor:
        """The examples that each model sees in an epoch, in order: (S, n)."""
        everyone = torch.arange(len(self.stage.data), device=self.device)
        full = self.stage.order(self.distinct, epoch, everyone)
        if self.masks is None:
            return full[self.whose]
        rows = []
        block = max(1, 2**27 // full.shape[1])  # models, so that the indices stay below a GiB
        for start in range(0, len(self.whose), block):
            orders = full[self.whose[start : start + block]]
            selected = self.masks[start : start + block].gather(1, orders)
            rows.append(orders[selected].view(len(orders), self.size))
        return torch.cat(rows)

    def run(self, done: int, updates: int | None, callback: Callback | None) -> None:
        """Make the updates, except the first `done` ones."""
        if self.device.type != "cuda":
            self._run(done, updates, callback)
            return
        side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        # a graph is captured on the stream of its warm-up calls
        self.graphs = Graphs(side)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            self._run(done, updates, callback)
        torch.cuda.current_stream(self.device).wait_stream(side)

    def _run(self, done: int, updates: int | None, callback: Callback | None) -> None:
        self.stack.template.train()
        for step, indices in self.stage.batches(self.size, self.order, done):
            if step == updates:
                return
            for group, settings in zip(
                self.optimizer.param_groups, self.schedule[step], strict=True
            ):
                _set(group, settings)
            self.update(indices, step)
            if callback is not None:
                callback(Update(self.stage, step + 1, indices, self.stack, self.optimizer))
        self.optimizer.zero_grad(set_to_none=True)

    def update(self, indices: Tensor, step: int) -> None:
        """One update of all models, with the examples (S, B)."""
        arguments: tuple[Any, ...] = (indices,)
        if self.stage.transform is not None:
            # it depends on the update: a graph can only hold what follows it
            rows, seeds = indices.reshape(-1), self.seeds.expand(indices.shape).reshape(-1)
            batch = self.stage.transformed(self.data.rows(rows), seeds, step, rows, self.like)
            arguments = (indices, batch)
        if self.graphed and not self.graphs.failed:
            self.graphs("update", self._descend, *arguments)
        else:
            self._descend(*arguments)

    def _descend(self, indices: Tensor, batch: Any = None) -> None:
        """One update with the rows at these indices, or with what a transform made of them."""
        if batch is None:
            batch = self.data.rows(indices.reshape(-1))
        weights = None if self.weights is None else self.weights.gather(1, indices)
        self.stack.gradients(self.task, batch, self.stage.clip_norm, weights)
        self.optimizer.step()


def _stack_optimizer(
    model: nn.Module, stage: StageRecipe, stack: Stack, examples: int
) -> tuple[Optimizer, list[list[dict[str, Any]]]]:
    """The user's optimizer for the stacks, and the settings of its groups at every update.

    The factory sees a plain model, so it may sort parameters by name or shape, or freeze them.
    """
    plain = stage.make_optimizer(model)
    twins = {id(p): stack.parameters[name] for name, p in model.named_parameters()}
    for parameter in model.parameters():
        twins[id(parameter)].requires_grad_(parameter.requires_grad)
    device, groups = next(model.parameters()).device, []
    for group in plain.param_groups:
        settings = {**group, "params": [twins[id(p)] for p in group["params"]]}
        kinds = {p.dtype for p in settings["params"]}
        if (
            type(plain) in FUSED
            and settings["fused"] is None
            and not settings["foreach"]
            # on a CPU, torch's fused step ignores float16 and bfloat16
            and (device.type == "cuda" or kinds <= {torch.float32, torch.float64})
        ):
            settings["fused"] = True  # the same arithmetic, in one pass over memory
        settings["lr"] = float(group["lr"])
        # torch's fused kernels read a rate in a tensor as float32: too coarse for float64
        if device.type == "cuda" and type(plain) in GRAPHED and torch.float64 not in kinds:
            settings["lr"] = torch.tensor(settings["lr"], device=device)
            settings |= {"capturable": True} if "capturable" in settings else {}
        groups.append(settings)
    kind: Any = type(plain)
    stacked: Optimizer = kind(groups)
    for tensor, state in plain.state.items():  # such as Adagrad's initial sums
        stacked.state[twins[id(tensor)]] = {
            name: value if name == "step" else torch.stack([value] * stack.size)
            for name, value in state.items()
        }
    return stacked, stage.schedule(model, examples)


def _stack_weights(
    weights: Sequence[NDArray[np.float64] | None],
) -> NDArray[np.float64] | None:
    """The weights of each model's examples, (S, n); None where all are one."""
    first_weights = next((w for w in weights if w is not None), None)
    if first_weights is None:
        return None
    return np.stack([np.ones_like(first_weights) if w is None else w for w in weights])


def _set(group: dict[str, Any], settings: dict[str, Any]) -> None:
    """Give a stacked group the settings of an update."""
    for name, value in settings.items():
        if isinstance(group.get(name), Tensor):
            group[name].fill_(value)
        elif name not in IMPLEMENTATION_FLAGS:
            group[name] = value


def _only_rates_change(schedule: list[list[dict[str, Any]]]) -> bool:
    """Whether all other settings stay the same, since a graph holds them as constants."""

    def others(groups: list[dict[str, Any]]) -> list[Any]:
        return [[(k, v) for k, v in group.items() if k != "lr"] for group in groups]

    return all(others(groups) == others(schedule[0]) for groups in schedule)
