"""Subset removal (appendix B.3): does leaving out what helped a query turn its prediction wrong?

Queries that are right under every seed of a training on all data are tried with growing k: remove
the k examples that helped the query most, retrain under other seeds, and the query has flipped when
its mean margin over the seeds falls below zero. One that has flipped is not tried again.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Subset

from whence.data import Batches, Labels, classes
from whence.errors import InvalidInput, InvalidType, warn
from whence.evaluate.groups import Floats, Ints, by_number, check_same_queries, columns
from whence.evaluate.lds import Difference
from whence.evaluate.plots import StrPath, plot_removal
from whence.methods.random import draws
from whence.persist.files import as_path
from whence.retrain import Training, measure
from whence.retrain.measure import TrainingOptions
from whence.retrain.recipe import Recipe
from whence.scores import Scores
from whence.table import Table, Tabled, estimate
from whence.task import Task

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RANDOM = "Random"  # the floor's name among the methods
Z = 1.959964  # a normal variable is within ± Z with 95 %


@dataclass(frozen=True, eq=False, repr=False)
class SubsetRemoval(Tabled):
    """Which queries flipped after removing at most k examples, by method.

    Attributes:
        k: numbers of examples removed, ascending, (I,).
        margins: by method (I, queries): mean margin over the seeds after removing the method's k
            most helpful examples; NaN where a query was not tried, having flipped before (or where
            all of its trainings diverged).
        queries: (queries,) which rows of the query set were tried.
        right: how many rows were right under all selection seeds.
        select_seeds, seeds: of the trainings on all data, and of those on what was not removed.
        trainings: how many models were trained.
        diverged: how many of these diverged. A mean is over the others; a query all of whose
            trainings diverged has not flipped.
        stage: whose examples were removed.
    """

    k: tuple[int, ...]
    margins: dict[str, Floats]
    queries: Ints
    right: int
    select_seeds: tuple[int, ...]
    seeds: tuple[int, ...]
    trainings: int
    diverged: int
    stage: str | None = None

    def flips(self, method: str) -> NDArray[np.bool_]:
        """(I, queries): which queries flipped after removing at most k examples."""
        below = np.nan_to_num(self.margins[method]) < 0
        return np.asarray(np.logical_or.accumulate(below, axis=0))

    def flipped(self, method: str) -> Floats:
        """(I,) share of the queries that flipped after removing at most k examples."""
        return np.asarray(self.flips(method).mean(1))

    def difference(self, one: str, other: str) -> list[Difference]:
        """How many more of the queries one method's removals flip than another's, for each k.

        The intervals are Newcombe's for paired shares (1998, method 10): both methods were tried on
        the same queries.
        """
        shares = [self.flipped(name) for name in (one, other)]
        limits = [self.interval(name) for name in (one, other)]
        differences = []
        for k in range(len(self.k)):
            (p, q), (a, b) = (share[k] for share in shares), (limit[k] for limit in limits)
            φ = _agreement(self.flips(one)[k], self.flips(other)[k])
            ends = [
                np.sqrt(max(0.0, x**2 - 2 * φ * x * y + y**2))
                for x, y in ((p - a[0], b[1] - q), (a[1] - p, q - b[0]))
            ]
            differences.append(
                Difference(float(p - q), (float(p - q - ends[0]), float(p - q + ends[1])))
            )
        return differences

    def interval(self, method: str) -> Floats:
        """(I, 2) 95 % intervals of ``flipped`` over the choice of queries (Wilson's)."""
        p, count = self.flipped(method), len(self.queries)
        middle = p + Z**2 / (2 * count)
        spread = Z * np.sqrt(p * (1 - p) / count + Z**2 / (4 * count**2))
        return np.stack([middle - spread, middle + spread], 1) / (1 + Z**2 / count)

    def plot(self, *, title: str | None = None, path: StrPath | None = None) -> Figure:
        """The share of flipped queries by the number removed: `plot_removal`."""
        return plot_removal(self, title=title, path=path)

    def table(self) -> Table:
        """One row per method, one column per k."""
        rows = []
        for name in self.margins:
            cells = zip(self.flipped(name), self.interval(name), strict=True)
            rows.append([name, *(estimate(p, around, 2) for p, around in cells)])
        title = (
            f"Share of {len(self.queries)} queries flipped by removing at most k examples"
            f"{f' of {self.stage}' if self.stage else ''} [95 %]; {self.trainings} trainings"
            + (f", {self.diverged} diverged" if self.diverged else "")
        )
        return Table(["k", *map(str, self.k)], rows, title=title)


def _agreement(one: NDArray[np.bool_], other: NDArray[np.bool_]) -> float:
    """The correlation φ of two yes-or-no answers, with the correction for continuity."""
    both, neither = int((one & other).sum()), int((~one & ~other).sum())
    first, second = int((one & ~other).sum()), int((~one & other).sum())
    sides = (both + first) * (second + neither) * (both + second) * (first + neither)
    if sides == 0:
        return 0.0
    apart = float(both * neither - first * second)
    apart = max(apart - len(one) / 2, 0) if apart > 0 else apart
    return float(apart / np.sqrt(sides))


def subset_removal(
    recipe: Recipe,
    scores_by_method: Mapping[str, Scores],
    query: Any,
    k: Sequence[int],
    *,
    queries: int = 100,
    select_seeds: int = 5,
    seeds: int = 3,
    random_floor: bool = True,
    stage: str | None = None,
    out: str | os.PathLike[str] | None = None,
    seed: int = 0,
    **options: Unpack[TrainingOptions],
) -> SubsetRemoval:
    """Retrain without each query's most helpful examples, and see whether it turns wrong.

    Only the order of the scores counts, so they may be of any measurement of the same queries.

    Args:
        recipe: how to train; its task must measure a margin.
        scores_by_method: Scores (q, n) by name; with `top`, at least max(k) must have been kept.
        query: the dataset that the scores are of.
        k: how many examples to remove, ascending.
        queries: how many queries to try, drawn from those that are right under all selection seeds.
        select_seeds: how many trainings on all data decide which queries are right.
        seeds: over how many trainings without the removed examples a margin is averaged.
        random_floor: also remove random examples of the query's class, under the name "Random".
        stage: whose examples to remove (default: the first stage's).
        out: folder for the trainings, one subfolder per round; rerun the same call to resume.
        seed: the trainings have the seeds seed, seed + 1, ...: first those of the selection, then
            the others; and it is the seed of the choice of queries and of the random floor.
        options: `device`, `memory`, `executor`, `engine`, `progress`: as in
            `whence.retrain.measure`.
    """
    _check_settings(recipe.task, queries=queries, select_seeds=select_seeds, seeds=seeds)
    reduced, asked = recipe.stage(stage), Batches("query", query, recipe.collate)
    ks = _ascending(k, len(reduced.data), reduced.batch_size)
    _check_methods(scores_by_method, random_floor)
    for name, scores in scores_by_method.items():
        _check(name, scores, len(asked), ks[-1])
        check_same_queries(scores, asked.fingerprint(), "the query set")
    fingerprint = reduced.data.fingerprint()
    places = {
        name: (
            by_number("query_ids", scores.query_ids, "the query set"),
            columns(scores, reduced.name, len(reduced.data), "the recipe", fingerprint),
        )
        for name, scores in scores_by_method.items()
    }

    def margins_of(round_name: str, dataset: Any, trainings: Sequence[Training]) -> Floats:
        """(trainings, q); a training that diverged is NaN throughout."""
        folder = None if out is None else as_path(out) / round_name
        measurements = measure(recipe, dataset, trainings, out=folder, **options)
        return np.where(np.isfinite(measurements).all(1, keepdims=True), measurements, np.nan)

    selecting = range(seed, seed + select_seeds)
    retraining = range(selecting.stop, selecting.stop + seeds)
    full = margins_of("all-data", query, [Training(s) for s in selecting])
    chosen, right = _choose(full, queries, seed)
    orders = {}
    for name, scores in scores_by_method.items():
        down, across = places[name]
        orders[name] = _most_helpful(scores, down[chosen], across, ks[-1])
    if random_floor:
        ours, theirs = classes(reduced.task, reduced.data), classes(recipe.task, asked)
        _check_classes(ours, theirs, chosen, ks[-1])
        values = draws(seed, reduced.number, chosen, theirs, len(reduced.data), ours)
        orders[RANDOM] = np.argsort(-values, axis=1, kind="stable")[:, : ks[-1]]

    margins = {name: np.full((len(ks), len(chosen)), np.nan) for name in orders}
    rounds = [full]
    for step, count in enumerate(ks):
        subsets, tried = _round(orders, margins, count, len(reduced.data))
        if not tried:
            break
        trainings = [
            Training(s, subset, reduced.name) for subset in subsets.values() for s in retraining
        ]
        retrained = margins_of(f"without-{count}", Subset(query, chosen.tolist()), trainings)
        rounds.append(retrained)
        by_subset = retrained.reshape(len(subsets), seeds, len(chosen))
        of_subset = dict(zip(subsets, by_subset, strict=True))
        for method, row, key in tried:
            over_seeds = of_subset[key][:, row]
            if not np.isnan(over_seeds).all():
                margins[method][step, row] = np.nanmean(over_seeds)
    return SubsetRemoval(
        k=ks,
        margins=margins,
        queries=chosen,
        right=right,
        select_seeds=tuple(selecting),
        seeds=tuple(retraining),
        trainings=sum(map(len, rounds)),
        diverged=sum(int(np.isnan(measured[:, 0]).sum()) for measured in rounds),
        stage=reduced.name if len(recipe.stages) > 1 else None,
    )


def _check_settings(task: Task, **counts: int) -> None:
    if task.measurement != "margin" or not task.higher_is_better:
        raise InvalidInput(
            f"the recipe's task measures {task.measurement!r}: subset removal counts queries whose "
            "margin falls below zero; use a task that measures it, such as Classification()"
        )
    for name, count in counts.items():
        if count < 1:
            raise InvalidInput(f"{name}={count}: there must be at least one")


def _check_methods(methods: Collection[str], random_floor: bool) -> None:
    if random_floor and RANDOM in methods:
        raise InvalidInput(
            f"scores_by_method has the reserved name {RANDOM!r}: rename it, or pass "
            "random_floor=False"
        )
    if not methods and not random_floor:
        raise InvalidInput("scores_by_method is empty and random_floor=False: nothing to remove")


def _ascending(k: Sequence[int], examples: int, batch_size: int) -> tuple[int, ...]:
    ks = tuple(operator.index(number) for number in k)
    if not ks or ks[0] < 1 or any(a >= b for a, b in pairwise(ks)):
        raise InvalidInput(
            f"k={list(ks)}: give numbers of examples to remove, ascending, from 1 up"
        )
    if examples - ks[-1] < batch_size:
        raise InvalidInput(
            f"k={ks[-1]} of {examples} examples leaves {examples - ks[-1]}, less than a batch of "
            f"{batch_size}: use k<={examples - batch_size}"
        )
    return ks


def _check(name: str, scores: Scores, queries: int, most: int) -> None:
    if not isinstance(scores, Scores):
        raise InvalidType(f"the scores of {name!r} are {type(scores).__name__}: give whence.Scores")
    if scores.is_self_influence:
        raise InvalidInput(f"the scores of {name!r} are self-influence: attribute with query=")
    if scores.shape[0] != queries:
        raise InvalidInput(
            f"the scores of {name!r} are of {scores.shape[0]} queries, but query has {queries}: "
            "give the query set that was attributed"
        )
    if scores.strongest is None:
        return
    if scores.strongest.kept < most:
        raise InvalidInput(
            f"the scores of {name!r} keep only the top {scores.strongest.kept} of each query, but "
            f"k={most}: attribute with top>={most}, or without"
        )
    if scores.stage is not None and len(set(scores.stage)) > 1:
        raise InvalidInput(
            f"the scores of {name!r} keep the top of several stages together: attribute with "
            "stage=, or without top="
        )


def _choose(full: Floats, count: int, seed: int) -> tuple[Ints, int]:
    """Queries (rows) that are right under every seed, at most `count`; and how many are."""
    sound = full[~np.isnan(full[:, 0])]
    if len(sound) == 0:
        raise InvalidInput(
            f"all {len(full)} trainings on all data diverged: the recipe does not train"
        )
    right = np.flatnonzero((sound > 0).all(0))
    if len(right) == 0:
        raise InvalidInput(
            f"none of the {full.shape[1]} queries is right under all {len(sound)} seeds: train "
            "better, or give other queries"
        )
    if len(right) < count:
        warn(
            f"only {len(right)} of the {full.shape[1]} queries are right under all {len(sound)} "
            f"seeds: trying those instead of {count}",
            stacklevel=3,
        )
    random = np.random.default_rng(seed)
    return np.sort(random.permutation(right)[:count]), len(right)


def _round(
    orders: Mapping[str, Ints], margins: Mapping[str, Floats], count: int, examples: int
) -> tuple[dict[bytes, Ints], list[tuple[str, int, bytes]]]:
    """The subsets without `count` examples, each once, and the tries: (method, query, subset)."""
    subsets: dict[bytes, Ints] = {}
    tried = []
    for method, order in orders.items():
        flipped = (np.nan_to_num(margins[method]) < 0).any(0)
        for row in np.flatnonzero(~flipped):
            removed = np.sort(order[row, :count])
            key = removed.tobytes()
            if key not in subsets:
                subsets[key] = np.delete(np.arange(examples), removed)
            tried.append((method, int(row), key))
    return subsets, tried


def _most_helpful(scores: Scores, rows: Ints, across: Ints, count: int) -> Ints:
    """The examples (queries, count) that helped each query most, most helpful first."""
    if scores.strongest is not None:
        return np.array([scores.helpful(int(row), count).examples for row in rows])
    orders = np.empty((len(rows), count), np.int64)
    sign = -1.0 if scores.higher_is_better else 1.0
    for place, row in enumerate(rows):
        values = np.asarray(scores.values[row], dtype=np.float64)[across]
        if np.isnan(values).any():
            raise InvalidInput(
                f"query {row} has {int(np.isnan(values).sum())} scores by {scores.method} that are "
                "not numbers: they cannot be ranked"
            )
        orders[place] = np.argsort(sign * values, kind="stable")[:count]
    return orders


def _check_classes(ours: Labels | None, theirs: Labels | None, rows: Ints, most: int) -> None:
    """There must be enough examples of each query's class to remove at random."""
    if ours is None or theirs is None:
        return
    sizes = np.array([(ours == theirs[row]).sum() for row in rows])
    least = int(sizes.argmin())
    if sizes[least] < most:
        raise InvalidInput(
            f"k={most}, but class {theirs[rows[least]]} of query {rows[least]} has only "
            f"{sizes[least]} training examples, and the random floor removes examples of the "
            f"query's class: use k<={sizes[least]}, or random_floor=False"
        )
