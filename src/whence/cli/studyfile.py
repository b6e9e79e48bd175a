"""Study files: a Python file that defines a study, or a YAML file about Hugging Face folders.

A Python file is imported with its folder on the path, as for `python study.py`, but under its own
name: code under `if __name__ == "__main__":` does not run. It defines

    study      a whence.Study                                       (required)
    query      the queries, a dataset built like the training data
    recipe     a whence.Recipe, for commands that retrain
    classes, columns, renderer, tokenizer                           how examples are shown

Relative paths that it opens are relative to the folder of the file.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import traceback
from contextlib import chdir
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from whence.cli.screen import installed, say
from whence.errors import InvalidInput, InvalidType, WhenceError
from whence.table import listed

if TYPE_CHECKING:
    from whence.retrain.recipe import Recipe
    from whence.study import Study

DISPLAY = ("classes", "columns", "renderer", "tokenizer")  # how examples are shown


class StudyFileError(InvalidInput):
    """A study file that cannot be used. The message names the file and the line."""


@dataclass(frozen=True)
class StudyFile:
    """What a study file defines.

    Attributes:
        shown: `classes`, `columns`, `renderer`, `tokenizer`, as far as it defines them.
        other: those of them that cannot be used to show examples, and why.
        names: everything that it defines, by name.
        queries: reads queries from a data file, for a YAML study.
    """

    path: Path
    study: Study
    query: Any = None
    recipe: Recipe | None = None
    shown: dict[str, Any] = field(default_factory=dict)
    other: dict[str, str] = field(default_factory=dict)
    names: dict[str, Any] = field(default_factory=dict, repr=False)
    queries: Any = field(default=None, repr=False)

    @property
    def train(self) -> Any:
        """The training data: a dataset, or {stage: dataset} of several stages."""
        train = self.study.train
        return next(iter(train.values())) if len(train) == 1 else train

    def query_data(self, name: str | None) -> Any:
        """The queries of that name: None for "self"; the file's `query` by default."""
        if name == "self":
            return None
        if name is None:
            if self.query is None:
                raise StudyFileError(
                    f"{self.path} defines no `query`: define it, name other queries with --query, "
                    "or use --query self for the effect of each training example on itself"
                )
            return self.query
        if self.queries is not None:
            return self.queries(Path(name))
        if name not in self.names:
            known = [
                n
                for n, v in self.names.items()
                if hasattr(v, "__getitem__") and n[0] != "_" and not isinstance(v, (type, str))
            ]
            raise StudyFileError(
                f"{self.path} defines no {name!r} for --query: it has {', '.join(known) or 'none'}"
            )
        return self.names[name]

    def display_options(self) -> dict[str, Any]:
        """How to show examples; warns about names that cannot be used for that."""
        for why in self.other.values():
            say(f"warning: {why}")
        return self.shown

    def needs_recipe(self) -> Recipe:
        if self.recipe is None and self.path.suffix != ".py":
            raise StudyFileError(
                f"{self.path} does not say how to train, as this command needs: write a study.py "
                "that defines `study` and `recipe`"
            )
        if self.recipe is None:
            raise StudyFileError(
                f"{self.path} defines no `recipe`, but this command needs to train: add "
                "recipe = whence.Recipe(make_model, task, train, optimizer=..., batch_size=..., "
                "epochs=...)"
            )
        return self.recipe


def load_study(path: str | Path) -> StudyFile:
    """Load a study file, .py or .yaml. Raises StudyFileError if anything is wrong with it."""
    path = Path(path)
    if path.is_dir():
        inside = sorted(f.name for f in path.iterdir() if f.suffix in (".py", ".yaml", ".yml"))
        contents = f" (in it: {listed(inside)})" if inside else ""
        what = "is a run's folder" if (path / "run.json").exists() else "is a folder"
        raise StudyFileError(f"{path} {what}: give a study file, such as study.py{contents}")
    if not path.exists():
        raise StudyFileError(f"{path} does not exist: give a study file, such as study.py")
    if path.suffix in (".yaml", ".yml"):
        return _from_yaml(path)
    if path.suffix != ".py":
        raise StudyFileError(f"{path} is neither a .py nor a .yaml file: give a study file")
    lines = enumerate(path.read_text(errors="replace").splitlines(), 1)
    if todo := [n for n, text in lines if re.match(r"\w+ = \.\.\.\s*(#|$)", text)]:
        which = f"line{'s' * (len(todo) > 1)} {listed(todo)}"
        raise StudyFileError(f"{path} is not complete: replace the ... in {which}")
    names = vars(_imported(path))
    return StudyFile(
        path,
        _checked(path, names),
        names.get("query"),
        _recipe(path, names),
        *_display(path, names),
        dict(names),
    )


def _from_yaml(path: Path) -> StudyFile:
    from whence.integrations.study_yaml import read_study_yaml

    with chdir(path.absolute().parent):
        read = read_study_yaml(Path(path.name))
    return StudyFile(path, read.study, read.query, shown=read.display, queries=read.read_queries)


def _imported(path: Path) -> ModuleType:
    """The file as a module, importable by its name in processes that load data."""
    name = re.sub(r"\W", "_", path.stem)
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) != str(path.resolve()):
        name = f"study_file_{name}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    from whence.retrain.recording import before_training

    hook = before_training.set(lambda out: say(f"{path} trains a run first: {out}"))
    try:
        with chdir(folder):
            spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except SystemExit as end:
        raise StudyFileError(
            f"{_place(path, end)} ends the program (exit code {end.code}): put code that does not "
            'belong to the study under if __name__ == "__main__":'
        ) from end
    except SyntaxError as error:
        in_file = error.filename in (None, str(path.resolve()))
        where = str(path if in_file else error.filename)
        where += "" if error.lineno is None else f", line {error.lineno}"
        raise StudyFileError(f"{where}: {type(error).__name__}: {error.msg}") from error
    except BaseException as error:
        raise StudyFileError(f"{_place(path, error)}: {_message(path, error)}") from error
    finally:
        before_training.reset(hook)
    return module


def _message(path: Path, error: BaseException) -> str:
    """What an error in the study file says, with a hint where one helps."""
    message = " ".join(str(error).split())
    if isinstance(error, ImportError) and "relative import" in message:
        message += " (the file is not part of a package: import its neighbours by name)"
    if isinstance(error, WhenceError):
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _place(path: Path, error: BaseException) -> str:
    """The line of the file that led to an error, and the innermost line of the user's code."""
    frames = traceback.extract_tb(error.__traceback__)
    in_file = [f for f in frames if Path(f.filename).resolve() == path.resolve()]
    place = f"{path}, line {in_file[-1].lineno}" if in_file else str(path)
    users = [f for f in frames if not installed(f.filename)]
    if users and in_file and users[-1].filename != in_file[-1].filename:
        place += f" (at {users[-1].filename}, line {users[-1].lineno})"
    return place


def _display(path: Path, names: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """How to show examples; and which names cannot be used for that, and why."""
    from whence.present.examples import check_display_options

    shown: dict[str, Any] = {}
    other: dict[str, str] = {}
    for name in DISPLAY:
        value = names.get(name)
        try:
            check_display_options(**{name: value})
        except InvalidType as error:
            other[name] = f"{path}: {error} to show examples; it is ignored"
        else:
            shown |= {} if value is None else {name: value}
    return shown, other


def _checked(path: Path, names: dict[str, Any]) -> Study:
    from whence.study import Study

    if "study" not in names:
        studies = [name for name, value in names.items() if isinstance(value, Study)]
        hint = f" (rename {studies[0]!r})" if studies else ""
        raise StudyFileError(
            f"{path} defines no `study`{hint}: it needs a line "
            "study = whence.Study(model, task, train, runs=...)"
        )
    study = names["study"]
    if not isinstance(study, Study):
        raise StudyFileError(
            f"`study` in {path} has the type {type(study).__name__}: define a whence.Study"
        )
    return study


def _recipe(path: Path, names: dict[str, Any]) -> Recipe | None:
    from whence.retrain.recipe import Recipe

    recipe = names.get("recipe")
    if recipe is not None and not isinstance(recipe, Recipe):
        kind = type(recipe).__name__
        raise StudyFileError(f"`recipe` in {path} has the type {kind}: define a whence.Recipe")
    return recipe
