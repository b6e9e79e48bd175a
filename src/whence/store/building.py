"""Building a store: rows and second moments, computed where they are missing.

Gradients are projected in the order of the data, a block at a time. An interrupted build resumes,
and examples that were appended to the data are added.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whence.data import cut
from whence.engine.costs import Cost, announce, passes_cost
from whence.engine.projected_space import projecting, try_out
from whence.engine.workspace import LOSS, MEASUREMENT, Workspace
from whence.errors import DiskFull, NotFinite
from whence.layers.passes import Signal
from whence.operators import EKFAC, cost
from whence.operators.operator import named
from whence.operators.products import add_gram, mirror
from whence.persist.files import Throttle, make_folder
from whence.persist.identity import key_of
from whence.projections import moments, projected
from whence.projections.eigenbasis import leading
from whence.store.contents import StoreContents, Unit
from whence.store.rows import Rows, StoredRows, columns, finished
from whence.table import listed

PROGRESS_SECONDS = 5.0  # between two records of progress


@dataclass(frozen=True)
class Builder:
    """Completes a store on a workspace."""

    store: StoreContents
    workspace: Workspace

    def complete(self) -> None:
        """Compute the rows and second moments that are missing."""
        store, workspace = self.store, self.workspace
        store.save()  # first: the folder is then known as a store
        if store.world.first:
            make_folder(store.path / "gradients")
            self._check_room()
        store.world.wait()
        if workspace.progress:
            announce(store, workspace, self._counted())
        for unit in self._units:
            store.check_losses(workspace, unit)
        if store.settings["projection"] == "eigenbasis":
            self._fit_eigenbasis()
        projection = store.projection(workspace)
        if store.settings["projection"] == "random":
            try_out(workspace, projection)
        for unit in self._units:
            self._write_rows(unit)
        for unit, signal in self._moments():
            self._add_moments(unit, signal)
        store.description["complete"] = True
        store.save()
        store.world.wait()

    @property
    def _units(self) -> list[Unit]:
        return self.store.units(self.workspace.run)

    def _moments(self) -> list[tuple[Unit, Signal]]:
        """The second moments that the methods need."""
        methods, run = {*self.store.description["methods"]}, self.workspace.run
        wanted = []
        for unit in self._units:
            final = unit.checkpoint.step == run.final.step
            same_stage = unit.checkpoint.stage == unit.stage
            if ("source" in methods and same_stage) or ("influence" in methods and final):
                wanted.append((unit, self.store.fisher))
            if "trak" in methods and final:
                wanted.append((unit, MEASUREMENT))
        return wanted

    def _write_rows(self, unit: Unit) -> None:
        store, workspace, partial = self.store, self.workspace, self.store.description["partial"]
        path, data = store.rows_path(unit.name), store.study.data[unit.stage]
        form = store.rows_form(len(data))
        if store.world.of_first(finished(path, form["shape"][1], store.dtype) == len(data)):
            return
        known, entries, rows = partial.get(unit.name), store.description["rows"], None
        if isinstance(known, int):  # earlier versions kept no checksums
            known = {"rows": known}
        if store.world.first:
            rows = Rows(path, form, known, entries.get(unit.name), store.form)
        passes, throttle = workspace.passes[unit.stage], Throttle(PROGRESS_SECONDS)
        passes.load(unit.checkpoint)
        left = np.arange(store.world.of_first(rows and rows.start), len(data))
        with passes.clock("projection"):
            for indices, values in self._projected(unit, left):
                if rows is None:
                    continue
                self._refuse_bad(values, indices, unit)
                rows.write(values)
                if throttle.due():
                    with throttle.saving():
                        partial[unit.name] = rows.flush()
                        store.save()
        if rows is not None:
            partial[unit.name], entries[unit.name] = rows.flush(), rows.entry
            store.save()  # before the matrix is renamed: one without checksums is not checked
            rows.finish()
            del partial[unit.name]
            store.save()
        description = store.world.of_first(store.description)
        if not store.world.first:
            store.description.update(description)

    def _projected(
        self, unit: Unit, left: NDArray[np.int64]
    ) -> Iterator[tuple[NDArray[np.int64], Tensor]]:
        """These examples' rows in order; each rank projects a share of some at a time."""
        workspace, world = self.workspace, self.store.world
        data, passes = self.store.study.data[unit.stage], workspace.passes[unit.stage]
        projection, size = self.store.projection(workspace), workspace.batch_size
        how = projection, workspace.memory // 4, f"gradients, step {unit.checkpoint.step}"
        together = max(1, len(left))
        if world.size > 1:
            together = world.size * max(size, projection.preferred_batch // size * size)
        for indices in [left[block] for block in cut(len(left), together)]:
            share = world.deal(indices)
            batches = [share[block] for block in cut(len(share), size)]
            pieces = projected(passes, data, batches, LOSS, *how)
            if world.size == 1:
                yield from ((piece.indices, piece.rows) for piece in pieces)
            else:
                rows = torch.cat([piece.rows for piece in pieces])
                yield indices, world.regather(rows, len(indices))

    def _refuse_bad(self, rows: Tensor, indices: NDArray[np.int64], unit: Unit) -> None:
        bad = indices[(~rows.isfinite().all(1)).cpu().numpy()]
        if len(bad):
            raise NotFinite(
                f"checkpoint at step {unit.checkpoint.step}: the projected gradient is NaN or "
                f"infinite for {self.store.study.data[unit.stage].name} example {listed(bad)}. "
                "Correct or leave out the example, or use float64"
            )

    def _add_moments(self, unit: Unit, signal: Signal) -> None:
        """Add the second moments of the examples that they do not include yet."""
        store, workspace = self.store, self.workspace
        data = store.study.data[unit.stage]
        ranges = store.description["moments"].setdefault(store.moments_name(unit, signal), [])
        first, last = ranges[-1][1] if ranges else 0, len(data)
        if first == last:
            return
        chosen = np.arange(last)
        if signal != MEASUREMENT:
            chosen = store.study.used(workspace.run, unit.stage)
        chosen = chosen[(chosen >= first) & (chosen < last)]
        identity = store.moments_key(unit, signal, [first, last])
        if signal == LOSS and len(chosen):  # from the stored rows, without another pass
            rows = store.rows(unit.stage, unit.checkpoint)
            store.factors.put(key_of(identity), self._row_moments(rows, chosen), identity)
        elif len(chosen):
            part = replace(workspace.fit_data([unit.stage])[0], indices=chosen)
            how = signal, store.projection(workspace), store.factors, identity
            limits = workspace.batch_size, workspace.memory // 4
            moments([part], unit.checkpoint, *how, *limits)
        ranges.append([first, last, len(chosen)])
        store.save()

    def _row_moments(self, rows: StoredRows, chosen: NDArray[np.int64]) -> dict[str, Tensor]:
        sums, workspace, world = {}, self.workspace, self.store.world
        chosen = chosen[world.rank :: world.size]
        for k, where in enumerate(self.store.projection(workspace).columns):
            d = where.stop - where.start
            total = torch.zeros(d, d, dtype=torch.float64, device=workspace.device)
            for block in cut(len(chosen), 4 * workspace.batch_size):
                add_gram(total, rows[chosen[block]][:, where].to(total))
            sums[f"{k}"] = total
        return {name: mirror(total) for name, total in world.total(sums).items()}

    def _fit_eigenbasis(self) -> None:
        """The leading entries of each block, fitted once, by the first build."""
        store, workspace, s = self.store, self.workspace, self.store.settings
        if store.factors.get(store.eigenbasis_key) is not None:
            return
        if store.description["partial"] or any((store.path / "gradients").iterdir()):
            return  # rows in an eigenbasis that is missing: the store refuses
        fitter = workspace.fitter(store.study.stages, s["fisher"], s["seed"])
        checkpoints = {u.checkpoint.step: u.checkpoint for u in self._units}
        curvature = fitter.fit(EKFAC, list(checkpoints.values()), diagonal=False)
        entries = leading(curvature, workspace.trained_blocks(), s["dimension"])
        tensors = named({name: x.basis for name, x in entries.items()})
        for name, x in entries.items():
            tensors |= {f"{name}/rows": x.rows, f"{name}/columns": x.columns}
        store.factors.put(store.eigenbasis_key, tensors, {"what": "eigenbasis"})
        store.place_eigenbasis(workspace, tensors)

    def _counted(self) -> Cost:
        workspace, s, tracked = self.workspace, self.store.settings, self.workspace.tracked
        work = projecting(tracked, s["dimension"])
        if s["projection"] != "random":
            rotated = (
                cost.rotate_examples(b, tracked.positions[b.name], 1) for b in tracked.blocks
            )
            work = tracked.operations + sum(rotated)
        passes = {
            "gradients": len(self._units),
            "second moments": sum(signal != LOSS for _, signal in self._moments()),
        }
        numbers, per_example = 3 * s["dimension"] ** 2, dict.fromkeys(passes, work)
        return passes_cost(tracked, workspace.examples, per_example, passes, numbers)

    def _check_room(self) -> None:
        store, d = self.store, self.store.dimension
        missing = [u for u in self._units if not store.rows_path(u.name).exists()]
        rows = sum(len(store.study.data[u.stage]) for u in missing)
        needed = rows * columns(store.form, d) * store.dtype.itemsize + 8 * d * d
        free = shutil.disk_usage(store.path).free
        if needed > free:
            raise DiskFull(
                f"the store needs {needed / 2**30:.1f} GiB in {store.path}, where "
                f"{free / 2**30:.1f} GiB are free: choose another path, or a smaller dimension"
            )
