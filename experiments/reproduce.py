"""The paper's evaluation of one task, piece by piece, resumable.

A result file holds what was found, each entry with the sizes it was found at. What it holds already
is not done again; larger sizes are. Trainings, runs and scores are kept in the work folder, so that
a run that was killed goes on from where it was.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset

import whence
from whence.data import Batches
from whence.engine.memory import allowance
from whence.evaluate import LDS, calibration, ground_truth, lds, subset_removal
from whence.layers.passes import products_as
from whence.persist.files import write_json
from whence.retrain import record
from whence.scores.ensemble import ensemble

from .machine import machine
from .optimum import at_the_optimum
from .tasks import Experiment, Scale

SCHEMA = 2
FIRST_RUN, FIRST_HALF, FIRST_DOWN = 1000, 2000, 3000  # seeds: none is one of the truth's
SHOWN = 5  # examples at either end in a panel
IN_PANELS = ("RepSim", "TracIn", "TRAK", "influence", "SOURCE")
FLOOR = 0.1  # under the roots of Adam's second moments
OVER_EPOCHS = 0.9  # α of the LDS over the number of epochs

Tell = Callable[[str], None]


class OtherResult(ValueError):
    """A result file that is not of this task as it is now."""


def method(name: str, experiment: Experiment, examples: int) -> Any:
    """A method by its name in the tables."""
    stage, segments = experiment.stage, experiment.segments
    made: Mapping[str, Callable[[], Any]] = {
        "SOURCE": lambda: whence.Source(segments=segments, stage=stage),
        "SOURCE, L = 1": lambda: whence.Source(segments=1, stage=stage),
        "FastSource": lambda: whence.FastSource(segments=segments, stage=stage),
        "SOURCE, λP⁻¹": lambda: whence.Source(
            segments=segments, stage=stage, damping="preconditioner"
        ),
        "SOURCE, λP⁻¹, floor": lambda: whence.Source(
            segments=segments, stage=stage, damping="preconditioner", floor=FLOOR
        ),
        "SOURCE, exact": lambda: whence.Source(segments=segments, stage=stage, exact=True),
        "SOURCE, exact, L = 1": lambda: whence.Source(segments=1, stage=stage, exact=True),
        "SOURCE, exact, floor": lambda: whence.Source(
            segments=segments, stage=stage, exact=True, floor=FLOOR
        ),
        "SOURCE, exact, floor, L = 1": lambda: whence.Source(
            segments=1, stage=stage, exact=True, floor=FLOOR
        ),
        "SOURCE, Gauss-Newton": lambda: whence.Source(
            segments=segments, stage=stage, curvature="gauss-newton"
        ),
        "SOURCE, Gauss-Newton, floor": lambda: whence.Source(
            segments=segments, stage=stage, curvature="gauss-newton", floor=FLOOR
        ),
        "influence": lambda: whence.Influence(stage=stage),
        'influence (λ = "source")': lambda: whence.Influence(damping="source", stage=stage),
        "influence, Arnoldi": lambda: whence.Influence(
            damping="source", solver="arnoldi", stage=stage
        ),
        "influence, conjugate gradients": lambda: whence.Influence(solver="cg", stage=stage),
        "DataInf": lambda: whence.Influence(solver="datainf", stage=stage),
        "TracIn": lambda: whence.TracIn(stage=stage),
        "TRAK": lambda: whence.Trak(min(experiment.trak, examples), stage=stage),
        "RepSim": lambda: whence.RepSim(stage=stage),
        "HYDRA": lambda: whence.Hydra(stage=stage),
        "Unrolled": lambda: whence.Unrolled(stage=stage),
        "Unrolled, expected, Gauss-Newton": lambda: whence.Unrolled(
            curvature="gauss-newton", expected=True, curvature_batch=512, stage=stage
        ),
        "Random": lambda: whence.Random(stage=stage),
    }
    if name not in made:
        raise ValueError(f"no method is called {name!r}: {', '.join(made)}")
    return made[name]()


@dataclass
class Place:
    """Where things are: trainings under `work`, the result in `file`."""

    work: Path
    file: Path


@dataclass(frozen=True)
class Judged:
    """What a method's scores are worth: of one model, and of all together."""

    scores: list[Any]
    single: LDS
    together: LDS


class Reproduction:
    """One task's evaluation.

    Args:
        experiment: which.
        quick: the small version.
        scale: how much (default: the experiment's own).
        work: folder for trainings, runs and scores.
        results: folder of the result file.
        tf32: let trainings round matrix products to TF32 on a GPU.
        tf32_scores: let attribution do so too, but for the experiment's `exact` methods.
        memory: what models trained at once may take, and what attribution may use.
        only: methods to judge (default: all of the experiment's).
        command: how it was called, for the record.
        tell: is told what is going on.
    """

    def __init__(
        self,
        experiment: Experiment,
        *,
        quick: bool = False,
        scale: Scale | None = None,
        work: Path,
        results: Path,
        device: str = "cpu",
        tf32: bool = False,
        tf32_scores: bool = False,
        memory: int | str | None = None,
        only: tuple[str, ...] | None = None,
        command: str = "",
        progress: bool = False,
        tell: Tell = print,
    ) -> None:
        self.experiment, self.quick, self.device = experiment, quick, device
        self.tf32, self.tf32_scores, self.memory = tf32, tf32_scores, memory
        self.room = allowance(memory, torch.device(device))  # refuses what it cannot read
        self.scale = scale or (experiment.quick if quick else experiment.full)
        name = experiment.name + ("-quick" if quick else "")
        self.place = Place(Path(work) / name, Path(results) / f"{name}.json")
        self.only, self.command, self.tell, self.progress = only, command, tell, progress
        self.recipe, held = experiment.recipe(quick)
        asked = min(self.scale.queries, len(held))
        self.query: Dataset[Any] = Subset(held, range(asked))
        self.measured = Subset(held, range(max(asked, min(self.scale.measured, len(held)))))
        self.examples = len(self.recipe.stage(experiment.stage).data)
        self.blocks = experiment.quick_blocks if quick else None
        self.layers = None if self.blocks is None else whence.layers.last_blocks(self.blocks)
        self.found = self._open()
        self._truths: dict[float, Any] = {}
        self._runs: dict[tuple[bool, str], list[whence.Run]] = {}
        self._scores: dict[tuple[str, int], Any] = {}
        self._judged: dict[tuple[str, int], Judged] = {}

    def _open(self) -> dict[str, Any]:
        """The result file, if it is of this task as it is now."""
        own = {
            "schema": SCHEMA,
            "task": self.experiment.name,
            "quick": self.quick,
            "recipe": self.recipe.fingerprint,
        }
        if self.place.file.exists():
            try:
                found: dict[str, Any] = json.loads(self.place.file.read_bytes())
            except json.JSONDecodeError as error:
                raise OtherResult(f"{self.place.file} is damaged ({error}): remove it") from None
            other = {k: found.get(k) for k in own if found.get(k) != own[k]}
            if other:
                told = ", ".join(f"its {k} is {v!r}, not {own[k]!r}" for k, v in other.items())
                raise OtherResult(
                    f"{self.place.file} is of another version or recipe ({told}): move it away, or "
                    "give another folder of results"
                )
            return found
        rate, weight_decay = self.experiment.found_rates()
        return own | {"rate": rate, "weight_decay": weight_decay, "lds": {}, "seconds": {}}

    def save(self) -> None:
        on_gpu = self.device.startswith("cuda")
        self.found |= {
            "examples": self.examples,
            "tracked": None if self.layers is None else f"the last {self.blocks} blocks",
            "device": torch.cuda.get_device_name() if on_gpu else "CPU",
            "tf32": self.tf32,
            "machine": machine() | {"whence": whence.__version__},
        }
        commands = self.found.setdefault("commands", [])
        if self.command not in commands:
            commands.append(self.command)
        self.place.file.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.place.file, self.found)

    def run(self) -> dict[str, Any]:
        """All parts; the result is saved after every piece."""
        scale = self.scale
        for name in self.experiment.methods:
            if self.wanted(name):
                self.judge(name, scale.models(name))
        self.differences()
        if scale.downsampled and self.wanted("Downsampling"):
            self.downsampling()
        for share in scale.alphas:
            self.at_alpha(share)
        if scale.epochs:
            for epochs in scale.epochs:
                self.at_epochs(epochs)
            self.optimum()
        if scale.panels:
            self.panels()
        if scale.removal is not None:
            self.removal()
        for name in self.experiment.dear:
            if self.wanted(name):
                self.judge(name, scale.models(name))
        self.differences()  # again: panels and removal may have opened more scores
        return self.found

    def wanted(self, name: str) -> bool:
        return self.only is None or name in self.only

    # ---- pieces -----------------------------------------------------------------------------

    def truth(self, alpha: float = 0.5, recipe: Any = None, name: str = "") -> Any:
        """M subsets × R seeds, of the queries that are asked about; 1.0 stands for leaving out one
        example."""
        share = 1 - 1 / self.examples if alpha == 1.0 else alpha
        with self.training(f"truth {name or format(alpha, 'g')}"):
            made = ground_truth(
                recipe or self.recipe,
                self.measured,
                share,
                self.scale.subsets,
                self.scale.seeds,
                self.experiment.stage,
                out=self.place.work / f"truth-{name or format(alpha, 'g')}",
                device=self.device,
                memory=self.memory,
                progress=self.progress,
            )
        asked = len(self.query)  # type: ignore[arg-type]
        if asked < len(self.measured):
            made.measurements = made.measurements[:, :, :asked]
            made.query = Batches("query", self.query).fingerprint()
        return made

    def reference(self, alpha: float = 0.5) -> Any:
        if alpha not in self._truths:
            self._truths[alpha] = self.truth(alpha)
        return self._truths[alpha]

    def runs(self, count: int, half: bool, recipe: Any, name: str) -> list[whence.Run]:
        """So many runs: on all data, or each on a half of its own. Trained at once, and once."""
        known = self._runs.get((half, name), [])
        if len(known) >= count:
            return known
        seeds = [(FIRST_HALF if half else FIRST_RUN) + k for k in range(count)]
        halves = [
            np.sort(np.random.default_rng(seed).permutation(self.examples)[: self.examples // 2])
            for seed in seeds
        ]
        with self.training("runs"):
            made = record(
                recipe,
                seeds,
                [self.place.work / f"run-{name}{seed}" for seed in seeds],
                self.experiment.checkpoints,
                halves if half else None,
                stage=self.experiment.stage,
                device=self.device,
                memory=self.memory,
                progress=self.progress,
            )
        self._runs[half, name] = made
        return made

    def study(self, k: int, half: bool = False, recipe: Any = None, name: str = "") -> whence.Study:
        """The k-th run: on all data, or (for TRAK's ensembles) on half of it."""
        recipe = recipe or self.recipe
        run = self.runs(max(self.scale.runs, k + 1), half, recipe, name)[k]
        data = {stage.name: stage.data.dataset for stage in recipe.stages}
        train = data if len(data) > 1 else next(iter(data.values()))
        held = run if self.experiment.kept else run.in_memory()
        return whence.Study(recipe.build(0), recipe.task, train, held, layers=self.layers)

    def attribute(self, name: str, study: whence.Study, folder: str) -> Any:
        """Scores of a method, made once; in less memory where it is short."""
        chosen = method(name, self.experiment, self.examples)
        given: dict[str, Any] = {"device": self.device, "progress": self.progress}
        out = self.place.work / "scores" / folder
        if isinstance(chosen, whence.Random):
            return chosen.attribute(study, self.query, out=out, progress=self.progress)
        given["memory"] = self.memory
        for shrunk in range(6):
            try:
                with products(self.rounds(name)):
                    return chosen.attribute(study, self.query, out=out, **given)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                given["memory"] = self.room >> (shrunk + 1)
                self.tell(f"{name}: out of memory; trying with {given['memory'] >> 20} MiB")
        raise MemoryError(f"{name} does not fit into the memory of {self.device}")

    def rounds(self, name: str) -> bool:
        """Whether a method's products are rounded to TF32."""
        on_gpu = self.device.startswith("cuda")
        return on_gpu and self.tf32_scores and name not in self.experiment.exact

    def scores(self, name: str, runs: int) -> list[Any]:
        """One for each run; the seconds of each are noted."""
        seconds = self.found["seconds"].setdefault("methods", {}).setdefault(name, {})
        for k in range(runs):
            if (name, k) in self._scores:
                continue
            study = self.study(k)
            start, known = time.perf_counter(), self.made(self.folder(name, k))
            made = self.attribute(name, study, self.folder(name, k))
            _wait(self.device)
            # what was made before is only opened now: its stages' own clocks tell
            spent = sum(made.diagnostics.get("seconds", {}).values())
            if known:
                seconds.setdefault(str(k), spent)
            else:
                seconds[str(k)] = time.perf_counter() - start
            self._scores[name, k] = made
        return [self._scores[name, k] for k in range(runs)]

    def together(self, name: str, runs: int) -> Any:
        """Scores of an ensemble: the mean; for TRAK its own, of half-data models."""
        if name != "TRAK" or runs == 1:
            return ensemble(self.scores(name, runs))
        studies = [self.study(k, half=True) for k in range(runs)]
        first = studies[0]
        train = first.train if len(first.train) > 1 else next(iter(first.train.values()))
        everyone = [study.runs[0] for study in studies]
        whole = whence.Study(first.model, self.recipe.task, train, everyone, layers=self.layers)
        return self.attribute(name, whole, self.folder(name, None, runs))

    def folder(self, name: str, k: int | None, runs: int = 0) -> str:
        """Where a method's scores are: of the k-th run, or of so many half-data models."""
        whose = f"half-{runs}" if k is None else str(FIRST_RUN + k)
        rounded = "-tf32" if self.rounds(name) else ""
        return f"{_slug(name)}-{whose}-{len(self.query)}{rounded}"  # type: ignore[arg-type]

    def of(self, runs: int) -> dict[str, int]:
        """The sizes that an entry was found at."""
        s = self.scale
        return {
            "subsets": s.subsets,
            "seeds": s.seeds,
            "queries": len(self.query),  # type: ignore[arg-type]
            "runs": runs,
        }

    def judge(self, name: str, runs: int) -> None:
        """LDS and calibration of a method, single and ensemble, at α = ½."""
        of = self.of(runs)
        if covers(self.found["lds"].get(name), of):
            return
        judged = self.judged(name, runs)
        entry = self.entry(judged.together, judged.single, of) | {
            "method": repr(method(name, self.experiment, self.examples)),
            "tf32": self.rounds(name),
            "slope": calibration(judged.scores, self.reference()).slope,
            "seconds": min(self.found["seconds"]["methods"][name].values()),
        }
        if runs == 1:
            entry["ensemble"] = None
        self.keep("lds", name, entry)

    def judged(self, name: str, runs: int) -> Judged:
        """Of one model, and of the ensemble."""
        if (name, runs) not in self._judged:
            truth, made = self.reference(), self.scores(name, runs)
            together = lds(made, truth)
            single = together.single or together
            if name == "TRAK" and runs > 1:
                made = [self.together(name, runs)]
                together = lds(made, truth)
            self._judged[name, runs] = Judged(made, single, together)
        return self._judged[name, runs]

    def differences(self) -> None:
        """How far apart methods that the paper compares are, by the same models and on the same
        resamples; of methods whose scores are at hand."""
        own, models = self.experiment.source, self.scale.models
        pairs = [(own, name) for name in self.experiment.methods if name != own]
        pairs += [("FastSource", "influence"), ("TracIn", "influence")]
        known = self.found.setdefault("differences", {})
        for one, other in pairs:
            fewest = min(models(one), models(other))
            of = self.of(fewest)
            done = covers(known.get(one, {}).get(other), of)
            if done or not all(self.at_hand(name, models(name)) for name in (one, other)):
                continue
            high, low = (self.judged(name, fewest) for name in (one, other))
            apart = {"single": high.single.minus(low.single)}
            if fewest > 1:
                apart["ensemble"] = high.together.minus(low.together)
                apart["single, ensemble"] = high.single.minus(low.together)
            entry: dict[str, Any] = {k: [d.value, *d.interval] for k, d in apart.items()}
            known.setdefault(one, {})[other] = entry | {"of": of}
            self.save()

    def at_hand(self, name: str, runs: int) -> bool:
        """Whether a method was judged at these sizes, by scores that need not be made anew."""
        if self.found["lds"].get(name, {}).get("of") != self.of(runs):
            return False
        folders = [self.folder(name, k) for k in range(runs)]
        if name == "TRAK" and runs > 1:
            folders.append(self.folder(name, None, runs))
        return (name, runs) in self._judged or all(map(self.made, folders))

    def made(self, folder: str) -> bool:
        """Whether there are finished scores."""
        return (self.place.work / "scores" / folder / "scores.json").exists()

    def entry(self, result: Any, single: Any, of: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "single": None if single is None else [single.value, *single.interval],
            "ensemble": [result.value, *result.interval],
            "ceiling": result.ceiling,
            "diverged": result.diverged,
            "of": dict(of),
        }

    def keep(self, part: str, name: str, entry: dict[str, Any], under: str | None = None) -> None:
        place = self.found.setdefault(part, {})
        if under is not None:
            place = place.setdefault(under, {})
        place[name] = entry
        self.save()
        if "ensemble" in entry:
            one, more = entry["single"], entry["ensemble"]
            told = f"one {one[0]:.3f}  " if one else ""
            told += f"{entry['of']['runs']} models {more[0]:.3f}" if more else ""
            self.tell(f"{part} {under or ''} {name}: {told}")

    def downsampling(self) -> None:
        name, of = "Downsampling", self.of(0) | {"models": self.scale.downsampled}
        if covers(self.found["lds"].get(name), of):
            return
        start = time.perf_counter()
        with self.training("downsampling"):
            resampled = ground_truth(
                self.recipe,
                self.query,
                0.5,
                self.scale.downsampled,
                [FIRST_DOWN],
                out=self.place.work / "downsampled",
                seed=1,
                device=self.device,
                memory=self.memory,
                progress=self.progress,
            )
            scores = whence.Downsampling(resampled).attribute()
        seconds = time.perf_counter() - start
        result = lds(scores, self.reference())
        entry = self.entry(result, None, of) | {
            "method": "Downsampling(truth)",
            "slope": calibration(scores, self.reference()).slope,
            "seconds": seconds,
        }
        self.keep("lds", name, entry)

    def at_alpha(self, share: float) -> None:
        """LDS of the paper's methods at another sampling ratio."""
        runs, under = self.scale.runs, format(share, "g")
        for name in self.experiment.methods:
            if not self.wanted(name) or name in ("Random", "DataInf"):
                continue
            if covers(self.found.get("alpha", {}).get(under, {}).get(name), self.of(runs)):
                continue
            made = self.scores(name, runs)
            result = lds(made, self.reference(share))
            self.keep("alpha", name, self.entry(result, result.single, self.of(runs)), under)

    def at_epochs(self, epochs: int) -> None:
        """LDS of models trained for so many epochs, at α = 0.9, the truth made anew."""
        recipe = copy.copy(self.recipe)
        recipe.stages = tuple(replace(stage, epochs=epochs) for stage in recipe.stages)
        recipe._precise = None
        runs, under, truth = self.scale.runs, str(epochs), None
        for name in self.experiment.methods:
            done = covers(self.found.get("epochs", {}).get(under, {}).get(name), self.of(runs))
            if done or not self.wanted(name):
                continue
            if truth is None:
                truth = self.truth(OVER_EPOCHS, recipe, f"epochs-{epochs}")
            made = []
            for k in range(runs):
                study = self.study(k, recipe=recipe, name=f"epochs-{epochs}-")
                folder = f"epochs-{epochs}-{self.folder(name, k)}"
                made.append(self.attribute(name, study, folder))
            result = lds(made, truth)
            self.keep("epochs", name, self.entry(result, result.single, self.of(runs)), under)

    def optimum(self) -> None:
        """Influence where the optimum itself is computed, with all data and with subsets."""
        of = self.of(1) | {"seeds": 1}
        for share in (0.5, *self.scale.alphas):
            under = format(share, "g")
            known = self.found.get("optimum", {}).get(under, {})
            if known and all(covers(entry, of) for entry in known.values()):
                continue
            left = 1 - 1 / self.examples if share == 1.0 else share
            truth, all_scores = at_the_optimum(self.recipe, self.query, left, self.scale.subsets)
            for name, scores in all_scores.items():
                result = lds(scores, truth)
                self.keep("optimum", name, self.entry(result, result, of), under)

    def removal(self) -> None:
        """Subset removal by the mean scores of the runs."""
        asked = self.scale.removal
        assert asked is not None
        of = json.loads(json.dumps(asdict(asked))) | {"runs": self.scale.runs}
        if covers(self.found.get("removal"), of):
            return
        by_method = {name: self.together(name, self.scale.runs) for name in asked.methods}
        with self.training("removal"):
            result = subset_removal(
                self.recipe,
                by_method,
                self.query,
                asked.k,
                queries=asked.queries,
                select_seeds=asked.select_seeds,
                seeds=asked.seeds,
                stage=self.experiment.stage,
                out=self.place.work / "removal",
                device=self.device,
                memory=self.memory,
                progress=self.progress,
            )
        self.found["removal"] = {
            "of": of,
            "k": list(result.k),
            "queries": len(result.queries),
            "right": result.right,
            "trainings": result.trainings,
            "diverged": result.diverged,
            "flipped": {name: result.flipped(name).tolist() for name in result.margins},
            "interval": {name: result.interval(name).tolist() for name in result.margins},
            "differences": {
                name: [[d.value, *d.interval] for d in result.difference(own, name)]
                for own in result.margins.keys() & {self.experiment.source}
                for name in result.margins
                if name != own
            },
        }
        self.save()
        self.tell(str(result))

    def panels(self) -> None:
        """The most helpful and most harmful examples of a few queries, by the runs' mean scores."""
        of = {"queries": self.scale.panels, "runs": self.scale.runs}
        if covers(self.found.get("panels"), of):
            return
        names = [n for n in IN_PANELS if n in self.experiment.methods]
        if not all(map(self.wanted, names)):  # a panel is of all of them
            return
        by_method = {name: self.together(name, self.scale.runs) for name in names}
        self.found["panels"] = {
            "of": of,
            "methods": {
                name: [
                    {
                        "helpful": scores.helpful(row, SHOWN).examples,
                        "harmful": scores.harmful(row, SHOWN).examples,
                    }
                    for row in range(self.scale.panels)
                ]
                for name, scores in by_method.items()
            },
        }
        self.save()

    @contextmanager
    def training(self, what: str) -> Iterator[None]:
        """Train, at the precision that was asked for; seconds are added up over all calls."""
        start = time.perf_counter()
        with products(self.tf32):
            yield
        spent = self.found["seconds"]
        spent[what] = spent.get(what, 0.0) + time.perf_counter() - start


def of_one_model(experiment: Experiment, scale: Scale, folder: Path) -> dict[str, Any]:
    """LDS, slope and seconds of every method on one training, and the noise ceiling."""
    entries = Reproduction(experiment, scale=scale, work=folder, results=folder / "results").run()
    found = {name: entries["lds"][name] for name in experiment.methods}
    return {
        "ceiling": found[experiment.methods[0]]["ceiling"],
        "lds": {name: entry["single"] for name, entry in found.items()},
        "slope": {name: entry["slope"] for name, entry in found.items()},
        "seconds": {name: entry["seconds"] for name, entry in found.items()},
    }


def covers(entry: Mapping[str, Any] | None, of: Mapping[str, Any]) -> bool:
    """Whether an entry was found at these sizes, or larger ones."""
    if entry is None:
        return False
    known = entry["of"]

    def enough(name: str, asked: Any) -> bool:
        if isinstance(asked, int):
            return bool(known.get(name, 0) >= asked)
        return set(known.get(name, ())) >= set(asked)

    return all(enough(name, asked) for name, asked in of.items())


def products(rounded: bool) -> AbstractContextManager[None]:
    """With matrix products of float32 rounded to TF32 on a GPU, or as they are."""
    return products_as("high") if rounded else nullcontext()


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name.lower()).strip("-")


def command_line() -> str:
    """How this program was called."""
    return " ".join(["whence", *sys.argv[1:]])


def seconds_here(experiment: Experiment, scale: Scale, device: str) -> float:
    """About how long the trainings would take one by one on this machine: a few updates are made
    and timed. Trained many at a time they take less."""
    recipe, _ = experiment.recipe()
    model, total, per_update = recipe.build(0).to(device), 0.0, 0.0
    shares = [0.5, *scale.alphas]
    for stage in recipe.stages:
        updates = stage.updates(model, stage.make_optimizer(model), 0, np.arange(len(stage.data)))
        next(updates)
        start = time.perf_counter()
        for _ in range(3):
            next(updates)
        per_update = (time.perf_counter() - start) / 3
        whole = stage.total_steps(len(stage.data)) * per_update
        own = stage.name == recipe.stage(experiment.stage).name
        total += whole * 2 * scale.runs
        total += scale.subsets * scale.seeds * sum(whole * (a if own else 1) for a in shares)
        total += scale.downsampled * whole / 2
    return total
