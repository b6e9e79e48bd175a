"""Passes over data at given weights: for every batch, every tracked layer's (a, s)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from whence.data import Batches
from whence.errors import InvalidInput, NotFinite
from whence.layers.capture import LayerFactors, Tape, TrackedLayer
from whence.layers.tracked import Tracked
from whence.task import Task, Uniform

NAMES = {"loss": "loss", "measurement": "measurement", "sampled": "pseudo-loss"}


@dataclass(frozen=True)
class Signal:
    """What is differentiated: "loss", "measurement", "sampled" (pseudo-losses), or "exact".

    "exact" takes the columns of a factor of the output Hessian, one backward pass for each.
    """

    name: str
    seed: int = 0


@dataclass(frozen=True)
class BackwardPass:
    """One backward pass of one batch; only the "exact" signal has several a batch."""

    indices: np.ndarray
    first: bool
    last: bool
    layers: Iterator[tuple[TrackedLayer, list[LayerFactors]]]

    def factors(self) -> Iterator[LayerFactors]:
        """The factors of every block, in forward order."""
        for _, factors in self.layers:
            yield from factors


class Clock:
    """Wall and processor seconds by kind of work."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}
        self.cpu_seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, work: str) -> Iterator[None]:
        self._settle()
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            self._settle()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            self.seconds[work] = self.seconds.get(work, 0.0) + wall
            self.cpu_seconds[work] = self.cpu_seconds.get(work, 0.0) + cpu

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Weights(Protocol):
    """What a pass needs of a checkpoint."""

    @property
    def step(self) -> int: ...
    @property
    def sha256(self) -> str: ...
    def weights(self) -> dict[str, Tensor]: ...


class WeightLoader:
    """A model and which weights are in it; recent checkpoints are kept, within a few gigabytes."""

    KEPT = 4 * 2**30

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._current: str | None = None
        self._recent: dict[str, dict[str, Tensor]] = {}

    def load(self, checkpoint: Weights) -> None:
        """Put a checkpoint's weights into the model; refuse those of another architecture."""
        key = checkpoint.sha256
        if key == self._current:
            return
        weights = self._recent.pop(key, None) or checkpoint.weights()
        self._current = None
        load_weights(self.model, weights, checkpoint.step)
        self._current = key
        self._recent[key] = weights
        sizes = [sum(t.nbytes for t in held.values()) for held in self._recent.values()]
        while sum(sizes) > self.KEPT and sizes:
            self._recent.pop(next(iter(self._recent)))
            sizes.pop(0)


class Passes:
    """The library's own copy of a model, ready to run batches at any checkpoint's weights."""

    def __init__(
        self,
        loaded: WeightLoader,
        task: Task,
        tracked: Tracked,
        clock: Clock,
        *,
        dtype: torch.dtype,
        workers: int = 0,
        progress: bool = True,
    ) -> None:
        self.loaded, self.model = loaded, loaded.model
        self.task, self.tracked = task, tracked
        self.clock, self.device = clock, clock.device
        self.dtype, self.workers, self.progress = dtype, workers, progress
        self.step = -1  # of the weights that are loaded

    @property
    def arithmetic(self) -> str:
        """The dtype, and how products of it are rounded: scores of one kind are not continued, nor
        factors used, in another."""
        return str(self.dtype) + rounded_products(self.dtype, self.device)

    def load(self, checkpoint: Weights) -> None:
        """From now on, pass at this checkpoint's weights."""
        self.loaded.load(checkpoint)
        self.step = checkpoint.step

    def backward_passes(
        self, data: Batches, blocks: Sequence[np.ndarray], signal: Signal, label: str | None = None
    ) -> Iterator[BackwardPass]:
        """Every backward pass over these blocks of examples; a label makes a progress bar."""
        silent = label is None or not self.progress
        bar = tqdm(total=sum(map(len, blocks)), desc=label, unit="ex", disable=silent, leave=False)
        with bar:
            for indices, batch in data.stream(blocks, self.device, self.dtype, self.workers):
                yield from self._batch(data, indices, batch, signal)
                bar.update(len(indices))

    def _batch(
        self, data: Batches, indices: np.ndarray, batch: Any, signal: Signal
    ) -> Iterator[BackwardPass]:
        with torch.enable_grad(), Tape(self.model, self.tracked.layers) as tape:
            outputs = self.task.outputs(self.model, batch)
            directions: list[tuple[Tensor, Tensor | None]]
            if signal.name == "exact":
                factor = self.task.output_factor(outputs, batch)  # (n, c, k)
                columns = factor.unbind(2)
                directions = [(outputs, column.reshape(outputs.shape)) for column in columns]
            else:
                directions = [(self._values(outputs, batch, indices, signal).sum(), None)]
        for site in self.tracked.layers:
            problem = tape.problem(site, len(indices))
            if problem:
                raise InvalidInput(
                    f"layer {site.name}: {problem}. Leave it out with Study(layers=...)"
                )
        seen = [output for output, _ in directions[:1]]
        seen += [call.x for calls in tape.calls.values() for call in calls]
        mask = self.task.mask(batch)
        for k, (output, gradient) in enumerate(directions, 1):
            last = k == len(directions)
            found = tape.backward(output, gradient, mask, keep=not last)
            culprit = partial(self._culprit, data, indices, batch, signal)
            yield BackwardPass(indices, k == 1, last, self._checked(found, seen, culprit))

    def _values(self, outputs: Tensor, batch: Any, indices: np.ndarray, signal: Signal) -> Tensor:
        if signal.name == "loss":
            values = self.task.losses(outputs, batch)
        elif signal.name == "measurement":
            values = self.task.measurements(outputs, batch)
        else:
            uniform = Uniform(signal.seed, self.step, indices)
            values = self.task.pseudo_losses(outputs, batch, uniform)
        if values.shape != (len(indices),):
            raise InvalidInput(
                f"{type(self.task).__name__} returned shape {tuple(values.shape)} as the "
                f"{signal.name} of {len(indices)} examples: it must be one number per example"
            )
        return values

    @staticmethod
    def _checked(
        found: Iterator[tuple[TrackedLayer, list[LayerFactors]]],
        seen: list[Tensor],
        culprit: Callable[[], str],
    ) -> Iterator[tuple[TrackedLayer, list[LayerFactors]]]:
        """The pairs as they come, and then an error if any of them was not finite."""
        sums = [x.detach().sum() for x in seen]
        for site, pairs in found:
            sums += [pair.s.sum() for pair in pairs]
            yield site, pairs
        if not bool(torch.stack([x.float() for x in sums]).isfinite().all()):
            raise NotFinite(culprit())

    def _culprit(self, data: Batches, indices: np.ndarray, batch: Any, signal: Signal) -> str:
        """Run a bad batch again, to name the layer and the examples where it goes wrong."""
        where = f"checkpoint at step {self.step}"
        plain = Signal("loss") if signal.name == "exact" else signal
        with torch.enable_grad(), Tape(self.model, self.tracked.layers) as tape:
            outputs = self.task.outputs(self.model, batch)
            values = self._values(outputs, batch, indices, plain)
            total = values.sum()
        for site in self.tracked.layers:
            for call in tape.calls[site.name]:
                bad = ~call.x.flatten(1).isfinite().all(1)
                if bad.any():
                    return self._said(data, indices, bad, f"the input of layer {site.name}", where)
        slopes = {site.name: pairs for site, pairs in tape.backward(total)}
        for site in reversed(self.tracked.layers):  # the backward pass met the last layer first
            for pair in slopes[site.name]:
                bad = ~pair.s.flatten(1).isfinite().all(1)
                if bad.any():
                    what = f"the gradient at layer {site.name}"
                    return self._said(data, indices, bad, what, where)
        return self._said(data, indices, ~values.isfinite(), f"the {NAMES[plain.name]}", where)

    @staticmethod
    def _said(data: Batches, indices: np.ndarray, bad: Tensor, what: str, where: str) -> str:
        examples = indices[bad.cpu().numpy()]
        named = ", ".join(map(str, examples[:5])) + (", ..." if len(examples) > 5 else "")
        return (
            f"{where}: {what} is NaN or infinite for {data.name} example {named}. "
            "Mend or leave out the example; if all are affected, the checkpoint itself has diverged"
        )


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], step: int) -> None:
    """Load a checkpoint strictly, saying in plain words what does not fit."""
    own = {k: v for k, v in model.state_dict().items() if isinstance(v, Tensor)}
    held = {own[k].data_ptr() for k in own.keys() & weights.keys()}  # a tied name may be left out
    missing = sorted(k for k in own.keys() - weights.keys() if own[k].data_ptr() not in held)
    unknown = sorted(weights.keys() - own.keys())
    shapes = [
        f"{k} is {tuple(weights[k].shape)} in the checkpoint and {tuple(own[k].shape)} in the model"
        for k in own.keys() & weights.keys()
        if weights[k].shape != own[k].shape
    ]
    problems = [f"missing {', '.join(missing[:3])}"] if missing else []
    problems += [f"not in the model: {', '.join(unknown[:3])}"] if unknown else []
    problems += sorted(shapes)[:3]
    if problems:
        raise InvalidInput(
            f"the checkpoint at step {step} is of another architecture than the model: "
            + "; ".join(problems)
            + ". Give Study the model that was trained, or the run that trained it"
        )
    with torch.no_grad():
        for name in own.keys() & weights.keys():
            own[name].copy_(weights[name])


def rounded_products(dtype: torch.dtype, device: torch.device) -> str:
    """ "" if products are as exact as the dtype; else what a GPU was asked to round them to."""
    if dtype != torch.float32 or device.type != "cuda":
        return ""
    return {"high": ", TF32 products", "medium": ", bfloat16 products"}.get(
        torch.get_float32_matmul_precision(), ""
    )


@contextmanager
def products_as(precision: str) -> Iterator[None]:
    """Matrix products of float32 with `torch.set_float32_matmul_precision(precision)`."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def precision_as_asked() -> Iterator[None]:
    """No autocast around us, and convolutions in the precision the user chose for products.

    Left alone, a GPU convolves float32 in TF32 even where products are asked for in full float32.
    """
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.get_float32_matmul_precision() != "highest"
    try:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    finally:
        torch.backends.cudnn.allow_tf32 = before
