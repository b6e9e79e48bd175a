"""Commands that act on scores: audit labels, select training data."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

from whence.cli.attributing import StudyExamples
from whence.cli.options import (
    TRAINING,
    Check,
    ScoresPath,
    StudyPath,
    compute_options,
    open_scores,
)
from whence.cli.screen import Answer, CommandError, command
from whence.cli.signature import NON_NEGATIVE, OUT, POSITIVE


@command()
def audit(
    study: StudyPath,
    scores: ScoresPath,
    out: Annotated[Path, OUT] = Path("audit.csv"),
    duplicates: bool = False,
    check: Check = True,
) -> Answer:
    """List the training examples whose labels look wrong, the most suspicious first, as CSV.

    Examples are suspicious if they harm the queries on average. With self-influence scores, they
    are suspicious if the model could learn them only from themselves.

    Examples:

    - `whence audit study.py scores/source -o audit.csv`

    Args:
        out (FILE): The CSV file to write.
        duplicates: Find near-duplicates; select drops them first.
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
    text = f"{out}: {len(rows):,} examples"
    if any(d is not None for d in table["differs"]):  # of a classification
        text += f". The model predicts another label for {differ:,}, of which {most:,} are among "
        text += "the most suspicious 5 %"
    return Answer({"path": out, "examples": len(rows), "differ": differ}, text)


@command(resumes=True, options=compute_options, only=TRAINING)
def select(
    study: StudyPath,
    scores: ScoresPath,
    drop: str | None = None,
    keep: str | None = None,
    duplicates: bool = False,
    test: str | None = None,
    seeds: Annotated[int, POSITIVE] = 5,
    out: Annotated[Path | None, OUT] = None,
    query: str | None = None,
    stage: str | None = None,
    seed: Annotated[int, NON_NEGATIVE] = 0,
    check: Check = True,
    *,
    options: dict[str, Any],
) -> Answer:
    """Drop the examples that harm the queries, retrain, and compare with dropping at random.

    Writes selection.csv, with the score of each example and whether it was kept. After an
    interruption, run the same command to resume.

    Examples:

    - `whence select study.py scores/source --drop 5%`
    - `whence select study.py scores/source --keep 0.5 --duplicates --test unseen`

    Args:
        drop (INT|SHARE): Examples to leave out: 100, 0.05 or 5%.
        keep (INT|SHARE): Examples to keep, instead of --drop.
        duplicates: Find near-duplicates; select drops them first.
        test (NAME): Examples that judge: a name that the study file defines. Default: half of the
            queries choose, the others judge.
        seeds: Trainings of each kind.
        out (FOLDER): Folder for results. Default: select/STUDY.
        query (NAME): Queries: a name that the study file defines. Default: `query`.
        stage (NAME): Stage whose examples are left out of trainings. Default: the first.
        seed: Seed of the halves and of the control.
    """
    opened = open_scores(scores)
    if (drop is None) == (keep is None):
        raise CommandError("give either --drop or --keep, such as --drop 5%")
    dropped, stays = _amount("--drop", drop), _amount("--keep", keep)
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
        drop=dropped,
        keep=stays,
        test=None if test is None else file.query_data(test),
        duplicate_of=alike,
        seeds=seeds,
        stage=stage,
        seed=seed,
        out=place,
        **options,
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
    return Answer(data, f"{result!r}\nSaved in {place / 'selection.csv'}")


def _amount(option: str, text: str | None) -> float | None:
    """100, 0.05 or 5%."""
    if text is None:
        return None
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        raise CommandError(f"{option} {text}: give a number or a share, such as 100, 5%") from None
    if not text.endswith("%"):
        return value
    if not 0 < value < 100:  # 100 % is 1.0, which would be one example
        raise CommandError(f"{option} {text}: give a share between 0 % and 100 %")
    return value / 100


def _duplicates(shown: StudyExamples, stage: str | None) -> list[int]:
    """The example that each one of a stage nearly duplicates."""
    import numpy as np

    from whence.present.views import TrainingExamples

    train = shown.file.study.train
    data = train[stage or next(iter(train))]
    examples = TrainingExamples(np.arange(len(data)), None, {None: data}, **shown.options)
    return [int(leader) for leader in examples.leaders(range(len(data)))]
