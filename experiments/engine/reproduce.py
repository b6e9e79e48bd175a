"""The paper's evaluation of one task, resumable.

The result file stores each number with the sizes it was computed at. A number that is already there
is computed again only for larger sizes. Trainings, runs and scores stay in the work folder, so an
interrupted evaluation resumes where it stopped.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import whence
from experiments.engine.optimum import at_the_optimum
from experiments.engine.trainings import FIRST_DOWN, Trainings, products
from experiments.tasks import Experiment, Scale
from experiments.tasks.machine import machine
from whence.engine.workspace import allowance
from whence.evaluate import LDS, calibration, ground_truth, lds, subset_removal
from whence.persist.files import write_json
from whence.retrain.grid import differences
from whence.retrain.recipe import fingerprint_of
from whence.scores import ensemble

SCHEMA = 2
EXAMPLES_IN_PANEL = 5  # helpful, and as many harmful
METHODS_IN_PANEL = ("RepSim", "TracIn", "TRAK", "influence", "SOURCE")
ALPHA_OVER_EPOCHS = 0.9


class OtherResult(ValueError):
    """A result file of another version or recipe of the task."""


@dataclass(frozen=True)
class Judgement:
    """A method's scores, and their LDS: of one model, and of the ensemble."""

    scores: list[Any]
    single: LDS
    ensemble: LDS


class Reproduction(Trainings):
    """One task's evaluation.

    Args:
        experiment: the task.
        results: folder of the result file.
        tf32_scores: attribute with products rounded to TF32 too, except for the experiment's
            `float32` methods.
        only: methods to judge (default: all of the experiment's).
        command: the command line, stored with the result.
        log: called with a line for each number.
        trainings: as in `Trainings`: quick, scale, work, device, tf32, memory, progress.

    Attributes:
        result: the content of the result file.
        file: the result file.
        work: folder of this task's trainings, runs and scores.
    """

    def __init__(
        self,
        experiment: Experiment,
        *,
        results: Path,
        tf32_scores: bool = False,
        only: tuple[str, ...] | None = None,
        command: str = "",
        log: Callable[[str], None] = print,
        **trainings: Any,
    ) -> None:
        super().__init__(experiment, **trainings)
        self.memory_limit = allowance(self.memory, torch.device(self.device))
        self.tf32_scores, self.file = tf32_scores, Path(results) / f"{self.name}.json"
        self.only, self.command, self.log = only, command, log
        self.result = self._open()
        self.seconds = self.result["seconds"]
        self._scores: dict[tuple[str, int], Any] = {}
        self._judgements: dict[tuple[str, int], Judgement] = {}

    def _open(self) -> dict[str, Any]:
        """The content of the result file, which must be of this version and recipe."""
        identity = json.loads(json.dumps(self.recipe.identity()))
        about = {
            "schema": SCHEMA,
            "task": self.experiment.name,
            "quick": self.quick,
            "recipe": fingerprint_of(identity),
        }
        if self.file.exists():
            try:
                result: dict[str, Any] = json.loads(self.file.read_bytes())
            except json.JSONDecodeError as error:
                raise OtherResult(f"{self.file} is damaged ({error}): remove it") from None
            differing = [
                f"its {key} is {result.get(key)!r}, not {value!r}"
                for key, value in about.items()
                if result.get(key) != value
            ]
            if result.get("identity") != identity:
                parts = differences(result.get("identity", {}), identity)
                differing.append(f"its recipe differs in {parts}")
            if differing:
                raise OtherResult(
                    f"{self.file} is of another version or recipe ({', '.join(differing)}): move "
                    "it, or choose another folder of results. If only whence's identity of recipes "
                    "changed, tools/carry_results.py can show it and carry the result over"
                )
            return result
        rate, weight_decay = self.experiment.chosen_rates()
        chosen = {"rate": rate, "weight_decay": weight_decay}
        return about | {"identity": identity} | chosen | {"lds": {}, "seconds": {}}

    def save(self) -> None:
        on_gpu = self.device.startswith("cuda")
        self.result |= {
            "examples": self.examples,
            "tracked": None if self.layers is None else f"the last {self.blocks} blocks",
            "device": torch.cuda.get_device_name() if on_gpu else "CPU",
            "tf32": self.tf32,
            "machine": machine() | {"whence": whence.__version__},
        }
        commands = self.result.setdefault("commands", [])
        if self.command not in commands:
            commands.append(self.command)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.file, self.result, checksum=False)

    def run(self) -> dict[str, Any]:
        """Compute all parts. The result is saved after each number."""
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
        for name in self.experiment.expensive:
            if self.wanted(name):
                self.judge(name, scale.models(name))
        self.differences()  # again: panels and removal may have computed more scores
        return self.result

    def wanted(self, name: str) -> bool:
        return self.only is None or name in self.only

    # --- scores ---------------------------------------------------------------------------------

    def attribute(self, name: str, study: whence.Study, folder: str) -> Any:
        """Scores of a method, computed once; with a lower memory limit if it runs out of memory."""
        method = self.experiment.method(name, self.examples)
        options: dict[str, Any] = {"device": self.device, "progress": self.progress}
        out = self.work / "scores" / folder
        if isinstance(method, whence.Random):
            return method.attribute(study, self.query, out=out, progress=self.progress)
        options["memory"] = self.memory
        for halvings in range(1, 7):
            try:
                with products(self.rounds(name)):
                    return method.attribute(study, self.query, out=out, **options)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                options["memory"] = self.memory_limit >> halvings
                self.log(f"{name}: out of memory; trying with {options['memory'] >> 20} MiB")
        raise MemoryError(f"{name} does not fit into the memory of {self.device}")

    def rounds(self, name: str) -> bool:
        """Whether a method's products are rounded to TF32."""
        on_gpu = self.device.startswith("cuda")
        return on_gpu and self.tf32_scores and name not in self.experiment.float32

    def scores(self, name: str, runs: int) -> list[Any]:
        """Scores of each run; the seconds of each are stored with the result."""
        seconds = self.result["seconds"].setdefault("methods", {}).setdefault(name, {})
        for k in range(runs):
            if (name, k) in self._scores:
                continue
            study = self.study(k)
            start, opened = time.perf_counter(), self.finished(self.folder(name, k))
            scores = self.attribute(name, study, self.folder(name, k))
            _synchronize(self.device)
            if opened:  # the time to open them says nothing; the scores know their own seconds
                spent = sum(scores.diagnostics.get("seconds", {}).values())
                seconds.setdefault(str(k), spent)
            else:
                seconds[str(k)] = time.perf_counter() - start
            self._scores[name, k] = scores
        return [self._scores[name, k] for k in range(runs)]

    def ensemble_scores(self, name: str, runs: int) -> Any:
        """The mean scores of the runs; for TRAK its own ensemble, of half-data models."""
        if name != "TRAK" or runs == 1:
            return ensemble(self.scores(name, runs))
        studies = [self.study(k, half=True) for k in range(runs)]
        first = studies[0]
        train = first.train if len(first.train) > 1 else next(iter(first.train.values()))
        all_runs = [study.runs[0] for study in studies]
        joint = whence.Study(first.model, self.recipe.task, train, all_runs, layers=self.layers)
        return self.attribute(name, joint, self.folder(name, None, runs))

    def folder(self, name: str, k: int | None, runs: int = 0) -> str:
        """The folder of a method's scores: of the k-th run, or of `runs` half-data models."""
        run = f"half-{runs}" if k is None else str(self.run_seed(k))
        rounded = "-tf32" if self.rounds(name) else ""
        return f"{_slug(name)}-{run}-{len(self.query)}{rounded}"  # type: ignore[arg-type]

    def sizes(self, runs: int) -> dict[str, int]:
        """The sizes that a number of this many runs is computed at."""
        return {
            "subsets": self.scale.subsets,
            "seeds": self.scale.seeds,
            "queries": len(self.query),  # type: ignore[arg-type]
            "runs": runs,
        }

    # --- numbers --------------------------------------------------------------------------------

    def judge(self, name: str, runs: int) -> None:
        """LDS and calibration of a method, single and ensemble, at α = ½."""
        sizes = self.sizes(runs)
        if covers(self.result["lds"].get(name), sizes):
            return
        judgement = self.judgement(name, runs)
        entry = self.entry(judgement.ensemble, judgement.single, sizes) | {
            "method": repr(self.experiment.method(name, self.examples)),
            "tf32": self.rounds(name),
            "slope": calibration(judgement.scores, self.reference()).slope,
            "seconds": min(self.result["seconds"]["methods"][name].values()),
        }
        if runs == 1:
            entry["ensemble"] = None
        self.store("lds", name, entry)

    def judgement(self, name: str, runs: int) -> Judgement:
        """LDS of one model, and of the ensemble."""
        if (name, runs) not in self._judgements:
            truth, scores = self.reference(), self.scores(name, runs)
            ensemble_lds = lds(scores, truth)
            single = ensemble_lds.single or ensemble_lds
            if name == "TRAK" and runs > 1:
                scores = [self.ensemble_scores(name, runs)]
                ensemble_lds = lds(scores, truth)
            self._judgements[name, runs] = Judgement(scores, single, ensemble_lds)
        return self._judgements[name, runs]

    def differences(self) -> None:
        """Differences between the methods that the paper compares, by the same models and on the
        same resamples. Only methods whose scores are finished are compared."""
        source, models = self.experiment.source, self.scale.models
        pairs = [(source, name) for name in self.experiment.methods if name != source]
        pairs += [("FastSource", "influence"), ("TracIn", "influence")]
        entries = self.result.setdefault("differences", {})
        for one, other in pairs:
            fewest = min(models(one), models(other))
            sizes = self.sizes(fewest)
            done = covers(entries.get(one, {}).get(other), sizes)
            if done or not all(self.at_hand(name, models(name)) for name in (one, other)):
                continue
            first, second = (self.judgement(name, fewest) for name in (one, other))
            differences = {"single": first.single.minus(second.single)}
            if fewest > 1:
                differences["ensemble"] = first.ensemble.minus(second.ensemble)
                differences["single, ensemble"] = first.single.minus(second.ensemble)
            entry: dict[str, Any] = {k: [d.value, *d.interval] for k, d in differences.items()}
            entries.setdefault(one, {})[other] = entry | {"of": sizes}
            self.save()

    def at_hand(self, name: str, runs: int) -> bool:
        """Whether a method was judged at these sizes, and its scores are finished."""
        if self.result["lds"].get(name, {}).get("of") != self.sizes(runs):
            return False
        folders = [self.folder(name, k) for k in range(runs)]
        if name == "TRAK" and runs > 1:
            folders.append(self.folder(name, None, runs))
        return (name, runs) in self._judgements or all(map(self.finished, folders))

    def finished(self, folder: str) -> bool:
        """Whether a folder has finished scores."""
        return (self.work / "scores" / folder / "scores.json").exists()

    def entry(self, result: Any, single: Any, sizes: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "single": None if single is None else [single.value, *single.interval],
            "ensemble": [result.value, *result.interval],
            "ceiling": result.ceiling,
            "diverged": result.diverged,
            "of": dict(sizes),
        }

    def store(self, part: str, name: str, entry: dict[str, Any], under: str | None = None) -> None:
        """Save a method's entry in a part of the result, and log it."""
        entries = self.result.setdefault(part, {})
        if under is not None:
            entries = entries.setdefault(under, {})
        entries[name] = entry
        self.save()
        single, ensemble = entry["single"], entry["ensemble"]
        line = f"one {single[0]:.3f}  " if single else ""
        line += f"{entry['of']['runs']} models {ensemble[0]:.3f}" if ensemble else ""
        self.log(f"{part} {under or ''} {name}: {line}")

    def downsampling(self) -> None:
        """LDS of Downsampling, from models trained on random halves."""
        name, sizes = "Downsampling", self.sizes(0) | {"models": self.scale.downsampled}
        if covers(self.result["lds"].get(name), sizes):
            return
        start = time.perf_counter()
        with self.training("downsampling"):
            resampled = ground_truth(
                self.recipe,
                self.query,
                0.5,
                self.scale.downsampled,
                [FIRST_DOWN],
                out=self.work / "downsampled",
                seed=1,
                device=self.device,
                memory=self.memory,
                progress=self.progress,
            )
            scores = whence.Downsampling(resampled).attribute()
        seconds = time.perf_counter() - start
        result = lds(scores, self.reference())
        entry = self.entry(result, None, sizes) | {
            "method": "Downsampling(truth)",
            "slope": calibration(scores, self.reference()).slope,
            "seconds": seconds,
        }
        self.store("lds", name, entry)

    def at_alpha(self, share: float) -> None:
        """LDS of the paper's methods at another sampling ratio."""
        runs, under = self.scale.runs, format(share, "g")
        for name in self.experiment.methods:
            if not self.wanted(name) or name in ("Random", "DataInf"):
                continue
            if covers(self.result.get("alpha", {}).get(under, {}).get(name), self.sizes(runs)):
                continue
            result = lds(self.scores(name, runs), self.reference(share))
            self.store("alpha", name, self.entry(result, result.single, self.sizes(runs)), under)

    def at_epochs(self, epochs: int) -> None:
        """LDS of models trained for this many epochs, at α = 0.9, with their own truth."""
        recipe = copy.copy(self.recipe)
        recipe.stages = tuple(replace(stage, epochs=epochs) for stage in recipe.stages)
        recipe._precise = None
        runs, under, truth = self.scale.runs, str(epochs), None
        for name in self.experiment.methods:
            done = covers(self.result.get("epochs", {}).get(under, {}).get(name), self.sizes(runs))
            if done or not self.wanted(name):
                continue
            if truth is None:
                truth = self.truth(ALPHA_OVER_EPOCHS, recipe, f"epochs-{epochs}")
            scores = []
            for k in range(runs):
                study = self.study(k, recipe=recipe, name=f"epochs-{epochs}-")
                folder = f"epochs-{epochs}-{self.folder(name, k)}"
                scores.append(self.attribute(name, study, folder))
            result = lds(scores, truth)
            self.store("epochs", name, self.entry(result, result.single, self.sizes(runs)), under)

    def optimum(self) -> None:
        """LDS of influence functions at the computed optimum, of all data and of subsets."""
        sizes = self.sizes(1) | {"seeds": 1}
        for share in (0.5, *self.scale.alphas):
            under = format(share, "g")
            entries = self.result.get("optimum", {}).get(under, {})
            if entries and all(covers(entry, sizes) for entry in entries.values()):
                continue
            alpha = 1 - 1 / self.examples if share == 1.0 else share
            truth, by_method = at_the_optimum(self.recipe, self.query, alpha, self.scale.subsets)
            for name, scores in by_method.items():
                result = lds(scores, truth)
                self.store("optimum", name, self.entry(result, result, sizes), under)

    def removal(self) -> None:
        """Subset removal, by the mean scores of the runs."""
        removal = self.scale.removal
        assert removal is not None
        sizes = json.loads(json.dumps(asdict(removal))) | {"runs": self.scale.runs}
        if covers(self.result.get("removal"), sizes):
            return
        by_method = {name: self.ensemble_scores(name, self.scale.runs) for name in removal.methods}
        with self.training("removal"):
            result = subset_removal(
                self.recipe,
                by_method,
                self.query,
                removal.k,
                queries=removal.queries,
                select_seeds=removal.select_seeds,
                seeds=removal.seeds,
                stage=self.experiment.stage,
                out=self.work / "removal",
                device=self.device,
                memory=self.memory,
                progress=self.progress,
            )
        self.result["removal"] = {
            "of": sizes,
            "k": list(result.k),
            "queries": len(result.queries),
            "right": result.right,
            "trainings": result.trainings,
            "diverged": result.diverged,
            "flipped": {name: result.flipped(name).tolist() for name in result.margins},
            "interval": {name: result.interval(name).tolist() for name in result.margins},
            "differences": {
                name: [[d.value, *d.interval] for d in result.difference(source, name)]
                for source in result.margins.keys() & {self.experiment.source}
                for name in result.margins
                if name != source
            },
        }
        self.save()
        self.log(str(result))

    def panels(self) -> None:
        """The most helpful and most harmful examples of a few queries, by the runs' mean scores."""
        sizes = {"queries": self.scale.panels, "runs": self.scale.runs}
        if covers(self.result.get("panels"), sizes):
            return
        names = [n for n in METHODS_IN_PANEL if n in self.experiment.methods]
        if not all(map(self.wanted, names)):  # a panel shows all of them
            return
        by_method = {name: self.ensemble_scores(name, self.scale.runs) for name in names}
        self.result["panels"] = {
            "of": sizes,
            "methods": {
                name: [
                    {
                        "helpful": scores.helpful(row, EXAMPLES_IN_PANEL).examples,
                        "harmful": scores.harmful(row, EXAMPLES_IN_PANEL).examples,
                    }
                    for row in range(self.scale.panels)
                ]
                for name, scores in by_method.items()
            },
        }
        self.save()


def of_one_model(experiment: Experiment, scale: Scale, folder: Path) -> dict[str, Any]:
    """LDS, slope and seconds of every method on one training, and the noise ceiling."""
    result = Reproduction(experiment, scale=scale, work=folder, results=folder / "results").run()
    entries = {name: result["lds"][name] for name in experiment.methods}
    return {
        "ceiling": entries[experiment.methods[0]]["ceiling"],
        "lds": {name: entry["single"] for name, entry in entries.items()},
        "slope": {name: entry["slope"] for name, entry in entries.items()},
        "seconds": {name: entry["seconds"] for name, entry in entries.items()},
    }


def covers(entry: Mapping[str, Any] | None, sizes: Mapping[str, Any]) -> bool:
    """Whether an entry was computed at these sizes, or larger ones."""
    if entry is None:
        return False
    stored = entry["of"]

    def enough(name: str, wanted: Any) -> bool:
        if isinstance(wanted, int):
            return bool(stored.get(name, 0) >= wanted)
        return set(stored.get(name, ())) >= set(wanted)

    return all(enough(name, wanted) for name, wanted in sizes.items())


def _synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name.lower()).strip("-")


def command_line() -> str:
    """The command line of this program."""
    return " ".join(["whence", *sys.argv[1:]])


def seconds_here(experiment: Experiment, scale: Scale, device: str) -> float:
    """Estimated time of all trainings, one by one on this machine, from a few timed updates.

    Training many models at a time takes less.
    """
    recipe, _ = experiment.recipe()
    model, total = recipe.build(0).to(device), 0.0
    alphas = [0.5, *scale.alphas]
    for stage in recipe.stages:
        updates = stage.updates(model, stage.make_optimizer(model), 0, np.arange(len(stage.data)))
        next(updates)
        start = time.perf_counter()
        for _ in range(3):
            next(updates)
        per_update = (time.perf_counter() - start) / 3
        seconds = stage.total_steps(len(stage.data)) * per_update
        resampled = stage.name == recipe.stage(experiment.stage).name
        total += seconds * 2 * scale.runs
        total += (
            scale.subsets * scale.seeds * sum(seconds * (a if resampled else 1) for a in alphas)
        )
        total += scale.downsampled * seconds / 2
    return total
