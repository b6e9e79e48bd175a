"""Size of SOURCE's predictions by depth: EK-FAC against the full Gauss-Newton matrix.

    python -m experiments.studies.depth [--out FOLDER] [--results FOLDER]

Writes LDS and slope of one model to results/depth.json. Run it again to resume.
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
from experiments.engine.reproduce import of_one_model
from experiments.tasks import RESULTS, TASKS, Experiment, RecipeAndHeldOut, Scale, data, models
from experiments.tasks.machine import machine
from experiments.tasks.methods import GAUSS_NEWTON
from experiments.tasks.recipes import adamw, sgd
from whence.persist.files import write_json

SCALE = Scale(seeds=5, queries=50, runs=1)
WIDTH, DEPTHS = 64, (1, 2, 3, 4)
OPTIMIZERS: dict[str, tuple[Callable[..., Any], tuple[float, float], dict[str, str]]] = {
    "SGD": (sgd, (3e-2, 1e-3), {"layers": "SOURCE", "whole": GAUSS_NEWTON}),
    "AdamW": (
        adamw,
        (1e-3, 1e-2),
        {"layers": "SOURCE, exact, floor", "whole": f"{GAUSS_NEWTON}, floor"},
    ),
}


def deep(
    depth: int, optimizer: Callable[..., Any], quick: bool, rate: float, wd: float
) -> RecipeAndHeldOut:
    """Digits, with `depth` hidden layers."""
    train, held_out = data.digits()
    model = partial(models.mlp, 64, *[WIDTH] * depth, 10)
    recipe = whence.Recipe(model, whence.Classification(), train, optimizer(rate, wd), 64, 20)
    return recipe, held_out


def variant(name: str, depth: int) -> Experiment:
    """The digits task with another network and optimizer."""
    optimizer, rates, methods = OPTIMIZERS[name]
    return replace(
        TASKS["digits"],
        name=f"depth-{name.lower()}-{depth}",
        make=partial(deep, depth, optimizer),
        rates=rates,
        methods=tuple(methods.values()),
        expensive=(),
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
                numbers = of_one_model(variant(name, depth), SCALE, options.out)
                rows.append({"optimizer": name, "depth": depth, "methods": methods} | numbers)
    of = {"subsets": SCALE.subsets, "seeds": SCALE.seeds, "queries": SCALE.queries}
    about = {"width": WIDTH, "device": "CPU", "machine": machine()}
    write_json(options.results / "depth.json", {"rows": rows, "of": of} | about, checksum=False)


if __name__ == "__main__":
    main()
