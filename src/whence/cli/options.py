"""Arguments and options that several commands share, and their values."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whence.cli.screen import CommandError, say

if TYPE_CHECKING:
    import torch

    from whence.scores import Scores

COMPUTE = "Compute options"


def out_option(help: str, metavar: str = "FOLDER") -> Any:
    """The option for what a command writes."""
    return typer.Option("--out", "-o", metavar=metavar, help=help)


StudyPath = Annotated[
    Path,
    typer.Argument(metavar="STUDY", help="A Python file that defines `study`, or a YAML file."),
]
ScoresPath = Annotated[
    Path, typer.Argument(metavar="SCORES", help="A folder written by `whence attribute`.")
]
ManyScores = Annotated[
    list[Path], typer.Argument(metavar="SCORES...", help="Folders written by `whence attribute`.")
]
ToShow = Annotated[
    Path | None,
    typer.Option(
        "--study", metavar="STUDY", help="The study file, to show the examples themselves."
    ),
]
Check = Annotated[
    bool,
    typer.Option(help="Check that the data is what the scores were computed from."),
]
Query = Annotated[
    str | None,
    typer.Option(
        "--query",
        metavar="NAME",
        help="The queries: a name that the study file defines (a data file, for a YAML study), or "
        '"self" for the effect of each training example on itself. Default: `query`.',
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        metavar="DEVICE",
        help="cpu, cuda, cuda:1, mps; auto is a GPU if there is one. Default: where the model is, "
        "and auto for commands that train.",
        rich_help_panel=COMPUTE,
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help='Memory limit, such as "8GB".', rich_help_panel=COMPUTE),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="DTYPE", help="float32 (default), float64 or bfloat16.", rich_help_panel=COMPUTE
    ),
]
BatchSize = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="INT",
        help="Examples per pass. Default: as many as fit. Does not change the scores.",
        rich_help_panel=COMPUTE,
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        min=0, metavar="INT", help="Number of processes that load data.", rich_help_panel=COMPUTE
    ),
]
Executor = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help='"ray" works on a Ray cluster. Default: in this process.',
        rich_help_panel=COMPUTE,
    ),
]
Engine = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="How to train several models at once: auto (default), products, vmap, or single.",
        rich_help_panel=COMPUTE,
    ),
]
NoProgress = Annotated[
    bool,
    typer.Option(
        "--no-progress",
        help="No progress bars. In a log file there are none anyway.",
        rich_help_panel=COMPUTE,
    ),
]
AtEachEnd = Annotated[
    int, typer.Option("-k", min=1, metavar="INT", help="Number of examples at each end.")
]
Bootstrap = Annotated[
    int, typer.Option(metavar="INT", help="Number of bootstrap resamples for the intervals.")
]
Diverged = Annotated[
    bool, typer.Option("--exclude-diverged", help="Leave out trainings that diverged.")
]


def device_of(name: str | None) -> torch.device | None:
    """The device of that name; an error if it is not available."""
    if name is None:
        return None
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
        name = "mps" if name == "cpu" and torch.backends.mps.is_available() else name
    try:
        device = torch.device(name)
    except RuntimeError:
        raise CommandError(f"--device {name}: use auto, cpu, cuda, cuda:1 or mps") from None
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            raise CommandError(f"--device {name}: torch {torch.__version__} finds no CUDA device")
        if (device.index or 0) >= count:
            raise CommandError(f"--device {name}: there is only cuda:0..cuda:{count - 1}")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise CommandError(f"--device {name}: torch {torch.__version__} finds no MPS device")
    return device


def dtype_of(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    import torch

    known = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
    if name not in known:
        raise CommandError(f"--dtype {name}: use one of {', '.join(known)}")
    return known[name]


def compute_options(
    device: str | None,
    dtype: str | None,
    batch_size: int | None,
    memory: str | None,
    workers: int | None,
) -> dict[str, Any]:
    """The options of commands that attribute, as methods take them."""
    limits = {"batch_size": batch_size, "memory": memory, "workers": workers}
    return {"device": device_of(device), "dtype": dtype_of(dtype), **limits}


def training_options(
    device: Device = None,
    memory: Memory = None,
    executor: Executor = None,
    engine: Engine = None,
    no_progress: NoProgress = False,
) -> dict[str, Any]:
    """The options of commands that train, as `whence.retrain.measure` takes them."""
    how = {"executor": executor, "engine": engine or "auto", "progress": not no_progress}
    return {"device": device_of(device), "memory": memory, **how}


def numbers(option: str, text: str) -> list[int]:
    """The integers in "10,20,30"."""
    if not re.fullmatch(r"\d+(,\d+)*", text.replace(" ", "")):
        raise CommandError(f"{option} {text}: give whole numbers, such as 10,20,30")
    return [int(part) for part in text.split(",")]


def open_scores(path: Path) -> Scores:
    """The scores in a folder; an error that says what the path is instead."""
    from whence.scores import Scores

    if not path.exists():
        raise CommandError(f"{path} does not exist: give a folder written by `whence attribute`")
    if path.is_file():
        raise CommandError(f"{path} is a file: give a folder written by `whence attribute`")
    if not (path / "scores.json").exists() and (path / "truth.json").exists():
        raise CommandError(f"{path} holds a truth, not scores: pass it as --truth")
    if (path / "progress.json").exists() and not (path / "scores.json").exists():
        raise CommandError(
            f"the scores in {path} are unfinished: rerun the same `whence attribute` command to "
            "resume"
        )
    if not (path / "scores.json").exists():
        raise CommandError(f"{path} holds no scores: give a folder written by `whence attribute`")
    scores = Scores.load(path)
    for message in scores.warnings:
        say(f"warning: {path.name}: {message}")
    return scores


def open_many(paths: list[Path]) -> dict[str, Any]:
    """{name: Scores}, by the names of the folders, or by their paths if two have the same name."""
    names = [path.name for path in paths]
    if len({path.resolve() for path in paths}) < len(paths):
        raise CommandError("the same folder is given twice: give each once")
    ambiguous = len(set(names)) < len(names)
    return {
        str(path) if ambiguous else name: open_scores(path)
        for name, path in zip(names, paths, strict=True)
    }
