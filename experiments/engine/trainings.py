"""The trainings behind a task's evaluation: runs to attribute, and retrained subsets to judge by.

Everything is written into a work folder, and opened from there the next time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset, Subset

import whence
from experiments.tasks import Experiment, Scale
from whence.data import Batches
from whence.evaluate import ground_truth
from whence.layers.choose import Chooser, matrices
from whence.layers.passes import products_as
from whence.retrain import record

# Seeds; the truth that judges uses smaller ones.
FIRST_RUN, FIRST_HALF, FIRST_DOWN, FIRST_SMALL = 1000, 2000, 3000, 4000


@dataclass(frozen=True)
class First:
    """Where a task's numbering starts: another start gives new queries, runs and retrainings.

    Attributes:
        query: the first of the held-out examples that is a query.
        run: added to the seeds of the attributed runs.
        seed: added to the seeds of the retrainings; also determines their subsets.
    """

    query: int = 0
    run: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, limit in (("run", self.run, 1000), ("seed", self.seed, 900)):
            if not 0 <= value < limit:
                raise ValueError(
                    f"first {name} {value}: choose 0 to {limit - 1}, so that the seeds of runs and "
                    "retrainings differ"
                )


class Trainings:
    """Runs and truths of one task.

    Args:
        experiment: the task.
        quick: the small version.
        scale: sizes (default: the experiment's).
        work: folder for trainings.
        device: where to train.
        tf32: train with matrix products rounded to TF32 on a GPU.
        memory: limit for models trained at the same time.
        progress: show progress bars.
        first: where the numbering of queries, runs and retrainings starts.

    Attributes:
        name: the task's name, with "-quick" for the small version.
        query: the attributed queries.
        measured: the queries that truths measure; the first ones are the attributed ones.
        examples: N, of the stage that is attributed to.
        seconds: of all trainings, by what they were for.
    """

    def __init__(
        self,
        experiment: Experiment,
        *,
        quick: bool = False,
        scale: Scale | None = None,
        work: Path,
        device: str = "cpu",
        tf32: bool = False,
        memory: int | str | None = None,
        progress: bool = False,
        first: First | None = None,
    ) -> None:
        self.experiment, self.quick, self.device = experiment, quick, device
        self.tf32, self.memory, self.progress = tf32, memory, progress
        self.first = first or First()
        self.scale = scale or (experiment.quick if quick else experiment.full)
        self.name = experiment.name + ("-quick" if quick else "")
        self.work = Path(work) / self.name
        self.recipe, held_out = experiment.recipe(quick)
        start, end = self.first.query, len(held_out)
        if not 0 <= start < end:
            raise ValueError(f"first query {start}: {experiment.title} has {end} held-out examples")
        queries = min(self.scale.queries, end - start)
        measured = max(queries, min(self.scale.measured, end - start))
        self.query: Dataset[Any] = Subset(held_out, range(start, start + queries))
        self.measured = Subset(held_out, range(start, start + measured))
        self.examples = len(self.recipe.stage(experiment.stage).data)
        self.blocks = experiment.quick_blocks if quick else None
        # those of the paper, so that its rows and ours differ in the method only
        self.layers = matrices if self.blocks is None else whence.layers.last_blocks(self.blocks)
        self.seconds: dict[str, Any] = {}
        self._truths: dict[float, Any] = {}
        self._runs: dict[tuple[bool, str], list[whence.Run]] = {}

    def truth(self, alpha: float = 0.5, recipe: Any = None, name: str = "") -> Any:
        """M subsets × R seeds, for the attributed queries; α = 1 leaves out one example."""
        share = 1 - 1 / self.examples if alpha == 1.0 else alpha
        seeds = range(self.first.seed, self.first.seed + self.scale.seeds)
        name = name or format(alpha, "g")
        return self._retrained(f"truth-{name}", share, self.scale.subsets, seeds, recipe)

    def single_truth(self, alpha: float, k: int = 0) -> Any:
        """The truth of the k-th run's model alone: its training again, examples dropped in
        place."""
        seed = self.run_seed(k)
        return self._retrained(
            f"single-{alpha:g}-{seed}", alpha, self.scale.subsets, [seed], in_place=True
        )

    def halves(self, models: int) -> Any:
        """Halves of the data with one seed, none of them among the `truth`'s or the small one's."""
        return self._retrained("halves", 0.5, models, [FIRST_DOWN + self.first.seed])

    def small_truth(self, subsets: int) -> Any:
        """Halves of the data with one seed each, none of them among the `truth`'s."""
        return self._retrained("small", 0.5, subsets, [FIRST_SMALL + self.first.seed])

    def _retrained(
        self,
        name: str,
        alpha: float,
        subsets: int,
        seeds: Sequence[int],
        recipe: Any = None,
        in_place: bool = False,
    ) -> Any:
        if self.first.seed:
            name += f"-seed-{self.first.seed}"
        if self.first.query:
            name += f"-query-{self.first.query}"
        with self.training(name.replace("-", " ", 1)):
            truth = ground_truth(
                recipe or self.recipe,
                self.measured,
                alpha,
                subsets,
                seeds,
                self.experiment.stage,
                in_place=in_place,
                out=self.work / name,
                seed=seeds[0],
                device=self.device,
                memory=self.memory,
                progress=self.progress,
            )
        queries = len(self.query)  # type: ignore[arg-type]
        if queries < len(self.measured):
            truth.measurements = truth.measurements[:, :, :queries]
            truth.query = Batches("query", self.query).fingerprint()
        return truth

    def reference(self, alpha: float = 0.5) -> Any:
        if alpha not in self._truths:
            self._truths[alpha] = self.truth(alpha)
        return self._truths[alpha]

    def run_seed(self, k: int, half: bool = False) -> int:
        """The seed of the k-th run."""
        return (FIRST_HALF if half else FIRST_RUN) + self.first.run + k

    def runs(self, count: int, half: bool, recipe: Any, name: str) -> list[whence.Run]:
        """`count` runs, on all data or each on its own half. They are trained together, once."""
        runs = self._runs.get((half, name), [])
        if len(runs) >= count:
            return runs
        seeds = [self.run_seed(k, half) for k in range(count)]
        halves = [
            np.sort(np.random.default_rng(seed).permutation(self.examples)[: self.examples // 2])
            for seed in seeds
        ]
        with self.training("runs"):
            runs = record(
                recipe,
                seeds,
                [self.work / f"run-{name}{seed}" for seed in seeds],
                self.experiment.checkpoints,
                halves if half else None,
                stage=self.experiment.stage,
                device=self.device,
                memory=self.memory,
                progress=self.progress,
            )
        self._runs[half, name] = runs
        return runs

    def study(
        self,
        k: int,
        half: bool = False,
        recipe: Any = None,
        name: str = "",
        layers: Chooser | None = None,
    ) -> whence.Study:
        """A study of the k-th run: on all data, or on half of it (for TRAK's ensembles); of these
        layers, or the task's."""
        recipe = recipe or self.recipe
        run = self.runs(max(self.scale.runs, k + 1), half, recipe, name)[k]
        data = {stage.name: stage.data.dataset for stage in recipe.stages}
        train = data if len(data) > 1 else next(iter(data.values()))
        if not self.experiment.keep_factors:
            run = run.in_memory()
        return whence.Study(recipe.build(0), recipe.task, train, run, layers=layers or self.layers)

    @contextmanager
    def training(self, what: str) -> Iterator[None]:
        """Train at the chosen precision; the seconds of all calls are added up."""
        start = time.perf_counter()
        with products(self.tf32):
            yield
        self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - start


def products(rounded: bool) -> AbstractContextManager[None]:
    """A context in which a GPU rounds float32 matrix products to TF32, or does not."""
    return products_as("high") if rounded else nullcontext()
