"""Which training is smooth enough for its derivative to predict retraining?

    python -m experiments.studies.smooth TASK --try rate=1e-3,3e-4 batch=256 eps_root=1e-6,1e-5
        [--device cuda]

For every combination: the metasmoothness, the held-out measurement before and after training, and
with --lds the LDS of `Unrolled` where 1 % of the data is dropped in place, and what it costs, also
for the mean of the queries alone, next to the training. The settings that the
board's smooth tasks have were found like this. Rows go to --out, one JSON object a line; a
combination that is there is not run again.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset

import whence
from experiments.tasks.board import BOARD, SMOOTH
from whence.evaluate import ground_truth, lds, metasmoothness
from whence.retrain import Training, measure

SEED, ALPHA = 1000, 0.99


def combinations(words: list[str]) -> list[dict[str, Any]]:
    """{name: value} of every combination of "name=value,value" words."""
    given = [word.split("=", 1) for word in words]
    values = [[json.loads(text) for text in one[1].split(",")] for one in given]
    return [
        dict(zip((name for name, _ in given), chosen, strict=True))
        for chosen in itertools.product(*values)
    ]


def judge(task: str, settings: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """One row."""
    rate, decay = BOARD[task].chosen_rates()
    rates = {"rate": settings.pop("rate", rate), "wd": settings.pop("wd", decay)}
    recipe, held_out = SMOOTH[task](options.quick, **rates, **settings)
    query = Subset(held_out, range(options.queries))
    where: Any = {"device": options.device, "progress": False}
    start = time.perf_counter()
    smooth = metasmoothness(
        recipe, query, directions=options.directions, training_seed=SEED, **where
    )
    row: dict[str, Any] = {"metasmoothness": smooth.value, "correlation": smooth.correlation}
    row["measured"] = float(np.mean(measure(recipe, query, [Training(SEED)], **where)))
    row["seconds"] = time.perf_counter() - start
    if options.lds:
        truth = ground_truth(recipe, query, ALPHA, options.subsets, [SEED], in_place=True, **where)
        run, training = timed(recipe.run, SEED, checkpoints=2, device=options.device)
        data = recipe.stages[0].data.dataset
        study = whence.Study(recipe.build(0), recipe.task, data, run)
        mean = np.full((1, options.queries), 1 / options.queries)
        scores, every = timed(whence.Unrolled().attribute, study, query, **where)
        attribute = partial(whence.Unrolled().attribute, study, query, query_weights=mean)
        _, one = timed(attribute, **where)
        row |= {"training": training, "unrolled": every, "unrolled, mean of the queries": one}
        clock = "process" if options.device == "cpu" else "seconds"  # a CPU has other work
        row["times the training"] = one[clock] / training[clock]
        result = lds(scores, truth)
        row |= {"lds": [result.value, *result.interval]}
        row["growth"] = max(scores.diagnostics["adjoint_growth"].values())
    return row


def timed(
    function: Callable[..., Any], *given: Any, **options: Any
) -> tuple[Any, dict[str, float]]:
    """What it returns; the seconds that pass, and those of this process's processors."""
    start, process = time.perf_counter(), time.process_time()
    result = function(*given, **options)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result, {
        "seconds": time.perf_counter() - start,
        "process": time.process_time() - process,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tasks", nargs="+", choices=SMOOTH, metavar="TASK", help=", ".join(SMOOTH))
    knobs = {name: list(inspect.signature(make).parameters)[1:] for name, make in SMOOTH.items()}
    text = "; ".join(f"{task}: {', '.join(names)}" for task, names in knobs.items())
    parser.add_argument("--try", dest="words", nargs="*", default=[], help=text)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="the small version of the tasks")
    parser.add_argument("--directions", type=int, default=8)
    parser.add_argument("--queries", type=int, default=32)
    parser.add_argument("--subsets", type=int, default=50)
    parser.add_argument("--lds", action="store_true", help="judge Unrolled too")
    parser.add_argument("--out", type=Path, default=Path("runs/smooth.jsonl"))
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    lines = options.out.read_text().splitlines() if options.out.exists() else []
    done = [json.loads(line) for line in lines]
    for task in options.tasks:
        for settings in combinations(options.words):
            key = {"task": task, "settings": settings, "lds": options.lds, "quick": options.quick}
            if any(row["of"] == key for row in done):
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                row = {"of": key} | judge(task, dict(settings), options)
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
