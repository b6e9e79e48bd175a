"""Which form of SOURCE for Adam? Digits trained with AdamW, at several rates and lengths.

    python -m experiments.studies.adam [--out FOLDER] [--results FOLDER]

Writes the LDS of one model to results/adam.json. Run it again to resume.
"""

from __future__ import annotations

import argparse
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

from experiments.engine.reproduce import of_one_model
from experiments.tasks import RESULTS, TASKS, Experiment, Scale
from experiments.tasks.machine import machine
from experiments.tasks.methods import ADAM_FORMS, FLOORED
from experiments.tasks.recipes import adamw, digits, to_zero
from whence.persist.files import write_json

WEIGHT_DECAY = 1e-2
SCALE = Scale(seeds=5, queries=50, runs=1)
METHODS = ("TracIn", "influence", "SOURCE", *ADAM_FORMS, *FLOORED, "SOURCE, exact, floor, L = 1")
# rate, epochs, and whether the rate falls to zero
SETTINGS = (
    (1e-4, 20, False),
    (3e-4, 20, False),
    (1e-3, 20, False),
    (3e-3, 20, False),
    (1e-3, 20, True),
    (1e-3, 3, False),
    (1e-3, 3, True),
    (3e-4, 3, True),
)
# The settings on which floors of 0.01, 0.1 and 1, and other means of P, were compared.
CHOSEN_ON = {(1e-4, 20, False), (1e-3, 20, False), (1e-3, 3, True), (3e-4, 3, True)}


def variant(rate: float, epochs: int, falls: bool) -> Experiment:
    """The task `digits_adamw` with another learning rate, length and schedule."""
    make = partial(digits, adamw, epochs=epochs, scheduler=to_zero if falls else None)
    name = f"digits_adamw-{rate:g}-{epochs}{'-to-zero' if falls else ''}"
    task = TASKS["digits_adamw"]
    rates = rate, WEIGHT_DECAY
    return replace(task, name=name, make=make, rates=rates, methods=METHODS, expensive=())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/adam"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = [
            {"rate": rate, "epochs": epochs, "falls": falls}
            | {"chosen_on": (rate, epochs, falls) in CHOSEN_ON}
            | of_one_model(variant(rate, epochs, falls), SCALE, options.out)
            for rate, epochs, falls in SETTINGS
        ]
    of = {"subsets": SCALE.subsets, "seeds": SCALE.seeds, "queries": SCALE.queries}
    about = {"device": "CPU", "machine": machine()}
    write_json(options.results / "adam.json", {"rows": rows, "of": of} | about, checksum=False)


if __name__ == "__main__":
    main()
