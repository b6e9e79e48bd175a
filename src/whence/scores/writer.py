"""Collects scores block by block, on disk or in memory; resumable."""

from __future__ import annotations

import base64
import errno
import math
import operator
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, DTypeLike, NDArray

from whence.errors import DiskFull, FolderConflict, InvalidInput, MissingFile, note, whole
from whence.persist.arrays import Checksums, create_array, entry_of, map_array, save_array
from whence.persist.cache import Tried
from whence.persist.files import (
    FolderLock,
    Throttle,
    as_path,
    damaged,
    move_into_place,
    naming_write_errors,
    parsing,
    read_json,
    write_json,
)
from whence.persist.identity import file_sha256
from whence.scores.result import (
    BY_LAYER,
    BY_SEGMENT,
    Floats,
    Scores,
    read_description,
)
from whence.scores.strongest import Strongest
from whence.table import byte_size
from whence.world import World

TRIED = "tried.safetensors"
ScoreTile = tuple[int, int, int, int]  # first row, end row, first column, end column


class ScoreWriter:
    """Collects blocks of scores and returns a Scores at the end.

    With ``out`` every block is written to disk. ``key`` identifies the calculation: a later call
    with the same key resumes where an interrupted one stopped. With ``top`` only the strongest
    entries of each query stay in memory, O(q k); the order of the blocks does not matter.
    ``queries=None`` is self-influence.

    ``tried`` holds the losses that the scores are of. They are stored with the scores, and must be
    the same when a call resumes or returns them; ``of`` is their digest.

    ``account`` is a dict of plain values that is saved with the progress. In a resumed call it
    holds the caller's tallies for the blocks that are done.

    ``already`` is the finished Scores if an earlier call with the same key wrote them.

    With several ranks in ``world``, each writes its own blocks, and records them in its own
    file. Rank 0 opens and finishes the folder, which all must see. All return the same Scores.
    """

    def __init__(
        self,
        out: str | os.PathLike[str] | None,
        queries: int | None,
        examples: int,
        *,
        key: str,
        segments: int | None = None,
        layers: int | None = None,
        top: int | None = None,
        dtype: DTypeLike = np.float32,
        tried: Tried | None = None,
        world: World | None = None,
    ) -> None:
        for name, number in (
            ("queries", queries),
            ("examples", examples),
            ("segments", segments),
            ("layers", layers),
            ("top", top),
        ):
            if number is not None:
                whole(name, number, 1)
        parts = {BY_SEGMENT: segments, BY_LAYER: layers}
        asked = [name for name, count in parts.items() if count is not None]
        if top is not None and asked:
            raise InvalidInput(
                f"top={top} together with {asked[0]}: {asked[0]} keeps a number for every query, "
                f"example and {asked[0][3:]}, which top avoids; ask for one of the two"
            )
        assert len(asked) < 2  # `Method.attribute` refuses both
        self._parts = asked[0] if asked else None
        self.already: Scores | None = None
        self.account: dict[str, Any] = {}
        self.of = ""
        self._tried = tried
        self._world = World() if world is None else world
        if self._world.unjoined:
            note(self._world.unjoined)
        self._out = None if out is None else as_path(out)
        self.progress_file: Path | None = None  # where this rank notes what it has done
        self._dtype = np.dtype(dtype)
        self._self = queries is None
        self._queries = 1 if queries is None else queries
        self._examples = examples
        self._shape = (examples,) if queries is None else (queries, examples)
        self._calculation = {
            "key": key,
            "queries": queries,
            "examples": examples,
            "segments": segments,
            "top": top,
            "dtype": str(self._dtype),
        } | ({} if layers is None else {"layers": layers})
        self._shapes: dict[str, tuple[int, ...]] = {}
        if top is None:
            self._shapes["scores"] = self._shape
        for name in asked:
            self._shapes[name] = (parts[name] or 0, *self._shape)
        self._data: dict[str, NDArray[Any]] = {}
        self._done: list[ScoreTile] = []
        self._written: list[tuple[ScoreTile, str]] = []  # every block, with its checksums
        self._lock: FolderLock | None = None
        self._throttle = Throttle(0.0)  # a block that is not recorded is computed again
        self._strongest: Strongest | None = None
        if top is not None:
            k = min(top, examples)
            self._strongest = Strongest(k, self._queries, examples, self._dtype)
        if self._out is None:
            self._data = {
                name: np.zeros(shape, self._dtype) for name, shape in self._shapes.items()
            }
        else:
            rank = self._world.rank
            name = "progress.json" if rank == 0 else f"progress-{rank}.json"
            self.progress_file = self._out / name
            if self._world.first:
                self._open(self._out, self.progress_file)
            if self._world.size > 1:
                self._share_opened(self._out)

    def done(self, rows: slice | None, columns: slice) -> bool:
        """Whether this block is written, by this call or by an interrupted earlier one."""
        return self.already is not None or not self.missing(rows, columns)

    def missing(self, rows: slice | None, columns: slice) -> list[tuple[slice, slice]]:
        """The parts of this block that are not written, as (rows, columns) within the block."""
        r0, _, c0, _ = block = self._block(rows, columns)
        tiles = _missing(block, self._done)
        return [(slice(a - r0, b - r0), slice(c - c0, d - c0)) for a, b, c, d in tiles]

    def write(
        self,
        rows: slice | None,
        columns: slice,
        values: ArrayLike,
        parts: ArrayLike | None = None,
    ) -> None:
        """Write ``values`` (q_b, n_b), or (n_b,), and their ``parts`` (L, q_b, n_b).

        Writing a block again changes nothing.
        """
        if self.already is not None:
            return
        if self._lock is not None:
            self._lock.check()
        r0, r1, c0, c1 = block = self._block(rows, columns)
        scores = self._checked("values", values, (r1 - r0, c1 - c0))
        if not np.isfinite(scores).all():
            row, column = np.argwhere(~np.isfinite(scores))[0]
            raise InvalidInput(
                f"the score of query {r0 + row} and example {c0 + column} is {scores[row, column]} "
                f"in {self._dtype}: check the losses there, raise the damping, or use a wider dtype"
            )
        if (parts is None) != (self._parts is None):
            raise InvalidInput("give parts exactly when the writer has segments= or layers=")
        arrays = {"scores": scores}
        if self._parts is not None and parts is not None:
            length = self._shapes[self._parts][0]
            shape = length, r1 - r0, c1 - c0
            arrays[self._parts] = self._checked(self._parts, parts, shape)
        if self._strongest is not None:
            self._strongest.add(slice(r0, r1), c0, scores)
        for part in _missing(block, self._done):
            s0, s1, d0, d1 = part
            target = np.s_[..., s0 - r0 : s1 - r0, d0 - c0 : d1 - c0]
            for name in self._data:
                if self._world.size == 1 or self._out is None:
                    self._rows(name)[..., s0:s1, d0:d1] = arrays[name][target]
                else:
                    self._write_rows(name, part, arrays[name][target])
            if self._out is not None:
                self._written.append((part, self._checksums(part)))
        _add(block, self._done)
        self._note()

    def write_strongest(self, rows: slice, columns: NDArray[np.int64], values: ArrayLike) -> None:
        """Write ``values`` (q_b, k) of some examples, among which the strongest of these queries
        are taken to be; for a writer with ``top``."""
        assert self._strongest is not None and not self._data
        r0, r1, _, _ = block = self._block(rows, slice(None))
        scores = self._checked("values", values, (r1 - r0, len(columns)))
        self._strongest.add(slice(r0, r1), columns, scores)
        _add(block, self._done)
        self._note()

    def _write_rows(self, name: str, block: ScoreTile, values: Floats) -> None:
        """Write a block row by row into a file of several ranks. A map would be written back in
        whole pages, with the columns of other ranks in them."""
        (r0, r1, c0, c1), data = block, self._data[name]
        assert isinstance(data, np.memmap)
        rows, path = values.reshape(-1, r1 - r0, c1 - c0), Path(str(data.filename))
        with naming_write_errors(path), open(path, "rb+", buffering=0) as file:
            for part, matrix in enumerate(rows):
                for row, numbers in enumerate(matrix, part * self._queries + r0):
                    place = (row * self._examples + c0) * self._dtype.itemsize
                    written = os.pwrite(file.fileno(), numbers.tobytes(), data.offset + place)
                    if written < numbers.nbytes:
                        raise OSError(errno.ENOSPC, "No space left on device")
            os.fsync(file.fileno())

    def finish(
        self,
        *,
        query_ids: ArrayLike | None = None,
        train_ids: ArrayLike | None = None,
        **metadata: Any,
    ) -> Scores:
        """The Scores; ``metadata`` holds the other arguments of its constructor."""
        if self.already is not None:
            return self.already
        if self._world.size > 1:
            self._gather()
            metadata["diagnostics"] = self._world.of_first(metadata.get("diagnostics"))
        missing = _missing((0, self._queries, 0, self._examples), self._done)
        if missing:
            r0, r1, c0, c1 = missing[0]
            raise InvalidInput(
                f"finish() before all blocks were written: queries {r0}..{r1 - 1}, examples "
                f"{c0}..{c1 - 1} are missing"
            )
        top = None if self._strongest is None else self._strongest.top(self._shape)
        scores = Scores(
            self._data.get("scores"),
            by_segment=self._data.get(BY_SEGMENT),
            by_layer=self._data.get(BY_LAYER),
            top=top,
            query_ids=query_ids,
            train_ids=np.arange(self._examples) if train_ids is None else train_ids,
            calculation=self._calculation,
            **metadata,
        )
        if self._out is None:
            return scores
        if self._world.first:
            self._finish_folder(self._out, scores)
        self._world.wait()
        self._data = {}
        self.already = Scores.load(self._out)
        return self.already

    def _finish_folder(self, out: Path, scores: Scores) -> None:
        # The big arrays are on disk already: rename them, add the small ones, scores.json last.
        entries = {
            name: entry_of(array)
            if name in self._shapes
            else save_array(out / f"{name}.npy", array)
            for name, array in scores._arrays().items()
        }
        for name in self._shapes:
            data = self._data[name]
            assert isinstance(data, np.memmap)
            data.flush()
            if self._partial(name).exists():
                move_into_place(self._partial(name), out / f"{name}.npy")
        scores._save_json(out, entries)
        for file in self._progress_files(out):
            file.unlink()
        assert self._lock is not None
        self._lock.release()

    def _gather(self) -> None:
        """What all ranks have written."""
        world = self._world
        for tiles in world.values(self._done):
            for tile in tiles:
                _add(_tile(tile), self._done)
        if self._strongest is not None:
            for rank in range(world.size):
                arrays = self._strongest.arrays.items()
                shared = world.share({name: torch.from_numpy(x) for name, x in arrays}, rank)
                if shared is not None and rank != world.rank:
                    self._strongest.merge({name: x.numpy() for name, x in shared.items()})
        if self._out is None:
            sums = world.total({name: torch.from_numpy(x) for name, x in self._data.items()})
            self._data = {name: x.numpy() for name, x in sums.items()}
        else:  # opened again: on a network disk, only then are the others' numbers seen
            world.wait()
            self._data = {name: map_array(self._file(name), "r+") for name in self._shapes}

    @staticmethod
    def _progress_files(out: Path) -> list[Path]:
        """The progress files of all ranks, rank 0's first."""
        first = out / "progress.json"
        return [*([first] if first.exists() else []), *sorted(out.glob("progress-*.json"))]

    def _file(self, name: str) -> Path:
        """An unfinished array; after the renaming inside finish(), at its final place."""
        assert self._out is not None
        partial = self._partial(name)
        return partial if partial.exists() else self._out / f"{name}.npy"

    def _partial(self, name: str) -> Path:
        assert self._out is not None
        return self._out / f"{name}.npy.partial"

    def _share_opened(self, out: Path) -> None:
        """Rank 0 has opened the folder, and the others open what is there."""
        state = {"already": self.already is not None, "done": self._done, "of": self.of}
        state = self._world.of_first(state)
        if self._world.first:
            return
        try:
            if state["already"]:
                self.already = Scores.load(out)
            else:
                self._data = {name: map_array(self._file(name), "r+") for name in self._shapes}
        except MissingFile as error:
            raise MissingFile(
                f"{error}. Rank 0 has made it: give a folder that all processes see"
            ) from error
        self._done, self.of = [_tile(block) for block in state["done"]], state["of"]

    def _open(self, out: Path, progress_file: Path) -> None:
        self._lock = FolderLock(out, "writes scores", takeover=True)
        changed = self._changed(out)
        if (out / "scores.json").exists():
            self._same_calculation(out, read_description(out).get("calculation"), changed)
            self.already = Scores.load(out)
            self._lock.release()
            for file in self._progress_files(out):  # interrupted at the end of finish()
                file.unlink()
            return
        resumed = progress_file.exists() and self._resume(out, changed)
        others = [file for file in self._progress_files(out) if file != progress_file]
        if resumed and others:
            self._write_progress(progress_file)
        for file in others:  # the progress of other ranks is now in this one's, or of no use
            file.unlink()
        if resumed:
            return
        if self._tried is not None and changed:
            self._tried.save(out / TRIED)
            self._changed(out)
        needed = sum(math.prod(shape) for shape in self._shapes.values()) * self._dtype.itemsize
        free = shutil.disk_usage(out).free
        if needed > free:
            raise DiskFull(
                f"the scores need {byte_size(needed)} in {out}, where {byte_size(free)} "
                "are free: choose another out, or keep only the strongest with top="
            )
        for name, shape in self._shapes.items():
            self._data[name] = create_array(self._partial(name), shape, self._dtype)
        self._note()

    def _changed(self, out: Path) -> list[str]:
        """Which losses differ from those stored in the folder."""
        if self._tried is None:
            return []
        changed = self._tried.differs_from(out / TRIED, f"delete the folder {out} to start over")
        self.of = "" if changed else file_sha256(out / TRIED)
        return changed

    def _resume(self, out: Path, changed: list[str]) -> bool:
        """Resume an earlier call's work; False if its data is gone and all must be redone."""
        remedy = f"delete the folder {out} to start over"
        parts = {file: read_json(file, remedy=remedy) for file in self._progress_files(out)}
        done: list[ScoreTile] = []
        for file, progress in parts.items():
            with parsing(file, remedy):
                for block in map(_tile, progress["done"]):
                    _add(block, done)
        if not done:  # starting another calculation here loses nothing
            return False
        for progress in parts.values():
            self._same_calculation(out, progress.get("calculation"), changed)
        for name, shape in self._shapes.items():
            try:
                data = map_array(self._file(name), "r+")
            except OSError:
                return False
            if data.shape != shape or data.dtype != self._dtype:
                return False
            self._data[name] = data
        account: dict[str, Any] = {}
        for file, progress in parts.items():
            with parsing(file, remedy):
                if self._strongest is not None:
                    arrays = self._strongest.arrays.items()
                    raw = {name: base64.b64decode(progress["top"][name]) for name, _ in arrays}
                    self._strongest.merge(
                        {k: np.frombuffer(raw[k], x.dtype).reshape(x.shape) for k, x in arrays}
                    )
                written = progress.get("written", [])
                self._written += [(_tile(block), str(crc32)) for block, crc32 in written]
                account = merged(account, dict(progress["account"]))
        if any(self._checksums(block) != crc32 for block, crc32 in self._written):
            raise damaged(self._partial("scores"), "altered: a checksum does not fit", remedy)
        self._done, self.account = done, account
        return True

    def _checksums(self, block: ScoreTile) -> str:
        """The checksums of a block's numbers. Those of the top are in the progress file."""
        r0, r1, c0, c1 = block
        checksums = Checksums()
        for name in self._data:
            checksums.add(self._rows(name)[..., r0:r1, c0:c1])
        return checksums.crc32

    def _same_calculation(self, out: Path, recorded: object, changed: list[str]) -> None:
        if recorded == self._calculation and not changed:
            return
        known = recorded if isinstance(recorded, dict) else {}
        words = {"key": "method, weights, data, or the code of model or task"}
        differs = [
            words.get(name, name)
            for name in {**self._calculation, "layers": None}
            if known.get(name) != self._calculation.get(name)
        ] or changed
        raise FolderConflict(
            f"{out} holds the scores of another calculation (different: {', '.join(differs)}): "
            "choose another out, or delete that folder"
        )

    def _note(self) -> None:
        """Record which blocks are done, after their data."""
        if self.progress_file is not None and self._throttle.due():
            with self._throttle.saving():
                self._write_progress(self.progress_file)

    def _write_progress(self, file: Path) -> None:
        for data in self._data.values() if self._world.size == 1 else ():
            assert isinstance(data, np.memmap)
            data.flush()
        # the strongest are in the same file, so that both always agree
        state = {} if self._strongest is None else self._strongest.arrays
        progress = {
            "calculation": self._calculation,
            "done": self._done,
            "written": self._written,
            "account": self.account,
            "top": {name: base64.b64encode(a.tobytes()).decode() for name, a in state.items()},
        }
        write_json(file, progress)

    def _block(self, rows: slice | None, columns: slice) -> ScoreTile:
        if rows is None and not self._self:
            raise InvalidInput("rows=None is for self-influence: say which queries the block holds")
        r0, r1, row_step = (rows or slice(None)).indices(self._queries)
        c0, c1, column_step = columns.indices(self._examples)
        if row_step != 1 or column_step != 1 or r0 >= r1 or c0 >= c1:
            raise InvalidInput(
                f"rows={rows}, columns={columns} is not a block of {self._queries} queries x "
                f"{self._examples} examples: give non-empty slices with step 1"
            )
        return r0, r1, c0, c1

    def _checked(self, name: str, given: ArrayLike, shape: tuple[int, ...]) -> Floats:
        with np.errstate(over="ignore"):  # an overflow is reported as a score that is not finite
            array = np.asarray(given).astype(self._dtype, copy=False)
        if self._self and array.ndim == len(shape) - 1:
            array = array[..., None, :]
        if array.shape != shape:
            raise InvalidInput(f"{name} has shape {array.shape}, but the block is {shape}")
        return array

    def _rows(self, name: str) -> NDArray[Any]:
        """The array as (..., q, n), also for self-influence."""
        return self._data[name][..., None, :] if self._self else self._data[name]


def merged(left: Any, right: Any) -> Any:
    """The accounts of two ranks as one: the larger of two numbers, the sum of two lists of numbers,
    each text once."""
    if isinstance(left, dict):
        both = {name: merged(left[name], right[name]) for name in left if name in right}
        return {**left, **right, **both}
    if isinstance(left, list):
        if all(isinstance(x, str) for x in [*left, *right]):
            return list(dict.fromkeys([*left, *right]))
        return [x + y for x, y in zip(left, right, strict=True)]
    return max(left, right)


def _tile(given: Any) -> ScoreTile:
    """A block, as it was written to a file."""
    r0, r1, c0, c1 = map(operator.index, given)
    return r0, r1, c0, c1


def _missing(block: ScoreTile, done: Iterable[ScoreTile]) -> list[ScoreTile]:
    """The parts of ``block`` that no block of ``done`` covers."""
    left = [block]
    for d0, d1, e0, e1 in done:
        parts = []
        for r0, r1, c0, c1 in left:
            top, bottom = max(r0, d0), min(r1, d1)
            if top >= bottom or max(c0, e0) >= min(c1, e1):
                parts.append((r0, r1, c0, c1))
                continue
            around = [(r0, top, c0, c1), (bottom, r1, c0, c1)]
            around += [(top, bottom, c0, e0), (top, bottom, e1, c1)]
            parts += [part for part in around if part[0] < part[1] and part[2] < part[3]]
        left = parts
    return left


def _add(block: ScoreTile, done: list[ScoreTile]) -> None:
    """Add ``block`` to ``done``, joining neighbours, so that the list stays short."""
    for part in _missing(block, done):
        joined = True
        while joined:
            joined = False
            for other in done:
                (r0, r1, c0, c1), (s0, s1, d0, d1) = part, other
                same_rows = (r0, r1) == (s0, s1) and (c0 == d1 or c1 == d0)
                same_columns = (c0, c1) == (d0, d1) and (r0 == s1 or r1 == s0)
                if same_rows or same_columns:
                    done.remove(other)
                    part = (min(r0, s0), max(r1, s1), min(c0, d0), max(c1, d1))
                    joined = True
                    break
        done.append(part)
