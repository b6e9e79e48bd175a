"""The answers to the web page's requests, as plain data. `server.py` only sends them."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from whence.explore.compare import Overall, compare_query
from whence.explore.jobs import DONE, UNFINISHED, Job, Jobs
from whence.explore.map import MOST_CLASSES, coordinates, packed
from whence.explore.reading import REQUEST_SECONDS, Busy, Ints
from whence.explore.scored_data import PAGE, Refused, ScoredData, first, page
from whence.explore.whatif import judged, what_if
from whence.present import views
from whence.present.card import PICTURES, Card, draw
from whence.present.ranking import csv_lines
from whence.present.summary import summary
from whence.present.views import direction, number

MAX_ENTRIES = 100  # at either end of a query's ranking
CSV_BLOCK = 500  # lines of a file at a time
SUSPECTS = 50  # harmful examples whose labels the overview compares with predictions
HARMFUL = 200  # examples for which we find the query that they harm most


class Explorer:
    """Scored data, and its retrainings.

    Args:
        data: scores and their data.
        jobs: the retrainings; None without a recipe.
        refused: why nothing can be retrained.
        judgements: of the scores, by name, if there is a truth.
    """

    def __init__(
        self,
        data: ScoredData,
        jobs: Jobs | None = None,
        refused: str | None = None,
        judgements: Mapping[str, Sequence[tuple[str, str]]] | None = None,
    ) -> None:
        self.data, self.jobs = data, jobs
        self._refused, self._judgements = refused, judgements or {}
        self._overall: dict[tuple[str, str, int], Overall] = {}
        # a pass over all scores, to check that they are numbers
        self._about = {name: views.overview(s) for name, s in data.everything.items()}
        self._harm: dict[str, dict[int, dict[str, Any]]] = {}  # by place, the worst first
        self._summaries: dict[str, dict[str, Any]] = {}
        self._map: dict[str, Any] | str | None = None  # or why there is none
        self._guard = threading.Lock()
        self._worker = threading.Thread(target=self._prepare, name="reading", daemon=True)

    def start(self) -> None:
        """Read data and scores in the background, so that answers are immediate."""
        self._worker.start()

    def close(self) -> None:
        self.data.close()
        if self.jobs is not None:
            self.jobs.close()
        if self._worker.is_alive():
            self._worker.join(5)
        gc.unfreeze()

    def _prepare(self) -> None:
        data = self.data
        for name in data.sets:
            data.mean_help(name, float("inf"))
        data.read()
        for name, scores in data.sets.items():
            if data.stop.is_set():
                return
            places = data.places[name]
            harmful = views.harmful_overall(scores, HARMFUL)
            self._harm[name] = {
                int(places[entry["column"]]): {
                    "queries": entry["queries"],
                    "worst": entry["worst"],
                }
                for entry in harmful["entries"]
            }
            self._summaries[name] = summary(
                scores,
                partial(_class_of, data, places),
                data.query_class,
                [data.query_item(row) for row in range(scores.shape[0])],
                self._judgements.get(name, ()),
            )

        gc.freeze()  # a collection that visits all that was read would delay an answer
        self._draw_map()
        if not data.stop.is_set():
            gc.freeze()

    def _draw_map(self) -> None:
        """Place the training examples on the map; problems are shown on its page."""
        data = self.data
        if data.study is None or data.train_unknown:
            self._map = "the map needs the model and the training data (give study=, or --study)"
            return
        try:
            points, source = coordinates(data, data.stop)
        except InterruptedError:
            return
        except Exception as error:  # a user's model may raise anything
            self._map = f"the map could not be drawn: {type(error).__name__}: {error}"
            return
        labels = [data.examples.class_of(place) for place in range(len(data.ids))]
        names = sorted({name for name in labels if name is not None})[:MOST_CLASSES]
        numbers = {name: k for k, name in enumerate(names)}
        classes = np.array([numbers.get(name or "", 0) for name in labels], np.uint8)
        self._map = {
            "points": packed(points),
            "classes": packed(classes) if names else None,
            "names": names,
            "source": source,
        }

    # -- reading ---------------------------------------------------------------------------------

    @property
    def refused(self) -> str | None:
        """Why nothing can be retrained here; None when it can."""
        return self._refused if self.jobs is None else self.jobs.refused

    def overview(self) -> dict[str, Any]:
        data = self.data
        return {
            "sets": list(data.sets),
            "self_influence": list(data.self_influence),
            "about": self._about,
            "queries": next((s.shape[0] for s in data.sets.values()), 0),
            "examples": len(data.ids),
            "stages": [name for name in data.stages if name],
            "labels": data.labels(),
            "wrong": None if data.wrong is None else int(data.wrong.sum()),
            "measured": data.measured is not None,
            "reading": data.reading,
            "notes": data.unchecked,
            "retrain": {
                "refused": self.refused,
                "recipe": None if self.jobs is None else repr(self.jobs.recipe),
                "folder": None if self.jobs is None else str(self.jobs.folder),
                "others": 0 if self.jobs is None else self.jobs.others,
            },
        }

    def summary(self, scores: str) -> dict[str, Any]:
        """What to look at first. Raises Busy while it is computed."""
        explained, places = self.data.of_queries(scores), self.data.places[scores]
        if scores not in self._summaries:
            raise Busy("the overview is being computed: ask again in a moment")
        view = dict(self._summaries[scores])
        for end in ("helpful", "harmful"):
            entries = [{**e, "column": int(places[e["column"]])} for e in view[end]]
            view[end] = views.folded(entries, self.data.examples.leaders)
        suspects = list(self._harm[scores])[:SUSPECTS]
        predicted, more = self.data.predictions(suspects)
        harm = -direction(explained)
        view["suspects"] = [{"column": place, "value": harm} for place in suspects]
        view["examples_shown"] = self._examples([*view["helpful"], *view["harmful"]])
        for place in suspects:
            view["examples_shown"][str(place)] = self.data.example(place) | predicted.get(place, {})
        return view | {"more": more}

    def map(self) -> dict[str, Any]:
        """Where each training example is on the map, or `refused`, why there is none.

        Raises Busy while it is drawn.
        """
        if self._map is None:
            raise Busy("the map is being drawn: ask again in a moment")
        return {"refused": self._map} if isinstance(self._map, str) else self._map

    def map_values(self, scores: str, row: int | None = None) -> dict[str, Any]:
        """How much each training example helped a query, or all on average."""
        help_ = self.data.mean_help(scores) if row is None else self.data.help(scores, row)
        if help_ is None:
            raise Refused(f"{scores} keeps only each query's top: choose a query")
        return {"values": packed(help_.astype(np.float32))}

    def query(self, scores: str, row: int, k: int = 10) -> dict[str, Any]:
        """One query by one scores: the report's view, with places for columns."""
        data, explained = self.data, self.data.of_queries(scores)
        places = data.places[scores]
        view = views.query_view(
            explained,
            data.row(scores, row),
            max(1, min(k, MAX_ENTRIES)),
            partial(_class_of, data, places),
        )
        for entry in [*view["helpful"], *view["harmful"]]:
            entry["column"] = int(places[entry["column"]])
        view = views.fold_query(view, data.examples.leaders)
        return view | {
            **data.query_item(row),
            "curve": data.curve(row),
            "examples": self._examples([*view["helpful"], *view["harmful"]]),
        }

    def card(self, scores: str, row: int) -> Card:
        """One query's story as an SVG picture."""
        explained = self.data.of_queries(scores)
        view = self.query(scores, row, 2 * PICTURES)
        return draw(view, self.data.example, f"{explained.call}, {explained.measurement}")

    def compare(self, a: str, b: str, row: int, k: int = 10) -> dict[str, Any]:
        view = compare_query(self.data, a, b, row, max(1, min(k, MAX_ENTRIES)))
        entries = [e for ends in view["lists"].values() for end in ends.values() for e in end]
        return view | {"examples": self._examples(entries)}

    def overall(self, a: str, b: str, k: int = 10) -> dict[str, Any]:
        """The comparison over all queries so far; ask again to continue."""
        with self._guard:
            key = (a, b, max(1, min(k, MAX_ENTRIES)))
            if key not in self._overall:
                self._overall[key] = Overall(self.data, *key)
        return self._overall[key].advance(REQUEST_SECONDS)

    def audit(
        self,
        scores: str,
        offset: int = 0,
        limit: int = 50,
        text: str = "",
        label: str = "",
        stage: str = "",
    ) -> dict[str, Any]:
        """Training examples that match, the most suspicious first."""
        data, harm = self.data, self._harm.get(scores, {})
        suspicion, meaning = data.suspicion(scores)
        places = np.flatnonzero(data.find(text, label, stage))
        start, stop = page(offset, limit, len(places))
        listed = first(-suspicion[places], start, stop, places)
        predicted, more = data.predictions(listed.tolist())
        finite = suspicion[np.isfinite(suspicion)]
        return {
            "total": len(places),
            "offset": start,
            "of": len(data.ids),
            "meaning": meaning,
            "more": more,
            "unit": data.scores(scores).unit,
            "unknown": int(np.isnan(suspicion[places]).sum()),
            "histogram": views.histogram(finite) if len(finite) else None,
            "items": [
                {
                    "example": data.example(p) | predicted.get(int(p), {}),
                    "value": number(suspicion[p]),
                    "rank": start + k + 1,
                    **harm.get(int(p), {}),
                }
                for k, p in enumerate(listed)
            ],
        }

    def audit_csv(self, scores: str, **matching: str) -> Iterator[str]:
        """The whole audit list, the most suspicious first, as lines of a CSV file."""
        data = self.data
        suspicion, _ = data.suspicion(scores)
        places = np.flatnonzero(data.find(**matching))
        order = places[np.argsort(-suspicion[places], kind="stable")]

        def lines() -> Iterator[str]:
            heads = ["rank", "stage", "example", "label", "suspicion", "text"]
            yield csv_lines([heads], "\r\n")
            for start in range(0, len(order), CSV_BLOCK):
                rows = []
                for rank, place in enumerate(order[start : start + CSV_BLOCK].tolist(), start + 1):
                    examples, index = data.examples.of(place)
                    label, text = examples.in_words(index)
                    value = float(suspicion[place])
                    shown = value if np.isfinite(value) else ""
                    stage = data.examples.stage(place) or ""
                    rows.append([rank, stage, index, label, shown, text])
                yield csv_lines(rows, "\r\n")

        return lines()

    def what_if(self, places: Sequence[int] = ()) -> dict[str, Any]:
        view = what_if(self.data, places)
        if view["measured"] is None and self.jobs is not None:
            done = next((j for j in self.jobs.all() if j.state == DONE), None)
            outcome = None if done is None else self.jobs.outcome(done)
            if outcome is not None:
                view["measured"] = [number(x) for x in outcome.baseline]
        return view

    def example(self, place: int, scores: str = "") -> dict[str, Any]:
        """A training example, and the queries that it affected most."""
        data = self.data
        (at,) = data.chosen([place])
        predicted, _ = data.predictions([int(at)])
        example = data.example(int(at)) | predicted.get(int(at), {})
        queries = data.strongest_for(scores, int(at)) if scores in data.sets else {}
        return {"example": example, **queries}

    def queries(self, rows: Sequence[int] = ()) -> list[dict[str, Any]]:
        """These queries."""
        count = next((s.shape[0] for s in self.data.sets.values()), 0)
        wrong = [row for row in rows if row >= count]
        if wrong:
            raise Refused(f"query {wrong[0]} is out of range: use 0..{count - 1}")
        return [self.data.query_item(row) for row in rows[:PAGE]]

    def examples(self, places: Sequence[int] = ()) -> list[dict[str, Any]]:
        """These training examples."""
        return [self.data.example(int(p)) for p in self.data.chosen(places)]

    # -- retraining ------------------------------------------------------------------------------

    def list_jobs(self) -> dict[str, Any]:
        jobs = [] if self.jobs is None else self.jobs.all()
        return {"jobs": [self._job(job) for job in jobs], "refused": self.refused}

    def submit(self, places: Sequence[int], seeds: int) -> dict[str, Any]:
        """Retrain without these examples."""
        jobs, data = self._jobs(), self.data
        chosen = data.chosen(places)
        stages = sorted({data.examples.stage(int(p)) or "" for p in chosen})
        if len(stages) > 1:
            raise Refused(
                f"the ticked examples belong to the stages {' and '.join(stages)}: retrain without "
                "examples of one stage at a time"
            )
        return self._job(jobs.submit("".join(stages) or None, data.ids[chosen].tolist(), seeds))

    def cancel(self, name: str) -> dict[str, Any]:
        return self._job(self._jobs().cancel(name))

    def resume(self, name: str) -> dict[str, Any]:
        return self._job(self._jobs().resume(name))

    def remove(self, name: str) -> dict[str, Any]:
        self._jobs().remove(name)
        return self.list_jobs()

    def job(self, name: str) -> dict[str, Any]:
        """A retraining, with its results once it is done."""
        jobs = self._jobs()
        job = jobs.get(name)
        outcome = jobs.outcome(job)
        places = self._places(job)
        view = self._job(job) | {"examples": [int(p) for p in places]}
        if outcome is not None:
            view["judged"] = judged(self.data, job, outcome, places)
        return view

    def _jobs(self) -> Jobs:
        if self.jobs is None:
            raise PermissionError(self._refused or "there is no recipe")
        return self.jobs

    def _job(self, job: Job) -> dict[str, Any]:
        assert self.jobs is not None
        return {
            "id": job.id,
            "stage": job.stage,
            "removed": len(job.examples),
            "seeds": len(job.seeds),
            "created": job.created,
            "state": job.state,
            "at_work": job.state in UNFINISHED,
            "error": job.error,
            "seconds": job.seconds,
            "notes": job.notes,
            "progress": self.jobs.progress(job),
        }

    def _places(self, job: Job) -> np.ndarray:
        """The places of a job's examples. Examples without any scores have none."""
        assert self.jobs is not None
        named = [name for name in self.data.stages if name in ("", job.stage)]
        if not named:
            return np.empty(0, np.int64)
        in_stage = self.data.stage_of == self.data.stages.index(named[0])
        return np.flatnonzero(in_stage & np.isin(self.data.ids, job.examples))

    def _examples(self, entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {str(e["column"]): self.data.example(e["column"]) for e in entries}


def _class_of(data: ScoredData, places: Ints, column: int) -> str | None:
    return data.examples.class_of(int(places[column]))
