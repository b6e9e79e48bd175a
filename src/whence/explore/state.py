"""What is explored: scores by name, the data they are about, and lists of it.

Every training example that some scores are about has one place, 0 .. N-1, ordered by stage and id;
each scores' own columns are found from there. Axes: ``N`` places, ``n`` columns of one scores,
``q`` queries.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from whence.explore.reading import (
    WORK,
    Floats,
    Index,
    Ints,
    Mean,
    SharedExamples,
    Teller,
    words,
)
from whence.present.check import check_data
from whence.present.predict import predictions
from whence.present.views import described, histogram, number, said, strongest
from whence.report.page import QUERY_SIZE
from whence.scores import Scores
from whence.study import Study

Sign = Literal["helpful", "harmful", ""]
Given = Scores | Mapping[str, Scores] | str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

PAGE = 200  # entries in one answer, at most
RENDERED = 4096  # examples whose pictures are kept


class Refused(ValueError):
    """What was asked for cannot be: its message says why."""


class Explored:
    """Scores by name and their data.

    Args:
        scores: of the same queries; and self-influence, which has none.
        train: the training data, or `{stage: dataset}`; None shows numbers only.
        query: the queries; None likewise.
        study: gives `train` and `collate`, and what the model predicts.
        labels: of the training examples, or `{stage: labels}`, in place of those in the data.
        renderer, classes, columns, tokenizer: as in `whence.present.examples.Examples`.
        check: False compares only the lengths of the data with the scores'.
    """

    def __init__(
        self,
        scores: Mapping[str, Scores],
        *,
        train: Any = None,
        query: Any = None,
        study: Study | None = None,
        labels: Any = None,
        renderer: Callable[[Any], Any] | None = None,
        classes: Any = None,
        columns: Sequence[str] | None = None,
        tokenizer: Any = None,
        check: bool = True,
    ) -> None:
        if not scores:
            raise ValueError("no scores: give at least one, such as {'SOURCE': scores}")
        self.sets = {name: s for name, s in scores.items() if not s.is_self_influence}
        self.own = {name: s for name, s in scores.items() if s.is_self_influence}
        self.everything = dict(scores)
        check_same(self.sets)
        train = study.train if train is None and study is not None else train
        collate = None if study is None else study.collate
        self.unchecked: list[str] = []
        for name, one in scores.items():
            asked = None if one.is_self_influence else query
            try:
                found = check_data(one, train, asked, collate=collate, contents=check)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            self.unchecked += [f"{name}: {line}" for line in found]
        looks: dict[str, Any] = {
            "renderer": renderer,
            "classes": classes,
            "columns": columns,
            "tokenizer": tokenizer,
        }
        self._lay_out()
        named = [None if name == "" else name for name in self.stages]
        self.train = {
            name: SharedExamples(_of_stage(train, name), labels=_of_stage(labels, name), **looks)
            for name in named
        }
        self.query = SharedExamples(query, size=QUERY_SIZE, **looks)
        self.study = study
        self.renders_html = renderer is not None
        self.answers: dict[int, dict[str, Any]] = {}  # by row, once they are read
        self.measured: Floats | None = None  # (q,)
        self.wrong: NDArray[np.bool_] | None = None  # (q,)
        self._teller = Teller(self._say)
        self._indices = {name: Index(examples) for name, examples in self.train.items()}
        self._query_index = Index(self.query)
        self.stop = threading.Event()  # ends reading
        self.is_read = False
        self._means = {name: Mean(s) for name, s in self.sets.items() if s.top is None}
        self._render = lru_cache(RENDERED)(self._rendered)

    def read(self) -> None:
        """Read every query and training example once, to search in; ask the model about queries."""
        try:
            self._query_index.build(self.stop)
            self._ask()
            for index in self._indices.values():
                index.build(self.stop)
        finally:
            self.is_read = True

    def close(self) -> None:
        self.stop.set()
        self._teller.close()

    def _ask(self) -> None:
        """What the model says of the queries."""
        if self.study is None or self.query.dataset is None or not self.sets:
            return
        ids = next(iter(self.sets.values())).query_ids
        try:
            found = predictions(self.study, self.query.dataset, ids.tolist())
        except Exception as error:  # a user's model may raise anything; the scores are there still
            self._untold("queries", error)
            return
        told = [said(found[int(k)], self.query) for k in ids]
        labels = [self.query.label(int(k)) for k in ids]
        self.measured = np.array([found[int(k)]["measurement"] for k in ids])
        if all(view["comparable"] for view in told):
            self.wrong = np.array(
                [
                    label is not None and label != view["prediction"]
                    for label, view in zip(labels, told, strict=True)
                ]
            )
        self.answers = {row: found[int(k)] for row, k in enumerate(ids)}

    def _untold(self, what: str, error: Exception) -> None:
        note = f"What the model predicts of {what} is not shown: {error!r}"
        if note not in self.unchecked:
            self.unchecked.append(note)

    def _lay_out(self) -> None:
        """Give every training example its place."""
        self.stages: list[str] = []  # "" where scores name none
        for scores in self.everything.values():
            for name in dict.fromkeys(scores.stage or [""]):
                if name not in self.stages:
                    self.stages.append(name)
        if "" in self.stages and len(self.stages) > 1:
            raise ValueError(
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
                raise ValueError(f"{name}: its train_ids are negative, or name an example twice")
        every = np.unique(np.concatenate(list(keys.values())))
        self.ids: Ints = every & ((1 << 48) - 1)
        self.stage_of: Ints = every >> 48
        self._places = {name: np.searchsorted(every, own) for name, own in keys.items()}
        self._columns: dict[str, Ints] = {}
        for name, places in self._places.items():
            self._columns[name] = np.full(len(every), -1, np.int64)
            self._columns[name][places] = np.arange(len(places))

    # -- numbers ---------------------------------------------------------------------------------

    def scores(self, name: str) -> Scores:
        if name not in self.everything:
            raise Refused(f"there are no scores {name!r}: there are {', '.join(self.everything)}")
        return self.everything[name]

    def of_queries(self, name: str) -> Scores:
        scores = self.scores(name)
        if scores.is_self_influence:
            raise Refused(f"{name} is self-influence, which has no queries: choose other scores")
        return scores

    def row(self, name: str, row: int) -> int:
        count = self.of_queries(name).shape[0]
        if not 0 <= row < count:
            raise Refused(f"query {row} is out of range: there are 0..{count - 1}")
        return row

    def columns(self, name: str) -> Ints:
        """(N,) the column of every place in these scores; -1 where they have none."""
        self.scores(name)
        return self._columns[name]

    def places(self, name: str) -> Ints:
        """(n,) the place of every column of these scores."""
        self.scores(name)
        return self._places[name]

    def values(self, name: str, row: int) -> Floats:
        """(N,) a query's scores by place; NaN where there are none, or they were not kept."""
        scores, row = self.of_queries(name), self.row(name, row)
        if scores.top is None:
            own = np.asarray(scores.values[row], np.float64)
        else:
            own = np.full(scores.shape[-1], np.nan)
            top = scores.top
            own[top.columns[:, row].ravel()] = top.values[:, row].ravel()
        return self._placed(name, own)

    def help(self, name: str, row: int) -> Floats:
        """``values``, with what is better for the query counted as positive."""
        return direction(self.scores(name)) * self.values(name, row)

    def mean_help(self, name: str, seconds: float = WORK) -> Floats | None:
        """(N,) mean help to the queries, of what is finite; None where only the top was kept.

        Raises Busy if it takes longer than so many seconds; asked again, it goes on.
        """
        scores = self.of_queries(name)
        if scores.top is not None:
            return None
        return self._placed(name, direction(scores) * self._means[name].go_on(seconds))

    def suspicion(self, name: str) -> tuple[Floats, str]:
        """(N,) how suspicious each training example is, and what that means (as
        `whence.evaluate.mislabeled` has it)."""
        scores = self.scores(name)
        if not scores.is_self_influence:
            harm = self.mean_help(name)
            if harm is None:
                raise Refused(
                    f"{name} keeps only each query's top: the mean harm of an example is not "
                    "known. Attribute with query=None (self-influence), or without top="
                )
            return -harm, "mean harm to the queries"
        if scores.top is None:
            own = np.asarray(scores.values, np.float64)
        else:
            own = np.full(scores.shape[0], np.nan)
            own[scores.top.columns.ravel()] = scores.top.values.ravel()
        meaning = f"what an example does for its own {scores.measurement}"
        return self._placed(name, direction(scores) * own), meaning

    def _placed(self, name: str, own: Floats) -> Floats:
        found = np.full(len(self.ids), np.nan)
        found[self._places[name]] = own
        return found

    # -- examples --------------------------------------------------------------------------------

    def stage_name(self, place: int) -> str | None:
        return self.stages[self.stage_of[place]] or None

    def example(self, place: int) -> dict[str, Any]:
        """A training example, with its place and stage."""
        return self._render(int(place))

    def _rendered(self, place: int) -> dict[str, Any]:
        stage, number = self.stage_name(place), int(self.ids[place])
        return self.train[stage].render(number) | {"place": place, "stage": stage}

    def told(self, places: Sequence[int]) -> tuple[dict[int, dict[str, Any]], bool]:
        """What the model says of training examples: `prediction` and `comparable`, by place; and
        whether more of it is to come. Only of a classification there is something to say."""
        if self.wrong is None:
            return {}, not self.is_read and self.study is not None
        found = self._teller.told(places)
        return found, self._teller.waiting(places)

    def _say(self, places: Sequence[int]) -> dict[int, dict[str, Any]]:
        assert self.study is not None
        found = {}
        for stage in {self.stage_name(p) for p in places}:
            examples, own = self.train[stage], [p for p in places if self.stage_name(p) == stage]
            if examples.dataset is None:
                continue
            whose = stage if stage in self.study.stages else self.study.stages[-1]
            ids = [int(self.ids[p]) for p in own]
            try:
                says = predictions(self.study, examples.dataset, ids, stage=whose)
            except Exception as error:  # a user's model may raise anything
                self._untold("training examples", error)
                continue
            for place in own:
                view = said(says[int(self.ids[place])], examples)
                found[place] = {k: view[k] for k in ("prediction", "comparable")}
        return found

    def label(self, place: int) -> str | None:
        return self.train[self.stage_name(place)].label(int(self.ids[place]))

    def in_words(self, place: int) -> tuple[str, str]:
        """The label and the text of a training example; no picture is made for it."""
        index, number_ = self._indices[self.stage_name(place)], int(self.ids[place])
        if index.wordless:
            return index.examples.label(number_) or "", ""
        shown = index.examples.render(number_)
        return shown["label"] or "", words(shown)

    def chosen(self, places: Sequence[int] | Ints) -> Ints:
        """Places that were asked for, checked."""
        found = np.unique(np.asarray(places, np.int64))
        if len(found) and not (found[0] >= 0 and found[-1] < len(self.ids)):
            wrong = int(found[-1] if found[-1] >= len(self.ids) else found[0])
            raise Refused(f"place {wrong} is out of range: there are 0..{len(self.ids) - 1}")
        return found

    def find(self, text: str = "", label: str = "", stage: str = "") -> NDArray[np.bool_]:
        """(N,) which training examples match."""
        found = np.ones(len(self.ids), dtype=bool)
        if stage:
            if stage not in self.stages:
                raise Refused(f"there is no stage {stage!r}: there are {', '.join(self.stages)}")
            found &= self.stage_of == self.stages.index(stage)
        if text or label:
            for name, index in self._indices.items():
                here = np.flatnonzero(found & (self.stage_of == self.stages.index(name or "")))
                found[here] = index.matches(self.ids[here], text, label)
        return found

    @property
    def reading(self) -> dict[str, int] | None:
        """How far reading is; None when it is done."""
        every = [self._query_index, *self._indices.values()]
        done, total = sum(len(i.labels) for i in every), sum(len(i.examples) for i in every)
        return None if self.is_read else {"done": done, "of": total}

    def labels(self) -> list[str]:
        """The labels of the training examples, the most frequent first (at most a hundred)."""
        counts: dict[str, int] = {}
        for index in self._indices.values():
            for label in index.labels:
                counts[label] = counts.get(label, 0) + 1
        counts.pop("", None)
        kept = sorted(counts, key=lambda name: (-counts[name], name))[:100]
        return sorted(kept, key=lambda name: (len(name), name) if name.isdecimal() else (0, name))

    # -- lists -----------------------------------------------------------------------------------

    def list_examples(
        self,
        name: str,
        row: int | None = None,
        *,
        text: str = "",
        label: str = "",
        stage: str = "",
        sign: Sign = "",
        order: str = "helpful",
        offset: int = 0,
        limit: int = 50,
    ) -> dict[str, Any]:
        """Training examples that match, with their score for one query, or their mean over all."""
        scores = self.of_queries(name)
        if row is None:
            means = self.mean_help(name)
            help_ = np.full(len(self.ids), np.nan) if means is None else means
        else:
            help_ = self.help(name, row)
        found = self.find(text, label, stage)
        if sign:
            with np.errstate(invalid="ignore"):
                found &= help_ > 0 if sign == "helpful" else help_ < 0
        places = np.flatnonzero(found)
        ranked = {"helpful": -help_, "harmful": help_, "strongest": -np.abs(help_)}.get(order)
        if ranked is None and order != "number":
            raise Refused(f"order={order!r}: use helpful, harmful, strongest or number")
        start, stop = page(offset, limit, len(places))
        shown = places[start:stop] if ranked is None else first(ranked[places], start, stop, places)
        return {
            "total": len(places),
            "offset": start,
            "of": len(self.ids),
            "unit": scores.unit,
            "items": [
                {
                    "example": self.example(p),
                    "value": number(direction(scores) * help_[p]),
                    "helps": None if not np.isfinite(help_[p]) else bool(help_[p] > 0),
                }
                for p in shown
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
        """Queries that match, with what the model says to them."""
        if not self.sets:
            return {"total": 0, "offset": 0, "of": 0, "items": []}
        scores = next(iter(self.sets.values()))
        found = np.ones(scores.shape[0], dtype=bool)
        if text or label:
            found &= self._query_index.matches(scores.query_ids, text, label)
        if wrong:
            if self.wrong is None:
                raise Refused(
                    "whether a prediction is wrong is not known (yet): it takes study= and query= "
                    "of a classification"
                )
            found &= self.wrong
        rows = np.flatnonzero(found)
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
        """The queries that a training example helped and harmed most: [row, value] of each."""
        scores, column = self.of_queries(name), int(self.columns(name)[place])
        if column < 0:
            return {"helped": [], "harmed": []}
        if scores.top is None:
            values = np.asarray(scores.values[:, column], np.float64)
        else:
            values, top = np.full(scores.shape[0], np.nan), scores.top
            for own, columns in zip(top.values, top.columns, strict=True):
                where, k = np.nonzero(columns == column)
                values[where] = own[where, k]
        rows = np.flatnonzero(np.isfinite(values))
        help_ = direction(scores) * values[rows]
        found = {}
        for end, sign in (("helped", 1.0), ("harmed", -1.0)):
            order = strongest(sign * help_, count)
            order = order[sign * help_[order] > 0]
            found[end] = [[int(rows[k]), number(values[rows[k]])] for k in order]
        return found

    def query_item(self, row: int) -> dict[str, Any]:
        """A query in few words."""
        scores = next(iter(self.sets.values()))
        view = {"row": row, "id": int(scores.query_ids[row])}
        wrong = None if self.wrong is None else bool(self.wrong[row])
        return described(view, self.query, self.answers.get(row)) | {"wrong": wrong}

    def audit(
        self,
        name: str,
        *,
        text: str = "",
        label: str = "",
        stage: str = "",
        offset: int = 0,
        limit: int = 50,
    ) -> dict[str, Any]:
        """Training examples, the most suspicious first."""
        suspicion, meaning = self.suspicion(name)
        places = np.flatnonzero(self.find(text, label, stage))
        start, stop = page(offset, limit, len(places))
        shown = first(-suspicion[places], start, stop, places)
        told, more = self.told(shown.tolist())
        finite = suspicion[np.isfinite(suspicion)]
        return {
            "total": len(places),
            "offset": start,
            "of": len(self.ids),
            "meaning": meaning,
            "more": more,
            "unit": self.scores(name).unit,
            "unknown": int(np.isnan(suspicion[places]).sum()),
            "histogram": histogram(finite) if len(finite) else None,
            "items": [
                {
                    "example": self.example(p) | told.get(int(p), {}),
                    "value": number(suspicion[p]),
                    "rank": start + k + 1,
                }
                for k, p in enumerate(shown)
            ],
        }


# -- plain functions -----------------------------------------------------------------------------


def direction(scores: Scores) -> float:
    return 1.0 if scores.higher_is_better else -1.0


def page(offset: int, limit: int, total: int) -> tuple[int, int]:
    start = max(0, min(int(offset), total))
    return start, min(total, start + max(1, min(int(limit), PAGE)))


def first(keys: Floats, start: int, stop: int, places: Ints) -> Ints:
    """``places[start:stop]`` in the order of ``keys``, ties to the first; NaN last."""
    return places[np.argsort(keys, kind="stable")[start:stop]]


def check_same(sets: Mapping[str, Scores]) -> None:
    """Refuse scores of different queries: they cannot be laid side by side."""
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
            raise ValueError(
                f"{before} and {name} are scores of different queries ({why}): they cannot be "
                "compared. Attribute the same queries with both, or explore one at a time"
            )


def open_scores(given: Given) -> dict[str, Scores]:
    """Scores by name; folders are opened and named by their last part."""
    if isinstance(given, Scores):
        return {given.method: given}
    if isinstance(given, str | os.PathLike):
        given = [given]
    if isinstance(given, Mapping):
        wrong = [name for name, s in given.items() if not isinstance(s, Scores)]
        if wrong:
            raise TypeError(f"{wrong[0]} is a {type(given[wrong[0]]).__name__}: give Scores")
        return {str(name): scores for name, scores in given.items()}
    found: dict[str, Scores] = {}
    for path in map(Path, given):
        parts = path.resolve().parts
        # as many parts of the path as tell it apart
        name = next(
            (tried for k in range(1, len(parts)) if (tried := "/".join(parts[-k:])) not in found),
            str(path),
        )
        found[name] = Scores.load(path)
    return found


def _of_stage(given: Any, stage: str | None) -> Any:
    if not isinstance(given, Mapping):
        return given
    return next(iter(given.values())) if stage is None else given[stage]
