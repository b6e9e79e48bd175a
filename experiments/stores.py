"""What answering from a gradient store costs in LDS: results/store_digits.json.

    python -m experiments.stores [--task digits] [--device cuda]

SOURCE from stores of several dimensions, on the task's runs and truth as `whence reproduce` makes
them; a work folder that it has used already spares the trainings.
"""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path
from typing import Any

import torch

import whence
from whence.evaluate import lds
from whence.persist.files import write_json

from .machine import machine
from .reproduce import Reproduction
from .tasks import RESULTS, TASKS

DIMENSIONS = (64, 256, 1024)


def stores(work: Reproduction) -> dict[str, Any]:
    """A row for each projection and dimension, and what they stand on."""
    truth, rows = work.reference(), []
    studies = [work.study(k) for k in range(work.scale.runs)]
    given: dict[str, Any] = {"device": work.device, "progress": False}
    for projection in ("eigenbasis", "random"):
        for dimension in DIMENSIONS:
            scores, seconds = [], []
            for k, study in enumerate(studies):
                folder = work.place.work / f"store-{projection}-{dimension}-{k}"
                store = whence.GradientStore.build(study, folder, dimension, projection, **given)
                store.source(work.query, **given)  # once, to be warm
                start = time.perf_counter()
                scores.append(store.source(work.query, **given))
                seconds.append(time.perf_counter() - start)
            found = lds(scores, truth)
            single = found.single or found
            rows.append(
                {
                    "projection": projection,
                    "dimension": dimension,
                    "lds": [single.value, *single.interval],
                    "ensemble": [found.value, *found.interval],
                    "seconds": min(seconds),
                }
            )
            work.tell(f"{projection} {dimension}: {single.value:.3f}, {min(seconds):.2f} s")
    return {
        "task": work.experiment.name,
        "settings": {"alpha": 0.5, **work.of(work.scale.runs), "recipe": work.recipe.fingerprint},
        "ceiling": found.ceiling,
        "rows": rows,
        "device": torch.cuda.get_device_name() if work.device.startswith("cuda") else "CPU",
        "machine": machine(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--task", choices=sorted(TASKS), default="digits")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("reproduce"), help="as whence reproduce's")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    work = Reproduction(
        TASKS[options.task], work=options.out, results=options.results, device=options.device
    )
    write_json(options.results / f"store_{options.task}.json", stores(work))


if __name__ == "__main__":
    main()
