"""What an attribution would take, before training: hours, memory, network, disk.

    from whence.engine.estimate import estimate

    plan = estimate(model, whence.LanguageModeling(), batch, whence.Source(), examples=1_000_000,
                    queries=100, gpus=8, gpu="h100", dtype="bfloat16")
    print(plan)

The model may be on the meta device, without weights. The counts are those of the estimate before
every attribution (`engine/costs.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, Protocol

import torch
from torch import nn

from whence.data import batch_length
from whence.engine.costs import (
    EIGEN_SHARE,
    SIDE_SECONDS,
    Cost,
    Machine,
    Workload,
)
from whence.engine.dynamics import PRECONDITIONED
from whence.engine.workspace import FACTOR_SHARE, MEMORY_SHARE, Outline, Term
from whence.errors import InvalidInput, check_choice, check_count, examples_of
from whence.layers.choose import Chooser, chooser
from whence.layers.kind import ParameterBlock
from whence.layers.tracked import Tracked, Updates, find
from whence.operators import cost
from whence.operators.fit import exchanged_batch
from whence.run import Run
from whence.table import Table, byte_size, duration
from whence.task import Task

DTYPES = {"float32": torch.float32, "tf32": torch.float32, "bfloat16": torch.bfloat16}
SHARE_OF_PEAK = 0.78  # of it, what a large product attains (an H200, every dtype)
GB = 1e9


@dataclass(frozen=True)
class Gpu:
    """A GPU by its data sheet.

    Attributes:
        float32, tf32, bfloat16: dense products, in 10¹² operations per second.
        bandwidth: of its memory, in 10¹² bytes per second.
        memory: in 10⁹ bytes.
        network: to other GPUs, in 10⁹ bytes per second.
    """

    float32: float
    tf32: float
    bfloat16: float
    bandwidth: float
    memory: float
    network: float = 50.0

    def machine(self, dtype: str) -> Machine:
        single, rate = (1e12 * SHARE_OF_PEAK * x for x in (self.float32, getattr(self, dtype)))
        return Machine(
            rate,
            self.bandwidth * 1e12,
            self.memory * GB,
            self.network * GB,
            EIGEN_SHARE * single,
            SIDE_SECONDS,
        )


GPUS = {
    "b200": Gpu(80, 1125, 2250, 8.0, 180),
    "h200": Gpu(67, 494, 989, 4.8, 141),
    "h100": Gpu(67, 494, 989, 3.35, 80),
    "a100": Gpu(19.5, 156, 312, 2.04, 80),
    "a100-40gb": Gpu(19.5, 156, 312, 1.56, 40),
    "l40s": Gpu(91.6, 183, 362, 0.864, 48),
    "rtx4090": Gpu(82.6, 82.6, 165, 1.01, 24),
    "a10g": Gpu(31.2, 35, 70, 0.6, 24),
    "mi300x": Gpu(163, 653, 1307, 5.3, 192),
}


class Method(Protocol):
    """What `estimate` asks of a method."""

    default_layers: Chooser | None

    def terms(self, workspace: Outline) -> list[Term]: ...

    def counted(self, work: Workload) -> Cost: ...


@dataclass(frozen=True)
class Estimate:
    """What an attribution would take.

    Attributes:
        seconds: by kind of work, of one GPU.
        memory: bytes on each GPU, by what they are for.
        available: bytes that a GPU has.
        network: bytes that each GPU receives.
        disk: bytes, by what they are for.
        passes: over the data, of each kind.
        query_passes: over the queries.
        operations: of all GPUs.
        batch_size: examples per pass, of one GPU.
        fixes: changes of settings that would make it fit, alone or together.
        faster: changes of settings that would save a third of the time or more, and the hours then.
    """

    seconds: Mapping[str, float]
    memory: Mapping[str, float]
    available: float
    network: float
    disk: Mapping[str, float]
    passes: Mapping[str, int]
    query_passes: int
    operations: float
    batch_size: int
    fixes: tuple[str, ...] = ()
    faster: Mapping[str, float] = field(default_factory=dict)

    @property
    def hours(self) -> float:
        return sum(self.seconds.values()) / 3600

    @property
    def fits(self) -> bool:
        return sum(self.memory.values()) <= self.available

    @property
    def limit(self) -> str:
        """What takes most of the memory, if it does not fit; else what takes most of the time."""
        parts = self.seconds if self.fits else self.memory
        name = max(parts, key=lambda k: parts[k])
        share = parts[name] / (sum(parts.values()) or 1.0)
        if self.fits:
            return f"time: {name} ({share:.0%})"
        return f"memory: {name} ({share:.0%} of {byte_size(sum(parts.values()))})"

    def table(self) -> Table:
        total = sum(self.memory.values())
        rows = [
            ("time", duration(3600 * self.hours) + _parts(self.seconds, duration)),
            ("memory per GPU", byte_size(total) + _parts(self.memory, byte_size)),
            ("network, received per GPU", byte_size(self.network)),
            ("disk", byte_size(sum(self.disk.values())) + _parts(self.disk, byte_size)),
            ("operations", f"{self.operations:.2g}, in batches of {self.batch_size} per GPU"),
            ("passes over the data", f"{sum(self.passes.values())}" + _parts(self.passes, str)),
            ("passes over the queries", f"{self.query_passes}"),
            ("limited by", self.limit),
            ("fits", "yes" if self.fits else f"no: a GPU has {byte_size(self.available)}"),
        ]
        if not self.fits:
            more = "no setting is enough: use GPUs with more memory, or a smaller model"
            rows.append(("to make it fit", " and ".join(self.fixes) or more))
        if self.faster:
            changes = (f"{name} ({duration(3600 * hours)})" for name, hours in self.faster.items())
            rows.append(("faster", ", ".join(changes)))
        return Table(None, rows)

    def __str__(self) -> str:
        return str(self.table())


def _parts(parts: Mapping[str, Any], text: Any) -> str:
    largest = sorted(parts.items(), key=lambda item: -item[1])
    return f" ({', '.join(f'{name} {text(value)}' for name, value in largest if value)})"


@dataclass(frozen=True)
class _Plan:
    """The settings of an estimate, some of which may be changed to make it fit."""

    tracked: Tracked
    method: Method
    run: Run
    examples: int
    queries: int | None
    gpus: int
    gpu: Gpu
    precision: str
    batch_size: int | None
    query_rank: int | str | None
    top: int | None
    sharded: bool
    optimizer: str

    # what decides the terms of a method: a run of one stage
    @property
    def stages(self) -> list[str]:
        return [stage.name for stage in self.run.stages]

    @property
    def blocks(self) -> dict[str, ParameterBlock]:
        return {block.name: block for block in self.tracked.blocks}

    @property
    def positions(self) -> dict[str, int]:
        return {block.name: self.tracked.positions[block.name] for block in self.tracked.blocks}

    @property
    def machine(self) -> Machine:
        return self.gpu.machine(self.precision)

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.precision]

    @property
    def memory(self) -> int:
        return int(MEMORY_SHARE["cuda"] * self.machine.memory)

    def workload(self) -> Workload:
        terms = self.method.terms(self)
        checkpoints = sum(len(term.checkpoints) for term in terms)
        batch = self.batch_size or cost.batch_size_for(
            self.tracked, self.dtype, "cuda", self.memory
        )
        return Workload(
            self.tracked,
            self.examples,
            self.examples,
            self.queries,
            len(terms),
            checkpoints,
            checkpoints,
            min(batch, -(-self.examples // self.gpus)),
            self.memory,
            int(FACTOR_SHARE["cuda"] * self.memory),
            self.dtype,
            self.query_rank,
            self.gpus,
            self._preconditioned,
        )

    @property
    def _preconditioned(self) -> bool:
        return self.optimizer in PRECONDITIONED

    def estimate(self) -> Estimate:
        work = self.workload()
        counts = self.method.counted(work)
        network = self._network(work, counts)
        seconds = {k: s / self.gpus for k, s in self.machine.seconds(counts).items()}
        if network:
            seconds["network"] = network / self.machine.network
        size, tracked = self.dtype.itemsize, self.tracked
        batch = work.batch_size * cost.per_example_numbers(tracked) * size
        weights = tracked.parameters * size
        memory = {
            "weights": weights / (self.gpus if self.sharded else 1),
            "batch": batch,
            "factors": work.accumulator.itemsize * counts.fitted_numbers,
            "query vectors": work.accumulator.itemsize * counts.vector_numbers,
            "rates": work.accumulator.itemsize * counts.rate_numbers,
        }
        if self.sharded:
            memory["gathered layer"] = 2 * size * max(b.size for b in tracked.blocks)
        scored = self.queries or 1
        scores = 4 * scored * self.examples if self.top is None else 24 * scored * self.top
        factors = 4 * cost.factor_numbers(tracked) * work.terms
        checkpoints = len(self.run.checkpoints) + 1
        disk = {
            "checkpoints": 4.0 * checkpoints * tracked.parameters * (1 + self._preconditioned),
            "factors": float(factors) if counts.sides else 0.0,
            "scores": float(scores),
        }
        return Estimate(
            seconds,
            memory,
            self.machine.memory,
            network,
            disk,
            counts.passes,
            counts.query_passes,
            sum(counts.operations.values()),
            work.batch_size,
        )

    def _network(self, work: Workload, counts: Cost) -> float:
        """Bytes that a GPU receives: see the table of docs/distributed.md."""
        if self.gpus == 1:
            return 0.0
        tracked, size = self.tracked, work.accumulator.itemsize
        bases = cost.factor_numbers(tracked) - cost.vector_numbers(tracked)
        received, chosen = 0.0, counts.low_rank
        # how often the ranks ask for all factors; in self-influence, each for its own examples
        times, asked = 1, work.queries or work.examples
        if chosen is not None or work.queries is None:
            times = -(-asked // (counts.together * self.gpus))
        if counts.sides:  # sums to owners, bases to all, factors to where queries are
            share = 1 / self.gpus
            fitted = counts.passes["covariances"] + counts.passes.get("eigenvalues", 0)
            exchanges = 1.0
            if work.divided:  # with every batch
                batch = exchanged_batch(work.batch_size, tracked)
                exchanges = max(1.0, work.trained / self.gpus / batch)
                share = 1.0
            received += size * exchanges * (share * bases * fitted / 2 + bases * fitted / 2)
            received += size * cost.factor_numbers(tracked) * work.terms * times
        rank = None if chosen is None else chosen.rank
        vector = sum(cost.low_rank_numbers(block, rank) for block in tracked.blocks)
        received += size * work.terms * work.asked * vector
        if self.sharded:  # weights come forward and backward with every batch
            batches = sum(counts.passes.values()) * work.examples / self.gpus / work.batch_size
            every = max(1.0, batches) + times * counts.query_passes
            received += 2 * self.dtype.itemsize * tracked.parameters * every
        return received

    def changes(self) -> dict[str, dict[str, Any]]:
        """Settings that take less memory, those that cost least first."""
        layers = self.tracked.layers
        last = replace(self.tracked, layers=layers[-max(1, len(layers) // 4) :])
        changes: dict[str, dict[str, Any]] = {
            "query_rank='auto'": {"query_rank": "auto"} if self.queries else {},
            "dtype bfloat16": {"precision": "bfloat16"},
            "batch_size=1": {"batch_size": 1},
            "a model sharded by FSDP2": {"sharded": self.gpus > 1},
            "Study(layers=...) with only the last quarter of the layers": {"tracked": last},
        }
        return {
            name: change
            for name, change in changes.items()
            if any(getattr(self, key) != value for key, value in change.items())
        }


def fixes(plan: _Plan) -> tuple[str, ...]:
    """The fewest changes that make it fit; none if all of them do not."""
    changes = plan.changes()
    for count in range(1, len(changes) + 1):
        for names in combinations(changes, count):
            changed = replace(plan, **{k: v for name in names for k, v in changes[name].items()})
            if changed.estimate().fits:
                return names
    return ()


def faster(plan: _Plan, hours: float) -> dict[str, float]:
    """Changes that leave the question as it is and save a third of the time, and the hours then."""
    changes = plan.changes()
    changed = {
        name: replace(plan, **changes[name]).estimate()
        for name in ("query_rank='auto'", "dtype bfloat16")
        if name in changes
    }
    return {name: x.hours for name, x in changed.items() if x.fits and x.hours < 2 / 3 * hours}


def estimate(
    model: nn.Module,
    task: Task,
    batch: Any,
    method: Method,
    *,
    examples: int,
    queries: int | None = 100,
    checkpoints: int = 6,
    gpus: int = 1,
    gpu: str | Gpu = "h100",
    dtype: str = "float32",
    batch_size: int | None = None,
    query_rank: int | str | None = None,
    top: int | None = None,
    sharded: bool = False,
    optimizer: str = "sgd",
    layers: Sequence[str] | str | Chooser | None = None,
    trained: Any = None,
) -> Estimate:
    """What attributing with this model would take.

    Args:
        model: on any device; on the meta device it needs no weights.
        batch: two examples, built like those of the training data, on the model's device.
        examples: in the training data.
        queries: None for self-influence.
        checkpoints: that the run has.
        gpus, gpu: how many, and which: a name in `GPUS`, or a `Gpu`.
        dtype: "float32", "tf32" (TF32 products) or "bfloat16".
        batch_size: examples per pass (default: as many as fit).
        query_rank, top: as in `attribute`.
        sharded: whether the model is divided among the GPUs (FSDP2).
        optimizer: that trains: "sgd", or an Adam-type one, for which SOURCE and influence take
            more time, and checkpoints twice the disk.
        layers: which to track, as in `Study`.
        trained: whether training moves the parameter of this name (default: `requires_grad`).
    """
    for name, value in {"examples": examples, "gpus": gpus, "checkpoints": checkpoints}.items():
        check_count(name, value)
    for name, count in {"queries": queries, "batch_size": batch_size, "top": top}.items():
        if count is not None:
            check_count(name, count)
    check_choice("dtype", dtype, DTYPES)
    if isinstance(gpu, str):
        if gpu.lower() not in GPUS:
            raise InvalidInput(
                f"gpu={gpu!r} is not known: use one of {', '.join(GPUS)}, or give its rate, "
                "bandwidth and memory"
            )
        gpu = GPUS[gpu.lower()]
    if sharded and gpus == 1:
        raise InvalidInput("sharded=True with gpus=1: a model is divided among several GPUs")
    if (length := batch_length(batch)) < 1:
        raise InvalidInput("the batch is empty: give two examples")
    moved = {name for name, p in model.named_parameters() if p.requires_grad}
    choose = chooser(layers) or method.default_layers
    with examples_of("batch", range(length)):
        updates = Updates(trained or moved.__contains__)
        tracked = find(model.eval(), task, batch, choose, updates)
    steps = list(range(1, checkpoints + 1))
    run = Run.from_checkpoints([{"w": torch.zeros(1)}] * checkpoints, steps, 0.1)
    plan = _Plan(
        tracked,
        method,
        run,
        examples,
        queries,
        gpus,
        gpu,
        dtype,
        batch_size,
        query_rank,
        top,
        sharded,
        check_choice("optimizer", optimizer, ["sgd", *sorted(PRECONDITIONED)]),
    )
    result = plan.estimate()
    if not result.fits:
        return replace(result, fixes=fixes(plan))
    return replace(result, faster=faster(plan, result.hours))
