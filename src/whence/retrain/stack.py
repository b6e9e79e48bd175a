"""Many models of one recipe, trained as one program.

S models, B examples per batch, n examples each: parameters are stacks (S, ...), a batch is S·B rows
gathered from data that lies on the device, and the user's own optimizer class steps the stacks (its
arithmetic is elementwise). Seeds and batch orders are those of `Recipe.run`.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import (
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
)
from torch.utils._pytree import tree_leaves, tree_map

from whence.data import Batches, place
from whence.persist.identity import digest
from whence.retrain.recipe import Recipe
from whence.retrain.stacked import (
    make_vmappable,
    running_statistics,
    stack_modules,
    stack_parameters,
    unstackable,
)
from whence.retrain.stage import StageRecipe
from whence.retrain.training import Training
from whence.retrain.unfinished import Begun
from whence.task import Task

ELEMENTWISE = (SGD, Adam, AdamW, RMSprop, Adagrad, Adadelta, Adamax, NAdam, RAdam)
FUSED = (SGD, Adam, AdamW)
GRAPHED = (SGD, Adam, AdamW, RMSprop)  # whose rate may be a tensor inside a CUDA graph
# relative; what mixes two models a little mixes many of them more
AGREEMENT = {torch.float64: 1e-5, torch.float32: 1e-2}  # TF32 is off by less than that
NUDGE = 0.02  # added to the weights, so that what begins at zero is compared too
HOW = ("fused", "foreach", "capturable", "differentiable")  # an update is made, not which
WARM_UP = 2  # updates with batches of a size before they become a CUDA graph


class Interrupted(Exception):
    """Training was asked to stop."""


class Data:
    """A whole dataset as one batch on a device, from which batches are gathered."""

    def __init__(self, batches: Batches, device: torch.device, dtype: torch.dtype) -> None:
        def taken(rows: NDArray[Any]) -> Any:
            return place(batches.take(rows), torch.device("cpu"), dtype)

        everyone = np.arange(len(batches)).reshape(-1, 1)
        self.tree = taken(everyone.ravel())
        probes = everyone[np.unique(np.linspace(0, len(batches) - 1, 16, dtype=int))]
        # a collate of one's own may pad each batch to its longest example
        alone = everyone if batches.collate is not None else probes
        if (
            not all(isinstance(leaf, Tensor) for leaf in tree_leaves(self.tree))
            or any(_shapes(taken(k)) != _shapes(self.tree) for k in alone)
            or any(digest(self.rows(torch.from_numpy(k))) != digest(taken(k)) for k in probes)
        ):
            raise ValueError(
                f"{batches.name} has no batch of all its examples that is made of theirs: it holds "
                "texts, or its padding hangs on the batch (pad all examples to one length)"
            )
        self.tree = place(self.tree, device, dtype)

    def rows(self, index: Tensor) -> Any:
        """A copy of these rows: a model may work on its input in place."""
        return tree_map(lambda column: column[index], self.tree)


def _shapes(batch: Any) -> list[torch.Size]:
    """Of one example's tensors."""
    return [leaf.shape[1:] for leaf in tree_leaves(batch)]


class Objective(nn.Module):
    """A model under a task: what `torch.func.functional_call` takes."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        super().__init__()
        self.model, self.task = model, task

    def forward(self, batch: Any, what: str) -> Tensor:
        values: Tensor = getattr(self.task, what)(self.task.outputs(self.model, batch), batch)
        return values


@dataclass
class Stack:
    """S models: how losses and measurements come from their parameters."""

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
        """Each example's loss or measurement, (S, B), of a batch of S·B rows."""
        objective = Objective(self.template, task)
        if self.engine == "products":
            values: Tensor = objective(batch, what).reshape(self.size, -1)
            return values

        def one(tensors: dict[str, Tensor], rows: Any) -> Tensor:
            named = {f"model.{name}": tensor for name, tensor in tensors.items()}
            result: Tensor = functional_call(objective, named, (rows, what))
            return result

        by_model = tree_map(lambda x: x.reshape(self.size, -1, *x.shape[1:]), batch)
        found: Tensor = torch.vmap(one)({**self.parameters, **self.statistics}, by_model)
        return found

    def gradients(self, task: Task, batch: Any, clip_norm: float | None) -> None:
        """Put the gradient of each model's mean loss into its parameters."""
        learned = [p for p in self.parameters.values() if p.requires_grad]
        total = self.values("losses", task, batch).mean(1).sum()
        found = torch.autograd.grad(total, learned, allow_unused=True)
        if clip_norm is not None:  # as torch.nn.utils.clip_grad_norm_ does it, for each model
            there = [g for g in found if g is not None]
            norms = torch.stack([g.flatten(1).norm(dim=1) for g in there]).norm(dim=0)
            scale = (clip_norm / (norms + 1e-6)).clamp(max=1.0)
            for g in there:
                g.mul_(scale.view(-1, *[1] * (g.dim() - 1)))
        for parameter, gradient in zip(learned, found, strict=True):
            parameter.grad = None if gradient is None else gradient.contiguous()

    @torch.no_grad()
    def measurements(self, task: Task, query: Data, count: int, block: int) -> NDArray[np.float64]:
        """Every query's measurement by every model, (S, q), so many queries at a time."""
        self.template.eval()
        device = next(iter(self.parameters.values())).device
        found = []
        for start in range(0, count, block):
            rows = torch.arange(start, min(start + block, count), device=device)
            batch = query.rows(rows.repeat(self.size))
            found.append(self.values("measurements", task, batch).double().cpu())
        self.template.train()
        return torch.cat(found, 1).numpy()

    def state(self, model: int) -> dict[str, Tensor]:
        """The parameters of one of the models, and its batch norms' buffers."""
        stacks = {**self.parameters, **self.statistics}
        return {name: stack[model].detach().clone() for name, stack in stacks.items()}


After = Callable[[StageRecipe, int, Stack, Optimizer], None]
Keep = Callable[[int, int, Stack, Optimizer], None]


def train_stack(
    recipe: Recipe,
    trainings: Sequence[Training],
    engine: str,
    device: torch.device,
    data: dict[str, Data],
    *,
    updates: int | None = None,
    stop: threading.Event | None = None,
    after: After | None = None,
    begun: Begun | None = None,
    keep: Keep | None = None,
) -> Stack:
    """Train as many models as there are trainings, all with subsets of one size.

    Args:
        data: every stage's dataset on the device.
        updates: stop after so many of each stage (for tests).
        stop: raises Interrupted at the next update once it is set.
        after: called after every update, with its number in the stage.
        begun: where to go on.
        keep: offered the stack after every update, with the number of the stage.
    """
    stack = Stack.of(recipe, [t.seed for t in trainings], engine, device)
    model = recipe.build(0).to(device)  # for the optimizers' factories to look at
    for number, stage in enumerate(recipe.stages):
        if begun is not None and number < begun.stage:
            continue
        examples = [recipe.examples(t.subset, t.stage)[stage.name] for t in trainings]
        seeds = [t.seed for t in trainings]
        training = _StageTraining(stack, stage, seeds, examples, model, data[stage.name])
        done = 0
        if begun is not None and number == begun.stage:
            done = begun.step
            begun.kept.restore(stack, training.optimizer)
        training.run(updates, stop, after, done, keep and partial(keep, number))
    return stack


class _StageTraining:
    """One stage of a stack's training."""

    def __init__(
        self,
        stack: Stack,
        stage: StageRecipe,
        seeds: Sequence[int],
        chosen: Sequence[NDArray[np.int64]],
        model: nn.Module,
        data: Data,
    ) -> None:
        self.stack, self.stage, self.data = stack, stage, data
        self.like = next(model.parameters())
        self.device = device = self.like.device
        self.task = copy.copy(stage.task)  # which may keep something between outputs and losses
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
        self.optimizer, self.schedule = _stack_optimizer(model, stage, stack, self.size)
        self.graphed = all(
            isinstance(group["lr"], Tensor) for group in self.optimizer.param_groups
        ) and _only_rates_change(self.schedule)
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.seen: dict[int, int] = {}

    def order(self, epoch: int) -> Tensor:
        """Which examples each model sees in an epoch, in order: (S, n)."""
        everyone = torch.arange(len(self.stage.data), device=self.device)
        full = self.stage.order(self.distinct, epoch, everyone)
        if self.masks is None:
            return full[self.whose]
        rows = []
        block = max(1, 2**27 // full.shape[1])  # of models, so that the indices stay below a GiB
        for start in range(0, len(self.whose), block):
            own = full[self.whose[start : start + block]]
            kept = self.masks[start : start + block].gather(1, own)
            rows.append(own[kept].view(len(own), self.size))
        return torch.cat(rows)

    def run(
        self,
        updates: int | None,
        stop: threading.Event | None,
        after: After | None,
        done: int = 0,
        keep: Callable[[int, Stack, Optimizer], None] | None = None,
    ) -> None:
        """Make the updates but for the first, which are done; `keep` is offered what they make."""
        if self.device.type != "cuda":
            self._run(updates, stop, after, done, keep)
            return
        side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        # a graph is captured where its like was run before
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            self._run(updates, stop, after, done, keep)
        torch.cuda.current_stream(self.device).wait_stream(side)

    def _run(
        self,
        updates: int | None,
        stop: threading.Event | None,
        after: After | None,
        done: int,
        keep: Callable[[int, Stack, Optimizer], None] | None,
    ) -> None:
        size = self.stage.batch_size
        first, skipped = divmod(done, self.stage.batches_per_epoch(self.size))
        step = done
        self.stack.template.train()
        for epoch in range(first, self.stage.epochs):
            order = self.order(epoch)
            for start in range(skipped * size if epoch == first else 0, self.size, size):
                if step == updates:
                    return
                if stop is not None and stop.is_set():
                    raise Interrupted
                for group, now in zip(
                    self.optimizer.param_groups, self.schedule[step], strict=True
                ):
                    _set(group, now)
                self.update(order[:, start : start + size], step)
                step += 1
                if after is not None:
                    after(self.stage, step, self.stack, self.optimizer)
                if keep is not None:
                    keep(step, self.stack, self.optimizer)
        self.optimizer.zero_grad(set_to_none=True)

    def update(self, index: Tensor, step: int) -> None:
        """One update of all models, with the examples (S, B)."""
        width = index.shape[1]
        if width in self.graphs:
            graph, place_for = self.graphs[width]
            self._fill(place_for, index, step)
            graph.replay()
            return
        self.seen[width] = self.seen.get(width, 0) + 1
        if not self.graphed or self.seen[width] <= WARM_UP:
            self._descend(self._batch(index, step))
            return
        held = index.clone() if self.stage.transform is None else self._batch(index, step)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream(self.device)):
                batch = self._batch(held, step) if self.stage.transform is None else held
                self._descend(batch)
        except RuntimeError:  # as of a model that looks at its own numbers, with .item()
            self.graphed = False
            self._descend(self._batch(index, step))
            return
        self.graphs[width] = (graph, held)
        graph.replay()  # capturing recorded the update, and did not make it

    def _fill(self, held: Any, index: Tensor, step: int) -> None:
        """Put the next examples where the graph reads them: their indices, or, when a transform
        must see them first, the batch itself."""
        if self.stage.transform is None:
            held.copy_(index)
            return
        batch = self._batch(index, step)
        for old, new in zip(tree_leaves(held), tree_leaves(batch), strict=True):
            old.copy_(new)

    def _batch(self, index: Tensor, step: int) -> Any:
        rows = index.reshape(-1)
        seeds = self.seeds.expand(index.shape).reshape(-1)
        return self.stage.transformed(self.data.rows(rows), seeds, step, rows, self.like)

    def _descend(self, batch: Any) -> None:
        self.stack.gradients(self.task, batch, self.stage.clip_norm)
        self.optimizer.step()


def _stack_optimizer(
    model: nn.Module, stage: StageRecipe, stack: Stack, examples: int
) -> tuple[Optimizer, list[list[dict[str, Any]]]]:
    """The user's optimizer over the stacks, and the settings of its groups at every update.

    The factory sees a plain model, so that it may sort parameters by name or shape, or freeze them.
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
            # on a CPU, torch's fused step leaves float16 and bfloat16 as they are
            and (device.type == "cuda" or kinds <= {torch.float32, torch.float64})
        ):
            settings["fused"] = True  # the arithmetic of a plain step, in one pass over memory
        settings["lr"] = float(group["lr"])
        # a rate in a tensor is float32 to torch's fused kernels: too coarse for float64
        if device.type == "cuda" and type(plain) in GRAPHED and torch.float64 not in kinds:
            settings["lr"] = torch.tensor(settings["lr"], device=device)
            settings |= {"capturable": True} if "capturable" in settings else {}
        groups.append(settings)
    kind: Any = type(plain)
    stacked: Optimizer = kind(groups)
    for own, state in plain.state.items():  # such as Adagrad's initial sums
        stacked.state[twins[id(own)]] = {
            name: value if name == "step" else torch.stack([value] * stack.size)
            for name, value in state.items()
        }
    return stacked, stage.schedule(model, examples)


def _set(group: dict[str, Any], now: dict[str, Any]) -> None:
    """Give a stacked group the settings of an update."""
    for name, value in now.items():
        if isinstance(group.get(name), Tensor):
            group[name].fill_(value)
        elif name not in HOW:
            group[name] = value


def _only_rates_change(schedule: list[list[dict[str, Any]]]) -> bool:
    """Whether all else stays as it is: a graph holds it as a constant."""

    def others(groups: list[dict[str, Any]]) -> list[Any]:
        return [[(k, v) for k, v in group.items() if k != "lr"] for group in groups]

    return all(others(groups) == others(schedule[0]) for groups in schedule)


def choose_engine(
    recipe: Recipe,
    query: Batches,
    device: torch.device,
    engines: Sequence[str] = ("products", "vmap"),
) -> tuple[str | None, str | None]:
    """How the recipe's models can be trained together, found out by trying: the first engine that
    can, and why not those before it; or (None, why one at a time)."""
    model = recipe.build(0)
    for name, module in model.named_modules():
        draws = isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
        if draws or (
            isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats
        ):
            return None, f"{name} ({type(module).__name__}) mixes examples or draws numbers"
    for stage in recipe.stages:
        optimizer = stage.make_optimizer(model)
        kind = type(optimizer)
        if kind not in ELEMENTWISE:
            return None, f"{kind.__name__} is not known to be elementwise"
        hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
        if any(hooks) or "step" in vars(optimizer):
            return None, f"{kind.__name__} has hooks, or a step() that was replaced"
    reasons = []
    missing = unstackable(model)
    for engine in engines:
        if engine == "products" and missing is not None:
            reasons.append(f"{missing} has no stacked form")
            continue
        try:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                _check_engine(recipe.precise(), query, engine, device)
        except Exception as error:  # whatever the user's model may raise under vmap
            reasons.append(f"{engine}: {(str(error) or repr(error)).splitlines()[0]}")
            continue
        return engine, "; ".join(reasons) or None
    return None, "; ".join(reasons)


def _check_engine(recipe: Recipe, query: Batches, engine: str, device: torch.device) -> None:
    """Compare two models' gradients, batch norms' statistics and measurements with plain ones;
    raise if they differ."""
    seeds = [0, 1]
    stack = Stack.of(recipe, seeds, engine, device)
    plain = [recipe.build(seed).to(device) for seed in seeds]

    def constants(model: nn.Module) -> str:
        return digest([b for name, b in model.named_buffers() if name not in stack.statistics])

    if any(constants(model) != constants(stack.template) for model in plain):
        raise ValueError("buffers differ from seed to seed")
    for nudge in (0.0, NUDGE):
        for k, model in enumerate(plain):
            _nudge(model, nudge)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    stack.parameters[name][k].copy_(parameter)
        for stage in recipe.stages:
            _check_gradients(stack, plain, stage, seeds)
    if any(constants(model) != constants(stack.template) for model in plain):
        raise ValueError("the model changes its buffers while it trains")
    dtype, task = next(plain[0].parameters()).dtype, copy.copy(recipe.task)
    some = np.arange(min(4, len(query)))
    held = Data(_Rows(query, some), device, dtype)
    measured = torch.from_numpy(stack.measurements(task, held, len(some), len(some)))
    with torch.no_grad():
        for k, model in enumerate(plain):
            batch = place(query.take(some), device, dtype)
            alone = task.measurements(task.outputs(model.eval(), batch), batch)
            _agree("the measurement", measured[k], alone.double().cpu(), dtype)


def _check_gradients(
    stack: Stack, plain: Sequence[nn.Module], stage: StageRecipe, seeds: Sequence[int]
) -> None:
    first, task = next(plain[0].parameters()), copy.copy(stage.task)
    device, dtype = first.device, first.dtype
    count = max(1, min(stage.batch_size, 8, len(stage.data) // 2))
    rows = np.linspace(0, len(stage.data) - 1, 2 * count, dtype=int)
    batch = place(stage.data.take(rows), device, dtype)
    halves = [place(stage.data.take(half), device, dtype) for half in np.split(rows, 2)]
    before = _drawn(device), _counts(stack.template, task)
    seed = torch.tensor(seeds, device=device).repeat_interleave(count)
    batch = stage.transformed(batch, seed, 0, rows, first)
    halves = [
        stage.transformed(half, s, 0, ids, first)
        for half, s, ids in zip(halves, seeds, np.split(rows, 2), strict=True)
    ]
    stack.gradients(task, batch, stage.clip_norm)
    if _drawn(device) != before[0]:
        raise ValueError("random numbers are drawn in training")
    if device.type == "cuda" and _counts(stack.template, task) != before[1]:
        raise ValueError("the model or the task counts in Python, which a CUDA graph leaves out")
    for k, (model, half) in enumerate(zip(plain, halves, strict=True)):
        model.zero_grad(set_to_none=True)
        task.losses(task.outputs(model, half), half).mean().backward()  # type: ignore[no-untyped-call]
        if stage.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), stage.clip_norm)
        slopes = [p.grad for p in model.parameters() if p.grad is not None]
        whole = float(nn.utils.get_total_norm(slopes))
        for name, parameter in model.named_parameters():
            found = stack.parameters[name].grad
            own = None if found is None else found[k]
            _agree(f"the gradient of {name}", own, parameter.grad, dtype, whole)
        for name, running in running_statistics(model).items():
            _agree(name, stack.statistics[name][k].double(), running.double(), dtype)


class _Rows(Batches):
    """The first few examples of a dataset."""

    def __init__(self, batches: Batches, rows: np.ndarray) -> None:
        super().__init__(batches.name, [batches.dataset[int(k)] for k in rows], batches.collate)


def _nudge(model: nn.Module, by: float) -> None:
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn(p.shape, generator=random).to(p), alpha=by)


def _drawn(device: torch.device) -> list[bytes]:
    """The states of the generators that a model may draw from."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return [state.numpy().tobytes() for state in states]


def _counts(model: nn.Module, task: Task) -> list[Any]:
    """The plain numbers that modules and task keep."""
    kept = [vars(thing).items() for thing in (*model.modules(), task)]
    return [(k, v) for items in kept for k, v in items if isinstance(v, (bool, int, float))]


def _agree(
    what: str,
    found: Tensor | None,
    wanted: Tensor | None,
    dtype: torch.dtype,
    whole: float = 0.0,
) -> None:
    """`whole` is the norm of all that `wanted` is a part of: a gradient that is zero but for
    rounding (a key's bias in attention) is no better known than that."""
    if found is None or wanted is None:
        if found is not wanted and (found if wanted is None else wanted).abs().max() > 0:  # type: ignore[union-attr]
            raise ValueError(f"{what} is missing")
        return
    norm = float(wanted.nan_to_num().norm()) + whole / 100
    allowed = AGREEMENT.get(dtype, 0.1) * norm + 1e-12
    off = float((found - wanted).nan_to_num().norm())
    if off > allowed or not torch.equal(found.isnan(), wanted.isnan()):
        raise ValueError(f"{what} comes out differently for several models at once")
