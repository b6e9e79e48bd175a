"""What each method costs and how well it predicts retraining: the table of docs/methods.md.

    python -m experiments.compare_methods --task digits [--device cuda] [--only Source ...]

For one task: a truth (M subsets × R seeds of half the data), K trained models that the truth does
not hold, every method on each of them. LDS of a single model (mean over the K) and of the mean of
their scores; slope of the real on the predicted change; wall seconds for one model, fitting
included, nothing cached. Trainings are kept under --work, so that the same command goes on where it
was; methods may be added one by one.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset

import whence
from benchmarks.report import machine
from experiments.tasks import TASKS
from whence.evaluate import calibration, ground_truth, lds

RESULTS = Path(__file__).parent / "results"
FIRST_RUN, FIRST_HALF, FIRST_DOWN = 1000, 2000, 3000  # seeds: none is one of the truth's
STORE_DIMENSIONS = (64, 256, 1024)
DOWNSAMPLED = 512  # half-data models (appendix B.4)
TRAK_DIMENSIONS = {"digits": 512, "concrete": 512, "fashion_mnist": 4096}


def methods(task: str) -> dict[str, Callable[[], Any]]:
    """Every method that works on a recorded run."""
    return {
        "SOURCE, L = 3": lambda: whence.Source(segments=3),
        "SOURCE, L = 1": lambda: whence.Source(segments=1),
        "FastSource, L = 3": lambda: whence.FastSource(segments=3),
        "influence (λ = 1e-8)": lambda: whence.Influence(),
        'influence (λ = "source")': lambda: whence.Influence(damping="source"),
        "influence, Arnoldi": lambda: whence.Influence(damping="source", solver="arnoldi"),
        "DataInf": lambda: whence.Influence(solver="datainf"),
        "TracIn": lambda: whence.TracIn(),
        "TRAK": lambda: whence.Trak(dimension=TRAK_DIMENSIONS[task]),
        "RepSim": lambda: whence.RepSim(),
        "HYDRA": lambda: whence.Hydra(),
        "Unrolled": lambda: whence.Unrolled(),
        "Random": lambda: whence.Random(),
        "influence, conjugate gradients": lambda: whence.Influence(solver="cg"),
        "Unrolled, expected, Gauss-Newton": lambda: whence.Unrolled(
            curvature="gauss-newton", expected=True, curvature_batch=512
        ),
    }


class Comparison:
    """One task's truth, runs and results."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.device = options, options.device
        self.work = Path(options.work) / options.task
        self.recipe, query = TASKS[options.task]()
        self.query = Subset(query, range(min(options.queries, len(query))))
        self.file = Path(options.results) / f"methods_{options.task}.json"
        self.settings = {
            "alpha": 0.5,
            "subsets": options.subsets,
            "seeds": options.seeds,
            "runs": options.runs,
            "queries": len(self.query),
            "recipe": self.recipe.fingerprint,
        }
        self.found: dict[str, Any] = {"settings": self.settings, "methods": {}}
        if self.file.exists():
            earlier = json.loads(self.file.read_text())
            if earlier["settings"] != self.settings:
                raise SystemExit(
                    f"{self.file} was made with other settings ({earlier['settings']}): remove it, "
                    "or give the same"
                )
            self.found = earlier

    def truth(self, name: str = "truth", subsets: int | None = None, **changes: Any) -> Any:
        return ground_truth(
            self.recipe,
            self.query,
            0.5,
            subsets or self.options.subsets,
            **({"seeds": self.options.seeds} | changes),
            out=self.work / name,
            device=self.device,
        )

    def studies(self, half: bool = False) -> list[whence.Study]:
        """A study for each run; TRAK's ensembles are of models trained on half of the data."""
        found = []
        count = len(self.recipe.stages[0].data)
        for k in range(self.options.runs):
            seed = (FIRST_HALF if half else FIRST_RUN) + k
            subset = np.random.default_rng(seed).permutation(count)[: count // 2] if half else None
            run = self.recipe.run(
                seed,
                self.work / f"run-{seed}",
                subset=None if subset is None else np.sort(subset),
                device=self.device,
            )
            data = self.recipe.stages[0].data.dataset
            found.append(
                whence.Study(self.recipe.build(0), self.recipe.task, data, run.in_memory())
            )
        return found

    def judge(self, name: str, method: Any, half: bool = False) -> None:
        studies, seconds, scores = self.studies(), [], []
        for study in studies:
            if self.device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            given = {} if isinstance(method, whence.Random) else {"device": self.device}
            scores.append(method.attribute(study, self.query, progress=False, **given))
            seconds.append(time.perf_counter() - start)
        result = lds(scores, self.reference)
        single = result.single or result
        if half:  # TRAK's ensemble: of half-data models, and not a mean of scores
            runs = [study.runs[0] for study in self.studies(half=True)]
            together = whence.Study(
                studies[0].model, self.recipe.task, studies[0].train["train"], runs
            )
            scores = [method.attribute(together, self.query, progress=False, device=self.device)]
            result = lds(scores, self.reference)
        slope = calibration(scores, self.reference).slope
        self.keep(name, repr(method), result, single, min(seconds), slope)

    def keep(
        self, name: str, method: str, result: Any, single: Any, seconds: float, slope: float
    ) -> None:
        self.found["methods"][name] = {
            "method": method,
            "single": None if single is None else [single.value, *single.interval],
            "ensemble": [result.value, *result.interval],
            "seconds": seconds,
            "slope": slope,
        }
        self.found["ceiling"] = result.ceiling
        self.save()
        told = "–" if single is None else f"{single.value:.3f}"
        print(
            f"{name:36} single {told}  ensemble {result.value:.3f}  {seconds:.1f} s  "
            f"slope {slope:.3g}",
            flush=True,
        )

    def save(self) -> None:
        self.write(self.file, self.found)

    def write(self, file: Path, found: dict[str, Any]) -> None:
        found |= {
            "task": self.options.task,
            "device": torch.cuda.get_device_name() if self.device == "cuda" else "CPU",
            "machine": machine(),
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found, indent=1) + "\n")

    def stores(self) -> None:
        """SOURCE from gradient stores of several dimensions."""
        self.reference = self.truth()
        rows = []
        for projection in ("eigenbasis", "random"):
            for dimension in STORE_DIMENSIONS:
                scores, seconds = [], []
                for k, study in enumerate(self.studies()):
                    folder = self.work / f"store-{projection}-{dimension}-{k}"
                    store = whence.GradientStore.build(
                        study, folder, dimension, projection, device=self.device, progress=False
                    )
                    store.source(self.query, device=self.device, progress=False)  # once, to be warm
                    start = time.perf_counter()
                    scores.append(store.source(self.query, device=self.device, progress=False))
                    seconds.append(time.perf_counter() - start)
                found = lds(scores, self.reference)
                single = found.single or found
                rows.append(
                    {
                        "projection": projection,
                        "dimension": dimension,
                        "method": "SOURCE, L = 3",
                        "lds": [single.value, *single.interval],
                        "ensemble": [found.value, *found.interval],
                        "seconds": min(seconds),
                    }
                )
                print(projection, dimension, f"{single.value:.3f} {min(seconds):.2f} s", flush=True)
        about = {"settings": self.settings, "ceiling": found.ceiling, "rows": rows}
        self.write(self.file.with_name(f"store_{self.options.task}.json"), about)

    def run(self) -> None:
        self.reference = self.truth()
        print(self.reference, flush=True)
        wanted = self.options.only
        for name, method in methods(self.options.task).items():
            if (wanted and not any(w in name for w in wanted)) or name in self.found["methods"]:
                continue
            self.judge(name, method(), half=name == "TRAK")
        name = f"Downsampling, {DOWNSAMPLED} models"
        if name not in self.found["methods"] and (not wanted or "Downsampling" in wanted):
            start = time.perf_counter()
            resampled = self.truth("downsampled", DOWNSAMPLED, seeds=[FIRST_DOWN], seed=1)
            scores = whence.Downsampling(resampled).attribute()
            seconds = time.perf_counter() - start
            slope = calibration(scores, self.reference).slope
            result = lds(scores, self.reference)
            self.keep(name, "Downsampling(truth)", result, None, seconds, slope)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--task", choices=sorted(TASKS), required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--subsets", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--queries", type=int, default=500)
    parser.add_argument("--only", nargs="+", default=None, help="methods whose name holds one")
    parser.add_argument("--stores", action="store_true", help="gradient stores by dimension")
    parser.add_argument("--work", default="runs/compare", help="trainings, kept between calls")
    parser.add_argument("--results", default=str(RESULTS), help="folder of the result file")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    comparison = Comparison(options)
    if options.stores:
        comparison.stores()
    else:
        comparison.run()


if __name__ == "__main__":
    main()
