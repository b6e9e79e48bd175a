"""Commands about attribution: layers, fit, attribute, top."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whence.cli import settings
from whence.cli.options import (
    AtEachEnd,
    Check,
    ScoresPath,
    StudyPath,
    ToShow,
    compute_options,
    imported,
    open_scores,
)
from whence.cli.screen import Answer, CommandError, command, say
from whence.cli.signature import OUT, POSITIVE, QUERY, documented
from whence.errors import FolderConflict

if TYPE_CHECKING:
    from whence.cli.studyfile import StudyFile
    from whence.scores import Scores
    from whence.scores.result import Ranking

TASKS = {
    "classification": "Classification",
    "regression": "Regression",
    "language": "LanguageModeling",
    "multi-label": "MultiLabel",
}
WIDTH = 60  # characters of an example in a table
BAR = 10  # characters of the longest bar
NOT_FITTED = ("scores", "products", "sums")  # passes of `attribute` that leave no factors
FITTING = ("device", "dtype", "batch_size", "memory", "workers", "no_progress")
# what a method's `attribute` may take from the command line
REQUESTED = ("top", "by_segment", "by_layer", "query_rank", *signature(compute_options).parameters)


def _offering(choices: Iterable[str]) -> Callable[[], list[str]]:
    """What a shell offers for an option."""

    def offer() -> list[str]:
        return list(choices)

    return offer


Method = Annotated[
    str,
    typer.Option(
        metavar="METHOD",
        help=f"One of {', '.join(settings.OPTIONS)}.",
        autocompletion=_offering(settings.OPTIONS),
    ),
]


def commands(shown: str) -> list[Callable[..., int]]:
    """The commands; help shows the settings of the method `shown`."""
    how: dict[str, Any] = {"resumes": True, "shared": True, "options": compute_options}
    fits = command(**how, only=FITTING)(with_settings(fit, shown))
    return [layers, fits, command(**how)(with_settings(attribute, shown)), top]


def with_settings(function: Callable[..., Answer], shown: str) -> Callable[..., Answer]:
    """Add the settings of all methods to a command as options; help shows those of one method.

    The function receives the options that were used, {name: text}, as `given`.
    """
    displayed = settings.typed(shown)
    extra = []
    for name, option in (displayed | settings.every_option() | displayed).items():
        switch = settings.is_switch(option)
        declared = typer.Option(
            settings.flag(name, option),
            help=settings.help_text(option),
            metavar=None if switch else settings.metavar(option),
            rich_help_panel=f"Settings of {shown} (for another method: --method NAME --help)",
            show_default=False,
            hidden=name not in displayed,
            autocompletion=None if switch else _offering(option.choices),
        )
        extra.append(
            Parameter(
                name,
                Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[bool | None if switch else str | None, declared],
            )
        )

    def run(**arguments: Any) -> Answer:
        values = {p.name: arguments.pop(p.name) for p in extra}
        given = {name: text for name, text in values.items() if text is not None}
        return function(given=given, **arguments)

    run.__doc__, parameters = documented(function)
    parameters = [p for p in parameters if p.name != "given"]
    run.__name__ = function.__name__
    run.__signature__ = Signature([*parameters, *extra])  # type: ignore[attr-defined]
    return run


def build_method(method: str, given: dict[str, str | bool], study: Path) -> tuple[StudyFile, Any]:
    """The study file, and the method with the settings from the command line and from there."""
    arguments = settings.arguments(method, given)  # reports mistakes before torch is imported
    from whence.cli.studyfile import load_study

    file = load_study(study)
    if "recipe" in settings.OPTIONS[method]:
        arguments["recipe"] = file.needs_recipe()
    return file, settings.constructor(method)(**arguments)


def accepted(call: Callable[..., Any], method: str, requested: dict[str, Any]) -> dict[str, Any]:
    """The options that were used; an error if the method's `attribute` or `fit` lacks one."""
    known = signature(call).parameters
    given = {name: value for name, value in requested.items() if value not in (None, False)}
    given.pop("progress", None)
    for name in given:
        if name not in known:
            available = ", ".join(f"--{n.replace('_', '-')}" for n in REQUESTED if n in known)
            raise CommandError(
                f"--{name.replace('_', '-')} does not apply to {method}, which takes "
                f"{available or 'none'}"
            )
    return given | ({"progress": requested["progress"]} if "progress" in known else {})


@command()
def layers(
    place: Annotated[
        Path, typer.Argument(metavar="STUDY", help="A study file, or the folder of a run.")
    ],
    more: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    model: str | None = None,
    train: str | None = None,
    task: str | None = None,
    layers: list[str] | None = None,
) -> Answer:
    """List the tracked layers, what is excluded and why, and the cost of a pass over the data.

    Examples:

    - `whence layers study.py`
    - `whence layers runs/mnist --model train:make_model --train train:train_set`

    Args:
        model (MODULE:NAME): With a run: the model, or a function that builds it. Modules are
            imported from the current folder.
        train (MODULE:NAME): With a run: the training data, or a function that builds it.
        task (TASK): With a run: classification, language, multi-label, regression.
        layers (PATTERN): With a run: track only the layers that match; matrices for those of the
            paper.
    """
    patterns = [*(layers or []), *(more or [])]
    if more and not layers:
        raise CommandError(f"{more[0]!r} is one argument too many: give one study or one run")
    import warnings

    import whence
    from whence.cli.studyfile import load_study

    if place.suffix in (".py", ".yaml", ".yml") and not place.is_dir():
        options = {"--model": model, "--train": train, "--task": task, "--layers": patterns}
        unused = [name for name, value in options.items() if value]
        if unused:
            raise CommandError(f"{unused[0]} is for a run's folder: {place} is a study file")
        study = load_study(place).study
    else:
        if model is None or train is None:
            what = "is not a study file" if place.exists() else "does not exist"
            raise CommandError(f"{place} {what}: give one, or a run with --model and --train")
        if task is not None and task not in TASKS:
            raise CommandError(f"--task {task}: use one of {', '.join(sorted(TASKS))}")
        study = whence.Study(
            imported("--model", model),
            getattr(whence, TASKS[task or "classification"])(),
            train=imported("--train", train),
            runs=place,
            layers=patterns or None,
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the description lists what is excluded
        tracked = tracked_layers(study)
        return Answer(
            {
                "layers": [
                    {"name": b.name, "outputs": b.o, "inputs": b.i, "bias": b.bias}
                    | {"parameters": b.size, "positions": tracked.positions[b.name]}
                    for b in tracked.blocks
                ],
                "parameters": tracked.parameters,
                "share": tracked.share,
                "left_out": [vars(e) for e in tracked.excluded],
                "examples": {name: len(data) for name, data in study.data.items()},
            },
            str(study.describe()),
        )


def fit(
    study: StudyPath,
    given: dict[str, str | bool],
    method: Method = "source",
    *,
    options: dict[str, Any],
) -> Answer:
    """Fit the curvature without queries; `attribute` with the same settings reuses it.

    Examples:

    - `whence fit study.py --method source --segments 3`
    - `whence fit study.py --method influence --damping source --device cuda`
    """
    method = settings.find(method)
    file, chosen = build_method(method, given, study)
    if not hasattr(chosen, "fit"):
        raise CommandError(f"{method} has nothing to fit: use `whence attribute`")
    folders = [file.study.store(run).folder for run in file.study.runs]
    if None in folders:
        raise CommandError(
            f"the study in {study} keeps its factors in memory, where they would be lost: use "
            "Study(cache=folder), or a run on disk"
        )
    before = {path: _files(path) for path in folders if path is not None}
    chosen.fit(file.study, **accepted(chosen.fit, method, options))
    report: list[dict[str, Any]] = [
        {"folder": path, "new": sorted(_files(path) - files), "found": sorted(files)}
        for path, files in before.items()
    ]
    passes = chosen.estimate(file.study)["passes"]
    fits = any(count for kind, count in passes.items() if kind not in NOT_FITTED)
    lines = [f"{r['folder']}: {len(r['new'])} new files of factors" for r in report]
    if not fits:
        lines = [f"{chosen!r} has nothing to fit: use `whence attribute`"]
    elif not any(r["new"] for r in report):
        lines = [f"{chosen!r} was fitted before: {r['folder']}" for r in report]
    return Answer({"method": repr(chosen), "fits": fits, "cache": report}, "\n".join(lines))


def attribute(
    study: StudyPath,
    given: dict[str, str | bool],
    method: Method = "source",
    out: Annotated[Path | None, OUT] = None,
    query: str | None = None,
    top: Annotated[int | None, POSITIVE] = None,
    by_segment: bool = False,
    by_layer: bool = False,
    by_head: bool = False,
    query_rank: str | None = None,
    *,
    options: dict[str, Any],
) -> Answer:
    """Score every training example for every query.

    After an interruption (Ctrl-C, a killed job), run the same command to resume.

    Examples:

    - `whence attribute study.py --method source --segments 3 --out scores/source`
    - `whence attribute study.py --method influence --damping source --device cuda`
    - `whence attribute study.py --query self --out scores/self-influence`
    - `whence attribute --method trak --help`

    Args:
        out (FOLDER): Folder for the scores. Default: scores/STUDY-METHOD.
        query (NAME): The queries: a name that the study file defines (a data file, for a YAML
            study), or "self" for the effect of each training example on itself. Default: `query`.
        top: Keep only this many of the most helpful and harmful per query.
        by_segment: Also keep the contribution of each segment.
        by_layer: Also keep the contribution of each layer.
        by_head: Also keep the contribution of each layer and attention head.
        query_rank (INT|auto): Keep query vectors as factors of this rank, so that more queries
            share a pass over the data. Scores are then approximate.
    """
    method = settings.find(method)
    place = out or Path("scores") / f"{study.stem}-{method}"
    requested = {
        "top": top,
        "by_segment": by_segment,
        "by_layer": "heads" if by_head else by_layer,
        "query_rank": int(query_rank) if query_rank and query_rank.isdecimal() else query_rank,
        **options,
    }
    file, chosen = build_method(method, given, study)
    call = accepted(chosen.attribute, method, requested)
    queries = file.query_data(query)
    try:
        scores = chosen.attribute(file.study, queries, out=place, **call)
    except FolderConflict as error:
        raise CommandError(f"{error}. {_contents(place)}") from error
    which = [] if scores.is_self_influence else ["--query", "0"]
    look = shlex.join(["whence", "top", str(place), *which, "--study", str(study)])
    return Answer(about(scores) | {"path": place}, f"{scores!r}\nSaved in {place}. Next: {look}")


@command()
def top(
    scores: ScoresPath,
    query: Annotated[int | None, QUERY] = None,
    k: AtEachEnd = 10,
    overall: bool = False,
    as_csv: Annotated[bool, typer.Option("--csv")] = False,
    duplicates: bool = False,
    study: ToShow = None,
    check: Check = True,
) -> Answer:
    """Show the training examples that helped a query most, and those that harmed it most.

    Examples:

    - `whence top scores/source --query 3 -k 10`
    - `whence top scores/source --query 3 --study study.py`
    - `whence top scores/source --overall --csv --study study.py > ranking.csv`

    Args:
        query: Index of the query.
        overall: Rank by the mean score over all queries.
        as_csv: Print all training examples in order, as CSV.
        duplicates: With --csv and --study: find near-duplicates.
    """
    opened = open_scores(scores)
    if overall and query is not None:
        raise CommandError(f"--overall ranks by all queries: leave out --query {query}")
    if duplicates and not (as_csv and study):
        raise CommandError("--duplicates compares training examples: give --csv and --study")
    if query is None and not overall and not opened.is_self_influence:
        last = opened.shape[0] - 1
        raise CommandError(f"say which query: --query 0..{last}, or --overall for the mean of all")
    if query is not None:
        opened.row_index(query)
    examples = None if study is None else StudyExamples(opened, study, check)
    if as_csv:
        return _csv(opened, query, examples, duplicates)
    if overall and not opened.is_self_influence:
        from whence.scores.means import mean_scores

        known = {k: v for k, v in opened.diagnostics.items() if k != "calibration"}
        opened = opened.with_values(mean_scores(opened), query_ids=None, diagnostics=known)
        query = None  # the mean is one row, whose error is not known
    rankings = {"helpful": opened.helpful(query, k), "harmful": opened.harmful(query, k)}
    data = about(opened) | {
        "query": query,
        **{
            end: [
                e._asdict()
                | within
                | ({} if examples is None else examples.train(e.example, e.stage))
                for e, within in zip(ranking, _intervals(opened, query, ranking), strict=True)
            ]
            for end, ranking in rankings.items()
        },
    }
    heading = "; mean over all queries" if overall else ""
    heading = heading if query is None else f"; query {query}"
    if examples is not None and query is not None:
        data["shown"] = examples.query(int(opened.query_ids[query]))
        shown = data["shown"]
        heading += f": {'label ' if shown.get('label') else ''}{line(shown)}"
    return Answer(data, _tables(opened, data, heading))


def _csv(
    scores: Scores, query: int | None, examples: StudyExamples | None, duplicates: bool
) -> Answer:
    from whence.present.ranking import csv_lines, ranked_columns

    shown = {} if examples is None else {"study": examples.file.study, **examples.options}
    table = ranked_columns(scores, query, duplicates=duplicates, **shown)
    rows = list(zip(*table.values(), strict=True))
    data = [dict(zip(table, row, strict=True)) for row in rows]
    return Answer(data, csv_lines([list(table), *rows]).rstrip("\n"))


def _intervals(scores: Scores, query: int | None, ranking: Ranking) -> list[dict[str, float]]:
    """`within` of each entry: half of a calibrated score's 95 % interval."""
    from whence.scores.uncertainty import half_widths_of_scores

    calibration, row = scores.diagnostics.get("calibration"), scores.row_index(query)
    within = half_widths_of_scores(calibration, row, [entry.value for entry in ranking])
    return [{} for _ in ranking] if within is None else [{"within": float(w)} for w in within]


def about(scores: Scores) -> dict[str, Any]:
    """A description of scores for --json."""
    names = ("method", "settings", "measurement", "unit", "higher_is_better", "shape", "excluded")
    return {name: getattr(scores, name) for name in names} | {
        "warnings": scores.warnings,
        "self_influence": scores.is_self_influence,
        "diagnostics": scores.diagnostics,
        "provenance": scores.provenance,
    }


class StudyExamples:
    """The examples of a study file, as text."""

    def __init__(self, scores: Scores, path: Path, check: bool) -> None:
        from whence.cli.studyfile import load_study
        from whence.present.check import check_data
        from whence.present.examples import Examples
        from whence.present.views import TrainingExamples

        file = load_study(path)
        query = None if scores.is_self_influence else file.query
        train, collate = file.study.train, file.study.collate
        for note in check_data(scores, train, query, collate=collate, contents=check):
            say(f"warning: {note}")
        self.file, self.options = file, file.display_options()
        self._train = TrainingExamples.of_scores(scores, train, **self.options).by_stage
        self._query = Examples(query, **self.options)

    def train(self, example: int, stage: str | None) -> dict[str, Any]:
        examples = self._train.get(stage) or next(iter(self._train.values()))
        return _short(examples.render(example))

    def query(self, row: int) -> dict[str, Any]:
        return _short(self._query.render(row))


def _short(rendered: dict[str, Any]) -> dict[str, Any]:
    """What a terminal can show of an example: its label, and its text or row."""
    parts = ("kind", "label", "text", "row")
    return {name: rendered[name] for name in parts if rendered.get(name)}


def line(example: dict[str, Any]) -> str:
    """An example in one line of a table."""
    text = example.get("text") or ", ".join(f"{n}={v}" for n, v in example.get("row", []))
    text = " ".join(text.split())
    text = text if len(text) <= WIDTH else text[: WIDTH - 1] + "…"
    return "  ".join(part for part in (example.get("label"), text) if part) or example["kind"]


def line_heading(examples: Iterable[dict[str, Any]]) -> str:
    """The heading of a column of such lines: a terminal shows no pictures, only their labels."""
    content = any(example.get("text") or example.get("row") for example in examples)
    return "label, content" if content else "label"


def _tables(scores: Scores, data: dict[str, Any], heading: str) -> Any:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    head = f"{scores.method}, {scores.measurement} in {scores.unit}"
    parts: list[Any] = [Text(head + heading)]
    words = {"helpful": ("most helpful", "green"), "harmful": ("most harmful", "red")}
    for end, (word, colour) in words.items():
        table = Table(title=Text(word, style=f"bold {colour}"), title_justify="left", box=None)
        table.add_column("example", justify="right")
        sized = "calibration" in scores.diagnostics
        table.add_column("change ± 95 %" if sized else "score", justify="right", style=colour)
        if not sized:  # the order is known, the size is not
            table.add_column("relative", style=colour, min_width=BAR)
        strongest = max((abs(e["value"]) for e in data[end]), default=0.0) or 1.0
        stages = any(entry["stage"] for entry in data[end])
        if stages:
            table.add_column("stage")
        if any("kind" in entry for entry in data[end]):
            table.add_column(line_heading(data[end]))
        for e in data[end]:
            change = f"{e['value']:+.4g}"
            bar = "█" * round(BAR * abs(e["value"]) / strongest)
            cells = [str(e["example"]), f"{change} ± {e['within']:.2g}" if sized else change]
            cells += [] if sized else [bar]
            cells += [e["stage"] or ""] if stages else []
            table.add_row(*cells, *([Text(line(e))] if "kind" in e else []))
        parts += ["", table]
    return Group(*parts)


def _contents(folder: Path) -> str:
    """Which scores a folder holds."""
    from whence.scores import Scores

    if not (folder / "scores.json").exists():
        return "It holds unfinished scores"
    scores = Scores.load(folder)
    return f"It holds {scores.shape} scores by {scores.call}, of {scores.measurement}"


def tracked_layers(study: Any) -> Any:
    """The layers that a study tracks, for its first run."""
    import torch

    from whence.layers.passes import precision_as_asked

    with precision_as_asked():
        cpu = torch.device("cpu")
        passes = study.passes(study.runs[0], device=cpu, dtype=torch.float32, quiet=True)
    return passes[study.stages[-1]].tracked


def _files(folder: Path) -> set[str]:
    return {file.name for file in folder.glob("*.safetensors")}
