"""Arguments and options that several commands have, and what they stand for."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whence.cli.screen import CommandError

if TYPE_CHECKING:
    import torch

    from whence.scores import Scores

WORK = "How to work"

StudyPath = Annotated[
    Path, typer.Argument(metavar="STUDY", help="A Python file that defines `study`, or a YAML.")
]
ScoresPath = Annotated[
    Path, typer.Argument(metavar="SCORES", help="A folder that `whence attribute` wrote.")
]
ManyScores = Annotated[
    list[Path], typer.Argument(metavar="SCORES...", help="Folders that `whence attribute` wrote.")
]
ToShow = Annotated[
    Path | None,
    typer.Option("--study", metavar="STUDY", help="The study file: examples are then shown."),
]
Check = Annotated[
    bool,
    typer.Option(help="Whether the data is compared with what the scores were made with."),
]
Query = Annotated[
    str | None,
    typer.Option(
        "--query",
        metavar="NAME",
        help="Which queries: a name that the study file defines (a data file, for a YAML), or "
        '"self" for the effect of each training example on itself. Default: its `query`.',
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        metavar="DEVICE",
        help="cpu, cuda, cuda:1, mps. Default: see `whence doctor`.",
        rich_help_panel=WORK,
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help='What may be used, such as "8GB".', rich_help_panel=WORK),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="DTYPE", help="float32 (default), float64 or bfloat16.", rich_help_panel=WORK
    ),
]
BatchSize = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="INT",
        help="Examples per pass. Default: what fits. No score depends on it.",
        rich_help_panel=WORK,
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(min=0, metavar="INT", help="Processes that load data.", rich_help_panel=WORK),
]
Executor = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help='"ray" to retrain on a Ray cluster. Default: in this process.',
        rich_help_panel=WORK,
    ),
]
Engine = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="How models are trained at once: auto (default), products, vmap, or single.",
        rich_help_panel=WORK,
    ),
]
Progress = Annotated[
    bool | None,
    typer.Option(
        "--progress/--no-progress",
        help="Progress bars, with the time left. Default: on a terminal.",
        rich_help_panel=WORK,
        show_default=False,
    ),
]
Bootstrap = Annotated[
    int, typer.Option(metavar="INT", help="Resamples that intervals are made of.")
]
Diverged = Annotated[
    bool, typer.Option("--exclude-diverged", help="Leave out trainings that diverged.")
]


def progress_wanted(asked: bool | None) -> bool:
    return sys.stderr.isatty() if asked is None else asked


def device_of(name: str | None) -> torch.device | None:
    """The device of that name, if it is there."""
    if name is None:
        return None
    import torch

    try:
        device = torch.device(name)
    except RuntimeError:
        raise CommandError(f"--device {name}: use cpu, cuda, cuda:1 or mps") from None
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


def numbers(option: str, text: str) -> list[int]:
    """Whole numbers, from "10,20,30"."""
    if not re.fullmatch(r"\d+(,\d+)*", text.replace(" ", "")):
        raise CommandError(f"{option} {text}: give whole numbers, such as 10,20,30")
    return [int(part) for part in text.split(",")]


def open_scores(path: Path) -> Scores:
    """The scores in a folder; what the path is, if there are none in it."""
    from whence.scores import Scores

    if not path.exists():
        raise CommandError(f"{path} does not exist: give a folder that `whence attribute` wrote")
    if path.is_file():
        raise CommandError(f"{path} is a file: scores are a folder, which `whence attribute` wrote")
    if not (path / "scores.json").exists() and (path / "truth.json").exists():
        raise CommandError(f"{path} holds a truth, not scores: give it as --truth")
    if (path / "progress.json").exists() and not (path / "scores.json").exists():
        raise CommandError(
            f"the scores in {path} are not finished: the same `whence attribute` command again "
            "goes on where it stopped"
        )
    if not (path / "scores.json").exists():
        raise CommandError(f"{path} holds no scores: give a folder that `whence attribute` wrote")
    return Scores.load(path)


def open_many(paths: list[Path]) -> dict[str, Any]:
    """{name: Scores}: the folders' own names, or whole paths where two are called alike."""
    names = [path.name for path in paths]
    if len({path.resolve() for path in paths}) < len(paths):
        raise CommandError("the same scores are given twice: give each folder once")
    alike = len(set(names)) < len(names)
    return {
        str(path) if alike else name: open_scores(path)
        for name, path in zip(names, paths, strict=True)
    }
