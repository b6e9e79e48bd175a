"""One run of a study laid out on a device: its data, passes, curvature and query vectors; and the
options that say how to compute."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whence.data import Batches, cut
from whence.engine.ledger import Ledger
from whence.engine.queries import Queries, QuerySet
from whence.errors import InvalidIndex, InvalidInput, finite, whole
from whence.layers.choose import Chooser
from whence.layers.kind import ParameterBlock
from whence.layers.passes import LOSSES, MEASUREMENTS, OUTPUTS, Passes, Signal, Weights
from whence.operators import (
    KINDS,
    Basis,
    BlockDiagonal,
    BlockSpace,
    FitData,
    Fitter,
    GaussNewton,
    Operator,
    accumulator,
    cost,
)
from whence.persist.cache import Tried, Version
from whence.persist.identity import sha256_of
from whence.run import Run, Segment
from whence.study import Scope, Study, model_identity, task_identity
from whence.table import byte_size, listed
from whence.world import World

if TYPE_CHECKING:
    from whence.engine.projected_space import Space
    from whence.engine.scoring import Scoring

MEMORY_SHARE = {"cpu": 0.4, "cuda": 0.6}  # of all memory: a CPU's is shared with everything else
FACTOR_SHARE = {"cuda": 0.5}  # of the allowed memory, for factors. A CPU has no other place
CHUNKS_PER_RANK = 4  # at least, so that all have about the same work
GAUSS_NEWTON = "gauss-newton"
VECTORS = 3  # sets of whole query vectors: a term's, and two on the way to the next
LOSS, MEASUREMENT = Signal("loss"), Signal("measurement")


class Options(TypedDict, total=False):
    """`ComputeOptions` as keyword arguments."""

    device: torch.device | str | None
    dtype: torch.dtype
    batch_size: int | None
    memory: int | str | None
    progress: bool
    workers: int


@dataclass(frozen=True)
class ComputeOptions:
    """Where and how to compute.

    Attributes:
        device: default: where the model is.
        dtype: float32, float64, or bfloat16 for the products (sums stay in float32).
        batch_size: examples per pass (default: chosen from memory). No score depends on it.
        memory: what may be used, in bytes or like "8GB" (default: 40 % of the machine's, 60 % of a
            GPU's).
        progress: show progress bars and an estimate before long work.
        workers: processes that load data.
    """

    device: torch.device | str | None = None
    dtype: torch.dtype = torch.float32
    batch_size: int | None = None
    memory: int | str | None = None
    progress: bool = True
    workers: int = 0

    def __post_init__(self) -> None:
        if self.batch_size is not None:
            whole("batch_size", self.batch_size, 1)
        whole("workers", self.workers, 0)
        if not isinstance(self.dtype, torch.dtype) or not self.dtype.is_floating_point:
            raise InvalidInput(f"dtype={self.dtype!r} must be a dtype such as torch.float32")
        if self.device is not None:
            check_device(self.device)


@dataclass(frozen=True)
class Term:
    """Checkpoints whose training gradients are multiplied by the same vectors."""

    stage: str
    checkpoints: Sequence[Weights]
    segment: Segment | None = None  # that they belong to


class Outline(Protocol):
    """The part of a workspace that decides a method's terms."""

    @property
    def run(self) -> Run: ...

    @property
    def stages(self) -> list[str]: ...

    @property
    def blocks(self) -> dict[str, ParameterBlock]: ...

    @property
    def positions(self) -> dict[str, int]: ...


@dataclass(frozen=True, eq=False)
class Columns:
    """A chunk of examples: indices in the dataset of a stage, and columns of the score matrix."""

    stage: str
    indices: NDArray[np.int64]
    place: slice


@dataclass
class Workspace:
    """One run of a study, ready for work on one device.

    Attributes:
        query: None for self-influence.
        stages: whose examples are scored.
        passes: of each stage.
        memory: bytes that this process may use.
        room: bytes on the device for factors; None for as many as they need.
        chosen: the examples that are scored, by stage; None for all.
        world: the processes that share the work.
        in_step: whether all of them compute the vectors of all queries together, because that takes
            passes over the data; otherwise queries are dealt.
        ledger: diagnostics and warnings that are stored with the scores.
        final_passes: of the last stage, as are `tracked`, `clock`, `progress`, `device`, `dtype`.
        layers, blocks: of all stages.
        positions: t of every block.
        examples: how many are scored.
    """

    study: Study
    run: Run
    query: QuerySet | None
    stages: list[str]
    passes: dict[str, Passes]
    batch_size: int
    memory: int
    room: int | None = None
    chosen: Mapping[str, NDArray[np.int64]] | None = None
    world: World = field(default_factory=World)
    in_step: bool = False
    ledger: Ledger = field(default_factory=Ledger)
    _tokens: dict[tuple[Any, ...], str] = field(default_factory=dict)  # of `losses`

    reads_training_data: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.final_passes = last = self.passes[self.study.stages[-1]]
        self.tracked, self.clock, self.progress = last.tracked, last.clock, last.progress
        self.device, self.dtype = last.device, last.dtype
        self.accumulator = accumulator(last.dtype)  # the dtype of vectors and sums
        of_stages = [passes.tracked for passes in self.passes.values()]
        # where several stages have a layer, the last stage's
        layers = {layer.name: layer for tracked in of_stages for layer in reversed(tracked.layers)}
        self.layers = list(layers.values())
        self.blocks = {block.name: block for layer in self.layers for block in layer.blocks}
        self.positions = {name: t for tracked in of_stages for name, t in tracked.positions.items()}
        self.examples = sum(len(self.scored(stage)) for stage in self.stages)

    @property
    def preconditioned(self) -> bool:
        """Whether gradients are multiplied by P̄^½ already."""
        return False

    @classmethod
    def lay_out(
        cls,
        study: Study,
        run: Run,
        options: ComputeOptions,
        *,
        query: QuerySet | None = None,
        stage: str | None = None,
        scope: Scope = "query",
        quiet: bool = False,
        layers: Chooser | None = None,
        examples: Any = None,
    ) -> Workspace:
        """
        Args:
            examples: which of them (None: all), as indices, or by stage.
            stage: whose examples are scored (None: all stages).
            scope, quiet, layers: as in `Study.passes`.
        """
        stages, world = scored_stages(study, stage), World.current()
        device = study.device if options.device is None else torch.device(options.device)
        for data in (*study.data.values(), *study.candidates.values()):
            data.refresh()
        passes = study.passes(
            run,
            device=device,
            dtype=options.dtype,
            workers=options.workers,
            progress=options.progress and world.first,
            quiet=quiet,
            scope=scope,
            layers=layers,
        )
        memory, batch_size = allowance(options.memory, device), options.batch_size
        if world.size > 1:
            memory = _shared_memory(world, options.memory, device)
        if batch_size is None:
            tracked = passes[study.stages[-1]].tracked
            batch_size = cost.batch_size_for(tracked, options.dtype, device.type, memory)
        if world.size > 1:  # a batch for everyone
            most = max(len(data) for data in study.data.values())
            batch_size = max(1, min(batch_size, -(-most // world.size)))
        room = int(FACTOR_SHARE[device.type] * memory) if device.type in FACTOR_SHARE else None
        chosen = None if examples is None else chosen_examples(study, stages, examples)
        stages = stages if chosen is None else list(chosen)
        workspace = cls(study, run, query, stages, passes, batch_size, memory, room, chosen, world)
        if world.size > 1:
            workspace.check_agreement()
        return workspace

    def for_query(self, query: QuerySet, stages: list[str]) -> Self:
        """This workspace for other queries, with a new ledger."""
        return replace(self, query=query, stages=stages, ledger=Ledger())

    # -- contents ---------------------------------------------------------------------------------

    @property
    def zero(self) -> Tensor:
        """A zero with the device and dtype of vectors."""
        return torch.zeros((), device=self.device, dtype=self.accumulator)

    def scored(self, stage: str) -> NDArray[np.int64]:
        """The examples of a stage's data that are scored."""
        if self.chosen is not None:
            return self.chosen[stage]
        return np.arange(len(self.scored_data(stage)))

    def scored_data(self, stage: str) -> Batches:
        """The training data of a stage, or the candidates that are scored instead."""
        return self.study.candidates.get(stage, self.study.data[stage])

    def used(self, stage: str) -> np.ndarray:
        """The examples of a stage's data that the run trained on."""
        return self.study.used(self.run, stage)

    def rates(self, rate: Callable[[str], float]) -> dict[str, float]:
        """A learning rate for every block; its weight and bias must agree on it."""
        rates = {}
        for layer in self.layers:
            by_parameter = {name: rate(name) for name in layer.parameter_names()}
            if len(set(by_parameter.values())) > 1:
                listed = ", ".join(f"{name} {value:.3g}" for name, value in by_parameter.items())
                raise InvalidInput(
                    f"layer {layer.name} has its weight and bias in groups with different rates "
                    f"({listed}): no single η̄ fits it. Leave it out with Study(layers=...)"
                )
            rates.update(dict.fromkeys((b.name for b in layer.blocks), by_parameter[layer.weight]))
        return rates

    def trained_blocks(self) -> list[ParameterBlock]:
        """The blocks that training moved: a frozen layer does not respond to the data."""
        rates = self.rates(self.run.peak_rate)
        trained = [block for name, block in self.blocks.items() if rates[name]]
        if not trained:
            raise InvalidInput(
                "the run's learning rates are 0 for every tracked layer: nothing was trained, so "
                "nothing can be attributed. Give the rates that were really applied"
            )
        return trained

    # -- identity --------------------------------------------------------------------------------

    def check_agreement(self) -> None:
        """Refuse processes that were started on different data, code or settings."""
        from whence import __version__

        study, versions = self.study, [torch.__version__, __version__]
        about = {
            "the runs": [run.fingerprint for run in study.runs],
            "the training data": {s: study.data[s].fingerprint() for s in study.stages},
            "the scored examples": [
                self.data_fingerprints(),
                {s: sha256_of(self.scored(s)) for s in self.stages},
            ],
            "the queries": None if self.query is None else self.query.fingerprint(),
            "query_rank": None if self.query is None else self.query.rank,
            "the model or its code": [model_identity(m) for m in study.models.values()],
            "the task": [task_identity(task, measured=True) for task in study.tasks.values()],
            "the tracked layers": list(self.blocks),
            "dtype": self.final_passes.arithmetic,
            "batch_size": self.batch_size,
            "the versions of torch and whence": versions,
        }
        self.world.agree(about)

    def identity(self) -> dict[str, Any]:
        """What scores depend on, other than the method."""
        study, chosen = self.study, self.chosen or {}
        return {
            "run": self.run.fingerprint,
            "train": {s: study.identity(self.run, s, self.tracked) for s in study.stages},
            "query": None if self.query is None else self.query.identity(),
            "tasks": [task_identity(task, measured=True) for task in study.tasks.values()],
            "dtype": self.final_passes.arithmetic,
            # the scored examples, if they are not all of the training data
            **({"candidates": self.data_fingerprints()} if study.candidates else {}),
            **({"examples": {s: sha256_of(x) for s, x in chosen.items()}} if chosen else {}),
        }

    def provenance(self) -> dict[str, Any]:
        """The origin of scores, which is stored with them."""
        return {
            "run": self.run.fingerprint,
            "recipe": self.run.origin.get("recipe"),
            "seed": self.run.origin.get("seed"),
            "train": self.data_fingerprints(),
            "collated": self.study.collate is not None,
            "query": None if self.query is None else self.query.fingerprint(),
            **({"candidates": True} if self.study.candidates else {}),
            "torch": torch.__version__,
            "device": str(self.device),
            "dtype": self.final_passes.arithmetic,
            **({} if self.world.size == 1 else {"processes": self.world.size}),
        }

    def data_fingerprints(self) -> dict[str, str]:
        """Fingerprints of the data whose examples are scored, by stage."""
        return {stage: self.scored_data(stage).fingerprint() for stage in self.stages}

    def settings(self) -> dict[str, Any]:
        """What is stored with the scores in addition to the method's own settings."""
        return {} if self.query is None else self.query.settings()

    def tried(self, places: Iterable[tuple[str, Weights]], what: str = LOSSES) -> Tried:
        """The values in which scores of the same identity must agree: losses at these stages and
        weights, and final measurements of the queries; or the outputs of both."""
        study, last, final = self.study, self.study.stages[-1], self.run.final
        trials = [(s, study.data[s], c, what) for s, c in places]
        trials += [(s, data, final, what) for s, data in study.candidates.items()]
        query = self.scored_data(last) if self.query is None else self.query.data
        trials.append((last, query, final, what if what == OUTPUTS else MEASUREMENTS))
        size = self.batch_size
        versions = [self.passes[s].tried(data, c, values, size) for s, data, c, values in trials]
        values = {name: value for version in versions for name, value in version.values.items()}
        return replace(versions[0], values=values)

    def losses(
        self, stage: str, checkpoint: Weights, what: str = LOSSES, observed: bool = False
    ) -> str:
        """The name of all losses (or measurements) of a stage at these weights in the cache: the
        same for all that agree.

        Args:
            observed: whether backward passes over all the data follow if nothing is cached. They
                show the losses, which then need no pass of their own.
        """
        passes, data, cache = self.passes[stage], self.study.data[stage], self.study.store(self.run)
        place = stage, data.fingerprint(), checkpoint.sha256, what, passes.arithmetic
        if (place, observed) not in self._tokens:
            version, settings = None, {"place": place}
            if observed and self.world.size == 1 and not passes.knows(data, checkpoint, what):
                version = Version.first(cache, settings, len(data), passes.tolerance)
            if version is not None:  # the first: there is nothing to compare its losses with
                passes.watched[checkpoint.sha256] = data, version
            else:
                (values,) = passes.tried(data, checkpoint, what, self.batch_size).values.values()
                watched, version = passes.watched.get(checkpoint.sha256, (None, None))
                if version is not None and watched is data and what == LOSSES:
                    version.add(torch.arange(len(data)), values)
                else:
                    version = Version.of(cache, settings, values, passes.tolerance)
            self._tokens[place, observed] = version.token
        return self._tokens[place, observed]

    # -- curvature -------------------------------------------------------------------------------

    def fit_data(
        self, stages: Sequence[str] | None = None, observed: bool = False
    ) -> list[FitData]:
        """The data of these stages that the run trained on, with model, task and layers.

        Args:
            stages: default: all.
            observed: whether backward passes follow, which show its losses.
        """
        return [
            FitData(
                self.passes[stage],
                self.study.data[stage],
                self.used(stage),
                self.study.identity(self.run, stage, self.passes[stage].tracked),
                partial(self.losses, stage, observed=observed),
                self.world,
            )
            for stage in (self.study.stages if stages is None else stages)
        ]

    def fitter(
        self,
        stages: Sequence[str] | None = None,
        fisher: str = "sampled",
        seed: int = 0,
        resident: int = 1,
    ) -> Fitter:
        """Fits curvature layer by layer on the data of these stages, pooled."""
        return Fitter(
            self.fit_data(stages, observed=True),
            self.study.store(self.run),
            self.batch_size,
            fisher=fisher,
            seed=seed,
            room=self.room,
            resident=resident,
            memory=self.memory // 4,
            notes=self.ledger.diagnostics,
            tallies=self.ledger.tallies,
        )

    def curvature(
        self,
        kind: str,
        stages: Sequence[str] | None,
        checkpoints: Sequence[Weights],
        blocks: Mapping[str, Any],
        *,
        fisher: str = "sampled",
        seed: int = 0,
        resident: int = 1,
    ) -> Operator[Any]:
        """H of these stages' data, pooled, averaged over these checkpoints.

        Args:
            kind: one of `KINDS`, or "gauss-newton".
            stages: None for all.
            blocks: which blocks it is over.
            resident: how many such operators are needed at the same time.
        """
        if kind == GAUSS_NEWTON:
            return self.gauss_newton(self.fit_data(stages), checkpoints, blocks)
        how: Any = {"fisher": fisher, "seed": seed, "resident": resident}
        return KINDS[kind].fit(self, checkpoints, stages=stages, **how)

    def gauss_newton(
        self,
        data: Sequence[FitData],
        checkpoints: Sequence[Weights],
        blocks: Mapping[str, Any],
        queries: int | None = None,
        **settings: Any,
    ) -> GaussNewton:
        """The true matrix over these blocks. Its products are passes over the data, which all ranks
        take together.

        Args:
            queries: for about that many vectors at a time (default: one for each query).
        """
        self.in_step = True
        if queries is None:
            queries = 1 if self.query is None else len(self.query)
        tracked = {b.name for part in data for b in part.passes.tracked.blocks}
        trained = [b for name, b in self.blocks.items() if name in blocks and name in tracked]
        return GaussNewton(
            data,
            checkpoints,
            BlockSpace(trained),
            self.batch_size,
            queries,
            memory=self.memory // 4,
            tallies=self.ledger.tallies,
            **settings,
        )

    def diagonal(self, values: Mapping[str, float | Tensor]) -> Any:
        """A diagonal matrix of the space, over the blocks that have a value."""
        return BlockDiagonal(values)

    def check_room(self, method: object) -> None:
        """Refuse a method whose query vectors are of all layers together, where these cannot take
        turns and do not fit."""
        parameters = cost.vector_numbers(self.tracked)
        needed = VECTORS * parameters * self.accumulator.itemsize
        if needed > self.memory:
            raise InvalidInput(
                f"{method!r} takes all layers together, and {VECTORS} vectors of {parameters:,} "
                f"parameters need {byte_size(needed)}, where memory= allows "
                f"{byte_size(self.memory)}: raise memory, track fewer layers with "
                "Study(layers=...), or use a method that takes one layer after another, such as "
                "Source()"
            )

    def check_preconditioner(self, optimizer: str) -> None:
        """Refuse an optimizer whose preconditioner this space cannot represent."""

    def projected_space(self, dimension: int, joint: bool, seed: int) -> Space:
        """A space of gradients projected to this many dimensions."""
        from whence.engine.projected_space import ProjectedSpace

        return ProjectedSpace.random(self, dimension, joint, seed)

    # -- columns ---------------------------------------------------------------------------------

    def columns(self, size: int, batch: int = 1) -> list[Columns]:
        """The examples that are scored, in chunks of at most `size`: whole batches, and several
        chunks for every rank."""
        if self.world.size > 1:
            share = self.examples // (CHUNKS_PER_RANK * self.world.size)
            size = min(size, max(1, share // batch) * batch)
        columns, offset = [], 0
        for stage in self.stages:
            examples = self.scored(stage)
            for part in cut(len(examples), size):
                place = slice(offset + int(part[0]), offset + int(part[-1]) + 1)
                columns.append(Columns(stage, examples[part], place))
            offset += len(examples)
        return columns

    # -- query vectors ---------------------------------------------------------------------------

    def query_gradients(
        self,
        queries: Queries,
        checkpoints: Sequence[Weights],
        bases: Mapping[str, Basis | None],
    ) -> Any:
        """The mean over checkpoints of ∇f(q, θ_c), each block built in its basis."""
        return queries.gradients(self.passes[queries.stage], checkpoints, bases, self.batch_size)

    def plain_gradients(self, queries: Queries, checkpoint: Weights) -> Any:
        """∇f(q, θ_c), untransformed; factored where an example is one position."""
        return queries.plain_gradients(self.passes[queries.stage], checkpoint, self.batch_size)

    def scoring(self, *arguments: Any) -> Scoring:
        """Computes the inner products with training gradients."""
        from whence.engine.scoring import Scoring

        return Scoring(self, *arguments)


def _shared_memory(world: World, memory: int | str | None, device: torch.device) -> int:
    """Bytes that each process may use: the same in all, so that they divide the work alike."""
    allowed = allowance(memory, device)
    hosts = world.values(platform.node())
    if memory is None and device.type == "cpu":  # the machine's, which its processes share
        allowed //= hosts.count(platform.node())
    return int(min(world.values(allowed)))


def scored_stages(study: Study, stage: str | None) -> list[str]:
    """The stages whose examples are scored: one, or all."""
    if stage is not None and stage not in study.stages:
        raise InvalidInput(f"stage={stage!r} is not in the run: it has {study.stages}")
    with_data = [s for s in study.stages if s in study.candidates] or study.stages
    if stage is not None and stage not in with_data:
        raise InvalidInput(f"stage={stage!r} has no candidates: {with_data} have")
    return with_data if stage is None else [stage]


def chosen_examples(
    study: Study, stages: Sequence[str], given: Any
) -> dict[str, NDArray[np.int64]]:
    """The requested examples, by stage, checked."""
    if not isinstance(given, Mapping):
        if len(stages) > 1:
            raise InvalidInput(
                f"examples={listed(list(given))} of which stage? Give {{stage: examples}}, with "
                f"stages of {list(stages)}"
            )
        given = {stages[0]: given}
    chosen = {}
    for stage, examples in given.items():
        if stage not in stages:
            raise InvalidInput(f"examples of stage {stage!r}: the stages are {list(stages)}")
        count = len(study.candidates.get(stage, study.data[stage]))
        indices = np.asarray(examples)
        if indices.ndim != 1 or not len(indices) or indices.dtype.kind not in "iu":
            raise InvalidInput("examples must be a list of indices, at least one")
        wrong = indices[(indices < 0) | (indices >= count)]
        if len(wrong):
            raise InvalidIndex(f"examples has {listed(wrong)}: the data has 0..{count - 1}")
        if len(np.unique(indices)) < len(indices):
            raise InvalidInput("examples has an index more than once: give each once")
        chosen[stage] = indices.astype(np.int64)
    return {stage: chosen[stage] for stage in stages if stage in chosen}


def allowance(memory: int | str | None, device: torch.device) -> int:
    """Bytes that may be used, from bytes or a text like "8GB".

    By default a fixed share of the machine's memory, not of what happens to be free, so that the
    same call splits the work, and rounds, in the same way; less only when memory is short.
    """
    if memory is None:
        free, total = free_and_total(device)
        return int(min(MEMORY_SHARE.get(device.type, 0.4) * total, 0.8 * free))
    if isinstance(memory, str):
        units = {"KB": 2**10, "MB": 2**20, "GB": 2**30, "TB": 2**40}
        text = memory.upper().replace("IB", "B").replace(" ", "")
        try:
            memory = int(float(text[:-2]) * units[text[-2:]])
        except (KeyError, ValueError, OverflowError):
            raise InvalidInput(
                f"memory={memory!r} is not understood: use bytes, or a text like '8GB'"
            ) from None
    memory = int(finite("memory", memory))
    if memory < 2**20:
        raise InvalidInput(
            f"memory={memory} bytes is less than a mebibyte: use bytes, or a text like '8GB'"
        )
    return memory


def free_and_total(device: torch.device) -> tuple[int, int]:
    """(free, total) bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    try:
        with open("/proc/meminfo") as file:
            sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in file}
        return sizes["MemAvailable"], sizes["MemTotal"]
    except (OSError, KeyError):  # not Linux: assume a small machine
        return 8 * 2**30, 8 * 2**30


def check_device(device: Any) -> None:
    """Refuse what is no device, or none of this machine."""
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError) as error:
        raise InvalidInput(f"device={device!r} must be a device such as 'cpu' or 'cuda'") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise InvalidInput(f"device={device!r}, but PyTorch sees no GPU here: use device='cpu'")
