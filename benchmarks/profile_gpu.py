"""Where one workload spends its time on a GPU.

    python -m benchmarks.profile_gpu gpt2-small bf16 [--method source] [--train 256] [--parts ...]

Everything from scratch, after a warm-up at the same batch size. Four parts:

    wall       end to end, without any instrument, and by stage
    causes     by what the host was doing, waiting for the device before and after each; a cause
               inside another one counts once
    kernels    for each stage, on fewer examples (--share): operations by shape and by time on the
               device, and counts of launches, copies and synchronisations
    waits      the lines that make the host wait for the device, and how often
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import whence
from benchmarks.against_kronfluence import DAMPING
from benchmarks.models import final_run, run_of
from benchmarks.on_gpu import SIZES, settle
from whence import study
from whence.data import Batches
from whence.engine import queries, scoring
from whence.layers import passes, separate
from whence.methods import base
from whence.operators import factored, fit, products
from whence.persist import cache
from whence.scores import writer

PARTS = ("wall", "causes", "kernels", "waits")
METHODS = {
    "influence": whence.Influence.published(DAMPING),
    "source": whence.Source.published(3),
    "fastsource": whence.FastSource.published(3),
}
#: what the host does, by the functions that do it
CAUSES: dict[str, list[tuple[Any, str]]] = {
    "forward passes": [(whence.Task, "outputs"), (whence.LanguageModeling, "outputs")],
    "losses and draws": [(passes.Passes, "_values")],
    "losses noted": [(passes.Passes, "_watch")],
    "losses tried": [(passes.Passes, "tried")],
    "backward passes": [(torch.autograd, "grad")],
    "covariance products": [
        (products, "add_input_covariance"),
        (products, "add_output_covariance"),
        (products, "add_whole_grams"),
    ],
    "eigenvalue products": [(products, "add_squares")],
    "score products": [(products.Readout, "add_inner"), (products.FactoredReadout, "add_inner")],
    "eigendecompositions": [(torch.linalg, "eigh")],
    "query gradients built": [(queries, "build")],
    "query vectors rotated": [(factored, "rotate"), (scoring, "rotate")],
    "query vectors ready": [(products.Readout, "of")],
    "factors: cache": [
        (cache.FactorCache, name) for name in ("put", "get", "offer_snapshot", "snapshot")
    ],
    "factors: placed": [(fit.Fitter, "_placed")],
    "model copied": [(study, "loader")],
    "weights loaded": [(passes.WeightLoader, "load")],
    "layers found": [(study, "find")],
    "examples alone and in pairs": [
        (separate.Separation, "check_losses"),
        (separate.Separation, "check_gradients"),
    ],
    "examples alone and in a batch": [
        (passes.Passes, "_alone"),
        (separate.Separation, "compare_gradients"),
    ],
    "data hashed": [(Batches, "fingerprint"), (Batches, "check_unchanged")],
    "model hashed": [(study, "model_identity"), (study, "model_sha256"), (base, "key_of")],
    "evidence and warnings": [(study.Study, "warnings"), (study.Study, "query_warnings")],
    "data read": [(Batches, "take")],
    "data to the device": [(passes, "place")],
    "scores written": [(writer.ScoreWriter, name) for name in ("write", "finish")],
    "stages: the rest": [(passes.Clock, "__call__")],
}


class Stopwatch:
    """Seconds and calls by cause, each without the causes inside it."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.calls = device, Counter[str]()
        self.seconds: dict[str, float] = defaultdict(float)
        self._open: list[str] = ["everything else"]
        self._since = 0.0

    def switch(self) -> None:
        """Book the time since the last switch for what is open."""
        settle(self.device)
        now = time.perf_counter()
        self.seconds[self._open[-1]] += now - self._since
        self._since = now

    @contextmanager
    def __call__(self, cause: str) -> Iterator[None]:
        self.switch()
        self._open.append(cause)
        self.calls[cause] += 1
        try:
            yield
        finally:
            self.switch()
            self._open.pop()

    def run(self, work: Callable[[], Any]) -> None:
        with instrumented(self):
            settle(self.device)
            self._since = time.perf_counter()
            work()
            self.switch()

    def table(self) -> None:
        total = sum(self.seconds.values())
        print(f"\ncauses: {total:.2f} s, the instrument included")
        for cause, seconds in ranked(self.seconds):
            print(f"  {seconds:8.3f} s  {seconds / total:4.0%}  {self.calls[cause]:6}  {cause}")


@contextmanager
def instrumented(watch: Stopwatch) -> Iterator[None]:
    """Every function of `CAUSES` under the stopwatch."""
    before = []
    try:
        for cause, functions in CAUSES.items():
            for owner, name in functions:
                original = getattr(owner, name)
                before.append((owner, name, vars(owner)[name]))
                setattr(owner, name, watched(original, cause, watch))
        yield
    finally:
        for owner, name, original in reversed(before):
            setattr(owner, name, original)


def watched(original: Callable[..., Any], cause: str, watch: Stopwatch) -> Callable[..., Any]:
    if cause.startswith("stages"):  # a context, whose body is watched

        @contextmanager
        def entered(self: Any, work: str) -> Iterator[None]:
            with watch(f"{work}: the rest"), original(self, work):
                yield

        return entered

    @functools.wraps(original)
    def called(*arguments: Any, **keywords: Any) -> Any:
        with watch(cause):
            return original(*arguments, **keywords)

    return called


class Kernels:
    """A profile of each stage."""

    def __init__(self, device: torch.device, rows: int) -> None:
        self.device, self.rows = device, rows
        self.profiles: dict[str, list[profile]] = {}
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self.device.type == "cuda")
        with profile(activities=kinds, record_shapes=True) as profiled:
            start = time.perf_counter()
            yield
            settle(self.device)
            self.seconds[stage] += time.perf_counter() - start
        self.profiles.setdefault(stage, []).append(profiled)

    def run(self, work: Callable[[], Any]) -> None:
        """With a profile for each stage."""
        plain = passes.Clock.__call__

        @contextmanager
        def profiled(clock: Any, stage: str) -> Iterator[None]:
            with plain(clock, stage), self(stage):
                yield

        passes.Clock.__call__ = profiled  # type: ignore[method-assign, assignment]
        try:
            work()
        finally:
            passes.Clock.__call__ = plain  # type: ignore[method-assign]

    def tables(self) -> None:
        for stage, profiles in self.profiles.items():
            events = [e for each in profiles for e in each.key_averages(group_by_input_shape=True)]
            self._table(stage, events)

    def _table(self, stage: str, events: list[Any]) -> None:
        on_device = self.device.type == "cuda"

        def seconds(event: Any) -> float:
            time = event.self_device_time_total if on_device else event.self_cpu_time_total
            return float(time) / 1e6

        operations = [e for e in events if str(e.device_type) == "DeviceType.CPU"]
        kernels: dict[str, float] = defaultdict(float)
        calls: Counter[str] = Counter()
        for event in events:
            calls[event.key] += event.count
            if str(event.device_type) != "DeviceType.CPU":
                kernels[event.key] += seconds(event)
        busy = sum(kernels.values()) if on_device else sum(map(seconds, operations))
        print(f"\n{stage}: {self.seconds[stage]:.3f} s under the profiler, device {busy:.3f} s")
        print("  operations by shape: seconds, calls")
        for event in sorted(operations, key=seconds, reverse=True)[: self.rows]:
            shapes = str([shape for shape in event.input_shapes if shape])[:88]
            print(f"  {seconds(event):8.4f} {event.count:6}  {event.key:<36} {shapes}")
        print("  kernels: seconds, calls")
        for name, total in ranked(kernels)[: self.rows // 2]:
            print(f"  {total:8.4f} {calls[name]:6}  {name[:110]}")
        kinds = ("cudaLaunchKernel", "cuLaunchKernel", "Memcpy", "Memset", "Synchronize", "aten::")
        for kind in (*kinds, "Malloc"):
            names = {n: c for n, c in calls.items() if kind in n}
            if kind == "aten::":
                names = {n: c for n, c in names.items() if n in ("aten::item", "aten::nonzero")}
            if names:
                print(f"  {kind:<18}", ", ".join(f"{n[:44]} {c}" for n, c in names.items()))


def ranked(seconds: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(seconds.items(), key=lambda each: -each[1])


def waits(work: Callable[[], Any], rows: int) -> None:
    """The lines of the package that wait for the device, as `torch.cuda` reports them."""
    lines: Counter[str] = Counter()

    def noted(message: Any, *_: Any, **__: Any) -> None:
        if "synchroniz" in str(message):
            frames = [f for f in traceback.extract_stack() if "/whence/" in f.filename]
            places = [f"{f.filename.split('/whence/')[-1]}:{f.lineno}" for f in frames[-3:]]
            lines[" > ".join(places)] += 1

    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = noted
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    print(f"\nwaits: {sum(lines.values())}")
    for line, count in lines.most_common(rows):
        print(f"  {count:6}  {line}")


def store(file: Path, row: dict[str, Any]) -> None:
    """Add a row to results/profile_gpu.json."""
    results = json.loads(file.read_text()) if file.exists() else {"runs": []}
    results["runs"].append(row)
    file.write_text(json.dumps(results, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("workload", choices=list(SIZES))
    parser.add_argument("precision", choices=["float32", "tf32", "bf16"])
    parser.add_argument("--method", choices=list(METHODS), default="influence")
    parser.add_argument("--train", type=int, help="examples (default: half of the benchmark's)")
    parser.add_argument("--share", type=int, default=4, help="of which the kernels see one part")
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--results", type=Path, help="add the wall times to this file")
    parser.add_argument("--code", default="", help="what is measured, such as a commit")
    chosen = parser.parse_args()
    work, count, query = SIZES[chosen.workload]
    count = chosen.train or count // 2
    torch.set_float32_matmul_precision("high" if chosen.precision == "tf32" else "highest")
    dtype = torch.bfloat16 if chosen.precision == "bf16" else torch.float32
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model, asked = work.model().eval(), work.data(query, 2)
    run = run_of(model) if chosen.method != "influence" else final_run(model)

    def scored(count: int) -> Any:
        data = work.data(count, 1)

        def call() -> Any:
            study = whence.Study(model, work.task, train=data, runs=run, layers="matrices")
            options: dict[str, Any] = {"device": device, "dtype": dtype, "progress": False}
            return METHODS[chosen.method].attribute(study, asked, **options)

        return call

    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    print(f"{chosen.workload} {chosen.precision} {chosen.method}: {count} × {query}, {name}")
    fewer = max(1, count // chosen.share)
    start = time.perf_counter()
    scores = scored(fewer)()
    first = time.perf_counter() - start
    print(f"warm-up: {first:.2f} s, batch {scores.diagnostics['batch_size']}", flush=True)
    if "wall" in chosen.parts:
        settle(device)
        start = time.perf_counter()
        scores = scored(count)()
        settle(device)
        wall = time.perf_counter() - start
        seconds = scores.diagnostics["seconds"]
        print(f"\nwall: {wall:.2f} s, outside the stages {wall - sum(seconds.values()):.2f} s")
        for stage, time_in in seconds.items():
            print(f"  {time_in:8.3f} s  {stage}")
        sys.stdout.flush()
        if chosen.results is not None:
            about = {key: getattr(chosen, key) for key in ("code", "workload", "precision")}
            sizes = {"method": chosen.method, "train": count, "query": query, "device": name}
            store(chosen.results, about | sizes | {"wall": wall, "stages": seconds})
    if "causes" in chosen.parts:
        watch = Stopwatch(device)
        watch.run(scored(count))
        watch.table()
        sys.stdout.flush()
    if "kernels" in chosen.parts:
        kernels = Kernels(device, chosen.rows)
        kernels.run(scored(fewer))
        kernels.tables()
        sys.stdout.flush()
    if "waits" in chosen.parts and device.type == "cuda":
        waits(scored(fewer), chosen.rows)


if __name__ == "__main__":
    main()
