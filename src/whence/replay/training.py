"""Replay of a recorded training: every point it went through, and its updates in reverse.

Initial weights, batches, rates and hyperparameters are enough to repeat a training, and no weights
are needed on disk. If all points fit in memory, the replay runs once. Otherwise it runs twice:
first to keep every √T-th point, then stretch by stretch, from the last to the first, each from its
first point, so that about 2√T points are in memory at a time; or more often, with fewer points. At
each checkpoint of the run the replay records its deviation, and resumes from the recorded weights
and optimizer state. A model with dropout or batch norm is replayed in training mode
(`whence.replay.active`), if the run has the seeds of its draws.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from whence.data import cut, place
from whence.draws import update_seed
from whence.engine.workspace import Workspace
from whence.errors import InvalidInput, NotFinite, warn
from whence.operators import cost
from whence.persist.identity import sha256_of
from whence.replay.active import Drawn, TrainingObjective
from whence.replay.objective import Objective, Tensors
from whence.replay.updates import GRADIENT, RUNNING, SLOTS, WEIGHT, Rule, State, Table, pull_back
from whence.run import Run, RunError, Stage
from whence.run.checkpoint import Checkpoint
from whence.run.optimizers import NUMBER
from whence.study import Study
from whence.table import listed

Adjoint = dict[str, State]  # of every parameter's weight and optimizer state, (q, ...) each
Indices = NDArray[np.int64]
MiniBatch = tuple[Indices, Any]  # examples and their batch
Draw = Callable[[int], Indices]  # the examples of an update
Load = Callable[[Sequence[int]], Iterator[list[MiniBatch]]]

MAX_DEVIATION = 1e-2  # of the way since the last checkpoint: more than rounding explains


@dataclass(frozen=True)
class Point:
    """The training after `step` updates; `counts` has the number of updates of each parameter."""

    step: int
    states: dict[str, State]
    counts: dict[str, int]

    @property
    def weights(self) -> Tensors:
        return {name: state[WEIGHT] for name, state in self.states.items()}


@dataclass(frozen=True)
class Update:
    """The update that follows a point.

    Attributes:
        rules: of the parameters that it changes.
        gradients: of the batch's mean loss in those parameters, before clipping; and batch norm's
            statistics of the batch.
        clip_norm: the largest norm of the gradient.
        parts: the update's batch in parts: examples and their data.
    """

    point: Point
    stage: Stage
    rules: dict[str, Rule]
    gradients: Tensors
    clip_norm: float | None = None
    parts: list[MiniBatch] = field(default_factory=list)

    @property
    def step(self) -> int:
        return self.point.step

    @property
    def examples(self) -> int:
        return sum(len(indices) for indices, _ in self.parts)

    def applied(self) -> Point:
        """The point after it."""
        clipping, _ = self._clipping()
        states, counts = dict(self.point.states), dict(self.point.counts)
        for name, rule in self.rules.items():
            states[name] = rule(states[name], self._applied(name, clipping))
            counts[name] = rule.count
        return Point(self.step + 1, states, counts)

    def pull_back(self, adjoint: Adjoint) -> tuple[Adjoint, Tensors]:
        """The adjoint before the update, without its dependence on the gradient; and the derivative
        (q, ...) of the measurements in the gradient that was applied."""
        clipping, _ = self._clipping()
        before, pulls = dict(adjoint), {}
        linear: dict[Any, Table] = {}  # a group's parameters share theirs
        for name, rule in self.rules.items():
            g = self._applied(name, clipping)
            state = self.point.states[name]
            key = rule.kind, rule.rate, rule.momentum, id(rule.settings), *state
            table = linear.get(key) or rule.table(state, g)
            if rule.linear:
                linear[key] = table
            entering = pull_back(table, adjoint[name])
            if GRADIENT in entering:
                pulls[name] = entering.pop(GRADIENT)
            before[name] = entering
        return before, pulls

    def unclip(self, pulls: Tensors) -> Tensors:
        """The derivative in the batch's gradient g, from that in the clipped one, c(‖g‖) g."""
        clipping, bend = self._clipping()
        if clipping is None or bend is None or not pulls:
            return pulls
        clipped = {name: pull for name, pull in pulls.items() if not self.measures(name)}
        inner = [pull.flatten(1) @ self.gradients[name].flatten() for name, pull in clipped.items()]
        along = bend * torch.stack(inner).sum(0)
        return pulls | {
            name: clipping * pull - torch.tensordot(along, self.gradients[name], 0)
            for name, pull in clipped.items()
        }

    def measures(self, name: str) -> bool:
        """Whether this is a running statistic, which clipping and damping leave alone."""
        return name in self.rules and self.rules[name].kind == RUNNING

    def _applied(self, name: str, clipping: Tensor | None) -> Tensor:
        """The gradient after clipping, or a statistic as it is."""
        g = self.gradients[name]
        return g if clipping is None or self.measures(name) else g * clipping

    def _clipping(self) -> tuple[Tensor | None, Tensor | None]:
        """The factor c of the gradient, and its slope b: dc = -b ⟨g, dg⟩."""
        if self.clip_norm is None:
            return None, None
        gradients = [g for name, g in self.gradients.items() if not self.measures(name)]
        norms = torch.stack([torch.linalg.vector_norm(g) for g in gradients])
        norm = torch.linalg.vector_norm(norms)
        c = self.clip_norm / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_
        clipped = c < 1
        return c.clamp(max=1.0), torch.where(clipped, c / ((norm + 1e-6) * norm), 0.0)


@dataclass
class _Modes:
    """What a stage's model does in training mode only.

    Attributes:
        messages: in words.
        draws: whether it draws random numbers.
        frozen: batch norms that stayed in evaluation mode.
        norms: the others, by name.
    """

    messages: list[str] = field(default_factory=list)
    draws: bool = False
    frozen: list[nn.Module] = field(default_factory=list)
    norms: dict[str, _BatchNorm] = field(default_factory=dict)


class Replay:
    """Repeats a run's training on one device and in one precision.

    Args:
        workspace: the run, its data and the library's own copy of the model.
        batch_size: the most examples per pass (default: an update's whole batch). A model in
            training mode always takes the whole batch.
        training_mode: what to do with a model that draws or measures something in training mode
            (dropout, batch norm): "follow" it, "refuse" it, or "ignore" that.

    Attributes:
        active: whether the model is replayed in training mode.
        unmodelled: what was ignored, in words.
    """

    def __init__(
        self, workspace: Workspace, batch_size: int | None, training_mode: str = "follow"
    ) -> None:
        study, run = self.study, self.run = workspace.study, workspace.run
        self.device, self.dtype, self.workers = (
            workspace.device,
            workspace.dtype,
            workspace.final_passes.workers,
        )
        self.batch_size = batch_size
        _refuse(study, run, self.dtype)
        assert run.initial is not None and run.batches is not None
        self.batches, self.steps = run.batches, run.final.step
        self.anchors: dict[int, Checkpoint] = {c.step: c for c in run.trajectory[1:]}
        self.anchors |= {c.step: c for c in run.checkpoints}
        self.deviations: dict[int, float] = {}  # at each anchor
        self.objectives: dict[str, Objective] = {}
        self.unmodelled: list[str] = []
        modes: dict[str, _Modes] = {}
        initial, known = run.initial.weights(), {name for names in run.groups for name in names}
        trained: dict[str, None] = {}
        for stage, passes in workspace.passes.items():
            _check_parameters(passes.model, stage, initial)
            passes.load(run.initial)
            passes.loaded.keep_whole()
            self.objectives[stage] = Objective(passes.model.requires_grad_(False), passes.task)
            modes[stage] = self._modes(stage)
            self.unmodelled += modes[stage].messages
            trained |= dict.fromkeys(n for n, _ in passes.model.named_parameters() if n in known)
        self.active = bool(self.unmodelled) and training_mode == "follow"
        draws = any(mode.draws for mode in modes.values())
        if self.unmodelled and (
            training_mode == "refuse" or (self.active and draws and self._seed is None)
        ):
            raise InvalidInput(
                f"{'; '.join(dict.fromkeys(self.unmodelled))}: the run does not record random "
                "draws, so training cannot be replayed. Train with Recipe.run, whose seed "
                "determines them, with dropout off, or with batch norm in eval mode; or use Source"
            )
        if self.active:
            self.unmodelled, self.batch_size = [], None
            for stage, passes in workspace.passes.items():
                objective = self._follow(workspace, passes.model, passes.task, modes[stage])
                self.objectives[stage] = objective
                trained |= dict.fromkeys(objective.statistics)
        self.trained = list(trained)
        self._statistics = trained.keys() - known
        self.numbers = sum(initial[name].numel() for name in self.trained)
        self.slots = max(SLOTS[kind] for kind in run.optimizers.values())
        self.width = self._width(workspace.memory // 4)

    @property
    def _seed(self) -> int | None:
        """The seed of the recipe's training that was recorded, if it was one."""
        seed = self.run.origin.get("seed")
        return None if seed is None else int(seed)

    def _follow(
        self, workspace: Workspace, model: nn.Module, task: Any, modes: _Modes
    ) -> TrainingObjective:
        cumulative = [name for name, norm in modes.norms.items() if norm.momentum is None]
        if cumulative:
            raise InvalidInput(
                f"{listed(cumulative, 3)} has momentum=None, a cumulative average, which is not "
                "replayed: give the batch norm a momentum"
            )
        numbers = cost.per_example_numbers(workspace.tracked) * self.dtype.itemsize

        def at_once(examples: int) -> int:
            return int(max(1, workspace.memory // 4 // (numbers * examples)))

        return TrainingObjective(model, task, modes.frozen, modes.norms, at_once)

    # -- forwards ------------------------------------------------------------------------------

    def first(self) -> Point:
        """The point before the first update."""
        assert self.run.initial is not None
        weights = self.run.initial.weights()
        return Point(0, {name: {WEIGHT: self._put(weights[name])} for name in self.trained}, {})

    def recorded(self, step: int) -> Tensors:
        """The weights that the run recorded after this many updates."""
        return self._anchored(replace(self.first(), step=step), compare=False).weights

    def forward(self, point: Point, last: int) -> Iterator[tuple[Update, Point]]:
        """Every update from a point up to `last`, and the point after it."""
        for parts in self._loaded(range(point.step, last), self._drawn, self.batch_size):
            point = self._entering(point)
            update = self._update(point, parts)
            point = self._anchored(update.applied())
            yield update, point

    def _update(self, point: Point, parts: list[MiniBatch]) -> Update:
        t, stage = point.step, self.stage(point.step)
        run, objective, weights = self.run, self.objectives[stage.name], point.weights
        settings = {
            name: (run.learning_rates[t, c], run.momentums[t, c], run.hyperparameters[c])
            for c in run.columns[stage.name]
            # zeros for both: the group was not stepping
            if run.learning_rates[t, c] or run.momentums[t, c]
            for name in run.groups[c]
            if name in weights
        }
        examples, gradients = sum(len(indices) for indices, _ in parts), Tensors()
        for _, batch in parts if settings else ():
            for name, g in objective.gradient(weights, settings, batch, "losses", examples).items():
                gradients[name] = gradients[name] + g if name in gradients else g
        kind, counts = run.optimizers[stage.name], point.counts
        rules = {
            name: Rule(kind, float(rate), float(momentum), others, counts.get(name, 0) + 1)
            for name, (rate, momentum, others) in settings.items()
            if name in gradients
        }
        if isinstance(objective, TrainingObjective) and settings:
            for name, norm in objective.statistics.items():
                assert norm.momentum is not None
                rules[name] = Rule(RUNNING, 0.0, norm.momentum, {}, counts.get(name, 0) + 1)
        clip = run.notes.get("clip_norm")
        clip = clip.get(stage.name) if isinstance(clip, Mapping) else clip
        return Update(point, stage, rules, gradients, clip)

    def _entering(self, point: Point) -> Point:
        """The point, without optimizer state if the stage that starts here has a new optimizer.

        A stage that continues with the same optimizer shares parameter groups with its predecessor.
        """
        stages = self.run.stages
        k = next((k for k, s in enumerate(stages) if s.start == point.step), 0)
        columns = self.run.columns
        if k == 0 or set(columns[stages[k].name]) & set(columns[stages[k - 1].name]):
            return point
        states = {name: {WEIGHT: state[WEIGHT]} for name, state in point.states.items()}
        return Point(point.step, states, {})

    def _anchored(self, point: Point, compare: bool = True) -> Point:
        """The point with the run's recorded weights and optimizer state, if there are any."""
        checkpoint = self.anchors.get(point.step)
        if checkpoint is None:
            return point
        weights, state = checkpoint.weights(), checkpoint.optimizer_state()
        states, counts = dict(point.states), dict(point.counts)
        for name in self.trained:
            states[name] = states[name] | {WEIGHT: self._put(weights[name])}
        if compare and point.step not in self.deviations:
            self.deviations[point.step] = self._deviation(point, states, weights)
        if state is not None:
            states = {name: {WEIGHT: slots[WEIGHT]} for name, slots in states.items()}
            for key, value in state.items():
                name, what = key.removesuffix(NUMBER).rsplit("/", 1)
                if name in states and what == "step":
                    counts[name] = int(value)
                elif name in states and value.shape == states[name][WEIGHT].shape:
                    states[name][what] = self._put(value)
        return Point(point.step, states, counts)

    def _deviation(self, point: Point, states: Mapping[str, State], recorded: Tensors) -> float:
        """The replay's error, as a share of the way since the previous checkpoint."""
        before = max((step for step in self.anchors if step < point.step), default=0)
        start = (self.anchors[before] if before else self.run.initial).weights()  # type: ignore[union-attr]
        stray = way = size = 0.0
        for name in self.trained:
            if not before and name in self._statistics:
                continue  # the first weights are recorded after the first forward pass
            there = states[name][WEIGHT].double()
            stray += float((point.states[name][WEIGHT].double() - there).square().sum())
            way += float((self._put(start[name]).double() - there).square().sum())
            size += float(there.square().sum())
        coarse = max(
            torch.finfo(kind).eps
            for kind in {self.dtype, *(recorded[name].dtype for name in self.trained)}
        )
        if not np.isfinite(stray):
            raise NotFinite(
                f"the replay is NaN or infinite between the updates {before} and {point.step}: "
                "correct or leave out the examples that cause it, in the data and in the training"
            )
        # where training hardly moved, rounding must not look like an error
        return float(np.sqrt(stray) / (np.sqrt(way) + 1e3 * coarse * np.sqrt(size) or 1.0))

    # -- backwards -----------------------------------------------------------------------------

    def backward(
        self, last: int, first: int = 0, draw: Draw | None = None, size: int | None = None
    ) -> Iterator[Update]:
        """The updates from number `last` down to number `first` + 1.

        Args:
            draw: the examples to load with each update (default: its own batch).
            size: the most examples per part (default: all in one).
        """
        size = None if self.active else size
        load = partial(self._loaded, draw=draw or self._drawn, size=size)
        for update in self._sweep(self._since(first), last, load):
            if update.step >= first:
                yield update

    def _since(self, first: int) -> Point:
        """The last recorded point with optimizer state, from which to start the replay."""
        at = [c.step for c in self.run.checkpoints if c.step <= first and self.run.resumable]
        point = self.first()
        return self._anchored(replace(point, step=at[-1]), compare=False) if at else point

    def _sweep(self, point: Point, last: int, load: Load) -> Iterator[Update]:
        length = last - point.step
        if length <= self.width:
            updates = [update for update, _ in self.forward(point, last)]
            for parts in load(range(last - 1, point.step - 1, -1)):
                yield replace(updates.pop(), parts=parts)
            return
        ends = [point.step + length * k // self.width for k in range(1, self.width + 1)]
        points = [point]
        for end in ends[:-1]:
            (point,) = deque((after for _, after in self.forward(point, end)), maxlen=1)
            points.append(point)
        for end in reversed(ends):
            yield from self._sweep(points.pop(), end, load)

    def _width(self, memory: int) -> int:
        """The number of points per level of the sweep: all T if they fit in memory, or √T, or the
        root of a higher order. Each level replays the training once more.
        """
        # with weight and gradient
        per_query = (2 + self.slots) * self.numbers * self.dtype.itemsize
        levels = 1
        while True:
            width = max(2, int(np.ceil(self.steps ** (1 / levels) - 1e-9)))
            if width == 2 or levels * width * per_query <= memory:
                return width
            levels += 1

    def warn(self, deviations: Mapping[str, float]) -> None:
        """Warn if the replay deviates from the recorded training, given {step: deviation}."""
        worst = max(deviations, key=lambda step: deviations[step], default=None)
        if worst is not None and deviations[worst] > MAX_DEVIATION and not self.unmodelled:
            warn(
                f"the replay misses the recorded weights at update {worst} by "
                f"{deviations[worst]:.1%} of the way since the checkpoint before it. The replay "
                "assumes that each update minimises the mean of its batch's losses, on the current "
                "data. Augmentation, another reduction, or clipping that was not recorded cause "
                "such a deviation. The scores are of the replayed training",
                stacklevel=2,
            )

    def _modes(self, stage: str) -> _Modes:
        """Which modules of a stage's model act differently in training mode."""
        model, modes = self.objectives[stage].model, _Modes()
        assert self.run.initial is not None
        weights = self.run.initial.weights(), self.run.final.weights()
        for name, module in model.named_modules():
            if isinstance(module, _DropoutNd) and module.p > 0:
                modes.messages.append(f"{name} is {type(module).__name__}(p={module.p})")
                modes.draws = True
            elif isinstance(module, _BatchNorm):
                before, after = (state[f"{name}.running_mean"] for state in weights)
                if torch.equal(before, after):
                    modes.frozen.append(module)
                else:
                    modes.norms[name] = module
                    modes.messages.append(
                        f"{name} is a {type(module).__name__} whose running statistics changed: it "
                        "was in training mode"
                    )
        if modes.draws:
            return modes
        batch = place(self.study.data[stage].take([0]), self.device, self.dtype)
        objective = self.objectives[stage]
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            calm = objective.outputs({}, batch)
            model.train()
            for module in (*modes.frozen, *modes.norms.values()):
                module.eval()
            active = objective.outputs({}, batch)
            model.eval()
        if float((active - calm).norm()) > 1e-3 * float(calm.norm()):
            modes.draws = True
            modes.messages.append(
                f"{type(model).__name__} has other outputs in training mode (dropout?)"
            )
        return modes

    # -- data ----------------------------------------------------------------------------------

    def stage(self, t: int) -> Stage:
        """The stage of update t + 1."""
        return next(s for s in self.run.stages if s.start <= t < s.end)

    def _drawn(self, t: int) -> Indices:
        return self.batches[t]

    def _loaded(
        self, updates: Sequence[int], draw: Draw, size: int | None
    ) -> Iterator[list[MiniBatch]]:
        """The examples of each update, in parts of at most `size`."""
        for stage, group in groupby(updates, self.stage):
            steps = list(group)
            drawn = [draw(t) for t in steps]
            parts = [[b[p] for p in cut(len(b), size or len(b))] for b in drawn]
            data = self.study.data[stage.name]
            stream = data.stream(
                [part for each in parts for part in each], self.device, self.dtype, self.workers
            )
            for t, each in zip(steps, parts, strict=True):
                loaded = [next(stream) for _ in each]
                seed = self._draw_seed(stage, t) if self.active else None
                yield [(i, Drawn(b, seed)) for i, b in loaded] if self.active else loaded

    def _draw_seed(self, stage: Stage, t: int) -> int | None:
        """The seed of the model's draws in an update, as `whence.Recipe` seeds them."""
        if self._seed is None:
            return None
        return update_seed(self._seed, self.run.stages.index(stage), t - stage.start)

    def _put(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, self.dtype)

    def fingerprint(self) -> str:
        """A hash of the initial weights, notes and batches, which the run's own does not cover."""
        assert self.run.initial is not None
        notes = json.dumps(self.run.notes, sort_keys=True)
        batches = (part for b in self.batches for part in (np.asarray(b, np.int64), "|"))
        return sha256_of(self.run.initial.sha256, notes, *batches)


def _refuse(study: Study, run: Run, dtype: torch.dtype) -> None:
    """Refuse a run that cannot be replayed; the error says what it lacks."""
    if dtype not in (torch.float32, torch.float64):
        raise InvalidInput(f"dtype={dtype}: a training is replayed in torch.float32 or float64")
    if run.batches is None:
        size = sum(t.nbytes for t in run.final.weights().values())
        raise RunError(
            f"{run!r} has not recorded which examples each update used: call "
            "recorder.step(indices) before every optimizer.step() (8 bytes for each), or give "
            "Run.from_checkpoints(batches=...). Weights need not be recorded, because the training "
            "is replayed; every_step=True records them too, if you cannot replay it: "
            f"{(run.steps + 1) * size / 2**30:.3g} GiB for this run's {run.steps:,} updates"
        )
    if run.initial is None:
        raise RunError(
            f"{run!r} has no weights from before its first update: the Recorder keeps them; give "
            "Run.from_checkpoints(initial=...), or a checkpoint at step 0"
        )
    for stage in run.stages:
        kind = run.optimizers[stage.name]
        if kind not in SLOTS:
            raise InvalidInput(
                f"stage {stage.name!r} was trained with {kind}: only the updates of "
                f"{', '.join(SLOTS)} are known here. Use Source, or TracIn"
            )
        _check_batches(study, run, stage)
    if any(settings.get("maximize") for settings in run.hyperparameters):
        raise InvalidInput(
            "the run was trained with maximize=True, which is not replayed: negate the loss"
        )
    if "clip_value" in run.notes:
        raise InvalidInput(
            f"the run clipped gradients by value ({run.notes['clip_value']!r}), which is not "
            "replayed: clip by norm, noted as clip_norm"
        )


def _check_batches(study: Study, run: Run, stage: Stage) -> None:
    assert run.batches is not None
    batches = run.batches[stage.start : min(stage.end, run.final.step)]
    updates = (
        np.repeat(np.arange(len(batches)), [len(batch) for batch in batches]) + stage.start + 1
    )
    empty = [k for k, batch in enumerate(batches) if not len(batch)]
    if empty:
        raise RunError(
            f"update {stage.start + empty[0] + 1} has an empty batch: give the examples it used"
        )
    used, drawn = study.used(run, stage.name), np.concatenate(batches)
    strangers = np.flatnonzero(~np.isin(drawn, used))
    if len(strangers):
        raise RunError(
            f"update {updates[strangers[0]]} used example {drawn[strangers[0]]}, which is not in "
            "the run's subset: batches are indices of the whole dataset"
        )


def _check_parameters(model: nn.Module, stage: str, initial: Mapping[str, Tensor]) -> None:
    """Refuse a stage's model with parameters whose initial values are not recorded."""
    new = [
        name
        for name, p in model.named_parameters()
        if name not in initial or initial[name].shape != p.shape
    ]
    if new:
        raise InvalidInput(
            f"the model of stage {stage!r} has parameters that the run's first weights lack, or "
            f"have in another shape ({listed(new, 3)}): their initial values are not recorded. "
            "Create the whole model before the first stage"
        )
