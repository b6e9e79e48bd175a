"""`whence whatif`: what would change without these training examples."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whence.cli.attributing import StudyExamples, line, line_heading
from whence.cli.options import (
    TRAINING,
    Check,
    ScoresPath,
    ToShow,
    compute_options,
    numbers,
    open_scores,
)
from whence.cli.screen import Answer, CommandError, command
from whence.cli.signature import NON_NEGATIVE, OUT, QUERY
from whence.errors import InvalidInput

if TYPE_CHECKING:
    from whence.cli.studyfile import StudyFile
    from whence.explore.jobs import Outcome
    from whence.scores import Scores


@command(resumes=True, options=compute_options, only=TRAINING)
def whatif(
    scores: ScoresPath,
    examples: Annotated[str, typer.Option("--examples", "-e")],
    query: Annotated[int | None, QUERY] = None,
    k: Annotated[int, typer.Option("-k", min=1)] = 10,
    stage: str | None = None,
    study: ToShow = None,
    retrain: Annotated[int, NON_NEGATIVE] = 0,
    out: Annotated[Path | None, OUT] = None,
    check: Check = True,
    *,
    options: dict[str, Any],
) -> Answer:
    """Predict how the queries change without some training examples; retrain to check.

    Examples:

    - `whence whatif scores/source --examples 3,14,159 --study study.py`
    - `whence whatif scores/source --examples 3,14,159 --study study.py --retrain 5`

    Args:
        examples (INT,...): Training examples to remove.
        query: Show this query. Default: those that change most.
        k: Number of queries to show.
        stage (NAME): Stage of the examples.
        retrain (SEEDS): Also retrain without the examples, with this many seeds. Needs --study with
            a recipe.
        out (FOLDER): Folder for the trainings. Default: `whatif`, in the folder of the scores.
    """
    removed = numbers("--examples", examples)
    opened = open_scores(scores)
    if opened.is_self_influence:
        raise CommandError(f"{scores} is self-influence, which has no queries: attribute some")
    if retrain and study is None:
        raise CommandError("--retrain needs to know how to train: give --study, with a recipe")
    rows = range(opened.shape[0]) if query is None else [opened.row_index(query)]
    predicted = [opened.removal_effect(row, removed, stage=stage) for row in rows]
    shown = None if study is None else StudyExamples(opened, study, check)
    outcome = None
    if retrain:
        assert shown is not None
        outcome = _retrained(
            shown.file,
            removed,
            stage,
            retrain,
            out=out or scores / "whatif",
            **options,
        )
    changes = [
        _change(opened, row, effect, removed, stage, shown, outcome)
        for row, effect in zip(rows, predicted, strict=True)
    ]
    decisive = "real" if outcome is not None else "predicted"
    changes.sort(key=lambda change: -abs(change[decisive]))
    data: dict[str, Any] = {"examples": removed, "measurement": opened.measurement}
    data |= {"unit": opened.unit, "queries": changes}
    if outcome is not None and query is None:
        import numpy as np

        from whence.evaluate.agreement import agreement

        pairs = np.array([[change["predicted"], change["real"]] for change in changes])
        data |= {"seeds": retrain, "agreement": agreement(*pairs.T)}
    return Answer(data, _table(opened, data, k))


def _retrained(
    file: StudyFile, removed: list[int], stage: str | None, seeds: int, **options: Any
) -> Outcome:
    """The measurements of models that trained with and without the examples."""
    import numpy as np

    from whence.explore.jobs import Outcome
    from whence.retrain import Training, measure

    recipe = file.needs_recipe()
    about = recipe.stage(stage)
    mask = np.ones(len(about.data), dtype=bool)
    mask[removed] = False
    trainings = [Training(seed) for seed in range(seeds)]
    trainings += [Training(seed, mask, about.name) for seed in range(seeds)]
    measured = measure(recipe, file.query_data(None), trainings, **options)
    outcome = Outcome(measured[:seeds], measured[seeds:])
    if not outcome.sound.any():
        raise InvalidInput("all trainings diverged: lower the learning rate of the recipe")
    return outcome


def _change(
    scores: Scores,
    row: int,
    predicted: float,
    removed: list[int],
    stage: str | None,
    shown: StudyExamples | None,
    outcome: Outcome | None,
) -> dict[str, Any]:
    """One query: the predicted change, and the real one if there is an outcome."""
    change: dict[str, Any] = {"query": row, "predicted": predicted}
    if "calibration" in scores.diagnostics:
        low, high = scores.removal_interval(row, removed, stage=stage)
        change["within"] = (high - low) / 2
    if outcome is not None:
        place = int(scores.query_ids[row])
        change |= {"before": float(outcome.baseline[place]), "real": float(outcome.change[place])}
        change["error"] = float(outcome.error[place])
    if shown is not None:
        change |= shown.query(int(scores.query_ids[row]))
    return change


def _table(scores: Scores, data: dict[str, Any], k: int) -> str:
    from whence.table import Table, listed

    shown = data["queries"][:k]
    retrained, described = "real" in shown[0], "kind" in shown[0]
    rows: list[list[object]] = []
    for change in shown:
        half = f" ± {change['within']:.2g}" if "within" in change else ""
        rows.append([change["query"], *([line(change)] if described else [])])
        rows[-1].append(f"{change['predicted']:+.3g}{half}")
        if retrained:
            error = f" ± {change['error']:.2g}" if math.isfinite(change["error"]) else ""
            rows[-1] += [f"{change['real']:+.3g}{error}", f"{change['before']:.3g}"]
    heads = ["query", *([line_heading(shown)] if described else []), "predicted"]
    heads += ["retrained", "before"] if retrained else []
    number = len(data["examples"])
    removed = f"{number} training example{'s' * (number > 1)} ({listed(data['examples'])})"
    title = (
        f"{scores.method}: change of the {scores.measurement} in {scores.unit} without {removed}"
    )
    count = len(data["queries"])
    note = f"{len(rows)} of {count} queries, those that change most" if count > 1 else ""
    agreed = data.get("agreement", {}).get("spearman")
    if agreed is not None:
        note += f"; rank correlation of predicted and retrained changes: {agreed:.2f}"
    return str(Table(heads, rows, title=title, note=note, texts=1 + described))
