"""`whence reproduce`: the paper's experiments, from `experiments/`."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

TOO_LONG = 1800.0  # seconds of training above which a task is not begun unasked


def experiments() -> Any:
    """The package of the experiments: shipped with whence, or beside it in a checkout."""
    if importlib.util.find_spec("whence._experiments") is not None:
        return importlib.import_module("whence._experiments.reproduce").__package__
    root = Path(__file__).resolve().parents[3]
    if not (root / "experiments" / "reproduce.py").is_file():
        raise ValueError(
            "the experiments are not installed with this whence: pip install it anew, or run from "
            "a checkout of the repository"
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return "experiments"


def reproduce(
    task: Annotated[
        str | None, typer.Argument(help="which experiment; --list shows them", show_default=False)
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="a smaller, honest version: minutes on two cores")
    ] = False,
    list_tasks: Annotated[
        bool, typer.Option("--list", help="the experiments, and what has been found")
    ] = False,
    out: Annotated[
        Path, typer.Option(help="folder for trainings, runs and scores, kept between calls")
    ] = Path("reproduce"),
    results: Annotated[
        Path | None, typer.Option(help="folder of the result file [OUT/results]")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1 [a GPU if there is one]")
    ] = None,
    tf32: Annotated[
        bool, typer.Option("--tf32", help="train in TF32 on a GPU: faster, rounds more")
    ] = False,
    only: Annotated[
        list[str] | None, typer.Option(help="judge this method only; may be repeated")
    ] = None,
    subsets: Annotated[int | None, typer.Option(min=3, help="M, subsets of the truth")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="R, trainings per subset")] = None,
    queries: Annotated[int | None, typer.Option(min=1, help="how many queries")] = None,
    runs: Annotated[int | None, typer.Option(min=1, help="models in an ensemble")] = None,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="begin also what would take very long here")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="the result as JSON on stdout")] = False,
) -> None:
    """Do an experiment of the paper again: train, attribute, retrain, judge.

    The same command goes on where it was stopped; larger --subsets, --seeds or --runs add to what
    is there.

    Examples:

        whence reproduce --list

        whence reproduce concrete --quick

        whence reproduce fashion_mnist --device cuda
    """
    package = experiments()
    tasks = importlib.import_module(f"{package}.tasks")
    tables = importlib.import_module(f"{package}.tables")
    if list_tasks:
        found = tables.overview(tasks.TASKS, [results or out / "results", tasks.RESULTS])
        print(json.dumps(found.rows) if as_json else found)
        return
    if task is None:
        raise ValueError("say which experiment: whence reproduce --list shows them")
    name = task.lower().replace("-", "_")
    if name not in tasks.TASKS:
        import difflib

        near = difflib.get_close_matches(name, tasks.TASKS, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(
            f"there is no experiment {task!r}: {hint}They are {', '.join(tasks.TASKS)}"
        )

    import torch

    experiment = tasks.TASKS[name]
    own = experiment.quick if quick else experiment.full
    given = {"subsets": subsets, "seeds": seeds, "queries": queries, "runs": runs}
    scale = replace(own, **{k: v for k, v in given.items() if v is not None})
    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if chosen.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {chosen}: torch sees no GPU here; use --device cpu")
    engine = importlib.import_module(f"{package}.reproduce")
    known = (*experiment.methods, *experiment.dear, "Downsampling")
    unknown = [one for one in only or [] if one not in known]
    if unknown:
        raise ValueError(f"--only {unknown[0]!r}: {experiment.name} has {', '.join(known)}")
    if chosen == "cpu" and experiment.gpu and not quick and not anyway:
        seconds = engine.seconds_here(experiment, scale, chosen)
        if seconds > TOO_LONG:
            raise ValueError(
                f"{experiment.title} needs a GPU: its trainings would take about "
                f"{seconds / 3600:.0f} hours on this machine, one by one. Use --quick for a "
                "smaller version in minutes, or --anyway to begin nevertheless"
            )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what was left out is kept with the scores
        work = engine.Reproduction(
            experiment,
            quick=quick,
            scale=scale,
            work=out,
            results=results or out / "results",
            device=chosen,
            tf32=tf32,
            only=tuple(only) if only else None,
            command=engine.command_line(),
            progress=sys.stderr.isatty(),
            tell=lambda line: print(line, file=sys.stderr, flush=True),
        )
        try:
            found = work.run()
        except KeyboardInterrupt:
            print(
                f"stopped; all that was finished is kept under {out}: the same command goes on "
                "from there",
                file=sys.stderr,
            )
            raise
    print(json.dumps(found) if as_json else tables.result(found, experiment))
    print(f"result: {work.place.file}", file=sys.stderr)
