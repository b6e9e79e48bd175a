"""What a comparison of forms leaves behind: each form's sums over the retrained subsets.

Scores (q, n) are judged, scaled and combined by their sums over subsets alone, apart from each
query's standard deviation over the examples. Sums, deviations and measurements of a task fit into
one small file, so they can be brought home from a GPU machine, and every later analysis needs
neither the machine nor the datasets.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.engine.trainings import FIRST_SMALL
from experiments.tasks import ALL
from experiments.tasks.forms import CHOSEN_ON
from whence.evaluate import Truth
from whence.evaluate.calibrate import check_scores
from whence.evaluate.groups import locate
from whence.persist.files import atomic
from whence.retrain.truth import draw_subsets
from whence.scores import Scores

Floats = NDArray[np.floating[Any]]
SCHEMA = 1
TRUTH = ("alpha", "seeds", "measurement", "unit", "higher_is_better", "recipe", "query")


@dataclass(frozen=True)
class Protocol:
    """What was compared on what.

    Attributes:
        task: its name.
        alpha, subsets, seeds: of the truth.
        runs, queries: how many were attributed.
        first_query, first_run, first_seed: as in `experiments.engine.trainings.First`.
        quick: the small version of the task.
    """

    task: str
    alpha: float
    subsets: int
    seeds: int
    runs: int
    queries: int
    first_query: int = 0
    first_run: int = 0
    first_seed: int = 0
    quick: bool = False

    @property
    def chosen_on(self) -> bool:
        """Whether defaults were chosen here; new queries, runs and retrainings confirm them."""
        return self.task in CHOSEN_ON and 0 in (self.first_query, self.first_run, self.first_seed)

    @property
    def file_name(self) -> str:
        name = self.task + ("-quick" if self.quick else "")
        return (
            f"{name}-a{self.alpha:g}-m{self.subsets}x{self.seeds}-q{self.first_query}-"
            f"{self.queries}-r{self.first_run}-{self.runs}-s{self.first_seed}.npz"
        )


@dataclass
class Sums:
    """Sums of every form's scores over the subsets of two truths, under one protocol.

    Attributes:
        protocol: what was compared on what.
        truth: a description of the truth that judges: the attributes of `Truth` in `TRUTH`.
        about: machine, device, and seconds of the trainings.
        measured: (M, R, q) measurements of the truth that judges.
        small: (m, 1, q) measurements of a few more retrainings.
        sums: by form, (K, q, M + m): of each run's scores, minus each query's mean over the subsets
            of a truth.
        deviations: by form, (K + 1, q): the standard deviation of each run's scores over the
            examples, then that of the runs' mean.
        forms: by form, its method as text and its seconds for one run.
    """

    protocol: Protocol
    truth: dict[str, Any]
    about: dict[str, Any]
    measured: Floats
    small: Floats
    sums: dict[str, Floats] = field(default_factory=dict)
    deviations: dict[str, Floats] = field(default_factory=dict)
    forms: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(
        self,
        name: str,
        scores: Sequence[Scores],
        truths: Sequence[Truth],
        method: str,
        seconds: float,
    ) -> None:
        """Add a form's scores, one of each run. Refuses scores that do not fit both truths."""
        runs = []
        for one in scores:
            for truth in truths:
                check_scores(one, truth, name)
                place = np.ix_(*locate(one, truth))
            runs.append(one.values[place].astype(np.float64))
        masks = [truth.masks.T.astype(np.float64) for truth in truths]
        parts = [[values @ mask for mask in masks] for values in runs]
        self.sums[name] = np.stack(
            [np.concatenate([p - p.mean(1, keepdims=True) for p in both], 1) for both in parts]
        ).astype(np.float32)
        mean = np.mean(runs, axis=0)
        self.deviations[name] = np.stack([values.std(1) for values in (*runs, mean)])
        self.forms[name] = {"method": method, "seconds": seconds}

    def save(self, folder: Path) -> Path:
        """Write one file, without pickles."""
        about = {
            "schema": SCHEMA,
            "protocol": asdict(self.protocol),
            "truth": self.truth,
            "about": self.about,
            "forms": self.forms,
        }
        arrays: dict[str, Any] = {"measured": self.measured, "small": self.small}
        for k, name in enumerate(self.forms):
            arrays |= {f"sums{k}": self.sums[name], f"deviations{k}": self.deviations[name]}
        arrays["json"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / self.protocol.file_name
        with atomic(path) as temporary, open(temporary, "wb") as file:
            np.savez_compressed(file, **arrays)
        return path

    @classmethod
    def load(cls, path: Path) -> Sums:
        with np.load(path, allow_pickle=False) as arrays:
            about = json.loads(arrays["json"].tobytes())
            if about["schema"] != SCHEMA:
                raise ValueError(f"{path} has schema {about['schema']}, not {SCHEMA}: make it anew")
            return cls(
                Protocol(**about["protocol"]),
                about["truth"],
                about["about"],
                arrays["measured"],
                arrays["small"],
                {name: arrays[f"sums{k}"] for k, name in enumerate(about["forms"])},
                {name: arrays[f"deviations{k}"] for k, name in enumerate(about["forms"])},
                about["forms"],
            )

    def truths(self, examples: int) -> list[Truth]:
        """The truth that judges and the other retrainings, with their subsets drawn again."""
        first = self.protocol.first_seed
        other = self.truth | {"alpha": 0.5, "seeds": [FIRST_SMALL + first]}
        given = (self.truth, self.measured, first), (other, self.small, FIRST_SMALL + first)
        stage: Any = {"stage": ALL[self.protocol.task].stage}
        return [
            Truth(draw_subsets(examples, about["alpha"], len(m), seed), m, **about, **stage)
            for about, m, seed in given
        ]

    # --- as Scores and Truths -------------------------------------------------------------------

    def judge(self) -> Truth:
        """The truth that judges, of stand-in examples: subset j contains example j alone."""
        return self._truth(self.measured, 0, self.truth)

    def retrainings(self, count: int) -> list[Truth]:
        """The other retrainings in disjoint groups of `count`: halves of the data, one seed."""
        other = self.truth | {"alpha": 0.5, "seeds": [0]}
        starts = range(0, len(self.small) - count + 1, count)
        return [
            self._truth(self.small[k : k + count], len(self.measured) + k, other) for k in starts
        ]

    def scores(self, name: str) -> list[Scores]:
        """Scores of stand-in examples with a form's sums, one of each run."""
        each = zip(self.sums[name], self.deviations[name][:-1], strict=True)
        return [self._scores(name, sums, deviations) for sums, deviations in each]

    def mean(self, name: str) -> Scores:
        """The mean over the runs."""
        mean = self._scores(name, self.sums[name].mean(0), self.deviations[name][-1])
        mean.diagnostics["runs"] = len(self.sums[name])
        return mean

    def _truth(self, measurements: Floats, start: int, about: dict[str, Any]) -> Truth:
        masks = np.zeros((len(measurements), self._examples), bool)
        masks[np.arange(len(masks)), start + np.arange(len(masks))] = True
        return Truth(masks, measurements, **about)

    @property
    def _examples(self) -> int:
        return len(self.measured) + len(self.small) + 2

    def _scores(self, name: str, sums: Floats, deviations: Floats) -> Scores:
        """Two more examples, in no subset, give the row c times its standard deviation, with one c
        for all forms: only ratios of deviations matter."""
        squares = (np.asarray(sums, np.float64) ** 2).sum(1)
        rest = np.maximum(self._examples * (self._scale * deviations) ** 2 - squares, 0.0)
        pair = np.sqrt(rest / 2)[:, None] * [1.0, -1.0]
        return Scores(
            np.concatenate([sums, pair], 1),
            method=name,
            measurement=self.truth["measurement"],
            unit=self.truth["unit"],
            higher_is_better=self.truth["higher_is_better"],
            provenance={key: self.truth[key] for key in ("recipe", "query")},
        )

    @property
    def _scale(self) -> float:
        """The smallest c for which all rows have room for a pair."""
        largest = 0.0
        for name, sums in self.sums.items():
            every = np.concatenate([sums, sums.mean(0, keepdims=True)])
            squares = (every.astype(np.float64) ** 2).sum(2)
            deviations = self.deviations[name]
            some = deviations > 0
            ratios = squares[some] / (self._examples * deviations[some] ** 2)
            largest = max(largest, float(ratios.max(initial=0.0)))
        return float(np.sqrt(largest))
