"""GradientStore: every training example's gradient in few dimensions, written once.

`build` projects gradients (`building`), and `contents` reads what the folder holds. TracIn,
influence functions, TRAK and SOURCE answer queries from the rows and the second moments alone (see
`workspace`).
"""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np
import torch
from numpy.typing import ArrayLike

from whence.engine.projected_space import check_dimension
from whence.engine.queries import QuerySet
from whence.engine.workspace import LOSS, ComputeOptions, Workspace, scored_stages
from whence.errors import (
    InvalidInput,
    InvalidType,
    check_choice,
    collect_warnings,
    collected_warnings,
    flag,
    show_once,
    warn,
    whole,
)
from whence.layers.passes import precision_as_asked, rounded_products
from whence.methods import Influence, Source, TracIn, Trak
from whence.methods.gradient import GradientMethod
from whence.persist.files import LOCK, FolderLock, as_path
from whence.projections import projected
from whence.projections.two_sided import square_ranks
from whence.scores import Scores
from whence.scores.result import BY_SEGMENT
from whence.store.building import Builder
from whence.store.contents import StoreContents
from whence.store.identity import (
    METHODS,
    SCHEMA,
    adaptive,
    check_choices,
    check_data,
    check_same,
    digest_of,
    identity_of,
    needs_preconditioner,
    only_run,
    read,
)
from whence.store.rows import MAX_ERROR
from whence.store.workspace import StoreWorkspace
from whence.study import Study
from whence.table import one_line
from whence.world import World

NOT_STRANGE = (LOCK, "gradients")  # what a build killed in its first moments may have left
ROW_TOLERANCE = 1e-3  # relative difference of a recomputed row from the stored one


class AnswerOptions(TypedDict, total=False):
    """The options that every answer takes, as in `Method.attribute`.

    With `top`, `index="faiss"` searches the strongest examples by an index, which it builds once,
    instead of reading all rows.
    """

    device: torch.device | str | None
    batch_size: int | None
    memory: int | str | None
    out: str | os.PathLike[str] | None
    top: int | None
    progress: bool
    by_segment: bool
    workers: int
    query_weights: ArrayLike | None
    index: str | None


class GradientStore(StoreContents):
    """Projected per-example gradients of one run, on disk, and the methods that answer from them.

    Create it with `build`, and reopen it with `open`. A store holds one run. For an ensemble, build
    one store per run and average their scores with `whence.scores.ensemble`.
    """

    def __init__(self, path: Path, study: Study, description: dict[str, Any]) -> None:
        super().__init__(path, study, description)
        self._workspaces: dict[str, StoreWorkspace] = {}  # by their compute options
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
        rows: str = "full",
        seed: int = 0,
        methods: Sequence[str] | str = METHODS,
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
            projection: "random" signs; "two-sided": random projections of each layer's inputs and
                outputs, which are far cheaper to apply and need no fit; or "eigenbasis": the d
                leading coordinates in the eigenbases of the layers' curvature, as cheap.
            joint: one curvature matrix (and random projection) for all layers, or one for each.
            fisher: how to measure the curvature. "empirical" uses the rows and needs no further
                pass; "sampled" and "exact" are as in `Source`.
            rows: what gradients are stored in: "full" precision, "float16" (half the bytes) or
                "int8" (a quarter), each row with a scale. Second moments are of what is stored.
            seed: seed of the random signs, and of the pseudo-targets.
            methods: the methods that the store can answer. "tracin" and "source" need all
                checkpoints, "influence" and "trak" only the last; all but "tracin" need second
                moments. SOURCE for Adam-type optimizers needs a store with methods=["source"],
                whose gradients are preconditioned.
            device, dtype, batch_size, memory, progress, workers: as in `Method.attribute`.
        """
        run = only_run(study)
        methods = [methods] if isinstance(methods, str) else methods
        check_choices(projection, fisher, rows, methods)
        folder = as_path(path)
        with (
            World.together() as world,
            _locked(folder, world),
            torch.no_grad(),
            precision_as_asked(),
            collect_warnings() as messages,
        ):
            options = ComputeOptions(device, dtype, batch_size, memory, progress, workers)
            workspace = Workspace.lay_out(study, run, options)
            blocks = workspace.trained_blocks()
            check_dimension(dimension, blocks, workspace.memory)
            if projection == "two-sided":
                dimension = sum(math.prod(ranks) for ranks in square_ranks(blocks, dimension))
            settings = {
                "dimension": dimension,
                "projection": projection,
                "joint": flag("joint", joint),
                "fisher": fisher,
                "seed": whole("seed", seed),
                "dtype": str(dtype).removeprefix("torch."),
            }
            rounded = rounded_products(dtype, workspace.device)
            settings |= {"rounded": rounded} if rounded else {}
            settings |= {"rows": rows} if rows != "full" else {}
            known_methods = read(folder)["methods"] if (folder / "store.json").exists() else []
            answered = {*known_methods, *methods}
            if needs_preconditioner(run, projection, answered):
                settings["preconditioned"] = True
            elif {"source"} < answered and adaptive(run) and world.first:
                show_once(
                    "an Adam-type optimizer trained the run, and this store has plain gradients: "
                    "SOURCE cannot answer from it, nor can influence without a number as damping. "
                    "For SOURCE, build another store with methods=['source']"
                )
            identity = identity_of(workspace)
            world.agree({"path": folder, "settings": settings, "methods": list(methods)})
            if (folder / "store.json").exists():
                description = read(folder)
                check_same(folder, description, {"settings": settings, "identity": identity})
                for stage, data in study.data.items():
                    check_data(folder, stage, description["data"][stage], data)
                description["methods"] = [
                    m for m in METHODS if m in {*description["methods"], *methods}
                ]
            else:
                if any(file.name not in NOT_STRANGE for file in folder.iterdir()):
                    raise InvalidInput(
                        f"{folder} is not empty and is not a store: choose another path"
                    )
                description = {"schema": SCHEMA, "settings": settings, "identity": identity}
                description |= {"methods": [m for m in METHODS if m in methods]}
                description |= {"data": {}, "partial": {}, "rows": {}, "moments": {}}
            before = description["data"]
            description["data"] = {
                stage: {"examples": len(data), "sha256": digest_of(data, len(data))}
                for stage, data in study.data.items()
            }
            world.wait()  # all have read what is there
            if world.first and before != description["data"]:  # decompositions of fewer examples
                shutil.rmtree(folder / "decompositions", ignore_errors=True)
            description["complete"] = False
            known = description.get("warnings", [])
            description["warnings"] = messages  # what is added later is saved with the progress
            messages[:0] = [m for m in known if m not in messages]
            store = cls(folder, study, description)
            Builder(store, workspace).complete()
        return store

    @classmethod
    @collect_warnings()
    def open(cls, path: str | os.PathLike[str], study: Study) -> GradientStore:
        """Open a finished store, for the study it was built from.

        This compares model, task, run, data and the final model's losses of all examples with those
        of the store once. Later queries do not read the training data.
        """
        folder = as_path(path)
        description = read(folder)
        run = only_run(study)
        if not description["complete"]:
            raise InvalidInput(
                f"the store in {folder} is not finished: make the same GradientStore.build call "
                "again to resume"
            )
        dtype = getattr(torch, description["settings"]["dtype"])
        with World.together(), torch.no_grad(), precision_as_asked():
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
        for unit in store.units(run):
            store.rows(unit.stage, unit.checkpoint)
        with World.together(), torch.no_grad(), precision_as_asked():
            store.check_losses(workspace, store.units(run)[-1])
        description["warnings"] = [*description.get("warnings", []), *collected_warnings()]
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
        s = self.description["settings"]
        method = Trak(s["dimension"], s["seed"], stage, s["joint"], damping)
        return self._answer("trak", method, query, options)

    def source(
        self,
        query: Any,
        segments: int | str | Sequence[int] = "auto",
        *,
        coupling: bool = True,
        query_at: str = "run",
        stage: str | None = None,
        **options: Unpack[AnswerOptions],
    ) -> Scores:
        """`Source` in the projected space. For Adam-type optimizers, all segments have the
        preconditioner of the whole run.

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
        known = self.description["methods"]
        if name not in known:
            how = f"build it again with methods=[..., {name!r}] to add what is missing"
            if self.preconditioned:
                how = f"its gradients are preconditioned, so build another one for {name}"
            raise InvalidInput(f"the store was built for {', '.join(known)}, not for {name}: {how}")
        if query is None:
            raise InvalidInput(
                "a store answers queries: for self-influence use the method itself, as in "
                "whence.Source().attribute(study)"
            )
        unknown = sorted(options.keys() - AnswerOptions.__annotations__.keys())
        if unknown:
            raise InvalidType(
                f"{unknown[0]} is not an option of a store, which takes "
                f"{', '.join(AnswerOptions.__annotations__)}: for others attribute the study itself"
            )
        compute: dict[str, Any] = dict(options)
        out, top = compute.pop("out", None), compute.pop("top", None)
        by_segment, weights = compute.pop("by_segment", False), compute.pop("query_weights", None)
        searched = self._searched(compute.pop("index", None), top, by_segment)
        dtype = getattr(torch, self.description["settings"]["dtype"])
        with (
            World.together(),
            torch.no_grad(),
            precision_as_asked(),
            collect_warnings(),
        ):
            workspace = self._workspace(ComputeOptions(dtype=dtype, **compute))
            stages = scored_stages(self.study, method.stage)
            queries = QuerySet.of(self.study, query, weights)
            assert queries is not None
            workspace = workspace.for_query(queries, stages)
            workspace = dataclasses.replace(workspace, searched=searched)
            self.verify(workspace)
            for message in self.description.get("warnings", []):
                warn(message, stacklevel=3)
            return method.score(workspace, out, top, BY_SEGMENT if by_segment else None)

    def _searched(self, index: str | None, top: int | None, by_segment: bool) -> int | None:
        """How many strongest examples an index is to find; None if all rows are read."""
        if index is None:
            return None
        check_choice("index", index, ["faiss"])
        if top is None or by_segment:
            raise InvalidInput(
                f"index={index!r} finds the strongest examples only: give top=, and not by_segment"
            )
        if self.world.size > 1:
            raise InvalidInput(f"index={index!r} works in one process, not in {self.world.size}")
        return top

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

    def verify(self, workspace: Workspace) -> None:
        """Recompute one stored row, once per device, to check model, data, P and store together."""
        place = str(workspace.device)
        if place in self._verified:
            return
        unit = self.units(workspace.run)[-1]
        passes, data = workspace.passes[unit.stage], self.study.data[unit.stage]
        passes.load(unit.checkpoint)
        first = [np.arange(1)]
        (piece,) = projected(
            passes, data, first, LOSS, self.projection(workspace), workspace.memory
        )
        stored = self.rows(unit.stage, unit.checkpoint)[:1][0].to(piece.rows)
        off = float((piece.rows[0] - stored).norm() / stored.norm().clamp_min(1e-30))
        rounding = max(8 * torch.finfo(workspace.dtype).eps, MAX_ERROR[self.form])
        if not off < max(ROW_TOLERANCE, rounding):
            raise InvalidInput(
                f"the store in {self.path} does not belong to this study: example 0 of {data.name} "
                f"at step {unit.checkpoint.step} has another gradient now (off by {off:.1e})"
            )
        self._verified.add(place)

    def __repr__(self) -> str:
        s = self.description["settings"]
        counts = ", ".join(f"{k}: {v['examples']:,}" for k, v in self.description["data"].items())
        return one_line(
            f"GradientStore({self.path}: {s['projection']}, dimension {s['dimension']}, examples "
            f"{{{counts}}}, for {', '.join(self.description['methods'])})"
        )


def _locked(folder: Path, world: World) -> AbstractContextManager[object]:
    """The lock of the folder, which rank 0 holds for all."""
    lock = FolderLock(folder, "builds a store", takeover=True) if world.first else nullcontext()
    world.wait()
    return lock
