"""Commands that retrain, and judge scores by it: truth, lds, removal."""

from __future__ import annotations

import shlex
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from whence.cli.options import (
    Bootstrap,
    Device,
    Diverged,
    Engine,
    Executor,
    ManyScores,
    Memory,
    Progress,
    StudyPath,
    device_of,
    numbers,
    open_many,
    progress_wanted,
)
from whence.cli.screen import Answer, CommandError, command

Stage = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Whose examples. Default: the first stage's."),
]
QueryName = Annotated[
    str | None,
    typer.Option("--query", metavar="NAME", help="Another name of the study file than `query`."),
]


@command(resumes=True)
def truth(
    study: StudyPath,
    alpha: Annotated[
        float, typer.Option(metavar="SHARE", help="The share of the examples in a subset.")
    ] = 0.5,
    subsets: Annotated[int, typer.Option(min=1, metavar="INT", help="How many subsets.")] = 100,
    seeds: Annotated[
        str, typer.Option(metavar="INT", help="Trainings of each subset; or their seeds: 0,1,2.")
    ] = "10",
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FOLDER", help="Default: truth/STUDY."),
    ] = None,
    query: QueryName = None,
    stage: Stage = None,
    seed: Annotated[int, typer.Option(min=0, metavar="INT", help="Of the subsets.")] = 0,
    device: Device = None,
    memory: Memory = None,
    executor: Executor = None,
    engine: Engine = None,
    progress: Progress = None,
) -> Answer:
    """Retrain on random subsets, and measure: what scores are judged against.

    Interrupted, the same command goes on where it stopped; so do several at once, on one folder.
    With more subsets or seeds than before it adds to what is there.

    Examples:

    - `whence truth study.py --alpha 0.5 --subsets 100 --seeds 10 --out truth/digits`
    """
    named = numbers("--seeds", seeds)
    place = out or Path("truth") / study.stem
    from whence.cli.studyfile import load_study
    from whence.retrain import ground_truth

    where, file = device_of(device), load_study(study)
    found = ground_truth(
        file.needs_recipe(),
        _queries(file, query),
        alpha,
        subsets,
        named if "," in seeds else named[0],
        stage,
        out=place,
        seed=seed,
        device=where,
        memory=memory,
        executor=executor,
        engine=engine or "auto",
        progress=progress_wanted(progress),
    )
    shape = found.measurements.shape
    data = {
        "path": place,
        "subsets": shape[0],
        "seeds": found.seeds,
        "queries": shape[2],
        "examples": found.masks.shape[1],
        "alpha": found.alpha,
        "measurement": found.measurement,
        "stage": found.stage,
        "diverged": int(found.diverged.sum()),
        "notes": found.notes,
    }
    return Answer(
        data,
        f"{found!r}\nin {place}. Judge scores by it: whence lds SCORES --truth "
        f"{shlex.quote(str(place))}",
    )


@command()
def lds(
    scores: ManyScores,
    truth: Annotated[
        Path, typer.Option("--truth", metavar="FOLDER", help="What `whence truth` wrote.")
    ],
    bootstrap: Bootstrap = 1000,
    seed: Annotated[int, typer.Option(metavar="INT", help="Of the resamples.")] = 0,
    exclude_diverged: Diverged = False,
) -> Answer:
    """The linear datamodeling score: do scores order retrained subsets as retraining does?

    Examples:

    - `whence lds scores/source --truth truth/digits`
    - `whence lds scores/* --truth truth/digits`
    """
    found = open_many(scores)
    from whence.evaluate import compare
    from whence.retrain import Truth

    judged = compare(
        found,
        Truth.load(truth),
        bootstrap=bootstrap,
        seed=seed,
        exclude_diverged=exclude_diverged,
    )
    best = max(judged, key=lambda name: judged[name].value)
    data = {
        name: {f.name: getattr(one, f.name) for f in fields(one) if f.name != "resampled"}
        | {"behind": asdict(judged.difference(best, name))}
        for name, one in judged.items()
    }
    only = next(iter(judged.values()))
    return Answer(data, repr(only if len(judged) == 1 else judged))


@command(resumes=True)
def removal(
    study: StudyPath,
    scores: ManyScores,
    k: Annotated[
        str, typer.Option("-k", "--k", metavar="INT,...", help="How many examples to remove.")
    ] = "10,20,50",
    queries: Annotated[int, typer.Option(min=1, metavar="INT", help="How many to try.")] = 100,
    select_seeds: Annotated[
        int, typer.Option(min=1, metavar="INT", help="Trainings that say which queries are right.")
    ] = 5,
    seeds: Annotated[
        int, typer.Option(min=1, metavar="INT", help="Trainings that a margin is averaged over.")
    ] = 3,
    random_floor: Annotated[
        bool, typer.Option(help="Also remove random examples of the query's class.")
    ] = True,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FOLDER", help="Default: removal/STUDY."),
    ] = None,
    query: QueryName = None,
    stage: Stage = None,
    seed: Annotated[int, typer.Option(min=0, metavar="INT", help="Of trainings and choices.")] = 0,
    device: Device = None,
    memory: Memory = None,
    executor: Executor = None,
    engine: Engine = None,
    progress: Progress = None,
) -> Answer:
    """Retrain without what helped a query most: does its prediction turn wrong?

    Interrupted, the same command goes on where it stopped.

    Examples:

    - `whence removal study.py scores/source scores/tracin -k 10,20,50 --out removal/digits`
    """
    counts = numbers("--k", k)
    found = open_many(scores)
    from whence.cli.studyfile import load_study
    from whence.evaluate import subset_removal

    where, file = device_of(device), load_study(study)
    result = subset_removal(
        file.needs_recipe(),
        found,
        _queries(file, query),
        counts,
        queries=queries,
        select_seeds=select_seeds,
        seeds=seeds,
        random_floor=random_floor,
        stage=stage,
        out=out or Path("removal") / study.stem,
        device=where,
        memory=memory,
        executor=executor,
        engine=engine or "auto",
        progress=progress_wanted(progress),
        seed=seed,
    )
    data: dict[str, Any] = {f.name: getattr(result, f.name) for f in fields(result)}
    data["flipped"] = {name: result.flipped(name) for name in result.margins}
    data["interval"] = {name: result.interval(name) for name in result.margins}
    return Answer(data, repr(result))


def _queries(file: Any, name: str | None) -> Any:
    found = file.asked(name)
    if found is None:
        raise CommandError("--query self: retraining measures queries; name some")
    return found
