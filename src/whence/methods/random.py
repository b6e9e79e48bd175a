"""The baseline that every method must beat: random examples of the query's class.

    values[q, m] = u_qm + [class of m is the class of q]       u uniform in (0, 1)

Without classes, the score is u alone. The sign is that of f(with m) - f(without m): positive for a
measurement where higher is better, negative where lower is better.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from whence.data import Labels, classes, cut
from whence.draws import Uniform
from whence.engine.workspace import scored_stages
from whence.errors import InvalidInput, collect_warnings
from whence.persist.identity import call_text, defaults_of, key_of
from whence.progress import progress_bar
from whence.scores import Scores, ScoreWriter
from whence.study import Study
from whence.world import World

DRAWS_PER_BLOCK = 2**22


class Random:
    """Examples of the query's class in random order, then all others.

    A draw depends only on (seed, stage, query, example).

    Args:
        seed: seed of the draws.
        stage: attribute to this stage's examples only (default: all stages).
    """

    def __init__(self, seed: int = 0, stage: str | None = None) -> None:
        self.seed, self.stage = seed, stage

    @collect_warnings()
    @World.together()
    def attribute(
        self,
        study: Study,
        query: Any = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        out: str | os.PathLike[str] | None = None,
        top: int | None = None,
        progress: bool = True,
    ) -> Scores:
        """Random scores of every training example for every query.

        Args:
            query: map-style dataset built like the training data; None is self-influence, shape
                (n,).
            device: where to draw (default: the CPU). The draws are the same everywhere.
            dtype: float32 or float64.
            out: folder for the scores; rerun the same call to load them.
            top: keep only the `top` most helpful and most harmful examples of each query.
        """
        if dtype not in (torch.float32, torch.float64):
            raise InvalidInput(f"dtype={dtype}: random scores are torch.float32 or torch.float64")
        study.refuse_candidates("Random")
        stages, world = scored_stages(study, self.stage), World.current()
        data, last = {stage: study.data[stage] for stage in stages}, study.stages[-1]
        task, queries = study.tasks[last], None if query is None else study.query(query)
        sizes = {stage: len(batches) for stage, batches in data.items()}
        of_stages = [stage for stage, size in sizes.items() for _ in range(size)]
        for batches in data.values():
            batches.refresh()
        key = {
            "method": call_text("Random", {"seed": self.seed, "stage": self.stage}, {}),
            "train": {stage: batches.fingerprint() for stage, batches in data.items()},
            "query": None if queries is None else queries.fingerprint(),
            "tasks": {stage: study.tasks[stage].called({}) for stage in [*stages, last]},
        }
        world.agree({**key, "out": out, "top": top})
        writer = ScoreWriter(
            out,
            None if queries is None else len(queries),
            sum(sizes.values()),
            key=key_of(key),
            top=top,
            dtype=np.float64 if dtype == torch.float64 else np.float32,
            world=world,
        )
        if writer.already is not None:
            return writer.already
        where = None if device is None else torch.device(device)
        sign, start = 1.0 if task.higher_is_better else -1.0, 0
        query_classes = None if queries is None else classes(task, queries)
        for stage, size in sizes.items():
            columns, place = slice(start, start + size), study.stages.index(stage)
            if queries is None:  # an example always shares its own class
                values = Uniform(self.seed, place, np.arange(size), where)(1)[:, 0].cpu().numpy()
                if world.first:
                    writer.write(None, columns, sign * values)
            else:
                train_classes = classes(study.tasks[stage], data[stage])
                blocks = cut(len(queries), max(1, DRAWS_PER_BLOCK // size // world.size))
                for rows in progress_bar(world.mine(blocks), desc="draws", shown=progress):
                    values = draws(
                        self.seed, place, rows, query_classes, size, train_classes, where
                    )
                    writer.write(slice(int(rows[0]), int(rows[-1]) + 1), columns, sign * values)
            start = columns.stop
        return writer.finish(
            method="Random",
            settings={"seed": self.seed, "stage": self.stage},
            measurement=task.measurement,
            unit="none: a random order",
            higher_is_better=task.higher_is_better,
            query_ids=None if queries is None else np.arange(len(queries)),
            train_ids=np.concatenate([np.arange(size) for size in sizes.values()]),
            stage=of_stages if len(study.stages) > 1 else None,
            provenance={k: key[k] for k in ("train", "query")} | {"collated": bool(study.collate)},
        )

    def __repr__(self) -> str:
        return call_text("Random", vars(self), defaults_of(type(self)))


def draws(
    seed: int,
    stage: int,
    queries: NDArray[np.int64],
    query_classes: Labels | None,
    examples: int,
    example_classes: Labels | None,
    device: torch.device | None = None,
) -> NDArray[np.float64]:
    """(q, n) in (0, 2), higher is more helpful: above 1 where query and example share their class.

    Args:
        stage: the number of the examples' stage.
        queries: the numbers of the queries, (q,).
        query_classes, example_classes: the class of every query and of every example; None if
            there are no classes.
    """
    values: NDArray[np.float64] = Uniform(seed, stage, queries, device)(examples).cpu().numpy()
    if query_classes is not None and example_classes is not None:
        values += query_classes[queries, None] == example_classes
    return values
