"""`whence reproduce`: the paper's experiments, from `experiments/`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer

from whence.cli.options import Memory, device_of
from whence.cli.screen import Answer, CommandError, command, say

TOO_LONG = 1800.0  # seconds of training above which a task is not begun unasked


def experiments(module: str) -> Any:
    """A module of `experiments/`, which lies next to `src/` in a clone of the repository."""
    if "experiments" not in sys.modules:
        file = Path(__file__).resolve().parents[3] / "experiments" / "__init__.py"
        spec = importlib.util.spec_from_file_location("experiments", file)
        if not file.is_file() or spec is None or spec.loader is None:
            raise CommandError(
                "`whence reproduce` needs a clone of the whence repository: the experiments are "
                "not part of the installed package. In the clone, run "
                "`pip install --editable '.[reproduce]'`, then `whence reproduce` again"
            )
        package = importlib.util.module_from_spec(spec)
        sys.modules["experiments"] = package
        spec.loader.exec_module(package)
    return importlib.import_module(f"experiments.{module}")


@command(resumes=True)
def reproduce(
    task: Annotated[
        str | None, typer.Argument(help="Which experiment; --list shows them.", show_default=False)
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A smaller, honest version: minutes on two cores.")
    ] = False,
    list_tasks: Annotated[
        bool, typer.Option("--list", help="The experiments, and what has been found.")
    ] = False,
    out: Annotated[
        Path, typer.Option(help="Folder for trainings, runs and scores, kept between calls.")
    ] = Path("reproduce"),
    results: Annotated[
        Path | None, typer.Option(help="Folder of the result file. Default: OUT/results.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1. Default: a GPU if there is one.")
    ] = None,
    tf32: Annotated[
        bool, typer.Option("--tf32", help="Train in TF32 on a GPU: faster, rounds more.")
    ] = False,
    tf32_scores: Annotated[
        bool, typer.Option("--tf32-scores", help="Attribute in TF32 too, where that is harmless.")
    ] = False,
    memory: Memory = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Judge this method only; may be repeated.")
    ] = None,
    subsets: Annotated[int | None, typer.Option(min=3, help="M, subsets of the truth.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="R, trainings per subset.")] = None,
    queries: Annotated[int | None, typer.Option(min=1, help="How many queries.")] = None,
    runs: Annotated[int | None, typer.Option(min=1, help="Models in an ensemble.")] = None,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Begin also what would take very long here.")
    ] = False,
) -> Answer:
    """Do an experiment of the paper again: train, attribute, retrain, judge.

    The same command goes on where it was stopped; larger --subsets, --seeds or --runs add to what
    is there.

    Examples:

        whence reproduce --list

        whence reproduce concrete --quick

        whence reproduce fashion_mnist --device cuda
    """
    tasks, tables = experiments("tasks"), experiments("pages.tables")
    results = results or out / "results"
    if list_tasks:
        found = tables.overview(tasks.TASKS, [results, tasks.RESULTS])
        return Answer([dict(zip(found.heads, row, strict=True)) for row in found.rows], str(found))
    experiment = _named(task, tasks.TASKS)
    known = (*experiment.methods, *experiment.expensive, "Downsampling")
    unknown = [one for one in only or [] if one not in known]
    if unknown:
        raise CommandError(f"--only {unknown[0]!r}: {experiment.name} has {', '.join(known)}")
    own = experiment.quick if quick else experiment.full
    given = {"subsets": subsets, "seeds": seeds, "queries": queries, "runs": runs}
    scale = replace(own, **{k: v for k, v in given.items() if v is not None})

    import torch

    chosen = str(device_of(device) or ("cuda" if torch.cuda.is_available() else "cpu"))
    engine = experiments("engine.reproduce")
    try:
        if chosen == "cpu" and experiment.gpu and not quick and not anyway:
            _not_too_long(experiment, engine.seconds_here(experiment, scale, chosen))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what was left out is kept with the scores
            work = engine.Reproduction(
                experiment,
                quick=quick,
                scale=scale,
                work=out,
                results=results,
                device=chosen,
                tf32=tf32,
                tf32_scores=tf32_scores,
                memory=memory,
                only=tuple(only) if only else None,
                command=engine.command_line(),
                progress=sys.stderr.isatty(),
                tell=say,
            )
            result = work.run()
    except (FileNotFoundError, ImportError, engine.OtherResult) as error:
        raise CommandError(str(error)) from error
    return Answer(result, f"{tables.as_text(result, experiment)}\n\nresult: {work.place.file}")


def _named(task: str | None, known: Any) -> Any:
    if task is None:
        raise CommandError("say which experiment: whence reproduce --list shows them")
    name = task.lower().replace("-", "_")
    if name in known:
        return known[name]
    near = get_close_matches(name, known, 1)
    meant = f"Did you mean {near[0]}? " if near else ""
    raise CommandError(f"no experiment {task!r}. {meant}There are {', '.join(known)}")


def _not_too_long(experiment: Any, seconds: float) -> None:
    if seconds > TOO_LONG:
        raise CommandError(
            f"{experiment.title} needs a GPU: its trainings would take about "
            f"{seconds / 3600:.1f} hours on this machine, one by one. Use --quick for a smaller "
            "version in minutes, or --anyway to begin nevertheless"
        )
