"""The tables of docs/scale.md: billions of documents on paper, and the estimate next to what was
measured. `python -m tools.tables` writes them.

Everything comes from `whence.engine.estimate`: no number is computed here that it does not give,
except failures.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

import whence
from benchmarks.models import GPT, WORKLOADS, Workload
from whence.engine.costs import Cost, passes_cost
from whence.engine.costs import Workload as Work
from whence.engine.estimate import Estimate, Gpu, estimate
from whence.engine.projected_space import projecting
from whence.engine.workspace import Term
from whence.layers.choose import matrices
from whence.table import byte_size

RESULTS = Path(__file__).parents[1] / "benchmarks/results"
LENGTHS = {"gpt": 128, "gpt2-small": 512}
DTYPES = {"float32": "float32", "tf32": "tf32", "bf16": "bfloat16"}
METHODS: dict[str, tuple[Any, int]] = {  # and checkpoints
    "influence": (whence.Influence.published(1e-3), 1),
    "SOURCE, C = 6, L = 3": (whence.Source.published(segments=3), 6),
    "FastSource, L = 3": (whence.FastSource.published(segments=3), 6),
}
LLAMAS = {
    "7B": (4096, 11008, 32, 32, 32),
    "70B": (8192, 28672, 80, 64, 8),
}  # width, feed-forward, depth, heads, key-value heads
DOCUMENTS, TOKENS, GPUS, QUERIES, DIMENSION = 10**9, 512, 1000, 1000, 4096
GPU_HOURS_PER_FAILURE = 54 * 24 * 16384 / 419  # Llama 3: 419 interruptions in 54 days, 16,384 GPUs
RESTART = 0.25  # hours from a failure until all ranks work again; finished chunks are kept
WITHIN = 0.3  # the aim: predicted / measured is within 1 ± this


def _model(name: str) -> tuple[nn.Module, whence.Task, Any]:
    """A benchmark's model without weights, its task and a batch."""
    work: Workload = WORKLOADS["gpt" if name == "gpt2-small" else name]
    with torch.device("meta"):
        if name == "gpt2-small":
            model: nn.Module = GPT(depth=12, width=768, vocabulary=50257, length=512, heads=12)
        else:
            model = work.model()
        labels = torch.zeros(2, dtype=torch.long)
        shapes = {"mlp": (784,), "resnet9": (3, 32, 32)}
        if name in shapes:
            return model, work.task, (torch.zeros(2, *shapes[name]), labels)
        return model, work.task, torch.zeros(2, LENGTHS[name], dtype=torch.long)


@cache
def predicted(name: str, method: str, precision: str, train: int, query: int, batch: int) -> Any:
    """The estimate of one measurement on an H200."""
    chosen, checkpoints = METHODS[method]
    sizes: dict[str, Any] = {"examples": train, "queries": query, "batch_size": batch}
    how: dict[str, Any] = {"gpu": "h200", "dtype": DTYPES[precision], "checkpoints": checkpoints}
    how |= {"layers": "matrices"}  # as was measured
    model, task, batch_of_two = _model(name)
    return estimate(model, task, batch_of_two, chosen, **sizes, **how)


def comparisons() -> list[tuple[str, float, float]]:
    """(what, predicted seconds, measured seconds) of every measurement on one GPU."""
    gpu = json.loads((RESULTS / "on_gpu.json").read_text())
    rows = []
    for key, r in gpu["runs"].items():
        name, precision = key.split()
        plan = predicted(name, "influence", precision, r["train"], r["query"], r["batch"])
        measured = sum(stage["seconds"] for stage in r["stages"].values())
        what = f"influence, {name} ({r['train']:,} × {r['query']:,}), {precision}"
        rows.append((what, 3600 * plan.hours, measured))
    for precision, r in gpu["source"].items():
        batch = gpu["runs"][f"gpt2-small {precision}"]["batch"]
        for method in METHODS:
            what = f"{method}, gpt2-small ({r['train']} × {r['query']}), {precision}"
            plan = predicted("gpt2-small", method, precision, r["train"], r["query"], batch)
            rows.append((what, 3600 * plan.hours, r["work"][method]["seconds"]))
    return rows


def check_table() -> list[str]:
    """Predicted and measured seconds."""
    lines = [
        "| | predicted, s | measured, s | predicted / measured | |",
        "|---|---:|---:|---:|---|",
    ]
    for what, guess, measured in comparisons():
        ratio = guess / measured
        verdict = "" if abs(ratio - 1) <= WITHIN else "**outside 30 %**"
        lines.append(f"| {what} | {guess:.3g} | {measured:.3g} | {ratio:.2f} | {verdict} |")
    inside = sum(abs(guess / measured - 1) <= WITHIN for _, guess, measured in comparisons())
    return [*lines, "", f"Within 30 %: {inside} of {len(comparisons())}."]


def other_checks() -> list[str]:
    """Memory of one GPU, and bytes between two processes."""
    lines = ["| | predicted | measured | predicted / measured |", "|---|---:|---:|---:|"]

    def add(what: str, guess: float, measured: float) -> None:
        ratio = guess / measured
        lines.append(f"| {what} | {byte_size(guess)} | {byte_size(measured)} | {ratio:.2f} |")

    for key, r in json.loads((RESULTS / "on_gpu.json").read_text())["runs"].items():
        name, precision = key.split()
        plan = predicted(name, "influence", precision, r["train"], r["query"], r["batch"])
        add(f"memory, {name}, {precision}", sum(plan.memory.values()), r["memory_gib"] * 2**30)
    sent = json.loads((RESULTS / "several_processes.json").read_text())["gpt, influence"]
    sizes = {"examples": sent["train"], "queries": sent["query"], "gpus": 2, "checkpoints": 1}
    sizes |= {"layers": "matrices"}
    model, task, batch = _model("gpt")
    # On a CPU, as on a GPU without room for the factors of all layers, ranks exchange every batch.
    small = Gpu(67, 494, 989, 3.35, memory=0.2)
    sizes |= {"gpu": small, "batch_size": WORKLOADS["gpt"].batch}
    plan = estimate(model, task, batch, METHODS["influence"][0], **sizes)
    add("network, gpt, two processes", plan.network, max(rank["sent"] for rank in sent["two"]))
    return lines


def llama(name: str, documents: int, **settings: Any) -> Estimate:
    """An attribution of a Llama of this size on many GPUs."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width, inner, depth, heads, keys = LLAMAS[name]
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        vocab_size=32000,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
        batch = {"input_ids": torch.zeros(2, TOKENS, dtype=torch.long)}
    how: dict[str, Any] = {"gpus": GPUS, "gpu": "h100", "dtype": "bfloat16", "sharded": True}
    how |= {"queries": QUERIES, "query_rank": 16, "top": 1000, "layers": "matrices"}
    method, checkpoints = settings.pop("method"), settings.pop("checkpoints")
    task = whence.LanguageModeling()
    asked: dict[str, Any] = {"examples": documents, "checkpoints": checkpoints}
    return estimate(model, task, batch, method, **asked, **(how | settings))


@dataclass(frozen=True)
class Stored:
    """Building a gradient store: a projection of every example's gradient."""

    dimension: int
    default_layers = staticmethod(matrices)

    def terms(self, workspace: Any) -> list[Term]:
        return [Term("train", [workspace.run.final])]

    def counted(self, work: Work) -> Cost:
        each = {"projection": projecting(work.tracked, self.dimension)}
        return passes_cost(work.tracked, work.examples, each, {"projection": work.scored})


def last_quarter(modules: Mapping[str, nn.Module]) -> list[str]:
    """The names of the last quarter of the linear layers."""
    names = [name for name in modules if name in matrices(modules)]
    return names[-(len(names) // 4) :]


def paper_table() -> list[str]:
    """What 10⁹ documents would take."""
    last = {"layers": last_quarter}
    source = whence.Source(segments=3, curvature="ekfac")
    methods: dict[str, tuple[Any, int, dict[str, Any]]] = {
        "TracIn, one checkpoint": (whence.TracIn(), 1, {}),
        "influence": (whence.Influence(curvature="ekfac"), 1, {}),
        "SOURCE, C = 6, L = 3": (source, 6, {}),
        "SOURCE, C = 6, L = 3, AdamW": (source, 6, {"optimizer": "adamw"}),
        "influence, last quarter": (whence.Influence(curvature="ekfac"), 1, last),
        f"gradient store, d = {DIMENSION:,}": (Stored(DIMENSION), 1, {"queries": 1}),
    }
    lines = [
        "| | operations | days | memory per GPU | fits 80 GB | passes over the queries "
        "| received per GPU | disk | failures | hours lost to them |",
        "|---|---:|---:|---:|---|---:|---:|---:|---:|---:|",
    ]
    for name in LLAMAS:
        for what, (method, checkpoints, more) in methods.items():
            plan = llama(name, DOCUMENTS, method=method, checkpoints=checkpoints, **more)
            disk = sum(plan.disk.values())
            if isinstance(method, Stored):
                disk += 4.0 * DOCUMENTS * DIMENSION
            failures = GPUS * plan.hours / GPU_HOURS_PER_FAILURE
            cells = (
                f"{name}, {what}",
                f"{plan.operations:.1g}",
                f"{plan.hours / 24:,.0f}",
                byte_size(sum(plan.memory.values())),
                "yes" if plan.fits else f"no ({plan.limit.partition(': ')[2].partition(' (')[0]})",
                "" if isinstance(method, Stored) else str(plan.query_passes),
                byte_size(plan.network),
                byte_size(disk),
                f"{failures:,.0f}",
                f"{RESTART * failures:,.0f} ({RESTART * failures / plan.hours:.1%})",
            )
            lines.append(f"| {' | '.join(cells)} |")
    return lines


TABLES = {"scale": paper_table, "scale checks": check_table, "scale bytes": other_checks}
