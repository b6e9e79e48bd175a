"""TRAK against the authors' library (traker 0.3.2, its CPU projector), on the same gradients.

    python -m benchmarks.trak_cost [--rounds 2] [--dimension 2048]

The FashionMNIST MLP (784-512-256-128-10, 567,434 parameters). Ours is `Trak(...).attribute` from
scratch: gradients, projection, ΦᵀΦ, scores. Theirs is given every example's gradient, which is not
counted, and times `BasicProjector.project`, batch by batch, and `BasicScoreComputer`. Alternately,
in one process, one thread; processor seconds of the fastest round. Peak memory is that of a
separate process, above its start. Results go to benchmarks/results/trak_cost.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import warnings
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import whence
from benchmarks.models import final_run, vectors
from benchmarks.report import RESULTS, write_readme
from experiments.tasks.machine import machine
from whence.data import cut
from whence.layers.passes import Signal
from whence.methods.trak import Trak
from whence.projections import gather

DAMPING = 1e-3
WIDTHS = (784, 512, 256, 128, 10)


def fashion_mlp() -> nn.Module:
    """784-512-256-128-10."""
    layers: list[nn.Module] = []
    for entering, leaving in pairwise(WIDTHS):
        layers += [nn.Linear(entering, leaving), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def study_of(examples: int) -> whence.Study:
    torch.manual_seed(0)
    model = fashion_mlp()
    task = whence.Classification()
    return whence.Study(model, task, train=vectors(examples, 1), runs=final_run(model))


def gradients(study: whence.Study, data: Any) -> Tensor:
    """The measurement's gradients of all examples, (n, p), from the library's own captures."""
    (run,) = study.runs
    cpu = torch.device("cpu")
    passes = study.passes(run, device=cpu, dtype=torch.float32, quiet=True)["train"]
    passes.load(run.final)
    with torch.no_grad():
        batches = study.query(data)
        gradients = gather(passes, batches, cut(len(data), len(data))[0], Signal("measurement"))
        return torch.cat([g.rows(0, g.block.o).flatten(1) for g in gradients.values()], 1)


def ours(study: whence.Study, query: Any, dimension: int, batch: int) -> float:
    fresh = whence.Study(study.model, study.tasks, train=study.train, runs=study.runs[0])
    method = Trak(dimension, damping=DAMPING)
    start = time.process_time()
    method.attribute(fresh, query, batch_size=batch, progress=False)
    return time.process_time() - start


def theirs(train: Tensor, query: Tensor, weights: Tensor, dimension: int, batch: int) -> float:
    from trak.projectors import BasicProjector, ProjectionType
    from trak.score_computers import BasicScoreComputer

    scorer = BasicScoreComputer(torch.float32, torch.device("cpu"), lambda_reg=DAMPING * len(train))
    start = time.process_time()
    projector = BasicProjector(
        train.shape[1], dimension, 0, ProjectionType.rademacher, torch.device("cpu")
    )
    rows, targets = (
        torch.cat([projector.project(g, model_id=0) for g in torch.split(whole, batch)])
        for whole in (train, query)
    )
    features = scorer.get_x_xtx_inv(rows, scorer.get_xtx(rows))
    scores = torch.zeros(len(train), len(query))
    scorer.get_scores(features, targets, accumulator=scores)
    scores *= weights
    return time.process_time() - start


def measure(who: str, examples: int, queries: int, dimension: int, batch: int) -> float:
    """Seconds of one library, on synthetic data."""
    study, query = study_of(examples), vectors(queries, 2)
    if who == "ours":
        return ours(study, query, dimension, batch)
    train, targets = gradients(study, study.train["train"]), gradients(study, query)
    return theirs(train, targets, torch.ones(examples, 1), dimension, batch)


def peak_memory(who: str, examples: int, queries: int, dimension: int, batch: int) -> float:
    """MiB above the start; of theirs without the gradients that they are given."""
    given = (examples + queries) * 567_434 * 4 / 2**20 if who == "theirs" else 0.0
    code = (
        "import torch, warnings\n"
        "torch.set_num_threads(1)\n"
        "warnings.simplefilter('ignore')\n"
        "from benchmarks import trak_cost\n"
        "import trak.projectors\n"
        "def read(key):\n"
        "    lines = open('/proc/self/status').read().splitlines()\n"
        "    return next(int(x.split()[1]) for x in lines if x.startswith(key))\n"
        "before = read('VmRSS')\n"
        f"trak_cost.measure({who!r}, {examples}, {queries}, {dimension}, {batch})\n"
        "print((read('VmHWM') - before) / 1024)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1]) - given


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dimension", type=int, default=2048)
    parser.add_argument("--train", type=int, default=256)
    parser.add_argument("--query", type=int, default=16)
    parser.add_argument("--batch", type=int, default=128)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    size = (chosen.train, chosen.query, chosen.dimension, chosen.batch)
    study, query = study_of(chosen.train), vectors(chosen.query, 2)
    given = gradients(study, study.train["train"]), gradients(study, query)
    weights = torch.ones(chosen.train, 1)
    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    for _ in range(chosen.rounds):
        seconds["ours"].append(ours(study, query, chosen.dimension, chosen.batch))
        seconds["theirs"].append(theirs(*given, weights, chosen.dimension, chosen.batch))
        print({who: round(times[-1], 2) for who, times in seconds.items()}, flush=True)
    best = {who: min(times) for who, times in seconds.items()}
    results = {
        "machine": machine(),
        "parameters": given[0].shape[1],
        "train": chosen.train,
        "query": chosen.query,
        "dimension": chosen.dimension,
        "batch": chosen.batch,
        "rounds": chosen.rounds,
        "seconds": best,
        "memory": {who: peak_memory(who, *size) for who in best},
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "trak_cost.json").write_text(json.dumps(results, indent=1) + "\n")
    write_readme()
    print(f"{best['theirs'] / best['ours']:.1f}× traker; peak MiB {results['memory']}")


if __name__ == "__main__":
    main()
