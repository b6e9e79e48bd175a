"""Commands that retrain and evaluate scores: truth, lds, removal."""

from __future__ import annotations

import shlex
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from whence.cli.options import (
    TRAINING,
    ManyScores,
    StudyPath,
    compute_options,
    numbers,
    open_many,
)
from whence.cli.screen import Answer, CommandError, command
from whence.cli.signature import NON_NEGATIVE, OUT, POSITIVE


@command(resumes=True, options=compute_options, only=TRAINING)
def truth(
    study: StudyPath,
    alpha: float = 0.5,
    subsets: Annotated[int, POSITIVE] = 100,
    seeds: str | None = None,
    in_place: bool = False,
    out: Annotated[Path | None, OUT] = None,
    query: str | None = None,
    stage: str | None = None,
    seed: Annotated[int, NON_NEGATIVE] = 0,
    *,
    options: dict[str, Any],
) -> Answer:
    """Retrain on random subsets and measure the queries: the truth that scores are judged by.

    After an interruption, run the same command to resume. Several processes may share one folder.
    With more subsets or seeds than before, the command adds to the existing ones.

    Examples:

    - `whence truth study.py --alpha 0.5 --subsets 100 --seeds 10 --out truth/digits`
    - `whence truth study.py --in-place --alpha 0.99 --out truth/digits-single`

    Args:
        alpha (SHARE): Fraction of the examples in a subset.
        subsets: Number of subsets.
        seeds (INT): Trainings per subset, or their seeds: 0,1,2. Default: 10; in place, 1.
        in_place: Repeat the training on all data with its batches, and give the dropped examples
            weight zero: the truth of a single model.
        out (FOLDER): Folder for the truth. Default: truth/STUDY.
        query (NAME): Queries: a name that the study file defines. Default: `query`.
        stage (NAME): Stage whose examples are left out of trainings. Default: the first.
        seed: Seed of the subsets.
    """
    named = None if seeds is None else numbers("--seeds", seeds)
    place = out or Path("truth") / study.stem
    from whence.cli.studyfile import load_study
    from whence.retrain import ground_truth

    file = load_study(study)
    result = ground_truth(
        file.needs_recipe(),
        _queries(file, query),
        alpha,
        subsets,
        named[0] if named is not None and "," not in str(seeds) else named,
        stage,
        in_place=in_place,
        out=place,
        seed=seed,
        **options,
    )
    shape = result.measurements.shape
    data = {
        "path": place,
        "subsets": shape[0],
        "seeds": result.seeds,
        "queries": shape[2],
        "examples": result.masks.shape[1],
        "alpha": result.alpha,
        "in_place": result.in_place,
        "measurement": result.measurement,
        "stage": result.stage,
        "diverged": int(result.diverged.sum()),
        "notes": result.notes,
    }
    return Answer(
        data,
        f"{result!r}\nSaved in {place}. To judge scores by it: whence lds SCORES --truth "
        f"{shlex.quote(str(place))}",
    )


@command()
def lds(
    scores: ManyScores,
    truth: Annotated[Path, typer.Option()],
    bootstrap: int = 1000,
    seed: int = 0,
    exclude_diverged: bool = False,
) -> Answer:
    """Compute the linear datamodeling score (LDS): do the scores rank subsets as retraining does?

    Examples:

    - `whence lds scores/source --truth truth/digits`
    - `whence lds scores/* --truth truth/digits`

    Args:
        truth (FOLDER): A folder written by `whence truth`.
        bootstrap: Number of bootstrap resamples for the intervals.
        seed: Seed of the resamples.
        exclude_diverged: Leave out trainings that diverged.
    """
    opened = open_many(scores)
    from whence.evaluate import compare
    from whence.retrain import Truth

    comparison = compare(
        opened,
        Truth.load(truth),
        bootstrap=bootstrap,
        seed=seed,
        exclude_diverged=exclude_diverged,
    )
    best = max(comparison, key=lambda name: comparison[name].value)
    data = {
        name: {f.name: getattr(one, f.name) for f in fields(one) if f.name != "resampled"}
        | {"behind": asdict(comparison.difference(best, name))}
        for name, one in comparison.items()
    }
    only = next(iter(comparison.values()))
    return Answer(data, repr(only if len(comparison) == 1 else comparison))


@command()
def score_against(
    benchmark: Annotated[
        str,
        typer.Argument(
            metavar="BENCHMARK", help="A published folder, or its URL, which is downloaded."
        ),
    ],
    scores: ManyScores,
    bootstrap: int = 1000,
    seed: int = 0,
    limit: Annotated[int, POSITIVE] = 256,
) -> Answer:
    """Judge scores by a published truth: their LDS, and paired differences to published methods.

    The scores must be of the benchmark's queries and training examples, in its order.

    Examples:

    - `whence score-against benchmarks/concrete scores/mine`
    - `whence score-against https://example.org/benchmarks/concrete scores/*`

    Args:
        bootstrap: Number of bootstrap resamples for the intervals.
        seed: Seed of the resamples.
        limit (MIB): Size that a download may have, in MiB.
    """
    opened = open_many(scores)
    from whence.evaluate import score_against

    how: Any = {"bootstrap": bootstrap, "seed": seed, "limit": limit * 2**20}
    data, texts = {}, []
    for name, one in opened.items():
        standing = score_against(benchmark, one, **how)
        data[name] = {
            "benchmark": standing.name,
            "lds": standing.result.value,
            "interval": standing.result.interval,
            "ceiling": standing.result.ceiling,
            "published": {k: [one.value, *one.interval] for k, one in standing.published.items()},
            "differences": {k: asdict(d) for k, d in standing.differences.items()},
        }
        texts.append((f"{name}\n" if len(opened) > 1 else "") + repr(standing))
    return Answer(data, "\n\n".join(texts))


@command(resumes=True, options=compute_options, only=TRAINING)
def removal(
    study: StudyPath,
    scores: ManyScores,
    k: Annotated[str, typer.Option("-k", "--k")] = "10,20,50",
    queries: Annotated[int, POSITIVE] = 100,
    select_seeds: Annotated[int, POSITIVE] = 5,
    seeds: Annotated[int, POSITIVE] = 3,
    random_floor: bool = True,
    out: Annotated[Path | None, OUT] = None,
    query: str | None = None,
    stage: str | None = None,
    seed: Annotated[int, NON_NEGATIVE] = 0,
    *,
    options: dict[str, Any],
) -> Answer:
    """Retrain without the most helpful examples of a query: does its prediction flip?

    After an interruption, run the same command to resume.

    Examples:

    - `whence removal study.py scores/source scores/tracin -k 10,20,50 --out removal/digits`

    Args:
        k (INT,...): Numbers of examples to remove.
        queries: Number of queries to try.
        select_seeds: Trainings that decide which queries are predicted correctly.
        seeds: Trainings to average a margin over.
        random_floor: Also remove random examples of the query's class.
        out (FOLDER): Folder for the results. Default: removal/STUDY.
        query (NAME): Queries: a name that the study file defines. Default: `query`.
        stage (NAME): Stage whose examples are left out of trainings. Default: the first.
        seed: Seed of the trainings and of the selection.
    """
    counts = numbers("--k", k)
    opened = open_many(scores)
    from whence.cli.studyfile import load_study
    from whence.evaluate import subset_removal

    file = load_study(study)
    result = subset_removal(
        file.needs_recipe(),
        opened,
        _queries(file, query),
        counts,
        queries=queries,
        select_seeds=select_seeds,
        seeds=seeds,
        random_floor=random_floor,
        stage=stage,
        out=out or Path("removal") / study.stem,
        seed=seed,
        **options,
    )
    data: dict[str, Any] = {f.name: getattr(result, f.name) for f in fields(result)}
    data["flipped"] = {name: result.flipped(name) for name in result.margins}
    data["interval"] = {name: result.interval(name) for name in result.margins}
    return Answer(data, repr(result))


def _queries(file: Any, name: str | None) -> Any:
    queries = file.query_data(name)
    if queries is None:
        raise CommandError("--query self: retraining measures queries, so name some")
    return queries
