"""The answers of the web page, as plain data: `server.py` only passes them on."""

from __future__ import annotations

import csv
import io
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from whence.explore.compare import Overall, compare_query
from whence.explore.jobs import DONE, UNFINISHED, Job, Jobs
from whence.explore.reading import WORK
from whence.explore.state import PAGE, Explored, Refused
from whence.explore.whatif import judged, what_if
from whence.present import views
from whence.present.views import number

SHOWN = 100  # entries at either end of a query, at most
TICKED = 5000  # examples at a time
WRITTEN = 500  # lines of a file at a time
HARMFUL = 200  # examples of which the query they harm most is known


class Explorer:
    """What is explored, and its retrainings.

    Args:
        explored: scores and data.
        jobs: the retrainings; None where there is no recipe.
        refused: why there are none.
    """

    def __init__(
        self, explored: Explored, jobs: Jobs | None = None, refused: str | None = None
    ) -> None:
        self.explored, self.jobs = explored, jobs
        self._refused = refused
        self._overall: dict[tuple[str, str, int], Overall] = {}
        # a pass over all scores, to see whether they are numbers
        self._about = {name: views.overview(s) for name, s in explored.everything.items()}
        self._harm: dict[str, dict[int, dict[str, Any]]] = {}
        self._guard = threading.Lock()
        self._worker = threading.Thread(target=self._prepare, name="reading", daemon=True)

    def start(self) -> None:
        """Read data and scores in the background, so that answers come at once."""
        self._worker.start()

    def close(self) -> None:
        self.explored.close()
        if self.jobs is not None:
            self.jobs.close()
        if self._worker.is_alive():
            self._worker.join(5)

    def _prepare(self) -> None:
        explored = self.explored
        for name in explored.sets:
            explored.mean_help(name, float("inf"))
        explored.read()
        for name, scores in explored.sets.items():
            if explored.stop.is_set():
                return
            places = explored.places(name)
            found = views.harmful_overall(scores, HARMFUL)
            self._harm[name] = {
                int(places[entry["column"]]): {
                    "queries": entry["queries"],
                    "worst": entry["worst"],
                }
                for entry in found["entries"]
            }

    # -- reading ---------------------------------------------------------------------------------

    @property
    def refused(self) -> str | None:
        """Why nothing can be retrained here; None when it can."""
        return self._refused if self.jobs is None else self.jobs.refused

    def overview(self) -> dict[str, Any]:
        explored = self.explored
        return {
            "sets": list(explored.sets),
            "own": list(explored.own),
            "about": self._about,
            "queries": next((s.shape[0] for s in explored.sets.values()), 0),
            "examples": len(explored.ids),
            "stages": [name for name in explored.stages if name],
            "labels": explored.labels(),
            "wrong": None if explored.wrong is None else int(explored.wrong.sum()),
            "measured": explored.measured is not None,
            "reading": explored.reading,
            "notes": explored.unchecked,
            "retrain": {
                "refused": self.refused,
                "recipe": None if self.jobs is None else repr(self.jobs.recipe),
                "folder": None if self.jobs is None else str(self.jobs.folder),
                "others": 0 if self.jobs is None else self.jobs.others,
            },
        }

    def query(self, name: str, row: int, k: int) -> dict[str, Any]:
        """One query by one scores: the report's view, its columns as places."""
        explored = self.explored
        scores, places = explored.of_queries(name), explored.places(name)
        explored.row(name, row)
        view = views.query_view(
            scores, row, max(1, min(k, SHOWN)), lambda column: explored.label(places[column])
        )
        for entry in [*view["helpful"], *view["harmful"]]:
            entry["column"] = int(places[entry["column"]])
        return view | {
            **explored.query_item(row),
            "examples": self._examples([*view["helpful"], *view["harmful"]]),
        }

    def compare(self, a: str, b: str, row: int, k: int) -> dict[str, Any]:
        view = compare_query(self.explored, a, b, row, max(1, min(k, SHOWN)))
        entries = [e for own in view["lists"].values() for end in own.values() for e in end]
        return view | {"examples": self._examples(entries)}

    def overall(self, a: str, b: str, k: int) -> dict[str, Any]:
        """Over all queries, as far as it is; ask again to go on."""
        with self._guard:
            key = (a, b, max(1, min(k, SHOWN)))
            if key not in self._overall:
                self._overall[key] = Overall(self.explored, *key)
        return self._overall[key].go_on(WORK)

    def audit(self, name: str, **asked: Any) -> dict[str, Any]:
        view = self.explored.audit(name, **asked)
        for item in view["items"]:
            item |= self._harm.get(name, {}).get(item["example"]["place"], {})
        return view

    def audit_csv(
        self, name: str, text: str = "", label: str = "", stage: str = ""
    ) -> Iterator[str]:
        """The whole audit list, the most suspicious first, as lines of a CSV file."""
        explored = self.explored
        suspicion, _ = explored.suspicion(name)
        places = np.flatnonzero(explored.find(text, label, stage))
        order = places[np.argsort(-suspicion[places], kind="stable")]

        def lines() -> Iterator[str]:
            yield _csv([["rank", "stage", "example", "label", "suspicion", "text"]])
            for start in range(0, len(order), WRITTEN):
                rows = []
                for rank, place in enumerate(order[start : start + WRITTEN].tolist(), start + 1):
                    stage = explored.stage_name(place) or ""
                    label, text = explored.in_words(place)
                    value = float(suspicion[place])
                    told = repr(value) if np.isfinite(value) else ""
                    cells = [
                        rank,
                        _safe(stage),
                        explored.ids[place],
                        _safe(label),
                        told,
                        _safe(text),
                    ]
                    rows.append(cells)
                yield _csv(rows)

        return lines()

    def what_if(self, places: Sequence[int]) -> dict[str, Any]:
        view = what_if(self.explored, self._ticked(places))
        if view["measured"] is None and self.jobs is not None:
            done = next((j for j in self.jobs.all() if j.state == DONE), None)
            outcome = None if done is None else self.jobs.outcome(done)
            if outcome is not None:
                view["measured"] = [number(x) for x in outcome.baseline]
        return view

    def example(self, name: str, place: int) -> dict[str, Any]:
        """A training example, and the queries that it did most to."""
        explored = self.explored
        (at,) = explored.chosen([place])
        told, _ = explored.told([int(at)])
        shown = explored.example(int(at)) | told.get(int(at), {})
        of = explored.strongest_for(name, int(at)) if name in explored.sets else {}
        return {"example": shown, **of}

    def queries(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """These queries."""
        count = next((s.shape[0] for s in self.explored.sets.values()), 0)
        wrong = [row for row in rows if row >= count]
        if wrong:
            raise Refused(f"query {wrong[0]} is out of range: there are 0..{count - 1}")
        return [self.explored.query_item(row) for row in rows[:PAGE]]

    def examples(self, places: Sequence[int]) -> list[dict[str, Any]]:
        """These training examples."""
        return [self.explored.example(int(p)) for p in self.explored.chosen(self._ticked(places))]

    # -- retraining ------------------------------------------------------------------------------

    def list_jobs(self) -> dict[str, Any]:
        every = [] if self.jobs is None else self.jobs.all()
        return {"jobs": [self._job(job) for job in every], "refused": self.refused}

    def ask(self, places: Sequence[int], seeds: int) -> dict[str, Any]:
        """Retrain without these examples."""
        jobs, explored = self._jobs(), self.explored
        chosen = explored.chosen(self._ticked(places))
        stages = sorted({explored.stage_name(int(p)) or "" for p in chosen})
        if len(stages) > 1:
            raise Refused(
                f"the ticked examples are of the stages {' and '.join(stages)}: retraining leaves "
                "out examples of one stage at a time"
            )
        return self._job(jobs.ask("".join(stages) or None, explored.ids[chosen].tolist(), seeds))

    def cancel(self, name: str) -> dict[str, Any]:
        return self._job(self._jobs().cancel(name))

    def go_on(self, name: str) -> dict[str, Any]:
        return self._job(self._jobs().go_on(name))

    def forget(self, name: str) -> dict[str, Any]:
        self._jobs().forget(name)
        return self.list_jobs()

    def job(self, name: str) -> dict[str, Any]:
        """A retraining, with what it showed once it is done."""
        jobs = self._jobs(reading=True)
        job = jobs.get(name)
        outcome = jobs.outcome(job)
        places = self._places(job)
        view = self._job(job) | {"examples": [int(p) for p in places]}
        if outcome is not None:
            view["judged"] = judged(self.explored, job, outcome, places)
        return view

    def _jobs(self, reading: bool = False) -> Jobs:
        if self.jobs is None or (self.refused is not None and not reading):
            raise PermissionError(self.refused or "there is no recipe")
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
        """Where the examples of a job stand here; those that no scores are about have no place."""
        assert self.jobs is not None
        named = [name for name in self.explored.stages if name in ("", job.stage)]
        if not named:
            return np.empty(0, np.int64)
        own = self.explored.stage_of == self.explored.stages.index(named[0])
        return np.flatnonzero(own & np.isin(self.explored.ids, job.examples))

    def _ticked(self, places: Sequence[int]) -> Sequence[int]:
        if len(places) > TICKED:
            raise Refused(f"{len(places)} examples are ticked: tick at most {TICKED}")
        return places

    def _examples(self, entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {str(e["column"]): self.explored.example(e["column"]) for e in entries}


def _csv(rows: Sequence[Sequence[Any]]) -> str:
    lines = io.StringIO()
    csv.writer(lines, lineterminator="\r\n").writerows(rows)
    return lines.getvalue()


def _safe(text: str) -> str:
    """A cell that no spreadsheet takes for a formula."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text
