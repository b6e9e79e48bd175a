"""Run: the checkpoints, learning rates and stages of one training, and its segments."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from whence.errors import InvalidInput, collect_warnings, finite, whole
from whence.persist.files import as_path
from whence.persist.identity import sha256_of
from whence.run.checkpoint import Checkpoint, RunError, TensorFile, plain_names, untie
from whence.run.format import RunData, Stage, checked_indices, checked_subset, write_checkpoint
from whence.table import one_line

StateDictOrPath = Mapping[str, Tensor] | str | os.PathLike[str]
QUERY_AT = ("run", "final")  # where query gradients are taken: `Run.query_points`


@dataclass(frozen=True)
class Segment:
    """A part of one stage whose gradients and curvature are treated as stationary."""

    start: int
    end: int
    stage: Stage
    checkpoints: tuple[Checkpoint, ...]
    rates: Mapping[str, float] = field(default_factory=dict, repr=False)
    decays: Mapping[str, float] = field(default_factory=dict, repr=False)

    @property
    def steps(self) -> int:
        """K, the number of updates."""
        return self.end - self.start

    def rate(self, parameter: str) -> float:
        """η̄, the parameter's effective mean learning rate; 0 if no optimizer trained it."""
        return self.rates.get(parameter, 0.0)

    def weight_decay(self, parameter: str) -> float:
        """The parameter's weight decay, as given to its optimizer."""
        return self.decays.get(parameter, 0.0)


class Run(RunData):
    """Checkpoints, per-update rates, second moments and stages of one training.

    A `Recorder` records a run and `Run.open(path)` opens it. `Run.from_checkpoints(...)` builds a
    run from checkpoints that you already have. The attributes are those of `RunData`.
    """

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Open a recorded run. Checkpoints are verified when their weights are loaded."""
        with collect_warnings() as messages:
            run = cls.read(as_path(path).absolute())  # found again from another folder
        run.warnings += messages
        return run

    @classmethod
    def from_checkpoints(
        cls,
        checkpoints: Sequence[StateDictOrPath],
        steps: Sequence[int],
        learning_rates: ArrayLike,
        *,
        optimizer: str = "sgd",
        momentum: ArrayLike = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        second_moments: Sequence[StateDictOrPath | None] | None = None,
        epsilon: float = 1e-8,
        batches: Sequence[ArrayLike] | None = None,
        stages: Mapping[str, int] | None = None,
        sizes: Mapping[str, int] | None = None,
        initial: StateDictOrPath | None = None,
        subset: ArrayLike | None = None,
        groups: Sequence[Sequence[str]] | None = None,
    ) -> Self:
        """Build a run from existing checkpoints.

        Args:
            checkpoints: state dicts, or paths to them (.safetensors, or files written by
                `torch.save`), in order. The last is the final model. One at step 0 becomes
                `initial`.
            steps: the update count at each checkpoint.
            learning_rates: one float; or one per update (T,); or per update and group (T, G).
            optimizer: "sgd", "adam", "adamw", "rmsprop", or the name of another one.
            momentum: like `learning_rates`.
            dampening, weight_decay, epsilon: settings of the optimizer.
            second_moments: per checkpoint {parameter: v̂}, already bias-corrected.
            batches: the example indices of every update.
            stages: {name: its last update}, in order. Each ends at a checkpoint. Default: one
                stage, "train".
            sizes: {stage: number of examples}.
            initial: the weights before the first update.
            subset: the training indices used, if not all.
            groups: the parameter names of each group. Default: one group with all parameters.
        """
        counts, files = _steps(steps, checkpoints), [TensorFile.adopt(c) for c in checkpoints]
        moments = list(second_moments) if second_moments is not None else [None] * len(files)
        if len(moments) != len(files):
            raise InvalidInput(f"{len(moments)} second_moments for {len(files)} checkpoints")
        first = TensorFile.adopt(initial) if initial is not None else None
        if counts[0] == 0:
            first, files, counts, moments = first or files[0], files[1:], counts[1:], moments[1:]
            if not counts:
                raise InvalidInput(
                    "the only checkpoint is at step 0: give at least one checkpoint after an update"
                )
        total = counts[-1]
        rates = _per_update("learning_rates", learning_rates, total, groups)
        betas = np.broadcast_to(_per_update("momentum", momentum, total, groups), rates.shape)
        parts = _stages(stages, sizes, counts)
        settings = {
            "dampening": finite("dampening", dampening),
            "weight_decay": finite("weight_decay", weight_decay),
            "eps": finite("epsilon", epsilon),
        }
        return cls(
            checkpoints=[
                Checkpoint(
                    step,
                    next(s.name for s in parts if step <= s.end),
                    file,
                    TensorFile.adopt(moment) if moment is not None else None,
                )
                for step, file, moment in zip(counts, files, moments, strict=True)
            ],
            learning_rates=rates,
            momentums=betas.copy(),
            groups=_groups(groups, files[0].load()),
            hyperparameters=[dict(settings) for _ in range(rates.shape[1])],
            stages=parts,
            optimizers={s.name: optimizer for s in parts},
            columns={s.name: list(range(rates.shape[1])) for s in parts},
            initial=Checkpoint(0, parts[0].name, first) if first else None,
            batches=_batches(batches, total) if batches is not None else None,
            subset=checked_subset(subset) if subset is not None else None,
            finished=True,
        )

    @classmethod
    def from_huggingface(
        cls,
        output_dir: str | os.PathLike[str],
        model: nn.Module,
        *,
        stage: str = "train",
        size: int | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> Self:
        """Build a run from the `checkpoint-*` folders of a `transformers.Trainer`. See
        `whence.integrations.huggingface.from_huggingface` for what these folders contain."""
        from whence.integrations.huggingface import from_huggingface

        return cls(**vars(from_huggingface(output_dir, model, stage=stage, size=size, notes=notes)))

    def save(self, path: str | os.PathLike[str]) -> Self:
        """Write the run to a new folder and return the run stored there."""
        folder = as_path(path)
        if (folder / "run.json").exists():
            raise RunError(f"{folder} already holds a run: save to another folder, or delete it")

        def written(c: Checkpoint) -> Checkpoint:
            weights = untie(c.weights())
            optional = [file.load() if file is not None else None for file in (c.moments, c.state)]
            return write_checkpoint(folder, c.step, c.stage, *weights, *optional)

        self._map_checkpoints(written).write(folder)
        return self.open(folder)

    def in_memory(self) -> Self:
        """The same run with all its tensors in memory, so that its folder may be deleted."""

        def read(file: TensorFile | None) -> TensorFile | None:
            if file is None or file.memory is not None:
                return file
            return replace(file, path=None, memory=file.load())

        def loaded(c: Checkpoint) -> Checkpoint:
            files = read(c.files)
            assert files is not None
            return replace(c, files=files, moments=read(c.moments), state=read(c.state))

        return replace(self._map_checkpoints(loaded), path=None)

    def _map_checkpoints(self, change: Callable[[Checkpoint], Checkpoint]) -> Self:
        """The same run with `change` applied to every checkpoint."""
        return replace(
            self,
            checkpoints=[change(c) for c in self.checkpoints],
            between=[change(c) for c in self.between],
            initial=change(self.initial) if self.initial else None,
        )

    @property
    def final(self) -> Checkpoint:
        """The last checkpoint: the final model of a finished run."""
        if not self.checkpoints:
            raise RunError(f"{self!r} has no checkpoint: train at least up to the first one")
        return self.checkpoints[-1]

    def query_points(self, query_at: str) -> list[Checkpoint]:
        """Where query gradients are taken: along the "run" (the last stage's checkpoints), or at
        the "final" model."""
        if query_at == "final":
            return [self.final]
        return [c for c in self.checkpoints if c.stage == self.final.stage]

    @property
    def optimizer(self) -> str:
        """The optimizer of the last stage. `optimizers` has the optimizer of every stage."""
        return self.optimizers[self.stages[-1].name] if self.stages else ""

    @property
    def trajectory(self) -> list[Checkpoint]:
        """The weights before the first and after every update (T + 1); [] if any is missing."""
        by_step = {c.step: c for c in [*self.between, *self.checkpoints]}
        if self.initial is None or any(step not in by_step for step in range(1, self.steps + 1)):
            return []
        return [self.initial, *(by_step[step] for step in range(1, self.steps + 1))]

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything scores depend on: weights, moments, rates, groups, stages."""
        checkpoints = [
            (c.step, c.stage, c.sha256, c.moments.sha256 if c.moments else None)
            for c in self.checkpoints
        ]
        stages = [(s.name, s.start, s.end, s.size, self.optimizers[s.name]) for s in self.stages]
        subset = self.subset.tolist() if self.subset is not None else None
        subset = [subset, self.subset_stage] if self.subset_stage else subset
        text = json.dumps([checkpoints, stages, subset, self.groups, self.hyperparameters])
        arrays = [np.asarray(a, np.float64) for a in (self.learning_rates, self.momentums)]
        return sha256_of(text, *(part for a in arrays for part in (repr(a.shape), a)))

    def rate_at(self, checkpoint: Checkpoint, parameter: str) -> float:
        """The learning rate of the update that led to a checkpoint; 0 for a frozen parameter."""
        if not 0 < checkpoint.step <= self.steps:
            raise InvalidInput(
                f"no update of this run led to step {checkpoint.step}: its updates are "
                f"1 … {self.steps}"
            )
        row = self.learning_rates[checkpoint.step - 1]
        return float(sum(row[g] for g, names in enumerate(self.groups) if parameter in names))

    def epsilon(self, stage: str) -> dict[str, float]:
        """ε of the stage's optimizer, by parameter."""
        return {
            name: float(self.hyperparameters[g].get("eps") or 0.0)
            for g in self.columns[stage]
            for name in self.groups[g]
        }

    def peak_rate(self, parameter: str) -> float:
        """The highest learning rate of a parameter; 0 if it was always frozen."""
        return float(self.rates(parameter).max(initial=0.0))

    def same_rates(self, *parameters: str) -> bool:
        """Whether every update had one learning rate for these parameters."""
        first, *others = map(self.rates, parameters)
        return all(np.array_equal(first, rates) for rates in others)

    def rates(self, parameter: str) -> NDArray[np.floating[Any]]:
        """The learning rate of a parameter in every update (T,); 0 where it was frozen."""
        columns = [g for g, names in enumerate(self.groups) if parameter in names]
        return np.asarray(self.learning_rates[:, columns].sum(1))

    def segments(self, spec: int | Sequence[int] | str) -> list[Segment]:
        """Cut the run into segments.

        Args:
            spec: the number of segments; or the update counts at which they end; or "stages". A
                segment never crosses a stage boundary. `assign_checkpoints` says how a number of
                segments is divided among stages.

        A segment ends at the step of its last checkpoint and starts where the previous one ended.
        """
        segments: list[Segment] = []
        for stage, checkpoints in assign_checkpoints(self.checkpoints, self.stages, spec):
            start, end = segments[-1].end if segments else 0, checkpoints[-1].step
            rates = effective_rates(
                self.optimizers[stage.name],
                self.learning_rates[start:end],
                self.momentums[start:end],
                self.groups,
                self.hyperparameters,
            )
            decays = {
                name: float(self.hyperparameters[g].get("weight_decay") or 0.0)
                for g in self.columns[stage.name]
                for name in self.groups[g]
            }
            segments.append(Segment(start, end, stage, checkpoints, rates, decays))
        return segments

    def __repr__(self) -> str:
        place = os.path.relpath(self.path) if self.path else "in memory"
        place = place if self.path is None or not place.startswith("..") else str(self.path)
        stages = ", ".join(s.name + (f" (n={s.size})" if s.size else "") for s in self.stages)
        steps = [c.step for c in self.checkpoints]
        return one_line(
            f"Run({place}: {self.steps} updates, checkpoints at {steps}, "
            f"{self.optimizer or 'no optimizer'}, {stages or 'no stage'}"
            f"{'' if self.finished else ', unfinished'})"
        )


def _steps(steps: Sequence[int], checkpoints: Sequence[StateDictOrPath]) -> list[int]:
    counts = [int(step) for step in steps]
    if not counts or len(counts) != len(checkpoints):
        raise InvalidInput(
            f"{len(checkpoints)} checkpoints and {len(counts)} steps: give one step per checkpoint"
        )
    if counts[0] < 0 or any(b <= a for a, b in itertools.pairwise(counts)):
        raise InvalidInput(f"steps={counts} must increase: the update count at each checkpoint")
    return counts


def _per_update(
    name: str, value: ArrayLike, total: int, groups: Sequence[Sequence[str]] | None
) -> NDArray[np.float64]:
    """(T, G). G is 1 if the value has no axis for groups and `groups` is not given."""
    try:
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError, RuntimeError):
        raise InvalidInput(
            f"{name}={value!r} must be numbers: one, ({total},) or ({total}, groups)"
        ) from None
    if array.ndim > 2 or (array.ndim and len(array) != total):
        raise InvalidInput(
            f"{name} has shape {array.shape}, but the last checkpoint is after {total} updates: "
            f"give one number, ({total},) or ({total}, groups)"
        )
    if not np.isfinite(array).all() or (array < 0).any():
        raise InvalidInput(f"{name} must be finite and nonnegative")
    if array.ndim == 2 and array.shape[1] != (len(groups) if groups is not None else 1):
        raise InvalidInput(
            f"{name} has {array.shape[1]} groups: name the parameters of each in "
            f"groups=[[...], ...]{f', not of {len(groups)}' if groups is not None else ''}"
        )
    columns = array if array.ndim == 2 else array.reshape(-1, 1)
    return np.broadcast_to(columns, (total, len(groups) if groups is not None else 1)).copy()


def _groups(
    groups: Sequence[Sequence[str]] | None, weights: Mapping[str, Tensor]
) -> list[list[str]]:
    if groups is None:
        return [[name for name, tensor in weights.items() if tensor.is_floating_point()]]
    plain = plain_names(name for group in groups for name in group)
    groups = [[plain[name] for name in group] for group in groups]
    named = [name for group in groups for name in group]
    unknown = sorted(set(named) - set(weights))
    if unknown:
        raise InvalidInput(f"groups name {unknown}, but the first checkpoint has no such parameter")
    if len(set(named)) != len(named):
        raise InvalidInput("groups name a parameter twice: put each in one group")
    return [list(group) for group in groups]


def _stages(
    stages: Mapping[str, int] | None, sizes: Mapping[str, int] | None, counts: list[int]
) -> list[Stage]:
    ends = {n: int(end) for n, end in (stages or {"train": counts[-1]}).items()}
    sizes = {name: int(size) for name, size in (sizes or {}).items()}
    if set(sizes) - set(ends):
        raise InvalidInput(
            f"sizes name {sorted(set(sizes) - set(ends))}, but the stages are {list(ends)}"
        )
    starts = [0, *ends.values()][:-1]
    if any(e <= s for s, e in zip(starts, ends.values(), strict=True)):
        raise InvalidInput(f"stages={ends}: give them in order, each with its last update")
    if list(ends.values())[-1] != counts[-1] or set(ends.values()) - set(counts):
        raise InvalidInput(
            f"stages={ends}: each must end at a checkpoint, the last at the last one; "
            f"the checkpoints are at {counts}"
        )
    return [
        Stage(name, start, end, sizes.get(name))
        for start, (name, end) in zip(starts, ends.items(), strict=True)
    ]


def _batches(batches: Sequence[ArrayLike], total: int) -> list[NDArray[np.int64]]:
    if len(batches) != total:
        raise InvalidInput(f"{len(batches)} batches for {total} updates: give one per update")
    return [checked_indices("a batch", np.asarray(batch).reshape(-1)) for batch in batches]


# --- segments -------------------------------------------------------------------------------------

Assignment = list[tuple[Stage, tuple[Checkpoint, ...]]]  # the stage and checkpoints of each segment


def assign_checkpoints(
    checkpoints: Sequence[Checkpoint],
    stages: Sequence[Stage],
    spec: int | Sequence[int] | str,
) -> Assignment:
    """Divide a run's checkpoints into segments, none of which crosses a stage boundary.

    `spec` is one of:

    - an int L: equal parts in order (as `np.array_split`). If these would cross a boundary, each
      stage gets one segment. Each further segment goes to the stage furthest below its share
      L · (its checkpoints) / (all checkpoints), the earlier one on a tie. The checkpoints of a
      stage are then split equally.
    - a sequence of update counts at which segments end. The last is the run's end.
    - "stages": one segment per stage.
    """
    if not checkpoints:
        raise InvalidInput("the run has no checkpoint yet, so it cannot be divided into segments")
    by_stage = [(s, [c for c in checkpoints if c.stage == s.name]) for s in stages]
    by_stage = [(stage, points) for stage, points in by_stage if points]
    if isinstance(spec, str):
        if spec != "stages":
            raise InvalidInput(
                f"segments={spec!r}: use a number, a list of update counts, or 'stages'"
            )
        return [(stage, tuple(points)) for stage, points in by_stage]
    if isinstance(spec, bool) or (np.ndim(spec) == 0 and not hasattr(spec, "__index__")):
        raise InvalidInput(f"segments={spec!r}: use a number, a list of update counts, or 'stages'")
    if np.ndim(spec) == 0:
        counts = _segments_per_stage(
            [len(points) for _, points in by_stage], whole("segments", spec)
        )
        return [
            (stage, tuple(points[i] for i in chunk))
            for (stage, points), count in zip(by_stage, counts, strict=True)
            for chunk in np.array_split(np.arange(len(points)), count)
        ]
    return _ending_at(checkpoints, by_stage, [whole("segments", end) for end in spec])  # type: ignore[union-attr]


def _segments_per_stage(checkpoints: list[int], segments: int) -> list[int]:
    """The number of segments of each stage, given its number of checkpoints."""
    total, stages = sum(checkpoints), len(checkpoints)
    if segments < 1:
        raise InvalidInput(f"segments={segments}: use at least 1")
    if segments > total:
        raise InvalidInput(
            f"segments={segments}, but the run has only {total} checkpoint{'s' * (total > 1)}: "
            f"use segments<={total}, or record more checkpoints"
        )
    if segments < stages:
        raise InvalidInput(
            f"segments={segments}, but the run has {stages} stages and a segment never crosses a "
            f"stage boundary: use segments>={stages}, or 'stages'"
        )
    ends = np.cumsum([len(chunk) for chunk in np.array_split(np.arange(total), segments)])
    boundaries = np.cumsum(checkpoints)
    if np.isin(boundaries, ends).all():
        return np.diff(np.searchsorted(ends, boundaries) + 1, prepend=0).tolist()  # type: ignore[no-any-return]
    counts = [1] * stages
    for _ in range(segments - stages):
        # In exact integers: (L · checkpoints / total − count) · total.
        shortfall = [
            segments * n - total * count if count < n else -np.inf
            for n, count in zip(checkpoints, counts, strict=True)
        ]
        counts[int(np.argmax(shortfall))] += 1
    return counts


def _ending_at(
    checkpoints: Sequence[Checkpoint],
    by_stage: Sequence[tuple[Stage, list[Checkpoint]]],
    ends: list[int],
) -> Assignment:
    steps = [c.step for c in checkpoints]
    missing = [end for end in ends if end not in steps]
    if missing:
        raise InvalidInput(
            f"segments end at {missing}, where the run has no checkpoint: it has them at {steps}"
        )
    if any(b <= a for a, b in itertools.pairwise(ends)):
        raise InvalidInput(f"segments={ends}: update counts must increase")
    if not ends or ends[-1] != steps[-1]:
        raise InvalidInput(f"segments={ends}: the last must end with the run, at {steps[-1]}")
    crossed = [stage for stage, points in by_stage if points[-1].step not in ends]
    if crossed:
        stage = crossed[0]
        raise InvalidInput(
            f"segments={ends}: one crosses the end of stage {stage.name!r} at {stage.end}: "
            f"add {stage.end} to the list"
        )
    starts = [0, *ends[:-1]]
    return [
        (stage, inside)
        for start, end in zip(starts, ends, strict=True)
        for stage, points in by_stage
        if (inside := tuple(c for c in points if start < c.step <= end))
    ]


def effective_rates(
    optimizer: str,
    learning_rates: NDArray[np.float64],
    momentums: NDArray[np.float64],
    groups: Sequence[Sequence[str]],
    hyperparameters: Sequence[Mapping[str, Any]],
) -> dict[str, float]:
    """{parameter: η̄} over K updates, from learning_rates and momentums (K, G).

    SGD (with or without Nesterov) and RMSprop sum gradients in the momentum buffer, so each
    gradient is applied 1/(1−β) times, reduced by SGD's dampening. Adam's buffers are averages and
    do not change the rate.
    """
    rates: dict[str, float] = {}
    for column, names in enumerate(groups):
        lr, momentum = learning_rates[:, column], momentums[:, column]
        rate = float(lr.mean()) if len(lr) else 0.0
        # A group that made no step has zeros for both: leave those out of its mean momentum.
        stepping = (lr != 0) | (momentum != 0)
        beta = float(momentum[stepping].mean()) if stepping.any() else 0.0
        if optimizer in ("sgd", "rmsprop") and beta != 0:
            if beta >= 1:
                raise InvalidInput(
                    f"momentum {beta} of {names[:1]} is not below 1: the mean rate is undefined"
                )
            dampening = float(hyperparameters[column].get("dampening") or 0.0)
            rate *= (1 - dampening) / (1 - beta)
        for name in names:
            rates[name] = rates.get(name, 0.0) + rate
    return rates
