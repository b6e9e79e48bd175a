"""Which form of SOURCE predicts retraining best: the paper's, coupled, along the run?

    python -m experiments.studies.forms TASK... [--device cuda] [--alpha 0.5 0.7]
    python -m experiments.studies.forms --from FOLDER     # rows from saved sums, without training

For each task and α, one small file of sums (`experiments.studies.sums`) goes to --out, form by
form: a form that is there is not computed again. The rows (`experiments.studies.rows`) go to
results/forms.json, under the task and the protocol. Defaults were chosen on the tasks in
`experiments.tasks.forms.CHOSEN_ON`. Confirm them on others, or with --first-query, --first-run and
--first-seed, which give new queries, runs and retrainings.
"""

from __future__ import annotations

import argparse
import time
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from experiments.engine.trainings import First, Trainings
from experiments.studies.options import SIZES, parsed_or_saved, parser, saved_sums
from experiments.studies.rows import RETRAININGS, Row, rows_of
from experiments.studies.sums import TRUTH, Protocol, Sums
from experiments.tasks import ALL, Scale
from experiments.tasks.forms import build_form, forms_of, read_results
from experiments.tasks.machine import machine
from whence.persist.files import write_json

SCALE = Scale(subsets=100, seeds=5, queries=200, runs=3)


def compare(task: str, options: argparse.Namespace) -> list[Path]:
    """Train, attribute, and save the sums of all forms on one task; the files, one for each α."""
    experiment = ALL[task]
    sizes = {name: getattr(options, name) for name in SIZES if getattr(options, name) is not None}
    work = Trainings(
        experiment,
        quick=options.quick,
        scale=replace(experiment.quick if options.quick else SCALE, measured=0, **sizes),
        work=options.work,
        device=options.device,
        tf32=options.device != "cpu",
        memory=options.memory,
        first=First(options.first_query, options.first_run, options.first_seed),
    )
    files = {alpha: opened(work, alpha, options) for alpha in options.alpha}
    for name, form in forms_of(experiment).items():
        if options.only and name not in options.only:
            continue
        method = build_form(form, experiment, work.examples)
        missing = [
            alpha
            for alpha, saved in files.items()
            if saved.forms.get(name, {}).get("method") != repr(method)
        ]
        if not missing:
            continue
        compute: Any = {"device": work.device, "memory": options.memory, "progress": False}
        scores, start = [], time.perf_counter()
        runs = min(work.scale.runs, form.most_runs or work.scale.runs)
        try:
            for k in range(runs):
                study = work.study(k, layers=form.layers)
                scores.append(method.attribute(study, work.query, **compute))
        except (ValueError, RuntimeError) as error:  # out of memory; not for this task
            print(f"{task} {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            torch.cuda.empty_cache()
            continue
        seconds = (time.perf_counter() - start) / runs
        if options.scores is not None:
            for k, one in enumerate(scores):
                place = f"{work.run_seed(k)}-q{work.first.query}"
                one.save(options.scores / work.name / name.replace(" ", "-") / place)
        for alpha in missing:
            saved = files[alpha]
            saved.add(name, scores, saved.truths(work.examples), repr(method), seconds)
            saved.about |= {"seconds": work.seconds}
            saved.save(options.out)
        print(f"{task:15s} {name:50s} {runs} runs, {seconds:.1f} s each", flush=True)
    return [saved.save(options.out) for saved in files.values()]


def opened(work: Trainings, alpha: float, options: argparse.Namespace) -> Sums:
    """The sums saved so far under this protocol. If there are none, retrain first."""
    scale, experiment = work.scale, work.experiment
    start = {f"first_{name}": value for name, value in asdict(work.first).items()}
    sizes = scale.subsets, scale.seeds, scale.runs, len(work.query)  # type: ignore[arg-type]
    protocol = Protocol(experiment.name, alpha, *sizes, **start, quick=work.quick)
    file = options.out / protocol.file_name
    if file.exists():
        saved = Sums.load(file)
        if len(saved.small) != options.retrainings:
            raise ValueError(
                f"{file} has {len(saved.small)} retrainings for calibrate and combine, not "
                f"{options.retrainings}: remove it, or choose another --out"
            )
        return saved
    truth, small = work.reference(alpha), work.small_truth(options.retrainings)
    return Sums(
        protocol,
        {name: getattr(truth, name) for name in TRUTH},
        {"machine": machine(), "device": work.device, "seconds": {}},
        truth.measurements,
        small.measurements,
    )


# --- results ------------------------------------------------------------------------------------


def store(saved: Sums, rows: dict[str, Row], file: Path) -> None:
    """Put rows into forms.json, under their task and protocol; other rows stay."""
    stored, protocol = read_results(file), asdict(saved.protocol)
    task = protocol.pop("task")
    entries = stored["tasks"].setdefault(task, [])
    entry = next((e for e in entries if e["protocol"] == protocol), None)
    if entry is None:
        entry = {"protocol": protocol, "forms": {}}
        entries.append(entry)
    about = {name: saved.about[name] for name in ("machine", "device")}
    entry |= about | {"chosen_on": saved.protocol.chosen_on, "retrainings": len(saved.small)}
    entry["forms"] |= rows
    stored |= about
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, stored, checksum=False)


def judge(path: Path, file: Path) -> None:
    """Compute, store and print the rows of one file of sums."""
    saved = Sums.load(path)
    if not saved.forms:
        return
    rows = rows_of(saved)
    store(saved, rows, file)
    for name, row in rows.items():
        several = row["ensemble"]
        print(
            f"{saved.protocol.task:15s} α {saved.protocol.alpha:g} {name:50s} "
            f"{row['single'][0]:.3f}/{'  –  ' if several is None else format(several[0], '.3f')} "
            f"slope {row['slope']:.2f} spread {row['spread']:.2f} {row['seconds']:.1f} s",
            flush=True,
        )


def arguments() -> argparse.Namespace:
    of = parser(__doc__, sorted(ALL), "runs/forms")
    of.add_argument("--alpha", type=float, nargs="+", default=[0.5])
    few = "for calibrate and combine, in groups of " + " and ".join(map(str, RETRAININGS))
    of.add_argument("--retrainings", type=int, default=3 * max(RETRAININGS), help=few)
    for name in ("query", "run", "seed"):
        of.add_argument(f"--first-{name}", type=int, default=0)
    of.add_argument("--only", nargs="*", metavar="FORM", help="these forms")
    of.add_argument("--scores", type=Path, help="for whole scores, which are large")
    return parsed_or_saved(of, ALL)


def main() -> None:
    options = arguments()
    file = options.results / "forms.json"
    read_results(file)  # refuses another version before hours of work
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if options.saved is not None:
            for path in saved_sums(options):
                judge(path, file)
            return
        for task in options.tasks:
            for path in compare(task, options):
                if not options.no_rows:
                    judge(path, file)


if __name__ == "__main__":
    main()
