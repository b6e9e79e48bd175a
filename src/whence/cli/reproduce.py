"""`whence reproduce`: the paper's experiments, from a clone of the repository."""

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

from whence.cli.options import compute_options
from whence.cli.screen import Answer, CommandError, command, say
from whence.cli.signature import POSITIVE

TOO_LONG = 1800.0  # seconds of training above which --anyway is required


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


@command(resumes=True, options=compute_options, only=("device", "memory"))
def reproduce(
    task: Annotated[
        str | None, typer.Argument(help="The experiment; --list shows all.", show_default=False)
    ] = None,
    quick: bool = False,
    list_tasks: Annotated[bool, typer.Option("--list")] = False,
    out: Path = Path("reproduce"),
    results: Path | None = None,
    tf32: bool = False,
    tf32_scores: bool = False,
    only: list[str] | None = None,
    subsets: Annotated[int | None, typer.Option(min=3)] = None,
    seeds: Annotated[int | None, POSITIVE] = None,
    queries: Annotated[int | None, POSITIVE] = None,
    runs: Annotated[int | None, POSITIVE] = None,
    anyway: bool = False,
    *,
    options: dict[str, Any],
) -> Answer:
    """Reproduce an experiment of the paper: train, attribute, retrain, judge.

    Run the same command again to resume. Larger --subsets, --seeds or --runs extend earlier
    results. Needs a clone of the repository.

    Examples:

    - `whence reproduce --list`
    - `whence reproduce concrete --quick`
    - `whence reproduce fashion_mnist --device cuda`

    Args:
        quick: A smaller version: minutes on two cores.
        list_tasks: List the experiments and their results.
        out (FOLDER): Folder for trainings, runs and scores, reused to resume.
        results (FOLDER): Folder of the result file. Default: OUT/results.
        tf32: Train in TF32 on a GPU: faster, rounds more.
        tf32_scores: Also attribute in TF32, where rounding is harmless.
        only (METHOD): Judge only this method; may be repeated.
        subsets: M, subsets of the truth.
        seeds: R, trainings per subset.
        queries: Number of queries.
        runs: Models in an ensemble.
        anyway: Start even if it takes very long on this machine.
    """
    tasks, tables = experiments("tasks"), experiments("pages.tables")
    results = results or out / "results"
    if list_tasks:
        table = tables.overview(tasks.TASKS, [results, tasks.RESULTS])
        return Answer([dict(zip(table.heads, row, strict=True)) for row in table.rows], str(table))
    experiment = _named(task, tasks.TASKS)
    methods = (*experiment.methods, *experiment.expensive, "Downsampling")
    unknown = [name for name in only or [] if name not in methods]
    if unknown:
        raise CommandError(
            f"--only {unknown[0]!r}: the methods of {experiment.name} are {', '.join(methods)}"
        )
    sizes = {"subsets": subsets, "seeds": seeds, "queries": queries, "runs": runs}
    changed = {name: size for name, size in sizes.items() if size is not None}
    scale = replace(experiment.quick if quick else experiment.full, **changed)

    import torch

    where = str(options.get("device") or ("cuda" if torch.cuda.is_available() else "cpu"))
    engine = experiments("engine.reproduce")
    try:
        if where == "cpu" and experiment.gpu and not quick and not anyway:
            seconds = engine.seconds_here(experiment, scale, where)
            if seconds > TOO_LONG:
                raise CommandError(
                    f"{experiment.title} needs a GPU: its trainings would take about "
                    f"{seconds / 3600:.1f} hours on this machine, one by one. Use --quick for a "
                    "smaller version in minutes, or --anyway to start it all the same"
                )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are stored with the scores
            reproduction = engine.Reproduction(
                experiment,
                quick=quick,
                scale=scale,
                work=out,
                results=results,
                device=where,
                tf32=tf32,
                tf32_scores=tf32_scores,
                memory=options.get("memory"),
                only=tuple(only) if only else None,
                command=engine.command_line(),
                progress=sys.stderr.isatty(),
                log=say,
            )
            result = reproduction.run()
    except (FileNotFoundError, ImportError, engine.OtherResult) as error:
        raise CommandError(str(error)) from error
    return Answer(result, f"{tables.as_text(result, experiment)}\n\nresult: {reproduction.file}")


def _named(task: str | None, known: Any) -> Any:
    if task is None:
        raise CommandError("name an experiment: `whence reproduce --list` shows all")
    name = task.lower().replace("-", "_")
    if name in known:
        return known[name]
    near = get_close_matches(name, known, 1)
    meant = f"Did you mean {near[0]}? " if near else ""
    raise CommandError(f"no experiment {task!r}. {meant}Choose from {', '.join(known)}")
