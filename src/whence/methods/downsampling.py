"""Empirical influence (Feldman & Zhang, 2020), or Downsampling: an estimate from retraining alone.

    values[q, m] = mean of f(q) over the subsets with m - mean of f(q) over those without it

(appendix B.4, with the other sign: this is f(with m) - f(without m)). Nothing is approximated, but
every other difference between two subsets is noise: hundreds of trainings give a rough answer. All
subsets have the same size, so one example's presence is another's absence: scores are relative to
the mean of the others'.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whence.data import Batches
from whence.errors import InvalidInput, collect_warnings
from whence.retrain import Truth
from whence.retrain.contrast import Floats, differences, mean_of_sound, unknown_examples
from whence.scores import Scores
from whence.study import Study
from whence.world import World


class Downsampling:
    """The difference between models that were trained with and without an example.

    Args:
        truth: measurements on random subsets (`whence.evaluate.ground_truth`), or their folder. Do
            not use the truth that will judge the scores.
        exclude_diverged: skip trainings that diverged (and subsets of which all did) instead of
            raising an error.
    """

    def __init__(
        self, truth: Truth | str | os.PathLike[str], exclude_diverged: bool = False
    ) -> None:
        self.truth = truth if isinstance(truth, Truth) else Truth.load(truth)
        self.exclude_diverged = exclude_diverged

    @collect_warnings()
    def attribute(
        self,
        study: Study | None = None,
        query: Any = None,
        *,
        out: str | os.PathLike[str] | None = None,
    ) -> Scores:
        """Scores of every example of the truth's stage for every query of the truth.

        `spread` holds the standard errors of the difference of two means. An example in all
        subsets, or in none, scores 0 with an infinite standard error; a warning lists these.

        Args:
            study, query: checked against the truth's training data and queries, if given.
            out: folder to save the scores in.
        """
        truth = self.truth
        self._check(study, query)
        masks, measured, diverged = self._sound()
        subsets, examples = masks.shape
        unknown = unknown_examples(masks)
        values, errors = differences(masks, measured)
        for columns in unknown.values():
            values[:, columns], errors[:, columns] = 0.0, np.inf
        scores = Scores(
            values,
            method="Downsampling",
            settings={"exclude_diverged": self.exclude_diverged},
            measurement=truth.measurement,
            unit=truth.unit,
            higher_is_better=truth.higher_is_better,
            stage=[truth.stage] * examples if truth.stage is not None else None,
            spread=errors,
            diagnostics={
                "spread": "standard error of the difference of two means over subsets",
                "subsets": subsets,
                "seeds": truth.seeds,
                "alpha": truth.alpha,
                "diverged": diverged,
                **unknown,
            },
            provenance={"recipe": truth.recipe, "query": truth.query},
        )
        if out is not None and World.current().first:
            scores.save(out)
        return scores

    def _check(self, study: Study | None, query: Any) -> None:
        """Refuse a study or queries other than the truth's."""
        truth = self.truth
        examples, queries = truth.masks.shape[1], truth.measurements.shape[2]
        if study is not None:
            stage = truth.stage or study.stages[0]
            if stage not in study.stages:
                raise InvalidInput(
                    f"the truth is of stage {stage!r}, and the study has {study.stages}"
                )
            if len(study.data[stage]) != examples:
                raise InvalidInput(
                    f"the truth is of {examples} training examples, and the study has "
                    f"{len(study.data[stage])}: give the truth of the study's own data"
                )
        if query is not None:
            data = Batches("query", query, None if study is None else study.collate)
            if len(data) != queries or (truth.query and data.fingerprint() != truth.query):
                raise InvalidInput(
                    f"the truth has measured {queries} other queries than these {len(data)}: make "
                    "one with them, or leave query out to use its own"
                )

    def _sound(self) -> tuple[NDArray[np.bool_], Floats, int]:
        """(masks (M, n), mean measurements (M, q), number of diverged trainings)."""
        truth = self.truth
        diverged = int(truth.diverged.sum())
        if not diverged:
            return truth.masks, truth.means, 0
        if not self.exclude_diverged:
            raise InvalidInput(
                f"{diverged} of the truth's {truth.diverged.size} trainings diverged: leave them "
                "out with exclude_diverged=True"
            )
        sound = ~truth.diverged
        left = sound.any(1)
        return truth.masks[left], mean_of_sound(truth.measurements[left], sound[left]), diverged

    def __repr__(self) -> str:
        return f"Downsampling({self.truth!r}, exclude_diverged={self.exclude_diverged})"
