"""The LDS of answers from gradient stores: results/store_digits.json.

    python -m experiments.studies.stores [--task digits] [--device cuda]

SOURCE from stores of several dimensions and kinds of rows, on the runs and the truth of `whence
reproduce`. With the same work folder, nothing is trained twice.
"""

from __future__ import annotations

import argparse
import time
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import torch

import whence
from experiments.engine.reproduce import Reproduction
from experiments.tasks import RESULTS, TASKS
from experiments.tasks.machine import machine
from whence.evaluate import lds
from whence.persist.files import write_json
from whence.store.rows import FORMS, columns

DIMENSIONS = (64, 256, 1024)
STORED = {"eigenbasis": tuple(FORMS), "random": ("full",)}


def stores(reproduction: Reproduction) -> dict[str, Any]:
    """A row for each projection and dimension, and their settings."""
    truth, rows = reproduction.reference(), []
    studies = [reproduction.study(k) for k in range(reproduction.scale.runs)]
    options: dict[str, Any] = {"device": reproduction.device, "progress": False}
    for projection, forms in STORED.items():
        for dimension, form in product(DIMENSIONS, forms):
            scores, seconds = [], []
            for k, study in enumerate(studies):
                folder = reproduction.work / f"store-{projection}-{dimension}-{form}-{k}"
                store = whence.GradientStore.build(
                    study, folder, dimension, projection, rows=form, **options
                )
                store.source(reproduction.query, **options)  # warm up
                start = time.perf_counter()
                scores.append(store.source(reproduction.query, **options))
                seconds.append(time.perf_counter() - start)
            ensemble = lds(scores, truth)
            single = ensemble.single or ensemble
            rows.append(
                {
                    "projection": projection,
                    "dimension": dimension,
                    "rows": form,
                    "bytes": columns(form, dimension) * store.dtype.itemsize,
                    "lds": [single.value, *single.interval],
                    "ensemble": [ensemble.value, *ensemble.interval],
                    "seconds": min(seconds),
                }
            )
            what = f"{projection} {dimension} {form}"
            reproduction.log(f"{what}: {single.value:.3f}, {min(seconds):.2f} s")
    return {
        "task": reproduction.experiment.name,
        "settings": {
            "alpha": 0.5,
            **reproduction.sizes(reproduction.scale.runs),
            "recipe": reproduction.recipe.fingerprint,
        },
        "ceiling": ensemble.ceiling,
        "rows": rows,
        "device": torch.cuda.get_device_name() if reproduction.device.startswith("cuda") else "CPU",
        "machine": machine(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--task", choices=sorted(TASKS), default="digits")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--out", type=Path, default=Path("reproduce"), help="as of whence reproduce"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    reproduction = Reproduction(
        TASKS[options.task], work=options.out, results=options.results, device=options.device
    )
    write_json(options.results / f"store_{options.task}.json", stores(reproduction), checksum=False)


if __name__ == "__main__":
    main()
