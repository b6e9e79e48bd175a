"""One run of a study laid out on a device: its data, passes, curvature and query vectors."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whence.data import Batches, cut
from whence.engine.ledger import Ledger
from whence.engine.options import FACTOR_SHARE, ComputeOptions, allowance
from whence.engine.queries import Queries, QuerySet
from whence.engine.trials import LOSSES, MEASUREMENTS, OUTPUTS, Trials, together
from whence.errors import InvalidIndex, InvalidInput
from whence.layers.capture import ParameterBlock, TrackedLayer
from whence.layers.choose import Chooser, everything
from whence.layers.passes import Clock, Passes, Signal, Weights
from whence.layers.tracked import Tracked
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
from whence.persist.cache import Tried
from whence.persist.identity import sha256_of
from whence.run import Run, Segment
from whence.study import Study, model_identity, task_identity
from whence.table import listed
from whence.world import World

if TYPE_CHECKING:
    from whence.engine.projected_space import Space
    from whence.engine.scoring import Scoring

CHUNKS_PER_RANK = 4  # at least, so that all have about the same work
GAUSS_NEWTON = "gauss-newton"
LOSS, MEASUREMENT = Signal("loss"), Signal("measurement")


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
    trials: Trials = field(kw_only=True)
    ledger: Ledger = field(default_factory=Ledger)

    reads_training_data: ClassVar[bool] = True

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
        shared: bool = True,
        frozen: bool = False,
        quiet: bool = False,
        layers: Chooser = everything,
        examples: Any = None,
    ) -> Workspace:
        """
        Args:
            examples: which of them (None: all), as indices, or by stage.
            stage: whose examples are scored (None: all stages').
            shared: whether only layers that a query can see are tracked in earlier stages.
            frozen: whether layers that training did not move are tracked too.
            quiet: do not warn about excluded layers.
            layers: which to track, if the study does not choose.
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
            shared=shared,
            frozen=frozen,
            quiet=quiet,
            layers=layers,
        )
        memory, batch_size = _memory(world, options.memory, device), options.batch_size
        if batch_size is None:
            tracked = passes[study.stages[-1]].tracked
            batch_size = cost.batch_size_for(tracked, options.dtype, device.type, memory)
        if world.size > 1:  # a batch for everyone
            most = max(len(data) for data in study.data.values())
            batch_size = max(1, min(batch_size, -(-most // world.size)))
        room = int(FACTOR_SHARE[device.type] * memory) if device.type in FACTOR_SHARE else None
        chosen = None if examples is None else chosen_examples(study, stages, examples)
        stages = stages if chosen is None else list(chosen)
        workspace = cls(
            study,
            run,
            query,
            stages,
            passes,
            batch_size,
            memory,
            room,
            chosen,
            world,
            trials=Trials(passes, batch_size, world),
        )
        workspace.check_agreement()
        return workspace

    def for_query(self, query: QuerySet, stages: list[str]) -> Self:
        """This workspace for other queries, with a new ledger."""
        return replace(self, query=query, stages=stages, ledger=Ledger())

    # -- contents ---------------------------------------------------------------------------------

    @property
    def final_passes(self) -> Passes:
        """The last stage's."""
        return self.passes[self.study.stages[-1]]

    @property
    def tracked(self) -> Tracked:
        return self.final_passes.tracked

    @property
    def device(self) -> torch.device:
        return self.final_passes.device

    @property
    def dtype(self) -> torch.dtype:
        return self.final_passes.dtype

    @property
    def accumulator(self) -> torch.dtype:
        """The dtype of vectors and sums."""
        return accumulator(self.dtype)

    @property
    def progress(self) -> bool:
        return self.final_passes.progress

    @property
    def clock(self) -> Clock:
        return self.final_passes.clock

    @property
    def zero(self) -> Tensor:
        """A zero with the device and dtype of vectors."""
        return torch.zeros((), device=self.device, dtype=self.accumulator)

    @property
    def layers(self) -> list[TrackedLayer]:
        """The tracked layers of all stages; where several have one, the last stage's."""
        stages = reversed(self.study.stages)
        every = [layer for stage in stages for layer in self.passes[stage].tracked.layers]
        return list({layer.name: layer for layer in reversed(every)}.values())

    @property
    def blocks(self) -> dict[str, ParameterBlock]:
        return {block.name: block for layer in self.layers for block in layer.blocks}

    @property
    def positions(self) -> dict[str, int]:
        """t of every block."""
        stages = self.study.stages
        return {k: t for s in stages for k, t in self.passes[s].tracked.positions.items()}

    def scored(self, stage: str) -> NDArray[np.int64]:
        """The examples of a stage's data that are scored."""
        if self.chosen is not None:
            return self.chosen[stage]
        return np.arange(len(self.scored_data(stage)))

    def scored_data(self, stage: str) -> Batches:
        """The training data of a stage, or the candidates that are scored instead."""
        return self.study.candidates.get(stage, self.study.data[stage])

    @property
    def examples(self) -> int:
        """How many examples are scored."""
        return sum(len(self.scored(stage)) for stage in self.stages)

    def used(self, stage: str) -> np.ndarray:
        """The examples of a stage's data that the run trained on."""
        return self.study.used(self.run, stage)

    def rates(self, rate: Callable[[str], float]) -> dict[str, float]:
        """A learning rate for every block; its weight and bias must agree on it."""
        rates = {}
        for layer in self.layers:
            each = {name: rate(name) for name in layer.parameter_names()}
            if len(set(each.values())) > 1:
                listed = ", ".join(f"{name} {value:.3g}" for name, value in each.items())
                raise InvalidInput(
                    f"layer {layer.name} has its weight and bias in groups with different rates "
                    f"({listed}): no single η̄ fits it. Leave it out with Study(layers=...)"
                )
            rates.update(dict.fromkeys((b.name for b in layer.blocks), each[layer.weight]))
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
        if self.world.size == 1:
            return
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
        study = self.study
        return {
            "run": self.run.fingerprint,
            "train": {s: study.identity(self.run, s, self.tracked) for s in study.stages},
            "query": None if self.query is None else self.query.identity(),
            "tasks": [task_identity(task, measured=True) for task in study.tasks.values()],
            "dtype": self.final_passes.arithmetic,
            **self._scored_identity(),
        }

    def _scored_identity(self) -> dict[str, Any]:
        """The identity of the scored examples, if they are not all of the training data."""
        candidates, chosen = self.study.candidates, self.chosen or {}
        return {
            **({"candidates": self.data_fingerprints()} if candidates else {}),
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
        trials = [self.trials(s, self.study.data[s], c, what) for s, c in places]
        trials += [
            self.trials(s, data, self.run.final, what) for s, data in self.study.candidates.items()
        ]
        last, explained = self.study.stages[-1], what if what == OUTPUTS else MEASUREMENTS
        query = self.scored_data(last) if self.query is None else self.query.data
        return together([*trials, self.trials(last, query, self.run.final, explained)])

    def losses(
        self, stage: str, checkpoint: Weights, what: str = LOSSES, observed: bool = False
    ) -> str:
        """The name of all losses (or measurements) of a stage at these weights.

        Args:
            observed: whether backward passes over all the data follow if nothing is cached.
        """
        data, cache = self.study.data[stage], self.study.store(self.run)
        return self.trials.version(stage, data, checkpoint, what, cache, observed)

    # -- curvature -------------------------------------------------------------------------------

    def fit_data(self, stages: Sequence[str], observed: bool = False) -> list[FitData]:
        """The data of these stages that the run trained on, with model, task and layers.

        Args:
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
            for stage in stages
        ]

    def fitter(self, stages: Sequence[str], fisher: str, seed: int, resident: int = 1) -> Fitter:
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
        stages: Sequence[str],
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
            blocks: which blocks it is over.
            resident: how many such operators are needed at the same time.
        """
        if kind == GAUSS_NEWTON:
            queries = 1 if self.query is None else len(self.query)
            return self.gauss_newton(self.fit_data(stages), checkpoints, blocks, queries)
        fitter = self.fitter(stages, fisher, seed, resident)
        return KINDS[kind].fit(fitter, checkpoints)

    def gauss_newton(
        self,
        data: Sequence[FitData],
        checkpoints: Sequence[Weights],
        blocks: Mapping[str, Any],
        queries: int,
        **settings: Any,
    ) -> GaussNewton:
        """The true matrix over these blocks, for about that many vectors at a time. Its products
        are passes over the data, which all ranks take together."""
        self.in_step = True
        here = {b.name for part in data for b in part.passes.tracked.blocks}
        trained = [b for name, b in self.blocks.items() if name in blocks and name in here]
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


def _memory(world: World, memory: int | str | None, device: torch.device) -> int:
    """Bytes that each process may use: the same in all, so that they divide the work alike."""
    allowed = allowance(memory, device)
    if world.size > 1:
        hosts = world.values(platform.node())
        if memory is None and device.type == "cpu":  # the machine's, which its processes share
            allowed //= hosts.count(platform.node())
        allowed = min(world.values(allowed))
    return allowed


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
