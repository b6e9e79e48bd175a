"""The result of an attribution: the effect of each training example on each query's measurement.

Axes: ``n`` training examples, ``q`` queries, ``L`` segments or layers, ``k`` strongest entries.
"""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from whence.errors import (
    InvalidIndex,
    InvalidInput,
    InvalidType,
    MissingFile,
    collected_warnings,
    optional,
)
from whence.persist.arrays import Entry as ArrayEntry
from whence.persist.arrays import load_array, save_array
from whence.persist.files import as_path, check_types, make_folder, parsing, read_json, write_json
from whence.persist.identity import call_text
from whence.scores.uncertainty import calibrated, half_widths
from whence.table import Table, listed, one_line

SCHEMA = 1
SIGN = "values[q, m] estimates f(with m) - f(without m)"

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.int64]

BY_SEGMENT, BY_LAYER = "by_segment", "by_layer"  # parts that scores are the sums of
BY_HEAD = "heads"  # as by layer, with attention projections cut into their heads

# Every array that a Scores folder may contain, each as NAME.npy.
ARRAYS = (
    "scores",
    "by_segment",
    "by_layer",
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

    def _repr_html_(self) -> str:
        rows = [(e.example, f"{e.value:+.4g}", e.stage) for e in self]
        staged = any(e.stage is not None for e in self)
        heads = ["example", "value", "stage"] if staged else ["example", "value"]
        return Table(heads, [row[: len(heads)] for row in rows])._repr_html_()

    def __repr__(self) -> str:
        rows = [
            f"{e.example:>10}  {e.value:+.4g}  {one_line(e.stage or '')}".rstrip() for e in self
        ]
        return "\n".join([f"{'example':>10}  value", *rows])


@dataclass(frozen=True)
class Top:
    """The strongest entries at both ends of each query's row.

    ``[0]`` has the highest first, ``[1]`` the lowest first; ties go to the lower column.

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

    ``values[q, m]`` estimates the effect of training example ``m`` on the measurement of query
    ``q``: f(with m) - f(without m). Its shape is (q, n), or (n,) for self-influence. With
    ``attribute(top=k)`` there is ``strongest`` instead of ``values``.
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
        by_layer: Floats | None = None,
        spread: Floats | None = None,
        top: Top | None = None,
        diagnostics: Mapping[str, Any] | None = None,
        provenance: Mapping[str, Any] | None = None,
        excluded: Sequence[Mapping[str, Any]] | None = None,
        calculation: Mapping[str, Any] | None = None,
    ) -> None:
        self.shape = _shape(values, top, train_ids)
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
            raise InvalidInput(f"stage names {len(self.stage)} columns, but there are {n}")
        for name, parts in ((BY_SEGMENT, by_segment), (BY_LAYER, by_layer)):
            if parts is not None and parts.shape[1:] != self.shape:
                raise InvalidInput(f"{name} has shape {parts.shape}: give (L, *{self.shape})")
        if spread is not None and spread.shape != self.shape:
            raise InvalidInput(f"spread has shape {spread.shape}, but the scores {self.shape}")
        self.by_segment, self.by_layer = by_segment, by_layer
        self.spread = spread
        self.strongest = top  # None if all values are there
        self.diagnostics: dict[str, Any] = _plain("diagnostics", diagnostics or {})
        messages = dict.fromkeys([*self.warnings, *collected_warnings()])
        self.diagnostics |= {"warnings": list(messages)} if messages else {}
        self.provenance: dict[str, Any] = _plain("provenance", provenance or {})
        self.excluded: list[dict[str, Any]] = _plain("excluded", list(excluded or []))
        # The ScoreWriter's arguments, so that the same call reuses its finished work.
        self._calculation = None if calculation is None else dict(calculation)

    @property
    def values(self) -> Floats:
        """All scores, (q, n) or (n,); memory-mapped when loaded from disk."""
        if self._values is None:
            raise InvalidInput(
                f"these scores keep only each query's top {self._entries} entries: "
                "attribute without top= to have all values"
            )
        return self._values

    @property
    def left_out(self) -> tuple[float, list[str]]:
        """The share of the trained parameters that no score includes, and the names of their
        layers. Frozen layers are in ``excluded``, too, but nothing of them is left out."""
        parts = [part for part in self.excluded if part.get("share", 0.0) > 0]
        return sum(float(p["share"]) for p in parts), [str(p.get("name", "?")) for p in parts]

    @property
    def warnings(self) -> list[str]:
        """What to know before you rely on these scores; empty if nothing."""
        return [str(message) for message in self.diagnostics.get("warnings", [])]

    @property
    def layers(self) -> list[str]:
        """The names of the layers of ``by_layer``; empty if it was not asked for."""
        return [] if self.by_layer is None else list(self.diagnostics["layers"])

    @property
    def is_self_influence(self) -> bool:
        return len(self.shape) == 1

    def helpful(self, query: int | None = None, k: int = 10) -> Ranking:
        """The ``k`` training examples that most improved the measurement of ``query`` (a row)."""
        return self._ranking(query, k, highest=self.higher_is_better)

    def harmful(self, query: int | None = None, k: int = 10) -> Ranking:
        """The ``k`` training examples that most worsened the measurement of ``query``."""
        return self._ranking(query, k, highest=not self.higher_is_better)

    def row_index(self, query: int | None = None) -> int:
        """The row of ``query``, checked; 0 for self-influence, which has no queries."""
        if self.is_self_influence:
            if query is not None:
                raise InvalidInput(
                    f"query={query!r}, but self-influence has no queries: leave it out"
                )
            return 0
        last = self.shape[0] - 1
        if query is None:
            raise InvalidInput(f"say which query: query=0..{last}")
        row = _whole("query", query)
        if not 0 <= row <= last:
            raise InvalidIndex(f"query={row} is out of range: these scores have queries 0..{last}")
        return row

    def row_scores(self, query: int | None = None) -> tuple[Floats, Ints]:
        """The scores of ``query`` and their columns (positions in ``train_ids``): all of them, or
        those that were kept if only the top was."""
        row = self.row_index(query)
        if self.strongest is None:
            return self._row(row), np.arange(self.shape[-1])
        ends = [self._top_row(row, end) for end in (0, 1)]
        columns, first = np.unique(np.concatenate([c for _, c in ends]), return_index=True)
        return np.concatenate([v for v, _ in ends])[first], columns

    def removal_effect(
        self, query: int | None, examples: int | Iterable[int], *, stage: str | None = None
    ) -> float:
        """The predicted change of the measurement of ``query`` after removing ``examples``.

        It is minus the sum of their scores. ``examples`` are training ids; ``stage`` selects one of
        several stages with the same ids.
        """
        row = self.row_index(query)
        columns = self._columns(examples, stage)
        if self.is_self_influence and len(columns) > 1:
            raise InvalidInput(
                f"removal_effect of {len(columns)} examples on self-influence: each is scored on "
                "its own measurement, so they do not add up; ask for one example, or attribute "
                "with query="
            )
        if self.strongest is None:
            values = self._row(row)[columns]
        else:
            scores, where = self.row_scores(query)
            by_column = dict(zip(where.tolist(), scores.tolist(), strict=True))
            lost = [int(c) for c in columns if int(c) not in by_column]
            if lost:
                raise InvalidInput(
                    f"the scores of {listed(self.train_ids[lost])} were not kept: only the top "
                    f"{self._entries} of each query were; attribute with a larger top=, or without"
                )
            values = np.array([by_column[int(c)] for c in columns])
        return -float(np.sum(values, dtype=np.float64)) + 0.0  # + 0.0: never "-0.0"

    def removal_interval(
        self, query: int | None, examples: int | Iterable[int], *, stage: str | None = None
    ) -> tuple[float, float]:
        """95 % interval of the change that one retraining without ``examples`` measures.

        It is centred on ``removal_effect``, and holds for groups that were not chosen by their
        scores. Only calibrated scores have it (`whence.evaluate.calibrate` or `combine`).
        """
        calibration = self.diagnostics.get("calibration")
        if calibration is None:
            raise InvalidInput(
                "these scores are not calibrated, so the error of a predicted change is not known: "
                "use whence.evaluate.calibrate(scores, truth)"
            )
        chosen = list(examples) if isinstance(examples, Iterable) else [examples]
        effect = self.removal_effect(query, chosen, stage=stage)
        half = float(half_widths(calibration, effect, len(chosen))[self.row_index(query)])
        return effect - half, effect + half

    def with_values(self, values: Floats, **changes: Any) -> Scores:
        """Scores with other values and the same description.

        ``by_segment``, ``by_layer`` and ``spread`` belong to the old values and are left out.

        Args:
            changes: arguments of `Scores` that differ.
        """
        same: dict[str, Any] = {name: getattr(self, name) for name in _METADATA}
        same["query_ids"] = None if self.is_self_influence else self.query_ids
        same |= {"train_ids": self.train_ids, "stage": self.stage}
        return Scores(values, **(same | changes))

    def to_numpy(self) -> Floats:
        """A copy of ``values`` in memory."""
        return np.array(self.values[...])

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self.values[...], dtype=dtype, copy=copy)

    def to_pandas(self) -> Any:
        """A DataFrame with one row per query and one column per training example.

        With stages, columns are (stage, example). Self-influence has one row per training example.
        """
        with optional("to_pandas needs pandas", "pandas"):
            import pandas as pd
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

    def ranking(self, study: Any = None, query: int | None = None, **options: Any) -> Any:
        """A DataFrame of the training examples, the most helpful first, with score, label and text.

        Args:
            study: whose training data has the labels and texts.
            query: whose scores to rank by (default: the mean over all queries).
            options: `duplicates=True` names the example that each nearly duplicates; `classes`,
                `columns`, `tokenizer`: as in `whence.report.write`.
        """
        from whence import report

        return report.ranking(self, study, query, **options)

    def show(self, query: int, **options: Any) -> Any:
        """Show one query with its most helpful and harmful examples, in a notebook or as text.

        The options are those of `whence.report.show`.
        """
        from whence import report

        return report.show(self, query, **options)

    def card(self, query: int, **options: Any) -> Any:
        """Draw one query's story as an SVG picture to share: `scores.card(3).save("card.svg")`.

        The options are those of `whence.report.card`.
        """
        from whence import report

        return report.card(self, query, **options)

    def report(self, path: str | os.PathLike[str], **options: Any) -> Path:
        """Write one HTML file that shows each query with its most helpful and harmful examples.

        The options are those of `whence.report.write`.
        """
        from whence import report

        return report.write(self, path, **options)

    @property
    def call(self) -> str:
        """How the scores were made: 'Source(segments=3)'."""
        return str(self.provenance.get("call") or call_text(self.method, self.settings, {}))

    def describe(self) -> Table:
        """What the scores are about, as a table."""
        if self.is_self_influence:
            size = f"{self.shape[0]} training examples, each on its own measurement"
        else:
            size = f"{self.shape[0]} queries x {self.shape[1]} training examples"
        if self.strongest is not None:
            size += f"; only the top {self._entries} at either end are kept"
        else:
            size += f", {self.values.dtype}"
        share, names = self.left_out
        excluded = f"{share:.1%} of the trained parameters: {listed(names, 3)}"
        excluded = excluded if names else "nothing"
        better = "higher" if self.higher_is_better else "lower"
        facts = [("warning", message) for message in self.warnings] + [
            ("measurement", f"{self.measurement}, {better} is better"),
            ("unit", self.unit),
            ("sign", SIGN),
            ("shape", f"{self.shape}: {size}"),
            ("left out", excluded),
        ]
        if "calibration" in self.diagnostics:
            facts.append(("calibrated", calibrated(self.diagnostics["calibration"])))
        return Table(None, facts, title=f"Scores by {self.call}")

    def __repr__(self) -> str:
        return str(self.describe())

    def _repr_html_(self) -> str:
        return self.describe()._repr_html_()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a folder with the arrays (scores.npy, ...) and, last, scores.json.

        Existing scores in the folder are replaced, one file at a time. This also works for the
        folder from which this object was loaded.
        """
        path = as_path(path)
        make_folder(path)
        entries = {n: save_array(path / f"{n}.npy", a) for n, a in self._arrays().items()}
        self._save_json(path, entries)
        for name in ARRAYS:
            if name not in entries:
                (path / f"{name}.npy").unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Scores:
        """Open scores written by ``save`` or ``attribute(out=...)``. Arrays are memory-mapped.

        Their checksums are verified; those of an array above 64 MiB when a part of it is read.
        """
        path = as_path(path)
        meta = read_description(path)
        with parsing(path / "scores.json", "save the scores again"):
            check_types(meta, method=str, measurement=str, unit=str, higher_is_better=bool)
            check_types(meta, settings=dict, diagnostics=dict, provenance=dict, excluded=list)
            check_types(meta, arrays=dict, stage=(list, type(None)))
            for part in meta["excluded"]:
                check_types({"share": 0.0, "name": ""} | part, share=(int, float), name=str)
            arrays = {
                name: load_array(path / f"{name}.npy", entry)
                for name, entry in meta["arrays"].items()
                if name in ARRAYS
            }
            stage, columns = meta["stage"], len(arrays["train_ids"])
            if stage is not None and sum(count for _, count in stage) != columns:
                raise InvalidInput(f"its stages do not have {columns} examples")
            return cls(
                arrays.get("scores"),
                query_ids=arrays.get("query_ids"),
                train_ids=arrays["train_ids"],
                stage=None
                if stage is None
                else [name for name, count in stage for _ in range(count)],
                by_segment=arrays.get(BY_SEGMENT),
                by_layer=arrays.get(BY_LAYER),
                spread=arrays.get("spread"),
                top=Top(arrays["top_values"], arrays["top_columns"])
                if "top_values" in arrays
                else None,
                calculation=meta["calculation"],
                **{name: meta[name] for name in _METADATA},
            )

    def _arrays(self) -> dict[str, NDArray[Any]]:
        arrays = {
            "scores": self._values,
            BY_SEGMENT: self.by_segment,
            BY_LAYER: self.by_layer,
            "spread": self.spread,
            "top_values": None if self.strongest is None else self.strongest.values,
            "top_columns": None if self.strongest is None else self.strongest.columns,
            "query_ids": None if self.is_self_influence else self.query_ids,
            "train_ids": self.train_ids,
        }
        return {name: array for name, array in arrays.items() if array is not None}

    def _save_json(self, path: Path, arrays: Mapping[str, ArrayEntry]) -> None:
        runs = None
        if self.stage is not None:
            runs = [[name, len(list(same))] for name, same in groupby(self.stage)]
        meta = {
            "schema": SCHEMA,
            "sign": SIGN,
            **{name: getattr(self, name) for name in _METADATA},
            "stage": runs,
            "calculation": self._calculation,
            "arrays": dict(arrays),
        }
        write_json(path / "scores.json", meta)

    @property
    def _entries(self) -> int:
        """Entries per query at either end."""
        return self.shape[-1] if self.strongest is None else self.strongest.kept

    def _ranking(self, query: int | None, k: int, *, highest: bool) -> Ranking:
        row, k = self.row_index(query), _whole("k", k)
        if k < 1:
            raise InvalidInput(f"k={k}: ask for at least one example")
        k = min(k, self.shape[-1])
        if self.strongest is not None:
            if k > self._entries:
                raise InvalidInput(
                    f"k={k}, but only the top {self._entries} of each query were kept: use "
                    f"k<={self._entries}, or attribute with top>={k} or without top="
                )
            values, columns = self._top_row(row, 0 if highest else 1)
            values, columns = values[:k], columns[:k]
        else:
            scores = self._row(row)
            if np.isnan(scores).any():
                raise InvalidInput(
                    f"query {row} has {int(np.isnan(scores).sum())} scores that are not numbers: "
                    "they cannot be ranked"
                )
            columns = np.argsort(-scores if highest else scores, kind="stable")[:k]
            values = scores[columns]
        return Ranking(
            Entry(int(self.train_ids[c]), float(v), None if self.stage is None else self.stage[c])
            for v, c in zip(values, columns, strict=True)
        )

    def _row(self, row: int) -> Floats:
        """The scores of a query, (n,). Only their part of a mapped array is read."""
        return np.asarray(self.values[...] if self.is_self_influence else self.values[row])

    def _top_row(self, row: int, end: int) -> tuple[Floats, Ints]:
        """The kept values of a query at one end (0 has the highest), and their columns, (k,)."""
        top = self.strongest
        assert top is not None
        values, columns = np.atleast_2d(top.values[end]), np.atleast_2d(top.columns[end])
        return values[row], columns[row]

    @cached_property
    def _by_id(self) -> Ints:
        return np.argsort(self.train_ids, kind="stable")

    def _columns(self, examples: int | Iterable[int], stage: str | None) -> Ints:
        """Columns of training ids."""
        given = np.asarray(list(examples) if isinstance(examples, Iterable) else [examples])
        if given.size == 0:
            return np.empty(0, np.int64)
        if given.dtype.kind not in "iu" or given.ndim != 1:
            raise InvalidInput(
                f"examples must be training ids (a list of integers), not {given.dtype} of shape "
                f"{given.shape}; for a mask use scores.train_ids[mask]"
            )
        unique, counts = np.unique(given, return_counts=True)
        if len(unique) != len(given):
            raise InvalidInput(
                f"examples names {listed(unique[counts > 1])} more than once: give each id once"
            )
        order = self._by_id
        if stage is not None:
            if self.stage is None or stage not in self.stage:
                known = "none" if self.stage is None else ", ".join(dict.fromkeys(self.stage))
                raise InvalidInput(f"stage={stage!r}, but the stages of these scores are: {known}")
            order = order[np.array(self.stage)[order] == stage]
        ordered = self.train_ids[order]
        first, end = np.searchsorted(ordered, given), np.searchsorted(ordered, given, "right")
        if (first == end).any():
            where = "" if stage is None else f" of stage {stage!r}"
            raise InvalidInput(
                f"examples names {listed(given[first == end])}, not among the {len(ordered)} "
                f"training ids{where} ({ordered[0]}..{ordered[-1]}): see scores.train_ids"
            )
        if (end - first > 1).any():
            raise InvalidInput(
                f"training id {listed(given[end - first > 1])} occurs in several stages: "
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


def _whole(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidType(f"{name}={value!r} must be a whole number") from None


def read_description(folder: Path) -> dict[str, Any]:
    """The scores.json of a folder."""
    file = folder / "scores.json"
    if not file.is_file():
        if (folder / "progress.json").is_file():
            raise InvalidInput(
                f"the scores in {folder} are not finished: make the same attribute(out=...) call "
                "again to resume"
            )
        what = "has no scores.json" if folder.is_dir() else "does not exist"
        raise MissingFile(f"{folder} {what}: give a folder that Scores.save wrote")
    return read_json(file, schema=SCHEMA)


def _shape(values: Floats | None, top: Top | None, train_ids: ArrayLike | None) -> tuple[int, ...]:
    """(q, n), or (n,) for self-influence, also where only the top is kept."""
    if values is not None and top is None:
        if values.ndim not in (1, 2) or 0 in values.shape:
            raise InvalidInput(
                f"values has shape {values.shape}: give (q, n), or (n,) for self-influence"
            )
        return values.shape
    if values is not None or top is None:
        raise InvalidInput("Scores need either values or top: give exactly one of them")
    if train_ids is None:
        raise InvalidInput("top without train_ids: the number of examples is not known")
    if top.values.shape != top.columns.shape or top.values.ndim not in (2, 3):
        raise InvalidInput(
            f"top.values {top.values.shape} and top.columns {top.columns.shape}: "
            "both must be (2, q, k), or (2, k) for self-influence"
        )
    return (*top.values.shape[1:-1], np.size(np.asarray(train_ids)))


def _ids(name: str, given: ArrayLike | None, count: int) -> Ints:
    ids = np.arange(count) if given is None else np.asarray(given)
    if ids.shape != (count,) or ids.dtype.kind not in "iu":
        raise InvalidInput(
            f"{name} is {ids.dtype} of shape {ids.shape}: give {count} integers, one per score"
        )
    return ids.astype(np.int64, copy=False)


def _plain(name: str, given: object) -> Any:
    """``given`` after conversion to JSON and back."""

    def convert(item: object) -> object:
        if isinstance(item, np.generic | np.ndarray):
            return item.tolist()
        if isinstance(item, os.PathLike):
            return os.fspath(item)
        raise InvalidType(f"{type(item).__name__} in {name} cannot be written as JSON")

    return json.loads(json.dumps(given, default=convert))
