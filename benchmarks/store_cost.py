"""The cost of a query against a warm store, compared with reading the store's memory once.

    python -m benchmarks.store_cost [--examples 60000] [--dimension 4096] [--folder /tmp]

A store of the FashionMNIST MLP's gradients in the leading eigenbasis, float32, at one checkpoint;
random images, because only sizes count. The machine's bandwidth is measured in the same minutes as
the time in which the same memory, mapped from the same file, is added up, which nothing that reads
it all can beat. Wall seconds, one thread, the fastest of several alternating rounds. Results go to
benchmarks/results/store_cost.json.

`lds_by_dimension` is for the script that has a Truth: how well a store's scores do at each
dimension.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import whence
from benchmarks.models import final_run, vectors
from benchmarks.report import RESULTS, write_readme
from benchmarks.trak_cost import fashion_mlp
from experiments.tasks.machine import machine
from whence.scores import Scores
from whence.store import GradientStore
from whence.store.rows import inner
from whence.store.workspace import CHUNK

QUERIES = (1, 4, 16, 64)


def lds_by_dimension(
    study: whence.Study,
    query: Any,
    judge: Callable[[Scores], float],
    dimensions: Sequence[int],
    *,
    projection: str = "random",
    fisher: str = "empirical",
    joint: bool = True,
    answers: Sequence[str] = ("source", "influence", "tracin"),
    seeds: Sequence[int] = (0,),
    **build: Any,
) -> dict[str, dict[int, float]]:
    """{answer: {dimension: the judge's mean over seeds}}, each store built, queried and deleted.

    Args:
        judge: such as `lambda scores: whence.evaluate.lds(scores, truth).value`.
    """
    means: dict[str, dict[int, float]] = {name: {} for name in answers}
    for dimension in dimensions:
        judged: dict[str, list[float]] = {name: [] for name in answers}
        for seed in seeds:
            with tempfile.TemporaryDirectory() as folder:
                store = GradientStore.build(
                    study,
                    Path(folder) / "store",
                    dimension,
                    projection,
                    fisher=fisher,
                    joint=joint,
                    seed=seed,
                    methods=answers,
                    **build,
                )
                for name in answers:
                    judged[name].append(judge(getattr(store, name)(query, progress=False)))
        for name, values in judged.items():
            means[name][dimension] = sum(values) / len(values)
    return means


def best(call: Callable[[], object], times: list[float]) -> None:
    """Note the time of one call."""
    start = time.perf_counter()
    call()
    times.append(time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--examples", type=int, default=60_000)
    parser.add_argument("--dimension", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--folder", default=None, help="where to build the store (1 GB)")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = fashion_mlp()
    study = whence.Study(
        model, whence.Classification(), train=vectors(chosen.examples, 1), runs=final_run(model)
    )
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        start = time.process_time()
        store = GradientStore.build(
            study,
            Path(folder) / "store",
            chosen.dimension,
            "eigenbasis",
            methods=["tracin"],
            progress=False,
        )
        built = time.process_time() - start
        rows = store.rows("train", study.runs[0].final)[:]
        size = rows.numel() * rows.element_size()
        float(rows.sum())  # into memory

        def products(vectors: torch.Tensor) -> None:
            for first in range(0, len(rows), CHUNK):
                inner(rows[first : first + CHUNK], vectors)

        read: list[float] = []
        product: dict[int, list[float]] = {q: [] for q in QUERIES}
        whole: dict[int, list[float]] = {q: [] for q in QUERIES}
        w = {q: torch.randn(q, chosen.dimension) for q in QUERIES}
        query = {q: vectors(q, 2) for q in QUERIES}
        for _ in range(chosen.rounds):
            for q in QUERIES:
                best(rows.sum, read)
                best(lambda q=q: products(w[q]), product[q])  # type: ignore[misc]
                best(lambda q=q: store.tracin(query[q], progress=False), whole[q])  # type: ignore[misc]
    bandwidth = size / min(read)
    results = {
        "machine": machine(),
        "examples": chosen.examples,
        "dimension": chosen.dimension,
        "bytes": size,
        "rounds": chosen.rounds,
        "build_cpu_seconds": built,
        "bandwidth": bandwidth,
        "queries": {
            q: {
                "product": min(product[q]),
                "whole": min(whole[q]),
                "share": size / min(product[q]) / bandwidth,
                "share_whole": size / min(whole[q]) / bandwidth,
            }
            for q in QUERIES
        },
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "store_cost.json").write_text(json.dumps(results, indent=1) + "\n")
    write_readme()
    print(f"built in {built:.0f} s; memory {bandwidth / 1e9:.1f} GB/s")
    for q, v in results["queries"].items():
        print(
            f"{q:>3} queries: {1e3 * v['whole']:.0f} ms, the product {1e3 * v['product']:.0f} ms: "
            f"{v['share']:.0%} of the bandwidth"
        )


if __name__ == "__main__":
    main()
