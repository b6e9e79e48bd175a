"""Scores as plain data for a page: what the report embeds and the explorer serves.

Axes: ``n`` training examples (columns), ``q`` queries (rows), ``L`` segments, ``k`` shown entries.
A training example is identified by its column in the score matrix, because ids repeat across
stages. Numbers that are not finite become None and are counted.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whence.errors import InvalidInput
from whence.present.check import by_stage
from whence.present.duplicates import Sketch, leaders, sketch
from whence.present.examples import Examples, Rendered
from whence.present.predict import predictions
from whence.scores import Scores
from whence.scores.result import SIGN
from whence.scores.uncertainty import calibrated, half_widths_of_scores
from whence.study import Study
from whence.task import Task

BINS = 40
CHUNK = 2**24  # scores in memory at a time
SKETCHES = 4096  # of examples, in the cache
CLASSES = 8  # classes that a class mix names
PER_QUERY = ("residual", "noise")  # of a calibration

View = dict[str, Any]
Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.integer[Any]]
Class = Callable[[int], str | None]
Leaders = Callable[[Sequence[int]], Ints]


class TrainingExamples:
    """The training examples behind the columns of a score matrix, or behind other entries.

    Args:
        ids: of each entry, (n,).
        stages: of each entry; None if the scores name none.
        train: the training data by stage; entries of other stages show only their ids.
        study: whose tasks say what the labels are.
        kind: `Examples`, or a subclass.
        options: of `Examples`; `labels` may be `{stage: labels}`.
    """

    def __init__(
        self,
        ids: Ints,
        stages: Sequence[str | None] | None,
        train: Mapping[str | None, Any],
        study: Study | None = None,
        *,
        kind: type[Examples] = Examples,
        labels: Any = None,
        **options: Any,
    ) -> None:
        self._ids, self._stages, self._none = ids, stages, Examples(None)
        self.by_stage = {
            stage: kind(
                dataset,
                labels=labels[stage] if isinstance(labels, Mapping) else labels,
                task=task_of(study, stage),
                **options,
            )
            for stage, dataset in train.items()
        }
        self._sketch = lru_cache(SKETCHES)(self._sketched)

    @classmethod
    def of_scores(
        cls, scores: Scores, train: Any = None, study: Study | None = None, **options: Any
    ) -> TrainingExamples:
        """The examples of the columns. `train` is a dataset, or `{stage: dataset}`."""
        stages = by_stage(scores, train)
        return cls(scores.train_ids, scores.stage, stages, study, **options)

    def stage(self, entry: int) -> str | None:
        return None if self._stages is None else self._stages[entry]

    def of(self, entry: int) -> tuple[Examples, int]:
        """The examples of an entry's stage, and the index there."""
        return self.by_stage.get(self.stage(entry), self._none), int(self._ids[entry])

    def render(self, entry: int) -> Rendered:
        """An example as plain data, with its stage."""
        examples, index = self.of(entry)
        return examples.render(index) | {"stage": self.stage(entry)}

    def class_of(self, entry: int) -> str | None:
        """The label of an example, if it names a class."""
        examples, index = self.of(entry)
        return examples.label(index) if examples.names_classes else None

    def leaders(self, entries: Sequence[int]) -> Ints:
        """The position of the entry that each one nearly duplicates; its own if none."""
        return leaders([self._sketch(int(entry)) for entry in entries])

    def _sketched(self, entry: int) -> Sketch | None:
        examples, index = self.of(entry)
        return sketch(examples.content(index))

    def predictions(
        self,
        study: Study,
        entries: Iterable[int],
        train: Mapping[str | None, Any] | None = None,
    ) -> dict[int, View]:
        """`prediction` and `comparable` of each example, by the final model of its stage.

        Args:
            train: what the model reads, by stage, where that is not what is shown.
        """
        known: dict[int, View] = {}
        for stage, examples in self.by_stage.items():
            of_stage = {e: int(self._ids[e]) for e in map(int, entries) if self.stage(e) == stage}
            dataset = examples.dataset if train is None else train[stage]
            if dataset is None or not of_stage:
                continue
            model_stage = stage if stage in study.stages else study.stages[-1]
            ids = list(of_stage.values())
            outputs = predictions(study, dataset, ids, stage=model_stage)
            for entry, index in of_stage.items():
                view = prediction_view(outputs[index], examples)
                known[entry] = {name: view[name] for name in ("prediction", "comparable")}
        return known


def folded(entries: list[View], leaders_of: Leaders) -> list[View]:
    """Entries without near-duplicates of a stronger one, which has their columns as `also`."""
    leading = leaders_of([entry["column"] for entry in entries])
    for place, leader in enumerate(leading.tolist()):
        if leader != place:
            entries[leader].setdefault("also", []).append(entries[place]["column"])
    return [entry for place, entry in enumerate(entries) if leading[place] == place]


def task_of(study: Study | None, stage: str | None) -> Task | None:
    """The task of a stage; of the last one for scores that name no stage."""
    return None if study is None else study.tasks.get(stage or study.stages[-1])


def overview(scores: Scores, notes: list[str] | None = None) -> View:
    """Describe the scores: method, settings, unit, sign, segments, exclusions, notes."""
    single = scores.is_self_influence
    top = None if scores.strongest is None else scores.strongest.kept
    notes = list(notes or [])
    if top is not None:
        notes.append(
            f"Only the top {top} at each end of a query were kept: distributions are not shown, "
            "and sums over queries count the other scores as zero."
        )
    not_finite = count_not_finite(scores)
    if not_finite:
        notes.append(f"{not_finite:,} scores are not finite and are left out.")
    if scores.unit.startswith("none"):
        notes.append("These scores have no unit: only their order is meaningful.")
    share, names = scores.left_out
    if names:
        notes.append(
            f"{share:.1%} of the trained parameters do not contribute to the scores (see Excluded)."
        )
    facts = {k: v for k, v in scores.provenance.items() if v is not None}
    fit = scores.diagnostics.get("calibration")
    return {
        "method": scores.method,
        "settings": _facts(scores.settings),
        "measurement": scores.measurement,
        "unit": scores.unit,
        "higher_is_better": scores.higher_is_better,
        "sign": SIGN,
        "self": single,
        "queries": 0 if single else scores.shape[0],
        "examples": scores.shape[-1],
        "kept": top,
        "stages": [] if scores.stage is None else list(dict.fromkeys(scores.stage)),
        "segments": segments(scores),
        "spread": scores.spread is not None,
        "calibrated": None if fit is None else f"calibrated {calibrated(fit)}",
        "excluded": _excluded(scores),
        "diagnostics": _facts(
            {
                # each query shows its own
                k: {n: x for n, x in v.items() if n not in PER_QUERY} if k == "calibration" else v
                for k, v in scores.diagnostics.items()
                if k not in ("segments", "warnings")
            }
        ),
        "provenance": _facts(facts),
        "warnings": scores.warnings,
        "notes": notes,
    }


def _excluded(scores: Scores) -> list[View]:
    """What no score includes: each layer that was trained, and all frozen ones in a line each
    reason."""
    views: list[View] = []
    frozen: dict[str, list[str]] = {}
    for part in scores.excluded:
        name, reason = str(part.get("name", "?")), str(part.get("reason", ""))
        if part.get("share", 0.0) > 0:
            views.append({"name": name, "share": number(part["share"]), "reason": reason})
        else:
            frozen.setdefault(reason, []).append(name)
    for reason, names in frozen.items():
        what = names[0] if len(names) == 1 else f"{len(names):,} layers"
        views.append({"name": what, "share": None, "reason": reason})
    return views


def query_view(scores: Scores, row: int | None, k: int = 10, class_of: Class | None = None) -> View:
    """One query, or self-influence: which examples helped or harmed it, how much and when.

    Args:
        row: the query's row; None for self-influence.
        k: number of entries at each end.
        class_of: returns a column's class, for the class mix (`TrainingExamples.class_of`).

    Returns:
        `row`, `id`; `helpful` and `harmful`: entries with `column`, `value` and, if the scores have
        them, `within` (half of a calibrated score's 95 % interval), `spread` and `segments` (L),
        strongest first, with the right sign only; `histogram` of all finite scores ({low, width,
        counts}, bins start at multiples of the width); `harmed`: the sum of those that harmed, None
        if only the top was kept; `segments`: the sums of those that helped and harmed per segment;
        `classes`: those of the entries, counted; `not_numbers`: the number of scores that are not
        finite; `residual`: of calibrated scores, the standard deviation of one retraining around
        its prediction.
    """
    place = scores.row_index(row)
    if k < 1:
        raise InvalidInput(f"k={k}: show at least one example")
    better = direction(scores)
    values, columns = scores.row_scores(row)
    finite = np.isfinite(values)
    view: View = {
        "row": row,
        "id": None if row is None else int(scores.query_ids[place]),
        "not_numbers": int((~finite).sum()),
        "histogram": None,
        "harmed": None,
        "segments": None,
        "classes": None,
        "residual": None,
    }
    if "calibration" in scores.diagnostics:
        view["residual"] = number(scores.diagnostics["calibration"]["residual"][place])
    values, columns = values[finite], columns[finite]
    for name, sign in (("helpful", better), ("harmful", -better)):
        order = strongest(sign * values, k)
        order = order[sign * values[order] > 0]
        view[name] = [_entry(scores, place, int(columns[c]), float(values[c])) for c in order]
    if scores.strongest is None and len(values):
        view["histogram"] = histogram(values)
        view["harmed"] = _both_signs(values, better)[1]
    if scores.by_segment is not None:
        parts = scores.by_segment if row is None else scores.by_segment[:, place]
        view["segments"] = [_both_signs(part[np.isfinite(part)], better) for part in parts]
    if class_of is not None:
        mix = {name: class_mix(view[name], class_of) for name in ("helpful", "harmful")}
        view["classes"] = mix if any(mix.values()) else None
    return view


def fold_query(view: View, leaders_of: Leaders) -> View:
    """A `query_view` whose lists show near-duplicates once."""
    return view | {end: folded(view[end], leaders_of) for end in ("helpful", "harmful")}


def describe_query(
    view: View, queries: Examples, prediction: Mapping[str, Any] | None = None
) -> View:
    """A `query_view` with the query itself: `query` (rendered), `label`, and its prediction."""
    rendered = queries.render(view["id"])
    return view | {
        "query": rendered,
        "label": rendered["label"],
        **prediction_view(prediction, queries),
    }


def prediction_view(prediction: Mapping[str, Any] | None, examples: Examples) -> View:
    """One of `predictions` for a page.

    Returns:
        `prediction` as text, its `probability`, the `measurement`, and `comparable`: whether the
        prediction can be compared with a label.
    """
    view: View = {"prediction": None, "probability": None, "measurement": None, "comparable": False}
    if prediction is None:
        return view
    view["measurement"] = number(prediction["measurement"])
    output = prediction["output"] or {}
    if "class" in output:
        view["prediction"] = examples.class_name(output["class"])
        view["probability"] = number(output["probability"])
        view["comparable"] = True
    elif "value" in output:
        view["prediction"] = f"{output['value']:.4g}"
    return view


def harmful_overall(scores: Scores, k: int = 50, near: int = 10) -> View:
    """The examples that harm the queries most on average: candidates for relabelling.

    Args:
        k: number of entries.
        near: an example counts as harming a query if it is among the query's `near` most harmful.

    Returns:
        `entries`, worst first, only harmful ones: `column`, `value` (the mean of the finite scores
        over the queries; if only the top was kept, the others count as zero), `queries` (how many
        it harms), and the query it harms most: `worst` (a row) and `worst_value`; `over`: the
        number of queries.
    """
    if scores.is_self_influence:
        raise InvalidInput("self-influence has no queries: use query_view(scores, None)")
    if k < 1:
        raise InvalidInput(f"k={k}: show at least one example")
    q, n = scores.shape
    better = direction(scores)
    total, finite, harms = np.zeros(n), np.zeros(n), np.zeros(n, dtype=np.int64)
    least, worst = np.zeros(n), np.zeros(n, dtype=np.int64)
    for row in range(q):
        values, columns = scores.row_scores(row)
        values = better * values.astype(np.float64)
        mask = np.isfinite(values)
        values, columns = values[mask], columns[mask]
        total[columns] += values
        finite[columns] += 1
        lower = values < least[columns]
        least[columns[lower]], worst[columns[lower]] = values[lower], row
        most = strongest(-values, near)
        harms[columns[most[values[most] < 0]]] += 1
    mean = total / (np.maximum(finite, 1) if scores.strongest is None else q)
    order = strongest(-mean, k)
    entries = [
        {
            "column": int(c),
            "value": number(better * mean[c]),
            "queries": int(harms[c]),
            "worst": int(worst[c]),
            "worst_value": number(better * least[c]),
        }
        for c in order
        if mean[c] < 0
    ]
    return {"entries": entries, "over": q, "near": near}


# -- parts of views --------------------------------------------------------------------------------


def direction(scores: Scores) -> float:
    """The sign of a change that is better for the query."""
    return 1.0 if scores.higher_is_better else -1.0


def strongest(strength: Floats, k: int) -> Ints:
    """Positions of the k largest of (n,), largest first; of ties, the lower position first."""
    if k < len(strength):
        kth = np.partition(strength, len(strength) - k)[len(strength) - k]
        above, ties = np.flatnonzero(strength > kth), np.flatnonzero(strength == kth)
        positions = np.concatenate([above, ties])
    else:
        positions = np.arange(len(strength))
    order = np.argsort(-strength[positions], kind="stable")
    return np.asarray(positions[order][:k])


def histogram(values: Floats) -> View:
    """Counts in about `BINS` equal bins. Zero is an edge, so that no bin has both signs."""
    least, most = min(0.0, float(values.min())), max(0.0, float(values.max()))
    width = number((most - least) / BINS) or 1.0
    bins = np.clip(np.floor(values.astype(np.float64) / width), -BINS, BINS).astype(np.int64)
    first, end = min(0, int(bins.min())), max(0, int(bins.max()) + 1)
    counts = np.bincount(bins - first, minlength=end - first)
    return {"low": first * width, "width": width, "counts": counts.tolist()}


def class_mix(entries: list[View], class_of: Class) -> list[list[Any]]:
    """[class, count] of the entries, most frequent first; rare classes are summed at the end."""
    classes = [class_of(entry["column"]) for entry in entries]
    counts = Counter(name for name in classes if name is not None).most_common()
    mix = [[name, count] for name, count in counts[:CLASSES]]
    if counts[CLASSES:]:
        mix.append([f"{len(counts) - CLASSES} others", sum(c for _, c in counts[CLASSES:])])
    return mix


def segments(scores: Scores) -> list[View]:
    """The segments of `by_segment`: name, stage, first and last update, share of the score."""
    if scores.by_segment is None:
        return []
    diagnostics = scores.diagnostics.get("segments") or []
    count = len(scores.by_segment)
    known = len(diagnostics) == count
    word = "checkpoint" if scores.method in ("TracIn", "StoredTracIn") else "segment"
    views = []
    for k in range(count):
        about = diagnostics[k] if known and isinstance(diagnostics[k], Mapping) else {}
        start, end = about.get("start"), about.get("end")
        name = f"{word} {k + 1}"
        if end is not None:
            name = f"updates {start}–{end}" if start is not None else f"up to update {end}"
        stage = about.get("stage")
        views.append(
            {
                "name": name,
                "stage": None if stage is None or scores.stage is None else str(stage),
                "start": number(start),
                "end": number(end),
                "share": number(about.get("share_of_score")),
            }
        )
    return views


def count_not_finite(scores: Scores) -> int:
    """The number of scores that are not finite."""
    values = scores.values if scores.strongest is None else scores.strongest.values
    step = max(1, CHUNK // values.shape[-1])
    flat = values.reshape(-1, values.shape[-1])
    return sum(
        int((~np.isfinite(flat[start : start + step])).sum()) for start in range(0, len(flat), step)
    )


def _entry(scores: Scores, row: int, column: int, value: float) -> View:
    entry: View = {"column": column, "value": number(value)}
    within = half_widths_of_scores(scores.diagnostics.get("calibration"), row, [value])
    if within is not None:
        entry["within"] = number(within[0])
    if scores.spread is not None:
        spread = scores.spread if scores.is_self_influence else scores.spread[row]
        entry["spread"] = number(spread[column])
    if scores.by_segment is not None:
        parts = scores.by_segment
        parts = parts[:, column] if scores.is_self_influence else parts[:, row, column]
        entry["segments"] = [number(part) for part in parts]
    return entry


def _both_signs(values: Floats, better: float) -> list[float | None]:
    """[sum of the scores that helped, sum of those that harmed]."""
    above = np.maximum(values, 0).sum(dtype=np.float64)
    below = np.minimum(values, 0).sum(dtype=np.float64)
    return [number(x) for x in ((above, below) if better > 0 else (below, above))]


def number(value: Any) -> float | None:
    """A number rounded to five digits; None if it is not finite."""
    if value is None or not math.isfinite(value):
        return None
    short = float(f"{float(value):.5g}")
    return int(short) if short.is_integer() and abs(short) < 1e9 else short


def _facts(given: Mapping[str, Any], prefix: str = "") -> list[list[str]]:
    """Nested plain values as [name, text] rows."""
    rows = []
    for name, value in given.items():
        if isinstance(value, Mapping) and value:
            rows += _facts(value, f"{prefix}{name} · ")
        elif isinstance(value, float) or value is None:
            rows.append([prefix + str(name), "none" if value is None else f"{value:.5g}"])
        else:
            text = value if isinstance(value, str) else json.dumps(value)
            rows.append([prefix + str(name), text if len(text) <= 300 else text[:300] + "…"])
    return rows
