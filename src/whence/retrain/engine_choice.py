"""Choose how the models of a recipe train together, by comparing with models trained alone."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop

from whence.data import Batches, place
from whence.errors import InvalidInput
from whence.persist.identity import digest
from whence.retrain.device import cuda_devices
from whence.retrain.recipe import Recipe
from whence.retrain.stack import Data, Stack
from whence.retrain.stacked import running_statistics, unstackable
from whence.retrain.stage import StageRecipe
from whence.run.smooth_adamw import SmoothAdamW
from whence.task import Task

ELEMENTWISE = (SGD, Adam, AdamW, SmoothAdamW, RMSprop, Adagrad, Adadelta, Adamax, NAdam, RAdam)
# relative; an engine that mixes two models slightly mixes many models more
AGREEMENT = {torch.float64: 1e-5, torch.float32: 1e-2}  # TF32 errors are smaller
NUDGE = 0.02  # added to the weights, to also compare parameters that start at zero


def choose_engine(
    recipe: Recipe,
    query: Batches,
    device: torch.device,
    engines: Sequence[str] = ("products", "vmap"),
) -> tuple[str | None, str | None]:
    """The first engine that can train the recipe's models together, determined by trying.

    Returns:
        The engine, and why the engines before it cannot; or None, and why no engine can.
    """
    model = recipe.build(0)
    for name, module in model.named_modules():
        draws = isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
        if isinstance(module, nn.RNNBase):  # between its layers
            draws = module.num_layers > 1 and module.dropout > 0
        if draws or (
            isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats
        ):
            return None, f"{name} ({type(module).__name__}) mixes examples or draws random numbers"
    for stage in recipe.stages:
        optimizer = stage.make_optimizer(model)
        kind = type(optimizer)
        if kind not in ELEMENTWISE:
            return None, f"{kind.__name__} is not known to be elementwise"
        hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
        if any(hooks) or "step" in vars(optimizer):
            return None, f"{kind.__name__} has hooks, or its step() was replaced"
    reasons = []
    missing = unstackable(model)
    for engine in engines:
        if engine == "products" and missing is not None:
            reasons.append(f"{missing} has no stacked form")
            continue
        try:
            with torch.random.fork_rng(cuda_devices(device)):
                _check_engine(recipe.precise(), query, engine, device)
        except Exception as error:  # the user's model may raise anything under vmap
            reasons.append(f"{engine}: {(str(error) or repr(error)).splitlines()[0]}")
            continue
        return engine, "; ".join(reasons) or None
    return None, "; ".join(reasons)


def _check_engine(recipe: Recipe, query: Batches, engine: str, device: torch.device) -> None:
    """Compare gradients, batch-norm statistics and measurements of two stacked models with those of
    plain models. Raises if they differ."""
    seeds = [0, 1]
    stack = Stack.of(recipe, seeds, engine, device)
    plain = [recipe.build(seed).to(device) for seed in seeds]

    def constants(model: nn.Module) -> str:
        return digest([b for name, b in model.named_buffers() if name not in stack.statistics])

    if any(constants(model) != constants(stack.template) for model in plain):
        raise InvalidInput("buffers differ between seeds")
    for nudge in (0.0, NUDGE):
        for k, model in enumerate(plain):
            _nudge(model, nudge)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    stack.parameters[name][k].copy_(parameter)
        for stage in recipe.stages:
            _check_gradients(stack, plain, stage, seeds)
    if any(constants(model) != constants(stack.template) for model in plain):
        raise InvalidInput("the model changes its buffers during training")
    dtype, task = next(plain[0].parameters()).dtype, copy.copy(recipe.task)
    first_queries = np.arange(min(4, len(query)))
    examples = [query.dataset[k] for k in first_queries.tolist()]
    queries = Data(Batches(query.name, examples, query.collate), device, dtype)
    measured = torch.from_numpy(
        stack.measurements(task, queries, len(first_queries), len(first_queries))
    )
    with torch.no_grad():
        for k, model in enumerate(plain):
            batch = place(query.take(first_queries), device, dtype)
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
        raise InvalidInput("the model draws random numbers during training")
    if device.type == "cuda" and _counts(stack.template, task) != before[1]:
        raise InvalidInput("the model or the task counts in Python, which a CUDA graph cannot")
    for k, (model, half) in enumerate(zip(plain, halves, strict=True)):
        model.zero_grad(set_to_none=True)
        task.losses(task.outputs(model, half), half).mean().backward()  # type: ignore[no-untyped-call]
        if stage.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), stage.clip_norm)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        total_norm = float(nn.utils.get_total_norm(gradients))
        for name, parameter in model.named_parameters():
            stacked = stack.parameters[name].grad
            gradient = None if stacked is None else stacked[k]
            _agree(f"the gradient of {name}", gradient, parameter.grad, dtype, total_norm)
        for name, running in running_statistics(model).items():
            _agree(name, stack.statistics[name][k].double(), running.double(), dtype)


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
    """The plain numbers among the attributes of modules and task."""
    attributes = [vars(thing).items() for thing in (*model.modules(), task)]
    return [(k, v) for items in attributes for k, v in items if isinstance(v, (bool, int, float))]


def _agree(
    what: str,
    actual: Tensor | None,
    expected: Tensor | None,
    dtype: torch.dtype,
    total_norm: float = 0.0,
) -> None:
    """Raise if two tensors differ by more than rounding.

    Args:
        total_norm: the norm of everything that `expected` is a part of. A gradient that is zero
            except for rounding (of a key's bias in attention) is only as precise as that.
    """
    if actual is None or expected is None:
        if actual is not expected and (actual if expected is None else expected).abs().max() > 0:  # type: ignore[union-attr]
            raise InvalidInput(f"{what} is missing")
        return
    norm = float(expected.nan_to_num().norm()) + total_norm / 100
    allowed = AGREEMENT.get(dtype, 0.1) * norm + 1e-12
    difference = float((actual - expected).nan_to_num().norm())
    if difference > allowed or not torch.equal(actual.isnan(), expected.isnan()):
        raise InvalidInput(f"{what} is different when several models train together")
