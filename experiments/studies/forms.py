"""Which form of SOURCE predicts retraining best: the paper's, coupled, along the run?

    python -m experiments.studies.forms TASK... [--device cuda] [--subsets 100] [--seeds 5]

Writes LDS (one model and the mean of several), slope and spread of every form, and its paired
difference from the paper's form, to results/forms.json, a task at a time. Forms are chosen on the
tasks in `CHOSEN_ON`, and confirmed on the others.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import whence
from experiments.engine.reproduce import Reproduction
from experiments.tasks import RESULTS, TASKS, Scale
from experiments.tasks.machine import machine
from whence.evaluate import calibration, lds
from whence.persist.files import write_json

CHOSEN_ON = ("digits", "digits_adamw", "fashion_mnist")
BASELINE = "published"
KINDS = ("single", "ensemble")


def forms(stages: int, stage: str | None) -> dict[str, Callable[[], Any]]:
    """Name → method. With several stages, segments are the stages."""
    three: int | str = 3 if stages == 1 else "stages"

    def source(segments: int | str, **settings: Any) -> Callable[[], Any]:
        return lambda: whence.Source(segments, stage=stage, **settings)

    plain = {"coupling": False, "query_at": "final"}
    named = {
        "influence, published": lambda: whence.Influence.published(stage=stage),
        "influence, source damping": lambda: whence.Influence.published("source", stage=stage),
        "influence, coupled": lambda: whence.Influence(stage=stage),
        BASELINE: lambda: whence.Source.published(three, stage=stage),
        "appendix C": source(three, **plain),
        "coupled": source(three, query_at="final"),
        "query along the run": source(three, coupling=False),
        "coupled, query along the run": source(three),
    }
    if stages == 1:
        named |= {
            "published, L = 1": lambda: whence.Source.published(1, stage=stage),
            "appendix C, L = 1": source(1, **plain),
            "coupled, L = 1": source(1, query_at="final"),
            "coupled, query along the run, L = 1": source(1),
            "coupled, query along the run, K-FAC bases, L = 1": source(1, curvature="ekfac"),
        }
    return named


def evaluate(
    task: str, scale: Scale, options: argparse.Namespace, save: Callable[[dict[str, Any]], None]
) -> None:
    """All forms on one task, saved one by one."""
    experiment = TASKS[task]
    work = Reproduction(
        experiment,
        scale=scale,
        work=options.out,
        results=options.out / "results",
        device=options.device,
        tf32=options.device != "cpu",
    )
    truth = work.reference(options.alpha)
    stages = len(work.recipe.stages)
    rows: dict[str, Any] = {}
    baseline: Any = None
    for name, make in forms(stages, experiment.stage).items():
        if options.only and not any(word in name for word in options.only):
            continue
        scores, start = [], time.perf_counter()
        try:
            for k in range(scale.runs):
                study = work.study(k)
                method = make()
                scores.append(
                    method.attribute(study, work.query, device=options.device, progress=False)
                )
        except (ValueError, RuntimeError) as error:
            print(f"{task} {name}: {str(error)[:200]}", flush=True)
            continue
        seconds = (time.perf_counter() - start) / scale.runs
        together = lds(scores, truth)
        single = together.single or together
        real = calibration(scores[0], truth)
        spread = float(np.std(real.real) / max(float(np.std(real.predicted)), 1e-30))
        row: dict[str, Any] = {
            "single": [single.value, *single.interval],
            "ensemble": [together.value, *together.interval],
            "slope": real.slope,
            "spread": spread,
            "seconds": seconds,
            "ceiling": together.ceiling,
        }
        if name == BASELINE:
            baseline = single, together
        elif baseline is not None:
            for kind, one, other in zip(
                ("single", "ensemble"), (single, together), baseline, strict=True
            ):
                gap = one.minus(other)
                row[f"gain, {kind}"] = [gap.value, *gap.interval]
        rows[name] = row
        save(rows)
        print(
            f"{task:15s} {name:50s} {single.value:.3f}/{together.value:.3f} slope {real.slope:.2f} "
            f"spread {spread:.2f} {seconds:.1f}s",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tasks", nargs="+", choices=sorted(TASKS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--alpha", type=float, default=0.5)
    parser.add_argument("--subsets", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--only", nargs="*", help="forms whose names have one of these words")
    parser.add_argument("--out", type=Path, default=Path("runs/forms"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    scale = Scale(
        subsets=options.subsets, seeds=options.seeds, queries=options.queries, runs=options.runs
    )
    file = options.results / "forms.json"
    stored = json.loads(file.read_text()) if file.exists() else {"tasks": {}}
    sizes = {k: getattr(options, k) for k in ("subsets", "seeds", "runs", "queries", "alpha")}
    about = {"of": sizes, "machine": machine(), "device": options.device}
    options.results.mkdir(parents=True, exist_ok=True)
    for task in options.tasks:
        known = stored["tasks"].get(task, {}).get("forms", {})

        def save(rows: dict[str, Any], task: str = task, known: dict[str, Any] = known) -> None:
            entry = {"forms": known | rows, "chosen_on": task in CHOSEN_ON, **about}
            stored["tasks"][task] = entry
            stored.update(machine=about["machine"], device=about["device"])
            write_json(file, stored, checksum=False)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            evaluate(task, scale, options, save)


if __name__ == "__main__":
    main()
