"""Which training is smooth enough for its derivative to predict retraining?

    python -m experiments.studies.smooth TASK --try rate=1e-3,3e-4 batch=256 eps_root=1e-6,1e-5
        [--device cuda]

For every combination: the metasmoothness, the held-out loss (and accuracy) before and after
training, and with --lds the LDS of `Unrolled` where 1 % of the data is dropped in place, and what
the mean of the queries costs next to the training: the fastest of several rounds, in which both
take turns. This is how the settings of the leaderboard's smooth tasks were chosen. Rows go to
--out, one JSON object a line; a combination that is there is not run again.
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
from torch.utils.data import DataLoader, Subset

import whence
from experiments.tasks.board import BOARD, SMOOTH
from experiments.tasks.machine import seconds
from whence.evaluate import ground_truth, lds, metasmoothness
from whence.retrain import Training, measure

SEED, ALPHA = 1000, 0.99
HELD_OUT = 1000  # examples


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
    train = partial(recipe.run, SEED, checkpoints=2, device=options.device)
    run = train()
    assert run.initial is not None
    row["held out"] = [
        quality(recipe, Subset(held_out, range(min(HELD_OUT, len(held_out)))), one.weights())
        for one in (run.initial, run.final)
    ]
    data = recipe.stages[0].data.dataset
    study = whence.Study(recipe.build(0), recipe.task, data, run)
    mean = np.full((1, options.queries), 1 / options.queries)
    attribute = partial(whence.Unrolled().attribute, study, query, query_weights=mean, **where)
    training, one = in_turns([train, attribute], options.rounds, options.device)
    row |= {"training": training, "unrolled, mean of the queries": one}
    row["times the training"] = one / training
    if options.lds:
        truth = ground_truth(recipe, query, ALPHA, options.subsets, [SEED], in_place=True, **where)
        before = seconds(options.device)
        scores = whence.Unrolled().attribute(study, query, **where)
        row["unrolled"] = seconds(options.device) - before
        result = lds(scores, truth)
        row |= {"lds": [result.value, *result.interval]}
        row["growth"] = max(scores.diagnostics["adjoint_growth"].values())
    return row


def in_turns(jobs: list[Callable[[], Any]], rounds: int, device: str) -> list[float]:
    """The least seconds of each job, over rounds in which they take turns."""
    least = [np.inf] * len(jobs)
    for _ in range(rounds):
        for k, job in enumerate(jobs):
            before = seconds(device)
            job()
            if device != "cpu":
                torch.cuda.synchronize()
            least[k] = min(least[k], seconds(device) - before)
    return least


def quality(recipe: whence.Recipe, data: Any, weights: dict[str, torch.Tensor]) -> dict[str, float]:
    """The mean loss of a model, and its accuracy if it classifies."""
    model, task, losses, correct = recipe.build(0), recipe.task, [], []
    model.load_state_dict(weights, strict=False)
    with torch.no_grad():
        for batch in DataLoader(data, batch_size=256):
            outputs = task.outputs(model.eval(), batch)
            losses.append(task.losses(outputs, batch))
            if isinstance(task, whence.Classification):
                correct.append(outputs.argmax(-1) == batch[1])
    about = {"loss": float(torch.cat(losses).mean())}
    return about | ({"accuracy": float(torch.cat(correct).float().mean())} if correct else {})


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
    parser.add_argument("--rounds", type=int, default=2, help="in which costs are measured")
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
