"""The files of a Scores folder: written beside and renamed, checked when read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

SCHEMA = 1


def make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise NotADirectoryError(f"{path} is a file: scores are kept in a folder") from error


def replace(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write beside ``path`` and rename, so that a killed process leaves the old file or the new."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def save_array(path: Path, array: NDArray[Any]) -> None:
    replace(path, lambda file: np.save(file, array, allow_pickle=False))


def write_json(path: Path, content: object) -> None:
    replace(path, lambda file: file.write(json.dumps(content, indent=2).encode()))


def read_json(path: Path) -> dict[str, Any]:
    file = path / "scores.json"
    if not file.is_file():
        if (path / "progress.json").is_file():
            raise ValueError(
                f"the scores in {path} are not finished: make the same attribute(out=...) call "
                "again, and it goes on where it stopped"
            )
        what = "has no scores.json" if path.is_dir() else "does not exist"
        raise FileNotFoundError(f"{path} {what}: give a folder that Scores.save wrote")
    try:
        meta = json.loads(file.read_text())
        schema = meta["schema"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is not the description of scores ({error})") from error
    if schema != SCHEMA:
        raise ValueError(
            f"{file} has schema {schema!r}, this whence reads {SCHEMA}: use the version of whence "
            "that wrote it"
        )
    return dict(meta)


def load_array(path: Path, shape: tuple[int, ...], dtype: str) -> Any:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path} is missing: the folder is not whole") from error
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"{path} is truncated or damaged ({error})") from error
    if array.shape != shape or str(array.dtype) != dtype:
        raise ValueError(
            f"{path} is {array.dtype} of shape {array.shape}, but the file beside it says {dtype} "
            f"of shape {shape}: the two files do not belong together"
        )
    return array
