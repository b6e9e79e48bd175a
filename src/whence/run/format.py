"""The file format of a run: run.json, learning rates, checkpoints. `run.json` is written last."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from whence.errors import DamagedFile, InvalidInput, InvalidType, MissingFile, warn
from whence.persist.arrays import check_array, entry_of, map_array, save_array
from whence.persist.files import check_types, parsing, read_json, remove_abandoned, write_json
from whence.run.checkpoint import REMEDY, Checkpoint, RunError, TensorFile

SCHEMA = 1
FROZEN_ONCE = 2  # of a run whose checkpoints leave frozen weights to the first one
CHECKPOINT_FILE = re.compile(r"step-\d{8,}(\.moments|\.optimizer)?\.safetensors(\.tmp)?")


@dataclass(frozen=True)
class Stage:
    """A part of training with its own dataset: updates start+1 … end, on `size` examples."""

    name: str
    start: int
    end: int
    size: int | None = None


@dataclass(eq=False, repr=False, kw_only=True)
class RunData:
    """The contents of a run, with T updates and G parameter groups.

    Attributes:
        checkpoints: in order; `initial`, the weights before the first update, is not among them.
        learning_rates: (T, G) float64, as applied; 0 where the group made no step.
        momentums: (T, G) float64, SGD's momentum or Adam's β₁.
        groups: the parameter names of each group. A parameter is in several groups if the
            optimizer, or the set of parameters it trains, changed during training. Only one of
            these groups steps at a time.
        hyperparameters: of each group, under torch's names (`dampening`, `eps`, `weight_decay`, …).
        stages: in order.
        optimizers: {stage: "sgd", "adam", "adamw", "rmsprop" or a class name}.
        columns: {stage: the groups of its optimizer}.
        between: weights after the updates that have no checkpoint, with `every_step=True`.
        marks: {step: SHA-256 of the weights} at which a trainer saved its own checkpoint. Training
            may resume from there.
        batches: example indices of every update, or None.
        subset: training indices used, or None for all.
        subset_stage: the stage that `subset` refers to (default: the first). The other stages
            used all their examples.
        origin: what produced the run, such as a recipe's fingerprint and seed.
        notes: aspects of the training that SOURCE does not model, as declared by the user.
        warnings: what the Recorder noticed that makes scores of this run doubtful.
        resumable: whether the optimizer's state is stored.
        finished: whether training ran to its end.
        path: the folder, or None for a run in memory.
    """

    checkpoints: list[Checkpoint] = field(default_factory=list)
    learning_rates: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 0)))
    momentums: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 0)))
    groups: list[list[str]] = field(default_factory=list)
    hyperparameters: list[dict[str, Any]] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)
    optimizers: dict[str, str] = field(default_factory=dict)
    columns: dict[str, list[int]] = field(default_factory=dict)
    initial: Checkpoint | None = None
    between: list[Checkpoint] = field(default_factory=list)
    marks: dict[int, str] = field(default_factory=dict)
    batches: list[NDArray[np.int64]] | None = None
    subset: NDArray[np.int64] | None = None
    subset_stage: str | None = None
    origin: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    resumable: bool = False
    finished: bool = False
    path: Path | None = None

    def warn(self, message: str) -> None:
        """Warn, and store the message with the run, once."""
        if message not in self.warnings:
            self.warnings.append(message)
            warn(message, stacklevel=3)

    @property
    def steps(self) -> int:
        """T, the number of updates."""
        return len(self.learning_rates)

    def until(self, step: int) -> Self:
        """The same run truncated after `step` updates."""
        stages = [replace(s, end=min(s.end, step)) for s in self.stages if s.start < step]
        columns = {s.name: self.columns[s.name] for s in stages}
        groups = 1 + max((c for cs in columns.values() for c in cs), default=-1)
        return replace(
            self,
            checkpoints=[c for c in self.checkpoints if c.step <= step],
            learning_rates=self.learning_rates[:step, :groups],
            momentums=self.momentums[:step, :groups],
            groups=self.groups[:groups],
            hyperparameters=self.hyperparameters[:groups],
            stages=stages,
            optimizers={s.name: self.optimizers[s.name] for s in stages},
            columns=columns,
            between=[c for c in self.between if c.step <= step],
            marks={at: sha256 for at, sha256 in self.marks.items() if at <= step},
            batches=self.batches[:step] if self.batches is not None else None,
            finished=False,
        )

    @property
    def _arrays(self) -> dict[str, NDArray[Any]]:
        arrays = {"learning_rates": self.learning_rates, "momentums": self.momentums}
        if self.batches is not None:
            lengths = [0, *map(len, self.batches)]
            arrays["batches"] = np.concatenate([np.empty(0, np.int64), *self.batches])
            arrays["batch_offsets"] = np.cumsum(lengths, dtype=np.int64)
        return arrays

    def write(self, folder: Path, *, shorter: bool = False) -> None:
        """Write everything except the tensors, which `write_checkpoint` writes first.

        run.json comes last, because the arrays of an unfinished run may be longer than it says.

        Args:
            shorter: the folder may hold more updates than this run, so run.json comes first.
        """
        folder.mkdir(parents=True, exist_ok=True)
        if shorter:
            self._write_json(folder)
        for name, array in self._arrays.items():
            save_array(folder / f"{name}.npy", array)
        self._write_json(folder)

    def _write_json(self, folder: Path) -> None:
        saved = [*self.checkpoints, *self.between]
        content = {
            "schema": FROZEN_ONCE if any(c.files.unchanged for c in saved) else SCHEMA,
            "finished": self.finished,
            "steps": self.steps,
            "resumable": self.resumable,
            "batches": self.batches is not None,
            "arrays": {name: entry_of(array) for name, array in self._arrays.items()},
            "stages": [
                {
                    "name": s.name,
                    "start": s.start,
                    "end": s.end,
                    "size": s.size,
                    "optimizer": self.optimizers[s.name],
                    "groups": self.columns[s.name],
                }
                for s in self.stages
            ],
            "groups": [
                {"parameters": names, "hyperparameters": settings}
                for names, settings in zip(self.groups, self.hyperparameters, strict=True)
            ],
            "notes": self.notes,
            "warnings": self.warnings,
            "initial": _entry(self.initial) if self.initial else None,
            "checkpoints": [_entry(c) for c in self.checkpoints],
            "between": [_entry(c) for c in self.between],
            "marks": self.marks,
            "subset": self.subset.tolist() if self.subset is not None else None,
            "subset_stage": self.subset_stage,
            "origin": self.origin,
        }
        write_json(folder / "run.json", content)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read and check a folder. Tensors are read and verified later, when they are used."""
        if not folder.is_dir():
            raise RunError(f"there is no run at {folder}: no such folder")
        try:
            content = _read(folder / "run.json")
            with parsing(folder / "run.json", REMEDY):
                return cls._parse(folder, content)
        except MissingFile as error:
            raise RunError(str(error)) from error
        except FileNotFoundError as error:
            raise RunError(f"there is no run at {folder}: it has no run.json") from error
        except (DamagedFile, InvalidInput) as error:
            raise RunError(str(error)) from error

    @classmethod
    def _parse(cls, folder: Path, content: dict[str, Any]) -> Self:
        check_types(content, steps=int, groups=list, finished=bool, stages=list, notes=dict)
        check_types({"warnings": []} | content, resumable=bool, batches=bool, warnings=list)
        check_types({"origin": {}, "marks": {}, "arrays": {}} | content, origin=dict, marks=dict)
        steps, groups, finished = content["steps"], content["groups"], content["finished"]
        stages, subset = content["stages"], content["subset"]
        for group in groups:
            check_types(group, parameters=list, hyperparameters=dict)
        for stage in stages:
            check_types(stage, name=str, start=int, end=int, optimizer=str, groups=list)
            check_types(stage, size=(int, type(None)))
            if not all(isinstance(g, int) and 0 <= g < len(groups) for g in stage["groups"]):
                raise InvalidInput(f"stage {stage['name']!r} has the groups {stage['groups']}")

        def array(name: str, *shape: int) -> NDArray[Any]:
            # A process killed after writing the arrays and before run.json leaves longer arrays.
            dtype = np.dtype(np.int64 if name.startswith("batch") else np.float64)
            if 0 in shape:
                return np.zeros(shape, dtype)
            path = folder / f"{name}.npy"
            stored = map_array(path, remedy=REMEDY)
            longer = stored.ndim == len(shape) and all(
                r >= s for r, s in zip(stored.shape, shape, strict=True)
            )
            if (stored.shape != shape and (finished or not longer)) or stored.dtype != dtype:
                raise RunError(
                    f"{path} is {stored.dtype} of shape {stored.shape}, but run.json says {dtype} "
                    f"of shape {shape}: {REMEDY}"
                )
            part = np.array(stored[tuple(slice(s) for s in shape)])
            check_array(path, part, content.get("arrays", {}).get(name, {}), REMEDY)
            return part

        initial = _checkpoint(folder, content["initial"]) if content["initial"] else None
        batches = None
        if content["batches"]:
            offsets = array("batch_offsets", steps + 1)
            flat = array("batches", int(offsets[-1]))
            batches = np.split(flat, offsets[1:-1]) if steps else []
        return cls(
            checkpoints=[_checkpoint(folder, e, initial) for e in content["checkpoints"]],
            learning_rates=array("learning_rates", steps, len(groups)),
            momentums=array("momentums", steps, len(groups)),
            groups=[group["parameters"] for group in groups],
            hyperparameters=[group["hyperparameters"] for group in groups],
            stages=[Stage(s["name"], s["start"], s["end"], s["size"]) for s in stages],
            optimizers={s["name"]: s["optimizer"] for s in stages},
            columns={s["name"]: s["groups"] for s in stages},
            initial=initial,
            between=[_checkpoint(folder, e, initial) for e in content["between"]],
            marks={int(at): sha256 for at, sha256 in content.get("marks", {}).items()},
            batches=batches,
            subset=checked_subset(subset) if subset is not None else None,
            subset_stage=content.get("subset_stage"),
            origin=content.get("origin", {}),
            notes=content["notes"],
            warnings=[str(message) for message in content.get("warnings", [])],
            resumable=content["resumable"],
            finished=finished,
            path=folder,
        )

    def delete_unused(self, folder: Path) -> None:
        """Delete checkpoint files that the run does not list, and partly written ones."""
        listed = {
            file.path.name
            for c in [*self.checkpoints, *self.between, *filter(None, [self.initial])]
            for file in (c.files, c.moments, c.state)
            if file and file.path
        }
        for place in (folder, folder / "checkpoints"):
            remove_abandoned(place)
        for file in (folder / "checkpoints").iterdir():
            if CHECKPOINT_FILE.fullmatch(file.name) and file.name not in listed:
                file.unlink()


def _read(path: Path) -> dict[str, Any]:
    """run.json, of either schema."""
    try:
        return read_json(path, schema=SCHEMA, remedy=REMEDY)
    except InvalidInput:
        return read_json(path, schema=FROZEN_ONCE, remedy=REMEDY)


def checked_indices(name: str, indices: ArrayLike) -> NDArray[np.int64]:
    """Training indices, from indices or a mask."""
    chosen = np.asarray(indices)
    if chosen.dtype == bool and chosen.ndim == 1:
        chosen = np.flatnonzero(chosen)
    if not chosen.size and chosen.ndim == 1:
        return chosen.astype(np.int64)
    if chosen.ndim != 1 or chosen.dtype.kind not in "iu":
        raise InvalidType(
            f"{name} is {chosen.dtype} of shape {chosen.shape}: give training indices, or a mask"
        )
    if int(chosen.min()) < 0:
        raise InvalidInput(f"{name} names example {int(chosen.min())}: count from 0")
    return chosen.astype(np.int64)


def checked_subset(subset: ArrayLike) -> NDArray[np.int64]:
    """Training indices that are used, each once."""
    chosen = checked_indices("subset", subset)
    if not chosen.size:
        raise InvalidInput("subset is empty: name the training examples that were used")
    if len(np.unique(chosen)) != len(chosen):
        raise InvalidInput("subset names an example twice: name each once")
    return chosen


def write_checkpoint(
    folder: Path,
    step: int,
    stage: str,
    weights: Mapping[str, Tensor],
    aliases: Mapping[str, str],
    moments: Mapping[str, Tensor] | None = None,
    state: Mapping[str, Tensor] | None = None,
    *,
    base: TensorFile | None = None,
    unchanged: Sequence[str] = (),
) -> Checkpoint:
    """Write step-00000188.safetensors, .moments.safetensors and .optimizer.safetensors.

    Args:
        base: the weights of the run's first checkpoint, which has those called `unchanged`.
    """
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    stem = folder / "checkpoints" / f"step-{step:08d}"

    def write(suffix: str, tensors: Mapping[str, Tensor] | None) -> TensorFile | None:
        path = stem.with_name(stem.name + suffix)
        return TensorFile.write(path, tensors) if tensors is not None else None

    return Checkpoint(
        step,
        stage,
        TensorFile.write(
            stem.with_name(f"{stem.name}.safetensors"), weights, aliases, base, unchanged
        ),
        write(".moments.safetensors", moments),
        write(".optimizer.safetensors", state),
    )


def _entry(checkpoint: Checkpoint) -> dict[str, Any]:
    entry = {"step": checkpoint.step, "stage": checkpoint.stage, **_file(checkpoint.files)}
    if checkpoint.files.aliases:
        entry["aliases"] = dict(checkpoint.files.aliases)
    if checkpoint.files.unchanged:
        entry["unchanged"] = list(checkpoint.files.unchanged)
        entry["stored"] = checkpoint.files.stored
    for name in ("moments", "state"):
        file: TensorFile | None = getattr(checkpoint, name)
        if file:
            entry[name] = _file(file)
    return entry


def _file(file: TensorFile) -> dict[str, str]:
    assert file.path is not None
    return {"file": file.path.name, "sha256": file.sha256}


def _checkpoint(
    folder: Path, entry: Mapping[str, Any], initial: Checkpoint | None = None
) -> Checkpoint:
    def file(item: Mapping[str, Any], aliases: Mapping[str, str]) -> TensorFile:
        check_types(item, sha256=str, file=str)
        # Take the file's name only: run.json must not lead to a file outside the folder.
        return TensorFile(item["sha256"], folder / "checkpoints" / Path(item["file"]).name, aliases)

    known = {"aliases": {}, "unchanged": [], "stored": ""} | dict(entry)
    check_types(known, step=int, stage=str, aliases=dict, unchanged=list, stored=str)
    weights = file(entry, known["aliases"])
    if known["unchanged"]:
        base = None if initial is None else initial.files
        names = [str(name) for name in known["unchanged"]]
        weights = replace(weights, base=base, unchanged=names, stored=known["stored"])
    moments, state = (file(entry[k], {}) if k in entry else None for k in ("moments", "state"))
    return Checkpoint(entry["step"], entry["stage"], weights, moments, state)
