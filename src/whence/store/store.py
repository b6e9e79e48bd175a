"""GradientStore: every training example's gradient in few dimensions, written once.

    store/
      store.json                 settings, fingerprints, progress
      gradients/0-00000188.npy   P∇L(m, θ_c), (n, d), of stage 0 at step 188
      factors/                   second moments (d, d), and the eigenbasis
      decompositions/            decompositions of the second moments

`build` projects gradients in the order of the data, a block at a time. Rerun the same call to
resume an interrupted build, or to add examples appended to the data. TracIn, influence functions,
TRAK and SOURCE then answer queries from the rows and the second moments alone (see `workspace`).
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whence.data import Batches, cut
from whence.engine.estimate import announce
from whence.engine.options import ComputeOptions
from whence.engine.projected_space import check_dimension, random_projection, try_out
from whence.engine.trials import LOSSES
from whence.engine.workspace import LOSS, MEASUREMENT, Workspace, scored_stages
from whence.errors import DiskFull, InvalidInput, MissingFile, NotFinite
from whence.layers.passes import Signal, Weights, precision_as_asked, rounded_products
from whence.methods import Influence, Source, TracIn, Trak
from whence.methods.gradient import GradientMethod
from whence.operators import EKFAC, Basis, accumulator, cost
from whence.operators.products import add_gram, mirror
from whence.persist.factor_cache import FactorCache
from whence.persist.files import make_folder, write_json
from whence.persist.identity import key_of
from whence.persist.snapshots import Throttle
from whence.projections import Eigenbasis, Projection, moments, projected
from whence.projections.eigenbasis import LeadingEntries, leading
from whence.run import Run
from whence.run.checkpoint import Checkpoint
from whence.scores import Scores
from whence.store.identity import (
    METHODS,
    SCHEMA,
    check_choices,
    check_data,
    check_same,
    digest_of,
    identity_of,
    only_run,
    read,
)
from whence.store.rows import Rows, finished, mapped
from whence.store.workspace import StoreWorkspace
from whence.study import Study, task_identity
from whence.table import listed

PROGRESS_SECONDS = 5.0  # between two records of progress
DECOMPOSITION_BYTES = 4 * 2**30  # of decompositions in memory
ROW_TOLERANCE = 1e-3  # relative difference of a recomputed row from the stored one


class AnswerOptions(TypedDict, total=False):
    """The options that every answer takes, as in `Method.attribute`."""

    device: torch.device | str | None
    batch_size: int | None
    memory: int | str | None
    out: str | os.PathLike[str] | None
    top: int | None
    progress: bool
    by_segment: bool
    workers: int


@dataclass(frozen=True)
class Unit:
    """One matrix of rows: the examples of a stage at a checkpoint."""

    stage: str
    checkpoint: Checkpoint
    name: str


class GradientStore:
    """Projected per-example gradients of one run, on disk, and the methods that answer from them.

    Create it with `build`, and reopen it with `open`. A store holds one run. For an ensemble, build
    one store per run and average their scores with `whence.scores.ensemble`.
    """

    def __init__(self, path: Path, study: Study, description: dict[str, Any]) -> None:
        self.path, self.study, self._description = path, study, description
        self._workspaces: dict[str, StoreWorkspace] = {}  # by their compute options
        self._factors = FactorCache(path / "factors")
        self._decompositions = FactorCache(path / "decompositions")
        self._projections: dict[str, Projection] = {}
        self._rows: dict[str, Tensor] = {}
        self._in_memory: dict[str, list[Tensor]] = {}  # recent decompositions
        self._verified: set[str] = set()

    # -- building and opening ------------------------------------------------------------------

    @classmethod
    def build(
        cls,
        study: Study,
        path: str | os.PathLike[str],
        dimension: int = 4096,
        projection: str = "random",
        *,
        joint: bool = True,
        fisher: str = "empirical",
        seed: int = 0,
        methods: Sequence[str] = METHODS,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        batch_size: int | None = None,
        memory: int | str | None = None,
        progress: bool = True,
        workers: int = 0,
    ) -> GradientStore:
        """Project the gradients of all training examples that are not stored yet.

        Args:
            path: a folder. An existing store of the same run, data and settings is completed: after
                an interruption, for further methods, or for examples appended to the data.
            dimension: d, of all layers together.
            projection: "random" signs, or "eigenbasis": the d leading coordinates in the
                eigenbases of the layers' curvature, which is far cheaper to apply.
            joint: one curvature matrix (and random projection) for all layers, or one for each.
            fisher: how to measure the curvature. "empirical" uses the rows and needs no further
                pass; "sampled" and "exact" are as in `Source`.
            seed: of the random signs, and of the pseudo-targets.
            methods: the methods that the store can answer. "tracin" and "source" need all
                checkpoints, "influence" and "trak" only the last; all but "tracin" need second
                moments.
            device, dtype, batch_size, memory, progress, workers: as in `Method.attribute`.
        """
        run = only_run(study)
        check_choices(projection, fisher, methods)
        folder = Path(path)
        with torch.no_grad(), precision_as_asked():
            options = ComputeOptions(device, dtype, batch_size, memory, progress, workers)
            workspace = Workspace.lay_out(study, run, options)
            check_dimension(dimension, workspace.trained_blocks(), workspace.memory)
            settings = {
                "dimension": dimension,
                "projection": projection,
                "joint": bool(joint),
                "fisher": fisher,
                "seed": seed,
                "dtype": str(dtype).removeprefix("torch."),
            }
            rounded = rounded_products(dtype, workspace.device)
            settings |= {"rounded": rounded} if rounded else {}
            identity = identity_of(workspace)
            if (folder / "store.json").exists():
                description = read(folder)
                check_same(folder, description, {"settings": settings, "identity": identity})
                for stage, data in study.data.items():
                    check_data(folder, stage, description["data"][stage], data)
                description["methods"] = [
                    m for m in METHODS if m in {*description["methods"], *methods}
                ]
            else:
                if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                    raise InvalidInput(
                        f"{folder} is not empty and is not a store: choose another path"
                    )
                description = {"schema": SCHEMA, "settings": settings, "identity": identity}
                description |= {"methods": [m for m in METHODS if m in methods]}
                description |= {"data": {}, "partial": {}, "moments": {}}
            before = description["data"]
            description["data"] = {
                stage: {"examples": len(data), "sha256": digest_of(data, len(data))}
                for stage, data in study.data.items()
            }
            if before != description["data"]:  # decompositions of fewer examples are of no use
                shutil.rmtree(folder / "decompositions", ignore_errors=True)
            description["complete"] = False
            store = cls(folder, study, description)
            store._complete(workspace)
        return store

    @classmethod
    def open(cls, path: str | os.PathLike[str], study: Study) -> GradientStore:
        """Open a finished store, for the study it was built from.

        This compares model, task, run, data and the final model's losses of all examples with those
        of the store once. Later queries do not read the training data.
        """
        folder = Path(path)
        description = read(folder)
        run = only_run(study)
        if not description["complete"]:
            raise InvalidInput(
                f"the store in {folder} is not finished: make the same GradientStore.build call "
                "again to resume"
            )
        dtype = getattr(torch, description["settings"]["dtype"])
        with torch.no_grad(), precision_as_asked():
            workspace = Workspace.lay_out(study, run, ComputeOptions(dtype=dtype, progress=False))
            check_same(folder, description, {"identity": identity_of(workspace)})
        for stage, data in study.data.items():
            check_data(folder, stage, description["data"][stage], data)
            stored = description["data"][stage]["examples"]
            if len(data) > stored:
                raise InvalidInput(
                    f"the store in {folder} is of {stored} examples, and {data.name} has "
                    f"{len(data)}: GradientStore.build adds the others"
                )
        store = cls(folder, study, description)
        for unit in store._units(run):
            store.rows(unit.stage, unit.checkpoint)
        with torch.no_grad(), precision_as_asked():
            store._check_losses(workspace, store._units(run)[-1])
        return store

    # -- answers -------------------------------------------------------------------------------

    def tracin(
        self, query: Any, *, stage: str | None = None, **options: Unpack[AnswerOptions]
    ) -> Scores:
        """`TracIn` in the projected space."""
        return self._answer("tracin", TracIn(stage), query, options)

    def influence(
        self,
        query: Any,
        damping: float | str = "source",
        *,
        coupling: bool = True,
        stage: str | None = None,
        **options: Unpack[AnswerOptions],
    ) -> Scores:
        """`Influence` in the projected space, where the curvature is a whole matrix.

        Args:
            damping: λ, or "source" for λ = 1/(η̄K). A measured d × d matrix has many eigenvalues
                near zero, which a λ as small as the paper's would let dominate the scores.
            coupling: as in `Influence`; a joint projection couples layers by itself.
        """
        if damping == 0:
            raise InvalidInput(f"damping={damping!r} must be positive, or 'source' for λ = 1/(η̄K)")
        method = Influence(damping, stage=stage, coupling=coupling)
        return self._answer("influence", method, query, options)

    def trak(
        self,
        query: Any,
        damping: float = 0.0,
        *,
        stage: str | None = None,
        **options: Unpack[AnswerOptions],
    ) -> Scores:
        """`Trak`: the same scores, from a random store of the same dimension and seed."""
        s = self._description["settings"]
        method = Trak(s["dimension"], s["seed"], stage, s["joint"], damping)
        return self._answer("trak", method, query, options)

    def source(
        self,
        query: Any,
        segments: int | str | Sequence[int] = "stages",
        *,
        coupling: bool = True,
        query_at: str = "run",
        stage: str | None = None,
        **options: Unpack[AnswerOptions],
    ) -> Scores:
        """`Source` in the projected space (SGD, with or without momentum).

        Args:
            segments: as in `Source`.
            coupling: as in `Source`; a joint projection couples layers by itself.
            query_at: as in `Source`.
        """
        method = Source(segments, stage=stage, coupling=coupling, query_at=query_at)
        return self._answer("source", method, query, options)

    def _answer(
        self, name: str, method: GradientMethod, query: Any, options: AnswerOptions
    ) -> Scores:
        known = self._description["methods"]
        if name not in known:
            raise InvalidInput(
                f"the store was built for {', '.join(known)}, not for {name}: build it "
                f"again with methods=[..., {name!r}] to add what is missing"
            )
        if query is None:
            raise InvalidInput(
                "a store answers queries: for self-influence use the method itself, as in "
                "whence.Source().attribute(study)"
            )
        compute: dict[str, Any] = dict(options)
        out, top = compute.pop("out", None), compute.pop("top", None)
        by_segment = compute.pop("by_segment", False)
        dtype = getattr(torch, self._description["settings"]["dtype"])
        with torch.no_grad(), precision_as_asked():
            workspace = self._workspace(ComputeOptions(dtype=dtype, **compute))
            stages = scored_stages(self.study, method.stage)
            workspace = workspace.for_query(self.study.query(query), stages)
            self.verify(workspace)
            return method.score(workspace, out, top, by_segment)

    def _workspace(self, options: ComputeOptions) -> StoreWorkspace:
        """One workspace for all queries, because copying and checking the model takes long."""
        key = repr(options)
        if key not in self._workspaces:
            laid_out = Workspace.lay_out(self.study, only_run(self.study), options)
            fields = {f.name: getattr(laid_out, f.name) for f in dataclasses.fields(laid_out)}
            self._workspaces[key] = StoreWorkspace(**fields, store=self)
        clock = self._workspaces[key].clock
        clock.seconds.clear()
        clock.cpu_seconds.clear()
        return self._workspaces[key]

    # -- the parts of an answer ----------------------------------------------------------------

    @property
    def dimension(self) -> int:
        return int(self._description["settings"]["dimension"])

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that the store was built with."""
        return dict(self._description["settings"])

    @property
    def data(self) -> dict[str, dict[str, Any]]:
        """The number of examples and their SHA-256, per stage."""
        return dict(self._description["data"])

    @property
    def fingerprint(self) -> str:
        """A hash of everything that the stored numbers depend on."""
        return key_of({k: self._description[k] for k in ("settings", "identity", "data")})

    def projection(self, workspace: Workspace) -> Projection:
        """P, on the workspace's device."""
        place = str(workspace.device)
        if place not in self._projections:
            s = self._description["settings"]
            if s["projection"] == "random":
                projection = random_projection(workspace, s["dimension"], s["joint"], s["seed"])
            else:
                entries = self._eigenbasis(workspace)
                parts = [entries] if s["joint"] else [{name: e} for name, e in entries.items()]
                projection = Projection([Eigenbasis(part) for part in parts])
            self._projections[place] = projection
        return self._projections[place]

    def rows(self, stage: str, checkpoint: Weights) -> Tensor:
        """P∇L(m, θ_c) of a stage's examples, (n, d), memory-mapped."""
        name = self._name(stage, checkpoint.step)
        if name not in self._rows:
            count = self._description["data"][stage]["examples"]
            self._rows[name] = mapped(self._path(name), count, self.dimension, self._dtype)
        return self._rows[name]

    def curvature(self, workspace: Workspace, stage: str, checkpoint: Weights) -> list[Tensor]:
        """Σ over the examples that were trained on of P g̃ g̃ᵀ Pᵀ, for each part of P."""
        return self._moments(workspace, stage, checkpoint, self._fisher)

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
                    self._save_decomposition(key, parts, settings)
            self._in_memory[place] = [parts[f"{k}"].to(workspace.device) for k in range(len(parts))]
        self._in_memory[place] = self._in_memory.pop(place)  # the last to be evicted
        sizes = {k: sum(value.nbytes for value in cached) for k, cached in self._in_memory.items()}
        while sum(sizes.values()) > DECOMPOSITION_BYTES and len(sizes) > 1:
            oldest = next(iter(sizes))
            del self._in_memory[oldest], sizes[oldest]
        return self._in_memory[place]

    def _save_decomposition(
        self, key: str, parts: Mapping[str, Tensor], settings: Mapping[str, Any]
    ) -> None:
        try:
            self._decompositions.put(key, parts, settings)
        except PermissionError as error:
            warnings.warn(
                f"a decomposition cannot be saved with the store ({error}): the next process will "
                "compute it again",
                stacklevel=2,
            )

    def verify(self, workspace: Workspace) -> None:
        """Recompute one stored row, once per device, to check model, data, P and store together."""
        place = str(workspace.device)
        if place in self._verified:
            return
        unit = self._units(workspace.run)[-1]
        passes, data = workspace.passes[unit.stage], self.study.data[unit.stage]
        passes.load(unit.checkpoint)
        first = [np.arange(1)]
        (piece,) = projected(
            passes, data, first, LOSS, self.projection(workspace), workspace.memory
        )
        stored = self.rows(unit.stage, unit.checkpoint)[0].to(piece.rows)
        off = float((piece.rows[0] - stored).norm() / stored.norm().clamp_min(1e-30))
        if not off < max(ROW_TOLERANCE, 8 * torch.finfo(workspace.dtype).eps):
            raise InvalidInput(
                f"the store in {self.path} does not belong to this study: example 0 of {data.name} "
                f"at step {unit.checkpoint.step} has another gradient now (off by {off:.1e})"
            )
        self._verified.add(place)

    # -- building ------------------------------------------------------------------------------

    def _complete(self, workspace: Workspace) -> None:
        """Compute the rows and second moments that are missing."""
        make_folder(self.path / "gradients")
        self._check_room()
        self._announce(workspace)
        self._note()
        projection = self.projection(workspace)
        if self._description["settings"]["projection"] == "random":
            try_out(workspace, projection)
        make_folder(self.path / "losses")
        for unit in self._units(workspace.run):
            self._check_losses(workspace, unit)
            self._write_rows(workspace, unit)
        for unit, signal in self._wanted_moments(workspace.run):
            self._add_moments(workspace, unit, signal)
        self._description["complete"] = True
        self._note()

    def _check_losses(self, workspace: Workspace, unit: Unit) -> None:
        """Refuse to use or add to rows of other losses; store those of further examples."""
        path, data = self.path / "losses" / f"{unit.name}.safetensors", self.study.data[unit.stage]
        tried = workspace.trials(unit.stage, data, unit.checkpoint, LOSSES)
        if path.exists() and tried.differs_from(path, "delete the store, and build it again"):
            raise InvalidInput(
                f"the store in {self.path} was built with other losses of {data.name} at step "
                f"{unit.checkpoint.step}: loss, model or data have changed. Choose another path, "
                "or delete that folder"
            )
        if not self._description["complete"]:
            tried.save(path)

    def _units(self, run: Run) -> list[Unit]:
        """The matrices of rows that the methods need; the last is at the final model."""
        stages, every = self.study.stages, {"tracin", "source"} & {*self._description["methods"]}
        wanted = [(c.stage, c) for c in run.checkpoints] if every else []
        if {"influence", "trak"} & {*self._description["methods"]}:
            wanted += [(s, run.final) for s in stages if not every or s != run.final.stage]
        return [Unit(stage, c, self._name(stage, c.step)) for stage, c in wanted]

    def _wanted_moments(self, run: Run) -> list[tuple[Unit, Signal]]:
        methods = {*self._description["methods"]}
        wanted = []
        for unit in self._units(run):
            final = unit.checkpoint.step == run.final.step
            same_stage = unit.checkpoint.stage == unit.stage
            if ("source" in methods and same_stage) or ("influence" in methods and final):
                wanted.append((unit, self._fisher))
            if "trak" in methods and final:
                wanted.append((unit, MEASUREMENT))
        return wanted

    def _write_rows(self, workspace: Workspace, unit: Unit) -> None:
        path, data = self._path(unit.name), self.study.data[unit.stage]
        if finished(path, self.dimension, self._dtype) == len(data):
            return
        complete = self._description["partial"].get(unit.name, 0)
        rows = Rows(path, len(data), self.dimension, self._dtype, complete)
        passes, throttle = workspace.passes[unit.stage], Throttle(PROGRESS_SECONDS)
        passes.load(unit.checkpoint)
        left = np.arange(rows.start, len(data))
        batches = [left[b] for b in cut(len(left), workspace.batch_size)]
        label, room = f"gradients, step {unit.checkpoint.step}", workspace.memory // 4
        with passes.clock("projection"):
            for piece in projected(
                passes, data, batches, LOSS, self.projection(workspace), room, label
            ):
                self._refuse_bad(piece.rows, piece.indices, data, unit.checkpoint)
                rows.write(int(piece.indices[0]), piece.rows)
                if throttle.due():
                    with throttle.saving():
                        rows.flush()
                        self._description["partial"][unit.name] = int(piece.indices[-1]) + 1
                        self._note()
        rows.finish()
        self._description["partial"].pop(unit.name, None)
        self._note()

    @staticmethod
    def _refuse_bad(
        rows: Tensor, indices: NDArray[np.int64], data: Batches, checkpoint: Weights
    ) -> None:
        bad = indices[(~rows.isfinite().all(1)).cpu().numpy()]
        if len(bad):
            raise NotFinite(
                f"checkpoint at step {checkpoint.step}: the projected gradient is NaN or infinite "
                f"for {data.name} example {listed(bad)}. Mend or leave out the example, or use "
                "float64"
            )

    def _add_moments(self, workspace: Workspace, unit: Unit, signal: Signal) -> None:
        """Add the second moments of the examples that they do not include yet."""
        ranges = self._description["moments"].setdefault(self._moments_name(unit, signal), [])
        first, last = ranges[-1][1] if ranges else 0, len(self.study.data[unit.stage])
        if first == last:
            return
        chosen = np.arange(last)
        if signal != MEASUREMENT:
            chosen = self.study.used(workspace.run, unit.stage)
        chosen = chosen[(chosen >= first) & (chosen < last)]
        identity = self._moments_key(unit, signal, [first, last])
        if signal == LOSS and len(chosen):  # from the stored rows, without another pass
            rows = self.rows(unit.stage, unit.checkpoint)
            self._factors.put(
                key_of(identity), self._row_moments(workspace, rows, chosen), identity
            )
        elif len(chosen):
            part = workspace.fit_data([unit.stage])[0]
            part = dataclasses.replace(part, indices=chosen)
            room, batch = workspace.memory // 4, workspace.batch_size
            projection = self.projection(workspace)
            moments(
                [part], unit.checkpoint, signal, projection, self._factors, identity, batch, room
            )
        ranges.append([first, last, len(chosen)])
        self._note()

    def _row_moments(
        self, workspace: Workspace, rows: Tensor, chosen: NDArray[np.int64]
    ) -> dict[str, Tensor]:
        sums = {}
        for k, where in enumerate(self.projection(workspace).columns):
            d = where.stop - where.start
            total = torch.zeros(d, d, dtype=torch.float64, device=workspace.device)
            for block in cut(len(chosen), 4 * workspace.batch_size):
                add_gram(total, rows[torch.from_numpy(chosen[block])][:, where].to(total))
            sums[f"{k}"] = mirror(total)
        return sums

    def _moments(
        self, workspace: Workspace, stage: str, checkpoint: Weights, signal: Signal
    ) -> list[Tensor]:
        unit = next(
            u
            for u in self._units(workspace.run)
            if u.stage == stage and u.checkpoint.step == checkpoint.step
        )
        ranges = self._description["moments"].get(self._moments_name(unit, signal), [])
        if not ranges or ranges[-1][1] != self._description["data"][stage]["examples"]:
            raise InvalidInput(
                f"the store has no second moments of {signal.name} gradients of {stage} at step "
                f"{checkpoint.step} (for TRAK: of this measurement). Build it again to add them"
            )
        sums: list[Tensor] = []
        for first, last, count in ranges:
            if count == 0:  # none of these examples was trained on
                continue
            stored = self._factors.get(key_of(self._moments_key(unit, signal, [first, last])))
            if stored is None:
                raise MissingFile(
                    f"the store in {self.path} is incomplete: second moments at step "
                    f"{checkpoint.step} are missing. Delete it, and build it again"
                )
            parts = [stored[f"{k}"].to(workspace.device) for k in range(len(stored))]
            sums = [a + b for a, b in zip(sums, parts, strict=True)] if sums else parts
        return sums

    def _moments_name(self, unit: Unit, signal: Signal) -> str:
        what = signal.name
        if signal == MEASUREMENT:
            what += f" {key_of(task_identity(self.study.tasks[unit.stage], measured=True))}"
        return f"{unit.name} {what}"

    def _moments_key(self, unit: Unit, signal: Signal, examples: list[int]) -> dict[str, Any]:
        return {
            "what": "second moments",
            "of": self._moments_name(unit, signal),
            "examples": examples,
        }

    def _eigenbasis(self, workspace: Workspace) -> dict[str, LeadingEntries]:
        """The leading entries of each block, fitted once, by the first build."""
        device, dtype = workspace.device, workspace.dtype
        key = key_of({"eigenbasis": self._description["settings"]})
        tensors = self._factors.get(key)
        if tensors is None:
            if self._description["partial"] or any((self.path / "gradients").iterdir()):
                raise InvalidInput(
                    f"the eigenbasis of the store in {self.path} is missing: delete the store, and "
                    "build it again"
                )
            s = self._description["settings"]
            fitter = workspace.fitter(self.study.stages, s["fisher"], s["seed"])
            checkpoints = {u.checkpoint.step: u.checkpoint for u in self._units(workspace.run)}
            curvature = EKFAC.fit(fitter, list(checkpoints.values())).factors
            tensors = {}
            for name, entries in leading(
                curvature, workspace.trained_blocks(), s["dimension"]
            ).items():
                tensors |= {f"{name}/outputs": entries.basis.outputs, f"{name}/rows": entries.rows}
                tensors |= {
                    f"{name}/inputs": entries.basis.inputs,
                    f"{name}/columns": entries.columns,
                }
            self._factors.put(key, tensors, {"what": "eigenbasis"})
        placed = {}
        for name in (b.name for b in workspace.trained_blocks()):
            if f"{name}/rows" in tensors:
                basis = Basis(tensors[f"{name}/outputs"], tensors[f"{name}/inputs"]).to(
                    device, dtype
                )
                rows, columns = (tensors[f"{name}/{k}"].to(device) for k in ("rows", "columns"))
                placed[name] = LeadingEntries(basis, rows, columns)
        return placed

    def _announce(self, workspace: Workspace) -> None:
        s, blocks = self._description["settings"], workspace.tracked.blocks
        forward = sum(cost.forward_backward(b, workspace.positions[b.name]) for b in blocks)
        work = 2.0 * sum(b.size for b in blocks) * s["dimension"]
        if s["projection"] == "eigenbasis":
            work = sum(cost.rotate_examples(b, workspace.positions[b.name], 1) for b in blocks)
        moment_passes = sum(signal != LOSS for _, signal in self._wanted_moments(workspace.run))
        passes = {"gradients": len(self._units(workspace.run)), "second moments": moment_passes}
        each = dict.fromkeys(passes, forward + work)
        announce(self, workspace, each, passes, 3 * s["dimension"] ** 2)

    def _check_room(self) -> None:
        d, units = self.dimension, self._units(only_run(self.study))
        rows = sum(len(self.study.data[u.stage]) for u in units if not self._path(u.name).exists())
        needed = rows * d * self._dtype.itemsize + 8 * d * d
        free = shutil.disk_usage(self.path).free
        if needed > free:
            raise DiskFull(
                f"the store needs {needed / 2**30:.1f} GiB in {self.path}, where "
                f"{free / 2**30:.1f} GiB are free: choose another path, or a smaller dimension"
            )

    @property
    def _fisher(self) -> Signal:
        s = self._description["settings"]
        return LOSS if s["fisher"] == "empirical" else Signal(s["fisher"], s["seed"])

    @property
    def _dtype(self) -> np.dtype[np.floating]:
        wide = accumulator(getattr(torch, self._description["settings"]["dtype"]))
        return np.dtype(np.float64 if wide == torch.float64 else np.float32)

    def _name(self, stage: str, step: int) -> str:
        return f"{self.study.stages.index(stage)}-{step:08d}"

    def _path(self, name: str) -> Path:
        return self.path / "gradients" / f"{name}.npy"

    def _note(self) -> None:
        write_json(self.path / "store.json", self._description)

    def __repr__(self) -> str:
        s = self._description["settings"]
        counts = ", ".join(f"{k}: {v['examples']:,}" for k, v in self._description["data"].items())
        return (
            f"GradientStore({self.path}: {s['projection']}, dimension {s['dimension']}, examples "
            f"{{{counts}}}, for {', '.join(self._description['methods'])})"
        )
