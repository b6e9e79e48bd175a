"""Study: the model, task, training data and runs that a method needs."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from whence.data import Batches, Collate, place, structure
from whence.errors import InvalidInput, InvalidType
from whence.layers.choose import Chooser, chooser
from whence.layers.passes import (
    Clock,
    Passes,
    WeightLoader,
    precision_as_asked,
    rounded_products,
)
from whence.layers.separate import Separation, candidates, looked_at, pairs
from whence.layers.sharded import StreamedWeights, unsharded
from whence.layers.tracked import Tracked, Updates, find
from whence.operators.cost import table
from whence.persist.cache import FactorCache, shared
from whence.persist.files import as_path
from whence.persist.identity import class_sha256, model_sha256, setting_sha256, sha256_of
from whence.run import Run, RunError
from whence.run.checkpoint import (
    architecture_sha256,
    refuse_lazy,
    same_weights,
    weights_sha256,
)
from whence.run.evidence import RARE_CLIPPING, Draws, clipped_at_most, distance_from_final
from whence.table import Table, listed, one_line
from whence.task import IGNORED, Task
from whence.world import World

Runs = Run | str | os.PathLike[str]
Scope = Literal["query", "stage", "model"]
MEASURED = ("measurement", "unit", "higher_is_better")  # no factor depends on these
PROBED = 2  # examples on which captured gradients are checked against autograd
GRADIENTS_COMPARED = 1  # pairs of examples whose gradients are compared alone and together


class Study:
    """The input of every attribution method.

    Args:
        model: the trained architecture, or `{stage: model}` where it changed (another head). The
            library works on a copy, with the weights of the run's checkpoints.
        task: the training loss and the measurement; one for all stages, or `{stage: Task}`.
        train: the training data, map-style and without augmentation; `{stage: dataset}` for a run
            of several stages.
        runs: a Run, the path of one, or a list of them (an ensemble).
        collate: turns a list of examples into a batch (default: torch's).
        cache: folder for fitted factors (default: the run's folder; memory for a run that is not
            on disk).
        layers: which layers to track: "all", "matrices" (linear layers and convolutions), names as
            shell patterns, or a chooser such as `whence.layers.mlp_only`, `last_blocks(2)`,
            `by_type(nn.Linear)`. By default all, but only matrices for published forms, as in the
            paper.
        candidates: data that the run never trained on, for the last stage or `{stage: dataset}`.
            It is scored instead of the training data: the effect that each example would have had
            as one of the N of its stage.
    """

    @World.apart()
    def __init__(
        self,
        model: nn.Module | Mapping[str, nn.Module],
        task: Task | Mapping[str, Task],
        train: Any,
        runs: Runs | Sequence[Runs],
        *,
        collate: Collate | None = None,
        cache: str | os.PathLike[str] | None = None,
        layers: Sequence[str] | str | Chooser | None = None,
        candidates: Any = None,
    ) -> None:
        several = isinstance(runs, Sequence) and not isinstance(runs, (str, os.PathLike))
        listed_runs: Sequence[Runs] = runs if several else [runs]  # type: ignore[assignment,list-item]
        self.runs = [run if isinstance(run, Run) else Run.open(run) for run in listed_runs]
        if not self.runs:
            raise InvalidInput("runs is empty: give at least one Run")
        self.collate = collate
        self.layers = chooser(layers)
        self.stages = [stage.name for stage in self.runs[0].stages]
        given = {k: unwrapped(m) for k, m in self._by_stage("model", model).items()}
        self.device = next(given[self.stages[-1]].parameters(), torch.zeros(())).device
        self.models = {k: unsharded(m) for k, m in given.items()}
        for network in self.models.values():
            if any(map(is_lazy, network.parameters())):
                refuse_lazy(dict(network.named_parameters()))
            for name, parameter in network.named_parameters():
                if parameter.is_complex():
                    raise InvalidInput(
                        f"parameter {name} is {parameter.dtype}: whence differentiates by real "
                        "numbers. Write the layer with a real and an imaginary part"
                    )
        self.model = self.models[self.stages[-1]]
        self.train = self._by_stage("train", train)
        self.data = {
            name: Batches(f"{name} data" if len(self.stages) > 1 else "train", d, collate)
            for name, d in self.train.items()
        }
        self.tasks: dict[str, Task] = self._by_stage("task", task)
        self.candidates = self._candidates(candidates)
        self._evidence: dict[Run, Evidence] = {}
        for run in self.runs:
            self._check(run)
        self.cache = None if cache is None else as_path(cache).absolute()
        self._stores: dict[str, FactorCache] = {}
        self._exclusions_reported = False

    def _candidates(self, given: Any) -> dict[str, Batches]:
        """Data that the run never trained on and that is scored instead, by stage; or empty."""
        if given is None:
            return {}
        if not isinstance(given, Mapping):
            given = {self.stages[-1]: given}
        unknown = [stage for stage in given if stage not in self.stages]
        if unknown or not given:
            raise InvalidInput(f"candidates of {unknown}, but the run has {self.stages}")
        return {s: self._alike("candidates", given[s], s) for s in self.stages if s in given}

    def refuse_candidates(self, method: str) -> None:
        """Raise if there are candidates, for a method that only knows what was trained on."""
        if self.candidates:
            raise InvalidInput(
                f"{method} cannot score candidates, which the run never trained on: use a "
                "gradient method, such as Source, or a Study without candidates"
            )

    def _by_stage(self, what: str, given: Any) -> dict[str, Any]:
        """`given` as a mapping with one value per stage; a single value holds for all stages."""
        mapped = isinstance(given, Mapping)
        if mapped and set(given) != set(self.stages):
            raise InvalidInput(
                f"{what} has the stages {sorted(given)}, but the run has {self.stages}"
            )
        if what == "train" and not mapped and len(self.stages) > 1:
            raise InvalidInput(
                f"the run has the stages {self.stages}: "
                f"give train={{{self.stages[0]!r}: dataset, ...}}"
            )
        by_stage = {name: given[name] if mapped else given for name in self.stages}
        expected = {"task": Task, "model": nn.Module}.get(what, object)
        for value in by_stage.values():
            if not isinstance(value, expected):
                name = {"task": "whence.Task (such as Classification())"}.get(
                    what, "torch.nn.Module"
                )
                raise InvalidType(f"{what} must be a {name}, not {type(value).__name__} {value!r}")
            for path, module in value.named_modules() if isinstance(value, nn.Module) else ():
                if isinstance(module, torch.jit.ScriptModule):
                    raise InvalidType(
                        f"{path or 'model'} is a torch.jit.ScriptModule, whose layers cannot be "
                        "seen: give the module that was scripted or traced; its parameters have "
                        "the same names"
                    )
        return by_stage

    def _check(self, run: Run) -> None:
        names = [stage.name for stage in run.stages]
        if names != self.stages:
            raise InvalidInput(f"runs differ in their stages: {self.stages} and {names}")
        self._of(run)  # refuses examples that the data does not have
        for stage in run.stages:
            count = len(self.data[stage.name])
            subset = run.subset if stage.name == (run.subset_stage or names[0]) else None
            if subset is not None and len(subset) and int(np.max(subset)) >= count:
                raise InvalidInput(
                    f"the run used example {int(np.max(subset))}, but the data has {count}: "
                    "give the whole dataset the run's subset was taken from"
                )
            if stage.size is not None and stage.size not in (
                count,
                len(self.used(run, stage.name)),
            ):
                raise InvalidInput(
                    f"the run's stage {stage.name!r} was trained on {stage.size} examples, but its "
                    f"dataset has {count}: are the datasets of two stages swapped?"
                )

    def used(self, run: Run, stage: str) -> np.ndarray:
        """The examples of a stage's dataset that the run trained on: its subset, without those
        that its recorded batches clearly left out."""
        return self._of(run).used[stage]

    def _of(self, run: Run) -> Evidence:
        if run not in self._evidence:
            sizes = {stage: len(data) for stage, data in self.data.items()}
            self._evidence[run] = Evidence(run, sizes)
        return self._evidence[run]

    def warnings(self, run: Run) -> list[str]:
        """Why scores of a run may be wrong, as its files and its recorder show."""
        evidence = self._of(run)
        if evidence.warnings is None:
            messages = list(run.warnings)
            notes = {name: f"{name}={value!r}" for name, value in run.notes.items()}
            clip = run.notes.get("clip_norm")
            share = clipped_at_most(run, clip) if isinstance(clip, int | float) and clip > 0 else 1
            if share < RARE_CLIPPING:
                del notes["clip_norm"]  # a trainer's default that did next to nothing
            elif share < 1:
                notes["clip_norm"] += f" (at most {share:.0%} of the updates before a checkpoint)"
            if notes:
                said = ", ".join(notes.values())
                messages.append(f"kept with the run, but not modelled by SOURCE: {said}")
            for stage in self.stages:
                untrained = evidence.untrained(stage, self.models[stage])
                if untrained:
                    messages.append(
                        f"stage {stage!r}: parameters differ between checkpoints, but no recorded "
                        f"optimizer updates them: {listed(untrained, 4)}. Their layers are left "
                        "out of scores. Were they trained by a second optimizer?"
                    )
                draws = evidence.draws[stage]
                messages += [] if draws is None else draws.warnings(stage)
                messages += self._without_target(
                    stage,
                    self.data[stage],
                    # then it matters what training divided by
                    f"stage {stage!r}: {{count}} of {{checked}} examples that were checked have "
                    "only the target {target}, which has no loss. They count in N: training "
                    "minimised the sum of losses divided by all examples. If it divided by the "
                    "others only, as nn.CrossEntropyLoss() does, leave them out of the training "
                    "data",
                )
            if any(settings.get("maximize") for settings in run.hyperparameters):
                messages.append(
                    "the optimizer maximises (maximize=True): losses of the task must be minus "
                    "what training maximised, or all scores have the wrong sign"
                )
            evidence.warnings = messages + self._other_model(run)
        return evidence.warnings

    def query_warnings(self, query: Batches) -> list[str]:
        """Why scores of queries may mean nothing."""
        return self._without_target(
            self.stages[-1],
            query,
            "{count} of {checked} queries that were checked have only the target {target}: there "
            "is nothing to explain, and their scores are 0",
        )

    def _without_target(self, stage: str, data: Batches, message: str) -> list[str]:
        """The message, if some of the examples that are checked have no loss."""
        task, checked = self.tasks[stage], candidates(data)
        ignored = (task.ignored(batch) for batch in looked_at(data, checked))
        count = sum(int(none.sum()) for none in ignored if none is not None)
        known = {"count": count, "checked": len(checked), "target": IGNORED}
        return [message.format(**known)] if count else []

    def _other_model(self, run: Run) -> list[str]:
        """Whether the given model was trained with the run, but has other weights."""
        if len(self.runs) > 1 or any(p.is_meta for p in self.model.parameters()):
            return []  # a model can be that of one run only
        if run.final.files.memory and same_weights(self.model, run.final):  # sooner than a digest
            return []
        sha256 = weights_sha256(self.model)
        steps = [c.step for c in run.checkpoints if c.sha256 == sha256]
        if run.final.step in steps:
            return []
        if steps:
            return [
                f"the given model has the run's weights after update {steps[-1]} (the best ones?), "
                f"not its final ones. Scores are of the model after update {run.final.step}"
            ]
        first = run.initial or (run.checkpoints[0] if len(run.checkpoints) > 1 else None)
        distances = distance_from_final(dict(self.model.named_parameters()), run.final, first)
        if distances is None:
            return []
        away, moved = distances
        return [
            "the weights of the given model are not the run's final ones: they are "
            f"{away / moved:.1%} as far from them as the run's first weights (best weights loaded, "
            "averaging, clamping, further training?). Scores are of the model after update "
            f"{run.final.step}"
        ]

    def passes(
        self,
        run: Run,
        *,
        device: torch.device,
        dtype: torch.dtype,
        workers: int = 0,
        progress: bool = False,
        quiet: bool = False,
        scope: Scope = "query",
        layers: Chooser | None = None,
    ) -> dict[str, Passes]:
        """Copy the model to a device, find and check its layers; one `Passes` per stage.

        Args:
            quiet: do not warn about excluded layers.
            scope: the layers of each stage that may be tracked: those that a "query" sees, because
                the last stage has them too; all that the "stage" trained; or all of the "model",
                also those that training did not move.
            layers: which to track, if the study does not choose (None: all).
        """
        choose = self.layers or layers
        copies: dict[int, WeightLoader] = {}
        tracked_of: dict[tuple[int, int], Tracked] = {}
        passes: dict[str, Passes] = {}
        clock = Clock(device)
        for stage in reversed(self.stages):
            original = self.models[stage]
            pair = id(original), id(self.tasks[stage])
            task = copy.copy(self.tasks[stage])  # it may keep something between outputs and losses
            if id(original) not in copies:
                copies[id(original)] = loader(original, device, dtype)
            loaded = copies[id(original)]
            checkpoints = [c for c in run.checkpoints if c.stage == stage]
            if not checkpoints:
                raise RunError(
                    f"{run!r} has no checkpoint in stage {stage!r} yet: let training reach one"
                )
            loaded.load(checkpoints[-1])
            data = self.data[stage]
            several = place(data.take(range(min(PROBED, len(data)))), device, dtype)
            if pair not in tracked_of:
                rounded = bool(rounded_products(dtype, device))
                separation = Separation(loaded.model, task, data, device, dtype, rounded)
                compared = pairs(data)
                separation.check_losses(compared)
                updates, evidence = Updates(same_rates=run.same_rates), self._of(run)
                if scope != "model":
                    unrecorded = evidence.untrained(stage, original)
                    updates = Updates(evidence.trained, run.same_rates, unrecorded)
                single = place(data.take([0]), device, dtype)
                tracked = find(loaded.model, task, several, choose, updates, single)
                separation.check_gradients(tracked.layers, compared[:GRADIENTS_COMPARED])
                last = next(iter(tracked_of.values()), tracked)
                tracked_of[pair] = tracked.shared_with(last) if scope == "query" else tracked
            passes[stage] = Passes(
                loaded,
                task,
                tracked_of[pair],
                clock,
                dtype=dtype,
                workers=workers,
                progress=progress,
            )
        if not quiet and not self._exclusions_reported:
            self._exclusions_reported = True
            tracked = passes[self.stages[-1]].tracked
            if tracked.unseen:
                warnings.warn(tracked.summary(), stacklevel=2)
        return {stage: passes[stage] for stage in self.stages}

    def query(self, query: Any) -> Batches:
        """The query set as batches; they must have the fields of the training batches."""
        return self._alike("query", query, self.stages[-1])

    def _alike(self, name: str, dataset: Any, stage: str) -> Batches:
        data = Batches(name, dataset, self.collate)
        expected = structure(self.data[stage].take([0]))
        fields = structure(data.take([0]))
        if fields != expected:
            if isinstance(dataset, tuple) and all(isinstance(part, Tensor) for part in dataset):
                raise InvalidInput(
                    f"{name} is a tuple of {len(dataset)} tensors, which would be {len(dataset)} "
                    "examples: give a dataset, such as TensorDataset(x, y)"
                )
            raise InvalidInput(
                f"{name} batches are built like {fields}, training batches like {expected}: "
                "both must have the same fields in the same order"
            )
        return data

    def store(self, run: Run) -> FactorCache:
        """The cache of the run's factors."""
        folder = self.cache
        if folder is None and run.path is not None:
            folder = Path(run.path) / "factors"
        if str(folder) not in self._stores:
            self._stores[str(folder)] = FactorCache(folder)
        return shared(self._stores[str(folder)], World.current())

    def identity(self, run: Run, stage: str, tracked: Tracked) -> dict[str, Any]:
        """Everything that a fit depends on, except weights, losses and settings."""
        return {
            "data": self.data[stage].fingerprint(),
            "used": sha256_of(self.used(run, stage)),
            "task": task_identity(self.tasks[stage]),
            "model": model_identity(self.models[stage]),
            "layers": [block.name for block in tracked.blocks],
        }

    def describe(self) -> Table:
        """Tracked layers and their sizes, excluded layers, and the cost of a pass over the data."""
        with precision_as_asked():
            passes = self.passes(
                self.runs[0], device=torch.device("cpu"), dtype=torch.float32, quiet=True
            )[self.stages[-1]]
        examples = sum(len(data) for data in self.data.values())
        return table(passes.tracked, examples, title="\n".join(map(repr, self.runs)))

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}: {len(data):,}" for name, data in self.data.items())
        tasks = ", ".join(dict.fromkeys(map(repr, self.tasks.values())))
        name = type(self.model).__name__
        return one_line(f"Study({name}, {tasks}, examples {{{sizes}}}, runs: {len(self.runs)})")

    def _repr_html_(self) -> str:
        numbers = sum(p.numel() for p in self.model.parameters())
        facts = [
            ("model", f"{type(self.model).__name__}, {numbers:,} parameters"),
            ("task", ", ".join(dict.fromkeys(map(repr, self.tasks.values())))),
            *((f"{data.name}", f"{len(data):,} examples") for data in self.data.values()),
            *(("run", repr(run)) for run in self.runs),
        ]
        return Table(None, facts, title="Study")._repr_html_()


class Evidence:
    """What a run's files show about its training.

    Args:
        run: of the study.
        sizes: the number of examples in the data of each stage.

    Attributes:
        draws: how often the batches of each stage used each example; None if none are recorded.
        used: the examples of each stage that the run trained on: those that it says, without those
            that its batches clearly left out.
        warnings: None until they are looked for.
    """

    def __init__(self, run: Run, sizes: Mapping[str, int]) -> None:
        self.run = run
        self.warnings: list[str] | None = None
        self.draws: dict[str, Draws | None] = {}
        self.used: dict[str, np.ndarray] = {}
        self._untrained: dict[str, list[str]] = {}
        for stage in run.stages:
            used = np.arange(sizes[stage.name])
            if run.subset is not None and stage.name == (run.subset_stage or run.stages[0].name):
                used = np.sort(np.asarray(run.subset, dtype=np.int64))
            draws = Draws.of(run, stage, used, sizes[stage.name])
            if draws is not None and draws.left_out:
                used = draws.examples[draws.counts > 0]
            self.draws[stage.name], self.used[stage.name] = draws, used

    def trained(self, parameter: str) -> bool:
        """Whether updates of the run changed a parameter."""
        return self.run.peak_rate(parameter) > 0 and parameter not in self.unmoved

    @cached_property
    def unmoved(self) -> set[str]:
        """Parameters that are the same in the run's first and last weights: no gradient reached
        them, whatever their learning rate. Nothing is known of a run whose weights all stay."""
        first = self.run.initial or self.run.checkpoints[0]
        start, end = first.weights(), self.run.checkpoints[-1].weights()
        shared = [name for name in start if name in end]
        same = {name for name in shared if torch.equal(start[name], end[name])}
        return same if len(same) < len(shared) else set()

    def untrained(self, name: str, model: nn.Module) -> list[str]:
        """Parameters that differ between a stage's checkpoints, though its optimizer has none of
        them or gave them the rate 0."""
        if name not in self._untrained:
            run, (stage,) = self.run, (s for s in self.run.stages if s.name == name)
            rates = run.learning_rates[stage.start : stage.end]
            columns = [g for g in run.columns[name] if rates[:, g].any()]
            trained = {parameter for g in columns for parameter in run.groups[g]}
            others = [k for k, _ in model.named_parameters() if k not in trained]
            checkpoints = [c for c in run.checkpoints if c.stage == name]
            if stage.start == 0 and run.initial is not None:
                checkpoints.insert(0, run.initial)
            self._untrained[name] = []
            if others and len(checkpoints) > 1:
                first, last = checkpoints[0].opened(), checkpoints[-1].opened()
                both = [k for k in others if k in first and k in last]
                changed = [k for k in both if not torch.equal(first[k], last[k])]
                self._untrained[name] = changed
        return self._untrained[name]


def task_identity(task: Task, measured: bool = False) -> dict[str, str]:
    """What a task's losses depend on: its code, and its settings by content.

    Args:
        measured: with what its measurements depend on.
    """
    names = [name for name in vars(task) if measured or name not in MEASURED]
    settings = {name: setting_sha256(getattr(task, name)) for name in names}
    return {"class": class_sha256(type(task)), **settings}


def model_identity(model: nn.Module) -> list[str]:
    """Digests of a model's modules and of their code."""
    return [architecture_sha256(model), model_sha256(model)]


def copied(model: nn.Module) -> nn.Module:
    """A deep copy. Activations that the model stores are detached from their graph."""
    detached = {
        id(value): value.detach()
        for module in model.modules()
        for value in tree_leaves(vars(module))  # also in lists
        if isinstance(value, Tensor) and not value.is_leaf
    }
    duplicate = copy.deepcopy(model, detached)
    for module in list(duplicate.modules()):
        for name, child in module._modules.items():
            inner = getattr(child, "_orig_mod", None)
            if name != "_orig_mod" and isinstance(inner, nn.Module):
                module._modules[name] = inner
        # accelerate's mixed precision puts an autocast around forward
        if "_original_forward" in vars(module):
            module.forward = vars(module).pop("_original_forward")
    return duplicate


def loader(model: nn.Module, device: torch.device, dtype: torch.dtype) -> WeightLoader:
    """A copy of a study's model on a device, in eval mode, and what loads its weights."""
    duplicate = copied(model)
    streamed = any(p.is_meta for p in model.parameters())
    weights = StreamedWeights(duplicate, device, dtype) if streamed else WeightLoader(duplicate)
    weights.model = cast(duplicate, device, dtype).eval()
    for parameter in duplicate.parameters():
        parameter.grad = None
    return weights


def cast(model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The model on a device and in a dtype.

    Buffers that no checkpoint holds (the frequencies of rotary embeddings) stay in float32 if the
    model stores them wider than its weights, or under their usual name.
    """
    weights = {p.dtype for p in model.parameters()}
    tables = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
        and name in module._non_persistent_buffers_set
        and buffer.dtype == torch.float32
        and dtype.itemsize < 4
        and (name.endswith("inv_freq") or torch.float32 not in weights)
    ]
    model = model.to(device=device, dtype=dtype)
    for module, name, buffer in tables:
        module._buffers[name] = buffer.to(device)
    return model


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside DataParallel, DistributedDataParallel and torch.compile."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(
            model, (nn.DataParallel, nn.parallel.DistributedDataParallel)
        ):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner
