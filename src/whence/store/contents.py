"""What a store holds, read from its folder: settings, projection, rows, second moments.

store/
  store.json                 settings, fingerprints, progress
  gradients/0-00000188.npy   P∇L(m, θ_c), (n, d), of stage 0 at step 188
  losses/                    of all examples, by stage and step
  factors/                   second moments (d, d), and the eigenbasis
  decompositions/            decompositions of the second moments
  indexes/                   of FAISS, where one was asked for
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whence.data import Batches, cut
from whence.engine.dynamics import run_preconditioner
from whence.engine.projected_space import random_projection, two_sided_projection
from whence.engine.workspace import LOSS, MEASUREMENT, Workspace
from whence.errors import InvalidInput, MissingFile, warn
from whence.layers.passes import LOSSES, Signal, Weights
from whence.operators import Basis, accumulator
from whence.persist.cache import FactorCache, shared
from whence.persist.files import make_folder, write_json
from whence.persist.identity import key_of
from whence.projections import Eigenbasis, Projection, projected
from whence.projections.eigenbasis import LeadingEntries
from whence.run import Run
from whence.run.checkpoint import Checkpoint
from whence.store import index
from whence.store.rows import FORMS, StoredRows, columns
from whence.study import Study, task_identity
from whence.world import World

#: projections that need no fit: from dimension, whether joint, and seed
SEEDED: dict[str, Callable[[Workspace, int, bool, int], Projection]] = {
    "random": random_projection,
    "two-sided": two_sided_projection,
}
DECOMPOSITION_BYTES = 4 * 2**30  # of decompositions in memory


@dataclass(frozen=True)
class Unit:
    """One matrix of rows: the examples of a stage at a checkpoint."""

    stage: str
    checkpoint: Checkpoint
    name: str


class StoreContents:
    """A store's folder, for the study it was built from."""

    def __init__(self, path: Path, study: Study, description: dict[str, Any]) -> None:
        self.path, self.study, self.description = path, study, description
        self.world = World.current()
        self.factors = shared(FactorCache(path / "factors"), self.world)
        self._decompositions = shared(FactorCache(path / "decompositions"), self.world)
        self._index_files = FactorCache(path / "indexes")
        self._indexes: dict[str, Any] = {}
        self._projections: dict[str, Projection] = {}
        self._rows: dict[str, StoredRows] = {}
        self._in_memory: dict[str, list[Tensor]] = {}  # recent decompositions

    @property
    def dimension(self) -> int:
        return int(self.description["settings"]["dimension"])

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that the store was built with."""
        return dict(self.description["settings"])

    @property
    def data(self) -> dict[str, dict[str, Any]]:
        """The number of examples and their SHA-256, per stage."""
        return dict(self.description["data"])

    @property
    def fingerprint(self) -> str:
        """A hash of everything that the stored numbers depend on."""
        return key_of({k: self.description[k] for k in ("settings", "identity", "data")})

    def projection(self, workspace: Workspace) -> Projection:
        """P, on the workspace's device."""
        place = str(workspace.device)
        if place not in self._projections:
            s = self.description["settings"]
            if s["projection"] in SEEDED:
                how = s["dimension"], s["joint"], s["seed"]
                projection = SEEDED[s["projection"]](workspace, *how)
                if self.preconditioned:
                    projection = projection.scaled(run_preconditioner(workspace))
                self._projections[place] = projection
            else:
                tensors = self.factors.get(self.eigenbasis_key)
                if tensors is None:
                    raise InvalidInput(
                        f"the eigenbasis of the store in {self.path} is missing: delete the store, "
                        "and build it again"
                    )
                self.place_eigenbasis(workspace, tensors)
        return self._projections[place]

    def rows(self, stage: str, checkpoint: Weights) -> StoredRows:
        """P∇L(m, θ_c) of a stage's examples, (n, d), memory-mapped."""
        name = self._name(stage, checkpoint.step)
        if name not in self._rows:
            about = self.description["rows"].get(name, {})
            form = self.rows_form(self.description["data"][stage]["examples"])
            self._rows[name] = StoredRows(self.rows_path(name), {**about, **form}, self.form)
        return self._rows[name]

    def rows_form(self, examples: int) -> dict[str, Any]:
        """Shape and dtype of a matrix of rows."""
        shape = [examples, columns(self.form, self.dimension)]
        return {"shape": shape, "dtype": str(self.dtype)}

    @property
    def form(self) -> str:
        """What rows are stored in, of `FORMS`."""
        return str(self.settings.get("rows", "full"))

    @property
    def preconditioned(self) -> bool:
        """Whether rows are P P̄^½ ∇L, with P̄ of an Adam-type optimizer over the whole run."""
        return bool(self.settings.get("preconditioned", False))

    def curvature(self, workspace: Workspace, stage: str, checkpoint: Weights) -> list[Tensor]:
        """Σ over the examples that were trained on of P g̃ g̃ᵀ Pᵀ, for each part of P."""
        return self._moments(workspace, stage, checkpoint, self.fisher)

    def measured(self, workspace: Workspace, stage: str) -> list[Tensor]:
        """Σ φφᵀ over all examples of a stage, φ = P∇f, for each part of P."""
        return self._moments(workspace, stage, workspace.run.final, MEASUREMENT)

    def projected(
        self, workspace: Workspace, data: Batches, indices: NDArray[np.int64], checkpoint: Weights
    ) -> Tensor:
        """P∇f(q, θ_c) of these queries, (q, d)."""
        passes = workspace.final_passes
        passes.load(checkpoint)
        batches = [indices[b] for b in cut(len(indices), workspace.batch_size)]
        pieces = projected(
            passes, data, batches, MEASUREMENT, self.projection(workspace), workspace.memory // 4
        )
        return torch.cat([piece.rows for piece in pieces])

    def decomposition(
        self,
        workspace: Workspace,
        settings: Mapping[str, Any],
        fit: Callable[[], list[Tensor]],
        on_disk: bool = False,
    ) -> list[Tensor]:
        """A decomposition of the second moments, computed by `fit` once and cached in memory.

        Args:
            on_disk: also save it with the store, because computing it takes long.
        """
        key = key_of({**settings, "store": self.fingerprint})
        place = f"{key} {workspace.device}"
        if place not in self._in_memory:
            parts = self._decompositions.get(key) if on_disk else None
            if parts is None:
                with workspace.clock("decomposition"):
                    parts = {f"{k}": value.contiguous() for k, value in enumerate(fit())}
                if on_disk:
                    self._save("a decomposition", self._decompositions, key, parts, settings)
            self._in_memory[place] = [parts[f"{k}"].to(workspace.device) for k in range(len(parts))]
        self._in_memory[place] = self._in_memory.pop(place)  # the last to be evicted
        sizes = {k: sum(value.nbytes for value in cached) for k, cached in self._in_memory.items()}
        while sum(sizes.values()) > DECOMPOSITION_BYTES and len(sizes) > 1:
            oldest = next(iter(sizes))
            del self._in_memory[oldest], sizes[oldest]
        return self._in_memory[place]

    def _save(
        self,
        what: str,
        files: FactorCache,
        key: str,
        parts: Mapping[str, Tensor],
        settings: Mapping[str, Any],
    ) -> None:
        """Save what is computed from the rows, if the store's folder may be written."""
        try:
            files.put(key, parts, settings)
        except PermissionError as error:
            warn(
                f"{what} cannot be saved with the store ({error}): the next process will compute "
                "it again",
                stacklevel=3,
            )

    def index(self, stage: str, checkpoints: Sequence[Weights]) -> Any:
        """An index of a stage's rows at these checkpoints, built once and saved with the store."""
        steps = [c.step for c in checkpoints]
        settings = {"what": "index", "stage": stage, "steps": steps, "store": self.fingerprint}
        key = key_of(settings)
        if key not in self._indexes:
            stored = self._index_files.get(key)
            if stored is None:
                content = index.built([self.rows(stage, c) for c in checkpoints])
                stored = {"index": torch.from_numpy(content)}
                self._save("an index", self._index_files, key, stored, settings)
            self._indexes[key] = index.opened(stored["index"].numpy())
        return self._indexes[key]

    def units(self, run: Run) -> list[Unit]:
        """The matrices of rows that the methods need; the last is at the final model."""
        stages, along_run = self.study.stages, {"tracin", "source"} & {*self.description["methods"]}
        wanted = [(c.stage, c) for c in run.checkpoints] if along_run else []
        if {"influence", "trak"} & {*self.description["methods"]}:
            wanted += [(s, run.final) for s in stages if not along_run or s != run.final.stage]
        return [Unit(stage, c, self._name(stage, c.step)) for stage, c in wanted]

    def check_losses(self, workspace: Workspace, unit: Unit) -> None:
        """Refuse to use or add to rows of other losses; store those of further examples."""
        path, data = self.path / "losses" / f"{unit.name}.safetensors", self.study.data[unit.stage]
        passes = workspace.passes[unit.stage]
        tried = passes.tried(data, unit.checkpoint, LOSSES, workspace.batch_size)
        written = self.description["rows"].keys() | self.description["partial"].keys()
        if unit.name in written and not self.world.of_first(path.exists()):
            warn(
                f"{path} is missing: the store's gradients of {data.name} at step "
                f"{unit.checkpoint.step} cannot be compared with the losses of this study. Put the "
                "file back, or build the store again at another path",
                stacklevel=3,
            )
        if not self.world.first:
            return
        if path.exists() and tried.differs_from(path, "delete the store, and build it again"):
            raise InvalidInput(
                f"the store in {self.path} was built with other losses of {data.name} at step "
                f"{unit.checkpoint.step}: loss, model or data have changed. Choose another path, "
                "or delete that folder"
            )
        if not self.description["complete"]:
            make_folder(path.parent)
            tried.save(path)

    def _moments(
        self, workspace: Workspace, stage: str, checkpoint: Weights, signal: Signal
    ) -> list[Tensor]:
        unit = next(
            u
            for u in self.units(workspace.run)
            if u.stage == stage and u.checkpoint.step == checkpoint.step
        )
        ranges = self.description["moments"].get(self.moments_name(unit, signal), [])
        if not ranges or ranges[-1][1] != self.description["data"][stage]["examples"]:
            raise InvalidInput(
                f"the store has no second moments of {signal.name} gradients of {stage} at step "
                f"{checkpoint.step} (for TRAK: of this measurement). Build it again to add them"
            )
        sums: list[Tensor] = []
        for first, last, count in ranges:
            if count == 0:  # none of these examples was trained on
                continue
            stored = self.factors.get(key_of(self.moments_key(unit, signal, [first, last])))
            if stored is None:
                raise MissingFile(
                    f"the store in {self.path} is incomplete: second moments at step "
                    f"{checkpoint.step} are missing. Delete it, and build it again"
                )
            parts = [stored[f"{k}"].to(workspace.device) for k in range(len(stored))]
            sums = [a + b for a, b in zip(sums, parts, strict=True)] if sums else parts
        return sums

    def moments_name(self, unit: Unit, signal: Signal) -> str:
        what = signal.name
        if signal == MEASUREMENT:
            what += f" {key_of(task_identity(self.study.tasks[unit.stage], measured=True))}"
        return f"{unit.name} {what}"

    def moments_key(self, unit: Unit, signal: Signal, examples: list[int]) -> dict[str, Any]:
        return {
            "what": "second moments",
            "of": self.moments_name(unit, signal),
            "examples": examples,
        }

    def place_eigenbasis(self, workspace: Workspace, tensors: Mapping[str, Tensor]) -> None:
        """Use the leading entries of each block's eigenbasis as P, on the workspace's device."""
        device, entries = workspace.device, {}
        for name in (b.name for b in workspace.trained_blocks()):
            if f"{name}/rows" in tensors:
                basis = Basis(tensors.get(f"{name}/outputs"), tensors[f"{name}/inputs"])
                rows, columns = (tensors[f"{name}/{k}"].to(device) for k in ("rows", "columns"))
                placed = basis.to(device, workspace.dtype)
                entries[name] = LeadingEntries(placed, rows, columns)
        joint = self.description["settings"]["joint"]
        parts = [entries] if joint else [{name: entry} for name, entry in entries.items()]
        self._projections[str(device)] = Projection([Eigenbasis(part) for part in parts])

    @property
    def eigenbasis_key(self) -> str:
        return key_of({"eigenbasis": self.description["settings"]})

    @property
    def fisher(self) -> Signal:
        s = self.description["settings"]
        return LOSS if s["fisher"] == "empirical" else Signal(s["fisher"], s["seed"])

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the stored entries."""
        stored = FORMS[self.form]
        if stored is not None:
            return stored
        wide = accumulator(getattr(torch, self.description["settings"]["dtype"]))
        return np.dtype(np.float64 if wide == torch.float64 else np.float32)

    def _name(self, stage: str, step: int) -> str:
        return f"{self.study.stages.index(stage)}-{step:08d}"

    def rows_path(self, name: str) -> Path:
        return self.path / "gradients" / f"{name}.npy"

    def save(self) -> None:
        """Write the description; rank 0's counts."""
        if self.world.first:
            write_json(self.path / "store.json", self.description)
