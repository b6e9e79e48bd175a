"""Leave-one-out retraining, of one seed or expected over several (appendix B.1).

    values[q, m] = mean over the seeds of f(q; all data, seed) - f(q; all data but m, seed)

This is the definition that other methods approximate. A seed has the same effect with m and without
it, unless training is chaotic. The sign is that of f(with m) - f(without m).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from whence.errors import InvalidIndex, InvalidInput, InvalidType, collect_warnings, whole
from whence.persist.files import as_path
from whence.persist.identity import call_text, defaults_of
from whence.retrain import contrast, measure
from whence.retrain.recipe import Recipe
from whence.scores import Scores
from whence.study import Study


class LeaveOneOut:
    """Trains once with everything, and once without each example; for every seed.

    Args:
        recipe: how to train.
        examples: which to leave out (default: each, which takes n + 1 trainings for every seed).
        seeds: their number, or the seeds themselves. Several give the expectation over seeds, with
            standard errors.
        stage: whose examples to leave out (default: the first stage's).
        exclude_diverged: skip pairs with a diverged training instead of raising an error.
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
        self.examples = None if examples is None else [whole("examples", e) for e in examples]
        named = range(seeds) if isinstance(seeds, int) else seeds
        self.seeds = [whole("seeds", seed) for seed in named]
        self.stage, self.exclude_diverged = self._stage.name, exclude_diverged
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise InvalidInput(f"seeds={seeds}: give at least one, and none twice")
        count = len(self._stage.data)
        wrong = [e for e in self.examples or () if not 0 <= e < count]
        if wrong:
            raise InvalidIndex(f"examples={wrong[:3]} are not in the training data: it has {count}")
        if self.examples is not None and len(set(self.examples)) < max(1, len(self.examples)):
            raise InvalidInput("examples are empty, or name one twice: give each of them once")

    @collect_warnings()
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
            study: checked to have the recipe's training data, and not used otherwise.
            query: map-style dataset built like the training data; None is self-influence, each
                example's effect on its own measurement, (examples,).
            out: folder for trainings and scores; rerun the same call to resume.
            device, memory, executor, engine, progress: as in `whence.retrain.measure`.
        """
        recipe, task, data = self._recipe, self._recipe.task, self._stage.data
        if study is not None:
            self._check(study)
        examples = np.arange(len(data)) if self.examples is None else np.array(self.examples)
        if query is None and self.stage != recipe.stages[-1].name:
            raise InvalidInput(
                f"examples of stage {self.stage!r} are not measured at the end of training, the "
                f"last stage {recipe.stages[-1].name!r} has another task: give query="
            )
        measured = measure(
            recipe,
            torch.utils.data.Subset(data.dataset, examples.tolist()) if query is None else query,
            contrast.leave_one_out_trainings(self.seeds, examples, len(data), self.stage),
            out=None if out is None else as_path(out) / "trainings",
            device=device,
            memory=memory,
            executor=executor,
            engine=engine,
            progress=progress,
        )
        effects = contrast.leave_one_out_effects(measured, len(self.seeds), len(examples))
        counted = contrast.sound_pairs(np.isfinite(effects), examples, self.exclude_diverged)
        if query is None:
            effects = effects.diagonal(axis1=1, axis2=2)
        several = len(self.seeds) > 1
        scores = Scores(
            np.nanmean(effects, 0),
            method="LeaveOneOut",
            settings=self._settings(),
            measurement=task.measurement,
            unit=task.unit,
            higher_is_better=task.higher_is_better,
            train_ids=examples,
            stage=[self.stage] * len(examples) if len(recipe.stages) > 1 else None,
            spread=contrast.standard_errors(effects, counted) if several else None,
            diagnostics={
                "spread": "standard error of the mean over seeds" if several else None,
                "trainings": len(measured),
                "diverged": len(self.seeds) * len(examples) - int(counted.sum()),
            },
            provenance={
                "recipe": recipe.fingerprint,
                "train": {self.stage: data.fingerprint()},
                "collated": data.collate is not None,
            },
        )
        if out is not None:
            scores.save(out)
        return scores

    def _check(self, study: Study) -> None:
        """Refuse a study with other training data."""
        train = study.data.get(self.stage if len(self._recipe.stages) > 1 else study.stages[0])
        if train is None or train.fingerprint() != self._stage.data.fingerprint():
            raise InvalidInput(
                f"the study's training data is not that of the recipe's stage {self.stage!r}: give "
                "a study of a run of this recipe, or none"
            )

    def _settings(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def __repr__(self) -> str:
        return call_text("LeaveOneOut", self._settings(), defaults_of(type(self)))
