"""Write the tables of the documentation, from committed results.

    python -m tools.tables

In a page, the text between `<!-- table: NAME -->` and `<!-- end -->` comes from the function that
`TABLES` has under that name. `tests/docs/test_cost_tables.py` checks that pages are up to date, and
that counted and measured costs agree as well as the page says.
"""

from __future__ import annotations

import inspect
import json
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import whence
from benchmarks.against_kronfluence import floors
from benchmarks.models import WORKLOADS, final_run
from benchmarks.report import least_of
from experiments import tasks
from experiments.pages import ours, tables
from experiments.pages.claims import difference, negated
from experiments.tasks import RESULTS
from experiments.tasks.board import SMOOTH
from experiments.tasks.forms import (
    BEST,
    DEFAULT,
    DEFAULT_BY_STAGE,
    INFLUENCE,
    PUBLISHED,
    one_stage,
)
from experiments.tasks.methods import ARGUMENTS
from tools import scale
from whence.layers.kind import ParameterBlock
from whence.methods.gradient import USUAL_STEPS
from whence.operators import cost

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MARKED = re.compile(r"(<!-- table: (.*?) -->\n)(.*?)(<!-- end -->)", re.S)
LAYER_TASKS = {  # in results/layers.json
    "wikitext2-quick": "GPT-2 of 2 layers, 40 retrainings",
    "gpt_smooth": "GPT-2 of 2 layers, AdamW, smooth",
    "gpt": "GPT-2 of 2 layers, AdamW",
    "cifar10_small": "ResNet-9 with batch norm",
    "sst2_small": "BERT of 2 layers from scratch, AdamW",
}
TASKS = {"digits": "Digits", "concrete": "Concrete", "fashion_mnist": "FashionMNIST"}
SLOPES = {  # method: its name in experiments/results
    "SOURCE, L = 3": "SOURCE",
    "SOURCE, L = 3, full Gauss-Newton matrix": "SOURCE, Gauss-Newton",
    "FastSource, L = 3": "FastSource",
    'influence (λ = "source")': 'influence (λ = "source")',
    "influence (λ = 1e-8)": "influence",
    "influence, conjugate gradients": "influence, conjugate gradients",
    "Unrolled, expected, Gauss-Newton": "Unrolled, expected, Gauss-Newton",
}
ADAM = {  # forms of SOURCE for Adam: their names in experiments/results
    "influence": "influence",
    "the paper's form": "SOURCE",
    "appendix C": "SOURCE, exact",
    "appendix C, floor": "SOURCE, exact, floor",
}
FULL_MATRIX = {  # SOURCE with the full Gauss-Newton matrix: what it is compared with
    "SOURCE, Gauss-Newton": "SOURCE",
    "SOURCE, Gauss-Newton, floor": "SOURCE, exact, floor",
}
EXACT_FORMS = {"SOURCE, exact": "", "SOURCE, exact, floor": " †"}
DEPTH = {"layers": "EK-FAC", "whole": "full matrix"}  # keys of depth.json
LANGUAGE = ("rte", "sst2", "qnli", "wikitext2")
FORMS = {  # the same, for adam.json
    "TracIn": "TracIn",
    "influence": "influence",
    "paper": "SOURCE",
    "exact": "SOURCE, exact",
    "exact, floor": "SOURCE, exact, floor",
}
# C checkpoints and L segments of the benchmarked methods
CHECKPOINTS = {"influence": (1, 1), "SOURCE, C = 6, L = 3": (6, 3), "FastSource, L = 3": (3, 3)}
# What the page claims: measured / counted seconds are at most this, by kind; never far below 1.
AT_MOST = {"float32": 3.0, "low precision": 25.0, "updates": 12.0}
AT_LEAST = 0.9
MEMORY = (0.2, 2.0)  # measured / counted bytes


@dataclass(frozen=True)
class Compared:
    """A measurement next to the formula."""

    what: str
    kind: str  # of AT_MOST, or "bytes"
    counted: float
    measured: float

    @property
    def ratio(self) -> float:
        return self.measured / self.counted


def results(file: str) -> Any:
    return json.loads((ROOT / "benchmarks/results" / f"{file}.json").read_text())


@cache
def operations(name: str, train: int, query: int) -> dict[str, float]:
    """Counted operations of each stage of influence functions on a workload."""
    torch.manual_seed(0)
    work = WORKLOADS[name]
    return floors(work, work.model().eval(), train, query)


def total(stages: dict[str, float], checkpoints: int = 1, segments: int = 1) -> float:
    """C passes of each kind, L eigendecompositions."""
    passes = sum(value for stage, value in stages.items() if stage != "eigendecomposition")
    return checkpoints * passes + segments * stages["eigendecomposition"]


def seconds() -> list[Compared]:
    """Every timed benchmark next to counted operations over the rate of a matrix product."""
    costs = []
    peers = results("against_kronfluence")
    for r in peers.values():
        name = f"influence, {r['workload']} ({r['train']:,} × {r['query']}), CPU"
        counted = total(operations(r["workload"], r["train"], r["query"])) / (r["gflops"] * 1e9)
        costs.append(Compared(name, "float32", counted, sum(r["whence"].values())))
    cpu = peers["mlp-full"]["gflops"] * 1e9  # the same machine, on the same day
    for workload, r in results("source_cost").items():
        for method, (c, segments) in CHECKPOINTS.items() if workload != "machine" else ():
            name = f"{method}, {workload} ({r['train']:,} × {r['query']}), CPU"
            counted = total(operations(workload, r["train"], r["query"]), c, segments) / cpu
            costs.append(Compared(name, "float32", counted, r["seconds"][method]))
    gpu = results("on_gpu")
    for key, r in gpu["runs"].items():
        workload, precision = key.split()
        stages = r["stages"].values()
        name = f"influence, {workload} ({r['train']:,} × {r['query']:,}), GPU, {precision}"
        counted = sum(s["share_of_peak"] * s["seconds"] for s in stages)
        kind = "float32" if precision == "float32" else "low precision"
        costs.append(Compared(name, kind, counted, sum(s["seconds"] for s in stages)))
    for precision, r in gpu["source"].items():
        whole = gpu["runs"][f"gpt2-small {precision}"]
        stages = {s: v["share_of_peak"] * v["seconds"] for s, v in whole["stages"].items()}
        for stage in stages.keys() - {"eigendecomposition"}:
            stages[stage] *= r["train"] / whole["train"]
        for method, (c, segments) in CHECKPOINTS.items():
            name = f"{method}, gpt2-small ({r['train']} × {r['query']}), GPU, {precision}"
            kind = "float32" if precision == "float32" else "low precision"
            counted = total(stages, c, segments)
            costs.append(Compared(name, kind, counted, r["work"][method]["seconds"]))
    r = results("trak_cost")
    p, n, q, d = (r[key] for key in ("parameters", "train", "query", "dimension"))
    counted = ((n + q) * 2 * p * d + n * (2 * 4 * p + 2 * p * q)) / cpu
    name = f"TRAK, d = {d:,}, MLP of {p:,} parameters ({n} × {q}), CPU"
    costs.append(Compared(name, "float32", counted, r["seconds"]["ours"]))
    r = results("store_cost")
    for q, v in r["queries"].items():
        read = r["bytes"] / r["bandwidth"]
        counted = read + 2 * r["examples"] * r["dimension"] * int(q) / cpu
        name = f"gradient store, {r['examples']:,} × {r['dimension']:,}, {q} queries, CPU"
        costs.append(Compared(name, "float32", counted, v["whole"]))
    r = results("unrolled_cost")
    for method, v in r["methods"].items():
        name = f"{method} ({r['updates']:,} updates, {r['query']} queries), GPU"
        costs.append(Compared(name, "updates", v["share_of_peak"] * v["seconds"], v["seconds"]))
    return costs


def gpt2_small() -> Any:
    """The shapes of its tracked layers, without making the model."""
    shapes = [(2304, 768), (768, 768), (3072, 768), (768, 3072)] * 12
    blocks = [
        ParameterBlock(f"{k}", o, i, bias=True, parameter=f"{k}.weight")
        for k, (o, i) in enumerate(shapes)
    ]
    positions = {b.name: 512 for b in blocks}
    untracked = (50257 + 512) * 768
    return SimpleNamespace(
        blocks=blocks, positions=positions, outputs=512 * 50257, untracked=untracked
    )


@cache
def tracked(name: str) -> Any:
    """The tracked layers of a workload."""
    if name == "gpt2-small":
        return gpt2_small()
    work = WORKLOADS[name]
    model = work.model().eval()
    study = whence.Study(
        model, work.task, train=work.data(4, 0), runs=final_run(model), layers="matrices"
    )
    cpu = torch.device("cpu")
    passes = study.passes(study.runs[0], device=cpu, dtype=torch.float32, quiet=True)["train"]
    every = sum(p.numel() for p in model.parameters())
    layers = passes.tracked
    return SimpleNamespace(
        blocks=layers.blocks,
        positions=layers.positions,
        outputs=layers.outputs,
        untracked=every - cost.vector_numbers(layers),
    )


def counted_bytes(name: str, queries: int, batch: int, segments: int = 1) -> float:
    """Bytes: weights, factors, query vectors, a batch."""
    layers = tracked(name)
    vector = cost.vector_numbers(layers)
    numbers = layers.untracked + vector + batch * cost.per_example_numbers(layers)
    numbers += segments * 2 * cost.factor_numbers(layers) + (segments + 1) * queries * vector
    return 4.0 * float(numbers)


def memory() -> list[Compared]:
    """Every measured peak next to the formula, in GiB."""
    costs = []
    for r in results("against_kronfluence").values():
        work = WORKLOADS[r["workload"]]
        query = work.reduced[1]
        name = f"influence, {work.name} ({query} queries, batch {work.batch}), CPU"
        counted = counted_bytes(work.name, query, work.batch) / 2**30
        costs.append(Compared(name, "bytes", counted, r["memory"]["ours"] / 2**10))
    gpu = results("on_gpu")
    for key, r in gpu["runs"].items():
        workload, precision = key.split()
        if precision == "float32":
            name = f"influence, {workload} ({r['query']:,} queries, batch {r['batch']:,}), GPU"
            counted = counted_bytes(workload, r["query"], r["batch"]) / 2**30
            costs.append(Compared(name, "bytes", counted, r["memory_gib"]))
    r, batch = gpu["source"]["float32"], gpu["runs"]["gpt2-small float32"]["batch"]
    for method, (_, segments) in CHECKPOINTS.items():
        name = f"{method}, gpt2-small ({r['query']} queries, batch {batch}), GPU"
        counted = counted_bytes("gpt2-small", r["query"], batch, segments) / 2**30
        costs.append(Compared(name, "bytes", counted, r["work"][method]["memory_gib"]))
    return costs


def _rows(costs: list[Compared], unit: str) -> list[str]:
    lines = [
        f"| | counted, {unit} | measured, {unit} | measured / counted |",
        "|---|---:|---:|---:|",
    ]
    lines += [f"| {c.what} | {c.counted:.3g} | {c.measured:.3g} | {c.ratio:.2g} |" for c in costs]
    return lines


def time_table() -> list[str]:
    """What was measured in float32."""
    return _rows([c for c in seconds() if c.kind == "float32"], "s")


def faster_table() -> list[str]:
    """TF32, bfloat16, and update by update, where matrix products take little of the time."""
    return _rows([c for c in seconds() if c.kind != "float32"], "s")


def memory_table() -> list[str]:
    return _rows(memory(), "GiB")


def range_table() -> list[str]:
    """How far measured times are from counted ones."""
    names = {
        "float32": "float32 products",
        "low precision": "TF32 and bfloat16 products",
        "updates": "`Unrolled` and `Hydra`, update by update",
    }
    lines = ["| | measured / counted | the page's factor |", "|---|---:|---:|"]
    for kind, name in names.items():
        ratios = [c.ratio for c in seconds() if c.kind == kind]
        lines.append(f"| {name} | {min(ratios):.1f} to {max(ratios):.1f} | {AT_MOST[kind]:g} |")
    ratios = [c.ratio for c in memory()]
    lines.append(
        f"| memory | {min(ratios):.2f} to {max(ratios):.1f} | {MEMORY[0]:g} to {MEMORY[1]:g} |"
    )
    return lines


def epoch_table() -> list[str]:
    """Methods from scratch, in plain passes over the same data."""
    lines = [f"| | {' | '.join(CHECKPOINTS)} |", "|---|" + "---:|" * len(CHECKPOINTS)]
    timed = {
        f"{name} ({r['train']:,} × {r['query']}), CPU": r["seconds"]
        for name, r in results("source_cost").items()
        if name != "machine"
    }
    for precision, r in results("on_gpu")["source"].items():
        by_method = {name: v["seconds"] for name, v in r["work"].items()}
        timed[f"gpt2-small ({r['train']} × {r['query']}), GPU, {precision}"] = by_method
    for name, took in timed.items():
        cells = [f"{took[method] / took['plain pass']:.0f}" for method in CHECKPOINTS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def retraining_table() -> list[str]:
    lines = ["| | updates of a training | trainings per second |", "|---|---:|---:|"]
    for file, device in (("retraining_cpu", "two cores"), ("retraining_cuda", "GPU")):
        for name, r in results(file).items():
            if name != "machine":
                rate = 1 / r["seconds_each"]["whence"]
                lines.append(f"| {name}, {device} | {r['updates']:,} | {rate:,.0f} |")
    return lines


def slope_table() -> list[str]:
    """Slopes of actual on predicted changes, of the methods that predict in a unit."""
    files = {title: RESULTS / f"{task}.json" for task, title in TASKS.items()}
    entries = {
        title: json.loads(file.read_text())["lds"]
        for title, file in files.items()
        if file.is_file()
    }
    lines = [f"| slope of actual on predicted change | {' | '.join(entries)} |"]
    lines.append("|---|" + "---:|" * len(entries))
    for method, name in SLOPES.items():
        cells = [f"{r[name]['slope']:.2g}" if name in r else "–" for r in entries.values()]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    ceilings = [f"{next(iter(r.values()))['ceiling']:.2f}" for r in entries.values()]
    return [*lines, f"| *noise ceiling of the LDS* | {' | '.join(ceilings)} |"]


def whole_table() -> list[str]:
    """SOURCE with the full Gauss-Newton matrix next to EK-FAC."""
    heads = ("task", "curvature", "LDS, one model", "LDS, mean of models", "slope", "seconds")
    lines = [f"| {' | '.join(heads)} |", "|---|---|---:|---:|---:|---:|"]
    results = tables.read(RESULTS)
    for task, r in results.items():
        for whole, name in FULL_MATRIX.items():
            for method in (name, whole) if whole in r["lds"] else ():
                e = r["lds"][method]
                row = (
                    f"{tables.title(task)}, {e['of']['queries']} queries" if method == name else "",
                    "EK-FAC" if method == name else "full Gauss-Newton",
                    tables.with_interval(e["single"]),
                    f"{tables.with_interval(e['ensemble'])} ({e['of']['runs']})",
                    f"{e['slope']:.2g}",
                    f"{e['seconds']:.1f}",
                )
                lines.append(f"| {' | '.join(map(str, row))} |")
    return [
        *lines,
        "",
        "L = 3. The slope is that of actual changes on those predicted by the models' mean scores. "
        f"Digits trained with AdamW: `Source({ARGUMENTS['SOURCE, exact, floor']})`, and "
        f"the full matrix with `floor=0.1`. {results['digits']['machine']['processor']}.",
    ]


def depth_table() -> list[str]:
    """Slope and LDS of both by the number of hidden layers."""
    study = json.loads((RESULTS / "depth.json").read_text())
    heads = [
        "optimizer",
        "hidden layers",
        *(f"{k}: {what}" for k in DEPTH.values() for what in ("slope", "LDS")),
    ]
    lines = [f"| {' | '.join([*heads, 'ceiling'])} |", "|---|---:|" + "---:|" * (len(heads) - 1)]
    for row in study["rows"]:
        cells = [
            cell
            for kind in DEPTH
            for name in (row["methods"][kind],)
            for cell in (f"{row['slope'][name]:.2f}", tables.with_interval(row["lds"][name]))
        ]
        about = f"{row['optimizer']} | {row['depth']}"
        lines.append(f"| {about} | {' | '.join(map(str, cells))} | {row['ceiling']:.2f} |")
    of, m = study["of"], study["machine"]
    return [
        *lines,
        "",
        f"Digits, hidden layers of {study['width']}, one model, L = 3; {of['subsets']} × "
        f"{of['seeds']} trainings for each row, {of['queries']} queries. AdamW uses `floor=0.1`, "
        f"its EK-FAC `Source({ARGUMENTS['SOURCE, exact']})`. {m['processor']}, torch {m['torch']}, "
        f"{m['date']}: `python -m experiments.studies.depth`.",
    ]


def adam_table() -> list[str]:
    """LDS of one model by each form of SOURCE, on tasks trained with AdamW."""
    heads = ["LDS, one model", "M × R", *ADAM]
    heads.append("appendix C − the paper's form")
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1)]
    fewer = set()
    for task, r in tables.read(RESULTS).items():
        if "SOURCE, exact" not in r["lds"] or r["quick"]:
            continue
        cells = [tables.with_interval(r["lds"][name]["single"]) for name in ADAM.values()]
        of = r["lds"]["SOURCE"]["of"]
        gaps = ((form, difference(r, "SOURCE", form)) for form in EXACT_FORMS)
        form, gap = next((form, x) for form, x in gaps if x is not None)
        cells.append(f"{tables.with_interval(negated(gap))}{EXACT_FORMS[form]}")
        fewer.add((of["runs"], r["lds"][form]["of"]["runs"]))
        sizes = f"{of['subsets']} × {of['seeds']}"
        lines.append(f"| {tables.title(task)} | {sizes} | {' | '.join(map(str, cells))} |")
    most, least = max(a for a, _ in fewer), min(b for _, b in fewer)
    return [
        *lines,
        "",
        f"Means over {most} models; {least} for appendix C on language models. The last column "
        f"compares the same models. *Appendix C* is `Source({ARGUMENTS['SOURCE, exact']})`. "
        "†: with the floor.",
    ]


def forms_table() -> list[str]:
    """LDS of one model by each form, over rates and lengths of training."""
    study = json.loads((RESULTS / "adam.json").read_text())
    heads = ["rate", "epochs", *FORMS, "ceiling"]
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1)]
    for row in study["rows"]:
        cells = [f"{row['lds'][name][0]:.2f}" for name in FORMS.values()]
        rate = f"{row['rate']:g}{', to 0' if row['falls'] else ''}"
        rate += " †" if row["chosen_on"] else ""
        lines.append(f"| {rate} | {row['epochs']} | {' | '.join(cells)} | {row['ceiling']:.2f} |")
    of, m, rows = study["of"], study["machine"], [row["lds"] for row in study["rows"]]
    widest = max((high - low) / 2 for r in rows for _, low, high in map(r.get, FORMS.values()))
    gains: dict[bool, list[float]] = {True: [], False: []}
    for row in study["rows"]:
        lds = row["lds"]
        gains[row["chosen_on"]].append(lds["SOURCE, exact, floor"][0] - lds["SOURCE, exact"][0])
    seen, new = (f"{round(min(g), 2) + 0.0:+.2f} to {max(g):+.2f}" for g in gains.values())
    last = sum(min(FORMS.values(), key=lambda name: r[name][0]) == "SOURCE" for r in rows)
    texts = [tables.read(RESULTS)[t]["lds"] for t in LANGUAGE]
    changed = max(
        abs(r["SOURCE, exact, floor"]["single"][0] - r["SOURCE, exact"]["single"][0]) for r in texts
    )
    return [
        *lines,
        "",
        "LDS of one model on digits, trained with AdamW, L = 3; "
        f"{of['subsets']} × {of['seeds']} trainings for each row, {of['queries']} queries, 95 % "
        f"intervals of at most ± {widest:.2f}. *paper* is the paper's form, *exact* is "
        f"`Source({ARGUMENTS['SOURCE, exact']})`, *floor* is `floor=0.1`. "
        "We compared floors of 0.01, 0.1 and 1 on the rows with †, and chose 0.1: it "
        f"changes *exact* by {seen} there, and by {new} on the other rows. The paper's form is "
        f"last in {last} of {len(rows)} rows. On the language models of the previous table, the "
        f"floor changes the LDS by at most {changed:.3f}. "
        f"{m['processor']}, torch {m['torch']}, {m['date']}: "
        "`python -m experiments.studies.adam`.",
    ]


STEPS_TO_DEFAULT = {  # heads of a table, and the forms in forms.json
    "influence": (INFLUENCE,),
    "the paper's form, L = 3": (PUBLISHED,),
    "L = 1": ("published, L = 1", PUBLISHED),
    "+ appendix C": ("appendix C, L = 1", "appendix C"),
    "+ coupling": ("coupled, L = 1", "coupled"),
    "+ query along the run": (DEFAULT, DEFAULT_BY_STAGE),
    "the same, L = 3": (DEFAULT_BY_STAGE,),
}


def default_table() -> list[str]:
    """LDS of one model, from the paper's form to the default, a step at a time."""
    steps = {name for names in STEPS_TO_DEFAULT.values() for name in names}
    stored = {  # of several protocols, the one with most steps
        task: max(entries, key=lambda entry: len(steps & set(entry["forms"])))
        for task, entries in ours.read(RESULTS).items()
    }
    heads = ["LDS, one model", "M × R", *STEPS_TO_DEFAULT]
    heads += ["`Source()` − the paper's form", "spread"]
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1)]
    for task, entry in sorted(stored.items(), key=lambda item: not item[1]["chosen_on"]):
        forms, of = entry["forms"], entry["protocol"]
        cells = []
        for names in STEPS_TO_DEFAULT.values():
            # the second name is of tasks with several stages, which have one segment for each
            names = names[:1] if one_stage(tasks.TASKS[task]) else names
            known = [forms[name]["single"][0] for name in names if name in forms]
            cells.append(f"{known[0]:.2f}" if known else "")
        default = forms[entry["source"]]
        gain, low, high = default["over"][PUBLISHED]["single"]
        cells += [f"{gain:+.2f} [{low:+.2f}, {high:+.2f}]", f"{default['spread']:.2f}"]
        title = f"{tables.title(task)}{' †' if entry['chosen_on'] else ''}"
        lines.append(f"| {title} | {of['subsets']} × {of['seeds']} | {' | '.join(cells)} |")
    return [
        *lines,
        "",
        "Each step includes the ones before it. *Spread* is the standard deviation of the "
        "predicted over that of the real changes, for one model: 1 is the right size. `Source()` "
        "is *the same, L = 3* where layers share weights over positions (CIFAR-10, RTE, SST-2, "
        "WikiText-2), and the column before it elsewhere. The defaults were chosen on the tasks "
        "with †, and on no other. "
        "`python -m experiments.studies.forms`.",
    ]


BEST_FORMS = {  # heads of a table, and the forms in forms.json
    "influence": INFLUENCE,
    "the paper's form": PUBLISHED,
    "`Source()`": None,
    "`Best()`": BEST,
    "2 iterations": "best, 2 iterations",
    "4": "best, 4 iterations",
    "16": "best, 16 iterations",
    "δ = 1": "best, damping 1",
    "δ = 10": "best, damping 10",
    "query at the end": "best, query at the end",
}
BEST_VARIANTS = list(BEST_FORMS)[4:]


def best_table() -> list[str]:
    """LDS of `Best` and its variants, at every α."""
    last = ["`Best()` − the paper's form", "spread of `Source()`", "of `Best()`"]
    forms_heads = [head for head in BEST_FORMS if head not in BEST_VARIANTS]
    lines = _heads("LDS", "α", "M × R", "runs", "ceiling", *forms_heads, *last)
    heads = "LDS of `Best()`", "α", "M × R", "default: 8 iterations, δ = 3", *BEST_VARIANTS
    variants = _heads(*heads)
    for task, entries in ours.read(RESULTS).items():
        for entry in sorted(entries, key=lambda entry: float(entry["protocol"]["alpha"])):
            forms = entry["forms"]
            if BEST not in forms:
                continue
            of = entry["protocol"]
            default = DEFAULT if DEFAULT in forms else DEFAULT_BY_STAGE
            cells = {}
            for head, name in BEST_FORMS.items():
                row = forms.get(name or default)
                both = row and row["ensemble"] and head in ("`Source()`", "`Best()`")
                value = "" if row is None else f"{row['single'][0]:.2f}"
                cells[head] = f"{value} / {row['ensemble'][0]:.2f}" if both else value
                if row is not None and row["runs"] == 1:
                    cells[head] += " †"
            gain, low, high = forms[BEST]["over"][PUBLISHED]["single"]
            first = [tables.title(task), f"{of['alpha']:g}", f"{of['subsets']} × {of['seeds']}"]
            main = [*first, str(forms[BEST]["runs"]), f"{forms[BEST]['ceiling']:.2f}"]
            main += [cells[head] for head in forms_heads]
            main.append(f"{gain:+.2f} [{low:+.2f}, {high:+.2f}]")
            main += [f"{forms[name]['spread']:.2f}" for name in (default, BEST)]
            lines.append(f"| {' | '.join(main)} |")
            varied = [cells[head] for head in BEST_VARIANTS]
            if any(varied):
                now = f"{forms[BEST]['single'][0]:.2f}"
                variants.append(f"| {' | '.join([*first, now, *varied])} |")
    return [
        *lines,
        "",
        "LDS of one model (the mean over the runs), and after the slash of the mean of their "
        "scores, on M × R retrainings. The difference is paired, with a 95 % interval. *Spread* is "
        "the standard deviation of the predicted over that of the real changes. "
        "`python -m experiments.studies.forms`.",
        "",
        "With other settings (†: of one run):",
        "",
        *variants,
    ]


def _heads(*names: str) -> list[str]:
    return [f"| {' | '.join(names)} |", "|---|" + "---:|" * (len(names) - 1)]


def best_cost_table() -> list[str]:
    """Seconds of `Source` and of `Best`."""
    study = json.loads((RESULTS / "best.json").read_text())
    lines = [
        "| task | queries | products | `Source()` | `Best()` | ratio |",
        "|---|---:|---|---:|---:|---:|",
    ]
    for task, row in study["tasks"].items():
        for products, least in row["seconds"].items():
            a, b = least["Source"], least["Best"]
            lines.append(
                f"| {tables.title(task)} | {row['queries']} | {products} | {a:.1f} s | {b:.1f} s | "
                f"{b / a:.1f}× |"
            )
    return [
        *lines,
        "",
        f"From scratch to scores, {least_of(study['rounds'], 'alternating rounds')}; "
        f"{study['device']}. `python -m experiments.studies.best`.",
    ]


FAULTS = {  # the kinds of tests/faults: what is attempted, what must not happen
    "SIGKILL": (
        "a process is killed one to three times, anywhere in recording one or several runs, "
        "fitting, scoring, going back through a training (Unrolled, Hydra), building a store, "
        "ground truth, or retraining for the explorer; then the same call",
        "other bits, or a folder that cannot be resumed",
    ),
    "flipped bytes": (
        "a flipped bit, a lost end or a zeroed sector in any file, finished or not",
        "another answer, or an error that is not whence's",
    ),
    "full disk": (
        "no room left, at a random moment: a disk of a few pages (tmpfs, if one may be mounted), a "
        "limit of the size of files, or an error of fsync; then the same call with room",
        "an error that does not say so, or other bits",
    ),
    "several processes": (
        "two to four processes do the same job in one folder",
        "another answer, an error other than a lock that is held, or damage",
    ),
    "hostile files": (
        "absurd values in JSON, headers of terabytes, deep nesting, other kinds of files, folders",
        "an error that is not whence's, a hang, or more than 4 GiB of memory",
    ),
    "hostile texts": (
        "names with control characters, markup, TeX, halves of surrogate pairs",
        "a crash, or a character that the terminal obeys",
    ),
    "random networks": (
        "random networks, tasks, curvatures and segments",
        "SOURCE or TracIn that differ from dense float64 matrices",
    ),
    "random programs": (
        "random training programs with a Recorder: model, data, optimizer (SGD, Adam, AdamW, "
        "RMSprop), schedule, loop",
        "SOURCE that differs from a brute force written from the paper",
    ),
}


def fault_table() -> list[str]:
    """Attempts to break whence, and how many succeeded."""
    result = json.loads((RESULTS / "faults.json").read_text())
    lines = ["| attempt | a failure is | attempts | failures |", "|---|---|---:|---:|"]
    for kind, (what, failure) in FAULTS.items():
        row = result["rows"][kind]
        cells = f"{row['attempts']} | {row['failures']}"
        lines.append(f"| **{kind}**: {what} | {failure} | {cells} |")
    machine = result["machine"]
    version = f"whence {machine['whence']}, PyTorch {machine['torch']}, {machine['date']}"
    commits = ", ".join(dict.fromkeys(row["commit"] for row in result["rows"].values()))
    return [
        *lines,
        "",
        f"{version}, commit {commits}, first seed {result['seed']}. `python -m tools.faults`.",
    ]


def processes_table() -> list[str]:
    """One process against two."""
    results = json.loads((ROOT / "benchmarks/results/several_processes.json").read_text())
    lines = [
        "| | one process, s | two, s | share | processor time of a rank | factors of a rank "
        "| sent by a rank | largest difference of a score |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, r in results.items():
        one, two = r["one"][0], r["two"]
        wall, cpu, factors, sent = (
            max(rank[key] for rank in two) for key in ("seconds", "cpu_seconds", "factors", "sent")
        )
        lines.append(
            f"| {name} ({r['train']:,} × {r['query']}) | {one['seconds']:.0f} | {wall:.0f} "
            f"| {wall / one['seconds']:.2f} | {cpu / one['cpu_seconds']:.2f} "
            f"| {factors / one['factors']:.0%} | {sent / 2**20:,.0f} MiB | {r['agreement']:.0e} |"
        )
    m = next(iter(results.values()))["machine"]
    rounds = " and ".join(dict.fromkeys(least_of(r["rounds"]) for r in results.values()))
    dates = " and ".join(dict.fromkeys(r["machine"]["date"] for r in results.values()))
    lines += [
        "",
        "`python -m benchmarks.several_processes`: from scratch, one thread for each process, "
        f"gloo, {rounds}, {m['processor']} with two cores, "
        f"torch {m['torch']}, {dates}. Differences are relative to the largest score.",
    ]
    lines += [
        f"Other work had the two cores at the same time in {name} (load {r['load']:.0f}): compare "
        "its processor times, not its seconds."
        for name, r in results.items()
        if r.get("load", 0) > 3
    ]
    return lines


def estimated_table() -> list[str]:
    """The estimate before an attribution, counted and timed."""
    lines = [
        "| | estimated / counted operations | estimated, s | measured, s | estimated / measured |",
        "|---|---:|---:|---:|---:|",
    ]
    measured, adamw = results("estimated"), results("estimated")["after AdamW"]["cases"]
    for what, r in (measured["cases"] | adamw).items():
        (guessed, counted), (seconds, actual) = r["operations"], r["seconds"]
        lines.append(
            f"| {what} | {guessed / counted:.2f} | {seconds:.2g} | {actual:.2g} "
            f"| {seconds / actual:.2f} |"
        )
    ratios = sorted(r["operations"][0] / r["operations"][1] for r in adamw.values())
    steps = sorted(r["lanczos"] for r in adamw.values())
    return [
        *lines,
        "",
        f"After AdamW, the estimate assumes {USUAL_STEPS} Lanczos steps in each segment; the most "
        f"that a segment took here were {steps[0]} to {steps[-1]}. The estimated operations are "
        f"{ratios[0]:.2f} to {ratios[-1]:.2f} of the counted ones.",
    ]


def store_scale_table() -> list[str]:
    """The strongest of many stored rows, against reading their file."""
    r = json.loads((ROOT / "benchmarks/results/store_scale.json").read_text())
    queries = [key.split(", ")[1] for key in r["forms"]["full"]["seconds"] if key[:3] == "top"]
    lines = [
        "| rows | file | reading it | "
        + " | ".join(f"first answer, q = {q}" for q in queries)
        + " | "
        + " | ".join(f"second, q = {q}" for q in queries)
        + " | the disk is the bottleneck up to |",
        "|---|" + "---:|" * (2 * len(queries) + 3),
    ]
    for form, about in r["forms"].items():
        seconds, disk = about["seconds"], about["bytes"] / about["seconds"]["read"][0]
        most = r["rate"] * about["bytes"] / r["rows"] / (2 * r["dimension"] * disk)
        cells = [f"{about['bytes'] / 1e9:.2f} GB", f"{seconds['read'][0]:.2f} s"]
        for what in ("top", "again"):
            cells += ["{:.2f} s ({:.2f})".format(*seconds[f"{what}, {q}"]) for q in queries]
        lines.append(f"| `{form}` | {' | '.join(cells)} | q = {most:.0f} |")
    m = r["machine"]
    return [
        *lines,
        "",
        f"`python -m benchmarks.store_scale`: the 100 strongest of {r['rows']:,} rows, "
        f"d = {r['dimension']}, one thread for products, {m['processor']}, {m['date']}, "
        f"{least_of(r['rounds'])}, in brackets processor seconds. Other work had the machine's two "
        f"cores at the same time (load {r['load']:.0f}).",
    ]


def sharded_table() -> list[str]:
    """A model divided by FSDP2 against the whole one."""
    r = json.loads((ROOT / "benchmarks/results/sharded_model.json").read_text())
    lines = ["| model | peak memory of a rank | of its weights | seconds |", "|---|---:|---:|---:|"]
    for name, key in (("whole", "whole"), ("`fully_shard` of each block", "sharded")):
        peak, seconds = (max(rank[what] for rank in r[key]) for what in ("peak", "seconds"))
        lines.append(
            f"| {name} | {peak / 2**20:,.0f} MiB | {peak / r['weights']:.0%} | {seconds:.0f} |"
        )
    m = r["machine"]
    return [
        *lines,
        "",
        f"`python -m benchmarks.sharded_model`: TracIn, {r['train']} × {r['query']}, "
        f"{r['weights'] / 2**20:,.0f} MiB of weights in float32, two processes, one thread each, "
        f"gloo, {m['processor']}, torch {m['torch']}, {m['date']}. Largest relative difference of "
        f"a score: {r['difference']:.0g}.",
    ]


def layers_table() -> list[str]:
    """LDS with the matrices alone and with all layers."""
    lines = [
        "| training | protocol | method | matrices | all layers | difference [95 %] |",
        "|---|---|---|---:|---:|---:|",
    ]
    for task, entries in json.loads((RESULTS / "layers.json").read_text())["tasks"].items():
        for entry in entries:
            for method, rows in entry["methods"].items():
                if "all" in rows:
                    gap = rows["all"]["minus matrices"]
                    digits = 2 if abs(gap[0]) >= 0.01 else 3
                    value, low, high = (f"{x:+.{digits}f}" for x in gap)
                    lines.append(
                        f"| {LAYER_TASKS[task]} | {entry['protocol'].get('protocol', 'expected')} "
                        f"| `{method}` | {rows['matrices']['lds']:.2f} | {rows['all']['lds']:.2f} "
                        f"| {value} [{low}, {high}] |"
                    )
    for task, entries in ours.read(RESULTS).items():
        for entry in entries:
            matrices, all_layers = entry["source"], f"{entry['source']}, all layers"
            if all_layers in entry["forms"]:
                row = entry["forms"][all_layers]
                gap, low, high = row["over"][matrices]["single"]
                lines.append(
                    f"| {tables.title(task)}, fine-tuned | expected | `Source` "
                    f"| {entry['forms'][matrices]['single'][0]:.2f} | {row['single'][0]:.2f} "
                    f"| {gap:+.3f} [{low:+.3f}, {high:+.3f}] |"
                )
    return lines


def smooth_table() -> list[str]:
    """How smooth trainings of a ResNet-9 are, and how well `Unrolled` predicts them."""
    file = ROOT / "experiments/results/smooth.jsonl"
    lines = [
        "| rate | epochs | metasmoothness | mean margin | LDS of `Unrolled` [95 %] | time |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for row in sorted(map(json.loads, file.read_text().splitlines()), key=_by_setting):
        rate, epochs = _by_setting(row)[:2]
        judged = " | ".join(_judged(row)) if "lds" in row else "– | –"
        lines.append(
            f"| {rate:g} | {epochs} | {row['metasmoothness']:.2f} | {row['measured']:.2f} "
            f"| {judged} |"
        )
    return lines


def _by_setting(row: Any) -> tuple[float, int, bool]:
    settings = row["of"]["settings"]
    epochs = inspect.signature(SMOOTH[row["of"]["task"]]).parameters["epochs"].default
    return settings["rate"], settings.get("epochs", epochs), "lds" in row


def _judged(row: Any) -> tuple[str, str]:
    value, low, high = row["lds"]
    return f"{value:.2f} [{low:.2f}, {high:.2f}]", f"{row['times the training']:.1f}×"


TABLES: dict[str, Callable[[], list[str]]] = {
    "faults": fault_table,
    "default": default_table,
    "best": best_table,
    "best cost": best_cost_table,
    "time": time_table,
    "faster": faster_table,
    "memory": memory_table,
    "ranges": range_table,
    "epochs": epoch_table,
    "retraining": retraining_table,
    "slopes": slope_table,
    "whole": whole_table,
    "depth": depth_table,
    "adam": adam_table,
    "forms": forms_table,
    "processes": processes_table,
    "estimated": estimated_table,
    "sharded": sharded_table,
    "store scale": store_scale_table,
    "smooth": smooth_table,
    "layers": layers_table,
    **scale.TABLES,
}


def filled(text: str) -> str:
    """A page with its tables filled in."""

    def table(mark: re.Match[str]) -> str:
        return f"{mark[1]}\n" + "\n".join(TABLES[mark[2]]()) + f"\n\n{mark[4]}"

    return MARKED.sub(table, text)


def main() -> None:
    warnings.simplefilter("ignore")
    for path in sorted(DOCS.rglob("*.md")):
        text = path.read_text()
        if MARKED.search(text):
            path.write_text(filled(text))
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
