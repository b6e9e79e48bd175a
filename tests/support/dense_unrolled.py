"""Trainings that autograd can differentiate: the brute force Unrolled and HYDRA are tested against.

Nothing here knows how whence works. The optimizer is torch's own, in its differentiable mode, and
every example's loss has a weight that requires a gradient, so that one backward pass through the
whole training is the answer. ``curvature`` says how a batch's gradient depends on the weights it
is taken at: by the Hessian, by the Gauss-Newton matrix (the outputs' slope in θ held constant), or
not at all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import default_collate

from support.dense import Outputs

torch.set_num_threads(1)


def batch_of(data: Any, indices: Sequence[int]) -> Any:
    return default_collate([data[int(k)] for k in indices])


def outputs(model: nn.Module, task: Any, θ: dict[str, Tensor], batch: Any) -> Tensor:
    renamed = {f"model.{name}": value for name, value in θ.items()}
    return functional_call(Outputs(model, task), renamed, (batch,))


def slope(
    model: nn.Module, task: Any, θ: dict[str, Tensor], batch: Any, w: Tensor, curvature: str
) -> list[Tensor | None]:
    """∇ (1/B) Σ w L, differentiable in w, and in θ as ``curvature`` says."""
    if curvature == "none":
        θ = {name: value.detach().requires_grad_() for name, value in θ.items()}
    if curvature != "gauss-newton":
        losses = task.losses(outputs(model, task, θ, batch), batch)
        objective = (w * losses).sum() / len(w)
        return list(
            torch.autograd.grad(objective, list(θ.values()), create_graph=True, allow_unused=True)
        )
    # Jᵀ ∇ℓ(z): z moves with θ to first order, J stays
    fixed = {name: value.detach().requires_grad_() for name, value in θ.items()}
    z = outputs(model, task, fixed, batch)
    rows = [
        torch.autograd.grad(entry, list(fixed.values()), retain_graph=True)
        for entry in z.reshape(-1)
    ]
    J = torch.stack([torch.cat([part.reshape(-1) for part in row]) for row in rows])
    moved = torch.cat([(θ[k] - fixed[k].detach()).reshape(-1) for k in θ])
    point = z.detach() + (J @ moved).reshape(z.shape)
    point = point if point.requires_grad else point.requires_grad_()
    objective = (w * task.losses(point, batch)).sum() / len(w)
    (pull,) = torch.autograd.grad(objective, point, create_graph=True)
    flat, actual, start = J.T @ pull.reshape(-1), [], 0
    for value in θ.values():
        actual.append(flat[start : start + value.numel()].reshape(value.shape))
        start += value.numel()
    return actual


def step(
    optimizer: torch.optim.Optimizer, θ: list[Tensor], gradients: list[Tensor | None]
) -> list[Tensor]:
    """The parameters after a step, which torch makes in place: on copies, so that the graph of what
    came before stays as it is."""
    weights = [value.clone() for value in θ]
    for value, g in zip(weights, gradients, strict=True):
        value.grad = g
    (group,) = optimizer.param_groups
    states = [optimizer.state.pop(p, {}) for p in group["params"]]
    group["params"] = weights
    for value, state in zip(weights, states, strict=True):
        # torch counts in float32, of which Adam's corrections would come out as coarse
        kept = {k: v.double() if k == "step" else v.clone() for k, v in state.items()}
        if isinstance(optimizer, torch.optim.SGD) and group["momentum"] and not state:
            # torch starts a buffer with a detached gradient; this makes the same of it, attached
            decayed = value.grad + group["weight_decay"] * value
            kept["momentum_buffer"] = decayed * group["dampening"] / group["momentum"]
        elif isinstance(optimizer, torch.optim.Adam) and not state:
            kept = {"step": torch.zeros((), dtype=torch.float64)}
            kept |= {
                k: torch.zeros_like(value) for k in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
            }
        optimizer.state[value] = kept
    optimizer.step()
    return weights


def effects(
    model: nn.Module,
    stages: Sequence[dict[str, Any]],
    query: Any,
    curvature: str = "hessian",
    clip_norm: float | None = None,
) -> list[np.ndarray]:
    """∂f(q, θ_T)/∂w_m for each stage, (q, n).

    Each stage: data, task, optimizer (of parameters), batches; and, where they are wanted, rates
    (of every update) and expected: the stretches [(start, end), ...] over which every example is
    credited by 1/N at the weights in the middle, with the curvature of all examples.
    """
    model = copy.deepcopy(model).double().eval().requires_grad_(False)
    start = {name: p.clone() for name, p in model.named_parameters()}
    weights = [
        torch.ones(len(stage["data"]), dtype=torch.float64, requires_grad=True) for stage in stages
    ]
    with sdpa_kernel(SDPBackend.MATH):
        path = list(_train(model, stages, weights, start, curvature, clip_norm, []))
        if any("expected" in stage for stage in stages):
            path = list(_train(model, stages, weights, start, curvature, clip_norm, path))
        task, rows = stages[-1]["task"], []
        for k in range(len(query)):
            batch = batch_of(query, [k])
            f = task.measurements(outputs(model, task, path[-1], batch), batch).sum()
            actual = torch.autograd.grad(f, weights, retain_graph=True, allow_unused=True)
            rows.append([w * 0 if g is None else g for g, w in zip(actual, weights, strict=True)])
    return [torch.stack([row[s] for row in rows]).detach().numpy() for s in range(len(stages))]


def _train(
    model: nn.Module,
    stages: Sequence[dict[str, Any]],
    weights: list[Tensor],
    start: dict[str, Tensor],
    curvature: str,
    clip_norm: float | None,
    path: list[dict[str, Tensor]],
) -> Iterator[dict[str, Tensor]]:
    """The parameters before the first and after every update."""
    θ = {name: p.clone().requires_grad_() for name, p in start.items()}
    yield θ
    before = 0
    for stage, w in zip(stages, weights, strict=True):
        optimizer = stage["optimizer"]([p.detach().clone().requires_grad_() for p in θ.values()])
        for settings in (optimizer.defaults, *optimizer.param_groups):
            settings["differentiable"], settings["foreach"] = True, False
        data, task, everyone = stage["data"], stage["task"], range(len(stage["data"]))
        for t, indices in enumerate(stage["batches"]):
            if "rates" in stage:
                optimizer.param_groups[0]["lr"] = stage["rates"][t]
            batch_weights = w[torch.as_tensor(indices)]
            actual = slope(model, task, θ, batch_of(data, indices), batch_weights, curvature)
            if "expected" in stage and path:
                (at,) = ((a + b) // 2 for a, b in stage["expected"] if a <= t < b)
                whole, ones = batch_of(data, everyone), torch.ones_like(w)
                bent = slope(model, task, θ, whole, ones, curvature)
                credited = slope(model, task, path[before + at], whole, w, "none")
                actual = [
                    g.detach() + (h - h.detach()) + (c - c.detach())
                    for g, h, c in zip(actual, bent, credited, strict=True)
                ]
            if clip_norm is not None:
                norm = torch.stack([g.square().sum() for g in actual if g is not None]).sum().sqrt()
                factor = (clip_norm / (norm + 1e-6)).clamp(max=1.0)
                actual = [g if g is None else g * factor for g in actual]
            θ = dict(zip(θ, step(optimizer, list(θ.values()), actual), strict=True))
            yield θ
        before += len(stage["batches"])


def record(
    folder: Any,
    model: nn.Module,
    stages: Sequence[dict[str, Any]],
    clip_norm: float | None = None,
    checkpoints: int = 3,
    **options: Any,
) -> Any:
    """The same training by an ordinary loop, through the Recorder; the model is left trained."""
    import whence

    model.double().eval()
    first = stages[0]
    optimizer = first["optimizer"](list(model.parameters()))
    recorder = whence.Recorder(
        folder,
        model,
        optimizer,
        checkpoints=checkpoints,
        total_steps=len(first["batches"]),
        stage=first.get("name", "train"),
        size=len(first["data"]),
        notes={"clip_norm": clip_norm} if clip_norm else None,
        **options,
    )
    with recorder:
        for number, stage in enumerate(stages):
            if number:
                optimizer = stage["optimizer"](list(model.parameters()))
                recorder.stage(
                    stage["name"],
                    size=len(stage["data"]),
                    total_steps=len(stage["batches"]),
                    optimizer=optimizer,
                )
            for t, indices in enumerate(stage["batches"]):
                if "rates" in stage:
                    optimizer.param_groups[0]["lr"] = stage["rates"][t]
                batch = batch_of(stage["data"], indices)
                optimizer.zero_grad()
                stage["task"].losses(stage["task"].outputs(model, batch), batch).mean().backward()
                if clip_norm is not None:
                    clip_grad_norm_(model.parameters(), clip_norm)
                recorder.step(indices)
                optimizer.step()
    return whence.Run.open(folder)


def batches(n: int, size: int, count: int, seed: int = 0) -> list[np.ndarray]:
    g = np.random.default_rng(seed)
    return [g.choice(n, size, replace=False) for _ in range(count)]


Optimizer = Callable[[Any], torch.optim.Optimizer]
