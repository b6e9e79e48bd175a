"""Choosing training data by scores, and retraining to see whether the choice was good.

    h(m)  mean over the choosing queries of what m did for them; −self-influence without queries
    S     the examples with the highest h
    R_s   as many examples at random, another draw for each seed s
    gain  mean over seeds of f̄(S, s) − f̄(R_s, s), with f̄ the mean over the judging queries

Queries that choose do not judge.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import Subset

from whence.data import Batches
from whence.errors import InvalidInput, InvalidType, finite, optional, whole
from whence.evaluate.groups import Floats, Ints, check_same_queries, columns
from whence.retrain import Training, measure
from whence.retrain.measure import TrainingOptions
from whence.retrain.recipe import Recipe
from whence.scores import Scores
from whence.scores.means import mean_scores
from whence.table import Table, Tabled, estimate

ALL, SELECTED, RANDOM = "all examples", "selected", "as many at random"


@dataclass(frozen=True, eq=False, repr=False)
class Selection(Tabled):
    """Examples chosen by scores, and what retraining on them did.

    Attributes:
        kept: (n,) which examples were selected.
        help: (n,) the mean score that ranked them, higher is better.
        measured: the mean measurement of the judging queries by seed, (R,): of models trained on
            all examples, on the selected ones, and on as many at random. NaN where one diverged.
        accuracy: the share of judging queries that the same models predict correctly, if the task
            has a `correct`, else None.
        judging: the number of queries that judge.
        method, measurement, unit, higher_is_better: of the scores.
    """

    kept: NDArray[np.bool_]
    help: Floats
    measured: dict[str, Floats]
    judging: int
    method: str
    measurement: str
    unit: str
    higher_is_better: bool
    accuracy: dict[str, Floats] | None = None

    @property
    def dropped(self) -> list[int]:
        """The examples that were not selected, the worst first."""
        left = np.flatnonzero(~self.kept)
        return [int(m) for m in left[np.argsort(self.help[left], kind="stable")]]

    def difference(self, other: str = RANDOM) -> tuple[float, tuple[float, float]]:
        """Selected minus other, paired by seed: the mean, and its 95 % interval over seeds.

        Positive is better, whatever the measurement. One seed has no interval (NaN).
        """
        sign = 1.0 if self.higher_is_better else -1.0
        pairs = sign * (self.measured[SELECTED] - self.measured[other])
        pairs = pairs[np.isfinite(pairs)]
        if not len(pairs):
            raise InvalidInput("all trainings diverged: lower the learning rate of the recipe")
        if len(pairs) == 1:
            return float(pairs[0]), (np.nan, np.nan)
        with optional("the interval needs SciPy", "eval"):
            from scipy.special import stdtrit
        half = stdtrit(len(pairs) - 1, 0.975) * pairs.std(ddof=1) / len(pairs) ** 0.5
        return float(pairs.mean()), (float(pairs.mean() - half), float(pairs.mean() + half))

    def table(self) -> Table:
        """The mean measurement of each choice, and how much better the selection is."""
        sizes = {ALL: len(self.kept), SELECTED: int(self.kept.sum())}
        rows = []
        for name, values in self.measured.items():
            better = "" if name == SELECTED else estimate(*self.difference(name))
            size = sizes.get(name, sizes[SELECTED])
            row = [name, f"{size:,}", f"{np.nanmean(values):.4g}", better]
            if self.accuracy is not None:
                row.insert(2, f"{np.nanmean(self.accuracy[name]):.1%}")
            rows.append(row)
        heads = ["trained on", "examples", f"mean {self.measurement}", "selected is better by"]
        if self.accuracy is not None:
            heads.insert(2, "accuracy")
        seeds = len(self.measured[SELECTED])
        note = (
            f"measured on {self.judging} queries not used for the choice, {seeds} seeds; "
            "95 % intervals"
        )
        return Table(heads, rows, title=f"Selected by {self.method}", note=note)


def select(
    recipe: Recipe,
    scores: Scores,
    query: Any,
    *,
    drop: float | None = None,
    keep: float | None = None,
    test: Any = None,
    duplicate_of: ArrayLike | None = None,
    seeds: int | Sequence[int] = 5,
    stage: str | None = None,
    seed: int = 0,
    out: str | os.PathLike[str] | None = None,
    **options: Unpack[TrainingOptions],
) -> Selection:
    """Drop the training examples that harm the queries most, retrain, and compare with chance.

    Args:
        recipe: how to train.
        scores: of `query`, or self-influence, which drops the most memorised examples.
        query: the queries. Without `test`, a random half of them chooses and the others judge.
        drop: how many examples to leave out: a number, or a share below 1.
        keep: how many to train on instead.
        test: other examples that judge; then all queries choose.
        duplicate_of: (n,) the example that each one nearly duplicates, its own index if none.
            Duplicates are dropped before any other example.
        seeds: number of trainings of each kind, or their seeds.
        stage: whose examples to choose from (default: the recipe's first).
        seed: seed of the halves and of the random control.
        out: folder that keeps finished trainings. Repeat the same call to resume.
        options: `device`, `memory`, `executor`, `engine`, `progress`: as in `retrain.measure`.
    """
    if not isinstance(recipe, Recipe) or not isinstance(scores, Scores):
        kinds = f"{type(recipe).__name__} and {type(scores).__name__}"
        raise InvalidType(f"select({kinds}): give a whence.Recipe and whence.Scores")
    about = recipe.stage(stage)
    count = len(about.data)
    where = columns(
        scores,
        about.name if scores.stage else None,
        count,
        "the recipe",
        about.data.fingerprint(),
    )
    if scores.provenance.get("query") and not scores.is_self_influence:
        asked = Batches("query", query, recipe.collate)
        check_same_queries(scores, asked.fingerprint(), "the query set")
    size = _size(drop, keep, count)
    random = np.random.default_rng(seed)
    choosing, judging = _halves(scores, query, test, random)
    sign = 1.0 if scores.higher_is_better else -1.0
    sign = -sign if scores.is_self_influence else sign
    help_ = np.nan_to_num(sign * mean_scores(scores, choosing)[where], nan=-np.inf)
    selected = np.zeros(count, dtype=bool)
    selected[_order(help_, duplicate_of)[:size]] = True
    named = seeds if isinstance(seeds, Sequence) else range(whole("seeds", seeds))
    all_seeds = [whole("seeds", s) for s in named]
    if not all_seeds:
        raise InvalidInput(f"seeds={seeds!r}: train each kind at least once")
    trainings = [Training(s) for s in all_seeds] + [
        Training(s, selected, about.name) for s in all_seeds
    ]
    for s in all_seeds:
        mask = np.zeros(count, dtype=bool)
        mask[random.permutation(count)[:size]] = True
        trainings.append(Training(s, mask, about.name))
    what = ["measurements"] + ["correct"] * hasattr(recipe.task, "correct")
    rows = measure(recipe, judging, trainings, out=out, what=what, **options)
    kinds = (ALL, SELECTED, RANDOM)
    means = rows.reshape(len(kinds), len(all_seeds), len(what), -1).mean(3)  # (3, R, k)
    means[np.isnan(means).any(2)] = np.nan  # diverged
    by_kind = [dict(zip(kinds, means[:, :, k], strict=True)) for k in range(len(what))]
    return Selection(
        selected,
        help_,
        by_kind[0],
        len(judging),
        scores.call,
        scores.measurement,
        scores.unit,
        scores.higher_is_better,
        by_kind[1] if len(what) > 1 else None,
    )


def _size(drop: float | None, keep: float | None, count: int) -> int:
    """How many examples to train on."""
    if (drop is None) == (keep is None):
        raise InvalidInput("give either drop= or keep=: a number of examples, or a share below 1")
    given, name = (drop, "drop") if keep is None else (keep, "keep")
    assert given is not None
    given = finite(name, given)
    number = round(given * count) if 0 < given < 1 else int(given)
    if (number != given and not 0 < given < 1) or not 0 < number < count:
        raise InvalidInput(
            f"{name}={given}: give a number of the {count} examples, or a share between 0 and 1"
        )
    return number if keep is not None else count - number


def _halves(
    scores: Scores, query: Any, test: Any, random: np.random.Generator
) -> tuple[list[int] | None, Any]:
    """The rows that choose (None for all), and the examples that judge."""
    if test is not None:
        return None, test
    if scores.is_self_influence:
        return None, query
    rows = scores.shape[0]
    if rows < 2:
        raise InvalidInput("one query cannot both choose and judge: give test=, or more queries")
    order = random.permutation(rows)
    judging = [int(scores.query_ids[row]) for row in sorted(order[rows // 2 :])]
    return sorted(order[: rows // 2].tolist()), Subset(query, judging)


def _order(help_: Floats, duplicate_of: ArrayLike | None) -> Ints:
    """The examples, the best first; near-duplicates of others last."""
    order = np.argsort(-help_, kind="stable")
    if duplicate_of is None:
        return order
    group = np.asarray(duplicate_of, np.int64)
    if group.shape != help_.shape:
        raise InvalidInput(f"duplicate_of has shape {group.shape}, not ({len(help_)},)")
    _, first = np.unique(group[order], return_index=True)  # the best of each group
    leads = np.zeros(len(order), dtype=bool)
    leads[first] = True
    return np.concatenate([order[leads], order[~leads]])
