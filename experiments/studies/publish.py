"""Benchmarks that others can score against, from saved sums; and back.

    python -m experiments.leaderboard --publish FOLDER --from SUMS

SUMS is the --out of `experiments.studies.single`. Each file of sums becomes a folder,
FOLDER/PROTOCOL/TASK (`whence.evaluate.Benchmark`). Nothing is trained. The datasets are read, to
check that the sums are of this version of the task.

`reopened` makes sums of a benchmark again, so that rows can be added to it without its trainings.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments.studies.sums import TRUTH, Sums
from experiments.studies.sums import Protocol as Sizes
from experiments.tasks.board import BOARD, Protocol
from whence.evaluate import Benchmark, Published, Truth
from whence.retrain.truth import draw_subsets

HOW = """\
From the root of a clone of whence:

    from experiments.tasks.board import BOARD
    import torch, whence

    recipe, held_out = BOARD[{task!r}].recipe({quick})
    query = torch.utils.data.Subset(held_out, range({queries}))
    run = recipe.run({seed}, "runs/{task}", checkpoints={checkpoints})
    study = whence.Study(recipe.build(0), recipe.task, recipe.stages[0].data.dataset, run)
    whence.Source().attribute(study, query, out="scores/{task}")

Training examples and queries count from 0, in the order of these datasets. The run of another
machine differs by rounding; under the single-model protocol that matters where metasmoothness
({metasmoothness}) is low.
"""


def benchmark(saved: Sums) -> Benchmark:
    """The truth and the predictions of one task under one protocol."""
    sizes, experiment = saved.protocol, BOARD.get(saved.protocol.task)
    if experiment is None:
        raise ValueError(f"the leaderboard has no task {sizes.task!r}")
    recipe, _ = experiment.recipe(sizes.quick)
    if recipe.fingerprint != saved.truth["recipe"]:
        raise ValueError(
            f"the sums of {sizes.task} are of another version of the task (its recipe or data "
            "changed): measure it again with experiments.studies.single"
        )
    seeds = saved.truth["seeds"]
    masks = draw_subsets(
        len(recipe.stage(experiment.stage).data), saved.truth["alpha"], sizes.subsets, seeds[0]
    )
    published = {
        name: Published(
            saved.sums[name][:, :, : sizes.subsets], str(about["method"]), float(about["seconds"])
        )
        for name, about in saved.forms.items()
    }
    machine = saved.about["machine"]
    smooth = saved.about.get("metasmoothness")
    about = {
        "title": experiment.title,
        "setting": experiment.setting,
        "how": HOW.format(
            task=sizes.task,
            quick=sizes.quick,
            queries=sizes.queries,
            seed=seeds[0] if saved.truth["in_place"] else "SEED",
            checkpoints=experiment.checkpoints,
            metasmoothness="not known" if smooth is None else f"{smooth:.2f}",
        ),
        "source": f"whence, {saved.about['device']}, torch {machine['torch']}, {machine['date']}",
    }
    truth = Truth(masks, saved.measured, stage=experiment.stage, **saved.truth)
    return Benchmark(f"{sizes.task}, {truth.protocol}", truth, published, about)


def publish(sums: Path, folder: Path) -> list[Path]:
    """Write a benchmark for each file of sums; their folders. Says which files are left out."""
    written = []
    for path in sorted(sums.rglob("*.npz")):
        saved = Sums.load(path)
        protocol = Protocol(saved.truth["in_place"], round(saved.protocol.alpha, 2))
        place = folder / protocol.name / saved.protocol.task
        try:
            benchmark(saved).save(place)
            written.append(place)
        except ValueError as error:
            print(f"{path} is left out: {error}", flush=True)
    return written


def reopened(benchmark: Benchmark, task: str, entry: Mapping[str, Any]) -> Sums:
    """The sums of a benchmark.

    Args:
        benchmark: of a task under one protocol.
        task: its name.
        entry: its row on the leaderboard, which has what the benchmark does not.
    """
    truth = benchmark.truth
    subsets, seeds, queries = truth.measurements.shape
    sums = {name: one.predictions.astype(np.float32) for name, one in benchmark.published.items()}
    about = {name: value for name, value in entry.items() if name not in ("methods", "sizes")}
    saved = Sums(
        Sizes(task, float(truth.alpha), subsets, seeds, entry["sizes"]["runs"], queries),
        {name: getattr(truth, name) for name in (*TRUTH, "in_place")},
        about,
        truth.measurements,
        np.empty((0, 1, queries)),
        sums,
        # of all scores over the examples, which a benchmark does not have; judging needs none
        {name: np.zeros((len(one) + 1, queries)) for name, one in sums.items()},
    )
    judged = ("lds", "behind", "ceiling", "slope", "runs", "diverged", "over")
    for name in sums:
        row = entry["methods"][name]
        saved.forms[name] = {key: value for key, value in row.items() if key not in judged}
    return saved
