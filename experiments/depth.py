"""How large SOURCE's scores are by depth: curvature layer by layer, and of all layers together.

    python -m experiments.depth [--out FOLDER] [--results FOLDER]

Keeps LDS and slope of one model in results/depth.json. Stopped and called again, it goes on.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import whence
from whence.persist.files import write_json

from . import data, models
from .machine import machine
from .reproduce import of_one_model
from .tasks import RESULTS, TASKS, WHOLE, Experiment, Made, Scale, adamw, sgd

SCALE = Scale(seeds=5, queries=50, runs=1)
WIDTH, DEPTHS = 64, (1, 2, 3, 4)
OPTIMIZERS: dict[str, tuple[Callable[..., Any], tuple[float, float], dict[str, str]]] = {
    "SGD": (sgd, (3e-2, 1e-3), {"layers": "SOURCE", "whole": WHOLE}),
    "AdamW": (
        adamw,
        (1e-3, 1e-2),
        {"layers": "SOURCE, exact, floor", "whole": f"{WHOLE}, floor"},
    ),
}


def deep(depth: int, optimizer: Callable[..., Any], quick: bool, rate: float, wd: float) -> Made:
    """Digits, by so many hidden layers."""
    train, held = data.digits()
    model = partial(models.mlp, 64, *[WIDTH] * depth, 10)
    recipe = whence.Recipe(model, whence.Classification(), train, optimizer(rate, wd), 64, 20)
    return recipe, held


def variant(name: str, depth: int) -> Experiment:
    """The digits task with another network and optimizer."""
    optimizer, rates, methods = OPTIMIZERS[name]
    return replace(
        TASKS["digits"],
        name=f"depth-{name.lower()}-{depth}",
        make=partial(deep, depth, optimizer),
        rates=rates,
        methods=tuple(methods.values()),
        dear=(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/depth"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, (_, _, methods) in OPTIMIZERS.items():
            for depth in DEPTHS:
                found = of_one_model(variant(name, depth), SCALE, options.out)
                rows.append({"optimizer": name, "depth": depth, "methods": methods} | found)
    of = {"subsets": SCALE.subsets, "seeds": SCALE.seeds, "queries": SCALE.queries}
    about = {"width": WIDTH, "device": "CPU", "machine": machine()}
    write_json(options.results / "depth.json", {"rows": rows, "of": of} | about)


if __name__ == "__main__":
    main()
