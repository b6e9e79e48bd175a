"""Arguments and options that several commands share, and their values."""

from __future__ import annotations

import importlib
import os
import re
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whence.cli.screen import CommandError, say

if TYPE_CHECKING:
    import torch

    from whence.scores import Scores

compute_option = partial(typer.Option, rich_help_panel="Compute options")
COMPUTE = compute_option()
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
    typer.Option(metavar="STUDY", help="The study file, to show the examples themselves."),
]
Check = Annotated[bool, typer.Option(help="Check that the scores were computed from this data.")]
AtEachEnd = Annotated[int, typer.Option("-k", min=1, help="Number of examples at each end.")]

TRAINING = ("device", "memory", "executor", "engine", "no_progress")  # options to train by


def compute_options(
    device: Annotated[str | None, COMPUTE] = None,
    dtype: Annotated[str | None, COMPUTE] = None,
    batch_size: Annotated[int | None, compute_option(min=1)] = None,
    memory: Annotated[str | None, COMPUTE] = None,
    workers: Annotated[int | None, compute_option(min=0)] = None,
    executor: Annotated[str | None, COMPUTE] = None,
    engine: Annotated[str | None, COMPUTE] = None,
    no_progress: Annotated[bool, COMPUTE] = False,
) -> dict[str, Any]:
    """Where and how to compute: what was given, as methods and `whence.retrain.measure` take it.

    Args:
        device (DEVICE): cpu, cuda, cuda:1, mps; auto is a GPU if there is one. Default: where the
            model is, and auto for commands that train.
        dtype (DTYPE): float32 (default), float64 or bfloat16.
        batch_size: Examples per pass. Default: as many as fit. Does not change the scores.
        memory (SIZE): Memory limit, such as "8GB".
        workers: Number of processes that load data.
        executor (NAME): "ray" works on a Ray cluster. Default: in this process.
        engine (NAME): How to train several models at once: auto (default), products, vmap, or
            single.
        no_progress: No progress bars. In a log file there are none anyway.
    """
    given = {
        "device": device_of(device),
        "dtype": dtype_of(dtype),
        "batch_size": batch_size,
        "memory": memory,
        "workers": workers,
        "executor": executor,
        "engine": engine,
        "progress": not no_progress,
    }
    return {name: value for name, value in given.items() if value is not None}


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


def numbers(option: str, text: str) -> list[int]:
    """The integers in "10,20,30"."""
    if not re.fullmatch(r"\d+(,\d+)*", text.replace(" ", "")):
        raise CommandError(f"{option} {text}: give whole numbers, such as 10,20,30")
    return [int(part) for part in text.split(",")]


def imported(option: str, place: str, call: bool = True) -> Any:
    """The object that `MODULE:NAME` names; its result, if it is a function or a class.

    Args:
        call: whether a function or class is called.
    """
    module, _, name = place.partition(":")
    if not module or not name:
        raise CommandError(f"{option} {place!r}: write MODULE:NAME, such as train:make_model")
    sys.path.insert(0, os.getcwd())
    try:
        value = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise CommandError(f"{option} {place!r} cannot be imported ({error})") from error
    finally:
        sys.path.remove(os.getcwd())
    is_object = hasattr(value, "parameters") or hasattr(value, "__getitem__")
    called = call and callable(value) and (isinstance(value, type) or not is_object)
    return value() if called else value


def open_scores(path: Path) -> Scores:
    """The scores in a folder; an error that says what the path is instead."""
    from whence.scores import Scores

    if not (path / "scores.json").exists():
        if (path / "progress.json").exists():
            raise CommandError(
                f"the scores in {path} are unfinished: rerun the same `whence attribute` command "
                "to resume"
            )
        if (path / "truth.json").exists():
            raise CommandError(f"{path} holds a truth, not scores: pass it as --truth")
        what = "holds no scores" if path.is_dir() else "is a file"
        what = what if path.exists() else "does not exist"
        raise CommandError(f"{path} {what}: give a folder written by `whence attribute`")
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
