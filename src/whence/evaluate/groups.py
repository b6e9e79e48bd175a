"""Group predictions: what scores predict for the truth's subsets, aligned with the measurements.

    g[q, j] = Σ_{m ∈ S_j} values[q, m]               predicted, up to a constant of the query
    T[q, j] = mean over seeds r of f(q; S_j, r)      measured

Axes: ``n`` training examples, ``q`` queries, ``M`` subsets, ``R`` seeds, ``K`` inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whence.errors import InvalidInput, InvalidType, warn
from whence.retrain import Truth
from whence.retrain.contrast import mean_of_sound
from whence.scores import Scores

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Given = Scores | NDArray[Any]  # scores, or a plain array (q, n)

NUMBERS_PER_BLOCK = 2**23  # numbers of a score matrix that are converted to float64 at a time
LARGEST = 1e100  # a score whose squares can be added up
ROUNDING = 1e-13  # group predictions closer than this, relative to Σ|values|, count as equal


@dataclass(frozen=True)
class Groups:
    """Predictions and measurements of the same subsets and queries.

    Attributes:
        predicted: (K, q, M), one prediction for each entry of the list of scores.
        measured: (q, M), the mean over the seeds.
        valid: (M of the truth, R), the trainings that did not diverge.
        method: the name of the method.
        runs: the number of runs behind the scores.
        diverged: the number of trainings left out.
        lost: the number of subsets left out, because all of their trainings diverged.
    """

    predicted: Floats
    measured: Floats
    valid: NDArray[np.bool_]
    method: str
    runs: int
    diverged: int
    lost: int

    @property
    def subsets(self) -> int:
        return int(self.measured.shape[1])


def group(scores: Given | Sequence[Given], truth: Truth, exclude_diverged: bool) -> Groups:
    """Check that scores and truth fit each other, and sum the scores over the truth's subsets."""
    check_truth(truth)
    runs = list(scores) if isinstance(scores, Sequence) else [scores]
    if not runs:
        raise InvalidInput("scores is an empty list: give the scores of at least one run")
    methods = list(dict.fromkeys(run.method for run in runs if isinstance(run, Scores)))
    if len(methods) > 1:
        raise InvalidInput(
            f"scores is a list of runs, but of several methods ({', '.join(methods)}): give one "
            "method's runs at a time, or a dict of them to compare()"
        )
    if truth.in_place and len(truth.seeds) > 1:
        raise InvalidInput(
            f"the truth is of the single models of the seeds {truth.seeds}, which have no mean: "
            "take one of them with truth.of_seed(seed)"
        )
    valid = np.asarray(np.isfinite(truth.measurements).all(2))
    diverged = int((~valid).sum())
    if diverged and not exclude_diverged:
        raise InvalidInput(
            f"{diverged} of the truth's {valid.size} trainings diverged or are unfinished: finish "
            "them, or leave them out with exclude_diverged=True"
        )
    whole = valid.any(1)
    if whole.sum() < 3:
        lost = f" ({int((~whole).sum())} more were left out)" if diverged else ""
        raise InvalidInput(
            f"the truth has {int(whole.sum())} subsets{lost}: a correlation over subsets needs at "
            "least 3; use 100 for a narrow interval"
        )
    measured = truth.means
    if diverged:
        measured = mean_of_sound(truth.measurements[whole], valid[whole])
    masks = np.asarray(truth.masks[whole].T, dtype=np.float64)  # (n, M)
    return Groups(
        predicted=np.stack([_predictions(run, truth, masks) for run in runs]),
        measured=np.ascontiguousarray(measured.T, dtype=np.float64),
        valid=valid,
        method=methods[0] if methods else "an array of scores",
        runs=sum(_runs(run) for run in runs),
        diverged=diverged,
        lost=int((~whole).sum()),
    )


def check_truth(truth: Any) -> None:
    """Refuse everything but a Truth."""
    if not isinstance(truth, Truth):
        raise InvalidType(
            f"truth is a {type(truth).__name__}: give the Truth that ground_truth() returned, or "
            "Truth.load(folder)"
        )


def centred(values: Floats) -> Floats:
    """``values`` (..., M) minus their mean over the subsets."""
    return np.asarray(values - values.mean(-1, keepdims=True))


def locate(scores: Scores, truth: Truth) -> tuple[Ints, Ints]:
    """The rows of the truth's queries 0 … q − 1 and the columns of its training examples
    0 … n − 1. Refuses scores of other queries, training data, stages or measurements."""
    if scores.is_self_influence:
        raise InvalidInput(
            "these are self-influence scores (n,), which are not about queries: attribute with "
            "query="
        )
    for name in ("measurement", "higher_is_better"):
        ours, theirs = getattr(scores, name), getattr(truth, name)
        if ours != theirs:
            raise InvalidInput(
                f"the scores have {name}={ours!r}, the truth {name}={theirs!r}: attribute with "
                "the task that the truth was measured with"
            )
    check_same_queries(scores, truth.query, "the truth")
    _check_model(scores, truth)
    across = columns(scores, truth.stage, truth.masks.shape[1], "the truth", truth.data)
    _check_queries(scores.shape[0], truth)
    return by_number("query_ids", scores.query_ids, "the truth"), across


def check_same_queries(scores: Scores, query: str, whose: str) -> None:
    """Refuse scores of other queries than those of this fingerprint, where both are known."""
    attributed = scores.provenance.get("query")
    if attributed and query and attributed != query:
        raise InvalidInput(
            f"the scores were made for other queries than {whose} (their contents differ, or "
            "their order): attribute the same queries, each by itself"
        )


def _check_model(scores: Scores, truth: Truth) -> None:
    """Refuse scores of another model than the one that a truth drops examples from, in place."""
    for name, theirs in (("seed", truth.seeds[0]), ("recipe", truth.recipe)):
        ours = scores.provenance.get(name)
        if truth.in_place and ours is not None and theirs != "" and ours != theirs:
            raise InvalidInput(
                f"the truth is of the single model of {name} {theirs!r}, but the scores are of a "
                f"run of {name} {ours!r}: attribute the run of the same recipe and seed, or make "
                "the truth without in_place"
            )


def columns(scores: Scores, stage: str | None, examples: int, whose: str, data: str = "") -> Ints:
    """The columns of examples 0 … n − 1 of a stage, (n,).

    Args:
        data: fingerprint of the training data that the scores must be about; "" if it is not known.
    """
    if scores.provenance.get("candidates"):
        raise InvalidInput(
            f"the scores are about candidates, which the run never trained on, but {whose} is "
            "about its training data: attribute with a Study without candidates"
        )
    stages = [] if scores.stage is None else list(dict.fromkeys(scores.stage))
    if stage is None and len(stages) > 1:
        raise InvalidInput(
            f"the scores are about the stages {', '.join(stages)}, but {whose} does not say which "
            "of them it is about"
        )
    if stage is not None and stages and stage not in stages:
        raise InvalidInput(
            f"{whose} is about stage {stage!r}, but the scores about {', '.join(stages)}: "
            f"attribute with stage={stage!r}, or without stage="
        )
    chosen = np.arange(scores.shape[-1])
    if stage is not None and len(stages) > 1:
        chosen = np.flatnonzero(np.array(scores.stage) == stage)
    if len(chosen) != examples:
        raise InvalidInput(
            f"the scores are about {len(chosen)} training examples, but {whose} about {examples}: "
            "they must be of the same training data, all of it (attribute without examples=)"
        )
    attributed = training_data(scores, stage)
    if data and attributed and attributed != data:
        warn(
            f"the scores are about other training data than {whose}: the contents of the examples "
            "differ, or their order. If that is not an augmentation or a dtype, attribute a study "
            "of the same data"
        )
    return chosen[by_number("train_ids", scores.train_ids[chosen], whose)]


def training_data(scores: Scores, stage: str | None) -> str | None:
    """The fingerprint of the scored examples of a stage, if it is known."""
    train = scores.provenance.get("train")
    if not isinstance(train, Mapping) or not train:
        return None
    return str(train[stage] if stage in train else next(iter(train.values())))


def by_number(name: str, ids: Ints, whose: str) -> Ints:
    """The positions of the ids 0, 1, 2, …"""
    order = np.argsort(ids, kind="stable")
    if not np.array_equal(ids[order], np.arange(len(ids))):
        raise InvalidInput(
            f"the scores' {name} are not 0..{len(ids) - 1}, the numbers that {whose} counts by: "
            "give an array of scores, with rows and columns in that order"
        )
    return order


def _check_queries(rows: int, truth: Truth) -> None:
    queries = truth.measurements.shape[2]
    if rows != queries:
        raise InvalidInput(
            f"the scores are of {rows} queries, but the truth of {queries}: attribute the "
            "queries that the truth was measured on"
        )


def _predictions(scores: Given, truth: Truth, masks: Floats) -> Floats:
    """g (q, M): sums of scores over the subsets whose ``masks`` are (n, M)."""
    n = masks.shape[0]
    if isinstance(scores, Scores):
        values: NDArray[Any] = scores.values
        down, across = locate(scores, truth)
    else:
        values = np.asarray(scores)
        if values.ndim != 2:
            raise InvalidInput(f"an array of scores must be (q, n), not of shape {values.shape}")
        if values.shape[1] != n:
            raise InvalidInput(
                f"the scores are about {values.shape[1]} training examples, but the truth about "
                f"{n}: they must be of the same training data"
            )
        _check_queries(len(values), truth)
        down, across = np.arange(len(values)), np.arange(n)
    everything = values.shape[1] == n and np.array_equal(across, np.arange(n))
    predicted = np.empty((len(values), masks.shape[1]))
    step = max(1, NUMBERS_PER_BLOCK // n)
    for start in range(0, len(values), step):
        rows = down[start : start + step]
        block = values[rows] if everything else values[rows][:, across]
        block = block.astype(np.float64)
        bad = ~np.isfinite(block) | (np.abs(block) > LARGEST)
        if bad.any():
            row = int(bad.any(1).argmax())
            raise InvalidInput(
                f"{int(bad.sum())} scores are not finite numbers, the first of query "
                f"{start + row} and example {int(bad[row].argmax())}: they cannot be judged (more "
                f"than {LARGEST:g} counts as infinite)"
            )
        sums = block @ masks
        flat = np.ptp(sums, axis=1) <= ROUNDING * np.abs(block).sum(1)
        sums[flat] = 0.0
        predicted[start : start + step] = sums
    return predicted


def _runs(scores: Given) -> int:
    """The number of runs whose scores were averaged."""
    return int(scores.diagnostics.get("runs", 1)) if isinstance(scores, Scores) else 1
