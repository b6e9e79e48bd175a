"""Leave-one-out retraining, of one seed or expected over several (appendix B.1).

    values[q, m] = mean over the seeds of f(q; all data, seed) - f(q; all data but m, seed)

The definition that other methods approximate; what a seed does is the same with m and without, as
far as training is not chaotic. The sign is that of f(with m) - f(without m).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from operator import index
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Subset

from whence.errors import InvalidIndex, InvalidInput, InvalidType
from whence.retrain import Training, measure
from whence.retrain.contrast import sound_pairs, standard_errors, without
from whence.retrain.recipe import Recipe
from whence.scores import Scores
from whence.study import Study


class LeaveOneOut:
    """Trains once with everything, and once without each example; for every seed.

    Args:
        recipe: how to train.
        examples: which to leave out (default: each, which takes n + 1 trainings for every seed).
        seeds: how many, or the seeds themselves. One is the single leave-one-out; several are its
            expectation, with standard errors.
        stage: whose examples (default: the first stage's).
        exclude_diverged: leave out pairs of trainings of which one diverged, rather than refuse.
    """

    def __init__(
        self,
        recipe: Recipe,
        examples: Sequence[int] | None = None,
        seeds: int | Sequence[int] = 1,
        stage: str | None = None,
        exclude_diverged: bool = False,
    ) -> None:
        if not isinstance(recipe, Recipe):
            raise InvalidType(f"recipe is a {type(recipe).__name__}: give a whence.Recipe")
        self._recipe, self._stage = recipe, recipe.stage(stage)
        self.stage, self.exclude_diverged = self._stage.name, exclude_diverged
        self.seeds = list(range(seeds)) if isinstance(seeds, int) else [index(s) for s in seeds]
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise InvalidInput(f"seeds={seeds}: give at least one, and none twice")
        count = len(self._stage.data)
        self.examples = None if examples is None else [index(e) for e in examples]
        wrong = [e for e in self.examples or () if not 0 <= e < count]
        if wrong:
            raise InvalidIndex(f"examples={wrong[:3]} are not in the training data: it has {count}")
        if self.examples is not None and len(set(self.examples)) < max(1, len(self.examples)):
            raise InvalidInput("examples are empty, or name one twice: give each of them once")

    def attribute(
        self,
        study: Study | None = None,
        query: Any = None,
        *,
        out: str | os.PathLike[str] | None = None,
        device: torch.device | str | None = None,
        memory: int | str | None = None,
        executor: str | None = None,
        engine: str = "auto",
        progress: bool = True,
    ) -> Scores:
        """Scores of the examples, (q, examples), by retraining.

        With several seeds, `spread` holds standard errors of the mean over them.

        Args:
            study: only to be sure that its training data is the recipe's.
            query: map-style dataset built like the training data; None is self-influence, each
                example's effect on its own measurement, (examples,).
            out: folder for trainings and scores; the same call goes on where it stopped.
            device, memory, executor, engine, progress: as in `whence.retrain.measure`.
        """
        recipe, data = self._recipe, self._stage.data
        self._check(study)
        examples = np.arange(len(data)) if self.examples is None else np.array(self.examples)
        if query is None and self.stage != recipe.stages[-1].name:
            raise InvalidInput(
                f"examples of stage {self.stage!r} are not measured at the end of training, the "
                f"last stage {recipe.stages[-1].name!r} has another task: give query="
            )
        asked = Subset(data.dataset, examples.tolist()) if query is None else query
        rows = measure(
            recipe,
            asked,
            [
                *(Training(seed) for seed in self.seeds),
                *(
                    Training(seed, without(m, len(data)), self.stage)
                    for seed in self.seeds
                    for m in examples.tolist()
                ),
            ],
            out=None if out is None else Path(out) / "trainings",
            device=device,
            memory=memory,
            executor=executor,
            engine=engine,
            progress=progress,
        )
        seeds = len(self.seeds)
        whole, parts = rows[:seeds, None], rows[seeds:].reshape(seeds, len(examples), -1)
        effects = (whole - parts).swapaxes(1, 2)  # (seeds, q, examples)
        counted = sound_pairs(np.isfinite(effects), examples, self.exclude_diverged)
        if query is None:
            effects = effects.diagonal(axis1=1, axis2=2)
        errors = standard_errors(effects, counted) if seeds > 1 else None
        return self._scores(np.nanmean(effects, 0), errors, examples, len(rows), counted, out)

    def _scores(
        self,
        values: NDArray[np.float64],
        errors: NDArray[np.float64] | None,
        examples: NDArray[np.int64],
        trainings: int,
        counted: NDArray[np.int64],
        out: str | os.PathLike[str] | None,
    ) -> Scores:
        recipe, task = self._recipe, self._recipe.task
        scores = Scores(
            values,
            method="LeaveOneOut",
            settings={k: v for k, v in vars(self).items() if not k.startswith("_")},
            measurement=task.measurement,
            unit=task.unit,
            higher_is_better=task.higher_is_better,
            train_ids=examples,
            stage=[self.stage] * len(examples) if len(recipe.stages) > 1 else None,
            spread=errors,
            diagnostics={
                "spread": None if errors is None else "standard error of the mean over seeds",
                "trainings": trainings,
                "diverged": len(self.seeds) * len(examples) - int(counted.sum()),
            },
            provenance={
                "recipe": recipe.fingerprint,
                "train": {self.stage: self._stage.data.fingerprint()},
                "collated": self._stage.data.collate is not None,
            },
        )
        if out is not None:
            scores.save(out)
        return scores

    def _check(self, study: Study | None) -> None:
        """Refuse a study of other training data."""
        if study is None:
            return
        theirs = study.data.get(self.stage if len(self._recipe.stages) > 1 else study.stages[0])
        if theirs is None or theirs.fingerprint() != self._stage.data.fingerprint():
            raise InvalidInput(
                f"the study's training data is not that of the recipe's stage {self.stage!r}: give "
                "a study of a run of this recipe, or none"
            )

    def __repr__(self) -> str:
        return (
            f"LeaveOneOut(examples={self.examples}, seeds={self.seeds}, stage={self.stage!r}, "
            f"exclude_diverged={self.exclude_diverged})"
        )
