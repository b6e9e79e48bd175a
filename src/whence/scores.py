"""The result of an attribution: what each training example did to each query's measurement.

Axes: ``n`` training examples, ``q`` queries, ``L`` segments, ``k`` kept entries.
"""

from __future__ import annotations

import base64
import json
import math
import operator
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from time import monotonic
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

SCHEMA = 1
SIGN = "values[q, m] estimates f(with m) - f(without m)"

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.int64]
Block = tuple[int, int, int, int]  # first row, end row, first column, end column

# Every array that a Scores folder may hold, each as NAME.npy.
ARRAYS = (
    "scores",
    "by_segment",
    "spread",
    "top_values",
    "top_columns",
    "query_ids",
    "train_ids",
)


class Entry(NamedTuple):
    """One training example in a ranking."""

    example: int  # training id
    value: float
    stage: str | None


class Ranking(list[Entry]):
    """Entries, strongest first: a list that prints as a table."""

    @property
    def examples(self) -> list[int]:
        return [entry.example for entry in self]

    def __repr__(self) -> str:
        rows = [f"{e.example:>10}  {e.value:+.4e}  {e.stage or ''}".rstrip() for e in self]
        return "\n".join([f"{'example':>10}  value", *rows])


@dataclass(frozen=True)
class Top:
    """The strongest entries at both ends of each query's row: ``[0]`` highest first, ``[1]`` lowest
    first, ties to the lower column.

    ``values`` and ``columns`` are (2, q, k), or (2, k) for self-influence; a column is a position
    in ``train_ids``.
    """

    values: Floats
    columns: Ints

    @property
    def kept(self) -> int:
        return int(self.values.shape[-1])


class Scores:
    """Query x train scores, with ids, unit, direction, provenance and diagnostics.

    ``values[q, m]`` estimates what having training example ``m`` did to the measurement of query
    ``q``: f(with m) - f(without m). Shape (q, n), or (n,) for self-influence. A method that was
    asked for ``top=k`` gives ``top`` in place of ``values``.
    """

    def __init__(
        self,
        values: Floats | None,
        *,
        method: str,
        measurement: str,
        unit: str,
        higher_is_better: bool,
        settings: Mapping[str, Any] | None = None,
        query_ids: ArrayLike | None = None,
        train_ids: ArrayLike | None = None,
        stage: Sequence[str] | None = None,
        by_segment: Floats | None = None,
        spread: Floats | None = None,
        top: Top | None = None,
        diagnostics: Mapping[str, Any] | None = None,
        provenance: Mapping[str, Any] | None = None,
        excluded: Sequence[Mapping[str, Any]] | None = None,
        calculation: Mapping[str, Any] | None = None,
    ) -> None:
        if (values is None) == (top is None):
            raise ValueError("Scores need either values or top: give exactly one of them")
        if values is not None:
            if values.ndim not in (1, 2) or 0 in values.shape:
                raise ValueError(
                    f"values has shape {values.shape}: give (q, n), or (n,) for self-influence"
                )
            self.shape: tuple[int, ...] = values.shape
        elif top is not None:
            if train_ids is None:
                raise ValueError("top without train_ids: the number of examples is not known")
            if top.values.shape != top.columns.shape or top.values.ndim not in (2, 3):
                raise ValueError(
                    f"top.values {top.values.shape} and top.columns {top.columns.shape}: "
                    "both must be (2, q, k), or (2, k) for self-influence"
                )
            self.shape = (*top.values.shape[1:-1], np.size(np.asarray(train_ids)))
        self._values = values
        self.method = method
        self.settings: dict[str, Any] = _plain("settings", settings or {})
        self.measurement = measurement
        self.unit = unit
        self.higher_is_better = bool(higher_is_better)
        n = self.shape[-1]
        self.train_ids = _ids("train_ids", train_ids, n)
        self.query_ids = (
            self.train_ids
            if self.is_self_influence
            else _ids("query_ids", query_ids, self.shape[0])
        )
        self.stage = None if stage is None else [str(name) for name in stage]
        if self.stage is not None and len(self.stage) != n:
            raise ValueError(f"stage names {len(self.stage)} columns, but there are {n}")
        if by_segment is not None and by_segment.shape[1:] != self.shape:
            raise ValueError(f"by_segment has shape {by_segment.shape}: give (L, *{self.shape})")
        if spread is not None and spread.shape != self.shape:
            raise ValueError(f"spread has shape {spread.shape}, but the scores {self.shape}")
        self.by_segment = by_segment
        self.spread = spread
        self.top = top
        self.diagnostics: dict[str, Any] = _plain("diagnostics", diagnostics or {})
        self.provenance: dict[str, Any] = _plain("provenance", provenance or {})
        self.excluded: list[dict[str, Any]] = _plain("excluded", list(excluded or []))
        # What a ScoreWriter was asked for, so that the same call finds its finished work again.
        self._calculation = None if calculation is None else dict(calculation)

    @property
    def values(self) -> Floats:
        """All scores, (q, n) or (n,); memory-mapped when loaded from disk."""
        if self._values is None:
            raise ValueError(
                f"these scores keep only each query's top {self._kept} entries: "
                "attribute without top= to have all values"
            )
        return self._values

    @property
    def is_self_influence(self) -> bool:
        return len(self.shape) == 1

    def helpful(self, query: int | None = None, k: int = 10) -> Ranking:
        """The ``k`` training examples that did most for the measurement of ``query`` (a row)."""
        return self._ranking(query, k, highest=self.higher_is_better)

    def harmful(self, query: int | None = None, k: int = 10) -> Ranking:
        """The ``k`` training examples that did most against the measurement of ``query``."""
        return self._ranking(query, k, highest=not self.higher_is_better)

    def removal_effect(
        self, query: int | None, examples: int | Iterable[int], *, stage: str | None = None
    ) -> float:
        """Predicted change of the measurement of ``query`` had ``examples`` (training ids) not been
        trained on: minus the sum of their scores. ``stage`` tells apart ids that occur in several.
        """
        row = self._row(query)
        columns = self._columns(examples, stage)
        if self.is_self_influence and len(columns) > 1:
            raise ValueError(
                f"removal_effect of {len(columns)} examples on self-influence: each is scored on "
                "its own measurement, so they do not add up; ask for one example, or attribute "
                "with query="
            )
        if self.top is None:
            values = np.atleast_2d(self.values)[row, columns]
        else:
            kept = self._kept_values(row)
            lost = [int(c) for c in columns if int(c) not in kept]
            if lost:
                raise ValueError(
                    f"the scores of {_some(self.train_ids[lost])} were not kept: only the top "
                    f"{self._kept} of each query were; attribute with a larger top=, or without"
                )
            values = np.array([kept[int(c)] for c in columns])
        return -float(np.sum(values, dtype=np.float64)) + 0.0  # + 0.0: never "-0.0"

    def to_numpy(self) -> Floats:
        """A copy of ``values`` in memory."""
        return np.array(self.values)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self.values, dtype=dtype, copy=copy)

    def to_pandas(self) -> Any:
        """A DataFrame: one row per query, one column per training example, (stage, example) where
        stages are known. Self-influence: one row per training example."""
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError("to_pandas needs pandas: pip install 'whence[pandas]'") from error
        examples: Any = pd.Index(self.train_ids, name="example")
        if self.stage is not None:
            examples = pd.MultiIndex.from_arrays(
                [self.stage, self.train_ids], names=["stage", "example"]
            )
        if self.is_self_influence:
            return pd.DataFrame({"value": self.to_numpy()}, index=examples)
        return pd.DataFrame(
            self.to_numpy(), index=pd.Index(self.query_ids, name="query"), columns=examples
        )

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        if self.is_self_influence:
            size = f"{self.shape[0]} training examples, each on its own measurement"
        else:
            size = f"{self.shape[0]} queries x {self.shape[1]} training examples"
        if self.top is not None:
            size += f"; only the top {self._kept} at either end are kept"
        else:
            size += f", {self.values.dtype}"
        lines = [
            f"Scores by {self.method}({settings})",
            f"  measurement  {self.measurement}, "
            f"{'higher' if self.higher_is_better else 'lower'} is better",
            f"  unit         {self.unit}",
            f"  sign         {SIGN}",
            f"  shape        {self.shape}: {size}",
        ]
        if self.excluded:
            share = sum(float(part.get("share", 0.0)) for part in self.excluded)
            names = [part.get("name", "?") for part in self.excluded]
            lines.append(f"  left out     {share:.1%} of the parameters: {_some(names)}")
        else:
            lines.append("  left out     nothing")
        return "\n".join(lines)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a folder: scores.npy and the like, and last scores.json. Scores that are already
        there are replaced, each file at once, also those that this object is mapped from."""
        path = Path(path)
        _make_folder(path)
        arrays = self._arrays()
        for name, array in arrays.items():
            _save_array(path / f"{name}.npy", array)
        self._save_json(path)
        for name in ARRAYS:
            if name not in arrays:
                (path / f"{name}.npy").unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Scores:
        """Open what ``save`` or ``attribute(out=...)`` wrote; large arrays stay on disk until they
        are used."""
        path = Path(path)
        meta = _read_json(path)
        try:
            arrays = {
                name: _load_array(path / f"{name}.npy", tuple(spec["shape"]), spec["dtype"])
                for name, spec in meta["arrays"].items()
                if name in ARRAYS
            }
            stage = meta["stage"]
            return cls(
                arrays.get("scores"),
                query_ids=arrays.get("query_ids"),
                train_ids=arrays["train_ids"],
                stage=None
                if stage is None
                else [name for name, count in stage for _ in range(count)],
                by_segment=arrays.get("by_segment"),
                spread=arrays.get("spread"),
                top=Top(arrays["top_values"], arrays["top_columns"])
                if "top_values" in arrays
                else None,
                calculation=meta["calculation"],
                **{name: meta[name] for name in _METADATA},
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path / 'scores.json'} is incomplete ({type(error).__name__}: {error}): "
                "save the scores again"
            ) from error

    def _arrays(self) -> dict[str, NDArray[Any]]:
        found = {
            "scores": self._values,
            "by_segment": self.by_segment,
            "spread": self.spread,
            "top_values": None if self.top is None else self.top.values,
            "top_columns": None if self.top is None else self.top.columns,
            "query_ids": None if self.is_self_influence else self.query_ids,
            "train_ids": self.train_ids,
        }
        return {name: array for name, array in found.items() if array is not None}

    def _save_json(self, path: Path) -> None:
        runs = None
        if self.stage is not None:
            runs = [[name, len(list(same))] for name, same in groupby(self.stage)]
        meta = {
            "schema": SCHEMA,
            "sign": SIGN,
            **{name: getattr(self, name) for name in _METADATA},
            "stage": runs,
            "calculation": self._calculation,
            "arrays": {
                name: {"shape": list(array.shape), "dtype": str(array.dtype)}
                for name, array in self._arrays().items()
            },
        }
        _write_json(path / "scores.json", meta)

    @property
    def _kept(self) -> int:
        return self.shape[-1] if self.top is None else self.top.kept

    def _row(self, query: int | None) -> int:
        if self.is_self_influence:
            if query is not None:
                raise ValueError(
                    f"query={query!r}, but self-influence has no queries: leave it out"
                )
            return 0
        last = self.shape[0] - 1
        if query is None:
            raise ValueError(f"say which query: query=0..{last}")
        row = operator.index(query)
        if not 0 <= row <= last:
            raise IndexError(f"query={row} is out of range: these scores have queries 0..{last}")
        return row

    def _ranking(self, query: int | None, k: int, *, highest: bool) -> Ranking:
        row, k = self._row(query), operator.index(k)
        if k < 1:
            raise ValueError(f"k={k}: ask for at least one example")
        k = min(k, self.shape[-1])
        if self.top is not None:
            if k > self._kept:
                raise ValueError(
                    f"k={k}, but only the top {self._kept} of each query were kept: use "
                    f"k<={self._kept}, or attribute with top>={k} or without top="
                )
            values, columns = self._top_row(row, 0 if highest else 1)
            values, columns = values[:k], columns[:k]
        else:
            every = np.atleast_2d(self.values)[row]
            if np.isnan(every).any():
                raise ValueError(
                    f"query {row} has {int(np.isnan(every).sum())} scores that are not numbers: "
                    "they cannot be ranked"
                )
            columns = np.argsort(-every if highest else every, kind="stable")[:k]
            values = every[columns]
        return Ranking(
            Entry(int(self.train_ids[c]), float(v), None if self.stage is None else self.stage[c])
            for v, c in zip(values, columns, strict=True)
        )

    def _top_row(self, row: int, end: int) -> tuple[Floats, Ints]:
        assert self.top is not None
        return np.atleast_2d(self.top.values[end])[row], np.atleast_2d(self.top.columns[end])[row]

    def _kept_values(self, row: int) -> dict[int, float]:
        ends = [self._top_row(row, end) for end in (0, 1)]
        return {int(c): float(v) for values, cs in ends for v, c in zip(values, cs, strict=True)}

    @cached_property
    def _by_id(self) -> Ints:
        return np.argsort(self.train_ids, kind="stable")

    def _columns(self, examples: int | Iterable[int], stage: str | None) -> Ints:
        """Columns of training ids."""
        given = np.asarray(list(examples) if isinstance(examples, Iterable) else [examples])
        if given.size == 0:
            return np.empty(0, np.int64)
        if given.dtype.kind not in "iu" or given.ndim != 1:
            raise ValueError(
                f"examples must be training ids (a list of integers), not {given.dtype} of shape "
                f"{given.shape}; for a mask use scores.train_ids[mask]"
            )
        unique, counts = np.unique(given, return_counts=True)
        if len(unique) != len(given):
            raise ValueError(
                f"examples names {_some(unique[counts > 1])} more than once: give each id once"
            )
        order = self._by_id
        if stage is not None:
            if self.stage is None or stage not in self.stage:
                known = "none" if self.stage is None else ", ".join(dict.fromkeys(self.stage))
                raise ValueError(f"stage={stage!r}, but the stages of these scores are: {known}")
            order = order[np.array(self.stage)[order] == stage]
        ordered = self.train_ids[order]
        first, end = np.searchsorted(ordered, given), np.searchsorted(ordered, given, "right")
        if (first == end).any():
            where = "" if stage is None else f" of stage {stage!r}"
            raise ValueError(
                f"examples names {_some(given[first == end])}, not among the {len(ordered)} "
                f"training ids{where} ({ordered[0]}..{ordered[-1]}): see scores.train_ids"
            )
        if (end - first > 1).any():
            raise ValueError(
                f"training id {_some(given[end - first > 1])} occurs in several stages: "
                "say which with stage="
            )
        return order[first]


_METADATA = (
    "method",
    "settings",
    "measurement",
    "unit",
    "higher_is_better",
    "diagnostics",
    "provenance",
    "excluded",
)


class ScoreWriter:
    """Takes scores block by block and ends as a Scores.

    With ``out`` they go to disk as they come, and a call that was killed goes on where it stopped
    when it is made again with the same ``key`` (whatever identifies the calculation). With ``top``
    only the strongest entries of each query are held, O(q k), whatever the order of the blocks.
    ``queries=None`` is self-influence.

    ``already`` holds the finished Scores when an earlier call with the same key wrote them.
    """

    def __init__(
        self,
        out: str | os.PathLike[str] | None,
        queries: int | None,
        examples: int,
        *,
        key: str,
        segments: int | None = None,
        top: int | None = None,
        dtype: DTypeLike = np.float32,
    ) -> None:
        for name, number in (
            ("queries", queries),
            ("examples", examples),
            ("segments", segments),
            ("top", top),
        ):
            if number is not None and number < 1:
                raise ValueError(f"{name}={number}: there must be at least one")
        if top is not None and segments is not None:
            raise ValueError(
                f"top={top} together with by_segment: by_segment keeps a number for every query, "
                "example and segment, which top is there to avoid; ask for one of the two"
            )
        self.already: Scores | None = None
        self._out = None if out is None else Path(out)
        self._dtype = np.dtype(dtype)
        self._self = queries is None
        self._queries = 1 if queries is None else queries
        self._examples = examples
        self._top = None if top is None else min(top, examples)
        self._shape = (examples,) if queries is None else (queries, examples)
        self._calculation = {
            "key": key,
            "queries": queries,
            "examples": examples,
            "segments": segments,
            "top": top,
            "dtype": str(self._dtype),
        }
        self._shapes: dict[str, tuple[int, ...]] = {}
        if top is None:
            self._shapes["scores"] = self._shape
        if segments is not None:
            self._shapes["by_segment"] = (segments, *self._shape)
        self._data: dict[str, NDArray[Any]] = {}
        self._done: list[Block] = []
        self._noted, self._note_seconds = -math.inf, 0.0
        if self._top is not None:
            ends = np.array([-np.inf, np.inf], self._dtype)[:, None, None]
            self._top_values = np.tile(ends, (1, self._queries, self._top))
            self._top_columns = np.full(self._top_values.shape, examples, np.int64)
        if self._out is None:
            self._data = {
                name: np.zeros(shape, self._dtype) for name, shape in self._shapes.items()
            }
        else:
            self._open(self._out)

    def done(self, rows: slice | None, columns: slice) -> bool:
        """Whether this block was written, by this call or by an earlier one that was killed."""
        return self.already is not None or not _missing(self._block(rows, columns), self._done)

    def write(
        self,
        rows: slice | None,
        columns: slice,
        values: ArrayLike,
        by_segment: ArrayLike | None = None,
    ) -> None:
        """Keep ``values`` (q_b, n_b), or (n_b,), and ``by_segment`` (L, q_b, n_b). Writing a block
        again changes nothing."""
        if self.already is not None:
            return
        r0, r1, c0, c1 = block = self._block(rows, columns)
        found = self._checked("values", values, (r1 - r0, c1 - c0))
        if not np.isfinite(found).all():
            row, column = np.argwhere(~np.isfinite(found))[0]
            raise ValueError(
                f"the score of query {r0 + row} and example {c0 + column} is {found[row, column]} "
                f"in {self._dtype}: check the losses there, raise the damping, or use a wider dtype"
            )
        if (by_segment is None) == ("by_segment" in self._shapes):
            raise ValueError(
                "by_segment must be given exactly when the writer was made with segments="
            )
        if self._top is not None:
            self._keep_strongest(block, found)
        else:
            self._rows("scores")[r0:r1, c0:c1] = found
        if by_segment is not None:
            length = self._shapes["by_segment"][0]
            parts = self._checked("by_segment", by_segment, (length, r1 - r0, c1 - c0))
            self._rows("by_segment")[:, r0:r1, c0:c1] = parts
        _add(block, self._done)
        self._note()

    def finish(
        self,
        *,
        query_ids: ArrayLike | None = None,
        train_ids: ArrayLike | None = None,
        **about: Any,
    ) -> Scores:
        """The Scores; ``about`` is what its constructor takes besides the numbers."""
        if self.already is not None:
            return self.already
        missing = _missing((0, self._queries, 0, self._examples), self._done)
        if missing:
            r0, r1, c0, c1 = missing[0]
            raise ValueError(
                f"finish() before all blocks were written: queries {r0}..{r1 - 1}, examples "
                f"{c0}..{c1 - 1} are missing"
            )
        top = None
        if self._top is not None:
            shape = (2, *self._shape[:-1], self._top)
            top = Top(self._top_values.reshape(shape), self._top_columns.reshape(shape))
        scores = Scores(
            self._data.get("scores"),
            by_segment=self._data.get("by_segment"),
            top=top,
            query_ids=query_ids,
            train_ids=np.arange(self._examples) if train_ids is None else train_ids,
            calculation=self._calculation,
            **about,
        )
        if self._out is None:
            return scores
        # The big arrays are on disk already: rename them, add the small ones, scores.json last.
        for name, array in scores._arrays().items():
            if name not in self._shapes:
                _save_array(self._out / f"{name}.npy", array)
        for name in self._shapes:
            data = self._data[name]
            assert isinstance(data, np.memmap)
            data.flush()
            if self._partial(name).exists():
                os.replace(self._partial(name), self._out / f"{name}.npy")
        scores._save_json(self._out)
        self._progress.unlink()
        self._data = {}
        self.already = Scores.load(self._out)
        return self.already

    @property
    def _progress(self) -> Path:
        assert self._out is not None
        return self._out / "progress.json"

    def _partial(self, name: str) -> Path:
        assert self._out is not None
        return self._out / f"{name}.npy.partial"

    def _open(self, out: Path) -> None:
        _make_folder(out)
        if (out / "scores.json").exists():
            self._same_calculation(out, _read_json(out).get("calculation"))
            self.already = Scores.load(out)
            self._progress.unlink(missing_ok=True)  # killed at the very last line of finish()
            return
        if self._progress.exists() and self._resume(out):
            return
        needed = sum(math.prod(shape) for shape in self._shapes.values()) * self._dtype.itemsize
        free = shutil.disk_usage(out).free
        if needed > free:
            raise OSError(
                f"the scores need {needed / 2**30:.1f} GiB in {out}, where {free / 2**30:.1f} GiB "
                "are free: choose another out, or keep only the strongest with top="
            )
        for name, shape in self._shapes.items():
            self._data[name] = np.lib.format.open_memmap(
                self._partial(name), mode="w+", dtype=self._dtype, shape=shape
            )
        self._note()

    def _resume(self, out: Path) -> bool:
        """Take up an earlier call's work; False when its data is gone and all must be redone."""
        try:
            progress = json.loads(self._progress.read_text())
            calculation, done = progress["calculation"], [tuple(b) for b in progress["done"]]
            state = {name: base64.b64decode(raw) for name, raw in progress["top"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{self._progress} cannot be read ({error}): delete the folder {out} to start over"
            ) from error
        self._same_calculation(out, calculation)
        for name, shape in self._shapes.items():
            file = self._partial(name)
            if not file.exists():  # killed inside finish(), after the renaming
                file = out / f"{name}.npy"
            try:
                data = np.lib.format.open_memmap(file, mode="r+")
            except (OSError, ValueError):
                return False
            if data.shape != shape or data.dtype != self._dtype:
                return False
            self._data[name] = data
        if self._top is not None:
            for name, array in (("values", self._top_values), ("columns", self._top_columns)):
                array[...] = np.frombuffer(state[name], array.dtype).reshape(array.shape)
        self._done = done
        return True

    def _same_calculation(self, out: Path, found: object) -> None:
        if found == self._calculation:
            return
        known = found if isinstance(found, dict) else {}
        differs = [name for name in self._calculation if known.get(name) != self._calculation[name]]
        raise ValueError(
            f"{out} holds the scores of another calculation (different: {', '.join(differs)}): "
            "choose another out, or delete that folder"
        )

    def _note(self) -> None:
        """Write down which blocks are done, after their data."""
        if self._out is None:
            return
        start = monotonic()
        # Where noting is expensive it is spaced out, to cost at most a twentieth of the time; a
        # block that was not noted is simply done again.
        if start - self._noted < 20 * self._note_seconds:
            return
        for data in self._data.values():
            assert isinstance(data, np.memmap)
            data.flush()
        state = {}
        if self._top is not None:  # in the same file, so that the two cannot disagree
            state = {"values": self._top_values, "columns": self._top_columns}
        progress = {
            "calculation": self._calculation,
            "done": self._done,
            "top": {name: base64.b64encode(a.tobytes()).decode() for name, a in state.items()},
        }
        _write_json(self._progress, progress)
        self._noted = monotonic()
        seconds = self._noted - start
        self._note_seconds = seconds if seconds > 0.01 else 0.0

    def _block(self, rows: slice | None, columns: slice) -> Block:
        if rows is None and not self._self:
            raise ValueError("rows=None is for self-influence: say which queries the block holds")
        r0, r1, row_step = (rows or slice(None)).indices(self._queries)
        c0, c1, column_step = columns.indices(self._examples)
        if row_step != 1 or column_step != 1 or r0 >= r1 or c0 >= c1:
            raise ValueError(
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
            raise ValueError(f"{name} has shape {array.shape}, but the block is {shape}")
        return array

    def _rows(self, name: str) -> NDArray[Any]:
        """The array as (..., q, n), also for self-influence."""
        return self._data[name][..., None, :] if self._self else self._data[name]

    def _keep_strongest(self, block: Block, values: Floats) -> None:
        assert self._top is not None
        r0, r1, c0, c1 = block
        for end, sign in enumerate((1, -1)):
            strength = sign * values
            columns = _strongest_columns(strength, min(self._top, c1 - c0))
            kept, kept_columns = self._top_values[end, r0:r1], self._top_columns[end, r0:r1]
            # Of a block that comes again, what is kept already must not be counted twice.
            again = (kept_columns >= c0) & (kept_columns < c1)
            strength = np.concatenate(
                [np.where(again, -np.inf, sign * kept), np.take_along_axis(strength, columns, 1)], 1
            )
            columns = np.concatenate(
                [np.where(again, self._examples, kept_columns), columns + c0], 1
            )
            order = np.lexsort((columns, -strength), axis=1)[:, : self._top]
            self._top_values[end, r0:r1] = sign * np.take_along_axis(strength, order, 1)
            self._top_columns[end, r0:r1] = np.take_along_axis(columns, order, 1)


def _strongest_columns(strength: Floats, k: int) -> Ints:
    """Columns (r, k) of the k largest entries of each row of (r, m), ties to the lower column."""
    place = strength.shape[1] - k
    kth = np.partition(strength, place, axis=1)[:, place, None]
    above, ties = strength > kth, strength == kth
    room = k - above.sum(1, keepdims=True)
    keep = above | (ties & (np.cumsum(ties, 1, dtype=np.int32) <= room))
    return np.nonzero(keep)[1].reshape(-1, k)


def _missing(block: Block, done: Iterable[Block]) -> list[Block]:
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


def _add(block: Block, done: list[Block]) -> None:
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


def _ids(name: str, given: ArrayLike | None, count: int) -> Ints:
    ids = np.arange(count) if given is None else np.asarray(given)
    if ids.shape != (count,) or ids.dtype.kind not in "iu":
        raise ValueError(
            f"{name} is {ids.dtype} of shape {ids.shape}: give {count} integers, one per score"
        )
    return ids.astype(np.int64, copy=False)


def _some(items: Iterable[object], show: int = 3) -> str:
    """'3, 14, 15 and 2 more'"""
    names = [str(item) for item in items]
    more = f" and {len(names) - show} more" if len(names) > show else ""
    return ", ".join(names[:show]) + more


def _plain(name: str, given: object) -> Any:
    """``given`` as it will read after a trip through JSON."""

    def convert(item: object) -> object:
        if isinstance(item, np.generic | np.ndarray):
            return item.tolist()
        if isinstance(item, os.PathLike):
            return os.fspath(item)
        raise TypeError(f"{type(item).__name__} in {name} cannot be written as JSON")

    return json.loads(json.dumps(given, default=convert))


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise NotADirectoryError(f"{path} is a file: scores are kept in a folder") from error


def _replace(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write beside ``path`` and rename, so that a killed process leaves the old file or the new."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _save_array(path: Path, array: NDArray[Any]) -> None:
    _replace(path, lambda file: np.save(file, array, allow_pickle=False))


def _write_json(path: Path, content: object) -> None:
    _replace(path, lambda file: file.write(json.dumps(content, indent=2).encode()))


def _read_json(path: Path) -> dict[str, Any]:
    file = path / "scores.json"
    if not file.is_file():
        if (path / "progress.json").is_file():
            raise ValueError(
                f"the scores in {path} are not finished: make the same attribute(out=...) call "
                "again, and it goes on where it stopped"
            )
        what = "has no scores.json" if path.is_dir() else "does not exist"
        raise FileNotFoundError(f"{path} {what}: give a folder that Scores.save wrote")
    try:
        meta = json.loads(file.read_text())
        schema = meta["schema"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is not the description of scores ({error})") from error
    if schema != SCHEMA:
        raise ValueError(
            f"{file} has schema {schema!r}, this whence reads {SCHEMA}: use the version of whence "
            "that wrote it"
        )
    return dict(meta)


def _load_array(path: Path, shape: tuple[int, ...], dtype: str) -> Any:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path} is missing: the scores are not whole") from error
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"{path} is truncated or damaged ({error})") from error
    if array.shape != shape or str(array.dtype) != dtype:
        raise ValueError(
            f"{path} is {array.dtype} of shape {array.shape}, but scores.json says {dtype} of "
            f"shape {shape}: the two files do not belong together"
        )
    return array
