"""Notices changes of a model's weights that no recorded update made, and of its gradients.

Between two updates of the optimizer, parameters must not change. Tensors count writes to them,
which costs nothing to read. Writes through `.data` are not counted, so norms and some entries are
compared as well: after the first updates, after every `EVERY`-th one, and at checkpoints.

Between a backward pass and its update, gradients must not change. The first updates show it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from whence.run.checkpoint import plain_names, refuse_lazy, weights_sha256
from whence.run.format import RunData
from whence.table import listed

FIRST, EVERY = 4, 16  # updates whose weights are measured
WATCHED_GRADIENTS = 8  # parameters whose gradients are measured, at the first updates
COMPARED_ENTRIES = 64  # of a parameter that are compared, because a permutation has the same norm
ROUNDING = 1e-6  # relative difference of norms that is no change
GRADIENT_TOLERANCE = 1e-4  # that of a gradient's norm

Measured = dict[tuple[str, ...], Tensor]


class WeightWatch:
    """Watches a model's parameters during one stage, and adds what it sees to a run's warnings.

    Each kind of change is reported once, when it is first seen.
    """

    def __init__(self, model: nn.Module, data: RunData, stage: str) -> None:
        self.model, self.data, self.stage = model, data, stage
        self._noticed: set[str] = set()
        self._updates = 0
        self._without: Counter[int] = Counter()  # updates without a gradient, by id of parameter
        self._begin()

    def _begin(self) -> None:
        self._parameters = _parameters(self.model)
        self._start = _measured(self._parameters)
        self._versions: list[int] | None = None  # after the last update
        self._last: Measured | None = None  # after the last update, if it was measured
        self._unsure: dict[str, int] = {}  # written to after this update; perhaps restored
        self._restored: set[str] = set()

    def before_update(self, updates: int) -> None:
        """Compare the weights with those that this many updates led to."""
        changed = self._changed(updates)
        if changed:
            between = f"between updates {updates} and {updates + 1}"
            self._warn_changed(f"weights changed {between}", changed)

    def after_update(self, updates: int, checkpoint: bool, optimizer: Optimizer) -> None:
        """Note the weights that this many updates led to."""
        self._updates += 1
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is None and p.requires_grad:
                    self._without[id(p)] += 1
        self._versions = self._written()
        due = updates <= FIRST or updates % EVERY == 0
        measured = checkpoint or due or bool(self._unsure)
        self._last = _measured(self._parameters) if measured else None
        if checkpoint:
            self._check_untrained(updates)

    def finish(self, updates: int) -> None:
        """At the end of the stage, before its last checkpoint is written."""
        self._check_gradients()
        if self._versions is None or not self._check_untrained(updates):
            return
        changed = self._changed(updates)
        once = {n: at for n, at in self._unsure.items() if n not in self._restored}
        changed += [name for name, at in once.items() if at == updates]
        if changed:
            self._warn_final(updates, changed)
        elif once:
            at = min(once.values())
            self._warn_changed(f"weights were written to after update {at}", once)

    @property
    def _trained(self) -> set[str]:
        """The parameters that the stage's optimizer updates."""
        columns = self.data.columns.get(self.stage, [])
        return {name for column in columns for name in self.data.groups[column]}

    def _changed(self, updates: int) -> list[str]:
        """The trained parameters that changed since the last update."""
        if self._versions is None:
            return []
        versions = self._written()
        if self._last is None and versions == self._versions:
            return []
        both = zip(self._parameters, versions, self._versions, strict=True)
        written = [name for name, now, before in both if now != before]
        if self._last is None:  # perhaps restored, as after an evaluation with other weights
            trained = self._trained if written else set()
            self._unsure |= {n: self._unsure.get(n, updates) for n in written if n in trained}
            return []
        changed = _differing(self._last, _measured(self._parameters), self._parameters)
        self._restored |= set(written) - set(changed)
        return [name for name in changed if name in self._trained]

    def _written(self) -> list[int]:
        """How often each parameter was written to."""
        return [p._version for p in self._parameters.values()]

    def _check_untrained(self, updates: int) -> bool:
        """Warn of parameters that were replaced, or changed without being trained. Returns whether
        the model still has the parameters that it began with."""
        now, before = _parameters(self.model), self._parameters
        replaced = [
            f"{name} {_shape(before.get(name))} → {_shape(now.get(name))}"
            for name in dict.fromkeys([*before, *now])
            if before.get(name) is not now.get(name)
        ]
        if replaced:
            self._warn(
                "replaced",
                f"parameters were replaced during stage {self.stage!r}, noticed after update "
                f"{updates}: {listed(replaced, 3)}. The run mixes two models in one stage. Call "
                "recorder.stage(...) before you change the model",
            )
            self._begin()
            return False
        moved = set(_differing(self._start, _measured(before), before)) - self._trained
        if moved:
            self._warn(
                "untrained",
                "parameters changed during training although the recorded optimizer does not "
                f"update them (a second optimizer?): {_some(moved)}. Their layers are left out of "
                "scores",
            )
        return True

    def _check_gradients(self) -> None:
        """Warn of parameters that only some updates changed, because others had no gradient."""
        counts = {name: self._without[id(p)] for name, p in self._parameters.items()}
        skipped = {name: count for name, count in counts.items() if 0 < count < self._updates}
        if skipped and 0 in counts.values():  # else gradients are deleted before they can be seen
            self._warn(
                "without",
                f"parameters had no gradient in some of the {self._updates} updates of stage "
                f"{self.stage!r}, which did not change them: "
                + listed([f"{name} ({count})" for name, count in sorted(skipped.items())], 4)
                + ". Scores count their learning rate in all updates. Set requires_grad to False "
                "while a layer is not trained",
            )

    def _warn_changed(self, what: str, parameters: Iterable[str]) -> None:
        self._warn(
            "changed",
            f"{what}, not by the recorded optimizer (clamping, a maximum norm, averaged or loaded "
            f"weights, a second optimizer?): {_some(parameters)}. Scores do not take such changes "
            "into account, and checkpoints hold the weights right after an update",
        )

    def _warn_final(self, updates: int, changed: Sequence[str]) -> None:
        """Warn that the model is not what the last update led to."""
        checkpoints = self.data.checkpoints
        if not checkpoints or checkpoints[-1].step != updates:
            where = "the run's last checkpoint has the changed weights"
        else:
            where = "the run's final model has the weights from before"
            sha256 = weights_sha256(self.model)
            same = [c.step for c in checkpoints if c.sha256 == sha256]
            if same:
                where += f", and the model now has those after update {same[-1]}"
        self._warn(
            "final",
            f"weights changed after the last update, {updates}: {_some(changed)} (best weights "
            f"loaded, clamping, averaging?); {where}",
        )

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._noticed:
            self._noticed.add(kind)
            self.data.warn(message)


class GradientWatch:
    """Notices gradients that something changes after the backward pass, such as clipping.

    Every backward pass notes the norms of some gradients, up to the first updates. All of them may
    be divided by the same whole number: a scaler of mixed precision does so, and accumulation.
    """

    def __init__(self, model: nn.Module) -> None:
        self._norms: dict[str, Tensor] = {}
        trained = {name: p for name, p in _parameters(model).items() if p.requires_grad}
        names = list(trained)[:: max(1, -(-len(trained) // WATCHED_GRADIENTS))]
        self._parameters = {name: trained[name] for name in names}
        self._handles = [
            p.register_post_accumulate_grad_hook(partial(self._note, name))  # type: ignore[no-untyped-call]
            for name, p in self._parameters.items()
        ]

    def _note(self, name: str, parameter: nn.Parameter) -> None:
        if parameter.grad is not None and parameter.grad.layout == torch.strided:
            self._norms[name] = _norm(parameter.grad)

    def before_update(self, updates: int, data: RunData) -> None:
        """Compare the gradients with those that the last backward pass led to."""
        norms = {
            name: (float(_norm(p.grad)), float(self._norms[name]))
            for name, p in self._parameters.items()
            if p.grad is not None and name in self._norms
        }
        self._norms.clear()  # below: gradients that are 0 were set to 0, before step(closure)
        ratios = {name: now / before for name, (now, before) in norms.items() if now and before}
        changed = {
            name: ratio for name, ratio in ratios.items() if abs(ratio - 1) > GRADIENT_TOLERANCE
        }
        if changed and not _divided(list(ratios.values())):
            self.remove()
            descriptions = [f"{name} (norm × {ratio:.3g})" for name, ratio in changed.items()]
            data.warn(
                f"gradients were changed between the backward pass and update {updates + 1} "
                f"(clipping, noise, a mask?): {listed(descriptions, 4)}. Scores use the unchanged "
                "gradients of the loss. If you know the reason, name it in Recorder(notes=...)"
            )
        if updates + 1 >= FIRST:
            self.remove()

    def remove(self) -> None:
        """Look no more."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._parameters = [], {}


def first_gradient(model: nn.Module) -> tuple[Tensor | None, int]:
    """The first gradient that a parameter of the model has, and how often it was written to."""
    gradients = (p.grad for p in model.parameters() if p.grad is not None)
    gradient = next(gradients, None)
    return gradient, 0 if gradient is None else gradient._version


def accumulated(model: nn.Module, before: tuple[Tensor | None, int]) -> bool:
    """Whether backward passes have added to the model's gradients since then. Gradients that were
    set to None, or that are not finite (mixed precision skips their update), are of another one."""
    gradient, version = first_gradient(model)
    if gradient is None or (before[0] is not None and gradient is not before[0]):
        return False
    written = before[0] is None or version > before[1]
    return written and bool(gradient.isfinite().all())


def _norm(gradient: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(gradient.detach().float())
    return norm


def _divided(ratios: Sequence[float]) -> bool:
    """Whether all are one over the same whole number."""
    number = round(1 / ratios[0]) if 0 < ratios[0] < math.inf else 0
    return all(abs(ratio * number - 1) <= GRADIENT_TOLERANCE for ratio in ratios)


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    parameters = dict(model.named_parameters())
    refuse_lazy(parameters)
    plain = plain_names(parameters)
    return {
        plain[name]: p
        for name, p in parameters.items()
        if p.is_floating_point() and p.numel() and type(p.data) is Tensor
    }


def _measured(parameters: dict[str, nn.Parameter]) -> Measured:
    """Norms of order 2 and ∞, then entries here and there, on the CPU: of the parameters of one
    device and dtype together, under their names."""
    alike: dict[tuple[torch.device, torch.dtype], list[str]] = {}
    for name, parameter in parameters.items():
        alike.setdefault((parameter.device, parameter.dtype), []).append(name)
    measured: Measured = {}
    with torch.no_grad():
        for (_, dtype), names in alike.items():
            tensors: list[Tensor] = [parameters[name] for name in names]
            wide = torch.promote_types(dtype, torch.float32)
            norms = [
                x for order in (2, torch.inf) for x in torch._foreach_norm(tensors, order, wide)
            ]
            entries = [x.flatten()[:: _stride(x)] for x in tensors]
            measured[tuple(names)] = torch.cat([torch.stack(norms), *entries]).cpu()
    return measured


def _stride(parameter: Tensor) -> int:
    """Between the entries that are compared."""
    return max(1, parameter.numel() // COMPARED_ENTRIES)


def _differing(before: Measured, after: Measured, parameters: dict[str, nn.Parameter]) -> list[str]:
    """The names whose numbers differ; NaN equals NaN."""
    differing = []
    for names, numbers in before.items():
        if torch.equal(numbers, after[names]):
            continue
        close = torch.isclose(
            numbers.double(), after[names].double(), rtol=ROUNDING, atol=0.0, equal_nan=True
        )
        norms, entries = close[: 2 * len(names)].view(2, -1), close[2 * len(names) :]
        counts = [-(-parameters[name].numel() // _stride(parameters[name])) for name in names]
        parts = zip(names, norms.T, torch.split(entries, counts), strict=True)
        differing += [name for name, *equal in parts if not all(bool(x.all()) for x in equal)]
    return differing


def _shape(parameter: nn.Parameter | None) -> str:
    return "none" if parameter is None else str(tuple(parameter.shape))


def _some(parameters: Iterable[str]) -> str:
    return listed(sorted(parameters), 4)
