"""The brute force every score is tested against: float64, dense matrices, one example at a time.

Nothing here knows how whence works. Gradients come from ``torch.func``, curvature is an explicit
(o*i, o*i) matrix per layer, SOURCE a ``matrix_exp`` of it. A layer's parameters are one matrix
(o, i): the bias is its last column, a Conv2d kernel is flattened row-major over (c, kh, kw), each
group of a grouped convolution is a block of its own ("name.g"), Conv1D is transposed, and modules
that share a weight are one block. A matrix becomes a vector row by row, so that K-FAC is
kron(S, A).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import default_collate

torch.set_num_threads(1)  # on matrices this small a second thread only waits for the first

Blocks = dict[str, Tensor]
# (outputs, batch, example, step) -> (c, *outputs.shape): columns b of a factor, sum of b bᵀ = H
Fisher = Callable[[Tensor, Any, int, int], Tensor]


# --- layers ------------------------------------------------------------------------------------


def layers(model: nn.Module) -> dict[str, list[str]]:
    """Tracked layers: first name -> names of all modules that share its weight."""
    untracked = {
        id(weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.MultiheadAttention)
        for weight in module.parameters()
    }
    shared: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        plain = type(module) in (nn.Linear, nn.Conv2d) or type(module).__name__ == "Conv1D"
        if plain and id(module.weight) not in untracked:
            shared.setdefault(id(module.weight), []).append(name)
    return {names[0]: names for names in shared.values()}


def matrices(model: nn.Module, values: dict[str, Tensor]) -> Blocks:
    """Parameter-shaped values, with leading axes (...), as blocks (..., o, i)."""
    blocks = {}
    for name in layers(model):
        module = model.get_submodule(name)
        groups = 1
        matrix = values[_join(name, "weight")]
        if isinstance(module, nn.Conv2d):
            matrix, groups = matrix.flatten(-3), module.groups
        elif not isinstance(module, nn.Linear):
            matrix = matrix.mT
        if module.bias is not None:
            matrix = torch.cat([matrix, values[_join(name, "bias")].unsqueeze(-1)], -1)
        blocks |= _by_group(name, groups, matrix.chunk(groups, -2))
    return blocks


def _join(module: str, parameter: str) -> str:
    return f"{module}.{parameter}" if module else parameter  # the model itself may be the layer


def _by_group(name: str, groups: int, parts: Any) -> dict[str, Any]:
    return {name if groups == 1 else f"{name}.{g}": part for g, part in enumerate(parts)}


def examples(dataset: Any, collate: Callable[..., Any] = default_collate) -> Iterator[Any]:
    return (collate([dataset[index]]) for index in range(len(dataset)))


def batch_of(dataset: Any, collate: Callable[..., Any] = default_collate) -> Any:
    return collate([dataset[index] for index in range(len(dataset))])


# --- gradients ---------------------------------------------------------------------------------


class Outputs(nn.Module):
    def __init__(self, model: nn.Module, task: Any) -> None:
        super().__init__()
        self.model, self.task = model, task

    def forward(self, batch: Any) -> Tensor:
        return self.task.outputs(self.model, batch)


def functional(
    model: nn.Module, weights: dict[str, Tensor], task: Any
) -> tuple[dict[str, Tensor], Callable[[dict[str, Tensor], Any], Tensor]]:
    """Parameters in float64, and the outputs as a function of them and of a batch."""
    module = Outputs(copy.deepcopy(model).double().eval(), task)
    parameters = {name: weights[name].double() for name, _ in model.named_parameters()}
    buffers = {
        f"model.{name}": weights[name].double() if value.is_floating_point() else weights[name]
        for name, value in model.named_buffers()
        if name in weights
    }

    def outputs(parameters: dict[str, Tensor], batch: Any) -> Tensor:
        renamed = {f"model.{name}": value for name, value in parameters.items()}
        return torch.func.functional_call(module, renamed | buffers, (batch,))

    return parameters, outputs


def per_example_gradients(
    model: nn.Module,
    weights: dict[str, Tensor],
    task: Any,
    quantity: str,
    dataset: Any,
    collate: Callable[..., Any] = default_collate,
) -> Blocks:
    """Gradients (n, o, i) of task.losses or task.measurements, by their name."""
    parameters, outputs = functional(model, weights, task)

    def value(parameters: dict[str, Tensor], batch: Any) -> Tensor:
        return getattr(task, quantity)(outputs(parameters, batch), batch).sum()

    gradients = [torch.func.grad(value)(parameters, b) for b in examples(dataset, collate)]
    return matrices(model, {k: torch.stack([g[k] for g in gradients]) for k in parameters})


# --- curvature ---------------------------------------------------------------------------------


def loss_hessian(task: Any, outputs: Tensor, batch: Any) -> Tensor:
    """Hessian (d, d) of one example's loss in its flattened outputs."""
    hessian = torch.func.hessian(lambda out: task.losses(out, batch).sum())(outputs)
    return hessian.reshape(outputs.numel(), outputs.numel())


def exact(task: Any) -> Fisher:
    def columns(outputs: Tensor, batch: Any, example: int, step: int) -> Tensor:
        values, vectors = torch.linalg.eigh(loss_hessian(task, outputs, batch))
        assert values.min() > -1e-12, "the loss is not convex in the outputs"
        return (vectors * values.clamp(min=0).sqrt()).T.reshape(-1, *outputs.shape)

    return columns


def empirical(task: Any) -> Fisher:
    def columns(outputs: Tensor, batch: Any, example: int, step: int) -> Tensor:
        return torch.func.grad(lambda out: task.losses(out, batch).sum())(outputs)[None]

    return columns


def sampled(task: Any, uniform: Callable[[int, int], Any]) -> Fisher:
    """uniform(example, step): the source of numbers that pseudo_losses takes."""

    def columns(outputs: Tensor, batch: Any, example: int, step: int) -> Tensor:
        outputs = outputs.detach().requires_grad_()
        loss = task.pseudo_losses(outputs, batch, uniform(example, step)).sum()
        return torch.autograd.grad(loss, outputs)[0][None]

    return columns


@dataclass
class Moments:
    """What one checkpoint says about one block's curvature; n examples, c columns each."""

    A: Tensor  # (i, i) = sum over examples, positions of a aᵀ, / n
    S: Tensor  # (o, o) = sum over examples, positions, columns of s sᵀ, / positions
    gradients: Tensor  # (n * c, o * i), already divided by sqrt(n)
    positions: int  # sum over examples


def moments(
    model: nn.Module,
    weights: dict[str, Tensor],
    task: Any,
    fisher: Fisher,
    dataset: Any,
    collate: Callable[..., Any] = default_collate,
    step: int = 0,
) -> dict[str, Moments]:
    parameters, outputs = functional(model, weights, task)
    plain = copy.deepcopy(model).double().eval()
    plain.load_state_dict(weights)
    count = len(dataset)
    A: dict[str, Any] = {}
    S: dict[str, Any] = {}
    positions: dict[str, int] = {}
    gradients: dict[str, list[Tensor]] = {}
    for index, batch in enumerate(examples(dataset, collate)):
        out, pull_back = torch.func.vjp(lambda p, b=batch: outputs(p, b), parameters)
        columns = fisher(out.detach(), batch, index, step)
        pulled = [pull_back(column)[0] for column in columns]
        stacked = {name: torch.stack([p[name] for p in pulled]) for name in parameters}
        for name, gradient in matrices(model, stacked).items():
            gradients.setdefault(name, []).append(gradient.flatten(1))
        for name, (a, s) in inputs_and_gradients(plain, task, batch, columns).items():
            A[name] = A.get(name, 0) + a.T @ a / count
            S[name] = S.get(name, 0) + torch.einsum("cto,ctp->op", s, s)
            positions[name] = positions.get(name, 0) + len(a)
    return {
        name: Moments(
            A[name], S[name] / positions[name], torch.cat(rows) / count**0.5, positions[name]
        )
        for name, rows in gradients.items()
        if name in A  # a layer that is never called has no curvature
    }


def inputs_and_gradients(
    model: nn.Module, task: Any, batch: Any, columns: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """Per block of one example: inputs (t, i) and the columns' output gradients (c, t, o).

    Each layer's output gets a zero added; its gradient is the output's, whatever happens in place
    afterwards. Uses of a shared weight are further positions.
    """
    seen: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in layers(model)}

    def record(name: str, module: nn.Module) -> Callable[..., Any]:
        kept: list[Tensor] = []

        def before(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            kept.append(args[0].detach().clone())

        def after(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            zero = torch.zeros_like(output, requires_grad=True)
            seen[name].append((kept.pop(), zero))
            return output + zero

        return module.register_forward_pre_hook(before), module.register_forward_hook(after)

    hooks = [
        hook
        for name, users in layers(model).items()
        for user in users
        for hook in record(name, model.get_submodule(user))
    ]
    out = task.outputs(model, batch)
    zeros = [zero for uses in seen.values() for _, zero in uses]
    pulled = [torch.autograd.grad(out, zeros, column, retain_graph=True) for column in columns]
    for hook in hooks:
        hook.remove()

    mask = task.mask(batch)
    actual: dict[str, tuple[Tensor, Tensor]] = {}
    which = 0
    for name, uses in seen.items():
        module = model.get_submodule(name)
        parts: dict[str, list[tuple[Tensor, Tensor]]] = {}
        for entered, _ in uses:
            s = torch.stack([gradients[which][0] for gradients in pulled])
            which += 1
            for block, pair in _positions(name, module, entered, s, mask).items():
                parts.setdefault(block, []).append(pair)
        for block, pairs in parts.items():
            actual[block] = (torch.cat([a for a, _ in pairs]), torch.cat([s for _, s in pairs], 1))
    return actual


def _positions(
    name: str, module: nn.Module, a: Tensor, s: Tensor, mask: Tensor | None
) -> dict[str, tuple[Tensor, Tensor]]:
    """One use of a layer: a (1, ...) and s (c, ...) as (t, i) and (c, t, o), by group."""
    groups = 1
    if isinstance(module, nn.Conv2d):
        groups = module.groups
        a = F.unfold(_padded(module, a), module.kernel_size, module.dilation, 0, module.stride)[0].T
        s = s.flatten(2).mT
    else:
        a, s = a.reshape(-1, a.shape[-1]), s.reshape(len(s), -1, s.shape[-1])
        if mask is not None and mask.numel() == len(a):
            real = mask[0].bool()
            a, s = a[real], s[:, real]
    halves = a.chunk(groups, -1)
    if module.bias is not None:
        halves = [torch.cat([half, torch.ones_like(half[:, :1])], -1) for half in halves]
    return _by_group(name, groups, zip(halves, s.chunk(groups, -1), strict=True))


def _padded(module: nn.Conv2d, a: Tensor) -> Tensor:
    if module.padding == "same":
        total = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        sides = [(t // 2, t - t // 2) for t in total]
    else:
        padding = (0, 0) if module.padding == "valid" else module.padding
        sides = [(p, p) for p in padding]
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return F.pad(a, (*sides[1], *sides[0]), mode=mode)


def dense_curvature(kind: str, checkpoints: list[dict[str, Moments]]) -> Blocks:
    """(o*i, o*i) per block, averaged over a segment's checkpoints as appendix D.2 says.

    "ekfac", "kfac", "diagonal", "identity" (the unit matrix), and "gauss-newton" without any
    approximation within the block.
    """
    return {
        name: _block_curvature(kind, [moments[name] for moments in checkpoints])
        for name in checkpoints[0]
    }


def _block_curvature(kind: str, checkpoints: list[Moments]) -> Tensor:
    A = torch.stack([m.A for m in checkpoints]).mean(0)
    S = torch.stack([m.S for m in checkpoints]).mean(0)
    if kind == "identity":
        return torch.eye(len(A) * len(S), dtype=torch.float64)
    if kind == "kfac":
        return torch.kron(S, A)
    if kind == "gauss-newton":
        return torch.stack([m.gradients.T @ m.gradients for m in checkpoints]).mean(0)
    if kind == "diagonal":
        basis = torch.eye(len(A) * len(S), dtype=torch.float64)
    else:
        assert kind == "ekfac", kind
        basis = torch.kron(torch.linalg.eigh(S)[1], torch.linalg.eigh(A)[1])
    values = torch.stack([(m.gradients @ basis).square().sum(0) for m in checkpoints]).mean(0)
    return basis @ torch.diag(values) @ basis.T


def exact_gauss_newton(
    model: nn.Module,
    weights: dict[str, Tensor],
    task: Any,
    dataset: Any,
    collate: Callable[..., Any] = default_collate,
) -> Blocks:
    """Mean over examples of JᵀHJ, per block: nothing factored, no columns."""
    parameters, outputs = functional(model, weights, task)
    total: Blocks = {}
    for batch in examples(dataset, collate):
        out, pull_back = torch.func.vjp(lambda p, b=batch: outputs(p, b).flatten(), parameters)
        hessian = loss_hessian(task, outputs(parameters, batch).detach(), batch)
        rows = [pull_back(unit)[0] for unit in torch.eye(len(out), dtype=out.dtype)]
        jacobian = {name: torch.stack([row[name] for row in rows]) for name in parameters}
        for name, j in matrices(model, jacobian).items():
            j = j.flatten(1)
            total[name] = total.get(name, 0) + j.T @ hessian @ j / len(dataset)
    return total


# --- methods -----------------------------------------------------------------------------------


def F_S(H: Tensor, time: float) -> Tensor:
    """exp(-time H)."""
    return torch.linalg.matrix_exp(-time * H)


def F_r(H: Tensor, time: float) -> Tensor:
    """(I - exp(-time H)) / H = the integral of exp(-u H) over u from 0 to time; H may be singular.

    It is the corner of exp(time [[-H, I], [0, 0]]): no eigenvalue, no inverse.
    """
    size = len(H)
    augmented = H.new_zeros(2 * size, 2 * size)
    augmented[:size, :size] = -time * H
    augmented[:size, size:] = torch.eye(size, dtype=H.dtype)
    return time * torch.linalg.matrix_exp(augmented)[:size, size:]


@dataclass
class Segment:
    curvature: Blocks  # (o*i, o*i)
    gradients: Blocks  # (n, o*i), mean over the segment's checkpoints
    time: float  # mean effective rate times number of updates


def source(query: Blocks, segments: list[Segment], size: int) -> Tensor:
    """Contributions (L, q, n) of the segments; their sum is the score, f(with) - f(without)."""
    query = dict(query)
    contributions = []
    for segment in reversed(segments):
        score: Any = 0
        for name, H in segment.curvature.items():
            score = score + query[name] @ F_r(H, segment.time) @ segment.gradients[name].T
            query[name] = query[name] @ F_S(H, segment.time)
        contributions.insert(0, -score / size)
    return torch.stack(contributions)


def influence(
    query: Blocks, curvature: Blocks, gradients: Blocks, size: int, damping: float
) -> Tensor:
    """(q, n)"""
    score: Any = 0
    for name, H in curvature.items():
        damped = H + damping * torch.eye(len(H), dtype=H.dtype)
        score = score + query[name] @ torch.linalg.solve(damped, gradients[name].T)
    return -score / size


def tracin(queries: list[Blocks], gradients: list[Blocks], rates: list[float]) -> Tensor:
    """(q, n): minus the sum over checkpoints of rate * <query gradient, training gradient>."""
    score: Any = 0
    for query, gradient, rate in zip(queries, gradients, rates, strict=True):
        score = score + sum(rate * query[name] @ gradient[name].T for name in query)
    return -score


# --- all together ------------------------------------------------------------------------------


class Dense:
    """Every method by brute force, for one model, dataset and training history.

    ``history`` has ``checkpoints`` (state dicts), ``steps``, ``rates`` (one per update),
    ``momentum``, ``dampening`` and ``weight_decay``. With ``query=None``: self-influence.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Any,
        train: Any,
        history: Any,
        query: Any = None,
        uniform: Callable[[int, int], Any] | None = None,
        collate: Callable[..., Any] = default_collate,
    ) -> None:
        self.model, self.task, self.train, self.history = model, task, train, history
        self.query, self.uniform, self.collate = query, uniform, collate
        self.last = len(history.checkpoints) - 1
        self.effective = (1 - history.dampening) / (1 - history.momentum)
        self.gradients, self.moments = cache(self._gradients), cache(self._moments)

    def _gradients(self, checkpoint: int, quantity: str, of_query: bool) -> Blocks:
        weights = self.history.checkpoints[checkpoint]
        data = self.query if of_query and self.query is not None else self.train
        actual = per_example_gradients(self.model, weights, self.task, quantity, data, self.collate)
        return {name: gradient.flatten(1) for name, gradient in actual.items()}

    def _moments(self, checkpoint: int, fisher: str) -> dict[str, Moments]:
        kinds = {"exact": exact, "empirical": empirical}
        columns = kinds[fisher](self.task) if fisher in kinds else sampled(self.task, self.uniform)
        weights, step = self.history.checkpoints[checkpoint], self.history.steps[checkpoint]
        return moments(self.model, weights, self.task, columns, self.train, self.collate, step)

    def _result(self, scores: Tensor) -> np.ndarray:
        """(..., q, n), or (..., n) for self-influence."""
        if self.query is None:
            scores = scores.diagonal(dim1=-2, dim2=-1)
        return scores.detach().numpy()

    def source(
        self,
        segments: int = 1,
        curvature: str = "ekfac",
        fisher: str = "exact",
        weight_decay: str = "ignore",
    ) -> np.ndarray:
        """Contributions (L, q, n)."""
        dealt = np.array_split(np.arange(self.last + 1), segments)
        parts, start = [], 0
        for members in dealt:
            end = self.history.steps[members[-1]]
            H = dense_curvature(curvature, [self.moments(int(c), fisher) for c in members])
            if weight_decay == "curvature":
                decay = self.history.weight_decay
                H = {k: h + decay * torch.eye(len(h), dtype=h.dtype) for k, h in H.items()}
            each = [self.gradients(int(c), "losses", False) for c in members]
            mean = {name: torch.stack([g[name] for g in each]).mean(0) for name in each[0]}
            time = float(sum(self.history.rates[start:end])) * self.effective
            parts.append(Segment(H, mean, time))
            start = end
        query = self.gradients(self.last, "measurements", True)
        return self._result(source(query, parts, len(self.train)))

    def influence(
        self, damping: float | str = 1e-8, curvature: str = "ekfac", fisher: str = "exact"
    ) -> np.ndarray:
        if damping == "source":
            damping = 1 / (float(sum(self.history.rates)) * self.effective)
        H = dense_curvature(curvature, [self.moments(self.last, fisher)])
        query = self.gradients(self.last, "measurements", True)
        train = self.gradients(self.last, "losses", False)
        return self._result(influence(query, H, train, len(self.train), float(damping)))

    def tracin(self) -> np.ndarray:
        checkpoints = range(self.last + 1)
        queries = [self.gradients(c, "measurements", True) for c in checkpoints]
        train = [self.gradients(c, "losses", False) for c in checkpoints]
        rates = [float(self.history.rates[step - 1]) for step in self.history.steps]
        return self._result(tracin(queries, train, rates))
