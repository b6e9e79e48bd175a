"""Passes over data at given weights: for every batch, every tracked layer's (a, s)."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from whence.data import Batches, cut, place
from whence.errors import InvalidInput, InvalidTarget, NotFinite, examples_of
from whence.layers.aligned import AlignedProducts
from whence.layers.capture import LayerFactors, Tape
from whence.layers.kind import TrackedLayer
from whence.layers.separate import REDRAWS, Separation, sketch
from whence.layers.tracked import Tracked
from whence.persist.cache import Tried, Version
from whence.progress import counted
from whence.table import listed
from whence.task import Task, Uniform
from whence.world import World

LOSSES, MEASUREMENTS, OUTPUTS = "losses", "measurements", "outputs"  # what is tried
#: how far two computations of the same loss may differ, relative to the largest output
TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-5}
ROUNDED_TOLERANCE = 2e-2  # with bfloat16 or TF32 products
COMPARED_EXAMPLES = 64  # examples of a real batch, at most, that are compared in a smaller one
COMPARED_SIZES = 3  # sizes of batches that are compared with examples alone, per dataset and signal
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
    """One backward pass of one batch; only the "exact" signal has several per batch."""

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
    """The part of a checkpoint that a pass needs."""

    @property
    def step(self) -> int: ...
    @property
    def sha256(self) -> str: ...
    def weights(self) -> dict[str, Tensor]: ...
    def opened(self) -> Mapping[str, Tensor]: ...


class WeightLoader:
    """Loads checkpoints into a model, and caches the most recent ones in memory."""

    CACHE_BYTES = 4 * 2**30
    GPU_SHARE = 16  # of this many parts of a GPU's memory, cached weights take one at most

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
        self._recent[key] = self._loaded(weights)
        sizes = [sum(t.nbytes for t in cached.values()) for cached in self._recent.values()]
        while sum(sizes) > self.CACHE_BYTES and sizes:
            self._recent.pop(next(iter(self._recent)))
            sizes.pop(0)

    def _loaded(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weights as the model on a GPU has them, from which the next load is a copy there; on
        the CPU, or where they take much of the GPU's memory, as they are."""
        state = self.model.state_dict()
        there = {k: state[k] for k, x in weights.items() if state[k].is_cuda and not x.is_cuda}
        recent = [x for cached in self._recent.values() for x in cached.values() if x.is_cuda]
        size = sum(tensor.nbytes for tensor in [*recent, *there.values()])
        if not there or size * self.GPU_SHARE > torch.cuda.mem_get_info()[1]:
            return weights
        return weights | {name: tensor.clone() for name, tensor in there.items()}

    def keep_whole(self) -> None:
        """From now on, hold all weights of the model at once, as this loader always does."""


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
        self.step, self.sha256 = -1, ""  # of the loaded weights
        self.watched: dict[str, tuple[Batches, Version]] = {}  # losses to note, by weights
        self._tried: dict[tuple[str, str, str], Tensor] = {}
        self._compared: dict[tuple[int, str], set[int]] = {}  # sizes, by id of dataset and signal

    @property
    def arithmetic(self) -> str:
        """The dtype and the rounding of its products. Scores and factors computed with one are not
        resumed or reused with another."""
        return str(self.dtype) + rounded_products(self.dtype, self.device)

    def load(self, checkpoint: Weights) -> None:
        """Use this checkpoint's weights in the following passes."""
        self.loaded.load(checkpoint)
        self.step, self.sha256 = checkpoint.step, checkpoint.sha256

    # -- what model and task compute for every example --------------------------------------------
    # Factors, scores and stored gradients are reused only where the losses of all examples are
    # what they were. A forward pass is cheap compared with a wrong result.

    @property
    def tolerance(self) -> float:
        """How far two computations of the same loss may differ, relative to the outputs."""
        exact = not rounded_products(self.dtype, self.device)
        return TOLERANCES.get(self.dtype, ROUNDED_TOLERANCE) if exact else ROUNDED_TOLERANCE

    def knows(self, data: Batches, checkpoint: Weights, what: str) -> bool:
        """Whether these values have been tried."""
        return (data.fingerprint(), checkpoint.sha256, what) in self._tried

    def tried(self, data: Batches, checkpoint: Weights, what: str, batch_size: int) -> Tried:
        """Losses, measurements or outputs of all the data at these weights, computed once."""
        trial = data.fingerprint(), checkpoint.sha256, what
        if trial not in self._tried:
            world, rows = World.current(), []
            share = world.deal(np.arange(len(data)))
            blocks = [share[block] for block in cut(len(share), batch_size)]
            with self.clock("trial"), torch.no_grad():
                self.load(checkpoint)
                for block, batch in data.stream(blocks, self.device, self.dtype, self.workers):
                    with examples_of(data.name, block):
                        outputs = self._outputs(batch)
                        rows.append(self._summary(outputs, batch, what))
                self._tried[trial] = world.regather(torch.cat(rows).cpu(), len(data))
        name = f"{what} of {data.name}, step {checkpoint.step}"
        return Tried({name: self._tried[trial]}, self.tolerance)

    def _outputs(self, batch: Any) -> Tensor:
        with AlignedProducts() if self.device.type == "cuda" else nullcontext():
            return self.task.outputs(self.model, batch)

    def _summary(self, outputs: Tensor, batch: Any, what: str) -> Tensor:
        """Losses or measurements, root mean square and maximum of the outputs, (n, 3)."""
        flat = outputs.reshape(len(outputs), -1)
        wide = torch.promote_types(flat.dtype, torch.float32)
        size = torch.linalg.vector_norm(flat, dim=1, dtype=wide) / flat.shape[1] ** 0.5
        least, most = flat.aminmax(dim=1)
        values = size if what == OUTPUTS else getattr(self.task, what)(outputs, batch).to(wide)
        return torch.stack([values, size, torch.maximum(most, -least).to(wide)], 1)

    def _watch(self, data: Batches, indices: np.ndarray, outputs: Tensor, batch: Any) -> None:
        """Note losses that were not known when the weights were loaded."""
        expected, version = self.watched[self.sha256]
        where = torch.from_numpy(np.asarray(indices, np.int64))
        if expected is data and not bool(version.seen[where].all()):
            with torch.no_grad():
                version.add(where, self._summary(outputs, batch, LOSSES))

    # -- backward passes ---------------------------------------------------------------------------

    def backward_passes(
        self,
        data: Batches,
        blocks: Sequence[np.ndarray],
        signal: Signal,
        label: str | None = None,
        needed: Collection[str] | None = None,
    ) -> Iterator[BackwardPass]:
        """Every backward pass over these blocks of examples; a label shows a progress bar.

        Args:
            needed: the parameter blocks whose factors are (None: all); others may come too.
        """
        batches = data.stream(blocks, self.device, self.dtype, self.workers)
        if label is not None and self.progress:
            batches = counted(batches, sum(map(len, blocks)), label)
        for indices, batch in batches:
            yield from self._batch(data, indices, batch, signal, needed)

    def _batch(
        self,
        data: Batches,
        indices: np.ndarray,
        batch: Any,
        signal: Signal,
        needed: Collection[str] | None = None,
    ) -> Iterator[BackwardPass]:
        named, layers = examples_of(data.name, indices), self.tracked.layers
        if needed is not None and not self._compares(data, indices, signal):
            layers = tuple(x for x in layers if any(b.name in needed for b in x.blocks))
        tape = Tape(self.model, layers, len(indices), self.task.rows(batch))
        with torch.enable_grad(), named, tape:
            outputs = self._outputs(batch)
            if self.sha256 in self.watched:
                self._watch(data, indices, outputs.detach(), batch)
            directions: list[tuple[Tensor, Tensor | None]]
            if signal.name == "exact":
                factor = self.task.output_factor(outputs, batch)  # (n, c, k)
                columns = factor.unbind(2)
                directions = [(outputs, column.reshape(outputs.shape)) for column in columns]
            else:
                values = self._values(outputs, batch, indices, signal)
                directions = [(values.sum(), None)]
        compares = self._compares(data, indices, signal)
        alone = self._alone(data, indices, values, signal) if compares else {}
        tape.check()
        seen = [output for output, _ in directions[:1]]
        seen += [call.x for calls in tape.calls.values() for call in calls]
        mask = self.task.mask(batch)
        for k, (output, gradient) in enumerate(directions, 1):
            last = k == len(directions)
            factors = tape.backward(output, gradient, mask, keep=not last)
            diagnosis = partial(self._diagnosis, data, indices, batch, signal)
            checked = self._checked(factors, seen, diagnosis)
            if alone:
                checked = self._separate(checked, data, indices, alone)
            yield BackwardPass(indices, k == 1, last, checked)

    def _compares(self, data: Batches, indices: np.ndarray, signal: Signal) -> bool:
        """Whether some examples of this batch are to be compared with them alone."""
        sizes = self._compared.setdefault((id(data), signal.name), set())
        known = len(indices) < 2 or len(indices) in sizes or len(sizes) == COMPARED_SIZES
        return signal.name != "exact" and not known

    def _alone(
        self, data: Batches, indices: np.ndarray, values: Tensor, signal: Signal
    ) -> dict[int, Tensor]:
        """Compare values of the first real batch of every size with those of some of its examples
        alone. Returns the sketches of these examples' gradients, by place in the batch."""
        values = values.detach()
        self._compared[id(data), signal.name].add(len(indices))
        if not bool(values.isfinite().all()):
            return {}  # which is reported later, with the layer
        separation, drawn = self._separation(data), signal.name == "sampled"
        sketches: dict[int, Tensor] = {}
        checked = {0, int(values.argmin()), int(values.argmax()), len(indices) - 1}

        def redrawn(k: int) -> tuple[Tensor, Tensor]:
            seeds = range(signal.seed + 1, signal.seed + 1 + REDRAWS)
            return computed(indices[k : k + 1], *seeds)[:, 0], computed(indices, *seeds)[:, k]

        def computed(examples: np.ndarray, *seeds: int) -> Tensor:
            """(seeds, n)"""
            batch = place(data.take(examples.tolist()), self.device, self.dtype)
            with torch.no_grad():
                outputs = self.task.outputs(self.model, batch)
                signals = [replace(signal, seed=seed) for seed in seeds]
                return torch.stack([self._values(outputs, batch, examples, s) for s in signals])

        def alone(index: int) -> Tensor:
            example = np.array([index])
            if drawn:  # the gradient of another draw would be another one
                return computed(example, signal.seed)[0, 0]
            value = partial(self._values, indices=example, signal=signal)
            values, sketches[index] = separation.gradients(self.tracked.layers, [index], value)
            return values[0]

        count = min(COMPARED_EXAMPLES, len(indices) // 2)
        few = np.linspace(0, len(indices) - 1, count).astype(np.int64)
        if len(few) > 2:  # in another batch: of those that change, one is looked at alone
            with examples_of(data.name, indices[few]):
                fewer = computed(indices[few], signal.seed)[0]
            checked |= set(few[separation.differ(fewer, values[few]).cpu().numpy()][:1].tolist())
        again = redrawn if drawn else None
        separation.compare(indices, values, sorted(checked), alone, NAMES[signal.name], again)
        return {k: sketches[int(indices[k])][0] for k in sorted(checked) if not drawn}

    def _separate(
        self,
        layers: Iterator[tuple[TrackedLayer, list[LayerFactors]]],
        data: Batches,
        indices: np.ndarray,
        alone: Mapping[int, Tensor],
    ) -> Iterator[tuple[TrackedLayer, list[LayerFactors]]]:
        """Pass every layer's factors on, then raise an error if the gradients of some examples are
        not those of the examples alone."""
        parts, rows = [], torch.tensor(list(alone), device=self.device)
        for seed, (layer, blocks) in enumerate(layers):
            parts += [sketch(factors, seed, rows) for factors in blocks]
            yield layer, blocks
        separation, together = self._separation(data), torch.cat(parts, 1)
        for k, row in zip(alone, together, strict=True):
            separation.compare_gradients(self.tracked.layers, indices, k, row, alone[k])

    def _separation(self, data: Batches) -> Separation:
        rounded = bool(rounded_products(self.dtype, self.device))
        return Separation(self.model, self.task, data, self.device, self.dtype, rounded)

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
        layers: Iterator[tuple[TrackedLayer, list[LayerFactors]]],
        seen: list[Tensor],
        diagnosis: Callable[[], str],
    ) -> Iterator[tuple[TrackedLayer, list[LayerFactors]]]:
        """Pass every layer's factors on, then raise an error if any of them was not finite."""
        sums = [x.detach().sum() for x in seen]
        for layer, blocks in layers:
            sums += [factors.slopes.sum() for factors in blocks]
            yield layer, blocks
        if not bool(torch.stack([x.float() for x in sums]).isfinite().all()):
            raise NotFinite(diagnosis())

    def _diagnosis(self, data: Batches, indices: np.ndarray, batch: Any, signal: Signal) -> str:
        """Run a bad batch again, and name the first layer and examples that are not finite."""
        plain = Signal("loss") if signal.name == "exact" else signal
        tape = Tape(self.model, self.tracked.layers, len(indices), self.task.rows(batch))
        with torch.enable_grad(), tape:
            outputs = self.task.outputs(self.model, batch)
            self._check_targets(data, indices, outputs, batch)
            values = self._values(outputs, batch, indices, plain)
            total = values.sum()
        for layer in self.tracked.layers:
            for call in tape.calls[layer.name]:
                bad = ~call.x.reshape(len(indices), -1).isfinite().all(1)
                if bad.any():
                    return self._not_finite(data, indices, bad, f"the input of layer {layer.name}")
        slopes = {layer.name: blocks for layer, blocks in tape.backward(total)}
        for layer in reversed(self.tracked.layers):  # the backward pass met the last layer first
            for factors in slopes[layer.name]:
                bad = ~factors.slopes.flatten(1).isfinite().all(1)
                if bad.any():
                    what = f"the gradient at layer {layer.name}"
                    return self._not_finite(data, indices, bad, what)
        return self._not_finite(data, indices, ~values.isfinite(), f"the {NAMES[plain.name]}")

    def _check_targets(
        self, data: Batches, indices: np.ndarray, outputs: Tensor, batch: Any
    ) -> None:
        """Raise an error that names a wrong target. On a GPU, a task cannot read targets."""
        cpu = torch.device("cpu")
        try:
            with examples_of(data.name, indices):
                self.task.losses(outputs.detach().to(cpu), place(batch, cpu, self.dtype))
        except InvalidTarget:
            raise
        except Exception:  # a task whose own tensors are on the device
            return

    def _not_finite(self, data: Batches, indices: np.ndarray, bad: Tensor, what: str) -> str:
        examples = listed(indices[bad.cpu().numpy()])
        return (
            f"checkpoint at step {self.step}: {what} is NaN or infinite for {data.name} example "
            f"{examples}. Correct or leave out the example; if all are affected, the checkpoint "
            "itself has diverged"
        )


def load_weights(
    model: nn.Module, weights: Mapping[str, Tensor], step: int, later: Collection[str] = ()
) -> None:
    """Load a checkpoint strictly; an error names what does not fit.

    Args:
        later: parameters that are checked, but not loaded.
    """
    state = {k: v for k, v in model.state_dict().items() if isinstance(v, Tensor)}
    shared = state.keys() & weights.keys()
    loaded = {state[k].data_ptr() for k in shared}  # of tied weights, one name is enough
    missing = sorted(k for k in state.keys() - shared if state[k].data_ptr() not in loaded)
    unknown = sorted(weights.keys() - state.keys())
    shapes = [
        f"{k} is {tuple(weights[k].shape)} in the checkpoint and "
        f"{tuple(state[k].shape)} in the model"
        for k in shared
        if weights[k].shape != state[k].shape
    ]
    problems = [f"missing {listed(missing, 3)}"] if missing else []
    problems += [f"not in the model: {listed(unknown, 3)}"] if unknown else []
    problems += sorted(shapes)[:3]
    if problems:
        raise InvalidInput(
            f"the checkpoint at step {step} is of another architecture than the model: "
            + "; ".join(problems)
            + ". Give Study the model that was trained, or the run that trained it"
        )
    kinds = model.named_parameters, model.named_buffers
    backed = {name for named in kinds for name, _ in named(remove_duplicate=False)}
    for name in sorted(shared - backed):  # what a module only shows, such as a quantized one
        if not torch.equal(state[name].cpu(), weights[name].to("cpu", state[name].dtype)):
            raise InvalidInput(
                f"{name} of the checkpoint at step {step} differs from the model's, and cannot be "
                "loaded into it: it belongs to a quantized or otherwise packed weight. Give Study "
                "the model with the same base, quantized in the same way"
            )
    with torch.no_grad():
        for name in (shared & backed) - set(later):
            state[name].copy_(weights[name])


def rounded_products(dtype: torch.dtype, device: torch.device) -> str:
    """ "" if products are as exact as the dtype; else the precision set for the GPU."""
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
def precision_as_asked(dtype: torch.dtype = torch.float32) -> Iterator[None]:
    """Disable autocast, and run convolutions in the precision the user chose for products.

    By default a GPU convolves float32 in TF32, even where products are in full float32. Where the
    model computes in bfloat16, float32 products (of query vectors) are rounded to TF32: what they
    multiply has fewer digits.
    """
    before, precision = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    torch.backends.cudnn.allow_tf32 = precision != "highest"
    if dtype.itemsize < 4 and precision == "highest":
        precision = "high"
    try:
        with (
            products_as(precision),
            torch.autocast("cpu", enabled=False),
            torch.autocast("cuda", enabled=False),
        ):
            yield
    finally:
        torch.backends.cudnn.allow_tf32 = before
