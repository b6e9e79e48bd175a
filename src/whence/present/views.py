"""Scores as plain data for a page: what the report embeds and the explorer serves.

Axes: ``n`` training examples (columns), ``q`` queries (rows), ``L`` segments, ``k`` shown entries.
A training example is named by its column in the score matrix: ids repeat where stages do. Numbers
that are not finite become None, and are counted.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whence.present.check import by_stage
from whence.present.examples import Examples, Rendered
from whence.scores import Scores
from whence.scores.result import SIGN
from whence.scores.uncertainty import calibrated

BINS = 40
AT_ONCE = 2**24  # scores read at once when all queries are looked at
LABELLED = 8  # classes of a mix that are named
PER_QUERY = ("residual", "noise")  # of a calibration

View = dict[str, Any]
Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.integer[Any]]
Label = Callable[[int], str | None]


class Pool:
    """The training examples behind the columns of a score matrix.

    Args:
        train: the training data, `{stage: dataset}` where there are several; None shows only ids.
        options: as `Examples` takes them; `labels` may be `{stage: labels}`.
    """

    def __init__(self, scores: Scores, train: Any = None, **options: Any) -> None:
        self._scores = scores
        labels = options.pop("labels", None)
        given = by_stage(scores, train)
        self._examples = {
            stage: Examples(
                dataset,
                labels=labels[stage] if isinstance(labels, Mapping) else labels,
                **options,
            )
            for stage, dataset in given.items()
        }
        self._none = Examples(None)

    def of(self, column: int) -> tuple[Examples, int]:
        """The examples of a column's stage, and the index there."""
        stage = None if self._scores.stage is None else self._scores.stage[column]
        return self._examples.get(stage, self._none), int(self._scores.train_ids[column])

    def render(self, column: int) -> Rendered:
        """What to show of the example in a column, and its stage."""
        examples, index = self.of(column)
        stage = None if self._scores.stage is None else self._scores.stage[column]
        return examples.render(index) | {"stage": stage}

    def label(self, column: int) -> str | None:
        examples, index = self.of(column)
        return examples.label(index)


def overview(scores: Scores, notes: list[str] | None = None) -> View:
    """What the scores are: method, settings, unit, sign, segments, what was left out, notes."""
    single = scores.is_self_influence
    kept = None if scores.top is None else scores.top.kept
    said = list(notes or [])
    if kept is not None:
        said.append(
            f"Only each query's top {kept} at either end were kept: distributions are not shown, "
            "and sums over queries count what was not kept as zero."
        )
    bad = not_numbers(scores)
    if bad:
        said.append(
            f"{bad:,} scores are not finite numbers; they are left out of all that follows."
        )
    if "calibration" in scores.diagnostics:
        said.append(f"Calibrated {calibrated(scores.diagnostics['calibration'])}.")
    if scores.unit.startswith("none"):
        said.append("These scores have no unit: only their order means something.")
    share = sum(float(part.get("share", 0.0)) for part in scores.excluded)
    if scores.excluded:
        said.append(
            f"{share:.1%} of the parameters have no part in the scores (see What was left out)."
        )
    facts = {k: v for k, v in scores.provenance.items() if v is not None}
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
        "kept": kept,
        "stages": [] if scores.stage is None else list(dict.fromkeys(scores.stage)),
        "segments": segments(scores),
        "spread": scores.spread is not None,
        "excluded": [
            {
                "name": str(part.get("name", "?")),
                "share": number(part.get("share")),
                "reason": str(part.get("reason", "")),
            }
            for part in scores.excluded
        ],
        "diagnostics": _facts(
            {
                # each query shows its own
                k: {n: x for n, x in v.items() if n not in PER_QUERY} if k == "calibration" else v
                for k, v in scores.diagnostics.items()
                if k != "segments"
            }
        ),
        "provenance": _facts(facts),
        "notes": said,
    }


def query_view(scores: Scores, row: int | None, k: int = 10, label: Label | None = None) -> View:
    """One query (None: self-influence): who helped, who harmed, by how much and when.

    Args:
        row: the query's row.
        k: entries at either end.
        label: a column's label, for the class mix (`Pool.label`).

    Returns:
        `row`, `id`; `helpful` and `harmful`: entries with `column`, `value` and, where the scores
        have them, `spread` and `segments` (L); only those whose sign says so, strongest first.
        `histogram` of all finite scores ({low, width, counts}, bins begin at multiples of the
        width) and `helped`, `harmed`, their sums by sign, None where only the top was kept;
        `segments`: the same two sums of each segment; `classes`: labels of the entries shown,
        counted; `not_numbers`: how many scores are not finite; `residual`: of calibrated scores,
        the standard deviation of one retraining around its prediction.
    """
    place = scores._row(row)
    if k < 1:
        raise ValueError(f"k={k}: show at least one example")
    direction = 1.0 if scores.higher_is_better else -1.0
    values, columns = row_of(scores, place)
    finite = np.isfinite(values)
    view: View = {
        "row": row,
        "id": None if row is None else int(scores.query_ids[place]),
        "not_numbers": int((~finite).sum()),
        "histogram": None,
        "helped": None,
        "harmed": None,
        "segments": None,
        "classes": None,
        "residual": None,
    }
    if "calibration" in scores.diagnostics:
        view["residual"] = number(scores.diagnostics["calibration"]["residual"][place])
    values, columns = values[finite], columns[finite]
    for name, sign in (("helpful", direction), ("harmful", -direction)):
        order = strongest(sign * values, k)
        order = order[sign * values[order] > 0]
        view[name] = [_entry(scores, place, int(columns[c]), float(values[c])) for c in order]
    if scores.top is None and len(values):
        view["histogram"] = histogram(values)
        view["helped"], view["harmed"] = _both_signs(values, direction)
    if scores.by_segment is not None:
        parts = _rows(scores.by_segment)[:, place]
        view["segments"] = [_both_signs(part[np.isfinite(part)], direction) for part in parts]
    if label is not None:
        mix = {name: class_mix(view[name], label) for name in ("helpful", "harmful")}
        view["classes"] = mix if any(mix.values()) else None
    return view


def described(view: View, asked: Examples, found: Mapping[str, Any] | None = None) -> View:
    """A `query_view` with the query itself: `query` (rendered), `label`, and what was `said`."""
    shown = asked.render(view["id"])
    return view | {"query": shown, "label": shown["label"]} | said(found, asked)


def said(found: Mapping[str, Any] | None, examples: Examples) -> View:
    """One of `predictions` for a page: `prediction` as text, its `probability`, `measurement`, and
    whether it is `comparable` with a label."""
    view: View = {"prediction": None, "probability": None, "measurement": None, "comparable": False}
    if found is None:
        return view
    view["measurement"] = number(found["measurement"])
    output = found["output"] or {}
    if "class" in output:
        view["prediction"] = examples.class_name(output["class"])
        view["probability"] = number(output["probability"])
        view["comparable"] = True
    elif "value" in output:
        view["prediction"] = f"{output['value']:.4g}"
    return view


def harmful_overall(scores: Scores, k: int = 50, near: int = 10) -> View:
    """The examples that harm the queries most, on the mean: candidates for relabelling.

    Args:
        k: entries.
        near: an example counts as harming a query if it is among its so many most harmful.

    Returns:
        `entries`, worst first, only harmful ones: `column`, `value` (mean over the queries, of what
        is finite; over all queries of what was kept if only the top was), `queries` (how many it
        harms), and the query it harms most: `worst` (a row) and `worst_value`; `over` queries.
    """
    if scores.is_self_influence:
        raise ValueError("self-influence has no queries to be harmed: see query_view(scores, None)")
    if k < 1:
        raise ValueError(f"k={k}: show at least one example")
    q, n = scores.shape
    direction = 1.0 if scores.higher_is_better else -1.0
    total, finite, harms = np.zeros(n), np.zeros(n), np.zeros(n, dtype=np.int64)
    least, worst = np.zeros(n), np.zeros(n, dtype=np.int64)
    for row in range(q):
        values, columns = row_of(scores, row)
        values = direction * values.astype(np.float64)
        good = np.isfinite(values)
        values, columns = values[good], columns[good]
        total[columns] += values
        finite[columns] += 1
        lower = values < least[columns]
        least[columns[lower]], worst[columns[lower]] = values[lower], row
        most = strongest(-values, near)
        harms[columns[most[values[most] < 0]]] += 1
    mean = total / (np.maximum(finite, 1) if scores.top is None else q)
    order = strongest(-mean, k)
    entries = [
        {
            "column": int(c),
            "value": number(direction * mean[c]),
            "queries": int(harms[c]),
            "worst": int(worst[c]),
            "worst_value": number(direction * least[c]),
        }
        for c in order
        if mean[c] < 0
    ]
    return {"entries": entries, "over": q, "near": near}


# -- parts -----------------------------------------------------------------------------------------


def row_of(scores: Scores, row: int) -> tuple[Floats, Ints]:
    """A query's scores and their columns: all of them, or those that were kept."""
    if scores.top is None:
        return _matrix(scores)[row], np.arange(scores.shape[-1])
    ends = [scores._top_row(row, end) for end in (0, 1)]
    columns, first = np.unique(np.concatenate([c for _, c in ends]), return_index=True)
    return np.concatenate([v for v, _ in ends])[first], columns


def strongest(strength: Floats, k: int) -> Ints:
    """Positions of the k largest of (n,), strongest first, ties to the lower position."""
    if k < len(strength):
        kth = np.partition(strength, len(strength) - k)[len(strength) - k]
        found = np.concatenate([np.flatnonzero(strength > kth), np.flatnonzero(strength == kth)])
    else:
        found = np.arange(len(strength))
    order = np.argsort(-strength[found], kind="stable")
    return np.asarray(found[order][:k])


def histogram(values: Floats) -> View:
    """Counts in about `BINS` equal bins; zero is the edge of one, so that no bin has two signs."""
    least, most = min(0.0, float(values.min())), max(0.0, float(values.max()))
    width = number((most - least) / BINS) or 1.0
    bins = np.clip(np.floor(values.astype(np.float64) / width), -BINS, BINS).astype(np.int64)
    first, end = min(0, int(bins.min())), max(0, int(bins.max()) + 1)
    counts = np.bincount(bins - first, minlength=end - first)
    return {"low": first * width, "width": width, "counts": counts.tolist()}


def class_mix(entries: list[View], label: Label) -> list[list[Any]]:
    """[label, count] of entries, most frequent first; the rest together as the last."""
    found = [label(entry["column"]) for entry in entries]
    counts = Counter(name for name in found if name is not None).most_common()
    mix = [[name, count] for name, count in counts[:LABELLED]]
    if counts[LABELLED:]:
        mix.append([f"{len(counts) - LABELLED} others", sum(c for _, c in counts[LABELLED:])])
    return mix


def segments(scores: Scores) -> list[View]:
    """The parts that `by_segment` has: a name, and what is known of each."""
    if scores.by_segment is None:
        return []
    known = scores.diagnostics.get("segments") or []
    count = len(scores.by_segment)
    word = "checkpoint" if scores.method in ("TracIn", "StoredTracIn") else "segment"
    found = []
    for k in range(count):
        about = known[k] if len(known) == count and isinstance(known[k], Mapping) else {}
        start, end = about.get("start"), about.get("end")
        name = f"{word} {k + 1}"
        if end is not None:
            name = f"updates {start}–{end}" if start is not None else f"up to update {end}"
        stage = about.get("stage")
        found.append(
            {
                "name": name,
                "stage": None if stage is None or scores.stage is None else str(stage),
                "start": number(start),
                "end": number(end),
                "share": number(about.get("share_of_score")),
            }
        )
    return found


def not_numbers(scores: Scores) -> int:
    """How many scores are not finite."""
    every = _matrix(scores) if scores.top is None else _rows(scores.top.values)
    step = max(1, AT_ONCE // every.shape[-1])
    flat = every.reshape(-1, every.shape[-1])
    return sum(
        int((~np.isfinite(flat[start : start + step])).sum()) for start in range(0, len(flat), step)
    )


def _matrix(scores: Scores) -> Floats:
    """(q, n), also for self-influence."""
    return _rows(scores.values) if scores.is_self_influence else scores.values


def _rows(array: Floats) -> Floats:
    """(..., n) as (..., 1, n)."""
    return array[..., None, :]


def _entry(scores: Scores, row: int, column: int, value: float) -> View:
    entry: View = {"column": column, "value": number(value)}
    if scores.spread is not None:
        spread = scores.spread if scores.is_self_influence else scores.spread[row]
        entry["spread"] = number(spread[column])
    if scores.by_segment is not None:
        parts = scores.by_segment
        parts = parts[:, column] if scores.is_self_influence else parts[:, row, column]
        entry["segments"] = [number(part) for part in parts]
    return entry


def _both_signs(values: Floats, direction: float) -> list[float | None]:
    """[sum of what helped, sum of what harmed], as scores."""
    above = np.maximum(values, 0).sum(dtype=np.float64)
    below = np.minimum(values, 0).sum(dtype=np.float64)
    return [number(x) for x in ((above, below) if direction > 0 else (below, above))]


def number(value: Any) -> float | None:
    """Five digits are plenty for a page; None for what is not a finite number."""
    if value is None or not math.isfinite(value):
        return None
    short = float(f"{float(value):.5g}")
    return int(short) if short.is_integer() and abs(short) < 1e9 else short


def _facts(given: Mapping[str, Any], prefix: str = "") -> list[list[str]]:
    """Nested plain values as (name, text) rows."""
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
