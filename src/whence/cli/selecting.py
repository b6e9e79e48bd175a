"""Commands that act on scores: audit labels, select training data."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from whence.cli.attributing import StudyExamples
from whence.cli.judging import QueryName, Stage
from whence.cli.options import (
    Check,
    Device,
    Engine,
    Executor,
    Memory,
    NoProgress,
    ScoresPath,
    StudyPath,
    device_of,
    open_scores,
)
from whence.cli.screen import Answer, CommandError, command

Duplicates = Annotated[
    bool,
    typer.Option("--duplicates", help="Find near-duplicates; select drops them first."),
]


@command()
def audit(
    study: StudyPath,
    scores: ScoresPath,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="The CSV file to write.")
    ] = Path("audit.csv"),
    duplicates: Duplicates = False,
    check: Check = True,
) -> Answer:
    """List the training examples whose labels look wrong, the most suspicious first, as CSV.

    Suspicious are examples that harm the queries on average, or, of self-influence scores,
    examples that the model could learn only from themselves.

    Examples:

    - `whence audit study.py scores/source -o audit.csv`
    """
    opened = open_scores(scores)
    shown = StudyExamples(opened, study, check)
    from whence.persist.files import write_bytes
    from whence.present.ranking import audit_columns, csv_lines

    table = audit_columns(opened, shown.file.study, duplicates, **shown.options)
    rows = list(zip(*table.values(), strict=True))
    write_bytes(out, csv_lines([list(table), *rows], "\r\n").encode("utf-8", "replace"))
    differ = sum(bool(d) for d in table["differs"])
    most = sum(bool(d) for d in table["differs"][: len(rows) // 20])
    text = f"{out}: {len(rows):,} examples. The model predicts another label for {differ:,}"
    return Answer(
        {"path": out, "examples": len(rows), "differ": differ},
        f"{text}, of which {most:,} are among the most suspicious 5 %",
    )


@command(resumes=True)
def select(
    study: StudyPath,
    scores: ScoresPath,
    drop: Annotated[
        str | None,
        typer.Option(metavar="INT|SHARE", help="Examples to leave out: 100, 0.05 or 5%."),
    ] = None,
    keep: Annotated[
        str | None, typer.Option(metavar="INT|SHARE", help="Examples to train on instead.")
    ] = None,
    duplicates: Duplicates = False,
    test: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Examples that judge: a name that the study file defines. Default: half of the "
            "queries choose, the others judge.",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, metavar="INT", help="Trainings of each kind.")] = 5,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="FOLDER", help="Folder for results. Default: select/STUDY."
        ),
    ] = None,
    query: QueryName = None,
    stage: Stage = None,
    seed: Annotated[
        int, typer.Option(min=0, metavar="INT", help="Seed of the halves and of the control.")
    ] = 0,
    check: Check = True,
    device: Device = None,
    memory: Memory = None,
    executor: Executor = None,
    engine: Engine = None,
    no_progress: NoProgress = False,
) -> Answer:
    """Drop the examples that harm the queries, retrain, and compare with dropping at random.

    Writes selection.csv: which examples were kept, by which score. After an interruption, run the
    same command to resume.

    Examples:

    - `whence select study.py scores/source --drop 5%`
    - `whence select study.py scores/source --keep 0.5 --duplicates --test unseen`
    """
    opened = open_scores(scores)
    if (drop is None) == (keep is None):
        raise CommandError("give either --drop or --keep, such as --drop 5%")
    amount = _amount("--drop", drop) if keep is None else _amount("--keep", keep)
    from whence.evaluate import select as choose
    from whence.persist.files import write_bytes
    from whence.present.ranking import csv_lines

    shown = StudyExamples(opened, study, check)
    file, place = shown.file, out or Path("select") / study.stem
    alike = _duplicates(shown, stage) if duplicates else None
    result = choose(
        file.needs_recipe(),
        opened,
        file.query_data(query),
        **{"drop" if keep is None else "keep": amount},
        test=None if test is None else file.query_data(test),
        duplicate_of=alike,
        seeds=seeds,
        stage=stage,
        seed=seed,
        out=place,
        device=device_of(device),
        memory=memory,
        executor=executor,
        engine=engine or "auto",
        progress=not no_progress,
    )
    rows = [
        [m, int(result.kept[m]), result.help[m]] + ([] if alike is None else [alike[m]])
        for m in range(len(result.kept))
    ]
    heads = ["example", "kept", "help", *([] if alike is None else ["duplicate_of"])]
    write_bytes(place / "selection.csv", csv_lines([heads, *rows], "\r\n").encode())
    data: dict[str, Any] = {f.name: getattr(result, f.name) for f in fields(result)}
    better, interval = result.difference()
    data |= {"better_than_random": better, "interval": interval, "path": place / "selection.csv"}
    return Answer(data, f"{result!r}\n{place / 'selection.csv'} has the choice")


def _amount(option: str, text: str | None) -> float:
    """100, 0.05 or 5%."""
    assert text is not None
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        raise CommandError(f"{option} {text}: give a number or a share, such as 100, 5%") from None
    return value / 100 if text.endswith("%") else value


def _duplicates(shown: StudyExamples, stage: str | None) -> list[int]:
    """The example that each one of a stage nearly duplicates."""
    from whence.present.duplicates import leaders, sketch
    from whence.present.examples import Examples

    train = shown.file.study.train
    if isinstance(train, dict):
        train = train[stage or next(iter(train))]
    examples = Examples(train, **shown.options)
    leading = leaders([sketch(examples.content(m)) for m in range(len(examples))])
    return [int(m) for m in leading]
