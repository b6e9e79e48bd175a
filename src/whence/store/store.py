"""GradientStore: every training example's gradient in few dimensions, written once.

    store/
      store.json                 settings, fingerprints, what is done
      gradients/0-00000188.npy   P∇L(m, θ_c), (n, d), of stage 0 at step 188
      factors/                   second moments (d, d), and the eigenbasis
      decompositions/            what answers have made of the second moments

Gradients are projected in the order of the data, a block at a time; a build that was killed goes on
where it stopped, and one that is made again after the data has grown at its end adds the rows that
are missing. Afterwards TracIn, influence functions, TRAK and SOURCE answer queries from the rows
and the second moments alone (see `answers`).
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
from whence.engine.workspace import LOSS, MEASUREMENT, Workspace, scored_stages
from whence.errors import DiskFull, InvalidInput, MissingFile, NotFinite
from whence.layers.passes import Signal, Weights, precision_as_asked, rounded_products
from whence.methods import Influence, Source, TracIn, Trak
from whence.methods.gradient import GradientMethod
from whence.operators import EKFAC, Basis, FitData, accumulator, cost
from whence.operators.products import add_gram, mirror
from whence.persist.factor_cache import FactorCache
from whence.persist.files import make_folder, write_json
from whence.persist.identity import key_of
from whence.persist.snapshots import Throttle
from whence.projections import Eigenbasis, Projection, moments, projected
from whence.projections.eigenbasis import Kept, leading
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
from whence.study import Study

NOTED_EVERY = 5.0  # seconds between two notes of progress
KEPT = 4 * 2**30  # bytes of decompositions that are held in memory
AGREES = 1e-3  # relative: how well a row that is made again must agree with the stored one


class How(TypedDict, total=False):
    """What every answer takes besides its own settings: see `Method.attribute`."""

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
    """One matrix of rows: a stage's examples at a checkpoint."""

    stage: str
    checkpoint: Checkpoint
    name: str


class GradientStore:
    """Projected per-example gradients of one run, on disk, and the methods that answer from them.

    Made by `build`, found again by `open`. It holds one run: for an ensemble make one store for
    each, and average their scores with `whence.scores.ensemble`.
    """

    def __init__(self, path: Path, study: Study, about: dict[str, Any]) -> None:
        self.path, self.study, self._about = path, study, about
        self._workspaces: dict[str, StoreWorkspace] = {}  # by how they compute
        self._factors, self._made = (
            FactorCache(path / "factors"),
            FactorCache(path / "decompositions"),
        )
        self._projections: dict[str, Projection] = {}
        self._rows: dict[str, Tensor] = {}
        self._kept: dict[str, list[Tensor]] = {}
        self._verified: set[str] = set()

    # -- making and finding --------------------------------------------------------------------

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
        """Project the gradients of all training examples, or what is missing of them.

        Args:
            path: a folder. If it holds a store of the same run, data and settings, it is completed:
                after an interruption, for further methods, or for examples that were added at the
                end of the data.
            dimension: d, of all layers together.
            projection: "random" signs, or "eigenbasis": the d leading coordinates in the
                eigenbases of the layers' curvature, which is far cheaper to apply.
            joint: one curvature matrix (and random projection) for all layers, or one for each.
            fisher: how the curvature is measured. "empirical" needs no pass of its own, because
                the rows are what it is made of; "sampled" and "exact" as in `Source`.
            seed: of the random signs, and of the pseudo-targets.
            methods: what the store must be able to answer. "tracin" and "source" need all
                checkpoints, "influence" and "trak" the last; all but "tracin" second moments.
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
                about = read(folder)
                check_same(folder, about, {"settings": settings, "identity": identity})
                for stage, data in study.data.items():
                    check_data(folder, stage, about["data"][stage], data)
                about["methods"] = [m for m in METHODS if m in {*about["methods"], *methods}]
            else:
                if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                    raise InvalidInput(f"{folder} is not empty, and no store: choose another path")
                about = {"schema": SCHEMA, "settings": settings, "identity": identity}
                about |= {"methods": [m for m in METHODS if m in methods]}
                about |= {"data": {}, "partial": {}, "moments": {}}
            before = about["data"]
            about["data"] = {
                stage: {"examples": len(data), "sha256": digest_of(data, len(data))}
                for stage, data in study.data.items()
            }
            if before != about["data"]:  # what answers made of fewer examples is of no use
                shutil.rmtree(folder / "decompositions", ignore_errors=True)
            about["complete"] = False
            store = cls(folder, study, about)
            store._complete(workspace)
        return store

    @classmethod
    def open(cls, path: str | os.PathLike[str], study: Study) -> GradientStore:
        """A store that was built, for the study it was built from.

        Model, task, run and data are compared with what the store was made of, once; later queries
        do not touch the training data.
        """
        folder = Path(path)
        about = read(folder)
        run = only_run(study)
        if not about["complete"]:
            raise InvalidInput(
                f"the store in {folder} is not finished: make the same GradientStore.build call "
                "again, and it goes on where it stopped"
            )
        dtype = getattr(torch, about["settings"]["dtype"])
        with torch.no_grad(), precision_as_asked():
            workspace = Workspace.lay_out(study, run, ComputeOptions(dtype=dtype, progress=False))
            check_same(folder, about, {"identity": identity_of(workspace)})
        for stage, data in study.data.items():
            check_data(folder, stage, about["data"][stage], data)
            if len(data) > about["data"][stage]["examples"]:
                raise InvalidInput(
                    f"the store in {folder} is of {about['data'][stage]['examples']} examples, and "
                    f"{data.name} has {len(data)}: GradientStore.build adds the others"
                )
        store = cls(folder, study, about)
        for unit in store._units(run):
            store.rows(unit.stage, unit.checkpoint)
        return store

    # -- answers -------------------------------------------------------------------------------

    def tracin(self, query: Any, *, stage: str | None = None, **how: Unpack[How]) -> Scores:
        """`TracIn` in the projected space."""
        return self._answer("tracin", TracIn(stage), query, how)

    def influence(
        self,
        query: Any,
        damping: float | str = "source",
        *,
        coupling: bool = True,
        stage: str | None = None,
        **how: Unpack[How],
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
        return self._answer("influence", method, query, how)

    def trak(
        self, query: Any, damping: float = 0.0, *, stage: str | None = None, **how: Unpack[How]
    ) -> Scores:
        """`Trak`: the same scores, from a random store of the same dimension and seed."""
        s = self._about["settings"]
        method = Trak(s["dimension"], s["seed"], stage, s["joint"], damping)
        return self._answer("trak", method, query, how)

    def source(
        self,
        query: Any,
        segments: int | str | Sequence[int] = "stages",
        *,
        coupling: bool = True,
        query_at: str = "run",
        stage: str | None = None,
        **how: Unpack[How],
    ) -> Scores:
        """`Source` in the projected space (SGD, with or without momentum).

        Args:
            segments: as in `Source`.
            coupling: as in `Source`; a joint projection couples layers by itself.
            query_at: as in `Source`.
        """
        method = Source(segments, stage=stage, coupling=coupling, query_at=query_at)
        return self._answer("source", method, query, how)

    def _answer(self, name: str, method: GradientMethod, query: Any, how: How) -> Scores:
        if name not in self._about["methods"]:
            raise InvalidInput(
                f"the store was built for {', '.join(self._about['methods'])}, not for {name}: "
                f"build it again with methods=[..., {name!r}], and what is missing is added"
            )
        if query is None:
            raise InvalidInput(
                "a store answers queries: for self-influence use the method itself, as in "
                "whence.Source().attribute(study)"
            )
        out, top, by_segment = how.get("out"), how.get("top"), how.get("by_segment", False)
        compute: Any = {k: v for k, v in how.items() if k not in ("out", "top", "by_segment")}
        dtype = getattr(torch, self._about["settings"]["dtype"])
        with torch.no_grad(), precision_as_asked():
            workspace = self._workspace(ComputeOptions(dtype=dtype, **compute))
            stages = scored_stages(self.study, method.stage)
            workspace = workspace.for_query(self.study.query(query), stages)
            self.verify(workspace)
            return method.score(workspace, out, top, by_segment)

    def _workspace(self, options: ComputeOptions) -> StoreWorkspace:
        """Laid out once for all queries: copying and checking the model takes longer than one."""
        key = repr(options)
        if key not in self._workspaces:
            laid_out = Workspace.lay_out(self.study, only_run(self.study), options)
            fields = {f.name: getattr(laid_out, f.name) for f in dataclasses.fields(laid_out)}
            self._workspaces[key] = StoreWorkspace(**fields, store=self)
        clock = self._workspaces[key].clock
        clock.seconds.clear()
        clock.cpu_seconds.clear()
        return self._workspaces[key]

    # -- what the answers are made of ----------------------------------------------------------

    @property
    def dimension(self) -> int:
        return int(self._about["settings"]["dimension"])

    @property
    def settings(self) -> dict[str, Any]:
        """What the store was built with."""
        return dict(self._about["settings"])

    @property
    def data(self) -> dict[str, dict[str, Any]]:
        """Of each stage how many examples there are, and their SHA-256."""
        return dict(self._about["data"])

    @property
    def fingerprint(self) -> str:
        """Of everything that its numbers depend on."""
        return key_of({k: self._about[k] for k in ("settings", "identity", "data")})

    def projection(self, workspace: Workspace) -> Projection:
        """P, on the workspace's device."""
        place = str(workspace.device)
        if place not in self._projections:
            s = self._about["settings"]
            if s["projection"] == "random":
                made = random_projection(workspace, s["dimension"], s["joint"], s["seed"])
            else:
                kept = self._eigenbasis(workspace)
                parts = [kept] if s["joint"] else [{name: k} for name, k in kept.items()]
                made = Projection([Eigenbasis(part) for part in parts])
            self._projections[place] = made
        return self._projections[place]

    def rows(self, stage: str, checkpoint: Weights) -> Tensor:
        """P∇L(m, θ_c) of a stage's examples, (n, d), memory-mapped."""
        name = self._name(stage, checkpoint.step)
        if name not in self._rows:
            count = self._about["data"][stage]["examples"]
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
        about: Mapping[str, Any],
        fit: Callable[[], list[Tensor]],
        on_disk: bool = False,
    ) -> list[Tensor]:
        """What an answer makes of the second moments: made once, kept as long as there is room.

        Args:
            on_disk: keep it with the store too, because making it takes long.
        """
        key = key_of({**about, "store": self.fingerprint})
        place = f"{key} {workspace.device}"
        if place not in self._kept:
            found = self._made.get(key) if on_disk else None
            if found is None:
                with workspace.clock("decomposition"):
                    found = {f"{k}": value.contiguous() for k, value in enumerate(fit())}
                if on_disk:
                    self._keep_on_disk(key, found, about)
            self._kept[place] = [found[f"{k}"].to(workspace.device) for k in range(len(found))]
        self._kept[place] = self._kept.pop(place)  # the last to be thrown away
        sizes = {k: sum(value.nbytes for value in held) for k, held in self._kept.items()}
        while sum(sizes.values()) > KEPT and len(sizes) > 1:
            oldest = next(iter(sizes))
            del self._kept[oldest], sizes[oldest]
        return self._kept[place]

    def _keep_on_disk(
        self, key: str, found: Mapping[str, Tensor], about: Mapping[str, Any]
    ) -> None:
        try:
            self._made.put(key, found, about)
        except PermissionError as error:
            warnings.warn(
                f"a decomposition cannot be kept with the store ({error}): the next process will "
                "make it again",
                stacklevel=2,
            )

    def verify(self, workspace: Workspace) -> None:
        """Make one stored row again, once per device: model, data, P and store belong together."""
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
        if not off < max(AGREES, 8 * torch.finfo(workspace.dtype).eps):
            raise InvalidInput(
                f"the store in {self.path} does not belong to this study: example 0 of {data.name} "
                f"at step {unit.checkpoint.step} has another gradient now (off by {off:.1e})"
            )
        self._verified.add(place)

    # -- building ------------------------------------------------------------------------------

    def _complete(self, workspace: Workspace) -> None:
        """Make whatever is missing."""
        make_folder(self.path / "gradients")
        self._check_room()
        self._announce(workspace)
        self._note()
        projection = self.projection(workspace)
        if self._about["settings"]["projection"] == "random":
            try_out(workspace, projection)
        for unit in self._units(workspace.run):
            self._write_rows(workspace, unit)
        for unit, signal in self._wanted_moments(workspace.run):
            self._add_moments(workspace, unit, signal)
        self._about["complete"] = True
        self._note()

    def _units(self, run: Run) -> list[Unit]:
        """Which rows the methods need; the last are at the final model."""
        stages, every = self.study.stages, {"tracin", "source"} & {*self._about["methods"]}
        pairs = [(c.stage, c) for c in run.checkpoints] if every else []
        if {"influence", "trak"} & {*self._about["methods"]}:
            pairs += [(s, run.final) for s in stages if not every or s != run.final.stage]
        return [Unit(stage, c, self._name(stage, c.step)) for stage, c in pairs]

    def _wanted_moments(self, run: Run) -> list[tuple[Unit, Signal]]:
        methods = {*self._about["methods"]}
        found = []
        for unit in self._units(run):
            final = unit.checkpoint.step == run.final.step
            own = unit.checkpoint.stage == unit.stage
            if ("source" in methods and own) or ("influence" in methods and final):
                found.append((unit, self._fisher))
            if "trak" in methods and final:
                found.append((unit, MEASUREMENT))
        return found

    def _write_rows(self, workspace: Workspace, unit: Unit) -> None:
        path, data = self._path(unit.name), self.study.data[unit.stage]
        if finished(path, self.dimension, self._dtype) == len(data):
            return
        good = self._about["partial"].get(unit.name, 0)
        rows = Rows(path, len(data), self.dimension, self._dtype, good)
        passes, throttle = workspace.passes[unit.stage], Throttle(NOTED_EVERY)
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
                        self._about["partial"][unit.name] = int(piece.indices[-1]) + 1
                        self._note()
        rows.finish()
        self._about["partial"].pop(unit.name, None)
        self._note()

    @staticmethod
    def _refuse_bad(
        rows: Tensor, indices: NDArray[np.int64], data: Batches, checkpoint: Weights
    ) -> None:
        bad = indices[(~rows.isfinite().all(1)).cpu().numpy()]
        if len(bad):
            named = ", ".join(map(str, bad[:5])) + (", ..." if len(bad) > 5 else "")
            raise NotFinite(
                f"checkpoint at step {checkpoint.step}: the projected gradient is NaN or infinite "
                f"for {data.name} example {named}. Mend or leave out the example, or use float64"
            )

    def _add_moments(self, workspace: Workspace, unit: Unit, signal: Signal) -> None:
        """Second moments of the examples that are not in them yet."""
        ranges = self._about["moments"].setdefault(self._moments_name(unit, signal), [])
        first, last = ranges[-1][1] if ranges else 0, len(self.study.data[unit.stage])
        if first == last:
            return
        chosen = np.arange(last)
        if signal != MEASUREMENT:
            chosen = self.study.used(workspace.run, unit.stage)
        chosen = chosen[(chosen >= first) & (chosen < last)]
        about = self._moments_key(unit, signal, [first, last])
        if signal == LOSS and len(chosen):  # the stored rows are what it is made of
            found = self._row_moments(workspace, self.rows(unit.stage, unit.checkpoint), chosen)
            self._factors.put(key_of(about), found, about)
        elif len(chosen):
            part = FitData(workspace.passes[unit.stage], self.study.data[unit.stage], chosen, {})
            room, batch = workspace.memory // 4, workspace.batch_size
            projection = self.projection(workspace)
            moments([part], unit.checkpoint, signal, projection, self._factors, about, batch, room)
        ranges.append([first, last, len(chosen)])
        self._note()

    def _row_moments(
        self, workspace: Workspace, rows: Tensor, chosen: NDArray[np.int64]
    ) -> dict[str, Tensor]:
        found = {}
        for k, where in enumerate(self.projection(workspace).columns):
            d = where.stop - where.start
            total = torch.zeros(d, d, dtype=torch.float64, device=workspace.device)
            for block in cut(len(chosen), 4 * workspace.batch_size):
                add_gram(total, rows[torch.from_numpy(chosen[block])][:, where].to(total))
            found[f"{k}"] = mirror(total)
        return found

    def _moments(
        self, workspace: Workspace, stage: str, checkpoint: Weights, signal: Signal
    ) -> list[Tensor]:
        unit = next(
            u
            for u in self._units(workspace.run)
            if u.stage == stage and u.checkpoint.step == checkpoint.step
        )
        ranges = self._about["moments"].get(self._moments_name(unit, signal), [])
        if not ranges or ranges[-1][1] != self._about["data"][stage]["examples"]:
            raise InvalidInput(
                f"the store has no second moments of {signal.name} gradients of {stage} at step "
                f"{checkpoint.step} (for TRAK: of this measurement). Build it again, and they are "
                "added"
            )
        sums: list[Tensor] = []
        for first, last, count in ranges:
            if count == 0:  # none of these examples was trained on
                continue
            found = self._factors.get(key_of(self._moments_key(unit, signal, [first, last])))
            if found is None:
                raise MissingFile(
                    f"the store in {self.path} is not whole: second moments at step "
                    f"{checkpoint.step} are missing. Delete it, and build it again"
                )
            parts = [found[f"{k}"].to(workspace.device) for k in range(len(found))]
            sums = [a + b for a, b in zip(sums, parts, strict=True)] if sums else parts
        return sums

    def _moments_name(self, unit: Unit, signal: Signal) -> str:
        what = signal.name
        if signal == MEASUREMENT:
            what += f" {self.study.tasks[unit.stage]!r}"
        return f"{unit.name} {what}"

    def _moments_key(self, unit: Unit, signal: Signal, examples: list[int]) -> dict[str, Any]:
        return {
            "what": "second moments",
            "of": self._moments_name(unit, signal),
            "examples": examples,
        }

    def _eigenbasis(self, workspace: Workspace) -> dict[str, Kept]:
        """The kept coordinates, fitted at the first build and never again."""
        device, dtype = workspace.device, workspace.dtype
        key = key_of({"eigenbasis": self._about["settings"]})
        found = self._factors.get(key)
        if found is None:
            if self._about["partial"] or any((self.path / "gradients").iterdir()):
                raise InvalidInput(
                    f"the eigenbasis of the store in {self.path} is missing: delete the store, and "
                    "build it again"
                )
            s = self._about["settings"]
            fitter = workspace.fitter(self.study.stages, s["fisher"], s["seed"])
            checkpoints = {u.checkpoint.step: u.checkpoint for u in self._units(workspace.run)}
            curvature = EKFAC.fit(fitter, list(checkpoints.values())).factors
            found = {}
            for name, kept in leading(
                curvature, workspace.trained_blocks(), s["dimension"]
            ).items():
                found |= {f"{name}/outputs": kept.basis.outputs, f"{name}/rows": kept.rows}
                found |= {f"{name}/inputs": kept.basis.inputs, f"{name}/columns": kept.columns}
            self._factors.put(key, found, {"what": "eigenbasis"})
        placed = {}
        for name in (b.name for b in workspace.trained_blocks()):
            if f"{name}/rows" in found:
                basis = Basis(found[f"{name}/outputs"], found[f"{name}/inputs"]).to(device, dtype)
                rows, columns = (found[f"{name}/{k}"].to(device) for k in ("rows", "columns"))
                placed[name] = Kept(basis, rows, columns)
        return placed

    def _announce(self, workspace: Workspace) -> None:
        s, blocks = self._about["settings"], workspace.tracked.blocks
        forward = sum(cost.forward_backward(b, workspace.positions[b.name]) for b in blocks)
        work = 2.0 * sum(b.size for b in blocks) * s["dimension"]
        if s["projection"] == "eigenbasis":
            work = sum(cost.rotate_examples(b, workspace.positions[b.name], 1) for b in blocks)
        made = sum(signal != LOSS for _, signal in self._wanted_moments(workspace.run))
        passes = {"gradients": len(self._units(workspace.run)), "second moments": made}
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
        s = self._about["settings"]
        return LOSS if s["fisher"] == "empirical" else Signal(s["fisher"], s["seed"])

    @property
    def _dtype(self) -> np.dtype[np.floating]:
        wide = accumulator(getattr(torch, self._about["settings"]["dtype"]))
        return np.dtype(np.float64 if wide == torch.float64 else np.float32)

    def _name(self, stage: str, step: int) -> str:
        return f"{self.study.stages.index(stage)}-{step:08d}"

    def _path(self, name: str) -> Path:
        return self.path / "gradients" / f"{name}.npy"

    def _note(self) -> None:
        write_json(self.path / "store.json", self._about)

    def __repr__(self) -> str:
        s = self._about["settings"]
        counts = ", ".join(f"{k}: {v['examples']:,}" for k, v in self._about["data"].items())
        return (
            f"GradientStore({self.path}: {s['projection']}, dimension {s['dimension']}, examples "
            f"{{{counts}}}, for {', '.join(self._about['methods'])})"
        )


# -- what a store was made of ------------------------------------------------------------------
