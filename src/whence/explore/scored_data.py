"""Scores by name, the data they are about, and lists of both.

Every training example of any scores has one place, 0 .. N-1, ordered by stage and id. Places map to
the columns of each scores. Axes: ``N`` places, ``n`` columns of one scores, ``q`` queries.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from whence.errors import InvalidInput, InvalidType
from whence.explore.reading import (
    REQUEST_SECONDS,
    Floats,
    Index,
    Ints,
    Mean,
    PredictionWorker,
    SharedExamples,
)
from whence.present.check import check_data
from whence.present.examples import QUERY_SIZE
from whence.present.predict import curves, predictions
from whence.present.ranking import score_column
from whence.present.views import (
    TrainingExamples,
    describe_query,
    direction,
    number,
    prediction_view,
    strongest,
)
from whence.scores import Scores
from whence.study import Study

Sign = Literal["helpful", "harmful", ""]
Given = Scores | Mapping[str, Scores] | str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

PAGE = 200  # entries in one answer, at most
MAX_TICKED = 5000  # examples in one request, at most
RENDERED = 4096  # rendered examples in the cache


class Refused(InvalidInput):
    """A request that cannot be answered. The message says why."""


class ScoredData:
    """Scores by name and their data.

    Args:
        scores: of the same queries; and self-influence, which has none.
        train: the training data, or `{stage: dataset}`; None shows numbers only.
        query: the queries; None shows numbers only.
        study: provides `train`, `collate`, and the model's predictions.
        labels: of the training examples, or `{stage: labels}`, instead of those in the data.
        check: False compares only the number of examples with the scores.
        looks: `renderer`, `classes`, `columns`, `tokenizer` of `whence.present.examples.Examples`.

    Attributes:
        ids, stage_of: of each training example, by place, (N,).
        places: by name of scores, (n,) the place of each column.
        columns: by name of scores, (N,) the column of each place; -1 where they have none.
    """

    def __init__(
        self,
        scores: Mapping[str, Scores],
        *,
        train: Any = None,
        query: Any = None,
        study: Study | None = None,
        labels: Any = None,
        check: bool = True,
        **looks: Any,
    ) -> None:
        if not scores:
            raise InvalidInput("no scores: give at least one, such as {'SOURCE': scores}")
        self.sets = {name: s for name, s in scores.items() if not s.is_self_influence}
        self.self_influence = {name: s for name, s in scores.items() if s.is_self_influence}
        self.everything = dict(scores)
        check_same(self.sets)
        train = study.train if train is None and study is not None else train
        collate = None if study is None else study.collate
        self.unchecked: list[str] = []
        for name, scored in scores.items():
            asked = None if scored.is_self_influence else query
            try:
                notes = check_data(scored, train, asked, collate=collate, contents=check)
            except ValueError as error:
                raise InvalidInput(f"{name}: {error}") from error
            self.unchecked += [f"{name}: {line}" for line in notes]
        self._lay_out()
        named = [name or None for name in self.stages]
        self.examples = TrainingExamples(
            self.ids,
            [named[k] for k in self.stage_of],
            {name: _of_stage(train, name) for name in named},
            study,
            kind=SharedExamples,
            labels=labels,
            **looks,
        )
        self.query = SharedExamples(query, size=QUERY_SIZE, **looks)
        self.study = study
        self.renders_html = looks.get("renderer") is not None
        self.query_predictions: dict[int, dict[str, Any]] = {}  # by row, once computed
        self.measured: Floats | None = None  # (q,)
        self.wrong: NDArray[np.bool_] | None = None  # (q,)
        self.lead: Floats | None = None  # (q,) of `predictions`, negative where they are wrong
        self._curves: tuple[list[int], Floats] | None = None  # updates, and (updates, q)
        self._worker = PredictionWorker(self._predict)
        self._indices = {name: Index(examples) for name, examples in self.examples.by_stage.items()}
        self._query_index = Index(self.query)
        self.stop = threading.Event()  # stops reading
        self.is_read = False
        self._means = {name: Mean(s) for name, s in self.sets.items() if s.strongest is None}
        self._render = lru_cache(RENDERED)(self.examples.render)

    def read(self) -> None:
        """Read each query and training example once, for searching, and predict the queries."""
        try:
            self._query_index.build(self.stop)
            self._predict_queries()
            for index in self._indices.values():
                index.build(self.stop)
        finally:
            self.is_read = True

    def close(self) -> None:
        self.stop.set()
        self._worker.close()

    def _predict_queries(self) -> None:
        if self.study is None or self.query.dataset is None or not self.sets:
            return
        ids = next(iter(self.sets.values())).query_ids
        try:
            outputs = predictions(self.study, self.query.dataset, ids.tolist())
            if any(scores.by_segment is not None for scores in self.sets.values()):
                self._curves = curves(self.study, self.query.dataset, ids.tolist())
        except Exception as error:  # a user's model may raise anything; scores need no model
            self._note_prediction_failure("queries", error)
            return
        views = [prediction_view(outputs[int(k)], self.query) for k in ids]
        labels = [self.query.label(int(k)) for k in ids]
        self.measured = np.array([outputs[int(k)]["measurement"] for k in ids])
        if all(view["comparable"] for view in views):
            self.wrong = np.array(
                [
                    label is not None and label != view["prediction"]
                    for label, view in zip(labels, views, strict=True)
                ]
            )
            leads = [outputs[int(k)]["output"].get("lead", np.nan) for k in ids]
            self.lead = np.array(leads)
        self.query_predictions = {row: outputs[int(k)] for row, k in enumerate(ids)}

    def _note_prediction_failure(self, what: str, error: Exception) -> None:
        note = f"Predictions for {what} are not shown: {error!r}"
        if note not in self.unchecked:
            self.unchecked.append(note)

    def _lay_out(self) -> None:
        """Give each training example its place."""
        self.stages: list[str] = []  # "" where scores name none
        for scores in self.everything.values():
            for name in dict.fromkeys(scores.stage or [""]):
                if name not in self.stages:
                    self.stages.append(name)
        if "" in self.stages and len(self.stages) > 1:
            raise InvalidInput(
                f"some scores name the stages {self.stages}, others none: give scores of one study"
            )
        codes = {name: k for k, name in enumerate(self.stages)}
        keys = {}
        for name, scores in self.everything.items():
            stage = np.zeros(scores.shape[-1], np.int64)
            if scores.stage is not None:
                stage = np.array([codes[s] for s in scores.stage])
            keys[name] = (stage << 48) + scores.train_ids
            if scores.train_ids.min() < 0 or len(np.unique(keys[name])) < len(keys[name]):
                raise InvalidInput(f"{name}: its train_ids are negative or not unique")
        all_keys = np.unique(np.concatenate(list(keys.values())))
        self.ids: Ints = all_keys & ((1 << 48) - 1)
        self.stage_of: Ints = all_keys >> 48
        self.places = {name: np.searchsorted(all_keys, columns) for name, columns in keys.items()}
        self.columns: dict[str, Ints] = {}
        for name, places in self.places.items():
            self.columns[name] = np.full(len(all_keys), -1, np.int64)
            self.columns[name][places] = np.arange(len(places))

    # -- numbers ---------------------------------------------------------------------------------

    def scores(self, name: str) -> Scores:
        if name not in self.everything:
            raise Refused(f"there are no scores {name!r}: choose from {', '.join(self.everything)}")
        return self.everything[name]

    def of_queries(self, name: str) -> Scores:
        scores = self.scores(name)
        if scores.is_self_influence:
            raise Refused(f"{name} is self-influence, which has no queries: choose other scores")
        return scores

    def row(self, name: str, row: int) -> int:
        count = self.of_queries(name).shape[0]
        if not 0 <= row < count:
            raise Refused(f"query {row} is out of range: use 0..{count - 1}")
        return row

    def values(self, name: str, row: int) -> Floats:
        """(N,) a query's scores by place; NaN where they are missing or were not kept."""
        scores, row = self.of_queries(name), self.row(name, row)
        return self._by_place(name, np.asarray(score_column(scores, row), np.float64))

    def help(self, name: str, row: int) -> Floats:
        """``values``, signed so that positive is better for the query."""
        return direction(self.scores(name)) * self.values(name, row)

    def mean_help(self, name: str, seconds: float = REQUEST_SECONDS) -> Floats | None:
        """(N,) mean over the queries of their finite help; None where only the top was kept.

        Raises Busy if it takes longer than `seconds`. The next call continues.
        """
        scores = self.of_queries(name)
        if scores.strongest is not None:
            return None
        return self._by_place(name, direction(scores) * self._means[name].advance(seconds))

    def suspicion(self, name: str) -> tuple[Floats, str]:
        """(N,) the suspicion of each training example as in `whence.evaluate.mislabeled`, and its
        meaning."""
        scores = self.scores(name)
        if not scores.is_self_influence:
            harm = self.mean_help(name)
            if harm is None:
                raise Refused(
                    f"{name} keeps only each query's top: the mean harm of an example is unknown. "
                    "Attribute with query=None (self-influence), or without top="
                )
            return -harm, "mean harm to the queries"
        meaning = f"the influence of an example on its own {scores.measurement}"
        values = np.asarray(score_column(scores, None), np.float64)
        return self._by_place(name, direction(scores) * values), meaning

    def _by_place(self, name: str, values: Floats) -> Floats:
        placed = np.full(len(self.ids), np.nan)
        placed[self.places[name]] = values
        return placed

    # -- examples --------------------------------------------------------------------------------

    def example(self, place: int) -> dict[str, Any]:
        """A training example, with its place and stage."""
        return self._render(int(place)) | {"place": int(place)}

    def predictions(self, places: Sequence[int]) -> tuple[dict[int, dict[str, Any]], bool]:
        """The model's predictions for training examples, for classification only.

        Returns:
            `prediction` and `comparable` by place, and whether more are coming.
        """
        if self.wrong is None:
            return {}, not self.is_read and self.study is not None
        known = self._worker.predictions(places)
        return known, self._worker.waiting(places)

    def _predict(self, places: Sequence[int]) -> dict[int, dict[str, Any]]:
        assert self.study is not None
        known: dict[int, dict[str, Any]] = {}
        for stage in {self.examples.stage(p) for p in places}:
            of_stage = [p for p in places if self.examples.stage(p) == stage]
            try:
                known |= self.examples.predictions(self.study, of_stage)
            except Exception as error:  # a user's model may raise anything
                self._note_prediction_failure("training examples", error)
        return known

    def chosen(self, places: Sequence[int] | Ints) -> Ints:
        """The places of a request, each once and in order, checked."""
        if len(places) > MAX_TICKED:
            raise Refused(f"{len(places)} examples are ticked: tick at most {MAX_TICKED}")
        unique = np.unique(np.asarray(places, np.int64))
        if len(unique) and not (unique[0] >= 0 and unique[-1] < len(self.ids)):
            wrong = int(unique[-1] if unique[-1] >= len(self.ids) else unique[0])
            raise Refused(f"place {wrong} is out of range: use 0..{len(self.ids) - 1}")
        return unique

    def find(self, text: str = "", label: str = "", stage: str = "") -> NDArray[np.bool_]:
        """(N,) which training examples match."""
        matching = np.ones(len(self.ids), dtype=bool)
        if stage:
            if stage not in self.stages:
                raise Refused(f"there is no stage {stage!r}: choose from {', '.join(self.stages)}")
            matching &= self.stage_of == self.stages.index(stage)
        if text or label:
            for name, index in self._indices.items():
                at = np.flatnonzero(matching & (self.stage_of == self.stages.index(name or "")))
                matching[at] = index.matches(self.ids[at], text, label)
        return matching

    @property
    def reading(self) -> dict[str, int] | None:
        """The progress of reading; None when it is done."""
        indices = [self._query_index, *self._indices.values()]
        done, total = sum(len(i.labels) for i in indices), sum(len(i.examples) for i in indices)
        return None if self.is_read else {"done": done, "of": total}

    def labels(self) -> list[str]:
        """The most frequent classes of the training examples, at most a hundred, in order."""
        counts: dict[str, int] = {}
        for index in self._indices.values():
            if not index.examples.names_classes:
                continue
            for label in index.labels:
                counts[label] = counts.get(label, 0) + 1
        counts.pop("", None)
        frequent = sorted(counts, key=lambda name: (-counts[name], name))[:100]
        return sorted(
            frequent, key=lambda name: (len(name), name) if name.isdecimal() else (0, name)
        )

    # -- lists -----------------------------------------------------------------------------------

    def list_examples(
        self,
        scores: str,
        row: int | None = None,
        sign: Sign = "",
        order: str = "helpful",
        offset: int = 0,
        limit: int = 50,
        text: str = "",
        label: str = "",
        stage: str = "",
    ) -> dict[str, Any]:
        """Training examples that `find` matches, with their score for one query, or the mean."""
        explained = self.of_queries(scores)
        if row is None:
            means = self.mean_help(scores)
            help_ = np.full(len(self.ids), np.nan) if means is None else means
        else:
            help_ = self.help(scores, row)
        wanted = self.find(text, label, stage)
        if sign:
            with np.errstate(invalid="ignore"):
                wanted &= help_ > 0 if sign == "helpful" else help_ < 0
        places = np.flatnonzero(wanted)
        ranked = {"helpful": -help_, "harmful": help_, "strongest": -np.abs(help_)}.get(order)
        if ranked is None and order != "number":
            raise Refused(f"order={order!r}: use helpful, harmful, strongest or number")
        start, stop = page(offset, limit, len(places))
        listed = (
            places[start:stop] if ranked is None else first(ranked[places], start, stop, places)
        )
        return {
            "total": len(places),
            "offset": start,
            "of": len(self.ids),
            "unit": explained.unit,
            "items": [
                {
                    "example": self.example(p),
                    "value": number(direction(explained) * help_[p]),
                    "helps": None if not np.isfinite(help_[p]) else bool(help_[p] > 0),
                }
                for p in listed
            ],
            "unknown": int(np.isnan(help_[places]).sum()),
        }

    def list_queries(
        self,
        *,
        text: str = "",
        label: str = "",
        wrong: bool = False,
        order: str = "number",
        offset: int = 0,
        limit: int = 50,
    ) -> dict[str, Any]:
        """Matching queries, with the model's predictions."""
        if not self.sets:
            return {"total": 0, "offset": 0, "of": 0, "items": []}
        scores = next(iter(self.sets.values()))
        matching = np.ones(scores.shape[0], dtype=bool)
        if text or label:
            matching &= self._query_index.matches(scores.query_ids, text, label)
        if wrong:
            if self.wrong is None:
                raise Refused(
                    "whether a prediction is wrong is unknown (so far): this needs study= and "
                    "query= of a classification"
                )
            matching &= self.wrong
        rows = np.flatnonzero(matching)
        measured = self.measured
        if order == "worst" and measured is not None:
            rows = rows[np.argsort(direction(scores) * measured[rows], kind="stable")]
        start, stop = page(offset, limit, len(rows))
        return {
            "total": len(rows),
            "offset": start,
            "of": int(scores.shape[0]),
            "items": [self.query_item(int(r)) for r in rows[start:stop]],
        }

    def strongest_for(self, name: str, place: int, count: int = 12) -> dict[str, list[Any]]:
        """The queries that a training example helped and harmed most, as [row, value]."""
        scores, column = self.of_queries(name), int(self.columns[name][place])
        if column < 0:
            return {"helped": [], "harmed": []}
        values = in_columns(scores, np.array([column]))[:, 0]
        rows = np.flatnonzero(np.isfinite(values))
        help_ = direction(scores) * values[rows]
        queries = {}
        for end, sign in (("helped", 1.0), ("harmed", -1.0)):
            order = strongest(sign * help_, count)
            order = order[sign * help_[order] > 0]
            queries[end] = [[int(rows[k]), number(values[rows[k]])] for k in order]
        return queries

    @property
    def train_unknown(self) -> bool:
        """Whether the training data was not given."""
        return any(examples.dataset is None for examples in self.examples.by_stage.values())

    def query_class(self, row: int) -> str | None:
        """The label of a query, if it names a class."""
        scores = next(iter(self.sets.values()))
        label = self.query.label if self.query.names_classes else (lambda _: None)
        return label(int(scores.query_ids[row]))

    def query_item(self, row: int) -> dict[str, Any]:
        """A query in brief."""
        scores = next(iter(self.sets.values()))
        view = {"row": row, "id": int(scores.query_ids[row])}
        wrong = None if self.wrong is None else bool(self.wrong[row])
        return describe_query(view, self.query, self.query_predictions.get(row)) | {"wrong": wrong}

    def curve(self, row: int) -> list[list[float | None]] | None:
        """[update, measurement] pairs of a query; None until they are computed."""
        if self._curves is None:
            return None
        steps, measured = self._curves
        return [[step, number(x)] for step, x in zip(steps, measured[:, row], strict=True)]


# -- plain functions -----------------------------------------------------------------------------


def page(offset: int, limit: int, total: int) -> tuple[int, int]:
    start = max(0, min(int(offset), total))
    return start, min(total, start + max(1, min(int(limit), PAGE)))


def first(keys: Floats, start: int, stop: int, places: Ints) -> Ints:
    """``places[start:stop]`` in the order of ``keys``, ties to the first; NaN last."""
    return places[strongest(np.where(np.isnan(keys), -np.inf, -keys), stop)[start:]]


def in_columns(scores: Scores, columns: Ints) -> Floats:
    """(q, m) the scores in these columns; NaN where they were not kept."""
    if scores.strongest is None:
        return np.asarray(scores.values[:, columns], np.float64)
    result = np.full((scores.shape[0], len(columns)), np.nan)
    for row in range(len(result)):
        values, top_columns = scores.row_scores(row)  # by column
        where = np.searchsorted(top_columns, columns)
        in_top = np.append(top_columns, -1)[where] == columns
        result[row, in_top] = values[where[in_top]]
    return result


def check_same(sets: Mapping[str, Scores]) -> None:
    """Raise for scores of different queries, which cannot be compared."""
    known = list(sets.items())
    for name, scores in known[1:]:
        before, reference = known[0]
        why = None
        if scores.shape[0] != reference.shape[0]:
            why = f"{reference.shape[0]} and {scores.shape[0]} queries"
        elif not np.array_equal(scores.query_ids, reference.query_ids):
            why = "other query ids"
        else:
            ours, theirs = (s.provenance.get("query") for s in (scores, reference))
            if ours and theirs and ours != theirs:
                why = "other query data, or the same in another order"
        if why is not None:
            raise InvalidInput(
                f"{before} and {name} are scores of different queries ({why}): they cannot be "
                "compared. Attribute the same queries with both, or explore one at a time"
            )


def open_scores(given: Given) -> dict[str, Scores]:
    """Scores by name. Folders are opened, and named by the last part of their path."""
    if isinstance(given, Scores):
        return {given.method: given}
    if isinstance(given, str | os.PathLike):
        given = [given]
    if isinstance(given, Mapping):
        wrong = [name for name, s in given.items() if not isinstance(s, Scores)]
        if wrong:
            raise InvalidType(f"{wrong[0]} is a {type(given[wrong[0]]).__name__}: give Scores")
        return {str(name): scores for name, scores in given.items()}
    opened: dict[str, Scores] = {}
    for path in map(Path, given):
        parts = path.resolve().parts
        # as many parts of the path as needed to make it unique
        name = next(
            (tried for k in range(1, len(parts)) if (tried := "/".join(parts[-k:])) not in opened),
            str(path),
        )
        opened[name] = Scores.load(path)
    return opened


def _of_stage(given: Any, stage: str | None) -> Any:
    if not isinstance(given, Mapping):
        return given
    return next(iter(given.values())) if stage is None else given[stage]
